//! The loops around every operation: a stale connection is replaced, a lost answer asked for again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::model::lock_id::LockId;
use crate::postgres::error::Trouble;
use crate::postgres::session::Session;
use crate::postgres::statement::{Backend, Message, began, push_quoted};
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
    /// operations on one lease that may be carried out twice. Says what the first lost answer was.
    ///
    /// The server process of a lost answer is ended first: a message that arrived after the second
    /// answer could undo what a third one has changed since (an extend that shortens, for example).
    pub(super) fn run_until_known<R>(
        &self,
        lock_id: &LockId,
        end: Instant,
        cancel: &CancelToken,
        mut operation: impl FnMut(&mut Session<'_>, &Located) -> Result<R, Trouble>,
    ) -> Result<(R, Option<LockError>), Fault> {
        let mut first = None;
        let mut doubtful = None;
        let mut pause = Duration::from_millis(10);
        loop {
            match self.run(end, cancel, &mut operation) {
                Ok(result) => return Ok((result, first)),
                Err(Fault::Error(error)) if first.is_none() => return Err(Fault::Error(error)),
                Err(fault) => {
                    let (error, process) = match fault {
                        Fault::Doubt { error, process } => (error, process),
                        Fault::Error(error) => (error, None),
                    };
                    if Instant::now() + pause >= end || cancel.is_cancelled() {
                        return Err(Fault::Doubt { error, process: None });
                    }
                    first.get_or_insert(error);
                    doubtful = process.or(doubtful);
                    if let Some(process) = &doubtful {
                        self.end_process(process, lock_id.as_str(), end);
                    }
                }
            }
            let _ = cancel.wait_timeout(pause);
            pause = (pause * 2).min(Duration::from_millis(250));
        }
    }

    /// Runs a renewal, of `lock_id` among others, on the connection that is kept for it. For the
    /// server process of a lost answer the same holds as in [`run_until_known`](Self::run_until_known);
    /// here the connection of the second try ends it, for operations may have taken all others.
    pub(super) fn run_renewal<R>(
        &self,
        lock_id: &str,
        end: Instant,
        mut operation: impl FnMut(&mut Session<'_>, &Located) -> Result<R, Trouble>,
    ) -> Result<R, Fault> {
        let never = CancelToken::never();
        let mut replaced = 0;
        let mut doubtful: Option<Arc<Backend>> = None;
        // Whether a try may have been carried out: no later failure says that none was.
        let mut in_doubt = false;
        let fault = |in_doubt, error| {
            if in_doubt { Fault::Doubt { error, process: None } } else { Fault::Error(error) }
        };
        loop {
            let connection = self.source.get_for_renewals(end).map_err(|error| fault(in_doubt, error))?;
            let fresh = connection.is_fresh();
            let mut session = Session::new(connection, end, &never);
            if let Some(query) = doubtful.take().and_then(|process| end_query(&process, lock_id)) {
                // Trouble on this connection shows itself in what follows.
                let _ = session.ask(&Message::new().raw(session.limits_plain()).raw(query));
            }
            let outcome = self.locate_on(&mut session).and_then(|at| {
                session.prepare(&at.statements.all())?;
                operation(&mut session, &at)
            });
            let process = session.backend();
            if let Some(connection) = session.into_connection() {
                self.source.keep(connection);
            }
            replaced += 1;
            self.purge_after(&outcome, fresh);
            let unsure = matches!(outcome, Err(Trouble::Broken { in_doubt: true, .. }));
            in_doubt |= unsure;
            match outcome {
                Ok(result) => return Ok(result),
                Err(Trouble::Unprepared | Trouble::Broken { stale: true, .. })
                    if replaced <= 3 && (!fresh || replaced == 1) =>
                {
                    doubtful = process.filter(|_| unsure);
                }
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
            let process = session.backend();
            session.finish();
            replaced += 1;
            self.purge_after(&outcome, fresh);
            match outcome {
                Ok(result) => return Ok(result),
                Err(Trouble::Broken { error, in_doubt: true, .. }) => {
                    return Err(Fault::Doubt { error, process });
                }
                Err(Trouble::Unprepared) if replaced < MAX_REPLACEMENTS => {}
                Err(Trouble::Broken { stale: true, .. })
                    if !fresh && replaced < MAX_REPLACEMENTS && Instant::now() < end => {}
                Err(trouble) => return Err(Fault::Error(trouble.into_error())),
            }
        }
    }

    /// Ends the server process whose answer was lost, if it is for certain that one and is still
    /// there, so that its message cannot take effect later. Behind a pooler the process may be
    /// serving somebody else by now: then its statement is not ours, and it is left alone.
    pub(super) fn end_process(&self, process: &Backend, lock_id: &str, end: Instant) {
        let Some(query) = end_query(process, lock_id) else { return };
        let ended = self.run_bare(end, &CancelToken::never(), |session| {
            let message = Message::new().raw(session.limits_plain()).raw(&query);
            session.ask(&message).map(drop)
        });
        if let Err(fault) = ended {
            log::debug!(
                "the server process of a lost answer could not be ended: {}",
                fault.into_error().chain()
            );
        }
    }
}

/// Ends a server process if it is idle, or still busy with this very message.
///
/// What it is busy with shows only as far as the server keeps it (`track_activity_query_size`, 1 kB),
/// and of a statement that the driver has prepared without the values. So it is our message if it
/// names the lease, if it is the whole text, or if it was cut where the server cuts and our text
/// begins with it. Behind a pooler that has given the process to somebody else it is none of these.
fn end_query(process: &Backend, lock_id: &str) -> Option<String> {
    let (mut id, mut text) = (String::new(), String::new());
    push_quoted(lock_id, &mut id).ok()?;
    push_quoted(process.called.as_deref().unwrap_or_default(), &mut text).ok()?;
    // A cut text may be a few bytes shorter, so that no character is cut in two.
    Some(format!(
        "SELECT pg_catalog.pg_terminate_backend(a.pid) FROM pg_catalog.pg_stat_activity AS a \
         WHERE a.pid = {} AND {} = '{}'::pg_catalog.int8 \
         AND (a.state = 'idle' OR pg_catalog.strpos(a.query, {id}) > 0 OR (a.query <> '' AND (a.query = {text} OR \
           (pg_catalog.octet_length(a.query) >= pg_catalog.pg_size_bytes(\
              pg_catalog.current_setting('track_activity_query_size')) - 8 AND pg_catalog.starts_with({text}, a.query)))))",
        process.pid,
        began("a.backend_start"),
        process.began
    ))
}
