//! A look at what makes locks unsafe or slow here, for operators.
//!
//! 1. It changes nothing: its messages begin with `SET TRANSACTION READ ONLY`, and what it asks others to do reads,
//!    too. The self-test of session locks takes one on a random number for a moment.
//! 2. All of it is within one deadline. What cannot be looked at, for want of a right or of time, is a finding.
//! 3. It goes without the tables and the statements of other calls: it is for the times when those fail.

use std::cmp::Reverse;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::leases::check_members as members;
use crate::leases::check_server as server;
use crate::leases::check_tables as tables;
use crate::leases::finding::{Finding, Severity};
use crate::leases::operator::Operator;
use crate::leases::setup::look_on;
use crate::pg::same_session::SessionLocksHere;
use crate::pg::{Failure, Session};

impl Operator {
    /// Looks for what makes locks unsafe or slow on this server, in this database, for this role: settings,
    /// standbys, the tables and their indexes, triggers, rights, open transactions, a pooler, the clock. The
    /// worst first. [`docs/operations.md`](https://docs.rs/crate/syncguard/latest/source/docs/operations.md) has the table of all findings.
    ///
    /// It changes nothing, and works even where other calls fail: without tables, or where they are refused. It
    /// needs the rights of a holder; anything that these do not show is a finding of its own, `not-looked-at`.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// use syncguard::Severity;
    ///
    /// let findings = operator.check()?;
    /// for finding in &findings {
    ///     println!("{finding}");
    /// }
    /// let safe = findings.iter().all(|finding| finding.severity < Severity::Unsafe);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of a connection that cannot be opened, or whose server does not answer in time.
    pub fn check(&self) -> Result<Vec<Finding>> {
        let database = &self.backend.database;
        let end = database.end();
        let mut findings = Vec::new();
        let names = &self.backend.names;
        // The first must succeed: without a server there is nothing to be found. Where it is refused the server may be
        // another engine, whose name says more.
        let here = read(self, end, server::Here::read).map_err(|error| {
            let looked = error.sqlstate().map(|_| read(self, end, |session| look_on(session, names)));
            match looked {
                Some(Err(engine)) if engine.code() == ErrorCode::InvalidArgument => engine,
                _ => error,
            }
        })?;
        findings.extend(here.findings());
        let wanted = database.source().connections_wanted();
        let mut look = |what, work: &mut dyn FnMut(&mut Session<'_>) -> Result<Vec<Finding>, Failure>| {
            findings.extend(read(self, end, work).unwrap_or_else(|error| vec![unseen(what, &error)]));
        };
        look("the clock", &mut clock);
        look("standbys", &mut |session| server::standbys(session, &here));
        look("sessions", &mut |session| server::sessions(session, &here));
        look("prepared transactions", &mut server::prepared);
        look("settings of roles and databases", &mut server::session_defaults);
        look("connections", &mut |session| server::connections(session, wanted));
        match read(self, end, |session| look_on(session, names)) {
            Err(error) if error.code() == ErrorCode::AuthFailed => {
                findings.push(tables::schema_unseen(names.schema_or(None), here.role()));
            }
            // Not PostgreSQL: nothing else that is found here would say so.
            Err(error) if error.code() == ErrorCode::InvalidArgument => return Err(error),
            Err(error) => findings.push(unseen("the tables", &error)),
            Ok(survey) => {
                findings.extend(tables::survey(&survey, names.follow_the_path(), here.role()));
                if let Some(resolved) = names.resolved(&survey, false) {
                    let tables = tables::Tables::new(&resolved)?;
                    for (what, work) in tables::LOOKS {
                        let found = read(self, end, |session| work(session, &tables));
                        findings.extend(found.unwrap_or_else(|error| vec![unseen(what, &error)]));
                    }
                    if self.backend.settings.owner || self.backend.settings.members_table {
                        let found = read(self, end, |session| members::look(session, &resolved));
                        findings.extend(found.unwrap_or_else(|error| vec![unseen("the members", &error)]));
                    }
                }
            }
        }
        findings.extend(session_locks(self.session_locks_here(end)));
        findings.sort_by_key(|finding| Reverse(finding.severity));
        Ok(findings)
    }
}

/// One look, on a connection of the pool.
fn read<R>(
    operator: &Operator,
    end: Instant,
    look: impl FnMut(&mut Session<'_>) -> Result<R, Failure>,
) -> Result<R> {
    Ok(operator.backend.database.run(end, &CancelToken::never(), look)?)
}

/// Something that the role may not see, or that took too long.
fn unseen(what: &str, error: &LockError) -> Finding {
    let mend = match error.code() {
        ErrorCode::AuthFailed => "have a role look that may read it: see docs/security.md",
        ErrorCode::NetworkTimeout => "raise operation_timeout and look again",
        _ => "look again",
    };
    let why = error.sqlstate().map_or_else(|| error.code().to_string(), |state| format!("SQLSTATE {state}"));
    Finding::new(
        Severity::Note,
        "not-looked-at",
        format!("{what} could not be looked at ({why})"),
        "what is there is not known",
        mend,
    )
}

/// By how much the two clocks may differ before it is said, beyond what the way there took.
const CLOCKS_DIFFER: Duration = Duration::from_secs(1);

/// The server's clock beside this host's.
fn clock(session: &mut Session<'_>) -> Result<Vec<Finding>, Failure> {
    let here = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
    let before = here();
    let server = server::clock_ms(session)?;
    let after = here();
    Ok(differs(before, server, after).into_iter().collect())
}

fn differs(before: u128, server_ms: i64, after: u128) -> Option<Finding> {
    let [before, after] = [before, after].map(|ms| i64::try_from(ms).unwrap_or(i64::MAX));
    let limit = i64::try_from(CLOCKS_DIFFER.as_millis()).unwrap_or(0);
    let apart = if server_ms < before { server_ms - before } else { (server_ms - after).max(0) };
    if apart.abs() <= limit {
        return None;
    }
    let which = if apart < 0 { "behind" } else { "ahead of" };
    Some(Finding::new(
        Severity::Note,
        "clock",
        format!("the server's clock is at least {} ms {which} this host's", apart.abs()),
        "the server's alone decides who may have a key, and one that is set right by a step ends leases early or late",
        "on the server, in a shell: chronyc tracking",
    ))
}

fn session_locks(here: SessionLocksHere) -> Option<Finding> {
    match here {
        SessionLocksHere::Exclude => None,
        SessionLocksHere::Pooled => Some(Finding::new(
            Severity::Slow,
            "pooler",
            "a pooler in transaction or statement mode stands before the server",
            "leases work, and cost more: their statements are not prepared, and waiters look instead of being called; session locks are refused",
            "connect to the server's own port, or in the pooler's settings: pool_mode = session",
        )),
        SessionLocksHere::DoNot(error) => Some(Finding::new(
            Severity::Unsafe,
            "session-locks",
            format!("the self-test of session locks failed: {error}"),
            "advisory locks do not exclude here",
            "connect to one PostgreSQL primary, directly",
        )),
        SessionLocksHere::Unknown(error) => Some(unseen("session locks", &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_told_to_differ_only_beyond_what_the_way_took() {
        for (before, server, after, apart) in [
            (10_000, 10_000, 10_000, None),
            (10_000, 9_000, 10_000, None),
            (10_000, 11_500, 10_500, None),
            (10_000, 8_999, 10_000, Some("1001 ms behind")),
            (10_000, 13_500, 11_000, Some("2500 ms ahead of")),
        ] {
            let found = differs(before, server, after);
            assert_eq!(found.is_some(), apart.is_some(), "{before} {server} {after}");
            assert!(found.is_none_or(|found| found.seen.contains(apart.unwrap())), "{server}");
        }
    }
}
