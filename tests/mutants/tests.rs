//! The tests that kill: which of them pass on the server behind the proxy, what they send, and how long they take.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::mutant::{Mutant, mutants, statement};
use crate::support::sql::{Said, statements};
use crate::support::{Action, Proxy, Server};

/// The files of `tests/it` whose tests are run: what they ask the shared server for goes through the proxy. Of the contract
/// one round is enough: the others send the same.
const FILES: [&str; 39] = [
    "advisory",
    "advisory_limits",
    "advisory_refusals",
    "advisory_sql",
    "advisory_standby",
    "advisory_waiting",
    "busy_rows",
    "cancellation",
    "changed_rows",
    "check",
    "concurrency",
    "contract_postgres::client",
    "election",
    "fast_paths",
    "fences",
    "grants",
    "guards",
    "holding",
    "limits",
    "line_rows",
    "locking",
    "losses",
    "member_rows",
    "members_table",
    "once",
    "operators",
    "owners",
    "permits",
    "pools",
    "protocol_races",
    "readers",
    "schema_setup",
    "security",
    "sequences",
    "server_settings::durable",
    "several",
    "shared",
    "swallowed_changes",
    "turns",
];

/// Those of them that look at the protocol itself, which are run first.
const FIRST: [&str; 20] = [
    "busy_rows",
    "changed_rows",
    "concurrency",
    "contract_postgres::client",
    "fast_paths",
    "fences",
    "limits",
    "line_rows",
    "member_rows",
    "once",
    "owners",
    "permits",
    "protocol_races",
    "readers",
    "sequences",
    "server_settings::durable",
    "several",
    "shared",
    "swallowed_changes",
    "turns",
];

/// Whether a test is one of those.
pub fn is_first(name: &str) -> bool {
    FIRST.iter().any(|file| is_of(name, file))
}

/// Whether a test is one of this file, or of this module of it.
fn is_of(name: &str, file: &str) -> bool {
    name.strip_prefix(file).is_some_and(|rest| rest.starts_with("::"))
}

/// A test takes no longer than this, or it is not used here.
const LONGEST: Duration = Duration::from_secs(30);

/// How a run of some tests ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    Passed,
    /// The first test that failed.
    Failed(String),
    /// None had failed by then.
    TooLate,
}

/// The program of `tests/it`.
pub struct Program {
    pub path: String,
    pub histories: u32,
}

impl Program {
    /// The names of its tests that are used here: those of these files, or of all where none is named.
    pub fn names(&self, files: &str) -> Vec<String> {
        let list =
            Command::new(&self.path).args(["--list", "--format", "terse"]).output().expect("a test program");
        let list = String::from_utf8_lossy(&list.stdout).into_owned();
        let names = list.lines().filter_map(|line| line.strip_suffix(": test"));
        let used = |name: &&str| {
            FILES.iter().any(|file| is_of(name, file))
                && (files.is_empty() || files.split(',').any(|file| is_of(name, file)))
        };
        names.filter(used).map(str::to_owned).collect()
    }

    /// Runs these tests against the server behind the proxy, until one fails.
    pub fn run(&self, server: &Server, proxy: &Proxy, tests: &[&str], limit: Duration) -> Ended {
        let url = proxy.url(server.url());
        let mut child = Command::new(&self.path)
            .args(tests)
            .args(["--exact", "--test-threads=4"])
            .env("SYNCGUARD_TEST_URL", &url)
            .env("SYNCGUARD_TEST_SOCKET_URL", &url)
            .env("SYNCGUARD_SEQUENCES", self.histories.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("the test program starts");
        let (tell, said) = mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = tell.send(line);
            }
        });
        let end = Instant::now() + limit;
        let ended = loop {
            match said.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) if line.ends_with("... FAILED") => {
                    let name = line.trim_start_matches("test ").trim_end_matches(" ... FAILED");
                    break Ended::Failed(name.to_owned());
                }
                Ok(line) if line.starts_with("test result: ok") => break Ended::Passed,
                Ok(_) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => break Ended::TooLate,
                // It died.
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    break Ended::Failed("the whole program".to_owned());
                }
            }
        };
        // With the processes that its tests have started, those too that are stopped: nobody else would end them.
        let group = Pid::from_child(&child);
        let _ = kill_process_group(group, Signal::KILL);
        let _ = child.wait();
        ended
    }
}

/// What is known of the tests before anything is taken out.
#[derive(Default)]
pub struct Known {
    /// By test: how long it takes, and which statements it sends.
    pub tests: BTreeMap<String, (Duration, BTreeSet<String>)>,
    pub mutants: BTreeSet<Mutant>,
    pub unused: Vec<String>,
}

impl Known {
    /// One line per test and per mutant.
    pub fn write(&self) -> String {
        let mut out = String::new();
        for (name, (time, called)) in &self.tests {
            let called: Vec<_> = called.iter().map(String::as_str).collect();
            let _ = writeln!(out, "test\t{name}\t{}\t{}", time.as_millis(), called.join("\t"));
        }
        self.mutants.iter().for_each(|mutant| {
            let _ = writeln!(out, "mutant\t{mutant}");
        });
        self.unused.iter().for_each(|line| {
            let _ = writeln!(out, "unused\t{line}");
        });
        out
    }

    /// The same from such lines.
    pub fn read(text: &str) -> Self {
        let mut known = Self::default();
        for line in text.lines() {
            match line.split('\t').collect::<Vec<_>>().as_slice() {
                ["test", name, time, called @ ..] => {
                    let time = Duration::from_millis(time.parse().expect("milliseconds"));
                    let called = called.iter().map(|&name| name.to_owned()).collect();
                    known.tests.insert((*name).to_owned(), (time, called));
                }
                ["mutant", statement, part, nth] => {
                    let (statement, part) = ((*statement).to_owned(), (*part).to_owned());
                    known.mutants.insert(Mutant { statement, part, nth: nth.parse().expect("a number") });
                }
                _ => known.unused.push(line.to_owned()),
            }
        }
        known
    }
}

/// Runs each test alone, and notes what it sends.
pub fn learn(program: &Program, server: &Server, names: &[String]) -> Known {
    let (known, next) = (Mutex::new(Known::default()), Mutex::new(names.iter()));
    let lock = || known.lock().unwrap_or_else(PoisonError::into_inner);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let Some(name) = next.lock().unwrap_or_else(PoisonError::into_inner).next() else {
                        return;
                    };
                    let proxy = Proxy::start(server.port());
                    let sent = Arc::new(Mutex::new((BTreeSet::new(), BTreeSet::new())));
                    note(&proxy, &sent);
                    let start = Instant::now();
                    let ended = program.run(server, &proxy, &[name], LONGEST);
                    let mut known = lock();
                    if ended != Ended::Passed {
                        known.unused.push(format!("{name}: {ended:?}"));
                        continue;
                    }
                    let (called, all) =
                        std::mem::take(&mut *sent.lock().unwrap_or_else(PoisonError::into_inner));
                    known.tests.insert(name.clone(), (start.elapsed(), called));
                    known.mutants.extend(all);
                }
            });
        }
    });
    known.into_inner().unwrap_or_else(PoisonError::into_inner)
}

type Sent = Arc<Mutex<(BTreeSet<String>, BTreeSet<Mutant>)>>;

/// Which statements are called, by name or written out, and the mutants of all that are sent.
fn note(proxy: &Proxy, sent: &Sent) {
    let sent = Arc::clone(sent);
    proxy.on_query(move |message| {
        let mut sent = sent.lock().unwrap_or_else(PoisonError::into_inner);
        for range in statements(message) {
            let text = &message[range];
            // A call by name, or by the driver's Bind.
            let called =
                text.trim_start().strip_prefix("EXECUTE sg_").and_then(|rest| rest.split(['(', ' ']).next());
            if let Some((name, _digest)) = called.and_then(|called| called.rsplit_once('_')) {
                sent.0.insert(name.to_owned());
                continue;
            }
            let said = Said::read(text);
            if !said.text.starts_with("Parse ") {
                sent.1.extend(mutants(said));
            }
            if !text.trim_start().starts_with("PREPARE ") {
                sent.0.insert(statement(said));
            }
        }
        Action::Pass
    });
}
