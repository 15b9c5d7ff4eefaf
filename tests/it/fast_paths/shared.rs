//! Sessions in which others do as they like between two calls: an application on its own pool, a pooler,
//! whoever has a session of ours forget what it has prepared.

use syncguard::backend::{ExtendOutcome, ReleaseOutcome};
use syncguard::{AcquireResult, AdvisoryKey, CancelToken, LockBackend};

use super::*;
use crate::support::wire::Wire;

type Pool = r2d2::Pool<r2d2_postgres::PostgresConnectionManager<NoTls>>;

/// A caller's pool of so many connections, which begin with these settings.
fn pool(place: &Place, size: u32, settings: &str) -> Pool {
    let mut config = place.schema.config();
    config.options(&format!("-c search_path={} {settings}", place.schema.name()));
    let manager = r2d2_postgres::PostgresConnectionManager::new(config, NoTls);
    r2d2::Pool::builder().max_size(size).test_on_check_out(false).build(manager).unwrap()
}

/// Every call that a session of ours makes by the driver's own statements, once. The fence that it got.
fn all_calls(client: &PgLockClient, key: &str) -> u64 {
    let grant = client.acquire(key, TTL).unwrap().acquired().expect("the key is free");
    assert!(client.acquire(key, TTL).unwrap().acquired().is_none());
    assert!(client.is_locked(key).unwrap());
    assert_eq!(client.lookup(Lookup::LockId(&grant.lock_id)).unwrap().unwrap().fence, grant.fence);
    assert!(matches!(client.extend(&grant.lock_id, TTL).unwrap(), ExtendResult::Extended { .. }));
    assert_eq!(client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
    assert_eq!(client.release(&grant.lock_id).unwrap(), ReleaseResult::NotHeld);
    assert!(!client.is_locked(key).unwrap());
    grant.fence.get()
}

/// What others do to a session between two calls of ours.
const FORGETTING: [&str; 6] =
    ["", "DEALLOCATE ALL", "DISCARD ALL", "DISCARD PLANS", "RESET ALL", "DEALLOCATE ALL; DISCARD ALL"];

#[test]
fn clients_with_different_tables_share_a_pool_whose_sessions_forget_what_was_prepared() {
    let place = place();
    let pool = pool(&place, 2, "");
    let build = |locks: &str, fences: &str| {
        let builder = PgLockClient::builder().table_name(locks).fence_table_name(fences);
        builder.build(pool.clone()).unwrap()
    };
    let clients = [
        build("syncguard_locks", "syncguard_fence_counters"),
        build("other_locks", "other_counters"),
        build("other_locks", "other_counters"),
        build("Locks", "Counters"),
    ];
    let key = place.key("a");
    let mut rounds = 0;
    for sql in FORGETTING {
        // More than enough calls of every kind on each of the connections.
        for _ in 0..OFTEN {
            rounds += 1;
            for (n, client) in clients.iter().enumerate() {
                let fence = all_calls(client, &key);
                let grants =
                    if n == 1 || n == 2 { 2 * rounds + u64::try_from(n).unwrap() - 2 } else { rounds };
                assert_eq!(fence, grants, "client {n}, after {sql:?}");
            }
            let mut both = [pool.get().unwrap(), pool.get().unwrap()];
            for connection in &mut both {
                let sql = format!("SELECT 1; {sql}");
                sql.split("; ").for_each(|sql| connection.batch_execute(sql).unwrap());
                // Only what has no settings of its own is prepared on connections that are not ours.
                let count =
                    "SELECT count(*) FROM pg_prepared_statements WHERE NOT from_sql AND statement LIKE $1";
                assert_eq!(connection.query_one(count, &[&"%expires_at_ms%"]).unwrap().get::<_, i64>(0), 0);
            }
        }
    }
}

/// The marker of a session of ours says that it began with our settings. On somebody else's connection
/// it says nothing: the settings are whatever the application has made of them.
#[test]
fn a_callers_session_is_never_taken_for_one_with_our_settings() {
    let place = place();
    let name = unique();
    let pool = pool(&place, 1, &format!("-c syncguard.settled_ms=1 -c application_name={name}"));
    let client =
        PgLockClient::builder().operation_timeout(Duration::from_secs(3)).build(pool.clone()).unwrap();
    let key = place.key("a");
    (0..OFTEN).for_each(|_| assert!(all_calls(&client, &key) > 0));
    place.stored.write(&key, &id("mine"), 30_000, 1);
    let mut busy = transaction(&place, "SELECT FROM syncguard_locks FOR UPDATE");
    pool.get().unwrap().batch_execute("SET lock_timeout = 0; SET statement_timeout = 0").unwrap();
    let call = {
        let client = client.clone();
        Call::start(&name, move || client.extend(&id("mine"), TTL))
    };
    call.wait_until_blocked(&place.stored);
    // The server's limit ends it; if it were not stated, the call would wait for the end of the lock.
    wait_until(LIMIT, "the wait has ended", || waiting(&place, &name).is_empty());
    let error = call.join().unwrap_err();
    assert_eq!(error.sqlstate(), Some("55P03"), "{error:?}");
    busy.batch_execute("ROLLBACK").unwrap();
}

#[test]
fn sessions_of_ours_that_are_made_to_forget_are_called_by_the_driver_again() {
    let place = place();
    let wire = Wire::to(crate::support::server().port());
    let wire_port: u16 = wire.url().rsplit_once(':').unwrap().1.split('/').next().unwrap().parse().unwrap();
    let proxy = Proxy::start(wire_port);
    let client = PgLockClient::builder()
        .schema(place.schema.name())
        .max_connections(1)
        .operation_timeout(CALL)
        .connect(&proxy.url(&wire.url()))
        .unwrap();
    let key = place.key("a");
    let mut fence = 0;
    for sql in FORGETTING.into_iter().flat_map(|sql| sql.split("; ")) {
        for _ in 0..OFTEN {
            fence += 1;
            assert_eq!(all_calls(&client, &key), fence, "before {sql:?}");
        }
        let bound = proxy.bound();
        fence += 1;
        assert_eq!(all_calls(&client, &key), fence);
        assert!(proxy.bound() >= bound + 8, "all of them are called by the driver's statements: {sql:?}");
        // Once, and often enough that statements vanish under each of the calls.
        for _ in 0..8 {
            if !sql.is_empty() {
                wire.speak(sql);
            }
            fence += 1;
            assert_eq!(all_calls(&client, &key), fence, "after {sql:?}");
        }
    }
}

/// An application forgets to end a transaction, and gives the connection back to its pool. What we would
/// write on it would be committed when it likes, or never; and our COMMIT would be its own.
#[test]
fn a_transaction_that_was_left_open_on_a_callers_connection_does_not_become_ours() {
    let place = place();
    let pool = pool(&place, 1, "");
    let client = PgLockClient::builder().build(pool.clone()).unwrap();
    let key = place.key("a");
    place.stored.run("CREATE TABLE work (what text)");
    let tokens = [CancelToken::never(), CancelToken::new()];
    for left in [
        "BEGIN",
        "BEGIN; INSERT INTO work VALUES ('unfinished')",
        "BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT count(*) FROM work",
        "BEGIN READ ONLY; SELECT count(*) FROM work",
        "BEGIN; SELECT 1 / 0",
    ] {
        let leave = || drop(pool.get().unwrap().batch_execute(left));
        for (form, token) in tokens.iter().enumerate() {
            let what = format!("{left}, form {form}");
            all_calls(&client, &key);
            leave();
            let grant = LockBackend::acquire(&client, &key, TTL, token).unwrap().acquired();
            let grant = grant.unwrap_or_else(|| panic!("{what}: the key is free"));
            let row = place.stored.row(&key).unwrap_or_else(|| panic!("{what}: it is not committed"));
            assert_eq!(row.lock_id, grant.lock_id, "{what}");
            leave();
            assert_eq!(
                LockBackend::acquire(&client, &key, TTL, token).unwrap(),
                AcquireResult::Locked,
                "{what}"
            );
            leave();
            assert!(LockBackend::is_locked(&client, &key, token).unwrap(), "{what}");
            leave();
            let extended = LockBackend::extend(&client, &grant.lock_id, TTL * 2, token).unwrap();
            let ExtendOutcome::Extended { expires_at_ms } = extended else { panic!("{what}: it is held") };
            assert_eq!(place.stored.row(&key).unwrap().expires_at_ms, expires_at_ms, "{what}");
            leave();
            let released = LockBackend::release(&client, &grant.lock_id, token).unwrap();
            assert_eq!(released, ReleaseOutcome::Released, "{what}");
            assert_eq!(place.stored.row(&key), None, "{what}");
            assert_eq!(place.stored.one("SELECT count(*) FROM work", &[]).get::<_, i64>(0), 0, "{what}");
        }
        leave();
        let guard = client.try_advisory_lock(&AdvisoryKey::from_text(&key)).unwrap().expect("it is free");
        let state = "SELECT state FROM pg_stat_activity WHERE pid = $1";
        assert_eq!(place.stored.one(state, &[&guard.pid()]).get::<_, String>(0), "idle", "{left}");
        assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    }
    place.stored.run("DROP TABLE syncguard_locks, syncguard_fence_counters");
    pool.get().unwrap().batch_execute("BEGIN; INSERT INTO work VALUES ('unfinished')").unwrap();
    client.setup_schema().unwrap();
    assert_eq!(place.stored.row(&key), None, "the tables are there");
    assert_eq!(place.stored.one("SELECT count(*) FROM work", &[]).get::<_, i64>(0), 0);
    // What is in order is not taken for it, whatever the role's defaults are.
    let mut connection = pool.get().unwrap();
    let pid = "SELECT pg_backend_pid()";
    connection.batch_execute("SET default_transaction_isolation = 'serializable'").unwrap();
    let before: i32 = connection.query_one(pid, &[]).unwrap().get(0);
    drop(connection);
    for token in &tokens {
        let grant = LockBackend::acquire(&client, &key, TTL, token).unwrap().acquired().unwrap();
        LockBackend::release(&client, &grant.lock_id, token).unwrap();
    }
    assert_eq!(pool.get().unwrap().query_one(pid, &[]).unwrap().get::<_, i32>(0), before);
}
