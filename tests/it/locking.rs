//! Waiting for a lock, and how long it is held: the options, one by one and together.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::calls::{asking_hourly, asking_often, ms, told_in_time};
use crate::support::leases::{self, Events, client, counter, forge, forged_id, row, while_asleep};
use crate::support::{Config, LIMIT, Server, Stop, TTL, Worker, wait_until, wait_until_app_waits, worker};
use postgres::Client;
use syncguard::{
    ErrorCode, Heartbeat, LockError, LockOptions, Operation, PgLockClient, ReleaseResult, ReleaseSource,
};

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn a_waiter_gets_the_key_at_once_when_its_process_lets_it_go() {
    let schema = crate::support::schema();
    let client = client(&schema);
    for drop_it in [false, true] {
        let guard = client.lock("k").unwrap();
        let first = guard.fence();
        // The next look would come in an hour.
        let next = while_asleep(
            || client.lock_with("k", &asking_hourly()).unwrap(),
            || {
                if drop_it {
                    drop(guard);
                } else {
                    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
                }
            },
        );
        assert_eq!(next.fence().get(), first.get() + 1);
        assert!(next.is_held());
    }
}

#[test]
fn a_waiter_gets_the_key_when_another_process_lets_it_go() {
    worker::part("waiter", |parent| {
        let client = PgLockClient::connect(&parent.arg("url")).unwrap();
        assert!(client.try_lock("k").unwrap().is_none());
        parent.say("waits");
        let guard = client.lock_with("k", &asking_often()).unwrap();
        parent.say(&guard.fence().to_string());
        parent.hear();
        guard.release().unwrap();
        parent.say("released");
    });
    let schema = crate::support::schema();
    let client = client(&schema);
    let guard = client.lock("k").unwrap();
    let url = schema.url();
    let test = "a_waiter_gets_the_key_when_another_process_lets_it_go";
    let mut worker = Worker::start(test, "waiter", &[("url", &url)]);
    worker.expect("waits");
    assert!(guard.is_held());
    guard.release().unwrap();
    worker.expect("000000000000002");
    assert!(client.try_lock("k").unwrap().is_none(), "the other process has it");
    worker.tell("release");
    worker.expect("released");
    assert_eq!(client.lock_with("k", &asking_often()).unwrap().fence().get(), 3);
}

#[test]
fn a_killed_process_frees_its_key_after_ttl_and_tolerance() {
    worker::part("holder", |parent| {
        let client = PgLockClient::connect(&parent.arg("url")).unwrap();
        let guard = client.lock_with("k", &LockOptions::new().ttl(ms(500))).unwrap();
        parent.say(&guard.fence().to_string());
        parent.wait_forever();
    });
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let url = schema.url();
    let test = "a_killed_process_frees_its_key_after_ttl_and_tolerance";
    let mut worker = Worker::start(test, "holder", &[("url", &url)]);
    worker.expect("000000000000001");
    worker.kill();
    let last = row(&mut observer, "k").expect("nobody was left to release it").expires_at_ms;
    let guard = client.lock_with("k", &asking_often()).unwrap();
    assert_eq!(guard.fence().get(), 2);
    assert!(row(&mut observer, "k").unwrap().acquired_at_ms >= last + 1000);
}

/// A key that somebody else holds for long.
fn held(observer: &mut Client, key: &str) {
    forge(observer, key, &forged_id(0), 3_600_000);
}

#[test]
fn after_its_timeout_a_waiter_names_the_holder_as_far_as_it_can_be_known() {
    let schema = crate::support::schema();
    let (client, other) = (client(&schema), client(&schema));
    let elsewhere = other.lock_with("elsewhere", &LockOptions::new().ttl(Duration::from_secs(20))).unwrap();
    let wait = |key: &str| client.lock_with(key, &asking_often().timeout(ms(2000))).unwrap_err().to_string();
    let text = wait("elsewhere");
    assert!(text.contains(&format!("held under fencing token {};", elsewhere.fence().get())), "{text}");
    let rest = text.split("ends in ").nth(1).unwrap().split(' ').next().unwrap();
    assert!(rest.parse::<f64>().unwrap() <= 20.0, "{text}");
    let _mine = client.lock("mine").unwrap();
    assert!(wait("mine").contains("this very thread took it"), "{}", wait("mine"));
    let wait_elsewhere = || wait("mine");
    let text = std::thread::scope(|scope| scope.spawn(wait_elsewhere).join().unwrap());
    assert!(text.contains("another thread of this client"), "{text}");
    // Who tries once asks, too.
    held(&mut schema.client(), "hidden");
    let text = client.lock_with("hidden", &LockOptions::new().max_retries(0)).unwrap_err().to_string();
    assert!(text.contains("it is held under fencing token 1; its lease ends in "), "{text}");
}

#[test]
fn after_its_timeout_a_waiter_says_how_long_and_how_often_it_tried() {
    let schema = crate::support::schema();
    let client = client(&schema);
    held(&mut schema.client(), "secret-key");
    let start = Instant::now();
    let error =
        client.lock_with("secret-key", &asking_often().timeout(ms(2000)).max_retries(u32::MAX)).unwrap_err();
    assert!(start.elapsed() >= ms(2000), "it waited as long as it might");
    assert_eq!((error.code(), error.key()), (ErrorCode::AcquisitionTimeout, Some("secret-key")));
    let text = error.to_string();
    let seconds = text.split("within ").nth(1).unwrap().split(' ').next().unwrap();
    assert!(seconds.parse::<f64>().unwrap() >= 2.0, "{text}");
    let attempts = text.split(", in ").nth(1).unwrap().split(' ').next().unwrap();
    assert!(attempts.parse::<u32>().unwrap() > 1, "{text}");
    assert!(!text.contains("secret-key"));
    assert!(!error.is_outcome_unknown());
}

#[test]
fn after_its_retries_a_waiter_says_how_often_it_tried() {
    let schema = crate::support::schema();
    let events = Events::default();
    let client = leases::connect(PgLockClient::builder().telemetry(events.options()), &schema.url());
    held(&mut schema.client(), "k");
    for (retries, said) in [(0, "in 1 attempt:"), (2, "in 3 attempts:")] {
        let options = LockOptions::new().timeout(HOUR).max_retries(retries).retry_delay(ms(1));
        let error = client.lock_with("k", &options).unwrap_err();
        assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
        assert!(error.to_string().contains(said), "{error}");
    }
    // Only a first attempt asks in full, later ones look first and find it taken.
    wait_until(LIMIT, "both first attempts are reported", || events.count(Operation::Acquire) == 2);
}

#[test]
fn a_try_is_one_attempt_and_says_none() {
    let schema = crate::support::schema();
    let client = client(&schema);
    held(&mut schema.client(), "k");
    let patient = LockOptions::new().wait_forever().retry_delay(HOUR).timeout(HOUR);
    assert!(client.try_lock("k").unwrap().is_none());
    assert!(client.try_lock_with("k", &patient).unwrap().is_none(), "timeout and retries do not apply");
    let guard = client.try_lock("free").unwrap().expect("nobody has it");
    assert!(guard.is_held() && guard.fence().get() == 1 && guard.key() == "free");
}

#[test]
fn the_defaults_are_thirty_seconds_of_lease_and_five_of_waiting() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let guard = client.lock("k").unwrap();
    let row = row(&mut observer, "k").unwrap();
    assert_eq!(row.expires_at_ms - row.acquired_at_ms, 30_000);
    assert_eq!(guard.expires_at_ms(), row.expires_at_ms);
    assert!(guard.remaining() <= TTL && guard.remaining() > TTL / 2);
    assert_eq!(syncguard::DEFAULT_TTL, TTL);
    assert_eq!(syncguard::DEFAULT_TIMEOUT, Duration::from_secs(5));
    assert_eq!((syncguard::DEFAULT_MAX_RETRIES, syncguard::DEFAULT_RETRY_DELAY), (10, ms(100)));
    // The default options are those numbers.
    let said = format!("{:?}", LockOptions::new());
    for part in ["ttl: 30s", "timeout: Some(5s)", "retry_delay: 100ms", "Exponential", "Equal", "Auto"] {
        assert!(said.contains(part), "{part} in {said}");
    }
}

#[test]
fn a_wait_of_five_seconds_is_the_default_limit() {
    let schema = crate::support::schema();
    let client = client(&schema);
    held(&mut schema.client(), "k");
    let start = Instant::now();
    let error = client.lock("k").unwrap_err();
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert!(start.elapsed() >= Duration::from_secs(5), "ten retries take longer than that");
}

#[test]
fn threads_of_one_process_take_turns_in_the_order_in_which_they_came() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let guard = client.lock("k").unwrap();
    let order = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for i in 0..6 {
            let (client, order) = (&client, &order);
            threads.push(leases::spawn_until_asleep(scope, move || {
                let guard = client.lock_with("k", &asking_hourly()).unwrap();
                order.lock().unwrap().push((i, guard.fence().get()));
            }));
        }
        guard.release().unwrap();
        wait_until(LIMIT, "all had their turn", || threads.iter().all(thread::ScopedJoinHandle::is_finished));
    });
    let expected: Vec<_> = (0..6).map(|i| (i, i + 2)).collect();
    assert_eq!(order.into_inner().unwrap(), expected);
}

#[test]
fn only_the_first_of_a_process_asks_the_server() {
    let schema = crate::support::schema();
    let events = Events::default();
    let client = leases::connect(PgLockClient::builder().telemetry(events.options()), &schema.url());
    let guard = client.lock("k").unwrap();
    thread::scope(|scope| {
        for _ in 0..8 {
            leases::spawn_until_asleep(scope, || client.lock_with("k", &asking_hourly()).unwrap());
        }
        // The holder's grant, and the refusal of the first in the queue.
        wait_until(LIMIT, "the first two are reported", || events.count(Operation::Acquire) >= 2);
        assert_eq!(events.count(Operation::Acquire), 2);
        drop(guard);
    });
    client.close(LIMIT).unwrap();
}

#[test]
fn no_option_lengthens_another() {
    let schema = crate::support::schema();
    let client = client(&schema);
    held(&mut schema.client(), "k");
    let timed_out = |options: &LockOptions| {
        let error = client.lock_with("k", options).unwrap_err();
        assert_eq!(error.code(), ErrorCode::AcquisitionTimeout, "{options:?}: {error:?}");
        error.to_string()
    };
    // So that a short wait is not spent on connecting.
    drop(client.lock("warm").unwrap());
    // Every one of these would take hours, if the other option did not end it.
    timed_out(&asking_hourly().timeout(ms(2000)));
    timed_out(&LockOptions::new().timeout(ms(2000)).ttl(HOUR).max_retries(u32::MAX));
    timed_out(&LockOptions::new().timeout(HOUR).max_retries(1).retry_delay(ms(1)).ttl(HOUR));
    timed_out(&LockOptions::new().wait_forever().max_retries(1).retry_delay(ms(1)));
    timed_out(&LockOptions::new().max_retries(1).retry_delay(ms(1)).wait_forever());
    assert!(timed_out(&LockOptions::new().timeout(Duration::ZERO)).contains("no attempt was made"));
    // A short lease does not shorten the wait, nor a short wait the lease.
    let guard = client.lock_with("free", &LockOptions::new().ttl(HOUR).timeout(ms(2000))).unwrap();
    assert!(guard.remaining() > HOUR / 2);
}

#[test]
fn with_lock_hands_out_what_the_closure_returned_and_lets_go_first() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let options = LockOptions::new();
    let value = client.with_lock("k", &options, |guard| {
        assert!(guard.is_held());
        assert!(row(&mut observer, "k").is_some());
        vec![guard.fence().get()]
    });
    assert_eq!(value.unwrap(), [1]);
    assert_eq!(row(&mut observer, "k"), None);
    let result: Result<(), &str> = client.with_lock("k", &options, |_| Err("the caller's own")).unwrap();
    assert_eq!(result, Err("the caller's own"));
    assert_eq!(row(&mut observer, "k"), None);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        client
            .with_lock("k", &options, |_| std::panic::resume_unwind(Box::new("the caller's panic")))
            .map(|()| 0)
    }));
    assert_eq!(panicked.unwrap_err().downcast_ref::<&str>(), Some(&"the caller's panic"));
    assert_eq!(row(&mut observer, "k"), None, "let go before the panic goes on");
    assert_eq!(counter(&mut observer, "k"), Some(3));
    held(&mut observer, "taken");
    let mut ran = false;
    let refused = client.with_lock("taken", &LockOptions::new().max_retries(0), |_| ran = true);
    assert_eq!(refused.unwrap_err().code(), ErrorCode::AcquisitionTimeout);
    assert!(!ran, "without the lock the closure does not run");
}

#[test]
fn the_closures_value_arrives_although_the_server_stopped_at_its_end() {
    let server = Server::start(&Config::new());
    let schema = server.schema();
    let told = Arc::new(Mutex::new(Vec::new()));
    let builder = PgLockClient::builder().dispose_timeout(ms(300)).on_release_error({
        let told = Arc::clone(&told);
        move |error, context| told.lock().unwrap().push((error.code(), context.source, context.key.clone()))
    });
    let client = leases::connect(builder, &schema.url());
    let value = client.with_lock("k", &LockOptions::new(), |_| {
        server.stop(Stop::Fast);
        42
    });
    assert_eq!(value.unwrap(), 42);
    let expected = [(ErrorCode::ServiceUnavailable, ReleaseSource::Helper, "k".to_owned())];
    assert_eq!(*told.lock().unwrap(), expected, "told before with_lock returned");
    // The worker goes on trying, and does not tell it again.
    let report = client.close(ms(500)).unwrap();
    assert_eq!((report.released, report.pending), (0, 1), "{report:?}");
    assert_eq!(told.lock().unwrap().len(), 1);
}

/// Lets the next inserts into the lock table fail with this SQLSTATE, the first `times` of them.
fn fail_inserts(observer: &mut Client, sqlstate: &str, times: usize) {
    observer
        .batch_execute(&format!(
            "CREATE SEQUENCE tries; \
             CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               IF nextval(format('%I.tries', TG_TABLE_SCHEMA)) <= {times} \
               THEN RAISE EXCEPTION USING ERRCODE = '{sqlstate}', MESSAGE = 'made to fail'; END IF; \
               RETURN NEW; END $$; \
             CREATE TRIGGER fail BEFORE INSERT ON syncguard_locks FOR EACH ROW EXECUTE FUNCTION fail()"
        ))
        .unwrap();
}

#[test]
fn lock_tries_again_after_conflicts_that_rolled_it_back() {
    for (sqlstate, code) in [
        ("40001", ErrorCode::ServiceUnavailable),
        ("40P01", ErrorCode::ServiceUnavailable),
        ("55P03", ErrorCode::NetworkTimeout),
    ] {
        let schema = crate::support::schema();
        let events = Events::default();
        let client = leases::connect(PgLockClient::builder().telemetry(events.options()), &schema.url());
        fail_inserts(&mut schema.client(), sqlstate, 3);
        // A single operation says what happened, and that it is contention.
        let error = client.acquire("k", TTL).unwrap_err();
        assert_eq!((error.code(), error.is_contention()), (code, true), "{error:?}");
        assert!(error.to_string().contains(sqlstate), "{error}");
        let guard = client.lock_with("k", &asking_often()).unwrap();
        assert_eq!(guard.fence().get(), 1, "{sqlstate}: nothing was burnt");
        wait_until(LIMIT, "all attempts are reported", || events.count(Operation::Acquire) == 4);
        assert_eq!(events.failed(Operation::Acquire, code), 3);
        let guard = client.try_lock("another").unwrap();
        assert!(guard.is_some(), "{sqlstate}: a try as well");
    }
}

#[test]
fn lock_survives_a_real_deadlock() {
    // Its own: the queue of a key is that of the whole database.
    let key = "deadlocked";
    let schema = crate::support::schema();
    let app = format!("deadlock-{}", schema.name());
    let events = Events::default();
    let builder = PgLockClient::builder().telemetry(events.options());
    let client = leases::connect(builder, &leases::named(&schema.url(), &app));
    let (mut observer, mut other) = (schema.client(), schema.client());
    forge(&mut observer, key, &forged_id(0), -60_000);
    // We have the row and want the queue; the acquire has the queue and wants the row. It is the one
    // that looks for a deadlock first.
    other.batch_execute("SET deadlock_timeout = '20s'").unwrap();
    other.batch_execute("BEGIN; SELECT 1 FROM syncguard_locks WHERE key = 'deadlocked' FOR UPDATE").unwrap();
    thread::scope(|scope| {
        let locking = scope.spawn(|| client.lock_with(key, &asking_often()));
        wait_until_app_waits(&mut observer, &app);
        other.batch_execute("SELECT pg_advisory_xact_lock(hashtext('deadlocked'))").unwrap();
        other.batch_execute("ROLLBACK").unwrap();
        assert_eq!(locking.join().unwrap().unwrap().fence().get(), 2);
    });
    wait_until(LIMIT, "the deadlock is reported", || {
        events.failed(Operation::Acquire, ErrorCode::ServiceUnavailable) == 1
    });
}

#[test]
fn lock_outlasts_a_table_lock_that_is_longer_than_one_attempt() {
    let schema = crate::support::schema();
    let app = format!("table-{}", schema.name());
    drop(client(&schema));
    let builder = PgLockClient::builder().operation_timeout(ms(150)).auto_create_tables(false);
    let client = leases::connect(builder, &leases::named(&schema.url(), &app));
    let (mut observer, mut other) = (schema.client(), schema.client());
    let contended = |error: &LockError| error.is_contention() && !error.is_outcome_unknown();
    let error = told_in_time(&client, contended, || {
        other.batch_execute("BEGIN; LOCK TABLE syncguard_locks").unwrap();
        let result = client.acquire("another", TTL);
        other.batch_execute("ROLLBACK").unwrap();
        result
    });
    assert_eq!(error.code(), ErrorCode::NetworkTimeout);
    wait_until(LIMIT, "the client is connected", || client.is_locked("k").is_ok());
    other.batch_execute("BEGIN; LOCK TABLE syncguard_locks").unwrap();
    thread::scope(|scope| {
        let locking = scope.spawn(|| {
            loop {
                match client.lock_with("k", &asking_often()) {
                    // On a busy machine an answer, or a connection, may come too late. That ends the wait.
                    Err(error) if error.code() == ErrorCode::NetworkTimeout && !error.is_contention() => {}
                    other => return other,
                }
            }
        });
        // The first attempt, and the looks after it, each end in time and are followed by another.
        let mut seen = std::collections::HashSet::new();
        let sql = "SELECT DISTINCT a.query_start::text FROM pg_stat_activity a JOIN pg_locks l ON l.pid = a.pid \
                   WHERE a.application_name = $1 AND NOT l.granted";
        wait_until(LIMIT, "four of them were blocked", || {
            seen.extend(observer.query(sql, &[&app]).unwrap().iter().map(|row| row.get::<_, String>(0)));
            assert!(!locking.is_finished(), "the wait has ended: {:?}", seen.len());
            seen.len() >= 4
        });
        other.batch_execute("ROLLBACK").unwrap();
        assert!(locking.join().unwrap().unwrap().is_held());
    });
}

#[test]
fn errors_that_are_not_contention_end_the_wait_at_once() {
    for (sqlstate, code) in [
        ("42501", ErrorCode::AuthFailed),
        ("53100", ErrorCode::ServiceUnavailable),
        ("XX000", ErrorCode::Internal),
    ] {
        let schema = crate::support::schema();
        let events = Events::default();
        let client = leases::connect(PgLockClient::builder().telemetry(events.options()), &schema.url());
        fail_inserts(&mut schema.client(), sqlstate, 1);
        let error = client.lock_with("k", &asking_often()).unwrap_err();
        assert_eq!((error.code(), error.is_contention()), (code, false), "{sqlstate}: {error:?}");
        assert_eq!(error.key(), Some("k"));
        assert_eq!(row(&mut schema.client(), "k"), None);
        wait_until(LIMIT, "the attempt is reported", || events.count(Operation::Acquire) > 0);
        assert_eq!(events.count(Operation::Acquire), 1);
    }
    let schema = crate::support::schema();
    let client = client(&schema);
    for key in ["", &"x".repeat(513), "a\0b"] {
        let error: LockError = client.lock_with(key, &asking_often()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{key:?}");
    }
    let error = client.lock_with("k", &asking_often().heartbeat(Heartbeat::Every(HOUR))).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
}
