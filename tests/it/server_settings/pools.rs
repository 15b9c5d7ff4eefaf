//! A caller's pool, and what its other users do to the connections.

use super::*;

type Pool = r2d2::Pool<PostgresConnectionManager<NoTls>>;

fn pool(place: &Place, size: u32) -> Pool {
    let manager = PostgresConnectionManager::new(place.schema.config(), NoTls);
    r2d2::Pool::builder().max_size(size).min_idle(Some(0)).test_on_check_out(false).build(manager).unwrap()
}

#[test]
fn a_pool_whose_connections_are_discarded_between_uses_serves() {
    let place = place();
    let pool = pool(&place, 1);
    let client = PgLockClient::builder().build(pool.clone()).unwrap();
    let key = place.key("a");
    for sql in ["DISCARD ALL", "DEALLOCATE ALL", "DISCARD PLANS", "RESET ALL", "DISCARD ALL", "DISCARD ALL"] {
        let grant = client.acquire(&key, TTL).unwrap().acquired().unwrap();
        pool.get().unwrap().batch_execute(sql).unwrap();
        assert!(client.is_locked(&key).unwrap(), "after {sql}");
        pool.get().unwrap().batch_execute(sql).unwrap();
        client.release(&grant.lock_id).unwrap();
        assert!(!client.is_locked(&key).unwrap());
    }
}

#[test]
fn a_connection_comes_back_with_the_settings_and_the_state_it_had() {
    let place = place();
    let pool = pool(&place, 1);
    let client = PgLockClient::builder().build(pool.clone()).unwrap();
    let state = |pool: &Pool| {
        let sql = "SELECT name || '=' || setting FROM pg_settings WHERE name IN ('search_path', 'lock_timeout', \
                   'statement_timeout', 'synchronous_commit', 'enable_seqscan', 'transaction_isolation', \
                   'idle_in_transaction_session_timeout', 'default_transaction_read_only') ORDER BY 1";
        let mut connection = pool.get().unwrap();
        let rows = connection.query(sql, &[]).unwrap();
        let locks = connection.query_one(
            "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'",
            &[],
        );
        (rows.iter().map(|row| row.get(0)).collect::<Vec<String>>(), locks.unwrap().get::<_, i64>(0))
    };
    let before = state(&pool);
    let key = place.key("a");
    for two in FORMS {
        let grant = LockBackend::acquire(&client, &key, TTL, &token(two)).unwrap().acquired().unwrap();
        assert_eq!(state(&pool), before, "after acquire");
        assert_eq!(LockBackend::acquire(&client, &key, TTL, &token(two)).unwrap(), AcquireResult::Locked);
        assert_eq!(state(&pool), before, "after contention");
        LockBackend::extend(&client, &grant.lock_id, TTL, &token(two)).unwrap();
        LockBackend::release(&client, &grant.lock_id, &token(two)).unwrap();
        assert_eq!(state(&pool), before, "after release");
        assert!(client.operator().cleanup_expired(1).is_ok());
        assert_eq!(state(&pool), before, "after cleanup");
    }
}

#[test]
fn clients_with_different_tables_share_a_pool() {
    let place = place();
    let pool = pool(&place, 2);
    let named = |locks: &str, fences: &str| {
        let builder: PgLockClientBuilder = PgLockClient::builder().table_name(locks).fence_table_name(fences);
        builder.build(pool.clone()).unwrap()
    };
    let clients = [named("a_locks", "a_fences"), named("b_locks", "b_fences"), named("A_LOCKS", "A_FENCES")];
    let key = place.key("a");
    let held: Vec<_> =
        clients.iter().map(|client| client.acquire(&key, TTL).unwrap().acquired().unwrap()).collect();
    assert!(held.iter().all(|grant| grant.fence.get() == 1));
    for (client, grant) in clients.iter().zip(&held) {
        for (other, theirs) in clients.iter().zip(&held) {
            assert_eq!(other.owns(&grant.lock_id).unwrap(), grant.lock_id == theirs.lock_id);
        }
        client.release(&grant.lock_id).unwrap();
        assert!(!client.is_locked(&key).unwrap());
    }
}

#[test]
fn tables_that_are_dropped_and_made_anew_are_used_again() {
    let place = place();
    let client = place.client.clone();
    let key = place.key("a");
    for change in [
        "DROP TABLE syncguard_locks",
        "DROP TABLE syncguard_locks, syncguard_fence_counters",
        "ALTER TABLE syncguard_locks ADD COLUMN extra text DEFAULT 'x'",
        "ALTER TABLE syncguard_locks ALTER COLUMN user_key TYPE varchar(600)",
        "ALTER TABLE syncguard_locks ALTER COLUMN user_key TYPE text",
        "DROP INDEX idx_syncguard_locks_expires",
    ] {
        // Often enough that the server keeps a plan.
        for two in [false, false, false, false, false, false, false, true] {
            let grant = LockBackend::acquire(&client, &key, TTL, &token(two)).unwrap().acquired().unwrap();
            LockBackend::extend(&client, &grant.lock_id, TTL, &token(two)).unwrap();
            LockBackend::release(&client, &grant.lock_id, &token(two)).unwrap();
        }
        place.stored.run(change);
        if change.starts_with("DROP TABLE") {
            let error = client.acquire(&key, TTL).unwrap_err();
            assert_eq!(error.code(), syncguard::ErrorCode::InvalidArgument, "{error:?}");
            assert!(error.to_string().contains("setup_schema"), "{error}");
        }
        client.setup_schema().unwrap();
        works_alone(&client, &place, &key, change);
    }
}

#[test]
fn a_plan_from_when_the_table_was_tiny_does_not_become_a_sequential_scan() {
    let place = place();
    place.stored.run(
        "ALTER TABLE syncguard_locks SET (autovacuum_enabled = false); \
         ALTER TABLE syncguard_fence_counters SET (autovacuum_enabled = false)",
    );
    let grant = place.hold(&place.key("first"));
    place.stored.run("VACUUM ANALYZE syncguard_locks");
    place.stored.run("VACUUM ANALYZE syncguard_fence_counters");
    let name = unique();
    let mut config = place.schema.config();
    config.application_name(&name);
    let clients = [false, true]
        .map(|pool| client(PgLockClient::builder().max_connections(1), config.clone(), pool).unwrap());
    let round = |key: &str| {
        for (client, two) in clients.iter().flat_map(|client| FORMS.map(|two| (client, two))) {
            let token = token(two);
            let held = LockBackend::acquire(client, key, TTL, &token).unwrap().acquired().unwrap();
            assert_eq!(LockBackend::acquire(client, key, TTL, &token).unwrap(), AcquireResult::Locked);
            assert!(LockBackend::is_locked(client, key, &token).unwrap());
            LockBackend::lookup(client, Lookup::Key(key), &token).unwrap().unwrap();
            LockBackend::lookup(client, Lookup::LockId(&held.lock_id), &token).unwrap().unwrap();
            LockBackend::extend(client, &held.lock_id, TTL, &token).unwrap();
            let deadline = syncguard::backend::Clock::system().now().after(LIMIT);
            let renewal =
                syncguard::backend::Renewal::new(key, &held.lock_id, syncguard::Fence::new(1).unwrap(), TTL);
            client.renew(&[renewal], deadline).remove(0).unwrap();
            LockBackend::release(client, &held.lock_id, &token).unwrap();
        }
    };
    // Until the server has settled for plans that do not depend on the parameters.
    (0..7).for_each(|_| round(&place.key("a")));
    place.stored.run(
        "INSERT INTO syncguard_locks SELECT 'k' || n, lpad(n::text, 22, 'x'), 1, 1, '000000000000001', 'k' || n FROM generate_series(1, 100000) n; \
         INSERT INTO syncguard_fence_counters SELECT 'fence:k' || n, 1 FROM generate_series(1, 100000) n",
    );
    round(&place.key("b"));
    // A session's counts are complete when it has ended.
    drop(clients);
    let mut observer = place.schema.client();
    let mut counted = |column: &str| -> i64 {
        let sql = format!(
            "SELECT coalesce(sum({column}), 0)::int8 FROM pg_stat_user_tables \
             WHERE schemaname = $1 AND NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $2)"
        );
        observer.query_one(&sql, &[&place.schema.name(), &name]).unwrap().get(0)
    };
    wait_until(LIMIT, "the client's sessions have ended and been counted", || counted("idx_scan") > 200);
    assert!(counted("seq_tup_read") < 100_000, "somebody read a whole table");
    drop(grant);
}

#[test]
fn a_table_that_a_migration_has_locked_costs_no_more_than_the_calls_own_time() {
    let place = place();
    let key = place.key("a");
    let clients = || {
        let builder =
            PgLockClient::builder().auto_create_tables(false).operation_timeout(Duration::from_millis(300));
        builder.build(pool(&place, 1)).unwrap()
    };
    let (warm, cold) = (clients(), clients());
    let patient = PgLockClient::builder().build(pool(&place, 2)).unwrap();
    patient.is_locked(&key).unwrap();
    let warmed = warm.is_locked(&key);
    let mut migration = place.schema.client();
    // If nothing else ends the wait, this does, and the test fails instead of hanging.
    migration
        .batch_execute("SET idle_in_transaction_session_timeout = '20s'; BEGIN; LOCK TABLE syncguard_locks IN ACCESS EXCLUSIVE MODE")
        .unwrap();
    let start = std::time::Instant::now();
    for client in [&warm, &cold] {
        for two in FORMS {
            let error = LockBackend::acquire(client, &key, TTL, &token(two)).unwrap_err();
            assert_eq!(error.code(), syncguard::ErrorCode::NetworkTimeout, "{warmed:?}: {error:?}");
            assert_eq!(client.is_locked(&key).unwrap_err().code(), syncguard::ErrorCode::NetworkTimeout);
        }
    }
    assert!(start.elapsed() < Duration::from_secs(15));
    migration.batch_execute("ROLLBACK").unwrap();
    works_alone(&patient, &place, &key, "afterwards");
}

#[test]
fn a_client_that_is_dropped_leaves_the_pool_as_it_was() {
    let place = place();
    let pool = pool(&place, 2);
    for round in 0..5 {
        let client = PgLockClient::builder().build(pool.clone()).unwrap();
        let guard = client.lock(&place.key("a")).unwrap();
        // With a renewed guard one connection is the client's.
        let one = pool.get().unwrap();
        assert!(pool.try_get().is_none());
        drop(one);
        if round % 2 == 0 {
            guard.release().unwrap();
        } else {
            drop(guard);
        }
        drop(client);
        wait_until(LIMIT, "the pool lends all of its connections again", || {
            let (first, second) = (pool.try_get(), pool.try_get());
            first.is_some() && second.is_some()
        });
    }
}

#[test]
fn a_connection_in_doubt_is_ended_and_the_pool_opens_another() {
    let place = place();
    let key = place.key("a");
    let mut config = place.schema.config();
    let name = unique();
    config.application_name(&name);
    let manager = PostgresConnectionManager::new(config, NoTls);
    let pool = r2d2::Pool::builder().max_size(1).min_idle(Some(0)).build(manager).unwrap();
    let client = PgLockClient::builder().operation_timeout(LIMIT).build(pool.clone()).unwrap();
    let mut stalled = place.schema.client();
    stalled.batch_execute(&format!("BEGIN; SELECT pg_advisory_xact_lock(hashtext('{key}'))")).unwrap();
    let pid = |pool: &Pool| -> i32 {
        pool.get().unwrap().query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0)
    };
    let before = pid(&pool);
    let token = CancelToken::new();
    let call = {
        let (client, key) = (client.cancellable(&token), key.clone());
        Call::start(&name, move || client.acquire(&key, TTL))
    };
    call.wait_until_blocked(&place.stored);
    token.cancel();
    assert_eq!(call.join().unwrap_err().code(), syncguard::ErrorCode::Aborted);
    stalled.batch_execute("COMMIT").unwrap();
    assert_ne!(pid(&pool), before, "a connection in the middle of something came back");
    assert!(client.acquire(&key, TTL).unwrap().acquired().is_some());
}
