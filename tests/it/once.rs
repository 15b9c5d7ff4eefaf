//! Jobs that run once per slot, on a real server: who runs, what is marked, and what a crash, a lost lease
//! or a lost answer leaves behind.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod completed;
mod lost_answers;
mod marks;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::calls::{FORMS, ms, renewing_often, token};
use crate::support::listeners::{wait_blindly, wait_for_listener};
use crate::support::{Call, LIMIT, Place, logs, place, together, unique, wait_until};
use syncguard::{
    CancelToken, ErrorCode, FENCE_MAX, LockOptions, PgLockClient, Result, RunOnce, Slot, hash_key,
};

type Outcome = RunOnce<&'static str, &'static str>;

/// A job that is well at once.
fn run_job(client: &PgLockClient, name: &str, slot: Slot) -> Result<Outcome> {
    client.run_once(name, slot, &LockOptions::new(), |_run| Ok("made"))
}

/// A trigger that does this with each mark of a number that is there and changed.
fn of_marks_in_the_way(place: &Place, body: &str) {
    let marks = "WHEN (NEW.fence_key LIKE '%number')";
    place.stored.put_in_the_way("UPDATE ON syncguard_fence_counters", marks, body);
}

/// The mark of this kind of slots, as it is stored.
fn mark(place: &Place, name: &str, kind: &str) -> Option<i64> {
    place.stored.counter(&format!("{name}\u{2126}{kind}"))
}

#[test]
fn a_job_runs_once_per_slot_and_its_mark_stands_beside_the_counter_of_its_name() {
    let place = place();
    let (name, slot) = (place.key("job"), Slot::number(20_261_128));
    let ran = place.client.run_once(&name, slot, &LockOptions::new(), |run| {
        assert!(run.is_held() && !run.lost().is_cancelled() && run.lost_reason().is_none());
        assert_eq!((run.slot(), run.skipped(), run.fence().get()), (20_261_128, 0, 1));
        assert_eq!(run.period_start_ms(), None);
        assert!(place.stored.row(&name).is_some() && mark(&place, &name, "number").is_none());
        assert_eq!(run_job(&place.client, &name, slot).unwrap(), RunOnce::Running, "beside it");
        assert!(!format!("{run:?}").contains(&name));
        Ok::<_, String>(7)
    });
    assert_eq!(ran.unwrap(), RunOnce::Done(7));
    assert_eq!(mark(&place, &name, "number"), Some(20_261_128));
    assert_eq!((mark(&place, &name, "done"), place.stored.row(&name)), (None, None));

    for number in [20_261_128, 20_261_127, 0] {
        assert_eq!(run_job(&place.client, &name, Slot::number(number)).unwrap(), RunOnce::AlreadyDone);
    }
    let next = Slot::number(20_261_131);
    let skipped =
        place.client.run_once(&name, next, &LockOptions::new(), |run| Ok::<_, String>(run.skipped()));
    assert_eq!(skipped.unwrap(), RunOnce::Done(2));
    assert_eq!(place.stored.counter(&name), Some(2), "one fence per run");
}

#[test]
fn a_period_is_the_servers_and_the_next_one_runs_again() {
    let place = place();
    let (name, slot) = (place.key("job"), Slot::every(ms(400)));
    let run = |start: &mut u64| {
        let outcome = place.client.run_once(&name, slot, &LockOptions::new(), |run| {
            *start = run.period_start_ms().unwrap();
            assert_eq!(run.slot(), *start / 400, "the clock divided by the period");
            Ok::<_, String>(run.skipped())
        });
        outcome.unwrap()
    };
    let (mut first, mut later) = (0, 0);
    assert_eq!(run(&mut first), RunOnce::Done(0));
    let now = u64::try_from(place.stored.now_ms()).unwrap();
    assert!(first % 400 == 0 && first <= now, "{first} at {now}");
    assert_eq!(mark(&place, &name, "done"), i64::try_from(first).ok());
    place.wait_for(i64::try_from(first).unwrap() + 4 * 400);
    let outcome = run(&mut later);
    assert_eq!(outcome, RunOnce::Done((later - first) / 400 - 1), "the slots between");
    assert!(later >= first + 4 * 400);
}

#[test]
fn of_many_clients_one_runs_each_slot() {
    let place = place();
    let name = place.key("job");
    let clients: Vec<_> = (0..8).map(|n| place.named(&format!("{}-{n}", unique()))).collect();
    let runs = AtomicUsize::new(0);
    for number in 1..=10 {
        let outcomes = together(clients.len(), |n| {
            loop {
                let outcome = clients[n].run_once(&name, Slot::number(number), &LockOptions::new(), |_run| {
                    runs.fetch_add(1, Ordering::SeqCst);
                    Ok::<_, String>(())
                });
                match outcome.unwrap() {
                    RunOnce::Running => std::thread::yield_now(),
                    outcome => return outcome,
                }
            }
        });
        let done = outcomes.iter().filter(|outcome| **outcome == RunOnce::Done(())).count();
        let already = outcomes.iter().filter(|outcome| **outcome == RunOnce::AlreadyDone).count();
        assert_eq!((done, already), (1, 7), "slot {number}");
    }
    assert_eq!(runs.load(Ordering::SeqCst), 10);
    assert_eq!(place.stored.counter(&name), Some(10));
}

#[test]
fn a_job_that_failed_or_panicked_is_released_and_runs_again() {
    let place = place();
    let (name, slot) = (place.key("job"), Slot::number(7));
    let failed = place.client.run_once(&name, slot, &LockOptions::new(), |_run| Err::<(), _>("no paper"));
    assert_eq!(failed.unwrap(), RunOnce::Failed("no paper"));
    assert_eq!(place.stored.row(&name), None);
    let panic = catch_unwind(AssertUnwindSafe(|| {
        place
            .client
            .run_once(&name, slot, &LockOptions::new(), |_run| -> Result<(), ()> { panic!("no paper") })
    }));
    assert!(panic.is_err());
    assert_eq!((place.stored.row(&name), mark(&place, &name, "number")), (None, None));
    assert_eq!(run_job(&place.client, &name, slot).unwrap(), RunOnce::Done("made"));
}

#[test]
fn bad_input_is_refused_before_any_io() {
    // Nobody listens there.
    let builder = PgLockClient::builder().auto_create_tables(false);
    let client = builder.connect("postgresql://nobody@127.0.0.1:1/nowhere").unwrap();
    let (name, good) = ("job", Slot::number(1));
    let options = LockOptions::new();
    for (name, slot, options) in [
        (name, Slot::every(Duration::ZERO), &options),
        (name, Slot::every(Duration::from_micros(999)), &options),
        (name, Slot::every(Duration::MAX), &options),
        (name, Slot::number(FENCE_MAX + 1), &options),
        (name, Slot::number(FENCE_MAX + 1).claim_at_start(), &options),
        ("", good, &options),
        ("a\0b", good, &options),
        (name, good, &LockOptions::new().ttl(Duration::ZERO)),
    ] {
        let error = client.run_once(name, slot, options, |_run| Ok::<_, ()>(())).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{slot:?}: {error:?}");
    }
    assert_eq!(
        run_job(&client, name, good).unwrap_err().code(),
        ErrorCode::ServiceUnavailable,
        "that is I/O"
    );
}

#[test]
fn a_name_with_the_marks_own_letter_is_a_name_as_any_other() {
    let place = place();
    let name = place.key("job");
    // U+2126 in a name becomes U+03A9: nobody's name leads to the mark of another.
    let tricky = format!("{name}\u{2126}number");
    assert_eq!(run_job(&place.client, &name, Slot::number(7)).unwrap(), RunOnce::Done("made"));
    assert_eq!(run_job(&place.client, &tricky, Slot::number(7)).unwrap(), RunOnce::Done("made"));
    let _guard = place.client.lock(&tricky).unwrap();
    assert_eq!(place.stored.counter(&format!("{name}\u{3a9}number")), Some(2));
    assert_eq!(mark(&place, &name, "number"), Some(7), "nobody raised it");
}

#[test]
fn a_plain_lock_of_the_name_and_a_run_exclude_each_other() {
    let place = place();
    let (name, slot) = (place.key("job"), Slot::number(7));
    let guard = place.client.lock(&name).unwrap();
    assert_eq!(run_job(&place.client, &name, slot).unwrap(), RunOnce::Running);
    guard.release().unwrap();
    let ran = place.client.run_once(&name, slot, &LockOptions::new(), |_run| {
        Ok::<_, String>(place.client.try_lock(&name).unwrap().is_none())
    });
    assert_eq!(ran.unwrap(), RunOnce::Done(true));
}

#[test]
fn a_long_job_is_renewed() {
    let place = place();
    let name = place.key("job");
    let options = renewing_often().ttl(ms(4_000));
    let ran = place.client.run_once(&name, Slot::number(7), &options, |run| {
        let end = || place.stored.row(&name).unwrap().expires_at_ms;
        let granted = end();
        wait_until(LIMIT, "it is renewed, again and again", || end() > granted + 1_500);
        Ok::<_, String>(run.is_held())
    });
    assert_eq!(ran.unwrap(), RunOnce::Done(true));
}

#[test]
fn a_job_whose_lease_was_lost_is_not_marked_and_whoever_asked_is_told_that_it_ran() {
    let place = place();
    let (name, slot) = (place.key("job"), Slot::number(7));
    let ran = place.client.run_once(&name, slot, &LockOptions::new(), |_run| {
        place.client.operator().break_lock(&name, "a test").unwrap();
        Ok::<_, String>(())
    });
    let error = ran.unwrap_err();
    assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Aborted, false));
    assert!(error.to_string().starts_with("the job ran"), "{error}");
    assert_eq!((error.key(), error.to_string().contains(&name)), (Some(name.as_str()), false));
    assert_eq!(mark(&place, &name, "number"), None);

    // Another run has the lease now: the old one leaves it, and the mark, alone.
    let ran = place.client.run_once(&name, slot, &LockOptions::new(), |_run| {
        place.client.operator().break_lock(&name, "a test").unwrap();
        assert_eq!(run_job(&place.client, &name, slot).unwrap(), RunOnce::Done("made"));
        Ok::<_, String>(())
    });
    assert_eq!(ran.unwrap_err().code(), ErrorCode::Aborted, "the slot is told as done once");
    assert_eq!(run_job(&place.client, &name, slot).unwrap(), RunOnce::AlreadyDone);
}

#[test]
fn a_slot_that_is_claimed_at_its_start_is_not_run_again_whatever_becomes_of_the_job() {
    let place = place();
    let slot = |number| Slot::number(number).claim_at_start();
    let name = place.key("job");
    let ran = place.client.run_once(&name, slot(1), &LockOptions::new(), |_run| {
        assert_eq!(mark(&place, &name, "number"), Some(1), "before the job");
        assert!(place.stored.row(&name).is_some());
        Err::<(), _>("no paper")
    });
    assert_eq!(ran.unwrap(), RunOnce::Failed("no paper"));
    assert_eq!(place.stored.row(&name), None);
    assert_eq!(run_job(&place.client, &name, slot(1)).unwrap(), RunOnce::AlreadyDone);
    let panic = catch_unwind(AssertUnwindSafe(|| {
        place
            .client
            .run_once(&name, slot(2), &LockOptions::new(), |_run| -> Result<(), ()> { panic!("no paper") })
    }));
    assert!(panic.is_err());
    assert_eq!(run_job(&place.client, &name, slot(2)).unwrap(), RunOnce::AlreadyDone);
    assert_eq!(run_job(&place.client, &name, slot(3)).unwrap(), RunOnce::Done("made"));
    // The lease is not what keeps it from running twice.
    let ran = place.client.run_once(&name, slot(4), &LockOptions::new(), |_run| {
        place.client.operator().break_lock(&name, "a test").unwrap();
        Ok::<_, String>(run_job(&place.client, &name, slot(4)).unwrap())
    });
    assert_eq!(ran.unwrap(), RunOnce::Done(RunOnce::AlreadyDone));
}

#[test]
fn a_mark_in_the_future_stops_the_job_and_is_warned_of() {
    let place = place();
    let (name, slot) = (place.key("job"), Slot::every(ms(1_000)));
    let mark = format!("{name}\u{2126}done");
    place.stored.set_counter(&mark, place.stored.now_ms() + 3_600_000);
    let log = logs::capture();
    assert_eq!(run_job(&place.client, &name, slot).unwrap(), RunOnce::AlreadyDone);
    let lines = log.of_this_thread();
    let line = lines.iter().find(|line| line.level == log::Level::Warn).expect("a warning");
    assert!(line.text.contains("in the future") && line.text.contains(&hash_key(&name)), "{}", line.text);
    assert!(!line.text.contains(&name), "{}", line.text);

    // A longer period's mark is none of the future, and an older number is nothing to speak of.
    place.stored.set_counter(&mark, place.stored.now_ms());
    let log = logs::capture();
    assert_eq!(run_job(&place.client, &name, Slot::every(ms(3_600_000))).unwrap(), RunOnce::AlreadyDone);
    place.stored.set_counter(&format!("{name}\u{2126}number"), 900_000_000_000_000);
    assert_eq!(run_job(&place.client, &name, Slot::number(1)).unwrap(), RunOnce::AlreadyDone);
    assert!(!log.of_this_thread().iter().any(|line| line.level <= log::Level::Warn));
}

#[test]
fn a_token_ends_the_begin_also_in_the_queue_and_nothing_after_it() {
    let place = place();
    let (name, slot) = (place.key("job"), Slot::number(7));
    let fired = CancelToken::new();
    fired.cancel();
    let options = LockOptions::new().cancel(&fired);
    let refused = place.client.run_once(&name, slot, &options, |_run| Ok::<_, ()>(())).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::Aborted);

    let mut stranger = place.schema.client();
    stranger.execute("SELECT pg_advisory_lock(hashtext($1))", &[&name]).unwrap();
    let app = unique();
    let (client, token) = (place.named(&app), CancelToken::new());
    let call = {
        let (name, options) = (name.clone(), LockOptions::new().cancel(&token));
        Call::start(&app, move || client.run_once(&name, slot, &options, |_run| Ok::<_, ()>(())))
    };
    call.wait_until_blocked(&place.stored);
    token.cancel();
    let error = call.join().unwrap_err();
    assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Aborted, false));
    stranger.execute("SELECT pg_advisory_unlock_all()", &[]).unwrap();
    assert_eq!(place.stored.counter(&name), None, "nothing was granted");

    let token = CancelToken::new();
    let options = LockOptions::new().cancel(&token);
    let ran = place.client.run_once(&name, slot, &options, |_run| {
        token.cancel();
        Ok::<_, ()>(())
    });
    assert_eq!(ran.unwrap(), RunOnce::Done(()), "the job that ran is marked all the same");
}

#[test]
fn the_mark_may_come_while_a_begin_waits() {
    for two_messages in FORMS {
        let place = place();
        let (name, slot) = (place.key("job"), Slot::number(7));
        let app = unique();
        let other = place.named(&app);
        let mut connection = place.schema.client();
        let mut bystander = place.schema.client();
        let ran = place.client.run_once(&name, slot, &LockOptions::new(), |run| {
            let mut transaction = connection.transaction().unwrap();
            run.complete_in(&mut transaction).unwrap();
            // The lease is over; whoever wants the key has to wait for its row, with the mark not there yet.
            place.stored.age(&name, 1_500);
            let mut row = bystander.transaction().unwrap();
            row.execute("SELECT FROM syncguard_locks WHERE key = $1 FOR UPDATE", &[&name]).unwrap();
            let call = {
                let (name, options) = (name.clone(), LockOptions::new().cancel(&token(two_messages)));
                Call::start(&app, move || other.run_once(&name, slot, &options, |_run| Ok::<_, ()>(())))
            };
            call.wait_until_blocked(&place.stored);
            transaction.commit().unwrap();
            row.rollback().unwrap();
            assert_eq!(call.join().unwrap(), RunOnce::AlreadyDone);
            Ok::<_, String>(())
        });
        assert_eq!(ran.unwrap(), RunOnce::Done(()));
        assert_eq!(place.stored.counter(&name), Some(1), "no fence was taken");
    }
}

#[test]
fn the_end_of_a_run_notifies_those_who_wait_for_its_name() {
    let place = place();
    let mut observer = place.schema.client();
    for (number, completes) in [(1, false), (2, true)] {
        let name = place.key("job");
        let waiter = place.named(&unique());
        let mut connection = place.schema.client();
        let mut waiting = None;
        let ran = place.client.run_once(&name, Slot::number(number), &LockOptions::new(), |run| {
            if completes {
                let mut transaction = connection.transaction().unwrap();
                run.complete_in(&mut transaction).unwrap();
                transaction.commit().unwrap();
            }
            waiting = Some(wait_blindly(&waiter, &name));
            wait_for_listener(&mut observer, &name);
            Ok::<_, String>(())
        });
        assert_eq!(ran.unwrap(), RunOnce::Done(()));
        let guard = waiting.unwrap().join().unwrap().unwrap();
        guard.release().unwrap();
    }
}

#[test]
fn a_trigger_that_swallows_the_mark_is_an_error_that_says_that_the_job_ran() {
    for body in ["RETURN NULL", "RETURN OLD"] {
        let place = place();
        let name = place.key("job");
        assert_eq!(run_job(&place.client, &name, Slot::number(1)).unwrap(), RunOnce::Done("made"));
        of_marks_in_the_way(&place, body);
        let error = run_job(&place.client, &name, Slot::number(2)).unwrap_err();
        assert_eq!(
            (error.code(), error.is_outcome_unknown()),
            (ErrorCode::Internal, false),
            "{body}: {error:?}"
        );
        assert!(error.to_string().starts_with("the job ran"), "{error}");
        assert!(error.chain().to_string().contains("trigger"), "{}", error.chain());
        assert_eq!((mark(&place, &name, "number"), place.stored.row(&name)), (Some(1), None), "{body}");
        let claimed = run_job(&place.client, &name, Slot::number(2).claim_at_start()).unwrap_err();
        assert!(
            claimed.code() == ErrorCode::Internal && claimed.to_string().contains("has not run"),
            "{claimed}"
        );
    }
}
