//! What a holder has: guards over any backend, and the client that hands them out.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `options`, `resolve`, `settings` | the options of a lock; their checks; the settings of a client |
//! | `operations` | single attempts without a guard, and lookups |
//! | `attempt` | one attempt to take a lock |
//! | `waiter` | the one loop that waits |
//! | `turns` | whose turn it is among those who ask to be served in order |
//! | `several` | the locks of several keys at once |
//! | `semaphore` | the handle for permits |
//! | `shared` | the locks of readers |
//! | `lease` | the state machine of one lease: pure, with its invariants |
//! | `lease_set` | leases that are held and lost together |
//! | `guard`, `multi_guard` | the guards for one key and for several |
//! | `extend` | extending a guard's leases |
//! | `election` | campaigns for a key, and the terms of its leaders |
//! | `once` | runs, once per slot |
//! | `registry` | the guards, and the state that the two threads share |
//! | `engine` | the state that a client and its guards share |
//! | `backend_call` | calls of the backend, whose panics are caught there |
//! | `release` | releasing one lease, now or at the end of its `min_hold` |
//! | `timer`, `worker` | the two background threads |
//! | `background`, `close` | how the threads start, how all of it ends |
//! | `report` | failures that have no caller |

mod attempt;
mod backend_call;
mod background;
mod close;
mod course;
mod election;
mod engine;
mod extend;
mod guard;
mod in_the_way;
mod lease;
mod lease_set;
mod multi_guard;
mod once;
mod operations;
mod options;
mod registry;
mod release;
mod report;
mod resolve;
mod semaphore;
mod settings;
mod several;
mod shared;
mod timer;
mod turns;
mod waiter;
mod worker;

#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Capabilities, LockBackend, LockKind, Slot};
use crate::cancel::CancelToken;
use crate::error::Result;
use crate::model::key::Key;
use crate::model::time::Moment;

pub use close::CloseReport;
pub use election::{Leader, Term};
pub use guard::LockGuard;
pub use multi_guard::MultiGuard;
pub use once::{Run, RunOnce};
pub use options::{
    DEFAULT_MAX_RETRIES, DEFAULT_RETRY_DELAY, DEFAULT_TIMEOUT, DEFAULT_TTL, Heartbeat, LockOptions,
};
pub use report::{ReleaseErrorContext, ReleaseSource};
pub use semaphore::Semaphore;
pub use settings::ClientSettings;

pub use crate::waiting::{Backoff, Jitter};

pub(crate) use report::OnReleaseError;

use attempt::LockCall;
use backend_call::ask;
use engine::{Engine, Handle};
use guard::run_holding;

/// Locks over any [`LockBackend`]: waiting, renewal, guards.
///
/// A clone is the same client: one queue of waiters, one pair of background threads. The threads
/// start with the first lock and end after the last clone and the last guard are gone.
///
/// Its blocking calls are for ordinary threads; inside an async runtime use `spawn_blocking`.
///
/// # Blocking
///
/// | calls | at most |
/// | --- | --- |
/// | `lock`, `lock_with`, `read_lock`, `read_lock_with` | `timeout` of the options, 5 s by default; forever with `wait_forever`. The first lock of a client with a heartbeat also has the backend prepare its renewals, once, in the same time |
/// | `with_lock` | that, the time of its closure, and `dispose_timeout` |
/// | `elect` | no limit: see there |
/// | `run_once` | the time of its job, and as it says |
/// | `close` | its `deadline`, by the system's clock, and 50 ms for threads that have nothing left to do. Called from one of the client's own callbacks, it does not wait for the thread that it runs on |
/// | all others | `operation_timeout` of the backend |
///
/// # Cancellation
///
/// The token of [`cancellable`](Self::cancellable), and that of the options, end every wait with
/// [`Aborted`](crate::ErrorCode::Aborted); a request in flight ends as soon as the backend notices. Then nothing
/// was changed, unless the error says that its outcome is unknown. No token ends the closure of `with_lock` or
/// its release, and none ends `close`.
#[derive(Clone)]
pub struct LockClient {
    pub(crate) token: CancelToken,
    handle: Arc<Handle>,
}

impl LockClient {
    /// A client with default settings.
    ///
    /// ```
    /// use syncguard::{LockClient, MemoryBackend};
    ///
    /// let client = LockClient::new(MemoryBackend::new());
    /// ```
    pub fn new(backend: impl LockBackend + 'static) -> Self {
        Self::with_settings(Arc::new(backend), ClientSettings::default())
    }

    /// A client with settings of its own.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use syncguard::{ClientSettings, LockClient, MemoryBackend};
    ///
    /// let client = LockClient::with_settings(Arc::new(MemoryBackend::new()), ClientSettings::default());
    /// ```
    #[must_use]
    pub fn with_settings(backend: Arc<dyn LockBackend>, settings: ClientSettings) -> Self {
        let engine = Engine::new(backend, settings);
        Self { token: CancelToken::never(), handle: Arc::new(Handle::new(engine)) }
    }

    /// Waits for the lock with default options: at most 5 s, then a lease of 30 s that is renewed.
    ///
    /// See [`lock_with`](Self::lock_with).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock("report")?;
    /// assert!(guard.is_held());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn lock(&self, key: &str) -> Result<LockGuard> {
        self.lock_with(key, &LockOptions::new())
    }

    /// Waits for the lock. Threads of this client that want the same key take turns, first come,
    /// first served; between processes chance and backoff decide. Locks are not re-entrant: a thread
    /// that asks for a key that it holds waits like any other.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let guard = client.lock_with("report", &LockOptions::new().timeout(Duration::from_secs(60)))?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AcquisitionTimeout`](crate::ErrorCode::AcquisitionTimeout) when the timeout is over or the
    /// retries are used up; [`Aborted`](crate::ErrorCode::Aborted) when a token fired or the client
    /// was closed; [`InvalidArgument`](crate::ErrorCode::InvalidArgument) for a bad key or bad
    /// options, before any I/O; [`NetworkTimeout`](crate::ErrorCode::NetworkTimeout) when not even the
    /// first attempt was answered in time; whatever else the backend reports, at once. After all of these
    /// nothing is held, unless [`is_outcome_unknown`](crate::LockError::is_outcome_unknown) says so:
    /// then the key may be held under [`lock_id`](crate::LockError::lock_id), and the client's
    /// worker keeps trying to release it until that lease would be over (`ttl` and a second).
    pub fn lock_with(&self, key: &str, options: &LockOptions) -> Result<LockGuard> {
        let call = self.call(key, options)?;
        let key = Arc::clone(&call.key);
        let leases = waiter::lock(call).map_err(|error| error.with_key(&*key))?;
        Ok(LockGuard::new(Arc::clone(&self.handle), leases))
    }

    /// Tries once, with default options. `None` if another holder has the key.
    ///
    /// See [`try_lock_with`](Self::try_lock_with).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let _guard = client.lock("report")?;
    /// assert!(client.try_lock("report")?.is_none());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn try_lock(&self, key: &str) -> Result<Option<LockGuard>> {
        self.try_lock_with(key, &LockOptions::new())
    }

    /// Tries once. `None` if another holder has the key, or if the grant came too late to be
    /// trusted.
    ///
    /// It does not queue behind this client's waiters; `timeout` and the retry options do not apply.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let short = LockOptions::new().ttl(Duration::from_secs(10));
    /// assert!(client.try_lock_with("report", &short)?.is_some());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`lock_with`](Self::lock_with), without `AcquisitionTimeout`. A table, a row or a number
    /// that another session keeps locked for the whole time of the call is an error, not `None`.
    pub fn try_lock_with(&self, key: &str, options: &LockOptions) -> Result<Option<LockGuard>> {
        let call = self.call(key, options)?;
        let leases = call.try_lock().map_err(|error| error.with_key(&*call.key))?;
        Ok(leases.map(|leases| LockGuard::new(Arc::clone(&self.handle), leases)))
    }

    /// Runs `work` under the lock, and returns its value even if the release fails: a failed release
    /// goes to `on_release_error`. When `work` panics, the lock is released and the panic continues.
    ///
    /// A lease can be lost while `work` runs: its guard says so.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use syncguard::LockOptions;
    ///
    /// let sum = client.with_lock("report", &LockOptions::new(), |_guard| 40 + 2)?;
    /// assert_eq!(sum, 42);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`lock_with`](Self::lock_with); then `work` has not run.
    pub fn with_lock<T>(
        &self,
        key: &str,
        options: &LockOptions,
        work: impl FnOnce(&LockGuard) -> T,
    ) -> Result<T> {
        Ok(run_holding(self.lock_with(key, options)?.for_helper(), work))
    }

    /// Campaigns for the leadership of `key`, runs `lead` for each term that this client wins, and campaigns
    /// again, until `lead` returns `Break`: its value is the answer.
    ///
    /// The leader is the holder of the plain lease of the key, so that `lock`, `lookup` and other clients see
    /// it as a holder. The [`Term`] is lost like any lease; check [`is_held`](Term::is_held) or wait for
    /// [`lost`](Term::lost). Leaving `lead` steps down: with `Continue` the other candidates have
    /// [`retry_delay`](LockOptions::retry_delay) (half of it at least, by the default jitter) to take over before
    /// this one campaigns again, under a new id and a new term. A panic of `lead` continues after the lease is
    /// released.
    ///
    /// After a leader that steps down, another candidate leads as soon as it hears of the release; after one whose
    /// process dies, a second after the ttl. A leader that is paused for longer does not know until it checks: work
    /// that must not come late belongs in a [fenced transaction](Term::fence_transaction).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use std::ops::ControlFlow::{Break, Continue};
    /// use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let mut jobs = 0;
    /// let done = client.elect("scheduler", &LockOptions::new().ttl(Duration::from_secs(10)), |term| {
    ///     while term.is_held() {
    ///         jobs += 1; // one job of the leader's
    ///         if jobs == 3 {
    ///             return Break(jobs);
    ///         }
    ///     }
    ///     Continue(())
    /// })?;
    /// assert_eq!(done, 3);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Aborted`](crate::ErrorCode::Aborted) when a token fired or the client was closed;
    /// [`InvalidArgument`](crate::ErrorCode::InvalidArgument) for a bad key or bad options, before any I/O. While
    /// it campaigns, `ServiceUnavailable`, `NetworkTimeout` and `RateLimited` are waited out: the pauses grow
    /// from `retry_delay` to five seconds, and the log says once that it waits. Other errors are returned: waiting
    /// does not fix them. After an error nothing is held, unless
    /// [`is_outcome_unknown`](crate::LockError::is_outcome_unknown) says so, as for [`lock_with`](Self::lock_with).
    /// A failed release at the end of a term goes to `on_release_error`, and the client's worker repeats it until the
    /// lease would be over; until then the key may stay held, although nobody trusts the term.
    ///
    /// # Blocking
    ///
    /// Without a limit: neither `timeout` nor `max_retries` of the options ends a campaign.
    ///
    /// # Cancellation
    ///
    /// A token ends a campaign, not a term: `lead` must check it.
    pub fn elect<T>(
        &self,
        key: &str,
        options: &LockOptions,
        lead: impl FnMut(&Term) -> ControlFlow<T>,
    ) -> Result<T> {
        let call = LockCall { kind: LockKind::Term, ..self.call(key, &options.without_limits())? };
        let key = Arc::clone(&call.key);
        election::elect(call, lead).map_err(|error| error.with_key(&*key))
    }

    /// Who leads, by the server's clock alone: the term of the holder of the key, or `None`.
    ///
    /// Plain reads that lock and write nothing, for observers and dashboards: one for the term, and two for its
    /// owner. It may have changed when you read the answer: a leader checks its own [`Term`].
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use std::ops::ControlFlow::Break;
    /// use syncguard::LockOptions;
    ///
    /// client.elect("scheduler", &LockOptions::new(), |term| {
    ///     let leader = client.leader("scheduler").unwrap().expect("we lead");
    ///     assert_eq!(leader.term, term.number());
    ///     Break(())
    /// })?;
    /// assert_eq!(client.leader("scheduler")?, None);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn leader(&self, key: &str) -> Result<Option<Leader>> {
        let key = Key::new(key)?;
        let engine = self.engine();
        let deadline = engine.call_deadline(Moment::NEVER);
        let held = ask(|| engine.backend.who_holds(key.as_str(), deadline, &self.token))?;
        Ok(held.map(|held| Leader::of(&held.lease)))
    }

    /// A counting semaphore with this name, of which at most `limit` (1 to 1024) permits are held at a time.
    /// No I/O: only held permits are stored. See [`Semaphore`].
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let reports = client.semaphore("reports", 3)?;
    /// let permit = reports.acquire()?;
    /// assert!(permit.is_held());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::ErrorCode::InvalidArgument) for another limit, and for a name that is not a valid key.
    pub fn semaphore(&self, name: &str, limit: u32) -> Result<Semaphore> {
        Semaphore::new(name, limit, self.token.clone(), Arc::clone(&self.handle))
    }

    /// Runs a job once per slot, however many processes ask at the same time: `job` runs under the lease of
    /// `name`, which is renewed like any guard's, unless the slot is done or another holder has the lease. It makes
    /// one attempt and does not wait; `timeout` and the retry options do not apply. A plain lock of the same key
    /// excludes it, too.
    ///
    /// When `job` returns `Ok` the slot is marked as done and the lease ends, in one durable step. When it returns
    /// `Err` or panics the lease is released, and the slot may run again. After a crash it may run again when the
    /// lease is over, its ttl and a second later: *at least once*. [`Slot::claim_at_start`] makes that *at most
    /// once*, and [`Run::complete_in`] *exactly once*, for effects in the same database. Only the current slot
    /// runs; [`Run::skipped`] says how many were missed.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::{LockOptions, RunOnce, Slot};
    ///
    /// let hourly = Slot::every(Duration::from_secs(3600));
    /// match client.run_once("report", hourly, &LockOptions::new(), |run| {
    ///     println!("the report of the hour that began at {:?}", run.period_start_ms());
    ///     Ok::<_, std::io::Error>(())
    /// })? {
    ///     RunOnce::Done(()) => println!("made"),
    ///     RunOnce::Failed(error) => println!("to be made again: {error}"),
    ///     RunOnce::AlreadyDone | RunOnce::Running => println!("another process has made it, or is making it"),
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Blocking
    ///
    /// Twice `operation_timeout` (three times with `claim_at_start`) and the time of `job`; if the slot could
    /// not be marked, or is not to be marked, also `dispose_timeout` for the release.
    ///
    /// # Cancellation
    ///
    /// A token ends the call before `job` begins. It ends neither `job` nor the marking.
    ///
    /// # Errors
    ///
    /// Before the job: those of [`try_lock_with`](Self::try_lock_with), `InvalidArgument` for an invalid
    /// slot, and `Aborted` if the lease was lost before the slot was claimed. After it, when `job` returned `Ok` and
    /// the slot could not be marked: the text says that **the job ran**, and whether it is known that the slot is
    /// not marked ([`is_outcome_unknown`](crate::LockError::is_outcome_unknown)). `Aborted` then says that the
    /// lease was lost, or that the transaction of `complete_in` was not committed. The lease may stay held for its
    /// ttl and a second; the client's worker keeps trying to release it.
    pub fn run_once<T, E>(
        &self,
        name: &str,
        slot: Slot,
        options: &LockOptions,
        job: impl FnOnce(&Run) -> Result<T, E>,
    ) -> Result<RunOnce<T, E>> {
        slot.check()?;
        let call = LockCall { kind: LockKind::Run, ..self.call(name, options)? };
        turns::refuse(call.options.turn, "run_once does not wait, so it has no turn: leave fair away")?;
        once::run_once(&call, slot, job).map_err(|error| error.with_key(&*call.key))
    }

    /// The same client, whose operations also end when this token fires. Guards that it hands out
    /// are released nevertheless.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use syncguard::{CancelToken, ErrorCode};
    ///
    /// let shutdown = CancelToken::new();
    /// let request = client.cancellable(&shutdown);
    /// shutdown.cancel();
    /// assert_eq!(request.lock("report").unwrap_err().code(), ErrorCode::Aborted);
    /// ```
    #[must_use]
    pub fn cancellable(&self, token: &CancelToken) -> Self {
        Self { token: self.token.and(token), handle: Arc::clone(&self.handle) }
    }

    /// What the backend is and can do.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// assert_eq!(client.capabilities().backend, "memory");
    /// ```
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.engine().backend.capabilities()
    }

    /// Wakes this client's first waiter for a key: it asks the server at once, without using up a
    /// retry. For programs that hear from elsewhere that a key was released; guards of this client do
    /// this by themselves. A superfluous call costs one request; a missing one only costs time.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// client.wake_waiter("report"); // a message from elsewhere said that it was released
    /// ```
    pub fn wake_waiter(&self, key: &str) {
        if let Ok(key) = Key::new(key) {
            self.engine().freed(key.as_str());
        }
    }

    /// Ends the client and all its clones: no new locks ([`Aborted`](crate::ErrorCode::Aborted)),
    /// waiters are woken with the same, every holder's lease is lost
    /// ([`LostReason::Closed`](crate::LostReason::Closed)) and released, the threads are joined, and
    /// the backend frees its idle resources. A second close finishes what the first had no time for.
    ///
    /// A lease that is not released at the deadline is counted as pending and stays held until its ttl is over.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// let report = client.close(Duration::from_secs(10))?;
    /// assert!(report.is_clean());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn close(&self, deadline: Duration) -> Result<CloseReport> {
        self.check_process()?;
        Ok(close::close(self.engine(), deadline))
    }

    /// Refuses a client that was made before a fork.
    pub(crate) fn check_process(&self) -> Result<()> {
        self.engine().check_process()
    }

    /// The backend that this client works on.
    pub(crate) fn backend(&self) -> &Arc<dyn LockBackend> {
        &self.engine().backend
    }

    fn engine(&self) -> &Arc<Engine> {
        self.handle.engine()
    }

    /// What `lock` or `try_lock` is asked for, checked; no I/O yet.
    fn call(&self, key: &str, options: &LockOptions) -> Result<LockCall> {
        let options = options.resolve()?;
        let key = Arc::from(Key::new(key)?.as_str());
        let token = self.token.and(&options.cancel);
        let since = self.engine().clock.now();
        let ticket = turns::ticket(&options, since)?;
        Ok(LockCall {
            handle: Arc::clone(&self.handle),
            key,
            kind: LockKind::Lock,
            permits: None,
            shared: false,
            since,
            ticket,
            next: None,
            other_keys: Vec::new(),
            options,
            token,
        })
    }
}

impl fmt::Debug for LockClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockClient").field("capabilities", &self.capabilities()).finish_non_exhaustive()
    }
}
