//! Tokens.

use syncguard::backend::{Attempt, Lookup, ReleaseOutcome};
use syncguard::{CancelToken, ErrorCode, LockError};

use crate::bench::{Bench, TTL};

pub(crate) fn a_fired_token_aborts_each_operation_without_effect(bench: &Bench<'_>) {
    let parent = CancelToken::new();
    let token = parent.child();
    parent.cancel();
    let (key, grant) = bench.held();
    let (free, id) = (Bench::key(), Bench::id());
    let (backend, deadline) = (&*bench.backend, bench.deadline());
    let before = bench.raw(&key);
    let attempt = Attempt::new(&free, &id, TTL, deadline);
    let errors: [LockError; 10] = [
        backend.acquire(&free, TTL, &token).unwrap_err(),
        backend.attempt(&attempt, &token).unwrap_err(),
        backend.release(&grant.lock_id, &token).unwrap_err(),
        backend.extend(&grant.lock_id, TTL * 2, &token).unwrap_err(),
        backend.is_locked(&key, &token).unwrap_err(),
        backend.holder(&key, deadline, &token).unwrap_err(),
        backend.lookup(Lookup::Key(&key), &token).unwrap_err(),
        backend.lookup(Lookup::LockId(&grant.lock_id), &token).unwrap_err(),
        backend.lookup_raw(Lookup::Key(&key), &token).unwrap_err(),
        backend.lookup_raw(Lookup::LockId(&grant.lock_id), &token).unwrap_err(),
    ];
    for error in errors {
        assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Aborted, false));
        assert_eq!(error.to_string(), "Operation aborted by signal");
    }
    assert_eq!(bench.raw(&key), before);
    assert!(!bench.harness.has_row(&free));
    assert_eq!(bench.counter(&free), 0);
}

pub(crate) fn a_token_that_has_not_fired_changes_nothing(bench: &Bench<'_>) {
    let token = CancelToken::new();
    let key = Bench::key();
    let backend = &bench.backend;
    let grant = backend.acquire(&key, TTL, &token).unwrap().acquired().unwrap();
    assert!(backend.acquire(&key, TTL, &token).unwrap().acquired().is_none());
    assert!(backend.is_locked(&key, &token).unwrap());
    let found = backend.lookup(Lookup::Key(&key), &token).unwrap().unwrap();
    assert_eq!(found.fence, grant.fence);
    let _ = backend.extend(&grant.lock_id, TTL * 2, &token).unwrap();
    assert_eq!(backend.release(&grant.lock_id, &token).unwrap(), ReleaseOutcome::Released);
    token.cancel();
    assert_eq!(backend.is_locked(&key, &token).unwrap_err().code(), ErrorCode::Aborted);
}

pub(crate) fn the_release_of_guards_is_not_cancelled(bench: &Bench<'_>) {
    let token = CancelToken::new();
    let key = Bench::key();
    let grant = bench.backend.acquire(&key, TTL, &token).unwrap().acquired().unwrap();
    token.cancel();
    assert_eq!(bench.backend.release_by(&grant.lock_id, bench.deadline()).unwrap(), ReleaseOutcome::Released);
    assert!(!bench.is_locked(&key));
}
