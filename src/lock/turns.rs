//! What a waiter tells others: its ticket, if it asks to be served in order, or a writer's intent beside readers.
//!
//! 1. Only the first of this process's waiters for a key has a ticket, from its first refusal on. A grant puts the next
//!    one in line in the same step.
//! 2. A ticket lasts for [`TICKET`], and is refreshed when half of that is over: whoever stands still stands in nobody's
//!    way for long. So does an intent.
//! 3. Who leaves without the key has its ticket withdrawn: by whoever is first then, once that one is in line itself, or
//!    by the worker. Intents are withdrawn by the worker, also after a grant: nobody waits for that.
//! 4. A release is an attempt for whoever was seen to be first, a look for the few after it, and nothing for the
//!    others: their place is counted down, and looks put it right. Several releases may be heard as one, so a place is
//!    never counted down to the front.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Intent, LockBackend};
use crate::error::{LockError, Result};
use crate::lock::backend_call::ask;
use crate::lock::engine::Engine;
use crate::lock::options::ResolvedOptions;
use crate::model::lock_id::LockId;
use crate::model::time::Moment;
use crate::threads::catch_panic;
use crate::waiting::{LOOK, QueuePlace, Ticket};

/// How long a ticket lasts from when it was refreshed.
const TICKET: Duration = Duration::from_secs(2);

/// When it is refreshed.
pub(super) const SAY_AGAIN: Duration = TICKET.checked_div(2).expect("not zero");

/// With no more than so many ahead a waiter looks at each release.
const NEAR: u64 = 3;

/// How long the worker takes for one ticket: it ends by itself soon.
const WITHDRAWAL: Duration = Duration::from_millis(500);

/// What a waiter has said, and what it knows of its place in line.
#[derive(Default)]
pub(super) struct Line {
    /// The id of its intent, if it is a writer that has told readers of itself.
    intent: Option<LockId>,
    /// Until when its ticket or intent lasts; `None` if there is certainly none.
    until: Option<Moment>,
    /// How many were ahead at the last look, less the releases since.
    ahead: Option<u64>,
    /// Whom the last attempt has put in line, or may have, and until when.
    next: Option<(LockId, Moment)>,
}

/// What a release means for a waiter in line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum OnRelease {
    Attempt,
    Look,
    Wait,
}

impl Line {
    /// What a look has found.
    pub(super) const fn seen(&mut self, ahead: u64) {
        self.ahead = Some(ahead);
    }

    /// An attempt was refused: somebody was faster, or has come before.
    pub(super) fn refused(&mut self) {
        (self.ahead, self.next) = (None, None);
    }

    /// A grant that nobody gets has ended its ticket, and put the next one in line.
    pub(super) fn ended(&mut self, engine: &Engine, place: &QueuePlace<Arc<str>>) {
        self.ahead = None;
        if self.intent.is_none() {
            self.until = None;
        }
        let left = self.tell_next(place);
        leave(engine, place, left);
    }

    /// Nobody knows what an attempt came to: the next one says itself that it waits, and takes that back.
    pub(super) const fn unsure(&mut self, now: Moment) {
        self.ahead = None;
        if let Some((_, until)) = &mut self.next {
            *until = now;
        }
    }

    pub(super) const fn released(&mut self) -> OnRelease {
        match self.ahead {
            Some(0) => OnRelease::Attempt,
            Some(ahead) if ahead > NEAR => {
                self.ahead = Some(ahead - 1);
                OnRelease::Wait
            }
            _ => OnRelease::Look,
        }
    }

    /// How many are ahead, as far as it is known.
    pub(super) const fn ahead(&self) -> Option<u64> {
        self.ahead
    }

    /// Whoever comes next in this process, who is in line if an attempt is granted the key now.
    pub(super) fn next(&mut self, now: Moment, place: &QueuePlace<Arc<str>>) -> Option<Ticket> {
        let next = place.next();
        self.next = next.as_ref().map(|next| (next.id.clone(), now.after(TICKET)));
        next
    }

    /// Is in line for a while longer.
    pub(super) fn stay(
        &mut self,
        engine: &Engine,
        (key, ticket): (&str, &Ticket),
        place: &QueuePlace<Arc<str>>,
        end: Moment,
    ) {
        let (put, left) = place.take_in_line();
        self.until = self.until.max(put);
        self.say(engine, &intent(ticket, key, engine.clock.now()), end);
        withdraw_later(engine, left);
    }

    /// Tells readers that share the key that a writer has waited for it since then. What fails lets them go first.
    pub(super) fn announce(&mut self, engine: &Engine, (key, since): (&str, Moment), end: Moment) {
        if self.intent.is_none() {
            self.intent = LockId::generate_shared().ok();
        }
        if let Some(id) = self.intent.clone() {
            let waited = engine.clock.now().since(since);
            self.say(engine, &Intent::new(key, id.as_str(), waited, TICKET), end);
        }
    }

    /// Says it, unless it has been said lately. What fails is tried again soon, and may be there all the same.
    fn say(&mut self, engine: &Engine, intent: &Intent<'_>, end: Moment) {
        let now = engine.clock.now();
        if self.until.is_some_and(|until| now.after(SAY_AGAIN) < until) {
            return;
        }
        // No token reaches it, so it ends soon: half of the time that the ticket has left then.
        let deadline = engine.call_deadline(end).min(now.after(TICKET / 4));
        self.until = Some(match ask(|| engine.backend.announce(intent, deadline)) {
            Ok(()) => now.after(TICKET),
            Err(error) => {
                log::debug!("others could not be told of a waiter: {}", error.chain());
                self.until.unwrap_or(now)
            }
        });
    }

    /// It does not wait for this key any more: what it has said to its readers is withdrawn.
    pub(super) fn take_back(&mut self, engine: &Engine) {
        if let (Some(id), Some(_)) = (self.intent.take(), self.until.take()) {
            withdraw_later(engine, vec![id]);
        }
    }

    /// The wait is over. A ticket is withdrawn, unless a grant has ended it; so is what was left to this one.
    pub(super) fn over(
        &mut self,
        engine: &Engine,
        (ticket, is_granted): (&Ticket, bool),
        place: &QueuePlace<Arc<str>>,
    ) {
        let (put, mut left) = place.leave();
        if !is_granted && self.until.max(put).is_some() {
            left.push(ticket.id.clone());
        }
        left.extend(self.tell_next(place));
        leave(engine, place, left);
    }

    /// Whoever was put in line knows of it. Its ticket, if it has left while the grant was under way.
    fn tell_next(&mut self, place: &QueuePlace<Arc<str>>) -> Vec<LockId> {
        let next = self.next.take().filter(|(next, until)| !place.is_in_line(next, Some(*until)));
        next.map(|(next, _)| next).into_iter().collect()
    }
}

/// Tickets are withdrawn by whoever is first then, once that one is in line itself; else by the worker.
fn leave(engine: &Engine, place: &QueuePlace<Arc<str>>, tickets: Vec<LockId>) {
    if !tickets.is_empty() {
        withdraw_later(engine, place.leave_tickets(tickets));
    }
}

/// The ticket of whoever asks to be served in order.
pub(super) fn ticket(options: &ResolvedOptions, since: Moment) -> Result<Option<Ticket>> {
    let Some(priority) = options.turn else { return Ok(None) };
    Ok(Some(Ticket { id: LockId::generate_shared()?, priority, since, note: options.note.clone() }))
}

/// Refuses options that ask for an order where there is none.
pub(super) fn refuse(priority: Option<i32>, why: &'static str) -> Result<()> {
    if priority.is_some() { Err(LockError::invalid(why)) } else { Ok(()) }
}

/// What a backend is told of a ticket.
pub(super) fn intent<'a>(ticket: &'a Ticket, key: &'a str, now: Moment) -> Intent<'a> {
    Intent::new(key, ticket.id.as_str(), now.since(ticket.since), TICKET)
        .with_priority(ticket.priority, ticket.note.as_deref())
}

/// Leaves tickets and intents to the worker. Where it is gone they end by themselves.
pub(super) fn withdraw_later(engine: &Engine, ids: Vec<LockId>) {
    if ids.is_empty() {
        return;
    }
    engine.registry.worker_queue.lock().withdrawals.extend(ids);
    engine.registry.worker_signal.notify(LOOK);
}

/// The worker's part, within the time that the next renewal leaves. Where it fails the others are left to their end,
/// which is near.
pub(super) fn withdraw(engine: &Engine, id: &LockId, rest: Duration) {
    let deadline = engine.clock.now().after(WITHDRAWAL.min(rest));
    let taken = catch_panic(|| engine.backend.withdraw(id.as_str(), deadline));
    if let Some(Err(error)) = &taken {
        log::debug!("a ticket ends by itself: {}", error.chain());
    }
    if !matches!(taken, Some(Ok(()))) {
        engine.registry.worker_queue.lock().withdrawals.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_for_who_is_first_and_counts_the_others_down() {
        let mut line = Line::default();
        assert_eq!(line.released(), OnRelease::Look, "nothing is known");
        line.seen(NEAR + 2);
        assert_eq!(
            [line.released(), line.released(), line.released()],
            [OnRelease::Wait, OnRelease::Wait, OnRelease::Look]
        );
        line.seen(0);
        assert_eq!([line.released(), line.released()], [OnRelease::Attempt, OnRelease::Attempt]);
        line.refused();
        assert_eq!(line.released(), OnRelease::Look);
    }
}
