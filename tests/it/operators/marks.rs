//! The marks of jobs: which there are, and setting one back.

use std::time::Duration;

use crate::support::{Call, TTL, logs, place, unique};
use syncguard::{
    ErrorCode, JobMark, LockOptions, MarkReset, PgLockClient, RunOnce, Slot, SlotKind, hash_key,
};

fn run(client: &PgLockClient, name: &str, slot: Slot) -> RunOnce<u64, ()> {
    client.run_once(name, slot, &LockOptions::new(), |run| Ok::<_, ()>(run.skipped())).unwrap()
}

const HOURLY: Slot = Slot::every(Duration::from_secs(3600));

#[test]
fn marks_are_listed_with_name_and_kind_and_are_no_counters_of_a_key() {
    let place = place();
    let (a, b) = (place.key("a"), place.key("b"));
    let operator = place.client.operator();
    assert_eq!(operator.marks(10).unwrap(), []);
    for (name, slot) in [(&a, HOURLY), (&a, Slot::number(0)), (&b, Slot::number(20_261_128))] {
        assert_eq!(run(&place.client, name, slot), RunOnce::Done(0));
    }
    drop(place.client.semaphore(&a, 1).unwrap().acquire().unwrap());
    let marks = operator.marks(10).unwrap();
    let found: Vec<_> = marks.iter().map(|mark| (mark.name.as_str(), mark.kind, mark.ahead_ms)).collect();
    assert_eq!(
        found,
        [
            (a.as_str(), SlotKind::Every, None),
            (b.as_str(), SlotKind::Number, None),
            (a.as_str(), SlotKind::Number, None)
        ]
    );
    assert_eq!(marks[1..].iter().map(|mark| mark.mark).collect::<Vec<_>>(), [20_261_128, 0]);
    assert_eq!(operator.marks(1).unwrap().len(), 1);
    assert!(marks[0].mark.is_multiple_of(3_600_000) && !format!("{marks:?}").contains(&a));
    let counts = operator.counts().unwrap();
    assert_eq!((counts.counters, counts.marks), (3, Some(3)), "a, b and a permit");

    // One that lies in the future says so, and how far.
    let ahead = "UPDATE syncguard_fence_counters SET fence = fence + 86400000 WHERE fence_key LIKE '%done'";
    place.stored.run(ahead);
    let ahead = operator.marks(1).unwrap()[0].ahead_ms.unwrap();
    assert!((82_800_000..=86_400_000).contains(&ahead), "{ahead}");
    assert_eq!(run(&place.client, &a, HOURLY), RunOnce::AlreadyDone);
}

#[test]
fn a_mark_that_is_reset_is_as_if_the_job_had_never_run() {
    let place = place();
    let name = place.key("job");
    let operator = place.client.operator();
    for (slot, kind) in [(HOURLY, SlotKind::Every), (Slot::number(0), SlotKind::Number)] {
        assert_eq!(operator.reset_mark(&name, kind, "a test").unwrap(), MarkReset::NotMarked);
        for _ in 0..2 {
            assert_eq!(run(&place.client, &name, slot), RunOnce::Done(0), "and nothing was skipped");
            assert_eq!(run(&place.client, &name, slot), RunOnce::AlreadyDone);
            let mark = operator.marks(1).unwrap()[0].mark;
            let log = logs::capture();
            assert_eq!(operator.reset_mark(&name, kind, "an operator").unwrap(), MarkReset::Reset(mark));
            let lines = log.of_this_thread();
            let line = lines.iter().find(|line| line.text.contains("an operator")).unwrap();
            assert!(line.level == log::Level::Warn && line.text.contains(&hash_key(&name)));
            assert!(!line.text.contains(&name) && line.text.contains(&mark.to_string()), "{}", line.text);
            assert_eq!(operator.marks(9).unwrap(), Vec::<JobMark>::new());
            assert_eq!(operator.counts().unwrap().marks, Some(0));
            assert_eq!(operator.reset_mark(&name, kind, "a test").unwrap(), MarkReset::NotMarked);
        }
        // Claimed at the start, it is as well.
        let claimed = slot.claim_at_start();
        assert_eq!(run(&place.client, &name, claimed), RunOnce::Done(0));
        assert!(matches!(operator.reset_mark(&name, kind, "a test").unwrap(), MarkReset::Reset(_)));
    }
    // One kind leaves the other alone.
    for slot in [HOURLY, Slot::number(7)] {
        assert_eq!(run(&place.client, &name, slot), RunOnce::Done(0));
    }
    assert_eq!(operator.reset_mark(&name, SlotKind::Number, "a test").unwrap(), MarkReset::Reset(7));
    assert_eq!(run(&place.client, &name, HOURLY), RunOnce::AlreadyDone);
    assert_eq!(
        operator.reset_mark("", SlotKind::Every, "a test").unwrap_err().code(),
        ErrorCode::InvalidArgument
    );
}

#[test]
fn a_mark_is_not_reset_under_a_run() {
    let place = place();
    let name = place.key("job");
    let slot = |n| Slot::number(n);
    let operator = place.client.operator();
    assert_eq!(run(&place.client, &name, slot(1)), RunOnce::Done(0));
    let mut writer = place.schema.client();
    let ran = place.client.run_once(&name, slot(2), &LockOptions::new(), |run| {
        assert_eq!(operator.reset_mark(&name, SlotKind::Number, "a test").unwrap(), MarkReset::Running);
        let mut tx = writer.transaction().unwrap();
        run.complete_in(&mut tx).unwrap();
        assert_eq!(operator.reset_mark(&name, SlotKind::Number, "a test").unwrap(), MarkReset::Running);
        tx.commit().unwrap();
        // It is marked, and whoever runs it has yet to see that.
        assert_eq!(operator.reset_mark(&name, SlotKind::Number, "a test").unwrap(), MarkReset::Running);
        Ok::<_, ()>(())
    });
    assert_eq!(ran.unwrap(), RunOnce::Done(()));
    assert_eq!(operator.reset_mark(&name, SlotKind::Number, "a test").unwrap(), MarkReset::Reset(2));
}

#[test]
fn a_mark_that_is_written_meanwhile_stays() {
    let place = place();
    let name = place.key("job");
    assert_eq!(run(&place.client, &name, Slot::number(1)), RunOnce::Done(0));
    // A transaction with complete_in whose lease has run out by now: it commits all the same.
    let mut writer = place.schema.client();
    let set = format!(
        "UPDATE syncguard_fence_counters SET fence = 2 WHERE fence_key = E'fence:{name}\\u2126number'"
    );
    writer.batch_execute(&format!("BEGIN; {set}")).unwrap();
    let app = unique();
    let (client, job) = (place.named(&app), name.clone());
    let call = Call::start(&app, move || client.operator().reset_mark(&job, SlotKind::Number, "a test"));
    call.wait_until_blocked(&place.stored);
    writer.batch_execute("COMMIT").unwrap();
    assert_eq!(call.join().unwrap(), MarkReset::Running);
    assert_eq!(place.stored.counter(&format!("{name}\u{2126}number")), Some(2));
}

#[test]
fn a_mark_that_something_keeps_from_being_reset_is_an_error() {
    let place = place();
    let name = place.key("job");
    assert_eq!(run(&place.client, &name, Slot::number(1)), RunOnce::Done(0));
    place.stored.put_in_the_way("UPDATE ON syncguard_fence_counters", "", "RETURN NULL");
    let error = place.client.operator().reset_mark(&name, SlotKind::Number, "a test").unwrap_err();
    assert!(error.code() == ErrorCode::Internal && error.to_string().contains("trigger"), "{error:?}");
    assert_eq!(place.stored.counter(&format!("{name}\u{2126}number")), Some(1));
    assert!(place.client.acquire(&name, TTL).is_err(), "it swallows fences as well");
}
