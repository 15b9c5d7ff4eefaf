//! Where connections come from: our own pool, or a caller's.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use postgres::fallible_iterator::FallibleIterator;
use postgres::{Client, NoTls};
use r2d2::{ManageConnection, PooledConnection};

use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::postgres::connect::{Connector, check_runtime, drop_client, guard_runtime, rest};
use crate::postgres::link::Link;
use crate::postgres::pool::{Lent, Pool};
use crate::postgres::statement::Memo;

/// How long a caller's pool is waited for at a time, where a token may end the wait.
const SLICE: Duration = Duration::from_millis(100);

/// How long a caller's pool may take to spare a second connection.
const SPARE: Duration = Duration::from_secs(1);

/// How long [`Connection::is_open`] listens: the driver looks at the socket only while it waits.
const LISTEN: Duration = Duration::from_millis(1);

/// Lends connections for operations, and keeps one apart for renewals.
pub(crate) struct Source {
    operations: Operations,
    renewals: Renewals,
    process: u32,
}

enum Operations {
    Own(Arc<Pool>),
    Foreign { pool: CallersPool, canceller: Canceller },
}

#[expect(clippy::large_enum_variant, reason = "there is one per client")]
enum Renewals {
    /// A pool of one, not counted among the others.
    Own(Arc<Pool>),
    /// One of the caller's connections, kept from the first renewed guard on.
    Kept(Mutex<Option<Connection>>),
}

impl Source {
    /// Our own pool of `max` connections, and one more for renewals.
    pub(crate) fn own(connector: Connector, max: u32, connection_timeout: Duration) -> Self {
        Self {
            renewals: Renewals::Own(Pool::new(connector.clone(), 1, connection_timeout)),
            operations: Operations::Own(Pool::new(connector, max, connection_timeout)),
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
        let canceller = Canceller(renewals.clone());
        Self {
            renewals: match renewals {
                Some(connector) => Renewals::Own(Pool::new(connector, 1, connection_timeout)),
                None => Renewals::Kept(Mutex::new(None)),
            },
            operations: Operations::Foreign { pool: CallersPool(Some(Box::new(pool))), canceller },
            process: std::process::id(),
        }
    }

    /// A connection for an operation.
    pub(crate) fn get(&self, end: Instant, cancel: &CancelToken) -> Result<Connection> {
        match &self.operations {
            Operations::Own(pool) => pool.get(end, cancel).map(Connection::Own),
            Operations::Foreign { pool, canceller } => loop {
                cancel.check()?;
                LockError::check_process(self.process)?;
                check_runtime()?;
                let time = rest(end);
                let wait = if cancel.is_never() { time } else { time.min(SLICE) };
                match pool.lend(wait) {
                    Ok(mut lent) => {
                        let memo = lent.take_memo();
                        break Ok(Connection::Foreign(Foreign {
                            lent: Some(lent),
                            memo,
                            canceller: canceller.clone(),
                        }));
                    }
                    Err(error) if wait == time => break Err(error),
                    Err(_) => {}
                }
            },
        }
    }

    /// A connection beside the one that the caller has, for a moment: of our own where we know how to
    /// open one, else of the caller's pool, and `None` if that has none to spare soon.
    pub(crate) fn second(&self, end: Instant) -> Result<Option<Connection>> {
        let never = CancelToken::never();
        if let Some(connector) = self.connector() {
            return Connection::alone(connector.clone(), rest(end), &never).map(Some);
        }
        let found = self.get(end.min(Instant::now() + SPARE), &never);
        Ok(found.inspect_err(|error| log::debug!("no second connection: {}", error.chain())).ok())
    }

    /// The connection for renewals; hand it back with [`Source::keep`].
    pub(crate) fn get_for_renewals(&self, end: Instant) -> Result<Connection> {
        let never = CancelToken::never();
        match &self.renewals {
            Renewals::Own(pool) => pool.get(end, &never).map(Connection::Own),
            Renewals::Kept(kept) => {
                let mut connection = kept.lock().unwrap_or_else(PoisonError::into_inner).take();
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
                    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
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
        match (&self.renewals, &self.operations) {
            (Renewals::Kept(_), Operations::Foreign { pool, .. }) if pool.max_size() < 2 => {
                Err(LockError::invalid(
                    "renewals need a connection of their own: give the pool a max_size of at least 2, or call the builder's maintenance()",
                ))
            }
            (Renewals::Kept(kept), _) => Ok(kept.lock().unwrap_or_else(PoisonError::into_inner).is_none()),
            (Renewals::Own(_), _) => Ok(false),
        }
    }

    /// An idle connection of ours on which a session lock's timer still runs.
    pub(crate) fn take_timed(&self) -> Option<Connection> {
        match &self.operations {
            Operations::Own(pool) => pool.take_timed().map(Connection::Own),
            Operations::Foreign { .. } => None,
        }
    }

    /// Closes idle connections that a restart of the server has made stale.
    pub(crate) fn purge(&self) {
        if let Operations::Own(pool) = &self.operations {
            pool.purge();
        }
    }

    /// Opens no more connections of ours and closes the idle ones; gives the kept one back.
    pub(crate) fn close(&self) {
        if let Operations::Own(pool) = &self.operations {
            pool.close();
        }
        match &self.renewals {
            Renewals::Own(pool) => pool.close(),
            Renewals::Kept(kept) => {
                let connection = kept.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(connection) = connection {
                    connection.give_back();
                }
            }
        }
    }
}

impl Source {
    /// How to open connections like those of our own pool.
    pub(crate) fn own_connector(&self) -> Option<&Connector> {
        match &self.operations {
            Operations::Own(pool) => Some(pool.connector()),
            Operations::Foreign { .. } => None,
        }
    }

    /// How to open a connection of our own, where that is known.
    pub(crate) fn connector(&self) -> Option<&Connector> {
        match (&self.operations, &self.renewals) {
            (Operations::Own(pool), _) | (_, Renewals::Own(pool)) => Some(pool.connector()),
            _ => None,
        }
    }
}

impl Drop for Source {
    /// The connection that was kept is in order: it belongs to the caller's pool again.
    fn drop(&mut self) {
        if let Renewals::Kept(kept) = &mut self.renewals {
            let kept = kept.get_mut().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(connection) = kept {
                connection.give_back();
            }
        }
    }
}

/// A connection in use.
pub(crate) enum Connection {
    Own(Lent),
    Foreign(Foreign),
}

/// A connection of a caller's pool. Dropping it without giving it back ends its session.
pub(crate) struct Foreign {
    lent: Option<Box<dyn Borrowed>>,
    memo: Memo,
    canceller: Canceller,
}

impl Connection {
    /// One beside those of the pools: of a pool of one, which ends with it.
    pub(crate) fn alone(connector: Connector, limit: Duration, cancel: &CancelToken) -> Result<Self> {
        Pool::new(connector, 1, limit).get(Instant::now() + limit, cancel).map(Self::Own)
    }

    pub(crate) fn client(&mut self) -> Result<&mut Client> {
        let gone = || {
            LockError::new(ErrorCode::ServiceUnavailable)
                .with_message("the connection to the server is closed")
        };
        match self {
            Self::Own(lent) => lent.wire()?.client().ok_or_else(gone),
            Self::Foreign(foreign) => foreign.lent.as_mut().map(|lent| lent.client()).ok_or_else(gone),
        }
    }

    /// Whether it is of a pool of ours, which knows what state its sessions are in.
    pub(crate) fn is_own(&self) -> bool {
        matches!(self, Self::Own(_))
    }

    pub(crate) fn memo(&mut self) -> &mut Memo {
        match self {
            Self::Own(lent) => &mut lent.memo,
            Self::Foreign(foreign) => &mut foreign.memo,
        }
    }

    /// The handle of its socket; a caller's connections have none.
    pub(crate) fn link(&mut self) -> Option<&Link> {
        match self {
            Self::Own(lent) => lent.wire().ok().map(|wire| &wire.link),
            Self::Foreign(_) => None,
        }
    }

    pub(crate) fn cancel_token(&mut self) -> Option<postgres::CancelToken> {
        self.client().ok().map(|client| client.cancel_token())
    }

    pub(crate) fn canceller(&self) -> Canceller {
        match self {
            Self::Own(lent) => Canceller(Some(lent.connector().clone())),
            Self::Foreign(foreign) => foreign.canceller.clone(),
        }
    }

    pub(crate) fn is_fresh(&self) -> bool {
        match self {
            Self::Own(lent) => lent.fresh,
            Self::Foreign(_) => false,
        }
    }

    /// Whether our own deadline ends every wait on it: a TCP connection of ours.
    pub(crate) fn is_guarded(&mut self) -> bool {
        self.link().is_some_and(Link::guards)
    }

    /// Whether the session is still open, as far as the socket tells without asking the server: what
    /// it has sent by itself is read, for about a millisecond. It sends nothing.
    pub(crate) fn is_open(&mut self) -> bool {
        if let Some(link) = self.link() {
            // The deadline of the last call is over long since, and this is not a call.
            link.unlimited();
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
        match self {
            Self::Own(lent) => lent.give_back(),
            Self::Foreign(mut foreign) => {
                if let Some(mut lent) = foreign.lent.take() {
                    lent.put_memo(std::mem::take(&mut foreign.memo));
                }
            }
        }
    }

    /// Ends the session of a connection that is in doubt.
    pub(crate) fn discard(self) {
        drop(self);
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(lent) = self.lent.take() {
            drop_client(Ending(Some(lent)));
        }
    }
}

/// A connection of a caller's pool that is in doubt. Dropping it, where the driver may be used, ends
/// its session; one that cannot be ended never goes back.
struct Ending(Option<Box<dyn Borrowed>>);

impl Drop for Ending {
    fn drop(&mut self) {
        let Some(mut lent) = self.0.take() else { return };
        // r2d2 takes only a closed connection out of its pool, so have the server close this one. Its
        // answer may come before its end does; then the next message meets the end.
        let end = "ROLLBACK; SELECT pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid())";
        // Twice, because a cancel request that was for the last call may still arrive and meet the first.
        for message in [end, "", end, ""] {
            if lent.client().is_closed() {
                return;
            }
            if let Err(error) = lent.client().batch_execute(message) {
                log::debug!("a connection in doubt was ended: {:?}", error.code());
            }
        }
        if !lent.client().is_closed() {
            log::debug!("a connection in doubt could not be ended and is kept out of its pool");
            std::mem::forget(lent);
        }
    }
}

/// Asks a server to cancel a statement: through TLS where we know how, else in plain text.
#[derive(Clone)]
pub(crate) struct Canceller(Option<Connector>);

impl Canceller {
    pub(crate) fn cancel(&self, token: &postgres::CancelToken) {
        match &self.0 {
            Some(connector) => connector.cancel(token),
            None => {
                if let Err(error) = token.cancel_query(NoTls) {
                    log::debug!("the cancel request did not reach the server: {error}");
                }
            }
        }
    }
}

/// Our hold on a caller's pool. It may be the last one, and a pool drops its idle connections where
/// it is dropped: never inside an async runtime.
struct CallersPool(Option<Box<dyn ForeignPool>>);

impl CallersPool {
    fn lend(&self, wait: Duration) -> Result<Box<dyn Borrowed>> {
        match &self.0 {
            Some(pool) => pool.lend(wait),
            // Only `drop` takes it out.
            None => Err(LockError::closed()),
        }
    }

    fn max_size(&self) -> u32 {
        self.0.as_ref().map_or(0, |pool| pool.max_size())
    }
}

impl Drop for CallersPool {
    fn drop(&mut self) {
        if let Some(pool) = self.0.take() {
            drop_client(pool);
        }
    }
}

/// A caller's pool, whatever its manager.
trait ForeignPool: Send + Sync {
    fn lend(&self, wait: Duration) -> Result<Box<dyn Borrowed>>;
    fn max_size(&self) -> u32;
}

impl<M: ManageConnection<Connection = Client>> ForeignPool for r2d2::Pool<M> {
    fn lend(&self, wait: Duration) -> Result<Box<dyn Borrowed>> {
        let wait = wait.min(self.connection_timeout());
        match self.get_timeout(wait) {
            Ok(connection) => Ok(Box::new(connection)),
            Err(error) => {
                // r2d2 says "timed out" for both: an exhausted pool, and a server that is away.
                let state = self.state();
                let exhausted = state.connections >= self.max_size();
                Err(if exhausted {
                    LockError::new(ErrorCode::RateLimited).with_message(
                        "no connection of the caller's pool became free in time: raise its max_size",
                    )
                } else {
                    LockError::new(ErrorCode::ServiceUnavailable)
                        .with_message("the caller's pool could not open a connection in time")
                }
                .with_source(error))
            }
        }
    }

    fn max_size(&self) -> u32 {
        Self::max_size(self)
    }
}

/// A connection lent by a caller's pool.
trait Borrowed: Send {
    fn client(&mut self) -> &mut Client;
    fn take_memo(&mut self) -> Memo;
    fn put_memo(&mut self, memo: Memo);
}

impl<M: ManageConnection<Connection = Client>> Borrowed for PooledConnection<M> {
    fn client(&mut self) -> &mut Client {
        self
    }

    fn take_memo(&mut self) -> Memo {
        Self::extensions_mut(self).remove::<Memo>().unwrap_or_default()
    }

    fn put_memo(&mut self, memo: Memo) {
        Self::extensions_mut(self).insert(memo);
    }
}
