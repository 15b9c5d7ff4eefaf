//! Calls between processes: a release calls those who wait for the key elsewhere, if there are any.
//!
//! A client with a waiter that has waited for a while *listens*: on one connection of its own it does
//! `LISTEN` once, and holds a **shared** advisory lock on the key's number, in a class of its own,
//! which says no more than "somebody listens for this key". A release tries the same lock
//! **exclusively**, in the statement that deletes the row: if it gets it, nobody listens and nothing
//! is sent (a notification has all commits of a database wait in line, so it is not to be had for
//! nothing); if not, it notifies
//! (<https://www.postgresql.org/docs/current/sql-notify.html>).
//!
//! 1. Latency, never correctness: with the listener dead, mute or never opened, everything works as
//!    without it, by looking.
//! 2. Nobody waits for anybody: both sides *try*. A listener that is refused has met a release under
//!    way, and tries again.
//! 3. No release falls between: a release whose try came before the registration keeps its lock
//!    until its transaction has ended, so a look after the registration sees the key free; one whose
//!    try comes after it notifies. Therefore a watcher is told [`Heard::Listening`] when its key is
//!    registered, and looks.
//! 4. A notification carries a number, never a key. Two keys with one number, and a process that is
//!    gone or stopped and is still registered, cost needless calls.
//! 5. Before anything is taken or listened for, two sessions must have shown that they keep to their
//!    server processes: behind a pooler that shares sessions, both would stay with a stranger. Then
//!    the one must hear the other's call. Where that fails there is only looking.
//! 6. The thread opens, registers and listens; it alone uses the connection. It ends when nobody has
//!    watched for [`IDLE`], or with the client: the token that says so cuts the connection, whatever
//!    the server does.
//! 7. No mutex is held while the server is asked or a watcher is called.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use postgres::fallible_iterator::FallibleIterator as _;

use crate::backend::{Heard, OnHeard, Watch};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::model::lock_id::LockId;
use crate::postgres::connect::Connector;
use crate::postgres::error::Trouble;
use crate::postgres::pool::Pool;
use crate::postgres::processes::{Asked, ROUNDS};
use crate::postgres::row::{flag, int, malformed, required};
use crate::postgres::session::{Answers, Session};
use crate::postgres::source::Connection;
use crate::postgres::statement::{Message, push_quoted};

/// The channel of the notifications.
const CHANNEL: &str = "syncguard_wake";

/// The class of the advisory locks, "sgwk".
const CLASS: i32 = 0x7367_776B;

/// The most keys that one client listens for: each takes a place in the server's table of locks.
const MAX_KEYS: usize = 256;

/// How long a key stays registered after its last watcher has gone: the next is often there already.
const LINGER: Duration = Duration::from_millis(250);

/// How long the connection is kept while nobody watches anything.
const IDLE: Duration = Duration::from_secs(5);

/// How long the thread listens before it looks what else there is to do.
const SLICE: Duration = Duration::from_millis(50);

/// The same while a key waits to be registered that was refused a moment ago.
const SHORT_SLICE: Duration = Duration::from_millis(2);

/// How long a failure keeps the thread from the next attempt, at first and at most.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The same where calls cannot work: a pooler, a standby, a server without them.
const RETRY_ELSEWHERE: Duration = Duration::from_secs(600);

/// How long the proof that calls arrive may take.
const PROOF: Duration = Duration::from_secs(2);

/// How long closing waits for the thread, which has nothing to wait for then.
const CLOSING: Duration = Duration::from_secs(1);

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

/// The watches of one client. Dropping it ends them.
pub(crate) struct Wakes(Arc<Shared>);

struct Shared {
    connector: Connector,
    /// How long one exchange with the server may take.
    limit: Duration,
    process: u32,
    /// Fires when the client ends.
    over: CancelToken,
    desk: Mutex<Desk>,
    ring: Condvar,
}

#[derive(Default)]
struct Desk {
    keys: HashMap<Arc<str>, Entry>,
    next: u64,
    watchers: usize,
    /// Since when there is no watcher.
    idle_since: Option<Instant>,
    running: bool,
    retry_at: Option<Instant>,
}

#[derive(Default)]
struct Entry {
    watchers: Vec<(u64, OnHeard)>,
    /// The key's number, once it is registered.
    number: Option<i32>,
    idle_since: Option<Instant>,
}

/// One watcher's place.
struct Place {
    shared: Arc<Shared>,
    key: Arc<str>,
    id: u64,
}

/// What the thread is to do next.
struct Work {
    register: Vec<Arc<str>>,
    unregister: Vec<i32>,
}

/// Why the thread does not listen any more.
enum Fault {
    /// It may work another time.
    Now(LockError),
    /// It cannot work with this server.
    Elsewhere(LockError),
}

impl Wakes {
    pub(crate) fn new(connector: Connector, operation_timeout: Duration) -> Self {
        Self(Arc::new(Shared {
            connector,
            limit: operation_timeout,
            process: std::process::id(),
            over: CancelToken::new(),
            desk: Mutex::default(),
            ring: Condvar::new(),
        }))
    }

    /// Watches the key that is stored under this name. See [`LockBackend::watch`](crate::LockBackend::watch).
    pub(crate) fn watch(&self, storage_key: &str, heard: &OnHeard) -> Option<Box<dyn Watch>> {
        let shared = &self.0;
        // After a fork the thread is the parent's.
        if shared.process != std::process::id() || shared.over.is_cancelled() {
            return None;
        }
        let key: Arc<str> = storage_key.into();
        let mut desk = shared.desk();
        let resting = desk.retry_at.is_some_and(|at| Instant::now() < at);
        let full = desk.keys.len() >= MAX_KEYS && !desk.keys.contains_key(&key);
        if full || (resting && !desk.running) {
            return None;
        }
        let id = desk.next;
        desk.next += 1;
        desk.watchers += 1;
        desk.idle_since = None;
        let entry = desk.keys.entry(Arc::clone(&key)).or_default();
        entry.watchers.push((id, Arc::clone(heard)));
        entry.idle_since = None;
        let listening = entry.number.is_some();
        let start = !std::mem::replace(&mut desk.running, true);
        drop(desk);
        let place = Place { shared: Arc::clone(shared), key, id };
        if start {
            let there = Arc::clone(shared);
            let thread = std::thread::Builder::new().name("syncguard-wake".into());
            if thread.spawn(move || run(&there)).is_err() {
                shared.desk().running = false;
                return None;
            }
        }
        if listening {
            heard(Heard::Listening);
        }
        Some(Box::new(place))
    }

    /// Ends the thread and its connection, and waits until that is done, but not for long.
    pub(crate) fn close(&self) {
        self.end();
        let end = Instant::now() + CLOSING;
        let mut desk = self.0.desk();
        while desk.running {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                log::debug!("the thread that listens for releases is still busy");
                return;
            }
            desk = self.0.ring.wait_timeout(desk, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn end(&self) {
        if self.0.process == std::process::id() {
            self.0.over.cancel();
            // Taken and let go: the thread is either before its check or in its wait.
            drop(self.0.desk());
            self.0.ring.notify_all();
        }
    }
}

impl Drop for Wakes {
    fn drop(&mut self) {
        self.end();
    }
}

impl Watch for Place {
    fn is_listening(&self) -> bool {
        self.shared.desk().keys.get(&self.key).is_some_and(|entry| entry.number.is_some())
    }
}

impl Drop for Place {
    /// Only the thread unregisters, a moment later.
    fn drop(&mut self) {
        let mut desk = self.shared.desk();
        let now = Instant::now();
        if let Some(entry) = desk.keys.get_mut(&self.key) {
            entry.watchers.retain(|(id, _)| *id != self.id);
            if entry.watchers.is_empty() {
                entry.idle_since = Some(now);
            }
        }
        desk.watchers -= 1;
        if desk.watchers > 0 {
            return;
        }
        desk.idle_since = Some(now);
        if !desk.running {
            desk.keys.clear();
        }
        drop(desk);
        // A thread that waits for the next attempt has nothing to wait for.
        self.shared.ring.notify_all();
    }
}

impl Shared {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is a reason to connect. False if the thread is not needed any more.
    fn wait_until_wanted(&self) -> bool {
        let mut desk = self.desk();
        loop {
            desk.keys.retain(|_, entry| !entry.watchers.is_empty());
            if desk.watchers == 0 || self.over.is_cancelled() {
                desk.running = false;
                drop(desk);
                self.ring.notify_all();
                return false;
            }
            let rest =
                desk.retry_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()));
            if rest.is_zero() {
                return true;
            }
            desk = self.ring.wait_timeout(desk, rest.min(IDLE)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Notes that nothing is registered any more, and when the next attempt may be made.
    fn rest(&self, wait: Option<Duration>) {
        let mut desk = self.desk();
        desk.retry_at = wait.map(|wait| Instant::now() + wait);
        for entry in desk.keys.values_mut() {
            entry.number = None;
        }
    }

    /// What is to be registered and what not any more; `None` when the connection is not needed any more.
    fn work(&self) -> Option<Work> {
        let mut desk = self.desk();
        let now = Instant::now();
        let idle = desk.idle_since.is_some_and(|since| now.saturating_duration_since(since) >= IDLE);
        if idle || self.over.is_cancelled() {
            return None;
        }
        let mut unregister = Vec::new();
        desk.keys.retain(|_, entry| {
            let gone = entry.idle_since.is_some_and(|since| now.saturating_duration_since(since) >= LINGER);
            if gone {
                unregister.extend(entry.number);
            }
            !gone
        });
        let unregistered = desk.keys.iter().filter(|(_, entry)| entry.number.is_none());
        Some(Work { register: unregistered.map(|(key, _)| Arc::clone(key)).collect(), unregister })
    }

    /// Calls the watchers of what was registered. Whether all of it was.
    fn registered(&self, keys: &[Arc<str>], numbers: &[Option<i32>]) -> bool {
        let mut calls = Vec::new();
        {
            let mut desk = self.desk();
            for (key, number) in keys.iter().zip(numbers) {
                // Only the thread takes entries out: what was granted is still in it.
                if let (Some(entry), Some(_)) = (desk.keys.get_mut(key), number) {
                    entry.number = *number;
                    calls.extend(entry.watchers.iter().map(|(_, heard)| Arc::clone(heard)));
                }
            }
        }
        calls.iter().for_each(|heard| heard(Heard::Listening));
        numbers.iter().all(Option::is_some)
    }

    /// Calls the watchers of every key with one of these numbers.
    fn freed(&self, numbers: &HashSet<i32>) {
        let calls: Vec<OnHeard> = {
            let desk = self.desk();
            let heard = |entry: &&Entry| entry.number.is_some_and(|number| numbers.contains(&number));
            let all = desk.keys.values().filter(heard).flat_map(|entry| &entry.watchers);
            all.map(|(_, heard)| Arc::clone(heard)).collect()
        };
        calls.iter().for_each(|heard| heard(Heard::Freed));
    }
}

/// Should a watcher panic, the next one starts a new thread.
struct Ended<'a>(&'a Shared);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.rest(Some(RETRY.1));
            self.0.desk().running = false;
            self.0.ring.notify_all();
        }
    }
}

fn run(shared: &Shared) {
    let _ended = Ended(shared);
    let mut wait = RETRY.0;
    while shared.wait_until_wanted() {
        let outcome = Listener::open(shared).and_then(|mut listener| {
            wait = RETRY.0;
            listener.serve()
        });
        let rest = match outcome {
            Ok(()) => None,
            Err(Fault::Elsewhere(error)) => {
                log::debug!("releases in other processes are not heard here: {}", error.chain());
                Some(RETRY_ELSEWHERE)
            }
            Err(Fault::Now(error)) => {
                log::debug!("releases in other processes are not heard for now: {}", error.chain());
                let longer = (wait * 2).min(RETRY.1);
                Some(std::mem::replace(&mut wait, longer))
            }
        };
        shared.rest(rest);
    }
}

/// The connection that listens, and what is known of it.
struct Listener<'a> {
    shared: &'a Shared,
    connection: Option<Connection>,
    process: i64,
}

impl<'a> Listener<'a> {
    /// Connects, and proves that calls arrive.
    fn open(shared: &'a Shared) -> Result<Self, Fault> {
        let mut listener = Self { shared, connection: Some(connect(shared)?), process: 0 };
        let mut second = Self { shared, connection: Some(connect(shared)?), process: 0 };
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
        let end = Instant::now() + PROOF;
        while !listener.listen(SLICE)?.contains(&number) {
            shared.over.check()?;
            if Instant::now() >= end {
                return Err(deaf());
            }
        }
        listener.unregister(&[number])?;
        second.leave();
        Ok(listener)
    }

    /// Registers, listens and calls, until nobody needs it any more.
    fn serve(&mut self) -> Result<(), Fault> {
        let mut slice = SLICE;
        while let Some(work) = self.shared.work() {
            if !work.unregister.is_empty() {
                self.unregister(&work.unregister)?;
            }
            if !work.register.is_empty() {
                let numbers = self.register(&work.register)?;
                let all = self.shared.registered(&work.register, &numbers);
                slice = if all { SLICE } else { SHORT_SLICE };
            }
            let numbers = self.listen(slice)?;
            self.shared.freed(&numbers);
        }
        // It says goodbye by itself, and its session takes what is registered with it.
        self.leave();
        Ok(())
    }

    /// The numbers that were called within so much time, from the first call on at once.
    fn listen(&mut self, limit: Duration) -> Result<HashSet<i32>, Fault> {
        let connection = self.connection.as_mut().ok_or_else(gone)?;
        let link = connection.link().cloned();
        let cut = link.clone();
        let _watch = self.shared.over.subscribe(move || {
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
    fn register(&mut self, keys: &[Arc<str>]) -> Result<Vec<Option<i32>>, Fault> {
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

    fn unregister(&mut self, numbers: &[i32]) -> Result<(), Fault> {
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
        let mut session = Session::new(connection, Instant::now() + self.shared.limit, &self.shared.over);
        let message = Message::new().raw(session.limits()).raw(sql).raw("SELECT pg_catalog.pg_backend_pid()");
        let answers = session.ask(&message);
        if answers.is_ok() {
            self.connection = session.into_connection();
        }
        answers.map_err(Trouble::into_error).map_err(Fault::from)
    }

    /// Closes a connection that is in order.
    fn leave(&mut self) {
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
fn connect(shared: &Shared) -> Result<Connection, Fault> {
    let pool = Pool::new(shared.connector.clone(), 1, shared.limit);
    Ok(pool.get(Instant::now() + shared.limit, &shared.over).map(Connection::Own)?)
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
