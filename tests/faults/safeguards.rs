//! The safeguards in the library's SQL, and the texts without them: a proxy puts those in the place of
//! what the library has sent ([`Proxy::rewrite`](crate::support::Proxy::rewrite)).
//!
//! | safeguard | what is missing without it |
//! | --- | --- |
//! | `row-lock` | decisions on the locked row |
//! | `counter-lock` | the look whether somebody has the key's counter locked |
//! | `upsert-condition` | the condition that the upsert repeats |
//! | `advisory-lock` | the queue of contenders; safety must not depend on it |
//! | `clock` | the clock after the waits: `now()` stands still from the start of the transaction |
//! | `version` | that only who names the row's version may shorten a lease |
//! | `fence` | that a renewal or a guard's extend compares the fence |
//! | `durable` | durable commits of acquire, extend and what marks a slot |
//! | `permit-limit` | that the number of a permit stays within the limit |
//! | `set-check` | that a set is written as a whole or fails |
//! | `set-raise` | the counters of all keys of a set but the first |
//! | `mark-look`, `mark-again` | the look of a begin at its slot's mark, and the second one after the grant |
//! | `stale`, `done` | what fails a caller's transaction: the fence check, and that its slot is done |

use std::sync::{Arc, Mutex};

use syncguard::{LockOptions, PgLockClient, Slot};

use crate::support::{self, Action, Proxy};

const CUTS: [(&str, &str, &str); 28] = [
    ("version", "cur.version OPERATOR(pg_catalog.=) $4", "true"),
    ("version", "cur.version OPERATOR(pg_catalog.=) cur.replaced", "true"),
    ("version", "l.xmin::pg_catalog.text OPERATOR(pg_catalog.=) $4", "true"),
    ("fence", "l.fence OPERATOR(pg_catalog.=) $3", "true"),
    ("fence", "c.fence OPERATOR(pg_catalog.=) want.fence AS mine", "true AS mine"),
    (
        "advisory-lock",
        "pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext(l.key)::pg_catalog.int8)",
        "l.key",
    ),
    ("row-lock", " FOR UPDATE OF l SKIP LOCKED", ""),
    ("counter-lock", " FOR NO KEY UPDATE OF c SKIP LOCKED", ""),
    ("row-lock", " FOR UPDATE OF l", ""),
    ("row-lock", " FOR UPDATE SKIP LOCKED", ""),
    ("row-lock", " FOR UPDATE", ""),
    ("advisory-lock", "pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext($1)::pg_catalog.int8)", "$1"),
    (
        "advisory-lock",
        "pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext($1)::pg_catalog.int8)",
        "true",
    ),
    (
        "upsert-condition",
        "ON CONFLICT (key) DO NOTHING",
        "ON CONFLICT (key) DO UPDATE SET lock_id = EXCLUDED.lock_id, expires_at_ms = EXCLUDED.expires_at_ms, \
         acquired_at_ms = EXCLUDED.acquired_at_ms, fence = EXCLUDED.fence",
    ),
    (
        "advisory-lock",
        "pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext(want.key)::pg_catalog.int8)",
        "true",
    ),
    ("advisory-lock", "pg_catalog.pg_advisory_xact_lock(n.number)", "n.number"),
    (
        "advisory-lock",
        "pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext($1 OPERATOR(pg_catalog.||) free.n::pg_catalog.text)::pg_catalog.int8)",
        "true",
    ),
    ("permit-limit", " OPERATOR(pg_catalog.%) $3) AS n", ") AS n"),
    ("permit-limit", " OPERATOR(pg_catalog.%) $2) AS n", ") AS n"),
    (
        "set-check",
        "CASE WHEN EXISTS (SELECT 1 FROM f) AND ((SELECT",
        "CASE WHEN false AND EXISTS (SELECT 1 FROM f) AND ((SELECT",
    ),
    ("set-raise", "FROM want CROSS JOIN queue WHERE", "FROM want CROSS JOIN queue WHERE want.place = 1 AND"),
    ("mark-look", "SELECT 1 FROM mark WHERE COALESCE(", "SELECT 1 FROM mark WHERE true OR COALESCE("),
    ("mark-again", "CASE WHEN m.fence", "CASE WHEN false AND m.fence"),
    (
        "stale",
        "'syncguard: the lease is over or a newer holder exists; this transaction cannot commit'",
        "'1'",
    ),
    ("done", "'syncguard: this slot is done already; this transaction cannot commit'", "'1'"),
    ("clock", "pg_catalog.clock_timestamp()", "pg_catalog.now()"),
    ("durable", "ARRAY['off', 'local']", "ARRAY['on', 'local']"),
    ("durable", "'synchronous_commit', 'on'", "'synchronous_commit', 'off'"),
];

/// A part of the question whether a server is PostgreSQL, before the value that it is to keep.
const SHOWN: &str =
    "pg_catalog.current_setting('transaction_isolation'), pg_catalog.set_config('synchronous_commit', ";

/// The end of the upsert's assignments: its condition follows, up to [`RETURNING`].
const UPSERT: &str = "user_key = EXCLUDED.user_key";
const RETURNING: &str = " RETURNING ";

/// The text without these safeguards, which are named with commas between them.
pub fn without(safeguards: &str, text: &str) -> String {
    let missing = |safeguard: &str| safeguards.split(',').any(|name| name == safeguard);
    let mut text = text.to_owned();
    for (_, there, instead) in CUTS.iter().filter(|(safeguard, ..)| missing(safeguard)) {
        text = text.replace(there, instead);
    }
    // What a server is asked to show of itself is not what is taken out.
    text = text.replace(&format!("{SHOWN}'off'"), &format!("{SHOWN}'on'"));
    if !missing("upsert-condition") {
        return text;
    }
    let mut upserts = text.split(UPSERT);
    let mut out = upserts.next().unwrap_or_default().to_owned();
    for after in upserts {
        out.push_str(UPSERT);
        out.push_str(after.find(RETURNING).map_or(after, |end| &after[end..]));
    }
    out
}

/// A control that takes nothing out of a new statement would show nothing about it. So every statement
/// that has a safeguard is named here, and no other.
#[test]
fn each_safeguard_is_taken_out_of_every_statement_that_has_it() {
    let schema = support::schema();
    PgLockClient::connect(&schema.url()).unwrap().setup_schema().unwrap();
    let proxy = Proxy::start(support::server().port());
    let said = Arc::new(Mutex::new(String::new()));
    let there = Arc::clone(&said);
    proxy.on_query(move |sql| {
        there.lock().unwrap().push_str(sql);
        Action::Pass
    });
    let client =
        PgLockClient::builder().auto_create_tables(false).connect(&proxy.url(&schema.url())).unwrap();
    client.is_locked("k").unwrap();
    // Those of sets, permits and runs it prepares with the first of each.
    drop(client.lock_all(&["k", "l"]).unwrap());
    drop(client.semaphore("k", 1).unwrap().acquire().unwrap());
    let _ = client.run_once("k", Slot::number(1), &LockOptions::new(), |_run| Ok::<_, ()>(())).unwrap();
    let said = said.lock().unwrap();
    // A connection prepares all other statements at its first use.
    let statements: Vec<(&str, &str)> = said
        .split("PREPARE sg_")
        .skip(1)
        .map(|text| {
            (text.split(['(', ' ']).next().unwrap_or_default(), text.split(';').next().unwrap_or_default())
        })
        .map(|(name, text)| (name.rsplit_once('_').map_or(name, |(what, _digest)| what), text))
        .collect();
    assert_eq!(statements.len(), 37, "{statements:?}");
    for (safeguard, expected) in [
        (
            "row-lock",
            "hold acquire find release extend renew set_hold set_grant set_confirm set_release \
             set_release_quietly begin_run claim_run finish_run",
        ),
        ("counter-lock", "hold acquire set_grant begin_run"),
        ("advisory-lock", "queue acquire_absent queue_for set_absent set_queue permit_grant permit_choose"),
        ("upsert-condition", "grant acquire acquire_absent set_absent set_grant permit_grant begin_run"),
        (
            "clock",
            "hold view grant acquire acquire_absent clock update release release_live extend renew look \
             by_key by_id set_absent set_hold set_grant set_confirm set_release set_release_quietly \
             permit_grant permit_choose permit_count permit_release begin_run confirm_run claim_run \
             finish_run",
        ),
        ("version", "update extend renew"),
        ("fence", "extend renew"),
        (
            "durable",
            "queue acquire_absent extend durable set_absent set_queue permit_grant confirm_run claim_run \
             finish_run",
        ),
        ("permit-limit", "permit_grant permit_choose"),
        ("set-check", "set_absent set_grant"),
        ("set-raise", "set_absent"),
        ("mark-look", "begin_run"),
        ("mark-again", "mark_again"),
        ("nothing", ""),
    ] {
        let changed = statements.iter().filter(|(_, text)| without(safeguard, text) != **text);
        let changed: Vec<_> = changed.map(|(name, _)| *name).collect();
        assert_eq!(changed.join(" "), expected, "{safeguard}");
    }
}
