//! The tables of the memory backend and the decisions taken on them: a pure function of the state,
//! the arguments and the server's time, with no clock and no lock of its own.
//!
//! Invariants:
//! 1. `ids` holds exactly one entry per row, from the row's lock id to its stored key.
//! 2. A row's fence is never above its key's counter, and no counter is ever lowered or removed.
//! 3. A refusal leaves rows and counters as they were.

use std::collections::BTreeMap;

use crate::backend::{
    Acquired, ExtendOutcome, Grant, GrantAll, Holder, Label, LockInfoRaw, LostReason, Reason, ReleaseOutcome,
    RenewOutcome, Renewal, Version,
};
use crate::error::{ErrorCode, LockError, Result};
use crate::memory::fault::Loss;
use crate::memory::members::{GROUP, Readers};
use crate::model::fence::Fence;
use crate::model::key::Key;
use crate::model::lock_id::LockId;
use crate::model::time::{TIME_TOLERANCE_MS, Ttl, is_live};

#[derive(Default)]
pub(super) struct Store {
    rows: BTreeMap<String, Row>,
    ids: BTreeMap<String, String>,
    counters: BTreeMap<String, u64>,
    losses: BTreeMap<String, OrderedLoss>,
    /// How often a row was written.
    pub(super) writes: u64,
    pub(super) readers: Readers,
}

#[derive(Clone, PartialEq, Eq)]
pub(super) struct Row {
    lock_id: String,
    pub(super) user_key: String,
    acquired_at_ms: i64,
    pub(super) expires_at_ms: i64,
    pub(super) fence: Fence,
    /// The write that made it what it is.
    version: u64,
    /// What its holder says of itself.
    pub(super) label: StoredLabel,
}

/// An owner and a note.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct StoredLabel {
    pub(super) owner: Option<String>,
    pub(super) note: Option<String>,
}

impl StoredLabel {
    /// A label that fits, or what is wrong with it.
    pub(super) fn of(label: Label<'_>) -> Result<Self> {
        label.check()?;
        Ok(Self { owner: label.owner.map(str::to_owned), note: label.note.map(str::to_owned) })
    }
}

impl Row {
    /// Whether it is that of a key's readers.
    pub(super) fn is_group(&self) -> bool {
        self.lock_id.starts_with(GROUP)
    }

    pub(super) fn is_live(&self, now: i64) -> bool {
        is_live(self.expires_at_ms, now, TIME_TOLERANCE_MS)
    }

    fn grant(&self) -> Grant {
        let acquired =
            Acquired { lock_id: self.lock_id.clone(), fence: self.fence, expires_at_ms: self.expires_at_ms };
        Grant { acquired, version: Some(Version::new(self.version)) }
    }

    fn info(&self) -> LockInfoRaw {
        LockInfoRaw::new(
            self.user_key.clone(),
            self.lock_id.clone(),
            self.expires_at_ms,
            self.acquired_at_ms,
            self.fence,
        )
        .labelled(self.label.owner.clone(), self.label.note.clone())
    }
}

/// A loss that waits for its lease to be renewed, with all that a takeover needs.
pub(super) struct OrderedLoss {
    pub(super) loss: Loss,
    pub(super) key: StoredKey,
    pub(super) taker: LockId,
    pub(super) ttl: Ttl,
}

/// A validated key and the names under which its row and its counter are stored.
pub(super) struct StoredKey {
    pub(super) user: Key,
    pub(super) base: String,
    pub(super) fence: String,
}

impl Store {
    pub(super) fn acquire(
        &mut self,
        key: &StoredKey,
        lock_id: &str,
        ttl: Ttl,
        now: i64,
    ) -> Result<Option<Grant>> {
        if let Some(row) = self.rows.get_mut(&key.base).filter(|row| row.is_live(now)) {
            if row.lock_id != lock_id {
                return Ok(None);
            }
            // The same attempt again gets the answer that it may have missed. It writes, as a server's does.
            row.version = next(&mut self.writes);
            return Ok(Some(row.grant()));
        }
        self.may_grant(key, lock_id)?;
        self.grant(key, lock_id, ttl, now).map(Some)
    }

    /// All of the keys, or none.
    pub(super) fn acquire_all(
        &mut self,
        leases: &[(StoredKey, LockId)],
        ttl: Ttl,
        now: i64,
    ) -> Result<GrantAll> {
        // Rows of ours, live or not, and live ones of others.
        let look = |store: &Self, (key, id): &(StoredKey, LockId)| {
            let row = store.rows.get(&key.base)?;
            let own = row.lock_id == id.as_str();
            let holder = Holder::until(Some(row.fence), row.expires_at_ms, now).shared(row.is_group());
            (own || row.is_live(now)).then_some((own, row.is_live(now), holder))
        };
        let seen: Vec<_> = leases.iter().map(|lease| look(self, lease)).collect();
        let mine = seen.iter().flatten().filter(|(own, ..)| *own).count();
        let is_held = |row: &Option<(bool, bool, Holder)>| matches!(row, Some((true, true, _)));
        let other = seen.iter().position(|row| matches!(row, Some((false, ..)))).filter(|_| mine == 0);
        // Of the same attempt's leases some were lost since: it has none of them any more.
        let partly = mine > 0 && !seen.iter().all(is_held);
        if partly {
            for (_, id) in leases {
                self.release(id.as_str(), now);
            }
        }
        let first_lost = || seen.iter().position(|row| !is_held(row)).filter(|_| partly);
        if let Some(index) = other.or_else(first_lost) {
            let holder =
                seen.get(index).copied().flatten().map_or_else(Holder::default, |(.., holder)| holder);
            return Ok(GrantAll::Held { index, holder });
        }
        // Nothing is written before it is certain that all can be.
        for (key, id) in leases.iter().filter(|_| mine == 0) {
            // Rows are written in the order of their keys: what an earlier one of them replaces is gone by then.
            let base = self.ids.get(id.as_str());
            let replaced = base.is_some_and(|base| {
                *base < key.base && leases.iter().any(|(earlier, _)| earlier.base == *base)
            });
            if replaced {
                self.next_fence(key)?;
            } else {
                self.may_grant(key, id.as_str())?;
            }
        }
        let acquire = |(key, id): &(StoredKey, LockId)| self.acquire(key, id.as_str(), ttl, now);
        let grants = leases.iter().map(acquire).collect::<Result<Option<Vec<_>>>>()?;
        Ok(GrantAll::Granted(grants.unwrap_or_default()))
    }

    /// Whether a free key can be granted under this id.
    fn may_grant(&self, key: &StoredKey, lock_id: &str) -> Result<Fence> {
        if self.ids.get(lock_id).is_some_and(|base| *base != key.base) {
            return Err(LockError::new(ErrorCode::Internal)
                .with_message("the lock id is in use for another key: choose a fresh one per attempt"));
        }
        self.next_fence(key)
    }

    fn next_fence(&self, key: &StoredKey) -> Result<Fence> {
        Fence::following(self.counter(&key.fence).unwrap_or(0))
    }

    /// Gives the key to `lock_id`, whoever has it.
    pub(super) fn grant(&mut self, key: &StoredKey, lock_id: &str, ttl: Ttl, now: i64) -> Result<Grant> {
        let fence = self.next_fence(key)?;
        self.remove(&key.base);
        self.counters.insert(key.fence.clone(), fence.get());
        self.ids.insert(lock_id.to_owned(), key.base.clone());
        let row = Row {
            lock_id: lock_id.to_owned(),
            user_key: key.user.as_str().to_owned(),
            acquired_at_ms: now,
            expires_at_ms: now.saturating_add(ttl.millis()),
            fence,
            version: next(&mut self.writes),
            label: StoredLabel::default(),
        };
        let grant = row.grant();
        self.rows.insert(key.base.clone(), row);
        Ok(grant)
    }

    pub(super) fn release(&mut self, lock_id: &str, now: i64) -> ReleaseOutcome {
        match self.by_id(lock_id) {
            None if LockId::may_be_shared(lock_id) => self.leave(lock_id, now),
            None => ReleaseOutcome::NotHeld(Some(Reason::NotFound)),
            Some((_, row)) if !row.is_live(now) => ReleaseOutcome::NotHeld(Some(Reason::Expired)),
            Some((base, _)) => {
                let base = base.to_owned();
                self.remove(&base);
                ReleaseOutcome::Released
            }
        }
    }

    /// Nothing comes late here: what a server needs two messages for is one step.
    pub(super) fn extend(&mut self, lock_id: &str, ttl: Ttl, now: i64) -> ExtendOutcome {
        match self.live_row(lock_id, now) {
            Err(Reason::NotFound) if LockId::may_be_shared(lock_id) => self.extend_reader(lock_id, ttl, now),
            Err(reason) => ExtendOutcome::NotHeld(Some(reason)),
            Ok((row, writes)) => {
                (row.expires_at_ms, row.version) = (now.saturating_add(ttl.millis()), next(writes));
                ExtendOutcome::Extended { expires_at_ms: row.expires_at_ms }
            }
        }
    }

    /// Shortens the lease only for whoever names its version.
    pub(super) fn renew(&mut self, base: &str, lease: &Renewal<'_>, ttl: Ttl, now: i64) -> RenewOutcome {
        if lease.shared {
            return self.renew_reader(base, lease, ttl, now);
        }
        if let Some((_, row)) = self.by_id(lease.lock_id).filter(|(_, row)| row.fence != lease.fence) {
            return RenewOutcome::Lost(LostReason::TakenOver { fence: row.fence });
        }
        match self.live_row(lease.lock_id, now) {
            Ok((row, writes)) => {
                let end = now.saturating_add(ttl.millis());
                let newest = lease.version == Some(Version::new(row.version));
                row.expires_at_ms = if newest { end } else { row.expires_at_ms.max(end) };
                row.version = next(writes);
                let version = Some(Version::new(row.version));
                RenewOutcome::Renewed { expires_at_ms: row.expires_at_ms, version }
            }
            Err(Reason::Expired) => RenewOutcome::Lost(LostReason::Expired),
            Err(_) => RenewOutcome::Lost(match self.rows.get(base) {
                Some(newer) => LostReason::TakenOver { fence: newer.fence },
                None => LostReason::RowMissing,
            }),
        }
    }

    /// A lock id's live row, to be written.
    fn live_row(&mut self, lock_id: &str, now: i64) -> Result<(&mut Row, &mut u64), Reason> {
        let row = self.ids.get(lock_id).and_then(|base| self.rows.get_mut(base));
        match row.filter(|row| row.lock_id == lock_id) {
            None => Err(Reason::NotFound),
            Some(row) if !row.is_live(now) => Err(Reason::Expired),
            Some(row) => Ok((row, &mut self.writes)),
        }
    }

    pub(super) fn live_by_key(&self, base: &str, now: i64) -> Option<LockInfoRaw> {
        let row = self.rows.get(base).filter(|row| row.is_live(now))?;
        Some(self.shown(base, row.info(), now))
    }

    pub(super) fn row(&self, base: &str) -> Option<&Row> {
        self.rows.get(base)
    }

    pub(super) fn row_mut(&mut self, base: &str) -> Option<&mut Row> {
        self.rows.get_mut(base)
    }

    pub(super) fn live_by_id(&self, lock_id: &str, now: i64) -> Option<LockInfoRaw> {
        let plain = self.by_id(lock_id).map(|(_, row)| row).filter(|row| row.is_live(now)).map(Row::info);
        plain.or_else(|| self.live_reader(lock_id, now))
    }

    pub(super) fn live_count(&self, now: i64) -> usize {
        self.rows.values().filter(|row| row.is_live(now)).count()
    }

    pub(super) fn has_row(&self, base: &str) -> bool {
        self.rows.contains_key(base)
    }

    pub(super) fn row_count(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn counter(&self, fence_key: &str) -> Option<u64> {
        self.counters.get(fence_key).copied()
    }

    pub(super) fn set_counter(&mut self, fence_key: &str, value: u64) {
        self.counters.insert(fence_key.to_owned(), value);
    }

    /// Moves a row's life so that it ended `past_ms` before `now`; whether there was a row.
    pub(super) fn age(&mut self, base: &str, past_ms: i64, now: i64) -> bool {
        let Some(row) = self.rows.get_mut(base) else { return false };
        let length = row.expires_at_ms.saturating_sub(row.acquired_at_ms);
        row.expires_at_ms = now.saturating_sub(past_ms);
        row.acquired_at_ms = row.expires_at_ms.saturating_sub(length);
        row.version = next(&mut self.writes);
        true
    }

    pub(super) fn remove(&mut self, base: &str) -> bool {
        match self.rows.remove(base) {
            Some(row) => {
                self.ids.remove(&row.lock_id);
                true
            }
            None => false,
        }
    }

    pub(super) fn order_loss(&mut self, ordered: OrderedLoss) {
        self.losses.insert(ordered.key.base.clone(), ordered);
    }

    /// Lets an ordered loss happen to a lease that is about to be renewed or extended; whether a
    /// renewal must answer `Busy`.
    pub(super) fn apply_loss(&mut self, lock_id: &str, now: i64, renewal: bool) -> bool {
        let Some(base) = self.ids.get(lock_id).cloned() else { return false };
        let Some(ordered) = self.losses.remove(&base) else { return false };
        match ordered.loss {
            Loss::Busy if renewal => return true,
            Loss::Busy => self.order_loss(ordered),
            Loss::Expired => {
                self.age(&base, TIME_TOLERANCE_MS, now);
            }
            Loss::RowMissing => {
                self.remove(&base);
            }
            Loss::TakenOver => {
                // A counter at its limit allows no takeover: the row is just gone.
                if self.grant(&ordered.key, ordered.taker.as_str(), ordered.ttl, now).is_err() {
                    self.remove(&base);
                }
            }
        }
        false
    }

    pub(super) fn clear_losses(&mut self) {
        self.losses.clear();
    }

    /// A lock id's row. The row's own id is compared: the mapping alone proves nothing.
    fn by_id(&self, lock_id: &str) -> Option<(&str, &Row)> {
        let base = self.ids.get(lock_id)?;
        let row = self.rows.get(base).filter(|row| row.lock_id == lock_id)?;
        Some((base, row))
    }

    /// Whether this row, live or not, carries the id.
    pub(super) fn is_of(&self, base: &str, lock_id: &str) -> bool {
        self.by_id(lock_id).is_some_and(|(found, _)| found == base)
    }

    /// The fence of the row with this id, live or not.
    pub(super) fn fence_of(&self, lock_id: &str) -> Option<Fence> {
        self.by_id(lock_id).map(|(_, row)| row.fence)
    }

    /// Notes what the holder with this id says of itself, if it was granted anything: a part of that step.
    pub(super) fn label(&mut self, lock_id: &str, label: &StoredLabel) {
        if let Some(row) = self.ids.get(lock_id).and_then(|base| self.rows.get_mut(base))
            && row.lock_id == lock_id
        {
            row.label = label.clone();
        }
    }

    /// Deletes the row with this id, live or not.
    pub(super) fn end(&mut self, lock_id: &str) {
        if let Some(base) = self.by_id(lock_id).map(|(base, _)| base.to_owned()) {
            self.remove(&base);
        }
    }

    /// How long a lease may still bar others, in milliseconds.
    pub(super) fn rest_ms(&self, lock_id: &str, now: i64) -> i64 {
        let row = self.by_id(lock_id).map(|(_, row)| row).filter(|row| row.is_live(now));
        row.map_or(0, |row| row.expires_at_ms.saturating_add(TIME_TOLERANCE_MS).saturating_sub(now))
    }
}

/// The number of one more write.
pub(super) fn next(writes: &mut u64) -> u64 {
    *writes += 1;
    *writes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Acquire { key: u8, id: u8 },
        Release(u8),
        Extend(u8),
        TakeOver { key: u8, id: u8 },
        Remove(u8),
        Wait(i64),
        Lose(u8, Loss),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let (key, id) = (0_u8..3, 0_u8..6);
        let loss =
            prop_oneof![Just(Loss::Expired), Just(Loss::RowMissing), Just(Loss::TakenOver), Just(Loss::Busy)];
        let step = prop_oneof![
            4 => (key.clone(), id.clone()).prop_map(|(key, id)| Step::Acquire { key, id }),
            2 => id.clone().prop_map(Step::Release),
            2 => id.clone().prop_map(Step::Extend),
            1 => (key.clone(), 6_u8..9).prop_map(|(key, id)| Step::TakeOver { key, id: id + 3 * key }),
            1 => key.clone().prop_map(Step::Remove),
            3 => (-500_i64..3000).prop_map(Step::Wait),
            1 => (key, loss).prop_map(|(key, loss)| Step::Lose(key, loss)),
        ];
        prop::collection::vec(step, 1..80)
    }

    fn stored(n: u8) -> StoredKey {
        let user = Key::new(&format!("key {n}")).unwrap();
        let (base, fence) = user.stored(1700, 0).unwrap();
        StoredKey { user, base, fence }
    }

    fn lock_id(n: u8) -> String {
        format!("{n:A>22}")
    }

    proptest! {
        #[test]
        fn any_history_keeps_the_invariants(steps in steps()) {
            let ttl = Ttl::new(Duration::from_secs(1)).unwrap();
            let (mut store, mut now) = (Store::default(), 1_000_000);
            let mut newest = BTreeMap::new();
            for step in steps {
                let mut granted = None;
                match step {
                    Step::Acquire { key, id } => {
                        let held = store.live_by_key(&stored(key).base, now);
                        if let Ok(Some(Grant { acquired: grant, .. })) =
                            store.acquire(&stored(key), &lock_id(id), ttl, now)
                        {
                            match held {
                                None => granted = Some((key, grant)),
                                Some(row) => prop_assert_eq!(row.lock_id, grant.lock_id),
                            }
                        }
                    }
                    Step::Release(id) => {
                        let live = store.live_by_id(&lock_id(id), now).is_some();
                        prop_assert_eq!(store.release(&lock_id(id), now) == ReleaseOutcome::Released, live);
                        prop_assert!(store.live_by_id(&lock_id(id), now).is_none());
                    }
                    Step::Extend(id) => {
                        let live = store.live_by_id(&lock_id(id), now).is_some();
                        let extended = store.extend(&lock_id(id), ttl, now);
                        prop_assert_eq!(matches!(extended, ExtendOutcome::Extended { .. }), live);
                    }
                    Step::TakeOver { key, id } => {
                        granted = Some((key, store.grant(&stored(key), &lock_id(id), ttl, now).unwrap().acquired));
                    }
                    Step::Remove(key) => drop(store.remove(&stored(key).base)),
                    Step::Wait(ms) => now += ms,
                    Step::Lose(key, loss) => {
                        let taker = LockId::generate().unwrap();
                        store.order_loss(OrderedLoss { loss, key: stored(key), taker, ttl });
                        if let Some(row) = store.live_by_key(&stored(key).base, now) {
                            let busy = store.apply_loss(&row.lock_id, now, true);
                            prop_assert_eq!(busy, loss == Loss::Busy);
                            prop_assert_eq!(store.live_by_id(&row.lock_id, now).is_some(), busy);
                        }
                        newest.insert(key, store.counter(&stored(key).fence).unwrap_or(0));
                    }
                }
                if let Some((key, grant)) = granted {
                    prop_assert!(newest.insert(key, grant.fence.get()) < Some(grant.fence.get()));
                }
                prop_assert_eq!(store.ids.len(), store.rows.len());
                for (base, row) in &store.rows {
                    prop_assert_eq!(store.ids.get(&row.lock_id), Some(base));
                    let counter = store.counters.get(&format!("fence:{base}")).copied();
                    prop_assert!(counter >= Some(row.fence.get()));
                }
            }
        }
    }

    #[test]
    fn a_row_of_another_id_is_never_taken_for_the_one_asked_for() {
        let ttl = Ttl::new(Duration::from_secs(1)).unwrap();
        let mut store = Store::default();
        let _ = store.acquire(&stored(1), &lock_id(1), ttl, 0).unwrap();
        // A mapping that has gone stale, as an index may be for a moment.
        store.ids.insert(lock_id(2), stored(1).base);
        assert_eq!(store.release(&lock_id(2), 0), ReleaseOutcome::NotHeld(Some(Reason::NotFound)));
        assert_eq!(store.extend(&lock_id(2), ttl, 0), ExtendOutcome::NotHeld(Some(Reason::NotFound)));
        assert!(store.live_by_id(&lock_id(2), 0).is_none());
        assert!(store.live_by_id(&lock_id(1), 0).is_some());
    }
}
