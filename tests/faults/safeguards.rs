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
//! | `turn` | that an acquire in order, and a look before it, yields to tickets that are ahead |
//! | `ticket-end`, `ticket-delete` | that a ticket counts until its end, and that others delete it soon after that |
//! | `note-lease` | that a note is looked for under the lock id and the fence of its lease |
//! | `mark-look`, `mark-again` | the look of a begin at its slot's mark, and the second one after the grant |
//! | `stale`, `done` | what fails a caller's transaction: the fence check, and that its slot is done |
//!
//! Every other condition, alternative and row lock is taken out one by one by `scripts/mutants sql`.

use std::sync::{Arc, Mutex};

use syncguard::{LockOptions, PgLockClient, Slot};

use crate::support::sql::{Said, statements};
use crate::support::{self, Action, Proxy};

/// What is taken out of which statements, and what stands there instead.
struct Cut {
    safeguard: &'static str,
    there: &'static str,
    instead: &'static str,
    /// By name, see [`Said`], with spaces between them.
    statements: &'static str,
}

const fn cut(
    safeguard: &'static str,
    there: &'static str,
    instead: &'static str,
    statements: &'static str,
) -> Cut {
    Cut { safeguard, there, instead, statements }
}

const CUTS: [Cut; 35] = [
    cut(
        "turn",
        " AND NOT EXISTS (SELECT 1 FROM ahead)",
        "",
        "turn_absent turn_acquire turn_note_absent turn_note_acquire",
    ),
    cut("turn", "pg_catalog.count(*) FROM ahead", "0::pg_catalog.int8", "turn_ahead turn_look"),
    cut(
        "ticket-end",
        "w.expires_at_ms OPERATOR(pg_catalog.>) own.now",
        "true",
        "turn_absent turn_acquire turn_ahead turn_look turn_note_absent turn_note_acquire",
    ),
    cut(
        "ticket-delete",
        "d.expires_at_ms OPERATOR(pg_catalog.<) (t.now",
        "false AND d.expires_at_ms OPERATOR(pg_catalog.<) (t.now",
        "announce",
    ),
    cut(
        "note-lease",
        "m.lock_id OPERATOR(pg_catalog.=) $1 AND m.role OPERATOR(pg_catalog.=) 'n' AND m.fence OPERATOR(pg_catalog.=) $2",
        "$1 OPERATOR(pg_catalog.<>) $2 AND m.role OPERATOR(pg_catalog.=) 'n' LIMIT 1",
        "note_of",
    ),
    // Rows of members that are over, where they are deleted.
    cut("row-lock", " FOR UPDATE OF d SKIP LOCKED", "", "announce found"),
    cut("row-lock", " FOR UPDATE OF m SKIP LOCKED", "", "leave leave_quietly renew_shared"),
    cut(
        "row-lock",
        " FOR UPDATE OF o SKIP LOCKED",
        "",
        "note_absent note_acquire note_grant note_permit note_run note_set_absent \
         note_set_grant turn_note_absent turn_note_acquire",
    ),
    cut("version", "cur.version OPERATOR(pg_catalog.=) $4", "true", "extend"),
    cut("version", "cur.version OPERATOR(pg_catalog.=) cur.replaced", "true", "renew"),
    cut("version", "l.xmin::pg_catalog.text OPERATOR(pg_catalog.=) $4", "true", "update"),
    cut("fence", "l.fence OPERATOR(pg_catalog.=) $3", "true", "extend"),
    cut("fence", "c.fence OPERATOR(pg_catalog.=) want.fence AS mine", "true AS mine", "renew"),
    cut(
        "advisory-lock",
        "pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext(l.key)::pg_catalog.int8)",
        "l.key",
        "queue_for",
    ),
    cut("row-lock", " FOR UPDATE OF l SKIP LOCKED", "", "renew renew_shared"),
    cut(
        "counter-lock",
        " FOR NO KEY UPDATE OF c SKIP LOCKED",
        "",
        "acquire begin_run found hold note_acquire note_run note_set_grant set_grant \
         turn_acquire turn_note_acquire",
    ),
    cut(
        "row-lock",
        " FOR UPDATE OF l",
        "",
        "acquire begin_run found hold join note_acquire note_run note_set_grant \
         note_set_quietly note_set_release renew_shared_alone set_confirm set_grant \
         set_hold set_release set_release_quietly turn_acquire turn_note_acquire",
    ),
    cut("row-lock", " FOR UPDATE", "", "claim_run extend find finish_run hold_group note_release release"),
    cut(
        "advisory-lock",
        "pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext($1)::pg_catalog.int8)",
        "$1",
        "queue",
    ),
    cut(
        "advisory-lock",
        "pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext($1)::pg_catalog.int8)",
        "true",
        "acquire_absent join note_absent turn_absent turn_note_absent",
    ),
    cut(
        "upsert-condition",
        "ON CONFLICT (key) DO NOTHING",
        "ON CONFLICT (key) DO UPDATE SET lock_id = EXCLUDED.lock_id, expires_at_ms = EXCLUDED.expires_at_ms, \
         acquired_at_ms = EXCLUDED.acquired_at_ms, fence = EXCLUDED.fence",
        "acquire_absent join note_absent note_set_absent set_absent turn_absent \
         turn_note_absent",
    ),
    cut(
        "advisory-lock",
        "pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext(want.key)::pg_catalog.int8)",
        "true",
        "note_set_absent set_absent",
    ),
    cut("advisory-lock", "pg_catalog.pg_advisory_xact_lock(n.number)", "n.number", "set_queue"),
    cut(
        "advisory-lock",
        "pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext($1 OPERATOR(pg_catalog.||) free.n::pg_catalog.text)::pg_catalog.int8)",
        "true",
        "note_permit permit_choose permit_grant",
    ),
    cut("permit-limit", " OPERATOR(pg_catalog.%) $3) AS n", ") AS n", "note_permit permit_grant"),
    cut("permit-limit", " OPERATOR(pg_catalog.%) $2) AS n", ") AS n", "permit_choose"),
    cut(
        "set-check",
        "CASE WHEN EXISTS (SELECT 1 FROM f) AND ((SELECT",
        "CASE WHEN false AND EXISTS (SELECT 1 FROM f) AND ((SELECT",
        "note_set_absent note_set_grant set_absent set_grant",
    ),
    cut(
        "set-raise",
        "FROM want CROSS JOIN queue WHERE",
        "FROM want CROSS JOIN queue WHERE want.place = 1 AND",
        "note_set_absent set_absent",
    ),
    cut(
        "mark-look",
        "SELECT 1 FROM mark WHERE COALESCE(",
        "SELECT 1 FROM mark WHERE true OR COALESCE(",
        "begin_run note_run",
    ),
    cut(
        "mark-again",
        "(CASE WHEN m.fence OPERATOR(pg_catalog.>=)",
        "(CASE WHEN false AND m.fence OPERATOR(pg_catalog.>=)",
        "mark_again",
    ),
    cut(
        "stale",
        "'syncguard: the lease is over or a newer holder exists; this transaction cannot commit'",
        "'1'",
        "fence_transaction",
    ),
    cut(
        "done",
        "'syncguard: this slot is done already; this transaction cannot commit'",
        "'1'",
        "complete_in",
    ),
    cut(
        "clock",
        "pg_catalog.clock_timestamp()",
        "pg_catalog.now()",
        "acquire acquire_absent announce begin_run by_id by_key claim_run clock \
         confirm_run extend fence_transaction finish_run found grant hold join leave \
         leave_quietly look note_absent note_acquire note_grant note_of_readers note_permit \
         note_permit_release note_release note_release_live note_run note_set_absent \
         note_set_grant note_set_quietly note_set_release permit_choose permit_count \
         permit_grant permit_release reader readers release release_live renew \
         renew_shared renew_shared_alone set_absent set_confirm set_grant set_hold \
         set_release set_release_quietly turn_absent turn_acquire turn_ahead turn_look \
         turn_note_absent turn_note_acquire turn_over update view withdraw",
    ),
    cut(
        "durable",
        "ARRAY['off', 'local']",
        "ARRAY['on', 'local']",
        "acquire_absent claim_run complete_in confirm_run durable extend finish_run \
         join note_absent note_permit note_set_absent permit_grant queue set_absent \
         set_queue turn_absent turn_note_absent",
    ),
    cut(
        "durable",
        "'synchronous_commit', 'on'",
        "'synchronous_commit', 'off'",
        "acquire_absent claim_run complete_in confirm_run durable extend finish_run \
         join note_absent note_permit note_set_absent permit_grant queue set_absent \
         set_queue turn_absent turn_note_absent",
    ),
];

/// The end of the upsert's assignments: its condition follows, up to [`RETURNING`].
const UPSERT: &str = "user_key = EXCLUDED.user_key";
const RETURNING: &str = " RETURNING ";

/// Those whose upsert repeats the condition.
const UPSERTS: &str = "acquire begin_run found grant note_acquire note_grant note_permit note_run note_set_grant \
     permit_grant set_grant turn_acquire turn_note_acquire";

/// The text without these safeguards, which are named with commas between them. Other statements than those that are
/// named above stay as they are: what a server is asked to show of itself, for instance.
pub fn without(safeguards: &str, said: Said<'_>) -> String {
    let missing = |safeguard: &str| safeguards.split(',').any(|name| name == safeguard);
    let mut text = said.text.to_owned();
    for cut in CUTS.iter().filter(|cut| missing(cut.safeguard) && names(cut.statements, said.name)) {
        text = text.replace(cut.there, cut.instead);
    }
    if !missing("upsert-condition") || !names(UPSERTS, said.name) {
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

fn names(statements: &str, name: &str) -> bool {
    statements.split(' ').any(|statement| statement == name)
}

/// A control that takes nothing out of a new statement would show nothing about it. So every statement
/// that has a safeguard is named by its cuts, and no other.
#[test]
fn each_safeguard_is_taken_out_of_every_statement_that_has_it() {
    let schema = support::schema();
    let made = PgLockClient::builder().create_members_table(true).connect(&schema.url()).unwrap();
    made.setup_schema().unwrap();
    let proxy = Proxy::start(support::server().port());
    let messages = Arc::new(Mutex::new(Vec::new()));
    let there = Arc::clone(&messages);
    proxy.on_query(move |sql| {
        there.lock().unwrap().push(sql.to_owned());
        Action::Pass
    });
    let client =
        PgLockClient::builder().auto_create_tables(false).connect(&proxy.url(&schema.url())).unwrap();
    client.is_locked("k").unwrap();
    // Those of sets, permits, runs, readers and waiters in order it prepares with the first of each, and with the first
    // note of each.
    let (plain, noted) = (LockOptions::new(), LockOptions::new().note("a note"));
    for options in [&plain, &noted] {
        drop(client.lock_with("k", options).unwrap());
        drop(client.lock_all_with(&["k", "l"], options).unwrap());
        drop(client.semaphore("k", 1).unwrap().acquire_with(options).unwrap());
        drop(client.read_lock_with("k", options).unwrap());
        drop(client.lock_with("k", &options.clone().fair(true)).unwrap());
        let _ = client.run_once("k", Slot::number(0), options, |_| Err::<(), _>("not done")).unwrap();
    }
    let guard = client.lock_with("k", &noted).unwrap();
    let _ = client.leader("k").unwrap();
    drop(guard);
    let mut sql = postgres::Client::connect(&proxy.url(&schema.url()), postgres::NoTls).unwrap();
    let completed = client.run_once("k", Slot::number(1), &LockOptions::new(), |run| {
        let mut transaction = sql.transaction().unwrap();
        run.complete_in(&mut transaction).unwrap();
        transaction.commit()
    });
    let _ = completed.unwrap();
    let messages = messages.lock().unwrap();
    let statements = messages.iter().flat_map(|message| {
        statements(message)
            .into_iter()
            .map(|range| Said::read(&message[range]))
            .filter(|said| !said.name.is_empty())
    });
    let mut statements: Vec<Said<'_>> = statements.collect();
    statements.sort_by_key(|said| said.name);
    statements.dedup_by_key(|said| said.name);
    assert_eq!(statements.len(), 73, "{statements:?}");
    let expect = |what: &str, named: &str, mut have: Vec<&str>| {
        let mut named: Vec<_> = named.split(' ').collect();
        named.sort_unstable();
        have.sort_unstable();
        assert_eq!(have, named, "{what}");
    };
    let with = |text: &str| {
        let have = statements.iter().filter(|said| said.text.contains(text));
        have.map(|said| said.name).collect::<Vec<_>>()
    };
    expect("the condition of the upsert", UPSERTS, with(UPSERT));
    for (n, cut) in CUTS.iter().enumerate() {
        let earlier = CUTS[..n]
            .iter()
            .filter(|earlier| earlier.safeguard == cut.safeguard && earlier.there.contains(cut.there));
        let taken: Vec<_> = earlier.flat_map(|cut| cut.statements.split(' ')).collect();
        let mut have = with(cut.there);
        have.retain(|name| !taken.contains(name));
        expect(cut.there, cut.statements, have);
    }
    for said in &*statements {
        let safeguards = CUTS.iter().filter(|cut| names(cut.statements, said.name));
        for safeguard in safeguards.map(|cut| cut.safeguard) {
            assert_ne!(without(safeguard, *said), said.text, "{safeguard}: {}", said.name);
        }
        assert_eq!(without("nothing", *said), said.text);
    }
}

#[test]
fn what_a_server_is_asked_to_show_of_itself_stays() {
    let probe =
        "SELECT pg_catalog.set_config('synchronous_commit', 'on', true), pg_catalog.clock_timestamp()";
    for cut in &CUTS {
        assert_eq!(without(cut.safeguard, Said::read(probe)), probe);
    }
}
