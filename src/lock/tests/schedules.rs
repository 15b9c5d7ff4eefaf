//! The threads of a client in every order that a few hundred seeds give: one runs at a time, time stands still unless the
//! scenario moves it, and a notification that is missing leaves everybody waiting, which fails the run
//! (`docs/adr/0049`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{LockClient, LockOptions, ms, s};
use crate::backend::{ExtendResult, LostReason, ReleaseResult};
use crate::cancel::CancelToken;
use crate::error::ErrorCode;
use crate::memory::{Call, Loss, MemoryBackend};
use crate::sync::simulated::{go, play, until_all_wait};

/// How many schedules; a longer search: `SYNCGUARD_SCHEDULES`.
fn seeds() -> std::ops::Range<u64> {
    let count = std::env::var("SYNCGUARD_SCHEDULES").ok().and_then(|text| text.parse().ok());
    0..count.unwrap_or(150)
}

fn client() -> (MemoryBackend, LockClient) {
    let memory = MemoryBackend::manual();
    (memory.clone(), LockClient::new(memory))
}

fn patient() -> LockOptions {
    LockOptions::new().ttl(s(30)).wait_forever()
}

/// Closes, and sees that nothing is left.
fn end(memory: &MemoryBackend, client: &LockClient) {
    let report = client.close(s(3600)).unwrap();
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(memory.live_leases(), 0);
    assert_eq!(memory.closes(), 1);
}

/// What is played, each a program of some threads.
const SCENARIOS: [(&str, fn()); 14] = [
    (
        "a_guard_that_is_dropped_while_it_is_renewed_leaves_nothing",
        a_guard_that_is_dropped_while_it_is_renewed_leaves_nothing,
    ),
    (
        "a_renewal_that_finds_the_loss_tells_the_holder_once",
        a_renewal_that_finds_the_loss_tells_the_holder_once,
    ),
    (
        "a_deadline_tells_the_holder_while_the_renewal_hangs",
        a_deadline_tells_the_holder_while_the_renewal_hangs,
    ),
    ("a_close_ends_holders_and_waiters", a_close_ends_holders_and_waiters),
    ("two_closes_at_once_both_end", two_closes_at_once_both_end),
    (
        "a_token_that_races_a_grant_leaves_a_guard_or_nothing",
        a_token_that_races_a_grant_leaves_a_guard_or_nothing,
    ),
    (
        "waiters_of_one_key_follow_one_another_without_time",
        waiters_of_one_key_follow_one_another_without_time,
    ),
    ("a_waiter_that_gives_up_passes_its_turn_on", a_waiter_that_gives_up_passes_its_turn_on),
    ("releases_while_time_passes_leave_nothing", releases_while_time_passes_leave_nothing),
    (
        "a_close_ends_waiters_for_what_another_process_holds",
        a_close_ends_waiters_for_what_another_process_holds,
    ),
    (
        "a_token_ends_a_wait_for_what_another_process_holds",
        a_token_ends_a_wait_for_what_another_process_holds,
    ),
    ("what_is_called_at_a_loss_is_called_at_once", what_is_called_at_a_loss_is_called_at_once),
    (
        "a_guard_that_is_dropped_in_a_runtime_is_released_by_the_worker_at_once",
        a_guard_that_is_dropped_in_a_runtime_is_released_by_the_worker_at_once,
    ),
    ("a_client_that_is_dropped_ends_its_threads", a_client_that_is_dropped_ends_its_threads),
];

#[test]
fn every_scenario_ends_well_in_every_schedule() {
    for (name, scenario) in SCENARIOS {
        if let Err(why) = play(seeds(), scenario, None, &mut BTreeSet::new()) {
            panic!("{name}: {why}");
        }
    }
}

/// Notifications that no scenario misses, by their files, and why.
const NOT_MISSED: [(&str, &str); 6] = [
    ("src/lock/close.rs", "the worker is told again by the end of the close"),
    ("src/lock/close.rs", "the same"),
    ("src/lock/close.rs", "the same"),
    ("src/lock/engine.rs", "the worker, which the same step of a manual clock tells, sees what is over, too"),
    ("src/lock/registry.rs", "an earlier deadline: each step of a manual clock tells both threads"),
    ("src/lock/registry.rs", "an earlier renewal: the same"),
];

/// The control: of each place that notifies somebody, the notifications are left out in turn, and some scenario fails.
#[test]
fn a_notification_that_is_left_out_is_missed() {
    let mut places = BTreeSet::new();
    for (name, scenario) in SCENARIOS {
        play(0..40, scenario, None, &mut places).unwrap_or_else(|why| panic!("{name}: {why}"));
    }
    let missed = |place: &String| {
        SCENARIOS
            .iter()
            .any(|(_, scenario)| play(0..40, *scenario, Some(place), &mut BTreeSet::new()).is_err())
    };
    // Those of the backend in memory serve other tests.
    places.retain(|place| !place.starts_with("src/memory/"));
    let not_missed: Vec<_> = places.iter().filter(|place| !missed(place)).collect();
    let files: Vec<_> = not_missed.iter().map(|place| place.split(':').next().unwrap_or_default()).collect();
    assert_eq!(files, NOT_MISSED.map(|(file, _)| file), "of {}: {not_missed:#?}", places.len());
}

fn a_guard_that_is_dropped_while_it_is_renewed_leaves_nothing() {
    let (memory, client) = client();
    let guard = client.lock_with("k", &patient()).unwrap();
    let lost = guard.lost().clone();
    let time = go("time", {
        let memory = memory.clone();
        move || memory.advance(s(11))
    });
    let holder = go("holder", move || drop(guard));
    time.join().unwrap();
    holder.join().unwrap();
    assert!(!lost.is_cancelled(), "it was let go, and not lost");
    end(&memory, &client);
    // Twice where the time of the first call was over before it was sent.
    assert!((1..=2).contains(&memory.calls(Call::Release)));
}

fn a_renewal_that_finds_the_loss_tells_the_holder_once() {
    let (memory, client) = client();
    let calls = Arc::new(AtomicU32::new(0));
    let told = Arc::clone(&calls);
    let options = patient().on_lost(move |reason| {
        assert!(matches!(reason, LostReason::TakenOver { .. }), "{reason:?}");
        told.fetch_add(1, Ordering::SeqCst);
    });
    let guard = client.lock_with("k", &options).unwrap();
    memory.lose_on_next_renewal("k", Loss::TakenOver).unwrap();
    let holder = go("holder", move || {
        assert!(guard.lost().wait_timeout(s(3600)));
        assert!(!guard.is_held());
        guard
    });
    memory.advance(s(11));
    let guard = holder.join().unwrap();
    assert_eq!(guard.release().unwrap(), ReleaseResult::NotHeld);
    let report = client.close(s(3600)).unwrap();
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

fn a_deadline_tells_the_holder_while_the_renewal_hangs() {
    let (memory, client) = client();
    let guard = client.lock_with("k", &patient()).unwrap();
    let gate = memory.hang_next(Call::Renew);
    let holder = go("holder", move || {
        assert!(guard.lost().wait_timeout(s(3600)));
        assert_eq!(guard.lost_reason(), Some(LostReason::Unreachable));
        drop(guard);
    });
    memory.advance(s(11));
    until_all_wait();
    memory.advance(s(20));
    holder.join().unwrap();
    gate.open();
    memory.advance(s(5));
    let report = client.close(s(3600)).unwrap();
    assert!(report.threads_ended, "{report:?}");
}

fn a_close_ends_holders_and_waiters() {
    let (memory, client) = client();
    let guard = client.lock_with("k", &patient()).unwrap();
    let waiters = ["first", "second"].map(|name| {
        let client = client.clone();
        go(name, move || client.lock_with("k", &patient()).map(drop))
    });
    let holder = go("holder", move || {
        assert!(guard.lost().wait_timeout(s(3600)));
        assert_eq!(guard.lost_reason(), Some(LostReason::Closed));
    });
    end(&memory, &client);
    holder.join().unwrap();
    for waiter in waiters {
        // Or it came when all was over.
        assert!(waiter.join().unwrap().is_err());
    }
}

fn two_closes_at_once_both_end() {
    let (memory, client) = client();
    let _guards: Vec<_> = (0..3).map(|n| client.lock_with(&format!("k{n}"), &patient()).unwrap()).collect();
    let other = go("other", {
        let client = client.clone();
        move || client.close(s(3600)).unwrap().threads_ended
    });
    let report = client.close(s(3600)).unwrap();
    assert!(other.join().unwrap() && report.threads_ended);
    assert_eq!((memory.live_leases(), memory.closes()), (0, 1));
}

fn a_token_that_races_a_grant_leaves_a_guard_or_nothing() {
    let (memory, client) = client();
    let guard = client.lock_with("k", &patient()).unwrap();
    let token = CancelToken::new();
    let waiter = go("waiter", {
        let (client, options) = (client.clone(), patient().cancel(&token));
        move || client.lock_with("k", &options)
    });
    let holder = go("holder", move || drop(guard));
    let canceller = go("canceller", move || token.cancel());
    holder.join().unwrap();
    canceller.join().unwrap();
    match waiter.join().unwrap() {
        Ok(guard) => {
            assert!(guard.is_held() && memory.has_row("k"));
            assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
        }
        Err(error) => assert_eq!(error.code(), ErrorCode::Aborted, "{error}"),
    }
    end(&memory, &client);
}

fn waiters_of_one_key_follow_one_another_without_time() {
    let (memory, client) = client();
    let inside = Arc::new(AtomicU32::new(0));
    let workers = ["a", "b", "c"].map(|name| {
        let (client, inside) = (client.clone(), Arc::clone(&inside));
        go(name, move || {
            let guard = client.lock_with("k", &patient()).unwrap();
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two hold it at once");
            assert!(guard.is_held());
            inside.fetch_sub(1, Ordering::SeqCst);
            assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
        })
    });
    for worker in workers {
        worker.join().unwrap();
    }
    end(&memory, &client);
    assert_eq!(memory.counter("k"), Some(3));
}

fn a_waiter_that_gives_up_passes_its_turn_on() {
    let (memory, client) = client();
    let guard = client.lock_with("k", &patient()).unwrap();
    let token = CancelToken::new();
    let first = go("first", {
        let (client, options) = (client.clone(), patient().cancel(&token));
        move || client.lock_with("k", &options).map(drop)
    });
    let second = go("second", {
        let client = client.clone();
        move || client.lock_with("k", &patient()).map(drop)
    });
    let canceller = go("canceller", move || token.cancel());
    let holder = go("holder", move || drop(guard));
    let _ = first.join().unwrap();
    second.join().unwrap().unwrap();
    holder.join().unwrap();
    canceller.join().unwrap();
    end(&memory, &client);
}

fn releases_while_time_passes_leave_nothing() {
    let (memory, client) = client();
    let guards: Vec<_> = (0..4).map(|n| client.lock_with(&format!("k{n}"), &patient()).unwrap()).collect();
    let time = go("time", {
        let memory = memory.clone();
        move || (0..4).for_each(|_| memory.advance(s(9)))
    });
    let holders: Vec<_> = guards.into_iter().map(|guard| go("holder", move || guard.release())).collect();
    time.join().unwrap();
    for holder in holders {
        // Its call may come too late to be sent; the worker goes on with it then.
        let released = holder.join().unwrap();
        assert!(released.map_or_else(|error| error.code() == ErrorCode::NetworkTimeout, |_| true));
    }
    memory.advance(ms(300));
    let report = client.close(s(3600)).unwrap();
    assert!(report.threads_ended && report.pending == 0, "{report:?}");
    assert_eq!(memory.live_leases(), 0);
}

fn a_close_ends_waiters_for_what_another_process_holds() {
    let (memory, client) = client();
    let _theirs = memory.contend("k").unwrap();
    let waiters = ["first", "second"].map(|name| {
        let client = client.clone();
        go(name, move || client.lock_with("k", &patient()).map(drop))
    });
    let report = client.close(s(3600)).unwrap();
    assert!(report.is_clean(), "{report:?}");
    for waiter in waiters {
        assert!(waiter.join().unwrap().is_err());
    }
}

fn a_token_ends_a_wait_for_what_another_process_holds() {
    let (memory, client) = client();
    let _theirs = memory.contend("k").unwrap();
    let token = CancelToken::new();
    let waiter = go("waiter", {
        let (client, options) = (client.clone(), patient().cancel(&token));
        move || client.lock_with("k", &options).map(drop)
    });
    go("canceller", move || token.cancel()).join().unwrap();
    assert_eq!(waiter.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
    assert!(client.close(s(3600)).unwrap().is_clean());
}

fn what_is_called_at_a_loss_is_called_at_once() {
    let (memory, client) = client();
    let called = CancelToken::new();
    let tell = called.clone();
    let guard = client.lock_with("k", &patient().on_lost(move |_| tell.cancel())).unwrap();
    memory.remove("k").unwrap();
    assert!(!matches!(guard.extend(s(30)), Ok(ExtendResult::Extended { .. })));
    assert!(called.wait_timeout(s(3600)));
    drop(guard);
    end(&memory, &client);
}

fn a_guard_that_is_dropped_in_a_runtime_is_released_by_the_worker_at_once() {
    let (memory, client) = client();
    let guard = client.lock_with("k", &patient()).unwrap();
    let waiter = go("waiter", {
        let client = client.clone();
        move || client.lock_with("k", &patient()).map(drop)
    });
    let holder = go("holder", move || {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async move { drop(guard) });
    });
    waiter.join().unwrap().unwrap();
    holder.join().unwrap();
    end(&memory, &client);
}

/// Its threads are the schedule's, which does not end as long as one of them waits.
fn a_client_that_is_dropped_ends_its_threads() {
    let (memory, client) = client();
    drop(client.lock_with("k", &patient()).unwrap());
    drop(client);
    until_all_wait();
    assert_eq!(memory.live_leases(), 0);
}
