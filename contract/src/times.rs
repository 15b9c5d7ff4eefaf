//! Liveness, expiry, ttls and deadlines.

use std::time::Duration;

use syncguard::backend::{
    AcquireResult, Attempt, ExtendOutcome, LostReason, Reason, ReleaseOutcome, RenewOutcome, Renewal,
};
use syncguard::{CancelToken, ErrorCode, MAX_TTL};

use crate::bench::{Bench, JUST_EXPIRED_MS, LONG_EXPIRED_MS, TTL, is_or_unknown};

pub(crate) fn a_lease_is_live_until_the_tolerance_is_over(bench: &Bench<'_>) {
    let (key, held) = bench.held();
    let id = held.lock_id.as_str();
    let age = || bench.harness.age(&key, JUST_EXPIRED_MS);

    age();
    assert_eq!(bench.try_acquire(&key).unwrap(), AcquireResult::Locked);
    age();
    assert!(bench.is_locked(&key));
    age();
    assert!(bench.backend.holder(&key, bench.deadline(), &CancelToken::never()).unwrap().is_some());
    age();
    assert!(bench.by_key(&key).is_some());
    age();
    assert!(bench.by_id(id).is_some());
    age();
    assert!(bench.raw(&key).is_some());
    age();
    assert!(bench.extend(id).is_some());
    age();
    let renewal = Renewal::new(&key, id, syncguard::Fence::new(1).unwrap(), TTL);
    let renewed = bench.backend.renew(&[renewal], bench.deadline()).remove(0).unwrap();
    assert!(matches!(renewed, RenewOutcome::Renewed { .. }), "{renewed:?}");
    age();
    assert!(bench.release(id));
}

pub(crate) fn a_lease_is_dead_after_the_tolerance(bench: &Bench<'_>) {
    let (key, held) = bench.held();
    let id = held.lock_id.as_str();
    let never = CancelToken::never();
    bench.harness.age(&key, LONG_EXPIRED_MS);

    assert!(!bench.is_locked(&key));
    assert!(bench.backend.holder(&key, bench.deadline(), &never).unwrap().is_none());
    assert!(bench.by_key(&key).is_none() && bench.by_id(id).is_none() && bench.raw(&key).is_none());
    match bench.backend.extend(id, TTL, &never).unwrap() {
        ExtendOutcome::NotHeld(reason) => assert!(is_or_unknown(reason, Reason::Expired), "{reason:?}"),
        other => panic!("{other:?}: an expired lease was extended"),
    }
    let renewal = Renewal::new(&key, id, syncguard::Fence::new(1).unwrap(), TTL);
    let renewed = bench.backend.renew(&[renewal], bench.deadline()).remove(0).unwrap();
    assert_eq!(renewed, RenewOutcome::Lost(LostReason::Expired));
    match bench.backend.release(id, &never).unwrap() {
        ReleaseOutcome::NotHeld(reason) => assert!(is_or_unknown(reason, Reason::Expired), "{reason:?}"),
        other => panic!("{other:?}: an expired lease was released"),
    }
    let next = bench.acquire(&key);
    assert!(next.fence > held.fence && next.lock_id != held.lock_id);
}

pub(crate) fn expiry_is_the_authority_s_time_plus_the_ttl(bench: &Bench<'_>) {
    let ttl_ms = i64::try_from(TTL.as_millis()).unwrap();
    let key = Bench::key();
    let before = bench.harness.now_ms();
    let grant = bench.acquire(&key);
    let after = bench.harness.now_ms();
    assert!((before + ttl_ms..=after + ttl_ms).contains(&grant.expires_at_ms));
    let info = bench.by_key(&key).unwrap();
    assert!((before..=after).contains(&info.acquired_at_ms));

    let before = bench.harness.now_ms();
    let expires_at_ms = bench.extend_to(&grant.lock_id, TTL * 2).unwrap();
    let after = bench.harness.now_ms();
    assert!((before + 2 * ttl_ms..=after + 2 * ttl_ms).contains(&expires_at_ms));
}

pub(crate) fn the_expiry_that_is_returned_is_the_one_that_is_stored(bench: &Bench<'_>) {
    let (key, grant) = bench.held();
    let stored = || bench.by_key(&key).unwrap().expires_at_ms;
    assert_eq!(stored(), grant.expires_at_ms);
    for seconds in [5, 90, 1] {
        let extended = bench.extend_to(&grant.lock_id, Duration::from_secs(seconds)).unwrap();
        assert_eq!(stored(), extended);
    }
    let renewal = Renewal::new(&key, &grant.lock_id, syncguard::Fence::new(1).unwrap(), TTL);
    let renewed = bench.backend.renew(&[renewal], bench.deadline()).remove(0).unwrap();
    let RenewOutcome::Renewed { expires_at_ms, .. } = renewed else { panic!("it is live: {renewed:?}") };
    assert_eq!(expires_at_ms, stored());
}

pub(crate) fn a_ttl_that_is_too_short_or_too_long_is_refused_and_changes_nothing(bench: &Bench<'_>) {
    let never = CancelToken::never();
    let (held_key, held) = bench.held();
    let (free_key, id) = (Bench::key(), Bench::id());
    let bad = [
        Duration::ZERO,
        Duration::from_nanos(1),
        Duration::from_micros(500),
        MAX_TTL + Duration::from_millis(1),
        Duration::from_millis(u64::MAX),
        Duration::MAX,
    ];
    for ttl in bad {
        let deadline = bench.deadline();
        let attempt = Attempt::new(&free_key, &id, ttl, deadline);
        let renewal = Renewal::new(&held_key, &held.lock_id, syncguard::Fence::new(1).unwrap(), ttl);
        let codes = [
            bench.backend.acquire(&free_key, ttl, &never).unwrap_err().code(),
            bench.backend.attempt(&attempt, &never).unwrap_err().code(),
            bench.backend.extend(&held.lock_id, ttl, &never).unwrap_err().code(),
            bench.backend.prolong(&renewal, deadline).unwrap_err().code(),
            bench.backend.renew(&[renewal], deadline).remove(0).unwrap_err().code(),
        ];
        assert_eq!(codes, [ErrorCode::InvalidArgument; 5], "{ttl:?}");
    }
    assert_eq!(bench.by_key(&held_key).unwrap().expires_at_ms, held.expires_at_ms);
    assert!(!bench.harness.has_row(&free_key));
    assert_eq!(bench.counter(&free_key), 0);
}

pub(crate) fn the_shortest_and_the_longest_ttl_are_accepted(bench: &Bench<'_>) {
    let never = CancelToken::never();
    // A fraction of a millisecond is cut off, not rounded and not refused.
    for (ttl, millis) in [
        (Duration::from_millis(1), 1),
        (Duration::from_micros(1999), 1),
        (MAX_TTL, i64::try_from(MAX_TTL.as_millis()).unwrap()),
    ] {
        let key = Bench::key();
        let grant = bench.backend.acquire(&key, ttl, &never).unwrap().acquired().unwrap();
        let extended = bench.extend_to(&grant.lock_id, ttl).expect("live, by the tolerance at least");
        assert!(extended >= grant.expires_at_ms);
        let info = bench.by_key(&key).unwrap();
        assert_eq!(grant.expires_at_ms - info.acquired_at_ms, millis, "{ttl:?}");
        bench.release(&grant.lock_id);
    }
}

pub(crate) fn a_deadline_that_is_over_ends_each_call_without_effect(bench: &Bench<'_>) {
    let never = CancelToken::never();
    let (held_key, held) = bench.held();
    let (free_key, id) = (Bench::key(), Bench::id());
    let over = bench.backend.clock().now();
    let attempt = Attempt::new(&free_key, &id, TTL, over);
    let renewal = Renewal::new(&held_key, &held.lock_id, syncguard::Fence::new(1).unwrap(), TTL * 2);
    let errors = [
        bench.backend.attempt(&attempt, &never).unwrap_err(),
        bench.backend.holder(&held_key, over, &never).unwrap_err(),
        bench.backend.prolong(&renewal, over).unwrap_err(),
        bench.backend.release_by(&held.lock_id, over).unwrap_err(),
        bench.backend.renew(&[renewal], over).remove(0).unwrap_err(),
    ];
    for error in errors {
        assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::NetworkTimeout, false));
    }
    assert_eq!(bench.by_key(&held_key).unwrap().expires_at_ms, held.expires_at_ms);
    assert!(!bench.harness.has_row(&free_key));
}
