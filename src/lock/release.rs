//! Releasing one lease: now, or at the end of its `min_hold`.

use std::time::Duration;

use crate::backend::{LockBackend, LockEnding, LostReason, ReleaseOutcome, RenewOutcome, Renewal};
use crate::error::{ErrorCode, LockError, Result};
use crate::lock::backend_call::change;
use crate::lock::engine::Engine;
use crate::lock::registry::{GuardState, PendingRelease};
use crate::lock::report::{ReleaseErrorContext, ReleaseSource};
use crate::model::time::{Moment, TOLERANCE};
use crate::threads::{run_on_own_thread, thread_locals_gone};

/// What became of a lease that was to be released.
pub(super) enum ReleaseProgress {
    Done(ReleaseOutcome),
    /// It is kept until the end of `min_hold`.
    Kept,
}

/// Ends a lease on this side. What is to be released then, unless it was ended before.
pub(super) fn end_lease(
    engine: &Engine,
    state: &GuardState,
    source: ReleaseSource,
) -> Option<PendingRelease> {
    let now = engine.clock.now();
    let (first, lost, over_at, lease_end) = {
        let mut lease = state.lease.lock();
        (lease.end_now(), lease.lost(), lease.surely_over(now), lease.end())
    };
    if !first {
        return None;
    }
    state.tell_end((&*engine.backend, now), lost.map_or(LockEnding::Released, LockEnding::Lost));
    engine.registry.unregister(state);
    Some(PendingRelease::of(state, source, over_at, lease_end))
}

/// Releases a lease on this thread, and signals this process's first waiter.
pub(super) fn release_here(
    engine: &Engine,
    pending: &mut PendingRelease,
    limit: Duration,
) -> Result<ReleaseProgress> {
    let result = on_usable_thread(|| try_release(engine, pending, limit));
    if !matches!(result, Ok(ReleaseProgress::Kept)) {
        engine.freed(&pending.context.key);
    }
    result
}

/// The same for several leases at once, whose `min_hold` is over: in one call of the backend.
pub(super) fn release_all_here(
    engine: &Engine,
    pending: &[PendingRelease],
    limit: Duration,
) -> Result<Vec<ReleaseOutcome>> {
    let ids: Vec<&str> = pending.iter().map(|pending| pending.context.lock_id.as_str()).collect();
    let deadline = engine.clock.now().after(limit);
    let result = on_usable_thread(|| change(Duration::MAX, || engine.backend.release_all(&ids, deadline)));
    for pending in pending {
        engine.freed(&pending.context.key);
    }
    result
}

/// Where thread-locals are gone another thread does it, and is waited for: the process may be about to
/// end.
fn on_usable_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    if !thread_locals_gone() {
        return work();
    }
    run_on_own_thread(work).unwrap_or_else(|| {
        Err(LockError::new(ErrorCode::Internal).with_message(
            "no thread could be started to release the lock: it is tried again in the background",
        ))
    })
}

/// Lets a lease go, or makes sure that it lasts to the end of its `min_hold`.
pub(super) fn try_release(
    engine: &Engine,
    pending: &mut PendingRelease,
    rest: Duration,
) -> Result<ReleaseProgress> {
    change(Duration::MAX, || release_or_keep(engine, pending, rest))
}

fn release_or_keep(engine: &Engine, pending: &mut PendingRelease, rest: Duration) -> Result<ReleaseProgress> {
    let now = engine.clock.now();
    let deadline = now.after(rest);
    if now >= pending.min_hold_end {
        return engine.release_by(pending, deadline).map(ReleaseProgress::Done);
    }
    let left = pending.min_hold_end.since(now);
    if engine.registry.worker_queue.lock().ending.is_some() {
        // Nobody will be there to release it: let the lease itself end in time. It counts as live
        // for the tolerance after its expiry, so that much less is enough.
        let ttl = left.saturating_sub(TOLERANCE).max(Duration::from_millis(1));
        return Ok(ReleaseProgress::Done(match keep(engine, pending, ttl, deadline)? {
            RenewOutcome::Lost(_) => ReleaseOutcome::NotHeld(None),
            RenewOutcome::Renewed { .. } | RenewOutcome::Busy => ReleaseOutcome::Released,
        }));
    }
    if pending.lease_end < pending.min_hold_end {
        let ttl = left.max(Duration::from_millis(1)).saturating_add(Duration::from_millis(1));
        if let RenewOutcome::Lost(_) = keep(engine, pending, ttl, deadline)? {
            return Ok(ReleaseProgress::Done(ReleaseOutcome::NotHeld(None)));
        }
        pending.lease_end = now.after(ttl);
        pending.over_at = pending.over_at.max(engine.clock.now().after(ttl).after(TOLERANCE));
    }
    Ok(ReleaseProgress::Kept)
}

/// Moves the end of a lease that is kept for its `min_hold`.
fn keep(
    engine: &Engine,
    pending: &mut PendingRelease,
    ttl: Duration,
    deadline: Moment,
) -> Result<RenewOutcome> {
    // Only what was granted is ever kept.
    let Some((fence, version)) = pending.known else {
        return Ok(RenewOutcome::Lost(LostReason::RowMissing));
    };
    let ReleaseErrorContext { key, lock_id, .. } = &pending.context;
    let outcome = engine
        .backend
        .prolong(&Renewal { key, lock_id, fence, version, ttl, shared: pending.shared }, deadline)?;
    if let RenewOutcome::Renewed { version, .. } = outcome {
        pending.known = Some((fence, version));
    }
    Ok(outcome)
}
