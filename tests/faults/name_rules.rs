//! Whether those who were said to have a key had it.
//!
//! | rule | |
//! | --- | --- |
//! | `owner` | the owner and the note that are shown beside a fence are of a call that was told of this grant; where nobody was, of one that had asked for the key |
//! | `gone` | nobody is shown whose release was answered before the look began |
//!
//! A message that arrives after its client has gone may take a key for it, and readers may join by one: nobody is told
//! of such a grant. A release need not be on the disk, so a crash may undo it.

use std::collections::BTreeMap;

use super::checker::{Violation, by_key, granted};
use super::history::{History, Named, Op, Outcome, What, base, is_reader, lock};

pub fn check(history: &History, found: &mut Vec<Violation>) {
    let acquires = history.ops.iter().filter(|op| op.what == What::Acquire);
    let asked = by_key(acquires, |op| base(&op.key));
    let released = history.ops.iter().filter_map(|op| match op.outcome {
        Outcome::Ok { .. } if op.what == What::Release && op.set.is_none() => {
            Some(((op.process, op.key.as_str(), op.fence), op))
        }
        _ => None,
    });
    let released: BTreeMap<_, _> = released.collect();
    for named in history.named.iter().filter(|named| named.owner.is_some() || named.note.is_some()) {
        let all = asked.get(base(&named.key)).map(Vec::as_slice).unwrap_or_default();
        let told = |op: &Op| granted(op) == Some(named.fence) && lock(&op.key) == lock(&named.key);
        let holders: Vec<&Op> = all.iter().filter(|op| told(op)).copied().collect();
        let shared = holders.iter().any(|op| is_reader(&op.key));
        let may_be = |op: &&&Op| is_it(op, named) && op.send < named.recv;
        let late = || all.iter().any(|op| may_be(&op) && (holders.is_empty() || is_reader(&op.key)));
        let Some(holder) = holders.iter().find(may_be) else {
            if (holders.is_empty() || shared) && late() {
                continue;
            }
            let text =
                format!("{}, during the call of process {}: {}", said(named), named.process, had(&holders));
            found.push(Violation { rule: "owner", text, at: named.recv });
            continue;
        };
        let over = released.get(&(holder.process, holder.key.as_str(), named.fence));
        let lost = |release: &Op| {
            let windows = history.unsettled.iter();
            windows.clone().any(|(from, to)| *from < named.recv && release.send < *to)
        };
        if let Some(release) = over.filter(|release| !shared && release.recv < named.send && !lost(release)) {
            let ms = (named.send - release.recv) / super::history::MS;
            let text = format!("{}, whose release was answered {ms} ms before", said(named));
            found.push(Violation { rule: "gone", text, at: named.recv });
        }
    }
}

/// Whether this call has the owner and the note that were shown.
fn is_it(op: &Op, named: &Named) -> bool {
    named.owner.is_none_or(|owner| owner == op.process)
        && named.note.is_none_or(|note| note == (op.process, op.call))
}

fn said(named: &Named) -> String {
    let Named { key, fence, owner, note, .. } = named;
    format!("{key}: owner {owner:?} with the note {note:?} is shown under fence {fence}")
}

fn had(holders: &[&Op]) -> String {
    let calls: Vec<_> = holders.iter().map(|op| (op.process, op.call)).collect();
    if calls.is_empty() {
        "nobody like that had asked for it".to_owned()
    } else {
        format!("{calls:?} had it")
    }
}

#[cfg(test)]
mod tests {
    use super::super::checker::{self, Allow};
    use super::super::history::MS;
    use super::*;

    fn op(what: What, (process, call): (u32, u64), fence: u64, (send, recv): (u64, u64)) -> Op {
        let number = if what == What::Acquire { fence } else { 0 };
        Op {
            process,
            what,
            key: "k".to_owned(),
            fence: if number > 0 { 0 } else { fence },
            ttl: 100 * MS,
            send: send * MS,
            recv: recv * MS,
            bound: 0,
            outcome: Outcome::Ok { number, decided_ms: 0 },
            set: None,
            stalled: 0,
            limit: 0,
            call,
            order: None,
        }
    }

    fn named(fence: u64, owner: Option<u32>, note: Option<(u32, u64)>) -> Named {
        let (process, key) = (9, "k".to_owned());
        Named { process, key, fence, owner, note, send: 100 * MS, recv: 200 * MS }
    }

    /// Calls 1 of process 1 and 5 of process 2 have the key one after the other; a third has no answer.
    fn with(named: Named) -> History {
        let pending =
            Op { outcome: Outcome::Pending, recv: u64::MAX, ..op(What::Acquire, (3, 7), 0, (60, 70)) };
        let ops = vec![
            op(What::Acquire, (1, 1), 4, (0, 10)),
            op(What::Release, (1, 2), 4, (20, 30)),
            op(What::Acquire, (2, 5), 5, (40, 50)),
            op(What::Release, (2, 6), 5, (90, 110)),
            pending,
        ];
        History { ops, named: vec![named], ..History::default() }
    }

    #[track_caller]
    fn finds(history: &History, rule: Option<&str>) {
        let found = checker::check(history, Allow { recovery: 8000 * MS });
        assert_eq!(found.iter().map(|found| found.rule).next(), rule, "{found:?}");
    }

    #[test]
    fn an_owner_who_had_not_the_key_is_found() {
        finds(&with(named(5, Some(2), Some((2, 5)))), None);
        finds(&with(named(5, None, Some((2, 5)))), None);
        finds(&with(named(5, Some(2), None)), None);
        finds(&with(named(5, Some(1), None)), Some("owner"));
        finds(&with(named(5, Some(2), Some((1, 1)))), Some("owner"));
        finds(&with(named(5, None, Some((2, 6)))), Some("owner"));
        finds(&with(Named { key: "other".to_owned(), ..named(5, Some(2), None) }), Some("owner"));
    }

    #[test]
    fn a_grant_that_nobody_was_told_of_is_of_somebody_who_asked() {
        finds(&with(named(6, Some(3), Some((3, 7)))), None);
        finds(&with(named(6, Some(4), None)), Some("owner"));
        let mut later = with(named(6, Some(3), None));
        later.ops[4].send = 201 * MS;
        finds(&later, Some("owner"));
    }

    #[test]
    fn a_holder_that_has_gone_is_found() {
        let history = with(named(4, Some(1), None));
        finds(&history, Some("gone"));
        finds(&History { unsettled: vec![(150 * MS, 160 * MS)], ..history }, None);
    }

    #[test]
    fn an_owner_beside_readers_is_one_of_them() {
        let with = |owner| {
            let mut history = with(named(5, Some(owner), None));
            history.ops.iter_mut().for_each(|op| op.key = "k~".to_owned());
            history
        };
        finds(&with(2), None);
        // By a copy of its call that comes late.
        finds(&with(1), None);
        finds(&with(4), Some("owner"));
    }
}
