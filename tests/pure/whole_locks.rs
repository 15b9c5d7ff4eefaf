//! The whole of a lock as one event: how it was waited for, how long it was held, and how that ended; once,
//! whatever becomes of its guard.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use syncguard::memory::Call;
use syncguard::{
    ClientSettings, ErrorCode, Heartbeat, LockClient, LockEnding, LockKind, LockOptions, LockSummary,
    LostReason, MemoryBackend, RunOnce, Slot, TelemetryOptions, hash_key, with_telemetry,
};

const LIMIT: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_secs(30);

struct World {
    memory: MemoryBackend,
    client: LockClient,
    locks: Receiver<LockSummary>,
}

fn world() -> World {
    let (tell, locks) = channel();
    let options = TelemetryOptions::new(|_| {}).on_lock(move |lock| drop(tell.send(lock.clone())));
    let memory = MemoryBackend::manual();
    World { client: LockClient::new(with_telemetry(memory.clone(), options)), memory, locks }
}

impl World {
    fn next(&self) -> LockSummary {
        self.locks.recv_timeout(LIMIT).expect("the whole of a lock is told")
    }

    /// Nothing more comes, not even at the end.
    fn end(self) {
        let Self { client, locks, .. } = self;
        drop(client);
        assert_eq!(locks.recv_timeout(LIMIT).ok(), None, "what has ended was told before");
    }
}

fn of(lock: &LockSummary) -> (LockKind, LockEnding, u64, Option<Duration>) {
    (lock.kind, lock.ending, lock.attempts, lock.held)
}

#[test]
fn each_kind_is_told_once_with_how_long_it_was_held() {
    let world = world();
    let second = Duration::from_secs(1);
    let hold = || world.memory.advance(second);
    let released = |kind| (kind, LockEnding::Released, 1, Some(second));

    let guard = world.client.lock("one").unwrap();
    hold();
    guard.release().unwrap();
    let told = world.next();
    assert_eq!((of(&told), told.key_hash, told.keys), (released(LockKind::Lock), hash_key("one"), 1));

    let guard = world.client.lock_all(&["b", "a", "c"]).unwrap();
    hold();
    drop(guard);
    let told = world.next();
    assert_eq!((of(&told), told.key_hash, told.keys), (released(LockKind::Set), hash_key("a"), 3));

    let permit = world.client.semaphore("name", 2).unwrap().acquire().unwrap();
    hold();
    drop(permit);
    let told = world.next();
    assert_eq!((of(&told), told.key_hash), (released(LockKind::Permit), hash_key("name")));

    let reader = world.client.read_lock("read").unwrap();
    hold();
    drop(reader);
    let told = world.next();
    assert_eq!((of(&told), told.key_hash), (released(LockKind::Shared), hash_key("read")));

    let led = world.client.elect("leader", &LockOptions::new(), |_| {
        hold();
        ControlFlow::Break(())
    });
    led.unwrap();
    assert_eq!(of(&world.next()), released(LockKind::Term));

    let run = || {
        world.client.run_once("job", Slot::number(1), &LockOptions::new(), |_| {
            hold();
            Ok::<_, ()>(())
        })
    };
    let _ = run().unwrap();
    assert_eq!(of(&world.next()), released(LockKind::Run));
    assert!(matches!(run(), Ok(RunOnce::AlreadyDone)));
    assert_eq!(of(&world.next()), (LockKind::Run, LockEnding::SlotDone, 1, None));
    world.end();
}

#[test]
fn a_call_that_gets_nothing_is_told_with_the_reason() {
    let world = world();
    world.memory.take_over("k").unwrap();
    assert!(world.client.try_lock("k").unwrap().is_none());
    assert_eq!(of(&world.next()), (LockKind::Lock, LockEnding::Busy, 1, None));
    let options = LockOptions::new().max_retries(2).retry_delay(Duration::ZERO).timeout(LIMIT);
    let waiting = {
        let (client, options) = (world.client.clone(), options.clone());
        std::thread::spawn(move || client.lock_with("k", &options).map(drop))
    };
    while !waiting.is_finished() {
        world.memory.advance(Duration::from_millis(100));
        std::thread::yield_now();
    }
    waiting.join().unwrap().expect_err("it is held");
    let told = world.next();
    assert_eq!(told.ending, LockEnding::Failed(ErrorCode::AcquisitionTimeout));
    assert!(told.attempts >= 1 && told.held.is_none(), "{told:?}");
    world.memory.fail_next(Call::Acquire, ErrorCode::AuthFailed);
    world.client.lock("other").expect_err("it was made to fail");
    assert_eq!(world.next().ending, LockEnding::Failed(ErrorCode::AuthFailed));
    let _ = world.client.close(LIMIT);
    world.client.lock("late").expect_err("the client is closed");
    world.end();
}

#[test]
fn a_lock_that_is_lost_is_told_so_and_not_again_when_its_guard_goes() {
    let world = world();
    let bare = LockOptions::new().heartbeat(Heartbeat::Off).ttl(TTL);
    let guard = world.client.lock_with("k", &bare).unwrap();
    world.memory.advance(TTL);
    let told = world.next();
    assert_eq!((told.ending, told.held), (LockEnding::Lost(LostReason::Expired), Some(TTL)));
    drop(guard);
    let set = world.client.try_lock_all_with(&["a", "b"], &bare).unwrap().unwrap();
    world.memory.advance(TTL);
    assert_eq!((world.next().lost(), set.is_held()), (Some(LostReason::Expired), false));
    drop(set);
    let guard = world.client.lock_with("leaked", &bare).unwrap();
    let _ = guard.leak();
    assert_eq!(world.next().ending, LockEnding::Leaked);
    let guard = world.client.lock_with("closed", &bare).unwrap();
    let _ = world.client.close(LIMIT);
    assert_eq!(world.next().lost(), Some(LostReason::Closed));
    drop(guard);
    world.end();
}

#[test]
fn a_lock_is_told_with_its_owner_and_note() {
    let (tell, locks) = channel();
    let options = TelemetryOptions::new(|_| {}).on_lock(move |lock| drop(tell.send(lock.clone())));
    let backend = with_telemetry(MemoryBackend::new(), options);
    let settings = ClientSettings::default().owner("web-3");
    let client = LockClient::with_settings(Arc::new(backend), settings);
    drop(client.lock_with("k", &LockOptions::new().note("invoices")).unwrap());
    let told = locks.recv_timeout(LIMIT).unwrap();
    assert_eq!((told.owner.as_deref(), told.note.as_deref()), (Some("web-3"), Some("invoices")));
}

#[test]
fn a_wait_in_vain_names_the_holder_in_its_own_words() {
    let memory = MemoryBackend::new();
    let settings = ClientSettings::default().owner("web-3");
    let owned = LockClient::with_settings(Arc::new(memory.clone()), settings);
    let _held = owned.lock_with("k", &LockOptions::new().note("invoices")).unwrap();
    let other = LockClient::new(memory);
    let tries = LockOptions::new().wait_forever().max_retries(1).retry_delay(Duration::from_millis(1));
    for options in [tries, LockOptions::new().timeout(Duration::from_secs(1))] {
        let error = other.lock_with("k", &options).unwrap_err();
        assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
        let text = error.to_string();
        assert!(
            text.contains("it is held by web-3 (invoices) under fencing token 1; its lease ends in "),
            "{text}"
        );
    }
    assert_eq!(other.leader("k").unwrap().unwrap().owner.as_deref(), Some("web-3"));
}
