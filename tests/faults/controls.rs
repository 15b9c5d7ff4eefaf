//! Negative controls: a library without one of its safeguards is caught, by the rule that should
//! catch it. And one that must pass, because correctness does not rest on it.

use crate::storm::{Setup, run};
use crate::weather::Fault;

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

#[test]
fn without_the_upserts_condition_it_is_caught() {
    // The others do not queue, as a client of another version might not.
    is_caught(
        &["upsert-condition", "upsert-condition", "advisory-lock", "advisory-lock"],
        true,
        &[],
        "overlap",
    );
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
