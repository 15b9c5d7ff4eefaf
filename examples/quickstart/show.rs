//! The parent: starts the workers, kills one of them, and draws what they say.

use std::env;
use std::fmt::Write as _;
use std::io::{self, BufRead as _, BufReader, IsTerminal as _};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use postgres::{Client, NoTls};
use syncguard::{Fence, PgLockClient};

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lane {
    Starts,
    Waits,
    Holds,
    /// Killed, and its lease still counts.
    Dead,
    /// Killed, and somebody else has the lock.
    Gone,
    Done,
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
    colours: bool,
    start: Instant,
    lanes: Vec<Lane>,
    /// Every change of a lane, for the picture at the end.
    history: Vec<(Duration, Vec<Lane>)>,
    killed: Option<Instant>,
    outcome: Outcome,
}

impl<'a> Show<'a> {
    fn new(settings: &'a Settings) -> Self {
        let plain = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            settings,
            colours: io::stdout().is_terminal() && !plain,
            start: Instant::now(),
            lanes: vec![Lane::Starts; index(settings.workers + 1)],
            history: Vec::new(),
            killed: None,
            outcome: Outcome { with_lock: settings.with_lock, ..Outcome::default() },
        }
    }

    fn run(mut self) -> Result<Outcome> {
        self.introduce();
        self.start = Instant::now();
        let (heard, speak) = io::pipe()?;
        let mut children = Children(Vec::new());
        for number in 1..=self.settings.workers {
            children.0.push(start_worker(self.settings, number, speak.try_clone()?)?);
        }
        // From here on the pipe ends with the last worker.
        drop(speak);
        self.follow(&lines(heard), &mut children)?;
        self.picture();
        Ok(self.outcome)
    }

    fn introduce(&self) {
        let Settings { workers, rounds, ttl, with_lock, .. } = self.settings;
        println!(
            "{workers} processes, one balance. Each one, {rounds} times: read it, think, write it plus one."
        );
        if *with_lock {
            println!("They take the lock {KEY:?} for that; a lease lasts {} s.", ttl.as_secs());
        } else {
            println!("They take NO lock (--without-lock).");
        }
        println!("Process {VICTIM} is killed (SIGKILL) in the middle of its work.\n");
        let heads: Vec<_> = (1..=*workers).map(|n| format!(" {n} ")).collect();
        let legend = self.paint("2", "· waits   █ works   ✗ killed   ░ dead, its lease still counts");
        println!("    time  {}  {legend}", heads.concat());
    }

    fn follow(&mut self, said: &Receiver<String>, children: &mut Children) -> Result<()> {
        loop {
            match said.recv_timeout(Duration::from_millis(500)) {
                Ok(line) => {
                    let (worker, line) = line.split_once(' ').ok_or("a worker spoke unclearly")?;
                    self.hear(worker.parse()?, line, children)?;
                }
                Err(RecvTimeoutError::Timeout) => self.progress(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let ended = |lane: &&Lane| matches!(lane, Lane::Done | Lane::Gone);
        self.outcome.finished = self.lanes.iter().filter(ended).count() == self.lanes.len();
        Ok(())
    }

    fn hear(&mut self, worker: u32, line: &str, children: &mut Children) -> Result<()> {
        match line.split_once(' ').unwrap_or((line, "")) {
            ("waits" | "free", _) => self.set(worker, Lane::Waits),
            ("works", _) => self.set(worker, Lane::Holds),
            ("holds", fence) => {
                self.set(worker, Lane::Holds);
                self.granted(worker, fence)?;
            }
            ("stuck", _) => self.kill(worker, children)?,
            ("wrote", change) => {
                self.outcome.wrote += 1;
                self.row(&format!("process {worker} wrote {change}"));
            }
            ("done", _) => self.set(worker, Lane::Done),
            _ => println!("process {worker}: {line}"),
        }
        Ok(())
    }

    fn granted(&mut self, worker: u32, fence: &str) -> Result<()> {
        self.outcome.fences.push(fence.parse::<Fence>()?.get());
        let mut what = format!("process {worker} holds the lock, fence {fence}");
        if let (Some(killed), None) = (self.killed, self.outcome.take_over) {
            let after = killed.elapsed();
            self.outcome.take_over = Some(after);
            self.set(VICTIM, Lane::Gone);
            let _ = write!(what, ": TAKE-OVER {:.1} s after the kill", after.as_secs_f64());
            what = self.paint("1;32", &what);
        }
        self.row(&what);
        Ok(())
    }

    fn kill(&mut self, worker: u32, children: &mut Children) -> Result<()> {
        let child = children.0.get_mut(index(worker)).ok_or("an unknown worker spoke")?;
        child.kill()?;
        child.wait()?;
        self.killed = Some(Instant::now());
        children.go_on();
        let (lane, what) = if self.settings.with_lock {
            (Lane::Dead, format!("process {worker} KILLED while it holds the lock, before its write"))
        } else {
            (Lane::Gone, format!("process {worker} KILLED in the middle of its work, before its write"))
        };
        self.set(worker, lane);
        let what = self.paint("1;31", &what);
        self.row(&what);
        Ok(())
    }

    /// Nothing happened for a while: says what everybody waits for.
    fn progress(&self) {
        let (Some(killed), true) = (self.killed, self.lanes.contains(&Lane::Dead)) else { return };
        let left = (self.settings.ttl + TOLERANCE).saturating_sub(killed.elapsed());
        self.row(&format!("nobody renews the dead one's lease: free in {:.1} s", left.as_secs_f64()));
    }

    fn set(&mut self, worker: u32, lane: Lane) {
        if let Some(slot) = self.lanes.get_mut(index(worker)) {
            *slot = lane;
        }
        self.history.push((self.start.elapsed(), self.lanes.clone()));
    }

    /// One line of the log: the time, one column per process, what happened.
    fn row(&self, what: &str) {
        let lanes: Vec<String> = self.lanes.iter().map(|lane| format!(" {} ", self.sign(*lane))).collect();
        println!(" {:5.2} s  {}  {what}", self.start.elapsed().as_secs_f64(), lanes.concat());
    }

    /// The whole run as one line per process.
    fn picture(&self) {
        const WIDTH: u32 = 72;
        let whole = self.start.elapsed();
        println!("\nThe same as a picture, {:.1} s from left to right:\n", whole.as_secs_f64());
        for worker in 1..=self.settings.workers {
            let cells = (0..WIDTH).map(|cell| {
                // In the middle of the cell: what was the last change before it?
                let at = whole * (2 * cell + 1) / (2 * WIDTH);
                let passed = self.history.partition_point(|(time, _)| *time <= at);
                let lanes = passed.checked_sub(1).and_then(|last| self.history.get(last));
                lanes.and_then(|(_, lanes)| lanes.get(index(worker))).copied().unwrap_or(Lane::Starts)
            });
            let line: String = cells.map(|lane| self.sign(lane)).collect();
            println!("  process {worker}  {line}");
        }
        println!();
    }

    fn sign(&self, lane: Lane) -> String {
        match lane {
            Lane::Starts | Lane::Done => " ".into(),
            Lane::Waits => self.paint("2", "·"),
            Lane::Holds => self.paint("32", "█"),
            Lane::Dead => self.paint("31", "░"),
            Lane::Gone => self.paint("31", "✗"),
        }
    }

    fn paint(&self, colour: &str, text: &str) -> String {
        if self.colours { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.into() }
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

/// Workers count from one, lists from zero.
fn index(worker: u32) -> usize {
    worker as usize - 1
}

/// The worker processes; none of them outlives the parent's work.
struct Children(Vec<Child>);

impl Children {
    /// What they wait for before their last round.
    fn go_on(&mut self) {
        for child in &mut self.0 {
            drop(child.stdin.take());
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn start_worker(settings: &Settings, number: u32, speak: io::PipeWriter) -> Result<Child> {
    let mut command = Command::new(env::current_exe()?);
    command.args(["--worker", &number.to_string(), "--schema", &settings.schema]);
    command.args(["--rounds", &settings.rounds.to_string(), "--ttl", &settings.ttl.as_secs().to_string()]);
    if !settings.with_lock {
        command.arg("--without-lock");
    }
    Ok(command.stdin(Stdio::piped()).stdout(speak).spawn()?)
}

/// Read by a thread, so that the reader can also notice silence.
fn lines(heard: io::PipeReader) -> Receiver<String> {
    let (tell, said) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(heard).lines().map_while(io::Result::ok) {
            let _ = tell.send(line);
        }
    });
    said
}
