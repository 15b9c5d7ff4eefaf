//! The statements of session locks, and how their answers are read.
//!
//! Every call is a single statement or a message that ends by itself: no transaction stays open.

use std::time::Duration;

use crate::advisory::key::AdvisoryKey;
use crate::error::Result;
use crate::pg::answers::{flag, int, malformed, required, text};
use crate::pg::{Answers, Arg, Failure, Message, Session, SessionTimer, Statement, push_quoted};

/// The longest `idle_session_timeout`: PostgreSQL's settings are 32-bit numbers.
const LONGEST_TIMER: u128 = 2_147_483_647;

/// The answer to a try.
pub(super) struct TryAnswer {
    pub(super) pid: i32,
    /// `None` on a standby: not even tried there.
    pub(super) granted: Option<bool>,
}

/// The statements of a lock's beginning and end, by form of key and mode. A connection prepares all
/// of them in one round trip, with its first try.
pub(super) struct Statements {
    tries: [Statement; 4],
    /// The same where the session's timer runs already, as far as we know.
    timed_tries: [Statement; 4],
    unlocks: [Statement; 4],
    /// The same where the timer goes on.
    timed_unlocks: [Statement; 4],
}

impl Statements {
    pub(super) fn new() -> Self {
        let tries = ["pg_try_advisory_lock", "pg_try_advisory_lock_shared"];
        let unlocks = ["pg_advisory_unlock", "pg_advisory_unlock_shared"];
        Self {
            tries: variants("try", tries, true, try_text),
            timed_tries: variants("timed_try", tries, false, try_text),
            unlocks: variants("unlock", unlocks, true, unlock_text),
            timed_unlocks: variants("timed_unlock", unlocks, false, unlock_text),
        }
    }

    fn all(&self) -> Vec<&Statement> {
        [&self.tries, &self.timed_tries, &self.unlocks, &self.timed_unlocks].into_iter().flatten().collect()
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

/// One statement for both forms of keys in both modes, with or without a setting of the timer.
fn variants(
    name: &str,
    [exclusive, shared]: [&str; 2],
    sets: bool,
    text: fn(&str, &str, Option<&str>) -> String,
) -> [Statement; 4] {
    let of = |mut types: &'static [&'static str], function, key, timer| {
        if !sets && let Some((_, keys)) = types.split_last() {
            types = keys;
        }
        Statement::new(name, types, text(function, key, sets.then_some(timer)))
    };
    [
        of(ONE, exclusive, "$1", "$2"),
        of(TWO, exclusive, TWO_KEYS, "$3"),
        of(ONE, shared, "$1", "$2"),
        of(TWO, shared, TWO_KEYS, "$3"),
    ]
}

/// One try, and the session's timer: as it is, or, if the lock was granted, as it was and is then. The
/// inner row is complete before anything of the outer one is: what the timer was is read before it is set.
fn try_text(function: &str, key: &str, timer: Option<&str>) -> String {
    let tried = format!(
        "pg_catalog.pg_backend_pid() AS pid, \
         CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL ELSE pg_catalog.{function}({key}) END AS granted, \
         pg_catalog.current_setting('idle_session_timeout', true) AS timer"
    );
    let Some(timer) = timer else { return format!("SELECT {tried}") };
    format!(
        "SELECT s.pid, s.granted, s.timer, CASE WHEN s.granted AND s.timer IS NOT NULL \
           THEN pg_catalog.set_config('idle_session_timeout', {timer}, false) END \
         FROM (SELECT {tried} OFFSET 0) AS s"
    )
}

/// The unlock, and the session's timer as it was; an empty text where the server has none.
fn unlock_text(function: &str, key: &str, before: Option<&str>) -> String {
    let back = before.map_or_else(String::new, |before| {
        format!(
            ", CASE WHEN {before} OPERATOR(pg_catalog.<>) '' \
             THEN pg_catalog.set_config('idle_session_timeout', {before}, false) END"
        )
    });
    format!("SELECT pg_catalog.pg_backend_pid(), pg_catalog.{function}({key}){back}")
}

/// Tries once, and in the same statement sets the session's timer if the lock was granted. One that
/// runs already is only looked at: setting it twice costs more than the lock. Another program may have set
/// it back (`DISCARD ALL`, `RESET ALL`); then it is set once more.
pub(super) fn try_lock(
    session: &mut Session<'_>,
    statements: &Statements,
    key: &AdvisoryKey,
    shared: bool,
    timer: Option<Duration>,
) -> Result<TryAnswer, Failure> {
    let limit_ms = timer_ms(timer);
    let limit = limit_ms.to_string();
    let running = session.timer();
    let runs = running.as_ref().is_some_and(|running| running.limit_ms == limit_ms);
    let (variants, last) =
        if runs { (&statements.timed_tries, None) } else { (&statements.tries, Some(&*limit)) };
    let answers = call(session, statements, Statements::of(variants, key, shared), key, last)?;
    let row = required(answers.row(0)?)?;
    let (pid, granted) = (pid(int(row, 0)?)?, flag(row, 1)?);
    if granted != Some(true) {
        return Ok(TryAnswer { pid, granted });
    }
    let shown_now = text(row, 2)?;
    match running {
        Some(running) if runs => {
            if shown_now != Some(&running.shown) {
                ping(session, timer)?;
            }
        }
        // What the setting was before the first lock of this session; none where the server has none.
        running => {
            let before = running.map(|running| running.before).or_else(|| shown_now.map(str::to_owned));
            let shown = text(row, 3)?.map(str::to_owned);
            let timer = before.zip(shown).map(|(before, shown)| SessionTimer { limit_ms, shown, before });
            session.set_timer(timer);
        }
    }
    Ok(TryAnswer { pid, granted })
}

/// Calls a prepared statement, which is prepared first where that is needed. If it was discarded since:
/// once more, and after that it is written out.
fn call(
    session: &mut Session<'_>,
    statements: &Statements,
    statement: &Statement,
    key: &AdvisoryKey,
    last: Option<&str>,
) -> Result<Answers, Failure> {
    let (one, two) = key.numbers();
    let mut args = Vec::with_capacity(3);
    args.push(Arg::Int(one));
    args.extend(two.map(Arg::Int));
    args.extend(last.map(Arg::Text));
    session.ask_prepared(&statements.all(), statement, &args)
}

/// Asks a held lock's session whether it is there, and sets its timer anew. The server process.
pub(super) fn ping(session: &mut Session<'_>, timer: Option<Duration>) -> Result<i32, Failure> {
    let limit_ms = timer_ms(timer);
    let statement = format!(
        "SELECT pg_catalog.pg_backend_pid(), \
         CASE WHEN pg_catalog.current_setting('idle_session_timeout', true) IS NOT NULL \
         THEN pg_catalog.set_config('idle_session_timeout', '{limit_ms}', false) END"
    );
    let answers = session.ask(&Message::new().raw(statement))?;
    let row = required(answers.row(0)?)?;
    if let (Some(running), Some(shown)) = (session.timer(), text(row, 1)?) {
        session.set_timer(Some(SessionTimer { limit_ms, shown: shown.to_owned(), ..running }));
    }
    Ok(pid(int(row, 0)?)?)
}

/// The server process that answers this session.
pub(super) fn process(session: &mut Session<'_>) -> Result<i32, Failure> {
    let answers = session.ask(&Message::new().raw("SELECT pg_catalog.pg_backend_pid()"))?;
    Ok(pid(int(required(answers.row(0)?)?, 0)?)?)
}

/// Stops the timer of a session that holds nothing any more.
pub(super) fn stop_timer(session: &mut Session<'_>) -> Result<(), Failure> {
    let Some(running) = session.timer() else { return Ok(()) };
    let mut statement = "SELECT pg_catalog.set_config('idle_session_timeout', ".to_owned();
    push_quoted(&running.before, &mut statement)?;
    session.ask(&Message::new().raw(statement + ", false)"))?;
    session.set_timer(None);
    Ok(())
}

/// Unlocks. The server process, and whether the lock was held there. The timer of a caller's session
/// is set back at once; a session of ours keeps it, since its next lock will want it again, and
/// setting it twice costs more than the lock: [`stop_timer`] ends it when no lock has come for a while.
pub(super) fn unlock(
    session: &mut Session<'_>,
    statements: &Statements,
    key: &AdvisoryKey,
    shared: bool,
) -> Result<(i32, bool), Failure> {
    let (variants, back) = if session.is_own() {
        (&statements.timed_unlocks, None)
    } else {
        (&statements.unlocks, Some(session.timer().map(|timer| timer.before).unwrap_or_default()))
    };
    let statement = Statements::of(variants, key, shared);
    let answers = call(session, statements, statement, key, back.as_deref())?;
    if back.is_some() {
        session.set_timer(None);
    }
    let row = required(answers.row(0)?)?;
    Ok((pid(int(row, 0)?)?, flag(row, 1)? == Some(true)))
}

/// Whether this very session holds the key, in either mode.
pub(super) fn is_held_here(session: &mut Session<'_>, key: &AdvisoryKey) -> Result<bool, Failure> {
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
fn timer_ms(timer: Option<Duration>) -> u64 {
    timer.map_or(0, |timer| u64::try_from(timer.as_millis().clamp(1, LONGEST_TIMER)).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_is_never_none_by_accident_and_fits_the_server() {
        assert_eq!(timer_ms(None), 0);
        assert_eq!(timer_ms(Some(Duration::ZERO)), 1);
        assert_eq!(timer_ms(Some(Duration::from_millis(1500))), 1500);
        assert_eq!(timer_ms(Some(Duration::MAX)), 2_147_483_647);
    }
}
