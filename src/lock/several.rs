//! The locks of several keys at once.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::backend::{LockKind, check_count, no_keys};
use crate::error::Result;
use crate::lock::attempt::LockCall;
use crate::lock::multi_guard::MultiGuard;
use crate::lock::options::LockOptions;
use crate::lock::{LockClient, turns, waiter};
use crate::model::key::Key;

impl LockClient {
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

    /// Waits until 1 to 64 keys can be taken at the same moment, and takes them together. Duplicates count once.
    ///
    /// Nothing is held while waiting, so that callers that name the same keys in different orders cannot
    /// wait for each other. In return, all keys must be free at the same moment, so that a large set
    /// may wait long if single keys of it are busy. `timeout` and the retry options say how long; a smaller set, or
    /// one key that stands for all of them and that everybody takes, waits less. In this process it
    /// queues only for the key that is in its way.
    ///
    /// Each key is locked as if by [`lock_with`](Self::lock_with), for every client of the backend, including
    /// clients that know nothing of sets. The options apply to all keys alike; `on_lost` is called once.
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
    /// a second; the client's worker keeps trying to release all of them until then.
    ///
    /// # Blocking
    ///
    /// At most `timeout` of the options, as [`lock_with`](Self::lock_with).
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
    /// if the grant came too late to be trusted. `timeout` and the retry options do not apply.
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

    /// What `lock_all` or `try_lock_all` is asked for, checked: each key once, in the order of their bytes.
    fn call_all<K: AsRef<str>>(&self, keys: &[K], options: &LockOptions) -> Result<LockCall> {
        let options = options.resolve()?;
        let mut normal = BTreeSet::new();
        for key in keys {
            normal.insert(Arc::<str>::from(Key::new(key.as_ref())?.as_str()));
        }
        check_count(normal.len())?;
        let key = normal.pop_first().ok_or_else(no_keys)?;
        turns::refuse(
            options.turn,
            "several keys are taken as soon as all are free, in no order: leave fair away",
        )?;
        let token = self.token.and(&options.cancel);
        Ok(LockCall {
            handle: Arc::clone(&self.handle),
            key,
            kind: LockKind::Set,
            permits: None,
            shared: false,
            since: self.engine().clock.now(),
            ticket: None,
            next: None,
            other_keys: normal.into_iter().collect(),
            options,
            token,
        })
    }
}
