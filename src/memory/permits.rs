//! Permits: leases on the keys that are derived from a semaphore's name.

use crate::backend::{Grant, PermitAttempt, PermitGrant};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::memory::MemoryBackend;
use crate::memory::call::Effect;
use crate::memory::fault::Call;
use crate::memory::store::{Store, StoredKey, StoredLabel};
use crate::model::key::{Key, validate_limit};
use crate::model::lock_id::LockId;
use crate::model::time::{Moment, Ttl};

impl MemoryBackend {
    pub(super) fn permit_call(
        &self,
        attempt: &PermitAttempt<'_>,
        cancel: &CancelToken,
    ) -> Result<Option<PermitGrant>> {
        let permits = self.permits(attempt.semaphore, attempt.limit)?;
        let (id, ttl) = (LockId::parse(attempt.lock_id)?, Ttl::new(attempt.ttl)?);
        let label = StoredLabel::of(attempt.label)?;
        let in_context = |error: LockError| error.with_key(attempt.semaphore).with_lock_id(attempt.lock_id);
        let answer = self
            .call(Call::Acquire, Effect::Grant(ttl), (attempt.deadline, cancel), |store, now| {
                let answer = store.acquire_permit(&permits, id.as_str(), ttl, now)?;
                if answer.is_some() {
                    store.label(id.as_str(), &label);
                }
                Ok(answer)
            })
            .map_err(|failure| in_context(failure.error()))?
            .map_err(in_context)?;
        if let Some((permit, granted)) = &answer {
            granted.acquired.fence.warn_near_limit(permit.key.user.as_str());
        }
        Ok(answer.map(|(permit, grant)| PermitGrant::new(permit.number, grant)))
    }

    pub(super) fn count_permits(
        &self,
        semaphore: &str,
        among: u32,
        deadline: Moment,
        cancel: &CancelToken,
    ) -> Result<u32> {
        let permits = self.permits(semaphore, among)?;
        let count = self
            .call(Call::Holder, Effect::Read, (deadline, cancel), |store, now| {
                permits.iter().filter(|permit| store.live_by_key(&permit.key.base, now).is_some()).count()
            })
            .map_err(|failure| failure.error().with_key(semaphore))?;
        cancel.check()?;
        Ok(u32::try_from(count).unwrap_or(u32::MAX))
    }

    fn permits(&self, semaphore: &str, limit: u32) -> Result<Vec<Permit>> {
        validate_limit(limit)?;
        let name = Key::new(semaphore)?;
        let permit = |number| Ok(Permit { number, key: self.stored_key(name.permit(number))? });
        (1..=limit).map(permit).collect()
    }
}

struct Permit {
    number: u32,
    key: StoredKey,
}

impl Store {
    /// The permit that the id has already, else the first that is free.
    fn acquire_permit<'a>(
        &mut self,
        permits: &'a [Permit],
        lock_id: &str,
        ttl: Ttl,
        now: i64,
    ) -> Result<Option<(&'a Permit, Grant)>> {
        let own = permits.iter().find(|permit| self.is_of(&permit.key.base, lock_id));
        let free = || permits.iter().find(|permit| self.live_by_key(&permit.key.base, now).is_none());
        let Some(permit) = own.or_else(free) else { return Ok(None) };
        Ok(self.acquire(&permit.key, lock_id, ttl, now)?.map(|grant| (permit, grant)))
    }
}
