//! The requests to a backend for shared leases, and its answers.

use std::fmt;
use std::time::Duration;

use crate::backend::outcome::Attempt;
use crate::error::LockError;
use crate::model::hash::hash_key;

/// One attempt to share a key with its other readers.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct SharedAttempt<'a> {
    /// The key, the lease's id, which is one of [`generate_shared_lock_id`](crate::backend::generate_shared_lock_id),
    /// its ttl, and the deadline.
    pub attempt: Attempt<'a>,
    /// How long the reader has waited for the key: it yields to writers that have waited longer.
    pub waited: Duration,
}

impl<'a> SharedAttempt<'a> {
    /// An attempt of a reader that has waited for this long.
    #[must_use]
    pub const fn new(attempt: Attempt<'a>, waited: Duration) -> Self {
        Self { attempt, waited }
    }
}

impl fmt::Debug for SharedAttempt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedAttempt").field("attempt", &self.attempt).field("waited", &self.waited).finish()
    }
}

/// The announcement that somebody waits for a key: a writer beside readers, which yield to it, or a waiter that asked to be
/// served in order, whose intent is its *ticket*.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Intent<'a> {
    /// The key.
    pub key: &'a str,
    /// An id of its own, the same for the whole wait.
    pub id: &'a str,
    /// How long it has waited.
    pub waited: Duration,
    /// How long others are to yield to it, unless it is announced again.
    pub lasts: Duration,
    /// Who has more comes first. Only for who asks to be served in order.
    pub priority: i32,
    /// What operators are shown.
    pub note: Option<&'a str>,
}

impl<'a> Intent<'a> {
    /// The intent with this id.
    #[must_use]
    pub const fn new(key: &'a str, id: &'a str, waited: Duration, lasts: Duration) -> Self {
        Self { key, id, waited, lasts, priority: 0, note: None }
    }

    /// The same with a priority, and a note for operators.
    #[must_use]
    pub const fn with_priority(mut self, priority: i32, note: Option<&'a str>) -> Self {
        (self.priority, self.note) = (priority, note);
        self
    }
}

impl fmt::Debug for Intent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Intent")
            .field("key_hash", &hash_key(self.key))
            .field("waited", &self.waited)
            .field("lasts", &self.lasts)
            .finish_non_exhaustive()
    }
}

/// What a backend without shared leases answers.
pub(super) fn no_readers() -> LockError {
    LockError::invalid("this backend has no shared leases: take the key with lock")
}
