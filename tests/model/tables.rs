//! PostgreSQL with several keys: rows, counters, the advisory locks of the queues, and the statements
//! that take several of them one after the other. As in `server.rs`, a step is one part of a statement
//! between two points where others can be seen; what one key's statements do in finer parts is
//! explored there.

use std::fmt;

use crate::state::{TOLERANCE, live};

pub(crate) const KEYS: u8 = 3;
/// A lease lasts this many ticks, and a statement that has read the clock is ended after as many.
pub(crate) const TTL: i8 = 1;
const STATEMENT_LIMIT: u8 = 2;
const TXS: usize = 6;

/// Sets of keys, of advisory locks' numbers, and of transactions.
pub(crate) type Set = u8;

pub(crate) fn members(set: Set) -> impl DoubleEndedIterator<Item = u8> {
    (0..8).filter(move |member| set & (1 << member) != 0)
}

/// The members of a set in the order in which a loop goes through them.
pub(crate) fn next_of(set: Set, backwards: bool) -> Option<u8> {
    if backwards { members(set).next_back() } else { members(set).next() }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Row {
    /// The lock id: the attempt that was granted; 0 where there is no row.
    pub(crate) id: u8,
    pub(crate) fence: u8,
    pub(crate) expires: i8,
    /// Committed by a message whose client had given it up.
    pub(crate) unheard: bool,
}

impl Row {
    pub(crate) fn is_live(self) -> bool {
        self.id != 0 && live(self.expires, 0)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Counter {
    pub(crate) fence: u8,
    /// `xmax` names a transaction other than the one that wrote it, under way or long over.
    pub(crate) touched: bool,
}

/// What a message does.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) enum Kind {
    #[default]
    None,
    /// The statement for keys without a row.
    Fast,
    /// Queue, then the statement that locks what is over.
    Careful,
    /// A free slot of a semaphore.
    Slot,
    /// Another client's acquire: statement by statement, reading without a row lock.
    Foreign,
    Release,
    Renew,
    /// The caller's transaction behind a fence check of all keys.
    Fenced,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) enum Pc {
    #[default]
    Sent,
    Queue,
    TryQueue,
    LockRows,
    LockCounters,
    Raise,
    Write,
    Share,
    Open,
    Commit,
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) enum Outcome {
    #[default]
    None,
    /// Somebody is in the way.
    Locked,
    /// Nothing was changed: the careful statement decides.
    Nothing,
    Granted,
    Done,
    Over,
    /// The message failed, and what it met is to be looked at again.
    Again,
    Refused,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Tx {
    pub(crate) kind: Kind,
    pub(crate) pc: Pc,
    pub(crate) owner: u8,
    pub(crate) id: u8,
    /// Somebody waits for the answer.
    pub(crate) heard: bool,
    /// The worker does.
    pub(crate) worker: bool,
    pub(crate) keys: Set,
    /// What the loop under way has not come to.
    pub(crate) left: Set,
    pub(crate) start: u8,
    // Locks: numbers of queues, rows, counters, counters shared.
    pub(crate) queues: Set,
    pub(crate) rows: Set,
    pub(crate) counters: Set,
    pub(crate) shares: Set,
    /// Of the snapshot: keys with a row, with one of this id, with somebody else's live one, with a
    /// counter; which rows were deleted since; when the first of this id ends.
    pub(crate) seen: Set,
    pub(crate) mine: Set,
    pub(crate) held: Set,
    pub(crate) counted: Set,
    pub(crate) gone: Set,
    pub(crate) ends: i8,
    /// Rows that are locked and may be taken; rows that are this id's own and only confirmed.
    pub(crate) free: Set,
    pub(crate) confirms: bool,
    /// A clock that was read and is still used: its reading, and 1 + the ticks since.
    pub(crate) now: i8,
    pub(crate) age: u8,
    pub(crate) raised: Set,
    pub(crate) written: Set,
    pub(crate) deleted: Set,
    /// Of a grant: what the answer carries; of fenced work and renewals: what is asked for.
    pub(crate) fences: [u8; KEYS as usize],
    pub(crate) out: Outcome,
    /// Of a renewal: keys that are renewed, and those that were busy.
    pub(crate) renewed: Set,
    pub(crate) busy: Set,
}

impl Tx {
    pub(crate) fn is_free(&self) -> bool {
        self.kind == Kind::None
    }

    pub(crate) fn read_clock(&mut self) {
        (self.now, self.age) = (0, 1);
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Tables {
    pub(crate) rows: [Row; KEYS as usize],
    pub(crate) counters: [Counter; KEYS as usize],
    /// What fenced work wrote last for each key.
    pub(crate) register: [u8; KEYS as usize],
    pub(crate) txs: [Tx; TXS],
    /// The fences that were told, as bits.
    pub(crate) told: [u16; KEYS as usize],
}

/// What is taken out of the statements.
#[derive(Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools)] // Each is one independent mutation.
pub(crate) struct Cut {
    /// Advisory locks in the order of the keys instead of their numbers.
    pub(crate) queue_by_key: bool,
    /// The fast statement does not queue.
    pub(crate) fast_unqueued: bool,
    /// What meets a row goes on without it: not all or nothing.
    pub(crate) partial: bool,
    /// A row that is met is overwritten.
    pub(crate) overwrites: bool,
    /// Only the first key's counter is raised; none is.
    pub(crate) raises_one: bool,
    pub(crate) raises_none: bool,
    /// The first client's release, careful statement, renewal, raise or fence check goes the other way.
    pub(crate) release_backwards: bool,
    pub(crate) careful_backwards: bool,
    pub(crate) renewal_waits_backwards: bool,
    pub(crate) raise_backwards: bool,
    pub(crate) fenced_backwards: bool,
    /// A busy counter is waited for.
    pub(crate) counters_waited_for: bool,
    /// The grant does not look for its own id.
    pub(crate) own_not_looked_for: bool,
    /// Lock ids are not unique.
    pub(crate) ids_not_unique: bool,
    /// Every free slot's advisory lock is taken, not the first one's alone.
    pub(crate) queues_for_all: bool,
    /// The advisory lock of a slot is not asked for.
    pub(crate) slot_unqueued: bool,
}

/// What the tables are, and what is done with them.
#[derive(Clone, Copy)]
pub(crate) struct Rules {
    /// The number of each key's advisory lock.
    pub(crate) numbers: [u8; KEYS as usize],
    /// The keys are slots: a lock id has one of them.
    pub(crate) slots: bool,
    /// Counters are shared by fenced work, or taken without the advisory lock.
    pub(crate) fenced_work: bool,
    pub(crate) cut: Cut,
}

impl Rules {
    pub(crate) const fn ids_are_unique(&self) -> bool {
        self.slots && !self.cut.ids_not_unique
    }
}

impl Tables {
    /// Sends a message.
    pub(crate) fn send(&mut self, tx: Tx) {
        let slot = self.txs.iter_mut().find(|tx| tx.is_free()).expect("more transactions than slots");
        *slot = tx;
    }

    fn others(&self, at: usize) -> impl Iterator<Item = (usize, &Tx)> {
        self.txs.iter().enumerate().filter(move |(other, tx)| *other != at && !tx.is_free())
    }

    fn who(&self, at: usize, has: impl Fn(&Tx) -> bool) -> Set {
        self.others(at).filter(|(_, tx)| has(tx)).map(|(other, _)| 1 << other).sum()
    }

    pub(crate) fn any(&self, at: usize, has: impl Fn(&Tx) -> bool) -> bool {
        self.others(at).any(|(_, tx)| has(tx))
    }

    pub(crate) fn backwards(rules: &Rules, tx: &Tx) -> bool {
        let cut = rules.cut;
        let cut = match (tx.kind, tx.pc) {
            (Kind::Release, _) => cut.release_backwards,
            (Kind::Renew, _) => cut.renewal_waits_backwards,
            (Kind::Fenced, _) => cut.fenced_backwards,
            (_, Pc::Raise) => cut.raise_backwards,
            _ => cut.careful_backwards,
        };
        cut && tx.owner == 0
    }

    /// Whom the transaction waits for.
    pub(crate) fn blockers(&self, rules: &Rules, at: usize) -> Set {
        let tx = &self.txs[at];
        let Some(key) = next_of(tx.left, Self::backwards(rules, tx)) else { return 0 };
        let bit = 1 << key;
        match tx.pc {
            Pc::Queue => self.who(at, |other| other.queues & Self::number(rules, tx, key) != 0),
            Pc::LockRows if tx.gone & bit != 0 => 0,
            // SKIP LOCKED.
            Pc::LockRows if tx.kind == Kind::Renew && !rules.cut.renewal_waits_backwards => 0,
            Pc::LockRows => self.who(at, |other| (other.rows | other.written | other.deleted) & bit != 0),
            Pc::Raise => self.who(at, |other| (other.counters | other.raised | other.shares) & bit != 0),
            Pc::Share => self.who(at, |other| (other.counters | other.raised) & bit != 0),
            Pc::LockCounters if rules.cut.counters_waited_for => {
                self.who(at, |other| (other.counters | other.raised | other.shares) & bit != 0)
            }
            Pc::Write => {
                // An insert waits for who writes the key or the lock id, an upsert for who locks the row as well.
                let locks = tx.kind != Kind::Fast;
                self.who(at, |other| {
                    (other.written | other.deleted | if locks { other.rows } else { 0 }) & bit != 0
                        || (rules.ids_are_unique() && other.id == tx.id && other.written != 0)
                })
            }
            _ => 0,
        }
    }

    /// In the order of the numbers the loop goes through numbers, otherwise through keys.
    pub(crate) fn number(rules: &Rules, tx: &Tx, at: u8) -> Set {
        let by_key = rules.cut.queue_by_key || tx.kind == Kind::Foreign;
        1 << if by_key { rules.numbers[usize::from(at)] } else { at }
    }

    pub(crate) fn numbers(rules: &Rules, keys: Set) -> Set {
        members(keys).fold(0, |set, key| set | 1 << rules.numbers[usize::from(key)])
    }

    pub(crate) fn delete(&mut self, key: u8) {
        self.rows[usize::from(key)] = Row::default();
        for other in &mut self.txs {
            other.gone |= (other.seen | other.mine) & (1 << key);
        }
    }

    /// Whether somebody else has, or had, a counter locked.
    pub(crate) fn touched(&self, at: usize, key: u8) -> bool {
        self.counters[usize::from(key)].touched || self.counter_is_busy(at, key)
    }

    pub(crate) fn counter_is_busy(&self, at: usize, key: u8) -> bool {
        self.any(at, |tx| (tx.counters | tx.shares | tx.raised) & (1 << key) != 0)
    }

    pub(crate) fn row_is_busy(&self, at: usize, key: u8) -> bool {
        self.any(at, |tx| (tx.rows | tx.written | tx.deleted) & (1 << key) != 0)
    }

    /// Ends a transaction that changed nothing: a counter that it had locked keeps its mark. The
    /// answer stays for whom it is for.
    pub(crate) fn end(&mut self, at: usize, out: Outcome) {
        let tx = self.txs[at];
        for key in members(tx.counters | tx.raised | tx.shares) {
            self.counters[usize::from(key)].touched = true;
        }
        self.answer(at, out);
    }

    pub(crate) fn answer(&mut self, at: usize, out: Outcome) {
        let Tx { kind, owner, id, heard, worker, keys, fences, renewed, busy, .. } = self.txs[at];
        self.txs[at] = Tx::default();
        if heard {
            let pc = Pc::Done;
            self.txs[at] =
                Tx { kind, pc, owner, id, heard, worker, keys, fences, out, renewed, busy, ..Tx::default() };
        }
    }

    /// Some wait for each other, and nothing but the server's search for deadlocks ends that. `also`
    /// adds whom a transaction waits for outside of the server.
    pub(crate) fn is_deadlocked(&self, rules: &Rules, also: impl Fn(&Tx) -> Set) -> bool {
        let mut waits = [0; TXS];
        for (at, tx) in self.txs.iter().enumerate().filter(|(_, tx)| !tx.is_free()) {
            waits[at] = self.blockers(rules, at) | also(tx);
        }
        if waits.iter().filter(|waits| **waits != 0).count() < 2 {
            return false;
        }
        for _ in 0..TXS {
            for at in 0..TXS {
                waits[at] = members(waits[at]).fold(waits[at], |set, next| set | waits[usize::from(next)]);
            }
        }
        waits.iter().enumerate().any(|(at, waits)| waits & (1 << at) != 0)
    }

    /// Real time goes on by one tick.
    pub(crate) fn tick(&mut self) -> bool {
        if self.txs.iter().any(|tx| tx.age > STATEMENT_LIMIT) {
            return false;
        }
        for row in self.rows.iter_mut().filter(|row| row.id != 0) {
            row.expires -= 1;
        }
        for tx in &mut self.txs {
            if tx.age > 0 {
                (tx.now, tx.age) = (tx.now - 1, tx.age + 1);
            }
            if tx.kind == Kind::Fenced && tx.pc == Pc::Share {
                tx.ends = (tx.ends - 1).max(-3);
            }
        }
        true
    }

    /// Makes equal what no step can tell apart.
    pub(crate) fn tidy(&mut self) {
        let oldest = self.txs.iter().filter(|tx| tx.age > 0).map(|tx| tx.now).min().unwrap_or(0).min(0);
        for row in self.rows.iter_mut().filter(|row| row.id != 0) {
            row.expires = row.expires.max(oldest - TOLERANCE - 1);
        }
        for tx in &mut self.txs {
            if matches!(tx.pc, Pc::Raise | Pc::Write | Pc::Commit | Pc::Open) {
                (tx.seen, tx.mine, tx.held, tx.counted) = (0, 0, 0, 0);
                (tx.gone, tx.ends, tx.start) = (0, 0, 0);
            }
        }
        self.txs.sort_unstable();
    }
}

impl fmt::Display for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, (row, counter)) in self.rows.iter().zip(&self.counters).enumerate() {
            let touched = if counter.touched { "!" } else { "" };
            match row.id {
                0 => write!(f, "{key}: none, {}{touched}; ", counter.fence)?,
                id => {
                    write!(
                        f,
                        "{key}: id {id} fence {} ends {}, {}{touched}; ",
                        row.fence, row.expires, counter.fence
                    )?;
                }
            }
        }
        for tx in self.txs.iter().filter(|tx| !tx.is_free()) {
            write!(
                f,
                "[{} {:?} {} {:?} left {:b}",
                char::from(b'A' + tx.owner),
                tx.kind,
                tx.id,
                tx.pc,
                tx.left
            )?;
            write!(f, "{}] ", if tx.heard { "" } else { ", given up" })?;
        }
        Ok(())
    }
}
