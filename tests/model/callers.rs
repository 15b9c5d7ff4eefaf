//! What clients do that take several keys at once, or one slot of several, the network between them and
//! `tables.rs`, and the calamities. A pause needs no action of its own: whoever does not act while the
//! clock ticks is paused.

use crate::explore::Event;
use crate::holders::{CLIENTS, Client, Config, IDS, NONE, Phase, State};
use crate::tables::{KEYS, Kind, Outcome, Pc, Set, TTL, Tables, Tx, members};

pub(crate) type Answered = (&'static str, State, Option<&'static str>);

impl Config {
    fn acquire(state: &mut State, owner: u8, kind: Kind, keys: Set, start: u8) {
        let client = &mut state.clients[usize::from(owner)];
        client.phase = Phase::Acquiring;
        let id = client.id;
        state.tables.send(Tx { kind, owner, id, heard: true, keys, start, ..Tx::default() });
    }

    /// The first message of a call, or of one that is made again under the same id.
    fn begin(&self, state: &State, owner: u8, out: &mut Vec<Answered>) {
        let at = usize::from(owner);
        let client = &state.clients[at];
        let set = self.sets[at] & !client.excluded;
        if self.rules.slots {
            for start in members(set) {
                let mut next = *state;
                Self::acquire(&mut next, owner, Kind::Slot, set, start);
                out.push(("asks for a slot", next, None));
            }
            if set == 0 {
                let (next, fault) = self.none(*state, owner);
                out.push(("has no slot left to ask for", next, fault));
            }
            return;
        }
        let kind = match client {
            _ if self.foreign[at] => Kind::Foreign,
            Client { doubted: true, .. } => Kind::Careful,
            _ => Kind::Fast,
        };
        let mut next = *state;
        Self::acquire(&mut next, owner, kind, set, 0);
        out.push(("asks for its keys", next, None));
    }

    /// The next message of a call: from the first slot, which is any start's.
    fn again(&self, state: &State, owner: u8) -> Answered {
        let mut found = Vec::new();
        self.begin(state, owner, &mut found);
        found.swap_remove(0)
    }

    /// Nothing was granted.
    fn none(&self, mut next: State, owner: u8) -> (State, Option<&'static str>) {
        let at = usize::from(owner);
        let client = &mut next.clients[at];
        let free = self.rules.slots && !client.doubted && client.unavailable != self.sets[at];
        if client.doubted && !self.part_forgotten {
            client.defer(true);
        }
        client.idle();
        (next, free.then_some(NONE))
    }

    fn release(&self, next: &mut State, owner: u8, worker: bool) {
        let client = &mut next.clients[usize::from(owner)];
        let (mut id, mut keys) = (client.deferred, self.sets[usize::from(owner)]);
        if !worker {
            (client.phase, client.deadline) = (Phase::Releasing, 0);
            (id, keys) = (client.id, client.keys);
        }
        next.tables.send(Tx { kind: Kind::Release, owner, id, heard: true, worker, keys, ..Tx::default() });
    }

    pub(crate) fn client(&self, state: &State, owner: u8, out: &mut Vec<Answered>) {
        let at = usize::from(owner);
        let client = &state.clients[at];
        let mut next = *state;
        let this = &mut next.clients[at];
        match client.phase {
            Phase::Idle if client.acquires > 0 => {
                this.id = owner * IDS + self.acquires - client.acquires + 1;
                (this.acquires, this.sent) = (client.acquires - 1, TTL);
                self.begin(&next, owner, out);
            }
            Phase::Doubt => {
                if self.fresh_id {
                    if client.acquires > 0 {
                        (this.id, this.acquires, this.sent) = (client.id + 1, client.acquires - 1, TTL);
                        self.begin(&next, owner, out);
                    }
                } else {
                    self.begin(&next, owner, out);
                }
                let mut next = *state;
                next.clients[at].defer(true);
                next.clients[at].idle();
                out.push(("is told: unknown", next, None));
            }
            Phase::Holding => {
                self.release(&mut next, owner, false);
                out.push(("releases", next, None));
                let busy = |kind| state.tables.txs.iter().any(|tx| tx.kind == kind && tx.owner == owner);
                let Client { id, keys, fences, .. } = *client;
                let tx = Tx { owner, id, keys, fences, heard: true, ..Tx::default() };
                if client.believes() && client.renewals > 0 && !busy(Kind::Renew) {
                    let mut next = *state;
                    next.clients[at].renewals -= 1;
                    next.clients[at].renewal_sent = TTL;
                    next.tables.send(Tx { kind: Kind::Renew, worker: true, ..tx });
                    out.push(("'s worker renews", next, None));
                }
                if client.believes() && client.works > 0 && !busy(Kind::Fenced) {
                    let mut next = *state;
                    next.clients[at].works -= 1;
                    next.tables.send(Tx { kind: Kind::Fenced, ..tx });
                    out.push(("begins a transaction and its fence check", next, None));
                }
            }
            _ => {}
        }
        let released = |tx: &Tx| tx.kind == Kind::Release && tx.owner == owner && tx.worker;
        if client.phase != Phase::Crashed && client.deferred != 0 && !state.tables.txs.iter().any(released) {
            let mut next = *state;
            self.release(&mut next, owner, true);
            out.push(("'s worker releases", next, None));
        }
    }

    fn answer(&self, state: &State, at: usize) -> Answered {
        let mut next = *state;
        let tx = next.tables.txs[at];
        next.tables.txs[at] = Tx::default();
        let owner = tx.owner;
        let client = &mut next.clients[usize::from(owner)];
        match (tx.kind, tx.out) {
            (Kind::Fast | Kind::Careful | Kind::Slot | Kind::Foreign, _) => self.acquired(next, tx),
            (Kind::Renew, out) => {
                if client.id == tx.id && client.believes() {
                    let lost = if out == Outcome::Refused { 0 } else { tx.keys & !tx.renewed & !tx.busy };
                    let over = if self.lost_by_all { lost == tx.keys } else { lost != 0 };
                    client.broken &= lost == 0;
                    if over {
                        if self.others_kept {
                            client.idle();
                        } else {
                            self.release(&mut next, owner, false);
                        }
                        return ("is told that a key is lost, and lets the others go", next, None);
                    }
                    if tx.busy == 0 && lost == 0 && out == Outcome::Done {
                        client.deadline = client.deadline.max(client.renewal_sent);
                    }
                }
                ("has the answer to its renewal", next, None)
            }
            (Kind::Release, out) => {
                if tx.worker {
                    if out == Outcome::Done || (out == Outcome::Over && !client.may_arrive) {
                        client.deferred = 0;
                    }
                } else {
                    if out == Outcome::Refused {
                        client.defer(false);
                    }
                    client.idle();
                }
                ("has the answer to its release", next, None)
            }
            _ => ("is back from work", next, None),
        }
    }

    fn acquired(&self, mut next: State, tx: Tx) -> Answered {
        let owner = tx.owner;
        let client = &mut next.clients[usize::from(owner)];
        let careful = |mut next: State, keys| {
            Self::acquire(&mut next, owner, Kind::Careful, keys, 0);
            ("is told: nothing was changed, and sends the careful statement", next, None)
        };
        match (tx.kind, tx.out) {
            (_, Outcome::Granted) => {
                let mut fault = None;
                for key in members(tx.keys) {
                    let (told, bit) =
                        (&mut next.tables.told[usize::from(key)], 1 << tx.fences[usize::from(key)]);
                    if *told & bit != 0 {
                        fault = Some("3: a fence is told twice");
                    }
                    *told |= bit;
                }
                (client.keys, client.fences, client.doubted) = (tx.keys, tx.fences, false);
                client.deadline = if self.deadline_from_reply { TTL } else { client.sent };
                (client.phase, client.sent) = (Phase::Holding, 0);
                (client.excluded, client.unavailable) = (0, 0);
                ("is told: granted", next, fault)
            }
            (_, Outcome::Refused) if client.doubted => {
                client.phase = Phase::Doubt;
                ("is told: an error, and still does not know", next, None)
            }
            (_, Outcome::Refused) => {
                client.idle();
                ("is told: an error, and nothing was changed", next, None)
            }
            (Kind::Fast, Outcome::Nothing) => careful(next, tx.keys),
            (Kind::Slot, Outcome::Nothing) if !self.no_careful => careful(next, tx.keys),
            // Its own id elsewhere, or a row that has come since it looked: it looks again.
            (_, Outcome::Again) => self.again(&next, owner),
            (Kind::Slot, Outcome::Nothing) | (Kind::Careful, _) if self.rules.slots && !self.no_next => {
                client.excluded |= tx.keys;
                self.again(&next, owner)
            }
            _ => {
                let (next, fault) = self.none(next, owner);
                ("is told: locked", next, fault)
            }
        }
    }

    /// A client stops waiting for an answer; the message goes its own way.
    fn lose(next: &mut State, at: usize) {
        let tx = next.tables.txs[at];
        next.tables.txs[at].heard = false;
        if tx.pc == Pc::Done {
            next.tables.txs[at] = Tx::default();
        }
        let client = &mut next.clients[usize::from(tx.owner)];
        match tx.kind {
            Kind::Fast | Kind::Careful | Kind::Slot | Kind::Foreign => {
                (client.phase, client.doubted, client.excluded) = (Phase::Doubt, true, 0);
            }
            Kind::Release if !tx.worker => {
                client.defer(false);
                client.idle();
            }
            _ => {}
        }
    }

    pub(crate) fn transaction(&self, state: &State, at: usize, out: &mut Vec<Event<State>>) {
        let tx = state.tables.txs[at];
        let mut push = |label: &'static str, state, fault| {
            out.push(Event { client: Some(tx.owner), id: tx.id, label: label.into(), state, fault });
        };
        let mut next = *state;
        match next.tables.step(&self.rules, at) {
            Some((label, fault)) => push(label, next, fault),
            None if self.timeouts && tx.heard && !matches!(tx.pc, Pc::Done | Pc::Open) => {
                next.tables.end(at, Outcome::Refused);
                push("waits too long: lock_timeout", next, None);
            }
            None => {}
        }
        if tx.pc == Pc::Open {
            if also(&state.tables, &tx) == 0 && tx.heard {
                let mut next = *state;
                let fault = next.tables.commit(at);
                push("commits its work", next, fault);
            }
            let mut next = *state;
            next.tables.end(at, Outcome::Over);
            push("rolls its work back", next, None);
        } else if !tx.heard {
            let mut next = *state;
            next.tables.end(at, Outcome::Refused);
            push("is rolled back: its connection is gone", next, None);
        } else if tx.pc == Pc::Done {
            let (label, next, fault) = self.answer(state, at);
            push(label, next, fault);
        }
        if tx.heard && state.losses > 0 && tx.kind != Kind::Foreign && tx.kind != Kind::Fenced {
            let mut next = *state;
            next.losses -= 1;
            Self::lose(&mut next, at);
            push("waits no longer: connection lost", next, None);
        }
    }

    /// Time, crashes, operators.
    pub(crate) fn world(state: &State, out: &mut Vec<Event<State>>) {
        let mut push = |client, label: &'static str, state| {
            out.push(Event { client, id: 0, label: label.into(), state, fault: None });
        };
        let mut next = *state;
        if next.tables.tick() {
            for client in &mut next.clients {
                for time in
                    [&mut client.sent, &mut client.renewal_sent, &mut client.deadline, &mut client.over]
                {
                    *time = (*time - 1).max(0);
                }
                if client.over == 0 {
                    (client.deferred, client.may_arrive) = (0, false);
                }
            }
            push(None, "the clocks tick", next);
        }
        for owner in 0..u8::try_from(CLIENTS).expect("few clients") {
            let phase = state.clients[usize::from(owner)].phase;
            if state.crashes > 0 && !matches!(phase, Phase::Crashed | Phase::Idle) {
                let mut next = *state;
                next.crashes -= 1;
                next.clients[usize::from(owner)] = Client { phase: Phase::Crashed, ..Client::default() };
                for tx in next.tables.txs.iter_mut().filter(|tx| !tx.is_free() && tx.owner == owner) {
                    tx.heard = false;
                    if tx.pc == Pc::Done {
                        *tx = Tx::default();
                    }
                }
                push(Some(owner), "crashes", next);
            }
        }
        for key in 0..KEYS {
            let row = state.tables.rows[usize::from(key)];
            if state.breaks > 0 && row.is_live() && !state.tables.row_is_busy(usize::MAX, key) {
                let mut next = *state;
                next.breaks -= 1;
                next.tables.delete(key);
                for client in next.clients.iter_mut().filter(|client| client.tracks(row.id)) {
                    client.broken = true;
                }
                push(None, "an operator breaks a lease", next);
            }
        }
    }

    /// Notes of each slot whether it is not free now: held, or somebody's who is deciding about it.
    pub(crate) fn note_unavailable(&self, state: &mut State) {
        let State { tables, clients, .. } = state;
        for (owner, client) in clients.iter_mut().enumerate() {
            if client.phase != Phase::Acquiring {
                continue;
            }
            for slot in members(self.sets[owner] & !client.unavailable) {
                let number = 1 << self.rules.numbers[usize::from(slot)];
                let theirs = |tx: &Tx| {
                    let locks = tx.rows | tx.counters | tx.raised | tx.shares | tx.written | tx.deleted;
                    let decides = tx.queues & number != 0 && tx.keys & (1 << slot) != 0;
                    let own = usize::from(tx.owner) == owner && tx.kind != Kind::Fenced;
                    !own && (decides || locks & (1 << slot) != 0)
                };
                let busy = tables.txs.iter().any(|tx| !tx.is_free() && theirs(tx));
                if busy || tables.rows[usize::from(slot)].is_live() {
                    client.unavailable |= 1 << slot;
                }
            }
        }
    }
}

/// Whom a caller's open transaction waits for: for the release that its own thread has called.
pub(crate) fn also(tables: &Tables, tx: &Tx) -> Set {
    if tx.kind != Kind::Fenced || tx.pc != Pc::Open {
        return 0;
    }
    let calls =
        |other: &Tx| other.kind == Kind::Release && other.owner == tx.owner && other.heard && !other.worker;
    tables.txs.iter().enumerate().filter(|(_, other)| calls(other)).fold(0, |set, (at, _)| set | 1 << at)
}
