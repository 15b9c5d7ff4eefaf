//! Pools of connections: our own and a caller's, both r2d2's, behind one small trait, and the one wait for either.
//!
//! 1. Every wait consists of equal slices, between which deadline, token and close are looked at. Equal,
//!    because a wait in slices starves beside a whole one; slices, because r2d2 wakes nobody when it
//!    drops a broken connection, and knows no tokens.
//! 2. What a pool lends goes back only through [`Lent::keep`], and only in order. Dropped without
//!    that it is in doubt: its session ends.

use std::time::{Duration, Instant};

use postgres::{Client, NoTls};

use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::model::time::deadline_after;
use crate::pg::connect::{Connector, check_runtime, guard_runtime, rest};
use crate::pg::error::out_of_time;
use crate::pg::resources;
use crate::pg::statement::SessionState;
use crate::pg::stream::StreamControl;

/// How long one slice of a wait is. Each may have a caller's pool open one more connection, within its
/// own maximum, as if one more thread had asked.
const SLICE: Duration = Duration::from_millis(40);

/// A pool, of ours or of a caller's.
pub(crate) trait Pool: Send + Sync {
    /// A place in the pool, if one comes free within the slice.
    fn lend(&self, slice: Duration) -> Result<Box<dyn Lent>, NotLent>;

    /// The most that a call may wait for it.
    fn connection_timeout(&self) -> Duration;

    fn max_size(&self) -> u32;

    /// How many of its places are lent just now.
    fn in_use(&self) -> u32;

    /// Refuses where nothing is to be lent any more.
    fn check_open(&self) -> Result<()>;

    /// Nothing came in time; r2d2 may have said why.
    fn exhausted(&self, why: Option<r2d2::Error>) -> LockError;

    /// Closes the idle connections of a pool of ours, and those in use once they come back.
    fn purge(&self) {}

    /// No more connections of ours.
    fn close(&self) {}

    /// An idle connection of ours on which a session lock's timer still runs.
    fn take_timed(&self) -> Option<Box<dyn Lent>> {
        None
    }
}

/// Why a pool has lent nothing.
pub(crate) enum NotLent {
    /// The slice is over.
    Yet(r2d2::Error),
    Ever(LockError),
}

/// What a pool has lent. Dropping it ends the session, because it is in doubt.
pub(crate) trait Lent: Send {
    /// Opens the connection where the place is empty, or what it had must not be used any more.
    fn open(&mut self, limit: Duration, cancel: &CancelToken) -> Result<()>;

    fn client(&mut self) -> Option<&mut Client>;

    fn state(&mut self) -> &mut SessionState;

    /// The handle of its socket; a caller's connections have none.
    fn control(&mut self) -> Option<&StreamControl>;

    /// Opened by [`open`](Self::open): if it fails, the server is away, not the connection stale.
    fn is_fresh(&self) -> bool;

    /// Whether it is certain that it was used before.
    fn was_used(&self) -> bool;

    /// Whether it is of a pool of ours, which knows what state its sessions are in.
    fn is_own(&self) -> bool;

    fn canceller(&self) -> Canceller;

    /// Puts back what is in order: no transaction, no unanswered message, no session lock.
    fn keep(self: Box<Self>);
}

/// A connection of this pool, open, within `end` and the pool's own limit.
pub(crate) fn get(pool: &dyn Pool, end: Instant, cancel: &CancelToken) -> Result<Box<dyn Lent>> {
    check_runtime()?;
    if rest(end).is_zero() {
        return Err(out_of_time());
    }
    let end = end.min(deadline_after(pool.connection_timeout()));
    let mut why = None;
    loop {
        cancel.check()?;
        pool.check_open()?;
        let left = rest(end);
        match pool.lend(left.min(SLICE)) {
            Ok(mut lent) => {
                lent.open(rest(end), cancel)?;
                return Ok(lent);
            }
            Err(NotLent::Ever(error)) => return Err(error),
            // It names a failed attempt to connect only once, and may do so in any slice.
            Err(NotLent::Yet(error)) => why = Some(longer(why, error)),
        }
        if left.is_zero() {
            return Err(pool.exhausted(why));
        }
    }
}

fn longer(old: Option<r2d2::Error>, new: r2d2::Error) -> r2d2::Error {
    old.filter(|old| old.to_string().len() > new.to_string().len()).unwrap_or(new)
}

/// Asks a server to cancel a statement: through TLS where we know how, else in plain text. The control is
/// that of a connection of ours.
#[derive(Clone)]
pub(crate) struct Canceller(pub(crate) Option<(Connector, Option<StreamControl>)>);

impl Canceller {
    pub(crate) fn cancel(&self, token: &postgres::CancelToken) {
        if let Some((connector, control)) = &self.0 {
            return connector.cancel(token, control.as_ref());
        }
        let asked = resources::check().and_then(|()| guard_runtime(|| token.cancel_query(NoTls)));
        if !matches!(asked, Ok(Ok(()))) {
            log::debug!("the cancel request did not reach the server");
        }
    }
}
