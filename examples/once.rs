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

use std::error::Error;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use postgres::{Client, NoTls};
use syncguard::{LockOptions, PgLockClient, RunOnce, Slot};

use lanes::{Children, Demo, Ending, Lane, Lanes, Orders, Tone, heard};

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
const AHEAD: (usize, Duration) = (3, Duration::from_millis(900));
const WORK: Duration = Duration::from_millis(10);
const TTL: Duration = Duration::from_secs(1);

/// One machine: a clock of its own, and cron.
struct Machine {
    number: String,
    client: PgLockClient,
    database: Client,
    table: String,
    lock_only: bool,
    orders: Orders,
}

impl Machine {
    fn new(number: &str, schema: &str, lock_only: bool, url: &str) -> Result<Self> {
        Ok(Self {
            number: number.to_owned(),
            client: PgLockClient::builder().schema(schema).auto_create_tables(false).connect(url)?,
            database: Client::connect(url, NoTls)?,
            table: format!("{schema}.effect"),
            lock_only,
            orders: Orders::new(),
        })
    }

    /// Calls the job at every half second of its own clock. Three lines of cron on three machines.
    fn cron(&mut self) -> Result<()> {
        let ahead = if self.number.parse() == Ok(AHEAD.0) { AHEAD.1 } else { Duration::ZERO };
        while self.orders.wait(until_next(CRON, ahead)?) {
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
        let Self { number, client, database, table, orders, .. } = self;
        let options = LockOptions::new().ttl(TTL);
        let answer = client.run_once(JOB, Slot::every(PERIOD), &options, |run| {
            // The mark of the slot and the effect are committed together, or neither is.
            let mut transaction = database.transaction()?;
            run.complete_in(&mut transaction)?;
            let slot = run.period_start_ms().unwrap_or_default();
            job(number, slot, &mut transaction, table, orders.crash())?;
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
        job(&self.number, slot, &mut transaction, &self.table, self.orders.crash())?;
        transaction.commit()?;
        drop(guard);
        self.say(&format!("done {slot}"))
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
    crashes: bool,
) -> Result<()> {
    let machine: i32 = number.parse()?;
    transaction.execute(
        &format!("INSERT INTO {table} (slot, machine) VALUES ($1, $2)"),
        &[&i64::try_from(slot)?, &machine],
    )?;
    if crashes {
        return lanes::stuck(number, &format!("stuck {slot}"));
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
    fn run(&mut self, children: &mut Children) -> Result<()> {
        let (period, (fast, ahead)) = (PERIOD.as_secs(), AHEAD);
        let what =
            format!("{MACHINES} machines call {JOB:?} twice a second; it is to run once per {period} s.");
        self.lanes.say(&what);
        self.lanes.say(&format!("The clock of machine {fast} is {} ms ahead.", ahead.as_millis()));
        if self.lock_only {
            self.lanes.say("They take a lock for it, and nothing else (--lock-only).");
        }
        let legend = ["█ ran the job", "· called it, nothing to do", "✗ killed", "░ its lease counts"];
        self.lanes.begin(&legend);
        if self.lock_only {
            return children.follow(CRON * 6, |line| self.hear(line).map(drop));
        }
        self.next_done(children)?;
        // In the rest of this slot they call in vain.
        let rest = until_next(PERIOD, Duration::ZERO)?.saturating_sub(CRON / 4);
        children.follow(rest, |line| self.hear(line).map(drop))?;
        for machine in 1..=MACHINES {
            children.order(machine, "crash")?;
        }
        self.kill(children)?;
        self.next_done(children)?;
        children.follow(CRON, |line| self.hear(line).map(drop))
    }

    /// Kills the first machine whose run is in the middle, and waits until another one runs it again.
    fn kill(&mut self, children: &mut Children) -> Result<()> {
        let victim = loop {
            if let (machine, "stuck", slot) = self.hear(&children.next()?)? {
                self.crashed = Some(slot);
                break machine;
            }
        };
        children.kill(victim)?;
        let killed = Instant::now();
        self.lanes.set(victim, Lane::Dead);
        self.lanes.row(Tone::Bad, &format!("machine {victim} KILLED in the middle of its run"));
        for machine in (1..=MACHINES).filter(|machine| *machine != victim) {
            children.order(machine, "go on")?;
        }
        let slot = self.next_done(children)?;
        self.lanes.set(victim, Lane::Gone);
        let which = if self.crashed == Some(slot) { "the same slot, run again" } else { "ANOTHER slot" };
        let after = killed.elapsed().as_secs_f64();
        self.lanes.row(Tone::Good, &format!("{after:.1} s after the kill: {which}"));
        Ok(())
    }

    fn next_done(&mut self, children: &Children) -> Result<u64> {
        loop {
            if let (_, "done", slot) = self.hear(&children.next()?)? {
                return Ok(slot);
            }
        }
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
            self.lanes.row(Tone::Plain, &format!("machine {machine} {news}"));
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
            let slots = effects.len();
            let what = format!(
                "RUN MORE THAN ONCE: {more} of {slots} slots, {runs} runs. Try it without --lock-only."
            );
            self.lanes.judge(false, &what);
            return true;
        }
        let once = more == 0 && effects.iter().map(|(slot, _)| *slot).eq(self.done.iter().copied());
        let again = self.crashed.is_some_and(|slot| self.done.contains(&slot));
        let each = if once { ", one each" } else { ": NOT ONE EACH. Please report it" };
        self.lanes.judge(once, &format!("Slots: {}, effects: {runs}{each}.", self.done.len()));
        let again_too = if again { "yes" } else { "NO" };
        self.lanes.judge(again, &format!("The slot of the crash was run again: {again_too}."));
        once && again && self.done.len() >= 3
    }
}

/// The start of a slot, UTC.
fn time_of_day(slot: u64) -> String {
    let seconds = slot / 1000 % 86_400;
    format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

fn show(lock_only: bool, url: &str) -> Result<bool> {
    lanes::in_schema("once", url, |schema, database| {
        database.batch_execute(&format!(
            "CREATE TABLE {schema}.effect (slot BIGINT NOT NULL, machine INT NOT NULL)"
        ))?;
        let shown = play(schema, lock_only, url)?;
        let effects = format!("SELECT slot, count(*) FROM {schema}.effect GROUP BY slot ORDER BY slot");
        let effects: Result<Vec<(u64, i64)>> = database
            .query(&effects, &[])?
            .iter()
            .map(|row| Ok((u64::try_from(row.get::<_, i64>(0))?, row.get(1))))
            .collect();
        Ok(shown.verdict(&effects?))
    })
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
    let how = if lock_only { "--lock-only" } else { "--once" };
    let mut children = Children::start(MACHINES, |number| {
        ["--machine".to_owned(), number.to_string(), schema.to_owned(), how.to_owned()]
    })?;
    show.run(&mut children)?;
    children.end()?;
    for line in &children.said {
        show.hear(&line)?;
    }
    show.lanes.picture("machine");
    Ok(show)
}

fn main() -> ExitCode {
    let demo = Demo { example: "once", script: "scripts/demo once", help: HELP };
    demo.main(|args, url| match args {
        [] => show(false, url).map(Ending::Shown),
        ["--lock-only"] => show(true, url).map(Ending::Shown),
        ["--machine", number, schema, how] => {
            Machine::new(number, schema, *how == "--lock-only", url)?.cron()?;
            Ok(Ending::Shown(true))
        }
        _ => Ok(Ending::Usage("the one option is --lock-only".into())),
    })
}
