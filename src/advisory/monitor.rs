//! The monitor: it keeps the time, and does no I/O.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::advisory::held_lock::AdvisoryLost;
use crate::advisory::registry::{ClientLock, LINGER, Registry, Stage, State};
use crate::model::time::Moment;
use crate::sync::MutexGuard;
use crate::threads::catch_panic;

/// How long a session may be silent before its lock counts as lost, whatever the session thread does.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// The monitor looks at the clock this often: a sleep stands still while the host is suspended.
const LONGEST_SLEEP: Duration = Duration::from_millis(500);

/// A monitor that did not run for this long was stopped, with the process or the host.
const STOPPED: Duration = Duration::from_secs(2);

/// The monitor: no I/O in here.
pub(super) fn run(registry: &Arc<Registry>) {
    let mut idle_since = None;
    let mut last = registry.clock.now();
    let mut listening_since = last;
    loop {
        let now = registry.clock.now();
        if now.since(last) > STOPPED {
            // It was us who did not listen: silence counts from here.
            listening_since = now;
        }
        last = now;
        let (locks, silence_limit, changes): (Vec<_>, _, _) = {
            let mut state = registry.state();
            if state.locks.is_empty() {
                let since = *idle_since.get_or_insert_with(Instant::now);
                let rest = LINGER.saturating_sub(since.elapsed());
                if state.stage != Stage::Open || rest.is_zero() {
                    state.monitor_runs = false;
                    registry.ended.notify_all();
                    return;
                }
                sleep(registry, state, rest.min(LONGEST_SLEEP));
                continue;
            }
            (
                state.locks.values().cloned().collect(),
                SILENCE_LIMIT.max(state.ping_round.saturating_mul(3)),
                state.changes,
            )
        };
        idle_since = None;
        // By the time of the look above: who is stopped in the middle of this has not listened either.
        let silent = (now.since(listening_since) >= silence_limit).then_some((now, silence_limit));
        let next = locks.iter().map(|lock| check_contained(registry, lock, silent)).min();
        let next = next.unwrap_or(Moment::NEVER);
        drop(locks);
        let state = registry.state();
        let limit = next.since(registry.clock.now()).min(LONGEST_SLEEP);
        // A lock that came meanwhile found this thread awake and did not wake it.
        if state.changes == changes && !limit.is_zero() {
            sleep(registry, state, limit);
        }
    }
}

/// Sleeps until another thread wakes this one, at most so long. Notes until when before, so that no
/// thread wakes it in vain.
fn sleep(registry: &Registry, mut state: MutexGuard<'_, State>, limit: Duration) {
    state.monitor_until = Some(registry.clock.now().after(limit));
    registry.wake_monitor.wait_for(state, limit).monitor_until = None;
}

/// Checks one lock, whatever happens: the other locks must be checked too.
fn check_contained(
    registry: &Arc<Registry>,
    lock: &Arc<ClientLock>,
    silent: Option<(Moment, Duration)>,
) -> Moment {
    catch_panic(|| check(registry, lock, silent)).unwrap_or(Moment::NEVER)
}

/// Checks one lock; when to check again. `silent`: now, and the longest silence, where it counts.
fn check(registry: &Arc<Registry>, lock: &Arc<ClientLock>, silent: Option<(Moment, Duration)>) -> Moment {
    let is_silent = silent.is_some_and(|(now, limit)| lock.is_silent(now, limit));
    registry.check_deadline(lock);
    if is_silent && lock.lose(AdvisoryLost::Connection) {
        registry.report_lost(lock);
    }
    if registry.clock.now() < lock.deadline {
        return lock.deadline;
    }
    if lock.keep_past_deadline && !lock.overdue.is_cancelled() {
        lock.overdue.cancel();
        log::warn!("the session lock {} is held beyond its max_hold, and kept", lock.key);
    }
    Moment::NEVER
}
