//! Deleting rows of leases that are long over, which nobody needs.
//!
//! A row is deleted only if it is over by more than [`CLEANUP_GUARD_MS`], judged by the server's clock
//! on the newest version of the row, in the deleting statement itself.

use std::time::{Duration, Instant};

use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::backend::PostgresBackend;
use crate::leases::fragments::CLOCK;
use crate::leases::refusals::swallowed;
use crate::pg::Message;
use crate::pg::answers::{int, malformed, required};
use crate::pg::names::PLAIN_NAMES;
use crate::threads::spawn;

pub use crate::leases::fragments::CLEANUP_GUARD_MS;

/// The least time between two cleanups that reads cause.
const PAUSE: Duration = Duration::from_secs(1);

/// The most rows that such a cleanup deletes.
const ROWS: u32 = 100;

impl PostgresBackend {
    /// Cleans up after a read that met a row long over: later, on a thread of its own, at most once
    /// per [`PAUSE`]. Failures only reach the debug log.
    pub(super) fn cleanup_soon(&self) {
        if !self.settings.cleanup_in_is_locked {
            return;
        }
        let now = Instant::now();
        {
            let mut next = self.next_cleanup.lock();
            if next.is_some_and(|next| now < next) {
                return;
            }
            *next = Some(now + PAUSE);
        }
        let this = self.this.clone();
        let cleanup = move || {
            let Some(backend) = this.upgrade() else { return };
            if let Err(error) = backend.cleanup_expired(ROWS, backend.database.end()) {
                log::debug!("cleanup of expired leases failed: {}", error.chain());
            }
        };
        if spawn("syncguard-cleanup", cleanup).is_err() {
            log::debug!("no thread for the cleanup of expired leases");
        }
    }

    /// Deletes rows of leases that are long over. See [`Operator::cleanup_expired`].
    pub(crate) fn cleanup_expired(&self, limit: u32, end: Instant) -> Result<u64> {
        let deleted = self.run(end, &CancelToken::never(), |session, at| {
            let locks = &at.tables.locks;
            // The clock is read before the rows are found: an older now deletes less, never more.
            let sql = format!(
                "WITH old AS MATERIALIZED (\
                   SELECT l.key, l.lock_id FROM {locks} AS l \
                   WHERE l.expires_at_ms < (SELECT {CLOCK}) - {CLEANUP_GUARD_MS} \
                   ORDER BY l.expires_at_ms LIMIT {limit} FOR UPDATE SKIP LOCKED), \
                 gone AS (\
                   DELETE FROM {locks} AS l USING old WHERE l.key = old.key AND l.lock_id = old.lock_id RETURNING 1) \
                 SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM old)"
            );
            let message = Message::new()
                .raw(session.prelude())
                .raw(PLAIN_NAMES)
                .raw("SET LOCAL synchronous_commit TO off")
                .raw(sql);
            let answers = session.commit(&message)?;
            let row = required(answers.row(0)?)?;
            let (deleted, found) = (required(int(row, 0)?)?, required(int(row, 1)?)?);
            if deleted < found { Err(swallowed().into()) } else { Ok(deleted) }
        });
        let deleted = u64::try_from(deleted.map_err(LockError::from)?).map_err(|_| malformed())?;
        let left = limit.saturating_sub(u32::try_from(deleted).unwrap_or(limit));
        Ok(deleted + self.cleanup_members(left, end)?)
    }

    /// The same for members, announcements and notes, where their table is there and the role may.
    fn cleanup_members(&self, limit: u32, end: Instant) -> Result<u64> {
        let never = CancelToken::never();
        if limit == 0 || !self.has_members_by_now(end)? {
            return Ok(0);
        }
        let deleted = self.run(end, &never, |session, at| {
            let (members, locks) = (&at.tables.members, &at.tables.locks);
            // A note lasts as long as its lease, however often that is renewed. One that is written anew meanwhile is
            // younger than the guard.
            let sql = format!(
                "WITH t AS MATERIALIZED (SELECT {CLOCK} - {CLEANUP_GUARD_MS} AS long_ago), \
                 old AS MATERIALIZED (\
                   SELECT m.lock_id FROM {members} AS m, t \
                   WHERE CASE WHEN m.role = 'n' THEN m.since_ms < t.long_ago AND NOT EXISTS (\
                     SELECT 1 FROM {locks} AS l WHERE l.lock_id = m.lock_id) \
                     ELSE m.expires_at_ms < t.long_ago END \
                   LIMIT {limit} FOR UPDATE OF m SKIP LOCKED), \
                 gone AS (DELETE FROM {members} AS m USING old WHERE m.lock_id = old.lock_id RETURNING 1) \
                 SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM old)"
            );
            let message = Message::new()
                .raw(session.prelude())
                .raw(PLAIN_NAMES)
                .raw("SET LOCAL synchronous_commit TO off; SET LOCAL enable_seqscan TO on")
                .raw(sql);
            let answers = session.commit(&message)?;
            let row = required(answers.row(0)?)?;
            let (deleted, found) = (required(int(row, 0)?)?, required(int(row, 1)?)?);
            if deleted < found { Err(swallowed().into()) } else { Ok(deleted) }
        });
        match deleted {
            Ok(deleted) => u64::try_from(deleted).map_err(|_| malformed()),
            // Its rights are those of who cleans up leases.
            Err(failure) if matches!(failure.refused_with(), Some("42501" | "42P01")) => Ok(0),
            Err(failure) => Err(LockError::from(failure)),
        }
    }
}

/// Whether cleanup may delete a row with this expiry.
pub(crate) fn is_long_over(expires_at_ms: i64, now_ms: i64) -> bool {
    expires_at_ms < now_ms.saturating_sub(CLEANUP_GUARD_MS)
}
