//! What others do to our sessions and tables, servers that only read, and failover.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use postgres::NoTls;
use syncguard::{AcquireResult, ErrorCode, ExtendResult, PgLockClient, ReleaseResult};

use crate::support::standby::standby_of;
use crate::support::wait::poll;
use crate::support::{self, Config, LIMIT, Server, Stop, wait_until};

const TTL: Duration = Duration::from_secs(30);

fn grant(client: &PgLockClient, key: &str) -> syncguard::Acquired {
    match client.acquire(key, TTL) {
        Ok(AcquireResult::Acquired(granted)) => granted,
        other => panic!("{other:?}"),
    }
}

#[test]
fn discard_all_on_a_shared_connection_changes_nothing() {
    let schema = support::schema();
    let manager = r2d2_postgres::PostgresConnectionManager::new(schema.config(), NoTls);
    let pool = r2d2::Pool::builder().max_size(2).min_idle(Some(1)).build(manager).unwrap();
    let client = PgLockClient::builder().build(pool.clone()).unwrap();
    for n in 0..10 {
        let granted = grant(&client, "k");
        let mut both = [pool.get().unwrap(), pool.get().unwrap()];
        for connection in &mut both {
            connection.batch_execute("DISCARD ALL").unwrap();
        }
        drop(both);
        assert_eq!(granted.fence.get(), n + 1);
        assert!(client.release(&granted.lock_id).is_ok());
    }
}

#[test]
fn tables_that_are_made_anew_are_used_by_connections_that_knew_the_old_ones() {
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url()).unwrap();
    let mut sql = schema.client();
    for _ in 0..3 {
        let granted = grant(&client, "k");
        assert!(client.owns(&granted.lock_id).unwrap());
        sql.batch_execute("DROP TABLE syncguard_locks, syncguard_fence_counters").unwrap();
        let error = client.acquire("k", TTL).expect_err("there are no tables");
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
        assert!(!error.is_outcome_unknown());
        PgLockClient::connect(&schema.url()).unwrap();
        assert!(!client.owns(&granted.lock_id).unwrap());
    }
}

/// Called often, a statement is one of the driver's, too, which knows its tables by their numbers.
#[test]
fn tables_are_made_anew_or_altered_beside_statements_that_are_called_often() {
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url()).unwrap();
    let mut sql = schema.client();
    let changes = [
        "DROP TABLE syncguard_locks, syncguard_fence_counters",
        "ALTER TABLE syncguard_locks ADD COLUMN extra int, ALTER COLUMN fence TYPE varchar(15)",
        "VACUUM FULL syncguard_locks",
        "ALTER TABLE syncguard_locks RENAME TO elsewhere; CREATE TABLE syncguard_locks (LIKE elsewhere INCLUDING ALL)",
    ];
    for change in changes {
        for _ in 0..20 {
            let granted = grant(&client, "k");
            assert!(client.owns(&granted.lock_id).unwrap());
            assert!(matches!(client.extend(&granted.lock_id, TTL), Ok(ExtendResult::Extended { .. })));
            assert!(client.is_locked("k").unwrap());
            assert_eq!(client.release(&granted.lock_id).unwrap(), ReleaseResult::Released, "{change}");
        }
        sql.batch_execute(change).unwrap();
        if change.starts_with("DROP") {
            let error = client.acquire("k", TTL).expect_err("there are no tables");
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
            PgLockClient::connect(&schema.url()).unwrap();
        }
        let granted = grant(&client, "k");
        assert!(
            matches!(client.extend(&granted.lock_id, TTL), Ok(ExtendResult::Extended { .. })),
            "{change}"
        );
        assert!(client.is_locked("k").unwrap() && client.owns(&granted.lock_id).unwrap(), "{change}");
        assert_eq!(client.release(&granted.lock_id).unwrap(), ReleaseResult::Released, "{change}");
        let left: i64 = sql.query_one("SELECT count(*) FROM syncguard_locks", &[]).unwrap().get(0);
        assert_eq!(left, 0, "{change}: the new table was used");
    }
}

/// The one statement that makes fences grow again after an asynchronous failover: run it before any
/// client is let in, with a number greater than all grants that can have been lost.
const RAISE: &str = "UPDATE syncguard_fence_counters SET fence = fence + 1000000";

#[test]
fn a_server_that_only_reads_is_said_to_be_one() {
    let primary = Server::start(&Config::new());
    drop(PgLockClient::connect(primary.url()).unwrap());
    let standby = standby_of(&primary, "reader");
    let client = PgLockClient::builder().auto_create_tables(false).connect(&standby.url()).unwrap();
    let error = client.acquire("k", TTL).expect_err("it cannot write");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error}");
    assert!(!error.is_outcome_unknown(), "{error}");
    assert!(client.is_locked("k").is_ok(), "it can be read");
    drop(client);
}

#[test]
fn no_fence_repeats_when_a_synchronous_standby_takes_over_under_load() {
    let primary = Server::start(&Config::new());
    let client = PgLockClient::connect(primary.url()).unwrap();
    let standby = standby_of(&primary, "twin");
    primary.configure("synchronous_standby_names", "twin");
    wait_until(LIMIT, "the standby is synchronous", || {
        let sql = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
        primary.client().query_one(sql, &[]).unwrap().get::<_, i64>(0) == 1
    });
    let greatest = [0, 0, 0].map(AtomicU64::new);
    let load = std::thread::scope(|scope| {
        for (n, last) in greatest.iter().enumerate() {
            let client = &client;
            scope.spawn(move || {
                let key = format!("k{n}");
                // Until the primary is away.
                while let Ok(AcquireResult::Acquired(granted)) = client.acquire(&key, TTL) {
                    last.store(granted.fence.get(), Ordering::SeqCst);
                    let _ = client.release(&granted.lock_id);
                }
            });
        }
        let load = poll(LIMIT, || greatest.iter().all(|last| last.load(Ordering::SeqCst) > 10));
        primary.stop(Stop::Immediate);
        load
    });
    assert!(load, "there was no load: {greatest:?}");
    standby.ctl(&["promote", "-w"]);
    let promoted = PgLockClient::connect(&standby.url()).unwrap();
    for (n, last) in greatest.into_iter().map(AtomicU64::into_inner).enumerate() {
        let key = format!("k{n}");
        // Whoever held it may still: the release need not have reached the standby.
        promoted.operator().break_lock(&key, "test").unwrap();
        let granted = grant(&promoted, &key);
        assert!(granted.fence.get() > last, "{} after {last}", granted.fence);
    }
    drop(promoted);
    drop(client);
}

#[test]
fn an_asynchronous_failover_repeats_fences_until_the_counters_are_raised() {
    let primary = Server::start(&Config::new());
    let client = PgLockClient::connect(primary.url()).unwrap();
    let first = grant(&client, "k");
    let _ = client.release(&first.lock_id);
    let standby = standby_of(&primary, "behind");
    let receive = |standbys: i64| {
        let count = "SELECT count(*) FROM pg_stat_replication";
        primary.client().query_one(count, &[]).unwrap().get::<_, i64>(0) == standbys
    };
    wait_until(LIMIT, "the standby receives", || receive(1));
    // The standby stops to receive, as one that is far behind.
    let mut sql = postgres::Client::connect(&standby.url(), NoTls).unwrap();
    sql.batch_execute("ALTER SYSTEM SET primary_conninfo = ''").unwrap();
    sql.batch_execute("SELECT pg_reload_conf()").unwrap();
    wait_until(LIMIT, "nothing is received any more", || receive(0));
    let lost: Vec<_> = (0..5)
        .map(|_| {
            let granted = grant(&client, "k");
            let _ = client.release(&granted.lock_id);
            granted.fence
        })
        .collect();
    primary.stop(Stop::Immediate);
    standby.ctl(&["promote", "-w"]);
    let promoted = PgLockClient::connect(&standby.url()).unwrap();
    let repeated = grant(&promoted, "k");
    assert!(lost.contains(&repeated.fence), "what can happen: a fence that somebody has already");
    let _ = promoted.release(&repeated.lock_id);
    postgres::Client::connect(&standby.url(), NoTls).unwrap().batch_execute(RAISE).unwrap();
    let raised = grant(&promoted, "k");
    assert!(lost.iter().all(|fence| raised.fence > *fence));
    drop(promoted);
    drop(client);
}
