//! Reads: is a key locked, and by what lease. One plain statement each, no lock, nothing written.

use std::time::Instant;

use crate::backend::{HeldBy, Holder, LockInfoRaw, Lookup};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::backend::PostgresBackend;
use crate::leases::cleanup;
use crate::leases::members::is_group;
use crate::leases::setup::ResolvedTables;
use crate::leases::shared_read;
use crate::model::fence::Fence;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::model::lock_id::LockId;
use crate::model::time::{TIME_TOLERANCE_MS, is_live};
use crate::pg::answers::{Row, int, malformed, required, text};
use crate::pg::statement::{Arg, Statement};

/// One plain read: what `read` makes of the row that the statement finds.
fn ask<T>(
    backend: &PostgresBackend,
    (end, cancel): (Instant, &CancelToken),
    statement: impl Fn(&ResolvedTables) -> &Statement,
    argument: &str,
    read: impl Fn(&Row) -> Result<Option<T>>,
) -> Result<Option<T>> {
    let found = backend.run(end, cancel, |session, at| {
        let answers = session.ask_one(statement(at), &[Arg::Text(argument)])?;
        session.check_cancel()?;
        Ok(answers.row(0)?.map(&read).transpose()?.flatten())
    });
    found.map_err(LockError::from)
}

/// Asks for no more than the right to read a key and its expiry.
pub(crate) fn is_locked(
    backend: &PostgresBackend,
    key: &Key,
    end: Instant,
    cancel: &CancelToken,
) -> Result<bool> {
    let (storage_key, _) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
    let read = |row: &Row| live_holder(backend, int(row, 0)?, int(row, 1)?, None);
    ask(backend, (end, cancel), |at| &at.statements.look, &storage_key, read)
        .map(|holder| holder.is_some())
        .map_err(|error| error.with_key(key.as_str()))
}

pub(crate) fn holder(
    backend: &PostgresBackend,
    key: &Key,
    end: Instant,
    cancel: &CancelToken,
) -> Result<Option<Holder>> {
    let (storage_key, _) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
    let read = |row: &Row| {
        // For a text alone: a fence that cannot be read makes the row no less live.
        let fence = text(row, 4)?.and_then(|fence| fence.parse().ok());
        let holder = live_holder(backend, int(row, 2)?, int(row, 5)?, fence)?;
        let lock_id = text(row, 1)?;
        Ok(holder.map(|holder| shared_read::marked(holder, lock_id)))
    };
    ask(backend, (end, cancel), |at| &at.statements.by_key, &storage_key, read)
        .map_err(|error| error.with_key(key.as_str()))
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
            let read = |row: &Row| live_row(row, None);
            ask(backend, (end, cancel), |at| &at.statements.by_key, &storage_key, read)
                .and_then(|found| {
                    found.map(|found| shared_read::shown(backend, found, (end, cancel))).transpose()
                })
                .map(|found| labelled(backend, found, (end, cancel)))
                .map_err(|error| error.with_key(key.as_str()))
        }
        Lookup::LockId(id) => {
            let id = LockId::parse(id)?;
            let read = |row: &Row| live_row(row, Some(id.as_str()));
            let found = ask(backend, (end, cancel), |at| &at.statements.by_id, id.as_str(), read);
            match found {
                Ok(None) if LockId::may_be_shared(id.as_str()) => {
                    shared_read::lookup(backend, &id, (end, cancel))
                }
                found => found.map(|found| labelled(backend, found, (end, cancel))),
            }
            .map_err(|error| error.with_lock_id(id.as_str()))
        }
    }
}

/// The live lease of a key, with its owner and note where they can be had.
pub(super) fn who_holds(
    backend: &PostgresBackend,
    key: &Key,
    end: Instant,
    cancel: &CancelToken,
) -> Result<Option<HeldBy>> {
    let (storage_key, _) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
    let read = |row: &Row| {
        let now_ms = required(int(row, 5)?)?;
        let found = live_row(row, None)?;
        Ok(found.map(|found| (Holder::until(None, found.expires_at_ms, now_ms).remaining, found)))
    };
    let found = ask(backend, (end, cancel), |at| &at.statements.by_key, &storage_key, read)
        .map_err(|error| error.with_key(key.as_str()))?;
    Ok(found.map(|(remaining, found)| {
        let group = is_group(&found.lock_id);
        let found = backend.labelled(if group { found.shared_by(None) } else { found }, (end, cancel));
        HeldBy::new(found.sanitized(), remaining)
    }))
}

/// What a lookup found, with its owner and note in a client that writes them itself.
fn labelled(
    backend: &PostgresBackend,
    found: Option<LockInfoRaw>,
    (end, cancel): (Instant, &CancelToken),
) -> Option<LockInfoRaw> {
    let shows = || backend.find_tables(end, cancel).is_ok_and(|at| backend.shows_owners(&at));
    found.map(|found| if shows() { backend.labelled(found, (end, cancel)) } else { found })
}

/// The holder by a row's expiry and the server's clock. A row that is long over is cleaned up, if the
/// settings say so.
fn live_holder(
    backend: &PostgresBackend,
    expires_at_ms: Option<i64>,
    now_ms: Option<i64>,
    fence: Option<Fence>,
) -> Result<Option<Holder>> {
    let (expires_at_ms, now_ms) = (required(expires_at_ms)?, required(now_ms)?);
    if cleanup::is_long_over(expires_at_ms, now_ms) {
        backend.cleanup_soon();
    }
    Ok(is_live(expires_at_ms, now_ms, TIME_TOLERANCE_MS).then(|| Holder::until(fence, expires_at_ms, now_ms)))
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
