//! What stands earlier on the search path: other people's types, and temporary tables.

use super::*;
use r2d2_postgres::PostgresConnectionManager;

#[test]
fn types_of_other_people_are_not_used_for_the_tables_nor_for_questions() {
    let schema = crate::support::schema();
    let hostile = format!("{}_types", schema.name());
    let mut admin = schema.client();
    admin.batch_execute(&format!("CREATE SCHEMA {hostile}")).unwrap();
    for name in ["text", "int8", "int4", "timestamptz", "jsonb", "oid", "name"] {
        admin.batch_execute(&format!("CREATE DOMAIN {hostile}.{name} AS pg_catalog.bool")).unwrap();
    }
    let mut config: Config = server().url().parse().unwrap();
    config.options(&format!("-c search_path={hostile},pg_catalog,{}", schema.name()));
    let client = connect(PgLockClient::builder().schema(schema.name()), config.clone()).unwrap();
    works(&client, &format!("key {hostile}"), "hostile types");
    let sql = "SELECT count(*) FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid \
               JOIN pg_type t ON t.oid = a.atttypid WHERE c.relnamespace = $1::text::regnamespace \
               AND a.attnum > 0 AND t.typnamespace <> 'pg_catalog'::regnamespace";
    assert_eq!(admin.query_one(sql, &[&schema.name()]).unwrap().get::<_, i64>(0), 0);

    // Session locks and what is seen of them.
    let key = crate::support::session_locks::key();
    let guard = client.try_advisory_lock(&key).unwrap().unwrap();
    assert!(client.advisory_holders().unwrap().iter().any(|holder| holder.pid == guard.pid()));
    assert!(client.advisory_waiters().is_ok());
    assert!(client.terminate_advisory_session(guard.pid()).unwrap());
    assert!(guard.lost().wait_timeout(LIMIT));
    drop((guard, client));
    admin.batch_execute(&format!("DROP SCHEMA {hostile} CASCADE")).unwrap();
}

#[test]
fn session_locks_call_nobody_else_s_functions_and_operators() {
    let schema = crate::support::schema();
    let hostile = format!("{}_calls", schema.name());
    let mut admin = schema.client();
    admin.batch_execute(&format!("CREATE SCHEMA {hostile}; SET search_path TO {hostile}")).unwrap();
    for function in [
        "pg_try_advisory_lock(int8) RETURNS bool",
        "pg_try_advisory_lock_shared(int8) RETURNS bool",
        "pg_advisory_unlock(int8) RETURNS bool",
        "pg_advisory_unlock_shared(int8) RETURNS bool",
        "pg_backend_pid() RETURNS int4",
        "pg_is_in_recovery() RETURNS bool",
        "current_setting(text, bool) RETURNS text",
        "set_config(text, text, bool) RETURNS text",
        "pg_terminate_backend(int4) RETURNS bool",
        "current_database() RETURNS name",
        "to_jsonb(anyelement) RETURNS jsonb",
    ] {
        admin
            .batch_execute(&format!(
                "CREATE FUNCTION {function} LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''a look-alike was called''; END'"
            ))
            .unwrap();
    }
    for (operator, left, right) in
        [("=", "text", "text"), ("=", "oid", "oid"), ("=", "int4", "int4"), ("=", "name", "name")]
    {
        let name = format!("lie_{}", unique());
        admin
            .batch_execute(&format!(
                "CREATE FUNCTION {name}({left}, {right}) RETURNS bool LANGUAGE sql IMMUTABLE AS 'SELECT NULL::bool'; \
                 CREATE OPERATOR {operator} (FUNCTION = {name}, LEFTARG = {left}, RIGHTARG = {right})"
            ))
            .unwrap();
    }
    for view in ["pg_locks", "pg_stat_activity", "pg_database"] {
        admin.batch_execute(&format!("CREATE VIEW {view} AS SELECT 1 AS nothing")).unwrap();
    }
    let mut config: Config = server().url().parse().unwrap();
    config.options(&format!("-c search_path={hostile},pg_catalog"));
    // The self-test with a second session, and with the server's book alone.
    let manager = PostgresConnectionManager::new(config.clone(), NoTls);
    let one = r2d2::Pool::builder().max_size(1).test_on_check_out(false).build(manager).unwrap();
    let builder = || PgLockClient::builder().auto_create_tables(false);
    for client in [connect(builder(), config).unwrap(), builder().build(one).unwrap()] {
        for options in [syncguard::AdvisoryOptions::new(), syncguard::AdvisoryOptions::new().shared()] {
            let key = crate::support::session_locks::key();
            let guard = client.advisory_lock_with(&key, &options).unwrap();
            // Also when it is asked.
            let mut observer = server().client();
            let pid = guard.pid();
            let mut changed = || -> std::time::SystemTime {
                observer
                    .query_one("SELECT state_change FROM pg_stat_activity WHERE pid = $1", &[&pid])
                    .unwrap()
                    .get(0)
            };
            let first = changed();
            crate::support::wait_until(LIMIT, "the session is asked", || changed() != first);
            assert!(guard.is_held());
            assert_eq!(guard.release().unwrap(), syncguard::ReleaseResult::Released);
        }
    }
    admin.batch_execute(&format!("SET search_path TO public; DROP SCHEMA {hostile} CASCADE")).unwrap();
}

/// What runs on every connection of a pool before the client gets it.
#[derive(Debug)]
struct Prelude(&'static str);

impl r2d2::CustomizeConnection<postgres::Client, postgres::Error> for Prelude {
    fn on_acquire(&self, connection: &mut postgres::Client) -> std::result::Result<(), postgres::Error> {
        connection.batch_execute(self.0)
    }
}

#[test]
fn temporary_tables_of_the_same_name_are_not_taken_for_the_lock_tables() {
    // They come first on every search path, and each session has its own: locks in them exclude nobody.
    let place = place();
    let config = place.schema.config();
    let pool = |sql: &'static str| {
        let manager = PostgresConnectionManager::new(config.clone(), NoTls);
        r2d2::Pool::builder()
            .max_size(2)
            .connection_customizer(Box::new(Prelude(sql)))
            .build(manager)
            .unwrap()
    };
    let shadows = "CREATE TEMP TABLE syncguard_locks (LIKE syncguard_locks INCLUDING ALL); \
                   CREATE TEMP TABLE syncguard_fence_counters (LIKE syncguard_fence_counters INCLUDING ALL)";
    for create in [true, false] {
        let builder = PgLockClient::builder().auto_create_tables(create);
        let error = match builder.build(pool(shadows)) {
            Ok(client) => client.acquire("a key", TTL).unwrap_err(),
            Err(error) => error,
        };
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
        assert!(error.to_string().contains("temporary"), "{error}");
    }
    let client = PgLockClient::builder().schema(place.schema.name()).build(pool(shadows)).unwrap();
    let key = place.key("a");
    let grant = client.acquire(&key, TTL).unwrap().acquired().unwrap();
    assert_eq!(place.stored.row(&key).unwrap().lock_id, grant.lock_id);
    // Nothing is created in a schema that ends with its session, either.
    let error = PgLockClient::builder()
        .build(pool("SET search_path TO pg_temp; CREATE TEMP TABLE x ()"))
        .unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
}
