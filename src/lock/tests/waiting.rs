//! Attempts, the queue, and how waits end.

use super::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

#[test]
fn contention_is_waited_out_with_one_full_attempt_and_then_looks() {
    let backend = Recorder::system();
    backend.script("attempt", [Script::No]);
    backend.script("holder", [Script::No, Script::No]);
    let options = LockOptions::new().retry_delay(ms(1)).jitter(Jitter::None);
    let guard_ = client(&backend).lock_with("k", &options).unwrap();
    assert_eq!(guard_.key(), "k");
    // A slow machine may also ask for a watch.
    let log: Vec<_> = backend.state.lock().log.iter().copied().filter(|call| *call != "watch").collect();
    assert_eq!(log, ["attempt", "holder", "holder", "holder", "attempt"]);
}

#[test]
fn attempts_are_one_and_the_retries_and_the_error_says_how_many() {
    let backend = Recorder::system();
    backend.occupy("k");
    let options = LockOptions::new().retry_delay(Duration::ZERO).max_retries(3).wait_forever();
    let error = client(&backend).lock_with("k", &options).unwrap_err();
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert!(error.to_string().contains("in 4 attempts"), "{error}");
    assert!(error.to_string().contains("raise max_retries"), "not the time: {error}");
    assert_eq!(error.key(), Some("k"));
    assert_eq!((backend.count("attempt"), backend.count("holder")), (1, 3));
    let none = LockOptions::new().max_retries(0);
    assert!(client(&backend).lock_with("k", &none).unwrap_err().to_string().contains("in 1 attempt:"));
}

#[test]
fn a_stated_timeout_is_waited_out_however_many_tries_that_takes() {
    let backend = Recorder::manual();
    backend.occupy("k");
    let client = client(&backend);
    let start = backend.now();
    let options = LockOptions::new().timeout(s(120)).backoff(Backoff::Fixed).retry_delay(s(5));
    let waiter = thread::spawn(move || client.lock_with("k", &options));
    eventually("the first attempt", || backend.count("attempt") == 1);
    eventually("the end", || {
        if backend.now() < start.after(s(120)) {
            backend.advance(s(2));
        }
        waiter.is_finished()
    });
    let error = waiter.join().unwrap().unwrap_err();
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert!(backend.now() >= start.after(s(120)), "it ended early: {error}");
    assert!(backend.count("holder") > 10, "it went on looking: {error}");
}

#[test]
fn no_pause_is_longer_than_the_timeout_and_no_call_has_a_later_deadline() {
    let backend = Recorder::manual();
    backend.occupy("k");
    let client = client(&backend);
    let start = backend.now();
    let options = LockOptions::new().retry_delay(Duration::MAX).max_retries(u32::MAX).timeout(s(3));
    let waiter = thread::spawn(move || client.lock_with("k", &options));
    eventually("the first attempt", || backend.count("attempt") == 1);
    // The last advance ends the wait, although the pause would be far longer.
    eventually("the end", || {
        if backend.now() < start.after(s(3)) {
            backend.advance(ms(500));
        }
        waiter.is_finished()
    });
    assert_eq!(waiter.join().unwrap().unwrap_err().code(), ErrorCode::AcquisitionTimeout);
    let late = start.after(s(3));
    assert!(backend.state.lock().deadlines.iter().all(|(_, deadline)| *deadline <= late));
}

#[test]
fn a_timeout_of_zero_makes_no_attempt() {
    let backend = Recorder::system();
    // Nor does it prepare one, which could fail with something that says less.
    *backend.refuse_reserve.lock() = true;
    let error = client(&backend).lock_with("k", &LockOptions::new().timeout(Duration::ZERO)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert!(error.to_string().contains("raise timeout"), "not the retries: {error}");
    assert!(backend.state.lock().log.is_empty());
}

#[test]
fn conflicts_are_contention_and_other_errors_come_back_at_once() {
    let backend = Recorder::system();
    backend.script("attempt", [Script::Conflict, Script::Conflict]);
    let options = LockOptions::new().retry_delay(ms(1));
    drop(client(&backend).lock_with("k", &options).unwrap());
    assert_eq!(backend.count("attempt"), 3);
    backend.script("attempt", [Script::Fail(ErrorCode::ServiceUnavailable)]);
    assert_eq!(client(&backend).lock("k").unwrap_err().code(), ErrorCode::ServiceUnavailable);
    assert_eq!(backend.count("attempt"), 4);
    backend.script("attempt", [Script::No]);
    backend.script("holder", [Script::Fail(ErrorCode::AuthFailed)]);
    assert_eq!(client(&backend).lock_with("k", &options).unwrap_err().code(), ErrorCode::AuthFailed);
}

#[test]
fn try_lock_asks_once_and_does_not_queue() {
    let backend = Recorder::system();
    backend.occupy("k");
    assert!(client(&backend).try_lock("k").unwrap().is_none());
    assert_eq!(backend.state.lock().log, ["attempt"]);
}

#[test]
fn sixteen_threads_are_served_in_the_order_they_came() {
    let backend = Recorder::system();
    let client = client(&backend);
    let first = client.lock("k").unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let key: Arc<str> = "k".into();
    let mut threads = Vec::new();
    for n in 0..16 {
        let (client, order) = (client.clone(), Arc::clone(&order));
        threads.push(thread::spawn({
            let client = client.clone();
            move || {
                let options = LockOptions::new().wait_forever().max_retries(1).retry_delay(s(3600));
                let held = client.lock_with("k", &options).unwrap();
                order.lock().push(n);
                held.release().unwrap();
            }
        }));
        eventually("the thread queues", || client.engine().queue.waiting(&key) == n + 1);
    }
    // The first waiter has seen the key taken and sleeps for an hour, unless a release calls it.
    eventually("the first attempt of the queue", || backend.count("attempt") == 2);
    first.release().unwrap();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(*order.lock(), (0..16).collect::<Vec<_>>());
    assert_eq!(client.engine().queue.waiting(&key), 0);
}

#[test]
fn sections_never_overlap() {
    let backend = Recorder::system();
    let client = client(&backend);
    let inside = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let options = LockOptions::new().wait_forever().retry_delay(ms(1));
                    let work = |_: &crate::lock::LockGuard| {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                    };
                    client.with_lock("k", &options, work).unwrap();
                }
            });
        }
    });
    assert_eq!(backend.state.lock().released.len(), 400);
}

#[test]
fn cancel_wakes_the_first_waiter_and_those_behind_it() {
    let backend = Recorder::manual();
    backend.occupy("k");
    let client = client(&backend);
    let (own, shared) = (CancelToken::new(), CancelToken::new());
    let waiters: Vec<_> = (0..3)
        .map(|_| {
            let (client, own) = (client.cancellable(&shared), own.clone());
            thread::spawn(move || client.lock_with("k", &LockOptions::new().wait_forever().cancel(&own)))
        })
        .collect();
    eventually("all wait", || client.engine().queue.waiting("k") == 3 && backend.count("attempt") == 1);
    shared.cancel();
    for waiter in waiters {
        assert_eq!(waiter.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
    }
    own.cancel();
    assert_eq!(
        client.lock_with("k", &LockOptions::new().cancel(&own)).unwrap_err().code(),
        ErrorCode::Aborted
    );
    assert_eq!(backend.count("attempt"), 1, "a fired token: nothing is sent");
}

#[test]
fn a_waiter_that_leaves_hands_its_turn_on() {
    let backend = Recorder::system();
    backend.occupy("k");
    let client = client(&backend);
    let token = CancelToken::new();
    let first = thread::spawn({
        let (client, token) = (client.clone(), token.clone());
        move || client.lock_with("k", &LockOptions::new().wait_forever().retry_delay(s(3600)).cancel(&token))
    });
    eventually("the first waits", || backend.count("attempt") == 1);
    let second = thread::spawn({
        let client = client.clone();
        move || client.lock_with("k", &LockOptions::new().wait_forever().retry_delay(s(3600)))
    });
    eventually("the second queues", || client.engine().queue.waiting("k") == 2);
    backend.remove("k");
    token.cancel();
    assert!(first.join().unwrap().is_err());
    assert!(second.join().unwrap().unwrap().is_held());
}

#[test]
fn a_grant_that_comes_late_is_extended_before_it_is_handed_out() {
    let backend = Recorder::manual();
    let client = client(&backend);
    backend.script("attempt", [Script::Slow(ms(2600))]);
    let options = LockOptions::new().ttl(s(5)).heartbeat(Heartbeat::Off);
    let held = client.try_lock_with("k", &options).unwrap().unwrap();
    assert_eq!(backend.state.lock().log, ["attempt", "extend"]);
    assert_eq!(held.remaining(), s(5));
    assert_eq!(held.expires_at_ms(), backend.expiry("k"));
    drop(held);
    // Not late: half is left.
    backend.script("attempt", [Script::Slow(ms(2500))]);
    let held = client.try_lock_with("k", &options).unwrap().unwrap();
    assert_eq!((backend.count("extend"), held.remaining()), (1, ms(2500)));
    drop(held);
    for answer in [Script::No, Script::Unknown, Script::Fail(ErrorCode::Internal), Script::Slow(s(5))] {
        backend.script("attempt", [Script::Slow(s(3))]);
        backend.script("extend", [answer]);
        assert!(client.try_lock_with("k", &options).unwrap().is_none(), "{answer:?}");
        if matches!(answer, Script::No) {
            backend.remove("k");
        }
        eventually("it is released", || backend.is_free("k"));
    }
}

#[test]
fn who_waits_in_vain_because_of_the_ttl_is_told_so() {
    let backend = Recorder::manual();
    let client = client(&backend);
    backend.script("attempt", [Script::Slow(s(3)), Script::No]);
    backend.script("extend", [Script::No]);
    let options = LockOptions::new().ttl(s(5)).heartbeat(Heartbeat::Off).max_retries(0).wait_forever();
    let cause = |error: LockError| std::error::Error::source(&error).map(ToString::to_string);
    let late = client.lock_with("k", &options).unwrap_err();
    assert_eq!(late.code(), ErrorCode::AcquisitionTimeout);
    assert!(cause(late).unwrap().contains("raise the ttl"));
    let taken = client.lock_with("k", &options).unwrap_err();
    assert_eq!(cause(taken), None, "a holder was in the way, not the ttl");
}

#[test]
fn after_an_unknown_outcome_the_error_has_the_id_and_the_worker_releases_it() {
    for single in [true, false] {
        let backend = Recorder::manual();
        let client = client(&backend);
        backend.script("attempt", [Script::UnknownDone]);
        let error =
            if single { client.acquire("k", s(30)).unwrap_err() } else { client.lock("k").unwrap_err() };
        assert!(error.is_outcome_unknown());
        assert_eq!(error.key(), Some("k"));
        let id = error.lock_id().unwrap().to_owned();
        eventually("the worker releases it", || backend.state.lock().released.contains(&id));
        eventually("the key is free", || backend.is_free("k"));
    }
}

#[test]
fn an_id_that_may_still_arrive_is_released_until_its_lease_would_be_over() {
    let backend = Recorder::manual();
    let (client, reports) = reporting_client(&backend);
    backend.script("attempt", [Script::Unknown]);
    client.acquire("k", s(30)).unwrap_err();
    // The request may wait in the server for an operation's time before its lease begins.
    for _ in 0..30 + 1 + 5 {
        let queue = || client.engine().registry.worker_queue.lock();
        eventually("another try", || queue().in_progress == 0 && queue().releases.next() > backend.now());
        backend.advance(s(1));
    }
    let seen = || client.engine().registry.worker_queue.lock().releases.is_empty();
    eventually("given up after an operation's time, the ttl and the tolerance", seen);
    let tries = backend.count("release");
    assert!(tries >= 5, "{tries}");
    backend.advance(s(100));
    assert_eq!(backend.count("release"), tries);
    assert!(reports.lock().is_empty(), "nothing failed");
}

#[test]
fn bad_arguments_ask_nobody() {
    let backend = Recorder::system();
    let client = client(&backend);
    let code = |error: LockError| error.code();
    assert_eq!(client.lock("").map(drop).map_err(code), Err(ErrorCode::InvalidArgument));
    assert_eq!(client.acquire("k", Duration::ZERO).map(drop).map_err(code), Err(ErrorCode::InvalidArgument));
    assert_eq!(client.release("short").map(drop).map_err(code), Err(ErrorCode::InvalidArgument));
    assert_eq!(client.extend("short", s(1)).map(drop).map_err(code), Err(ErrorCode::InvalidArgument));
    assert_eq!(client.owns("short").map_err(code), Err(ErrorCode::InvalidArgument));
    assert_eq!(client.get_by_key("").map(drop).map_err(code), Err(ErrorCode::InvalidArgument));
    assert!(backend.state.lock().log.is_empty());
}

#[test]
fn the_backend_prepares_renewals_once_and_may_refuse_before_anything_is_held() {
    let backend = Recorder::system();
    let client = client(&backend);
    drop(client.lock_with("k", &LockOptions::new().heartbeat(Heartbeat::Off)).unwrap());
    assert_eq!(backend.reserved.load(Ordering::SeqCst), 0);
    *backend.refuse_reserve.lock() = true;
    assert_eq!(client.lock("k").unwrap_err().code(), ErrorCode::InvalidArgument);
    assert_eq!(backend.count("attempt"), 1);
    *backend.refuse_reserve.lock() = false;
    for _ in 0..3 {
        drop(client.lock("k").unwrap());
    }
    assert_eq!(backend.reserved.load(Ordering::SeqCst), 1);
}

#[test]
fn a_wake_up_from_outside_ends_the_pause_and_costs_no_retry() {
    let backend = Recorder::manual();
    backend.occupy("k");
    let client = client(&backend);
    let waiter = thread::spawn({
        let client = client.clone();
        let options = LockOptions::new().wait_forever().max_retries(1).retry_delay(s(3600));
        move || client.lock_with("k", &options.wake_ups(false))
    });
    eventually("it waits", || backend.count("attempt") == 1);
    for n in 2..6 {
        // Without wake-ups that is no time at which to look, or to have the key watched.
        backend.advance(ms(250));
        client.wake_waiter("k");
        eventually("it asks", || backend.count("attempt") == n);
    }
    backend.remove("k");
    client.wake_waiter("k");
    assert!(waiter.join().unwrap().unwrap().is_held());
    assert_eq!((backend.count("holder"), backend.count("watch")), (0, 0));
}

#[test]
fn an_unknown_outcome_is_never_waited_out() {
    let backend = Recorder::system();
    backend.script("attempt", [Script::No, Script::Unknown]);
    let error = client(&backend).lock_with("k", &LockOptions::new().retry_delay(ms(1))).unwrap_err();
    assert!(error.is_outcome_unknown() && error.lock_id().is_some());
    assert_eq!(backend.count("attempt"), 2);
}

#[test]
fn a_call_that_the_timeout_cut_short_is_the_timeout_of_the_whole() {
    let backend = Recorder::manual();
    backend.script("attempt", [Script::No]);
    backend.script("holder", [Script::Late]);
    let client = client(&backend);
    let waiter = thread::spawn(move || client.lock("k"));
    eventually("the pause", || backend.count("attempt") == 1);
    eventually("the end", || {
        backend.advance(ms(100));
        waiter.is_finished()
    });
    let error = waiter.join().unwrap().unwrap_err();
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
}

#[test]
fn a_sleep_ends_at_the_timeout_by_itself() {
    let backend = Recorder::system();
    backend.occupy("k");
    let client = client(&backend);
    let waiters: Vec<_> = (0..2)
        .map(|_| {
            let client = client.clone();
            let options = LockOptions::new().retry_delay(Duration::MAX).timeout(ms(50));
            thread::spawn(move || client.lock_with("k", &options))
        })
        .collect();
    for waiter in waiters {
        eventually("the first waiter's and the queue's end", || waiter.is_finished());
        assert_eq!(waiter.join().unwrap().unwrap_err().code(), ErrorCode::AcquisitionTimeout);
    }
}

fn long() -> LockOptions {
    LockOptions::new().wait_forever().max_retries(1).retry_delay(s(36_000)).jitter(Jitter::None)
}

#[test]
fn a_long_wait_is_watched_and_what_is_heard_ends_it() {
    let backend = Recorder::manual();
    backend.occupy("k");
    let client = client(&backend);
    let waiter = thread::spawn(move || client.lock_with("k", &long()));
    eventually("it waits", || backend.count("attempt") == 1);
    assert_eq!(backend.count("watch"), 0, "a short wait is not worth it");
    eventually("it has the key watched", || {
        backend.advance(ms(10));
        backend.count("watch") == 1
    });
    let (key, heard) = backend.state.lock().watching[0].clone();
    assert_eq!(key, "k");
    eventually("the look that was due is over", || {
        backend.advance(ms(250));
        backend.count("holder") > 0
    });
    // From here on the clock stands still: no look is due by itself, but for one under way.
    let looks = std::cell::Cell::new(0);
    eventually("it sleeps", || looks.replace(backend.count("holder")) == looks.get());
    heard(Heard::Listening);
    eventually("it looks", || backend.count("holder") > looks.get());
    assert_eq!(backend.count("attempt"), 1, "and finds the key taken");
    for n in 2..5 {
        heard(Heard::Freed);
        eventually("it asks at once", || backend.count("attempt") == n);
    }
    backend.remove("k");
    assert_eq!(backend.watches_over.load(Ordering::SeqCst), 0);
    heard(Heard::Freed);
    assert!(waiter.join().unwrap().unwrap().is_held());
    assert_eq!(backend.watches_over.load(Ordering::SeqCst), 1, "the watch ends with the wait");
}

#[test]
fn only_the_first_of_a_queue_is_watched_for_and_nobody_without_wake_ups() {
    let backend = Recorder::manual();
    backend.occupy("k");
    let client = client(&backend);
    let lock = |options: LockOptions| {
        let client = client.clone();
        thread::spawn(move || client.lock_with("k", &options))
    };
    let deaf = lock(long().wake_ups(false));
    eventually("it waits", || backend.count("attempt") == 1);
    // Either may be the next: each lets go by itself.
    let seconds = [(); 2].map(|()| {
        let client = client.clone();
        thread::spawn(move || drop(client.lock_with("k", &long()).unwrap()))
    });
    eventually("they queue", || client.engine().queue.waiting("k") == 3);
    for _ in 0..20 {
        backend.advance(ms(100));
    }
    assert_eq!(backend.count("watch"), 0);
    backend.remove("k");
    client.wake_waiter("k");
    let first = deaf.join().unwrap().unwrap();
    eventually("the next has the key watched", || {
        backend.advance(ms(10));
        backend.count("watch") == 1
    });
    drop(first);
    for second in seconds {
        second.join().unwrap();
    }
    assert!(backend.count("watch") <= 2);
}

#[test]
fn a_backend_that_cannot_watch_is_asked_again_later() {
    let backend = Recorder::manual();
    backend.occupy("k");
    backend.script("watch", [Script::No, Script::No]);
    let client = client(&backend);
    let waiter = thread::spawn(move || client.lock_with("k", &long()));
    eventually("it is asked", || {
        backend.advance(ms(10));
        backend.count("watch") == 1
    });
    let before = backend.count("holder");
    eventually("it looks", || {
        backend.advance(ms(10));
        backend.count("holder") >= before + 3
    });
    eventually("it is asked again, until it can", || {
        backend.advance(ms(250));
        backend.count("watch") == 3
    });
    let looks = backend.count("holder") - before;
    assert!(looks > 4, "not at every look: {looks}");
    backend.remove("k");
    let heard = backend.state.lock().watching[0].1.clone();
    heard(Heard::Freed);
    assert!(waiter.join().unwrap().unwrap().is_held());
}
