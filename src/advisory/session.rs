//! The session thread: all of the I/O that no caller does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::advisory::crew::{Crew, Held, LINGER, Stage};
use crate::advisory::hold::{After, Taken};
use crate::advisory::{AdvisoryLost, sql};
use crate::backend::ReleaseResult;
use crate::cancel::CancelToken;
use crate::error::Result;
use crate::model::time::{Moment, deadline_after};
use crate::postgres::{Connection, Session, Trouble};
use crate::threads::{contained, hand_over};

/// How often each connection is looked at, without asking the server anything.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How long after its last answer a session is asked for another.
const PING_EVERY: Duration = Duration::from_secs(3);

/// How many timers are stopped at a time.
const MOST_TIMERS: usize = 256;

/// How long it may take to answer.
const PING_LIMIT: Duration = Duration::from_secs(5);

/// Lets a lock go: the connection goes back only after an unlock that answered "true" on the very
/// session that holds it; otherwise it is closed, which ends the lock as well.
pub(super) fn let_go(
    crew: &Crew,
    hold: &Held,
    connection: Connection,
    limit: Duration,
) -> Result<ReleaseResult> {
    let never = CancelToken::never();
    let mut session = Session::new(connection, deadline_after(limit), &never);
    let answer = sql::unlock(&mut session, &crew.statements, &hold.key, hold.shared);
    let result = match answer {
        Ok((pid, true)) if pid == hold.pid => {
            session.finish();
            Ok(ReleaseResult::Released)
        }
        Ok(_) => {
            log::warn!(
                "the session lock {} was not held any more when it was let go; its connection is closed",
                hold.key
            );
            drop(session);
            Ok(ReleaseResult::NotHeld)
        }
        // The session has ended, and the lock with it.
        Err(Trouble::Broken { error, stale: true, .. }) => {
            log::warn!("the session lock {} was lost with its session: {}", hold.key, error.chain());
            drop(session);
            Ok(ReleaseResult::NotHeld)
        }
        Err(trouble) => {
            drop(session);
            Err(trouble.into_error())
        }
    };
    crew.queue.freed(hold.key);
    result
}

/// The session thread: all I/O that no caller does.
pub(super) fn run(crew: &Arc<Crew>) {
    let mut idle_since = None;
    let mut timers_stopped = false;
    let mut next_look = crew.clock.now().after(LOOK_EVERY);
    loop {
        run_jobs(crew);
        let mut board = crew.board();
        if !board.jobs.is_empty() {
            continue;
        }
        if board.holds.is_empty() {
            let since = *idle_since.get_or_insert_with(Instant::now);
            let rest = LINGER.saturating_sub(since.elapsed());
            if rest.is_zero() && !timers_stopped && board.stage == Stage::Open {
                drop(board);
                let _ = contained(|| stop_timers(crew));
                // A lock may have come meanwhile.
                timers_stopped = true;
                continue;
            }
            if board.stage != Stage::Open || rest.is_zero() {
                board.session_runs = false;
                crew.progress.notify_all();
                return;
            }
            // A lock that comes does not ring: this thread looks as often as it would at that lock.
            drop(crew.session_bell.wait_timeout(board, rest.min(LOOK_EVERY)));
            continue;
        }
        idle_since = None;
        timers_stopped = false;
        let rest = next_look.since(crew.clock.now());
        if !rest.is_zero() {
            drop(crew.session_bell.wait_timeout(board, rest));
            continue;
        }
        let holds: Vec<_> = board.holds.values().cloned().collect();
        drop(board);
        look_at_all(crew, &holds);
        next_look = crew.clock.now().after(LOOK_EVERY);
    }
}

/// Stops the timers that run on idle connections: no lock has come for a while, and the server would
/// end those sessions, and say so in its log.
fn stop_timers(crew: &Crew) {
    let Some(postgres) = crew.postgres.upgrade() else { return };
    let never = CancelToken::never();
    // As many as a pool can have, in case that others use them at the same time.
    for _ in 0..MOST_TIMERS {
        let Some(connection) = postgres.source().take_timed() else { return };
        let Some(connection) = answering(connection, PING_LIMIT) else { continue };
        let mut session = Session::new(connection, deadline_after(PING_LIMIT), &never);
        match sql::stop_timer(&mut session) {
            Ok(()) => session.finish(),
            Err(trouble) => log::debug!("an idle session broke: {}", trouble.into_error().chain()),
        }
    }
}

fn look_at_all(crew: &Arc<Crew>, holds: &[Arc<Held>]) {
    let start = Instant::now();
    let mut asked = false;
    for hold in holds {
        asked |= contained(|| look(crew, hold)).unwrap_or(true);
        // Somebody's lock is to be let go: that does not wait for the round.
        run_jobs(crew);
    }
    if asked {
        crew.board().round = start.elapsed();
    }
}

fn run_jobs(crew: &Arc<Crew>) {
    loop {
        let hold = {
            let mut board = crew.board();
            let Some(hold) = board.jobs.pop_front() else { return };
            hold
        };
        let _ = contained(|| {
            if let Taken::Connection(connection) = hold.take(Duration::ZERO) {
                let_go_quietly(crew, &hold, connection);
            }
        });
    }
}

fn let_go_quietly(crew: &Crew, hold: &Held, connection: Connection) {
    let connection = if hold.lost_reason() == Some(AdvisoryLost::Connection) {
        discard(connection);
        None
    } else {
        answering(connection, crew.limit)
    };
    match connection.map(|connection| let_go(crew, hold, connection, crew.limit)) {
        None => crew.queue.freed(hold.key),
        Some(Ok(_)) => {}
        Some(Err(error)) => {
            log::warn!("the session lock {} ends with its connection: {}", hold.key, error.chain());
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
/// that is silent that may take for ever.
fn discard(mut connection: Connection) {
    if connection.is_guarded() {
        return connection.discard();
    }
    hand_over(connection, drop);
}

/// Looks at one lock's connection. Whether the server was asked.
fn look(crew: &Arc<Crew>, hold: &Arc<Held>) -> bool {
    let Some(connection) = hold.lend() else { return false };
    let mut loan = Loan { crew, hold, connection: None, confirmed: None };
    let due = crew.clock.now().since(hold.confirmed()) >= PING_EVERY;
    (loan.connection, loan.confirmed) = inspect(crew, hold, connection, due);
    due
}

/// The connection, unless it is broken, and when it answered.
fn inspect(
    crew: &Crew,
    hold: &Held,
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
    match sql::ping(&mut session, crew.timer(hold)) {
        Ok(pid) if pid == hold.pid => (session.into_connection(), Some(crew.clock.now())),
        // Another server process answers: a pooler has come between, and the lock is elsewhere.
        Ok(_) => (None, None),
        Err(trouble) => {
            log::debug!("the session of lock {} broke: {}", hold.key, trouble.into_error().chain());
            (None, None)
        }
    }
}

/// A lent connection, settled also when the check panics.
struct Loan<'a> {
    crew: &'a Arc<Crew>,
    hold: &'a Arc<Held>,
    connection: Option<Connection>,
    confirmed: Option<Moment>,
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        match self.hold.settle(self.connection.take(), self.confirmed) {
            After::Nothing => {}
            After::Lost => self.crew.tell_lost(self.hold),
            After::LetGo(connection) => let_go_quietly(self.crew, self.hold, connection),
        }
    }
}
