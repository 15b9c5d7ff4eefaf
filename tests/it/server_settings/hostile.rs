//! Other people's functions, operators and tables before the system's own.

use super::*;
use syncguard::{ErrorCode, ReleaseResult};

/// A schema full of look-alikes. Whoever calls one of them gets an error, or a lie.
fn look_alikes(place: &Place) -> String {
    let hostile = format!("{}_hostile", place.schema.name());
    place.stored.run(&format!(
        "CREATE SCHEMA {hostile}; GRANT USAGE ON SCHEMA {hostile} TO PUBLIC; SET search_path TO {hostile}"
    ));
    let functions = [
        "now() RETURNS timestamptz",
        "clock_timestamp() RETURNS timestamptz",
        "hashtext(text) RETURNS int4",
        "floor(numeric) RETURNS numeric",
        "floor(float8) RETURNS float8",
        "lpad(text, int4, text) RETURNS text",
        "current_setting(text) RETURNS text",
        "set_config(text, text, bool) RETURNS text",
        "pg_advisory_xact_lock(int8) RETURNS void",
        "pg_backend_pid() RETURNS int4",
        "to_regclass(text) RETURNS regclass",
        "current_schema() RETURNS name",
        "unnest(text[]) RETURNS SETOF text",
        "unnest(int8[]) RETURNS SETOF int8",
        "pg_blocking_pids(int4) RETURNS int4[]",
    ];
    for function in functions {
        place.stored.run(&format!(
            "CREATE FUNCTION {function} LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''a look-alike was called''; END'"
        ));
    }
    for (operator, left, right) in [
        ("=", "text", "text"),
        ("<>", "text", "text"),
        ("=", "name", "name"),
        ("=", "name", "text"),
        ("=", "oid", "oid"),
        ("=", "int2", "int2"),
        ("=", "int2", "int4"),
        (">", "int8", "int8"),
        ("<", "int8", "int8"),
        ("<", "int8", "int4"),
        ("=", "int8", "int8"),
        ("=", "int8", "int4"),
        (">=", "int8", "int4"),
        ("=", "char", "char"),
        ("=", "\"char\"", "\"char\""),
    ] {
        let name = format!("lie_{}", unique());
        place.stored.run(&format!(
            "CREATE FUNCTION {name}({left}, {right}) RETURNS bool LANGUAGE sql IMMUTABLE AS 'SELECT NULL::bool'; \
             CREATE OPERATOR {operator} (FUNCTION = {name}, LEFTARG = {left}, RIGHTARG = {right})"
        ));
    }
    for (left, right) in [("int8", "int4"), ("int8", "int8")] {
        for operator in ["+", "-"] {
            let name = format!("lie_{}", unique());
            place.stored.run(&format!(
                "CREATE FUNCTION {name}({left}, {right}) RETURNS int8 LANGUAGE sql IMMUTABLE AS 'SELECT 0::int8'; \
                 CREATE OPERATOR {operator} (FUNCTION = {name}, LEFTARG = {left}, RIGHTARG = {right})"
            ));
        }
    }
    for table in [
        "pg_class",
        "pg_namespace",
        "pg_attribute",
        "pg_index",
        "pg_locks",
        "pg_stat_activity",
        "pg_database",
    ] {
        place.stored.run(&format!("CREATE TABLE {table} (nothing int); GRANT SELECT ON {table} TO PUBLIC"));
    }
    place.stored.run(&format!("SET search_path TO {}", place.schema.name()));
    hostile
}

#[test]
fn look_alikes_before_the_system_s_own_names_are_never_called() {
    let place = place();
    let key = place.key("a");
    let role = Role::with_tables(&place.schema);
    let hostile = look_alikes(&place);
    role.set(&place.schema, "search_path", &format!("{hostile}, pg_catalog, {}", place.schema.name()));
    let connect = |pool| {
        let builder = PgLockClient::builder().schema(place.schema.name());
        client(builder, role.config_with_own_path(), pool).unwrap()
    };
    for pool in [true, false] {
        works(&connect(pool), &place, &place.key(&format!("{pool}")), "with look-alikes");
    }
    let client = connect(false);
    let options = LockOptions::new().ttl(Duration::from_secs(60));
    let guard = client.lock_with(&key, &options).unwrap();
    assert_eq!(client.operator().holders(10).unwrap().len(), 1);
    assert_eq!(client.operator().blocked(&key).unwrap(), []);

    // A caller's transaction has the caller's search path.
    let mut caller = role.config_with_own_path().connect(postgres::NoTls).unwrap();
    let mut tx = caller.transaction().unwrap();
    guard.fence_transaction(&mut tx).unwrap();
    tx.rollback().unwrap();
    place.stored.age(&key, 1_500);
    let mut tx = caller.transaction().unwrap();
    assert_eq!(guard.fence_transaction(&mut tx).unwrap_err().code(), ErrorCode::Aborted);
    tx.rollback().unwrap();
    place.stored.run(&format!("DROP SCHEMA {hostile} CASCADE"));
}

#[test]
fn unqualified_tables_are_those_that_the_search_path_finds_first_and_stay_so() {
    let place = place();
    let other = crate::support::place();
    let (near, far) = (place.schema.name(), other.schema.name());
    let mut config = place.schema.config();
    config.options(&format!("-c search_path={near},{far}"));
    let client = PgLockClient::builder().connect_with(config, postgres::NoTls).unwrap();
    let key = place.key("a");
    let grant = client.acquire(&key, TTL).unwrap().acquired().unwrap();
    assert!(place.stored.row(&key).is_some() && other.stored.row(&key).is_none());
    assert_eq!(client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
}
