//! Telemetry: a decorator that reports each operation of a backend to a callback.
//!
//! Without it no event is built and no hash computed. With it, an operation costs two readings of
//! the clock and one short append; hashing and the callback happen on a thread of their own.
//!
//! # What is reported
//!
//! | call | event |
//! | --- | --- |
//! | `acquire`, `attempt` | one `acquire`; contention is `fail`, reason `locked` |
//! | `grant_permit` | the same, under the name of the semaphore |
//! | `grant_shared` | the same for a reader |
//! | `grant_in_turn` | the same; `locked` is also what waits behind others |
//! | `grant_all` | one `acquire` per key that was granted, or for the key in the way; an error is reported for each key |
//! | `release`, `release_by`, `release_permit`, `release_shared`, `release_all` | one `release` per lease; `fail` has reason `expired` or `not-found`, if known |
//! | `extend`, `prolong` | one `extend`, likewise |
//! | `renew` | one `extend` per lease; a busy row is `fail` without reason |
//! | `is_locked` | one `isLocked`; *not locked* is `fail` without reason |
//! | `holder`, `turn`, `permits_in_use`, `announce`, `withdraw` | none: waiters ask often, and each attempt reports itself |
//! | `lookup`, `lookup_raw`, `who_holds` | one `lookup`; *not found* is `fail` without reason |
//! | `begin_run` | one `acquire`; a slot that is done is `fail` without reason |
//! | `mark_run` | one `release`, `ok` if the mark is there and the lease has ended by it; none for a claim |
//! | any call that ends with an error | `fail` without reason, and the error's code |
//!
//! Retries are several events: one for each call of the backend. A lock as a whole, from the beginning of its
//! wait to its end, is one [`LockSummary`], for [`on_lock`](TelemetryOptions::on_lock).
//!
//! The features `metrics` and `tracing` pass both to the crates of those names: `with_metrics` and `with_tracing`
//! of the options.
//!
//! ```
//! use std::sync::{Arc, Mutex};
//! use std::time::Duration;
//! use syncguard::backend::LockBackend;
//! use syncguard::{CancelToken, MemoryBackend, TelemetryOptions, with_telemetry};
//!
//! let lines = Arc::new(Mutex::new(Vec::new()));
//! let sink = Arc::clone(&lines);
//! let options = TelemetryOptions::new(move |event| {
//!     sink.lock().unwrap().push(format!("{} {}", event.operation, event.result));
//! });
//! let backend = with_telemetry(MemoryBackend::manual(), options);
//!
//! let never = CancelToken::never();
//! let _lease = backend.acquire("payment:42", Duration::from_secs(30), &never)?;
//! let _again = backend.acquire("payment:42", Duration::from_secs(30), &never)?;
//!
//! assert!(backend.handle().flush(Duration::from_secs(5)));
//! assert_eq!(*lines.lock().unwrap(), ["acquire ok", "acquire fail"]);
//! # Ok::<(), syncguard::LockError>(())
//! ```

mod course;
mod event;
mod queue;
#[cfg(feature = "metrics")]
mod to_metrics;
#[cfg(feature = "tracing")]
mod to_tracing;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::{
    AcquireResult, Attempt, AttemptAll, BeginOutcome, BeginRun, Capabilities, Connections, ExtendOutcome,
    Grant, GrantAll, HeldBy, Holder, Intent, LockBackend, LockCourse, LockInfo, LockInfoRaw, Lookup,
    LostReason, MarkOutcome, MarkRun, MarkStep, OnHeard, PermitAttempt, PermitGrant, Reason, ReleaseOutcome,
    RenewOutcome, Renewal, SharedAttempt, Turn, TurnAttempt, Watch,
};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, Result};
use crate::model::fence::Fence;
use crate::model::hash::hash_key;
use crate::model::key::MAX_KEY_LENGTH_BYTES;
use crate::model::time::{Clock, Moment};

pub use course::LockSummary;
pub use event::{EventResult, LockEvent, Operation, TelemetryOptions};
use queue::Sink;
pub use queue::TelemetryHandle;

/// Reports each operation of `backend`. It behaves exactly as before. See the [module](crate::telemetry).
pub fn with_telemetry<B: LockBackend>(backend: B, options: TelemetryOptions) -> Telemetry<B> {
    Telemetry { inner: backend, sink: Arc::new(Sink::new(options)) }
}

/// A backend whose operations are reported. Created by [`with_telemetry`].
///
/// Dropping the last clone waits for the callback for at most
/// [`flush_timeout`](TelemetryOptions::flush_timeout) (not at all when a callback drops it). A
/// callback that owns a clone keeps the thread alive forever: let it own a
/// [`Weak`](std::sync::Weak).
#[derive(Clone)]
pub struct Telemetry<B> {
    inner: B,
    sink: Arc<Sink>,
}

impl<B> Telemetry<B> {
    /// The backend itself: operations on it are not reported.
    #[must_use]
    pub fn inner(&self) -> &B {
        &self.inner
    }

    /// The state of the events: how many were delivered and dropped, and a way to wait for those still queued.
    #[must_use]
    pub fn handle(&self) -> TelemetryHandle {
        self.sink.handle()
    }
}

impl<B: LockBackend> Telemetry<B> {
    fn report<T>(
        &self,
        operation: Operation,
        subject: Subject<'_>,
        call: impl FnOnce(&B) -> Result<T>,
        read: impl FnOnce(&T) -> (Ending, Option<String>),
    ) -> Result<T> {
        let start = Instant::now();
        let answer = call(&self.inner);
        let duration = start.elapsed();
        let (ending, granted) = match &answer {
            Ok(value) => read(value),
            Err(error) => (Ending::error(error.code()), None),
        };
        let (key, lock_id) = subject.raw();
        self.sample();
        self.sink.offer([ending.event(operation, duration, key, lock_id.or(granted))]);
        answer
    }

    fn sample(&self) {
        self.sink.sample(&self.inner);
    }

    fn acquire_reported(
        &self,
        key: &str,
        call: impl FnOnce(&B) -> Result<AcquireResult>,
    ) -> Result<AcquireResult> {
        self.report(Operation::Acquire, Subject::Key(key), call, |answer| match answer {
            AcquireResult::Acquired(grant) => (Ending::OK, Some(grant.lock_id.clone())),
            AcquireResult::Locked => (Ending::fail(Some(Reason::Locked)), None),
        })
    }

    fn grant_reported(
        &self,
        key: &str,
        call: impl FnOnce(&B) -> Result<Option<Grant>>,
    ) -> Result<Option<Grant>> {
        self.report(Operation::Acquire, Subject::Key(key), call, |answer| match answer {
            Some(grant) => (Ending::OK, Some(grant.acquired.lock_id.clone())),
            None => (Ending::fail(Some(Reason::Locked)), None),
        })
    }

    fn release_reported(
        &self,
        lock_id: &str,
        call: impl FnOnce(&B) -> Result<ReleaseOutcome>,
    ) -> Result<ReleaseOutcome> {
        let read = |outcome: &ReleaseOutcome| (Ending::of_release(*outcome), None);
        self.report(Operation::Release, Subject::LockId(lock_id), call, read)
    }

    fn lookup_reported<T>(
        &self,
        what: Lookup<'_>,
        call: impl FnOnce(&B) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let subject = match what {
            Lookup::Key(key) => Subject::Key(key),
            Lookup::LockId(lock_id) => Subject::LockId(lock_id),
        };
        self.report(Operation::Lookup, subject, call, |found| (Ending::of(found.is_some()), None))
    }
}

impl<B: LockBackend> LockBackend for Telemetry<B> {
    fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult> {
        self.acquire_reported(key, |inner| inner.acquire(key, ttl, cancel))
    }

    fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome> {
        self.release_reported(lock_id, |inner| inner.release(lock_id, cancel))
    }

    fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome> {
        let call = |inner: &B| inner.extend(lock_id, ttl, cancel);
        self.report(Operation::Extend, Subject::LockId(lock_id), call, |answer| match answer {
            ExtendOutcome::Extended { .. } => (Ending::OK, None),
            ExtendOutcome::NotHeld(reason) => (Ending::fail(*reason), None),
        })
    }

    fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool> {
        let call = |inner: &B| inner.is_locked(key, cancel);
        self.report(Operation::IsLocked, Subject::Key(key), call, |locked| (Ending::of(*locked), None))
    }

    fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>> {
        self.lookup_reported(what, |inner| inner.lookup(what, cancel))
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn attempt(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<AcquireResult> {
        self.acquire_reported(attempt.key, |inner| inner.attempt(attempt, cancel))
    }

    fn grant(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        self.grant_reported(attempt.key, |inner| inner.grant(attempt, cancel))
    }

    fn grant_all(&self, attempt: &AttemptAll<'_>, cancel: &CancelToken) -> Result<GrantAll> {
        let start = Instant::now();
        let answer = self.inner.grant_all(attempt, cancel);
        let duration = start.elapsed();
        let event = |(key, lock_id): &(&str, &str), ending: Ending| {
            let lock_id = (ending.result == EventResult::Ok).then(|| (*lock_id).to_owned());
            ending.event(Operation::Acquire, duration, Some((*key).to_owned()), lock_id)
        };
        let events: Vec<LockEvent> = match &answer {
            Ok(GrantAll::Granted(_)) => attempt.leases.iter().map(|lease| event(lease, Ending::OK)).collect(),
            Ok(GrantAll::Held { index, .. }) => {
                let in_the_way = attempt.leases.get(*index);
                in_the_way.iter().map(|lease| event(lease, Ending::fail(Some(Reason::Locked)))).collect()
            }
            Err(error) => {
                attempt.leases.iter().map(|lease| event(lease, Ending::error(error.code()))).collect()
            }
        };
        self.sink.offer(events);
        answer
    }

    fn holder(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<Option<Holder>> {
        self.inner.holder(key, deadline, cancel)
    }

    fn who_holds(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<Option<HeldBy>> {
        self.lookup_reported(Lookup::Key(key), |inner| inner.who_holds(key, deadline, cancel))
    }

    fn watch(&self, key: &str, heard: OnHeard) -> Option<Box<dyn Watch>> {
        self.inner.watch(key, heard)
    }

    fn release_by(&self, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        self.release_reported(lock_id, |inner| inner.release_by(lock_id, deadline))
    }

    fn release_all(&self, lock_ids: &[&str], deadline: Moment) -> Result<Vec<ReleaseOutcome>> {
        let start = Instant::now();
        let answer = self.inner.release_all(lock_ids, deadline);
        let duration = start.elapsed();
        let ending = |place: usize| match &answer {
            Ok(outcomes) => outcomes.get(place).copied().map_or(Ending::fail(None), Ending::of_release),
            Err(error) => Ending::error(error.code()),
        };
        let events: Vec<LockEvent> = lock_ids
            .iter()
            .enumerate()
            .map(|(place, id)| {
                ending(place).event(Operation::Release, duration, None, Some((*id).to_owned()))
            })
            .collect();
        self.sink.offer(events);
        answer
    }

    fn prolong(&self, lease: &Renewal<'_>, deadline: Moment) -> Result<RenewOutcome> {
        let call = |inner: &B| inner.prolong(lease, deadline);
        let read = |outcome: &RenewOutcome| (Ending::of_renewal(outcome), None);
        self.report(Operation::Extend, Subject::LockId(lease.lock_id), call, read)
    }

    fn renew(&self, leases: &[Renewal<'_>], deadline: Moment) -> Vec<Result<RenewOutcome>> {
        let start = Instant::now();
        let outcomes = self.inner.renew(leases, deadline);
        let duration = start.elapsed();
        // Built before the queue's lock is taken: there may be thousands.
        let events: Vec<LockEvent> = leases
            .iter()
            .zip(&outcomes)
            .map(|(lease, outcome)| {
                let ending = match outcome {
                    Ok(outcome) => Ending::of_renewal(outcome),
                    Err(error) => Ending::error(error.code()),
                };
                let (key, lock_id) = (lease.key.to_owned(), lease.lock_id.to_owned());
                ending.event(Operation::Extend, duration, Some(key), Some(lock_id))
            })
            .collect();
        self.sink.offer(events);
        outcomes
    }

    fn reserve_renewals(&self, deadline: Moment, cancel: &CancelToken) -> Result<()> {
        self.inner.reserve_renewals(deadline, cancel)
    }

    fn unreserve_renewals(&self) -> bool {
        self.inner.unreserve_renewals()
    }

    fn grant_permit(&self, attempt: &PermitAttempt<'_>, cancel: &CancelToken) -> Result<Option<PermitGrant>> {
        let call = |inner: &B| inner.grant_permit(attempt, cancel);
        self.report(Operation::Acquire, Subject::Key(attempt.semaphore), call, |answer| match answer {
            Some(permit) => (Ending::OK, Some(permit.grant.acquired.lock_id.clone())),
            None => (Ending::fail(Some(Reason::Locked)), None),
        })
    }

    fn permits_in_use(
        &self,
        semaphore: &str,
        among: u32,
        deadline: Moment,
        cancel: &CancelToken,
    ) -> Result<u32> {
        self.inner.permits_in_use(semaphore, among, deadline, cancel)
    }

    fn release_permit(&self, semaphore: &str, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        self.release_reported(lock_id, |inner| inner.release_permit(semaphore, lock_id, deadline))
    }

    fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoRaw>> {
        self.lookup_reported(what, |inner| inner.lookup_raw(what, cancel))
    }

    fn fence_statement(&self, key: &str, fence: Fence, lock_id: Option<&str>) -> Result<String> {
        self.inner.fence_statement(key, fence, lock_id)
    }

    fn fence_statement_all(&self, leases: &[(&str, Fence, &str)]) -> Result<String> {
        self.inner.fence_statement_all(leases)
    }

    fn grant_shared(&self, attempt: &SharedAttempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        self.grant_reported(attempt.attempt.key, |inner| inner.grant_shared(attempt, cancel))
    }

    fn release_shared(&self, key: &str, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        self.release_reported(lock_id, |inner| inner.release_shared(key, lock_id, deadline))
    }

    fn grant_in_turn(&self, attempt: &TurnAttempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        self.grant_reported(attempt.attempt.key, |inner| inner.grant_in_turn(attempt, cancel))
    }

    fn turn(&self, ticket: &Intent<'_>, deadline: Moment, cancel: &CancelToken) -> Result<Turn> {
        self.inner.turn(ticket, deadline, cancel)
    }

    fn announce(&self, intent: &Intent<'_>, deadline: Moment) -> Result<()> {
        self.inner.announce(intent, deadline)
    }

    fn withdraw(&self, id: &str, deadline: Moment) -> Result<()> {
        self.inner.withdraw(id, deadline)
    }

    fn fence_statement_shared(&self, key: &str, fence: Fence, lock_id: &str) -> Result<String> {
        self.inner.fence_statement_shared(key, fence, lock_id)
    }

    fn begin_run(&self, begin: &BeginRun<'_>, cancel: &CancelToken) -> Result<BeginOutcome> {
        let call = |inner: &B| inner.begin_run(begin, cancel);
        self.report(Operation::Acquire, Subject::Key(begin.attempt.key), call, |answer| match answer {
            BeginOutcome::Begun(run) => (Ending::OK, Some(run.grant.acquired.lock_id.clone())),
            BeginOutcome::Running => (Ending::fail(Some(Reason::Locked)), None),
            BeginOutcome::AlreadyDone => (Ending::fail(None), None),
        })
    }

    fn mark_run(&self, run: &MarkRun<'_>, step: MarkStep, deadline: Moment) -> Result<MarkOutcome> {
        let call = |inner: &B| inner.mark_run(run, step, deadline);
        if step == MarkStep::Claim {
            return call(&self.inner);
        }
        self.report(Operation::Release, Subject::LockId(run.lock_id), call, |outcome| {
            (Ending::of(*outcome == MarkOutcome::Marked), None)
        })
    }

    fn completion_statement(&self, run: &MarkRun<'_>) -> Result<String> {
        self.inner.completion_statement(run)
    }

    fn follow(&self, course: &LockCourse<'_>) {
        self.inner.follow(course);
        self.sample();
        self.sink.follow(course);
    }

    fn connections(&self) -> Option<Connections> {
        self.inner.connections()
    }

    fn clock(&self) -> Clock {
        self.inner.clock()
    }

    fn operation_timeout(&self) -> Duration {
        self.inner.operation_timeout()
    }

    fn close(&self) {
        self.inner.close();
    }
}

impl<B: fmt::Debug> fmt::Debug for Telemetry<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Telemetry")
            .field("inner", &self.inner)
            .field("events", &self.handle())
            .finish_non_exhaustive()
    }
}

/// What an operation was called with.
#[derive(Clone, Copy)]
enum Subject<'a> {
    Key(&'a str),
    LockId(&'a str),
}

impl Subject<'_> {
    fn raw(self) -> (Option<String>, Option<String>) {
        match self {
            Self::Key(key) => (Some(key.to_owned()), None),
            Self::LockId(lock_id) => (None, Some(lock_id.to_owned())),
        }
    }
}

/// How an operation ended.
#[derive(Clone, Copy)]
struct Ending {
    result: EventResult,
    reason: Option<Reason>,
    error: Option<ErrorCode>,
}

impl Ending {
    const OK: Self = Self { result: EventResult::Ok, reason: None, error: None };

    fn fail(reason: Option<Reason>) -> Self {
        Self { result: EventResult::Fail, reason, error: None }
    }

    fn error(code: ErrorCode) -> Self {
        Self { error: Some(code), ..Self::fail(None) }
    }

    fn of(positive: bool) -> Self {
        if positive { Self::OK } else { Self::fail(None) }
    }

    fn of_release(outcome: ReleaseOutcome) -> Self {
        match outcome {
            ReleaseOutcome::Released => Self::OK,
            ReleaseOutcome::NotHeld(reason) => Self::fail(reason),
        }
    }

    fn of_renewal(outcome: &RenewOutcome) -> Self {
        match outcome {
            RenewOutcome::Renewed { .. } => Self::OK,
            RenewOutcome::Lost(LostReason::Expired) => Self::fail(Some(Reason::Expired)),
            RenewOutcome::Lost(LostReason::TakenOver { .. } | LostReason::RowMissing) => {
                Self::fail(Some(Reason::NotFound))
            }
            RenewOutcome::Lost(_) | RenewOutcome::Busy => Self::fail(None),
        }
    }

    /// The event as it waits in the queue: with the raw values, whose hashes are the queue's to
    /// compute. Only what is too long to be a key or an id is hashed at once and not kept, so that
    /// a full queue has a size.
    fn event(
        self,
        operation: Operation,
        duration: Duration,
        key: Option<String>,
        lock_id: Option<String>,
    ) -> LockEvent {
        let ((key, key_hash), (lock_id, lock_id_hash)) = (kept(key), kept(lock_id));
        LockEvent {
            operation,
            result: self.result,
            key_hash,
            lock_id_hash,
            reason: self.reason,
            error: self.error,
            duration,
            key,
            lock_id,
        }
    }
}

/// The longest raw value that waits in the queue: a valid key in its longest form.
const LONGEST_KEPT: usize = MAX_KEY_LENGTH_BYTES * 8;

/// The value itself, or its hash if it is too long.
fn kept(value: Option<String>) -> (Option<String>, Option<String>) {
    match value {
        Some(long) if long.len() > LONGEST_KEPT => (None, Some(hash_key(&long))),
        value => (value, None),
    }
}
