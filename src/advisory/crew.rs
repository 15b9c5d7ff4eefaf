//! The two threads that look after the session locks of one client, and what they share with the
//! guards. See the module above for the invariants by number.
//!
//! The *monitor* keeps the time: deadlines, and servers that have been silent for too long. It never
//! does I/O, so nothing that a network does can keep it from firing a token. The *session thread*
//! talks to the server: it looks at the connections, asks, and lets locks go for others.
//!
//! One mutex, the board, held for a few map operations; a hold's own state is never locked under it.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::advisory::hold::{After, Hold, Taken};
use crate::advisory::queue::Queue;
use crate::advisory::{AdvisoryLost, sql};
use crate::backend::ReleaseResult;
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::model::time::{Clock, Moment};
use crate::postgres::{Connection, Session};

/// How often each connection is looked at, without asking the server anything.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How long after its last answer a session is asked for another.
const PING_EVERY: Duration = Duration::from_secs(3);

/// How long it may take to answer.
const PING_LIMIT: Duration = Duration::from_secs(5);

/// How long a session may be silent before its lock counts as lost, whatever the session thread does.
const PATIENCE: Duration = Duration::from_secs(10);

/// The monitor looks at the clock this often: a sleep stands still while the host is suspended.
const NAP: Duration = Duration::from_millis(500);

/// How long the threads stay when the last guard is gone, so that a row of short locks does not
/// start them again and again.
const LINGER: Duration = Duration::from_secs(1);

/// How much later than the guard's own deadline the server's timer ends the session.
pub(super) const SERVER_GRACE: Duration = Duration::from_secs(1);

pub(super) type Held = Hold<Connection>;

pub(super) struct Crew {
    pub(super) clock: Clock,
    pub(super) queue: Arc<Queue>,
    /// How long letting go may take when nobody said otherwise.
    pub(super) limit: Duration,
    board: Mutex<Board>,
    monitor_bell: Condvar,
    session_bell: Condvar,
    progress: Condvar,
}

#[derive(Default)]
struct Board {
    holds: HashMap<u64, Arc<Held>>,
    /// Ended locks whose connection the session thread is to let go.
    jobs: VecDeque<Arc<Held>>,
    in_hand: usize,
    /// Calls that may come back with a lock.
    visitors: usize,
    next_id: u64,
    monitor_runs: bool,
    session_runs: bool,
    closed: bool,
    /// The client is gone: nobody comes any more.
    over: bool,
    /// Rises with everything that the monitor must look at.
    changes: u64,
    /// How long the last round of pings took.
    round: Duration,
}

impl Board {
    /// Whether threads with nothing to do should leave at once.
    fn is_leaving(&self) -> bool {
        self.over || self.closed
    }
}

impl Crew {
    pub(super) fn new(limit: Duration) -> Arc<Self> {
        Arc::new(Self {
            clock: Clock::system(),
            queue: Arc::default(),
            limit,
            board: Mutex::default(),
            monitor_bell: Condvar::new(),
            session_bell: Condvar::new(),
            progress: Condvar::new(),
        })
    }

    /// Notes a call that may come back with a lock; closing waits for it.
    pub(super) fn enter(&self) -> Result<Visit<'_>> {
        self.board().visitors += 1;
        let visit = Visit(self);
        self.check_open().map(|()| visit)
    }

    pub(super) fn check_open(&self) -> Result<()> {
        if self.board().closed { Err(closed()) } else { Ok(()) }
    }

    /// A number for a new hold.
    pub(super) fn next_id(&self) -> u64 {
        let mut board = self.board();
        board.next_id += 1;
        board.next_id
    }

    /// Takes a lock into the crew's care, and starts the threads if they do not run.
    pub(super) fn enlist(self: &Arc<Self>, hold: &Arc<Held>) -> Result<()> {
        let mut board = self.board();
        if board.closed {
            return Err(closed());
        }
        if !board.monitor_runs {
            self.spawn("syncguard-monitor", monitor)?;
            board.monitor_runs = true;
        }
        self.start_session_thread(&mut board)?;
        board.holds.insert(hold.id, Arc::clone(hold));
        board.changes += 1;
        drop(board);
        self.monitor_bell.notify_all();
        self.session_bell.notify_all();
        Ok(())
    }

    /// Forgets a lock that its holder has ended.
    pub(super) fn dismiss(&self, hold: &Held) {
        let gone = self.board().holds.remove(&hold.id);
        drop(gone);
    }

    /// Tells the holder of a lock that was just marked as lost, and has its connection let go.
    pub(super) fn tell_lost(self: &Arc<Self>, hold: &Arc<Held>) {
        self.dismiss(hold);
        let reason = hold.lost_reason();
        if reason == Some(AdvisoryLost::Deadline) {
            hold.overdue.cancel();
        }
        hold.lost.cancel();
        if let Some(reason) = reason {
            log::warn!("the session lock {} is lost: {reason}", hold.key);
        }
        self.submit(hold);
    }

    /// Leaves the connection of an ended lock to the session thread.
    pub(super) fn submit(self: &Arc<Self>, hold: &Arc<Held>) {
        let started = {
            let mut board = self.board();
            let started = self.start_session_thread(&mut board);
            if started.is_ok() {
                board.jobs.push_back(Arc::clone(hold));
            }
            started
        };
        self.session_bell.notify_all();
        if started.is_err() {
            // No thread to be had: closing the connection frees the lock as well.
            if let Taken::Connection(connection) = hold.take(Duration::ZERO) {
                connection.discard();
            }
        }
    }

    /// Marks the lock as lost if its time is over. Called by everybody who looks at it.
    pub(super) fn tick(self: &Arc<Self>, hold: &Arc<Held>) {
        if hold.is_over(self.clock.now()) && hold.lose(AdvisoryLost::Deadline) {
            self.tell_lost(hold);
        }
    }

    /// The time that is left for the server's timer; `None` for no limit.
    fn timer(&self, hold: &Held) -> Option<Duration> {
        (!hold.keep).then(|| hold.deadline.since(self.clock.now()) + SERVER_GRACE)
    }

    /// No more guards will come.
    pub(super) fn leave(&self) {
        {
            let mut board = self.board();
            board.over = true;
            board.changes += 1;
        }
        self.monitor_bell.notify_all();
        self.session_bell.notify_all();
    }

    /// Ends every lock of this client. Whether nothing of them was left in time.
    pub(super) fn close(self: &Arc<Self>, limit: Duration) -> bool {
        let start = Instant::now();
        let holds = {
            let mut board = self.board();
            board.closed = true;
            board.changes += 1;
            std::mem::take(&mut board.holds)
        };
        self.queue.call_all();
        for hold in holds.values() {
            if hold.lose(AdvisoryLost::Closed) {
                self.tell_lost(hold);
            }
        }
        self.monitor_bell.notify_all();
        self.session_bell.notify_all();
        let mut board = self.board();
        while board.visitors > 0 || board.monitor_runs || board.session_runs {
            let rest = limit.saturating_sub(start.elapsed());
            if rest.is_zero() {
                return false;
            }
            board = self.progress.wait_timeout(board, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    fn start_session_thread(self: &Arc<Self>, board: &mut Board) -> Result<()> {
        if !board.session_runs {
            self.spawn("syncguard-session", session_thread)?;
            board.session_runs = true;
        }
        Ok(())
    }

    fn spawn(self: &Arc<Self>, name: &str, run: fn(&Arc<Self>)) -> Result<()> {
        let crew = Arc::clone(self);
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || run(&crew));
        thread.map(drop).map_err(|cause| {
            LockError::new(ErrorCode::Internal)
                .with_message("the system gave no thread to look after the session lock with")
                .with_source(cause)
        })
    }

    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lets a lock go: the connection goes back only after an unlock that answered "true" on the very
/// session that holds it; otherwise it is closed, which ends the lock as well.
pub(super) fn let_go(
    crew: &Crew,
    hold: &Held,
    connection: Connection,
    limit: Duration,
) -> Result<ReleaseResult> {
    let never = CancelToken::never();
    let now = Instant::now();
    let end = now.checked_add(limit).unwrap_or(now + Duration::from_secs(3600));
    let mut session = Session::new(connection, end, &never);
    let answer = sql::unlock(&mut session, &hold.key, hold.shared, hold.before.as_deref());
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
        Err(trouble) => {
            drop(session);
            Err(trouble.into_error())
        }
    };
    crew.queue.freed(hold.key);
    result
}

/// A call that may come back with a lock.
pub(super) struct Visit<'a>(&'a Crew);

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        self.0.board().visitors -= 1;
        self.0.progress.notify_all();
    }
}

fn closed() -> LockError {
    LockError::new(ErrorCode::Aborted).with_message("the client is closed")
}

/// The monitor: no I/O in here.
fn monitor(crew: &Arc<Crew>) {
    let mut idle_since = None;
    loop {
        let (holds, patience, changes): (Vec<_>, _, _) = {
            let mut board = crew.board();
            if board.holds.is_empty() {
                let since = *idle_since.get_or_insert_with(Instant::now);
                let rest = LINGER.saturating_sub(since.elapsed());
                if board.is_leaving() || rest.is_zero() {
                    board.monitor_runs = false;
                    crew.progress.notify_all();
                    return;
                }
                drop(crew.monitor_bell.wait_timeout(board, rest));
                continue;
            }
            (
                board.holds.values().cloned().collect(),
                PATIENCE.max(board.round.saturating_mul(3)),
                board.changes,
            )
        };
        idle_since = None;
        let next = holds.iter().map(|hold| watch(crew, hold, patience)).min().unwrap_or(Moment::NEVER);
        drop(holds);
        let board = crew.board();
        let nap = next.since(crew.clock.now()).min(NAP);
        // A lock that came meanwhile rang before this thread slept.
        if board.changes == changes && !nap.is_zero() {
            drop(crew.monitor_bell.wait_timeout(board, nap));
        }
    }
}

/// Looks at one lock; when to look again.
fn watch(crew: &Arc<Crew>, hold: &Arc<Held>, patience: Duration) -> Moment {
    let now = crew.clock.now();
    crew.tick(hold);
    if hold.is_silent(now, patience) && hold.lose(AdvisoryLost::Connection) {
        crew.tell_lost(hold);
    }
    if now < hold.deadline {
        return hold.deadline;
    }
    if hold.keep && !hold.overdue.is_cancelled() {
        log::warn!("the session lock {} is held beyond its max_hold, and kept", hold.key);
        hold.overdue.cancel();
    }
    Moment::NEVER
}

/// The session thread: all I/O that no caller does.
fn session_thread(crew: &Arc<Crew>) {
    let mut idle_since = None;
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
            if board.is_leaving() || rest.is_zero() {
                board.session_runs = false;
                crew.progress.notify_all();
                return;
            }
            drop(crew.session_bell.wait_timeout(board, rest));
            continue;
        }
        idle_since = None;
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
            board.in_hand += 1;
            hold
        };
        let _ = contained(|| {
            if let Taken::Connection(connection) = hold.take(Duration::ZERO) {
                let_go_quietly(crew, &hold, connection);
            }
        });
        // Dropped before anybody hears that it is done.
        drop(hold);
        crew.board().in_hand -= 1;
        crew.progress.notify_all();
    }
}

fn let_go_quietly(crew: &Crew, hold: &Held, mut connection: Connection) {
    if hold.lost_reason() == Some(AdvisoryLost::Connection) {
        if connection.is_guarded() {
            connection.discard();
        } else {
            discard_elsewhere(connection);
        }
        crew.queue.freed(hold.key);
    } else if let Err(error) = let_go(crew, hold, connection, crew.limit) {
        log::warn!("the session lock {} ends with its connection: {}", hold.key, error.chain());
    }
}

/// Closing a connection whose server is silent may take for ever where no deadline of ours guards it.
fn discard_elsewhere(connection: Connection) {
    let slot = Arc::new(Mutex::new(Some(connection)));
    let there = Arc::clone(&slot);
    let closing = thread::Builder::new().name("syncguard-close".to_owned());
    let spawned = closing.spawn(move || drop(there.lock().unwrap_or_else(PoisonError::into_inner).take()));
    if spawned.is_err() {
        if let Some(connection) = slot.lock().unwrap_or_else(PoisonError::into_inner).take() {
            connection.abandon();
        }
    }
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
    if !connection.is_guarded() && !connection.answers_within(PING_LIMIT) {
        discard_elsewhere(connection);
        return (None, None);
    }
    let never = CancelToken::never();
    let mut session = Session::new(connection, Instant::now() + PING_LIMIT, &never);
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

/// Runs something on a background thread, which must survive its panic.
fn contained<R>(call: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(value) => Some(value),
        Err(payload) => {
            // A payload's own Drop may panic as well.
            std::mem::forget(payload);
            None
        }
    }
}
