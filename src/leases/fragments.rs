//! What several statements are made of: the clock, the liveness rule, how durable a commit is, a row's version.

use crate::model::time::TIME_TOLERANCE_MS;
use crate::pg::names::{GT, MINUS};

/// Server time in Unix milliseconds, rounded down.
pub(super) const CLOCK: &str = "pg_catalog.floor(EXTRACT(EPOCH FROM pg_catalog.clock_timestamp()) \
    OPERATOR(pg_catalog.*) 1000)::pg_catalog.int8";

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
