//! What happened: operations and beliefs with monotonic times, from lines that worker processes print.

use std::collections::HashMap;

use super::tickets::{Tickets, call_of};

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
    /// The end of a run, which marks its slot: that is its number.
    Finish,
    /// A look at who leads: the number is the term.
    Observe,
    /// Of a register, by a reader in a fenced transaction: the number is the value.
    Read,
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
    /// Of the lease that it is about; the slot that a run is asked for; zero for any other acquire.
    pub fence: u64,
    /// How long the lease lasts from here on.
    pub ttl: u64,
    pub send: u64,
    pub recv: u64,
    /// How long the call may take, in nanoseconds.
    pub bound: u64,
    pub outcome: Outcome,
    /// The call for several keys that it is a part of, and its place there.
    pub set: Option<(u64, usize)>,
    /// How long its thread could not run, for want of a processor.
    pub stalled: u64,
    /// How many permits the semaphore has, for an acquire of one: its key is the semaphore's, or that of the
    /// permit once it is known.
    pub limit: u64,
    /// Its number in its process. A note names it: see [`Named`].
    pub call: u64,
    /// The priority of whoever asks to be served in order.
    pub order: Option<i32>,
}

/// The semaphore of a permit; any other key is its own.
pub fn base(key: &str) -> &str {
    key.split_once('#').map_or_else(|| lock(key), |(name, _)| name)
}

/// The key that a reader has, which it calls `key~`; any other is its own.
pub fn lock(key: &str) -> &str {
    key.strip_suffix('~').unwrap_or(key)
}

pub fn is_reader(key: &str) -> bool {
    key.ends_with('~')
}

/// A job began to run.
#[derive(Clone, Debug)]
pub struct Run {
    pub process: u32,
    pub job: String,
    pub slot: u64,
    /// A time at which its lease was trusted, or else when it was asked for.
    pub begun: u64,
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

/// Somebody was told, during a call, who has a key: owner and note, one of them or both. Owners are the numbers of
/// processes; a note is the number of the call that takes the key with it, behind that of its process.
#[derive(Clone, Debug)]
pub struct Named {
    pub process: u32,
    pub key: String,
    pub fence: u64,
    pub owner: Option<u32>,
    pub note: Option<(u32, u64)>,
    pub send: u64,
    pub recv: u64,
}

#[derive(Clone, Debug, Default)]
pub struct History {
    pub ops: Vec<Op>,
    pub beliefs: Vec<Belief>,
    pub pauses: Vec<Pause>,
    pub blocked: Vec<Blocked>,
    /// When some fault was there.
    pub disturbed: Vec<(u64, u64)>,
    /// When the server may have lost what need not be on its disk, or have set its clock.
    pub unsettled: Vec<(u64, u64)>,
    /// When a fault may have kept clients from the server.
    pub away: Vec<(u64, u64)>,
    pub named: Vec<Named>,
    /// What the table said of those who wait in order, oldest first.
    pub tickets: Vec<Tickets>,
    /// When a process that was killed was heard of for the last time.
    pub ends: HashMap<u32, u64>,
    /// The registers at the end: key and value.
    pub registers: HashMap<String, u64>,
    pub runs: Vec<Run>,
    /// The effects of jobs at the end: job and slot of each.
    pub effects: Vec<(String, u64)>,
    /// The counters at the end, by key.
    pub counters: HashMap<String, u64>,
}

/// Reads one process's lines.
#[derive(Default)]
pub struct Reader {
    process: u32,
    open: HashMap<String, Op>,
    /// Who was named in calls that have not ended.
    named: HashMap<String, Vec<Named>>,
    held: HashMap<(String, u64), usize>,
    /// The last time that a line told.
    latest: u64,
}

impl Reader {
    pub fn new(process: u32) -> Self {
        Self { process, ..Self::default() }
    }

    /// `S n what key fence ttl bound time limit priority`, `E n time outcome…`, `H key fence ttl time`, `J job slot time`,
    /// `D n time`, `W n key fence owner note`. Several keys stand with `+` between them, and so do their fences with `,`.
    pub fn line(&mut self, line: &str, into: &mut History) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        match words.as_slice() {
            ["S", n, what, key, ..] => {
                let what = match *what {
                    "acquire" => What::Acquire,
                    "extend" => What::Extend,
                    "release" => What::Release,
                    "finish" => What::Finish,
                    "observe" => What::Observe,
                    "read" => What::Read,
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
                    set: key.contains('+').then(|| (u64::from(self.process) << 32 | number(1), 0)),
                    stalled: 0,
                    limit: number(8),
                    call: number(1),
                    order: words.get(9).and_then(|word| word.parse().ok()),
                };
                self.latest = op.send;
                self.open.insert((*n).to_owned(), op);
            }
            ["E", n, _, outcome, ..] => {
                let Some(mut op) = self.open.remove(*n) else { return };
                op.recv = number(2);
                self.latest = op.recv;
                op.outcome = match *outcome {
                    "ok" => {
                        Outcome::Ok { number: number(4), decided_ms: i64::try_from(number(5)).unwrap_or(0) }
                    }
                    "refused" => Outcome::Refused,
                    "unknown" => Outcome::Unknown(words.get(4).and_then(|word| word.parse().ok())),
                    code => Outcome::Failed(code.to_owned()),
                };
                if number(6) > 0 {
                    op.key = format!("{}#{}", op.key, number(6));
                }
                for named in self.named.remove(*n).unwrap_or_default() {
                    into.named.push(Named { send: op.send, recv: op.recv, ..named });
                }
                parts(op, words.get(4).copied().unwrap_or_default(), into);
            }
            ["W", n, key, _, owner, note] => {
                self.named.entry((*n).to_owned()).or_default().push(Named {
                    process: self.process,
                    key: (*key).to_owned(),
                    fence: number(3),
                    owner: owner.parse().ok(),
                    note: call_of(note),
                    send: 0,
                    recv: 0,
                });
            }
            ["D", n, ..] => {
                if let Some(op) = self.open.get_mut(*n) {
                    op.stalled = number(2);
                }
            }
            ["J", job, ..] => {
                let (process, job, slot, begun) = (self.process, (*job).to_owned(), number(2), number(3));
                into.runs.push(Run { process, job, slot, begun });
            }
            ["H", key, ..] => {
                let (fence, ttl, time) = (number(2), number(3), number(4));
                let at = *self.held.entry(((*key).to_owned(), fence)).or_insert_with(|| {
                    let (process, key) = (self.process, (*key).to_owned());
                    into.beliefs.push(Belief { process, key, fence, ttl, from: time, to: time });
                    into.beliefs.len() - 1
                });
                into.beliefs[at].to = time;
                self.latest = time;
            }
            _ => {}
        }
    }

    /// The process has ended: what it had begun stays without an answer. A call without a bound may have been
    /// granted until then.
    pub fn end(self, into: &mut History) {
        into.ends.insert(self.process, self.latest);
        for mut op in self.open.into_values() {
            if op.bound == 0 && op.what == What::Acquire {
                op.bound = self.latest.saturating_sub(op.send);
            }
            parts(op, "", into);
        }
    }
}

/// One operation per key, each with the fence of its own.
fn parts(op: Op, fences: &str, into: &mut History) {
    let Some((set, _)) = op.set else {
        into.ops.push(op);
        return;
    };
    let mut fences = fences.split(',');
    for (place, key) in op.key.split('+').enumerate() {
        let mut part = Op { key: key.to_owned(), set: Some((set, place)), ..op.clone() };
        if let (Outcome::Ok { .. }, What::Acquire) = (&op.outcome, &op.what) {
            let fence = fences.next().and_then(|fence| fence.parse().ok());
            let missing = || Outcome::Failed("NotGranted".to_owned());
            part.outcome = fence.map_or_else(missing, |number| Outcome::Ok { number, decided_ms: 0 });
        }
        into.ops.push(part);
    }
}

#[test]
fn the_keys_of_a_set_are_told_apart_and_a_permit_gets_its_number() {
    let (mut reader, mut history) = (Reader::new(7), History::default());
    for line in [
        "S 1 acquire a+b 0 100 50 10",
        "E 1 20 ok 3,4 0",
        "S 2 acquire sem 0 100 50 30 3",
        "E 2 40 ok 9 0 2",
        "S 3 acquire a+c 0 100 50 50",
        "E 3 60 ok 5 0",
        "S 4 acquire lead 0 100 0 70",
        "H sem#2 9 100 90",
        "J job 8 95",
        "S 5 acquire turn 0 100 50 96 0 -5",
        "W 5 turn 3 2 2.41",
        "W 5 turn 4 - 2.42",
        "E 5 99 AcquisitionTimeout",
    ] {
        reader.line(line, &mut history);
    }
    reader.end(&mut history);
    let told: Vec<_> = history
        .ops
        .iter()
        .map(|op| match &op.outcome {
            Outcome::Ok { number, .. } => format!("{} {number}", op.key),
            other => format!("{} {other:?} {}", op.key, op.bound),
        })
        .collect();
    assert_eq!(
        told,
        [
            "a 3",
            "b 4",
            "sem#2 9",
            "a 5",
            "c Failed(\"NotGranted\") 50",
            "turn Failed(\"AcquisitionTimeout\") 50",
            "lead Pending 29"
        ]
    );
    assert_eq!(history.ops.iter().map(|op| op.limit).max(), Some(3));
    assert_eq!((history.ops[5].call, history.ops[5].order, history.ends[&7]), (5, Some(-5), 99));
    let named: Vec<_> =
        history.named.iter().map(|it| (it.fence, it.owner, it.note, it.send, it.recv)).collect();
    assert_eq!(named, [(3, Some(2), Some((2, 41)), 96, 99), (4, None, Some((2, 42)), 96, 99)]);
    assert_eq!((history.ops[0].set, history.ops[1].set), (Some((7 << 32 | 1, 0)), Some((7 << 32 | 1, 1))));
    assert_eq!((history.beliefs[0].key.as_str(), history.runs[0].slot), ("sem#2", 8));
}
