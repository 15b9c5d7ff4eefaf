//! What the demonstrations share: their `main`, a schema of their own, processes of this program, and a picture of
//! what those do.

#![allow(dead_code, unused_imports, reason = "no demonstration needs all of it")]

mod children;
mod screen;

use std::env;
use std::error::Error;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use postgres::{Client, NoTls};

use crate::Result;

pub(crate) use children::{Children, Orders, heard, say, stuck};
pub(crate) use screen::{Screen, Tone};

/// A program that shows something: `main` in one call.
pub(crate) struct Demo {
    /// The name of the example.
    pub(crate) example: &'static str,
    /// What runs it on a server of its own.
    pub(crate) script: &'static str,
    pub(crate) help: &'static str,
}

/// How a demonstration ended.
pub(crate) enum Ending {
    /// As it should, or not.
    Shown(bool),
    /// It was called wrongly: how.
    Usage(String),
}

impl Demo {
    /// Runs it with the arguments and the server's address, unless help is asked for or no server is named.
    pub(crate) fn main(&self, run: impl FnOnce(&[&str], &str) -> Result<Ending>) -> ExitCode {
        let args: Vec<String> = env::args().skip(1).collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        if args.iter().any(|arg| matches!(*arg, "-h" | "--help")) {
            println!("{}", self.help);
            return ExitCode::SUCCESS;
        }
        let Some(url) = env::var("SYNCGUARD_URL").ok().filter(|url| !url.is_empty()) else {
            eprintln!("SYNCGUARD_URL is not set, so there is no PostgreSQL to work on.\n");
            eprintln!("    {:<37} starts a throwaway server and runs this program on it", self.script);
            eprintln!("    SYNCGUARD_URL=postgresql://… cargo run --example {}", self.example);
            eprintln!("    {:<37} uses a server that you have", "");
            return ExitCode::from(2);
        };
        match run(&args, &url) {
            Ok(Ending::Shown(true)) => ExitCode::SUCCESS,
            Ok(Ending::Shown(false)) => ExitCode::FAILURE,
            Ok(Ending::Usage(what)) => {
                eprintln!("{}: {what}; see --help", self.example);
                ExitCode::from(2)
            }
            Err(error) => {
                eprintln!("{}: {error}{}", self.example, causes(&*error));
                ExitCode::FAILURE
            }
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

/// Runs something in a schema of its own, which is dropped at the end, whatever becomes of it.
pub(crate) fn in_schema<T>(
    example: &str,
    url: &str,
    show: impl FnOnce(&str, &mut Client) -> Result<T>,
) -> Result<T> {
    let schema = format!("syncguard_{example}_{}", std::process::id());
    let mut database = Client::connect(url, NoTls)?;
    // Ctrl-C ends the other processes, hence the show; this one stays to clean up.
    signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::default())?;
    database.batch_execute(&format!("CREATE SCHEMA {schema}"))?;
    let shown = show(&schema, &mut database);
    database.batch_execute(&format!("DROP SCHEMA {schema} CASCADE"))?;
    shown
}

/// What one process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Not there yet, or between two jobs.
    Idle,
    Waits,
    Works,
    /// Killed, and its lease still counts.
    Dead,
    /// Killed, and its lease is over.
    Gone,
    Done,
}

/// One lane per process, drawn line by line as it goes, and as a whole at the end. Processes count from one.
pub(crate) struct Lanes {
    screen: Screen,
    start: Instant,
    now: Vec<Lane>,
    /// Every change of a lane.
    history: Vec<(Duration, Vec<Lane>)>,
}

impl Lanes {
    pub(crate) fn new(processes: usize) -> Self {
        Self {
            screen: Screen::new(),
            start: Instant::now(),
            now: vec![Lane::Idle; processes],
            history: Vec::new(),
        }
    }

    /// Prints what the signs mean and the head of the lines, and lets the time begin.
    pub(crate) fn begin(&mut self, legend: &[&str]) {
        self.screen.entries(Tone::Dim, legend);
        let heads: Vec<_> = (1..=self.now.len()).map(|process| format!(" {process} ")).collect();
        println!("\n    time  {}", heads.concat());
        self.start = Instant::now();
    }

    pub(crate) fn all(&self) -> &[Lane] {
        &self.now
    }

    pub(crate) fn set(&mut self, process: usize, lane: Lane) {
        if let Some(slot) = self.now.get_mut(process - 1) {
            *slot = lane;
        }
        self.history.push((self.start.elapsed(), self.now.clone()));
    }

    /// One line: the time, one column per process, what happened. More than one, if that is long.
    pub(crate) fn row(&self, tone: Tone, what: &str) {
        let lanes: Vec<_> = self.now.iter().map(|lane| format!(" {} ", self.sign(*lane))).collect();
        let head = format!(" {:5.2} s  {}  ", self.start.elapsed().as_secs_f64(), lanes.concat());
        self.screen.beside(&head, 12 + 3 * self.now.len(), tone, what);
    }

    /// The whole run as one line per process.
    pub(crate) fn picture(&self, process: &str) {
        let label = process.len() + 6;
        let cells = self.screen.columns().saturating_sub(label).clamp(16, 100);
        let width = u32::try_from(cells).unwrap_or(64);
        let whole = self.start.elapsed();
        println!("\nThe same as a picture, {:.1} s from left to right:\n", whole.as_secs_f64());
        for index in 0..self.now.len() {
            let cells = (0..width).map(|cell| {
                // In the middle of the cell: what was the last change before it?
                let at = whole * (2 * cell + 1) / (2 * width);
                let passed = self.history.partition_point(|(time, _)| *time <= at);
                let lanes = passed.checked_sub(1).and_then(|last| self.history.get(last));
                lanes.and_then(|(_, lanes)| lanes.get(index)).copied().unwrap_or(Lane::Idle)
            });
            let line: String = cells.map(|lane| self.sign(lane)).collect();
            println!("  {process} {}  {line}", index + 1);
        }
        println!();
    }

    /// A paragraph.
    pub(crate) fn say(&self, text: &str) {
        self.screen.say(Tone::Plain, text);
    }

    /// A sentence of the verdict, with whether it is as it should be.
    pub(crate) fn judge(&self, good: bool, text: &str) {
        self.screen.say(if good { Tone::Good } else { Tone::Bad }, text);
    }

    fn sign(&self, lane: Lane) -> String {
        let (tone, sign) = match lane {
            Lane::Idle | Lane::Done => return " ".into(),
            Lane::Waits => (Tone::Dim, "·"),
            Lane::Works => (Tone::Green, "█"),
            Lane::Dead => (Tone::Red, "░"),
            Lane::Gone => (Tone::Red, "✗"),
        };
        self.screen.paint(tone, sign)
    }
}
