//! PostgreSQL: the steps of the statements for what nearly always happens. Both change nothing where
//! the careful statement has to decide.

use crate::server::Step;
use crate::state::{CounterLock, Outcome, Pc, Row, RowWrite, TTL, live};

impl Step<'_> {
    /// The grant of a key without a row: its snapshot, which may be older than the advisory lock.
    pub(crate) fn look_absent(&mut self) -> &'static str {
        let mut tx = self.tx();
        tx.seen = self.state.db.row;
        tx.seen_counter = self.state.db.counter > 0;
        tx.pc = Pc::TryQueue;
        self.put(tx);
        "looks for a row"
    }

    /// What the snapshot showed, and whether anybody else has the counter locked, which is only asked so as
    /// not to wait; then the advisory lock if it is free.
    pub(crate) fn try_queue(&mut self) -> &'static str {
        let mut tx = self.tx();
        if tx.seen.id != 0 {
            // The clock of the answer is read after the snapshot. It was live in any case.
            let held = tx.seen.id != tx.id && live(tx.seen.expires, self.now());
            self.end(if held { Outcome::Locked } else { Outcome::Nothing });
            return if held { "has seen a live row" } else { "has seen a row that is over, or its own" };
        }
        if tx.seen_counter && self.counter_is_busy() {
            self.end(Outcome::Nothing);
            return "finds the counter locked";
        }
        let mutation = self.config.mutation;
        if !mutation.no_advisory_lock && !mutation.absent_unqueued {
            if self.state.others(self.at).any(|tx| tx.queue_lock) {
                self.end(Outcome::Nothing);
                return "does not get the advisory lock at once";
            }
            tx.queue_lock = true;
        }
        tx.pc = Pc::RaiseFirst;
        self.put(tx);
        "has the advisory lock and saw no row"
    }

    /// The counter, which is waited for if somebody has come in between; then the clock.
    pub(crate) fn raise_first(&mut self) -> Option<&'static str> {
        if self.counter_is_busy() {
            return None;
        }
        let mut tx = self.tx();
        tx.counter_lock = CounterLock::Update;
        tx.new_counter = self.state.db.counter + 1;
        if !self.config.mutation.clock_at_begin {
            tx.read_clock();
        }
        tx.pc = Pc::InsertRow;
        self.put(tx);
        Some("raises the counter and reads the clock")
    }

    /// `ON CONFLICT DO NOTHING`, which waits for whoever writes the row, not for who locks it; and all
    /// or nothing.
    pub(crate) fn insert_row(&mut self) -> Option<&'static str> {
        if self.state.others(self.at).any(|tx| tx.row_write != RowWrite::No) {
            return None;
        }
        let mut tx = self.tx();
        if self.state.db.row.id != 0 && !self.config.mutation.absent_overwrites {
            if !self.config.mutation.absent_burns {
                self.end(Outcome::Nothing);
                return Some("meets a row and fails");
            }
            (tx.pc, tx.now, tx.clock_age) = (Pc::Commit, 0, 0);
            self.put(tx);
            return Some("meets a row and writes none");
        }
        tx.row_lock = true;
        tx.row_write = RowWrite::Put;
        tx.new_row = Row { id: tx.id, expires: tx.now + TTL, fence: tx.new_counter, unheard: false };
        tx.fence = tx.new_counter;
        (tx.pc, tx.now, tx.clock_age) = (Pc::Commit, 0, 0);
        self.put(tx);
        Some("inserts the row")
    }

    /// The end of a live lease: the row in the snapshot, judged when it is found.
    pub(crate) fn find_live(&mut self) -> &'static str {
        let (mut tx, row) = (self.tx(), self.state.db.row);
        if row.id != tx.id || !live(row.expires, self.now()) {
            self.released_unchanged();
            return "finds no live row with its id";
        }
        tx.seen = row;
        tx.pc = Pc::DeleteRow;
        self.put(tx);
        "sees its live row"
    }

    /// The wait for the row, the newest version of it, and the second judgement, in `RETURNING`.
    pub(crate) fn delete_row(&mut self) -> Option<&'static str> {
        let (mut tx, row) = (self.tx(), self.state.db.row);
        if row.id == 0 || tx.seen_gone || row.id != tx.id {
            self.released_unchanged();
            return Some("finds that its row is gone");
        }
        if self.row_is_busy() {
            return None;
        }
        if !live(row.expires, self.now()) && !self.config.mutation.judged_once {
            self.released_unchanged();
            return Some("would delete its row, which is over by now, and fails");
        }
        self.refuse(!row.live_now(), "5: an operation on a lease that is over succeeds");
        tx.row_lock = true;
        tx.row_write = RowWrite::Delete;
        tx.pc = Pc::Commit;
        self.put(tx);
        Some("deletes its live row")
    }

    fn released_unchanged(&mut self) {
        let blind = self.config.mutation.released_blindly;
        self.refuse(blind, "5: Released, and nothing was released");
        self.end(if blind { Outcome::Released } else { Outcome::Nothing });
    }

    fn counter_is_busy(&self) -> bool {
        self.state.others(self.at).any(|tx| tx.counter_lock != CounterLock::No)
    }
}
