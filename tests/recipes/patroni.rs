//! A cluster that fails over.

// recipe: With Patroni
use std::thread;
use std::time::{Duration, Instant};
use syncguard::{ErrorCode, LockGuard, PgLockClient, Result};

/// Name every node in the address: `postgresql://app@db1,db2,db3/app?target_session_attrs=read-write`.
/// `lock` does not wait a failover out, so that a server can answer; where that is right, try again.
fn lock_through_a_failover(locks: &PgLockClient, key: &str, patience: Duration) -> Result<LockGuard> {
    let end = Instant::now() + patience;
    loop {
        match locks.lock(key) {
            Err(error)
                if Instant::now() < end
                    && matches!(error.code(), ErrorCode::ServiceUnavailable | ErrorCode::NetworkTimeout) =>
            {
                thread::sleep(Duration::from_millis(500)); // no node is the primary yet
            }
            answer => return answer,
        }
    }
}
// end

use crate::support::{Config, LIMIT, Server, Stop, standby};

#[test]
fn a_lock_is_taken_after_the_standby_became_the_primary() {
    let primary = Server::start(&Config::new());
    let setup = PgLockClient::connect(primary.url()).unwrap();
    setup.lock("before").unwrap().release().unwrap();
    let standby = standby::standby_of(&primary, "recipe");
    let hosts = format!("127.0.0.1:{},127.0.0.1:{}", standby.port, primary.port());
    let locks = PgLockClient::builder()
        .auto_create_tables(false)
        .connect(&format!("postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"))
        .unwrap();
    lock_through_a_failover(&locks, "k", Duration::ZERO).unwrap().release().unwrap();

    primary.stop(Stop::Immediate);
    let mut error = lock_through_a_failover(&locks, "k2", Duration::ZERO).unwrap_err();
    if error.is_outcome_unknown() {
        // It was sent while the server went away, on the connection that was open.
        error = lock_through_a_failover(&locks, "k2", Duration::ZERO).unwrap_err();
    }
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error}");
    thread::scope(|scope| {
        let waits = scope.spawn(|| lock_through_a_failover(&locks, "k2", LIMIT));
        standby.ctl(&["promote", "-w"]);
        waits.join().unwrap().unwrap().release().unwrap();
    });
}
