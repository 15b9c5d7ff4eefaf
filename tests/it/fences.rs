//! Fence counters: one per key, never lower, never beyond the limit, whatever fails.

use std::ops::ControlFlow::Break;
use std::thread;

use crate::support::calls::{either_form, granted};
use crate::support::leases::{self, client, counter, row, set_counter};
use crate::support::{Config, LIMIT, Server, Stop, TTL, logs, wait_until, wait_until_app_waits};
use syncguard::{AcquireResult, ErrorCode, FENCE_MAX, FENCE_WARN, LockOptions, PgLockClient, ReleaseResult};

#[test]
fn counters_count_their_own_key_and_are_named_after_it() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let cycle = |key: &str| {
        let grant = granted(&client, key);
        assert_eq!(client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
        grant.fence.get()
    };
    let fences: Vec<_> = ["a", "b", "a", "a", "b", "a", "a"].iter().map(|key| cycle(key)).collect();
    assert_eq!(fences, [1, 1, 2, 3, 2, 4, 5]);
    let sql = "SELECT fence_key, fence, key_debug FROM syncguard_fence_counters ORDER BY 1";
    let rows: Vec<(String, i64, String)> =
        observer.query(sql, &[]).unwrap().iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    assert_eq!(rows, [("fence:a".into(), 5, "a".into()), ("fence:b".into(), 2, "b".into())]);
}

#[test]
fn a_counter_survives_release_takeover_and_clean_up() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let expire = |observer: &mut postgres::Client| {
        observer.execute("UPDATE syncguard_locks SET expires_at_ms = expires_at_ms - 60000", &[]).unwrap();
    };
    let first = granted(&client, "k");
    client.release(&first.lock_id).unwrap();
    assert_eq!(counter(&mut observer, "k"), Some(1));
    let second = granted(&client, "k");
    expire(&mut observer);
    let third = granted(&client, "k");
    assert_eq!((second.fence.get(), third.fence.get()), (2, 3));
    assert_eq!(client.release(&second.lock_id).unwrap(), ReleaseResult::NotHeld, "it was taken over");
    expire(&mut observer);
    assert_eq!(client.operator().cleanup_expired(10).unwrap(), 1);
    assert_eq!(counter(&mut observer, "k"), Some(3));
    assert_eq!(granted(&client, "k").fence.get(), 4);
}

#[test]
fn a_hundred_refused_attempts_do_not_raise_the_counter() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let held = granted(&client, "k");
    for i in 0..100 {
        assert_eq!(either_form(&client, i).acquire("k", TTL).unwrap(), AcquireResult::Locked);
    }
    client.release(&held.lock_id).unwrap();
    assert_eq!(granted(&client, "k").fence.get(), held.fence.get() + 1);
}

#[test]
fn a_grant_that_fails_after_the_counter_was_raised_burns_no_fence() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    observer
        .batch_execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no row today'; END $$;\
             CREATE TRIGGER refuse BEFORE INSERT ON syncguard_locks FOR EACH ROW EXECUTE FUNCTION refuse()",
        )
        .unwrap();
    for i in 0..2 {
        let error = either_form(&client, i).acquire("k", TTL).unwrap_err();
        assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Internal, false), "{error:?}");
    }
    assert_eq!((row(&mut observer, "k"), counter(&mut observer, "k")), (None, None));
    observer.batch_execute("DROP TRIGGER refuse ON syncguard_locks").unwrap();
    assert_eq!(granted(&client, "k").fence.get(), 1);
}

#[test]
fn a_backend_that_is_killed_between_counter_and_row_leaves_neither() {
    let schema = crate::support::schema();
    let app = format!("killed-{}", schema.name());
    let client = leases::connect(PgLockClient::builder(), &leases::named(&schema.url(), &app));
    let mut observer = schema.client();
    let mut blocker = schema.client();
    // The trigger runs after the counter was raised, and waits there for the blocker.
    leases::hold_inserts(&mut blocker);
    thread::scope(|scope| {
        let acquiring = scope.spawn(|| client.acquire("k", TTL));
        let mut pid = 0;
        // Before that it may wait for the queue of the key, which is that of the whole database.
        wait_until(LIMIT, "it waits for the gate", || {
            pid = wait_until_app_waits(&mut observer, &app);
            leases::waits_for_table(&mut observer, pid).as_deref() == Some("gate")
        });
        observer.execute("SELECT pg_terminate_backend($1)", &[&pid]).unwrap();
        crate::support::wait_until_backend_gone(&mut observer, pid);
        assert_eq!((row(&mut observer, "k"), counter(&mut observer, "k")), (None, None));
        blocker.batch_execute("ROLLBACK").unwrap();
        // The message was one that commits, so the call has asked again, under the same id.
        let grant = acquiring.join().unwrap().unwrap().acquired().expect("nobody else wants the key");
        assert_eq!(grant.fence.get(), 1, "the first try's fence was rolled back with it");
        assert_eq!(row(&mut observer, "k").unwrap().lock_id, grant.lock_id);
    });
}

#[test]
fn fences_are_exact_up_to_the_limit_and_nothing_is_granted_beyond_it() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let limit = i64::try_from(FENCE_MAX).unwrap();
    for form in 0..2 {
        let client = either_form(&client, form);
        let key = format!("limit:{form}");
        set_counter(&mut observer, &key, limit - 2);
        for expected in ["899999999999999", "900000000000000"] {
            let grant = granted(&client, &key);
            assert_eq!(grant.fence.to_string(), expected);
            assert_eq!(row(&mut observer, &key).unwrap().fence, expected);
            client.release(&grant.lock_id).unwrap();
        }
        // Also a counter that was set to sixteen digits by hand, which sorts wrongly as text.
        for beyond in [limit, 1_000_000_000_000_000] {
            set_counter(&mut observer, &key, beyond);
            for _ in 0..3 {
                let error = client.acquire(&key, TTL).unwrap_err();
                assert_eq!(error.code(), ErrorCode::Internal);
                assert!(error.to_string().contains("reached its limit"), "{error}");
            }
            assert_eq!(row(&mut observer, &key), None);
            assert_eq!(counter(&mut observer, &key), Some(beyond));
        }
    }
}

#[test]
fn a_fence_above_the_warning_line_is_granted_and_warned_of_without_its_key() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let mark = logs::capture();
    let warnings = |key: &str| {
        let hash = syncguard::hash_key(key);
        mark.at_least(log::Level::Warn).iter().filter(|line| line.text.contains(&hash)).count()
    };
    let line = i64::try_from(FENCE_WARN).unwrap();
    for (key, before, expected) in [("secret-below", line - 1, 0), ("secret-above", line, 1)] {
        set_counter(&mut observer, key, before);
        assert_eq!(i64::try_from(granted(&client, key).fence.get()).unwrap(), before + 1);
        assert_eq!(warnings(key), expected, "{key}");
    }
    mark.assert_without(&["secret-"]);
}

#[test]
fn fences_go_on_after_the_server_stopped_at_once_although_commits_need_not_be_durable() {
    // The log of changes reaches the disk only where a transaction asks for it.
    let config = Config::new().set("synchronous_commit", "off").set("wal_writer_delay", "10s");
    let server = Server::start(&config.set("wal_writer_flush_after", "1GB"));
    let schema = server.schema();
    let first = client(&schema);
    let mut last = 0;
    for i in 0..6 {
        let grant = granted(&either_form(&first, i), "k");
        assert_eq!(grant.fence.get(), last + 1);
        last = grant.fence.get();
        first.release(&grant.lock_id).unwrap();
    }
    let held = granted(&first, "k");
    server.client().batch_execute("CREATE TABLE lost ()").unwrap();
    server.restart(Stop::Immediate);
    let forgotten = server.client().query_one("SELECT to_regclass('lost') IS NULL", &[]).unwrap();
    assert!(forgotten.get::<_, bool>(0), "this server loses what is not asked to be durable");
    // The old client goes on, and a new one agrees with it.
    for (client, key) in [(&first, "k"), (&client(&schema), "k")] {
        assert_eq!(client.acquire(key, TTL).unwrap(), AcquireResult::Locked);
    }
    assert_eq!(first.release(&held.lock_id).unwrap(), ReleaseResult::Released);
    server.restart(Stop::Immediate);
    // That release may have been lost with the crash; then the key is still held under its id.
    first.release(&held.lock_id).unwrap();
    let next = granted(&client(&schema), "k");
    assert!(next.fence > held.fence, "{:?} after {:?}", next.fence, held.fence);
    assert_eq!(next.fence.get(), last + 2);
}

#[test]
fn the_check_as_text_refuses_in_a_transaction_of_another_driver_what_the_check_refuses() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut other = schema.client();
    let one = client.lock("one").unwrap();
    let several = client.lock_all(&["it's two", "three\\"]).unwrap();
    let permit = client.semaphore("four", 2).unwrap().acquire().unwrap();
    let term = client.elect("five", &LockOptions::new(), |term| {
        let check = term.fence_sql().unwrap();
        other.batch_execute(&format!("BEGIN; {check}; COMMIT")).unwrap();
        Break(check)
    });
    let checks = [one.fence_sql(), several.fence_sql(), permit.fence_sql(), term].map(Result::unwrap);
    let mut passes = |check: &str| {
        other.batch_execute("BEGIN").unwrap();
        let checked = other.batch_execute(check);
        let state = checked.err().map(|error| error.code().unwrap().code().to_owned());
        other.batch_execute("ROLLBACK").unwrap();
        state
    };
    let over = Some("22P02".to_owned());
    assert_eq!(checks.each_ref().map(|check| passes(check)), [None, None, None, over.clone()]);
    one.release().unwrap();
    several.release().unwrap();
    permit.release().unwrap();
    assert!(checks.iter().all(|check| passes(check) == over));
}
