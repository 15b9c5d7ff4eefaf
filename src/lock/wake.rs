//! Sleeping until a moment of the backend's clock, or until somebody calls.
//!
//! 1. A call is never lost: it stays until the sleeper takes it, also when it comes first.
//! 2. A manual clock is never waited for by the system's time: only calls end such a sleep, and
//!    every advance of the clock calls.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::model::time::{Clock, Moment};

/// The longest uninterrupted sleep towards a moment: condition variables stand still while the host
/// is suspended, the clock does not, so a sleeper looks at the clock this often.
const NAP: Duration = Duration::from_secs(1);

/// Something may have changed: look again.
pub(super) const LOOK: u8 = 1;
/// The key that is waited for was just let go: try at once.
pub(super) const FREED: u8 = 2;
/// Releases are heard from now on: look once, for one may have come just before.
pub(super) const LISTENING: u8 = 4;

/// The lock of a mutex whose data is valid after every statement, so that a panic elsewhere (in a
/// test's assertion, in a foreign `Drop`) does not matter.
pub(super) fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One sleeper's bed: whoever has a reference may end the sleep.
#[derive(Default)]
pub(super) struct Wake {
    calls: Mutex<u8>,
    ring: Condvar,
}

impl Wake {
    /// Ends the sleep, or the next one.
    pub(super) fn call(&self, why: u8) {
        *guard(&self.calls) |= why;
        self.ring.notify_all();
    }

    /// Sleeps until a call or until that moment. Returns and clears the calls; 0 if there was none.
    pub(super) fn sleep_until(&self, clock: &Clock, end: Moment) -> u8 {
        let mut calls = guard(&self.calls);
        loop {
            if *calls != 0 {
                return std::mem::take(&mut *calls);
            }
            let now = clock.now();
            if now >= end {
                return 0;
            }
            calls = if clock.is_manual() || end.is_never() {
                self.ring.wait(calls).unwrap_or_else(PoisonError::into_inner)
            } else {
                let nap = end.since(now).min(NAP);
                self.ring.wait_timeout(calls, nap).unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }
}

/// Everybody who sleeps, so that closing the client or moving a manual clock reaches them all.
#[derive(Default)]
pub(super) struct Sleepers {
    next: AtomicU64,
    list: Mutex<HashMap<u64, Weak<Wake>>>,
}

impl Sleepers {
    /// Adds a sleeper until the returned value is dropped.
    pub(super) fn add(self: &Arc<Self>, wake: &Arc<Wake>) -> Registered {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        guard(&self.list).insert(id, Arc::downgrade(wake));
        Registered { sleepers: Arc::clone(self), id }
    }

    /// Calls all of them.
    pub(super) fn call_all(&self) {
        let all: Vec<_> = guard(&self.list).values().filter_map(Weak::upgrade).collect();
        for wake in all {
            wake.call(LOOK);
        }
    }
}

/// A place in [`Sleepers`].
pub(super) struct Registered {
    sleepers: Arc<Sleepers>,
    id: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        guard(&self.sleepers.list).remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_before_the_sleep_ends_it_and_is_taken_once() {
        let (wake, clock) = (Wake::default(), Clock::system());
        wake.call(FREED);
        wake.call(LOOK);
        assert_eq!(wake.sleep_until(&clock, Moment::NEVER), FREED | LOOK);
        assert_eq!(wake.sleep_until(&clock, clock.now().after(Duration::from_millis(1))), 0);
    }

    #[test]
    fn a_manual_clock_is_the_only_time_there_is() {
        let (wake, clock) = (Arc::new(Wake::default()), Clock::manual());
        let sleepers = Arc::new(Sleepers::default());
        let kept = sleepers.add(&wake);
        let all = Arc::clone(&sleepers);
        clock.on_advance(move || all.call_all());
        let end = clock.now().after(Duration::from_secs(3600));
        let (bed, time) = (Arc::clone(&wake), clock.clone());
        let sleeper = std::thread::spawn(move || {
            let mut calls = 0;
            while time.now() < end {
                bed.sleep_until(&time, end);
                calls += 1;
            }
            calls
        });
        clock.advance(Duration::from_secs(3600));
        assert!(sleeper.join().unwrap() <= 2);
        drop(kept);
        assert!(guard(&sleepers.list).is_empty());
    }
}
