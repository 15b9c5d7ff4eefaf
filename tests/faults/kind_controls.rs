//! Negative controls of sets, permits and runs: each rule of theirs catches what it should. A leader has the plain
//! lease of its key, by the plain statements: see [`controls`](crate::controls).

use syncguard::{Heartbeat, LockOptions, PgLockClient, RunOnce, Slot};

use crate::checker::{Allow, Violation, check};
use crate::controls::{Race, SLOT, TTL, is_caught_with, row};
use crate::history::{History, MS, Op, Outcome, What, now};
use crate::safeguards::without;
use crate::support::{Config, Proxy, Server};

/// The one call of a contender: a set with `k` in its middle, the only permit of `k`, or a run of the job `k`.
pub fn call(client: &PgLockClient, kind: &str) -> syncguard::Result<String> {
    let options = LockOptions::new().ttl(TTL).heartbeat(Heartbeat::Off);
    let told =
        |fence: Option<u64>| fence.map_or_else(|| "refused".to_owned(), |fence| format!("ok {fence} 0"));
    match kind {
        "set" => client.try_lock_all_with(&["j", "k", "l"], &options).map(|guard| {
            let fence = guard.as_ref().and_then(|guard| guard.fence("k")).map(syncguard::Fence::get);
            // It is believed to be held to the end of its time.
            std::mem::forget(guard);
            told(fence)
        }),
        "permit" => client
            .semaphore("k", 1)?
            .try_acquire_with(&options)
            .map(|guard| told(guard.map(|guard| guard.leak().fence.get()))),
        _ => {
            let mut fence = None;
            let run = client.run_once("k", Slot::number(SLOT), &options, |run| {
                fence = Some(run.fence().get());
                Err::<(), _>("it is enough to have begun")
            });
            run.map(|_| told(fence))
        }
    }
}

/// Another client, which does not queue, grants itself a key between the contender's look and its write.
#[test]
fn without_the_upserts_condition_of_sets_permits_and_runs_it_is_caught() {
    for (call, key) in [("set", "k"), ("permit", "k\u{2126}1"), ("run", "k")] {
        for messages in ["1", "2"] {
            let (there, stranger) = (String::new(), row(key, 60_000));
            let mut race = Race { without: "", messages, call, contenders: 1, there, stranger };
            race.catches("upsert-condition", "overlap");
        }
    }
}

/// A dead run's row is locked while its slot is marked as done: whoever waits for the row has looked before.
#[test]
fn without_the_second_look_at_the_mark_it_is_caught() {
    for messages in ["1", "2"] {
        let mark = format!(
            "SELECT FROM syncguard_locks FOR UPDATE; \
             INSERT INTO syncguard_fence_counters (fence_key, fence) VALUES ('fence:k\u{2126}number', {SLOT})"
        );
        let (there, stranger) = (row("k", -5000), mark);
        let mut race = Race { without: "", messages, call: "run", contenders: 1, there, stranger };
        race.catches("mark-again", "once");
    }
}

#[test]
fn without_the_limit_of_permits_there_are_more_than_that() {
    is_caught_with(true, "permit-limit", true, &[], "limit");
}

#[test]
fn without_the_check_of_a_set_its_keys_are_granted_apart() {
    is_caught_with(true, "set-check,set-raise", true, &[], "part");
}

#[test]
fn without_the_looks_at_the_mark_a_claimed_slot_begins_again() {
    is_caught_with(true, "mark-look,mark-again", true, &[], "claimed");
}

/// A run is late: its lease was broken, and the slot is done by the next one. It completes nevertheless, on a
/// connection whose statements have lost these safeguards.
fn late_completion(missing: &'static str) -> Vec<Violation> {
    let server = Server::start(&Config::new());
    let client = PgLockClient::connect(server.url()).unwrap();
    let proxy = Proxy::start(server.port());
    if !missing.is_empty() {
        proxy.rewrite(move |sql| without(missing, sql));
    }
    let mut sql = server.client();
    sql.batch_execute("CREATE TABLE effects (slot int8 NOT NULL)").unwrap();
    let connect = || postgres::Client::connect(&proxy.url(server.url()), postgres::NoTls).unwrap();
    let complete = |run: &syncguard::Run| {
        let mut connection = connect();
        let mut transaction = connection.transaction().unwrap();
        run.complete_in(&mut transaction).map_err(|_| "refused")?;
        transaction.execute("INSERT INTO effects VALUES ($1)", &[&SLOT.cast_signed()]).unwrap();
        transaction.commit().map_err(|_| "refused")
    };
    let (options, slot) = (LockOptions::new(), Slot::number(SLOT));
    let mut history = History::default();
    let late = client.run_once("effect", slot, &options, |late| {
        client.operator().break_lock("effect", "a control").unwrap();
        let next = client.run_once("effect", slot, &options, complete).unwrap();
        assert_eq!(next, RunOnce::Done(()));
        complete(late)
    });
    println!("a late completion without {missing:?}: {late:?}");
    let (key, at) = ("effect".to_owned(), now());
    let outcome = Outcome::Ok { number: SLOT, decided_ms: 0 };
    let what = What::Finish;
    history.ops.push(Op {
        process: 1,
        what,
        key,
        fence: 2,
        ttl: 0,
        send: at,
        recv: at,
        bound: 0,
        outcome,
        set: None,
        stalled: 0,
        limit: 0,
    });
    for row in sql.query("SELECT slot FROM effects", &[]).unwrap() {
        history.effects.push(("effect".to_owned(), row.get::<_, i64>(0).unsigned_abs()));
    }
    check(&history, Allow { recovery: 1000 * MS })
}

#[test]
fn without_the_checks_of_a_completion_an_effect_happens_twice() {
    // Each covers for the other.
    for missing in ["", "stale", "done"] {
        let found = late_completion(missing);
        assert!(found.is_empty(), "without {missing:?}: {found:?}");
    }
    let found = late_completion("stale,done");
    assert!(found.iter().any(|found| found.rule == "effect"), "it was not noticed: {found:?}");
}
