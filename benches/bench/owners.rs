//! Locks whose holder says who it is, beside locks whose holder says nothing.

use std::time::Duration;

use syncguard::{LockOptions, PgLockClient};

use crate::Stage;
use crate::cpu;
use crate::line::Line;
use crate::pairs::{Pair, time, together};
use crate::report::Goal::{self, AtMost};

pub(crate) fn run(stage: &Stage) {
    let socket = stage.schema.socket_url();
    cpu::on_one(stage.server.pid().unwrap(), || alone(stage, &socket, "socket, one processor", AtMost(1.25)));
    alone(stage, &socket, "socket", AtMost(1.25));
    crowd(stage, &socket);
    let line = Line::start(stage.server.port(), Duration::from_micros(500));
    alone(stage, &line.url(&stage.schema.url()), "1 ms round trip", AtMost(1.25));
}

fn clients(url: &str) -> (PgLockClient, PgLockClient) {
    let silent = PgLockClient::connect(url).unwrap();
    (silent, PgLockClient::builder().owner("bench:4711").connect(url).unwrap())
}

fn cycles(client: &PgLockClient, options: &LockOptions, prefix: &str, n: usize) {
    for i in 0..n {
        client.lock_with(&format!("{prefix}-{i}"), options).unwrap().release().map(drop).unwrap();
    }
}

fn alone(stage: &Stage, url: &str, way: &str, goal: Goal) {
    let (silent, owned) = clients(url);
    let n = 100;
    let plain = LockOptions::new();
    for (what, options) in [("owner", plain.clone()), ("owner and note", plain.clone().note("a bench"))] {
        let pair = Pair::run(
            stage.blocks,
            || time(|| cycles(&silent, &plain, "owners", n)),
            || time(|| cycles(&owned, &options, "owners", n)),
        );
        let figure = format!("lock and release with {what} / without, {way}");
        stage.report.row(&figure, pair.cost(), goal, &pair.note(n, ["without", "with"]));
    }
}

/// Sixteen threads with keys of their own.
fn crowd(stage: &Stage, url: &str) {
    let (silent, owned) = clients(url);
    let (mut a, mut b) = (vec![silent; 16], vec![owned; 16]);
    let (n, options) = (50, LockOptions::new());
    let run = |clients: &mut Vec<PgLockClient>| {
        together(clients, |thread, client, go| {
            let prefix = format!("owners-{thread}");
            go.wait();
            cycles(client, &options, &prefix, n);
        })
    };
    let pair = Pair::run(stage.blocks, || run(&mut a), || run(&mut b));
    let note = pair.note(16 * n, ["without", "with"]);
    stage.report.row("the same with owner, 16 threads", pair.cost(), AtMost(1.25), &note);
}
