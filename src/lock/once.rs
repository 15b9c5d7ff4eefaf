//! Runs, once per slot: begin, claim, the closure, and the mark at its end.
//!
//! 1. A run has a lease as any guard has, renewed as any guard's, until its end is asked for.
//! 2. Its slot is told as done only if the mark is known to be there and this run's. It is if the call that
//!    marked it says so. After a lost answer, a mark that is there is this run's only as long as nobody else can
//!    have had the lease, which the local deadline tells.
//! 3. Whatever becomes of the mark, a lease that is not known to have ended is released.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::backend::{
    Attempt, BeginOutcome, BeginRun, BegunRun, LockBackend, LockEnding, LostReason, MarkOutcome, MarkRun,
    MarkStep, Slot,
};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::lock::attempt::{LockCall, under_own_id};
use crate::lock::course::{Course, failed};
use crate::lock::guard::LockGuard;
use crate::model::fence::Fence;
use crate::model::time::Moment;

/// The result of a job that is to run once per slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "Failed has the error of the job"]
pub enum RunOnce<T, E> {
    /// It ran, and its slot is marked as done.
    Done(T),
    /// It ran and failed. Its slot is not marked, and it may run again in the same slot; except if the slot
    /// was claimed at the start, or a transaction with [`Run::complete_in`] was committed before.
    Failed(E),
    /// It did not run: the slot, or a later one, is done.
    AlreadyDone,
    /// It did not run: another holder has the lease of its name, or a grant came too late to be trusted.
    Running,
}

/// A run of a job, as its closure sees it.
///
/// The lease of the job's name is held, and renewed, until the closure returns. It can be lost like any lease: see
/// [`LockGuard`].
///
/// # Blocking
///
/// [`complete_in`](Self::complete_in) takes as long as the transaction's own statements may,
/// [`completion_sql`](Self::completion_sql) at most `operation_timeout`. Nothing else does I/O.
///
/// # Cancellation
///
/// No token ends them.
pub struct Run {
    guard: LockGuard,
    slot: Slot,
    /// What marks its slot: see [`Slot::at`].
    mark: u64,
    skipped: u64,
    completed: AtomicBool,
}

impl Run {
    /// The number of its slot: for [`Slot::every`] the server's clock divided by the period, which
    /// [`period_start_ms`](Self::period_start_ms) turns into a time; for [`Slot::number`] the caller's.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use syncguard::{LockOptions, RunOnce, Slot};
    ///
    /// let run = client.run_once("report", Slot::number(7), &LockOptions::new(), |run| Ok::<_, String>(run.slot()))?;
    /// assert_eq!(run, RunOnce::Done(7));
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn slot(&self) -> u64 {
        self.slot.number_of(self.mark)
    }

    /// When its period began, in Unix milliseconds of the server's clock; `None` for a number of the caller's.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::{LockOptions, Slot};
    ///
    /// let hourly = Slot::every(Duration::from_secs(3600));
    /// let _ = client.run_once("report", hourly, &LockOptions::new(), |run| {
    ///     assert_eq!(run.period_start_ms(), Some(run.slot() * 3_600_000));
    ///     Ok::<_, String>(())
    /// })?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn period_start_ms(&self) -> Option<u64> {
        self.slot.period_ms().map(|_| self.mark)
    }

    /// How many slots were missed since the last one that is done: 0 for the first run of a job. With the
    /// caller's own numbers, each number counts as a slot.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::{LockOptions, Slot};
    ///
    /// let hourly = Slot::every(Duration::from_secs(3600));
    /// let _ = client.run_once("report", hourly, &LockOptions::new(), |run| {
    ///     println!("catching up on {} hours", run.skipped());
    ///     Ok::<_, String>(())
    /// })?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// The fencing token of its lease.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::{LockOptions, Slot};
    ///
    /// let hourly = Slot::every(Duration::from_secs(3600));
    /// let _ = client.run_once("report", hourly, &LockOptions::new(), |run| {
    ///     println!("the fencing token is {}", run.fence());
    ///     Ok::<_, String>(())
    /// })?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.guard.fence()
    }

    /// Whether its lease can still be trusted: see [`LockGuard::is_held`].
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::{LockOptions, Slot};
    ///
    /// let hourly = Slot::every(Duration::from_secs(3600));
    /// let _ = client.run_once("import", hourly, &LockOptions::new(), |run| {
    ///     for file in ["a.csv", "b.csv"] {
    ///         if !run.is_held() {
    ///             return Err("stopped: another process may run it now");
    ///         }
    ///         println!("importing {file}");
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.guard.is_held()
    }

    /// How long its lease can be trusted without a further renewal; zero once it is lost.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::{LockOptions, RunOnce, Slot};
    ///
    /// let hourly = Slot::every(Duration::from_secs(3600));
    /// let rest = client.run_once("import", hourly, &LockOptions::new(), |run| Ok::<_, ()>(run.remaining()))?;
    /// assert!(matches!(rest, RunOnce::Done(rest) if rest > Duration::ZERO));
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.guard.remaining()
    }

    /// Fires when its lease can no longer be trusted: see [`LockGuard::lost`].
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::{LockOptions, Slot};
    ///
    /// let hourly = Slot::every(Duration::from_secs(3600));
    /// let _ = client.run_once("import", hourly, &LockOptions::new(), |run| {
    ///     let stopped = run.lost().wait_timeout(Duration::from_millis(1));
    ///     if stopped { Err("the lease is lost") } else { Ok(()) }
    /// })?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn lost(&self) -> &CancelToken {
        self.guard.lost()
    }

    /// Why its lease is lost; `None` while it is not.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use syncguard::{LockOptions, Slot};
    ///
    /// let _ = client.run_once("import", Slot::number(7), &LockOptions::new(), |run| {
    ///     assert_eq!(run.lost_reason(), None);
    ///     Ok::<_, String>(())
    /// })?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn lost_reason(&self) -> Option<LostReason> {
        self.guard.lost_reason()
    }

    /// The statements that complete it in a caller's transaction. From here on its end writes no mark: whether
    /// that transaction is committed is the caller's to say, and an effect without its mark, or the other way
    /// round, must not be.
    pub(crate) fn begin_completion(&self) -> Result<String> {
        self.guard.check_process()?;
        if self.slot.is_claimed_at_start() {
            return Err(LockError::invalid(
                "the slot of this run was claimed at its start, and is marked already: leave claim_at_start away to mark it in a transaction",
            ));
        }
        let statement = self.guard.backend().completion_statement(&self.record())?;
        self.completed.store(true, Ordering::SeqCst);
        Ok(statement)
    }

    /// The job's name.
    pub(crate) fn key(&self) -> &str {
        self.guard.key()
    }

    fn record(&self) -> MarkRun<'_> {
        MarkRun {
            key: self.guard.key(),
            lock_id: self.guard.lock_id(),
            fence: self.guard.fence(),
            slot: self.slot,
            number: self.mark,
        }
    }
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").field("guard", &self.guard).field("slot", &self.slot()).finish_non_exhaustive()
    }
}

/// Runs the job, unless its slot is done or another holder has the lease.
pub(super) fn run_once<T, E>(
    call: &LockCall,
    slot: Slot,
    job: impl FnOnce(&Run) -> Result<T, E>,
) -> Result<RunOnce<T, E>> {
    let run = match begin(call, slot)? {
        Ok(run) => run,
        Err(not_now) => return Ok(not_now),
    };
    if slot.is_claimed_at_start() {
        claim(&run)?;
    }
    // Caught, so that the lease is released before the panic goes on.
    let result = catch_unwind(AssertUnwindSafe(|| job(&run)));
    match result {
        Ok(Ok(value)) if slot.is_claimed_at_start() => {
            drop(run);
            Ok(RunOnce::Done(value))
        }
        Ok(Ok(value)) => end(run).map(|()| RunOnce::Done(value)),
        Ok(Err(error)) => {
            drop(run);
            Ok(RunOnce::Failed(error))
        }
        Err(panic) => {
            drop(run);
            resume_unwind(panic)
        }
    }
}

fn begin<T, E>(call: &LockCall, slot: Slot) -> Result<Result<Run, RunOnce<T, E>>> {
    call.token.check()?;
    let engine = call.engine();
    let _entered = engine.enter()?;
    let course = call.begin();
    let begun = begin_told(call, slot, &course);
    let ending = match &begun {
        Ok(Ok(_)) => return begun,
        Ok(Err(RunOnce::AlreadyDone)) => LockEnding::SlotDone,
        Ok(Err(_)) => LockEnding::Busy,
        Err(error) => failed(error),
    };
    course.not_granted(engine.told(), 1, ending);
    begun
}

fn begin_told<T, E>(call: &LockCall, slot: Slot, course: &Arc<Course>) -> Result<Result<Run, RunOnce<T, E>>> {
    let engine = call.engine();
    let end = engine.call_deadline(Moment::NEVER);
    call.prepare(end)?;
    let sent = engine.clock.now();
    let ttl = call.options.ttl;
    let outcome = under_own_id(engine, &call.key, ttl, |lock_id| {
        let deadline = engine.call_deadline(end);
        let attempt = Attempt { key: &call.key, lock_id, ttl, deadline, label: call.label() };
        engine.backend.begin_run(&BeginRun::new(attempt, slot), &call.token)
    })?;
    let BegunRun { grant, slot: mark, last } = match outcome {
        BeginOutcome::Begun(begun) => begun,
        BeginOutcome::AlreadyDone => return Ok(Err(RunOnce::AlreadyDone)),
        BeginOutcome::Running => return Ok(Err(RunOnce::Running)),
    };
    let Some(leases) = call.hold(&call.key, (end, sent), grant, (course, 1))? else {
        return Ok(Err(RunOnce::Running));
    };
    let guard = LockGuard::new(Arc::clone(&call.handle), leases);
    let skipped = last.map_or(0, |last| slot.between(last, mark));
    Ok(Ok(Run { guard: guard.for_helper(), slot, mark, skipped, completed: AtomicBool::new(false) }))
}

/// Marks the slot before the job runs. The job runs only after the answer, and in the lease's time.
fn claim(run: &Run) -> Result<()> {
    let answer =
        run.guard.ask(|backend, deadline| backend.mark_run(&run.record(), MarkStep::Claim, deadline));
    match answer {
        Ok(MarkOutcome::Marked) if run.is_held() => Ok(()),
        Ok(MarkOutcome::Marked) => Err(lease_lost(
            "the slot was claimed and the job has not run: the lease was over by then. It does not run in this slot any more",
        )),
        Ok(_) => Err(lease_lost(
            "the job has not run, and its slot is not claimed: the lease was lost before; try again",
        )),
        Err(error) => {
            let message = if error.is_outcome_unknown() {
                "the job has not run, and whether its slot is claimed is not known: if it is, the job does not run in it any more"
            } else {
                "the job has not run, and its slot is not claimed: try again"
            };
            Err(because_of(error, message))
        }
    }
}

/// Marks the slot of a job that was well, or sees whether its own transaction did, and ends the lease.
fn end(run: Run) -> Result<()> {
    let Run { guard, slot, mark, completed, .. } = run;
    let completed = completed.into_inner();
    let step = if completed { MarkStep::Verify } else { MarkStep::Finish };
    let (key, lock_id, fence) = (guard.key().to_owned(), guard.lock_id().to_owned(), guard.fence());
    let record = MarkRun { key: &key, lock_id: &lock_id, fence, slot, number: mark };
    let ended = guard.end_with(
        |backend, deadline| backend.mark_run(&record, step, deadline),
        |outcome| matches!(outcome, MarkOutcome::Marked | MarkOutcome::Found),
    );
    let error = match ended {
        Some((Ok(MarkOutcome::Marked), _) | (Ok(MarkOutcome::Found), true)) => return Ok(()),
        Some((Ok(MarkOutcome::Found), false)) => LockError::new(ErrorCode::ServiceUnavailable)
            .with_message("the job ran, and its slot is done; whether by this run or by a later one is not known, since an answer was lost")
            .with_unknown_outcome(Duration::ZERO),
        Some((Ok(MarkOutcome::NotMarked), _)) if completed => lease_lost(
            "the job ran, and its slot is not marked as done: the transaction with complete_in was not committed before the job returned; unless that is still done, the slot may run again",
        ),
        Some((Ok(MarkOutcome::NotMarked), _)) => lease_lost(
            "the job ran, and its slot is not marked as done: the lease was lost before; the slot may run again",
        ),
        None => lease_lost(
            "the job ran, and its slot is not marked as done: the client was closed, or this process is a fork; the slot may run again",
        ),
        Some((Err(error), _)) if error.is_outcome_unknown() => {
            because_of(error, "the job ran, and whether its slot is marked as done is not known; if it is not, the slot may run again")
        }
        Some((Err(error), _)) => {
            because_of(error, "the job ran, and its slot could not be marked as done: the slot may run again")
        }
    };
    Err(error.with_lock_id(lock_id))
}

/// A run that cannot mark its slot: it has no lease any more, or its transaction did not mark it.
fn lease_lost(message: &'static str) -> LockError {
    LockError::new(ErrorCode::Aborted).with_message(message)
}

/// What it means for the run that a call failed, with the failure as its cause.
fn because_of(error: LockError, message: &'static str) -> LockError {
    let mut told = LockError::new(error.code()).with_message(message);
    if let Some(span) = error.may_be_held_for() {
        told = told.with_unknown_outcome(span);
    }
    if let Some(lock_id) = error.lock_id() {
        told = told.with_lock_id(lock_id);
    }
    if let Some(sqlstate) = error.sqlstate() {
        told = told.with_sqlstate(sqlstate);
    }
    told.with_source(error)
}
