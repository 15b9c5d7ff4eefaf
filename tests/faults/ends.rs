//! Clients that end at any moment, in every way: closed with a deadline of nothing or of plenty, or
//! dropped, while their threads take, renew, hand over and let go, tokens fire, answers are lost, and
//! waiters are called from elsewhere. What is left afterwards is nothing.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use syncguard::{CancelToken, ErrorCode, Heartbeat, LockGuard, LockOptions, PgLockClient};

use crate::holder::Random;
use crate::support::leases::threads_named;
use crate::support::worker::{self, Parent};
use crate::support::{self, Action, LIMIT, Proxy, Worker, wait_until};

const TTL: Duration = Duration::from_millis(1500);
const KEYS: usize = 3;
const THREADS: u64 = 5;
/// A call's bound is a second or less here: none may take longer than that and what a busy machine adds.
const OPERATION: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(10);

/// A time for which the holder of a key believed in its lease: the key, from when, until when, and the fence.
type Held = (usize, Instant, Instant, u64);

/// What the threads of one round share.
struct Round<'a> {
    client: &'a PgLockClient,
    over: &'a AtomicBool,
    /// Guards that somebody else drops, and when.
    handed: &'a Mutex<Vec<LockGuard>>,
    held: &'a Mutex<Vec<Held>>,
    longest: &'a AtomicU64,
}

impl Round<'_> {
    /// One call of every kind that a program makes, chosen by chance.
    fn step(&self, random: &mut Random) {
        let n = usize::try_from(random.below(KEYS as u64)).unwrap_or(0);
        let key = format!("ends:{n}");
        let options = LockOptions::new()
            .ttl(TTL)
            .timeout(Duration::from_millis(50 + random.below(300)))
            .heartbeat(Heartbeat::Every(Duration::from_millis(30)));
        let start = Instant::now();
        let outcome = match random.below(8) {
            0 => self.client.with_lock(&key, &options, |guard| self.work(n, guard, random)),
            1 => self.client.try_lock_with(&key, &options).map(|guard| {
                if let Some(guard) = guard {
                    self.work(n, &guard, random);
                    let _ = guard.extend(TTL * 2);
                    let _ = guard.release();
                }
            }),
            2 => {
                let token = CancelToken::new();
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        token.wait_timeout(Duration::from_millis(20)) || {
                            token.cancel();
                            true
                        }
                    });
                    self.client.cancellable(&token).lock_with(&key, &options).map(drop)
                })
            }
            3 => self.client.lock_with(&key, &options.min_hold(Duration::from_millis(40))).map(drop),
            4 => self.client.acquire(&key, TTL).map(|answer| {
                if let Some(granted) = answer.acquired() {
                    let _ = self.client.release(&granted.lock_id);
                }
            }),
            5 => self.client.lock_with(&key, &options).map(|guard| {
                let granted = guard.leak();
                let _ = self.client.release(&granted.lock_id);
            }),
            6 => self.client.lock_with(&key, &options).map(|guard| {
                self.work(n, &guard, random);
                self.handed.lock().expect("nobody panics").push(guard);
            }),
            _ => self.client.lock_with(&key, &options).map(|guard| self.work(n, &guard, random)),
        };
        self.took(start);
        if outcome.is_err_and(|error| error.code() == ErrorCode::Aborted) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let others = {
            let mut handed = self.handed.lock().expect("nobody panics");
            if handed.len() > 2 { std::mem::take(&mut *handed) } else { Vec::new() }
        };
        let start = Instant::now();
        for guard in others {
            drop(guard);
        }
        self.took(start);
    }

    /// A moment of work. Nobody else may believe to hold this key from its begin to the last look at which it was held;
    /// how long a thread needs to hear of a loss does not count.
    fn work(&self, n: usize, guard: &LockGuard, random: &mut Random) {
        let from = Instant::now();
        let end = from + Duration::from_millis(random.below(15));
        let (mut now, mut last) = (from, None);
        while guard.is_held() {
            last = Some(now);
            if now >= end || guard.lost().wait_timeout(Duration::from_millis(1)) {
                break;
            }
            now = Instant::now();
        }
        let held = last.map(|to| (n, from, to, guard.fence().get()));
        self.held.lock().expect("nobody panics").extend(held);
    }

    fn took(&self, start: Instant) {
        let millis = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.longest.fetch_max(millis, Ordering::SeqCst);
    }
}

/// One client, from its first call to its end.
fn round(url: &str, seed: u64, held: &Mutex<Vec<Held>>, longest: &AtomicU64, parent: &Parent) {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let client = PgLockClient::builder()
        .auto_create_tables(false)
        .operation_timeout(OPERATION)
        .dispose_timeout(OPERATION)
        .max_connections(3)
        .connect(url)
        .expect("nothing is sent yet");
    let (over, handed) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for n in 0..THREADS {
            let round = Round { client: &client, over: &over, handed: &handed, held, longest };
            let mut random = Random(seed.wrapping_add(n + 1).wrapping_mul(0xD134_2543_DE82_EF95) | 1);
            scope.spawn(move || {
                while !round.over.load(Ordering::SeqCst) {
                    round.step(&mut random);
                }
            });
        }
        std::thread::sleep(Duration::from_millis(20 + random.below(250)));
        let limit = [Duration::ZERO, Duration::from_millis(random.below(40)), OPERATION * 3];
        if let Some(limit) = limit.get(usize::try_from(random.below(4)).unwrap_or(0)) {
            let start = Instant::now();
            let report = client.close(*limit).expect("it is this process's");
            let took = start.elapsed();
            assert!(took < *limit + OPERATION + LONGEST, "close({limit:?}) took {took:?}");
            parent.say(&format!("{limit:?} {}", report.is_clean()));
        } else {
            parent.say("dropped");
        }
        // Calls on a client that is closed, and guards of one that is gone.
        std::thread::sleep(Duration::from_millis(random.below(30)));
        over.store(true, Ordering::SeqCst);
    });
    let guards = std::mem::take(&mut *handed.lock().expect("nobody panics"));
    if random.below(2) == 0 {
        drop(client);
        drop(guards);
    } else {
        drop(guards);
        drop(client);
    }
}

fn ender(parent: &Parent) {
    let (url, rounds) = (parent.arg("url"), parent.arg("rounds").parse::<u64>().expect("a number"));
    let (held, longest) = (Mutex::new(Vec::new()), AtomicU64::new(0));
    for n in 0..rounds {
        let (held, longest, url) = (&held, &longest, &url);
        let seed = crate::seed().wrapping_add(n * 2);
        // Two clients, so that waiters are called from elsewhere; each ends when it likes.
        std::thread::scope(|scope| {
            scope.spawn(move || round(url, seed, held, longest, parent));
            round(url, seed + 1, held, longest, parent);
        });
    }
    let mut held = held.into_inner().expect("nobody panics");
    held.sort_unstable();
    assert!(!held.is_empty(), "nobody ever worked");
    for pair in held.windows(2) {
        let ((key, _, until, _), (next, from, ..)) = (pair[0], pair[1]);
        assert!(key != next || until <= from, "two holders of one key: {pair:?}");
    }
    let longest = Duration::from_millis(longest.load(Ordering::SeqCst));
    assert!(longest < OPERATION + LONGEST, "a call took {longest:?}");
    wait_until(LIMIT, "all threads of all clients have ended", || threads_named("syncguard") == 0);
    parent.say(&format!("over, {} times of work, the longest call took {longest:?}", held.len()));
    parent.wait_forever();
}

#[test]
fn clients_that_end_at_any_moment_leave_nothing_behind() {
    worker::part("ender", ender);
    let schema = support::schema();
    drop(PgLockClient::connect(&schema.url()).unwrap());
    let proxy = Proxy::start(support::server().port());
    let mut random = Random(crate::seed() | 1);
    proxy.on_query(move |sql| match random.below(400) {
        0 => Action::CutNow,
        1 => Action::CutAnswerAt(usize::try_from(random.below(60)).unwrap_or(0)),
        2 => Action::CutQueryAt(usize::try_from(random.below(60)).unwrap_or(0)),
        3 => Action::DelayAnswer(Duration::from_millis(random.below(100))),
        4 => Action::Zombie(Some(Duration::from_millis(random.below(100)))),
        5 if !sql.contains("sg_renew") => Action::SwallowAnswer,
        _ => Action::Pass,
    });
    let name = format!("ends-{}", schema.name());
    let url = format!("{}&application_name={name}", proxy.url(&schema.url()));
    let rounds = if crate::long() { 300 } else { 12 };
    let mut ender = Worker::start_alone(
        "ends::clients_that_end_at_any_moment_leave_nothing_behind",
        "ender",
        &[("url", &url), ("rounds", &rounds.to_string())],
    );
    let mut ends = std::collections::BTreeMap::<String, usize>::new();
    let last = loop {
        let line = ender.hear();
        if line.starts_with("over") {
            break line;
        }
        *ends.entry(line).or_default() += 1;
    };
    println!("{last}; ends: {ends:?}; faults: {:?}", proxy.counts());
    let mut sql = schema.client();
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1";
    wait_until(LIMIT, "all connections are closed", || {
        sql.query_one(sessions, &[&name]).unwrap().get::<_, i64>(0) == 0
    });
    // Whoever was not given the time to let go leaves its lease to its end, and no longer.
    let live = "SELECT count(*) FROM syncguard_locks WHERE expires_at_ms > extract(epoch FROM clock_timestamp()) * 1000";
    wait_until(TTL * 2 + Duration::from_secs(2), "no lease lives on", || {
        sql.query_one(live, &[]).unwrap().get::<_, i64>(0) == 0
    });
    let left = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid IN (SELECT pid FROM pg_stat_activity WHERE application_name = $1)";
    assert_eq!(sql.query_one(left, &[&name]).unwrap().get::<_, i64>(0), 0);
}
