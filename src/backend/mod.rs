//! The port: what a backend must do, and the contract it is held to.
//!
//! Everything above this module (waiting, guards, renewal, telemetry, diagnostics) knows backends
//! only through [`LockBackend`]; everything below it implements it.
//!
//! # The contract
//!
//! 1. **One holder.** Of all acquires of one key, at most one is granted while its lease is live by
//!    [`is_live`](crate::is_live) on the backend's one clock.
//! 2. **Fences grow.** Each grant of a key carries a fence greater than every earlier one of that
//!    key, through restarts, releases and clean-up, for ever.
//! 3. **Decisions are atomic.** Resolving the id, judging liveness and changing the lease are one
//!    indivisible step, and the clock is read after all waits.
//! 4. **One attempt.** No operation retries contention or waits for a key to become free.
//! 5. **No guess.** An error either means that nothing was changed, or says that the outcome is
//!    unknown ([`LockError::with_unknown_outcome`](crate::LockError::with_unknown_outcome)).
//! 6. **Bounded.** Every call returns by its deadline, whatever the network does.
//! 7. **Validate first.** Bad keys, ids and ttls are `InvalidArgument` before any I/O.
//! 8. **Cancellation.** A fired token ends a call with `Aborted`, before anything is written or not at all.

mod forward;
mod info;
mod outcome;
mod watch;

use std::time::Duration;

use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::model::fence::Fence;
use crate::model::time::{Clock, Moment};

pub use info::{Capabilities, LockInfo, LockInfoDebug, Lookup, TimeAuthority};
pub use outcome::{
    AcquireResult, Acquired, Attempt, ExtendOutcome, ExtendResult, LostReason, Reason, ReleaseOutcome,
    ReleaseResult, RenewOutcome, Renewal,
};
pub use watch::{Heard, OnHeard, Watch};

/// A place where leases are kept. See the [contract](self).
///
/// The five operations are what the specification asks for. The provided methods are what guards
/// need beyond them; a backend that can do better than the default should.
pub trait LockBackend: Send + Sync {
    /// Tries once to take the key for `ttl`.
    fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult>;

    /// Lets go of the lease with this id. Harmless if it is not held.
    fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome>;

    /// Sets the expiry of the lease with this id to now plus `ttl`. Never revives a dead lease.
    fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome>;

    /// Whether the key has a live lease. Reads only.
    fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool>;

    /// The live lease of a key or with an id. Reads only; for diagnosis, never as a guard.
    fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>>;

    /// What this backend is and can do.
    fn capabilities(&self) -> Capabilities;

    /// [`acquire`](LockBackend::acquire) with an id that the caller chose and a deadline of its own.
    ///
    /// Idempotent by lock id: the same attempt again, after an unknown outcome, answers with the
    /// grant that the first one made.
    fn attempt(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<AcquireResult> {
        self.acquire(attempt.key, attempt.ttl, cancel)
    }

    /// [`is_locked`](LockBackend::is_locked) for a waiter that looks before it tries again.
    fn peek(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<bool> {
        let _ = deadline;
        self.is_locked(key, cancel)
    }

    /// Watches a key for a waiter that has waited for a while and may wait longer: `heard` is called
    /// when the key is let go, in this process or another. The default watches nothing.
    ///
    /// It is latency, never correctness: a waiter goes on looking, only more rarely while
    /// [`is_listening`](Watch::is_listening). A call too many costs one request; one that never comes
    /// costs time. Returns at once: what takes time is done on a thread of the backend's, and what
    /// fails is tried again there. `None` if there is nothing to be had now; it may be asked for again.
    fn watch(&self, key: &str, heard: OnHeard) -> Option<Box<dyn Watch>> {
        let _ = (key, heard);
        None
    }

    /// [`extend`](LockBackend::extend) with a deadline of its own.
    fn extend_by(
        &self,
        lock_id: &str,
        ttl: Duration,
        deadline: Moment,
        cancel: &CancelToken,
    ) -> Result<ExtendOutcome> {
        let _ = deadline;
        self.extend(lock_id, ttl, cancel)
    }

    /// [`release`](LockBackend::release) that no token stops: for guards that end.
    fn release_by(&self, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        let _ = deadline;
        self.release(lock_id, &CancelToken::never())
    }

    /// Extends many leases, in as few round trips as possible, on resources that a busy client
    /// cannot exhaust. One outcome per lease, in order; an `Err` says nothing about the lease.
    fn renew(&self, leases: &[Renewal<'_>], deadline: Moment) -> Vec<Result<RenewOutcome>> {
        leases
            .iter()
            .map(|lease| {
                let outcome = self.extend_by(lease.lock_id, lease.ttl, deadline, &CancelToken::never())?;
                Ok(match outcome {
                    ExtendOutcome::Extended { expires_at_ms } => RenewOutcome::Renewed { expires_at_ms },
                    ExtendOutcome::NotHeld(Some(Reason::Expired)) => RenewOutcome::Lost(LostReason::Expired),
                    ExtendOutcome::NotHeld(_) => RenewOutcome::Lost(LostReason::RowMissing),
                })
            })
            .collect()
    }

    /// Prepares for guards that are renewed; called once before the first of them. A backend that
    /// cannot keep a resource free for renewals refuses here.
    fn reserve_renewals(&self) -> Result<()> {
        Ok(())
    }

    /// [`lookup`](LockBackend::lookup) with the raw key and id, for the `*_raw` helpers alone.
    #[doc(hidden)]
    fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoDebug>>;

    /// The SQL statement that fails, inside a caller's transaction, unless `fence` is this key's
    /// newest and its lease is live. Only for a backend whose leases live in the caller's database.
    #[doc(hidden)]
    fn fence_statement(&self, key: &str, fence: Fence) -> Result<String> {
        let _ = (key, fence);
        Err(LockError::invalid(
            "this backend keeps its leases outside the database of the transaction: store the fence beside the data instead",
        ))
    }

    /// The clock that local deadlines are counted on.
    fn clock(&self) -> Clock {
        Clock::system()
    }

    /// How long a single operation may take: what guards use for calls that have no deadline of
    /// their own.
    fn operation_timeout(&self) -> Duration {
        Duration::from_secs(5)
    }

    /// Lets go of idle resources. Operations may fail afterwards.
    fn close(&self) {}
}
