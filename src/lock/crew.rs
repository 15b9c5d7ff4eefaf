//! What the two background threads share with everybody else: no backend in here, so that the
//! timer never keeps one alive and never drops one.
//!
//! Locks are taken in this order: a lease, then the watch *or* the desk. Neither is held while
//! foreign code runs or a backend is asked.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::Thread;
use std::time::Duration;

use crate::backend::{Acquired, LostReason, Renewal, Version};
use crate::cancel::CancelToken;
use crate::error::LockError;
use crate::lock::close::CloseReport;
use crate::lock::lease::Lease;
use crate::lock::options::OnLost;
use crate::lock::report::{OnReleaseError, ReleaseErrorContext, ReleaseSource};
use crate::lock::wake::{LOOK, Wake, guard};
use crate::model::fence::Fence;
use crate::model::hash::hash_key;
use crate::model::time::Moment;

/// One guard's lease, shared between the guard and the threads that look after it.
pub(super) struct Held {
    pub(super) id: u64,
    pub(super) key: Arc<str>,
    pub(super) lock_id: Box<str>,
    pub(super) fence: Fence,
    /// The end of `min_hold`.
    pub(super) keep_until: Moment,
    pub(super) lease: Mutex<Lease>,
    pub(super) lost: CancelToken,
    pub(super) on_lost: Option<OnLost>,
    pub(super) on_release_error: Option<OnReleaseError>,
    /// The thread that took it.
    pub(super) taken_by: Thread,
}

impl Held {
    /// What a renewal of it asks for.
    pub(super) fn renewal(&self, version: Option<Version>, ttl: Duration) -> Renewal<'_> {
        Renewal { key: &self.key, lock_id: &self.lock_id, fence: self.fence, version, ttl }
    }

    /// The grant as it stands now.
    pub(super) fn grant(&self) -> Acquired {
        Acquired {
            lock_id: self.lock_id.to_string(),
            fence: self.fence,
            expires_at_ms: guard(&self.lease).expires_at_ms(),
        }
    }
}

/// A lease that is to be let go in the background.
pub(super) struct Deferred {
    pub(super) context: ReleaseErrorContext,
    pub(super) handler: Option<OnReleaseError>,
    /// The end of `min_hold`: until then the lease is kept.
    pub(super) keep_until: Moment,
    /// What was granted, and the newest version that was answered; nothing for a request whose answer
    /// never came.
    pub(super) known: Option<(Fence, Option<Version>)>,
    /// When the server's lease ends at the earliest.
    pub(super) lease_end: Moment,
    /// When the server's lease is over, whatever happens.
    pub(super) over_at: Moment,
    /// Whether the request that takes the lease may still arrive, so that "not held" means nothing.
    pub(super) may_arrive: bool,
    /// Whether the failure has been told to somebody.
    pub(super) told: bool,
    pub(super) tries: u32,
    pub(super) last_error: Option<LockError>,
}

/// Foreign code, for the worker to run when nothing else is to be done.
pub(super) enum Call {
    Lost(Arc<Held>, LostReason),
    ReleaseFailed(Option<OnReleaseError>, LockError, Box<ReleaseErrorContext>),
    /// Values of the caller's that must not be dropped on the timer.
    Drop(Box<Held>),
}

/// A lost lease that the log has not heard of yet.
pub(super) struct LostLine {
    key: Arc<str>,
    fence: Fence,
    reason: LostReason,
}

impl fmt::Display for LostLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (hash, fence, reason) = (hash_key(&self.key), self.fence, self.reason);
        write!(
            f,
            "the lease of key #{hash} with fencing token {fence} is lost: {reason}; work that it protects must stop"
        )
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
pub(super) struct Watch {
    pub(super) guards: HashMap<u64, Arc<Held>>,
    pub(super) deadlines: Schedule<Arc<Held>>,
    pub(super) next_id: u64,
    pub(super) closed: bool,
    pub(super) ending: bool,
    pub(super) asleep_until: Option<Moment>,
}

/// The worker's side: what is to be done, most urgent first.
#[derive(Default)]
pub(super) struct Desk {
    pub(super) renewals: Schedule<Arc<Held>>,
    pub(super) deferred: Schedule<Deferred>,
    /// What the log has to hear of at once, before anything else is done.
    pub(super) lost_lines: VecDeque<LostLine>,
    pub(super) calls: VecDeque<Call>,
    pub(super) next_id: u64,
    /// Deferred releases that are being tried right now.
    pub(super) in_hand: usize,
    /// Threads that are handing leases over in order to close the client.
    pub(super) closers: usize,
    /// No new work comes; since when.
    pub(super) ending: Option<Moment>,
    /// What is left is given up.
    pub(super) abandoned: bool,
    /// The worker is gone: nothing that is put here is ever looked at.
    pub(super) gone: bool,
    pub(super) asleep_until: Option<Moment>,
    /// When what the backend keeps for renewals is given back, if nothing is to be renewed until then.
    pub(super) unreserve_at: Option<Moment>,
    /// What became of deferred releases.
    pub(super) tally: CloseReport,
}

/// See the module.
#[derive(Default)]
pub(super) struct Crew {
    pub(super) watch: Mutex<Watch>,
    pub(super) watch_wake: Arc<Wake>,
    pub(super) desk: Mutex<Desk>,
    pub(super) desk_wake: Arc<Wake>,
    /// Rings when deferred work was done or a thread has ended.
    pub(super) progress: Condvar,
    /// How many of the two threads are running; the condition's other half is `desk`.
    pub(super) running: Mutex<usize>,
    pub(super) ended: Condvar,
    /// The backend keeps something for renewals that may be given back.
    pub(super) may_unreserve: AtomicBool,
}

impl Crew {
    /// A number for a new guard.
    pub(super) fn next_guard(&self) -> u64 {
        let mut watch = guard(&self.watch);
        watch.next_id += 1;
        watch.next_id
    }

    /// The fence under which this client holds a key itself, and the thread that took it.
    pub(super) fn held_here(&self, key: &str, now: Moment) -> Option<(Fence, Thread)> {
        // Copied, since a lease is locked before the watch. A lost guard that is still there holds nothing.
        let found: Vec<_> =
            guard(&self.watch).guards.values().filter(|held| *held.key == *key).cloned().collect();
        let held = found.iter().find(|held| guard(&held.lease).is_held(now))?;
        Some((held.fence, held.taken_by.clone()))
    }

    /// Takes a guard into the crew's care. `false` if the client was closed.
    pub(super) fn enlist(&self, held: &Arc<Held>) -> bool {
        let lease = guard(&held.lease);
        {
            let mut watch = guard(&self.watch);
            if watch.closed {
                return false;
            }
            watch.guards.insert(held.id, Arc::clone(held));
        }
        self.arm(held, &lease);
        true
    }

    /// Puts the lease's next deadline and renewal where the threads find them. `lease` is the
    /// locked lease of `held`, so that a guard that ends meanwhile is not put back.
    pub(super) fn arm(&self, held: &Arc<Held>, lease: &Lease) {
        if lease.is_ended() || lease.lost().is_some() {
            return;
        }
        let end = lease.end();
        let call = {
            let mut watch = guard(&self.watch);
            let old = watch.deadlines.put(held.id, end, Arc::clone(held));
            debug_assert!(old.is_none_or(|old| Arc::ptr_eq(&old, held)));
            watch.asleep_until.is_some_and(|until| end < until)
        };
        if call {
            self.watch_wake.call(LOOK);
        }
        self.arm_renewal(held, lease);
    }

    /// The renewal's half of [`Crew::arm`].
    pub(super) fn arm_renewal(&self, held: &Arc<Held>, lease: &Lease) {
        let next = lease.next_renewal();
        if next.is_never() {
            return;
        }
        let call = {
            let mut desk = guard(&self.desk);
            desk.renewals.put(held.id, next, Arc::clone(held));
            desk.asleep_until.is_some_and(|until| next < until)
        };
        if call {
            self.desk_wake.call(LOOK);
        }
    }

    /// Takes a guard that has ended out of the crew's care.
    pub(super) fn dismiss(&self, held: &Held) {
        let gone = {
            let mut watch = guard(&self.watch);
            (watch.guards.remove(&held.id), watch.deadlines.remove(held.id))
        };
        let (renewal, call) = {
            let mut desk = guard(&self.desk);
            let renewal = desk.renewals.remove(held.id);
            // The worker sleeps until the next renewal, and has to see that there is none.
            let last = renewal.is_some() && desk.renewals.is_empty() && desk.unreserve_at.is_none();
            (renewal, last && self.may_unreserve.load(Ordering::Relaxed))
        };
        if call {
            self.desk_wake.call(LOOK);
        }
        drop((gone, renewal));
    }

    /// Tells a holder that its lease is lost. The lease is marked as lost, and not locked.
    pub(super) fn tell_lost(&self, held: &Arc<Held>, reason: LostReason) {
        let deadline = guard(&self.watch).deadlines.remove(held.id);
        let renewal = guard(&self.desk).renewals.remove(held.id);
        held.lost.cancel();
        self.call(Call::Lost(Arc::clone(held), reason));
        drop((deadline, renewal));
    }

    /// Leaves foreign code to the worker.
    pub(super) fn call(&self, call: Call) {
        {
            let mut desk = guard(&self.desk);
            if desk.gone {
                // Dropped below, after the lock: it is foreign code.
                drop(desk);
                return;
            }
            // Whoever closes a client knows that its guards end.
            if let Call::Lost(held, reason) = &call
                && *reason != LostReason::Closed
            {
                desk.lost_lines.push_back(LostLine {
                    key: Arc::clone(&held.key),
                    fence: held.fence,
                    reason: *reason,
                });
            }
            desk.calls.push_back(call);
        }
        self.desk_wake.call(LOOK);
    }

    /// Leaves a release to the worker, to be looked at no sooner than `at`. Given back if the
    /// worker is gone.
    pub(super) fn defer(&self, at: Moment, deferred: Deferred) -> Result<(), Box<Deferred>> {
        {
            let mut desk = guard(&self.desk);
            if desk.gone {
                return Err(Box::new(deferred));
            }
            let id = desk.next_id;
            desk.next_id += 1;
            desk.deferred.put(id, at, deferred);
        }
        self.desk_wake.call(LOOK);
        Ok(())
    }
}

impl Deferred {
    /// The release of a guard's lease.
    pub(super) fn of(held: &Held, source: ReleaseSource, over_at: Moment, lease_end: Moment) -> Self {
        Self {
            context: ReleaseErrorContext {
                key: held.key.to_string(),
                lock_id: held.lock_id.to_string(),
                source,
            },
            handler: held.on_release_error.clone(),
            keep_until: held.keep_until,
            known: Some((held.fence, guard(&held.lease).version())),
            lease_end,
            over_at,
            may_arrive: false,
            told: false,
            tries: 0,
            last_error: None,
        }
    }
}
