//! Statuses, signals, and what is left when something is killed.

use std::fs;
use std::io::Read as _;
use std::process::{Command, Stdio};

use crate::Done;
use crate::program::{Dir, SYNCGUARD, lives, rows, running, said, signal, syncguard};
use crate::support::{self, LIMIT, wait_until};

#[test]
fn the_programs_end_is_passed_on_and_it_knows_its_lock() {
    let schema = support::schema();
    let script = "echo $SYNCGUARD_KEY $SYNCGUARD_FENCE ${#SYNCGUARD_LOCK_ID}; exit 3";
    let (code, out, err) = said(&schema, &["run", "--key", "a key", "--", "sh", "-c", script]);
    assert_eq!((code, out.as_str(), err.as_str()), (3, "a key 000000000000001 22\n", ""));
    assert_eq!(rows(&schema), 0, "the lock was let go");
    for (program, code) in [
        (&["sh", "-c", "kill -9 $$"][..], 137),
        (&["sh", "-c", "kill -TERM $$"], 143),
        (&["sh", "-c", "exit 75"], 75),
        (&["/nowhere/nothing"], 127),
        (&["/"], 126),
        (&["true"], 0),
    ] {
        let args = [&["run", "--key", "key", "--"][..], program].concat();
        assert_eq!(said(&schema, &args).0, code, "{program:?}");
        assert_eq!(rows(&schema), 0, "the lock was let go after {program:?}");
    }
}

#[test]
fn the_program_is_executed_directly_with_its_words_as_they_are() {
    let schema = support::schema();
    let (code, out, _) =
        said(&schema, &["run", "--key", "key", "--", "printf", "[%s]", "a b", "$HOME", "--ttl"]);
    assert_eq!((code, out.as_str()), (0, "[a b][$HOME][--ttl]"));
}

/// Each notes the signals that it gets. The child has a shell's background job's part: SIGINT and SIGQUIT are off.
const NOTES: &str = "for name in TERM INT HUP QUIT; do trap \"echo $name >>got\" $name; done; \
     sh -c 'for name in TERM HUP; do trap \"echo $name >>childgot\" $name; done; echo $$ >child; \
            while :; do sleep 0.05; done' & \
     while [ ! -s child ]; do sleep 0.01; done; echo $$ >self; touch ready; while :; do sleep 0.05; done";

#[test]
fn signals_reach_the_program_and_its_children() {
    let (schema, dir) = (support::schema(), Dir::new());
    let mut command = running(&schema, &dir, &[], NOTES);
    for name in ["TERM", "INT", "HUP", "QUIT"] {
        command.signal(name);
        wait_until(LIMIT, &format!("{name} is noted"), || dir.read("got").contains(name));
        if matches!(name, "TERM" | "HUP") {
            wait_until(LIMIT, &format!("{name} is noted by the child"), || {
                dir.read("childgot").contains(name)
            });
        }
    }
    assert!(!command.has_ended(), "the program decides when it ends");
    assert_eq!(rows(&schema), 1, "and has the lock till then");
    signal(dir.pid("self"), "KILL");
    assert_eq!(command.end().code(), Some(137));
    assert_eq!(rows(&schema), 0, "the lock was let go");
    signal(dir.pid("child"), "KILL");
    assert!(dir.read("log").contains("left processes behind"), "{}", dir.read("log"));
}

#[test]
fn the_programs_own_answer_to_a_signal_is_the_exit_code() {
    let (schema, dir) = (support::schema(), Dir::new());
    let script = "trap 'exit 5' TERM; touch ready; while :; do sleep 0.05; done";
    let mut command = running(&schema, &dir, &[], script);
    command.signal("TERM");
    assert_eq!(command.end().code(), Some(5));
    assert_eq!(rows(&schema), 0, "the lock was let go");
}

#[test]
fn a_signal_that_was_switched_off_stays_off() {
    let (schema, dir) = (support::schema(), Dir::new());
    let mut command = Command::new("sh");
    let line = format!(
        "trap '' HUP; exec '{SYNCGUARD}' run --key key -- sh -c 'touch ready; while [ ! -e end ]; do sleep 0.02; done'"
    );
    command.args(["-c", &line]).env("SYNCGUARD_URL", schema.url()).current_dir(dir.path(""));
    let mut command = crate::program::Process::start(&mut command);
    dir.wait_for("ready");
    command.signal("HUP");
    fs::write(dir.path("end"), "").expect("the directory can be written");
    assert_eq!(command.end().code(), Some(0), "as with nohup, nobody was hung up on");
}

/// A program with a child of its own; neither listens to SIGTERM.
const FAMILY: &str = "trap '' TERM; sh -c 'echo $$ >child; while :; do sleep 0.05; done' & \
     while [ ! -s child ]; do sleep 0.01; done; echo $$ >self; touch ready; wait";

#[test]
fn a_killed_command_takes_the_program_and_its_children_with_it() {
    let (schema, dir) = (support::schema(), Dir::new());
    let mut command = running(&schema, &dir, &[], FAMILY);
    command.signal("KILL");
    command.end();
    for file in ["self", "child"] {
        wait_until(LIMIT, &format!("the {file} has ended"), || !lives(dir.pid(file)));
    }
}

/// The processes that have this one as their parent, with their arguments.
#[cfg(target_os = "linux")]
fn children_of(parent: u32) -> Vec<(u32, String)> {
    let entries = fs::read_dir("/proc").expect("there are processes").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let status = |pid: u32| fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let of_parent = pids.filter(|&pid| status(pid).lines().any(|line| line == format!("PPid:\t{parent}")));
    of_parent
        .map(|pid| {
            (pid, fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default().replace('\0', " "))
        })
        .collect()
}

#[test]
#[cfg(target_os = "linux")]
fn the_kernel_ends_the_program_where_the_watcher_cannot() {
    let (schema, dir) = (support::schema(), Dir::new());
    let mut command = running(&schema, &dir, &[], "echo $$ >self; touch ready; while :; do sleep 0.05; done");
    let helpers = children_of(command.id());
    let (watcher, _) =
        helpers.iter().find(|(_, words)| words.contains("__watcher")).expect("there is a watcher");
    signal(*watcher, "KILL");
    wait_until(LIMIT, "the watcher has ended", || !lives(*watcher));
    command.signal("KILL");
    command.end();
    wait_until(LIMIT, "the program has ended", || !lives(dir.pid("self")));
}

#[test]
#[cfg(target_os = "linux")]
fn a_program_whose_command_was_killed_before_it_began_is_not_started() {
    let dir = Dir::new();
    // As if the parent, here process 1, had been another.
    let made = dir.path("made");
    let status =
        Command::new(SYNCGUARD).args(["__child", "1", "touch"]).arg(&made).status().expect("it runs");
    assert_eq!(status.code(), Some(137));
    assert!(!made.exists());
}

#[test]
fn a_grandchild_that_keeps_the_output_open_keeps_neither_the_command_nor_the_lock() {
    let (schema, dir) = (support::schema(), Dir::new());
    // It keeps the pipes of the command, as a daemon does that was started carelessly.
    let script = format!(
        "cd '{}'; sh -c 'echo $$ >child; while [ ! -e end ]; do sleep 0.05; done' & \
         while [ ! -s child ]; do sleep 0.01; done; exit 4",
        dir.path("").display()
    );
    let mut command = syncguard(&schema, &["run", "--key", "key", "--", "sh", "-c", &script]);
    let mut command = crate::program::Process(
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts"),
    );
    assert_eq!(command.end().code(), Some(4));
    assert!(lives(dir.pid("child")), "what the program left goes on, and is not waited for");
    assert_eq!(rows(&schema), 0, "the lock was let go");
    fs::write(dir.path("end"), "").expect("the directory can be written");
    let mut err = String::new();
    command.0.stderr.take().expect("it is piped").read_to_string(&mut err).expect("it is text");
    assert!(err.contains("go on without the lock"), "{err}");
}

#[test]
fn nothing_that_is_secret_is_printed_or_left_in_arguments() -> Done {
    let (schema, dir) = (support::schema(), Dir::new());
    let script =
        "echo $SYNCGUARD_LOCK_ID >id; env >env; touch ready; while [ ! -e end ]; do sleep 0.02; done";
    let url = schema.url().replacen("://postgres@", "://postgres:MARKER-pass@", 1);
    let mut command = crate::program::bare();
    command.env("SYNCGUARD_URL", &url).args(["run", "--key", "key", "--", "sh", "-c", script]);
    command.current_dir(dir.path(""));
    let mut process = crate::program::Process::start_logged(&mut command, &dir);
    dir.wait_for("ready");
    let id = dir.read("id").trim().to_owned();
    assert_eq!(id.len(), 22);
    #[cfg(target_os = "linux")]
    for (_, words) in children_of(process.id()) {
        assert!(!words.contains(&id) && !words.contains("MARKER"), "{words}");
    }
    for args in [
        &["list"][..],
        &["list", "--json"],
        &["status", "key"],
        &["status", "key", "--json"],
        &["waiters", "key"],
        &["--url", "postgresql://postgres:MARKER-pass@127.0.0.1:1/x", "list"],
        &["--url", "postgresql://a:MARKER-pass@b@c/x", "list"],
        &["--url", "host=x MARKER-pass", "list"],
    ] {
        let (_, out, err) = said(&schema, args);
        assert!(
            !format!("{out}{err}").contains(&id) && !format!("{out}{err}").contains("MARKER"),
            "{out}{err}"
        );
    }
    fs::write(dir.path("end"), "")?;
    assert_eq!(process.end().code(), Some(0));
    Ok(())
}
