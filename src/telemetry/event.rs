//! The events, and who may see what in them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::Reason;
use crate::error::ErrorCode;
use crate::telemetry::course::LockSummary;
use crate::threads::UserValue;

/// Which of the five operations an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "camelCase"))]
#[non_exhaustive]
pub enum Operation {
    /// An attempt to take a key.
    Acquire,
    /// Releasing a lease.
    Release,
    /// Extending or renewing a lease.
    Extend,
    /// Asking whether a key has a live lease.
    IsLocked,
    /// Looking a lease up.
    Lookup,
}

impl Operation {
    /// The name in every SyncGuard client: `acquire`, `release`, `extend`, `isLocked` or `lookup`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Release => "release",
            Self::Extend => "extend",
            Self::IsLocked => "isLocked",
            Self::Lookup => "lookup",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum EventResult {
    /// Acquired, released, extended, locked, found.
    Ok,
    /// Anything else: a negative answer, with its reason where one is known, or an error.
    Fail,
}

impl EventResult {
    /// `ok` or `fail`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Fail => "fail",
        }
    }
}

impl fmt::Display for EventResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One operation that has ended.
///
/// `Debug` never shows the raw key and lock id, even where the event carries them.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LockEvent {
    /// What was done.
    pub operation: Operation,
    /// How it ended.
    pub result: EventResult,
    /// [`hash_key`](crate::hash_key) of the key: for acquire, isLocked, lookup by key, and renewals.
    pub key_hash: Option<String>,
    /// [`hash_key`](crate::hash_key) of the lock id: for release, extend, lookup by id, renewals,
    /// and an acquire that was granted.
    pub lock_id_hash: Option<String>,
    /// Why an acquire, release or extend was refused, if known. Never for a success, an error,
    /// isLocked and lookup: there `fail` means a negative answer (or an error, see `error`).
    pub reason: Option<Reason>,
    /// The code of an operation that failed with an error.
    pub error: Option<ErrorCode>,
    /// How long the operation took in this process; for a renewal, the whole batch.
    pub duration: Duration,
    /// The raw key, where `key_hash` is there and the options permit it; never one that is far too
    /// long to be valid. **Sensitive.**
    #[cfg_attr(feature = "serde", serde(skip))]
    pub key: Option<String>,
    /// The raw lock id, where `lock_id_hash` is there and the options permit it. **Sensitive**:
    /// whoever knows it can release the lock.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub lock_id: Option<String>,
}

impl fmt::Debug for LockEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockEvent")
            .field("operation", &self.operation.as_str())
            .field("result", &self.result.as_str())
            .field("key_hash", &self.key_hash)
            .field("lock_id_hash", &self.lock_id_hash)
            .field("reason", &self.reason.map(Reason::as_str))
            .field("error", &self.error)
            .field("duration", &self.duration)
            .field("key", &self.key.as_ref().map(|_| ".."))
            .field("lock_id", &self.lock_id.as_ref().map(|_| ".."))
            .finish()
    }
}

/// Where events go, and what they may contain.
///
/// ```
/// use syncguard::TelemetryOptions;
///
/// let options = TelemetryOptions::new(|event| log::info!("{} {}", event.operation, event.result))
///     .include_raw(false)
///     .queue_capacity(1024);
/// # let _ = options;
/// ```
#[derive(Clone)]
#[must_use = "options do nothing until they are given to a client or with_telemetry"]
pub struct TelemetryOptions {
    pub(super) on_event: OnEvent,
    pub(super) raw: Raw,
    pub(super) capacity: usize,
    pub(super) flush_timeout: Duration,
    pub(super) on_lock: Option<OnLock>,
    pub(super) metrics: bool,
    pub(super) tracing: bool,
}

type OnLock = UserValue<Arc<dyn Fn(&LockSummary) + Send + Sync>>;

type OnEvent = UserValue<Arc<dyn Fn(&LockEvent) + Send + Sync>>;
type Permit = UserValue<Arc<dyn Fn(&LockEvent) -> bool + Send + Sync>>;

/// Who may see raw keys and lock ids.
#[derive(Clone)]
pub(super) enum Raw {
    Never,
    Always,
    If(Permit),
}

impl TelemetryOptions {
    /// Calls `on_event` for each operation, on a thread of its own and in the order in which the
    /// operations ended. It may be slow, panic, or use locks itself (its own operations are
    /// reported as well); it cannot delay or fail an operation.
    pub fn new(on_event: impl Fn(&LockEvent) + Send + Sync + 'static) -> Self {
        Self {
            on_event: UserValue::new(Arc::new(on_event)),
            raw: Raw::Never,
            capacity: 16_384,
            flush_timeout: Duration::from_secs(1),
            on_lock: None,
            metrics: false,
            tracing: false,
        }
    }

    /// Calls `on_lock` once for each lock, set, permit, term and run as a whole, when it has ended or was not
    /// granted. It runs on the same thread as the other events, and may do the same. Raw
    /// operations, which have no guard, are not included.
    pub fn on_lock(mut self, on_lock: impl Fn(&LockSummary) + Send + Sync + 'static) -> Self {
        self.on_lock = Some(UserValue::new(Arc::new(on_lock)));
        self
    }

    /// Reports all events to the recorder of the crate [`metrics`](https://docs.rs/metrics), with the feature
    /// `metrics`. [`docs/metrics.md`](https://docs.rs/crate/syncguard/latest/source/docs/metrics.md) has the names. It is called on the telemetry thread;
    /// without a recorder nothing happens.
    ///
    /// ```
    /// let options = syncguard::TelemetryOptions::new(|_| {}).with_metrics();
    /// ```
    #[cfg(feature = "metrics")]
    pub fn with_metrics(mut self) -> Self {
        self.metrics = true;
        self
    }

    /// Reports all events to the subscriber of the crate [`tracing`](https://docs.rs/tracing), with the feature
    /// `tracing`. Operations are events of the target `syncguard::operation` at debug level, whole locks of
    /// `syncguard::lock` at info level, or warn if they were lost. They come from the telemetry thread: the
    /// subscriber must be the global one, and they are in no span.
    ///
    /// ```
    /// let options = syncguard::TelemetryOptions::new(|_| {}).with_tracing();
    /// ```
    #[cfg(feature = "tracing")]
    pub fn with_tracing(mut self) -> Self {
        self.tracing = true;
        self
    }

    /// Whether anybody hears of whole locks.
    pub(super) fn follows(&self) -> bool {
        self.on_lock.is_some() || self.metrics || self.tracing
    }

    /// Whether events carry raw keys and lock ids. Off by default.
    pub fn include_raw(mut self, include: bool) -> Self {
        self.raw = if include { Raw::Always } else { Raw::Never };
        self
    }

    /// Decides, event by event, whether it carries the raw key and lock id. The function sees the
    /// event without them, on the thread of the callback; if it panics, the answer is no.
    pub fn include_raw_if(mut self, permit: impl Fn(&LockEvent) -> bool + Send + Sync + 'static) -> Self {
        self.raw = Raw::If(UserValue::new(Arc::new(permit)));
        self
    }

    /// How many events may wait for the callback, 16,384 by default; events beyond that
    /// are dropped, and counted by [`TelemetryHandle::dropped`](crate::TelemetryHandle::dropped). With 0
    /// everything is dropped.
    pub fn queue_capacity(mut self, events: usize) -> Self {
        self.capacity = events;
        self
    }

    /// How long the drop of the last handle waits for events that are still in the queue, 1 s by
    /// default. Events that are left then are dropped and counted. [`PgLockClient::close`](crate::PgLockClient::close)
    /// waits for as long, and drops nothing.
    pub fn flush_timeout(mut self, timeout: Duration) -> Self {
        self.flush_timeout = timeout;
        self
    }
}

impl fmt::Debug for TelemetryOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let raw = match self.raw {
            Raw::Never => "never",
            Raw::Always => "always",
            Raw::If(_) => "if permitted",
        };
        f.debug_struct("TelemetryOptions")
            .field("include_raw", &raw)
            .field("queue_capacity", &self.capacity)
            .field("flush_timeout", &self.flush_timeout)
            .finish_non_exhaustive()
    }
}
