//! Release: find the row by its lock id, judge it, delete it, in one transaction.
//!
//! The commit of a release does not wait for the disk (`synchronous_commit` off): a release that a
//! crash undoes only waits for its ttl.
//!
//! A lost answer is asked for again by lock id. If the lease is gone then, it is over for certain,
//! but whether this release or something else ended it is not known, and the error says so.
//!
//! Who releases a permit by its id alone has not said whose waiters are to be notified: the row does, and a
//! message after it calls them.

use std::time::{Duration, Instant};

use crate::backend::{Reason, ReleaseOutcome};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::leases::backend::PostgresBackend;
use crate::leases::note_sql::NoteStatements;
use crate::leases::notes;
use crate::leases::notify::notify_waiters;
use crate::leases::refusals::{cannot_notify, is_all_or_nothing, swallowed};
use crate::leases::setup::ResolvedTables;
use crate::leases::shared;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES, semaphore_of};
use crate::model::lock_id::LockId;
use crate::model::time::{TIME_TOLERANCE_MS, is_live};
use crate::pg::Failure;
use crate::pg::answers::{Answers, int, required, text};
use crate::pg::names::TEXT;
use crate::pg::session::Session;
use crate::pg::statement::{Arg, Message, Statement};

pub(crate) fn release(
    backend: &PostgresBackend,
    lock_id: &LockId,
    end: Instant,
    cancel: &CancelToken,
) -> Result<ReleaseOutcome> {
    let outcome = release_with(backend, lock_id, end, cancel, |session, at| {
        notes::ending(session, at, NoteStatements::locks, |session, noted| {
            if cancel.is_never() {
                one_message(session, at, lock_id, (None, noted))
            } else {
                two_messages(session, at, lock_id, noted)
            }
        })
    })?;
    if outcome != ReleaseOutcome::NotHeld(Some(Reason::NotFound))
        || !LockId::may_be_shared(lock_id.as_str())
        || !backend.has_members(end, cancel)?
    {
        return Ok(outcome);
    }
    // It may be a reader's.
    release_with(backend, lock_id, end, cancel, |session, at| {
        Ok(shared::release(session, at, lock_id, cancel)?.unwrap_or(outcome))
    })
}

/// Releases a reader of this key.
pub(super) fn release_shared(
    backend: &PostgresBackend,
    key: &Key,
    lock_id: &LockId,
    end: Instant,
) -> Result<ReleaseOutcome> {
    let (storage_key, _) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
    let never = CancelToken::never();
    let found = backend.has_members(end, &never)?;
    release_with(backend, lock_id, end, &never, |session, at| {
        let left = if found { shared::leave(session, at, &storage_key, lock_id, &never)? } else { None };
        Ok(left.unwrap_or(ReleaseOutcome::NotHeld(Some(Reason::NotFound))))
    })
}

/// Releases a permit of this semaphore and notifies the waiters for any of them.
pub(super) fn release_permit(
    backend: &PostgresBackend,
    semaphore: &Key,
    lock_id: &LockId,
    end: Instant,
) -> Result<ReleaseOutcome> {
    let (name, _) = semaphore.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
    release_with(backend, lock_id, end, &CancelToken::never(), |session, at| {
        notes::ending(session, at, NoteStatements::permits, |session, noted| {
            one_message(session, at, lock_id, (Some(&name), noted))
        })
    })
}

fn release_with(
    backend: &PostgresBackend,
    lock_id: &LockId,
    end: Instant,
    cancel: &CancelToken,
    operation: impl FnMut(&mut Session<'_>, &ResolvedTables) -> Result<ReleaseOutcome, Failure>,
) -> Result<ReleaseOutcome> {
    match backend.run_until_known(end, cancel, operation) {
        Ok((outcome @ ReleaseOutcome::NotHeld(_), Some(_first))) => {
            log::debug!("a release was asked for twice and the lease was gone: {outcome:?}");
            Err(LockError::new(ErrorCode::ServiceUnavailable)
                .with_message("the connection was lost during the release; the lease is over, but whether this release ended it is not known")
                .with_unknown_outcome(Duration::ZERO))
        }
        Ok((outcome, _)) => Ok(outcome),
        Err(failure) if failure.is_in_doubt() => Err(failure.into_error().with_unknown_outcome(Duration::MAX)),
        Err(failure) => Err(failure.into_error()),
    }
    .map_err(|error| error.with_lock_id(lock_id.as_str()))
}

/// A lease's row, locked, and the clock after that.
pub(crate) struct StoredLease {
    pub(crate) key: String,
    lock_id: String,
    expires_at_ms: i64,
    now_ms: i64,
}

impl StoredLease {
    /// Reads the answers to `find` and `clock`, the message's last two statements.
    pub(crate) fn read(answers: &Answers) -> Result<Option<Self>> {
        let now_ms = required(int(required(answers.row(0)?)?, 0)?)?;
        let Some(row) = answers.row(1)? else { return Ok(None) };
        Ok(Some(Self {
            key: required(text(row, 0)?)?.to_owned(),
            lock_id: required(text(row, 1)?)?.to_owned(),
            expires_at_ms: required(int(row, 2)?)?,
            now_ms,
        }))
    }

    /// For how much longer it was live when it was found, in milliseconds.
    pub(crate) fn rest_ms(&self) -> i64 {
        self.expires_at_ms.saturating_add(TIME_TOLERANCE_MS).saturating_sub(self.now_ms)
    }

    /// Why it cannot be released or extended, if so. The id is compared although the query did:
    /// ownership is never left to an index alone.
    pub(crate) fn judge(found: Option<&Self>, lock_id: &str) -> Option<Reason> {
        match found {
            None => Some(Reason::NotFound),
            Some(row) if row.lock_id != lock_id => Some(Reason::NotFound),
            Some(row) if !is_live(row.expires_at_ms, row.now_ms, TIME_TOLERANCE_MS) => Some(Reason::Expired),
            Some(_) => None,
        }
    }
}

/// One message, and a second, careful one if that saw no live lease: a row that seems over may be in
/// the hands of an extend that judged it live and has not committed, so it is judged again when it is
/// locked. (The reason comes out of that; it is not what the message is for.)
///
/// Notifies the waiters for the lease's key, or for the semaphore of this name.
fn one_message(
    session: &mut Session<'_>,
    at: &ResolvedTables,
    lock_id: &LockId,
    (semaphore, noted): (Option<&str>, Option<&NoteStatements>),
) -> Result<ReleaseOutcome, Failure> {
    let id = Arg::Text(lock_id.as_str());
    let (live, of_permit) = match noted {
        None => (&at.statements.release_live, &at.permits.release_live),
        Some(noted) => {
            session.prepare(&noted.locks())?;
            (&noted.release_live, &noted.permit_release_live)
        }
    };
    let answers = match semaphore.filter(|_| at.notifies) {
        None => session.commit_one(live, &[id]),
        Some(name) => {
            session.prepare(&at.permits.all())?;
            session.commit_one(of_permit, &[id, Arg::Text(name)])
        }
    };
    match answers {
        Ok(answers) if answers.row(0)?.is_some() => {
            if let (None, Some(row)) = (semaphore, answers.row(0)?) {
                wake_semaphore(session, at, text(row, 2)?.unwrap_or_default());
            }
            return Ok(ReleaseOutcome::Released);
        }
        // The lease ran out while its row was waited for, or its waiters cannot be called.
        Err(failure) if is_all_or_nothing(&failure) || (at.notifies && cannot_notify(&failure)) => {}
        other => drop(other?),
    }
    carefully(session, at, lock_id, noted)
}

/// Deletes the lease, or says why not. Calls nobody.
fn carefully(
    session: &mut Session<'_>,
    at: &ResolvedTables,
    lock_id: &LockId,
    noted: Option<&NoteStatements>,
) -> Result<ReleaseOutcome, Failure> {
    let id = [Arg::Text(lock_id.as_str())];
    let release = noted.map_or(&at.statements.release, |noted| &noted.release);
    let answers = session.commit_one(release, &id)?;
    let row = required(answers.row(0)?)?;
    match (required(int(row, 0)?)?, required(int(row, 1)?)?, required(int(row, 3)?)?) {
        (_, 1.., _) => Ok(ReleaseOutcome::Released),
        (_, _, 1..) => Err(swallowed().into()),
        (1.., _, _) => Ok(ReleaseOutcome::NotHeld(Some(Reason::Expired))),
        _ => Ok(ReleaseOutcome::NotHeld(Some(Reason::NotFound))),
    }
}

fn two_messages(
    session: &mut Session<'_>,
    at: &ResolvedTables,
    lock_id: &LockId,
    noted: Option<&NoteStatements>,
) -> Result<ReleaseOutcome, Failure> {
    let statements = &at.statements;
    let delete = noted.map_or(&statements.delete, |noted| &noted.delete);
    let id = Arg::Text(lock_id.as_str());
    let read = Message::new()
        .raw(session.prelude_between())
        .raw("SET LOCAL synchronous_commit TO off")
        .call(&statements.find, &[id])
        .call(&statements.clock, &[]);
    let found = StoredLease::read(&session.begin(&read)?)?;
    session.check_cancel()?;
    if let Some(reason) = StoredLease::judge(found.as_ref(), lock_id.as_str()) {
        return Ok(ReleaseOutcome::NotHeld(Some(reason)));
    }
    let key = found.map(|row| row.key).unwrap_or_default();
    let write = Message::new().call(delete, &[Arg::Text(&key), id]).raw("COMMIT");
    let answers = match session.commit(&write) {
        Err(failure) if at.notifies && cannot_notify(&failure) => {
            session.rollback();
            return carefully(session, at, lock_id, noted);
        }
        answers => answers?,
    };
    match answers.row(1)? {
        Some(_) => {
            wake_semaphore(session, at, &key);
            Ok(ReleaseOutcome::Released)
        }
        None => Err(swallowed().into()),
    }
}

/// Notifies those who wait for the semaphore whose permit this stored key was, if it is one. The release is
/// committed: a failure is no matter of its caller's, and waiters find the permit by looking.
fn wake_semaphore(session: &mut Session<'_>, at: &ResolvedTables, key: &str) {
    let Some(name) = semaphore_of(key).filter(|_| at.notifies) else { return };
    let wake = Statement::new("wake", &[TEXT], format!("SELECT {}", notify_waiters("$1")));
    let message = Message::new().raw(session.prelude()).plain(&wake, &[Arg::Text(name)]);
    let woken = message.map_err(Failure::from).and_then(|message| session.commit(&message));
    if let Err(failure) = woken {
        log::debug!("the waiters for a semaphore were not called: {}", LockError::from(failure).chain());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_judged_by_its_id_and_the_clock() {
        let row = |lock_id: &str, expires_at_ms| StoredLease {
            key: "k".into(),
            lock_id: lock_id.into(),
            expires_at_ms,
            now_ms: 10_000,
        };
        assert_eq!(StoredLease::judge(None, "me"), Some(Reason::NotFound));
        assert_eq!(StoredLease::judge(Some(&row("other", 20_000)), "me"), Some(Reason::NotFound));
        assert_eq!(StoredLease::judge(Some(&row("me", 9_000)), "me"), Some(Reason::Expired));
        assert_eq!(StoredLease::judge(Some(&row("me", 9_001)), "me"), None);
    }
}
