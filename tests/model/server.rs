//! PostgreSQL: what one step of one transaction does. A step is one statement, or one part of a
//! statement between two points where others can be seen: its snapshot, each lock that it takes,
//! each row that it writes, the commit.
//!
//! READ COMMITTED: a statement's plain reads come from its snapshot; `FOR UPDATE`, `UPDATE`, and
//! `ON CONFLICT DO UPDATE` wait for whoever has the row and then go by its newest version, if that
//! is still the same row. A commit makes everything visible at once and lets all locks go.

mod commit;

use crate::config::{Config, Kind};
use crate::state::{CounterLock, Outcome, Pc, Row, RowWrite, State, TTL, Tx, live};

pub(crate) use commit::commit_visibly;

/// What a step leads to: the next state, and what it broke.
pub(crate) type Stepped = (&'static str, State, Option<&'static str>);

pub(crate) struct Step<'a> {
    pub(crate) config: &'a Config,
    pub(crate) state: State,
    pub(crate) at: usize,
    fault: Option<&'static str>,
}

/// The next step of a transaction; none if it waits.
pub(crate) fn step(config: &Config, state: &State, at: usize) -> Option<Stepped> {
    let mut step = Step { config, state: *state, at, fault: None };
    let mut label = step.one()?;
    while !config.fine && step.goes_on(&state.txs[at]) {
        let Some(next) = step.one() else { break };
        label = next;
    }
    Some((label, step.state, step.fault))
}

impl Step<'_> {
    fn one(&mut self) -> Option<&'static str> {
        Some(match self.tx().pc {
            Pc::Sent => self.begin()?,
            Pc::Look => self.look(),
            Pc::Row => self.lock_row()?,
            Pc::Counter => self.lock_counter(),
            Pc::View => self.view(),
            Pc::SentAgain => self.second_message()?,
            Pc::RaiseCounter => self.raise_counter()?,
            Pc::WriteRow => self.write_row()?,
            Pc::TryQueue => self.try_queue(),
            Pc::RaiseFirst => self.raise_first()?,
            Pc::InsertRow => self.insert_row()?,
            Pc::DeleteRow => self.delete_row()?,
            Pc::FindRow => self.find_row()?,
            Pc::ShareCounter => self.share_counter()?,
            Pc::WriteRegister => self.write_register()?,
            Pc::Commit => self.commit(),
            Pc::Between | Pc::Done => return None,
        })
    }

    /// Whether the next part follows at once: where whatever happened in between could as well
    /// happen before the first part, or is kept out by a lock that was held before.
    fn goes_on(&self, before: &Tx) -> bool {
        let tx = self.tx();
        match tx.pc {
            Pc::Look => before.pc == Pc::Sent,
            Pc::Counter => before.pc == Pc::Row,
            Pc::View => before.pc == Pc::Row && tx.counter_lock == CounterLock::Update,
            Pc::WriteRow => before.pc == Pc::RaiseCounter && before.counter_lock == CounterLock::Update,
            _ => false,
        }
    }

    pub(crate) fn tx(&self) -> Tx {
        self.state.txs[self.at]
    }

    pub(crate) fn put(&mut self, tx: Tx) {
        self.state.txs[self.at] = tx;
    }

    pub(crate) fn end(&mut self, out: Outcome) {
        self.state.txs[self.at].end(out);
    }

    pub(crate) fn refuse(&mut self, broken: bool, fault: &'static str) {
        if broken {
            self.fault = Some(fault);
        }
    }

    pub(crate) fn row_is_busy(&self) -> bool {
        self.state.others(self.at).any(|tx| tx.row_lock)
    }

    /// The clock that decisions go by.
    pub(crate) fn now(&self) -> i8 {
        if self.config.mutation.clock_at_begin { self.tx().now } else { 0 }
    }

    /// `BEGIN` and the first statement: the advisory lock, or the snapshot of the search by id.
    fn begin(&mut self) -> Option<&'static str> {
        let mut tx = self.tx();
        if self.config.mutation.clock_at_begin && tx.clock_age == 0 {
            tx.read_clock();
            self.put(tx);
            return Some("begins (and reads the clock)");
        }
        let row = self.state.db.row;
        match tx.kind? {
            Kind::Acquire => {
                if !self.config.mutation.no_advisory_lock {
                    if self.state.others(self.at).any(|tx| tx.queue_lock) {
                        return None;
                    }
                    tx.queue_lock = true;
                }
                tx.pc = Pc::Look;
                self.put(tx);
                Some("begins and has the advisory lock")
            }
            Kind::Absent => Some(self.look_absent()),
            Kind::ReleaseLive => Some(self.find_live()),
            Kind::Release | Kind::Extend | Kind::Renew => {
                if row.id != tx.id {
                    self.not_held();
                    return Some("finds no row with its id");
                }
                tx.seen = row;
                tx.pc = Pc::FindRow;
                self.put(tx);
                Some("sees its row")
            }
            Kind::Fenced => {
                tx.seen = row;
                tx.pc = Pc::ShareCounter;
                self.put(tx);
                Some("begins and takes the snapshot of its fence check")
            }
            Kind::Unfenced => {
                tx.pc = Pc::WriteRegister;
                self.put(tx);
                Some("begins")
            }
            Kind::Read => {
                let mine = row.id == tx.id;
                self.state.txs[self.at].fence = row.fence;
                self.end(if mine { Outcome::Granted } else { Outcome::Locked });
                Some("reads")
            }
        }
    }

    /// Snapshot and `look`: a live row of somebody else ends the matter, no row lock taken.
    fn look(&mut self) -> &'static str {
        let mut tx = self.tx();
        tx.seen = self.state.db.row;
        tx.seen_counter = self.state.db.counter > 0;
        tx.looked = tx.seen.id != 0 && tx.seen.id != tx.id && live(tx.seen.expires, self.now());
        tx.pc = Pc::Row;
        if tx.looked {
            tx.pc = Pc::View;
        }
        self.put(tx);
        if tx.looked && !tx.two_messages {
            self.locked(true);
        }
        if tx.looked { "looks: live" } else { "looks: free" }
    }

    /// `FOR UPDATE` by key, of the row that the snapshot shows.
    fn lock_row(&mut self) -> Option<&'static str> {
        let mut tx = self.tx();
        tx.pc = Pc::Counter;
        let there = tx.seen.id != 0 && !tx.seen_gone;
        if there && !self.config.mutation.no_row_lock {
            if self.row_is_busy() {
                return None;
            }
            tx.row_lock = true;
        }
        self.put(tx);
        Some(if tx.row_lock { "locks the row" } else { "finds no row to lock" })
    }

    /// `FOR NO KEY UPDATE SKIP LOCKED` of the counter; in one message, the decision as well.
    fn lock_counter(&mut self) -> &'static str {
        let mut tx = self.tx();
        if tx.seen_counter && self.state.others(self.at).all(|tx| tx.counter_lock == CounterLock::No) {
            tx.counter_lock = CounterLock::Update;
        } else {
            tx.looked |= tx.seen_counter;
        }
        tx.pc = Pc::View;
        self.put(tx);
        if tx.two_messages {
            return "locks the counter if it can";
        }
        let cur = match tx {
            _ if self.config.mutation.no_row_lock => tx.seen,
            Tx { row_lock: true, .. } => self.state.db.row,
            _ => Row::default(),
        };
        if cur.id == tx.id {
            self.end(Outcome::Mine);
            return "finds its own id";
        }
        if cur.id != 0 && live(cur.expires, self.now()) {
            self.locked(true);
            return "decides: live";
        }
        if tx.seen_counter != (tx.counter_lock == CounterLock::Update) {
            let busy = self.state.others(self.at).any(|tx| tx.counter_lock != CounterLock::No);
            self.locked(busy);
            return "decides: the counter is busy";
        }
        if !self.config.mutation.clock_at_begin {
            tx.read_clock();
        }
        tx.pc = Pc::RaiseCounter;
        self.put(tx);
        "decides: grant"
    }

    /// The two-message form: a new snapshot, the clock, and `decide()` in the client.
    fn view(&mut self) -> &'static str {
        let mut tx = self.tx();
        let (row, counter) = (self.state.db.row, self.state.db.counter);
        let held = tx.row_lock || self.config.mutation.no_row_lock;
        let others_row = row.id != 0 && row.id != tx.id;
        tx.pc = Pc::Between;
        tx.out = if row.id != 0 && !held {
            Outcome::Locked
        } else if row.id != 0 && row.id == tx.id {
            Outcome::Confirm
        } else if (row.id != 0 && live(row.expires, self.now()))
            || (counter > 0 && tx.counter_lock == CounterLock::No)
        {
            Outcome::Locked
        } else {
            Outcome::Grant
        };
        let busy = self.state.others(self.at).any(|tx| tx.counter_lock != CounterLock::No);
        // A counter that appeared, or a row that did, is somebody's grant of this very moment.
        let appeared = (counter > 0 && !tx.seen_counter) || (row.id != 0 && !tx.row_lock);
        let truth = tx.looked || busy || appeared || (others_row && live(row.expires, self.now()));
        self.refuse(tx.out == Outcome::Locked && !truth, "5: Locked, and nobody was in the way");
        self.put(tx);
        match tx.out {
            Outcome::Grant => "decides: grant",
            Outcome::Confirm => "decides: mine already",
            _ => "decides: locked",
        }
    }

    pub(crate) fn locked(&mut self, truth: bool) {
        self.refuse(!truth, "5: Locked, and nobody was in the way");
        self.end(Outcome::Locked);
    }

    fn not_held(&mut self) {
        let (tx, row) = (self.tx(), self.state.db.row);
        let held = row.id == tx.id && row.live_now() && !tx.seen_gone;
        self.refuse(held, "5: NotHeld, and the lease is live");
        self.end(Outcome::NotHeld);
    }

    /// The second message: the write, after which comes the commit.
    fn second_message(&mut self) -> Option<&'static str> {
        let mut tx = self.tx();
        match (tx.kind?, tx.out) {
            (Kind::Acquire, Outcome::Grant) => {
                if !self.config.mutation.clock_at_begin {
                    tx.read_clock();
                }
                tx.pc = Pc::RaiseCounter;
                self.put(tx);
                Some("its second message arrives: grant")
            }
            (Kind::Acquire, _) => {
                if self.state.db.row.id != tx.id {
                    self.end(Outcome::Refused);
                    return Some("confirms nothing");
                }
                tx.row_write = RowWrite::Put;
                tx.new_row = self.state.db.row;
                tx.fence = tx.new_row.fence;
                tx.pc = Pc::Commit;
                self.put(tx);
                Some("its second message arrives: confirm")
            }
            _ => {
                self.write_found();
                Some("its second message arrives: write")
            }
        }
    }

    /// `INSERT … ON CONFLICT DO UPDATE` of the counter, which waits for whoever has it.
    fn raise_counter(&mut self) -> Option<&'static str> {
        let mut tx = self.tx();
        if self.state.others(self.at).any(|tx| tx.counter_lock != CounterLock::No) {
            return None;
        }
        tx.counter_lock = CounterLock::Update;
        tx.new_counter = self.state.db.counter + 1;
        tx.pc = Pc::WriteRow;
        self.put(tx);
        Some("raises the counter")
    }

    /// `INSERT … ON CONFLICT DO UPDATE … WHERE NOT live` of the row, and all or nothing.
    fn write_row(&mut self) -> Option<&'static str> {
        if self.row_is_busy() {
            return None;
        }
        let mut tx = self.tx();
        let row = self.state.db.row;
        tx.pc = Pc::Commit;
        if row.id != 0 && live(row.expires, tx.now) && !self.config.mutation.no_upsert_condition {
            if !self.config.mutation.no_all_or_nothing {
                self.locked(true);
                return Some("writes no row and fails");
            }
            tx.out = Outcome::Locked;
            tx.clock_age = 0;
            tx.now = 0;
            self.put(tx);
            return Some("writes no row");
        }
        tx.row_lock = true;
        tx.row_write = RowWrite::Put;
        tx.new_row = Row { id: tx.id, expires: tx.now + TTL, fence: tx.new_counter, unheard: false };
        tx.fence = tx.new_counter;
        tx.out = Outcome::Grant;
        tx.now = 0;
        tx.clock_age = 0;
        self.put(tx);
        Some("writes the row")
    }

    /// `FOR UPDATE` by id (a renewal skips a busy row), then the clock, then the judgement.
    fn find_row(&mut self) -> Option<&'static str> {
        let mut tx = self.tx();
        let row = self.state.db.row;
        let renewal = tx.kind == Some(Kind::Renew);
        let same = row.id == tx.id && !tx.seen_gone;
        if renewal && (!same || self.row_is_busy()) {
            // The snapshot still shows the row as ours.
            self.end(Outcome::Busy);
            return Some("finds its row busy");
        }
        if self.row_is_busy() && !tx.seen_gone {
            return None;
        }
        if !same {
            self.not_held();
            return Some("finds that its row is gone");
        }
        let extends = matches!(tx.kind, Some(Kind::Extend | Kind::Renew));
        if extends && row.fence != tx.fence && !self.config.mutation.no_fence {
            // Granted again under the same id, by a late message.
            self.end(Outcome::Stale);
            return Some("locks its row: another fence");
        }
        if !live(row.expires, self.now()) {
            if tx.two_messages {
                tx.row_lock = true;
                tx.out = Outcome::NotHeld;
                tx.pc = Pc::Between;
                self.refuse(row.live_now(), "5: NotHeld, and the lease is live");
                self.put(tx);
            } else {
                self.not_held();
            }
            return Some("locks its row: over");
        }
        self.refuse(!row.live_now(), "5: an operation on a lease that is over succeeds");
        tx.row_lock = true;
        tx.out = Outcome::Write;
        tx.pc = Pc::Between;
        self.put(tx);
        if !tx.two_messages {
            self.write_found();
        }
        Some("locks its row: live")
    }

    fn write_found(&mut self) {
        let mut tx = self.tx();
        tx.pc = Pc::Commit;
        if tx.kind == Some(Kind::Release) {
            tx.row_write = RowWrite::Delete;
        } else {
            tx.row_write = RowWrite::Put;
            tx.new_row = Row { expires: self.now() + TTL, ..self.state.db.row };
        }
        self.put(tx);
    }

    /// The fence check: `FOR SHARE` on the counter, then the clock, then the row of the snapshot.
    fn share_counter(&mut self) -> Option<&'static str> {
        let mut tx = self.tx();
        if !self.config.mutation.key_share {
            if self.state.others(self.at).any(|tx| tx.counter_lock == CounterLock::Update) {
                return None;
            }
            tx.counter_lock = CounterLock::Share;
        }
        let current = self.state.db.counter == tx.fence
            && tx.seen.id != 0
            && tx.seen.fence == tx.fence
            && live(tx.seen.expires, self.now());
        if !current {
            self.end(Outcome::Stale);
            return Some("finds its fence stale: the transaction fails");
        }
        tx.pc = Pc::WriteRegister;
        self.put(tx);
        Some("shares the counter: the fence is current")
    }

    fn write_register(&mut self) -> Option<&'static str> {
        if self.state.others(self.at).any(|tx| tx.register_lock) {
            return None;
        }
        let mut tx = self.tx();
        tx.register_lock = true;
        tx.pc = Pc::Commit;
        self.put(tx);
        Some("writes the register")
    }
}
