//! The timer: fires lost tokens at their deadlines, and does nothing else.
//!
//! It asks no backend and runs no foreign code, so that nothing can delay it: a holder learns that
//! its lease is over while the worker hangs in the network.

use std::sync::Arc;

use crate::lock::crew::{Call, Crew};
use crate::lock::wake::guard;
use crate::model::time::Clock;

/// How many deadlines are taken off the schedule at a time.
const BATCH: usize = 256;

/// Runs until the crew ends.
pub(super) fn run(crew: &Crew, clock: &Clock) {
    loop {
        let now = clock.now();
        let (due, next) = {
            let mut watch = guard(&crew.watch);
            if watch.ending {
                return;
            }
            let mut due = Vec::new();
            while due.len() < BATCH {
                let Some((_, held)) = watch.deadlines.pop(now) else { break };
                due.push(held);
            }
            let next = watch.deadlines.next();
            watch.asleep_until = due.is_empty().then_some(next);
            (due, next)
        };
        if due.is_empty() {
            crew.watch_wake.sleep_until(clock, next);
            continue;
        }
        for held in due {
            let lost = {
                let mut lease = guard(&held.lease);
                let lost = lease.tick(now);
                // Not yet: a renewal has moved the deadline since it was put on the schedule.
                crew.arm(&held, &lease);
                lost
            };
            if let Some(reason) = lost {
                crew.tell_lost(&held, reason);
            }
            // The guard went away meanwhile: its callbacks are the caller's values, and their drop
            // is foreign code.
            if let Some(last) = Arc::into_inner(held) {
                crew.call(Call::Drop(Box::new(last)));
            }
        }
    }
}
