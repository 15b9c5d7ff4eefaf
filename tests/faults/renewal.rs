//! Renewals never starve, and whoever loses a lease is told so before its deadline, with the reason.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use syncguard::{Heartbeat, LockGuard, LockOptions, LostReason, PgLockClient};

use crate::support::{self, Action, Config, LIMIT, Network, Proxy, Server, Stop, wait_until};
use crate::truth::Bench;

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn guards(client: &PgLockClient, n: usize, ttl: Duration) -> Vec<LockGuard> {
    let often = Heartbeat::Every(ttl / 10);
    let options = LockOptions::new().ttl(ttl).heartbeat(often).timeout(Duration::from_secs(20));
    (0..n).map(|n| client.lock_with(&format!("many:{n}"), &options).expect("all is well")).collect()
}

/// All of them are held for so long.
#[track_caller]
fn stay_held(guards: &[LockGuard], time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        let lost = guards.iter().find(|guard| !guard.is_held());
        assert!(
            lost.is_none(),
            "lost after {:?}: {:?}",
            start.elapsed(),
            lost.and_then(LockGuard::lost_reason)
        );
        std::thread::sleep(ms(20));
    }
}

#[test]
fn two_hundred_guards_outlive_an_exhausted_pool_of_one_and_busy_threads() {
    let schema = support::schema();
    let proxy = Proxy::start(support::server().port());
    // One call takes longer than all of it.
    let patient = PgLockClient::builder().operation_timeout(Duration::from_secs(20));
    let client = patient.max_connections(1).connect(&proxy.url(&schema.url())).unwrap();
    let ttl = Duration::from_secs(5);
    let guards = guards(&client, 200, ttl);
    let over = Arc::new(AtomicBool::new(false));
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..2 * cores {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        // The one connection is taken all the time.
        proxy.on_query(
            |sql| if sql.contains("EXECUTE sg_look") { Action::SwallowAnswer } else { Action::Pass },
        );
        let taken = scope.spawn(|| client.is_locked("k"));
        stay_held(&guards, ttl + ms(2000));
        over.store(true, Ordering::Relaxed);
        proxy.pass_all();
        proxy.cut_all();
        let _ = taken.join();
    });
}

#[test]
fn two_hundred_guards_outlive_a_restart_and_a_renewal_that_fails_once() {
    let server = Server::start(&Config::new());
    let proxy = Proxy::start(server.port());
    let client = PgLockClient::connect(&proxy.url(server.url())).unwrap();
    let ttl = Duration::from_secs(5);
    let guards = guards(&client, 200, ttl);
    proxy.once("EXECUTE sg_renew", Action::CutAnswerAt(10));
    stay_held(&guards, ms(2500));
    assert_eq!(proxy.count(), 1, "a renewal failed");
    server.restart(Stop::Immediate);
    stay_held(&guards, ttl * 2);
}

#[test]
fn two_hundred_guards_are_told_before_their_deadline_that_the_server_is_away() {
    let bench = Bench::new(Duration::from_secs(1));
    let ttl = Duration::from_secs(2);
    let guards = guards(&bench.client, 200, ttl);
    bench.proxy.network(Network::Mute);
    let start = Instant::now();
    // A lease that was renewed just before ends at most a ttl later; whoever tells it may be late on a busy machine.
    for guard in &guards {
        let left = (ttl + ms(2000)).saturating_sub(start.elapsed());
        assert!(guard.lost().wait_timeout(left), "nobody was told in time");
        assert!(!guard.is_held() && guard.remaining().is_zero());
        assert_eq!(guard.lost_reason(), Some(LostReason::Unreachable));
    }
    bench.proxy.network(Network::Open);
}

#[test]
fn the_reason_of_a_loss_is_told() {
    let mut bench = Bench::new(Duration::from_secs(2));
    let short = LockOptions::new().ttl(ms(900)).heartbeat(Heartbeat::Off);
    let expired = bench.client.lock_with("expired", &short).unwrap();
    let options = LockOptions::new().ttl(Duration::from_secs(30)).heartbeat(Heartbeat::Every(ms(300)));
    let max_hold = bench.client.lock_with("max_hold", &options.clone().max_hold(ms(700))).unwrap();
    let missing = bench.client.lock_with("missing", &options).unwrap();
    let taken = bench.client.lock_with("taken", &options).unwrap();
    bench.sql.batch_execute("DELETE FROM syncguard_locks WHERE key = 'missing'").unwrap();
    let take_over = "UPDATE syncguard_locks SET lock_id = 'BBBBBBBBBBBBBBBBBBBBBB', fence = '000000000000009' WHERE key = 'taken'";
    bench.sql.batch_execute(take_over).unwrap();
    for guard in [&expired, &max_hold, &missing, &taken] {
        assert!(guard.lost().wait_timeout(LIMIT));
    }
    assert_eq!(expired.lost_reason(), Some(LostReason::Expired));
    assert_eq!(max_hold.lost_reason(), Some(LostReason::MaxHold));
    assert_eq!(missing.lost_reason(), Some(LostReason::RowMissing));
    assert!(matches!(taken.lost_reason(), Some(LostReason::TakenOver { fence }) if fence.get() == 9));
    bench.proxy.network(Network::Open);
}

#[test]
fn a_stalled_row_does_not_hold_up_the_renewal_of_others() {
    let bench = Bench::new(Duration::from_secs(2));
    let guards = guards(&bench.client, 20, Duration::from_secs(2));
    let mut stranger = bench.schema.client();
    stranger.batch_execute("BEGIN; SELECT * FROM syncguard_locks WHERE key = 'many:7' FOR UPDATE").unwrap();
    wait_until(LIMIT, "the stalled one is lost", || !guards[7].is_held());
    // Its row is there and nobody has told us anything about it.
    let reason = guards[7].lost_reason();
    assert!(matches!(reason, Some(LostReason::Expired | LostReason::Unreachable)), "{reason:?}");
    let others = guards.iter().enumerate().filter(|(n, _)| *n != 7);
    for (n, guard) in others {
        assert!(guard.is_held(), "{n}: {:?}", guard.lost_reason());
    }
}

/// A server's clock that jumps, as the rows see it: an expiry that is nearer or farther than it was.
#[test]
fn a_servers_clock_that_jumps_ahead_costs_the_lease_and_the_fence_still_protects() {
    let mut bench = Bench::new(Duration::from_secs(2));
    let options = LockOptions::new().ttl(Duration::from_secs(20)).heartbeat(Heartbeat::Every(ms(1500)));
    let guard = bench.client.lock_with("k", &options).unwrap();
    bench.sql.batch_execute("UPDATE syncguard_locks SET expires_at_ms = expires_at_ms - 3600000").unwrap();
    let next = bench
        .client
        .acquire("k", Duration::from_secs(20))
        .unwrap()
        .acquired()
        .expect("to the server it is over");
    assert!(next.fence > guard.fence());
    // The old holder still believes, which no lease can help; its transactions do not commit.
    let mut transaction = bench.sql.transaction().unwrap();
    assert!(guard.is_held());
    assert!(guard.fence_transaction(&mut transaction).is_err());
    drop(transaction);
    // And its next renewal tells it.
    assert!(guard.lost().wait_timeout(LIMIT));
    assert!(matches!(guard.lost_reason(), Some(LostReason::TakenOver { fence }) if fence == next.fence));
}

#[test]
fn a_servers_clock_that_jumps_back_keeps_the_key_until_it_is_renewed_or_released() {
    let mut bench = Bench::new(Duration::from_secs(2));
    let guard = bench.client.lock_with("k", &LockOptions::new().ttl(Duration::from_secs(1))).unwrap();
    bench.sql.batch_execute("UPDATE syncguard_locks SET expires_at_ms = expires_at_ms + 3600000").unwrap();
    let far = bench.row("k").unwrap().1;
    wait_until(LIMIT, "a renewal brings the expiry back", || {
        bench.row("k").is_some_and(|row| row.1 < far - 3_000_000)
    });
    assert!(guard.is_held());
    assert!(guard.release().is_ok());
    assert!(bench.row("k").is_none());
}
