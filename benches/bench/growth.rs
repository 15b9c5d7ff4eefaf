//! Tables that have grown, and a hot row under a snapshot that stays open.

use std::time::Duration;

use postgres::{Client, NoTls};
use syncguard::PgLockClient;
use syncguard::backend::Renewal;

use crate::pairs::{Pair, time};
use crate::report::Goal::{self, AtMost, None as NoGoal};
use crate::{Stage, TTL, cpu};

pub(crate) fn run(stage: &Stage) {
    large(stage);
    for (name, parameters) in [
        ("as created", ""),
        ("fillfactor 50", "ALTER TABLE syncguard_locks SET (fillfactor = 50)"),
        (
            "eager autovacuum",
            "ALTER TABLE syncguard_locks SET (autovacuum_vacuum_threshold = 1000, \
             autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0)",
        ),
    ] {
        bloat(stage, name, parameters);
    }
}

/// Ten million counters and a hundred thousand live locks against empty tables.
fn large(stage: &Stage) {
    let (counters, locks) = if stage.quick { (200_000, 10_000) } else { (10_000_000, 100_000) };
    let (small, big) = (stage.server.schema(), stage.server.schema());
    let clients = || [&small, &big].map(|schema| PgLockClient::connect(&schema.socket_url()).unwrap());
    // How long the acquires took, and all of it.
    let cycle = |client: &PgLockClient, n: usize| {
        let mut acquires = Duration::ZERO;
        let whole = time(|| {
            for i in 0..n {
                let mut grant = None;
                acquires += time(|| grant = client.acquire(&format!("k{i}"), TTL).unwrap().acquired());
                client.release(&grant.unwrap().lock_id).unwrap();
            }
        });
        (acquires, whole)
    };
    // Makes the tables.
    for client in clients() {
        cycle(&client, 1);
    }
    eprintln!("bench: {counters} counters");
    let mut direct = Client::connect(&big.socket_url(), NoTls).unwrap();
    direct
        .batch_execute(&format!(
            "INSERT INTO syncguard_fence_counters (fence_key, fence) \
               SELECT 'fence:' || md5(n::text) || md5((n + 1)::text), n FROM generate_series(1, {counters}) AS n; \
             INSERT INTO syncguard_locks SELECT md5(n::text), lpad(n::text, 22, 'x'), \
               (extract(epoch FROM clock_timestamp()) * 1000)::bigint + 6000000, 1, lpad(n::text, 15, '0'), 'u' \
               FROM generate_series(1, {locks}) AS n"
        ))
        .unwrap();
    direct.batch_execute("VACUUM ANALYZE syncguard_fence_counters").unwrap();
    direct.batch_execute("VACUUM ANALYZE syncguard_locks").unwrap();
    direct.batch_execute("CHECKPOINT").unwrap();
    let size = |client: &mut Client, relation: &str| {
        let sql = format!("SELECT pg_total_relation_size('{relation}')");
        client.query_one(&sql, &[]).unwrap().get::<_, i64>(0) as f64
    };
    let note = "with its index; a key of 64 characters, which is not noted beside it";
    let bytes = size(&mut direct, "syncguard_fence_counters") / f64::from(counters);
    // Keys that have been used and keys that have not, on both sides alike.
    let measured = |figure: &str, goal: Goal, part: fn((Duration, Duration)) -> Duration| {
        let [on_small, on_big] = clients();
        let pair = Pair::run(stage.blocks, || part(cycle(&on_small, 100)), || part(cycle(&on_big, 100)));
        stage.report.row(figure, pair.cost(), goal, &pair.note(100, ["empty", "full"]));
    };
    let figure = format!("acquire with {counters} counters and {locks} locks / empty tables");
    cpu::on_one(stage.server.pid().unwrap(), || {
        measured(&format!("{figure}, one processor"), AtMost(1.2), |(acquires, _)| acquires);
        measured("… acquire + release, one processor", NoGoal, |(_, whole)| whole);
    });
    measured(&figure, NoGoal, |(acquires, _)| acquires);
    measured("… acquire + release", NoGoal, |(_, whole)| whole);
    stage.report.count("bytes on disk per counter", bytes.round(), NoGoal, note);
}

/// What renewals of one row leave behind while somebody's snapshot keeps all of it.
fn bloat(stage: &Stage, name: &str, parameters: &str) {
    let schema = stage.server.schema();
    let url = schema.socket_url();
    let client = PgLockClient::connect(&url).unwrap();
    let held = client.acquire("hot", Duration::from_secs(600)).unwrap().acquired().unwrap();
    let mut direct = Client::connect(&url, NoTls).unwrap();
    direct.batch_execute(parameters).unwrap();
    let mut old = Client::connect(&url, NoTls).unwrap();
    old.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM syncguard_locks").unwrap();
    let renewals = if stage.quick { 1000 } else { 20_000 };
    let extend = |n: usize| {
        time(|| {
            for _ in 0..n {
                let renewal = [Renewal::new(
                    "hot",
                    &held.lock_id,
                    syncguard::Fence::new(1).unwrap(),
                    Duration::from_secs(600),
                )];
                let deadline = syncguard::backend::Clock::system().now().after(Duration::from_secs(5));
                syncguard::LockBackend::renew(&client, &renewal, deadline);
            }
        })
        .as_secs_f64()
            / n as f64
    };
    let fresh = extend(200);
    extend(renewals);
    let grown = extend(200);
    let kept = pages(&mut direct);
    old.batch_execute("COMMIT").unwrap();
    direct.batch_execute("VACUUM syncguard_locks").unwrap();
    let after = extend(200);
    let note = format!(
        "{kept} pages of table and indexes then; {:.2} once the snapshot is gone and a vacuum has run",
        after / fresh
    );
    let figure = format!("a renewal after {renewals} under an old snapshot / a first one ({name})");
    stage.report.count(&figure, grown / fresh, NoGoal, &note);
}

fn pages(client: &mut Client) -> i64 {
    let sql = "SELECT (pg_total_relation_size('syncguard_locks') / 8192)::int8";
    client.query_one(sql, &[]).unwrap().get(0)
}
