//! Semaphores: at most so many holders at a time, whatever happens to them, and each of them with a
//! lease like any other.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use postgres::NoTls;
use r2d2_postgres::PostgresConnectionManager;

use crate::support::calls::{asking_hourly, asking_often, either_form, ms, renewing_often};
use crate::support::leases::{hold_inserts, while_asleep};
use crate::support::listeners::{listeners, patient, wait_for_listener, watched};
use crate::support::{Action, Call, LIMIT, Place, Proxy, id, place, together, unique, wait_until};
use syncguard::backend::Heard;
use syncguard::{
    CancelToken, ErrorCode, ExtendResult, LockGuard, LockOptions, Lookup, LostReason, PgLockClient,
    ReleaseResult, Semaphore,
};

/// The key of a permit, which no call takes for one.
fn permit(name: &str, number: u32) -> String {
    format!("{name}\u{2126}{number}")
}

/// Only a call of this process ends the wait in time.
fn asking_rarely() -> LockOptions {
    asking_hourly().timeout(LIMIT)
}

fn semaphore(place: &Place, limit: u32) -> Semaphore {
    place.client.semaphore(&place.key("reports"), limit).unwrap()
}

#[track_caller]
fn all(semaphore: &Semaphore) -> Vec<LockGuard> {
    let take = |_| semaphore.try_acquire().unwrap().expect("a permit is free");
    let held: Vec<_> = (0..semaphore.limit()).map(take).collect();
    assert!(semaphore.try_acquire().unwrap().is_none());
    held
}

#[test]
fn each_permit_is_a_lease_on_a_key_of_its_own_with_a_fence_of_its_own() {
    let place = place();
    for round in 0..2 {
        let client = either_form(&place.client, round);
        let name = place.key(&format!("reports-{round}"));
        let reports = client.semaphore(&name, 3).unwrap();
        let mut held = all(&reports);
        held.sort_by_key(LockGuard::permit);
        for (guard, number) in held.iter().zip(1..) {
            assert_eq!((guard.permit(), guard.key()), (Some(number), permit(&name, number).as_str()));
            let row = place.stored.row(guard.key()).unwrap();
            assert_eq!((row.lock_id.as_str(), row.fence), (guard.lock_id(), guard.fence().to_string()));
            assert_eq!(place.stored.counter(guard.key()), Some(1));
            let found = client.get_by_id_raw(guard.lock_id()).unwrap().unwrap();
            assert_eq!(found.key, guard.key(), "a lookup by id names the permit");
        }
        assert_eq!(reports.in_use().unwrap(), 3);
        let freed = held.remove(1);
        assert_eq!(freed.release().unwrap(), ReleaseResult::Released);
        let again = reports.acquire().unwrap();
        assert_eq!((again.permit(), again.fence().get()), (Some(2), 2));
    }
}

#[test]
fn a_lock_of_the_same_name_is_another_thing() {
    let place = place();
    let reports = semaphore(&place, 1);
    let lock = place.client.lock(reports.name()).unwrap();
    assert_eq!((lock.permit(), reports.in_use().unwrap()), (None, 0));
    let held = reports.try_acquire().unwrap().expect("a lock does not stand in its way");
    // What a caller writes is another key, whatever it looks like.
    assert!(!place.client.is_locked(held.key()).unwrap());
    let other = place.client.try_lock(held.key()).unwrap().expect("no caller names a permit");
    assert_ne!(other.key(), held.key());
    assert!(place.client.lookup(Lookup::Key(reports.name())).unwrap().is_some());
}

#[test]
fn bad_input_is_refused_before_any_io() {
    // Nothing listens there.
    let builder = PgLockClient::builder().auto_create_tables(false);
    let client = builder.connect("postgresql://nobody@127.0.0.1:1/nothing").unwrap();
    for (name, limit) in [("reports", 0), ("reports", 1025), ("reports", u32::MAX), ("", 3), ("a\0", 3)] {
        let error = client.semaphore(name, limit).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{name:?} {limit}");
    }
    assert!(client.semaphore(&"x".repeat(513), 3).is_err());
    let reports = client.semaphore("reports", 1024).unwrap();
    let short = LockOptions::new().ttl(Duration::ZERO);
    for error in [reports.acquire_with(&short).unwrap_err(), reports.try_acquire_with(&short).unwrap_err()] {
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
    }
    let error = reports.try_acquire().unwrap_err();
    assert_eq!((error.code(), error.key()), (ErrorCode::ServiceUnavailable, Some("reports")));
    assert!(!format!("{error} {error:?} {reports:?}").contains("reports"), "{error:?} {reports:?}");
}

#[test]
fn the_longest_name_and_the_largest_limit_are_of_use() {
    let place = place();
    let long = place.client.semaphore(&"x".repeat(512), 1024).unwrap();
    let held = long.acquire().unwrap();
    assert!(held.permit().unwrap() <= 1024 && long.in_use().unwrap() == 1);
    assert_eq!(held.release().unwrap(), ReleaseResult::Released);
    // U+2126 is normalised away like everywhere.
    let [ohm, omega] = ["5\u{2126}3", "5\u{3a9}3"].map(|name| place.client.semaphore(name, 1).unwrap());
    let _held = ohm.acquire().unwrap();
    assert!(omega.try_acquire().unwrap().is_none());
}

#[test]
fn a_lowered_limit_drains_and_who_is_beyond_it_counts() {
    let place = place();
    let many = semaphore(&place, 4);
    let mut held = all(&many);
    let few = semaphore(&place, 2);
    assert_eq!((few.in_use().unwrap(), few.try_acquire().unwrap().is_none()), (4, true));
    // Who has a permit beyond the limit keeps it, and lets go of it without making room.
    held.sort_by_key(LockGuard::permit);
    held.truncate(3);
    assert!(held[2].is_held() && few.try_acquire().unwrap().is_none());
    assert_eq!(few.in_use().unwrap(), 3);
    drop(held.remove(0));
    assert_eq!(few.try_acquire().unwrap().unwrap().permit(), Some(1));
}

/// A transaction that was rolled back leaves its mark on a counter, for good.
#[test]
fn a_marked_counter_does_not_cost_a_permit() {
    let place = place();
    for round in 0..2 {
        let client = either_form(&place.client, round);
        let name = place.key(&format!("marked-{round}"));
        let reports = client.semaphore(&name, 1).unwrap();
        drop(reports.acquire().unwrap());
        let fence_key = format!("fence:{}", permit(&name, 1));
        for lock in ["FOR SHARE", "FOR UPDATE"] {
            let sql = format!("SELECT FROM syncguard_fence_counters WHERE fence_key = $1 {lock}");
            let mut other = place.schema.client();
            let mut transaction = other.transaction().unwrap();
            assert_eq!(transaction.query(&sql, &[&fence_key]).unwrap().len(), 1);
            assert!(reports.try_acquire().unwrap().is_none(), "its only counter is locked");
            transaction.rollback().unwrap();
            assert!(reports.try_acquire().unwrap().is_some(), "{lock}, {round}");
        }
    }
}

#[test]
fn one_counter_under_a_fenced_transaction_is_no_reason_to_answer_none() {
    let place = place();
    let reports = semaphore(&place, 2);
    let mut held = all(&reports);
    let mut connection = place.schema.client();
    let mut transaction = connection.transaction().unwrap();
    held[0].fence_transaction(&mut transaction).unwrap();
    let busy = held[0].permit();
    held.clear();
    for n in 0..40 {
        let client = either_form(&place.client, n);
        let reports = client.semaphore(reports.name(), 2).unwrap();
        let permit = reports.try_acquire().unwrap().expect("the other permit is free");
        assert_ne!(permit.permit(), busy);
        assert!(n > 0 || reports.try_acquire().unwrap().is_none(), "held, and locked");
    }
    transaction.commit().unwrap();
    drop(all(&reports));
}

#[test]
fn a_row_that_comes_after_the_look_is_not_overwritten() {
    let place = place();
    let reports = semaphore(&place, 1);
    drop(reports.acquire().unwrap());
    let mut gate = place.schema.client();
    hold_inserts(&mut gate);
    let app = unique();
    let late = place.named(&app).semaphore(reports.name(), 1).unwrap();
    let call = Call::start(&app, move || late.try_acquire().unwrap().map(|guard| guard.permit()));
    call.wait_until_blocked(&place.stored);
    // Written by another, who does not queue and whom no trigger stops.
    place.stored.run("SET session_replication_role = replica");
    let key = permit(reports.name(), 1);
    let now = place.stored.now_ms();
    let sql = "INSERT INTO syncguard_locks (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key) \
               VALUES ($1, $2, $3, $4, '000000000000009', $1)";
    // The row alone: the call has the counter locked.
    place.stored.client().execute(sql, &[&key, &id("other"), &(now + 30_000), &now]).unwrap();
    gate.batch_execute("COMMIT").unwrap();
    assert_eq!(call.join(), None, "the permit is held");
    assert_eq!(place.stored.row(&key).unwrap().lock_id, id("other"));
    assert_eq!(place.stored.counter(&key), Some(1), "no fence is burnt");
}

#[test]
fn a_dead_permit_is_taken_over_with_the_next_fence() {
    let place = place();
    for round in 0..2 {
        let client = either_form(&place.client, round);
        let reports = client.semaphore(&place.key(&format!("dead-{round}")), 1).unwrap();
        let dead = reports.acquire().unwrap();
        place.stored.age(dead.key(), 500);
        assert!(reports.try_acquire().unwrap().is_none(), "still live for everyone");
        place.stored.age(dead.key(), 1_500);
        assert_eq!(reports.in_use().unwrap(), 0);
        let next = reports.try_acquire().unwrap().unwrap();
        assert_eq!(next.fence().get(), dead.fence().get() + 1);
        assert_eq!(dead.release().unwrap(), ReleaseResult::NotHeld);
        assert!(next.is_held() && reports.in_use().unwrap() == 1);
    }
}

#[test]
fn a_permit_is_renewed_extended_fenced_and_lost_like_a_lock() {
    let place = place();
    let reports = semaphore(&place, 3);
    let guard = reports.acquire_with(&renewing_often()).unwrap();
    let expiry = || place.stored.row(guard.key()).unwrap().expires_at_ms;
    let before = expiry();
    wait_until(LIMIT, "it is renewed", || expiry() > before);
    assert!(matches!(guard.extend(Duration::from_secs(60)).unwrap(), ExtendResult::Extended { .. }));

    let mut connection = place.schema.client();
    connection.batch_execute("CREATE TABLE work (what text)").unwrap();
    let mut transaction = connection.transaction().unwrap();
    guard.fence_transaction(&mut transaction).unwrap();
    transaction.execute("INSERT INTO work VALUES ('current')", &[]).unwrap();
    transaction.commit().unwrap();

    // Broken and taken by another: its renewal names the newer fence, and its work is refused.
    let number = guard.permit().unwrap();
    place.stored.write(guard.key(), &id("newer"), 30_000, 7);
    assert!(guard.lost().wait_timeout(LIMIT), "permit {number}");
    match guard.lost_reason() {
        Some(LostReason::TakenOver { fence }) => assert_eq!(fence.get(), 7),
        other => panic!("{other:?}"),
    }
    let mut transaction = connection.transaction().unwrap();
    assert_eq!(guard.fence_transaction(&mut transaction).unwrap_err().code(), ErrorCode::Aborted);
    transaction.rollback().unwrap();
}

#[test]
fn a_release_of_any_permit_wakes_the_first_waiter_of_this_process() {
    let place = place();
    let reports = semaphore(&place, 2);
    for last in [false, true] {
        let mut held = all(&reports);
        let freed = if last { held.pop().unwrap() } else { held.remove(0) };
        let number = freed.permit();
        // The next look would come in an hour.
        let next = while_asleep(|| reports.acquire_with(&asking_rarely()).unwrap(), || drop(freed));
        assert_eq!(next.permit(), number);
    }
}

#[test]
fn waiters_for_a_semaphore_and_for_the_lock_of_its_name_do_not_queue_behind_each_other() {
    let place = place();
    let reports = semaphore(&place, 1);
    let (lock, held) = (place.client.lock(reports.name()).unwrap(), reports.acquire().unwrap());
    thread::scope(|scope| {
        let waits = scope.spawn(|| place.client.lock_with(reports.name(), &asking_rarely()).unwrap());
        let next = while_asleep(|| reports.acquire_with(&asking_rarely()).unwrap(), || drop(held));
        assert!(next.is_held() && !waits.is_finished());
        drop(lock);
        assert!(waits.join().unwrap().is_held());
    });
}

#[test]
fn a_release_of_any_permit_notifies_those_who_wait_for_the_semaphore_elsewhere() {
    let _alone = crate::support::alone();
    let place = place();
    let other = place.named("waiter");
    let mut observer = place.schema.client();
    let reports = semaphore(&place, 2);
    let held = all(&reports);
    let (watch, heard) = watched(&other, reports.name());
    for guard in held {
        wait_until(LIMIT, "a session listens", || watch.is_listening());
        while heard.try_recv().is_ok() {}
        let row = guard.key().to_owned();
        drop(guard);
        assert!(place.stored.row(&row).is_none());
        assert_eq!(heard.recv_timeout(LIMIT).unwrap(), Heard::Freed, "{row:?}");
    }
    drop(watch);

    // And a waiter listens by itself.
    let held = all(&reports);
    let elsewhere = other.semaphore(reports.name(), 2).unwrap();
    let waits = thread::spawn(move || elsewhere.acquire_with(&patient()));
    wait_for_listener(&mut observer, reports.name());
    drop(held);
    assert!(waits.join().unwrap().unwrap().is_held());
    assert!(listeners(&mut observer, &permit(reports.name(), 1)).is_empty());
}

#[test]
fn a_wait_that_is_over_says_so_under_the_semaphores_name() {
    let place = place();
    let reports = semaphore(&place, 2);
    let _held = all(&reports);
    let error = reports.acquire_with(&LockOptions::new().timeout(ms(60))).unwrap_err();
    assert_eq!((error.code(), error.key()), (ErrorCode::AcquisitionTimeout, Some(reports.name())));
    let text = error.to_string();
    assert!(text.contains("2 permits, and this client holds 2 of them"), "{text}");
    assert!(!text.contains(reports.name()), "{text}");
}

#[test]
fn a_token_ends_each_call_without_effect() {
    let place = place();
    let token = CancelToken::new();
    let reports = place.client.cancellable(&token).semaphore(&place.key("reports"), 1).unwrap();
    let held = reports.acquire().unwrap();
    let error = while_asleep(|| reports.acquire_with(&asking_rarely()).unwrap_err(), || token.cancel());
    assert_eq!(error.code(), ErrorCode::Aborted);
    for error in [reports.try_acquire().unwrap_err(), reports.in_use().unwrap_err()] {
        assert_eq!(error.code(), ErrorCode::Aborted);
    }
    assert_eq!(held.release().unwrap(), ReleaseResult::Released);
    assert_eq!(semaphore(&place, 1).in_use().unwrap(), 0);
}

fn through(place: &Place, proxy: &Proxy) -> PgLockClient {
    let mut config: postgres::Config = proxy.url(&place.schema.url()).parse().unwrap();
    config.application_name(&unique());
    PgLockClient::builder().auto_create_tables(false).connect_with(config, NoTls).unwrap()
}

fn rows(place: &Place) -> (i64, i64) {
    let sql = "SELECT (SELECT count(*) FROM syncguard_locks), (SELECT sum(fence)::int8 FROM syncguard_fence_counters)";
    let row = place.stored.one(sql, &[]);
    (row.get(0), row.get::<_, Option<i64>>(1).unwrap_or(0))
}

#[test]
fn after_a_lost_answer_the_same_permit_is_answered_and_no_second_one_is_taken() {
    let place = place();
    let proxy = Proxy::start(crate::support::server().port());
    let client = through(&place, &proxy);
    let reports = client.semaphore(&place.key("reports"), 64).unwrap();
    drop(reports.acquire().unwrap());
    let mut counted = rows(&place).1;
    for action in [
        Action::CutAnswerAt(0),
        Action::CutAnswerAt(20),
        Action::CutNow,
        Action::CutQueryAt(12),
        Action::Twice(ms(1)),
    ] {
        let before = proxy.counts().get(action.name()).copied();
        proxy.once("permit_grant", action);
        let guard = reports.try_acquire().unwrap().expect("permits are free");
        assert!(proxy.counts().get(action.name()).copied() > before, "{action:?}");
        let row = place.stored.row(guard.key()).unwrap();
        assert_eq!(
            (row.lock_id.as_str(), row.fence),
            (guard.lock_id(), guard.fence().to_string()),
            "{action:?}"
        );
        counted += 1;
        assert_eq!(rows(&place), (1, counted), "{action:?}");
        assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    }
}

#[test]
fn a_copy_that_arrives_after_the_second_question_is_refused_by_the_index_on_lock_ids() {
    let place = place();
    let proxy = Proxy::start(crate::support::server().port());
    let client = through(&place, &proxy);
    let reports = client.semaphore(&place.key("reports"), 8).unwrap();
    drop(reports.acquire().unwrap());
    let counted = rows(&place).1;
    proxy.once("permit_grant", Action::Zombie(None));
    let guard = reports.try_acquire().unwrap().expect("permits are free");
    assert_eq!(rows(&place), (1, counted + 1));
    proxy.open_gate();
    wait_until(LIMIT, "the copy was carried out", || proxy.zombies_over() == 1);
    assert_eq!(rows(&place), (1, counted + 1), "one call, one permit");
    assert!(guard.is_held() && place.client.owns(guard.lock_id()).unwrap());
}

#[test]
fn a_trigger_that_swallows_a_change_is_an_error_and_no_answer() {
    for (body, on, dead) in [
        ("RETURN NULL", "INSERT ON syncguard_locks", false),
        ("RETURN OLD", "UPDATE ON syncguard_fence_counters", false),
        ("RETURN NULL", "UPDATE ON syncguard_locks", true),
        ("RETURN OLD", "UPDATE ON syncguard_locks", true),
    ] {
        let place = place();
        let name = place.key("reports");
        drop(place.client.semaphore(&name, 1).unwrap().acquire().unwrap());
        if dead {
            place.stored.write(&permit(&name, 1), &id("dead"), -5_000, 1);
        }
        let before = rows(&place);
        place.stored.put_in_the_way(on, "", body);
        for round in 0..2 {
            let reports = either_form(&place.client, round).semaphore(&name, 1).unwrap();
            let error = reports.try_acquire().unwrap_err();
            assert_eq!(error.code(), ErrorCode::Internal, "{on}: {error:?}");
            assert!(error.to_string().contains("trigger"), "{error}");
            assert_eq!(rows(&place), before, "{on}");
        }
    }
}

#[test]
fn permits_work_on_a_callers_pool() {
    let place = place();
    let manager = PostgresConnectionManager::new(place.schema.config(), NoTls);
    let pool = r2d2::Pool::builder().max_size(3).min_idle(Some(0)).test_on_check_out(false).build(manager);
    let client = PgLockClient::builder().build(pool.unwrap()).unwrap();
    for round in 0..2 {
        let client = either_form(&client, round);
        let reports = client.semaphore(&place.key("reports"), 2).unwrap();
        let mut held = all(&reports);
        assert_eq!(reports.in_use().unwrap(), 2);
        assert_eq!(held.pop().unwrap().release().unwrap(), ReleaseResult::Released);
        assert!(reports.acquire().unwrap().is_held());
    }
}

/// Some hold, some let go, some die: never more than three at a time, and each grant is one step of a counter.
#[test]
fn never_more_hold_than_the_limit_says_and_each_grant_counts_once() {
    const ROUNDS: usize = 40;
    let place = place();
    let clients = [place.client.clone(), place.named("second")];
    let name = place.key("reports");
    let (inside, granted) = (AtomicUsize::new(0), AtomicUsize::new(0));
    together(8, |n| {
        let client = either_form(&clients[n % 2], n / 2);
        let reports = client.semaphore(&name, 3).unwrap();
        for round in 0..ROUNDS {
            let permit = if round % 4 == 0 {
                match reports.try_acquire().unwrap() {
                    Some(permit) => permit,
                    None => continue,
                }
            } else {
                reports.acquire_with(&asking_often()).unwrap()
            };
            granted.fetch_add(1, Ordering::SeqCst);
            assert!(inside.fetch_add(1, Ordering::SeqCst) < 3, "a fourth holder");
            assert!(permit.is_held());
            thread::yield_now();
            inside.fetch_sub(1, Ordering::SeqCst);
            assert_eq!(permit.release().unwrap(), ReleaseResult::Released);
        }
    });
    let counted = i64::try_from(granted.into_inner()).unwrap();
    assert_eq!(rows(&place), (0, counted), "as many steps as grants");
}
