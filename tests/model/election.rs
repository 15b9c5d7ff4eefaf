//! Leader election: terms are the fences of a plain lease. A message is one step here; what the
//! statements of the lease do in finer parts is explored in `server.rs`.

use std::fmt::Write as _;

use crate::explore::{Event, Model};
use crate::state::{TOLERANCE, TTL, live};

const CLIENTS: usize = 2;
/// Lock ids per client.
const IDS: u8 = 3;
const LATE: usize = 2;

const TWO_LEADERS: &str = "1: two trust their terms";
pub(crate) const UNKNOWN: &str = "1: a leader trusts a term that the server does not know";
pub(crate) const TOO_LONG: &str = "1: a leader trusts its term for longer than the server keeps it";
pub(crate) const TERM_TWICE: &str = "2: a term is led twice, or after a newer one";
pub(crate) const OBSERVED: &str = "3: leader() does not name who leads by the server's clock";
pub(crate) const ORPHAN: &str = "4: a live lease, and nobody looks after it";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Message {
    Campaign(u8),
    /// Lock id and term.
    Renew(u8, u8),
    Resign(u8),
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Answer {
    /// The term.
    Granted(u8),
    Renewed,
    No,
}

/// A message under way, and its answer if it has been carried out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Flight {
    message: Message,
    answer: Option<Answer>,
    sent: i8,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
#[allow(clippy::struct_excessive_bools)] // Each says one thing.
pub(crate) struct Client {
    id: u8,
    term: u8,
    /// In the closure.
    leads: bool,
    /// How long the term is trusted; 0: not.
    deadline: i8,
    flight: Option<Flight>,
    /// An answer to this campaign was lost, and how long a grant of it would be trusted.
    doubted: bool,
    sent: i8,
    /// An id that is resigned until this is over, and whether it may still arrive.
    deferred: u8,
    over: i8,
    may_arrive: bool,
    campaigns: u8,
    ended: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) struct State {
    id: u8,
    fence: u8,
    ends: i8,
    /// Granted by a message that nobody waited for.
    unheard: bool,
    counter: u8,
    /// The newest term that was led.
    led: u8,
    clients: [Client; CLIENTS],
    late: [Option<Message>; LATE],
    losses: u8,
    crashes: u8,
}

#[derive(Clone, Copy)]
#[allow(clippy::struct_excessive_bools)] // Each is one independent mutation.
pub(crate) struct Config {
    pub(crate) campaigns: u8,
    pub(crate) losses: u8,
    pub(crate) crashes: u8,
    /// States that differ only in the clients' names are one.
    pub(crate) symmetry: bool,
    /// Who leads is told by a name that two processes share.
    pub(crate) shared_name: bool,
    pub(crate) deadline_from_answer: bool,
    /// A renewal without an answer counts as one; a term is trusted while its renewal is under way.
    pub(crate) failed_check_trusted: bool,
    pub(crate) trusted_while_renewing: bool,
    /// A term is trusted until its resignation is answered; and again if that fails.
    pub(crate) trusted_while_resigning: bool,
    pub(crate) leads_on: bool,
    /// A resignation without an answer is not repeated.
    pub(crate) resign_forgotten: bool,
    /// `Continue` calls the closure again under the same term.
    pub(crate) continue_keeps: bool,
    /// `leader()` goes by the observer's clock.
    pub(crate) observers_clock: bool,
}

pub(crate) const RULE: Config = Config {
    campaigns: 2,
    losses: 0,
    crashes: 0,
    symmetry: true,
    shared_name: false,
    deadline_from_answer: false,
    failed_check_trusted: false,
    trusted_while_renewing: false,
    trusted_while_resigning: false,
    leads_on: false,
    resign_forgotten: false,
    continue_keeps: false,
    observers_clock: false,
};

type Stepped = (&'static str, State, Option<&'static str>);

impl State {
    fn is_live(&self) -> bool {
        self.id != 0 && live(self.ends, 0)
    }

    fn carry_out(&mut self, message: Message, heard: bool) -> Answer {
        match message {
            // Its own id: written back as it is.
            Message::Campaign(id) if self.id == id => {
                self.unheard &= !heard;
                Answer::Granted(self.fence)
            }
            Message::Campaign(_) if self.is_live() => Answer::No,
            Message::Campaign(id) => {
                self.counter += 1;
                (self.id, self.fence, self.ends, self.unheard) = (id, self.counter, TTL, !heard);
                Answer::Granted(self.fence)
            }
            Message::Renew(id, fence) if self.id == id && self.fence == fence && self.is_live() => {
                self.ends = TTL;
                self.unheard |= !heard;
                Answer::Renewed
            }
            Message::Resign(id) if self.id == id && self.is_live() => {
                (self.id, self.fence, self.ends, self.unheard) = (0, 0, 0, false);
                Answer::No
            }
            _ => Answer::No,
        }
    }

    fn keep_late(&mut self, message: Message) {
        if self.late.contains(&Some(message)) {
            return;
        }
        *self.late.iter_mut().find(|late| late.is_none()).expect("few late messages") = Some(message);
    }

    /// The same state with the two clients' names exchanged.
    fn exchanged(&self) -> Self {
        let id = |id: u8| if id == 0 { 0 } else { (id - 1 + IDS) % (2 * IDS) + 1 };
        let message = |message| match message {
            Message::Campaign(of) => Message::Campaign(id(of)),
            Message::Renew(of, term) => Message::Renew(id(of), term),
            Message::Resign(of) => Message::Resign(id(of)),
        };
        let mut next = Self { id: id(self.id), late: self.late.map(|late| late.map(message)), ..*self };
        next.late.sort_unstable();
        next.clients.swap(0, 1);
        for client in &mut next.clients {
            (client.id, client.deferred) = (id(client.id), id(client.deferred));
            client.flight = client.flight.map(|flight| Flight { message: message(flight.message), ..flight });
        }
        next
    }

    fn send(&mut self, owner: usize, message: Message, sent: i8) {
        self.clients[owner].flight = Some(Flight { message, answer: None, sent });
    }
}

impl Client {
    fn resigned(&mut self, may_arrive: bool) {
        (self.deferred, self.over, self.may_arrive) = (self.id, TTL + TOLERANCE, may_arrive);
    }
}

impl Config {
    fn id(self, owner: usize, client: &Client) -> u8 {
        let number = self.campaigns - client.campaigns + 1;
        if self.shared_name { 1 } else { u8::try_from(owner).expect("few clients") * IDS + number }
    }

    /// The closure is left: first nothing is trusted any more, then the lease is given back.
    fn steps_down(self, next: &mut State, owner: usize) {
        let client = &mut next.clients[owner];
        client.leads = self.trusted_while_resigning;
        if !self.trusted_while_resigning && !self.leads_on {
            client.deadline = 0;
        }
        let message = Message::Resign(client.id);
        next.send(owner, message, 0);
    }

    fn client(self, state: &State, owner: usize, out: &mut Vec<Stepped>) {
        let client = &state.clients[owner];
        let mut next = *state;
        let this = &mut next.clients[owner];
        if client.leads && client.flight.is_none() {
            if self.continue_keeps {
                out.push(("Continue: leads again", next, Some(TERM_TWICE)));
                return;
            }
            self.steps_down(&mut next, owner);
            out.push(("Continue: steps down", next, None));
            let mut next = *state;
            next.clients[owner].ended = true;
            self.steps_down(&mut next, owner);
            out.push(("Break: hands over", next, None));
            if client.deadline > 0 {
                let mut next = *state;
                next.send(owner, Message::Renew(client.id, client.term), TTL);
                out.push(("renews", next, None));
            }
        } else if !client.leads && client.flight.is_none() && client.doubted {
            next.send(owner, Message::Campaign(client.id), client.sent);
            out.push(("campaigns again, under the same id", next, None));
        } else if !client.leads && client.flight.is_none() && client.campaigns > 0 && !client.ended {
            this.id = self.id(owner, client);
            (this.campaigns, this.sent) = (client.campaigns - 1, TTL);
            let message = Message::Campaign(this.id);
            next.send(owner, message, TTL);
            out.push(("campaigns", next, None));
        }
        if client.deferred != 0 {
            let mut next = *state;
            let gone = state.id == client.deferred;
            next.carry_out(Message::Resign(client.deferred), true);
            if gone || !client.may_arrive {
                next.clients[owner].deferred = 0;
            }
            out.push(("'s worker resigns", next, None));
        }
    }

    fn flight(self, state: &State, owner: usize, flight: Flight, out: &mut Vec<Stepped>) {
        let mut next = *state;
        if let Some(answer) = flight.answer {
            next.clients[owner].flight = None;
            let fault = self.told(&mut next, owner, flight, answer);
            out.push(("has its answer", next, fault));
        } else {
            let answer = next.carry_out(flight.message, true);
            next.clients[owner].flight = Some(Flight { answer: Some(answer), ..flight });
            out.push(("'s message is carried out", next, None));
            if state.losses > 0 {
                next.losses -= 1;
                next.keep_late(flight.message);
                out.push(("'s message is carried out, and a copy is late", next, None));
            }
        }
        if state.losses > 0 {
            let mut next = *state;
            next.losses -= 1;
            if flight.answer.is_none() {
                next.keep_late(flight.message);
            }
            next.clients[owner].flight = None;
            self.unknown(&mut next, owner, flight);
            out.push(("waits no longer: connection lost", next, None));
        }
    }

    fn told(self, next: &mut State, owner: usize, flight: Flight, answer: Answer) -> Option<&'static str> {
        let led = next.led;
        let client = &mut next.clients[owner];
        match (flight.message, answer) {
            (Message::Campaign(_), Answer::Granted(term)) => {
                client.doubted = false;
                let sent = if self.deadline_from_answer { TTL } else { client.sent };
                client.term = term;
                if sent == 0 {
                    self.steps_down(next, owner);
                    return None;
                }
                (client.leads, client.deadline, client.sent) = (true, sent, 0);
                next.led = term;
                return (term <= led).then_some(TERM_TWICE);
            }
            (Message::Campaign(_), _) => {
                // A copy of it may still arrive.
                if client.doubted {
                    client.resigned(true);
                }
                client.doubted = false;
            }
            (Message::Renew(..), Answer::Renewed) if client.deadline > 0 => {
                client.deadline = client.deadline.max(flight.sent);
            }
            (Message::Renew(..), _) => client.deadline = 0,
            (Message::Resign(_), _) => (client.leads, client.deadline) = (false, 0),
        }
        None
    }

    fn unknown(self, next: &mut State, owner: usize, flight: Flight) {
        let client = &mut next.clients[owner];
        match flight.message {
            Message::Campaign(_) => client.doubted = true,
            Message::Renew(..) if self.failed_check_trusted => client.deadline = TTL,
            // The term is trusted as long as before, and asked about again.
            Message::Renew(..) => {}
            Message::Resign(_) if self.leads_on => client.leads = true,
            Message::Resign(_) => {
                (client.leads, client.deadline) = (false, 0);
                if !self.resign_forgotten {
                    client.resigned(false);
                }
            }
        }
    }

    fn world(self, state: &State, out: &mut Vec<Event<State>>) {
        let mut push = |client, label: &'static str, state, fault| {
            out.push(Event { client, id: 0, label: label.into(), state, fault });
        };
        let mut next = *state;
        next.ends = if next.id == 0 { 0 } else { (next.ends - 1).max(-TOLERANCE - 1) };
        for client in &mut next.clients {
            let renewing = matches!(client.flight, Some(Flight { message: Message::Renew(..), .. }));
            if !(renewing && self.trusted_while_renewing) {
                client.deadline = (client.deadline - 1).max(0);
            }
            (client.sent, client.over) = ((client.sent - 1).max(0), (client.over - 1).max(0));
            if let Some(flight) = &mut client.flight {
                flight.sent = (flight.sent - 1).max(0);
            }
            if client.over == 0 {
                (client.deferred, client.may_arrive) = (0, false);
            }
        }
        push(None, "the clocks tick", next, None);
        for at in 0..LATE {
            let mut next = *state;
            if let Some(message) = next.late[at].take() {
                next.carry_out(message, false);
                push(None, "a late message arrives", next, None);
            }
        }
        for owner in 0..CLIENTS {
            let client = state.clients[owner];
            if state.crashes > 0 && (client.leads || client.flight.is_some()) {
                let mut next = *state;
                next.crashes -= 1;
                next.unheard |= [client.id, client.deferred].contains(&next.id);
                if let Some(Flight { message, answer: None, .. }) = client.flight {
                    next.keep_late(message);
                }
                next.clients[owner] = Client { campaigns: client.campaigns, ..Client::default() };
                push(u8::try_from(owner).ok(), "crashes, and is started again", next, None);
            }
        }
        // By the server's clock, or by one that is ahead of it.
        let now = if self.observers_clock { TTL + TOLERANCE } else { 0 };
        let named = (state.id != 0 && live(state.ends, now)).then_some(state.fence);
        let leads = state.clients.iter().find(|client| client.deadline > 0).map(|client| client.term);
        let wrong = (leads.is_some() && leads != named) || (named.is_some() && named != Some(state.counter));
        push(None, "an observer asks for the leader", *state, wrong.then_some(OBSERVED));
    }
}

impl Model for Config {
    type State = State;

    fn first(&self) -> State {
        let mut state = State { losses: self.losses, crashes: self.crashes, ..State::default() };
        for client in &mut state.clients {
            client.campaigns = self.campaigns;
        }
        state
    }

    fn events(&self, state: &State, out: &mut Vec<Event<State>>) {
        let mut found = Vec::new();
        for owner in 0..CLIENTS {
            if let Some(flight) = state.clients[owner].flight {
                self.flight(state, owner, flight, &mut found);
            }
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
        self.world(state, out);
    }

    fn check(&self, state: &State) -> Option<&'static str> {
        let trusting = || state.clients.iter().filter(|client| client.deadline > 0);
        if trusting().count() > 1 {
            return Some(TWO_LEADERS);
        }
        for client in trusting() {
            if client.id != state.id || client.term != state.fence {
                return Some(UNKNOWN);
            }
            if client.deadline > state.ends {
                return Some(TOO_LONG);
            }
        }
        let looks_after = |client: &Client| {
            client.deferred == state.id
                || (client.id == state.id && (client.leads || client.flight.is_some() || client.doubted))
        };
        let orphan = state.is_live() && !state.unheard && !state.clients.iter().any(looks_after);
        orphan.then_some(ORPHAN)
    }

    fn representative(&self, mut state: State) -> State {
        state.late.sort_unstable();
        if self.symmetry { state.exchanged().min(state) } else { state }
    }

    fn named(&self) -> Self {
        Self { symmetry: false, ..*self }
    }

    fn describe(&self, state: &State) -> String {
        let mut text =
            format!("row {} term {} ends {}, late {:?}", state.id, state.fence, state.ends, state.late);
        for client in &state.clients {
            let _ = write!(
                text,
                "; {} leads {} for {}, {:?}",
                client.id, client.leads, client.deadline, client.flight
            );
        }
        text
    }
}
