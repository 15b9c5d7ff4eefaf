//! What a holder has.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Acquired, ExtendResult, LockBackend, LockEnding, LostReason, ReleaseResult};
use crate::cancel::CancelToken;
use crate::error::Result;
use crate::lock::attempt::Leases;
use crate::lock::backend_call::change;
use crate::lock::engine::{Engine, Entered, Handle};
use crate::lock::extend::extend;
use crate::lock::registry::{GuardState, PendingRelease};
use crate::lock::release::{ReleaseProgress, end_lease, release_here};
use crate::lock::report::{ReleaseSource, report};
use crate::model::fence::Fence;
use crate::model::hash::hash_key;
use crate::model::key::permit_of;
use crate::model::time::{Moment, Ttl};
use crate::threads::{ignore_panic, in_runtime};

/// A held lock. It is renewed while this value lives, and released when it is dropped.
///
/// Check [`is_held`](LockGuard::is_held) or watch [`lost`](LockGuard::lost) in long work: a lease can
/// be lost, and no lock service can stop a paused process from waking up late. Where that matters,
/// pass [`fence`](LockGuard::fence) to the protected resource, or work inside a fenced transaction.
///
/// Dropping it releases the lock on this thread, for at most the client's `dispose_timeout`. Inside
/// an async runtime, while unwinding from a panic, or when the release fails, the client's worker
/// takes over. In the destructor of a thread-local and in `atexit` another thread releases it, and `Drop`
/// waits for that for as long. `Drop` never panics; failures go to `on_release_error`.
///
/// # Blocking
///
/// [`extend`](Self::extend), [`release`](Self::release) and [`fence_sql`](Self::fence_sql) at most
/// `operation_timeout`, `Drop` at most `dispose_timeout`; nothing else does I/O. [`fence_transaction`](Self::fence_transaction) is the caller's own
/// statement: it waits as that transaction may.
///
/// # Cancellation
///
/// No token ends them: a cancelled holder may still need the time to finish, and must release.
#[must_use = "the lock is released at once if the guard is not bound to a variable: use `let _guard = …`, not `let _ = …`"]
pub struct LockGuard {
    // Dropped after everything else: the last handle ends the client.
    state: Arc<GuardState>,
    source: ReleaseSource,
    handle: Arc<Handle>,
}

impl LockGuard {
    /// The guard of a lease that was asked for alone.
    pub(super) fn new(handle: Arc<Handle>, leases: Leases) -> Self {
        Self { state: leases.first, source: ReleaseSource::Drop, handle }
    }

    /// Names the end of a closure as what releases.
    pub(super) fn for_helper(mut self) -> Self {
        self.source = ReleaseSource::Helper;
        self
    }

    /// The locked key, in NFC. For a permit it is the semaphore's name, U+2126 and the
    /// [number](Self::permit) of the permit. No call accepts that as a key: look permits up by their id.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock("report")?;
    /// assert_eq!(guard.key(), "report");
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn key(&self) -> &str {
        &self.state.key
    }

    /// Which of its [`Semaphore`](crate::Semaphore)'s permits this is, from 1; `None` if it is a lock. While
    /// it is held no other holder has the same number, so the number may select one of N resources.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.semaphore("report", 3)?.acquire()?;
    /// assert!((1..=3).contains(&guard.permit().unwrap()));
    /// assert_eq!(client.lock("report")?.permit(), None);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn permit(&self) -> Option<u32> {
        permit_of(self.key()).map(|(_, number)| number)
    }

    /// Whether it shares the key with other readers: see [`read_lock`](crate::LockClient::read_lock).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// assert!(client.read_lock("prices")?.is_shared());
    /// assert!(!client.lock("prices")?.is_shared());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.state.shared
    }

    /// The lease's id. Whoever knows it can release the lock: do not log it.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock("report")?;
    /// assert!(client.owns(guard.lock_id())?);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn lock_id(&self) -> &str {
        &self.state.lock_id
    }

    /// The grant's fence: greater than that of every earlier grant of this key. Readers that share a key have one
    /// fence together.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let first = client.lock("report")?.fence();
    /// let second = client.lock("report")?.fence();
    /// assert!(second > first);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.state.fence
    }

    /// When the server's lease ends, in Unix milliseconds of *its* clock, by the newest grant,
    /// renewal or extend. For display; do not compare it with clocks of this machine.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock("report")?;
    /// println!("held until {} of the server's clock", guard.expires_at_ms());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn expires_at_ms(&self) -> i64 {
        self.state.lease.lock().expires_at_ms()
    }

    /// Whether the lease can still be trusted, by this process's clock and without any I/O.
    ///
    /// Once `false` it stays `false`. `true` says that the lease was held when this was called. After
    /// a fork the parent's guard stays held, and the child's copy is not held.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock("import")?;
    /// for file in ["a.csv", "b.csv"] {
    ///     if !guard.is_held() {
    ///         break; // another process may hold it now
    ///     }
    ///     println!("importing {file}");
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn is_held(&self) -> bool {
        if self.engine().is_forked() {
            return false;
        }
        self.tick();
        self.state.lease.lock().is_held(self.engine().clock.now())
    }

    /// How long the lease can be trusted without a further renewal; zero once it is lost.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// let guard = client.lock("report")?;
    /// if guard.remaining() < Duration::from_secs(10) {
    ///     println!("renewals are late");
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn remaining(&self) -> Duration {
        if self.engine().is_forked() {
            return Duration::ZERO;
        }
        let now = self.engine().clock.now();
        let lease = self.state.lease.lock();
        if lease.is_held(now) { lease.end().since(now) } else { Duration::ZERO }
    }

    /// Fires when the lease can no longer be trusted, at the latest when its time is over by this
    /// process's clock, whatever the network does.
    ///
    /// Pass it, or a [`child`](CancelToken::child), to work that should then stop. Cancelling it
    /// yourself only wakes threads that wait for it: the lock stays held. It does not fire when the
    /// guard is released.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// let guard = client.lock("report")?;
    /// if guard.lost().wait_timeout(Duration::from_millis(1)) {
    ///     println!("stop now: {:?}", guard.lost_reason());
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn lost(&self) -> &CancelToken {
        &self.state.lost
    }

    /// Why the lease is lost; `None` while it is not.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock("report")?;
    /// assert_eq!(guard.lost_reason(), None);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn lost_reason(&self) -> Option<LostReason> {
        if self.engine().is_forked() {
            return None; // The parent may have it still.
        }
        self.tick();
        self.state.lease.lock().lost()
    }

    /// Sets the lease's expiry to now plus `ttl` (1 ms to [`MAX_TTL`](crate::MAX_TTL)), which is also
    /// the ttl of later renewals. A shorter ttl than before shortens the lease.
    ///
    /// `NotHeld` means that the lock is lost: its lease is gone, or the answer came only after the
    /// guard's own deadline. A guard that is already lost sends nothing. `max_hold` stays as it is: an extend does not lengthen it.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::ExtendResult;
    ///
    /// let guard = client.lock("report")?;
    /// if guard.extend(Duration::from_secs(120))? == ExtendResult::NotHeld {
    ///     println!("lost: stop working");
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the backend. After an error whose outcome is unknown the guard trusts the lease until the
    /// earlier of the old and the new expiry; renewals go on, with the new ttl.
    pub fn extend(&self, ttl: Duration) -> Result<ExtendResult> {
        let ttl = Ttl::new(ttl)?.get();
        self.engine().check_process()?;
        extend(self.engine(), &[&self.state], ttl)
    }

    /// Releases the lock, and says whether it was still held.
    ///
    /// With `min_hold`, a guard that ends sooner leaves the lease in place until then and answers
    /// `Released`: the caller no longer has it. [`release_now`](Self::release_now) ends it at once.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use syncguard::ReleaseResult;
    ///
    /// let guard = client.lock("report")?;
    /// assert_eq!(guard.release()?, ReleaseResult::Released);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the backend; `on_release_error` is not called for them. The key may then stay held:
    /// the client's worker keeps trying to release it until the lease is over, at most its ttl and a
    /// second later.
    pub fn release(self) -> Result<ReleaseResult> {
        self.end(false)
    }

    /// As [`release`](Self::release), and ends `min_hold` early: the key is free at once.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let options = LockOptions::new().min_hold(Duration::from_secs(10));
    /// client.lock_with("nightly", &options)?.release_now()?;
    /// assert!(!client.is_locked("nightly")?);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`release`](Self::release).
    pub fn release_now(self) -> Result<ReleaseResult> {
        self.end(true)
    }

    fn end(self, now: bool) -> Result<ReleaseResult> {
        let engine = self.engine();
        engine.check_process()?;
        let _entered = engine.enter_anyway();
        let limit = engine.backend.operation_timeout();
        let Some(mut pending) = self.finish(ReleaseSource::Worker) else {
            return Ok(ReleaseResult::NotHeld);
        };
        if now {
            pending.min_hold_end = engine.clock.now();
        }
        match release_here(engine, &mut pending, limit) {
            Ok(ReleaseProgress::Kept) => {
                let at = pending.min_hold_end;
                let _ = engine.registry.defer(at, pending);
                Ok(ReleaseResult::Released)
            }
            Ok(ReleaseProgress::Done(outcome)) => Ok(outcome.into()),
            Err(error) => {
                pending.tries = 1;
                let _ = engine.registry.defer(engine.clock.now(), pending);
                Err(error.with_key(self.key()).with_lock_id(self.lock_id()))
            }
        }
    }

    /// Gives the lease away: it is not renewed any more, and neither dropping this guard nor closing
    /// the client releases it. The new owner of the returned id must release it; otherwise the key stays
    /// held until the lease's end.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let lease = client.lock("report")?.leak();
    /// // … in another process, or in C:
    /// client.release(&lease.lock_id)?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use = "the lease can only be released with the id in here"]
    pub fn leak(self) -> Acquired {
        let grant = self.state.grant();
        if self.engine().is_forked() {
            return grant; // The parent's guard goes on with it.
        }
        let lost = self.state.lease.lock().lost();
        self.state.tell_end(self.engine().told(), lost.map_or(LockEnding::Leaked, LockEnding::Lost));
        // Nothing is released: whoever ends the lease first acts, and we choose not to.
        let _ = self.finish(self.source);
        grant
    }

    /// Asks the backend for a change that leaves the lease as it is.
    pub(super) fn ask<T>(&self, call: impl FnOnce(&dyn LockBackend, Moment) -> Result<T>) -> Result<T> {
        let engine = self.engine();
        engine.check_process()?;
        let _entered = engine.enter_anyway();
        change(Duration::MAX, || call(&*engine.backend, engine.call_deadline(Moment::NEVER)))
    }

    /// Ends the lease by this call, if its answer `ended` it, and otherwise as `Drop` does. The answer, and
    /// whether it came while the lease was trusted; `None` if the lease had been ended before.
    pub(super) fn end_with<T>(
        self,
        call: impl FnOnce(&dyn LockBackend, Moment) -> Result<T>,
        ended: impl FnOnce(&T) -> bool,
    ) -> Option<(Result<T>, bool)> {
        let engine = self.engine();
        if engine.is_forked() {
            return None;
        }
        let entered = engine.enter_anyway();
        let held = self.is_held();
        let pending = self.finish(self.source)?;
        let answer = change(Duration::MAX, || call(&*engine.backend, engine.call_deadline(Moment::NEVER)));
        let trusted = held && engine.clock.now() < pending.lease_end;
        if answer.as_ref().is_ok_and(ended) {
            engine.freed(self.key());
        } else {
            self.release_ended(pending, entered);
        }
        Some((answer, trusted))
    }

    /// Refuses a guard that was made before a fork.
    pub(crate) fn check_process(&self) -> Result<()> {
        self.engine().check_process()
    }

    /// The backend, for what is done in the caller's own transaction.
    pub(crate) fn backend(&self) -> &Arc<dyn LockBackend> {
        &self.engine().backend
    }

    fn engine(&self) -> &Arc<Engine> {
        self.handle.engine()
    }

    fn tick(&self) {
        self.engine().registry.tick(&self.state, self.engine().clock.now());
    }

    /// Ends the lease on this side. What is to be released then, unless it was ended before.
    fn finish(&self, source: ReleaseSource) -> Option<PendingRelease> {
        end_lease(self.engine(), &self.state, source)
    }

    /// What `Drop` does.
    fn dispose(&self) {
        let engine = self.engine();
        if engine.is_forked() {
            return;
        }
        let entered = engine.enter_anyway();
        if let Some(pending) = self.finish(self.source) {
            self.release_ended(pending, entered);
        }
    }

    /// Releases a lease that has ended on this side, and tells nobody but the handler if that fails.
    fn release_ended(&self, mut pending: PendingRelease, entered: Entered<'_>) {
        let engine = self.engine();
        if in_runtime() || std::thread::panicking() {
            engine.hand_to_worker(pending);
            return;
        }
        match release_here(engine, &mut pending, engine.dispose_timeout) {
            Ok(ReleaseProgress::Done(_)) => {}
            Ok(ReleaseProgress::Kept) => {
                let at = pending.min_hold_end;
                let _ = engine.registry.defer(at, pending);
            }
            Err(error) => {
                let context = pending.context.clone();
                let handler = pending.handler.clone();
                pending.reported = true;
                pending.tries = 1;
                let _ = engine.registry.defer(engine.clock.now(), pending);
                // The handler may close the client, which waits for calls like this one.
                drop(entered);
                let error = error.with_key(context.key.as_str()).with_lock_id(context.lock_id.as_str());
                report(handler.as_ref(), &error, &context);
            }
        }
    }
}

/// Runs `work` under what is held, and lets go of that before a panic goes on: a guard that is dropped by
/// unwinding leaves the release to the worker.
pub(super) fn run_holding<H, T>(held: H, work: impl FnOnce(&H) -> T) -> T {
    let result = catch_unwind(AssertUnwindSafe(|| work(&held)));
    drop(held);
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        ignore_panic(|| self.dispose());
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("key_hash", &hash_key(self.key()))
            .field("lock_id_hash", &hash_key(self.lock_id()))
            .field("fence", &self.fence())
            .field("held", &self.is_held())
            .finish_non_exhaustive()
    }
}
