//! Negative controls of sets, permits, runs, waiters in order and notes: each rule of theirs catches what it should. A leader has the plain
//! lease of its key, by the plain statements: see [`controls`](crate::controls).

use std::time::Duration;

use syncguard::{Heartbeat, LockOptions, PgLockClient, RunOnce, Slot};

use crate::checker::{Allow, Violation, check};
use crate::controls::{Race, SLOT, TTL, is_caught_with, proxy_without, row, was_taken_out};
use crate::history::{History, MS, Named, Op, Outcome, Run, What, now};
use crate::support::wait::wait_until;
use crate::support::{Config, LIMIT, Server};
use crate::tickets::{Watch, call_of};
use crate::told::as_ns;

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

/// Somebody has all permits. Another one asks for one more, on a connection whose statements have lost this safeguard; where
/// they begin to count is chance, so it asks again and again.
fn one_permit_more(missing: &'static str) -> Vec<Violation> {
    let server = Server::start(&Config::new());
    let client = PgLockClient::connect(server.url()).unwrap();
    let proxy = proxy_without(&server, missing);
    let other = PgLockClient::connect(&proxy.url(server.url())).unwrap();
    let options = LockOptions::new().heartbeat(Heartbeat::Off);
    let mut history = History::default();
    let mut guards = Vec::new();
    for client in std::iter::repeat_n(&client, 3).chain(std::iter::repeat_n(&other, 100)) {
        let send = now();
        let permit = client.semaphore("sem", 3).unwrap().try_acquire_with(&options).unwrap();
        let Some(guard) = permit else { continue };
        let (key, fence) = (format!("sem#{}", guard.permit().unwrap()), guard.fence().get());
        let outcome = Outcome::Ok { number: fence, decided_ms: 0 };
        history.ops.push(Op { limit: 3, ..acquired((&key, 0, None), (send, now()), outcome) });
        guards.push(guard);
        if guards.len() > 3 {
            break;
        }
    }
    was_taken_out(&proxy, missing);
    check(&history, Allow { recovery: 1000 * MS })
}

#[test]
fn without_the_limit_of_permits_there_are_more_than_that() {
    let found = one_permit_more("");
    assert!(found.is_empty(), "{found:?}");
    let found = one_permit_more("permit-limit");
    assert!(found.iter().any(|found| found.rule == "limit"), "it was not noticed: {found:?}");
}

#[test]
fn without_the_look_at_tickets_whoever_came_later_is_granted_first() {
    is_caught_with(true, "turn", true, &[], "order");
}

/// Somebody died who was in line. One waiter comes later, and says what it was told.
fn behind_a_dead_one(missing: &'static str) -> (bool, Vec<Violation>) {
    const WAIT: Duration = Duration::from_secs(6);
    let server = Server::start(&Config::new());
    drop(PgLockClient::builder().create_members_table(true).connect(server.url()).unwrap());
    let proxy = proxy_without(&server, missing);
    let client = PgLockClient::connect(&proxy.url(server.url())).unwrap();
    let dead = "INSERT INTO syncguard_members (lock_id, key, role, since_ms, expires_at_ms) \
                SELECT 'dead', 'turn0', 'w', now - 9000, now - 3000 \
                FROM (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::int8 AS now) AS clock";
    server.client().batch_execute(dead).unwrap();
    let watch = Watch::start(server.url());
    let options = LockOptions::new().ttl(TTL).timeout(WAIT).fair(true).note("1.1");
    let send = now();
    let granted = client.lock_with("turn0", &options).map(|guard| guard.fence().get());
    let recv = now();
    let outcome = granted
        .as_ref()
        .map_or(Outcome::Unknown(None), |fence| Outcome::Ok { number: *fence, decided_ms: 0 });
    let mut history = History { tickets: watch.end(), ..History::default() };
    history.ends.insert(1, recv);
    let op = acquired(("turn0", 1, Some(0)), (send, recv), outcome);
    history.ops.push(Op { bound: as_ns(WAIT), ..op });
    (granted.is_ok(), check(&history, Allow { recovery: 1000 * MS }))
}

#[test]
fn without_the_end_of_tickets_a_free_key_stays_free() {
    // Each covers for the other.
    for missing in ["", "ticket-end", "ticket-delete"] {
        let (granted, found) = behind_a_dead_one(missing);
        assert!(granted && found.is_empty(), "without {missing:?}: {found:?}");
    }
    let (granted, found) = behind_a_dead_one("ticket-end,ticket-delete");
    assert!(!granted && found.iter().any(|found| found.rule == "standstill"), "not noticed: {found:?}");
}

/// Two keys are held with a note each. Whoever looks is told whose they are.
fn told_of_notes(missing: &'static str) -> Vec<Violation> {
    let server = Server::start(&Config::new());
    drop(PgLockClient::builder().create_members_table(true).connect(server.url()).unwrap());
    let proxy = proxy_without(&server, missing);
    let client = PgLockClient::connect(&proxy.url(server.url())).unwrap();
    let (mut history, mut guards) = (History::default(), Vec::new());
    for (call, key) in [(1, "a"), (2, "b")] {
        let send = now();
        let guard = client.lock_with(key, &LockOptions::new().ttl(TTL).note(format!("1.{call}"))).unwrap();
        let outcome = Outcome::Ok { number: guard.fence().get(), decided_ms: 0 };
        guards.push(guard);
        history.ops.push(acquired((key, call, None), (send, now()), outcome));
    }
    for key in ["a", "b"] {
        let (send, lease) = (now(), client.get_by_key(key).unwrap().unwrap());
        let (key, fence, note) = (key.to_owned(), lease.fence.get(), lease.note.as_deref().and_then(call_of));
        history.named.push(Named { process: 1, key, fence, owner: None, note, send, recv: now() });
    }
    check(&history, Allow { recovery: 1000 * MS })
}

#[test]
fn without_the_lease_of_a_note_somebody_else_is_named() {
    let found = told_of_notes("");
    assert!(found.is_empty(), "{found:?}");
    let found = told_of_notes("note-lease");
    assert!(found.iter().any(|found| found.rule == "owner"), "not noticed: {found:?}");
}

/// A call of process 1 that was to take a key.
fn acquired((key, call, order): (&str, u64, Option<i32>), (send, recv): (u64, u64), outcome: Outcome) -> Op {
    Op {
        process: 1,
        what: What::Acquire,
        key: key.to_owned(),
        fence: 0,
        ttl: 0,
        send,
        recv,
        bound: 0,
        outcome,
        set: None,
        stalled: 0,
        limit: 0,
        call,
        order,
    }
}

/// Tries a set, all of whose keys are free, or while somebody else's row of the middle one is under way. The counters
/// of the others that were raised.
fn raised_by_a_set(missing: &'static str, is_free: bool) -> Vec<String> {
    let server = Server::start(&Config::new());
    drop(PgLockClient::connect(server.url()).unwrap());
    let proxy = proxy_without(&server, missing);
    let client = PgLockClient::connect(&proxy.url(server.url())).unwrap();
    let (mut sql, mut stranger) = (server.client(), server.client());
    if !is_free {
        stranger.batch_execute(&format!("BEGIN; {}", row("k", 60_000))).unwrap();
    }
    std::thread::scope(|scope| {
        let set = scope.spawn(|| call(&client, "set"));
        if !is_free {
            let waiting = "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) \
                           WHERE NOT granted AND application_name = 'syncguard'";
            wait_until(LIMIT, "it waits", || sql.query_one(waiting, &[]).unwrap().get::<_, i64>(0) == 1);
            stranger.batch_execute("COMMIT").unwrap();
        }
        println!("a set without {missing:?}: {:?}", set.join().unwrap());
    });
    was_taken_out(&proxy, missing);
    let raised = "SELECT fence_key FROM syncguard_fence_counters WHERE fence_key <> 'fence:k' ORDER BY 1";
    sql.query(raised, &[]).unwrap().iter().map(|row| row.get(0)).collect()
}

#[test]
fn without_the_check_of_a_set_its_keys_are_granted_apart() {
    let all = ["fence:j", "fence:l"];
    // One of them is somebody else's by the time that it writes.
    assert_eq!(raised_by_a_set("", false), [""; 0]);
    assert_eq!(raised_by_a_set("set-check", false), all);
    // Only the first of them is raised; the check refuses that, and the careful statement grants.
    assert_eq!(raised_by_a_set("set-raise", true), all);
    assert_eq!(raised_by_a_set("set-check,set-raise", true), all[..1]);
}

/// A run has claimed its slot, and failed. Another one asks for the same slot, on a connection whose statements have lost
/// these safeguards.
fn claimed_twice(missing: &'static str) -> Vec<Violation> {
    let server = Server::start(&Config::new());
    let client = PgLockClient::connect(server.url()).unwrap();
    let proxy = proxy_without(&server, missing);
    let other = PgLockClient::connect(&proxy.url(server.url())).unwrap();
    let slot = Slot::number(SLOT).claim_at_start();
    let mut history = History::default();
    for (process, client) in [(1, &client), (2, &other)] {
        let begun = now();
        let run = client.run_once("claim", slot, &LockOptions::new(), |_| {
            history.runs.push(Run { process, job: "claim".to_owned(), slot: SLOT, begun });
            Err::<(), _>("it is enough to have begun")
        });
        println!("claim {process} without {missing:?}: {run:?}");
    }
    was_taken_out(&proxy, missing);
    check(&history, Allow { recovery: 1000 * MS })
}

#[test]
fn without_the_looks_at_the_mark_a_claimed_slot_begins_again() {
    let found = claimed_twice("");
    assert!(found.is_empty(), "{found:?}");
    let found = claimed_twice("mark-look,mark-again");
    assert!(found.iter().any(|found| found.rule == "claimed"), "it was not noticed: {found:?}");
}

/// A run is late: its lease was broken, and the slot is done by the next one. It completes nevertheless, on a
/// connection whose statements have lost these safeguards.
fn late_completion(missing: &'static str) -> Vec<Violation> {
    let server = Server::start(&Config::new());
    let client = PgLockClient::connect(server.url()).unwrap();
    let proxy = proxy_without(&server, missing);
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
    let at = now();
    let outcome = Outcome::Ok { number: SLOT, decided_ms: 0 };
    let finish = acquired(("effect", 0, None), (at, at), outcome);
    history.ops.push(Op { what: What::Finish, fence: 2, ..finish });
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
