//! Permits: any of a semaphore's leases (`docs/adr/0038`).
//!
//! 1. One message chooses a permit without a live row and grants it. Permits that are all held cost one read.
//! 2. A permit that it chose and did not grant is asked for as a lock is, by [`Acquire`]. Without that a permit is lost for
//!    ever: a transaction that was rolled back leaves its mark on the counter.
//! 3. Granted neither way, the permit is left out and the next one is tried: one counter under a fenced transaction is
//!    no reason to answer that all permits are held.
//! 4. A message that failed met a row that had come since its look: it looks again, a few times.
//!    After that permits are chosen by a read and asked for one by one.
//! 5. So they are also with a token, which can be checked between the two, and after a lost answer. All
//!    goes under one lock id: its index is unique, so a late copy and the second question are never granted on two permits.

use std::time::Instant;

use crate::backend::{Label, PermitGrant};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::leases::acquire::{Acquire, Round, granted, outcome_unknown};
use crate::leases::backend::PostgresBackend;
use crate::leases::note_sql::NoteStatements;
use crate::leases::notes;
use crate::leases::refusals::{is_all_or_nothing, is_id_in_use};
use crate::leases::setup::ResolvedTables;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::model::lock_id::LockId;
use crate::model::time::Ttl;
use crate::pg::Failure;
use crate::pg::answers::{Row, int, malformed, required, text};
use crate::pg::session::Session;
use crate::pg::statement::Arg;

/// One attempt to take any permit of a semaphore, with everything chosen.
pub(super) struct AcquirePermit<'a> {
    semaphore: &'a Key,
    /// What the stored names of its permits and counters begin with.
    prefix: String,
    fence_prefix: String,
    limit: u32,
    lock_id: &'a LockId,
    ttl: Ttl,
    label: Label<'a>,
}

/// How often a message that failed looks again. More often is no progress: something swallows its changes.
const MOST_LOOKS: u32 = 4;

/// What a look at the permits came to.
enum Choice {
    /// All that are not left out are held, or are being decided about.
    None,
    /// This one seems free, or has our id already.
    Permit(u32),
    Granted(u32, Round),
    /// The message failed: something has changed since its look.
    Changed,
}

impl<'a> AcquirePermit<'a> {
    pub(super) fn new(
        semaphore: &'a Key,
        limit: u32,
        lock_id: &'a LockId,
        ttl: Ttl,
        label: Label<'a>,
    ) -> Result<Self> {
        let (prefix, fence_prefix) =
            semaphore.semaphore().stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
        Ok(Self { semaphore, prefix, fence_prefix, limit, lock_id, ttl, label })
    }

    pub(super) fn run(
        &self,
        backend: &PostgresBackend,
        end: Instant,
        cancel: &CancelToken,
    ) -> Result<Option<PermitGrant>> {
        let in_context =
            |error: LockError| error.with_key(self.semaphore.as_str()).with_lock_id(self.lock_id.as_str());
        backend.need_notes(self.label, end, cancel).map_err(in_context)?;
        let mut by_read = !cancel.is_never();
        let answer = backend.run_until_known(end, cancel, |session, at| {
            let answer = self.any(session, at, by_read);
            by_read |= answer.as_ref().is_err_and(Failure::is_in_doubt);
            answer
        });
        let permit = match answer {
            Ok((Some((number, round)), _)) => {
                let key = self.semaphore.permit(number);
                let grant = Acquire::new(&key, self.lock_id, self.ttl)?.answer(&round)?;
                Ok(grant.map(|grant| PermitGrant::new(number, grant)))
            }
            Ok((None, _)) => Ok(None),
            Err(failure) if failure.is_in_doubt() => {
                Err(outcome_unknown(failure, cancel, backend.database.operation_timeout(), self.ttl))
            }
            Err(failure) => Err(failure.into_error()),
        };
        permit.map_err(in_context)
    }

    /// One permit after the other, until one is granted or none is left.
    fn any(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        mut by_read: bool,
    ) -> Result<Option<(u32, Round)>, Failure> {
        session.prepare(&at.permits.all())?;
        let mut left_out: Vec<i64> = Vec::new();
        let mut looks = 0;
        loop {
            let choice = if by_read {
                self.choose(session, at, &left_out)?
            } else {
                self.choose_and_grant(session, at, &left_out)?
            };
            session.check_cancel()?;
            let number = match choice {
                Choice::None => return Ok(None),
                Choice::Granted(number, round) => return Ok(Some((number, round))),
                Choice::Permit(number) => number,
                Choice::Changed => {
                    looks += 1;
                    by_read |= looks > MOST_LOOKS;
                    continue;
                }
            };
            let key = self.semaphore.permit(number);
            let acquire = Acquire::new(&key, self.lock_id, self.ttl)?.labelled(self.label);
            match acquire.round(session, at, by_read) {
                Ok(Round::Locked) => {
                    session.rollback();
                    left_out.push(number.into());
                }
                Ok(round) => return Ok(Some((number, round))),
                // An earlier copy of this call was granted on another permit: the next look finds it.
                Err(failure) if is_id_in_use(&failure) && looks <= MOST_LOOKS => {
                    session.rollback();
                    looks += 1;
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    fn choose_and_grant(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        left_out: &[i64],
    ) -> Result<Choice, Failure> {
        let args = [
            Arg::Text(&self.prefix),
            Arg::Text(&self.fence_prefix),
            Arg::Int(self.limit.into()),
            Arg::Text(self.lock_id.as_str()),
            Arg::Int(self.ttl.millis()),
            Arg::Int(self.start()),
            Arg::Ints(left_out),
        ];
        let noted = notes::granting(session, at, self.label, NoteStatements::permits)?;
        let grant = noted.map_or(&at.permits.grant, |noted| &noted.permit_grant);
        let answers = match session.commit_one(grant, &notes::with_label(&args, self.label)) {
            Err(failure) if is_all_or_nothing(&failure) || is_id_in_use(&failure) => {
                return Ok(Choice::Changed);
            }
            other => other?,
        };
        let Some(row) = answers.row(0)? else { return Ok(Choice::None) };
        let number = self.number(row, 5, 6)?;
        Ok(match granted(row)? {
            Some(round) => Choice::Granted(number, round),
            None => Choice::Permit(number),
        })
    }

    /// The same without a change.
    fn choose(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        left_out: &[i64],
    ) -> Result<Choice, Failure> {
        let args = [
            Arg::Text(&self.prefix),
            Arg::Int(self.limit.into()),
            Arg::Text(self.lock_id.as_str()),
            Arg::Int(self.start()),
            Arg::Ints(left_out),
        ];
        let answers = session.ask_one(&at.permits.choose, &args)?;
        let Some(row) = answers.row(0)? else { return Ok(Choice::None) };
        Ok(Choice::Permit(self.number(row, 0, 1)?))
    }

    /// The number in one column, or that of the key in the other: the row that has our id already.
    fn number(&self, row: &Row, number: usize, key: usize) -> Result<u32> {
        if let Some(key) = text(row, key)? {
            let own = key.strip_prefix(&self.prefix).and_then(|digits| digits.parse().ok());
            return own.ok_or_else(|| {
                LockError::new(ErrorCode::Internal)
                    .with_message("the lock id is in use for another key: choose a fresh one per attempt")
            });
        }
        u32::try_from(required(int(row, number)?)?).map_err(|_| malformed())
    }

    /// Where the look at the permits begins. Ids are random, so calls begin at different places and
    /// rarely meet at one permit.
    fn start(&self) -> i64 {
        let sum = self
            .lock_id
            .as_str()
            .bytes()
            .fold(0_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(byte)));
        i64::from(sum % self.limit)
    }
}

/// How many of the permits from 1 to `among` are held.
pub(super) fn count(
    backend: &PostgresBackend,
    semaphore: &Key,
    among: u32,
    end: Instant,
    cancel: &CancelToken,
) -> Result<u32> {
    let (prefix, _) = semaphore.semaphore().stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
    let args = [Arg::Text(&prefix), Arg::Int(among.into())];
    let found = backend.run(end, cancel, |session, at| {
        session.prepare(&at.permits.all())?;
        let answers = session.ask_one(&at.permits.count, &args)?;
        session.check_cancel()?;
        let number = required(int(required(answers.row(0)?)?, 0)?)?;
        Ok(u32::try_from(number).map_err(|_| malformed())?)
    });
    found.map_err(|failure| LockError::from(failure).with_key(semaphore.as_str()))
}
