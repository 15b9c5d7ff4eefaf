//! Whether a history can be that of waiters in order.
//!
//! | rule | |
//! | --- | --- |
//! | `order` | nobody who asks for an order is granted the key while a ticket is ahead whose place is certain |
//! | `standstill` | a free key is granted in order within [`STANDSTILL`] while somebody waits for it who is first, or beside whom there is no ticket; and to each who is first |
//! | `outlives` | no ticket is live for longer than [`OUTLIVES`] after its wait |
//!
//! A place is certain if its ticket, of no smaller priority, was seen before the other call began, and again and again,
//! with an end in time, until after that was granted; if the call with that ticket was not granted meanwhile (all fences
//! since then were told to others); and if the server has neither lost tickets (they need not be on its disk) nor set
//! its clock since that call began.

use std::collections::{BTreeMap, BTreeSet};

use super::checker::{Violation, by_key, granted};
use super::history::{History, MS, Op, What, lock};
use super::tickets::{TICKET, Ticket, Tickets};

/// A ticket's life, and two seconds for a look, an attempt, and another one if that is lost.
pub const STANDSTILL: u64 = TICKET + 2000 * MS;

/// A ticket's life, the time of a message that arrives after its client has gone, and a second for the clock.
const OUTLIVES: u64 = TICKET + 4000 * MS + 1000 * MS;

/// What an attempt may take: so old may the ticket be that it has read.
const ATTEMPT: u64 = 750 * MS;

/// Whoever looks less often has not seen what was between.
const BLIND: u64 = 1000 * MS;

/// A call: its process and its number.
type Call = (u32, u64);

fn call(op: &Op) -> Call {
    (op.process, op.call)
}

/// What the rules have looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Judged {
    /// Grants in order while a certain ticket was behind, or ahead.
    pub pairs: u64,
    /// The longest time that counted for a standstill.
    pub longest: u64,
}

pub fn check(history: &History, found: &mut Vec<Violation>) -> Judged {
    let mut judged = Judged::default();
    let waits = |op: &&Op| op.what == What::Acquire && op.order.is_some();
    let waits: BTreeMap<Call, &Op> = history.ops.iter().filter(waits).map(|op| (call(op), op)).collect();
    let mut fences: BTreeMap<(&str, u64), BTreeSet<Call>> = BTreeMap::new();
    for op in &history.ops {
        if let Some(fence) = granted(op) {
            fences.entry((lock(&op.key), fence)).or_default().insert(call(op));
        }
    }
    for (key, mut seen) in by_key(history.tickets.iter(), |tickets| &tickets.key) {
        seen.sort_by_key(|tickets| tickets.from);
        let of = Line { history, key, seen, waits: &waits, fences: &fences };
        of.order(found, &mut judged);
        of.standstill(found, &mut judged);
        of.outlives(found);
    }
    judged
}

/// The line for one key.
struct Line<'a> {
    history: &'a History,
    key: &'a str,
    seen: Vec<&'a Tickets>,
    waits: &'a BTreeMap<Call, &'a Op>,
    /// Who was told of which grant.
    fences: &'a BTreeMap<(&'a str, u64), BTreeSet<Call>>,
}

fn overlaps(windows: &[(u64, u64)], from: u64, to: u64) -> bool {
    windows.iter().any(|(begin, end)| *begin < to && from < *end)
}

/// The same ticket in another snapshot. One that was taken back and written anew has another age.
fn again<'a>(tickets: &'a Tickets, ticket: &Ticket) -> Option<&'a Ticket> {
    tickets.line.iter().find(|other| other.id == ticket.id && other.since_ms == ticket.since_ms)
}

impl Line<'_> {
    fn order(&self, found: &mut Vec<Violation>, judged: &mut Judged) {
        for op in self.waits.values().filter(|op| op.key == self.key) {
            let (Some(fence), Some(priority)) = (granted(op), op.order) else { continue };
            // The times of both are in milliseconds.
            let before = self.seen.partition_point(|tickets| tickets.to + 3 * MS < op.send);
            let Some(first) = before.checked_sub(1).map(|at| self.seen[at]) else { continue };
            for ticket in first.line.iter().filter(|ticket| ticket.priority >= priority) {
                let Some(ahead) = ticket.call.and_then(|call| self.waits.get(&call)) else { continue };
                match granted(ahead) {
                    Some(earlier) if earlier < fence => judged.pairs += 1,
                    _ if self.is_certain((before - 1, ticket, ahead), op, fence) => {
                        judged.pairs += 1;
                        let text = format!(
                            "{}: fence {fence} (process {}) was granted before process {}, whose ticket was there {} ms before the call",
                            self.key,
                            op.process,
                            ahead.process,
                            (op.send - first.to) / MS
                        );
                        found.push(Violation { rule: "order", text, at: op.recv });
                    }
                    _ => {}
                }
            }
        }
    }

    /// Whether this ticket was there, and ahead, for as long as the call lasted.
    fn is_certain(&self, (first, ticket, ahead): (usize, &Ticket, &Op), op: &Op, fence: u64) -> bool {
        let after = self.seen.partition_point(|tickets| tickets.from < op.recv);
        let Some(seen) = self.seen.get(first..=after) else { return false };
        let lasts = seen.windows(2).all(|pair| {
            let stays = again(pair[0], ticket).map(|ticket| pair[0].from + ticket.rest);
            stays.is_some_and(|until| pair[1].to + ATTEMPT <= until)
        });
        let mut between = self.seen[first].counter + 1..fence;
        let of_others = |fence| {
            let told = self.fences.get(&(self.key, fence));
            told.is_some_and(|calls| !calls.contains(&call(ahead)))
        };
        lasts
            && again(self.seen[after], ticket).is_some()
            && between.all(of_others)
            && !overlaps(&self.history.unsettled, ahead.send, self.seen[after].to)
    }

    /// Until when this call certainly waits.
    fn end(&self, op: &Op) -> u64 {
        op.recv.min(self.history.ends.get(&op.process).copied().unwrap_or(u64::MAX))
    }

    fn is_waiting(&self, op: &Op, from: u64, to: u64) -> bool {
        let pauses =
            |pause: &super::history::Pause| pause.process == op.process && pause.from < to && from < pause.to;
        op.send < from && to < self.end(op) && !self.history.pauses.iter().any(pauses)
    }

    fn standstill(&self, found: &mut Vec<Violation>, judged: &mut Judged) {
        let mut waits: Vec<&Op> = self.waits.values().filter(|op| op.key == self.key).copied().collect();
        waits.sort_by_key(|op| op.send);
        let longest = waits.iter().map(|op| op.bound).max().unwrap_or(0);
        // Of the line, since it was served last; and of everybody, while it was first.
        let (mut free, mut stalled) = (0, BTreeMap::new());
        let mut first: BTreeMap<Call, u64> = BTreeMap::new();
        for pair in self.seen.windows(2) {
            let (from, to) = (pair[0].from, pair[1].to);
            if self.served(pair[0].counter, pair[1].counter) {
                (free, stalled) = (0, BTreeMap::new());
            }
            let away = overlaps(&self.history.away, from.saturating_sub(1000 * MS), to);
            if pair[0].counter != pair[1].counter || pair[0].held || pair[1].held || to - from > BLIND || away
            {
                continue;
            }
            let begun = waits.partition_point(|op| op.send < from.saturating_sub(2 * longest));
            let there = waits[begun..].iter().take_while(|op| op.send < from);
            let there: Vec<_> = there.filter(|op| self.is_waiting(op, from, to)).collect();
            let is_there = |ticket: &Ticket| there.iter().any(|op| ticket.call == Some(call(op)));
            if there.is_empty() || !pair.iter().all(|seen| seen.line.first().is_none_or(is_there)) {
                continue;
            }
            let more = pair[1].from - pair[0].from;
            free += more;
            stalled.extend(there.iter().map(|op| (call(op), op.stalled)));
            let of_one = pair[0].line.first().and_then(|ticket| ticket.call).map_or(0, |call| {
                let all = first.entry(call).or_default();
                *all += more;
                all.saturating_sub(self.waits[&call].stalled)
            });
            let counted = free.saturating_sub(stalled.values().sum()).max(of_one);
            judged.longest = judged.longest.max(counted);
            if counted > STANDSTILL {
                let text =
                    format!("{}: {} waited for {} ms, and it was free", self.key, there.len(), counted / MS);
                found.push(Violation { rule: "standstill", text, at: to });
                (free, stalled, first) = (0, BTreeMap::new(), BTreeMap::new());
            }
        }
    }

    /// Whether one of these grants may be that of a waiter in order. Who asks for no order may take a free key at any
    /// time, and nobody is served by that.
    fn served(&self, before: u64, counter: u64) -> bool {
        (before + 1..=counter).any(|fence| {
            let told = self.fences.get(&(self.key, fence));
            told.is_none_or(|calls| calls.iter().any(|call| self.waits.contains_key(call)))
        })
    }

    fn outlives(&self, found: &mut Vec<Violation>) {
        let mut told = BTreeSet::new();
        for seen in &self.seen {
            for ticket in &seen.line {
                let Some(op) = ticket.call.and_then(|call| self.waits.get(&call)) else { continue };
                // What a process that was killed has sent is late by as much.
                let end = self.end(op).saturating_add(OUTLIVES);
                if seen.from > end
                    && !overlaps(&self.history.away, end - OUTLIVES, seen.to)
                    && told.insert(call(op))
                {
                    let text =
                        format!("{}: the ticket of process {} has outlived its wait", self.key, op.process);
                    found.push(Violation { rule: "outlives", text, at: seen.from });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::checker::{self, Allow};
    use super::super::history::{Outcome, Pause};
    use super::*;

    /// A call of process `process` that waits in order, and the fence that it got.
    fn wait((process, order): (u32, i32), (send, recv): (u64, u64), fence: Option<u64>) -> Op {
        let ok = |number| Outcome::Ok { number, decided_ms: 0 };
        let outcome = fence.map_or(Outcome::Unknown(None), ok);
        Op {
            process,
            what: What::Acquire,
            key: "turn0".to_owned(),
            fence: 0,
            ttl: 100 * MS,
            send: send * MS,
            recv: recv * MS,
            bound: 20_000 * MS,
            outcome,
            set: None,
            stalled: 0,
            limit: 0,
            call: 1,
            order: Some(order),
        }
    }

    /// Every 50 ms; `at` says who is in line and whether the key is held, by how many grants there were.
    fn seen(until: u64, at: impl Fn(u64) -> (u64, bool, Vec<(u32, i32, u64)>)) -> Vec<Tickets> {
        let look = |n: u64| {
            let (counter, held, line) = at(n * 50);
            let ticket = |(process, priority, rest): (u32, i32, u64)| Ticket {
                id: process.to_string(),
                call: Some((process, 1)),
                since_ms: i64::from(process),
                rest: rest * MS,
                priority,
            };
            let line = line.into_iter().map(ticket).collect();
            let (from, key) = (n * 50 * MS, "turn0".to_owned());
            Tickets { key, from, to: from + MS, counter, held, line }
        };
        (0..until / 50).map(look).collect()
    }

    #[track_caller]
    fn finds(history: &History, rule: Option<&str>) {
        let found = checker::check(history, Allow { recovery: 20_000 * MS });
        assert_eq!(found.iter().map(|found| found.rule).next(), rule, "{found:?}");
    }

    /// Process 1 waits from 100 on, 2 from 320 on; somebody else has the key until 600, then one of them, and then the other.
    fn two(first: u32, priority: i32, rest: u64) -> History {
        let ops = [1, 2].map(|process| {
            let (at, fence) = if process == first { (600, 2) } else { (1200, 3) };
            let (send, own) = if process == 1 { (100, 0) } else { (320, priority) };
            wait((process, own), (send, at), Some(fence))
        });
        let ends = ops.iter().map(|op| (op.process, 9000 * MS)).collect();
        let others = Op { process: 3, order: None, ..wait((3, 0), (0, 10), Some(1)) };
        let ticket = |process, at| {
            let op = if process == 1 { &ops[0] } else { &ops[1] };
            (op.send / MS < at && at < op.recv / MS).then_some((process, op.order.unwrap_or(0), rest))
        };
        let tickets = seen(1500, |at| {
            let counter = if at < 600 {
                1
            } else if at < 1200 {
                2
            } else {
                3
            };
            (counter, true, [ticket(1, at), ticket(2, at)].into_iter().flatten().collect())
        });
        History { ops: [&ops[..], &[others]].concat(), tickets, ends, ..History::default() }
    }

    #[test]
    fn a_grant_before_somebody_whose_ticket_is_ahead_is_found() {
        let judged = |history: &History| check(history, &mut Vec::new()).pairs;
        let good = two(1, 0, 1500);
        finds(&good, None);
        assert_eq!(judged(&good), 1);
        let bad = two(2, 0, 1500);
        finds(&bad, Some("order"));
        finds(&two(2, -1, 1500), Some("order"));
        finds(&two(2, 1, 1500), None);
    }

    #[test]
    fn what_is_not_certain_is_nobodys_fault() {
        let bad = || two(2, 0, 1500);
        // A ticket that may have been over when the other's attempt read it,
        finds(&two(2, 0, 750), None);
        // that was not there all the while, or was written anew,
        let mut gone = bad();
        gone.tickets[9].line.clear();
        finds(&gone, None);
        let mut anew = bad();
        anew.tickets[9..].iter_mut().flat_map(|seen| &mut seen.line).for_each(|ticket| ticket.since_ms = 7);
        finds(&anew, None);
        // that the server may have lost,
        let lost = |from, to| History { unsettled: vec![(from * MS, to * MS)], ..bad() };
        finds(&lost(0, 100), Some("order"));
        finds(&lost(150, 160), None);
        // or that a grant has ended which nobody was told of.
        let mut untold = bad();
        untold.ops[1].outcome = Outcome::Ok { number: 3, decided_ms: 0 };
        untold.ops[0].outcome = Outcome::Ok { number: 4, decided_ms: 0 };
        finds(&untold, None);
        untold.ops.push(Op { call: 2, ..wait((3, 0), (20, 30), Some(2)) });
        finds(&untold, Some("order"));
    }

    /// One waits for so long while the key is free.
    fn alone(ms: u64, first: u32) -> History {
        let ops = vec![wait((1, 0), (100, 150 + ms), None)];
        let tickets = seen(ms + 1000, |at| {
            (7, at > 120 + ms, if at > 120 + ms { Vec::new() } else { vec![(first, 0, 1500)] })
        });
        History { ops, tickets, ends: [(1, u64::MAX)].into(), ..History::default() }
    }

    #[test]
    fn a_free_key_that_nobody_gets_is_found() {
        finds(&alone(3900, 1), None);
        let bad = alone(4200, 1);
        finds(&bad, Some("standstill"));
        // Not while another's ticket is first, or the waiter is not there,
        finds(&alone(4200, 9), None);
        finds(&History { pauses: vec![Pause { process: 1, from: 0, to: 900 * MS }], ..bad.clone() }, None);
        finds(&History { ends: [(1, 2000 * MS)].into(), ..bad.clone() }, None);
        // nor is the time without a server, or without a processor.
        finds(&History { away: vec![(300 * MS, 500 * MS)], ..bad.clone() }, None);
        let mut stalled = bad.clone();
        stalled.ops[0].stalled = 400 * MS;
        finds(&stalled, None);
        // A grant begins anew, unless it is that of somebody who asks for no order: but not for who is first,
        let mut granted = bad;
        granted.tickets[40..].iter_mut().for_each(|seen| seen.counter = 8);
        finds(&granted, Some("standstill"));
        // which nobody is whose ticket is not there.
        granted.tickets.iter_mut().for_each(|seen| seen.line.clear());
        finds(&granted, None);
        granted.ops.push(Op { order: None, ..wait((3, 0), (1990, 2000), Some(8)) });
        finds(&granted, Some("standstill"));
    }

    #[test]
    fn a_ticket_that_outlives_its_wait_is_found() {
        let with = |until| {
            let tickets =
                seen(9000, |at| (7, true, if at < until { vec![(1, 0, 1500)] } else { Vec::new() }));
            let ops = vec![wait((1, 0), (100, 200), None)];
            History { ops, tickets, ends: [(1, 9000 * MS)].into(), ..History::default() }
        };
        finds(&with(7150), None);
        finds(&with(7350), Some("outlives"));
    }
}
