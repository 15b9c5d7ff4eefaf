//! What a backend is asked by those who want to be served in order, and what it answers.

use crate::backend::info::Holder;
use crate::backend::outcome::Attempt;
use crate::backend::shared::Intent;
use crate::error::LockError;

/// A ticket or an intent that says that it lasts for longer, in milliseconds, is not believed: nobody writes one, and it
/// would bar the key to others for as long.
pub(crate) const LONGEST_TICKET_MS: i64 = 5000;

/// One attempt to take a key when it is one's turn.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TurnAttempt<'a> {
    /// What a plain attempt has.
    pub attempt: Attempt<'a>,
    /// Who asks. Its ticket may not be there yet, and is gone after a grant.
    pub ticket: Intent<'a>,
    /// Who comes next in the same process: a grant puts it in line, so that nobody passes it meanwhile.
    pub next: Option<Intent<'a>>,
}

impl<'a> TurnAttempt<'a> {
    /// The attempt of whoever has this ticket, or will have it.
    #[must_use]
    pub const fn new(attempt: Attempt<'a>, ticket: Intent<'a>, next: Option<Intent<'a>>) -> Self {
        Self { attempt, ticket, next }
    }
}

/// How a key looks to somebody who waits for it in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Turn {
    /// Who has the key.
    pub holder: Option<Holder>,
    /// How many live tickets come before this one.
    pub ahead: u64,
}

impl Turn {
    /// What a look has found.
    #[must_use]
    pub const fn new(holder: Option<Holder>, ahead: u64) -> Self {
        Self { holder, ahead }
    }
}

/// What a backend without tickets answers.
pub(super) fn no_turns() -> LockError {
    LockError::invalid("this backend serves nobody in order: leave the option fair away")
}
