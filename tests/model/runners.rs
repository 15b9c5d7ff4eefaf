//! Clients that run a job once per slot, the network between them and `once.rs`, and the calamities.

use std::fmt::Write as _;

use crate::explore::{Event, Model};
use crate::once::{
    CLIENTS, Client, Config, DONE_TWICE, EFFECTS, IDS, IN_ITS_TIME, Kind, NOT_MARKED, Outcome, Pc, Phase,
    SLOTS, State, Style, TTL, TWO_RUNS, Tx, UNTRUE,
};
use crate::state::TOLERANCE;

type Answered = (&'static str, State, Option<&'static str>);

impl Config {
    /// The closure begins, or has begun and goes on.
    fn runs(&self, next: &mut State, owner: usize) -> Option<&'static str> {
        let client = &mut next.clients[owner];
        client.phase = Phase::Running;
        let ran = &mut next.ran[usize::from(client.slot)];
        *ran = (*ran + 1).min(2);
        (self.style == Style::ClaimAtStart && *ran > 1).then_some(TWO_RUNS)
    }

    /// What ends a run whose closure was well.
    fn ends(&self, client: &Client) -> Kind {
        match self.style {
            Style::Finish if self.cut.deletes_first && !client.completed => Kind::Release,
            Style::CompleteIn if client.completed && !self.cut.end_writes => Kind::Verify,
            Style::Finish | Style::CompleteIn => Kind::Finish,
            Style::ClaimAtStart => Kind::Release,
        }
    }

    fn client(&self, state: &State, owner: usize, out: &mut Vec<Answered>) {
        let client = &state.clients[owner];
        let mut go = |phase, kind, label| {
            let mut next = *state;
            next.clients[owner].phase = phase;
            next.send(kind, owner);
            out.push((label, next, None));
        };
        match client.phase {
            Phase::Idle if client.runs > 0 => {
                let mut next = *state;
                let this = &mut next.clients[owner];
                let id = u8::try_from(owner).expect("few clients") * IDS + self.runs - client.runs + 1;
                (this.runs, this.id, this.sent) = (client.runs - 1, id, TTL);
                (this.phase, this.slot) = (Phase::Beginning, self.numbers[owner]);
                next.send(Kind::Begin, owner);
                out.push(("asks to begin", next, None));
            }
            Phase::BeginDoubt => go(Phase::Beginning, Kind::Begin, "asks to begin again, under the same id"),
            Phase::ClaimDoubt => go(Phase::Claiming, Kind::Claim, "claims again"),
            Phase::Running => {
                go(Phase::Finishing, self.ends(client), "is well, and ends its run");
                if self.style == Style::CompleteIn && !client.completed {
                    go(Phase::Completing, Kind::Complete, "completes its run in a transaction");
                }
            }
            Phase::FinishDoubt => go(Phase::Finishing, self.ends(client), "ends its run again"),
            _ => {}
        }
        if matches!(client.phase, Phase::BeginDoubt | Phase::ClaimDoubt | Phase::FinishDoubt) {
            let mut next = *state;
            idle(&mut next.clients[owner]);
            out.push(("is told: unknown", next, None));
        }
        let (held, busy) =
            (state.db.id == client.id && state.db.is_live(), state.txs.iter().any(|tx| tx.row));
        if client.renewals > 0 && client.deadline > 0 && held && !busy {
            let mut next = *state;
            (next.clients[owner].renewals, next.clients[owner].deadline, next.db.ends) =
                (client.renewals - 1, TTL, TTL);
            next.durable = next.db;
            out.push(("renews", next, None));
        }
    }

    fn answer(&self, state: &State, at: usize) -> Answered {
        let mut next = *state;
        let tx = next.txs[at];
        next.txs[at] = Tx::default();
        let owner = usize::from(tx.owner);
        let client = &mut next.clients[owner];
        match (tx.kind, tx.out) {
            (Kind::Begin, Outcome::Granted) if client.sent == 0 => {
                // Too late to be trusted.
                client.phase = Phase::Finishing;
                next.send(Kind::Release, owner);
                ("is told: granted, too late", next, None)
            }
            (Kind::Begin, Outcome::Granted) => {
                (client.deadline, client.sent) = (client.sent, 0);
                (client.slot, client.fence) = (tx.slot, tx.fence);
                if self.style != Style::ClaimAtStart || self.cut.begin_claims {
                    let fault = self.runs(&mut next, owner);
                    return ("is told to run", next, fault);
                }
                client.phase = Phase::Claiming;
                next.send(Kind::Claim, owner);
                if self.cut.runs_unclaimed {
                    let fault = self.runs(&mut next, owner);
                    return ("is told to run, and claims", next, fault);
                }
                ("is told to run, and claims first", next, None)
            }
            (Kind::Begin, out) => {
                idle(client);
                let untrue =
                    out == Outcome::AlreadyDone && state.db.mark < tx.slot && self.server_crashes == 0;
                ("is told: not now", next, untrue.then_some(UNTRUE))
            }
            (Kind::Claim, Outcome::Done) if client.phase == Phase::Claiming && client.deadline > 0 => {
                let fault = self.runs(&mut next, owner);
                ("has claimed its slot, and runs", next, fault)
            }
            (Kind::Claim, _) => {
                if client.phase == Phase::Claiming {
                    idle(client);
                }
                ("is told: not claimed in time", next, None)
            }
            (Kind::Complete, out) => {
                let fault = (out == Outcome::Refused && client.deadline > 0).then_some(IN_ITS_TIME);
                (client.phase, client.completed) = (Phase::Running, true);
                ("is back from its transaction", next, fault)
            }
            (Kind::Release, _)
                if self.cut.deletes_first && self.style == Style::Finish && client.deadline > 0 =>
            {
                client.completed = true;
                next.send(Kind::Finish, owner);
                ("has deleted its row, and marks", next, None)
            }
            (Kind::Release, _) => {
                idle(client);
                ("has the answer to its release", next, None)
            }
            _ => self.ended(next, tx),
        }
    }

    /// The answer to what ends a run: done, or an error that says that the job ran.
    fn ended(&self, mut next: State, tx: Tx) -> Answered {
        let client = &mut next.clients[usize::from(tx.owner)];
        let in_time = client.deadline > 0;
        let refused = tx.out == Outcome::Refused;
        let done = match tx.kind {
            Kind::Finish if !refused => true,
            // While the lease is trusted, nobody else can have marked this slot.
            _ => tx.marked && (in_time || self.cut.mark_is_ours),
        };
        let done = done || self.cut.ok_is_done;
        let fault = (tx.kind == Kind::Finish && in_time && !done).then_some(IN_ITS_TIME);
        let completed = client.completed && self.style == Style::CompleteIn;
        if !done && tx.kind == Kind::Verify {
            next.send(Kind::Release, usize::from(tx.owner));
            return ("is told: it ran, and is not marked as done; releases", next, None);
        }
        idle(client);
        if !done {
            return ("is told: it ran, and is not marked as done", next, fault);
        }
        let slot = usize::from(tx.slot);
        next.done[slot] += 1;
        let fault = fault
            .or((next.done[slot] > 1).then_some(DONE_TWICE))
            .or((next.db.mark < tx.slot).then_some(NOT_MARKED))
            .or((completed && next.db.effects[slot] != 1).then_some(EFFECTS));
        ("is told: done", next, fault)
    }

    fn lose(next: &mut State, at: usize) {
        let tx = next.txs[at];
        next.txs[at].heard = false;
        if tx.pc == Pc::Done {
            next.txs[at] = Tx::default();
        }
        let client = &mut next.clients[usize::from(tx.owner)];
        match tx.kind {
            Kind::Begin => client.phase = Phase::BeginDoubt,
            Kind::Claim if client.phase == Phase::Claiming => client.phase = Phase::ClaimDoubt,
            Kind::Finish | Kind::Verify => client.phase = Phase::FinishDoubt,
            Kind::Release => idle(client),
            // Whether its transaction was committed is not known; the run goes on.
            Kind::Complete => (client.phase, client.completed) = (Phase::Running, true),
            _ => {}
        }
    }

    fn transaction(&self, state: &State, at: usize, out: &mut Vec<Event<State>>) {
        let tx = state.txs[at];
        let mut push = |label: &'static str, state, fault| {
            out.push(Event { client: Some(tx.owner), id: tx.id, label: label.into(), state, fault });
        };
        let mut next = *state;
        if let Some((label, fault)) = next.step(self, at) {
            push(label, next, fault);
        }
        if tx.pc == Pc::Done {
            let (label, next, fault) = self.answer(state, at);
            push(label, next, fault);
        }
        if tx.pc == Pc::Open && tx.heard {
            let mut next = *state;
            let fault = next.commit(self, at);
            push("commits its effects", next, fault);
            let mut next = *state;
            next.txs[at] = Tx::default();
            let client = &mut next.clients[usize::from(tx.owner)];
            (client.phase, client.completed) = (Phase::Running, true);
            push("rolls its effects back", next, None);
        }
        if !tx.heard {
            let mut next = *state;
            next.txs[at] = Tx::default();
            push("is rolled back: its connection is gone", next, None);
        } else if state.losses > 0 {
            let mut next = *state;
            next.losses -= 1;
            Self::lose(&mut next, at);
            push("waits no longer: connection lost", next, None);
            if tx.pc == Pc::Open {
                let mut next = *state;
                next.losses -= 1;
                let fault = next.commit(self, at);
                Self::lose(&mut next, at);
                push("commits its effects, and has no answer", next, fault);
            }
        }
    }

    /// Time, crashes.
    fn world(state: &State, out: &mut Vec<Event<State>>) {
        let mut push = |client, label: &'static str, state| {
            out.push(Event { client, id: 0, label: label.into(), state, fault: None });
        };
        let mut next = *state;
        for db in [&mut next.db, &mut next.durable] {
            db.ends = if db.id == 0 { 0 } else { (db.ends - 1).max(-TOLERANCE - 1) };
        }
        for client in &mut next.clients {
            (client.sent, client.deadline) = ((client.sent - 1).max(0), (client.deadline - 1).max(0));
        }
        push(None, "the clocks tick", next);
        if state.slot < SLOTS {
            push(None, "the next slot begins", State { slot: state.slot + 1, ..*state });
        }
        for owner in 0..CLIENTS {
            let phase = state.clients[owner].phase;
            if state.crashes > 0 && !matches!(phase, Phase::Idle | Phase::Crashed) {
                let mut next = *state;
                next.crashes -= 1;
                next.clients[owner] = Client { phase: Phase::Crashed, ..Client::default() };
                for tx in next.txs.iter_mut().filter(|tx| usize::from(tx.owner) == owner) {
                    tx.heard = false;
                    if tx.pc == Pc::Done {
                        *tx = Tx::default();
                    }
                }
                push(u8::try_from(owner).ok(), "crashes", next);
            }
        }
        if state.server_crashes > 0 {
            let mut next = *state;
            next.server_crashes -= 1;
            next.db = next.durable;
            for at in 0..next.txs.len() {
                if next.txs[at].kind != Kind::None && next.txs[at].pc != Pc::Done {
                    if next.txs[at].heard {
                        Self::lose(&mut next, at);
                    }
                    next.txs[at] = Tx::default();
                }
            }
            push(None, "the server crashes", next);
        }
    }
}

fn idle(client: &mut Client) {
    let Client { runs, renewals, .. } = *client;
    *client = Client { runs, renewals, ..Client::default() };
}

impl Model for Config {
    type State = State;

    fn first(&self) -> State {
        let Self { losses, crashes, server_crashes, .. } = *self;
        let mut state = State { losses, crashes, server_crashes, slot: 1, ..State::default() };
        for client in &mut state.clients {
            (client.runs, client.renewals) = (self.runs, self.renewals);
        }
        state
    }

    fn events(&self, state: &State, out: &mut Vec<Event<State>>) {
        for at in 0..state.txs.len() {
            if state.txs[at].kind != Kind::None {
                self.transaction(state, at, out);
            }
        }
        let mut found = Vec::new();
        for owner in 0..CLIENTS {
            self.client(state, owner, &mut found);
            let (client, id) = (u8::try_from(owner).ok(), state.clients[owner].id);
            out.extend(found.drain(..).map(|(label, state, fault)| Event {
                client,
                id,
                label: label.into(),
                state,
                fault,
            }));
        }
        Self::world(state, out);
    }

    fn check(&self, state: &State) -> Option<&'static str> {
        let trusts = |client: &&Client| client.deadline > 0;
        state
            .clients
            .iter()
            .filter(trusts)
            .any(|client| state.db.id != client.id && client.phase == Phase::Running)
            .then_some("5: a run trusts a lease that the server does not know")
    }

    fn representative(&self, mut state: State) -> State {
        state.txs.sort_unstable();
        if self.symmetry && self.numbers[0] == self.numbers[1] {
            return state.exchanged().min(state);
        }
        state
    }

    fn named(&self) -> Self {
        Self { symmetry: false, ..*self }
    }

    fn describe(&self, state: &State) -> String {
        let db = state.db;
        let mut text = format!(
            "slot {}; row {} ends {}; mark {}; effects {:?}",
            state.slot,
            db.id,
            db.ends,
            db.mark,
            &db.effects[1..]
        );
        for client in state.clients.iter().filter(|client| client.phase != Phase::Idle) {
            let _ = write!(
                text,
                "; {:?} {} slot {} for {}",
                client.phase, client.id, client.slot, client.deadline
            );
        }
        for tx in state.txs.iter().filter(|tx| tx.kind != Kind::None) {
            let _ = write!(
                text,
                " [{:?} {} {:?}{}]",
                tx.kind,
                tx.id,
                tx.pc,
                if tx.heard { "" } else { ", given up" }
            );
        }
        text
    }
}
