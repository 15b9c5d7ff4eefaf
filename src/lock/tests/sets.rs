//! Waiting for several keys at once: in whose queue, and what an error is about.

use super::in_order::{Ends, world};
use super::*;
use crate::memory::{Call, Fault};
use recorder::LIMIT;
use std::thread;

fn long() -> LockOptions {
    LockOptions::new().wait_forever().retry_delay(s(36_000))
}

#[test]
fn whoever_wants_several_keys_asks_at_once_and_waits_only_for_the_one_in_its_way() {
    let (memory, client) = world();
    let _held = memory.contend("a").unwrap();
    let token = CancelToken::new();
    let options = long().cancel(&token);
    thread::scope(|scope| {
        let _ends = Ends(&token);
        let first = scope.spawn(|| client.lock_with("a", &options).map(drop));
        eventually("one waits", || memory.calls(Call::Acquire) == 1);
        let set = scope.spawn(|| client.lock_all_with(&["a", "b"], &options).map(drop));
        eventually("the set asks before it queues", || memory.calls(Call::Acquire) == 2);
        eventually("and then waits behind it", || client.engine().queue.waiting("a") == 2);
        token.cancel();
        assert!(first.join().unwrap().is_err() && set.join().unwrap().is_err());
    });
}

#[test]
fn a_set_that_hangs_delays_no_other_set() {
    let (memory, client) = world();
    let gate = memory.hang_next(Call::Acquire);
    thread::scope(|scope| {
        let hung = scope.spawn(|| client.lock_all_with(&["a", "b"], &long()).map(drop));
        assert!(gate.wait_for_calls(1, LIMIT));
        let other = scope.spawn(|| client.lock_all_with(&["c", "d"], &long()).map(drop));
        let end = std::time::Instant::now() + LIMIT;
        while !other.is_finished() && std::time::Instant::now() < end {
            thread::yield_now();
        }
        let granted = other.is_finished();
        gate.open();
        hung.join().unwrap().unwrap();
        other.join().unwrap().unwrap();
        assert!(granted, "it waited for a set that wants other keys");
    });
}

#[test]
fn an_unknown_outcome_of_a_set_is_not_about_the_key_that_was_in_the_way() {
    let (memory, client) = world();
    let _held = memory.contend("b").unwrap();
    let token = CancelToken::new();
    let options = long().cancel(&token);
    thread::scope(|scope| {
        let _ends = Ends(&token);
        let set = scope.spawn(|| client.lock_all_with(&["a", "b"], &options).map(drop));
        eventually("it waits", || client.engine().queue.waiting("b") == 1);
        memory.fail_next(Call::Acquire, Fault::lost_answer(ErrorCode::NetworkTimeout));
        memory.remove("b").unwrap();
        client.wake_waiter("b");
        let error = set.join().unwrap().unwrap_err();
        assert!(error.is_outcome_unknown());
        assert_eq!(error.key(), None, "it is about all of them");
    });
}
