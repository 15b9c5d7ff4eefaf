//! Renewal, loss, extends, and how guards end.

use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

/// Moves the clock in small steps, as time does, and lets the worker keep up with what is due.
pub(super) fn pass(backend: &Recorder, client: &LockClient, time: Duration) {
    let end = backend.now().after(time);
    while backend.now() < end {
        backend.advance(ms(500));
        let idle = || {
            let queue = client.engine().registry.worker_queue.lock();
            queue.renewals.next() > backend.now() && queue.asleep_until.is_some()
        };
        eventually("the worker has done what is due", idle);
    }
}

#[test]
fn a_guard_is_renewed_while_it_lives_and_not_after() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let held = client.lock("k").unwrap();
    pass(&backend, &client, s(300));
    assert!(held.is_held() && !backend.is_free("k"));
    let renewals = backend.count("renew");
    assert!((28..=31).contains(&renewals), "{renewals}");
    assert_eq!(held.expires_at_ms(), backend.expiry("k"));
    assert_eq!(held.release().unwrap(), ReleaseResult::Released);
    backend.advance(s(300));
    assert_eq!(backend.count("renew"), renewals);
    assert!(client.engine().registry.deadlines.lock().guards.is_empty());
}

#[test]
fn many_guards_are_renewed_in_few_calls() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let guards: Vec<_> = (0..10_000).map(|n| client.try_lock(&format!("k{n}")).unwrap().unwrap()).collect();
    backend.advance(s(10));
    eventually("all are renewed", || guards.iter().all(|held| held.remaining() == s(30)));
    let batches = backend.state.lock().batches.clone();
    assert_eq!(batches.iter().sum::<usize>(), 10_000);
    assert_eq!(batches.len(), 20);
    let start = std::time::Instant::now();
    drop(guards);
    let registry = &client.engine().registry;
    assert!(registry.deadlines.lock().guards.is_empty() && registry.worker_queue.lock().renewals.is_empty());
    let _ = start;
}

#[test]
fn a_hung_worker_does_not_delay_the_news_that_the_lease_is_over() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let held = client.lock("k").unwrap();
    let off = client.lock_with("off", &LockOptions::new().heartbeat(Heartbeat::Off)).unwrap();
    backend.renew_gate.shut();
    backend.advance(s(10));
    backend.renew_gate.wait_for_arrival();
    assert!(held.is_held() && !held.lost().is_cancelled());
    backend.advance(s(20));
    assert!(held.lost().wait_timeout(s(30)) && off.lost().wait_timeout(s(30)));
    assert!(!held.is_held() && held.remaining().is_zero());
    assert_eq!(held.lost_reason(), Some(LostReason::Unreachable));
    assert_eq!(off.lost_reason(), Some(LostReason::Expired));
    backend.renew_gate.open();
    eventually("the late answer is in", || backend.rest("k") == Some(s(30)));
    assert!(!held.is_held(), "a late answer revives nothing");
    assert_eq!(held.extend(s(30)).unwrap(), ExtendResult::NotHeld);
}

#[test]
fn a_refused_renewal_tells_the_holder_once() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let (tell, told) = std::sync::mpsc::channel();
    let tell = Mutex::new(tell);
    let options = LockOptions::new().on_lost(move |reason| tell.lock().send(reason).unwrap());
    let held = client.lock_with("k", &options).unwrap();
    backend.remove("k");
    backend.advance(s(10));
    assert_eq!(told.recv_timeout(s(30)).unwrap(), LostReason::RowMissing);
    assert!(held.lost().is_cancelled() && !held.is_held());
    let renewals = backend.count("renew");
    backend.advance(s(60));
    drop(held);
    client.close(s(30)).unwrap();
    assert_eq!(backend.count("renew"), renewals);
    drop(client);
    assert!(told.try_recv().is_err(), "told once");
}

#[test]
fn busy_rows_and_errors_are_retried_before_the_deadline() {
    for script in [Script::No, Script::Fail(ErrorCode::ServiceUnavailable), Script::Panic] {
        let backend = Recorder::manual();
        let client = client(&backend);
        let held = client.lock("k").unwrap();
        let other = client.lock("other").unwrap();
        backend.script("renew", [script, script]);
        pass(&backend, &client, s(20));
        assert!(held.remaining() >= s(20) && other.is_held(), "{script:?}");
        let batches = backend.state.lock().batches.clone();
        // A busy row goes alone, until it is renewed.
        let alone = if matches!(script, Script::No) { 1 } else { 2 };
        assert_eq!(batches[1], alone, "{script:?} {batches:?}");
    }
}

#[test]
fn cancelling_the_lost_token_only_wakes_those_who_wait() {
    let backend = Recorder::manual();
    let held = client(&backend).lock("k").unwrap();
    held.lost().cancel();
    assert!(held.is_held() && held.lost_reason().is_none());
    assert_eq!(held.release().unwrap(), ReleaseResult::Released);
}

#[test]
fn an_extend_moves_the_deadline_and_the_ttl_of_renewals() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let held = client.lock("k").unwrap();
    let extended = held.extend(s(60)).unwrap();
    let expires_at_ms = backend.expiry("k");
    assert_eq!(extended, ExtendResult::Extended { expires_at_ms });
    assert_eq!((held.remaining(), held.expires_at_ms()), (s(60), expires_at_ms));
    pass(&backend, &client, s(19));
    assert_eq!(backend.count("renew"), 0);
    pass(&backend, &client, s(1));
    assert_eq!((backend.count("renew"), held.remaining()), (1, s(60)));
    assert!(held.extend(s(3)).is_ok());
    assert_eq!(held.remaining(), s(3));
    backend.remove("k");
    assert_eq!(held.extend(s(30)).unwrap(), ExtendResult::NotHeld);
    assert!(held.lost().is_cancelled());
    assert_eq!(held.extend(Duration::ZERO).unwrap_err().code(), ErrorCode::InvalidArgument);
}

#[test]
fn max_hold_ends_the_trust_although_renewals_succeed() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let held = client.lock_with("k", &LockOptions::new().max_hold(s(45))).unwrap();
    pass(&backend, &client, ms(44_500));
    assert!(held.is_held());
    backend.advance(ms(500));
    assert!(held.lost().wait_timeout(s(30)));
    assert_eq!(held.lost_reason(), Some(LostReason::MaxHold));
    drop(held);
    assert!(backend.is_free("k"), "the drop releases it all the same");
}

#[test]
fn a_guard_that_is_released_while_its_renewal_is_in_flight_stays_released() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let held = client.lock("k").unwrap();
    let token = held.lost().clone();
    backend.renew_gate.shut();
    backend.advance(s(10));
    backend.renew_gate.wait_for_arrival();
    assert_eq!(held.release().unwrap(), ReleaseResult::Released);
    backend.renew_gate.open();
    eventually("the worker is back", || client.engine().registry.worker_queue.lock().asleep_until.is_some());
    let registry = &client.engine().registry;
    assert!(registry.worker_queue.lock().renewals.is_empty() && registry.deadlines.lock().by_time.is_empty());
    assert!(!token.is_cancelled(), "a released lease is not lost");
}

#[test]
fn a_failed_release_returns_its_error_and_the_worker_goes_on() {
    let backend = Recorder::manual();
    let (client, reports) = reporting_client(&backend);
    let held = client.lock("k").unwrap();
    backend.script("release", [Script::Fail(ErrorCode::NetworkTimeout); 3]);
    let error = held.release().unwrap_err();
    assert_eq!((error.code(), error.key()), (ErrorCode::NetworkTimeout, Some("k")));
    assert!(error.lock_id().is_some());
    eventually("the worker has released it", || {
        backend.advance(ms(100));
        backend.is_free("k")
    });
    assert_eq!(backend.count("release"), 4);
    assert!(reports.lock().is_empty(), "the caller was told already");
}

#[test]
fn a_failed_drop_is_reported_once_and_the_worker_goes_on() {
    for own in [false, true] {
        let backend = Recorder::manual();
        let (client, options, told, silent) = reporting_to(own, &backend);
        let held = client.lock_with("k", &options).unwrap();
        let id = held.lock_id().to_owned();
        backend.script("release", [Script::Fail(ErrorCode::NetworkTimeout), Script::Panic, Script::Unknown]);
        drop(held);
        eventually("the worker has released it", || {
            backend.advance(ms(100));
            backend.is_free("k")
        });
        assert!(silent.lock().is_empty());
        let told = told.lock();
        assert_eq!(told.len(), 1);
        assert_eq!(told[0].0, ErrorCode::NetworkTimeout);
        assert_eq!((told[0].1.key.as_str(), &told[0].1.lock_id), ("k", &id));
        assert_eq!(told[0].1.source, ReleaseSource::Drop);
    }
}

#[test]
fn a_guard_that_ends_releases_its_own_id_once_and_what_was_refused_releases_nothing() {
    for drop_it in [true, false] {
        let backend = Recorder::manual();
        let client = client(&backend);
        backend.occupy("taken");
        let held = client.lock("k").unwrap();
        let id = held.lock_id().to_owned();
        if drop_it {
            drop(held);
        } else {
            assert_eq!(held.release().unwrap(), ReleaseResult::Released);
        }
        drop(client.try_lock("taken").unwrap());
        drop(client.acquire("taken", s(30)).unwrap());
        client.close(s(30)).unwrap();
        assert_eq!(backend.state.lock().released, [id]);
        assert_eq!(backend.count("release"), 1);
    }
}

#[test]
fn a_failed_release_of_the_helper_reaches_the_calls_own_handler_or_the_clients() {
    for own in [false, true] {
        let backend = Recorder::manual();
        let (client, options, told, silent) = reporting_to(own, &backend);
        backend.script("release", [Script::Fail(ErrorCode::ServiceUnavailable)]);
        assert_eq!(client.with_lock("k", &options, |_| 7).unwrap(), 7);
        assert!(silent.lock().is_empty());
        assert_eq!(told.lock().len(), 1);
        assert_eq!(told.lock()[0].1.source, ReleaseSource::Helper);
    }
}

#[test]
fn a_lock_that_was_gone_already_is_no_failure() {
    let backend = Recorder::manual();
    let (client, reports) = reporting_client(&backend);
    let held = client.lock("k").unwrap();
    backend.remove("k");
    drop(held);
    let held = client.lock("k").unwrap();
    backend.remove("k");
    assert_eq!(held.release().unwrap(), ReleaseResult::NotHeld);
    assert!(reports.lock().is_empty());
    assert_eq!(backend.count("release"), 2, "each asked once");
}

#[test]
fn drop_leaves_the_release_to_the_worker_while_unwinding_and_in_an_async_runtime() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let held = client.lock("k").unwrap();
    let result = catch_unwind(AssertUnwindSafe(|| {
        let _held = held;
        std::panic::panic_any("on purpose");
    }));
    assert!(result.is_err());
    eventually("released after the panic", || backend.is_free("k"));
    let held = client.lock("k").unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async move { drop(held) });
    eventually("released from the runtime", || backend.is_free("k"));
}

#[test]
fn with_lock_returns_its_value_whatever_the_release_does() {
    let backend = Recorder::manual();
    let (client, reports) = reporting_client(&backend);
    backend.script("release", [Script::Fail(ErrorCode::ServiceUnavailable)]);
    let value = client.with_lock("k", &LockOptions::new(), |held| held.fence().get()).unwrap();
    assert_eq!(value, 1);
    assert_eq!(reports.lock()[0].1.source, ReleaseSource::Helper);
}

#[test]
fn with_lock_releases_before_a_panic_goes_on() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let result = catch_unwind(AssertUnwindSafe(|| {
        client.with_lock("k", &LockOptions::new(), |_| std::panic::panic_any(7))
    }));
    assert_eq!(*result.unwrap_err().downcast::<i32>().unwrap(), 7);
    assert!(backend.is_free("k"));
    assert_eq!(backend.count("release"), 1);
    // Not by the worker, which would be a moment later.
    assert_eq!(backend.state.lock().released_on, [std::thread::current().id()]);
}

#[test]
fn a_cancelled_holder_still_lets_go() {
    let backend = Recorder::manual();
    let token = CancelToken::new();
    let held =
        client(&backend).cancellable(&token).lock_with("k", &LockOptions::new().cancel(&token)).unwrap();
    token.cancel();
    assert!(held.is_held());
    drop(held);
    assert!(backend.is_free("k"));
}

#[test]
fn a_leaked_lease_stays_and_is_not_renewed() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let grant = client.lock("k").unwrap().leak();
    backend.advance(s(10));
    client.close(s(30)).unwrap();
    assert_eq!((backend.count("release"), backend.count("renew")), (0, 0));
    assert_eq!(backend.row("k").unwrap().lock_id, grant.lock_id);
}

#[test]
fn min_hold_keeps_the_key_without_keeping_the_caller() {
    // Within the ttl, and beyond it: then the lease is lengthened at once.
    for (ttl, extends) in [(60, 0), (5, 1)] {
        let backend = Recorder::manual();
        let client = client(&backend);
        let options = LockOptions::new().ttl(s(ttl)).min_hold(s(20));
        let held = client.lock_with("k", &options).unwrap();
        backend.advance(s(1));
        if ttl == 5 {
            assert_eq!(held.release().unwrap(), ReleaseResult::Released);
        } else {
            drop(held);
        }
        assert_eq!((backend.count("extend"), backend.count("release")), (extends, 0));
        backend.advance(ms(18_900));
        assert!(!backend.is_free("k"));
        backend.advance(ms(100));
        eventually("free at the end of min_hold", || backend.count("release") == 1 && backend.is_free("k"));
    }
}

#[test]
fn a_client_that_ends_cuts_the_lease_to_its_min_hold() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let held = client.lock_with("k", &LockOptions::new().ttl(s(60)).min_hold(s(20))).unwrap();
    drop(held);
    drop(client);
    // With the tolerance that is exactly the end of min_hold.
    eventually("cut", || backend.rest("k") == Some(s(19)));
}

#[test]
fn callbacks_may_panic_and_may_use_and_drop_the_client() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let inner = client.clone();
    let slot: Arc<Mutex<Option<crate::lock::LockGuard>>> = Arc::default();
    let taken = Arc::clone(&slot);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let see = Arc::clone(&seen);
    let options = LockOptions::new().on_lost(move |_| {
        let other = inner.try_lock("other").map(drop).is_ok();
        let own = taken.lock().take().is_some();
        let report = inner.clone().close(s(30)).unwrap();
        see.lock().push((other, own, report.pending));
        std::panic::panic_any("on purpose");
    });
    *slot.lock() = Some(client.lock_with("k", &options).unwrap());
    drop(options);
    backend.remove("k");
    drop(client);
    backend.advance(s(10));
    eventually("called", || !seen.lock().is_empty());
    assert_eq!(*seen.lock(), [(true, true, 0)]);
    eventually("everything is gone", || Arc::strong_count(&backend) == 1);
    assert!(thread::current().name().is_some());
}

#[test]
fn a_guard_shows_neither_its_key_nor_its_id() {
    let backend = Recorder::manual();
    let held = client(&backend).lock("MARKER").unwrap();
    let text = format!("{held:?} {:?}", client(&backend));
    assert!(!text.contains("MARKER") && !text.contains(held.lock_id()), "{text}");
}

#[test]
fn guards_and_clients_may_go_anywhere() {
    fn check<T: Send + Sync + 'static>() {}
    check::<crate::lock::LockGuard>();
    check::<LockClient>();
    check::<LockOptions>();
}

#[test]
fn a_lost_guard_that_is_still_there_is_not_named_as_the_holder() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let lost = client.lock_with("k", &LockOptions::new().heartbeat(Heartbeat::Off)).unwrap();
    let wait = LockOptions::new().retry_delay(Duration::ZERO).max_retries(1);
    let error = client.lock_with("k", &wait).unwrap_err().to_string();
    assert!(error.contains("this very thread"), "{error}");
    let held = client.engine().registry.deadlines.lock().guards.values().next().unwrap().clone();
    held.lease.lock().lose(LostReason::RowMissing);
    assert!(!lost.is_held());
    let error = client.lock_with("k", &wait).unwrap_err().to_string();
    assert!(!error.contains("this very thread"), "{error}");
}

#[test]
fn a_release_that_panics_in_the_backend_goes_to_the_worker_and_is_told() {
    for dropped in [false, true] {
        let backend = Recorder::manual();
        let (client, reports) = reporting_client(&backend);
        let held = client.lock("k").unwrap();
        backend.script("release", [Script::Panic]);
        if dropped {
            drop(held);
            assert_eq!(reports.lock()[0].0, ErrorCode::Internal, "told at once");
        } else {
            let error = held.release().unwrap_err();
            assert!(error.is_outcome_unknown() && error.lock_id().is_some(), "{error:?}");
        }
        eventually("the worker has released it", || {
            backend.advance(ms(100));
            backend.is_free("k")
        });
        assert_eq!(backend.count("release"), 2);
        assert!(client.close(s(30)).unwrap().is_clean());
    }
}

#[test]
fn an_acquire_that_panics_in_the_backend_is_an_error_and_what_it_may_have_taken_is_released() {
    let backend = Recorder::manual();
    let client = client(&backend);
    backend.script("attempt", [Script::Panic]);
    let error = client.lock("k").unwrap_err();
    assert_eq!(error.code(), ErrorCode::Internal);
    assert!(error.is_outcome_unknown() && error.lock_id().is_some(), "{error:?}");
    eventually("the worker has asked for its release", || backend.count("release") >= 1);
    drop(client.lock("k").unwrap());
    assert!(client.close(s(30)).unwrap().is_clean() && backend.is_free("k"));
}

#[test]
fn an_extend_that_panics_in_the_backend_is_an_error_and_the_guard_trusts_neither_end() {
    let backend = Recorder::manual();
    let held = client(&backend).lock_with("k", &LockOptions::new().ttl(s(60)).heartbeat(Heartbeat::Off));
    let held = held.unwrap();
    backend.script("extend", [Script::Panic]);
    let error = held.extend(s(10)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Internal);
    assert!(error.is_outcome_unknown() && error.lock_id().is_some(), "{error:?}");
    assert!(held.remaining() <= s(10), "{:?}", held.remaining());
    assert!(matches!(held.extend(s(60)).unwrap(), ExtendResult::Extended { .. }));
    assert_eq!(held.release().unwrap(), ReleaseResult::Released);
}

#[test]
fn what_a_callback_captured_may_panic_when_it_is_dropped() {
    struct Bomb(Arc<Mutex<u32>>);
    impl Drop for Bomb {
        fn drop(&mut self) {
            *self.0.lock() += 1;
            panic!("in the drop of a captured value");
        }
    }
    let backend = Recorder::manual();
    let dropped = Arc::new(Mutex::new(0));
    let (first, second) = (Bomb(Arc::clone(&dropped)), Bomb(Arc::clone(&dropped)));
    let options = LockOptions::new()
        .on_lost(move |_| drop(Arc::clone(&first.0)))
        .on_release_error(move |_, _| drop(Arc::clone(&second.0)));
    let held = client(&backend).lock_with("k", &options).unwrap();
    drop(options);
    drop(held);
    eventually("both were dropped", || *dropped.lock() == 2);
    assert!(backend.is_free("k"));
}
