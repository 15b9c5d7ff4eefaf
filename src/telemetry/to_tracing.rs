//! The feature `tracing`: events with fields, for whatever subscriber the program has installed. Keys and ids
//! appear as labels only.

use std::time::Duration;

use ::tracing::{Level, event as emit};

use crate::backend::{LostReason, Reason};
use crate::error::ErrorCode;
use crate::telemetry::course::LockSummary;
use crate::telemetry::event::LockEvent;

/// A call of the backend, at debug level.
pub(super) fn event(event: &LockEvent) {
    emit!(
        target: "syncguard::operation",
        Level::DEBUG,
        operation = event.operation.as_str(),
        result = event.result.as_str(),
        reason = event.reason.map(Reason::as_str),
        error = event.error.map(ErrorCode::as_str),
        duration_ms = millis(event.duration),
        key_hash = event.key_hash.as_deref(),
    );
}

/// The whole of a lock, at info level; at warn level if it was lost.
pub(super) fn lock(lock: &LockSummary) {
    macro_rules! emit_at {
        ($level:expr) => {
            emit!(
                target: "syncguard::lock",
                $level,
                kind = lock.kind.as_str(),
                ending = lock.ending.as_str(),
                reason = lock.lost().map(LostReason::as_str),
                waited_ms = millis(lock.waited),
                attempts = lock.attempts,
                held_ms = lock.held.map(millis),
                keys = lock.keys,
                key_hash = lock.key_hash.as_str(),
                owner = lock.owner.as_deref(),
                note = lock.note.as_deref(),
            )
        };
    }
    if lock.lost().is_some() { emit_at!(Level::WARN) } else { emit_at!(Level::INFO) }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
