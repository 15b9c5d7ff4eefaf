//! What waiters tell each other, over the memory backend: tickets and writers' intents, whatever becomes of their calls.

use super::*;
use crate::backend::{Intent, LockBackend as _};
use crate::error::Result;
use crate::lock::LockGuard;
use crate::memory::{Call, Fault, Gate, MemoryBackend};
use recorder::LIMIT;
use std::thread;

/// Somebody who only looks.
const PROBE: &str = "AAAAAAAAAAAAAAAAAAAAAA";
const OTHERS: [&str; 2] = ["BBBBBBBBBBBBBBBBBBBBBA", "CCCCCCCCCCCCCCCCCCCCCA"];

pub(super) fn world() -> (MemoryBackend, LockClient) {
    let memory = MemoryBackend::manual();
    (memory.clone(), LockClient::new(memory))
}

/// How many live tickets and intents the key has.
fn waiting(memory: &MemoryBackend, key: &str) -> u64 {
    let last = Intent::new(key, PROBE, Duration::ZERO, Duration::ZERO).with_priority(i32::MIN, None);
    memory.turn(&last, memory.clock().now().after(LIMIT), &CancelToken::never()).unwrap().ahead
}

/// A reader whose lease outlasts any number of steps of the clock, as the scheduling of threads makes them.
fn reader(client: &LockClient) -> LockGuard {
    client.read_lock_with("k", &LockOptions::new().ttl(s(86_400)).heartbeat(Heartbeat::Off)).unwrap()
}

/// Lets time pass until somebody is granted a lease, and no longer, until this wait has returned with it. Less than a
/// ticket lasts: a thread that sleeps through it all keeps its place.
fn until_granted(memory: &MemoryBackend, what: &str, wait: &Wait<'_>) {
    let steps = std::cell::Cell::new(90);
    eventually(what, || {
        if memory.live_leases() == 0 && steps.get() > 0 {
            steps.set(steps.get() - 1);
            memory.advance(ms(10));
        }
        wait.is_finished()
    });
}

/// A test that fails ends its waits.
pub(super) struct Ends<'a>(pub(super) &'a CancelToken);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

fn fair(token: &CancelToken) -> LockOptions {
    LockOptions::new().fair(true).wait_forever().cancel(token)
}

/// It asks when it begins, when it is called, and each second: no other call of it comes in between.
fn writer(token: &CancelToken) -> LockOptions {
    LockOptions::new()
        .wait_forever()
        .wake_ups(false)
        .backoff(Backoff::Fixed)
        .retry_delay(ms(1000))
        .cancel(token)
}

type Wait<'s> = thread::ScopedJoinHandle<'s, Result<LockGuard>>;

/// A writer that waits beside the client's reader, stopped in its first look.
fn writer_that_looks<'s>(
    scope: &'s thread::Scope<'s, '_>,
    (memory, client): (&MemoryBackend, &LockClient),
    token: &CancelToken,
) -> (Wait<'s>, Gate) {
    let look = memory.hang_next(Call::Holder);
    let (client, options, asked) = (client.clone(), writer(token), memory.calls(Call::Acquire));
    let wait = scope.spawn(move || client.lock_with("k", &options));
    eventually("it asks", || memory.calls(Call::Acquire) > asked);
    eventually("it looks", || {
        memory.advance(ms(100));
        look.inside() == 1
    });
    (wait, look)
}

#[test]
fn an_announcement_whose_answer_was_lost_is_taken_back() {
    let (memory, client) = world();
    let _reader = reader(&client);
    let token = CancelToken::new();
    thread::scope(|scope| {
        let _ends = Ends(&token);
        let (wait, look) = writer_that_looks(scope, (&memory, &client), &token);
        memory.fail_next(Call::Holder, Fault::lost_answer(ErrorCode::NetworkTimeout));
        look.open();
        assert!(memory.wait_for_answers(Call::Holder, 2, LIMIT));
        assert_eq!(waiting(&memory, "k"), 1, "it was announced, and the writer has not heard of it");
        token.cancel();
        assert_eq!(wait.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
    });
    eventually("it is taken back", || waiting(&memory, "k") == 0);
}

#[test]
fn a_writer_has_the_key_while_its_announcement_is_still_taken_back_and_close_ends_that() {
    let (memory, client) = world();
    let token = CancelToken::new();
    let reader = reader(&client);
    let gate = thread::scope(|scope| {
        let _ends = Ends(&token);
        let (wait, look) = writer_that_looks(scope, (&memory, &client), &token);
        look.open();
        assert!(memory.wait_for_answers(Call::Holder, 2, LIMIT));
        assert_eq!(waiting(&memory, "k"), 1);
        let gate = memory.hang_every(Call::Holder);
        reader.release().unwrap();
        eventually("the writer has the key", || wait.is_finished());
        let guard = wait.join().unwrap().unwrap();
        assert!(gate.wait_for_calls(1, LIMIT), "somebody takes it back");
        assert!(guard.is_held());
        guard.release().unwrap();
        gate
    });
    thread::scope(|scope| {
        let close = scope.spawn(|| client.close(LIMIT).unwrap());
        eventually("it closes", || client.lock("other").is_err());
        gate.open();
        assert!(close.join().unwrap().is_clean());
    });
    memory.heal();
    assert_eq!(waiting(&memory, "k"), 0);
}

#[test]
fn close_takes_tickets_back() {
    let (memory, client) = world();
    let _other = memory.contend("k").unwrap();
    thread::scope(|scope| {
        let wait = scope.spawn(|| client.lock_with("k", &fair(&CancelToken::never())));
        eventually("it is in line", || waiting(&memory, "k") == 1);
        assert!(client.close(LIMIT).unwrap().is_clean());
        assert!(wait.join().unwrap().is_err());
    });
    assert_eq!(waiting(&memory, "k"), 0);
}

/// Two wait in one process, and the second one leaves while the answer of the first one's grant hangs, which has put it
/// in line. What the first one hears, and what it leaves behind when it is over.
fn the_next_one_leaves(
    first: &LockOptions,
    then: impl FnOnce(&MemoryBackend, &Gate),
    token: &CancelToken,
) -> ErrorCode {
    let (memory, client) = world();
    let (memory, client, second) = (&memory, &client, CancelToken::new());
    let held = client.lock_with("k", &LockOptions::new().heartbeat(Heartbeat::Off)).unwrap();
    thread::scope(|scope| {
        let _ends = (Ends(token), Ends(&second));
        let wait = scope.spawn(|| client.lock_with("k", first).map(drop));
        eventually("it is in line", || waiting(memory, "k") == 1);
        let options = fair(&second);
        let behind = scope.spawn(move || client.lock_with("k", &options).map(drop));
        eventually("the other one is behind it", || client.engine().queue.waiting("k") == 2);
        let gate = memory.hang_answer_of_next(Call::Acquire);
        held.release().unwrap();
        assert!(gate.wait_for_calls(1, LIMIT));
        assert_eq!(waiting(memory, "k"), 1, "the grant has put the next one in line");
        second.cancel();
        assert_eq!(behind.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
        then(memory, &gate);
        eventually("the lease is let go", || memory.live_leases() == 0);
        token.cancel();
        let code = wait.join().unwrap().unwrap_err().code();
        eventually("nobody is in line", || waiting(memory, "k") == 0);
        code
    })
}

#[test]
fn a_grant_that_comes_too_late_leaves_no_ticket_behind() {
    let token = CancelToken::new();
    let options = fair(&token).ttl(ms(1000)).heartbeat(Heartbeat::Off);
    let late = |memory: &MemoryBackend, gate: &Gate| {
        memory.fail_next(Call::Extend, ErrorCode::ServiceUnavailable);
        memory.fail_every(Call::Acquire, ErrorCode::ServiceUnavailable);
        memory.advance(ms(600));
        gate.open();
    };
    let code = the_next_one_leaves(&options, late, &token);
    assert!(matches!(code, ErrorCode::Aborted | ErrorCode::ServiceUnavailable), "{code}");
}

#[test]
fn a_grant_of_which_nobody_hears_leaves_no_ticket_behind() {
    let token = CancelToken::new();
    let options = fair(&token).timeout(ms(1500)).ttl(ms(1000)).heartbeat(Heartbeat::Off);
    let unknown = |memory: &MemoryBackend, _: &Gate| memory.advance(ms(1500));
    assert_eq!(the_next_one_leaves(&options, unknown, &token), ErrorCode::NetworkTimeout);
}

#[test]
fn a_grant_that_comes_too_late_costs_nobody_its_place() {
    let (memory, client) = world();
    let other = LockClient::new(memory.clone());
    let token = CancelToken::new();
    let options = fair(&token).ttl(ms(1000)).heartbeat(Heartbeat::Off);
    let held = client.lock_with("k", &LockOptions::new().heartbeat(Heartbeat::Off)).unwrap();
    thread::scope(|scope| {
        let _ends = Ends(&token);
        let first = scope.spawn(|| client.lock_with("k", &options));
        eventually("it is in line", || waiting(&memory, "k") == 1);
        memory.advance(ms(10));
        let second = scope.spawn(|| other.lock_with("k", &fair(&token)));
        eventually("and another one", || waiting(&memory, "k") == 2);
        let gate = memory.hang_answer_of_next(Call::Acquire);
        held.release().unwrap();
        assert!(gate.wait_for_calls(1, LIMIT));
        assert_eq!(waiting(&memory, "k"), 1, "the grant has ended its ticket");
        let release = memory.hang_every(Call::Release);
        memory.fail_next(Call::Extend, ErrorCode::ServiceUnavailable);
        memory.advance(ms(600));
        gate.open();
        eventually("it is in line again", || waiting(&memory, "k") == 2);
        release.open();
        until_granted(&memory, "it is served", &first);
        assert!(!second.is_finished());
        first.join().unwrap().unwrap().release().unwrap();
        until_granted(&memory, "and then the other one", &second);
        second.join().unwrap().unwrap().release().unwrap();
    });
}

#[test]
fn whoever_waits_in_vain_behind_others_is_told_how_many() {
    let options = LockOptions::new().fair(true).max_retries(1).retry_delay(Duration::ZERO);
    let told_behind = |others: &[&str]| {
        let (memory, client) = world();
        for id in others {
            let intent = Intent::new("k", id, ms(1000), ms(5000)).with_priority(1, None);
            memory.announce(&intent, memory.clock().now().after(LIMIT)).unwrap();
        }
        client.lock_with("k", &options).unwrap_err().to_string()
    };
    let text = told_behind(&OTHERS[..1]);
    assert!(text.contains("; 1 waiter who is served in order came before it"), "{text}");
    let text = told_behind(&OTHERS);
    assert!(text.contains("; 2 waiters who are served in order came before it"), "{text}");
}
