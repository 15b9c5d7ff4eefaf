//! The connection that listens for releases. Why it is as it is: see
//! [`wake_ups`](crate::leases::wake_ups).

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use postgres::fallible_iterator::FallibleIterator as _;

use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::leases::notify::{CHANNEL, CLASS, notify_waiters};
use crate::model::lock_id::LockId;
use crate::model::time::deadline_after;
use crate::pg::Connection;
use crate::pg::Failure;
use crate::pg::answers::{Answers, flag, int, malformed, required};
use crate::pg::connect::Connector;
use crate::pg::same_session::{Asked, ROUNDS};
use crate::pg::session::Session;
use crate::pg::statement::{Message, push_quoted};

/// How long the proof that notifications arrive may take.
const PROOF: Duration = Duration::from_secs(2);

/// How long one look for the proof takes.
const SLICE: Duration = Duration::from_millis(50);

/// How a listener connects, how long one exchange may take, and what ends it.
pub(crate) struct ListenTarget {
    pub(crate) connector: Connector,
    pub(crate) limit: Duration,
    /// Fires when the client ends.
    pub(crate) over: CancelToken,
}

/// The connection that listens, and what is known of it.
pub(crate) struct Listener<'a> {
    target: &'a ListenTarget,
    connection: Option<Connection>,
    process: i64,
}

impl<'a> Listener<'a> {
    /// Connects, and proves that notifications arrive.
    pub(crate) fn open(target: &'a ListenTarget) -> Result<Self> {
        let mut listener = Self { target, connection: Some(connect(target)?), process: 0 };
        let mut second = Self { target, connection: Some(connect(target)?), process: 0 };
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
        second.ask(&format!("SELECT {}", notify_waiters(&key)))?;
        let end = deadline_after(PROOF);
        while !listener.listen(SLICE)?.contains(&number) {
            target.over.check()?;
            if Instant::now() >= end {
                return Err(deaf());
            }
        }
        listener.unregister(&[number])?;
        second.leave();
        Ok(listener)
    }

    /// The numbers that were notified within so much time, from the first one on at once.
    pub(crate) fn listen(&mut self, limit: Duration) -> Result<HashSet<i32>> {
        let connection = self.connection.as_mut().ok_or_else(gone)?;
        let control = connection.control().cloned();
        let cut = control.clone();
        let _watch = self.target.over.subscribe(move || {
            if let Some(control) = cut {
                control.kill();
            }
        });
        if let Some(control) = control {
            // The deadline of the last call is over long since, and this is not a call.
            control.unlimited();
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
            return Err(gone());
        }
        Ok(numbers)
    }

    /// The keys' numbers, for those that were registered.
    pub(crate) fn register(&mut self, keys: &[Arc<str>]) -> Result<Vec<Option<i32>>> {
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
        if numbers.len() == keys.len() { Ok(numbers) } else { Err(malformed()) }
    }

    pub(crate) fn unregister(&mut self, numbers: &[i32]) -> Result<()> {
        let list: Vec<String> = numbers.iter().map(ToString::to_string).collect();
        let list = list.join(",");
        self.ask(&format!(
            "SELECT pg_catalog.pg_advisory_unlock_shared({CLASS}, k.number) \
             FROM pg_catalog.unnest(ARRAY[{list}]::pg_catalog.int4[]) AS k (number)"
        ))?;
        Ok(())
    }

    /// One exchange, which must be with the server process that it has always been.
    fn ask(&mut self, sql: &str) -> Result<Answers> {
        let answers = self.exchange(sql)?;
        if process(&answers)? == self.process { Ok(answers) } else { Err(shared_sessions()) }
    }

    fn ask_process(&mut self) -> Result<i64> {
        process(&self.exchange("")?)
    }

    fn exchange(&mut self, sql: &str) -> Result<Answers> {
        let connection = self.connection.take().ok_or_else(gone)?;
        let mut session = Session::new(connection, deadline_after(self.target.limit), &self.target.over);
        let message = Message::new().raw(session.limits()).raw(sql).raw("SELECT pg_catalog.pg_backend_pid()");
        let answers = session.ask(&message);
        if answers.is_ok() {
            self.connection = session.take_connection();
        }
        answers.map_err(Failure::into_error)
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
fn connect(target: &ListenTarget) -> Result<Connection> {
    Connection::alone(target.connector.clone(), target.limit, &target.over)
}

fn gone() -> LockError {
    LockError::new(ErrorCode::ServiceUnavailable)
        .with_message("the connection that listens is closed: it is opened again")
}

fn shared_sessions() -> LockError {
    LockError::invalid("a pooler in transaction or statement mode stands before the server")
}

fn deaf() -> LockError {
    LockError::invalid("a notification from one session does not arrive in another")
}

/// Whether listening cannot work with this server: a pooler, a standby, a server that knows none of
/// this, a role that may not.
pub(crate) fn cannot_work_here(error: &LockError) -> bool {
    match error.sqlstate() {
        Some(state) => matches!(state, "25006" | "0A000" | "42501" | "42883" | "42601"),
        None => error.code() == ErrorCode::InvalidArgument,
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
