//! Several keys in one message, beside as many locks taken one after the other.

use std::time::Duration;

use syncguard::{LockGuard, PgLockClient};

use crate::Stage;
use crate::cpu;
use crate::line::Line;
use crate::pairs::{Pair, time};
use crate::report::Goal::{self, AtMost};

pub(crate) fn run(stage: &Stage) {
    let socket = stage.schema.socket_url();
    let postmaster = stage.server.pid().unwrap();
    cpu::on_one(postmaster, || {
        sets(stage, &socket, "socket, one processor", [Goal::None, Goal::None]);
    });
    sets(stage, &socket, "socket", [AtMost(0.75), AtMost(0.35)]);
    let line = Line::start(stage.server.port(), Duration::from_micros(500));
    sets(stage, &line.url(&stage.schema.url()), "1 ms round trip", [AtMost(0.55), AtMost(0.2)]);
}

fn sets(stage: &Stage, url: &str, way: &str, goals: [Goal; 2]) {
    let client = PgLockClient::connect(url).unwrap();
    for (size, goal) in [2, 8].into_iter().zip(goals) {
        let n = 80 / size;
        let keys =
            |i: usize| -> Vec<String> { (0..size).map(|place| format!("several-{i}-{place}")).collect() };
        let keys: Vec<_> = (0..n).map(keys).collect();
        let pair = Pair::run(
            stage.blocks,
            || time(|| keys.iter().for_each(|keys| one_by_one(&client, keys))),
            || {
                time(|| {
                    keys.iter().for_each(|keys| client.lock_all(keys).unwrap().release().map(drop).unwrap());
                })
            },
        );
        let figure =
            format!("`lock_all` of {size} keys and release / {size} locks one after the other, {way}");
        stage.report.row(&figure, pair.cost(), goal, &pair.note(n, ["one by one", "at once"]));
    }
}

fn one_by_one(client: &PgLockClient, keys: &[String]) {
    let guards: Vec<LockGuard> = keys.iter().map(|key| client.lock(key).unwrap()).collect();
    for guard in guards {
        guard.release().map(drop).unwrap();
    }
}
