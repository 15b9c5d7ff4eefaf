//! What is due when, what the worker makes of answers, and how its work is counted.

use super::guards::pass;
use super::*;
use crate::lock::registry::Schedule;
use crate::model::time::Moment;

#[test]
fn a_schedule_gives_what_is_due_in_order_and_has_one_entry_per_id() {
    let start = Recorder::manual().now();
    let at = |n| start.after(s(n));
    let mut schedule = Schedule::default();
    assert!(schedule.is_empty() && schedule.next().is_never() && schedule.pop(Moment::NEVER).is_none());
    assert_eq!((schedule.put(1, at(3), 'a'), schedule.put(2, at(2), 'b')), (None, None));
    assert_eq!(schedule.put(1, at(1), 'c'), Some('a'), "moved");
    assert_eq!((schedule.len(), schedule.is_empty(), schedule.next()), (2, false, at(1)));
    assert_eq!((schedule.pop(start), schedule.pop(at(1))), (None, Some((1, 'c'))));
    assert_eq!((schedule.pop(at(1)), schedule.len(), schedule.next()), (None, 1, at(2)));
    assert_eq!((schedule.remove(1), schedule.remove(2)), (None, Some('b')));
    assert!(schedule.is_empty() && schedule.pop(Moment::NEVER).is_none());
}

#[test]
fn a_pending_release_has_the_time_until_the_next_renewal_and_a_moment_at_least() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    // Its renewal is due after a second; before it is taken, nothing is.
    let mut renewed = None;
    for (passed, rest) in [(Duration::ZERO, s(5)), (Duration::ZERO, s(1)), (ms(900), ms(200))] {
        let held = client.lock_with("k", &LockOptions::new().heartbeat(Heartbeat::Off)).unwrap();
        backend.advance(passed);
        runtime.block_on(async move { drop(held) });
        eventually("the worker has released it", || backend.is_free("k"));
        let calls = backend.state.lock().deadlines.clone();
        let last = calls.iter().rfind(|(what, _)| *what == "release").unwrap().1;
        assert_eq!(last.since(backend.now()), rest);
        renewed.get_or_insert_with(|| client.lock_with("other", &LockOptions::new().ttl(s(3))).unwrap());
    }
}

#[test]
fn close_counts_what_failed_and_what_was_not_held() {
    let backend = Recorder::manual();
    let (client, reports) = reporting_client(&backend);
    let _held = [client.lock("a").unwrap(), client.lock("b").unwrap()];
    backend.script("release", [Script::Fail(ErrorCode::ServiceUnavailable); 100]);
    let report = client.close(s(30)).unwrap();
    assert_eq!((report.released, report.not_held, report.failed, report.pending), (0, 0, 2, 0));
    assert!(!report.is_clean(), "{report:?}");
    eventually("each is reported", || reports.lock().len() == 2);

    let backend = Recorder::manual();
    let (client, reports) = reporting_client(&backend);
    backend.script("attempt", [Script::Unknown]);
    client.acquire("k", s(30)).unwrap_err();
    let report = client.close(s(30)).unwrap();
    assert_eq!((report.released, report.not_held, report.failed, report.pending), (0, 1, 0, 0));
    assert!(report.is_clean() && reports.lock().is_empty(), "{report:?}");
}

#[test]
fn a_lease_whose_renewals_were_refused_to_its_end_is_not_called_unreachable() {
    for (answer, reason) in [
        (Script::Denied, LostReason::RenewalRefused),
        (Script::Fail(ErrorCode::AuthFailed), LostReason::Unreachable),
    ] {
        let backend = Recorder::manual();
        let client = client(&backend);
        let held = client.lock("k").unwrap();
        backend.script("renew", [answer; 1000]);
        pass(&backend, &client, s(29));
        assert!(held.is_held() && backend.count("renew") > 1);
        backend.advance(s(1));
        assert!(held.lost().wait_timeout(s(30)));
        assert_eq!(held.lost_reason(), Some(reason));
    }
}

#[test]
fn a_renewal_leaves_time_for_a_second_try() {
    let backend = Recorder::manual();
    let client = client(&backend);
    let held = client.lock_with("k", &LockOptions::new().ttl(s(6))).unwrap();
    backend.advance(s(2));
    eventually("it is renewed", || held.remaining() == s(6));
    let calls = backend.state.lock().deadlines.clone();
    let renewal = calls.iter().find(|(what, _)| *what == "renew").unwrap().1;
    assert_eq!(renewal.since(backend.now()), s(2), "half of what was left");
}

#[test]
fn a_callback_that_closes_the_client_waits_for_what_is_to_be_released() {
    let backend = Recorder::system();
    let client = client(&backend);
    let (tell, told) = std::sync::mpsc::channel();
    let (inner, tell) = (client.clone(), Mutex::new(tell));
    let options = LockOptions::new()
        .ttl(ms(300))
        .on_lost(move |_| tell.lock().send(inner.close(s(30)).unwrap()).unwrap_or_default());
    let _other = client.lock_with("other", &LockOptions::new().ttl(s(3600))).unwrap();
    // One of the two is tried again after a pause.
    backend.script("release", [Script::Fail(ErrorCode::ServiceUnavailable)]);
    let _lost = client.lock_with("k", &options).unwrap();
    backend.remove("k");
    let report = told.recv_timeout(recorder::LIMIT).unwrap();
    assert_eq!((report.released, report.not_held, report.pending), (1, 1, 0), "{report:?}");
    assert!(backend.is_free("other"));
}
