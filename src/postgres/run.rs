//! The loops around every operation: a stale connection is replaced, a lost answer asked for again.

use std::time::{Duration, Instant};

use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::model::time::deadline_after;
use crate::postgres::error::Trouble;
use crate::postgres::session::Session;
use crate::postgres::{Fault, Located, MAX_REPLACEMENTS, PostgresBackend};

impl PostgresBackend {
    /// Runs an operation on a connection that has everything prepared.
    ///
    /// An error of the operation is passed on; a connection that turns out to be stale is replaced
    /// as long as nothing can have been committed.
    pub(crate) fn run<R>(
        &self,
        end: Instant,
        cancel: &CancelToken,
        mut operation: impl FnMut(&mut Session<'_>, &Located) -> Result<R, Trouble>,
    ) -> Result<R, Fault> {
        let at = self.locate(end, cancel)?;
        self.run_bare(end, cancel, |session| {
            session.prepare(&at.statements.all())?;
            operation(session, &at)
        })
    }

    /// Runs an operation again after a lost answer, until one comes or the time is over. For
    /// operations on one lease that may be carried out twice, and late. Says what the first lost answer was.
    pub(super) fn run_until_known<R>(
        &self,
        end: Instant,
        cancel: &CancelToken,
        mut operation: impl FnMut(&mut Session<'_>, &Located) -> Result<R, Trouble>,
    ) -> Result<(R, Option<LockError>), Fault> {
        let mut first = None;
        let mut pause = Duration::from_millis(10);
        loop {
            match self.run(end, cancel, &mut operation) {
                Ok(result) => return Ok((result, first)),
                Err(Fault::Error(error)) if first.is_none() => return Err(Fault::Error(error)),
                Err(Fault::Error(error) | Fault::Doubt(error)) => {
                    if deadline_after(pause) >= end || cancel.is_cancelled() {
                        return Err(Fault::Doubt(error));
                    }
                    first.get_or_insert(error);
                }
            }
            let _ = cancel.wait_timeout(pause);
            pause = (pause * 2).min(Duration::from_millis(250));
        }
    }

    /// Runs a renewal on the connection that is kept for it, and once more where that is stale.
    pub(super) fn run_renewal<R>(
        &self,
        end: Instant,
        mut operation: impl FnMut(&mut Session<'_>, &Located) -> Result<R, Trouble>,
    ) -> Result<R, Fault> {
        let never = CancelToken::never();
        let mut replaced = 0;
        // Whether a try may have been carried out: no later failure says that none was.
        let mut in_doubt = false;
        let fault = |in_doubt, error| if in_doubt { Fault::Doubt(error) } else { Fault::Error(error) };
        loop {
            let connection = self.source.get_for_renewals(end).map_err(|error| fault(in_doubt, error))?;
            let fresh = connection.is_fresh();
            let mut session = Session::new(connection, end, &never);
            let outcome = self.locate_on(&mut session).and_then(|at| {
                session.prepare(&at.statements.all())?;
                operation(&mut session, &at)
            });
            if let Some(connection) = session.into_connection() {
                self.source.keep(connection);
            }
            replaced += 1;
            self.purge_after(&outcome, fresh);
            in_doubt |= matches!(outcome, Err(Trouble::Broken { in_doubt: true, .. }));
            match outcome {
                Ok(result) => return Ok(result),
                Err(Trouble::Unprepared | Trouble::Broken { stale: true, .. })
                    if replaced <= 3 && (!fresh || replaced == 1) => {}
                Err(trouble) => return Err(fault(in_doubt, trouble.into_error())),
            }
        }
    }

    /// Has no idle connection used any more, if what became of this one says so.
    pub(crate) fn purge_after<R>(&self, outcome: &Result<R, Trouble>, fresh: bool) {
        if outcome.as_ref().is_err_and(|trouble| trouble.is_of_all(fresh)) {
            self.source.purge();
        }
    }

    /// The loop around every operation.
    pub(crate) fn run_bare<R>(
        &self,
        end: Instant,
        cancel: &CancelToken,
        mut operation: impl FnMut(&mut Session<'_>) -> Result<R, Trouble>,
    ) -> Result<R, Fault> {
        let mut replaced = 0;
        loop {
            cancel.check()?;
            let connection = self.source.get(end, cancel)?;
            let fresh = connection.is_fresh();
            let mut session = Session::new(connection, end, cancel);
            let outcome = operation(&mut session);
            session.finish();
            replaced += 1;
            self.purge_after(&outcome, fresh);
            match outcome {
                Ok(result) => return Ok(result),
                Err(Trouble::Broken { error, in_doubt: true, .. }) => return Err(Fault::Doubt(error)),
                Err(Trouble::Unprepared) if replaced < MAX_REPLACEMENTS => {}
                Err(Trouble::Broken { stale: true, .. })
                    if !fresh && replaced < MAX_REPLACEMENTS && Instant::now() < end => {}
                Err(trouble) => return Err(Fault::Error(trouble.into_error())),
            }
        }
    }
}
