//! Releasing one lease: now, or at the end of its `min_hold`.

use std::time::Duration;

use crate::backend::{LockBackend, LostReason, ReleaseOutcome, RenewOutcome, Renewal};
use crate::error::Result;
use crate::lock::backend_call::change;
use crate::lock::engine::Engine;
use crate::lock::registry::PendingRelease;
use crate::lock::report::ReleaseErrorContext;
use crate::model::time::{Moment, TOLERANCE};

/// What became of a lease that was to be released.
pub(super) enum ReleaseProgress {
    Done(ReleaseOutcome),
    /// It is kept until the end of `min_hold`.
    Kept,
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
        return engine.release_by(&pending.context, deadline).map(ReleaseProgress::Done);
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
    let outcome = engine.backend.prolong(&Renewal { key, lock_id, fence, version, ttl }, deadline)?;
    if let RenewOutcome::Renewed { version, .. } = outcome {
        pending.known = Some((fence, version));
    }
    Ok(outcome)
}
