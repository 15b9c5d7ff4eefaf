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
//! | [`Term`], [`Leader`] | leader election: the term of this process, and who leads |
//! | [`Operator`], [`Finding`] | who holds what, counts, cleanup, breaking a lock; what is unsafe or slow here |
//! | [`MemoryBackend`], [`LockClient`] | locks without a server, for tests |
//! | [`TelemetryOptions`], [`LockSummary`] | every operation as an event, and each lock as a whole |
//!
//! # Two kinds of lock
//!
//! * A **lease** ([`PgLockClient::lock`]) is a row with an expiry. It is renewed while its guard
//!   lives and ends by itself when its holder dies; every grant carries a fencing token ([`Fence`]). Leases are
//!   compatible, row for row, with the TypeScript SyncGuard on the same tables.
//! * A **session lock** ([`PgLockClient::advisory_lock`]) is PostgreSQL's advisory lock: no table, no
//!   ttl, gone with its connection, which its guard occupies.
//!
//! When in doubt, take a lease. [Which lock?][which-lock] compares them by question; [coming from][coming-from]
//! maps the terms of other libraries.
//!
//! # The life of a lease
//!
//! It is granted and renewed, and then released, or abandoned by a holder that dies:
//!
#![doc = include_str!("../docs/pictures/lease.svg")]
//!
//! A key changes hands when its holder is paused for longer than its lease:
//!
#![doc = include_str!("../docs/pictures/takeover.svg")]
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
//! waits: no order of the keys can deadlock. [More][several-keys]
//!
//! # Semaphores and readers
//!
//! [`semaphore`](PgLockClient::semaphore) hands out a limited number of permits;
//! [`read_lock`](PgLockClient::read_lock) shares a key among readers, beside writers that take it with
//! [`lock`](PgLockClient::lock). Both return a [`LockGuard`]. The pages on [semaphores][semaphores] and [shared
//! leases][shared-leases] have the rest.
//!
//! # Served in order
//!
//! With [`LockOptions::fair`] those who wait for a key on any machine are served first come, first served, or by
//! [`priority`](LockOptions::priority), among those who ask for it: [fair waiting][fair-waiting].
//!
//! # Once per period
//!
//! [`run_once`](PgLockClient::run_once) runs a job once per [`Slot`], whoever's cron starts it: at least once,
//! at most once, or exactly once together with what the job writes. [Its page][run-once] has more.
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
//! commit; elsewhere, store the fence beside the data and refuse a smaller one. [Why, and the rules][fencing]
//!
#![doc = include_str!("../docs/pictures/fenced-transaction.svg")]
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
//! campaigns again; [`leader`](PgLockClient::leader) tells anybody who leads. [Its page][election] has
//! the rest.
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
//! lost: then the client's worker keeps trying to release the id until its lease would be over.
//!
//! # Time
//!
//! The server's clock alone decides who may take a key. The options of a call say how long it may
//! take; see `# Blocking` at [`PgLockClient`] for the two kinds of connection where the client
//! cannot enforce it by itself.
//!
//! # Testing your own code
//!
//! Let your code take a [`LockClient`] (that of a [`PgLockClient`] is [`locks`](PgLockClient::locks)). In tests
//! give it one over a [`MemoryBackend`], whose clock and faults the test controls, including the moment a
//! lock is lost:
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
//! | a custom backend | [`backend`], and the package `syncguard-contract`, which tests it |
//! | a guide, all options and limits, production | [guide], [options], [production] |
//! | connection strings, TLS, several hosts | [connecting] |
//! | what to do about an error | [errors] |
//! | running it: settings, monitoring, failover | [operations], [high availability][high-availability] |
//! | rights, and what leaks | [security] |
//! | in a shell, from C, from Python | [the command][command], [C][c-page], [Python][python-page] |
//! | what was tried, and how fast it is | [reliability], [performance] |
//! | other libraries | [coming from][coming-from], [a comparison][comparison] |
//!
//! What the modules export and programs type is also at the root, although the lists below leave out what few need:
//! `syncguard::LockInfo` is [`backend::LockInfo`]. So are `syncguard::postgres`, `syncguard::r2d2` and
//! `syncguard::r2d2_postgres`: the driver and the pool in the versions whose types are in this interface
//! ([postgres 0.19](https://docs.rs/postgres/0.19), [r2d2 0.8](https://docs.rs/r2d2/0.8),
//! [r2d2_postgres 0.18](https://docs.rs/r2d2_postgres/0.18)).
//!
//! # Features
//!
//! * `serde`: values that hold neither a key nor a lock id (fences, codes, answers, events, reports) can be
//!   serialised and deserialised, under the names that other SyncGuard clients use.
//! * `rustls`, `native-tls`: TLS by connection string (`sslmode`, `sslrootcert` and so on), by rustls with ring
//!   or by the library of the system; with both, rustls is used. [Connecting][connecting] has the rest.
//! * `metrics`, `tracing`: operations and whole locks for the crates of those names, by
//!   [`TelemetryOptions`]; [metrics][metrics-page] lists the names.
//!
//! # Async programs
//!
//! These calls block. Inside a runtime use `spawn_blocking`, or they fail; guards and clients
//! may be dropped anywhere.
//!
//! [which-lock]: https://docs.rs/crate/syncguard/latest/source/docs/which-lock.md
//! [coming-from]: https://docs.rs/crate/syncguard/latest/source/docs/coming-from.md
//! [comparison]: https://docs.rs/crate/syncguard/latest/source/docs/comparison.md
//! [guide]: https://docs.rs/crate/syncguard/latest/source/docs/guide.md
//! [options]: https://docs.rs/crate/syncguard/latest/source/docs/options.md
//! [production]: https://docs.rs/crate/syncguard/latest/source/docs/production.md
//! [semaphores]: https://docs.rs/crate/syncguard/latest/source/docs/semaphores.md
//! [fair-waiting]: https://docs.rs/crate/syncguard/latest/source/docs/fair-waiting.md
//! [shared-leases]: https://docs.rs/crate/syncguard/latest/source/docs/shared-leases.md
//! [run-once]: https://docs.rs/crate/syncguard/latest/source/docs/run-once.md
//! [several-keys]: https://docs.rs/crate/syncguard/latest/source/docs/several-keys.md
//! [fencing]: https://docs.rs/crate/syncguard/latest/source/docs/fencing.md
//! [election]: https://docs.rs/crate/syncguard/latest/source/docs/election.md
//! [connecting]: https://docs.rs/crate/syncguard/latest/source/docs/connecting.md
//! [metrics-page]: https://docs.rs/crate/syncguard/latest/source/docs/metrics.md
//! [errors]: https://docs.rs/crate/syncguard/latest/source/docs/errors.md
//! [operations]: https://docs.rs/crate/syncguard/latest/source/docs/operations.md
//! [high-availability]: https://docs.rs/crate/syncguard/latest/source/docs/high-availability.md
//! [security]: https://docs.rs/crate/syncguard/latest/source/docs/security.md
//! [command]: https://docs.rs/crate/syncguard/latest/source/docs/command.md
//! [c-page]: https://docs.rs/crate/syncguard/latest/source/docs/c.md
//! [python-page]: https://docs.rs/crate/syncguard/latest/source/docs/python.md
//! [reliability]: https://docs.rs/crate/syncguard/latest/source/docs/reliability.md
//! [performance]: https://docs.rs/crate/syncguard/latest/source/docs/performance.md

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
//
// Rustdoc lists re-exports before everything else and sorts what it lists: so that nobody has to read past names
// that few need to find `PgLockClient`, each re-export of a public module is either shown as an item of this
// page or, hidden here, on the page of its module alone.
pub use client::{PgLockClient, PgLockClientBuilder};

pub use lock::{
    Backoff, ClientSettings, CloseReport, DEFAULT_MAX_RETRIES, DEFAULT_RETRY_DELAY, DEFAULT_TIMEOUT,
    DEFAULT_TTL, Heartbeat, Jitter, Leader, LockClient, LockGuard, LockOptions, MultiGuard,
    ReleaseErrorContext, ReleaseSource, Run, RunOnce, Semaphore, Term,
};

pub use cancel::CancelToken;
pub use error::{ErrorCode, LockError, Result};
pub use model::fence::{FENCE_MAX, FENCE_WARN, Fence};

#[doc(inline)]
pub use backend::{AcquireResult, Acquired, ExtendResult, Lookup, LostReason, ReleaseResult, Slot};
#[doc(hidden)]
pub use backend::{Capabilities, LockBackend, LockEnding, LockInfo, LockInfoRaw, LockKind, Reason};

pub use advisory::{
    AdvisoryGuard, AdvisoryKey, AdvisoryLost, AdvisoryOptions, AdvisorySession, DEFAULT_MAX_HOLD,
};

#[doc(hidden)]
pub use diagnostics::{
    BlockedSession, BrokenLock, CLEANUP_GUARD_MS, Counts, Finding, IdleCounter, JobMark, MarkReset, Severity,
    SlotKind, Waiter, get_by_id, get_by_id_raw, get_by_key, get_by_key_raw, owns,
};
pub use leases::Operator;
#[doc(inline)]
pub use memory::MemoryBackend;
#[doc(hidden)]
pub use telemetry::{EventResult, LockEvent, Operation, Telemetry, TelemetryHandle, with_telemetry};
#[doc(inline)]
pub use telemetry::{LockSummary, TelemetryOptions};

// How keys, fences and ids look: every SyncGuard client computes the same.
pub use model::hash::hash_key;
pub use model::key::{
    BACKEND_LIMIT_POSTGRES, MAX_KEY_LENGTH_BYTES, MAX_PERMITS, RESERVE_BYTES_POSTGRES, make_fence_key,
    make_storage_key, normalize_and_validate_key,
};
pub use model::lock_id::validate_lock_id;
pub use model::time::{MAX_TTL, TIME_TOLERANCE_MS, is_live};

// The versions whose types are in this interface: for a pool of the caller's. The page names them above its lists.
#[doc(hidden)]
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
    #[doc = include_str!("../docs/guide.md")]
    struct Guide;
    #[doc = include_str!("../docs/production.md")]
    struct Production;
    #[doc = include_str!("../docs/testing.md")]
    struct Testing;
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
    #[doc = include_str!("../docs/fair-waiting.md")]
    struct FairWaiting;
    #[doc = include_str!("../docs/semaphores.md")]
    struct Semaphores;
    #[doc = include_str!("../docs/advisory-locks.md")]
    struct AdvisoryLocks;
}
