//! One key that everybody wants, in one process and in four.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use syncguard::{LockOptions, PgLockClient};

use crate::Stage;
use crate::pairs::{time, together};
use crate::report::Goal::{AtLeast, AtMost, None as NoGoal};
use crate::report::quantile;

const WORK: Duration = Duration::from_millis(1);
const CYCLES: u64 = 400;

/// One cycle as its thread saw it, in nanoseconds of the machine's monotonic clock.
struct Held {
    asked: u64,
    got: u64,
    left: u64,
    process: usize,
}

pub(crate) fn run(stage: &Stage) {
    let url = stage.schema.socket_url();
    threads(stage, &url);
    processes(stage, &url);
}

fn options() -> LockOptions {
    LockOptions::new().timeout(Duration::from_secs(30))
}

/// A cycle alone: work, acquire and release, with nobody else about.
fn alone(client: &PgLockClient) -> f64 {
    let n = 100;
    let took = time(|| {
        for _ in 0..n {
            let guard = client.lock_with("hot", &options()).unwrap();
            thread::sleep(WORK);
            drop(guard);
        }
    });
    took.as_secs_f64() / f64::from(n)
}

fn threads(stage: &Stage, url: &str) {
    let client = PgLockClient::connect(url).unwrap();
    let mut clients = vec![client.clone(); 16];
    let mut ratios = Vec::new();
    for block in 0..=stage.blocks.min(9) {
        let alone = alone(&client);
        let cycles = AtomicU64::new(0);
        let took = together(&mut clients, |_, client, go| {
            go.wait();
            while cycles.fetch_add(1, Ordering::Relaxed) < CYCLES {
                let guard = client.lock_with("hot", &options()).unwrap();
                thread::sleep(WORK);
                drop(guard);
            }
        });
        if block > 0 {
            ratios.push(alone / (took.as_secs_f64() / CYCLES as f64));
        }
    }
    let note = format!("{:.0} cycles/s alone", 1.0 / alone(&client));
    stage.report.row("one hot key, 16 threads, 1 ms of work / alone", ratios, AtLeast(0.95), &note);
}

fn processes(stage: &Stage, url: &str) {
    let client = PgLockClient::connect(url).unwrap();
    let (mut ratios, mut p50, mut p99, mut across, mut waits) = (vec![], vec![], vec![], vec![], vec![]);
    for block in 0..=stage.blocks.min(7) {
        let alone = alone(&client);
        let mut held = four(url);
        if block == 0 {
            continue;
        }
        held.sort_by_key(|cycle| cycle.got);
        // In the middle, when all four are there.
        let middle = &held[held.len() / 5..held.len() * 4 / 5];
        let span = (middle[middle.len() - 1].got - middle[0].got) as f64 / 1e9;
        ratios.push(alone / (span / (middle.len() - 1) as f64));
        let hand_offs: Vec<f64> =
            middle.windows(2).map(|pair| pair[1].got.saturating_sub(pair[0].left) as f64 / 1e6).collect();
        p50.push(quantile(&hand_offs, 0.5));
        p99.push(quantile(&hand_offs, 0.99));
        across.extend(
            middle
                .windows(2)
                .filter(|pair| pair[0].process != pair[1].process)
                .map(|pair| pair[1].got.saturating_sub(pair[0].left) as f64 / 1e6),
        );
        waits.extend(middle.iter().map(|cycle| (cycle.got - cycle.asked) as f64 / 1e6));
    }
    let report = &stage.report;
    report.row("the same, 4 processes of 4 threads / alone", ratios, AtLeast(0.85), "");
    report.row("… handover, p50 in ms", p50, AtMost(3.0), "from the start of the release to the next guard");
    report.row("… handover, p99 in ms", p99, AtMost(15.0), "");
    let note = format!("{} of them; p99 {:.1} ms", across.len(), quantile(&across, 0.99));
    report.row("… handover from process to process, in ms", across, NoGoal, &note);
    let note = format!("p99 {:.0} ms, longest {:.0} ms", quantile(&waits, 0.99), quantile(&waits, 1.0));
    report.row("… wait for the key, in ms", waits, NoGoal, &note);
}

/// Four processes for a while: all their cycles.
fn four(url: &str) -> Vec<Held> {
    let program = std::env::current_exe().unwrap();
    let children: Vec<_> = (0..4)
        .map(|_| {
            let mut command = Command::new(&program);
            command.args(["--child", url]).stdin(Stdio::piped()).stdout(Stdio::piped());
            command.spawn().unwrap()
        })
        .collect();
    let all = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for (process, mut child) in children.into_iter().enumerate() {
            let all = &all;
            scope.spawn(move || {
                let mut input = child.stdin.take().unwrap();
                let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
                assert_eq!(lines.next().unwrap().unwrap(), "ready");
                writeln!(input, "go").unwrap();
                for line in lines.map_while(Result::ok) {
                    let mut numbers = line.split(' ').map(|n| n.parse().unwrap());
                    let mut next = || numbers.next().unwrap();
                    let held = Held { asked: next(), got: next(), left: next(), process };
                    all.lock().unwrap().push(held);
                }
                assert!(child.wait().unwrap().success());
            });
        }
    });
    all.into_inner().unwrap()
}

/// What a child of [`four`] does: four threads on the hot key for 1.5 seconds.
pub(crate) fn child(url: &str) {
    let client = PgLockClient::connect(url).unwrap();
    drop(client.lock("warm").unwrap());
    println!("ready");
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
    let end = Instant::now() + Duration::from_millis(1500);
    let mut clients = vec![client; 4];
    let all = Mutex::new(Vec::new());
    together(&mut clients, |_, client, go| {
        go.wait();
        while Instant::now() < end {
            let asked = monotonic();
            let guard = client.lock_with("hot", &options()).unwrap();
            let got = monotonic();
            thread::sleep(WORK);
            let left = monotonic();
            drop(guard);
            all.lock().unwrap().push((asked, got, left));
        }
    });
    for (asked, got, left) in all.into_inner().unwrap() {
        println!("{asked} {got} {left}");
    }
}

/// The same for all processes of the machine.
fn monotonic() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap()
}
