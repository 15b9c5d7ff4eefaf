//! The course of a lock as a whole, for telemetry: what a call waited for, what it got, and how that ended.

use std::time::Duration;

use crate::backend::label::Label;
use crate::backend::outcome::LostReason;
use crate::error::ErrorCode;

/// What a call takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum LockKind {
    /// One key.
    Lock,
    /// Several keys at once.
    Set,
    /// A permit of a semaphore.
    Permit,
    /// A term of a leader.
    Term,
    /// A job that runs once per slot.
    Run,
    /// One key, as one of its readers.
    Shared,
}

impl LockKind {
    /// `lock`, `set`, `permit`, `term`, `run` or `shared`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Lock => "lock",
            Self::Set => "set",
            Self::Permit => "permit",
            Self::Term => "term",
            Self::Run => "run",
            Self::Shared => "shared",
        }
    }
}

/// How a call that got nothing ended, or how a holding ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum LockEnding {
    /// A single try found another holder.
    Busy,
    /// The job of this slot had run.
    SlotDone,
    /// The call failed; `AcquisitionTimeout` where its time was over.
    Failed(ErrorCode),
    /// The holder released it.
    Released,
    /// The holder gave the lease away, without releasing it.
    Leaked,
    /// The lease could not be trusted any more.
    Lost(LostReason),
}

impl LockEnding {
    /// One word: `busy`, `slot_done`, `released`, `leaked`, `lost`, or the code of the error.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::SlotDone => "slot_done",
            Self::Failed(code) => code.as_str(),
            Self::Released => "released",
            Self::Leaked => "leaked",
            Self::Lost(_) => "lost",
        }
    }
}

/// How far a call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockStage {
    /// It has begun. Comes first, once.
    Begun,
    /// It holds what it asked for.
    Granted,
    /// A renewal was confirmed.
    Renewed {
        /// The time between its request and that of the previous confirmed one.
        gap: Duration,
    },
    /// It is over. Comes last, once.
    Ended {
        /// How long it was held; `None` if it never was.
        held: Option<Duration>,
        /// How it ended.
        ending: LockEnding,
    },
}

/// One stage of a call. See [`LockBackend::follow`](crate::backend::LockBackend::follow).
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct LockCourse<'a> {
    /// What it takes.
    pub kind: LockKind,
    /// The key, or the first of several, or the semaphore's name.
    pub key: &'a str,
    /// How many keys.
    pub keys: usize,
    /// How long it has waited until it was granted, or gave up.
    pub waited: Duration,
    /// How many attempts it has made.
    pub attempts: u64,
    /// How far it has come.
    pub stage: LockStage,
    /// What who asks says of itself.
    pub label: Label<'a>,
}

impl<'a> LockCourse<'a> {
    /// A stage of a call for these keys, of which this is the first, before any wait.
    #[must_use]
    pub const fn new(kind: LockKind, key: &'a str, keys: usize, stage: LockStage) -> Self {
        let label = Label { owner: None, note: None };
        Self { kind, key, keys, waited: Duration::ZERO, attempts: 0, stage, label }
    }
}

/// The key is left out.
impl std::fmt::Debug for LockCourse<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LockCourse")
            .field("kind", &self.kind)
            .field("keys", &self.keys)
            .field("waited", &self.waited)
            .field("attempts", &self.attempts)
            .field("stage", &self.stage)
            .finish_non_exhaustive()
    }
}

/// The connections of a backend that has any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Connections {
    /// How many are in use now.
    pub in_use: u32,
    /// The most that there may be.
    pub max: u32,
}

impl Connections {
    /// `in_use` of `max`.
    #[must_use]
    pub const fn new(in_use: u32, max: u32) -> Self {
        Self { in_use, max }
    }
}
