//! Capabilities, keys and lock ids.

use syncguard::backend::{Attempt, LockBackend, Lookup, Renewal};
use syncguard::{CancelToken, ErrorCode, LockError};

use crate::bench::{Bench, TTL};

pub(crate) fn capabilities_are_the_same_before_and_after_operations(bench: &Bench<'_>) {
    fn all_five<B: LockBackend + ?Sized>(backend: &B, key: &str) {
        let never = CancelToken::never();
        let grant = backend.acquire(key, TTL, &never).unwrap().acquired().unwrap();
        let _ = backend.extend(&grant.lock_id, TTL, &never).unwrap();
        assert!(backend.is_locked(key, &never).unwrap());
        assert!(backend.lookup(Lookup::Key(key), &never).unwrap().is_some());
        backend.release(&grant.lock_id, &never).unwrap();
    }
    let before = bench.backend.capabilities();
    assert!(!before.backend.is_empty() && before.supports_fencing);
    assert!(["server", "client"].contains(&before.time_authority.as_str()));
    all_five(&*bench.backend, &Bench::key());
    all_five(&bench.backend, &Bench::key());
    assert_eq!(bench.backend.capabilities(), before);
    assert_eq!(bench.harness.backend().capabilities(), before);
}

pub(crate) fn canonically_equal_keys_are_one_lock(bench: &Bench<'_>) {
    let base = Bench::key();
    let (composed, decomposed) = (format!("{base}caf\u{e9}"), format!("{base}cafe\u{301}"));
    let grant = bench.acquire(&composed);
    assert!(bench.try_acquire(&decomposed).unwrap().acquired().is_none());
    assert!(bench.is_locked(&composed) && bench.is_locked(&decomposed));
    assert_eq!(bench.by_key(&composed), bench.by_key(&decomposed));
    assert!(bench.release(&grant.lock_id));
    assert_eq!(bench.acquire(&decomposed).fence.get(), 2, "they share a counter");
}

pub(crate) fn keys_are_measured_in_bytes_of_their_normal_form(bench: &Bench<'_>) {
    let base = Bench::key();
    let room = 512 - base.len();
    let longest = format!("{base}{}", "x".repeat(room));
    let grant = bench.acquire(&longest);
    assert!(bench.is_locked(&longest) && bench.release(&grant.lock_id));

    // Three bytes each as they come, two once normalised.
    let accents = format!("{base}{}{}", "x".repeat(room % 2), "e\u{301}".repeat(room / 2));
    assert!(accents.len() > 512);
    let grant = bench.acquire(&accents);
    assert!(bench.extend(&grant.lock_id).is_some() && bench.release(&grant.lock_id));
    for long in [format!("{longest}x"), format!("{accents}e\u{301}"), "x".repeat(2000)] {
        assert_eq!(bench.try_acquire(&long).unwrap_err().code(), ErrorCode::InvalidArgument);
    }
}

pub(crate) fn what_cannot_be_a_key_is_refused_everywhere(bench: &Bench<'_>) {
    let never = CancelToken::never();
    let (backend, id) = (&bench.backend, Bench::id());
    let marker = "MARKER".repeat(400);
    for key in ["", "a\0b", marker.as_str(), "e\u{301}".repeat(257).as_str()] {
        let deadline = bench.deadline();
        let attempt = Attempt::new(key, &id, TTL, deadline);
        let renewal = Renewal::new(key, &id, syncguard::Fence::new(1).unwrap(), TTL);
        let errors: [LockError; 7] = [
            backend.acquire(key, TTL, &never).unwrap_err(),
            backend.attempt(&attempt, &never).unwrap_err(),
            backend.is_locked(key, &never).unwrap_err(),
            backend.holder(key, deadline, &never).unwrap_err(),
            backend.lookup(Lookup::Key(key), &never).unwrap_err(),
            backend.lookup_raw(Lookup::Key(key), &never).unwrap_err(),
            // A renewal may refuse the key or, not needing it, find no such lease.
            match backend.renew(&[renewal], deadline).remove(0) {
                Err(error) => error,
                Ok(_) => LockError::new(ErrorCode::InvalidArgument),
            },
        ];
        for error in errors {
            assert_eq!(error.code(), ErrorCode::InvalidArgument);
            assert!(!error.is_outcome_unknown());
            assert!(!format!("{error} {error:?}").contains("MARKER"), "an error shows no key");
        }
    }
}

pub(crate) fn keys_with_hostile_characters_are_ordinary_keys(bench: &Bench<'_>) {
    let base = Bench::key();
    let tails = [
        "'",
        "''",
        "\\",
        "\\'",
        "\\\\",
        "\"",
        "`",
        "$1",
        "$$",
        "%s",
        "%",
        "_",
        ";",
        "--",
        "/*",
        "*/",
        "?",
        "\n",
        "\r\n",
        "\t",
        "\u{1}",
        "\u{7f}",
        " ",
        "{}",
        "'; DROP TABLE x; --",
        "E'\\x41'",
        "\u{1F512}",
        "\u{200b}",
        "\u{202e}",
        "\u{ffff}",
        "\u{10ffff}",
        "\u{5d0}\u{5d1}",
        "fence:",
        ":",
    ];
    let grants: Vec<_> = tails
        .iter()
        .map(|tail| {
            let key = format!("{base}{tail}");
            let grant = bench.acquire(&key);
            assert_eq!(grant.fence.get(), 1, "{tail:?} is a key of its own");
            assert_eq!(bench.raw(&key).unwrap().key, key);
            (key, grant)
        })
        .collect();
    for (key, grant) in grants {
        assert!(bench.is_locked(&key), "{key:?}");
        assert!(bench.release(&grant.lock_id) && !bench.is_locked(&key), "{key:?}");
    }
}

pub(crate) fn keys_that_look_alike_are_different_locks(bench: &Bench<'_>) {
    let base = Bench::key();
    let _held = bench.acquire(&base);
    let alike = [
        format!("{base} "),
        format!(" {base}"),
        base.to_uppercase(),
        format!("{base}\u{200b}"),
        format!("fence:{base}"),
        base[..base.len() - 1].to_owned(),
    ];
    for key in alike {
        assert!(!bench.is_locked(&key));
        let grant = bench.acquire(&key);
        assert!(bench.release(&grant.lock_id));
    }
    assert!(bench.is_locked(&base));
}

pub(crate) fn lock_ids_of_the_wrong_form_are_refused_everywhere(bench: &Bench<'_>) {
    let never = CancelToken::never();
    let (key, held) = bench.held();
    let backend = &bench.backend;
    let bad = [
        String::new(),
        held.lock_id[..21].to_owned(),
        format!("{}A", held.lock_id),
        format!("{}+", &held.lock_id[..21]),
        format!("{}/", &held.lock_id[..21]),
        format!("{}=", &held.lock_id[..21]),
        format!("{} ", &held.lock_id[..21]),
        format!("{}\n", &held.lock_id[..21]),
        format!("{}\u{e9}", &held.lock_id[..20]),
        format!("{}'", &held.lock_id[..21]),
    ];
    for id in &bad {
        let deadline = bench.deadline();
        let attempt = Attempt::new(&key, id, TTL, deadline);
        let renewal = Renewal::new(&key, id, syncguard::Fence::new(1).unwrap(), TTL);
        let errors: [LockError; 8] = [
            backend.release(id, &never).unwrap_err(),
            backend.release_by(id, deadline).unwrap_err(),
            backend.extend(id, TTL, &never).unwrap_err(),
            backend.prolong(&renewal, deadline).unwrap_err(),
            backend.lookup(Lookup::LockId(id), &never).unwrap_err(),
            backend.lookup_raw(Lookup::LockId(id), &never).unwrap_err(),
            backend.attempt(&attempt, &never).unwrap_err(),
            backend.renew(&[renewal], deadline).remove(0).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{id:?}");
        }
    }
    assert_eq!(bench.by_key(&key).unwrap().expires_at_ms, held.expires_at_ms);
}

pub(crate) fn hashed_storage_keys_lead_to_the_right_lock(bench: &Bench<'_>) {
    let Some(small) = bench.harness.with_storage_limit(40) else { return };
    let bench = Bench::new(&*small);
    let (long, other) = (format!("{}{}", Bench::key(), "x".repeat(100)), Bench::key() + &"y".repeat(100));
    let (first, second) = (bench.acquire(&long), bench.acquire(&other));
    assert!(bench.is_locked(&long) && bench.is_locked(&other));
    assert!(bench.try_acquire(&long).unwrap().acquired().is_none());
    assert_eq!(bench.raw(&long).unwrap().key, long, "the caller's key is kept beside the digest");
    assert!(bench.extend(&first.lock_id).is_some() && bench.release(&first.lock_id));
    assert!(!bench.is_locked(&long) && bench.is_locked(&other), "the right one is gone");
    assert!(bench.extend(&second.lock_id).is_some());
    assert_eq!((bench.acquire(&long).fence.get(), second.fence.get()), (2, 1), "each has its counter");
}
