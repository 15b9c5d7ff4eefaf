//! Many threads at once.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use syncguard::backend::{AcquireResult, Acquired, Attempt, ExtendOutcome};
use syncguard::{CancelToken, TIME_TOLERANCE_MS, hash_key};

use crate::bench::{Bench, LONG_EXPIRED_MS, TTL, together};

const ROUNDS: usize = 10;

/// The one grant of 32 threads that acquire at once.
fn winner(bench: &Bench<'_>, key: &str) -> Acquired {
    let answers = together(32, |_| bench.try_acquire(key).unwrap().acquired());
    let mut grants: Vec<Acquired> = answers.into_iter().flatten().collect();
    assert_eq!(grants.len(), 1, "exactly one wins");
    grants.remove(0)
}

pub(crate) fn one_of_many_takes_a_free_key(bench: &Bench<'_>) {
    for _ in 0..ROUNDS {
        let key = Bench::key();
        let grant = winner(bench, &key);
        assert_eq!((grant.fence.get(), bench.counter(&key)), (1, 1));
        assert_eq!(bench.raw(&key).unwrap().lock_id, grant.lock_id);
    }
}

pub(crate) fn one_of_many_takes_an_expired_key(bench: &Bench<'_>) {
    let (key, _) = bench.held();
    for round in 1..=ROUNDS {
        bench.harness.age(&key, LONG_EXPIRED_MS);
        let grant = winner(bench, &key);
        assert_eq!(grant.fence.get(), 1 + round as u64, "losers burn no fence");
        assert_eq!(bench.raw(&key).unwrap().lock_id, grant.lock_id);
    }
}

pub(crate) fn one_of_many_releases_succeeds(bench: &Bench<'_>) {
    let key = Bench::key();
    for _ in 0..ROUNDS {
        let grant = bench.acquire(&key);
        let released = together(16, |_| bench.release(&grant.lock_id));
        assert_eq!(released.into_iter().filter(|released| *released).count(), 1);
        assert!(!bench.is_locked(&key));
    }
}

pub(crate) fn one_attempt_made_many_times_at_once_is_one_grant(bench: &Bench<'_>) {
    for _ in 0..ROUNDS {
        let (key, id) = (Bench::key(), Bench::id());
        let grants = together(8, |_| {
            let attempt = Attempt::new(&key, &id, TTL, bench.deadline());
            bench.backend.attempt(&attempt, &CancelToken::never()).unwrap()
        });
        assert!(
            grants.iter().all(|grant| *grant == grants[0] && *grant != AcquireResult::Locked),
            "{grants:?}"
        );
        assert_eq!(bench.counter(&key), 1);
    }
}

pub(crate) fn an_extend_and_a_take_over_never_both_succeed(bench: &Bench<'_>) {
    for round in 0..4 * ROUNDS {
        let (key, old) = bench.held();
        // About as long before the end of the tolerance as it takes to get there.
        let rest = i64::try_from(round % ROUNDS).unwrap();
        bench.harness.age(&key, TIME_TOLERANCE_MS - rest);
        let answers = together(2, |n| {
            if n == 0 {
                let extended = bench.backend.extend(&old.lock_id, TTL, &CancelToken::never()).unwrap();
                matches!(extended, ExtendOutcome::Extended { .. })
            } else {
                // Some tries: the tolerance may end between two of them.
                (0..5).any(|_| bench.try_acquire(&key).unwrap().acquired().is_some())
            }
        });
        assert_ne!(answers, [true, true], "the lease has two owners");
    }
}

pub(crate) fn fences_are_handed_out_once_and_in_the_order_of_the_grants(bench: &Bench<'_>) {
    const THREADS: usize = 8;
    const GRANTS: usize = 10;
    let key = Bench::key();
    let (inside, order) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    together(THREADS, |_| {
        let mut granted = 0;
        while granted < GRANTS {
            let Some(grant) = bench.try_acquire(&key).unwrap().acquired() else {
                std::thread::yield_now();
                continue;
            };
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders at once");
            order.lock().unwrap().push(grant.fence.get());
            inside.fetch_sub(1, Ordering::SeqCst);
            assert!(bench.release(&grant.lock_id));
            granted += 1;
        }
    });
    let expected: Vec<u64> = (1..=(THREADS * GRANTS) as u64).collect();
    assert_eq!(order.into_inner().unwrap(), expected);
}

pub(crate) fn lookups_never_mix_two_owners(bench: &Bench<'_>) {
    let key = Bench::key();
    let stop = AtomicBool::new(false);
    let (mut granted, mut seen) = (HashMap::new(), Vec::new());
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = Vec::new();
            while !stop.load(Ordering::SeqCst) {
                seen.extend(bench.by_key(&key));
            }
            seen
        });
        for _ in 0..100 {
            let grant = bench.acquire(&key);
            granted.insert(hash_key(&grant.lock_id), (grant.fence, grant.expires_at_ms));
            assert!(bench.release(&grant.lock_id));
        }
        stop.store(true, Ordering::SeqCst);
        seen = reader.join().expect("the reader");
    });
    for info in seen {
        assert_eq!(granted.get(&info.lock_id_hash), Some(&(info.fence, info.expires_at_ms)));
        assert_eq!(info.key_hash, hash_key(&key));
    }
}
