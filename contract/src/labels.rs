//! Owners and notes: written with the grant, shown for that grant alone. A backend may leave them out.

use syncguard::backend::{
    Attempt, AttemptAll, GrantAll, HeldBy, Label, Moment, PermitAttempt, SharedAttempt,
    generate_shared_lock_id,
};
use syncguard::{CancelToken, ErrorCode, LockInfo};

use crate::bench::{Bench, LONG_EXPIRED_MS, TTL};

fn label() -> Label<'static> {
    Label::new(Some("web-3:4711"), Some("nightly\nb\u{fc}cher"))
}

fn attempt<'a>(bench: &Bench<'_>, key: &'a str, lock_id: &'a str) -> Attempt<'a> {
    Attempt::new(key, lock_id, TTL, bench.deadline())
}

fn who(bench: &Bench<'_>, key: &str) -> Option<HeldBy> {
    bench.backend.who_holds(key, bench.deadline(), &CancelToken::never()).unwrap()
}

fn said(lease: &LockInfo) -> (Option<&str>, Option<&str>) {
    (lease.owner.as_deref(), lease.note.as_deref())
}

fn shown(bench: &Bench<'_>, key: &str) -> (Option<String>, Option<String>) {
    let held = who(bench, key).expect("the key is held");
    (held.lease.owner, held.lease.note)
}

/// A key that is held by a holder who has said so; `None` from a backend that shows no labels.
fn key(bench: &Bench<'_>) -> Option<(String, String)> {
    let (key, id) = (Bench::key(), Bench::id());
    let attempt = attempt(bench, &key, &id).with_label(label());
    let grant = match bench.backend.grant(&attempt, &CancelToken::never()) {
        Ok(grant) => grant.expect("the key is free"),
        // It has no place for labels, and has granted nothing without.
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
            assert!(!bench.is_locked(&key));
            return None;
        }
    };
    let held = who(bench, &key).expect("the key is held");
    assert_eq!(held.lease.fence, grant.acquired.fence);
    assert!(held.remaining.is_none_or(|rest| rest <= TTL));
    match said(&held.lease) {
        (None, None) => None,
        said => {
            assert_eq!(said, (label().owner, label().note));
            Some((key, id))
        }
    }
}

pub(crate) fn a_holder_is_shown_in_its_own_words(bench: &Bench<'_>) {
    assert_eq!(who(bench, &Bench::key()), None);
    let Some((key, id)) = key(bench) else { return };
    // The same attempt again changes nothing, and a release takes them along.
    let again = attempt(bench, &key, &id).with_label(label());
    assert!(bench.backend.grant(&again, &CancelToken::never()).unwrap().is_some());
    assert_eq!(shown(bench, &key).0.as_deref(), label().owner);
    assert!(bench.extend(&id).is_some());
    assert_eq!(shown(bench, &key).0.as_deref(), label().owner);
    assert!(bench.release(&id));
    assert_eq!(who(bench, &key), None);
    let silent = bench.acquire(&key);
    assert_eq!(shown(bench, &key), (None, None));
    assert!(bench.release(&silent.lock_id));
    let noted = Bench::id();
    let attempt = attempt(bench, &key, &noted).with_label(Label::new(None, Some("a note")));
    assert!(bench.backend.grant(&attempt, &CancelToken::never()).unwrap().is_some());
    assert_eq!(shown(bench, &key), (None, Some("a note".to_owned())));
}

pub(crate) fn what_a_holder_said_is_never_shown_for_the_next_one(bench: &Bench<'_>) {
    let Some((key, id)) = key(bench) else { return };
    bench.harness.age(&key, LONG_EXPIRED_MS);
    assert_eq!(who(bench, &key), None, "a dead lease is nobody's");
    let next = bench.acquire(&key);
    assert_eq!(shown(bench, &key), (None, None), "after a takeover");
    assert!(!bench.release(&id));
    assert!(bench.release(&next.lock_id));
    let (key, _) = self::key(bench).expect("labels are shown");
    bench.harness.remove_row(&key);
    let next = bench.acquire(&key);
    assert_eq!(shown(bench, &key), (None, None), "after its row was removed");
    assert!(bench.release(&next.lock_id));
    // Not even for one with the same id.
    let (key, id) = self::key(bench).expect("labels are shown");
    bench.harness.age(&key, LONG_EXPIRED_MS);
    let silent = attempt(bench, &key, &id);
    assert!(bench.backend.grant(&silent, &CancelToken::never()).unwrap().is_some());
    assert_eq!(shown(bench, &key), (None, None), "granted again under its id, by one who says nothing");
}

pub(crate) fn sets_permits_and_readers_are_shown_in_their_holder_s_words(bench: &Bench<'_>) {
    if key(bench).is_none() {
        return;
    }
    let (one, two, ids) = (Bench::key(), Bench::key(), [Bench::id(), Bench::id()]);
    let leases = [(one.as_str(), ids[0].as_str()), (two.as_str(), ids[1].as_str())];
    let never = CancelToken::never();
    let set = AttemptAll::new(&leases, TTL, bench.deadline()).with_label(label());
    if let Ok(GrantAll::Granted(_)) = bench.backend.grant_all(&set, &never) {
        for key in [&one, &two] {
            assert_eq!(shown(bench, key).1.as_deref(), label().note);
        }
        assert!(bench.release(&ids[0]) && bench.release(&ids[1]));
    }
    let (name, id) = (Bench::key(), Bench::id());
    let permit = PermitAttempt::new(&name, 2, &id, TTL, bench.deadline()).with_label(label());
    if bench.backend.grant_permit(&permit, &never).is_ok() {
        assert!(bench.release(&id));
    }
    let (key, id) = (Bench::key(), generate_shared_lock_id().unwrap());
    let reader = attempt(bench, &key, &id).with_label(label());
    if bench.backend.grant_shared(&SharedAttempt::new(reader, TTL), &never).is_ok() {
        assert_eq!(shown(bench, &key), (label().owner.map(str::to_owned), label().note.map(str::to_owned)));
        assert!(bench.release(&id));
        assert_eq!(who(bench, &key), None);
    }
}

pub(crate) fn a_label_that_cannot_be_kept_is_refused_and_changes_nothing(bench: &Bench<'_>) {
    if key(bench).is_none() {
        return;
    }
    for bad in ["x".repeat(1025), "a\0b".to_owned()] {
        for label in [Label::new(Some(&bad), None), Label::new(None, Some(&bad))] {
            let (key, id) = (Bench::key(), Bench::id());
            let attempt = attempt(bench, &key, &id).with_label(label);
            let error = bench.backend.grant(&attempt, &CancelToken::never()).unwrap_err();
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
            assert!(!bench.is_locked(&key) && bench.counter(&key) == 0);
        }
    }
    let late = bench.backend.who_holds(&Bench::key(), Moment::NEVER, &CancelToken::never());
    assert_eq!(late.unwrap(), None);
}
