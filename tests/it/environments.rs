//! Nothing that a session carries changes an answer: the contract, a renewal, a session lock, the
//! operator's view and keys in other scripts, in every environment that a session can bring along.
//!
//! The run prints the table of `docs/reliability.md`:
//! `cargo test --all-features --test it environments:: -- --nocapture`.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::bouncer::Bouncer;
use crate::support::{
    Config, LIMIT, Role, Server, Stored, TTL, TestSchema, server, together, unique, wait_until,
};
use postgres::{Client, NoTls};
use r2d2_postgres::PostgresConnectionManager;
use syncguard::{
    AdvisoryKey, ErrorCode, Heartbeat, LockBackend, LockOptions, PgLockClient, PgLockClientBuilder,
};
use syncguard_contract::Harness;

/// Of two, three and four bytes in UTF-8; ISO 8859-1 has the first of them only.
const KEY: &str = "rechnung:m\u{fc}ller \u{65e5}\u{672c} \u{1f512} it's \\ $1";

/// What a session brings along.
#[derive(Clone, Copy)]
struct Environment {
    name: &'static str,
    /// Settings, as a role's defaults and as a caller's `SET`.
    settings: &'static [(&'static str, &'static str)],
    /// Another current role than the one that logged in.
    other_role: bool,
    /// Only a superuser may set this: a caller's connections have it from their role, too.
    privileged: bool,
}

const fn with(name: &'static str, settings: &'static [(&'static str, &'static str)]) -> Environment {
    Environment { name, settings, other_role: false, privileged: false }
}

const ENVIRONMENTS: &[Environment] = &[
    with("nothing", &[]),
    Environment { other_role: true, ..with("another current role", &[]) },
    with(
        "serializable, read-only, deferrable",
        &[
            ("default_transaction_isolation", "serializable"),
            ("default_transaction_read_only", "on"),
            ("default_transaction_deferrable", "on"),
        ],
    ),
    with("repeatable read", &[("default_transaction_isolation", "'repeatable read'")]),
    with("client_encoding LATIN1", &[("client_encoding", "'LATIN1'")]),
    with("client_encoding WIN1252", &[("client_encoding", "'WIN1252'")]),
    with("client_encoding SJIS", &[("client_encoding", "'SJIS'")]),
    with("client_encoding EUC_JP", &[("client_encoding", "'EUC_JP'")]),
    with("client_encoding GB18030", &[("client_encoding", "'GB18030'")]),
    with("client_encoding SQL_ASCII", &[("client_encoding", "'SQL_ASCII'")]),
    Environment { privileged: true, ..with("track_activities off", &[("track_activities", "off")]) },
    with("client_min_messages error", &[("client_min_messages", "error")]),
    with("client_min_messages debug1", &[("client_min_messages", "debug1")]),
    with(
        "time zone, DateStyle, IntervalStyle, extra_float_digits",
        &[
            ("timezone", "'<odd>-13:17'"),
            ("datestyle", "'SQL, DMY'"),
            ("intervalstyle", "sql_standard"),
            ("extra_float_digits", "'-15'"),
        ],
    ),
    with(
        "standard_conforming_strings off, backslash_quote off",
        &[
            ("standard_conforming_strings", "off"),
            ("backslash_quote", "off"),
            ("escape_string_warning", "on"),
        ],
    ),
    with("search_path empty", &[("search_path", "''")]),
    with("search_path pg_temp", &[("search_path", "pg_temp")]),
    with("synchronous_commit off", &[("synchronous_commit", "off")]),
    with("synchronous_commit local", &[("synchronous_commit", "local")]),
    with(
        "limits of its own",
        &[
            ("lock_timeout", "1"),
            ("statement_timeout", "200"),
            ("idle_in_transaction_session_timeout", "300"),
        ],
    ),
    with("row_security on", &[("row_security", "on")]),
    with("row_security off", &[("row_security", "off")]),
    with(
        "plans and comparisons",
        &[
            ("plan_cache_mode", "force_generic_plan"),
            ("enable_indexscan", "off"),
            ("transform_null_equals", "on"),
            ("array_nulls", "off"),
        ],
    ),
];

/// One environment on one kind of client.
struct Bench {
    client: PgLockClient,
    stored: Stored,
}

impl Harness for Bench {
    fn backend(&self) -> Arc<dyn LockBackend> {
        Arc::new(self.client.clone())
    }

    fn now_ms(&self) -> i64 {
        self.stored.now_ms()
    }

    fn age(&self, key: &str, past_expiry_ms: i64) {
        self.stored.age(key, past_expiry_ms);
    }

    fn has_row(&self, key: &str) -> bool {
        self.stored.row(key).is_some()
    }

    fn remove_row(&self, key: &str) {
        self.stored.remove(key);
    }

    fn counter(&self, key: &str) -> Option<u64> {
        self.stored.counter(key).map(|counter| u64::try_from(counter).unwrap())
    }

    fn set_counter(&self, key: &str, value: u64) {
        self.stored.set_counter(key, i64::try_from(value).unwrap());
    }
}

#[derive(Debug)]
struct Setting(String);

impl r2d2::CustomizeConnection<Client, postgres::Error> for Setting {
    fn on_acquire(&self, client: &mut Client) -> Result<(), postgres::Error> {
        client.batch_execute(&self.0)
    }
}

/// A caller's pool whose connections begin with these statements.
fn callers_pool(config: postgres::Config, statements: &str) -> r2d2::Pool<PostgresConnectionManager<NoTls>> {
    r2d2::Pool::builder()
        .max_size(12)
        .min_idle(Some(0))
        .test_on_check_out(false)
        .connection_customizer(Box::new(Setting(statements.to_owned())))
        .build(PostgresConnectionManager::new(config, NoTls))
        .unwrap()
}

/// The builder for a schema whose tables exist: the session's own search path decides nothing.
fn builder(schema: &TestSchema) -> PgLockClientBuilder {
    PgLockClient::builder().schema(schema.name()).auto_create_tables(false)
}

fn prepared_schema() -> TestSchema {
    let schema = crate::support::schema();
    with_all_tables(&schema);
    schema
}

/// The two tables and the optional one, so that readers and owners are proved, too.
fn with_all_tables(schema: &TestSchema) {
    PgLockClient::builder().create_members_table(true).connect(&schema.url()).unwrap();
}

/// The whole contract, and what it does not ask. Whether session locks work here, too, or are refused.
fn prove(client: &PgLockClient, schema: &TestSchema, session_locks: bool, what: &str) {
    let bench = Bench { client: client.clone(), stored: Stored::new(schema) };
    syncguard_contract::run_all(&bench);
    // A key in other scripts is the same key for everybody, and comes back as it was.
    let plain = PgLockClient::builder().schema(schema.name()).connect(&schema.url()).unwrap();
    let options = LockOptions::new().ttl(Duration::from_secs(10)).timeout(LIMIT);
    let options = options.heartbeat(Heartbeat::Every(Duration::from_millis(200)));
    let guard = client.lock_with(KEY, &options).unwrap_or_else(|error| panic!("{what}: {error:?}"));
    assert!(plain.try_lock(KEY).unwrap().is_none(), "{what}: two holders");
    assert_eq!(bench.stored.row(KEY).expect("its row").user_key, KEY, "{what}");
    assert_eq!(client.get_by_key_raw(KEY).unwrap().expect("held").key, KEY, "{what}");
    let first = guard.expires_at_ms();
    wait_until(LIMIT, "it is renewed, again and again", || guard.expires_at_ms() > first + 1000);
    assert!(guard.is_held(), "{what}");
    let operator = client.operator();
    assert!(operator.counts().unwrap().live >= 1, "{what}");
    let held = operator.holders_raw(1000).unwrap();
    assert!(held.iter().any(|held| held.key == KEY), "{what}");
    assert_eq!(operator.blocked(KEY).unwrap().len(), 0, "{what}");
    let fence = guard.fence();
    guard.release().unwrap();
    assert!(plain.try_lock(KEY).unwrap().expect("it is free again").fence() > fence, "{what}");
    let key = AdvisoryKey::from_text(&unique());
    match client.try_advisory_lock(&key) {
        Ok(Some(_held)) if session_locks => {
            assert!(plain.try_advisory_lock(&key).unwrap().is_none(), "{what}");
        }
        Err(error) if !session_locks => assert_eq!(error.code(), ErrorCode::InvalidArgument, "{what}"),
        other => panic!("{what}: {other:?}"),
    }
}

/// A role with this environment, and the `SET`s that make the same on a caller's pool.
fn role(schema: &TestSchema, environment: &Environment) -> (Role, String, Option<String>) {
    let role = Role::new(schema);
    let mut admin = schema.client();
    let mut sets = String::new();
    let other = environment.other_role.then(|| format!("app_{}", unique()));
    let mut sql = String::new();
    let grantee = match &other {
        Some(app) => {
            let login = role.name();
            let name = schema.name();
            let _ = write!(
                sql,
                "CREATE ROLE {app} NOLOGIN; GRANT {app} TO {login}; ALTER ROLE {login} NOINHERIT; \
                 GRANT USAGE ON SCHEMA {name} TO {app};"
            );
            let _ = write!(sets, "SET ROLE {app};");
            app
        }
        None => role.name(),
    };
    let _ = write!(sql, "GRANT ALL ON ALL TABLES IN SCHEMA {} TO {grantee}", schema.name());
    admin.batch_execute(&sql).unwrap();
    if let Some(app) = &other {
        role.set(schema, "role", app);
    }
    for (setting, value) in environment.settings {
        role.set(schema, setting, value);
        if !environment.privileged {
            let _ = write!(sets, "SET {setting} TO {value};");
        }
    }
    (role, sets, other)
}

fn in_one(environment: &Environment) {
    let schema = prepared_schema();
    let (role, sets, other) = role(&schema, environment);
    let name = environment.name;
    let own = builder(&schema).connect_with(role.config_with_own_path(), NoTls).unwrap();
    prove(&own, &schema, true, &format!("{name}, sessions of its own"));
    drop(own);
    // The role is an ordinary one here: what the connection carries comes from `SET`, if it can.
    if !environment.privileged {
        schema.client().batch_execute(&format!("ALTER ROLE {} RESET ALL", role.name())).unwrap();
    }
    let pool = callers_pool(role.config_with_own_path(), &sets);
    let theirs = builder(&schema).build(pool.clone()).unwrap();
    prove(&theirs, &schema, true, &format!("{name}, a caller's pool"));
    fenced(&theirs, &pool, name);
    drop((theirs, pool));
    if let Some(app) = other {
        schema.client().batch_execute(&format!("DROP OWNED BY {app}; DROP ROLE {app}")).unwrap();
    }
}

/// Defaults of a database: a role that says nothing about them has all of them.
const OF_A_DATABASE: &[(&str, &str)] = &[
    ("default_transaction_isolation", "serializable"),
    ("default_transaction_read_only", "on"),
    ("client_encoding", "'LATIN1'"),
    ("client_min_messages", "error"),
    ("timezone", "'<odd>-13:17'"),
    ("standard_conforming_strings", "off"),
    ("synchronous_commit", "off"),
    ("lock_timeout", "1"),
    ("statement_timeout", "200"),
    ("idle_in_transaction_session_timeout", "300"),
    ("row_security", "off"),
    ("track_activities", "off"),
    ("search_path", "''"),
];

#[test]
fn nothing_that_a_database_sets_changes_an_answer() {
    let server = Server::start(&Config::new());
    let schema = server.schema();
    with_all_tables(&schema);
    let role = Role::new(&schema);
    let mut admin = schema.client();
    let grant = format!("GRANT ALL ON ALL TABLES IN SCHEMA {} TO {}", schema.name(), role.name());
    admin.batch_execute(&grant).unwrap();
    for (setting, value) in OF_A_DATABASE {
        // Whoever looks on has what is usual.
        let usual: String =
            admin.query_one("SELECT quote_literal(current_setting($1))", &[setting]).unwrap().get(0);
        let sql = format!(
            "ALTER ROLE postgres SET {setting} TO {usual}; ALTER DATABASE postgres SET {setting} TO {value}"
        );
        admin.batch_execute(&sql).unwrap();
    }
    let shown = role.config_with_own_path().connect(NoTls).unwrap().query_one("SHOW lock_timeout", &[]);
    assert_eq!(shown.unwrap().get::<_, String>(0), "1ms");
    let own = builder(&schema).connect_with(role.config_with_own_path(), NoTls).unwrap();
    prove(&own, &schema, true, "a database's settings, sessions of its own");
    drop(own);
    let pool = callers_pool(role.config_with_own_path(), "");
    let theirs = builder(&schema).build(pool.clone()).unwrap();
    prove(&theirs, &schema, true, "a database's settings, a caller's pool");
    fenced(&theirs, &pool, "a database's settings");
    println!("| ALTER DATABASE … SET, most of these at once | as in the contract | as in the contract |");
}

/// A guard's check inside the caller's own transaction, on a connection that carries all this.
fn fenced(client: &PgLockClient, pool: &r2d2::Pool<PostgresConnectionManager<NoTls>>, what: &str) {
    let guard = client.lock(KEY).unwrap();
    let mut connection = pool.get().unwrap();
    let builder = connection.build_transaction().read_only(false);
    let mut transaction = builder.isolation_level(postgres::IsolationLevel::ReadCommitted).start().unwrap();
    // As a caller's own transaction would: its limits are its own business.
    transaction.batch_execute("SET LOCAL lock_timeout TO 0").unwrap();
    guard.fence_transaction(&mut transaction).unwrap_or_else(|error| panic!("{what}: {error:?}"));
    transaction.commit().unwrap();
}

#[test]
fn nothing_that_a_session_carries_changes_an_answer() {
    let next = AtomicUsize::new(0);
    // Each in a thread of its own, a few at a time: they wait more than they work.
    together(4, |_| {
        while let Some(environment) = ENVIRONMENTS.get(next.fetch_add(1, Ordering::SeqCst)) {
            in_one(environment);
        }
    });
    // Whatever was wrong has failed before.
    println!("| what the session carries | sessions of its own | a caller's pool |\n| --- | --- | --- |");
    for environment in ENVIRONMENTS {
        println!("| {} | as in the contract | as in the contract |", environment.name);
    }
}

#[test]
fn the_contract_holds_behind_a_pooler_in_session_and_transaction_mode() {
    together(4, |n| {
        let mode = ["session", "transaction"].into_iter().nth(n / 2).unwrap();
        let own = n % 2 == 0;
        let size = ("default_pool_size", "20");
        let options = if own { "extra_float_digits" } else { "extra_float_digits,options" };
        let bouncer = Bouncer::start(&[("pool_mode", mode), size, ("ignore_startup_parameters", options)]);
        let schema = prepared_schema();
        let client = if own {
            builder(&schema).connect(&bouncer.url()).unwrap()
        } else {
            builder(&schema).build(callers_pool(bouncer.url().parse().unwrap(), "")).unwrap()
        };
        prove(&client, &schema, mode == "session", &format!("PgBouncer in {mode} mode, own: {own}"));
    });
    for (mode, locks) in [("session", "taken"), ("transaction", "refused")] {
        println!(
            "| PgBouncer, {mode} mode (session locks are {locks}) | as in the contract | as in the contract |"
        );
    }
}

#[test]
fn the_contract_holds_with_several_hosts_in_the_url() {
    let schema = prepared_schema();
    let port = crate::support::session_locks::server_port();
    let url = format!("user=postgres dbname=postgres host=127.0.0.1,localhost port={port},{port}");
    prove(&builder(&schema).connect(&url).unwrap(), &schema, true, "several hosts");
    println!("| several hosts in the url | as in the contract | |");
}

/// What a policy hides would look free, and which rows it hides may depend on the session.
#[test]
fn rows_that_a_policy_hides_are_an_error_and_never_an_answer() {
    let schema = prepared_schema();
    let (role, _, _) = role(&schema, &with("", &[("row_security", "on")]));
    let held = PgLockClient::connect(&schema.url()).unwrap().acquire(KEY, TTL).unwrap();
    let lock_id = held.acquired().expect("a new key").lock_id;
    schema
        .client()
        .batch_execute(
            "ALTER TABLE syncguard_locks ENABLE ROW LEVEL SECURITY; \
             CREATE POLICY mine ON syncguard_locks USING (user_key = current_setting('app.tenant', true))",
        )
        .unwrap();
    let own = builder(&schema).connect_with(role.config(), NoTls).unwrap();
    let theirs = builder(&schema).build(callers_pool(role.config(), "SET row_security TO on")).unwrap();
    for client in [own, theirs] {
        let errors = [
            client.is_locked(KEY).unwrap_err(),
            client.release(&lock_id).unwrap_err(),
            client.extend(&lock_id, TTL).unwrap_err(),
            client.acquire(KEY, TTL).unwrap_err(),
        ];
        for error in errors {
            assert_eq!((error.code(), error.sqlstate()), (ErrorCode::AuthFailed, Some("42501")), "{error:?}");
        }
    }
    assert!(server().client().is_valid(LIMIT).is_ok());
}
