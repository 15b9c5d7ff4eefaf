//! `run --once`: a program once per period, on whichever machine is first.
//!
//! Who finds it running waits to see how it ends, up to `--wait`: if its machine dies, or it fails, the next one
//! runs it. The wait ends with the period, whose program it is.

use std::time::{Duration, Instant};

use syncguard::{ErrorCode, RunOnce};

use crate::args::{At, Run};
use crate::choices::{Period, Wait};
use crate::failure::{Ended, Failure, say};
use crate::output::printable;
use crate::progress::{Progress, Subject};
use crate::run::Work;
use crate::supervise::{Ending, code_of, code_of_signal};

/// Between two looks whether it runs still.
const LOOK: Duration = Duration::from_millis(500);

pub(crate) fn run(at: &At, run: &Run, period: Period) -> Ended {
    let work = Work::begin(at, &run.program, &run.on_lost)?;
    let code = wait_and_run(&work, run, period);
    work.close();
    code
}

fn wait_and_run(work: &Work<'_>, run: &Run, period: Period) -> Ended {
    let key = printable(&run.key);
    let give_up = Instant::now().checked_add(match run.wait {
        Wait::Once => Duration::ZERO,
        Wait::UpTo(limit) => limit,
        Wait::Forever => Duration::MAX,
    });
    let mut line = None;
    let mut last_slot = None;
    loop {
        let slot_now = slot_at(work, period)?;
        if last_slot.is_some_and(|last| last != slot_now) {
            say(&format!("{key}: the period is over, and the run elsewhere had not ended"));
            return Ok(run.busy_code);
        }
        last_slot = Some(slot_now);
        if let Some(code) = attempt(work, run, period, &mut line)? {
            return Ok(code);
        }
        let rest = give_up.map_or(LOOK, |at| at.saturating_duration_since(Instant::now()));
        if rest.is_zero() {
            drop(line);
            say(&format!("{key} is already running elsewhere, and its result is not known yet"));
            return Ok(run.busy_code);
        }
        line = line.or_else(|| {
            let subject =
                Subject { key: run.key.clone(), permits: None, wait: run.wait, doing: "running elsewhere," };
            Progress::start(&work.client, subject)
        });
        let _fired = work.waiting().wait_timeout(rest.min(LOOK));
    }
}

/// The slot by the server's clock; for a number of the caller's, that.
fn slot_at(work: &Work<'_>, period: Period) -> Result<u64, Failure> {
    let now = match period {
        Period::Every(_) => work.client.operator().server_time_ms()?,
        Period::Number(_) => 0,
    };
    Ok(period.slot().at(now))
}

/// The exit code, or `None` if it runs elsewhere.
fn attempt(
    work: &Work<'_>,
    run: &Run,
    period: Period,
    line: &mut Option<Progress>,
) -> Result<Option<u8>, Failure> {
    let slot = if run.at_most_once { period.slot().claim_at_start() } else { period.slot() };
    let ran = work.client.run_once(&run.key, slot, &work.options(), |lease| {
        *line = None;
        if lease.skipped() > 0 {
            say(&format!("{} periods since the last run were missed", lease.skipped()));
        }
        let told = [
            ("SYNCGUARD_KEY", run.key.clone()),
            ("SYNCGUARD_FENCE", lease.fence().to_string()),
            ("SYNCGUARD_SLOT", lease.slot().to_string()),
        ];
        match work.supervisor(&told).run(lease) {
            Ok(Ending::Exited(status)) if code_of(status) == 0 => Ok(0),
            Ok(Ending::Exited(status)) => Err(Ok(code_of(status))),
            Ok(Ending::NotStarted(signal)) => Err(Ok(code_of_signal(signal))),
            Ok(Ending::Lost) => Err(Ok(run.program.lost_code)),
            Err(failure) => Err(Err(failure)),
        }
    });
    *line = line.take().filter(|_| matches!(ran, Ok(RunOnce::Running)));
    match ran {
        Ok(RunOnce::Done(code)) => Ok(Some(code)),
        Ok(RunOnce::Failed(code)) => code.map(Some),
        Ok(RunOnce::AlreadyDone) => Ok(Some(0)),
        Ok(RunOnce::Running) => Ok(None),
        Err(error) => match work.interrupted(&error) {
            Some(code) => Ok(Some(code)),
            None if error.code() == ErrorCode::Aborted => {
                // The lease was lost before the end could be noted.
                say(&format!("{}: {error}", printable(&run.key)));
                Ok(Some(run.program.lost_code))
            }
            None => Err(Failure::At(printable(&run.key), error)),
        },
    }
}
