//! The orderly end of a client.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::backend::{LockEnding, LostReason};
use crate::lock::engine::Engine;
use crate::lock::registry::{PendingRelease, ReleaseTotals};
use crate::lock::report::ReleaseSource;
use crate::lock::{background, worker};
use crate::model::time::{Moment, deadline_after};
use crate::threads::{driver_unusable, ignore_panic, run_detached};
use crate::waiting::LOOK;

/// What closing a client did with its leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct CloseReport {
    /// Leases that were released.
    pub released: usize,
    /// Leases that were not held any more: expired, taken over, or never granted.
    pub not_held: usize,
    /// Leases whose release failed until their time was over.
    pub failed: usize,
    /// Leases whose release was still being tried at the deadline: they stay held until their ttl
    /// is over.
    pub pending: usize,
    /// Calls to `lock` and its variants that had not returned by the deadline.
    pub calls: usize,
    /// Whether both background threads had ended.
    pub threads_ended: bool,
}

impl CloseReport {
    /// Whether nothing of this client is left: no lease, no call, no thread.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.failed == 0 && self.pending == 0 && self.calls == 0 && self.threads_ended
    }
}

/// Closes the engine within `limit`, by the system's clock whatever the backend's is.
pub(super) fn close(engine: &Arc<Engine>, limit: Duration) -> CloseReport {
    let end = deadline_after(limit);
    let before = engine.registry.worker_queue.lock().totals;
    let first = !engine.closed.swap(true, Ordering::SeqCst);
    engine.queue.notify_all();
    // Another close that runs at the same time must not send the worker home before it has them.
    engine.registry.worker_queue.lock().closing += 1;
    let refused = unregister_guards(engine);
    engine.registry.worker_queue.lock().closing -= 1;
    engine.registry.progress.notify_all();
    engine.registry.worker_signal.notify(LOOK);
    let on_worker = engine.on_worker_thread();
    let calls = !engine.wait_for_calls(end);
    // What could be handed to nobody is released by nobody: only after an earlier close gave up.
    release_early(engine);
    if on_worker {
        worker::drain(engine, || Instant::now() < end);
    } else {
        wait_for_releases(engine, end);
    }
    let mut report = end_threads(engine, end, on_worker, first);
    report.released = report.released.saturating_sub(before.released);
    report.not_held = report.not_held.saturating_sub(before.not_held);
    report.failed = report.failed.saturating_sub(before.failed);
    report.pending += refused;
    report.calls = usize::from(calls);
    report
}

/// Tells every holder, and hands every lease to the worker. Returns how many it could not take.
fn unregister_guards(engine: &Engine) -> usize {
    let guards = {
        let mut deadlines = engine.registry.deadlines.lock();
        deadlines.closed = true;
        std::mem::take(&mut deadlines.guards)
    };
    let now = engine.clock.now();
    let mut refused = 0;
    for state in guards.into_values() {
        let (lost, ended, over_at, lease_end) = {
            let mut lease = state.lease.lock();
            let lost = lease.lose(LostReason::Closed);
            (lost, lease.end_now(), lease.surely_over(now), lease.end())
        };
        engine.registry.unregister(&state);
        if let Some(reason) = lost {
            state.tell_end(engine.told(), LockEnding::Lost(reason));
            engine.registry.notify_lost(&state, reason, now);
        }
        if ended {
            let mut pending = PendingRelease::of(&state, ReleaseSource::Worker, over_at, lease_end);
            pending.handler = pending.handler.or_else(|| engine.on_release_error.clone());
            refused += usize::from(engine.registry.defer(now, pending).is_err());
        }
    }
    refused
}

/// From here on leases that are kept for their `min_hold` are cut to it, instead of waited for.
fn release_early(engine: &Engine) {
    let mut queue = engine.registry.worker_queue.lock();
    queue.ending = Some(engine.clock.now());
    let kept: Vec<_> = std::iter::from_fn(|| queue.releases.pop(Moment::NEVER)).collect();
    let now = engine.clock.now();
    for (id, pending) in kept {
        queue.releases.put(id, now, pending);
    }
    drop(queue);
    engine.registry.worker_signal.notify(LOOK);
}

/// Waits until the worker has nothing left to release.
fn wait_for_releases(engine: &Engine, end: Instant) {
    let queue = engine.registry.worker_queue.lock();
    let _ = engine.registry.progress.wait_while(queue, end, |queue| {
        !queue.worker_ended && (!queue.releases.is_empty() || queue.in_progress > 0 || queue.closing > 0)
    });
}

fn end_threads(engine: &Arc<Engine>, end: Instant, on_worker: bool, first: bool) -> CloseReport {
    // Which closes the backend when it goes, also where another close has joined it already.
    let has_worker = {
        let mut threads = engine.threads.lock();
        threads.over = true;
        threads.worker_id.is_some()
    };
    engine.registry.deadlines.lock().ending = true;
    engine.registry.timer_signal.notify(LOOK);
    let mut report = {
        let mut queue = engine.registry.worker_queue.lock();
        queue.ending.get_or_insert(engine.clock.now());
        let ReleaseTotals { released, not_held, failed } = queue.totals;
        let pending = queue.releases.len() + queue.in_progress;
        let report = CloseReport { released, not_held, failed, pending, ..CloseReport::default() };
        queue.abandoned = report.pending > 0;
        report
    };
    engine.registry.worker_signal.notify(LOOK);
    if !has_worker {
        if first {
            close_backend(engine);
        }
        report.threads_ended = true;
        return report;
    }
    report.threads_ended = !on_worker && background::join(engine, end);
    report
}

/// Closes the backend where no worker does it, and never where it must not be used.
fn close_backend(engine: &Arc<Engine>) {
    if driver_unusable() {
        run_detached(Arc::clone(engine), |engine| engine.backend.close());
    } else {
        ignore_panic(|| engine.backend.close());
    }
}
