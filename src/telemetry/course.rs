//! A lock as a whole as one event, and the gauges that follow from all of them.

use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::time::Duration;

use crate::backend::{Connections, LockCourse, LockEnding, LockKind, LockStage, LostReason};

/// A lock as a whole: how long the wait was, how long it was held, and how it ended. See
/// [`TelemetryOptions::on_lock`](crate::TelemetryOptions::on_lock).
///
/// ```
/// use syncguard::{MemoryBackend, LockClient, TelemetryOptions, with_telemetry};
///
/// let options = TelemetryOptions::new(|_| {}).on_lock(|lock| {
///     println!("{} {} after {:?}, held for {:?}", lock.kind.as_str(), lock.ending.as_str(), lock.waited, lock.held);
/// });
/// let client = LockClient::new(with_telemetry(MemoryBackend::new(), options));
/// drop(client.lock("report")?);
/// # Ok::<(), syncguard::LockError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LockSummary {
    /// What was taken.
    pub kind: LockKind,
    /// [`hash_key`](crate::hash_key) of the key: of the first of several, of the semaphore's name.
    pub key_hash: String,
    /// How many keys.
    pub keys: usize,
    /// How long it took until it was granted, or given up.
    pub waited: Duration,
    /// How often the backend was asked to grant it; 0 if others of this process were ahead all the time.
    pub attempts: u64,
    /// How long it was held; `None` if it never was.
    pub held: Option<Duration>,
    /// How it ended.
    pub ending: LockEnding,
    /// Who asked for it, where the client says so: [`PgLockClientBuilder::owner`](crate::PgLockClientBuilder::owner).
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub owner: Option<String>,
    /// What for: [`LockOptions::note`](crate::LockOptions::note).
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub note: Option<String>,
}

impl LockSummary {
    /// Why it was lost, if it was.
    #[must_use]
    pub const fn lost(&self) -> Option<LostReason> {
        match self.ending {
            LockEnding::Lost(reason) => Some(reason),
            _ => None,
        }
    }
}

/// A stage on its way to the telemetry thread.
pub(super) struct Step {
    pub(super) stage: LockStage,
    kind: LockKind,
    key: String,
    keys: usize,
    waited: Duration,
    attempts: u64,
    /// Of a whole that is over.
    label: (Option<String>, Option<String>),
}

impl Step {
    pub(super) fn of(course: &LockCourse<'_>) -> Self {
        let LockCourse { kind, key, keys, waited, attempts, stage, label } = *course;
        let ended = matches!(stage, LockStage::Ended { .. });
        let said = |text: Option<&str>| text.filter(|_| ended).map(str::to_owned);
        let label = (said(label.owner), said(label.note));
        Self { stage, kind, key: key.to_owned(), keys, waited, attempts, label }
    }

    #[cfg(feature = "metrics")]
    pub(super) fn kind(&self) -> LockKind {
        self.kind
    }

    #[cfg(feature = "metrics")]
    pub(super) fn waited(&self) -> Duration {
        self.waited
    }

    /// The whole, once it is over.
    pub(super) fn summary(&self) -> Option<LockSummary> {
        let LockStage::Ended { held, ending } = self.stage else { return None };
        let Self { kind, keys, waited, attempts, .. } = *self;
        let key_hash = crate::model::hash::hash_key(&self.key);
        let (owner, note) = self.label.clone();
        Some(LockSummary { kind, key_hash, keys, waited, attempts, held, ending, owner, note })
    }
}

/// How many calls wait and how much is held just now. Counted where it happens: an event that was dropped must
/// not leave a wrong level behind.
#[derive(Default)]
pub(super) struct Levels {
    pub(super) waiting: AtomicI64,
    pub(super) held: AtomicI64,
    pub(super) in_use: AtomicU32,
    pub(super) max: AtomicU32,
}

impl Levels {
    pub(super) fn count(&self, stage: LockStage) {
        let (waiting, held) = match stage {
            LockStage::Begun => (1, 0),
            LockStage::Granted => (-1, 1),
            LockStage::Ended { held: None, .. } => (-1, 0),
            LockStage::Ended { held: Some(_), .. } => (0, -1),
            LockStage::Renewed { .. } => return,
        };
        self.waiting.fetch_add(waiting, Ordering::Relaxed);
        self.held.fetch_add(held, Ordering::Relaxed);
    }

    pub(super) fn note(&self, connections: Connections) {
        self.in_use.store(connections.in_use, Ordering::Relaxed);
        self.max.store(connections.max, Ordering::Relaxed);
    }
}

/// The key is left out.
impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Step").field("stage", &self.stage).field("kind", &self.kind).finish_non_exhaustive()
    }
}
