//! The two threads that look after the session locks of one client, and what they share with the
//! guards. See the module above for the invariants by number.
//!
//! The *monitor* keeps the time: deadlines, and servers that have been silent for too long. It never
//! does I/O, so nothing that a network does can keep it from firing a token. The *session thread*
//! talks to the server: it looks at the connections, asks, and lets locks go for others.
//!
//! One mutex, the board, held for a few map operations; a hold's own state is never locked under it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::advisory::hold::{Hold, Taken};
use crate::advisory::queue::Queue;
use crate::advisory::sql::Statements;
use crate::advisory::{AdvisoryLost, monitor, session};
use crate::error::{ErrorCode, LockError, Result};
use crate::model::time::{Clock, Moment};
use crate::postgres::{Connection, PostgresBackend};
use crate::threads;

/// How long the threads stay when the last guard is gone, so that a row of short locks does not
/// start them again and again.
pub(super) const LINGER: Duration = Duration::from_secs(1);

/// How much later than the guard's own deadline the server's timer ends the session.
pub(super) const SERVER_GRACE: Duration = Duration::from_secs(1);

pub(super) type Held = Hold<Connection>;

pub(super) struct Crew {
    pub(super) clock: Clock,
    pub(super) queue: Arc<Queue>,
    /// How long letting go may take when nobody said otherwise.
    pub(super) limit: Duration,
    pub(super) statements: Statements,
    /// Where the connections are from; a guard may outlive it.
    pub(super) postgres: Weak<PostgresBackend>,
    board: Mutex<Board>,
    pub(super) monitor_bell: Condvar,
    pub(super) session_bell: Condvar,
    pub(super) progress: Condvar,
}

#[derive(Default)]
pub(super) struct Board {
    pub(super) holds: HashMap<u64, Arc<Held>>,
    /// Ended locks whose connection the session thread is to let go.
    pub(super) jobs: VecDeque<Arc<Held>>,
    /// Calls that may come back with a lock.
    visitors: usize,
    next_id: u64,
    pub(super) monitor_runs: bool,
    pub(super) session_runs: bool,
    pub(super) stage: Stage,
    /// Rises with everything that the monitor must look at.
    pub(super) changes: u64,
    /// When the monitor looks again by itself, while it sleeps.
    pub(super) monitor_until: Option<Moment>,
    /// How long the last round of pings took.
    pub(super) round: Duration,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Stage {
    #[default]
    Open,
    /// The client is gone: no lock will come any more, and idle threads need not wait for one.
    Left,
    /// Closed: no lock may come any more.
    Closed,
}

impl Crew {
    pub(super) fn new(limit: Duration, postgres: Weak<PostgresBackend>) -> Arc<Self> {
        Arc::new(Self {
            clock: Clock::system(),
            queue: Arc::default(),
            limit,
            statements: Statements::new(),
            postgres,
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
        if self.board().stage == Stage::Closed { Err(LockError::closed()) } else { Ok(()) }
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
        if board.stage == Stage::Closed {
            return Err(LockError::closed());
        }
        if !board.monitor_runs {
            self.spawn("syncguard-monitor", monitor::run)?;
            board.monitor_runs = true;
        }
        self.start_session_thread(&mut board)?;
        board.holds.insert(hold.id, Arc::clone(hold));
        board.changes += 1;
        // Both threads look often enough by themselves, and to wake two threads for each short lock
        // would cost more than the lock. Only an early deadline cannot wait for that.
        let early = board.monitor_until.is_some_and(|until| hold.deadline < until);
        drop(board);
        if early {
            self.monitor_bell.notify_all();
        }
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
        self.submit(hold);
        match reason {
            Some(AdvisoryLost::Closed) | None => {}
            Some(reason) => log::warn!("the session lock {} is lost: {reason}", hold.key),
        }
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
    pub(super) fn timer(&self, hold: &Held) -> Option<Duration> {
        (!hold.keep).then(|| hold.deadline.since(self.clock.now()) + SERVER_GRACE)
    }

    /// No more guards will come.
    pub(super) fn leave(&self) {
        {
            let mut board = self.board();
            if board.stage == Stage::Open {
                board.stage = Stage::Left;
            }
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
            board.stage = Stage::Closed;
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
            self.spawn("syncguard-session", session::run)?;
            board.session_runs = true;
        }
        Ok(())
    }

    fn spawn(self: &Arc<Self>, name: &str, run: fn(&Arc<Self>)) -> Result<()> {
        let crew = Arc::clone(self);
        threads::spawn(name, move || run(&crew)).map(drop).map_err(|cause| {
            LockError::new(ErrorCode::Internal)
                .with_message("the system gave no thread to look after the session lock with")
                .with_source(cause)
        })
    }

    pub(super) fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that may come back with a lock.
pub(super) struct Visit<'a>(&'a Crew);

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        let mut board = self.0.board();
        board.visitors -= 1;
        let awaited = board.visitors == 0 && board.stage == Stage::Closed;
        drop(board);
        if awaited {
            self.0.progress.notify_all();
        }
    }
}
