//! Calls of the backend, which may be anybody's: one that panics has failed, and no more.

use std::time::Duration;

use crate::error::{ErrorCode, LockError, Result};
use crate::threads::catch_panic;

/// Asks for a change. What one that panics did is not known: what it was asked for may be in force for
/// as long as `may_last`.
pub(super) fn change<T>(may_last: Duration, call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_panic(call).unwrap_or_else(|| Err(panicked().with_unknown_outcome(may_last)))
}

/// Asks for something that changes no lease.
pub(super) fn ask<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_panic(call).unwrap_or_else(|| Err(panicked()))
}

fn panicked() -> LockError {
    LockError::new(ErrorCode::Internal)
        .with_message("the backend panicked: its message is where the program's panics go")
}
