//! Extend, one lease or many: find the rows by lock id, judge them, move their expiry.
//!
//! 1. A change names the row's version that it replaces; only one that names the newest may shorten the
//!    lease. So a copy that comes late does no harm, and a lost answer is asked for again without more ado
//!    (`docs/adr/0032`).
//! 2. A shortening that was outvoted, because something newer is in force, is asked for again with the
//!    version that was answered. That is also how an extend by the lock id alone shortens a lease: its first
//!    message, which can name no version, only lengthens.
//! 3. Beside clients that read without a lock, an extend by the lock id alone is certain only if its answer
//!    came while the lease's old end, tolerance included, was still to come: else such a client may have
//!    read the old row before the commit, and be about to write over it. Then, and after a lost answer, it
//!    is carried out once more behind the key's advisory lock, which is taken *before* the row
//!    (`docs/adr/0004`). A guard needs none of it: for it an answer after its deadline comes too late.

use std::time::{Duration, Instant};

use crate::backend::{ExtendOutcome, LostReason, Reason, RenewOutcome, Renewal, Version};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::backend::PostgresBackend;
use crate::leases::refusals::swallowed;
use crate::leases::release::StoredLease;
use crate::leases::setup::ResolvedTables;
use crate::leases::{shared, shared_renew};
use crate::model::fence::Fence;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::model::lock_id::{LockId, validate_lock_id};
use crate::model::time::Ttl;
use crate::pg::Failure;
use crate::pg::answers::{Answers, int, malformed, required, text, version};
use crate::pg::session::Session;
use crate::pg::statement::{Arg, Message};

/// How often a shortening that was outvoted is asked for again: once, unless something else writes the
/// row in the same moment.
const SHORTENINGS: u32 = 2;

/// By the lock id alone.
pub(crate) fn extend(
    backend: &PostgresBackend,
    lock_id: &LockId,
    ttl: Ttl,
    end: Instant,
    cancel: &CancelToken,
) -> Result<ExtendOutcome> {
    let change = Change { lock_id, ttl, fence: None, cancel };
    Ok(match change.run(backend, None, end)? {
        Moved::To { expires_at_ms, .. } => ExtendOutcome::Extended { expires_at_ms },
        Moved::Lost(LostReason::Expired) => ExtendOutcome::NotHeld(Some(Reason::Expired)),
        Moved::Lost(_) => {
            let reader = LockId::may_be_shared(lock_id.as_str());
            let moved = if reader { shared::extend(backend, lock_id, ttl, end, cancel)? } else { None };
            moved.unwrap_or(ExtendOutcome::NotHeld(Some(Reason::NotFound)))
        }
    })
}

/// For a guard.
pub(crate) fn prolong(backend: &PostgresBackend, lease: &Renewal<'_>, end: Instant) -> Result<RenewOutcome> {
    Key::of_lease(lease.key)?;
    let (lock_id, ttl) = (LockId::parse(lease.lock_id)?, Ttl::new(lease.ttl)?);
    let change = Change { lock_id: &lock_id, ttl, fence: Some(lease.fence), cancel: &CancelToken::never() };
    Ok(match change.run(backend, lease.version, end)? {
        Moved::To { expires_at_ms, version, .. } => {
            RenewOutcome::Renewed { expires_at_ms, version: Some(version) }
        }
        Moved::Lost(reason) => RenewOutcome::Lost(reason),
    })
}

/// One lease's end is to be moved.
struct Change<'a> {
    lock_id: &'a LockId,
    ttl: Ttl,
    /// Of a guard.
    fence: Option<Fence>,
    cancel: &'a CancelToken,
}

/// What became of it.
enum Moved {
    To {
        expires_at_ms: i64,
        version: Version,
        /// The end that was asked for: the lease may end later.
        asked_ms: i64,
        /// For how long, from when the row was locked, the lease was live without the change.
        rest_ms: i64,
    },
    Lost(LostReason),
}

impl Moved {
    /// Whether nobody can have taken the key over who read it before this was committed: the answer is
    /// that many milliseconds younger than the message.
    fn is_certain(&self, age: Duration) -> bool {
        match self {
            Self::Lost(_) => true,
            Self::To { rest_ms, .. } => {
                u64::try_from(*rest_ms).is_ok_and(|rest| age < Duration::from_millis(rest))
            }
        }
    }
}

impl Change<'_> {
    fn run(&self, backend: &PostgresBackend, replaced: Option<Version>, end: Instant) -> Result<Moved> {
        let mut replaced = replaced;
        let mut shortenings = 0;
        loop {
            let moved = self.until_known(backend, replaced, end)?;
            match moved {
                Moved::To { expires_at_ms, version, asked_ms, .. }
                    if expires_at_ms > asked_ms && shortenings < SHORTENINGS =>
                {
                    replaced = Some(version);
                    shortenings += 1;
                }
                // A trigger has put the old row back: the holder must not count on the new end.
                Moved::To { expires_at_ms, asked_ms, .. } if expires_at_ms < asked_ms => {
                    return Err(swallowed().with_lock_id(self.lock_id.as_str()));
                }
                moved => return Ok(moved),
            }
        }
    }

    /// Asks until there is an answer, and one that is certain.
    fn until_known(
        &self,
        backend: &PostgresBackend,
        replaced: Option<Version>,
        end: Instant,
    ) -> Result<Moved> {
        // Whether an earlier message may have been carried out without a certain answer.
        let mut open = false;
        let outcome = backend.run_until_known(end, self.cancel, |session, at| {
            if !open {
                let sent = Instant::now();
                let moved = self.send(session, at, replaced, false);
                open = self.fence.is_none()
                    && match &moved {
                        Ok(moved) => !moved.is_certain(sent.elapsed()),
                        Err(failure) => failure.is_in_doubt(),
                    };
                if !open || moved.is_err() {
                    return moved;
                }
            }
            // What fails now is in doubt: something was carried out before.
            self.send(session, at, replaced, true)
                .map_err(|failure| if failure.is_unprepared() { failure } else { failure.or_in_doubt(true) })
        });
        match outcome {
            Ok((moved, _)) => Ok(moved),
            Err(failure) if failure.is_in_doubt() => {
                Err(failure.into_error().with_unknown_outcome(self.ttl.get()))
            }
            Err(failure) => Err(failure.into_error()),
        }
        .map_err(|error| error.with_lock_id(self.lock_id.as_str()))
    }

    fn send(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        replaced: Option<Version>,
        queued: bool,
    ) -> Result<Moved, Failure> {
        let replaced = replaced.map_or_else(String::new, |version| version.get().to_string());
        if self.cancel.is_never() {
            self.one_message(session, at, &replaced, queued)
        } else {
            self.two_messages(session, at, &replaced, queued)
        }
    }

    fn one_message(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        replaced: &str,
        queued: bool,
    ) -> Result<Moved, Failure> {
        let id = Arg::Text(self.lock_id.as_str());
        let fence = self.fence.map_or_else(String::new, |fence| fence.to_string());
        let args = [id, Arg::Int(self.ttl.millis()), Arg::Text(&fence), Arg::Text(replaced)];
        let statements = &at.statements;
        let answers = if queued {
            let message = Message::new().raw(session.prelude()).call(&statements.queue_for, &[id]);
            session.commit(&message.call(&statements.extend, &args))?
        } else {
            session.commit_one(&statements.extend, &args)?
        };
        Ok(self.read(&answers)?)
    }

    /// Reads the answer to `extend`.
    fn read(&self, answers: &Answers) -> Result<Moved> {
        let row = required(answers.row(0)?)?;
        let Some(fence) = text(row, 4)? else { return Ok(Moved::Lost(LostReason::RowMissing)) };
        let rest_ms = required(int(row, 3)?)?;
        if let Some(expires_at_ms) = int(row, 0)? {
            let asked_ms = required(int(row, 2)?)?;
            return Ok(Moved::To { expires_at_ms, version: version(row, 1)?, asked_ms, rest_ms });
        }
        if self.fence.is_some_and(|mine| mine.to_string() != fence) {
            return Ok(Moved::Lost(LostReason::TakenOver { fence: parse(fence)? }));
        }
        if rest_ms <= 0 { Ok(Moved::Lost(LostReason::Expired)) } else { Err(swallowed()) }
    }

    /// Only for an extend by the lock id alone: guards' calls have no token.
    fn two_messages(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        replaced: &str,
        queued: bool,
    ) -> Result<Moved, Failure> {
        let (statements, id) = (&at.statements, Arg::Text(self.lock_id.as_str()));
        let mut read = Message::new().raw(session.prelude_between()).call(&statements.durable, &[]);
        if queued {
            read = read.call(&statements.queue_for, &[id]);
        }
        let read = read.call(&statements.find, &[id]).call(&statements.clock, &[]);
        let found = StoredLease::read(&session.begin(&read)?)?;
        session.check_cancel()?;
        match (StoredLease::judge(found.as_ref(), self.lock_id.as_str()), &found) {
            (Some(Reason::Expired), _) => Ok(Moved::Lost(LostReason::Expired)),
            (Some(_), _) | (None, None) => Ok(Moved::Lost(LostReason::RowMissing)),
            (None, Some(found)) => {
                let args = [Arg::Text(&found.key), id, Arg::Int(self.ttl.millis()), Arg::Text(replaced)];
                let write = Message::new().call(&statements.update, &args).raw("COMMIT");
                let answers = session.commit(&write)?;
                let row = answers.row(1)?.ok_or_else(swallowed)?;
                Ok(Moved::To {
                    expires_at_ms: required(int(row, 0)?)?,
                    version: version(row, 1)?,
                    asked_ms: required(int(row, 2)?)?,
                    rest_ms: found.rest_ms(),
                })
            }
        }
    }
}

fn parse(fence: &str) -> Result<Fence> {
    fence.parse().map_err(|error| malformed().with_source(error))
}

/// Extends many leases in one transaction, on the connection that is kept for it. A lease that is
/// not well formed is refused alone, and does not hold the others up.
pub(crate) fn renew(
    backend: &PostgresBackend,
    leases: &[Renewal<'_>],
    end: Instant,
) -> Vec<Result<RenewOutcome>> {
    if !leases.iter().any(|lease| lease.shared) {
        return renew_plain(backend, leases, end);
    }
    let (readers, plain): (Vec<_>, Vec<_>) = leases.iter().partition(|lease| lease.shared);
    let plain: Vec<Renewal<'_>> = plain.into_iter().copied().collect();
    let mut plain = renew_plain(backend, &plain, end).into_iter();
    let mut readers = shared_renew::renew(backend, &readers, end).into_iter();
    let mut answer = |lease: &Renewal<'_>| if lease.shared { readers.next() } else { plain.next() };
    leases.iter().map(|lease| answer(lease).unwrap_or(Ok(RenewOutcome::Busy))).collect()
}

fn renew_plain(backend: &PostgresBackend, leases: &[Renewal<'_>], end: Instant) -> Vec<Result<RenewOutcome>> {
    let mut batch = Batch::default();
    let taken: Vec<Result<()>> = leases.iter().map(|lease| batch.take(lease)).collect();
    let mut renewed = match batch.renew(backend, end) {
        Ok(outcomes) => outcomes,
        // A LockError cannot be cloned: one says why, the others say that.
        Err(failure) => {
            let unknown = failure.is_in_doubt();
            let error = failure.into_error();
            let code = error.code();
            let again = move || LockError::new(code).with_message("the renewal of the whole batch failed");
            let mut first = Some(error);
            let failed = |ttl: &Ttl| {
                let error = first.take().unwrap_or_else(again);
                Err(if unknown { error.with_unknown_outcome(ttl.get()) } else { error })
            };
            batch.ttls.iter().map(failed).collect::<Vec<_>>()
        }
    }
    .into_iter();
    taken
        .into_iter()
        .map(|taken| taken.and_then(|()| renewed.next().unwrap_or(Ok(RenewOutcome::Busy))))
        .collect()
}

/// The well-formed leases of a batch, by column.
#[derive(Default)]
struct Batch<'a> {
    keys: Vec<String>,
    ids: Vec<&'a str>,
    ttls: Vec<Ttl>,
    fences: Vec<String>,
    /// Empty where none is known.
    versions: Vec<String>,
}

fn texts(column: &[String]) -> Vec<&str> {
    column.iter().map(String::as_str).collect()
}

impl<'a> Batch<'a> {
    fn take(&mut self, lease: &Renewal<'a>) -> Result<()> {
        let key = Key::of_lease(lease.key)?.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?.0;
        let ttl = Ttl::new(lease.ttl)?;
        validate_lock_id(lease.lock_id)?;
        self.keys.push(key);
        self.ids.push(lease.lock_id);
        self.ttls.push(ttl);
        self.fences.push(lease.fence.to_string());
        self.versions.push(lease.version.map_or_else(String::new, |version| version.get().to_string()));
        Ok(())
    }

    fn renew(&self, backend: &PostgresBackend, end: Instant) -> Result<Vec<Result<RenewOutcome>>, Failure> {
        if self.ids.is_empty() {
            return Ok(Vec::new());
        }
        let (keys, fences, versions) = (texts(&self.keys), texts(&self.fences), texts(&self.versions));
        let ttls: Vec<i64> = self.ttls.iter().map(|ttl| ttl.millis()).collect();
        let args = [
            Arg::Texts(&keys),
            Arg::Texts(&self.ids),
            Arg::Ints(&ttls),
            Arg::Texts(&fences),
            Arg::Texts(&versions),
        ];
        backend.run_renewal(end, |session, at| {
            let message = Message::new()
                .raw(session.prelude())
                .call(&at.statements.durable, &[])
                .call(&at.statements.renew, &args);
            let answers = session.commit(&message)?;
            // What is renewed, lost or busy says so.
            let mut outcomes: Vec<_> = self.ids.iter().map(|_| Err(swallowed())).collect();
            for row in answers.rows(0)? {
                let place = usize::try_from(required(int(row, 0)?)?).map_err(|_| malformed())?;
                let at = place.checked_sub(1).ok_or_else(malformed)?;
                let slot = outcomes.get_mut(at).ok_or_else(malformed)?;
                let mine = self.ids.get(at).zip(self.fences.get(at)).ok_or_else(malformed)?;
                let renewed = match int(row, 1)? {
                    Some(end) => Some((end, version(row, 5)?)),
                    None => None,
                };
                let locked = required(text(row, 2)?)? == "t";
                // The others are renewed, whatever somebody has written in this one's place.
                *slot = outcome(renewed, locked, text(row, 3)?.zip(text(row, 4)?), (mine.0, mine.1));
            }
            Ok(outcomes)
        })
    }
}

/// What became of one lease: its new expiry and version, whether its row was locked, and whose its key is
/// now, by lock id and fence.
fn outcome(
    renewed: Option<(i64, Version)>,
    locked: bool,
    holder: Option<(&str, &str)>,
    mine: (&str, &str),
) -> Result<RenewOutcome> {
    if let Some((expires_at_ms, version)) = renewed {
        return Ok(RenewOutcome::Renewed { expires_at_ms, version: Some(version) });
    }
    Ok(match holder {
        Some(holder) if holder == mine && locked => RenewOutcome::Lost(LostReason::Expired),
        Some(holder) if holder == mine => RenewOutcome::Busy,
        // Perhaps under the same id: broken, and granted again by a late copy of the acquire.
        Some((_, fence)) => RenewOutcome::Lost(LostReason::TakenOver { fence: parse(fence)? }),
        None if locked => RenewOutcome::Lost(LostReason::Expired),
        None => RenewOutcome::Lost(LostReason::RowMissing),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_renewed_lost_or_busy() {
        let (me, mine) = (("me", "000000000000008"), Version::new(7));
        let taken = RenewOutcome::Lost(LostReason::TakenOver { fence: Fence::new(9).unwrap() });
        let renewed = RenewOutcome::Renewed { expires_at_ms: 5, version: Some(mine) };
        for (new, locked, holder, expected) in [
            (Some((5, mine)), true, Some(me), renewed),
            (None, true, Some(me), RenewOutcome::Lost(LostReason::Expired)),
            (None, false, Some(me), RenewOutcome::Busy),
            (None, false, Some(("other", "000000000000009")), taken),
            (None, true, Some(("me", "000000000000009")), taken),
            (None, false, None, RenewOutcome::Lost(LostReason::RowMissing)),
        ] {
            assert_eq!(outcome(new, locked, holder, me).unwrap(), expected);
        }
    }

    #[test]
    fn an_answer_is_certain_only_if_it_came_before_anybody_could_take_the_lease_over() {
        let moved = |rest_ms| Moved::To { expires_at_ms: 2, version: Version::new(1), asked_ms: 2, rest_ms };
        let age = Duration::from_millis(20);
        assert!(moved(21).is_certain(age));
        assert!(!moved(20).is_certain(age) && !moved(0).is_certain(Duration::ZERO));
    }
}
