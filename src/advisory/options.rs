//! The options of a session lock.

use std::fmt;
use std::time::Duration;

use crate::cancel::CancelToken;
use crate::error::{LockError, Result};

/// How long a session lock is held at most, unless its options say otherwise.
pub const DEFAULT_MAX_HOLD: Duration = Duration::from_secs(30);

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

/// How to wait for a session lock, and how long to hold it.
///
/// Setters consume the options and never fail; an invalid value is
/// [`InvalidArgument`](crate::ErrorCode::InvalidArgument) where the options are used.
///
/// ```
/// use std::time::Duration;
/// use syncguard::AdvisoryOptions;
///
/// let migration = AdvisoryOptions::new()
///     .timeout(Duration::from_secs(60))
///     .max_hold(Duration::from_secs(600))
///     .keep_past_deadline();
/// # let _ = migration;
/// ```
#[derive(Clone)]
#[must_use = "options do nothing until they are handed to advisory_lock_with or try_advisory_lock_with"]
pub struct AdvisoryOptions {
    timeout: Option<Duration>,
    cancel: CancelToken,
    shared: bool,
    max_hold: Duration,
    keep_past_deadline: bool,
}

/// The same, checked.
#[derive(Clone, Copy)]
pub(super) struct CheckedOptions {
    pub(super) timeout: Option<Duration>,
    pub(super) shared: bool,
    pub(super) max_hold: Duration,
    pub(super) keep_past_deadline: bool,
}

impl Default for AdvisoryOptions {
    fn default() -> Self {
        Self {
            timeout: Some(DEFAULT_TIMEOUT),
            cancel: CancelToken::never(),
            shared: false,
            max_hold: DEFAULT_MAX_HOLD,
            keep_past_deadline: false,
        }
    }
}

impl AdvisoryOptions {
    /// The defaults: wait at most 5 s; exclusive; held for at most 30 s, then released.
    ///
    /// ```
    /// let options = syncguard::AdvisoryOptions::new();
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// How long `advisory_lock_with` may take in all. Default 5 s. A try ignores it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let options = syncguard::AdvisoryOptions::new().timeout(Duration::from_secs(60));
    /// ```
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// `advisory_lock_with` waits until it has the lock, is cancelled, or fails.
    ///
    /// ```
    /// let options = syncguard::AdvisoryOptions::new().wait_forever();
    /// ```
    pub fn wait_forever(mut self) -> Self {
        self.timeout = None;
        self
    }

    /// A token that ends the wait. It does not release the lock.
    ///
    /// ```
    /// use syncguard::{AdvisoryOptions, CancelToken};
    ///
    /// let shutdown = CancelToken::new();
    /// let options = AdvisoryOptions::new().wait_forever().cancel(&shutdown);
    /// ```
    pub fn cancel(mut self, token: &CancelToken) -> Self {
        self.cancel = token.clone();
        self
    }

    /// Takes the lock together with other shared holders; an exclusive holder excludes all of them.
    ///
    /// ```
    /// let readers = syncguard::AdvisoryOptions::new().shared();
    /// ```
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// The longest time that the lock is held, from the request that took it. Default
    /// [`DEFAULT_MAX_HOLD`], at least 1 ms.
    ///
    /// Then [`lost`](crate::AdvisoryGuard::lost) and [`overdue`](crate::AdvisoryGuard::overdue) fire
    /// and the lock is released, although the guard still exists and its work may still be running:
    /// **liveness before exclusion**. From PostgreSQL 14 on the server enforces it too, within a
    /// second more, so that a process that was stopped does not keep the lock; on version 13 such a
    /// process keeps it until it runs again or its connection ends.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let options = syncguard::AdvisoryOptions::new().max_hold(Duration::from_secs(600));
    /// ```
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.max_hold = max_hold;
        self
    }

    /// Keeps the lock past the end of `max_hold`, until the guard is dropped: **exclusion before
    /// liveness**. Then only [`overdue`](crate::AdvisoryGuard::overdue) fires, to ask the work to
    /// come to an end.
    ///
    /// Only the end of its connection takes the lock from such a holder, and the server sets no
    /// limit either: a process that hangs or is stopped blocks everybody else until an operator ends
    /// it. Choose this where two workers at once do more harm than none.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let migration = syncguard::AdvisoryOptions::new()
    ///     .max_hold(Duration::from_secs(600))
    ///     .keep_past_deadline();
    /// ```
    pub fn keep_past_deadline(mut self) -> Self {
        self.keep_past_deadline = true;
        self
    }

    pub(crate) fn token(&self) -> &CancelToken {
        &self.cancel
    }

    pub(super) fn checked(&self) -> Result<CheckedOptions> {
        if self.max_hold < Duration::from_millis(1) {
            return Err(LockError::invalid("max_hold is below 1 ms: seconds are usual"));
        }
        Ok(CheckedOptions {
            timeout: self.timeout,
            shared: self.shared,
            max_hold: self.max_hold,
            keep_past_deadline: self.keep_past_deadline,
        })
    }
}

impl fmt::Debug for AdvisoryOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdvisoryOptions")
            .field("timeout", &self.timeout)
            .field("shared", &self.shared)
            .field("max_hold", &self.max_hold)
            .field("keep_past_deadline", &self.keep_past_deadline)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_max_hold_is_thirty_seconds() {
        let options = AdvisoryOptions::new().checked().unwrap();
        assert_eq!(options.max_hold, Duration::from_secs(30));
        assert!(!options.keep_past_deadline && !options.shared);
        assert_eq!(options.timeout, Some(Duration::from_secs(5)));
    }

    #[test]
    fn a_max_hold_of_zero_is_refused() {
        assert!(AdvisoryOptions::new().max_hold(Duration::ZERO).checked().is_err());
        assert!(AdvisoryOptions::new().max_hold(Duration::MAX).checked().is_ok());
    }
}
