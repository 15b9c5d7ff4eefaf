//! Leader election at work, to look at: three processes, one leader; it steps down, and the next one is killed.
//!
//! ```text
//! scripts/demo election           # starts a throwaway server and runs this
//! ```
//!
//! Each candidate is a process of its own (this program starts itself again). The part to learn from is
//! [`candidate`]; the rest starts the candidates, asks who leads, and draws.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example talks")]

use std::env;
use std::error::Error;
use std::io::{self, BufRead as _, BufReader, IsTerminal as _, Write as _};
use std::ops::ControlFlow::{Break, Continue};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use postgres::{Client, NoTls};
use syncguard::{CancelToken, Fence, LockOptions, PgLockClient};

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

const HELP: &str = "\
election: three processes elect a leader, which steps down; the next one is killed

    scripts/demo election                 starts a throwaway server and runs this program on it
    SYNCGUARD_URL=postgresql://… cargo run --example election
                                          uses a server that you have

It works in a schema of its own and drops it at the end.";

const KEY: &str = "demo:leader";
const CANDIDATES: usize = 3;
const TTL: Duration = Duration::from_secs(2);
/// How long each leader is left alone.
const TERM: Duration = Duration::from_millis(600);

/// A process that campaigns, leads until it is told to step down, and campaigns again.
fn candidate(number: &str, schema: &str, url: &str) -> Result<()> {
    let client = PgLockClient::builder().schema(schema).auto_create_tables(false).connect(url)?;
    let (end, orders) = (CancelToken::new(), listen());
    let ended = end.clone();
    let (tell, step_down) = mpsc::channel();
    thread::spawn(move || {
        for order in orders {
            let _ = tell.send(order);
        }
        // The parent is done, or gone: no campaign any more, and no term.
        ended.cancel();
    });
    let say = |line: &str| {
        let mut out = io::stdout().lock();
        // Whole lines: all candidates write to one pipe.
        let _ = out.write_all(format!("{number} {line}\n").as_bytes()).and_then(|()| out.flush());
    };
    say("campaigns");
    let options = LockOptions::new().ttl(TTL).cancel(&end);
    let ended = client.elect::<()>(KEY, &options, |term| {
        say(&format!("leads {}", term.number()));
        // A leader's work goes here, in steps: between two of them it looks whether it still leads.
        while term.is_held() {
            if end.is_cancelled() {
                return Break(());
            }
            if step_down.recv_timeout(Duration::from_millis(5)).is_ok() {
                say("campaigns");
                return Continue(());
            }
        }
        say("lost its term");
        Continue(())
    });
    match ended {
        Err(error) if !end.is_cancelled() => Err(error.into()),
        _ => Ok(()),
    }
}

/// The lines of the standard input, until it ends.
fn listen() -> Receiver<String> {
    let (tell, lines) = mpsc::channel();
    thread::spawn(move || io::stdin().lines().map_while(io::Result::ok).try_for_each(|line| tell.send(line)));
    lines
}

#[derive(Clone, Copy, PartialEq)]
enum Lane {
    Starts,
    Campaigns,
    Leads,
    /// Killed, and its lease still counts.
    Dead,
    /// Killed, and another one leads.
    Gone,
}

struct Show {
    observer: PgLockClient,
    colours: bool,
    start: Instant,
    lanes: [Lane; CANDIDATES],
    history: Vec<(Duration, [Lane; CANDIDATES])>,
    terms: Vec<Fence>,
    observed: bool,
}

impl Show {
    fn run(&mut self, children: &mut Children, said: &Receiver<String>) -> Result<()> {
        println!("{CANDIDATES} processes campaign for {KEY:?}; a lease lasts {} s.\n", TTL.as_secs());
        println!("    time   1  2  3   · campaigns   █ leads   ✗ killed   ░ dead, its lease still counts");
        self.start = Instant::now();
        let first = self.next_leader(said)?;
        self.row(&format!("process {} leads, term {}", first + 1, self.terms.len()));

        thread::sleep(TERM);
        let asked = Instant::now();
        children.order(first, "step down")?;
        let second = self.next_leader(said)?;
        let after = asked.elapsed().as_secs_f64() * 1000.0;
        let what =
            format!("process {} steps down, process {} leads {after:.1} ms later", first + 1, second + 1);
        self.row(&self.paint("1;32", &what));

        thread::sleep(TERM);
        children.kill(second)?;
        let killed = Instant::now();
        self.set(second, Lane::Dead);
        self.row(&self.paint("1;31", &format!("process {} KILLED while it leads", second + 1)));
        let third = self.next_leader(said)?;
        self.set(second, Lane::Gone);
        let after = killed.elapsed().as_secs_f64();
        let what = format!(
            "process {} leads {after:.1} s later: a ttl and a second after the last renewal",
            third + 1
        );
        self.row(&self.paint("1;32", &what));

        thread::sleep(TERM);
        children.order(third, "step down")?;
        let fourth = self.next_leader(said)?;
        self.row(&format!("process {} steps down, process {} leads", third + 1, fourth + 1));
        thread::sleep(TERM);
        Ok(())
    }

    /// Follows what the candidates say until one of them leads, and asks the server for its view.
    fn next_leader(&mut self, said: &Receiver<String>) -> Result<usize> {
        loop {
            let line = said.recv_timeout(Duration::from_secs(60)).map_err(|_| "nobody leads")?;
            let (number, what) = line.split_once(' ').ok_or("a candidate spoke unclearly")?;
            let candidate = number.parse::<usize>()? - 1;
            match what.split_once(' ') {
                Some(("leads", term)) => {
                    let term: Fence = term.parse()?;
                    let leader = self.observer.leader(KEY)?;
                    self.observed &= leader.is_some_and(|leader| leader.term == term);
                    self.terms.push(term);
                    self.set(candidate, Lane::Leads);
                    return Ok(candidate);
                }
                _ => self.set(candidate, Lane::Campaigns),
            }
        }
    }

    fn set(&mut self, candidate: usize, lane: Lane) {
        if let Some(slot) = self.lanes.get_mut(candidate) {
            *slot = lane;
        }
        self.history.push((self.start.elapsed(), self.lanes));
    }

    fn row(&self, what: &str) {
        let lanes: Vec<String> = self.lanes.iter().map(|lane| format!(" {} ", self.sign(*lane))).collect();
        println!(" {:5.2} s  {}  {what}", self.start.elapsed().as_secs_f64(), lanes.concat());
    }

    /// The whole run as one line per process.
    fn picture(&self) {
        const WIDTH: u32 = 72;
        let whole = self.start.elapsed();
        println!("\nThe same as a picture, {:.1} s from left to right:\n", whole.as_secs_f64());
        for candidate in 0..CANDIDATES {
            let cells = (0..WIDTH).map(|cell| {
                // In the middle of the cell: what was the last change before it?
                let at = whole * (2 * cell + 1) / (2 * WIDTH);
                let before = self.history.iter().rev().find(|(time, _)| *time <= at);
                before.and_then(|(_, lanes)| lanes.get(candidate)).copied().unwrap_or(Lane::Starts)
            });
            let line: String = cells.map(|lane| self.sign(lane)).collect();
            println!("  process {}  {line}", candidate + 1);
        }
        println!();
    }

    fn sign(&self, lane: Lane) -> String {
        match lane {
            Lane::Starts => " ".into(),
            Lane::Campaigns => self.paint("2", "·"),
            Lane::Leads => self.paint("32", "█"),
            Lane::Dead => self.paint("31", "░"),
            Lane::Gone => self.paint("31", "✗"),
        }
    }

    fn paint(&self, colour: &str, text: &str) -> String {
        if self.colours { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.into() }
    }

    /// Says how it ended. Whether it ended as it should.
    fn verdict(&self) -> bool {
        let rising = self.terms.is_sorted_by(|earlier, later| earlier < later);
        println!(
            "Terms: {}, {}.",
            self.terms.len(),
            if rising { "each above the one before" } else { "OUT OF ORDER" }
        );
        println!("The server named each leader: {}.", if self.observed { "yes" } else { "NO" });
        rising && self.observed && self.terms.len() == 4
    }
}

/// The candidates; none of them outlives the parent's work.
struct Children(Vec<Child>);

impl Children {
    fn get(&mut self, candidate: usize) -> Result<&mut Child> {
        self.0.get_mut(candidate).ok_or_else(|| "an unknown candidate spoke".into())
    }

    fn order(&mut self, candidate: usize, order: &str) -> Result<()> {
        let input = self.get(candidate)?.stdin.as_mut().ok_or("its input is a pipe")?;
        Ok(input.write_all(format!("{order}\n").as_bytes())?)
    }

    fn kill(&mut self, candidate: usize) -> Result<()> {
        let child = self.get(candidate)?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Ends them in order: their input ends, and they step down.
    fn end(&mut self) -> Result<()> {
        for child in &mut self.0 {
            drop(child.stdin.take());
            child.wait()?;
        }
        Ok(())
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

fn show(url: &str) -> Result<bool> {
    let schema = format!("syncguard_election_{}", std::process::id());
    let mut database = Client::connect(url, NoTls)?;
    // Ctrl-C ends the candidates, hence the show; this process stays to clean up.
    signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::default())?;
    database.batch_execute(&format!("CREATE SCHEMA {schema}"))?;
    let shown = play(&schema, url);
    database.batch_execute(&format!("DROP SCHEMA {schema} CASCADE"))?;
    Ok(shown?.verdict())
}

fn play(schema: &str, url: &str) -> Result<Show> {
    let plain = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let mut show = Show {
        observer: PgLockClient::builder().schema(schema).connect(url)?,
        colours: io::stdout().is_terminal() && !plain,
        start: Instant::now(),
        lanes: [Lane::Starts; CANDIDATES],
        history: Vec::new(),
        terms: Vec::new(),
        observed: true,
    };
    let (heard, speak) = io::pipe()?;
    let mut children = Children(Vec::new());
    for number in 1..=CANDIDATES {
        let mut command = Command::new(env::current_exe()?);
        command.args(["--candidate", &number.to_string(), schema]);
        children.0.push(command.stdin(Stdio::piped()).stdout(speak.try_clone()?).spawn()?);
    }
    drop(speak);
    let (tell, said) = mpsc::channel();
    thread::spawn(move || {
        BufReader::new(heard).lines().map_while(io::Result::ok).try_for_each(|line| tell.send(line))
    });
    show.run(&mut children, &said)?;
    children.end()?;
    show.picture();
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
        [] if !url.is_empty() => show(&url),
        ["--candidate", number, schema] => candidate(number, schema, &url).map(|()| true),
        _ => {
            eprintln!("{HELP}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("election: {error}");
            ExitCode::FAILURE
        }
    }
}
