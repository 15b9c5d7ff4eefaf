//! The contract, on the memory backend: bare, under telemetry, and on the system's time.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::sync::Arc;

use syncguard::{LockBackend, MemoryBackend, TelemetryOptions, with_telemetry};
use syncguard_contract::Harness;

/// The memory backend, and what its clients reach it through.
struct Memory {
    store: MemoryBackend,
    client: fn(MemoryBackend) -> Arc<dyn LockBackend>,
}

impl Harness for Memory {
    fn backend(&self) -> Arc<dyn LockBackend> {
        (self.client)(self.store.clone())
    }

    fn now_ms(&self) -> i64 {
        self.store.server_time()
    }

    fn age(&self, key: &str, past_expiry_ms: i64) {
        assert!(self.store.age(key, past_expiry_ms).unwrap(), "there is no row to age");
    }

    fn has_row(&self, key: &str) -> bool {
        self.store.has_row(key)
    }

    fn remove_row(&self, key: &str) {
        self.store.remove(key).unwrap();
    }

    fn counter(&self, key: &str) -> Option<u64> {
        self.store.counter(key)
    }

    fn set_counter(&self, key: &str, value: u64) {
        self.store.set_counter(key, value).unwrap();
    }

    fn with_storage_limit(&self, bytes: usize) -> Option<Box<dyn Harness>> {
        Some(Box::new(Self { store: self.store.clone().with_storage_limit(bytes), client: self.client }))
    }
}

fn bare(store: MemoryBackend) -> Arc<dyn LockBackend> {
    Arc::new(store)
}

/// With a callback that does its worst.
fn watched(store: MemoryBackend) -> Arc<dyn LockBackend> {
    let options = TelemetryOptions::new(|event| {
        // Resumed, not raised: the panic is as real, without a line on the screen for each event.
        std::panic::resume_unwind(Box::new(event.clone()));
    });
    Arc::new(with_telemetry(store, options.include_raw(true).queue_capacity(3)))
}

mod manual_time {
    use super::{Memory, bare};
    syncguard_contract::contract_tests!(Memory { store: syncguard::MemoryBackend::manual(), client: bare });
}

mod system_time {
    use super::{Memory, bare};
    syncguard_contract::contract_tests!(Memory { store: syncguard::MemoryBackend::new(), client: bare });
}

mod under_telemetry {
    use super::{Memory, watched};
    syncguard_contract::contract_tests!(Memory {
        store: syncguard::MemoryBackend::manual(),
        client: watched
    });
}

/// A suite that cannot fail proves nothing: some backends that break the contract are caught.
mod the_suite_notices {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::time::Duration;

    use super::{Arc, Harness, LockBackend, Memory, MemoryBackend, bare};
    use syncguard::backend::Lookup;
    use syncguard::backend::{ExtendOutcome, ReleaseOutcome};
    use syncguard::{AcquireResult, CancelToken, Capabilities, LockInfo, LockInfoRaw, Result};
    use syncguard_contract::CASES;

    /// A backend with one fault in it.
    struct Broken {
        inner: MemoryBackend,
        fault: Fault,
    }

    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Fault {
        ReleasesAnything,
        ExtendsAnything,
        IgnoresTokens,
        NeverLocked,
    }

    impl LockBackend for Broken {
        fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult> {
            let never = CancelToken::never();
            self.inner.acquire(key, ttl, if self.fault == Fault::IgnoresTokens { &never } else { cancel })
        }

        fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome> {
            let outcome = self.inner.release(lock_id, cancel)?;
            Ok(if self.fault == Fault::ReleasesAnything { ReleaseOutcome::Released } else { outcome })
        }

        fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome> {
            let outcome = self.inner.extend(lock_id, ttl, cancel)?;
            let expires_at_ms = self.inner.server_time();
            Ok(if self.fault == Fault::ExtendsAnything {
                ExtendOutcome::Extended { expires_at_ms }
            } else {
                outcome
            })
        }

        fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool> {
            Ok(self.inner.is_locked(key, cancel)? && self.fault != Fault::NeverLocked)
        }

        fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>> {
            self.inner.lookup(what, cancel)
        }

        fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoRaw>> {
            self.inner.lookup_raw(what, cancel)
        }

        fn capabilities(&self) -> Capabilities {
            self.inner.capabilities()
        }
    }

    fn failures(fault: fn(MemoryBackend) -> Arc<dyn LockBackend>) -> Vec<&'static str> {
        let harness: &dyn Harness = &Memory { store: MemoryBackend::manual(), client: fault };
        CASES
            .iter()
            .filter(|case| catch_unwind(AssertUnwindSafe(|| case.run(harness))).is_err())
            .map(syncguard_contract::Case::name)
            .collect()
    }

    #[test]
    fn broken_backends() {
        assert_eq!(failures(bare), [""; 0]);
        let releases = failures(|inner| Arc::new(Broken { inner, fault: Fault::ReleasesAnything }));
        assert!(releases.contains(&"release_works_once"), "{releases:?}");
        let extends = failures(|inner| Arc::new(Broken { inner, fault: Fault::ExtendsAnything }));
        assert!(extends.contains(&"extend_revives_and_creates_nothing"), "{extends:?}");
        let tokens = failures(|inner| Arc::new(Broken { inner, fault: Fault::IgnoresTokens }));
        assert!(tokens.contains(&"a_fired_token_aborts_each_operation_without_effect"), "{tokens:?}");
        let locked = failures(|inner| Arc::new(Broken { inner, fault: Fault::NeverLocked }));
        assert!(locked.contains(&"is_locked_follows_the_lease"), "{locked:?}");
    }
}
