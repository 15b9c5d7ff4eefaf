//! What the cases have in common.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use crate::backend::{AcquireResult, Acquired, LockBackend, LockInfo, LockInfoDebug, Lookup, Reason};
use crate::cancel::CancelToken;
use crate::contract::Harness;
use crate::error::Result;
use crate::model::lock_id::LockId;
use crate::model::time::Moment;

pub(super) const TTL: Duration = Duration::from_secs(30);

/// Half the tolerance, before which a lease is live for everyone.
pub(super) const JUST_EXPIRED_MS: i64 = 500;

/// Beyond the tolerance.
pub(super) const LONG_EXPIRED_MS: i64 = 1500;

pub(super) struct Bench<'a> {
    pub(super) harness: &'a dyn Harness,
    pub(super) backend: Arc<dyn LockBackend>,
}

impl<'a> Bench<'a> {
    pub(super) fn new(harness: &'a dyn Harness) -> Self {
        Self { harness, backend: harness.backend() }
    }

    /// A lock id that nobody has.
    pub(super) fn id() -> String {
        LockId::generate().unwrap().as_str().to_owned()
    }

    /// A key that nobody has used.
    pub(super) fn key() -> String {
        format!("contract-{}", Self::id())
    }

    /// A key that was held and has just been taken from `ttl`'s start.
    pub(super) fn held(&self) -> (String, Acquired) {
        let key = Self::key();
        let grant = self.acquire(&key);
        (key, grant)
    }

    pub(super) fn try_acquire(&self, key: &str) -> Result<AcquireResult> {
        self.backend.acquire(key, TTL, &CancelToken::never())
    }

    pub(super) fn acquire(&self, key: &str) -> Acquired {
        self.try_acquire(key).unwrap().acquired().expect("the key is free")
    }

    pub(super) fn release(&self, lock_id: &str) -> bool {
        use crate::backend::ReleaseOutcome;
        self.backend.release(lock_id, &CancelToken::never()).unwrap() == ReleaseOutcome::Released
    }

    /// The new expiry, if the lease was extended by the usual ttl.
    pub(super) fn extend(&self, lock_id: &str) -> Option<i64> {
        self.extend_to(lock_id, TTL)
    }

    pub(super) fn extend_to(&self, lock_id: &str, ttl: Duration) -> Option<i64> {
        use crate::backend::ExtendOutcome;
        match self.backend.extend(lock_id, ttl, &CancelToken::never()).unwrap() {
            ExtendOutcome::Extended { expires_at_ms } => Some(expires_at_ms),
            ExtendOutcome::NotHeld(_) => None,
        }
    }

    pub(super) fn is_locked(&self, key: &str) -> bool {
        self.backend.is_locked(key, &CancelToken::never()).unwrap()
    }

    pub(super) fn by_key(&self, key: &str) -> Option<LockInfo> {
        self.backend.lookup(Lookup::Key(key), &CancelToken::never()).unwrap()
    }

    pub(super) fn by_id(&self, lock_id: &str) -> Option<LockInfo> {
        self.backend.lookup(Lookup::LockId(lock_id), &CancelToken::never()).unwrap()
    }

    pub(super) fn raw(&self, key: &str) -> Option<LockInfoDebug> {
        self.backend.lookup_raw(Lookup::Key(key), &CancelToken::never()).unwrap()
    }

    /// The operation timeout from now.
    pub(super) fn deadline(&self) -> Moment {
        self.backend.clock().now().after(self.backend.operation_timeout())
    }

    /// The key's counter; 0 if it has none.
    pub(super) fn counter(&self, key: &str) -> u64 {
        self.harness.counter(key).unwrap_or(0)
    }
}

/// A backend may know why it refused, and must not be wrong about it.
pub(super) fn is_or_unknown(reason: Option<Reason>, expected: Reason) -> bool {
    reason.is_none_or(|reason| reason == expected)
}

/// Runs `work` on so many threads, started together; the results in the order of the threads.
pub(super) fn together<T: Send>(threads: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let start = Barrier::new(threads);
    std::thread::scope(|scope| {
        let (start, work) = (&start, &work);
        let running: Vec<_> = (0..threads)
            .map(|n| {
                scope.spawn(move || {
                    start.wait();
                    work(n)
                })
            })
            .collect();
        running.into_iter().map(|thread| thread.join().expect("a thread of the case")).collect()
    })
}
