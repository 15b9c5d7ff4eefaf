//! Tickets: whoever asks for it is served in order. Every order of attempts, announcements, releases, withdrawals and
//! ticks, with clients of one process that stand in its queue, clients that do not ask for their turn, that die, give
//! up, or miss an answer, a clock that is set back, and a ticket that nobody looks after: the rules of `docs/adr/0048`,
//! and each of them taken out. A message is one step.

#![allow(clippy::trivially_copy_pass_by_ref)]

mod rules;
mod steps;

use crate::explore::{Event, Model};

/// What is taken out of the rules.
#[derive(Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools)] // Each is one condition.
struct Cut {
    /// An attempt with a ticket does not look at the others,
    no_yield: bool,
    /// or the first one does not.
    first_passes: bool,
    /// A ticket is as old as its row, not as the wait.
    since_now: bool,
    /// A place is calculated anew for each attempt,
    own_calculated: bool,
    /// and two of one age yield to each other.
    no_ties: bool,
    /// Priorities do not count.
    no_priority: bool,
    /// Tickets do not end,
    no_end: bool,
    /// or end as late as they say.
    no_bound: bool,
    /// A grant leaves its ticket,
    grant_keeps: bool,
    /// and so does who gives up.
    leaver_keeps: bool,
    /// A grant does not put the next of its process in line,
    no_next: bool,
    /// and who gives up takes his ticket back before the next one has his.
    leaver_first: bool,
    /// After a lost answer one yields, too.
    asks_anew: bool,
    /// A ticket keeps its age, also when the clock was set back.
    keeps_since: bool,
    /// Also those yield who do not ask for their turn.
    all_yield: bool,
}

#[derive(Clone, Copy)]
struct Config {
    cut: Cut,
    until: i8,
    /// Of each client: its process, its priority, and whether it asks for its turn.
    processes: [u8; CLIENTS],
    priorities: [i8; CLIENTS],
    fair: [bool; CLIENTS],
    deaths: u8,
    leaves: u8,
    lost: u8,
    jumps: u8,
    /// By how much a calculated age may be wrong.
    latency: i8,
    /// A ticket stands that nobody looks after, and never ends.
    hostile: bool,
    /// At first the key is somebody else's.
    held: bool,
}

const CLIENTS: usize = 3;
/// How long a ticket lasts from its refreshment, and how long one can last at most.
const LIFE: i8 = 2;
const MOST: i8 = 3;
/// By how much the clock is set back.
const JUMP: i8 = 6;
/// How long a lease lasts, the tolerance included.
const TTL: i8 = 2;

const PASSED: &str = "1: a grant passes somebody in line who is ahead";
const STANDSTILL: &str = "2: the key is free, all wait, and nobody would be granted it";
const BLOCKED: &str = "3: a ticket of nobody's bars the key for longer than tickets last";
const OUTLIVES: &str = "4: a ticket outlives its wait";
const ORPHAN: &str = "5: a granted lease is told as refused";
const DELAYED: &str = "6: who did not ask for a turn waits for one";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Ticket {
    since: i8,
    expires: i8,
    /// When it was written, by no clock that is set.
    written: i8,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
enum Phase {
    #[default]
    Idle,
    /// In its process's queue, before its first attempt.
    Queued,
    /// It has been refused.
    Waiting,
    /// Its attempt was granted, and the answer lost.
    Unsure,
    Holding,
    /// It has given up, and its ticket is there.
    Leaving,
    Gone,
    Dead,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
struct Client {
    phase: Phase,
    asked: i8,
    /// The order within a process.
    came: u8,
    /// Until when it is in line, by itself or by who stands before it in its process.
    in_line: i8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct State {
    now: i8,
    /// What the server's clock is ahead by.
    offset: i8,
    /// Who has the key, and until when.
    row: Option<(u8, i8)>,
    tickets: [Option<Ticket>; CLIENTS],
    /// Of nobody's.
    hostile: Option<Ticket>,
    clients: [Client; CLIENTS],
    came: u8,
    deaths: u8,
    leaves: u8,
    lost: u8,
    jumps: u8,
}

impl State {
    fn clock(&self) -> i8 {
        self.now + self.offset
    }

    fn held(&self) -> bool {
        self.row.is_some_and(|(_, until)| until > self.now)
    }

    fn waits(&self, at: usize) -> bool {
        matches!(self.clients[at].phase, Phase::Queued | Phase::Waiting | Phase::Unsure)
    }
}

impl Config {
    /// Whether `one` comes before `other` in a process.
    fn before(&self, state: &State, one: usize, other: usize) -> bool {
        (-self.priorities[one], state.clients[one].came)
            < (-self.priorities[other], state.clients[other].came)
    }

    /// Who stands in the queue of a client's process, the first one first.
    fn queue(&self, state: &State, at: usize) -> Vec<usize> {
        let mine = |other: &usize| {
            self.processes[*other] == self.processes[at] && self.fair[*other] && state.waits(*other)
        };
        let mut queue: Vec<usize> = (0..CLIENTS).filter(mine).collect();
        queue.sort_by_key(|other| (-self.priorities[*other], state.clients[*other].came));
        queue
    }

    fn is_first(&self, state: &State, at: usize) -> bool {
        !self.fair[at] || self.queue(state, at).first() == Some(&at)
    }

    /// How old the wait is, as a client calculates it.
    fn calculated(&self, state: &State, at: usize, latency: i8) -> i8 {
        if self.cut.since_now { state.clock() } else { state.clients[at].asked + state.offset + latency }
    }

    fn is_live(&self, state: &State, ticket: &Ticket) -> bool {
        let clock = state.clock();
        (ticket.expires > clock || self.cut.no_end)
            && (ticket.expires <= clock + MOST || self.cut.no_bound || self.cut.no_end)
    }

    /// The tickets that an attempt yields to. `CLIENTS` is nobody's.
    fn ahead(&self, state: &State, at: usize, latency: i8) -> Vec<usize> {
        let cut = self.cut;
        let stored = state.tickets[at].filter(|_| !cut.own_calculated);
        let since = stored.map_or_else(|| self.calculated(state, at, latency), |own| own.since);
        let rank = |priority: i8| if cut.no_priority { 0 } else { -priority };
        let own = (rank(self.priorities[at]), since, at);
        let all = state.tickets.iter().enumerate().chain([(CLIENTS, &state.hostile)]);
        all.filter_map(|(other, ticket)| ticket.map(|ticket| (other, ticket)))
            .filter(|(other, ticket)| *other != at && self.is_live(state, ticket))
            .filter(|(other, ticket)| {
                let priority = self.priorities.get(*other).copied().unwrap_or(0);
                let its = (rank(priority), ticket.since, *other);
                if cut.no_ties { (its.0, its.1) <= (own.0, own.1) } else { its < own }
            })
            .map(|(other, _)| other)
            .collect()
    }

    fn wrong(&self, state: &State) -> Option<&'static str> {
        for at in 0..CLIENTS {
            let over = matches!(state.clients[at].phase, Phase::Holding | Phase::Idle | Phase::Gone);
            if over && state.tickets[at].is_some() {
                return Some(OUTLIVES);
            }
            let refused = matches!(state.clients[at].phase, Phase::Waiting | Phase::Queued);
            let mine =
                state.row.is_some_and(|(holder, until)| usize::from(holder) == at && until > state.now);
            if refused && mine {
                return Some(ORPHAN);
            }
        }
        if state.held() {
            return None;
        }
        let firsts: Vec<usize> =
            (0..CLIENTS).filter(|at| state.waits(*at) && self.is_first(state, *at)).collect();
        let stuck = |at: &usize| {
            (0..=self.latency).any(|latency| {
                let ahead = self.ahead(state, *at, latency);
                // Who is gone bars nobody for long: see BLOCKED.
                !ahead.is_empty() && ahead.iter().all(|other| firsts.contains(other))
            })
        };
        let all_fair = firsts.iter().all(|at| self.fair[*at]);
        if !firsts.is_empty() && all_fair && firsts.iter().all(stuck) {
            return Some(STANDSTILL);
        }
        None
    }
}

impl Model for Config {
    type State = State;

    fn first(&self) -> State {
        State {
            now: 0,
            offset: 0,
            row: self.held.then_some((9, 1)),
            tickets: [None; CLIENTS],
            hostile: self.hostile.then_some(Ticket { since: -9, expires: 99, written: -9 }),
            clients: [Client::default(); CLIENTS],
            came: 0,
            deaths: self.deaths,
            leaves: self.leaves,
            lost: self.lost,
            jumps: self.jumps,
        }
    }

    fn events(&self, state: &State, out: &mut Vec<Event<State>>) {
        let mut found = Vec::new();
        self.time(state, &mut found);
        for at in 0..CLIENTS {
            self.act(state, at, &mut found);
        }
        out.extend(found.into_iter().map(|(label, state, fault)| Event {
            client: None,
            id: 0,
            label: label.into(),
            state,
            fault,
        }));
    }

    fn check(&self, state: &State) -> Option<&'static str> {
        self.wrong(state)
    }

    fn representative(&self, mut state: State) -> State {
        for at in 0..CLIENTS {
            if !state.waits(at) {
                let phase = state.clients[at].phase;
                state.clients[at] = Client { phase, ..Client::default() };
            }
        }
        if !state.held() {
            state.row = None;
        }
        state
    }

    fn named(&self) -> Self {
        *self
    }

    fn describe(&self, state: &State) -> String {
        format!("{state:?}")
    }
}
