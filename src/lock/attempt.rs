//! One attempt to take a lock, and what is done with a grant that nobody gets.
//!
//! What was granted and is not handed out is released by the worker: after too late an answer, an
//! unknown outcome, or a close meanwhile.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Attempt, Grant, LockBackend, LostReason, PermitAttempt, RenewOutcome, Renewal};
use crate::cancel::CancelToken;
use crate::error::Result;
use crate::lock::backend_call::change;
use crate::lock::background;
use crate::lock::engine::{Engine, Handle};
use crate::lock::guard::LockGuard;
use crate::lock::lease::{Lease, Terms};
use crate::lock::options::{Heartbeat, ResolvedOptions};
use crate::lock::registry::GuardState;
use crate::model::key::Key;
use crate::model::lock_id::LockId;
use crate::model::time::{Moment, TOLERANCE};
use crate::sync::Mutex;

/// One call of `lock`, `try_lock` or a semaphore's `acquire`: who asks, and for what.
#[derive(Clone)]
pub(super) struct LockCall {
    pub(super) handle: Arc<Handle>,
    /// The key, or the name of a semaphore.
    pub(super) key: Arc<str>,
    /// How many permits the semaphore has, if one of them is asked for.
    pub(super) permits: Option<u32>,
    pub(super) options: ResolvedOptions,
    /// Fires with the client's token and with that of the options.
    pub(super) token: CancelToken,
}

/// What one attempt came to.
pub(super) enum AttemptResult {
    Granted(LockGuard),
    /// Another holder has the key.
    Taken,
    /// Granted, but so late that the lease could not be trusted; it was released.
    TooLate,
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

    /// One attempt. It does not queue and may overtake this process's waiters, as `try_lock` of a mutex
    /// does: its `None` always means that the server said so, and one attempt cannot starve a queue.
    pub(super) fn try_lock(&self) -> Result<Option<LockGuard>> {
        self.token.check()?;
        let _entered = self.engine().enter()?;
        let end = self.engine().call_deadline(Moment::NEVER);
        self.prepare(end)?;
        match self.attempt(end)? {
            AttemptResult::Granted(guard) => Ok(Some(guard)),
            AttemptResult::Taken | AttemptResult::TooLate => Ok(None),
        }
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
    pub(super) fn attempt(&self, end: Moment) -> Result<AttemptResult> {
        let Self { handle, key, permits, options, token } = self;
        let engine = handle.engine();
        let sent = engine.clock.now();
        let answer = match permits {
            None => request(engine, key, options.ttl, end, token)?.map(|grant| (Arc::clone(key), grant)),
            Some(limit) => request_permit(engine, (key, *limit), options.ttl, end, token)?,
        };
        let Some((key, granted)) = answer else { return Ok(AttemptResult::Taken) };
        let Some((sent, granted)) = with_time_left(engine, &key, options.ttl, end, sent, granted) else {
            return Ok(AttemptResult::TooLate);
        };
        let Grant { acquired: granted, version } = granted;
        let now = engine.clock.now();
        let state = Arc::new(GuardState {
            id: engine.registry.next_guard(),
            key,
            lock_id: granted.lock_id.into_boxed_str(),
            fence: granted.fence,
            min_hold_end: now.after(options.min_hold),
            lease: Mutex::new(Lease::new(&Terms {
                sent,
                ttl: options.ttl,
                expires_at_ms: granted.expires_at_ms,
                version,
                heartbeat: options.heartbeat,
                hold_until: options.max_hold.map_or(Moment::NEVER, |max| now.after(max)),
            })),
            lost: CancelToken::new(),
            on_lost: options.on_lost.clone(),
            on_release_error: options.on_release_error.clone().or_else(|| engine.on_release_error.clone()),
            taken_by: std::thread::current(),
        });
        if !engine.registry.register(&state) {
            let over_at = now.after(options.ttl).after(TOLERANCE);
            engine.hand_to_worker(engine.pending_release(&state.key, &state.lock_id, over_at));
            engine.check_open()?;
        }
        Ok(AttemptResult::Granted(LockGuard::new(Arc::clone(handle), state)))
    }
}

/// One acquire under an id of our own. See [`under_own_id`].
pub(super) fn request(
    engine: &Arc<Engine>,
    key: &str,
    ttl: Duration,
    end: Moment,
    token: &CancelToken,
) -> Result<Option<Grant>> {
    under_own_id(engine, key, ttl, |lock_id| {
        let attempt = Attempt { key, lock_id, ttl, deadline: engine.call_deadline(end) };
        engine.backend.grant(&attempt, token)
    })
    .map_err(|error| error.with_key(key))
}

/// The same for any permit of a semaphore; with its key.
fn request_permit(
    engine: &Arc<Engine>,
    (semaphore, limit): (&str, u32),
    ttl: Duration,
    end: Moment,
    token: &CancelToken,
) -> Result<Option<(Arc<str>, Grant)>> {
    let name = Key::new(semaphore)?;
    let answer = under_own_id(engine, name.semaphore().as_str(), ttl, |lock_id| {
        let deadline = engine.call_deadline(end);
        let attempt = PermitAttempt { semaphore, limit, lock_id, ttl, deadline };
        engine.backend.grant_permit(&attempt, token)
    })
    .map_err(|error| error.with_key(semaphore))?;
    Ok(answer.map(|permit| (name.permit(permit.number).as_str().into(), permit.grant)))
}

/// A request under an id of our own. After an unknown outcome the error carries that id, and the
/// worker releases it until the lease is surely over.
fn under_own_id<T>(
    engine: &Arc<Engine>,
    key: &str,
    ttl: Duration,
    ask: impl FnOnce(&str) -> Result<T>,
) -> Result<T> {
    let lock_id = LockId::generate()?;
    // A request that has reached the server may still wait there, for as long as it may.
    let may_last = engine.backend.operation_timeout().saturating_add(ttl).saturating_add(TOLERANCE);
    change(may_last, || ask(lock_id.as_str())).map_err(|mut error| {
        if error.lock_id().is_none() {
            error = error.with_lock_id(lock_id.as_str());
        }
        if error.is_outcome_unknown() {
            let id = error.lock_id().unwrap_or(lock_id.as_str());
            let over_at = engine.clock.now().after(may_last);
            let mut pending = engine.pending_release(key, id, over_at);
            pending.may_arrive = true;
            // For a single acquire this is the first time that a thread is needed. Without one the
            // error still says what may be held, and until when.
            if background::start(engine).is_ok() {
                engine.hand_to_worker(pending);
            }
        }
        error
    })
}

/// The grant, if at least half of its time is left; otherwise what one extend makes of it. A lease
/// that is not surely held is released, and waiting goes on as after contention.
fn with_time_left(
    engine: &Arc<Engine>,
    key: &str,
    ttl: Duration,
    end: Moment,
    sent: Moment,
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
            let over_at = engine.clock.now().after(ttl).after(TOLERANCE);
            engine.hand_to_worker(engine.pending_release(key, &granted.acquired.lock_id, over_at));
            None
        }
    }
}
