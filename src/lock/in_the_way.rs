//! What is in the way of a wait, and what the wait says of it when it ends in vain.
//!
//! Before its time is over a wait asks who has the key: within its time, once, and once more at the end if somebody else
//! has it by then.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{HeldBy, Holder, Label, LockBackend, Words};
use crate::error::{ErrorCode, LockError};
use crate::lock::attempt::LockCall;
use crate::lock::backend_call::ask;
use crate::model::fence::Fence;
use crate::model::time::Moment;

/// How long before its end a wait asks, at most: half of a short wait,
const QUESTION: Duration = Duration::from_secs(1);
/// and when it asks again: an eighth.
const LAST_QUESTION: Duration = Duration::from_millis(100);

/// What a wait knows of who or what is in its way.
pub(super) struct InTheWay {
    start: Moment,
    end: Moment,
    /// What the last attempt that was answered met, if that was no holder: another session's lock,
    /// or a ttl that was over too soon.
    pub(super) conflict: Option<LockError>,
    /// Who held the key at the last look, and when that was.
    pub(super) holder: Option<(Holder, Moment)>,
    /// When it asks who has the key; `None` once it has for the last time.
    question_at: Option<Moment>,
    /// The holder of whom it has asked.
    asked: Option<Fence>,
    /// What the holder with this fence says of itself.
    said: Option<(Fence, String)>,
}

/// Who waits, and for which of its keys, if it is known which one is in the way.
pub(super) type Who<'a> = (&'a LockCall, Option<&'a Arc<str>>);

impl InTheWay {
    pub(super) fn new(start: Moment, end: Moment) -> Self {
        let question_at = Some(start.shortly_before(end, QUESTION, 2));
        Self { start, end, conflict: None, holder: None, question_at, asked: None, said: None }
    }

    /// Another key is in the way now.
    pub(super) fn is_another(&mut self) {
        (self.holder, self.asked, self.said) = (None, None, None);
    }

    /// When it asks who has the key.
    pub(super) fn question_at(&self) -> Moment {
        self.question_at.unwrap_or(Moment::NEVER)
    }

    /// Asks who has the key, for a text. What fails only leaves that text shorter.
    pub(super) fn ask_who_holds(&mut self, (call, key): Who<'_>) {
        let last = self.start.shortly_before(self.end, LAST_QUESTION, 8);
        self.question_at = (call.engine().clock.now() < last && !last.is_never()).then_some(last);
        if self.asked.is_some() && self.asked == self.holder.and_then(|(holder, _)| holder.fence) {
            return;
        }
        let Some(key) = key.filter(|_| call.permits.is_none()) else { return };
        let engine = call.engine();
        if engine.registry.held_here(key, engine.clock.now()).is_some() {
            return;
        }
        // A text is not worth the key: half of what is left is for whoever releases it.
        let now = engine.clock.now();
        let deadline = engine.call_deadline(self.end).min(now.after(self.end.since(now) / 2));
        match ask(|| engine.backend.who_holds(key, deadline, &call.token)) {
            Ok(Some(HeldBy { lease, remaining })) => {
                self.asked = Some(lease.fence);
                let mut holder = Holder::default().shared(lease.shared);
                (holder.fence, holder.remaining) = (Some(lease.fence), remaining);
                let known = self.holder.filter(|(known, _)| known.fence == holder.fence);
                self.holder = match known {
                    Some(known) if remaining.is_none() => Some(known),
                    _ => Some((holder, engine.clock.now())),
                };
                let words = Words(Label::new(lease.owner.as_deref(), lease.note.as_deref())).to_string();
                self.said = Some((lease.fence, words)).filter(|(_, words)| !words.is_empty());
            }
            Ok(None) => {}
            Err(error) => log::debug!("who holds the key could not be asked: {}", error.chain()),
        }
    }

    /// Who has the key, as far as it is known, as the end of a sentence.
    fn who_holds(&self, (call, key): Who<'_>, ahead: Option<u64>, now: Moment) -> String {
        if let Some(limit) = call.permits {
            let here = call.engine().registry.permits_held_here(&call.key, now);
            return format!("; the semaphore has {limit} permits, and this client holds {here} of them");
        }
        if let Some((fence, taken_by)) = key.and_then(|key| call.engine().registry.held_here(key, now)) {
            let me = std::thread::current();
            return if taken_by.id() == me.id() {
                format!(
                    "; this very thread took it under fencing token {} and has not released it: locks are not re-entrant, pass the guard on or drop it first",
                    fence.get()
                )
            } else {
                let name = taken_by.name().map(|name| format!(" ({name:?})")).unwrap_or_default();
                format!("; another thread of this client{name} took it under fencing token {}", fence.get())
            };
        }
        let Some((Holder { fence: Some(fence), remaining, shared }, seen)) = self.holder else {
            return match ahead {
                Some(1) => "; 1 waiter who is served in order came before it".to_owned(),
                Some(ahead @ 2..) => format!("; {ahead} waiters who are served in order came before it"),
                _ => String::new(),
            };
        };
        let held = if shared { "shared by readers" } else { "held" };
        let by = match &self.said {
            Some((of, words)) if *of == fence && shared => format!(", the last of them {words},"),
            Some((of, words)) if *of == fence => format!(" by {words}"),
            _ => String::new(),
        };
        let end = match remaining {
            Some(remaining) => {
                let rest = remaining.saturating_sub(now.since(seen)).as_secs_f64();
                let digits = usize::from(rest < 9.95);
                format!("; its lease ends in {rest:.digits$} s unless it is renewed")
            }
            None => String::new(),
        };
        format!("; it is {held}{by} under fencing token {}{end}", fence.get())
    }

    /// The error of a wait that is over after so many attempts, with so many ahead of it, as far as it is known.
    pub(super) fn timed_out(
        &mut self,
        who: Who<'_>,
        (attempts, ahead): (u64, Option<u64>),
        cause: Option<LockError>,
    ) -> LockError {
        let (call, clock) = (who.0, &who.0.engine().clock);
        // With time left its tries are used up, and nobody has asked yet.
        if self.question_at.is_some() && clock.now() < self.end {
            self.ask_who_holds(who);
        }
        let now = clock.now();
        let waited = now.since(self.start).as_secs_f64();
        // Whatever was in the way says more than how the last call was cut short.
        let met = self.conflict.take();
        let attempts = match attempts {
            0 => "and no attempt was made: other threads of this process were ahead in the queue".to_owned(),
            1 => "in 1 attempt".to_owned(),
            n => format!("in {n} attempts"),
        };
        let advice = match met {
            None if now < self.end => {
                "its retries are used up, raise max_retries or hold the lock for less time"
            }
            None => "raise timeout, or hold the lock for less time",
            Some(_) => "see this error's source for what was in the way",
        };
        let what = match (call.permits, call.other_keys.is_empty()) {
            (Some(_), _) => "a permit",
            (None, true) => "the key",
            (None, false) => "the keys, all at once,",
        };
        let error = LockError::new(ErrorCode::AcquisitionTimeout).with_message(format!(
            "{what} could not be taken within {waited:.3} s, {attempts}: {advice}{}",
            self.who_holds(who, ahead, now)
        ));
        match met.or(cause) {
            Some(cause) => error.with_source(cause),
            None => error,
        }
    }
}
