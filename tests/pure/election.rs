//! Leader election over the memory backend: what others got wrong, by name, and what ends a campaign.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::ControlFlow::{Break, Continue};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use syncguard::memory::{Call, Fault};
use syncguard::{
    CancelToken, ErrorCode, Fence, Jitter, LockBackend, LockClient, LockOptions, LostReason, MemoryBackend,
    ReleaseSource,
};
use syncguard_test_support::wait_until;

const LIMIT: Duration = Duration::from_secs(60);
const KEY: &str = "scheduler";

fn s(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn options() -> LockOptions {
    LockOptions::new()
}

/// A server and its only client; time passes when the test says so.
fn manual() -> (MemoryBackend, LockClient) {
    let memory = MemoryBackend::manual();
    let client = LockClient::new(memory.clone());
    (memory, client)
}

/// Runs `work` on a thread, while time passes in these steps until it returns.
#[track_caller]
fn while_time_passes<T: Send>(memory: &MemoryBackend, step: Duration, work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let worker = scope.spawn(work);
        wait_until(LIMIT, "the call returns", || {
            memory.advance(step);
            worker.is_finished()
        });
        worker.join().unwrap()
    })
}

// What others got wrong.

#[test]
fn an_identity_by_host_name_would_make_two_leaders_of_one_process() {
    let memory = MemoryBackend::new();
    let clients = [LockClient::new(memory.clone()), LockClient::new(memory)];
    let leaders = AtomicUsize::new(0);
    let terms = Mutex::new(Vec::new());
    let quick = options().retry_delay(ms(1));
    thread::scope(|scope| {
        for candidate in 0..6 {
            let (client, leaders, terms, quick) = (&clients[candidate % 2], &leaders, &terms, &quick);
            scope.spawn(move || {
                let mut led = 0;
                client.elect(KEY, quick, |term| {
                    assert_eq!(leaders.fetch_add(1, Ordering::SeqCst), 0, "one leader at a time");
                    let lock_id = client.get_by_key_raw(KEY).unwrap().expect("we lead").lock_id;
                    terms.lock().unwrap().push((term.number(), lock_id));
                    led += 1;
                    leaders.fetch_sub(1, Ordering::SeqCst);
                    if led == 20 { Break(()) } else { Continue(()) }
                })
            });
        }
    });
    let terms = terms.into_inner().unwrap();
    assert_eq!(terms.len(), 120);
    assert!(terms.is_sorted_by(|a, b| a.0 < b.0), "terms strictly increase");
    assert_eq!(terms.iter().map(|(_, id)| id).collect::<BTreeSet<_>>().len(), 120, "an id for each campaign");
}

#[test]
fn nobody_is_still_leader_after_a_check_that_failed() {
    let (memory, client) = manual();
    memory.fail_every(Call::Renew, ErrorCode::ServiceUnavailable);
    let reason = client.elect(KEY, &options().ttl(s(30)), |term| {
        memory.advance(s(10));
        assert!(memory.wait_for_answers(Call::Renew, 1, LIMIT));
        assert!(term.is_held(), "it is trusted for as long as it was confirmed");
        assert_eq!(term.remaining(), s(20), "what failed prolongs nothing");
        memory.advance(s(20));
        assert!(!term.is_held() && term.remaining().is_zero());
        assert!(term.lost().wait_timeout(LIMIT));
        assert!(memory.has_row(KEY), "and nobody else has to lead first");
        Break(term.lost_reason())
    });
    assert_eq!(reason.unwrap(), Some(LostReason::Unreachable));
}

#[test]
fn trust_is_not_counted_from_the_answer() {
    let memory = MemoryBackend::manual().with_operation_timeout(s(60));
    let client = LockClient::new(memory.clone());
    let gate = memory.hang_answer_of_next(Call::Acquire);
    thread::scope(|scope| {
        let leading = scope.spawn(|| {
            client.elect(KEY, &options().ttl(s(30)), |term| {
                assert_eq!(term.remaining(), s(21), "the grant's answer took nine seconds");
                let gate = memory.hang_answer_of_next(Call::Renew);
                memory.advance(s(1));
                assert!(gate.wait_for_calls(1, LIMIT), "a renewal is due");
                memory.advance(s(5));
                gate.open();
                wait_until(LIMIT, "the renewal counts", || term.remaining() > s(15));
                Break(term.remaining())
            })
        });
        assert!(gate.wait_for_calls(1, LIMIT));
        memory.advance(s(9));
        gate.open();
        assert_eq!(leading.join().unwrap().unwrap(), s(25), "the renewal's answer took five");
    });
}

#[test]
fn a_resignation_that_failed_is_not_forgotten() {
    let faults = [
        Fault::error(ErrorCode::ServiceUnavailable),
        Fault::lost_request(ErrorCode::NetworkTimeout),
        Fault::lost_answer(ErrorCode::NetworkTimeout),
    ];
    for (n, fault) in faults.into_iter().enumerate() {
        for steps_down in [false, true] {
            let memory = MemoryBackend::new();
            let client = LockClient::new(memory.clone());
            let told = std::sync::Arc::new(Mutex::new(Vec::new()));
            let list = std::sync::Arc::clone(&told);
            // Nobody waits for this ttl, so only the worker can make the key free.
            let options = options().ttl(s(3600)).on_release_error(move |error, context| {
                list.lock().unwrap().push((error.code(), context.source));
            });
            let mut led = 0;
            let over = client.elect(KEY, &options, |term| {
                led += 1;
                if led == 1 {
                    memory.fail_next(Call::Release, fault.clone());
                }
                if steps_down && led == 1 { Continue(()) } else { Break(term.lost().clone()) }
            });
            assert!(over.unwrap().is_cancelled(), "nothing is trusted meanwhile");
            wait_until(LIMIT, "the worker has resigned", || !memory.has_row(KEY));
            let told = told.lock().unwrap();
            assert_eq!((told.len(), told[0].1), (1, ReleaseSource::Helper), "{n}: {told:?}");
            drop(client);
            let next = LockClient::new(memory.clone());
            let term = next.elect(KEY, &LockOptions::new(), |term| Break(term.number())).unwrap();
            assert_eq!(term.get(), led + 1);
        }
    }
}

#[test]
fn nobody_leads_again_because_the_server_is_back() {
    let (memory, client) = manual();
    let mut terms = Vec::new();
    let leads = AtomicBool::new(false);
    let led = thread::scope(|scope| {
        let leading = scope.spawn(|| {
            client.elect(KEY, &options().ttl(s(30)), |term| {
                leads.store(true, Ordering::SeqCst);
                terms.push(term.number());
                if terms.len() == 2 {
                    return Break(());
                }
                memory.fail_all(ErrorCode::ServiceUnavailable);
                memory.advance(s(30));
                memory.heal();
                let renewals = memory.calls(Call::Renew);
                for _ in 0..5 {
                    memory.advance(s(10));
                    assert!(!term.is_held(), "lost is final");
                }
                assert!(term.lost().wait_timeout(LIMIT));
                assert_eq!(memory.calls(Call::Renew), renewals, "and nobody renews it");
                leads.store(false, Ordering::SeqCst);
                Continue(())
            })
        });
        // Only between the terms is it the test's thread that lets time pass.
        wait_until(LIMIT, "it has led twice", || {
            if !leads.load(Ordering::SeqCst) {
                memory.advance(ms(1));
            }
            leading.is_finished()
        });
        leading.join().unwrap()
    });
    led.unwrap();
    assert!(terms[0] < terms[1], "it leads again under a new term only: {terms:?}");
}

#[test]
fn a_renewal_has_a_limit_and_so_has_a_term_that_is_renewed() {
    let (memory, client) = manual();
    let gate = memory.hang_every(Call::Renew);
    let reason = client.elect(KEY, &options().ttl(s(30)), |term| {
        memory.advance(s(10));
        assert!(gate.wait_for_calls(1, LIMIT), "a renewal is under way, and stays so");
        assert!(term.is_held());
        memory.advance(s(20));
        assert!(!term.is_held() && term.lost().wait_timeout(LIMIT));
        gate.open();
        Break(term.lost_reason())
    });
    assert_eq!(reason.unwrap(), Some(LostReason::Unreachable));

    let (memory, client) = manual();
    let reason = client.elect(KEY, &options().ttl(s(30)).max_hold(s(60)), |term| {
        for n in 1..=5 {
            memory.advance(s(10));
            assert!(memory.wait_for_answers(Call::Renew, n, LIMIT) && term.is_held());
        }
        memory.advance(s(10));
        assert!(!term.is_held());
        Break(term.lost_reason())
    });
    assert_eq!(reason.unwrap(), Some(LostReason::MaxHold));
}

// How terms end.

#[test]
fn leaving_the_closure_ends_the_term_first_for_whoever_works_for_it_and_then_for_all() {
    let memory = MemoryBackend::new();
    let client = LockClient::new(memory.clone());
    let gate = memory.hang_next(Call::Release);
    let (tell, works_for_it) = mpsc::channel();
    thread::scope(|scope| {
        let leading = scope.spawn(|| {
            client.elect(KEY, &options(), |term| {
                tell.send(term.lost().clone()).unwrap();
                Break(7)
            })
        });
        let lost: CancelToken = works_for_it.recv().unwrap();
        assert!(gate.wait_for_calls(1, LIMIT), "the release is under way");
        assert!(lost.is_cancelled() && memory.has_row(KEY));
        gate.open();
        assert_eq!(leading.join().unwrap().unwrap(), 7);
    });
    assert!(!memory.has_row(KEY));
}

#[test]
fn a_panic_goes_on_after_the_lease_was_released() {
    let memory = MemoryBackend::new();
    let client = LockClient::new(memory.clone());
    let panic = catch_unwind(AssertUnwindSafe(|| {
        client.elect::<()>(KEY, &options(), |_| panic!("the leader's work failed"))
    }));
    assert_eq!(panic.unwrap_err().downcast_ref::<&str>(), Some(&"the leader's work failed"));
    assert!(!memory.has_row(KEY), "on this thread, not some time later");
}

#[test]
fn who_steps_down_lets_the_others_lead_first() {
    let memory = MemoryBackend::new();
    let (one, other) = (LockClient::new(memory.clone()), LockClient::new(memory.clone()));
    let enough = CancelToken::new();
    // It would campaign again in half a minute at the earliest.
    let patient = options().retry_delay(s(60)).cancel(&enough);
    let led = Cell::new(0);
    thread::scope(|scope| {
        let mut follower = None;
        let error = one.elect::<()>(KEY, &patient, |term| {
            led.set(led.get() + 1);
            let (first, other, enough) = (term.number(), &other, &enough);
            follower = Some(scope.spawn(move || {
                let next = other.elect(KEY, &options(), |term| Break(term.number())).unwrap();
                enough.cancel();
                (first, next)
            }));
            wait_until(LIMIT, "the other one campaigns", || memory.calls(Call::Holder) > 0);
            Continue(())
        });
        assert_eq!(error.unwrap_err().code(), ErrorCode::Aborted);
        let (first, next) = follower.unwrap().join().unwrap();
        assert_eq!((next.get(), led.get()), (first.get() + 1, 1));
    });
}

#[test]
fn the_closure_keeps_its_state_and_need_not_be_send() {
    let (memory, client) = manual();
    let jobs = std::rc::Rc::new(Cell::new(0));
    let held_by_the_closure = std::rc::Rc::clone(&jobs);
    let done = client.elect(KEY, &options(), move |term| {
        assert!(term.is_held() && term.key() == KEY);
        held_by_the_closure.set(held_by_the_closure.get() + 1);
        Break("done")
    });
    assert_eq!((done.unwrap(), jobs.get(), memory.counter(KEY)), ("done", 1, Some(1)));
}

// What ends a campaign, and what does not.

#[test]
fn neither_timeout_nor_max_retries_ends_a_campaign() {
    let (memory, client) = manual();
    let _theirs = memory.contend(KEY).unwrap();
    let short = options().timeout(ms(1)).max_retries(0);
    thread::scope(|scope| {
        let leading = scope.spawn(|| client.elect(KEY, &short, |term| Break(term.number())));
        wait_until(LIMIT, "it has asked again and again", || {
            memory.advance(s(1));
            memory.calls(Call::Holder) > 30
        });
        assert!(!leading.is_finished());
        memory.expire(KEY).unwrap();
        wait_until(LIMIT, "it leads", || {
            memory.advance(s(1));
            leading.is_finished()
        });
        assert_eq!(leading.join().unwrap().unwrap().get(), 2);
    });
}

#[test]
fn what_the_server_cannot_do_now_is_waited_out() {
    for code in [ErrorCode::ServiceUnavailable, ErrorCode::NetworkTimeout, ErrorCode::RateLimited] {
        let (memory, client) = manual();
        for _ in 0..3 {
            memory.fail_next(Call::Acquire, code);
        }
        memory.fail_next(Call::Acquire, Fault::lost_request(code));
        let term =
            while_time_passes(&memory, ms(50), || client.elect(KEY, &options(), |term| Break(term.number())));
        assert_eq!((term.unwrap().get(), memory.calls(Call::Acquire)), (1, 5), "{code}");
    }
}

#[test]
fn the_pauses_between_failed_campaigns_grow() {
    let (memory, client) = manual();
    memory.fail_all(ErrorCode::ServiceUnavailable);
    let enough = CancelToken::new();
    let options = options().jitter(Jitter::None).cancel(&enough);
    let mut last = memory.clock().now();
    thread::scope(|scope| {
        let leading = scope.spawn(|| client.elect::<()>(KEY, &options, |_| panic!("nobody can lead")));
        for (n, pause) in [0, 100, 200, 400, 800].into_iter().enumerate() {
            wait_until(LIMIT, "the next campaign", || {
                let before = memory.calls(Call::Acquire);
                if before <= n as u64 {
                    memory.advance(ms(10));
                }
                before > n as u64
            });
            let now = memory.clock().now();
            assert!(now.since(last) >= ms(pause), "{n}: after {:?}", now.since(last));
            last = now;
        }
        enough.cancel();
        assert_eq!(leading.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
    });
}

#[test]
fn what_the_program_has_to_mend_is_returned_at_once() {
    for code in [ErrorCode::AuthFailed, ErrorCode::InvalidArgument, ErrorCode::Internal] {
        let (memory, client) = manual();
        memory.fail_every(Call::Acquire, code);
        // On a thread of its own: a campaign that goes on would never return.
        let campaign = thread::spawn(move || {
            client.elect::<()>(KEY, &options(), |_| panic!("nobody can lead")).unwrap_err()
        });
        wait_until(LIMIT, "the campaign ends", || campaign.is_finished());
        let error = campaign.join().unwrap();
        assert_eq!((error.code(), error.key(), memory.calls(Call::Acquire)), (code, Some(KEY), 1));
    }
}

#[test]
fn bad_input_is_refused_before_anything_is_asked() {
    let (memory, client) = manual();
    let long = "k".repeat(513);
    let bad_key = |key: &str| client.elect::<()>(key, &options(), |_| panic!("nobody can lead"));
    let errors = [
        bad_key("").unwrap_err(),
        bad_key(&long).unwrap_err(),
        client.elect::<()>(KEY, &options().ttl(Duration::ZERO), |_| panic!("nobody can lead")).unwrap_err(),
        client.leader("").unwrap_err(),
    ];
    assert!(errors.iter().all(|error| error.code() == ErrorCode::InvalidArgument));
    assert!(Call::ALL.iter().all(|call| memory.calls(*call) == 0));
}

#[test]
fn a_token_and_a_close_end_a_campaign_that_waits_and_one_that_pauses() {
    type End = fn(&LockClient, &CancelToken);
    let ends: [End; 2] = [|_, token| token.cancel(), |client, _| assert!(client.close(LIMIT).is_ok())];
    for end in ends {
        for server_is_away in [false, true] {
            let memory = MemoryBackend::new();
            let client = LockClient::new(memory.clone());
            let _theirs = memory.contend(KEY).unwrap();
            if server_is_away {
                memory.fail_all(ErrorCode::ServiceUnavailable);
            }
            let token = CancelToken::new();
            // Without wake-ups: nothing but the end can end its pause in time.
            let patient = options().retry_delay(s(3600)).wake_ups(false).cancel(&token);
            thread::scope(|scope| {
                let leading =
                    scope.spawn(|| client.elect::<()>(KEY, &patient, |_| panic!("nobody can lead")));
                assert!(memory.wait_for_answers(Call::Acquire, 1, LIMIT));
                end(&client, &token);
                wait_until(LIMIT, "the campaign ends", || leading.is_finished());
                assert_eq!(leading.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
            });
        }
    }
}

#[test]
fn a_token_ends_no_term_and_its_value_reaches_the_caller() {
    let (_, client) = manual();
    let token = CancelToken::new();
    let told = client.elect(KEY, &options().cancel(&token), |term| {
        token.cancel();
        assert!(term.is_held() && !term.lost().is_cancelled());
        Break(1)
    });
    assert_eq!(told.unwrap(), 1);
}

#[test]
fn a_close_is_a_term_s_end_and_the_campaign_s() {
    let memory = MemoryBackend::new();
    let client = LockClient::new(memory.clone());
    let closed = AtomicBool::new(false);
    let error = client.elect::<()>(KEY, &options(), |term| {
        assert!(!closed.swap(true, Ordering::SeqCst), "no second term");
        assert!(client.close(LIMIT).unwrap().is_clean());
        assert_eq!((term.is_held(), term.lost_reason()), (false, Some(LostReason::Closed)));
        Continue(())
    });
    assert_eq!(error.unwrap_err().code(), ErrorCode::Aborted);
    assert!(!memory.has_row(KEY));
}

// Who leads.

#[test]
fn leader_goes_by_the_server_s_clock() {
    let (memory, client) = manual();
    assert_eq!(client.leader(KEY).unwrap(), None);
    let observer = LockClient::new(memory.clone());
    client
        .elect(KEY, &options().ttl(s(30)), |term| {
            let began = memory.server_time();
            let leader = observer.leader(KEY).unwrap().expect("somebody leads");
            assert_eq!((leader.term, leader.owner), (term.number(), None));
            assert_eq!((leader.since_ms, leader.expires_at_ms), (began, began + 30_000));
            // Set forward, the server says what it will say to candidates, too; set back, it says so again.
            memory.shift_server_clock(31_000);
            assert_eq!(observer.leader(KEY).unwrap(), None);
            memory.shift_server_clock(-1);
            assert_eq!(observer.leader(KEY).unwrap().map(|leader| leader.term), Some(term.number()));
            Break(())
        })
        .unwrap();
    assert_eq!(observer.leader(KEY).unwrap(), None);
    let lease = memory.contend(KEY).unwrap();
    let holder = observer.leader(KEY).unwrap().map(|leader| leader.term);
    assert_eq!(holder, lease.fence(), "whoever holds the key as a lock leads, too");
    assert_eq!(holder.map(Fence::get), Some(2));
}
