//! The server's clock is set, as by an operator or by a virtual machine that wakes up. What a lease
//! then costs is said here; fences and fenced transactions stay right whatever the clock does.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use postgres::NoTls;
use syncguard::{
    AcquireResult, ErrorCode, ExtendResult, Heartbeat, LockOptions, LostReason, PgLockClient, ReleaseResult,
};

use crate::holder::Random;
use crate::support::{Config, LIMIT, Server, wait_until};

const TTL: Duration = Duration::from_secs(30);
const HOUR: i64 = 3_600_000;

fn start() -> (Server, PgLockClient) {
    let server = Server::start(&Config::new().clock());
    let client = PgLockClient::connect(server.url()).unwrap();
    (server, client)
}

fn grant(client: &PgLockClient, key: &str) -> syncguard::Acquired {
    match client.acquire(key, TTL) {
        Ok(AcquireResult::Acquired(granted)) => granted,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_clock_that_is_set_ahead_ends_leases_and_their_holders_can_do_no_harm() {
    let (server, client) = start();
    let options = LockOptions::new().ttl(Duration::from_secs(3));
    let guard = client.lock_with("k", &options.clone().heartbeat(Heartbeat::Off)).unwrap();
    let renewed = client.lock_with("renewed", &options).unwrap();
    let before = Instant::now();
    server.set_clock(HOUR);
    // Nobody can know of it: the holder still believes. That is the price, and it lasts a ttl at most.
    let newer = grant(&client, "k");
    assert!(newer.fence > guard.fence());
    let mut sql = postgres::Client::connect(server.url(), NoTls).unwrap();
    let mut transaction = sql.transaction().unwrap();
    let error = guard.fence_transaction(&mut transaction).expect_err("a newer holder has it");
    assert_eq!(error.code(), ErrorCode::Aborted, "{error}");
    drop(transaction);
    assert_eq!(client.extend(guard.lock_id(), TTL).unwrap(), ExtendResult::NotHeld);
    // Those who ask are told with the next renewal.
    assert!(renewed.lost().wait_timeout(LIMIT));
    assert!(before.elapsed() < LIMIT && !renewed.is_held());
    assert_eq!(renewed.lost_reason(), Some(LostReason::Expired));
    assert_eq!(client.release(&newer.lock_id).unwrap(), ReleaseResult::Released);
}

#[test]
fn a_clock_that_is_set_back_lets_nobody_in_and_what_is_released_is_free() {
    let (server, client) = start();
    server.set_clock(2 * HOUR);
    let held = grant(&client, "held");
    let dead = grant(&client, "dead");
    server.set_clock(0);
    for granted in [&held, &dead] {
        let info = client.lookup(syncguard::Lookup::LockId(&granted.lock_id)).unwrap().expect("it is live");
        assert!(info.expires_at_ms > 0);
    }
    assert!(matches!(client.acquire("held", TTL), Ok(AcquireResult::Locked)));
    // An extend sets the end by the clock as it is now, so a holder that goes on mends its own lease.
    let ExtendResult::Extended { expires_at_ms } = client.extend(&held.lock_id, TTL).unwrap() else {
        panic!("it is held")
    };
    assert!(held.expires_at_ms - expires_at_ms > HOUR, "not two hours ahead any more");
    assert_eq!(client.release(&held.lock_id).unwrap(), ReleaseResult::Released);
    assert!(grant(&client, "held").fence > held.fence);
    // That of a holder that is no more ends two hours late, unless an operator ends it.
    assert!(matches!(client.acquire("dead", TTL), Ok(AcquireResult::Locked)));
    client.operator().break_lock("dead", "the clock was set back").unwrap();
    assert!(grant(&client, "dead").fence > dead.fence);
}

#[test]
fn a_guard_is_renewed_through_a_clock_that_goes_back() {
    let (server, client) = start();
    server.set_clock(HOUR);
    let guard = client.lock_with("k", &LockOptions::new().ttl(Duration::from_secs(2))).unwrap();
    let first = guard.expires_at_ms();
    server.set_clock(0);
    wait_until(LIMIT, "it is renewed by the new clock", || first - guard.expires_at_ms() > HOUR / 2);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        assert!(guard.is_held(), "{:?}", guard.lost_reason());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
}

#[test]
fn fences_grow_and_fenced_work_is_right_while_the_clock_goes_back_and_forth() {
    let (server, client) = start();
    let table = "CREATE TABLE work (key text PRIMARY KEY, n int8 NOT NULL); INSERT INTO work VALUES ('k', 0)";
    server.client().batch_execute(table).unwrap();
    // In the order in which they were answered; a grant that was asked for later has a greater fence.
    let granted = Mutex::new(Vec::<(Instant, Instant, u64)>::new());
    let written = Mutex::new(Vec::new());
    let start = Instant::now();
    let goes_on = || {
        let few = granted.lock().unwrap().len() < 21;
        start.elapsed() < if few { LIMIT } else { Duration::from_secs(6) }
    };
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut sql = postgres::Client::connect(server.url(), NoTls).unwrap();
                let options =
                    LockOptions::new().ttl(Duration::from_millis(800)).retry_delay(Duration::from_millis(5));
                while goes_on() {
                    let sent = Instant::now();
                    let Ok(guard) = client.lock_with("k", &options) else {
                        // A lease from the future: as an operator would.
                        let _ = client.operator().break_lock("k", "the clock");
                        continue;
                    };
                    granted.lock().unwrap().push((sent, Instant::now(), guard.fence().get()));
                    for _ in 0..20 {
                        let Ok(mut transaction) = sql.transaction() else { break };
                        if guard.fence_transaction(&mut transaction).is_err() {
                            break;
                        }
                        let n: i64 = transaction.query_one("SELECT n FROM work", &[]).unwrap().get(0);
                        std::thread::sleep(Duration::from_millis(2));
                        transaction.execute("UPDATE work SET n = $1", &[&(n + 1)]).unwrap();
                        if transaction.commit().is_ok() {
                            written.lock().unwrap().push(n + 1);
                        }
                    }
                    let _ = guard.release();
                }
            });
        }
        let mut random = Random(crate::seed() | 1);
        while goes_on() {
            let steps = [-2 * HOUR, -60_000, -3000, 0, 3000, 60_000, 2 * HOUR];
            server.set_clock(steps[usize::try_from(random.below(7)).unwrap_or(0)]);
            std::thread::sleep(Duration::from_millis(100 + random.below(200)));
        }
    });
    let mut granted = granted.into_inner().unwrap();
    granted.sort_by_key(|(_, _, fence)| *fence);
    assert!(granted.len() > 20, "there was work: {}", granted.len());
    for pair in granted.windows(2) {
        assert_ne!(pair[0].2, pair[1].2, "a fence was granted twice");
        assert!(pair[0].0 < pair[1].1, "fence {} was asked for after {} was granted", pair[0].2, pair[1].2);
    }
    let mut written = written.into_inner().unwrap();
    let all = written.len();
    written.sort_unstable();
    written.dedup();
    assert_eq!(written.len(), all, "an acknowledged write was lost");
    let kept: i64 = server.client().query_one("SELECT n FROM work", &[]).unwrap().get(0);
    assert_eq!(usize::try_from(kept).unwrap(), all, "an acknowledged write was lost");
    println!("{} grants, {all} fenced writes", granted.len());
}

#[test]
fn a_clock_that_is_set_back_leaves_those_who_are_served_in_order_where_they_were() {
    let (server, client) = start();
    server.set_clock(HOUR);
    let fair = LockOptions::new().fair(true).timeout(LIMIT).ttl(TTL);
    let guard = client.lock_with("k", &fair).unwrap();
    let others: Vec<PgLockClient> = (0..3).map(|_| PgLockClient::connect(server.url()).unwrap()).collect();
    let connect = || postgres::Client::connect(server.url(), NoTls).unwrap();
    let (mut sql, mut clock) = (connect(), connect());
    let mut now_ms = || -> f64 {
        let now = "SELECT extract(epoch FROM clock_timestamp())::float8 * 1000";
        clock.query_one(now, &[]).unwrap().get(0)
    };
    // Those whose tickets are of the clock's present.
    let mut in_line = || {
        let count = "SELECT count(*) FROM syncguard_members, (SELECT extract(epoch FROM clock_timestamp()) * 1000 AS now) AS t \
                     WHERE role = 'w' AND since_ms <= now AND expires_at_ms BETWEEN now AND now + 2000";
        sql.query_one(count, &[]).unwrap().get::<_, i64>(0)
    };
    let served = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for (at, client) in others.iter().enumerate() {
            if at == 2 {
                server.set_clock(0);
                wait_until(LIMIT, "the two have said so again", || in_line() == 2);
            }
            let (fair, served) = (&fair, &served);
            scope.spawn(move || {
                let guard = client.lock_with("k", fair).unwrap();
                served.lock().unwrap().push(at);
                guard.release().unwrap();
            });
            let all = i64::try_from(at).unwrap() + 1;
            wait_until(LIMIT, "it is in line", || in_line() == all);
            // Whoever comes in the same milliseconds is ordered by chance.
            let end = now_ms() + 20.0;
            wait_until(LIMIT, "the next one is younger", || now_ms() > end);
        }
        guard.release().unwrap();
    });
    assert_eq!(served.into_inner().unwrap(), [0, 1, 2]);
}
