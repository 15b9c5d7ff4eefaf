//! Acquires in turn: those who ask for it are served in order (`docs/adr/0048`).
//!
//! 1. The plain acquire, whole, under one condition more: no live ticket is ahead.
//! 2. With a token, or after a lost answer, the tickets are looked at in the first message, with the key's queue held,
//!    and handed over in the second.
//! 3. What was granted is told as granted, whoever is ahead by then.

use std::time::Instant;

use crate::backend::{Grant, Holder, Intent, Turn, TurnAttempt};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::acquire::Acquire;
use crate::leases::backend::PostgresBackend;
use crate::leases::shared_read;
use crate::leases::ticket::{InTurn, millis, prepare, statements};
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::model::lock_id::LockId;
use crate::model::time::{TIME_TOLERANCE_MS, Ttl, is_live};
use crate::pg::answers::{int, required, text};
use crate::pg::statement::Arg;

pub(super) fn acquire(
    backend: &PostgresBackend,
    asked: &TurnAttempt<'_>,
    cancel: &CancelToken,
) -> Result<Option<Grant>> {
    let attempt = &asked.attempt;
    let (key, ttl) = (Key::new(attempt.key)?, Ttl::new(attempt.ttl)?);
    let lock_id = LockId::parse(attempt.lock_id)?;
    let turn = InTurn::new(asked)?;
    cancel.check()?;
    let end = backend.database.end_by(attempt.deadline);
    let in_context = |error: LockError| error.with_key(attempt.key).with_lock_id(attempt.lock_id);
    backend.need_members(end, cancel).map_err(in_context)?;
    Acquire::new(&key, &lock_id, ttl)?.labelled(attempt.label).in_turn(&turn).run(backend, end, cancel)
}

pub(super) fn look(
    backend: &PostgresBackend,
    ticket: &Intent<'_>,
    end: Instant,
    cancel: &CancelToken,
) -> Result<Turn> {
    let key = Key::new(ticket.key)?;
    let (storage_key, _) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
    let id = LockId::parse(ticket.id)?;
    let in_context = |error: LockError| error.with_key(ticket.key);
    backend.need_members(end, cancel).map_err(in_context)?;
    let args = [
        Arg::Text(&storage_key),
        Arg::Text(id.as_str()),
        Arg::Int(millis(ticket.waited)),
        Arg::Int(ticket.priority.into()),
    ];
    let found = backend.run(end, cancel, |session, at| {
        prepare(session, at)?;
        let answers = session.ask_one(&statements(at)?.look, &args)?;
        session.check_cancel()?;
        let row = required(answers.row(0)?)?;
        let now_ms = required(int(row, 1)?)?;
        let holder = match int(row, 0)? {
            Some(end) if is_live(end, now_ms, TIME_TOLERANCE_MS) => {
                let fence = text(row, 2)?.and_then(|fence| fence.parse().ok());
                Some(shared_read::marked(Holder::until(fence, end, now_ms), text(row, 3)?))
            }
            _ => None,
        };
        Ok(Turn::new(holder, u64::try_from(required(int(row, 4)?)?).unwrap_or(0)))
    });
    found.map_err(|failure| in_context(LockError::from(failure)))
}
