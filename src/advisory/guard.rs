//! The guard of a session lock.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::advisory::held_lock::{AdvisoryLost, Taken};
use crate::advisory::key::AdvisoryKey;
use crate::advisory::registry::{ClientLock, Registry};
use crate::advisory::unlock::unlock;
use crate::backend::ReleaseResult;
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::threads::{driver_unusable, ignore_panic};

/// A held session lock, with the connection that it lives on. Released when it is dropped, and at the
/// latest when its `max_hold` is over (unless its options keep it).
///
/// Long work should check [`is_held`](Self::is_held) or wait for [`lost`](Self::lost): when the
/// connection ends, the server grants the lock to another session, and nothing can stop work that goes on.
/// There is no fencing token here; where late writes must be impossible, take a lease and a fenced transaction.
///
/// Dropping it unlocks on this thread, for at most the client's `dispose_timeout`. Inside an async
/// runtime, where thread-locals are gone and while unwinding from a panic a thread of the client takes over. `Drop` never panics;
/// failures are logged, and the connection is closed, which frees the lock as well.
///
/// # Blocking
///
/// [`release`](Self::release) at most `operation_timeout`, `Drop` at most `dispose_timeout`; nothing else does I/O.
///
/// # Cancellation
///
/// No token ends them: a cancelled holder must still release.
#[must_use = "the lock is released at once if the guard is not bound to a variable: use `let _guard = …`, not `let _ = …`"]
pub struct AdvisoryGuard {
    lock: Arc<ClientLock>,
    registry: Arc<Registry>,
    release_limit: Duration,
    drop_limit: Duration,
}

impl AdvisoryGuard {
    pub(super) fn new(
        lock: Arc<ClientLock>,
        registry: Arc<Registry>,
        release_limit: Duration,
        drop_limit: Duration,
    ) -> Self {
        Self { lock, registry, release_limit, drop_limit }
    }

    /// The locked key.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # let key = syncguard::AdvisoryKey::from_text("migrate");
    /// let guard = client.advisory_lock(&key)?;
    /// assert_eq!(guard.key(), key);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn key(&self) -> AdvisoryKey {
        self.lock.key
    }

    /// The server process that holds the lock, as `pg_locks` and `pg_stat_activity` show it.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # let key = syncguard::AdvisoryKey::from_text("migrate");
    /// let guard = client.advisory_lock(&key)?;
    /// println!("held by the server process {}", guard.pid());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.lock.pid
    }

    /// Whether the lock can still be trusted: its time is not over, and no loss was noticed so far.
    /// No I/O. Once `false` it stays `false`.
    ///
    /// A session that has ended is noticed within about a second; a network that has gone silent
    /// within 10 s.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # let key = syncguard::AdvisoryKey::from_text("migrate");
    /// let guard = client.advisory_lock(&key)?;
    /// if !guard.is_held() {
    ///     println!("its session has ended: stop");
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn is_held(&self) -> bool {
        if self.lock.is_of_parent() {
            return false;
        }
        self.registry.check_deadline(&self.lock);
        self.lock.is_held()
    }

    /// Fires when the lock can no longer be trusted: its time is over, its session has ended, or the
    /// client was closed. Cancelling it yourself only wakes threads that wait for it. It does not fire
    /// when the guard is released.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # let key = syncguard::AdvisoryKey::from_text("migrate");
    /// # use std::time::Duration;
    /// let guard = client.advisory_lock(&key)?;
    /// if guard.lost().wait_timeout(Duration::from_secs(10)) {
    ///     println!("stop now: {:?}", guard.lost_reason());
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn lost(&self) -> &CancelToken {
        &self.lock.lost
    }

    /// Fires when `max_hold` is over, also where the options keep the lock: a request to finish.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # let key = syncguard::AdvisoryKey::from_text("migrate");
    /// let guard = client.advisory_lock(&key)?;
    /// if guard.overdue().is_cancelled() {
    ///     println!("finish soon");
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn overdue(&self) -> &CancelToken {
        &self.lock.overdue
    }

    /// Why the lock is lost; `None` while it is not.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # let key = syncguard::AdvisoryKey::from_text("migrate");
    /// let guard = client.advisory_lock(&key)?;
    /// assert_eq!(guard.lost_reason(), None);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn lost_reason(&self) -> Option<AdvisoryLost> {
        if !self.lock.is_of_parent() {
            self.registry.check_deadline(&self.lock);
        }
        self.lock.lost_reason()
    }

    /// Releases the lock, and says whether it was still held.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # let key = syncguard::AdvisoryKey::from_text("migrate");
    /// let guard = client.advisory_lock(&key)?;
    /// guard.release()?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the connection, which is then closed: the lock ends with it, as soon as the server
    /// notices.
    pub fn release(self) -> Result<ReleaseResult> {
        if self.lock.is_of_parent() {
            return Err(LockError::invalid(
                "this lock was taken before a fork: it belongs to the parent process, which must release it",
            ));
        }
        self.registry.check_deadline(&self.lock);
        if !self.lock.release() {
            return Ok(ReleaseResult::NotHeld);
        }
        self.registry.remove(&self.lock);
        self.unlock(self.release_limit)
    }

    /// Unlocks an ended lock on this thread.
    fn unlock(&self, limit: Duration) -> Result<ReleaseResult> {
        let start = Instant::now();
        match self.lock.take(limit) {
            Taken::Connection(connection) => {
                let rest = limit.saturating_sub(start.elapsed());
                unlock(&self.registry, &self.lock, connection, rest)
            }
            Taken::Gone => Ok(ReleaseResult::NotHeld),
            Taken::Late => Err(LockError::new(ErrorCode::NetworkTimeout).with_message(
                "the session lock's connection is busy with a server that does not answer; it is released in the background",
            )),
        }
    }

    fn dispose(&self) {
        if self.lock.is_of_parent() {
            // The parent's socket is neither used nor closed here: the lock is kept forever, with it. Nor
            // is a mutex touched, which a thread of the parent may have had at the fork.
            std::mem::forget(Arc::clone(&self.lock));
            return;
        }
        if !self.lock.release() {
            return;
        }
        self.registry.remove(&self.lock);
        if driver_unusable() || std::thread::panicking() {
            self.registry.unlock_later(&self.lock);
        } else if let Err(error) = self.unlock(self.drop_limit) {
            log::warn!("the session lock {} ends with its connection: {}", self.lock.key, error.chain());
        }
    }
}

impl Drop for AdvisoryGuard {
    fn drop(&mut self) {
        ignore_panic(|| self.dispose());
    }
}

impl fmt::Debug for AdvisoryGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdvisoryGuard")
            .field("key", &self.lock.key)
            .field("pid", &self.lock.pid)
            .field("held", &self.lock.is_held())
            .finish_non_exhaustive()
    }
}
