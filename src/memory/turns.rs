//! Who waits for a key, and whose turn it is.

use crate::backend::{Grant, Holder, Intent, Turn, TurnAttempt};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::memory::MemoryBackend;
use crate::memory::call::Effect;
use crate::memory::fault::Call;
use crate::memory::members::Waiting;
use crate::memory::readers::millis;
use crate::memory::store::{Store, StoredKey, StoredLabel};
use crate::model::lock_id::LockId;
use crate::model::time::{Moment, Ttl};

impl MemoryBackend {
    pub(super) fn turn_call(&self, asked: &TurnAttempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        let attempt = &asked.attempt;
        let (key, ttl) = (self.stored(attempt.key)?, Ttl::new(attempt.ttl)?);
        let id = LockId::parse(attempt.lock_id)?;
        let label = StoredLabel::of(attempt.label)?;
        for ticket in [Some(asked.ticket), asked.next].iter().flatten() {
            LockId::parse(ticket.id)?;
        }
        let in_context = |error: LockError| error.with_key(attempt.key).with_lock_id(attempt.lock_id);
        let answer = self
            .call(Call::Acquire, Effect::Grant(ttl), (attempt.deadline, cancel), |store, now| {
                let granted = store.acquire_in_turn(&key, (id.as_str(), ttl), asked, now)?;
                if granted.is_some() {
                    store.label(id.as_str(), &label);
                }
                Ok(granted)
            })
            .map_err(|failure| in_context(failure.error()))?
            .map_err(in_context)?;
        if let Some(granted) = &answer {
            granted.acquired.fence.warn_near_limit(attempt.key);
        }
        Ok(answer)
    }

    pub(super) fn turn_look(
        &self,
        ticket: &Intent<'_>,
        deadline: Moment,
        cancel: &CancelToken,
    ) -> Result<Turn> {
        let key = self.stored(ticket.key)?;
        LockId::parse(ticket.id)?;
        let turn = self
            .call(Call::Holder, Effect::Read, (deadline, cancel), |store, now| {
                let live = store.live_by_key(&key.base, now);
                let holder = live
                    .map(|live| Holder::until(Some(live.fence), live.expires_at_ms, now).shared(live.shared));
                Turn::new(holder, store.ahead(&key.base, ticket, now))
            })
            .map_err(|failure| failure.error().with_key(ticket.key))?;
        cancel.check()?;
        Ok(turn)
    }

    pub(super) fn announce_call(&self, intent: &Intent<'_>, deadline: Moment) -> Result<()> {
        let key = self.stored(intent.key)?;
        LockId::parse(intent.id)?;
        self.call(Call::Holder, Effect::Read, (deadline, &CancelToken::never()), |store, now| {
            store.wait(&key.base, intent, now);
        })
        .map_err(|failure| failure.error().with_key(intent.key))
    }
}

impl Store {
    /// Writes who waits, or refreshes it. It may become older, and never younger.
    fn wait(&mut self, base: &str, intent: &Intent<'_>, now: i64) {
        let intents = &mut self.readers.intents;
        intents.retain(|_, waiting| waiting.expires_at_ms > now);
        let since_ms = now.saturating_sub(millis(intent.waited));
        let new = Waiting { base: base.to_owned(), since_ms, expires_at_ms: 0, priority: 0 };
        let waiting = intents.entry(intent.id.to_owned()).or_insert(new);
        waiting.since_ms = waiting.since_ms.min(since_ms);
        waiting.expires_at_ms = now.saturating_add(millis(intent.lasts));
        waiting.priority = intent.priority;
    }

    /// How many live tickets are ahead of this one.
    fn ahead(&self, base: &str, ticket: &Intent<'_>, now: i64) -> u64 {
        let intents = &self.readers.intents;
        let stored = intents.get(ticket.id).filter(|waiting| waiting.base == base);
        let since = stored.map_or_else(|| now.saturating_sub(millis(ticket.waited)), |own| own.since_ms);
        let rank = |priority: i32| -i64::from(priority);
        let own = (rank(ticket.priority), since, ticket.id);
        let ahead = intents.iter().filter(|(id, waiting)| {
            waiting.base == base
                && id.as_str() != ticket.id
                && waiting.is_in_line(now)
                && (rank(waiting.priority), waiting.since_ms, id.as_str()) < own
        });
        ahead.count() as u64
    }

    fn acquire_in_turn(
        &mut self,
        key: &StoredKey,
        (lock_id, ttl): (&str, Ttl),
        asked: &TurnAttempt<'_>,
        now: i64,
    ) -> Result<Option<Grant>> {
        // What was granted is told as granted, whoever is ahead by then.
        if !self.is_of(&key.base, lock_id) && self.ahead(&key.base, &asked.ticket, now) > 0 {
            return Ok(None);
        }
        let grant = self.acquire(key, lock_id, ttl, now)?;
        if grant.is_some() {
            self.readers.intents.remove(asked.ticket.id);
            if let Some(next) = &asked.next {
                self.wait(&key.base, next, now);
            }
        }
        Ok(grant)
    }
}
