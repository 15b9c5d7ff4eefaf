//! Other processes: the test binary starts itself again, with the one test that has the worker's part.
//!
//! ```ignore
//! #[test]
//! fn a_killed_holder_frees_its_key() {
//!     worker::part("holder", |parent| {           // in the worker: runs this, then exits
//!         let url = parent.arg("url");
//!         parent.say("held");
//!         parent.wait_forever();
//!     });
//!     let mut holder = Worker::start("a_killed_holder_frees_its_key", "holder", &[("url", &url)]);
//!     holder.expect("held");
//!     holder.kill();
//! }
//! ```
//!
//! A worker ends when its parent does: its input is a pipe, and a thread of it exits at its end.

use std::env;
use std::ffi::OsStr;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver};
use std::thread;

use super::cluster::signal;
use super::wait::{LIMIT, poll};

/// What a worker says begins with this, to tell it from the test runner's own lines.
const MARK: &str = "@worker ";
const PART: &str = "SYNCGUARD_TEST_WORKER";

/// A worker process, seen from the test. Dropping it kills it.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    stdin: Option<ChildStdin>,
    said: Receiver<String>,
}

/// The test, seen from a worker process.
#[derive(Debug)]
pub struct Parent {
    heard: Mutex<Receiver<String>>,
}

/// In a worker that was started with this part: runs it and ends the process. Elsewhere: nothing.
pub fn part(name: &str, run: impl FnOnce(&Parent)) {
    if env::var(PART).as_deref() != Ok(name) {
        return;
    }
    let (tell, heard) = mpsc::channel();
    thread::spawn(move || {
        for line in io::stdin().lines().map_while(Result::ok) {
            let _ = tell.send(line);
        }
        std::process::exit(3);
    });
    run(&Parent { heard: Mutex::new(heard) });
    std::process::exit(0);
}

#[allow(clippy::unused_self, reason = "what belongs to a worker is asked of its parent")]
impl Parent {
    /// An argument that the test gave to [`Worker::start`].
    pub fn arg(&self, name: &str) -> String {
        env::var(variable(name)).unwrap_or_else(|_| panic!("the worker was started without {name:?}"))
    }

    pub fn say(&self, line: &str) {
        // The line break before it ends a line that the test runner may have begun.
        let mut out = io::stdout().lock();
        writeln!(out, "\n{MARK}{line}").and_then(|()| out.flush()).expect("the parent listens");
    }

    /// The next line that the test sent.
    pub fn hear(&self) -> String {
        self.heard.lock().expect("no thread has failed").recv().expect("the parent lives")
    }

    /// Until somebody kills this process, or the parent ends.
    pub fn wait_forever(&self) -> ! {
        loop {
            thread::park();
        }
    }
}

impl Worker {
    /// Starts the part `part` of the test `test` (its full name in this binary) in a new process.
    ///
    /// It uses the shared server of this process, if there is one by now.
    pub fn start(test: &str, part: &str, args: &[(&str, &str)]) -> Self {
        let mut command = Self::command(test, part, args);
        command.env("SYNCGUARD_TEST_URL", super::server().url());
        command.env("SYNCGUARD_TEST_SOCKET_URL", super::server().socket_url());
        Self::spawn(command)
    }

    /// The same, but what it asks [`server`](super::server()) for is its own.
    pub fn start_alone(test: &str, part: &str, args: &[(&str, &str)]) -> Self {
        let mut command = Self::command(test, part, args);
        command.env_remove("SYNCGUARD_TEST_URL").env_remove("SYNCGUARD_TEST_SOCKET_URL");
        Self::spawn(command)
    }

    /// The same, with variables of the environment as they are.
    pub fn start_alone_with(
        test: &str,
        part: &str,
        args: &[(&str, &str)],
        envs: &[(&str, impl AsRef<OsStr>)],
    ) -> Self {
        let mut command = Self::command(test, part, args);
        command.env_remove("SYNCGUARD_TEST_URL").env_remove("SYNCGUARD_TEST_SOCKET_URL");
        command.envs(envs.iter().map(|(name, value)| (name, value.as_ref())));
        Self::spawn(command)
    }

    /// The same, with a library that is loaded before all others.
    pub fn start_preloaded(library: &std::path::Path, test: &str, part: &str, args: &[(&str, &str)]) -> Self {
        let mut command = Self::command(test, part, args);
        command.env("LD_PRELOAD", library);
        Self::spawn(command)
    }

    /// The same, in a small file system of this many megabytes.
    pub fn start_in(room: &super::room::Room, megabytes: u32, test: &str, part: &str) -> Self {
        let mut command = Self::command(test, part, &[]);
        command.env_remove("SYNCGUARD_TEST_URL").env_remove("SYNCGUARD_TEST_SOCKET_URL");
        Self::spawn(room.command(megabytes, &command))
    }

    /// The next line, if one comes in time; the error says whether the worker's output has ended.
    pub fn try_hear(&mut self, limit: std::time::Duration) -> Result<String, mpsc::RecvTimeoutError> {
        self.said.recv_timeout(limit)
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The next line that the worker says.
    ///
    /// # Panics
    /// When it ends before, or says nothing for a long time.
    #[track_caller]
    pub fn hear(&mut self) -> String {
        self.said.recv_timeout(LIMIT).unwrap_or_else(|_| {
            let state = self.child.try_wait();
            panic!("the worker said nothing (its state: {state:?}; is the test's name right?)")
        })
    }

    /// # Panics
    /// When the next line is another one.
    #[track_caller]
    pub fn expect(&mut self, line: &str) {
        assert_eq!(self.hear(), line);
    }

    pub fn tell(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().expect("the worker has not been let go");
        writeln!(stdin, "{line}").expect("the worker listens");
    }

    /// `kill -9`, and waits for the end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends `STOP`, `CONT`, `TERM`, …
    pub fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    /// Waits for its own end; it exits with failure when a test in it has failed.
    ///
    /// # Panics
    /// When it goes on for a long time.
    #[track_caller]
    pub fn join(&mut self) -> ExitStatus {
        let mut status = None;
        let ended = poll(LIMIT, || {
            status = self.child.try_wait().expect("our child can be waited for");
            status.is_some()
        });
        assert!(ended, "the worker goes on for more than {LIMIT:?}");
        status.expect("it has ended")
    }

    fn command(test: &str, part: &str, args: &[(&str, &str)]) -> Command {
        let mut command = Command::new(env::current_exe().expect("a program knows its file"));
        command.args([&*full_name(test), "--exact", "--nocapture", "--test-threads=1"]).env(PART, part);
        command.envs(args.iter().map(|(name, value)| (variable(name), value)));
        command
    }

    /// All that it says from now on, until it has ended; each line is printed as it comes.
    ///
    /// # Panics
    /// When it says nothing for that long.
    #[track_caller]
    pub fn report(&mut self, silence: std::time::Duration) -> (Vec<String>, ExitStatus) {
        let mut lines = Vec::new();
        loop {
            match self.said.recv_timeout(silence) {
                Ok(line) => {
                    println!("{line}");
                    lines.push(line);
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => return (lines, self.join()),
                Err(mpsc::RecvTimeoutError::Timeout) => panic!("the worker says nothing for {silence:?}"),
            }
        }
    }

    fn spawn(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the test binary starts again");
        let (tell, said) = mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(line) = line.strip_prefix(MARK) {
                    let _ = tell.send(line.to_owned());
                }
            }
        });
        Self { stdin: child.stdin.take(), child, said }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The test's name with the modules that it is in: a test's thread bears it, as long as tests run at
/// the same time.
fn full_name(test: &str) -> String {
    let ends_so = |name: &str| name.strip_suffix(test).is_some_and(|path| path.ends_with("::"));
    let filter = env::args().nth(1).filter(|name| ends_so(name));
    thread::current()
        .name()
        .filter(|name| ends_so(name))
        .map(str::to_owned)
        .or(filter)
        .unwrap_or_else(|| test.to_owned())
}

fn variable(name: &str) -> String {
    format!("SYNCGUARD_TEST_WORKER_{}", name.to_uppercase())
}
