//! The session thread: all of the I/O that no caller does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::advisory::held_lock::{AdvisoryLost, AfterCheck, Taken};
use crate::advisory::registry::{ClientLock, LINGER, Registry, Stage};
use crate::advisory::sql;
use crate::advisory::unlock::unlock;
use crate::cancel::CancelToken;
use crate::model::time::{Moment, deadline_after};
use crate::pg::{Connection, Session};
use crate::threads::{catch_panic, run_detached};

/// How often each connection is checked, without asking the server anything.
const CHECK_EVERY: Duration = Duration::from_millis(500);

/// How long after its last answer a session is asked for another.
const PING_EVERY: Duration = Duration::from_secs(3);

/// How long it may take to answer.
const PING_LIMIT: Duration = Duration::from_secs(5);

/// How many timers are stopped at a time.
const MOST_TIMERS: usize = 256;

/// The session thread: all I/O that no caller does.
pub(super) fn run(registry: &Arc<Registry>) {
    let mut idle_since = None;
    let mut timers_stopped = false;
    let mut next_check = registry.clock.now().after(CHECK_EVERY);
    loop {
        unlock_all(registry);
        let mut state = registry.state();
        if !state.to_unlock.is_empty() {
            continue;
        }
        if state.locks.is_empty() {
            let since = *idle_since.get_or_insert_with(Instant::now);
            let rest = LINGER.saturating_sub(since.elapsed());
            if rest.is_zero() && !timers_stopped && state.stage == Stage::Open {
                drop(state);
                let _ = catch_panic(|| stop_timers(registry));
                // A lock may have come meanwhile.
                timers_stopped = true;
                continue;
            }
            if state.stage != Stage::Open || rest.is_zero() {
                state.session_thread_runs = false;
                registry.ended.notify_all();
                return;
            }
            // A new lock does not wake this thread: it looks as often as a lock's checks are due.
            drop(registry.wake_session_thread.wait_for(state, rest.min(CHECK_EVERY)));
            continue;
        }
        idle_since = None;
        timers_stopped = false;
        let rest = next_check.since(registry.clock.now());
        if !rest.is_zero() {
            drop(registry.wake_session_thread.wait_for(state, rest));
            continue;
        }
        let locks: Vec<_> = state.locks.values().cloned().collect();
        drop(state);
        check_all(registry, &locks);
        next_check = registry.clock.now().after(CHECK_EVERY);
    }
}

/// Stops the timers that run on idle connections: no lock has come for a while, and the server would
/// end those sessions, and say so in its log.
fn stop_timers(registry: &Registry) {
    let Some(database) = registry.database.upgrade() else { return };
    let never = CancelToken::never();
    // As many as a pool can have, in case that others use them at the same time.
    for _ in 0..MOST_TIMERS {
        let Some(connection) = database.source().take_timed() else { return };
        let Some(connection) = answering(connection, PING_LIMIT) else { continue };
        let mut session = Session::new(connection, deadline_after(PING_LIMIT), &never);
        match sql::stop_timer(&mut session) {
            Ok(()) => session.finish(),
            Err(failure) => log::debug!("an idle session broke: {}", failure.into_error().chain()),
        }
    }
}

fn check_all(registry: &Arc<Registry>, locks: &[Arc<ClientLock>]) {
    let start = Instant::now();
    let mut asked = false;
    for lock in locks {
        asked |= catch_panic(|| check(registry, lock)).unwrap_or(true);
        // A lock is to be unlocked: that does not wait for the round.
        unlock_all(registry);
    }
    if asked {
        registry.state().ping_round = start.elapsed();
    }
}

fn unlock_all(registry: &Arc<Registry>) {
    loop {
        let next = registry.state().to_unlock.pop_front();
        let Some(lock) = next else { return };
        let _ = catch_panic(|| {
            if let Taken::Connection(connection) = lock.take(Duration::ZERO) {
                unlock_quietly(registry, &lock, connection);
            }
        });
    }
}

fn unlock_quietly(registry: &Registry, lock: &ClientLock, connection: Connection) {
    let connection = if lock.lost_reason() == Some(AdvisoryLost::Connection) {
        discard(connection);
        None
    } else {
        answering(connection, registry.limit)
    };
    match connection.map(|connection| unlock(registry, lock, connection, registry.limit)) {
        None => registry.queue.freed(&lock.key),
        Some(Ok(_)) => {}
        Some(Err(error)) => {
            log::warn!("the session lock {} ends with its connection: {}", lock.key, error.chain());
        }
    }
}

/// The connection, if its server answers or our own deadline ends each wait for it: this thread serves
/// all locks of the client, and does not wait without a limit for one of them. Otherwise it is closed.
fn answering(mut connection: Connection, limit: Duration) -> Option<Connection> {
    if connection.is_guarded() || connection.answers_within(limit) {
        return Some(connection);
    }
    discard(connection);
    None
}

/// Closes a connection: on a thread of its own where no deadline of ours guards it, for with a server
/// that is silent that may take forever.
fn discard(mut connection: Connection) {
    if connection.is_guarded() {
        return connection.discard();
    }
    run_detached(connection, drop);
}

/// Checks one lock's connection. Whether the server was asked.
fn check(registry: &Arc<Registry>, lock: &Arc<ClientLock>) -> bool {
    let Some(connection) = lock.borrow() else { return false };
    let mut borrowed = BorrowedConnection { registry, lock, connection: None, confirmed: None };
    let due = registry.clock.now().since(lock.confirmed()) >= PING_EVERY;
    (borrowed.connection, borrowed.confirmed) = inspect(registry, lock, connection, due);
    due
}

/// The connection, unless it is broken, and when it answered.
fn inspect(
    registry: &Registry,
    lock: &ClientLock,
    mut connection: Connection,
    due: bool,
) -> (Option<Connection>, Option<Moment>) {
    if !connection.is_open() {
        return (None, None);
    }
    if !due {
        return (Some(connection), None);
    }
    let Some(connection) = answering(connection, PING_LIMIT) else { return (None, None) };
    let never = CancelToken::never();
    let mut session = Session::new(connection, deadline_after(PING_LIMIT), &never);
    match sql::ping(&mut session, registry.session_timer(lock)) {
        Ok(pid) if pid == lock.pid => (session.take_connection(), Some(registry.clock.now())),
        // Another server process answers: a pooler has come between, and the lock is elsewhere.
        Ok(_) => (None, None),
        Err(failure) => {
            log::debug!("the session of lock {} broke: {}", lock.key, failure.into_error().chain());
            (None, None)
        }
    }
}

/// A connection that a check has borrowed; given back also when the check panics.
struct BorrowedConnection<'a> {
    registry: &'a Arc<Registry>,
    lock: &'a Arc<ClientLock>,
    connection: Option<Connection>,
    confirmed: Option<Moment>,
}

impl Drop for BorrowedConnection<'_> {
    fn drop(&mut self) {
        match self.lock.give_back(self.connection.take(), self.confirmed) {
            AfterCheck::Nothing => {}
            AfterCheck::Lost => self.registry.report_lost(self.lock),
            AfterCheck::Unlock(connection) => unlock_quietly(self.registry, self.lock, connection),
        }
    }
}
