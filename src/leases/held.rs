//! The SQL of what is done to a lease that stands: release, extend, renew.

use crate::leases::fragments::{CLOCK, DURABLE, RELAXED, VERSION, live};
use crate::leases::notify::notify_waiters;
use crate::leases::schema::Tables;
use crate::model::time::TIME_TOLERANCE_MS;
use crate::pg::names::{COUNT, EQ, GE, MINUS, PLUS};

/// A lease's row, locked, and the clock after that.
fn locked_row(tables: &Tables) -> String {
    let locks = &tables.locks;
    format!(
        "cur AS MATERIALIZED (\
           SELECT l.key, l.expires_at_ms, l.fence, {VERSION} AS version FROM {locks} AS l \
           WHERE l.lock_id {EQ} $1 FOR UPDATE), \
         t AS MATERIALIZED (\
           SELECT {CLOCK} AS now FROM (SELECT {COUNT} AS n FROM cur) AS a WHERE a.n {GE} 0::pg_catalog.int8)"
    )
}

/// Deletes a lease, or says why not; then comes `more`.
pub(super) fn release(tables: &Tables, more: &str) -> String {
    let (locks, alive) = (&tables.locks, live("cur.expires_at_ms", "t.now"));
    format!(
        "WITH {}, d AS (\
           DELETE FROM {locks} AS l USING cur, t \
           WHERE l.key {EQ} cur.key AND l.lock_id {EQ} $1 AND {alive} RETURNING 1){more} \
         SELECT (SELECT {COUNT} FROM cur), (SELECT {COUNT} FROM d), {RELAXED}, \
           (SELECT {COUNT} FROM cur, t WHERE {alive})",
        locked_row(tables)
    )
}

/// The end of a live lease, which is what nearly every release finds, at half of the price of
/// [`release`]. The row is judged when it is found, and once more when it is deleted: a wait for
/// somebody's lock lies between the two, and if the lease was over by then, the message fails
/// (22012) and changes nothing. The key says whether it was a permit.
pub(super) fn release_live(tables: &Tables, notification: &str) -> String {
    let (locks, alive) = (&tables.locks, live("l.expires_at_ms", CLOCK));
    format!(
        "DELETE FROM {locks} AS l WHERE l.lock_id {EQ} $1 AND {alive} \
         RETURNING 1 OPERATOR(pg_catalog./) (CASE WHEN {alive} THEN 1 ELSE 0 END) AS judged, {RELAXED} AS relaxed, l.key{notification}"
    )
}

/// The notification of the deleted row's waiters as one more column, or nothing.
pub(super) fn notification(notifies: bool) -> String {
    if notifies { format!(", {}", notify_waiters("l.key")) } else { String::new() }
}

/// Where an extend moves a lease's end to: only one that names the version that it replaces may shorten
/// it. So a copy that comes late, after anything newer, does no harm.
pub(super) fn new_end((version, replaced): (&str, &str), end: &str, asked: &str) -> String {
    format!("CASE WHEN {version} {EQ} {replaced} THEN {asked} ELSE GREATEST({end}, {asked}) END")
}

/// One lease. With a fence that is not the row's, nothing is changed. It writes even where the end stays
/// as it is: what is answered needs a version of its own.
pub(super) fn extend(tables: &Tables) -> String {
    let (locks, alive) = (&tables.locks, live("cur.expires_at_ms", "t.now"));
    let end = new_end(("cur.version", "$4"), "cur.expires_at_ms", &format!("t.now {PLUS} $2"));
    format!(
        "WITH {}, u AS (\
           UPDATE {locks} AS l SET expires_at_ms = {end} FROM cur, t \
           WHERE l.key {EQ} cur.key AND l.lock_id {EQ} $1 AND ($3 {EQ} '' OR l.fence {EQ} $3) AND {alive} \
           RETURNING l.expires_at_ms, {VERSION} AS version) \
         SELECT u.expires_at_ms, u.version, t.now {PLUS} $2, \
           cur.expires_at_ms {PLUS} {TIME_TOLERANCE_MS}::pg_catalog.int8 {MINUS} t.now, cur.fence, {DURABLE} \
         FROM t LEFT JOIN cur ON true LEFT JOIN u ON true",
        locked_row(tables)
    )
}

/// Many leases at once. A busy row is skipped: it cannot hold the others up, and two batches cannot
/// deadlock. Answers per lease: its place, the new expiry, whether its row was locked, id and fence of
/// that row, or of the key's where there is none, and the new version. Nothing for one that was live and
/// does not end as late as it was to (a trigger may put the old row back): its change was swallowed.
///
/// Every step reads the one before it once and looks rows up by an index: nothing is joined to
/// another list of the batch. The planner takes an array for ten elements, and a join of two such
/// lists for cheap, however it is done: five hundred leases took it ten times as long.
pub(super) fn renew(tables: &Tables) -> String {
    let (locks, alive) = (&tables.locks, live("cur.expires_at_ms", "t.now"));
    let end = new_end(("cur.version", "cur.replaced"), "cur.expires_at_ms", &format!("t.now {PLUS} cur.ttl"));
    format!(
        "WITH cur AS MATERIALIZED (\
           SELECT want.place, want.key AS wanted, want.lock_id, want.ttl, want.replaced, c.key, c.expires_at_ms, \
             c.version, c.fence, c.fence {EQ} want.fence AS mine \
           FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3), \
             pg_catalog.unnest($4), pg_catalog.unnest($5)) \
             WITH ORDINALITY AS want (key, lock_id, ttl, fence, replaced, place) \
           LEFT JOIN LATERAL (\
             SELECT l.key, l.expires_at_ms, l.fence, {VERSION} AS version FROM {locks} AS l \
             WHERE l.lock_id {EQ} want.lock_id FOR UPDATE OF l SKIP LOCKED) AS c ON true), \
         t AS MATERIALIZED (\
           SELECT {CLOCK} AS now FROM (SELECT {COUNT} AS n FROM cur) AS a WHERE a.n {GE} 0::pg_catalog.int8), \
         u AS (\
           UPDATE {locks} AS l SET expires_at_ms = {end} FROM cur, t \
           WHERE l.key {EQ} cur.key AND l.lock_id {EQ} cur.lock_id AND cur.mine AND {alive} \
           RETURNING cur.place, l.expires_at_ms, {VERSION} AS version, t.now {PLUS} cur.ttl AS asked) \
         SELECT u.place, u.expires_at_ms, true, NULL::pg_catalog.text, NULL::pg_catalog.text, u.version FROM u \
           WHERE u.expires_at_ms {GE} u.asked \
         UNION ALL \
         SELECT cur.place, NULL, cur.key IS NOT NULL, CASE WHEN cur.key IS NULL THEN l.lock_id ELSE cur.lock_id END, \
           COALESCE(cur.fence, l.fence), NULL FROM cur CROSS JOIN t \
           LEFT JOIN {locks} AS l ON l.key {EQ} cur.wanted WHERE cur.key IS NULL OR NOT cur.mine OR NOT {alive}"
    )
}
