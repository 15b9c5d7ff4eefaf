//! Reads of shared leases: how many readers a key has, and a reader by its id.

use std::time::Instant;

use crate::backend::{Holder, LockInfoRaw};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::leases::backend::PostgresBackend;
use crate::leases::members::{is_group, prepared};
use crate::leases::notes::label_in;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::model::lock_id::LockId;
use crate::model::time::{TIME_TOLERANCE_MS, is_live};
use crate::pg::answers::{Row, int, malformed, required, text};
use crate::pg::statement::Arg;

/// The same lease with what is known of its readers, if it is a group's. Their number is not known where the
/// table of members is not there, or not to be read.
pub(super) fn shown(
    backend: &PostgresBackend,
    info: LockInfoRaw,
    (end, cancel): (Instant, &CancelToken),
) -> Result<LockInfoRaw> {
    if !is_group(&info.lock_id) && !info.shared {
        return Ok(info);
    }
    let count = || -> Result<u32> {
        let (key, _) = Key::new(&info.key)?.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
        let fence = info.fence.to_string();
        let found = backend.run(end, cancel, |session, at| {
            let statements = prepared(session, at)?;
            let answers = session.ask_one(&statements.count, &[Arg::Text(&key), Arg::Text(&fence)])?;
            session.check_cancel()?;
            let number = required(int(required(answers.row(0)?)?, 0)?)?;
            Ok(u32::try_from(number).map_err(|_| malformed())?)
        });
        found.map_err(LockError::from)
    };
    let readers = match backend.has_members(end, cancel) {
        Ok(true) => match count() {
            Err(error) if error.code() == ErrorCode::AuthFailed => None,
            number => Some(number?),
        },
        Ok(false) => None,
        Err(error) if error.code() == ErrorCode::AuthFailed => None,
        Err(error) => return Err(error),
    };
    Ok(info.shared_by(readers))
}

/// The live lease of a reader, by its id.
pub(super) fn lookup(
    backend: &PostgresBackend,
    lock_id: &LockId,
    (end, cancel): (Instant, &CancelToken),
) -> Result<Option<LockInfoRaw>> {
    if !backend.has_members(end, cancel)? {
        return Ok(None);
    }
    let found = backend.run(end, cancel, |session, at| {
        let statements = prepared(session, at)?;
        let answers = session.ask_one(&statements.by_id, &[Arg::Text(lock_id.as_str())])?;
        session.check_cancel()?;
        let Some(row) = answers.row(0)? else { return Ok(None) };
        let found = live_reader(row)?;
        let (owner, note) = label_in(row, 7)?;
        Ok(found.map(|found| found.shared_by(None).labelled(owner, note)))
    });
    found.map_err(LockError::from)?.map(|found| shown(backend, found, (end, cancel))).transpose()
}

/// Whether this holder is a key's readers.
pub(super) fn marked(holder: Holder, lock_id: Option<&str>) -> Holder {
    holder.shared(lock_id.is_some_and(is_group))
}

/// A row `(user key, lock id, expiry, since, fence, clock, …)`, if it is live.
fn live_reader(row: &Row) -> Result<Option<LockInfoRaw>> {
    let (expires_at_ms, now_ms) = (required(int(row, 2)?)?, required(int(row, 5)?)?);
    if !is_live(expires_at_ms, now_ms, TIME_TOLERANCE_MS) {
        return Ok(None);
    }
    let fence = required(text(row, 4)?)?.parse().map_err(|error| malformed().with_source(error))?;
    let (key, id) = (required(text(row, 0)?)?.to_owned(), required(text(row, 1)?)?.to_owned());
    Ok(Some(LockInfoRaw::new(key, id, expires_at_ms, required(int(row, 3)?)?, fence)))
}
