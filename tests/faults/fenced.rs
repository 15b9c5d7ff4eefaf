//! A holder is stopped past its ttl in the middle of its work, a newer one works, and the old one
//! wakes up: with a fenced transaction, or a fence beside the data, nothing is lost. Without, it is.

use std::time::Duration;

use postgres::{Client, NoTls};
use syncguard::{Heartbeat, LockGuard, LockOptions, PgLockClient};

use crate::support::worker::{self, Parent};
use crate::support::{Config, LIMIT, Server, Worker, wait_until};

/// Long enough to get into the middle of the work on a slow machine.
const TTL: Duration = Duration::from_millis(500);
const KEYS: usize = 100;

pub const TABLES: &str = "CREATE TABLE ledger (key text PRIMARY KEY, n int8 NOT NULL DEFAULT 0, fence int8 NOT NULL DEFAULT 0); \
    CREATE TABLE history (id serial, key text, fence int8, n int8)";

/// Reads for a change, in the store that knows nothing of locks: whoever is newer is known from here on.
pub const READ_KEPT: &str = "UPDATE ledger SET fence = $2 WHERE key = $1 AND fence <= $2 RETURNING n";
/// The one statement that keeps the fence beside the data; it notes what it did in the history.
pub const WRITE_KEPT: &str = "WITH w AS (UPDATE ledger SET n = $3, fence = $2 WHERE key = $1 AND fence <= $2 RETURNING key) \
    INSERT INTO history (key, fence, n) SELECT key, $2, $3 FROM w";
/// The same without a look at the fence.
const WRITE: &str = "WITH w AS (UPDATE ledger SET n = $3, fence = $2 WHERE key = $1 RETURNING key) \
    INSERT INTO history (key, fence, n) SELECT key, $2, $3 FROM w";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// `fence_transaction` is the first statement of the transaction.
    Fenced,
    /// The same program without it.
    Bare,
    /// Data in another database: the fence stands beside it.
    Kept,
}

impl Mode {
    fn named(name: &str) -> Self {
        match name {
            "Fenced" => Self::Fenced,
            "Bare" => Self::Bare,
            _ => Self::Kept,
        }
    }
}

fn key(n: usize) -> String {
    format!("k{n}")
}

fn fence(guard: &LockGuard) -> i64 {
    i64::try_from(guard.fence().get()).expect("a fence has 15 digits")
}

fn options() -> LockOptions {
    LockOptions::new().ttl(TTL).heartbeat(Heartbeat::Off)
}

/// The whole work of one holder, interrupted in its middle.
struct Work<'a> {
    guard: LockGuard,
    transaction: postgres::Transaction<'a>,
    /// What was read before the pause.
    read: Option<i64>,
}

impl<'a> Work<'a> {
    /// Every second one has begun with its first statements when the pause comes.
    fn begin(mode: Mode, guard: LockGuard, sql: &'a mut Client, far: bool) -> Self {
        let transaction = sql.transaction().expect("the server answers");
        let mut work = Self { guard, transaction, read: None };
        if far || mode == Mode::Bare {
            work.read = work.first(mode);
        }
        work
    }

    /// `None`: refused.
    fn first(&mut self, mode: Mode) -> Option<i64> {
        let key = self.guard.key().to_owned();
        let row = match mode {
            Mode::Fenced => {
                self.guard.fence_transaction(&mut self.transaction).ok()?;
                self.transaction.query_opt("SELECT n FROM ledger WHERE key = $1", &[&key])
            }
            Mode::Bare => self.transaction.query_opt("SELECT n FROM ledger WHERE key = $1", &[&key]),
            // Not in a transaction that stays open: another store need not have any.
            Mode::Kept => panic!("this has a way of its own"),
        };
        row.expect("the server answers").map(|row| row.get(0))
    }

    /// Whether it was written.
    fn end(mut self, mode: Mode) -> bool {
        let read = self.read.or_else(|| self.first(mode));
        // A program that does not look at errors: the server must not take its work.
        let (fence, next) = (fence(&self.guard), read.unwrap_or(0) + 1);
        let written = self.transaction.execute(WRITE, &[&self.guard.key(), &fence, &next]);
        let committed = self.transaction.commit();
        let _ = self.guard.release();
        read.is_some() && written.is_ok() && committed.is_ok()
    }
}

/// Plays its part only in a process that was started for it.
#[test]
fn a_sleeper_outside_of_its_test_does_nothing() {
    worker::part("sleeper", sleeper);
}

fn sleeper(parent: &Parent) {
    let mode = Mode::named(&parent.arg("mode"));
    let client = PgLockClient::connect(&parent.arg("url")).expect("the server takes connections");
    let connect = |_| Client::connect(&parent.arg("data"), NoTls).expect("the server takes connections");
    let mut connections: Vec<Client> = (0..KEYS).map(connect).collect();
    while parent.hear() == "round" {
        let lock = |n| client.lock_with(&key(n), &options()).expect("nobody else is there");
        let written = if mode == Mode::Kept {
            let sql = &mut connections[0];
            let mut work = Vec::new();
            for n in 0..KEYS {
                let guard = lock(n);
                let row = sql.query_opt(READ_KEPT, &[&key(n), &fence(&guard)]).expect("the server answers");
                work.push((guard, row.expect("nobody is newer").get::<_, i64>(0)));
            }
            pause(parent);
            let mut written = 0;
            for (guard, read) in work {
                let done = sql.execute(WRITE_KEPT, &[&guard.key(), &fence(&guard), &(read + 1)]);
                written += done.expect("the server answers");
            }
            written
        } else {
            let begin = |(n, sql)| Work::begin(mode, lock(n), sql, n % 2 == 1);
            let work: Vec<Work<'_>> = connections.iter_mut().enumerate().map(begin).collect();
            pause(parent);
            work.into_iter().map(|work| u64::from(work.end(mode))).sum()
        };
        parent.say(&format!("written {written}"));
    }
}

fn pause(parent: &Parent) {
    parent.say("in the middle");
    parent.hear();
}

/// Writes, or nothing if the key is still somebody's.
fn newer(mode: Mode, client: &PgLockClient, sql: &mut Client, n: usize) -> bool {
    let Some(guard) = client.try_lock_with(&key(n), &options().ttl(LIMIT)).expect("the server answers")
    else {
        return false;
    };
    if mode == Mode::Kept {
        let row = sql.query_one(READ_KEPT, &[&key(n), &fence(&guard)]).expect("nobody is newer");
        let next = row.get::<_, i64>(0) + 1;
        assert_eq!(sql.execute(WRITE_KEPT, &[&key(n), &fence(&guard), &next]).expect("it is ours"), 1);
        return guard.release().is_ok();
    }
    let mut work = Work::begin(mode, guard, sql, false);
    if mode == Mode::Fenced {
        work.read = work.first(mode);
    }
    assert!(work.end(mode), "nobody is newer");
    true
}

/// What the history says: lost writes and stale ones.
pub struct Damage {
    pub lost: i64,
    pub stale: i64,
    pub written: i64,
}

impl Damage {
    pub fn of(ledger: &mut Client) -> Self {
        let sql = "SELECT count(*) - count(DISTINCT (key, n)), count(*) FILTER (WHERE fence < before), count(*) \
            FROM (SELECT key, n, fence, max(fence) OVER (PARTITION BY key ORDER BY id \
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before FROM history) AS h";
        let row = ledger.query_one(sql, &[]).expect("the server answers");
        Self { lost: row.get(0), stale: row.get(1), written: row.get(2) }
    }
}

fn play(mode: Mode, batches: u64) -> Damage {
    let server = Server::start(&Config::new().set("max_connections", "150"));
    let mut sql = server.client();
    sql.batch_execute("CREATE DATABASE elsewhere").expect("the server takes a database");
    let data = match mode {
        Mode::Kept => format!("{}elsewhere", server.url().strip_suffix("postgres").expect("its name")),
        Mode::Fenced | Mode::Bare => server.url().to_owned(),
    };
    let client = PgLockClient::connect(server.url()).expect("the server takes connections");
    let mut ledger = Client::connect(&data, NoTls).expect("the server takes connections");
    ledger.batch_execute(TABLES).expect("the server takes tables");
    for n in 0..KEYS {
        ledger.execute("INSERT INTO ledger (key) VALUES ($1)", &[&key(n)]).expect("a row");
    }
    let (name, test) = (format!("{mode:?}"), "fenced::a_sleeper_outside_of_its_test_does_nothing");
    let mut old =
        Worker::start_alone(test, "sleeper", &[("url", server.url()), ("data", &data), ("mode", &name)]);
    let mut told = 0;
    for _ in 0..batches {
        old.tell("round");
        old.expect("in the middle");
        old.signal("STOP");
        let over = "SELECT count(*) FROM syncguard_locks WHERE expires_at_ms > extract(epoch FROM clock_timestamp()) * 1000 - 1000";
        wait_until(LIMIT, "all leases are over, tolerance included", || {
            sql.query_one(over, &[]).expect("the server answers").get::<_, i64>(0) == 0
        });
        for n in 0..KEYS {
            let worked = newer(mode, &client, &mut ledger, n);
            let fenced_before = mode == Mode::Fenced && n % 2 == 1;
            assert_eq!(
                worked, !fenced_before,
                "nobody is let in before a fenced transaction is over, and all others are"
            );
            told += u64::from(worked);
        }
        old.signal("CONT");
        old.tell("go on");
        let written = old.hear();
        told += written.strip_prefix("written ").and_then(|n| n.parse().ok()).unwrap_or(0);
    }
    old.tell("stop");
    let damage = Damage::of(&mut ledger);
    assert_eq!(damage.written.unsigned_abs(), told, "what was said to be written is written");
    println!(
        "{mode:?}: {} rounds, {} writes, {} lost, {} stale",
        batches * KEYS as u64,
        damage.written,
        damage.lost,
        damage.stale
    );
    damage
}

/// A batch takes two seconds, most of it asleep.
fn batches() -> u64 {
    (crate::seconds() / 4).clamp(2, 100)
}

#[test]
fn a_fenced_transaction_that_wakes_up_late_does_nothing() {
    let damage = play(Mode::Fenced, batches());
    assert_eq!((damage.lost, damage.stale), (0, 0));
}

#[test]
fn a_fence_beside_the_data_refuses_who_wakes_up_late() {
    let damage = play(Mode::Kept, batches() / 2);
    assert_eq!((damage.lost, damage.stale), (0, 0));
}

#[test]
fn without_a_fence_late_writes_are_lost_and_stale() {
    let damage = play(Mode::Bare, 2);
    assert!(damage.lost > 0 && damage.stale > 0, "{} lost, {} stale", damage.lost, damage.stale);
}
