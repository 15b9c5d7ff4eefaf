//! What the demonstrations share: processes of this program, what they say, and a picture of what they do.

#![allow(dead_code, reason = "no demonstration needs all of it")]

use std::env;
use std::io::{self, BufRead as _, BufReader, IsTerminal as _, PipeWriter, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use crate::Result;

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
    colours: bool,
    start: Instant,
    now: Vec<Lane>,
    /// Every change of a lane.
    history: Vec<(Duration, Vec<Lane>)>,
}

impl Lanes {
    pub(crate) fn new(processes: usize) -> Self {
        let plain = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            colours: io::stdout().is_terminal() && !plain,
            start: Instant::now(),
            now: vec![Lane::Idle; processes],
            history: Vec::new(),
        }
    }

    /// Prints the head of the lines, and lets the time begin.
    pub(crate) fn begin(&mut self, legend: &str) {
        let heads: Vec<_> = (1..=self.now.len()).map(|process| format!(" {process} ")).collect();
        println!("{}\n\n    time  {}", self.paint("2", legend), heads.concat());
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

    /// One line: the time, one column per process, what happened.
    pub(crate) fn row(&self, what: &str) {
        let lanes: Vec<_> = self.now.iter().map(|lane| format!(" {} ", self.sign(*lane))).collect();
        println!(" {:5.2} s  {}  {what}", self.start.elapsed().as_secs_f64(), lanes.concat());
    }

    /// The whole run as one line per process.
    pub(crate) fn picture(&self, process: &str) {
        const WIDTH: u32 = 64;
        let whole = self.start.elapsed();
        println!("\nThe same as a picture, {:.1} s from left to right:\n", whole.as_secs_f64());
        for index in 0..self.now.len() {
            let cells = (0..WIDTH).map(|cell| {
                // In the middle of the cell: what was the last change before it?
                let at = whole * (2 * cell + 1) / (2 * WIDTH);
                let passed = self.history.partition_point(|(time, _)| *time <= at);
                let lanes = passed.checked_sub(1).and_then(|last| self.history.get(last));
                lanes.and_then(|(_, lanes)| lanes.get(index)).copied().unwrap_or(Lane::Idle)
            });
            let line: String = cells.map(|lane| self.sign(lane)).collect();
            println!("  {process} {}  {line}", index + 1);
        }
        println!();
    }

    fn sign(&self, lane: Lane) -> String {
        match lane {
            Lane::Idle | Lane::Done => " ".into(),
            Lane::Waits => self.paint("2", "·"),
            Lane::Works => self.paint("32", "█"),
            Lane::Dead => self.paint("31", "░"),
            Lane::Gone => self.paint("31", "✗"),
        }
    }

    pub(crate) fn good(&self, text: &str) -> String {
        self.paint("1;32", text)
    }

    pub(crate) fn bad(&self, text: &str) -> String {
        self.paint("1;31", text)
    }

    fn paint(&self, colour: &str, text: &str) -> String {
        if self.colours { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.into() }
    }
}

/// Processes of this program, which count from one. None of them outlives the parent's work.
pub(crate) struct Children {
    all: Vec<Child>,
    speak: Option<PipeWriter>,
}

impl Children {
    /// None yet, and what they will say, line by line. They write to one pipe, so it is read in the order in
    /// which they spoke: by a thread, so that the reader can also notice silence.
    pub(crate) fn new() -> Result<(Self, Receiver<String>)> {
        let (heard, speak) = io::pipe()?;
        let (tell, said) = mpsc::channel();
        thread::spawn(move || {
            BufReader::new(heard).lines().map_while(io::Result::ok).try_for_each(|line| tell.send(line))
        });
        Ok((Self { all: Vec::new(), speak: Some(speak) }, said))
    }

    pub(crate) fn start<'a>(&mut self, args: impl IntoIterator<Item = &'a str>) -> Result<()> {
        let speak = self.speak.as_ref().ok_or("all processes are there")?.try_clone()?;
        let mut command = Command::new(env::current_exe()?);
        self.all.push(command.args(args).stdin(Stdio::piped()).stdout(speak).spawn()?);
        Ok(())
    }

    /// All are there: what they say ends with the last of them.
    pub(crate) fn complete(&mut self) {
        self.speak = None;
    }

    fn get(&mut self, process: usize) -> Result<&mut Child> {
        self.all.get_mut(process - 1).ok_or_else(|| "an unknown process spoke".into())
    }

    pub(crate) fn order(&mut self, process: usize, order: &str) -> Result<()> {
        let input = self.get(process)?.stdin.as_mut().ok_or("its input is a pipe")?;
        Ok(input.write_all(format!("{order}\n").as_bytes())?)
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self, process: usize) -> Result<()> {
        let child = self.get(process)?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Ends the input of all of them.
    pub(crate) fn go_on(&mut self) {
        for child in &mut self.all {
            drop(child.stdin.take());
        }
    }

    /// The same one after the other, each to its end.
    pub(crate) fn end(&mut self) -> Result<()> {
        for child in &mut self.all {
            drop(child.stdin.take());
            child.wait()?;
        }
        Ok(())
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.all {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What a process hears from its parent: the lines of its input, until that ends.
pub(crate) fn orders() -> Receiver<String> {
    let (tell, lines) = mpsc::channel();
    thread::spawn(move || io::stdin().lines().map_while(io::Result::ok).try_for_each(|line| tell.send(line)));
    lines
}

/// Says one line to the parent, as a whole: all processes write to one pipe.
pub(crate) fn say(process: &str, line: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(format!("{process} {line}\n").as_bytes())?;
    Ok(out.flush()?)
}

/// A line of a process: which one, and what it said.
pub(crate) fn heard(line: &str) -> Result<(usize, &str)> {
    let (process, what) = line.split_once(' ').ok_or("a process spoke unclearly")?;
    Ok((process.parse::<usize>()?.max(1), what))
}
