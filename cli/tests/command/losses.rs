//! Programs end before their lease does.

use std::fs;

use crate::Done;
use crate::program::{Dir, lives, running, said};
use crate::support::{self, LIMIT, wait_until};

/// Neither the shell nor its child listens to SIGTERM.
const STUBBORN: &str = "trap '' TERM; sleep 100 & echo $! >child; echo $$ >self; touch ready; wait";

#[test]
fn a_lost_lock_ends_the_program_and_its_children() -> Done {
    for options in [&["--ttl", "6s"][..], &["--ttl", "6s", "--on-lost", "kill"]] {
        let (schema, dir) = (support::schema(), Dir::new());
        let mut command = running(&schema, &dir, options, STUBBORN);
        schema.client().execute("DELETE FROM syncguard_locks", &[])?;
        assert_eq!(command.end().code(), Some(76), "{options:?}");
        for file in ["self", "child"] {
            wait_until(LIMIT, "the whole group has ended", || !lives(dir.pid(file)));
        }
        assert!(
            dir.read("log").contains("the lock is lost (the lease's row is gone)"),
            "{}",
            dir.read("log")
        );
    }
    Ok(())
}

#[test]
fn whoever_the_program_leaves_when_it_is_stopped_is_ended_with_it() -> Done {
    let (schema, dir) = (support::schema(), Dir::new());
    let script = "trap 'exit 0' TERM; sh -c 'trap \"\" TERM; echo $$ >child; while :; do sleep 0.05; done' & \
                  while [ ! -s child ]; do sleep 0.01; done; touch ready; while :; do sleep 0.05; done";
    let mut command = running(&schema, &dir, &["--ttl", "20s", "--grace", "9s"], script);
    schema.client().execute("DELETE FROM syncguard_locks", &[])?;
    assert_eq!(command.end().code(), Some(76));
    wait_until(LIMIT, "its child has ended", || !lives(dir.pid("child")));
    Ok(())
}

#[test]
fn the_program_is_asked_to_stop_and_has_the_grace_for_it() -> Done {
    let (schema, dir) = (support::schema(), Dir::new());
    let script =
        "trap 'sleep 0.2; echo tidy >tidied; exit 0' TERM; touch ready; while :; do sleep 0.02; done";
    let mut command = running(&schema, &dir, &["--ttl", "20s", "--grace", "9s", "--lost-code", "9"], script);
    schema.client().execute("DELETE FROM syncguard_locks", &[])?;
    assert_eq!(command.end().code(), Some(9), "lost, although the program ended well");
    assert_eq!(dir.read("tidied"), "tidy\n");
    Ok(())
}

#[test]
fn a_command_can_ask_the_program_to_stop() -> Done {
    let (schema, dir) = (support::schema(), Dir::new());
    let ask = "echo $SYNCGUARD_KEY $SYNCGUARD_GROUP >asked; touch stop; sleep 100";
    let script = "trap '' TERM; echo $$ >self; touch ready; while [ ! -e stop ]; do sleep 0.02; done; echo tidy >tidied";
    let options = ["--ttl", "20s", "--grace", "9s", "--on-lost", ask];
    let mut command = running(&schema, &dir, &options, script);
    schema.client().execute("DELETE FROM syncguard_locks", &[])?;
    assert_eq!(command.end().code(), Some(76), "the command that asks is not waited for");
    assert_eq!(dir.read("tidied"), "tidy\n");
    assert_eq!(dir.read("asked"), format!("key {}\n", dir.pid("self")));

    // Where it is of no use, the end comes all the same.
    let (schema, dir) = (support::schema(), Dir::new());
    let mut command = running(&schema, &dir, &["--ttl", "6s", "--on-lost", "exec false"], STUBBORN);
    schema.client().execute("DELETE FROM syncguard_locks", &[])?;
    assert_eq!(command.end().code(), Some(76));
    wait_until(LIMIT, "the program has ended", || !lives(dir.pid("self")));
    Ok(())
}

#[test]
fn a_program_that_may_go_on_ends_with_its_own_code() -> Done {
    let (schema, dir) = (support::schema(), Dir::new());
    let script = "touch ready; while [ ! -e end ]; do sleep 0.02; done; exit 5";
    let mut command = running(&schema, &dir, &["--ttl", "6s", "--on-lost", "ignore"], script);
    schema.client().execute("DELETE FROM syncguard_locks", &[])?;
    wait_until(LIMIT, "the loss is told", || dir.read("log").contains("the program goes on"));
    fs::write(dir.path("end"), "")?;
    assert_eq!(command.end().code(), Some(5));
    Ok(())
}

#[test]
fn the_program_is_asked_to_stop_and_stopped_before_the_lease_is_over() -> Done {
    for (options, asked) in [(&["--ttl", "6s"][..], "asked\n"), (&["--ttl", "6s", "--on-lost", "kill"], "")] {
        let (schema, dir) = (support::schema(), Dir::new());
        // Notes SIGTERM and goes on, and leaves the last moment in which it worked.
        let script = "trap 'echo asked >asked' TERM; echo $$ >self; while :; do \
                      date +%s%3N >new; mv new worked_at; touch ready; sleep 0.02; done";
        let mut command = running(&schema, &dir, options, script);
        // Renewals find the table locked and get no answer; only this session can read the row.
        let mut blocker = schema.client();
        let mut transaction = blocker.transaction()?;
        transaction.batch_execute("LOCK TABLE syncguard_locks IN ACCESS EXCLUSIVE MODE")?;
        wait_until(LIMIT, "the program has ended", || !lives(dir.pid("self")));
        let end: i64 = transaction.query_one("SELECT expires_at_ms FROM syncguard_locks", &[])?.get(0);
        let worked_at: i64 = dir.read("worked_at").trim().parse()?;
        // One machine, one clock, on which the end may come late; nobody else is let in for a second more.
        assert!(worked_at < end + 1000, "{options:?}: worked at {worked_at}, the lease ended at {end}");
        assert_eq!(dir.read("asked"), asked, "{options:?}");
        transaction.rollback()?;
        assert_eq!(command.end().code(), Some(76));
    }
    Ok(())
}

#[test]
fn a_program_whose_lock_was_another_s_at_its_end_does_not_end_well() -> Done {
    let (schema, dir) = (support::schema(), Dir::new());
    // With a ttl this long no renewal notices it in time: only the release does.
    let script = "touch ready; while [ ! -e end ]; do sleep 0.02; done";
    let mut command = running(&schema, &dir, &["--ttl", "10m"], script);
    schema.client().execute("DELETE FROM syncguard_locks", &[])?;
    fs::write(dir.path("end"), "")?;
    assert_eq!(command.end().code(), Some(76));
    assert!(dir.read("log").contains("lost before the program ended"), "{}", dir.read("log"));
    Ok(())
}

#[test]
fn a_grace_that_does_not_fit_into_the_lease_is_refused() {
    let schema = support::schema();
    for (options, advice) in [
        (&["--ttl", "10s", "--grace", "5s"][..], "a --ttl of 10s"),
        (&["--ttl", "100ms"], "at least 1s"),
        (&["--ttl", "30"], "30s"),
        (&["--on-lost", "trem"], "term, kill, ignore"),
    ] {
        let args = [&["run", "--key", "key"][..], options, &["--", "true"]].concat();
        let (code, _, err) = said(&schema, &args);
        assert!(code == 64 && err.contains(advice), "{options:?}: {code} {err}");
    }
}
