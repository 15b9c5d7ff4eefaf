//! Our own pool: connections that are opened by whoever needs one, in that caller's time.
//!
//! Why not `r2d2` for it: it connects on threads of its own behind a back-off, so that an error
//! arrives late and without its SQLSTATE, it cannot be told to drop a connection that is in doubt,
//! and it tests at every checkout. See `docs/adr/`.
//!
//! 1. At most `max` connections are lent or idle at any time; opening counts as lent.
//! 2. A connection comes back only through [`Lent::give_back`]; a dropped [`Lent`] closes it.
//! 3. No lock is held while a connection is opened, used or closed.
//! 4. After a fork the child neither uses nor closes the parent's connections.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::postgres::connect::{Connector, Wire, rest};
use crate::postgres::statement::Memo;

/// A connection that was idle for longer is closed instead of lent.
const MAX_IDLE: Duration = Duration::from_secs(600);

pub(crate) struct Pool {
    connector: Connector,
    max: u32,
    connection_timeout: Duration,
    state: Mutex<State>,
    free: Condvar,
    process: u32,
}

#[derive(Default)]
struct State {
    idle: Vec<Idle>,
    open: u32,
    /// How many wait for one to come back: without any, nobody has to be called.
    waiting: u32,
    closed: bool,
}

struct Idle {
    wire: Box<Wire>,
    memo: Memo,
    since: Instant,
}

impl Idle {
    /// How long it may lie here: not until the server is about to end it.
    fn limit(&self) -> Duration {
        match &self.memo.timer {
            Some(timer) if timer.limit_ms > 0 => MAX_IDLE.min(Duration::from_millis(timer.limit_ms / 2)),
            _ => MAX_IDLE,
        }
    }
}

impl Pool {
    pub(crate) fn new(connector: Connector, max: u32, connection_timeout: Duration) -> Arc<Self> {
        Arc::new(Self {
            connector,
            max,
            connection_timeout,
            state: Mutex::default(),
            free: Condvar::new(),
            process: std::process::id(),
        })
    }

    pub(crate) fn connector(&self) -> &Connector {
        &self.connector
    }

    /// A connection: an idle one, else a new one, else the next that comes back.
    ///
    /// Waits at most until `end` and at most `connection_timeout`. `RateLimited` when all are lent.
    pub(crate) fn get(self: &Arc<Self>, end: Instant, cancel: &CancelToken) -> Result<Lent> {
        LockError::check_process(self.process)?;
        let end = Instant::now().checked_add(self.connection_timeout).map_or(end, |own| own.min(end));
        let waker = {
            let pool = Arc::downgrade(self);
            move || {
                if let Some(pool) = pool.upgrade() {
                    // Taken and let go: a waiter is either before its check or in its wait.
                    drop(pool.state());
                    pool.free.notify_all();
                }
            }
        };
        let mut subscription = None;
        let mut too_old = Vec::new();
        let mut state = self.state();
        let found = loop {
            if state.closed {
                break Err(LockError::closed());
            }
            if let Some(idle) = state.idle.pop() {
                if idle.wire.is_closed() || idle.since.elapsed() > idle.limit() {
                    state.open -= 1;
                    too_old.push(idle);
                    continue;
                }
                break Ok(Some(idle));
            }
            if state.open < self.max {
                state.open += 1;
                break Ok(None);
            }
            let left = rest(end);
            if left.is_zero() {
                break Err(self.exhausted());
            }
            if subscription.is_none() && !cancel.is_never() {
                drop(state);
                subscription = cancel.subscribe(waker.clone());
                state = self.state();
                cancel.check()?;
                continue;
            }
            state.waiting += 1;
            state = self.free.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
            if cancel.is_cancelled() {
                // This waiter may have eaten the wake-up of another.
                self.free.notify_one();
                break Err(LockError::aborted());
            }
        };
        drop(state);
        drop(too_old);
        match found? {
            Some(idle) => {
                Ok(Lent { pool: Arc::clone(self), wire: Some(idle.wire), memo: idle.memo, fresh: false })
            }
            None => self.open(end, cancel),
        }
    }

    /// An idle connection on which a session lock's timer still runs.
    pub(crate) fn take_timed(self: &Arc<Self>) -> Option<Lent> {
        let mut state = self.state();
        let at = state.idle.iter().position(|idle| idle.memo.timer.is_some())?;
        let idle = state.idle.remove(at);
        drop(state);
        Some(Lent { pool: Arc::clone(self), wire: Some(idle.wire), memo: idle.memo, fresh: false })
    }

    /// Closes idle connections: after a restart of the server they are all stale.
    pub(crate) fn purge(&self) {
        let idle = {
            let mut state = self.state();
            let idle = std::mem::take(&mut state.idle);
            state.open = state.open.saturating_sub(u32::try_from(idle.len()).unwrap_or(u32::MAX));
            idle
        };
        self.free.notify_all();
        drop(idle);
    }

    /// No more connections; idle ones are closed, lent ones when they come back.
    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.purge();
    }

    fn open(self: &Arc<Self>, end: Instant, cancel: &CancelToken) -> Result<Lent> {
        // The slot is given back if opening fails or panics.
        let mut lent = Lent { pool: Arc::clone(self), wire: None, memo: Memo::default(), fresh: true };
        lent.wire = Some(Box::new(self.connector.open(rest(end), cancel)?));
        Ok(lent)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn exhausted(&self) -> LockError {
        LockError::new(ErrorCode::RateLimited).with_message(format!(
            "no connection became free in time, all {} of the pool are in use: raise max_connections or hold fewer session locks",
            self.max
        ))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            for idle in state.idle.drain(..) {
                idle.wire.abandon();
            }
        }
    }
}

/// A connection that is in use. Dropping it closes it; [`Lent::give_back`] returns it.
pub(crate) struct Lent {
    pool: Arc<Pool>,
    wire: Option<Box<Wire>>,
    pub(crate) memo: Memo,
    /// Opened for this use: if it fails, the server is away, not the connection stale.
    pub(crate) fresh: bool,
}

impl Lent {
    pub(crate) fn wire(&mut self) -> Result<&mut Wire> {
        self.wire.as_deref_mut().ok_or_else(LockError::closed)
    }

    pub(crate) fn connector(&self) -> &Connector {
        &self.pool.connector
    }

    /// Returns a connection that is in order: no transaction, no unanswered message, no session lock.
    pub(crate) fn give_back(mut self) {
        let Some(wire) = self.wire.take() else { return };
        wire.link.unlimited();
        let memo = std::mem::take(&mut self.memo);
        let mut refused = None;
        {
            let mut state = self.pool.state();
            if state.closed || wire.is_closed() {
                refused = Some(wire);
            } else {
                state.idle.push(Idle { wire, memo, since: Instant::now() });
                state.open += 1;
            }
        }
        // Dropping `self` without its wire gives the slot back and wakes the next waiter.
        drop(refused);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(wire) = self.wire.take() {
            if self.pool.process == std::process::id() {
                drop(wire);
            } else {
                wire.abandon();
            }
        }
        let mut state = self.pool.state();
        state.open = state.open.saturating_sub(1);
        let awaited = state.waiting > 0;
        drop(state);
        if awaited {
            self.pool.free.notify_one();
        }
    }
}
