//! Sleeping until a moment of the backend's clock, or until another thread signals.
//!
//! 1. A signal is never lost: it stays until the sleeper takes it, also when it comes first.
//! 2. A manual clock is never waited for by the system's time: only signals end such a sleep, and
//!    every advance of the clock signals.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::model::time::{Clock, Moment};

/// The longest uninterrupted sleep towards a moment: condition variables stand still while the host
/// is suspended, the clock does not, so a sleeper looks at the clock this often.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// Something may have changed: look again.
pub(super) const LOOK: u8 = 1;
/// The key that is waited for was just let go: try at once.
pub(super) const FREED: u8 = 2;
/// Releases are heard from now on: look once, for one may have come just before.
pub(super) const LISTENING: u8 = 4;

/// The lock of a mutex whose data is valid after every statement, so that a panic elsewhere (in a
/// test's assertion, in a user's `Drop`) does not matter.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What one thread sleeps on: whoever has a reference may end the sleep.
#[derive(Default)]
pub(super) struct Signal {
    reasons: Mutex<u8>,
    condvar: Condvar,
}

impl Signal {
    /// Ends the sleep, or the next one.
    pub(super) fn notify(&self, why: u8) {
        *locked(&self.reasons) |= why;
        self.condvar.notify_all();
    }

    /// Sleeps until a notification or until that moment. Returns and clears the reasons; 0 if there was none.
    pub(super) fn sleep_until(&self, clock: &Clock, end: Moment) -> u8 {
        let mut reasons = locked(&self.reasons);
        loop {
            if *reasons != 0 {
                return std::mem::take(&mut *reasons);
            }
            let now = clock.now();
            if now >= end {
                return 0;
            }
            reasons = if clock.is_manual() || end.is_never() {
                self.condvar.wait(reasons).unwrap_or_else(PoisonError::into_inner)
            } else {
                let rest = end.since(now).min(LONGEST_SLEEP);
                self.condvar.wait_timeout(reasons, rest).unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }
}

/// Everybody who sleeps, so that closing the client or moving a manual clock reaches them all.
#[derive(Default)]
pub(super) struct SignalSet {
    next: AtomicU64,
    list: Mutex<HashMap<u64, Weak<Signal>>>,
}

impl SignalSet {
    /// Adds a sleeper until the returned value is dropped.
    pub(super) fn add(self: &Arc<Self>, signal: &Arc<Signal>) -> SignalEntry {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        locked(&self.list).insert(id, Arc::downgrade(signal));
        SignalEntry { signals: Arc::clone(self), id }
    }

    /// Calls all of them.
    pub(super) fn notify_all(&self) {
        let all: Vec<_> = locked(&self.list).values().filter_map(Weak::upgrade).collect();
        for signal in all {
            signal.notify(LOOK);
        }
    }
}

/// A place in [`SignalSet`].
pub(super) struct SignalEntry {
    signals: Arc<SignalSet>,
    id: u64,
}

impl Drop for SignalEntry {
    fn drop(&mut self) {
        locked(&self.signals.list).remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_before_the_sleep_ends_it_and_is_taken_once() {
        let (signal, clock) = (Signal::default(), Clock::system());
        signal.notify(FREED);
        signal.notify(LOOK);
        assert_eq!(signal.sleep_until(&clock, Moment::NEVER), FREED | LOOK);
        assert_eq!(signal.sleep_until(&clock, clock.now().after(Duration::from_millis(1))), 0);
    }

    #[test]
    fn a_manual_clock_is_the_only_time_there_is() {
        let (signal, clock) = (Arc::new(Signal::default()), Clock::manual());
        let signals = Arc::new(SignalSet::default());
        let kept = signals.add(&signal);
        let all = Arc::clone(&signals);
        clock.on_advance(move || all.notify_all());
        let end = clock.now().after(Duration::from_secs(3600));
        let (registration, time) = (Arc::clone(&signal), clock.clone());
        let sleeper = std::thread::spawn(move || {
            let mut reasons = 0;
            while time.now() < end {
                registration.sleep_until(&time, end);
                reasons += 1;
            }
            reasons
        });
        clock.advance(Duration::from_secs(3600));
        assert!(sleeper.join().unwrap() <= 2);
        drop(kept);
        assert!(locked(&signals.list).is_empty());
    }
}
