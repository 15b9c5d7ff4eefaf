//! A place in line, as arguments of statements.

use std::time::Duration;

use crate::backend::TurnAttempt;
use crate::error::Result;
use crate::leases::setup::ResolvedTables;
use crate::leases::turn_sql::TurnStatements;
use crate::model::lock_id::LockId;
use crate::pg::Failure;
use crate::pg::answers::malformed;
use crate::pg::session::Session;
use crate::pg::statement::Arg;

/// Who has waited for so long yields to nobody.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(10 * 365 * 86_400);

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.min(LONGEST_WAIT).as_millis()).unwrap_or(i64::MAX / 4)
}

/// A ticket, and that of whoever is next in the same process, as arguments.
pub(super) struct InTurn<'a> {
    ticket: &'a str,
    waited_ms: i64,
    priority: i64,
    next: [Arg<'a>; 5],
}

impl<'a> InTurn<'a> {
    pub(super) fn new(attempt: &TurnAttempt<'a>) -> Result<Self> {
        let ticket = &attempt.ticket;
        LockId::parse(ticket.id)?;
        let next = match &attempt.next {
            None => [Arg::Text(""), Arg::Int(0), Arg::Int(0), Arg::Int(0), Arg::Text("")],
            Some(next) => {
                LockId::parse(next.id)?;
                [
                    Arg::Text(next.id),
                    Arg::Int(millis(next.waited)),
                    Arg::Int(next.priority.into()),
                    Arg::Int(millis(next.lasts)),
                    Arg::Text(next.note.unwrap_or_default()),
                ]
            }
        };
        let (waited_ms, priority) = (millis(ticket.waited), ticket.priority.into());
        Ok(Self { ticket: ticket.id, waited_ms, priority, next })
    }

    /// The arguments of a grant.
    pub(super) fn args<'s>(&'s self, grant: [Arg<'s>; 5]) -> Vec<Arg<'s>> {
        let own = [Arg::Text(self.ticket), Arg::Int(self.waited_ms), Arg::Int(self.priority)];
        grant.into_iter().chain(own).chain(self.next).collect()
    }

    /// The arguments of a look at who is ahead.
    pub(super) fn ahead_args<'s>(&'s self, key: &'s str, lock_id: &'s str) -> [Arg<'s>; 5] {
        [
            Arg::Text(key),
            Arg::Text(lock_id),
            Arg::Text(self.ticket),
            Arg::Int(self.waited_ms),
            Arg::Int(self.priority),
        ]
    }

    /// The arguments of the tickets' change beside a grant.
    pub(super) fn over_args<'s>(&'s self, key: &'s str) -> Vec<Arg<'s>> {
        [Arg::Text(key), Arg::Text(self.ticket)].into_iter().chain(self.next).collect()
    }
}

/// The statements. Only after the table was found.
pub(super) fn statements(at: &ResolvedTables) -> Result<&TurnStatements, Failure> {
    Ok(at.turns.get().ok_or_else(malformed)?)
}

pub(super) fn prepare(session: &mut Session<'_>, at: &ResolvedTables) -> Result<(), Failure> {
    session.prepare(&statements(at)?.all())
}
