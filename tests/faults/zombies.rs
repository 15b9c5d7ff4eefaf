//! The bytes of a connection that its client has given up arrive late: what they do then must not
//! contradict what anybody was told meanwhile.

use std::time::Duration;

use syncguard::{CancelToken, ExtendResult, Heartbeat, LockOptions};

use crate::support::{Action, LIMIT, wait_until};
use crate::truth::Bench;

const TTL: Duration = Duration::from_secs(30);

/// Lets the held-back query arrive, and waits until the server has answered it or had hung up.
fn walk(bench: &Bench) {
    bench.proxy.open_gate();
    wait_until(LIMIT, "the late query is over", || bench.proxy.zombies_over() >= bench.proxy.count());
}

#[test]
fn a_late_acquire_does_not_come_back_after_its_release() {
    for (token, message) in [(None, "EXECUTE sg_acquire"), (Some(CancelToken::new()), "EXECUTE sg_grant")] {
        let mut bench = Bench::new(Duration::from_secs(5));
        bench.client.is_locked("warm").unwrap();
        bench.proxy.once(message, Action::Zombie(None));
        let client = token.map_or_else(|| bench.client.clone(), |token| bench.client.cancellable(&token));
        let granted = client.acquire("k", TTL).unwrap().acquired().expect("nobody else is there");
        client.release(&granted.lock_id).unwrap();
        walk(&bench);
        assert_eq!(bench.row("k"), None, "{message}");
        assert_eq!(bench.counter("k"), 1, "{message}");
    }
}

#[test]
fn a_late_extend_does_not_cut_short_what_a_later_one_was_told() {
    let mut bench = Bench::new(Duration::from_secs(5));
    let options = LockOptions::new().ttl(TTL).heartbeat(Heartbeat::Off);
    let guard = bench.client.lock_with("k", &options).unwrap();
    bench.proxy.once("EXECUTE sg_extend", Action::Zombie(None));
    assert!(matches!(guard.extend(Duration::from_secs(1)), Ok(ExtendResult::Extended { .. })));
    let Ok(ExtendResult::Extended { expires_at_ms }) = guard.extend(TTL) else { panic!("it is held") };
    walk(&bench);
    let trusted = guard.remaining();
    let (_, in_the_row, _) = bench.row("k").expect("it is held");
    assert!(
        in_the_row >= expires_at_ms,
        "the holder trusts the lease for {trusted:?}, and it ends {} ms before what it was told",
        expires_at_ms - in_the_row
    );
}

#[test]
fn a_late_renewal_does_not_cut_short_what_a_later_extend_was_told() {
    let mut bench = Bench::new(Duration::from_secs(5));
    let options = LockOptions::new()
        .ttl(Duration::from_secs(2))
        .heartbeat(Heartbeat::Every(Duration::from_millis(100)));
    let guard = bench.client.lock_with("k", &options).unwrap();
    bench.proxy.once("EXECUTE sg_renew", Action::Zombie(None));
    let first = guard.expires_at_ms();
    // A later renewal was confirmed, so the lost one has been given up.
    wait_until(LIMIT, "it is renewed", || bench.proxy.count() == 1 && guard.expires_at_ms() > first + 500);
    let Ok(ExtendResult::Extended { .. }) = guard.extend(TTL) else { panic!("it is held") };
    let told = guard.expires_at_ms();
    walk(&bench);
    let (_, in_the_row, _) = bench.row("k").expect("it is held");
    assert!(in_the_row >= told, "the lease ends {} ms before what the holder was told", told - in_the_row);
    drop(guard);
}

#[test]
fn a_late_release_finds_nothing() {
    let mut bench = Bench::new(Duration::from_secs(5));
    let granted = bench.client.acquire("k", TTL).unwrap().acquired().unwrap();
    bench.proxy.once("EXECUTE sg_release", Action::Zombie(None));
    bench.client.release(&granted.lock_id).unwrap();
    let next = bench.client.acquire("k", TTL).unwrap().acquired().expect("it was released");
    walk(&bench);
    assert_eq!(bench.row("k").map(|row| row.0), Some(next.lock_id));
}

/// The same for messages of the driver's own protocol.
#[test]
fn late_calls_of_statements_that_are_called_often_change_nothing() {
    let mut bench = Bench::new(Duration::from_secs(5));
    bench.settle();
    bench.once_bound("EXECUTE sg_acquire", Action::Zombie(None));
    let first = bench.client.acquire("k", TTL).unwrap().acquired().expect("nobody else is there");
    bench.client.release(&first.lock_id).unwrap();

    bench.settle();
    let second = bench.client.acquire("k", TTL).unwrap().acquired().expect("it was released");
    bench.once_bound("EXECUTE sg_extend", Action::Zombie(None));
    let _ = bench.client.extend(&second.lock_id, Duration::from_secs(1)).unwrap();
    let told = bench.client.extend(&second.lock_id, TTL).unwrap();
    let ExtendResult::Extended { expires_at_ms } = told else { panic!("it is held") };
    assert_eq!(bench.proxy.count(), 2, "both calls were held back");
    walk(&bench);
    let (id, in_the_row, _) = bench.row("k").expect("it is held");
    assert_eq!((id, bench.counter("k")), (second.lock_id, 2));
    assert!(in_the_row >= expires_at_ms, "the lease ends {} ms too early", expires_at_ms - in_the_row);
}
