//! The library at work, to look at: several processes change one balance, one of them is killed.
//!
//! ```text
//! scripts/demo                    # starts a throwaway server and runs this
//! scripts/demo --without-lock     # the same without the lock: updates are lost
//! ```
//!
//! Each worker is a process of its own (this program starts itself again) and does the same job again
//! and again: read the balance, think, write the balance plus one. The part to learn from is
//! [`Worker::round`]; the rest draws.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example talks")]

use std::env;
use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, BufRead as _, BufReader, IsTerminal as _, Write as _};
use std::ops::RangeInclusive;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use postgres::{Client, NoTls};
use syncguard::{Backoff, Fence, LockOptions, PgLockClient};

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

const HELP: &str = "\
quickstart: several processes change one balance under a lock, one of them is killed

    SYNCGUARD_URL=postgresql://user@host/database cargo run --example quickstart -- [OPTIONS]

OPTIONS
    --without-lock   the same job without the lock, to see updates get lost
    --workers N      processes, 2 to 8 (default 4)
    --rounds N       changes per process, 2 to 50 (default 5)
    --ttl SECONDS    how long a lease lasts, 1 to 30 (default 2)
    --help           this text

It works in a schema of its own and drops it at the end. scripts/demo starts a server for it.";

const NO_URL: &str = "\
SYNCGUARD_URL is not set, so there is no PostgreSQL to work on.

    scripts/demo                          starts a throwaway server and runs this program on it
    SYNCGUARD_URL=postgresql://… cargo run --example quickstart
                                          uses a server that you have";

const KEY: &str = "demo:account:1";
/// How long a worker thinks between its read and its write.
const THINK: Duration = Duration::from_millis(90);
/// The one that is killed, and in which of its rounds.
const VICTIM: u32 = 2;
const LAST_ROUND_OF_VICTIM: u32 = 2;
/// After its expiry a lease still counts for one more second.
const TOLERANCE: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
struct Settings {
    url: String,
    schema: String,
    with_lock: bool,
    workers: u32,
    rounds: u32,
    ttl: Duration,
    /// In a worker: which one.
    worker: Option<u32>,
}

fn main() -> ExitCode {
    let settings = match Settings::read(env::args().skip(1)) {
        Ok(Some(settings)) => settings,
        Ok(None) => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let result = match settings.worker {
        Some(number) => Worker::new(number, settings).and_then(|mut worker| worker.run()).map(|()| true),
        None => watch(&settings),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("quickstart: {error}{}", causes(&*error));
            ExitCode::FAILURE
        }
    }
}

fn causes(error: &dyn Error) -> String {
    let mut text = String::new();
    let mut next = error.source();
    while let Some(cause) = next {
        let _ = write!(text, ": {cause}");
        next = cause.source();
    }
    text
}

impl Settings {
    fn read(mut args: impl Iterator<Item = String>) -> Result<Option<Self>> {
        let mut settings = Self {
            url: String::new(),
            schema: format!("syncguard_quickstart_{}", std::process::id()),
            with_lock: true,
            workers: 4,
            rounds: 5,
            ttl: Duration::from_secs(2),
            worker: None,
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value; see --help"));
            match arg.as_str() {
                "--help" | "-h" => return Ok(None),
                "--without-lock" => settings.with_lock = false,
                "--workers" => settings.workers = number(&arg, &value()?, 2..=8)?,
                "--rounds" => settings.rounds = number(&arg, &value()?, 2..=50)?,
                "--ttl" => settings.ttl = Duration::from_secs(number(&arg, &value()?, 1..=30)?.into()),
                "--worker" => settings.worker = Some(number(&arg, &value()?, 1..=8)?),
                "--schema" => settings.schema = value()?,
                _ => return Err(format!("unknown option {arg}; see --help").into()),
            }
        }
        settings.url = env::var("SYNCGUARD_URL").ok().filter(|url| !url.is_empty()).ok_or(NO_URL)?;
        Ok(Some(settings))
    }

    fn table(&self) -> String {
        format!("{}.account", self.schema)
    }
}

fn number(name: &str, text: &str, allowed: RangeInclusive<u32>) -> Result<u32> {
    match text.parse() {
        Ok(n) if allowed.contains(&n) => Ok(n),
        _ => {
            Err(format!("{name} takes a number from {} to {}, not {text:?}", allowed.start(), allowed.end())
                .into())
        }
    }
}

// ---- a worker: the part to learn from

struct Worker {
    number: u32,
    settings: Settings,
    locks: Option<PgLockClient>,
    options: LockOptions,
    database: Client,
}

impl Worker {
    fn new(number: u32, settings: Settings) -> Result<Self> {
        let locks = if settings.with_lock {
            let builder = PgLockClient::builder().schema(&settings.schema).auto_create_tables(false);
            Some(builder.connect(&settings.url)?)
        } else {
            None
        };
        // Short waits between attempts, so that the picture shows the lock and not the back-off.
        let options = LockOptions::new()
            .ttl(settings.ttl)
            .wait_forever()
            .retry_delay(Duration::from_millis(20))
            .backoff(Backoff::Fixed);
        let database = Client::connect(&settings.url, NoTls)?;
        Ok(Self { number, settings, locks, options, database })
    }

    fn run(&mut self) -> Result<()> {
        for round in 1..=self.settings.rounds {
            if round == self.settings.rounds && self.number != VICTIM {
                // The others keep a round for the time after the kill; the parent then closes this.
                io::stdin().read_line(&mut String::new())?;
            }
            self.round(round)?;
            thread::sleep(Duration::from_millis(15));
        }
        self.say("done")
    }

    /// Read, think, write. Without the lock two workers read the same balance, and one update is lost.
    fn round(&mut self, round: u32) -> Result<()> {
        let table = self.settings.table();
        self.say("waits")?;
        let guard = match &self.locks {
            Some(locks) => Some(locks.lock_with(KEY, &self.options)?),
            None => None,
        };
        match &guard {
            Some(guard) => self.say(&format!("holds {}", guard.fence()))?,
            None => self.say("works")?,
        }

        let balance: i64 = self.database.query_one(&format!("SELECT balance FROM {table}"), &[])?.get(0);
        if self.number == VICTIM && round == LAST_ROUND_OF_VICTIM {
            self.say("stuck")?;
            // Here the parent kills this process. The limit is for a parent that is gone itself.
            thread::sleep(Duration::from_secs(20));
            return Err("nobody killed this worker".into());
        }
        thread::sleep(THINK);

        let mut transaction = self.database.transaction()?;
        if let Some(guard) = &guard {
            // Nothing of this commits unless the lease is still ours.
            guard.fence_transaction(&mut transaction)?;
        }
        transaction.execute(&format!("UPDATE {table} SET balance = $1"), &[&(balance + 1)])?;
        transaction.commit()?;
        self.say(&format!("wrote {balance} -> {}", balance + 1))?;

        // Said before it is true: once it is true the next one speaks.
        self.say("free")?;
        if let Some(guard) = guard {
            guard.release()?;
        }
        Ok(())
    }

    /// One line to the parent. All workers write to one pipe, so it reads them in the order they spoke.
    fn say(&self, line: &str) -> Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(format!("{} {line}\n", self.number).as_bytes())?;
        Ok(out.flush()?)
    }
}

// ---- the parent: starts the workers, kills one, draws

fn watch(settings: &Settings) -> Result<bool> {
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
            Some(after) => println!("Take-over: {:.1} s after the holder was killed.", after.as_secs_f64()),
            None => println!("Take-over: NONE."),
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
