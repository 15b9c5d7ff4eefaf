//! The worker: lost leases to the log first, then renewals, then deferred releases, then foreign code.
//!
//! 1. One backend call at a time, each with a deadline: at the latest then it looks at what is due.
//! 2. A deferred release never takes so long that a renewal that is due meanwhile comes late by more
//!    than [`SHORTEST_CALL`].
//! 3. Foreign code runs one piece at a time, with everything that is due in between; its panics, and
//!    those of the backend, end here.
//! 4. It goes when the engine ends and nothing is left, when what is left may be given up, or
//!    [`LONGEST_DRAIN`] after the end. It takes the last reference to the engine with it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::backend::{LostReason, ReleaseOutcome, RenewOutcome, Renewal};
use crate::error::{ErrorCode, LockError, Result};
use crate::lock::crew::{Call, Deferred, Held, LostLine};
use crate::lock::engine::Engine;
use crate::lock::lease::{Outcome, TOLERANCE};
use crate::lock::report::{ReleaseErrorContext, ReleaseSource, report};
use crate::lock::wake::guard;
use crate::model::time::Moment;
use crate::threads::{Foreign, contained, quietly};

/// The most leases in one renewal.
const BATCH: usize = 500;
/// Renewals that are due so soon go with those that are due.
const TOGETHER: Duration = Duration::from_millis(20);
/// The least time that a call of the worker's gets.
const SHORTEST_CALL: Duration = Duration::from_millis(200);
/// What the backend keeps for renewals is kept for so long after the last guard.
const LINGER: Duration = Duration::from_millis(250);
/// How long deferred releases are pursued after the last client and guard are gone.
const LONGEST_DRAIN: Duration = Duration::from_secs(60);
/// The pause after the first failed release; doubled after each, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

enum Job {
    /// Tells the log of lost leases.
    Log(VecDeque<LostLine>),
    Renew(Vec<Arc<Held>>),
    Settle(Box<Deferred>),
    Call(Call),
    Unreserve,
    Sleep(Moment),
    Go,
}

/// Runs until the engine ends.
#[allow(clippy::needless_pass_by_value)] // The worker's reference is meant to die here.
pub(super) fn run(engine: Arc<Engine>) {
    loop {
        match next_job(&engine, true) {
            Job::Sleep(until) => {
                engine.crew.desk_wake.sleep_until(&engine.clock, until);
            }
            Job::Go => break,
            job => do_job(&engine, job),
        }
    }
    if engine.closed.load(Ordering::SeqCst) {
        quietly(|| engine.backend.close());
    }
    let last = guard(&engine.threads).last.take();
    // The last drop of the backend, and of the caller's handlers with it, happens here.
    quietly(move || drop((last, engine)));
}

/// Does what is left to do, except for foreign code, inside a callback on the worker's own thread:
/// until nothing is left, or `go_on` says no.
pub(super) fn drain(engine: &Engine, go_on: impl Fn() -> bool) {
    while go_on() {
        match next_job(engine, false) {
            Job::Sleep(_) if guard(&engine.crew.desk).deferred.is_empty() => return,
            Job::Sleep(until) => {
                let look = engine.clock.now().after(Duration::from_millis(20));
                engine.crew.desk_wake.sleep_until(&engine.clock, until.min(look));
            }
            Job::Go => return,
            job => do_job(engine, job),
        }
    }
}

fn do_job(engine: &Engine, job: Job) {
    match job {
        Job::Log(lines) => lines.iter().for_each(|line| quietly(|| log::warn!("{line}"))),
        Job::Renew(due) => renew(engine, due),
        Job::Settle(deferred) => {
            quietly(|| settle_deferred(engine, *deferred));
            guard(&engine.crew.desk).in_hand -= 1;
            engine.crew.progress.notify_all();
        }
        Job::Call(call) => match call {
            Call::Lost(held, reason) => {
                if let Some(on_lost) = held.on_lost.as_ref().and_then(Foreign::get) {
                    quietly(|| on_lost(reason));
                }
                quietly(move || drop(held));
            }
            Call::ReleaseFailed(handler, error, context) => {
                report(handler.as_ref(), &error, &context);
                quietly(move || drop(handler));
            }
            Call::Drop(held) => quietly(move || drop(held)),
        },
        Job::Unreserve => quietly(|| engine.unreserve()),
        Job::Sleep(_) | Job::Go => {}
    }
}

/// The most urgent job; without `calls` none that is foreign code.
fn next_job(engine: &Engine, calls: bool) -> Job {
    let now = engine.clock.now();
    let mut desk = guard(&engine.crew.desk);
    desk.asleep_until = None;
    if desk.abandoned {
        desk.gone = true;
        return Job::Go;
    }
    if !desk.lost_lines.is_empty() {
        return Job::Log(std::mem::take(&mut desk.lost_lines));
    }
    if let Some((_, first)) = desk.renewals.pop(now) {
        let until = if engine.clock.is_manual() { now } else { now.after(TOGETHER) };
        let mut due = vec![first];
        while due.len() < BATCH {
            let Some((_, held)) = desk.renewals.pop(until) else { break };
            due.push(held);
        }
        return Job::Renew(due);
    }
    // At the end nothing waits for its time: what is kept is cut to its rest, and a manual clock
    // may never be moved again.
    let hurry = desk.ending.is_some() && engine.clock.is_manual();
    let due = if hurry { Moment::NEVER } else { now };
    if let Some((_, deferred)) = desk.deferred.pop(due) {
        desk.in_hand += 1;
        return Job::Settle(Box::new(deferred));
    }
    if calls && let Some(call) = desk.calls.pop_front() {
        return Job::Call(call);
    }
    if calls && let Some(since) = desk.ending {
        let idle = desk.deferred.is_empty() && desk.closers == 0;
        if idle || now.since(since) >= LONGEST_DRAIN {
            desk.gone = true;
            return Job::Go;
        }
    }
    let mut next = desk.renewals.next().min(desk.deferred.next());
    if desk.renewals.is_empty() && engine.crew.may_unreserve.load(Ordering::Relaxed) {
        let at = *desk.unreserve_at.get_or_insert(now.after(LINGER));
        if now >= at {
            desk.unreserve_at = None;
            return Job::Unreserve;
        }
        next = next.min(at);
    } else {
        desk.unreserve_at = None;
    }
    desk.asleep_until = Some(next);
    Job::Sleep(next)
}

/// Renews what is due: together, except for those whose row was busy the last time.
fn renew(engine: &Engine, due: Vec<Arc<Held>>) {
    let (alone, together): (Vec<_>, Vec<_>) = due.into_iter().partition(|held| guard(&held.lease).alone());
    renew_batch(engine, together);
    for held in alone {
        renew_batch(engine, vec![held]);
    }
}

fn renew_batch(engine: &Engine, due: Vec<Arc<Held>>) {
    let now = engine.clock.now();
    let mut flights = Vec::with_capacity(due.len());
    let mut rest = engine.backend.operation_timeout();
    for held in &due {
        let mut lease = guard(&held.lease);
        // Ahead of the timer, so that a lease that is over is not looked at again and again.
        let lost = lease.tick(now);
        match lease.begin_renewal(now, if engine.clock.is_manual() { Duration::ZERO } else { TOGETHER }) {
            Some((id, ttl)) => {
                // Leaves time for a second try.
                rest = rest.min(lease.end().since(now) / 2);
                flights.push((held, id, lease.version(), ttl));
                engine.crew.arm(held, &lease);
            }
            // It was extended meanwhile, or is lost, or has ended.
            None => engine.crew.arm(held, &lease),
        }
        drop(lease);
        if let Some(reason) = lost {
            engine.crew.tell_lost(held, reason);
        }
    }
    if !flights.is_empty() {
        let renewals: Vec<_> =
            flights.iter().map(|(held, _, version, ttl)| held.renewal(*version, *ttl)).collect();
        let deadline = now.after(rest.max(SHORTEST_CALL.min(engine.backend.operation_timeout())));
        let answers = contained(|| engine.backend.renew(&renewals, deadline)).unwrap_or_default();
        let mut answers_in_turn = answers.iter();
        let now = engine.clock.now();
        for (held, id, ..) in flights {
            // A missing answer says as little as an error does.
            let outcome = match answers_in_turn.next() {
                Some(Ok(RenewOutcome::Renewed { expires_at_ms, version })) => {
                    Outcome::Confirmed { expires_at_ms: *expires_at_ms, version: *version }
                }
                Some(Ok(RenewOutcome::Lost(reason))) => Outcome::Gone(*reason),
                Some(Ok(RenewOutcome::Busy)) => Outcome::Busy,
                Some(Err(error)) if is_refusal(error) => Outcome::Refused,
                Some(Err(_)) | None => Outcome::Unknown,
            };
            finish(engine, held, id, now, outcome);
        }
        // Only now: a logger may block, and what was answered in time must not be booked late.
        note_failures(engine, &answers);
    }
    for held in due {
        if let Some(last) = Arc::into_inner(held) {
            quietly(move || drop(last));
        }
    }
}

/// Whether the server answered, and what it said is no matter of its being away: certainly nothing was
/// changed.
fn is_refusal(error: &LockError) -> bool {
    error.sqlstate().is_some()
        && !error.is_outcome_unknown()
        && !matches!(error.code(), ErrorCode::ServiceUnavailable | ErrorCode::NetworkTimeout)
}

/// Says in the log that renewals fail, and why: once, until one succeeds again.
fn note_failures(engine: &Engine, answers: &[Result<RenewOutcome>]) {
    match answers.iter().find_map(|answer| answer.as_ref().err()) {
        Some(error) if !engine.renewals_fail.swap(true, Ordering::Relaxed) => quietly(|| {
            log::warn!(
                "leases could not be renewed, and are lost at their ends unless that is mended: {}",
                error.chain()
            );
        }),
        Some(_) => {}
        None => engine.renewals_fail.store(false, Ordering::Relaxed),
    }
}

/// Books the answer to an operation, and tells the holder if the lease is lost by it.
pub(super) fn finish(engine: &Engine, held: &Arc<Held>, id: u32, now: Moment, outcome: Outcome) {
    let lost = {
        let mut lease = guard(&held.lease);
        let lost = lease.finish(id, now, outcome);
        engine.crew.arm(held, &lease);
        lost
    };
    if let Some(reason) = lost {
        engine.crew.tell_lost(held, reason);
    }
}

/// What became of a lease that was to be let go.
pub(super) enum Settled {
    Done(ReleaseOutcome),
    /// It is kept until the end of `min_hold`.
    Kept,
}

/// Asks the backend for a change. One that panics has failed, and what it did is not known: what it
/// was asked for may be in force for as long as `may_last`.
pub(super) fn change<T>(may_last: Duration, call: impl FnOnce() -> Result<T>) -> Result<T> {
    contained(call).unwrap_or_else(|| {
        Err(LockError::new(ErrorCode::Internal)
            .with_message("the backend panicked: its message is where the program's panics go")
            .with_unknown_outcome(may_last))
    })
}

/// Lets a lease go, or makes sure that it lasts to the end of its `min_hold`.
pub(super) fn settle(engine: &Engine, deferred: &mut Deferred, rest: Duration) -> Result<Settled> {
    change(Duration::MAX, || ask_to_settle(engine, deferred, rest))
}

fn ask_to_settle(engine: &Engine, deferred: &mut Deferred, rest: Duration) -> Result<Settled> {
    let now = engine.clock.now();
    let (id, deadline) = (&deferred.context.lock_id, now.after(rest));
    if now >= deferred.keep_until {
        return engine.backend.release_by(id, deadline).map(Settled::Done);
    }
    let left = deferred.keep_until.since(now);
    if guard(&engine.crew.desk).ending.is_some() {
        // Nobody will be there to release it: let the lease itself end in time. It counts as live
        // for the tolerance after its expiry, so that much less is enough.
        let ttl = left.saturating_sub(TOLERANCE).max(Duration::from_millis(1));
        return Ok(Settled::Done(match keep(engine, deferred, ttl, deadline)? {
            RenewOutcome::Lost(_) => ReleaseOutcome::NotHeld(None),
            RenewOutcome::Renewed { .. } | RenewOutcome::Busy => ReleaseOutcome::Released,
        }));
    }
    if deferred.lease_end < deferred.keep_until {
        let ttl = left.max(Duration::from_millis(1)).saturating_add(Duration::from_millis(1));
        if let RenewOutcome::Lost(_) = keep(engine, deferred, ttl, deadline)? {
            return Ok(Settled::Done(ReleaseOutcome::NotHeld(None)));
        }
        deferred.lease_end = now.after(ttl);
        deferred.over_at = deferred.over_at.max(engine.clock.now().after(ttl).after(TOLERANCE));
    }
    Ok(Settled::Kept)
}

/// Moves the end of a lease that is kept for its `min_hold`.
fn keep(engine: &Engine, deferred: &mut Deferred, ttl: Duration, deadline: Moment) -> Result<RenewOutcome> {
    // Only what was granted is ever kept.
    let Some((fence, version)) = deferred.known else {
        return Ok(RenewOutcome::Lost(LostReason::RowMissing));
    };
    let ReleaseErrorContext { key, lock_id, .. } = &deferred.context;
    let outcome = engine.backend.prolong(&Renewal { key, lock_id, fence, version, ttl }, deadline)?;
    if let RenewOutcome::Renewed { version, .. } = outcome {
        deferred.known = Some((fence, version));
    }
    Ok(outcome)
}

fn settle_deferred(engine: &Engine, mut deferred: Deferred) {
    let now = engine.clock.now();
    if now >= deferred.over_at {
        give_up(engine, deferred);
        return;
    }
    let next_renewal = guard(&engine.crew.desk).renewals.next();
    let rest = engine
        .dispose_timeout
        .min(engine.backend.operation_timeout())
        .min(next_renewal.since(now).max(SHORTEST_CALL));
    match settle(engine, &mut deferred, rest) {
        Ok(Settled::Kept) => {
            let at = deferred.keep_until;
            again(engine, at, deferred);
        }
        Ok(Settled::Done(ReleaseOutcome::NotHeld(_))) if deferred.may_arrive => later(engine, deferred),
        Ok(Settled::Done(outcome)) => {
            engine.queue.freed(&deferred.context.key);
            let mut desk = guard(&engine.crew.desk);
            match outcome {
                ReleaseOutcome::Released => desk.tally.released += 1,
                ReleaseOutcome::NotHeld(_) => desk.tally.not_held += 1,
            }
        }
        Err(error) => {
            let error =
                error.with_key(deferred.context.key.as_str()).with_lock_id(deferred.context.lock_id.as_str());
            if deferred.told || deferred.context.source == ReleaseSource::Worker {
                deferred.last_error = Some(error);
            } else {
                deferred.told = true;
                let handler = deferred.handler.clone();
                engine.crew.call(Call::ReleaseFailed(handler, error, Box::new(deferred.context.clone())));
            }
            later(engine, deferred);
        }
    }
}

/// Tries again after a pause, the longer the more often it failed.
fn later(engine: &Engine, mut deferred: Deferred) {
    if engine.clock.is_manual() && guard(&engine.crew.desk).ending.is_some() {
        // See `next_job`: one try is all there is.
        give_up(engine, deferred);
        return;
    }
    let pause = FIRST_PAUSE.saturating_mul(1 << deferred.tries.min(10)).min(LONGEST_PAUSE);
    deferred.tries = deferred.tries.saturating_add(1);
    let at = engine.clock.now().after(pause).min(deferred.over_at);
    again(engine, at, deferred);
}

fn again(engine: &Engine, at: Moment, deferred: Deferred) {
    if let Err(deferred) = engine.crew.defer(at, deferred) {
        give_up(engine, *deferred);
    }
}

/// The lease is over, or cannot be pursued any more.
fn give_up(engine: &Engine, mut deferred: Deferred) {
    let failed = deferred.last_error.take();
    {
        let mut desk = guard(&engine.crew.desk);
        if failed.is_some() || deferred.told {
            desk.tally.failed += 1;
        } else {
            desk.tally.not_held += 1;
        }
    }
    if let (Some(error), false) = (failed, deferred.told) {
        engine.crew.call(Call::ReleaseFailed(deferred.handler.take(), error, Box::new(deferred.context)));
    }
}
