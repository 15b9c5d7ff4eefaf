//! Run once per period: the lease of a key, and beside it a mark with the number of the last slot that
//! was finished. What the lease's own statements do in finer parts is explored in `server.rs`.

use crate::state::live;

/// A lease lasts this many ticks; there are so many slots, from 1.
pub(crate) const TTL: i8 = 1;
pub(crate) const SLOTS: u8 = 2;
const TXS: usize = 5;
pub(crate) const CLIENTS: usize = 2;
/// Lock ids per client.
pub(crate) const IDS: u8 = 2;

pub(crate) const DONE_TWICE: &str = "1: a slot is told as done twice";
pub(crate) const BEGUN_AGAIN: &str = "2: a slot is begun that was finished";
pub(crate) const EFFECTS: &str = "3: the effects of a slot that is done are not there exactly once";
pub(crate) const SHRINKS: &str = "4: the mark does not grow";
pub(crate) const IN_ITS_TIME: &str = "5: a holder in its time is refused";
pub(crate) const NOT_ITS_OWN: &str = "5: a slot is marked by who does not hold the lease";
pub(crate) const TWO_RUNS: &str = "6: a slot that is claimed at its start runs twice";
pub(crate) const NOT_MARKED: &str = "7: a slot is told as done, and the mark is not there";
pub(crate) const USED_UP: &str = "8: a message that nobody waits for uses a slot up";
pub(crate) const OLD_SLOT: &str = "9: a slot is begun that is not the current one";
pub(crate) const UNTRUE: &str = "10: an answer was not true at any moment of the call";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) enum Kind {
    #[default]
    None,
    Begin,
    /// Marks the slot at its start.
    Claim,
    /// Marks the slot, and ends the lease.
    Finish,
    /// Ends the lease, and reads the mark.
    Verify,
    /// Ends the lease alone.
    Release,
    /// Fence check and mark in the caller's own transaction.
    Complete,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) enum Pc {
    #[default]
    Sent,
    LockRow,
    LockCounter,
    Write,
    LookAgain,
    Mark,
    /// The caller's effects.
    Open,
    Commit,
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) enum Outcome {
    #[default]
    None,
    AlreadyDone,
    Running,
    Granted,
    Done,
    Refused,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[allow(clippy::struct_excessive_bools)] // Locks that are held, or not.
pub(crate) struct Tx {
    pub(crate) kind: Kind,
    pub(crate) pc: Pc,
    pub(crate) owner: u8,
    pub(crate) id: u8,
    /// Of the lease that is meant; of a grant: what the answer carries.
    pub(crate) fence: u8,
    pub(crate) slot: u8,
    pub(crate) heard: bool,
    pub(crate) queue: bool,
    pub(crate) row: bool,
    pub(crate) counter: bool,
    pub(crate) share: bool,
    pub(crate) mark: bool,
    /// The row is this id's own already.
    pub(crate) own: bool,
    pub(crate) marks: bool,
    pub(crate) deletes: bool,
    pub(crate) out: Outcome,
    /// Of an answer: whether the mark was there.
    pub(crate) marked: bool,
}

/// The row's id (0: none), fence, end and slot, the counter, the mark, the effects of each slot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Database {
    pub(crate) id: u8,
    pub(crate) fence: u8,
    pub(crate) ends: i8,
    pub(crate) slot: u8,
    pub(crate) counter: u8,
    pub(crate) mark: u8,
    pub(crate) effects: [u8; SLOTS as usize + 1],
}

impl Database {
    pub(crate) fn is_live(self) -> bool {
        self.id != 0 && live(self.ends, 0)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) enum Phase {
    #[default]
    Idle,
    Beginning,
    BeginDoubt,
    Claiming,
    ClaimDoubt,
    Running,
    Completing,
    Finishing,
    FinishDoubt,
    Crashed,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Client {
    pub(crate) phase: Phase,
    pub(crate) id: u8,
    pub(crate) fence: u8,
    pub(crate) slot: u8,
    pub(crate) sent: i8,
    pub(crate) deadline: i8,
    /// `complete_in` was called.
    pub(crate) completed: bool,
    pub(crate) runs: u8,
    pub(crate) renewals: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct State {
    pub(crate) db: Database,
    /// What outlives a crash of the server.
    pub(crate) durable: Database,
    pub(crate) txs: [Tx; TXS],
    pub(crate) clients: [Client; CLIENTS],
    /// By the server's clock.
    pub(crate) slot: u8,
    /// Per slot: how often it was told as done, and how often it was run.
    pub(crate) done: [u8; SLOTS as usize + 1],
    pub(crate) ran: [u8; SLOTS as usize + 1],
    pub(crate) losses: u8,
    pub(crate) crashes: u8,
    pub(crate) server_crashes: u8,
}

/// How a run is marked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    Finish,
    CompleteIn,
    ClaimAtStart,
}

#[derive(Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools)] // Each is one independent mutation.
pub(crate) struct Cut {
    /// Begin: does not look at the mark again; looks for this very slot's mark; takes the slot from before
    /// the queue; claims by itself.
    pub(crate) one_look: bool,
    pub(crate) exact: bool,
    pub(crate) slot_before_queue: bool,
    pub(crate) begin_claims: bool,
    /// Who claims runs before it has the answer.
    pub(crate) runs_unclaimed: bool,
    /// Finish: not only while the lease is ours and lives; whatever its fence; the mark may shrink; its commit does not wait for
    /// the disk; the lease is deleted by one message and the mark written by the next.
    pub(crate) without_lease: bool,
    pub(crate) any_fence: bool,
    pub(crate) mark_shrinks: bool,
    pub(crate) not_durable: bool,
    pub(crate) deletes_first: bool,
    /// `Ok` of the closure is told as done, whatever became of the mark.
    pub(crate) ok_is_done: bool,
    /// After a lost answer the mark is taken for our own, whether the lease was still in its time or not.
    pub(crate) mark_is_ours: bool,
    /// `complete_in`: no fence check; a lock that lets the counter be raised; the mark may be there already.
    pub(crate) unfenced: bool,
    pub(crate) key_share: bool,
    pub(crate) marks_again: bool,
    /// After `complete_in` the end writes the mark; it ends the lease also where there is no mark.
    pub(crate) end_writes: bool,
    pub(crate) verify_releases: bool,
}

#[derive(Clone, Copy)]
pub(crate) struct Config {
    pub(crate) style: Style,
    /// The callers' own numbers; 0: the server's clock.
    pub(crate) numbers: [u8; CLIENTS],
    pub(crate) runs: u8,
    pub(crate) renewals: u8,
    pub(crate) losses: u8,
    pub(crate) crashes: u8,
    pub(crate) server_crashes: u8,
    /// States that differ only in the clients' names are one.
    pub(crate) symmetry: bool,
    pub(crate) cut: Cut,
}

pub(crate) type Stepped = (&'static str, Option<&'static str>);
impl State {
    pub(crate) fn any(&self, at: usize, has: impl Fn(&Tx) -> bool) -> bool {
        self.txs.iter().enumerate().any(|(other, tx)| other != at && tx.kind != Kind::None && has(tx))
    }

    pub(crate) fn end(&mut self, at: usize, out: Outcome) {
        let Tx { kind, owner, id, fence, slot, heard, .. } = self.txs[at];
        let marked = self.db.mark >= slot;
        self.txs[at] = Tx::default();
        if heard {
            let pc = Pc::Done;
            self.txs[at] = Tx { kind, pc, owner, id, fence, slot, heard, out, marked, ..Tx::default() };
        }
    }

    pub(crate) fn send(&mut self, kind: Kind, owner: usize) {
        let Client { id, fence, slot, .. } = self.clients[owner];
        let owner = u8::try_from(owner).expect("few clients");
        let free =
            self.txs.iter_mut().find(|tx| tx.kind == Kind::None).expect("more transactions than slots");
        *free = Tx { kind, owner, id, fence, slot, heard: true, ..Tx::default() };
    }

    /// The next step of a transaction; none if it waits. What follows on a lock that keeps all others out
    /// is part of the step.
    pub(crate) fn step(&mut self, config: &Config, at: usize) -> Option<Stepped> {
        let mut stepped = self.part(config, at)?;
        while matches!(self.txs[at].pc, Pc::Write | Pc::Commit) && stepped.1.is_none() {
            stepped = self.part(config, at)?;
        }
        Some(stepped)
    }

    fn part(&mut self, config: &Config, at: usize) -> Option<Stepped> {
        let (tx, cut) = (self.txs[at], config.cut);
        Some(match (tx.pc, tx.kind) {
            (Pc::Sent, Kind::Begin) => return self.begin(config, at),
            (Pc::Sent, Kind::Complete) => (self.complete(cut, at)?, None),
            (Pc::Sent | Pc::LockRow, _) => (self.lock_row(cut, at)?, None),
            (Pc::LockCounter, _) => {
                if self.any(at, |tx| tx.counter || (tx.share && !cut.key_share)) {
                    return Some((self.told(at, Outcome::Running, "finds the counter busy"), None));
                }
                (self.txs[at].counter, self.txs[at].pc) = (true, Pc::Write);
                ("has the counter", None)
            }
            (Pc::Write, _) => {
                if self.db.is_live() {
                    return Some((self.told(at, Outcome::Running, "meets a live row, and fails"), None));
                }
                let pc = if cut.one_look { Pc::Commit } else { Pc::LookAgain };
                (self.txs[at].row, self.txs[at].pc) = (true, pc);
                ("writes the row", None)
            }
            (Pc::LookAgain, _) => {
                if self.is_done(cut, tx.slot) {
                    let label = "finds that its slot has been finished meanwhile, and fails";
                    return Some((self.told(at, Outcome::AlreadyDone, label), None));
                }
                self.txs[at].pc = Pc::Commit;
                ("looks at the mark again", None)
            }
            (Pc::Mark, _) => (self.mark(cut, at)?, None),
            (Pc::Commit, _) => ("COMMIT", self.commit(config, at)),
            (Pc::Open | Pc::Done, _) => return None,
        })
    }

    fn told(&mut self, at: usize, out: Outcome, label: &'static str) -> &'static str {
        self.end(at, out);
        label
    }

    /// The advisory lock, then what the statement sees, which may be over when it has its other locks.
    fn begin(&mut self, config: &Config, at: usize) -> Option<Stepped> {
        let tx = self.txs[at];
        if config.cut.slot_before_queue && tx.slot == 0 {
            self.txs[at].slot = self.slot;
            return Some(("begins, and computes the slot", None));
        }
        if self.any(at, |tx| tx.queue) {
            return None;
        }
        let own = self.db.id == tx.id;
        // A row of its own is confirmed, with the slot that it was granted for.
        let slot = match tx.slot {
            _ if own => self.db.slot,
            0 => self.slot,
            number => number,
        };
        self.txs[at] = Tx { queue: true, slot, own, pc: Pc::LockRow, ..tx };
        let by_clock = config.numbers[usize::from(tx.owner)] == 0;
        let fault = (by_clock && !own && slot != self.slot).then_some(OLD_SLOT);
        let label = if self.is_done(config.cut, slot) {
            self.told(at, Outcome::AlreadyDone, "finds its slot done")
        } else if self.db.is_live() && !own {
            self.told(at, Outcome::Running, "finds the key held")
        } else {
            "has the advisory lock, computes the slot and looks"
        };
        Some((label, fault))
    }

    /// The fence check of `complete_in`.
    fn complete(&mut self, cut: Cut, at: usize) -> Option<&'static str> {
        let tx = self.txs[at];
        if !cut.unfenced && !cut.key_share && self.any(at, |tx| tx.counter) {
            return None;
        }
        let current = self.db.counter == tx.fence && self.holds(cut, &tx) && self.db.is_live();
        if !current && !cut.unfenced {
            return Some(self.told(at, Outcome::Refused, "finds its fence stale"));
        }
        (self.txs[at].share, self.txs[at].pc) = (!cut.unfenced, Pc::Mark);
        Some("shares the counter: the fence is current")
    }

    fn lock_row(&mut self, cut: Cut, at: usize) -> Option<&'static str> {
        let tx = self.txs[at];
        let begins = tx.kind == Kind::Begin;
        let there = self.db.id != 0 && (begins || self.db.id == tx.id);
        if there && self.any(at, |tx| tx.row) {
            return None;
        }
        let live = self.db.is_live();
        self.txs[at].row = there;
        if begins {
            if there && live && self.db.id != tx.id {
                return Some(self.told(at, Outcome::Running, "finds the key held"));
            }
            self.txs[at].pc = if tx.own { Pc::LookAgain } else { Pc::LockCounter };
            return Some("has the row, if there is one");
        }
        // What the run's own transaction did not mark keeps its row: who asks once more could take the
        // mark of the next holder for its own.
        let keeps = match tx.kind {
            Kind::Claim => true,
            Kind::Verify => self.db.mark < tx.slot && !cut.verify_releases,
            _ => false,
        };
        let ends = matches!(tx.kind, Kind::Verify | Kind::Release);
        let holds = live && self.holds(cut, &tx);
        let blind = tx.kind == Kind::Finish && cut.without_lease;
        if !(holds || ends || blind) {
            return Some(self.told(at, Outcome::Refused, "does not hold the lease"));
        }
        self.txs[at].deletes = live && there && !keeps;
        self.txs[at].pc = if ends { Pc::Commit } else { Pc::Mark };
        Some("has its row")
    }

    fn mark(&mut self, cut: Cut, at: usize) -> Option<&'static str> {
        let tx = self.txs[at];
        if self.any(at, |tx| tx.mark) {
            return None;
        }
        let may = match tx.kind {
            // A claim of our own that was not answered is as good.
            Kind::Claim => self.db.mark <= tx.slot,
            Kind::Complete if cut.marks_again => true,
            Kind::Finish if cut.mark_shrinks => true,
            _ => self.db.mark < tx.slot,
        };
        if !may {
            return Some(self.told(at, Outcome::Refused, "finds a mark that is as new"));
        }
        let this = &mut self.txs[at];
        (this.mark, this.marks) = (true, true);
        this.pc = if tx.kind == Kind::Complete { Pc::Open } else { Pc::Commit };
        Some("writes the mark")
    }

    fn is_done(&self, cut: Cut, slot: u8) -> bool {
        if cut.exact { self.db.mark == slot } else { self.db.mark >= slot }
    }

    /// Whether the row is the lease that the message means.
    fn holds(&self, cut: Cut, tx: &Tx) -> bool {
        self.db.id == tx.id && (self.db.fence == tx.fence || cut.any_fence)
    }

    /// The same state with the two clients' names exchanged.
    pub(crate) fn exchanged(&self) -> Self {
        let id = |id: u8| if id == 0 { 0 } else { (id - 1 + IDS) % (2 * IDS) + 1 };
        let mut next = *self;
        next.clients.swap(0, 1);
        for client in &mut next.clients {
            client.id = id(client.id);
        }
        for db in [&mut next.db, &mut next.durable] {
            db.id = id(db.id);
        }
        for tx in next.txs.iter_mut().filter(|tx| tx.kind != Kind::None) {
            (tx.id, tx.owner) = (id(tx.id), 1 - tx.owner);
        }
        next.txs.sort_unstable();
        next
    }

    pub(crate) fn commit(&mut self, config: &Config, at: usize) -> Option<&'static str> {
        let (tx, before, cut) = (self.txs[at], self.db, config.cut);
        let mut fault = None;
        if tx.kind == Kind::Begin {
            fault = fault.or((before.mark >= tx.slot).then_some(BEGUN_AGAIN));
            if !tx.own {
                fault = fault.or(before.is_live().then_some("5: a takeover replaces a live lease"));
                (self.db.id, self.db.ends, self.db.counter) = (tx.id, TTL, self.db.counter + 1);
                (self.db.fence, self.db.slot) = (self.db.counter, tx.slot);
            }
            self.txs[at].fence = self.db.fence;
            if config.style == Style::ClaimAtStart && cut.begin_claims {
                fault = fault.or((!tx.heard).then_some(USED_UP));
                self.db.mark = tx.slot;
            }
        }
        if tx.marks {
            let own = (before.id == tx.id && before.fence == tx.fence) || cut.deletes_first;
            fault = fault.or((!own && tx.kind != Kind::Complete).then_some(NOT_ITS_OWN));
            fault = fault.or((tx.slot < before.mark).then_some(SHRINKS));
            self.db.mark = tx.slot;
        }
        if tx.kind == Kind::Complete {
            self.db.effects[usize::from(tx.slot)] += 1;
            fault = fault.or((self.db.effects[usize::from(tx.slot)] > 1).then_some(EFFECTS));
        }
        if tx.deletes {
            (self.db.id, self.db.fence, self.db.ends, self.db.slot) = (0, 0, 0, 0);
        }
        let relaxed = match tx.kind {
            Kind::Release | Kind::Verify => true,
            Kind::Finish | Kind::Claim => cut.not_durable,
            _ => false,
        };
        if !relaxed {
            self.durable = self.db;
        }
        self.end(at, if tx.kind == Kind::Begin { Outcome::Granted } else { Outcome::Done });
        fault
    }
}
