//! What one step of one client does.

use super::{BLOCKED, CLIENTS, Client, Config, DELAYED, JUMP, LIFE, MOST, PASSED, Phase, State, TTL, Ticket};

type Found = (String, State, Option<&'static str>);

impl Config {
    pub(super) fn time(&self, state: &State, out: &mut Vec<Found>) {
        if state.now < self.until {
            let mut next = State { now: state.now + 1, ..*state };
            for client in next.clients.iter_mut().filter(|client| client.phase == Phase::Holding) {
                // A lease that is over is let go.
                if next.row.is_none_or(|(_, until)| until <= next.now) {
                    client.phase = Phase::Gone;
                }
            }
            out.push(("tick".into(), next, None));
        }
        if state.jumps > 0 {
            let mut next = State { jumps: state.jumps - 1, offset: state.offset - JUMP, ..*state };
            for client in &mut next.clients {
                // Until it says so again.
                client.in_line = state.now;
            }
            out.push(("the clock is set back".into(), next, None));
        }
    }

    pub(super) fn act(&self, state: &State, at: usize, out: &mut Vec<Found>) {
        let phase = state.clients[at].phase;
        match phase {
            Phase::Idle => {
                let mut next = State { came: state.came + 1, ..*state };
                next.clients[at] =
                    Client { phase: Phase::Queued, asked: state.now, came: state.came, in_line: state.now };
                // Whoever stands before it in its process stands for it, too.
                for before in 0..CLIENTS {
                    let ticket = state.tickets[before].filter(|_| state.waits(before) && self.fair[at]);
                    let same = self.processes[before] == self.processes[at] && before != at;
                    if let Some(ticket) = ticket.filter(|_| same && self.before(&next, before, at)) {
                        next.clients[at].in_line = next.clients[at].in_line.max(ticket.written + LIFE);
                    }
                }
                out.push((format!("{at} asks"), next, None));
            }
            Phase::Queued | Phase::Waiting | Phase::Unsure if self.is_first(state, at) => {
                self.attempt(state, at, out);
                if phase == Phase::Waiting && self.fair[at] {
                    for latency in 0..=self.latency {
                        let mut next = *state;
                        self.announce(&mut next, at, latency);
                        out.push((format!("{at} says that it waits"), next, None));
                    }
                }
            }
            Phase::Holding => {
                let mut next = *state;
                next.row = next.row.filter(|(holder, _)| usize::from(*holder) != at);
                next.clients[at].phase = Phase::Gone;
                out.push((format!("{at} lets go"), next, None));
            }
            Phase::Leaving => {
                let mut next = *state;
                next.clients[at].phase = Phase::Gone;
                if !self.cut.leaver_keeps {
                    next.tickets[at] = None;
                }
                // The next one has to be in line by itself first.
                let heir = self.queue(state, at).first().copied();
                if heir.is_none_or(|heir| state.tickets[heir].is_some()) || self.cut.leaver_first {
                    out.push((format!("the ticket of {at} is taken back"), next, None));
                }
            }
            _ => {}
        }
        if state.leaves > 0 && matches!(phase, Phase::Queued | Phase::Waiting) {
            let mut next = State { leaves: state.leaves - 1, ..*state };
            let leaving = state.tickets[at].is_some();
            next.clients[at].phase = if leaving { Phase::Leaving } else { Phase::Gone };
            out.push((format!("{at} gives up"), next, None));
        }
        if state.deaths > 0 && !matches!(phase, Phase::Idle | Phase::Gone | Phase::Dead) {
            let mut next = State { deaths: state.deaths - 1, ..*state };
            // A process, and all that it has.
            for other in (0..CLIENTS).filter(|other| self.processes[*other] == self.processes[at]) {
                next.clients[other].phase = Phase::Dead;
            }
            out.push((format!("the process of {at} dies"), next, None));
        }
    }

    /// Writes a ticket, or refreshes it: it may become older, and never younger.
    fn announce(&self, state: &mut State, at: usize, latency: i8) {
        let since = self.calculated(state, at, latency);
        let expires = state.clock() + LIFE;
        let kept = state.tickets[at]
            .map_or(since, |old| if self.cut.keeps_since { old.since } else { old.since.min(since) });
        state.tickets[at] = Some(Ticket { since: kept, expires, written: state.now });
        // Who is behind it in its process is in line by it.
        for other in self.queue(state, at) {
            state.clients[other].in_line = state.now + LIFE;
        }
    }

    fn attempt(&self, state: &State, at: usize, out: &mut Vec<Found>) {
        let first = state.clients[at].phase == Phase::Queued;
        let mut done = *state;
        if state.held() {
            let mine = state.row.is_some_and(|(holder, _)| usize::from(holder) == at);
            if mine && state.clients[at].phase == Phase::Unsure {
                done.clients[at].phase = Phase::Holding;
                let refused = self.cut.asks_anew && !self.ahead(state, at, 0).is_empty();
                if refused {
                    done.clients[at].phase = Phase::Waiting;
                }
                out.push((format!("{at} asks again, and has it"), done, None));
            } else {
                done.clients[at].phase = Phase::Waiting;
                for latency in 0..=self.latency {
                    let mut done = done;
                    self.put_in_line(&mut done, at, latency);
                    out.push((format!("{at} finds it held"), done, None));
                }
            }
            return;
        }
        for latency in 0..=self.latency {
            let asks = self.fair[at] || self.cut.all_yield;
            let yields = asks && !self.cut.no_yield && !(first && self.cut.first_passes);
            let ahead = if yields { self.ahead(state, at, latency) } else { Vec::new() };
            if !ahead.is_empty() {
                let nobodys = |other: &&usize| **other == CLIENTS || !state.waits(**other);
                let written = |other: &usize| {
                    state.tickets.get(*other).copied().flatten().or(state.hostile).map_or(0, |t| t.written)
                };
                let barred = ahead.iter().filter(nobodys).any(|other| state.now > written(other) + MOST);
                let mut done = *state;
                done.clients[at].phase = Phase::Waiting;
                self.put_in_line(&mut done, at, latency);
                let fault = (barred && state.jumps == self.jumps).then_some(BLOCKED);
                let fault = if self.fair[at] { fault } else { Some(DELAYED) };
                out.push((format!("{at} yields to {ahead:?}"), done, fault));
                continue;
            }
            self.granted(state, at, out);
        }
    }

    /// A refused attempt is followed by a ticket at once.
    fn put_in_line(&self, state: &mut State, at: usize, latency: i8) {
        if self.fair[at] && state.tickets[at].is_none() {
            self.announce(state, at, latency);
        }
    }

    fn granted(&self, state: &State, at: usize, out: &mut Vec<Found>) {
        let mut done = *state;
        done.row = Some((u8::try_from(at).expect("few"), state.now + TTL));
        if !self.cut.grant_keeps {
            done.tickets[at] = None;
        }
        done.clients[at].phase = Phase::Holding;
        let queue = self.queue(&done, at);
        for other in queue.iter().filter(|_| self.fair[at]) {
            done.clients[*other].in_line = state.now + LIFE;
        }
        if let Some(next) = queue.first().filter(|_| self.fair[at] && !self.cut.no_next) {
            self.announce(&mut done, *next, 0);
        }
        let ahead = |other: &usize| {
            let (one, own) = (state.clients[*other], state.clients[at]);
            let in_line = self.fair[*other] && state.waits(*other) && one.in_line > state.now;
            let earlier = one.asked + self.latency < own.asked;
            let (its, mine) = (self.priorities[*other], self.priorities[at]);
            *other != at && in_line && (its > mine || its == mine && earlier)
        };
        let passed = self.fair[at] && (0..CLIENTS).any(|other| ahead(&other));
        let fault = passed.then_some(PASSED);
        out.push((format!("{at} is granted it"), done, fault));
        if state.lost > 0 {
            let mut lost = State { lost: state.lost - 1, ..done };
            lost.clients[at].phase = Phase::Unsure;
            out.push((format!("{at} is granted it, and does not hear of it"), lost, fault));
        }
    }
}
