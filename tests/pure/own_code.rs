//! A program's own tests, written as its author would: with the public documentation and nothing else.
//! The program imports files under a lock and must stop when the lock is lost.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use syncguard::memory::{Call, Fault, Gate, Loss};
use syncguard::{ErrorCode, LockClient, LockOptions, LostReason, MemoryBackend, Result};

const LIMIT: Duration = Duration::from_secs(30);
const KEY: &str = "app:test:import";

/// How an import ended, and how far it came.
#[derive(Debug, PartialEq, Eq)]
enum Import {
    Done(usize),
    /// Somebody else may be importing by now.
    LockLost(usize),
    SomebodyElse,
}

/// The code under test: takes the lock, looks before each step, stops when the lock is lost.
fn import(locks: &LockClient, steps: usize, mut step: impl FnMut(usize)) -> Result<Import> {
    let Some(guard) = locks.try_lock(KEY)? else { return Ok(Import::SomebodyElse) };
    for n in 0..steps {
        if !guard.is_held() {
            return Ok(Import::LockLost(n));
        }
        step(n);
    }
    guard.release()?;
    Ok(Import::Done(steps))
}

/// The same for work that blocks: it waits for its input, or for the end of its lock.
fn serve(locks: &LockClient, input: &Receiver<u32>) -> Result<(u32, Option<LostReason>)> {
    let guard = locks.lock_with(KEY, &LockOptions::new().ttl(Duration::from_secs(30)))?;
    let mut sum = 0;
    while !guard.lost().wait_timeout(Duration::from_millis(1)) {
        match input.try_recv() {
            Ok(number) => sum += number,
            Err(std::sync::mpsc::TryRecvError::Empty) => {}
            Err(_) => break,
        }
    }
    Ok((sum, guard.lost_reason()))
}

fn locks() -> (MemoryBackend, LockClient) {
    let memory = MemoryBackend::manual();
    let client = LockClient::new(memory.clone());
    (memory, client)
}

#[test]
fn an_import_runs_to_its_end_and_lets_go() {
    let (memory, locks) = locks();
    assert_eq!(import(&locks, 3, |_| ()).unwrap(), Import::Done(3));
    assert_eq!((memory.live_leases(), memory.counter(KEY)), (0, Some(1)));
    let _theirs = memory.contend(KEY).unwrap();
    assert_eq!(import(&locks, 3, |_| ()).unwrap(), Import::SomebodyElse);
}

#[test]
fn an_import_that_was_paused_for_too_long_stops_before_its_next_step() {
    let (memory, locks) = locks();
    let mut written = Vec::new();
    let end = import(&locks, 5, |n| {
        written.push(n);
        if n == 1 {
            // The process stands still; its lease runs out, and somebody else takes the key.
            memory.advance(Duration::from_secs(31));
            memory.take_over(KEY).unwrap();
        }
    });
    assert_eq!(end.unwrap(), Import::LockLost(2));
    assert_eq!(written, [0, 1]);
    assert!(memory.has_row(KEY), "the newer holder keeps its lock");
}

#[test]
fn an_import_whose_server_goes_away_stops_when_its_lease_is_over_and_not_before() {
    let (memory, locks) = locks();
    let end = import(&locks, 9, |n| {
        if n == 0 {
            memory.fail_all(ErrorCode::ServiceUnavailable);
        }
        memory.advance(Duration::from_secs(8));
    });
    assert_eq!(end.unwrap(), Import::LockLost(4), "after 32 of 30 seconds");
    memory.heal();
}

#[test]
fn an_import_that_takes_long_is_renewed_as_time_passes_in_steps() {
    let (memory, locks) = locks();
    let end = import(&locks, 20, |n| {
        memory.advance(Duration::from_secs(10));
        assert!(memory.wait_for_answers(Call::Renew, n as u64 + 1, LIMIT), "renewed every 10 s");
    });
    assert_eq!(end.unwrap(), Import::Done(20), "after 200 seconds");
}

#[test]
fn a_server_that_waits_is_woken_by_the_loss_and_knows_why() {
    for (loss, expected) in [(Loss::RowMissing, LostReason::RowMissing), (Loss::Expired, LostReason::Expired)]
    {
        let (memory, locks) = locks();
        memory.lose_on_next_renewal(KEY, loss).unwrap();
        let (send, input) = channel();
        let serving = thread::spawn(move || serve(&locks, &input));
        send.send(7).unwrap();
        assert!(memory.wait_for_answers(Call::Acquire, 1, LIMIT));
        // Time goes on until the renewal is due that finds the loss, and no further.
        memory.advance(Duration::from_secs(11));
        let (sum, reason) = serving.join().unwrap().unwrap();
        assert!(sum == 7 || sum == 0, "{sum}");
        assert_eq!(reason, Some(expected));
        drop(send);
    }
}

#[test]
fn a_release_that_fails_and_an_acquire_whose_answer_is_lost_are_told() {
    let (memory, locks) = locks();
    memory.fail_next(Call::Release, ErrorCode::ServiceUnavailable);
    assert_eq!(import(&locks, 1, |_| ()).unwrap_err().code(), ErrorCode::ServiceUnavailable);
    memory.advance(Duration::from_secs(40));

    memory.fail_next(Call::Acquire, Fault::lost_answer(ErrorCode::NetworkTimeout));
    let error = import(&locks, 1, |_| panic!("it must not run")).unwrap_err();
    assert!(error.is_outcome_unknown(), "{error}");

    // A call that hangs, and goes on when the test says so.
    memory.advance(Duration::from_secs(40));
    let gate: Gate = memory.hang_next(Call::Acquire);
    thread::scope(|scope| {
        let hung = scope.spawn(|| import(&locks, 1, |_| ()));
        assert!(gate.wait_for_calls(1, LIMIT));
        gate.open();
        assert_eq!(hung.join().unwrap().unwrap(), Import::Done(1));
    });
}
