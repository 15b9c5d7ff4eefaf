//! The commit: what it makes visible, and the invariants that it is checked against.

use super::{Step, Stepped};
use crate::config::{Config, Kind};
use crate::state::{Ear, Outcome, Phase, Row, RowWrite, State};

impl Step<'_> {
    pub(super) fn commit(&mut self) -> &'static str {
        let tx = self.tx();
        let wait = match tx.kind {
            Some(Kind::Release | Kind::ReleaseLive) => false,
            Some(Kind::Acquire | Kind::Absent) => !self.config.mutation.async_grant,
            _ => true,
        };
        self.apply();
        if wait {
            self.state.durable = self.state.db;
        }
        "COMMIT"
    }

    /// Makes the transaction's writes visible and checks them against what they meet.
    fn apply(&mut self) {
        let tx = self.tx();
        let before = self.state.db;
        let granted = tx.new_counter > 0 && tx.row_write == RowWrite::Put;
        self.refuse(
            tx.new_counter > 0 && !granted,
            "2: a fence is burnt: the counter is raised without a grant",
        );
        if tx.new_counter > 0 {
            self.refuse(tx.new_counter <= before.counter, "2: the counter does not grow");
            self.refuse(
                self.state.told >> tx.new_counter != 0,
                "2: a fence that was told before, or an older one, is granted",
            );
            self.state.db.counter = tx.new_counter;
        }
        match tx.row_write {
            RowWrite::No => {}
            RowWrite::Put if granted => {
                let live = !self.state.jumped && before.row.live_now();
                self.refuse(live, "3: a takeover replaces a live lease");
                let row = Row { unheard: tx.ear == Ear::Nobody, ..tx.new_row };
                self.state.db.row = row;
            }
            RowWrite::Put => {
                self.refuse(before.row.id != tx.id, "3: an extend succeeds on a lease that was taken over");
                // Confirmed for a client that listens, or moved after its client had let go of it.
                let extend = tx.kind != Some(Kind::Acquire);
                let let_go = !matches!(
                    self.state.clients[usize::from(tx.owner)].phase,
                    Phase::Holding | Phase::Writing | Phase::Freshening
                );
                let unheard = tx.ear == Ear::Nobody || (extend && (before.row.unheard || let_go));
                self.state.db.row = Row { unheard, ..tx.new_row };
            }
            RowWrite::Delete => {
                self.refuse(before.row.id != tx.id, "3: a release deletes a foreign row");
                self.state.db.row = Row::default();
                for other in &mut self.state.txs {
                    other.seen_gone |= other.seen.id != 0;
                }
            }
        }
        if tx.register_lock {
            self.refuse(
                tx.fence < before.register,
                "4: a write with an older fence commits after a newer one",
            );
            self.state.db.register = tx.fence;
        }
        self.end(match tx.kind {
            Some(Kind::Acquire) if tx.out == Outcome::Locked => Outcome::Locked,
            Some(Kind::Acquire | Kind::Absent) => Outcome::Granted,
            Some(Kind::Release | Kind::ReleaseLive) => Outcome::Released,
            Some(Kind::Extend | Kind::Renew) => Outcome::Extended,
            _ => Outcome::Written,
        });
    }
}

/// The commit of a transaction whose wait for the disk or the standby is cut short: visible, and not
/// durable. What its client makes of that is not the server's matter.
pub(crate) fn commit_visibly(config: &Config, state: &State, at: usize) -> Stepped {
    let mut step = Step { config, state: *state, at, fault: None };
    step.apply();
    ("COMMIT is visible, its wait for the standby is cut short", step.state, step.fault)
}
