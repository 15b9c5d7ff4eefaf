//! Leases in this process: the [contract](crate::backend) as an executable model, to test programs
//! that hold locks without a server.
//!
//! Everything that a server decides is decided here by the same rules, and everything that can go
//! wrong with a server can be injected: another holder, an expiry, a takeover, an error, a lost answer, a
//! call that hangs. Time passes when the test says so.
//!
//! # Testing the moment at which a lock is lost
//!
//! ```
//! use std::time::Duration;
//! use syncguard::backend::LockBackend;
//! use syncguard::memory::{Call, Fault};
//! use syncguard::backend::ExtendOutcome;
//! use syncguard::{CancelToken, ErrorCode, MemoryBackend};
//!
//! // The code under test: writes step by step and renews before each step.
//! fn import(locks: &dyn LockBackend, done: &mut Vec<u32>) -> syncguard::Result<bool> {
//!     let (ttl, never) = (Duration::from_secs(30), CancelToken::never());
//!     let Some(lease) = locks.acquire("import", ttl, &never)?.acquired() else { return Ok(false) };
//!     for step in 0..3 {
//!         if let ExtendOutcome::NotHeld(_) = locks.extend(&lease.lock_id, ttl, &never)? {
//!             return Ok(false); // lost: whatever we write now, another process may be writing too
//!         }
//!         done.push(step);
//!     }
//!     locks.release(&lease.lock_id, &never)?;
//!     Ok(true)
//! }
//!
//! let locks = MemoryBackend::manual();
//! let mut done = Vec::new();
//! assert!(import(&locks, &mut done)?);
//!
//! // Another holder takes the key over before the first renewal: nothing is written.
//! locks.lose_on_next_renewal("import", syncguard::memory::Loss::TakenOver)?;
//! done.clear();
//! assert!(!import(&locks, &mut done)? && done.is_empty());
//!
//! // That holder dies and its lease runs out. Then the server goes away in the middle.
//! locks.advance(Duration::from_secs(600));
//! locks.fail_next(Call::Extend, ErrorCode::ServiceUnavailable);
//! assert_eq!(import(&locks, &mut done).unwrap_err().code(), ErrorCode::ServiceUnavailable);
//!
//! // The grant was made, but its answer got lost: the error says that the key may be held.
//! locks.advance(Duration::from_secs(600));
//! locks.fail_next(Call::Acquire, Fault::lost_answer(ErrorCode::NetworkTimeout));
//! assert!(import(&locks, &mut done).unwrap_err().is_outcome_unknown());
//! assert!(locks.is_locked("import", &CancelToken::never())?);
//! # Ok::<(), syncguard::LockError>(())
//! ```
//!
//! # Letting time pass for a lock that is renewed
//!
//! A guard is renewed by a thread of its client, when a third of its ttl has passed. One long
//! [`advance`](MemoryBackend::advance) uses up the whole ttl before that thread has had its turn, and the
//! lock is lost, as after a pause of the whole process. So let time pass in steps, and wait for the
//! renewal that each of them makes due:
//!
//! ```
//! use std::time::Duration;
//! use syncguard::memory::{Call, Loss};
//! use syncguard::{LockClient, LostReason, MemoryBackend};
//!
//! let memory = MemoryBackend::manual();
//! let guard = LockClient::new(memory.clone()).lock("report")?; // ttl 30 s, renewed every 10 s
//! for renewals in 1..=6 {
//!     memory.advance(Duration::from_secs(10));
//!     assert!(memory.wait_for_answers(Call::Renew, renewals, Duration::from_secs(5)));
//! }
//! assert!(guard.is_held()); // after a minute
//!
//! // The next renewal finds that the row was deleted. It is answered on that other thread, so
//! // wait for the guard, as the program would.
//! memory.lose_on_next_renewal("report", Loss::RowMissing)?;
//! memory.advance(Duration::from_secs(10));
//! assert!(guard.lost().wait_timeout(Duration::from_secs(5)));
//! assert_eq!(guard.lost_reason(), Some(LostReason::RowMissing));
//!
//! // A process that was paused: no thread has had a turn, and the guard knows by the clock alone.
//! drop(guard);
//! let guard = LockClient::new(memory.clone()).lock("report")?;
//! memory.advance(Duration::from_secs(31));
//! assert!(!guard.is_held());
//! # Ok::<(), syncguard::LockError>(())
//! ```
//!
//! # Calls that hang, keys that are taken
//!
//! ```
//! use std::time::Duration;
//! use syncguard::memory::Call;
//! use syncguard::{ErrorCode, LockClient, MemoryBackend};
//!
//! let memory = MemoryBackend::manual();
//! let client = LockClient::new(memory.clone());
//! let limit = Duration::from_secs(5);
//!
//! // A server that is silent for a while: the call hangs until the gate is opened …
//! let gate = memory.hang_next(Call::Acquire);
//! std::thread::scope(|scope| {
//!     let call = scope.spawn(|| client.try_lock("report"));
//!     assert!(gate.wait_for_calls(1, limit));
//!     gate.open();
//!     assert!(call.join().unwrap().unwrap().is_some());
//! });
//! // … or until its time is over.
//! let gate = memory.hang_next(Call::Acquire);
//! std::thread::scope(|scope| {
//!     let call = scope.spawn(|| client.try_lock("report"));
//!     assert!(gate.wait_for_calls(1, limit));
//!     memory.advance(Duration::from_secs(6));
//!     assert_eq!(call.join().unwrap().unwrap_err().code(), ErrorCode::NetworkTimeout);
//! });
//!
//! // Another process has the key, and dies.
//! memory.contend("report")?;
//! assert!(client.try_lock("report")?.is_none());
//! memory.expire("report")?;
//! assert!(client.try_lock("report")?.is_some());
//! # Ok::<(), syncguard::LockError>(())
//! ```
//!
//! # How it works
//!
//! One mutex guards the state, and each operation is one critical section in which the server's
//! time is read once. Calls hang before or after that section, never inside; no lock is held while
//! user code runs (clock wakers, token hooks, the logger).

mod call;
mod control;
mod fault;
mod fenced;
mod members;
mod once;
mod permits;
mod readers;
mod shared;
mod store;
mod time;
mod turns;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{
    AcquireResult, Attempt, AttemptAll, BeginOutcome, BeginRun, Capabilities, ExtendOutcome, Grant, GrantAll,
    HeldBy, Holder, Intent, LockBackend, LockInfo, LockInfoRaw, Lookup, MarkOutcome, MarkRun, MarkStep,
    PermitAttempt, PermitGrant, ReleaseOutcome, RenewOutcome, Renewal, SharedAttempt, TimeAuthority, Turn,
    TurnAttempt, check_set,
};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::model::fence::Fence;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::model::lock_id::LockId;
use crate::model::time::{Clock, Moment, Ttl};

pub use fault::{Call, Fault, Gate, Loss};

use call::{Effect, Failure};
use shared::Shared;
use store::{StoredKey, StoredLabel};

/// A [`LockBackend`] that keeps its leases in this process. See the [module](crate::memory).
///
/// Clones share everything: each is a client of the same server.
///
/// # Blocking
///
/// Calls return at once, except for those that a test lets [hang](Gate): at most their `deadline`, or
/// `operation_timeout`. [`wait_for_answers`](Self::wait_for_answers) takes at most its `limit`, and no longer than a day.
///
/// # Cancellation
///
/// A fired token ends a call that hangs, unless its change is already made.
#[derive(Clone)]
pub struct MemoryBackend {
    shared: Arc<Shared>,
    limit: usize,
    reserve: usize,
    operation_timeout: Duration,
}

impl MemoryBackend {
    /// A backend on the system's time, for locks between the threads of one process.
    ///
    /// ```
    /// use syncguard::{LockClient, MemoryBackend};
    ///
    /// let client = LockClient::new(MemoryBackend::new());
    /// let guard = client.lock("report")?;
    /// assert!(guard.is_held());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn new() -> Self {
        Self::on(Clock::system())
    }

    /// A backend whose time stands still until [`advance`](MemoryBackend::advance) moves it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use syncguard::{LockClient, MemoryBackend};
    ///
    /// let memory = MemoryBackend::manual();
    /// let guard = LockClient::new(memory.clone()).lock("report")?;
    /// memory.advance(Duration::from_secs(31)); // as after a pause of the whole process
    /// assert!(!guard.is_held());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn manual() -> Self {
        Self::on(Clock::manual())
    }

    /// Limits stored keys to this many bytes, as a backend with a small limit would: longer keys are
    /// stored under their digest. Below 28 bytes even that does not fit, and keys are refused.
    /// Set it before the backend is cloned: clones that disagree are clients that do not
    /// see each other's locks.
    ///
    /// ```
    /// use syncguard::{LockClient, MemoryBackend};
    ///
    /// let client = LockClient::new(MemoryBackend::new().with_storage_limit(64));
    /// let guard = client.lock(&"long".repeat(100))?; // stored under its digest
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn with_storage_limit(mut self, bytes: usize) -> Self {
        self.limit = bytes;
        self
    }

    /// How long a single operation may take, 5 s by default: calls that [hang](Gate) then end.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use syncguard::{LockBackend, MemoryBackend};
    ///
    /// let memory = MemoryBackend::manual().with_operation_timeout(Duration::from_secs(1));
    /// assert_eq!(memory.operation_timeout(), Duration::from_secs(1));
    /// ```
    #[must_use]
    pub fn with_operation_timeout(mut self, timeout: Duration) -> Self {
        self.operation_timeout = timeout;
        self
    }

    fn on(clock: Clock) -> Self {
        Self {
            shared: Shared::new(clock),
            limit: BACKEND_LIMIT_POSTGRES,
            reserve: RESERVE_BYTES_POSTGRES,
            operation_timeout: Duration::from_secs(5),
        }
    }

    /// A key that a caller names.
    fn stored(&self, key: &str) -> Result<StoredKey> {
        self.stored_key(Key::new(key)?)
    }

    /// The key of a lease, which may be a permit's.
    fn stored_lease(&self, key: &str) -> Result<StoredKey> {
        self.stored_key(Key::of_lease(key)?)
    }

    fn stored_key(&self, user: Key) -> Result<StoredKey> {
        let (base, fence) = user.stored(self.limit, self.reserve)?;
        Ok(StoredKey { user, base, fence })
    }

    fn default_deadline(&self) -> Moment {
        self.shared.clock.now().after(self.operation_timeout)
    }

    fn release_call(&self, lock_id: &str, deadline: Moment, cancel: &CancelToken) -> Result<ReleaseOutcome> {
        let id = LockId::parse(lock_id)?;
        self.call(Call::Release, Effect::Release(id.as_str()), (deadline, cancel), |store, now| {
            store.release(id.as_str(), now)
        })
        .map_err(|failure| failure.error().with_lock_id(lock_id))
    }

    fn look(&self, call: Call, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<Option<Holder>> {
        let stored = self.stored(key)?;
        let live = self
            .call(call, Effect::Read, (deadline, cancel), |store, now| {
                let live = store.live_by_key(&stored.base, now);
                live.map(|live| Holder::until(Some(live.fence), live.expires_at_ms, now).shared(live.shared))
            })
            .map_err(|failure| failure.error().with_key(key))?;
        cancel.check()?;
        Ok(live)
    }
}

impl LockBackend for MemoryBackend {
    fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult> {
        let lock_id = LockId::generate()?;
        let deadline = self.default_deadline();
        self.attempt(&Attempt::new(key, lock_id.as_str(), ttl, deadline), cancel)
    }

    fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome> {
        self.release_call(lock_id, self.default_deadline(), cancel)
    }

    fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome> {
        let (id, ttl) = (LockId::parse(lock_id)?, Ttl::new(ttl)?);
        self.call(Call::Extend, Effect::Grant(ttl), (self.default_deadline(), cancel), |store, now| {
            store.apply_loss(id.as_str(), now, false);
            store.extend(id.as_str(), ttl, now)
        })
        .map_err(|failure| failure.error().with_lock_id(lock_id))
    }

    fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool> {
        self.look(Call::IsLocked, key, self.default_deadline(), cancel).map(|holder| holder.is_some())
    }

    fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>> {
        Ok(self.lookup_raw(what, cancel)?.map(|info| info.sanitized()))
    }

    fn capabilities(&self) -> Capabilities {
        // A manual clock is one for all clients and none of theirs; the system's is the client's own.
        let manual = self.shared.clock.is_manual();
        Capabilities::fencing("memory", if manual { TimeAuthority::Server } else { TimeAuthority::Client })
    }

    fn attempt(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<AcquireResult> {
        self.grant(attempt, cancel).map(AcquireResult::from)
    }

    fn grant(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        let key = self.stored(attempt.key)?;
        let (id, ttl) = (LockId::parse(attempt.lock_id)?, Ttl::new(attempt.ttl)?);
        let label = StoredLabel::of(attempt.label)?;
        let in_context = |error: LockError| error.with_key(attempt.key).with_lock_id(attempt.lock_id);
        let answer = self
            .call(Call::Acquire, Effect::Grant(ttl), (attempt.deadline, cancel), |store, now| {
                let answer = store.acquire(&key, id.as_str(), ttl, now)?;
                if answer.is_some() {
                    store.label(id.as_str(), &label);
                }
                Ok(answer)
            })
            .map_err(|failure| in_context(failure.error()))?
            .map_err(in_context)?;
        if let Some(granted) = &answer {
            granted.acquired.fence.warn_near_limit(key.user.as_str());
        }
        Ok(answer)
    }

    fn grant_all(&self, attempt: &AttemptAll<'_>, cancel: &CancelToken) -> Result<GrantAll> {
        check_set(attempt.leases)?;
        let ttl = Ttl::new(attempt.ttl)?;
        let mut leases = Vec::with_capacity(attempt.leases.len());
        for (key, lock_id) in attempt.leases {
            leases.push((self.stored(key)?, LockId::parse(lock_id)?));
        }
        let label = StoredLabel::of(attempt.label)?;
        let answer = self
            .call(Call::Acquire, Effect::Grant(ttl), (attempt.deadline, cancel), |store, now| {
                let answer = store.acquire_all(&leases, ttl, now);
                if let Ok(GrantAll::Granted(_)) = answer {
                    leases.iter().for_each(|(_, id)| store.label(id.as_str(), &label));
                }
                answer
            })
            .map_err(Failure::error)??;
        if let GrantAll::Granted(grants) = &answer {
            for (grant, (key, _)) in grants.iter().zip(&leases) {
                grant.acquired.fence.warn_near_limit(key.user.as_str());
            }
        }
        Ok(answer)
    }

    fn holder(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<Option<Holder>> {
        self.look(Call::Holder, key, deadline, cancel)
    }

    fn who_holds(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<Option<HeldBy>> {
        let stored = self.stored(key)?;
        let found = self
            .call(Call::Lookup, Effect::Read, (deadline, cancel), |store, now| {
                let live = store.live_by_key(&stored.base, now)?;
                let remaining = Holder::until(None, live.expires_at_ms, now).remaining;
                Some(HeldBy::new(live.sanitized(), remaining))
            })
            .map_err(|failure| failure.error().with_key(key))?;
        cancel.check()?;
        Ok(found)
    }

    fn release_by(&self, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        self.release_call(lock_id, deadline, &CancelToken::never())
    }

    fn release_all(&self, lock_ids: &[&str], deadline: Moment) -> Result<Vec<ReleaseOutcome>> {
        for lock_id in lock_ids {
            LockId::parse(lock_id)?;
        }
        let Some(first) = lock_ids.first() else { return Ok(Vec::new()) };
        self.call(Call::Release, Effect::Release(first), (deadline, &CancelToken::never()), |store, now| {
            lock_ids.iter().map(|lock_id| store.release(lock_id, now)).collect()
        })
        .map_err(Failure::error)
    }

    fn prolong(&self, lease: &Renewal<'_>, deadline: Moment) -> Result<RenewOutcome> {
        LockId::parse(lease.lock_id)?;
        let (key, ttl) = (self.stored_lease(lease.key)?, Ttl::new(lease.ttl)?);
        self.call(Call::Extend, Effect::Grant(ttl), (deadline, &CancelToken::never()), |store, now| {
            store.apply_loss(lease.lock_id, now, false);
            match store.renew(&key.base, lease, ttl, now) {
                // Outvoted, or at its end already: asked for again by the newest version.
                RenewOutcome::Renewed { version, .. } => {
                    store.renew(&key.base, &Renewal { version, ..*lease }, ttl, now)
                }
                lost => lost,
            }
        })
        .map_err(|failure| failure.error().with_lock_id(lease.lock_id))
    }

    fn renew(&self, leases: &[Renewal<'_>], deadline: Moment) -> Vec<Result<RenewOutcome>> {
        if leases.is_empty() {
            return Vec::new();
        }
        let checked: Vec<Result<(StoredKey, Ttl)>> = leases
            .iter()
            .map(|lease| {
                LockId::parse(lease.lock_id)?;
                Ok((self.stored_lease(lease.key)?, Ttl::new(lease.ttl)?))
            })
            .collect();
        let longest = checked.iter().flatten().map(|(_, ttl)| *ttl).max_by_key(|ttl| ttl.get());
        let effect = longest.map_or(Effect::Read, Effect::Grant);
        let outcomes = self.call(Call::Renew, effect, (deadline, &CancelToken::never()), |store, now| {
            let renew_one = |(lease, checked): (&Renewal<'_>, Result<(StoredKey, Ttl)>)| {
                let (key, ttl) = checked?;
                if store.apply_loss(lease.lock_id, now, true) {
                    return Ok(RenewOutcome::Busy);
                }
                Ok(store.renew(&key.base, lease, ttl, now))
            };
            leases.iter().zip(checked).map(renew_one).collect()
        });
        outcomes.unwrap_or_else(|failure| {
            let error = |lease: &Renewal<'_>| failure.error().with_key(lease.key).with_lock_id(lease.lock_id);
            leases.iter().map(|lease| Err(error(lease))).collect()
        })
    }

    fn grant_permit(&self, attempt: &PermitAttempt<'_>, cancel: &CancelToken) -> Result<Option<PermitGrant>> {
        self.permit_call(attempt, cancel)
    }

    fn permits_in_use(
        &self,
        semaphore: &str,
        among: u32,
        deadline: Moment,
        cancel: &CancelToken,
    ) -> Result<u32> {
        self.count_permits(semaphore, among, deadline, cancel)
    }

    fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoRaw>> {
        let deadline = self.default_deadline();
        let found = match what {
            Lookup::Key(key) => {
                let stored = self.stored(key)?;
                self.call(Call::Lookup, Effect::Read, (deadline, cancel), |store, now| {
                    store.live_by_key(&stored.base, now)
                })
                .map_err(|failure| failure.error().with_key(key))?
            }
            Lookup::LockId(lock_id) => {
                let id = LockId::parse(lock_id)?;
                self.call(Call::Lookup, Effect::Read, (deadline, cancel), |store, now| {
                    store.live_by_id(id.as_str(), now)
                })
                .map_err(|failure| failure.error().with_lock_id(lock_id))?
            }
        };
        cancel.check()?;
        Ok(found)
    }

    fn grant_shared(&self, attempt: &SharedAttempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        self.join_call(attempt, cancel)
    }

    fn fence_statement(&self, key: &str, fence: Fence, lock_id: Option<&str>) -> Result<String> {
        self.played([(key, fence, lock_id)])
    }

    fn fence_statement_all(&self, leases: &[(&str, Fence, &str)]) -> Result<String> {
        self.played(leases.iter().map(|(key, fence, lock_id)| (*key, *fence, Some(*lock_id))))
    }

    fn fence_statement_shared(&self, key: &str, fence: Fence, lock_id: &str) -> Result<String> {
        self.played([(key, fence, Some(lock_id))])
    }

    fn grant_in_turn(&self, attempt: &TurnAttempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        self.turn_call(attempt, cancel)
    }

    fn turn(&self, ticket: &Intent<'_>, deadline: Moment, cancel: &CancelToken) -> Result<Turn> {
        self.turn_look(ticket, deadline, cancel)
    }

    fn announce(&self, intent: &Intent<'_>, deadline: Moment) -> Result<()> {
        self.announce_call(intent, deadline)
    }

    fn withdraw(&self, id: &str, deadline: Moment) -> Result<()> {
        self.withdraw_call(id, deadline)
    }

    fn begin_run(&self, begin: &BeginRun<'_>, cancel: &CancelToken) -> Result<BeginOutcome> {
        once::begin(self, begin, cancel)
    }

    fn mark_run(&self, run: &MarkRun<'_>, step: MarkStep, deadline: Moment) -> Result<MarkOutcome> {
        once::mark(self, run, step, deadline)
    }

    fn clock(&self) -> Clock {
        self.shared.clock.clone()
    }

    fn operation_timeout(&self) -> Duration {
        self.operation_timeout
    }

    fn close(&self) {
        self.shared.count_close();
    }
}

impl Default for MemoryBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryBackend")
            .field("clock", &self.shared.clock)
            .field("live_leases", &self.live_leases())
            .finish_non_exhaustive()
    }
}
