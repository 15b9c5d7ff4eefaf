//! Extend, one lease or many: find the rows by lock id, judge them, move their expiry.
//!
//! A lost answer is asked for again: an extend that was carried out may be carried out twice, and
//! one that finds the lease gone is right whether or not the first arrived. If time runs out, the
//! holder keeps its old deadline.

use std::time::Instant;

use crate::backend::{ExtendOutcome, LostReason, Reason, RenewOutcome, Renewal};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::model::fence::Fence;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::model::lock_id::{LockId, validate_lock_id};
use crate::model::time::Ttl;
use crate::postgres::error::Trouble;
use crate::postgres::release::Found;
use crate::postgres::row::{int, malformed, required, text};
use crate::postgres::session::Session;
use crate::postgres::statement::{Arg, Message};
use crate::postgres::{Fault, Located, PostgresBackend};

pub(crate) fn extend(
    backend: &PostgresBackend,
    lock_id: &LockId,
    ttl: Ttl,
    end: Instant,
    cancel: &CancelToken,
) -> Result<ExtendOutcome> {
    let outcome = backend.run_until_known(lock_id, end, cancel, |session, at| {
        if cancel.is_never() {
            one_message(session, at, lock_id, ttl)
        } else {
            two_messages(session, at, lock_id, ttl)
        }
    });
    match outcome {
        Ok((outcome, _)) => Ok(outcome),
        Err(Fault::Error(error)) => Err(error),
        Err(doubt) => Err(doubt.into_error().with_unknown_outcome(ttl.get())),
    }
    .map_err(|error| error.with_lock_id(lock_id.as_str()))
}

fn one_message(
    session: &mut Session<'_>,
    at: &Located,
    lock_id: &LockId,
    ttl: Ttl,
) -> Result<ExtendOutcome, Trouble> {
    let args = [Arg::Text(lock_id.as_str()), Arg::Int(ttl.millis())];
    let answers = session.commit_one(&at.statements.extend, &args)?;
    let row = required(answers.row(0)?)?;
    Ok(match (required(int(row, 0)?)?, int(row, 1)?) {
        (_, Some(expires_at_ms)) => ExtendOutcome::Extended { expires_at_ms },
        (1.., None) => ExtendOutcome::NotHeld(Some(Reason::Expired)),
        _ => ExtendOutcome::NotHeld(Some(Reason::NotFound)),
    })
}

fn two_messages(
    session: &mut Session<'_>,
    at: &Located,
    lock_id: &LockId,
    ttl: Ttl,
) -> Result<ExtendOutcome, Trouble> {
    let statements = &at.statements;
    let id = Arg::Text(lock_id.as_str());
    let read = Message::new()
        .raw(session.prelude_between())
        .call(&statements.durable, &[])
        .call(&statements.find, &[id])
        .call(&statements.clock, &[]);
    let found = Found::read(&session.begin(&read)?)?;
    session.check_cancel()?;
    if let Some(reason) = Found::judge(found.as_ref(), lock_id.as_str()) {
        return Ok(ExtendOutcome::NotHeld(Some(reason)));
    }
    let key = found.map(|row| row.key).unwrap_or_default();
    let args = [Arg::Text(&key), id, Arg::Int(ttl.millis())];
    let answers = session.commit(&Message::new().call(&statements.update, &args).raw("COMMIT"))?;
    let expires_at_ms = required(int(required(answers.row(1)?)?, 0)?)?;
    Ok(ExtendOutcome::Extended { expires_at_ms })
}

/// Extends many leases in one transaction, on the connection that is kept for it. A lease that is
/// not well formed is refused alone, and does not hold the others up.
pub(crate) fn renew(
    backend: &PostgresBackend,
    leases: &[Renewal<'_>],
    end: Instant,
) -> Vec<Result<RenewOutcome>> {
    let mut batch = Batch::default();
    let taken: Vec<Result<()>> = leases.iter().map(|lease| batch.take(lease)).collect();
    let mut renewed = match batch.renew(backend, end) {
        Ok(outcomes) => outcomes,
        // A LockError cannot be cloned: one says why, the others say that.
        Err(fault) => {
            let unknown = matches!(fault, Fault::Doubt { .. });
            let error = fault.into_error();
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
}

impl<'a> Batch<'a> {
    fn take(&mut self, lease: &Renewal<'a>) -> Result<()> {
        let key = Key::new(lease.key)?.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?.0;
        let ttl = Ttl::new(lease.ttl)?;
        validate_lock_id(lease.lock_id)?;
        self.keys.push(key);
        self.ids.push(lease.lock_id);
        self.ttls.push(ttl);
        Ok(())
    }

    fn renew(&self, backend: &PostgresBackend, end: Instant) -> Result<Vec<Result<RenewOutcome>>, Fault> {
        if self.ids.is_empty() {
            return Ok(Vec::new());
        }
        let keys: Vec<&str> = self.keys.iter().map(String::as_str).collect();
        let ttls: Vec<i64> = self.ttls.iter().map(|ttl| ttl.millis()).collect();
        let args = [Arg::Texts(&keys), Arg::Texts(&self.ids), Arg::Ints(&ttls)];
        let first = self.ids.first().copied().unwrap_or_default();
        backend.run_renewal(first, end, |session, at| {
            let message = Message::new()
                .raw(session.prelude())
                .call(&at.statements.durable, &[])
                .call(&at.statements.renew, &args);
            let answers = session.commit(&message)?;
            let mut outcomes: Vec<_> = self.ids.iter().map(|_| Ok(RenewOutcome::Busy)).collect();
            for row in answers.rows(0)? {
                let place = usize::try_from(required(int(row, 0)?)?).map_err(|_| malformed())?;
                let at = place.checked_sub(1).ok_or_else(malformed)?;
                let (slot, id) = outcomes.get_mut(at).zip(self.ids.get(at)).ok_or_else(malformed)?;
                let locked = required(text(row, 2)?)? == "t";
                // The others are renewed, whatever somebody has written in this one's place.
                *slot = outcome(int(row, 1)?, locked, text(row, 3)?, text(row, 4)?, id);
            }
            Ok(outcomes)
        })
    }
}

/// What became of one lease: its new expiry, whether its row was locked, and who has its key now.
fn outcome(
    renewed: Option<i64>,
    locked: bool,
    holder: Option<&str>,
    fence: Option<&str>,
    lock_id: &str,
) -> Result<RenewOutcome> {
    if let Some(expires_at_ms) = renewed {
        return Ok(RenewOutcome::Renewed { expires_at_ms });
    }
    Ok(match (locked, holder, fence) {
        (true, _, _) => RenewOutcome::Lost(LostReason::Expired),
        (false, Some(holder), _) if holder == lock_id => RenewOutcome::Busy,
        (false, Some(_), Some(fence)) => {
            let fence: Fence = fence.parse().map_err(|error| malformed().with_source(error))?;
            RenewOutcome::Lost(LostReason::TakenOver { fence })
        }
        _ => RenewOutcome::Lost(LostReason::RowMissing),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_renewed_lost_or_busy() {
        let fence = Some("000000000000009");
        let taken = RenewOutcome::Lost(LostReason::TakenOver { fence: Fence::new(9).unwrap() });
        for (renewed, locked, holder, expected) in [
            (Some(5), true, Some("me"), RenewOutcome::Renewed { expires_at_ms: 5 }),
            (None, true, Some("me"), RenewOutcome::Lost(LostReason::Expired)),
            (None, false, Some("me"), RenewOutcome::Busy),
            (None, false, Some("other"), taken),
            (None, false, None, RenewOutcome::Lost(LostReason::RowMissing)),
        ] {
            let fence = holder.and(fence);
            assert_eq!(outcome(renewed, locked, holder, fence, "me").unwrap(), expected);
        }
    }
}
