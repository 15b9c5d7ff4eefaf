//! The queue of this process's threads that wait for one key.
//!
//! 1. First come, first served: only the first of a key's waiters asks the server.
//! 2. Whoever leaves, for whatever reason, calls the next: nobody waits for a thread that is gone.
//! 3. Holders are not in it. A lease that runs out in its holder's hands blocks nobody here.
//! 4. A release in this process calls the first waiter of its key; a call is never lost.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use crate::lock::wake::{FREED, LOOK, Wake, guard};

#[derive(Default)]
pub(super) struct Queue {
    keys: Mutex<HashMap<Arc<str>, VecDeque<Arc<Wake>>>>,
}

impl Queue {
    /// Takes the last place of the key's queue.
    pub(super) fn join(self: &Arc<Self>, key: &Arc<str>) -> Ticket {
        let wake = Arc::new(Wake::default());
        guard(&self.keys).entry(Arc::clone(key)).or_default().push_back(Arc::clone(&wake));
        Ticket { queue: Arc::clone(self), key: Arc::clone(key), wake }
    }

    /// Tells the first waiter of a key that it was let go.
    pub(super) fn freed(&self, key: &str) {
        let first = guard(&self.keys).get(key).and_then(|line| line.front().map(Arc::clone));
        if let Some(wake) = first {
            wake.call(FREED);
        }
    }

    #[cfg(test)]
    pub(super) fn waiting(&self, key: &str) -> usize {
        guard(&self.keys).get(key).map_or(0, VecDeque::len)
    }
}

/// A place in a key's queue, given up when it is dropped.
pub(super) struct Ticket {
    queue: Arc<Queue>,
    key: Arc<str>,
    wake: Arc<Wake>,
}

impl Ticket {
    /// Whether nobody of this process is before us.
    pub(super) fn is_first(&self) -> bool {
        guard(&self.queue.keys)
            .get(&self.key)
            .and_then(|line| line.front())
            .is_some_and(|first| Arc::ptr_eq(first, &self.wake))
    }

    pub(super) fn wake(&self) -> &Arc<Wake> {
        &self.wake
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let next = {
            let mut keys = guard(&self.queue.keys);
            let Some(line) = keys.get_mut(&self.key) else { return };
            if line.front().is_some_and(|first| Arc::ptr_eq(first, &self.wake)) {
                line.pop_front();
            } else {
                line.retain(|other| !Arc::ptr_eq(other, &self.wake));
            }
            let next = line.front().map(Arc::clone);
            if next.is_none() {
                keys.remove(&self.key);
            }
            next
        };
        if let Some(next) = next {
            next.call(LOOK);
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
        assert_eq!(third.wake().sleep_until(&Clock::system(), Moment::NEVER) & LOOK, LOOK);
        drop(third);
        assert!(guard(&queue.keys).is_empty(), "an empty queue leaves nothing behind");
    }

    #[test]
    fn a_release_calls_the_first_waiter_only() {
        let queue = Arc::new(Queue::default());
        let key: Arc<str> = "k".into();
        let (first, second) = (queue.join(&key), queue.join(&key));
        queue.freed("k");
        queue.freed("other");
        let clock = Clock::system();
        assert_eq!(first.wake().sleep_until(&clock, clock.now()), FREED);
        assert_eq!(second.wake().sleep_until(&clock, clock.now()), 0);
    }
}
