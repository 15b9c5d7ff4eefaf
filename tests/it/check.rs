//! A look at what makes locks unsafe or slow: each finding is produced on a real server, and its command mends it.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod servers;

use crate::support::{LIMIT, Place, Role, TTL, place, server, unique};
use postgres::{Client, NoTls};
use syncguard::{Finding, PgLockClient, PgLockClientBuilder, Severity};

/// What a client that has yet to look at the tables finds.
fn check(url: &str) -> Vec<Finding> {
    patient().connect(url).unwrap().operator().check().unwrap()
}

/// All of a look has to be done within the time of one operation, or some of it is not looked at.
fn patient() -> PgLockClientBuilder {
    PgLockClient::builder().auto_create_tables(false).operation_timeout(LIMIT)
}

fn of<'a>(findings: &'a [Finding], code: &str) -> Vec<&'a Finding> {
    findings.iter().filter(|finding| finding.code == code).collect()
}

/// The one finding with this code.
#[track_caller]
fn one<'a>(findings: &'a [Finding], code: &str) -> &'a Finding {
    match *of(findings, code) {
        [finding] => finding,
        _ => panic!("{code}: {findings:#?}"),
    }
}

/// What the test server itself has, which is made for speed and asked by a superuser.
const OF_THE_SERVER: [&str; 4] = ["fsync", "full-page-writes", "commit-timestamps", "rights-to-spare"];

fn others(findings: &[Finding]) -> Vec<String> {
    let known = |finding: &&Finding| !OF_THE_SERVER.contains(&&*finding.code);
    // Other tests have transactions open, and connections.
    let elsewhere = |finding: &&Finding| {
        !["old-snapshot", "prepared-transaction"].contains(&&*finding.code)
            && !finding.seen.ends_with("connections are in use")
    };
    findings.iter().filter(known).filter(elsewhere).map(ToString::to_string).collect()
}

/// Carries out what a finding says, one statement after the other, as `psql` does.
#[track_caller]
fn mend(client: &mut Client, finding: &Finding) {
    let sql = finding.mend.split(" --").next().unwrap();
    for statement in sql.split("; ") {
        client.batch_execute(statement).unwrap_or_else(|error| panic!("{finding}: {error:?}"));
    }
}

const TRIGGER: &str =
    "CREATE FUNCTION t() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$; CREATE TRIGGER ";

#[test]
fn tables_of_ours_are_as_they_should_be() {
    let place = place();
    drop(place.client.lock("k").unwrap());
    let findings = check(&place.schema.url());
    assert_eq!(others(&findings), Vec::<String>::new());
    assert!(findings.is_sorted_by_key(|finding| std::cmp::Reverse(finding.severity)), "the worst first");
}

#[test]
fn what_is_wrong_with_a_table_is_found_and_its_command_mends_it() {
    use Severity::{Slow, Unsafe};
    let trigger = |what: &str| format!("{TRIGGER} \"My t\" {what} FUNCTION t()");
    let cases = [
        ("ALTER TABLE syncguard_fence_counters SET UNLOGGED".to_owned(), "not-a-plain-table", Unsafe, "is unlogged"),
        ("ALTER TABLE syncguard_locks ENABLE ROW LEVEL SECURITY".into(), "row-security", Unsafe, "row security"),
        ("DROP INDEX idx_syncguard_locks_lock_id".into(), "unique-index", Unsafe, "lock_id"),
        ("ALTER TABLE syncguard_locks DROP CONSTRAINT syncguard_locks_pkey".into(), "unique-index", Unsafe, "on key"),
        (
            "ALTER TABLE syncguard_fence_counters DROP CONSTRAINT syncguard_fence_counters_pkey, \
             ADD CONSTRAINT d UNIQUE (fence_key) DEFERRABLE"
                .into(),
            "unique-index",
            Unsafe,
            "fence_key",
        ),
        (
            "DROP INDEX idx_syncguard_locks_lock_id; CREATE UNIQUE INDEX ON syncguard_locks (lock_id) WHERE fence <> ''".into(),
            "unique-index",
            Unsafe,
            "lock_id",
        ),
        ("DROP INDEX idx_syncguard_locks_expires".into(), "expiry-index", Slow, "expires_at_ms"),
        (trigger("BEFORE UPDATE ON syncguard_locks FOR EACH ROW EXECUTE"), "trigger", Unsafe, "\"My t\""),
        (trigger("AFTER INSERT ON syncguard_locks FOR EACH ROW EXECUTE"), "trigger", Slow, "\"My t\""),
        (trigger("BEFORE DELETE ON syncguard_locks FOR EACH STATEMENT EXECUTE"), "trigger", Slow, "\"My t\""),
        ("CREATE RULE r AS ON DELETE TO syncguard_locks DO INSTEAD NOTHING".into(), "rule", Unsafe, "rule r"),
        ("ALTER TABLE syncguard_locks ADD CONSTRAINT c CHECK (expires_at_ms > 0)".into(), "constraint", Slow, "constraint c"),
        (
            "CREATE TABLE mine (key text CONSTRAINT f REFERENCES syncguard_locks)".into(),
            "constraint",
            Slow,
            "mine on ",
        ),
        ("ALTER TABLE syncguard_locks ADD \"Owner\" text NOT NULL".into(), "column", Unsafe, "\"Owner\""),
        ("ALTER TABLE syncguard_locks ALTER expires_at_ms TYPE numeric".into(), "column", Unsafe, "numeric, and not bigint"),
        ("ALTER TABLE syncguard_locks ALTER fence TYPE varchar(15) COLLATE \"C\"".into(), "column", Slow, "character varying(15)"),
        ("ALTER TABLE syncguard_locks SET (autovacuum_enabled = off)".into(), "autovacuum", Slow, "syncguard_locks"),
    ];
    for (sql, code, severity, seen) in cases {
        let place = place();
        place.stored.run(&sql);
        let findings = check(&place.schema.url());
        let finding = one(&findings, code);
        assert!(finding.severity == severity && finding.seen.contains(seen), "{sql}: {finding}");
        assert_eq!(others(&findings).len(), 1, "{sql}: {findings:#?}");
        mend(&mut place.schema.client(), finding);
        assert_eq!(others(&check(&place.schema.url())), Vec::<String>::new(), "{sql}");
        place.hold("k");
    }
}

#[test]
fn tables_that_are_no_plain_tables_are_found() {
    for (sql, seen) in [
        ("CREATE TABLE child () INHERITS (syncguard_locks)", "inheritance"),
        (
            "ALTER TABLE syncguard_locks RENAME TO other; CREATE VIEW syncguard_locks AS SELECT * FROM other",
            "is a view",
        ),
        (
            "DROP TABLE syncguard_locks; CREATE TABLE syncguard_locks (key text COLLATE \"C\" PRIMARY KEY, \
               lock_id text NOT NULL, expires_at_ms int8 NOT NULL, acquired_at_ms int8 NOT NULL, fence text NOT NULL, \
               user_key text NOT NULL) PARTITION BY HASH (key)",
            "is partitioned",
        ),
        (
            "DROP TABLE syncguard_locks; CREATE TABLE syncguard_locks (key text COLLATE \"C\" PRIMARY KEY)",
            "no column",
        ),
    ] {
        let place = place();
        place.stored.run(sql);
        let findings = check(&place.schema.url());
        let found = findings
            .iter()
            .find(|finding| finding.seen.contains(seen))
            .unwrap_or_else(|| panic!("{findings:#?}"));
        assert_eq!(found.severity, Severity::Unsafe, "{found}");
    }
}

#[test]
fn tables_that_are_not_there_are_a_note_and_no_error() {
    let schema = crate::support::schema();
    let findings = check(&schema.url());
    assert_eq!(one(&findings, "tables-missing").severity, Severity::Note);
    assert_eq!(others(&findings).len(), 1, "{findings:#?}");
}

#[test]
fn a_search_path_that_leads_each_role_elsewhere_is_unsafe() {
    let schema = crate::support::schema();
    let role = Role::new(&schema);
    let own = format!("CREATE SCHEMA AUTHORIZATION {}", role.name());
    schema.client().batch_execute(&own).unwrap();
    let config = role.config_with_own_path();
    let client = PgLockClient::builder().connect_with(config.clone(), NoTls).unwrap();
    assert_eq!(one(&client.operator().check().unwrap(), "search-path").severity, Severity::Unsafe);
    let named = PgLockClient::builder().schema(role.name()).connect_with(config, NoTls).unwrap();
    assert_eq!(of(&named.operator().check().unwrap(), "search-path"), Vec::<&Finding>::new());
}

#[test]
fn a_role_is_told_which_rights_it_lacks_and_has_to_spare() {
    let place = place();
    let role = Role::without_rights(&place.schema);
    let run = |sql: String| place.stored.run(&sql);
    let client = || role.connect(patient()).unwrap();
    // Without a right on the schema it sees nothing, and is told that.
    let findings = client().operator().check().unwrap();
    assert!(one(&findings, "tables-missing").seen.contains("may not see"), "{findings:#?}");
    run(format!("GRANT USAGE ON SCHEMA {} TO {}", place.schema.name(), role.name()));
    let findings = client().operator().check().unwrap();
    let finding = one(&findings, "rights-missing");
    assert!(finding.mend.contains("DELETE, INSERT (") && finding.mend.contains("xmin"), "{finding}");
    assert!(of(&findings, "rights-to-spare").is_empty());
    // What other roles do is not shown, which is said, too.
    let unseen = of(&findings, "not-looked-at");
    assert!(unseen.iter().any(|finding| finding.seen.contains("open transactions")), "{findings:#?}");

    mend(&mut place.schema.client(), finding);
    let as_granted = client();
    let findings = as_granted.operator().check().unwrap();
    assert!(of(&findings, "rights-missing").is_empty(), "{findings:#?}");
    assert!(as_granted.acquire("k", TTL).unwrap().acquired().is_some(), "and that is all that it needs");
    as_granted.operator().break_lock("k", "a test").unwrap();

    mend(&mut place.schema.client(), unseen[0]);
    assert!(of(&client().operator().check().unwrap(), "not-looked-at").is_empty());

    for (sql, lacks) in [
        ("REVOKE SELECT (xmin) ON syncguard_locks FROM", "SELECT (xmin) on"),
        ("REVOKE UPDATE (fence) ON syncguard_fence_counters FROM", "UPDATE (fence) on"),
        ("REVOKE DELETE ON syncguard_locks FROM", "DELETE on"),
    ] {
        run(format!("{sql} {}", role.name()));
        let findings = client().operator().check().unwrap();
        let finding = one(&findings, "rights-missing");
        assert!(finding.seen.contains(lacks), "{finding}");
        mend(&mut place.schema.client(), finding);
    }
    for to in [role.name(), "PUBLIC"] {
        run(format!("GRANT DELETE ON syncguard_fence_counters TO {to}"));
        let findings = client().operator().check().unwrap();
        let finding = one(&findings, "rights-to-spare");
        assert_eq!(finding.severity, Severity::Note);
        mend(&mut place.schema.client(), finding);
        assert!(of(&client().operator().check().unwrap(), "rights-to-spare").is_empty(), "{to}");
    }
}

#[test]
fn a_role_that_may_not_see_the_schema_that_it_names_is_told_so() {
    let place = place();
    let role = Role::without_rights(&place.schema);
    let builder = || patient().schema(place.schema.name());
    let findings = role.connect(builder()).unwrap().operator().check().unwrap();
    let finding = one(&findings, "rights-missing");
    assert!(finding.seen.contains("USAGE on the schema"), "{finding}");
    mend(&mut place.schema.client(), finding);
    let findings = role.connect(builder()).unwrap().operator().check().unwrap();
    assert!(one(&findings, "rights-missing").seen.contains("INSERT"), "{findings:#?}");
}

#[test]
fn a_role_that_may_call_nobody_is_told_so() {
    let database = Database::new("LOCALE 'C'");
    let mut sql = database.sql();
    sql.batch_execute(include_str!("../../schema.sql")).unwrap();
    sql.batch_execute("REVOKE EXECUTE ON FUNCTION pg_notify(text, text) FROM PUBLIC").unwrap();
    let role = format!("silent_{}", unique());
    sql.batch_execute(&format!(
        "CREATE ROLE {role} LOGIN; GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}"
    ))
    .unwrap();
    let url = database.url().replace("postgres@", &format!("{role}@"));
    let findings = check(&url);
    let finding = one(&findings, "rights-missing");
    assert!(finding.severity == Severity::Slow && finding.seen.contains("pg_notify"), "{finding}");
    mend(&mut sql, finding);
    assert!(of(&check(&url), "rights-missing").is_empty());
    sql.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).unwrap();
}

#[test]
fn a_database_that_sorts_by_bytes_needs_no_collation() {
    let database = Database::new("LOCALE 'C'");
    let schema = include_str!("../../schema.sql").replace(" COLLATE \"C\"", "");
    database.sql().batch_execute(&schema).unwrap();
    let findings = check(&database.url());
    assert!(
        of(&findings, "collation").is_empty() && of(&findings, "collation-not-bytes").is_empty(),
        "{findings:#?}"
    );
}

/// A database of its own with these options.
struct Database(String);

impl Database {
    fn new(options: &str) -> Self {
        let name = format!("checked_{}", unique());
        let sql = format!("CREATE DATABASE {name} TEMPLATE template0 {options}");
        server().client().batch_execute(&sql).unwrap();
        Self(name)
    }

    fn url(&self) -> String {
        let (server, _) = server().url().rsplit_once('/').unwrap();
        format!("{server}/{}", self.0)
    }

    fn sql(&self) -> Client {
        Client::connect(&self.url(), NoTls).unwrap()
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let sql = format!("DROP DATABASE {} WITH (FORCE)", self.0);
        let _ = server().client().batch_execute(&sql);
    }
}

#[test]
fn a_collation_that_can_change_is_a_note_and_one_that_has_changed_is_unsafe() {
    let database = Database::new("LOCALE 'C'");
    let schema = include_str!("../../schema.sql").replace("COLLATE \"C\"", "COLLATE \"en-x-icu\"");
    let mut sql = database.sql();
    sql.batch_execute(&schema).unwrap();
    let findings = check(&database.url());
    let finding = one(&findings, "collation-not-bytes");
    assert!(finding.severity == Severity::Note && finding.seen.contains("3 index"), "{finding}");
    assert!(of(&findings, "collation").is_empty());

    sql.batch_execute("UPDATE pg_collation SET collversion = '1' WHERE collname = 'en-x-icu'").unwrap();
    let findings = check(&database.url());
    let finding = one(&findings, "collation");
    assert!(finding.severity == Severity::Unsafe && finding.seen.contains("version 1"), "{finding}");
    mend(&mut sql, finding);
    sql.batch_execute("ALTER COLLATION \"en-x-icu\" REFRESH VERSION").unwrap();
    assert!(of(&check(&database.url()), "collation").is_empty());
}

#[test]
fn a_database_that_cannot_store_every_key_is_found() {
    let database = Database::new("ENCODING 'LATIN1' LOCALE 'C'");
    database.sql().batch_execute(include_str!("../../schema.sql")).unwrap();
    let findings = check(&database.url());
    assert!(one(&findings, "encoding").seen.contains("LATIN1"), "{findings:#?}");
    // Other calls do without U+2126 there.
    let client = PgLockClient::builder().auto_create_tables(false).connect(&database.url()).unwrap();
    assert!(client.acquire("k", TTL).unwrap().acquired().is_some());
    let operator = client.operator();
    assert_eq!((operator.counts().unwrap().counters, operator.marks(9).unwrap().len()), (1, 0));
}

#[test]
fn defaults_of_a_role_or_a_database_that_surprise_are_found() {
    let place: Place = place();
    let role = Role::with_tables(&place.schema);
    for (setting, value) in [
        ("statement_timeout", "'1s'"),
        ("default_transaction_read_only", "on"),
        ("idle_session_timeout", "'1min'"),
        ("lock_timeout", "0"),
        ("work_mem", "'8MB'"),
    ] {
        role.set(&place.schema, setting, value);
    }
    let database = server().client().query_one("SELECT quote_ident(current_database())", &[]).unwrap();
    let database: String = database.get(0);
    place.stored.run(&format!(
        "ALTER ROLE {} IN DATABASE {database} SET default_transaction_isolation TO serializable",
        role.name()
    ));
    let client = || role.connect(patient()).unwrap();
    let findings = client().operator().check().unwrap();
    let mut found = of(&findings, "session-default");
    found.sort_by(|a, b| a.seen.cmp(&b.seen));
    let seen: Vec<_> = found.iter().map(|finding| (finding.seen.as_str(), finding.severity)).collect();
    let by = |what: &str, of: &str| format!("{what}, by ALTER ROLE {}{of}", role.name());
    let expected = [
        (
            by("default_transaction_isolation = serializable", &format!(" IN DATABASE {database}")),
            Severity::Note,
        ),
        (by("default_transaction_read_only = on", ""), Severity::Note),
        (by("idle_session_timeout = 1min", ""), Severity::Slow),
        (by("statement_timeout = 1s", ""), Severity::Note),
    ];
    assert_eq!(seen, expected.iter().map(|(seen, severity)| (seen.as_str(), *severity)).collect::<Vec<_>>());
    for finding in found {
        mend(&mut place.schema.client(), finding);
    }
    assert!(of(&client().operator().check().unwrap(), "session-default").is_empty());
}

#[test]
fn fewer_connections_than_a_client_may_open_are_found() {
    let place = place();
    let role = Role::with_tables(&place.schema);
    place.stored.run(&format!("ALTER ROLE {} CONNECTION LIMIT 9", role.name()));
    let client = |max| {
        let builder = patient().max_connections(max);
        role.connect(builder).unwrap()
    };
    // One for renewals and one that listens come on top.
    assert!(of(&client(7).operator().check().unwrap(), "connections").is_empty());
    let findings = client(8).operator().check().unwrap();
    let finding = one(&findings, "connections");
    assert_eq!(finding.seen, "this client may open 10 connections, the role may have 9");
    mend(&mut place.schema.client(), finding);
    assert!(of(&client(8).operator().check().unwrap(), "connections").is_empty());
}

#[test]
fn a_client_that_is_built_to_use_the_members_is_told_what_is_missing_of_them() {
    let place = place();
    let find = |role: Option<&Role>| {
        let builder = patient().owner("me");
        let client = match role {
            Some(role) => role.connect(builder).unwrap(),
            None => builder.connect(&place.schema.url()).unwrap(),
        };
        client.operator().check().unwrap()
    };
    assert!(one(&find(None), "tables-missing").seen.contains("members"));
    let role = Role::new(&place.schema);
    let plain = role.connect(patient()).unwrap();
    PgLockClient::builder().owner("me").connect(&place.schema.url()).unwrap();
    place.stored.run(&format!("GRANT ALL ON syncguard_locks, syncguard_fence_counters TO {}", role.name()));
    assert!(
        of(&plain.operator().check().unwrap(), "rights-missing").is_empty(),
        "who needs none is told of none"
    );
    let findings = find(Some(&role));
    let missing = one(&findings, "rights-missing");
    assert!(missing.seen.contains("SELECT, INSERT, UPDATE, DELETE on"), "{missing}");
    mend(&mut place.schema.client(), missing);
    assert!(of(&find(Some(&role)), "rights-missing").is_empty());
    place.stored.run("ALTER TABLE syncguard_members SET UNLOGGED");
    let findings = find(None);
    mend(&mut place.schema.client(), one(&findings, "members-unlogged"));
    assert_eq!(others(&find(None)), Vec::<String>::new());
}
