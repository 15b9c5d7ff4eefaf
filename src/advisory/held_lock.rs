//! One session lock from its grant to its end: where its connection is, and how it ends. See the
//! module above for the invariants by number.

use std::fmt;
use std::time::{Duration, Instant};

use crate::advisory::key::AdvisoryKey;
use crate::cancel::CancelToken;
use crate::model::time::Moment;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// Why a session lock is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum AdvisoryLost {
    /// Its `max_hold` is over.
    Deadline,
    /// Its session has ended, or the server does not answer.
    Connection,
    /// The client was closed.
    Closed,
}

impl fmt::Display for AdvisoryLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deadline => "its max_hold is over",
            Self::Connection => "its session has ended or the server does not answer",
            Self::Closed => "the client was closed",
        })
    }
}

/// A session lock, shared between its guard and the threads that look after it. `C` is the
/// connection; the tests put something simpler in its place.
pub(super) struct HeldLock<C> {
    pub(super) id: u64,
    pub(super) key: AdvisoryKey,
    pub(super) shared: bool,
    /// The server process that holds the lock.
    pub(super) pid: i32,
    pub(super) deadline: Moment,
    /// Whether it is kept when the deadline is over.
    pub(super) keep_past_deadline: bool,
    pub(super) lost: CancelToken,
    pub(super) overdue: CancelToken,
    process: u32,
    state: Mutex<State<C>>,
    returned: Condvar,
}

struct State<C> {
    phase: Phase,
    connection: ConnectionSlot<C>,
    /// When the server last answered.
    confirmed: Moment,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Held,
    Lost(AdvisoryLost),
    Released,
}

/// Where the connection is.
enum ConnectionSlot<C> {
    Here(C),
    /// The session thread is asking the server. `abandoned`: no thread waits for the connection any more,
    /// so that thread unlocks itself.
    Borrowed {
        abandoned: bool,
    },
    Gone,
}

/// What [`HeldLock::take`] found.
pub(super) enum Taken<C> {
    Connection(C),
    /// It is closed, or another thread unlocks.
    Gone,
    /// It did not come back in time; the session thread unlocks.
    Late,
}

/// What is to be done after a check.
pub(super) enum AfterCheck<C> {
    Nothing,
    /// The lock is lost, and its holder does not know so far.
    Lost,
    /// No other thread will unlock.
    Unlock(C),
}

impl<C> HeldLock<C> {
    pub(super) fn new(
        id: u64,
        key: AdvisoryKey,
        shared: bool,
        pid: i32,
        (deadline, keep_past_deadline): (Moment, bool),
        connection: C,
        now: Moment,
    ) -> Self {
        Self {
            id,
            key,
            shared,
            pid,
            deadline,
            keep_past_deadline,
            lost: CancelToken::new(),
            overdue: CancelToken::new(),
            process: std::process::id(),
            state: Mutex::new(State {
                phase: Phase::Held,
                connection: ConnectionSlot::Here(connection),
                confirmed: now,
            }),
            returned: Condvar::new(),
        }
    }

    /// Whether this process is a fork of the one that took the lock: the connection is the parent's.
    pub(super) fn is_of_parent(&self) -> bool {
        self.process != std::process::id()
    }

    pub(super) fn is_held(&self) -> bool {
        self.state().phase == Phase::Held
    }

    pub(super) fn lost_reason(&self) -> Option<AdvisoryLost> {
        match self.state().phase {
            Phase::Lost(reason) => Some(reason),
            _ => None,
        }
    }

    /// Whether the deadline is over, and the lock is not one that is kept past it.
    pub(super) fn must_end(&self, now: Moment) -> bool {
        !self.keep_past_deadline && now >= self.deadline
    }

    /// Marks the lock as lost. Whether this was its end.
    pub(super) fn lose(&self, reason: AdvisoryLost) -> bool {
        self.end(Phase::Lost(reason))
    }

    /// Marks the lock as released by its holder. Whether this was its end.
    pub(super) fn release(&self) -> bool {
        self.end(Phase::Released)
    }

    fn end(&self, how: Phase) -> bool {
        let mut state = self.state();
        let first = state.phase == Phase::Held;
        if first {
            state.phase = how;
        }
        first
    }

    /// Whether the server has not answered for this long.
    pub(super) fn is_silent(&self, now: Moment, limit: Duration) -> bool {
        let state = self.state();
        state.phase == Phase::Held && now.since(state.confirmed) >= limit
    }

    /// When the server last answered.
    pub(super) fn confirmed(&self) -> Moment {
        self.state().confirmed
    }

    /// Borrows the connection for a check.
    pub(super) fn borrow(&self) -> Option<C> {
        let mut state = self.state();
        if state.phase != Phase::Held {
            return None;
        }
        match std::mem::replace(&mut state.connection, ConnectionSlot::Borrowed { abandoned: false }) {
            ConnectionSlot::Here(connection) => Some(connection),
            other => {
                state.connection = other;
                None
            }
        }
    }

    /// Gives a borrowed connection back; `None` if it is broken.
    pub(super) fn give_back(&self, connection: Option<C>, confirmed: Option<Moment>) -> AfterCheck<C> {
        let mut state = self.state();
        let abandoned = matches!(state.connection, ConnectionSlot::Borrowed { abandoned: true });
        if let Some(at) = confirmed {
            state.confirmed = at;
        }
        let after = match connection {
            None => {
                state.connection = ConnectionSlot::Gone;
                if state.phase == Phase::Held {
                    state.phase = Phase::Lost(AdvisoryLost::Connection);
                    AfterCheck::Lost
                } else {
                    AfterCheck::Nothing
                }
            }
            Some(connection) if abandoned => {
                state.connection = ConnectionSlot::Gone;
                AfterCheck::Unlock(connection)
            }
            Some(connection) => {
                state.connection = ConnectionSlot::Here(connection);
                AfterCheck::Nothing
            }
        };
        drop(state);
        self.returned.notify_all();
        after
    }

    /// Takes the connection of an ended lock, to unlock. Waits for one that is borrowed.
    pub(super) fn take(&self, limit: Duration) -> Taken<C> {
        let start = Instant::now();
        let mut state = self.state();
        debug_assert!(state.phase != Phase::Held, "only an ended lock gives its connection away");
        loop {
            match std::mem::replace(&mut state.connection, ConnectionSlot::Gone) {
                ConnectionSlot::Here(connection) => return Taken::Connection(connection),
                ConnectionSlot::Gone => return Taken::Gone,
                ConnectionSlot::Borrowed { abandoned } => {
                    let rest = limit.saturating_sub(start.elapsed());
                    if abandoned || rest.is_zero() {
                        state.connection = ConnectionSlot::Borrowed { abandoned: true };
                        return Taken::Late;
                    }
                    state.connection = ConnectionSlot::Borrowed { abandoned };
                    state = self.returned.wait_for(state, rest);
                }
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State<C>> {
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::time::Clock;

    fn held() -> HeldLock<&'static str> {
        let now = Clock::system().now();
        let key = AdvisoryKey::from_i64(1);
        HeldLock::new(1, key, false, 7, (now.after(Duration::from_secs(60)), false), "connection", now)
    }

    #[test]
    fn a_lock_ends_once() {
        let lock = held();
        assert!(lock.lose(AdvisoryLost::Deadline));
        assert!(!lock.release() && !lock.lose(AdvisoryLost::Connection));
        assert_eq!(lock.lost_reason(), Some(AdvisoryLost::Deadline));
        assert!(lock.borrow().is_none(), "an ended lock is not checked any more");
    }

    #[test]
    fn the_connection_is_taken_once() {
        let lock = held();
        assert!(lock.release());
        assert!(matches!(lock.take(Duration::ZERO), Taken::Connection(_)));
        assert!(matches!(lock.take(Duration::ZERO), Taken::Gone));
    }

    #[test]
    fn a_release_during_a_check_waits_for_the_connection() {
        let lock = held();
        let connection = lock.borrow();
        assert!(connection.is_some() && lock.borrow().is_none());
        assert!(lock.release());
        std::thread::scope(|scope| {
            let taker = scope.spawn(|| lock.take(Duration::from_secs(60)));
            assert!(matches!(lock.give_back(connection, None), AfterCheck::Nothing));
            assert!(matches!(taker.join().unwrap(), Taken::Connection(_)));
        });
    }

    #[test]
    fn who_gives_up_waiting_leaves_the_connection_to_the_check() {
        let lock = held();
        let connection = lock.borrow();
        assert!(lock.release());
        assert!(matches!(lock.take(Duration::ZERO), Taken::Late));
        assert!(matches!(lock.give_back(connection, None), AfterCheck::Unlock(_)));
        assert!(matches!(lock.take(Duration::ZERO), Taken::Gone));
    }

    #[test]
    fn a_broken_connection_is_told_once_and_only_to_a_holder() {
        let lock = held();
        let _ = lock.borrow();
        assert!(matches!(lock.give_back(None, None), AfterCheck::Lost));
        assert_eq!(lock.lost_reason(), Some(AdvisoryLost::Connection));
        let lock = held();
        let _ = lock.borrow();
        assert!(lock.release());
        assert!(matches!(lock.give_back(None, None), AfterCheck::Nothing));
        assert!(matches!(lock.take(Duration::from_secs(60)), Taken::Gone));
    }

    #[test]
    fn a_kept_lock_has_no_end_of_its_own() {
        let mut lock = held();
        assert!(lock.must_end(lock.deadline));
        lock.keep_past_deadline = true;
        assert!(!lock.must_end(lock.deadline));
    }
}
