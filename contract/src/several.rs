//! Several keys at once, all or none. A backend that takes one key at a time says so in every call.

use std::time::Duration;

use syncguard::backend::{AttemptAll, Grant, GrantAll, Moment, Reason, ReleaseOutcome};
use syncguard::{CancelToken, ErrorCode, FENCE_MAX, Result};

use crate::bench::{Bench, LONG_EXPIRED_MS, TTL, is_or_unknown, together};

/// A set of fresh keys, each with a fresh id.
struct Set(Vec<(String, String)>);

impl Set {
    fn of(keys: &[&str]) -> Self {
        Self(keys.iter().map(|key| ((*key).to_owned(), Bench::id())).collect())
    }

    fn fresh(keys: usize) -> Self {
        Self((0..keys).map(|_| (Bench::key(), Bench::id())).collect())
    }

    fn ask(&self, bench: &Bench<'_>, cancel: &CancelToken) -> Result<GrantAll> {
        self.ask_for(bench, TTL, bench.deadline(), cancel)
    }

    fn ask_for(
        &self,
        bench: &Bench<'_>,
        ttl: Duration,
        deadline: Moment,
        cancel: &CancelToken,
    ) -> Result<GrantAll> {
        let leases: Vec<_> = self.0.iter().map(|(key, id)| (key.as_str(), id.as_str())).collect();
        bench.backend.grant_all(&AttemptAll::new(&leases, ttl, deadline), cancel)
    }

    fn granted(&self, bench: &Bench<'_>) -> Vec<Grant> {
        match self.ask(bench, &CancelToken::never()).unwrap() {
            GrantAll::Granted(grants) => grants,
            held => panic!("the keys are free: {held:?}"),
        }
    }

    fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(key, _)| key.as_str())
    }

    fn ids(&self) -> Vec<&str> {
        self.0.iter().map(|(_, id)| id.as_str()).collect()
    }

    /// Whether none of it is there, and no counter was raised.
    fn is_untouched(&self, bench: &Bench<'_>) -> bool {
        self.keys().all(|key| !bench.harness.has_row(key) && bench.counter(key) == 0)
    }
}

/// Whether the backend takes sets. One that does not says so, and does nothing.
fn takes_sets(bench: &Bench<'_>) -> bool {
    let probe = Set::fresh(2);
    match probe.ask(bench, &CancelToken::never()) {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::InvalidArgument);
            assert!(probe.is_untouched(bench));
            false
        }
    }
}

/// The place of the key in the way.
fn in_the_way(answer: Result<GrantAll>) -> usize {
    match answer.unwrap() {
        GrantAll::Held { index, .. } => index,
        granted => panic!("a key is held: {granted:?}"),
    }
}

pub(crate) fn several_keys_are_granted_together_and_each_has_a_lease_of_its_own(bench: &Bench<'_>) {
    if !takes_sets(bench) {
        return;
    }
    for keys in [1, 2, 3, 64] {
        // In no order.
        let set = Set::fresh(keys);
        let grants = set.granted(bench);
        assert_eq!(grants.len(), keys);
        for ((key, id), grant) in set.0.iter().zip(&grants) {
            assert_eq!((grant.acquired.lock_id.as_str(), grant.acquired.fence.get()), (id.as_str(), 1));
            assert_eq!(grant.acquired.expires_at_ms, grants[0].acquired.expires_at_ms, "one moment");
            let row = bench.raw(key).unwrap();
            assert_eq!((&row.lock_id, row.fence), (id, grant.acquired.fence));
            assert_eq!(row.expires_at_ms, grant.acquired.expires_at_ms);
            assert_eq!(bench.counter(key), 1);
        }
        let (key, id) = &set.0[0];
        assert!(bench.extend(id).is_some() && bench.release(id), "like any other lease");
        assert_eq!(bench.acquire(key).fence.get(), 2);
    }
}

pub(crate) fn one_held_key_refuses_the_whole_set_and_is_named(bench: &Bench<'_>) {
    if !takes_sets(bench) {
        return;
    }
    let (key, held) = bench.held();
    let free = Set::fresh(2);
    let keys: Vec<&str> = free.keys().collect();
    for token in [CancelToken::never(), CancelToken::new()] {
        for (place, order) in
            [[key.as_str(), keys[0], keys[1]], [keys[0], &key, keys[1]], [keys[0], keys[1], &key]]
                .iter()
                .enumerate()
        {
            match Set::of(order).ask(bench, &token).unwrap() {
                GrantAll::Held { index, holder } => {
                    assert_eq!(index, place);
                    assert!(holder.fence.is_none_or(|fence| fence == held.fence), "{holder:?}");
                    assert!(holder.remaining.is_none_or(|rest| rest <= TTL), "{holder:?}");
                }
                granted => panic!("{granted:?}"),
            }
        }
    }
    assert!(free.is_untouched(bench));
    assert_eq!(bench.counter(&key), 1);
}

pub(crate) fn dead_leases_do_not_stand_in_the_way_of_a_set(bench: &Bench<'_>) {
    if !takes_sets(bench) {
        return;
    }
    for token in [CancelToken::never(), CancelToken::new()] {
        let (dead, old) = bench.held();
        bench.harness.age(&dead, LONG_EXPIRED_MS);
        let fresh = Bench::key();
        let set = Set::of(&[&dead, &fresh]);
        let GrantAll::Granted(grants) = set.ask(bench, &token).unwrap() else { panic!("both are free") };
        let fences: Vec<_> = grants.iter().map(|grant| grant.acquired.fence.get()).collect();
        assert_eq!(fences, [2, 1]);
        assert!(bench.by_id(&old.lock_id).is_none() && bench.by_id(&grants[0].acquired.lock_id).is_some());
    }
}

pub(crate) fn the_same_set_again_answers_with_its_first_grants(bench: &Bench<'_>) {
    if !takes_sets(bench) {
        return;
    }
    for token in [CancelToken::never(), CancelToken::new()] {
        let set = Set::fresh(3);
        let first = set.granted(bench);
        let GrantAll::Granted(again) = set.ask(bench, &token).unwrap() else { panic!("it is ours") };
        for (first, again) in first.iter().zip(&again) {
            assert_eq!(first.acquired, again.acquired);
            assert!(again.version.is_none() || again.version != first.version, "a write of its own");
        }
        assert!(set.keys().all(|key| bench.counter(key) == 1));
    }
}

/// One of the leases was lost before the attempt was made again.
pub(crate) fn a_part_of_a_set_is_not_the_set_and_is_released(bench: &Bench<'_>) {
    if !takes_sets(bench) {
        return;
    }
    for (taken, token) in [false, true]
        .into_iter()
        .flat_map(|taken| [CancelToken::never(), CancelToken::new()].map(|token| (taken, token)))
    {
        let set = Set::fresh(3);
        let _ = set.granted(bench);
        let (key, _) = &set.0[1];
        bench.harness.remove_row(key);
        if taken {
            bench.acquire(key);
        }
        assert_eq!(in_the_way(set.ask(bench, &token)), 1);
        // Also where another holder stands in the way.
        assert_eq!(set.keys().map(|key| bench.is_locked(key)).collect::<Vec<_>>(), [false, taken, false]);
    }
    // All of them are over: none is granted anew under an id that an answer may be on its way for.
    let set = Set::fresh(2);
    let _ = set.granted(bench);
    set.keys().for_each(|key| bench.harness.age(key, LONG_EXPIRED_MS));
    let _index = in_the_way(set.ask(bench, &CancelToken::never()));
    assert!(set.keys().all(|key| !bench.is_locked(key) && bench.counter(key) == 1));
}

pub(crate) fn a_counter_at_its_limit_refuses_the_whole_set(bench: &Bench<'_>) {
    if !takes_sets(bench) {
        return;
    }
    for dead in [false, true] {
        let (set, spent) = (Set::fresh(2), Bench::key());
        let keys: Vec<&str> = set.keys().chain([spent.as_str()]).collect();
        if dead {
            bench.acquire(&spent);
            bench.harness.age(&spent, LONG_EXPIRED_MS);
        }
        bench.harness.set_counter(&spent, FENCE_MAX);
        for token in [CancelToken::never(), CancelToken::new()] {
            let error = Set::of(&keys).ask(bench, &token).unwrap_err();
            assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Internal, false), "{error}");
        }
        assert!(set.is_untouched(bench));
        assert_eq!(bench.counter(&spent), FENCE_MAX);
    }
}

pub(crate) fn several_leases_are_released_at_once_and_each_has_its_own_outcome(bench: &Bench<'_>) {
    if !takes_sets(bench) {
        return;
    }
    let set = Set::fresh(3);
    let _ = set.granted(bench);
    bench.harness.age(&set.0[1].0, LONG_EXPIRED_MS);
    let unknown = Bench::id();
    let ids: Vec<&str> = set.ids().into_iter().chain([unknown.as_str()]).collect();
    let outcomes = bench.backend.release_all(&ids, bench.deadline()).unwrap();
    let why = |outcome: &ReleaseOutcome, reason: Reason| match outcome {
        ReleaseOutcome::NotHeld(said) => is_or_unknown(*said, reason),
        _ => false,
    };
    assert_eq!((outcomes[0], outcomes[2]), (ReleaseOutcome::Released, ReleaseOutcome::Released));
    assert!(why(&outcomes[1], Reason::Expired) && why(&outcomes[3], Reason::NotFound), "{outcomes:?}");
    assert!(set.keys().all(|key| !bench.is_locked(key) && bench.counter(key) == 1));
    assert!(bench.backend.release_all(&[], bench.deadline()).unwrap().is_empty());
}

pub(crate) fn what_is_no_set_of_keys_is_refused_and_changes_nothing(bench: &Bench<'_>) {
    if !takes_sets(bench) {
        return;
    }
    let free = Set::fresh(1);
    let (key, id) = &free.0[0];
    let too_many = Set::fresh(65);
    let other = Bench::key();
    let bad: [&[(&str, &str)]; 6] = [
        &[],
        &too_many.0.iter().map(|(key, id)| (key.as_str(), id.as_str())).collect::<Vec<_>>(),
        &[(key, id), (key, &Bench::id())],
        &[(key, id), (&other, id)],
        &[(key, id), ("", &Bench::id())],
        &[(key, id), (&other, "short")],
    ];
    for leases in bad {
        let attempt = AttemptAll::new(leases, TTL, bench.deadline());
        let error = bench.backend.grant_all(&attempt, &CancelToken::never()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
    }
    let never = CancelToken::never();
    let error = free.ask_for(bench, Duration::ZERO, bench.deadline(), &never).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    assert!(free.is_untouched(bench) && too_many.is_untouched(bench));
}

pub(crate) fn a_set_ends_with_its_token_and_its_deadline_without_effect(bench: &Bench<'_>) {
    if !takes_sets(bench) {
        return;
    }
    let token = CancelToken::new();
    token.cancel();
    let set = Set::fresh(2);
    let error = set.ask(bench, &token).unwrap_err();
    assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Aborted, false));
    let over = bench.backend.clock().now();
    let error = set.ask_for(bench, TTL, over, &CancelToken::never()).unwrap_err();
    assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::NetworkTimeout, false));
    assert!(set.is_untouched(bench));
    let held = Set::fresh(2);
    let _ = held.granted(bench);
    assert!(bench.backend.release_all(&held.ids(), over).is_err());
    assert!(held.keys().all(|key| bench.is_locked(key)));
}

/// Each key is in the sets of half of the threads, in every order.
pub(crate) fn sets_that_overlap_are_granted_one_after_the_other(bench: &Bench<'_>) {
    if !takes_sets(bench) {
        return;
    }
    let keys: Vec<String> = (0..4).map(|_| Bench::key()).collect();
    for round in 0..10 {
        let grants = together(8, |n| {
            // Two keys that stand side by side, or three, from either end.
            let mut mine: Vec<&str> = (0..2 + n % 2).map(|i| keys[(n + i) % 4].as_str()).collect();
            if round % 2 == 0 {
                mine.reverse();
            }
            let set = Set::of(&mine);
            match set.ask(bench, &CancelToken::never()).unwrap() {
                GrantAll::Granted(_) => Some(set),
                _ => None,
            }
        });
        let granted: Vec<Set> = grants.into_iter().flatten().collect();
        for key in &keys {
            let holders = granted.iter().filter(|set| set.keys().any(|mine| mine == key)).count();
            assert!(holders <= 1, "{holders} holders of one key");
            assert_eq!(bench.is_locked(key), holders == 1, "all of a set, or none of it");
        }
        for set in &granted {
            let outcomes = bench.backend.release_all(&set.ids(), bench.deadline()).unwrap();
            assert!(outcomes.iter().all(|outcome| *outcome == ReleaseOutcome::Released));
        }
    }
}
