//! Runs a command under a lock, on whichever machine comes first: flock(1) across machines.
//!
//! ```text
//! batch_job --wait 0 nightly:invoices -- ./make-invoices --all
//! ```
//!
//! What to copy: the command must not go on without the lock, so [`supervise`] stops it *before* the
//! lease is over, and at once when the lease is lost earlier.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example talks")]

use std::env;
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::io::{IsTerminal as _, stdin};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;
use syncguard::{CancelToken, ErrorCode, LockError, LockGuard, LockOptions, PgLockClient};

const HELP: &str = "\
batch_job: runs a command under a lock, as flock(1) does on one machine

    batch_job [OPTIONS] KEY -- COMMAND [ARGS]

    --url URL         the PostgreSQL (default: $SYNCGUARD_URL)
    --ttl S           how long the lock outlives this machine, 1 to 3600 (default 30)
    --wait S          how long to wait for the lock; 0: one attempt (default: forever)
    --grace S         from SIGTERM to SIGKILL when the lock is lost (default: a fifth of the ttl)
    --busy-code N     the exit code when somebody else holds the lock (default 75, as flock -E)
    --lost-code N     the exit code when the lock was lost (default 76)

The command finds the fence of its lock in SYNCGUARD_FENCE: 15 digits that are greater with every
grant, for whatever it writes to. It runs in a process group of its own, without the terminal as
input. SIGTERM, SIGINT, SIGHUP and SIGQUIT are passed on to the group; Ctrl-Z does nothing. On Linux
the command is killed when batch_job is killed; what it left in the background goes on.

EXIT CODES
    the command's own, 128 + N if signal N ended it; the two above; 64 wrong usage,
    69 the database cannot be used, 126 and 127 the command cannot be run or found.";

const USAGE: u8 = 64;
const UNAVAILABLE: u8 = 69;
/// Everything must have ended this long before the lease does.
const MARGIN: Duration = Duration::from_millis(100);
/// Our own mark on the intermediate process, see [`become_the_command`].
const STAGE: &str = "--become-the-command";

struct Job {
    url: String,
    key: String,
    command: Vec<OsString>,
    ttl: Duration,
    wait: Option<Duration>,
    grace: Option<Duration>,
    busy_code: u8,
    lost_code: u8,
}

enum Event {
    Signal(i32),
    Lost,
    Ended,
}

fn main() -> ExitCode {
    let mut args: Vec<_> = env::args_os().skip(1).collect();
    if args.first().is_some_and(|arg| arg == STAGE) {
        return become_the_command(args.split_off(1));
    }
    let job = match Job::read(args) {
        Ok(Some(job)) => job,
        Ok(None) => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("batch_job: {error}");
            return ExitCode::from(USAGE);
        }
    };
    match run(&job) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("batch_job: {error}");
            for cause in std::iter::successors(error.source(), |&cause| cause.source()) {
                eprintln!("  because: {cause}");
            }
            ExitCode::from(UNAVAILABLE)
        }
    }
}

impl Job {
    fn read(args: Vec<OsString>) -> Result<Option<Self>, Box<dyn Error>> {
        let mut job = Self {
            url: env::var("SYNCGUARD_URL").unwrap_or_default(),
            key: String::new(),
            command: Vec::new(),
            ttl: Duration::from_secs(30),
            wait: None,
            grace: None,
            busy_code: 75,
            lost_code: 76,
        };
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let arg = arg.into_string().map_err(|_| "an option is no text")?;
            let mut value = || {
                args.next().and_then(|value| value.into_string().ok()).ok_or(format!("{arg} needs a value"))
            };
            match arg.as_str() {
                "--help" | "-h" => return Ok(None),
                "--" => {
                    job.command = args.collect();
                    break;
                }
                "--url" => job.url = value()?,
                "--ttl" => job.ttl = seconds(&value()?)?,
                "--wait" => job.wait = Some(seconds(&value()?)?),
                "--grace" => job.grace = Some(seconds(&value()?)?),
                "--busy-code" => job.busy_code = value()?.parse()?,
                "--lost-code" => job.lost_code = value()?.parse()?,
                _ if !arg.starts_with('-') && job.key.is_empty() => job.key = arg,
                _ => return Err(format!("unknown option {arg}; see --help").into()),
            }
        }
        if job.key.is_empty() || job.command.is_empty() {
            return Err("usage: batch_job [OPTIONS] KEY -- COMMAND [ARGS]; see --help".into());
        }
        if job.url.is_empty() {
            return Err("no database: pass --url or set SYNCGUARD_URL".into());
        }
        if job.ttl < Duration::from_secs(1) || job.ttl > Duration::from_secs(3600) {
            return Err("--ttl takes 1 to 3600 seconds".into());
        }
        // Renewed every third of the ttl, a healthy lease always has two thirds left.
        if job.grace() + MARGIN > job.ttl / 2 {
            return Err("--grace must be below half of the ttl".into());
        }
        Ok(Some(job))
    }

    fn grace(&self) -> Duration {
        self.grace.unwrap_or(self.ttl / 5)
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    number.ok_or_else(|| format!("{text:?} is no number of seconds"))
}

fn run(job: &Job) -> Result<u8, LockError> {
    let (tell, events) = mpsc::channel();
    let waiting = CancelToken::new();
    if let Err(error) = listen(tell.clone(), waiting.clone()) {
        return Err(LockError::new(ErrorCode::Internal).with_message("no signals").with_source(error));
    }
    let client = PgLockClient::connect(&job.url)?;
    let lost = tell.clone();
    let options = LockOptions::new().ttl(job.ttl).cancel(&waiting).on_lost(move |_| {
        let _ = lost.send(Event::Lost);
    });
    let locked = match job.wait {
        None => client.lock_with(&job.key, &options.wait_forever()).map(Some),
        Some(Duration::ZERO) => client.try_lock_with(&job.key, &options),
        Some(wait) => client.lock_with(&job.key, &options.timeout(wait)).map(Some),
    };
    let guard = match locked {
        Ok(Some(guard)) => guard,
        Ok(None) => return Ok(job.busy_code),
        Err(error) => {
            return match (error.code(), events.try_recv()) {
                (ErrorCode::AcquisitionTimeout, _) => Ok(job.busy_code),
                (ErrorCode::Aborted, Ok(Event::Signal(signal))) => Ok(code_of_signal(signal)),
                _ => Err(error),
            };
        }
    };
    let code = match start(job, &guard, tell) {
        Ok(mut child) => supervise(job, &guard, &mut child, &events),
        Err(error) => {
            eprintln!("batch_job: {error}");
            126
        }
    };
    if let Err(error) = guard.release() {
        eprintln!("batch_job: the lock stays until its ttl is over: {error}");
    }
    Ok(code)
}

/// Turns signals into events; before the lock is held they also end the wait.
fn listen(tell: Sender<Event>, waiting: CancelToken) -> std::io::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGTSTP])?;
    thread::spawn(move || {
        for signal in signals.forever() {
            if signal == SIGTSTP {
                continue; // Ctrl-Z must not stop the renewals while the command goes on.
            }
            let _ = tell.send(Event::Signal(signal));
            waiting.cancel();
        }
    });
    Ok(())
}

fn start(job: &Job, guard: &LockGuard, tell: Sender<Event>) -> std::io::Result<Child> {
    let mut command = Command::new(env::current_exe()?);
    command.arg(STAGE).arg(std::process::id().to_string()).args(&job.command);
    command.env("SYNCGUARD_FENCE", guard.fence().to_string()).process_group(0);
    if stdin().is_terminal() {
        // A background group that reads the terminal would be stopped.
        command.stdin(Stdio::null());
    }
    let child = command.spawn()?;
    let pid = pid_of(&child);
    thread::spawn(move || {
        // NOWAIT leaves the process unreaped: its group's number cannot be used again meanwhile.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), options) {}
        let _ = tell.send(Event::Ended);
    });
    Ok(child)
}

/// Waits for the command's end, and ends it when the lock is about to be lost.
fn supervise(job: &Job, guard: &LockGuard, child: &mut Child, events: &Receiver<Event>) -> u8 {
    let group = pid_of(child);
    let mut stopping: Option<Instant> = None;
    let mut killed = false;
    let mut lease_end = Instant::now() + guard.remaining();
    loop {
        let now = Instant::now();
        if guard.is_held() {
            lease_end = now + guard.remaining();
        }
        if stopping.is_none() && (!guard.is_held() || guard.remaining() <= job.grace() + MARGIN) {
            let reason =
                guard.lost_reason().map_or("it cannot be renewed".to_owned(), |lost| format!("{lost:?}"));
            eprintln!("batch_job: the lock is lost ({reason}): stopping the command");
            let _ = kill_process_group(group, Signal::TERM);
            // Not beyond the lease; if that is over already, a moment is all there is.
            let last = lease_end.checked_sub(MARGIN).map_or(now, |last| last.max(now + MARGIN));
            stopping = Some(last.min(now + job.grace()));
        }
        if stopping.is_some_and(|at| at <= now) && !killed {
            killed = true;
            let _ = kill_process_group(group, Signal::KILL);
        }
        match events.recv_timeout(Duration::from_millis(20)) {
            Ok(Event::Ended) | Err(RecvTimeoutError::Disconnected) => break,
            Ok(Event::Signal(number)) => {
                if let Some(signal) = Signal::from_named_raw(number) {
                    let _ = kill_process_group(group, signal);
                }
            }
            // The state is looked at above.
            Ok(Event::Lost) | Err(RecvTimeoutError::Timeout) => {}
        }
    }
    if stopping.is_some() {
        // The leader has ended; whoever it left in its group must end, too.
        let _ = kill_process_group(group, Signal::KILL);
    }
    let status = child.wait();
    if stopping.is_some() || !guard.is_held() {
        return job.lost_code;
    }
    match status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
            (None, Some(signal)) => code_of_signal(signal),
            (None, None) => u8::MAX,
        },
        Err(_) => u8::MAX,
    }
}

fn code_of_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_child(child)
}

/// In the child, before the command: asks the kernel to end it if `batch_job` itself is killed with
/// `kill -9`, for nobody would be left to stop it. Linux only; elsewhere the command would go on.
fn become_the_command(command: Vec<OsString>) -> ExitCode {
    let mut command = command.into_iter();
    let parent = command.next();
    #[cfg(target_os = "linux")]
    {
        let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
        let now = rustix::process::getppid().map(|pid| pid.to_string());
        if now.as_deref().map(OsStr::new) != parent.as_deref() {
            return ExitCode::from(137); // It was killed before we asked.
        }
    }
    #[cfg(not(target_os = "linux"))]
    drop(parent);
    let Some(program) = command.next() else { return ExitCode::from(USAGE) };
    // Only comes back when it failed.
    let error = Command::new(&program).args(command).exec();
    eprintln!("batch_job: {}: {error}", program.display());
    ExitCode::from(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 })
}
