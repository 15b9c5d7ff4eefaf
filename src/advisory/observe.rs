//! Who holds session locks, who waits for them, and how to end such a session.

use std::sync::Arc;

use crate::advisory::key::AdvisoryKey;
use crate::advisory::sql::pid;
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::pg::answers::{int, malformed, required, text};
use crate::pg::error::without_right;
use crate::pg::{Database, Failure, Message, Row};

/// Advisory locks of this database, of transactions and sessions, of every program.
const OF_THIS_DATABASE: &str = "l.locktype = 'advisory' AND l.database = \
    (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())";

/// A session that holds an advisory lock, or waits for one.
///
/// All such sessions of this database are shown, including those of other programs, and locks that belong to a
/// transaction, such as an acquire of a lease takes for a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct AdvisorySession {
    /// The key, put together from `classid` and `objid`.
    pub key: AdvisoryKey,
    /// Whether the lock is shared with others.
    pub shared: bool,
    /// The server process.
    pub pid: i32,
    /// Its `application_name`; `None` where the role may not see it, as the next two.
    pub application_name: Option<String>,
    /// Its state, such as `idle`, `active` or `idle in transaction`.
    pub state: Option<String>,
    /// In Unix milliseconds of the server's clock: for a waiter, since when it has been waiting; for a holder,
    /// since when it has been in its state, as PostgreSQL does not record when a lock was granted. (This
    /// library's holders are checked every few seconds, so theirs is never old.)
    pub since_ms: Option<i64>,
    /// Since when the session exists, in Unix milliseconds of the server's clock.
    pub connected_since_ms: Option<i64>,
}

/// Sessions of this database with advisory locks, granted or waited for.
pub(super) fn sessions(
    database: &Arc<Database>,
    granted: bool,
    cancel: &CancelToken,
) -> Result<Vec<AdvisorySession>> {
    // `waitstart` came with version 14; asked for in this way its absence is no error.
    let (filter, since) = if granted {
        ("l.granted", "a.state_change")
    } else {
        (
            "NOT l.granted",
            "COALESCE((pg_catalog.to_jsonb(l) ->> 'waitstart')::pg_catalog.timestamptz, a.query_start)",
        )
    };
    let query = format!(
        "SELECT l.classid::int8, l.objid::int8, l.objsubid::int8, l.mode, l.pid, \
           NULLIF(a.application_name, ''), a.state, \
           floor(EXTRACT(EPOCH FROM {since}) * 1000)::int8, \
           floor(EXTRACT(EPOCH FROM a.backend_start) * 1000)::int8 \
         FROM pg_catalog.pg_locks AS l LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid \
         WHERE {OF_THIS_DATABASE} AND {filter} ORDER BY 8, l.pid, 1, 2"
    );
    let result = database.run(database.end(), cancel, |session| {
        let message = Message::new().raw(session.limits_plain()).raw(&query);
        let answers = session.ask(&message)?;
        let rows = answers.rows(0)?.iter().map(read).collect::<Result<Vec<_>>>();
        rows.map_err(Failure::from)
    });
    result.map_err(LockError::from)
}

/// Ends a session that holds or waits for an advisory lock of this database. Whether it was told to.
pub(super) fn terminate(database: &Arc<Database>, process: i32, cancel: &CancelToken) -> Result<bool> {
    let query = format!(
        "SELECT pg_catalog.pg_terminate_backend(p.pid) FROM (SELECT DISTINCT l.pid \
         FROM pg_catalog.pg_locks AS l WHERE {OF_THIS_DATABASE} AND l.pid = '{process}'::pg_catalog.int4 \
         AND l.pid <> pg_catalog.pg_backend_pid()) AS p"
    );
    let result = database.run(database.end(), cancel, |session| {
        let message = Message::new().raw(session.limits_plain()).raw(&query);
        let answers = session.ask(&message)?;
        let told = answers.row(0)?.map(|row| text(row, 0).map(|told| told == Some("t"))).transpose()?;
        Ok(told.unwrap_or(false))
    });
    result.map_err(LockError::from).map_err(|error| {
        without_right(error, "the role may not end that session: use the session's own role or a member of pg_signal_backend, and a superuser for a superuser's (SQLSTATE 42501)")
    })
}

fn read(row: &Row) -> Result<AdvisorySession> {
    let part =
        |column| -> Result<u32> { u32::try_from(required(int(row, column)?)?).map_err(|_| malformed()) };
    let owned = |column| -> Result<Option<String>> { Ok(text(row, column)?.map(str::to_owned)) };
    Ok(AdvisorySession {
        key: AdvisoryKey::at(part(0)?, part(1)?, part(2)?),
        shared: required(text(row, 3)?)?.starts_with("Share"),
        pid: pid(int(row, 4)?)?,
        application_name: owned(5)?,
        state: owned(6)?,
        since_ms: int(row, 7)?,
        connected_since_ms: int(row, 8)?,
    })
}
