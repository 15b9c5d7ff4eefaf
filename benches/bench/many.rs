//! Ten thousand guards, and a thousand waiters.

use std::thread;
use std::time::{Duration, Instant};

use postgres::{Client, NoTls};
use stats_alloc::Region;
use syncguard::backend::{Clock, Renewal};
use syncguard::{LockBackend, LockOptions, PgLockClient};

use crate::floor::Floor;
use crate::line::Line;
use crate::pairs::{Pair, time};
use crate::report::Goal::{AtMost, None as NoGoal};
use crate::report::micros;
use crate::{Stage, TTL};

const MANY: usize = 10_000;

pub(crate) fn run(stage: &Stage) {
    let line = Line::start(stage.server.port(), Duration::from_micros(500));
    let socket = stage.schema.socket_url();
    let floor = Some("… / bare updates of as many rows");
    renewals(stage, &socket, ("one pass over 10,000 renewed leases, socket, in s", 0.1), floor);
    renewals(stage, &line.url(&stage.schema.url()), ("… at 1 ms round trip, in s", 0.3), None);
    guards(stage, &socket);
    waiters(stage, &socket);
}

/// One pass over ten thousand leases in batches of 500, as the worker makes it.
fn renewals(stage: &Stage, url: &str, (figure, goal): (&str, f64), floor: Option<&str>) {
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
        (1..=MANY).map(|n| (format!("r{n}"), format!("{:x>22}", format!("r{n}")))).collect();
    let pass = || {
        for chunk in leases.chunks(500) {
            let renewals: Vec<_> = chunk
                .iter()
                .map(|(key, lock_id)| Renewal::new(key, lock_id, syncguard::Fence::new(1).unwrap(), TTL))
                .collect();
            let deadline = Clock::system().now().after(Duration::from_secs(5));
            assert!(LockBackend::renew(&client, &renewals, deadline).iter().all(Result::is_ok));
        }
    };
    let ids: Vec<Vec<&str>> =
        leases.chunks(500).map(|chunk| chunk.iter().map(|(_, id)| id.as_str()).collect()).collect();
    let update = direct
        .prepare("UPDATE syncguard_locks AS l SET expires_at_ms = l.expires_at_ms + 1 FROM unnest($1::text[]) AS w (id) WHERE l.lock_id = w.id")
        .unwrap();
    let mut bare = || {
        for chunk in &ids {
            assert_eq!(direct.execute(&update, &[chunk]).unwrap(), 500);
        }
    };
    let pair = Pair::run(stage.blocks.min(11), || time(&mut bare), || time(pass));
    let seconds = pair.second.iter().map(Duration::as_secs_f64).collect();
    direct.batch_execute("DELETE FROM syncguard_locks").unwrap();
    direct.batch_execute("VACUUM syncguard_locks").unwrap();
    stage.report.row(figure, seconds, AtMost(goal), "in batches of 500, one connection");
    if let Some(figure) = floor {
        stage.report.row(figure, pair.cost(), NoGoal, &pair.note(MANY, ["bare", "a row"]));
    }
}

/// Real guards: what one weighs, and what it takes to drop them.
fn guards(stage: &Stage, url: &str) {
    let client = PgLockClient::connect(url).unwrap();
    let options = LockOptions::new().ttl(Duration::from_secs(120));
    drop(client.lock("warm").unwrap());
    let mut floor = Floor::new(url);
    let region = Region::new(crate::ALLOCATOR);
    let start = Instant::now();
    let guards: Vec<_> =
        (0..MANY).map(|i| client.try_lock_with(&format!("g{i}"), &options).unwrap().unwrap()).collect();
    let took = start.elapsed();
    let change = region.change();
    let bytes = (change.bytes_allocated as f64 - change.bytes_deallocated as f64) / MANY as f64;
    stage.report.count("memory per renewed guard, in bytes", bytes.round(), NoGoal, "allocated and kept");
    (0..MANY).for_each(|i| floor.upsert(&format!("g{i}")));
    let drop_ours = time(|| drop(guards)).as_secs_f64();
    let drop_floor = time(|| (0..MANY).for_each(|i| floor.relaxed_delete(&format!("g{i}")))).as_secs_f64();
    let note =
        format!("ours {drop_ours:.2} s, floor {drop_floor:.2} s; to take them {}", micros(took, MANY as u64));
    stage.report.count("drop of 10,000 guards / as many deletes", drop_ours / drop_floor, NoGoal, &note);
}

/// A thousand threads wait for a thousand keys that another client holds.
fn waiters(stage: &Stage, url: &str) {
    const WAITERS: usize = 1000;
    let (holder, waiter) = (PgLockClient::connect(url).unwrap(), PgLockClient::connect(url).unwrap());
    let options = LockOptions::new().ttl(Duration::from_secs(120)).timeout(Duration::from_secs(60));
    let held: Vec<_> =
        (0..WAITERS).map(|i| holder.try_lock_with(&format!("w{i}"), &options).unwrap().unwrap()).collect();
    let mut direct = Client::connect(url, NoTls).unwrap();
    let mut connections = move || {
        let count = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'";
        direct.query_one(count, &[]).unwrap().get::<_, i64>(0)
    };
    let before = connections();
    thread::scope(|scope| {
        let all: Vec<_> = (0..WAITERS)
            .map(|i| {
                let (waiter, options) = (&waiter, &options);
                scope.spawn(move || drop(waiter.lock_with(&format!("w{i}"), options).unwrap()))
            })
            .collect();
        // Long enough that they all look once in a while, and none is gone.
        thread::sleep(Duration::from_secs(2));
        let used = connections() - before;
        stage.report.count(
            "connections of 1,000 threads that wait for 1,000 keys",
            used as f64,
            AtMost(11.0),
            "a pool of ten and the wake-ups' own",
        );
        let start = Instant::now();
        drop(held);
        for thread in all {
            thread.join().unwrap();
        }
        let took = start.elapsed().as_secs_f64();
        stage.report.count("… seconds from the first release to the last lock and drop", took, NoGoal, "");
    });
}
