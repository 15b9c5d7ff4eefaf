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

use std::fmt;
use std::time::Duration;

use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::model::fence::Fence;
use crate::model::hash::hash_key;
use crate::model::time::{Clock, Moment};

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

/// One attempt to take a key, with everything chosen before the first byte is sent.
#[derive(Clone, Copy)]
pub struct Attempt<'a> {
    /// The key.
    pub key: &'a str,
    /// The id that the lease will have.
    pub lock_id: &'a str,
    /// How long the lease lasts from the grant.
    pub ttl: Duration,
    /// When the attempt must have returned.
    pub deadline: Moment,
}

impl fmt::Debug for Attempt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt")
            .field("key_hash", &hash_key(self.key))
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

/// One lease to renew.
#[derive(Clone, Copy)]
pub struct Renewal<'a> {
    /// The key, to tell who has taken a lost lease over.
    pub key: &'a str,
    /// The lease.
    pub lock_id: &'a str,
    /// Its new time to live.
    pub ttl: Duration,
}

impl fmt::Debug for Renewal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renewal")
            .field("key_hash", &hash_key(self.key))
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

/// What an acquire answers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a granted lease stays held until it is released or its ttl is over"]
pub enum AcquireResult {
    /// The lease is ours.
    Acquired(Acquired),
    /// Somebody else holds the key.
    Locked,
}

impl AcquireResult {
    /// The grant, if there was one.
    #[must_use]
    pub fn acquired(self) -> Option<Acquired> {
        match self {
            Self::Acquired(grant) => Some(grant),
            Self::Locked => None,
        }
    }

    /// The fence of the grant, if there was one.
    #[must_use]
    pub fn fence(&self) -> Option<Fence> {
        match self {
            Self::Acquired(grant) => Some(grant.fence),
            Self::Locked => None,
        }
    }
}

/// A granted lease.
#[derive(Clone, PartialEq, Eq)]
pub struct Acquired {
    /// What extends and releases the lease: 22 characters. Whoever knows it can let go of the lock.
    pub lock_id: String,
    /// The grant's fencing token.
    pub fence: Fence,
    /// When the lease ends, in Unix milliseconds of the server's clock.
    pub expires_at_ms: i64,
}

impl fmt::Debug for Acquired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acquired")
            .field("lock_id_hash", &hash_key(&self.lock_id))
            .field("fence", &self.fence)
            .field("expires_at_ms", &self.expires_at_ms)
            .finish()
    }
}

/// Why an operation was refused, as far as the backend knows without asking again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Somebody else holds the key.
    Locked,
    /// The lease is there, and over.
    Expired,
    /// There is no such lease.
    NotFound,
}

impl Reason {
    /// The name used in telemetry events: `locked`, `expired` or `not-found`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Locked => "locked",
            Self::Expired => "expired",
            Self::NotFound => "not-found",
        }
    }
}

/// What a backend answers to a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseOutcome {
    /// The lease was held and is gone.
    Released,
    /// No live lease has this id; the reason is for telemetry.
    NotHeld(Option<Reason>),
}

/// What a backend answers to an extend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtendOutcome {
    /// The lease now ends then (Unix milliseconds of the server's clock).
    Extended {
        /// The new expiry.
        expires_at_ms: i64,
    },
    /// No live lease has this id; the reason is for telemetry.
    NotHeld(Option<Reason>),
}

/// What the client answers to a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseResult {
    /// The lease was held and is gone.
    Released,
    /// No live lease has this id: it was released, has expired, or never existed.
    NotHeld,
}

/// What the client answers to an extend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "NotHeld means that the lock is lost"]
pub enum ExtendResult {
    /// The lease now ends then (Unix milliseconds of the server's clock).
    Extended {
        /// The new expiry.
        expires_at_ms: i64,
    },
    /// No live lease has this id: it was released, has expired, or never existed.
    NotHeld,
}

impl From<ReleaseOutcome> for ReleaseResult {
    fn from(outcome: ReleaseOutcome) -> Self {
        match outcome {
            ReleaseOutcome::Released => Self::Released,
            ReleaseOutcome::NotHeld(_) => Self::NotHeld,
        }
    }
}

impl From<ExtendOutcome> for ExtendResult {
    fn from(outcome: ExtendOutcome) -> Self {
        match outcome {
            ExtendOutcome::Extended { expires_at_ms } => Self::Extended { expires_at_ms },
            ExtendOutcome::NotHeld(_) => Self::NotHeld,
        }
    }
}

/// What became of a lease that was to be renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenewOutcome {
    /// It now ends then (Unix milliseconds of the server's clock).
    Renewed {
        /// The new expiry.
        expires_at_ms: i64,
    },
    /// It is gone.
    Lost(LostReason),
    /// Its row was busy and is still there: nothing is known, ask again soon and alone.
    Busy,
}

/// Why a holder can no longer trust its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// It ran out before it was renewed.
    Expired,
    /// Somebody else holds the key now.
    TakenOver {
        /// The newer holder's fence.
        fence: Fence,
    },
    /// Its row is gone: released by somebody who knew the id, broken by an operator, or cleaned up.
    RowMissing,
    /// No answer came from the server before the local deadline.
    Unreachable,
    /// The guard's own `max_hold` was reached.
    MaxHold,
    /// The client was closed.
    Closed,
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Expired => f.write_str("the lease expired before it was renewed"),
            Self::TakenOver { fence } => write!(f, "a newer holder has fence {fence}"),
            Self::RowMissing => f.write_str("the lease's row is gone"),
            Self::Unreachable => f.write_str("the server did not answer before the lease was over"),
            Self::MaxHold => f.write_str("the guard's max_hold was reached"),
            Self::Closed => f.write_str("the client was closed"),
        }
    }
}

/// Which lease to look up.
#[derive(Clone, Copy)]
pub enum Lookup<'a> {
    /// The one that holds this key.
    Key(&'a str),
    /// The one with this id.
    LockId(&'a str),
}

impl fmt::Debug for Lookup<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => write!(f, "Key(#{})", hash_key(key)),
            Self::LockId(id) => write!(f, "LockId(#{})", hash_key(id)),
        }
    }
}

/// A live lease, without the raw key and id: safe to print and to log.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockInfo {
    /// [`hash_key`](crate::hash_key) of the key.
    pub key_hash: String,
    /// [`hash_key`](crate::hash_key) of the lock id.
    pub lock_id_hash: String,
    /// When the lease ends, in Unix milliseconds of the server's clock.
    pub expires_at_ms: i64,
    /// When it was granted, in Unix milliseconds of the server's clock.
    pub acquired_at_ms: i64,
    /// Its fencing token.
    pub fence: Fence,
}

/// A live lease with its raw key and id. **Sensitive**: for debugging only. `Debug` hides both.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockInfoDebug {
    /// The caller's key, in NFC.
    pub key: String,
    /// The lock id. Whoever knows it can let go of the lock.
    pub lock_id: String,
    /// When the lease ends, in Unix milliseconds of the server's clock.
    pub expires_at_ms: i64,
    /// When it was granted, in Unix milliseconds of the server's clock.
    pub acquired_at_ms: i64,
    /// Its fencing token.
    pub fence: Fence,
}

impl LockInfoDebug {
    /// A live lease as a backend found it.
    #[must_use]
    pub fn new(key: String, lock_id: String, expires_at_ms: i64, acquired_at_ms: i64, fence: Fence) -> Self {
        Self { key, lock_id, expires_at_ms, acquired_at_ms, fence }
    }

    /// The same lease without what must not be printed.
    #[must_use]
    pub fn sanitized(&self) -> LockInfo {
        LockInfo {
            key_hash: hash_key(&self.key),
            lock_id_hash: hash_key(&self.lock_id),
            expires_at_ms: self.expires_at_ms,
            acquired_at_ms: self.acquired_at_ms,
            fence: self.fence,
        }
    }
}

impl fmt::Debug for LockInfoDebug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.sanitized().fmt(f)
    }
}

/// What a backend is and can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Its name, for example `postgres`.
    pub backend: &'static str,
    /// Whether every grant carries a fence.
    pub supports_fencing: bool,
    /// Whose clock decides liveness.
    pub time_authority: TimeAuthority,
}

impl Capabilities {
    /// The capabilities of a backend that fences.
    #[must_use]
    pub const fn fencing(backend: &'static str, time_authority: TimeAuthority) -> Self {
        Self { backend, supports_fencing: true, time_authority }
    }
}

/// Whose clock decides liveness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TimeAuthority {
    /// The server's: the clocks of clients do not matter.
    Server,
    /// The client's own.
    Client,
}

impl TimeAuthority {
    /// `server` or `client`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Client => "client",
        }
    }
}

macro_rules! forward {
    ($($ty:ty),*) => {$(
        impl<B: LockBackend + ?Sized> LockBackend for $ty {
            fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult> {
                (**self).acquire(key, ttl, cancel)
            }
            fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome> {
                (**self).release(lock_id, cancel)
            }
            fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome> {
                (**self).extend(lock_id, ttl, cancel)
            }
            fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool> {
                (**self).is_locked(key, cancel)
            }
            fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>> {
                (**self).lookup(what, cancel)
            }
            fn capabilities(&self) -> Capabilities {
                (**self).capabilities()
            }
            fn attempt(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<AcquireResult> {
                (**self).attempt(attempt, cancel)
            }
            fn peek(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<bool> {
                (**self).peek(key, deadline, cancel)
            }
            fn extend_by(
                &self,
                lock_id: &str,
                ttl: Duration,
                deadline: Moment,
                cancel: &CancelToken,
            ) -> Result<ExtendOutcome> {
                (**self).extend_by(lock_id, ttl, deadline, cancel)
            }
            fn release_by(&self, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
                (**self).release_by(lock_id, deadline)
            }
            fn renew(&self, leases: &[Renewal<'_>], deadline: Moment) -> Vec<Result<RenewOutcome>> {
                (**self).renew(leases, deadline)
            }
            fn reserve_renewals(&self) -> Result<()> {
                (**self).reserve_renewals()
            }
            fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoDebug>> {
                (**self).lookup_raw(what, cancel)
            }
            fn fence_statement(&self, key: &str, fence: Fence) -> Result<String> {
                (**self).fence_statement(key, fence)
            }
            fn clock(&self) -> Clock {
                (**self).clock()
            }
            fn operation_timeout(&self) -> Duration {
                (**self).operation_timeout()
            }
            fn close(&self) {
                (**self).close();
            }
        }
    )*};
}

forward!(&B, std::sync::Arc<B>, Box<B>);
