//! One throwaway database cluster: its data directory and the processes of its server.

use std::collections::hash_map::DefaultHasher;
use std::fs::{self, OpenOptions};
use std::hash::{BuildHasher as _, Hash as _, Hasher as _, RandomState};
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::account::Account;
use super::binaries::{Binaries, binaries};
use super::clock::Clock;
use super::keeper::Keeper;
use super::wait::{LIMIT, poll};

/// What a private server is started with.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Lines of postgresql.conf, such as `("max_connections", "20")`.
    pub settings: Vec<(String, String)>,
    /// Whether commits reach the disk. Off by default: these servers live for seconds.
    pub fsync: bool,
    /// Another installation than the one that this run uses.
    pub binaries: Option<Binaries>,
    /// Whether the server's clock can be set, see [`Server::set_clock`](super::Server::set_clock).
    pub clock: bool,
}

impl Config {
    pub fn new() -> Self {
        Self::default()
    }

    #[must_use]
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// The server gets a clock that a test can set.
    #[must_use]
    pub fn clock(mut self) -> Self {
        self.clock = true;
        self
    }

    #[must_use]
    pub fn fsync(mut self, on: bool) -> Self {
        self.fsync = on;
        self
    }
}

/// How a server is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Waits until the last client has left.
    Smart,
    /// Ends the sessions, rolls back, writes a checkpoint.
    Fast,
    /// Ends at once; the next start recovers.
    Immediate,
    /// `kill -9`: the server's own processes find out by themselves.
    Kill,
}

#[derive(Debug)]
pub struct Cluster {
    binaries: Binaries,
    account: Account,
    port: u16,
    clock: Option<Clock>,
    process: Mutex<Option<Child>>,
    // After the process: dropping this one stops whatever is left and removes the directory.
    keeper: Keeper,
}

impl Cluster {
    pub fn start(config: &Config) -> Result<Self, String> {
        let binaries = config.binaries.clone().unwrap_or_else(|| binaries().clone());
        let account = Account::find()?;
        if !account.test("-x", &binaries.dir.join("postgres")) {
            return Err(format!("{account:?} cannot reach the programs in {}", binaries.dir.display()));
        }
        let keeper = Keeper::new(&account)?;
        let clock = config.clock.then(|| Clock::new(keeper.dir())).transpose()?;
        let mut cluster = Self { binaries, account, port: 0, clock, process: Mutex::new(None), keeper };
        cluster.create_data()?;
        cluster.append_settings(&config.file());

        // Between the look for a free port and the server's bind somebody else may take it.
        let mut failure = String::new();
        for _ in 0..5 {
            cluster.port = free_port()?;
            match cluster.launch() {
                Ok(()) => return Ok(cluster),
                Err(log) if log.contains("TCP/IP socket") => failure = log,
                Err(log) => return Err(log),
            }
        }
        Err(failure)
    }

    pub fn binaries(&self) -> &Binaries {
        &self.binaries
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Holds the data directory, the socket and the log.
    pub fn dir(&self) -> &Path {
        self.keeper.dir()
    }

    pub fn data_dir(&self) -> PathBuf {
        self.dir().join("data")
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.dir().join("log")).unwrap_or_default()).into_owned()
    }

    /// The process id of the server's first process, if it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process().as_ref().map(Child::id)
    }

    /// Starts the server and waits until it takes connections; the error is the server's log.
    pub fn launch(&self) -> Result<(), String> {
        let mut result = Ok(());
        // After a kill the other processes of the old server need a moment to notice; until then
        // their shared memory keeps a new server from starting.
        poll(LIMIT, || {
            result = self.launch_once();
            !result.as_ref().is_err_and(|log| log.contains("pre-existing shared memory block"))
        });
        result
    }

    fn launch_once(&self) -> Result<(), String> {
        let mut slot = self.process();
        assert!(slot.is_none(), "the server runs already");
        let log_at = self.log().len();
        let mut child = self.spawn();
        let mut ended = false;
        let ready = poll(LIMIT, || {
            ended = child.try_wait().is_ok_and(|status| status.is_some());
            ended || is_ready(&self.data_dir(), child.id())
        });
        if ready && !ended {
            *slot = Some(child);
            return Ok(());
        }
        let _ = child.kill();
        let _ = child.wait();
        let log = self.log();
        Err(format!("PostgreSQL did not start:\n{}", log.get(log_at..).unwrap_or(&log)))
    }

    /// Stops the server and waits until it has ended.
    pub fn stop(&self, how: Stop) {
        let mut slot = self.process();
        let child = slot.as_mut().expect("the server runs");
        signal(
            child.id(),
            match how {
                Stop::Smart => "TERM",
                Stop::Fast => "INT",
                Stop::Immediate => "QUIT",
                Stop::Kill => "KILL",
            },
        );
        let ended = poll(LIMIT, || child.try_wait().is_ok_and(|status| status.is_some()));
        assert!(ended, "the server did not stop ({how:?}):\n{}", self.log());
        *slot = None;
    }

    /// Starts the server again if it has ended by itself.
    pub fn revive(&self) -> Result<(), String> {
        let ended = {
            let mut slot = self.process();
            let ended =
                slot.as_mut().is_none_or(|child| child.try_wait().is_ok_and(|status| status.is_some()));
            if ended {
                *slot = None;
            }
            ended
        };
        if ended { self.launch() } else { Ok(()) }
    }

    /// # Panics
    /// When the server was not started with [`Config::clock`].
    pub fn clock(&self) -> &Clock {
        self.clock.as_ref().expect("a server that was started with Config::clock")
    }

    /// Adds lines to postgresql.conf; they count from the next reload or start.
    pub fn append_settings(&self, lines: &str) {
        let path = self.data_dir().join("postgresql.conf");
        let mut file = OpenOptions::new().append(true).open(path).expect("postgresql.conf is there");
        file.write_all(lines.as_bytes()).expect("postgresql.conf can be written");
    }

    fn process(&self) -> MutexGuard<'_, Option<Child>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn(&self) -> Child {
        let log = OpenOptions::new().create(true).append(true).open(self.dir().join("log"));
        let log = log.expect("the log can be written");
        let mut command = self.account.command("/bin/sh");
        if let Some(clock) = &self.clock {
            clock.preload(&mut command);
        }
        // The shell notes its process id for the keeper, then becomes the server.
        command
            .args(["-c", "echo $$ >\"$0\" && exec \"$@\""])
            .arg(self.dir().join("pid"))
            .arg(self.binaries.dir.join("postgres"))
            .arg("-D")
            .arg(self.data_dir())
            .args(["-p", &self.port.to_string(), "-c", "listen_addresses=127.0.0.1", "-k"])
            .arg(self.dir())
            .current_dir(self.dir())
            .stdout(log.try_clone().expect("a file handle can be copied"))
            .stderr(log)
            // Ctrl-C in the terminal is for the test process; the keeper ends the server after it.
            .process_group(0)
            .spawn()
            .expect("/bin/sh starts")
    }

    /// initdb, or a copy of what an earlier initdb of the same programs made: 50 ms instead of 400.
    fn create_data(&self) -> Result<(), String> {
        let template = self.template();
        if template.as_deref().is_some_and(Path::is_dir) && copy(template.as_deref(), &self.data_dir()) {
            return Ok(());
        }
        let _ = fs::remove_dir_all(self.data_dir());
        let output = self
            .account
            .command(self.binaries.dir.join("initdb"))
            .args(["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "-D"])
            .arg(self.data_dir())
            .current_dir(self.dir())
            // Otherwise it compares the system's time zone with all that there are.
            .env("TZ", "UTC")
            .output()
            .map_err(|error| format!("initdb does not start: {error}"))?;
        if !output.status.success() {
            return Err(format!("initdb failed: {}", String::from_utf8_lossy(&output.stderr)));
        }
        // Best effort, and complete or absent: another test binary may be doing the same.
        if let Some(template) = template {
            let half = template.with_extension(super::unique());
            if !copy(Some(&self.data_dir()), &half) || fs::rename(&half, &template).is_err() {
                let _ = fs::remove_dir_all(&half);
            }
        }
        Ok(())
    }

    fn template(&self) -> Option<PathBuf> {
        // Beside the folder of the profile, as Cargo's own CARGO_TARGET_TMPDIR.
        let program = std::env::current_exe().ok()?;
        let dir = program.ancestors().nth(3)?.join("tmp");
        fs::create_dir_all(&dir).ok()?;
        let mut hash = DefaultHasher::new();
        (&self.binaries.dir, self.account.owner()).hash(&mut hash);
        let (major, minor) = self.binaries.version;
        Some(dir.join(format!("cluster-{major}-{minor}-{:016x}", hash.finish())))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(mut child) = self.process().take() {
            signal(child.id(), "QUIT");
            let _ = poll(LIMIT, || child.try_wait().is_ok_and(|status| status.is_some()));
        }
    }
}

impl Config {
    fn file(&self) -> String {
        let on = if self.fsync { "on" } else { "off" };
        let mut lines = format!("\nfsync = {on}\nfull_page_writes = {on}\n");
        // Small, so that it starts fast; no background work that a test did not ask for.
        lines += "shared_buffers = 16MB\nmax_wal_size = 256MB\nmax_connections = 200\n";
        lines += "dynamic_shared_memory_type = mmap\nlog_line_prefix = '%m [%p] %a '\n";
        for (name, value) in &self.settings {
            lines += &setting(name, value);
        }
        lines
    }
}

/// One line of postgresql.conf.
pub fn setting(name: &str, value: &str) -> String {
    format!("{name} = '{}'\n", value.replace('\'', "''"))
}

/// Sends a signal (`STOP`, `CONT`, `KILL`, …) to a process, such as a backend of a private server.
pub fn signal(pid: u32, name: &str) {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "kill -s \"$0\" \"$1\"", name, &pid.to_string()]);
    let _ = command.stderr(Stdio::null()).status();
}

/// The server writes its state into line 8, beside its process id in line 1.
fn is_ready(data_dir: &Path, pid: u32) -> bool {
    let text = fs::read_to_string(data_dir.join("postmaster.pid")).unwrap_or_default();
    let mut lines = text.lines();
    lines.next() == Some(&pid.to_string())
        && lines.nth(6).is_some_and(|state| matches!(state.trim(), "ready" | "standby"))
}

fn copy(from: Option<&Path>, to: &Path) -> bool {
    let Some(from) = from else { return false };
    let mut command = Command::new("cp");
    command.arg("-a").arg(from).arg(to).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// A port that nobody listens on, below the range that systems take outgoing connections from, so
/// that it is still free when a stopped server starts again.
fn free_port() -> Result<u16, String> {
    let start = RandomState::new().hash_one(std::process::id());
    (0..1000)
        .map(|n| 10_000 + u16::try_from((start.wrapping_add(n)) % 20_000).unwrap_or(0))
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .ok_or_else(|| "no free TCP port between 10000 and 30000".into())
}
