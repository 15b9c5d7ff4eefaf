//! Names of schemas and tables, and connection strings.

use std::fmt::Write as _;

use super::*;
use postgres::Client;
use r2d2_postgres::PostgresConnectionManager;

/// What PostgreSQL allows as a name and careless text does not survive.
fn hostile_names() -> Vec<String> {
    let mut names: Vec<String> = [
        "quote\"inside",
        "\"",
        "\"\"",
        "x\"; DROP TABLE public.canary; --",
        "x\".\"y",
        "it's",
        "back\\slash",
        "dollar$1",
        "$1",
        "$body$",
        "semi;colon",
        "dash--dash",
        "star/*star",
        "per%cent %s {}",
        " leading and trailing ",
        "line\nbreak\ttab",
        "Mixed Case",
        "select",
        "p.g",
        "schl\u{fc}ssel",
        "\u{1F512}",
        "\u{202e}txet",
        "syncguard_locks",
        "syncguard_fence_counters",
    ]
    .map(str::to_owned)
    .to_vec();
    // As long as a name may be, the last character of two bytes: cut one byte earlier it were none.
    names.push(format!("{}\u{fc}", "n".repeat(61)));
    names.push("\"".repeat(63));
    names
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A database of its own, so that schemas may have any name. Dropped at the end.
struct Database(String);

impl Database {
    fn new() -> (Self, Config, Client) {
        let name = format!("d{}", unique());
        server().client().batch_execute(&format!("CREATE DATABASE {name}")).unwrap();
        let mut config: Config = server().url().parse().unwrap();
        config.dbname(&name);
        let admin = config.connect(NoTls).unwrap();
        admin_canary(admin, Self(name), config)
    }
}

fn admin_canary(mut admin: Client, database: Database, config: Config) -> (Database, Config, Client) {
    admin.batch_execute("CREATE TABLE public.canary (alive bool)").unwrap();
    (database, config, admin)
}

impl Drop for Database {
    fn drop(&mut self) {
        let sql = format!("DROP DATABASE {} WITH (FORCE)", self.0);
        assert!(server().client().batch_execute(&sql).is_ok() || std::thread::panicking());
    }
}

/// Occupies a name, so that the client cannot prepare its statements and writes them out.
#[derive(Debug)]
struct OnePrepared(String);

impl r2d2::CustomizeConnection<Client, postgres::Error> for OnePrepared {
    fn on_acquire(&self, connection: &mut Client) -> std::result::Result<(), postgres::Error> {
        connection.batch_execute(&format!("PREPARE {}(text) AS SELECT 1", self.0))
    }
}

/// The name of a statement that a client prepares for these tables.
fn a_statement_of(config: &Config) -> String {
    let manager = PostgresConnectionManager::new(config.clone(), NoTls);
    let pool = r2d2::Pool::builder().max_size(1).build(manager).unwrap();
    PgLockClient::builder().build(pool.clone()).unwrap().is_locked("x").unwrap();
    let sql = "SELECT name FROM pg_prepared_statements WHERE name LIKE 'sg\\_queue%' ORDER BY name LIMIT 1";
    pool.get().unwrap().query_one(sql, &[]).unwrap().get(0)
}

#[test]
fn a_schema_that_the_search_path_leads_to_may_have_any_name() {
    let (database, config, mut admin) = Database::new();
    for name in hostile_names() {
        admin.batch_execute(&format!("CREATE SCHEMA {}", quoted(&name))).unwrap();
        let path =
            format!("ALTER ROLE postgres IN DATABASE {} SET search_path TO {}", database.0, quoted(&name));
        admin.batch_execute(&path).unwrap();
        // Created there, and found there.
        for what in ["created", "found"] {
            works(
                &connect(PgLockClient::builder(), config.clone()).unwrap(),
                "a key",
                &format!("{name:?} {what}"),
            );
        }
        let sql = "SELECT count(*) FROM pg_tables WHERE schemaname = $1 AND tablename LIKE 'syncguard%'";
        let tables: i64 = admin.query_one(sql, &[&name]).unwrap().get(0);
        assert_eq!(tables, 2, "{name:?}");
        // The same where statements are written out, as behind a pooler; the key may look like a name.
        let manager = PostgresConnectionManager::new(config.clone(), NoTls);
        let occupied = OnePrepared(a_statement_of(&config));
        let pool = r2d2::Pool::builder().max_size(2).connection_customizer(Box::new(occupied));
        let plain = PgLockClient::builder().build(pool.build(manager).unwrap()).unwrap();
        works(&plain, "\".\"'); DROP TABLE public.canary; --", &format!("{name:?} written out"));
        let mut tx = admin.transaction().unwrap();
        let grant = plain.acquire("fenced", TTL).unwrap().acquired().unwrap();
        plain.assert_fence(&mut tx, "fenced", grant.fence).unwrap();
        tx.rollback().unwrap();
        drop(plain);
        admin.batch_execute(&format!("DROP SCHEMA {} CASCADE", quoted(&name))).unwrap();
    }
    admin.batch_execute("SELECT FROM public.canary").unwrap();
}

#[test]
fn configured_names_are_plain_or_refused_before_anything_is_sent() {
    let schema = crate::support::schema();
    schema.client().batch_execute("CREATE TABLE canary (alive bool)").unwrap();
    let setters: [fn(PgLockClientBuilder, &str) -> PgLockClientBuilder; 3] = [
        |builder, name| builder.table_name(name),
        |builder, name| builder.fence_table_name(name),
        |builder, name| builder.schema(name),
    ];
    // Nobody listens there: whoever connects first would fail otherwise.
    let nowhere: Config = "postgresql://postgres@127.0.0.1:1/postgres".parse().unwrap();
    let plain = |name: &str| {
        name.len() <= 63
            && name.bytes().next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    };
    let mut names = hostile_names();
    names.extend([String::new(), "a\0b".to_owned(), "n".repeat(64), "1a".to_owned(), "a.b".to_owned()]);
    for name in names.iter().filter(|name| !plain(name)) {
        for set in setters {
            let error = connect(set(PgLockClient::builder(), name), nowhere.clone()).unwrap_err();
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{name:?}: {error:?}");
            assert!(!error.to_string().contains(name.as_str()) || name.trim().len() < 3, "{error}");
        }
    }
    // Reserved words, mixed case, the longest, and each other's defaults are plain.
    let longest = (format!("{}a", "n".repeat(62)), format!("{}b", "n".repeat(62)));
    for (locks, fences) in [
        ("select", "table"),
        ("User", "user"),
        (longest.0.as_str(), longest.1.as_str()),
        ("syncguard_fence_counters", "syncguard_locks"),
    ] {
        let builder = PgLockClient::builder().table_name(locks).fence_table_name(fences);
        works(&connect(builder, schema.config()).unwrap(), "a key", locks);
    }
    schema.client().batch_execute("SELECT FROM canary").unwrap();
}

#[test]
fn connection_strings_are_read_or_refused_and_never_shown() {
    let marks = ["MARKER", "SECRET"];
    let strings = [
        "",
        " ",
        "\0",
        "postgresql://",
        "postgresql://u:MARKER@",
        "postgresql://u:MARKER@[::1",
        "postgresql://u:MARKER@h:99999999/d",
        "postgresql://u:MARKER@h/d?sslmode=MARKER",
        "postgresql://u:MARKER@h/d?MARKER=1",
        "postgresql://u:not?MARKER=escaped@h/d",
        "host=h password=two MARKER=words",
        "postgresql://u:%4DARKER%@h/d",
        "postgresql://u:MARKER@h/%00",
        "host=h password='MARKER",
        "host=h password=MARKER\\",
        "password=MARKER",
        "host=h port=MARKER",
        "host=h MARKER",
        "host=h connect_timeout=MARKER password=SECRET",
        "host=a,b,c port=1,2 password=MARKER",
        "postgresql://u:MARKER@h/d?options=-c%20search_path%3D\0",
        "mysql://u:MARKER@h/d",
        "\u{feff}postgresql://u:MARKER@h/d",
    ];
    for text in strings {
        let connected = PgLockClient::builder()
            .auto_create_tables(false)
            .connection_timeout(std::time::Duration::from_millis(50))
            .operation_timeout(std::time::Duration::from_millis(50))
            .connect(text);
        let mut shown = format!("{connected:?}");
        match connected {
            Ok(client) => {
                let error = client.acquire("a key", TTL).unwrap_err();
                shown = format!("{shown}{}", chain(&error));
            }
            Err(error) => {
                assert_eq!(error.code(), ErrorCode::InvalidArgument, "{text:?}: {error:?}");
                shown = format!("{shown}{}", chain(&error));
            }
        }
        assert!(!marks.iter().any(|mark| shown.contains(mark)), "{text:?} is shown: {shown}");
    }
}

/// The error and its causes, as people print them.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut shown = String::new();
    for error in std::iter::successors(Some(error), |error| error.source()) {
        let _ = write!(shown, "{error} {error:?} ");
    }
    shown
}
