//! The loop around every operation: a connection, the operation on it, and another connection where
//! that one turned out to be stale, as long as nothing can have been committed. And around that, for
//! what may be carried out twice, the loop that asks again after a lost answer.

use std::time::{Duration, Instant};

use crate::backend::Connections;
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::model::time::{Clock, Moment, deadline_after};
use crate::pg::failure::Failure;
use crate::pg::session::Session;
use crate::pg::source::{Connection, Source};
use crate::waiting::Delays;

/// How often an operation starts anew because its connection turned out to be stale. After a
/// restart of the server every idle connection is.
const MAX_REPLACEMENTS: u32 = 64;

/// The same for renewals, which have one connection.
const MAX_RENEWAL_REPLACEMENTS: u32 = 3;

/// The pauses before a lost answer is asked for again.
const ASK_AGAIN: Delays = Delays::doubling(Duration::from_millis(10), Duration::from_millis(250));

/// A database: where its connections come from, and how long a call may take.
pub(crate) struct Database {
    source: Source,
    operation_timeout: Duration,
}

/// Which connections an operation uses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Those of the pool.
    Operations,
    /// The one that is kept for renewals, which may be carried out twice, and late.
    Renewals,
}

/// Repeats an operation after a lost answer, until there is an answer or the time is over: for operations
/// that may be carried out twice, and late. Answers the error of the first lost answer, too.
pub(crate) fn until_known<R>(
    end: Instant,
    cancel: &CancelToken,
    mut operation: impl FnMut() -> Result<R, Failure>,
) -> Result<(R, Option<LockError>), Failure> {
    let (mut first, mut retry) = (None, 0);
    loop {
        retry += 1;
        let pause = ASK_AGAIN.before(retry);
        match operation() {
            Ok(result) => return Ok((result, first)),
            Err(failure) if first.is_none() && !failure.is_in_doubt() => return Err(failure),
            // Whatever a later try came to, the first one stays in doubt.
            Err(failure) => {
                if deadline_after(pause) >= end || cancel.is_cancelled() {
                    return Err(failure.or_in_doubt(true));
                }
                first.get_or_insert(failure.into_error());
            }
        }
        let _ = cancel.wait_timeout(pause);
    }
}

impl Database {
    pub(crate) fn new(source: Source, operation_timeout: Duration) -> Self {
        Self { source, operation_timeout }
    }

    /// Where its connections come from, for those who keep one.
    pub(crate) fn source(&self) -> &Source {
        &self.source
    }

    /// See [`Source::connections`].
    pub(crate) fn connections(&self) -> Option<Connections> {
        self.source.connections()
    }

    pub(crate) fn operation_timeout(&self) -> Duration {
        self.operation_timeout
    }

    /// When an operation that starts now must be over.
    pub(crate) fn end(&self) -> Instant {
        deadline_after(self.operation_timeout)
    }

    /// The same for one with a deadline of its own.
    pub(crate) fn end_by(&self, deadline: Moment) -> Instant {
        let left = deadline.since(Clock::system().now());
        deadline_after(left).min(self.end())
    }

    /// Runs an operation on a connection of the pool.
    pub(crate) fn run<R>(
        &self,
        end: Instant,
        cancel: &CancelToken,
        operation: impl FnMut(&mut Session<'_>) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        self.with_connection(Lane::Operations, end, cancel, operation)
    }

    /// The loop around every operation. The operation may take the connection out of its session and
    /// keep it; else it goes back, or is closed where it is in doubt.
    pub(crate) fn with_connection<R>(
        &self,
        lane: Lane,
        end: Instant,
        cancel: &CancelToken,
        mut operation: impl FnMut(&mut Session<'_>) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let mut tries = 0;
        // Whether an earlier try may have been carried out: no later failure says that none was.
        let mut in_doubt = false;
        loop {
            cancel.check()?;
            let connection =
                self.lend(lane, end, cancel).map_err(|error| Failure::from(error).or_in_doubt(in_doubt))?;
            let fresh = connection.is_fresh();
            let mut session = Session::new(connection, end, cancel);
            let outcome = operation(&mut session);
            if let Some(connection) = session.take_connection() {
                self.take_back(lane, connection);
            }
            tries += 1;
            let failure = match outcome {
                Ok(result) => return Ok(result),
                Err(failure) => failure,
            };
            if failure.condemns_idle_connections(fresh) {
                self.source.purge();
            }
            in_doubt |= failure.is_in_doubt();
            let again = match lane {
                Lane::Operations => {
                    let stale = failure.is_stale() && !fresh && Instant::now() < end;
                    !in_doubt && tries < MAX_REPLACEMENTS && (failure.is_unprepared() || stale)
                }
                Lane::Renewals => {
                    (failure.is_unprepared() || failure.is_stale())
                        && tries <= MAX_RENEWAL_REPLACEMENTS
                        && (!fresh || tries == 1)
                }
            };
            if !again {
                return Err(failure.or_in_doubt(in_doubt));
            }
        }
    }

    fn lend(&self, lane: Lane, end: Instant, cancel: &CancelToken) -> Result<Connection> {
        match lane {
            Lane::Operations => self.source.get(end, cancel),
            Lane::Renewals => self.source.get_for_renewals(end),
        }
    }

    fn take_back(&self, lane: Lane, connection: Connection) {
        match lane {
            Lane::Operations => connection.give_back(),
            Lane::Renewals => self.source.keep(connection),
        }
    }
}
