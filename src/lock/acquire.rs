//! Taking a lock: one attempt, and the one loop that waits.
//!
//! 1. Nothing waits past the deadline of the call: not the queue, not a pause, not an attempt.
//! 2. Only the first of a key's waiters in this process asks the server (see the queue); the time
//!    before costs no attempt.
//! 3. The first attempt is made in full; later ones look first with one plain read.
//! 4. Attempts follow the options' back-off. A release in this process ends the pause, and the
//!    attempt it leads to is free: it counts neither as a retry nor does it prolong anything.
//!    So does a look between two attempts that finds the key free: that is how a release in another
//!    process is noticed within milliseconds. And so does the backend, which watches the key for a
//!    first waiter that has waited for [`WATCH_AFTER`], if it can: then looks are rarer. Wake-ups are
//!    latency, never correctness: nothing waits for one.
//! 5. What was granted and is not handed out is released by the worker: after too late an answer,
//!    an unknown outcome, or a close meanwhile.
//!
//! `try_lock` does not queue and may overtake this process's waiters, as `try_lock` of a mutex does:
//! its `None` always means that the server said so, and one attempt cannot starve a queue.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Attempt, Grant, Heard, Holder, LostReason, RenewOutcome, Renewal, Watch};
use crate::cancel::{CancelToken, Subscription};
use crate::error::{ErrorCode, LockError, Result};
use crate::lock::LockClient;
use crate::lock::engine::Engine;
use crate::lock::guard::LockGuard;
use crate::lock::lease::{Lease, TOLERANCE, Terms};
use crate::lock::options::{Heartbeat, ResolvedOptions};
use crate::lock::registry::{GuardState, PendingRelease};
use crate::lock::report::{ReleaseErrorContext, ReleaseSource};
use crate::lock::worker;
use crate::model::lock_id::LockId;
use crate::model::time::Moment;
use crate::sync::Mutex;
use crate::waiting::{FREED, LISTENING, LOOK, QueuePlace};

/// One attempt.
pub(super) fn try_lock(
    client: &LockClient,
    key: &Arc<str>,
    options: &ResolvedOptions,
) -> Result<Option<LockGuard>> {
    let engine = client.engine();
    let token = client.token.and(&options.cancel);
    token.check()?;
    let _entered = engine.enter()?;
    let end = engine.call_deadline(Moment::NEVER);
    prepare(engine, options, end, &token)?;
    match attempt(client, key, options, end, &token)? {
        AttemptResult::Granted(guard) => Ok(Some(guard)),
        AttemptResult::Taken | AttemptResult::TooLate => Ok(None),
    }
}

/// Waits for the lock.
pub(super) fn lock(client: &LockClient, key: &Arc<str>, options: &ResolvedOptions) -> Result<LockGuard> {
    let engine = client.engine();
    let start = engine.clock.now();
    let end = options.timeout.map_or(Moment::NEVER, |timeout| start.after(timeout));
    let token = client.token.and(&options.cancel);
    token.check()?;
    let _entered = engine.enter()?;
    // Without any time, the wait says so better.
    if start < end {
        prepare(engine, options, end, &token)?;
    }
    let place = engine.queue.join(key);
    let mut wait = Waiter {
        engine,
        key,
        token: &token,
        place,
        registration: None,
        watch: None,
        watch_from: start.after(WATCH_AFTER),
        end,
        start,
        attempts: 0,
        conflict: None,
        holder: None,
    };
    wait.run(client, key, options)
}

/// What must be there before the first lease: threads that look after it, and a way to renew it.
fn prepare(engine: &Arc<Engine>, options: &ResolvedOptions, end: Moment, token: &CancelToken) -> Result<()> {
    engine.start()?;
    if options.heartbeat == Heartbeat::Off { Ok(()) } else { engine.reserve(end, token) }
}

/// Looks between two attempts start at this interval,
const FIRST_LOOK: Duration = Duration::from_millis(5);
/// and grow up to this one.
const LAST_LOOK: Duration = Duration::from_millis(250);

/// After so long a wait the backend is asked to watch the key: what is free again sooner is not
/// worth it.
const WATCH_AFTER: Duration = Duration::from_millis(30);
/// How soon a backend that could not watch is asked again.
const WATCH_AGAIN: Duration = Duration::from_secs(1);

struct Waiter<'a> {
    engine: &'a Arc<Engine>,
    key: &'a Arc<str>,
    token: &'a CancelToken,
    place: QueuePlace<Arc<str>>,
    /// Through which the token reaches this waiter; made when it first sleeps.
    registration: Option<Subscription>,
    /// The backend's watch over the key; looked after while this waiter is its key's first.
    watch: Option<Box<dyn Watch>>,
    /// When the backend is asked for it.
    watch_from: Moment,
    end: Moment,
    start: Moment,
    attempts: u64,
    /// What the last attempt that was answered met, if that was no holder: another session's lock,
    /// or a ttl that was over too soon.
    conflict: Option<LockError>,
    /// Who held the key at the last look, and when that was.
    holder: Option<(Holder, Moment)>,
}

impl Waiter<'_> {
    fn run(&mut self, client: &LockClient, key: &Arc<str>, options: &ResolvedOptions) -> Result<LockGuard> {
        let mut look = false;
        while !self.place.is_first() {
            // Whoever was before us most likely holds the key now.
            look = true;
            self.sleep(Moment::NEVER)?;
        }
        let mut turn = 0;
        loop {
            turn += 1;
            if let Some(guard) = self.try_once(client, key, options, look)? {
                return Ok(guard);
            }
            look = true;
            if turn >= options.max_attempts {
                return Err(self.timed_out(None));
            }
            let pause_end = self.engine.clock.now().after(options.delays.before(turn));
            if let Some(guard) = self.pause(client, key, options, pause_end)? {
                return Ok(guard);
            }
        }
    }

    /// The time between two attempts. A release in this process ends it with an attempt, and so does
    /// a look that finds the key free.
    fn pause(
        &mut self,
        client: &LockClient,
        key: &Arc<str>,
        options: &ResolvedOptions,
        end: Moment,
    ) -> Result<Option<LockGuard>> {
        loop {
            let now = self.engine.clock.now();
            if now >= end {
                return Ok(None);
            }
            let next_look = if options.wake_ups {
                self.watch_key(key, now);
                now.after(self.look_interval(now))
            } else {
                Moment::NEVER
            };
            let calls = self.sleep(end.min(next_look))?;
            let due = self.engine.clock.now() >= next_look && next_look < end;
            let found = match (calls & FREED != 0, due || calls & LISTENING != 0) {
                (true, _) => self.try_once(client, key, options, false)?,
                (false, true) => self.look(client, key, options)?,
                (false, false) => None,
            };
            if found.is_some() {
                return Ok(found);
            }
        }
    }

    /// How long until the next look: what has been waited for long is noticed a little later, so
    /// that many long waits cost little, and the hand-off stays within a sixteenth of the wait. Where
    /// the backend listens, looks are for what it does not hear (a lease that runs out, a client that
    /// calls nobody): within a quarter of the wait.
    fn look_interval(&self, now: Moment) -> Duration {
        let listens = self.watch.as_ref().is_some_and(|watch| watch.is_listening());
        (now.since(self.start) / if listens { 4 } else { 16 }).clamp(FIRST_LOOK, LAST_LOOK)
    }

    /// Has the backend watch the key, once the wait is a long one.
    fn watch_key(&mut self, key: &Arc<str>, now: Moment) {
        if self.watch.is_some() || now < self.watch_from {
            return;
        }
        self.watch_from = now.after(WATCH_AGAIN);
        let signal = Arc::clone(self.place.signal());
        let heard = move |what| {
            signal.notify(match what {
                Heard::Listening => LISTENING,
                Heard::Freed => FREED,
            });
        };
        self.watch = self.engine.backend.watch(key, Arc::new(heard));
    }

    /// A look that is no attempt, unless it finds the key free.
    fn look(
        &mut self,
        client: &LockClient,
        key: &Arc<str>,
        options: &ResolvedOptions,
    ) -> Result<Option<LockGuard>> {
        match self.is_held_by_another() {
            Ok(true) => Ok(None),
            Ok(false) => self.try_once(client, key, options, false),
            Err(error) => self.wait_or_fail(error.with_key(&**key), true).map(|()| None),
        }
    }

    /// One plain read, which remembers whom it saw.
    fn is_held_by_another(&mut self) -> Result<bool> {
        let engine = self.engine;
        let found = engine.backend.holder(self.key, engine.call_deadline(self.end), self.token)?;
        self.holder = found.map(|holder| (holder, engine.clock.now()));
        Ok(found.is_some())
    }

    /// One attempt, after a look if asked for.
    fn try_once(
        &mut self,
        client: &LockClient,
        key: &Arc<str>,
        options: &ResolvedOptions,
        look: bool,
    ) -> Result<Option<LockGuard>> {
        self.check()?;
        let contended = self.attempts > 0;
        self.attempts += 1;
        let free = !look
            || match self.is_held_by_another() {
                Ok(locked) => !locked,
                Err(error) => {
                    return self.wait_or_fail(error.with_key(&**key), contended).map(|()| None);
                }
            };
        if !free {
            self.conflict = None;
            return Ok(None);
        }
        match attempt(client, key, options, self.end, self.token) {
            Ok(AttemptResult::Granted(guard)) => return Ok(Some(guard)),
            Ok(AttemptResult::Taken) => self.conflict = None,
            Ok(AttemptResult::TooLate) => self.conflict = Some(too_late()),
            Err(error) => self.wait_or_fail(error, contended)?,
        }
        Ok(None)
    }

    /// Contention is waited out. A call that was cut short by our own deadline, after the key was
    /// seen taken, is the time-out of the whole. Everything else is the caller's.
    fn wait_or_fail(&mut self, error: LockError, contended: bool) -> Result<()> {
        // What may be held is never waited out.
        if error.is_outcome_unknown() {
            return Err(error);
        }
        if error.is_contention() {
            self.conflict = Some(error);
            return Ok(());
        }
        let ours = contended && self.engine.clock.now() >= self.end;
        if ours && error.code() == ErrorCode::NetworkTimeout {
            return Err(self.timed_out(Some(error)));
        }
        Err(error)
    }

    /// Sleeps until a signal, or that moment; an error if the wait as a whole is over.
    fn sleep(&mut self, until: Moment) -> Result<u8> {
        if self.registration.is_none() && !self.token.is_never() {
            let signal = Arc::clone(self.place.signal());
            self.registration = self.token.subscribe(move || signal.notify(LOOK));
        }
        self.check()?;
        let calls = self.place.signal().sleep_until(&self.engine.clock, until.min(self.end));
        self.check()?;
        Ok(calls)
    }

    fn check(&mut self) -> Result<()> {
        self.token.check()?;
        self.engine.check_open()?;
        if self.engine.clock.now() >= self.end { Err(self.timed_out(None)) } else { Ok(()) }
    }

    /// Who has the key, as far as it is known, as the end of a sentence.
    fn who_holds(&self, now: Moment) -> String {
        if let Some((fence, taken_by)) = self.engine.registry.held_here(self.key, now) {
            let me = std::thread::current();
            return if taken_by.id() == me.id() {
                format!(
                    "; this very thread took it under fencing token {fence} and has not released it: locks are not re-entrant, pass the guard on or drop it first"
                )
            } else {
                let name = taken_by.name().map(|name| format!(" ({name:?})")).unwrap_or_default();
                format!("; another thread of this client{name} took it under fencing token {fence}")
            };
        }
        let Some((Holder { fence: Some(fence), remaining, .. }, seen)) = self.holder else {
            return String::new();
        };
        let rest = remaining.unwrap_or_default().saturating_sub(now.since(seen)).as_secs_f64();
        format!(
            "; it is held under fencing token {fence}, and that lease ends in {rest:.1} s unless it is renewed"
        )
    }

    fn timed_out(&mut self, cause: Option<LockError>) -> LockError {
        let now = self.engine.clock.now();
        let waited = now.since(self.start).as_secs_f64();
        // Whatever was in the way says more than how the last call was cut short.
        let met = self.conflict.take();
        let attempts = match self.attempts {
            0 => "and no attempt was made: other threads of this process were before us".to_owned(),
            1 => "in 1 attempt".to_owned(),
            n => format!("in {n} attempts"),
        };
        let advice = match met {
            None if now < self.end => {
                "its retries are used up, raise max_retries or hold the lock for less time"
            }
            None => "raise timeout, or hold the lock for less time",
            Some(_) => "what was in the way is the cause of this error",
        };
        let error = LockError::new(ErrorCode::AcquisitionTimeout).with_message(format!(
            "the key could not be taken within {waited:.3} s, {attempts}: {advice}{}",
            self.who_holds(now)
        ));
        match met.or(cause) {
            Some(cause) => error.with_source(cause),
            None => error,
        }
    }
}

/// What one attempt came to.
enum AttemptResult {
    Granted(LockGuard),
    /// Somebody else holds the key.
    Taken,
    /// Granted, but so late that the lease could not be trusted; it was let go.
    TooLate,
}

/// Why a grant was let go, for whoever waited in vain.
fn too_late() -> LockError {
    LockError::new(ErrorCode::NetworkTimeout).with_message(
        "the key was granted, but most of the ttl was over when the answer came: raise the ttl, or see what slows the server down",
    )
}

/// Asks the server once, by `end` at the latest.
fn attempt(
    client: &LockClient,
    key: &Arc<str>,
    options: &ResolvedOptions,
    end: Moment,
    token: &CancelToken,
) -> Result<AttemptResult> {
    let engine = client.engine();
    let sent = engine.clock.now();
    let Some(granted) = request(engine, key, options.ttl, end, token)? else {
        return Ok(AttemptResult::Taken);
    };
    let Some((sent, granted)) = with_time_left(engine, key, options.ttl, end, sent, granted) else {
        return Ok(AttemptResult::TooLate);
    };
    let Grant { acquired: granted, version } = granted;
    let now = engine.clock.now();
    let state = Arc::new(GuardState {
        id: engine.registry.next_guard(),
        key: Arc::clone(key),
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
        engine.hand_to_worker(release_of_unguarded(engine, key, &state.lock_id, over_at));
        engine.check_open()?;
    }
    Ok(AttemptResult::Granted(LockGuard::new(Arc::clone(&client.handle), state)))
}

/// One acquire under an id of our own. After an unknown outcome the error carries that id, and the
/// worker releases it until the lease is surely over.
pub(super) fn request(
    engine: &Arc<Engine>,
    key: &str,
    ttl: Duration,
    end: Moment,
    token: &CancelToken,
) -> Result<Option<Grant>> {
    let lock_id = LockId::generate()?;
    let deadline = engine.call_deadline(end);
    let attempt = Attempt { key, lock_id: lock_id.as_str(), ttl, deadline };
    // A request that has reached the server may still wait there, for as long as it may.
    let may_last = engine.backend.operation_timeout().saturating_add(ttl).saturating_add(TOLERANCE);
    worker::change(may_last, || engine.backend.grant(&attempt, token)).map_err(|error| {
        let mut error = error.with_key(key);
        if error.lock_id().is_none() {
            error = error.with_lock_id(lock_id.as_str());
        }
        if error.is_outcome_unknown() {
            let id = error.lock_id().unwrap_or(lock_id.as_str());
            let over_at = engine.clock.now().after(may_last);
            let mut pending = release_of_unguarded(engine, key, id, over_at);
            pending.may_arrive = true;
            // For a single acquire this is the first time that a thread is needed. Without one the
            // error still says what may be held, and until when.
            if engine.start().is_ok() {
                engine.hand_to_worker(pending);
            }
        }
        error
    })
}

/// The grant, if at least half of its time is left; otherwise what one extend makes of it. A lease
/// that is not surely held is let go, and waiting goes on as after contention.
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
    let answer = worker::change(ttl, || engine.backend.prolong(&lease, engine.call_deadline(end)));
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
            engine.hand_to_worker(release_of_unguarded(engine, key, &granted.acquired.lock_id, over_at));
            None
        }
    }
}

/// A lease that nobody has a guard for.
fn release_of_unguarded(engine: &Engine, key: &str, lock_id: &str, over_at: Moment) -> PendingRelease {
    PendingRelease {
        context: ReleaseErrorContext {
            key: key.to_owned(),
            lock_id: lock_id.to_owned(),
            source: ReleaseSource::Worker,
        },
        handler: engine.on_release_error.clone(),
        min_hold_end: engine.clock.now(),
        known: None,
        lease_end: over_at,
        over_at,
        may_arrive: false,
        reported: false,
        tries: 0,
        last_error: None,
    }
}
