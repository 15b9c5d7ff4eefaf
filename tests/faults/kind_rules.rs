//! Whether a history can be that of sets, permits, leaders and runs.
//!
//! | rule | |
//! | --- | --- |
//! | `part` | a set is granted with all of its keys or none; keys that are taken together only (`twin…`) have equal fences in every grant, and equal counters at the end |
//! | `counter` | no counter is below a fence that was granted |
//! | `limit` | never more holders of a semaphore than the largest limit in use, and no permit beyond its caller's |
//! | `term` | who looks at a leader sees a term no smaller than any that was known before; a leader's is greater |
//! | `once` | no slot is told as done twice; no job begins in a slot after that, or a later one, was told as done |
//! | `claimed` | a job that claims its slot (`claim…`) begins at most once in it |
//! | `effect` | of a job that completes in its own transaction (`effect…`) no slot has two effects, and one that is done has one |
//! | `since` | what a reader reads in a fenced transaction stands still meanwhile; all that writers before its group have written is in it, and nothing of those after |
//! | `skipped` | a slot is said to be done only if some run may have marked it, or a later one |
//!
//! That terms and the fences of a permit grow, that one leader leads and one run of a job runs at a time, and that a
//! lease whose set was lost is looked after by nobody are the rules `fence`, `overlap` and `unavailable` of
//! [`checker`](super::checker), by key.

use std::collections::{BTreeMap, BTreeSet};

use super::checker::{Violation, by_key, granted};
use super::history::{Belief, History, Op, Outcome, What, base, lock};

pub fn check(history: &History, found: &mut Vec<Violation>) {
    parts(history, found);
    counters(history, found);
    limits(history, found);
    terms(history, found);
    once(history, found);
    effects(history, found);
    skipped(history, found);
    since(history, found);
}

fn violation(rule: &'static str, text: String, at: u64) -> Violation {
    Violation { rule, text, at }
}

fn parts(history: &History, found: &mut Vec<Violation>) {
    let mut sets: BTreeMap<u64, Vec<&Op>> = BTreeMap::new();
    for op in history.ops.iter().filter(|op| op.what == What::Acquire) {
        if let Some((set, _)) = op.set {
            sets.entry(set).or_default().push(op);
        }
    }
    for ops in sets.values() {
        let keys = || ops.iter().map(|op| op.key.as_str()).collect::<Vec<_>>().join("+");
        let fences: Vec<_> = ops.iter().filter_map(|op| granted(op).map(|fence| (&op.key, fence))).collect();
        if !fences.is_empty() && fences.len() < ops.len() {
            let text = format!("{}: {} of {} keys were granted", keys(), fences.len(), ops.len());
            found.push(violation("part", text, ops[0].recv));
        }
        let twins: Vec<_> = fences.iter().filter(|(key, _)| key.starts_with("twin")).collect();
        if twins.windows(2).any(|pair| pair[0].1 != pair[1].1) {
            found.push(violation("part", format!("{}: granted apart, {twins:?}", keys()), ops[0].recv));
        }
    }
    let mut twins: BTreeMap<&str, BTreeSet<u64>> = BTreeMap::new();
    for (key, counter) in history.counters.iter().filter(|(key, _)| key.starts_with("twin")) {
        twins.entry(&key[..key.len() - 1]).or_default().insert(*counter);
    }
    for (key, counters) in twins.iter().filter(|(_, counters)| counters.len() > 1) {
        found.push(violation("part", format!("{key}: its keys were granted apart, {counters:?} times"), 0));
    }
}

fn counters(history: &History, found: &mut Vec<Violation>) {
    if history.counters.is_empty() {
        return;
    }
    let grants = history.ops.iter().filter_map(|op| granted(op).map(|fence| (fence, op)));
    for (key, grants) in by_key(grants, |(_, op)| lock(&op.key)) {
        let counter = history.counters.get(key).copied().unwrap_or(0);
        if let Some((fence, op)) = grants.iter().filter(|(fence, _)| *fence > counter).max_by_key(|it| it.0) {
            let text = format!("{key}: fence {fence} was granted, and its counter is {counter}");
            found.push(violation("counter", text, op.recv));
        }
    }
}

fn limits(history: &History, found: &mut Vec<Violation>) {
    let mut largest: BTreeMap<&str, u64> = BTreeMap::new();
    for op in history.ops.iter().filter(|op| op.limit > 0) {
        let most = largest.entry(base(&op.key)).or_default();
        *most = (*most).max(op.limit);
        let number = op.key.split_once('#').and_then(|(_, number)| number.parse::<u64>().ok());
        if let Some(number) = number.filter(|number| *number > op.limit) {
            let text = format!("{}: permit {number} was granted, of {}", base(&op.key), op.limit);
            found.push(violation("limit", text, op.recv));
        }
    }
    let held = history.beliefs.iter().filter(|belief| belief.key.contains('#'));
    for (name, beliefs) in by_key(held, |belief: &&Belief| base(&belief.key)) {
        // At one moment whoever ends does so before another begins.
        let mut moments: Vec<(u64, i64)> =
            beliefs.iter().flat_map(|belief| [(belief.from, 1), (belief.to, -1)]).collect();
        moments.sort_unstable();
        let limit = largest.get(name).copied().unwrap_or(0).cast_signed();
        let mut holders = 0;
        for (at, change) in moments {
            holders += change;
            if change > 0 && holders > limit {
                found.push(violation(
                    "limit",
                    format!("{name}: {holders} holders, the limit is {limit}"),
                    at,
                ));
            }
        }
    }
}

/// What is known at a time: the greatest of the numbers that were answered before it.
struct Known(Vec<(u64, u64)>);

impl Known {
    fn new(answers: impl Iterator<Item = (u64, u64)>) -> Self {
        let mut answers: Vec<_> = answers.collect();
        answers.sort_unstable();
        let mut most = 0;
        for (_, number) in &mut answers {
            most = most.max(*number);
            *number = most;
        }
        Self(answers)
    }

    fn before(&self, at: u64) -> Option<u64> {
        let end = self.0.partition_point(|(answered, _)| *answered < at);
        end.checked_sub(1).map(|last| self.0[last].1)
    }
}

fn terms(history: &History, found: &mut Vec<Violation>) {
    let seen = history.ops.iter().filter_map(|op| match (&op.what, &op.outcome) {
        (What::Acquire | What::Observe, Outcome::Ok { number, .. }) => Some((*number, op)),
        _ => None,
    });
    let observed: BTreeSet<&str> =
        history.ops.iter().filter(|op| op.what == What::Observe).map(|op| op.key.as_str()).collect();
    for (key, seen) in by_key(seen.filter(|(_, op)| observed.contains(op.key.as_str())), |(_, op)| &op.key) {
        let known = Known::new(seen.iter().map(|(number, op)| (op.recv, *number)));
        for (number, op) in &seen {
            let before = known.before(op.send).unwrap_or(0);
            if before > *number || before == *number && op.what == What::Acquire {
                let text = format!("{key}: term {number} was seen or granted after term {before}");
                found.push(violation("term", text, op.recv));
            }
        }
    }
}

/// The slots that were told as done, with when they were.
fn done(history: &History) -> impl Iterator<Item = (u64, &Op)> {
    history.ops.iter().filter_map(|op| match op.outcome {
        Outcome::Ok { number, .. } if op.what == What::Finish => Some((number, op)),
        _ => None,
    })
}

fn once(history: &History, found: &mut Vec<Violation>) {
    let mut known = BTreeMap::new();
    for (job, mut done) in by_key(done(history), |(_, op)| &op.key) {
        done.sort_by_key(|(slot, op)| (*slot, op.recv));
        for pair in done.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
            let text = format!("{job}: slot {} was done twice", pair[0].0);
            found.push(violation("once", text, pair[1].1.recv));
        }
        known.insert(job, Known::new(done.iter().map(|(slot, op)| (op.recv, *slot))));
    }
    for (job, mut runs) in by_key(history.runs.iter(), |run| &run.job) {
        for run in &runs {
            let before = known.get(job).and_then(|known| known.before(run.begun));
            if let Some(before) = before.filter(|before| *before >= run.slot) {
                let text = format!("{job}: slot {} ran after slot {before} was done", run.slot);
                found.push(violation("once", text, run.begun));
            }
        }
        runs.sort_by_key(|run| (run.slot, run.begun));
        for pair in runs.windows(2).filter(|pair| job.starts_with("claim") && pair[0].slot == pair[1].slot) {
            let (first, second) = (pair[0].process, pair[1].process);
            let text = format!("{job}: slot {} began in process {first} and in {second}", pair[0].slot);
            found.push(violation("claimed", text, pair[1].begun));
        }
    }
}

fn effects(history: &History, found: &mut Vec<Violation>) {
    let mut times: BTreeMap<(&str, u64), u64> = BTreeMap::new();
    for (job, slot) in &history.effects {
        *times.entry((job, *slot)).or_default() += 1;
    }
    for ((job, slot), times) in times.iter().filter(|(_, times)| **times > 1) {
        found.push(violation("effect", format!("{job}: slot {slot} has {times} effects"), 0));
    }
    for (slot, op) in done(history).filter(|(_, op)| op.key.starts_with("effect")) {
        if !times.contains_key(&(op.key.as_str(), slot)) {
            let text = format!("{}: slot {slot} was told as done, and has no effect", op.key);
            found.push(violation("effect", text, op.recv));
        }
    }
}

fn skipped(history: &History, found: &mut Vec<Violation>) {
    let asked = history.ops.iter().filter(|op| op.what == What::Acquire && op.fence > 0);
    for (job, asked) in by_key(asked, |op| &op.key) {
        let already = |op: &&&Op| op.outcome == Outcome::Failed("AlreadyDone".to_owned());
        // Also a run that failed may have claimed its slot.
        let may_have_run = asked.iter().filter(|op| op.outcome != Outcome::Refused && !already(op));
        let known = Known::new(may_have_run.map(|op| (op.send, op.fence)));
        for op in asked.iter().filter(already) {
            if known.before(op.recv).is_none_or(|slot| slot < op.fence) {
                let text = format!("{job}: slot {} is said to be done, and nobody can have run it", op.fence);
                found.push(violation("skipped", text, op.recv));
            }
        }
    }
}

/// A reader's fenced transaction says that no writer was there since its group began.
fn since(history: &History, found: &mut Vec<Violation>) {
    let of = |what| history.ops.iter().filter(move |op| op.what == what);
    let number = |op: &Op| match op.outcome {
        Outcome::Ok { number, .. } => Some(number),
        _ => None,
    };
    let mut written =
        by_key(of(What::Write).filter_map(|op| Some((op.fence, number(op)?, op))), |(.., op)| &op.key);
    written.values_mut().for_each(|writes| writes.sort_unstable_by_key(|(fence, value, _)| (*fence, *value)));
    for (register, reads) in by_key(of(What::Read), |op| &op.key) {
        let writes = written.get(register).map(Vec::as_slice).unwrap_or_default();
        for read in reads {
            if read.outcome == Outcome::Failed("torn".to_owned()) {
                let text =
                    format!("{register}: it changed while a reader under fence {} read it", read.fence);
                found.push(violation("since", text, read.recv));
            }
            let Some(value) = number(read) else { continue };
            // Values grow with the fence, by the rule of registers.
            let at = writes.partition_point(|(fence, ..)| *fence < read.fence);
            let older = at.checked_sub(1).map(|at| writes[at].1).filter(|older| *older > value);
            let newer = writes.get(at).map(|write| write.1).filter(|newer| *newer <= value);
            if let Some(other) = older.or(newer) {
                let text = format!(
                    "{register}: a reader under fence {} read {value}, and {other} was written {}",
                    read.fence,
                    if older.is_some() { "before its group" } else { "after it" }
                );
                found.push(violation("since", text, read.recv));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::checker::{self, Allow};
    use super::super::history::{MS, Run};
    use super::*;

    fn op(what: What, key: &str, (send, recv): (u64, u64), outcome: Outcome) -> Op {
        let (send, recv) = (send * MS, recv * MS);
        let key = key.to_owned();
        let (fence, ttl, bound, set, stalled, limit, call, order) = (0, 0, 0, None, 0, 0, 0, None);
        Op { process: 1, what, key, fence, ttl, send, recv, bound, outcome, set, stalled, limit, call, order }
    }

    fn ok(number: u64) -> Outcome {
        Outcome::Ok { number, decided_ms: 0 }
    }

    fn run(job: &str, slot: u64, begun: u64) -> Run {
        Run { process: 1, job: job.to_owned(), slot, begun: begun * MS }
    }

    #[track_caller]
    fn finds(history: &History, rule: Option<&str>) {
        let found = checker::check(history, Allow { recovery: 8000 * MS });
        assert_eq!(found.iter().map(|found| found.rule).next(), rule, "{found:?}");
    }

    #[test]
    fn a_set_that_is_granted_in_part_is_found() {
        let with = |second| {
            let mut ops = vec![op(What::Acquire, "twin0a", (0, 10), ok(5)), second];
            (0..).zip(&mut ops).for_each(|(place, op)| op.set = Some((1, place)));
            History { ops, ..History::default() }
        };
        finds(&with(op(What::Acquire, "twin0b", (0, 10), ok(5))), None);
        finds(&with(op(What::Acquire, "hot0", (0, 10), ok(9))), None);
        let missing = Outcome::Failed("NotGranted".to_owned());
        finds(&with(op(What::Acquire, "hot0", (0, 10), missing)), Some("part"));
        finds(&with(op(What::Acquire, "twin0b", (0, 10), ok(6))), Some("part"));
    }

    #[test]
    fn counters_that_were_raised_apart_or_went_back_are_found() {
        let with = |a, b| History {
            ops: vec![op(What::Acquire, "twin0a", (0, 10), ok(5))],
            counters: [("twin0a".to_owned(), a), ("twin0b".to_owned(), b)].into(),
            ..History::default()
        };
        finds(&with(5, 5), None);
        finds(&with(6, 6), None);
        finds(&with(5, 6), Some("part"));
        finds(&with(4, 4), Some("counter"));
    }

    #[test]
    fn more_holders_than_permits_are_found() {
        let with = |times: &[(u64, u64)]| {
            let grant = |(n, _)| {
                let mut op = op(What::Acquire, &format!("sem#{n}"), (0, 1), ok(1));
                op.limit = 2;
                op
            };
            let belief = |(n, (from, to)): (usize, &(u64, u64))| Belief {
                process: 1,
                key: format!("sem#{n}"),
                fence: 1,
                ttl: 0,
                from: from * MS,
                to: to * MS,
            };
            History {
                ops: times.iter().take(2).enumerate().map(|(n, time)| grant((n + 1, time))).collect(),
                beliefs: times.iter().enumerate().map(belief).collect(),
                ..History::default()
            }
        };
        finds(&with(&[(0, 100), (10, 20), (20, 30)]), None);
        finds(&with(&[(0, 100), (10, 21), (20, 30)]), Some("limit"));
        let mut beyond = with(&[(0, 1)]);
        beyond.ops[0].key = "sem#3".to_owned();
        finds(&beyond, Some("limit"));
    }

    #[test]
    fn two_leaders_at_once_and_terms_that_go_back_are_found() {
        let lead = |fence, from: u64, to: u64| {
            let key = "lead".to_owned();
            Belief { process: 1, key, fence, ttl: 0, from: from * MS, to: to * MS }
        };
        let with =
            |from| History { beliefs: vec![lead(1, 0, 100), lead(2, from, 200)], ..History::default() };
        finds(&with(100), None);
        finds(&with(99), Some("overlap"));
        let with = |what, number| History {
            ops: vec![op(What::Observe, "lead", (0, 10), ok(5)), op(what, "lead", (20, 30), ok(number))],
            ..History::default()
        };
        finds(&with(What::Observe, 5), None);
        finds(&with(What::Acquire, 6), None);
        finds(&with(What::Observe, 4), Some("term"));
        finds(&with(What::Acquire, 5), Some("term"));
    }

    #[test]
    fn a_writer_since_a_readers_group_began_is_found() {
        let under = |what, fence, at, outcome| {
            let op = op(what, "T:read0", (at, at + 1), outcome);
            Op { fence, ..op }
        };
        let with = |outcome| History {
            ops: vec![
                under(What::Write, 1, 0, ok(1)),
                under(What::Write, 3, 10, ok(2)),
                under(What::Read, 4, 20, outcome),
                under(What::Write, 5, 30, ok(3)),
            ],
            registers: [("T:read0".to_owned(), 3)].into(),
            ..History::default()
        };
        finds(&with(ok(2)), None);
        finds(&with(Outcome::Refused), None);
        finds(&with(ok(1)), Some("since"));
        finds(&with(ok(3)), Some("since"));
        finds(&with(Outcome::Failed("torn".to_owned())), Some("since"));
    }

    #[test]
    fn a_slot_that_is_done_or_begun_again_is_found() {
        let with = |slot, begun, job: &str| History {
            ops: vec![op(What::Finish, job, (5, 10), ok(7))],
            runs: vec![run(job, 7, 0), run(job, slot, begun)],
            ..History::default()
        };
        finds(&with(8, 20, "job"), None);
        finds(&with(7, 9, "job"), None);
        finds(&with(7, 11, "job"), Some("once"));
        finds(&with(6, 11, "job"), Some("once"));
        finds(&with(8, 9, "claim"), None);
        finds(&with(7, 9, "claim"), Some("claimed"));
        let mut twice = with(8, 20, "job");
        twice.ops.push(op(What::Finish, "job", (5, 15), ok(7)));
        finds(&twice, Some("once"));
    }

    #[test]
    fn effects_that_are_doubled_or_missing_are_found() {
        let with = |slots: &[u64]| History {
            ops: vec![op(What::Finish, "effect", (5, 10), ok(7))],
            effects: slots.iter().map(|slot| ("effect".to_owned(), *slot)).collect(),
            ..History::default()
        };
        finds(&with(&[7, 8]), None);
        finds(&with(&[7, 7]), Some("effect"));
        finds(&with(&[8]), Some("effect"));
    }

    #[test]
    fn a_slot_that_is_skipped_although_nobody_ran_it_is_found() {
        let with = |slot, outcome| {
            let mut ops = vec![op(What::Acquire, "job", (0, 10), outcome)];
            ops.push(op(What::Acquire, "job", (20, 30), Outcome::Failed("AlreadyDone".to_owned())));
            (ops[0].fence, ops[1].fence) = (slot, 7);
            History { ops, ..History::default() }
        };
        finds(&with(7, Outcome::Pending), None);
        finds(&with(8, ok(3)), None);
        finds(&with(6, ok(3)), Some("skipped"));
        let mut locked = with(7, Outcome::Refused);
        locked.ops.push(op(What::Acquire, "job", (0, 10), ok(3)));
        finds(&locked, Some("skipped"));
    }
}
