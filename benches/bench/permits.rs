//! Permits beside plain locks, and a semaphore that everybody wants.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use syncguard::{LockOptions, PgLockClient, Semaphore};

use crate::Stage;
use crate::cpu;
use crate::pairs::{Pair, time, together};
use crate::report::Goal::{AtLeast, AtMost};

const WORK: Duration = Duration::from_millis(1);
const PERMITS: u32 = 4;
const CYCLES: u64 = 1200;

pub(crate) fn run(stage: &Stage) {
    let url = stage.schema.socket_url();
    cpu::on_one(stage.server.pid().unwrap(), || alone(stage, &url));
    crowd(stage, &url);
}

/// A permit that nobody else wants.
fn alone(stage: &Stage, url: &str) {
    let client = PgLockClient::connect(url).unwrap();
    let n = 100;
    for (limit, goal) in [(3, 1.1), (64, 1.1), (512, 1.6)] {
        let permits = client.semaphore(&format!("alone-{limit}"), limit).unwrap();
        let pair = Pair::run(
            stage.blocks,
            || time(|| (0..n).for_each(|i| drop(client.lock(&format!("plain-{i}")).unwrap()))),
            || time(|| (0..n).for_each(|_| drop(permits.acquire().unwrap()))),
        );
        let figure = format!("a permit of {limit} and release / a lock and release, one processor");
        stage.report.row(&figure, pair.cost(), AtMost(goal), &pair.note(n, ["lock", "permit"]));
    }
}

fn cycle(permits: &Semaphore, options: &LockOptions) {
    let permit = permits.acquire_with(options).unwrap();
    thread::sleep(WORK);
    drop(permit);
}

/// Sixteen threads beside the ideal: as many permits as there are, each passed on at the speed of one thread alone.
fn crowd(stage: &Stage, url: &str) {
    let client = PgLockClient::connect(url).unwrap();
    let options = LockOptions::new().timeout(Duration::from_secs(30));
    let permits = client.semaphore("crowd", PERMITS).unwrap();
    let mut threads = vec![permits.clone(); 16];
    let (mut shares, mut last) = (Vec::new(), 0.0);
    for block in 0..=stage.blocks.min(9) {
        let n = 100;
        let alone = time(|| (0..n).for_each(|_| cycle(&permits, &options))).as_secs_f64() / f64::from(n);
        let cycles = AtomicU64::new(0);
        let took = together(&mut threads, |_, permits, go| {
            go.wait();
            while cycles.fetch_add(1, Ordering::Relaxed) < CYCLES {
                cycle(permits, &options);
            }
        });
        if block > 0 {
            shares.push(alone / f64::from(PERMITS) / (took.as_secs_f64() / CYCLES as f64));
            last = 1.0 / alone;
        }
    }
    let figure = "a semaphore of 4, 16 threads, 1 ms of work / four times alone";
    stage.report.row(figure, shares, AtLeast(0.85), &format!("{last:.0} cycles/s alone"));
}
