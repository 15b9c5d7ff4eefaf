//! `elect`: a program that runs while this process leads.

use crate::Done;
use crate::program::{Dir, Process, lives, said, syncguard};
use crate::support::{self, LIMIT, TestSchema, wait_until};

/// Says in files who leads, until it is to end.
const LEADS: &str = "echo $SYNCGUARD_FENCE >>terms; echo $$ >new; mv new self; while [ ! -e end ]; do sleep 0.02; done; exit 6";

fn candidate(schema: &TestSchema, dir: &Dir) -> Process {
    let mut command =
        syncguard(schema, &["elect", "--key", "leader", "--ttl", "6s", "--", "sh", "-c", LEADS]);
    Process::start_logged(command.current_dir(dir.path("")), dir)
}

#[test]
fn one_leads_and_another_follows_when_it_dies_or_steps_down() -> Done {
    let (schema, dirs) = (support::schema(), [Dir::new(), Dir::new(), Dir::new()]);
    let mut first = candidate(&schema, &dirs[0]);
    dirs[0].wait_for("self");
    let mut second = candidate(&schema, &dirs[1]);
    first.signal("KILL");
    first.end();
    dirs[1].wait_for("self");
    wait_until(LIMIT, "the dead leader's program has ended", || !lives(dirs[0].pid("self")));
    assert_eq!(dirs[1].read("terms"), "000000000000002\n");

    let mut third = candidate(&schema, &dirs[2]);
    std::fs::write(dirs[1].path("end"), "")?;
    assert_eq!(second.end().code(), Some(6), "a leader whose program ends has its code");
    dirs[2].wait_for("self");
    assert_eq!(dirs[2].read("terms"), "000000000000003\n");
    third.signal("TERM");
    assert_eq!(third.end().code(), Some(143));
    Ok(())
}

#[test]
fn a_leader_that_is_not_one_any_more_is_stopped_and_campaigns_again() -> Done {
    let (schema, dir) = (support::schema(), Dir::new());
    let mut command = candidate(&schema, &dir);
    dir.wait_for("self");
    let before = dir.pid("self");
    schema.client().execute("DELETE FROM syncguard_locks", &[])?;
    wait_until(LIMIT, "it leads again", || dir.read("terms") == "000000000000001\n000000000000002\n");
    assert!(!lives(before), "the program of the old term has ended");
    assert!(!command.has_ended());
    std::fs::write(dir.path("end"), "")?;
    assert_eq!(command.end().code(), Some(6));
    Ok(())
}

#[test]
fn a_candidate_can_be_stopped() {
    let schema = support::schema();
    let client = syncguard::PgLockClient::connect(&schema.url()).unwrap();
    let _held = client.lock("leader").unwrap();
    let dir = Dir::new();
    let mut command = candidate(&schema, &dir);
    command.signal("INT");
    let code = command.end();
    // Before it listens, the signal ends it as any program.
    assert!(code.code() == Some(130) || code.code().is_none(), "{code:?}");
    assert!(!dir.path("self").exists());
    let (code, _, err) = said(&schema, &["elect", "--key", "k", "--on-lost", "ignore", "--", "true"]);
    assert!(code == 64 && err.contains("two leaders"), "{err}");
}
