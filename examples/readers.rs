//! Readers and a writer, to look at: three processes read prices together, a fourth one changes them alone, and a
//! reader dies in the middle.
//!
//! ```text
//! scripts/demo readers                  # starts a throwaway server and runs this
//! scripts/demo readers --without-lock   # the same without a lock: readers see prices that are half changed
//! ```
//!
//! Each of them is a process of its own (this program starts itself again). The parts to learn from are
//! [`Shop::read`] and [`Shop::write`]; the rest starts the processes, kills one and draws.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example talks")]

mod lanes;

use std::error::Error;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use postgres::{Client, NoTls};
use syncguard::{LockGuard, LockOptions, PgLockClient};

use lanes::{Children, Demo, Ending, Lane, Lanes, Orders, Tone, heard};

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

const HELP: &str = "\
readers: three processes read prices together, a fourth one changes them alone

    scripts/demo readers [--without-lock]   starts a throwaway server and runs this program on it
    SYNCGUARD_URL=postgresql://… cargo run --example readers [-- --without-lock]
                                            uses a server that you have

    --without-lock   the same without a lock, to see readers find prices that are half changed

It works in a schema of its own and drops it at the end.";

const KEY: &str = "demo:prices";
const READERS: usize = 3;
const WRITER: usize = READERS + 1;
const TTL: Duration = Duration::from_secs(1);
/// Between the two halves of a read, and between those of a write.
const WORK: Duration = Duration::from_millis(60);
const PAUSE: Duration = Duration::from_millis(40);
/// For how long they are left alone.
const TIME: Duration = Duration::from_millis(700);

/// One process with the prices: two numbers that are always equal, if nobody looks in between.
struct Shop {
    number: String,
    client: PgLockClient,
    database: Client,
    table: String,
    locks: bool,
}

impl Shop {
    fn new(number: &str, schema: &str, how: &str, url: &str) -> Result<Self> {
        Ok(Self {
            number: number.to_owned(),
            client: PgLockClient::builder().schema(schema).auto_create_tables(false).connect(url)?,
            database: Client::connect(url, NoTls)?,
            table: format!("{schema}.price"),
            locks: how == "--with-lock",
        })
    }

    fn options() -> LockOptions {
        LockOptions::new().ttl(TTL).timeout(Duration::from_secs(20))
    }

    fn locked(
        &self,
        take: impl FnOnce(&PgLockClient) -> syncguard::Result<LockGuard>,
    ) -> Result<Option<LockGuard>> {
        if self.locks { Ok(Some(take(&self.client)?)) } else { Ok(None) }
    }

    /// Any number at the same time, and none while prices change.
    fn read(&mut self, crashes: bool) -> Result<()> {
        self.say("waits")?;
        let guard = self.locked(|client| client.read_lock_with(KEY, &Self::options()))?;
        self.say("reads")?;
        let first = self.price(1)?;
        if crashes {
            return lanes::stuck(&self.number, "stuck");
        }
        thread::sleep(WORK);
        let second = self.price(2)?;
        self.say(if first == second { "read" } else { "torn" })?;
        drop(guard);
        Ok(())
    }

    /// Alone: waits for the readers that are there, and those that come later wait for it.
    fn write(&mut self) -> Result<()> {
        self.say("waits")?;
        let guard = self.locked(|client| client.lock_with(KEY, &Self::options()))?;
        self.say("writes")?;
        for item in [1, 2] {
            let sql = format!("UPDATE {} SET cents = cents + 1 WHERE item = $1", self.table);
            self.database.execute(&sql, &[&item])?;
            thread::sleep(WORK / 2);
        }
        self.say("wrote")?;
        drop(guard);
        Ok(())
    }

    fn price(&mut self, item: i32) -> Result<i64> {
        let sql = format!("SELECT cents FROM {} WHERE item = $1", self.table);
        Ok(self.database.query_one(&sql, &[&item])?.get(0))
    }

    /// Reads, or writes, again and again, until the parent is done, or gone.
    fn work(&mut self, writes: bool) -> Result<()> {
        let mut orders = Orders::new();
        while orders.wait(PAUSE) {
            if writes { self.write()? } else { self.read(orders.crash())? }
        }
        Ok(())
    }

    fn say(&self, line: &str) -> Result<()> {
        lanes::say(&self.number, line)
    }
}

struct Show {
    lanes: Lanes,
    locks: bool,
    reads: usize,
    writes: usize,
    torn: usize,
    /// How many read at the same time, at most.
    together: usize,
    /// The same since the last write: only news is printed.
    told: usize,
    /// A reader and the writer worked at the same time.
    collided: bool,
}

impl Show {
    fn run(&mut self, children: &mut Children) -> Result<()> {
        self.lanes.say(&format!("Processes 1 to {READERS} read {KEY:?}, process {WRITER} changes them."));
        if !self.locks {
            self.lanes.say("They take no lock (--without-lock).");
        }
        self.lanes.begin(&["· waits", "█ reads or writes", "✗ killed", "░ dead, its lease still counts"]);
        children.follow(TIME, |line| self.hear(line).map(drop))?;
        if !self.locks {
            return Ok(());
        }
        children.order(1, "crash")?;
        while self.hear(&children.next()?)? != (1, "stuck") {}
        children.kill(1)?;
        let killed = Instant::now();
        self.lanes.set(1, Lane::Dead);
        self.lanes.row(Tone::Bad, "process 1 KILLED while it reads");
        while self.hear(&children.next()?)? != (WRITER, "writes") {}
        self.lanes.set(1, Lane::Gone);
        let after = killed.elapsed().as_secs_f64();
        let what = format!("process {WRITER} writes {after:.1} s later: the dead lease is over");
        self.lanes.row(Tone::Good, &what);
        children.follow(TIME / 2, |line| self.hear(line).map(drop))
    }

    fn hear(&mut self, line: &str) -> Result<(usize, &'static str)> {
        let (process, what) = heard(line)?;
        let (what, lane) = match what {
            "waits" => ("waits", Lane::Waits),
            "reads" => ("reads", Lane::Works),
            "writes" => ("writes", Lane::Works),
            "stuck" => ("stuck", Lane::Works),
            _ => {
                self.reads += usize::from(what == "read");
                self.writes += usize::from(what == "wrote");
                self.torn += usize::from(what == "torn");
                ("ends", Lane::Idle)
            }
        };
        self.lanes.set(process, lane);
        if lane == Lane::Works {
            let working = |at: usize| self.lanes.all().get(at - 1) == Some(&Lane::Works);
            let readers = (1..=READERS).filter(|at| working(*at)).count();
            self.together = self.together.max(readers);
            self.collided |= readers > 0 && working(WRITER);
            if what == "writes" {
                self.told = 0;
                self.lanes.row(
                    Tone::Plain,
                    &format!(
                        "process {process} writes{}",
                        if readers == 0 { ", alone" } else { " BESIDE READERS" }
                    ),
                );
            } else if readers > self.told {
                self.told = readers;
                let what = if readers == 1 { "reads".into() } else { format!("reads, {readers} at a time") };
                self.lanes.row(Tone::Plain, &format!("process {process} {what}"));
            }
        }
        Ok((process, what))
    }

    /// Says how it ended. Whether it ended as it should.
    fn verdict(&self) -> bool {
        let reads = self.reads + self.torn;
        if !self.locks {
            let what = format!(
                "HALF CHANGED: {} of {reads} reads saw one price before a change and the other after it. \
                 Try it without --without-lock.",
                self.torn
            );
            self.lanes.judge(false, &what);
            return true;
        }
        let together = self.together > 1;
        let most = format!("{reads} reads, up to {} at a time; {} writes.", self.together, self.writes);
        self.lanes.judge(together, &most);
        let alone = if self.collided { "NO. Please report it" } else { "yes" };
        self.lanes.judge(!self.collided, &format!("The writer was alone each time: {alone}."));
        let whole = self.torn == 0;
        self.lanes.judge(whole, &format!("Reads of prices that were half changed: {}.", self.torn));
        together && whole && !self.collided && self.writes > 1
    }
}

fn show(locks: bool, url: &str) -> Result<bool> {
    lanes::in_schema("readers", url, |schema, database| {
        database.batch_execute(&format!(
            "CREATE TABLE {schema}.price (item INT PRIMARY KEY, cents BIGINT NOT NULL); \
             INSERT INTO {schema}.price VALUES (1, 100), (2, 100)"
        ))?;
        Ok(play(schema, locks, url)?.verdict())
    })
}

fn play(schema: &str, locks: bool, url: &str) -> Result<Show> {
    // The tables; a program in production gets them from a migration.
    drop(PgLockClient::builder().schema(schema).create_members_table(true).connect(url)?);
    let mut show = Show {
        lanes: Lanes::new(WRITER),
        locks,
        reads: 0,
        writes: 0,
        torn: 0,
        together: 0,
        told: 0,
        collided: false,
    };
    let how = if locks { "--with-lock" } else { "--without-lock" };
    let mut children = Children::start(WRITER, |number| {
        let role = if number == WRITER { "--writer" } else { "--reader" };
        [role.to_owned(), number.to_string(), schema.to_owned(), how.to_owned()]
    })?;
    show.run(&mut children)?;
    children.end()?;
    for line in &children.said {
        show.hear(&line)?;
    }
    show.lanes.picture("process");
    Ok(show)
}

fn main() -> ExitCode {
    let demo = Demo { example: "readers", script: "scripts/demo readers", help: HELP };
    demo.main(|args, url| match args {
        [] => show(true, url).map(Ending::Shown),
        ["--without-lock"] => show(false, url).map(Ending::Shown),
        [role @ ("--reader" | "--writer"), number, schema, how] => {
            Shop::new(number, schema, how, url)?.work(*role == "--writer")?;
            Ok(Ending::Shown(true))
        }
        _ => Ok(Ending::Usage("the one option is --without-lock".into())),
    })
}
