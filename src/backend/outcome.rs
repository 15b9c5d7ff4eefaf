//! The requests to a backend, and its answers.

use std::fmt;
use std::time::Duration;

use crate::backend::label::Label;
use crate::model::fence::Fence;
use crate::model::hash::hash_key;
use crate::model::time::Moment;

/// One attempt to take a key, with everything chosen before the first byte is sent.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Attempt<'a> {
    /// The key.
    pub key: &'a str,
    /// The id that the lease will have.
    pub lock_id: &'a str,
    /// How long the lease lasts from the grant.
    pub ttl: Duration,
    /// When the attempt must have returned.
    pub deadline: Moment,
    /// What the holder says of itself: written with the grant, in one step.
    pub label: Label<'a>,
}

impl<'a> Attempt<'a> {
    /// An attempt to take `key` under this id.
    #[must_use]
    pub const fn new(key: &'a str, lock_id: &'a str, ttl: Duration, deadline: Moment) -> Self {
        Self { key, lock_id, ttl, deadline, label: Label { owner: None, note: None } }
    }

    /// The same, by a holder that says this of itself.
    #[must_use]
    pub const fn with_label(mut self, label: Label<'a>) -> Self {
        self.label = label;
        self
    }
}

impl fmt::Debug for Attempt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt")
            .field("key_hash", &hash_key(self.key))
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

/// The state of a lease that a change replaces: different after every write, and never repeated.
///
/// It is the backend's own number, to be compared for equality only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Version(u64);

impl Version {
    /// The backend's number for it.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The backend's number for it.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// A grant, as a guard begins with it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// The lease.
    pub acquired: Acquired,
    /// Its version; `None` from a backend that has none.
    pub version: Option<Version>,
}

impl Grant {
    /// A grant, with its version or without one.
    #[must_use]
    pub const fn new(acquired: Acquired, version: Option<Version>) -> Self {
        Self { acquired, version }
    }
}

impl From<Option<Grant>> for AcquireResult {
    fn from(grant: Option<Grant>) -> Self {
        grant.map_or(Self::Locked, |grant| Self::Acquired(grant.acquired))
    }
}

/// One lease in a guard's care that is to be renewed.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Renewal<'a> {
    /// The key, to find out who has taken over a lost lease.
    pub key: &'a str,
    /// The lease.
    pub lock_id: &'a str,
    /// The fence of its grant: with another one it is not this guard's any more.
    pub fence: Fence,
    /// What its holder was told last. Only a message that names the newest version may shorten a lease.
    pub version: Option<Version>,
    /// Its new time to live.
    pub ttl: Duration,
    /// Whether it is a reader's.
    pub shared: bool,
}

impl<'a> Renewal<'a> {
    /// The renewal of a lease of which no version is known.
    #[must_use]
    pub const fn new(key: &'a str, lock_id: &'a str, fence: Fence, ttl: Duration) -> Self {
        Self { key, lock_id, fence, version: None, ttl, shared: false }
    }

    /// The same, as a change of this version.
    #[must_use]
    pub const fn with_version(mut self, version: Option<Version>) -> Self {
        self.version = version;
        self
    }

    /// The same for a reader.
    #[must_use]
    pub const fn of_reader(mut self) -> Self {
        self.shared = true;
        self
    }
}

impl fmt::Debug for Renewal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renewal")
            .field("key_hash", &hash_key(self.key))
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

/// The answer of an acquire.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a granted lease stays held until it is released or its ttl is over"]
pub enum AcquireResult {
    /// The lease is ours.
    Acquired(Acquired),
    /// Another holder has the key.
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
    /// The id that extends and releases the lease: 22 characters. Whoever knows it can release the lock.
    pub lock_id: String,
    /// The grant's fence.
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
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Reason {
    /// Another holder has the key.
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

/// The answer of a backend to a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseOutcome {
    /// The lease was held and is gone.
    Released,
    /// No live lease has this id; the reason is for telemetry.
    NotHeld(Option<Reason>),
}

/// The answer of a backend to an extend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExtendOutcome {
    /// The lease now ends then (Unix milliseconds of the server's clock).
    Extended {
        /// The new expiry.
        expires_at_ms: i64,
    },
    /// No live lease has this id; the reason is for telemetry.
    NotHeld(Option<Reason>),
}

/// The answer of the client to a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum ReleaseResult {
    /// The lease was held and is gone.
    Released,
    /// No live lease has this id: it was released, has expired, or never existed.
    NotHeld,
}

/// The answer of the client to an extend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "NotHeld means that the lock is lost"]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
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

/// The result of a renewal for one lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RenewOutcome {
    /// It now ends then (Unix milliseconds of the server's clock).
    Renewed {
        /// The new expiry.
        expires_at_ms: i64,
        /// The new version; `None` from a backend that has none.
        version: Option<Version>,
    },
    /// It is gone.
    Lost(LostReason),
    /// Its row was busy and is still there: nothing is known, ask again soon and alone.
    Busy,
}

/// Why a holder can no longer trust its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum LostReason {
    /// It ran out before it was renewed.
    Expired,
    /// Another holder has the key now.
    TakenOver {
        /// The newer holder's fence.
        fence: Fence,
    },
    /// Its row is gone: released under its id, broken by an operator, or cleaned up.
    RowMissing,
    /// No answer came from the server before the local deadline.
    Unreachable,
    /// The server refused to renew it until it was over: a right, a column or the server's connections
    /// were gone. The log has the error.
    RenewalRefused,
    /// The guard's own `max_hold` was reached.
    MaxHold,
    /// The client was closed.
    Closed,
}

impl LostReason {
    /// One word, the same for every fence: `expired`, `taken_over`, `row_missing`, `unreachable`,
    /// `renewal_refused`, `max_hold` or `closed`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::TakenOver { .. } => "taken_over",
            Self::RowMissing => "row_missing",
            Self::Unreachable => "unreachable",
            Self::RenewalRefused => "renewal_refused",
            Self::MaxHold => "max_hold",
            Self::Closed => "closed",
        }
    }
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Expired => f.write_str("the lease expired before it was renewed"),
            Self::TakenOver { fence } => write!(f, "a newer holder has fencing token {fence}"),
            Self::RowMissing => f.write_str("the lease's row is gone"),
            Self::Unreachable => f.write_str("the server did not answer before the lease was over"),
            Self::RenewalRefused => f.write_str("the server refused its renewals until the lease was over"),
            Self::MaxHold => f.write_str("the guard's max_hold was reached"),
            Self::Closed => f.write_str("the client was closed"),
        }
    }
}
