//! What one step of one transaction does to the rows of a shared key.

use super::{
    Config, Cut, DEAD, Database, Intent, Kind, Member, OVER, PASSED, Pc, Phase, READERS, Row, SHORT, SLACK,
    STARVED, State, TTL, Tx, WRITER, live,
};

/// A transaction of the state, on its way by one step.
pub(super) struct Step<'a> {
    pub(super) config: &'a Config,
    pub(super) state: State,
    pub(super) at: usize,
    pub(super) tx: Tx,
    pub(super) fault: Option<&'static str>,
}

impl Step<'_> {
    /// The next step; none if it waits.
    pub(super) fn run(mut self) -> Option<(String, State, Option<&'static str>)> {
        let label = format!("{:?} of {}: {:?}", self.tx.kind, self.tx.client, self.tx.pc);
        let goes_on = match (self.tx.kind, self.tx.pc) {
            (_, Pc::Commit) => self.commit(),
            (Kind::Join, _) => self.join()?,
            (Kind::Leave, _) => self.leave()?,
            (Kind::Renew, _) => self.renew(),
            (Kind::Shorten, _) => self.shorten()?,
            (Kind::Trim, _) => self.trim()?,
            (Kind::Acquire, _) => self.acquire()?,
            (Kind::Release, _) => self.release()?,
            (Kind::Withdraw, _) => self.change(|db, _| db.intent = None),
        };
        self.state.txs[self.at] = goes_on.then_some(self.tx);
        Some((label, self.state, self.fault))
    }

    fn cut(&self) -> Cut {
        self.config.cut
    }

    /// Has the row's lock, if the row that was seen is still there; `None` if it waits.
    fn lock(&mut self, born: Option<u8>) -> Option<bool> {
        if self.state.locked_by_another(self.at) {
            return None;
        }
        self.tx.locks = born.is_none_or(|born| self.state.db.row.is_some_and(|row| row.born == born));
        Some(self.tx.locks)
    }

    /// What is written, for the commit.
    fn change(&mut self, change: impl FnOnce(&mut Database, i8)) -> bool {
        let mut next = self.state.db;
        change(&mut next, self.state.now);
        self.tx.next = Some(next);
        self.tx.pc = Pc::Commit;
        true
    }

    fn end(&mut self, granted: Option<u8>) -> bool {
        if self.tx.given_up {
            return false;
        }
        let at = usize::from(self.tx.client);
        let ttl = if at < READERS { self.config.ttls[at] } else { TTL };
        let from = if self.cut().from_reply { self.state.now } else { self.tx.sent };
        let client = &mut self.state.clients[at];
        match (self.tx.kind, granted) {
            (Kind::Join | Kind::Acquire, Some(fence)) => {
                (client.phase, client.fence, client.deadline) = (Phase::Holding, fence, from + ttl);
                client.broken = false;
            }
            (Kind::Join | Kind::Acquire, None) => client.phase = Phase::Waiting,
            (Kind::Leave | Kind::Release, _) | (Kind::Shorten, None) => client.phase = Phase::Idle,
            (Kind::Renew | Kind::Shorten | Kind::Trim | Kind::Withdraw, _) => {}
        }
        false
    }

    /// Whether the intent that it sees is for it to yield to.
    fn yields(&mut self, seen: Database) -> bool {
        let Some(intent) = seen.intent.filter(|intent| intent.expires > self.state.now) else { return false };
        let older = intent.since < self.tx.since;
        let yields = (older || self.cut().yields_to_newer) && !self.cut().no_yield;
        self.fault = match (older, yields) {
            (true, false) => Some(PASSED),
            (false, true) => Some(STARVED),
            _ => None,
        };
        yields
    }

    fn join(&mut self) -> Option<bool> {
        let (now, at) = (self.state.now, usize::from(self.tx.client));
        let (ttl, cut) = (self.config.ttls[at], self.cut());
        let seen = *self.tx.seen.get_or_insert(self.state.db);
        let member = |fence| Some(Member { fence, expires: now + ttl });
        match self.tx.pc {
            Pc::Sent => {
                let group = seen.row.filter(|row| row.group);
                self.tx.pc = if group.is_some() { Pc::Seen } else { Pc::Again };
                if cut.join_unlocked
                    && let Some(row) = group.filter(|row| live(row.expires, now))
                {
                    return Some(self.change(|db, _| {
                        db.members[at] = member(row.fence);
                        // A row that is gone by then is not written.
                        if let Some(row) = &mut db.row {
                            row.expires = row.expires.max(now + ttl);
                        }
                    }));
                }
                // Where nothing is waited for the next step follows at once.
                if self.state.locked_by_another(self.at) { Some(true) } else { self.join() }
            }
            Pc::Seen => {
                let locked = self.lock(seen.row.map(|row| row.born))?;
                let row = self.state.db.row.filter(|row| locked && live(row.expires, now));
                if row.is_some() && self.yields(seen) {
                    return Some(self.end(None));
                }
                let Some(row) = row else {
                    (self.tx.pc, self.tx.locks) = (Pc::Again, false);
                    return if self.state.locked_by_another(self.at) { Some(true) } else { self.join() };
                };
                Some(self.joins(row, at))
            }
            _ => {
                // The statement before has the group's row, and this one a snapshot of its own.
                self.lock(None)?;
                let seen = self.state.db;
                match seen.row.filter(|row| live(row.expires, now)) {
                    Some(row) if !row.group => Some(self.end(None)),
                    _ if self.yields(seen) => Some(self.end(None)),
                    Some(row) => Some(self.joins(row, at)),
                    None => Some(self.change(|db, now| {
                        if !cut.group_raises_none || db.counter == 0 {
                            db.counter += 1;
                        }
                        db.born += 1;
                        let (fence, born) = (db.counter, db.born);
                        db.row = Some(Row { group: true, fence, expires: now + ttl, born });
                        db.members[at] = member(fence);
                    })),
                }
            }
        }
    }

    /// Lengthens the group and becomes its member. A copy that finds its member leaves it as it is.
    fn joins(&mut self, row: Row, at: usize) -> bool {
        let (ttl, raises) = (self.config.ttls[at], !self.cut().join_raises_none);
        self.change(|db, now| {
            if raises {
                db.row = Some(Row { expires: row.expires.max(now + ttl), ..row });
            }
            let own = db.members[at].filter(|own| own.fence == row.fence && live(own.expires, now));
            db.members[at] = own.or(Some(Member { fence: row.fence, expires: now + ttl }));
        })
    }

    fn leave(&mut self) -> Option<bool> {
        let cut = self.cut();
        let in_one = cut.leave_in_one || cut.leave_unlocked;
        match self.tx.pc {
            Pc::Sent => {
                // A statement that does both has the snapshot of its beginning.
                self.tx.seen = Some(self.state.db);
                self.tx.pc = if cut.leave_unlocked { Pc::Decide } else { Pc::Seen };
                let waits = cut.leave_unlocked || self.state.locked_by_another(self.at);
                return if waits { Some(true) } else { self.leave() };
            }
            Pc::Seen if !in_one => {
                if !self.holds_group()? {
                    self.tx.pc = Pc::Decide;
                    return Some(true);
                }
                self.tx.seen = Some(self.state.db);
            }
            // No group was locked, and this is the snapshot of the next statement.
            Pc::Decide if !in_one => {
                let (db, own) = (self.state.db, self.state.db.members[usize::from(self.tx.client)]);
                let has_come =
                    own.is_some_and(|own| db.row.is_some_and(|row| row.group && row.fence == own.fence));
                if has_come && !cut.ends_unheld {
                    (self.tx.pc, self.tx.seen) = (Pc::Sent, None);
                    return Some(true);
                }
                self.tx.seen = Some(db);
                if has_come {
                    self.tx.pc = Pc::Again;
                    return Some(true);
                }
            }
            // What was not locked before is now, by the change of it.
            _ => {
                self.lock(None)?;
            }
        }
        self.leaves();
        Some(true)
    }

    /// Whether it has the row of the group that it has seen, if that is still there; `None` if it waits.
    fn holds_group(&mut self) -> Option<bool> {
        match self.tx.seen.and_then(|seen| seen.row).filter(|row| row.group) {
            Some(row) => self.lock(Some(row.born)),
            None => Some(false),
        }
    }

    fn leaves(&mut self) {
        let (at, cut, now) = (usize::from(self.tx.client), self.cut(), self.state.now);
        let seen = self.tx.seen.unwrap_or(self.state.db);
        let Some(own) = seen.members[at] else {
            self.end(None);
            self.tx.next = Some(self.state.db);
            self.tx.pc = Pc::Commit;
            return;
        };
        let others =
            seen.members.iter().enumerate().filter(|(other, _)| *other != at).filter_map(|(_, m)| *m);
        let counted = others
            .filter(|other| cut.counts_every_fence || other.fence == own.fence)
            .filter(|other| cut.counts_dead || live(other.expires, now));
        let last = counted.map(|other| other.expires).max();
        let dead = |member: &Option<Member>| member.is_some_and(|member| !live(member.expires, now));
        self.change(|db, _| {
            db.members[at] = None;
            for (other, seen) in db.members.iter_mut().zip(&seen.members) {
                if dead(seen) && other == seen && !cut.keeps_dead {
                    *other = None;
                }
            }
            let mine = db.row.filter(|row| row.group && row.fence == own.fence);
            match (mine, last) {
                (Some(_), None) => db.row = None,
                (Some(row), Some(last)) if row.expires > last + SLACK && !cut.leaves_end => {
                    db.row = Some(Row { expires: last, ..row });
                }
                _ => {}
            }
        });
        let next = self.tx.next.unwrap_or_default();
        let met = seen.members.iter().zip(&next.members).any(|(seen, now)| dead(seen) && now == seen);
        if met {
            self.fault = Some(DEAD);
        }
    }

    /// All that hold, in one statement; a row that is busy is left.
    fn renew(&mut self) -> bool {
        if self.state.locked_by_another(self.at) {
            return false;
        }
        let (cut, fences, config) = (self.cut(), self.tx.fences, *self.config);
        self.tx.locks = true;
        self.change(|db, now| {
            let Some(row) = db.row.filter(|row| row.group && live(row.expires, now)) else { return };
            let mut ends = Vec::new();
            for (at, member) in db.members.iter_mut().enumerate() {
                let Some(found) = member.filter(|m| fences[at] != 0 && live(m.expires, now)) else {
                    continue;
                };
                let mine = found.fence == row.fence && found.fence == fences[at];
                if mine || cut.renews_any_fence {
                    *member = Some(Member { expires: found.expires.max(now + config.ttls[at]), ..found });
                    ends.push(now + config.ttls[at]);
                }
            }
            let end = if cut.raises_by_last { ends.last().copied() } else { ends.iter().copied().max() };
            if let Some(end) = end {
                db.row = Some(Row { expires: row.expires.max(end), ..row });
            }
        })
    }

    /// One that goes alone: it waits for the group's row.
    fn shorten(&mut self) -> Option<bool> {
        let seen = *self.tx.seen.get_or_insert(self.state.db);
        if self.tx.pc == Pc::Sent && self.state.locked_by_another(self.at) {
            self.tx.pc = Pc::Seen;
            return Some(true);
        }
        let (now, at, fence) = (self.state.now, usize::from(self.tx.client), self.tx.fence);
        let held = self.holds_group()?;
        let row = self.state.db.row.filter(|row| held && row.fence == fence && live(row.expires, now));
        let own = self.state.db.members[at].filter(|own| own.fence == fence && live(own.expires, now));
        let (Some(row), Some(own)) = (row, own) else { return Some(self.end(None)) };
        let in_one = self.cut().trims_in_one;
        Some(self.change(|db, now| {
            db.members[at] = Some(Member { expires: now + SHORT, ..own });
            let mut last = now + SHORT;
            for (other, member) in seen.members.iter().enumerate() {
                if let Some(member) = member.filter(|member| other != at && member.fence == fence) {
                    last = last.max(member.expires);
                }
            }
            let expires = if in_one && row.expires > last + SLACK { last } else { row.expires };
            db.row = Some(Row { expires: expires.max(now + SHORT), ..row });
        }))
    }

    /// Lets a group end with its last member, after the row: what is counted is all there is.
    fn trim(&mut self) -> Option<bool> {
        self.tx.seen.get_or_insert(self.state.db);
        if self.tx.pc == Pc::Sent && self.state.locked_by_another(self.at) {
            self.tx.pc = Pc::Seen;
            return Some(true);
        }
        if !self.holds_group()? {
            return Some(false);
        }
        Some(self.change(|db, _| {
            let Some(row) = &mut db.row else { return };
            let of_group = db.members.iter().flatten().filter(|member| member.fence == row.fence);
            // Those of a shortening that came late may have been deleted as dead: it has none then.
            let last = of_group.map(|member| member.expires).max().unwrap_or(OVER);
            if row.expires > last + SLACK {
                row.expires = last;
            }
        }))
    }

    /// The readers hear what became of their leases.
    fn renewed(&mut self, next: &Database) {
        let fences = self.tx.fences;
        for (at, fence) in fences.into_iter().enumerate() {
            let client = &mut self.state.clients[at];
            if client.phase != Phase::Holding || client.fence != fence {
                continue;
            }
            let late = self.state.now >= client.deadline;
            let mine = next.members[at].filter(|member| {
                (member.fence == fence || self.config.cut.renews_any_fence)
                    && next.row.is_some_and(|row| row.group && row.fence == member.fence)
            });
            match mine {
                Some(_) if !late => {
                    client.deadline = client.deadline.max(self.tx.sent + self.config.ttls[at]);
                }
                _ => client.phase = Phase::Idle,
            }
        }
    }

    fn acquire(&mut self) -> Option<bool> {
        let now = self.state.now;
        let seen = *self.tx.seen.get_or_insert(self.state.db);
        if seen.row.is_some_and(|row| live(row.expires, now)) {
            if !self.tx.given_up && self.state.clients[WRITER].phase != Phase::Dead {
                let since = self.tx.since;
                // Its own transaction, and nothing waits for it.
                self.state.db.intent =
                    seen.row.filter(|row| row.group).map(|_| Intent { since, expires: now + 1 });
            }
            return Some(self.end(None));
        }
        self.lock(None)?;
        if self.state.db.row.is_some_and(|row| live(row.expires, now)) {
            return Some(self.end(None));
        }
        Some(self.change(|db, now| {
            db.counter += 1;
            db.born += 1;
            db.row = Some(Row { group: false, fence: db.counter, expires: now + TTL, born: db.born });
        }))
    }

    fn release(&mut self) -> Option<bool> {
        self.lock(None)?;
        let fence = self.tx.fence;
        Some(self.change(|db, _| db.row = db.row.filter(|row| row.group || row.fence != fence)))
    }

    fn commit(&mut self) -> bool {
        let next = self.tx.next.unwrap_or(self.state.db);
        let before = self.state.db;
        // Intents are written beside whoever has the row.
        let intent = if self.tx.kind == Kind::Withdraw { None } else { before.intent };
        self.state.db = Database { intent, ..merge(before, next, &self.tx, self.cut()) };
        match self.tx.kind {
            Kind::Join => {
                let fence = self.state.db.members[usize::from(self.tx.client)].map(|member| member.fence);
                self.end(fence)
            }
            Kind::Acquire => {
                self.state.written = next.row.map_or(0, |row| row.fence);
                let goes_on = self.end(next.row.map(|row| row.fence));
                if self.tx.given_up || self.cut().keeps_intent {
                    return goes_on;
                }
                if self.state.db.intent.is_some() {
                    self.tx = Tx { kind: Kind::Withdraw, client: self.tx.client, ..Tx::default() };
                    return true;
                }
                goes_on
            }
            Kind::Renew => {
                self.renewed(&next);
                false
            }
            Kind::Shorten if self.cut().trims_none || self.cut().trims_in_one => false,
            // Also for one that has died meanwhile.
            Kind::Shorten => {
                let Tx { client, given_up, .. } = self.tx;
                self.tx = Tx { kind: Kind::Trim, client, given_up, ..Tx::default() };
                true
            }
            _ => self.end(None),
        }
    }
}

/// What a transaction has changed, on what others have committed meanwhile: without the row's lock the two may
/// differ.
fn merge(before: Database, next: Database, tx: &Tx, cut: Cut) -> Database {
    if tx.locks {
        return next;
    }
    let mut merged = before;
    if let (Kind::Join, at) = (tx.kind, usize::from(tx.client)) {
        merged.members[at] = next.members[at];
        if let (Some(row), Some(new)) = (&mut merged.row, next.row)
            && row.born == new.born
        {
            row.expires = row.expires.max(new.expires);
        }
    }
    if let (Kind::Leave, at) = (tx.kind, usize::from(tx.client)) {
        // What it deletes is what it has seen.
        if merged.members[at].is_some_and(|own| own.fence == tx.fence) || cut.deletes_any_fence {
            merged.members[at] = None;
        }
    }
    merged
}
