//! Servers that speak PostgreSQL's protocol and are something else: a proxy plays their answers, and none is trusted.

use syncguard::{ErrorCode, LockError, PgLockClient};

use crate::support::{Config, Proxy, Server, TTL};

/// What an engine answers otherwise: pieces of our SQL, and what stands there instead.
type Answers = &'static [(&'static str, &'static str)];

const VERSION: &str = "pg_catalog.version()";
const TRY: &str = "pg_catalog.pg_try_advisory_xact_lock(";
const ISOLATION: &str = "pg_catalog.current_setting('transaction_isolation')";
const SET_COMMIT: &str = "pg_catalog.set_config('synchronous_commit', 'on', true)";
const READ_COMMITTED: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";
const XMIN: &str = "c.xmin::pg_catalog.text";

const COCKROACH: (&str, &str) =
    (VERSION, "pg_catalog.concat('CockroachDB CCL v23.1.11 (x86_64-pc-linux-gnu, built 2023/09/27)')");
const COCKROACH_PLAIN: (&str, &str) = ("SELECT version()", "SELECT 'CockroachDB CCL v23.1.11 (x86_64)'");

/// An engine, its answers, and what the error has to say.
const ENGINES: &[(&str, Answers, &[&str])] = &[
    (
        "CockroachDB with stubs",
        &[COCKROACH, (TRY, "public.stub("), (ISOLATION, "pg_catalog.concat('serializable')")],
        &["CockroachDB CCL v23.1.11", "advisory locks", "READ COMMITTED", "\"serializable\""],
    ),
    ("CockroachDB with real locks", &[COCKROACH], &["CockroachDB CCL v23.1.11"]),
    (
        "CockroachDB that does not take the syntax",
        &[COCKROACH_PLAIN, ("WITH taken AS MATERIALIZED", "WITH taken AS DISTRIBUTED")],
        &["CockroachDB CCL v23.1.11"],
    ),
    (
        "YugabyteDB",
        &[(VERSION, "pg_catalog.concat('PostgreSQL 15.12-YB-2025.1.0.0-b0 on x86_64-pc-linux-gnu')")],
        &["YugabyteDB"],
    ),
    (
        "Aurora DSQL",
        &[
            (VERSION, "pg_catalog.concat('PostgreSQL 16')"),
            (TRY, "pg_catalog.pg_no_such_function("),
            (READ_COMMITTED, "SELECT pg_catalog.pg_no_such_function()"),
        ],
        &["calls itself PostgreSQL", "advisory locks", "READ COMMITTED"],
    ),
    (
        "Spanner",
        &[
            (VERSION, "pg_catalog.concat('PostgreSQL 14.1')"),
            (TRY, "pg_catalog.pg_no_such_function("),
            ("SELECT c.xmin, c.xmax", "SELECT c.no_such_column"),
        ],
        &["calls itself PostgreSQL", "advisory locks", "xmin"],
    ),
    ("stubs under PostgreSQL's name", &[(TRY, "public.stub(")], &["advisory locks", "pg_locks"]),
    (
        "locks that show and do not exclude",
        &[
            ("SELECT pg_catalog.pg_try_advisory_xact_lock(", "SELECT public.stub("),
            ("(SELECT public.stub(", "(SELECT pg_catalog.pg_try_advisory_xact_lock("),
        ],
        &["two sessions at once"],
    ),
    (
        "another isolation",
        &[(ISOLATION, "pg_catalog.concat('repeatable read')")],
        &["READ COMMITTED", "repeatable read"],
    ),
    ("row versions that say nothing", &[(XMIN, "pg_catalog.concat('0')")], &["xmin"]),
    (
        "a level of commits that cannot be set",
        &[(SET_COMMIT, "pg_catalog.concat('off')")],
        &["synchronous_commit"],
    ),
];

/// A server with what the stubs need.
fn server() -> Server {
    let server = Server::start(&Config::new());
    let stub = "CREATE FUNCTION public.stub(int8) RETURNS bool LANGUAGE sql AS 'SELECT true'";
    server.client().batch_execute(stub).unwrap();
    server
}

/// A proxy before the server that plays these answers.
fn playing(server: &Server, answers: &[(&'static str, &'static str)]) -> (Proxy, String) {
    let (proxy, answers) = (Proxy::start(server.port()), answers.to_vec());
    proxy.rewrite(move |said| {
        answers.iter().fold(said.text.to_owned(), |text, (from, to)| text.replace(from, to))
    });
    let url = proxy.url(server.url());
    (proxy, url)
}

#[track_caller]
fn refuses(name: &str, error: &LockError, said: &[&str]) {
    let text = error.to_string();
    println!("{name}: {text}");
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{name}: {error:?}");
    for piece in said {
        assert!(text.contains(piece), "{name} is to be told {piece:?}: {text}");
    }
}

#[test]
fn no_engine_that_looks_like_postgresql_is_trusted() {
    let server = server();
    for (name, answers, said) in ENGINES {
        let (proxy, url) = playing(&server, answers);
        refuses(name, &PgLockClient::connect(&url).unwrap_err(), said);
        assert!(proxy.rewritten() > 0, "{name} answers as itself");
        let tables = "SELECT pg_catalog.to_regclass('syncguard_locks') IS NULL";
        assert!(
            server.client().query_one(tables, &[]).unwrap().get::<_, bool>(0),
            "{name}: nothing is made there"
        );
    }
}

#[test]
fn an_engine_with_tables_in_it_is_refused_at_first_use_and_at_each_later_one() {
    let server = server();
    let holder = PgLockClient::connect(server.url()).unwrap();
    for (name, answers, said) in ENGINES {
        let (_proxy, url) = playing(&server, answers);
        let client = PgLockClient::builder().auto_create_tables(false).connect(&url).unwrap();
        // What only two sessions show is asked where tables are made.
        if said.contains(&"two sessions at once") {
            continue;
        }
        for _ in 0..2 {
            refuses(name, &client.acquire("k", TTL).unwrap_err(), said);
        }
        refuses(name, &client.is_locked("k").unwrap_err(), said);
    }
    assert!(!holder.is_locked("k").unwrap());
}

/// An engine may lack what the first look of `check` asks for, so that this fails before the engine is known.
#[test]
fn a_check_names_an_engine_that_looks_like_postgresql() {
    const LACKING: (&str, &str) =
        ("current_setting('full_page_writes')", "current_setting('no.such_setting')");
    let server = server();
    drop(PgLockClient::connect(server.url()).unwrap());
    for (name, answers, said) in ENGINES {
        if said.contains(&"two sessions at once") {
            continue;
        }
        for answers in [answers.to_vec(), [answers, &[LACKING][..]].concat()] {
            let (_proxy, url) = playing(&server, &answers);
            let client = PgLockClient::builder().auto_create_tables(false).connect(&url).unwrap();
            refuses(name, &client.operator().check().unwrap_err(), said);
        }
    }
    // What fails on PostgreSQL itself is said as it is.
    let (_proxy, url) = playing(&server, &[LACKING]);
    let client = PgLockClient::builder().auto_create_tables(false).connect(&url).unwrap();
    let error = client.operator().check().unwrap_err();
    assert_eq!(error.sqlstate(), Some("42704"), "{error}");
    assert!(!error.to_string().contains("PostgreSQL server"), "{error}");
}

#[test]
fn postgresql_itself_is_trusted_behind_the_same_proxy() {
    let server = server();
    let (_proxy, url) = playing(&server, &[("a text that nothing has", "")]);
    let client = PgLockClient::connect(&url).unwrap();
    assert!(client.acquire("k", TTL).unwrap().acquired().is_some());
}

/// The lock tables as Citus has them: its catalog is played by a table of ours.
#[test]
fn tables_that_citus_distributes_are_refused_and_those_that_it_leaves_alone_are_not() {
    const CITUS: Answers = &[
        ("e.extname OPERATOR(pg_catalog.=) 'citus'", "e.extname OPERATOR(pg_catalog.=) 'plpgsql'"),
        ("pg_catalog.pg_dist_partition", "public.pg_dist_partition"),
    ];
    let server = server();
    PgLockClient::connect(server.url()).unwrap();
    let mut sql = server.client();
    sql.batch_execute("CREATE TABLE public.pg_dist_partition (logicalrelid regclass)").unwrap();
    let (_proxy, url) = playing(&server, CITUS);
    let client = PgLockClient::connect(&url).unwrap();
    assert!(client.acquire("k", TTL).unwrap().acquired().is_some());
    for table in ["syncguard_locks", "syncguard_fence_counters"] {
        let distribute = format!(
            "DELETE FROM public.pg_dist_partition; INSERT INTO public.pg_dist_partition VALUES ('{table}')"
        );
        sql.batch_execute(&distribute).unwrap();
        refuses(table, &PgLockClient::connect(&url).unwrap_err(), &["Citus", "undistribute_table"]);
    }
}

#[test]
fn tables_in_another_storage_and_views_are_refused() {
    let server = server();
    PgLockClient::connect(server.url()).unwrap();
    let mut sql = server.client();
    sql.batch_execute(
        "CREATE ACCESS METHOD columns TYPE TABLE HANDLER heap_tableam_handler;
         CREATE SCHEMA columns;
         CREATE TABLE columns.syncguard_locks (LIKE public.syncguard_locks INCLUDING ALL) USING columns;
         CREATE TABLE columns.syncguard_fence_counters (LIKE public.syncguard_fence_counters INCLUDING ALL);
         CREATE SCHEMA views;
         CREATE TABLE views.syncguard_locks (LIKE public.syncguard_locks INCLUDING ALL);
         CREATE VIEW views.syncguard_fence_counters AS SELECT * FROM public.syncguard_fence_counters",
    )
    .unwrap();
    for (schema, said) in [("columns", "\"columns\""), ("views", "\"v\"")] {
        let client =
            PgLockClient::builder().schema(schema).auto_create_tables(false).connect(server.url()).unwrap();
        refuses(schema, &client.acquire("k", TTL).unwrap_err(), &["storage", said]);
    }
}
