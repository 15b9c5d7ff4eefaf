//! The prepared statements of the lease protocol. A rare query stands beside its caller.
//!
//! Names are always quoted and qualified, and so are functions, types and operators ([`names`](crate::pg::names)).
//!
//! Why the statements look as they do:
//!
//! 1. The clock is read **after** the locks are held: `now()` stands still from the start of the
//!    transaction, `clock_timestamp()` does not
//!    (<https://www.postgresql.org/docs/current/functions-datetime.html#FUNCTIONS-DATETIME-CURRENT>).
//!    Where lock and clock are in one statement, the clock is computed *from* the count of locked rows.
//! 2. Decisions are taken on the row that `FOR UPDATE` returned, the newest version
//!    (<https://www.postgresql.org/docs/current/transaction-iso.html#XACT-READ-COMMITTED>), and the
//!    upsert repeats the condition.
//! 3. A contender looks plainly first and locks only a row that seems expired, so that it never
//!    stands in the way of the holder's extend.
//! 4. The counter is taken with `SKIP LOCKED`: a fenced transaction that holds it is contention, not
//!    something to wait for.
//! 5. What happens nearly always has a statement of its own that does nothing else: [`acquire_absent`]
//!    where no row stands for the key, [`release_live`] where the lease is live. Both change nothing in
//!    every other case, and the careful statement decides then.
//! 6. A release notifies waiters in other processes, if there are any, in the statement that deletes the
//!    row; the careful release does not, and so decides also where notifying fails.

use crate::error::Result;
use crate::leases::fragments::{CLOCK, DURABLE, VERSION, busy, live};
use crate::leases::held::{extend, new_end, notification, release, release_live, renew};
use crate::leases::schema::Tables;
use crate::model::fence::{FENCE_MAX, Fence};
use crate::model::lock_id::LockId;
use crate::pg::names::{COUNT, EQ, GE, INT, INTS, LT, NE, PLUS, TEXT, TEXTS};
use crate::pg::statement::{Statement, push_quoted};

/// The statements for one pair of tables.
pub(crate) struct Statements {
    /// `(storage key)`: queues contenders of one key, closes the race on an absent row, and sees to
    /// a durable commit.
    pub(crate) queue: Statement,
    /// `(storage key, fence key, lock id)`: locks what seems free. Answers (row locked, counter locked).
    pub(crate) hold: Statement,
    /// `(storage key, fence key)`: row, counter and clock, in a snapshot after the locks.
    pub(crate) view: Statement,
    /// `(storage key, fence key, user key, lock id, ttl ms)`: the grant. Answers (expiry, fence, version).
    pub(crate) grant: Statement,
    /// `(storage key, lock id)`: writes a granted row back as it is. Answers (expiry, fence, version).
    pub(crate) confirm: Statement,
    /// `(storage key, fence key, user key, lock id, ttl ms)`: all of the above at once but the queue.
    pub(crate) acquire: Statement,
    /// The same arguments: queue and grant if nobody queues and no row stands for the key. Answers
    /// (expiry, fence, version, 1), or the row that stands (expiry, lock id, NULL, clock), or nothing.
    pub(crate) acquire_absent: Statement,
    /// `(lock id)`: queues for the key of the lease with this id, if there is one.
    pub(crate) queue_for: Statement,
    /// `(lock id)`: locks a lease's row. Answers (key, lock id, expiry).
    pub(crate) find: Statement,
    /// `()`: the clock.
    pub(crate) clock: Statement,
    /// `(storage key, lock id)`
    pub(crate) delete: Statement,
    /// `(storage key, lock id, ttl ms, version)`: answers (expiry, version, the end that was asked for).
    pub(crate) update: Statement,
    /// `(lock id)`: answers (found, deleted, …, found live).
    pub(crate) release: Statement,
    /// `(lock id)`: deletes a live lease. Answers a row if it did.
    pub(crate) release_live: Statement,
    /// `(lock id, ttl ms, fence, version)`, the last two empty where they are not known. Answers
    /// (expiry, version, the end that was asked for, how long the row was live without it, its fence).
    pub(crate) extend: Statement,
    /// `(storage keys, lock ids, ttls, fences, versions)`
    pub(crate) renew: Statement,
    /// `(storage key)`: answers (expiry, clock).
    pub(crate) look: Statement,
    /// `(storage key)`: the whole row and the clock.
    pub(crate) by_key: Statement,
    /// `(lock id)`: the whole row and the clock.
    pub(crate) by_id: Statement,
    /// `()`: sees to a durable commit.
    pub(crate) durable: Statement,
}

impl Statements {
    /// `notifies`: whether a release notifies waiters.
    pub(crate) fn new(tables: &Tables, notifies: bool) -> Self {
        let notification = notification(notifies);
        let locks = &tables.locks;
        let row = format!(
            "SELECT l.user_key, l.lock_id, l.expires_at_ms, l.acquired_at_ms, l.fence, {CLOCK} FROM {locks} AS l"
        );
        Self {
            queue: Statement::new(
                "queue",
                &[TEXT],
                // Without columns and without rows, which nobody would read.
                format!(
                    "SELECT FROM (SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext($1)::pg_catalog.int8), \
                     {DURABLE} AS level OFFSET 0) AS q WHERE q.level {EQ} ''"
                ),
            ),
            hold: Statement::new(
                "hold",
                &[TEXT, TEXT, TEXT],
                format!(
                    "WITH {} SELECT (SELECT {COUNT} FROM cur), (SELECT {COUNT} FROM counter)",
                    take(tables)
                ),
            ),
            view: Statement::new("view", &[TEXT, TEXT], view(tables)),
            grant: Statement::new("grant", &[TEXT, TEXT, TEXT, TEXT, INT], grant(tables, "")),
            confirm: Statement::new(
                "confirm",
                &[TEXT, TEXT],
                format!(
                    "UPDATE {locks} AS l SET lock_id = l.lock_id WHERE l.key {EQ} $1 AND l.lock_id {EQ} $2 \
                     RETURNING l.expires_at_ms, l.fence, {VERSION}"
                ),
            ),
            acquire: Statement::new(
                "acquire",
                &[TEXT, TEXT, TEXT, TEXT, INT],
                acquire(tables, Where::ANYWHERE),
            ),
            acquire_absent: Statement::new(
                "acquire_absent",
                &[TEXT, TEXT, TEXT, TEXT, INT],
                acquire_absent(tables, Where::ANYWHERE),
            ),
            queue_for: Statement::new(
                "queue_for",
                &[TEXT],
                format!(
                    "SELECT FROM (SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext(l.key)::pg_catalog.int8) \
                     FROM {locks} AS l WHERE l.lock_id {EQ} $1 OFFSET 0) AS q"
                ),
            ),
            find: Statement::new(
                "find",
                &[TEXT],
                format!(
                    "SELECT l.key, l.lock_id, l.expires_at_ms FROM {locks} AS l WHERE l.lock_id {EQ} $1 FOR UPDATE"
                ),
            ),
            clock: Statement::new("clock", &[], format!("SELECT {CLOCK}")),
            delete: Statement::new(
                "delete",
                &[TEXT, TEXT],
                format!(
                    "DELETE FROM {locks} AS l WHERE l.key {EQ} $1 AND l.lock_id {EQ} $2 RETURNING l.lock_id{notification}"
                ),
            ),
            update: Statement::new(
                "update",
                &[TEXT, TEXT, INT, TEXT],
                format!(
                    "UPDATE {locks} AS l SET expires_at_ms = {} FROM (SELECT {CLOCK} {PLUS} $3 AS asked OFFSET 0) AS t \
                     WHERE l.key {EQ} $1 AND l.lock_id {EQ} $2 RETURNING l.expires_at_ms, {VERSION}, t.asked",
                    new_end((VERSION, "$4"), "l.expires_at_ms", "t.asked")
                ),
            ),
            release: Statement::new("release", &[TEXT], release(tables, "")),
            release_live: Statement::new("release_live", &[TEXT], release_live(tables, &notification)),
            extend: Statement::new("extend", &[TEXT, INT, TEXT, TEXT], extend(tables)),
            renew: Statement::new("renew", &[TEXTS, TEXTS, INTS, TEXTS, TEXTS], renew(tables)),
            look: Statement::new(
                "look",
                &[TEXT],
                format!("SELECT l.expires_at_ms, {CLOCK} FROM {locks} AS l WHERE l.key {EQ} $1"),
            ),
            by_key: Statement::new("by_key", &[TEXT], format!("{row} WHERE l.key {EQ} $1")),
            by_id: Statement::new("by_id", &[TEXT], format!("{row} WHERE l.lock_id {EQ} $1")),
            durable: Statement::new("durable", &[], format!("SELECT {DURABLE}")),
        }
    }

    /// All of them: a connection prepares them together, in one round trip.
    pub(crate) fn all(&self) -> [&Statement; 20] {
        [
            &self.queue,
            &self.hold,
            &self.view,
            &self.grant,
            &self.confirm,
            &self.acquire,
            &self.acquire_absent,
            &self.queue_for,
            &self.find,
            &self.clock,
            &self.delete,
            &self.update,
            &self.release,
            &self.release_live,
            &self.extend,
            &self.renew,
            &self.look,
            &self.by_key,
            &self.by_id,
            &self.durable,
        ]
    }
}

/// The statement that fails in the server unless `fence` is the key's newest and its lease is live.
///
/// `FOR SHARE`, not `FOR KEY SHARE`, which would let the counter be raised
/// (<https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS>): as long as the
/// caller's transaction is open, no newer holder can be granted. With a lock id the row must carry
/// it, too: the same key may have the same number in another database.
pub(crate) fn fenced(
    tables: &Tables,
    key: &str,
    fence_key: &str,
    fence: Fence,
    lock_id: Option<&LockId>,
) -> Result<String> {
    let (mut k, mut f) = (String::new(), String::new());
    push_quoted(key, &mut k)?;
    push_quoted(fence_key, &mut f)?;
    let own = lock_id.map_or_else(String::new, |id| format!(" AND l.lock_id {EQ} '{}'", id.as_str()));
    let (locks, fences, number) = (&tables.locks, &tables.fences, fence.get());
    let alive = live("l.expires_at_ms", "t.now");
    Ok(format!(
        "WITH counter AS MATERIALIZED (\
           SELECT c.fence FROM {fences} AS c WHERE c.fence_key {EQ} {f} FOR SHARE OF c), \
         t AS MATERIALIZED (\
           SELECT {CLOCK} AS now FROM (SELECT {COUNT} AS n FROM counter) AS x WHERE x.n {EQ} 1) \
         SELECT (CASE WHEN EXISTS (SELECT 1 FROM counter WHERE fence {EQ} {number}) AND EXISTS (\
           SELECT 1 FROM {locks} AS l, t WHERE l.key {EQ} {k} \
             AND l.fence {EQ} '{fence}'{own} AND {alive}) \
         THEN '1' ELSE '{STALE}' END)::pg_catalog.int4"
    ))
}

/// What a stale fence raises, as the value that is not a number (22P02).
pub(crate) const STALE: &str =
    "syncguard: the lease is over or a newer holder exists; this transaction cannot commit";

/// Looks at the key `$1`, and locks its row and its counter `$2` if it seems free or is ours, `$3`.
fn take(tables: &Tables) -> String {
    let (locks, fences) = (&tables.locks, &tables.fences);
    let alive = live("l.expires_at_ms", CLOCK);
    format!(
        "look AS MATERIALIZED (\
           SELECT 1 FROM {locks} AS l WHERE l.key {EQ} $1 AND l.lock_id {NE} $3 AND {alive}), \
         cur AS MATERIALIZED (\
           SELECT l.lock_id, l.expires_at_ms FROM {locks} AS l \
           WHERE l.key {EQ} $1 AND NOT EXISTS (SELECT 1 FROM look) FOR UPDATE OF l), \
         counter AS MATERIALIZED (\
           SELECT c.fence FROM {fences} AS c \
           WHERE c.fence_key {EQ} $2 AND NOT EXISTS (SELECT 1 FROM look) \
             AND (SELECT {COUNT} FROM cur) {GE} 0::pg_catalog.int8 FOR NO KEY UPDATE OF c SKIP LOCKED)"
    )
}

fn view(tables: &Tables) -> String {
    let (locks, fences) = (&tables.locks, &tables.fences);
    format!(
        "SELECT l.lock_id, l.expires_at_ms, c.fence, {CLOCK} FROM (SELECT 1) AS one \
         LEFT JOIN {locks} AS l ON l.key {EQ} $1 LEFT JOIN {fences} AS c ON c.fence_key {EQ} $2"
    )
}

/// Raises the counter `$2` where `condition` has a row, and if it may be raised: neither beyond the
/// limit, nor from a number that nobody can have counted to. Answers the new number and, after it, `more`.
pub(super) fn raise(tables: &Tables, condition: &str, more: &str) -> String {
    let fences = &tables.fences;
    let (column, value) = tables.key_debug("$3");
    format!(
        "f AS (\
           INSERT INTO {fences} AS c (fence_key, fence{column}) SELECT $2, 1{value} {condition} \
           ON CONFLICT (fence_key) DO UPDATE SET fence = c.fence {PLUS} 1 \
             WHERE c.fence {GE} 0 AND c.fence {LT} {FENCE_MAX} RETURNING c.fence{more})"
    )
}

/// Writes the row of `(storage key, fence key, user key, lock id, ttl ms)` with the number and the
/// time that `fence` and `now` name in `source`.
pub(super) fn insert(tables: &Tables, (fence, now): (&str, &str), source: &str, conflict: &str) -> String {
    let locks = &tables.locks;
    format!(
        "u AS (\
           INSERT INTO {locks} AS l (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key) \
           SELECT $1, $4, {now} {PLUS} $5, {now}, pg_catalog.lpad({fence}::pg_catalog.text, 15, '0'), $3 \
           FROM {source} \
           ON CONFLICT (key) DO {conflict} \
           RETURNING l.expires_at_ms, l.fence, l.lock_id, {VERSION} AS version, l.key {EQ} $1 AND l.lock_id {EQ} $4 AS ours)"
    )
}

/// What is done about a row that is there: it is replaced, but not while it lives.
pub(super) fn upsert() -> String {
    // In DO UPDATE the clock of this statement is in EXCLUDED.acquired_at_ms.
    let alive = live("l.expires_at_ms", "EXCLUDED.acquired_at_ms");
    format!(
        "UPDATE SET lock_id = EXCLUDED.lock_id, expires_at_ms = EXCLUDED.expires_at_ms, \
           acquired_at_ms = EXCLUDED.acquired_at_ms, fence = EXCLUDED.fence, user_key = EXCLUDED.user_key \
         WHERE NOT {alive}"
    )
}

/// Raises the counter and writes the row, from the rows of `ok(now)`.
fn write(tables: &Tables) -> String {
    format!("{}, {}", raise(tables, "FROM ok", ""), insert(tables, ("f.fence", "ok.now"), "f, ok", &upsert()))
}

/// Fails the message if the counter was raised and the row is not our key's with our lock id: it was not
/// written, or a trigger has put the old one back, or has written another one. A burnt fence must not be committed. The same where a
/// trigger has put the counter back, for its number was granted before. (Division by zero, 22012, which
/// nothing else here can raise.)
pub(super) fn all_or_nothing(tables: &Tables) -> String {
    let fences = &tables.fences;
    format!(
        "1 OPERATOR(pg_catalog./) (CASE WHEN EXISTS (SELECT 1 FROM f) AND NOT EXISTS (SELECT 1 FROM u WHERE u.ours) \
           OR EXISTS (SELECT 1 FROM f, {fences} AS c WHERE c.fence_key {EQ} $2 AND c.fence {GE} f.fence) THEN 0 ELSE 1 END)"
    )
}

/// What an acquire depends on besides, and what it does with a grant: parts of the statement before and after its own.
#[derive(Clone, Copy)]
pub(super) struct Where<'a> {
    pub(super) before: &'a str,
    pub(super) condition: &'a str,
    pub(super) after: &'a str,
}

impl<'a> Where<'a> {
    const ANYWHERE: Self = Self::then("");

    /// On no condition.
    pub(super) const fn then(after: &'a str) -> Self {
        Self { before: "", condition: "", after }
    }
}

/// The write of a key that was looked at in another message, and what `more` does with its row.
pub(super) fn grant(tables: &Tables, more: &str) -> String {
    format!(
        "WITH ok AS MATERIALIZED (SELECT {CLOCK} AS now), {}{more} \
         SELECT (SELECT u.expires_at_ms FROM u), (SELECT u.fence FROM u), (SELECT u.version FROM u), {}",
        write(tables),
        all_or_nothing(tables)
    )
}

/// The whole acquire but the queue. `cur` is the row, locked, if it is over or ours; a visible row
/// that is not in `cur` is somebody's. The counter is locked only when no row stands against it, and
/// a visible counter that cannot be locked is somebody's, too. Then comes the clock, then the grant, and what `after`
/// does with its row.
pub(super) fn acquire(tables: &Tables, only: Where<'_>) -> String {
    let Where { before, condition, after } = only;
    format!(
        "WITH {before}{}{after} \
         SELECT (SELECT u.expires_at_ms FROM u), (SELECT u.fence FROM u), (SELECT u.version FROM u), {}, \
           (SELECT {COUNT} FROM ok), (SELECT {COUNT} FROM cur WHERE cur.lock_id {EQ} $4)",
        acquire_parts(tables, condition),
        all_or_nothing(tables)
    )
}

/// The parts `cur`, `ok`, `f` and `u` of it, where one more `condition` is fulfilled.
pub(super) fn acquire_parts(tables: &Tables, condition: &str) -> String {
    let (locks, fences) = (&tables.locks, &tables.fences);
    let alive = live("l.expires_at_ms", CLOCK);
    let free =
        format!("(SELECT {COUNT} FROM {locks} AS l WHERE l.key {EQ} $1) {EQ} (SELECT {COUNT} FROM cur)");
    format!(
        "cur AS MATERIALIZED (\
           SELECT l.lock_id FROM {locks} AS l \
           WHERE l.key {EQ} $1 AND (l.lock_id {EQ} $4 OR NOT {alive}){condition} FOR UPDATE OF l), \
         ok AS MATERIALIZED (\
           SELECT {CLOCK} AS now FROM (SELECT {COUNT} AS n FROM (\
             SELECT 1 FROM {fences} AS c WHERE c.fence_key {EQ} $2 AND {free} \
             FOR NO KEY UPDATE OF c SKIP LOCKED) AS counter) AS held \
           WHERE held.n {EQ} (SELECT {COUNT} FROM {fences} AS c WHERE c.fence_key {EQ} $2) AND {free}{condition} \
             AND NOT EXISTS (SELECT 1 FROM cur WHERE cur.lock_id {EQ} $4)), \
         {}",
        write(tables)
    )
}

/// The grant where no row stands for the key, which is nearly always so, in a fraction of the time
/// that [`acquire`] takes: one statement, and nothing has to be locked before it is written.
///
/// 1. `look` is empty: no lease of anybody, live or dead. The queue's advisory lock is taken if it is free:
///    then no other client is between its look and its write. If it is not, nothing changes, and the
///    careful statement queues.
/// 2. The look may be older than the lock by as long as a statement takes to begin. If somebody has
///    written the row in between, `u` is empty, and the message fails as a whole: the index decides, not
///    the look.
/// 3. Nobody else has the counter locked, by [`busy`]. If one comes in between, its end is waited for, within
///    the limits of every wait.
/// 4. The clock is read after the counter was taken, for its answer.
/// 5. The counter has a greater number than before, and the row our key and our id: a trigger may put the old number
///    back, or write another row.
///
/// The executor sets up every part of a statement with each call: a part more takes it longer than what the
/// part does. So what is asked once stands in the condition, and not in a part of its own.
pub(super) fn acquire_absent(tables: &Tables, only: Where<'_>) -> String {
    let Where { before, condition, after } = only;
    let (locks, fences, busy) = (&tables.locks, &tables.fences, busy());
    let free = "WHERE NOT EXISTS (SELECT 1 FROM look) AND NOT EXISTS (SELECT 1 FROM counter WHERE counter.busy) \
         AND pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext($1)::pg_catalog.int8)";
    let free = &format!("{free}{condition}");
    format!(
        "WITH {before}look AS MATERIALIZED (\
           SELECT l.expires_at_ms, l.lock_id FROM {locks} AS l WHERE l.key {EQ} $1), \
         counter AS MATERIALIZED (SELECT x.fence, {busy} FROM {fences} AS x WHERE x.fence_key {EQ} $2), \
         {}, {}{after} \
         SELECT u.expires_at_ms, u.fence, u.version, (1 OPERATOR(pg_catalog./) \
           (CASE WHEN u.ours IS NOT TRUE OR counter.fence {GE} f.fence THEN 0 ELSE 1 END))::pg_catalog.int8, {DURABLE} \
           FROM f LEFT JOIN u ON true LEFT JOIN counter ON true \
         UNION ALL SELECT look.expires_at_ms, look.lock_id, NULL, {CLOCK}, NULL FROM look",
        raise(tables, free, &format!(", {CLOCK} AS now")),
        insert(tables, ("f.fence", "f.now"), "f", "NOTHING")
    )
}
