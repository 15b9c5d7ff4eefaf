//! Sleeping until a moment of a clock, or until another thread signals.
//!
//! 1. A signal is never lost: it stays until the sleeper takes it, also when it comes first.
//! 2. A manual clock is never waited for by the system's time: only signals end such a sleep, and
//!    whoever advances the clock has to signal.

use std::time::Duration;

use crate::model::time::{Clock, Moment};
use crate::sync::{Condvar, Mutex};

/// The longest uninterrupted sleep towards a moment: condition variables stand still while the host
/// is suspended, the clock does not, so a sleeper looks at the clock this often.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// Something may have changed: look again.
pub(crate) const LOOK: u8 = 1;
/// The key that is waited for was just released: try at once.
pub(crate) const FREED: u8 = 2;
/// Releases are heard from now on: look once, for one may have come just before.
pub(crate) const LISTENING: u8 = 4;

/// What one thread sleeps on: whoever has a reference may end the sleep.
#[derive(Default)]
pub(crate) struct Signal {
    reasons: Mutex<u8>,
    changed: Condvar,
}

impl Signal {
    /// Ends the sleep, or the next one.
    #[cfg_attr(test, track_caller)]
    pub(crate) fn notify(&self, reason: u8) {
        *self.reasons.lock() |= reason;
        self.changed.notify_all();
    }

    /// Sleeps until a notification or until that moment. Returns and clears the reasons; 0 if there was
    /// none.
    pub(crate) fn sleep_until(&self, clock: &Clock, end: Moment) -> u8 {
        let mut reasons = self.reasons.lock();
        loop {
            if *reasons != 0 {
                return std::mem::take(&mut *reasons);
            }
            let now = clock.now();
            if now >= end {
                return 0;
            }
            reasons = if clock.is_manual() || end.is_never() {
                self.changed.wait(reasons)
            } else {
                self.changed.wait_for(reasons, end.since(now).min(LONGEST_SLEEP))
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_notification_before_the_sleep_ends_it_and_is_taken_once() {
        let (signal, clock) = (Signal::default(), Clock::system());
        signal.notify(FREED);
        signal.notify(LOOK);
        assert_eq!(signal.sleep_until(&clock, clock.now()), FREED | LOOK);
        assert_eq!(signal.sleep_until(&clock, clock.now().after(Duration::from_millis(1))), 0);
    }

    #[test]
    fn a_manual_clock_is_the_only_time_there_is() {
        let (signal, clock) = (Arc::new(Signal::default()), Clock::manual());
        let advanced = Arc::clone(&signal);
        clock.on_advance(move || advanced.notify(LOOK));
        let end = clock.now().after(Duration::from_secs(3600));
        let (sleeping, time) = (Arc::clone(&signal), clock.clone());
        let sleeper = std::thread::spawn(move || {
            let mut sleeps = 0;
            while time.now() < end {
                sleeping.sleep_until(&time, end);
                sleeps += 1;
            }
            sleeps
        });
        clock.advance(Duration::from_secs(3600));
        assert!(sleeper.join().unwrap() <= 2);
    }
}
