//! The feature `metrics`: numbers for whatever recorder the program has installed. No key, no id, and every
//! label has few values.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ::metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

use crate::backend::{LockEnding, LockStage, Reason};
use crate::error::ErrorCode;
use crate::telemetry::course::{Levels, Step};
use crate::telemetry::event::LockEvent;

const OPERATIONS: &str = "syncguard_operations_total";
const OPERATION_SECONDS: &str = "syncguard_operation_seconds";
const CALLS: &str = "syncguard_calls_total";
const WAIT_SECONDS: &str = "syncguard_wait_seconds";
const HELD_SECONDS: &str = "syncguard_held_seconds";
const LOST: &str = "syncguard_lost_total";
const RENEWAL_GAP_SECONDS: &str = "syncguard_renewal_gap_seconds";
const DROPPED: &str = "syncguard_events_dropped_total";
const WAITERS: &str = "syncguard_waiters";
const HELD: &str = "syncguard_held";
const IN_USE: &str = "syncguard_connections_in_use";
const MAX: &str = "syncguard_connections_max";

/// Tells the recorder what the names mean.
pub(super) fn describe() {
    describe_counter!(OPERATIONS, Unit::Count, "Calls of the backend, by operation and result");
    describe_histogram!(OPERATION_SECONDS, Unit::Seconds, "How long calls of the backend take");
    describe_counter!(CALLS, Unit::Count, "Calls for a lock that have been answered, by kind and result");
    describe_histogram!(WAIT_SECONDS, Unit::Seconds, "How long locks were waited for that were granted");
    describe_histogram!(HELD_SECONDS, Unit::Seconds, "How long locks were held");
    describe_counter!(LOST, Unit::Count, "Locks that were lost, by kind and reason");
    describe_histogram!(RENEWAL_GAP_SECONDS, Unit::Seconds, "Time between confirmed renewals of a lease");
    describe_counter!(DROPPED, Unit::Count, "Events that were dropped because the queue was full");
    describe_gauge!(WAITERS, Unit::Count, "Calls for a lock that have not been answered yet");
    describe_gauge!(HELD, Unit::Count, "Locks that are held");
    describe_gauge!(IN_USE, Unit::Count, "Connections that are lent");
    describe_gauge!(MAX, Unit::Count, "The most connections that the client may have for its operations");
}

/// A call of the backend.
pub(super) fn event(event: &LockEvent) {
    let operation = event.operation.as_str();
    let said = event.error.map(ErrorCode::as_str).or(event.reason.map(Reason::as_str));
    let result = said.unwrap_or(event.result.as_str());
    counter!(OPERATIONS, "operation" => operation, "result" => result).increment(1);
    histogram!(OPERATION_SECONDS, "operation" => operation).record(event.duration.as_secs_f64());
}

/// A stage of a lock.
pub(super) fn step(step: &Step) {
    let kind = step.kind().as_str();
    match step.stage {
        LockStage::Begun => {}
        LockStage::Granted => {
            counter!(CALLS, "kind" => kind, "result" => "granted").increment(1);
            histogram!(WAIT_SECONDS, "kind" => kind).record(step.waited().as_secs_f64());
        }
        LockStage::Renewed { gap } => record(RENEWAL_GAP_SECONDS, kind, gap),
        LockStage::Ended { held: None, ending } => {
            counter!(CALLS, "kind" => kind, "result" => ending.as_str()).increment(1);
        }
        LockStage::Ended { held: Some(held), ending } => {
            record(HELD_SECONDS, kind, held);
            if let LockEnding::Lost(reason) = ending {
                counter!(LOST, "kind" => kind, "reason" => reason.as_str()).increment(1);
            }
        }
    }
}

fn record(name: &'static str, kind: &'static str, time: Duration) {
    histogram!(name, "kind" => kind).record(time.as_secs_f64());
}

/// What this client has added to the levels, which all clients of the program share.
#[derive(Default)]
pub(super) struct Told {
    levels: [i64; 4],
    dropped: u64,
}

impl Told {
    pub(super) fn tell(&mut self, levels: &Levels, dropped: u64) {
        let now = [
            levels.waiting.load(Ordering::Relaxed),
            levels.held.load(Ordering::Relaxed),
            i64::from(levels.in_use.load(Ordering::Relaxed)),
            i64::from(levels.max.load(Ordering::Relaxed)),
        ];
        self.add(now);
        counter!(DROPPED).increment(dropped.saturating_sub(self.dropped));
        self.dropped = self.dropped.max(dropped);
    }

    /// The client is gone.
    pub(super) fn end(&mut self) {
        self.add([0; 4]);
    }

    #[expect(clippy::cast_precision_loss, reason = "counts of things in memory are far below 2^53")]
    fn add(&mut self, now: [i64; 4]) {
        for (name, (told, now)) in
            [WAITERS, HELD, IN_USE, MAX].into_iter().zip(self.levels.iter_mut().zip(now))
        {
            gauge!(name).increment((now - *told) as f64);
            *told = now;
        }
    }
}
