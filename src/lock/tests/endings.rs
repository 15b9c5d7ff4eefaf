//! Closing, and last handles.

use super::*;
use std::thread;

#[test]
fn close_tells_holders_releases_leases_and_joins_the_threads() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let guards: Vec<_> = (0..3).map(|n| client.lock(&format!("k{n}")).unwrap()).collect();
    backend.remove("k2");
    let report = client.close(s(30)).unwrap();
    assert_eq!((report.released, report.not_held, report.failed, report.pending), (2, 1, 0, 0));
    assert!(report.is_clean(), "{report:?}");
    for held in guards {
        assert!(held.lost().is_cancelled() && !held.is_held());
        assert_eq!(held.lost_reason(), Some(LostReason::Closed));
        assert_eq!(held.release().unwrap(), ReleaseResult::NotHeld);
    }
    assert_eq!(backend.count("release"), 3);
    assert_eq!(backend.count("close"), 1);
    let again = client.close(s(30)).unwrap();
    assert_eq!((again.released, again.is_clean(), backend.count("close")), (0, true, 1));
    for error in [
        client.lock("x").unwrap_err(),
        client.try_lock("x").unwrap_err(),
        client.acquire("x", s(1)).unwrap_err(),
    ] {
        assert_eq!(error.code(), ErrorCode::Aborted);
        assert!(error.to_string().contains("client is closed"));
    }
}

#[test]
fn close_of_a_client_without_threads_closes_its_backend() {
    let backend = Recorder::manual();
    assert!(client(&backend).close(s(30)).unwrap().is_clean());
    assert_eq!(backend.count("close"), 1);
}

#[test]
fn close_wakes_waiters() {
    let backend = Recorder::manual();
    backend.occupy("k");
    let client = client(&backend);
    let waiters: Vec<_> = (0..3)
        .map(|_| {
            let client = client.clone();
            thread::spawn(move || client.lock_with("k", &LockOptions::new().wait_forever()))
        })
        .collect();
    eventually("all wait", || client.engine().queue.waiting("k") == 3 && backend.count("attempt") == 1);
    assert!(client.close(s(30)).unwrap().is_clean());
    for waiter in waiters {
        assert_eq!(waiter.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
    }
}

#[test]
fn a_grant_that_comes_during_close_is_released() {
    let backend = Recorder::manual();
    let client = client(&backend);
    backend.attempt_gate.shut();
    let waiter = thread::spawn({
        let client = client.clone();
        move || client.lock("k")
    });
    backend.attempt_gate.wait_for_arrival();
    let closer = thread::spawn({
        let client = client.clone();
        move || client.close(s(30))
    });
    eventually("closing", || client.engine().check_open().is_err());
    backend.attempt_gate.open();
    assert_eq!(waiter.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
    let report = closer.join().unwrap().unwrap();
    assert!(report.is_clean() && backend.is_free("k"), "{report:?}");
}

#[test]
fn close_is_bounded_while_a_release_hangs_and_says_what_is_pending() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let held = client.lock("k").unwrap();
    backend.release_gate.shut();
    let report = client.close(ms(50)).unwrap();
    assert_eq!((report.released, report.pending, report.threads_ended), (0, 1, false));
    assert!(held.lost().is_cancelled());
    backend.release_gate.open();
    drop((held, client));
    eventually("the worker ends", || Arc::strong_count(&backend) == 1);
    assert_eq!(backend.count("close"), 1);
}

#[test]
fn close_at_the_same_time_from_many_threads() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let held: Vec<_> = (0..50).map(|n| client.lock(&format!("k{n}")).unwrap()).collect();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| client.close(s(30)).unwrap());
        }
        scope.spawn(move || drop(held));
    });
    assert_eq!((0..50).filter(|n| !backend.is_free(&format!("k{n}"))).count(), 0);
}

#[test]
fn the_threads_end_with_the_last_handle() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let held = client.lock("k").unwrap();
    drop(client);
    assert!(held.is_held());
    drop(held);
    eventually("nobody holds the backend", || Arc::strong_count(&backend) == 1);
}

#[test]
fn pending_releases_are_finished_after_the_last_handle() {
    let backend = Recorder::system();
    let client = client(&backend);
    let held = client.lock("k").unwrap();
    backend.script("release", [Script::Fail(ErrorCode::ServiceUnavailable); 3]);
    held.release().unwrap_err();
    drop(client);
    eventually("released", || backend.is_free("k"));
    eventually("nobody holds the backend", || Arc::strong_count(&backend) == 1);
}

#[test]
fn the_backend_is_dropped_outside_of_an_async_runtime() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for (guards, closed) in [(true, false), (false, false), (true, true)] {
        let backend = Recorder::system();
        let slot = Arc::new(Mutex::new(None));
        *backend.dropped.lock() = Some(Arc::clone(&slot));
        let client = LockClient::with_settings(backend, ClientSettings::default());
        let held = guards.then(|| client.lock("k").unwrap());
        if closed {
            client.close(s(30)).unwrap();
        }
        runtime.block_on(async move {
            drop(client);
            drop(held);
        });
        eventually("dropped elsewhere", || slot.lock().is_some());
        let expected = if guards && !closed { "syncguard-worker" } else { "syncguard-close" };
        assert_eq!(slot.lock().as_deref(), Some(expected));
    }
}

#[test]
fn handles_may_go_in_any_order_on_many_threads() {
    for _ in 0..50 {
        let backend = Recorder::system();
        let client = client(&backend);
        let guards: Vec<_> = (0..8).map(|n| client.lock(&format!("k{n}")).unwrap()).collect();
        thread::scope(|scope| {
            for held in guards {
                scope.spawn(move || drop(held));
            }
            scope.spawn(move || drop(client));
        });
        eventually("nobody holds the backend", || Arc::strong_count(&backend) == 1);
    }
}

#[test]
fn close_inside_an_async_runtime_keeps_the_backend_out_of_it() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let backend = Recorder::manual();
    let client = client(&backend);
    let held = client.lock("k").unwrap();
    let report = runtime.block_on(async { client.close(s(30)).unwrap() });
    assert!(report.is_clean() && report.released == 1, "{report:?}");
    drop(held);
}

#[test]
fn a_guard_that_ends_while_the_client_closes_is_released_by_one_of_them() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for _ in 0..50 {
        let backend = Recorder::system();
        let client = client(&backend);
        let held = client.lock("k").unwrap();
        let closer = thread::spawn(move || client.close(s(30)).unwrap());
        runtime.block_on(async move { drop(held) });
        closer.join().unwrap();
        eventually("released", || backend.is_free("k"));
        assert_eq!(backend.count("release"), 1);
    }
}

#[test]
fn what_a_close_gave_up_does_not_keep_the_worker() {
    let backend = Recorder::system();
    let client = client(&backend);
    // Longer than any test waits: only giving up ends the worker.
    let held = client.lock_with("k", &LockOptions::new().ttl(s(3600))).unwrap();
    backend.script("release", [Script::Fail(ErrorCode::ServiceUnavailable); 1000]);
    let report = client.close(ms(50)).unwrap();
    assert_eq!((report.released, report.pending), (0, 1));
    drop((held, client));
    eventually("the worker ends", || Arc::strong_count(&backend) == 1);
}
