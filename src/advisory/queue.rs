//! This process's waiters for a key: first come, first served.
//!
//! Only the first of them asks the server, so that many waiters cost no more than one, and none
//! starves within a process. A wake-up before the sleep ends the next sleep: none is lost.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::advisory::key::AdvisoryKey;

#[derive(Default)]
pub(super) struct Queue(Mutex<HashMap<AdvisoryKey, VecDeque<Arc<WakeUp>>>>);

#[derive(Default)]
pub(super) struct WakeUp {
    called: Mutex<bool>,
    changed: Condvar,
}

/// A place in the queue; leaving it calls the next.
pub(super) struct Ticket {
    queue: Arc<Queue>,
    key: AdvisoryKey,
    pub(super) wake_up: Arc<WakeUp>,
}

impl Queue {
    pub(super) fn join(self: &Arc<Self>, key: AdvisoryKey) -> Ticket {
        let wake_up = Arc::new(WakeUp::default());
        self.queues().entry(key).or_default().push_back(Arc::clone(&wake_up));
        Ticket { queue: Arc::clone(self), key, wake_up }
    }

    /// The key was released here: its first waiter may try at once.
    pub(super) fn freed(&self, key: AdvisoryKey) {
        let first = self.queues().get(&key).and_then(|waiters| waiters.front().cloned());
        if let Some(wake_up) = first {
            wake_up.call();
        }
    }

    pub(super) fn call_all(&self) {
        let all: Vec<_> = self.queues().values().flatten().cloned().collect();
        for wake_up in all {
            wake_up.call();
        }
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<AdvisoryKey, VecDeque<Arc<WakeUp>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WakeUp {
    pub(super) fn call(&self) {
        *self.called.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Sleeps until a call, at most this long.
    pub(super) fn sleep(&self, limit: Duration) {
        let called = self.called.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(called, limit, |called| !*called);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}

impl Ticket {
    pub(super) fn is_first(&self) -> bool {
        let queues = self.queue.queues();
        queues.get(&self.key).and_then(VecDeque::front).is_some_and(|first| Arc::ptr_eq(first, &self.wake_up))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let next = {
            let mut queues = self.queue.queues();
            let Some(waiters) = queues.get_mut(&self.key) else { return };
            waiters.retain(|wake_up| !Arc::ptr_eq(wake_up, &self.wake_up));
            let next = waiters.front().cloned();
            if next.is_none() {
                queues.remove(&self.key);
            }
            next
        };
        if let Some(wake_up) = next {
            wake_up.call();
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
        second.wake_up.sleep(Duration::from_secs(60));
        drop((second, other));
        assert!(queue.queues().is_empty());
    }

    #[test]
    fn a_call_before_the_sleep_ends_it() {
        let queue = Arc::new(Queue::default());
        let ticket = queue.join(AdvisoryKey::from_i64(1));
        queue.freed(AdvisoryKey::from_i64(1));
        ticket.wake_up.sleep(Duration::from_secs(60));
        queue.call_all();
        ticket.wake_up.sleep(Duration::from_secs(60));
    }
}
