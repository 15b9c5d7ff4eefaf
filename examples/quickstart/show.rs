//! The parent: starts the workers, kills one of them, and draws what they say.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use syncguard::{Fence, PgLockClient};

use crate::lanes::{self, Children, Lane, Lanes, Tone, heard};
use crate::{KEY, Result, Settings, TOLERANCE, VICTIM};

/// Runs the demonstration. Whether it ended as it should.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    lanes::in_schema("quickstart", &settings.url, |schema, database| {
        let settings = Settings { schema: schema.to_owned(), ..settings.clone() };
        let table = settings.table();
        database.batch_execute(&format!(
            "CREATE TABLE {table} (balance BIGINT NOT NULL); INSERT INTO {table} VALUES (0)"
        ))?;
        // The lock's own tables; a program in production gets them from a migration.
        drop(PgLockClient::builder().schema(schema).connect(&settings.url)?);
        let (outcome, lanes) = Show::new(&settings).run()?;
        let balance = database.query_one(&format!("SELECT balance FROM {table}"), &[])?.get(0);
        Ok(outcome.verdict(&lanes, balance))
    })
}

#[derive(Default, Debug)]
struct Outcome {
    with_lock: bool,
    fences: Vec<u64>,
    wrote: i64,
    take_over: Option<Duration>,
    /// Every worker but the killed one did all its rounds.
    finished: bool,
}

struct Show<'a> {
    settings: &'a Settings,
    lanes: Lanes,
    killed: Option<Instant>,
    outcome: Outcome,
}

impl<'a> Show<'a> {
    fn new(settings: &'a Settings) -> Self {
        Self {
            settings,
            lanes: Lanes::new(settings.workers as usize),
            killed: None,
            outcome: Outcome { with_lock: settings.with_lock, ..Outcome::default() },
        }
    }

    fn run(mut self) -> Result<(Outcome, Lanes)> {
        self.introduce();
        let workers = self.settings.workers as usize;
        let mut children = Children::start(workers, |number| worker(self.settings, number))?;
        self.follow(&mut children)?;
        self.lanes.picture("process");
        Ok((self.outcome, self.lanes))
    }

    fn introduce(&mut self) {
        let Settings { workers, rounds, ttl, with_lock, .. } = self.settings;
        let lanes = &mut self.lanes;
        let what = "Each reads it, thinks, writes it plus one";
        lanes.say(&format!("{workers} processes, one balance. {what}, {rounds} times."));
        if *with_lock {
            lanes.say(&format!("They take the lock {KEY:?} for that; a lease lasts {} s.", ttl.as_secs()));
        } else {
            lanes.say("They take NO lock (--without-lock).");
        }
        lanes.say(&format!("Process {VICTIM} is killed (SIGKILL) in the middle of its work."));
        lanes.begin(&["· waits", "█ works", "✗ killed", "░ dead, its lease still counts"]);
    }

    fn follow(&mut self, children: &mut Children) -> Result<()> {
        loop {
            match children.said.recv_timeout(Duration::from_millis(500)) {
                Ok(line) => {
                    let (worker, line) = heard(&line)?;
                    self.hear(worker, line, children)?;
                }
                Err(RecvTimeoutError::Timeout) => self.progress(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.outcome.finished = self.lanes.all().iter().all(|lane| matches!(lane, Lane::Done | Lane::Gone));
        Ok(())
    }

    fn hear(&mut self, worker: usize, line: &str, children: &mut Children) -> Result<()> {
        match line.split_once(' ').unwrap_or((line, "")) {
            ("waits" | "free", _) => self.lanes.set(worker, Lane::Waits),
            ("works", _) => self.lanes.set(worker, Lane::Works),
            ("holds", fence) => {
                self.lanes.set(worker, Lane::Works);
                self.granted(worker, fence)?;
            }
            ("stuck", _) => self.kill(worker, children)?,
            ("wrote", change) => {
                self.outcome.wrote += 1;
                self.lanes.row(Tone::Plain, &format!("process {worker} wrote {change}"));
            }
            ("done", _) => self.lanes.set(worker, Lane::Done),
            _ => println!("process {worker}: {line}"),
        }
        Ok(())
    }

    fn granted(&mut self, worker: usize, fence: &str) -> Result<()> {
        self.outcome.fences.push(fence.parse::<Fence>()?.get());
        if let (Some(killed), None) = (self.killed, self.outcome.take_over) {
            let after = killed.elapsed();
            self.outcome.take_over = Some(after);
            self.lanes.set(VICTIM as usize, Lane::Gone);
            let what = format!("TAKEOVER {:.1} s after the kill", after.as_secs_f64());
            self.lanes.row(Tone::Good, &what);
        }
        self.lanes.row(Tone::Plain, &format!("process {worker} holds the lock, fence {fence}"));
        Ok(())
    }

    fn kill(&mut self, worker: usize, children: &mut Children) -> Result<()> {
        children.kill(worker)?;
        self.killed = Some(Instant::now());
        children.go_on();
        let (lane, what) = if self.settings.with_lock {
            (Lane::Dead, format!("process {worker} KILLED while it holds the lock"))
        } else {
            (Lane::Gone, format!("process {worker} KILLED in the middle of its work"))
        };
        self.lanes.set(worker, lane);
        self.lanes.row(Tone::Bad, &what);
        Ok(())
    }

    /// Nothing happened for a while: says what everybody waits for.
    fn progress(&self) {
        let (Some(killed), true) = (self.killed, self.lanes.all().contains(&Lane::Dead)) else { return };
        let left = (self.settings.ttl + TOLERANCE).saturating_sub(killed.elapsed());
        self.lanes.row(
            Tone::Plain,
            &format!("the dead one's lease is not renewed: free in {:.1} s", left.as_secs_f64()),
        );
    }
}

impl Outcome {
    /// Says how it ended. Whether it ended as it should.
    fn verdict(&self, lanes: &Lanes, balance: i64) -> bool {
        let missing = self.wrote - balance;
        lanes.say(&format!("Updates that were reported as done: {}. Balance: {balance}.", self.wrote));
        if !self.with_lock {
            lanes.judge(false, &format!("LOST UPDATES: {missing}. Run it again with the lock."));
            return self.finished;
        }
        let rising = self.fences.is_sorted_by(|earlier, later| earlier < later);
        let (first, last) = (self.fences.first().unwrap_or(&0), self.fences.last().unwrap_or(&0));
        let order = if rising { "each above the one before" } else { "OUT OF ORDER" };
        let grants = self.fences.len();
        lanes.judge(rising, &format!("Fences: {grants} grants, from {first} to {last}, {order}."));
        match self.take_over {
            Some(after) => {
                let after = after.as_secs_f64();
                lanes.judge(true, &format!("Takeover: {after:.1} s after the holder was killed."));
            }
            None => lanes.judge(false, "Takeover: NONE."),
        }
        match missing {
            0 => lanes.judge(true, "No update was lost."),
            _ => lanes
                .judge(false, &format!("LOST UPDATES: {missing}. This must not happen: please report it.")),
        }
        missing == 0 && rising && self.take_over.is_some() && self.finished
    }
}

/// The arguments of a worker.
fn worker(settings: &Settings, number: usize) -> Vec<String> {
    let (rounds, ttl) = (settings.rounds.to_string(), settings.ttl.as_secs().to_string());
    let (number, schema) = (number.to_string(), settings.schema.as_str());
    let mut args = vec!["--worker", &number, "--schema", schema, "--rounds", &rounds, "--ttl", &ttl];
    if !settings.with_lock {
        args.push("--without-lock");
    }
    args.into_iter().map(String::from).collect()
}
