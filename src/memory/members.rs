//! The readers of all keys, and the writers that have announced themselves.

use std::collections::BTreeMap;

use crate::backend::{Acquired, Grant, LONGEST_TICKET_MS, Version};
use crate::memory::store::StoredLabel;
use crate::model::fence::Fence;
use crate::model::time::{TIME_TOLERANCE_MS, is_live};

/// What a group's lock id begins with: no lock id has this character.
pub(super) const GROUP: &str = "~shared~";

/// The readers of all keys by their ids, and the writers that have announced themselves.
#[derive(Default)]
pub(super) struct Readers {
    pub(super) members: BTreeMap<String, Member>,
    pub(super) intents: BTreeMap<String, Waiting>,
}

#[derive(Clone)]
pub(super) struct Member {
    pub(super) base: String,
    pub(super) since_ms: i64,
    pub(super) expires_at_ms: i64,
    pub(super) fence: Fence,
    pub(super) version: u64,
    pub(super) label: StoredLabel,
}

pub(super) struct Waiting {
    pub(super) base: String,
    pub(super) since_ms: i64,
    pub(super) expires_at_ms: i64,
    pub(super) priority: i32,
}

impl Waiting {
    /// Whether it still waits. What says that it lasts for too long is nobody's.
    pub(super) fn is_in_line(&self, now: i64) -> bool {
        self.expires_at_ms > now && self.expires_at_ms <= now.saturating_add(LONGEST_TICKET_MS)
    }
}

impl Member {
    pub(super) fn is_live(&self, now: i64) -> bool {
        is_live(self.expires_at_ms, now, TIME_TOLERANCE_MS)
    }

    pub(super) fn grant(&self, lock_id: &str) -> Grant {
        let acquired =
            Acquired { lock_id: lock_id.to_owned(), fence: self.fence, expires_at_ms: self.expires_at_ms };
        Grant { acquired, version: Some(Version::new(self.version)) }
    }
}
