//! Session locks under everything at once: short deadlines, releases, drops of every kind, terminated
//! sessions, and holders of three kinds of connection. No two holders believe in one key at a time.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::session_locks::builder;
use crate::support::{Config, LIMIT, Server, together, wait_until};
use postgres::NoTls;
use r2d2_postgres::PostgresConnectionManager;
use syncguard::{AdvisoryGuard, AdvisoryKey, AdvisoryOptions, ErrorCode, PgLockClient};

const HOLDERS: usize = 9;
const KEYS: i64 = 3;
const FOR: Duration = Duration::from_secs(8);

/// A time during which somebody believed that it alone held the key: from when it had the guard to
/// when it last saw that the guard was held.
struct Belief {
    key: i64,
    from: Instant,
    to: Instant,
    /// Its session, which may be ended by force: the server's next holder may come before it has noticed.
    pid: i32,
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// Holds for a while, or until it is lost, and says until when it believed: not at all, if it is lost
/// at the first look.
fn work(guard: &AdvisoryGuard, from: Instant, time: Duration) -> Instant {
    let mut seen = from;
    loop {
        // The time is read first: the belief lasted at least until then.
        let now = Instant::now();
        if !guard.is_held() {
            return seen;
        }
        seen = now;
        if from.elapsed() >= time {
            return seen;
        }
        let _ = guard.lost().wait_timeout(Duration::from_millis(1));
    }
}

fn end(guard: AdvisoryGuard, dice: &mut Dice, runtime: &tokio::runtime::Runtime) {
    match dice.roll(6) {
        0 => drop(guard.release()),
        1 => drop(guard),
        2 => runtime.block_on(async move { drop(guard) }),
        3 => {
            let unwinding = catch_unwind(AssertUnwindSafe(move || {
                let _guard = guard;
                // Without the hook, which would print it.
                std::panic::resume_unwind(Box::new(()));
            }));
            assert!(unwinding.is_err());
        }
        4 => drop(thread::spawn(move || drop(guard)).join()),
        _ => {
            let _ = guard.lost().wait_timeout(LIMIT);
            drop(guard.release());
        }
    }
}

#[test]
fn no_two_holders_believe_in_one_key_at_a_time_whatever_ends_them() {
    let server = Server::start(&Config::new());
    let config: postgres::Config = server.url().parse().unwrap();
    let pool =
        r2d2::Pool::builder().max_size(4).build(PostgresConnectionManager::new(config, NoTls)).unwrap();
    let clients: [PgLockClient; 3] = [
        builder().connect(server.url()).unwrap(),
        builder().connect(server.socket_url()).unwrap(),
        builder().build(pool).unwrap(),
    ];
    let (beliefs, ended) = (Mutex::new(Vec::new()), Mutex::new(HashMap::new()));
    let (start, grants) = (Instant::now(), AtomicUsize::new(0));
    let enough =
        || start.elapsed() >= FOR && (grants.load(Ordering::SeqCst) > 100 || start.elapsed() >= LIMIT);
    together(HOLDERS, |n| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut dice = Dice(u64::try_from(n).unwrap() * 7919 + 1);
        let (client, mut killer) = (&clients[n % clients.len()], server.client());
        while !enough() {
            let number = 1_000_000_000_000 + i64::try_from(dice.roll(3)).unwrap() % KEYS;
            let hold = Duration::from_millis(5 + dice.roll(80));
            let options = AdvisoryOptions::new().timeout(Duration::from_millis(500)).max_hold(hold);
            let guard = match client.advisory_lock_with(&AdvisoryKey::from_i64(number), &options) {
                Ok(guard) => guard,
                Err(error) => {
                    let usual =
                        [ErrorCode::AcquisitionTimeout, ErrorCode::NetworkTimeout, ErrorCode::RateLimited];
                    // A session may be ended between two locks, too.
                    assert!(
                        usual.contains(&error.code()) || error.code() == ErrorCode::ServiceUnavailable,
                        "{error:?}"
                    );
                    continue;
                }
            };
            let from = Instant::now();
            grants.fetch_add(1, Ordering::SeqCst);
            if dice.roll(8) == 0 {
                // Whose session it is by then: a holder that comes late may have let go long since.
                ended.lock().unwrap().entry(guard.pid()).or_insert_with(Instant::now);
                killer.execute("SELECT pg_terminate_backend($1)", &[&guard.pid()]).unwrap();
            }
            let to = work(&guard, from, Duration::from_millis(dice.roll(100)));
            beliefs.lock().unwrap().push(Belief { key: number, from, to, pid: guard.pid() });
            end(guard, &mut dice, &runtime);
        }
    });

    let (mut beliefs, ended) = (beliefs.into_inner().unwrap(), ended.into_inner().unwrap());
    beliefs.sort_by_key(|belief| (belief.key, belief.from));
    let is_ended = |one: &Belief| ended.get(&one.pid).is_some_and(|at| *at <= one.to);
    for pair in beliefs.windows(2) {
        let [first, second] = pair else { unreachable!("two at a time") };
        let overlap = first.key == second.key && first.to > second.from;
        assert!(!overlap || is_ended(first), "{:?} too long", first.to - second.from);
    }
    let grants = grants.load(Ordering::SeqCst);
    assert!(grants > 100, "{grants} grants");
    eprintln!(
        "{grants} grants, {} of them ended by force",
        beliefs.iter().filter(|belief| is_ended(belief)).count()
    );

    // What is left: nothing but idle connections.
    let mut observer = server.client();
    let mut count = |sql: &str| -> i64 { observer.query_one(sql, &[]).unwrap().get(0) };
    wait_until(LIMIT, "no lock is left", || {
        count("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
    });
    for client in &clients {
        assert!(client.close(LIMIT).unwrap().is_clean());
    }
    drop(clients);
    wait_until(LIMIT, "no session is left", || {
        count("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'") == 1
    });
}
