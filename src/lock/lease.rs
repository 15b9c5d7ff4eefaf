//! One lease in its holder's hands: a state machine without I/O, threads or a clock of its own.
//!
//! What it answers is how long the holder may *trust* the lease. The server's expiry is never
//! looked at: it is bounded from below by what this process knows about its own clock.
//!
//! An operation (a renewal or an extend) that was sent at `s` with ttl `t` is carried out at `s` or
//! later, or never; once carried out, the server's expiry is at least `s + t`. Several operations
//! may be under way at once. One without an answer may still be carried out, whenever it likes, but it
//! names the version that it replaces: once another one was confirmed, it cannot shorten the lease any
//! more (`docs/adr/0032`). Hence:
//!
//! 1. `deadline` is never later than the server's expiry, whatever is under way.
//!    * Sending lowers it to `s + t`, if that is earlier: a *shorter* ttl may already be in force.
//!    * A confirmation raises it to `s + m`, where `m` is the least ttl of the confirmed operation and
//!      of all that overlapped with it: each of them may be carried out after it, and may have
//!      learnt its version.
//! 2. Lost is final: no confirmation, however late, brings a lost lease back. Whoever was told
//!    "not held" is never told "held" again.
//! 3. Ended (released, leaked, closed) is final, and is decided once: the first to end it acts.
//!    What arrives afterwards changes nothing and loses nothing.
//! 4. Nothing is held at or after `min(deadline, hold_until)`, ticked or not.
//! 5. At most one renewal is under way; none is due once the lease is lost or ended, nor at or after
//!    its end.
//! 6. The ttl of the last extend that was not certainly refused is the ttl of later renewals.

use std::time::Duration;

use crate::backend::{LostReason, Version};
use crate::lock::options::Heartbeat;
use crate::model::time::{Moment, TOLERANCE};

/// What a lease starts from.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    /// Just before the granted request was sent.
    pub(super) sent: Moment,
    pub(super) ttl: Duration,
    pub(super) expires_at_ms: i64,
    pub(super) version: Option<Version>,
    pub(super) heartbeat: Heartbeat,
    /// The end of `max_hold`.
    pub(super) hold_until: Moment,
}

/// What became of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Carried out.
    Confirmed { expires_at_ms: i64, version: Option<Version> },
    /// The lease is gone.
    Gone(LostReason),
    /// Its row was busy; certainly nothing was changed.
    Busy,
    /// An error; certainly nothing was changed.
    Refused,
    /// No answer: carried out, or not, or still to come.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Renewal,
    Extend,
}

/// An operation that was sent and not answered.
struct Flight {
    id: u32,
    kind: Kind,
    sent: Moment,
    ttl: Duration,
    /// The least ttl among this and all that overlapped with it.
    least: Duration,
    /// The deadline before this was sent, if sending lowered it and nothing overlapped since.
    undo: Option<Moment>,
}

/// What came of the last operation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    Given,
    /// The server refused to renew.
    Refused,
    None,
}

pub(super) struct Lease {
    deadline: Moment,
    hold_until: Moment,
    next_renewal: Moment,
    ttl: Duration,
    longest: Duration,
    heartbeat: Heartbeat,
    expires_at_ms: i64,
    /// What the next operation replaces. An older one does no harm: it only lengthens then.
    version: Option<Version>,
    lost: Option<LostReason>,
    ended: bool,
    last: Answer,
    /// When the last operation was sent that was confirmed.
    confirmed: Moment,
    /// Whether the next renewal must not share a call with others.
    alone: bool,
    next_flight: u32,
    flights: Vec<Flight>,
}

impl Lease {
    pub(super) fn new(terms: &Terms) -> Self {
        let mut lease = Self {
            deadline: terms.sent.after(terms.ttl),
            hold_until: terms.hold_until,
            next_renewal: Moment::NEVER,
            ttl: terms.ttl,
            longest: terms.ttl,
            heartbeat: terms.heartbeat,
            expires_at_ms: terms.expires_at_ms,
            version: terms.version,
            lost: None,
            ended: false,
            last: Answer::Given,
            confirmed: terms.sent,
            alone: false,
            next_flight: 0,
            flights: Vec::new(),
        };
        lease.plan_renewal(terms.sent);
        lease
    }

    /// From when on the lease counts as lost, unless something changes.
    pub(super) fn end(&self) -> Moment {
        self.deadline.min(self.hold_until)
    }

    pub(super) fn is_held(&self, now: Moment) -> bool {
        self.lost.is_none() && !self.ended && now < self.end()
    }

    pub(super) fn lost(&self) -> Option<LostReason> {
        self.lost
    }

    pub(super) fn is_ended(&self) -> bool {
        self.ended
    }

    pub(super) fn expires_at_ms(&self) -> i64 {
        self.expires_at_ms
    }

    /// The newest version that was answered.
    pub(super) fn version(&self) -> Option<Version> {
        self.version
    }

    /// The moment from which the server's lease is over, whatever was carried out.
    pub(super) fn surely_over(&self, now: Moment) -> Moment {
        now.after(self.longest).after(TOLERANCE)
    }

    /// When to renew next; never, once there is nothing to renew.
    pub(super) fn next_renewal(&self) -> Moment {
        let over = self.lost.is_some() || self.ended || self.next_renewal >= self.end();
        if over || self.renewing() { Moment::NEVER } else { self.next_renewal }
    }

    /// When the last operation was sent that was confirmed.
    pub(super) fn confirmed(&self) -> Moment {
        self.confirmed
    }

    /// Whether the next renewal must go alone.
    pub(super) fn alone(&self) -> bool {
        self.alone
    }

    /// Ends a lease whose time is over. Returns the reason if this call lost it.
    pub(super) fn tick(&mut self, now: Moment) -> Option<LostReason> {
        if now < self.end() {
            return None;
        }
        let reason = if self.hold_until <= self.deadline {
            LostReason::MaxHold
        } else if self.last == Answer::Refused {
            LostReason::RenewalRefused
        } else if self.last == Answer::Given && !self.renewing() {
            LostReason::Expired
        } else {
            LostReason::Unreachable
        };
        self.lose(reason)
    }

    /// Marks the lease as lost. Returns the reason if this call lost it.
    pub(super) fn lose(&mut self, reason: LostReason) -> Option<LostReason> {
        if self.lost.is_some() || self.ended {
            return None;
        }
        self.lost = Some(reason);
        self.lost
    }

    /// Ends the lease for good. Whether this call did it: then the caller has to release it.
    pub(super) fn end_now(&mut self) -> bool {
        !std::mem::replace(&mut self.ended, true)
    }

    /// A renewal that is due now or within `slack` goes out now: its number and its ttl.
    pub(super) fn begin_renewal(&mut self, now: Moment, slack: Duration) -> Option<(u32, Duration)> {
        if now.after(slack) < self.next_renewal() || !self.is_held(now) {
            return None;
        }
        Some((self.begin(Kind::Renewal, now, self.ttl), self.ttl))
    }

    /// An extend goes out now: its number, or `None` if the lease is not held any more.
    pub(super) fn begin_extend(&mut self, now: Moment, ttl: Duration) -> Option<u32> {
        self.is_held(now).then(|| self.begin(Kind::Extend, now, ttl))
    }

    fn begin(&mut self, kind: Kind, now: Moment, ttl: Duration) -> u32 {
        let id = self.next_flight;
        self.next_flight = id.wrapping_add(1);
        self.longest = self.longest.max(ttl);
        let mut least = ttl;
        for other in &mut self.flights {
            least = least.min(other.ttl);
            other.least = other.least.min(ttl);
            other.undo = None;
        }
        let lowered = self.deadline.min(now.after(ttl));
        let undo = (self.flights.is_empty() && lowered < self.deadline).then_some(self.deadline);
        self.deadline = lowered;
        self.flights.push(Flight { id, kind, sent: now, ttl, least, undo });
        id
    }

    /// The answer to an operation, or its absence. Returns the reason if the lease is lost by it, or
    /// was already over when it came.
    pub(super) fn finish(&mut self, id: u32, now: Moment, outcome: Outcome) -> Option<LostReason> {
        // Before anything is believed: an answer that comes after the deadline comes too late.
        let late = self.tick(now);
        let index = self.flights.iter().position(|flight| flight.id == id)?;
        let flight = self.flights.swap_remove(index);
        if late.is_some() || self.lost.is_some() || self.ended {
            return late;
        }
        self.last = match (outcome, flight.kind) {
            (Outcome::Unknown, _) => Answer::None,
            (Outcome::Refused, Kind::Renewal) => Answer::Refused,
            _ => Answer::Given,
        };
        match outcome {
            Outcome::Confirmed { expires_at_ms, version } => {
                self.confirm(&flight);
                (self.expires_at_ms, self.version) = (expires_at_ms, version);
                None
            }
            Outcome::Gone(reason) => self.lose(reason),
            Outcome::Busy | Outcome::Refused => {
                if let Some(before) = flight.undo {
                    self.deadline = before;
                }
                self.retry(&flight, now, outcome == Outcome::Busy);
                None
            }
            Outcome::Unknown => {
                if flight.kind == Kind::Extend {
                    self.ttl = flight.ttl;
                }
                self.retry(&flight, now, false);
                None
            }
        }
    }

    fn confirm(&mut self, flight: &Flight) {
        self.deadline = self.deadline.max(flight.sent.after(flight.least));
        self.alone = false;
        self.confirmed = self.confirmed.max(flight.sent);
        if flight.kind == Kind::Extend {
            self.ttl = flight.ttl;
        }
        self.plan_renewal(flight.sent);
    }

    fn plan_renewal(&mut self, sent: Moment) {
        let interval = match self.heartbeat {
            Heartbeat::Off => return,
            Heartbeat::Auto => self.ttl / 3,
            // An extend may have made the ttl shorter than the interval.
            Heartbeat::Every(interval) if interval >= self.ttl => self.ttl / 2,
            Heartbeat::Every(interval) => interval,
        };
        let whole = self.deadline.since(sent);
        // Not later than half way to a deadline that something else keeps low.
        self.next_renewal = sent.after(if whole < self.ttl { interval.min(whole / 2) } else { interval });
    }

    /// Plans the renewal after one that was not confirmed: soon, and again and again before the
    /// deadline, but never in a hurry that hurts the server.
    fn retry(&mut self, flight: &Flight, now: Moment, busy: bool) {
        if self.heartbeat == Heartbeat::Off {
            return;
        }
        let rest = self.deadline.since(now);
        let pause = if busy {
            (rest / 16).clamp(Duration::from_millis(20), Duration::from_millis(500))
        } else {
            (rest / 8).clamp(Duration::from_millis(50), Duration::from_secs(2))
        };
        // The last few milliseconds are not worth a try each.
        let soon = now.after(pause.min(rest / 2).max(Duration::from_millis(5)));
        self.alone |= busy;
        self.next_renewal = match flight.kind {
            Kind::Renewal => soon,
            Kind::Extend => self.next_renewal.min(soon),
        };
    }

    fn renewing(&self) -> bool {
        self.flights.iter().any(|flight| flight.kind == Kind::Renewal)
    }
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
