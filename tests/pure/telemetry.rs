//! The decorator: what it reports, and that nothing a callback does reaches an operation.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod callback;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use syncguard::backend::{Attempt, LockBackend, Lookup, Renewal};
use syncguard::memory::{Call, Fault, Loss};
use syncguard::{
    AcquireResult, CancelToken, ErrorCode, EventResult, LockClient, LockEvent, MemoryBackend, Operation,
    PgLockClient, Reason, Telemetry, TelemetryHandle, TelemetryOptions, hash_key, with_telemetry,
};

const TTL: Duration = Duration::from_secs(30);
const LIMIT: Duration = Duration::from_secs(30);
const UNKNOWN_ID: &str = "AAAAAAAAAAAAAAAAAAAAAA";

fn never() -> CancelToken {
    CancelToken::never()
}

/// A decorated backend and the events that come out of it.
fn watched(
    change: impl FnOnce(TelemetryOptions) -> TelemetryOptions,
) -> (Telemetry<MemoryBackend>, Receiver<LockEvent>) {
    let (sender, receiver) = channel();
    let options = TelemetryOptions::new(move |event| drop(sender.send(event.clone())));
    (with_telemetry(MemoryBackend::manual(), change(options)), receiver)
}

fn next(events: &Receiver<LockEvent>) -> LockEvent {
    events.recv_timeout(LIMIT).expect("an event")
}

fn acquire(backend: &impl LockBackend, key: &str) -> String {
    backend.acquire(key, TTL, &never()).unwrap().acquired().expect("the key is free").lock_id
}

fn outcome(event: &LockEvent) -> (Operation, EventResult, Option<Reason>, Option<ErrorCode>) {
    (event.operation, event.result, event.reason, event.error)
}

/// A door that a test opens for the callback.
#[derive(Default)]
struct Door(Mutex<bool>, Condvar);

impl Door {
    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn pass(&self) {
        drop(self.1.wait_while(self.0.lock().unwrap(), |open| !*open).unwrap());
    }
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < end, "{what}");
        std::thread::yield_now();
    }
}

/// Panics again when it is dropped, as a hostile payload might.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            std::panic::panic_any("a second panic");
        }
    }
}

#[test]
fn the_names_are_those_of_every_client() {
    let operations =
        [Operation::Acquire, Operation::Release, Operation::Extend, Operation::IsLocked, Operation::Lookup];
    assert_eq!(operations.map(Operation::as_str), ["acquire", "release", "extend", "isLocked", "lookup"]);
    assert_eq!([EventResult::Ok, EventResult::Fail].map(EventResult::as_str), ["ok", "fail"]);
    let reasons = [Reason::Locked, Reason::Expired, Reason::NotFound];
    assert_eq!(reasons.map(Reason::as_str), ["locked", "expired", "not-found"]);
}

#[test]
fn each_operation_is_reported_with_its_outcome() {
    use EventResult::{Fail, Ok};
    let (backend, events) = watched(|options| options);
    let expect = |operation, result, reason| {
        assert_eq!(outcome(&next(&events)), (operation, result, reason, None));
    };

    assert!(!backend.is_locked("k", &never()).unwrap());
    expect(Operation::IsLocked, Fail, None);
    let id = acquire(&backend, "k");
    expect(Operation::Acquire, Ok, None);
    assert_eq!(backend.acquire("k", TTL, &never()).unwrap(), AcquireResult::Locked);
    expect(Operation::Acquire, Fail, Some(Reason::Locked));
    assert!(backend.is_locked("k", &never()).unwrap());
    expect(Operation::IsLocked, Ok, None);
    assert!(backend.lookup(Lookup::Key("k"), &never()).unwrap().is_some());
    expect(Operation::Lookup, Ok, None);
    assert!(backend.lookup(Lookup::LockId(UNKNOWN_ID), &never()).unwrap().is_none());
    expect(Operation::Lookup, Fail, None);
    let _ = backend.extend(&id, TTL, &never()).unwrap();
    expect(Operation::Extend, Ok, None);
    backend.inner().age("k", 1500).unwrap();
    let _ = backend.extend(&id, TTL, &never()).unwrap();
    expect(Operation::Extend, Fail, Some(Reason::Expired));
    let _ = backend.release(&id, &never()).unwrap();
    expect(Operation::Release, Fail, Some(Reason::Expired));
    let _ = backend.release(UNKNOWN_ID, &never()).unwrap();
    expect(Operation::Release, Fail, Some(Reason::NotFound));
    let _ = backend.extend(UNKNOWN_ID, TTL, &never()).unwrap();
    expect(Operation::Extend, Fail, Some(Reason::NotFound));
    let id = acquire(&backend, "k");
    expect(Operation::Acquire, Ok, None);
    let _ = backend.release(&id, &never()).unwrap();
    expect(Operation::Release, Ok, None);
}

#[test]
fn the_calls_of_guards_are_reported_like_the_operations_they_stand_for() {
    let (backend, events) = watched(|options| options);
    let deadline = backend.clock().now().after(TTL);
    let id = "BBBBBBBBBBBBBBBBBBBBBB";
    let attempt = Attempt::new("k", id, TTL, deadline);
    let _ = backend.attempt(&attempt, &never()).unwrap();
    assert_eq!(next(&events).operation, Operation::Acquire);

    let leases = [
        Renewal::new("k", id, syncguard::Fence::new(1).unwrap(), TTL),
        Renewal::new("gone", UNKNOWN_ID, syncguard::Fence::new(1).unwrap(), TTL),
        Renewal::new("bad", "no id", syncguard::Fence::new(1).unwrap(), TTL),
    ];
    assert_eq!(backend.renew(&leases, deadline).len(), 3);
    let renewed = next(&events);
    assert_eq!(outcome(&renewed), (Operation::Extend, EventResult::Ok, None, None));
    assert_eq!((renewed.key_hash, renewed.lock_id_hash), (Some(hash_key("k")), Some(hash_key(id))));
    let missing = next(&events);
    assert_eq!(outcome(&missing), (Operation::Extend, EventResult::Fail, Some(Reason::NotFound), None));
    assert_eq!(next(&events).error, Some(ErrorCode::InvalidArgument));
    backend.inner().lose_on_next_renewal("k", Loss::Busy).unwrap();
    let _ = backend.renew(&leases[..1], deadline);
    assert_eq!(outcome(&next(&events)), (Operation::Extend, EventResult::Fail, None, None));

    assert!(backend.holder("k", deadline, &never()).unwrap().is_some(), "and reports nothing");
    let _ = backend.extend(id, TTL, &never()).unwrap();
    assert_eq!(next(&events).operation, Operation::Extend);
    assert!(backend.lookup_raw(Lookup::Key("k"), &never()).unwrap().is_some());
    assert_eq!(next(&events).operation, Operation::Lookup);
    let _ = backend.release_by(id, deadline).unwrap();
    assert_eq!(next(&events).operation, Operation::Release);
    assert!(backend.handle().flush(LIMIT));
    assert!(events.try_recv().is_err(), "nothing else was reported");
}

#[test]
fn an_error_is_a_failure_without_reason_and_with_its_code() {
    let (backend, events) = watched(|options| options);
    backend.inner().fail_all(ErrorCode::ServiceUnavailable);
    let codes = [
        backend.acquire("k", TTL, &never()).unwrap_err().code(),
        backend.release(UNKNOWN_ID, &never()).unwrap_err().code(),
        backend.extend(UNKNOWN_ID, TTL, &never()).unwrap_err().code(),
        backend.is_locked("k", &never()).unwrap_err().code(),
        backend.lookup(Lookup::Key("k"), &never()).unwrap_err().code(),
    ];
    for code in codes {
        let event = next(&events);
        assert_eq!((event.result, event.reason, event.error), (EventResult::Fail, None, Some(code)));
    }
    backend.inner().heal();
    backend.inner().fail_next(Call::Acquire, Fault::lost_answer(ErrorCode::NetworkTimeout));
    assert!(backend.acquire("k", TTL, &never()).unwrap_err().is_outcome_unknown());
    assert_eq!(next(&events).error, Some(ErrorCode::NetworkTimeout));
}

#[test]
fn events_carry_hashes_and_no_raw_values() {
    let (backend, events) = watched(|options| options);
    let id = acquire(&backend, "MARKER");
    let _ = backend.release(&id, &never()).unwrap();
    let (taken, released) = (next(&events), next(&events));
    assert_eq!(taken.key_hash.as_deref(), Some(hash_key("MARKER").as_str()));
    assert_eq!(taken.lock_id_hash, released.lock_id_hash, "so that the two can be matched");
    assert_eq!(released.lock_id_hash.as_deref(), Some(hash_key(&id).as_str()));
    assert_eq!(released.key_hash, None);
    for event in [taken, released] {
        assert_eq!((&event.key, &event.lock_id), (&None, &None));
        assert!(!format!("{event:?}").contains("MARKER"));
    }
}

#[test]
fn each_event_carries_the_hash_of_what_its_operation_was_called_with() {
    let (backend, events) = watched(|options| options);
    let (key, by_key) = ("k", (Some(hash_key("k")), None));
    let id = acquire(&backend, key);
    let by_id = (None, Some(hash_key(&id)));
    let both = (by_key.0.clone(), by_id.1.clone());
    let _ = backend.acquire(key, TTL, &never()).unwrap();
    let _ = backend.is_locked(key, &never()).unwrap();
    let _ = backend.lookup(Lookup::Key(key), &never()).unwrap();
    let _ = backend.lookup(Lookup::LockId(&id), &never()).unwrap();
    let _ = backend.extend(&id, TTL, &never()).unwrap();
    let _ = backend.release(&id, &never()).unwrap();
    assert!(backend.release("no id", &never()).is_err());
    let nonsense = (None, Some(hash_key("no id")));
    // A grant also says which id it is.
    for expected in [&both, &by_key, &by_key, &by_key, &by_id, &by_id, &by_id, &nonsense] {
        let event = next(&events);
        assert_eq!((&event.key_hash, &event.lock_id_hash), (&expected.0, &expected.1), "{event:?}");
    }
}

#[test]
fn raw_values_appear_only_where_the_options_permit_and_never_in_debug() {
    let (backend, events) = watched(|options| options.include_raw(true));
    let id = acquire(&backend, "MARKER");
    let event = next(&events);
    assert_eq!((event.key.as_deref(), event.lock_id.as_deref()), (Some("MARKER"), Some(id.as_str())));
    let text = format!("{event:?}");
    assert!(!text.contains("MARKER") && !text.contains(&id), "{text}");

    let seen = Arc::new(Mutex::new(Vec::new()));
    let record = Arc::clone(&seen);
    let (backend, events) = watched(move |options| {
        options.include_raw_if(move |event| {
            record.lock().unwrap().push((event.key.clone(), event.key_hash.clone()));
            assert!(event.operation != Operation::Release, "a panic means no");
            event.operation == Operation::Acquire
        })
    });
    let id = acquire(&backend, "k");
    assert!(next(&events).key.is_some());
    let _ = backend.is_locked("k", &never()).unwrap();
    assert!(next(&events).key.is_none());
    let _ = backend.release(&id, &never()).unwrap();
    assert!(next(&events).lock_id.is_none());
    assert_eq!(backend.handle().panics(), 0, "a panic of the predicate is not one of the callback");
    assert_eq!(seen.lock().unwrap()[0], (None, Some(hash_key("k"))), "it sees the event without raw values");
}

#[test]
fn what_is_too_long_to_be_a_key_is_not_kept_but_hashed() {
    let (backend, events) = watched(|options| options.include_raw(true));
    let (valid, huge) = ("k".repeat(512), "k".repeat(1_000_000));
    assert!(backend.is_locked(&huge, &never()).is_err());
    assert!(backend.release(&huge, &never()).is_err());
    assert!(backend.is_locked(&valid, &never()).is_ok());
    let event = next(&events);
    assert_eq!((event.key, event.key_hash), (None, Some(hash_key(&huge))));
    let event = next(&events);
    assert_eq!((event.lock_id, event.lock_id_hash), (None, Some(hash_key(&huge))));
    assert_eq!(next(&events).key, Some(valid));
}

#[test]
fn a_client_hands_out_the_counts_of_its_events_and_a_way_to_wait_for_them() {
    // Nobody listens there: each look fails, and is an event all the same.
    let url = "postgresql://nobody@127.0.0.1:1/nothing";
    let build = |options: Option<TelemetryOptions>| {
        let builder = PgLockClient::builder().auto_create_tables(false);
        options.map_or(builder.clone(), |options| builder.telemetry(options)).connect(url).unwrap()
    };
    assert!(build(None).telemetry().is_none(), "without telemetry there is nothing to count");

    let (entered, arrived) = channel();
    let door = Arc::new(Door::default());
    let inside = Arc::clone(&door);
    let options = TelemetryOptions::new(move |_| {
        let _ = entered.send(());
        inside.pass();
    });
    let client = build(Some(options.queue_capacity(2)));
    let events: TelemetryHandle = client.cancellable(&CancelToken::new()).telemetry().unwrap().clone();
    let look = || assert!(client.is_locked("k").is_err());
    look();
    arrived.recv_timeout(LIMIT).unwrap();
    for _ in 0..5 {
        look();
    }
    assert_eq!((events.delivered(), events.dropped()), (0, 3));
    assert!(!events.flush(Duration::from_millis(1)));
    door.open();
    assert!(events.flush(LIMIT));
    assert_eq!((events.delivered(), events.dropped(), events.panics()), (3, 3, 0));
    // The handle is no client: with the last of those the thread ends, and the counts stay.
    look();
    drop(client);
    assert_eq!(events.delivered() + events.dropped(), 7);
    assert!(events.flush(Duration::ZERO), "nothing waits any more");
}

/// A client of a server that is not there: each look fails, and is an event all the same.
fn lonely(options: TelemetryOptions) -> PgLockClient {
    let builder = PgLockClient::builder().auto_create_tables(false).telemetry(options);
    builder.connect("postgresql://nobody@127.0.0.1:1/nothing").unwrap()
}

#[test]
fn a_client_that_is_closed_has_delivered_its_events() {
    let (entered, arrived) = channel();
    let (gate, inside) = (Arc::new(Barrier::new(2)), Arc::new(AtomicU64::new(0)));
    let (first, seen) = (Arc::clone(&gate), Arc::clone(&inside));
    let options = TelemetryOptions::new(move |_| {
        if seen.fetch_add(1, Ordering::SeqCst) == 0 {
            let _ = entered.send(());
            first.wait();
        }
        // Some work, so that the queue is not empty when the client is closed.
        let end = Instant::now() + Duration::from_millis(1);
        while Instant::now() < end {
            std::hint::spin_loop();
        }
    });
    let client = lonely(options.flush_timeout(LIMIT));
    for _ in 0..50 {
        assert!(client.is_locked("k").is_err());
    }
    arrived.recv_timeout(LIMIT).unwrap();
    gate.wait();
    assert!(client.close(LIMIT).unwrap().is_clean());
    assert_eq!(client.telemetry().unwrap().delivered(), 50);
}

#[test]
fn the_close_of_a_client_does_not_wait_for_a_callback_that_hangs() {
    let door = Arc::new(Door::default());
    let inside = Arc::clone(&door);
    let options = TelemetryOptions::new(move |_| inside.pass());
    let client = lonely(options.flush_timeout(Duration::from_millis(20)));
    assert!(client.is_locked("k").is_err());
    let start = Instant::now();
    assert!(client.close(LIMIT * 10).unwrap().is_clean());
    assert!(start.elapsed() < LIMIT);
    // Nothing is dropped yet: the callback may still go on.
    let events = client.telemetry().unwrap();
    assert_eq!((events.delivered(), events.dropped()), (0, 0));
    door.open();
    assert!(events.flush(LIMIT));
    assert_eq!(events.delivered(), 1);
}

#[test]
fn a_handle_keeps_neither_the_backend_nor_the_thread() {
    let marker = Arc::new(());
    let inside = Arc::clone(&marker);
    let options = TelemetryOptions::new(move |_| {
        let _ = &inside;
        std::panic::panic_any(Bomb);
    });
    let memory = MemoryBackend::manual();
    let backend = with_telemetry(memory.clone(), options.flush_timeout(LIMIT));
    let events = backend.handle();
    let client = LockClient::new(backend);
    drop(client.lock("k").unwrap());
    client.close(LIMIT).unwrap();
    drop(client);
    assert_eq!(memory.closes(), 1);
    wait_until("the last drop delivers what waits", || events.delivered() == 2);
    assert_eq!((events.dropped(), events.panics()), (0, 2));
    drop(events);
    wait_until("nothing holds the callback any more", || Arc::strong_count(&marker) == 1);
}
