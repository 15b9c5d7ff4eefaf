//! What a guard does while it lives: it is renewed, it notices that its lease is lost, it lets go.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::calls::{MARGIN, Recorder, ms, on_release_error, renewing_often};
use crate::support::leases::{
    self, Events, client, delete_row, expiry, row, wait_until_released, wait_until_renewed,
};
use crate::support::{Config, LIMIT, Server, Stop, TTL, logs, wait_until, wait_until_app_waits};
use postgres::Client;
use syncguard::{
    ErrorCode, ExtendResult, Heartbeat, LockGuard, LockOptions, Operation, PgLockClient, ReleaseResult,
    ReleaseSource,
};

/// Until so much time has passed by the server's clock.
fn until_server_time(observer: &mut Client, at_ms: i64) {
    wait_until(LIMIT, "the time has passed", || leases::server_now_ms(observer) >= at_ms);
}

#[test]
fn a_guard_lets_go_however_its_scope_is_left() {
    fn early(client: &PgLockClient, leave: bool) -> u32 {
        let _guard = client.lock("k").unwrap();
        if leave {
            return 1;
        }
        2
    }
    fn with_question_mark(client: &PgLockClient) -> Result<(), Box<dyn std::error::Error>> {
        let _guard = client.lock("k")?;
        let _number: u32 = "not a number".parse()?;
        Ok(())
    }
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    {
        let _guard = client.lock("k").unwrap();
        assert!(row(&mut observer, "k").is_some());
    }
    assert_eq!(row(&mut observer, "k"), None, "at the end of its scope");
    assert_eq!((early(&client, true), row(&mut observer, "k")), (1, None));
    assert_eq!((early(&client, false), row(&mut observer, "k")), (2, None));
    assert!(with_question_mark(&client).is_err());
    assert_eq!(row(&mut observer, "k"), None, "by the question mark");
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _guard = client.lock("k").unwrap();
        std::panic::resume_unwind(Box::new("a panic of the caller's"));
    }));
    assert!(panicked.is_err());
    // While a thread unwinds it does no I/O: the worker lets go.
    wait_until_released(&mut observer, "k");
}

#[test]
fn a_released_guard_is_not_released_again_when_it_is_dropped() {
    let schema = crate::support::schema();
    let events = Events::default();
    let client = leases::connect(PgLockClient::builder().telemetry(events.options()), &schema.url());
    let guard = client.lock("k").unwrap();
    let id = guard.lock_id().to_owned();
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    // Reported in order: after this one there is none left.
    assert_eq!(client.release(&id).unwrap(), ReleaseResult::NotHeld);
    wait_until(LIMIT, "both releases are reported", || events.count(Operation::Release) >= 2);
    drop(client);
    assert_eq!(events.count(Operation::Release), 2);
}

#[test]
fn renewals_keep_a_lease_of_two_seconds_for_more_than_six() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let guard = client.lock_with("k", &LockOptions::new().ttl(Duration::from_secs(2))).unwrap();
    let first = row(&mut observer, "k").unwrap();
    let other = leases::client(&schema);
    wait_until(LIMIT, "six seconds have passed", || {
        assert!(guard.is_held() && !guard.remaining().is_zero());
        assert!(other.try_lock("k").unwrap().is_none());
        leases::server_now_ms(&mut observer) >= first.acquired_at_ms + 6200
    });
    let last = row(&mut observer, "k").unwrap();
    assert_eq!((last.lock_id, last.fence), (first.lock_id, first.fence));
    assert!(last.expires_at_ms >= first.acquired_at_ms + 6200);
}

#[test]
fn three_hundred_guards_are_renewed_together() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let options = LockOptions::new().heartbeat(Heartbeat::Every(ms(300)));
    let guards: Vec<_> = (0..300).map(|n| client.lock_with(&format!("k{n}"), &options).unwrap()).collect();
    let mut blocker = schema.client();
    // Renewals stand still until every guard is due.
    blocker.batch_execute("BEGIN; LOCK TABLE syncguard_locks IN EXCLUSIVE MODE").unwrap();
    wait_until(LIMIT, "all are due", || guards.iter().all(|guard| guard.remaining() + ms(320) < TTL));
    blocker.batch_execute("ROLLBACK").unwrap();
    let sql = "SELECT count(*) FROM syncguard_locks GROUP BY xmin::text ORDER BY 1 DESC LIMIT 1";
    wait_until(LIMIT, "one transaction renews most of them", || {
        observer.query_one(sql, &[]).unwrap().get::<_, i64>(0) >= 200
    });
    assert!(guards.iter().all(LockGuard::is_held));
}

#[test]
fn with_every_connection_taken_two_hundred_guards_are_still_renewed() {
    let schema = crate::support::schema();
    let app = format!("taken-{}", schema.name());
    let builder = PgLockClient::builder().max_connections(1).operation_timeout(LIMIT);
    let client = leases::connect(builder, &leases::named(&schema.url(), &app));
    let (mut observer, mut blocker) = (schema.client(), schema.client());
    let options = LockOptions::new().heartbeat(Heartbeat::Every(ms(200)));
    let guards: Vec<_> = (0..200).map(|n| client.lock_with(&format!("k{n}"), &options).unwrap()).collect();
    blocker.batch_execute("BEGIN; SELECT pg_advisory_xact_lock(hashtext('blocked'))").unwrap();
    thread::scope(|scope| {
        let acquiring = scope.spawn(|| client.acquire("blocked", TTL));
        wait_until_app_waits(&mut observer, &app);
        let least = |observer: &mut Client| {
            let sql = "SELECT min(expires_at_ms) FROM syncguard_locks WHERE key LIKE 'k%'";
            observer.query_one(sql, &[]).unwrap().get::<_, i64>(0)
        };
        let newest = guards.iter().map(LockGuard::expires_at_ms).max().unwrap();
        wait_until(LIMIT, "each of them is renewed", || least(&mut observer) > newest);
        assert!(guards.iter().all(LockGuard::is_held));
        assert!(!acquiring.is_finished(), "the pool's only connection was taken all the time");
        blocker.batch_execute("ROLLBACK").unwrap();
        assert!(acquiring.join().unwrap().unwrap().acquired().is_some());
    });
}

#[test]
fn a_lease_is_trusted_from_before_the_request_and_not_from_the_answer() {
    // A key of its own: its queue is that of the whole database.
    let schema = crate::support::schema();
    let app = format!("slow-{}", schema.name());
    let client = leases::connect(PgLockClient::builder(), &leases::named(&schema.url(), &app));
    let (mut observer, mut blocker) = (schema.client(), schema.client());
    blocker.batch_execute("BEGIN; SELECT pg_advisory_xact_lock(hashtext('answered slowly'))").unwrap();
    thread::scope(|scope| {
        let locking = scope
            .spawn(|| client.lock_with("answered slowly", &LockOptions::new().heartbeat(Heartbeat::Off)));
        wait_until_app_waits(&mut observer, &app);
        let waits_since = Instant::now();
        let now = leases::server_now_ms(&mut observer);
        until_server_time(&mut observer, now + 500);
        let waited = waits_since.elapsed();
        blocker.batch_execute("ROLLBACK").unwrap();
        let guard = locking.join().unwrap().unwrap();
        assert!(guard.remaining() + waited <= TTL, "{:?} left after {waited:?}", guard.remaining());
        assert!(guard.remaining() > TTL / 2);
    });
}

#[test]
fn a_grant_that_waited_for_most_of_its_ttl_is_extended_before_it_is_handed_out() {
    let schema = crate::support::schema();
    let app = format!("late-{}", schema.name());
    let client = leases::connect(PgLockClient::builder(), &leases::named(&schema.url(), &app));
    let (mut observer, mut blocker) = (schema.client(), schema.client());
    blocker.batch_execute("BEGIN; SELECT pg_advisory_xact_lock(hashtext('granted late'))").unwrap();
    thread::scope(|scope| {
        let options = LockOptions::new().ttl(ms(1500)).heartbeat(Heartbeat::Off);
        let locking = scope.spawn(move || client.lock_with("granted late", &options));
        wait_until_app_waits(&mut observer, &app);
        let now = leases::server_now_ms(&mut observer);
        until_server_time(&mut observer, now + 1600);
        blocker.batch_execute("ROLLBACK").unwrap();
        let guard = locking.join().unwrap().unwrap();
        assert!(guard.is_held(), "no guard is handed out that is not held");
        let row = row(&mut observer, "granted late").unwrap();
        assert!(row.expires_at_ms > row.acquired_at_ms + 1500, "it was extended");
    });
}

#[test]
fn the_ttl_of_an_extend_is_the_ttl_of_later_renewals() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let guard = client.lock_with("k", &renewing_often()).unwrap();
    let long = Duration::from_secs(600);
    let ExtendResult::Extended { expires_at_ms } = guard.extend(long).unwrap() else { panic!("it is held") };
    assert!(expiry(&mut observer, "k") >= expires_at_ms);
    // Not at once, if a renewal to the shorter end was under way.
    wait_until(LIMIT, "the guard trusts it", || guard.remaining() > long / 2);
    wait_until(LIMIT, "a renewal has come after it", || expiry(&mut observer, "k") > expires_at_ms);
    wait_until(LIMIT, "the guard knows", || guard.expires_at_ms() > expires_at_ms);
    // And back: a shorter one is shorter at once. (A renewal that was under way may still write the
    // longer end once; the guard does not trust it.)
    let minute = Duration::from_secs(60);
    let ExtendResult::Extended { expires_at_ms } = guard.extend(minute).unwrap() else {
        panic!("it is held")
    };
    assert!(guard.remaining() <= minute);
    wait_until(LIMIT, "a renewal of a minute has come after it", || {
        let now = leases::server_now_ms(&mut observer);
        (expires_at_ms + 1..=now + 60_000).contains(&expiry(&mut observer, "k"))
    });
    assert!(guard.is_held() && guard.remaining() <= minute);
}

#[test]
fn a_release_that_failed_is_done_by_the_worker_when_the_server_is_back() {
    let server = Server::start(&Config::new());
    let schema = server.schema();
    let failures = Recorder::default();
    let builder =
        PgLockClient::builder().operation_timeout(ms(2000)).on_release_error(on_release_error(&failures));
    let client = leases::connect(builder, &schema.url());
    let guard = client.lock("k").unwrap();
    let id = guard.lock_id().to_owned();
    server.stop(Stop::Fast);
    let error = guard.release().unwrap_err();
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    assert_eq!((error.key(), error.lock_id()), (Some("k"), Some(&*id)));
    server.start_again();
    wait_until_released(&mut schema.client(), "k");
    assert_eq!(failures.list(), [], "the caller had the error; the callback is for those who cannot have it");
}

#[test]
fn drop_with_the_server_away_returns_in_time_and_tells_the_callback() {
    let server = Server::start(&Config::new());
    let schema = server.schema();
    let failures = Recorder::default();
    let builder = PgLockClient::builder().dispose_timeout(ms(400));
    let client = leases::connect(builder.on_release_error(on_release_error(&failures)), &schema.url());
    let own = Recorder::default();
    let (first, second) = (
        client.lock("first").unwrap(),
        client.lock_with("second", &LockOptions::new().on_release_error(on_release_error(&own))).unwrap(),
    );
    let ids = [first.lock_id().to_owned(), second.lock_id().to_owned()];
    // While a thread unwinds, the worker lets go and tells.
    let third = client.lock("third").unwrap();
    let third_id = third.lock_id().to_owned();
    server.stop(Stop::Fast);
    for guard in [first, second] {
        let start = Instant::now();
        drop(guard);
        assert!(start.elapsed() < ms(400) + MARGIN, "Drop took {:?}", start.elapsed());
    }
    let failed = |key: &str, id: &String| {
        vec![(ErrorCode::ServiceUnavailable, ReleaseSource::Drop, key.to_owned(), id.clone())]
    };
    assert_eq!(failures.list(), failed("first", &ids[0]));
    let start = Instant::now();
    let panicked = catch_unwind(AssertUnwindSafe(move || {
        let _guard = third;
        std::panic::resume_unwind(Box::new("a panic of the caller's"));
    }));
    assert!(
        start.elapsed() < MARGIN && panicked.unwrap_err().downcast_ref() == Some(&"a panic of the caller's")
    );
    let told = [failed("first", &ids[0]), failed("third", &third_id)].concat();
    wait_until(LIMIT, "the worker has told", || failures.list() == told);
    assert_eq!(own.list(), failed("second", &ids[1]), "the lock's own handler takes the client's place");
    server.start_again();
    let mut observer = schema.client();
    wait_until_released(&mut observer, "first");
    wait_until_released(&mut observer, "second");
    wait_until_released(&mut observer, "third");
    assert_eq!((failures.list().len(), own.list().len()), (2, 1));
}

#[test]
fn drop_of_a_row_that_another_session_locks_ends_with_a_timeout() {
    let schema = crate::support::schema();
    for url in [schema.url(), schema.socket_url()] {
        let failures = Recorder::default();
        let builder = PgLockClient::builder().dispose_timeout(ms(300));
        let client = leases::connect(builder.on_release_error(on_release_error(&failures)), &url);
        let (mut observer, mut other) = (schema.client(), schema.client());
        let guard = client.lock("k").unwrap();
        other.batch_execute("BEGIN; SELECT 1 FROM syncguard_locks WHERE key = 'k' FOR UPDATE").unwrap();
        let start = Instant::now();
        drop(guard);
        let took = start.elapsed();
        // The server counts whole milliseconds of what is left.
        assert!((ms(290)..ms(300) + MARGIN).contains(&took), "Drop took {took:?}");
        let told: Vec<_> = failures.list().into_iter().map(|(code, source, ..)| (code, source)).collect();
        assert_eq!(told, [(ErrorCode::NetworkTimeout, ReleaseSource::Drop)]);
        other.batch_execute("ROLLBACK").unwrap();
        wait_until_released(&mut observer, "k");
        assert!(client.close(LIMIT).unwrap().is_clean());
    }
}

#[test]
fn a_lease_that_is_gone_already_is_no_failed_release() {
    let schema = crate::support::schema();
    let failures = Recorder::default();
    let builder = PgLockClient::builder().on_release_error(on_release_error(&failures));
    let client = leases::connect(builder, &schema.url());
    let mark = logs::capture();
    for key in ["dropped", "helped"] {
        if key == "dropped" {
            let guard = client.lock(key).unwrap();
            delete_row(&mut schema.client(), key);
            drop(guard);
        } else {
            let work = |_: &LockGuard| delete_row(&mut schema.client(), key);
            assert_eq!(client.with_lock(key, &LockOptions::new(), work).unwrap(), 1);
        }
    }
    assert_eq!(failures.list(), []);
    assert!(mark.of_this_thread().iter().all(|line| line.level > log::Level::Warn));
}

#[test]
fn without_a_handler_a_failed_release_is_warned_of_once_and_namelessly() {
    let schema = crate::support::schema();
    let client = leases::connect(PgLockClient::builder().dispose_timeout(ms(150)), &schema.url());
    let mut other = schema.client();
    let guard = client.lock("nameless-key").unwrap();
    let id = guard.lock_id().to_owned();
    let hashes = [syncguard::hash_key("nameless-key"), syncguard::hash_key(&id)];
    other.batch_execute("BEGIN; SELECT 1 FROM syncguard_locks FOR UPDATE").unwrap();
    let mark = logs::capture();
    drop(guard);
    let warnings: Vec<_> =
        mark.of_this_thread().into_iter().filter(|line| line.level == log::Level::Warn).collect();
    assert_eq!(warnings.len(), usize::from(cfg!(debug_assertions)), "{warnings:#?}");
    for line in &warnings {
        assert!(line.text.contains("on_release_error") && line.text.contains("NetworkTimeout"), "{line:?}");
        assert!(hashes.iter().all(|hash| !line.text.contains(hash)), "{line:?}");
    }
    other.batch_execute("ROLLBACK").unwrap();
    wait_until_released(&mut schema.client(), "nameless-key");
    mark.assert_without(&["nameless-key", &id]);
}

#[test]
fn a_panic_in_a_callback_stays_there() {
    let schema = crate::support::schema();
    let builder = PgLockClient::builder().dispose_timeout(ms(150));
    let calls = Recorder::default();
    let (lost, release) = (calls.callback(), calls.callback());
    let client = leases::connect(
        builder.on_release_error(move |_, _| {
            release("release");
            std::panic::resume_unwind(Box::new("in on_release_error"));
        }),
        &schema.url(),
    );
    let (mut observer, mut other) = (schema.client(), schema.client());
    let bystander = client.lock_with("bystander", &renewing_often()).unwrap();
    let options = renewing_often().on_lost(move |_| {
        lost("lost");
        std::panic::resume_unwind(Box::new("in on_lost"));
    });
    let guard = client.lock_with("k", &options).unwrap();
    delete_row(&mut observer, "k");
    assert!(guard.lost().wait_timeout(LIMIT));
    wait_until(LIMIT, "on_lost is called", || calls.list() == ["lost"]);
    let blocked = client.lock("blocked").unwrap();
    other.batch_execute("BEGIN; SELECT 1 FROM syncguard_locks WHERE key = 'blocked' FOR UPDATE").unwrap();
    drop(blocked);
    assert_eq!(calls.list(), ["lost", "release"]);
    other.batch_execute("ROLLBACK").unwrap();
    wait_until_released(&mut observer, "blocked");
    wait_until_renewed(&mut observer, &bystander);
}
