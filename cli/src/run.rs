//! `run`: a program under a lock, as one of its readers, or under a permit.

use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use syncguard::{
    CancelToken, ErrorCode, LockError, LockGuard, LockOptions, PgLockClient, ReleaseResult, Result as Locked,
};

use crate::args::{At, Program, Run};
use crate::child::Start;
use crate::choices::{OnLost, Wait};
use crate::connection::connect_as;
use crate::failure::{Ended, Failure, say, tell_causes};
use crate::output::{age, clock, printable};
use crate::progress::{Progress, Subject};
use crate::show::find;
use crate::signals;
use crate::supervise::{Ending, Event, MARGIN, Supervisor, code_of, code_of_signal};

/// How long the end of `run` may take to let everything go.
const CLOSING: Duration = Duration::from_secs(5);
const SHORTEST_TTL: Duration = Duration::from_secs(1);

/// What all commands that run a program have.
pub(crate) struct Work<'a> {
    pub(crate) client: PgLockClient,
    pub(crate) program: &'a Program,
    pub(crate) on_lost: &'a OnLost,
    grace: Duration,
    waiting: CancelToken,
    tell: Sender<Event>,
    events: Receiver<Event>,
}

impl<'a> Work<'a> {
    /// Checks what was asked for, listens for signals, and connects.
    pub(crate) fn begin(at: &At, program: &'a Program, on_lost: &'a OnLost) -> Result<Self, Failure> {
        let grace = grace(program)?;
        let (tell, events) = mpsc::channel();
        let waiting = CancelToken::new();
        signals::listen(tell.clone(), waiting.clone())
            .map_err(|error| Failure::Io("signals cannot be heard".to_owned(), error))?;
        let client = connect_as(at, program.owner.as_deref())?;
        Ok(Self { client, program, on_lost, grace, waiting, tell, events })
    }

    pub(crate) fn options(&self) -> LockOptions {
        let tell = self.tell.clone();
        let options = LockOptions::new().ttl(self.program.ttl).cancel(&self.waiting).on_lost(move |_| {
            let _ = tell.send(Event::Lost);
        });
        match &self.program.note {
            Some(note) => options.note(note),
            None => options,
        }
    }

    pub(crate) fn waiting(&self) -> &CancelToken {
        &self.waiting
    }

    /// The signal that ended the wait, as an exit code.
    pub(crate) fn interrupted(&self, error: &LockError) -> Option<u8> {
        let signal = self.events.try_iter().find_map(|event| match event {
            Event::Signal(signal) => Some(signal),
            Event::Lost | Event::WantsTerminal | Event::Ended => None,
        });
        signal.filter(|_| error.code() == ErrorCode::Aborted).map(code_of_signal)
    }

    pub(crate) fn supervisor<'s>(&'s self, told: &'s [(&'static str, String)]) -> Supervisor<'s> {
        Supervisor {
            start: Start { words: &self.program.words, told },
            on_lost: self.on_lost,
            grace: self.grace,
            tell: self.tell.clone(),
            events: &self.events,
        }
    }

    /// Lets go of what is left, such as a lease that is kept for `--min-hold`.
    pub(crate) fn close(self) {
        match self.client.close(CLOSING) {
            Ok(report) if report.failed + report.pending > 0 => {
                say(&format!(
                    "the lock could not be released: it stays until its ttl is over, at most {} from now",
                    age(self.program.ttl + Duration::from_secs(1))
                ));
            }
            Ok(_) => {}
            Err(error) => say(&error.to_string()),
        }
    }
}

/// From the request to stop to SIGKILL.
fn grace(program: &Program) -> Result<Duration, Failure> {
    let ttl = program.ttl;
    if ttl < SHORTEST_TTL {
        return Err(Failure::Usage(format!(
            "--ttl must be at least {}: a slow answer must not end a lease",
            age(SHORTEST_TTL)
        )));
    }
    let grace = program.grace.unwrap_or(ttl / 5);
    // Renewed every third of the ttl, a healthy lease always has more than half of it left.
    if grace + MARGIN > ttl / 2 {
        let ttl = age((grace + MARGIN).saturating_mul(2));
        return Err(Failure::Usage(format!(
            "--grace must be below half of --ttl, because the program has to end before the lease does: a --ttl of {ttl} would do"
        )));
    }
    Ok(grace)
}

pub(crate) fn run(at: &At, run: &Run) -> Ended {
    if let Some(period) = run.once {
        return crate::once::run(at, run, period);
    }
    let work = Work::begin(at, &run.program, &run.on_lost)?;
    let code = match acquire(&work, run) {
        Ok(Some(guard)) => under(&work, run, guard),
        Ok(None) => {
            tell_busy(&work.client, run);
            Ok(run.busy_code)
        }
        Err(error) => match work.interrupted(&error) {
            Some(code) => Ok(code),
            None => Err(Failure::At(printable(&run.key), error)),
        },
    };
    work.close();
    code
}

/// `None` if somebody else has it.
fn acquire(work: &Work<'_>, run: &Run) -> Locked<Option<LockGuard>> {
    let mut options = run.order.of(work.options());
    if let Some(least) = run.min_hold {
        options = options.min_hold(least);
    }
    let options = match run.wait {
        Wait::Once => options,
        Wait::UpTo(limit) => options.timeout(limit),
        Wait::Forever => options.wait_forever(),
    };
    let subject =
        Subject { key: run.key.clone(), permits: run.permits, wait: run.wait, doing: "waiting for" };
    let _line = Progress::start(&work.client, subject);
    let locked = match (run.permits, run.wait) {
        (None, Wait::Once) if run.shared => work.client.try_read_lock_with(&run.key, &options),
        (None, _) if run.shared => work.client.read_lock_with(&run.key, &options).map(Some),
        (None, Wait::Once) => work.client.try_lock_with(&run.key, &options),
        (None, _) => work.client.lock_with(&run.key, &options).map(Some),
        (Some(limit), Wait::Once) => work.client.semaphore(&run.key, limit)?.try_acquire_with(&options),
        (Some(limit), _) => work.client.semaphore(&run.key, limit)?.acquire_with(&options).map(Some),
    };
    match locked {
        Err(error) if error.code() == ErrorCode::AcquisitionTimeout => Ok(None),
        locked => locked,
    }
}

fn under(work: &Work<'_>, run: &Run, guard: LockGuard) -> Ended {
    let mut told = vec![
        ("SYNCGUARD_KEY", run.key.clone()),
        ("SYNCGUARD_FENCE", guard.fence().to_string()),
        ("SYNCGUARD_LOCK_ID", guard.lock_id().to_owned()),
    ];
    if let Some(permit) = guard.permit() {
        told.push(("SYNCGUARD_PERMIT", permit.to_string()));
    }
    let ending = work.supervisor(&told).run(&guard);
    // Before anything else is said: the next one waits for it.
    let released = guard.release();
    let status = match ending? {
        Ending::NotStarted(signal) => return Ok(code_of_signal(signal)),
        Ending::Lost => return Ok(run.program.lost_code),
        Ending::Exited(status) => status,
    };
    match released {
        Ok(ReleaseResult::NotHeld) if run.on_lost != OnLost::Ignore => {
            let code = code_of(status);
            say(&format!(
                "the lock was lost before the program ended, with exit code {code}: another program may have run at the same time"
            ));
            Ok(run.program.lost_code)
        }
        Ok(_) => Ok(code_of(status)),
        Err(error) => {
            say(&format!("the lock could not be released yet: {error}"));
            tell_causes(&error);
            Ok(code_of(status))
        }
    }
}

/// Who has it, for whoever reads the log.
fn tell_busy(client: &PgLockClient, run: &Run) {
    let key = printable(&run.key);
    let waited = match run.wait {
        Wait::UpTo(limit) => format!("; waited for {}", age(limit)),
        Wait::Once | Wait::Forever => String::new(),
    };
    let text = match (run.permits, find(client, &run.key)) {
        (Some(limit), _) => format!("{key}: all {limit} permits are held{waited}"),
        (None, Ok(Some(held))) => format!(
            "{key} is held{} for {}, since {}, under fencing token {}{waited}",
            held.by().unwrap_or_else(|| " by somebody else".to_owned()),
            age(held.age()),
            clock(held.lease.acquired_at_ms),
            held.lease.fence.get()
        ),
        _ => format!("{key} was held by somebody else{waited}"),
    };
    say(&text);
}
