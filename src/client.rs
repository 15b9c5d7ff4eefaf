//! The client: the only place where the floors meet.
//!
//! Waiting, guards and renewal come from [`LockClient`], leases from the PostgreSQL adapter; this
//! module builds the one on the other and names the driver's types.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use postgres::config::Config;
use postgres::{Client, NoTls};
use r2d2::ManageConnection;
use tokio_postgres::Socket;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};

use crate::advisory::{AdvisoryGuard, AdvisoryKey, AdvisoryOptions, AdvisorySession, SessionLocks};
use crate::backend::{
    AcquireResult, Attempt, Capabilities, ExtendOutcome, ExtendResult, LockBackend, LockInfo, LockInfoDebug,
    Lookup, ReleaseOutcome, ReleaseResult, RenewOutcome, Renewal,
};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::lock::{
    ClientSettings, CloseReport, LockClient, LockGuard, LockOptions, OnReleaseError, ReleaseErrorContext,
};
use crate::model::fence::Fence;
use crate::model::time::{Clock, Moment};
use crate::postgres::{
    Connector, Names, Operator, PostgresBackend, Settings, Source, fence_error, guard_runtime, parse_url,
};
use crate::telemetry::{TelemetryOptions, with_telemetry};

/// Locks on PostgreSQL: leases with fences in two tables.
///
/// Cheap to clone and to share between threads; a clone is the same client, with the same pool, the
/// same queue of waiters and the same two background threads, which start with the first lock and
/// end with the last clone and guard.
///
/// ```no_run
/// use syncguard::PgLockClient;
///
/// let client = PgLockClient::connect("postgresql://app@db.example/app")?;
/// let guard = client.lock("payment:42")?;
/// // Nobody else, on any machine, holds "payment:42" until the guard is dropped.
/// assert!(guard.is_held());
/// # Ok::<(), syncguard::LockError>(())
/// ```
///
/// # Blocking
///
/// Every call is bounded by its options. On TCP connections of the client's own, encrypted or not,
/// the client enforces that itself, whatever the network does. On **Unix sockets**, and on a
/// **caller's pool**, the driver offers no way to stop waiting: there the server's own limits
/// (`lock_timeout`, `statement_timeout`) end every wait but that for a server that has stopped, or a
/// `COMMIT` that waits for a standby. Name resolution is up to the system and its settings.
///
/// These are calls for ordinary threads. Inside an async runtime use `spawn_blocking`; elsewhere in
/// a runtime they fail with [`InvalidArgument`](crate::ErrorCode::InvalidArgument). Dropping a guard
/// or a client there is fine: the work is handed to a thread.
#[derive(Clone)]
pub struct PgLockClient {
    // Before the locks: the last drop of those may close the backend.
    sessions: SessionLocks,
    locks: LockClient,
    postgres: Arc<PostgresBackend>,
}

impl PgLockClient {
    /// A client for the database at this address, `postgresql://…` or key=value pairs, without TLS.
    /// Creates the two tables if they are missing; see the builder for everything else.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a connection string that cannot be read, `ServiceUnavailable`,
    /// `AuthFailed` or `NetworkTimeout` when the server cannot be used.
    ///
    /// # Blocking
    ///
    /// At most 6 × `operation_timeout`: as [`setup_schema`](Self::setup_schema).
    ///
    /// # Cancellation
    ///
    /// None.
    pub fn connect(url: &str) -> Result<Self> {
        Self::builder().connect(url)
    }

    /// A builder with the defaults.
    #[must_use]
    pub fn builder() -> PgLockClientBuilder {
        PgLockClientBuilder::default()
    }

    /// Waits for the lock with default options: at most 5 s, then a lease of 30 s that is renewed
    /// until the guard is dropped. See [`lock_with`](Self::lock_with).
    pub fn lock(&self, key: &str) -> Result<LockGuard> {
        self.locks.lock(key)
    }

    /// Waits for the lock. See [`LockClient::lock_with`], also for errors and what may remain held.
    ///
    /// # Blocking
    ///
    /// At most `timeout`, waiting for a connection and connecting included; for ever with `wait_forever`.
    ///
    /// # Cancellation
    ///
    /// A sleeping waiter wakes at once. A thread blocked in the server returns well within half a
    /// second: its connection is cut, and the server is asked to cancel the statement.
    pub fn lock_with(&self, key: &str, options: &LockOptions) -> Result<LockGuard> {
        self.locks.lock_with(key, options)
    }

    /// Tries once, with default options. `None` if somebody else holds the key.
    pub fn try_lock(&self, key: &str) -> Result<Option<LockGuard>> {
        self.locks.try_lock(key)
    }

    /// Tries once. See [`LockClient::try_lock_with`].
    ///
    /// # Blocking
    ///
    /// At most `operation_timeout`.
    ///
    /// # Cancellation
    ///
    /// As [`lock_with`](Self::lock_with).
    pub fn try_lock_with(&self, key: &str, options: &LockOptions) -> Result<Option<LockGuard>> {
        self.locks.try_lock_with(key, options)
    }

    /// Runs `work` under the lock; its value reaches the caller whatever the release does. See
    /// [`LockClient::with_lock`].
    ///
    /// # Blocking
    ///
    /// At most `timeout`, the time of `work`, and `dispose_timeout`.
    ///
    /// # Cancellation
    ///
    /// Ends the wait, not `work`, and not the release.
    pub fn with_lock<T>(
        &self,
        key: &str,
        options: &LockOptions,
        work: impl FnOnce(&LockGuard) -> T,
    ) -> Result<T> {
        self.locks.with_lock(key, options, work)
    }

    /// One attempt to take the key, without a guard: nothing renews it, nothing releases it. The
    /// expiry in the answer was computed by the server, from its clock, after all waits.
    ///
    /// # Errors
    ///
    /// After an unknown outcome ([`LockError::is_outcome_unknown`]) the key may be held under
    /// [`LockError::lock_id`]; the client's worker goes on releasing it until that lease would be over.
    ///
    /// # Blocking
    ///
    /// At most `operation_timeout`.
    ///
    /// # Cancellation
    ///
    /// By the client's token, see [`cancellable`](Self::cancellable).
    pub fn acquire(&self, key: &str, ttl: Duration) -> Result<AcquireResult> {
        self.locks.acquire(key, ttl)
    }

    /// Lets go of the lease with this id. Harmless if it is not held. After an error the lease may
    /// stay held until its ttl is over.
    ///
    /// # Blocking
    ///
    /// At most `operation_timeout`.
    ///
    /// # Cancellation
    ///
    /// By the client's token: then the lease stays held.
    pub fn release(&self, lock_id: &str) -> Result<ReleaseResult> {
        self.locks.release(lock_id)
    }

    /// Sets the end of the lease with this id to the server's now plus `ttl`; the expiry in the
    /// answer comes from the server's clock. Never revives a dead lease; one that is at most a
    /// second past its expiry still counts as live, because nobody else can have taken it.
    ///
    /// Not a way to ask who owns a lock: it moves the lease's end. Use [`owns`](Self::owns) for display.
    ///
    /// # Blocking
    ///
    /// At most `operation_timeout`.
    ///
    /// # Cancellation
    ///
    /// By the client's token: then the lease's end has not moved.
    pub fn extend(&self, lock_id: &str, ttl: Duration) -> Result<ExtendResult> {
        self.locks.extend(lock_id, ttl)
    }

    /// Whether somebody holds the key. For display: it may have changed when you read the answer.
    ///
    /// # Blocking
    ///
    /// At most `operation_timeout`.
    ///
    /// # Cancellation
    ///
    /// By the client's token.
    pub fn is_locked(&self, key: &str) -> Result<bool> {
        self.locks.is_locked(key)
    }

    /// The live lease of a key, or with an id. For diagnosis, never to decide whether to release or
    /// extend: those check for themselves. Blocking and cancellation as [`is_locked`](Self::is_locked).
    pub fn lookup(&self, what: Lookup<'_>) -> Result<Option<LockInfo>> {
        self.locks.lookup(what)
    }

    /// The live lease of this key. See [`lookup`](Self::lookup).
    pub fn get_by_key(&self, key: &str) -> Result<Option<LockInfo>> {
        self.locks.get_by_key(key)
    }

    /// The live lease with this id. See [`lookup`](Self::lookup).
    pub fn get_by_id(&self, lock_id: &str) -> Result<Option<LockInfo>> {
        self.locks.get_by_id(lock_id)
    }

    /// The live lease of this key, with raw key and lock id: **sensitive**, for debugging.
    pub fn get_by_key_raw(&self, key: &str) -> Result<Option<LockInfoDebug>> {
        self.locks.get_by_key_raw(key)
    }

    /// The live lease with this id, with raw key and lock id: **sensitive**, for debugging.
    pub fn get_by_id_raw(&self, lock_id: &str) -> Result<Option<LockInfoDebug>> {
        self.locks.get_by_id_raw(lock_id)
    }

    /// Whether a live lease has this id. For display; see [`lookup`](Self::lookup).
    pub fn owns(&self, lock_id: &str) -> Result<bool> {
        self.locks.owns(lock_id)
    }

    /// The same client, whose operations also end when this token fires.
    ///
    /// An operation with a token takes two round trips instead of one, so that the token can be
    /// checked between the read and the write.
    #[must_use]
    pub fn cancellable(&self, token: &CancelToken) -> Self {
        Self {
            sessions: self.sessions.clone(),
            locks: self.locks.cancellable(token),
            postgres: Arc::clone(&self.postgres),
        }
    }

    /// Backend `postgres`, fencing, time authority `server`.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.locks.capabilities()
    }

    /// Creates what is missing of the two tables and their indexes. May be called any number of
    /// times and from many processes at once; does nothing, and needs no right to create, where
    /// nothing is missing.
    ///
    /// # Errors
    ///
    /// `AuthFailed` when something is missing and the role may not create it, `InvalidArgument` for
    /// a schema that does not exist or a database that is not UTF8.
    ///
    /// # Blocking
    ///
    /// At most 6 × `operation_timeout`: others may be creating the same tables.
    ///
    /// # Cancellation
    ///
    /// None.
    pub fn setup_schema(&self) -> Result<()> {
        self.postgres.set_up()
    }

    /// Fails the caller's transaction unless `fence` is the key's newest and its lease is live; see
    /// [`LockGuard::fence_transaction`]. For a holder that knows only key and fence.
    pub fn assert_fence(
        &self,
        transaction: &mut postgres::Transaction<'_>,
        key: &str,
        fence: Fence,
    ) -> Result<()> {
        assert_fence(&*self.postgres, transaction, key, fence)
    }

    /// Tries once to take a session lock, with default options. See
    /// [`try_advisory_lock_with`](Self::try_advisory_lock_with).
    pub fn try_advisory_lock(&self, key: &AdvisoryKey) -> Result<Option<AdvisoryGuard>> {
        self.try_advisory_lock_with(key, &AdvisoryOptions::new())
    }

    /// Tries once to take a session lock: PostgreSQL's advisory lock, which needs no table and ends
    /// with its connection. `None` if somebody else holds the key.
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
    ///     Some(guard) => { /* nobody else cleans up now, while guard.is_held() */ }
    ///     None => { /* somebody else is at it */ }
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
        let merged = self.locks.cancellable(options.token());
        self.sessions.try_lock(*key, options, &merged.token.token)
    }

    /// Waits for a session lock, with default options: at most 5 s. See
    /// [`advisory_lock_with`](Self::advisory_lock_with).
    pub fn advisory_lock(&self, key: &AdvisoryKey) -> Result<AdvisoryGuard> {
        self.advisory_lock_with(key, &AdvisoryOptions::new())
    }

    /// Waits for a session lock; see [`try_advisory_lock_with`](Self::try_advisory_lock_with).
    ///
    /// Threads of this client that want the same key take turns; between processes chance decides. A
    /// waiter keeps no connection and no statement waits in the server: it asks again after pauses of
    /// at most 50 ms.
    ///
    /// # Errors
    ///
    /// `AcquisitionTimeout` when the timeout is over, `Aborted` when a token fired or the client was
    /// closed, and those of a try, at once.
    ///
    /// # Blocking
    ///
    /// At most `timeout`; for ever with `wait_forever`.
    ///
    /// # Cancellation
    ///
    /// By the client's token and that of the options: a sleeping waiter wakes at once.
    pub fn advisory_lock_with(&self, key: &AdvisoryKey, options: &AdvisoryOptions) -> Result<AdvisoryGuard> {
        let merged = self.locks.cancellable(options.token());
        self.sessions.lock(*key, options, &merged.token.token)
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
        self.sessions.sessions(true, &self.locks.token.token)
    }

    /// The sessions that wait in the server for advisory locks of this database. Waiters of this
    /// library wait in their own process and are not among them, but for acquires of leases.
    ///
    /// Blocking and cancellation as [`advisory_holders`](Self::advisory_holders).
    pub fn advisory_waiters(&self) -> Result<Vec<AdvisorySession>> {
        self.sessions.sessions(false, &self.locks.token.token)
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
    /// Blocking and cancellation as [`advisory_holders`](Self::advisory_holders).
    pub fn terminate_advisory_session(&self, pid: i32) -> Result<bool> {
        self.sessions.terminate(pid, &self.locks.token.token)
    }

    /// The operator's view: who holds what, counts, waiters, clean-up, breaking a lock.
    #[must_use]
    pub fn operator(&self) -> Operator {
        Operator::new(Arc::clone(&self.postgres))
    }

    /// Ends the client and all its clones. See [`LockClient::close`]. Session locks are lost and let
    /// go too; `threads_ended` in the report speaks for theirs as well.
    ///
    /// # Blocking
    ///
    /// At most `deadline`, and 50 ms.
    ///
    /// # Cancellation
    ///
    /// None.
    pub fn close(&self, deadline: Duration) -> Result<CloseReport> {
        let start = std::time::Instant::now();
        let settled = self.sessions.close(deadline);
        let mut report = self.locks.close(deadline.saturating_sub(start.elapsed()))?;
        report.threads_ended &= settled;
        Ok(report)
    }

    /// The waiting and the guards, without the database: what code that is tested over a
    /// [`MemoryBackend`](crate::MemoryBackend) should take.
    #[must_use]
    pub fn locks(&self) -> &LockClient {
        &self.locks
    }
}

impl AsRef<LockClient> for PgLockClient {
    fn as_ref(&self) -> &LockClient {
        &self.locks
    }
}

impl fmt::Debug for PgLockClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgLockClient").finish_non_exhaustive()
    }
}

/// A client is a backend, too: for code that is generic over backends. Operations observe the token
/// that is passed in, not the client's own.
impl LockBackend for PgLockClient {
    fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult> {
        self.locks.backend().acquire(key, ttl, cancel)
    }
    fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome> {
        self.locks.backend().release(lock_id, cancel)
    }
    fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome> {
        self.locks.backend().extend(lock_id, ttl, cancel)
    }
    fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool> {
        self.locks.backend().is_locked(key, cancel)
    }
    fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>> {
        self.locks.backend().lookup(what, cancel)
    }
    fn capabilities(&self) -> Capabilities {
        self.locks.capabilities()
    }
    fn attempt(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<AcquireResult> {
        self.locks.backend().attempt(attempt, cancel)
    }
    fn peek(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<bool> {
        self.locks.backend().peek(key, deadline, cancel)
    }
    fn extend_by(
        &self,
        lock_id: &str,
        ttl: Duration,
        deadline: Moment,
        cancel: &CancelToken,
    ) -> Result<ExtendOutcome> {
        self.locks.backend().extend_by(lock_id, ttl, deadline, cancel)
    }
    fn release_by(&self, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        self.locks.backend().release_by(lock_id, deadline)
    }
    fn renew(&self, leases: &[Renewal<'_>], deadline: Moment) -> Vec<Result<RenewOutcome>> {
        self.locks.backend().renew(leases, deadline)
    }
    fn reserve_renewals(&self) -> Result<()> {
        self.locks.backend().reserve_renewals()
    }
    fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoDebug>> {
        self.locks.backend().lookup_raw(what, cancel)
    }
    fn fence_statement(&self, key: &str, fence: Fence) -> Result<String> {
        self.locks.backend().fence_statement(key, fence)
    }
    fn clock(&self) -> Clock {
        self.locks.backend().clock()
    }
    fn operation_timeout(&self) -> Duration {
        self.locks.backend().operation_timeout()
    }
}

impl LockGuard {
    /// Makes the caller's transaction impossible to commit unless this guard's lease is live and its
    /// fence the key's newest: the complete answer to a holder that was paused and wakes up late.
    ///
    /// Call it **first** in the outermost transaction that writes the protected data. As long as
    /// that transaction is open, no newer holder is granted; if the lease is already over, the
    /// statement fails in the server, so that the transaction cannot be committed even if this error
    /// is ignored. It locks the key's counter row (`FOR SHARE`,
    /// <https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS>): keep the
    /// transaction short, the next holder waits for it. Inside a savepoint the protection ends with a
    /// rollback to that savepoint.
    ///
    /// The transaction's connection must reach the database that the lock tables are in, and its
    /// role needs `SELECT` on both and `UPDATE (key_debug)` on the counters.
    ///
    /// # Errors
    ///
    /// `Aborted` when the lease is over; `InvalidArgument` in a READ ONLY transaction;
    /// `ServiceUnavailable` (40001) where a REPEATABLE READ or SERIALIZABLE transaction began before
    /// the newest grant. After any of them the transaction can only be rolled back.
    ///
    /// # Blocking
    ///
    /// As the transaction's own statements: its connection is the caller's. The wait for the counter
    /// row is as short as another's acquire.
    ///
    /// # Cancellation
    ///
    /// None.
    pub fn fence_transaction(&self, transaction: &mut postgres::Transaction<'_>) -> Result<()> {
        assert_fence(&**self.backend(), transaction, self.key(), self.fence())
    }
}

fn assert_fence(
    backend: &dyn LockBackend,
    transaction: &mut postgres::Transaction<'_>,
    key: &str,
    fence: Fence,
) -> Result<()> {
    let statement = backend.fence_statement(key, fence)?;
    match guard_runtime(|| transaction.simple_query(&statement))? {
        Ok(_) => Ok(()),
        Err(error) => Err(fence_error(error).with_key(key)),
    }
}

/// What a [`PgLockClient`] is built with. Setters never fail: what is wrong is said by
/// [`connect`](Self::connect) and its kin, before anything is sent.
#[derive(Clone)]
#[must_use = "a builder does nothing until connect, connect_with or build is called"]
pub struct PgLockClientBuilder {
    schema: Option<String>,
    table_name: Option<String>,
    fence_table_name: Option<String>,
    auto_create_tables: bool,
    store_key_debug: bool,
    cleanup_in_is_locked: bool,
    max_connections: u32,
    connection_timeout: Duration,
    operation_timeout: Duration,
    dispose_timeout: Duration,
    on_release_error: Option<OnReleaseError>,
    telemetry: Option<TelemetryOptions>,
    maintenance: Option<Result<Connector, Arc<LockError>>>,
}

impl Default for PgLockClientBuilder {
    fn default() -> Self {
        Self {
            schema: None,
            table_name: None,
            fence_table_name: None,
            auto_create_tables: true,
            store_key_debug: true,
            cleanup_in_is_locked: false,
            max_connections: 10,
            connection_timeout: Duration::from_secs(5),
            operation_timeout: Duration::from_secs(5),
            dispose_timeout: Duration::from_secs(5),
            on_release_error: None,
            telemetry: None,
            maintenance: None,
        }
    }
}

impl PgLockClientBuilder {
    /// The table of the leases. Letters, digits and underscores, at most 63, taken as given (mixed
    /// case stays). Default `syncguard_locks`.
    pub fn table_name(mut self, name: impl Into<String>) -> Self {
        self.table_name = Some(name.into());
        self
    }

    /// The table of the fence counters; another than the leases'. Default `syncguard_fence_counters`.
    pub fn fence_table_name(mut self, name: impl Into<String>) -> Self {
        self.fence_table_name = Some(name.into());
        self
    }

    /// The schema of both tables. Default: where the `search_path` finds them, or its first schema
    /// if it does not; resolved once.
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = Some(name.into());
        self
    }

    /// Whether building the client creates missing tables. Default true. With `false` building does
    /// no I/O at all, and the tables come from a migration (`schema.sql`): the usual choice in production.
    pub fn auto_create_tables(mut self, create: bool) -> Self {
        self.auto_create_tables = create;
        self
    }

    /// Whether a new fence counter notes the caller's key in `key_debug`. Default true, as other
    /// SyncGuard clients do. Counters are kept for ever, so `false` where keys are personal data.
    pub fn store_key_debug(mut self, store: bool) -> Self {
        self.store_key_debug = store;
        self
    }

    /// Whether [`is_locked`](PgLockClient::is_locked), when it meets a row that has been over for
    /// more than 2 s, has such rows deleted: afterwards, on another thread, at most 100 rows and at
    /// most once a second. Default false.
    ///
    /// The price: `is_locked` is no longer a pure read (it needs `DELETE`, and causes writes), and a
    /// late release or extend finds nothing rather than an expired row, which telemetry reports as
    /// `not-found` instead of `expired`. Tests must not rely on expired rows staying. A cron job
    /// with [`Operator::cleanup_expired`] does the same without these.
    pub fn cleanup_in_is_locked(mut self, cleanup: bool) -> Self {
        self.cleanup_in_is_locked = cleanup;
        self
    }

    /// The most connections of the client's own pool, without the one kept for renewals. Default 10,
    /// at least 1. Waiting for a lock occupies no connection.
    pub fn max_connections(mut self, max: u32) -> Self {
        self.max_connections = max;
        self
    }

    /// How long one call waits for a free connection, or for a new one, at most. Default 5 s. It is
    /// part of the call's own time, not added to it.
    pub fn connection_timeout(mut self, timeout: Duration) -> Self {
        self.connection_timeout = timeout;
        self
    }

    /// How long a single operation may take in all. Default 5 s, at least 1 ms.
    pub fn operation_timeout(mut self, timeout: Duration) -> Self {
        self.operation_timeout = timeout;
        self
    }

    /// How long dropping a guard may take. Default 5 s. What is not released by then is released by
    /// the worker, or ends with its ttl.
    pub fn dispose_timeout(mut self, timeout: Duration) -> Self {
        self.dispose_timeout = timeout;
        self
    }

    /// Called when an automatic release failed. Without it such failures are logged as warnings, in
    /// debug builds and with `SYNCGUARD_DEBUG=true`, without key and lock id. Set it in production.
    pub fn on_release_error(
        mut self,
        callback: impl Fn(&LockError, &ReleaseErrorContext) + Send + Sync + 'static,
    ) -> Self {
        self.on_release_error = Some(Arc::new(callback));
        self
    }

    /// Has every operation reported as an event. Without it nothing is computed and no thread runs.
    pub fn telemetry(mut self, options: TelemetryOptions) -> Self {
        self.telemetry = Some(options);
        self
    }

    /// For [`build`](Self::build): how to open a connection of the client's own for renewals, so
    /// that the caller's pool keeps all of its own.
    pub fn maintenance<T>(mut self, config: Config, tls: T) -> Self
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::TlsConnect: Send + 'static,
        T::Stream: Send + 'static,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        self.maintenance = Some(Connector::new(config, tls).map_err(Arc::new));
        self
    }

    /// Builds a client with a pool of its own, without TLS. See [`PgLockClient::connect`].
    pub fn connect(self, url: &str) -> Result<PgLockClient> {
        let names = self.check()?;
        let connector = Connector::new(parse_url(url)?, NoTls)?;
        self.finish(names, |builder| {
            Source::own(connector, builder.max_connections, builder.connection_timeout)
        })
    }

    /// Builds a client with a pool of its own from the driver's configuration and a TLS connector,
    /// such as those of `postgres-native-tls` and `postgres-openssl`, or [`NoTls`]. The
    /// configuration's notice callback is replaced.
    ///
    /// Errors, blocking and cancellation as [`PgLockClient::connect`].
    pub fn connect_with<T>(self, config: Config, tls: T) -> Result<PgLockClient>
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::TlsConnect: Send + 'static,
        T::Stream: Send + 'static,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        let names = self.check()?;
        let connector = Connector::new(config, tls)?;
        self.finish(names, |builder| {
            Source::own(connector, builder.max_connections, builder.connection_timeout)
        })
    }

    /// Builds a client on a caller's pool, for programs that already have one.
    ///
    /// One of the pool's connections is kept for renewals from the first renewed guard on, unless
    /// [`maintenance`](Self::maintenance) says how to open one: a pool of one connection is then
    /// `InvalidArgument`. The client cannot time out a driver's call on a connection that is not its
    /// own: the server's limits hold, and the pool's `connection_timeout`.
    ///
    /// Set the pool's `test_on_check_out(false)`: the test costs a round trip each time, and stale
    /// connections are replaced anyway.
    pub fn build<M>(self, pool: r2d2::Pool<M>) -> Result<PgLockClient>
    where
        M: ManageConnection<Connection = Client>,
    {
        let names = self.check()?;
        let maintenance = match &self.maintenance {
            None => None,
            Some(Ok(connector)) => Some(connector.clone()),
            Some(Err(error)) => return Err(LockError::invalid(format!("maintenance: {error}"))),
        };
        self.finish(names, |builder| Source::foreign(pool, maintenance, builder.connection_timeout))
    }

    /// Everything that can be wrong without a server.
    fn check(&self) -> Result<Names> {
        let least = Duration::from_millis(1);
        for (option, value) in [
            ("connection_timeout", self.connection_timeout),
            ("operation_timeout", self.operation_timeout),
            ("dispose_timeout", self.dispose_timeout),
        ] {
            if value < least {
                return Err(LockError::invalid(format!("{option} is below 1 ms: 5 s is usual")));
            }
        }
        if self.max_connections == 0 {
            return Err(LockError::invalid("max_connections is 0: a client needs at least one"));
        }
        Names::new(self.schema.as_deref(), self.table_name.as_deref(), self.fence_table_name.as_deref())
    }

    fn finish(self, names: Names, source: impl FnOnce(&Self) -> Source) -> Result<PgLockClient> {
        let settings = Settings {
            store_key_debug: self.store_key_debug,
            cleanup_in_is_locked: self.cleanup_in_is_locked,
            operation_timeout: self.operation_timeout,
        };
        let postgres = PostgresBackend::new(source(&self), names, settings);
        if self.auto_create_tables {
            postgres.set_up()?;
        }
        let inner: Arc<PostgresBackend> = Arc::clone(&postgres);
        let backend: Arc<dyn LockBackend> = match self.telemetry {
            None => inner,
            Some(options) => Arc::new(with_telemetry(inner, options)),
        };
        let settings =
            ClientSettings { dispose_timeout: self.dispose_timeout, on_release_error: self.on_release_error };
        let sessions = SessionLocks::new(Arc::clone(&postgres), self.operation_timeout, self.dispose_timeout);
        Ok(PgLockClient { sessions, locks: LockClient::with_settings(backend, settings), postgres })
    }
}

impl fmt::Debug for PgLockClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgLockClientBuilder")
            .field("schema", &self.schema)
            .field("table_name", &self.table_name)
            .field("fence_table_name", &self.fence_table_name)
            .field("auto_create_tables", &self.auto_create_tables)
            .field("max_connections", &self.max_connections)
            .field("connection_timeout", &self.connection_timeout)
            .field("operation_timeout", &self.operation_timeout)
            .field("dispose_timeout", &self.dispose_timeout)
            .finish_non_exhaustive()
    }
}
