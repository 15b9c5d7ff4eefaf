//! Locks that hold across threads, processes and machines, on the PostgreSQL you already have.

// A panic in library code is a bug.
#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::string_slice,
    clippy::dbg_macro,
    clippy::print_stdout,
    clippy::print_stderr
)]

mod advisory;
pub mod backend;
mod cancel;
mod client;
#[cfg(any(test, feature = "test-util"))]
pub mod contract;
pub mod diagnostics;
mod error;
mod lock;
pub mod memory;
mod model;
mod postgres;
mod sabotage;
pub mod telemetry;

pub use advisory::{
    AdvisoryGuard, AdvisoryKey, AdvisoryLost, AdvisoryOptions, AdvisorySession, DEFAULT_MAX_HOLD,
};
pub use backend::{
    AcquireResult, Acquired, Attempt, Capabilities, ExtendOutcome, ExtendResult, LockBackend, LockInfo,
    LockInfoDebug, Lookup, LostReason, Reason, ReleaseOutcome, ReleaseResult, RenewOutcome, Renewal,
    TimeAuthority,
};
pub use cancel::CancelToken;
pub use client::{PgLockClient, PgLockClientBuilder};
pub use diagnostics::{
    get_by_id, get_by_id_cancellable, get_by_id_raw, get_by_id_raw_cancellable, get_by_key,
    get_by_key_cancellable, get_by_key_raw, get_by_key_raw_cancellable, owns, owns_cancellable,
};
pub use error::{ErrorCode, LockError, Result};
pub use lock::{
    Backoff, ClientSettings, CloseReport, DEFAULT_MAX_RETRIES, DEFAULT_RETRY_DELAY, DEFAULT_TIMEOUT,
    DEFAULT_TTL, Heartbeat, Jitter, LockClient, LockGuard, LockOptions, ReleaseErrorContext, ReleaseSource,
};
pub use memory::MemoryBackend;
pub use model::fence::{FENCE_MAX, FENCE_WARN, Fence};
pub use model::hash::hash_key;
pub use model::key::{
    BACKEND_LIMIT_POSTGRES, MAX_KEY_LENGTH_BYTES, RESERVE_BYTES_POSTGRES, make_fence_key, make_storage_key,
    normalize_and_validate_key,
};
pub use model::lock_id::validate_lock_id;
pub use model::time::{Clock, MAX_TTL, Moment, TIME_TOLERANCE_MS, is_live};
pub use postgres::{BrokenLock, CLEANUP_GUARD_MS, Counts, IdleCounter, Operator, Waiter};
pub use telemetry::{EventResult, LockEvent, Operation, Telemetry, TelemetryOptions, with_telemetry};
