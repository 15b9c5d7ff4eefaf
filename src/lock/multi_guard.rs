//! What a holder of several keys has.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{ExtendResult, LockBackend, LostReason, ReleaseOutcome, ReleaseResult};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::lock::attempt::Leases;
use crate::lock::engine::{Engine, Handle};
use crate::lock::extend::extend;
use crate::lock::registry::{GuardState, PendingRelease};
use crate::lock::release::{ReleaseProgress, end_lease, release_all_here, release_here};
use crate::lock::report::{ReleaseSource, report};
use crate::model::fence::Fence;
use crate::model::key::normalize_and_validate_key;
use crate::model::time::Ttl;
use crate::threads::{ignore_panic, in_runtime};

/// Several held locks, taken together by [`lock_all`](crate::LockClient::lock_all). Each key has a lease with a
/// fence of its own, which is renewed while this value lives, and released when it is dropped.
///
/// It is held while all of its keys are: as soon as one lease is lost, [`lost`](Self::lost) fires, and the
/// other keys are released, whatever their holder does next. As with a [`LockGuard`](crate::LockGuard), no lock
/// service can stop a paused process from waking up late: pass the fences to the protected resources, or work
/// inside a [fenced transaction](Self::fence_transaction).
///
/// Dropping it releases all keys in one round trip on this thread, for at most the client's `dispose_timeout`;
/// inside an async runtime, while unwinding from a panic, or when the release fails, the client's worker takes
/// over. `Drop` never panics; failures go to `on_release_error`, which is called once, with the first of the keys.
///
/// # Blocking
///
/// [`extend`](Self::extend), [`release`](Self::release) and [`fence_sql`](Self::fence_sql) at most
/// `operation_timeout`, `Drop` at most `dispose_timeout`; before the end of a `min_hold` each key takes a request of its own, within the same time.
/// Nothing else does I/O. [`fence_transaction`](Self::fence_transaction) is the caller's own statement.
///
/// # Cancellation
///
/// No token ends them.
#[must_use = "the locks are released at once if the guard is not bound to a variable: use `let _guard = …`, not `let _ = …`"]
pub struct MultiGuard {
    // Dropped after everything else: the last handle ends the client.
    leases: Leases,
    handle: Arc<Handle>,
}

impl MultiGuard {
    pub(super) fn new(handle: Arc<Handle>, leases: Leases) -> Self {
        Self { leases, handle }
    }

    /// The locked keys, in NFC, each once, in the order of their bytes.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock_all(&["b", "a", "b"])?;
    /// assert_eq!(guard.keys(), ["a", "b"]);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn keys(&self) -> Vec<&str> {
        self.leases.iter().map(|state| &*state.key).collect()
    }

    /// The fence of this key's grant, greater than that of every earlier grant of the key; `None` for a key that
    /// is not one of these.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock_all(&["a", "b"])?;
    /// assert!(guard.fence("a").is_some() && guard.fence("c").is_none());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn fence(&self, key: &str) -> Option<Fence> {
        let key = normalize_and_validate_key(key).ok()?;
        self.leases.iter().find(|state| *state.key == *key).map(|state| state.fence)
    }

    /// Whether all leases can still be trusted, by this process's clock and without any I/O.
    ///
    /// Once `false` it stays `false`. `true` says that all keys were held when this was called. After a fork
    /// the child's copy is not held.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock_all(&["from", "to"])?;
    /// assert!(guard.is_held());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// How long all leases can be trusted without a further renewal: the shortest of them; zero once
    /// one is lost.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// let guard = client.lock_all(&["from", "to"])?;
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
        self.tick();
        let now = self.engine().clock.now();
        let rest = |state: &Arc<GuardState>| {
            let lease = state.lease.lock();
            if lease.is_held(now) { lease.end().since(now) } else { Duration::ZERO }
        };
        self.leases.iter().map(rest).min().unwrap_or_default()
    }

    /// Fires when one of the leases can no longer be trusted, at the latest when its time is over by this
    /// process's clock, whatever the network does. It does not fire when the guard is released;
    /// cancelling it yourself only wakes threads that wait for it.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// let guard = client.lock_all(&["from", "to"])?;
    /// if guard.lost().wait_timeout(Duration::from_millis(1)) {
    ///     println!("stop now: {:?}", guard.lost_reason());
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn lost(&self) -> &CancelToken {
        &self.leases.first.lost
    }

    /// Why the first lost lease was lost; `None` while all are held.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// let guard = client.lock_all(&["from", "to"])?;
    /// assert_eq!(guard.lost_reason(), None);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn lost_reason(&self) -> Option<LostReason> {
        if self.engine().is_forked() {
            return None; // The parent may have them still.
        }
        self.tick();
        match &self.leases.first.set {
            Some(set) => {
                set.lost().or_else(|| self.leases.iter().find_map(|state| state.lease.lock().lost()))
            }
            None => self.leases.first.lease.lock().lost(),
        }
    }

    /// Sets the expiry of all leases to now plus `ttl` (1 ms to [`MAX_TTL`](crate::MAX_TTL)), which is also the ttl
    /// of later renewals, in one round trip. The expiry in the answer is the earliest of them, by the
    /// server's clock. A shorter ttl than before shortens the leases.
    ///
    /// `NotHeld` means that the locks are lost: one of the leases is gone, or its answer came too late. A
    /// guard that is already lost sends nothing.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use syncguard::ExtendResult;
    ///
    /// let guard = client.lock_all(&["from", "to"])?;
    /// if guard.extend(Duration::from_secs(120))? == ExtendResult::NotHeld {
    ///     println!("lost: stop working");
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the backend, with the key concerned. Some of the leases may have been extended;
    /// all of them last until their old expiry or a later one, and renewals go on.
    pub fn extend(&self, ttl: Duration) -> Result<ExtendResult> {
        let ttl = Ttl::new(ttl)?.get();
        self.engine().check_process()?;
        let states: Vec<_> = self.leases.iter().collect();
        extend(self.engine(), &states, ttl)
    }

    /// Releases all keys, in one round trip: `Released` if every one of them was still held, `NotHeld` otherwise.
    /// Either way none of them is held any more.
    ///
    /// With `min_hold`, a guard that ends sooner leaves the leases in place until then and answers
    /// `Released`: the caller no longer has them. [`release_now`](Self::release_now) ends them at once.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use syncguard::ReleaseResult;
    ///
    /// let guard = client.lock_all(&["from", "to"])?;
    /// assert_eq!(guard.release()?, ReleaseResult::Released);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the backend; `on_release_error` is not called for them. The keys may then stay held: the
    /// client's worker keeps trying to release them until the leases are over, at most their ttl and a second
    /// later.
    pub fn release(self) -> Result<ReleaseResult> {
        self.release_by(false)
    }

    /// As [`release`](Self::release), and ends `min_hold` early: all keys are free at once.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use std::time::Duration;
    /// use syncguard::LockOptions;
    ///
    /// let options = LockOptions::new().min_hold(Duration::from_secs(10));
    /// client.lock_all_with(&["from", "to"], &options)?.release_now()?;
    /// assert!(!client.is_locked("from")? && !client.is_locked("to")?);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`release`](Self::release).
    pub fn release_now(self) -> Result<ReleaseResult> {
        self.release_by(true)
    }

    fn release_by(self, now: bool) -> Result<ReleaseResult> {
        let engine = self.engine();
        engine.check_process()?;
        let _entered = engine.enter_anyway();
        let limit = engine.backend.operation_timeout();
        let mut pending = self.end(ReleaseSource::Worker);
        if now {
            let now = engine.clock.now();
            pending.iter_mut().for_each(|pending| pending.min_hold_end = now);
        }
        let complete = pending.len() == self.leases.iter().count();
        match release_together(engine, pending, limit, false) {
            Ok(true) if complete => Ok(ReleaseResult::Released),
            Ok(_) => Ok(ReleaseResult::NotHeld),
            Err(error) => Err(error),
        }
    }

    /// Refuses a guard that was made before a fork.
    pub(crate) fn check_process(&self) -> Result<()> {
        self.engine().check_process()
    }

    /// The backend, for what is done in the caller's own transaction.
    pub(crate) fn backend(&self) -> &Arc<dyn LockBackend> {
        &self.engine().backend
    }

    /// Key, fence and lock id of each lease, in the order of the keys.
    pub(crate) fn grants(&self) -> Vec<(&str, Fence, &str)> {
        self.leases.iter().map(|state| (&*state.key, state.fence, &*state.lock_id)).collect()
    }

    fn engine(&self) -> &Arc<Engine> {
        self.handle.engine()
    }

    /// Notices, ahead of the timer, that a lease is over.
    fn tick(&self) {
        let now = self.engine().clock.now();
        for state in self.leases.iter() {
            self.engine().registry.tick(state, now);
        }
    }

    /// Ends the leases on this side. Those that are to be released then: what ended before is not.
    fn end(&self, source: ReleaseSource) -> Vec<PendingRelease> {
        self.leases.iter().filter_map(|state| end_lease(self.engine(), state, source)).collect()
    }

    /// What `Drop` does.
    fn dispose(&self) {
        let engine = self.engine();
        if engine.is_forked() {
            return;
        }
        let entered = engine.enter_anyway();
        let pending = self.end(ReleaseSource::Drop);
        if in_runtime() || std::thread::panicking() {
            for pending in pending {
                engine.hand_to_worker(pending);
            }
            return;
        }
        let Some(first) = pending.first() else { return };
        let (context, handler) = (first.context.clone(), first.handler.clone());
        if let Err(error) = release_together(engine, pending, engine.dispose_timeout, true) {
            // The handler may close the client, which waits for calls like this one.
            drop(entered);
            report(handler.as_ref(), &error, &context);
        }
    }
}

/// Releases these leases. Whether all of them were held, or are kept until the end of their `min_hold`. After
/// an error the worker goes on with what it concerns; `reported` says whether somebody is told of it here.
fn release_together(
    engine: &Engine,
    pending: Vec<PendingRelease>,
    limit: Duration,
    reported: bool,
) -> Result<bool> {
    let now = engine.clock.now();
    let kept = pending.iter().any(|pending| now < pending.min_hold_end);
    if kept || pending.len() < 2 {
        return release_one_by_one(engine, pending, limit, reported);
    }
    match release_all_here(engine, &pending, limit) {
        Ok(outcomes) => Ok(outcomes.iter().all(|outcome| *outcome == ReleaseOutcome::Released)),
        Err(error) => {
            let in_context = about(error, &pending);
            for pending in pending {
                try_again(engine, pending, reported);
            }
            Err(in_context)
        }
    }
}

fn release_one_by_one(
    engine: &Engine,
    pending: Vec<PendingRelease>,
    limit: Duration,
    reported: bool,
) -> Result<bool> {
    let start = engine.clock.now();
    let (mut all, mut failed) = (true, None);
    for mut pending in pending {
        let rest = limit.saturating_sub(engine.clock.now().since(start));
        match release_here(engine, &mut pending, rest) {
            Ok(ReleaseProgress::Kept) => {
                let at = pending.min_hold_end;
                let _ = engine.registry.defer(at, pending);
            }
            Ok(ReleaseProgress::Done(outcome)) => all &= outcome == ReleaseOutcome::Released,
            Err(error) => {
                failed = failed.or_else(|| Some(about(error, std::slice::from_ref(&pending))));
                try_again(engine, pending, reported);
            }
        }
    }
    failed.map_or(Ok(all), Err)
}

fn try_again(engine: &Engine, mut pending: PendingRelease, reported: bool) {
    pending.reported = reported;
    pending.tries = 1;
    let _ = engine.registry.defer(engine.clock.now(), pending);
}

/// The error with the first key that it is about.
fn about(error: LockError, pending: &[PendingRelease]) -> LockError {
    match pending.first() {
        Some(first) => {
            error.with_key(first.context.key.as_str()).with_lock_id(first.context.lock_id.as_str())
        }
        None => error,
    }
}

impl Drop for MultiGuard {
    fn drop(&mut self) {
        ignore_panic(|| self.dispose());
    }
}

impl fmt::Debug for MultiGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiGuard")
            .field("keys", &self.leases.iter().count())
            .field("held", &self.is_held())
            .finish_non_exhaustive()
    }
}
