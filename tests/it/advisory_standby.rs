//! Session locks and a physical standby: refused there, gone with a failover, and told so.

use std::time::Duration;

use crate::support::session_locks::{builder, key, taken};
use crate::support::standby::standby_of;
use crate::support::{Config, LIMIT, Server, Stop, wait_until};
use postgres::{Client, NoTls};
use syncguard::{AdvisoryLost, AdvisoryOptions, ErrorCode, ReleaseResult};

fn locks(observer: &mut Client) -> i64 {
    let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
    observer.query_one(sql, &[]).unwrap().get(0)
}

#[test]
fn a_hot_standby_refuses_and_a_failover_is_a_loss_that_frees_the_key() {
    let primary = Server::start(&Config::new());
    let standby = standby_of(&primary, "follower");
    let key = key();
    let long = AdvisoryOptions::new().max_hold(LIMIT * 3);

    // The primary's lock is not there, and a lock there would not be here.
    let client = builder().connect(primary.url()).unwrap();
    let held = client.try_advisory_lock_with(&key, &long).unwrap().unwrap();
    let elsewhere = builder().connect(&standby.url()).unwrap();
    for _ in 0..2 {
        for error in [
            elsewhere.try_advisory_lock(&key).unwrap_err(),
            elsewhere.try_advisory_lock_with(&key, &AdvisoryOptions::new().shared()).unwrap_err(),
            elsewhere.advisory_lock_with(&key, &AdvisoryOptions::new().wait_forever()).unwrap_err(),
        ] {
            assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
            assert!(error.to_string().contains("standby"), "{error}");
        }
    }
    let mut observer = Client::connect(&standby.url(), NoTls).unwrap();
    assert_eq!(locks(&mut observer), 0);
    assert_eq!(elsewhere.advisory_holders().unwrap(), [], "looking is allowed");

    // A client that knows both servers.
    let both = format!(
        "host=127.0.0.1,127.0.0.1 port={},{} user=postgres dbname=postgres target_session_attrs=read-write",
        primary.port(),
        standby.port
    );
    let follower = builder().connect(&both).unwrap();
    let other = crate::support::session_locks::key();
    let guard = follower.try_advisory_lock_with(&other, &long).unwrap().unwrap();
    primary.stop(Stop::Immediate);
    assert!(guard.lost().wait_timeout(LIMIT) && held.lost().wait_timeout(LIMIT));
    assert_eq!(guard.lost_reason(), Some(AdvisoryLost::Connection));
    standby.ctl(&["promote", "-w"]);
    let mut next = None;
    wait_until(LIMIT, "the new primary gives the key", || {
        next = follower.try_advisory_lock_with(&other, &long).ok().flatten();
        next.is_some()
    });
    // The one that refused before, too: it looks each time.
    let after = taken(&elsewhere, key);
    assert_eq!(guard.release().unwrap(), ReleaseResult::NotHeld);
    assert_eq!(held.release().unwrap(), ReleaseResult::NotHeld);
    assert!(next.as_ref().is_some_and(syncguard::AdvisoryGuard::is_held) && after.is_held());
    drop((next, after));
    wait_until(LIMIT, "nothing is left", || locks(&mut observer) == 0);
}

#[test]
fn a_thousand_refusals_of_a_standby_cost_no_connection() {
    let primary = Server::start(&Config::new());
    let standby = standby_of(&primary, "follower");
    let client = builder().max_connections(2).connect(&standby.url()).unwrap();
    let mut observer = Client::connect(&standby.url(), NoTls).unwrap();
    let mut sessions = || -> i64 {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'";
        observer.query_one(sql, &[]).unwrap().get(0)
    };
    let start = sessions();
    let key = key();
    for _ in 0..1000 {
        assert_eq!(client.try_advisory_lock(&key).unwrap_err().code(), ErrorCode::ServiceUnavailable);
    }
    let most = start + 2;
    wait_until(Duration::from_secs(60), "no connection too many is left", || sessions() <= most);
}
