//! For operators: who holds what, what waits, how many there are, and what is long over.
//!
//! 1. Nothing here deletes or lowers a fence counter.
//! 2. Cleanup deletes a row only if it is over by more than [`CLEANUP_GUARD_MS`], judged by the
//!    server's clock on the newest version of the row, in the deleting statement itself.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::{LockInfo, LockInfoRaw};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::leases::backend::PostgresBackend;
use crate::leases::fragments::{CLOCK, live};
use crate::leases::members::is_group;
use crate::leases::note_sql::SHOWN;
use crate::leases::notes::label_in;
use crate::leases::setup::ResolvedTables;
use crate::leases::shared_sql::GROUP;
use crate::model::fence::Fence;
use crate::model::hash::hash_key;
use crate::pg::Failure;
use crate::pg::answers::{Row, int, malformed, required, text};
use crate::pg::same_session::SessionLocksHere;
use crate::pg::session::Session;
use crate::pg::statement::Message;

/// The operator's view of the lock tables. From [`PgLockClient::operator`](crate::PgLockClient::operator).
///
/// # Blocking
///
/// Each call at most `operation_timeout`.
///
/// # Cancellation
///
/// No token ends them.
#[derive(Clone)]
pub struct Operator {
    pub(super) backend: Arc<PostgresBackend>,
    session_locks: SelfTest,
}

/// What finds out, until then, whether session locks exclude here.
pub(crate) type SelfTest = Arc<dyn Fn(Instant) -> SessionLocksHere + Send + Sync>;

/// How many rows there are. From [`Operator::counts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Counts {
    /// Leases that are live by the server's clock.
    pub live: u64,
    /// Rows whose lease is over: taken over by the next holder, or deleted by cleanup.
    pub expired: u64,
    /// Fence counters: one for each key that was ever locked, and for each permit.
    pub counters: u64,
    /// Marks of jobs that run once per slot: see [`Operator::marks`]. `None` if the role may not read the
    /// counters' names: `counters` then includes the marks.
    #[cfg_attr(feature = "serde", serde(default))]
    pub marks: Option<u64>,
}

/// A counter that has not been raised for long. From [`Operator::idle_counters`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct IdleCounter {
    /// [`hash_key`] of the key that the counter notes, or of its fence key where it notes none.
    pub key_hash: String,
    /// The last fence that it handed out.
    pub fence: Fence,
    /// When it was raised last, in Unix milliseconds; `None` if that is longer ago than the server remembers.
    pub raised_at_ms: Option<i64>,
}

impl fmt::Debug for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operator").finish_non_exhaustive()
    }
}

impl Operator {
    pub(crate) fn new(backend: Arc<PostgresBackend>, session_locks: SelfTest) -> Self {
        Self { backend, session_locks }
    }

    pub(super) fn session_locks_here(&self, end: Instant) -> SessionLocksHere {
        (self.session_locks)(end)
    }

    /// The live leases, at most `limit` of them; those that end last come first. A permit is shown under its
    /// semaphore's name, with its number.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// for lease in operator.holders(100)? {
    ///     println!("{} under the fencing token {}", lease.key_hash, lease.fence);
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn holders(&self, limit: u32) -> Result<Vec<LockInfo>> {
        Ok(self.holders_raw(limit)?.iter().map(LockInfoRaw::sanitized).collect())
    }

    /// The same with raw keys and lock ids: **sensitive**, for debugging. The role needs to read `lock_id`.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// let keys: Vec<String> = operator.holders_raw(100)?.into_iter().map(|lease| lease.key).collect();
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn holders_raw(&self, limit: u32) -> Result<Vec<LockInfoRaw>> {
        // Without it, or the right to read it, nobody knows how many there are.
        let members = self.backend.has_members_by_now(self.backend.database.end())?;
        match self.holders_with(limit, members) {
            Err(error) if members && matches!(error.sqlstate(), Some("42501" | "42P01")) => {
                self.holders_with(limit, false)
            }
            found => found,
        }
    }

    fn holders_with(&self, limit: u32, members: bool) -> Result<Vec<LockInfoRaw>> {
        let more = |at: &ResolvedTables| {
            if !members {
                return "NULL, NULL, NULL".to_owned();
            }
            let (alive, members) = (live("m.expires_at_ms", "t.now"), &at.tables.members);
            let of_group = format!("m.key = l.key AND m.role = 's' AND m.fence = l.fence AND {alive}");
            let label = |column| {
                format!(
                    "CASE WHEN pg_catalog.starts_with(l.lock_id, '{GROUP}') THEN (SELECT pg_catalog.left(m.{column}, {SHOWN}) \
                       FROM {members} AS m WHERE {of_group} AND (m.owner IS NOT NULL OR m.note IS NOT NULL) \
                       ORDER BY m.expires_at_ms DESC, m.lock_id LIMIT 1) \
                     ELSE (SELECT pg_catalog.left(m.{column}, {SHOWN}) FROM {members} AS m \
                       WHERE m.lock_id = l.lock_id AND m.role = 'n' AND m.fence = l.fence) END"
                )
            };
            let (owner, note) = (label("owner"), label("note"));
            format!(
                "CASE WHEN pg_catalog.starts_with(l.lock_id, '{GROUP}') THEN (SELECT count(*) FROM {members} AS m \
                 WHERE {of_group}) END, {owner}, {note}"
            )
        };
        self.ask(|at| {
            let (locks, alive, more) = (&at.tables.locks, live("l.expires_at_ms", "t.now"), more(at));
            format!(
                "SELECT l.user_key, l.lock_id, l.expires_at_ms, l.acquired_at_ms, l.fence, {more} \
                 FROM {locks} AS l, (SELECT {CLOCK} AS now OFFSET 0) AS t WHERE {alive} \
                 ORDER BY l.expires_at_ms DESC LIMIT {limit}"
            )
        })?
        .iter()
        .map(|row| {
            let found = lease(row)?;
            let readers = int(row, 5)?.and_then(|number| u32::try_from(number).ok());
            let (owner, note) = label_in(row, 6)?;
            let found = if found.shared { found.shared_by(readers) } else { found };
            Ok(found.labelled(owner, note))
        })
        .collect()
    }

    /// How many live leases, rows of leases that are over, fence counters and marks there are. It counts
    /// them: on millions of counters that takes a while.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// let counts = operator.counts()?;
    /// println!("{} held, {} rows that are over", counts.live, counts.expired);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn counts(&self) -> Result<Counts> {
        let counted = |named: bool| {
            self.ask(|at| {
                let (locks, fences) = (&at.tables.locks, &at.tables.fences);
                let (alive, marks) = (live("l.expires_at_ms", "t.now"), at.marks());
                let of_fences = if named {
                    format!("count(*) FILTER (WHERE NOT {marks}), count(*) FILTER (WHERE {marks} AND c.fence >= 0)")
                } else {
                    "count(*), NULL".to_owned()
                };
                format!(
                    "SELECT l.*, c.* FROM (\
                       SELECT count(*) FILTER (WHERE {alive}), count(*) FILTER (WHERE NOT {alive}) \
                       FROM {locks} AS l, (SELECT {CLOCK} AS now OFFSET 0) AS t) AS l, \
                     (SELECT {of_fences} FROM {fences} AS c) AS c"
                )
            })
        };
        let rows = match counted(true) {
            // The role may count them and not read their names.
            Err(error) if error.code() == ErrorCode::AuthFailed => counted(false)?,
            rows => rows?,
        };
        let row = required(rows.first())?;
        let number = |n: i64| u64::try_from(n).map_err(|_| malformed());
        let count = |column| -> Result<u64> { number(required(int(row, column)?)?) };
        let marks = int(row, 3)?.map(number).transpose()?;
        Ok(Counts { live: count(0)?, expired: count(1)?, counters: count(2)?, marks })
    }

    /// The server's clock, in Unix milliseconds, to compare the times of leases with and show how
    /// old they are. Only for display: the server alone decides who has a key.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// let now = operator.server_time_ms()?;
    /// for lease in operator.holders(100)? {
    ///     println!("{} for {} ms", lease.key_hash, now - lease.acquired_at_ms);
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn server_time_ms(&self) -> Result<i64> {
        let rows = self.ask(|_| format!("SELECT {CLOCK}"))?;
        required(int(required(rows.first())?, 0)?)
    }

    /// Deletes rows of leases that have been over for more than 2 s, the oldest first; then, if the role may,
    /// members of shared keys that have been over for as long; at most `limit` rows in all.
    /// Returns how many. For a cron job; needs `DELETE` on the lock table.
    ///
    /// It never touches a live lease or a fence counter, and never waits for a locked row. After it, a late
    /// release or extend is "not found" rather than "expired": only telemetry sees the difference.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// while operator.cleanup_expired(1000)? == 1000 {}
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn cleanup_expired(&self, limit: u32) -> Result<u64> {
        self.backend.cleanup_expired(limit, self.backend.database.end())
    }

    /// Counters that have not been raised for at least `idle_for`, at most `limit` of them. This is a report
    /// only: a counter must never be deleted, because the next holder of its key would get a fence
    /// that was handed out before. The marks of [`run_once`](crate::PgLockClient::run_once) are not counters of
    /// a key, and not among them.
    ///
    /// The tables do not record the time; the server does, with `track_commit_timestamp = on`
    /// (<https://www.postgresql.org/docs/current/runtime-config-replication.html#GUC-TRACK-COMMIT-TIMESTAMP>).
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// # use std::time::Duration;
    /// let a_year = Duration::from_secs(365 * 86_400);
    /// println!("{} keys of the last year", operator.idle_counters(a_year, 1000)?.len());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the server does not track commit timestamps.
    pub fn idle_counters(&self, idle_for: Duration, limit: u32) -> Result<Vec<IdleCounter>> {
        let seconds = idle_for.as_secs().min(3_000_000_000);
        let end = self.backend.database.end();
        let tracked =
            self.ask_by(end, |_| "SELECT pg_catalog.current_setting('track_commit_timestamp')".to_owned())?;
        if text(required(tracked.first())?, 0)? != Some("on") {
            return Err(LockError::invalid(
                "the server does not track commit times: set track_commit_timestamp = on and restart it; it knows what is raised from then on",
            ));
        }
        let rows = self.ask_by(end, |at| {
            let fences = &at.tables.fences;
            let marks = at.marks();
            let noted = if at.tables.notes_keys() { "c.key_debug" } else { "NULL" };
            format!(
                "SELECT coalesce({noted}, c.fence_key), c.fence, (EXTRACT(EPOCH FROM x.raised) * 1000)::int8 \
                 FROM {fences} AS c, LATERAL (SELECT pg_catalog.pg_xact_commit_timestamp(c.xmin) AS raised OFFSET 0) AS x \
                 WHERE (x.raised IS NULL OR x.raised <= pg_catalog.clock_timestamp() - {seconds} * interval '1 second') \
                   AND NOT {marks} \
                 ORDER BY x.raised NULLS FIRST LIMIT {limit}"
            )
        })?;
        rows.iter()
            .map(|row| {
                let fence = u64::try_from(required(int(row, 1)?)?).ok().and_then(Fence::new);
                Ok(IdleCounter {
                    key_hash: hash_key(required(text(row, 0)?)?),
                    fence: required(fence)?,
                    raised_at_ms: int(row, 2)?,
                })
            })
            .collect()
    }

    pub(super) fn ask(&self, sql: impl Fn(&ResolvedTables) -> String) -> Result<Vec<Row>> {
        self.ask_by(self.backend.database.end(), sql)
    }

    fn ask_by(&self, end: Instant, sql: impl Fn(&ResolvedTables) -> String) -> Result<Vec<Row>> {
        self.run_by(end, |session, at| {
            let message =
                Message::new().raw(session.limits_plain()).raw("SET LOCAL enable_seqscan TO on").raw(sql(at));
            Ok(session.ask(&message)?.into_last_rows())
        })
    }

    pub(super) fn run_by<R>(
        &self,
        end: Instant,
        operation: impl FnMut(&mut Session<'_>, &ResolvedTables) -> Result<R, Failure>,
    ) -> Result<R> {
        self.backend.run(end, &CancelToken::never(), operation).map_err(LockError::from)
    }
}

/// A row `(user key, lock id, expiry, acquisition, fence, …)`, a permit under its semaphore's name.
pub(super) fn lease(row: &Row) -> Result<LockInfoRaw> {
    let fence = required(text(row, 4)?)?.parse().map_err(|error| malformed().with_source(error))?;
    let found = LockInfoRaw::new(
        required(text(row, 0)?)?.to_owned(),
        required(text(row, 1)?)?.to_owned(),
        required(int(row, 2)?)?,
        required(int(row, 3)?)?,
        fence,
    )
    .under_its_name();
    Ok(if is_group(&found.lock_id) { found.shared_by(None) } else { found })
}
