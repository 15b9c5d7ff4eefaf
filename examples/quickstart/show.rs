//! The parent: starts the workers, kills one of them, and draws what they say.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use postgres::{Client, NoTls};
use syncguard::{Fence, PgLockClient};

use crate::lanes::{Children, Lane, Lanes, heard};
use crate::{KEY, Result, Settings, TOLERANCE, VICTIM};

/// Runs the demonstration. Whether it ended as it should.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let mut database = Client::connect(&settings.url, NoTls)?;
    let (schema, table) = (&settings.schema, settings.table());
    // Ctrl-C ends the workers, hence the show; this process stays to clean up.
    signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::default())?;
    database.batch_execute(&format!(
        "CREATE SCHEMA {schema}; CREATE TABLE {table} (balance BIGINT NOT NULL); INSERT INTO {table} VALUES (0)"
    ))?;
    // The lock's own tables; a program in production gets them from a migration.
    let shown = PgLockClient::builder()
        .schema(schema)
        .connect(&settings.url)
        .map_err(Into::into)
        .and_then(|_| Show::new(settings).run());
    let balance = database.query_one(&format!("SELECT balance FROM {table}"), &[]).map(|row| row.get(0));
    database.batch_execute(&format!("DROP SCHEMA {schema} CASCADE"))?;
    Ok(shown?.verdict(balance?))
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

    fn run(mut self) -> Result<Outcome> {
        self.introduce();
        let (mut children, said) = Children::new()?;
        for number in 1..=self.settings.workers {
            start_worker(&mut children, self.settings, number)?;
        }
        children.complete();
        self.follow(&said, &mut children)?;
        self.lanes.picture("process");
        Ok(self.outcome)
    }

    fn introduce(&mut self) {
        let Settings { workers, rounds, ttl, with_lock, .. } = self.settings;
        println!("{workers} processes, one balance. Each one, {rounds} times: read it, think,");
        println!("write it plus one.");
        if *with_lock {
            println!("They take the lock {KEY:?} for that; a lease lasts {} s.", ttl.as_secs());
        } else {
            println!("They take NO lock (--without-lock).");
        }
        println!("Process {VICTIM} is killed (SIGKILL) in the middle of its work.");
        self.lanes.begin("· waits   █ works   ✗ killed   ░ dead, its lease still counts");
    }

    fn follow(&mut self, said: &Receiver<String>, children: &mut Children) -> Result<()> {
        loop {
            match said.recv_timeout(Duration::from_millis(500)) {
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
                self.lanes.row(&format!("process {worker} wrote {change}"));
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
            let what = format!("TAKE-OVER {:.1} s after the kill", after.as_secs_f64());
            self.lanes.row(&self.lanes.good(&what));
        }
        self.lanes.row(&format!("process {worker} holds the lock, fence {fence}"));
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
        self.lanes.row(&self.lanes.bad(&what));
        Ok(())
    }

    /// Nothing happened for a while: says what everybody waits for.
    fn progress(&self) {
        let (Some(killed), true) = (self.killed, self.lanes.all().contains(&Lane::Dead)) else { return };
        let left = (self.settings.ttl + TOLERANCE).saturating_sub(killed.elapsed());
        self.lanes.row(&format!("the dead one's lease is not renewed: free in {:.1} s", left.as_secs_f64()));
    }
}

impl Outcome {
    /// Says how it ended. Whether it ended as it should.
    fn verdict(&self, balance: i64) -> bool {
        let missing = self.wrote - balance;
        println!("Updates that were reported as done: {}. Balance: {balance}.", self.wrote);
        if !self.with_lock {
            println!("LOST UPDATES: {missing}. Run it again with the lock.");
            return self.finished;
        }
        let rising = self.fences.is_sorted_by(|earlier, later| earlier < later);
        let (first, last) = (self.fences.first().unwrap_or(&0), self.fences.last().unwrap_or(&0));
        println!(
            "Fences: {} grants, from {first} to {last}, {}.",
            self.fences.len(),
            if rising { "each above the one before" } else { "OUT OF ORDER" }
        );
        match self.take_over {
            Some(after) => println!("Takeover: {:.1} s after the holder was killed.", after.as_secs_f64()),
            None => println!("Takeover: NONE."),
        }
        match missing {
            0 => println!("No update was lost."),
            _ => println!("LOST UPDATES: {missing}. This must not happen: please report it."),
        }
        missing == 0 && rising && self.take_over.is_some() && self.finished
    }
}

fn start_worker(children: &mut Children, settings: &Settings, number: u32) -> Result<()> {
    let (number, rounds) = (number.to_string(), settings.rounds.to_string());
    let ttl = settings.ttl.as_secs().to_string();
    let mut args =
        vec!["--worker", &number, "--schema", &settings.schema, "--rounds", &rounds, "--ttl", &ttl];
    if !settings.with_lock {
        args.push("--without-lock");
    }
    children.start(args)
}
