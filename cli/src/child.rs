//! The processes of a program: its own group, and who ends it when this process is killed.
//!
//! Beside the program there is a *watcher*, this same file in a group of its own. Its standard input is a pipe
//! that only this process can write to: if that is closed without a word, this process was killed, and the
//! watcher kills the program's group. On Linux the program itself is also killed by the kernel
//! (`PR_SET_PDEATHSIG`), whatever becomes of the watcher.

use std::env;
use std::ffi::OsString;
use std::io::{self, BufRead as _, BufReader, IsTerminal as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::thread;

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process_group, test_kill_process_group, waitid,
};

use signal_hook::consts::{SIGTTIN, SIGTTOU};

use crate::failure::{USAGE, say};
use crate::supervise::Event;

/// The process that becomes the program.
const STAGE: &str = "__child";
/// The process that ends the program's group if this one is killed.
const WATCHER: &str = "__watcher";
/// What the watcher is told when there is nothing left to watch.
const OVER: &str = "over";

/// What to start.
pub(crate) struct Start<'a> {
    pub(crate) words: &'a [OsString],
    /// Variables for its environment.
    pub(crate) told: &'a [(&'static str, String)],
}

/// A program that runs.
pub(crate) struct Running {
    child: Child,
    group: Pid,
    watcher: Watcher,
}

struct Watcher {
    child: Child,
    /// `None` once it has been told.
    line: Option<ChildStdin>,
}

impl Running {
    /// Starts the program in a group of its own; its end is sent as an event. To be called on a thread that lives
    /// as long as this process: the kernel takes the end of the thread for the end of the parent.
    pub(crate) fn start(what: &Start<'_>, tell: Sender<Event>) -> io::Result<Self> {
        let mut watcher = Watcher::start()?;
        let mut command = ourselves()?;
        command.arg(STAGE).arg(std::process::id().to_string()).args(what.words);
        command.envs(what.told.iter().map(|(name, value)| (name, value))).process_group(0);
        if io::stdin().is_terminal() {
            // A background group that reads the terminal would be stopped.
            command.stdin(Stdio::null());
        }
        let child = command.spawn()?;
        let group = Pid::from_child(&child);
        watcher.tell(&group.as_raw_nonzero().to_string())?;
        thread::Builder::new().name("syncguard-child".to_owned()).spawn(move || {
            wait_for_end(group, &tell);
            let _ = tell.send(Event::Ended);
        })?;
        Ok(Self { child, group, watcher })
    }

    /// To every process of the group.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.group, signal);
    }

    pub(crate) fn group(&self) -> Pid {
        self.group
    }

    /// After its end: how it ended, and whether it left processes in its group.
    pub(crate) fn reap(mut self) -> io::Result<(ExitStatus, bool)> {
        self.watcher.end();
        let status = self.child.wait()?;
        Ok((status, test_kill_process_group(self.group).is_ok()))
    }
}

impl Watcher {
    fn start() -> io::Result<Self> {
        let mut command = ourselves()?;
        // Out of reach of what is sent to our group, and in nobody's way.
        command.arg(WATCHER).process_group(0).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let line = child.stdin.take();
        Ok(Self { child, line })
    }

    fn tell(&mut self, word: &str) -> io::Result<()> {
        match &mut self.line {
            Some(line) => writeln!(line, "{word}"),
            None => Ok(()),
        }
    }

    fn end(&mut self) {
        let _ = self.tell(OVER);
        self.line = None;
        let _ = self.child.wait();
    }
}

/// Until the process has ended; says so if it is stopped because it wants the terminal.
fn wait_for_end(pid: Pid, tell: &Sender<Event>) {
    // NOWAIT leaves the process unreaped: its group's number cannot be used again meanwhile.
    let ends = WaitIdOptions::EXITED | WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
    loop {
        match waitid(WaitId::Pid(pid), ends) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(Some(status)) if status.stopped() => {
                // Taken, or it would be told again and again.
                let _ = waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG);
                if matches!(status.stopping_signal(), Some(SIGTTIN | SIGTTOU)) {
                    let _ = tell.send(Event::WantsTerminal);
                }
            }
            _ => return,
        }
    }
}

/// This same program, also if its file was replaced meanwhile.
fn ourselves() -> io::Result<Command> {
    let linux = "/proc/self/exe";
    let mut command =
        if cfg!(target_os = "linux") { Command::new(linux) } else { Command::new(env::current_exe()?) };
    command.arg0("syncguard");
    Ok(command)
}

/// If this process is one of the two helpers: what it does, and its exit code.
pub(crate) fn run_as_helper(mut args: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let first = args.next()?;
    if first == STAGE {
        Some(become_the_program(args))
    } else if first == WATCHER {
        watch(io::stdin().lock());
        Some(ExitCode::SUCCESS)
    } else {
        None
    }
}

/// Asks the kernel to end this process with its parent, and becomes the program.
fn become_the_program(mut args: impl Iterator<Item = OsString>) -> ExitCode {
    let parent = args.next();
    #[cfg(target_os = "linux")]
    {
        let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
        let now = rustix::process::getppid().map(|pid| OsString::from(pid.to_string()));
        if now != parent {
            return ExitCode::from(137); // It was killed before we asked.
        }
    }
    #[cfg(not(target_os = "linux"))]
    drop(parent);
    let Some(program) = args.next() else { return ExitCode::from(USAGE) };
    // Only comes back when it failed.
    let error = Command::new(&program).args(args).exec();
    say(&format!("{}: {error}", program.display()));
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
}

/// Waits for the end of the parent, and kills the group if there was no word before it.
fn watch(line: impl io::Read) {
    let mut words = BufReader::new(line).lines().map_while(Result::ok);
    let group = words.next().and_then(|word| word.parse().ok()).and_then(Pid::from_raw);
    if let (Some(group), None) = (group, words.next()) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}
