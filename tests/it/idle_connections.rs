//! Idle connections that lead nowhere, or to a standby; places of a caller's pool that come free without a word.

use std::thread;
use std::time::{Duration, Instant};

use crate::support::calls::ms;
use crate::support::forward::Forwarder;
use crate::support::leases::{connect, named, sessions};
use crate::support::{Config, LIMIT, Server, TTL, TestSchema, together, wait_until, wait_until_app_waits};
use postgres::NoTls;
use r2d2_postgres::PostgresConnectionManager;
use syncguard::{AdvisoryKey, CancelToken, ErrorCode, Heartbeat, LockOptions, PgLockClient};

/// A bound that only a test which fails reaches.
const LONG: Duration = Duration::from_secs(120);

fn is_free(client: &PgLockClient, key: &str) -> bool {
    !client.is_locked(key).expect("the server answers")
}

/// Opens several connections, all of which are idle afterwards.
fn warm(client: &PgLockClient) {
    together(6, |i| {
        for n in 0..20 {
            assert!(is_free(client, &format!("warm{i}:{n}")));
        }
    });
}

#[test]
fn after_the_first_idle_connection_that_times_out_the_others_are_not_used() {
    let schema = crate::support::schema();
    let forwarder = Forwarder::start(crate::support::server().port());
    let url = format!("{}?options=-csearch_path%3D{}", forwarder.url(), schema.name());
    let client = connect(PgLockClient::builder().operation_timeout(Duration::from_secs(2)), &url);
    warm(&client);
    assert!(forwarder.opened() >= 3, "several are idle: {}", forwarder.opened());
    forwarder.forget();
    let error = client.is_locked("k").unwrap_err();
    assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
    // One at a time would find the place of the one that was closed; together they would find the others.
    warm(&client);
}

#[test]
fn a_pool_that_was_opened_to_a_standby_finds_the_primary() {
    let primary = Server::start(&Config::new());
    drop(PgLockClient::connect(primary.url()).unwrap());
    let standby = crate::support::standby::standby_of(&primary, "behind");
    let forwarder = Forwarder::start(standby.port);
    let builder = || PgLockClient::builder().auto_create_tables(false);
    let own = builder().connect(&forwarder.url()).unwrap();
    let manager = PostgresConnectionManager::new(forwarder.url().parse().unwrap(), NoTls);
    let pool = r2d2::Pool::builder().max_size(4).build(manager).unwrap();
    let callers = builder().build(pool).unwrap();
    wait_until(LIMIT, "the standby has the tables", || own.is_locked("k").is_ok());
    let (key, token) = (AdvisoryKey::from_text("k"), CancelToken::new());
    for client in [&own, &callers] {
        // It can read there.
        warm(client);
        for _ in 0..2 {
            let error = client.acquire("k", TTL).unwrap_err();
            assert_eq!(error.sqlstate(), Some("25006"), "{error:?}");
        }
        warm(client);
    }
    forwarder.lead_to(primary.port());
    for (i, client) in [&own, &callers].into_iter().enumerate() {
        let all = [
            client.acquire(&format!("k{i}"), TTL).map(|result| result.acquired().is_some()),
            client
                .cancellable(&token)
                .acquire(&format!("l{i}"), TTL)
                .map(|result| result.acquired().is_some()),
            client.try_advisory_lock(&key).map(|guard| guard.is_some()),
            client.lock(&format!("m{i}")).map(|guard| guard.is_held()),
        ];
        assert!(all.iter().all(|done| matches!(done, Ok(true))), "{i}: {all:?}");
    }
}

type CallersPool = r2d2::Pool<PostgresConnectionManager<NoTls>>;

fn callers_pool(schema: &TestSchema, app: &str, size: u32) -> CallersPool {
    let config = named(&schema.url(), app).parse().unwrap();
    let pool = r2d2::Pool::builder().max_size(size).min_idle(Some(0)).test_on_check_out(false);
    pool.connection_timeout(LONG).build(PostgresConnectionManager::new(config, NoTls)).unwrap()
}

#[test]
fn a_connection_in_doubt_that_a_callers_pool_drops_makes_room_for_who_waits() {
    let schema = crate::support::schema();
    let app = format!("app-{}", schema.name());
    let pool = callers_pool(&schema, &app, 1);
    let client = PgLockClient::builder().operation_timeout(LONG).build(pool.clone()).unwrap();
    let mut observer = schema.client();
    let mut blocker = schema.client();
    // The number of a key is the whole database's: no other test's.
    let key = format!("{app}:blocked");
    blocker.batch_execute(&format!("BEGIN; SELECT pg_advisory_xact_lock(hashtext('{key}'))")).unwrap();
    let token = CancelToken::new();
    let start = Instant::now();
    thread::scope(|scope| {
        let acquiring = scope.spawn(|| client.cancellable(&token).acquire(&key, TTL));
        wait_until_app_waits(&mut observer, &app);
        // One with a token and one without: all waits are alike.
        let waiting = [CancelToken::new(), CancelToken::never()].map(|never| {
            scope.spawn({
                let client = &client;
                move || client.cancellable(&never).is_locked("free")
            })
        });
        // Nothing shows that a thread waits for a pool; they do so a moment later.
        thread::sleep(ms(50));
        token.cancel();
        assert_eq!(acquiring.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
        for thread in waiting {
            assert!(!thread.join().unwrap().unwrap());
        }
    });
    assert!(start.elapsed() < LONG / 4, "they waited {:?}", start.elapsed());
}

#[test]
fn a_callers_connection_that_is_kept_for_renewals_goes_back_when_no_guard_is_renewed() {
    let schema = crate::support::schema();
    let app = format!("app-{}", schema.name());
    let pool = callers_pool(&schema, &app, 2);
    let clients = [(); 2].map(|()| PgLockClient::builder().build(pool.clone()).unwrap());
    let often = LockOptions::new().heartbeat(Heartbeat::Every(ms(40)));
    for round in 0..3 {
        for client in &clients {
            let guard = client.lock_with("k", &often).unwrap();
            assert!(pool.get_timeout(ms(1)).is_ok(), "one is left");
            assert!(guard.is_held(), "{round}");
            drop(guard);
        }
    }
    wait_until(LIMIT, "both are given back", || {
        let both = [pool.get_timeout(ms(20)), pool.get_timeout(ms(20))];
        both.iter().all(Result::is_ok)
    });
    assert!(sessions(&mut schema.client(), &app) <= 2);
}
