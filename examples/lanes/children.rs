//! The processes of a demonstration: what the parent does with them, and what they do with the parent.

use std::env;
use std::io::{self, BufRead as _, BufReader, PipeWriter, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::Result;

/// Processes of this program, which count from one. None of them outlives the parent's work.
pub(crate) struct Children {
    all: Vec<Child>,
    /// What they say, line by line, until the last of them has ended.
    pub(crate) said: Receiver<String>,
}

impl Children {
    /// Starts so many, each with its arguments. They write to one pipe, so it is read in the order in which they
    /// spoke: by a thread, so that the reader can also notice silence.
    pub(crate) fn start<A>(processes: usize, mut args: impl FnMut(usize) -> A) -> Result<Self>
    where
        A: IntoIterator<Item = String>,
    {
        let (heard, speak) = io::pipe()?;
        let (tell, said) = mpsc::channel();
        thread::spawn(move || {
            BufReader::new(heard).lines().map_while(io::Result::ok).try_for_each(|line| tell.send(line))
        });
        let mut children = Self { all: Vec::new(), said };
        for process in 1..=processes {
            children.all.push(spawn(args(process), speak.try_clone()?)?);
        }
        Ok(children)
    }

    /// The next line that one of them says.
    pub(crate) fn next(&self) -> Result<String> {
        Ok(self.said.recv_timeout(Duration::from_secs(60)).map_err(|_| "none of the processes speaks")?)
    }

    /// Hears what they say for a while.
    pub(crate) fn follow(&self, time: Duration, mut hear: impl FnMut(&str) -> Result<()>) -> Result<()> {
        let end = Instant::now() + time;
        while let Ok(line) = self.said.recv_timeout(end.saturating_duration_since(Instant::now())) {
            hear(&line)?;
        }
        Ok(())
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

    /// The same one after the other, each to its end. What they still said can be heard then.
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

fn spawn(args: impl IntoIterator<Item = String>, speak: PipeWriter) -> Result<Child> {
    let mut command = Command::new(env::current_exe()?);
    Ok(command.args(args).stdin(Stdio::piped()).stdout(speak).spawn()?)
}

/// A line of a process: which one, and what it said.
pub(crate) fn heard(line: &str) -> Result<(usize, &str)> {
    let (process, what) = line.split_once(' ').ok_or("a process spoke unclearly")?;
    Ok((process.parse::<usize>()?.max(1), what))
}

/// What a process hears from its parent.
pub(crate) struct Orders {
    /// The lines of its input, until that ends.
    pub(crate) lines: Receiver<String>,
    last: String,
}

impl Orders {
    pub(crate) fn new() -> Self {
        let (tell, lines) = mpsc::channel();
        thread::spawn(move || {
            io::stdin().lines().map_while(io::Result::ok).try_for_each(|line| tell.send(line))
        });
        Self { lines, last: String::new() }
    }

    /// Hears orders for a while. Whether the parent is still there, and not done.
    pub(crate) fn wait(&mut self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(order) => self.last = order,
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
    }

    /// The last order was to die in the middle of the next work.
    pub(crate) fn crash(&self) -> bool {
        self.last == "crash"
    }
}

/// Says one line to the parent, as a whole: all processes write to one pipe.
pub(crate) fn say(process: &str, line: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(format!("{process} {line}\n").as_bytes())?;
    Ok(out.flush()?)
}

/// Says so, and waits for the parent to kill this process.
pub(crate) fn stuck(process: &str, line: &str) -> Result<()> {
    say(process, line)?;
    // The limit is for a parent that is gone itself.
    thread::sleep(Duration::from_secs(20));
    Err("nobody killed this process".into())
}
