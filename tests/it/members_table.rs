//! The optional table of members: made where it is asked for, named after the others, checked as they are.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use crate::support::{Role, TestSchema, schema};
use syncguard::{ErrorCode, LockOptions, PgLockClient, PgLockClientBuilder, ReleaseResult};

fn builder() -> PgLockClientBuilder {
    PgLockClient::builder().create_members_table(true)
}

/// The tables of a schema.
fn tables(schema: &TestSchema) -> Vec<String> {
    let sql = "SELECT tablename::text FROM pg_tables WHERE schemaname = $1 ORDER BY 1";
    schema.client().query(sql, &[&schema.name()]).unwrap().iter().map(|row| row.get(0)).collect()
}

fn indexes(schema: &TestSchema, table: &str) -> Vec<String> {
    let sql = "SELECT regexp_replace(indexdef, '^.* USING ', '') FROM pg_indexes \
               WHERE schemaname = $1 AND tablename = $2 ORDER BY 1";
    schema.client().query(sql, &[&schema.name(), &table]).unwrap().iter().map(|row| row.get(0)).collect()
}

const INDEXES: [&str; 3] =
    ["btree (key, since_ms)", "btree (key, since_ms) WHERE (role = 'w'::text)", "btree (lock_id)"];

#[test]
fn a_client_that_does_not_ask_for_it_neither_makes_nor_needs_it() {
    let schema = schema();
    let client = PgLockClient::connect(&schema.url()).unwrap();
    client.setup_schema().unwrap();
    client.lock("a").unwrap().release().unwrap();
    assert_eq!(tables(&schema), ["syncguard_fence_counters", "syncguard_locks"]);
}

#[test]
fn set_up_makes_it_where_it_is_asked_for() {
    let schema = schema();
    let unasked = builder().auto_create_tables(false).connect(&schema.url()).unwrap();
    assert!(tables(&schema).is_empty(), "building does no I/O");
    unasked.setup_schema().unwrap();
    assert_eq!(tables(&schema), ["syncguard_fence_counters", "syncguard_locks", "syncguard_members"]);
    assert_eq!(indexes(&schema, "syncguard_members"), INDEXES);
    let sql = "SELECT column_name || ' ' || data_type || ' ' || is_nullable || ' ' || coalesce(column_default, '-') \
               FROM information_schema.columns WHERE table_schema = $1 AND table_name = 'syncguard_members' \
               ORDER BY ordinal_position";
    let rows = schema.client().query(sql, &[&schema.name()]).unwrap();
    let columns: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(
        columns,
        [
            "lock_id text NO -",
            "key text NO -",
            "role text NO -",
            "since_ms bigint NO -",
            "expires_at_ms bigint NO -",
            "fence text YES -",
            "priority integer NO 0",
            "owner text YES -",
            "note text YES -",
        ]
    );
    let sql = "SELECT count(*) FROM pg_attribute WHERE attnum > 0 AND atttypid = 'text'::regtype \
               AND attrelid = 'syncguard_members'::regclass AND attcollation <> '\"C\"'::regcollation";
    assert_eq!(schema.client().query_one(sql, &[]).unwrap().get::<_, i64>(0), 0, "sorted by bytes");
}

#[test]
fn what_is_missing_of_it_is_made_by_all_at_once() {
    let schema = schema();
    std::thread::scope(|scope| {
        let all: Vec<_> =
            (0..8).map(|_| scope.spawn(|| builder().connect(&schema.url()).map(drop))).collect();
        for one in all {
            one.join().unwrap().unwrap();
        }
    });
    schema
        .client()
        .batch_execute("DROP INDEX idx_syncguard_members_key, idx_syncguard_members_waiting")
        .unwrap();
    builder().connect(&schema.url()).unwrap();
    assert_eq!(indexes(&schema, "syncguard_members"), INDEXES);
}

#[test]
fn it_is_named_after_the_table_of_the_leases_and_lies_beside_it() {
    let schema = schema();
    let long = "x".repeat(63);
    builder().table_name("billing").connect(&schema.url()).unwrap();
    builder().table_name(&long).fence_table_name("f").connect(&schema.url()).unwrap();
    builder()
        .table_name("Other")
        .fence_table_name("f")
        .members_table_name("Readers")
        .connect(&schema.url())
        .unwrap();
    let found = tables(&schema);
    for name in ["billing_members", "Readers"] {
        assert!(found.iter().any(|table| table == name), "{name}: {found:?}");
        assert_eq!(indexes(&schema, name), INDEXES, "{name}");
    }
    let members =
        found.iter().filter(|table| table.starts_with("xxx") && table.ends_with("_members")).count();
    assert_eq!(members, 1, "{found:?}");
    // Whatever a session's search path finds first.
    let url = format!("{}%2Cpublic", schema.url());
    builder().schema(schema.name()).connect(&url).unwrap();
    assert!(tables(&schema).contains(&"syncguard_members".to_owned()));
}

#[test]
fn one_that_is_dropped_while_clients_run_is_made_again_by_set_up() {
    let schema = schema();
    let client = PgLockClient::connect(&schema.url()).unwrap();
    let noted = LockOptions::new().note("x");
    let fair = LockOptions::new().fair(true);
    let held = client.lock_with("held", &noted).unwrap();
    client.lock_with("till", &fair).unwrap().release().unwrap();
    schema.client().batch_execute("DROP TABLE syncguard_members").unwrap();
    let operator = client.operator();
    let holders = operator.holders(10).unwrap();
    assert_eq!((holders.len(), holders[0].fence, holders[0].note.as_deref()), (1, held.fence(), None));
    assert_eq!(operator.waiters(10).unwrap(), []);
    assert_eq!(operator.cleanup_expired(10).unwrap(), 0);
    for error in [client.lock_with("till", &fair).err(), client.try_read_lock("till").err()] {
        assert_eq!(error.unwrap().sqlstate(), Some("42P01"));
    }
    assert_eq!(held.release().unwrap(), ReleaseResult::Released);
    client.setup_schema().unwrap();
    assert_eq!(indexes(&schema, "syncguard_members"), INDEXES);
    client.lock_with("till", &fair).unwrap().release().unwrap();
    client.read_lock("till").unwrap().release().unwrap();
    let held = client.lock_with("held", &noted).unwrap();
    assert_eq!(operator.holders(10).unwrap()[0].note.as_deref(), Some("x"));
    held.release().unwrap();
}

#[test]
fn a_role_that_may_not_create_is_told_what_to_run() {
    let schema = schema();
    PgLockClient::connect(&schema.url()).unwrap();
    let role = Role::without_rights(&schema);
    let sql = format!("GRANT USAGE ON SCHEMA {} TO {}", schema.name(), role.name());
    schema.client().batch_execute(&sql).unwrap();
    let error = role.connect(builder()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::AuthFailed, "{error:?}");
    assert!(error.to_string().contains("schema.sql"), "{error}");
    builder().connect(&schema.url()).unwrap();
    role.connect(builder()).unwrap();
}

#[test]
fn one_whose_indexes_depend_on_a_collation_that_changed_is_refused() {
    let schema = schema();
    let client = builder().connect(&schema.url()).unwrap();
    // Sorted as bytes are not, by a collation of an older version.
    let sql = format!(
        "CREATE COLLATION {0}.old (provider = icu, locale = 'en-US'); \
         ALTER TABLE {0}.syncguard_members ALTER COLUMN key TYPE text COLLATE {0}.old; \
         UPDATE pg_collation SET collversion = '1' WHERE collname = 'old' AND collnamespace = '{0}'::regnamespace",
        schema.name()
    );
    schema.client().batch_execute(&sql).unwrap();
    let error = client.setup_schema().unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    assert!(error.to_string().contains("REINDEX TABLE") && error.to_string().contains("members"), "{error}");
    // Who needs none of it is not kept from its work.
    PgLockClient::connect(&schema.url()).unwrap().lock("a").unwrap().release().unwrap();
}

#[test]
fn a_view_in_its_place_is_refused() {
    let schema = schema();
    let client = builder().connect(&schema.url()).unwrap();
    let sql =
        "ALTER TABLE syncguard_members RENAME TO kept; CREATE VIEW syncguard_members AS SELECT * FROM kept";
    schema.client().batch_execute(sql).unwrap();
    let error = client.setup_schema().unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    assert!(error.to_string().contains("plain table"), "{error}");
}
