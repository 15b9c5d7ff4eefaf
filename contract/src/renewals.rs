//! What guards ask for: batches of renewals, and calls with a deadline.

use std::collections::HashSet;
use std::time::Duration;

use syncguard::backend::{Attempt, Grant, LostReason, ReleaseOutcome, RenewOutcome, Renewal};
use syncguard::{CancelToken, ErrorCode, Fence, Result};

use crate::bench::{Bench, LONG_EXPIRED_MS, TTL};

fn renew(bench: &Bench<'_>, leases: &[(&str, &str)], ttl: Duration) -> Vec<Result<RenewOutcome>> {
    // The first grant of its key each.
    let fence = Fence::new(1).unwrap();
    let leases: Vec<_> = leases.iter().map(|(key, lock_id)| Renewal::new(key, lock_id, fence, ttl)).collect();
    bench.backend.renew(&leases, bench.deadline())
}

pub(crate) fn live_leases_are_renewed(bench: &Bench<'_>) {
    let held: Vec<_> = (0..10).map(|_| bench.held()).collect();
    let leases: Vec<_> = held.iter().map(|(key, grant)| (key.as_str(), grant.lock_id.as_str())).collect();
    let before = bench.harness.now_ms();
    let outcomes = renew(bench, &leases, TTL * 2);
    let after = bench.harness.now_ms();
    assert_eq!(outcomes.len(), leases.len());
    for ((key, grant), outcome) in held.iter().zip(outcomes) {
        let info = bench.raw(key).unwrap();
        let RenewOutcome::Renewed { expires_at_ms, .. } = outcome.unwrap() else { panic!("it is live") };
        assert_eq!(expires_at_ms, info.expires_at_ms);
        assert!((before + 60_000..=after + 60_000).contains(&info.expires_at_ms));
        assert_eq!((info.lock_id, info.fence), (grant.lock_id.clone(), grant.fence));
        assert_eq!(bench.counter(key), 1);
    }
}

/// One lease of a guard, renewed or prolonged.
fn change(bench: &Bench<'_>, alone: bool, lease: &Renewal<'_>) -> RenewOutcome {
    if alone {
        return bench.backend.prolong(lease, bench.deadline()).unwrap();
    }
    bench.backend.renew(std::slice::from_ref(lease), bench.deadline()).remove(0).unwrap()
}

pub(crate) fn only_who_names_the_newest_version_shortens_a_lease(bench: &Bench<'_>) {
    let (key, id) = (Bench::key(), Bench::id());
    let attempt = Attempt::new(&key, &id, TTL, bench.deadline());
    let grant = bench.backend.grant(&attempt, &CancelToken::never()).unwrap().expect("the key is free");
    let Some(first) = grant.version else { return }; // nothing can be late here
    let lease = |version, ttl| Renewal::new(&key, &id, grant.acquired.fence, ttl).with_version(version);
    let end = |outcome| match outcome {
        RenewOutcome::Renewed { expires_at_ms, version: Some(version) } => (expires_at_ms, version),
        other => panic!("{other:?}"),
    };
    let (long, second) = end(change(bench, true, &lease(Some(first), TTL * 2)));
    // A late copy, and one that knows nothing.
    let (kept, third) = end(change(bench, false, &lease(Some(first), TTL / 10)));
    let (still, fourth) = end(change(bench, false, &lease(None, TTL / 10)));
    assert_eq!((kept, still), (long, long));
    assert_eq!(bench.by_key(&key).unwrap().expires_at_ms, long);
    let (shorter, fifth) = end(change(bench, false, &lease(Some(fourth), TTL)));
    assert!(shorter < long);
    // A holder's own wish is asked for again.
    let (shortest, sixth) = end(change(bench, true, &lease(Some(first), TTL / 10)));
    assert!(shortest < shorter);
    assert_eq!(bench.by_key(&key).unwrap().expires_at_ms, shortest);
    // The same attempt again: who asked before does not know what it answers.
    let again = bench.backend.grant(&attempt, &CancelToken::never()).unwrap().expect("it is ours");
    let versions =
        [Some(first), Some(second), Some(third), Some(fourth), Some(fifth), Some(sixth), again.version];
    assert_eq!(versions.iter().collect::<HashSet<_>>().len(), versions.len(), "none is there twice");
}

pub(crate) fn a_lease_granted_again_under_the_same_id_is_lost_to_its_old_holder(bench: &Bench<'_>) {
    for alone in [false, true] {
        let (key, id) = (Bench::key(), Bench::id());
        let attempt = Attempt::new(&key, &id, TTL, bench.deadline());
        let first = bench.backend.grant(&attempt, &CancelToken::never()).unwrap().expect("the key is free");
        bench.harness.remove_row(&key);
        let second = bench.backend.grant(&attempt, &CancelToken::never()).unwrap().expect("the key is free");
        let lease = |grant: &Grant, ttl| {
            Renewal::new(&key, &id, grant.acquired.fence, ttl).with_version(grant.version)
        };
        let lost = RenewOutcome::Lost(LostReason::TakenOver { fence: second.acquired.fence });
        assert_eq!(change(bench, alone, &lease(&first, TTL * 2)), lost);
        // A backend without versions extends by the id alone, which is the same.
        if first.version.is_some() {
            let end = bench.by_key(&key).unwrap().expires_at_ms;
            assert_eq!(end, second.acquired.expires_at_ms, "and moves nothing");
        }
        let live = change(bench, alone, &lease(&second, TTL));
        assert!(matches!(live, RenewOutcome::Renewed { .. }), "{live:?}");
    }
}

pub(crate) fn lost_leases_say_how_they_were_lost(bench: &Bench<'_>) {
    let (expired, grant) = bench.held();
    bench.harness.age(&expired, LONG_EXPIRED_MS);
    let outcome = renew(bench, &[(&expired, &grant.lock_id)], TTL).remove(0).unwrap();
    assert_eq!(outcome, RenewOutcome::Lost(LostReason::Expired));

    let newer = bench.acquire(&expired);
    let outcome = renew(bench, &[(&expired, &grant.lock_id)], TTL).remove(0).unwrap();
    assert_eq!(outcome, RenewOutcome::Lost(LostReason::TakenOver { fence: newer.fence }));
    assert_eq!(bench.by_id(&newer.lock_id).unwrap().expires_at_ms, newer.expires_at_ms);

    let (removed, grant) = bench.held();
    bench.harness.remove_row(&removed);
    let outcome = renew(bench, &[(&removed, &grant.lock_id)], TTL).remove(0).unwrap();
    assert_eq!(outcome, RenewOutcome::Lost(LostReason::RowMissing));
    assert!(!bench.harness.has_row(&removed), "a renewal creates nothing");

    let (released, grant) = bench.held();
    assert!(bench.release(&grant.lock_id));
    let outcome = renew(bench, &[(&released, &grant.lock_id)], TTL).remove(0).unwrap();
    assert_eq!(outcome, RenewOutcome::Lost(LostReason::RowMissing));
}

pub(crate) fn each_lease_of_a_batch_has_its_own_outcome_in_order(bench: &Bench<'_>) {
    let (live, first) = bench.held();
    let (dead, second) = bench.held();
    let (also_live, third) = bench.held();
    bench.harness.age(&dead, LONG_EXPIRED_MS);
    let (unknown_key, unknown_id) = (Bench::key(), Bench::id());
    let leases = [
        (unknown_key.as_str(), unknown_id.as_str()),
        (live.as_str(), first.lock_id.as_str()),
        (live.as_str(), "not an id"),
        (dead.as_str(), second.lock_id.as_str()),
        (also_live.as_str(), third.lock_id.as_str()),
    ];
    let outcomes = renew(bench, &leases, TTL);
    assert_eq!(outcomes.len(), leases.len());
    assert_eq!(outcomes[0].as_ref().unwrap(), &RenewOutcome::Lost(LostReason::RowMissing));
    assert!(matches!(outcomes[1].as_ref().unwrap(), RenewOutcome::Renewed { .. }));
    assert_eq!(outcomes[2].as_ref().unwrap_err().code(), ErrorCode::InvalidArgument);
    assert_eq!(outcomes[3].as_ref().unwrap(), &RenewOutcome::Lost(LostReason::Expired));
    assert!(matches!(outcomes[4].as_ref().unwrap(), RenewOutcome::Renewed { .. }));
}

pub(crate) fn an_empty_batch_is_nothing(bench: &Bench<'_>) {
    assert!(renew(bench, &[], TTL).is_empty());
}

pub(crate) fn guards_calls_answer_like_the_plain_operations(bench: &Bench<'_>) {
    let never = CancelToken::never();
    bench.backend.reserve_renewals(bench.deadline(), &never).unwrap();
    bench.backend.reserve_renewals(bench.deadline(), &never).unwrap();
    assert!(!bench.backend.operation_timeout().is_zero());
    let (key, grant) = bench.held();
    let deadline = bench.deadline();
    assert!(bench.backend.holder(&key, deadline, &never).unwrap().is_some());
    let renewal = Renewal::new(&key, &grant.lock_id, grant.fence, TTL * 2);
    let extended = bench.backend.prolong(&renewal, deadline).unwrap();
    let expires_at_ms = bench.by_key(&key).unwrap().expires_at_ms;
    assert!(matches!(extended, RenewOutcome::Renewed { expires_at_ms: at, .. } if at == expires_at_ms));
    assert_eq!(bench.backend.release_by(&grant.lock_id, deadline).unwrap(), ReleaseOutcome::Released);
    assert!(bench.backend.holder(&key, deadline, &never).unwrap().is_none());
    assert_ne!(bench.backend.release_by(&grant.lock_id, deadline).unwrap(), ReleaseOutcome::Released);
    let refused = bench.backend.prolong(&renewal, deadline).unwrap();
    assert!(matches!(refused, RenewOutcome::Lost(_)));
}
