//! Those who are served in order beside those who are not: a free key, and a hundred processes that wait for one.

use std::thread;
use std::time::{Duration, Instant};

use postgres::{Client, NoTls};
use syncguard::{LockOptions, PgLockClient};

use crate::Stage;
use crate::cpu;
use crate::pairs::{Pair, time};
use crate::report::Goal::None as NoGoal;
use crate::support::{Config, Server};

const WAITERS: usize = 100;

pub(crate) fn run(stage: &Stage) {
    let url = stage.schema.socket_url();
    cpu::on_one(stage.server.pid().unwrap(), || alone(stage, &url));
    let server = Server::start(&Config::new().fsync(true).set("max_connections", "500"));
    crowd(stage, &server);
}

/// A key that nobody else wants.
fn alone(stage: &Stage, url: &str) {
    let client = PgLockClient::connect(url).unwrap();
    let fair = LockOptions::new().fair(true);
    let n = 100;
    let pair = Pair::run(
        stage.blocks,
        || time(|| (0..n).for_each(|i| drop(client.lock(&format!("plain-{i}")).unwrap()))),
        || time(|| (0..n).for_each(|i| drop(client.lock_with(&format!("fair-{i}"), &fair).unwrap()))),
    );
    let figure = "a lock in order and release / a lock and release, one processor";
    stage.report.row(figure, pair.cost(), NoGoal, &pair.note(n, ["plain", "in order"]));
}

/// A hundred clients wait for one key, each for itself: what they ask while they wait, and how fast the key goes round.
fn crowd(stage: &Stage, server: &Server) {
    let holder = PgLockClient::connect(server.url()).unwrap();
    let clients: Vec<PgLockClient> = (0..WAITERS)
        .map(|_| PgLockClient::builder().max_connections(1).connect(server.url()).unwrap())
        .collect();
    let mut sql = Client::connect(server.url(), NoTls).unwrap();
    let rounds = if stage.quick { 1 } else { 5 };
    let (mut asked, mut passed) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for round in 0..=rounds {
        for fair in [false, true] {
            let options = LockOptions::new().fair(fair).wait_forever().ttl(crate::TTL);
            let (per_second, each) = go_round(&holder, &clients, &options, &mut sql);
            if round > 0 {
                asked[usize::from(fair)].push(per_second);
                passed[usize::from(fair)].push(each * 1e3);
            }
        }
    }
    for (at, how) in ["in no order", "in order"].into_iter().enumerate() {
        let asked = std::mem::take(&mut asked[at]);
        stage.report.row(
            &format!("100 clients wait for a key {how}: transactions per second"),
            asked,
            NoGoal,
            "",
        );
        let passed = std::mem::take(&mut passed[at]);
        stage.report.row(&format!("… a handover to the next of them {how}, in ms"), passed, NoGoal, "");
    }
}

/// Transactions per second while all wait, and how long each handover takes then.
fn go_round(
    holder: &PgLockClient,
    clients: &[PgLockClient],
    options: &LockOptions,
    sql: &mut Client,
) -> (f64, f64) {
    let mut transactions = || {
        let count =
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()";
        sql.query_one(count, &[]).unwrap().get::<_, i64>(0)
    };
    let guard = holder.lock_with("crowd", options).unwrap();
    thread::scope(|scope| {
        let waiting: Vec<_> = clients
            .iter()
            .map(|client| scope.spawn(move || drop(client.lock_with("crowd", options).unwrap())))
            .collect();
        // Until all wait as they do after a while; what the server counts comes a second late.
        thread::sleep(Duration::from_secs(6));
        let (before, start) = (transactions(), Instant::now());
        thread::sleep(Duration::from_secs(5));
        let per_second = (transactions() - before) as f64 / start.elapsed().as_secs_f64();
        let start = Instant::now();
        drop(guard);
        waiting.into_iter().for_each(|thread| thread.join().unwrap());
        (per_second, start.elapsed().as_secs_f64() / WAITERS as f64)
    })
}
