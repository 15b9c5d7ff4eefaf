//! Session locks: the client's second kind of lock, without table and ttl.

use crate::advisory::{AdvisoryGuard, AdvisoryKey, AdvisoryOptions, AdvisorySession};
use crate::client::PgLockClient;
use crate::error::Result;

impl PgLockClient {
    /// Tries once to take a session lock, with default options. See
    /// [`try_advisory_lock_with`](Self::try_advisory_lock_with).
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// use syncguard::AdvisoryKey;
    ///
    /// if let Some(guard) = client.try_advisory_lock(&AdvisoryKey::from_text("migrate"))? {
    ///     guard.release()?;
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn try_advisory_lock(&self, key: &AdvisoryKey) -> Result<Option<AdvisoryGuard>> {
        self.try_advisory_lock_with(key, &AdvisoryOptions::new())
    }

    /// Tries once to take a session lock: PostgreSQL's advisory lock, which needs no table and ends
    /// with its connection. `None` if another session holds the key.
    ///
    /// The guard keeps one of the client's `max_connections` connections until it ends: they limit
    /// how many session locks a client can hold at once. Holding two keys at once risks a
    /// deadlock, which only the timeouts of waiting calls end: take them in one order, or only try
    /// for the second. On whether a lease would serve better, see [`docs/which-lock.md`](https://docs.rs/crate/syncguard/latest/source/docs/which-lock.md).
    ///
    /// ```no_run
    /// use syncguard::{AdvisoryKey, PgLockClient};
    ///
    /// let client = PgLockClient::connect("postgresql://app@db.example/app")?;
    /// let key = AdvisoryKey::namespaced("cleanup", "user@example.com")?;
    /// match client.try_advisory_lock(&key)? {
    ///     Some(guard) => { /* only this process cleans up, while guard.is_held() */ }
    ///     None => { /* another process holds it */ }
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `RateLimited` when no connection is free in time; `ServiceUnavailable` on a standby;
    /// `InvalidArgument` behind a transaction pooler or on a server whose advisory functions are
    /// stubs, as a self-test at the client's first session lock finds out. After an error nothing is
    /// held: a connection in doubt was closed, and its lock ends when the server notices.
    pub fn try_advisory_lock_with(
        &self,
        key: &AdvisoryKey,
        options: &AdvisoryOptions,
    ) -> Result<Option<AdvisoryGuard>> {
        self.locks.check_process()?;
        let merged = self.locks.cancellable(options.token());
        self.sessions.try_lock(*key, options, &merged.token)
    }

    /// Waits for a session lock, with default options: at most 5 s. See
    /// [`advisory_lock_with`](Self::advisory_lock_with).
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// use syncguard::AdvisoryKey;
    ///
    /// let guard = client.advisory_lock(&AdvisoryKey::from_text("migrate"))?;
    /// assert!(guard.is_held());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn advisory_lock(&self, key: &AdvisoryKey) -> Result<AdvisoryGuard> {
        self.advisory_lock_with(key, &AdvisoryOptions::new())
    }

    /// Waits for a session lock; see [`try_advisory_lock_with`](Self::try_advisory_lock_with).
    ///
    /// Threads of this client that want the same key are served in the order in which they came; between
    /// processes chance decides. A waiter keeps no connection, and no statement waits in the server: it
    /// tries again after pauses of at most 50 ms.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use std::time::Duration;
    /// use syncguard::{AdvisoryKey, AdvisoryOptions};
    ///
    /// let patient = AdvisoryOptions::new().timeout(Duration::from_secs(60));
    /// let guard = client.advisory_lock_with(&AdvisoryKey::from_text("migrate"), &patient)?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `AcquisitionTimeout` when the timeout is over, `Aborted` when a token fired or the client was
    /// closed, and those of a try, at once.
    pub fn advisory_lock_with(&self, key: &AdvisoryKey, options: &AdvisoryOptions) -> Result<AdvisoryGuard> {
        self.locks.check_process()?;
        let merged = self.locks.cancellable(options.token());
        self.sessions.lock(*key, options, &merged.token)
    }

    /// The sessions that hold advisory locks of this database, whatever program took them. The role
    /// sees names and states of its own sessions; those of others with `pg_read_all_stats`.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// for session in client.advisory_holders()? {
    ///     println!("{} is held by the server process {}", session.key, session.pid);
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn advisory_holders(&self) -> Result<Vec<AdvisorySession>> {
        self.sessions.sessions(true, &self.locks.token)
    }

    /// The sessions that wait in the server for advisory locks of this database. Waiters of this
    /// library wait in their own process and are not among them, except for acquires of leases.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// let waiting = client.advisory_waiters()?.len();
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn advisory_waiters(&self) -> Result<Vec<AdvisorySession>> {
        self.sessions.sessions(false, &self.locks.token)
    }

    /// Ends the session with this server process, if it holds or waits for an advisory lock of this
    /// database: its locks are then free. Returns whether it was told to end; it does so within moments.
    ///
    /// Needs the role of that session, or membership in `pg_signal_backend`; only a superuser can end
    /// a superuser's session.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// for stuck in client.advisory_holders()? {
    ///     if stuck.state.as_deref() == Some("idle in transaction") {
    ///         client.terminate_advisory_session(stuck.pid)?;
    ///     }
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `AuthFailed` without that right.
    pub fn terminate_advisory_session(&self, pid: i32) -> Result<bool> {
        self.sessions.terminate(pid, &self.locks.token)
    }
}
