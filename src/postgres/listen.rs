//! The connection that listens for calls, and the SQL of a call. Why it is as it is: see
//! [`wake`](crate::postgres::wake).

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use postgres::fallible_iterator::FallibleIterator as _;

use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::model::lock_id::LockId;
use crate::model::time::deadline_after;
use crate::postgres::connect::Connector;
use crate::postgres::error::Trouble;
use crate::postgres::processes::{Asked, ROUNDS};
use crate::postgres::row::{Answers, flag, int, malformed, required};
use crate::postgres::session::Session;
use crate::postgres::source::Connection;
use crate::postgres::statement::{Message, push_quoted};

/// The channel of the notifications.
const CHANNEL: &str = "syncguard_wake";

/// The class of the advisory locks, "sgwk".
const CLASS: i32 = 0x7367_776B;

/// How long the proof that calls arrive may take.
const PROOF: Duration = Duration::from_secs(2);

/// How long one look for the proof takes.
const SLICE: Duration = Duration::from_millis(50);

/// The SQL that calls the waiters of the key in this column, if there are any. It is part of every
/// release, where each function costs a look-up although it is hardly ever called: so the number is
/// sent in hexadecimal, by one function instead of two.
pub(crate) fn call_waiters(key: &str) -> String {
    let number = format!("pg_catalog.hashtext({key})");
    format!(
        "CASE WHEN NOT pg_catalog.pg_try_advisory_xact_lock({CLASS}, {number}) \
         THEN pg_catalog.pg_notify('{CHANNEL}', pg_catalog.to_hex({number})) END"
    )
}

/// Whether the current role may call waiters here, for a survey: NULL where the functions are missing.
pub(crate) const MAY_CALL: &str = "pg_catalog.has_function_privilege(pg_catalog.to_regprocedure(\
        'pg_catalog.pg_try_advisory_xact_lock(pg_catalog.int4,pg_catalog.int4)')::pg_catalog.oid, 'EXECUTE') \
     AND pg_catalog.has_function_privilege(pg_catalog.to_regprocedure(\
        'pg_catalog.pg_notify(pg_catalog.text,pg_catalog.text)')::pg_catalog.oid, 'EXECUTE')";

/// How a listener connects, how long one exchange may take, and what ends it.
pub(crate) struct Line {
    pub(crate) connector: Connector,
    pub(crate) limit: Duration,
    /// Fires when the client ends.
    pub(crate) over: CancelToken,
}

/// Why the thread does not listen any more.
pub(crate) enum Fault {
    /// It may work another time.
    Now(LockError),
    /// It cannot work with this server.
    Elsewhere(LockError),
}

/// The connection that listens, and what is known of it.
pub(crate) struct Listener<'a> {
    line: &'a Line,
    connection: Option<Connection>,
    process: i64,
}

impl<'a> Listener<'a> {
    /// Connects, and proves that calls arrive.
    pub(crate) fn open(line: &'a Line) -> Result<Self, Fault> {
        let mut listener = Self { line, connection: Some(connect(line)?), process: 0 };
        let mut second = Self { line, connection: Some(connect(line)?), process: 0 };
        listener.process = listener.ask_process()?;
        second.process = second.ask_process()?;
        let mut apart = listener.process != second.process;
        for asked in ROUNDS {
            let one = if asked == Asked::First { &mut listener } else { &mut second };
            apart &= one.ask_process()? == one.process;
        }
        if !apart {
            return Err(shared_sessions());
        }
        let proof: Arc<str> = LockId::generate()?.as_str().into();
        listener.ask(&format!("LISTEN {CHANNEL}"))?;
        let Some(number) = listener.register(std::slice::from_ref(&proof))?.pop().flatten() else {
            return Err(deaf());
        };
        let mut key = String::new();
        push_quoted(&proof, &mut key)?;
        second.ask(&format!("SELECT {}", call_waiters(&key)))?;
        let end = deadline_after(PROOF);
        while !listener.listen(SLICE)?.contains(&number) {
            line.over.check()?;
            if Instant::now() >= end {
                return Err(deaf());
            }
        }
        listener.unregister(&[number])?;
        second.leave();
        Ok(listener)
    }

    /// The numbers that were called within so much time, from the first call on at once.
    pub(crate) fn listen(&mut self, limit: Duration) -> Result<HashSet<i32>, Fault> {
        let connection = self.connection.as_mut().ok_or_else(gone)?;
        let link = connection.link().cloned();
        let cut = link.clone();
        let _watch = self.line.over.subscribe(move || {
            if let Some(link) = cut {
                link.kill();
            }
        });
        if let Some(link) = link {
            // The deadline of the last call is over long since, and this is not a call.
            link.unlimited();
        }
        let client = connection.client()?;
        let mut numbers = HashSet::new();
        let broken = |error| LockError::new(ErrorCode::ServiceUnavailable).with_source(error);
        let first = client.notifications().timeout_iter(limit).next().map_err(broken)?;
        let more = client.notifications().iter().collect::<Vec<_>>().map_err(broken)?;
        for notification in first.iter().chain(&more) {
            if notification.channel() == CHANNEL {
                numbers.extend(number_of(notification.payload()));
            }
        }
        if client.is_closed() {
            return Err(gone().into());
        }
        Ok(numbers)
    }

    /// The keys' numbers, for those that were registered.
    pub(crate) fn register(&mut self, keys: &[Arc<str>]) -> Result<Vec<Option<i32>>, Fault> {
        let mut list = String::new();
        for key in keys {
            list.push_str(if list.is_empty() { "" } else { "," });
            push_quoted(key, &mut list)?;
        }
        let answers = self.ask(&format!(
            "SELECT k.number, pg_catalog.pg_try_advisory_lock_shared({CLASS}, k.number) FROM (\
               SELECT pg_catalog.hashtext(w.key) AS number, w.place \
               FROM pg_catalog.unnest(ARRAY[{list}]::pg_catalog.text[]) WITH ORDINALITY AS w (key, place) \
               OFFSET 0) AS k ORDER BY k.place"
        ))?;
        let rows = answers.rows(1)?;
        let number = |row| -> Result<Option<i32>> {
            let number = i32::try_from(required(int(row, 0)?)?).map_err(|_| malformed())?;
            Ok(flag(row, 1)?.unwrap_or_default().then_some(number))
        };
        let numbers = rows.iter().map(number).collect::<Result<Vec<_>>>()?;
        if numbers.len() == keys.len() { Ok(numbers) } else { Err(malformed().into()) }
    }

    pub(crate) fn unregister(&mut self, numbers: &[i32]) -> Result<(), Fault> {
        let list: Vec<String> = numbers.iter().map(ToString::to_string).collect();
        let list = list.join(",");
        self.ask(&format!(
            "SELECT pg_catalog.pg_advisory_unlock_shared({CLASS}, k.number) \
             FROM pg_catalog.unnest(ARRAY[{list}]::pg_catalog.int4[]) AS k (number)"
        ))?;
        Ok(())
    }

    /// One exchange, which must be with the server process that it has always been.
    fn ask(&mut self, sql: &str) -> Result<Answers, Fault> {
        let answers = self.exchange(sql)?;
        if process(&answers)? == self.process { Ok(answers) } else { Err(shared_sessions()) }
    }

    fn ask_process(&mut self) -> Result<i64, Fault> {
        Ok(process(&self.exchange("")?)?)
    }

    fn exchange(&mut self, sql: &str) -> Result<Answers, Fault> {
        let connection = self.connection.take().ok_or_else(gone)?;
        let mut session = Session::new(connection, deadline_after(self.line.limit), &self.line.over);
        let message = Message::new().raw(session.limits()).raw(sql).raw("SELECT pg_catalog.pg_backend_pid()");
        let answers = session.ask(&message);
        if answers.is_ok() {
            self.connection = session.into_connection();
        }
        answers.map_err(Trouble::into_error).map_err(Fault::from)
    }

    /// Closes a connection that is in order.
    pub(crate) fn leave(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.discard();
        }
    }
}

/// The number that a notification carries, if it is one of ours.
fn number_of(payload: &str) -> Option<i32> {
    u32::from_str_radix(payload, 16).ok().map(u32::cast_signed)
}

/// Which server process answered.
fn process(answers: &Answers) -> Result<i64> {
    required(int(required(answers.row(0)?)?, 0)?)
}

/// A connection beside those of the pools.
fn connect(line: &Line) -> Result<Connection, Fault> {
    Ok(Connection::alone(line.connector.clone(), line.limit, &line.over)?)
}

fn gone() -> LockError {
    LockError::new(ErrorCode::ServiceUnavailable).with_message("the connection that listens is closed")
}

fn shared_sessions() -> Fault {
    Fault::Elsewhere(LockError::invalid("a pooler in transaction or statement mode stands before the server"))
}

fn deaf() -> Fault {
    Fault::Elsewhere(LockError::invalid("a call from one session does not arrive in another"))
}

impl From<LockError> for Fault {
    fn from(error: LockError) -> Self {
        match error.sqlstate() {
            // A standby, a server that knows none of this, a role that may not.
            Some("25006" | "0A000" | "42501" | "42883" | "42601") => Self::Elsewhere(error),
            _ => Self::Now(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_travels_in_hexadecimal_whatever_its_sign() {
        for number in [0, 1, -1, i32::MIN, i32::MAX, -559_038_737] {
            assert_eq!(number_of(&format!("{number:x}")), Some(number));
        }
        for other in ["", "-1", "a key", "100000000", " 1"] {
            assert_eq!(number_of(other), None, "{other}");
        }
    }
}
