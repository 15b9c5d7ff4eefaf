//! Messages that come late, or twice: one key, one guard, one other client that takes the key over as soon
//! as it may, and a channel that loses, delays and doubles whatever the guard sends. Every order of
//! all of them, for the rule of `docs/adr/0032`, and with each of its conditions taken out.

#![allow(clippy::trivially_copy_pass_by_ref)]

use crate::explore::{Event, Model};
use crate::{holds, run};

/// What an extend says, and what a guard makes of the answers.
#[derive(Clone, Copy)]
#[allow(clippy::struct_excessive_bools)] // Each is one condition.
struct Rule {
    /// Only whoever names the row's version may shorten it.
    by_version: bool,
    /// The expiry stands for the version.
    expiry_is_version: bool,
    /// The fence is compared.
    fence: bool,
    /// Every change writes, and so has a version of its own.
    always_writes: bool,
    /// Sending something shorter lowers the deadline at once.
    lowers: bool,
    /// The least ttl of overlapping calls counts.
    least: bool,
    /// A release compares the lock id.
    release_by_id: bool,
}

const RULE: Rule = Rule {
    by_version: true,
    expiry_is_version: false,
    fence: true,
    always_writes: true,
    lowers: true,
    least: true,
    release_by_id: true,
};

/// How much of everything there is.
#[derive(Clone, Copy)]
struct Size {
    calls: u8,
    until: i8,
    overlapping: bool,
    broken: bool,
}

const TOLERANCE: i8 = 1;
/// The ttl of the grant and of renewals; extends take a longer or a much shorter one.
const TTL: i8 = 4;
const TTLS: [i8; 3] = [TTL, 1, 3];

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Message {
    /// Known version, known expiry, ttl.
    Extend(u8, i8, i8),
    Acquire,
    Confirm,
    Release,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Row {
    mine: bool,
    fence: u8,
    expires: i8,
    version: u8,
}

/// A call under way: its number, when it was sent, the least ttl so far, its ttl, its message if
/// that has not arrived yet, its answer if that has not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Flight {
    sent: i8,
    ttl: i8,
    least: i8,
    message: Option<Message>,
    answer: Option<Answer>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Answer {
    Gone,
    /// Expiry and version, and whether the lock had been broken by then.
    Extended(i8, u8, bool),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    now: i8,
    row: Option<Row>,
    next_version: u8,
    counter: u8,
    /// Of the guard, and whether it has let go.
    deadline: i8,
    over: bool,
    known: (u8, i8),
    calls: u8,
    late: Vec<Message>,
    flights: Vec<Flight>,
    broken: bool,
    /// Until when the other client trusts its lease; 0: not.
    other_until: i8,
    /// The guard had an answer since.
    answered_since: bool,
}

impl State {
    fn first() -> Self {
        Self {
            now: 0,
            row: Some(Row { mine: true, fence: 1, expires: TTL, version: 1 }),
            next_version: 2,
            counter: 1,
            deadline: TTL,
            over: false,
            known: (1, TTL),
            calls: 0,
            late: Vec::new(),
            flights: Vec::new(),
            broken: false,
            other_until: 0,
            answered_since: false,
        }
    }

    fn holds(&self) -> bool {
        !self.over && self.now < self.deadline
    }

    fn write(&mut self, row: Row) {
        self.row = Some(Row { version: self.next_version, ..row });
        self.next_version += 1;
    }

    /// The server carries a message out.
    fn carry_out(&mut self, rule: &Rule, message: Message) -> Answer {
        let now = self.now;
        let live = self.row.filter(|row| row.expires + TOLERANCE > now);
        let mine = live.filter(|row| row.mine);
        match message {
            Message::Extend(version, expires, ttl) => {
                let Some(row) = mine.filter(|row| !rule.fence || row.fence == 1) else { return Answer::Gone };
                let replaces = !rule.by_version
                    || if rule.expiry_is_version { row.expires == expires } else { row.version == version };
                let end = if replaces { now + ttl } else { row.expires.max(now + ttl) };
                if rule.always_writes || end != row.expires {
                    self.write(Row { expires: end, ..row });
                }
                self.row.map_or(Answer::Gone, |row| Answer::Extended(row.expires, row.version, self.broken))
            }
            Message::Acquire => {
                if live.is_none() {
                    self.counter += 1;
                    self.write(Row { mine: true, fence: self.counter, expires: now + TTL, version: 0 });
                }
                Answer::Gone
            }
            Message::Confirm => {
                if let Some(row) = mine {
                    self.write(row);
                }
                Answer::Gone
            }
            Message::Release => {
                if live.is_some_and(|row| row.mine || !rule.release_by_id) {
                    self.row = None;
                }
                Answer::Gone
            }
        }
    }

    /// The guard hears the answer to a call.
    fn hear(&mut self, rule: &Rule, flight: &Flight, answer: Answer) {
        if self.now >= self.deadline {
            self.over = true; // too late to be believed
        }
        match answer {
            _ if self.over => {}
            Answer::Gone => self.over = true,
            Answer::Extended(expires, version, broken) => {
                let ttl = if rule.least { flight.least } else { flight.ttl };
                self.deadline = self.deadline.max(flight.sent + ttl);
                self.known = (version, expires);
                self.answered_since |= broken;
            }
        }
    }

    fn wrong(&self) -> Option<&'static str> {
        if self.now < self.other_until && self.row.is_none_or(|row| row.mine) {
            return Some("another client's lease is ended");
        }
        if !self.holds() || (self.broken && !self.answered_since) {
            return None; // whoever is broken hears of it with its next call
        }
        match self.row {
            Some(row) if row.mine && row.fence == 1 => (row.expires < self.deadline).then_some(TOO_LONG),
            Some(Row { mine: false, .. }) => Some("two holders"),
            _ => Some("a guard trusts a lease that is not the one it was granted"),
        }
    }
}

/// Every way in which a call may begin and go on; the label tells which.
fn call(rule: &Rule, size: &Size, state: &State, ttl: i8, out: &mut Vec<(String, State)>) {
    let mut sent = state.clone();
    sent.calls += 1;
    if rule.lowers {
        sent.deadline = sent.deadline.min(sent.now + ttl);
    }
    let message = Message::Extend(state.known.0, state.known.1, ttl);
    let mut least = ttl;
    for other in &mut sent.flights {
        least = least.min(other.ttl);
        other.least = other.least.min(ttl);
    }
    let flight = Flight { sent: state.now, ttl, least, message: None, answer: None };
    let mut push = |what: &str, state: State| out.push((format!("extend({ttl}) {what}"), state));
    // Not carried out yet, and perhaps never.
    let mut lost = sent.clone();
    lost.late.push(message);
    push("gets no answer, its message is late", lost);
    // Carried out; a second copy of it may be under way.
    for doubled in [false, true] {
        let mut done = sent.clone();
        let answer = done.carry_out(rule, message);
        if doubled {
            done.late.push(message);
        }
        push("is carried out, its answer is lost", done.clone());
        let mut heard = done.clone();
        heard.hear(rule, &flight, answer);
        push("is answered", heard);
        // What was outvoted is sent once more, with the version just answered.
        if let Answer::Extended(end, version, _) = answer
            && end > state.now + ttl
        {
            let again = Message::Extend(version, end, ttl);
            let mut late = done.clone();
            late.late.push(again);
            push("is outvoted and sent once more, which is late", late);
            let answer = done.carry_out(rule, again);
            done.hear(rule, &flight, answer);
            let mut copied = done.clone();
            copied.late.push(again);
            push("is outvoted, sent once more and answered", done);
            push("is outvoted, sent once more and answered, a copy is late", copied);
        }
    }
    if size.overlapping && sent.flights.len() < 2 {
        sent.flights.push(Flight { message: Some(message), ..flight });
        push("is under way", sent);
    }
}

fn steps(rule: &Rule, size: &Size, state: &State, out: &mut Vec<(String, State)>) {
    if state.now < size.until {
        out.push(("tick".into(), State { now: state.now + 1, ..state.clone() }));
    }
    if state.row.is_none_or(|row| row.expires + TOLERANCE <= state.now) && state.counter < 3 {
        let mut next = state.clone();
        next.counter += 1;
        next.other_until = state.now + TTL;
        next.write(Row { mine: false, fence: next.counter, expires: state.now + TTL, version: 0 });
        out.push(("another client is granted".into(), next));
    }
    if size.broken && !state.broken && state.row.is_some_and(|row| row.mine) && !state.over {
        let mut next = State { row: None, broken: true, ..state.clone() };
        next.late.push(Message::Acquire);
        out.push(("an operator breaks the lock; copies of the acquire are late".into(), next));
    }
    for (at, message) in state.late.iter().enumerate() {
        let mut next = state.clone();
        next.late.remove(at);
        next.carry_out(rule, *message);
        out.push((format!("a late {message:?} arrives"), next));
    }
    for at in 0..state.flights.len() {
        let mut next = state.clone();
        if let Some(message) = next.flights[at].message.take() {
            for doubled in [false, true] {
                let mut next = next.clone();
                next.flights[at].answer = Some(next.carry_out(rule, message));
                next.late.extend(doubled.then_some(message));
                out.push((format!("call {at}: {message:?} is carried out"), next));
            }
        } else if let Some(answer) = next.flights[at].answer {
            let flight = next.flights.remove(at);
            next.hear(rule, &flight, answer);
            out.push((format!("call {at}: the answer arrives"), next));
        }
    }
    if state.holds() && state.calls < size.calls {
        for ttl in TTLS {
            call(rule, size, state, ttl, out);
        }
        for (what, message) in
            [("releases", Message::Release), ("asks to confirm its grant", Message::Confirm)]
        {
            let mut next = State { calls: state.calls + 1, ..state.clone() };
            next.over |= message == Message::Release;
            next.late.push(message);
            let mut done = next.clone();
            out.push((format!("{what}, the message is late"), next));
            done.carry_out(rule, message);
            out.push((format!("{what}, and a copy is late"), done));
        }
    }
}

/// What nobody can tell apart is one state.
fn tidy(mut state: State) -> State {
    state.late.sort_unstable_by_key(|message| format!("{message:?}"));
    state.late.dedup(); // one copy more of the same message
    state
}

/// One rule, with as much of everything as a size says.
struct Guarded(Rule, Size);

impl Model for Guarded {
    type State = State;

    fn first(&self) -> State {
        State::first()
    }

    fn events(&self, state: &State, out: &mut Vec<Event<State>>) {
        let mut found = Vec::new();
        steps(&self.0, &self.1, state, &mut found);
        out.extend(found.into_iter().map(|(label, state)| Event {
            client: None,
            id: 0,
            label: label.into(),
            state,
            fault: None,
        }));
    }

    fn check(&self, state: &State) -> Option<&'static str> {
        state.wrong()
    }

    fn representative(&self, state: State) -> State {
        tidy(state)
    }

    fn named(&self) -> Self {
        Self(self.0, self.1)
    }

    fn describe(&self, state: &State) -> String {
        format!("{state:?}")
    }
}

const SMALL: Size = Size { calls: 2, until: 5, overlapping: true, broken: true };
const APART: Size = Size { calls: 3, until: 5, overlapping: false, broken: false };

#[track_caller]
fn is_caught(name: &str, rule: Rule, expected: &str) {
    let name = format!("late copies, {name}");
    let found = [SMALL, APART].into_iter().find_map(|size| run(&name, &Guarded(rule, size)).violation);
    let violation = found.unwrap_or_else(|| panic!("{name}: nothing is wrong"));
    assert_eq!(violation.what, expected, "{}", violation.trace);
}

const TOO_LONG: &str = "a guard trusts its lease for longer than the row lasts";

#[test]
fn late_and_doubled_copies_never_make_a_guard_trust_too_long() {
    for (name, size) in [("two calls, overlapping", SMALL), ("three calls, one after the other", APART)] {
        holds(&format!("late copies, {name}"), &Guarded(RULE, size));
    }
}

#[test]
fn without_a_version_a_late_copy_shortens_what_is_trusted() {
    is_caught("no version", Rule { by_version: false, ..RULE }, TOO_LONG);
}

#[test]
fn the_expiry_is_no_version() {
    is_caught("the expiry as version", Rule { expiry_is_version: true, ..RULE }, TOO_LONG);
}

#[test]
fn without_the_fence_a_lease_that_was_broken_and_granted_again_is_taken_for_the_old_one() {
    is_caught(
        "no fence",
        Rule { fence: false, ..RULE },
        "a guard trusts a lease that is not the one it was granted",
    );
}

#[test]
fn without_the_least_ttl_of_overlapping_calls_a_guard_trusts_too_long() {
    is_caught("least ttl dropped", Rule { least: false, ..RULE }, TOO_LONG);
}

#[test]
fn a_deadline_that_is_not_lowered_when_a_shorter_ttl_is_sent_is_too_late() {
    is_caught("not lowered", Rule { lowers: false, ..RULE }, TOO_LONG);
}

#[test]
fn a_release_that_does_not_compare_the_id_ends_the_next_lease() {
    is_caught("release by key", Rule { release_by_id: false, ..RULE }, "another client's lease is ended");
}
