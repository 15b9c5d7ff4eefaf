//! Tables and databases that somebody has changed: each error names what is in the way, and what to do.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::time::Duration;

use crate::support::calls::told_in_time;
use crate::support::{Config, LIMIT, Place, Role, Server, TTL, place, server, unique, wait_until};
use postgres::{Client, NoTls};
use syncguard::{AcquireResult, ErrorCode, LockBackend, LockError, PgLockClient, PgLockClientBuilder};

#[track_caller]
fn says(error: &LockError, code: ErrorCode, words: &[&str]) {
    assert_eq!((error.code(), error.is_outcome_unknown()), (code, false), "{error:?}");
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn keys_that_on_conflict_cannot_use_are_named() {
    for (change, words) in [
        ("", &["primary key", "schema.sql", "42P10"][..]),
        ("; ALTER TABLE syncguard_locks ADD PRIMARY KEY (key) DEFERRABLE", &["DEFERRABLE", "55000"]),
    ] {
        let place = place();
        place
            .stored
            .run(&format!("ALTER TABLE syncguard_locks DROP CONSTRAINT syncguard_locks_pkey{change}"));
        let client = place.build(&unique(), PgLockClient::builder());
        says(&client.acquire("a", TTL).unwrap_err(), ErrorCode::InvalidArgument, words);
    }
}

#[test]
fn a_published_table_without_replica_identity_is_named() {
    let place = place();
    let grant = place.hold("a");
    let publication = format!("pub_{}", unique());
    place.stored.run(&format!(
        "ALTER TABLE syncguard_locks REPLICA IDENTITY NOTHING; CREATE PUBLICATION {publication} FOR TABLE syncguard_locks"
    ));
    let error = place.client.release(&grant.lock_id).unwrap_err();
    says(&error, ErrorCode::InvalidArgument, &["replica identity", "REPLICA IDENTITY"]);
    assert!(place.stored.row("a").is_some());
}

#[test]
fn what_others_added_is_named_without_its_values() {
    for (change, word) in [
        ("ADD CONSTRAINT known_user FOREIGN KEY (user_key) REFERENCES users (name)", "known_user"),
        ("ADD CONSTRAINT short_keys CHECK (length(key) < 3)", "short_keys"),
        ("ADD COLUMN tenant text NOT NULL", "tenant"),
        ("ALTER lock_id TYPE varchar(10)", "too short"),
    ] {
        let place = place();
        place.stored.run("CREATE TABLE users (name text PRIMARY KEY)");
        place.stored.run(&format!("ALTER TABLE syncguard_locks {change}"));
        let error = place.client.acquire("secret-key", TTL).unwrap_err();
        says(&error, ErrorCode::InvalidArgument, &[word, "lock tables"]);
        let mut cause: Option<&dyn std::error::Error> = Some(&error);
        while let Some(error) = cause {
            assert!(!error.to_string().contains("secret-key"), "{error}");
            cause = error.source();
        }
    }
}

#[test]
fn row_level_security_is_named_beside_the_rights() {
    let place = place();
    let role = Role::with_tables(&place.schema);
    place.stored.run("ALTER TABLE syncguard_locks ENABLE ROW LEVEL SECURITY");
    let client = role.connect(PgLockClient::builder().auto_create_tables(false)).unwrap();
    let error = client.acquire("a", TTL).unwrap_err();
    says(&error, ErrorCode::AuthFailed, &["row-level security", "42501"]);
}

/// A database of its own, dropped with the value.
struct Database(String);

impl Database {
    fn new() -> Self {
        let name = format!("altered_{}", unique());
        server().client().batch_execute(&format!("CREATE DATABASE {name}")).unwrap();
        Self(name)
    }

    fn url(&self) -> String {
        let (server, _) = server().url().rsplit_once('/').unwrap();
        format!("{server}/{}", self.0)
    }

    fn run(&self, sql: &str) {
        Client::connect(&self.url(), NoTls).unwrap().batch_execute(sql).unwrap();
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if let Ok(mut client) = Client::connect(server().url(), NoTls) {
            let _ = client.batch_execute(&format!("DROP DATABASE {} WITH (FORCE)", self.0));
        }
    }
}

#[test]
fn a_database_that_takes_no_connections_is_unavailable_and_says_why() {
    let database = Database::new();
    let forbid = format!("ALTER DATABASE {} ALLOW_CONNECTIONS false", database.0);
    server().client().batch_execute(&forbid).unwrap();
    let error = PgLockClient::connect(&database.url()).unwrap_err();
    says(&error, ErrorCode::ServiceUnavailable, &["ALLOW_CONNECTIONS"]);
}

#[test]
fn set_up_names_an_event_trigger_and_a_partitioned_table() {
    let database = Database::new();
    database.run(
        "CREATE FUNCTION no_ddl() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not on a Friday'; END $$; \
         CREATE EVENT TRIGGER no_ddl ON ddl_command_start WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION no_ddl()",
    );
    let error = PgLockClient::connect(&database.url()).unwrap_err();
    says(&error, ErrorCode::Internal, &["event trigger", "auto_create_tables(false)"]);
    database.run(
        "DROP EVENT TRIGGER no_ddl; \
         CREATE TABLE syncguard_locks (key text PRIMARY KEY, lock_id text NOT NULL, expires_at_ms bigint NOT NULL, \
           acquired_at_ms bigint NOT NULL, fence text NOT NULL, user_key text NOT NULL) PARTITION BY HASH (key)",
    );
    let error = PgLockClient::connect(&database.url()).unwrap_err();
    says(&error, ErrorCode::Internal, &["partitioned", "plain table"]);
}

#[test]
fn a_prepared_transaction_that_holds_a_counter_is_named() {
    let server = Server::start(&Config::new().set("max_prepared_transactions", "2"));
    let place = Place::new(server.schema());
    let grant = place.hold("a");
    let fenced = LockBackend::fence_statement(&place.client, "a", grant.fence, None).unwrap();
    place.stored.run(&format!("BEGIN; {fenced}; PREPARE TRANSACTION 'forgotten'"));
    place.stored.age("a", 1_500);
    assert_eq!(place.client.acquire("a", TTL).unwrap(), AcquireResult::Locked);
    let hasty = |time| -> PgLockClientBuilder { PgLockClient::builder().operation_timeout(time) };
    let client = place.build(&unique(), hasty(Duration::from_millis(300)));
    let told = |error: &LockError| error.sqlstate().is_some();
    let error = told_in_time(&client, told, || client.operator().break_lock("a", "a test"));
    says(&error, ErrorCode::NetworkTimeout, &["pg_prepared_xacts", "waiters"]);
    // It has no process that could be ended: its place in the list of those is taken by 0.
    let patient = place.build(&unique(), hasty(LIMIT));
    std::thread::scope(|scope| {
        let breaking = scope.spawn(|| patient.operator().break_lock("a", "a test"));
        wait_until(LIMIT, "the break waits for the prepared transaction", || {
            place.client.operator().blocked("a").unwrap().iter().any(|waiter| waiter.blocked_by == [0])
        });
        place.stored.run("ROLLBACK PREPARED 'forgotten'");
        assert_eq!(breaking.join().unwrap().unwrap().fence.get(), 2);
    });
}
