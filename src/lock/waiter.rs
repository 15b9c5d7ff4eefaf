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
use std::time::Duration;

use crate::backend::{Heard, LockBackend, Watch};
use crate::cancel::Subscription;
use crate::error::{ErrorCode, LockError, Result};
use crate::lock::attempt::{AttemptResult, Leases, LockCall, too_late};
use crate::lock::backend_call::ask;
use crate::lock::course::{Course, failed};
use crate::lock::engine::Engine;
use crate::lock::in_the_way::InTheWay;
use crate::lock::turns::{Line, OnRelease, SAY_AGAIN, intent};
use crate::model::time::Moment;
use crate::threads::catch_panic;
use crate::waiting::{FREED, LISTENING, LOOK, QueuePlace};

/// Waits for the lock.
pub(super) fn lock(mut call: LockCall) -> Result<Leases> {
    let start = call.engine().clock.now();
    call.begin_wait(start)?;
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
    let queue = &call.engine().queue;
    let (waits_for, place) = match &call.ticket {
        _ if several => (None, queue.join(&Arc::from(own_queue(call.engine())))),
        Some(ticket) => (Some(Arc::clone(&call.key)), queue.join_in_order(&call.key, ticket.clone())),
        None => (Some(Arc::clone(&call.key)), queue.join(&call.queue_key()?)),
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
        in_the_way: InTheWay::new(start, end),
        line: Line::default(),
    });
    let result = waiter.run();
    let engine = waiter.call.engine();
    match &waiter.call.ticket {
        Some(ticket) => waiter.line.over(engine, (ticket, result.is_ok()), &waiter.place),
        None => waiter.line.take_back(engine),
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
    /// What is known of who or what is in its way.
    in_the_way: InTheWay,
    /// What others have been told of it, and its place among those who are served in order.
    line: Line,
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
        (self.watch, self.registration) = (None, None);
        self.in_the_way.is_another();
        self.line.take_back(self.call.engine());
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
            // Also before a pause of no time.
            let say_again = self.say_that_it_waits();
            let now = self.engine().clock.now();
            if now >= end {
                return Ok(None);
            }
            // Without a key to look at there is only the next attempt.
            let next_look = if std::mem::take(&mut self.moved) {
                now
            } else if self.call.options.wake_ups && self.waits_for.is_some() {
                self.watch_key(now);
                now.after(self.look_interval(now))
            } else {
                Moment::NEVER
            };
            let calls = self.sleep(end.min(next_look).min(say_again))?;
            if self.call.ticket.is_some() {
                // Somebody of this process may come before us now.
                self.take_turn()?;
            }
            let due = self.engine().clock.now() >= next_look && next_look < end;
            let found = match (calls & FREED != 0, due || calls & LISTENING != 0) {
                (true, due) if self.call.ticket.is_some() => match (self.line.released(), due) {
                    (OnRelease::Attempt, _) => self.try_once(false)?,
                    (OnRelease::Wait, false) => None,
                    _ => self.look()?,
                },
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
    /// that many long waits cost little, and the handover stays within a sixteenth of the wait. Where
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
        if let Some(ticket) = &self.call.ticket {
            let now = engine.clock.now();
            let intent = intent(ticket, key, now);
            let turn = ask(|| engine.backend.turn(&intent, deadline, &self.call.token))?;
            self.in_the_way.holder = turn.holder.map(|holder| (holder, now));
            self.line.seen(turn.ahead);
            return Ok(turn.holder.is_some() || turn.ahead > 0);
        }
        if let Some(limit) = self.call.permits {
            let (name, token) = (&self.call.key, &self.call.token);
            return Ok(ask(|| engine.backend.permits_in_use(name, limit, deadline, token))? >= limit);
        }
        let found = ask(|| engine.backend.holder(key, deadline, &self.call.token))?;
        self.in_the_way.holder = found.map(|holder| (holder, engine.clock.now()));
        // To ask as a reader is to look whether a writer is in the way.
        Ok(found.is_some_and(|holder| !(holder.shared && self.call.shared)))
    }

    /// Tells those whom it concerns that it waits: whoever stands in line, or readers that share the key. When to say
    /// so again.
    fn say_that_it_waits(&mut self) -> Moment {
        let (engine, key) = (self.call.engine(), self.waits_for.as_ref());
        let beside_readers =
            !self.call.shared && self.in_the_way.holder.is_some_and(|(holder, _)| holder.shared);
        match (&self.call.ticket, key) {
            (Some(ticket), Some(key)) => self.line.stay(engine, (key, ticket), &self.place, self.end),
            (None, Some(key)) if beside_readers => self.line.announce(engine, (key, self.start), self.end),
            _ => return Moment::NEVER,
        }
        engine.clock.now().after(SAY_AGAIN)
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
            self.in_the_way.conflict = None;
            return Ok(None);
        }
        if self.call.ticket.is_some() {
            self.call.next = self.line.next(self.engine().clock.now(), &self.place);
        }
        let answer = self.call.attempt(self.end, (&self.course, self.attempts));
        match answer {
            Ok(AttemptResult::Granted(leases)) => return Ok(Some(leases)),
            Ok(AttemptResult::Taken { index, holder }) => {
                self.line.refused();
                self.in_the_way.conflict = None;
                self.wait_for_key(index)?;
                if let Some(holder) = holder {
                    self.in_the_way.holder = Some((holder, self.engine().clock.now()));
                }
            }
            Ok(AttemptResult::TooLate) => {
                self.line.ended(self.call.engine(), &self.place);
                self.in_the_way.conflict = Some(too_late());
            }
            Err(error) => {
                if error.is_outcome_unknown() {
                    self.line.unsure(self.engine().clock.now());
                } else {
                    self.line.refused();
                }
                self.wait_or_fail(error, contended)?;
            }
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
            self.in_the_way.conflict = Some(error);
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
        loop {
            let question = self.in_the_way.question_at();
            let wake = until.min(self.end).min(question);
            let calls = self.place.signal().sleep_until(&self.engine().clock, wake);
            self.check()?;
            let now = self.engine().clock.now();
            if now >= question {
                self.in_the_way.ask_who_holds((&self.call, self.waits_for.as_ref()));
            }
            if calls != 0 || now >= until {
                return Ok(calls);
            }
        }
    }

    fn check(&mut self) -> Result<()> {
        self.call.token.check()?;
        self.engine().check_open()?;
        if self.engine().clock.now() >= self.end { Err(self.timed_out(None)) } else { Ok(()) }
    }

    fn timed_out(&mut self, cause: Option<LockError>) -> LockError {
        let known = (self.attempts, self.line.ahead());
        self.in_the_way.timed_out((&self.call, self.waits_for.as_ref()), known, cause)
    }
}
