//! Semaphores over the memory backend: what guards and waiters make of permits.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use syncguard::memory::{Call, Fault, Loss};
use syncguard::{
    ErrorCode, LockClient, LockGuard, LockOptions, LostReason, MemoryBackend, Semaphore, TelemetryOptions,
    with_telemetry,
};

const LIMIT: Duration = Duration::from_secs(10);

fn world(limit: u32) -> (MemoryBackend, LockClient, Semaphore) {
    let memory = MemoryBackend::manual();
    let client = LockClient::new(memory.clone());
    let reports = client.semaphore("reports", limit).unwrap();
    (memory, client, reports)
}

#[test]
fn a_limit_or_a_name_that_cannot_be_is_refused_at_once() {
    let client = LockClient::new(MemoryBackend::manual());
    for (name, limit) in [("reports", 0), ("reports", 1025), ("", 1), ("a\0b", 1)] {
        assert_eq!(client.semaphore(name, limit).unwrap_err().code(), ErrorCode::InvalidArgument);
    }
    let reports = client.semaphore("cafe\u{301}", 1024).unwrap();
    assert_eq!((reports.name(), reports.limit()), ("caf\u{e9}", 1024));
    assert!(!format!("{reports:?}").contains("caf"));
}

#[test]
fn a_backend_without_permits_says_so() {
    struct Plain(MemoryBackend);
    impl syncguard::LockBackend for Plain {
        fn acquire(
            &self,
            key: &str,
            ttl: Duration,
            cancel: &syncguard::CancelToken,
        ) -> syncguard::Result<syncguard::AcquireResult> {
            self.0.acquire(key, ttl, cancel)
        }
        fn release(
            &self,
            lock_id: &str,
            cancel: &syncguard::CancelToken,
        ) -> syncguard::Result<syncguard::backend::ReleaseOutcome> {
            self.0.release(lock_id, cancel)
        }
        fn extend(
            &self,
            lock_id: &str,
            ttl: Duration,
            cancel: &syncguard::CancelToken,
        ) -> syncguard::Result<syncguard::backend::ExtendOutcome> {
            self.0.extend(lock_id, ttl, cancel)
        }
        fn is_locked(&self, key: &str, cancel: &syncguard::CancelToken) -> syncguard::Result<bool> {
            self.0.is_locked(key, cancel)
        }
        fn lookup(
            &self,
            what: syncguard::Lookup<'_>,
            cancel: &syncguard::CancelToken,
        ) -> syncguard::Result<Option<syncguard::LockInfo>> {
            self.0.lookup(what, cancel)
        }
        fn capabilities(&self) -> syncguard::Capabilities {
            self.0.capabilities()
        }
    }
    let reports = LockClient::new(Plain(MemoryBackend::manual())).semaphore("reports", 3).unwrap();
    for error in
        [reports.acquire().unwrap_err(), reports.try_acquire().unwrap_err(), reports.in_use().unwrap_err()]
    {
        assert_eq!((error.code(), error.key()), (ErrorCode::InvalidArgument, Some("reports")));
        assert!(error.to_string().contains("no semaphores"), "{error}");
    }
}

#[test]
fn permits_are_renewed_and_lost_one_by_one() {
    let (memory, _client, reports) = world(2);
    let (kept, broken) = (reports.acquire().unwrap(), reports.acquire().unwrap());
    memory.lose_on_next_renewal(broken.key(), Loss::TakenOver).unwrap();
    for renewals in 1..=6 {
        memory.advance(Duration::from_secs(10));
        assert!(memory.wait_for_answers(Call::Renew, renewals, LIMIT));
    }
    assert!(broken.lost().wait_timeout(LIMIT) && kept.is_held());
    assert!(matches!(broken.lost_reason(), Some(LostReason::TakenOver { fence }) if fence > broken.fence()));
    // Its new holder has it still.
    assert!(reports.try_acquire().unwrap().is_none());
    assert!(memory.remove(broken.key()).unwrap());
    assert_eq!(reports.try_acquire().unwrap().unwrap().permit(), broken.permit());
}

#[test]
fn waiters_take_turns_and_each_permit_that_is_let_go_serves_one() {
    let (_memory, _client, reports) = world(2);
    let held = [reports.acquire().unwrap(), reports.acquire().unwrap()];
    let order = Mutex::new(Vec::new());
    let rarely = LockOptions::new().wait_forever().retry_delay(Duration::from_secs(3600)).wake_ups(false);
    thread::scope(|scope| {
        for n in 0..6 {
            let (reports, order, rarely) = (&reports, &order, &rarely);
            scope.spawn(move || {
                let permit = reports.acquire_with(rarely).unwrap();
                order.lock().unwrap().push(n);
                drop(permit);
            });
        }
        drop(held);
    });
    assert_eq!(order.into_inner().unwrap().len(), 6, "nobody waits forever");
    assert_eq!(reports.in_use().unwrap(), 0);
}

#[test]
fn a_permit_of_which_the_answer_was_lost_is_let_go_by_the_worker() {
    let (memory, _client, reports) = world(1);
    drop(reports.acquire().unwrap());
    memory.fail_next(Call::Acquire, Fault::lost_answer(ErrorCode::NetworkTimeout));
    let error = reports.try_acquire().unwrap_err();
    assert!(error.is_outcome_unknown() && error.lock_id().is_some());
    assert_eq!(error.key(), Some("reports"));
    // One release was the guard's.
    assert!(memory.wait_for_answers(Call::Release, 2, LIMIT));
    assert_eq!(reports.try_acquire().unwrap().map(|permit| permit.fence().get()), Some(3));
}

#[test]
fn a_closed_client_ends_waits_and_permits() {
    let (_memory, client, reports) = world(1);
    let held = reports.acquire().unwrap();
    assert!(client.close(LIMIT).unwrap().is_clean());
    assert_eq!(held.lost_reason(), Some(LostReason::Closed));
    assert_eq!(reports.acquire().unwrap_err().code(), ErrorCode::Aborted);
}

#[test]
fn telemetry_reports_a_permit_like_a_lock_and_without_raw_names() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&events);
    let options = TelemetryOptions::new(move |event| {
        let line = (event.operation.as_str(), event.result.as_str(), event.key_hash.clone());
        assert!(event.key.is_none() && event.lock_id.is_none());
        sink.lock().unwrap().push(line);
    });
    let backend = with_telemetry(MemoryBackend::manual(), options);
    let handle = backend.handle();
    let reports = LockClient::new(backend).semaphore("reports", 1).unwrap();
    let held: LockGuard = reports.acquire().unwrap();
    assert!(reports.try_acquire().unwrap().is_none());
    assert_eq!(reports.in_use().unwrap(), 1);
    drop(held);
    assert!(handle.flush(LIMIT));
    let hash = Some(syncguard::hash_key("reports"));
    let expected = [("acquire", "ok", hash.clone()), ("acquire", "fail", hash), ("release", "ok", None)];
    assert_eq!(*events.lock().unwrap(), expected);
}
