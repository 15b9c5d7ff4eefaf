//! The requests to a backend for permits, and its answers.

use std::fmt;
use std::time::Duration;

use crate::backend::label::Label;
use crate::backend::outcome::Grant;
use crate::error::LockError;
use crate::model::hash::hash_key;
use crate::model::time::Moment;

/// One attempt to take any permit of a semaphore, with everything chosen before the first byte is sent.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct PermitAttempt<'a> {
    /// The semaphore's name.
    pub semaphore: &'a str,
    /// How many permits there are: those with the numbers 1 to `limit`.
    pub limit: u32,
    /// The id that the lease will have.
    pub lock_id: &'a str,
    /// How long the lease lasts from the grant.
    pub ttl: Duration,
    /// When the attempt must have returned.
    pub deadline: Moment,
    /// What the holder says of itself: written with the grant, in one step.
    pub label: Label<'a>,
}

impl<'a> PermitAttempt<'a> {
    /// An attempt to take one of `limit` permits under this id.
    #[must_use]
    pub const fn new(
        semaphore: &'a str,
        limit: u32,
        lock_id: &'a str,
        ttl: Duration,
        deadline: Moment,
    ) -> Self {
        Self { semaphore, limit, lock_id, ttl, deadline, label: Label { owner: None, note: None } }
    }

    /// The same, by a holder that says this of itself.
    #[must_use]
    pub const fn with_label(mut self, label: Label<'a>) -> Self {
        self.label = label;
        self
    }
}

impl fmt::Debug for PermitAttempt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitAttempt")
            .field("semaphore_hash", &hash_key(self.semaphore))
            .field("limit", &self.limit)
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

/// A granted permit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PermitGrant {
    /// Which permit it is. The lease's key is the semaphore's name, U+2126 and this number.
    pub number: u32,
    /// The lease.
    pub grant: Grant,
}

impl PermitGrant {
    /// A grant of the permit with this number.
    #[must_use]
    pub const fn new(number: u32, grant: Grant) -> Self {
        Self { number, grant }
    }
}

/// What a backend without permits answers.
pub(super) fn no_permits() -> LockError {
    LockError::invalid("this backend has no semaphores: use one that has, or one lock per permit")
}
