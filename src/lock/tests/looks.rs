//! When a waiter asks and when it only looks: a call that nobody needs costs the server, and a missing one costs time.

use super::in_order::world;
use super::*;
use crate::backend::{Intent, LockBackend as _};
use crate::error::Result;
use crate::lock::LockGuard;
use crate::memory::{Call, MemoryBackend};
use recorder::LIMIT;
use std::thread;

#[test]
fn a_look_that_would_come_with_the_next_attempt_is_not_made() {
    let backend = Recorder::manual();
    backend.occupy("k");
    let client = client(&backend);
    // As long as the pause before the first look.
    let options = LockOptions::new().wait_forever().max_retries(1).retry_delay(ms(5)).jitter(Jitter::None);
    let waiter = thread::spawn(move || client.lock_with("k", &options));
    eventually("the end", || {
        backend.advance(ms(5));
        waiter.is_finished()
    });
    assert!(waiter.join().unwrap().unwrap_err().to_string().contains("in 2 attempts"));
    assert_eq!((backend.count("attempt"), backend.count("holder")), (1, 1), "the second attempt looks first");
}

#[test]
fn an_attempt_that_its_own_deadline_cuts_short_is_contention_only_where_the_key_was_seen_taken() {
    for (answers, code) in [
        (vec![Script::Late], ErrorCode::NetworkTimeout),
        (vec![Script::No, Script::Late], ErrorCode::AcquisitionTimeout),
    ] {
        let backend = Recorder::manual();
        backend.script("attempt", answers);
        let options = LockOptions::new().timeout(s(5)).retry_delay(Duration::ZERO).max_retries(5);
        assert_eq!(client(&backend).lock_with("k", &options).unwrap_err().code(), code);
    }
}

/// A waiter in line behind so many others, for a key that somebody holds, once it knows its place. What it does when
/// it hears of a release.
fn in_line_behind(others: u64, act: impl FnOnce(&MemoryBackend, &LockClient)) {
    let (memory, client) = world();
    let _held = memory.contend("k").unwrap();
    for n in 0..others {
        let id = format!("{n:022}");
        let intent = Intent::new("k", &id, s(1), s(5)).with_priority(1, None);
        memory.announce(&intent, memory.clock().now().after(LIMIT)).unwrap();
    }
    let token = CancelToken::new();
    let options = LockOptions::new().fair(true).wait_forever().retry_delay(s(36_000)).cancel(&token);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| client.lock_with("k", &options).map(drop));
        eventually("it asks and says that it waits", || {
            memory.calls(Call::Acquire) == 1 && memory.calls(Call::Holder) > others
        });
        // The clock stands still, and nothing but a release leads to a look.
        client.wake_waiter("k");
        eventually("it looks", || memory.calls(Call::Holder) == others + 2);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| act(&memory, &client)));
        token.cancel();
        assert_eq!(waiter.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
        result.unwrap();
    });
}

#[test]
fn whoever_is_first_in_line_asks_when_it_hears_of_a_release_and_looks_once_it_was_refused() {
    in_line_behind(0, |memory, client| {
        for n in 2..5 {
            client.wake_waiter("k");
            eventually("it asks at once", || memory.calls(Call::Acquire) == n);
            let looks = memory.calls(Call::Holder);
            client.wake_waiter("k");
            eventually("it looks", || memory.calls(Call::Holder) > looks);
            assert_eq!(memory.calls(Call::Acquire), n);
        }
    });
}

#[test]
fn whoever_is_far_behind_does_not_even_look() {
    in_line_behind(60, |memory, client| {
        let (looks, heard) = (memory.calls(Call::Holder), std::cell::Cell::new(0));
        eventually("it looks again", || {
            client.wake_waiter("k");
            heard.set(heard.get() + 1);
            memory.calls(Call::Holder) > looks
        });
        assert!(heard.get() > 50, "after {} releases", heard.get());
        assert_eq!(memory.calls(Call::Acquire), 1);
    });
}

/// Looks that find the key taken are no attempts; the one that finds it free leads to one. Everybody has a client of
/// its own: a release is not heard.
fn looks_until_it_is_free(
    hold: impl FnOnce(&LockClient) -> LockGuard,
    wait: impl FnOnce(&LockClient, &LockOptions) -> Result<LockGuard> + Send,
) {
    let (memory, client) = world();
    let other = LockClient::new(memory.clone());
    let held = hold(&other);
    let token = CancelToken::new();
    let options =
        LockOptions::new().heartbeat(Heartbeat::Off).wait_forever().retry_delay(s(36_000)).cancel(&token);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| wait(&client, &options).map(drop));
        let pass_until = |there: &dyn Fn() -> bool| {
            let end = std::time::Instant::now() + LIMIT;
            while !there() && std::time::Instant::now() < end {
                memory.advance(ms(250));
                thread::park_timeout(ms(1));
            }
        };
        let more_looks = |count: u64| {
            let looks = memory.calls(Call::Holder);
            pass_until(&|| memory.calls(Call::Holder) >= looks + count);
        };
        more_looks(3);
        let asked = memory.calls(Call::Acquire);
        more_looks(5);
        let asked_again = memory.calls(Call::Acquire) - asked;
        held.release().unwrap();
        pass_until(&|| waiter.is_finished());
        token.cancel();
        waiter.join().unwrap().unwrap();
        assert_eq!(asked_again, 0, "it asked although it had seen the key taken");
    });
}

#[test]
fn a_reader_looks_for_the_end_of_a_writer_and_a_waiter_for_a_permit_for_a_free_one() {
    let off = || LockOptions::new().heartbeat(Heartbeat::Off).ttl(s(360_000));
    looks_until_it_is_free(
        |other| other.lock_with("k", &off()).unwrap(),
        |client, options| client.read_lock_with("k", options),
    );
    looks_until_it_is_free(
        |other| other.semaphore("k", 1).unwrap().acquire_with(&off()).unwrap(),
        |client, options| client.semaphore("k", 1).unwrap().acquire_with(options),
    );
}

#[test]
fn whoever_gets_no_permit_is_told_how_many_of_them_its_client_has() {
    let (memory, client) = world();
    let other = LockClient::new(memory);
    let reports = client.semaphore("reports", 3).unwrap();
    let _held = [reports.acquire().unwrap(), reports.acquire().unwrap()];
    let _else = client.semaphore("else", 3).unwrap().acquire().unwrap();
    let _others = other.semaphore("reports", 3).unwrap().acquire().unwrap();
    let error = reports.acquire_with(&LockOptions::new().max_retries(0)).unwrap_err().to_string();
    assert!(error.contains("3 permits, and this client holds 2 of them"), "{error}");
}
