//! Acquire and release beside the floor, by threads and by the way to the server.

use std::time::Duration;

use syncguard::{PgLockClient, TelemetryOptions};

use crate::cpu;
use crate::floor::Floor;
use crate::line::Line;
use crate::pairs::{Pair, time, together};
use crate::report::Goal::{self, AtLeast, AtMost};
use crate::stepwise::Stepwise;
use crate::{Stage, TTL};

pub(crate) fn run(stage: &Stage) {
    let socket = stage.schema.socket_url();
    let postmaster = stage.server.pid().unwrap();
    cpu::on_one(postmaster, || {
        threaded(stage, &socket, 1, "socket, one processor", AtLeast(0.65));
        durable(stage, &socket);
        steps(stage, &socket, "socket");
        processor(stage, &socket);
        variants(stage, &socket);
    });
    for (threads, goal) in [(1, AtLeast(0.65)), (2, Goal::None), (4, Goal::None), (8, Goal::None)] {
        threaded(stage, &socket, threads, "socket", goal);
    }
    threaded(stage, &socket, 16, "socket", AtLeast(0.6));
    let tcp = stage.schema.url();
    for threads in [1, 16] {
        threaded(stage, &tcp, threads, "TCP", Goal::None);
    }
    let line = Line::start(stage.server.port(), Duration::from_micros(500));
    threaded(stage, &line.url(&tcp), 1, "1 ms round trip", AtLeast(0.9));
    threaded(stage, &line.url(&tcp), 16, "1 ms round trip", Goal::None);
    steps(stage, &line.url(&tcp), "1 ms round trip");
}

fn cycle(client: &PgLockClient, key: &str) {
    let grant = client.acquire(key, TTL).unwrap().acquired().unwrap();
    client.release(&grant.lock_id).unwrap();
}

fn threaded(stage: &Stage, url: &str, threads: usize, way: &str, goal: Goal) {
    let client = PgLockClient::builder().max_connections(32).connect(url).unwrap();
    let mut floors: Vec<_> = (0..threads).map(|_| Floor::new(url)).collect();
    let mut clients = vec![client; threads];
    let n = if threads == 1 { 100 } else { 60 };
    let pair = Pair::run(
        stage.blocks,
        || {
            together(&mut floors, |thread, floor, go| {
                go.wait();
                for i in 0..n {
                    floor.cycle(&format!("{thread}-{i}"));
                }
            })
        },
        || {
            together(&mut clients, |thread, client, go| {
                // Every thread has had a connection before the clock runs.
                cycle(client, &format!("warm-{thread}"));
                go.wait();
                for i in 0..n {
                    cycle(client, &format!("{thread}-{i}"));
                }
            })
        },
    );
    let plural = if threads == 1 { "" } else { "s" };
    let figure = format!("acquire + release / floor, {threads} thread{plural}, {way}");
    stage.report.row(&figure, pair.speed(), goal, &pair.note(n * threads, ["floor", "ours"]));
}

/// The other floor: both of its commits wait for the disk.
fn durable(stage: &Stage, url: &str) {
    let mut floor = Floor::new(url);
    let figure = "the same against two durable commits";
    beside(stage, url, figure, ("floor", 100), |key| floor.durable_cycle(key));
}

/// What one message saves against thirteen.
fn steps(stage: &Stage, url: &str, way: &str) {
    let mut stepwise = Stepwise::new(url);
    let figure = format!("acquire + release / the same statement by statement (8 + 5), {way}");
    beside(stage, url, &figure, ("by statement", 40), |key| stepwise.cycle(key));
}

/// One thread's cycles beside as many of another kind.
fn beside(stage: &Stage, url: &str, figure: &str, (name, n): (&str, usize), mut other: impl FnMut(&str)) {
    let client = PgLockClient::connect(url).unwrap();
    let pair = Pair::run(
        stage.blocks,
        || time(|| (0..n).for_each(|i| other(&format!("b{i}")))),
        || time(|| (0..n).for_each(|i| cycle(&client, &format!("b{i}")))),
    );
    stage.report.row(figure, pair.speed(), Goal::None, &pair.note(n, [name, "ours"]));
}

fn processor(stage: &Stage, url: &str) {
    let client = PgLockClient::connect(url).unwrap();
    let mut floor = Floor::new(url);
    let postmaster = stage.server.pid().unwrap();
    let (mut theirs, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..stage.blocks.min(11) {
        for (mine, all) in [(false, &mut theirs), (true, &mut ours)] {
            let before = (cpu::client(), cpu::server(postmaster));
            for i in 0..200 {
                let key = format!("cpu{i}");
                if mine { cycle(&client, &key) } else { floor.cycle(&key) }
            }
            all.push((
                cpu::client().saturating_sub(before.0).as_secs_f64(),
                cpu::server(postmaster).saturating_sub(before.1).as_secs_f64(),
            ));
        }
    }
    let ratio = |pick: fn(&(f64, f64)) -> f64| -> (Vec<f64>, String) {
        let all = ours.iter().zip(&theirs).map(|(a, b)| pick(a) / pick(b)).collect();
        let mean = |side: &[(f64, f64)]| side.iter().map(pick).sum::<f64>() / side.len() as f64 * 1e6 / 200.0;
        (all, format!("ours {:.0} µs, floor {:.0} µs", mean(&ours), mean(&theirs)))
    };
    let (client_side, note) = ratio(|x| x.0);
    stage.report.row("client's processor time per cycle / floor", client_side, AtMost(1.3), &note);
    let (server_side, note) = ratio(|x| x.1);
    stage.report.row("server's processor time per cycle / floor", server_side, Goal::None, &note);
}

/// What is built on top of acquire and release, and what an option costs.
fn variants(stage: &Stage, url: &str) {
    let plain = PgLockClient::connect(url).unwrap();
    let n = 100;
    let against = |figure: &str, goal: Goal, names: [&str; 2], other: &mut dyn FnMut(&str)| {
        let pair = Pair::run(
            stage.blocks,
            || time(|| (0..n).for_each(|i| cycle(&plain, &format!("v{i}")))),
            || time(|| (0..n).for_each(|i| other(&format!("v{i}")))),
        );
        stage.report.row(figure, pair.cost(), goal, &pair.note(n, names));
    };
    against("`lock` and drop / acquire + release", Goal::None, ["acquire", "lock"], &mut |key| {
        drop(plain.lock(key).unwrap());
    });
    let silent = PgLockClient::builder().wake_ups(false).connect(url).unwrap();
    let pair = Pair::run(
        stage.blocks,
        || time(|| (0..n).for_each(|i| cycle(&silent, &format!("v{i}")))),
        || time(|| (0..n).for_each(|i| cycle(&plain, &format!("v{i}")))),
    );
    let figure = "with wake-ups where nobody waits / without";
    stage.report.row(figure, pair.cost(), AtMost(1.03), &pair.note(n, ["without", "with"]));
    let token = syncguard::CancelToken::new();
    let cancellable = plain.cancellable(&token);
    against("with a token / without", Goal::None, ["without", "with"], &mut |key| {
        let grant = cancellable.acquire(key, TTL).unwrap().acquired().unwrap();
        cancellable.release(&grant.lock_id).unwrap();
    });
    let told = PgLockClient::builder().telemetry(TelemetryOptions::new(|_event| {})).connect(url).unwrap();
    against("with telemetry / without", Goal::None, ["without", "with"], &mut |key| cycle(&told, key));
}
