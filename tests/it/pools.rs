//! Connections: our own pool, a caller's, and servers that refuse, restart or say nothing.

use std::collections::HashSet;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::calls::{MARGIN, ms, renewing_often};
use crate::support::leases::{self, connect, named, row, sessions};
use crate::support::{
    Config, LIMIT, Server, Stop, TTL, TestSchema, together, wait_until, wait_until_app_waits,
};
use postgres::{Client, NoTls};
use r2d2_postgres::PostgresConnectionManager;
use syncguard::{
    AcquireResult, ErrorCode, Heartbeat, LockError, LockGuard, LockOptions, Lookup, PgLockClient,
    ReleaseResult,
};

/// A bound that only a test which fails reaches.
const LONG: Duration = Duration::from_secs(120);
fn cycle(client: &PgLockClient, key: &str) -> u64 {
    let grant = client.acquire(key, TTL).unwrap().acquired().expect("the key is free");
    assert_eq!(client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
    grant.fence.get()
}

/// The server processes of these sessions.
fn pids(observer: &mut Client, app: &str) -> HashSet<i32> {
    let sql = "SELECT pid FROM pg_stat_activity WHERE application_name = $1";
    observer.query(sql, &[&app]).unwrap().iter().map(|row| row.get(0)).collect()
}

fn app(schema: &TestSchema) -> String {
    format!("app-{}", schema.name())
}

/// A key that no other test uses: the queues of keys are shared by the schemas of a database.
fn own_key(schema: &TestSchema) -> String {
    format!("k-{}", schema.name())
}

/// Holds the queue of `key`, so that an acquire of it takes up a connection until the end.
fn block(schema: &TestSchema, key: &str) -> Client {
    let mut blocker = schema.client();
    let sql = format!("BEGIN; SELECT pg_advisory_xact_lock(hashtext('{key}'))");
    blocker.batch_execute(&sql).unwrap();
    blocker
}

#[test]
fn no_more_connections_are_opened_than_allowed_and_they_are_used_again() {
    let schema = crate::support::schema();
    let app = app(&schema);
    let client = connect(PgLockClient::builder().max_connections(3), &named(&schema.url(), &app));
    let mut observer = schema.client();
    let done = AtomicBool::new(false);
    let most = thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut most = 0;
            while !done.load(Ordering::Relaxed) {
                most = most.max(sessions(&mut observer, &app));
            }
            (most, observer)
        });
        together(24, |i| {
            for n in 0..10 {
                cycle(&client, &format!("k{i}:{n}"));
            }
        });
        done.store(true, Ordering::Relaxed);
        watching.join().unwrap()
    });
    let (most, mut observer) = most;
    assert!((1..=3).contains(&most), "{most} at once");
    let before = pids(&mut observer, &app);
    for _ in 0..20 {
        cycle(&client, "again");
    }
    assert_eq!(pids(&mut observer, &app), before, "no connection was opened or closed for them");
    // Renewals have one of their own, beside those.
    let guards: Vec<_> =
        (0..10).map(|n| client.lock_with(&format!("g{n}"), &renewing_often()).unwrap()).collect();
    wait_until(LIMIT, "they are renewed", || sessions(&mut observer, &app) == 4);
    drop(guards);
    assert_eq!(sessions(&mut observer, &app), 4);
}

#[test]
fn with_all_connections_in_use_a_call_is_rate_limited() {
    let schema = crate::support::schema();
    let app = app(&schema);
    let builder =
        PgLockClient::builder().max_connections(2).connection_timeout(ms(200)).operation_timeout(LONG);
    let client = connect(builder, &named(&schema.url(), &app));
    let mut observer = schema.client();
    let key = own_key(&schema);
    let mut blocker = block(&schema, &key);
    thread::scope(|scope| {
        let taken: Vec<_> = (0..2).map(|_| scope.spawn(|| client.acquire(&key, TTL))).collect();
        let waiting = "SELECT count(*) FROM pg_stat_activity a JOIN pg_locks l ON l.pid = a.pid AND NOT l.granted \
                       WHERE a.application_name = $1";
        wait_until(LIMIT, "both wait", || {
            observer.query_one(waiting, &[&app]).unwrap().get::<_, i64>(0) == 2
        });
        for error in [
            client.acquire("free", TTL).unwrap_err(),
            client.is_locked("free").unwrap_err(),
            client.try_lock("free").unwrap_err(),
        ] {
            assert_eq!(error.code(), ErrorCode::RateLimited, "{error:?}");
            assert!(error.to_string().contains("max_connections"), "{error}");
        }
        blocker.batch_execute("ROLLBACK").unwrap();
        let won = taken.into_iter().map(|thread| thread.join().unwrap().unwrap());
        assert_eq!(won.filter(|result| matches!(result, AcquireResult::Acquired(_))).count(), 1);
    });
    assert_eq!(cycle(&client, "free"), 1);
}

#[test]
fn a_restart_of_the_server_is_not_noticed_between_two_calls() {
    let server = Server::start(&Config::new());
    let schema = server.schema();
    let app = app(&schema);
    let client = connect(PgLockClient::builder(), &named(&schema.url(), &app));
    let tokens = client.cancellable(&syncguard::CancelToken::new());
    for (round, how) in (1..).zip([Stop::Fast, Stop::Immediate]) {
        // Several idle connections, all of which the restart makes stale.
        together(8, |i| cycle(&client, &format!("warm{i}")));
        let held = client.acquire("held", TTL).unwrap().acquired().unwrap();
        assert!(sessions(&mut server.client(), &app) >= 1);
        server.restart(how);
        let found = together(8, |i| match i {
            0 => client.is_locked("held").unwrap(),
            1 => client.lookup(Lookup::Key("held")).unwrap().is_some(),
            2 => client.owns(&held.lock_id).unwrap(),
            3 => {
                matches!(client.extend(&held.lock_id, TTL).unwrap(), syncguard::ExtendResult::Extended { .. })
            }
            4 => cycle(&client, "one message") == round,
            5 => cycle(&tokens, "two messages") == round,
            6 => client.acquire("held", TTL).unwrap() == AcquireResult::Locked,
            _ => client.lock("locked").unwrap().release().unwrap() == ReleaseResult::Released,
        });
        assert_eq!(found, [true; 8], "{how:?}");
        client.release(&held.lock_id).unwrap();
    }
}

#[test]
fn idle_connections_that_an_operator_ends_are_replaced_silently() {
    let schema = crate::support::schema();
    let app = app(&schema);
    let client = connect(PgLockClient::builder(), &named(&schema.url(), &app));
    let mut observer = schema.client();
    let terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1";
    for n in 1..=5 {
        together(4, |i| cycle(&client, &format!("warm{i}")));
        observer.query(terminate, &[&app]).unwrap();
        wait_until(LIMIT, "they have ended", || sessions(&mut observer, &app) == 0);
        assert_eq!(cycle(&client, "k"), n);
        assert!(!client.is_locked("k").unwrap());
        let guard = client.lock_with("guarded", &renewing_often()).unwrap();
        observer.query(terminate, &[&app]).unwrap();
        assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    }
}

type CallersPool = r2d2::Pool<PostgresConnectionManager<NoTls>>;

fn callers_pool(schema: &TestSchema, app: &str, size: u32) -> CallersPool {
    let config = named(&schema.url(), app).parse().unwrap();
    r2d2::Pool::builder()
        .max_size(size)
        .min_idle(Some(0))
        .test_on_check_out(false)
        .build(PostgresConnectionManager::new(config, NoTls))
        .unwrap()
}

#[test]
fn everything_works_on_a_callers_pool() {
    let schema = crate::support::schema();
    let app = app(&schema);
    let pool = callers_pool(&schema, &app, 3);
    let client = PgLockClient::builder().build(pool.clone()).unwrap();
    let tokens = client.cancellable(&syncguard::CancelToken::new());
    let mut observer = schema.client();
    assert_eq!((cycle(&client, "k"), cycle(&tokens, "k")), (1, 2));
    let guard = client.lock_with("guarded", &renewing_often()).unwrap();
    assert!(client.try_lock("guarded").unwrap().is_none() && client.is_locked("guarded").unwrap());
    renewed(&mut observer, &guard);
    // One connection is kept for renewals, so the caller has two left, also while all others are out.
    let (first, second) = (pool.get().unwrap(), pool.get().unwrap());
    assert!(pool.get_timeout(ms(100)).is_err());
    renewed(&mut observer, &guard);
    drop((first, second));
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    assert!(client.close(LIMIT).unwrap().is_clean());
    let all: Vec<_> = (0..3).map(|_| pool.get().unwrap()).collect();
    assert_eq!(all.len(), 3, "closing gives the kept one back");
    for mut connection in all {
        let sql = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'";
        assert_eq!(connection.query_one(sql, &[]).unwrap().get::<_, i64>(0), 0);
    }
}

#[track_caller]
fn renewed(observer: &mut Client, guard: &LockGuard) {
    let before = row(observer, guard.key()).unwrap().expires_at_ms;
    wait_until(LIMIT, "it is renewed", || row(observer, guard.key()).unwrap().expires_at_ms > before);
}

#[test]
fn a_callers_pool_of_one_needs_a_connection_for_renewals() {
    let schema = crate::support::schema();
    let app = app(&schema);
    let pool = callers_pool(&schema, &app, 1);
    let alone = PgLockClient::builder().build(pool.clone()).unwrap();
    let no_renewal = LockOptions::new().heartbeat(Heartbeat::Off);
    for error in [
        alone.lock("k").unwrap_err(),
        alone.try_lock("k").unwrap_err(),
        alone.with_lock("k", &LockOptions::new(), |_| ()).unwrap_err(),
    ] {
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
        assert!(error.to_string().contains("maintenance()"), "{error}");
    }
    assert_eq!(row(&mut schema.client(), "k"), None);
    assert_eq!(cycle(&alone, "k"), 1, "what needs no renewal works");
    assert!(alone.lock_with("k", &no_renewal).unwrap().is_held());
    let config = named(&schema.url(), &app).parse().unwrap();
    let helped = PgLockClient::builder().maintenance(config, NoTls).build(pool.clone()).unwrap();
    let guard = helped.lock_with("k", &renewing_often()).unwrap();
    let taken = pool.get().unwrap();
    renewed(&mut schema.client(), &guard);
    drop(taken);
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
}

#[test]
fn a_callers_connection_in_doubt_does_not_go_back() {
    let schema = crate::support::schema();
    let app = app(&schema);
    let pool = callers_pool(&schema, &app, 2);
    let client = PgLockClient::builder().operation_timeout(LONG).build(pool.clone()).unwrap();
    let mut observer = schema.client();
    cycle(&client, "warm");
    let key = own_key(&schema);
    let mut blocker = block(&schema, &key);
    let token = syncguard::CancelToken::new();
    thread::scope(|scope| {
        let acquiring = scope.spawn(|| client.cancellable(&token).acquire(&key, TTL));
        let pid = wait_until_app_waits(&mut observer, &app);
        token.cancel();
        assert_eq!(acquiring.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
        crate::support::wait_until_backend_gone(&mut observer, pid);
    });
    blocker.batch_execute("ROLLBACK").unwrap();
    assert_eq!(cycle(&client, &key), 1);
    let mut connection = pool.get().unwrap();
    let state = connection.query_one("SELECT txid_current_if_assigned() IS NULL", &[]).unwrap();
    assert!(state.get::<_, bool>(0));
}

#[test]
fn a_callers_connection_is_bounded_from_its_first_message_on() {
    // Our deadline does not reach a connection that is not ours: the server has to end the wait.
    let schema = crate::support::schema();
    let patient = leases::client(&schema);
    let (app, key) = (app(&schema), own_key(&schema));
    let mut other = schema.client();
    for (round, sql) in
        ["LOCK TABLE syncguard_locks", "LOCK TABLE syncguard_fence_counters"].iter().enumerate()
    {
        other.batch_execute(&format!("BEGIN; {sql}")).unwrap();
        // On a busy machine an answer may come too late: then another pool begins anew.
        let client = (0..5).find_map(|_| {
            let pool = callers_pool(&schema, &app, 2);
            let builder = PgLockClient::builder().operation_timeout(ms(200)).auto_create_tables(false);
            // To connect is the pool's business, and may take longer than that.
            drop(pool.get().unwrap());
            let client = builder.build(pool).unwrap();
            let in_time = (0..2).all(|_| {
                let start = Instant::now();
                let error = client.acquire(&key, TTL).unwrap_err();
                assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
                assert!(start.elapsed() < ms(200) + MARGIN, "it took {:?}", start.elapsed());
                error.is_contention() && !error.is_outcome_unknown()
            });
            in_time.then_some(client)
        });
        let client = client.expect("the server ended the waits in time");
        other.batch_execute("ROLLBACK").unwrap();
        wait_until(LIMIT, "the client works again", || client.is_locked(&key).is_ok());
        assert_eq!(cycle(&patient, &key), u64::try_from(round).unwrap() + 1);
    }
}

#[test]
fn several_clients_share_one_pool() {
    let schema = crate::support::schema();
    let app = app(&schema);
    let pool = callers_pool(&schema, &app, 5);
    let other_tables =
        || PgLockClient::builder().table_name("other_locks").fence_table_name("other_counters");
    let clients = [
        PgLockClient::builder().build(pool.clone()).unwrap(),
        PgLockClient::builder().build(pool.clone()).unwrap(),
        other_tables().build(pool.clone()).unwrap(),
    ];
    let guards: Vec<_> =
        clients.iter().map(|client| client.try_lock_with("k", &renewing_often()).unwrap()).collect();
    let held: Vec<_> = guards.iter().map(Option::is_some).collect();
    assert_eq!(held, [true, false, true], "one for each pair of tables");
    let fences = together(12, |i| {
        (cycle(&clients[i % 3], &format!("k{i}")), cycle(&clients[i % 3], &format!("k{i}")))
    });
    assert!(fences.iter().all(|fences| *fences == (1, 2)), "{fences:?}");
    renewed(&mut schema.client(), guards[0].as_ref().unwrap());
    assert!(sessions(&mut schema.client(), &app) <= 5);
}

#[test]
fn clients_with_different_tables_on_one_pool_keep_their_prepared_statements() {
    let schema = crate::support::schema();
    let app = app(&schema);
    let pool = callers_pool(&schema, &app, 1);
    let tables = |name: &str| {
        PgLockClient::builder()
            .table_name(format!("{name}_locks"))
            .fence_table_name(format!("{name}_counters"))
    };
    let clients = ["a", "b"].map(|name| tables(name).build(pool.clone()).unwrap());
    for round in 1..=3 {
        assert_eq!(clients.each_ref().map(|client| cycle(client, "k")), [round, round]);
    }
    // Otherwise the second client's statements are written out each time, and so are the first one's.
    let prepared = "SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'sg\\_acquire\\_absent%'";
    let found: i64 = pool.get().unwrap().query_one(prepared, &[]).unwrap().get(0);
    assert_eq!(found, 2, "one for each pair of tables");
}

/// Calls with a bound of minutes, and says how the call failed, if it did so at once.
#[track_caller]
fn refused_at_once(url: &str) -> LockError {
    let start = Instant::now();
    let builder = || PgLockClient::builder().operation_timeout(LONG).connection_timeout(LONG);
    let at_building = builder().connect(url).expect_err("it is refused");
    let client = connect(builder().auto_create_tables(false), url);
    let at_use = client.lock("k").expect_err("it is refused");
    assert_eq!(at_building.code(), at_use.code(), "{at_building:?} and {at_use:?}");
    assert_eq!(client.acquire("k", TTL).unwrap_err().code(), at_use.code());
    assert!(start.elapsed() < LONG / 4, "it took {:?}", start.elapsed());
    at_use
}

#[test]
fn a_connection_that_is_refused_says_so_at_once_with_its_sqlstate() {
    let server = Server::start(&Config::new());
    let mut admin = server.client();
    admin
        .batch_execute(
            "SET password_encryption = 'scram-sha-256'; CREATE ROLE guarded LOGIN PASSWORD 'right'; \
             CREATE ROLE crowded LOGIN CONNECTION LIMIT 1; CREATE ROLE outsider NOLOGIN",
        )
        .unwrap();
    let rules = server.data_dir().join("pg_hba.conf");
    let old = std::fs::read_to_string(&rules).unwrap();
    std::fs::write(&rules, format!("host all guarded 127.0.0.1/32 scram-sha-256\n{old}")).unwrap();
    server.configure("log_connections", "on");
    let port = server.port();
    let url = |who: &str, database: &str| format!("postgresql://{who}@127.0.0.1:{port}/{database}");

    let error = refused_at_once(&url("guarded:wrong", "postgres"));
    assert_eq!(error.code(), ErrorCode::AuthFailed);
    assert!(error.to_string().contains("28P01"), "{error}");
    let error = refused_at_once(&url("outsider", "postgres"));
    assert_eq!(error.code(), ErrorCode::AuthFailed);
    assert!(error.to_string().contains("28000"), "{error}");
    let error = refused_at_once(&url("postgres", "nowhere"));
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    assert!(error.to_string().contains("3D000"), "{error}");
    let _only = Client::connect(&url("crowded", "postgres"), NoTls).unwrap();
    let error = refused_at_once(&url("crowded", "postgres"));
    assert_eq!(error.code(), ErrorCode::RateLimited);
    assert!(error.to_string().contains("53300"), "{error}");
    server.stop(Stop::Fast);
    assert_eq!(refused_at_once(&url("postgres", "postgres")).code(), ErrorCode::ServiceUnavailable);
}

type Call<'a> = Box<dyn Fn() -> syncguard::Result<()> + 'a>;

#[test]
fn a_server_that_takes_connections_and_says_nothing_delays_each_call_by_its_bound() {
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("postgresql://postgres@{}/postgres", mute.local_addr().unwrap());
    let bound = ms(250);
    let builder =
        || PgLockClient::builder().operation_timeout(bound).dispose_timeout(bound).connection_timeout(LONG);
    let client = connect(builder().auto_create_tables(false), &url);
    let id = leases::forged_id(0);
    let brief = LockOptions::new().timeout(bound / 2);
    let calls: [(&str, Duration, Call<'_>); 9] = [
        ("acquire", bound, Box::new(|| client.acquire("k", TTL).map(drop))),
        ("release", bound, Box::new(|| client.release(&id).map(drop))),
        ("extend", bound, Box::new(|| client.extend(&id, TTL).map(drop))),
        ("is_locked", bound, Box::new(|| client.is_locked("k").map(drop))),
        ("lookup", bound, Box::new(|| client.owns(&id).map(drop))),
        ("try_lock", bound, Box::new(|| client.try_lock("k").map(drop))),
        ("lock", bound, Box::new(|| client.lock("k").map(drop))),
        ("a brief lock", bound / 2, Box::new(|| client.lock_with("k", &brief).map(drop))),
        ("connect", bound * 6, Box::new(|| builder().connect(&url).map(drop))),
    ];
    for (what, bound, call) in calls {
        let start = Instant::now();
        let error = call().expect_err(what);
        let took = start.elapsed();
        assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{what}: {error:?}");
        assert!(!error.is_outcome_unknown(), "{what}: nothing was sent");
        assert!((bound..bound + MARGIN).contains(&took), "{what} took {took:?}");
    }
}

#[test]
fn a_frozen_server_delays_each_call_by_its_bound_and_is_used_again() {
    let server = Server::start(&Config::new());
    let schema = server.schema();
    let bound = ms(300);
    let patient = leases::client(&schema);
    let held = patient.acquire("held", TTL).unwrap().acquired().unwrap();
    let builder = PgLockClient::builder().operation_timeout(bound).auto_create_tables(false);
    let client = connect(builder, &schema.url());
    together(4, |_| wait_until(LIMIT, "it is connected", || client.is_locked("held").is_ok()));
    server.freeze();
    together(5, |i| {
        let start = Instant::now();
        let error = match i {
            0 => client.is_locked("held").map(drop),
            1 => client.extend(&held.lock_id, TTL).map(drop),
            2 => client.acquire("k", TTL).map(drop),
            3 => client.try_lock("k").map(drop),
            _ => client.cancellable(&syncguard::CancelToken::new()).acquire("k", TTL).map(drop),
        }
        .unwrap_err();
        assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{i}: {error:?}");
        assert!(start.elapsed() < bound + MARGIN, "{i} took {:?}", start.elapsed());
    });
    server.thaw();
    wait_until(LIMIT, "the server answers again", || client.is_locked("held").is_ok_and(|locked| locked));
    assert_eq!(patient.release(&held.lock_id).unwrap(), ReleaseResult::Released);
    // Whatever the lost answers were: what they took is let go again.
    wait_until(LIMIT, "the key is free", || patient.try_lock("k").unwrap().is_some());
}
