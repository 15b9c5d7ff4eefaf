//! Holders that are stopped (SIGSTOP) beyond their ttl in the middle of their work, while newer ones
//! work, and that wake up late: with the fence they do no harm, without it the same program does.
//!
//! A round is one holder. A process of many threads takes as many keys; each thread works up to a
//! point drawn by chance and says that it is there; the process is stopped until all leases are over;
//! newer holders work on every key; the process goes on. The checker reads what everybody was told.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Condvar, Mutex};
use std::time::{Duration, Instant};

use postgres::{Client, NoTls};
use syncguard::{Heartbeat, LockGuard, LockOptions, PgLockClient};

use crate::checker::{Allow, Violation, check};
use crate::history::{History, Op, Outcome, What, now};
use crate::holder::Random;
use crate::support::worker::{self, Parent};
use crate::support::{Config, Server, Worker, together};

const THREADS: usize = 100;
const TTL: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    /// In a transaction that the fence protects.
    Transaction,
    /// The same transaction without the call.
    TransactionWithoutCall,
    /// In another database, by one statement that compares and keeps the fence.
    Statement,
    /// The same statement without the comparison.
    StatementWithoutCondition,
}

impl Mode {
    fn elsewhere(self) -> bool {
        matches!(self, Self::Statement | Self::StatementWithoutCondition)
    }

    /// One unit of work: counts up, and answers the new count, or `None` if it came too late. `pause` is
    /// called at each point, with its number.
    fn work(
        self,
        sql: &mut Client,
        guard: &LockGuard,
        pause: &dyn Fn(u64),
    ) -> Result<Option<i64>, postgres::Error> {
        let key = guard.key();
        if self.elsewhere() {
            let fence = guard.fence().get().cast_signed();
            let statement = if self == Self::Statement {
                "UPDATE work SET n = n + 1, fence = $2 WHERE key = $1 AND fence <= $2 RETURNING n"
            } else {
                "UPDATE work SET n = n + 1, fence = $2 WHERE key = $1 RETURNING n"
            };
            (0..=4).for_each(pause);
            return Ok(sql.query_opt(statement, &[&key, &fence])?.map(|row| row.get(0)));
        }
        pause(0);
        let mut transaction = sql.transaction()?;
        pause(1);
        if self == Self::Transaction && guard.fence_transaction(&mut transaction).is_err() {
            return Ok(None);
        }
        pause(2);
        let n: i64 = transaction.query_one("SELECT n FROM work WHERE key = $1", &[&key])?.get(0);
        pause(3);
        transaction.execute("UPDATE work SET n = $2 WHERE key = $1", &[&key, &(n + 1)])?;
        pause(4);
        transaction.commit()?;
        Ok(Some(n + 1))
    }
}

const MODES: [Mode; 4] =
    [Mode::Transaction, Mode::TransactionWithoutCall, Mode::Statement, Mode::StatementWithoutCondition];

fn take(client: &PgLockClient, n: usize, once: bool) -> Option<LockGuard> {
    let options = LockOptions::new().ttl(TTL).heartbeat(Heartbeat::Off).timeout(Duration::from_secs(20));
    let key = format!("k{n}");
    if once { client.try_lock_with(&key, &options).ok()? } else { client.lock_with(&key, &options).ok() }
}

fn told(key: &str, fence: u64, value: Option<i64>) -> String {
    format!("{key} {fence} {}", value.map_or_else(|| "-".to_owned(), |value| value.to_string()))
}

/// The process that is stopped.
fn sleeper(parent: &Parent) {
    let mode = MODES[parent.arg("mode").parse::<usize>().expect("a number")];
    let client = PgLockClient::builder().max_connections(8).connect(&parent.arg("url")).expect("it is there");
    let work = parent.arg("work");
    let (there, gate) = (AtomicUsize::new(0), (Mutex::new(0_u64), Condvar::new()));
    let (begin, end) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    let seed = crate::seed();
    std::thread::scope(|scope| {
        for n in 0..THREADS {
            let (client, work, there, gate, begin, end) = (&client, &work, &there, &gate, &begin, &end);
            scope.spawn(move || {
                let mut random = Random(seed.wrapping_add(n as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
                let mut sql = Client::connect(work, NoTls).expect("it is there");
                for round in 1_u64.. {
                    begin.wait();
                    let at = random.below(5);
                    let reached = Cell::new(false);
                    let pause = |point: u64| {
                        if point == at {
                            reached.set(true);
                            there.fetch_add(1, Ordering::SeqCst);
                            let mut open = gate.0.lock().expect("nobody panics");
                            while *open < round {
                                open = gate.1.wait(open).expect("nobody panics");
                            }
                        }
                    };
                    let line = match take(client, n, false) {
                        Some(guard) => match mode.work(&mut sql, &guard, &pause) {
                            Ok(value) => told(guard.key(), guard.fence().get(), value),
                            Err(error) => format!("failed {error}"),
                        },
                        None => "failed to lock".to_owned(),
                    };
                    parent.say(&line);
                    // Whoever was refused before its point will not reach it.
                    there.fetch_add(usize::from(!reached.get()), Ordering::SeqCst);
                    end.wait();
                }
            });
        }
        for round in 1_u64.. {
            parent.hear();
            there.store(0, Ordering::SeqCst);
            begin.wait();
            // Each thread is at its point, or over.
            while there.load(Ordering::SeqCst) < THREADS {
                std::thread::sleep(Duration::from_millis(2));
            }
            parent.say("there");
            parent.hear();
            *gate.0.lock().expect("nobody panics") = round;
            gate.1.notify_all();
            end.wait();
            parent.say("over");
        }
    });
}

#[derive(Default)]
struct Tally {
    rounds: usize,
    late: usize,
    /// Refused to the newer ones as long as the stopped one's transaction was open.
    kept_out: usize,
    failed: usize,
}

fn write(history: &mut History, process: u32, line: &str, tally: &mut Tally) {
    let words: Vec<&str> = line.split(' ').collect();
    let [key, fence, value] = words.as_slice() else {
        tally.failed += 1;
        return;
    };
    let outcome = value.parse().map_or(Outcome::Refused, |number| Outcome::Ok { number, decided_ms: 0 });
    tally.late += usize::from(outcome == Outcome::Refused);
    history.ops.push(Op {
        process,
        what: What::Write,
        key: (*key).to_owned(),
        fence: fence.parse().expect("a number"),
        ttl: 0,
        send: now(),
        recv: now(),
        bound: 0,
        outcome,
        set: None,
        stalled: 0,
        limit: 0,
        call: 0,
        order: None,
    });
}

/// Rounds until the time is over, and what the checker says about them.
fn run(mode: Mode, time: Duration) -> (Tally, Vec<Violation>) {
    let server = Server::start(&Config::new());
    let mut admin = server.client();
    let database = if mode.elsewhere() { "elsewhere" } else { "postgres" };
    if mode.elsewhere() {
        admin.batch_execute("CREATE DATABASE elsewhere").unwrap();
    }
    let work = server.url().strip_suffix("postgres").map(|url| format!("{url}{database}")).unwrap();
    let mut sql = Client::connect(&work, NoTls).unwrap();
    let table = format!(
        "CREATE TABLE work (key text PRIMARY KEY, n int8 NOT NULL DEFAULT 0, fence int8 NOT NULL DEFAULT 0); \
         INSERT INTO work SELECT 'k' || n FROM generate_series(0, {}) AS n",
        THREADS - 1
    );
    sql.batch_execute(&table).unwrap();
    let client = PgLockClient::connect(server.url()).unwrap();
    let number = MODES.iter().position(|other| *other == mode).unwrap().to_string();
    let args = [("url", server.url()), ("work", &work), ("mode", &number)];
    let mut sleeper = Worker::start_alone(
        "late::holders_that_wake_up_late_do_no_harm_in_fenced_transactions",
        "sleeper",
        &args,
    );
    let (mut history, mut tally) = (History::default(), Tally::default());
    let end = Instant::now() + time;
    while tally.rounds == 0 || Instant::now() < end {
        sleeper.tell("begin");
        let mut lines = until(&mut sleeper, "there");
        sleeper.signal("STOP");
        // Past the ttl, the tolerance of a second, and what an acquire may have waited.
        std::thread::sleep(TTL + Duration::from_millis(1100));
        let newer = together(6, |part| newer(mode, &client, &work, part));
        tally.kept_out += THREADS - newer.iter().map(Vec::len).sum::<usize>();
        sleeper.signal("CONT");
        sleeper.tell("go");
        lines.extend(until(&mut sleeper, "over"));
        lines.iter().for_each(|line| write(&mut history, 1, line, &mut tally));
        newer.iter().flatten().for_each(|line| write(&mut history, 2, line, &mut tally));
        tally.rounds += THREADS;
    }
    for row in sql.query("SELECT key, n FROM work", &[]).unwrap() {
        history.registers.insert(row.get(0), row.get::<_, i64>(1).unsigned_abs());
    }
    let violations = check(&history, Allow { recovery: 0 });
    println!(
        "{mode:?}: {} holders stopped, {} came too late and were refused, {} newer ones kept out until the older one's \
         transaction had ended, {} calls failed; {} violations",
        tally.rounds,
        tally.late,
        tally.kept_out,
        tally.failed,
        violations.len()
    );
    (tally, violations)
}

/// What the newer holders of some of the keys do.
fn newer(mode: Mode, client: &PgLockClient, work: &str, part: usize) -> Vec<String> {
    let mut sql = Client::connect(work, NoTls).unwrap();
    // Without a fence the older one may be stopped with a row that it has written.
    sql.batch_execute("SET lock_timeout = '100ms'").unwrap();
    let mut lines = Vec::new();
    for n in (part..THREADS).step_by(6) {
        let Some(guard) = take(client, n, true) else { continue };
        match mode.work(&mut sql, &guard, &|_| ()) {
            Ok(value) => lines.push(told(guard.key(), guard.fence().get(), value)),
            Err(error) => assert_eq!(mode, Mode::TransactionWithoutCall, "{error}"),
        }
        drop(guard);
    }
    lines
}

fn until(sleeper: &mut Worker, word: &str) -> Vec<String> {
    std::iter::from_fn(|| Some(sleeper.hear()).filter(|line| line != word)).collect()
}

/// Long enough for more than a thousand rounds; two thirds of a long run.
fn time() -> Duration {
    Duration::from_secs(crate::seconds()) * 2 / 3
}

#[test]
fn holders_that_wake_up_late_do_no_harm_in_fenced_transactions() {
    worker::part("sleeper", sleeper);
    let (tally, violations) = run(Mode::Transaction, time());
    assert!(violations.is_empty(), "{:#?}", &violations[..violations.len().min(20)]);
    assert!(tally.late > 0 && tally.kept_out > 0, "both sides of the fence were met");
    assert!(tally.failed * 20 < tally.rounds, "{} of {} failed", tally.failed, tally.rounds);
}

#[test]
fn holders_that_wake_up_late_do_no_harm_where_a_statement_compares_their_fence() {
    let (tally, violations) = run(Mode::Statement, time() / 4);
    assert!(violations.is_empty(), "{:#?}", &violations[..violations.len().min(20)]);
    assert!(tally.late > 0, "some were refused");
}

#[test]
fn the_same_program_without_its_fence_writes_over_newer_work() {
    for mode in [Mode::TransactionWithoutCall, Mode::StatementWithoutCondition] {
        let (_, violations) = run(mode, Duration::ZERO);
        assert!(violations.iter().any(|found| found.rule == "register"), "{mode:?} was not noticed");
    }
}
