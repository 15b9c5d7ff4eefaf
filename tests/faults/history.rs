//! What happened: operations and beliefs with monotonic times, from lines that worker processes print.

use std::collections::HashMap;

/// Nanoseconds of a clock that all processes of this machine share.
pub fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

pub const MS: u64 = 1_000_000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    Acquire,
    Extend,
    Release,
    /// To a register that keeps the greatest fence it has seen, or in a fenced transaction.
    Write,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Granted, extended or written: the fence or the value, and the server's clock at the decision
    /// in milliseconds (zero if the answer does not tell).
    Ok { number: u64, decided_ms: i64 },
    /// Locked, not held, or too old a fence.
    Refused,
    /// The answer was lost; whether the change was found in the table right afterwards, if anybody looked.
    Unknown(Option<bool>),
    /// Certainly nothing was changed; the error's code.
    Failed(String),
    /// The process ended before the answer.
    Pending,
}

#[derive(Clone, Debug)]
pub struct Op {
    pub process: u32,
    pub what: What,
    pub key: String,
    /// Of the lease that it is about; zero for an acquire.
    pub fence: u64,
    /// How long the lease lasts from here on.
    pub ttl: u64,
    pub send: u64,
    pub recv: u64,
    /// How long the call may take, in nanoseconds.
    pub bound: u64,
    pub outcome: Outcome,
}

/// A holder found itself to be one, at two times and so between them.
#[derive(Clone, Debug)]
pub struct Belief {
    pub process: u32,
    pub key: String,
    pub fence: u64,
    pub ttl: u64,
    pub from: u64,
    pub to: u64,
}

/// A process could not run, or a stranger held a key's row (`from` and `to` in the server's milliseconds).
#[derive(Clone, Debug)]
pub struct Pause {
    pub process: u32,
    pub from: u64,
    pub to: u64,
}

#[derive(Clone, Debug)]
pub struct Blocked {
    pub key: String,
    pub from_ms: i64,
    pub to_ms: i64,
}

#[derive(Clone, Debug, Default)]
pub struct History {
    pub ops: Vec<Op>,
    pub beliefs: Vec<Belief>,
    pub pauses: Vec<Pause>,
    pub blocked: Vec<Blocked>,
    /// When some fault was there.
    pub disturbed: Vec<(u64, u64)>,
    /// The registers at the end: key and value.
    pub registers: HashMap<String, u64>,
}

/// Reads one process's lines.
#[derive(Default)]
pub struct Reader {
    process: u32,
    open: HashMap<String, Op>,
    held: HashMap<(String, u64), usize>,
}

impl Reader {
    pub fn new(process: u32) -> Self {
        Self { process, ..Self::default() }
    }

    /// `S n what key fence ttl bound time`, `E n time outcome…`, `H key fence ttl time`.
    pub fn line(&mut self, line: &str, into: &mut History) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        match words.as_slice() {
            ["S", n, what, key, ..] => {
                let what = match *what {
                    "acquire" => What::Acquire,
                    "extend" => What::Extend,
                    "release" => What::Release,
                    _ => What::Write,
                };
                let op = Op {
                    process: self.process,
                    what,
                    key: (*key).to_owned(),
                    fence: number(4),
                    ttl: number(5),
                    bound: number(6),
                    send: number(7),
                    recv: u64::MAX,
                    outcome: Outcome::Pending,
                };
                self.open.insert((*n).to_owned(), op);
            }
            ["E", n, _, outcome, ..] => {
                let Some(mut op) = self.open.remove(*n) else { return };
                op.recv = number(2);
                op.outcome = match *outcome {
                    "ok" => {
                        Outcome::Ok { number: number(4), decided_ms: i64::try_from(number(5)).unwrap_or(0) }
                    }
                    "refused" => Outcome::Refused,
                    "unknown" => Outcome::Unknown(words.get(4).and_then(|word| word.parse().ok())),
                    code => Outcome::Failed(code.to_owned()),
                };
                into.ops.push(op);
            }
            ["H", key, ..] => {
                let (fence, ttl, time) = (number(2), number(3), number(4));
                let at = *self.held.entry(((*key).to_owned(), fence)).or_insert_with(|| {
                    let (process, key) = (self.process, (*key).to_owned());
                    into.beliefs.push(Belief { process, key, fence, ttl, from: time, to: time });
                    into.beliefs.len() - 1
                });
                into.beliefs[at].to = time;
            }
            _ => {}
        }
    }

    /// The process has ended: what it had begun stays without an answer.
    pub fn end(self, into: &mut History) {
        into.ops.extend(self.open.into_values());
    }
}
