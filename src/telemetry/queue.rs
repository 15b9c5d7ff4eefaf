//! From the callers' threads to the callback's: a bounded queue and the one thread that empties it.
//!
//! Invariants:
//! 1. A caller holds the queue's mutex only to append; it never waits for room, for the callback or
//!    for the hash.
//! 2. Foreign code (callback, predicate, and the drop of what they panicked with) runs on the
//!    telemetry thread alone, with no lock held and under `catch_unwind`.
//! 3. Each event that was offered is counted once: as `delivered`, as `dropped`, in `waiting`, or as
//!    the one in hand. `queued` and `finished` count only what entered the queue; it is first in,
//!    first out, so `finished >= n` says that the first `n` of them are over. (An event refused
//!    for lack of room must not count there: a flush would end too early.)
//! 4. There is at most one thread, started with the first event. It ends when the queue is closed
//!    and empty, or closed and given up; then `stage` is `Ended` for good.
//! 5. The thread and a [`TelemetryHandle`] hold the [`Queue`], never the [`Sink`]: so the drop of the
//!    last backend is what closes the queue, and it may happen on the telemetry thread itself, inside a
//!    callback.
//! 6. Whoever waits for the thread waits for a bounded time, and the thread never waits for itself.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::thread::{self, ThreadId};
use std::time::Duration;

use crate::backend::{LockBackend, LockCourse, LockStage};
use crate::model::hash::hash_key;
use crate::model::time::deadline_after;
use crate::sync::{Condvar, Mutex};
use crate::telemetry::course::{Levels, Step};
use crate::telemetry::event::{LockEvent, Raw, TelemetryOptions};
#[cfg(feature = "metrics")]
use crate::telemetry::to_metrics;
#[cfg(feature = "tracing")]
use crate::telemetry::to_tracing;
#[cfg(feature = "metrics")]
use crate::threads::ignore_panic;
use crate::threads::{JoinHandle, UserValue, catch_panic, spawn};

/// What the handles of one decorated backend share. Dropping it ends the thread.
pub(super) struct Sink {
    queue: Arc<Queue>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The state of the events: their counts, and a way to wait for them. From
/// [`Telemetry::handle`](crate::Telemetry::handle) and
/// [`PgLockClient::telemetry`](crate::PgLockClient::telemetry).
///
/// It keeps neither the backend nor the telemetry thread alive: the drop of the last client still
/// delivers what waits and ends the thread, and a handle that is left then has the final counts. It
/// does keep the callback: one that owns a handle of its own is never freed.
///
/// # Blocking
///
/// [`flush`](Self::flush) at most its `timeout`.
///
/// # Cancellation
///
/// No token ends that wait.
#[derive(Clone)]
pub struct TelemetryHandle {
    queue: Arc<Queue>,
}

struct Queue {
    options: TelemetryOptions,
    state: Mutex<State>,
    levels: Levels,
    /// Something was appended, or the queue was closed: for the thread.
    filled: Condvar,
    /// An event was finished, or the thread ended: for those who flush.
    progress: Condvar,
}

/// What waits for the thread.
pub(super) enum Item {
    Event(LockEvent),
    Step(Step),
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Item>,
    queued: u64,
    finished: u64,
    delivered: u64,
    dropped: u64,
    panics: u64,
    stage: Stage,
    idle: bool,
    worker: Option<ThreadId>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    /// No event has come yet.
    #[default]
    Fresh,
    /// Some caller is starting the thread.
    Starting,
    Running,
    /// No handle is left: deliver what waits, then end.
    Closing,
    /// Deliver nothing more.
    GivenUp,
    Ended,
}

impl Sink {
    pub(super) fn new(options: TelemetryOptions) -> Self {
        let queue = Queue {
            options,
            state: Mutex::default(),
            levels: Levels::default(),
            filled: Condvar::new(),
            progress: Condvar::new(),
        };
        Self { queue: Arc::new(queue), thread: Mutex::new(None) }
    }

    /// Appends what fits and counts the rest as dropped.
    pub(super) fn offer(&self, events: impl IntoIterator<Item = LockEvent>) {
        self.append(events.into_iter().map(Item::Event));
    }

    /// Counts a stage, and tells it on to whoever hears of it.
    pub(super) fn follow(&self, course: &LockCourse<'_>) {
        if !self.queue.options.follows() {
            return;
        }
        self.queue.levels.count(course.stage);
        let over = matches!(course.stage, LockStage::Ended { .. });
        if over || self.queue.options.metrics {
            self.append([Item::Step(Step::of(course))]);
        }
    }

    /// Looks at the connections, if anybody wants to know.
    pub(super) fn sample(&self, backend: &impl LockBackend) {
        if self.queue.options.metrics
            && let Some(connections) = backend.connections()
        {
            self.queue.levels.note(connections);
        }
    }

    fn append(&self, items: impl IntoIterator<Item = Item>) {
        let (idle, start) = {
            let mut state = self.queue.state.lock();
            for item in items {
                if state.waiting.len() < self.queue.options.capacity {
                    state.queued += 1;
                    state.waiting.push_back(item);
                } else {
                    state.dropped += 1;
                }
            }
            let start = state.stage == Stage::Fresh && !state.waiting.is_empty();
            if start {
                state.stage = Stage::Starting;
            }
            (state.idle, start)
        };
        if start {
            self.start();
        } else if idle {
            self.queue.filled.notify_all();
        }
    }

    /// Starts the thread. If the system has none to give, the events wait and the next one tries again.
    fn start(&self) {
        let queue = Arc::clone(&self.queue);
        let spawned = spawn("syncguard-telemetry", move || queue.run());
        if let Ok(handle) = spawned {
            *self.thread.lock() = Some(handle);
        } else {
            let mut state = self.queue.state.lock();
            state.stage = Stage::Fresh;
        }
    }

    pub(super) fn handle(&self) -> TelemetryHandle {
        TelemetryHandle { queue: Arc::clone(&self.queue) }
    }
}

impl TelemetryHandle {
    /// Waits until the callback has received all events up to now, for at most `timeout`, and returns
    /// whether it has. In the callback itself the answer is `false`, at once.
    #[allow(clippy::must_use_candidate, reason = "waiting is what it is called for")]
    pub fn flush(&self, timeout: Duration) -> bool {
        self.queue.flush(timeout)
    }

    /// How many events the callback has received, including those in which it panicked.
    #[must_use]
    pub fn delivered(&self) -> u64 {
        self.queue.state.lock().delivered
    }

    /// How long the end of a client waits.
    pub(crate) fn flush_timeout(&self) -> Duration {
        self.queue.options.flush_timeout
    }

    /// How many events were dropped because the callback was too slow.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.queue.state.lock().dropped
    }

    /// In how many events the callback panicked.
    #[must_use]
    pub fn panics(&self) -> u64 {
        self.queue.state.lock().panics
    }
}

impl fmt::Debug for TelemetryHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TelemetryHandle")
            .field("delivered", &self.delivered())
            .field("dropped", &self.dropped())
            .field("panics", &self.panics())
            .finish()
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        let timeout = self.queue.options.flush_timeout;
        let ended = self.queue.close(timeout);
        let thread = self.thread.lock().take();
        // Only a thread that has said that it is over is joined; one that hangs in a callback is
        // left behind and ends when the callback returns, which may be never.
        if let (true, Some(thread)) = (ended, thread) {
            let _ = thread.join();
        }
    }
}

impl Queue {
    fn run(&self) {
        self.state.lock().worker = Some(thread::current().id());
        let mut listeners = Listeners::begin(&self.options);
        while let Some(item) = self.next() {
            let panicked = match item {
                Item::Event(event) => self.deliver(event),
                Item::Step(step) => self.deliver_step(&step),
            };
            listeners.tell_levels(self);
            let mut state = self.state.lock();
            state.finished += 1;
            state.delivered += 1;
            state.panics += u64::from(panicked);
            drop(state);
            self.progress.notify_all();
        }
        listeners.end();
        self.state.lock().stage = Stage::Ended;
        self.progress.notify_all();
    }

    /// The next event; `None` when the thread is to end.
    fn next(&self) -> Option<Item> {
        let mut state = self.state.lock();
        loop {
            match state.stage {
                Stage::GivenUp | Stage::Ended => {
                    state.drop_waiting();
                    return None;
                }
                Stage::Closing if state.waiting.is_empty() => return None,
                Stage::Starting | Stage::Fresh => state.stage = Stage::Running,
                Stage::Running | Stage::Closing => {}
            }
            if let Some(item) = state.waiting.pop_front() {
                return Some(item);
            }
            state.idle = true;
            state = self.filled.wait(state);
            state.idle = false;
        }
    }

    /// Completes the event and hands it over; whether the callback panicked.
    fn deliver(&self, mut event: LockEvent) -> bool {
        event.key_hash = event.key_hash.or_else(|| event.key.as_deref().map(hash_key));
        event.lock_id_hash = event.lock_id_hash.or_else(|| event.lock_id.as_deref().map(hash_key));
        let told = self.tell_event(&event);
        let raw = (event.key.take(), event.lock_id.take());
        let permitted = match &self.options.raw {
            Raw::Never => false,
            Raw::Always => true,
            Raw::If(permit) => {
                permit.get().and_then(|permit| catch_panic(|| permit(&event))).unwrap_or(false)
            }
        };
        if permitted {
            (event.key, event.lock_id) = raw;
        }
        let called = self.options.on_event.get().and_then(|on_event| catch_panic(|| on_event(&event)));
        called.is_none() || !told
    }

    /// Tells recorder and subscriber; whether that went well.
    fn tell_event(&self, event: &LockEvent) -> bool {
        let (options, _) = (&self.options, event);
        let told = catch_panic(|| {
            let _ = options;
            #[cfg(feature = "metrics")]
            if options.metrics {
                to_metrics::event(event);
            }
            #[cfg(feature = "tracing")]
            if options.tracing {
                to_tracing::event(event);
            }
        });
        told.is_some()
    }

    /// Tells a stage of a lock to whoever hears of it; whether one of them panicked.
    fn deliver_step(&self, step: &Step) -> bool {
        let told = catch_panic(|| {
            #[cfg(feature = "metrics")]
            if self.options.metrics {
                to_metrics::step(step);
            }
            #[cfg(feature = "tracing")]
            if self.options.tracing
                && let Some(summary) = step.summary()
            {
                to_tracing::lock(&summary);
            }
        });
        let on_lock = self.options.on_lock.as_ref().and_then(UserValue::get);
        let called = match (on_lock, step.summary()) {
            (Some(on_lock), Some(summary)) => catch_panic(|| on_lock(&summary)),
            _ => Some(()),
        };
        told.is_none() || called.is_none()
    }

    /// Waits until everything queued before now is finished. A callback cannot wait for itself.
    fn flush(&self, timeout: Duration) -> bool {
        let end = deadline_after(timeout);
        let state = self.state.lock();
        let goal = state.queued;
        if state.worker == Some(thread::current().id()) {
            return state.finished >= goal;
        }
        self.progress.wait_while(state, end, |state| state.finished < goal).1
    }

    /// Ends the thread, and waits until it has: whether it is over and may be joined.
    fn close(&self, timeout: Duration) -> bool {
        let end = deadline_after(timeout);
        let mut state = self.state.lock();
        if matches!(state.stage, Stage::Fresh) {
            state.drop_waiting();
            return false;
        }
        if state.stage != Stage::Ended {
            state.stage = Stage::Closing;
        }
        self.filled.notify_all();
        // The last handle was dropped by the callback: the thread goes on when it returns.
        if state.worker == Some(thread::current().id()) {
            return false;
        }
        let (mut state, ended) = self.progress.wait_while(state, end, |state| state.stage != Stage::Ended);
        if !ended {
            state.stage = Stage::GivenUp;
            self.filled.notify_all();
        }
        ended
    }
}

/// Who hears of levels, from the begin of the thread to its end.
struct Listeners {
    #[cfg(feature = "metrics")]
    told: Option<to_metrics::Told>,
}

impl Listeners {
    #[cfg(feature = "metrics")]
    fn begin(options: &TelemetryOptions) -> Self {
        let told = options.metrics.then(to_metrics::Told::default);
        if told.is_some() {
            ignore_panic(to_metrics::describe);
        }
        Self { told }
    }

    #[cfg(not(feature = "metrics"))]
    fn begin(_: &TelemetryOptions) -> Self {
        Self {}
    }

    #[cfg_attr(not(feature = "metrics"), allow(clippy::unused_self, reason = "nobody hears"))]
    fn tell_levels(&mut self, queue: &Queue) {
        let _ = queue;
        #[cfg(feature = "metrics")]
        if let Some(told) = &mut self.told {
            let dropped = queue.state.lock().dropped;
            ignore_panic(|| told.tell(&queue.levels, dropped));
        }
    }

    #[cfg_attr(not(feature = "metrics"), allow(clippy::unused_self, reason = "nobody hears"))]
    fn end(&mut self) {
        #[cfg(feature = "metrics")]
        if let Some(told) = &mut self.told {
            ignore_panic(|| told.end());
        }
    }
}

impl State {
    fn drop_waiting(&mut self) {
        let left = u64::try_from(self.waiting.len()).unwrap_or(u64::MAX);
        self.waiting.clear();
        self.finished += left;
        self.dropped += left;
    }
}
