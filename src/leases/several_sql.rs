//! The SQL of several keys at once.
//!
//! 1. Every statement goes through its keys in the order in which the caller hands them over, by their
//!    bytes: `ORDER BY key` would follow the column's collation, which two tables may not share. Rows,
//!    counters and shares are all locked in that order, so that nobody waits in a circle.
//! 2. Advisory locks are waited for in the order of their numbers, each number once: two keys may have
//!    the same one.
//! 3. Rows are looked up by `LATERAL` from the list of keys: a join could become one over the whole table.

use crate::error::Result;
use crate::leases::fragments::{CLOCK, DURABLE, RELAXED, VERSION, busy, live};
use crate::leases::held::notification;
use crate::leases::schema::Tables;
use crate::leases::sql::{STALE, upsert};
use crate::model::fence::{FENCE_MAX, Fence};
use crate::pg::names::{COUNT, EQ, GE, INT, LT, MINUS, NE, PLUS, TEXT, TEXTS};
use crate::pg::statement::{Statement, push_quoted};

/// The statements for several keys. A connection prepares them with their first use.
pub(crate) struct SetStatements {
    /// `(storage keys, fence keys, user keys, lock ids, ttl ms)`: the grant where no row stands for any
    /// key and nobody queues. Answers (place, expiry, fence, version, 1) for each key, or the rows that
    /// stand: (place, expiry, fence, lock id, clock); or nothing.
    pub(crate) absent: Statement,
    /// `(storage keys)`: queues for all of them, and sees to a durable commit.
    pub(crate) queue: Statement,
    /// `(storage keys, lock ids)`: locks the rows that [`grant`](Self::grant) will lock.
    pub(crate) hold: Statement,
    /// As `absent`: the grant, whatever rows stand. Answers for each key (place, expiry, fence,
    /// version, …, the rest in ms and the fence of the row that stood, whether it was live, whether it was ours,
    /// how many are ours, whether all rows and counters were free, whether the counter is free or not there).
    pub(crate) grant: Statement,
    /// `(storage keys, lock ids)`: writes granted rows back as they are. Answers (place, expiry, fence, version).
    pub(crate) confirm: Statement,
    /// `(lock ids)`: answers for each that was found (place, live, deleted). Notifies waiters.
    pub(crate) release: Statement,
    /// The same, and notifies nobody.
    pub(crate) release_quietly: Statement,
}

impl SetStatements {
    pub(crate) fn new(tables: &Tables, notifies: bool) -> Self {
        const ASKED: &[&str] = &[TEXTS, TEXTS, TEXTS, TEXTS, INT];
        Self {
            absent: Statement::new("set_absent", ASKED, absent(tables, "")),
            queue: Statement::new("set_queue", &[TEXTS], queue()),
            hold: Statement::new("set_hold", &[TEXTS, TEXTS], hold(tables)),
            grant: Statement::new("set_grant", ASKED, grant(tables, "")),
            confirm: Statement::new("set_confirm", &[TEXTS, TEXTS], confirm(tables)),
            release: Statement::new("set_release", &[TEXTS], release(tables, notifies, "")),
            release_quietly: Statement::new("set_release_quietly", &[TEXTS], release(tables, false, "")),
        }
    }

    /// All of them: a connection prepares them together, in one round trip.
    pub(crate) fn all(&self) -> [&Statement; 7] {
        [
            &self.absent,
            &self.queue,
            &self.hold,
            &self.grant,
            &self.confirm,
            &self.release,
            &self.release_quietly,
        ]
    }
}

/// The types of a labelled grant's arguments.
pub(super) const SET: &[&str] = &[TEXTS, TEXTS, TEXTS, TEXTS, INT, TEXT, TEXT];

/// What is asked for, one row per key, in order.
const WANT: &str = "want AS MATERIALIZED (\
      SELECT w.place, w.key, w.fence_key, w.user_key, w.lock_id \
      FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3), pg_catalog.unnest($4)) \
        WITH ORDINALITY AS w (key, fence_key, user_key, lock_id, place))";

/// The same for keys and lock ids alone.
const WANT_IDS: &str = "want AS MATERIALIZED (\
      SELECT w.place, w.key, w.lock_id \
      FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2)) WITH ORDINALITY AS w (key, lock_id, place))";

/// Fails the message (22012) if counters were raised and not every key carries our id now, or a trigger
/// has put a counter back, whose number was granted before. `counter` has them as they were.
fn all_or_nothing() -> String {
    format!(
        "1 OPERATOR(pg_catalog./) (CASE WHEN EXISTS (SELECT 1 FROM f) AND (\
           (SELECT {COUNT} FROM u JOIN want AS w ON w.lock_id {EQ} u.lock_id AND w.key {EQ} u.key) {NE} (SELECT {COUNT} FROM want) \
           OR EXISTS (SELECT 1 FROM counter JOIN f ON f.fence_key {EQ} counter.fence_key WHERE counter.fence {GE} f.fence)) \
         THEN 0 ELSE 1 END)"
    )
}

fn raise(tables: &Tables, condition: &str) -> String {
    let fences = &tables.fences;
    let (column, value) = tables.key_debug("want.user_key");
    format!(
        "f AS (\
           INSERT INTO {fences} AS c (fence_key, fence{column}) SELECT want.fence_key, 1{value} FROM want {condition} \
           ORDER BY want.place \
           ON CONFLICT (fence_key) DO UPDATE SET fence = c.fence {PLUS} 1 \
             WHERE c.fence {GE} 0 AND c.fence {LT} {FENCE_MAX} RETURNING c.fence_key, c.fence)"
    )
}

/// Writes the rows with the numbers of `f`, at the time in `now`.
fn insert(tables: &Tables, now: &str, conflict: &str) -> String {
    let locks = &tables.locks;
    format!(
        "u AS (\
           INSERT INTO {locks} AS l (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key) \
           SELECT want.key, want.lock_id, {now}.now {PLUS} $5, {now}.now, \
             pg_catalog.lpad(f.fence::pg_catalog.text, 15, '0'), want.user_key \
           FROM {now} CROSS JOIN want JOIN f ON f.fence_key {EQ} want.fence_key ORDER BY want.place \
           ON CONFLICT (key) DO {conflict} \
           RETURNING l.key, l.lock_id, l.expires_at_ms, l.fence, {VERSION} AS version)"
    )
}

/// The several keys' [`acquire_absent`](crate::leases::sql): every step is that statement's, for all keys.
pub(super) fn absent(tables: &Tables, more: &str) -> String {
    let (locks, fences, check, busy) = (&tables.locks, &tables.fences, all_or_nothing(), busy());
    let free = "CROSS JOIN queue WHERE queue.free AND NOT EXISTS (SELECT 1 FROM look) \
        AND NOT EXISTS (SELECT 1 FROM counter WHERE counter.busy)";
    format!(
        "WITH {WANT}, \
         queue AS MATERIALIZED (\
           SELECT pg_catalog.bool_and(pg_catalog.pg_try_advisory_xact_lock(\
             pg_catalog.hashtext(want.key)::pg_catalog.int8)) AS free FROM want), \
         look AS MATERIALIZED (\
           SELECT want.place, l.expires_at_ms, l.fence, l.lock_id FROM want CROSS JOIN LATERAL (\
             SELECT l.expires_at_ms, l.fence, l.lock_id FROM {locks} AS l WHERE l.key {EQ} want.key LIMIT 1) AS l), \
         counter AS MATERIALIZED (\
           SELECT want.fence_key, x.fence, x.busy FROM want CROSS JOIN LATERAL (\
             SELECT x.fence, {busy} \
             FROM {fences} AS x WHERE x.fence_key {EQ} want.fence_key LIMIT 1) AS x), \
         {}, \
         g AS MATERIALIZED (\
           SELECT {CLOCK} AS now FROM (SELECT {COUNT} AS n FROM f) AS x WHERE x.n {EQ} (SELECT {COUNT} FROM want)), \
         {}{more} \
         SELECT want.place, u.expires_at_ms, u.fence, u.version, ({check})::pg_catalog.int8, {DURABLE} \
           FROM want LEFT JOIN u ON u.key {EQ} want.key WHERE EXISTS (SELECT 1 FROM f) \
         UNION ALL SELECT look.place, look.expires_at_ms, look.fence, look.lock_id, {CLOCK}, NULL FROM look",
        raise(tables, free),
        insert(tables, "g", "NOTHING")
    )
}

fn queue() -> String {
    format!(
        "SELECT FROM (SELECT pg_catalog.pg_advisory_xact_lock(n.number), {DURABLE} AS level FROM (\
           SELECT DISTINCT pg_catalog.hashtext(k.key)::pg_catalog.int8 AS number \
           FROM pg_catalog.unnest($1) AS k (key) ORDER BY 1 OFFSET 0) AS n OFFSET 0) AS q WHERE q.level {EQ} ''"
    )
}

/// The rows as they stand, and those that are over or ours, locked, unless a live one of another stands.
fn rows(tables: &Tables) -> String {
    let locks = &tables.locks;
    let alive = live("l.expires_at_ms", CLOCK);
    format!(
        "look AS MATERIALIZED (\
           SELECT want.place, l.expires_at_ms {MINUS} {CLOCK} AS rest_ms, l.fence, \
             l.lock_id {EQ} want.lock_id AS own, {alive} AS live \
           FROM want CROSS JOIN LATERAL (\
             SELECT l.expires_at_ms, l.fence, l.lock_id FROM {locks} AS l WHERE l.key {EQ} want.key LIMIT 1) AS l), \
         cur AS MATERIALIZED (\
           SELECT want.place, c.lock_id {EQ} want.lock_id AS own FROM want CROSS JOIN LATERAL (\
             SELECT l.lock_id FROM {locks} AS l \
             WHERE l.key {EQ} want.key AND (l.lock_id {EQ} want.lock_id OR NOT {alive}) FOR UPDATE OF l) AS c \
           WHERE NOT EXISTS (SELECT 1 FROM look WHERE look.live AND NOT look.own))"
    )
}

fn hold(tables: &Tables) -> String {
    format!("WITH {WANT_IDS}, {} SELECT {COUNT} FROM cur", rows(tables))
}

/// The several keys' careful [`acquire`](crate::leases::sql).
pub(super) fn grant(tables: &Tables, more: &str) -> String {
    let (fences, check) = (&tables.fences, all_or_nothing());
    format!(
        "WITH {WANT}, {}, \
         free AS MATERIALIZED (\
           SELECT 1 WHERE (SELECT {COUNT} FROM cur) {EQ} (SELECT {COUNT} FROM look) \
             AND NOT EXISTS (SELECT 1 FROM cur WHERE cur.own)), \
         counter AS MATERIALIZED (\
           SELECT want.place, want.fence_key, c.fence FROM want CROSS JOIN LATERAL (\
             SELECT c.fence FROM {fences} AS c WHERE c.fence_key {EQ} want.fence_key FOR NO KEY UPDATE OF c SKIP LOCKED) AS c \
           WHERE EXISTS (SELECT 1 FROM free)), \
         ok AS MATERIALIZED (\
           SELECT {CLOCK} AS now FROM (SELECT {COUNT} AS n FROM counter) AS held WHERE EXISTS (SELECT 1 FROM free) \
             AND held.n {EQ} (SELECT {COUNT} FROM want CROSS JOIN LATERAL (\
               SELECT 1 FROM {fences} AS c WHERE c.fence_key {EQ} want.fence_key LIMIT 1) AS c)), \
         {}, {}{more} \
         SELECT want.place, u.expires_at_ms, u.fence, u.version, \
           {check}, \
           look.rest_ms, look.fence, look.live, look.own, (SELECT {COUNT} FROM cur WHERE cur.own), \
           (SELECT {COUNT} FROM ok), EXISTS (SELECT 1 FROM counter WHERE counter.place {EQ} want.place) \
             OR NOT EXISTS (SELECT 1 FROM {fences} AS c WHERE c.fence_key {EQ} want.fence_key) \
         FROM want LEFT JOIN u ON u.key {EQ} want.key LEFT JOIN look ON look.place {EQ} want.place ORDER BY want.place",
        rows(tables),
        raise(tables, "CROSS JOIN ok"),
        insert(tables, "ok", &upsert())
    )
}

fn confirm(tables: &Tables) -> String {
    let (locks, alive) = (&tables.locks, live("cur.expires_at_ms", "t.now"));
    format!(
        "WITH {WANT_IDS}, \
         cur AS MATERIALIZED (\
           SELECT want.place, want.key, want.lock_id, c.expires_at_ms FROM want CROSS JOIN LATERAL (\
             SELECT l.expires_at_ms FROM {locks} AS l \
             WHERE l.key {EQ} want.key AND l.lock_id {EQ} want.lock_id FOR UPDATE OF l) AS c), \
         t AS MATERIALIZED (\
           SELECT {CLOCK} AS now FROM (SELECT {COUNT} AS n FROM cur) AS a WHERE a.n {GE} 0::pg_catalog.int8), \
         u AS (\
           UPDATE {locks} AS l SET lock_id = l.lock_id FROM cur, t \
           WHERE l.key {EQ} cur.key AND l.lock_id {EQ} cur.lock_id AND {alive} \
           RETURNING cur.place, l.expires_at_ms, l.fence, {VERSION} AS version) \
         SELECT u.place, u.expires_at_ms, u.fence, u.version FROM u ORDER BY u.place"
    )
}

pub(super) fn release(tables: &Tables, notifies: bool, more: &str) -> String {
    let (locks, alive) = (&tables.locks, live("cur.expires_at_ms", "t.now"));
    let notification = notification(notifies);
    format!(
        "WITH cur AS MATERIALIZED (\
           SELECT want.place, want.lock_id, c.key, c.expires_at_ms \
           FROM pg_catalog.unnest($1) WITH ORDINALITY AS want (lock_id, place) CROSS JOIN LATERAL (\
             SELECT l.key, l.expires_at_ms FROM {locks} AS l WHERE l.lock_id {EQ} want.lock_id FOR UPDATE OF l) AS c), \
         t AS MATERIALIZED (\
           SELECT {CLOCK} AS now FROM (SELECT {COUNT} AS n FROM cur) AS a WHERE a.n {GE} 0::pg_catalog.int8), \
         d AS (\
           DELETE FROM {locks} AS l USING cur, t \
           WHERE l.key {EQ} cur.key AND l.lock_id {EQ} cur.lock_id AND {alive} RETURNING cur.place{notification}){more} \
         SELECT cur.place, {alive}, EXISTS (SELECT 1 FROM d WHERE d.place {EQ} cur.place), {RELAXED} \
         FROM cur CROSS JOIN t"
    )
}

/// One lease whose fence a caller's transaction checks.
pub(crate) struct Fenced<'a> {
    pub(crate) key: String,
    pub(crate) fence_key: String,
    pub(crate) fence: Fence,
    pub(crate) lock_id: &'a str,
}

/// The several keys' [`fenced`](crate::leases::sql::fenced): fails in the server unless each lease is
/// live and its fence the newest. The lock ids are well formed.
pub(crate) fn fenced(tables: &Tables, leases: &[Fenced<'_>]) -> Result<String> {
    let (locks, fences, all) = (&tables.locks, &tables.fences, leases.len());
    let mut values = Vec::with_capacity(all);
    for (place, lease) in leases.iter().enumerate() {
        let (mut key, mut fence_key) = (String::new(), String::new());
        push_quoted(&lease.key, &mut key)?;
        push_quoted(&lease.fence_key, &mut fence_key)?;
        let (number, fence, id) = (lease.fence.get(), lease.fence, lease.lock_id);
        values.push(format!("({place}, {key}, {fence_key}, {number}::pg_catalog.int8, '{fence}', '{id}')"));
    }
    let values = values.join(", ");
    let alive = live("l.expires_at_ms", "t.now");
    Ok(format!(
        "WITH want (place, key, fence_key, number, fence, lock_id) AS MATERIALIZED (VALUES {values}), \
         counter AS MATERIALIZED (\
           SELECT c.fence {EQ} want.number AS newest FROM (SELECT * FROM want ORDER BY want.place OFFSET 0) AS want \
           CROSS JOIN LATERAL (\
             SELECT c.fence FROM {fences} AS c WHERE c.fence_key {EQ} want.fence_key FOR SHARE OF c) AS c), \
         t AS MATERIALIZED (\
           SELECT {CLOCK} AS now FROM (SELECT {COUNT} AS n FROM counter WHERE newest) AS x WHERE x.n {EQ} {all}) \
         SELECT (CASE WHEN (\
           SELECT {COUNT} FROM want CROSS JOIN t CROSS JOIN LATERAL (\
             SELECT 1 FROM {locks} AS l WHERE l.key {EQ} want.key AND l.fence {EQ} want.fence \
               AND l.lock_id {EQ} want.lock_id AND {alive} LIMIT 1) AS l) {EQ} {all} \
         THEN '1' ELSE '{STALE}' END)::pg_catalog.int4"
    ))
}
