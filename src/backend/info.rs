//! What is known of a lease, and of a backend.

use std::fmt;
use std::time::Duration;

use crate::model::fence::Fence;
use crate::model::hash::hash_key;
use crate::model::key::permit_of;

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
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LockInfo {
    /// [`hash_key`](crate::hash_key) of the key: for a permit that of its
    /// [guard's](crate::LockGuard::key); [`Operator`](crate::Operator) returns that of the semaphore's name.
    pub key_hash: String,
    /// Which of its semaphore's permits it is; `None` for a lock.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub permit: Option<u32>,
    /// [`hash_key`](crate::hash_key) of the lock id.
    pub lock_id_hash: String,
    /// When the lease ends, in Unix milliseconds of the server's clock.
    pub expires_at_ms: i64,
    /// When it was granted, in Unix milliseconds of the server's clock.
    pub acquired_at_ms: i64,
    /// Its fence.
    pub fence: Fence,
    /// Whether its key is shared by readers. Looked up by key, it is the lease of all of them together, and ends with
    /// the last.
    #[cfg_attr(feature = "serde", serde(default))]
    pub shared: bool,
    /// How many readers share the key, where that is known.
    #[cfg_attr(feature = "serde", serde(default))]
    pub readers: Option<u32>,
    /// Who holds it, where the holder said so and the answer looked for it:
    /// [`Operator::holders`](crate::Operator::holders) and a backend's
    /// [`who_holds`](crate::backend::LockBackend::who_holds) do; lookups do in clients that write owners themselves. Of
    /// a key that readers share it is the one whose lease ends last. As the holder wrote it: text of somebody else's,
    /// which [`who`](Self::who) has for a line.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub owner: Option<String>,
    /// What for, under the same terms.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub note: Option<String>,
}

/// What a waiter knows of the holder of the key that it waits for.
///
/// ```
/// use std::time::Duration;
/// use syncguard::Fence;
/// use syncguard::backend::Holder;
///
/// let holder = Holder::new(Fence::new(42).unwrap(), Duration::from_secs(24));
/// assert_eq!(holder.fence.map(Fence::get), Some(42));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The fencing token of the lease.
    pub fence: Option<Fence>,
    /// How long the lease lasts from now, by the server's clock, unless it is renewed.
    pub remaining: Option<Duration>,
    /// Whether readers share the key.
    pub shared: bool,
}

impl Holder {
    /// A holder of whom both are known.
    #[must_use]
    pub const fn new(fence: Fence, remaining: Duration) -> Self {
        Self { fence: Some(fence), remaining: Some(remaining), shared: false }
    }

    /// The same holder as readers, if that is what they are.
    #[must_use]
    pub const fn shared(mut self, shared: bool) -> Self {
        self.shared = shared;
        self
    }

    /// The holder of a lease that ends at `expires_at_ms`, at `now_ms` of the same clock.
    pub(crate) fn until(fence: Option<Fence>, expires_at_ms: i64, now_ms: i64) -> Self {
        let rest = u64::try_from(expires_at_ms.saturating_sub(now_ms)).unwrap_or(0);
        Self { fence, remaining: Some(Duration::from_millis(rest)), shared: false }
    }
}

/// A live lease with its raw key and id. **Sensitive**: for debugging only. `Debug` hides both.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockInfoRaw {
    /// The caller's key, in NFC. For a permit its [guard's](crate::LockGuard::key);
    /// [`Operator`](crate::Operator) returns the semaphore's name.
    pub key: String,
    /// Which of its semaphore's permits it is; `None` for a lock.
    pub permit: Option<u32>,
    /// The lock id. Whoever knows it can release the lock.
    pub lock_id: String,
    /// When the lease ends, in Unix milliseconds of the server's clock.
    pub expires_at_ms: i64,
    /// When it was granted, in Unix milliseconds of the server's clock.
    pub acquired_at_ms: i64,
    /// Its fence.
    pub fence: Fence,
    /// Whether its key is shared by readers.
    pub shared: bool,
    /// How many readers share the key, where that is known.
    pub readers: Option<u32>,
    /// Who holds it, as in [`LockInfo::owner`].
    pub owner: Option<String>,
    /// What for.
    pub note: Option<String>,
}

impl LockInfoRaw {
    /// A live lease as a backend found it.
    #[must_use]
    pub fn new(key: String, lock_id: String, expires_at_ms: i64, acquired_at_ms: i64, fence: Fence) -> Self {
        let permit = permit_of(&key).map(|(_, number)| number);
        Self {
            key,
            permit,
            lock_id,
            expires_at_ms,
            acquired_at_ms,
            fence,
            shared: false,
            readers: None,
            owner: None,
            note: None,
        }
    }

    /// The same lease, with what its holder says of itself.
    #[must_use]
    pub fn labelled(mut self, owner: Option<String>, note: Option<String>) -> Self {
        (self.owner, self.note) = (owner, note);
        self
    }

    /// The same lease, a permit under its semaphore's name.
    pub(crate) fn under_its_name(mut self) -> Self {
        if let Some((name, _)) = permit_of(&self.key) {
            self.key = name.to_owned();
        }
        self
    }

    /// The same lease, of a key that readers share: how many, where that is known.
    #[must_use]
    pub fn shared_by(mut self, readers: Option<u32>) -> Self {
        (self.shared, self.readers) = (true, readers);
        self
    }

    /// The same lease without what must not be printed.
    #[must_use]
    pub fn sanitized(&self) -> LockInfo {
        LockInfo {
            key_hash: hash_key(&self.key),
            permit: self.permit,
            lock_id_hash: hash_key(&self.lock_id),
            expires_at_ms: self.expires_at_ms,
            acquired_at_ms: self.acquired_at_ms,
            fence: self.fence,
            shared: self.shared,
            readers: self.readers,
            owner: self.owner.clone(),
            note: self.note.clone(),
        }
    }
}

impl fmt::Debug for LockInfoRaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.sanitized().fmt(f)
    }
}

/// What a backend is and can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
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
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
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
