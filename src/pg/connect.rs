//! Opening connections, and asking the server to cancel what one of them is doing.
//!
//! Every connection of ours is opened here: for the pool, for renewals, for the thread that listens.
//!
//! 1. Candidates are tried one after the other, each with at most half of the time that is left, the
//!    last one with all of it: a silent one never takes the time of those behind it.
//! 2. TLS and deadlines are decided for each candidate: over TCP both, on a Unix socket neither.
//!    While one that says nothing is waited for, those that have answered meanwhile that they are no primary
//!    are asked again: one of them is promoted when the silent one is given up.
//! 3. A call returns at its end or at its token, whatever a name server, a TCP handshake or a server
//!    does: all of that runs on another thread, which is left behind then.

use std::cell::Cell;
use std::fmt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use postgres::config::{SslMode, SslNegotiation};
use postgres::{Client, Config, NoTls};
use tokio_postgres::Socket;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};

use crate::cancel::{CancelToken, Subscription};
use crate::error::{ErrorCode, LockError, Result};
use crate::model::time::deadline_after;
use crate::pg::addresses::{Addresses, Candidate, ListedHost, Target};
use crate::pg::connection_string::Settings as ConnectionSettings;
use crate::pg::endpoint::{Endpoint, OfUrl, Open, Preference};
use crate::pg::error::{NoCandidate, is_answer, may_become_primary};
use crate::pg::resolve::Resolver;
use crate::pg::resources;
use crate::pg::stream::StreamControl;
use crate::sync::{Mutex, MutexGuard};
use crate::threads::{catch_panic, drop_where_allowed, in_runtime, spawn, thread_locals_gone};
use crate::tls::{self, Mode, UrlTls};

/// How long the driver may take to say goodbye on a connection that is in order.
const FAREWELL: Duration = Duration::from_millis(500);

/// How much later than the driver's own limits an attempt is left behind.
const GRACE: Duration = Duration::from_millis(50);

/// How often those that answered are asked again while a silent one is waited for.
const ASK_OTHERS: Duration = Duration::from_millis(100);

/// The most attempts that may be left behind at a time: on a Unix socket nothing ends one as long as
/// the server stands still.
const MAX_LEFT_BEHIND: usize = 32;

/// Opens connections to one database, wherever of its hosts it is. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Connector(Arc<Inner>);

struct Inner {
    addresses: Addresses,
    resolver: Resolver,
    /// The driver; the TLS connector's type is erased.
    driver: Arc<dyn Open>,
    left_behind: Mutex<Vec<Weak<()>>>,
}

impl Connector {
    /// Checks the settings without connecting. Sessions begin with this limit for waits and statements.
    pub(crate) fn new<T>(config: &Config, tls: T, operation_timeout: Duration) -> Result<Self>
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::TlsConnect: Send + 'static,
        T::Stream: Send + 'static,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        let addresses = Addresses::new(config)?;
        let driver = Endpoint::new(config, tls, &addresses, operation_timeout)?;
        Ok(Self::over(addresses, driver))
    }

    /// The same for what a connection string says: the TLS is ours.
    pub(crate) fn by_settings(settings: &ConnectionSettings, operation_timeout: Duration) -> Result<Self> {
        let mut config = settings.config.clone();
        let addresses = Addresses::new(&config)?;
        let tcp = addresses.any(|target| !matches!(target, Target::Socket(_)));
        let mode = if tcp { settings.tls.mode } else { Mode::Disable };
        config.ssl_mode(match mode {
            Mode::Disable => SslMode::Disable,
            Mode::Prefer => SslMode::Prefer,
            Mode::Require | Mode::VerifyCa | Mode::VerifyFull => SslMode::Require,
        });
        config.ssl_negotiation(if settings.tls.direct {
            SslNegotiation::Direct
        } else {
            SslNegotiation::Postgres
        });
        let of_url = OfUrl { passfile: settings.passfile.clone(), preference: Preference::new(mode) };
        if mode != Mode::Disable {
            tls::check_compiled(&settings.tls)?;
        }
        if mode == Mode::Disable || !tls::COMPILED {
            let driver = Endpoint::new(&config, NoTls, &addresses, operation_timeout)?;
            return Ok(Self::over(addresses, driver.with_url(of_url)));
        }
        let tls = UrlTls::<tls::Library>::new(settings.tls.clone())?;
        let driver = Endpoint::new(&config, tls, &addresses, operation_timeout)?;
        Ok(Self::over(addresses, driver.with_url(of_url)))
    }

    fn over(addresses: Addresses, driver: impl Open + 'static) -> Self {
        let (driver, left_behind) = (Arc::new(driver), Mutex::default());
        Self(Arc::new(Inner { addresses, resolver: Resolver::system(), driver, left_behind }))
    }

    /// A connection, within `limit`, unless the token fires.
    pub(crate) fn open(&self, limit: Duration, cancel: &CancelToken) -> Result<OpenedConnection> {
        // First: inside an async runtime not even what the look below builds may be dropped.
        check_runtime()?;
        resources::check()?;
        let end = deadline_after(limit);
        let mut none = NoCandidate::default();
        // Who may be the primary in a moment.
        let mut waiting = Vec::new();
        let mut hosts = self.0.addresses.hosts().into_iter().peekable();
        while let Some(host) = hosts.next() {
            let last = hosts.peek().is_none();
            let candidates = match self.candidates(&host, share(end, last), cancel) {
                Ok(candidates) => candidates,
                Err(error) => {
                    cancel.check()?;
                    resources::check()?;
                    self.0.addresses.failed_as_a_whole(&host, true);
                    none.add(error);
                    continue;
                }
            };
            let mut candidates = candidates.into_iter().peekable();
            let mut any_silent = false;
            while let Some(candidate) = candidates.next() {
                let last = last && candidates.peek().is_none();
                let began = Instant::now();
                match self.attempt(&candidate, share(end, last), cancel, &waiting) {
                    Ok(connection) => return Ok(connection),
                    Err(error) => {
                        cancel.check()?;
                        resources::check()?;
                        let silent = is_silence(&error, began);
                        any_silent |= silent;
                        self.0.addresses.failed_at(&candidate, silent);
                        if !silent && may_become_primary(&error) {
                            waiting.push(candidate);
                        }
                        none.add(error);
                    }
                }
            }
            self.0.addresses.failed_as_a_whole(&host, any_silent);
        }
        Err(none.into_error())
    }

    /// The candidates of one host, in the order in which to try them.
    fn candidates(&self, host: &ListedHost, limit: Duration, cancel: &CancelToken) -> Result<Vec<Candidate>> {
        let Target::Name(name) = &host.target else { return Ok(host.at(None).into_iter().collect()) };
        let found = self.0.resolver.resolve(name, limit, cancel)?;
        Ok(self.0.addresses.in_turn(found.into_iter().filter_map(|ip| host.at(Some(ip))).collect()))
    }

    /// One attempt at one candidate; these others are asked again while it has not answered.
    fn attempt(
        &self,
        candidate: &Candidate,
        limit: Duration,
        cancel: &CancelToken,
        others: &[Candidate],
    ) -> Result<OpenedConnection> {
        let attempt = self.begin(candidate, limit, cancel)?;
        let end = deadline_after(limit + GRACE);
        let mut others: Vec<_> = others.iter().collect();
        loop {
            let pause = if others.is_empty() { rest(end) } else { rest(end).min(ASK_OTHERS) };
            match attempt.wait(pause) {
                Some(Ok(connection)) => {
                    self.0.addresses.succeeded(candidate);
                    return Ok(connection);
                }
                Some(Err(error)) => return Err(error),
                None if rest(end).is_zero() => {
                    self.leave_behind(&attempt);
                    return Err(unanswered());
                }
                None => {}
            }
            let mut found = None;
            others.retain(|other| {
                if found.is_some() {
                    return true;
                }
                let began = Instant::now();
                match self.attempt(other, share(end, false), cancel, &[]) {
                    Ok(connection) => found = Some(Ok(connection)),
                    Err(error) if cancel.is_cancelled() => found = Some(Err(error)),
                    // Silence takes time: one silent host at a time is enough.
                    Err(error) => return !is_silence(&error, began),
                }
                true
            });
            if let Some(found) = found {
                // Another one was promoted, so whoever has said nothing until now is not the first to be asked again.
                self.0.addresses.passed_over(candidate);
                self.leave_behind(&attempt);
                return found;
            }
        }
    }

    /// Begins an attempt.
    ///
    /// The driver connects on a thread of its own, because nothing of it can be ended from outside
    /// before it has a TCP connection, and on a Unix socket nothing at all.
    fn begin(&self, candidate: &Candidate, limit: Duration, cancel: &CancelToken) -> Result<Attempt> {
        if limit.is_zero() {
            return Err(unanswered());
        }
        let control = StreamControl::new();
        control.limit(limit);
        let alive = Arc::new(());
        let (done, outcome) = channel();
        let cut = {
            let (control, done) = (control.clone(), done.clone());
            move || {
                control.kill();
                let _ = done.send(None);
            }
        };
        let job = {
            let (driver, candidate, control) =
                (Arc::clone(&self.0.driver), candidate.clone(), control.clone());
            let alive = Arc::clone(&alive);
            move || {
                let opened =
                    guard_runtime(|| driver.open(&candidate, &control, limit)).and_then(|opened| opened);
                // If nobody waits any more, the connection is dropped here.
                let _ = done.send(Some(opened));
                drop(alive);
            }
        };
        self.check_left_behind()?;
        let watch = Cell::new(cancel.subscribe(cut));
        spawn("syncguard-connect", job).map_err(no_thread)?;
        Ok(Attempt { control, alive: Arc::downgrade(&alive), outcome, watch })
    }

    /// Nobody waits for it any more.
    fn leave_behind(&self, attempt: &Attempt) {
        attempt.control.kill();
        self.left_behind().push(Weak::clone(&attempt.alive));
    }

    /// Refuses to leave ever more threads behind at a server that stands still.
    fn check_left_behind(&self) -> Result<()> {
        let mut left_behind = self.left_behind();
        left_behind.retain(|attempt| attempt.strong_count() > 0);
        if left_behind.len() < MAX_LEFT_BEHIND {
            return Ok(());
        }
        Err(LockError::new(ErrorCode::ServiceUnavailable).with_message(
            "earlier attempts to connect have had no answer yet: the server takes connections and says nothing, check that it runs",
        ))
    }

    fn left_behind(&self) -> MutexGuard<'_, Vec<Weak<()>>> {
        self.0.left_behind.lock()
    }

    /// Asks the server to cancel what `token`'s connection is doing, whose socket `control` is if it is
    /// one of ours. Best effort.
    pub(crate) fn cancel(&self, token: &postgres::CancelToken, control: Option<&StreamControl>) {
        let ask = || guard_runtime(|| self.0.driver.cancel(token, control.map(StreamControl::guards)));
        match resources::check().and_then(|()| ask()) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => log::debug!("the cancel request did not reach the server: {error}"),
            Err(error) => log::debug!("the cancel request was not sent: {}", error.chain()),
        }
    }
}

/// An attempt under way.
struct Attempt {
    control: StreamControl,
    /// As long as its thread runs.
    alive: Weak<()>,
    /// `None`: the token has fired.
    outcome: Receiver<Option<Result<Client>>>,
    watch: Cell<Option<Subscription>>,
}

impl Attempt {
    /// What came of it, if that is known within this time.
    fn wait(&self, time: Duration) -> Option<Result<OpenedConnection>> {
        let opened = match self.outcome.recv_timeout(time) {
            Ok(Some(opened)) => opened,
            Ok(None) => Err(LockError::aborted()),
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => Err(panicked()),
        };
        // A token that has fired may cut the connection yet.
        let fired = !self.watch.take().is_none_or(Subscription::remove) || self.control.is_dead();
        let client = match opened {
            Ok(client) => client,
            Err(error) => return Some(Err(error)),
        };
        if fired {
            drop_where_allowed(client);
            return Some(Err(LockError::aborted()));
        }
        self.control.unlimited();
        Some(Ok(OpenedConnection { client: Some(client), control: self.control.clone() }))
    }
}

/// Whether a candidate has said nothing: no server answered, and to find that out took time. (A host that is gone is
/// unreachable only after seconds, when nobody at its address has answered.)
fn is_silence(error: &LockError, began: Instant) -> bool {
    !is_answer(error) && (error.code() == ErrorCode::NetworkTimeout || began.elapsed() > ASK_OTHERS)
}

/// What one candidate may take of the time that is left.
fn share(end: Instant, last: bool) -> Duration {
    if last { rest(end) } else { rest(end) / 2 }
}

fn unanswered() -> LockError {
    LockError::new(ErrorCode::NetworkTimeout).with_message(
        "no answer came from the server in time: check the network, or raise connection_timeout, operation_timeout or the wait's own timeout",
    )
}

fn no_thread(cause: std::io::Error) -> LockError {
    LockError::new(ErrorCode::ServiceUnavailable)
        .with_message("no thread can be started to connect: raise the limit of threads, or start fewer")
        .with_source(cause)
}

/// A connection of ours and the handle of its socket. Never dropped in a place where the driver
/// would panic: inside an async runtime a thread of its own takes it.
pub(crate) struct OpenedConnection {
    client: Option<Client>,
    pub(crate) control: StreamControl,
}

impl OpenedConnection {
    pub(crate) fn client(&mut self) -> Option<&mut Client> {
        self.client.as_mut()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.control.is_dead() || self.client.as_ref().is_none_or(Client::is_closed)
    }

    /// Forgets the connection without a word to the server: after a fork it is the parent's.
    pub(crate) fn abandon(mut self) {
        std::mem::forget(self.client.take());
    }
}

impl Drop for OpenedConnection {
    fn drop(&mut self) {
        let Some(client) = self.client.take() else { return };
        self.control.limit(FAREWELL);
        drop_where_allowed(client);
    }
}

/// Runs a call into the driver; its panic becomes an error.
///
/// Whether it will panic inside an async runtime cannot be asked beforehand: on `spawn_blocking`
/// threads it is legal.
pub(crate) fn guard_runtime<R>(call: impl FnOnce() -> R) -> Result<R> {
    check_locals()?;
    catch_panic(call).ok_or_else(|| {
        if in_runtime() {
            return blocked_in_runtime();
        }
        panicked()
    })
}

fn panicked() -> LockError {
    LockError::new(ErrorCode::Internal)
        .with_message("the database driver panicked: its message is where the program's panics go")
}

/// Finds out beforehand, for a call that must not begin where the driver would panic: a pool's test
/// of a connection drops the connection while that panic unwinds, whose `Drop` then panics as well,
/// and the process aborts. Waiting for nothing panics where the driver would, and holds nothing.
pub(crate) fn check_runtime() -> Result<()> {
    check_locals()?;
    let Ok(handle) = tokio::runtime::Handle::try_current() else { return Ok(()) };
    catch_panic(|| handle.block_on(async {})).ok_or_else(blocked_in_runtime)
}

/// Where thread-locals are gone a panic of the driver's would abort the process.
fn check_locals() -> Result<()> {
    if !thread_locals_gone() {
        return Ok(());
    }
    Err(LockError::invalid(
        "a blocking call where the thread's thread-locals are gone (a destructor at its end, or atexit): make it earlier, or on another thread",
    ))
}

fn blocked_in_runtime() -> LockError {
    LockError::invalid(
        "a blocking call inside an async runtime: move it to tokio::task::spawn_blocking or to a thread",
    )
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
