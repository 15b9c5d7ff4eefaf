//! Single attempts without a guard, and lookups.

use std::time::Duration;

use crate::backend::{
    AcquireResult, ExtendResult, LockBackend as _, LockInfo, LockInfoRaw, Lookup, ReleaseResult,
};
use crate::error::Result;
use crate::lock::LockClient;
use crate::lock::attempt;
use crate::lock::backend_call::{ask, change};
use crate::model::key::Key;
use crate::model::lock_id::LockId;
use crate::model::time::{Moment, Ttl};

impl LockClient {
    /// Tries once to take the key, without a guard: nothing renews or releases the lease.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// let lease = client.acquire("report", Duration::from_secs(30))?.acquired().expect("it was free");
    /// client.release(&lease.lock_id)?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the backend. After an unknown outcome the error carries the lock id, and the
    /// client's worker keeps trying to release it until that lease would be over.
    pub fn acquire(&self, key: &str, ttl: Duration) -> Result<AcquireResult> {
        let key = Key::new(key)?;
        let ttl = Ttl::new(ttl)?.get();
        self.token.check()?;
        let _entered = self.engine().enter()?;
        let asked = (ttl, self.engine().label(None));
        attempt::request(self.engine(), key.as_str(), None, asked, Moment::NEVER, &self.token)
            .map(AcquireResult::from)
    }

    /// Releases the lease with this id. Harmless if it is not held. Do not use it on a guard's id:
    /// the guard has its own [`release`](crate::LockGuard::release).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::ReleaseResult;
    ///
    /// let lease = client.acquire("report", Duration::from_secs(30))?.acquired().expect("it was free");
    /// assert_eq!(client.release(&lease.lock_id)?, ReleaseResult::Released);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the backend. The lease may then stay held until its ttl is over; try again. After an unknown
    /// outcome the release may still be on its way, and end the lease later: do not go on working under it.
    pub fn release(&self, lock_id: &str) -> Result<ReleaseResult> {
        LockId::parse(lock_id)?;
        let result = change(Duration::MAX, || self.engine().backend.release(lock_id, &self.token));
        result.map(ReleaseResult::from).map_err(|error| error.with_lock_id(lock_id))
    }

    /// Sets the end of the lease with this id to now plus `ttl`. Never revives a dead lease.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::ExtendResult;
    ///
    /// let lease = client.acquire("report", Duration::from_secs(30))?.acquired().expect("it was free");
    /// assert_ne!(client.extend(&lease.lock_id, Duration::from_secs(60))?, ExtendResult::NotHeld);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the backend. After an unknown outcome trust the earlier of the old and the new end.
    pub fn extend(&self, lock_id: &str, ttl: Duration) -> Result<ExtendResult> {
        LockId::parse(lock_id)?;
        let ttl = Ttl::new(ttl)?.get();
        let result = change(ttl, || self.engine().backend.extend(lock_id, ttl, &self.token));
        result.map(ExtendResult::from).map_err(|error| error.with_lock_id(lock_id))
    }

    /// Whether the key is held. For display: it may have changed when you read the answer.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let _guard = client.lock("report")?;
    /// assert!(client.is_locked("report")?);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn is_locked(&self, key: &str) -> Result<bool> {
        let key = Key::new(key)?;
        let result = ask(|| self.engine().backend.is_locked(key.as_str(), &self.token));
        result.map_err(|error| error.with_key(key.as_str()))
    }

    /// The live lease of a key, or with an id. For diagnosis: it may have ended when you read it.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use syncguard::Lookup;
    ///
    /// let guard = client.lock("report")?;
    /// let lease = client.lookup(Lookup::Key("report"))?.expect("it is held");
    /// assert_eq!(lease.fence, guard.fence());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn lookup(&self, what: Lookup<'_>) -> Result<Option<LockInfo>> {
        Self::check_lookup(what)?;
        ask(|| self.engine().backend.lookup(what, &self.token))
    }

    /// The live lease of this key. See [`lookup`](Self::lookup).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// assert!(client.get_by_key("report")?.is_none());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn get_by_key(&self, key: &str) -> Result<Option<LockInfo>> {
        self.lookup(Lookup::Key(key))
    }

    /// The live lease with this id. See [`lookup`](Self::lookup).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock("report")?;
    /// assert!(client.get_by_id(guard.lock_id())?.is_some());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn get_by_id(&self, lock_id: &str) -> Result<Option<LockInfo>> {
        self.lookup(Lookup::LockId(lock_id))
    }

    /// The live lease of this key, with the raw key and lock id: **sensitive**, for debugging.
    /// See [`lookup`](Self::lookup).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock("report")?;
    /// let lease = client.get_by_key_raw("report")?.expect("it is held");
    /// assert_eq!(lease.lock_id, guard.lock_id());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn get_by_key_raw(&self, key: &str) -> Result<Option<LockInfoRaw>> {
        let what = Lookup::Key(key);
        Self::check_lookup(what)?;
        ask(|| self.engine().backend.lookup_raw(what, &self.token))
    }

    /// The live lease with this id, with the raw key and lock id: **sensitive**, for debugging.
    /// See [`lookup`](Self::lookup).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock("report")?;
    /// let lease = client.get_by_id_raw(guard.lock_id())?.expect("it is held");
    /// assert_eq!(lease.key, "report");
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn get_by_id_raw(&self, lock_id: &str) -> Result<Option<LockInfoRaw>> {
        let what = Lookup::LockId(lock_id);
        Self::check_lookup(what)?;
        ask(|| self.engine().backend.lookup_raw(what, &self.token))
    }

    /// Whether a live lease has this id. For diagnosis, never as a guard before a change: use the
    /// fence for that. See [`lookup`](Self::lookup).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock("report")?;
    /// assert!(client.owns(guard.lock_id())?);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn owns(&self, lock_id: &str) -> Result<bool> {
        self.get_by_id(lock_id).map(|found| found.is_some())
    }

    fn check_lookup(what: Lookup<'_>) -> Result<()> {
        match what {
            Lookup::Key(key) => Key::new(key).map(drop),
            Lookup::LockId(lock_id) => LockId::parse(lock_id).map(drop),
        }
    }
}
