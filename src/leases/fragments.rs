//! What several statements are made of: the clock, the liveness rule, how durable a commit is, a row's version.

use crate::model::time::TIME_TOLERANCE_MS;
use crate::pg::names::{GT, LE, MINUS, NE};

/// Server time in Unix milliseconds, rounded down. By way of microseconds, which a double is exact for:
/// EXTRACT would calculate with decimal numbers.
pub(super) const CLOCK: &str = "((pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) \
    OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8 OPERATOR(pg_catalog./) 1000)";

/// Raises `synchronous_commit`, for this transaction alone, where it promises less than a durable
/// commit; other levels ask for more and stay
/// (<https://www.postgresql.org/docs/current/runtime-config-wal.html#GUC-SYNCHRONOUS-COMMIT>).
pub(super) const DURABLE: &str = "CASE WHEN pg_catalog.current_setting('synchronous_commit') \
    OPERATOR(pg_catalog.=) ANY (ARRAY['off', 'local']::pg_catalog.text[]) \
    THEN pg_catalog.set_config('synchronous_commit', 'on', true) END";

/// Lets the commit of this transaction return before it is on disk.
pub(super) const RELAXED: &str = "pg_catalog.set_config('synchronous_commit', 'off', true)";

/// The liveness rule of [`is_live`](crate::is_live) in SQL, from the same constant.
pub(super) fn live(expires_at_ms: &str, now_ms: &str) -> String {
    // Spelled-out operators all have one precedence: nothing binds by itself.
    format!("({expires_at_ms} {GT} ({now_ms} {MINUS} {TIME_TOLERANCE_MS}))")
}

/// Which rows of the counters, as `c`, are marks of jobs and no counters of a key. In PLAIN_NAMES, and only where
/// the database can store U+2126.
pub(super) const MARKS: &str =
    "(c.fence_key LIKE E'fence:%\\u2126done' OR c.fence_key LIKE E'fence:%\\u2126number')";

/// The row's version: the transaction that wrote it. Row locks, freezing and rewriting leave it as it is
/// (<https://www.postgresql.org/docs/current/ddl-system-columns.html>).
pub(super) const VERSION: &str = "l.xmin::pg_catalog.text";

/// Whether a counter `x` may be locked by somebody: for not waiting, never for the exclusion, which is the row
/// lock's (<https://www.postgresql.org/docs/current/ddl-system-columns.html>).
///
/// 1. A row that was upserted names its own transaction in `xmax`. Any other there is one that has it locked, or had.
/// 2. It had, and is over, if it is older than the oldest transaction that runs. A fenced transaction leaves
///    such a trace with each commit.
/// 3. Several at once share a number that is counted for itself (`mxid_age` above 0: given away already), and says
///    nothing about which of them are over.
pub(super) fn busy() -> String {
    const XID: &str = "pg_catalog.xid";
    format!(
        "x.xmax {NE} '0'::{XID} AND x.xmax {NE} x.xmin AND (pg_catalog.mxid_age(x.xmax) {GT} 0 \
         OR pg_catalog.age(x.xmax) {LE} \
           pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::{XID})) AS busy"
    )
}

/// How long a lease must be over before cleanup may delete its row, in milliseconds after its
/// expiry: the tolerance, and as much again, so that no extend can still be on its way.
pub const CLEANUP_GUARD_MS: i64 = 2000;
