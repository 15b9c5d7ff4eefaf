//! Acquire, release and extend: who owns what.

use std::collections::HashSet;
use std::time::Duration;

use syncguard::backend::{AcquireResult, Attempt, ExtendOutcome, Reason, ReleaseOutcome};
use syncguard::{CancelToken, Fence, validate_lock_id};

use crate::bench::{Bench, LONG_EXPIRED_MS, TTL, is_or_unknown};

fn attempt(bench: &Bench<'_>, key: &str, lock_id: &str) -> AcquireResult {
    let attempt = Attempt::new(key, lock_id, TTL, bench.deadline());
    bench.backend.attempt(&attempt, &CancelToken::never()).unwrap()
}

pub(crate) fn a_held_key_is_an_ordinary_answer(bench: &Bench<'_>) {
    let key = Bench::key();
    let granted = bench.try_acquire(&key).unwrap();
    assert_eq!(granted.fence().map(Fence::get), Some(1));
    let held = granted.acquired().unwrap();
    let contended = bench.try_acquire(&key).unwrap();
    assert_eq!((&contended, contended.fence()), (&AcquireResult::Locked, None));
    assert_eq!(bench.by_id(&held.lock_id).unwrap().expires_at_ms, held.expires_at_ms);
}

pub(crate) fn each_grant_has_a_fresh_well_formed_id(bench: &Bench<'_>) {
    let key = Bench::key();
    let mut ids = HashSet::new();
    for _ in 0..100 {
        let grant = bench.acquire(&key);
        validate_lock_id(&grant.lock_id).unwrap();
        assert!(bench.release(&grant.lock_id));
        assert!(ids.insert(grant.lock_id), "an id was used twice");
    }
}

pub(crate) fn the_id_alone_is_enough_for_another_client(bench: &Bench<'_>) {
    let (key, grant) = bench.held();
    let other = Bench::new(bench.harness);
    assert!(other.is_locked(&key));
    assert!(other.extend(&grant.lock_id).is_some());
    assert!(other.release(&grant.lock_id));
    assert!(!bench.is_locked(&key));
}

pub(crate) fn an_expired_lease_is_replaced_and_its_id_forgotten(bench: &Bench<'_>) {
    let (key, old) = bench.held();
    bench.harness.age(&key, 5000);
    let new = bench.acquire(&key);
    assert!(new.fence > old.fence && new.expires_at_ms >= old.expires_at_ms);
    assert!(bench.by_id(&old.lock_id).is_none());
    assert!(!bench.release(&old.lock_id) && bench.extend(&old.lock_id).is_none());
    let now = bench.raw(&key).unwrap();
    assert_eq!((now.lock_id.as_str(), now.fence), (new.lock_id.as_str(), new.fence));
}

pub(crate) fn the_same_attempt_again_answers_with_its_first_grant(bench: &Bench<'_>) {
    let (key, id) = (Bench::key(), Bench::id());
    let first = attempt(bench, &key, &id).acquired().unwrap();
    assert_eq!(first.lock_id, id);
    for _ in 0..3 {
        assert_eq!(attempt(bench, &key, &id), AcquireResult::Acquired(first.clone()));
    }
    assert_eq!(bench.counter(&key), 1, "one grant, one fence");
    let expires_at_ms = bench.extend_to(&id, TTL * 3).unwrap();
    let again = attempt(bench, &key, &id).acquired().unwrap();
    assert_eq!((again.fence, again.expires_at_ms), (first.fence, expires_at_ms));
    assert!(bench.release(&id));
    let later = attempt(bench, &key, &id).acquired().unwrap();
    assert!(later.fence > first.fence, "after a release it is a new grant");
}

pub(crate) fn an_attempt_never_takes_what_another_id_holds(bench: &Bench<'_>) {
    let (key, mine) = (Bench::key(), Bench::id());
    let _first = attempt(bench, &key, &mine).acquired().unwrap();
    bench.harness.age(&key, LONG_EXPIRED_MS);
    let theirs = bench.acquire(&key);
    for id in [mine, Bench::id()] {
        assert_eq!(attempt(bench, &key, &id), AcquireResult::Locked);
    }
    assert_eq!(bench.raw(&key).unwrap().lock_id, theirs.lock_id);
}

pub(crate) fn a_repeated_attempt_never_answers_with_a_dead_lease(bench: &Bench<'_>) {
    let (key, id) = (Bench::key(), Bench::id());
    let first = attempt(bench, &key, &id).acquired().unwrap();
    bench.harness.age(&key, LONG_EXPIRED_MS);
    if let Some(again) = attempt(bench, &key, &id).acquired() {
        assert!(again.fence >= first.fence);
        assert!(bench.by_id(&id).is_some_and(|info| info.fence == again.fence), "what is granted is live");
    }
}

pub(crate) fn an_id_in_use_for_another_key_is_an_error_without_effect(bench: &Bench<'_>) {
    let (held_key, held) = bench.held();
    let key = Bench::key();
    for age in [None, Some(LONG_EXPIRED_MS)] {
        if let Some(past) = age {
            bench.harness.age(&held_key, past);
        }
        let clash = Attempt::new(&key, &held.lock_id, TTL, bench.deadline());
        assert!(bench.backend.attempt(&clash, &CancelToken::never()).is_err());
        assert!(!bench.is_locked(&key) && bench.counter(&key) == 0);
        assert!(bench.harness.has_row(&held_key));
    }
}

pub(crate) fn release_works_once(bench: &Bench<'_>) {
    let (key, grant) = bench.held();
    assert!(bench.release(&grant.lock_id));
    assert!(!bench.is_locked(&key) && !bench.harness.has_row(&key));
    assert_eq!(bench.counter(&key), 1);
    assert!(!bench.release(&grant.lock_id));
}

pub(crate) fn a_late_release_spares_the_next_owner(bench: &Bench<'_>) {
    let (key, first) = bench.held();
    bench.harness.age(&key, LONG_EXPIRED_MS);
    let second = bench.acquire(&key);
    let before = bench.raw(&key);
    assert!(!bench.release(&first.lock_id));
    assert_eq!(bench.raw(&key), before);
    assert!(bench.release(&second.lock_id));
    let _third = bench.acquire(&key);
    assert!(!bench.release(&second.lock_id), "nor does a repeated one");
    assert!(bench.is_locked(&key));
}

pub(crate) fn a_refused_release_leaves_the_row_and_the_counter(bench: &Bench<'_>) {
    let (key, grant) = bench.held();
    bench.harness.age(&key, LONG_EXPIRED_MS);
    assert!(!bench.release(&grant.lock_id));
    assert!(bench.harness.has_row(&key));
    assert_eq!(bench.counter(&key), 1);
}

pub(crate) fn extend_replaces_the_rest_of_the_ttl(bench: &Bench<'_>) {
    let (key, grant) = bench.held();
    let shorter = bench.extend_to(&grant.lock_id, Duration::from_secs(5)).unwrap();
    assert!(shorter < grant.expires_at_ms, "it does not add to the rest");
    let before = bench.harness.now_ms();
    let _ = bench.extend_to(&grant.lock_id, Duration::from_secs(10)).unwrap();
    let twice = bench.extend_to(&grant.lock_id, Duration::from_secs(10)).unwrap();
    let after = bench.harness.now_ms();
    assert!((before + 10_000..=after + 10_000).contains(&twice));
    assert_eq!(bench.by_key(&key).unwrap().expires_at_ms, twice);
}

pub(crate) fn extend_changes_only_the_expiry(bench: &Bench<'_>) {
    let (key, grant) = bench.held();
    let mut expected = bench.raw(&key).unwrap();
    expected.expires_at_ms = bench.extend_to(&grant.lock_id, TTL * 4).unwrap();
    assert_eq!(bench.raw(&key), Some(expected));
    assert_eq!(bench.counter(&key), 1);
}

pub(crate) fn extend_revives_and_creates_nothing(bench: &Bench<'_>) {
    let (key, grant) = bench.held();
    bench.harness.age(&key, LONG_EXPIRED_MS);
    assert!(bench.extend(&grant.lock_id).is_none() && !bench.is_locked(&key));
    let next = bench.acquire(&key);
    assert!(bench.release(&next.lock_id));
    assert!(bench.extend(&next.lock_id).is_none() && bench.extend(&grant.lock_id).is_none());
    assert!(!bench.harness.has_row(&key));
}

pub(crate) fn unknown_ids_are_harmless(bench: &Bench<'_>) {
    let never = CancelToken::never();
    let (key, _held) = bench.held();
    let before = bench.raw(&key);
    for _ in 0..20 {
        let id = Bench::id();
        match bench.backend.release(&id, &never).unwrap() {
            ReleaseOutcome::NotHeld(reason) => assert!(is_or_unknown(reason, Reason::NotFound), "{reason:?}"),
            other => panic!("{other:?}: an unknown id was released"),
        }
        match bench.backend.extend(&id, TTL, &never).unwrap() {
            ExtendOutcome::NotHeld(reason) => assert!(is_or_unknown(reason, Reason::NotFound), "{reason:?}"),
            other => panic!("{other:?}: an unknown id was extended"),
        }
    }
    assert_eq!(bench.raw(&key), before);
}
