//! The library on servers, roles and pools that are set up in ways it did not choose.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod access;
mod durable;
mod hostile;
mod pools;
mod sqlstates;

use std::time::Duration;

use crate::support::calls::{FORMS, token};
use crate::support::{Call, LIMIT, Place, Role, TTL, place, unique, wait_until};
use postgres::{Config, NoTls};
use r2d2_postgres::PostgresConnectionManager;
use syncguard::backend::{ExtendOutcome, ReleaseOutcome};
use syncguard::{
    AcquireResult, CancelToken, LockBackend, LockOptions, Lookup, PgLockClient, PgLockClientBuilder, Result,
};

/// A client with sessions of its own, or on a caller's pool.
fn client(builder: PgLockClientBuilder, config: Config, on_a_pool: bool) -> Result<PgLockClient> {
    if !on_a_pool {
        return builder.connect_with(config, NoTls);
    }
    let manager = PostgresConnectionManager::new(config, NoTls);
    let pool = r2d2::Pool::builder().max_size(2).min_idle(Some(0)).test_on_check_out(false);
    builder.build(pool.build(manager).unwrap())
}

/// Every operation once, in both forms, with the answers that they must give.
fn works(client: &PgLockClient, place: &Place, key: &str, what: &str) {
    for two in FORMS {
        let token = token(two);
        let before = place.stored.now_ms();
        let grant = LockBackend::acquire(client, key, TTL, &token)
            .unwrap_or_else(|error| panic!("{what}: {error:?}"));
        let grant = grant.acquired().unwrap_or_else(|| panic!("{what}: a free key was refused"));
        assert!((before + 30_000..=place.stored.now_ms() + 30_000).contains(&grant.expires_at_ms), "{what}");
        assert_eq!(place.stored.row(key).unwrap().user_key, key, "{what}");
        assert_eq!(LockBackend::acquire(client, key, TTL, &token).unwrap(), AcquireResult::Locked, "{what}");
        assert!(LockBackend::is_locked(client, key, &token).unwrap(), "{what}");
        let found = LockBackend::lookup(client, Lookup::LockId(&grant.lock_id), &token).unwrap();
        assert_eq!(found.unwrap().fence, grant.fence, "{what}");
        let extended = LockBackend::extend(client, &grant.lock_id, TTL * 2, &token).unwrap();
        assert!(matches!(extended, ExtendOutcome::Extended { .. }), "{what}");
        let released = LockBackend::release(client, &grant.lock_id, &token).unwrap();
        assert_eq!(released, ReleaseOutcome::Released, "{what}");
    }
    let guard = client.lock(key).unwrap();
    assert!(guard.is_held() && guard.fence().get() >= 3, "{what}");
    drop(guard);
    assert_eq!(client.operator().counts().unwrap().live, 0, "{what}");
    assert_eq!(client.operator().cleanup_expired(10).unwrap(), 0, "{what}");
}

#[test]
fn defaults_of_the_role_change_nothing() {
    let settings = [
        ("default_transaction_isolation", "serializable"),
        ("default_transaction_isolation", "'repeatable read'"),
        ("default_transaction_read_only", "on"),
        ("default_transaction_deferrable", "on"),
        ("timezone", "'Asia/Kathmandu'"),
        ("timezone", "'<odd>-13:17'"),
        ("datestyle", "'SQL, DMY'"),
        ("intervalstyle", "sql_standard"),
        ("extra_float_digits", "'-15'"),
        ("standard_conforming_strings", "off"),
        ("backslash_quote", "off"),
        ("lc_messages", "'C.UTF-8'"),
        ("search_path", "''"),
        ("search_path", "pg_temp"),
        ("synchronous_commit", "off"),
        ("synchronous_commit", "local"),
        ("idle_in_transaction_session_timeout", "10"),
        ("client_min_messages", "debug1"),
        ("plan_cache_mode", "force_custom_plan"),
        ("plan_cache_mode", "force_generic_plan"),
        ("enable_indexscan", "off"),
        ("commit_delay", "1000"),
        ("row_security", "off"),
        ("transform_null_equals", "on"),
    ];
    let place = place();
    let stored = &place.stored;
    // Every change of a row notes the level that it ran at, and whether its statement is planned anew each time.
    stored.run(
        "CREATE TABLE levels (level text); \
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           EXECUTE format('INSERT INTO %I.levels VALUES (concat_ws('' '', \
             current_setting(''transaction_isolation''), current_setting(''plan_cache_mode'')))', \
             TG_TABLE_SCHEMA); RETURN NULL; END $$; \
         CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON syncguard_locks \
           FOR EACH STATEMENT EXECUTE FUNCTION note()",
    );
    // Before the threads: two grants on one schema at the same time fail each other in the server.
    let roles = [(); 2].map(|()| Role::new(&place.schema));
    for role in &roles {
        stored.run(&format!("GRANT ALL ON ALL TABLES IN SCHEMA {} TO {}", place.schema.name(), role.name()));
    }
    crate::support::together(2, |n| {
        let role = &roles[n];
        for (setting, value) in settings.iter().skip(n).step_by(2) {
            role.set(&place.schema, setting, value);
            // A search path in the connection's options would win over the role's.
            for pool in [false, true] {
                let what = format!("{setting} = {value}, a caller's pool: {pool}");
                let builder = PgLockClient::builder().schema(place.schema.name());
                let client = client(builder, role.config_with_own_path(), pool);
                let client = client.unwrap_or_else(|error| panic!("{what}: {error:?}"));
                // The key would end the string, or the backslash would be lost, if it were not quoted well.
                let key = place.key(&format!("it's \\'; {n}"));
                works_alone(&client, &place, &key, &what);
            }
            stored.run(&format!("ALTER ROLE {} RESET ALL", role.name()));
        }
    });
    let sql = "SELECT array_agg(DISTINCT level) FROM levels";
    assert_eq!(stored.one(sql, &[]).get::<_, Vec<String>>(0), ["read committed force_generic_plan"]);
}

/// [`works`] without its counts, for a place that is shared.
fn works_alone(client: &PgLockClient, place: &Place, key: &str, what: &str) {
    for two in FORMS {
        let token = token(two);
        let grant = LockBackend::acquire(client, key, TTL, &token)
            .unwrap_or_else(|error| panic!("{what}: {error:?}"));
        let grant = grant.acquired().unwrap_or_else(|| panic!("{what}: a free key was refused"));
        let row = place.stored.row(key).unwrap_or_else(|| panic!("{what}: the row has another key"));
        assert_eq!(grant.expires_at_ms - row.acquired_at_ms, 30_000, "{what}");
        assert!((place.stored.now_ms() - row.acquired_at_ms).abs() < 20_000, "{what}: another time");
        assert_eq!(LockBackend::acquire(client, key, TTL, &token).unwrap(), AcquireResult::Locked, "{what}");
        let found = LockBackend::lookup(client, Lookup::Key(key), &token).unwrap();
        assert_eq!(found.unwrap().fence, grant.fence, "{what}");
        let extended = LockBackend::extend(client, &grant.lock_id, TTL * 2, &token).unwrap();
        assert!(matches!(extended, ExtendOutcome::Extended { .. }), "{what}");
        let released = LockBackend::release(client, &grant.lock_id, &token).unwrap();
        assert_eq!(released, ReleaseOutcome::Released, "{what}");
    }
    drop(client.lock(key).unwrap());
}

#[test]
fn time_limits_of_the_role_do_not_cut_a_wait_short() {
    let place = place();
    let key = place.key("a");
    let role = Role::with_tables(&place.schema);
    for (setting, value) in [("statement_timeout", "1000"), ("lock_timeout", "1")] {
        role.set(&place.schema, setting, value);
    }
    let mut stalled = place.schema.client();
    stalled.batch_execute(&format!("BEGIN; SELECT pg_advisory_xact_lock(hashtext('{key}'))")).unwrap();
    let calls: Vec<_> = FORMS
        .into_iter()
        .map(|two| {
            let (name, key) = (unique(), key.clone());
            let mut config = role.config();
            config.application_name(&name);
            let client = PgLockClient::builder()
                .operation_timeout(LIMIT)
                .connect_with(config, postgres::NoTls)
                .unwrap();
            Call::start(&name, move || {
                let grant = LockBackend::acquire(&client, &key, TTL, &token(two))?.acquired();
                grant.map_or(Ok(ReleaseOutcome::NotHeld(None)), |grant| {
                    LockBackend::release(&client, &grant.lock_id, &token(two))
                })
            })
        })
        .collect();
    for call in &calls {
        call.wait_until_blocked(&place.stored);
    }
    place.wait_for(place.stored.now_ms() + 1_300);
    for call in &calls {
        call.wait_until_blocked(&place.stored);
    }
    stalled.batch_execute("COMMIT").unwrap();
    for call in calls {
        call.join().unwrap();
    }
    assert!(place.stored.counter(&key).unwrap() >= 1);
}

#[test]
fn sessions_that_the_server_ends_for_idleness_are_replaced() {
    let place = place();
    let key = place.key("a");
    let role = Role::with_tables(&place.schema);
    if place.stored.one("SELECT current_setting('server_version_num')::int", &[]).get::<_, i32>(0) < 140_000 {
        return; // the setting came with version 14
    }
    role.set(&place.schema, "idle_session_timeout", "100");
    let client = role.connect(PgLockClient::builder()).unwrap();
    let options = LockOptions::new().ttl(Duration::from_secs(60));
    let guard = client.lock_with(&key, &options).unwrap();
    for _ in 0..2 {
        wait_until(LIMIT, "the role's sessions have ended", || {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE usename = $1";
            place.stored.one(sql, &[&role.name()]).get::<_, i64>(0) == 0
        });
        let _ = guard.extend(TTL).unwrap();
    }
    guard.release().unwrap();
}
