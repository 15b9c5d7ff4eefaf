//! Opening connections, and asking the server to cancel what one of them is doing.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use postgres::config::{Host, SslMode, SslNegotiation};
use postgres::error::DbError;
use postgres::{Client, Config, NoTls};
use tokio_postgres::Socket;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};

use crate::cancel::{CancelToken, Subscription};
use crate::error::{LockError, Result};
use crate::postgres::error::{connect_error, in_runtime};
use crate::postgres::link::{Encryption, GuardedTls, Link};
use crate::postgres::statement::settled_options;

/// How long the driver may take to say goodbye on a connection that is in order.
const FAREWELL: Duration = Duration::from_millis(500);

/// How long a cancel request may take to reach the server.
const CANCEL_LIMIT: Duration = Duration::from_millis(400);

/// Keepalive probes start after this much silence, unless the connection string says otherwise.
/// The driver's default is two hours.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);

/// Opens connections to one place. Cheap to clone; the TLS connector's type is erased.
#[derive(Clone)]
pub(crate) struct Connector(Arc<dyn Open>);

impl Connector {
    /// Checks the settings without connecting. Sessions begin with this limit for waits and statements.
    pub(crate) fn new<T>(config: Config, tls: T, operation_timeout: Duration) -> Result<Self>
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::TlsConnect: Send + 'static,
        T::Stream: Send + 'static,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        Ok(Self(Arc::new(Place::new(config, tls, operation_timeout)?)))
    }

    /// A connection, within `limit`, unless the token fires: then the server's silence is not waited
    /// for (its TCP handshake is). What names resolve to is up to the system's resolver, whose time is
    /// not bounded by us.
    pub(crate) fn open(&self, limit: Duration, cancel: &CancelToken) -> Result<Wire> {
        let link = Link::new();
        link.limit(limit);
        let cut = link.clone();
        let watch = cancel.subscribe(move || cut.kill());
        let opened = guard_runtime(|| self.0.open(&link, limit))?;
        // A token that has fired may cut it yet.
        if !watch.is_none_or(Subscription::remove) || link.is_dead() {
            if let Ok(client) = opened {
                drop_client(client);
            }
            return Err(LockError::aborted());
        }
        let client = opened.map_err(connect_error)?;
        link.unlimited();
        Ok(Wire { client: Some(client), link })
    }

    /// Asks the server to cancel what `token`'s connection is doing. Best effort, bounded.
    pub(crate) fn cancel(&self, token: &postgres::CancelToken) {
        if let Err(error) = self.0.cancel(token) {
            log::debug!("the cancel request did not reach the server: {error}");
        }
    }
}

/// Parses a connection string; the error does not repeat it.
pub(crate) fn parse_url(url: &str) -> Result<Config> {
    let config = Config::from_str(url).map_err(|error| {
        // The driver's causes repeat parts of the string, and a password that was not escaped is cut
        // into such parts. The one that names only an option of its own is worth showing.
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        let hint = if cause.starts_with("invalid value for option") { format!(" ({cause})") } else { String::new() };
        LockError::invalid(format!(
            "the connection string cannot be read{hint}: use postgresql://user@host:port/database or key=value pairs"
        ))
    })?;
    if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
        return Err(LockError::invalid(
            "the connection string names no host: add host=… (a path for a Unix socket)",
        ));
    }
    Ok(config)
}

/// A connection of ours and the handle of its socket. Never dropped in a place where the driver
/// would panic: inside an async runtime a thread of its own takes it.
pub(crate) struct Wire {
    client: Option<Client>,
    pub(crate) link: Link,
}

impl Wire {
    pub(crate) fn client(&mut self) -> Option<&mut Client> {
        self.client.as_mut()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.link.is_dead() || self.client.as_ref().is_none_or(Client::is_closed)
    }

    /// Forgets the connection without a word to the server: after a fork it is the parent's.
    pub(crate) fn abandon(mut self) {
        std::mem::forget(self.client.take());
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        let Some(client) = self.client.take() else { return };
        self.link.limit(FAREWELL);
        drop_client(client);
    }
}

/// Drops a driver's client where that is legal.
pub(crate) fn drop_client<C: Send + 'static>(client: C) {
    if !in_runtime() {
        drop(client);
        return;
    }
    // Also true on Tokio's blocking threads, where a drop would be legal: the detour only costs a thread.
    let handed = Arc::new(std::sync::Mutex::new(Some(client)));
    let inside = Arc::clone(&handed);
    let thread = std::thread::Builder::new().name("syncguard-close".into()).spawn(move || {
        drop(inside.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take());
    });
    if thread.is_err() {
        // No thread: leak the socket rather than panic in somebody's destructor.
        std::mem::forget(handed);
    }
}

/// Runs a call into the driver; its panic inside an async runtime becomes an error.
///
/// The driver blocks on a runtime of its own and panics where another one is running on the thread.
/// Whether that is so cannot be asked beforehand: on `spawn_blocking` threads it is legal.
pub(crate) fn guard_runtime<R>(call: impl FnOnce() -> R) -> Result<R> {
    if !in_runtime() {
        return Ok(call());
    }
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).map_err(|_| blocked_in_runtime())
}

/// Finds out beforehand, for a call that must not begin where the driver would panic: a pool's test
/// of a connection drops the connection while that panic unwinds, whose `Drop` then panics as well,
/// and the process aborts. Waiting for nothing panics where the driver would, and holds nothing.
pub(crate) fn check_runtime() -> Result<()> {
    let Ok(handle) = tokio::runtime::Handle::try_current() else { return Ok(()) };
    // Asserted: a handle of tokio 1.27 is not known to be unwind safe, and is not used after a panic.
    let call = std::panic::AssertUnwindSafe(|| handle.block_on(async {}));
    std::panic::catch_unwind(call).map_err(|_| blocked_in_runtime())
}

fn blocked_in_runtime() -> LockError {
    LockError::invalid(
        "a blocking call inside an async runtime: move it to tokio::task::spawn_blocking or to a thread",
    )
}

trait Open: Send + Sync {
    fn open(&self, link: &Link, limit: Duration) -> Result<Client, postgres::Error>;
    fn cancel(&self, token: &postgres::CancelToken) -> Result<(), postgres::Error>;
}

struct Place<T> {
    config: Config,
    tls: T,
    /// `None` for Unix sockets, which the driver never hands to a TLS connector.
    encryption: Option<Encryption>,
    /// The settings that sessions begin with, for the startup message.
    options: String,
    /// There is a pooler in front of the server that refuses such settings.
    bare: AtomicBool,
}

impl<T: Clone + 'static> Place<T> {
    fn new(mut config: Config, tls: T, operation_timeout: Duration) -> Result<Self> {
        let limit = u64::try_from(operation_timeout.as_millis()).unwrap_or(u64::MAX).clamp(1, 2_000_000_000);
        let theirs = config.get_options().map(|options| format!("{options} ")).unwrap_or_default();
        let options = format!("{theirs}{}", settled_options(limit));
        if config.get_application_name().is_none() {
            config.application_name("syncguard");
        }
        if config.get_keepalives_idle() == Duration::from_secs(2 * 60 * 60) {
            config.keepalives_idle(KEEPALIVE_IDLE);
        }
        if config.get_tcp_user_timeout().is_none() {
            config.tcp_user_timeout(KEEPALIVE_IDLE);
        }
        let unix = config.get_hosts().iter().any(|host| !matches!(host, Host::Tcp(_)));
        let encryption = if unix { None } else { Some(encryption_of::<T>(&config)?) };
        if encryption.is_some() {
            if config.get_hosts().is_empty() {
                for address in config.get_hostaddrs().to_vec() {
                    config.host(&address.to_string());
                }
            }
            // The driver hands its socket to the "TLS connector" at once; the rest is GuardedTls's.
            config.ssl_mode(SslMode::Require).ssl_negotiation(SslNegotiation::Direct);
        }
        Ok(Self { config, tls, encryption, options, bare: AtomicBool::new(false) })
    }
}

fn encryption_of<T: 'static>(config: &Config) -> Result<Encryption> {
    let no_tls = GuardedTls::<T>::is_no_tls();
    match config.get_ssl_mode() {
        SslMode::Disable => Ok(Encryption::Never),
        SslMode::Prefer if no_tls => Ok(Encryption::Never),
        _ if no_tls => Err(LockError::invalid(
            "sslmode asks for TLS, but no TLS connector was given: use the builder's connect_with(config, tls)",
        )),
        _ if config.get_ssl_negotiation() == SslNegotiation::Direct => Ok(Encryption::Direct),
        SslMode::Prefer => Ok(Encryption::IfOffered),
        _ => Ok(Encryption::Required),
    }
}

impl<T> Place<T>
where
    T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
    T::TlsConnect: Send + 'static,
    T::Stream: Send + 'static,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    fn connect(&self, link: &Link, limit: Duration, bare: bool) -> Result<Client, postgres::Error> {
        let mut config = self.config.clone();
        if !bare {
            config.options(&self.options);
        }
        let limit = config.get_connect_timeout().map_or(limit, |theirs| limit.min(*theirs));
        config.connect_timeout(limit);
        let heard = link.clone();
        config.notice_callback(move |notice| on_notice(&heard, &notice));
        match self.encryption {
            None => config.connect(NoTls),
            Some(encryption) => config.connect(GuardedTls::new(self.tls.clone(), encryption, link.clone())),
        }
    }
}

impl<T> Open for Place<T>
where
    T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
    T::TlsConnect: Send + 'static,
    T::Stream: Send + 'static,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    fn open(&self, link: &Link, limit: Duration) -> Result<Client, postgres::Error> {
        let bare = self.bare.load(Ordering::Relaxed);
        match self.connect(link, limit, bare) {
            Err(error) if !bare && may_refuse_options(&error) => {
                let connected = self.connect(link, limit, true)?;
                self.bare.store(true, Ordering::Relaxed);
                Ok(connected)
            }
            connected => connected,
        }
    }

    fn cancel(&self, token: &postgres::CancelToken) -> Result<(), postgres::Error> {
        match self.encryption {
            None => token.cancel_query(NoTls),
            Some(encryption) => {
                let link = Link::new();
                link.limit(CANCEL_LIMIT);
                token.cancel_query(GuardedTls::new(self.tls.clone(), encryption, link))
            }
        }
    }
}

/// Whether it may be the settings in the startup message that were refused. PostgreSQL takes them;
/// poolers and proxies refuse them with any SQLSTATE (08P01 and 0A000 have been seen). What is for
/// certain something else, or would count twice (a wrong password), is not tried again.
fn may_refuse_options(error: &postgres::Error) -> bool {
    let Some(state) = error.code() else { return false };
    let class = state.code().get(..2).unwrap_or_default();
    !matches!(class, "53" | "57") && !matches!(state.code(), "28P01" | "3D000")
}

/// Hears what the server says beside its answers. The one notice that matters: a commit is durable
/// here but perhaps not on the standby it should have waited for
/// (<https://www.postgresql.org/docs/current/warm-standby.html#SYNCHRONOUS-REPLICATION-HA>). It
/// comes with a *successful* answer, and its text depends on the server's language.
fn on_notice(link: &Link, notice: &DbError) {
    let from_sync_rep = notice.routine().is_some_and(|routine| routine.starts_with("SyncRep"));
    if from_sync_rep {
        link.set_unreplicated();
    }
    log::debug!("notice {} from the server", notice.code().code());
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connector(..)")
    }
}

/// Time left until `end`.
pub(crate) fn rest(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
}
