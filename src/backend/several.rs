//! The requests to a backend for several keys at once, and its answers.

use std::fmt;
use std::time::Duration;

use crate::backend::info::Holder;
use crate::backend::label::Label;
use crate::backend::outcome::Grant;
use crate::error::{LockError, Result};
use crate::model::time::Moment;

/// The most keys that may be taken at once.
pub const MAX_KEYS: usize = 64;

/// One attempt to take several keys, all or none, with everything chosen before the first byte is sent.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct AttemptAll<'a> {
    /// The keys with the ids that their leases will have: 1 to [`MAX_KEYS`] different keys, each with
    /// an id of its own.
    pub leases: &'a [(&'a str, &'a str)],
    /// How long the leases last from the grant.
    pub ttl: Duration,
    /// When the attempt must have returned.
    pub deadline: Moment,
    /// What the holder says of itself: written with the grant, for each of the leases.
    pub label: Label<'a>,
}

impl<'a> AttemptAll<'a> {
    /// An attempt to take these `(key, lock id)`.
    #[must_use]
    pub const fn new(leases: &'a [(&'a str, &'a str)], ttl: Duration, deadline: Moment) -> Self {
        Self { leases, ttl, deadline, label: Label { owner: None, note: None } }
    }

    /// The same, by a holder that says this of itself.
    #[must_use]
    pub const fn with_label(mut self, label: Label<'a>) -> Self {
        self.label = label;
        self
    }
}

impl fmt::Debug for AttemptAll<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttemptAll")
            .field("keys", &self.leases.len())
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

/// The answer of an attempt to take several keys.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "granted leases stay held until they are released or their ttl is over"]
pub enum GrantAll {
    /// All of them, in the order of the attempt.
    Granted(Vec<Grant>),
    /// None of them.
    Held {
        /// The index, in the attempt, of a key that is in the way.
        index: usize,
        /// Who holds that key, as far as it is known.
        holder: Holder,
    },
}

/// Refuses what is no set of keys: none, too many, or an id or a key twice.
pub(crate) fn check_set(leases: &[(&str, &str)]) -> Result<()> {
    check_count(leases.len())?;
    let distinct = |column: Vec<&str>| {
        let mut sorted = column;
        sorted.sort_unstable();
        sorted.windows(2).all(|pair| pair.first() != pair.last())
    };
    let (keys, ids) = (leases.iter().map(|lease| lease.0), leases.iter().map(|lease| lease.1));
    if distinct(keys.collect()) && distinct(ids.collect()) {
        return Ok(());
    }
    Err(LockError::invalid("a key or a lock id is there twice: each key needs an id of its own"))
}

/// The refusal of a set without keys.
pub(crate) fn no_keys() -> LockError {
    LockError::invalid("there is no key to lock: name at least one")
}

/// Refuses a set without keys and one with too many.
pub(crate) fn check_count(keys: usize) -> Result<()> {
    match keys {
        0 => Err(no_keys()),
        1..=MAX_KEYS => Ok(()),
        _ => Err(LockError::invalid("more than 64 keys at once: lock fewer, or one key for all of them")),
    }
}
