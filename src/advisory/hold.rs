//! One held session lock: who has its connection, and how it ends. See the module above for the
//! invariants by number.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::advisory::AdvisoryLost;
use crate::advisory::key::AdvisoryKey;
use crate::cancel::CancelToken;
use crate::model::time::Moment;

/// A session lock, shared between its guard and the threads that look after it. `C` is the
/// connection; the tests put something simpler in its place.
pub(super) struct Hold<C> {
    pub(super) id: u64,
    pub(super) key: AdvisoryKey,
    pub(super) shared: bool,
    /// The server process that holds the lock.
    pub(super) pid: i32,
    pub(super) deadline: Moment,
    pub(super) keep: bool,
    pub(super) lost: CancelToken,
    pub(super) overdue: CancelToken,
    process: u32,
    state: Mutex<State<C>>,
    back: Condvar,
}

struct State<C> {
    phase: Phase,
    seat: Seat<C>,
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
enum Seat<C> {
    Here(C),
    /// The session thread is asking the server. Whether nobody waits for it to come back: then that
    /// thread lets the lock go itself.
    Out {
        abandoned: bool,
    },
    Gone,
}

/// What [`Hold::take`] found.
pub(super) enum Taken<C> {
    Connection(C),
    /// It is closed, or somebody else lets it go.
    Gone,
    /// It did not come back in time; the session thread lets it go.
    Late,
}

/// What is to be done after a check.
pub(super) enum After<C> {
    Nothing,
    /// The lock is lost, and nobody was told so far.
    Lost,
    /// Nobody else will let this one go.
    LetGo(C),
}

impl<C> Hold<C> {
    pub(super) fn new(
        id: u64,
        key: AdvisoryKey,
        shared: bool,
        pid: i32,
        (deadline, keep): (Moment, bool),
        connection: C,
        now: Moment,
    ) -> Self {
        Self {
            id,
            key,
            shared,
            pid,
            deadline,
            keep,
            lost: CancelToken::new(),
            overdue: CancelToken::new(),
            process: std::process::id(),
            state: Mutex::new(State { phase: Phase::Held, seat: Seat::Here(connection), confirmed: now }),
            back: Condvar::new(),
        }
    }

    /// Whether this process is a fork of the one that took the lock: the connection is the parent's.
    pub(super) fn is_foreign(&self) -> bool {
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

    /// Whether the deadline is over and the lock is therefore not trusted any more.
    pub(super) fn is_over(&self, now: Moment) -> bool {
        !self.keep && now >= self.deadline
    }

    /// Marks the lock as lost. Whether this was its end.
    pub(super) fn lose(&self, reason: AdvisoryLost) -> bool {
        self.end(Phase::Lost(reason))
    }

    /// Marks the lock as let go by its holder. Whether this was its end.
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
    pub(super) fn is_silent(&self, now: Moment, patience: Duration) -> bool {
        let state = self.state();
        state.phase == Phase::Held && now.since(state.confirmed) >= patience
    }

    /// When the server last answered.
    pub(super) fn confirmed(&self) -> Moment {
        self.state().confirmed
    }

    /// Lends the connection for a check.
    pub(super) fn lend(&self) -> Option<C> {
        let mut state = self.state();
        if state.phase != Phase::Held {
            return None;
        }
        match std::mem::replace(&mut state.seat, Seat::Out { abandoned: false }) {
            Seat::Here(connection) => Some(connection),
            other => {
                state.seat = other;
                None
            }
        }
    }

    /// Takes a lent connection back; `None` if it is broken.
    pub(super) fn settle(&self, connection: Option<C>, confirmed: Option<Moment>) -> After<C> {
        let mut state = self.state();
        let abandoned = matches!(state.seat, Seat::Out { abandoned: true });
        if let Some(at) = confirmed {
            state.confirmed = at;
        }
        let after = match connection {
            None => {
                state.seat = Seat::Gone;
                if state.phase == Phase::Held {
                    state.phase = Phase::Lost(AdvisoryLost::Connection);
                    After::Lost
                } else {
                    After::Nothing
                }
            }
            Some(connection) if abandoned => {
                state.seat = Seat::Gone;
                After::LetGo(connection)
            }
            Some(connection) => {
                state.seat = Seat::Here(connection);
                After::Nothing
            }
        };
        drop(state);
        self.back.notify_all();
        after
    }

    /// Takes the connection of an ended lock, to let it go. Waits for one that is lent.
    pub(super) fn take(&self, limit: Duration) -> Taken<C> {
        let start = Instant::now();
        let mut state = self.state();
        debug_assert!(state.phase != Phase::Held, "only an ended lock gives its connection away");
        loop {
            match std::mem::replace(&mut state.seat, Seat::Gone) {
                Seat::Here(connection) => return Taken::Connection(connection),
                Seat::Gone => return Taken::Gone,
                Seat::Out { abandoned } => {
                    let rest = limit.saturating_sub(start.elapsed());
                    if abandoned || rest.is_zero() {
                        state.seat = Seat::Out { abandoned: true };
                        return Taken::Late;
                    }
                    state.seat = Seat::Out { abandoned };
                    state = self.back.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State<C>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::time::Clock;

    fn hold() -> Hold<&'static str> {
        let now = Clock::system().now();
        let key = AdvisoryKey::from_i64(1);
        Hold::new(1, key, false, 7, (now.after(Duration::from_secs(60)), false), "connection", now)
    }

    #[test]
    fn a_lock_ends_once() {
        let lock = hold();
        assert!(lock.lose(AdvisoryLost::Deadline));
        assert!(!lock.release() && !lock.lose(AdvisoryLost::Connection));
        assert_eq!(lock.lost_reason(), Some(AdvisoryLost::Deadline));
        assert!(lock.lend().is_none(), "an ended lock is not checked any more");
    }

    #[test]
    fn the_connection_is_taken_once() {
        let lock = hold();
        assert!(lock.release());
        assert!(matches!(lock.take(Duration::ZERO), Taken::Connection(_)));
        assert!(matches!(lock.take(Duration::ZERO), Taken::Gone));
    }

    #[test]
    fn a_release_during_a_check_waits_for_the_connection() {
        let lock = hold();
        let connection = lock.lend();
        assert!(connection.is_some() && lock.lend().is_none());
        assert!(lock.release());
        std::thread::scope(|scope| {
            let taker = scope.spawn(|| lock.take(Duration::from_secs(60)));
            assert!(matches!(lock.settle(connection, None), After::Nothing));
            assert!(matches!(taker.join().unwrap(), Taken::Connection(_)));
        });
    }

    #[test]
    fn who_gives_up_waiting_leaves_the_connection_to_the_check() {
        let lock = hold();
        let connection = lock.lend();
        assert!(lock.release());
        assert!(matches!(lock.take(Duration::ZERO), Taken::Late));
        assert!(matches!(lock.settle(connection, None), After::LetGo(_)));
        assert!(matches!(lock.take(Duration::ZERO), Taken::Gone));
    }

    #[test]
    fn a_broken_connection_is_told_once_and_only_to_a_holder() {
        let lock = hold();
        let _ = lock.lend();
        assert!(matches!(lock.settle(None, None), After::Lost));
        assert_eq!(lock.lost_reason(), Some(AdvisoryLost::Connection));
        let lock = hold();
        let _ = lock.lend();
        assert!(lock.release());
        assert!(matches!(lock.settle(None, None), After::Nothing));
        assert!(matches!(lock.take(Duration::from_secs(60)), Taken::Gone));
    }

    #[test]
    fn a_kept_lock_has_no_end_of_its_own() {
        let mut lock = hold();
        assert!(lock.is_over(lock.deadline));
        lock.keep = true;
        assert!(!lock.is_over(lock.deadline));
    }
}
