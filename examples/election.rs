//! Leader election at work, to look at: three processes, one leader; it steps down, and the next one is killed.
//!
//! ```text
//! scripts/demo election           # starts a throwaway server and runs this
//! ```
//!
//! Each candidate is a process of its own (this program starts itself again). The part to learn from is
//! [`candidate`]; the rest starts the candidates, asks who leads, and draws.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example talks")]

mod lanes;

use std::error::Error;
use std::ops::ControlFlow::{Break, Continue};
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use syncguard::{CancelToken, Fence, LockOptions, PgLockClient};

use lanes::{Children, Demo, Ending, Lane, Lanes, Orders, Tone, heard};

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
    let (end, orders) = (CancelToken::new(), Orders::new());
    let ended = end.clone();
    let (tell, step_down) = mpsc::channel();
    thread::spawn(move || {
        for order in orders.lines {
            let _ = tell.send(order);
        }
        // The parent is done, or gone: no campaign any more, and no term.
        ended.cancel();
    });
    // A parent that does not listen is gone, and ends the campaign.
    let say = |line: &str| drop(lanes::say(number, line));
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

struct Show {
    observer: PgLockClient,
    lanes: Lanes,
    terms: Vec<Fence>,
    observed: bool,
}

impl Show {
    fn run(&mut self, children: &mut Children) -> Result<()> {
        let what = format!("{CANDIDATES} processes campaign for {KEY:?}; a lease lasts {} s.", TTL.as_secs());
        self.lanes.say(&what);
        self.lanes.begin(&["· campaigns", "█ leads", "✗ killed", "░ dead, its lease still counts"]);
        let first = self.next_leader(children)?;
        self.lanes.row(Tone::Plain, &format!("process {first} leads, term {}", self.terms.len()));

        thread::sleep(TERM);
        let asked = Instant::now();
        children.order(first, "step down")?;
        let second = self.next_leader(children)?;
        let after = asked.elapsed().as_secs_f64() * 1000.0;
        let what = format!("process {first} steps down, process {second} leads {after:.1} ms later");
        self.lanes.row(Tone::Good, &what);

        thread::sleep(TERM);
        children.kill(second)?;
        let killed = Instant::now();
        self.lanes.set(second, Lane::Dead);
        self.lanes.row(Tone::Bad, &format!("process {second} KILLED while it leads"));
        let third = self.next_leader(children)?;
        self.lanes.set(second, Lane::Gone);
        let after = killed.elapsed().as_secs_f64();
        let what = format!("process {third} leads {after:.1} s later: the dead one's lease is over");
        self.lanes.row(Tone::Good, &what);

        thread::sleep(TERM);
        children.order(third, "step down")?;
        let fourth = self.next_leader(children)?;
        self.lanes.row(Tone::Plain, &format!("process {third} steps down, process {fourth} leads"));
        thread::sleep(TERM);
        Ok(())
    }

    /// Follows what the candidates say until one of them leads, and asks the server for its view.
    fn next_leader(&mut self, children: &Children) -> Result<usize> {
        loop {
            let line = children.next()?;
            let (candidate, what) = heard(&line)?;
            match what.split_once(' ') {
                Some(("leads", term)) => {
                    let term: Fence = term.parse()?;
                    let leader = self.observer.leader(KEY)?;
                    self.observed &= leader.is_some_and(|leader| leader.term == term);
                    self.terms.push(term);
                    self.lanes.set(candidate, Lane::Works);
                    return Ok(candidate);
                }
                _ => self.lanes.set(candidate, Lane::Waits),
            }
        }
    }

    /// Says how it ended. Whether it ended as it should.
    fn verdict(&self) -> bool {
        let rising = self.terms.is_sorted_by(|earlier, later| earlier < later);
        let (four, terms) = (self.terms.len() == 4, self.terms.len());
        let order = if rising { "each above the one before" } else { "OUT OF ORDER" };
        self.lanes.judge(rising && four, &format!("Terms: {terms}, {order}."));
        let named = if self.observed { "yes" } else { "NO" };
        self.lanes.judge(self.observed, &format!("The server named each leader: {named}."));
        rising && self.observed && four
    }
}

fn show(url: &str) -> Result<bool> {
    lanes::in_schema("election", url, |schema, _| Ok(play(schema, url)?.verdict()))
}

fn play(schema: &str, url: &str) -> Result<Show> {
    let mut show = Show {
        observer: PgLockClient::builder().schema(schema).connect(url)?,
        lanes: Lanes::new(CANDIDATES),
        terms: Vec::new(),
        observed: true,
    };
    let mut children = Children::start(CANDIDATES, |number| {
        ["--candidate".to_owned(), number.to_string(), schema.to_owned()]
    })?;
    show.run(&mut children)?;
    children.end()?;
    show.lanes.picture("process");
    Ok(show)
}

fn main() -> ExitCode {
    let demo = Demo { example: "election", script: "scripts/demo election", help: HELP };
    demo.main(|args, url| match args {
        [] => show(url).map(Ending::Shown),
        ["--candidate", number, schema] => candidate(number, schema, url).map(|()| Ending::Shown(true)),
        _ => Ok(Ending::Usage("it takes no options".into())),
    })
}
