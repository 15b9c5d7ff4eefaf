//! Several keys at once, over the memory backend: all or none, waited for, renewed and lost together.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use syncguard::backend::{ExtendOutcome, ReleaseOutcome};
use syncguard::memory::{Call, Fault, Loss};
use syncguard::{
    AcquireResult, Backoff, CancelToken, Capabilities, ClientSettings, ErrorCode, ExtendResult, LockBackend,
    LockClient, LockInfo, LockInfoRaw, LockOptions, Lookup, LostReason, MemoryBackend, MultiGuard,
    ReleaseResult, Result,
};

const LIMIT: Duration = Duration::from_secs(30);
const AB: [&str; 2] = ["a", "b"];

fn s(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn manual() -> (MemoryBackend, LockClient) {
    let memory = MemoryBackend::manual();
    (memory.clone(), LockClient::new(memory))
}

#[track_caller]
fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < end, "{what}");
        thread::yield_now();
    }
}

/// Waits without a limit, and asks often.
fn asking_often() -> LockOptions {
    LockOptions::new().wait_forever().backoff(Backoff::Fixed).retry_delay(Duration::from_millis(2))
}

#[test]
fn a_set_has_each_key_once_in_its_normal_form_and_in_the_order_of_bytes() {
    let (memory, client) = manual();
    let guard = client.lock_all(&["b", "caf\u{e9}", "a", "cafe\u{301}", "b"]).unwrap();
    assert_eq!(guard.keys(), ["a", "b", "caf\u{e9}"]);
    assert_eq!(memory.live_leases(), 3);
    for key in ["a", "b", "cafe\u{301}"] {
        assert_eq!(guard.fence(key).map(syncguard::Fence::get), memory.counter(key), "{key}");
    }
    assert_eq!(guard.fence("c"), None);
    assert!(guard.is_held() && guard.remaining() == s(30) && guard.lost_reason().is_none());
    assert!(!format!("{guard:?}").contains("caf"), "no key is shown");
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    assert_eq!((memory.live_leases(), memory.calls(Call::Release)), (0, 1), "in one call");
}

#[test]
fn what_is_no_set_is_refused_before_the_backend_is_asked() {
    let (memory, client) = manual();
    let many: Vec<String> = (0..65).map(|n| format!("k{n}")).collect();
    let options = LockOptions::new();
    let refused = |keys: &[&str], options: &LockOptions| {
        let errors = [
            client.lock_all_with(keys, options).unwrap_err(),
            client.try_lock_all_with(keys, options).unwrap_err(),
        ];
        assert!(errors.iter().all(|error| error.code() == ErrorCode::InvalidArgument), "{errors:?}");
    };
    refused(&[], &options);
    refused(&many.iter().map(String::as_str).collect::<Vec<_>>(), &options);
    refused(&["a", ""], &options);
    refused(&["a", &"x".repeat(513)], &options);
    refused(&["a", "nul\0"], &options);
    refused(&AB, &LockOptions::new().ttl(Duration::ZERO));
    assert_eq!((memory.calls(Call::Acquire), memory.rows()), (0, 0));
    // 64, though named twice.
    let twice: Vec<&String> = many[..64].iter().chain(&many[..64]).collect();
    let guard = client.lock_all(&twice.iter().map(|key| key.as_str()).collect::<Vec<_>>()).unwrap();
    assert_eq!((guard.keys().len(), memory.calls(Call::Acquire)), (64, 1), "all in one call");
}

#[test]
fn one_held_key_keeps_the_whole_set_and_nothing_is_held_meanwhile() {
    let (memory, client) = manual();
    let _theirs = memory.contend("b").unwrap();
    assert!(client.try_lock_all(&AB).unwrap().is_none());
    let options = LockOptions::new().max_retries(2).retry_delay(Duration::ZERO);
    let error = client.lock_all_with(&AB, &options).unwrap_err();
    assert_eq!((error.code(), error.key()), (ErrorCode::AcquisitionTimeout, Some("b")));
    assert!(error.to_string().contains("the keys, all at once"), "{error}");
    assert!(error.to_string().contains("it is held under fencing token 1; "), "{error}");
    assert_eq!((memory.has_row("a"), memory.counter("a"), memory.rows()), (false, None, 1));
}

#[test]
fn who_waits_for_a_set_stands_in_nobody_s_way_at_its_free_keys() {
    let memory = MemoryBackend::new();
    let client = LockClient::new(memory.clone());
    let held = client.lock("b").unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| client.lock_all_with(&AB, &asking_often()).unwrap());
        eventually("it looks at the key in its way", || memory.calls(Call::Holder) > 0);
        for _ in 0..20 {
            // One that queued behind the set would wait for "b", too.
            let only = LockOptions::new().timeout(LIMIT);
            assert_eq!(client.lock_with("a", &only).unwrap().release().unwrap(), ReleaseResult::Released);
        }
        assert!(!waiting.is_finished());
        held.release().unwrap();
        assert_eq!(waiting.join().unwrap().keys(), AB);
    });
}

/// Asks so rarely that only a call of this process can help.
#[test]
fn a_set_follows_from_one_key_in_its_way_to_the_next() {
    let memory = MemoryBackend::new();
    let client = LockClient::new(memory.clone());
    let guards = ["a", "b", "c"].map(|key| client.lock(key).unwrap());
    let options =
        LockOptions::new().wait_forever().retry_delay(s(3600)).wake_ups(false).backoff(Backoff::Fixed);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| client.lock_all_with(&["c", "b", "a"], &options).unwrap());
        eventually("its first attempt is refused", || memory.calls(Call::Acquire) == 4);
        for (n, guard) in guards.into_iter().enumerate() {
            assert!(!waiting.is_finished());
            guard.release().unwrap();
            eventually("it has asked again", || memory.calls(Call::Acquire) == 5 + n as u64);
        }
        assert!(waiting.join().unwrap().is_held());
    });
}

#[test]
fn a_wait_for_a_set_ends_with_its_token_its_time_and_its_client() {
    for n in 0..3 {
        let memory = MemoryBackend::new();
        let client = LockClient::new(memory.clone());
        let _theirs = memory.contend("b").unwrap();
        let token = CancelToken::new();
        let mut options =
            LockOptions::new().wait_forever().retry_delay(s(3600)).wake_ups(false).cancel(&token);
        if n == 2 {
            options = options.timeout(Duration::from_millis(30));
        }
        let error = thread::scope(|scope| {
            let waiting = scope.spawn(|| client.lock_all_with(&AB, &options).unwrap_err());
            eventually("its attempt is refused", || memory.calls(Call::Acquire) == 1);
            match n {
                0 => token.cancel(),
                1 => drop(client.close(LIMIT).unwrap()),
                _ => {}
            }
            waiting.join().unwrap()
        });
        let expected = if n == 2 { ErrorCode::AcquisitionTimeout } else { ErrorCode::Aborted };
        assert_eq!(error.code(), expected, "{error}");
        assert!(!memory.has_row("a"));
    }
}

#[test]
fn all_leases_of_a_set_are_renewed_in_one_call() {
    let (memory, client) = manual();
    let keys: Vec<String> = (0..64).map(|n| format!("k{n}")).collect();
    let guard = client.lock_all(&keys).unwrap();
    for renewals in 1..=6 {
        memory.advance(s(10));
        assert!(memory.wait_for_answers(Call::Renew, renewals, LIMIT));
        eventually("its deadline has moved", || guard.remaining() == s(30));
    }
    assert_eq!(memory.calls(Call::Renew), 6);
    assert!(guard.is_held());
}

/// A guard whose callback counts, and its count.
fn watched(client: &LockClient, options: LockOptions) -> (MultiGuard, Arc<Mutex<Vec<LostReason>>>) {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let note = Arc::clone(&heard);
    let options = options.on_lost(move |reason| note.lock().unwrap().push(reason));
    (client.lock_all_with(&["a", "b", "c"], &options).unwrap(), heard)
}

#[test]
fn a_set_is_lost_as_soon_as_one_key_is_and_the_others_are_let_go() {
    for (loss, reason) in [(Loss::RowMissing, LostReason::RowMissing), (Loss::Expired, LostReason::Expired)] {
        let (memory, client) = manual();
        let (guard, heard) = watched(&client, LockOptions::new());
        memory.lose_on_next_renewal("b", loss).unwrap();
        memory.advance(s(10));
        assert!(guard.lost().wait_timeout(LIMIT));
        assert!(!guard.is_held() && guard.remaining().is_zero());
        assert_eq!(guard.lost_reason(), Some(reason));
        eventually("the others are let go", || memory.live_leases() == 0);
        assert!(client.try_lock_all(&["a", "c"]).unwrap().is_some(), "while the lost guard is still there");
        assert_eq!(guard.extend(s(60)).unwrap(), ExtendResult::NotHeld);
        assert_eq!(guard.release().unwrap(), ReleaseResult::NotHeld);
        assert!(client.close(LIMIT).unwrap().is_clean());
        assert_eq!(*heard.lock().unwrap(), [reason], "told once");
    }
}

#[test]
fn a_key_that_is_taken_over_loses_the_set_and_stays_with_its_new_holder() {
    let (memory, client) = manual();
    let (guard, _) = watched(&client, LockOptions::new());
    let theirs = memory.take_over("b").unwrap();
    memory.advance(s(10));
    assert!(guard.lost().wait_timeout(LIMIT));
    assert_eq!(guard.lost_reason(), Some(LostReason::TakenOver { fence: theirs.fence }));
    eventually("the others are let go", || memory.live_leases() == 1);
    drop(guard);
    assert!(client.owns(&theirs.lock_id).unwrap());
}

#[test]
fn a_set_is_lost_at_its_deadline_without_an_answer_and_let_go_when_the_backend_is_back() {
    let (memory, client) = manual();
    let (guard, heard) = watched(&client, LockOptions::new());
    memory.fail_all(ErrorCode::ServiceUnavailable);
    memory.advance(s(29));
    assert!(guard.is_held());
    memory.advance(s(1));
    assert!(!guard.is_held() && guard.lost().is_cancelled(), "by the clock alone");
    let reason = guard.lost_reason().unwrap();
    memory.heal();
    eventually("all are let go", || {
        memory.advance(Duration::from_millis(100));
        memory.live_leases() == 0
    });
    assert!(client.close(LIMIT).unwrap().is_clean());
    assert_eq!(*heard.lock().unwrap(), [reason]);
}

#[test]
fn max_hold_and_close_end_a_set_as_a_whole() {
    let (memory, client) = manual();
    let (guard, heard) = watched(&client, LockOptions::new().max_hold(s(5)));
    memory.advance(s(5));
    assert_eq!(guard.lost_reason(), Some(LostReason::MaxHold));
    eventually("all are let go", || memory.live_leases() == 0);
    let (other, closed) = watched(&client, LockOptions::new());
    let report = client.close(LIMIT).unwrap();
    assert!(report.is_clean() && memory.live_leases() == 0, "{report:?}");
    assert_eq!((other.is_held(), other.lost_reason()), (false, Some(LostReason::Closed)));
    assert_eq!(*heard.lock().unwrap(), [LostReason::MaxHold]);
    assert_eq!(*closed.lock().unwrap(), [LostReason::Closed]);
}

#[test]
fn an_extend_moves_all_leases_in_one_call_and_a_busy_one_by_itself() {
    let (memory, client) = manual();
    let (guard, _) = watched(&client, LockOptions::new());
    assert!(matches!(guard.extend(s(100)).unwrap(), ExtendResult::Extended { .. }));
    assert_eq!((guard.remaining(), memory.calls(Call::Renew), memory.calls(Call::Extend)), (s(100), 1, 0));
    assert!(matches!(guard.extend(s(20)).unwrap(), ExtendResult::Extended { .. }));
    assert_eq!(guard.remaining(), s(20), "shortened, too");
    memory.lose_on_next_renewal("c", Loss::Busy).unwrap();
    assert!(matches!(guard.extend(s(50)).unwrap(), ExtendResult::Extended { .. }));
    assert_eq!((guard.remaining(), memory.calls(Call::Extend)), (s(50), 1));
    assert_eq!(guard.extend(Duration::ZERO).unwrap_err().code(), ErrorCode::InvalidArgument);
    memory.remove("b").unwrap();
    assert_eq!(guard.extend(s(50)).unwrap(), ExtendResult::NotHeld);
    assert_eq!(guard.lost_reason(), Some(LostReason::RowMissing));
    eventually("the others are let go", || memory.live_leases() == 0);
}

#[test]
fn an_extend_that_fails_is_an_error_and_the_guard_trusts_the_earlier_end() {
    let (memory, client) = manual();
    let (guard, _) = watched(&client, LockOptions::new());
    memory.fail_next(Call::Renew, ErrorCode::ServiceUnavailable);
    let error = guard.extend(s(10)).unwrap_err();
    assert_eq!((error.code(), error.key()), (ErrorCode::ServiceUnavailable, Some("a")));
    assert_eq!(guard.remaining(), s(30), "nothing was changed");
    memory.fail_next(Call::Renew, Fault::lost_answer(ErrorCode::NetworkTimeout));
    assert!(guard.extend(s(10)).unwrap_err().is_outcome_unknown());
    assert_eq!(guard.remaining(), s(10));
}

#[test]
fn a_lost_answer_is_an_unknown_outcome_and_the_worker_lets_all_keys_go() {
    let (memory, client) = manual();
    memory.fail_next(Call::Acquire, Fault::lost_answer(ErrorCode::NetworkTimeout));
    let error = client.lock_all(&AB).unwrap_err();
    assert!(error.is_outcome_unknown(), "{error}");
    eventually("all of them are let go", || memory.live_leases() == 0);
    assert_eq!(memory.counter("a"), Some(1), "it was granted");
}

#[test]
fn a_release_that_fails_is_told_once_and_made_again() {
    let memory = MemoryBackend::manual();
    let told = Arc::new(Mutex::new(Vec::new()));
    let note = Arc::clone(&told);
    let settings = ClientSettings::default().on_release_error(move |error, context| {
        note.lock().unwrap().push((error.code(), context.key.clone()));
    });
    let client = LockClient::with_settings(Arc::new(memory.clone()), settings);
    let guard = client.lock_all(&AB).unwrap();
    memory.fail_next(Call::Release, ErrorCode::ServiceUnavailable);
    drop(guard);
    eventually("the worker lets go", || memory.live_leases() == 0);
    assert_eq!(*told.lock().unwrap(), [(ErrorCode::ServiceUnavailable, "a".to_owned())]);

    let guard = client.lock_all(&AB).unwrap();
    memory.fail_next(Call::Release, ErrorCode::ServiceUnavailable);
    let error = guard.release().unwrap_err();
    assert_eq!((error.code(), error.key()), (ErrorCode::ServiceUnavailable, Some("a")));
    eventually("the worker lets go", || memory.live_leases() == 0);
    assert!(client.close(LIMIT).unwrap().is_clean());
    assert_eq!(told.lock().unwrap().len(), 1, "an error that was returned is not told");
}

#[test]
fn min_hold_keeps_all_keys_to_its_end() {
    let (memory, client) = manual();
    let options = LockOptions::new().min_hold(s(40));
    let guard = client.lock_all_with(&AB, &options).unwrap();
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    memory.advance(s(39));
    assert_eq!(memory.live_leases(), 2);
    memory.advance(s(1));
    eventually("they are let go", || memory.live_leases() == 0);
}

#[test]
fn a_panic_and_a_closed_client_leave_nothing_held() {
    let (memory, client) = manual();
    let panic = std::panic::catch_unwind(|| {
        let _guard = client.lock_all(&AB).unwrap();
        panic!("the work failed");
    });
    assert!(panic.is_err());
    eventually("the worker lets go", || memory.live_leases() == 0);
    client.close(LIMIT).unwrap();
    assert_eq!(client.lock_all(&AB).unwrap_err().code(), ErrorCode::Aborted);
}

/// A backend with the operations of every SyncGuard client, and no more.
struct Plain(MemoryBackend);

impl LockBackend for Plain {
    fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult> {
        self.0.acquire(key, ttl, cancel)
    }
    fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome> {
        self.0.release(lock_id, cancel)
    }
    fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome> {
        self.0.extend(lock_id, ttl, cancel)
    }
    fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool> {
        self.0.is_locked(key, cancel)
    }
    fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>> {
        self.0.lookup(what, cancel)
    }
    fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoRaw>> {
        self.0.lookup_raw(what, cancel)
    }
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
}

#[test]
fn a_backend_that_knows_no_sets_takes_sets_of_one_key() {
    let memory = MemoryBackend::new();
    let client = LockClient::new(Plain(memory.clone()));
    let error = client.lock_all(&AB).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    assert_eq!(memory.rows(), 0);
    let guard = client.lock_all(&["a", "a"]).unwrap();
    assert_eq!((guard.keys(), memory.live_leases()), (vec!["a"], 1));
    assert!(matches!(guard.extend(s(60)).unwrap(), ExtendResult::Extended { .. }));
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    assert_eq!(memory.rows(), 0);
}
