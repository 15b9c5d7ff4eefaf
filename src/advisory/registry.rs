//! The session locks that one client holds, and what the two threads that look after them share with
//! the guards. See the module above for the invariants by number.
//!
//! The *monitor* keeps the time: deadlines, and servers that have been silent for too long. It never
//! does I/O, so nothing that a network does can keep it from firing a token. The *session thread*
//! talks to the server: it looks at the connections, asks, and unlocks for others.
//!
//! One mutex, held for a few map operations; a lock's own state is never locked under it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::advisory::held_lock::{AdvisoryLost, HeldLock, Taken};
use crate::advisory::key::AdvisoryKey;
use crate::advisory::sql::Statements;
use crate::error::{ErrorCode, LockError, Result};
use crate::model::time::{Clock, Moment};
use crate::pg::{Connection, Database};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::threads;
use crate::waiting::WaiterQueue;

/// How long the threads stay when the last guard is gone, so that a row of short locks does not
/// start them again and again.
pub(super) const LINGER: Duration = Duration::from_secs(1);

/// How much later than the guard's own deadline the server's timer ends the session.
pub(super) const SERVER_GRACE: Duration = Duration::from_secs(1);

/// A lock of this client.
pub(super) type ClientLock = HeldLock<Connection>;

pub(super) struct Registry {
    pub(super) clock: Clock,
    /// This process's waiters.
    pub(super) queue: Arc<WaiterQueue<AdvisoryKey>>,
    /// How long an unlock may take, unless the caller says otherwise.
    pub(super) limit: Duration,
    pub(super) statements: Statements,
    /// Where the connections are from; a guard may outlive it.
    pub(super) database: Weak<Database>,
    threads: ThreadBodies,
    state: Mutex<State>,
    pub(super) wake_monitor: Condvar,
    pub(super) wake_session_thread: Condvar,
    /// A call or a thread has ended.
    pub(super) ended: Condvar,
}

/// What the two threads run. Handed in, because both of them use the registry.
pub(super) struct ThreadBodies {
    pub(super) monitor: fn(&Arc<Registry>),
    pub(super) session: fn(&Arc<Registry>),
}

#[derive(Default)]
pub(super) struct State {
    pub(super) locks: HashMap<u64, Arc<ClientLock>>,
    /// Ended locks that the session thread is to unlock.
    pub(super) to_unlock: VecDeque<Arc<ClientLock>>,
    /// Calls that may come back with a lock.
    calls: usize,
    next_id: u64,
    pub(super) monitor_runs: bool,
    pub(super) session_thread_runs: bool,
    pub(super) stage: Stage,
    /// Rises with everything that the monitor must look at.
    pub(super) changes: u64,
    /// When the monitor looks again by itself, while it sleeps.
    pub(super) monitor_until: Option<Moment>,
    /// How long the last round of pings took.
    pub(super) ping_round: Duration,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Stage {
    #[default]
    Open,
    /// The client is gone: no lock will come any more, and idle threads need not wait for one.
    ClientDropped,
    /// Closed: no lock may come any more.
    Closed,
}

impl Registry {
    pub(super) fn new(limit: Duration, database: Weak<Database>, threads: ThreadBodies) -> Arc<Self> {
        Arc::new(Self {
            clock: Clock::system(),
            queue: Arc::default(),
            limit,
            statements: Statements::new(),
            database,
            threads,
            state: Mutex::default(),
            wake_monitor: Condvar::new(),
            wake_session_thread: Condvar::new(),
            ended: Condvar::new(),
        })
    }

    /// Notes a call that may come back with a lock; closing waits for it.
    pub(super) fn begin_call(&self) -> Result<CallInProgress<'_>> {
        self.state().calls += 1;
        let call = CallInProgress(self);
        self.check_open().map(|()| call)
    }

    pub(super) fn check_open(&self) -> Result<()> {
        if self.state().stage == Stage::Closed { Err(LockError::closed()) } else { Ok(()) }
    }

    /// A number for a new lock.
    pub(super) fn next_id(&self) -> u64 {
        let mut state = self.state();
        state.next_id += 1;
        state.next_id
    }

    /// Registers a lock, and starts the threads if they do not run.
    pub(super) fn add(self: &Arc<Self>, lock: &Arc<ClientLock>) -> Result<()> {
        let mut state = self.state();
        if state.stage == Stage::Closed {
            return Err(LockError::closed());
        }
        if !state.monitor_runs {
            self.spawn("syncguard-monitor", self.threads.monitor)?;
            state.monitor_runs = true;
        }
        self.start_session_thread(&mut state)?;
        state.locks.insert(lock.id, Arc::clone(lock));
        state.changes += 1;
        // Both threads look often enough by themselves, and to wake two threads for each short lock
        // would cost more than the lock. Only an early deadline cannot wait for that.
        let early = state.monitor_until.is_some_and(|until| lock.deadline < until);
        drop(state);
        if early {
            self.wake_monitor.notify_all();
        }
        Ok(())
    }

    /// Forgets a lock that its holder has ended.
    pub(super) fn remove(&self, lock: &ClientLock) {
        let removed = self.state().locks.remove(&lock.id);
        drop(removed);
    }

    /// Tells the holder of a lock that was just marked as lost, and has it unlocked.
    pub(super) fn report_lost(self: &Arc<Self>, lock: &Arc<ClientLock>) {
        self.remove(lock);
        let reason = lock.lost_reason();
        if reason == Some(AdvisoryLost::Deadline) {
            lock.overdue.cancel();
        }
        lock.lost.cancel();
        self.unlock_later(lock);
        match reason {
            Some(AdvisoryLost::Closed) | None => {}
            Some(reason) => log::warn!("the session lock {} is lost: {reason}", lock.key),
        }
    }

    /// Leaves the connection of an ended lock to the session thread.
    pub(super) fn unlock_later(self: &Arc<Self>, lock: &Arc<ClientLock>) {
        let started = {
            let mut state = self.state();
            let started = self.start_session_thread(&mut state);
            if started.is_ok() {
                state.to_unlock.push_back(Arc::clone(lock));
            }
            started
        };
        self.wake_session_thread.notify_all();
        if started.is_err() {
            // No thread to be had: closing the connection frees the lock as well.
            if let Taken::Connection(connection) = lock.take(Duration::ZERO) {
                connection.discard();
            }
        }
    }

    /// Marks the lock as lost if its time is over. Called by everybody who looks at it.
    pub(super) fn check_deadline(self: &Arc<Self>, lock: &Arc<ClientLock>) {
        if lock.must_end(self.clock.now()) && lock.lose(AdvisoryLost::Deadline) {
            self.report_lost(lock);
        }
    }

    /// The time that is left for the server's timer; `None` for no limit.
    pub(super) fn session_timer(&self, lock: &ClientLock) -> Option<Duration> {
        (!lock.keep_past_deadline).then(|| lock.deadline.since(self.clock.now()) + SERVER_GRACE)
    }

    /// No more guards will come.
    pub(super) fn client_dropped(&self) {
        {
            let mut state = self.state();
            if state.stage == Stage::Open {
                state.stage = Stage::ClientDropped;
            }
            state.changes += 1;
        }
        self.wake_monitor.notify_all();
        self.wake_session_thread.notify_all();
    }

    /// Ends every lock of this client. Whether nothing of them was left in time.
    pub(super) fn close(self: &Arc<Self>, limit: Duration) -> bool {
        let start = Instant::now();
        let locks = {
            let mut state = self.state();
            state.stage = Stage::Closed;
            state.changes += 1;
            std::mem::take(&mut state.locks)
        };
        self.queue.notify_all();
        for lock in locks.values() {
            if lock.lose(AdvisoryLost::Closed) {
                self.report_lost(lock);
            }
        }
        self.wake_monitor.notify_all();
        self.wake_session_thread.notify_all();
        let mut state = self.state();
        while state.calls > 0 || state.monitor_runs || state.session_thread_runs {
            let rest = limit.saturating_sub(start.elapsed());
            if rest.is_zero() {
                return false;
            }
            state = self.ended.wait_for(state, rest);
        }
        true
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn start_session_thread(self: &Arc<Self>, state: &mut State) -> Result<()> {
        if !state.session_thread_runs {
            self.spawn("syncguard-session", self.threads.session)?;
            state.session_thread_runs = true;
        }
        Ok(())
    }

    fn spawn(self: &Arc<Self>, name: &str, run: fn(&Arc<Self>)) -> Result<()> {
        let registry = Arc::clone(self);
        threads::spawn(name, move || run(&registry)).map(drop).map_err(|cause| {
            LockError::new(ErrorCode::Internal)
                .with_message("no background thread could be started, so the session lock is given back: raise the limit of threads")
                .with_source(cause)
        })
    }
}

/// A call that may come back with a lock.
pub(super) struct CallInProgress<'a>(&'a Registry);

impl Drop for CallInProgress<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.calls -= 1;
        let awaited = state.calls == 0 && state.stage == Stage::Closed;
        drop(state);
        if awaited {
            self.0.ended.notify_all();
        }
    }
}
