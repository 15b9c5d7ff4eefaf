//! Shared leases: the readers of a key are one row, and each of them is a member of it.

use std::time::Duration;

use crate::backend::{
    ExtendOutcome, Grant, LockInfoRaw, LostReason, Reason, ReleaseOutcome, RenewOutcome, Renewal,
    SharedAttempt, Version,
};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::memory::MemoryBackend;
use crate::memory::call::{Effect, Failure};
use crate::memory::fault::Call;
use crate::memory::members::{GROUP, Member, Waiting};
use crate::memory::store::{Store, StoredKey, StoredLabel, next};
use crate::model::fence::Fence;
use crate::model::lock_id::LockId;
use crate::model::time::{Moment, TIME_TOLERANCE_MS, Ttl};

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX / 4)
}

impl MemoryBackend {
    pub(super) fn join_call(
        &self,
        shared: &SharedAttempt<'_>,
        cancel: &CancelToken,
    ) -> Result<Option<Grant>> {
        let attempt = &shared.attempt;
        let (key, id) = (self.stored(attempt.key)?, LockId::parse_shared(attempt.lock_id)?);
        let (ttl, waited) = (Ttl::new(attempt.ttl)?, millis(shared.waited));
        let label = StoredLabel::of(attempt.label)?;
        let in_context = |error: LockError| error.with_key(attempt.key).with_lock_id(attempt.lock_id);
        let answer = self
            .call(Call::Acquire, Effect::Grant(ttl), (attempt.deadline, cancel), |store, now| {
                store.join(&key, (id.as_str(), &label), ttl, (now, waited))
            })
            .map_err(|failure| in_context(failure.error()))?
            .map_err(in_context)?;
        if let Some(granted) = &answer {
            granted.acquired.fence.warn_near_limit(attempt.key);
        }
        Ok(answer)
    }

    pub(super) fn withdraw_call(&self, id: &str, deadline: Moment) -> Result<()> {
        self.call(Call::Holder, Effect::Read, (deadline, &CancelToken::never()), |store, _| {
            store.readers.intents.remove(id);
        })
        .map_err(Failure::error)
    }
}

impl Store {
    fn join(
        &mut self,
        key: &StoredKey,
        (lock_id, label): (&str, &StoredLabel),
        ttl: Ttl,
        (now, waited): (i64, i64),
    ) -> Result<Option<Grant>> {
        let end = now.saturating_add(ttl.millis());
        if let Some(member) = self.live_member(lock_id, now) {
            if member.base != key.base {
                return Err(LockError::new(ErrorCode::Internal)
                    .with_message("the lock id is in use for another key: choose a fresh one per attempt"));
            }
            // The same attempt again gets the answer that it may have missed.
            let version = self.write();
            let member = self.readers.members.get_mut(lock_id);
            return Ok(member.map(|member| {
                member.version = version;
                member.grant(lock_id)
            }));
        }
        let since = now.saturating_sub(waited);
        let older = |waiting: &Waiting| {
            waiting.base == key.base && waiting.is_in_line(now) && waiting.since_ms < since
        };
        if self.readers.intents.values().any(older) {
            return Ok(None);
        }
        let fence = match self.row(&key.base).filter(|row| row.is_live(now)) {
            Some(row) if !row.is_group() => return Ok(None),
            Some(row) => row.fence,
            None => {
                let group = format!("{GROUP}{}", key.base);
                self.readers.members.retain(|_, member| member.base != key.base);
                self.grant(key, &group, ttl, now)?.acquired.fence
            }
        };
        self.lengthen(&key.base, end);
        let version = self.write();
        let base = key.base.clone();
        let label = label.clone();
        let member = Member { base, since_ms: now, expires_at_ms: end, fence, version, label };
        let grant = member.grant(lock_id);
        self.readers.members.insert(lock_id.to_owned(), member);
        Ok(Some(grant))
    }

    fn write(&mut self) -> u64 {
        next(&mut self.writes)
    }

    fn lengthen(&mut self, base: &str, end: i64) {
        if let Some(row) = self.row_mut(base) {
            row.expires_at_ms = row.expires_at_ms.max(end);
        }
    }

    /// Lets a group end with its last member, where it ends much later.
    fn trim(&mut self, base: &str, fence: Fence) {
        let members = self.readers.members.values();
        let of_group = members.filter(|member| member.base == base && member.fence == fence);
        let Some(last) = of_group.map(|member| member.expires_at_ms).max() else { return };
        if let Some(row) = self.row_mut(base)
            && row.is_group()
            && row.fence == fence
            && row.expires_at_ms > last.saturating_add(TIME_TOLERANCE_MS)
        {
            row.expires_at_ms = last;
        }
    }

    /// The member with this id, if its group stands and both live.
    fn live_member(&self, lock_id: &str, now: i64) -> Option<&Member> {
        let member = self.readers.members.get(lock_id).filter(|member| member.is_live(now))?;
        let row = self.row(&member.base).filter(|row| row.is_live(now) && row.is_group())?;
        (row.fence == member.fence).then_some(member)
    }

    /// How many live members a key's group has.
    fn readers_of(&self, base: &str, now: i64) -> u32 {
        let members = self.readers.members.iter().filter(|(_, member)| member.base == base);
        let live = members.filter(|(id, _)| self.live_member(id, now).is_some()).count();
        u32::try_from(live).unwrap_or(u32::MAX)
    }

    /// What is shown of a row, which may be a group.
    pub(super) fn shown(&self, base: &str, info: LockInfoRaw, now: i64) -> LockInfoRaw {
        if !info.lock_id.starts_with(GROUP) {
            return info;
        }
        let labelled = self.readers.members.iter().filter(|(id, member)| {
            let said = member.label.owner.is_some() || member.label.note.is_some();
            said && member.base == base && self.live_member(id, now).is_some()
        });
        let last = labelled.map(|(_, member)| member).max_by_key(|member| member.expires_at_ms);
        let StoredLabel { owner, note } = last.map(|member| member.label.clone()).unwrap_or_default();
        info.shared_by(Some(self.readers_of(base, now))).labelled(owner, note)
    }

    pub(super) fn live_reader(&self, lock_id: &str, now: i64) -> Option<LockInfoRaw> {
        let member = self.live_member(lock_id, now)?;
        let key = self.row(&member.base)?.user_key.clone();
        let (id, end, since) = (lock_id.to_owned(), member.expires_at_ms, member.since_ms);
        let StoredLabel { owner, note } = member.label.clone();
        let info = LockInfoRaw::new(key, id, end, since, member.fence).labelled(owner, note);
        Some(info.shared_by(Some(self.readers_of(&member.base, now))))
    }

    /// Why a reader's lease cannot be changed, or that it can.
    fn judge_reader(&self, lock_id: &str, now: i64) -> Result<(), Reason> {
        match (self.readers.members.get(lock_id), self.live_member(lock_id, now)) {
            (Some(_), Some(_)) => Ok(()),
            (Some(member), None) if !member.is_live(now) => Err(Reason::Expired),
            _ => Err(Reason::NotFound),
        }
    }

    /// Ends a reader's lease, and its group with the last of them.
    pub(super) fn leave(&mut self, lock_id: &str, now: i64) -> ReleaseOutcome {
        let judged = self.judge_reader(lock_id, now);
        let Some(own) = self.readers.members.remove(lock_id) else {
            return ReleaseOutcome::NotHeld(Some(Reason::NotFound));
        };
        let of_group = |member: &Member| member.base == own.base && member.fence == own.fence;
        let mut members = self.readers.members.values();
        let is_last = !members.any(|member| of_group(member) && member.is_live(now));
        if is_last && self.row(&own.base).is_some_and(|row| row.is_group() && row.fence == own.fence) {
            self.remove(&own.base);
        } else {
            self.trim(&own.base, own.fence);
        }
        match judged {
            Ok(()) => ReleaseOutcome::Released,
            Err(reason) => ReleaseOutcome::NotHeld(Some(reason)),
        }
    }

    pub(super) fn extend_reader(&mut self, lock_id: &str, ttl: Ttl, now: i64) -> ExtendOutcome {
        if let Err(reason) = self.judge_reader(lock_id, now) {
            return ExtendOutcome::NotHeld(Some(reason));
        }
        let version = self.readers.members.get(lock_id).map(|member| Version::new(member.version));
        match self.move_reader(lock_id, version, ttl, now) {
            Some((expires_at_ms, _)) => ExtendOutcome::Extended { expires_at_ms },
            None => ExtendOutcome::NotHeld(Some(Reason::NotFound)),
        }
    }

    /// Shortens the lease only for whoever names its version.
    fn move_reader(
        &mut self,
        lock_id: &str,
        replaced: Option<Version>,
        ttl: Ttl,
        now: i64,
    ) -> Option<(i64, Version)> {
        let (end, version) = (now.saturating_add(ttl.millis()), self.write());
        let member = self.readers.members.get_mut(lock_id)?;
        let newest = replaced == Some(Version::new(member.version));
        member.expires_at_ms = if newest { end } else { member.expires_at_ms.max(end) };
        member.version = version;
        let (base, fence, end) = (member.base.clone(), member.fence, member.expires_at_ms);
        self.lengthen(&base, end);
        self.trim(&base, fence);
        Some((end, Version::new(version)))
    }

    pub(super) fn renew_reader(
        &mut self,
        base: &str,
        lease: &Renewal<'_>,
        ttl: Ttl,
        now: i64,
    ) -> RenewOutcome {
        let own = self.readers.members.get(lease.lock_id);
        if let Some(own) = own.filter(|own| own.fence != lease.fence) {
            return RenewOutcome::Lost(LostReason::TakenOver { fence: own.fence });
        }
        if let Some(row) = self.row(base).filter(|row| row.fence != lease.fence) {
            return RenewOutcome::Lost(LostReason::TakenOver { fence: row.fence });
        }
        match self.judge_reader(lease.lock_id, now) {
            Err(Reason::Expired) => return RenewOutcome::Lost(LostReason::Expired),
            Err(_) => return RenewOutcome::Lost(LostReason::RowMissing),
            Ok(()) => {}
        }
        match self.move_reader(lease.lock_id, lease.version, ttl, now) {
            Some((expires_at_ms, version)) => RenewOutcome::Renewed { expires_at_ms, version: Some(version) },
            None => RenewOutcome::Lost(LostReason::RowMissing),
        }
    }
}
