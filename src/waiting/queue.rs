//! The queue of this process's threads that wait for one key.
//!
//! 1. First come, first served: only the first of a key's waiters asks the server, so that many waiters
//!    cost no more than one, and nobody starves within a process.
//! 2. A waiter that leaves, for whatever reason, signals the next one: nobody waits for a thread that is
//!    gone.
//! 3. Holders are not in it. A lease that runs out in its holder's hands blocks nobody here.
//! 4. A release in this process signals the first waiter of its key; a signal is never lost.

use std::borrow::Borrow;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::Arc;

use crate::sync::Mutex;
use crate::waiting::signal::{FREED, LOOK, Signal};

pub(crate) struct WaiterQueue<K>(Mutex<HashMap<K, VecDeque<Arc<Signal>>>>);

impl<K> Default for WaiterQueue<K> {
    fn default() -> Self {
        Self(Mutex::new(HashMap::new()))
    }
}

impl<K: Eq + Hash + Clone> WaiterQueue<K> {
    /// Takes the last place of the key's queue.
    pub(crate) fn join(self: &Arc<Self>, key: &K) -> QueuePlace<K> {
        let signal = Arc::new(Signal::default());
        self.0.lock().entry(key.clone()).or_default().push_back(Arc::clone(&signal));
        QueuePlace { queue: Arc::clone(self), key: key.clone(), signal }
    }

    /// Tells the first waiter of a key that it was released.
    pub(crate) fn freed<Q>(&self, key: &Q)
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let first = self.0.lock().get(key).and_then(|waiters| waiters.front().cloned());
        if let Some(first) = first {
            first.notify(FREED);
        }
    }

    /// Has every waiter look again: the client was closed, or a manual clock was moved.
    pub(crate) fn notify_all(&self) {
        let all: Vec<_> = self.0.lock().values().flatten().cloned().collect();
        for signal in all {
            signal.notify(LOOK);
        }
    }

    #[cfg(test)]
    pub(crate) fn waiting<Q>(&self, key: &Q) -> usize
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        self.0.lock().get(key).map_or(0, VecDeque::len)
    }
}

/// A place in a key's queue, given up when it is dropped.
pub(crate) struct QueuePlace<K: Eq + Hash + Clone> {
    queue: Arc<WaiterQueue<K>>,
    key: K,
    signal: Arc<Signal>,
}

impl<K: Eq + Hash + Clone> QueuePlace<K> {
    /// Whether nobody of this process is before us.
    pub(crate) fn is_first(&self) -> bool {
        let keys = self.queue.0.lock();
        keys.get(&self.key).and_then(VecDeque::front).is_some_and(|first| Arc::ptr_eq(first, &self.signal))
    }

    /// What this waiter sleeps on.
    pub(crate) fn signal(&self) -> &Arc<Signal> {
        &self.signal
    }
}

impl<K: Eq + Hash + Clone> Drop for QueuePlace<K> {
    fn drop(&mut self) {
        let next = {
            let mut keys = self.queue.0.lock();
            let Some(waiters) = keys.get_mut(&self.key) else { return };
            if waiters.front().is_some_and(|first| Arc::ptr_eq(first, &self.signal)) {
                waiters.pop_front();
            } else {
                waiters.retain(|other| !Arc::ptr_eq(other, &self.signal));
            }
            let next = waiters.front().cloned();
            if next.is_none() {
                keys.remove(&self.key);
            }
            next
        };
        if let Some(next) = next {
            next.notify(LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::time::{Clock, Moment};

    #[test]
    fn places_are_in_order_and_given_up_by_whoever_leaves() {
        let queue = Arc::new(WaiterQueue::default());
        let (first, second, third) = (queue.join(&"k"), queue.join(&"k"), queue.join(&"k"));
        let other = queue.join(&"other");
        assert!(first.is_first() && !second.is_first() && !third.is_first() && other.is_first());
        drop(second);
        assert!(!third.is_first());
        drop(first);
        assert!(third.is_first());
        assert_eq!(third.signal().sleep_until(&Clock::system(), Moment::NEVER) & LOOK, LOOK);
        drop((third, other));
        assert!(queue.0.lock().is_empty(), "an empty queue leaves nothing behind");
    }

    #[test]
    fn a_release_signals_the_first_waiter_only() {
        let queue = Arc::new(WaiterQueue::default());
        let (first, second) = (queue.join(&"k"), queue.join(&"k"));
        queue.freed(&"k");
        queue.freed(&"other");
        let clock = Clock::system();
        assert_eq!(first.signal().sleep_until(&clock, clock.now()), FREED);
        assert_eq!(second.signal().sleep_until(&clock, clock.now()), 0);
        queue.notify_all();
        for place in [first, second] {
            assert_eq!(place.signal().sleep_until(&clock, clock.now()), LOOK);
        }
    }
}
