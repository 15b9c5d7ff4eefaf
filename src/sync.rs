//! The standard library's mutex and condition variable, without poison.
//!
//! A mutex that a panic has poisoned goes on as if nothing had happened: what it guards is valid after every
//! statement, wherever one is used here. Not `parking_lot`, which has no poison either: its sleepers stand
//! in one table of the process, and a child after a `fork` finds its parent's threads in it
//! (`docs/adr/0024`). The crate's own tests can order the turns of their threads (`docs/adr/0049`).

#[cfg(test)]
pub(crate) mod simulated;

#[cfg(test)]
pub(crate) use simulated::{Condvar, Mutex, MutexGuard};
#[cfg(not(test))]
pub(crate) use system::{Condvar, Mutex, MutexGuard};

mod system {
    use std::sync::{self, PoisonError};
    use std::time::{Duration, Instant};

    pub(crate) use sync::MutexGuard;

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(sync::Mutex::new(value))
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        #[cfg(test)]
        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            match self.0.try_lock() {
                Ok(guard) => Some(guard),
                Err(sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(sync::TryLockError::WouldBlock) => None,
            }
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct Condvar(sync::Condvar);

    impl Condvar {
        pub(crate) const fn new() -> Self {
            Self(sync::Condvar::new())
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }

        /// Waits for a notification, or for none: look at the condition again.
        pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
            self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
        }

        /// The same, for at most this long.
        pub(crate) fn wait_for<'a, T>(&self, guard: MutexGuard<'a, T>, limit: Duration) -> MutexGuard<'a, T> {
            self.0.wait_timeout(guard, limit).unwrap_or_else(PoisonError::into_inner).0
        }

        /// Waits as long as the condition holds, at most until `end`. Whether it has ceased to hold by then.
        pub(crate) fn wait_while<'a, T>(
            &self,
            guard: MutexGuard<'a, T>,
            end: Instant,
            condition: impl FnMut(&mut T) -> bool,
        ) -> (MutexGuard<'a, T>, bool) {
            let limit = end.saturating_duration_since(Instant::now());
            let waited = self.0.wait_timeout_while(guard, limit, condition);
            let (guard, result) = waited.unwrap_or_else(PoisonError::into_inner);
            (guard, !result.timed_out())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    #[test]
    fn a_panic_under_the_lock_leaves_it_usable() {
        let (state, changed) = (Arc::new(Mutex::new(0)), Arc::new(Condvar::new()));
        let (poisoned, notify) = (Arc::clone(&state), Arc::clone(&changed));
        let thread = std::thread::spawn(move || {
            let mut state = poisoned.lock();
            *state = 1;
            notify.notify_all();
            panic!("under the lock");
        });
        let end = Instant::now() + Duration::from_secs(60);
        let (guard, met) = changed.wait_while(state.lock(), end, |state| *state == 0);
        assert!(met && *guard == 1);
        drop(guard);
        thread.join().unwrap_err();
        let guard = changed.wait_for(state.lock(), Duration::ZERO);
        assert!(!changed.wait_while(guard, Instant::now(), |state| *state == 1).1);
    }
}
