//! PostgreSQL with several keys: what one step of one transaction does.

use crate::state::live;
use crate::tables::{Kind, Outcome, Pc, Row, Rules, Set, TTL, Tables, Tx, members, next_of};

/// A step: what it was, and what it broke.
pub(crate) type Stepped = (&'static str, Option<&'static str>);

pub(crate) const TAKEOVER: &str = "4: a takeover replaces a live lease";
pub(crate) const PARTIAL: &str = "1: a grant has a part of its keys";
pub(crate) const BURNT: &str = "3: a counter is not raised once with each grant";
pub(crate) const TWICE: &str = "3: a fence that was told before, or an older one, is granted";
pub(crate) const STALE: &str = "5: a write with an older fence commits after a newer one";

impl Tables {
    /// The next step of a transaction, where it waits for nobody.
    pub(crate) fn step(&mut self, rules: &Rules, at: usize) -> Option<Stepped> {
        if matches!(self.txs[at].pc, Pc::Done | Pc::Open) || self.blockers(rules, at) != 0 {
            return None;
        }
        let stepped = self.part(rules, at);
        // A counter is somebody else's to wait for only where work is fenced: what happens between these
        // parts could as well happen before the first of them.
        while !rules.fenced_work && self.txs[at].pc == Pc::Raise && self.blockers(rules, at) == 0 {
            self.raise(rules, at);
        }
        Some(stepped)
    }

    fn part(&mut self, rules: &Rules, at: usize) -> Stepped {
        match self.txs[at].pc {
            Pc::Queue => (self.queue(rules, at), None),
            Pc::TryQueue if self.txs[at].kind == Kind::Slot => (self.first_slot(rules, at), None),
            Pc::TryQueue => (self.try_queue(rules, at), None),
            Pc::LockRows => (self.lock_row(rules, at), None),
            Pc::LockCounters => (self.lock_counters(rules, at), None),
            Pc::Raise => (self.raise(rules, at), None),
            Pc::Write => (self.write(rules, at), None),
            Pc::Share => (self.share(rules, at), None),
            Pc::Commit => ("COMMIT", self.commit(at)),
            _ => (self.begin(rules, at), None),
        }
    }

    fn begin(&mut self, rules: &Rules, at: usize) -> &'static str {
        let tx = &mut self.txs[at];
        match tx.kind {
            Kind::Careful => {
                let by_key = rules.cut.queue_by_key;
                tx.left = if by_key { tx.keys } else { Self::numbers(rules, tx.keys) };
                tx.pc = Pc::Queue;
                if self.blockers(rules, at) == 0 {
                    return self.queue(rules, at);
                }
                "begins, and waits for an advisory lock"
            }
            Kind::Foreign => {
                // Its clock is that of its BEGIN.
                tx.read_clock();
                (tx.left, tx.pc) = (tx.keys, Pc::Queue);
                "begins, and reads the clock"
            }
            _ => {
                self.snapshot(rules, at);
                "begins, and takes its snapshot"
            }
        }
    }

    /// What a statement sees.
    fn snapshot(&mut self, rules: &Rules, at: usize) {
        let mut tx = self.txs[at];
        (tx.seen, tx.mine, tx.held, tx.counted, tx.gone, tx.ends) = (0, 0, 0, 0, 0, i8::MAX);
        for key in members(tx.keys) {
            let row = self.rows[usize::from(key)];
            let own = row.id == tx.id && !(rules.cut.own_not_looked_for && Self::grants(&tx));
            if row.id != 0 {
                let same = own && (tx.kind != Kind::Fenced || row.fence == tx.fences[usize::from(key)]);
                tx.seen |= 1 << key;
                tx.mine |= u8::from(same) << key;
                tx.held |= u8::from(!own && live(row.expires, tx.now)) << key;
                tx.ends = tx.ends.min(row.expires);
            }
            tx.counted |= u8::from(self.counters[usize::from(key)].fence != 0) << key;
        }
        (tx.left, tx.pc) = match tx.kind {
            Kind::Release | Kind::Renew => (tx.mine, Pc::LockRows),
            Kind::Fenced => (tx.counted, Pc::Share),
            Kind::Foreign => (tx.keys, Pc::Raise),
            Kind::Careful if tx.seen == 0 => (tx.counted, Pc::LockCounters),
            Kind::Careful => (tx.seen, Pc::LockRows),
            _ => (0, Pc::TryQueue),
        };
        self.txs[at] = tx;
        match tx.kind {
            // A key that is held: no row is locked.
            Kind::Careful | Kind::Foreign if tx.held != 0 => self.end(at, Outcome::Locked),
            Kind::Release | Kind::Renew if tx.mine == 0 => self.end(at, Outcome::Over),
            Kind::Fenced if tx.mine != tx.keys || tx.counted != tx.keys => self.end(at, Outcome::Over),
            _ => {}
        }
    }

    fn grants(tx: &Tx) -> bool {
        matches!(tx.kind, Kind::Fast | Kind::Careful | Kind::Slot | Kind::Foreign)
    }

    fn queue(&mut self, rules: &Rules, at: usize) -> &'static str {
        let tx = &mut self.txs[at];
        let next = next_of(tx.left, Self::backwards(rules, tx)).expect("a number to queue for");
        tx.queues |= Self::number(rules, tx, next);
        tx.left &= !(1 << next);
        if tx.left != 0 {
            return "has an advisory lock";
        }
        self.snapshot(rules, at);
        "has its advisory locks, and looks"
    }

    /// The fast statement: the advisory locks if they are free; then what the snapshot showed, which may
    /// be older than they are, and whether anybody else has a counter.
    fn try_queue(&mut self, rules: &Rules, at: usize) -> &'static str {
        let tx = self.txs[at];
        let numbers = if rules.cut.fast_unqueued { 0 } else { Self::numbers(rules, tx.keys) };
        let nothing = self.any(at, |tx| tx.queues & numbers != 0)
            || tx.seen != 0
            || members(tx.counted).any(|key| self.touched(at, key));
        if tx.held != 0 || nothing {
            self.end(at, if tx.held != 0 { Outcome::Locked } else { Outcome::Nothing });
            return "finds a row, a queue or a busy counter, and changes nothing";
        }
        let tx = &mut self.txs[at];
        (tx.queues, tx.left, tx.pc) = (numbers, tx.keys, Pc::Raise);
        "has the advisory locks, and saw no row"
    }

    /// The first slot from a random start that had no live row and whose advisory lock is free; then
    /// its counter.
    fn first_slot(&mut self, rules: &Rules, at: usize) -> &'static str {
        let mut tx = self.txs[at];
        if let (Some(own), false) = (members(tx.mine).next(), rules.cut.own_not_looked_for) {
            self.txs[at].keys = 1 << own;
            self.end(at, Outcome::Nothing);
            return "finds its own id in a slot";
        }
        let free = tx.keys & !tx.held & !tx.mine;
        let unqueued = |key: u8| {
            let number = 1 << rules.numbers[usize::from(key)];
            rules.cut.slot_unqueued || !self.any(at, |tx| tx.queues & number != 0)
        };
        let order =
            members(free).filter(|key| *key >= tx.start).chain(members(free)).find(|key| unqueued(*key));
        let Some(slot) = order else {
            self.end(at, Outcome::Locked);
            return "finds no free slot";
        };
        let queues = if rules.cut.queues_for_all {
            members(free).filter(|key| unqueued(*key)).fold(0, |set, key| set | 1 << key)
        } else {
            1 << slot
        };
        tx.queues = if rules.cut.slot_unqueued { 0 } else { Self::numbers(rules, queues) };
        (tx.keys, tx.left, tx.pc) = (1 << slot, 1 << slot, Pc::Raise);
        self.txs[at] = tx;
        if tx.counted & (1 << slot) != 0 && self.touched(at, slot) {
            self.end(at, Outcome::Nothing);
            return "has a slot's advisory lock, and leaves its counter alone";
        }
        "has a free slot's advisory lock"
    }

    /// `FOR UPDATE`, row by row; a renewal skips what is busy.
    fn lock_row(&mut self, rules: &Rules, at: usize) -> &'static str {
        let mut tx = self.txs[at];
        let key = next_of(tx.left, Self::backwards(rules, &tx)).expect("a row to lock");
        let (bit, row) = (1 << key, self.rows[usize::from(key)]);
        tx.left &= !bit;
        let there = row.id != 0 && tx.gone & bit == 0;
        if tx.kind == Kind::Renew && there && self.row_is_busy(at, key) {
            tx.busy |= bit;
        } else if there {
            tx.rows |= bit;
            let own = row.id == tx.id && !(rules.cut.own_not_looked_for && Self::grants(&tx));
            let may = match tx.kind {
                Kind::Careful => own || !live(row.expires, 0),
                Kind::Renew => own && row.fence == tx.fences[usize::from(key)],
                _ => own,
            };
            tx.free |= if may { bit } else { 0 };
        }
        self.txs[at] = tx;
        if tx.left == 0 {
            self.rows_are_locked(rules, at);
            return "has its last row, and decides";
        }
        "has a row"
    }

    fn rows_are_locked(&mut self, rules: &Rules, at: usize) {
        let mut tx = self.txs[at];
        let of = |set: Set, is: &dyn Fn(Row) -> bool| {
            members(set).filter(|key| is(self.rows[usize::from(*key)])).fold(0, |set, key| set | 1 << key)
        };
        let own_live = of(tx.free, &|row| row.id == tx.id && row.is_live());
        let own = of(tx.free, &|row| row.id == tx.id && !rules.cut.own_not_looked_for);
        let out = match tx.kind {
            Kind::Careful if tx.free != tx.seen => Some(Outcome::Locked),
            Kind::Careful if own == tx.keys => {
                (tx.confirms, tx.written, tx.pc) = (true, tx.keys, Pc::Commit);
                None
            }
            // A part of them has been lost since: it is not granted anew under the same id.
            Kind::Careful if own != 0 => Some(Outcome::Locked),
            Kind::Careful => {
                (tx.left, tx.pc) = (tx.counted, Pc::LockCounters);
                None
            }
            _ if own_live == 0 => Some(Outcome::Over),
            Kind::Renew => {
                tx.read_clock();
                (tx.renewed, tx.pc) = (own_live, Pc::Commit);
                None
            }
            _ => {
                (tx.deleted, tx.pc) = (own_live, Pc::Commit);
                None
            }
        };
        self.txs[at] = tx;
        if let Some(out) = out {
            self.end(at, out);
        }
    }

    /// `SKIP LOCKED`; then the one clock of the grant.
    fn lock_counters(&mut self, rules: &Rules, at: usize) -> &'static str {
        let mut tx = self.txs[at];
        if rules.cut.counters_waited_for {
            if let Some(key) = next_of(tx.left, false) {
                tx.counters |= 1 << key;
                tx.left &= !(1 << key);
            }
        } else {
            if members(tx.counted).any(|key| self.counter_is_busy(at, key)) {
                self.end(at, Outcome::Locked);
                return "finds a counter busy";
            }
            (tx.counters, tx.left) = (tx.counted, 0);
        }
        if tx.left == 0 {
            tx.read_clock();
            (tx.left, tx.pc) = (tx.keys, Pc::Raise);
        }
        self.txs[at] = tx;
        "has the counters, and reads the clock"
    }

    fn raise(&mut self, rules: &Rules, at: usize) -> &'static str {
        let tx = &mut self.txs[at];
        let key = next_of(tx.left, Self::backwards(rules, tx)).expect("a counter to raise");
        tx.raised |= u8::from(!rules.cut.raises_none) << key;
        tx.left &= !(1 << key);
        if tx.left == 0 || rules.cut.raises_one {
            if matches!(tx.kind, Kind::Fast | Kind::Slot) {
                tx.read_clock();
            }
            (tx.left, tx.pc) = (tx.keys, Pc::Write);
        }
        "raises a counter"
    }

    /// `ON CONFLICT DO NOTHING` of the fast statement, `DO UPDATE WHERE NOT live` of the careful one;
    /// others overwrite.
    fn write(&mut self, rules: &Rules, at: usize) -> &'static str {
        let mut tx = self.txs[at];
        let key = next_of(tx.left, false).expect("a row to write");
        let row = self.rows[usize::from(key)];
        tx.left &= !(1 << key);
        let elsewhere = |(at, other): (usize, &Row)| at != usize::from(key) && other.id == tx.id;
        let twice = rules.ids_are_unique() && self.rows.iter().enumerate().any(elsewhere);
        let met = match tx.kind {
            _ if rules.cut.overwrites => false,
            Kind::Fast => row.id != 0,
            Kind::Foreign => false,
            _ => row.id != 0 && live(row.expires, tx.now),
        };
        if twice || (met && !rules.cut.partial) {
            self.end(
                at,
                match tx.kind {
                    _ if twice => Outcome::Again,
                    Kind::Slot => Outcome::Again,
                    Kind::Fast => Outcome::Nothing,
                    _ => Outcome::Locked,
                },
            );
            return "meets a row and fails";
        }
        tx.written |= if met { 0 } else { 1 << key };
        if tx.left == 0 {
            tx.pc = Pc::Commit;
        }
        self.txs[at] = tx;
        if met { "meets a row and goes on without it" } else { "writes a row" }
    }

    /// `FOR SHARE` on the counters, then the clock and the rows of the snapshot.
    fn share(&mut self, rules: &Rules, at: usize) -> &'static str {
        let mut tx = self.txs[at];
        let key = next_of(tx.left, Self::backwards(rules, &tx)).expect("a counter to share");
        tx.shares |= 1 << key;
        tx.left &= !(1 << key);
        self.txs[at] = tx;
        if tx.left != 0 {
            return "shares a counter";
        }
        let newest = |key: u8| self.counters[usize::from(key)].fence == tx.fences[usize::from(key)];
        if !live(tx.ends, 0) || !members(tx.keys).all(newest) {
            self.end(at, Outcome::Over);
            return "finds a fence stale: the transaction fails";
        }
        self.txs[at].pc = Pc::Open;
        "shares the last counter: all fences are current"
    }

    /// Makes the writes visible, and checks them against what they meet.
    pub(crate) fn commit(&mut self, at: usize) -> Option<&'static str> {
        let tx = self.txs[at];
        let mut fault = None;
        let mut fences = tx.fences;
        if Self::grants(&tx) {
            fault = fault.or((tx.written != tx.keys).then_some(PARTIAL));
            fault = fault.or((!tx.confirms && tx.raised != tx.written).then_some(BURNT));
        }
        for key in members(tx.raised | tx.counters) {
            let counter = &mut self.counters[usize::from(key)];
            let raised = tx.raised & (1 << key) != 0;
            counter.fence += u8::from(raised);
            counter.touched = !raised;
        }
        for key in members(tx.written) {
            let (place, told) = (usize::from(key), self.told[usize::from(key)]);
            let before = self.rows[place];
            if tx.confirms {
                fences[place] = before.fence;
                self.rows[place].unheard = !tx.heard;
                continue;
            }
            fault = fault.or(before.is_live().then_some(TAKEOVER));
            fences[place] = self.counters[place].fence.max(1);
            fault = fault.or((told >> fences[place] != 0).then_some(TWICE));
            let (id, expires) = (tx.id, tx.now + TTL);
            self.rows[place] = Row { id, fence: fences[place], expires, unheard: !tx.heard };
        }
        for key in members(tx.renewed) {
            let row = &mut self.rows[usize::from(key)];
            row.expires = row.expires.max(tx.now + TTL);
            row.unheard |= !tx.heard;
        }
        for key in members(tx.deleted) {
            self.delete(key);
        }
        for key in members(tx.shares) {
            let place = usize::from(key);
            self.counters[place].touched = true;
            fault = fault.or((tx.fences[place] < self.register[place]).then_some(STALE));
            self.register[place] = tx.fences[place];
        }
        self.txs[at].fences = fences;
        self.answer(at, if Self::grants(&tx) { Outcome::Granted } else { Outcome::Done });
        fault
    }
}
