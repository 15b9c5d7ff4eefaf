//! The locks of readers, which share a key with each other and with no writer.

use std::sync::Arc;

use crate::backend::LockKind;
use crate::error::Result;
use crate::lock::attempt::LockCall;
use crate::lock::guard::LockGuard;
use crate::lock::options::LockOptions;
use crate::lock::{LockClient, turns, waiter};

impl LockClient {
    /// Waits for a shared lock with default options: at most 5 s, then a lease of 30 s that is renewed.
    ///
    /// See [`read_lock_with`](Self::read_lock_with).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.read_lock("prices")?;
    /// assert!(guard.is_shared() && guard.is_held());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn read_lock(&self, key: &str) -> Result<LockGuard> {
        self.read_lock_with(key, &LockOptions::new())
    }

    /// Waits for a shared lock: any number of readers can hold a key at the same time, without a writer. A writer is
    /// any holder of the plain key: by `lock`, `try_lock`, and every other SyncGuard client.
    ///
    /// Each reader has a lease of its own: renewed, lost, released and fenced like any other. All readers that have
    /// the key at the same time have the same fence, which says that no writer has had it since.
    ///
    /// A reader yields to a writer that has waited longer, so that neither side waits forever. A reader cannot be
    /// made a writer: release, and lock.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let patient = LockOptions::new().timeout(Duration::from_secs(60));
    /// let one = client.read_lock_with("prices", &patient)?;
    /// let other = client.read_lock_with("prices", &patient)?;
    /// assert_eq!(one.fence(), other.fence());
    /// assert!(client.try_lock("prices")?.is_none());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`lock_with`](Self::lock_with). `InvalidArgument` also from a backend without shared leases, and on
    /// PostgreSQL if the table of members is missing and may not be created.
    pub fn read_lock_with(&self, key: &str, options: &LockOptions) -> Result<LockGuard> {
        let call = self.shared_call(key, options)?;
        let key = Arc::clone(&call.key);
        let leases = waiter::lock(call).map_err(|error| error.with_key(&*key))?;
        Ok(LockGuard::new(Arc::clone(&self.handle), leases))
    }

    /// Tries once to share a key, with default options. `None` if a writer holds it, or waits for it.
    ///
    /// See [`try_read_lock_with`](Self::try_read_lock_with).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let _writer = client.lock("prices")?;
    /// assert!(client.try_read_lock("prices")?.is_none());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn try_read_lock(&self, key: &str) -> Result<Option<LockGuard>> {
        self.try_read_lock_with(key, &LockOptions::new())
    }

    /// Tries once to share a key. `None` if a writer holds it or waits for it, or its counter is locked by a
    /// fenced transaction. `timeout` and the retry options do not apply.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let short = LockOptions::new().ttl(Duration::from_secs(10));
    /// assert!(client.try_read_lock_with("prices", &short)?.is_some());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`read_lock_with`](Self::read_lock_with), without `AcquisitionTimeout`.
    pub fn try_read_lock_with(&self, key: &str, options: &LockOptions) -> Result<Option<LockGuard>> {
        let call = self.shared_call(key, options)?;
        let leases = call.try_lock().map_err(|error| error.with_key(&*call.key))?;
        Ok(leases.map(|leases| LockGuard::new(Arc::clone(&self.handle), leases)))
    }

    fn shared_call(&self, key: &str, options: &LockOptions) -> Result<LockCall> {
        let call = self.call(key, options)?;
        turns::refuse(
            call.options.turn,
            "readers take turns with writers already, and share with each other: leave fair away",
        )?;
        Ok(LockCall { kind: LockKind::Shared, shared: true, ..call })
    }
}
