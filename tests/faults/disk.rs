//! A disk that is full: on a file system of a worker's own, with the server on it.

use std::time::{Duration, Instant};

use syncguard::{AcquireResult, ErrorCode, ExtendResult, LockError, PgLockClient, ReleaseResult};

use crate::support::room::{Full, Room};
use crate::support::worker::{self, Parent};
use crate::support::{Config, Server, Worker};

const TTL: Duration = Duration::from_secs(60);
const LIMIT: Duration = Duration::from_secs(2);

fn timed<R>(call: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = call();
    assert!(start.elapsed() < LIMIT + Duration::from_secs(1), "{:?}", start.elapsed());
    result
}

/// Grants keys that nobody has used, until an error.
fn until_it_fails(client: &PgLockClient, from: usize) -> (Vec<syncguard::Acquired>, LockError) {
    let mut granted = Vec::new();
    loop {
        // Long, so that the tables need more place soon.
        let key = format!("{:x<500}", format!("new:{}:", from + granted.len()));
        match timed(|| client.acquire(&key, TTL)) {
            Ok(AcquireResult::Acquired(lease)) => granted.push(lease),
            Ok(AcquireResult::Locked) => panic!("nobody else is there"),
            Err(error) => return (granted, error),
        }
        assert!(granted.len() < 100_000, "the disk is not full");
    }
}

fn tenant(parent: &Parent) {
    let server = Server::start(&Config::new().set("max_wal_size", "64MB"));
    let client = PgLockClient::builder().operation_timeout(LIMIT).connect(server.url()).unwrap();
    let held = client.acquire("held", TTL).unwrap().acquired().unwrap();
    let mut everything = vec![held.clone()];
    for round in 0..2 {
        let full = Full::fill();
        let (granted, error) = until_it_fails(&client, 10_000 * round);
        assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error}");
        assert_eq!(error.sqlstate(), Some("53100"), "{error}");
        assert!(!error.is_outcome_unknown(), "{error}");
        parent.say(&format!("{error}"));
        // What needs no place goes on.
        assert!(timed(|| client.is_locked("held")).unwrap());
        drop(full);
        everything.extend(granted);
        let after = (0..50).map(|n| client.acquire(&format!("after:{round}:{n}"), TTL));
        everything.extend(after.map(|result| result.unwrap().acquired().expect("nobody else is there")));
    }
    // The server's own log finds no place: it ends, and says so to nobody.
    let full = Full::fill();
    let mut sql = server.client();
    while sql.batch_execute("SELECT pg_logical_emit_message(false, '', ''), pg_switch_wal()").is_ok() {}
    let error = loop {
        match timed(|| client.extend(&held.lock_id, TTL)) {
            Err(error) => break error,
            Ok(extended) => assert!(matches!(extended, ExtendResult::Extended { .. })),
        }
    };
    parent.say(&format!("{error}"));
    assert!(matches!(error.code(), ErrorCode::ServiceUnavailable | ErrorCode::NetworkTimeout), "{error}");
    drop(full);
    server.revive();
    // Nothing that was granted is lost, and no fence is granted again.
    for lease in &everything {
        assert!(client.owns(&lease.lock_id).unwrap());
    }
    assert!(matches!(client.acquire("held", TTL), Ok(AcquireResult::Locked)));
    assert_eq!(client.release(&held.lock_id).unwrap(), ReleaseResult::Released);
    assert!(client.acquire("held", TTL).unwrap().acquired().unwrap().fence > held.fence);
    parent.say(&format!("{} leases are there", everything.len()));
}

#[test]
fn a_full_disk_loses_nothing_that_was_granted() {
    worker::part("tenant", tenant);
    let room = Room::create();
    let mut tenant =
        Worker::start_in(&room, 150, "disk::a_full_disk_loses_nothing_that_was_granted", "tenant");
    let (lines, status) = tenant.report(crate::support::LIMIT * 2);
    assert!(status.success(), "{lines:?}");
    assert_eq!(lines.len(), 4, "{lines:?}");
}
