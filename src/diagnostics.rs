//! Diagnosis: who holds a lock, on any backend; and the answers of an [`Operator`](crate::Operator).
//!
//! **Never decide by these answers.** Each is true of one moment that is past when it arrives:
//! between the lookup and your action the lease can expire and go to another holder. To act only while a
//! lock is held, call `extend` or `release` and look at *their* answer (they check and act in one
//! step), or use a fenced transaction. These functions are for screens, logs and tests.
//!
//! ```
//! use std::time::Duration;
//! use syncguard::backend::LockBackend;
//! use syncguard::{CancelToken, MemoryBackend, get_by_key, hash_key, owns};
//!
//! let backend = MemoryBackend::manual();
//! assert!(get_by_key(&backend, "report")?.is_none());
//!
//! let grant = backend.acquire("report", Duration::from_secs(30), &CancelToken::never())?;
//! let lease = grant.acquired().expect("the key was free");
//! let info = get_by_key(&backend, "report")?.expect("it is held now");
//! assert_eq!(info.key_hash, hash_key("report"));
//! assert_eq!(info.fence, lease.fence);
//! assert!(owns(&backend, &lease.lock_id)?);
//! # Ok::<(), syncguard::LockError>(())
//! ```
//!
//! # Blocking
//!
//! Each at most the `operation_timeout` of the backend.
//!
//! # Cancellation
//!
//! No token ends them. For a lookup that a token can end, use [`LockBackend::lookup`] itself, or a client's own methods on
//! [`cancellable`](crate::LockClient::cancellable).

use crate::backend::{LockBackend, LockInfo, LockInfoRaw, Lookup};
use crate::cancel::CancelToken;
use crate::error::Result;

// What an `Operator` answers. They are at the root, too.
pub use crate::leases::{
    BlockedSession, BrokenLock, CLEANUP_GUARD_MS, Counts, Finding, IdleCounter, JobMark, MarkReset, Severity,
    SlotKind, Waiter,
};

/// The live lease of a key. An expired one and none at all are both `None`.
///
/// For diagnosis only; see the [module](crate::diagnostics).
pub fn get_by_key<B: LockBackend + ?Sized>(backend: &B, key: &str) -> Result<Option<LockInfo>> {
    backend.lookup(Lookup::Key(key), &CancelToken::never())
}

/// The live lease with this lock id. An expired one and none at all are both `None`.
///
/// For diagnosis only; see the [module](crate::diagnostics).
pub fn get_by_id<B: LockBackend + ?Sized>(backend: &B, lock_id: &str) -> Result<Option<LockInfo>> {
    backend.lookup(Lookup::LockId(lock_id), &CancelToken::never())
}

/// [`get_by_key`] with the raw key (its NFC form) and the raw lock id.
///
/// **Sensitive**: whoever learns the lock id can release the lock, and keys may name people. For
/// debugging by hand only; keep the answer out of logs.
pub fn get_by_key_raw<B: LockBackend + ?Sized>(backend: &B, key: &str) -> Result<Option<LockInfoRaw>> {
    backend.lookup_raw(Lookup::Key(key), &CancelToken::never())
}

/// [`get_by_id`] with the raw key (its NFC form) and the raw lock id.
///
/// **Sensitive**: whoever learns the lock id can release the lock, and keys may name people. For
/// debugging by hand only; keep the answer out of logs.
pub fn get_by_id_raw<B: LockBackend + ?Sized>(backend: &B, lock_id: &str) -> Result<Option<LockInfoRaw>> {
    backend.lookup_raw(Lookup::LockId(lock_id), &CancelToken::never())
}

/// Whether a live lease has this lock id. It changes nothing, unlike an extend, which must not be used to ask.
///
/// **Check-then-act is a race**: `if owns(..) { write() }` writes after the lease is lost. See the
/// [module](crate::diagnostics) for what to do instead.
///
/// ```no_run
/// # use syncguard::{MemoryBackend, owns};
/// # let (backend, lock_id) = (MemoryBackend::new(), String::new());
/// # fn write_file() {}
/// // WRONG: between the two lines the lease can go to another holder.
/// if owns(&backend, &lock_id)? {
///     write_file();
/// }
/// # Ok::<(), syncguard::LockError>(())
/// ```
pub fn owns<B: LockBackend + ?Sized>(backend: &B, lock_id: &str) -> Result<bool> {
    Ok(get_by_id(backend, lock_id)?.is_some())
}
