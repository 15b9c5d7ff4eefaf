//! is_locked, lookup and the helpers over them: they see, and change nothing.

use syncguard::backend::Lookup;
use syncguard::diagnostics::{get_by_id, get_by_id_raw, get_by_key, get_by_key_raw, owns};
use syncguard::{CancelToken, ErrorCode, hash_key};

use crate::bench::{Bench, JUST_EXPIRED_MS, LONG_EXPIRED_MS, TTL};

pub(crate) fn is_locked_follows_the_lease(bench: &Bench<'_>) {
    let key = Bench::key();
    assert!(!bench.is_locked(&key));
    let grant = bench.acquire(&key);
    assert!(bench.is_locked(&key));
    bench.harness.age(&key, JUST_EXPIRED_MS);
    assert!(bench.is_locked(&key));
    bench.harness.age(&key, LONG_EXPIRED_MS);
    assert!(!bench.is_locked(&key));
    bench.harness.age(&key, -60_000);
    assert!(bench.is_locked(&key));
    assert!(bench.release(&grant.lock_id));
    assert!(!bench.is_locked(&key));
}

pub(crate) fn reading_changes_nothing(bench: &Bench<'_>) {
    let (key, grant) = bench.held();
    let (dead, dead_grant) = bench.held();
    bench.harness.age(&dead, LONG_EXPIRED_MS);
    let (free, before) = (Bench::key(), bench.raw(&key));
    for _ in 0..30 {
        for key in [&key, &dead, &free] {
            bench.is_locked(key);
            let _ = bench.backend.holder(key, bench.deadline(), &CancelToken::never()).unwrap();
            bench.by_key(key);
        }
        for id in [&grant.lock_id, &dead_grant.lock_id] {
            bench.by_id(id);
            let _ = owns(&*bench.backend, id).unwrap();
        }
    }
    assert_eq!(bench.raw(&key), before);
    assert!(bench.harness.has_row(&dead), "an expired row stays unless cleanup was asked for");
    assert_eq!((bench.counter(&key), bench.counter(&free)), (1, 0));
    assert!(!bench.harness.has_row(&free));
}

pub(crate) fn lookup_by_key_and_by_id_find_the_same(bench: &Bench<'_>) {
    let (key, grant) = bench.held();
    let info = bench.by_key(&key).unwrap();
    assert_eq!(bench.by_id(&grant.lock_id).as_ref(), Some(&info));
    assert_eq!(info.key_hash, hash_key(&key));
    assert_eq!(info.lock_id_hash, hash_key(&grant.lock_id));
    assert_eq!((info.fence, info.expires_at_ms), (grant.fence, grant.expires_at_ms));
    assert_eq!(info.expires_at_ms - info.acquired_at_ms, i64::try_from(TTL.as_millis()).unwrap());
    // Fields that an extend leaves alone are the grant's own.
    assert!(bench.extend_to(&grant.lock_id, TTL * 2).is_some());
    let later = bench.by_id(&grant.lock_id).unwrap();
    assert_eq!((later.acquired_at_ms, later.fence), (info.acquired_at_ms, info.fence));
    assert!(later.expires_at_ms > info.expires_at_ms);
}

pub(crate) fn lookup_never_shows_raw_values(bench: &Bench<'_>) {
    let key = format!("MARKER{}", Bench::key());
    let grant = bench.acquire(&key);
    let (info, raw) = (bench.by_key(&key).unwrap(), bench.raw(&key).unwrap());
    for text in [format!("{info:?}"), format!("{raw:?}"), format!("{grant:?}")] {
        assert!(!text.contains("MARKER") && !text.contains(&grant.lock_id), "{text}");
    }
}

pub(crate) fn expired_missing_and_released_leases_look_the_same(bench: &Bench<'_>) {
    let (expired, old) = bench.held();
    bench.harness.age(&expired, LONG_EXPIRED_MS);
    let (released, gone) = bench.held();
    assert!(bench.release(&gone.lock_id));
    for key in [&expired, &released, &Bench::key()] {
        assert!(bench.by_key(key).is_none() && bench.raw(key).is_none());
    }
    for id in [&old.lock_id, &gone.lock_id, &Bench::id()] {
        assert!(bench.by_id(id).is_none());
        let raw = bench.backend.lookup_raw(Lookup::LockId(id), &CancelToken::never()).unwrap();
        assert!(raw.is_none());
    }
    bench.harness.age(&expired, JUST_EXPIRED_MS);
    assert!(bench.by_id(&old.lock_id).is_some(), "within the tolerance it is there");
}

pub(crate) fn raw_lookup_shows_the_normal_key_and_the_id(bench: &Bench<'_>) {
    let base = Bench::key();
    let grant = bench.acquire(&format!("{base}e\u{301}"));
    let normal = format!("{base}\u{e9}");
    let raw = bench.raw(&normal).unwrap();
    assert_eq!((raw.key.as_str(), raw.lock_id.as_str()), (normal.as_str(), grant.lock_id.as_str()));
    assert_eq!(Some(raw.sanitized()), bench.by_key(&normal));
    let by_id = bench.backend.lookup_raw(Lookup::LockId(&grant.lock_id), &CancelToken::never()).unwrap();
    assert_eq!(by_id, Some(raw));
}

pub(crate) fn the_helpers_agree_with_lookup(bench: &Bench<'_>) {
    let (live, grant) = bench.held();
    let (dead, old) = bench.held();
    bench.harness.age(&dead, LONG_EXPIRED_MS);
    let backend = &*bench.backend;
    for (key, id, held) in
        [(&live, &grant.lock_id, true), (&dead, &old.lock_id, false), (&Bench::key(), &Bench::id(), false)]
    {
        assert_eq!(get_by_key(backend, key).unwrap(), bench.by_key(key));
        assert_eq!(get_by_id(backend, id).unwrap(), bench.by_id(id));
        let raw = get_by_key_raw(backend, key).unwrap();
        assert_eq!(raw, bench.raw(key));
        assert_eq!(raw, get_by_id_raw(backend, id).unwrap());
        assert_eq!((raw.is_some(), owns(backend, id).unwrap()), (held, held));
    }
    let codes = [
        get_by_key(backend, "").unwrap_err().code(),
        get_by_key_raw(backend, "").unwrap_err().code(),
        get_by_id(backend, "bad").unwrap_err().code(),
        get_by_id_raw(backend, "bad").unwrap_err().code(),
        owns(backend, "bad").unwrap_err().code(),
    ];
    assert_eq!(codes, [ErrorCode::InvalidArgument; 5]);
}
