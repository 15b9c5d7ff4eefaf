//! What a look finds in a server of its own: its settings, standbys, open transactions, a pooler, the clock.

use std::time::{Duration, Instant};

use super::{check, mend, of, one};
use crate::support::bouncer::Bouncer;
use crate::support::standby::standby_of;
use crate::support::{Config, LIMIT, Place, Server, TTL, place, wait_until};
use syncguard::{ErrorCode, Finding, PgLockClient, Severity};

#[test]
fn settings_that_make_locks_unsafe_or_slow_are_found_and_mended() {
    let config = Config::new().fsync(false).set("autovacuum", "off").set("synchronous_commit", "off");
    let server = Server::start(&config);
    let place = Place::new(server.schema());
    let before = check(&place.schema.url());
    for (code, severity, seen) in [
        ("fsync", Severity::Unsafe, "fsync = off"),
        ("full-page-writes", Severity::Unsafe, "full_page_writes = off"),
        ("autovacuum", Severity::Slow, "autovacuum = off"),
        ("synchronous-commit", Severity::Note, "synchronous_commit = off"),
        ("commit-timestamps", Severity::Note, "track_commit_timestamp = off"),
        ("rights-to-spare", Severity::Note, "is a superuser"),
    ] {
        let finding = one(&before, code);
        assert!(finding.severity == severity && finding.seen.contains(seen), "{finding}");
        if !finding.mend.contains("restart") && code != "rights-to-spare" {
            mend(&mut place.schema.client(), finding);
        }
    }
    wait_until(LIMIT, "the server has read its settings", || {
        let findings = check(&place.schema.url());
        let gone = ["fsync", "full-page-writes", "autovacuum", "synchronous-commit"];
        gone.iter().all(|code| of(&findings, code).is_empty())
    });
}

/// The number of the next transaction that writes.
fn next_writer(place: &Place) -> String {
    place.stored.one("SELECT pg_snapshot_xmax(pg_current_snapshot())::text", &[]).get(0)
}

#[test]
fn a_look_changes_nothing() {
    let server = Server::start(&Config::new().set("autovacuum", "off"));
    let place = Place::new(server.schema());
    drop(place.client.lock("k").unwrap());
    let settings = "SELECT md5(string_agg(s::text, ',' ORDER BY s.name)) FROM pg_settings AS s WHERE s.name <> 'transaction_read_only'";
    let settings = |place: &Place| -> String { place.stored.one(settings, &[]).get(0) };
    let (writer, set) = (next_writer(&place), settings(&place));
    for _ in 0..3 {
        place.client.operator().check().unwrap();
        check(&place.schema.url());
    }
    assert_eq!((next_writer(&place), settings(&place)), (writer, set));
    let locks = place.stored.one("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'", &[]);
    assert_eq!(locks.get::<_, i64>(0), 0, "what the self-test of session locks took is given back");
    assert!(place.client.acquire("k", TTL).unwrap().acquired().is_some(), "its connections go on");
}

#[test]
fn a_transaction_that_is_open_for_long_is_found_and_so_is_a_clock_that_is_ahead() {
    let server = Server::start(&Config::new().clock());
    let place = Place::new(server.schema());
    let mut open = place.schema.client();
    open.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM syncguard_locks").unwrap();
    let pid: i32 = open.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0);
    let findings = check(&place.schema.url());
    assert!(of(&findings, "old-snapshot").is_empty() && of(&findings, "clock").is_empty(), "{findings:#?}");
    server.set_clock(100_000);
    let findings = check(&place.schema.url());
    let clock = one(&findings, "clock");
    assert!(clock.severity == Severity::Note && clock.seen.contains("ahead of this host"), "{clock}");
    let finding = one(&findings, "old-snapshot");
    assert!(
        finding.severity == Severity::Slow && finding.seen.ends_with(&format!("in process {pid}")),
        "{finding}"
    );
    mend(&mut place.schema.client(), finding);
    wait_until(LIMIT, "it is over", || of(&check(&place.schema.url()), "old-snapshot").is_empty());
    server.set_clock(-100_000);
    assert!(one(&check(&place.schema.url()), "clock").seen.contains("behind this host"));
}

#[test]
fn a_prepared_transaction_is_found_and_its_name_is_quoted() {
    let server = Server::start(&Config::new().set("max_prepared_transactions", "2"));
    let place = Place::new(server.schema());
    let mut other = place.schema.client();
    other.batch_execute("BEGIN; CREATE TABLE t (); PREPARE TRANSACTION 'it''s'").unwrap();
    let findings = check(&place.schema.url());
    let finding = one(&findings, "prepared-transaction");
    assert!(finding.severity == Severity::Slow && finding.seen.starts_with("1 prepared"), "{finding}");
    mend(&mut place.schema.client(), finding);
    assert!(of(&check(&place.schema.url()), "prepared-transaction").is_empty());
}

#[test]
fn standbys_that_may_lack_the_last_commits_are_found() {
    let server = Server::start(&Config::new());
    let place = Place::new(server.schema());
    let url = place.schema.url();
    let follower = standby_of(&server, "follower");
    let mut found = Vec::new();
    let mut wait_for = |code: &str| -> Finding {
        wait_until(LIMIT, code, || {
            found = check(&url);
            of(&found, code).len() == 1
        });
        one(&found, code).clone()
    };
    let finding = wait_for("asynchronous-standby");
    assert!(finding.severity == Severity::Unsafe && finding.seen == "1 asynchronous: follower", "{finding}");
    mend(&mut place.schema.client(), &finding);
    wait_until(LIMIT, "it is synchronous", || of(&check(&url), "asynchronous-standby").is_empty());
    assert!(of(&check(&url), "standby-missing").is_empty());

    // On the standby itself.
    let findings = check(&url.replace(&format!(":{}/", server.port()), &format!(":{}/", follower.port)));
    assert_eq!(one(&findings, "standby").severity, Severity::Unsafe);

    drop(follower);
    let finding = wait_for("standby-missing");
    assert!(finding.severity == Severity::Slow && finding.seen.contains("follower"), "{finding}");
    mend(&mut place.schema.client(), &finding);
    wait_until(LIMIT, "nobody waits for it", || of(&check(&url), "standby-missing").is_empty());
}

#[test]
fn a_role_that_may_not_see_standbys_is_told_so() {
    let server = Server::start(&Config::new());
    let place = Place::new(server.schema());
    let role = crate::support::Role::with_tables(&place.schema);
    let _follower = standby_of(&server, "follower");
    let client = role.connect(PgLockClient::builder().auto_create_tables(false)).unwrap();
    wait_until(LIMIT, "there is one, and what it is is not shown", || {
        let findings = client.operator().check().unwrap();
        of(&findings, "not-looked-at").iter().any(|finding| finding.seen.contains("standbys"))
    });
    assert!(of(&client.operator().check().unwrap(), "asynchronous-standby").is_empty());
}

#[test]
fn a_pooler_that_shares_sessions_is_found_and_one_that_does_not_is_not() {
    let place = place();
    for (mode, shares) in [("transaction", true), ("session", false)] {
        let bouncer = Bouncer::start(&[("pool_mode", mode), ("default_pool_size", "8")]);
        let builder = PgLockClient::builder().auto_create_tables(false).schema(place.schema.name());
        let client = builder.connect(&bouncer.url()).unwrap();
        let findings = client.operator().check().unwrap();
        assert_eq!(of(&findings, "pooler").len(), usize::from(shares), "{mode}: {findings:#?}");
        assert!(
            of(&findings, "not-looked-at").is_empty() && of(&findings, "session-locks").is_empty(),
            "{findings:#?}"
        );
        assert!(client.acquire(&place.key(mode), TTL).unwrap().acquired().is_some());
    }
}

#[test]
fn connections_that_are_nearly_all_in_use_are_found() {
    let config = Config::new().set("max_connections", "23").set("superuser_reserved_connections", "3");
    let server = Server::start(&config);
    let place = Place::new(server.schema());
    let mut held: Vec<_> = (0..15).map(|_| place.schema.client()).collect();
    let client = PgLockClient::builder().auto_create_tables(false).max_connections(1);
    let client = client.connect(&place.schema.url()).unwrap();
    let check = || client.operator().check().unwrap();
    let of_20 = |findings: &[Finding]| {
        of(findings, "connections")
            .iter()
            .any(|finding| finding.seen.contains("of 20 connections are in use"))
    };
    let mut found = check();
    while held.len() < 18 && !of_20(&found) {
        held.push(place.schema.client());
        found = check();
    }
    assert!(of_20(&found), "{found:#?}");
    held.clear();
    wait_until(LIMIT, "they are free again", || !of_20(&check()));
    // And a pool that is too large for the server.
    let greedy = PgLockClient::builder().auto_create_tables(false).max_connections(19);
    let findings = greedy.connect(&place.schema.url()).unwrap().operator().check().unwrap();
    assert_eq!(one(&findings, "connections").seen, "this client may open 21 connections, the server lets 20");
}

#[test]
fn a_look_ends_in_time_where_the_server_says_nothing() {
    let server = Server::start(&Config::new());
    let place = Place::new(server.schema());
    // Enough for a look at a server that answers.
    let limit = Duration::from_secs(4);
    let client = PgLockClient::builder().auto_create_tables(false).operation_timeout(limit);
    let client = client.connect(&place.schema.url()).unwrap();
    client.operator().check().unwrap();
    server.freeze();
    let start = Instant::now();
    let error = client.operator().check().unwrap_err();
    assert!(start.elapsed() < LIMIT, "it is bounded");
    server.thaw();
    assert!([ErrorCode::NetworkTimeout, ErrorCode::ServiceUnavailable].contains(&error.code()), "{error:?}");
}
