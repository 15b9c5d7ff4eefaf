//! Permits of a semaphore: leases of which any will do. A backend without them says so in every call.

use std::time::Duration;

use syncguard::backend::{Moment, PermitAttempt, PermitGrant, ReleaseOutcome, RenewOutcome, Renewal};
use syncguard::{CancelToken, ErrorCode, LockError, Lookup, LostReason, MAX_PERMITS, MAX_TTL, Result};

use crate::bench::{Bench, TTL, together};

/// One call for a permit, under an id of its own.
fn try_take(bench: &Bench<'_>, name: &str, limit: u32, lock_id: &str) -> Result<Option<PermitGrant>> {
    let attempt = PermitAttempt::new(name, limit, lock_id, TTL, bench.deadline());
    bench.backend.grant_permit(&attempt, &CancelToken::never())
}

fn take(bench: &Bench<'_>, name: &str, limit: u32) -> Option<PermitGrant> {
    try_take(bench, name, limit, &Bench::id()).unwrap()
}

fn in_use(bench: &Bench<'_>, name: &str, among: u32) -> Result<u32> {
    bench.backend.permits_in_use(name, among, bench.deadline(), &CancelToken::never())
}

fn id(permit: &PermitGrant) -> &str {
    &permit.grant.acquired.lock_id
}

/// A name that nobody has used; `None` from a backend without permits, which knows neither call.
fn name(bench: &Bench<'_>) -> Option<String> {
    let name = Bench::key();
    match (in_use(bench, &name, 1), try_take(bench, &name, 1, &Bench::id())) {
        (Err(count), Err(grant)) => {
            assert_eq!([count.code(), grant.code()], [ErrorCode::InvalidArgument; 2]);
            None
        }
        (count, grant) => {
            assert_eq!(count.unwrap(), 0);
            assert!(bench.release(id(&grant.unwrap().expect("the permit is free"))));
            Some(Bench::key())
        }
    }
}

pub(crate) fn as_many_permits_are_granted_as_the_limit_says(bench: &Bench<'_>) {
    let Some(name) = name(bench) else { return };
    let held: Vec<_> = (0..3).map(|_| take(bench, &name, 3).expect("a permit is free")).collect();
    let mut numbers: Vec<_> = held.iter().map(|permit| permit.number).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [1, 2, 3]);
    assert_eq!((take(bench, &name, 3), in_use(bench, &name, 3).unwrap()), (None, 3));
    let freed = &held[1];
    assert!(bench.release(id(freed)));
    let again = take(bench, &name, 3).expect("one is free again");
    assert_eq!(again.number, freed.number);
    assert_eq!(again.grant.acquired.fence.get(), freed.grant.acquired.fence.get() + 1);
    assert!(!bench.is_locked(&name), "the key of the same name is free");
    assert!(bench.release(&bench.acquire(&name).lock_id));
}

pub(crate) fn a_permit_is_a_lease_under_a_key_of_its_own(bench: &Bench<'_>) {
    let Some(name) = name(bench) else { return };
    let permit = take(bench, &name, 5).unwrap();
    let lease = &permit.grant.acquired;
    let found = bench.backend.lookup_raw(Lookup::LockId(&lease.lock_id), &CancelToken::never());
    let found = found.unwrap().unwrap();
    assert_eq!(found.key, format!("{name}\u{2126}{}", permit.number));
    assert_eq!((found.fence, found.expires_at_ms), (lease.fence, lease.expires_at_ms));
    // No caller can name it.
    assert!(bench.by_key(&found.key).is_none() && !bench.is_locked(&found.key));
    assert!(bench.extend(&lease.lock_id).unwrap() >= lease.expires_at_ms);
    let release = || bench.backend.release_permit(&name, &lease.lock_id, bench.deadline()).unwrap();
    assert_eq!(release(), ReleaseOutcome::Released);
    assert!(matches!(release(), ReleaseOutcome::NotHeld(_)));
}

pub(crate) fn the_same_attempt_for_a_permit_again_answers_with_its_first_grant(bench: &Bench<'_>) {
    let Some(name) = name(bench) else { return };
    let own = Bench::id();
    let first = try_take(bench, &name, 8, &own).unwrap().unwrap();
    for limit in [8, 8, 16] {
        let again = try_take(bench, &name, limit, &own).unwrap().unwrap();
        assert_eq!((again.number, &again.grant.acquired), (first.number, &first.grant.acquired));
    }
    assert_eq!(in_use(bench, &name, 16).unwrap(), 1);
    assert!(bench.release(&own));
    // An id that is another key's is no permit's.
    let (key, held) = bench.held();
    let error = try_take(bench, &name, 8, &held.lock_id).unwrap_err();
    assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Internal, false));
    assert!(bench.is_locked(&key) && in_use(bench, &name, 8).unwrap() == 0);
}

pub(crate) fn permits_beyond_a_lowered_limit_are_counted_and_not_granted(bench: &Bench<'_>) {
    let Some(name) = name(bench) else { return };
    let held: Vec<_> = (0..4).map(|_| take(bench, &name, 4).unwrap()).collect();
    assert_eq!((take(bench, &name, 2), in_use(bench, &name, MAX_PERMITS).unwrap()), (None, 4));
    assert_eq!(in_use(bench, &name, 2).unwrap(), 2);
    for permit in held.iter().filter(|permit| permit.number > 2) {
        assert!(bench.release(id(permit)));
    }
    assert_eq!((take(bench, &name, 2), in_use(bench, &name, MAX_PERMITS).unwrap()), (None, 2));
}

pub(crate) fn what_cannot_be_a_permit_is_refused_without_effect(bench: &Bench<'_>) {
    let Some(free) = name(bench) else { return };
    let refused = |error: LockError| assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    let long = "x".repeat(513);
    for (name, limit) in [(free.as_str(), 0), (&free, MAX_PERMITS + 1), ("", 1), ("a\0", 1), (&long, 1)] {
        refused(try_take(bench, name, limit, &Bench::id()).unwrap_err());
        refused(in_use(bench, name, limit).unwrap_err());
    }
    refused(try_take(bench, &free, 1, "no lock id").unwrap_err());
    for ttl in [Duration::ZERO, MAX_TTL + Duration::from_millis(1)] {
        let own = Bench::id();
        let attempt = PermitAttempt::new(&free, 1, &own, ttl, bench.deadline());
        refused(bench.backend.grant_permit(&attempt, &CancelToken::never()).unwrap_err());
    }
    assert_eq!(in_use(bench, &free, MAX_PERMITS).unwrap(), 0);
    assert_eq!(take(bench, &free, 1).unwrap().grant.acquired.fence.get(), 1);
}

pub(crate) fn a_fired_token_or_a_deadline_ends_a_call_for_a_permit(bench: &Bench<'_>) {
    let Some(name) = name(bench) else { return };
    let (own, fired, never) = (Bench::id(), CancelToken::new(), CancelToken::never());
    fired.cancel();
    let code = |deadline: Moment, token: &CancelToken| {
        let attempt = PermitAttempt::new(&name, 1, &own, TTL, deadline);
        let grant = bench.backend.grant_permit(&attempt, token).unwrap_err();
        let count = bench.backend.permits_in_use(&name, 1, deadline, token).unwrap_err();
        assert!(!grant.is_outcome_unknown());
        (grant.code(), count.code())
    };
    assert_eq!(code(bench.deadline(), &fired), (ErrorCode::Aborted, ErrorCode::Aborted));
    let late = (ErrorCode::NetworkTimeout, ErrorCode::NetworkTimeout);
    assert_eq!(code(bench.backend.clock().now(), &never), late);
    let attempt = PermitAttempt::new(&name, 1, &own, TTL, bench.deadline());
    // One that has not fired changes nothing.
    let permit = bench.backend.grant_permit(&attempt, &CancelToken::new()).unwrap().unwrap();
    assert_eq!((permit.number, permit.grant.acquired.fence.get()), (1, 1));
}

pub(crate) fn permits_are_renewed_under_the_keys_of_their_guards(bench: &Bench<'_>) {
    let Some(name) = name(bench) else { return };
    let permit = take(bench, &name, 1).unwrap();
    let (lease, key) = (&permit.grant.acquired, format!("{name}\u{2126}{}", permit.number));
    let renewal = |version| Renewal::new(&key, &lease.lock_id, lease.fence, TTL).with_version(version);
    let renewed = bench.backend.renew(&[renewal(permit.grant.version)], bench.deadline());
    let Some(Ok(RenewOutcome::Renewed { expires_at_ms, version, .. })) = renewed.into_iter().next() else {
        panic!("a live permit is renewed")
    };
    assert!(expires_at_ms >= lease.expires_at_ms);
    let prolonged = bench.backend.prolong(&renewal(version), bench.deadline()).unwrap();
    assert!(matches!(prolonged, RenewOutcome::Renewed { .. }), "{prolonged:?}");
    // Let go of, and taken by another: a renewal finds the newer fence under the permit's key.
    assert!(bench.release(&lease.lock_id));
    let newer = take(bench, &name, 1).unwrap().grant.acquired;
    let lost = bench.backend.renew(&[renewal(version)], bench.deadline()).pop().unwrap().unwrap();
    assert_eq!(lost, RenewOutcome::Lost(LostReason::TakenOver { fence: newer.fence }));
}

pub(crate) fn of_many_as_many_get_a_permit_as_there_are(bench: &Bench<'_>) {
    let Some(name) = name(bench) else { return };
    for round in 0..5 {
        let mut numbers: Vec<_> =
            together(12, |_| take(bench, &name, 4).map(|permit| (permit.number, permit)))
                .into_iter()
                .flatten()
                .collect();
        numbers.sort_by_key(|(number, _)| *number);
        let granted: Vec<_> = numbers.iter().map(|(number, _)| *number).collect();
        assert_eq!(granted, [1, 2, 3, 4], "round {round}");
        assert!(take(bench, &name, 4).is_none());
        for (_, permit) in &numbers {
            assert_eq!(permit.grant.acquired.fence.get(), round + 1, "a counter for each permit");
            assert!(bench.release(id(permit)));
        }
    }
}
