//! `--once`: a program once per period, on whichever machine is first.

use std::fs;

use crate::Done;
use crate::program::{Dir, Process, rows, running, said, started};
use crate::support::{self, LIMIT, wait_until};

/// A period that does not end while these tests run.
const ONCE: [&str; 2] = ["--once", "slot:20261128"];

#[test]
fn three_machines_at_the_same_second_run_it_once() {
    let (schema, dir) = (support::schema(), Dir::new());
    let script = "echo ran by $SYNCGUARD_FENCE in $SYNCGUARD_SLOT >>runs; sleep 0.2";
    let mut machines: Vec<Process> = (0..3).map(|_| started(&schema, &dir, &ONCE, script)).collect();
    for machine in &mut machines {
        assert_eq!(machine.end().code(), Some(0), "who did not run it saw it end well");
    }
    assert_eq!(dir.read("runs"), "ran by 000000000000001 in 20261128\n");
    assert_eq!(rows(&schema), 0, "the lock was let go");
    // Somebody comes late.
    let args = [&["run", "--key", "key"][..], &ONCE, &["--", "false"]].concat();
    assert_eq!(said(&schema, &args).0, 0, "done already, and not started");
}

#[test]
fn what_failed_is_run_again_in_the_same_period() {
    let (schema, dir) = (support::schema(), Dir::new());
    let script = "if [ -e tried ]; then echo ran >>runs; exit 0; fi; touch tried; exit 7";
    assert_eq!(started(&schema, &dir, &ONCE, script).end().code(), Some(7));
    assert_eq!(started(&schema, &dir, &ONCE, script).end().code(), Some(0));
    assert_eq!(started(&schema, &dir, &ONCE, script).end().code(), Some(0));
    assert_eq!(dir.read("runs"), "ran\n");
}

#[test]
fn a_machine_that_dies_is_replaced_by_one_that_waits() {
    let (schema, dir, other) = (support::schema(), Dir::new(), Dir::new());
    let mut first = running(&schema, &dir, &["--once", "daily", "--ttl", "4s"], "touch ready; sleep 100");
    let script = "echo $SYNCGUARD_FENCE >fence; touch ready";
    let mut second = started(&schema, &other, &["--once", "daily"], script);
    first.signal("KILL");
    first.end();
    assert_eq!(second.end().code(), Some(0), "{}", other.read("log"));
    assert_eq!(other.read("fence"), "000000000000002\n");
}

#[test]
fn who_does_not_wait_is_told_that_it_runs_elsewhere() -> Done {
    let (schema, dir, other) = (support::schema(), Dir::new(), Dir::new());
    let mut first = running(&schema, &dir, &ONCE, "touch ready; while [ ! -e end ]; do sleep 0.02; done");
    let options = [&ONCE[..], &["--wait", "0"]].concat();
    let mut second = started(&schema, &other, &options, "touch ready");
    assert_eq!(second.end().code(), Some(75));
    assert!(other.read("log").contains("is already running elsewhere"), "{}", other.read("log"));
    fs::write(dir.path("end"), "")?;
    assert_eq!(first.end().code(), Some(0));
    Ok(())
}

#[test]
fn at_most_once_is_not_started_again_after_a_failure() {
    let (schema, dir) = (support::schema(), Dir::new());
    let options = [&ONCE[..], &["--at-most-once"]].concat();
    let script = "echo ran >>runs; exit 7";
    assert_eq!(started(&schema, &dir, &options, script).end().code(), Some(7));
    assert_eq!(started(&schema, &dir, &options, script).end().code(), Some(0), "not started");
    assert_eq!(dir.read("runs"), "ran\n");
}

#[test]
fn a_run_that_loses_its_lock_is_stopped_and_not_taken_for_done() -> Done {
    let (schema, dir) = (support::schema(), Dir::new());
    let options = [&ONCE[..], &["--ttl", "6s"]].concat();
    let mut command = running(&schema, &dir, &options, "touch ready; sleep 100");
    schema.client().execute("DELETE FROM syncguard_locks", &[])?;
    assert_eq!(command.end().code(), Some(76));
    let again = Dir::new();
    assert_eq!(started(&schema, &again, &options, "touch ready").end().code(), Some(0));
    assert!(again.path("ready").exists());
    Ok(())
}

#[test]
fn a_signal_reaches_the_run_and_leaves_it_undone() {
    let (schema, dir) = (support::schema(), Dir::new());
    let mut command = running(&schema, &dir, &ONCE, "touch ready; exec sleep 100");
    command.signal("TERM");
    assert_eq!(command.end().code(), Some(143));
    wait_until(LIMIT, "the lock was let go", || rows(&schema) == 0);
    assert_eq!(
        said(&schema, &[&["run", "--key", "key"][..], &ONCE, &["--", "sh", "-c", "exit 3"]].concat()).0,
        3
    );
}
