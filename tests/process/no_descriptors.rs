//! A process that has no file descriptor left, or no thread: every call says which limit to raise,
//! nothing panics, and what could not be let go meanwhile is let go once there are some again.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::panic;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::support::leases::{connect, named, row, sessions, wait_until_released};
use crate::support::{LIMIT, Worker, wait_until, worker};
use rustix::process::{Resource, Rlimit, getrlimit, getuid, setrlimit};
use rustix::thread::{Uid, set_thread_uid};
use syncguard::{AdvisoryKey, Heartbeat, LockError, LockOptions, PgLockClient, ReleaseResult};

const NAME: &str = "no-descriptors";
/// Longer than the test: a row that goes has been released.
const TTL: Duration = Duration::from_secs(600);

/// What the process runs out of.
#[derive(Clone, Copy, PartialEq)]
enum Lack {
    Descriptors,
    Threads,
}

/// A user that has no process: root may start as many threads as it likes.
const NOBODY_ELSE: u32 = 1_918_273;

impl Lack {
    /// What an error has to name.
    fn limit(self) -> &'static str {
        match self {
            Self::Descriptors => "ulimit -n",
            Self::Threads => "ulimit -u",
        }
    }

    /// Before anything is started: threads are counted for the user of the thread that starts them, and
    /// have its user.
    fn prepare(self) {
        if self == Self::Threads && getuid().is_root() {
            set_thread_uid(Uid::from_raw(NOBODY_ELSE)).unwrap();
        }
    }

    /// Takes all that this process may have.
    fn use_up(self) -> Vec<File> {
        match self {
            Self::Descriptors => {
                set(Resource::Nofile, Some(256));
                std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
            }
            Self::Threads => {
                set(Resource::Nproc, Some(0));
                assert!(std::thread::Builder::new().spawn(|| {}).is_err(), "there is a thread left");
                Vec::new()
            }
        }
    }

    /// Gives all of it back.
    fn free(self, all: Vec<File>) {
        drop(all);
        if self == Self::Threads {
            set(Resource::Nproc, getrlimit(Resource::Nproc).maximum);
        }
    }
}

fn set(resource: Resource, current: Option<u64>) {
    setrlimit(resource, Rlimit { current, ..getrlimit(resource) }).unwrap();
}

/// In the process that runs out of it.
fn starve(lack: Lack, parent: &worker::Parent) {
    lack.prepare();
    let url = parent.arg("url");
    let client = || {
        let builder = PgLockClient::builder().operation_timeout(Duration::from_secs(5));
        connect(builder.dispose_timeout(Duration::from_secs(1)), &url)
    };
    let options = LockOptions::new().ttl(TTL);
    let (client, closing) = (client(), client());
    let dropped = client.lock_with("dropped", &options).unwrap();
    let released = client.lock_with("released", &options).unwrap();
    let extended = client.lock_with("extended", &options).unwrap();
    // Not before nothing is left: a renewal opens a connection.
    let late = Heartbeat::Every(Duration::from_secs(4));
    let renewed = LockOptions::new().ttl(Duration::from_secs(6)).heartbeat(late);
    let renewed = client.lock_with("renewed", &renewed).unwrap();
    let closed = closing.lock_with("closed", &options).unwrap();
    let session_lock = client.advisory_lock(&AdvisoryKey::from_text("no-descriptors-held")).unwrap();
    let panics = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&panics);
    panic::set_hook(Box::new(move |info| {
        seen.fetch_add(1, Ordering::SeqCst);
        eprintln!("{info}");
    }));
    parent.say("held");
    parent.hear();

    let mut all = lack.use_up();
    let mut named_the_limit = |what: &str, error: Option<LockError>| {
        let said = error.map_or_else(|| "no error".to_owned(), |error| error.chain().to_string());
        let answer = if said.contains(lack.limit()) { "names the limit" } else { &said };
        parent.say(&format!("{what}: {answer}"));
        // The call has closed the connections that it found broken.
        all.extend(lack.use_up());
    };
    named_the_limit("try_lock", client.try_lock("new").err());
    named_the_limit("lock", client.lock("new").err());
    named_the_limit("is_locked", client.is_locked("new").err());
    named_the_limit("extend", extended.extend(TTL).err());
    named_the_limit("session lock", client.try_advisory_lock(&AdvisoryKey::from_text("new")).err());
    named_the_limit("release", released.release().err());
    named_the_limit("the other client", closing.is_locked("new").err());
    drop(dropped);
    drop(session_lock);
    assert!(renewed.lost().wait_timeout(LIMIT), "it cannot be renewed");
    all.extend(lack.use_up());
    let report = closing.close(Duration::from_millis(200)).unwrap();
    parent.say(&format!("close is clean: {}", report.is_clean()));
    parent.say(&format!("panics: {}", panics.load(Ordering::SeqCst)));
    parent.hear();

    lack.free(all);
    parent.say("free");
    parent.hear();
    drop(client.lock("new").unwrap());
    assert_eq!(extended.release().unwrap(), ReleaseResult::Released);
    let report = client.close(LIMIT).unwrap();
    parent.say(&format!("at the end: clean {}, panics {}", report.is_clean(), panics.load(Ordering::SeqCst)));
    drop(closed);
}

#[test]
fn without_descriptors_errors_name_the_limit_and_what_was_dropped_is_released_later() {
    worker::part("starve", |parent| starve(Lack::Descriptors, parent));
    is_survived("without_descriptors_errors_name_the_limit_and_what_was_dropped_is_released_later");
}

#[test]
fn without_threads_errors_name_the_limit_and_what_was_dropped_is_released_later() {
    worker::part("starve", |parent| starve(Lack::Threads, parent));
    is_survived("without_threads_errors_name_the_limit_and_what_was_dropped_is_released_later");
}

fn is_survived(test: &str) {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let url = named(&schema.url(), NAME);
    let mut observer = schema.client();
    let mut starved = Worker::start(test, "starve", &[("url", &url)]);
    starved.expect("held");
    // Every call needs a new connection from here on.
    let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1";
    observer.execute(sql, &[&NAME]).unwrap();
    wait_until(LIMIT, "its sessions have ended", || sessions(&mut observer, NAME) == 0);
    starved.tell("go on");
    for call in ["try_lock", "lock", "is_locked", "extend", "session lock", "release", "the other client"] {
        starved.expect(&format!("{call}: names the limit"));
    }
    starved.expect("close is clean: false");
    starved.expect("panics: 0");
    for key in ["dropped", "released", "extended", "closed"] {
        assert!(row(&mut observer, key).is_some(), "{key} could not be released");
    }
    starved.tell("free them");
    starved.expect("free");
    for key in ["dropped", "released"] {
        wait_until_released(&mut observer, key);
    }
    starved.tell("end");
    starved.expect("at the end: clean true, panics 0");
    assert!(starved.join().success());
    assert_eq!(row(&mut observer, "extended"), None);
}

/// Built with `panic = "abort"`, it dies of the first panic on any thread.
const PROGRAM: &str = r#"
use std::fs::File;
use std::time::Duration;
use syncguard::{LockOptions, PgLockClient};

fn main() {
    let url = std::env::args().nth(1).unwrap();
    assert!(url.starts_with("postgresql:"), "no URL");
    let client = PgLockClient::connect(&url).unwrap();
    let guard = client.lock_with("k", &LockOptions::new().ttl(Duration::from_secs(2))).unwrap();
    println!("held");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let mut all = Vec::new();
    // What a broken connection frees is taken, too.
    while !guard.lost().wait_timeout(Duration::from_millis(10)) {
        all.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
    }
    println!("lost");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    drop((all, guard));
    drop(client.lock("k").unwrap());
}
"#;

/// Builds the program against the library that this test was built with: `rustc` and no package, since
/// a library that unwinds may be a part of a program that does not.
fn build(dir: &Path) -> PathBuf {
    let (source, program) = (dir.join("aborting.rs"), dir.join("aborting"));
    std::fs::write(&source, PROGRAM).unwrap();
    let own = std::env::current_exe().unwrap();
    let libraries = own.parent().unwrap();
    let is_it = |path: &PathBuf| {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        name.starts_with("libsyncguard-") && path.extension() == Some(OsStr::new("rlib"))
    };
    let all = std::fs::read_dir(libraries).unwrap().map(|entry| entry.unwrap().path());
    let newest = all.filter(is_it).max_by_key(|path| path.metadata().unwrap().modified().unwrap());
    let built = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--edition", "2024", "-C", "panic=abort", "--crate-name", "aborting", "--extern"])
        .arg(format!("syncguard={}", newest.expect("the library is there").display()))
        .arg("-L")
        .arg(format!("dependency={}", libraries.display()))
        .arg("-o")
        .args([&program, &source])
        .status();
    assert!(built.unwrap().success());
    program
}

#[test]
fn a_program_that_aborts_on_a_panic_survives_without_descriptors() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let dir = std::env::temp_dir().join(format!("syncguard-aborting-{}", crate::support::unique()));
    std::fs::create_dir(&dir).unwrap();
    let program = build(&dir);
    let start = |url: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -n 64; exec \"$0\" \"$1\""]).arg(&program).arg(url);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
    };
    assert_eq!(start("no url").wait().unwrap().signal(), Some(6), "a panic is its end");

    let mut child = start(&named(&schema.url(), NAME));
    let (mut stdin, stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    let (tell, said) = mpsc::channel();
    std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
    assert_eq!(said.recv_timeout(LIMIT).unwrap(), "held");
    stdin.write_all(b"go on\n").unwrap();
    let mut observer = schema.client();
    let mut lost = Err(mpsc::TryRecvError::Empty);
    wait_until(LIMIT, "the lease cannot be renewed without a connection", || {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1";
        observer.execute(sql, &[&NAME]).unwrap();
        lost = said.try_recv();
        lost != Err(mpsc::TryRecvError::Empty)
    });
    assert_eq!(lost.as_deref(), Ok("lost"), "{:?}", child.wait());
    stdin.write_all(b"go on\n").unwrap();
    assert!(child.wait().unwrap().success());
    std::fs::remove_dir_all(&dir).unwrap();
}
