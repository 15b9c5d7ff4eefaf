//! Where connections come from: a pool for operations, ours or a caller's, and one connection kept
//! apart for renewals.

use std::sync::Arc;
use std::time::{Duration, Instant};

use postgres::Client;
use postgres::fallible_iterator::FallibleIterator;
use r2d2::ManageConnection;

use crate::backend::Connections;
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::model::time::deadline_after;
use crate::pg::callers::CallersPool;
use crate::pg::connect::{Connector, guard_runtime, rest};
use crate::pg::pool::{self, Canceller, Lent, Pool};
use crate::pg::slots::{OwnPool, Shared};
use crate::pg::statement::SessionState;
use crate::pg::stream::StreamControl;
use crate::sync::Mutex;

/// How long a caller's pool may take to spare a second connection.
const SPARE: Duration = Duration::from_secs(1);

/// How long [`Connection::is_open`] listens: the driver looks at the socket only while it waits.
const LISTEN: Duration = Duration::from_millis(1);

/// Lends connections for operations, and keeps one apart for renewals.
pub(crate) struct Source {
    operations: Box<dyn Pool>,
    renewals: Renewals,
    /// How to open a connection of our own, where that is known.
    connector: Option<Connector>,
    is_own: bool,
    process: u32,
}

enum Renewals {
    /// A pool of one of ours, not counted among the others.
    Own(OwnPool),
    /// One of the caller's connections, kept while guards are renewed.
    Kept(Mutex<Option<Connection>>),
}

impl Source {
    /// Our own pool of `max` connections, and one more for renewals.
    pub(crate) fn own(connector: Connector, max: u32, connection_timeout: Duration) -> Self {
        let shared = Arc::<Shared>::default();
        let pool = |max| OwnPool::new(connector.clone(), max, connection_timeout, Arc::clone(&shared));
        Self {
            renewals: Renewals::Own(pool(1)),
            operations: Box::new(pool(max)),
            connector: Some(connector),
            is_own: true,
            process: std::process::id(),
        }
    }

    /// A caller's pool, and, where the caller says how to open it, a connection of ours for renewals.
    pub(crate) fn foreign<M>(
        pool: r2d2::Pool<M>,
        renewals: Option<Connector>,
        connection_timeout: Duration,
    ) -> Self
    where
        M: ManageConnection<Connection = Client>,
    {
        Self {
            renewals: match renewals.clone() {
                Some(connector) => {
                    Renewals::Own(OwnPool::new(connector, 1, connection_timeout, Arc::default()))
                }
                None => Renewals::Kept(Mutex::new(None)),
            },
            operations: Box::new(CallersPool::new(pool, renewals.clone())),
            connector: renewals,
            is_own: false,
            process: std::process::id(),
        }
    }

    /// A connection for an operation.
    pub(crate) fn get(&self, end: Instant, cancel: &CancelToken) -> Result<Connection> {
        pool::get(&*self.operations, end, cancel).map(Connection)
    }

    /// A connection beside the one that the caller has, for a moment: of our own where we know how to
    /// open one, else of the caller's pool, and `None` if that has none to spare soon.
    pub(crate) fn second(&self, end: Instant) -> Result<Option<Connection>> {
        let never = CancelToken::never();
        if let Some(connector) = self.connector() {
            return Connection::alone(connector.clone(), rest(end), &never).map(Some);
        }
        let found = self.get(end.min(deadline_after(SPARE)), &never);
        Ok(found.inspect_err(|error| log::debug!("no second connection: {}", error.chain())).ok())
    }

    /// The connection for renewals; hand it back with [`Source::keep`].
    pub(crate) fn get_for_renewals(&self, end: Instant) -> Result<Connection> {
        let never = CancelToken::never();
        match &self.renewals {
            Renewals::Own(pool) => pool::get(pool, end, &never).map(Connection),
            Renewals::Kept(kept) => {
                let mut connection = kept.lock().take();
                let open = |kept: &mut Connection| kept.client().is_ok_and(|client| !client.is_closed());
                match connection.take_if(open) {
                    Some(connection) => Ok(connection),
                    None => self.get(end, &never),
                }
            }
        }
    }

    /// Takes the renewals' connection back.
    pub(crate) fn keep(&self, connection: Connection) {
        match &self.renewals {
            Renewals::Own(_) => connection.give_back(),
            Renewals::Kept(kept) => {
                let surplus = {
                    let mut kept = kept.lock();
                    if kept.is_none() { kept.replace(connection) } else { Some(connection) }
                };
                if let Some(surplus) = surplus {
                    surplus.give_back();
                }
            }
        }
    }

    /// Whether renewals can have a connection that operations cannot take away.
    pub(crate) fn can_reserve(&self) -> Result<bool> {
        match &self.renewals {
            Renewals::Kept(_) if self.operations.max_size() < 2 => Err(LockError::invalid(
                "renewals need a connection of their own: give the pool a max_size of at least 2, or call the builder's maintenance()",
            )),
            Renewals::Kept(kept) => Ok(kept.lock().is_none()),
            Renewals::Own(_) => Ok(false),
        }
    }

    /// Gives a caller's connection back that was kept for renewals. Whether there could be one.
    pub(crate) fn unreserve(&self) -> bool {
        let Renewals::Kept(kept) = &self.renewals else { return false };
        let connection = kept.lock().take();
        if let Some(connection) = connection {
            connection.give_back();
        }
        true
    }

    /// An idle connection of ours on which a session lock's timer still runs.
    pub(crate) fn take_timed(&self) -> Option<Connection> {
        self.operations.take_timed().map(Connection)
    }

    /// How many connections of operations are lent just now, and the most that may be; in a forked child nobody
    /// may ask.
    pub(crate) fn connections(&self) -> Option<Connections> {
        let ours = self.process == std::process::id();
        ours.then(|| Connections::new(self.operations.in_use(), self.operations.max_size()))
    }

    /// Idle connections of ours are not trusted any more: a restart of the server, or a firewall, has
    /// made them stale, or they lead to a standby.
    pub(crate) fn purge(&self) {
        self.operations.purge();
        if let Renewals::Own(pool) = &self.renewals {
            pool.purge();
        }
    }

    /// Opens no more connections of ours and closes the idle ones; gives the kept one back.
    pub(crate) fn close(&self) {
        if self.process != std::process::id() {
            return;
        }
        self.operations.close();
        match &self.renewals {
            Renewals::Own(pool) => pool.close(),
            Renewals::Kept(_) => {
                self.unreserve();
            }
        }
    }

    /// The most connections that there may be: of the pool, one for renewals where that has one of its own, and one
    /// that listens where the pool is ours.
    pub(crate) fn connections_wanted(&self) -> u32 {
        let renewals = matches!(self.renewals, Renewals::Own(_));
        self.operations.max_size().saturating_add(u32::from(renewals)).saturating_add(u32::from(self.is_own))
    }

    /// How to open connections like those of our own pool.
    pub(crate) fn own_connector(&self) -> Option<&Connector> {
        self.connector.as_ref().filter(|_| self.is_own)
    }

    /// How to open a connection of our own, where that is known.
    pub(crate) fn connector(&self) -> Option<&Connector> {
        self.connector.as_ref()
    }
}

impl Drop for Source {
    /// The connection that was kept is in order: it belongs to the caller's pool again.
    fn drop(&mut self) {
        if let Renewals::Kept(kept) = &mut self.renewals {
            let kept = kept.get_mut().take();
            match kept {
                Some(connection) if self.process == std::process::id() => connection.give_back(),
                Some(connection) => connection.abandon(),
                None => {}
            }
        }
    }
}

/// A connection in use, of either kind of pool. Dropping it without giving it back ends its session.
pub(crate) struct Connection(Box<dyn Lent>);

impl Connection {
    /// One beside those of the pools, which ends with its use.
    pub(crate) fn alone(connector: Connector, limit: Duration, cancel: &CancelToken) -> Result<Self> {
        OwnPool::alone(connector, limit, cancel).map(Self)
    }

    pub(crate) fn client(&mut self) -> Result<&mut Client> {
        self.0.client().ok_or_else(|| {
            LockError::new(ErrorCode::ServiceUnavailable)
                .with_message("the connection to the server is closed: try again")
        })
    }

    /// Whether it is of a pool of ours, which knows what state its sessions are in.
    pub(crate) fn is_own(&self) -> bool {
        self.0.is_own()
    }

    pub(crate) fn state(&mut self) -> &mut SessionState {
        self.0.state()
    }

    /// The handle of its socket; a caller's connections have none.
    pub(crate) fn control(&mut self) -> Option<&StreamControl> {
        self.0.control()
    }

    pub(crate) fn cancel_token(&mut self) -> Option<postgres::CancelToken> {
        self.client().ok().map(|client| client.cancel_token())
    }

    pub(crate) fn canceller(&self) -> Canceller {
        self.0.canceller()
    }

    /// Opened for this use: if it fails, the server is away, not the connection stale.
    pub(crate) fn is_fresh(&self) -> bool {
        self.0.is_fresh()
    }

    /// Whether it is certain that it was used before this use.
    pub(crate) fn was_used(&self) -> bool {
        self.0.was_used()
    }

    /// Whether our own deadline ends every wait on it: a TCP connection of ours.
    pub(crate) fn is_guarded(&mut self) -> bool {
        self.control().is_some_and(StreamControl::guards)
    }

    /// Whether the session is still open, as far as the socket tells without asking the server: what
    /// it has sent by itself is read, for about a millisecond. It sends nothing.
    pub(crate) fn is_open(&mut self) -> bool {
        if let Some(control) = self.control() {
            // The deadline of the last call is over long since, and this is not a call.
            control.unlimited();
        }
        let Ok(client) = self.client() else { return false };
        let heard = guard_runtime(|| client.notifications().timeout_iter(LISTEN).next());
        matches!(heard, Ok(Ok(_))) && !client.is_closed()
    }

    /// Whether the server answers within `limit`; also where no deadline of ours guards the socket.
    pub(crate) fn answers_within(&mut self, limit: Duration) -> bool {
        let Ok(client) = self.client() else { return false };
        matches!(guard_runtime(|| client.is_valid(limit)), Ok(Ok(())))
    }

    /// Forgets the connection without a word to the server: after a fork it is the parent's.
    pub(crate) fn abandon(self) {
        std::mem::forget(self);
    }

    /// Returns a connection that is in order.
    pub(crate) fn give_back(self) {
        self.0.keep();
    }

    /// Ends the session of a connection that is in doubt.
    pub(crate) fn discard(self) {
        drop(self);
    }
}
