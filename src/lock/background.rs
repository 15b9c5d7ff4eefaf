//! The two background threads: how they start, and how a close waits for their end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::{ErrorCode, LockError, Result};
use crate::lock::engine::Engine;
use crate::lock::registry::Registry;
use crate::lock::{timer, worker};
use crate::model::time::deadline_after;
use crate::threads::spawn;

/// Starts the two threads, once.
pub(super) fn start(engine: &Arc<Engine>) -> Result<()> {
    if engine.started.load(Ordering::Acquire) {
        return Ok(());
    }
    let mut threads = engine.threads.lock();
    if threads.over {
        return Err(LockError::closed());
    }
    let failed = |cause| {
        LockError::new(ErrorCode::Internal)
            .with_message(
                "no background thread could be started, so nothing was locked: raise the limit of threads",
            )
            .with_source(cause)
    };
    if threads.timer.is_none() {
        let (registry, clock) = (Arc::clone(&engine.registry), engine.clock.clone());
        let running = Running::begin(&registry);
        let timer = spawn("syncguard-timer", move || {
            timer::run(&registry, &clock);
            drop(running);
        });
        threads.timer = Some(timer.map_err(failed)?);
    }
    if threads.worker.is_none() {
        let running = Running::begin(&engine.registry);
        let engine = Arc::clone(engine);
        let worker = spawn("syncguard-worker", move || {
            worker::run(engine);
            drop(running);
        });
        let handle = worker.map_err(failed)?;
        threads.worker_id = Some(handle.thread().id());
        threads.worker = Some(handle);
    }
    engine.started.store(true, Ordering::Release);
    Ok(())
}

/// Waits for the two threads, and a moment longer than asked: they have nothing left to do.
pub(super) fn join(engine: &Engine, end: Instant) -> bool {
    let end = end.max(deadline_after(Duration::from_millis(50)));
    let running = engine.registry.running.lock();
    let (running, all_ended) = engine.registry.ended.wait_while(running, end, |running| *running > 0);
    drop(running);
    if !all_ended {
        return false;
    }
    let (timer, worker) = {
        let mut threads = engine.threads.lock();
        (threads.timer.take(), threads.worker.take())
    };
    for thread in [timer, worker].into_iter().flatten() {
        // They catch every panic; and a panic of theirs would not be the caller's.
        let _ = thread.join();
    }
    true
}

/// Counts a running thread.
struct Running(Arc<Registry>);

impl Running {
    fn begin(registry: &Arc<Registry>) -> Self {
        *registry.running.lock() += 1;
        Self(Arc::clone(registry))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        *self.0.running.lock() -= 1;
        self.0.ended.notify_all();
    }
}
