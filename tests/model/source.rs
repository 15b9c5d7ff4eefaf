//! The model is only as good as its likeness to the code: where these statements change, it has to be
//! looked at again.

/// What the model takes for granted, and the text that it rests on.
const STATEMENTS: [(&str, &str); 11] = [
    ("contenders queue", "pg_catalog.pg_advisory_xact_lock("),
    (
        "a live row is looked at, and left alone",
        "WHERE l.key {EQ} {key} AND l.lock_id {NE} {lock_id} AND {alive})",
    ),
    ("a free row is locked by its key", "NOT EXISTS (SELECT 1 FROM look) FOR UPDATE OF l)"),
    ("the same in one message", "(l.lock_id {EQ} $4 OR NOT {alive}) FOR UPDATE OF l)"),
    (
        "a row that is somebody's is contention",
        "(SELECT {COUNT} FROM {locks} AS l WHERE l.key {EQ} $1) {EQ} (SELECT {COUNT} FROM cur)",
    ),
    ("the counter is taken or skipped", "FOR NO KEY UPDATE OF c SKIP LOCKED)"),
    ("the upsert decides again", "WHERE NOT {alive} RETURNING l.expires_at_ms, l.fence)"),
    ("all or nothing", "(CASE WHEN EXISTS (SELECT 1 FROM f) AND NOT EXISTS (SELECT 1 FROM u)"),
    ("release and extend lock the row by its id", "WHERE l.lock_id {EQ} $1 FOR UPDATE"),
    ("a renewal skips a busy row", "ORDER BY l.key FOR UPDATE SKIP LOCKED)"),
    ("fenced work shares the counter", "FOR SHARE OF c)"),
];

#[test]
fn the_statements_are_still_those_that_were_modelled() {
    let sql =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/src/postgres/sql.rs")).expect("sql.rs");
    for (meaning, text) in STATEMENTS {
        assert!(sql.contains(text), "look at the model again: {meaning} ({text})");
    }
}
