//! Shared leases: any number of readers, or one writer. A backend without them says so in every call.

use std::time::Duration;

use syncguard::backend::{
    Acquired, Attempt, Grant, Intent, ReleaseOutcome, RenewOutcome, Renewal, SharedAttempt,
    generate_shared_lock_id,
};
use syncguard::{CancelToken, ErrorCode, LockError, Lookup, LostReason, MAX_TTL, Result};

use crate::bench::{Bench, LONG_EXPIRED_MS, TTL, together};

const AT_ONCE: Duration = Duration::ZERO;

fn id() -> String {
    generate_shared_lock_id().unwrap()
}

fn attempt(bench: &Bench<'_>, key: &str, lock_id: &str, ttl: Duration) -> Result<Option<Grant>> {
    attempt_after(bench, (key, lock_id), ttl, AT_ONCE)
}

fn attempt_after(
    bench: &Bench<'_>,
    (key, lock_id): (&str, &str),
    ttl: Duration,
    waited: Duration,
) -> Result<Option<Grant>> {
    let attempt = SharedAttempt::new(Attempt::new(key, lock_id, ttl, bench.deadline()), waited);
    bench.backend.grant_shared(&attempt, &CancelToken::never())
}

fn try_read(bench: &Bench<'_>, key: &str) -> Option<Grant> {
    attempt(bench, key, &id(), TTL).unwrap()
}

fn read(bench: &Bench<'_>, key: &str) -> Grant {
    try_read(bench, key).expect("no writer is in the way")
}

fn writes(bench: &Bench<'_>, key: &str) -> Option<Acquired> {
    bench.try_acquire(key).unwrap().acquired()
}

fn leave(bench: &Bench<'_>, key: &str, grant: &Grant) -> ReleaseOutcome {
    bench.backend.release_shared(key, &grant.acquired.lock_id, bench.deadline()).unwrap()
}

fn renew(bench: &Bench<'_>, key: &str, grants: &[&Grant], ttl: Duration) -> Vec<RenewOutcome> {
    let leases: Vec<Renewal<'_>> = grants.iter().map(|grant| renewal(key, grant, ttl)).collect();
    bench.backend.renew(&leases, bench.deadline()).into_iter().map(Result::unwrap).collect()
}

fn renewal<'a>(key: &'a str, grant: &'a Grant, ttl: Duration) -> Renewal<'a> {
    let acquired = &grant.acquired;
    Renewal::new(key, &acquired.lock_id, acquired.fence, ttl).with_version(grant.version).of_reader()
}

/// A key that nobody has used; `None` from a backend without shared leases.
fn key(bench: &Bench<'_>) -> Option<String> {
    let key = Bench::key();
    match attempt(bench, &key, &id(), TTL) {
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
            None
        }
        Ok(grant) => {
            assert_eq!(leave(bench, &key, &grant.expect("the key is free")), ReleaseOutcome::Released);
            Some(Bench::key())
        }
    }
}

pub(crate) fn readers_share_a_key_and_no_writer_has_it_beside_them(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let writer = bench.acquire(&key);
    assert_eq!(try_read(bench, &key), None);
    assert!(bench.release(&writer.lock_id));
    let (one, other) = (read(bench, &key), read(bench, &key));
    assert_ne!(one.acquired.lock_id, other.acquired.lock_id);
    assert!(one.acquired.fence > writer.fence, "a group is a grant");
    assert_eq!(one.acquired.fence, other.acquired.fence, "and its readers have one fence");
    assert!(writes(bench, &key).is_none() && bench.is_locked(&key));
    assert_eq!(leave(bench, &key, &one), ReleaseOutcome::Released);
    assert!(writes(bench, &key).is_none(), "one is left");
    assert_eq!(leave(bench, &key, &other), ReleaseOutcome::Released);
    assert!(!bench.is_locked(&key));
    let next = bench.acquire(&key);
    assert!(next.fence > other.acquired.fence);
    assert!(bench.release(&next.lock_id));
    assert!(matches!(leave(bench, &key, &one), ReleaseOutcome::NotHeld(_)));
}

pub(crate) fn readers_are_shown_as_such(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let (one, other) = (read(bench, &key), read(bench, &key));
    let never = CancelToken::never();
    let of_key = bench.backend.lookup(Lookup::Key(&key), &never).unwrap().expect("it is held");
    assert!(of_key.shared);
    assert_eq!((of_key.readers, of_key.fence), (Some(2), one.acquired.fence));
    let found = bench.backend.lookup_raw(Lookup::LockId(&other.acquired.lock_id), &never).unwrap();
    let found = found.expect("a reader is found by its id");
    assert_eq!((&found.key, &found.lock_id), (&key, &other.acquired.lock_id));
    assert_eq!((found.shared, found.readers), (true, Some(2)));
    assert_eq!(found.expires_at_ms, other.acquired.expires_at_ms);
    let holder = bench.backend.holder(&key, bench.deadline(), &never).unwrap().expect("it is held");
    assert!(holder.shared);
    let _ = (leave(bench, &key, &one), leave(bench, &key, &other));
    let writer = bench.acquire(&key);
    let holder = bench.backend.holder(&key, bench.deadline(), &never).unwrap().expect("it is held");
    assert!(!holder.shared);
    assert!(bench.release(&writer.lock_id));
    assert!(bench.backend.lookup_raw(Lookup::LockId(&one.acquired.lock_id), &never).unwrap().is_none());
}

pub(crate) fn a_reader_is_extended_and_released_by_its_id(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let (one, other) = (read(bench, &key), read(bench, &key));
    let id = &one.acquired.lock_id;
    let longer = bench.extend(id).expect("it is held");
    assert!(longer >= one.acquired.expires_at_ms);
    let never = CancelToken::never();
    let shorter = bench.backend.extend(id, TTL / 2, &never).unwrap();
    let syncguard::backend::ExtendOutcome::Extended { expires_at_ms } = shorter else {
        panic!("it is held: {shorter:?}")
    };
    assert!(expires_at_ms < longer, "and may be shortened");
    assert!(bench.release(id) && !bench.release(id));
    assert!(bench.extend(id).is_none());
    assert!(bench.is_locked(&key), "the other one stays");
    let id = &other.acquired.lock_id;
    let shorter = bench.backend.extend(id, TTL / 2, &never).unwrap();
    let shown = bench.backend.lookup(Lookup::Key(&key), &never).unwrap().unwrap();
    let syncguard::backend::ExtendOutcome::Extended { expires_at_ms } = shorter else {
        panic!("it is held: {shorter:?}")
    };
    assert!(
        (expires_at_ms..=expires_at_ms + 1000).contains(&shown.expires_at_ms),
        "the key is free when it is over"
    );
    assert!(bench.release(id));
    assert!(!bench.is_locked(&key));
}

pub(crate) fn the_same_attempt_of_a_reader_again_answers_with_its_first_grant(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let own = id();
    let first = attempt(bench, &key, &own, TTL).unwrap().unwrap();
    let again = attempt(bench, &key, &own, TTL * 2).unwrap().unwrap();
    assert_eq!(first.acquired, again.acquired);
    let readers = bench.backend.lookup(Lookup::Key(&key), &CancelToken::never()).unwrap().unwrap().readers;
    assert_eq!(readers, Some(1));
    let elsewhere = attempt(bench, &Bench::key(), &own, TTL).unwrap_err();
    assert_eq!(elsewhere.code(), ErrorCode::Internal, "{elsewhere:?}");
    assert_eq!(leave(bench, &key, &first), ReleaseOutcome::Released);
}

pub(crate) fn a_batch_renews_the_readers_of_a_key_together(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let (one, other) = (read(bench, &key), read(bench, &key));
    let writer_key = Bench::key();
    let plain = bench.acquire(&writer_key);
    let leases = [
        renewal(&key, &one, TTL * 2),
        Renewal::new(&writer_key, &plain.lock_id, plain.fence, TTL),
        renewal(&key, &other, TTL),
    ];
    let answers: Vec<_> =
        bench.backend.renew(&leases, bench.deadline()).into_iter().map(Result::unwrap).collect();
    let end = |at: usize| match answers[at] {
        RenewOutcome::Renewed { expires_at_ms, .. } => expires_at_ms,
        ref lost => panic!("{at}: {lost:?}"),
    };
    assert!(end(0) > end(2) && end(1) > 0);
    let shown = bench.backend.lookup(Lookup::Key(&key), &CancelToken::never()).unwrap().unwrap();
    assert!(shown.expires_at_ms >= end(0), "the group lasts as long as the last of them");
    let short = attempt(bench, &key, &id(), TTL / 4).unwrap().expect("it is shared");
    assert!(matches!(renew(bench, &key, &[&short], TTL / 4)[..], [RenewOutcome::Renewed { .. }]));
    let shown = bench.backend.lookup(Lookup::Key(&key), &CancelToken::never()).unwrap().unwrap();
    assert!(shown.expires_at_ms >= end(0), "whoever asks for less shortens it for nobody");
    assert_eq!(leave(bench, &key, &short), ReleaseOutcome::Released);
    assert_eq!(leave(bench, &key, &one), ReleaseOutcome::Released);
    let shown = bench.backend.lookup(Lookup::Key(&key), &CancelToken::never()).unwrap().unwrap();
    assert!(shown.expires_at_ms <= end(2) + 1000, "and not much longer");
    assert_eq!(renew(bench, &key, &[&one], TTL), [RenewOutcome::Lost(LostReason::RowMissing)]);
    assert_eq!(leave(bench, &key, &other), ReleaseOutcome::Released);
    assert!(bench.release(&plain.lock_id));
}

pub(crate) fn readers_of_a_group_that_is_gone_are_lost(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let (one, other) = (read(bench, &key), read(bench, &key));
    bench.harness.remove_row(&key);
    let gone = RenewOutcome::Lost(LostReason::RowMissing);
    assert_eq!(renew(bench, &key, &[&one, &other], TTL), [gone, gone]);
    assert!(bench.by_id(&one.acquired.lock_id).is_none());
    let newer = read(bench, &key);
    let taken = RenewOutcome::Lost(LostReason::TakenOver { fence: newer.acquired.fence });
    assert!(newer.acquired.fence > one.acquired.fence);
    let alone = bench.backend.prolong(&renewal(&key, &other, TTL), bench.deadline()).unwrap();
    assert_eq!(alone, taken);
    assert!(matches!(leave(bench, &key, &one), ReleaseOutcome::NotHeld(_)));
    assert!(bench.is_locked(&key), "who is lost ends nobody's group");
    assert_eq!(leave(bench, &key, &newer), ReleaseOutcome::Released);
    assert!(!bench.is_locked(&key));
}

pub(crate) fn readers_whose_group_is_over_are_lost_and_the_key_is_free(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let one = read(bench, &key);
    bench.harness.age(&key, LONG_EXPIRED_MS);
    assert!(!bench.is_locked(&key));
    assert!(!matches!(renew(bench, &key, &[&one], TTL)[..], [RenewOutcome::Renewed { .. }]));
    let other = read(bench, &key);
    assert!(other.acquired.fence > one.acquired.fence);
    assert_eq!(leave(bench, &key, &other), ReleaseOutcome::Released);
    assert!(bench.release(&bench.acquire(&key).lock_id));
}

pub(crate) fn a_reader_yields_to_a_writer_that_has_waited_longer(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let reader = read(bench, &key);
    let (writer, long) = (Bench::id(), Duration::from_secs(5));
    let intent = Intent::new(&key, &writer, Duration::from_secs(5), long);
    bench.backend.announce(&intent, bench.deadline()).unwrap();
    assert_eq!(try_read(bench, &key), None);
    let own = id();
    let older = attempt_after(bench, (&key, &own), TTL, Duration::from_secs(3600)).unwrap();
    let older = older.expect("who has waited longer goes first");
    assert_eq!(renew(bench, &key, &[&reader], TTL).len(), 1);
    bench.backend.withdraw(&writer, bench.deadline()).unwrap();
    let newer = read(bench, &key);
    let _ = [&reader, &older, &newer].map(|grant| leave(bench, &key, grant));
    assert!(!bench.is_locked(&key));
    // One that is over counts no more, and one that claims too much not at all.
    for lasts in [Duration::ZERO, Duration::from_secs(3600)] {
        let intent = Intent::new(&key, &writer, Duration::from_secs(5), lasts);
        bench.backend.announce(&intent, bench.deadline()).unwrap();
        let last = read(bench, &key);
        let _ = leave(bench, &key, &last);
    }
}

pub(crate) fn bad_keys_ids_and_ttls_of_readers_are_refused(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let refused = |answer: Result<Option<Grant>, LockError>| {
        assert_eq!(answer.unwrap_err().code(), ErrorCode::InvalidArgument);
    };
    refused(attempt(bench, "", &id(), TTL));
    refused(attempt(bench, &key, "short", TTL));
    refused(attempt(bench, &key, &Bench::id(), TTL));
    refused(attempt(bench, &key, &id(), Duration::ZERO));
    refused(attempt(bench, &key, &id(), MAX_TTL + Duration::from_secs(1)));
    let fired = CancelToken::new();
    fired.cancel();
    let own = id();
    let call = SharedAttempt::new(Attempt::new(&key, &own, TTL, bench.deadline()), AT_ONCE);
    let error = bench.backend.grant_shared(&call, &fired).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Aborted);
    let answer = bench.backend.grant_shared(&call, &CancelToken::new()).unwrap();
    let grant = answer.expect("with a token that does not fire");
    assert_eq!(leave(bench, &key, &grant), ReleaseOutcome::Released);
    assert!(!bench.is_locked(&key));
}

pub(crate) fn racing_readers_and_writers_exclude_each_other(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let outcomes = together(8, |at| {
        let mut granted = 0_u32;
        for _ in 0..20 {
            if at % 4 == 0 {
                let Some(writer) = writes(bench, &key) else { continue };
                let shown = bench.backend.lookup(Lookup::Key(&key), &CancelToken::never()).unwrap();
                assert_eq!(shown.map(|shown| (shown.shared, shown.fence)), Some((false, writer.fence)));
                assert!(bench.release(&writer.lock_id));
            } else {
                let Some(reader) = try_read(bench, &key) else { continue };
                let shown = bench.backend.lookup(Lookup::Key(&key), &CancelToken::never()).unwrap();
                let shown = shown.map(|shown| (shown.shared, shown.fence));
                assert_eq!(shown, Some((true, reader.acquired.fence)));
                assert_eq!(leave(bench, &key, &reader), ReleaseOutcome::Released);
            }
            granted += 1;
        }
        granted
    });
    assert!(outcomes.into_iter().sum::<u32>() > 0);
    assert!(!bench.is_locked(&key));
}
