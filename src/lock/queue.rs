//! The queue of this process's threads that wait for one key.
//!
//! 1. First come, first served: only the first of a key's waiters asks the server.
//! 2. A waiter that leaves, for whatever reason, signals the next one: nobody waits for a thread that is gone.
//! 3. Holders are not in it. A lease that runs out in its holder's hands blocks nobody here.
//! 4. A release in this process signals the first waiter of its key; a signal is never lost.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use crate::lock::signal::{FREED, LOOK, Signal, locked};

#[derive(Default)]
pub(super) struct Queue {
    keys: Mutex<HashMap<Arc<str>, VecDeque<Arc<Signal>>>>,
}

impl Queue {
    /// Takes the last place of the key's queue.
    pub(super) fn join(self: &Arc<Self>, key: &Arc<str>) -> QueuePlace {
        let signal = Arc::new(Signal::default());
        locked(&self.keys).entry(Arc::clone(key)).or_default().push_back(Arc::clone(&signal));
        QueuePlace { queue: Arc::clone(self), key: Arc::clone(key), signal }
    }

    /// Tells the first waiter of a key that it was let go.
    pub(super) fn freed(&self, key: &str) {
        let first = locked(&self.keys).get(key).and_then(|waiters| waiters.front().map(Arc::clone));
        if let Some(signal) = first {
            signal.notify(FREED);
        }
    }

    #[cfg(test)]
    pub(super) fn waiting(&self, key: &str) -> usize {
        locked(&self.keys).get(key).map_or(0, VecDeque::len)
    }
}

/// A place in a key's queue, given up when it is dropped.
pub(super) struct QueuePlace {
    queue: Arc<Queue>,
    key: Arc<str>,
    signal: Arc<Signal>,
}

impl QueuePlace {
    /// Whether nobody of this process is before us.
    pub(super) fn is_first(&self) -> bool {
        locked(&self.queue.keys)
            .get(&self.key)
            .and_then(|waiters| waiters.front())
            .is_some_and(|first| Arc::ptr_eq(first, &self.signal))
    }

    pub(super) fn signal(&self) -> &Arc<Signal> {
        &self.signal
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        let next = {
            let mut keys = locked(&self.queue.keys);
            let Some(waiters) = keys.get_mut(&self.key) else { return };
            if waiters.front().is_some_and(|first| Arc::ptr_eq(first, &self.signal)) {
                waiters.pop_front();
            } else {
                waiters.retain(|other| !Arc::ptr_eq(other, &self.signal));
            }
            let next = waiters.front().map(Arc::clone);
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
        let queue = Arc::new(Queue::default());
        let key: Arc<str> = "k".into();
        let (first, second, third) = (queue.join(&key), queue.join(&key), queue.join(&key));
        assert!(first.is_first() && !second.is_first() && !third.is_first());
        drop(second);
        assert!(!third.is_first());
        drop(first);
        assert!(third.is_first());
        assert_eq!(third.signal().sleep_until(&Clock::system(), Moment::NEVER) & LOOK, LOOK);
        drop(third);
        assert!(locked(&queue.keys).is_empty(), "an empty queue leaves nothing behind");
    }

    #[test]
    fn a_release_calls_the_first_waiter_only() {
        let queue = Arc::new(Queue::default());
        let key: Arc<str> = "k".into();
        let (first, second) = (queue.join(&key), queue.join(&key));
        queue.freed("k");
        queue.freed("other");
        let clock = Clock::system();
        assert_eq!(first.signal().sleep_until(&clock, clock.now()), FREED);
        assert_eq!(second.signal().sleep_until(&clock, clock.now()), 0);
    }
}
