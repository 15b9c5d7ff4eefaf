//! The engine of a client: the backend, the queue of waiters, the registry of guards, and its end.
//!
//! Who keeps what alive: clients and guards share a [`Handle`]; the last handle ends the engine. The
//! worker thread holds the engine, the timer only the registry, so the backend is dropped by the worker or
//! by whoever holds the last handle; never inside an async runtime or where thread-locals are gone: drivers
//! panic there.
//!
//! After a fork the child has no threads, and its copies of the mutexes may be locked forever by
//! threads that it has not got: there nothing is locked, nothing is asked and nothing is dropped. Its
//! guards do not hold, every call is refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use crate::backend::{Label, LockBackend, ReleaseOutcome};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::lock::backend_call::ask;
use crate::lock::course::Told;
use crate::lock::registry::{PendingRelease, Registry};
use crate::lock::report::{OnReleaseError, ReleaseErrorContext, ReleaseSource};
use crate::lock::settings::ClientSettings;
use crate::model::key::{semaphore_of, waited_for};
use crate::model::lock_id::LockId;
use crate::model::time::{Clock, Moment};
use crate::sync::{Condvar, Mutex};
use crate::threads::{
    JoinHandle, driver_unusable, drop_where_allowed, ignore_panic, run_detached, thread_locals_gone,
};
use crate::waiting::{LOOK, WaiterQueue};

pub(super) struct Engine {
    pub(super) backend: Arc<dyn LockBackend>,
    pub(super) clock: Clock,
    pub(super) dispose_timeout: Duration,
    pub(super) on_release_error: Option<OnReleaseError>,
    /// Who the client is, for people.
    pub(super) owner: Option<Arc<str>>,
    pub(super) queue: Arc<WaiterQueue<Arc<str>>>,
    pub(super) registry: Arc<Registry>,
    pub(super) closed: AtomicBool,
    /// Whether the log has heard that renewals fail.
    pub(super) renewals_fail: AtomicBool,
    pub(super) started: AtomicBool,
    pub(super) threads: Arc<Mutex<Threads>>,
    reserved: Mutex<Reserved>,
    /// Whether the backend may give back what it keeps for renewals. Not asked under a manual clock.
    unreserves: AtomicBool,
    reserving: Condvar,
    /// Calls that may come back with a lease.
    calls: Mutex<Calls>,
    calls_done: Condvar,
    /// The process that made it.
    process: u32,
}

#[derive(Default)]
struct Calls {
    running: usize,
    /// Whether somebody waits for them to end: else nobody has to be notified.
    awaited: bool,
}

#[derive(Default)]
pub(super) struct Threads {
    pub(super) timer: Option<JoinHandle<()>>,
    pub(super) worker: Option<JoinHandle<()>>,
    pub(super) worker_id: Option<ThreadId>,
    /// The engine has ended: no thread is started any more.
    pub(super) over: bool,
    /// The last handle's engine, for the worker to drop.
    pub(super) last: Option<Arc<Engine>>,
}

#[derive(Clone, Copy, PartialEq)]
enum Reserved {
    No,
    Asking,
    Yes,
}

impl Engine {
    pub(super) fn new(backend: Arc<dyn LockBackend>, settings: ClientSettings) -> Arc<Self> {
        let ClientSettings { dispose_timeout, on_release_error, owner } = settings;
        let clock = backend.clock();
        let unreserves = !clock.is_manual();
        let registry = Arc::new(Registry::default());
        let queue = Arc::new(WaiterQueue::default());
        if clock.is_manual() {
            let (registry, queue) = (Arc::downgrade(&registry), Arc::downgrade(&queue));
            clock.on_advance(move || {
                if let Some(registry) = registry.upgrade() {
                    registry.timer_signal.notify(LOOK);
                    registry.worker_signal.notify(LOOK);
                }
                if let Some(queue) = queue.upgrade() {
                    queue.notify_all();
                }
            });
        }
        Arc::new(Self {
            backend,
            clock,
            dispose_timeout,
            on_release_error,
            owner,
            queue,
            registry,
            closed: AtomicBool::new(false),
            renewals_fail: AtomicBool::new(false),
            started: AtomicBool::new(false),
            threads: Arc::default(),
            reserved: Mutex::new(Reserved::No),
            unreserves: AtomicBool::new(unreserves),
            reserving: Condvar::new(),
            calls: Mutex::default(),
            calls_done: Condvar::new(),
            process: std::process::id(),
        })
    }

    /// Whether this process is a fork of the one that made the client.
    pub(super) fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Who hears of the course of calls, and the time that is told.
    pub(super) fn told(&self) -> Told<'_> {
        (&*self.backend, self.clock.now())
    }

    /// What a holder says of itself that is this client, and holds something for that.
    pub(super) fn label<'a>(&'a self, note: Option<&'a str>) -> Label<'a> {
        Label::new(self.owner.as_deref(), note)
    }

    pub(super) fn check_process(&self) -> Result<()> {
        LockError::check_process(self.process)
    }

    pub(super) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(LockError::closed());
        }
        Ok(())
    }

    /// Now plus the operation timeout, but no later than `end`.
    pub(super) fn call_deadline(&self, end: Moment) -> Moment {
        self.clock.now().after(self.backend.operation_timeout()).min(end)
    }

    /// Notes a call that may come back with a lease; closing waits for it.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        self.check_process()?;
        let entered = self.enter_anyway();
        self.check_open().map(|()| entered)
    }

    /// Notes a call that closing waits for, also on a closed client.
    pub(super) fn enter_anyway(&self) -> Entered<'_> {
        self.calls.lock().running += 1;
        Entered(self)
    }

    /// Tells this process's first waiter that the lease of this key was released.
    pub(super) fn freed(&self, key: &str) {
        self.queue.freed(waited_for(key));
    }

    /// Lets go of a lease, without a token.
    pub(super) fn release_by(&self, pending: &PendingRelease, deadline: Moment) -> Result<ReleaseOutcome> {
        let context = &pending.context;
        if pending.shared {
            return self.backend.release_shared(&context.key, &context.lock_id, deadline);
        }
        match semaphore_of(&context.key) {
            None => self.backend.release_by(&context.lock_id, deadline),
            Some(semaphore) => self.backend.release_permit(semaphore, &context.lock_id, deadline),
        }
    }

    /// The release of a lease that nobody has a guard for, or that may have been granted.
    pub(super) fn pending_release(&self, key: &str, lock_id: &str, over_at: Moment) -> PendingRelease {
        PendingRelease {
            context: ReleaseErrorContext {
                key: key.to_owned(),
                lock_id: lock_id.to_owned(),
                source: ReleaseSource::Worker,
            },
            handler: self.on_release_error.clone(),
            shared: LockId::may_be_shared(lock_id),
            min_hold_end: self.clock.now(),
            known: None,
            lease_end: over_at,
            over_at,
            may_arrive: false,
            reported: false,
            tries: 0,
            last_error: None,
        }
    }

    /// Leaves a lease to the worker, or, where there is none any more, lets it go at once; where the
    /// backend must not be used, on a thread of its own.
    pub(super) fn hand_to_worker(self: &Arc<Self>, pending: PendingRelease) {
        let Err(pending) = self.registry.defer(self.clock.now(), pending) else { return };
        if self.clock.now() < pending.min_hold_end {
            return; // A min_hold, that the lease itself keeps.
        }
        let engine = Arc::clone(self);
        let release = move || {
            let deadline = engine.clock.now().after(engine.dispose_timeout);
            // The client is closed and nobody is left to tell; the lease also ends by itself.
            let _ = engine.release_by(&pending, deadline);
        };
        if driver_unusable() {
            run_detached(release, |release| release());
        } else {
            ignore_panic(release);
        }
    }

    /// Waits until no call is under way. Whether that was so in time.
    pub(super) fn wait_for_calls(&self, end: Instant) -> bool {
        let mut calls = self.calls.lock();
        calls.awaited |= calls.running > 0;
        self.calls_done.wait_while(calls, end, |calls| calls.running > 0).1
    }

    pub(super) fn on_worker_thread(&self) -> bool {
        // A thread without its thread-locals has no id any more, and is not in a callback of the worker's.
        !thread_locals_gone() && self.threads.lock().worker_id == Some(thread::current().id())
    }

    /// Has the backend keep a resource free for renewals, once. Others who need it wait for the
    /// answer, within their own time.
    pub(super) fn reserve(&self, end: Moment, cancel: &CancelToken) -> Result<()> {
        let mut state = self.reserved.lock();
        loop {
            match *state {
                Reserved::Yes => return Ok(()),
                Reserved::No => break,
                Reserved::Asking => {
                    cancel.check()?;
                    self.check_open()?;
                    if self.clock.now() >= end {
                        return Err(LockError::new(ErrorCode::NetworkTimeout)
                            .with_message("preparing for renewals took too long: nothing was locked"));
                    }
                    // A rare and short wait: a look now and then will do.
                    let pause = Duration::from_millis(20);
                    state = self.reserving.wait_for(state, pause);
                }
            }
        }
        *state = Reserved::Asking;
        drop(state);
        let mut answer = ReserveAnswer { engine: self, granted: false };
        let result = ask(|| self.backend.reserve_renewals(self.call_deadline(end), cancel));
        answer.granted = result.is_ok();
        drop(answer);
        result
    }

    /// Gives back what the backend keeps for renewals, unless a call is under way that may need it.
    pub(super) fn unreserve(&self) {
        {
            let mut state = self.reserved.lock();
            if *state != Reserved::Yes {
                return;
            }
            *state = Reserved::Asking;
        }
        // A call that came before this is counted, and one that comes now waits for the answer.
        let mut answer = ReserveAnswer { engine: self, granted: true };
        let idle = self.calls.lock().running == 0 && self.registry.worker_queue.lock().renewals.is_empty();
        if idle {
            answer.granted = !self.backend.unreserve_renewals();
            self.unreserves.store(!answer.granted, Ordering::Relaxed);
        }
    }
}

/// Writes the answer down also when the backend panicked.
struct ReserveAnswer<'a> {
    engine: &'a Engine,
    granted: bool,
}

impl Drop for ReserveAnswer<'_> {
    fn drop(&mut self) {
        let engine = self.engine;
        *engine.reserved.lock() = if self.granted { Reserved::Yes } else { Reserved::No };
        engine.reserving.notify_all();
        let look = self.granted && engine.unreserves.load(Ordering::Relaxed);
        engine.registry.may_unreserve.store(look, Ordering::Relaxed);
        if look {
            // The worker sees to it that it is given back, also if no guard comes of this.
            engine.registry.worker_signal.notify(LOOK);
        }
    }
}

/// A call that may come back with a lease.
pub(super) struct Entered<'a>(&'a Engine);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut calls = self.0.calls.lock();
        calls.running -= 1;
        if calls.running == 0 && calls.awaited {
            self.0.calls_done.notify_all();
        }
    }
}

/// What clients and guards share. The last one ends the engine.
pub(super) struct Handle(Option<Arc<Engine>>);

impl Handle {
    pub(super) fn new(engine: Arc<Engine>) -> Self {
        Self(Some(engine))
    }

    pub(super) fn engine(&self) -> &Arc<Engine> {
        match &self.0 {
            Some(engine) => engine,
            // Only `drop` takes it out.
            None => unreachable!("a handle has its engine until it is dropped"),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Some(engine) = self.0.take() else { return };
        if engine.is_forked() {
            // With all that it has: the sockets are the parent's.
            std::mem::forget(engine);
            return;
        }
        let registry = Arc::clone(&engine.registry);
        let now = engine.clock.now();
        let threads = Arc::clone(&engine.threads);
        registry.deadlines.lock().ending = true;
        registry.timer_signal.notify(LOOK);
        let mut state = threads.lock();
        state.over = true;
        // The worker takes the engine out, under the same lock, after it has declared itself gone.
        if state.worker.is_some() && !registry.worker_queue.lock().worker_ended {
            // Moved, not cloned: a reference of our own could outlive the worker's.
            state.last = Some(engine);
            drop(state);
            registry.worker_queue.lock().ending.get_or_insert(now);
            registry.worker_signal.notify(LOOK);
        } else {
            drop(state);
            drop_where_allowed(engine);
        }
    }
}
