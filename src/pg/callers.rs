//! A caller's pool: any of r2d2's whose connections are the driver's.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postgres::Client;
use r2d2::{ManageConnection, PooledConnection};

use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::pg::connect::Connector;
use crate::pg::error::PoolError;
use crate::pg::pool::{Canceller, Lent, NotLent, Pool};
use crate::pg::statement::SessionState;
use crate::pg::stream::StreamControl;
use crate::threads::drop_where_allowed;

/// Our hold on a caller's pool. It may be the last one, and a pool drops its idle connections where
/// it is dropped: never inside an async runtime, nor in a fork, where they are the parent's.
pub(crate) struct CallersPool<M: ManageConnection<Connection = Client>> {
    pool: Option<r2d2::Pool<M>>,
    /// How to open a connection like these, where the caller has said so: for cancel requests.
    connector: Option<Connector>,
    closed: AtomicBool,
    process: u32,
}

impl<M: ManageConnection<Connection = Client>> CallersPool<M> {
    pub(crate) fn new(pool: r2d2::Pool<M>, connector: Option<Connector>) -> Self {
        Self { pool: Some(pool), connector, closed: AtomicBool::new(false), process: std::process::id() }
    }

    /// Only `drop` takes it out.
    fn pool(&self) -> Result<&r2d2::Pool<M>> {
        self.pool.as_ref().ok_or_else(LockError::closed)
    }
}

impl<M: ManageConnection<Connection = Client>> Pool for CallersPool<M> {
    fn lend(&self, slice: Duration) -> Result<Box<dyn Lent>, NotLent> {
        let mut connection = self.pool().map_err(NotLent::Ever)?.get_timeout(slice).map_err(NotLent::Yet)?;
        let state = PooledConnection::extensions_mut(&mut connection).remove::<SessionState>();
        Ok(Box::new(CallersLent {
            was_used: state.is_some(),
            state: state.unwrap_or_default(),
            connection: Some(connection),
            connector: self.connector.clone(),
            process: self.process,
        }))
    }

    fn connection_timeout(&self) -> Duration {
        self.pool.as_ref().map_or(Duration::ZERO, r2d2::Pool::connection_timeout)
    }

    fn max_size(&self) -> u32 {
        self.pool.as_ref().map_or(0, r2d2::Pool::max_size)
    }

    fn in_use(&self) -> u32 {
        let state = self.pool.as_ref().map(r2d2::Pool::state);
        state.map_or(0, |state| state.connections.saturating_sub(state.idle_connections))
    }

    fn check_open(&self) -> Result<()> {
        LockError::check_process(self.process)?;
        if self.closed.load(Ordering::SeqCst) { Err(LockError::closed()) } else { Ok(()) }
    }

    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    fn exhausted(&self, why: Option<r2d2::Error>) -> LockError {
        // r2d2 says "timed out" for both: an exhausted pool, and a server that is away.
        let full = self.pool.as_ref().is_some_and(|pool| pool.state().connections >= pool.max_size());
        let error = if full {
            LockError::new(ErrorCode::RateLimited)
                .with_message("no connection of the caller's pool became free in time: raise its max_size")
        } else {
            LockError::new(ErrorCode::ServiceUnavailable)
                .with_message("the caller's pool could not open a connection in time")
        };
        match why {
            Some(why) => error.with_source(PoolError::new(&why.to_string())),
            None => error,
        }
    }
}

impl<M: ManageConnection<Connection = Client>> Drop for CallersPool<M> {
    fn drop(&mut self) {
        let Some(pool) = self.pool.take() else { return };
        if self.process == std::process::id() {
            drop_where_allowed(pool);
        } else {
            std::mem::forget(pool);
        }
    }
}

/// A connection of a caller's pool. Dropped, its session is ended, or it never goes back.
struct CallersLent<M: ManageConnection<Connection = Client>> {
    connection: Option<PooledConnection<M>>,
    state: SessionState,
    /// Whether this library has used it before.
    was_used: bool,
    connector: Option<Connector>,
    process: u32,
}

impl<M: ManageConnection<Connection = Client>> Lent for CallersLent<M> {
    fn open(&mut self, _: Duration, _: &CancelToken) -> Result<()> {
        Ok(())
    }

    fn client(&mut self) -> Option<&mut Client> {
        self.connection.as_deref_mut()
    }

    fn state(&mut self) -> &mut SessionState {
        &mut self.state
    }

    fn control(&mut self) -> Option<&StreamControl> {
        None
    }

    fn is_fresh(&self) -> bool {
        false
    }

    fn was_used(&self) -> bool {
        self.was_used
    }

    fn is_own(&self) -> bool {
        false
    }

    fn canceller(&self) -> Canceller {
        Canceller(self.connector.clone().map(|connector| (connector, None)))
    }

    fn keep(mut self: Box<Self>) {
        if let Some(mut connection) = self.connection.take() {
            PooledConnection::extensions_mut(&mut connection).insert(std::mem::take(&mut self.state));
        }
    }
}

impl<M: ManageConnection<Connection = Client>> Drop for CallersLent<M> {
    fn drop(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        if self.process == std::process::id() {
            drop_where_allowed(Ending(Some(connection)));
        } else {
            std::mem::forget(connection);
        }
    }
}

/// A connection of a caller's pool that is in doubt. Dropping it, where the driver may be used, ends
/// its session; one that cannot be ended never goes back.
struct Ending<M: ManageConnection<Connection = Client>>(Option<PooledConnection<M>>);

impl<M: ManageConnection<Connection = Client>> Drop for Ending<M> {
    fn drop(&mut self) {
        let Some(mut connection) = self.0.take() else { return };
        // r2d2 takes only a closed connection out of its pool, so have the server close this one. Its
        // answer may come before its end does; then the next message meets the end.
        // As the role that logged in: the current one may not have the right.
        let end = "ROLLBACK; SET SESSION AUTHORIZATION DEFAULT; SET ROLE NONE; SELECT pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid())";
        // Twice, because a cancel request that was for the last call may still arrive and meet the first.
        for message in [end, "", end, ""] {
            if connection.is_closed() {
                return;
            }
            if let Err(error) = connection.batch_execute(message) {
                log::debug!("a connection in doubt was ended: {:?}", error.code());
            }
        }
        if !connection.is_closed() {
            log::debug!("a connection in doubt could not be ended and is kept out of its pool");
            std::mem::forget(connection);
        }
    }
}
