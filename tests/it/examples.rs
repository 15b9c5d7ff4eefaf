//! The examples do what they say, on a real server and as real processes.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::c::compile;
use crate::support::{LIMIT, TestSchema, together, wait_until};

type Done = Result<(), Box<dyn std::error::Error>>;

/// Builds the examples as this test was built, and says where they are. After a
/// plain `cargo test` most of it is there; after `cargo test --test examples` it may be old or missing.
fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let test = env::current_exe().expect("a program knows its file");
        let profile_dir = test.parent().and_then(Path::parent).expect("tests are built into PROFILE/deps");
        let profile = match profile_dir.file_name().and_then(|name| name.to_str()) {
            Some("debug") => "dev",
            other => other.expect("a profile has a name"),
        };
        let target = profile_dir.parent().expect("a profile is in a target directory");
        let status = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["build", "--quiet", "-p", "syncguard", "--lib", "--examples"])
            .args(["--profile", profile, "--target-dir"])
            .arg(target)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status();
        assert!(status.is_ok_and(|status| status.success()), "the examples build");
        profile_dir.to_owned()
    })
}

fn example(name: &str, url: &str) -> Command {
    let mut command = Command::new(built().join("examples").join(name));
    command.env("SYNCGUARD_URL", url).stdin(Stdio::null());
    command
}

/// A process that is killed when the test ends.
struct Process(Child);

impl Process {
    fn start(command: &mut Command) -> Self {
        Self(command.spawn().expect("the example starts"))
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.0.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()), "kill -s {name}");
    }

    /// Its end, which must come by itself.
    fn end(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until(LIMIT, "the example ends", || {
            status = self.0.try_wait().expect("our child can be waited for");
            status.is_some()
        });
        status.expect("it has ended")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A directory of this test's own.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        let path = env::temp_dir().join(format!("syncguard_examples_{}", crate::support::unique()));
        fs::create_dir(&path).expect("the temporary directory can be written");
        Self(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

// ---- quickstart

fn quickstart(schema: &TestSchema, args: &[&str]) -> String {
    let output = example("quickstart", &schema.url()).args(args).output().expect("it runs");
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", text(&output.stderr));
    said
}

/// What a demonstration prints where nobody looks at colours, on a terminal of so many columns.
fn is_plain_and_fits(said: &str, columns: usize) {
    assert!(!said.contains('\x1b'), "no colours in a pipe");
    for line in said.lines() {
        assert!(line.chars().count() <= columns, "{line}");
    }
}

#[test]
fn quickstart_loses_no_update_though_a_holder_is_killed() {
    let schema = crate::support::schema();
    let said = quickstart(&schema, &["--ttl", "3", "--rounds", "3"]);
    assert!(said.ends_with("No update was lost.\n"), "{said}");
    assert!(said.contains("KILLED while it holds the lock") && said.contains("TAKEOVER"), "{said}");
    // Three processes do three rounds, the killed one does one.
    assert!(said.contains("reported as done: 10. Balance: 10."), "{said}");
    assert!(said.contains("11 grants, from 1 to 11, each above the one before"), "{said}");
    is_plain_and_fits(&said, 80);
}

#[test]
fn quickstart_without_the_lock_loses_updates() {
    let said = quickstart(&crate::support::schema(), &["--without-lock"]);
    let lost = said.split_once("LOST UPDATES: ").and_then(|(_, rest)| rest.split_once('.'));
    let lost: u32 = lost.and_then(|(number, _)| number.parse().ok()).expect("it says how many");
    assert!(lost > 0, "{said}");
}

#[test]
fn lines_wrap_at_the_width_that_is_told_with_as_many_processes_as_there_may_be() {
    let schema = crate::support::schema();
    let args = ["--ttl", "3", "--rounds", "2", "--workers", "8"];
    for columns in [80, 54] {
        let mut command = example("quickstart", &schema.url());
        let output = command.args(args).env("COLUMNS", columns.to_string()).output().expect("it runs");
        let said = text(&output.stdout);
        assert!(output.status.success() && said.ends_with("No update was lost.\n"), "{said}");
        is_plain_and_fits(&said, columns);
        // As wide as there is room: the last process has its label and all of its cells.
        let drawn =
            said.lines().filter(|line| line.starts_with("  process 1  ")).map(|line| line.chars().count());
        assert_eq!(drawn.max(), Some(columns), "{said}");
    }
}

#[test]
fn a_verdict_has_its_colour_where_colours_are_wanted() {
    let good = "\x1b[1;32mNo update was lost.\x1b[0m";
    let schema = crate::support::schema();
    for (variables, coloured) in [
        (vec![("CLICOLOR_FORCE", "1")], true),
        (vec![("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")], false),
        (vec![("CLICOLOR_FORCE", ""), ("NO_COLOR", "")], false),
    ] {
        let mut command = example("quickstart", &schema.url());
        let output = command.args(["--ttl", "3", "--rounds", "2"]).envs(variables).output().expect("it runs");
        let said = text(&output.stdout);
        assert_eq!((said.contains(good), said.contains('\x1b')), (coloured, coloured), "{said}");
    }
    let mut command = example("quickstart", &schema.url());
    let output = command.arg("--without-lock").env("CLICOLOR_FORCE", "1").output().expect("it runs");
    assert!(text(&output.stdout).contains("\x1b[1;31mLOST UPDATES: "), "{}", text(&output.stdout));
}

#[test]
fn demonstrations_say_what_to_do_without_an_address_and_with_what_they_do_not_know() {
    for name in ["quickstart", "election", "once", "readers", "late_writer"] {
        let output = example(name, "").output().expect("it runs");
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains("scripts/demo"), "{name}: {said}");
        let output = example(name, "postgresql://nowhere").arg("--nonsense").output().expect("it runs");
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains("see --help"), "{name}: {said}");
    }
}

// ---- election

#[test]
fn election_hands_over_and_survives_a_kill() {
    let output = example("election", &crate::support::schema().url()).output().expect("it runs");
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", text(&output.stderr));
    assert!(said.contains("steps down") && said.contains("KILLED while it leads"), "{said}");
    assert!(said.contains("Terms: 4, each above the one before."), "{said}");
    assert!(said.ends_with("The server named each leader: yes.\n"), "{said}");
    is_plain_and_fits(&said, 80);
}

// ---- once

fn once(args: &[&str]) -> String {
    let output = example("once", &crate::support::schema().url()).args(args).output().expect("it runs");
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", text(&output.stderr));
    is_plain_and_fits(&said, 80);
    said
}

#[test]
fn once_does_each_slot_once_though_a_clock_is_ahead_and_a_run_is_killed() {
    let said = once(&[]);
    assert!(said.contains("by its clock: not yet"), "{said}");
    assert!(
        said.contains("KILLED in the middle of its run") && said.contains("the same slot, run again"),
        "{said}"
    );
    assert!(said.contains(", one each.\n"), "{said}");
    assert!(said.ends_with("The slot of the crash was run again: yes.\n"), "{said}");
}

#[test]
fn a_lock_in_the_place_of_once_runs_the_job_again_and_again() {
    let said = once(&["--lock-only"]);
    let more = said.split_once("RUN MORE THAN ONCE: ").and_then(|(_, rest)| rest.split_once(" of "));
    let more: u32 = more.and_then(|(slots, _)| slots.parse().ok()).expect("it says how many slots");
    assert!(more > 0, "{said}");
}

#[test]
fn the_demonstrations_are_listed_and_each_says_how_it_is_run() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/demo");
    let output = Command::new(demo).arg("--help").output().expect("it runs");
    let listed = text(&output.stdout);
    assert!(output.status.success(), "{listed}");
    let demonstrations = [
        ("[OPTIONS]", "quickstart"),
        ("election", "election"),
        ("once", "once"),
        ("readers", "readers"),
        ("late_writer", "late_writer"),
    ];
    for (name, example_name) in demonstrations {
        assert!(listed.contains(&format!("scripts/demo {name} ")), "{listed}");
        let output = example(example_name, "").arg("--help").output().expect("it runs");
        assert!(output.status.success() && text(&output.stdout).contains("scripts/demo"), "{example_name}");
    }
}

// ---- readers

fn readers(args: &[&str]) -> String {
    let output = example("readers", &crate::support::schema().url()).args(args).output().expect("it runs");
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", text(&output.stderr));
    is_plain_and_fits(&said, 80);
    said
}

#[test]
fn readers_read_together_and_the_writer_is_alone_though_a_reader_is_killed() {
    let said = readers(&[]);
    assert!(said.contains("reads, 2 at a time") && said.contains("writes, alone"), "{said}");
    assert!(said.contains("KILLED while it reads") && said.contains("the dead lease is over"), "{said}");
    assert!(said.contains("The writer was alone each time: yes.\n"), "{said}");
    assert!(said.ends_with("Reads of prices that were half changed: 0.\n"), "{said}");
}

#[test]
fn without_a_lock_readers_see_prices_that_are_half_changed() {
    let said = readers(&["--without-lock"]);
    let torn = said.split_once("HALF CHANGED: ").and_then(|(_, rest)| rest.split_once(" of "));
    let torn: u32 = torn.and_then(|(torn, _)| torn.parse().ok()).expect("it says how many reads");
    assert!(torn > 0, "{said}");
}

// ---- late_writer

#[test]
fn a_late_write_is_lost_work_without_a_fence_and_refused_with_one() {
    let output = example("late_writer", &crate::support::schema().url()).output().expect("it runs");
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", text(&output.stderr));
    let acts: Vec<&str> = said.trim_end().split("\n\n").collect();
    let [bare, transaction, beside] = acts.as_slice() else { panic!("{said}") };
    assert!(
        bare.contains("pays 1 in: done")
            && bare.ends_with("the balance is 101: the second holder's 10 are LOST"),
        "{bare}"
    );
    for act in [transaction, beside] {
        assert!(
            act.contains("pays 1 in: refused") && act.ends_with("the balance is 110: nothing is lost"),
            "{act}"
        );
    }
}

// ---- threaded_server

/// A running server and its address.
fn http_server(url: &str) -> (Process, String) {
    let mut process = Process::start(example("threaded_server", url).stdout(Stdio::piped()));
    let mut line = String::new();
    let stdout = process.0.stdout.as_mut().expect("stdout is piped");
    BufReader::new(stdout).read_line(&mut line).expect("it speaks");
    let address = line.trim().strip_prefix("listening on http://").expect("it says where it listens");
    (process, address.to_owned())
}

/// The status, the headers and the body of an answer.
fn http(address: &str, method: &str, path: &str, body: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).expect("the server listens");
    stream.set_read_timeout(Some(LIMIT)).expect("a timeout can be set");
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {length}");
    write!(stream, "{head}\r\n\r\n{body}").expect("the server reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("the server answers");
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer has a head");
    let status =
        head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("an answer has a status");
    (status, head.to_ascii_lowercase(), body.trim().to_owned())
}

#[test]
fn two_http_servers_lose_no_deposit() {
    let schema = crate::support::schema();
    let servers = [http_server(&schema.url()), http_server(&schema.url())];
    let done = AtomicUsize::new(0);
    let busy = AtomicUsize::new(0);
    let balances = together(8, |thread| {
        let address = &servers.get(thread % 2).expect("two servers").1;
        let mut seen = Vec::new();
        while seen.len() < 10 {
            let (status, head, body) = http(address, "POST", "/accounts/alice/deposits", "3");
            match status {
                200 => {
                    done.fetch_add(1, Ordering::Relaxed);
                    seen.push(body);
                }
                503 => {
                    assert!(head.contains("retry-after: "), "{head}");
                    assert!(busy.fetch_add(1, Ordering::Relaxed) < 1000, "{body}");
                }
                _ => panic!("{status}: {body}"),
            }
        }
        seen
    });
    assert_eq!(done.into_inner(), 80);
    // Every deposit saw a balance of its own: none overwrote another.
    let all: BTreeSet<_> = balances.into_iter().flatten().collect();
    assert_eq!(all.len(), 80);
    assert_eq!(http(&servers[0].1, "GET", "/accounts/alice", "").2, "240");
    assert_eq!(http(&servers[1].1, "GET", "/nowhere", "").0, 404);
    for (mut process, _) in servers {
        process.signal("TERM");
        let mut said = String::new();
        process.0.stdout.take().expect("stdout is piped").read_to_string(&mut said).expect("it speaks");
        assert!(process.end().success());
        assert!(said.contains("nothing left behind: true"), "{said}");
    }
    assert_eq!(rows(&schema), 0, "no lease is left");
}

#[test]
fn a_busy_account_is_answered_with_503_and_retry_after() -> Done {
    let schema = crate::support::schema();
    let (_process, address) = http_server(&schema.url());
    let client = syncguard::PgLockClient::connect(&schema.url())?;
    let guard = client.lock("example:account:bob")?;
    let (status, head, _) = http(&address, "POST", "/accounts/bob/deposits", "1");
    assert_eq!(status, 503);
    assert!(head.contains("retry-after: 1"), "{head}");
    guard.release()?;
    assert_eq!(http(&address, "POST", "/accounts/bob/deposits", "1").2, "1");
    Ok(())
}

fn rows(schema: &TestSchema) -> i64 {
    let row = schema.client().query_one("SELECT count(*) FROM syncguard_locks", &[]);
    row.expect("the lock table is there").get(0)
}

// ---- the C interface

#[test]
fn two_c_programs_lose_no_transfer() -> Done {
    let (schema, dir) = (crate::support::schema(), Dir::new());
    let program = compile("cc", "examples/transfer.c", &dir.0, &["-std=c99", "-pedantic"]);
    let accounts = dir.0.join("accounts");
    fs::write(&accounts, "100 0\n")?;
    let statuses = together(2, |_| {
        let mut command = Command::new(&program);
        command.args([schema.url(), schema.name().to_owned()]).arg(&accounts).arg("30");
        Process::start(&mut command).end()
    });
    assert!(statuses.iter().all(ExitStatus::success), "{statuses:?}");
    assert_eq!(fs::read_to_string(&accounts)?, "40 60\n");
    assert_eq!(rows(&schema), 0, "no lease is left");

    let output = Command::new(&program).args(["nonsense", schema.name(), "no-file", "1"]).output()?;
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).starts_with("connect: InvalidArgument: "), "{}", text(&output.stderr));
    Ok(())
}

#[test]
fn own_backend_fulfils_every_case_of_the_contract() {
    let output = example("own_backend", "").output().expect("the example runs");
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    assert!(said.contains("fulfils all") && !said.contains(" 0 cases"), "{said}");
}
