//! Fences grow, forever, and only with a grant.

use syncguard::backend::AcquireResult;
use syncguard::{ErrorCode, FENCE_MAX, FENCE_WARN};

use crate::bench::{Bench, LONG_EXPIRED_MS};

pub(crate) fn the_first_fence_of_a_key_is_one_and_each_grant_adds_one(bench: &Bench<'_>) {
    let key = Bench::key();
    for n in 1..=5 {
        let grant = bench.acquire(&key);
        assert_eq!(grant.fence.get(), n);
        let text = grant.fence.to_string();
        assert!(text.len() == 15 && text.bytes().all(|b| b.is_ascii_digit()));
        assert_eq!(bench.by_key(&key).unwrap().fence, grant.fence);
        assert_eq!(bench.counter(&key), n);
        assert!(bench.release(&grant.lock_id));
    }
}

pub(crate) fn counters_of_different_keys_are_independent(bench: &Bench<'_>) {
    let (a, b) = (Bench::key(), Bench::key());
    for n in 1..=5 {
        assert!(bench.release(&bench.acquire(&a).lock_id));
        if n <= 2 {
            assert!(bench.release(&bench.acquire(&b).lock_id));
        }
    }
    assert_eq!((bench.counter(&a), bench.counter(&b)), (5, 2));
}

pub(crate) fn fences_survive_release_expiry_and_removal(bench: &Bench<'_>) {
    let (key, first) = bench.held();
    assert!(bench.release(&first.lock_id));
    assert!(!bench.harness.has_row(&key));
    assert_eq!(bench.counter(&key), 1);

    assert_eq!(bench.acquire(&key).fence.get(), 2);
    bench.harness.age(&key, LONG_EXPIRED_MS);
    assert_eq!(bench.counter(&key), 2);
    assert_eq!(bench.acquire(&key).fence.get(), 3, "after an expiry");
    bench.harness.remove_row(&key);
    assert_eq!(bench.acquire(&key).fence.get(), 4, "after an operator deleted the row");
    assert_eq!(bench.harness.backend().capabilities(), bench.backend.capabilities());
}

pub(crate) fn contended_acquires_do_not_advance_the_counter(bench: &Bench<'_>) {
    let (key, held) = bench.held();
    for _ in 0..50 {
        assert_eq!(bench.try_acquire(&key).unwrap(), AcquireResult::Locked);
    }
    assert_eq!(bench.counter(&key), 1);
    assert!(bench.release(&held.lock_id));
    assert_eq!(bench.acquire(&key).fence.get(), 2);
}

pub(crate) fn a_counter_above_the_warning_still_grants(bench: &Bench<'_>) {
    for counter in [FENCE_WARN - 1, FENCE_WARN, FENCE_WARN + 1] {
        let key = Bench::key();
        bench.harness.set_counter(&key, counter);
        assert_eq!(bench.acquire(&key).fence.get(), counter + 1);
    }
}

pub(crate) fn the_last_fence_is_granted_and_then_nothing_more(bench: &Bench<'_>) {
    let key = Bench::key();
    bench.harness.set_counter(&key, FENCE_MAX - 2);
    for fence in [FENCE_MAX - 1, FENCE_MAX] {
        let grant = bench.acquire(&key);
        assert_eq!(grant.fence.get(), fence, "to the last digit");
        assert!(bench.extend(&grant.lock_id).is_some(), "extends need no fence");
        assert!(bench.release(&grant.lock_id));
    }
    let error = bench.try_acquire(&key).unwrap_err();
    assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Internal, false));
}

pub(crate) fn a_counter_at_or_beyond_its_limit_changes_nothing(bench: &Bench<'_>) {
    // Sixteen digits: compared as text, they would be small.
    let beyond =
        [FENCE_MAX, FENCE_MAX + 1, 999_999_999_999_999, 1_000_000_000_000_000, 9_223_372_036_854_775_000];
    for counter in beyond {
        let (old, dead) = bench.held();
        bench.harness.age(&old, LONG_EXPIRED_MS);
        for key in [old, Bench::key()] {
            let had_row = bench.harness.has_row(&key);
            bench.harness.set_counter(&key, counter);
            for _ in 0..3 {
                let error = bench.try_acquire(&key).unwrap_err();
                assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Internal, false));
                assert!(!error.to_string().contains(&key), "an error shows no key");
            }
            assert_eq!(bench.counter(&key), counter);
            assert_eq!(bench.harness.has_row(&key), had_row);
            assert!(!bench.is_locked(&key));
        }
        assert!(bench.by_id(&dead.lock_id).is_none());
    }
}
