//! What the cases have in common.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use syncguard::backend::Moment;
use syncguard::backend::{
    AcquireResult, Acquired, LockBackend, LockInfo, LockInfoRaw, Lookup, Reason, generate_lock_id,
};
use syncguard::{CancelToken, Result};

use crate::Harness;

pub(crate) const TTL: Duration = Duration::from_secs(30);

/// Half the tolerance, before which a lease is live for everyone.
pub(crate) const JUST_EXPIRED_MS: i64 = 500;

/// Beyond the tolerance.
pub(crate) const LONG_EXPIRED_MS: i64 = 1500;

pub(crate) struct Bench<'a> {
    pub(crate) harness: &'a dyn Harness,
    pub(crate) backend: Arc<dyn LockBackend>,
}

impl<'a> Bench<'a> {
    pub(crate) fn new(harness: &'a dyn Harness) -> Self {
        Self { harness, backend: harness.backend() }
    }

    /// A lock id that nobody has.
    pub(crate) fn id() -> String {
        generate_lock_id().unwrap()
    }

    /// A key that nobody has used.
    pub(crate) fn key() -> String {
        format!("contract-{}", Self::id())
    }

    /// A key that was held and has just been taken from `ttl`'s start.
    pub(crate) fn held(&self) -> (String, Acquired) {
        let key = Self::key();
        let grant = self.acquire(&key);
        (key, grant)
    }

    pub(crate) fn try_acquire(&self, key: &str) -> Result<AcquireResult> {
        self.backend.acquire(key, TTL, &CancelToken::never())
    }

    pub(crate) fn acquire(&self, key: &str) -> Acquired {
        self.try_acquire(key).unwrap().acquired().expect("the key is free")
    }

    pub(crate) fn release(&self, lock_id: &str) -> bool {
        use syncguard::backend::ReleaseOutcome;
        self.backend.release(lock_id, &CancelToken::never()).unwrap() == ReleaseOutcome::Released
    }

    /// The new expiry, if the lease was extended by the usual ttl.
    pub(crate) fn extend(&self, lock_id: &str) -> Option<i64> {
        self.extend_to(lock_id, TTL)
    }

    pub(crate) fn extend_to(&self, lock_id: &str, ttl: Duration) -> Option<i64> {
        use syncguard::backend::ExtendOutcome;
        match self.backend.extend(lock_id, ttl, &CancelToken::never()).unwrap() {
            ExtendOutcome::Extended { expires_at_ms } => Some(expires_at_ms),
            _ => None,
        }
    }

    pub(crate) fn is_locked(&self, key: &str) -> bool {
        self.backend.is_locked(key, &CancelToken::never()).unwrap()
    }

    pub(crate) fn by_key(&self, key: &str) -> Option<LockInfo> {
        self.backend.lookup(Lookup::Key(key), &CancelToken::never()).unwrap()
    }

    pub(crate) fn by_id(&self, lock_id: &str) -> Option<LockInfo> {
        self.backend.lookup(Lookup::LockId(lock_id), &CancelToken::never()).unwrap()
    }

    pub(crate) fn raw(&self, key: &str) -> Option<LockInfoRaw> {
        self.backend.lookup_raw(Lookup::Key(key), &CancelToken::never()).unwrap()
    }

    /// The operation timeout from now.
    pub(crate) fn deadline(&self) -> Moment {
        self.backend.clock().now().after(self.backend.operation_timeout())
    }

    /// The key's counter; 0 if it has none.
    pub(crate) fn counter(&self, key: &str) -> u64 {
        self.harness.counter(key).unwrap_or(0)
    }
}

/// A backend may know why it refused, and must not be wrong about it.
pub(crate) fn is_or_unknown(reason: Option<Reason>, expected: Reason) -> bool {
    reason.is_none_or(|reason| reason == expected)
}

/// Runs `work` on so many threads, started together; the results in the order of the threads.
pub(crate) fn together<T: Send>(threads: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
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
