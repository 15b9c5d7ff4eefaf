//! Who waits: the tickets of those who are served in order, how many clients wait for each key that is held, and the
//! sessions that are stuck over one.

use std::collections::BTreeMap;
use std::fmt;

use crate::error::Result;
use crate::leases::fragments::{CLOCK, live};
use crate::leases::note_sql::SHOWN;
use crate::leases::notify::CLASS;
use crate::leases::operator::Operator;
use crate::model::hash::hash_key;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::pg::answers::{int, malformed, required, text};
use crate::pg::statement::{Arg, Message, Statement};

/// A session that is stuck on a key. From [`Operator::blocked`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct BlockedSession {
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

/// Who waits for a key, and has said so. From [`Operator::waiters`].
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Waiter {
    /// [`hash_key`] of the key.
    pub key_hash: String,
    /// Since when it waits, in Unix milliseconds of the server's clock.
    pub since_ms: i64,
    /// Who has more comes first.
    pub priority: i32,
    /// What its owner has noted.
    pub note: Option<String>,
    /// When its ticket ends unless it is refreshed, in Unix milliseconds of the server's clock.
    pub expires_at_ms: i64,
}

/// A note is its owner's.
impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter")
            .field("key_hash", &self.key_hash)
            .field("since_ms", &self.since_ms)
            .field("priority", &self.priority)
            .field("expires_at_ms", &self.expires_at_ms)
            .finish_non_exhaustive()
    }
}

impl Operator {
    /// Those who wait and have a ticket, at most `limit` of them: per key in the order in which they are served.
    /// A process shows only the first of its waiters for a key. A writer that waits beside readers is shown, too; who
    /// waits for a held key without having asked for [`fair`](crate::LockOptions::fair) has no ticket: see
    /// [`waiting`](Self::waiting). Empty where there is no table of members; one that another client makes is seen within
    /// a minute.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// for waiter in operator.waiters(100)? {
    ///     println!("{} waits since {} with the priority {}", waiter.key_hash, waiter.since_ms, waiter.priority);
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `AuthFailed` if the role may not read the table of members.
    pub fn waiters(&self, limit: u32) -> Result<Vec<Waiter>> {
        if !self.backend.has_members_by_now(self.backend.database.end())? {
            return Ok(Vec::new());
        }
        let rows = match self.ask(|at| {
            format!(
                "SELECT w.key, w.since_ms, w.priority, pg_catalog.left(w.note, {SHOWN}), w.expires_at_ms \
                 FROM {} AS w, (SELECT {CLOCK} AS now OFFSET 0) AS t \
                 WHERE w.role = 'w' AND w.expires_at_ms > t.now \
                 ORDER BY w.key, w.priority DESC, w.since_ms, w.lock_id LIMIT {limit}",
                at.tables.members
            )
        }) {
            // It has been dropped.
            Err(error) if error.sqlstate() == Some("42P01") => return Ok(Vec::new()),
            rows => rows?,
        };
        rows.iter()
            .map(|row| {
                Ok(Waiter {
                    key_hash: hash_key(required(text(row, 0)?)?),
                    since_ms: required(int(row, 1)?)?,
                    priority: i32::try_from(required(int(row, 2)?)?).map_err(|_| malformed())?,
                    note: text(row, 3)?.map(str::to_owned),
                    expires_at_ms: required(int(row, 4)?)?,
                })
            })
            .collect()
    }

    /// The acquires of this key that wait in the server right now, in no order: those in its queue, and
    /// the one that has passed it and waits for the key's row or counter, which somebody has locked.
    /// Waiters that sleep between two attempts are not in the server and not in this list.
    ///
    /// An acquire does not wait for a counter that a fenced transaction holds, but answers "locked". If it
    /// keeps doing so although nobody has the key, look for open transactions, and in `pg_prepared_xacts` for
    /// prepared ones: these survive their session and a restart of the server.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// for session in operator.blocked("report")? {
    ///     println!("{} waits for {:?}", session.pid, session.blocked_by);
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn blocked(&self, key: &str) -> Result<Vec<BlockedSession>> {
        let key = Key::new(key)?;
        let (storage_key, _) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
        let statement = Statement::new(
            "blocked",
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
                Ok(BlockedSession {
                    pid: pid(required(int(row, 0)?)?)?,
                    application_name: text(row, 1)?.unwrap_or_default().to_owned(),
                    waiting_ms: int(row, 2)?.unwrap_or_default(),
                    blocked_by: blocked_by.split(',').filter_map(|pid| pid.parse().ok()).collect(),
                })
            })
            .collect()
    }

    /// How many clients wait for each key that is held, by [`hash_key`] of the key; for
    /// permits, of the semaphore's name. A key that nobody waits for is not included.
    ///
    /// This counts clients that listen for the key's release on a connection of their own, once each however many of
    /// their threads wait (a client listens from the 31st millisecond of a wait on), and clients whose request waits
    /// in the server right now. A client without [`wake_ups`](crate::PgLockClientBuilder::wake_ups), or behind a pooler
    /// that shares sessions, only asks now and then, and is not counted in between.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// let waiting = operator.waiting()?;
    /// for lease in operator.holders(100)? {
    ///     println!("{}: {} wait", lease.key_hash, waiting.get(&lease.key_hash).unwrap_or(&0));
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn waiting(&self) -> Result<BTreeMap<String, u64>> {
        let rows = self.ask(|at| {
            let (locks, alive) = (&at.tables.locks, live("l.expires_at_ms", "t.now"));
            // The low half of a lock's number is the key's, as an unsigned one, in both classes.
            format!(
                "SELECT k.name, count(DISTINCT w.pid) FROM (\
                   SELECT DISTINCT pg_catalog.split_part(l.user_key, E'\\u2126', 1) AS name, \
                     pg_catalog.hashtext(pg_catalog.split_part(l.key, E'\\u2126', 1))::int8 & 4294967295 AS number \
                   FROM {locks} AS l, (SELECT {CLOCK} AS now OFFSET 0) AS t WHERE {alive}) AS k \
                 JOIN pg_catalog.pg_locks AS w ON w.objid::int8 = k.number \
                 WHERE w.locktype = 'advisory' \
                   AND w.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database()) \
                   AND CASE w.objsubid WHEN 2 THEN w.classid::int8 = {CLASS} AND w.granted AND w.mode = 'ShareLock' \
                     ELSE NOT w.granted AND w.classid::int8 = CASE WHEN k.number > 2147483647 THEN 4294967295 ELSE 0 END END \
                 GROUP BY k.name"
            )
        })?;
        rows.iter()
            .map(|row| {
                let count = u64::try_from(required(int(row, 1)?)?).map_err(|_| malformed())?;
                Ok((hash_key(required(text(row, 0)?)?), count))
            })
            .collect()
    }
}
