//! The statements of session locks, and how their answers are read.
//!
//! Every call is a single statement or a message that ends by itself: no transaction stays open.

use std::time::Duration;

use crate::advisory::key::AdvisoryKey;
use crate::error::Result;
use crate::postgres::{Message, Session, Trouble, int, malformed, required, text};

/// The longest `idle_session_timeout`: PostgreSQL's settings are 32-bit numbers.
const LONGEST_TIMER: u128 = 2_147_483_647;

/// What a try found.
pub(super) struct Grant {
    pub(super) pid: i32,
    /// `None` on a standby: not even tried there.
    pub(super) granted: Option<bool>,
    /// The session's `idle_session_timeout` as it was; `None` where the server has no such setting.
    pub(super) before: Option<String>,
}

/// Tries once, and in the same statement sets the session's timer if the lock was granted.
pub(super) fn try_lock(
    session: &mut Session<'_>,
    key: &AdvisoryKey,
    shared: bool,
    timer: Option<Duration>,
) -> Result<Grant, Trouble> {
    let function = if shared { "pg_try_advisory_lock_shared" } else { "pg_try_advisory_lock" };
    let statement = format!(
        "WITH s AS MATERIALIZED (SELECT pg_catalog.pg_backend_pid() AS pid, \
           pg_catalog.pg_is_in_recovery() AS standby, \
           pg_catalog.current_setting('idle_session_timeout', true) AS before), \
         l AS MATERIALIZED (SELECT s.pid, s.before, \
           CASE WHEN s.standby THEN NULL ELSE pg_catalog.{function}({}) END AS granted FROM s) \
         SELECT l.pid, l.granted, l.before, CASE WHEN l.granted AND l.before IS NOT NULL \
           THEN pg_catalog.set_config('idle_session_timeout', '{}', false) END FROM l",
        key.arguments(),
        timer_text(timer),
    );
    let message = Message::new().raw(session.limits_plain()).raw(statement);
    let answers = session.ask(&message)?;
    let row = required(answers.row(0)?)?;
    Ok(Grant {
        pid: pid(int(row, 0)?)?,
        granted: text(row, 1)?.map(|granted| granted == "t"),
        before: text(row, 2)?.map(str::to_owned),
    })
}

/// Asks a held lock's session whether it is there, and sets its timer anew. The server process.
pub(super) fn ping(session: &mut Session<'_>, timer: Option<Duration>) -> Result<i32, Trouble> {
    let statement = format!(
        "SELECT pg_catalog.pg_backend_pid(), \
         CASE WHEN pg_catalog.current_setting('idle_session_timeout', true) IS NOT NULL \
         THEN pg_catalog.set_config('idle_session_timeout', '{}', false) END",
        timer_text(timer),
    );
    let answers = session.ask(&Message::new().raw(statement))?;
    Ok(pid(int(required(answers.row(0)?)?, 0)?)?)
}

/// Unlocks and sets the session's timer back. The server process, and whether the lock was held there.
pub(super) fn unlock(
    session: &mut Session<'_>,
    key: &AdvisoryKey,
    shared: bool,
    before: Option<&str>,
) -> Result<(i32, bool), Trouble> {
    let function = if shared { "pg_advisory_unlock_shared" } else { "pg_advisory_unlock" };
    let mut statement =
        format!("SELECT pg_catalog.pg_backend_pid(), pg_catalog.{function}({})", key.arguments());
    if let Some(before) = before {
        statement.push_str(", pg_catalog.set_config('idle_session_timeout', ");
        crate::postgres::push_quoted(before, &mut statement)?;
        statement.push_str(", false)");
    }
    let answers = session.ask(&Message::new().raw(statement))?;
    let row = required(answers.row(0)?)?;
    Ok((pid(int(row, 0)?)?, text(row, 1)? == Some("t")))
}

/// Whether this very session holds the key, in either mode.
pub(super) fn is_held_here(session: &mut Session<'_>, key: &AdvisoryKey) -> Result<bool, Trouble> {
    let (class, object, sub) = key.address();
    let statement = format!(
        "SELECT count(*) FROM pg_catalog.pg_locks AS l WHERE l.pid = pg_catalog.pg_backend_pid() \
         AND l.locktype = 'advisory' AND l.granted AND l.objsubid = {sub} \
         AND l.classid = '{class}'::pg_catalog.oid AND l.objid = '{object}'::pg_catalog.oid"
    );
    let message = Message::new().raw(session.limits_plain()).raw(statement);
    let answers = session.ask(&message)?;
    Ok(required(int(required(answers.row(0)?)?, 0)?)? > 0)
}

/// A server process's number.
pub(super) fn pid(value: Option<i64>) -> Result<i32> {
    i32::try_from(required(value)?).map_err(|_| malformed())
}

/// `0` is PostgreSQL's "no limit", so a limit is never that.
fn timer_text(timer: Option<Duration>) -> String {
    timer.map_or_else(|| "0".to_owned(), |timer| timer.as_millis().clamp(1, LONGEST_TIMER).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_is_never_none_by_accident_and_fits_the_server() {
        assert_eq!(timer_text(None), "0");
        assert_eq!(timer_text(Some(Duration::ZERO)), "1");
        assert_eq!(timer_text(Some(Duration::from_millis(1500))), "1500");
        assert_eq!(timer_text(Some(Duration::MAX)), "2147483647");
    }
}
