//! Jobs that run once per slot, over the memory backend: what becomes of a run when its calls fail, its lease is
//! lost or its client closed.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use syncguard::memory::{Call, Fault, Loss};
use syncguard::{
    ErrorCode, LockClient, LockOptions, LostReason, MemoryBackend, Result, Run, RunOnce, Slot,
    TelemetryOptions, with_telemetry,
};

const LIMIT: Duration = Duration::from_secs(30);
const NAME: &str = "app:test:report";

fn client() -> (MemoryBackend, LockClient) {
    let memory = MemoryBackend::manual();
    let client = LockClient::new(memory.clone());
    (memory, client)
}

/// A job that is well at once.
fn run(client: &LockClient, slot: Slot) -> Result<RunOnce<(), String>> {
    client.run_once(NAME, slot, &LockOptions::new(), |_run| Ok(()))
}

#[test]
fn slots_pass_with_the_servers_time_and_those_that_were_missed_are_counted() {
    let (memory, client) = client();
    let hourly = Slot::every(Duration::from_secs(3600));
    let now = || u64::try_from(memory.server_time()).unwrap();
    let job = |run: &Run| {
        let start = now() - now() % 3_600_000;
        assert_eq!((run.slot(), run.period_start_ms()), (now() / 3_600_000, Some(start)));
        Ok::<_, ()>(run.skipped())
    };
    let skipped = || client.run_once(NAME, hourly, &LockOptions::new(), job).unwrap();
    assert_eq!((skipped(), skipped()), (RunOnce::Done(0), RunOnce::AlreadyDone));
    let hour = |hours: u64| memory.advance(Duration::from_secs(3600 * hours));
    hour(1);
    assert_eq!(skipped(), RunOnce::Done(0));
    hour(5);
    assert_eq!((skipped(), skipped()), (RunOnce::Done(4), RunOnce::AlreadyDone));
    assert_eq!(memory.mark(NAME, hourly).unwrap(), Some(now() - now() % 3_600_000), "a point in time");

    // A clock that was ahead.
    memory.shift_server_clock(-7_200_000);
    assert_eq!(skipped(), RunOnce::AlreadyDone);
    memory.set_mark(NAME, hourly, 0).unwrap();
    assert!(matches!(skipped(), RunOnce::Done(1..)), "an operator may set it back");
}

#[test]
fn a_crash_frees_the_slot_after_the_ttl_and_it_runs_again() {
    let (memory, client) = client();
    let dies = LockClient::new(memory.clone());
    let slot = Slot::number(7);
    let ran = dies.run_once(NAME, slot, &LockOptions::new(), |_run| {
        memory.fail_every(Call::Mark, ErrorCode::ServiceUnavailable);
        memory.fail_every(Call::Release, ErrorCode::ServiceUnavailable);
        Ok::<_, ()>(())
    });
    assert_eq!(ran.unwrap_err().code(), ErrorCode::ServiceUnavailable);
    assert_eq!(run(&client, slot).unwrap(), RunOnce::Running);
    memory.heal();
    memory.advance(Duration::from_secs(32));
    assert_eq!(run(&client, slot).unwrap(), RunOnce::Done(()));
}

#[test]
fn whoever_could_not_mark_its_slot_is_told_that_the_job_ran_and_lets_go() {
    for (fault, unknown, marked) in [
        (Fault::error(ErrorCode::ServiceUnavailable), false, None),
        (Fault::lost_request(ErrorCode::NetworkTimeout), true, None),
        (Fault::lost_answer(ErrorCode::NetworkTimeout), true, Some(7)),
    ] {
        let (memory, client) = client();
        let slot = Slot::number(7);
        memory.fail_next(Call::Mark, fault.clone());
        let error = run(&client, slot).unwrap_err();
        assert_eq!(error.is_outcome_unknown(), unknown, "{fault:?}");
        let text = error.to_string();
        assert!(text.starts_with("the job ran") && text.contains("not known") == unknown, "{text}");
        assert!(std::error::Error::source(&error).is_some(), "the cause is kept");
        assert_eq!((error.key(), error.lock_id().map(str::len)), (Some(NAME), Some(22)));
        assert_eq!(memory.mark(NAME, slot).unwrap(), marked, "{fault:?}");
        assert_eq!(memory.live_leases(), 0, "{fault:?}: it is released");
    }
}

#[test]
fn a_claim_that_fails_keeps_the_job_from_running() {
    for fault in [Fault::error(ErrorCode::ServiceUnavailable), Fault::lost_answer(ErrorCode::NetworkTimeout)]
    {
        let (memory, client) = client();
        let slot = Slot::number(7).claim_at_start();
        memory.fail_next(Call::Mark, fault.clone());
        let error =
            client.run_once(NAME, slot, &LockOptions::new(), |_run| -> Result<(), ()> { panic!("it ran") });
        let error = error.unwrap_err();
        assert!(error.to_string().starts_with("the job has not run"), "{error}");
        assert_eq!(error.is_outcome_unknown(), memory.mark(NAME, slot).unwrap().is_some(), "{fault:?}");
        assert_eq!(memory.live_leases(), 0, "{fault:?}: it is released");
    }
}

#[test]
fn a_claim_whose_answer_came_after_the_leases_end_keeps_the_job_from_running() {
    let (memory, client) = client();
    let gate = memory.hang_answer_of_next(Call::Mark);
    let slot = Slot::number(7).claim_at_start();
    let options = LockOptions::new().ttl(Duration::from_secs(2)).heartbeat(syncguard::Heartbeat::Off);
    std::thread::scope(|scope| {
        let call = scope
            .spawn(|| client.run_once(NAME, slot, &options, |_run| -> Result<(), ()> { panic!("it ran") }));
        assert!(gate.wait_for_calls(1, LIMIT));
        memory.advance(Duration::from_secs(3));
        gate.open();
        let error = call.join().unwrap().unwrap_err();
        assert_eq!(error.code(), ErrorCode::Aborted);
        assert!(error.to_string().contains("claimed and the job has not run"), "{error}");
    });
}

#[test]
fn a_begin_whose_answer_was_lost_runs_nothing_and_is_released() {
    let (memory, client) = client();
    memory.fail_next(Call::Acquire, Fault::lost_answer(ErrorCode::NetworkTimeout));
    let error = client
        .run_once(NAME, Slot::number(7), &LockOptions::new(), |_run| -> Result<(), ()> { panic!("it ran") });
    assert!(error.unwrap_err().is_outcome_unknown());
    assert!(memory.wait_for_answers(Call::Release, 1, LIMIT), "by the worker");
    assert_eq!(run(&client, Slot::number(7)).unwrap(), RunOnce::Done(()));
}

#[test]
fn a_lease_that_is_lost_fires_and_its_run_is_not_marked() {
    for (loss, reason) in [(Loss::RowMissing, LostReason::RowMissing), (Loss::Expired, LostReason::Expired)] {
        let (memory, client) = client();
        let slot = Slot::number(7);
        let ran = client.run_once(NAME, slot, &LockOptions::new(), |run| {
            memory.lose_on_next_renewal(NAME, loss).unwrap();
            memory.advance(Duration::from_secs(11));
            assert!(run.lost().wait_timeout(LIMIT) && !run.is_held());
            assert_eq!(run.lost_reason(), Some(reason));
            Ok::<_, ()>(())
        });
        let error = ran.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Aborted);
        assert!(error.to_string().starts_with("the job ran"), "{error}");
        assert_eq!(memory.mark(NAME, slot).unwrap(), None);
    }
}

#[test]
fn a_client_that_is_closed_meanwhile_marks_nothing() {
    let (memory, client) = client();
    let slot = Slot::number(7);
    let ran = client.run_once(NAME, slot, &LockOptions::new(), |run| {
        assert!(client.close(LIMIT).unwrap().is_clean(), "a job is not waited for");
        assert_eq!(run.lost_reason(), Some(LostReason::Closed));
        Ok::<_, ()>(())
    });
    let error = ran.unwrap_err();
    assert!(error.to_string().contains("closed"), "{error}");
    assert_eq!((memory.mark(NAME, slot).unwrap(), memory.live_leases()), (None, 0));
    assert_eq!(run(&client, slot).unwrap_err().code(), ErrorCode::Aborted);
}

#[test]
fn the_end_of_a_run_wakes_the_next_waiter_of_its_client_and_cannot_lose_its_lease() {
    let (memory, client) = client();
    let lost = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&lost);
    let options = LockOptions::new().on_lost(move |reason| told.lock().unwrap().push(reason));
    std::thread::scope(|scope| {
        let mut waiter = None;
        let ran = client.run_once(NAME, Slot::number(7), &options, |_run| {
            let tries = memory.calls(Call::Acquire);
            let patient =
                LockOptions::new().wait_forever().retry_delay(Duration::from_secs(3600)).wake_ups(false);
            let client = &client;
            waiter =
                Some(scope.spawn(move || client.lock_with(NAME, &patient).map(|guard| guard.fence().get())));
            assert!(memory.wait_for_answers(Call::Acquire, tries + 1, LIMIT));
            Ok::<_, ()>(())
        });
        assert_eq!(ran.unwrap(), RunOnce::Done(()));
        assert_eq!(waiter.unwrap().join().unwrap().unwrap(), 2);
    });
    assert!(client.close(LIMIT).unwrap().is_clean());
    assert!(lost.lock().unwrap().is_empty(), "a lease that has ended is not lost");
    assert_eq!(memory.calls(Call::Release), 1, "the waiter's: the run's ended with the mark");
}

#[test]
fn runs_are_reported_as_what_they_do_to_their_lease() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&lines);
    let options = TelemetryOptions::new(move |event| {
        let reason = event.reason.map_or("", |reason| reason.as_str());
        sink.lock()
            .unwrap()
            .push(format!("{} {} {reason}", event.operation, event.result).trim_end().to_owned());
    });
    let backend = Arc::new(with_telemetry(MemoryBackend::manual(), options));
    let client = LockClient::new(Arc::clone(&backend));
    let _ = run(&client, Slot::number(7)).unwrap();
    let _ = run(&client, Slot::number(7)).unwrap();
    let _ = client.run_once(NAME, Slot::number(8).claim_at_start(), &LockOptions::new(), |_run| {
        let _ = run(&client, Slot::number(9)).unwrap();
        Err::<(), _>(())
    });
    assert!(backend.handle().flush(LIMIT));
    let expected =
        ["acquire ok", "release ok", "acquire fail", "acquire ok", "acquire fail locked", "release ok"];
    assert_eq!(*lines.lock().unwrap(), expected);
}
