//! Whether a history can be that of a lock. O(n log n): fences give the order.
//!
//! | rule | |
//! | --- | --- |
//! | `overlap` | of two holders of one key, the one with the smaller fence has stopped to believe before the other began; so no reader is there beside a writer, and readers that are there at once have one fence |
//! | `fence` | no fence of a key is granted twice, but to readers of one group, and one granted before another acquire was sent is smaller |
//! | `register` | acknowledged writes have different values, which grow with the fence, and none is lost |
//! | `unavailable` | a key is refused only while somebody may hold it: its ttl, the tolerance and a time to recover |
//! | `late` | every call returns within its bound and a second, unless its process was paused |
//! | `unlocked` | no decision was taken, by its clock, while a stranger held the key's row |
//!
//! Those of sets, permits, leaders, runs and readers' transactions: [`kind_rules`](super::kind_rules). Those of waiters
//! in order: [`order_rules`](super::order_rules). Those of owners and notes: [`name_rules`](super::name_rules).

use std::collections::BTreeMap;

use super::history::{Blocked, History, MS, Op, Outcome, What, base, is_reader, lock};
use super::{kind_rules, name_rules, order_rules};

#[derive(Clone, Debug)]
pub struct Violation {
    pub rule: &'static str,
    pub text: String,
    /// When, by the shared clock; zero if unknown.
    pub at: u64,
}

/// What else is tolerated: how long the injected faults may keep everything from working.
#[derive(Clone, Copy, Debug)]
pub struct Allow {
    pub recovery: u64,
}

pub fn check(history: &History, allow: Allow) -> Vec<Violation> {
    let mut found = Vec::new();
    overlap(history, &mut found);
    fences(history, &mut found);
    registers(history, &mut found);
    kind_rules::check(history, &mut found);
    name_rules::check(history, &mut found);
    order_rules::check(history, &mut found);
    unlocked(history, &mut found);
    unavailable(history, allow, &mut found);
    late(history, &mut found);
    found
}

/// Groups by key.
pub fn by_key<'a, T>(
    items: impl Iterator<Item = T>,
    key: impl Fn(&T) -> &'a str,
) -> BTreeMap<&'a str, Vec<T>> {
    let mut groups: BTreeMap<&str, Vec<T>> = BTreeMap::new();
    for item in items {
        groups.entry(key(&item)).or_default().push(item);
    }
    groups
}

fn overlap(history: &History, found: &mut Vec<Violation>) {
    for (key, mut holds) in by_key(history.beliefs.iter(), |belief| lock(&belief.key)) {
        holds.sort_by_key(|hold| (hold.fence, hold.from));
        let mut last: Option<&super::history::Belief> = None;
        for hold in holds {
            if let Some(before) = last.filter(|before| before.to > hold.from && before.fence != hold.fence) {
                found.push(Violation {
                    rule: "overlap",
                    text: format!(
                        "{key}: fence {} (process {}) believed until {} ms after fence {} (process {}) began",
                        before.fence,
                        before.process,
                        (before.to - hold.from) / MS,
                        hold.fence,
                        hold.process
                    ),
                    at: hold.from,
                });
            }
            if last.is_none_or(|before| hold.to > before.to) {
                last = Some(hold);
            }
        }
    }
}

pub fn granted(op: &Op) -> Option<u64> {
    match op.outcome {
        Outcome::Ok { number, .. } if op.what == What::Acquire => Some(number),
        _ => None,
    }
}

fn fences(history: &History, found: &mut Vec<Violation>) {
    let grants = history.ops.iter().filter_map(|op| granted(op).map(|fence| (fence, op)));
    for (key, mut grants) in by_key(grants, |(_, op)| lock(&op.key)) {
        grants.sort_by_key(|(fence, op)| (*fence, op.send));
        for pair in grants.windows(2) {
            let one_group = is_reader(&pair[0].1.key) && is_reader(&pair[1].1.key);
            if pair[0].0 == pair[1].0 && !one_group {
                let text = format!("{key}: fence {} was granted twice", pair[0].0);
                found.push(Violation { rule: "fence", text, at: pair[1].1.recv });
            }
        }
        // From the greatest fence down: the earliest answer so far must not be earlier than this send.
        let mut earliest = u64::MAX;
        for (fence, op) in grants.iter().rev() {
            if earliest < op.send {
                let text = format!("{key}: fence {fence} was asked for after a greater one had been granted");
                found.push(Violation { rule: "fence", text, at: op.send });
            }
            earliest = earliest.min(op.recv);
        }
    }
}

fn registers(history: &History, found: &mut Vec<Violation>) {
    let writes = history.ops.iter().filter_map(|op| match op.outcome {
        Outcome::Ok { number, .. } if op.what == What::Write => Some((number, op)),
        _ => None,
    });
    for (key, mut writes) in by_key(writes, |(_, op)| &op.key) {
        writes.sort_by_key(|(value, op)| (*value, op.send));
        for pair in writes.windows(2) {
            let ((value, first), (next, second)) = (&pair[0], &pair[1]);
            let text = if value == next {
                format!(
                    "{key}: the value {value} was written twice, by fences {} and {}: one is lost",
                    first.fence, second.fence
                )
            } else if first.fence > second.fence {
                format!("{key}: fence {} wrote over fence {}", second.fence, first.fence)
            } else {
                continue;
            };
            found.push(Violation { rule: "register", text, at: second.recv });
        }
        let (last, at) = writes.last().map_or((0, 0), |(value, op)| (*value, op.recv));
        if let Some(end) = history.registers.get(key).filter(|end| **end < last) {
            let text = format!("{key}: {last} was acknowledged, and {end} is what is left");
            found.push(Violation { rule: "register", text, at });
        }
    }
}

fn unavailable(history: &History, allow: Allow, found: &mut Vec<Violation>) {
    let slack = 1000 * MS + allow.recovery;
    // When somebody may have held a key: from where an operation was sent, or was believed, for a ttl.
    let mut reasons: BTreeMap<&str, (Vec<u64>, Vec<u64>)> = BTreeMap::new();
    let mut reason = |key, from, to| {
        let (begins, ends) = reasons.entry(base(key)).or_default();
        begins.push(from);
        ends.push(to);
    };
    for op in &history.ops {
        let refused = matches!(op.outcome, Outcome::Refused | Outcome::Failed(_));
        let until = if op.recv == u64::MAX { op.send + op.bound } else { op.recv };
        let end = until + slack + if refused || op.what == What::Release { 0 } else { op.ttl };
        // Whoever asks keeps others out for as long as it asks; a writer, and who waits in order, for a while more.
        let announces = op.what == What::Acquire
            && (op.order.is_some() || op.key.starts_with("read") && !is_reader(&op.key));
        if matches!(op.what, What::Acquire | What::Extend | What::Release | What::Finish) {
            reason(&op.key, op.send, if refused && !announces { until } else { end });
        }
    }
    for hold in &history.beliefs {
        reason(&hold.key, hold.from, hold.to + hold.ttl + slack);
    }
    for (begins, ends) in reasons.values_mut() {
        begins.sort_unstable();
        ends.sort_unstable();
    }
    // A set is refused with reason if one of its keys is.
    let mut sets: BTreeMap<u64, (&Op, bool)> = BTreeMap::new();
    for op in &history.ops {
        // A wait that timed out may have met something else than a holder, while there was a fault.
        let disturbed = || history.disturbed.iter().any(|(from, to)| *from < op.recv && op.send < *to);
        let refused = op.outcome == Outcome::Refused
            || op.outcome == Outcome::Failed("AcquisitionTimeout".to_owned()) && !disturbed();
        // A guard that came so late is not handed out.
        let late = matches!(op.outcome, Outcome::Refused) && op.recv - op.send >= op.ttl / 2;
        if op.what != What::Acquire || !refused || late {
            continue;
        }
        // So many others were there at some time of the call. Itself is no reason.
        let Some((begins, ends)) = reasons.get(base(&op.key)) else { continue };
        let there = begins.partition_point(|from| *from < op.recv);
        let others = there.saturating_sub(ends.partition_point(|to| *to < op.send) + 1);
        let held = u64::try_from(others).unwrap_or(0) >= op.limit.max(1);
        match op.set {
            Some((set, _)) => sets.entry(set).or_insert((op, false)).1 |= held,
            None if held => {}
            None => found.push(unreasoned(op)),
        }
    }
    found.extend(sets.values().filter(|(_, held)| !held).map(|(op, _)| unreasoned(op)));
}

fn unreasoned(op: &Op) -> Violation {
    let text = format!("{}: refused although nobody can hold it", op.key);
    Violation { rule: "unavailable", text, at: op.recv }
}

/// How long a call took, pauses of its process and the time that its thread waited for a processor not counted; `None` if it was never answered.
pub fn took(history: &History, op: &Op) -> Option<u64> {
    if op.recv == u64::MAX {
        return None;
    }
    let paused: u64 = history
        .pauses
        .iter()
        .filter(|pause| pause.process == op.process && pause.from < op.recv && pause.to > op.send)
        .map(|pause| pause.to.min(op.recv) - pause.from.max(op.send))
        .sum();
    Some((op.recv - op.send).saturating_sub(paused + op.stalled))
}

fn late(history: &History, found: &mut Vec<Violation>) {
    for op in history.ops.iter().filter(|op| op.bound > 0) {
        let Some(took) = took(history, op) else { continue };
        if took > op.bound + 1000 * MS {
            let text = format!(
                "{:?} took {} ms, its bound is {} ms: {:?}",
                op.what,
                took / MS,
                op.bound / MS,
                op.outcome
            );
            found.push(Violation { rule: "late", text, at: op.recv });
        }
    }
}

fn unlocked(history: &History, found: &mut Vec<Violation>) {
    let mut blocked: BTreeMap<&str, Vec<&Blocked>> = by_key(history.blocked.iter(), |blocked| &blocked.key);
    for list in blocked.values_mut() {
        list.sort_by_key(|blocked| blocked.from_ms);
    }
    for op in &history.ops {
        let Outcome::Ok { decided_ms: at @ 1.., .. } = op.outcome else { continue };
        let Some(list) = blocked.get(lock(&op.key)) else { continue };
        let before = list.partition_point(|blocked| blocked.from_ms < at);
        // A stranger's lock ends some time after it said so; only what is clearly inside counts.
        if before > 0 && at < list[before - 1].to_ms {
            let text = format!(
                "{}: {:?} was decided at {at}, while a stranger held the row ({} to {})",
                op.key,
                op.what,
                list[before - 1].from_ms,
                list[before - 1].to_ms
            );
            found.push(Violation { rule: "unlocked", text, at: op.recv });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::history::{Belief, Pause};
    use super::*;

    fn op(what: What, fence: u64, send: u64, recv: u64, outcome: Outcome) -> Op {
        let key = "k".to_owned();
        Op {
            process: 1,
            what,
            key,
            fence,
            ttl: 100 * MS,
            send: send * MS,
            recv: recv * MS,
            bound: 50 * MS,
            outcome,
            set: None,
            stalled: 0,
            limit: 0,
            call: 0,
            order: None,
        }
    }

    fn ok(number: u64) -> Outcome {
        Outcome::Ok { number, decided_ms: 0 }
    }

    fn belief(fence: u64, from: u64, to: u64) -> Belief {
        Belief { process: 1, key: "k".into(), fence, ttl: 100 * MS, from: from * MS, to: to * MS }
    }

    #[track_caller]
    fn finds(history: &History, rule: Option<&str>) {
        let found = check(history, Allow { recovery: 0 });
        assert_eq!(found.iter().map(|found| found.rule).next(), rule, "{found:?}");
    }

    #[test]
    fn two_holders_at_once_are_found() {
        let with = |second| History { beliefs: vec![belief(1, 0, 100), second], ..History::default() };
        finds(&with(belief(2, 101, 200)), None);
        finds(&with(belief(2, 99, 200)), Some("overlap"));
        let mut three = with(belief(2, 101, 110));
        three.beliefs.insert(0, belief(3, 60, 61));
        finds(&three, Some("overlap"));
    }

    #[test]
    fn a_reader_beside_a_writer_and_readers_of_two_groups_are_found() {
        let reader = |fence, from, to| Belief { key: "k~".into(), ..belief(fence, from, to) };
        let with = |others: &[Belief]| History {
            beliefs: [&[reader(2, 50, 100), reader(2, 60, 120)], others].concat(),
            ..History::default()
        };
        finds(&with(&[belief(1, 0, 50), belief(3, 120, 200), reader(4, 200, 210)]), None);
        finds(&with(&[belief(1, 0, 51)]), Some("overlap"));
        finds(&with(&[belief(3, 119, 200)]), Some("overlap"));
        finds(&with(&[reader(3, 110, 200)]), Some("overlap"));
    }

    #[test]
    fn a_fence_of_a_group_that_somebody_else_has_too_is_found() {
        let reader = |fence, send| Op { key: "k~".into(), ..op(What::Acquire, 0, send, send + 1, ok(fence)) };
        let with = |second| History { ops: vec![reader(5, 0), second], ..History::default() };
        finds(&with(reader(5, 20)), None);
        finds(&with(op(What::Acquire, 0, 20, 30, ok(6))), None);
        finds(&with(op(What::Acquire, 0, 20, 30, ok(5))), Some("fence"));
        finds(&with(reader(4, 20)), Some("fence"));
    }

    #[test]
    fn fences_that_repeat_or_go_back_are_found() {
        let with =
            |second| History { ops: vec![op(What::Acquire, 0, 0, 10, ok(5)), second], ..History::default() };
        finds(&with(op(What::Acquire, 0, 20, 30, ok(6))), None);
        finds(&with(op(What::Acquire, 0, 5, 30, ok(4))), None);
        finds(&with(op(What::Acquire, 0, 20, 30, ok(5))), Some("fence"));
        finds(&with(op(What::Acquire, 0, 20, 30, ok(4))), Some("fence"));
    }

    #[test]
    fn lost_and_backward_writes_are_found() {
        let with = |fence, value| History {
            ops: vec![op(What::Write, 2, 0, 10, ok(7)), op(What::Write, fence, 20, 30, ok(value))],
            registers: [("k".to_owned(), 8)].into(),
            ..History::default()
        };
        finds(&with(3, 8), None);
        finds(&with(3, 7), Some("register"));
        finds(&with(1, 8), Some("register"));
        finds(&with(3, 9), Some("register"));
    }

    #[test]
    fn a_refusal_without_a_reason_is_found() {
        let with = |send| History {
            ops: vec![
                op(What::Acquire, 0, 0, 10, ok(1)),
                op(What::Acquire, 0, send, send + 1, Outcome::Refused),
            ],
            ..History::default()
        };
        finds(&with(1109), None);
        finds(&with(1111), Some("unavailable"));
        // Of a set, one key with a reason is enough; of a semaphore, all permits have to have one.
        let mut history = with(1111);
        history.ops.push(op(What::Acquire, 0, 1050, 1115, ok(9)));
        history.ops[2].key = "other".to_owned();
        history.ops[1].set = Some((1, 0));
        finds(&history, Some("unavailable"));
        history.ops.push(Op { key: "other".to_owned(), set: Some((1, 1)), ..history.ops[1].clone() });
        finds(&history, None);
        let mut history = with(1109);
        history.ops[0].key = "k#1".to_owned();
        history.ops[1].limit = 2;
        finds(&history, Some("unavailable"));
        history.ops.push(Op { key: "k#2".to_owned(), ..history.ops[0].clone() });
        finds(&history, None);
    }

    #[test]
    fn a_late_answer_is_found_unless_its_process_was_paused() {
        let mut history = History { ops: vec![op(What::Release, 1, 0, 1051, ok(1))], ..History::default() };
        finds(&history, Some("late"));
        history.ops[0].stalled = 2 * MS;
        finds(&history, None);
        history.ops[0].stalled = 0;
        history.pauses.push(Pause { process: 1, from: 10 * MS, to: 20 * MS });
        finds(&history, None);
    }

    #[test]
    fn a_decision_on_a_row_that_a_stranger_holds_is_found() {
        let with = |decided_ms| History {
            ops: vec![op(What::Extend, 1, 0, 10, Outcome::Ok { number: 0, decided_ms })],
            blocked: vec![Blocked { key: "k".into(), from_ms: 1000, to_ms: 2000 }],
            ..History::default()
        };
        finds(&with(2000), None);
        finds(&with(1500), Some("unlocked"));
    }
}
