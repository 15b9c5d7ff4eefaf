//! Shared leases: the readers of a key are one row, and each of them is a member of it; writers take the
//! plain key beside them. Every order of the steps of joins, leaves, renewals, acquires and intents, with
//! clients that die, copies that come late and a lock that is broken: the rules of `docs/adr/0045`, and each of
//! them taken out.

#![allow(clippy::trivially_copy_pass_by_ref)]

mod rules;
mod steps;

use crate::explore::{Event, Model};

use steps::Step;

/// What is taken out of the rules.
#[derive(Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools)] // Each is one condition.
struct Cut {
    /// Making a group leaves the counter as it is.
    group_raises_none: bool,
    /// A join does not lengthen the group,
    join_raises_none: bool,
    /// and judges the group that its snapshot shows, without its lock.
    join_unlocked: bool,
    /// A leave is one statement: it looks at the members before it has the group's row,
    leave_in_one: bool,
    /// never has it before it decides,
    leave_unlocked: bool,
    /// counts members of every fence,
    counts_every_fence: bool,
    /// counts the dead,
    counts_dead: bool,
    /// leaves the group's end where it is,
    leaves_end: bool,
    /// and the dead where they are. It
    keeps_dead: bool,
    /// ends a group that came after it looked for one to lock,
    ends_unheld: bool,
    /// and deletes its member whatever became of that.
    deletes_any_fence: bool,
    /// A lease that is shortened leaves the group as it is,
    trims_none: bool,
    /// or lets it end with the members that its own snapshot shows.
    trims_in_one: bool,
    /// Readers pass every intent,
    no_yield: bool,
    /// or yield to the newer ones, too.
    yields_to_newer: bool,
    /// A grant leaves the intent.
    keeps_intent: bool,
    /// A batch raises the group by the last of its members,
    raises_by_last: bool,
    /// and does not compare the fence.
    renews_any_fence: bool,
    /// The deadline is counted from the answer.
    from_reply: bool,
}

/// How much of everything there is.
#[derive(Clone, Copy)]
struct Config {
    cut: Cut,
    until: i8,
    /// Acquires of each reader and of the writer.
    joins: u8,
    acquires: u8,
    asks: u8,
    /// The ttl of each reader: they may differ.
    ttls: [i8; READERS],
    renewals: u8,
    /// Extends by less than what is left.
    shortenings: u8,
    deaths: u8,
    breaks: u8,
    /// Messages that are carried out a second time, whenever.
    copies: u8,
}

const READERS: usize = 2;
const WRITER: usize = READERS;
/// By how much a group may last longer than its members.
const SLACK: i8 = 1;
const TTL: i8 = 1;
const SHORT: i8 = 1;
/// Long before anything begins.
const OVER: i8 = -9;
const TXS: usize = 4;

const TWO_KINDS: &str = "1: a reader and a writer trust their leases at once";
const TOO_LONG: &str = "2: a reader trusts its lease for longer than its group and its member last";
const FENCES: &str = "3: a reader's fence is not the newest, or not its own";
const STANDING: &str = "4: a group is left standing";
const PASSED: &str = "5: a reader passes an older intent";
const STARVED: &str = "5: a reader yields to an intent that is newer than its wait";
const INTENT: &str = "5: an intent outlives the wait of its writer";
const DEAD: &str = "6: who met a dead member left it";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Row {
    group: bool,
    fence: u8,
    expires: i8,
    /// Which insert it comes from.
    born: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Member {
    fence: u8,
    expires: i8,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Intent {
    since: i8,
    expires: i8,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
struct Database {
    row: Option<Row>,
    born: u8,
    counter: u8,
    members: [Option<Member>; READERS],
    intent: Option<Intent>,
}

fn live(expires: i8, now: i8) -> bool {
    crate::state::live(expires - now, 0)
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
enum Kind {
    #[default]
    Join,
    Leave,
    /// Of all readers that hold.
    Renew,
    /// Of one, to a ttl of [`SHORT`].
    Shorten,
    /// After it.
    Trim,
    Acquire,
    Release,
    Withdraw,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
enum Pc {
    #[default]
    Sent,
    /// Has its snapshot, and waits for the row.
    Seen,
    /// The careful join.
    Again,
    /// Decides without the row's lock.
    Decide,
    Commit,
}

/// A transaction, or the message that will begin it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
struct Tx {
    kind: Kind,
    pc: Pc,
    client: u8,
    /// Nobody waits for its answer.
    given_up: bool,
    sent: i8,
    since: i8,
    fence: u8,
    fences: [u8; READERS],
    seen: Option<Database>,
    locks: bool,
    /// What its commit makes of the database.
    next: Option<Database>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
enum Phase {
    #[default]
    Idle,
    Asking,
    Waiting,
    Holding,
    Letting,
    Dead,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
struct Client {
    phase: Phase,
    since: i8,
    fence: u8,
    deadline: i8,
    left: u8,
    /// How often it asks once more.
    asks: u8,
    /// Its lock was broken: it hears of that at its next renewal.
    broken: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct State {
    now: i8,
    db: Database,
    txs: [Option<Tx>; TXS],
    clients: [Client; READERS + 1],
    renewals: u8,
    shortenings: u8,
    deaths: u8,
    breaks: u8,
    copies: u8,
    /// The newest fence of a writer.
    written: u8,
}

impl State {
    fn holds(&self, at: usize) -> bool {
        self.clients[at].phase == Phase::Holding && self.now < self.clients[at].deadline
    }

    fn locked_by_another(&self, at: usize) -> bool {
        self.txs.iter().enumerate().any(|(other, tx)| other != at && tx.is_some_and(|tx| tx.locks))
    }

    fn send(&mut self, kind: Kind, client: usize) -> bool {
        let (now, from) = (self.now, self.clients[client]);
        let fences = [0, 1].map(|at| if self.holds(at) { self.clients[at].fence } else { 0 });
        let client = u8::try_from(client).expect("few clients");
        let (since, fence) = (from.since, from.fence);
        self.put(Tx { kind, client, sent: now, since, fence, fences, ..Tx::default() })
    }

    fn put(&mut self, tx: Tx) -> bool {
        let free = self.txs.iter_mut().find(|slot| slot.is_none());
        free.is_some_and(|slot| {
            *slot = Some(tx);
            true
        })
    }

    fn has_tx(&self, client: usize) -> bool {
        self.txs.iter().flatten().any(|tx| usize::from(tx.client) == client && !tx.given_up)
    }
}

impl Config {
    fn begin(state: &State, out: &mut Vec<(String, State)>) {
        for at in 0..=READERS {
            let client = state.clients[at];
            let writes = at == WRITER;
            if client.phase == Phase::Dead || state.has_tx(at) {
                continue;
            }
            let mut next = *state;
            let mut begin = |what: &str, kind: Kind, phase: Phase, mut next: State| {
                next.clients[at].phase = phase;
                if next.send(kind, at) {
                    out.push((format!("{at} {what}"), next));
                }
            };
            match client.phase {
                Phase::Idle if client.left > 0 => {
                    next.clients[at].left -= 1;
                    next.clients[at].since = state.now;
                    begin("asks", if writes { Kind::Acquire } else { Kind::Join }, Phase::Asking, next);
                }
                Phase::Waiting if client.asks > 0 => {
                    next.clients[at].asks -= 1;
                    begin("asks again", if writes { Kind::Acquire } else { Kind::Join }, Phase::Asking, next);
                }
                Phase::Holding => {
                    begin("lets go", if writes { Kind::Release } else { Kind::Leave }, Phase::Letting, next);
                }
                _ => {}
            }
        }
    }

    fn calamities(state: &State, out: &mut Vec<(String, State)>) {
        if state.renewals > 0 && (0..READERS).any(|at| state.holds(at)) {
            let mut next = State { renewals: state.renewals - 1, ..*state };
            if next.send(Kind::Renew, 0) {
                for slot in next.txs.iter_mut().flatten().filter(|tx| tx.kind == Kind::Renew) {
                    slot.given_up = true; // No client waits for it alone.
                }
                out.push(("a renewal of all".into(), next));
            }
        }
        for at in (0..READERS).filter(|at| state.shortenings > 0 && state.holds(*at) && !state.has_tx(*at)) {
            let mut next = State { shortenings: state.shortenings - 1, ..*state };
            if next.send(Kind::Shorten, at) {
                // Whatever becomes of the message: it may be carried out.
                next.clients[at].deadline = next.clients[at].deadline.min(state.now + SHORT);
                out.push((format!("{at} shortens its lease"), next));
            }
        }
        if state.deaths > 0 {
            for at in 0..=READERS {
                if matches!(state.clients[at].phase, Phase::Idle | Phase::Dead) {
                    continue;
                }
                let mut next = State { deaths: state.deaths - 1, ..*state };
                next.clients[at].phase = Phase::Dead;
                for tx in next.txs.iter_mut().flatten().filter(|tx| usize::from(tx.client) == at) {
                    tx.given_up = true;
                }
                out.push((format!("{at} dies"), next));
            }
        }
        if state.breaks > 0 && state.db.row.is_some() && !state.txs.iter().flatten().any(|tx| tx.locks) {
            let mut next = State { breaks: state.breaks - 1, ..*state };
            next.db.row = None;
            next.db.counter += 1;
            next.clients.iter_mut().for_each(|client| client.broken = true);
            out.push(("the lock is broken".into(), next));
        }
        if state.copies > 0 {
            for tx in state.txs.iter().flatten().filter(|tx| tx.pc == Pc::Sent && tx.kind == Kind::Join) {
                let mut next = State { copies: state.copies - 1, ..*state };
                if next.put(Tx { given_up: true, ..*tx }) {
                    out.push((format!("a copy of the {:?} of {} is under way", tx.kind, tx.client), next));
                }
            }
        }
    }

    fn wrong(state: &State) -> Option<&'static str> {
        let row = state.db.row;
        for at in (0..READERS).filter(|at| state.holds(*at)) {
            let client = state.clients[at];
            if client.broken {
                continue;
            }
            if state.holds(WRITER) && !state.clients[WRITER].broken {
                return Some(TWO_KINDS);
            }
            let member = state.db.members[at];
            let lasts = |expires: i8| expires >= client.deadline;
            if !row.is_some_and(|row| row.group && lasts(row.expires))
                || !member.is_some_and(|m| lasts(m.expires))
            {
                return Some(TOO_LONG);
            }
            if client.fence <= state.written
                || client.fence != state.db.counter
                || member.is_some_and(|m| m.fence != client.fence)
            {
                return Some(FENCES);
            }
        }
        let quiet = state.txs.iter().all(Option::is_none);
        if let Some(row) = row.filter(|row| quiet && row.group && live(row.expires, state.now)) {
            let of_group = |member: &&Member| member.fence == row.fence;
            let last = state.db.members.iter().flatten().filter(of_group).map(|member| member.expires).max();
            if last.is_none_or(|last| row.expires > last + SLACK) {
                return Some(STANDING);
            }
        }
        let waits = matches!(state.clients[WRITER].phase, Phase::Waiting | Phase::Asking | Phase::Dead);
        let over = state.db.intent.is_none_or(|intent| intent.expires <= state.now);
        if quiet && !waits && !over {
            return Some(INTENT);
        }
        // A writer's fence is above those of all readers before it.
        let writer = state.clients[WRITER];
        if state.holds(WRITER) && !writer.broken && writer.fence < state.db.counter {
            return Some(FENCES);
        }
        None
    }
}

impl Model for Config {
    type State = State;

    fn first(&self) -> State {
        let client = |left| Client { left, asks: self.asks, ..Client::default() };
        State {
            now: 0,
            db: Database::default(),
            txs: [None; TXS],
            clients: [client(self.joins), client(self.joins), client(self.acquires)],
            renewals: self.renewals,
            shortenings: self.shortenings,
            deaths: self.deaths,
            breaks: self.breaks,
            copies: self.copies,
            written: 0,
        }
    }

    fn events(&self, state: &State, out: &mut Vec<Event<State>>) {
        let mut found = Vec::new();
        if state.now < self.until {
            found.push(("tick".into(), State { now: state.now + 1, ..*state }));
        }
        Self::begin(state, &mut found);
        Self::calamities(state, &mut found);
        let event = |(label, state): (String, State), fault| Event {
            client: None,
            id: 0,
            label: label.into(),
            state,
            fault,
        };
        out.extend(found.into_iter().map(|found| event(found, None)));
        for at in 0..TXS {
            let Some(tx) = state.txs[at] else { continue };
            let step = Step { config: self, state: *state, at, tx, fault: None };
            out.extend(step.run().map(|(label, state, fault)| event((label, state), fault)));
        }
    }

    fn check(&self, state: &State) -> Option<&'static str> {
        Self::wrong(state)
    }

    fn representative(&self, mut state: State) -> State {
        for tx in state.txs.iter_mut().flatten() {
            if matches!(tx.pc, Pc::Commit) {
                tx.seen = None;
            }
            let alone = self.cut.leave_in_one || self.cut.leave_unlocked || tx.pc == Pc::Again;
            let waits = matches!(tx.kind, Kind::Join | Kind::Trim)
                || tx.kind == Kind::Leave && !alone
                || tx.kind == Kind::Shorten && !self.cut.trims_in_one;
            if let (true, Some(seen)) = (waits, &mut tx.seen) {
                // The row that it waits for, and the intent that it saw.
                let intent = seen.intent.filter(|_| tx.kind == Kind::Join);
                *seen = Database { row: seen.row, intent, ..Database::default() };
                if let Some(row) = &mut seen.row {
                    (row.fence, row.expires) = (0, 0);
                }
            }
            if tx.given_up && tx.kind != Kind::Renew {
                tx.sent = 0;
            }
            if !matches!(tx.kind, Kind::Join | Kind::Acquire) {
                tx.since = 0;
            }
            if tx.kind != Kind::Renew {
                tx.fences = [0; READERS];
            }
            if !matches!(tx.kind, Kind::Leave | Kind::Release | Kind::Shorten) {
                tx.fence = 0;
            }
        }
        for client in &mut state.clients {
            match client.phase {
                Phase::Idle | Phase::Dead => {
                    *client = Client {
                        phase: client.phase,
                        left: client.left,
                        asks: client.asks,
                        ..Client::default()
                    }
                }
                Phase::Asking | Phase::Waiting => {
                    (client.fence, client.deadline, client.broken) = (0, 0, false);
                }
                Phase::Holding => client.since = 0,
                Phase::Letting => (client.since, client.broken) = (0, false),
            }
            if client.phase == Phase::Dead {
                (client.left, client.asks) = (0, 0);
            }
        }
        if state.db.intent.is_some_and(|intent| intent.expires <= state.now) {
            state.db.intent = None;
        }
        state.txs.sort_unstable();
        state
    }

    fn named(&self) -> Self {
        *self
    }

    fn describe(&self, state: &State) -> String {
        format!("{state:?}")
    }
}
