//! The self-test at a client's first session lock: does a session lock exclude other sessions here?
//!
//! Behind a transaction pooler a session's statements run now in one server process, now in another,
//! so two sessions are asked first who answers, several times: see [`ROUNDS`]. Then one takes a lock on
//! a random number; the second one tries the same. On PostgreSQL it is refused, by another server
//! process; a server whose functions are stubs grants both. Only a caller's pool may have no
//! second session (a pool of one): then `pg_locks` must show the lock of the first. Where a connection
//! of our own cannot be opened the test fails, for it would find no pooler.

use std::time::Instant;

use crate::advisory::key::AdvisoryKey;
use crate::advisory::sql::{self, Statements};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::model::lock_id::LockId;
use crate::pg::same_session::{Asked, ROUNDS, SessionLocksHere};
use crate::pg::{Database, Failure, Session};

/// What the test observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Observed {
    /// The first session's server process, and whether it got the lock; `None` on a standby.
    first: (i32, Option<bool>),
    /// The second's; `None` without one.
    second: Option<(i32, Option<bool>)>,
    /// Without a second: whether `pg_locks` shows the first's lock.
    in_pg_locks: bool,
    /// The first's server process at the unlock, and the unlock's answer.
    unlock: (i32, bool),
}

/// Runs the test on this session. An error means that no session lock can be trusted here.
pub(super) fn run(
    database: &Database,
    statements: &Statements,
    session: &mut Session<'_>,
    end: Instant,
) -> Result<(), Failure> {
    let never = CancelToken::never();
    let other = database.source().second(end).map_err(|error| {
        let need = "the self-test at a client's first session lock needs a second connection for a moment: try again";
        LockError::new(error.code()).with_message(need).with_source(error)
    })?;
    let mut other = other.map(|connection| Session::new(connection, end, &never));
    // Before anything is locked: nobody unlocks what is locked in a server process of a pooler.
    if !keep_to_their_processes(session, other.as_mut())? {
        return Err(pooler().into());
    }
    let key = random_key()?;
    let answer = sql::try_lock(session, statements, &key, false, None).map_err(explain)?;
    let first = (answer.pid, answer.granted);
    if answer.granted.is_none() {
        return Err(session.read_only(standby()));
    }
    let second = match other.as_mut() {
        Some(other) => {
            let answer = sql::try_lock(other, statements, &key, false, None).map_err(explain)?;
            Some((answer.pid, answer.granted))
        }
        None => None,
    };
    let in_pg_locks = second.is_none() && sql::is_held_here(session, &key).map_err(explain)?;
    let unlock = sql::unlock(session, statements, &key, false).map_err(explain)?;
    let passed = verdict(&Observed { first, second, in_pg_locks, unlock });
    if passed.is_ok() {
        // Whatever the try to come answers: the session is as it was.
        sql::stop_timer(session)?;
    }
    if let Some(other) = other
        && passed.is_ok()
    {
        other.finish();
    }
    Ok(passed?)
}

/// A session lock on a standby excludes no session on the primary.
pub(super) fn standby() -> LockError {
    LockError::new(ErrorCode::ServiceUnavailable).with_message(
        "this server is a standby, whose session locks exclude no session on the primary: connect to the primary (target_session_attrs=read-write)",
    )
}

const POOLER: &str = "a pooler in transaction or statement mode stands before the server, so a session lock would belong to no session: connect directly, or to a pool in session mode";

fn pooler() -> LockError {
    LockError::invalid(POOLER)
}

/// Runs the test for somebody who wants to know, and takes no lock.
pub(super) fn look(database: &Database, statements: &Statements, end: Instant) -> SessionLocksHere {
    let never = CancelToken::never();
    let tested = database.run(end, &never, |session| run(database, statements, session, end));
    let Err(failure) = tested else { return SessionLocksHere::Exclude };
    let error = LockError::from(failure);
    if error.to_string() == POOLER {
        SessionLocksHere::Pooled
    } else if error.code() == ErrorCode::InvalidArgument {
        SessionLocksHere::DoNot(error)
    } else {
        SessionLocksHere::Unknown(error)
    }
}

/// Whether each session has a server process of its own, as far as can be told by asking. See [`ROUNDS`].
fn keep_to_their_processes(
    session: &mut Session<'_>,
    mut other: Option<&mut Session<'_>>,
) -> Result<bool, Failure> {
    let first = sql::process(session).map_err(explain)?;
    let second = other.as_mut().map(|other| sql::process(other)).transpose().map_err(explain)?;
    if second == Some(first) {
        return Ok(false);
    }
    for asked in ROUNDS {
        let steady = match (asked, other.as_mut()) {
            (Asked::First, _) => sql::process(session).map_err(explain)? == first,
            (Asked::Second, Some(other)) => Some(sql::process(other).map_err(explain)?) == second,
            (Asked::Second, None) => true,
        };
        if !steady {
            return Ok(false);
        }
    }
    Ok(true)
}

fn verdict(observed: &Observed) -> Result<()> {
    let (pid, granted) = observed.first;
    let same_process = observed.second.is_some_and(|(other, _)| other == pid);
    if same_process || observed.unlock.0 != pid {
        return Err(pooler());
    }
    let excluded = match observed.second {
        Some((_, granted)) => granted == Some(false),
        None => observed.in_pg_locks,
    };
    // No other session knows the number, so the first try succeeds on a server that means it.
    if granted == Some(true) && excluded && observed.unlock.1 {
        return Ok(());
    }
    Err(LockError::invalid(
        "this server's session locks do not exclude: its advisory functions are stubs, or the connection string reaches different servers; connect to one PostgreSQL server (see docs/other-engines.md)",
    ))
}

/// Says what the lack of a function means.
fn explain(failure: Failure) -> Failure {
    if !failure.is_refused() {
        return failure;
    }
    let error = failure.into_error();
    if !matches!(error.code(), ErrorCode::InvalidArgument | ErrorCode::Internal) {
        return error.into();
    }
    let refused = "this server has no session locks that work as PostgreSQL's do: connect to a PostgreSQL server (see docs/other-engines.md)";
    LockError::invalid(refused).with_source(error).into()
}

/// A number that no other session uses at the same time: from the operating system's random source.
fn random_key() -> Result<AdvisoryKey> {
    Ok(AdvisoryKey::from_text(LockId::generate()?.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Observed = Observed {
        first: (1, Some(true)),
        second: Some((2, Some(false))),
        in_pg_locks: false,
        unlock: (1, true),
    };

    #[test]
    fn a_server_whose_session_locks_exclude_passes() {
        verdict(&GOOD).unwrap();
        verdict(&Observed { second: None, in_pg_locks: true, ..GOOD }).unwrap();
    }

    #[test]
    fn a_pooler_is_recognized_by_its_processes() {
        for observed in [
            Observed { second: Some((1, Some(true))), ..GOOD },
            Observed { second: Some((1, Some(false))), ..GOOD },
            Observed { unlock: (3, false), ..GOOD },
        ] {
            let error = verdict(&observed).unwrap_err();
            assert!(error.code() == ErrorCode::InvalidArgument && error.to_string().contains("pooler"));
        }
    }

    #[test]
    fn stubs_are_recognized_by_what_they_grant() {
        for observed in [
            Observed { second: Some((2, Some(true))), ..GOOD },
            Observed { first: (1, Some(false)), ..GOOD },
            Observed { second: None, in_pg_locks: false, ..GOOD },
            Observed { unlock: (1, false), ..GOOD },
        ] {
            let error = verdict(&observed).unwrap_err();
            assert!(
                error.code() == ErrorCode::InvalidArgument && error.to_string().contains("stubs"),
                "{observed:?}"
            );
        }
    }
}
