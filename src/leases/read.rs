//! Reads: is a key locked, and by what lease. One plain statement each, no lock, nothing written.

use std::time::Instant;

use crate::backend::{Holder, LockInfoRaw, Lookup};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::backend::PostgresBackend;
use crate::leases::cleanup;
use crate::leases::setup::ResolvedTables;
use crate::model::fence::Fence;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::model::lock_id::LockId;
use crate::model::time::{TIME_TOLERANCE_MS, is_live};
use crate::pg::answers::{Row, int, malformed, required, text};
use crate::pg::statement::{Arg, Statement};

/// Asks for no more than the right to read a key and its expiry.
pub(crate) fn is_locked(
    backend: &PostgresBackend,
    key: &Key,
    end: Instant,
    cancel: &CancelToken,
) -> Result<bool> {
    look(backend, key, end, cancel, |at| &at.statements.look, |row| Ok((int(row, 0)?, int(row, 1)?, None)))
        .map(|holder| holder.is_some())
}

pub(crate) fn holder(
    backend: &PostgresBackend,
    key: &Key,
    end: Instant,
    cancel: &CancelToken,
) -> Result<Option<Holder>> {
    look(
        backend,
        key,
        end,
        cancel,
        |at| &at.statements.by_key,
        |row| {
            // For a text alone: a fence that cannot be read makes the row no less live.
            let fence = text(row, 4)?.and_then(|fence| fence.parse().ok());
            Ok((int(row, 2)?, int(row, 5)?, fence))
        },
    )
}

/// One plain read of a key's row, of which `read` takes (expiry, clock, fence).
fn look(
    backend: &PostgresBackend,
    key: &Key,
    end: Instant,
    cancel: &CancelToken,
    statement: impl Fn(&ResolvedTables) -> &Statement,
    read: impl Fn(&Row) -> Result<(Option<i64>, Option<i64>, Option<Fence>)>,
) -> Result<Option<Holder>> {
    let (storage_key, _) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
    let found = backend.run(end, cancel, |session, at| {
        let answers = session.ask_one(statement(at), &[Arg::Text(&storage_key)])?;
        session.check_cancel()?;
        let Some(row) = answers.row(0)? else { return Ok(None) };
        let (expires_at_ms, now_ms, fence) = read(row)?;
        let (expires_at_ms, now_ms) = (required(expires_at_ms)?, required(now_ms)?);
        if cleanup::is_long_over(expires_at_ms, now_ms) {
            backend.cleanup_soon();
        }
        Ok(is_live(expires_at_ms, now_ms, TIME_TOLERANCE_MS)
            .then(|| Holder::until(fence, expires_at_ms, now_ms)))
    });
    found.map_err(|failure| LockError::from(failure).with_key(key.as_str()))
}

pub(crate) fn lookup(
    backend: &PostgresBackend,
    what: Lookup<'_>,
    end: Instant,
    cancel: &CancelToken,
) -> Result<Option<LockInfoRaw>> {
    match what {
        Lookup::Key(key) => {
            let key = Key::new(key)?;
            let (storage_key, _) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
            let found = backend.run(end, cancel, |session, at| {
                let answers = session.ask_one(&at.statements.by_key, &[Arg::Text(&storage_key)])?;
                session.check_cancel()?;
                Ok(answers.row(0)?.map(|row| live_row(row, None)).transpose()?.flatten())
            });
            found.map_err(|failure| LockError::from(failure).with_key(key.as_str()))
        }
        Lookup::LockId(id) => {
            let id = LockId::parse(id)?;
            let found = backend.run(end, cancel, |session, at| {
                let answers = session.ask_one(&at.statements.by_id, &[Arg::Text(id.as_str())])?;
                session.check_cancel()?;
                Ok(answers.row(0)?.map(|row| live_row(row, Some(id.as_str()))).transpose()?.flatten())
            });
            found.map_err(|failure| LockError::from(failure).with_lock_id(id.as_str()))
        }
    }
}

/// Whether a row is the live lease that was asked for. Without an id any live one is.
fn is_the_one(asked: Option<&str>, found: &str, expires_at_ms: i64, now_ms: i64) -> bool {
    asked.is_none_or(|asked| asked == found) && is_live(expires_at_ms, now_ms, TIME_TOLERANCE_MS)
}

/// A row `(user key, lock id, expiry, acquisition, fence, clock)` as a live lease; with the asked-for
/// id compared once more, since an index alone does not prove ownership.
fn live_row(row: &Row, lock_id: Option<&str>) -> Result<Option<LockInfoRaw>> {
    let found = required(text(row, 1)?)?;
    let (expires_at_ms, now_ms) = (required(int(row, 2)?)?, required(int(row, 5)?)?);
    if !is_the_one(lock_id, found, expires_at_ms, now_ms) {
        return Ok(None);
    }
    let fence = required(text(row, 4)?)?.parse().map_err(|error| malformed().with_source(error))?;
    Ok(Some(LockInfoRaw::new(
        required(text(row, 0)?)?.to_owned(),
        found.to_owned(),
        expires_at_ms,
        required(int(row, 3)?)?,
        fence,
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_another_id_is_no_answer_and_neither_is_a_dead_one() {
        for (asked, expires_at_ms, expected) in [
            (None, 9_001, true),
            (None, 9_000, false),
            (Some("me"), 9_001, true),
            (Some("me"), 9_000, false),
            (Some("other"), 20_000, false),
        ] {
            assert_eq!(is_the_one(asked, "me", expires_at_ms, 10_000), expected, "{asked:?} {expires_at_ms}");
        }
    }
}
