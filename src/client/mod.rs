//! The client: the only place where the layers meet.
//!
//! Waiting, guards and renewal come from [`LockClient`], leases from the PostgreSQL adapter; this
//! module builds the one on the other and names the driver's types.

mod advisory;
mod builder;
mod election;
mod fence;
mod once;
mod operations;
mod port;
mod semaphore;
mod shared;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::advisory::SessionLocks;
use crate::backend::Capabilities;
use crate::cancel::CancelToken;
use crate::error::Result;
use crate::leases::{Operator, PostgresBackend};
use crate::lock::{CloseReport, LockClient, LockGuard, LockOptions, MultiGuard};
use crate::model::fence::Fence;
use crate::model::key::normalize_and_validate_key;
use crate::telemetry::TelemetryHandle;

pub use builder::PgLockClientBuilder;

/// Locks on PostgreSQL: leases with fences in two tables.
///
/// It is cheap to clone and to share between threads; a clone is the same client, with the same pool, the
/// same queue of waiters and the same two background threads, which start with the first lock and
/// end with the last clone and guard.
///
/// ```no_run
/// use syncguard::PgLockClient;
///
/// let client = PgLockClient::connect("postgresql://app@db.example/app")?;
/// let guard = client.lock("payment:42")?;
/// // No other process, on any machine, holds "payment:42" until the guard is dropped.
/// assert!(guard.is_held());
/// # Ok::<(), syncguard::LockError>(())
/// ```
///
/// # One `lock()` and its release
///
/// Messages, and who sends them, when another holder has the key at first. If the key is free, there is no wait.
///
#[doc = include_str!("../../docs/pictures/lock.svg")]
///
/// # Blocking
///
/// | calls | at most |
/// | --- | --- |
/// | `lock`, `read_lock`, `lock_all`, `advisory_lock` and their variants | `timeout` of the options, 5 s by default, waiting for a connection and connecting included; forever with `wait_forever` |
/// | `with_lock` | that, the time of its closure, and `drop_timeout` |
/// | `elect` | no limit: see there |
/// | `run_once` | the time of its job, and as [`LockClient::run_once`] says |
/// | `connect`, `setup_schema` | 6 × `operation_timeout`: others may be creating the same tables |
/// | `close`, `assert_fence` | as they say |
/// | all others | `operation_timeout` |
///
/// On TCP connections of the client's own, encrypted or not,
/// the client enforces these limits itself, whatever the network does. On **Unix sockets**, and on a
/// **caller's pool**, the driver offers no way to stop waiting: there the server's own limits
/// (`lock_timeout`, `statement_timeout`) end every wait, except for a server that has stopped or a
/// `COMMIT` that waits for a standby. Opening a connection, name resolution included, is within the
/// call's own time everywhere.
///
/// # Cancellation
///
/// The token of [`cancellable`](Self::cancellable), and that of the options, end a call with
/// [`Aborted`](crate::ErrorCode::Aborted): a sleeping waiter wakes at once; a thread blocked in the server
/// returns well within half a second, since its connection is cut and the server is asked to cancel the
/// statement. Then nothing was changed, unless the error says that its outcome is unknown. No token ends the
/// closure of `with_lock` or its release, and none ends `connect`, `setup_schema`, `assert_fence` and `close`.
///
/// # Threads, runtimes, forks
///
/// These are calls for ordinary threads. Inside an async runtime use `spawn_blocking`; elsewhere in
/// a runtime they fail with [`InvalidArgument`](crate::ErrorCode::InvalidArgument): the driver panics
/// there. The panic is caught, but the panic hook prints it, and with `panic = "abort"` it ends the
/// program. Dropping a guard or a client there is fine: a thread does the work.
///
/// After a `fork` the child's copies of a client are refused, and the parent keeps its locks. Fork before
/// the first client, or `exec`: a *new* client in such a child may hang or crash if the parent had a pool,
/// a caller's pool included, because a pool's own thread always waits on a lock of `r2d2`.
#[derive(Clone)]
pub struct PgLockClient {
    // Before the locks: the last drop of those may close the backend.
    sessions: SessionLocks,
    locks: LockClient,
    leases: Arc<PostgresBackend>,
    telemetry: Option<TelemetryHandle>,
}

impl PgLockClient {
    /// A client for the database at this address, `postgresql://…` or key=value pairs, with TLS
    /// if it asks for it; see [`connect`](PgLockClientBuilder::connect) of the builder.
    /// Creates the two tables if they are missing; see the builder for everything else.
    ///
    /// Several hosts (`host=a,b`, `postgresql://a,b/db`) and several addresses of a name are tried one
    /// after the other. A silent one takes at most half of the time that is left; those that failed
    /// last time come last. Of several hosts only one that accepts writes is used, unless
    /// [`target_session_attrs`](https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNECT-TARGET-SESSION-ATTRS)
    /// says `read-only`; the role of a lone host is not checked. [`docs/operations.md`](https://docs.rs/crate/syncguard/latest/source/docs/operations.md) has more.
    ///
    /// ```no_run
    /// use syncguard::PgLockClient;
    ///
    /// let client = PgLockClient::connect("host=db.example dbname=app user=app")?;
    /// let guard = client.lock("payment:42")?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a connection string that cannot be parsed, `ServiceUnavailable` (also when
    /// no host is the primary), `AuthFailed` or `NetworkTimeout` when the server cannot be used.
    pub fn connect(url: &str) -> Result<Self> {
        Self::builder().connect(url)
    }

    /// A builder with the defaults.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// use syncguard::PgLockClient;
    ///
    /// let client = PgLockClient::builder()
    ///     .schema("locks")
    ///     .operation_timeout(Duration::from_secs(2))
    ///     .connect("postgresql://app@db.example/app")?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn builder() -> PgLockClientBuilder {
        PgLockClientBuilder::default()
    }

    /// Waits for the lock with default options: at most 5 s, then a lease of 30 s that is renewed
    /// until the guard is dropped. See [`lock_with`](Self::lock_with).
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// let guard = client.lock("payment:42")?;
    /// println!("no other process works on payment 42; the fencing token is {}", guard.fence());
    /// guard.release()?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn lock(&self, key: &str) -> Result<LockGuard> {
        self.locks.lock(key)
    }

    /// Waits for the lock. See [`LockClient::lock_with`], also for errors and what may remain held.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let patient = LockOptions::new().timeout(Duration::from_secs(60));
    /// let guard = client.lock_with("report", &patient)?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn lock_with(&self, key: &str, options: &LockOptions) -> Result<LockGuard> {
        self.locks.lock_with(key, options)
    }

    /// Tries once, with default options. `None` if another process or thread holds the key.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// match client.try_lock("report")? {
    ///     Some(guard) => println!("mine, with the fencing token {}", guard.fence()),
    ///     None => println!("another process makes the report"),
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn try_lock(&self, key: &str) -> Result<Option<LockGuard>> {
        self.locks.try_lock(key)
    }

    /// Tries once. See [`LockClient::try_lock_with`].
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let short = LockOptions::new().ttl(Duration::from_secs(10));
    /// if let Some(guard) = client.try_lock_with("report", &short)? {
    ///     assert!(guard.is_held());
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn try_lock_with(&self, key: &str, options: &LockOptions) -> Result<Option<LockGuard>> {
        self.locks.try_lock_with(key, options)
    }

    /// Waits for several locks at once, all or none, with default options: at most 5 s, then leases of 30 s that
    /// are renewed until the guard is dropped. See [`LockClient::lock_all_with`].
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// let guard = client.lock_all(&["account:7", "account:9"])?;
    /// println!("nobody else moves money between {:?}", guard.keys());
    /// guard.release()?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn lock_all<K: AsRef<str>>(&self, keys: &[K]) -> Result<MultiGuard> {
        self.locks.lock_all(keys)
    }

    /// Waits until 1 to 64 keys can be taken at the same moment, and takes them in one round trip. Nothing is held
    /// while it waits. See [`LockClient::lock_all_with`], also for errors and what may remain held.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let patient = LockOptions::new().timeout(Duration::from_secs(60));
    /// let guard = client.lock_all_with(&["account:7", "account:9"], &patient)?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn lock_all_with<K: AsRef<str>>(&self, keys: &[K], options: &LockOptions) -> Result<MultiGuard> {
        self.locks.lock_all_with(keys, options)
    }

    /// Tries once to take several locks, with default options. `None`, and nothing is held, if another process
    /// or thread holds one of the keys.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// if let Some(guard) = client.try_lock_all(&["account:7", "account:9"])? {
    ///     assert!(guard.is_held());
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn try_lock_all<K: AsRef<str>>(&self, keys: &[K]) -> Result<Option<MultiGuard>> {
        self.locks.try_lock_all(keys)
    }

    /// Tries once to take several locks. See [`LockClient::try_lock_all_with`].
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let short = LockOptions::new().ttl(Duration::from_secs(10));
    /// let guard = client.try_lock_all_with(&["account:7", "account:9"], &short)?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn try_lock_all_with<K: AsRef<str>>(
        &self,
        keys: &[K],
        options: &LockOptions,
    ) -> Result<Option<MultiGuard>> {
        self.locks.try_lock_all_with(keys, options)
    }

    /// Runs `work` under the lock, and returns its value even if the release fails. See
    /// [`LockClient::with_lock`].
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// use syncguard::LockOptions;
    ///
    /// let rows: u64 = client.with_lock("import", &LockOptions::new(), |guard| {
    ///     if guard.is_held() { 4711 } else { 0 }
    /// })?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn with_lock<T>(
        &self,
        key: &str,
        options: &LockOptions,
        work: impl FnOnce(&LockGuard) -> T,
    ) -> Result<T> {
        self.locks.with_lock(key, options, work)
    }

    /// The same client, whose operations also end when this token fires.
    ///
    /// An operation with a token takes two round trips instead of one, so that the token can be
    /// checked between the read and the write.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// use syncguard::CancelToken;
    ///
    /// let shutdown = CancelToken::new();
    /// let request = client.cancellable(&shutdown);
    /// // On another thread, shutdown.cancel() ends this wait with `Aborted`.
    /// let guard = request.lock("report")?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn cancellable(&self, token: &CancelToken) -> Self {
        Self {
            sessions: self.sessions.clone(),
            locks: self.locks.cancellable(token),
            leases: Arc::clone(&self.leases),
            telemetry: self.telemetry.clone(),
        }
    }

    /// Backend `postgres`, fencing, time authority `server`.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// assert_eq!(client.capabilities().backend, "postgres");
    /// assert!(client.capabilities().supports_fencing);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.locks.capabilities()
    }

    /// Creates whatever is missing of the two tables and their indexes. May be called any number of
    /// times and from many processes at once; if nothing is missing, it does nothing and needs no right
    /// to create.
    ///
    /// ```no_run
    /// let client = syncguard::PgLockClient::builder()
    ///     .auto_create_tables(false)
    ///     .connect("postgresql://owner@db.example/app")?;
    /// client.setup_schema()?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `AuthFailed` when something is missing and the role may not create it, `InvalidArgument` for
    /// a schema that does not exist, a database that is not UTF8, or tables whose indexes may be out of
    /// the order of their collation (the text names the commands; see [`docs/operations.md`](https://docs.rs/crate/syncguard/latest/source/docs/operations.md)).
    pub fn setup_schema(&self) -> Result<()> {
        self.leases.set_up()
    }

    /// Fails the caller's transaction unless `fence` is the key's newest and its lease is live; see
    /// [`LockGuard::fence_transaction`], also for errors. For a holder that knows only key and fence. An
    /// invalid key is `InvalidArgument`.
    ///
    /// **What it cannot know**: whose lease it is. Fences are counted per key *and database*: if the
    /// transaction's connection leads to another database with lock tables of the same names (a copy, a
    /// staging system), and the same key happens to be held there under the same number, the check
    /// passes. A guard's check compares the lock id as well; if you have only key and fence, make
    /// sure that the connection is to the database that granted them.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use syncguard::postgres::{Client, NoTls};
    /// # let mut connection = Client::connect("postgresql://app@db.example/app", NoTls).unwrap();
    /// use syncguard::Fence;
    ///
    /// let fence: Fence = "000000000000042".parse()?; // came with the job, from whoever holds the lock
    /// let mut transaction = connection.transaction().unwrap();
    /// client.assert_fence(&mut transaction, "account:7", fence)?; // first of all
    /// transaction.commit().unwrap();
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Blocking
    ///
    /// At most `operation_timeout` to find the tables, if this client has not used them so far; then as
    /// long as the transaction's own statements may, by its `lock_timeout` and `statement_timeout`.
    pub fn assert_fence(
        &self,
        transaction: &mut postgres::Transaction<'_>,
        key: &str,
        fence: Fence,
    ) -> Result<()> {
        // A guard's fence_transaction alone names keys that no caller can.
        let key = normalize_and_validate_key(key)?;
        fence::assert_fence(&*self.leases, transaction, &key, fence, None)
    }

    /// The operator's view: which leases there are, counts, waiters, cleanup, breaking a lock.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// println!("{:?}", client.operator().counts()?);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn operator(&self) -> Operator {
        Operator::new(Arc::clone(&self.leases), Arc::new(self.sessions.self_test()))
    }

    /// The state of this client's events: how many the callback has received, how many were dropped, and
    /// a way to wait for those still queued. `None` for a client that was built without
    /// [`telemetry`](PgLockClientBuilder::telemetry).
    ///
    /// ```no_run
    /// use syncguard::{PgLockClient, TelemetryOptions};
    ///
    /// let client = PgLockClient::builder()
    ///     .telemetry(TelemetryOptions::new(|event| println!("{} {}", event.operation, event.result)))
    ///     .connect("postgresql://app@db.example/app")?;
    /// let dropped = client.telemetry().map_or(0, |events| events.dropped());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn telemetry(&self) -> Option<&TelemetryHandle> {
        self.telemetry.as_ref()
    }

    /// Ends the client and all its clones. See [`LockClient::close`]. Session locks are lost and released,
    /// too; `threads_ended` in the report covers their threads as well. Waits for events that are on their way to
    /// a telemetry callback, for at most
    /// [`flush_timeout`](crate::TelemetryOptions::flush_timeout): the program may end next.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use std::time::Duration;
    /// let report = client.close(Duration::from_secs(10))?;
    /// if !report.is_clean() {
    ///     eprintln!("{report:?}");
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Blocking
    ///
    /// At most `deadline`, and 50 ms.
    pub fn close(&self, deadline: Duration) -> Result<CloseReport> {
        self.locks.check_process()?;
        let start = std::time::Instant::now();
        // All are told at once, and then waited for: leases, which stay held in the server if nobody lets them
        // go, before session locks, which end with their connections. One that has to wait for a server that
        // says nothing does not take the time of the others.
        self.sessions.close(Duration::ZERO);
        let mut report = self.locks.close(deadline)?;
        report.threads_ended &= self.sessions.close(deadline.saturating_sub(start.elapsed()));
        if let Some(events) = &self.telemetry {
            let rest = deadline.saturating_sub(start.elapsed());
            let _ = events.flush(rest.min(events.flush_timeout()));
        }
        Ok(report)
    }

    /// The waiting and the guards, without the database. Code that is tested over a
    /// [`MemoryBackend`](crate::MemoryBackend) should take this.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// use syncguard::{LockClient, Result};
    ///
    /// fn make_report(locks: &LockClient) -> Result<()> {
    ///     let _guard = locks.lock("report")?;
    ///     Ok(())
    /// }
    /// make_report(client.locks())?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
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
