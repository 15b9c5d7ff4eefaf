//! Figures, measured: each beside its floor, interleaved in one process tree, as medians of blocks.
//!
//! `scripts/bench` runs it. Nothing here passes or fails by time; a goal that is missed is printed as
//! missed. The server is a throwaway one with fsync on.
#![allow(clippy::unwrap_used, clippy::cast_precision_loss, clippy::print_stdout)]

#[path = "../../tests/support/mod.rs"]
mod support;

mod line;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use line::Line;
use postgres::{Client, NoTls, Statement};
use syncguard::{CancelToken, Clock, LockBackend, LockOptions, Lookup, PgLockClient, Renewal};

const TTL: Duration = Duration::from_secs(60);

/// The least that a lock costs: one durable upsert and one delete, prepared, by the same driver.
struct Floor {
    client: Client,
    upsert: Statement,
    delete: Statement,
}

impl Floor {
    fn new(url: &str, relaxed: bool) -> Self {
        let mut client = Client::connect(url, NoTls).unwrap();
        if relaxed {
            // Only the deletes go to this connection's session then; see `cycle`.
            client.batch_execute("SET synchronous_commit TO off").unwrap();
        }
        let upsert = client
            .prepare(
                "INSERT INTO floor AS l VALUES ($1, $2, 1, 1, '000000000000001', $1) ON CONFLICT (key) DO UPDATE \
                 SET lock_id = EXCLUDED.lock_id WHERE l.expires_at_ms < 0 RETURNING expires_at_ms",
            )
            .unwrap();
        let delete = client.prepare("DELETE FROM floor WHERE lock_id = $1 RETURNING key").unwrap();
        Self { client, upsert, delete }
    }

    fn upsert(&mut self, key: &str) {
        self.client.query(&self.upsert, &[&key, &key]).unwrap();
    }

    fn delete(&mut self, key: &str) {
        self.client.query(&self.delete, &[&key]).unwrap();
    }
}

fn main() {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let server = support::Server::start(&support::Config::new().fsync(true));
    let schema = server.schema();
    schema
        .client()
        .batch_execute(
            "CREATE TABLE floor (key TEXT PRIMARY KEY, lock_id TEXT NOT NULL, expires_at_ms BIGINT NOT NULL, \
             acquired_at_ms BIGINT NOT NULL, fence TEXT NOT NULL, user_key TEXT NOT NULL); \
             CREATE UNIQUE INDEX ON floor (lock_id); CREATE INDEX ON floor (expires_at_ms)",
        )
        .unwrap();
    let blocks = if quick { 7 } else { 21 };
    println!("| figure | measured | spread | goal | |\n| --- | --- | --- | --- | --- |");
    cycles(
        &schema.socket_url(),
        1,
        blocks,
        "acquire + release / floor (delete's commit off), 1 thread, socket",
        0.65,
    );
    cycles(&schema.socket_url(), 16, blocks, "the same, 16 threads", 0.6);
    let line = Line::start(server.port(), Duration::from_micros(500));
    cycles(&line.url(&schema.url()), 1, blocks.min(9), "the same at 1 ms round trip, 1 thread", 0.9);
    round_trips(&line, &schema.url());
    hot_key(&schema.socket_url(), blocks.min(9));
    renewals(&schema.socket_url(), "10,000 renewals, socket: seconds", 0.15);
    renewals(&line.url(&schema.url()), "10,000 renewals, 1 ms round trip: seconds", 0.3);
}

/// Prints a row; `at_least` says which side of the goal is the good one.
fn row(figure: &str, mut values: Vec<f64>, goal: f64, at_least: bool) {
    values.sort_by(f64::total_cmp);
    let median = values[values.len() / 2];
    let reached = if at_least { median >= goal } else { median <= goal };
    let (low, high) = (values[0], values[values.len() - 1]);
    let sign = if at_least { "≥" } else { "≤" };
    let verdict = if reached { "reached" } else { "missed" };
    println!("| {figure} | {median:.3} | {low:.3}–{high:.3} | {sign} {goal} | {verdict} |");
}

/// Cycles per second of this library against the floor, block by block.
fn cycles(url: &str, threads: usize, blocks: usize, figure: &str, goal: f64) {
    let client = PgLockClient::builder().max_connections(32).connect(url).unwrap();
    let n = if threads == 1 { 200 } else { 100 };
    let mut ratios = Vec::new();
    for block in 0..=blocks {
        let floor = timed(threads, |thread, go| {
            let (mut durable, mut relaxed) = (Floor::new(url, false), Floor::new(url, true));
            go.wait();
            for i in 0..n {
                let key = format!("{thread}-{i}");
                durable.upsert(&key);
                relaxed.delete(&key);
            }
        });
        let ours = timed(threads, |thread, go| {
            let first = client.acquire(&format!("warm-{thread}"), TTL).unwrap().acquired().unwrap();
            client.release(&first.lock_id).unwrap();
            go.wait();
            for i in 0..n {
                let key = format!("{thread}-{i}");
                let grant = client.acquire(&key, TTL).unwrap().acquired().unwrap();
                client.release(&grant.lock_id).unwrap();
            }
        });
        // The first block warms up.
        if block > 0 {
            ratios.push(floor.as_secs_f64() / ours.as_secs_f64());
        }
    }
    row(figure, ratios, goal, true);
}

/// The time from the moment when all threads are ready until the last is done.
fn timed(threads: usize, work: impl Fn(usize, &Barrier) + Sync) -> Duration {
    let go = Barrier::new(threads + 1);
    thread::scope(|scope| {
        let all: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn({
                    let (go, work) = (&go, &work);
                    move || work(thread, go)
                })
            })
            .collect();
        go.wait();
        let start = Instant::now();
        for thread in all {
            thread.join().unwrap();
        }
        start.elapsed()
    })
}

/// Messages to the server per operation, counted on the line.
fn round_trips(line: &Line, url: &str) {
    let client = PgLockClient::connect(&line.url(url)).unwrap();
    let token = CancelToken::new();
    for (form, client, goals) in [
        ("without a token", client.clone(), [1, 1, 1, 1, 1]),
        ("with a token", client.cancellable(&token), [2, 2, 1, 1, 2]),
    ] {
        let warm = client.acquire("warm", TTL).unwrap().acquired().unwrap();
        client.release(&warm.lock_id).unwrap();
        let mut id = String::new();
        let mut count = |what: usize| {
            let before = line.messages();
            match what {
                0 => id = client.acquire("k", TTL).unwrap().acquired().unwrap().lock_id,
                1 => drop(client.extend(&id, TTL).unwrap()),
                2 => drop(client.is_locked("k").unwrap()),
                3 => drop(client.lookup(Lookup::LockId(&id)).unwrap()),
                _ => drop(client.release(&id).unwrap()),
            }
            line.messages() - before
        };
        for (what, name) in ["acquire", "extend", "is_locked", "lookup", "release"].iter().enumerate() {
            let measured = count(what);
            row(&format!("round trips: {name} {form}"), vec![measured as f64], f64::from(goals[what]), false);
        }
    }
}

/// One key, sixteen threads, 1 ms of work: against what one thread alone would reach.
fn hot_key(url: &str, blocks: usize) {
    let client = PgLockClient::connect(url).unwrap();
    let options = LockOptions::new().timeout(Duration::from_secs(30));
    let work = || thread::sleep(Duration::from_millis(1));
    let mut ratios = Vec::new();
    for block in 0..=blocks {
        let n = 100_u64;
        let start = Instant::now();
        for _ in 0..n {
            drop({
                let guard = client.lock_with("hot", &options).unwrap();
                work();
                guard
            });
        }
        let alone = start.elapsed().as_secs_f64() / n as f64;
        let cycles = Arc::new(AtomicU64::new(0));
        let took = timed(16, |_, go| {
            go.wait();
            while cycles.fetch_add(1, Ordering::Relaxed) < 400 {
                let guard = client.lock_with("hot", &options).unwrap();
                work();
                drop(guard);
            }
        });
        if block > 0 {
            ratios.push(alone / (took.as_secs_f64() / 400.0));
        }
    }
    row("one hot key, 16 threads, 1 ms of work / one thread alone", ratios, 0.95, true);
}

/// One pass over ten thousand leases, as the worker makes it.
fn renewals(url: &str, figure: &str, goal: f64) {
    let client = PgLockClient::builder().max_connections(4).connect(url).unwrap();
    let mut direct = Client::connect(url, NoTls).unwrap();
    direct
        .batch_execute(
            "DELETE FROM syncguard_locks; INSERT INTO syncguard_locks SELECT 'r' || n, lpad('r' || n, 22, 'x'), \
             (extract(epoch FROM clock_timestamp()) * 1000)::bigint + 60000, 1, '000000000000001', 'r' || n \
             FROM generate_series(1, 10000) AS n; ANALYZE syncguard_locks",
        )
        .unwrap();
    let leases: Vec<(String, String)> =
        (1..=10_000).map(|n| (format!("r{n}"), format!("{:x>22}", format!("r{n}")))).collect();
    let mut seconds = Vec::new();
    for _ in 0..6 {
        let start = Instant::now();
        for chunk in leases.chunks(500) {
            let renewals: Vec<_> =
                chunk.iter().map(|(key, lock_id)| Renewal { key, lock_id, ttl: TTL }).collect();
            let deadline = Clock::system().now().after(Duration::from_secs(5));
            assert!(LockBackend::renew(&client, &renewals, deadline).iter().all(Result::is_ok));
        }
        seconds.push(start.elapsed().as_secs_f64());
    }
    direct.batch_execute("DELETE FROM syncguard_locks").unwrap();
    row(figure, seconds.split_off(1), goal, false);
}
