//! Session locks: the client's second kind of lock, without table and ttl.

use crate::advisory::{AdvisoryGuard, AdvisoryKey, AdvisoryOptions, AdvisorySession};
use crate::client::PgLockClient;
use crate::error::Result;

impl PgLockClient {
    /// Tries once to take a session lock, with default options. See
    /// [`try_advisory_lock_with`](Self::try_advisory_lock_with).
    ///
    /// # Blocking
    ///
    /// At most `operation_timeout`.
    ///
    /// # Cancellation
    ///
    /// By the client's token.
    pub fn try_advisory_lock(&self, key: &AdvisoryKey) -> Result<Option<AdvisoryGuard>> {
        self.try_advisory_lock_with(key, &AdvisoryOptions::new())
    }

    /// Tries once to take a session lock: PostgreSQL's advisory lock, which needs no table and ends
    /// with its connection. `None` if another session holds the key.
    ///
    /// The guard keeps one of the client's `max_connections` connections until it ends: they are the
    /// limit of how many session locks a client holds at once. Holding two keys at once invites
    /// deadlock, which only the timeouts of waiting calls end: take them in one order, or only try
    /// for the second. Whether a lease would serve better: `docs/which-lock.md`.
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
    ///
    /// # Blocking
    ///
    /// At most `operation_timeout`.
    ///
    /// # Cancellation
    ///
    /// By the client's token and that of the options.
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
    /// # Blocking
    ///
    /// At most the default `timeout`, 5 s.
    ///
    /// # Cancellation
    ///
    /// By the client's token: a sleeping waiter wakes at once.
    pub fn advisory_lock(&self, key: &AdvisoryKey) -> Result<AdvisoryGuard> {
        self.advisory_lock_with(key, &AdvisoryOptions::new())
    }

    /// Waits for a session lock; see [`try_advisory_lock_with`](Self::try_advisory_lock_with).
    ///
    /// Threads of this client that want the same key are served in the order in which they came; between
    /// processes chance decides. A waiter keeps no connection and no statement waits in the server: it
    /// asks again after pauses of at most 50 ms.
    ///
    /// # Errors
    ///
    /// `AcquisitionTimeout` when the timeout is over, `Aborted` when a token fired or the client was
    /// closed, and those of a try, at once.
    ///
    /// # Blocking
    ///
    /// At most `timeout`; without a limit with `wait_forever`.
    ///
    /// # Cancellation
    ///
    /// By the client's token and that of the options: a sleeping waiter wakes at once.
    pub fn advisory_lock_with(&self, key: &AdvisoryKey, options: &AdvisoryOptions) -> Result<AdvisoryGuard> {
        self.locks.check_process()?;
        let merged = self.locks.cancellable(options.token());
        self.sessions.lock(*key, options, &merged.token)
    }

    /// The sessions that hold advisory locks of this database, whatever program took them. The role
    /// sees names and states of its own sessions; of others' with `pg_read_all_stats`.
    ///
    /// # Blocking
    ///
    /// At most `operation_timeout`.
    ///
    /// # Cancellation
    ///
    /// By the client's token.
    pub fn advisory_holders(&self) -> Result<Vec<AdvisorySession>> {
        self.sessions.sessions(true, &self.locks.token)
    }

    /// The sessions that wait in the server for advisory locks of this database. Waiters of this
    /// library wait in their own process and are not among them, but for acquires of leases.
    ///
    /// # Blocking
    ///
    /// At most `operation_timeout`.
    ///
    /// # Cancellation
    ///
    /// By the client's token.
    pub fn advisory_waiters(&self) -> Result<Vec<AdvisorySession>> {
        self.sessions.sessions(false, &self.locks.token)
    }

    /// Ends the session with this server process, if it holds or waits for an advisory lock of this
    /// database: its locks are free then. Whether it was told to end; it does so within moments.
    ///
    /// Needs the role of that session, or membership in `pg_signal_backend`; a superuser's session
    /// only a superuser can end.
    ///
    /// # Errors
    ///
    /// `AuthFailed` without that right.
    ///
    /// # Blocking
    ///
    /// At most `operation_timeout`.
    ///
    /// # Cancellation
    ///
    /// By the client's token.
    pub fn terminate_advisory_session(&self, pid: i32) -> Result<bool> {
        self.sessions.terminate(pid, &self.locks.token)
    }
}
