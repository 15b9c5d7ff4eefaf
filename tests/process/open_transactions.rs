//! A connection of a caller's pool may come with a transaction that other code has left open. What is
//! done within it may be rolled back, or be judged by an old snapshot: nothing is.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use crate::support::session_locks::key;
use crate::support::{Config, LIMIT, Place, Server, TTL, TestSchema, logs, place, wait_until};
use postgres::{Client, NoTls};
use r2d2_postgres::PostgresConnectionManager;
use syncguard::{CancelToken, ErrorCode, ExtendResult, Heartbeat, LockOptions, PgLockClient, ReleaseResult};

type Pool = r2d2::Pool<PostgresConnectionManager<NoTls>>;

const BEGINS: [&str; 5] = [
    "BEGIN",
    "BEGIN; SELECT 1",
    "BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT 1",
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT count(*) FROM syncguard_locks",
    "BEGIN; SELECT 1/0",
];

fn pool(schema: &TestSchema, max: u32) -> Pool {
    let manager = PostgresConnectionManager::new(schema.config(), NoTls);
    r2d2::Pool::builder().max_size(max).test_on_check_out(false).build(manager).unwrap()
}

/// Leaves a transaction open on the pool's one connection; the server process.
fn leave_open(pool: &Pool, begin: &str) -> i32 {
    let mut connection = pool.get().unwrap();
    let pid = connection.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0);
    let _ = connection.batch_execute(begin);
    pid
}

#[test]
fn what_is_granted_is_committed_and_what_is_read_is_as_it_is_now() {
    let _alone = crate::support::alone();
    let place = place();
    let pool = pool(&place.schema, 1);
    let client = PgLockClient::builder().build(pool.clone()).unwrap();
    let token = CancelToken::new();
    drop(client.acquire("warm", TTL).unwrap());
    for (form, client) in [("one", client.clone()), ("two", client.cancellable(&token))] {
        for (n, begin) in BEGINS.iter().enumerate() {
            let key = place.key(&format!("{form}-{n}"));
            leave_open(&pool, begin);
            let grant = client.acquire(&key, TTL).unwrap().acquired().expect("nobody has it");
            assert!(place.client.is_locked(&key).unwrap(), "{begin}: others see it");
            leave_open(&pool, begin);
            assert!(client.is_locked(&key).unwrap(), "{begin}");
            leave_open(&pool, begin);
            let ExtendResult::Extended { expires_at_ms } = client.extend(&grant.lock_id, TTL * 10).unwrap()
            else {
                panic!("{begin}: it is held")
            };
            let seen = place.client.get_by_key(&key).unwrap().unwrap();
            assert_eq!(seen.expires_at_ms, expires_at_ms, "{begin}");
            // What was left open before somebody else's release does not see it.
            leave_open(&pool, begin);
            assert_eq!(place.client.release(&grant.lock_id).unwrap(), ReleaseResult::Released, "{begin}");
            assert!(!client.is_locked(&key).unwrap(), "{begin}");
            let again = place.hold(&key);
            leave_open(&pool, begin);
            assert_eq!(client.release(&again.lock_id).unwrap(), ReleaseResult::Released, "{begin}");
            assert!(!place.client.is_locked(&key).unwrap(), "{begin}: others can have it");
        }
    }
}

#[test]
fn guards_are_renewed_and_let_go_beside_it() {
    let _alone = crate::support::alone();
    let place = place();
    let key = place.key("k");
    for begin in BEGINS {
        let pool = pool(&place.schema, 2);
        let client = PgLockClient::builder().build(pool.clone()).unwrap();
        let connections = [pool.get().unwrap(), pool.get().unwrap()];
        for mut connection in connections {
            let _ = connection.batch_execute(begin);
        }
        let options = LockOptions::new().heartbeat(Heartbeat::Every(Duration::from_millis(20)));
        let guard = client.lock_with(&key, &options).unwrap();
        let first = guard.expires_at_ms();
        wait_until(LIMIT, "it is renewed", || {
            place.client.get_by_key(&key).unwrap().is_some_and(|seen| seen.expires_at_ms > first)
        });
        // All but the one that is kept for renewals.
        let _ = pool.get().unwrap().batch_execute(begin);
        assert_eq!(guard.release().unwrap(), ReleaseResult::Released, "{begin}");
        assert!(!place.client.is_locked(&key).unwrap(), "{begin}");
    }
}

#[test]
fn session_locks_and_the_tables_are_taken_and_created_outside_of_it() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let (pool, mut observer) = (pool(&schema, 1), schema.client());
    let open = "SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND xact_start IS NOT NULL";
    for begin in ["BEGIN", "BEGIN; SELECT 1", "BEGIN; SELECT 1/0"] {
        let client = PgLockClient::builder().auto_create_tables(false).build(pool.clone()).unwrap();
        for _ in 0..2 {
            let key = key();
            let left = leave_open(&pool, begin);
            let guard = client.try_advisory_lock(&key).unwrap().expect("nobody has it");
            assert_ne!(guard.pid(), left, "{begin}");
            assert_eq!(observer.query_one(open, &[&guard.pid()]).unwrap().get::<_, i64>(0), 0, "{begin}");
            assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
        }
        leave_open(&pool, &format!("{begin}; CREATE TABLE theirs (n int)"));
        client.setup_schema().unwrap();
        let theirs = "SELECT to_regclass('theirs') IS NULL AND to_regclass('syncguard_locks') IS NOT NULL";
        assert!(observer.query_one(theirs, &[]).unwrap().get::<_, bool>(0), "{begin}");
        observer.batch_execute("DROP TABLE syncguard_locks, syncguard_fence_counters").unwrap();
    }
}

#[test]
fn it_is_said_and_where_it_does_not_end_it_is_an_error() {
    let _alone = crate::support::alone();
    let place = place();
    let mark = logs::exclusive();
    let pool = r2d2::Pool::builder()
        .max_size(1)
        .connection_customizer(Box::new(Beginner))
        .test_on_check_out(false)
        .build(PostgresConnectionManager::new(place.schema.config(), NoTls))
        .unwrap();
    // The tables are there; whoever looks for them first meets the same.
    let client = PgLockClient::builder().auto_create_tables(false).build(pool).unwrap();
    let error = client.acquire(&place.key("k"), TTL).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable);
    assert!(error.to_string().contains("open transaction"), "{error}");
    assert!(mark.at_least(log::Level::Warn).iter().any(|line| line.text.contains("open transaction")));
    assert!(!place.client.is_locked(&place.key("k")).unwrap());
}

#[test]
fn a_connection_whose_end_is_cancelled_is_ended_all_the_same() {
    let _alone = crate::support::alone();
    // As by a cancel request of our own that comes late.
    let server = Server::start(&Config::new());
    let place = Place::new(server.schema());
    let (pool, mut observer) = (pool(&place.schema, 1), server.client());
    observer
        .batch_execute(
            "CREATE SEQUENCE calls; \
             DO $$ BEGIN EXECUTE format('ALTER FUNCTION %s RENAME TO really_terminate', \
               (SELECT oid::regprocedure FROM pg_proc WHERE proname = 'pg_terminate_backend')); END $$; \
             CREATE FUNCTION pg_catalog.pg_terminate_backend(int) RETURNS boolean LANGUAGE plpgsql AS \
             $$ BEGIN IF nextval('public.calls') = 1 THEN RAISE EXCEPTION 'cancelled' USING ERRCODE = '57014'; END IF; \
                RETURN pg_catalog.really_terminate($1); END $$",
        )
        .unwrap();
    let client = PgLockClient::builder().build(pool.clone()).unwrap();
    let left = leave_open(&pool, "BEGIN");
    assert!(client.acquire(&place.key("k"), TTL).unwrap().acquired().is_some());
    crate::support::wait_until_backend_gone(&mut observer, left);
}

/// Has every connection begin a transaction.
#[derive(Debug)]
struct Beginner;

impl r2d2::CustomizeConnection<Client, postgres::Error> for Beginner {
    fn on_acquire(&self, connection: &mut Client) -> Result<(), postgres::Error> {
        connection.batch_execute("BEGIN")
    }
}
