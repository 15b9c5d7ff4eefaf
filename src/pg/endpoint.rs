//! One database's settings as the driver wants them: what every connection begins with, how it is
//! encrypted, and the one place where the driver is called to connect.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postgres::config::{ChannelBinding, SslMode, SslNegotiation};
use postgres::error::DbError;
use postgres::{Client, Config, NoTls};
use tokio_postgres::Socket;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};

use crate::error::{LockError, Result};
use crate::pg::addresses::{Addresses, Candidate, Target, prefer_primary, without_hosts};
use crate::pg::error::connect_error;
use crate::pg::passfile::Passfile;
use crate::pg::statement::startup_options;
use crate::pg::stream::{DeadlineTls, Encryption, StreamControl};
use crate::sync::Mutex;
use crate::tls::{self, Mode};

/// How long a cancel request may take to reach the server.
const CANCEL_LIMIT: Duration = Duration::from_millis(400);

/// Keepalive probes start after this much silence, unless the connection string says otherwise.
/// The driver's default is two hours.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);

/// The one place where the driver is called to connect.
pub(super) trait Open: Send + Sync {
    fn open(&self, candidate: &Candidate, control: &StreamControl, limit: Duration) -> Result<Client>;
    /// `tcp`: whether a connection of ours goes over TCP; `None` for one of a caller's.
    fn cancel(&self, token: &postgres::CancelToken, tcp: Option<bool>) -> Result<(), postgres::Error>;
}

pub(super) struct Endpoint<T> {
    /// All settings but the hosts.
    config: Config,
    tls: T,
    /// How TCP is encrypted; the driver never hands a Unix socket to a TLS connector.
    encryption: Encryption,
    /// The settings that sessions begin with, for the startup message.
    options: String,
    /// There is a pooler in front of the server that refuses such settings.
    bare: AtomicBool,
    of_url: OfUrl,
}

/// What only a connection string says; a caller's own configuration means what it says.
#[derive(Default)]
pub(super) struct OfUrl {
    pub(super) passfile: Option<Passfile>,
    pub(super) preference: Preference,
}

/// What `sslmode=prefer` has become: somebody may want to know, and nobody else would tell.
#[derive(Default)]
pub(super) struct Preference {
    tell: bool,
    /// As it was told last.
    encrypted: Mutex<Option<bool>>,
}

impl Preference {
    pub(super) fn new(mode: Mode) -> Self {
        Self { tell: mode == Mode::Prefer, encrypted: Mutex::default() }
    }

    fn became(&self, encrypted: bool) {
        if !self.tell || self.encrypted.lock().replace(encrypted) == Some(encrypted) {
            return;
        }
        let became = match (encrypted, tls::COMPILED) {
            (true, _) => "encrypted; sslmode=verify-full would check with whom",
            (false, true) => "not encrypted, for the server offers no TLS",
            (false, false) => "not encrypted, for this program was built without TLS",
        };
        log::info!("sslmode=prefer: connections are {became}");
    }
}

impl<T: Clone + 'static> Endpoint<T> {
    pub(super) fn new(
        theirs: &Config,
        tls: T,
        addresses: &Addresses,
        operation_timeout: Duration,
    ) -> Result<Self> {
        let mut config = without_hosts(theirs);
        prefer_primary(&mut config, addresses.len());
        let limit = u64::try_from(operation_timeout.as_millis()).unwrap_or(u64::MAX).clamp(1, 2_000_000_000);
        let theirs = config.get_options().map(|options| format!("{options} ")).unwrap_or_default();
        let options = format!("{theirs}{}", startup_options(limit));
        if config.get_application_name().is_none() {
            config.application_name("syncguard");
        }
        if config.get_keepalives_idle() == Duration::from_secs(2 * 60 * 60) {
            config.keepalives_idle(KEEPALIVE_IDLE);
        }
        if config.get_tcp_user_timeout().is_none() {
            config.tcp_user_timeout(KEEPALIVE_IDLE);
        }
        let sockets = addresses.any(|target| matches!(target, Target::Socket(_)));
        let tcp = addresses.any(|target| !matches!(target, Target::Socket(_)));
        let encryption = if tcp { encryption_of::<T>(&config)? } else { Encryption::Never };
        let unencrypted = sockets || encryption == Encryption::Never;
        if unencrypted && config.get_channel_binding() == ChannelBinding::Require {
            return Err(LockError::invalid(
                "channel_binding=require needs TLS, and a Unix socket or a connection without TLS is asked for: give TCP hosts and sslmode=require or stricter (a TLS connector, with connect_with), or leave channel_binding out",
            ));
        }
        Ok(Self { config, tls, encryption, options, bare: AtomicBool::new(false), of_url: OfUrl::default() })
    }

    /// The same with what a connection string says beside the configuration.
    pub(super) fn with_url(self, of_url: OfUrl) -> Self {
        Self { of_url, ..self }
    }
}

fn encryption_of<T: 'static>(config: &Config) -> Result<Encryption> {
    let no_tls = DeadlineTls::<T>::is_no_tls();
    match config.get_ssl_mode() {
        SslMode::Disable => Ok(Encryption::Never),
        SslMode::Prefer if no_tls => Ok(Encryption::Never),
        _ if no_tls => Err(LockError::invalid(
            "sslmode asks for TLS, but the connector is NoTls: hand another to the builder's connect_with(config, tls), or give a connection string to connect with the feature `rustls`",
        )),
        _ if config.get_ssl_negotiation() == SslNegotiation::Direct => Ok(Encryption::Direct),
        SslMode::Prefer => Ok(Encryption::IfOffered),
        _ => Ok(Encryption::Required),
    }
}

impl<T> Endpoint<T>
where
    T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
    T::TlsConnect: Send + 'static,
    T::Stream: Send + 'static,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    fn connect(
        &self,
        candidate: &Candidate,
        control: &StreamControl,
        limit: Duration,
        bare: bool,
    ) -> Result<Client, postgres::Error> {
        let mut config = self.config.clone();
        candidate.add_to(&mut config);
        if !bare {
            config.options(&self.options);
        }
        if let Some(passfile) = &self.of_url.passfile
            && let Some(password) = passfile.password(&candidate.names(), candidate.port())
        {
            config.password(password);
        }
        let limit = config.get_connect_timeout().map_or(limit, |theirs| limit.min(*theirs));
        config.connect_timeout(limit);
        let heard = control.clone();
        config.notice_callback(move |notice| on_notice(&heard, &notice));
        if candidate.is_tcp() {
            // The driver hands its socket to the "TLS connector" at once; the rest is DeadlineTls's.
            config.ssl_mode(SslMode::Require).ssl_negotiation(SslNegotiation::Direct);
            config.connect(DeadlineTls::new(self.tls.clone(), self.encryption, control.clone()))
        } else {
            config.ssl_mode(SslMode::Disable).connect(NoTls)
        }
    }
}

impl<T> Open for Endpoint<T>
where
    T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
    T::TlsConnect: Send + 'static,
    T::Stream: Send + 'static,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    fn open(&self, candidate: &Candidate, control: &StreamControl, limit: Duration) -> Result<Client> {
        let bare = self.bare.load(Ordering::Relaxed);
        match self.connect(candidate, control, limit, bare) {
            Err(error) if !bare && may_refuse_options(&error) => {
                let connected = self.connect(candidate, control, limit, true);
                self.bare.fetch_or(connected.is_ok(), Ordering::Relaxed);
                connected
            }
            connected => connected,
        }
        .inspect(|_| {
            if candidate.is_tcp() {
                self.of_url.preference.became(control.is_encrypted());
            }
        })
        .map_err(connect_error)
    }

    fn cancel(&self, token: &postgres::CancelToken, tcp: Option<bool>) -> Result<(), postgres::Error> {
        match tcp {
            None => token.cancel_query(self.tls.clone()),
            Some(false) => token.cancel_query(NoTls),
            Some(true) => {
                let control = StreamControl::new();
                control.limit(CANCEL_LIMIT);
                token.cancel_query(DeadlineTls::new(self.tls.clone(), self.encryption, control))
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
fn on_notice(control: &StreamControl, notice: &DbError) {
    let from_sync_rep = notice.routine().is_some_and(|routine| routine.starts_with("SyncRep"));
    if from_sync_rep {
        control.set_unreplicated();
    }
    log::debug!("notice {} from the server", notice.code().code());
}
