//! How it is found out whether two sessions keep to their server processes.
//!
//! A pooler in transaction mode that has several server connections may lend each session the same
//! one twice, by chance or because it lends them in turn. So both sessions are asked several times
//! who answers: in pairs, which no turn of two or more gives to one process, and often, since chance
//! tires.

use crate::error::LockError;

/// Whether session locks exclude on this server, by a test.
pub(crate) enum SessionLocksHere {
    Exclude,
    /// Sessions share server processes: a pooler lends them.
    Pooled,
    DoNot(LockError),
    /// It could not be tested.
    Unknown(LockError),
}

/// Who is asked for its server process, one after the other.
pub(crate) const ROUNDS: [Asked; 12] = {
    use Asked::{First as A, Second as B};
    [B, A, A, B, B, A, B, A, A, B, A, B]
};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    First,
    Second,
}
