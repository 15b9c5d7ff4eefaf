//! Waiting for a lock, or for several at once: the one loop.
//!
//! 1. Nothing waits past the deadline of the call: not the queue, not a pause, not an attempt.
//! 2. Only the first of a key's waiters in this process asks the server (see the queue); the time
//!    before costs no attempt.
//! 3. The first attempt is made in full; later ones look first with one plain read.
//! 4. Attempts follow the options' backoff. A release in this process ends the pause, and the
//!    attempt it leads to is free: it counts neither as a retry nor does it prolong anything.
//!    So does a look between two attempts that finds the key free: that is how a release in another
//!    process is noticed within milliseconds. And so does the backend, which watches the key for a
//!    first waiter that has waited for [`WATCH_AFTER`], if it can: then looks are rarer. Wake-ups are
//!    latency, never correctness: nothing waits for one.
//! 5. Whoever wants several keys waits for the one that is in the way, and stands in the queue of that
//!    one alone: a place at the head of a free key's queue would make others time out. Nothing is held
//!    meanwhile.

use std::sync::Arc;
use std::thread::Thread;
use std::time::Duration;

use crate::backend::{Heard, Holder, Intent, LockBackend, Watch};
use crate::cancel::Subscription;
use crate::error::{ErrorCode, LockError, Result};
use crate::lock::attempt::{AttemptResult, Leases, LockCall};
use crate::lock::backend_call::ask;
use crate::lock::course::{Course, failed};
use crate::lock::engine::Engine;
use crate::model::fence::Fence;
use crate::model::lock_id::LockId;
use crate::model::time::Moment;
use crate::threads::catch_panic;
use crate::waiting::{FREED, LISTENING, LOOK, QueuePlace};

/// Waits for the lock.
pub(super) fn lock(call: LockCall) -> Result<Leases> {
    let start = call.engine().clock.now();
    let end = call.options.timeout.map_or(Moment::NEVER, |timeout| start.after(timeout));
    call.token.check()?;
    let handle = Arc::clone(&call.handle);
    let _entered = handle.engine().enter()?;
    let course = call.begin();
    let mut waiter = None;
    let result = wait(call, (start, end), &course, &mut waiter);
    if let Err(error) = &result {
        let attempts = waiter.map_or(0, |waiter| waiter.attempts);
        course.not_granted(handle.engine().told(), attempts, failed(error));
    }
    result
}

fn wait(
    call: LockCall,
    (start, end): (Moment, Moment),
    course: &Arc<Course>,
    waiter: &mut Option<Waiter>,
) -> Result<Leases> {
    // Without any time, the wait says so better.
    if start < end {
        call.prepare(end)?;
    }
    let several = !call.other_keys.is_empty();
    let (waits_for, place) = if several {
        (None, call.engine().queue.join(&Arc::from(own_queue(call.engine()))))
    } else {
        (Some(Arc::clone(&call.key)), call.engine().queue.join(&call.queue_key()?))
    };
    let waiter = waiter.insert(Waiter {
        course: Arc::clone(course),
        call,
        waits_for,
        place,
        moved: false,
        registration: None,
        watch: None,
        watch_from: start.after(WATCH_AFTER),
        end,
        start,
        attempts: 0,
        conflict: None,
        holder: None,
        intent: None,
    });
    let result = waiter.run();
    if result.is_ok() {
        waiter.withdraw();
    }
    result.map_err(|error| match &waiter.waits_for {
        // What is unknown is so of all keys.
        Some(key) if error.key().is_none() && !error.is_outcome_unknown() => error.with_key(&**key),
        _ => error,
    })
}

/// The queue of a waiter for several keys that does not know which one is in its way: nobody else's. No
/// key has this character, which is not in the normal form of Unicode.
fn own_queue(engine: &Engine) -> String {
    format!("\u{2126}{}", engine.registry.next_guard())
}

/// Looks between two attempts start at this interval,
const FIRST_LOOK: Duration = Duration::from_millis(5);
/// and grow up to this one.
const LAST_LOOK: Duration = Duration::from_millis(250);

/// How much longer than the pause after it a writer's announcement to readers counts.
const INTENT: Duration = Duration::from_secs(1);

/// After so long a wait the backend is asked to watch the key: what is free again sooner is not
/// worth it.
const WATCH_AFTER: Duration = Duration::from_millis(30);
/// How soon a backend that could not watch is asked again.
const WATCH_AGAIN: Duration = Duration::from_secs(1);

struct Waiter {
    course: Arc<Course>,
    call: LockCall,
    /// The key that is in the way; unknown to whoever wants several until one has refused it.
    waits_for: Option<Arc<str>>,
    place: QueuePlace<Arc<str>>,
    /// It has joined another key's queue since the last look.
    moved: bool,
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
    /// A writer's announcement to readers: its id, and until when it counts.
    intent: Option<(LockId, Moment)>,
}

impl Waiter {
    fn engine(&self) -> &Arc<Engine> {
        self.call.engine()
    }

    fn run(&mut self) -> Result<Leases> {
        let mut turn = 0;
        if self.call.shared {
            // Readers do not stand in each other's way: the first attempt is made out of turn, as `try_lock` does.
            turn = 1;
            if let Some(leases) = self.try_once(false)? {
                return Ok(leases);
            }
            if turn >= self.call.options.max_attempts {
                return Err(self.timed_out(None));
            }
        }
        // Whoever was before us most likely holds the key now.
        let mut look = self.take_turn()?;
        loop {
            turn += 1;
            if let Some(leases) = self.try_once(look)? {
                return Ok(leases);
            }
            look = true;
            if turn >= self.call.options.max_attempts {
                return Err(self.timed_out(None));
            }
            let pause_end = self.engine().clock.now().after(self.call.options.delays.before(turn));
            if let Some(leases) = self.pause(pause_end)? {
                return Ok(leases);
            }
        }
    }

    /// Sleeps until nobody of this process is before us. Whether anybody was.
    fn take_turn(&mut self) -> Result<bool> {
        let mut waited = false;
        while !self.place.is_first() {
            waited = true;
            self.sleep(Moment::NEVER)?;
        }
        Ok(waited)
    }

    /// Another key is in the way now: joins its queue instead, and waits for its turn there.
    fn wait_for_key(&mut self, index: usize) -> Result<()> {
        let Some(key) = self.call.keys().nth(index).cloned() else { return Ok(()) };
        if self.waits_for.as_ref() == Some(&key) {
            return Ok(());
        }
        // What tells of the old key must not outlive the place in its queue.
        (self.watch, self.registration, self.holder) = (None, None, None);
        self.withdraw();
        self.place = self.engine().queue.join(&key);
        self.waits_for = Some(key);
        self.take_turn()?;
        // It may have been released before we stood in its queue, where a release is heard.
        self.moved = true;
        Ok(())
    }

    /// The time between two attempts. A release in this process ends it with an attempt, and so does
    /// a look that finds the key free.
    fn pause(&mut self, end: Moment) -> Result<Option<Leases>> {
        loop {
            let now = self.engine().clock.now();
            if now >= end {
                return Ok(None);
            }
            // Without a key to look at there is only the next attempt.
            let next_look = if std::mem::take(&mut self.moved) {
                now
            } else if self.call.options.wake_ups && self.waits_for.is_some() {
                self.watch_key(now);
                let next = now.after(self.look_interval(now));
                self.announce(now, next.min(end));
                next
            } else {
                self.announce(now, end);
                Moment::NEVER
            };
            let calls = self.sleep(end.min(next_look))?;
            let due = self.engine().clock.now() >= next_look && next_look < end;
            let found = match (calls & FREED != 0, due || calls & LISTENING != 0) {
                (true, _) => self.try_once(false)?,
                (false, true) => self.look()?,
                (false, false) => None,
            };
            if found.is_some() {
                return Ok(found);
            }
        }
    }

    /// How long until the next look: what has been waited for long is noticed a little later, so
    /// that many long waits cost little, and the handoff stays within a sixteenth of the wait. Where
    /// the backend listens, looks are for what it does not hear (a lease that runs out, a client that
    /// calls nobody): within a quarter of the wait.
    fn look_interval(&self, now: Moment) -> Duration {
        let listens = self.watch.as_ref().is_some_and(|watch| watch.is_listening());
        (now.since(self.start) / if listens { 4 } else { 16 }).clamp(FIRST_LOOK, LAST_LOOK)
    }

    /// Has the backend watch the key, once the wait is a long one.
    fn watch_key(&mut self, now: Moment) {
        if self.watch.is_some() || now < self.watch_from {
            return;
        }
        let Some(key) = &self.waits_for else { return };
        self.watch_from = now.after(WATCH_AGAIN);
        let signal = Arc::clone(self.place.signal());
        let heard = move |what| {
            signal.notify(match what {
                Heard::Listening => LISTENING,
                Heard::Freed => FREED,
            });
        };
        self.watch = catch_panic(|| self.call.engine().backend.watch(key, Arc::new(heard))).flatten();
    }

    /// A look that is no attempt, unless it finds the key free.
    fn look(&mut self) -> Result<Option<Leases>> {
        match self.is_held_by_another() {
            Ok(true) => Ok(None),
            Ok(false) => self.try_once(false),
            Err(error) => self.wait_or_fail(error, true).map(|()| None),
        }
    }

    /// One plain read, which remembers whom it saw.
    fn is_held_by_another(&mut self) -> Result<bool> {
        let Some(key) = &self.waits_for else { return Ok(false) };
        let engine = self.call.engine();
        let deadline = engine.call_deadline(self.end);
        if let Some(limit) = self.call.permits {
            let (name, token) = (&self.call.key, &self.call.token);
            return Ok(ask(|| engine.backend.permits_in_use(name, limit, deadline, token))? >= limit);
        }
        let found = ask(|| engine.backend.holder(key, deadline, &self.call.token))?;
        self.holder = found.map(|holder| (holder, engine.clock.now()));
        // To ask as a reader is to look whether a writer is in the way.
        Ok(found.is_some_and(|holder| !(holder.shared && self.call.shared)))
    }

    /// Tells readers that share the key that a writer waits for it, until the end of this pause and for
    /// [`INTENT`] more. What fails only lets them go first.
    fn announce(&mut self, now: Moment, pause_end: Moment) {
        let readers = self.holder.is_some_and(|(holder, _)| holder.shared);
        let Some(key) = self.waits_for.as_ref().filter(|_| readers && !self.call.shared) else { return };
        if self.intent.as_ref().is_some_and(|(_, until)| pause_end.after(INTENT / 2) < *until) {
            return;
        }
        let id = match self.intent.take() {
            Some((id, _)) => id,
            None => match LockId::generate_shared() {
                Ok(id) => id,
                Err(_) => return,
            },
        };
        let engine = self.call.engine();
        let (until, waited) = (pause_end.after(INTENT), now.since(self.start));
        let intent = Intent::new(key, id.as_str(), waited, until.since(now));
        let said = ask(|| engine.backend.announce(&intent, engine.call_deadline(self.end)));
        match said {
            Ok(()) => self.intent = Some((id, until)),
            Err(error) => log::debug!("readers could not be told of a writer: {}", error.chain()),
        }
    }

    /// Lets the readers go on: the writer has the key, or waits no more.
    fn withdraw(&mut self) {
        let Some((id, _)) = self.intent.take() else { return };
        let engine = self.call.engine();
        let deadline = engine.call_deadline(self.end);
        if let Err(error) = ask(|| engine.backend.withdraw(id.as_str(), deadline)) {
            log::debug!("an announcement to readers ends by itself: {}", error.chain());
        }
    }

    /// One attempt, after a look if asked for.
    fn try_once(&mut self, look: bool) -> Result<Option<Leases>> {
        self.check()?;
        let contended = self.attempts > 0;
        self.attempts += 1;
        // To ask for a permit is to look for one first.
        let free = !look
            || self.call.permits.is_some()
            || match self.is_held_by_another() {
                Ok(locked) => !locked,
                Err(error) => {
                    return self.wait_or_fail(error, contended).map(|()| None);
                }
            };
        if !free {
            self.conflict = None;
            return Ok(None);
        }
        match self.call.attempt(self.end, (&self.course, self.attempts)) {
            Ok(AttemptResult::Granted(leases)) => return Ok(Some(leases)),
            Ok(AttemptResult::Taken { index, holder }) => {
                self.conflict = None;
                self.wait_for_key(index)?;
                if let Some(holder) = holder {
                    self.holder = Some((holder, self.engine().clock.now()));
                }
            }
            Ok(AttemptResult::TooLate) => self.conflict = Some(too_late()),
            Err(error) => self.wait_or_fail(error, contended)?,
        }
        Ok(None)
    }

    /// Contention is waited out. A call that was cut short by our own deadline, after the key was
    /// seen taken, is the timeout of the whole. Everything else is the caller's.
    fn wait_or_fail(&mut self, error: LockError, contended: bool) -> Result<()> {
        // What may be held is never waited out.
        if error.is_outcome_unknown() {
            return Err(error);
        }
        if error.is_contention() {
            self.conflict = Some(error);
            return Ok(());
        }
        let ours = contended && self.engine().clock.now() >= self.end;
        if ours && error.code() == ErrorCode::NetworkTimeout {
            return Err(self.timed_out(Some(error)));
        }
        Err(error)
    }

    /// Sleeps until a signal, or that moment; an error if the wait as a whole is over.
    fn sleep(&mut self, until: Moment) -> Result<u8> {
        if self.registration.is_none() && !self.call.token.is_never() {
            let signal = Arc::clone(self.place.signal());
            self.registration = self.call.token.subscribe(move || signal.notify(LOOK));
        }
        self.check()?;
        let calls = self.place.signal().sleep_until(&self.engine().clock, until.min(self.end));
        self.check()?;
        Ok(calls)
    }

    fn check(&mut self) -> Result<()> {
        self.call.token.check()?;
        self.engine().check_open()?;
        if self.engine().clock.now() >= self.end { Err(self.timed_out(None)) } else { Ok(()) }
    }

    /// Who has the key, as far as it is known, as the end of a sentence.
    fn who_holds(&self, now: Moment) -> String {
        if let Some(limit) = self.call.permits {
            let here = self.engine().registry.permits_held_here(&self.call.key, now);
            return format!("; the semaphore has {limit} permits, and this client holds {here} of them");
        }
        if let Some((fence, taken_by)) = self.held_here(now) {
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
        let Some((Holder { fence: Some(fence), remaining, shared }, seen)) = self.holder else {
            return String::new();
        };
        let rest = remaining.unwrap_or_default().saturating_sub(now.since(seen)).as_secs_f64();
        let held = if shared { "shared by readers" } else { "held" };
        format!(
            "; it is {held} under fencing token {fence}, and that lease ends in {rest:.1} s unless it is renewed"
        )
    }

    /// Under which fence this client holds the key that is in the way itself, and the thread that took it.
    fn held_here(&self, now: Moment) -> Option<(Fence, Thread)> {
        self.engine().registry.held_here(self.waits_for.as_ref()?, now)
    }

    fn timed_out(&mut self, cause: Option<LockError>) -> LockError {
        let now = self.engine().clock.now();
        let waited = now.since(self.start).as_secs_f64();
        // Whatever was in the way says more than how the last call was cut short.
        let met = self.conflict.take();
        let attempts = match self.attempts {
            0 => "and no attempt was made: other threads of this process were ahead in the queue".to_owned(),
            1 => "in 1 attempt".to_owned(),
            n => format!("in {n} attempts"),
        };
        let advice = match met {
            None if now < self.end => {
                "its retries are used up, raise max_retries or hold the lock for less time"
            }
            None => "raise timeout, or hold the lock for less time",
            Some(_) => "see this error's source for what was in the way",
        };
        let what = match (self.call.permits, self.call.other_keys.is_empty()) {
            (Some(_), _) => "a permit",
            (None, true) => "the key",
            (None, false) => "the keys, all at once,",
        };
        let error = LockError::new(ErrorCode::AcquisitionTimeout).with_message(format!(
            "{what} could not be taken within {waited:.3} s, {attempts}: {advice}{}",
            self.who_holds(now)
        ));
        match met.or(cause) {
            Some(cause) => error.with_source(cause),
            None => error,
        }
    }
}

/// Why a grant was released, for whoever waited in vain.
fn too_late() -> LockError {
    LockError::new(ErrorCode::NetworkTimeout).with_message(
        "the key was granted, but most of the ttl was over when the answer came: raise the ttl, or see what slows the server down",
    )
}
