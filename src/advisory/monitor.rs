//! The monitor: it keeps the time, and does no I/O.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::advisory::AdvisoryLost;
use crate::advisory::crew::{Board, Crew, Held, LINGER, Stage};
use crate::model::time::Moment;
use crate::threads::contained;

/// How long a session may be silent before its lock counts as lost, whatever the session thread does.
const PATIENCE: Duration = Duration::from_secs(10);

/// The monitor looks at the clock this often: a sleep stands still while the host is suspended.
const NAP: Duration = Duration::from_millis(500);

/// A monitor that did not run for this long was stopped, with the process or the host.
const STOPPED: Duration = Duration::from_secs(2);

/// The monitor: no I/O in here.
pub(super) fn run(crew: &Arc<Crew>) {
    let mut idle_since = None;
    let mut last = crew.clock.now();
    let mut listening = last;
    loop {
        let now = crew.clock.now();
        if now.since(last) > STOPPED {
            // It was us who did not listen: silence counts from here.
            listening = now;
        }
        last = now;
        let (holds, patience, changes): (Vec<_>, _, _) = {
            let mut board = crew.board();
            if board.holds.is_empty() {
                let since = *idle_since.get_or_insert_with(Instant::now);
                let rest = LINGER.saturating_sub(since.elapsed());
                if board.stage != Stage::Open || rest.is_zero() {
                    board.monitor_runs = false;
                    crew.progress.notify_all();
                    return;
                }
                sleep(crew, board, rest.min(NAP));
                continue;
            }
            (
                board.holds.values().cloned().collect(),
                PATIENCE.max(board.round.saturating_mul(3)),
                board.changes,
            )
        };
        idle_since = None;
        // By the time of the look above: who is stopped in the middle of this has not listened either.
        let limit = (now.since(listening) >= patience).then_some((now, patience));
        let next = holds.iter().map(|hold| watched(crew, hold, limit)).min().unwrap_or(Moment::NEVER);
        drop(holds);
        let board = crew.board();
        let nap = next.since(crew.clock.now()).min(NAP);
        // A lock that came meanwhile found this thread awake and did not ring.
        if board.changes == changes && !nap.is_zero() {
            sleep(crew, board, nap);
        }
    }
}

/// Sleeps until somebody rings, at most so long. Says how long before, so that nobody rings in vain.
fn sleep(crew: &Crew, mut board: MutexGuard<'_, Board>, nap: Duration) {
    board.monitor_until = Some(crew.clock.now().after(nap));
    let slept = crew.monitor_bell.wait_timeout(board, nap);
    slept.unwrap_or_else(PoisonError::into_inner).0.monitor_until = None;
}

/// Looks at one lock, whatever happens: the other locks must be looked at too.
fn watched(crew: &Arc<Crew>, hold: &Arc<Held>, limit: Option<(Moment, Duration)>) -> Moment {
    contained(|| watch(crew, hold, limit)).unwrap_or(Moment::NEVER)
}

/// Looks at one lock; when to look again.
fn watch(crew: &Arc<Crew>, hold: &Arc<Held>, limit: Option<(Moment, Duration)>) -> Moment {
    let silent = limit.is_some_and(|(at, patience)| hold.is_silent(at, patience));
    crew.tick(hold);
    if silent && hold.lose(AdvisoryLost::Connection) {
        crew.tell_lost(hold);
    }
    if crew.clock.now() < hold.deadline {
        return hold.deadline;
    }
    if hold.keep && !hold.overdue.is_cancelled() {
        hold.overdue.cancel();
        log::warn!("the session lock {} is held beyond its max_hold, and kept", hold.key);
    }
    Moment::NEVER
}
