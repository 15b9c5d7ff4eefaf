//! The self-test at a client's first session lock: does this server keep sessions apart at all?
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
use crate::postgres::{Asked, PostgresBackend, ROUNDS, Session, Trouble};

/// What the test found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Findings {
    /// The first session's server process, and whether it got the lock; `None` on a standby.
    first: (i32, Option<bool>),
    /// The second's; `None` without one.
    second: Option<(i32, Option<bool>)>,
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
    let never = CancelToken::never();
    let other = backend.source().second(end).map_err(|error| {
        let need = "the self-test at a client's first session lock needs a second connection for a moment: try again";
        LockError::new(error.code()).with_message(need).with_source(error)
    })?;
    let mut other = other.map(|connection| Session::new(connection, end, &never));
    // Before anything is locked: what is locked in a server process of a pooler's, nobody unlocks.
    if !keep_to_their_processes(session, other.as_mut())? {
        return Err(pooler().into());
    }
    let key = random_key()?;
    let grant = sql::try_lock(session, statements, &key, false, None).map_err(explain)?;
    let first = (grant.pid, grant.granted);
    if grant.granted.is_none() {
        return Err(session.read_only(standby()));
    }
    let second = match other.as_mut() {
        Some(other) => {
            let grant = sql::try_lock(other, statements, &key, false, None).map_err(explain)?;
            Some((grant.pid, grant.granted))
        }
        None => None,
    };
    let shown = second.is_none() && sql::is_held_here(session, &key).map_err(explain)?;
    let unlock = sql::unlock(session, statements, &key, false).map_err(explain)?;
    let passed = verdict(&Findings { first, second, shown, unlock });
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

fn pooler() -> LockError {
    LockError::invalid(
        "a pooler in transaction or statement mode stands before the server, so a session lock would belong to nobody: connect directly, or to a pool in session mode",
    )
}

/// Whether each session has a server process of its own, as far as can be told by asking. See [`ROUNDS`].
fn keep_to_their_processes(
    session: &mut Session<'_>,
    mut other: Option<&mut Session<'_>>,
) -> Result<bool, Trouble> {
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

fn verdict(found: &Findings) -> Result<()> {
    let (pid, granted) = found.first;
    let same_process = found.second.is_some_and(|(other, _)| other == pid);
    if same_process || found.unlock.0 != pid {
        return Err(pooler());
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

    const GOOD: Findings =
        Findings { first: (1, Some(true)), second: Some((2, Some(false))), shown: false, unlock: (1, true) };

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
