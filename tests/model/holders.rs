//! Clients that take several keys at once, or one slot of several: what they are, how much of everything
//! there is, and what must hold. What they do is in `callers.rs`, and the server in `tables.rs`.

use std::fmt::Write as _;

use crate::callers::also;
use crate::explore::{Event, Model};
use crate::state::TOLERANCE;
use crate::tables::{Counter, Cut, KEYS, Row, Rules, Set, TTL, Tables, members};

pub(crate) const CLIENTS: usize = 3;
/// Lock ids per client.
pub(crate) const IDS: u8 = 2;
/// The id of a holder that crashed before the beginning.
const GHOST: u8 = 15;

pub(crate) const UNKNOWN: &str = "2: a client holds a lease that the server does not know";
pub(crate) const TOO_LONG: &str = "2: a client trusts its lease for longer than the server keeps it";
pub(crate) const NONE: &str = "6: none, and a slot was free all the time";
pub(crate) const TOO_MANY: &str = "1: more holders than the largest limit";
pub(crate) const TWO_PERMITS: &str = "1: one call has two permits";
pub(crate) const ORPHAN: &str = "7: a live lease, and nobody looks after it";
pub(crate) const DEADLOCK: &str = "8: some wait for each other";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) enum Phase {
    #[default]
    Idle,
    Acquiring,
    /// The answer to an acquire is lost.
    Doubt,
    Holding,
    Releasing,
    Crashed,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Client {
    pub(crate) phase: Phase,
    pub(crate) id: u8,
    pub(crate) keys: Set,
    /// Slots that are left out in this call, and those that were not free at some moment of it.
    pub(crate) excluded: Set,
    pub(crate) unavailable: Set,
    pub(crate) fences: [u8; KEYS as usize],
    /// How long the lease would be trusted if the call, or the renewal under way, succeeded.
    pub(crate) sent: i8,
    pub(crate) renewal_sent: i8,
    /// How long it is trusted; 0: not.
    pub(crate) deadline: i8,
    pub(crate) doubted: bool,
    /// An operator broke a lease of it, and it cannot know yet.
    pub(crate) broken: bool,
    /// An id that the worker releases until this is over, and whether it may still arrive.
    pub(crate) deferred: u8,
    pub(crate) over: i8,
    pub(crate) may_arrive: bool,
    pub(crate) acquires: u8,
    pub(crate) renewals: u8,
    pub(crate) works: u8,
}

impl Client {
    pub(crate) fn believes(&self) -> bool {
        self.phase == Phase::Holding && self.deadline > 0
    }

    pub(crate) fn tracks(&self, id: u8) -> bool {
        self.deferred == id || (self.id == id && !matches!(self.phase, Phase::Idle | Phase::Crashed))
    }

    pub(crate) fn idle(&mut self) {
        let Self { deferred, over, may_arrive, acquires, renewals, works, .. } = *self;
        *self = Self { deferred, over, may_arrive, acquires, renewals, works, ..Self::default() };
    }

    pub(crate) fn defer(&mut self, may_arrive: bool) {
        assert_eq!(self.deferred, 0, "one id is deferred at a time");
        (self.deferred, self.over, self.may_arrive) = (self.id, TTL + TOLERANCE, may_arrive);
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct State {
    pub(crate) tables: Tables,
    pub(crate) clients: [Client; CLIENTS],
    pub(crate) losses: u8,
    pub(crate) crashes: u8,
    pub(crate) breaks: u8,
}

impl State {
    /// The same state with the names of the first two clients exchanged.
    fn exchanged(&self) -> Self {
        let owner = |owner: u8| if owner < 2 { 1 - owner } else { owner };
        let id = |id: u8| {
            if id == 0 || id > 2 * IDS { id } else { owner((id - 1) / IDS) * IDS + (id - 1) % IDS + 1 }
        };
        let mut next = *self;
        next.clients.swap(0, 1);
        for client in &mut next.clients {
            (client.id, client.deferred) = (id(client.id), id(client.deferred));
        }
        for row in &mut next.tables.rows {
            row.id = id(row.id);
        }
        for tx in next.tables.txs.iter_mut().filter(|tx| !tx.is_free()) {
            (tx.owner, tx.id) = (owner(tx.owner), id(tx.id));
        }
        next.tables.txs.sort_unstable();
        next
    }
}

/// How much of everything there is, and what is taken out of the clients.
#[derive(Clone, Copy)]
#[allow(clippy::struct_excessive_bools)] // Each is one independent choice.
pub(crate) struct Config {
    pub(crate) rules: Rules,
    /// What each client takes: all of these keys, or one of these slots. 0: no such client.
    pub(crate) sets: [Set; CLIENTS],
    /// The largest limit of permits in use.
    pub(crate) limit: usize,
    /// Which client is one of another kind: it takes one key, statement by statement.
    pub(crate) foreign: [bool; CLIENTS],
    /// Per client.
    pub(crate) acquires: u8,
    pub(crate) works: u8,
    /// Of the first client.
    pub(crate) renewals: u8,
    /// In all.
    pub(crate) losses: u8,
    pub(crate) crashes: u8,
    pub(crate) breaks: u8,
    /// States that differ only in the names of the first two clients are one.
    pub(crate) symmetry: bool,
    /// Waits may end with `lock_timeout`.
    pub(crate) timeouts: bool,
    /// Keys with a dead row of a crashed holder, and counters that bear the mark of a transaction that was
    /// rolled back.
    pub(crate) dead: Set,
    pub(crate) touched: Set,
    pub(crate) deadline_from_reply: bool,
    /// A guard goes on until all of its keys are lost.
    pub(crate) lost_by_all: bool,
    /// When one key is lost the others are left to their ttl.
    pub(crate) others_kept: bool,
    /// A lost answer is followed by a call with another id.
    pub(crate) fresh_id: bool,
    /// Who finds a part of its keys under its own id after a lost answer forgets them.
    pub(crate) part_forgotten: bool,
    /// A slot that the first statement does not grant is not asked for with the careful one.
    pub(crate) no_careful: bool,
    /// A slot that is not granted ends the call.
    pub(crate) no_next: bool,
}

impl Config {
    pub(crate) const fn new(sets: [Set; CLIENTS]) -> Self {
        let cut = Cut {
            queue_by_key: false,
            fast_unqueued: false,
            partial: false,
            overwrites: false,
            raises_one: false,
            raises_none: false,
            release_backwards: false,
            careful_backwards: false,
            renewal_waits_backwards: false,
            raise_backwards: false,
            fenced_backwards: false,
            counters_waited_for: false,
            own_not_looked_for: false,
            ids_not_unique: false,
            queues_for_all: false,
            slot_unqueued: false,
        };
        Self {
            rules: Rules { numbers: [0, 1, 2], slots: false, fenced_work: false, cut },
            sets,
            limit: 0,
            foreign: [false; CLIENTS],
            acquires: 1,
            renewals: 0,
            works: 0,
            losses: 0,
            crashes: 0,
            breaks: 0,
            symmetry: true,
            timeouts: false,
            dead: 0,
            touched: 0,
            deadline_from_reply: false,
            lost_by_all: false,
            others_kept: false,
            fresh_id: false,
            part_forgotten: false,
            no_careful: false,
            no_next: false,
        }
    }

    pub(crate) const fn cut(self, cut: Cut) -> Self {
        let fenced_work = self.rules.fenced_work || cut.fast_unqueued || cut.slot_unqueued;
        Self { rules: Rules { fenced_work, cut, ..self.rules }, ..self }
    }

    /// Everybody may do fenced work once.
    pub(crate) const fn at_work(self) -> Self {
        Self { rules: Rules { fenced_work: true, ..self.rules }, works: 1, ..self }
    }
}

impl Model for Config {
    type State = State;

    fn first(&self) -> State {
        let (losses, crashes, breaks) = (self.losses, self.crashes, self.breaks);
        let mut state = State { losses, crashes, breaks, ..State::default() };
        for (client, set) in state.clients.iter_mut().zip(self.sets) {
            client.acquires = if set == 0 { 0 } else { self.acquires };
            client.works = self.works;
        }
        state.clients[0].renewals = self.renewals;
        for key in members(self.dead | self.touched) {
            let touched = self.touched & (1 << key) != 0;
            state.tables.counters[usize::from(key)] = Counter { fence: 1, touched };
            state.tables.told[usize::from(key)] = 1 << 1;
            if self.dead & (1 << key) != 0 {
                state.tables.rows[usize::from(key)] =
                    Row { id: GHOST, fence: 1, expires: -TOLERANCE, unheard: false };
            }
        }
        state
    }

    fn events(&self, state: &State, out: &mut Vec<Event<State>>) {
        let start = out.len();
        for at in 0..state.tables.txs.len() {
            if !state.tables.txs[at].is_free() {
                self.transaction(state, at, out);
            }
        }
        let mut found = Vec::new();
        for owner in 0..u8::try_from(CLIENTS).expect("few clients") {
            self.client(state, owner, &mut found);
            let id = state.clients[usize::from(owner)].id;
            out.extend(found.drain(..).map(|(label, state, fault)| Event {
                client: Some(owner),
                id,
                label: label.into(),
                state,
                fault,
            }));
        }
        Self::world(state, out);
        if self.rules.slots {
            for event in &mut out[start..] {
                self.note_unavailable(&mut event.state);
            }
        }
    }

    fn check(&self, state: &State) -> Option<&'static str> {
        let tables = &state.tables;
        for client in state.clients.iter().filter(|client| client.believes() && !client.broken) {
            for key in members(client.keys) {
                let (row, fence) = (tables.rows[usize::from(key)], client.fences[usize::from(key)]);
                if row.id != client.id || row.fence != fence {
                    return Some(UNKNOWN);
                }
                if client.deadline > row.expires {
                    return Some(TOO_LONG);
                }
            }
        }
        if self.rules.slots {
            let holders = state.clients.iter().filter(|client| client.believes()).count();
            let twice = |row: &Row| row.id != 0 && row.id != GHOST;
            let permits_of = |id| tables.rows.iter().filter(|row| row.id == id).count();
            if holders > self.limit {
                return Some(TOO_MANY);
            }
            if tables.rows.iter().any(|row| twice(row) && permits_of(row.id) > 1) {
                return Some(TWO_PERMITS);
            }
        }
        for (row, counter) in tables.rows.iter().zip(&tables.counters) {
            if row.fence > counter.fence {
                return Some("3: a counter is behind its row");
            }
            if row.is_live() && row.id != GHOST && !row.unheard {
                let at = usize::from((row.id - 1) / IDS);
                let owner = &state.clients[at];
                if !owner.tracks(row.id) && owner.phase != Phase::Crashed && !self.foreign[at] {
                    return Some(ORPHAN);
                }
            }
        }
        tables.is_deadlocked(&self.rules, |tx| also(tables, tx)).then_some(DEADLOCK)
    }

    fn representative(&self, mut state: State) -> State {
        state.tables.tidy();
        if self.symmetry && self.sets[0] == self.sets[1] && self.foreign[0] == self.foreign[1] {
            let other = state.exchanged();
            return if other < state { other } else { state };
        }
        state
    }

    fn is_orphaned(&self, state: &State) -> bool {
        state.tables.rows.iter().any(|row| {
            row.is_live() && row.unheard && !state.clients.iter().any(|client| client.tracks(row.id))
        })
    }

    fn named(&self) -> Self {
        Self { symmetry: false, ..*self }
    }

    fn describe(&self, state: &State) -> String {
        let mut text = state.tables.to_string();
        for client in state.clients.iter().filter(|client| client.phase != Phase::Idle) {
            let _ =
                write!(text, "; {:?} {} {:b} for {}", client.phase, client.id, client.keys, client.deadline);
        }
        text
    }
}
