//! A job that runs once per slot, to look at: cron on three machines calls it at the same moments, one of their
//! clocks is ahead, and one machine dies in the middle of a run.
//!
//! ```text
//! scripts/demo once               # starts a throwaway server and runs this
//! scripts/demo once --lock-only   # the same with a lock in place of run_once: it runs again and again
//! ```
//!
//! Each machine is a process of its own (this program starts itself again). The part to learn from is
//! [`Machine::cron`]; the rest starts the machines, kills one and draws.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example talks")]

mod lanes;

use std::env;
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use postgres::{Client, NoTls};
use syncguard::{LockOptions, PgLockClient, RunOnce, Slot};

use lanes::{Children, Lane, Lanes, heard, orders};

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

const HELP: &str = "\
once: cron on three machines calls a job at the same moments; it runs once per slot

    scripts/demo once [--lock-only]       starts a throwaway server and runs this program on it
    SYNCGUARD_URL=postgresql://… cargo run --example once [-- --lock-only]
                                          uses a server that you have

    --lock-only   with a lock in place of run_once, to see the job run again and again

It works in a schema of its own and drops it at the end.";

const JOB: &str = "demo:report";
const MACHINES: usize = 3;
/// A slot: the job is to run once in each, by the server's clock.
const PERIOD: Duration = Duration::from_secs(4);
/// How often each machine's cron calls it.
const CRON: Duration = Duration::from_millis(500);
/// By how much this machine's clock is ahead.
const AHEAD: (usize, Duration) = (3, Duration::from_millis(300));
const WORK: Duration = Duration::from_millis(10);
const TTL: Duration = Duration::from_secs(1);

/// One machine: a clock of its own, and cron.
struct Machine {
    number: String,
    client: PgLockClient,
    database: Client,
    table: String,
    lock_only: bool,
    /// The parent wants the next run to die in the middle.
    crashes: Arc<AtomicBool>,
}

impl Machine {
    fn new(number: &str, schema: &str, lock_only: bool, url: &str) -> Result<Self> {
        Ok(Self {
            number: number.to_owned(),
            client: PgLockClient::builder().schema(schema).auto_create_tables(false).connect(url)?,
            database: Client::connect(url, NoTls)?,
            table: format!("{schema}.effect"),
            lock_only,
            crashes: Arc::default(),
        })
    }

    /// Calls the job at every half second of its own clock. Three lines of cron on three machines.
    fn cron(&mut self) -> Result<()> {
        let ahead = if self.number.parse() == Ok(AHEAD.0) { AHEAD.1 } else { Duration::ZERO };
        let told = orders();
        while !self.asleep(&told, until_next(CRON, ahead)?) {
            let slot = slot_by_own_clock(ahead)?;
            if self.lock_only {
                self.locked(slot)?;
            } else {
                self.once(slot)?;
            }
        }
        Ok(())
    }

    /// Once per slot, whoever calls it and whenever. Which slot it is the server's clock says; the machine's own
    /// is only for the picture.
    fn once(&mut self, own: u64) -> Result<()> {
        let Self { number, client, database, table, crashes, .. } = self;
        let options = LockOptions::new().ttl(TTL);
        let answer = client.run_once(JOB, Slot::every(PERIOD), &options, |run| {
            // The mark of the slot and the effect are committed together, or neither is.
            let mut transaction = database.transaction()?;
            run.complete_in(&mut transaction)?;
            let slot = run.period_start_ms().unwrap_or_default();
            job(number, slot, &mut transaction, table, crashes)?;
            transaction.commit()?;
            Ok::<_, Box<dyn Error + Send + Sync>>(slot)
        })?;
        match answer {
            RunOnce::Done(slot) => self.say(&format!("done {slot}")),
            RunOnce::AlreadyDone => self.say(&format!("already {own}")),
            RunOnce::Running => self.say(&format!("running {own}")),
            RunOnce::Failed(error) => Err(error),
        }
    }

    /// What people write instead. The lock keeps two runs apart, and the second one runs all the same.
    fn locked(&mut self, slot: u64) -> Result<()> {
        let Some(guard) = self.client.try_lock_with(JOB, &LockOptions::new().ttl(TTL))? else {
            return self.say(&format!("running {slot}"));
        };
        let mut transaction = self.database.transaction()?;
        job(&self.number, slot, &mut transaction, &self.table, &self.crashes)?;
        transaction.commit()?;
        drop(guard);
        self.say(&format!("done {slot}"))
    }

    /// Sleeps until cron's next moment. Whether the parent is done, or gone.
    fn asleep(&self, told: &Receiver<String>, rest: Duration) -> bool {
        let end = Instant::now() + rest;
        loop {
            match told.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(order) => self.crashes.store(order == "crash", Ordering::SeqCst),
                Err(RecvTimeoutError::Timeout) => return false,
                Err(RecvTimeoutError::Disconnected) => return true,
            }
        }
    }

    fn say(&self, line: &str) -> Result<()> {
        lanes::say(&self.number, line)
    }
}

/// Ten milliseconds of work, and an effect that can be counted.
fn job(
    number: &str,
    slot: u64,
    transaction: &mut postgres::Transaction<'_>,
    table: &str,
    crashes: &AtomicBool,
) -> Result<()> {
    let machine: i32 = number.parse()?;
    transaction.execute(
        &format!("INSERT INTO {table} (slot, machine) VALUES ($1, $2)"),
        &[&i64::try_from(slot)?, &machine],
    )?;
    if crashes.load(Ordering::SeqCst) {
        lanes::say(number, &format!("stuck {slot}"))?;
        // Here the parent kills this process. The limit is for a parent that is gone itself.
        thread::sleep(Duration::from_secs(20));
        return Err("nobody killed this machine".into());
    }
    thread::sleep(WORK);
    Ok(())
}

fn now(ahead: Duration) -> Result<u64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)? + ahead;
    Ok(u64::try_from(now.as_millis())?)
}

fn millis(duration: Duration) -> Result<u64> {
    Ok(u64::try_from(duration.as_millis())?)
}

fn until_next(every: Duration, ahead: Duration) -> Result<Duration> {
    let every = millis(every)?;
    Ok(Duration::from_millis(every - now(ahead)? % every))
}

fn slot_by_own_clock(ahead: Duration) -> Result<u64> {
    let now = now(ahead)?;
    Ok(now - now % millis(PERIOD)?)
}

struct Show {
    lanes: Lanes,
    lock_only: bool,
    /// The slots of the runs that were told as done, in order.
    done: Vec<u64>,
    /// In which slot a machine was killed.
    crashed: Option<u64>,
    /// What each machine was told last: only news is printed.
    told: [String; MACHINES],
}

impl Show {
    fn run(&mut self, children: &mut Children, said: &Receiver<String>) -> Result<()> {
        let (period, (fast, ahead)) = (PERIOD.as_secs(), AHEAD);
        println!("{MACHINES} machines call {JOB:?} twice a second; it is to run once per {period} s.");
        println!("The clock of machine {fast} is {} ms ahead.", ahead.as_millis());
        if self.lock_only {
            println!("They take a lock for it, and nothing else (--lock-only).");
        }
        self.lanes.begin("█ ran the job   · called it, nothing to do   ✗ killed   ░ its lease counts");
        if self.lock_only {
            return self.follow(said, CRON * 6);
        }
        self.next_done(said)?;
        // In the rest of this slot they call in vain.
        self.follow(said, until_next(PERIOD, Duration::ZERO)?.saturating_sub(CRON / 4))?;
        for machine in 1..=MACHINES {
            children.order(machine, "crash")?;
        }
        self.kill(children, said)?;
        self.next_done(said)?;
        self.follow(said, CRON)
    }

    /// Kills the first machine whose run is in the middle, and waits until another one runs it again.
    fn kill(&mut self, children: &mut Children, said: &Receiver<String>) -> Result<()> {
        let victim = loop {
            if let (machine, "stuck", slot) = self.next(said)? {
                self.crashed = Some(slot);
                break machine;
            }
        };
        children.kill(victim)?;
        let killed = Instant::now();
        self.lanes.set(victim, Lane::Dead);
        self.lanes.row(&self.lanes.bad(&format!("machine {victim} KILLED in the middle of its run")));
        for machine in (1..=MACHINES).filter(|machine| *machine != victim) {
            children.order(machine, "go on")?;
        }
        let slot = self.next_done(said)?;
        self.lanes.set(victim, Lane::Gone);
        let which = if self.crashed == Some(slot) { "the same slot, run again" } else { "ANOTHER slot" };
        let after = killed.elapsed().as_secs_f64();
        self.lanes.row(&self.lanes.good(&format!("{after:.1} s after the kill: {which}")));
        Ok(())
    }

    fn next_done(&mut self, said: &Receiver<String>) -> Result<u64> {
        loop {
            if let (_, "done", slot) = self.next(said)? {
                return Ok(slot);
            }
        }
    }

    fn next(&mut self, said: &Receiver<String>) -> Result<(usize, &'static str, u64)> {
        let line = said.recv_timeout(Duration::from_secs(60)).map_err(|_| "no machine speaks")?;
        self.hear(&line)
    }

    /// Hears what they say for a while.
    fn follow(&mut self, said: &Receiver<String>, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while let Ok(line) = said.recv_timeout(end.saturating_duration_since(Instant::now())) {
            self.hear(&line)?;
        }
        Ok(())
    }

    /// Which machine said what of which slot. Beside an answer that is a slot by the machine's own clock.
    fn hear(&mut self, line: &str) -> Result<(usize, &'static str, u64)> {
        let (machine, what) = heard(line)?;
        let (what, slot) = what.split_once(' ').ok_or("a machine spoke unclearly")?;
        let slot: u64 = slot.parse()?;
        let (what, lane, news) = match what {
            "done" => {
                let again = if self.done.contains(&slot) { ", AGAIN" } else { "" };
                self.done.push(slot);
                ("done", Lane::Works, format!("ran the job of {}{again}", time_of_day(slot)))
            }
            "stuck" => ("stuck", Lane::Works, format!("runs the job of {}", time_of_day(slot))),
            "already" if self.done.last().is_some_and(|last| slot > *last) => {
                ("already", Lane::Waits, format!("is at {} by its clock: not yet", time_of_day(slot)))
            }
            "already" => ("already", Lane::Waits, "called it: already done".into()),
            _ => ("running", Lane::Waits, "called it: another one has its lease".into()),
        };
        self.lanes.set(machine, lane);
        if let Some(last) = self.told.get_mut(machine - 1).filter(|last| **last != news) {
            self.lanes.row(&format!("machine {machine} {news}"));
            *last = news;
        }
        Ok((machine, what, slot))
    }

    /// Says how it ended, from what the job has left in its table: how often per slot. Whether it ended as it
    /// should.
    fn verdict(&self, effects: &[(u64, i64)]) -> bool {
        let more = effects.iter().filter(|(_, times)| *times > 1).count();
        let runs: i64 = effects.iter().map(|(_, times)| times).sum();
        if self.lock_only {
            println!(
                "RUN MORE THAN ONCE: {more} of {} slots, {runs} runs. Try it without --lock-only.",
                effects.len()
            );
            return true;
        }
        let once = more == 0 && effects.iter().map(|(slot, _)| *slot).eq(self.done.iter().copied());
        let again = self.crashed.is_some_and(|slot| self.done.contains(&slot));
        println!(
            "Slots: {}, effects: {runs}{}.",
            self.done.len(),
            if once { ", one each" } else { ": NOT ONE EACH. Please report it" }
        );
        println!("The slot of the crash was run again: {}.", if again { "yes" } else { "NO" });
        once && again && self.done.len() >= 3
    }
}

/// The start of a slot, UTC.
fn time_of_day(slot: u64) -> String {
    let seconds = slot / 1000 % 86_400;
    format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

fn show(lock_only: bool, url: &str) -> Result<bool> {
    let schema = format!("syncguard_once_{}", std::process::id());
    let mut database = Client::connect(url, NoTls)?;
    // Ctrl-C ends the machines, hence the show; this process stays to clean up.
    signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::default())?;
    database.batch_execute(&format!(
        "CREATE SCHEMA {schema}; CREATE TABLE {schema}.effect (slot BIGINT NOT NULL, machine INT NOT NULL)"
    ))?;
    let shown = play(&schema, lock_only, url);
    let effects = database
        .query(&format!("SELECT slot, count(*) FROM {schema}.effect GROUP BY slot ORDER BY slot"), &[]);
    database.batch_execute(&format!("DROP SCHEMA {schema} CASCADE"))?;
    let effects: Result<Vec<(u64, i64)>> =
        effects?.iter().map(|row| Ok((u64::try_from(row.get::<_, i64>(0))?, row.get(1)))).collect();
    Ok(shown?.verdict(&effects?))
}

fn play(schema: &str, lock_only: bool, url: &str) -> Result<Show> {
    // The tables; a program in production gets them from a migration.
    drop(PgLockClient::builder().schema(schema).connect(url)?);
    let mut show = Show {
        lanes: Lanes::new(MACHINES),
        lock_only,
        done: Vec::new(),
        crashed: None,
        told: Default::default(),
    };
    let (mut children, said) = Children::new()?;
    for number in 1..=MACHINES {
        let how = if lock_only { "--lock-only" } else { "--once" };
        children.start(["--machine", &number.to_string(), schema, how])?;
    }
    children.complete();
    show.run(&mut children, &said)?;
    children.end()?;
    for line in said {
        show.hear(&line)?;
    }
    show.lanes.picture("machine");
    Ok(show)
}

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    if let ["-h" | "--help"] = args.as_slice() {
        println!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let url = env::var("SYNCGUARD_URL").unwrap_or_default();
    let result = match args.as_slice() {
        [] if !url.is_empty() => show(false, &url),
        ["--lock-only"] if !url.is_empty() => show(true, &url),
        ["--machine", number, schema, how] => Machine::new(number, schema, *how == "--lock-only", &url)
            .and_then(|mut machine| machine.cron())
            .map(|()| true),
        _ => {
            eprintln!("{HELP}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("once: {error}");
            ExitCode::FAILURE
        }
    }
}
