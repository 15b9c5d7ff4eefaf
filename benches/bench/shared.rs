//! Readers of a key: what one costs, what many cost each other, and a writer beside them.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use syncguard::{LockGuard, LockOptions, PgLockClient};

use crate::Stage;
use crate::cpu;
use crate::pairs::{Pair, time, together};
use crate::report::Goal::{AtMost, None as NoGoal};
use crate::report::quantile;

const WORK: Duration = Duration::from_millis(1);
/// How long each block of the processes lasts.
const BLOCK: Duration = Duration::from_millis(1500);
/// How long readers and the writer hold the key where they take turns.
const HOLD: Duration = Duration::from_millis(20);

pub(crate) fn run(stage: &Stage) {
    let url = stage.schema.socket_url();
    cpu::on_one(stage.server.pid().unwrap(), || alone(stage, &url));
    crowd(stage, &url);
    turns(stage, &url);
}

fn options() -> LockOptions {
    LockOptions::new().timeout(Duration::from_secs(30))
}

/// One reader: of a key that nobody has, and beside another one.
fn alone(stage: &Stage, url: &str) {
    let client = PgLockClient::connect(url).unwrap();
    let n = 100;
    let beside: Vec<LockGuard> = (0..n).map(|i| client.read_lock(&format!("beside-{i}")).unwrap()).collect();
    for (key, figure) in [("read", "of a free key"), ("beside", "beside another")] {
        let pair = Pair::run(
            stage.blocks,
            || time(|| (0..n).for_each(|i| drop(client.lock(&format!("plain-{i}")).unwrap()))),
            || time(|| (0..n).for_each(|i| drop(client.read_lock(&format!("{key}-{i}")).unwrap()))),
        );
        let figure = format!("a reader {figure}, join and leave / a lock and release, one processor");
        stage.report.row(&figure, pair.cost(), AtMost(1.6), &pair.note(n, ["lock", "reader"]));
    }
    drop(beside);
}

/// Sixteen readers in four processes: of one key, of one with a shared lease for each process, and of sixteen keys.
fn crowd(stage: &Stage, url: &str) {
    let (mut one, mut counted, mut rates) = (vec![], vec![], vec![]);
    for block in 0..=stage.blocks.min(7) {
        let [keys, key, process] = ["keys", "key", "process"].map(|what| joins(url, what));
        if block > 0 {
            one.push(key / keys);
            counted.push(process / keys);
            rates.push((keys, key, process));
        }
    }
    let middle = |of: fn(&(f64, f64, f64)) -> f64| {
        let all: Vec<f64> = rates.iter().map(of).collect();
        quantile(&all, 0.5)
    };
    let note = format!("{:.0} joins/s of one key, {:.0} of sixteen", middle(|it| it.1), middle(|it| it.0));
    let figure = "16 readers of one key, 4 processes, 1 ms of work / of 16 keys";
    stage.report.row(figure, one, NoGoal, &note);
    let figure = "… one lease a process, its users counted there / of 16 keys";
    stage.report.row(figure, counted, NoGoal, &format!("{:.0} joins/s", middle(|it| it.2)));
}

/// How often four processes join in a second.
fn joins(url: &str, what: &str) -> f64 {
    let program = std::env::current_exe().unwrap();
    let children: Vec<_> = (0..4)
        .map(|process| {
            let mut command = Command::new(&program);
            command.args(["--readers", url, what, &process.to_string()]);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let mut ready: Vec<_> = children
        .into_iter()
        .map(|mut child| {
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            assert_eq!(lines.next().unwrap().unwrap(), "ready");
            (child, lines)
        })
        .collect();
    for (child, _) in &mut ready {
        writeln!(child.stdin.as_mut().unwrap(), "go").unwrap();
    }
    let counts = ready.into_iter().map(|(mut child, mut lines)| {
        let count: f64 = lines.next().unwrap().unwrap().parse().unwrap();
        assert!(child.wait().unwrap().success());
        count
    });
    counts.sum::<f64>() / BLOCK.as_secs_f64()
}

/// What a child of [`joins`] does: four threads that read.
pub(crate) fn child(args: &[String]) {
    let [url, what, process] = args else { panic!("an address, what to read, and which process this is") };
    let client = PgLockClient::connect(url).unwrap();
    drop(client.read_lock(&format!("warm-{process}")).unwrap());
    println!("ready");
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
    let (end, count) = (Instant::now() + BLOCK, AtomicU64::new(0));
    let users = Users(Mutex::new((0, None)));
    together(&mut vec![client; 4], |thread, client, go| {
        let key = if what == "keys" { format!("own-{process}-{thread}") } else { "hot readers".to_owned() };
        go.wait();
        while Instant::now() < end {
            if what == "process" {
                users.enter(client, &key);
                thread::sleep(WORK);
                users.leave();
            } else {
                let guard = client.read_lock_with(&key, &options()).unwrap();
                thread::sleep(WORK);
                drop(guard);
            }
            count.fetch_add(1, Ordering::Relaxed);
        }
    });
    println!("{}", count.into_inner());
}

/// One shared lease of a process, and how many of its threads use it.
struct Users(Mutex<(u32, Option<LockGuard>)>);

impl Users {
    fn enter(&self, client: &PgLockClient, key: &str) {
        let mut users = self.0.lock().unwrap();
        if users.0 == 0 {
            users.1 = Some(client.read_lock_with(key, &options()).unwrap());
        }
        users.0 += 1;
    }

    fn leave(&self) {
        let mut users = self.0.lock().unwrap();
        users.0 -= 1;
        if users.0 == 0 {
            users.1 = None;
        }
    }
}

/// A writer and six readers that overlap, each with a client of its own.
fn turns(stage: &Stage, url: &str) {
    let rounds = if stage.quick { 40 } else { 200 };
    let stop = AtomicBool::new(false);
    let reads = Mutex::new(Vec::new());
    let writes = thread::scope(|scope| {
        for _ in 0..6 {
            let (stop, reads) = (&stop, &reads);
            scope.spawn(move || {
                let client = PgLockClient::connect(url).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let asked = Instant::now();
                    let guard = client.read_lock_with("turns", &options()).unwrap();
                    reads.lock().unwrap().push(asked.elapsed().as_secs_f64() / HOLD.as_secs_f64());
                    thread::sleep(HOLD);
                    drop(guard);
                }
            });
        }
        let client = PgLockClient::connect(url).unwrap();
        let writes: Vec<f64> = (0..rounds)
            .map(|_| {
                let asked = Instant::now();
                let guard = client.lock_with("turns", &options()).unwrap();
                let waited = asked.elapsed().as_secs_f64() / HOLD.as_secs_f64();
                thread::sleep(HOLD);
                drop(guard);
                thread::sleep(HOLD);
                waited
            })
            .collect();
        stop.store(true, Ordering::Relaxed);
        writes
    });
    let reads = reads.into_inner().unwrap();
    let ms = HOLD.as_millis();
    let note = format!("p50 {:.1}; {rounds} times, all hold for {ms} ms", quantile(&writes, 0.5));
    let figure = "a writer beside 6 readers that overlap, its wait, p99 / how long a reader holds";
    stage.report.count(figure, quantile(&writes, 0.99), AtMost(10.0), &note);
    let note =
        format!("p50 {:.2}, p99 {:.1}, of {}", quantile(&reads, 0.5), quantile(&reads, 0.99), reads.len());
    let figure = "… the longest wait of a reader / how long the writer holds";
    stage.report.count(figure, quantile(&reads, 1.0), AtMost(10.0), &note);
}
