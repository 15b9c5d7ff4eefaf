//! The guards of a client and what is to be done for them: shared by its two threads and everybody
//! else. No backend in here, so that the timer never keeps one alive and never drops one.
//!
//! Locks are taken in this order: a lease, then the deadlines *or* the worker's queue. Neither is held
//! while user code runs or a backend is asked.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use crate::backend::{Acquired, LockEnding, LostReason, Renewal, Version};
use crate::cancel::CancelToken;
use crate::error::LockError;
use crate::lock::course::{Holding, Told};
use crate::lock::lease::{Lease, Outcome};
use crate::lock::lease_set::LeaseSet;
use crate::lock::options::OnLost;
use crate::lock::report::{OnReleaseError, ReleaseErrorContext, ReleaseSource};
use crate::model::fence::Fence;
use crate::model::hash::hash_key;
use crate::model::key::semaphore_of;
use crate::model::lock_id::LockId;
use crate::model::time::Moment;
use crate::sync::{Condvar, Mutex};
use crate::waiting::{LOOK, Signal};

/// One guard's lease, shared between the guard and the threads that look after it.
pub(super) struct GuardState {
    pub(super) id: u64,
    pub(super) key: Arc<str>,
    pub(super) lock_id: Box<str>,
    pub(super) fence: Fence,
    /// Whether it is a reader's.
    pub(super) shared: bool,
    /// The end of `min_hold`.
    pub(super) min_hold_end: Moment,
    pub(super) lease: Mutex<Lease>,
    pub(super) lost: CancelToken,
    /// The leases that it is held and lost with; they share the token.
    pub(super) set: Option<Arc<LeaseSet<GuardState>>>,
    pub(super) on_lost: Option<OnLost>,
    pub(super) on_release_error: Option<OnReleaseError>,
    /// The thread that took it.
    pub(super) taken_by: Thread,
    /// What is told of it. Known before anybody else knows the lease.
    pub(super) holding: OnceLock<Arc<Holding>>,
}

impl GuardState {
    /// Tells, once, that it is over.
    pub(super) fn tell_end(&self, told: Told<'_>, ending: LockEnding) {
        if let Some(holding) = self.holding.get() {
            holding.end(told, ending);
        }
    }

    /// What a renewal of it asks for.
    pub(super) fn renewal(&self, version: Option<Version>, ttl: Duration) -> Renewal<'_> {
        Renewal {
            key: &self.key,
            lock_id: &self.lock_id,
            fence: self.fence,
            version,
            ttl,
            shared: self.shared,
        }
    }

    /// The grant as it stands now.
    pub(super) fn grant(&self) -> Acquired {
        Acquired {
            lock_id: self.lock_id.to_string(),
            fence: self.fence,
            expires_at_ms: self.lease.lock().expires_at_ms(),
        }
    }
}

/// A lease that the worker is to release.
pub(super) struct PendingRelease {
    pub(super) context: ReleaseErrorContext,
    pub(super) handler: Option<OnReleaseError>,
    /// Whether it is a reader's.
    pub(super) shared: bool,
    /// The end of `min_hold`: until then the lease is kept.
    pub(super) min_hold_end: Moment,
    /// What was granted, and the newest version that was answered; nothing for a request whose answer
    /// never came.
    pub(super) known: Option<(Fence, Option<Version>)>,
    /// When the server's lease ends at the earliest.
    pub(super) lease_end: Moment,
    /// When the server's lease is over, whatever happens.
    pub(super) over_at: Moment,
    /// Whether the request that takes the lease may still arrive, so that "not held" means nothing.
    pub(super) may_arrive: bool,
    /// Whether somebody has been told of the failure.
    pub(super) reported: bool,
    pub(super) tries: u32,
    pub(super) last_error: Option<LockError>,
}

/// User code, for the worker to run when nothing else is to be done.
pub(super) enum Callback {
    Lost(Arc<GuardState>, LostReason),
    ReleaseFailed(Option<OnReleaseError>, LockError, Box<ReleaseErrorContext>),
    /// Values of the caller's that must not be dropped on the timer.
    Drop(Box<GuardState>),
}

/// A lost lease, for the log.
pub(super) struct LostLease(Arc<GuardState>, LostReason);

impl LostLease {
    pub(super) fn tell(&self, told: Told<'_>) {
        self.0.tell_end(told, LockEnding::Lost(self.1));
    }
}

impl fmt::Display for LostLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(state, reason) = self;
        let (hash, fence) = (hash_key(&state.key), state.fence);
        write!(
            f,
            "the lease of key #{hash} with fencing token {fence} is lost: {reason}; work that it protects must stop"
        )
    }
}

/// Callbacks, first in, first out. The log hears of lost leases as soon as they are in here, before their
/// callbacks have their turn.
#[derive(Default)]
pub(super) struct Callbacks {
    waiting: VecDeque<Callback>,
    /// How many of them the log has heard of, from the front.
    logged: usize,
}

impl Callbacks {
    pub(super) fn pop(&mut self) -> Option<Callback> {
        self.logged = self.logged.saturating_sub(1);
        self.waiting.pop_front()
    }

    /// The lost leases that the log has not heard of yet. Whoever closes a client knows that its guards
    /// end.
    pub(super) fn take_unlogged(&mut self) -> Vec<LostLease> {
        let new = self.waiting.range(self.logged..);
        let lost = new.filter_map(|callback| match callback {
            Callback::Lost(state, reason) if *reason != LostReason::Closed => {
                Some(LostLease(Arc::clone(state), *reason))
            }
            _ => None,
        });
        let lost = lost.collect();
        self.logged = self.waiting.len();
        lost
    }
}

/// Things by the time they are due; one entry per id.
pub(super) struct Schedule<T> {
    order: BTreeSet<(Moment, u64)>,
    items: HashMap<u64, (Moment, T)>,
}

impl<T> Default for Schedule<T> {
    fn default() -> Self {
        Self { order: BTreeSet::new(), items: HashMap::new() }
    }
}

impl<T> Schedule<T> {
    pub(super) fn put(&mut self, id: u64, at: Moment, item: T) -> Option<T> {
        let old = self.remove(id);
        self.order.insert((at, id));
        self.items.insert(id, (at, item));
        old
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<T> {
        let (at, item) = self.items.remove(&id)?;
        self.order.remove(&(at, id));
        Some(item)
    }

    /// When the first thing is due; never, if there is none.
    pub(super) fn next(&self) -> Moment {
        self.order.first().map_or(Moment::NEVER, |(at, _)| *at)
    }

    /// Takes the first thing that is due at `now`.
    pub(super) fn pop(&mut self, now: Moment) -> Option<(u64, T)> {
        let (at, id) = *self.order.first()?;
        if at > now {
            return None;
        }
        self.remove(id).map(|item| (id, item))
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
}

/// The timer's side: all guards, by the time at which they are lost.
#[derive(Default)]
pub(super) struct Deadlines {
    pub(super) guards: HashMap<u64, Arc<GuardState>>,
    pub(super) by_time: Schedule<Arc<GuardState>>,
    pub(super) next_id: u64,
    pub(super) closed: bool,
    pub(super) ending: bool,
    pub(super) asleep_until: Option<Moment>,
}

/// The worker's side: what is to be done, most urgent first.
#[derive(Default)]
pub(super) struct WorkerQueue {
    pub(super) renewals: Schedule<Arc<GuardState>>,
    pub(super) releases: Schedule<PendingRelease>,
    pub(super) callbacks: Callbacks,
    /// Tickets of waiters that have left.
    pub(super) withdrawals: Vec<LockId>,
    pub(super) next_id: u64,
    /// Releases that are being tried right now.
    pub(super) in_progress: usize,
    /// Threads that are handing leases over in order to close the client.
    pub(super) closing: usize,
    /// No new work comes; since when.
    pub(super) ending: Option<Moment>,
    /// What is left is given up.
    pub(super) abandoned: bool,
    /// The worker has ended: nothing that is put here is ever looked at.
    pub(super) worker_ended: bool,
    pub(super) asleep_until: Option<Moment>,
    /// When what the backend keeps for renewals is given back, if nothing is to be renewed until then.
    pub(super) unreserve_at: Option<Moment>,
    /// What became of pending releases.
    pub(super) totals: ReleaseTotals,
}

/// How many pending releases came to what.
#[derive(Clone, Copy, Default)]
pub(super) struct ReleaseTotals {
    pub(super) released: usize,
    pub(super) not_held: usize,
    pub(super) failed: usize,
}

/// See the module.
#[derive(Default)]
pub(super) struct Registry {
    pub(super) deadlines: Mutex<Deadlines>,
    pub(super) timer_signal: Arc<Signal>,
    pub(super) worker_queue: Mutex<WorkerQueue>,
    pub(super) worker_signal: Arc<Signal>,
    /// Notified when a pending release was tried or a thread has ended.
    pub(super) progress: Condvar,
    /// How many of the two threads are running; the condition's other half is `worker_queue`.
    pub(super) running: Mutex<usize>,
    pub(super) ended: Condvar,
    /// The backend keeps something for renewals that may be given back.
    pub(super) may_unreserve: AtomicBool,
}

impl Registry {
    /// A number for a new guard.
    pub(super) fn next_guard(&self) -> u64 {
        let mut deadlines = self.deadlines.lock();
        deadlines.next_id += 1;
        deadlines.next_id
    }

    /// The fence under which this client holds a key itself, and the thread that took it.
    pub(super) fn held_here(&self, key: &str, now: Moment) -> Option<(Fence, Thread)> {
        // Copied, since a lease is locked before the deadlines. A lost guard that is still there holds nothing.
        let found: Vec<_> =
            self.deadlines.lock().guards.values().filter(|state| *state.key == *key).cloned().collect();
        let state = found.iter().find(|state| state.lease.lock().is_held(now))?;
        Some((state.fence, state.taken_by.clone()))
    }

    /// How many permits of this semaphore the client holds itself.
    pub(super) fn permits_held_here(&self, semaphore: &str, now: Moment) -> usize {
        let is_permit = |state: &&Arc<GuardState>| semaphore_of(&state.key) == Some(semaphore);
        let found: Vec<_> = self.deadlines.lock().guards.values().filter(is_permit).cloned().collect();
        found.iter().filter(|state| state.lease.lock().is_held(now)).count()
    }

    /// Takes a guard into the registry. `false` if the client was closed.
    pub(super) fn register(&self, state: &Arc<GuardState>) -> bool {
        let lease = state.lease.lock();
        {
            let mut deadlines = self.deadlines.lock();
            if deadlines.closed {
                return false;
            }
            deadlines.guards.insert(state.id, Arc::clone(state));
        }
        self.schedule(state, &lease);
        true
    }

    /// Puts the lease's next deadline and renewal where the threads find them. `lease` is the
    /// locked lease of `state`, so that a guard that ends meanwhile is not put back.
    pub(super) fn schedule(&self, state: &Arc<GuardState>, lease: &Lease) {
        if lease.is_ended() || lease.lost().is_some() {
            return;
        }
        let end = lease.end();
        let notify = {
            let mut deadlines = self.deadlines.lock();
            let old = deadlines.by_time.put(state.id, end, Arc::clone(state));
            debug_assert!(old.is_none_or(|old| Arc::ptr_eq(&old, state)));
            deadlines.asleep_until.is_some_and(|until| end < until)
        };
        if notify {
            self.timer_signal.notify(LOOK);
        }
        self.schedule_renewal(state, lease);
    }

    /// The renewal's half of [`schedule`](Self::schedule).
    pub(super) fn schedule_renewal(&self, state: &Arc<GuardState>, lease: &Lease) {
        let next = lease.next_renewal();
        if next.is_never() {
            return;
        }
        let notify = {
            let mut queue = self.worker_queue.lock();
            queue.renewals.put(state.id, next, Arc::clone(state));
            queue.asleep_until.is_some_and(|until| next < until)
        };
        if notify {
            self.worker_signal.notify(LOOK);
        }
    }

    /// Takes a guard that has ended out of the registry.
    pub(super) fn unregister(&self, state: &GuardState) {
        let gone = {
            let mut deadlines = self.deadlines.lock();
            (deadlines.guards.remove(&state.id), deadlines.by_time.remove(state.id))
        };
        let (renewal, notify) = {
            let mut queue = self.worker_queue.lock();
            let renewal = queue.renewals.remove(state.id);
            // The worker sleeps until the next renewal, and has to see that there is none.
            let last = renewal.is_some() && queue.renewals.is_empty() && queue.unreserve_at.is_none();
            (renewal, last && self.may_unreserve.load(Ordering::Relaxed))
        };
        if notify {
            self.worker_signal.notify(LOOK);
        }
        drop((gone, renewal));
    }

    /// Books the answer to an operation, and tells the holder if the lease is lost by it.
    pub(super) fn finish(&self, state: &Arc<GuardState>, id: u32, now: Moment, outcome: Outcome) {
        let lost = {
            let mut lease = state.lease.lock();
            let lost = lease.finish(id, now, outcome);
            self.schedule(state, &lease);
            lost
        };
        if let Some(reason) = lost {
            self.notify_lost(state, reason, now);
        }
    }

    /// Notices, ahead of the timer, that a lease is over, so that nobody is told "held" again.
    pub(super) fn tick(&self, state: &Arc<GuardState>, now: Moment) {
        let lost = state.lease.lock().tick(now);
        if let Some(reason) = lost {
            self.notify_lost(state, reason, now);
        }
    }

    /// Tells a holder that its lease is lost. The lease is marked as lost, and not locked. Where it is
    /// one of a set, all of them are lost with it: the holder is told once, and what is left of the set
    /// is released.
    pub(super) fn notify_lost(&self, state: &Arc<GuardState>, reason: LostReason, now: Moment) {
        let Some(set) = &state.set else {
            self.tell_holder(state, reason);
            return;
        };
        if !set.lose(reason) {
            return; // Whoever lost the first of them ends this one, too.
        }
        self.tell_holder(state, reason);
        for member in set.members() {
            let (ended, over_at, lease_end) = {
                let mut lease = member.lease.lock();
                let _ = lease.lose(reason);
                (lease.end_now(), lease.surely_over(now), lease.end())
            };
            self.unregister(&member);
            if ended {
                let pending = PendingRelease::of(&member, ReleaseSource::Worker, over_at, lease_end);
                // Without a worker the client has ended, and its leases with it.
                let _ = self.defer(now, pending);
            }
        }
    }

    fn tell_holder(&self, state: &Arc<GuardState>, reason: LostReason) {
        let deadline = self.deadlines.lock().by_time.remove(state.id);
        let renewal = self.worker_queue.lock().renewals.remove(state.id);
        state.lost.cancel();
        self.queue_callback(Callback::Lost(Arc::clone(state), reason));
        drop((deadline, renewal));
    }

    /// Leaves user code to the worker.
    pub(super) fn queue_callback(&self, callback: Callback) {
        {
            let mut queue = self.worker_queue.lock();
            if queue.worker_ended {
                // Dropped below, after the lock: it is user code.
                drop(queue);
                return;
            }
            queue.callbacks.waiting.push_back(callback);
        }
        self.worker_signal.notify(LOOK);
    }

    /// Leaves a release to the worker, to be looked at no sooner than `at`. Given back if the
    /// worker is gone.
    pub(super) fn defer(&self, at: Moment, pending: PendingRelease) -> Result<(), Box<PendingRelease>> {
        {
            let mut queue = self.worker_queue.lock();
            if queue.worker_ended {
                return Err(Box::new(pending));
            }
            let id = queue.next_id;
            queue.next_id += 1;
            queue.releases.put(id, at, pending);
        }
        self.worker_signal.notify(LOOK);
        Ok(())
    }
}

impl PendingRelease {
    /// The release of a guard's lease.
    pub(super) fn of(state: &GuardState, source: ReleaseSource, over_at: Moment, lease_end: Moment) -> Self {
        Self {
            context: ReleaseErrorContext {
                key: state.key.to_string(),
                lock_id: state.lock_id.to_string(),
                source,
            },
            handler: state.on_release_error.clone(),
            shared: state.shared,
            min_hold_end: state.min_hold_end,
            known: Some((state.fence, state.lease.lock().version())),
            lease_end,
            over_at,
            may_arrive: false,
            reported: false,
            tries: 0,
            last_error: None,
        }
    }
}
