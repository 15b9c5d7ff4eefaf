//! How long a lock is held: heartbeats, min_hold, max_hold, leases without a guard.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::calls::{asking_often, ms};
use crate::support::leases::{self, client, row, wait_until_released};
use crate::support::{LIMIT, TTL, wait_until};
use postgres::Client;
use syncguard::{
    AcquireResult, ExtendResult, Heartbeat, LockGuard, LockOptions, Lookup, LostReason, ReleaseResult,
};

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn a_lease_can_be_managed_by_hand_and_nothing_touches_it() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let AcquireResult::Acquired(grant) = client.acquire("k", TTL).unwrap() else { panic!("it is free") };
    assert!(client.is_locked("k").unwrap() && client.owns(&grant.lock_id).unwrap());
    let info = client.lookup(Lookup::Key("k")).unwrap().unwrap();
    assert_eq!((info.fence, info.expires_at_ms), (grant.fence, grant.expires_at_ms));
    let ExtendResult::Extended { expires_at_ms } = client.extend(&grant.lock_id, HOUR).unwrap() else {
        panic!("it is held")
    };
    assert!(expires_at_ms > grant.expires_at_ms);
    assert_eq!(row(&mut observer, "k").unwrap().expires_at_ms, expires_at_ms);
    client.close(LIMIT).unwrap();
    drop(client);
    assert_eq!(row(&mut observer, "k").unwrap().expires_at_ms, expires_at_ms, "no guard, no release");
    let another = leases::client(&schema);
    assert_eq!(another.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
    assert_eq!(another.release(&grant.lock_id).unwrap(), ReleaseResult::NotHeld);
    assert!(!another.is_locked("k").unwrap());
}

#[test]
fn a_leaked_lease_is_neither_renewed_nor_released_by_its_guard() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let often = LockOptions::new().heartbeat(Heartbeat::Every(ms(20)));
    let guard = client.lock_with("leaked", &often).unwrap();
    let clock = client.lock_with("clock", &often).unwrap();
    let grant = guard.leak();
    // A renewal that was under way may still arrive; those that began later have nothing to do with it.
    renewed_times(&mut observer, &clock, 2);
    let left = row(&mut observer, "leaked").unwrap();
    assert_eq!((&left.lock_id, &left.fence), (&grant.lock_id, &grant.fence.to_string()));
    renewed_times(&mut observer, &clock, 5);
    assert_eq!(row(&mut observer, "leaked"), Some(left), "as it was left");
    let report = client.close(LIMIT).unwrap();
    assert_eq!((report.released, report.is_clean()), (1, true), "only the clock's");
    assert!(row(&mut observer, "leaked").is_some() && row(&mut observer, "clock").is_none());
    assert_eq!(leases::client(&schema).release(&grant.lock_id).unwrap(), ReleaseResult::Released);
}

/// Waits until the server's expiry of this guard's key has moved so often.
fn renewed_times(observer: &mut Client, guard: &LockGuard, times: usize) {
    for n in 0..times {
        let before = row(observer, guard.key()).unwrap().expires_at_ms;
        wait_until(LIMIT, &format!("renewal {n} of the guard"), || {
            row(observer, guard.key()).unwrap().expires_at_ms > before
        });
    }
}

#[test]
fn a_heartbeat_renews_at_its_interval_or_not_at_all() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let lock = |key: &str, heartbeat| {
        client.lock_with(key, &LockOptions::new().ttl(ms(60_000)).heartbeat(heartbeat)).unwrap()
    };
    let (off, auto) = (lock("off", Heartbeat::Off), lock("auto", Heartbeat::Auto));
    let (off_row, auto_row) = (row(&mut observer, "off"), row(&mut observer, "auto"));
    let every = lock("every", Heartbeat::Every(ms(20)));
    renewed_times(&mut observer, &every, 5);
    assert_eq!((row(&mut observer, "off"), row(&mut observer, "auto")), (off_row, auto_row));
    assert!(off.is_held() && auto.is_held() && every.is_held());
    assert!(every.expires_at_ms() > off.expires_at_ms());
}

#[test]
fn without_a_heartbeat_a_lock_is_lost_when_its_ttl_is_over() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let guard = client.lock_with("k", &LockOptions::new().ttl(ms(300)).heartbeat(Heartbeat::Off)).unwrap();
    assert!(guard.lost().wait_timeout(LIMIT));
    assert_eq!(guard.lost_reason(), Some(LostReason::Expired));
    assert!(!guard.is_held() && guard.remaining().is_zero());
}

#[test]
fn a_guard_that_ends_early_leaves_its_key_taken_for_min_hold() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    // Longer than its own lease and the tolerance after it: the lease has to be prolonged.
    let options = LockOptions::new().ttl(ms(200)).min_hold(ms(1800));
    for released in [true, false] {
        let guard = client.lock_with("k", &options).unwrap();
        let acquired = row(&mut observer, "k").unwrap().acquired_at_ms;
        let id = guard.lock_id().to_owned();
        if released {
            assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
        } else {
            drop(guard);
        }
        let kept = row(&mut observer, "k").expect("it is kept");
        assert_eq!(kept.lock_id, id);
        assert!(kept.expires_at_ms >= acquired + 1800, "kept for {} ms", kept.expires_at_ms - acquired);
        assert!(client.try_lock("k").unwrap().is_none());
        wait_until_released(&mut observer, "k");
        assert!(leases::server_now_ms(&mut observer) >= acquired + 1799);
    }
    // The holder may end it early, be it of one key or of several, and one that lasted longer is released at once.
    let guard = client.lock_with("k", &LockOptions::new().min_hold(LIMIT)).unwrap();
    assert_eq!(guard.release_now().unwrap(), ReleaseResult::Released);
    assert_eq!(row(&mut observer, "k"), None);
    let several = client.lock_all_with(&["k", "l"], &LockOptions::new().min_hold(LIMIT)).unwrap();
    assert_eq!(several.release_now().unwrap(), ReleaseResult::Released);
    assert_eq!((row(&mut observer, "k"), row(&mut observer, "l")), (None, None));
    let guard = client.lock_with("long", &LockOptions::new().min_hold(ms(1))).unwrap();
    let taken = Instant::now();
    wait_until(LIMIT, "its time has passed", || taken.elapsed() > ms(5));
    drop(guard);
    assert_eq!(row(&mut observer, "long"), None);
}

#[test]
fn a_closing_client_cuts_a_kept_lease_to_its_min_hold() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    drop(client.lock_with("k", &LockOptions::new().min_hold(Duration::from_secs(10))).unwrap());
    let acquired = row(&mut observer, "k").unwrap().acquired_at_ms;
    let report = client.close(LIMIT).unwrap();
    assert!(report.is_clean(), "{report:?}");
    let kept = row(&mut observer, "k").expect("nobody releases it, the lease ends by itself");
    let live_for = kept.expires_at_ms + 1000 - acquired;
    assert!((9_000..11_500).contains(&live_for), "live for {live_for} ms after the grant");
}

#[test]
fn a_forgotten_guard_ends_at_max_hold_because_nobody_renews_it() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let options = LockOptions::new().ttl(ms(2000)).heartbeat(Heartbeat::Every(ms(50))).max_hold(ms(4000));
    let guard = client.lock_with("k", &options).unwrap();
    let acquired = row(&mut observer, "k").unwrap().acquired_at_ms;
    renewed_times(&mut observer, &guard, 3);
    std::mem::forget(guard);
    let next = client.lock_with("k", &asking_often()).unwrap();
    assert_eq!(next.fence().get(), 2);
    let taken = row(&mut observer, "k").unwrap().acquired_at_ms;
    assert!(taken > acquired + 3000, "it was renewed beyond its first ttl: {} ms", taken - acquired);
}

#[test]
fn max_hold_tells_the_holder_and_extending_does_not_help() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let told = Arc::new(AtomicUsize::new(0));
    let options = LockOptions::new().max_hold(ms(200)).on_lost({
        let told = Arc::clone(&told);
        move |reason| {
            assert_eq!(reason, LostReason::MaxHold);
            told.fetch_add(1, Ordering::SeqCst);
        }
    });
    let guard = client.lock_with("k", &options).unwrap();
    assert!(guard.remaining() <= ms(200));
    let _ = guard.extend(HOUR).unwrap();
    assert!(guard.lost().wait_timeout(LIMIT));
    assert_eq!(guard.lost_reason(), Some(LostReason::MaxHold));
    assert_eq!(guard.extend(TTL).unwrap(), ExtendResult::NotHeld);
    wait_until(LIMIT, "on_lost is called", || told.load(Ordering::SeqCst) == 1);
    drop(guard);
    assert_eq!(row(&mut observer, "k"), None, "a guard that is lost to max_hold still lets go");
}
