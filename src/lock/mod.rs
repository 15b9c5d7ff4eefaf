//! What a holder has: guards over any backend, and the client that hands them out.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `options`, `settings` | what a caller may choose for a lock, as numbers, and for a client |
//! | `attempt` | one attempt to take a lock |
//! | `waiter` | the one loop that waits |
//! | `semaphore` | what permits are asked for with |
//! | `shared` | the locks of readers |
//! | `lease` | the state machine of one lease: pure, with its invariants |
//! | `lease_set` | leases that are held and lost together |
//! | `guard`, `multi_guard` | what a holder of one key, and of several, sees of it |
//! | `extend` | extending a guard's leases |
//! | `election` | campaigns for a key, and the terms of its leaders |
//! | `once` | runs, once per slot |
//! | `registry` | the guards, and what the two threads share |
//! | `engine` | what a client and its guards share |
//! | `backend_call` | what becomes of a panic of the backend's |
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
mod lease;
mod lease_set;
mod multi_guard;
mod once;
mod options;
mod registry;
mod release;
mod report;
mod semaphore;
mod settings;
mod shared;
mod timer;
mod waiter;
mod worker;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{
    AcquireResult, Capabilities, ExtendResult, LockBackend, LockInfo, LockInfoRaw, LockKind, Lookup,
    ReleaseResult, Slot, check_count, no_keys,
};
use crate::cancel::CancelToken;
use crate::error::Result;
use crate::model::key::Key;
use crate::model::lock_id::LockId;
use crate::model::time::{Moment, Ttl};

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
use backend_call::{ask, change};
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
/// | `close` | its `deadline`, by the system's clock, and 50 ms for threads that have nothing left to do. Called from one of the client's own callbacks it does not wait for the thread that it is on |
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
        let engine = Engine::new(backend, settings.dispose_timeout, settings.on_release_error);
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
    /// worker goes on releasing it until that lease would be over (`ttl` and a second).
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

    /// Tries once. `None` if another holder has the key, or had it a moment ago: the grant came so
    /// late that it could not be trusted.
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

    /// Waits for several locks at once, with default options: all of them or none.
    ///
    /// See [`lock_all_with`](Self::lock_all_with).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock_all(&["account:7", "account:9"])?;
    /// assert!(guard.is_held());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn lock_all<K: AsRef<str>>(&self, keys: &[K]) -> Result<MultiGuard> {
        self.lock_all_with(keys, &LockOptions::new())
    }

    /// Waits until 1 to 64 keys can be taken at one moment, and takes them together. Duplicates count once.
    ///
    /// Nothing is held while waiting, so that callers who name the same keys in different orders cannot
    /// wait for each other. The price: the keys must all be free at one moment, so that a wide set beside
    /// busy single keys may wait long. `timeout` and the retry options say how long; a narrower set, or
    /// one key that stands for all of them and that everybody takes, waits less. In this process it
    /// queues only for the key that is in its way.
    ///
    /// Each key is locked as if by [`lock_with`](Self::lock_with), for every client of the backend, the
    /// others included that know nothing of sets. The options apply to all keys alike; `on_lost` is called once.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let keys: Vec<String> = (1..=8).map(|shelf| format!("shelf:{shelf}")).collect();
    /// let guard = client.lock_all_with(&keys, &LockOptions::new().timeout(Duration::from_secs(60)))?;
    /// assert_eq!(guard.keys().len(), 8);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`lock_with`](Self::lock_with). `InvalidArgument`, before any I/O, also for no key and for more
    /// than 64 different ones, and from a backend that cannot take several. An `AcquisitionTimeout` carries the
    /// key that was in the way last. After an unknown outcome any of the keys may be held for `ttl` and
    /// a second; the client's worker goes on releasing all of them until then.
    ///
    /// # Blocking
    ///
    /// As [`lock_with`](Self::lock_with).
    pub fn lock_all_with<K: AsRef<str>>(&self, keys: &[K], options: &LockOptions) -> Result<MultiGuard> {
        let leases = waiter::lock(self.call_all(keys, options)?)?;
        Ok(MultiGuard::new(Arc::clone(&self.handle), leases))
    }

    /// Tries once to take several locks, with default options. `None` if another holder has one of the keys.
    ///
    /// See [`try_lock_all_with`](Self::try_lock_all_with).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let _guard = client.lock("b")?;
    /// assert!(client.try_lock_all(&["a", "b"])?.is_none());
    /// assert!(!client.is_locked("a")?);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn try_lock_all<K: AsRef<str>>(&self, keys: &[K]) -> Result<Option<MultiGuard>> {
        self.try_lock_all_with(keys, &LockOptions::new())
    }

    /// Tries once to take several locks. `None`, and nothing is held, if another holder has one of the keys, or
    /// had it a moment ago. `timeout` and the retry options do not apply.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let short = LockOptions::new().ttl(Duration::from_secs(10));
    /// assert!(client.try_lock_all_with(&["a", "b"], &short)?.is_some());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`lock_all_with`](Self::lock_all_with), without `AcquisitionTimeout`.
    pub fn try_lock_all_with<K: AsRef<str>>(
        &self,
        keys: &[K],
        options: &LockOptions,
    ) -> Result<Option<MultiGuard>> {
        let leases = self.call_all(keys, options)?.try_lock()?;
        Ok(leases.map(|leases| MultiGuard::new(Arc::clone(&self.handle), leases)))
    }

    /// Runs `work` under the lock, and returns its value whatever the release does: a failed release
    /// goes to `on_release_error`. When `work` panics, the lock is released and the panic goes on.
    ///
    /// A lease can be lost while `work` runs: it sees so at its guard.
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
    /// The leader is whoever holds the plain lease of the key, so that `lock`, `lookup` and other clients see
    /// it as a holder. The [`Term`] is lost as a lease is; look at [`is_held`](Term::is_held) or wait for
    /// [`lost`](Term::lost). Leaving `lead` steps down: with `Continue` the other candidates have
    /// [`retry_delay`](LockOptions::retry_delay) (half of it at least, by the default jitter) to take over before
    /// this one campaigns again, under a new id and a new term. A panic of `lead` goes on after the lease is
    /// released.
    ///
    /// A leader that leaves in order is followed as soon as another candidate hears of it; one whose process
    /// dies, after the ttl and a second. One that is paused for longer does not know until it looks: work that
    /// must not come late belongs into a [fenced transaction](Term::fence_transaction).
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
    /// from `retry_delay` to five seconds, and the log says once that it waits. Other errors are for the
    /// program to mend, and are returned. After an error nothing is held, unless
    /// [`is_outcome_unknown`](crate::LockError::is_outcome_unknown) says so, as for [`lock_with`](Self::lock_with).
    /// A step-down whose release failed goes to `on_release_error`, and the client's worker repeats it until the
    /// lease would be over; until then the key may stay held, with nobody who trusts the term.
    ///
    /// # Blocking
    ///
    /// Without a limit: neither `timeout` nor `max_retries` of the options ends a campaign.
    ///
    /// # Cancellation
    ///
    /// A token ends a campaign, not a term: `lead` looks at it for itself.
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

    /// Who leads, by the server's clock and no other: the term of whoever holds the key, or `None`.
    ///
    /// One plain read that locks and writes nothing, for observers and dashboards. It may have changed when you
    /// read the answer: a leader asks its own [`Term`].
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
        Ok(self.get_by_key(key)?.as_ref().map(Leader::of))
    }

    /// A counting semaphore with this name, of which at most `limit` (1 to 1024) permits are held at a time.
    /// No I/O: nothing is stored but the permits that are held. See [`Semaphore`].
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
    /// [`InvalidArgument`](crate::ErrorCode::InvalidArgument) for another limit, and for a name that is no key.
    pub fn semaphore(&self, name: &str, limit: u32) -> Result<Semaphore> {
        Semaphore::new(name, limit, self.token.clone(), Arc::clone(&self.handle))
    }

    /// Runs a job once per slot, however many processes ask at the same time: `job` runs under the lease of
    /// `name`, which is renewed as any guard's, unless the slot is done or another holder has the lease. One
    /// attempt: it does not wait, and `timeout` and the retry options do not apply. A plain lock of the same key
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
    /// Twice `operation_timeout` (three times with `claim_at_start`) and the time of `job`; where the slot could
    /// not be marked, or is not to be, `dispose_timeout` for the release.
    ///
    /// # Cancellation
    ///
    /// A token ends the begin. It ends neither `job` nor the mark.
    ///
    /// # Errors
    ///
    /// Before the job: those of [`try_lock_with`](Self::try_lock_with), `InvalidArgument` for a slot that cannot
    /// be, and `Aborted` if the lease was lost before the slot was claimed. After it, when `job` returned `Ok` and
    /// the slot could not be marked: the text says that **the job ran**, and whether it is known that the slot is
    /// not marked ([`is_outcome_unknown`](crate::LockError::is_outcome_unknown)). `Aborted` then says that the
    /// lease was lost, or that the transaction of `complete_in` was not committed. The lease may stay held for its
    /// ttl and a second; the client's worker goes on releasing it.
    pub fn run_once<T, E>(
        &self,
        name: &str,
        slot: Slot,
        options: &LockOptions,
        job: impl FnOnce(&Run) -> Result<T, E>,
    ) -> Result<RunOnce<T, E>> {
        slot.check()?;
        let call = LockCall { kind: LockKind::Run, ..self.call(name, options)? };
        once::run_once(&call, slot, job).map_err(|error| error.with_key(&*call.key))
    }

    /// Tries once to take the key, without a guard: nothing renews the lease, nothing releases it.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// let lease = client.acquire("report", Duration::from_secs(30))?.acquired().expect("it was free");
    /// client.release(&lease.lock_id)?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the backend. After an unknown outcome the error carries the lock id, and the
    /// client's worker goes on releasing it until that lease would be over.
    pub fn acquire(&self, key: &str, ttl: Duration) -> Result<AcquireResult> {
        let key = Key::new(key)?;
        let ttl = Ttl::new(ttl)?.get();
        self.token.check()?;
        let _entered = self.engine().enter()?;
        attempt::request(self.engine(), key.as_str(), ttl, Moment::NEVER, &self.token)
            .map(AcquireResult::from)
    }

    /// Releases the lease with this id. Harmless if it is not held. Do not use it on a guard's id:
    /// the guard has its own [`release`](LockGuard::release).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::ReleaseResult;
    ///
    /// let lease = client.acquire("report", Duration::from_secs(30))?.acquired().expect("it was free");
    /// assert_eq!(client.release(&lease.lock_id)?, ReleaseResult::Released);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the backend. The lease may then stay held until its ttl is over; try again. After an unknown
    /// outcome the release may still be on its way, and end the lease later: do not go on working under it.
    pub fn release(&self, lock_id: &str) -> Result<ReleaseResult> {
        LockId::parse(lock_id)?;
        let result = change(Duration::MAX, || self.engine().backend.release(lock_id, &self.token));
        result.map(ReleaseResult::from).map_err(|error| error.with_lock_id(lock_id))
    }

    /// Sets the end of the lease with this id to now plus `ttl`. Never revives a dead lease.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::ExtendResult;
    ///
    /// let lease = client.acquire("report", Duration::from_secs(30))?.acquired().expect("it was free");
    /// assert_ne!(client.extend(&lease.lock_id, Duration::from_secs(60))?, ExtendResult::NotHeld);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the backend. After an unknown outcome trust the earlier of the old and the new end.
    pub fn extend(&self, lock_id: &str, ttl: Duration) -> Result<ExtendResult> {
        LockId::parse(lock_id)?;
        let ttl = Ttl::new(ttl)?.get();
        let result = change(ttl, || self.engine().backend.extend(lock_id, ttl, &self.token));
        result.map(ExtendResult::from).map_err(|error| error.with_lock_id(lock_id))
    }

    /// Whether the key is held. For display: it may have changed when you read the answer.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let _guard = client.lock("report")?;
    /// assert!(client.is_locked("report")?);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn is_locked(&self, key: &str) -> Result<bool> {
        let key = Key::new(key)?;
        let result = ask(|| self.engine().backend.is_locked(key.as_str(), &self.token));
        result.map_err(|error| error.with_key(key.as_str()))
    }

    /// The live lease of a key, or with an id. For diagnosis: it may have ended when you read it.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use syncguard::Lookup;
    ///
    /// let guard = client.lock("report")?;
    /// let lease = client.lookup(Lookup::Key("report"))?.expect("it is held");
    /// assert_eq!(lease.fence, guard.fence());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn lookup(&self, what: Lookup<'_>) -> Result<Option<LockInfo>> {
        Self::check_lookup(what)?;
        ask(|| self.engine().backend.lookup(what, &self.token))
    }

    /// The live lease of this key. See [`lookup`](Self::lookup).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// assert!(client.get_by_key("report")?.is_none());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn get_by_key(&self, key: &str) -> Result<Option<LockInfo>> {
        self.lookup(Lookup::Key(key))
    }

    /// The live lease with this id. See [`lookup`](Self::lookup).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock("report")?;
    /// assert!(client.get_by_id(guard.lock_id())?.is_some());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn get_by_id(&self, lock_id: &str) -> Result<Option<LockInfo>> {
        self.lookup(Lookup::LockId(lock_id))
    }

    /// The live lease of this key, with the raw key and lock id: **sensitive**, for debugging.
    /// See [`lookup`](Self::lookup).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock("report")?;
    /// let lease = client.get_by_key_raw("report")?.expect("it is held");
    /// assert_eq!(lease.lock_id, guard.lock_id());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn get_by_key_raw(&self, key: &str) -> Result<Option<LockInfoRaw>> {
        let what = Lookup::Key(key);
        Self::check_lookup(what)?;
        ask(|| self.engine().backend.lookup_raw(what, &self.token))
    }

    /// The live lease with this id, with the raw key and lock id: **sensitive**, for debugging.
    /// See [`lookup`](Self::lookup).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock("report")?;
    /// let lease = client.get_by_id_raw(guard.lock_id())?.expect("it is held");
    /// assert_eq!(lease.key, "report");
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn get_by_id_raw(&self, lock_id: &str) -> Result<Option<LockInfoRaw>> {
        let what = Lookup::LockId(lock_id);
        Self::check_lookup(what)?;
        ask(|| self.engine().backend.lookup_raw(what, &self.token))
    }

    /// Whether a live lease has this id. For diagnosis, never as a guard before a change: use the
    /// fence for that. See [`lookup`](Self::lookup).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock("report")?;
    /// assert!(client.owns(guard.lock_id())?);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn owns(&self, lock_id: &str) -> Result<bool> {
        self.get_by_id(lock_id).map(|found| found.is_some())
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

    /// Wakes this client's first waiter for a key: it asks the server at once, which costs it no
    /// retry. For programs that hear from elsewhere that a key was released; guards of this client do
    /// it by themselves. A call too many costs one request, a call too few only time.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// client.wake_waiter("report"); // a message from elsewhere said that it was released
    /// ```
    pub fn wake_waiter(&self, key: &str) {
        if let Ok(key) = Key::new(key) {
            self.engine().queue.freed(key.as_str());
        }
    }

    /// Ends the client and all its clones: no new locks ([`Aborted`](crate::ErrorCode::Aborted)),
    /// waiters are woken with the same, every holder's lease is lost
    /// ([`LostReason::Closed`](crate::LostReason::Closed)) and released, the threads are joined, and
    /// the backend frees its idle resources. A second close does what the first had no time for.
    ///
    /// What is not released at the deadline is counted as pending and stays held until its ttl is over.
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
        Ok(LockCall {
            handle: Arc::clone(&self.handle),
            key,
            kind: LockKind::Lock,
            permits: None,
            shared: false,
            since: self.engine().clock.now(),
            other_keys: Vec::new(),
            options,
            token,
        })
    }

    /// The same for several keys: each once, in the order of their bytes.
    fn call_all<K: AsRef<str>>(&self, keys: &[K], options: &LockOptions) -> Result<LockCall> {
        let options = options.resolve()?;
        let mut normal = BTreeSet::new();
        for key in keys {
            normal.insert(Arc::<str>::from(Key::new(key.as_ref())?.as_str()));
        }
        check_count(normal.len())?;
        let key = normal.pop_first().ok_or_else(no_keys)?;
        let token = self.token.and(&options.cancel);
        Ok(LockCall {
            handle: Arc::clone(&self.handle),
            key,
            kind: LockKind::Set,
            permits: None,
            shared: false,
            since: self.engine().clock.now(),
            other_keys: normal.into_iter().collect(),
            options,
            token,
        })
    }

    fn check_lookup(what: Lookup<'_>) -> Result<()> {
        match what {
            Lookup::Key(key) => Key::new(key).map(drop),
            Lookup::LockId(lock_id) => LockId::parse(lock_id).map(drop),
        }
    }
}

impl fmt::Debug for LockClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockClient").field("capabilities", &self.capabilities()).finish_non_exhaustive()
    }
}
