//! The timer: fires lost tokens at their deadlines, and does nothing else.
//!
//! It asks no backend and runs no user code, so that nothing can delay it: a holder learns that
//! its lease is over while the worker hangs in the network.

use std::sync::Arc;

use crate::lock::registry::{Callback, Registry};
use crate::model::time::Clock;

/// How many deadlines are taken off the schedule at a time.
const BATCH: usize = 256;

/// Runs until the client ends.
pub(super) fn run(registry: &Registry, clock: &Clock) {
    loop {
        let now = clock.now();
        let (due, next) = {
            let mut deadlines = registry.deadlines.lock();
            if deadlines.ending {
                return;
            }
            let mut due = Vec::new();
            while due.len() < BATCH {
                let Some((_, state)) = deadlines.by_time.pop(now) else { break };
                due.push(state);
            }
            let next = deadlines.by_time.next();
            deadlines.asleep_until = due.is_empty().then_some(next);
            (due, next)
        };
        if due.is_empty() {
            registry.timer_signal.sleep_until(clock, next);
            continue;
        }
        for state in due {
            let lost = {
                let mut lease = state.lease.lock();
                let lost = lease.tick(now);
                // Not yet: a renewal has moved the deadline since it was put on the schedule.
                registry.schedule(&state, &lease);
                lost
            };
            if let Some(reason) = lost {
                registry.notify_lost(&state, reason, now);
            }
            // The guard went away meanwhile: its callbacks are the caller's values, and their drop
            // is user code.
            if let Some(last) = Arc::into_inner(state) {
                registry.queue_callback(Callback::Drop(Box::new(last)));
            }
        }
    }
}
