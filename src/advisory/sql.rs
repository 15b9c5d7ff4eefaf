//! The statements of session locks, and how their answers are read.
//!
//! Every call is a single statement or a message that ends by itself: no transaction stays open.

use std::time::Duration;

use crate::advisory::key::AdvisoryKey;
use crate::error::Result;
use crate::postgres::{
    Answers, Arg, Message, Session, Statement, Trouble, flag, int, malformed, required, text,
};

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

/// The statements of a lock's beginning and end, by kind of key and mode. A connection prepares all
/// of them in one round trip, with its first try.
pub(super) struct Statements {
    tries: [Statement; 4],
    unlocks: [Statement; 4],
}

impl Statements {
    pub(super) fn new() -> Self {
        Self {
            tries: [
                Statement::new("try", ONE, try_text("pg_try_advisory_lock", "$1", "$2")),
                Statement::new("try", TWO, try_text("pg_try_advisory_lock", TWO_KEYS, "$3")),
                Statement::new("try_shared", ONE, try_text("pg_try_advisory_lock_shared", "$1", "$2")),
                Statement::new("try_shared", TWO, try_text("pg_try_advisory_lock_shared", TWO_KEYS, "$3")),
            ],
            unlocks: [
                Statement::new("unlock", ONE, unlock_text("pg_advisory_unlock", "$1", "$2")),
                Statement::new("unlock", TWO, unlock_text("pg_advisory_unlock", TWO_KEYS, "$3")),
                Statement::new("unlock_shared", ONE, unlock_text("pg_advisory_unlock_shared", "$1", "$2")),
                Statement::new(
                    "unlock_shared",
                    TWO,
                    unlock_text("pg_advisory_unlock_shared", TWO_KEYS, "$3"),
                ),
            ],
        }
    }

    fn all(&self) -> [&Statement; 8] {
        let ([a, b, c, d], [e, f, g, h]) = (&self.tries, &self.unlocks);
        [a, b, c, d, e, f, g, h]
    }

    fn of<'a>(of: &'a [Statement; 4], key: &AdvisoryKey, shared: bool) -> &'a Statement {
        let [one, two, one_shared, two_shared] = of;
        match (key.is_pair(), shared) {
            (false, false) => one,
            (true, false) => two,
            (false, true) => one_shared,
            (true, true) => two_shared,
        }
    }
}

/// `(key, timer)` and `(class, object, timer)`.
const ONE: &[&str] = &["pg_catalog.int8", "pg_catalog.text"];
const TWO: &[&str] = &["pg_catalog.int8", "pg_catalog.int8", "pg_catalog.text"];
const TWO_KEYS: &str = "$1::pg_catalog.int4, $2::pg_catalog.int4";

/// One try, and the session's timer if the lock was granted. The inner row is complete before
/// anything of the outer one is: what the timer was is read before it is set.
fn try_text(function: &str, key: &str, timer: &str) -> String {
    format!(
        "SELECT s.pid, s.granted, s.before, CASE WHEN s.granted AND s.before IS NOT NULL \
           THEN pg_catalog.set_config('idle_session_timeout', {timer}, false) END \
         FROM (SELECT pg_catalog.pg_backend_pid() AS pid, \
           pg_catalog.current_setting('idle_session_timeout', true) AS before, \
           CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL ELSE pg_catalog.{function}({key}) END AS granted \
           OFFSET 0) AS s"
    )
}

/// The unlock, and the session's timer as it was; an empty text where the server has none.
fn unlock_text(function: &str, key: &str, before: &str) -> String {
    format!(
        "SELECT pg_catalog.pg_backend_pid(), pg_catalog.{function}({key}), \
         CASE WHEN {before} OPERATOR(pg_catalog.<>) '' \
         THEN pg_catalog.set_config('idle_session_timeout', {before}, false) END"
    )
}

/// Tries once, and in the same statement sets the session's timer if the lock was granted.
pub(super) fn try_lock(
    session: &mut Session<'_>,
    statements: &Statements,
    key: &AdvisoryKey,
    shared: bool,
    timer: Option<Duration>,
) -> Result<Grant, Trouble> {
    let timer = timer_text(timer);
    let statement = Statements::of(&statements.tries, key, shared);
    let answers = call(session, statements, statement, key, &timer)?;
    let row = required(answers.row(0)?)?;
    Ok(Grant { pid: pid(int(row, 0)?)?, granted: flag(row, 1)?, before: text(row, 2)?.map(str::to_owned) })
}

/// Calls a prepared statement; prepares once more if somebody has discarded it, and then writes it out.
fn call(
    session: &mut Session<'_>,
    statements: &Statements,
    statement: &Statement,
    key: &AdvisoryKey,
    last: &str,
) -> Result<Answers, Trouble> {
    let (one, two) = key.numbers();
    loop {
        session.prepare(&statements.all())?;
        let answers = match two {
            None => session.ask_one(statement, &[Arg::Int(one), Arg::Text(last)]),
            Some(two) => session.ask_one(statement, &[Arg::Int(one), Arg::Int(two), Arg::Text(last)]),
        };
        match answers {
            Err(Trouble::Unprepared) => {}
            answers => return answers,
        }
    }
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
    statements: &Statements,
    key: &AdvisoryKey,
    shared: bool,
    before: Option<&str>,
) -> Result<(i32, bool), Trouble> {
    let statement = Statements::of(&statements.unlocks, key, shared);
    let before = before.unwrap_or_default();
    let answers = call(session, statements, statement, key, before)?;
    let row = required(answers.row(0)?)?;
    Ok((pid(int(row, 0)?)?, flag(row, 1)? == Some(true)))
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
