//! Locks that hold across threads, processes and machines, on the PostgreSQL you already have.
//!
//! ```no_run
//! use syncguard::PgLockClient;
//!
//! let client = PgLockClient::connect("postgresql://app@db.example/app")?;
//! let guard = client.lock("payment:42")?;
//! // No other process, on any machine, holds "payment:42" now.
//! drop(guard); // … and now one may.
//! # Ok::<(), syncguard::LockError>(())
//! ```
//!
//! # The names that matter
//!
//! | name | what it is |
//! | --- | --- |
//! | [`PgLockClient`] | the client: one per program, cheap to clone; [`PgLockClientBuilder`] has its settings |
//! | [`LockGuard`] | a held lock: renewed while it lives, released when it is dropped |
//! | [`MultiGuard`] | several held locks, taken together by [`lock_all`](PgLockClient::lock_all) |
//! | [`Semaphore`] | permits for a limited number of holders |
//! | [`LockOptions`] | how long to wait, how long to hold, when to give up |
//! | [`LockError`], [`ErrorCode`] | what failed, and what to do |
//! | [`Fence`] | the fencing token of a grant |
//! | [`CancelToken`] | ends waits; also what fires when a lock is lost |
//! | [`Slot`], [`Run`], [`RunOnce`] | a job that runs once per period |
//! | [`AdvisoryGuard`], [`AdvisoryKey`], [`AdvisoryOptions`] | session locks |
//! | [`Term`], [`Leader`] | leader election: a term of one's own, and who leads |
//! | [`Operator`], [`Finding`] | who holds what, counts, cleanup, breaking a lock; what is unsafe or slow here |
//! | [`MemoryBackend`], [`LockClient`] | locks without a server, for tests |
//! | [`TelemetryOptions`], [`LockSummary`] | every operation as an event, and the whole of each lock |
//!
//! # Two kinds of lock
//!
//! * A **lease** ([`PgLockClient::lock`]) is a row with an expiry. It is renewed while its guard
//!   lives and ends by itself when its holder dies; every grant carries a fencing token ([`Fence`]). Leases are
//!   compatible, row for row, with the TypeScript SyncGuard on the same tables.
//! * A **session lock** ([`PgLockClient::advisory_lock`]) is PostgreSQL's advisory lock: no table, no
//!   ttl, gone with its connection, which its guard occupies.
//!
//! When in doubt, take a lease. `docs/which-lock.md` in the repository compares them by question.
//!
//! # The life of a lease
//!
//! ```text
//!   lock("k")   ── granted, fence 7 ──▶  held          ends in 30 s, by the server's clock
//!   every 10 s  ── renewed ──────────▶  held          ends in 30 s, again
//!   drop(guard) ── released ─────────▶  free at once
//!
//!   or: killed, paused, cut off          nobody renews it
//!                                        30 s: its holder, if it runs, knows that it is lost
//!                                      + 1 s: others may have the key, with fence 8
//! ```
//!
//! # Waiting
//!
//! [`lock`](PgLockClient::lock) waits up to 5 s, [`try_lock`](PgLockClient::try_lock) does not wait,
//! [`with_lock`](PgLockClient::with_lock) runs a closure; [`LockOptions`] says for how long, how
//! often, and when to give up ([`CancelToken`]). Threads of one client queue first come, first served
//! and only the first of them asks the server; between processes there is no such order. Locks
//! are not re-entrant.
//!
//! # Several keys
//!
//! [`lock_all`](PgLockClient::lock_all) takes up to 64 keys together, all or none, and holds nothing while it
//! waits: no order of asking can deadlock.
//!
//! # Semaphores and readers
//!
//! [`semaphore`](PgLockClient::semaphore) hands out a limited number of permits;
//! [`read_lock`](PgLockClient::read_lock) shares a key among readers, beside writers that take it with
//! [`lock`](PgLockClient::lock). Both give a [`LockGuard`]. `docs/semaphores.md` and `docs/shared-leases.md` in the
//! repository have the rest.
//!
//! # Once per period
//!
//! [`run_once`](PgLockClient::run_once) runs a job once per [`Slot`], whoever's cron starts it: at least once,
//! at most once, or exactly once together with what the job writes. `docs/run-once.md` has more.
//!
//! # Losing a lock
//!
//! A lease can be lost: the server was away for longer than the ttl, the process was stopped, an
//! operator broke it. The guard says so as early as can be known: [`LockGuard::is_held`] compares the
//! clock itself, [`LockGuard::lost`] is a token that fires, `on_lost` is called. The holder's own
//! deadline is counted from *before* its last confirmed request, and ends a second before another
//! can have the key.
//!
//! ```no_run
//! # fn next_step() -> bool { false }
//! # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
//! let guard = client.lock("report:2026-11")?;
//! while next_step() {
//!     if !guard.is_held() {
//!         break; // another process may hold it now: stop, and start again later
//!     }
//! }
//! # Ok::<(), syncguard::LockError>(())
//! ```
//!
//! # Fencing: the complete answer
//!
//! No lease can stop a process that was paused from waking up late. If what the lock protects is in
//! the same database, [`LockGuard::fence_transaction`] makes such a late transaction impossible to
//! commit; elsewhere, store the fence beside the data and refuse a smaller one.
//!
//! ```no_run
//! # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
//! # use syncguard::postgres::{Client, NoTls};
//! # let mut connection = Client::connect("postgresql://app@db.example/app", NoTls).unwrap();
//! let guard = client.lock("account:7")?;
//! let mut transaction = connection.transaction().unwrap();
//! guard.fence_transaction(&mut transaction)?; // first of all
//! transaction.execute("UPDATE account SET balance = balance - 5 WHERE id = 7", &[]).unwrap();
//! transaction.commit().unwrap();
//! # Ok::<(), syncguard::LockError>(())
//! ```
//!
//! # One leader among many processes
//!
//! [`elect`](PgLockClient::elect) campaigns for a key, runs a closure for each [`Term`] that it wins, and
//! campaigns again; [`leader`](PgLockClient::leader) tells anybody who leads. `docs/election.md` in the
//! repository has the rest.
//!
//! # Without guards
//!
//! [`acquire`](PgLockClient::acquire), [`extend`](PgLockClient::extend),
//! [`release`](PgLockClient::release), [`is_locked`](PgLockClient::is_locked) and
//! [`lookup`](PgLockClient::lookup) are single attempts that answer with what happened. Extending or
//! releasing a lease that is not held is harmless.
//!
//! # Errors, and what may remain held
//!
//! [`LockError::code`] says what kind of failure it is; the text says what to do. An error means that
//! nothing was changed, unless [`LockError::is_outcome_unknown`] says that the answer to a commit was
//! lost: then the client's worker goes on releasing the id until its lease would be over.
//!
//! # Time
//!
//! Who may take a key is decided by the server's clock alone. How long a call may take is up to its
//! options; see `# Blocking` at [`PgLockClient`] for the two kinds of connection where the client
//! cannot enforce it by itself.
//!
//! # Testing your own code
//!
//! Take a [`LockClient`] (a [`PgLockClient`] has one in [`locks`](PgLockClient::locks)) and hand your
//! code one over a [`MemoryBackend`], whose clock and faults the test controls, the moment a lock is
//! lost included:
//!
//! ```
//! use std::time::Duration;
//! use syncguard::{LockClient, MemoryBackend};
//!
//! let memory = MemoryBackend::manual();
//! let client = LockClient::new(memory.clone());
//! let guard = client.lock("payment:42")?;
//! memory.remove("payment:42")?;
//! memory.advance(Duration::from_secs(11)); // the next renewal finds nothing
//! assert!(guard.lost().wait_timeout(Duration::from_secs(5)));
//! assert!(!guard.is_held());
//! # Ok::<(), syncguard::LockError>(())
//! ```
//!
//! # Where to find more
//!
//! | about | where |
//! | --- | --- |
//! | choices of a lock, of a client | [`LockOptions`], [`PgLockClientBuilder`] |
//! | session locks | [`AdvisoryKey`], [`AdvisoryOptions`], [`AdvisoryGuard`] |
//! | the end of a program | [`PgLockClient::close`], [`CancelToken`] |
//! | events for logs and metrics | [`telemetry`] |
//! | who holds what, cleanup, breaking a lock | [`diagnostics`], [`Operator`] |
//! | time and faults in tests | [`memory`] |
//! | a backend of one's own | [`backend`], and the package `syncguard-contract`, which tests it |
//!
//! # Features
//!
//! * `serde`: values that hold neither a key nor a lock id (fences, codes, answers, events, reports) can be
//!   serialised and deserialised, under the names that other SyncGuard clients use.
//! * `rustls`, `native-tls`: TLS by connection string (`sslmode`, `sslrootcert` and so on), by rustls with ring
//!   or by the library of the system; with both it is rustls. `docs/connecting.md` in the repository has the rest.
//! * `metrics`, `tracing`: operations and whole locks for the crates of those names, by
//!   [`TelemetryOptions`]; `docs/metrics.md` in the repository lists the names.
//!
//! # Async programs
//!
//! These are blocking calls. Inside a runtime use `spawn_blocking`, or they fail; guards and clients
//! may be dropped anywhere.

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
pub mod diagnostics;
mod error;
mod leases;
mod lock;
pub mod memory;
mod model;
mod pg;
mod sync;
pub mod telemetry;
mod threads;
mod tls;
mod waiting;

// What programs type. What only authors of a backend need is in `backend`, and nowhere else.
pub use client::{PgLockClient, PgLockClientBuilder};

pub use lock::{
    Backoff, ClientSettings, CloseReport, DEFAULT_MAX_RETRIES, DEFAULT_RETRY_DELAY, DEFAULT_TIMEOUT,
    DEFAULT_TTL, Heartbeat, Jitter, Leader, LockClient, LockGuard, LockOptions, MultiGuard,
    ReleaseErrorContext, ReleaseSource, Run, RunOnce, Semaphore, Term,
};

pub use cancel::CancelToken;
pub use error::{ErrorCode, LockError, Result};
pub use model::fence::{FENCE_MAX, FENCE_WARN, Fence};

pub use backend::{
    AcquireResult, Acquired, Capabilities, ExtendResult, LockBackend, LockEnding, LockInfo, LockInfoRaw,
    LockKind, Lookup, LostReason, Reason, ReleaseResult, Slot,
};

pub use advisory::{
    AdvisoryGuard, AdvisoryKey, AdvisoryLost, AdvisoryOptions, AdvisorySession, DEFAULT_MAX_HOLD,
};

pub use diagnostics::{get_by_id, get_by_id_raw, get_by_key, get_by_key_raw, owns};
pub use leases::{
    BrokenLock, CLEANUP_GUARD_MS, Counts, Finding, IdleCounter, JobMark, MarkReset, Operator, Severity,
    SlotKind, Waiter,
};
pub use memory::MemoryBackend;
pub use telemetry::{
    EventResult, LockEvent, LockSummary, Operation, Telemetry, TelemetryHandle, TelemetryOptions,
    with_telemetry,
};

// How keys, fences and ids look: every SyncGuard client computes the same.
pub use model::hash::hash_key;
pub use model::key::{
    BACKEND_LIMIT_POSTGRES, MAX_KEY_LENGTH_BYTES, MAX_PERMITS, RESERVE_BYTES_POSTGRES, make_fence_key,
    make_storage_key, normalize_and_validate_key,
};
pub use model::lock_id::validate_lock_id;
pub use model::time::{MAX_TTL, TIME_TOLERANCE_MS, is_live};

// The versions whose types are in this interface: for a pool of the caller's.
pub use {postgres, r2d2, r2d2_postgres};

/// A panic that is caught on its way through one of these leaves it of use: state changes in whole steps,
/// mutexes are not poisoned, and what callers pass in runs contained.
macro_rules! safe_to_unwind {
    ($($ty:ty),* $(,)?) => {$(
        impl std::panic::UnwindSafe for $ty {}
        impl std::panic::RefUnwindSafe for $ty {}
    )*};
}

safe_to_unwind!(
    PgLockClient,
    PgLockClientBuilder,
    LockClient,
    LockGuard,
    MultiGuard,
    Term,
    LockOptions,
    Run,
    ClientSettings,
    LockError,
    AdvisoryGuard,
    AdvisoryOptions,
    CancelToken,
    MemoryBackend,
    Operator,
    Semaphore,
    TelemetryHandle,
    TelemetryOptions,
);

/// The examples in the documents compile.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/fencing.md")]
    struct Fencing;
    #[doc = include_str!("../docs/run-once.md")]
    struct RunOnce;
    #[doc = include_str!("../docs/errors.md")]
    struct Errors;
    #[doc = include_str!("../docs/election.md")]
    struct Election;
    #[doc = include_str!("../docs/several-keys.md")]
    struct SeveralKeys;
    #[doc = include_str!("../docs/connecting.md")]
    struct Connecting;
    #[doc = include_str!("../docs/operations.md")]
    struct Operations;
    #[doc = include_str!("../docs/shared-leases.md")]
    struct SharedLeases;
    #[doc = include_str!("../docs/semaphores.md")]
    struct Semaphores;
    #[doc = include_str!("../docs/advisory-locks.md")]
    struct AdvisoryLocks;
}
