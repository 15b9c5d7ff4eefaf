//! The self-test at a client's first session lock: does this server keep sessions apart at all?
//!
//! One session takes a lock on a random number; a second one tries the same. On PostgreSQL it is
//! refused, by another server process. Behind a transaction pooler both statements may run in one
//! server process; a server whose functions are stubs grants both. Only a caller's pool may have no
//! second session (a pool of one): then `pg_locks` must show the lock of the first. Where a connection
//! of our own cannot be opened the test fails, for it would find no pooler.
//!
//! A pooler with several server connections may lend each session the same one twice, so both are
//! asked several times more who answers: see [`ROUNDS`].

use std::time::Instant;

use crate::advisory::key::AdvisoryKey;
use crate::advisory::sql::{self, Statements};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::model::lock_id::LockId;
use crate::postgres::{Asked, PostgresBackend, ROUNDS, Session, Trouble};

/// What the test found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Findings {
    /// The first session's server process, and whether it got the lock; `None` on a standby.
    first: (i32, Option<bool>),
    /// The second's; `None` without one.
    second: Option<(i32, Option<bool>)>,
    /// Whether the same server processes answered every later question.
    steady: bool,
    /// Without a second: whether the server shows the first's lock.
    shown: bool,
    /// The first's server process at the unlock, and the unlock's answer.
    unlock: (i32, bool),
}

/// Runs the test on this session. An error means that no session lock can be trusted here.
pub(super) fn prove(
    backend: &PostgresBackend,
    statements: &Statements,
    session: &mut Session<'_>,
    end: Instant,
) -> Result<(), Trouble> {
    let key = random_key()?;
    let grant = sql::try_lock(session, statements, &key, false, None).map_err(explain)?;
    let first = (grant.pid, grant.granted);
    if grant.granted.is_none() {
        return Err(session.read_only(standby()));
    }
    let never = CancelToken::never();
    let other = backend.source().second(end).map_err(|error| {
        let need = "the self-test at a client's first session lock needs a second connection for a moment: try again";
        LockError::new(error.code()).with_message(need).with_source(error)
    })?;
    let mut other = other.map(|connection| Session::new(connection, end, &never));
    let second = match other.as_mut() {
        Some(other) => {
            let grant = sql::try_lock(other, statements, &key, false, None).map_err(explain)?;
            Some((grant.pid, grant.granted))
        }
        None => None,
    };
    let mut steady = true;
    for asked in ROUNDS {
        steady &= match (asked, other.as_mut(), second) {
            (Asked::First, ..) => sql::process(session).map_err(explain)? == grant.pid,
            (Asked::Second, Some(other), Some((pid, _))) => sql::process(other).is_ok_and(|now| now == pid),
            (Asked::Second, ..) => true,
        };
        if !steady {
            break;
        }
    }
    let shown = second.is_none() && sql::is_held_here(session, &key).map_err(explain)?;
    let unlock = sql::unlock(session, statements, &key, false).map_err(explain)?;
    let passed = verdict(&Findings { first, second, steady, shown, unlock });
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

/// A session lock on a standby would exclude nobody on the primary.
pub(super) fn standby() -> LockError {
    LockError::new(ErrorCode::ServiceUnavailable).with_message(
        "this server is a standby, whose session locks exclude nobody elsewhere: connect to the primary (target_session_attrs=read-write)",
    )
}

fn verdict(found: &Findings) -> Result<()> {
    let (pid, granted) = found.first;
    let same_process = found.second.is_some_and(|(other, _)| other == pid);
    if same_process || !found.steady || found.unlock.0 != pid {
        return Err(LockError::invalid(
            "a pooler in transaction or statement mode stands before the server, so a session lock would belong to nobody: connect directly, or to a pool in session mode",
        ));
    }
    let excluded = match found.second {
        Some((_, granted)) => granted == Some(false),
        None => found.shown,
    };
    // Nobody else knows the number, so the first try succeeds on a server that means it.
    if granted == Some(true) && excluded && found.unlock.1 {
        return Ok(());
    }
    Err(LockError::invalid(
        "this server's session locks do not exclude: its advisory functions are stubs, or the connection string reaches different servers; use leases here",
    ))
}

/// Says what the lack of a function means.
fn explain(trouble: Trouble) -> Trouble {
    match trouble {
        Trouble::Refused(error)
            if error.code() == ErrorCode::InvalidArgument || error.code() == ErrorCode::Internal =>
        {
            let refused = "this server has no session locks that work as PostgreSQL's do: use leases here";
            LockError::invalid(refused).with_source(error).into()
        }
        other => other,
    }
}

/// A number that nobody else uses at the same time: from the operating system's random source.
fn random_key() -> Result<AdvisoryKey> {
    Ok(AdvisoryKey::from_text(LockId::generate()?.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Findings = Findings {
        first: (1, Some(true)),
        second: Some((2, Some(false))),
        steady: true,
        shown: false,
        unlock: (1, true),
    };

    #[test]
    fn a_server_that_keeps_sessions_apart_passes() {
        verdict(&GOOD).unwrap();
        verdict(&Findings { second: None, shown: true, ..GOOD }).unwrap();
    }

    #[test]
    fn a_pooler_is_told_by_its_processes() {
        for found in [
            Findings { second: Some((1, Some(true))), ..GOOD },
            Findings { second: Some((1, Some(false))), ..GOOD },
            Findings { unlock: (3, false), ..GOOD },
            Findings { steady: false, ..GOOD },
            Findings { steady: false, second: None, shown: true, ..GOOD },
        ] {
            let error = verdict(&found).unwrap_err();
            assert!(error.code() == ErrorCode::InvalidArgument && error.to_string().contains("pooler"));
        }
    }

    #[test]
    fn stubs_are_told_by_what_they_grant() {
        for found in [
            Findings { second: Some((2, Some(true))), ..GOOD },
            Findings { first: (1, Some(false)), ..GOOD },
            Findings { second: None, shown: false, ..GOOD },
            Findings { unlock: (1, false), ..GOOD },
        ] {
            let error = verdict(&found).unwrap_err();
            assert!(
                error.code() == ErrorCode::InvalidArgument && error.to_string().contains("stubs"),
                "{found:?}"
            );
        }
    }
}
