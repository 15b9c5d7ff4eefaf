//! How many clients wait for each key that is held.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::leases::fragments::{CLOCK, live};
use crate::leases::notify::CLASS;
use crate::leases::operator::Operator;
use crate::model::hash::hash_key;
use crate::pg::answers::{int, malformed, required, text};

impl Operator {
    /// How many clients wait for each key that is held, by [`hash_key`] of the key; for
    /// permits, of the semaphore's name. A key that nobody waits for is not in it.
    ///
    /// A client counts that listens for the key's release on a connection of its own, which it does from its 31st
    /// millisecond of waiting on, however many of its threads wait; and one whose request waits in the
    /// server right now. A client without [`wake_ups`](crate::PgLockClientBuilder::wake_ups), or behind a pooler
    /// that shares sessions, only asks now and then, and does not count in between.
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
