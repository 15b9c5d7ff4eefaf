//! One attempt to take a lock, and what is done with a grant that nobody gets.
//!
//! What was granted and is not handed out is released by the worker: after too late an answer, an
//! unknown outcome, or a close meanwhile.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::backend::{
    Attempt, AttemptAll, Grant, GrantAll, Holder, Label, LockBackend, LockEnding, LockKind, LostReason,
    PermitAttempt, RenewOutcome, Renewal, SharedAttempt, TurnAttempt,
};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::lock::backend_call::change;
use crate::lock::background;
use crate::lock::course::{Course, failed};
use crate::lock::engine::{Engine, Handle};
use crate::lock::lease::{Lease, Terms};
use crate::lock::lease_set::LeaseSet;
use crate::lock::options::{Heartbeat, ResolvedOptions};
use crate::lock::registry::GuardState;
use crate::lock::turns::{self, intent};
use crate::model::key::Key;
use crate::model::lock_id::LockId;
use crate::model::time::{Moment, TOLERANCE};
use crate::sync::Mutex;
use crate::waiting::Ticket;

/// One call of `lock`, `try_lock` or a semaphore's `acquire`: who asks, and for what.
#[derive(Clone)]
pub(super) struct LockCall {
    pub(super) handle: Arc<Handle>,
    /// The key, or the name of a semaphore.
    pub(super) key: Arc<str>,
    pub(super) kind: LockKind,
    /// How many permits the semaphore has, if one of them is asked for.
    pub(super) permits: Option<u32>,
    /// Whether the key is asked for as one of its readers.
    pub(super) shared: bool,
    /// Since when it is asked for.
    pub(super) since: Moment,
    /// Its place in line, if it is to be served in order,
    pub(super) ticket: Option<Ticket>,
    /// and who comes next in this process.
    pub(super) next: Option<Ticket>,
    /// Where several keys are asked for at once: those after the first, by their bytes.
    pub(super) other_keys: Vec<Arc<str>>,
    pub(super) options: ResolvedOptions,
    /// Fires with the client's token and with that of the options.
    pub(super) token: CancelToken,
}

/// What one attempt came to.
pub(super) enum AttemptResult {
    Granted(Leases),
    /// Another holder has a key: which of those that were asked for, and who, as far as it is known.
    Taken {
        index: usize,
        holder: Option<Holder>,
    },
    /// Granted, but so late that the lease could not be trusted; it was released.
    TooLate,
}

/// What one attempt was granted: a lease for each key that it asked for.
pub(super) struct Leases {
    pub(super) first: Arc<GuardState>,
    pub(super) others: Vec<Arc<GuardState>>,
}

impl Leases {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<GuardState>> {
        std::iter::once(&self.first).chain(&self.others)
    }
}

impl LockCall {
    pub(super) fn engine(&self) -> &Arc<Engine> {
        self.handle.engine()
    }

    /// What it queues for in this process. A semaphore is another thing than the key of its name.
    pub(super) fn queue_key(&self) -> Result<Arc<str>> {
        Ok(match self.permits {
            None => Arc::clone(&self.key),
            Some(_) => Key::new(&self.key)?.semaphore().as_str().into(),
        })
    }

    /// What the holder says of itself.
    pub(super) fn label(&self) -> Label<'_> {
        self.engine().label(self.options.note.as_deref())
    }

    /// The keys that it asks for, in order.
    pub(super) fn keys(&self) -> impl Iterator<Item = &Arc<str>> {
        std::iter::once(&self.key).chain(&self.other_keys)
    }

    /// Begins a wait: since now, and with a ticket of its own if it is to be served in order.
    pub(super) fn begin_wait(&mut self, now: Moment) -> Result<()> {
        self.since = now;
        self.ticket = turns::ticket(&self.options, now)?;
        Ok(())
    }

    /// One attempt. It does not queue and may overtake this process's waiters, as `try_lock` of a mutex
    /// does: its `None` always means that the server said so, and one attempt cannot starve a queue.
    pub(super) fn try_lock(&self) -> Result<Option<Leases>> {
        self.token.check()?;
        let _entered = self.engine().enter()?;
        let course = self.begin();
        let end = self.engine().call_deadline(Moment::NEVER);
        let answer = self.prepare(end).and_then(|()| self.attempt(end, (&course, 1)));
        match answer {
            Ok(AttemptResult::Granted(leases)) => Ok(Some(leases)),
            Ok(AttemptResult::Taken { .. } | AttemptResult::TooLate) => {
                course.not_granted(self.engine().told(), 1, LockEnding::Busy);
                Ok(None)
            }
            Err(error) => {
                course.not_granted(self.engine().told(), 1, failed(&error));
                Err(error)
            }
        }
    }

    /// From here on it is told what becomes of this call.
    pub(super) fn begin(&self) -> Arc<Course> {
        let engine = self.engine();
        let keys = (&self.key, 1 + self.other_keys.len());
        Course::begin(engine.told(), self.kind, keys, (engine.owner.clone(), self.options.note.clone()))
    }

    /// What must be there before the first lease: threads that look after it, and a way to renew it.
    pub(super) fn prepare(&self, end: Moment) -> Result<()> {
        background::start(self.engine())?;
        if self.options.heartbeat == Heartbeat::Off {
            Ok(())
        } else {
            self.engine().reserve(end, &self.token)
        }
    }

    /// Asks the server once, by `end` at the latest.
    pub(super) fn attempt(&self, end: Moment, course: (&Arc<Course>, u64)) -> Result<AttemptResult> {
        if !self.other_keys.is_empty() {
            return self.attempt_all(end, course);
        }
        let Self { handle, key, permits, ticket, next, options, token, .. } = self;
        let (engine, label) = (handle.engine(), self.label());
        let sent = engine.clock.now();
        let asked = (options.ttl, label);
        let answer = match permits {
            Some(limit) => request_permit(engine, (key, *limit), asked, end, token)?,
            None if self.shared => {
                let waited = sent.since(self.since);
                request_shared(engine, (key, waited), asked, end, token)?
                    .map(|grant| (Arc::clone(key), grant))
            }
            None => {
                let turn = ticket.as_ref().map(|ticket| (ticket, next.as_ref()));
                request(engine, key, turn, asked, end, token)?.map(|grant| (Arc::clone(key), grant))
            }
        };
        let Some((key, grant)) = answer else {
            return Ok(AttemptResult::Taken { index: 0, holder: None });
        };
        let leases = self.hold(&key, (end, sent), grant, course)?;
        Ok(leases.map_or(AttemptResult::TooLate, AttemptResult::Granted))
    }

    /// The lease that a request was granted that was sent then; `None` if the grant came too late.
    pub(super) fn hold(
        &self,
        key: &Arc<str>,
        (end, sent): (Moment, Moment),
        grant: Grant,
        course: (&Arc<Course>, u64),
    ) -> Result<Option<Leases>> {
        let Some(granted) =
            with_time_left(self.engine(), key, self.shared, self.options.ttl, (end, sent), grant)
        else {
            return Ok(None);
        };
        let first = self.guard_state(key, granted, CancelToken::new(), None);
        self.register(Leases { first, others: Vec::new() }, course).map(Some)
    }

    /// The same for several keys. Their leases are one set, so that they are lost together.
    fn attempt_all(&self, end: Moment, course: (&Arc<Course>, u64)) -> Result<AttemptResult> {
        let engine = self.engine();
        let sent = engine.clock.now();
        let keys: Vec<&Arc<str>> = self.keys().collect();
        let grants = match request_all(engine, &keys, (self.options.ttl, self.label()), end, &self.token)? {
            Ok(grants) => grants,
            Err((index, holder)) => return Ok(AttemptResult::Taken { index, holder: Some(holder) }),
        };
        let mut granted = Vec::with_capacity(grants.len());
        let mut late = false;
        for (key, grant) in keys.into_iter().zip(grants) {
            // Once one of them cannot be trusted, the others are not asked for again.
            if late {
                release_later(engine, key, &grant.acquired.lock_id, self.options.ttl);
                continue;
            }
            match with_time_left(engine, key, false, self.options.ttl, (end, sent), grant) {
                Some(lease) => granted.push((key, lease)),
                None => late = true,
            }
        }
        if late {
            for (key, (_, grant)) in granted {
                release_later(engine, key, &grant.acquired.lock_id, self.options.ttl);
            }
            return Ok(AttemptResult::TooLate);
        }
        let (set, lost) = (Arc::new(LeaseSet::new()), CancelToken::new());
        let states: Vec<_> = granted
            .into_iter()
            .map(|(key, lease)| self.guard_state(key, lease, lost.clone(), Some(Arc::clone(&set))))
            .collect();
        set.is_of(&states);
        let mut states = states.into_iter();
        match states.next() {
            Some(first) => {
                self.register(Leases { first, others: states.collect() }, course).map(AttemptResult::Granted)
            }
            None => Ok(AttemptResult::TooLate),
        }
    }

    fn guard_state(
        &self,
        key: &Arc<str>,
        (sent, grant): (Moment, Grant),
        lost: CancelToken,
        set: Option<Arc<LeaseSet<GuardState>>>,
    ) -> Arc<GuardState> {
        let (engine, options) = (self.engine(), &self.options);
        let Grant { acquired: granted, version } = grant;
        let now = engine.clock.now();
        Arc::new(GuardState {
            id: engine.registry.next_guard(),
            key: Arc::clone(key),
            lock_id: granted.lock_id.into_boxed_str(),
            fence: granted.fence,
            shared: self.shared,
            min_hold_end: now.after(options.min_hold),
            lease: Mutex::new(Lease::new(&Terms {
                sent,
                ttl: options.ttl,
                expires_at_ms: granted.expires_at_ms,
                version,
                heartbeat: options.heartbeat,
                hold_until: options.max_hold.map_or(Moment::NEVER, |max| now.after(max)),
            })),
            lost,
            set,
            on_lost: options.on_lost.clone(),
            on_release_error: options.on_release_error.clone().or_else(|| engine.on_release_error.clone()),
            taken_by: std::thread::current(),
            holding: OnceLock::new(),
        })
    }

    /// Takes the leases into the registry. After a close nobody gets them: what was there before it was
    /// released by it, and the rest is released here.
    fn register(&self, leases: Leases, (course, attempts): (&Arc<Course>, u64)) -> Result<Leases> {
        let engine = self.engine();
        // Told before anybody can lose or end them.
        let holding = course.granted(engine.told(), attempts);
        for state in leases.iter() {
            state.holding.get_or_init(|| Arc::clone(&holding));
        }
        let mut closed = false;
        for state in leases.iter() {
            if !engine.registry.register(state) {
                closed = true;
                release_later(engine, &state.key, &state.lock_id, self.options.ttl);
            }
        }
        if closed {
            holding.end(engine.told(), LockEnding::Lost(LostReason::Closed));
            engine.check_open()?;
        }
        Ok(leases)
    }
}

/// Has the worker release a lease that was granted and that nobody gets.
fn release_later(engine: &Arc<Engine>, key: &str, lock_id: &str, ttl: Duration) {
    let over_at = engine.clock.now().after(ttl).after(TOLERANCE);
    engine.hand_to_worker(engine.pending_release(key, lock_id, over_at));
}

/// Has the worker release what a request of unknown outcome may still take, until that would be over.
fn release_what_may_arrive(engine: &Arc<Engine>, key: &str, lock_id: &str, may_last: Duration) {
    let mut pending = engine.pending_release(key, lock_id, engine.clock.now().after(may_last));
    pending.may_arrive = true;
    // For a single acquire this is the first time that a thread is needed. Without one the error
    // still says what may be held, and until when.
    if background::start(engine).is_ok() {
        engine.hand_to_worker(pending);
    }
}

/// For how long what was asked for may be held: a request that has reached the server may still wait
/// there, for as long as it may.
fn may_last(engine: &Engine, ttl: Duration) -> Duration {
    engine.backend.operation_timeout().saturating_add(ttl).saturating_add(TOLERANCE)
}

/// One acquire of several keys, all or none. After an unknown outcome the worker releases all of them
/// until their leases are surely over. Otherwise the place of a key in the way, and who holds it.
fn request_all(
    engine: &Arc<Engine>,
    keys: &[&Arc<str>],
    (ttl, label): (Duration, Label<'_>),
    end: Moment,
    token: &CancelToken,
) -> Result<Result<Vec<Grant>, (usize, Holder)>> {
    let ids = keys.iter().map(|_| LockId::generate()).collect::<Result<Vec<_>>>()?;
    let leases: Vec<(&str, &str)> = keys.iter().zip(&ids).map(|(key, id)| (&***key, id.as_str())).collect();
    let attempt = AttemptAll { leases: &leases, ttl, deadline: engine.call_deadline(end), label };
    let may_last = may_last(engine, ttl);
    let answer = change(may_last, || match engine.backend.grant_all(&attempt, token)? {
        GrantAll::Granted(grants) if grants.len() != keys.len() => Err(LockError::new(ErrorCode::Internal)
            .with_message("the backend granted another number of keys than it was asked for")
            .with_unknown_outcome(may_last)),
        answer => Ok(answer),
    });
    match answer {
        Ok(GrantAll::Granted(grants)) => Ok(Ok(grants)),
        Ok(GrantAll::Held { index, holder }) => Ok(Err((index.min(keys.len() - 1), holder))),
        Err(error) => {
            if error.is_outcome_unknown() {
                for (key, lock_id) in leases {
                    release_what_may_arrive(engine, key, lock_id, may_last);
                }
            }
            Err(error)
        }
    }
}

/// One acquire under an id of our own, see [`under_own_id`]; in turn, if there is a ticket, and with who comes after it in
/// this process.
pub(super) fn request(
    engine: &Arc<Engine>,
    key: &str,
    turn: Option<(&Ticket, Option<&Ticket>)>,
    (ttl, label): (Duration, Label<'_>),
    end: Moment,
    token: &CancelToken,
) -> Result<Option<Grant>> {
    under_own_id(engine, key, ttl, |lock_id| {
        let attempt = Attempt { key, lock_id, ttl, deadline: engine.call_deadline(end), label };
        let Some((ticket, next)) = turn else { return engine.backend.grant(&attempt, token) };
        let now = engine.clock.now();
        let next = next.map(|next| intent(next, key, now));
        engine.backend.grant_in_turn(&TurnAttempt::new(attempt, intent(ticket, key, now), next), token)
    })
    .map_err(|error| error.with_key(key))
}

/// The same for any permit of a semaphore; with its key.
fn request_permit(
    engine: &Arc<Engine>,
    (semaphore, limit): (&str, u32),
    (ttl, label): (Duration, Label<'_>),
    end: Moment,
    token: &CancelToken,
) -> Result<Option<(Arc<str>, Grant)>> {
    let name = Key::new(semaphore)?;
    let answer = under_own_id(engine, name.semaphore().as_str(), ttl, |lock_id| {
        let deadline = engine.call_deadline(end);
        let attempt = PermitAttempt { semaphore, limit, lock_id, ttl, deadline, label };
        engine.backend.grant_permit(&attempt, token)
    })
    .map_err(|error| error.with_key(semaphore))?;
    Ok(answer.map(|permit| (name.permit(permit.number).as_str().into(), permit.grant)))
}

/// A request under an id of our own. After an unknown outcome the error carries that id, and the
/// worker releases it until the lease is surely over.
pub(super) fn under_own_id<T>(
    engine: &Arc<Engine>,
    key: &str,
    ttl: Duration,
    ask: impl FnOnce(&str) -> Result<T>,
) -> Result<T> {
    under_id(engine, key, ttl, &LockId::generate()?, ask)
}

/// The same for a reader of the key, which has waited for so long.
fn request_shared(
    engine: &Arc<Engine>,
    (key, waited): (&str, Duration),
    (ttl, label): (Duration, Label<'_>),
    end: Moment,
    token: &CancelToken,
) -> Result<Option<Grant>> {
    under_id(engine, key, ttl, &LockId::generate_shared()?, |lock_id| {
        let attempt = Attempt { key, lock_id, ttl, deadline: engine.call_deadline(end), label };
        engine.backend.grant_shared(&SharedAttempt::new(attempt, waited), token)
    })
    .map_err(|error| error.with_key(key))
}

fn under_id<T>(
    engine: &Arc<Engine>,
    key: &str,
    ttl: Duration,
    lock_id: &LockId,
    ask: impl FnOnce(&str) -> Result<T>,
) -> Result<T> {
    let may_last = may_last(engine, ttl);
    change(may_last, || ask(lock_id.as_str())).map_err(|mut error| {
        if error.lock_id().is_none() {
            error = error.with_lock_id(lock_id.as_str());
        }
        if error.is_outcome_unknown() {
            release_what_may_arrive(engine, key, error.lock_id().unwrap_or(lock_id.as_str()), may_last);
        }
        error
    })
}

/// The grant, if at least half of its time is left; otherwise what one extend makes of it. A lease
/// that is not surely held is released, and waiting goes on as after contention.
fn with_time_left(
    engine: &Arc<Engine>,
    key: &str,
    shared: bool,
    ttl: Duration,
    (end, sent): (Moment, Moment),
    mut granted: Grant,
) -> Option<(Moment, Grant)> {
    let now = engine.clock.now();
    if sent.after(ttl).since(now) >= ttl / 2 {
        return Some((sent, granted));
    }
    let lease = Renewal {
        key,
        lock_id: &granted.acquired.lock_id,
        fence: granted.acquired.fence,
        version: granted.version,
        ttl,
        shared,
    };
    let answer = change(ttl, || engine.backend.prolong(&lease, engine.call_deadline(end)));
    let late = engine.clock.now() >= now.after(ttl);
    match answer {
        Ok(RenewOutcome::Renewed { expires_at_ms, version }) if !late => {
            (granted.acquired.expires_at_ms, granted.version) = (expires_at_ms, version);
            Some((now, granted))
        }
        Ok(RenewOutcome::Lost(LostReason::Expired | LostReason::RowMissing)) => None,
        // Taken over: perhaps by a late copy of our own request, which nobody else lets go.
        Ok(_) | Err(_) => {
            release_later(engine, key, &granted.acquired.lock_id, ttl);
            None
        }
    }
}

/// Why a grant was released, for whoever waited in vain.
pub(super) fn too_late() -> LockError {
    LockError::new(ErrorCode::NetworkTimeout).with_message(
        "the key was granted, but most of the ttl was over when the answer came: raise the ttl, or see what slows the server down",
    )
}
