//! The memory backend's own powers: time, faults, losses, and calls that hang.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::sync::Mutex;
use std::time::Duration;

use syncguard::backend::{Attempt, LockBackend, Lookup, Renewal};
use syncguard::backend::{ExtendOutcome, ReleaseOutcome, RenewOutcome, TimeAuthority};
use syncguard::memory::{Call, Fault, Loss};
use syncguard::{AcquireResult, CancelToken, Capabilities, ErrorCode, LostReason, MemoryBackend};

const TTL: Duration = Duration::from_secs(30);
const LIMIT: Duration = Duration::from_secs(30);
const ID: &str = "AAAAAAAAAAAAAAAAAAAAAA";

fn never() -> CancelToken {
    CancelToken::never()
}

fn acquire(backend: &MemoryBackend, key: &str) -> String {
    backend.acquire(key, TTL, &never()).unwrap().acquired().expect("the key is free").lock_id
}

fn renew(backend: &MemoryBackend, key: &str, lock_id: &str) -> syncguard::Result<RenewOutcome> {
    let deadline = backend.clock().now().after(backend.operation_timeout());
    backend.renew(&[Renewal::new(key, lock_id, syncguard::Fence::new(1).unwrap(), TTL)], deadline).remove(0)
}

#[test]
fn expiry_is_the_moved_clock_plus_the_ttl_exactly() {
    let backend = MemoryBackend::manual();
    backend.set_server_time(1_000_000);
    let ttl = Duration::from_secs(5);
    let grant = backend.acquire("k", ttl, &never()).unwrap().acquired().unwrap();
    assert_eq!(grant.expires_at_ms, 1_005_000);
    backend.advance(Duration::from_millis(2500));
    let extended = backend.extend(&grant.lock_id, ttl, &never()).unwrap();
    assert_eq!(extended, ExtendOutcome::Extended { expires_at_ms: 1_007_500 });
}

#[test]
fn the_tolerance_ends_to_the_millisecond() {
    for (waited, live) in [(30_000, true), (30_999, true), (31_000, false)] {
        let backend = MemoryBackend::manual();
        let id = acquire(&backend, "k");
        backend.advance(Duration::from_millis(waited));
        assert_eq!(backend.is_locked("k", &never()).unwrap(), live);
        assert_eq!(backend.lookup(Lookup::LockId(&id), &never()).unwrap().is_some(), live);
        assert_eq!(backend.live_leases(), usize::from(live));
        assert_eq!(backend.clone().acquire("k", TTL, &never()).unwrap() == AcquireResult::Locked, live);
        assert_eq!(backend.release(&id, &never()).unwrap() == ReleaseOutcome::Released, live);
    }
}

#[test]
fn both_clocks_advance_together_and_the_servers_also_alone() {
    let backend = MemoryBackend::manual();
    let (server, local) = (backend.server_time(), backend.clock().now());
    backend.advance(Duration::from_secs(7));
    assert_eq!(backend.server_time() - server, 7000);
    assert_eq!(backend.clock().now().since(local), Duration::from_secs(7));
    backend.shift_server_clock(-60_000);
    assert_eq!(backend.server_time() - server, -53_000);
    assert_eq!(backend.clock().now().since(local), Duration::from_secs(7));
}

#[test]
fn fences_grow_even_when_the_servers_clock_goes_back() {
    let backend = MemoryBackend::manual();
    let id = acquire(&backend, "k");
    backend.shift_server_clock(-3_600_000);
    assert!(backend.is_locked("k", &never()).unwrap(), "the lease only seems longer");
    let _ = backend.release(&id, &never()).unwrap();
    let next = backend.acquire("k", TTL, &never()).unwrap();
    assert_eq!(next.fence().unwrap().get(), 2);
}

#[test]
fn the_time_authority_is_the_shared_clock_or_the_clients_own() {
    let manual = Capabilities::fencing("memory", TimeAuthority::Server);
    assert_eq!(MemoryBackend::manual().capabilities(), manual);
    assert_eq!(MemoryBackend::new().capabilities().time_authority, TimeAuthority::Client);
}

#[test]
fn a_holder_can_lose_its_lease_in_each_way() {
    for (loss, expected) in [
        (Loss::Expired, Some(LostReason::Expired)),
        (Loss::RowMissing, Some(LostReason::RowMissing)),
        (Loss::TakenOver, None),
    ] {
        let backend = MemoryBackend::manual();
        backend.lose_on_next_renewal("k", loss).unwrap();
        let id = acquire(&backend, "k");
        assert!(backend.is_locked("k", &never()).unwrap(), "not before the renewal");
        let outcome = renew(&backend, "k", &id).unwrap();
        let taken = backend.lookup(Lookup::Key("k"), &never()).unwrap();
        let expected = expected.unwrap_or_else(|| LostReason::TakenOver { fence: taken.unwrap().fence });
        assert_eq!(outcome, RenewOutcome::Lost(expected));
        assert_ne!(backend.release(&id, &never()).unwrap(), ReleaseOutcome::Released);

        backend.advance(TTL * 20);
        let id = acquire(&backend, "k");
        backend.lose_on_next_renewal("k", loss).unwrap();
        assert!(matches!(backend.extend(&id, TTL, &never()).unwrap(), ExtendOutcome::NotHeld(_)));
    }
}

#[test]
fn a_busy_row_is_not_lost() {
    let backend = MemoryBackend::manual();
    let id = acquire(&backend, "k");
    backend.lose_on_next_renewal("k", Loss::Busy).unwrap();
    assert!(matches!(backend.extend(&id, TTL, &never()).unwrap(), ExtendOutcome::Extended { .. }));
    assert_eq!(renew(&backend, "k", &id).unwrap(), RenewOutcome::Busy);
    assert!(matches!(renew(&backend, "k", &id).unwrap(), RenewOutcome::Renewed { .. }));
}

#[test]
fn other_holders_come_and_take_over_at_the_tests_word() {
    let backend = MemoryBackend::manual();
    let theirs = backend.contend("k").unwrap().acquired().unwrap();
    assert_eq!(backend.contend("k").unwrap(), AcquireResult::Locked);
    assert_eq!(backend.acquire("k", TTL, &never()).unwrap(), AcquireResult::Locked);
    let _ = backend.release(&theirs.lock_id, &never()).unwrap();

    let id = acquire(&backend, "k");
    let newer = backend.take_over("k").unwrap();
    assert_eq!(newer.fence.get(), 3);
    let lost = RenewOutcome::Lost(LostReason::TakenOver { fence: newer.fence });
    assert_eq!(renew(&backend, "k", &id).unwrap(), lost);

    assert!(backend.expire("k").unwrap() && !backend.is_locked("k", &never()).unwrap());
    assert!(backend.has_row("k") && backend.remove("k").unwrap() && !backend.has_row("k"));
    assert!(!backend.remove("k").unwrap() && !backend.expire("k").unwrap());
}

#[test]
fn faults_hit_the_calls_they_were_ordered_for() {
    let backend = MemoryBackend::manual();
    backend.fail_next(Call::Acquire, ErrorCode::RateLimited);
    backend.fail_next(Call::Acquire, ErrorCode::AuthFailed);
    backend.fail_every(Call::Extend, ErrorCode::ServiceUnavailable);
    let code = || backend.acquire("k", TTL, &never()).unwrap_err();
    let first = code();
    assert_eq!(
        (first.code(), first.key(), first.is_outcome_unknown()),
        (ErrorCode::RateLimited, Some("k"), false)
    );
    assert_eq!(code().code(), ErrorCode::AuthFailed);
    let id = acquire(&backend, "k");
    for _ in 0..3 {
        let error = backend.extend(&id, TTL, &never()).unwrap_err();
        assert_eq!((error.code(), error.lock_id()), (ErrorCode::ServiceUnavailable, Some(id.as_str())));
    }
    assert!(renew(&backend, "k", &id).is_ok(), "a renewal is another call");
    backend.heal();
    assert!(backend.extend(&id, TTL, &never()).is_ok());
    assert_eq!(
        (backend.calls(Call::Acquire), backend.calls(Call::Extend), backend.calls(Call::Renew)),
        (3, 4, 1)
    );

    backend.fail_all(ErrorCode::ServiceUnavailable);
    assert!(backend.is_locked("k", &never()).is_err() && renew(&backend, "k", &id).is_err());
}

#[test]
fn a_lost_answer_leaves_the_work_done_and_a_lost_request_does_not() {
    let backend = MemoryBackend::manual();
    let attempt =
        |id| backend.attempt(&Attempt::new("k", id, TTL, syncguard::backend::Moment::NEVER), &never());
    backend.fail_next(Call::Acquire, Fault::lost_request(ErrorCode::NetworkTimeout));
    let error = attempt(ID).unwrap_err();
    assert_eq!(error.may_be_held_for(), Some(TTL + Duration::from_secs(1)));
    assert_eq!((backend.rows(), backend.counter("k")), (0, None));

    backend.fail_next(Call::Acquire, Fault::lost_answer(ErrorCode::NetworkTimeout));
    let error = attempt(ID).unwrap_err();
    assert_eq!((error.is_outcome_unknown(), error.lock_id()), (true, Some(ID)));
    assert_eq!(attempt(ID).unwrap().fence().unwrap().get(), 1, "the same attempt finds its grant");

    backend.advance(Duration::from_secs(10));
    backend.fail_next(Call::Release, Fault::lost_answer(ErrorCode::NetworkTimeout));
    let error = backend.release(ID, &never()).unwrap_err();
    assert_eq!(error.may_be_held_for(), Some(Duration::from_secs(21)), "the rest of the lease");
    assert!(!backend.is_locked("k", &never()).unwrap());
    backend.fail_next(Call::Lookup, Fault::lost_answer(ErrorCode::NetworkTimeout));
    assert!(
        !backend.lookup(Lookup::Key("k"), &never()).unwrap_err().is_outcome_unknown(),
        "reading is harmless"
    );
}

#[test]
fn a_call_that_hangs_goes_on_when_the_gate_opens() {
    let backend = MemoryBackend::manual();
    let gate = backend.hang_next(Call::Acquire);
    std::thread::scope(|scope| {
        let hung = scope.spawn(|| backend.acquire("k", TTL, &never()).unwrap());
        assert!(gate.wait_for_calls(1, LIMIT));
        assert_eq!((gate.inside(), backend.rows()), (1, 0));
        let _other = acquire(&backend, "k");
        gate.open();
        assert_eq!(hung.join().unwrap(), AcquireResult::Locked, "it is decided after the wait");
    });
    assert!(backend.wait_for_answers(Call::Acquire, 2, LIMIT));
    assert!(!backend.wait_for_answers(Call::Acquire, 3, Duration::from_millis(1)));
}

#[test]
fn a_call_that_hangs_ends_with_its_token() {
    for backend in [MemoryBackend::manual(), MemoryBackend::new()] {
        let backend = backend.with_operation_timeout(LIMIT * 100);
        let gate = backend.hang_every(Call::Acquire);
        let token = CancelToken::new();
        std::thread::scope(|scope| {
            let hung = scope.spawn(|| backend.acquire("k", TTL, &token).unwrap_err().code());
            assert!(gate.wait_for_calls(1, LIMIT));
            token.cancel();
            assert_eq!(hung.join().unwrap(), ErrorCode::Aborted);
        });
        assert_eq!((gate.inside(), backend.rows()), (0, 0));
        drop(gate);
        assert!(backend.acquire("k", TTL, &never()).is_ok(), "a dropped gate is open");
    }
}

#[test]
fn a_call_that_hangs_ends_with_its_deadline() {
    let backend = MemoryBackend::manual().with_operation_timeout(Duration::from_secs(3));
    let id = acquire(&backend, "k");
    let gate = backend.hang_every(Call::Renew);
    std::thread::scope(|scope| {
        let hung = scope.spawn(|| renew(&backend, "k", &id).unwrap_err());
        assert!(gate.wait_for_calls(1, LIMIT));
        backend.advance(Duration::from_millis(2999));
        assert_eq!(gate.inside(), 1);
        backend.advance(Duration::from_millis(1));
        let error = hung.join().unwrap();
        assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::NetworkTimeout, false));
    });
    let real = MemoryBackend::new().with_operation_timeout(Duration::from_millis(20));
    let _gate = real.hang_next(Call::IsLocked);
    assert_eq!(real.is_locked("k", &never()).unwrap_err().code(), ErrorCode::NetworkTimeout);
}

#[test]
fn an_answer_that_hangs_comes_too_late_for_a_token_and_leaves_the_outcome_unknown() {
    let backend = MemoryBackend::manual();
    let gate = backend.hang_answer_of_next(Call::Acquire);
    let token = CancelToken::new();
    std::thread::scope(|scope| {
        let hung = scope.spawn(|| backend.acquire("k", TTL, &token).unwrap_err());
        assert!(gate.wait_for_calls(1, LIMIT));
        assert_eq!(backend.live_leases(), 1, "the work is done");
        token.cancel();
        backend.advance(backend.operation_timeout());
        let error = hung.join().unwrap();
        assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::NetworkTimeout, true));
        assert_eq!(backend.release(error.lock_id().unwrap(), &never()).unwrap(), ReleaseOutcome::Released);
    });

    let gate = backend.hang_answer_of_next(Call::IsLocked);
    let token = CancelToken::new();
    std::thread::scope(|scope| {
        let hung = scope.spawn(|| backend.is_locked("k", &token).unwrap_err().code());
        assert!(gate.wait_for_calls(1, LIMIT));
        token.cancel();
        assert_eq!(hung.join().unwrap(), ErrorCode::Aborted, "a read may be given up");
    });
}

#[test]
fn many_threads_may_hang_and_be_freed_at_once() {
    let backend = MemoryBackend::manual();
    let gate = backend.hang_every(Call::Acquire);
    std::thread::scope(|scope| {
        let hung: Vec<_> = (0..16)
            .map(|_| scope.spawn(|| backend.acquire("k", TTL, &never()).unwrap().acquired()))
            .collect();
        assert!(gate.wait_for_calls(16, LIMIT));
        gate.open();
        let grants = hung.into_iter().filter_map(|thread| thread.join().unwrap()).count();
        assert_eq!(grants, 1);
    });
}

/// Keeps what is logged.
struct Lines(Mutex<Vec<String>>);

static LINES: Lines = Lines(Mutex::new(Vec::new()));

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        self.0.lock().unwrap().push(format!("{} {}", record.level(), record.args()));
    }

    fn flush(&self) {}
}

#[test]
fn a_counter_near_its_limit_is_warned_of_without_the_key() {
    log::set_logger(&LINES).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let lines = |counter: u64| {
        let backend = MemoryBackend::manual();
        backend.set_counter("MARKER", counter).unwrap();
        let id = acquire(&backend, "MARKER");
        let _ = backend.extend(&id, TTL, &never()).unwrap();
        let _ = backend.acquire("MARKER", TTL, &never()).unwrap();
        LINES.0.lock().unwrap().drain(..).collect::<Vec<_>>()
    };
    assert_eq!(lines(syncguard::FENCE_WARN - 1), [""; 0]);
    let warned = lines(syncguard::FENCE_WARN);
    assert_eq!(warned.len(), 1, "once per grant: {warned:?}");
    assert!(
        warned[0].starts_with("WARN") && warned[0].contains(&syncguard::hash_key("MARKER")),
        "{warned:?}"
    );
    assert!(!warned[0].contains("MARKER"), "{warned:?}");
}

#[test]
fn a_closed_backend_still_serves_its_other_clients() {
    let backend = MemoryBackend::manual();
    let other = backend.clone();
    let id = acquire(&backend, "k");
    backend.close();
    assert_eq!(other.closes(), 1);
    assert_eq!(other.release(&id, &never()).unwrap(), ReleaseOutcome::Released);
}

#[test]
fn debug_output_shows_no_keys() {
    let backend = MemoryBackend::manual();
    let id = acquire(&backend, "MARKER");
    backend.fail_next(Call::Acquire, ErrorCode::Internal);
    let error = backend.acquire("MARKER", TTL, &never()).unwrap_err();
    for text in [format!("{backend:?}"), format!("{error:?} {error}")] {
        assert!(!text.contains("MARKER") && !text.contains(&id), "{text}");
    }
}
