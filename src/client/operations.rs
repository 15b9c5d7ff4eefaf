//! The five operations, one attempt each and without a guard, and the lookups.

use std::time::Duration;

use crate::backend::{AcquireResult, ExtendResult, LockInfo, LockInfoRaw, Lookup, ReleaseResult};
use crate::client::PgLockClient;
use crate::error::Result;

impl PgLockClient {
    /// One attempt to take the key, without a guard: nothing renews or releases the lease. The
    /// expiry in the answer was computed by the server, from its clock, after all waits.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use std::time::Duration;
    /// if let Some(lease) = client.acquire("report", Duration::from_secs(30))?.acquired() {
    ///     println!("held until {} ms of the server's clock", lease.expires_at_ms);
    ///     client.release(&lease.lock_id)?;
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// After an unknown outcome ([`is_outcome_unknown`](crate::LockError::is_outcome_unknown)) the key may be held under
    /// [`lock_id`](crate::LockError::lock_id); the client's worker keeps trying to release it until that lease would be over.
    pub fn acquire(&self, key: &str, ttl: Duration) -> Result<AcquireResult> {
        self.locks.acquire(key, ttl)
    }

    /// Releases the lease with this id. Harmless if it is not held. After an error, and where a token ended
    /// the call, the lease may stay held until its ttl is over.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # let lock_id = "AAAAAAAAAAAAAAAAAAAAAA";
    /// use syncguard::ReleaseResult;
    ///
    /// match client.release(lock_id)? {
    ///     ReleaseResult::Released => println!("it was ours until now"),
    ///     ReleaseResult::NotHeld => println!("its time was over before"),
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn release(&self, lock_id: &str) -> Result<ReleaseResult> {
        self.locks.release(lock_id)
    }

    /// Sets the expiry of the lease with this id to the server's present time plus `ttl`; the expiry in the
    /// answer comes from the server's clock. Never revives a dead lease; one that is at most a
    /// second past its expiry still counts as live. Because some clients read without a lock (the TypeScript
    /// SyncGuard), an answer that came later than that is verified behind the key's queue, in one more
    /// round trip.
    ///
    /// Do not use it to ask who owns a lock: it moves the expiry. Use [`owns`](Self::owns) for display.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use std::time::Duration;
    /// # let lock_id = "AAAAAAAAAAAAAAAAAAAAAA";
    /// use syncguard::ExtendResult;
    ///
    /// match client.extend(lock_id, Duration::from_secs(30))? {
    ///     ExtendResult::Extended { expires_at_ms } => println!("held until {expires_at_ms}"),
    ///     ExtendResult::NotHeld => println!("lost: stop working"),
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn extend(&self, lock_id: &str, ttl: Duration) -> Result<ExtendResult> {
        self.locks.extend(lock_id, ttl)
    }

    /// Whether the key is held. For display: it may have changed when you read the answer.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// if client.is_locked("report")? {
    ///     println!("the report is being made");
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn is_locked(&self, key: &str) -> Result<bool> {
        self.locks.is_locked(key)
    }

    /// The live lease of a key, or with an id. For diagnosis, never to decide whether to release or
    /// extend: these check for themselves.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// use syncguard::Lookup;
    ///
    /// if let Some(lease) = client.lookup(Lookup::Key("report"))? {
    ///     println!("held since {} under the fencing token {}", lease.acquired_at_ms, lease.fence);
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn lookup(&self, what: Lookup<'_>) -> Result<Option<LockInfo>> {
        self.locks.lookup(what)
    }

    /// The live lease of this key. See [`lookup`](Self::lookup).
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// let lease = client.get_by_key("report")?;
    /// println!("{lease:?}"); // hashes only
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn get_by_key(&self, key: &str) -> Result<Option<LockInfo>> {
        self.locks.get_by_key(key)
    }

    /// The live lease with this id. See [`lookup`](Self::lookup).
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # let lock_id = "AAAAAAAAAAAAAAAAAAAAAA";
    /// let still_there = client.get_by_id(lock_id)?.is_some();
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn get_by_id(&self, lock_id: &str) -> Result<Option<LockInfo>> {
        self.locks.get_by_id(lock_id)
    }

    /// The live lease of this key, with raw key and lock id: **sensitive**, for debugging.
    /// See [`lookup`](Self::lookup).
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// if let Some(lease) = client.get_by_key_raw("report")? {
    ///     client.release(&lease.lock_id)?; // by hand, when its holder is known to be dead
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn get_by_key_raw(&self, key: &str) -> Result<Option<LockInfoRaw>> {
        self.locks.get_by_key_raw(key)
    }

    /// The live lease with this id, with raw key and lock id: **sensitive**, for debugging.
    /// See [`lookup`](Self::lookup).
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # let lock_id = "AAAAAAAAAAAAAAAAAAAAAA";
    /// let key: Option<String> = client.get_by_id_raw(lock_id)?.map(|lease| lease.key);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn get_by_id_raw(&self, lock_id: &str) -> Result<Option<LockInfoRaw>> {
        self.locks.get_by_id_raw(lock_id)
    }

    /// Whether a live lease has this id. For display; see [`lookup`](Self::lookup).
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # let lock_id = "AAAAAAAAAAAAAAAAAAAAAA";
    /// if !client.owns(lock_id)? {
    ///     println!("that lease is over");
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn owns(&self, lock_id: &str) -> Result<bool> {
        self.locks.owns(lock_id)
    }
}
