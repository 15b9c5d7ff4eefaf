//! This process's waiters for a key: first come, first served.
//!
//! Only the first of them asks the server, so that many waiters cost no more than one, and nobody
//! starves within a process. A bell that rings before the sleep ends the next one: no ring is lost.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::advisory::key::AdvisoryKey;

#[derive(Default)]
pub(super) struct Queue(Mutex<HashMap<AdvisoryKey, VecDeque<Arc<Bell>>>>);

#[derive(Default)]
pub(super) struct Bell {
    rung: Mutex<bool>,
    ring: Condvar,
}

/// A place in the queue; leaving it calls the next.
pub(super) struct Ticket {
    queue: Arc<Queue>,
    key: AdvisoryKey,
    pub(super) bell: Arc<Bell>,
}

impl Queue {
    pub(super) fn join(self: &Arc<Self>, key: AdvisoryKey) -> Ticket {
        let bell = Arc::new(Bell::default());
        self.lines().entry(key).or_default().push_back(Arc::clone(&bell));
        Ticket { queue: Arc::clone(self), key, bell }
    }

    /// The key was let go here: its first waiter may try at once.
    pub(super) fn freed(&self, key: AdvisoryKey) {
        let first = self.lines().get(&key).and_then(|line| line.front().cloned());
        if let Some(bell) = first {
            bell.ring();
        }
    }

    pub(super) fn call_all(&self) {
        let all: Vec<_> = self.lines().values().flatten().cloned().collect();
        for bell in all {
            bell.ring();
        }
    }

    fn lines(&self) -> MutexGuard<'_, HashMap<AdvisoryKey, VecDeque<Arc<Bell>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bell {
    pub(super) fn ring(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.ring.notify_all();
    }

    /// Sleeps until a ring, at most this long.
    pub(super) fn sleep(&self, limit: Duration) {
        let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.ring.wait_timeout_while(rung, limit, |rung| !*rung);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}

impl Ticket {
    pub(super) fn is_first(&self) -> bool {
        let lines = self.queue.lines();
        lines.get(&self.key).and_then(VecDeque::front).is_some_and(|first| Arc::ptr_eq(first, &self.bell))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let next = {
            let mut lines = self.queue.lines();
            let Some(line) = lines.get_mut(&self.key) else { return };
            line.retain(|bell| !Arc::ptr_eq(bell, &self.bell));
            let next = line.front().cloned();
            if next.is_none() {
                lines.remove(&self.key);
            }
            next
        };
        if let Some(bell) = next {
            bell.ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_take_turns_and_leave_nothing_behind() {
        let queue = Arc::new(Queue::default());
        let key = AdvisoryKey::from_i64(1);
        let (first, second, other) = (queue.join(key), queue.join(key), queue.join(AdvisoryKey::from_i64(2)));
        assert!(first.is_first() && !second.is_first() && other.is_first());
        drop(first);
        assert!(second.is_first());
        second.bell.sleep(Duration::from_secs(60));
        drop((second, other));
        assert!(queue.lines().is_empty());
    }

    #[test]
    fn a_ring_before_the_sleep_ends_it() {
        let queue = Arc::new(Queue::default());
        let ticket = queue.join(AdvisoryKey::from_i64(1));
        queue.freed(AdvisoryKey::from_i64(1));
        ticket.bell.sleep(Duration::from_secs(60));
        queue.call_all();
        ticket.bell.sleep(Duration::from_secs(60));
    }
}
