//! Runs, once per slot. A backend that offers none refuses them, and changes nothing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use syncguard::backend::{Attempt, BeginOutcome, BeginRun, BegunRun, MarkOutcome, MarkRun, MarkStep};
use syncguard::{AcquireResult, CancelToken, ErrorCode, FENCE_MAX, Fence, Result, Slot};

use crate::bench::{Bench, LONG_EXPIRED_MS, TTL, together};

fn begin_as(bench: &Bench<'_>, key: &str, lock_id: &str, slot: Slot) -> Result<BeginOutcome> {
    let attempt = Attempt::new(key, lock_id, TTL, bench.deadline());
    bench.backend.begin_run(&BeginRun::new(attempt, slot), &CancelToken::never())
}

fn try_begin(bench: &Bench<'_>, key: &str, slot: Slot) -> BeginOutcome {
    begin_as(bench, key, &Bench::id(), slot).unwrap()
}

fn begin(bench: &Bench<'_>, key: &str, slot: Slot) -> BegunRun {
    match try_begin(bench, key, slot) {
        BeginOutcome::Begun(run) => run,
        other => panic!("{other:?}"),
    }
}

fn mark(bench: &Bench<'_>, key: &str, run: &BegunRun, slot: Slot, step: MarkStep) -> MarkOutcome {
    let lease = &run.grant.acquired;
    let record = MarkRun::new(key, &lease.lock_id, lease.fence, slot, run.slot);
    bench.backend.mark_run(&record, step, bench.deadline()).unwrap()
}

/// Whether the backend offers runs. One that does not says so, and does nothing.
fn offered(bench: &Bench<'_>) -> bool {
    let key = Bench::key();
    let slot = Slot::number(1);
    match begin_as(bench, &key, &Bench::id(), slot) {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::InvalidArgument);
            assert!(!bench.harness.has_row(&key));
            let id = Bench::id();
            let record = MarkRun::new(&key, &id, Fence::new(1).unwrap(), slot, 1);
            let refused = bench.backend.mark_run(&record, MarkStep::Finish, bench.deadline());
            assert_eq!(refused.unwrap_err().code(), ErrorCode::InvalidArgument, "both or neither");
            false
        }
    }
}

pub(crate) fn a_slot_runs_until_it_is_finished_and_never_again(bench: &Bench<'_>) {
    if !offered(bench) {
        return;
    }
    let (key, slot) = (Bench::key(), Slot::number(7));
    let first = begin(bench, &key, slot);
    assert_eq!((first.slot, first.last), (7, None));
    assert!(bench.release(&first.grant.acquired.lock_id), "it failed: the slot is not marked");

    let second = begin(bench, &key, slot);
    assert_eq!(second.grant.acquired.fence.get(), 2, "a lease as any other");
    assert_eq!(mark(bench, &key, &second, slot, MarkStep::Finish), MarkOutcome::Marked);
    assert!(!bench.harness.has_row(&key), "its end ends the lease");
    assert_eq!(try_begin(bench, &key, slot), BeginOutcome::AlreadyDone);
    assert_eq!(bench.counter(&key), 2, "and takes no fence");

    let next = begin(bench, &key, Slot::number(10));
    assert_eq!((next.slot, next.last), (10, Some(7)));
}

pub(crate) fn a_slot_that_is_not_above_the_last_one_is_done(bench: &Bench<'_>) {
    if !offered(bench) {
        return;
    }
    let (key, slot) = (Bench::key(), Slot::number(7));
    let run = begin(bench, &key, slot);
    assert_eq!(mark(bench, &key, &run, slot, MarkStep::Finish), MarkOutcome::Marked);
    for number in [0, 1, 6, 7] {
        assert_eq!(try_begin(bench, &key, Slot::number(number)), BeginOutcome::AlreadyDone, "{number}");
    }
    let last = Slot::number(FENCE_MAX);
    let run = begin(bench, &key, last);
    assert_eq!(mark(bench, &key, &run, last, MarkStep::Finish), MarkOutcome::Marked);
    assert_eq!(try_begin(bench, &key, last), BeginOutcome::AlreadyDone);
}

pub(crate) fn the_kinds_of_slots_have_marks_of_their_own(bench: &Bench<'_>) {
    if !offered(bench) {
        return;
    }
    let (key, by_number, by_clock) = (Bench::key(), Slot::number(FENCE_MAX), Slot::every(TTL * 1000));
    for slot in [by_number, by_clock] {
        let run = begin(bench, &key, slot);
        assert_eq!(run.last, None);
        assert_eq!(mark(bench, &key, &run, slot, MarkStep::Finish), MarkOutcome::Marked);
        assert_eq!(try_begin(bench, &key, slot), BeginOutcome::AlreadyDone);
    }
    let other = Bench::key();
    assert_eq!(begin(bench, &other, by_number).last, None, "each key has its own");
}

pub(crate) fn a_period_is_that_of_the_clock_of_the_grant(bench: &Bench<'_>) {
    if !offered(bench) {
        return;
    }
    for ms in [1, 7, 1000, 3_600_000] {
        let (key, slot) = (Bench::key(), Slot::every(Duration::from_millis(ms)));
        let run = begin(bench, &key, slot);
        let granted_at = bench.by_key(&key).unwrap().acquired_at_ms;
        assert_eq!(run.slot, u64::try_from(granted_at).unwrap() / ms * ms, "periods of {ms} ms");
        assert_eq!(mark(bench, &key, &run, slot, MarkStep::Finish), MarkOutcome::Marked);
    }
}

pub(crate) fn a_run_and_a_plain_lease_exclude_each_other(bench: &Bench<'_>) {
    if !offered(bench) {
        return;
    }
    let (key, slot) = (Bench::key(), Slot::number(7));
    let plain = bench.acquire(&key);
    assert_eq!(try_begin(bench, &key, slot), BeginOutcome::Running);
    assert!(bench.release(&plain.lock_id));
    let run = begin(bench, &key, slot);
    assert_eq!(try_begin(bench, &key, slot), BeginOutcome::Running);
    assert_eq!(bench.try_acquire(&key).unwrap(), AcquireResult::Locked);
    assert!(bench.extend(&run.grant.acquired.lock_id).is_some(), "it is renewed as any lease");
    bench.harness.age(&key, LONG_EXPIRED_MS);
    assert_eq!(begin(bench, &key, slot).grant.acquired.fence.get(), 3, "after a crash the slot runs again");
}

pub(crate) fn the_same_begin_again_answers_with_its_first_grant(bench: &Bench<'_>) {
    if !offered(bench) {
        return;
    }
    for slot in [Slot::number(7), Slot::every(Duration::from_millis(1))] {
        let (key, id) = (Bench::key(), Bench::id());
        let BeginOutcome::Begun(first) = begin_as(bench, &key, &id, slot).unwrap() else {
            panic!("it is free")
        };
        let BeginOutcome::Begun(again) = begin_as(bench, &key, &id, slot).unwrap() else {
            panic!("it is ours")
        };
        assert_eq!((&again.grant.acquired, again.slot), (&first.grant.acquired, first.slot));
        assert_eq!(bench.counter(&key), 1);
        assert_eq!(mark(bench, &key, &again, slot, MarkStep::Finish), MarkOutcome::Marked);
    }
}

pub(crate) fn only_the_lease_of_the_grant_marks_its_slot(bench: &Bench<'_>) {
    if !offered(bench) {
        return;
    }
    let (key, slot) = (Bench::key(), Slot::number(7));
    let old = begin(bench, &key, slot);
    bench.harness.age(&key, LONG_EXPIRED_MS);
    for step in [MarkStep::Claim, MarkStep::Finish] {
        assert_eq!(mark(bench, &key, &old, slot, step), MarkOutcome::NotMarked, "it is over");
    }
    let new = begin(bench, &key, slot);
    for step in [MarkStep::Claim, MarkStep::Finish, MarkStep::Verify] {
        assert_eq!(mark(bench, &key, &old, slot, step), MarkOutcome::NotMarked, "it is another's");
    }
    // A late copy of a begin is granted again under the same id, with another fence.
    let mut stale = new.clone();
    stale.grant.acquired.fence = old.grant.acquired.fence;
    for step in [MarkStep::Claim, MarkStep::Finish, MarkStep::Verify] {
        assert_eq!(mark(bench, &key, &stale, slot, step), MarkOutcome::NotMarked, "the fence is another");
    }
    assert!(bench.is_locked(&key), "none of it ended the lease");
    assert_eq!(mark(bench, &key, &new, slot, MarkStep::Finish), MarkOutcome::Marked);
    assert_eq!(mark(bench, &key, &new, slot, MarkStep::Finish), MarkOutcome::NotMarked, "the lease is gone");
}

pub(crate) fn a_claim_marks_the_slot_and_leaves_the_lease(bench: &Bench<'_>) {
    if !offered(bench) {
        return;
    }
    let (key, slot) = (Bench::key(), Slot::number(7).claim_at_start());
    let run = begin(bench, &key, slot);
    for _ in 0..2 {
        assert_eq!(mark(bench, &key, &run, slot, MarkStep::Claim), MarkOutcome::Marked, "again is as good");
    }
    assert!(bench.is_locked(&key));
    assert_eq!(try_begin(bench, &key, slot), BeginOutcome::AlreadyDone, "also while it runs");
    let again = begin_as(bench, &key, &run.grant.acquired.lock_id, slot);
    assert_eq!(again.unwrap(), BeginOutcome::AlreadyDone, "also to a copy of its own begin");
    assert!(bench.release(&run.grant.acquired.lock_id));
    assert_eq!(try_begin(bench, &key, slot), BeginOutcome::AlreadyDone);
}

pub(crate) fn a_verify_ends_the_lease_only_where_the_mark_is(bench: &Bench<'_>) {
    if !offered(bench) {
        return;
    }
    let (key, slot) = (Bench::key(), Slot::number(7));
    let run = begin(bench, &key, slot);
    assert_eq!(mark(bench, &key, &run, slot, MarkStep::Verify), MarkOutcome::NotMarked);
    assert!(bench.is_locked(&key));
    assert_eq!(mark(bench, &key, &run, slot, MarkStep::Claim), MarkOutcome::Marked);
    // Nobody else was granted it since: the mark is this run's.
    bench.harness.age(&key, LONG_EXPIRED_MS);
    assert_eq!(mark(bench, &key, &run, slot, MarkStep::Verify), MarkOutcome::Marked);
    assert!(!bench.harness.has_row(&key));
}

pub(crate) fn what_cannot_be_a_slot_is_refused_and_changes_nothing(bench: &Bench<'_>) {
    if !offered(bench) {
        return;
    }
    let (key, id) = (Bench::key(), Bench::id());
    let fence = Fence::new(1).unwrap();
    for slot in [
        Slot::every(Duration::ZERO),
        Slot::every(Duration::from_micros(999)),
        Slot::number(FENCE_MAX + 1),
        Slot::number(u64::MAX).claim_at_start(),
    ] {
        let refused = begin_as(bench, &key, &id, slot).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::InvalidArgument, "{slot:?}");
        let record = MarkRun::new(&key, &id, fence, slot, 1);
        let refused = bench.backend.mark_run(&record, MarkStep::Finish, bench.deadline()).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::InvalidArgument, "{slot:?}");
    }
    assert_eq!((bench.harness.has_row(&key), bench.counter(&key)), (false, 0));
}

pub(crate) fn a_fired_token_ends_a_begin_without_effect(bench: &Bench<'_>) {
    if !offered(bench) {
        return;
    }
    let token = CancelToken::new();
    let (key, id, slot) = (Bench::key(), Bench::id(), Slot::number(7));
    let attempt = Attempt::new(&key, &id, TTL, bench.deadline());
    let begin = BeginRun::new(attempt, slot);
    let outcome = bench.backend.begin_run(&begin, &token).unwrap();
    let BeginOutcome::Begun(run) = outcome else { panic!("it is free: {outcome:?}") };
    assert_eq!(mark(bench, &key, &run, slot, MarkStep::Finish), MarkOutcome::Marked);
    assert_eq!(bench.backend.begin_run(&begin, &token).unwrap(), BeginOutcome::AlreadyDone);

    token.cancel();
    let free = Bench::key();
    let attempt = Attempt::new(&free, &id, TTL, bench.deadline());
    let error = bench.backend.begin_run(&BeginRun::new(attempt, slot), &token).unwrap_err();
    assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Aborted, false));
    assert_eq!((bench.harness.has_row(&free), bench.counter(&free)), (false, 0));
}

pub(crate) fn one_of_many_begins_a_slot(bench: &Bench<'_>) {
    if !offered(bench) {
        return;
    }
    let key = Bench::key();
    let inside = AtomicU64::new(0);
    for number in 1..=5 {
        let slot = Slot::number(number);
        let finished = together(8, |_| {
            let mut finished = 0;
            loop {
                match try_begin(bench, &key, slot) {
                    BeginOutcome::Begun(run) => {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
                        inside.fetch_sub(1, Ordering::SeqCst);
                        assert_eq!(mark(bench, &key, &run, slot, MarkStep::Finish), MarkOutcome::Marked);
                        finished += 1;
                    }
                    BeginOutcome::Running => std::thread::yield_now(),
                    _ => return finished,
                }
            }
        });
        assert_eq!(finished.iter().sum::<u64>(), 1, "slot {number}");
    }
    assert_eq!(bench.counter(&key), 5, "no fence for nothing");
}
