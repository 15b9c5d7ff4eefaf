//! For operators: who holds what, what waits, how many there are, and the two ways to take rows
//! away: cleaning up what is long over, and breaking a lock by hand.
//!
//! 1. Nothing here deletes or lowers a fence counter.
//! 2. Cleanup deletes a row only if it is over by more than [`CLEANUP_GUARD_MS`], judged by the
//!    server's clock on the newest version of the row, in the deleting statement itself.
//! 3. A broken lock's fence is raised with it, in one transaction: whatever the old holder still
//!    writes under its fence is refused. Where it cannot be raised, the lock is not broken either.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::{LockInfo, LockInfoRaw};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::acquire::explain_unraised_counter;
use crate::leases::backend::PostgresBackend;
use crate::leases::fragments::{CLOCK, live};
use crate::leases::notify::notify_waiters;
use crate::leases::refusals::{cannot_notify, is_all_or_nothing, is_swallowed, swallowed};
use crate::leases::setup::ResolvedTables;
use crate::model::fence::{FENCE_MAX, Fence};
use crate::model::hash::hash_key;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::pg::Failure;
use crate::pg::answers::{Row, int, malformed, required, text};
use crate::pg::names::PLAIN_NAMES;
use crate::pg::session::Session;
use crate::pg::statement::{Arg, Message, Statement};

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
    backend: Arc<PostgresBackend>,
}

/// How many rows there are. From [`Operator::counts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Counts {
    /// Leases that are live by the server's clock.
    pub live: u64,
    /// Rows whose lease is over: taken over by the next holder, or deleted by cleanup.
    pub expired: u64,
    /// Fence counters: one for each key that was ever locked.
    pub counters: u64,
}

/// A session that is stuck over a key. From [`Operator::waiters`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Waiter {
    /// Its server process.
    pub pid: i32,
    /// Its `application_name`.
    pub application_name: String,
    /// How long its statement has been running, in milliseconds.
    pub waiting_ms: i64,
    /// The server processes that it waits for. 0 is a prepared transaction, which has no process: it holds
    /// its locks until somebody ends it, see `pg_prepared_xacts`
    /// (<https://www.postgresql.org/docs/current/view-pg-prepared-xacts.html>).
    pub blocked_by: Vec<i32>,
}

/// What [`Operator::break_lock`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct BrokenLock {
    /// The lease that was taken away, live or not; `None` if the key was free, or if its row was not
    /// one that a SyncGuard client writes.
    pub was: Option<LockInfo>,
    /// The key's counter now: greater than every fence that was ever granted.
    pub fence: Fence,
}

/// A counter that nothing has raised for long. From [`Operator::idle_counters`].
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
    pub(crate) fn new(backend: Arc<PostgresBackend>) -> Self {
        Self { backend }
    }

    /// The live leases, those that end last first, at most `limit` of them.
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
        self.ask(|at| {
            let (locks, alive) = (&at.tables.locks, live("l.expires_at_ms", "t.now"));
            format!(
                "SELECT l.user_key, l.lock_id, l.expires_at_ms, l.acquired_at_ms, l.fence \
                 FROM {locks} AS l, (SELECT {CLOCK} AS now OFFSET 0) AS t WHERE {alive} \
                 ORDER BY l.expires_at_ms DESC LIMIT {limit}"
            )
        })?
        .iter()
        .map(lease)
        .collect()
    }

    /// How many live leases, rows of leases that are over, and fence counters there are. It counts
    /// them: on millions of counters that takes a while.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// let counts = operator.counts()?;
    /// println!("{} held, {} rows that are over", counts.live, counts.expired);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn counts(&self) -> Result<Counts> {
        let rows = self.ask(|at| {
            let (locks, fences, alive) =
                (&at.tables.locks, &at.tables.fences, live("l.expires_at_ms", "t.now"));
            format!(
                "SELECT count(*) FILTER (WHERE {alive}), count(*) FILTER (WHERE NOT {alive}), \
                 (SELECT count(*) FROM {fences}) FROM {locks} AS l, (SELECT {CLOCK} AS now OFFSET 0) AS t"
            )
        })?;
        let row = required(rows.first())?;
        let count =
            |column| -> Result<u64> { u64::try_from(required(int(row, column)?)?).map_err(|_| malformed()) };
        Ok(Counts { live: count(0)?, expired: count(1)?, counters: count(2)? })
    }

    /// The acquires of this key that wait in the server right now, in no order: those in its queue, and
    /// the one that is through and stands before the key's row or counter, which somebody has locked.
    /// Waiters that sleep between two attempts are not in the server and not in this list.
    ///
    /// An acquire does not wait for a counter that a fenced transaction holds, but answers "locked". If it
    /// goes on doing so and nobody has the key, look for open transactions, and in `pg_prepared_xacts` for
    /// prepared ones: those survive their session, and a restart of the server.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// for waiter in operator.waiters("report")? {
    ///     println!("{} waits for {:?}", waiter.pid, waiter.blocked_by);
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn waiters(&self, key: &str) -> Result<Vec<Waiter>> {
        let key = Key::new(key)?;
        let (storage_key, _) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
        let statement = Statement::new(
            "waiters",
            &["text"],
            "SELECT a.pid, a.application_name, \
               (EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - a.query_start) * 1000)::int8, \
               pg_catalog.array_to_string(pg_catalog.pg_blocking_pids(a.pid), ',') \
             FROM pg_catalog.pg_locks AS w JOIN pg_catalog.pg_stat_activity AS a ON a.pid = w.pid, \
               (SELECT pg_catalog.hashtext($1)::int8 AS number) AS k \
             WHERE w.locktype = 'advisory' AND w.objsubid = 1 \
               AND (NOT w.granted OR pg_catalog.cardinality(pg_catalog.pg_blocking_pids(w.pid)) > 0) \
               AND w.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database()) \
               AND ((w.classid::int8 << 32) | w.objid::int8) = k.number"
                .into(),
        );
        let rows = self.run_by(self.backend.database.end(), |session, _| {
            let message =
                Message::new().raw(session.limits_plain()).plain(&statement, &[Arg::Text(&storage_key)])?;
            Ok(session.ask(&message)?.into_last_rows())
        })?;
        rows.iter()
            .map(|row| {
                let pid = |n: i64| i32::try_from(n).map_err(|_| malformed());
                let blocked_by = text(row, 3)?.unwrap_or_default();
                Ok(Waiter {
                    pid: pid(required(int(row, 0)?)?)?,
                    application_name: text(row, 1)?.unwrap_or_default().to_owned(),
                    waiting_ms: int(row, 2)?.unwrap_or_default(),
                    blocked_by: blocked_by.split(',').filter_map(|pid| pid.parse().ok()).collect(),
                })
            })
            .collect()
    }

    /// Takes a key away from whoever holds it, and raises its fence, so that what the old holder
    /// still writes under a fence is refused. The holder notices at its next renewal.
    ///
    /// `who` is logged as a warning beside the key's hash, also where the answer was lost and the lock
    /// perhaps broken: say who asked, and why.
    ///
    /// Without fenced writes the old holder goes on working until it notices: make sure that it has
    /// stopped first.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// let broken = operator.break_lock("report", "on call: its host is gone")?;
    /// println!("the fencing token is {} now", broken.fence);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `NetworkTimeout` if the holder's row or counter stays locked by a transaction, `Internal` if the
    /// counter cannot be raised because it is at its limit or was changed by hand. Then, as after every
    /// error but an unknown outcome, nothing was changed.
    pub fn break_lock(&self, key: &str, who: &str) -> Result<BrokenLock> {
        let key = Key::new(key)?;
        let (storage_key, fence_key) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
        let broken = self.backend.run(self.backend.database.end(), &CancelToken::never(), |session, at| {
            let mut attempt = |notifies| {
                let message = Message::new()
                    .raw(session.prelude())
                    .raw(PLAIN_NAMES)
                    .call(&at.statements.queue, &[Arg::Text(&storage_key)])
                    .plain(
                        &take_away(at, notifies),
                        &[Arg::Text(&storage_key), Arg::Text(&fence_key), Arg::Text(key.as_str())],
                    )?;
                session.commit(&message)
            };
            let answers = match attempt(at.notifies) {
                Err(failure) if at.notifies && cannot_notify(&failure) => attempt(false),
                answers => answers,
            };
            let answers = match answers {
                Err(failure) if is_swallowed(&failure) => return Err(swallowed().into()),
                Err(failure) if is_all_or_nothing(&failure) => {
                    return Err(explain_unraised_counter(session, at, &fence_key));
                }
                answers => answers?,
            };
            let row = required(answers.row(0)?)?;
            // It is gone for good: a row that cannot be read is no error any more.
            let was = lease(row).ok();
            let fence = u64::try_from(required(int(row, 6)?)?).ok().and_then(Fence::new);
            Ok(BrokenLock { was: was.map(|lease| lease.sanitized()), fence: required(fence)? })
        });
        let hash = hash_key(key.as_str());
        let broken = broken.map_err(|failure| {
            if failure.is_in_doubt() {
                log::warn!("the lock of key #{hash} was perhaps broken by {who:?}: the answer was lost");
            }
            LockError::from(failure).with_key(key.as_str())
        })?;
        let fence = broken.fence;
        log::warn!("the lock of key #{hash} was broken by {who:?}, its fence is now {fence}");
        Ok(broken)
    }

    /// Deletes rows of leases that have been over for more than 2 s, the oldest first, at most
    /// `limit` of them. Returns how many. For a cron job; needs `DELETE` on the lock table.
    ///
    /// Never touches a live lease or a fence counter, never waits for a locked row. After it, a late
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

    /// Counters that nothing has raised for at least `idle_for`, at most `limit` of them. A report
    /// only: a counter must never be deleted, because the next holder of its key would get a fence
    /// that was handed out before. The marks of [`run_once`](crate::PgLockClient::run_once) are not counters of
    /// a key, and not among them.
    ///
    /// The tables keep no time for it; the server does, with `track_commit_timestamp = on`
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
            let noted = if at.tables.notes_keys() { "c.key_debug" } else { "NULL" };
            format!(
                "SELECT coalesce({noted}, c.fence_key), c.fence, (EXTRACT(EPOCH FROM x.raised) * 1000)::int8 \
                 FROM {fences} AS c, LATERAL (SELECT pg_catalog.pg_xact_commit_timestamp(c.xmin) AS raised OFFSET 0) AS x \
                 WHERE (x.raised IS NULL OR x.raised <= pg_catalog.clock_timestamp() - {seconds} * interval '1 second') \
                   AND c.fence_key NOT LIKE E'%\\u2126done' AND c.fence_key NOT LIKE E'%\\u2126number' \
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

    fn ask(&self, sql: impl Fn(&ResolvedTables) -> String) -> Result<Vec<Row>> {
        self.ask_by(self.backend.database.end(), sql)
    }

    fn ask_by(&self, end: Instant, sql: impl Fn(&ResolvedTables) -> String) -> Result<Vec<Row>> {
        self.run_by(end, |session, at| {
            let message =
                Message::new().raw(session.limits_plain()).raw("SET LOCAL enable_seqscan TO on").raw(sql(at));
            Ok(session.ask(&message)?.into_last_rows())
        })
    }

    fn run_by<R>(
        &self,
        end: Instant,
        operation: impl FnMut(&mut Session<'_>, &ResolvedTables) -> Result<R, Failure>,
    ) -> Result<R> {
        self.backend.run(end, &CancelToken::never(), operation).map_err(LockError::from)
    }
}

/// `(storage key, fence key, user key)`: deletes the row, notifies its waiters, and raises the counter, or
/// fails as a whole: if that is not raised (22012, division by zero), or if a row that stands is not
/// deleted (22P02).
fn take_away(at: &ResolvedTables, notifies: bool) -> Statement {
    let notification = if notifies { notify_waiters("l.key") } else { "NULL".to_owned() };
    let (locks, fences) = (&at.tables.locks, &at.tables.fences);
    let (column, value) = at.tables.key_debug("$3");
    Statement::new(
        "break",
        &["text", "text", "text"],
        format!(
            "WITH stood AS MATERIALIZED (SELECT l.key FROM {locks} AS l WHERE l.key = $1 FOR UPDATE), \
             gone AS (\
               DELETE FROM {locks} AS l USING stood WHERE l.key = stood.key \
               RETURNING l.user_key, l.lock_id, l.expires_at_ms, l.acquired_at_ms, l.fence, {notification}), \
             raised AS (\
               INSERT INTO {fences} AS c (fence_key, fence{column}) VALUES ($2, 1{value}) \
               ON CONFLICT (fence_key) DO UPDATE SET fence = c.fence + 1 \
                 WHERE c.fence >= 0 AND c.fence < {FENCE_MAX} RETURNING c.fence) \
             SELECT gone.*, raised.fence, \
               1 / (SELECT count(*) FROM raised AS r WHERE NOT EXISTS (\
                 SELECT 1 FROM {fences} AS c WHERE c.fence_key = $2 AND c.fence >= r.fence)), \
               (CASE WHEN (SELECT count(*) FROM stood) = (SELECT count(*) FROM gone) THEN '1' ELSE 'stands' END)::int4 \
             FROM (SELECT 1) AS one LEFT JOIN gone ON true LEFT JOIN raised ON true"
        ),
    )
}

/// A row `(user key, lock id, expiry, acquisition, fence, …)`.
fn lease(row: &Row) -> Result<LockInfoRaw> {
    let fence = required(text(row, 4)?)?.parse().map_err(|error| malformed().with_source(error))?;
    Ok(LockInfoRaw::new(
        required(text(row, 0)?)?.to_owned(),
        required(text(row, 1)?)?.to_owned(),
        required(int(row, 2)?)?,
        required(int(row, 3)?)?,
        fence,
    ))
}
