//! Many session locks: thousands of keys and tries, a hundred and fifty guards, a lock table that is full, and
//! what a thousand failures of the rarer kinds leave behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::support::proxy::{Action, Proxy};
use crate::support::session_locks::{builder, key, taken};
use crate::support::{Config, LIMIT, Server, together, unique, wait_until};
use postgres::Client;
use syncguard::{AdvisoryKey, AdvisoryOptions, ErrorCode, ReleaseResult};

fn locks(observer: &mut Client) -> i64 {
    let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
    observer.query_one(sql, &[]).unwrap().get(0)
}

#[test]
fn five_thousand_keys_are_held_and_shown() {
    let server = Server::start(&Config::new());
    let client = builder().connect(server.url()).unwrap();
    let mut raw = server.client();
    let sql =
        "SELECT count(*) FROM generate_series(1, 5000) AS n WHERE pg_try_advisory_lock(-n - 5000000000)";
    assert_eq!(raw.query_one(sql, &[]).unwrap().get::<_, i64>(0), 5000);
    let guard = taken(&client, key());
    let holders = client.advisory_holders().unwrap();
    let mut keys: Vec<_> = holders.iter().filter_map(|holder| holder.key.as_i64()).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 5001);
    for n in [1, 2500, 5000] {
        assert!(client.try_advisory_lock(&AdvisoryKey::from_i64(-n - 5_000_000_000)).unwrap().is_none());
    }
    assert!(guard.is_held());
}

#[test]
fn a_try_is_one_message_whether_the_key_is_free_or_held() {
    const TRIES: usize = 10_000;
    let server = Server::start(&Config::new());
    let proxy = Proxy::start(server.port());
    let client = builder().max_connections(1).connect(&proxy.url(server.url())).unwrap();
    let holder = builder().connect(server.url()).unwrap();
    let (free, held) = (key(), key());
    let long = AdvisoryOptions::new().max_hold(LIMIT * 10);
    let guard = holder.try_advisory_lock_with(&held, &long).unwrap().unwrap();
    drop(taken(&client, free));
    let counted = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&counted);
    proxy.on_query(move |sql| {
        count.fetch_add(usize::from(!sql.contains("unlock")), Ordering::SeqCst);
        Action::Pass
    });
    for (key, is_free) in [(free, true), (held, false)] {
        let before = counted.load(Ordering::SeqCst);
        let mut times = Vec::with_capacity(TRIES);
        for _ in 0..TRIES {
            let start = Instant::now();
            let found = client.try_advisory_lock(&key).unwrap();
            times.push(start.elapsed());
            assert_eq!(found.is_some(), is_free);
        }
        // And a few to prepare what is called often.
        let messages = counted.load(Ordering::SeqCst) - before;
        assert!((TRIES..TRIES + 10).contains(&messages), "{messages} for {TRIES} tries");
        times.sort_unstable();
        eprintln!("free: {is_free}; p50 of {TRIES} tries through a proxy: {:?}", times[TRIES / 2]);
    }
    assert!(guard.is_held());
}

#[test]
fn a_hundred_and_fifty_guards_are_looked_after_by_one_client() {
    const GUARDS: usize = 150;
    let server = Server::start(&Config::new());
    let name = unique();
    let mut config: postgres::Config = server.url().parse().unwrap();
    config.application_name(&name);
    let max = u32::try_from(GUARDS).unwrap() + 1;
    let client = builder().max_connections(max).connect_with(config, postgres::NoTls).unwrap();
    let long = AdvisoryOptions::new().max_hold(LIMIT * 5);
    let guards = together(10, |_| {
        (0..GUARDS / 10)
            .map(|_| client.try_advisory_lock_with(&key(), &long).unwrap().unwrap())
            .collect::<Vec<_>>()
    });
    let guards: Vec<_> = guards.into_iter().flatten().collect();
    let mut observer = server.client();
    assert_eq!(locks(&mut observer), i64::try_from(GUARDS).unwrap());
    // Each was asked once since.
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 \
               AND pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory') AND query LIKE 'SELECT pg_catalog.pg_backend_pid(), CASE%'";
    wait_until(LIMIT, "every session was asked", || {
        observer.query_one(sql, &[&name]).unwrap().get::<_, i64>(0) == i64::try_from(GUARDS).unwrap()
    });
    assert!(guards.iter().all(syncguard::AdvisoryGuard::is_held));
    // One that is ended is noticed among all of them, and no other is.
    let ended = guards[77].pid();
    observer.execute("SELECT pg_terminate_backend($1)", &[&ended]).unwrap();
    assert!(guards[77].lost().wait_timeout(LIMIT));
    assert_eq!(guards.iter().filter(|guard| !guard.is_held()).count(), 1);
    drop(guards);
    wait_until(LIMIT, "nothing is left", || locks(&mut observer) == 0);
}

#[test]
fn a_full_lock_table_is_an_error_and_takes_no_lock_away() {
    let settings = Config::new().set("max_locks_per_transaction", "10").set("max_connections", "20");
    let server = Server::start(&settings);
    let client = builder().connect(server.url()).unwrap();
    let held = taken(&client, key());
    // Something of ours may also stay free inside the session: everything is taken to the last.
    let mut raw = server.client();
    let full =
        "DO $$ BEGIN FOR n IN 1..1000000 LOOP PERFORM pg_advisory_lock(n + 5000000000); END LOOP; END $$";
    let error = raw.batch_execute(full).unwrap_err();
    assert_eq!(error.code().map(postgres::error::SqlState::code), Some("53200"), "{error:?}");
    let mut refused = None;
    for _ in 0..50 {
        if let Err(error) = client.try_advisory_lock(&key()) {
            refused = Some(error);
            break;
        }
    }
    let error = refused.expect("the table is full");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    assert!(held.is_held());
    drop(raw);
    let key = key();
    wait_until(LIMIT, "there is room again", || {
        client.try_advisory_lock(&key).is_ok_and(|guard| guard.is_some())
    });
    assert_eq!(held.release().unwrap(), ReleaseResult::Released);
}

#[test]
fn a_thousand_failures_of_the_rarer_kinds_cost_no_connection_and_leave_no_lock() {
    let server = Server::start(&Config::new());
    let mut observer = server.client();
    let name = unique();
    let connect = || {
        let mut config: postgres::Config = server.url().parse().unwrap();
        config.application_name(&name);
        builder().max_connections(2).connect_with(config, postgres::NoTls).unwrap()
    };
    let client = connect();
    drop(taken(&client, key()));
    let fired = syncguard::CancelToken::new();
    fired.cancel();
    let wrong = AdvisoryOptions::new().max_hold(std::time::Duration::ZERO);
    for _ in 0..1000 {
        // Before anything is sent.
        let error = client.try_advisory_lock_with(&key(), &wrong).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
        let error = client.cancellable(&fired).try_advisory_lock(&key()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Aborted);
    }
    // In the server, before the grant and after it.
    let rename = |of: &str, arguments: &str, returns: &str, body: &str| {
        format!(
            "ALTER FUNCTION pg_catalog.{of}({arguments}) RENAME TO real_{of}; \
             CREATE FUNCTION pg_catalog.{of}({arguments}) RETURNS {returns} VOLATILE LANGUAGE plpgsql AS $$ BEGIN {body} END $$"
        )
    };
    let back = |of: &str, arguments: &str| {
        format!(
            "DROP FUNCTION pg_catalog.{of}({arguments}); ALTER FUNCTION pg_catalog.real_{of}({arguments}) RENAME TO {of}"
        )
    };
    let fails = "RAISE EXCEPTION 'on purpose' USING ERRCODE = '57014';";
    let after = format!("PERFORM pg_catalog.real_pg_try_advisory_lock($1); {fails}");
    for body in [fails, &after] {
        observer.batch_execute(&rename("pg_try_advisory_lock", "bigint", "boolean", body)).unwrap();
        // Prepared statements know functions by their numbers: they would call the one that was renamed.
        observer
            .execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1",
                &[&name],
            )
            .unwrap();
        together(2, |_| {
            for _ in 0..500 {
                let error = client.try_advisory_lock(&key()).unwrap_err();
                assert!(
                    matches!(error.code(), ErrorCode::NetworkTimeout | ErrorCode::ServiceUnavailable),
                    "{error:?}"
                );
            }
        });
        observer.batch_execute(&back("pg_try_advisory_lock", "bigint")).unwrap();
        wait_until(LIMIT, "no lock is left", || locks(&mut observer) == 0);
    }
    // A self-test that fails, each time anew.
    observer.batch_execute(&rename("pg_try_advisory_lock", "bigint", "boolean", "RETURN true;")).unwrap();
    let unproven = connect();
    together(2, |_| {
        for _ in 0..500 {
            assert_eq!(unproven.try_advisory_lock(&key()).unwrap_err().code(), ErrorCode::InvalidArgument);
        }
    });
    observer.batch_execute(&back("pg_try_advisory_lock", "bigint")).unwrap();
    drop(taken(&unproven, key()));
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1";
    wait_until(LIMIT, "no connection too many is left", || {
        observer.query_one(sql, &[&name]).unwrap().get::<_, i64>(0) <= 4
    });
    wait_until(LIMIT, "no lock is left", || locks(&mut observer) == 0);
}
