//! The SQL of runs, which happen once per slot. Why the lease's part of it is as it is: see
//! [`sql`](crate::leases::sql).
//!
//! A *mark* is a counter with the number of the last slot that is done. It only grows.

use crate::error::Result;
use crate::leases::fragments::{CLOCK, DURABLE, RELAXED, VERSION, live};
use crate::leases::held::notification;
use crate::leases::schema::Tables;
use crate::leases::sql::{acquire_parts, all_or_nothing};
use crate::pg::names::{COUNT, EQ, GE, GT, INT, LE, LT, MINUS, MOD, TEXT};
use crate::pg::statement::{Statement, push_quoted};

/// The statements for one pair of tables, made with the first run.
pub(crate) struct RunStatements {
    /// `(storage key, fence key, user key, lock id, ttl ms, mark's key, period ms or 0, number)`: grants the lease
    /// unless the slot is done. Answers (expiry, fence, version, …, all was well, row of ours found, clock of the
    /// grant, mark, clock of the look at the mark).
    pub(crate) begin: Statement,
    /// `(lock id, mark's key, period ms or 0, number)`: fails the message if the slot of this lease is done.
    pub(crate) again: Statement,
    /// `(storage key, lock id)`: writes a granted row back as it is. Answers (expiry, fence, version, clock of the
    /// grant).
    pub(crate) confirm: Statement,
    /// `(lock id, fence, mark's key, slot, user key)`: answers (leases found, slots marked, leases found live, mark).
    pub(crate) claim: Statement,
    /// The same, and ends the lease.
    pub(crate) finish: Statement,
    /// `(lock id, fence, mark's key, slot)`: ends the lease if the slot is done. Answers (leases found, leases
    /// ended, marks found).
    pub(crate) verify: Statement,
}

impl RunStatements {
    pub(crate) fn new(tables: &Tables, notifies: bool) -> Self {
        let locks = &tables.locks;
        let alive = live("l.expires_at_ms", CLOCK);
        let confirm = format!(
            "UPDATE {locks} AS l SET lock_id = l.lock_id WHERE l.key {EQ} $1 AND l.lock_id {EQ} $2 AND {alive} \
             RETURNING l.expires_at_ms, l.fence, {VERSION}, l.acquired_at_ms, {DURABLE}"
        );
        Self {
            begin: Statement::new(
                "begin_run",
                &[TEXT, TEXT, TEXT, TEXT, INT, TEXT, INT, INT],
                begin(tables, ""),
            ),
            again: Statement::new("mark_again", &[TEXT, TEXT, INT, INT], again(tables)),
            confirm: Statement::new("confirm_run", &[TEXT, TEXT], confirm),
            claim: Statement::new("claim_run", &MARKED, claim(tables)),
            finish: finish(tables, notifies, ""),
            verify: verify(tables, notifies, ""),
        }
    }

    pub(crate) fn all(&self) -> [&Statement; 6] {
        [&self.begin, &self.again, &self.confirm, &self.claim, &self.finish, &self.verify]
    }
}

/// The types of a labelled begin's arguments.
pub(super) const RUN: [&str; 10] = [TEXT, TEXT, TEXT, TEXT, INT, TEXT, INT, INT, TEXT, TEXT];

const MARKED: [&str; 5] = [TEXT, TEXT, TEXT, INT, TEXT];

/// The slot at `now`, of `(period ms or 0, number)`. Spelled-out operators all have one precedence.
fn slot_at(now: &str, (period, number): (&str, &str)) -> String {
    format!(
        "(CASE WHEN {period} {GT} 0::pg_catalog.int8 THEN {now} {MINUS} ({now} {MOD} {period}) ELSE {number} END)"
    )
}

/// The grant of [`acquire`](crate::leases::sql) where the slot is not done. The slot is that of the grant's
/// clock, which is read after the waits; until then a mark may have come that this snapshot does not see:
/// [`again`] looks with the next one.
pub(super) fn begin(tables: &Tables, more: &str) -> String {
    let fences = &tables.fences;
    let slot = slot_at("mark.now", ("$7", "$8"));
    let parts = acquire_parts(tables, " AND EXISTS (SELECT 1 FROM todo)");
    format!(
        "WITH mark AS MATERIALIZED (\
           SELECT pg_catalog.max(m.fence) AS n, {CLOCK} AS now FROM {fences} AS m WHERE m.fence_key {EQ} $6), \
         todo AS MATERIALIZED (SELECT 1 FROM mark WHERE COALESCE(mark.n, -1::pg_catalog.int8) {LT} {slot}), \
         {parts}{more} \
         SELECT (SELECT u.expires_at_ms FROM u), (SELECT u.fence FROM u), (SELECT u.version FROM u), {}, \
           (SELECT {COUNT} FROM ok), (SELECT {COUNT} FROM cur WHERE cur.lock_id {EQ} $4), \
           (SELECT ok.now FROM ok), mark.n, mark.now FROM mark",
        all_or_nothing(tables)
    )
}

/// The second look at the mark, in a snapshot of its own: fails (22012) if the slot is done by now.
fn again(tables: &Tables) -> String {
    let (locks, fences) = (&tables.locks, &tables.fences);
    let slot = slot_at("l.acquired_at_ms", ("$3", "$4"));
    format!(
        "SELECT 1 OPERATOR(pg_catalog./) (CASE WHEN m.fence {GE} {slot} THEN 0 ELSE 1 END) \
         FROM {locks} AS l JOIN {fences} AS m ON m.fence_key {EQ} $2 WHERE l.lock_id {EQ} $1"
    )
}

/// The row of a run's lease, locked, and the clock after that. The fence is compared: a late copy of a begin
/// may have been granted again under the same id, in a later slot.
fn own_row(tables: &Tables) -> String {
    let locks = &tables.locks;
    format!(
        "cur AS MATERIALIZED (\
           SELECT l.key, l.expires_at_ms FROM {locks} AS l WHERE l.lock_id {EQ} $1 AND l.fence {EQ} $2 FOR UPDATE), \
         t AS MATERIALIZED (\
           SELECT {CLOCK} AS now FROM (SELECT {COUNT} AS n FROM cur) AS a WHERE a.n {GE} 0::pg_catalog.int8)"
    )
}

/// Writes the mark where the lease lives, and over what is `older` than it.
fn mark(tables: &Tables, older: &str) -> String {
    let fences = &tables.fences;
    let (column, value) = tables.key_debug("$5");
    let alive = live("cur.expires_at_ms", "t.now");
    format!(
        "d AS (\
           INSERT INTO {fences} AS c (fence_key, fence{column}) SELECT $3, $4{value} FROM cur, t WHERE {alive} \
           ON CONFLICT (fence_key) DO UPDATE SET fence = EXCLUDED.fence WHERE c.fence {older} EXCLUDED.fence \
           RETURNING c.fence)"
    )
}

/// How many marks were written as they were to be: a trigger may have put the old one back.
fn written() -> String {
    format!("(SELECT {COUNT} FROM d WHERE d.fence {EQ} $4)")
}

/// Claiming again is as good: the answer to the first claim may have been lost.
fn claim(tables: &Tables) -> String {
    let alive = live("cur.expires_at_ms", "t.now");
    format!(
        "WITH {}, {} SELECT (SELECT {COUNT} FROM cur), {}, (SELECT {COUNT} FROM cur, t WHERE {alive}), \
           (SELECT m.fence FROM {} AS m WHERE m.fence_key {EQ} $3), {DURABLE}",
        own_row(tables),
        mark(tables, LE),
        written(),
        tables.fences
    )
}

/// Marks the slot and deletes the lease's row, or fails (22012) if it can only do one of the two.
pub(super) fn finish(tables: &Tables, notifies: bool, more: &str) -> Statement {
    let (locks, notification) = (&tables.locks, notification(notifies));
    let (alive, written) = (live("cur.expires_at_ms", "t.now"), written());
    let text = format!(
        "WITH {}, {}, r AS (\
           DELETE FROM {locks} AS l USING cur, d WHERE l.key {EQ} cur.key AND l.lock_id {EQ} $1 RETURNING 1{notification}){more} \
         SELECT (SELECT {COUNT} FROM cur), {written}, (SELECT {COUNT} FROM cur, t WHERE {alive}), \
           (SELECT m.fence FROM {} AS m WHERE m.fence_key {EQ} $3), {DURABLE}, \
           1 OPERATOR(pg_catalog./) (CASE WHEN {written} {EQ} (SELECT {COUNT} FROM r) THEN 1 ELSE 0 END)",
        own_row(tables),
        mark(tables, LT),
        tables.fences
    );
    Statement::new("finish_run", &MARKED, text)
}

/// Deletes the lease's row only where the mark is there: a row that goes without it, and a call that is then
/// asked again, would take the next run's mark for this one's.
pub(super) fn verify(tables: &Tables, notifies: bool, more: &str) -> Statement {
    let (locks, fences, notification) = (&tables.locks, &tables.fences, notification(notifies));
    let text = format!(
        "WITH mark AS MATERIALIZED (\
           SELECT 1 FROM {fences} AS m WHERE m.fence_key {EQ} $3 AND m.fence {GE} $4), \
         cur AS MATERIALIZED (SELECT 1 FROM {locks} AS l WHERE l.lock_id {EQ} $1 AND l.fence {EQ} $2), \
         r AS (\
           DELETE FROM {locks} AS l WHERE l.lock_id {EQ} $1 AND l.fence {EQ} $2 AND EXISTS (SELECT 1 FROM mark) \
           RETURNING 1{notification}){more} \
         SELECT (SELECT {COUNT} FROM cur), (SELECT {COUNT} FROM r), (SELECT {COUNT} FROM mark), {RELAXED}"
    );
    Statement::new("verify_run", &[TEXT, TEXT, TEXT, INT], text)
}

/// What a slot raises that is done already, as the value that is not a number (22P02).
pub(crate) const DONE: &str = "syncguard: this slot is done already; this transaction cannot commit";

/// Marks a slot in the caller's transaction, after the fence check, or fails it. The commit is made durable:
/// whoever is told "done" finds the mark also after a crash.
pub(super) fn complete(tables: &Tables, (mark, user_key): (&str, &str), slot: u64) -> Result<String> {
    let (mut m, mut k) = (String::new(), String::new());
    push_quoted(mark, &mut m)?;
    push_quoted(user_key, &mut k)?;
    let fences = &tables.fences;
    let (column, value) = tables.key_debug(&k);
    Ok(format!(
        "WITH d AS (\
           INSERT INTO {fences} AS c (fence_key, fence{column}) VALUES ({m}, {slot}{value}) \
           ON CONFLICT (fence_key) DO UPDATE SET fence = EXCLUDED.fence WHERE c.fence {LT} EXCLUDED.fence \
           RETURNING c.fence) \
         SELECT (CASE WHEN EXISTS (SELECT 1 FROM d WHERE d.fence {EQ} {slot}) THEN '1' ELSE '{DONE}' END)::pg_catalog.int4, \
           {DURABLE}"
    ))
}
