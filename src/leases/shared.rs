//! Shared leases: the readers of a key are one row among the leases, and each of them is a member (`docs/adr/0045`).
//!
//! 1. What nearly always happens is one message: a live group is joined, or one is made where no row stands. All else
//!    is decided in a second one, behind the key's queue and with the group's row locked, by a statement whose
//!    snapshot is younger than both.
//!    So is a group that was joined when it might have been over before the answer came: a client that reads without a
//!    lock may have read its old end, and be about to write over it.
//! 2. A leave has the group's row first, and counts its members in the next statement.
//! 3. A renewal lengthens each group once, and changes a member only while its group has the member's fence.
//! 4. With a token a change takes two messages, and the token is looked at between them.
//! 5. What is known by its id alone is looked for among the leases first.

use std::time::{Duration, Instant};

use crate::backend::{
    ExtendOutcome, Grant, Intent, Label, LostReason, Reason, ReleaseOutcome, RenewOutcome, Renewal,
    SharedAttempt,
};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::leases::acquire::{
    Acquire, Round, explain_unraised_counter, explain_unwritten_row, granted, outcome_unknown,
};
use crate::leases::backend::PostgresBackend;
use crate::leases::members::prepared;
use crate::leases::refusals::{cannot_notify, is_all_or_nothing, swallowed};
use crate::leases::setup::ResolvedTables;
use crate::leases::shared_sql::{SharedStatements, group_id};
use crate::leases::ticket::millis;
use crate::leases::{shared_renew, shared_sql};
use crate::model::fence::Fence;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::model::lock_id::LockId;
use crate::model::time::Ttl;
use crate::pg::Failure;
use crate::pg::answers::{Answers, flag, int, malformed, required, text};
use crate::pg::session::Session;
use crate::pg::statement::{Arg, Message};

/// None, if it is negative.
fn millis_of(span: i64) -> Duration {
    Duration::from_millis(u64::try_from(span).unwrap_or(0))
}

/// One attempt to become a reader of a key.
struct Join<'a> {
    key: &'a Key,
    storage_key: String,
    fence_key: String,
    lock_id: &'a LockId,
    ttl: Ttl,
    label: Label<'a>,
}

pub(super) fn join(
    backend: &PostgresBackend,
    shared: &SharedAttempt<'_>,
    cancel: &CancelToken,
) -> Result<Option<Grant>> {
    let attempt = &shared.attempt;
    let (key, ttl) = (Key::new(attempt.key)?, Ttl::new(attempt.ttl)?);
    let lock_id = LockId::parse_shared(attempt.lock_id)?;
    cancel.check()?;
    let end = backend.database.end_by(attempt.deadline);
    let (storage_key, fence_key) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
    let label = attempt.label;
    label.check()?;
    let join = Join { key: &key, storage_key, fence_key, lock_id: &lock_id, ttl, label };
    let in_context = |error: LockError| error.with_key(attempt.key).with_lock_id(attempt.lock_id);
    backend.need_members(end, cancel).map_err(in_context)?;
    // A copy that waits for the group's row is over when the row is had: only the careful message has it first.
    let mut asks_again = false;
    let answer = backend.run_until_known(end, cancel, |session, at| {
        let answer = join.attempt(session, at, (shared.waited, asks_again), cancel);
        asks_again |= answer.as_ref().is_err_and(Failure::is_in_doubt);
        answer
    });
    let grant = match answer {
        Ok((round, _)) => Acquire::new(&key, &lock_id, ttl)?.answer(&round),
        Err(failure) if failure.is_in_doubt() => {
            Err(outcome_unknown(failure, cancel, backend.database.operation_timeout(), ttl))
        }
        Err(failure) => Err(failure.into_error()),
    };
    grant.map_err(in_context)
}

impl Join<'_> {
    fn attempt(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        (waited, asks_again): (Duration, bool),
        cancel: &CancelToken,
    ) -> Result<Round, Failure> {
        let statements = prepared(session, at)?;
        let group = group_id(&at.tables, &self.storage_key);
        let args = [
            Arg::Text(&self.storage_key),
            Arg::Text(&self.fence_key),
            Arg::Text(self.key.as_str()),
            Arg::Text(&group),
            Arg::Int(self.ttl.millis()),
            Arg::Text(self.lock_id.as_str()),
            Arg::Int(millis(waited)),
            Arg::Text(self.label.owner.unwrap_or_default()),
            Arg::Text(self.label.note.unwrap_or_default()),
        ];
        if cancel.is_never() && !asks_again {
            let sent = Instant::now();
            match session.commit_one(&statements.join, &args) {
                // A row has come since the look, or the member is another key's.
                Err(failure) if is_all_or_nothing(&failure) => {}
                answers => {
                    let answers = answers?;
                    let row = required(answers.row(0)?)?;
                    let round = granted(row)?;
                    let is_certain = int(row, 6)?.is_none_or(|rest| sent.elapsed() < millis_of(rest));
                    match round {
                        Some(round) if is_certain => return Ok(round),
                        None if required(int(row, 4)?)? > 0 || required(int(row, 5)?)? > 0 => {
                            return Ok(Round::Locked);
                        }
                        _ => {}
                    }
                }
            }
        }
        let (queue, hold) =
            ([Arg::Text(&self.storage_key)], [Arg::Text(&self.storage_key), Arg::Text(&group)]);
        let answers = if cancel.is_never() {
            let message = Message::new()
                .raw(session.prelude())
                .call(&at.statements.queue, &queue)
                .call(&statements.hold, &hold)
                .call(&statements.found, &args);
            session.commit(&message)
        } else {
            let message = Message::new()
                .raw(session.prelude_between())
                .call(&at.statements.queue, &queue)
                .call(&statements.hold, &hold);
            session.begin(&message)?;
            session.check_cancel()?;
            let written = session.commit(&Message::new().call(&statements.found, &args).raw("COMMIT"));
            written.map(Answers::without_last)
        };
        let answers = match answers {
            Err(failure) if is_all_or_nothing(&failure) => {
                session.rollback();
                return self.explain(session, at, statements);
            }
            answers => answers?,
        };
        let row = required(answers.row(0)?)?;
        match granted(row)? {
            Some(round) => Ok(round),
            // The key was free; only the counter was not raised.
            None if required(int(row, 4)?)? > 0 => {
                Err(explain_unraised_counter(session, at, &self.fence_key))
            }
            None => Ok(Round::Locked),
        }
    }

    /// Why all or nothing was nothing.
    fn explain(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        statements: &SharedStatements,
    ) -> Result<Round, Failure> {
        let answers = session.ask_one(&statements.by_id, &[Arg::Text(self.lock_id.as_str())])?;
        if let Some(row) = answers.row(0)?
            && text(row, 6)? != Some(&self.storage_key)
        {
            let error = LockError::new(ErrorCode::Internal)
                .with_message("the lock id is in use for another key: choose a fresh one per attempt");
            return Err(error.into());
        }
        // Readers wait for the queue: a group that stands was not in the way of this one.
        let answers = session.ask_one(&at.statements.by_key, &[Arg::Text(&self.storage_key)])?;
        if let Some(row) = answers.row(0)?
            && text(row, 1)? == Some(&group_id(&at.tables, &self.storage_key))
        {
            return Err(swallowed().into());
        }
        explain_unwritten_row(session, at, &self.storage_key)
    }
}

/// Ends a reader's lease. `None` if there is no member with this id.
pub(super) fn leave(
    session: &mut Session<'_>,
    at: &ResolvedTables,
    storage_key: &str,
    lock_id: &LockId,
    cancel: &CancelToken,
) -> Result<Option<ReleaseOutcome>, Failure> {
    let statements = prepared(session, at)?;
    let group = group_id(&at.tables, storage_key);
    let hold = [Arg::Text(storage_key), Arg::Text(&group)];
    let args = [Arg::Text(storage_key), Arg::Text(&group), Arg::Text(lock_id.as_str())];
    let mut send = |leave| {
        if cancel.is_never() {
            let message =
                Message::new().raw(session.prelude()).call(&statements.hold, &hold).call(leave, &args);
            return session.commit(&message);
        }
        let message = Message::new().raw(session.prelude_between()).call(&statements.hold, &hold);
        session.begin(&message)?;
        session.check_cancel()?;
        let answers = session.commit(&Message::new().call(leave, &args).raw("COMMIT"));
        if answers.as_ref().is_err_and(|failure| !failure.is_in_doubt()) {
            session.rollback();
        }
        answers.map(Answers::without_last)
    };
    let answers = match send(&statements.leave) {
        Err(failure) if at.notifies && cannot_notify(&failure) => send(&statements.leave_quietly),
        answers => answers,
    };
    let answers = match answers {
        // Its group may have come after it was looked for.
        Err(failure) if is_all_or_nothing(&failure) => send(&statements.leave_quietly),
        answers => answers,
    };
    let answers = match answers {
        Err(failure) if is_all_or_nothing(&failure) => return Err(swallowed().into()),
        answers => answers?,
    };
    let row = required(answers.row(0)?)?;
    let found = |column| -> Result<bool> { Ok(flag(row, column)?.unwrap_or(false)) };
    Ok(match (found(2)?, found(0)?, found(1)?) {
        (true, true, true) => Some(ReleaseOutcome::Released),
        (true, false, _) => Some(ReleaseOutcome::NotHeld(Some(Reason::Expired))),
        (true, true, false) => Some(ReleaseOutcome::NotHeld(Some(Reason::NotFound))),
        (false, ..) => None,
    })
}

/// The storage key, the fence and the group's of the member with this id, if the table is there and has it.
pub(super) fn member(
    session: &mut Session<'_>,
    at: &ResolvedTables,
    lock_id: &LockId,
) -> Result<Option<(String, Fence)>, Failure> {
    if at.shared.get().is_none() {
        return Ok(None);
    }
    let statements = prepared(session, at)?;
    let answers = session.ask_one(&statements.by_id, &[Arg::Text(lock_id.as_str())])?;
    let Some(row) = answers.row(0)? else { return Ok(None) };
    let fence = required(text(row, 4)?)?.parse().map_err(|error| malformed().with_source(error))?;
    Ok(Some((required(text(row, 6)?)?.to_owned(), fence)))
}

/// A release by the id alone that found no lease of another kind.
pub(super) fn release(
    session: &mut Session<'_>,
    at: &ResolvedTables,
    lock_id: &LockId,
    cancel: &CancelToken,
) -> Result<Option<ReleaseOutcome>, Failure> {
    match member(session, at, lock_id)? {
        Some((key, _)) => leave(session, at, &key, lock_id, cancel),
        None => Ok(None),
    }
}

/// An extend by the id alone that found no lease of another kind. Behind the key's queue: beside clients that read
/// without a lock it is certain then.
pub(super) fn extend(
    backend: &PostgresBackend,
    lock_id: &LockId,
    ttl: Ttl,
    end: Instant,
    cancel: &CancelToken,
) -> Result<Option<ExtendOutcome>> {
    if !backend.has_members(end, cancel)? {
        return Ok(None);
    }
    let found = backend.run(end, cancel, |session, at| member(session, at, lock_id));
    let Some((key, fence)) = found.map_err(LockError::from)? else { return Ok(None) };
    let moved = shared_renew::move_end(backend, (&key, fence, lock_id), None, ttl, (end, cancel, true))?;
    Ok(Some(match moved {
        RenewOutcome::Renewed { expires_at_ms, .. } => ExtendOutcome::Extended { expires_at_ms },
        RenewOutcome::Lost(LostReason::Expired) => ExtendOutcome::NotHeld(Some(Reason::Expired)),
        RenewOutcome::Lost(_) | RenewOutcome::Busy => ExtendOutcome::NotHeld(Some(Reason::NotFound)),
    }))
}

/// Extends a reader's lease, for its guard.
pub(super) fn prolong(backend: &PostgresBackend, lease: &Renewal<'_>, end: Instant) -> Result<RenewOutcome> {
    let (key, _) = Key::new(lease.key)?.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
    let (lock_id, ttl) = (LockId::parse(lease.lock_id)?, Ttl::new(lease.ttl)?);
    let never = CancelToken::never();
    backend.need_members(end, &never)?;
    shared_renew::move_end(backend, (&key, lease.fence, &lock_id), lease.version, ttl, (end, &never, false))
}

pub(super) fn announce(backend: &PostgresBackend, intent: &Intent<'_>, end: Instant) -> Result<()> {
    let (key, _) = Key::new(intent.key)?.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
    let id = LockId::parse(intent.id)?;
    let never = CancelToken::never();
    // Who shares the key, or asks for its turn, has made it; where not, nobody has to be told.
    if !backend.has_members(end, &never)? {
        return Ok(());
    }
    let args = [
        Arg::Text(&key),
        Arg::Text(id.as_str()),
        Arg::Int(millis(intent.waited)),
        Arg::Int(millis(intent.lasts)),
        Arg::Int(intent.priority.into()),
        Arg::Text(intent.note.unwrap_or_default()),
    ];
    let said = backend.run(end, &never, |session, at| {
        let statements = prepared(session, at)?;
        session.commit_one(&statements.announce, &args).map(drop)
    });
    said.map_err(|failure| LockError::from(failure).with_key(intent.key))
}

pub(super) fn withdraw(backend: &PostgresBackend, id: &str, end: Instant) -> Result<()> {
    let (id, never) = (LockId::parse(id)?, CancelToken::never());
    if !backend.has_members(end, &never)? {
        return Ok(());
    }
    let gone = backend.run(end, &never, |session, at| {
        let statements = prepared(session, at)?;
        session.commit_one(&statements.withdraw, &[Arg::Text(id.as_str())]).map(drop)
    });
    gone.map_err(LockError::from)
}

pub(super) fn fence_statement(
    backend: &PostgresBackend,
    key: &str,
    fence: Fence,
    lock_id: &str,
) -> Result<String> {
    let (key, lock_id) = (Key::new(key)?, LockId::parse(lock_id)?);
    let (storage_key, fence_key) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
    let at = backend.find_tables(backend.database.end(), &CancelToken::never())?;
    shared_sql::fenced(&at.tables, (&storage_key, &fence_key), fence, &lock_id)
}
