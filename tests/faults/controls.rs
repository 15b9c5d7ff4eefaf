//! Negative controls: a library without one of its safeguards is caught, by the rule that should
//! catch it. And one that must pass, because correctness does not rest on it.

use std::time::Duration;

use syncguard::{AcquireResult, CancelToken, PgLockClient};

use crate::checker::{Allow, Violation, check};
use crate::history::{Belief, History, MS, now};
use crate::storm::{Setup, run};
use crate::support::worker::{self, Parent};
use crate::support::{Config, Server, Worker, wait_until_app_waits};
use crate::weather::Fault;

const TTL: Duration = Duration::from_secs(60);

const SECONDS: u64 = 4;
/// How often a storm is tried until it shows the damage. Races are luck: the rarest shows in one storm
/// of seven or so.
const TRIES: u64 = 60;

#[track_caller]
fn is_caught(sabotage: &[&str], fenced: bool, faults: &[Fault], rule: &str) {
    // Late replies find only those who wait for them.
    let operation = if faults.contains(&Fault::LateReplies) { 4000 } else { 700 };
    let mut others = Vec::new();
    for n in 1..=TRIES {
        let setup =
            Setup { seconds: SECONDS, faults, sabotage, fenced, seed: crate::seed() + n, operation, pool: 3 };
        let violations = run(&setup).violations;
        let count = violations.iter().filter(|found| found.rule == rule).count();
        if let Some(found) = violations.iter().find(|found| found.rule == rule) {
            println!(
                "{sabotage:?}, register fenced: {fenced}: caught in storm {n}, {count} × {rule}: {}",
                found.text
            );
            return;
        }
        others.extend(violations);
    }
    panic!("{sabotage:?} was not noticed in {TRIES} storms; other violations: {others:?}");
}

#[test]
fn without_the_row_lock_it_is_caught() {
    is_caught(&["row-lock", "row-lock", "row-lock"], true, &[Fault::LockRow], "unlocked");
}

#[test]
fn with_the_transactions_clock_it_is_caught() {
    is_caught(&["clock", "clock", "clock"], true, &[Fault::LockRow], "unlocked");
}

/// A contender that says what it was told.
fn contender(parent: &Parent) {
    let client = PgLockClient::connect(&parent.arg("url")).expect("the server is there");
    let client = if parent.arg("messages") == "2" { client.cancellable(&CancelToken::new()) } else { client };
    client.is_locked("warm").expect("the server is there");
    parent.say("ready");
    parent.hear();
    parent.say(&match client.acquire("k", TTL) {
        Ok(AcquireResult::Acquired(granted)) => format!("granted {}", granted.fence.get()),
        Ok(AcquireResult::Locked) => "locked".to_owned(),
        Err(error) => format!("failed {error}"),
    });
}

/// Another client, which does not queue, grants itself a key that has no row between the contender's
/// look and its write: forced, by a transaction that commits while the contender waits for it.
fn race(sabotage: &str, messages: &str) -> (String, Vec<Violation>) {
    let server = Server::start(&Config::new());
    drop(PgLockClient::connect(server.url()).unwrap());
    let mut contender = Worker::start_alone_with(
        "controls::without_the_upserts_condition_it_is_caught",
        "contender",
        &[("url", server.url()), ("messages", messages)],
        &[("SYNCGUARD_SABOTAGE", sabotage)],
    );
    contender.expect("ready");
    let mut stranger = server.client();
    let grant = "BEGIN; INSERT INTO syncguard_fence_counters (fence_key, fence) VALUES ('fence:k', 1); \
                 INSERT INTO syncguard_locks SELECT 'k', repeat('B', 22), now + 60000, now, '000000000000001', 'k' \
                 FROM (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::int8 AS now) AS clock";
    stranger.batch_execute(grant).unwrap();
    contender.tell("go");
    wait_until_app_waits(&mut server.client(), "syncguard");
    stranger.batch_execute("COMMIT").unwrap();
    let ttl = 60_000 * MS;
    let belief =
        |process, fence, from| Belief { process, key: "k".to_owned(), fence, ttl, from, to: from + ttl };
    let mut beliefs = vec![belief(1, 1, now())];
    let answer = contender.hear();
    if let ["granted", fence] = answer.split(' ').collect::<Vec<_>>().as_slice() {
        beliefs.push(belief(2, fence.parse().expect("a number"), now()));
    }
    (answer, check(&History { beliefs, ..History::default() }, Allow { recovery: 0 }))
}

#[test]
fn without_the_upserts_condition_it_is_caught() {
    worker::part("contender", contender);
    for messages in ["1", "2"] {
        let (answer, violations) = race("", messages);
        assert_eq!(answer, "locked", "{messages} messages");
        assert!(violations.is_empty(), "{violations:?}");
        let (answer, violations) = race("upsert-condition", messages);
        println!("without the upsert's condition, {messages} messages: {answer}; {violations:?}");
        assert!(violations.iter().any(|found| found.rule == "overlap"), "{messages} messages: {answer}");
    }
}

#[test]
fn without_any_of_the_three_locks_it_is_caught() {
    let all = "row-lock,upsert-condition,advisory-lock";
    is_caught(&[all, all, all], true, &[], "overlap");
}

#[test]
fn with_the_deadline_counted_from_the_reply_it_is_caught() {
    is_caught(&["deadline", "deadline", "deadline"], true, &[Fault::LateReplies], "overlap");
}

#[test]
fn with_commits_that_do_not_wait_for_the_disk_it_is_caught() {
    is_caught(&["durable", "durable", "durable"], true, &[Fault::CrashServer], "fence");
}

#[test]
fn a_register_without_fences_is_caught() {
    is_caught(&["", "", ""], false, &[Fault::StopHolder], "register");
}

#[test]
fn without_the_advisory_lock_nothing_is_wrong() {
    let faults = [Fault::Messages, Fault::LockRow, Fault::CrashServer, Fault::StopHolder];
    let sabotage = ["advisory-lock", "advisory-lock", "advisory-lock"];
    let report = run(&Setup {
        seconds: 2 * SECONDS,
        faults: &faults,
        sabotage: &sabotage,
        fenced: true,
        seed: crate::seed(),
        operation: 700,
        pool: 3,
    });
    assert!(report.violations.is_empty(), "{:#?}", report.violations);
    assert!(report.leaks.is_empty(), "{:#?}", report.leaks);
}
