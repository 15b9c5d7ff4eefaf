//! Permits as operators see them, and taking one away.

use std::thread;

use crate::support::leases::while_asleep;
use crate::support::listeners::{patient, wait_for_listener, watched};
use crate::support::{LIMIT, TTL, id, logs, place, wait_until};
use syncguard::backend::Heard;
use syncguard::{
    BrokenLock, CancelToken, ErrorCode, Fence, LockBackend, LockGuard, LockOptions, LostReason,
    ReleaseResult, hash_key,
};

#[test]
fn a_permit_stands_under_its_semaphores_name_with_its_number() {
    let place = place();
    let name = place.key("reports");
    let reports = place.client.semaphore(&name, 3).unwrap();
    let held = [reports.acquire().unwrap(), reports.acquire().unwrap()];
    let lock = place.client.lock(&name).unwrap();
    let operator = place.client.operator();
    let raw = operator.holders_raw(10).unwrap();
    let mut found: Vec<_> = raw.iter().map(|lease| (lease.key.as_str(), lease.permit)).collect();
    let mut expected: Vec<_> = held.iter().map(|permit| (name.as_str(), permit.permit())).collect();
    expected.push((name.as_str(), None));
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found, expected, "no key that nobody wrote");
    for lease in operator.holders(10).unwrap() {
        assert_eq!(lease.key_hash, hash_key(&name));
        assert_eq!(lease.permit.is_none(), lease.lock_id_hash == hash_key(lock.lock_id()));
    }
    // Who looks it up by its id gets the key of its guard, and the number.
    let found = place.client.get_by_id_raw(held[0].lock_id()).unwrap().unwrap();
    assert_eq!((found.key.as_str(), found.permit), (held[0].key(), held[0].permit()));
    assert_eq!(place.client.get_by_key(&name).unwrap().unwrap().permit, None);
}

#[test]
fn a_permit_is_broken_by_name_and_number_and_its_holder_is_told() {
    let place = place();
    let name = place.key("reports");
    let reports = place.client.semaphore(&name, 2).unwrap();
    let (lock, other) = (place.client.lock(&name).unwrap(), reports.acquire().unwrap());
    let held = reports.acquire_with(&crate::support::calls::renewing_often()).unwrap();
    let number = held.permit().unwrap();
    let operator = place.client.operator();
    let log = logs::capture();
    let broken = operator.break_permit(&name, number, "an operator").unwrap();
    let was = broken.was.unwrap();
    assert_eq!((was.fence, was.permit, was.key_hash), (held.fence(), Some(number), hash_key(&name)));
    assert!(broken.fence > held.fence());
    assert_eq!(place.stored.counter(held.key()), i64::try_from(broken.fence.get()).ok());
    let lines = log.of_this_thread();
    let line = lines.iter().find(|line| line.text.contains("an operator")).unwrap();
    assert!(
        line.text.contains(&format!("permit {number} of the semaphore #{}", hash_key(&name))),
        "{}",
        line.text
    );
    assert!(held.lost().wait_timeout(LIMIT));
    assert_eq!(held.lost_reason(), Some(LostReason::RowMissing));
    assert!(lock.is_held() && other.is_held() && place.stored.row(&name).is_some(), "nothing else is");
    assert!(reports.try_acquire().unwrap().unwrap().fence() > broken.fence);

    for number in [0, 1025, u32::MAX] {
        let error = operator.break_permit(&name, number, "a test").unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{number}");
    }
    // A key that only looks like it is a key.
    let lookalike = held.key().to_owned();
    assert_eq!(operator.break_lock(&lookalike, "a test").unwrap().was, None);
}

#[test]
fn a_lease_is_broken_by_its_id_whatever_it_is_and_no_other() {
    let place = place();
    let name = place.key("reports");
    let (permit, lock) =
        (place.client.semaphore(&name, 1).unwrap().acquire().unwrap(), place.client.lock(&name).unwrap());
    let operator = place.client.operator();
    let broken = |id: &str| operator.break_lease(id, "a test").unwrap();
    let fences =
        |broken: Option<BrokenLock>| broken.map(|broken| (broken.was.unwrap().fence, broken.fence.get()));
    assert_eq!(fences(broken(permit.lock_id())), Some((permit.fence(), 2)));
    assert!(place.stored.row(permit.key()).is_none() && place.stored.row(&name).is_some());
    assert_eq!(fences(broken(lock.lock_id())), Some((lock.fence(), 2)));
    // Neither is there any more: nothing is changed, no counter is raised.
    for guard in [&permit, &lock] {
        assert_eq!(broken(guard.lock_id()), None);
        assert_eq!(place.stored.counter(guard.key()), Some(2));
    }
    // One that another client stores under another key than its own.
    let sql = "UPDATE syncguard_locks SET user_key = $1 WHERE key = $2";
    place.stored.write("p:digest", &id("other"), 30_000, 7);
    place.stored.client().execute(sql, &[&name, &"p:digest"]).unwrap();
    assert_eq!(fences(broken(&id("other"))), Some((Fence::new(7).unwrap(), 8)));
    assert_eq!((place.stored.counter("p:digest"), place.stored.row("p:digest")), (Some(8), None));
    assert_eq!(operator.break_lease("short", "a test").unwrap_err().code(), ErrorCode::InvalidArgument);
}

#[test]
fn a_lock_is_broken_under_a_fence_only_while_it_is_held_under_that() {
    let place = place();
    let key = place.key("a");
    let operator = place.client.operator();
    let seen = place.client.acquire(&key, TTL).unwrap().acquired().unwrap();
    place.client.release(&seen.lock_id).unwrap();
    let newer = place.hold(&key);
    let log = logs::capture();
    assert_eq!(operator.break_lock_under(&key, seen.fence, "a test").unwrap(), None);
    assert_eq!(operator.break_lock_under(&place.key("free"), seen.fence, "a test").unwrap(), None);
    assert_eq!((place.stored.counter(&key), place.stored.counter(&place.key("free"))), (Some(2), None));
    assert!(log.of_this_thread().iter().all(|line| !line.text.contains("broken")));
    assert_eq!(place.stored.row(&key).unwrap().lock_id, newer.lock_id, "the newer holder keeps it");
    let broken = operator.break_lock_under(&key, newer.fence, "a test").unwrap().unwrap();
    assert_eq!((broken.was.unwrap().fence, broken.fence.get()), (newer.fence, 3));
    assert_eq!(place.stored.row(&key), None);
}

/// What lets a permit go without its guard.
type LetGo<'a> = (&'a str, Box<dyn Fn(&LockGuard) + 'a>);

#[test]
fn a_permit_that_is_released_or_broken_without_its_guard_calls_who_waits_for_the_semaphore() {
    let _alone = crate::support::alone();
    let place = place();
    let (name, other) = (place.key("reports"), place.named("waiter"));
    let reports = place.client.semaphore(&name, 2).unwrap();
    let operator = place.client.operator();
    let with_token = |guard: &LockGuard| {
        LockBackend::release(&place.client, guard.lock_id(), &CancelToken::new()).unwrap();
    };
    let ways: [LetGo<'_>; 4] = [
        (
            "released by id",
            Box::new(|guard| {
                assert_eq!(place.client.release(guard.lock_id()).unwrap(), ReleaseResult::Released);
            }),
        ),
        ("released by id, with a token", Box::new(with_token)),
        (
            "broken by number",
            Box::new(|guard| drop(operator.break_permit(&name, guard.permit().unwrap(), "a test").unwrap())),
        ),
        ("broken by id", Box::new(|guard| drop(operator.break_lease(guard.lock_id(), "a test").unwrap()))),
    ];
    for (what, let_go) in &ways {
        let held = [reports.acquire().unwrap(), reports.acquire().unwrap()];
        let (watch, heard) = watched(&other, &name);
        wait_until(LIMIT, "a session listens", || watch.is_listening());
        while heard.try_recv().is_ok() {}
        let_go(&held[1]);
        assert_eq!(heard.recv_timeout(LIMIT).unwrap(), Heard::Freed, "{what}");
        assert!(place.stored.row(held[1].key()).is_none() && held[0].is_held(), "{what}");
    }
    // And so a waiter is granted it.
    let mut observer = place.schema.client();
    let held = reports.acquire().unwrap();
    let full = [reports.try_acquire().unwrap(), reports.try_acquire().unwrap()];
    let elsewhere = other.semaphore(&name, 2).unwrap();
    let waits = thread::spawn(move || elsewhere.acquire_with(&patient()));
    wait_for_listener(&mut observer, reports.name());
    place.client.release(held.lock_id()).unwrap();
    assert!(waits.join().unwrap().unwrap().is_held() && full.iter().flatten().count() == 1);
}

#[test]
fn a_raised_limit_is_of_use_at_once_and_a_lowered_one_drains() {
    let place = place();
    let name = place.key("reports");
    let with = |limit: u32| place.client.semaphore(&name, limit).unwrap();
    let mut held: Vec<_> = (0..2).map(|_| with(2).try_acquire().unwrap().unwrap()).collect();
    assert!(with(2).try_acquire().unwrap().is_none());
    // Raised, while others still know the old limit.
    held.push(with(3).try_acquire().unwrap().expect("the third is new"));
    assert_eq!((held[2].permit(), with(2).in_use().unwrap()), (Some(3), 3));
    assert!(with(2).try_acquire().unwrap().is_none() && with(3).try_acquire().unwrap().is_none());
    // A waiter with the old limit gets none of the new ones, and the first of its own.
    let waits = LockOptions::new().timeout(LIMIT);
    let freed = held.remove(0);
    let number = freed.permit();
    let next = while_asleep(|| with(2).acquire_with(&waits).unwrap(), || drop(freed));
    assert_eq!(next.permit(), number);
    held.push(next);
    // Lowered: two must go before a third comes in, whichever they are.
    assert_eq!(with(1).in_use().unwrap(), 3);
    held.sort_by_key(LockGuard::permit);
    while held.len() > 1 {
        assert!(with(1).try_acquire().unwrap().is_none(), "{} hold", held.len());
        drop(held.pop());
    }
    assert!(with(1).try_acquire().unwrap().is_none());
    assert_eq!(with(1).in_use().unwrap(), 1);
    drop(held);
    assert_eq!(with(1).try_acquire().unwrap().unwrap().permit(), Some(1));
}
