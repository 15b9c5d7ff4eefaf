//! Our own pool: r2d2's, whose connections are *slots*.
//!
//! r2d2 opens connections on threads of its own, so that an error would come late and without its
//! SQLSTATE. So what it opens here is an empty slot, at once and without I/O; whoever checks a slot out
//! opens its connection in its own thread and time, with its own exact error. See
//! `docs/adr/0018-own-connections-are-slots-of-r2d2.md`.
//!
//! 1. A connection is taken out of its slot at checkout, and put back only when it is in order. A slot
//!    whose connection is in doubt goes back empty; r2d2 never drops one.
//! 2. No lock is held while a connection is opened, used or closed.
//! 3. After a fork the child neither uses nor closes the parent's connections, nor takes a lock of r2d2's.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use postgres::Client;
use r2d2::{ManageConnection, NopErrorHandler, PooledConnection};
use scheduled_thread_pool::ScheduledThreadPool;

use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::pg::connect::{Connector, OpenedConnection};
use crate::pg::error::out_of_time;
use crate::pg::pool::{Canceller, Lent, NotLent, Pool};
use crate::pg::resources;
use crate::pg::statement::SessionState;
use crate::pg::stream::StreamControl;
use crate::sync::{Mutex, MutexGuard};
use crate::threads::catch_panic;

/// A connection that was idle for longer is closed instead of lent.
const MAX_IDLE: Duration = Duration::from_secs(600);

/// The most slots of a pool: r2d2 makes them all when it begins. A server has fewer connections.
const MOST_SLOTS: u32 = 10_000;

/// What the pools of one client share.
#[derive(Default)]
pub(crate) struct Shared {
    /// r2d2 wants a thread for as long as a pool lives; all of a client's pools have the same one.
    thread: Mutex<Weak<ScheduledThreadPool>>,
    /// How often idle connections were found to be untrustworthy. One that was opened before the last
    /// time is not used any more.
    purges: AtomicU64,
}

/// Opens slots for r2d2.
struct Slots;

#[derive(Default)]
struct Slot(Option<Box<Opened>>);

struct Opened {
    connection: OpenedConnection,
    state: SessionState,
    /// When it was put back.
    since: Instant,
    /// [`Shared::purges`] when it was opened.
    purges: u64,
}

impl ManageConnection for Slots {
    type Connection = Slot;
    type Error = Infallible;

    fn connect(&self) -> Result<Slot, Infallible> {
        Ok(Slot::default())
    }

    fn is_valid(&self, _: &mut Slot) -> Result<(), Infallible> {
        Ok(())
    }

    /// r2d2 would drop the slot, and wake nobody who waits for one.
    fn has_broken(&self, _: &mut Slot) -> bool {
        false
    }
}

/// A pool of ours. It is built at its first use.
pub(crate) struct OwnPool(Arc<Inner>);

struct Inner {
    connector: Connector,
    max: u32,
    connection_timeout: Duration,
    shared: Arc<Shared>,
    pool: Mutex<Option<r2d2::Pool<Slots>>>,
    closed: AtomicBool,
    process: u32,
}

impl OwnPool {
    pub(crate) fn new(
        connector: Connector,
        max: u32,
        connection_timeout: Duration,
        shared: Arc<Shared>,
    ) -> Self {
        Self(Arc::new(Inner {
            connector,
            max: max.clamp(1, MOST_SLOTS),
            connection_timeout,
            shared,
            pool: Mutex::default(),
            closed: AtomicBool::new(false),
            process: std::process::id(),
        }))
    }

    /// A connection beside those of the pools, which ends with its use.
    pub(crate) fn alone(
        connector: Connector,
        limit: Duration,
        cancel: &CancelToken,
    ) -> Result<Box<dyn Lent>> {
        let pool = Self::new(connector, 1, limit, Arc::default());
        let mut lent =
            OwnLent { opened: None, state: SessionState::default(), slot: None, pool: pool.0, fresh: false };
        lent.open(limit, cancel)?;
        Ok(Box::new(lent))
    }
}

impl Pool for OwnPool {
    fn lend(&self, slice: Duration) -> Result<Box<dyn Lent>, NotLent> {
        let slot = self.0.pool().map_err(NotLent::Ever)?.get_timeout(slice).map_err(NotLent::Yet)?;
        Ok(Box::new(OwnLent::of(slot, &self.0)))
    }

    fn connection_timeout(&self) -> Duration {
        self.0.connection_timeout
    }

    fn max_size(&self) -> u32 {
        self.0.max
    }

    fn in_use(&self) -> u32 {
        let state = self.0.built().as_ref().map(r2d2::Pool::state);
        state.map_or(0, |state| state.connections.saturating_sub(state.idle_connections))
    }

    fn check_open(&self) -> Result<()> {
        LockError::check_process(self.0.process)?;
        if self.0.closed.load(Ordering::SeqCst) { Err(LockError::closed()) } else { Ok(()) }
    }

    fn exhausted(&self, _: Option<r2d2::Error>) -> LockError {
        let slots = self.0.built().as_ref().map_or(0, |pool| pool.state().connections);
        if slots < self.0.max {
            // They are still being made: the pool's thread has had no time.
            return out_of_time();
        }
        LockError::new(ErrorCode::RateLimited).with_message(format!(
            "no connection became free in time, all {} of the pool are in use: raise max_connections or hold fewer session locks",
            self.0.max
        ))
    }

    fn purge(&self) {
        self.0.shared.purges.fetch_add(1, Ordering::SeqCst);
        let pool = self.0.built().clone();
        if let Some(pool) = pool {
            self.0.close_idle(&pool);
        }
    }

    /// What is in use keeps r2d2's pool, and its thread, until it comes back.
    fn close(&self) {
        self.0.closed.store(true, Ordering::SeqCst);
        let pool = self.0.built().take();
        if let Some(pool) = pool {
            self.0.close_idle(&pool);
        }
    }

    fn take_timed(&self) -> Option<Box<dyn Lent>> {
        let timed = |slot: &Slot| slot.0.as_ref().is_some_and(|opened| opened.state.timer.is_some());
        let pool = self.0.built().clone()?;
        let (mut others, mut found) = (Vec::new(), None);
        while let Some(slot) = pool.try_get() {
            if timed(&slot) {
                found = Some(OwnLent::of(slot, &self.0));
                break;
            }
            others.push(slot);
        }
        put_back(others);
        found.map(|lent| -> Box<dyn Lent> { Box::new(lent) })
    }
}

/// In the order in which they were taken, so that the last one that was used is the first to be lent.
fn put_back(slots: Vec<PooledConnection<Slots>>) {
    slots.into_iter().rev().for_each(drop);
}

impl Inner {
    fn built(&self) -> MutexGuard<'_, Option<r2d2::Pool<Slots>>> {
        self.pool.lock()
    }

    /// r2d2's pool, built now if it is not yet.
    fn pool(&self) -> Result<r2d2::Pool<Slots>> {
        let mut built = self.built();
        if self.closed.load(Ordering::SeqCst) {
            return Err(LockError::closed());
        }
        if let Some(pool) = &*built {
            return Ok(pool.clone());
        }
        // Whoever is second waits for the first; no I/O is done in here.
        let pool = r2d2::Pool::builder()
            .max_size(self.max)
            .test_on_check_out(false)
            .idle_timeout(None)
            .max_lifetime(None)
            .error_handler(Box::new(NopErrorHandler))
            .thread_pool(self.shared.thread()?)
            .build_unchecked(Slots);
        Ok(built.insert(pool).clone())
    }

    /// Takes what is idle out of its slots, and closes it once the slots are back.
    fn close_idle(&self, pool: &r2d2::Pool<Slots>) {
        let purges = self.shared.purges.load(Ordering::SeqCst);
        let closed = self.closed.load(Ordering::SeqCst);
        let mut slots = Vec::new();
        while let Some(slot) = pool.try_get() {
            slots.push(slot);
        }
        let ended = |opened: &mut Box<Opened>| closed || opened.purges != purges;
        let opened: Vec<_> = slots.iter_mut().filter_map(|slot| slot.0.take_if(ended)).collect();
        put_back(slots);
        drop(opened);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Its sockets are the parent's, and a thread of the parent's may have had its lock at the fork.
            std::mem::forget(self.pool.get_mut().take());
        }
    }
}

impl Shared {
    fn thread(&self) -> Result<Arc<ScheduledThreadPool>> {
        let mut thread = self.thread.lock();
        if let Some(thread) = thread.upgrade() {
            return Ok(thread);
        }
        let new = Arc::new(pool_thread()?);
        *thread = Arc::downgrade(&new);
        Ok(new)
    }
}

/// The thread that r2d2 wants. It makes slots, and has nothing to do afterwards. (The crate panics where
/// there is no thread: that is found out beforehand, as far as it can be.)
fn pool_thread() -> Result<ScheduledThreadPool> {
    resources::check_thread()?;
    let begin =
        || ScheduledThreadPool::builder().num_threads(1).thread_name_pattern("syncguard-pool").build();
    catch_panic(begin).ok_or_else(|| {
        LockError::new(ErrorCode::ServiceUnavailable).with_message(
            "no thread could be started for the pool of connections: raise the limit of threads",
        )
    })
}

/// A connection of ours in use: out of its slot, if it has one.
struct OwnLent {
    // Dropped before the slot, so that there are never more sessions than slots.
    opened: Option<Box<Opened>>,
    state: SessionState,
    slot: Option<PooledConnection<Slots>>,
    pool: Arc<Inner>,
    fresh: bool,
}

impl OwnLent {
    fn of(mut slot: PooledConnection<Slots>, pool: &Arc<Inner>) -> Self {
        let mut opened = slot.0.take();
        let state = opened.as_mut().map(|opened| std::mem::take(&mut opened.state)).unwrap_or_default();
        Self { opened, state, slot: Some(slot), pool: Arc::clone(pool), fresh: false }
    }

    /// How long it may lie idle: not until the server is about to end it.
    fn limit(&self) -> Duration {
        match &self.state.timer {
            Some(timer) if timer.limit_ms > 0 => MAX_IDLE.min(Duration::from_millis(timer.limit_ms / 2)),
            _ => MAX_IDLE,
        }
    }

    fn is_usable(&self, purges: u64) -> bool {
        self.opened.as_ref().is_some_and(|opened| {
            opened.purges == purges
                && opened.since.elapsed() <= self.limit()
                && !opened.connection.is_closed()
        })
    }
}

impl Lent for OwnLent {
    fn open(&mut self, limit: Duration, cancel: &CancelToken) -> Result<()> {
        let purges = self.pool.shared.purges.load(Ordering::SeqCst);
        if self.is_usable(purges) {
            return Ok(());
        }
        (self.opened, self.state) = (None, SessionState::default());
        let connection = self.pool.connector.open(limit, cancel)?;
        self.opened = Some(Box::new(Opened {
            connection,
            state: SessionState::default(),
            since: Instant::now(),
            purges,
        }));
        self.fresh = true;
        Ok(())
    }

    fn client(&mut self) -> Option<&mut Client> {
        self.opened.as_mut()?.connection.client()
    }

    fn state(&mut self) -> &mut SessionState {
        &mut self.state
    }

    fn control(&mut self) -> Option<&StreamControl> {
        Some(&self.opened.as_ref()?.connection.control)
    }

    fn is_fresh(&self) -> bool {
        self.fresh
    }

    fn was_used(&self) -> bool {
        !self.fresh
    }

    fn is_own(&self) -> bool {
        true
    }

    fn canceller(&self) -> Canceller {
        let control = self.opened.as_ref().map(|opened| opened.connection.control.clone());
        Canceller(Some((self.pool.connector.clone(), control)))
    }

    fn keep(mut self: Box<Self>) {
        let (Some(mut opened), Some(mut slot)) = (self.opened.take(), self.slot.take()) else { return };
        opened.connection.control.unlimited();
        if opened.connection.is_closed() || self.pool.closed.load(Ordering::SeqCst) {
            drop(opened);
            return;
        }
        (opened.since, opened.state) = (Instant::now(), std::mem::take(&mut self.state));
        slot.0 = Some(opened);
        // If the pool is closed just now, this is the last that r2d2's pool is held by.
        drop(slot);
    }
}

impl Drop for OwnLent {
    fn drop(&mut self) {
        if self.pool.process != std::process::id() {
            if let Some(opened) = self.opened.take() {
                opened.connection.abandon();
            }
            std::mem::forget(self.slot.take());
        }
    }
}
