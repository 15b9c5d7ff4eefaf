//! The clients, the network between them and the server, and the calamities.
//!
//! A pause needs no action of its own: whoever does not act while the clock ticks is paused.

use crate::config::{Config, Kind};
use crate::server::{self, Stepped};
use crate::state::{Client, Ear, IDS, JUMP, Outcome, Pc, Phase, State, TTL, Tx};

type Event = crate::explore::Event<State>;

/// Everything that can happen next.
pub(crate) fn events(config: &Config, state: &State, out: &mut Vec<Event>) {
    for at in 0..state.txs.len() {
        if !state.txs[at].is_free() {
            transaction(config, state, at, out);
        }
    }
    for owner in 0..config.clients {
        if state.clients[owner].phase != Phase::Crashed {
            caller(config, state, owner, out);
            worker(config, state, owner, out);
        }
    }
    world(config, state, out);
}

fn transaction(config: &Config, state: &State, at: usize, out: &mut Vec<Event>) {
    let tx = state.txs[at];
    let mut push = |(label, state, fault): Stepped| {
        out.push(Event { client: Some(tx.owner), id: tx.id, label: label.into(), state, fault });
    };
    let heard = tx.ear != Ear::Nobody;
    let answered = matches!(tx.pc, Pc::Between | Pc::Done);
    match server::step(config, state, at) {
        Some(stepped) => push(stepped),
        None if heard && !answered && config.timeouts => {
            let mut next = *state;
            next.txs[at].end(Outcome::Refused);
            push(("waits too long: lock_timeout", next, None));
        }
        None => {}
    }
    if tx.pc == Pc::TryQueue && tx.seen_counter {
        // The end of a fenced transaction is no reason for its mark to go.
        let mut next = *state;
        next.txs[at].end(Outcome::Nothing);
        push(("finds a counter that somebody had locked once", next, None));
    }
    if !heard {
        let mut next = *state;
        next.txs[at] = Tx::default();
        push(("is rolled back: its connection is gone", next, None));
        return;
    }
    if answered {
        push(answer(config, state, at));
    }
    if state.losses > 0 {
        let mut next = *state;
        next.losses -= 1;
        lose(&mut next, at);
        push(("waits no longer: connection lost", next, None));
        // Only a server that loses what is not durable can tell the difference.
        if tx.pc == Pc::Commit && state.server_crashes > 0 {
            let (label, mut next, fault) = server::commit_visibly(config, state, at);
            next.losses -= 1;
            lose(&mut next, at);
            push((label, next, fault));
        }
    }
}

/// Sends the first message of a call.
fn send(state: &mut State, owner: usize, kind: Kind, two_messages: bool, ear: Ear, id: u8) {
    let slot = state.txs.iter_mut().find(|tx| tx.is_free()).expect("more transactions than slots");
    // Who extends says which grant is meant.
    let fence = if matches!(kind, Kind::Extend | Kind::Renew) { state.clients[owner].fence } else { 0 };
    let owner = u8::try_from(owner).expect("few clients");
    *slot = Tx { kind: Some(kind), two_messages, owner, ear, id, fence, ..Tx::default() };
}

fn idle(client: &mut Client) {
    let Client { deferred, acquires, extends, writes, .. } = *client;
    *client = Client { deferred, acquires, extends, writes, ..Client::default() };
}

/// The caller's thread.
fn caller(config: &Config, state: &State, owner: usize, out: &mut Vec<Event>) {
    let client = state.clients[owner];
    let name = u8::try_from(owner).ok();
    let mut push = |label: &'static str, state: State, id| {
        out.push(Event { client: name, id, label: label.into(), state, fault: None });
    };
    match client.phase {
        Phase::Idle if client.acquires > 0 => {
            for two_messages in config.forms() {
                let mut next = *state;
                let id = begin_acquire(config, &mut next, owner, two_messages);
                push(
                    if two_messages { "acquires, in two messages" } else { "acquires, in one message" },
                    next,
                    id,
                );
            }
        }
        // The message may arrive whenever it likes.
        Phase::Doubt => {
            for (label, next, id) in resolve(config, state, owner) {
                push(label, next, id);
            }
        }
        Phase::Holding => {
            for two_messages in config.forms() {
                let mut next = *state;
                let this = &mut next.clients[owner];
                (this.phase, this.deadline, this.doubted) = (Phase::Releasing, 0, false);
                let kind = if two_messages { Kind::Release } else { Kind::ReleaseLive };
                send(&mut next, owner, kind, two_messages, Ear::Caller, client.id);
                push(
                    if two_messages { "releases, in two messages" } else { "releases, in one message" },
                    next,
                    client.id,
                );
            }
            if client.believes() && client.writes > 0 {
                let mut next = *state;
                next.clients[owner].phase = Phase::Writing;
                next.clients[owner].writes -= 1;
                let kind = if config.mutation.unfenced { Kind::Unfenced } else { Kind::Fenced };
                send(&mut next, owner, kind, false, Ear::Caller, client.id);
                if let Some(tx) = next
                    .txs
                    .iter_mut()
                    .find(|tx| tx.kind == Some(kind) && tx.id == client.id && tx.fence == 0)
                {
                    tx.fence = client.fence;
                }
                push("checks that it holds, and goes to work", next, client.id);
            }
        }
        Phase::ReleaseDoubt => {
            let mut next = *state;
            next.clients[owner].phase = Phase::Releasing;
            send(&mut next, owner, Kind::ReleaseLive, false, Ear::Caller, client.id);
            push("releases again", next, client.id);
            let mut next = *state;
            next.clients[owner].defer(client.id, false);
            idle(&mut next.clients[owner]);
            push("leaves the release to the worker", next, client.id);
        }
        _ => {}
    }
}

fn begin_acquire(config: &Config, state: &mut State, owner: usize, two_messages: bool) -> u8 {
    let client = &mut state.clients[owner];
    let number = config.acquires - client.acquires;
    let id = u8::try_from(owner).expect("few clients") * IDS + number + 1;
    client.acquires -= 1;
    (client.phase, client.id, client.sent, client.doubted) = (Phase::Acquiring, id, TTL, false);
    let kind = if two_messages { Kind::Acquire } else { Kind::Absent };
    send(state, owner, kind, two_messages, Ear::Caller, id);
    id
}

/// After the lost answer to an acquire: ask again, or give up and tell that it is unknown.
fn resolve(config: &Config, state: &State, owner: usize) -> Vec<(&'static str, State, u8)> {
    let client = state.clients[owner];
    let mut ways = Vec::new();
    let mut next = *state;
    if config.mutation.fresh_id {
        if client.acquires > 0 {
            let id = begin_acquire(config, &mut next, owner, true);
            ways.push(("acquires again, with another id", next, id));
        }
    } else if config.mutation.resolve_by_reading {
        next.clients[owner].phase = Phase::Acquiring;
        send(&mut next, owner, Kind::Read, false, Ear::Caller, client.id);
        ways.push(("reads what became of it", next, client.id));
    } else {
        next.clients[owner].phase = Phase::Acquiring;
        send(&mut next, owner, Kind::Acquire, true, Ear::Caller, client.id);
        ways.push(("acquires again, with the same id", next, client.id));
    }
    let mut next = *state;
    if !config.mutation.no_deferred_release {
        next.clients[owner].defer(client.id, true);
    }
    idle(&mut next.clients[owner]);
    ways.push(("is told: unknown", next, client.id));
    ways
}

/// The worker's thread: renewals, and releases of what was left to it.
fn worker(config: &Config, state: &State, owner: usize, out: &mut Vec<Event>) {
    let client = state.clients[owner];
    let busy = state.txs.iter().any(|tx| tx.ear == Ear::Worker && usize::from(tx.owner) == owner);
    if busy {
        return;
    }
    let name = u8::try_from(owner).ok();
    let mut push = |label: &'static str, state: State, id| {
        out.push(Event { client: name, id, label: label.into(), state, fault: None });
    };
    for deferred in client.deferred.iter().filter(|deferred| deferred.id != 0) {
        let mut next = *state;
        send(&mut next, owner, Kind::ReleaseLive, false, Ear::Worker, deferred.id);
        push("'s worker releases", next, deferred.id);
    }
    if client.believes() && client.extends > 0 {
        let extends = config.forms().map(|form| (Kind::Extend, form, "extends"));
        for (kind, two_messages, label) in
            [(Kind::Renew, false, "'s worker renews")].into_iter().chain(extends)
        {
            let mut next = *state;
            next.clients[owner].extends -= 1;
            next.clients[owner].extend_sent = TTL;
            send(&mut next, owner, kind, two_messages, Ear::Worker, client.id);
            push(label, next, client.id);
        }
    }
}

/// An answer arrives.
fn answer(config: &Config, state: &State, at: usize) -> Stepped {
    let mut next = *state;
    let tx = next.txs[at];
    if tx.pc == Pc::Between && !matches!(tx.out, Outcome::Locked | Outcome::NotHeld | Outcome::Stale) {
        next.txs[at].pc = Pc::SentAgain;
        return ("has the first answer and sends the second message", next, None);
    }
    next.txs[at] = Tx::default();
    if tx.out == Outcome::Nothing {
        let kind = if tx.kind == Some(Kind::Absent) { Kind::Acquire } else { Kind::Release };
        send(&mut next, usize::from(tx.owner), kind, false, tx.ear, tx.id);
        return ("is told: nothing was changed, and sends the careful statement", next, None);
    }
    let client = &mut next.clients[usize::from(tx.owner)];
    let mut fault = None;
    let label = match (tx.kind.unwrap_or_default(), tx.ear) {
        (Kind::Acquire | Kind::Absent | Kind::Read, _) => return acquired(config, next, tx),
        (Kind::Extend, Ear::Caller) => {
            if tx.out == Outcome::Extended && client.extend_sent > 0 {
                (client.phase, client.deadline, client.sent) = (Phase::Holding, client.extend_sent, 0);
            } else {
                if tx.out != Outcome::NotHeld {
                    client.defer(tx.id, false);
                }
                idle(client);
            }
            "has the answer to its first extend"
        }
        (Kind::Extend | Kind::Renew, _) => {
            if client.id == tx.id && client.believes() {
                match tx.out {
                    Outcome::Extended => client.deadline = client.deadline.max(client.extend_sent),
                    Outcome::NotHeld => {
                        // Nobody else can have ended it before its time.
                        fault = (!state.jumped).then_some("5: a holder in its time is told NotHeld");
                        client.deadline = 0;
                    }
                    Outcome::Stale => client.deadline = 0,
                    _ => {}
                }
            }
            match tx.out {
                Outcome::Extended => "is told: extended",
                Outcome::NotHeld => "is told: not held",
                Outcome::Stale => "is told: granted again since",
                _ => "is told: nothing new",
            }
        }
        (Kind::Release | Kind::ReleaseLive, Ear::Worker) => {
            let deferred = client.deferred.iter().find(|deferred| deferred.id == tx.id);
            let wait = deferred.is_some_and(|deferred| deferred.may_arrive) && tx.out == Outcome::NotHeld;
            if tx.out != Outcome::Refused && !wait {
                client.settle(tx.id);
            }
            "'s worker has its answer"
        }
        (Kind::Release | Kind::ReleaseLive, _) => {
            match (tx.out, client.doubted) {
                (Outcome::Refused, true) => client.phase = Phase::ReleaseDoubt,
                (Outcome::Refused, false) => {
                    client.defer(tx.id, false);
                    idle(client);
                }
                _ => idle(client),
            }
            "has the answer to its release"
        }
        (Kind::Fenced | Kind::Unfenced, _) => {
            client.phase = Phase::Holding;
            "is back from work"
        }
    };
    (label, next, fault)
}

fn acquired(config: &Config, mut next: State, tx: Tx) -> Stepped {
    let owner = usize::from(tx.owner);
    let client = &mut next.clients[owner];
    let mut fault = None;
    let label = match tx.out {
        Outcome::Granted => {
            let bit = 1 << tx.fence;
            if next.told & bit != 0 {
                fault = Some("2: a fence is told twice");
            }
            next.told |= bit;
            client.fence = tx.fence;
            client.doubted = false;
            if config.mutation.deadline_from_reply {
                client.sent = TTL;
            }
            if client.sent > TTL / 2 {
                (client.phase, client.deadline, client.sent) = (Phase::Holding, client.sent, 0);
            } else {
                // Too little is left to be handed out as it is.
                (client.phase, client.extend_sent) = (Phase::Freshening, TTL);
                send(&mut next, owner, Kind::Extend, false, Ear::Caller, tx.id);
            }
            "is told: granted"
        }
        Outcome::Mine => {
            send(&mut next, owner, Kind::Acquire, true, Ear::Caller, tx.id);
            "is told: mine already, and asks to confirm it"
        }
        Outcome::Refused if client.doubted => {
            client.phase = Phase::Doubt;
            "is told: an error, and still does not know"
        }
        Outcome::Refused => {
            idle(client);
            "is told: an error, and nothing was changed"
        }
        _ => {
            idle(client);
            "is told: locked"
        }
    };
    (label, next, fault)
}

/// A client stops waiting for an answer; the message goes its own way.
fn lose(next: &mut State, at: usize) {
    let tx = next.txs[at];
    let unsure = tx.may_commit();
    next.txs[at].ear = Ear::Nobody;
    if tx.pc == Pc::Done {
        next.txs[at] = Tx::default();
    }
    let client = &mut next.clients[usize::from(tx.owner)];
    match (tx.kind.unwrap_or_default(), tx.ear) {
        (_, Ear::Worker | Ear::Nobody) => {}
        (Kind::Acquire | Kind::Absent | Kind::Read, _) => {
            if unsure || client.doubted {
                (client.phase, client.doubted) = (Phase::Doubt, true);
            } else {
                // The second message was never sent.
                idle(client);
            }
        }
        (Kind::Extend | Kind::Renew, _) => {
            client.defer(tx.id, false);
            idle(client);
        }
        (Kind::Release | Kind::ReleaseLive, _) => {
            if unsure || client.doubted {
                (client.phase, client.doubted) = (Phase::ReleaseDoubt, true);
            } else {
                client.defer(tx.id, false);
                idle(client);
            }
        }
        (Kind::Fenced | Kind::Unfenced, _) => client.phase = Phase::Holding,
    }
}

/// Time, clock jumps, crashes.
fn world(config: &Config, state: &State, out: &mut Vec<Event>) {
    let mut push = |client, label: &'static str, state| {
        out.push(Event { client, id: 0, label: label.into(), state, fault: None });
    };
    if let Some(mut next) = state.tick() {
        for client in &mut next.clients {
            for id in client.deferred.map(|deferred| if deferred.over == 0 { deferred.id } else { 0 }) {
                if id != 0 {
                    client.settle(id);
                }
            }
        }
        push(None, "the clocks tick", next);
    }
    if state.jumps > 0 {
        for (by, label) in
            [(-JUMP, "the server's clock jumps forward"), (JUMP, "the server's clock jumps back")]
        {
            let mut next = *state;
            next.shift(by);
            next.jumps -= 1;
            next.jumped = true;
            push(None, label, next);
        }
    }
    if state.client_crashes > 0 {
        for owner in 0..config.clients {
            if state.clients[owner].phase != Phase::Crashed {
                let mut next = *state;
                next.client_crashes -= 1;
                next.clients[owner] = Client { phase: Phase::Crashed, ..Client::default() };
                for tx in next.txs.iter_mut().filter(|tx| !tx.is_free() && usize::from(tx.owner) == owner) {
                    tx.ear = Ear::Nobody;
                    if tx.pc == Pc::Done {
                        *tx = Tx::default();
                    }
                }
                push(u8::try_from(owner).ok(), "crashes", next);
            }
        }
    }
    if state.server_crashes > 0 {
        let mut next = *state;
        next.server_crashes -= 1;
        next.db = next.durable;
        for at in 0..next.txs.len() {
            // An answer that is on its way arrives.
            if !next.txs[at].is_free() && next.txs[at].pc != Pc::Done {
                lose(&mut next, at);
                next.txs[at] = Tx::default();
            }
        }
        // The row of a release that did not reach the disk is back, and only waits for the ttl.
        next.db.row.unheard = true;
        next.durable = next.db;
        push(None, "the server crashes", next);
    }
}

/// What must hold in every state.
pub(crate) fn check(config: &Config, state: &State) -> Option<&'static str> {
    let row = state.db.row;
    if !state.jumped {
        if state.clients.iter().filter(|client| client.believes()).count() > 1 {
            return Some("1: two clients hold the key");
        }
        for client in state.clients.iter().filter(|client| client.believes()) {
            if row.id != client.id || row.fence != client.fence {
                return Some("1: a client holds a lease that the server does not know");
            }
            if client.deadline > row.expires {
                return Some("1: a client trusts its lease for longer than the server keeps it");
            }
        }
        if is_orphan(state) && (!row.unheard || config.no_orphans) {
            return Some("6: a live lease, and nobody looks after it");
        }
    }
    let counter_behind = row.fence > state.db.counter;
    counter_behind.then_some("2: the counter is behind the row")
}

/// A live lease of a client that is there and does not know of it.
pub(crate) fn is_orphan(state: &State) -> bool {
    let row = state.db.row;
    row.live_now() && {
        let owner = state.clients[usize::from((row.id - 1) / IDS)];
        owner.phase != Phase::Crashed && !owner.tracks(row.id)
    }
}
