//! The library at work, to look at: several processes change one balance, one of them is killed.
//!
//! ```text
//! scripts/demo                    # starts a throwaway server and runs this
//! scripts/demo --without-lock     # the same without the lock: updates are lost
//! ```
//!
//! Each worker is a process of its own (this program starts itself again) and does the same job again
//! and again: read the balance, think, write the balance plus one. The part to learn from is
//! [`Worker::round`]; `show` starts the workers, kills one and draws.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example talks")]

#[path = "../lanes/mod.rs"]
mod lanes;
mod show;

use std::error::Error;
use std::io;
use std::ops::RangeInclusive;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use postgres::{Client, NoTls};
use syncguard::{Backoff, LockOptions, PgLockClient};

use lanes::{Demo, Ending};

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
    /// Empty in the parent, until that has created it.
    schema: String,
    with_lock: bool,
    workers: u32,
    rounds: u32,
    ttl: Duration,
    /// In a worker: which one.
    worker: Option<u32>,
}

fn main() -> ExitCode {
    let demo = Demo { example: "quickstart", script: "scripts/demo", help: HELP };
    demo.main(|args, url| {
        let settings = match Settings::read(args, url) {
            Ok(settings) => settings,
            Err(error) => return Ok(Ending::Usage(error.to_string())),
        };
        match settings.worker {
            Some(number) => Worker::new(number, settings)?.run().map(|()| Ending::Shown(true)),
            None => show::run(&settings).map(Ending::Shown),
        }
    })
}

impl Settings {
    fn read(args: &[&str], url: &str) -> Result<Self> {
        let mut settings = Self {
            url: url.to_owned(),
            schema: String::new(),
            with_lock: true,
            workers: 4,
            rounds: 5,
            ttl: Duration::from_secs(2),
            worker: None,
        };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().copied().ok_or(format!("{arg} needs a value"));
            match *arg {
                "--without-lock" => settings.with_lock = false,
                "--workers" => settings.workers = number(arg, value()?, 2..=8)?,
                "--rounds" => settings.rounds = number(arg, value()?, 2..=50)?,
                "--ttl" => settings.ttl = Duration::from_secs(number(arg, value()?, 1..=30)?.into()),
                "--worker" => settings.worker = Some(number(arg, value()?, 1..=8)?),
                "--schema" => settings.schema = value()?.into(),
                _ => return Err(format!("unknown option {arg}").into()),
            }
        }
        Ok(settings)
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
        // Short waits between attempts, so that the picture shows the lock and not the backoff.
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
            return lanes::stuck(&self.number.to_string(), "stuck");
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

    fn say(&self, line: &str) -> Result<()> {
        lanes::say(&self.number.to_string(), line)
    }
}
