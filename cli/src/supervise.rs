//! A program from its start to its end, or to the end of its lock, whichever comes first.
//!
//! 1. While the lock is held the program runs; without it the program ends, before the lease does: what stops it
//!    begins `grace` before the lease's end, and SIGKILL comes before it.
//! 2. Where the lock is known to be another's, or over, nothing is waited for: SIGKILL.
//! 3. The lock is let go after the program has ended, never before.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use syncguard::{LockGuard, LostReason, Run, Term};

use crate::child::{Running, Start};
use crate::choices::OnLost;
use crate::failure::{Failure, say};

/// Everything must have ended this long before the lease does.
pub(crate) const MARGIN: Duration = Duration::from_millis(100);
/// How often the lease is looked at, for a machine that was suspended.
const LOOK: Duration = Duration::from_millis(100);

pub(crate) enum Event {
    Signal(i32),
    Lost,
    /// The program was stopped because it reads the terminal.
    WantsTerminal,
    Ended,
}

/// What a program runs under.
pub(crate) trait Lease {
    fn is_held(&self) -> bool;
    fn remaining(&self) -> Duration;
    fn lost_reason(&self) -> Option<LostReason>;
}

macro_rules! lease {
    ($($ty:ty),*) => {$(
        impl Lease for $ty {
            fn is_held(&self) -> bool {
                Self::is_held(self)
            }
            fn remaining(&self) -> Duration {
                Self::remaining(self)
            }
            fn lost_reason(&self) -> Option<LostReason> {
                Self::lost_reason(self)
            }
        }
    )*};
}

lease!(LockGuard, Term, Run);

/// How a program ended.
pub(crate) enum Ending {
    Exited(ExitStatus),
    /// The lock was lost, and the program was stopped.
    Lost,
    /// A signal came before it was started.
    NotStarted(i32),
}

/// What to run, and how it is stopped.
pub(crate) struct Supervisor<'a> {
    pub(crate) start: Start<'a>,
    pub(crate) on_lost: &'a OnLost,
    pub(crate) grace: Duration,
    pub(crate) tell: Sender<Event>,
    pub(crate) events: &'a Receiver<Event>,
}

/// A stop that has begun.
struct Stopping {
    kill_at: Instant,
    killed: bool,
    helper: Option<Child>,
}

impl Supervisor<'_> {
    pub(crate) fn run(&self, lease: &impl Lease) -> Result<Ending, Failure> {
        if let Some(signal) = self.pending_signal() {
            return Ok(Ending::NotStarted(signal));
        }
        let cannot = |error| Failure::Io("the program could not be started".to_owned(), error);
        let running = Running::start(&self.start, self.tell.clone()).map_err(cannot)?;
        let stopped = self.watch_over(&running, lease);
        let lost = stopped.is_some();
        if let Some(mut stop) = stopped {
            // The leader has ended; whoever it left in its group must end, too.
            running.signal(Signal::KILL);
            stop.end_helper();
        }
        let gone = |error| Failure::Io("the program's end is not known".to_owned(), error);
        let (status, left_some) = running.reap().map_err(gone)?;
        if lost {
            return Ok(Ending::Lost);
        }
        if left_some {
            say("the program has ended, and left processes behind that go on without the lock");
        }
        Ok(Ending::Exited(status))
    }

    fn pending_signal(&self) -> Option<i32> {
        self.events.try_iter().find_map(|event| match event {
            Event::Signal(signal) => Some(signal),
            Event::Lost | Event::WantsTerminal | Event::Ended => None,
        })
    }

    /// Until the program has ended. What was done to stop it, if anything was.
    fn watch_over(&self, running: &Running, lease: &impl Lease) -> Option<Stopping> {
        let mut stopping: Option<Stopping> = None;
        let (mut ignored, mut asked_for_it) = (false, false);
        let mut lease_end = Instant::now() + lease.remaining();
        loop {
            let now = Instant::now();
            let held = lease.is_held();
            let remaining = lease.remaining();
            if held {
                lease_end = now + remaining;
            }
            match &mut stopping {
                Some(stop) => stop.kill_in_time(running.group()),
                None if held && remaining > self.notice() => {}
                None if *self.on_lost == OnLost::Ignore => {
                    if !held && !ignored {
                        say(&format!("the lock is lost ({}): the program goes on", reason(lease)));
                        ignored = true;
                    }
                }
                None => stopping = Some(self.stop(running, lease, lease_end)),
            }
            let next_kill = stopping.as_ref().filter(|stop| !stop.killed).map(|stop| stop.kill_at);
            let next_stop =
                (stopping.is_none() && held).then(|| lease_end.checked_sub(self.notice())).flatten();
            let pause =
                [next_kill, next_stop].into_iter().flatten().map(|at| at.saturating_duration_since(now));
            // A moment more: to be there after it, not just before.
            let pause = pause.min().map_or(LOOK, |pause| (pause + Duration::from_millis(1)).min(LOOK));
            match self.events.recv_timeout(pause) {
                Ok(Event::Ended) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(Event::Signal(number)) => {
                    if let Some(signal) = Signal::from_named_raw(number) {
                        running.signal(signal);
                    }
                }
                Ok(Event::WantsTerminal) => end_reader_of_terminal(running, &mut asked_for_it),
                // The state is looked at above.
                Ok(Event::Lost) | Err(RecvTimeoutError::Timeout) => {}
            }
        }
        stopping
    }

    /// How long before the lease's end stopping begins.
    fn notice(&self) -> Duration {
        match self.on_lost {
            OnLost::Kill => MARGIN,
            _ => self.grace + MARGIN,
        }
    }

    fn stop(&self, running: &Running, lease: &impl Lease, lease_end: Instant) -> Stopping {
        say(&format!("the lock is lost ({}): stopping the program", reason(lease)));
        let now = Instant::now();
        let kill_at = match self.on_lost {
            OnLost::Kill => now,
            _ => last_moment(now, lease_end, self.grace, lease.lost_reason()),
        };
        let mut stop = Stopping { kill_at, killed: false, helper: None };
        match self.on_lost {
            OnLost::Command(command) => stop.helper = self.ask(command, running.group()),
            _ if kill_at > now => running.signal(Signal::TERM),
            _ => {}
        }
        stop.kill_in_time(running.group());
        stop
    }

    /// Starts the command that asks the program to stop.
    fn ask(&self, command: &str, group: Pid) -> Option<Child> {
        use std::os::unix::process::CommandExt as _;
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", command]).envs(self.start.told.iter().map(|(name, value)| (name, value)));
        shell.env("SYNCGUARD_GROUP", group.as_raw_nonzero().to_string());
        shell.stdin(Stdio::null()).process_group(0);
        shell.spawn().map_err(|error| say(&format!("{command}: {error}"))).ok()
    }
}

impl Stopping {
    fn kill_in_time(&mut self, group: Pid) {
        if !self.killed && self.kill_at <= Instant::now() {
            self.killed = true;
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    fn end_helper(&mut self) {
        if let Some(helper) = &mut self.helper {
            if !matches!(helper.try_wait(), Ok(Some(_))) {
                let _ = kill_process_group(Pid::from_child(helper), Signal::KILL);
            }
            let _ = helper.wait();
        }
    }
}

/// It would wait for a terminal that it does not have, with the lock: so it is asked to end, and then ended.
fn end_reader_of_terminal(running: &Running, asked: &mut bool) {
    if *asked {
        running.signal(Signal::KILL);
        return;
    }
    *asked = true;
    say(
        "the program asks for input at the terminal, which it does not have here, and is ended: give it its answers in a file or by an option",
    );
    running.signal(Signal::TERM);
    running.signal(Signal::CONT);
}

/// When SIGKILL comes: `grace` from now, but before the lease is over. At once where it is over, or another's.
fn last_moment(now: Instant, lease_end: Instant, grace: Duration, lost: Option<LostReason>) -> Instant {
    match lost {
        // The row is gone, and with it nobody else is known to have come.
        None | Some(LostReason::RowMissing | LostReason::MaxHold | LostReason::Closed) => {
            let before_the_end = lease_end.checked_sub(MARGIN).unwrap_or(now);
            before_the_end.min(now + grace)
        }
        Some(_) => now,
    }
}

fn reason(lease: &impl Lease) -> String {
    lease.lost_reason().map_or("it cannot be renewed".to_owned(), |reason| reason.to_string())
}

/// 128 + N, as shells say it.
pub(crate) fn code_of_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// The exit code of a program that ended.
pub(crate) fn code_of(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, Some(signal)) => code_of_signal(signal),
        (None, None) => u8::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sigkill_comes_after_the_grace_and_never_after_the_lease() {
        let now = Instant::now();
        let s = Duration::from_secs;
        let at = |lease_end, reason| last_moment(now, lease_end, s(6), reason);
        assert_eq!(at(now + s(20), Some(LostReason::RowMissing)), now + s(6));
        assert_eq!(at(now + s(6) + MARGIN, None), now + s(6));
        assert_eq!(at(now + s(2) + MARGIN, None), now + s(2), "the lease ends sooner than the grace");
        for over in [LostReason::Expired, LostReason::Unreachable, LostReason::RenewalRefused] {
            assert_eq!(
                at(now + s(20), Some(over)),
                now,
                "what the clock said before a suspend counts no more"
            );
        }
    }
}
