//! A callback runs beside the operations: whatever it does, and however many events there are, reaches none of them.

use super::*;

#[test]
fn a_callback_that_hangs_delays_nothing_and_what_does_not_fit_is_dropped() {
    let door = Arc::new(Door::default());
    let inside = Arc::clone(&door);
    let options = TelemetryOptions::new(move |_| inside.pass()).queue_capacity(4);
    let backend = with_telemetry(MemoryBackend::manual(), options);
    for _ in 0..100 {
        assert!(!backend.is_locked("k", &never()).unwrap());
    }
    // One may be in the callback's hands beside the four that wait.
    assert!((95..=96).contains(&backend.handle().dropped()), "{}", backend.handle().dropped());
    assert!(!backend.handle().flush(Duration::from_millis(1)), "what waits has not been delivered");
    door.open();
    assert!(backend.handle().flush(LIMIT));
    assert_eq!(backend.handle().delivered() + backend.handle().dropped(), 100);
}

#[test]
fn a_flush_does_not_count_events_that_were_refused_later() {
    let door = Arc::new(Door::default());
    let (entered, arrived) = channel();
    let inside = Arc::clone(&door);
    let options = TelemetryOptions::new(move |_| {
        let _ = entered.send(());
        inside.pass();
    });
    let backend = with_telemetry(MemoryBackend::manual(), options.queue_capacity(1));
    let look = || assert!(!backend.is_locked("k", &never()).unwrap());
    look();
    arrived.recv_timeout(LIMIT).unwrap();
    look();
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| backend.handle().flush(Duration::from_millis(200)));
        for _ in 0..50 {
            look();
        }
        assert!(!flush.join().unwrap(), "two events are not delivered, however many are dropped");
    });
    door.open();
    assert!(backend.handle().flush(LIMIT));
    assert_eq!((backend.handle().delivered(), backend.handle().dropped()), (2, 50));
}

#[test]
fn a_callback_that_panics_fails_nothing_and_is_called_again() {
    let calls = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&calls);
    let options = TelemetryOptions::new(move |_| {
        if counter.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
            std::panic::panic_any(Bomb);
        }
        panic!("the callback panics on every event");
    });
    let backend = with_telemetry(MemoryBackend::manual(), options);
    for n in 1..=10 {
        let id = acquire(&backend, "k");
        assert_eq!(backend.inner().counter("k"), Some(n));
        assert_eq!(backend.release(&id, &never()).unwrap(), syncguard::backend::ReleaseOutcome::Released);
    }
    assert!(backend.handle().flush(LIMIT));
    assert_eq!((backend.handle().panics(), calls.load(Ordering::SeqCst)), (20, 20));
}

#[test]
fn a_callback_may_use_the_backend_it_reports() {
    let slot: Arc<Mutex<Weak<Telemetry<MemoryBackend>>>> = Arc::default();
    let inside = Arc::clone(&slot);
    let options = TelemetryOptions::new(move |event| {
        let backend = inside.lock().unwrap().upgrade();
        if let (Operation::Acquire, Some(backend)) = (event.operation, backend) {
            assert!(backend.is_locked("k", &CancelToken::never()).unwrap());
            assert!(!backend.handle().flush(LIMIT), "a callback cannot wait for itself");
        }
    });
    let backend = Arc::new(with_telemetry(MemoryBackend::manual(), options));
    *slot.lock().unwrap() = Arc::downgrade(&backend);
    let _id = acquire(&backend, "k");
    wait_until("both events", || backend.handle().delivered() == 2);
    assert_eq!(backend.handle().panics(), 0);
}

#[test]
fn a_callback_may_drop_the_last_handle() {
    let slot: Arc<Mutex<Option<Telemetry<MemoryBackend>>>> = Arc::default();
    let (inside, done) = (Arc::clone(&slot), Arc::new(AtomicU64::new(0)));
    let (counter, door) = (Arc::clone(&done), Arc::new(Door::default()));
    let gate = Arc::clone(&door);
    let options = TelemetryOptions::new(move |_| {
        gate.pass();
        drop(inside.lock().unwrap().take());
        counter.fetch_add(1, Ordering::SeqCst);
    });
    let backend = with_telemetry(MemoryBackend::manual(), options.flush_timeout(LIMIT * 100));
    for _ in 0..5 {
        let _ = backend.is_locked("k", &never()).unwrap();
    }
    *slot.lock().unwrap() = Some(backend);
    door.open();
    wait_until("what was queued is still delivered", || done.load(Ordering::SeqCst) == 5);
    // The callback, and with it the thread that owned it, are gone.
    wait_until("the thread ends", || Arc::strong_count(&done) == 1);
}

#[test]
fn the_drop_of_the_last_handle_delivers_what_waits_and_ends_the_thread() {
    let done = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&done);
    let options = TelemetryOptions::new(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
    });
    let backend = with_telemetry(MemoryBackend::manual(), options.flush_timeout(LIMIT));
    let clone = backend.clone();
    for _ in 0..1000 {
        let _ = backend.is_locked("k", &never()).unwrap();
    }
    drop(backend);
    let _ = clone.is_locked("k", &never()).unwrap();
    drop(clone);
    assert_eq!(done.load(Ordering::SeqCst), 1001);
    assert_eq!(Arc::strong_count(&done), 1, "the thread has been joined");
}

#[test]
fn the_drop_of_the_last_handle_does_not_wait_for_a_callback_that_hangs() {
    let (door, calls) = (Arc::new(Door::default()), Arc::new(AtomicU64::new(0)));
    let (inside, counter) = (Arc::clone(&door), Arc::clone(&calls));
    let options = TelemetryOptions::new(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
        inside.pass();
    });
    let backend = with_telemetry(MemoryBackend::manual(), options.flush_timeout(Duration::from_millis(20)));
    for _ in 0..10 {
        let _ = backend.is_locked("k", &never()).unwrap();
    }
    wait_until("the callback hangs", || calls.load(Ordering::SeqCst) == 1);
    drop(backend); // Would never return if it waited.
    door.open();
    wait_until("the thread ends", || Arc::strong_count(&calls) == 1);
    assert_eq!(calls.load(Ordering::SeqCst), 1, "what was given up is not delivered late");
}

#[test]
fn no_thread_is_started_before_the_first_event() {
    let marker = Arc::new(());
    let inside = Arc::clone(&marker);
    let options = TelemetryOptions::new(move |_| {
        let _ = &inside;
    });
    let backend = with_telemetry(MemoryBackend::manual(), options);
    let _ = backend.holder("k", backend.clock().now().after(TTL), &never()).unwrap();
    assert!(backend.handle().flush(Duration::ZERO), "there is nothing to wait for");
    drop(backend);
    assert_eq!(Arc::strong_count(&marker), 1);
}

#[test]
fn with_no_room_everything_is_dropped() {
    let (backend, events) = watched(|options| options.queue_capacity(0));
    let _id = acquire(&backend, "k");
    assert!(backend.handle().flush(LIMIT));
    assert_eq!((backend.handle().dropped(), backend.handle().delivered()), (1, 0));
    drop(backend);
    assert!(events.recv().is_err());
}

#[test]
fn many_threads_lose_no_event_and_count_each_once() {
    let seen = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&seen);
    let options = TelemetryOptions::new(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
    });
    let backend = with_telemetry(MemoryBackend::manual(), options.queue_capacity(64));
    let start = Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                start.wait();
                for _ in 0..2000 {
                    let _ = backend.is_locked("k", &never()).unwrap();
                    if backend.handle().delivered().is_multiple_of(64) {
                        let _ = backend.handle().flush(Duration::from_millis(1));
                    }
                }
            });
        }
    });
    assert!(backend.handle().flush(LIMIT));
    assert_eq!(backend.handle().delivered() + backend.handle().dropped(), 16_000);
    assert_eq!(backend.handle().delivered(), seen.load(Ordering::SeqCst));
}

#[test]
fn handles_that_come_and_go_on_many_threads_end_their_threads() {
    let alive = Arc::new(());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..100 {
                    let marker = Arc::clone(&alive);
                    let options = TelemetryOptions::new(move |_| {
                        let _ = &marker;
                    });
                    let backend = with_telemetry(MemoryBackend::manual(), options.flush_timeout(LIMIT));
                    let clone = backend.clone();
                    std::thread::scope(|inner| {
                        inner.spawn(move || clone.is_locked("k", &never()).unwrap());
                        if round % 2 == 0 {
                            let _ = backend.is_locked("k", &never()).unwrap();
                        }
                        drop(backend);
                    });
                }
            });
        }
    });
    wait_until("all threads have ended", || Arc::strong_count(&alive) == 1);
}

#[test]
fn the_callback_runs_on_one_thread_of_its_own() {
    let (sender, threads): (Sender<_>, _) = channel();
    let named = Arc::new(AtomicBool::new(false));
    let check = Arc::clone(&named);
    let options = TelemetryOptions::new(move |_| {
        let thread = std::thread::current();
        check.store(thread.name() == Some("syncguard-telemetry"), Ordering::SeqCst);
        let _ = sender.send(thread.id());
    });
    let backend = with_telemetry(MemoryBackend::manual(), options);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| backend.is_locked("k", &never()).unwrap());
        }
    });
    let first = threads.recv_timeout(LIMIT).unwrap();
    assert_ne!(first, std::thread::current().id());
    for _ in 0..3 {
        assert_eq!(threads.recv_timeout(LIMIT).unwrap(), first);
    }
    assert!(named.load(Ordering::SeqCst));
}

#[test]
fn what_a_callback_and_a_predicate_captured_may_panic_when_it_is_dropped() {
    for events in [0, 1] {
        let (callback, predicate) = (Bomb, Bomb);
        let options = TelemetryOptions::new(move |_| {
            let _ = &callback;
        });
        let backend = with_telemetry(
            MemoryBackend::manual(),
            options.include_raw_if(move |_| {
                let _ = &predicate;
                true
            }),
        );
        for _ in 0..events {
            assert!(!backend.is_locked("k", &never()).unwrap());
        }
        let handle = backend.handle();
        assert!(handle.flush(LIMIT));
        drop(backend);
        assert_eq!((handle.delivered(), handle.panics()), (events, 0));
        drop(handle);
    }
}
