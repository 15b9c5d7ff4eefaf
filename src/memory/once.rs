//! Runs, once per slot: a mark is a counter beside that of the key.

use crate::backend::{BeginOutcome, BeginRun, BegunRun, MarkOutcome, MarkRun, MarkStep, Slot};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::memory::MemoryBackend;
use crate::memory::call::Effect;
use crate::memory::fault::Call;
use crate::memory::store::{Store, StoredLabel};
use crate::model::lock_id::LockId;
use crate::model::time::{Moment, Ttl};

/// The marks of finished slots.
impl MemoryBackend {
    /// The mark of a job's last slot that is done, of this kind of slots: the start of its period in Unix
    /// milliseconds, or the caller's number.
    ///
    /// ```
    /// use syncguard::{LockClient, LockOptions, MemoryBackend, Slot};
    ///
    /// let memory = MemoryBackend::manual();
    /// let client = LockClient::new(memory.clone());
    /// let today = Slot::number(2026_11_28);
    /// client.run_once("report", today, &LockOptions::new(), |_run| Ok::<_, String>(()))?;
    /// assert_eq!(memory.mark("report", today)?, Some(2026_11_28));
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn mark(&self, name: &str, slot: Slot) -> Result<Option<u64>> {
        let mark = self.mark_key(name, slot)?;
        Ok(self.shared.decide(|store, _| store.counter(&mark)))
    }

    /// Sets that mark, for example into the future, or back.
    ///
    /// ```
    /// use syncguard::{LockClient, LockOptions, MemoryBackend, RunOnce, Slot};
    ///
    /// let memory = MemoryBackend::manual();
    /// let client = LockClient::new(memory.clone());
    /// memory.set_mark("report", Slot::number(0), 2026_11_28)?;
    /// let run = client.run_once("report", Slot::number(2026_11_27), &LockOptions::new(), |_run| Ok::<_, String>(()))?;
    /// assert_eq!(run, RunOnce::AlreadyDone);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn set_mark(&self, name: &str, slot: Slot, number: u64) -> Result<()> {
        let mark = self.mark_key(name, slot)?;
        self.shared.decide(|store, _| store.set_counter(&mark, number));
        Ok(())
    }

    fn mark_key(&self, name: &str, slot: Slot) -> Result<String> {
        self.stored(name)?.user.mark(slot.mark_suffix(), self.limit, self.reserve)
    }
}

pub(super) fn begin(
    memory: &MemoryBackend,
    begin: &BeginRun<'_>,
    cancel: &CancelToken,
) -> Result<BeginOutcome> {
    let attempt = &begin.attempt;
    begin.slot.check()?;
    let (key, mark) = (memory.stored(attempt.key)?, memory.mark_key(attempt.key, begin.slot)?);
    let (id, ttl) = (LockId::parse(attempt.lock_id)?, Ttl::new(attempt.ttl)?);
    let in_context = |error: LockError| error.with_key(attempt.key).with_lock_id(attempt.lock_id);
    let label = StoredLabel::of(attempt.label)?;
    let grant = |store: &mut Store, now: i64| {
        let last = store.counter(&mark);
        // The same begin again has the slot of its grant.
        let granted_at = store.live_by_id(id.as_str(), now).map_or(now, |own| own.acquired_at_ms);
        let slot = begin.slot.at(granted_at);
        if last.is_some_and(|last| last >= slot) {
            return Ok((BeginOutcome::AlreadyDone, last, now));
        }
        // The time of an earlier copy's grant is over before anybody was told of it.
        if store.is_of(&key.base, id.as_str()) && store.live_by_id(id.as_str(), now).is_none() {
            return Ok((BeginOutcome::Running, last, now));
        }
        let granted = store.acquire(&key, id.as_str(), ttl, now)?;
        if granted.is_some() {
            store.label(id.as_str(), &label);
        }
        let begun = |grant| BeginOutcome::Begun(BegunRun { grant, slot, last });
        Ok((granted.map_or(BeginOutcome::Running, begun), last, now))
    };
    let (outcome, last, now) = memory
        .call(Call::Acquire, Effect::Grant(ttl), (attempt.deadline, cancel), grant)
        .map_err(|failure| in_context(failure.error()))?
        .map_err(in_context)?;
    match &outcome {
        BeginOutcome::Begun(run) => run.grant.acquired.fence.warn_near_limit(key.user.as_str()),
        BeginOutcome::AlreadyDone => begin.slot.warn_of_the_future(attempt.key, last, now),
        BeginOutcome::Running => {}
    }
    Ok(outcome)
}

pub(super) fn mark(
    memory: &MemoryBackend,
    run: &MarkRun<'_>,
    step: MarkStep,
    deadline: Moment,
) -> Result<MarkOutcome> {
    run.slot.check()?;
    let (id, mark) = (LockId::parse(run.lock_id)?, memory.mark_key(run.key, run.slot)?);
    let work = |store: &mut Store, now: i64| {
        let own = store.fence_of(id.as_str()) == Some(run.fence);
        let lives = own && store.live_by_id(id.as_str(), now).is_some();
        let last = store.counter(&mark);
        let marks = match step {
            MarkStep::Claim => lives && last.is_none_or(|last| last <= run.number),
            MarkStep::Finish => lives && last.is_none_or(|last| last < run.number),
            MarkStep::Verify => own && last.is_some_and(|last| last >= run.number),
        };
        if !marks {
            return MarkOutcome::NotMarked;
        }
        if step != MarkStep::Verify {
            store.set_counter(&mark, run.number);
        }
        if step != MarkStep::Claim {
            store.end(id.as_str());
        }
        MarkOutcome::Marked
    };
    memory
        .call(Call::Mark, Effect::Release(id.as_str()), (deadline, &CancelToken::never()), work)
        .map_err(|failure| failure.error().with_key(run.key).with_lock_id(run.lock_id))
}
