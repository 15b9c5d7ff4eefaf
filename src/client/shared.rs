//! The locks of readers on PostgreSQL.

use crate::client::PgLockClient;
use crate::error::Result;
use crate::lock::{LockGuard, LockOptions};

impl PgLockClient {
    /// Waits for a shared lock, with default options. See [`read_lock_with`](Self::read_lock_with).
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// let guard = client.read_lock("prices")?;
    /// println!("no writer since fencing token {}", guard.fence());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn read_lock(&self, key: &str) -> Result<LockGuard> {
        self.locks.read_lock(key)
    }

    /// Waits for a shared lock: any number of readers, or one writer, which takes the plain key. See
    /// [`LockClient::read_lock_with`](crate::LockClient::read_lock_with).
    ///
    /// The readers are in a table of their own, `syncguard_members`. The first call creates it where
    /// [`auto_create_tables`](crate::PgLockClientBuilder::auto_create_tables) allows that.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let guard = client.read_lock_with("prices", &LockOptions::new().timeout(Duration::from_secs(60)))?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As there. If the table is missing and may not be created, `InvalidArgument` says how to create it.
    pub fn read_lock_with(&self, key: &str, options: &LockOptions) -> Result<LockGuard> {
        self.locks.read_lock_with(key, options)
    }

    /// Tries once to share a key, with default options. `None` if a writer holds it, or waits for it.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// if let Some(guard) = client.try_read_lock("prices")? {
    ///     println!("reading under fencing token {}", guard.fence());
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn try_read_lock(&self, key: &str) -> Result<Option<LockGuard>> {
        self.locks.try_read_lock(key)
    }

    /// Tries once to share a key. See [`LockClient::try_read_lock_with`](crate::LockClient::try_read_lock_with).
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let short = LockOptions::new().ttl(Duration::from_secs(10));
    /// let guard = client.try_read_lock_with("prices", &short)?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn try_read_lock_with(&self, key: &str, options: &LockOptions) -> Result<Option<LockGuard>> {
        self.locks.try_read_lock_with(key, options)
    }
}
