//! How the two tables come to be: by the library, by a migration, by twenty processes at once.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use crate::support::binaries::binaries;
use crate::support::{Place, Role, Stored, TTL, Worker, id, logs, place, schema, server, unique, worker};
use log::Level;
use postgres::{Client, NoTls};
use syncguard::{
    AcquireResult, ErrorCode, ExtendResult, Lookup, MAX_TTL, PgLockClient, PgLockClientBuilder, ReleaseResult,
};

/// All five operations, on a key of its own.
fn works(client: &PgLockClient, key: &str) {
    let grant = client.acquire(key, TTL).unwrap().acquired().unwrap();
    assert_eq!(client.acquire(key, TTL).unwrap(), AcquireResult::Locked);
    assert!(client.is_locked(key).unwrap());
    assert!(client.lookup(Lookup::LockId(&grant.lock_id)).unwrap().is_some());
    assert!(matches!(client.extend(&grant.lock_id, TTL).unwrap(), ExtendResult::Extended { .. }));
    assert_eq!(client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
}

/// The tables and indexes of a schema, as `table: index definition`.
fn indexes(client: &mut Client, schema: &str) -> BTreeSet<String> {
    let sql = "SELECT tablename || ': ' || replace(indexdef, ' ON ' || quote_ident(schemaname) || '.', ' ON ') \
               FROM pg_indexes WHERE schemaname = $1";
    client.query(sql, &[&schema]).unwrap().iter().map(|row| row.get(0)).collect()
}

#[test]
fn the_tables_have_exactly_the_columns_and_indexes_that_every_client_expects() {
    let place = place();
    let sql = "SELECT table_name || '.' || column_name || ' ' || data_type || ' ' || is_nullable || ' ' || coalesce(column_default, '-') \
               FROM information_schema.columns WHERE table_schema = $1 ORDER BY table_name, ordinal_position";
    let rows = place.stored.client().query(sql, &[&place.schema.name()]).unwrap();
    let columns: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(
        columns,
        [
            "syncguard_fence_counters.fence_key text NO -",
            "syncguard_fence_counters.fence bigint NO 0",
            "syncguard_fence_counters.key_debug text YES -",
            "syncguard_locks.key text NO -",
            "syncguard_locks.lock_id text NO -",
            "syncguard_locks.expires_at_ms bigint NO -",
            "syncguard_locks.acquired_at_ms bigint NO -",
            "syncguard_locks.fence text NO -",
            "syncguard_locks.user_key text NO -",
        ]
    );
    let expected = [
        "syncguard_fence_counters: CREATE UNIQUE INDEX syncguard_fence_counters_pkey ON syncguard_fence_counters USING btree (fence_key)",
        "syncguard_locks: CREATE INDEX idx_syncguard_locks_expires ON syncguard_locks USING btree (expires_at_ms)",
        "syncguard_locks: CREATE UNIQUE INDEX idx_syncguard_locks_lock_id ON syncguard_locks USING btree (lock_id)",
        "syncguard_locks: CREATE UNIQUE INDEX syncguard_locks_pkey ON syncguard_locks USING btree (key)",
    ];
    let found = indexes(&mut place.schema.client(), place.schema.name());
    assert_eq!(found, expected.map(str::to_owned).into());
    let sql = "SELECT string_agg(DISTINCT contype::text, ',') FROM pg_constraint WHERE connamespace = $1::regnamespace";
    let row = place.stored.one(&sql.replace("$1", &format!("'{}'", place.schema.name())), &[]);
    assert_eq!(row.get::<_, String>(0), "p", "primary keys and nothing else");
}

#[test]
fn setting_up_again_loses_nothing() {
    let place = place();
    let grant = place.hold("a");
    let before = place.stored.row("a");
    for _ in 0..3 {
        place.client.setup_schema().unwrap();
        PgLockClient::connect(&place.schema.url()).unwrap();
    }
    assert_eq!(place.stored.row("a"), before);
    assert_eq!(place.stored.counter("a"), Some(1));
    place.stored.run("DROP INDEX idx_syncguard_locks_expires, idx_syncguard_locks_lock_id");
    place.client.setup_schema().unwrap();
    assert_eq!(indexes(&mut place.schema.client(), place.schema.name()).len(), 4, "what is missing is made");
    assert_eq!(place.client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
}

#[test]
fn names_are_taken_as_they_are_given() {
    let schema = schema();
    let long = |last: char| format!("{}{last}", "x".repeat(62));
    let names = [
        ("MixedCase".to_owned(), "mixedcase".to_owned()),
        ("select".to_owned(), "from".to_owned()),
        ("_1".to_owned(), "_2".to_owned()),
        (long('a'), long('b')),
        (long('c'), format!("{}C", "x".repeat(62))),
        ("app_locks".to_owned(), "app_fence_counters".to_owned()),
    ];
    let mut made = BTreeSet::new();
    let clients: Vec<_> = names
        .iter()
        .map(|(locks, fences)| {
            made.extend([locks.clone(), fences.clone()]);
            let builder = PgLockClient::builder().table_name(locks).fence_table_name(fences);
            builder.connect(&schema.url()).unwrap_or_else(|error| panic!("{locks}: {error:?}"))
        })
        .collect();
    // All at once: tables and indexes of one pair are not those of another.
    let held: Vec<_> =
        clients.iter().map(|client| client.acquire("a", TTL).unwrap().acquired().unwrap()).collect();
    for (client, grant) in clients.iter().zip(held) {
        assert_eq!(client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
        works(client, "a");
    }
    let mut observer = schema.client();
    let rows = observer
        .query("SELECT tablename::text FROM pg_tables WHERE schemaname = $1", &[&schema.name()])
        .unwrap();
    assert_eq!(rows.iter().map(|row| row.get(0)).collect::<BTreeSet<String>>(), made, "and no others");
    let found = indexes(&mut observer, schema.name());
    for (locks, fences) in &names {
        let of = |table: &str| found.iter().filter(|index| index.starts_with(&format!("{table}: "))).count();
        assert_eq!((of(locks), of(fences)), (3, 1), "{locks}: {found:#?}");
    }
}

#[test]
fn tables_in_another_schema_are_used_there() {
    let schema = schema();
    let other = format!("Other_{}", unique());
    schema.client().batch_execute(&format!("CREATE SCHEMA \"{other}\"")).unwrap();
    let client = PgLockClient::builder().schema(&other).connect(&schema.url()).unwrap();
    works(&client, "a");
    let mut observer = schema.client();
    assert_eq!(indexes(&mut observer, &other).len(), 4);
    assert_eq!(indexes(&mut observer, schema.name()).len(), 0);
    observer.batch_execute(&format!("DROP SCHEMA \"{other}\" CASCADE")).unwrap();
}

#[test]
fn twenty_processes_may_set_up_at_once() {
    worker::part("set up", |parent| {
        let builder =
            PgLockClient::builder().auto_create_tables(false).operation_timeout(crate::support::LIMIT);
        let client = builder.connect(&parent.arg("url")).unwrap();
        loop {
            parent.say("ready");
            parent.hear();
            match client.setup_schema() {
                Ok(()) => parent.say("done"),
                Err(error) => parent.say(&format!("{error:?}")),
            }
        }
    });
    let schema = schema();
    let url = schema.url();
    let mut workers: Vec<_> = (0..20)
        .map(|_| Worker::start("twenty_processes_may_set_up_at_once", "set up", &[("url", &url)]))
        .collect();
    let mut admin = schema.client();
    for round in 0..50 {
        for worker in &mut workers {
            worker.expect("ready");
        }
        for worker in &mut workers {
            worker.tell("go");
        }
        for worker in &mut workers {
            assert_eq!(worker.hear(), "done", "round {round}");
        }
        assert_eq!(indexes(&mut admin, schema.name()).len(), 4, "round {round}");
        admin.batch_execute("DROP TABLE syncguard_locks, syncguard_fence_counters").unwrap();
    }
}

#[test]
fn a_role_that_may_not_create_needs_the_right_only_if_something_is_missing() {
    let place = place();
    let role = Role::without_rights(&place.schema);
    let name = role.name();
    place.stored.run(&format!(
        "GRANT USAGE ON SCHEMA {} TO {name}; GRANT SELECT, INSERT, UPDATE, DELETE ON syncguard_locks TO {name}; \
         GRANT SELECT, INSERT, UPDATE ON syncguard_fence_counters TO {name}",
        place.schema.name()
    ));
    let client = role.connect(PgLockClient::builder()).unwrap();
    client.setup_schema().unwrap();
    works(&client, &place.key("a"));
    for missing in ["DROP INDEX idx_syncguard_locks_expires", "DROP TABLE syncguard_locks"] {
        place.stored.run(missing);
        let error = client.setup_schema().unwrap_err();
        assert_eq!(error.code(), ErrorCode::AuthFailed, "{missing}: {error:?}");
        for part in ["42501", "schema.sql", "auto_create_tables(false)"] {
            assert!(error.to_string().contains(part), "{error}");
        }
    }
    let error = role.connect(PgLockClient::builder().table_name("others")).unwrap_err();
    assert_eq!(error.code(), ErrorCode::AuthFailed, "{error:?}");
}

/// Runs one of PostgreSQL's own programs.
fn run(program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(binaries().dir.join(program));
    let output = command.args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_schema_file_and_set_up_make_the_same() {
    let mut admin = server().client();
    let databases = [unique(), unique()].map(|name| format!("db_{name}"));
    let urls = databases.clone().map(|name| {
        admin.batch_execute(&format!("CREATE DATABASE {name}")).unwrap();
        server().url().rsplit_once('/').unwrap().0.to_owned() + "/" + &name
    });
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/schema.sql");
    for _ in 0..2 {
        run("psql", &["--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--file", file, &urls[0]]);
    }
    PgLockClient::builder().create_members_table(true).connect(&urls[1]).unwrap();
    let dumps = urls.clone().map(|url| {
        let dump = run("pg_dump", &["--schema-only", &url]);
        // Newer versions add two lines with a random word.
        dump.lines().filter(|line| !line.starts_with('\\')).map(str::to_owned).collect::<Vec<_>>()
    });
    assert_eq!(dumps[0], dumps[1]);
    assert!(dumps[0].iter().any(|line| line.contains("CREATE TABLE public.syncguard_locks")));
    // And a client without a right to create works on what the file made.
    let client = PgLockClient::builder().auto_create_tables(false).connect(&urls[0]).unwrap();
    works(&client, "a");
    drop(client);
    for name in databases {
        admin.batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).unwrap();
    }
}

/// An address where nobody ever answers, and whether somebody has come by.
fn silent() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url = format!("postgresql://postgres@{}/postgres", listener.local_addr().unwrap());
    (listener, url)
}

#[test]
fn without_table_creation_building_a_client_does_no_io() {
    let (listener, url) = silent();
    let clients: Vec<_> =
        (0..100).map(|_| PgLockClient::builder().auto_create_tables(false).connect(&url).unwrap()).collect();
    assert_eq!(clients[0].capabilities().backend, "postgres");
    let pool = {
        let manager = r2d2_postgres::PostgresConnectionManager::new(url.parse().unwrap(), NoTls);
        r2d2::Pool::builder().min_idle(Some(0)).max_size(2).build_unchecked(manager)
    };
    for _ in 0..100 {
        PgLockClient::builder().auto_create_tables(false).build(pool.clone()).unwrap();
    }
    drop(clients);
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "somebody connected");
    assert_eq!(pool.state().connections, 0);

    let schema = schema();
    let client = PgLockClient::builder().auto_create_tables(false).connect(&schema.url()).unwrap();
    let error = client.acquire("a", TTL).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    assert!(error.to_string().contains("setup_schema"), "{error}");
    assert!(indexes(&mut schema.client(), schema.name()).is_empty(), "nothing was created");
    client.setup_schema().unwrap();
    works(&client, "a");
}

#[test]
fn what_is_configured_wrongly_is_said_before_anything_is_sent() {
    let (listener, url) = silent();
    let long = "x".repeat(64);
    let mut bad: Vec<(PgLockClientBuilder, &str)> = Vec::new();
    for name in
        ["", "1abc", "a-b", "a b", "a\"b", "a;b", "a.b", "a\0b", "a'b", "a\\b", "--", "\u{e9}", long.as_str()]
    {
        bad.push((PgLockClient::builder().table_name(name), "table_name"));
        bad.push((PgLockClient::builder().fence_table_name(name), "fence_table_name"));
        bad.push((PgLockClient::builder().schema(name), "schema"));
    }
    bad.push((PgLockClient::builder().table_name("same").fence_table_name("same"), "fence_table_name"));
    bad.push((PgLockClient::builder().table_name("syncguard_fence_counters"), "fence_table_name"));
    bad.push((PgLockClient::builder().max_connections(0), "max_connections"));
    bad.push((PgLockClient::builder().operation_timeout(Duration::ZERO), "operation_timeout"));
    bad.push((PgLockClient::builder().connection_timeout(Duration::ZERO), "connection_timeout"));
    bad.push((PgLockClient::builder().dispose_timeout(Duration::from_micros(999)), "dispose_timeout"));
    for (builder, option) in bad {
        for create in [true, false] {
            let error = builder.clone().auto_create_tables(create).connect(&url).unwrap_err();
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{builder:?}");
            assert!(error.to_string().contains(option), "{builder:?}: {error}");
        }
    }
    for url in ["", "nonsense", "postgresql://", "postgresql:///db", "host=", "port=99999 host=x"] {
        assert_eq!(PgLockClient::connect(url).unwrap_err().code(), ErrorCode::InvalidArgument, "{url}");
    }
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "somebody connected");
}

#[test]
fn generated_timestamp_columns_disturb_nothing() {
    let place = place();
    place.stored.run(
        "ALTER TABLE syncguard_locks \
           ADD COLUMN expires_at_ts timestamptz GENERATED ALWAYS AS (to_timestamp(expires_at_ms / 1000.0)) STORED, \
           ADD COLUMN acquired_at_ts timestamptz GENERATED ALWAYS AS (to_timestamp(acquired_at_ms / 1000.0)) STORED",
    );
    works(&place.client, &place.key("a"));
    let key = place.key("b");
    let grant = place.client.acquire(&key, MAX_TTL).unwrap().acquired().unwrap();
    let sql =
        "SELECT round(extract(epoch FROM expires_at_ts) * 1000)::int8 FROM syncguard_locks WHERE key = $1";
    assert_eq!(place.stored.one(sql, &[&key]).get::<_, i64>(0), grant.expires_at_ms);
    place.client.setup_schema().unwrap();
    assert_eq!(place.client.operator().holders(10).unwrap().len(), 1);
}

#[test]
fn a_fence_table_without_a_place_for_the_key_serves_and_one_with_it_can_stay_empty() {
    let schema = schema();
    schema
        .client()
        .batch_execute("CREATE TABLE syncguard_fence_counters (fence_key text PRIMARY KEY, fence bigint NOT NULL DEFAULT 0)")
        .unwrap();
    let place = Place::new(schema);
    let key = place.key("a");
    works(&place.client, &key);
    assert_eq!(place.client.operator().break_lock(&key, "a test").unwrap().fence.get(), 2);
    assert_eq!(place.stored.counter(&key), Some(2));
    assert_eq!(indexes(&mut place.schema.client(), place.schema.name()).len(), 4);

    let place = crate::support::place();
    let noted = |key: &str| -> Option<String> {
        let sql = "SELECT key_debug FROM syncguard_fence_counters WHERE fence_key = 'fence:' || $1";
        place.stored.one(sql, &[&key]).get(0)
    };
    let (noting, silent) = (place.key("cafe\u{301}"), place.key("b"));
    works(&place.client, &noting);
    assert_eq!(noted(&place.key("caf\u{e9}")).as_deref(), Some(place.key("caf\u{e9}").as_str()), "in NFC");
    works(&place.build(&unique(), PgLockClient::builder().store_key_debug(false)), &silent);
    assert_eq!(noted(&silent), None);
}

#[test]
fn a_database_that_cannot_hold_every_key_is_refused() {
    let mut admin = server().client();
    let name = format!("db_{}", unique());
    admin
        .batch_execute(&format!(
            "CREATE DATABASE {name} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        ))
        .unwrap();
    let url = server().url().rsplit_once('/').unwrap().0.to_owned() + "/" + &name;
    let error = PgLockClient::connect(&url).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    assert!(error.to_string().contains("UTF8"), "{error}");
    admin.batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).unwrap();
}

#[test]
fn a_table_that_a_crash_would_empty_is_warned_of_once() {
    let place = place();
    place.stored.run("ALTER TABLE syncguard_fence_counters SET UNLOGGED");
    let log = logs::capture();
    let client = PgLockClient::connect(&place.schema.url()).unwrap();
    for _ in 0..3 {
        works(&client, &place.key("a"));
        client.setup_schema().unwrap();
    }
    let warnings: Vec<_> =
        log.of_this_thread().into_iter().filter(|line| line.level <= Level::Warn).collect();
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    assert!(warnings[0].text.contains("UNLOGGED"), "{warnings:#?}");
}

#[test]
fn the_counter_is_a_number_and_the_rows_fence_fifteen_digits() {
    let place = place();
    let key = place.key("a");
    for _ in 0..41 {
        let grant = place.hold(&key);
        assert_eq!(place.client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
    }
    place.hold(&key);
    assert_eq!(place.stored.counter(&key), Some(42));
    assert_eq!(place.stored.row(&key).unwrap().fence, "000000000000042");
    // The indexes refuse what must not be twice.
    let row = place.stored.row(&key).unwrap();
    for (key, lock_id) in [(key.as_str(), id("other").as_str()), ("other", row.lock_id.as_str())] {
        let sql = "INSERT INTO syncguard_locks VALUES ($1, $2, 1, 1, '1', 'x')";
        let error = Stored::new(&place.schema).client().execute(sql, &[&key, &lock_id]).unwrap_err();
        assert_eq!(error.code().map(postgres::error::SqlState::code), Some("23505"));
    }
}

#[test]
fn the_default_ttl_is_thirty_seconds() {
    let place = place();
    let guard = place.client.lock("a").unwrap();
    let row = place.stored.row("a").unwrap();
    assert_eq!(row.expires_at_ms - row.acquired_at_ms, 30_000);
    assert_eq!(guard.expires_at_ms(), row.expires_at_ms);
}

#[test]
fn where_the_tables_are_is_logged_and_a_schema_per_role_is_warned_of() {
    let schema = schema();
    let role = Role::new(&schema);
    let own = role.name();
    schema.client().batch_execute(&format!("CREATE SCHEMA {own} AUTHORIZATION {own}")).unwrap();
    let connect = |builder: PgLockClientBuilder| {
        let log = logs::capture();
        let client = builder.connect_with(role.config_with_own_path(), NoTls).unwrap();
        works(&client, &format!("a-{own}"));
        let lines = log.of_this_thread();
        let about =
            |level, word: &str| lines.iter().filter(|l| l.level == level && l.text.contains(word)).count();
        (about(Level::Info, "were made"), about(Level::Info, own), about(Level::Warn, "$user"))
    };
    // The server's default path: "$user", public.
    assert_eq!(connect(PgLockClient::builder()), (1, 2, 1), "made there, found there, and that is dangerous");
    assert_eq!(connect(PgLockClient::builder()), (0, 1, 1));
    assert_eq!(connect(PgLockClient::builder().auto_create_tables(false)), (0, 1, 1), "at the first use");
    assert_eq!(connect(PgLockClient::builder().schema(own)), (0, 1, 0), "who names the schema knows");
    role.set(&schema, "search_path", own);
    assert_eq!(connect(PgLockClient::builder()), (0, 1, 0));
    // Without a schema of that name nothing differs from role to role.
    let log = logs::capture();
    let other = Role::new(&schema);
    let client = other.connect(PgLockClient::builder()).unwrap();
    client.setup_schema().unwrap();
    assert!(log.of_this_thread().iter().all(|line| !line.text.contains("$user")));
}
