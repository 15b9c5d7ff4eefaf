//! A backend that panics in a call that changes nothing, or in one by a lock id alone.

use super::*;
use crate::backend::Lookup;
use crate::error::Result;

#[track_caller]
fn has_failed<T>(result: Result<T>, in_doubt: bool) {
    let error = result.err().expect("a panic is no answer");
    assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Internal, in_doubt), "{error:?}");
}

#[test]
fn a_look_that_panics_in_the_backend_is_an_error_and_the_client_goes_on() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let held = client.lock("k").unwrap();
    let looks: [&dyn Fn() -> Result<bool>; 5] = [
        &|| client.is_locked("k"),
        &|| client.lookup(Lookup::Key("k")).map(|found| found.is_some()),
        &|| client.get_by_key_raw("k").map(|found| found.is_some()),
        &|| client.get_by_id_raw(held.lock_id()).map(|found| found.is_some()),
        &|| client.owns(held.lock_id()),
    ];
    for look in looks {
        backend.script("read", [Script::Panic]);
        has_failed(look(), false);
        assert!(look().unwrap());
    }
}

#[test]
fn a_look_that_panics_while_waiting_ends_the_wait_with_an_error_and_the_queue_goes_on() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let options = LockOptions::new().retry_delay(Duration::ZERO).max_retries(2);
    let lock = |key| client.lock_with(key, &options);
    let held = lock("k").unwrap();
    backend.script("holder", [Script::Panic]);
    has_failed(lock("k"), false);
    assert_eq!(lock("k").unwrap_err().code(), ErrorCode::AcquisitionTimeout);
    drop(held);
    drop(lock("k").unwrap());
    assert!(client.close(s(30)).unwrap().is_clean());
}

#[test]
fn a_release_or_extend_by_the_lock_id_that_panics_in_the_backend_is_an_unknown_outcome() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let granted = client.acquire("k", s(10)).unwrap().acquired().unwrap();
    backend.script("extend", [Script::Panic]);
    has_failed(client.extend(&granted.lock_id, s(20)), true);
    backend.script("release", [Script::Panic]);
    has_failed(client.release(&granted.lock_id), true);
    assert_eq!(client.release(&granted.lock_id).unwrap(), ReleaseResult::Released);
}
