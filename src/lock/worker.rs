//! The worker: lost leases to the log first, then renewals, then tickets and pending releases, then user code.
//!
//! 1. One backend call at a time, each with a deadline: at the latest then it looks at what is due.
//! 2. A pending release never takes so long that a renewal that is due meanwhile comes late by more
//!    than [`SHORTEST_CALL`].
//! 3. User code runs one piece at a time, with everything that is due in between; its panics, and
//!    those of the backend, end here.
//! 4. It goes when the engine ends and nothing is left, when what is left may be given up, or
//!    [`LONGEST_DRAIN`] after the end. It takes the last reference to the engine with it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::backend::{ReleaseOutcome, RenewOutcome};
use crate::error::{ErrorCode, LockError, Result};
use crate::lock::engine::Engine;
use crate::lock::lease::Outcome;
use crate::lock::registry::{Callback, GuardState, LostLease, PendingRelease};
use crate::lock::release::{ReleaseProgress, try_release};
use crate::lock::report::{ReleaseSource, report};
use crate::lock::turns;
use crate::model::lock_id::LockId;
use crate::model::time::Moment;
use crate::threads::{UserValue, catch_panic, ignore_panic};
use crate::waiting::Delays;

/// The most leases in one renewal.
const BATCH: usize = 500;
/// Renewals that are due so soon go with those that are due.
const BATCH_WINDOW: Duration = Duration::from_millis(20);
/// The least time that a call of the worker's gets.
const SHORTEST_CALL: Duration = Duration::from_millis(200);
/// What the backend keeps for renewals is kept for so long after the last guard.
const KEEP_RESERVED: Duration = Duration::from_millis(250);
/// How long pending releases are pursued after the last client and guard are gone.
const LONGEST_DRAIN: Duration = Duration::from_secs(60);
/// The pauses after a failed release.
const RELEASE_DELAYS: Delays = Delays::doubling(Duration::from_millis(100), Duration::from_secs(5));

enum Job {
    /// Tells the log of lost leases.
    Log(Vec<LostLease>),
    Renew(Vec<Arc<GuardState>>),
    /// Takes a ticket back, within this time.
    Withdraw(LockId, Duration),
    Release(Box<PendingRelease>),
    Callback(Callback),
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
                engine.registry.worker_signal.sleep_until(&engine.clock, until);
            }
            Job::Go => break,
            job => do_job(&engine, job),
        }
    }
    if engine.closed.load(Ordering::SeqCst) {
        ignore_panic(|| engine.backend.close());
    }
    let last = engine.threads.lock().last.take();
    // The last drop of the backend, and of the caller's handlers with it, happens here.
    ignore_panic(move || drop((last, engine)));
}

/// Does what is left to do, except for user code, inside a callback on the worker's own thread:
/// until nothing is left, or `go_on` says no.
pub(super) fn drain(engine: &Engine, go_on: impl Fn() -> bool) {
    while go_on() {
        match next_job(engine, false) {
            Job::Sleep(_) if engine.registry.worker_queue.lock().releases.is_empty() => return,
            Job::Sleep(until) => {
                let look = engine.clock.now().after(Duration::from_millis(20));
                engine.registry.worker_signal.sleep_until(&engine.clock, until.min(look));
            }
            Job::Go => return,
            job => do_job(engine, job),
        }
    }
}

fn do_job(engine: &Engine, job: Job) {
    match job {
        Job::Log(lost) => lost.into_iter().for_each(|lost| {
            lost.tell(engine.told());
            ignore_panic(move || log::warn!("{lost}"));
        }),
        Job::Renew(due) => renew(engine, due),
        Job::Withdraw(id, rest) => turns::withdraw(engine, &id, rest),
        Job::Release(pending) => {
            ignore_panic(|| run_release(engine, *pending));
            engine.registry.worker_queue.lock().in_progress -= 1;
            engine.registry.progress.notify_all();
        }
        Job::Callback(callback) => match callback {
            Callback::Lost(state, reason) => {
                if let Some(on_lost) = state.on_lost.as_ref().and_then(UserValue::get) {
                    ignore_panic(|| on_lost(reason));
                }
                ignore_panic(move || drop(state));
            }
            Callback::ReleaseFailed(handler, error, context) => {
                report(handler.as_ref(), &error, &context);
                ignore_panic(move || drop(handler));
            }
            Callback::Drop(state) => ignore_panic(move || drop(state)),
        },
        Job::Unreserve => ignore_panic(|| engine.unreserve()),
        Job::Sleep(_) | Job::Go => {}
    }
}

/// The most urgent job; without `callbacks` none that is user code.
fn next_job(engine: &Engine, callbacks: bool) -> Job {
    let now = engine.clock.now();
    let mut queue = engine.registry.worker_queue.lock();
    queue.asleep_until = None;
    if queue.abandoned {
        queue.worker_ended = true;
        return Job::Go;
    }
    let lost = queue.callbacks.take_unlogged();
    if !lost.is_empty() {
        return Job::Log(lost);
    }
    if let Some((_, first)) = queue.renewals.pop(now) {
        let until = if engine.clock.is_manual() { now } else { now.after(BATCH_WINDOW) };
        let mut due = vec![first];
        while due.len() < BATCH {
            let Some((_, state)) = queue.renewals.pop(until) else { break };
            due.push(state);
        }
        return Job::Renew(due);
    }
    if let Some(id) = queue.withdrawals.pop() {
        return Job::Withdraw(id, beside_renewals(engine, queue.renewals.next(), now));
    }
    // At the end nothing waits for its time: what is kept is cut to its rest, and a manual clock
    // may never be moved again.
    let release_early = queue.ending.is_some() && engine.clock.is_manual();
    let due = if release_early { Moment::NEVER } else { now };
    if let Some((_, pending)) = queue.releases.pop(due) {
        queue.in_progress += 1;
        return Job::Release(Box::new(pending));
    }
    if callbacks && let Some(callback) = queue.callbacks.pop() {
        return Job::Callback(callback);
    }
    if callbacks && let Some(since) = queue.ending {
        let idle = queue.releases.is_empty() && queue.closing == 0;
        if idle || now.since(since) >= LONGEST_DRAIN {
            queue.worker_ended = true;
            return Job::Go;
        }
    }
    let mut next = queue.renewals.next().min(queue.releases.next());
    if queue.renewals.is_empty() && engine.registry.may_unreserve.load(Ordering::Relaxed) {
        let at = *queue.unreserve_at.get_or_insert(now.after(KEEP_RESERVED));
        if now >= at {
            queue.unreserve_at = None;
            return Job::Unreserve;
        }
        next = next.min(at);
    } else {
        queue.unreserve_at = None;
    }
    queue.asleep_until = Some(next);
    Job::Sleep(next)
}

/// Renews what is due: together, except for those whose row was busy the last time.
fn renew(engine: &Engine, due: Vec<Arc<GuardState>>) {
    let (alone, together): (Vec<_>, Vec<_>) = due.into_iter().partition(|state| state.lease.lock().alone());
    renew_batch(engine, together);
    for state in alone {
        renew_batch(engine, vec![state]);
    }
}

fn renew_batch(engine: &Engine, due: Vec<Arc<GuardState>>) {
    let now = engine.clock.now();
    let sent = now;
    let mut flights = Vec::with_capacity(due.len());
    let mut rest = engine.backend.operation_timeout();
    for state in &due {
        let mut lease = state.lease.lock();
        // Ahead of the timer, so that a lease that is over is not looked at again and again.
        let lost = lease.tick(now);
        match lease.begin_renewal(now, if engine.clock.is_manual() { Duration::ZERO } else { BATCH_WINDOW }) {
            Some((id, ttl)) => {
                // Leaves time for a second try.
                rest = rest.min(lease.end().since(now) / 2);
                flights.push((state, id, lease.version(), ttl));
                engine.registry.schedule(state, &lease);
            }
            // It was extended meanwhile, or is lost, or has ended.
            None => engine.registry.schedule(state, &lease),
        }
        drop(lease);
        if let Some(reason) = lost {
            engine.registry.notify_lost(state, reason, now);
        }
    }
    if !flights.is_empty() {
        let renewals: Vec<_> =
            flights.iter().map(|(state, _, version, ttl)| state.renewal(*version, *ttl)).collect();
        let deadline = now.after(rest.max(SHORTEST_CALL.min(engine.backend.operation_timeout())));
        let answers = catch_panic(|| engine.backend.renew(&renewals, deadline)).unwrap_or_default();
        let mut gaps = Vec::with_capacity(flights.len());
        let mut answers_in_turn = answers.iter();
        let now = engine.clock.now();
        for (state, id, ..) in flights {
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
            let gap = sent.since(state.lease.lock().confirmed());
            engine.registry.finish(state, id, now, outcome);
            if let (Outcome::Confirmed { .. }, Some(holding)) = (outcome, state.holding.get()) {
                gaps.push((Arc::clone(holding), gap));
            }
        }
        // Only now: a logger may block, and what was answered in time must not be booked late.
        for (holding, gap) in gaps {
            holding.renewed(engine.told(), gap);
        }
        note_failures(engine, &answers);
    }
    for state in due {
        if let Some(last) = Arc::into_inner(state) {
            ignore_panic(move || drop(last));
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
        Some(error) if !engine.renewals_fail.swap(true, Ordering::Relaxed) => ignore_panic(|| {
            log::warn!(
                "leases could not be renewed, and are lost when their ttl is over unless a renewal succeeds: {}",
                error.chain()
            );
        }),
        Some(_) => {}
        None => engine.renewals_fail.store(false, Ordering::Relaxed),
    }
}

/// How long a call may take beside renewals, the next of which is due then.
fn beside_renewals(engine: &Engine, next_renewal: Moment, now: Moment) -> Duration {
    engine.backend.operation_timeout().min(next_renewal.since(now).max(SHORTEST_CALL))
}

fn run_release(engine: &Engine, mut pending: PendingRelease) {
    let now = engine.clock.now();
    if now >= pending.over_at {
        give_up(engine, pending);
        return;
    }
    let next_renewal = engine.registry.worker_queue.lock().renewals.next();
    let rest = engine.dispose_timeout.min(beside_renewals(engine, next_renewal, now));
    match try_release(engine, &mut pending, rest) {
        Ok(ReleaseProgress::Kept) => {
            let at = pending.min_hold_end;
            again(engine, at, pending);
        }
        Ok(ReleaseProgress::Done(ReleaseOutcome::NotHeld(_))) if pending.may_arrive => later(engine, pending),
        Ok(ReleaseProgress::Done(outcome)) => {
            engine.freed(&pending.context.key);
            let mut queue = engine.registry.worker_queue.lock();
            match outcome {
                ReleaseOutcome::Released => queue.totals.released += 1,
                ReleaseOutcome::NotHeld(_) => queue.totals.not_held += 1,
            }
        }
        Err(error) => {
            let error =
                error.with_key(pending.context.key.as_str()).with_lock_id(pending.context.lock_id.as_str());
            if pending.reported || pending.context.source == ReleaseSource::Worker {
                pending.last_error = Some(error);
            } else {
                pending.reported = true;
                let handler = pending.handler.clone();
                engine.registry.queue_callback(Callback::ReleaseFailed(
                    handler,
                    error,
                    Box::new(pending.context.clone()),
                ));
            }
            later(engine, pending);
        }
    }
}

/// Tries again after a pause, the longer the more often it failed.
fn later(engine: &Engine, mut pending: PendingRelease) {
    if engine.clock.is_manual() && engine.registry.worker_queue.lock().ending.is_some() {
        // See `next_job`: one try is all there is.
        give_up(engine, pending);
        return;
    }
    pending.tries = pending.tries.saturating_add(1);
    let pause = RELEASE_DELAYS.before(u64::from(pending.tries));
    let at = engine.clock.now().after(pause).min(pending.over_at);
    again(engine, at, pending);
}

fn again(engine: &Engine, at: Moment, pending: PendingRelease) {
    if let Err(pending) = engine.registry.defer(at, pending) {
        give_up(engine, *pending);
    }
}

/// The lease is over, or cannot be pursued any more.
fn give_up(engine: &Engine, mut pending: PendingRelease) {
    let failed = pending.last_error.take();
    {
        let mut queue = engine.registry.worker_queue.lock();
        if failed.is_some() || pending.reported {
            queue.totals.failed += 1;
        } else {
            queue.totals.not_held += 1;
        }
    }
    if let (Some(error), false) = (failed, pending.reported) {
        engine.registry.queue_callback(Callback::ReleaseFailed(
            pending.handler.take(),
            error,
            Box::new(pending.context),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_what_the_server_said_of_a_change_that_it_did_not_make() {
        let said = |code| LockError::new(code).with_sqlstate("XX000");
        for code in [ErrorCode::AuthFailed, ErrorCode::InvalidArgument, ErrorCode::Internal] {
            assert!(is_refusal(&said(code)), "{code}");
            assert!(!is_refusal(&LockError::new(code)), "{code}: nobody said it");
            assert!(!is_refusal(&said(code).with_unknown_outcome(Duration::ZERO)), "{code}: not known");
        }
        for away in [ErrorCode::ServiceUnavailable, ErrorCode::NetworkTimeout] {
            assert!(!is_refusal(&said(away)), "{away}");
        }
    }
}
