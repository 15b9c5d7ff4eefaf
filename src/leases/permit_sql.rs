//! The SQL of permits: leases on the keys that are derived from a semaphore's name.
//!
//! Prepared on a connection with the first permit that it is asked for: who takes no permits pays for none.

use crate::leases::fragments::{CLOCK, DURABLE, VERSION, busy, live};
use crate::leases::held::release_live;
use crate::leases::notify::notify_waiters;
use crate::leases::schema::Tables;
use crate::leases::sql::upsert;
use crate::model::fence::FENCE_MAX;
use crate::pg::names::{CAT, COUNT, EQ, GE, INT, INTS, LT, MINUS, MOD, NE, PLUS, TEXT};
use crate::pg::statement::Statement;

/// The statements for permits in one pair of tables.
pub(super) struct PermitStatements {
    /// `(prefix of the keys, prefix of the fence keys, limit, lock id, ttl ms, start, numbers left out)`: the
    /// grant of a permit that seems free. Answers (expiry, fence, version, 1, …, its number, NULL), the
    /// first three NULL if it was not granted; or the key that the id has, as the last column; or nothing.
    pub(super) grant: Statement,
    /// `(prefix of the keys, limit, lock id, start, numbers left out)`: which permit that would be, or the key
    /// that the id has. Answers (its number, NULL), or (NULL, key), or nothing. Reads only.
    pub(super) choose: Statement,
    /// `(prefix of the keys, numbers)`: how many of the permits from 1 to that number are held.
    pub(super) count: Statement,
    /// `(lock id, the semaphore's stored name)`: deletes a live lease and notifies the semaphore's waiters.
    pub(super) release_live: Statement,
}

impl PermitStatements {
    pub(super) fn new(tables: &Tables) -> Self {
        Self {
            grant: Statement::new(
                "permit_grant",
                &[TEXT, TEXT, INT, TEXT, INT, INT, INTS],
                grant(tables, ""),
            ),
            choose: Statement::new(
                "permit_choose",
                &[TEXT, INT, TEXT, INT, INTS],
                format!(
                    "WITH {} SELECT slot.n, NULL::pg_catalog.text FROM slot \
                     UNION ALL SELECT NULL, own.key FROM own",
                    slot(tables, &Wanted { limit: "$2", lock_id: "$3", start: "$4", left_out: "$5" }, "")
                ),
            ),
            count: Statement::new("permit_count", &[TEXT, INT], count(tables)),
            release_live: Statement::new("permit_release", &[TEXT, TEXT], release(tables)),
        }
    }

    /// Those that take permits: a connection prepares them together.
    pub(super) fn all(&self) -> [&Statement; 4] {
        [&self.grant, &self.choose, &self.count, &self.release_live]
    }
}

/// The types of a labelled grant's arguments.
pub(super) const PERMIT: [&str; 9] = [TEXT, TEXT, INT, TEXT, INT, INT, INTS, TEXT, TEXT];

pub(super) fn release(tables: &Tables) -> String {
    release_live(tables, &format!(", {}", notify_waiters("$2")))
}

/// Which parameters of a statement say what is wanted.
struct Wanted {
    limit: &'static str,
    lock_id: &'static str,
    start: &'static str,
    left_out: &'static str,
}

/// `own`: the row that has the id already. Else `slot`: from a start that differs from call to call, the
/// first number without a live row whose advisory lock is free, and `more` of it. That lock is taken, and only that
/// one: `free` is materialised, so that its rows are asked for one by one and the planner cannot move the
/// function into it. The numbers stand in a target list, where they are counted one by one, too; in FROM they would
/// all be made first. A row is looked up by a count, which stays a lookup by the index for each number: as a join it
/// could become one with the whole table.
fn slot(tables: &Tables, wanted: &Wanted, more: &str) -> String {
    let (locks, alive) = (&tables.locks, live("l.expires_at_ms", CLOCK));
    let Wanted { limit, lock_id, start, left_out } = wanted;
    format!(
        "own AS MATERIALIZED (SELECT l.key FROM {locks} AS l WHERE l.lock_id {EQ} {lock_id}), \
         free AS MATERIALIZED (\
           SELECT s.n FROM (\
             SELECT 1::pg_catalog.int8 {PLUS} ((pg_catalog.generate_series(0, {limit} {MINUS} 1) {PLUS} {start}) {MOD} {limit}) \
             AS n) AS s \
           WHERE s.n {NE} ALL ({left_out}) AND NOT EXISTS (SELECT 1 FROM own) AND (\
             SELECT {COUNT} FROM {locks} AS l WHERE l.key {EQ} ($1 {CAT} s.n::pg_catalog.text) AND {alive}\
           ) {EQ} 0::pg_catalog.int8), \
         slot AS MATERIALIZED (\
           SELECT free.n{more} FROM free WHERE pg_catalog.pg_try_advisory_xact_lock(\
             pg_catalog.hashtext($1 {CAT} free.n::pg_catalog.text)::pg_catalog.int8) LIMIT 1)"
    )
}

/// Chooses a permit and grants it as `acquire_absent` does a lock, but over a row that is long over as well:
/// the upsert repeats the condition, on the newest version of the row. If the counter was raised and the row is
/// not ours then, or a trigger has put the counter back, the message fails as a whole (22012).
pub(super) fn grant(tables: &Tables, more: &str) -> String {
    let (locks, fences, busy) = (&tables.locks, &tables.fences, busy());
    let (column, value) = tables.key_debug("slot.key");
    let names =
        format!(", $1 {CAT} free.n::pg_catalog.text AS key, $2 {CAT} free.n::pg_catalog.text AS fence_key");
    let slot = slot(tables, &Wanted { limit: "$3", lock_id: "$4", start: "$6", left_out: "$7" }, &names);
    format!(
        "WITH {slot}, \
         counter AS MATERIALIZED (\
           SELECT c.fence, c.busy FROM slot CROSS JOIN LATERAL (\
             SELECT x.fence, {busy} FROM {fences} AS x WHERE x.fence_key {EQ} slot.fence_key LIMIT 1) AS c), \
         f AS (\
           INSERT INTO {fences} AS c (fence_key, fence{column}) SELECT slot.fence_key, 1{value} FROM slot \
           WHERE NOT EXISTS (SELECT 1 FROM counter WHERE counter.busy) \
           ON CONFLICT (fence_key) DO UPDATE SET fence = c.fence {PLUS} 1 \
             WHERE c.fence {GE} 0 AND c.fence {LT} {FENCE_MAX} RETURNING c.fence, {CLOCK} AS now), \
         u AS (\
           INSERT INTO {locks} AS l (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key) \
           SELECT slot.key, $4, f.now {PLUS} $5, f.now, pg_catalog.lpad(f.fence::pg_catalog.text, 15, '0'), slot.key \
           FROM slot, f \
           ON CONFLICT (key) DO {} RETURNING l.key, l.expires_at_ms, l.fence, l.lock_id, {VERSION} AS version){more} \
         SELECT u.expires_at_ms, u.fence, u.version, (1 OPERATOR(pg_catalog./) (CASE \
             WHEN f.fence IS NOT NULL AND (u.key IS NULL OR u.key {NE} slot.key OR u.lock_id {NE} $4) OR counter.fence {GE} f.fence \
             THEN 0 ELSE 1 END))::pg_catalog.int8, {DURABLE}, slot.n, NULL::pg_catalog.text \
           FROM slot LEFT JOIN f ON true LEFT JOIN u ON true LEFT JOIN counter ON true \
         UNION ALL SELECT NULL, NULL, NULL, 1, NULL, NULL, own.key FROM own",
        upsert()
    )
}

/// Number by number, so that it is right under any collation of the column, and counts what a lowered limit
/// has left.
fn count(tables: &Tables) -> String {
    let (locks, alive) = (&tables.locks, live("l.expires_at_ms", CLOCK));
    format!(
        "SELECT {COUNT} FROM pg_catalog.generate_series(1, $2) AS g (i) CROSS JOIN LATERAL (\
           SELECT 1 FROM {locks} AS l WHERE l.key {EQ} ($1 {CAT} g.i::pg_catalog.text) AND {alive} LIMIT 1) AS l"
    )
}
