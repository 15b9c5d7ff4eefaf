//! Leases that are taken, held and lost together.

use std::sync::{Arc, OnceLock, Weak};

use crate::backend::LostReason;

/// What the leases of one guard share. The guard holds the members.
pub(super) struct LeaseSet<T> {
    members: OnceLock<Vec<Weak<T>>>,
    lost: OnceLock<LostReason>,
}

impl<T> LeaseSet<T> {
    pub(super) const fn new() -> Self {
        Self { members: OnceLock::new(), lost: OnceLock::new() }
    }

    /// Says once which leases these are, before any of them can be lost.
    pub(super) fn is_of(&self, members: &[Arc<T>]) {
        self.members.get_or_init(|| members.iter().map(Arc::downgrade).collect());
    }

    /// Those of them that the guard still has.
    pub(super) fn members(&self) -> impl Iterator<Item = Arc<T>> + '_ {
        self.members.get().into_iter().flatten().filter_map(Weak::upgrade)
    }

    /// Notes that one of them is lost. Whether it is the first one.
    pub(super) fn lose(&self, reason: LostReason) -> bool {
        self.lost.set(reason).is_ok()
    }

    /// Why the first one was lost.
    pub(super) fn lost(&self) -> Option<LostReason> {
        self.lost.get().copied()
    }
}
