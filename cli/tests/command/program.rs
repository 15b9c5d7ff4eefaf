//! The command as a process, and what its programs leave in files.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};

use crate::support::{LIMIT, TestSchema, unique, wait_until};

pub(crate) const SYNCGUARD: &str = env!("CARGO_BIN_EXE_syncguard");

/// The command without anything of this process's environment that could lead it elsewhere, nor its ignored
/// signals: a test run in the background (`nohup`, a shell's `&`) has some.
pub(crate) fn bare() -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP,INT,QUIT,TERM", SYNCGUARD]);
    for (name, _) in env::vars_os() {
        let lost = name.to_str().is_some_and(|name| {
            name.starts_with("PG") || name.starts_with("SYNCGUARD_") || name == "DATABASE_URL"
        });
        if lost {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

pub(crate) fn syncguard<A: AsRef<OsStr>>(schema: &TestSchema, args: &[A]) -> Command {
    let mut command = bare();
    command.env("SYNCGUARD_URL", schema.url()).args(args);
    command
}

/// Runs it to its end: exit code, standard output, standard error.
pub(crate) fn said<A: AsRef<OsStr>>(schema: &TestSchema, args: &[A]) -> (i32, String, String) {
    told(&syncguard(schema, args).output().expect("the command runs"))
}

pub(crate) fn told(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().unwrap_or_else(|| panic!("ended by a signal: {output:?}"));
    (code, text(&output.stdout), text(&output.stderr))
}

/// A process that is killed when the test ends.
pub(crate) struct Process(pub(crate) Child);

impl Process {
    /// What it prints must not keep the test runner's pipes open if the test fails.
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the command starts"))
    }

    /// With standard error in this file.
    pub(crate) fn start_logged(command: &mut Command, dir: &Dir) -> Self {
        let log = fs::File::create(dir.path("log")).expect("the directory can be written");
        Self(command.stdout(Stdio::null()).stderr(log).spawn().expect("the command starts"))
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Once `env` has become the command: before that what was ignored is ignored.
    pub(crate) fn signal(&self, name: &str) {
        let comm = format!("/proc/{}/comm", self.id());
        let is_env = || fs::read_to_string(&comm).is_ok_and(|comm| comm.trim() == "env");
        wait_until(LIMIT, "it is the command", || !is_env());
        signal(self.id(), name);
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.0.try_wait().expect("our child can be waited for").is_some()
    }

    /// Its end, which must come by itself.
    pub(crate) fn end(&mut self) -> ExitStatus {
        wait_until(LIMIT, "the command ends", || self.has_ended());
        self.0.wait().expect("it has ended")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill").args(["-s", name, &pid.to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()), "kill -s {name} {pid}");
}

/// Whether a process lives; one that has ended and was not waited for does not.
pub(crate) fn lives(pid: u32) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => !stat.contains(") Z "),
        Err(_) => Command::new("kill")
            .args(["-0", &pid.to_string()])
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success()),
    }
}

/// A directory of this test's own.
pub(crate) struct Dir(PathBuf);

impl Dir {
    pub(crate) fn new() -> Self {
        let path = env::temp_dir().join(format!("syncguard_command_{}", unique()));
        fs::create_dir(&path).expect("the temporary directory can be written");
        Self(path)
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.0.join(file)
    }

    /// A file that somebody has written or will; empty if nobody has.
    pub(crate) fn read(&self, file: &str) -> String {
        fs::read_to_string(self.path(file)).unwrap_or_default()
    }

    /// A process id that a program left in this file.
    pub(crate) fn pid(&self, file: &str) -> u32 {
        self.read(file).trim().parse().expect("the program left its process id")
    }

    #[track_caller]
    pub(crate) fn wait_for(&self, file: &str) {
        wait_until(LIMIT, &format!("the program makes {file}"), || self.path(file).exists());
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// `syncguard run OPTIONS -- sh -c SCRIPT`, in this directory, once the script has made the file `ready`.
pub(crate) fn running(schema: &TestSchema, dir: &Dir, options: &[&str], script: &str) -> Process {
    let process = started(schema, dir, options, script);
    dir.wait_for("ready");
    process
}

/// The same without waiting.
pub(crate) fn started(schema: &TestSchema, dir: &Dir, options: &[&str], script: &str) -> Process {
    let mut command = syncguard(schema, &["run", "--key", "key"]);
    command.args(options).args(["--", "sh", "-c", script]).current_dir(&dir.0);
    Process::start_logged(&mut command, dir)
}

pub(crate) fn rows(schema: &TestSchema) -> i64 {
    let row = schema.client().query_one("SELECT count(*) FROM syncguard_locks", &[]);
    row.expect("the lock table is there").get(0)
}
