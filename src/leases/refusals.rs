//! What a statement of the lease protocol says by failing.

use crate::error::{ErrorCode, LockError};
use crate::pg::Failure;

/// Whether the message failed itself (22012) rather than change one thing without the other.
pub(super) fn is_all_or_nothing(failure: &Failure) -> bool {
    failure.refused_with() == Some("22012")
}

/// Whether the message failed since a row has the lock id already: in a permit's acquire an earlier copy of the
/// same call, on another permit.
pub(super) fn is_id_in_use(failure: &Failure) -> bool {
    failure.refused_with() == Some("23505")
}

/// A row that was there to be changed, and that the server has not changed all the same. Never an
/// answer: the lease is neither gone nor given.
pub(super) fn swallowed() -> LockError {
    LockError::new(ErrorCode::Internal).with_message(
        "the server did not change the rows as it was asked to: something on the lock tables swallows or rewrites changes, such as a trigger that returns NULL or OLD or writes another key or id, a soft delete, suppress_redundant_updates_trigger, or a rule; remove it from them",
    )
}

/// Whether a message failed itself (22P02) because a change was [swallowed].
pub(super) fn is_swallowed(failure: &Failure) -> bool {
    failure.refused_with() == Some("22P02")
}

/// Whether a message may have failed only because it notifies waiters: the server's queue of
/// notifications is full (54000), so is its table of locks (53200), or the role may notify nobody.
pub(super) fn cannot_notify(failure: &Failure) -> bool {
    failure.refused_with().is_some_and(|state| {
        state.starts_with("53") || state.starts_with("54") || matches!(state, "42501" | "42883")
    })
}
