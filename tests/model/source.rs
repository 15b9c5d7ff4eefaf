//! The model is only as good as its likeness to the code: where these statements change, it has to be
//! looked at again.

/// What the model takes for granted, and the text that it rests on.
const STATEMENTS: [(&str, &str); 38] = [
    ("contenders queue", "pg_catalog.pg_advisory_xact_lock("),
    ("a live row is looked at, and left alone", "WHERE l.key {EQ} $1 AND l.lock_id {NE} $3 AND {alive})"),
    ("a free row is locked by its key", "NOT EXISTS (SELECT 1 FROM look) FOR UPDATE OF l)"),
    ("the same in one message", "(l.lock_id {EQ} $4 OR NOT {alive}){condition} FOR UPDATE OF l)"),
    (
        "a row that is somebody's is contention",
        "(SELECT {COUNT} FROM {locks} AS l WHERE l.key {EQ} $1) {EQ} (SELECT {COUNT} FROM cur)",
    ),
    ("the counter is taken or skipped", "FOR NO KEY UPDATE OF c SKIP LOCKED)"),
    ("the upsert decides again", "user_key = EXCLUDED.user_key \\\n         WHERE NOT {alive}\""),
    ("all or nothing", "(CASE WHEN EXISTS (SELECT 1 FROM f) AND NOT EXISTS (SELECT 1 FROM u WHERE"),
    ("release and extend lock the row by its id", "WHERE l.lock_id {EQ} $1 FOR UPDATE"),
    (
        "a renewal skips a busy row",
        "LEFT JOIN LATERAL (\\\n             SELECT l.key, l.expires_at_ms, l.fence, {VERSION} AS version FROM {locks} AS l \\\n             \
         WHERE l.lock_id {EQ} want.lock_id FOR UPDATE OF l SKIP LOCKED) AS c ON true)",
    ),
    (
        "a renewal's clock comes after its locks",
        "SELECT {CLOCK} AS now FROM (SELECT {COUNT} AS n FROM cur) AS a WHERE a.n {GE} 0::pg_catalog.int8)",
    ),
    (
        "a renewed row is still the lease's",
        "WHERE l.key {EQ} cur.key AND l.lock_id {EQ} cur.lock_id AND cur.mine AND {alive}",
    ),
    ("a key without a row queues if it can", "pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext($1)"),
    ("it looks for any row", "SELECT l.expires_at_ms, l.lock_id FROM {locks} AS l WHERE l.key {EQ} $1)"),
    (
        "nothing happens unless it is first",
        "WHERE NOT EXISTS (SELECT 1 FROM look) AND NOT EXISTS (SELECT 1 FROM counter WHERE counter.busy) \\\n         \
         AND pg_catalog.pg_try_advisory_xact_lock(",
    ),
    (
        "a counter that is somebody's is left alone",
        "x.xmax {NE} '0'::{XID} AND x.xmax {NE} x.xmin AND (pg_catalog.mxid_age(x.xmax) {GT} 0 \\\n         \
         OR pg_catalog.age(x.xmax) {LE}",
    ),
    ("its clock comes after the counter", "raise(tables, free, &format!(\", {CLOCK} AS now\"))"),
    ("it is the answer of the counter's statement", "RETURNING c.fence{more})"),
    ("the index decides, not the look", "insert(tables, (\"f.fence\", \"f.now\"), \"f\", \"NOTHING\")"),
    ("it is all or nothing, too", "(CASE WHEN u.ours IS NOT TRUE OR counter.fence {GE} f.fence THEN 0"),
    (
        "a live lease is judged when it is found",
        "DELETE FROM {locks} AS l WHERE l.lock_id {EQ} $1 AND {alive} ",
    ),
    (
        "and once more after the wait",
        "RETURNING 1 OPERATOR(pg_catalog./) (CASE WHEN {alive} THEN 1 ELSE 0 END) AS judged, {RELAXED} AS relaxed",
    ),
    (
        "the grant is durable",
        "THEN 0 ELSE 1 END))::pg_catalog.int8, {DURABLE} \\\n           FROM f LEFT JOIN u",
    ),
    (
        "only who names the version may shorten",
        "CASE WHEN {version} {EQ} {replaced} THEN {asked} ELSE GREATEST({end}, {asked}) END",
    ),
    ("an extend of a guard's names the fence", "($3 {EQ} '' OR l.fence {EQ} $3) AND {alive}"),
    ("the version is the transaction that wrote the row", "\"l.xmin::pg_catalog.text\""),
    ("fenced work shares the counter", "FOR SHARE OF c)"),
    ("who is ahead is yielded to", "condition: \" AND NOT EXISTS (SELECT 1 FROM ahead)\""),
    ("a ticket counts until its end", "w.expires_at_ms {GT} {now} AND"),
    ("and not if that is far away", "AND w.expires_at_ms {LE} ({now} {PLUS} {LONGEST_TICKET_MS}"),
    ("for those who wait in line", "AND {in_line} AND (w.priority {GT}"),
    (
        "its age is what was written",
        "COALESCE((\\\n             SELECT m.since_ms FROM {members} AS m WHERE m.lock_id {EQ} {id}",
    ),
    ("and only ever becomes older", "since_ms = LEAST(m.since_ms, EXCLUDED.since_ms)"),
    ("and for readers", "AND w.role {EQ} 'w' AND {in_line} \\\n             AND w.since_ms {LT}"),
    ("one order for all", "OR w.since_ms {EQ} own.since AND w.lock_id {LT} {id})"),
    (
        "what was granted is told",
        "AND NOT EXISTS (SELECT 1 FROM {locks} AS o WHERE o.key {EQ} $1 AND o.lock_id {EQ} $4)",
    ),
    ("a grant ends its ticket", "ended AS (DELETE FROM {members} AS m WHERE m.lock_id {EQ} {id}"),
    ("and begins the next one", "begun AS ({})"),
];

#[test]
fn the_statements_are_still_those_that_were_modelled() {
    let read = |file| std::fs::read_to_string(format!("{}/src/leases/{file}", env!("CARGO_MANIFEST_DIR")));
    let sql: String = ["fragments.rs", "sql.rs", "held.rs", "turn_sql.rs", "shared_sql.rs"]
        .map(|file| read(file).expect(file))
        .concat();
    for (meaning, text) in STATEMENTS {
        assert!(sql.contains(text), "look at the model again: {meaning} ({text})");
    }
}
