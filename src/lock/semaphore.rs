//! Counting semaphores: a limited number of holders at a time, in all processes together.

use std::fmt;
use std::sync::Arc;

use crate::backend::{LockBackend, LockKind};
use crate::cancel::CancelToken;
use crate::error::Result;
use crate::lock::attempt::LockCall;
use crate::lock::backend_call::ask;
use crate::lock::engine::{Engine, Handle};
use crate::lock::guard::LockGuard;
use crate::lock::options::LockOptions;
use crate::lock::{turns, waiter};
use crate::model::hash::hash_key;
use crate::model::key::{Key, MAX_PERMITS, validate_limit};
use crate::model::time::Moment;

/// A counting semaphore: of its permits at most `limit` are held at a time, on all machines together.
///
/// A permit is a lease like that of a lock, in a [`LockGuard`]: renewed, lost, released and fenced in the same
/// way, and free again after its ttl if its holder dies. Each permit has a number, and a counter of
/// fences of its own: do not compare fences of different permits.
///
/// The limit is not stored. The promise is *never more holders than the largest limit in use*: with a
/// lower limit, a holder of a permit beyond it keeps that permit, and no new one is granted beyond it.
/// A lock on the key of the same name is independent: neither excludes the other.
///
/// ```
/// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
/// let reports = client.semaphore("reports", 3)?;
/// let permit = reports.acquire()?;
/// // At most three processes are here at a time.
/// assert!(permit.is_held());
/// permit.release()?;
/// # Ok::<(), syncguard::LockError>(())
/// ```
///
/// It is cheap to clone. It belongs to its client, and keeps that alive.
///
/// # Blocking
///
/// [`acquire`](Self::acquire) and [`acquire_with`](Self::acquire_with) at most the `timeout` of the options,
/// 5 s by default, forever with `wait_forever`; the others at most `operation_timeout`.
///
/// # Cancellation
///
/// The client's token and that of the options end a call with [`Aborted`](crate::ErrorCode::Aborted), as they
/// end `lock`. With a token that can fire a permit takes three round trips instead of one.
#[derive(Clone)]
pub struct Semaphore {
    name: Arc<str>,
    limit: u32,
    token: CancelToken,
    handle: Arc<Handle>,
}

impl Semaphore {
    pub(super) fn new(name: &str, limit: u32, token: CancelToken, handle: Arc<Handle>) -> Result<Self> {
        validate_limit(limit)?;
        Ok(Self { name: Key::new(name)?.as_str().into(), limit, token, handle })
    }

    /// The name, in NFC.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many permits it has.
    #[must_use]
    pub const fn limit(&self) -> u32 {
        self.limit
    }

    /// Waits for a permit with default options: at most 5 s, then a lease of 30 s that is renewed.
    ///
    /// See [`acquire_with`](Self::acquire_with).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let permit = client.semaphore("reports", 3)?.acquire()?;
    /// println!("permit {:?} with the fencing token {}", permit.permit(), permit.fence());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn acquire(&self) -> Result<LockGuard> {
        self.acquire_with(&LockOptions::new())
    }

    /// Waits for a permit. Threads of this client that wait for the same semaphore take turns, first come,
    /// first served; between processes chance and backoff decide.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let patient = LockOptions::new().timeout(Duration::from_secs(60));
    /// let permit = client.semaphore("reports", 3)?.acquire_with(&patient)?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`LockClient::lock_with`](crate::LockClient::lock_with), with the semaphore's name as their
    /// key. After them nothing is held, unless
    /// [`is_outcome_unknown`](crate::LockError::is_outcome_unknown) says so: then a permit may be held under
    /// [`lock_id`](crate::LockError::lock_id), and the client's worker keeps trying to release it until that lease
    /// would be over (`ttl` and a second).
    pub fn acquire_with(&self, options: &LockOptions) -> Result<LockGuard> {
        let leases = waiter::lock(self.call(options)?).map_err(|error| error.with_key(&*self.name))?;
        Ok(LockGuard::new(Arc::clone(&self.handle), leases))
    }

    /// Tries once, with default options. `None` if all permits are held.
    ///
    /// See [`try_acquire_with`](Self::try_acquire_with).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let alone = client.semaphore("reports", 1)?;
    /// let _permit = alone.acquire()?;
    /// assert!(alone.try_acquire()?.is_none());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn try_acquire(&self) -> Result<Option<LockGuard>> {
        self.try_acquire_with(&LockOptions::new())
    }

    /// Tries once. `None` if each permit was, at some moment of the call, held, being taken by another, or
    /// locked by a fenced transaction. It does not queue behind this client's waiters; `timeout` and the
    /// retry options do not apply.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let short = LockOptions::new().ttl(Duration::from_secs(10));
    /// assert!(client.semaphore("reports", 3)?.try_acquire_with(&short)?.is_some());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`acquire_with`](Self::acquire_with), without `AcquisitionTimeout`.
    pub fn try_acquire_with(&self, options: &LockOptions) -> Result<Option<LockGuard>> {
        let leases = self.call(options)?.try_lock().map_err(|error| error.with_key(&*self.name))?;
        Ok(leases.map(|leases| LockGuard::new(Arc::clone(&self.handle), leases)))
    }

    /// How many permits are held, those beyond a lowered limit included. For display: it may have changed when
    /// you read the answer.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let reports = client.semaphore("reports", 3)?;
    /// let _permit = reports.acquire()?;
    /// assert_eq!(reports.in_use()?, 1);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the backend.
    pub fn in_use(&self) -> Result<u32> {
        let engine = self.engine();
        engine.check_process()?;
        let deadline = engine.call_deadline(Moment::NEVER);
        let count = ask(|| engine.backend.permits_in_use(&self.name, MAX_PERMITS, deadline, &self.token));
        count.map_err(|error| error.with_key(&*self.name))
    }

    fn engine(&self) -> &Arc<Engine> {
        self.handle.engine()
    }

    /// What is asked for, checked; no I/O yet.
    fn call(&self, options: &LockOptions) -> Result<LockCall> {
        let options = options.resolve()?;
        turns::refuse(
            options.turn,
            "permits are given as they are free, in no order between clients: leave fair away",
        )?;
        let token = self.token.and(&options.cancel);
        let (handle, key) = (Arc::clone(&self.handle), Arc::clone(&self.name));
        let (since, other_keys) = (handle.engine().clock.now(), Vec::new());
        Ok(LockCall {
            handle,
            key,
            kind: LockKind::Permit,
            permits: Some(self.limit),
            shared: false,
            since,
            ticket: None,
            next: None,
            other_keys,
            options,
            token,
        })
    }
}

/// The name may be a customer's: its label only.
impl fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Semaphore")
            .field("name_hash", &hash_key(&self.name))
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}
