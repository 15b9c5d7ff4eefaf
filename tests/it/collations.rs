//! A collation that changes under the indexes: tables of ours do not depend on it, and others are
//! refused until they have been put in order.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use crate::support::{TTL, server, unique};
use postgres::{Client, NoTls};
use syncguard::{AcquireResult, ErrorCode, ExtendResult, LockError, PgLockClient, ReleaseResult};

const SCHEMA: &str = include_str!("../../schema.sql");

/// Keys that bytes and languages sort in different ways.
const KEYS: [&str; 12] = ["a", "B", "c", "D", "e-1", "e_1", "E1", "z", "Z", "\u{e4}", "\u{c4}b", "0"];

/// A database of its own, dropped with the value.
struct Database {
    name: String,
}

impl Database {
    fn new(options: &str) -> Self {
        let name = format!("collated_{}", unique());
        run(&mut server().client(), &format!("CREATE DATABASE {name} TEMPLATE template0 {options}"));
        Self { name }
    }

    /// Bytes, as `initdb --locale=C` makes it.
    fn plain() -> Self {
        Self::new("LOCALE 'C'")
    }

    fn icu() -> Self {
        Self::new("LOCALE 'C' LOCALE_PROVIDER icu ICU_LOCALE 'en-US'")
    }

    fn url(&self) -> String {
        let (server, _) = server().url().rsplit_once('/').unwrap();
        format!("{server}/{}", self.name)
    }

    fn sql(&self) -> Client {
        Client::connect(&self.url(), NoTls).unwrap()
    }

    /// The tables of other clients and of earlier versions, which say nothing of collations.
    fn with_old_tables(self, collation: &str) -> Self {
        run(&mut self.sql(), &SCHEMA.replace(" COLLATE \"C\"", collation));
        self
    }

    /// What an upgrade of the system does to all that is sorted by the database's collation.
    fn change_collation(&self) {
        run(
            &mut server().client(),
            &format!(
                "UPDATE pg_database SET datlocprovider = 'i', daticulocale = 'en-US' WHERE datname = '{}'",
                self.name
            ),
        );
    }

    /// A client that uses the tables as they are.
    fn user(&self) -> PgLockClient {
        PgLockClient::builder().auto_create_tables(false).connect(&self.url()).unwrap()
    }

    /// Setup, and the first use of a client that skips it, refuse and say what to do.
    #[track_caller]
    fn refuses(&self, words: &[&str]) {
        let check = |error: LockError| {
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
            let text = error.to_string();
            for word in words {
                assert!(text.contains(word), "{word}: {text}");
            }
        };
        check(PgLockClient::connect(&self.url()).unwrap_err());
        let user = self.user();
        check(user.setup_schema().unwrap_err());
        for _ in 0..2 {
            check(user.acquire("new", TTL).unwrap_err());
            check(user.is_locked("new").unwrap_err());
        }
        check(user.lock("new").unwrap_err());
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if let Ok(mut client) = Client::connect(server().url(), NoTls) {
            let _ = client.batch_execute(&format!("DROP DATABASE {} WITH (FORCE)", self.name));
        }
    }
}

fn run(client: &mut Client, sql: &str) {
    client.batch_execute(sql).unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

fn works(client: &PgLockClient) {
    let grant = client.acquire("works", TTL).unwrap().acquired().unwrap();
    assert_eq!(client.acquire("works", TTL).unwrap(), AcquireResult::Locked);
    assert!(matches!(client.extend(&grant.lock_id, TTL).unwrap(), ExtendResult::Extended { .. }));
    assert_eq!(client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
}

#[test]
fn held_keys_stay_held_and_counters_go_on_when_the_collation_changes_under_new_tables() {
    let database = Database::plain();
    let before = PgLockClient::connect(&database.url()).unwrap();
    for key in KEYS {
        let grant = before.acquire(key, TTL).unwrap().acquired().unwrap();
        before.release(&grant.lock_id).unwrap();
        before.acquire(key, TTL).unwrap().acquired().unwrap();
    }
    drop(before);
    database.change_collation();
    let after = PgLockClient::connect(&database.url()).unwrap();
    for key in KEYS {
        assert_eq!(after.acquire(key, TTL).unwrap(), AcquireResult::Locked, "{key}");
        let fence = after.operator().break_lock(key, "a test").unwrap().fence;
        assert_eq!(fence.get(), 3, "{key}");
    }
    let sql = "SELECT count(*) FROM pg_attribute WHERE attnum > 0 AND atttypid = 'text'::regtype AND attrelid IN \
               ('syncguard_locks'::regclass, 'syncguard_fence_counters'::regclass) AND attcollation = '\"C\"'::regcollation";
    assert_eq!(database.sql().query_one(sql, &[]).unwrap().get::<_, i64>(0), 6, "every text column");
}

#[test]
fn old_tables_whose_indexes_are_in_another_order_are_refused_until_they_are_built_anew() {
    let database = Database::plain().with_old_tables("");
    let before = PgLockClient::connect(&database.url()).unwrap();
    for key in KEYS {
        before.acquire(key, TTL).unwrap().acquired().unwrap();
    }
    drop(before);
    database.change_collation();
    database.refuses(&["REINDEX TABLE", "REFRESH COLLATION VERSION", "docs/operations.md"]);
    run(&mut database.sql(), "REINDEX TABLE syncguard_locks; REINDEX TABLE syncguard_fence_counters");
    let after = PgLockClient::connect(&database.url()).unwrap();
    for key in KEYS {
        assert_eq!(after.acquire(key, TTL).unwrap(), AcquireResult::Locked, "{key}");
    }
    works(&database.user());
}

#[test]
fn a_key_that_is_there_twice_is_found() {
    let database = Database::icu().with_old_tables("");
    let client = PgLockClient::connect(&database.url()).unwrap();
    client.acquire("a", TTL).unwrap().acquired().unwrap();
    // As a search that went astray leaves it behind.
    run(
        &mut database.sql(),
        "SET allow_system_table_mods = on; \
         UPDATE pg_index SET indisunique = false WHERE indexrelid = 'syncguard_fence_counters_pkey'::regclass",
    );
    run(
        &mut database.sql(),
        "INSERT INTO syncguard_fence_counters VALUES ('fence:a', 7); \
         UPDATE pg_index SET indisunique = true WHERE indexrelid = 'syncguard_fence_counters_pkey'::regclass",
    );
    database.refuses(&["holds a key twice", "REINDEX TABLE", "REFRESH COLLATION VERSION"]);
}

#[test]
fn a_database_of_another_version_than_the_recorded_one_is_refused_until_it_is_refreshed() {
    let database = Database::icu().with_old_tables("");
    works(&PgLockClient::connect(&database.url()).unwrap());
    let record =
        format!("UPDATE pg_database SET datcollversion = '1.2.3' WHERE datname = '{}'", database.name);
    run(&mut server().client(), &record);
    database.refuses(&["1.2.3", "REINDEX TABLE", "ALTER DATABASE", "REFRESH COLLATION VERSION"]);
    // Tables that do not depend on it are not asked about it.
    run(&mut database.sql(), "CREATE SCHEMA own");
    works(&PgLockClient::builder().schema("own").connect(&database.url()).unwrap());
    let refresh = format!("ALTER DATABASE {} REFRESH COLLATION VERSION", database.name);
    run(&mut database.sql(), &refresh);
    works(&database.user());
    works(&PgLockClient::connect(&database.url()).unwrap());
}

#[test]
fn a_collation_of_the_columns_own_is_the_one_that_is_looked_at() {
    let database = Database::plain();
    run(&mut database.sql(), "CREATE COLLATION mine (provider = icu, locale = 'en-US', version = '1.2.3')");
    let database = database.with_old_tables(" COLLATE mine");
    database.refuses(&["1.2.3", "REINDEX TABLE", "ALTER COLLATION public.mine REFRESH VERSION"]);
    run(&mut database.sql(), "ALTER COLLATION mine REFRESH VERSION");
    works(&database.user());
    // One to which different keys are the same.
    let database = Database::plain();
    run(
        &mut database.sql(),
        "CREATE COLLATION mine (provider = icu, locale = 'en-US-u-ks-level1', deterministic = false)",
    );
    database.with_old_tables(" COLLATE mine").refuses(&["nondeterministic", "COLLATE \"C\""]);
}

#[test]
fn a_role_that_may_not_read_a_key_column_is_not_refused_for_it() {
    let database = Database::icu().with_old_tables("");
    let role = format!("reader_{}", unique());
    run(
        &mut database.sql(),
        &format!(
            "CREATE ROLE {role} LOGIN; GRANT SELECT (key, expires_at_ms) ON syncguard_locks TO {role}; \
             GRANT SELECT (fence) ON syncguard_fence_counters TO {role}"
        ),
    );
    let url = database.url().replacen("postgres@", &format!("{role}@"), 1);
    let reader = PgLockClient::builder().auto_create_tables(false).connect(&url).unwrap();
    assert!(!reader.is_locked("a").unwrap());
    drop(reader);
    run(&mut database.sql(), &format!("DROP OWNED BY {role}"));
    run(&mut database.sql(), &format!("DROP ROLE {role}"));
}

#[test]
fn statements_find_rows_by_their_index_in_old_tables_and_in_new_ones() {
    for old in [true, false] {
        let mut database = Database::icu();
        if old {
            database = database.with_old_tables("");
        }
        let client = PgLockClient::connect(&database.url()).unwrap();
        let mut sql = database.sql();
        run(
            &mut sql,
            "INSERT INTO syncguard_locks SELECT 'k' || i, lpad(i::text, 22, 'x'), 9000000000000, 1, lpad('1', 15, '0'), 'k' || i \
               FROM generate_series(1, 20000) AS i; \
             INSERT INTO syncguard_fence_counters SELECT 'fence:k' || i, 1 FROM generate_series(1, 20000) AS i; \
             ANALYZE",
        );
        let cycle = |client: &PgLockClient| {
            works(client);
            assert!(client.is_locked("k7").unwrap());
            let guard = client.lock("guarded").unwrap();
            let mut sql = database.sql();
            let mut tx = sql.transaction().unwrap();
            guard.fence_transaction(&mut tx).unwrap();
            tx.commit().unwrap();
            guard.release().unwrap();
        };
        cycle(&client);
        // Statistics are sent when a session ends.
        let mut seen = |table: &str| -> i64 {
            let row = sql.query_one("SELECT pg_stat_get_numscans($1::text::regclass)", &[&table]).unwrap();
            row.get(0)
        };
        drop(client);
        crate::support::wait_until(crate::support::LIMIT, "the sessions end", || {
            let others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
            database.sql().query_one(others, &[]).unwrap().get::<_, i64>(0) <= 1
        });
        let before = (seen("syncguard_locks"), seen("syncguard_fence_counters"));
        let client = database.user();
        for _ in 0..20 {
            cycle(&client);
        }
        drop(client);
        crate::support::wait_until(crate::support::LIMIT, "the sessions end", || {
            let others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
            database.sql().query_one(others, &[]).unwrap().get::<_, i64>(0) <= 1
        });
        let after = (seen("syncguard_locks"), seen("syncguard_fence_counters"));
        assert_eq!(after, before, "no scan of a whole table: {old}");
    }
}
