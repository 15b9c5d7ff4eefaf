//! How a client is built: all settings, checked before anything is sent.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use postgres::Client;
use postgres::config::Config;
use r2d2::ManageConnection;
use tokio_postgres::Socket;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};

use crate::advisory::SessionLocks;
use crate::backend::{LockBackend, check_text};
use crate::client::PgLockClient;
use crate::error::{LockError, Result};
use crate::leases::{PostgresBackend, Settings, TableNames};
use crate::lock::{ClientSettings, LockClient, OnReleaseError, ReleaseErrorContext};
use crate::pg::{ConnectionSettings, Connector, Database, Environment, Source};
use crate::telemetry::{TelemetryOptions, with_telemetry};
use crate::threads::UserValue;

/// The settings of a [`PgLockClient`]. Setters never fail: errors are reported by
/// [`connect`](Self::connect) and its variants, before anything is sent.
///
/// # Blocking
///
/// `connect`, `connect_env`, `connect_with` and `build` create the tables: at most 6 × `operation_timeout`. With
/// [`auto_create_tables(false)`](Self::auto_create_tables) they do no I/O.
///
/// # Cancellation
///
/// No token ends them.
#[derive(Clone)]
#[allow(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
#[must_use = "a builder does nothing until connect, connect_with or build is called"]
pub struct PgLockClientBuilder {
    schema: Option<String>,
    table_name: Option<String>,
    fence_table_name: Option<String>,
    members_table_name: Option<String>,
    create_members_table: bool,
    auto_create_tables: bool,
    store_key_debug: bool,
    cleanup_in_is_locked: bool,
    max_connections: u32,
    connection_timeout: Duration,
    operation_timeout: Duration,
    wake_ups: bool,
    dispose_timeout: Duration,
    on_release_error: Option<OnReleaseError>,
    telemetry: Option<TelemetryOptions>,
    owner: Option<String>,
    maintenance: Option<Arc<dyn Fn(Duration) -> Result<Connector> + Send + Sync>>,
}

impl Default for PgLockClientBuilder {
    fn default() -> Self {
        Self {
            schema: None,
            table_name: None,
            fence_table_name: None,
            members_table_name: None,
            create_members_table: false,
            auto_create_tables: true,
            store_key_debug: true,
            cleanup_in_is_locked: false,
            max_connections: 10,
            connection_timeout: Duration::from_secs(5),
            operation_timeout: Duration::from_secs(5),
            wake_ups: true,
            dispose_timeout: Duration::from_secs(5),
            on_release_error: None,
            telemetry: None,
            owner: None,
            maintenance: None,
        }
    }
}

impl PgLockClientBuilder {
    /// The table of the leases. Letters, digits and underscores, at most 63, taken as given (mixed
    /// case stays). Default `syncguard_locks`.
    ///
    /// ```
    /// let builder = syncguard::PgLockClient::builder().table_name("billing_locks");
    /// ```
    pub fn table_name(mut self, name: impl Into<String>) -> Self {
        self.table_name = Some(name.into());
        self
    }

    /// The table of the fence counters; it must differ from that of the leases. Default `syncguard_fence_counters`.
    ///
    /// ```
    /// let builder = syncguard::PgLockClient::builder()
    ///     .table_name("billing_locks")
    ///     .fence_table_name("billing_fences");
    /// ```
    pub fn fence_table_name(mut self, name: impl Into<String>) -> Self {
        self.fence_table_name = Some(name.into());
        self
    }

    /// The optional table beside that of the leases, which shared leases need: see [`read_lock`](PgLockClient::read_lock) and
    /// [`create_members_table`](Self::create_members_table). Default `syncguard_members`, or the name of the
    /// leases' table and `_members` where that is not the default. Clients that share keys must agree on it.
    ///
    /// ```
    /// let builder = syncguard::PgLockClient::builder()
    ///     .table_name("billing_locks")
    ///     .members_table_name("billing_readers");
    /// ```
    pub fn members_table_name(mut self, name: impl Into<String>) -> Self {
        self.members_table_name = Some(name.into());
        self
    }

    /// Whether setup creates the optional table, too: when the client is built, unless
    /// [`auto_create_tables(false)`](Self::auto_create_tables) is set, and by
    /// [`setup_schema`](PgLockClient::setup_schema). Default false.
    ///
    /// ```
    /// let builder = syncguard::PgLockClient::builder().create_members_table(true);
    /// ```
    pub fn create_members_table(mut self, create: bool) -> Self {
        self.create_members_table = create;
        self
    }

    /// The schema of all tables. Default: where the `search_path` finds them, or its first schema
    /// if it does not; resolved once.
    ///
    /// Set it where programs connect as different roles. The default path begins with `"$user"`
    /// (<https://www.postgresql.org/docs/current/ddl-schemas.html#DDL-SCHEMAS-PATH>): where a schema has
    /// the role's name, each role finds tables of its own, and two programs hold the same key. A client
    /// without `schema` logs a warning about it at its first use; where the tables were found or made is
    /// logged at info level.
    ///
    /// ```
    /// let builder = syncguard::PgLockClient::builder().schema("locks");
    /// ```
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = Some(name.into());
        self
    }

    /// Whether building the client creates missing tables. Default true. With `false` building does
    /// no I/O at all, and the tables come from a migration (`schema.sql`): the usual choice in production.
    ///
    /// ```
    /// // The tables come from a migration that runs schema.sql.
    /// let builder = syncguard::PgLockClient::builder().auto_create_tables(false);
    /// ```
    pub fn auto_create_tables(mut self, create: bool) -> Self {
        self.auto_create_tables = create;
        self
    }

    /// Whether a new fence counter notes the caller's key in `key_debug`. Default true, as other
    /// SyncGuard clients do. Counters are kept forever, so `false` where keys are personal data.
    ///
    /// ```
    /// let builder = syncguard::PgLockClient::builder().store_key_debug(false);
    /// ```
    pub fn store_key_debug(mut self, store: bool) -> Self {
        self.store_key_debug = store;
        self
    }

    /// Whether [`is_locked`](PgLockClient::is_locked), when it meets a row that has been over for
    /// more than 2 s, has such rows deleted: afterwards, on another thread, at most 100 rows and at
    /// most once a second. Default false.
    ///
    /// The drawbacks: `is_locked` is no longer a pure read (it needs `DELETE`, and causes writes), and a
    /// late release or extend finds nothing rather than an expired row, which telemetry reports as
    /// `not-found` instead of `expired`. Tests must not rely on expired rows staying. A cron job
    /// with [`Operator::cleanup_expired`](crate::Operator::cleanup_expired) does the same without these drawbacks.
    ///
    /// ```
    /// let builder = syncguard::PgLockClient::builder().cleanup_in_is_locked(true);
    /// ```
    pub fn cleanup_in_is_locked(mut self, cleanup: bool) -> Self {
        self.cleanup_in_is_locked = cleanup;
        self
    }

    /// The most connections of the client's own pool, without the one kept for renewals. Default 10,
    /// at least 1; more than 10,000 count as 10,000. Waiting for a lock occupies no connection.
    ///
    /// ```
    /// let builder = syncguard::PgLockClient::builder().max_connections(4);
    /// ```
    pub fn max_connections(mut self, max: u32) -> Self {
        self.max_connections = max;
        self
    }

    /// The longest time that one call waits for a free connection, or for a new one. Default 5 s. It is
    /// part of the call's own time, not added to it. Name server, handshakes and every host of a
    /// list are within it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let builder = syncguard::PgLockClient::builder().connection_timeout(Duration::from_secs(2));
    /// ```
    pub fn connection_timeout(mut self, timeout: Duration) -> Self {
        self.connection_timeout = timeout;
        self
    }

    /// How long a single operation may take in all. Default 5 s, at least 1 ms.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let builder = syncguard::PgLockClient::builder().operation_timeout(Duration::from_secs(2));
    /// ```
    pub fn operation_timeout(mut self, timeout: Duration) -> Self {
        self.operation_timeout = timeout;
        self
    }

    /// Whether this client's releases notify waiters for the key in other processes, and its own
    /// waiters listen for such notifications. Default true: a long wait ends within milliseconds of the release.
    ///
    /// If nobody waits, a release costs nearly the same, and sends nothing. While a thread of this
    /// client waits for longer than a moment, the client has **one more connection**, beyond
    /// `max_connections`, and one more thread; both end 5 s after the last such wait. With `false`, over a
    /// caller's pool, behind a pooler that shares sessions, and for waits beyond 256 keys at a time,
    /// waiters look at the key instead, as [`LockOptions::wake_ups`](crate::LockOptions::wake_ups) says.
    ///
    /// ```
    /// let builder = syncguard::PgLockClient::builder().wake_ups(false);
    /// ```
    pub fn wake_ups(mut self, wake_ups: bool) -> Self {
        self.wake_ups = wake_ups;
        self
    }

    /// How long dropping a guard may take. Default 5 s. A lease that is not released by then is released by
    /// the worker, or ends with its ttl.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let builder = syncguard::PgLockClient::builder().drop_timeout(Duration::from_secs(1));
    /// ```
    pub fn drop_timeout(mut self, timeout: Duration) -> Self {
        self.dispose_timeout = timeout;
        self
    }

    /// [`drop_timeout`](Self::drop_timeout), by the name that other SyncGuard clients have for it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let builder = syncguard::PgLockClient::builder().dispose_timeout(Duration::from_secs(1));
    /// ```
    pub fn dispose_timeout(self, timeout: Duration) -> Self {
        self.drop_timeout(timeout)
    }

    /// Called when an automatic release failed. Without it such failures are logged as warnings, in
    /// debug builds and with `SYNCGUARD_DEBUG=true`, without key and lock id. Set it in production.
    ///
    /// ```
    /// let builder = syncguard::PgLockClient::builder().on_release_error(|error, context| {
    ///     eprintln!("{} could not be released: {}", context.source.as_str(), error.chain());
    /// });
    /// ```
    pub fn on_release_error(
        mut self,
        callback: impl Fn(&LockError, &ReleaseErrorContext) + Send + Sync + 'static,
    ) -> Self {
        self.on_release_error = Some(UserValue::new(Arc::new(callback)));
        self
    }

    /// Reports every operation as an event. Without it nothing is computed and no thread runs.
    /// [`PgLockClient::telemetry`] then counts what was delivered and what was dropped.
    ///
    /// ```
    /// use syncguard::{PgLockClient, TelemetryOptions};
    ///
    /// let options = TelemetryOptions::new(|event| println!("{} {}", event.operation, event.result));
    /// let builder = PgLockClient::builder().telemetry(options);
    /// ```
    pub fn telemetry(mut self, options: TelemetryOptions) -> Self {
        self.telemetry = Some(options);
        self
    }

    /// Who this client is, in words for people: a host and a process, the name of a service; at most 1 KiB. Shown to
    /// everybody who asks who has a key that this client holds: in the text of an `AcquisitionTimeout`, by
    /// [`holders`](crate::Operator::holders) and [`leader`](PgLockClient::leader), in events. Default: none.
    ///
    /// It is written with each grant, in the same message, into the optional table of members, which setup then
    /// creates, too: the role needs the rights on it that [`docs/security.md`](https://docs.rs/crate/syncguard/latest/source/docs/security.md) names. With
    /// [`auto_create_tables(false)`](Self::auto_create_tables) locks fail with `InvalidArgument` while that table is
    /// missing. It is not an identity: nothing is decided by it, anybody may say anything, and everybody who may read the
    /// table can read it. To say what one lock is for, use [`LockOptions::note`](crate::LockOptions::note).
    ///
    /// ```
    /// let builder = syncguard::PgLockClient::builder().owner(format!("invoices:{}", std::process::id()));
    /// ```
    pub fn owner(mut self, owner: impl Into<String>) -> Self {
        self.owner = Some(owner.into());
        self
    }

    /// For [`build`](Self::build): how to open a connection of the client's own for renewals, so
    /// that the caller's pool keeps all of its connections.
    ///
    /// ```no_run
    /// use syncguard::postgres::{Config, NoTls};
    ///
    /// let config: Config = "host=db.example user=app dbname=app".parse().unwrap();
    /// let builder = syncguard::PgLockClient::builder().maintenance(config, NoTls);
    /// ```
    pub fn maintenance<T>(mut self, config: Config, tls: T) -> Self
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::TlsConnect: Send + 'static,
        T::Stream: Send + 'static,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        // Opened with the operation timeout that the builder ends up with.
        let connector = move |timeout| Connector::new(&config, tls.clone(), timeout);
        self.maintenance = Some(Arc::new(connector));
        self
    }

    /// Builds a client with a pool of its own, from `postgresql://…` or key=value pairs.
    ///
    /// With the feature `rustls` or `native-tls`, `sslmode`, `sslrootcert` and the other options of TLS mean the same
    /// as in [libpq](https://www.postgresql.org/docs/current/libpq-ssl.html), or are stricter; without these
    /// features a string that asks for TLS is refused. A password, and how to
    /// encrypt, may also come from the environment (`PGPASSWORD`, `PGSSLMODE`, a passfile and so on).
    /// [`docs/connecting.md`](https://docs.rs/crate/syncguard/latest/source/docs/connecting.md) has every option and every variable.
    ///
    /// Errors as those of [`PgLockClient::connect`]; with
    /// [`auto_create_tables(false)`](Self::auto_create_tables) it does no I/O and fails only with
    /// `InvalidArgument`.
    ///
    /// ```no_run
    /// let client = syncguard::PgLockClient::builder()
    ///     .schema("locks")
    ///     .connect("postgresql://app@db.example/app?sslmode=verify-full&sslrootcert=/etc/ssl/db-ca.pem")?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn connect(self, url: &str) -> Result<PgLockClient> {
        let names = self.check()?;
        let settings = ConnectionSettings::of_url(url, &Environment::of_process())?;
        self.connect_by(names, &settings)
    }

    /// Builds a client for the database that libpq's environment variables name, as `psql` without
    /// arguments does: `PGHOST`, `PGPORT`, `PGDATABASE`, `PGUSER` and
    /// [the others](https://www.postgresql.org/docs/current/libpq-envars.html), with the same defaults.
    /// [`connect`](Self::connect) takes from the environment only a password and how to encrypt.
    /// [`docs/connecting.md`](https://docs.rs/crate/syncguard/latest/source/docs/connecting.md) lists them.
    ///
    /// Errors as those of [`PgLockClient::connect`]; variables that cannot be obeyed (`PGSERVICE`,
    /// `PGREQUIREAUTH`, `PGSSLCRL`) are `InvalidArgument`.
    ///
    /// ```no_run
    /// // PGHOST=db.example PGUSER=app PGDATABASE=app PGSSLMODE=verify-full PGSSLROOTCERT=system
    /// let client = syncguard::PgLockClient::builder().schema("locks").connect_env()?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn connect_env(self) -> Result<PgLockClient> {
        let names = self.check()?;
        let settings = ConnectionSettings::of_environment(&Environment::of_process())?;
        self.connect_by(names, &settings)
    }

    fn connect_by(self, names: TableNames, settings: &ConnectionSettings) -> Result<PgLockClient> {
        let connector = Connector::by_settings(settings, self.operation_timeout)?;
        self.finish(names, |builder| {
            Source::own(connector, builder.max_connections, builder.connection_timeout)
        })
    }

    /// Builds a client with a pool of its own from the driver's configuration and a TLS connector,
    /// such as those of `postgres-native-tls` and `postgres-openssl`, or [`NoTls`](crate::postgres::NoTls). The
    /// configuration's notice callback is replaced. Hosts are tried and errors are those of
    /// [`PgLockClient::connect`]; `sslmode` is about TCP, a Unix socket is never encrypted.
    ///
    /// ```no_run
    /// use syncguard::postgres::{Config, NoTls};
    ///
    /// let config: Config = "host=db.example user=app dbname=app".parse().unwrap();
    /// let client = syncguard::PgLockClient::builder().connect_with(config, NoTls)?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[expect(clippy::needless_pass_by_value, reason = "part of the public interface")]
    pub fn connect_with<T>(self, config: Config, tls: T) -> Result<PgLockClient>
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::TlsConnect: Send + 'static,
        T::Stream: Send + 'static,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        let names = self.check()?;
        let connector = Connector::new(&config, tls, self.operation_timeout)?;
        self.finish(names, |builder| {
            Source::own(connector, builder.max_connections, builder.connection_timeout)
        })
    }

    /// Builds a client on a caller's pool, for programs that already have one.
    ///
    /// One of the pool's connections is kept for renewals while guards are renewed, unless
    /// [`maintenance`](Self::maintenance) says how to open one: a pool of one connection is then
    /// `InvalidArgument`. The client cannot time out a driver's call on a connection that is not its
    /// own: the server's limits hold, and the pool's `connection_timeout`.
    ///
    /// Settings of the sessions (role, encoding, time zone, limits and so on) change no answer. Only
    /// notices do not reach the client, because they go to the opener of the connection: with
    /// [synchronous replication](https://www.postgresql.org/docs/current/warm-standby.html#SYNCHRONOUS-REPLICATION-HA)
    /// a commit whose wait for its standby was cancelled is reported as success.
    ///
    /// Set the pool's `test_on_check_out(false)`: the test costs a round trip each time, and stale
    /// connections are replaced anyway.
    ///
    /// ```no_run
    /// use syncguard::postgres::NoTls;
    /// use syncguard::{r2d2, r2d2_postgres::PostgresConnectionManager};
    ///
    /// let config = "host=db.example user=app dbname=app".parse().unwrap();
    /// let manager = PostgresConnectionManager::new(config, NoTls);
    /// let pool = r2d2::Pool::builder().test_on_check_out(false).build(manager).unwrap();
    /// let client = syncguard::PgLockClient::builder().build(pool)?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for invalid settings; those of [`PgLockClient::setup_schema`], unless
    /// [`auto_create_tables(false)`](Self::auto_create_tables) leaves that out; `RateLimited` when the
    /// pool has no connection free in time, `ServiceUnavailable` when it cannot open one.
    pub fn build<M>(self, pool: r2d2::Pool<M>) -> Result<PgLockClient>
    where
        M: ManageConnection<Connection = Client>,
    {
        let names = self.check()?;
        let maintenance = match &self.maintenance {
            None => None,
            Some(connector) => Some(connector(self.operation_timeout)?),
        };
        self.finish(names, |builder| Source::foreign(pool, maintenance, builder.connection_timeout))
    }

    /// Everything that can be wrong without a server.
    fn check(&self) -> Result<TableNames> {
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
        check_text("the owner", self.owner.as_deref())?;
        if self.max_connections == 0 {
            return Err(LockError::invalid("max_connections is 0: a client needs at least one"));
        }
        TableNames::new(
            self.schema.as_deref(),
            self.table_name.as_deref(),
            self.fence_table_name.as_deref(),
            self.members_table_name.as_deref(),
        )
    }

    fn finish(self, names: TableNames, source: impl FnOnce(&Self) -> Source) -> Result<PgLockClient> {
        let settings = Settings {
            store_key_debug: self.store_key_debug,
            cleanup_in_is_locked: self.cleanup_in_is_locked,
            wake_ups: self.wake_ups,
            auto_create: self.auto_create_tables,
            members_table: self.create_members_table,
            owner: self.owner.as_deref().is_some_and(|owner| !owner.is_empty()),
        };
        let database = Arc::new(Database::new(source(&self), self.operation_timeout));
        let leases = PostgresBackend::new(Arc::clone(&database), names, settings);
        if self.auto_create_tables {
            leases.set_up()?;
        }
        let inner: Arc<PostgresBackend> = Arc::clone(&leases);
        let (backend, telemetry): (Arc<dyn LockBackend>, _) = match self.telemetry {
            None => (inner, None),
            Some(options) => {
                let reported = with_telemetry(inner, options);
                let handle = reported.handle();
                (Arc::new(reported), Some(handle))
            }
        };
        let settings = ClientSettings {
            dispose_timeout: self.dispose_timeout,
            on_release_error: self.on_release_error,
            owner: self.owner.map(Arc::from),
        };
        let sessions = SessionLocks::new(database, self.operation_timeout, self.dispose_timeout);
        Ok(PgLockClient { sessions, locks: LockClient::with_settings(backend, settings), leases, telemetry })
    }
}

impl fmt::Debug for PgLockClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgLockClientBuilder")
            .field("schema", &self.schema)
            .field("table_name", &self.table_name)
            .field("fence_table_name", &self.fence_table_name)
            .field("members_table_name", &self.members_table_name)
            .field("auto_create_tables", &self.auto_create_tables)
            .field("max_connections", &self.max_connections)
            .field("connection_timeout", &self.connection_timeout)
            .field("operation_timeout", &self.operation_timeout)
            .field("wake_ups", &self.wake_ups)
            .field("dispose_timeout", &self.dispose_timeout)
            .finish_non_exhaustive()
    }
}
