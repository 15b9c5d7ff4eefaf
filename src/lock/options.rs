//! The options of a lock, and the numbers that they become.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::LostReason;
use crate::cancel::CancelToken;
use crate::error::LockError;
use crate::lock::report::{OnReleaseError, ReleaseErrorContext};
use crate::threads::UserValue;
use crate::waiting::{Backoff, Delays, Jitter};

pub(super) type OnLost = UserValue<Arc<dyn Fn(LostReason) + Send + Sync>>;

/// How long a lease lasts unless it is renewed.
pub const DEFAULT_TTL: Duration = Duration::from_secs(30);
/// How long `lock` waits for a key.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);
/// How often `lock` tries again after its first attempt.
pub const DEFAULT_MAX_RETRIES: u32 = 10;
/// The wait before the first retry.
pub const DEFAULT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// How often a guard renews its lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Heartbeat {
    /// Every third of the ttl.
    #[default]
    Auto,
    /// At this interval: above zero and below the ttl.
    Every(Duration),
    /// Never: the lock is lost when its ttl is over, unless the holder extends it.
    Off,
}

/// How to wait for a lock, and how to hold it.
///
/// Setters consume the options and never fail; an invalid value is
/// [`InvalidArgument`](crate::ErrorCode::InvalidArgument) where the options are used.
///
/// ```
/// use std::time::Duration;
/// use syncguard::LockOptions;
///
/// let nightly = LockOptions::new().ttl(Duration::from_secs(60)).timeout(Duration::from_secs(1));
/// # let _ = nightly;
/// ```
#[derive(Clone, Default)]
#[must_use = "options do nothing until they are handed to lock_with, try_lock_with or with_lock"]
pub struct LockOptions {
    pub(super) ttl: Option<Duration>,
    pub(super) timeout: Option<Timeout>,
    pub(super) max_retries: Option<u32>,
    pub(super) retry_delay: Option<Duration>,
    pub(super) backoff: Backoff,
    pub(super) jitter: Jitter,
    pub(super) heartbeat: Heartbeat,
    pub(super) max_hold: Option<Duration>,
    pub(super) min_hold: Duration,
    pub(super) only_backoff: bool,
    pub(super) fair: bool,
    pub(super) priority: i32,
    pub(super) cancel: Option<CancelToken>,
    pub(super) on_lost: Option<OnLost>,
    pub(super) on_release_error: Option<OnReleaseError>,
    pub(super) note: Option<Arc<str>>,
}

#[derive(Clone, Copy)]
pub(super) enum Timeout {
    After(Duration),
    Never,
}

impl LockOptions {
    /// The defaults: ttl 30 s, renewed every 10 s; wait at most 5 s, at most 10 retries, 100 ms
    /// before the first and twice as long before each later one, half of it random.
    ///
    /// ```
    /// let options = syncguard::LockOptions::new();
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// How long the lease lasts from its grant and from each renewal. Default [`DEFAULT_TTL`], 1 ms
    /// to [`MAX_TTL`](crate::MAX_TTL), whole milliseconds; 10 to 60 s are usual.
    ///
    /// When the holder's process dies, the key is free again after this time plus one second.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let options = syncguard::LockOptions::new().ttl(Duration::from_secs(60));
    /// ```
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// How long `lock` may take in all: queueing, attempts and the waits between them. Default
    /// [`DEFAULT_TIMEOUT`]. A timeout that is set here is waited out: it lifts the *default* limit of
    /// retries. A limit set with [`max_retries`](Self::max_retries) still ends the wait, whichever
    /// of the two is set first. No other option lengthens it. `try_lock` does not wait and
    /// ignores it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let options = syncguard::LockOptions::new().timeout(Duration::from_secs(20));
    /// ```
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(Timeout::After(timeout));
        self
    }

    /// `lock` waits until it has the lock, is cancelled, or fails. Also lifts the *default* limit of
    /// retries; a limit set with [`LockOptions::max_retries`] stays, whichever is set first.
    ///
    /// ```
    /// let options = syncguard::LockOptions::new().wait_forever();
    /// ```
    pub fn wait_forever(mut self) -> Self {
        self.timeout = Some(Timeout::Never);
        self
    }

    /// How often `lock` tries again: it makes at most this many attempts and one more. Default
    /// [`DEFAULT_MAX_RETRIES`] where neither [`timeout`](Self::timeout) nor
    /// [`wait_forever`](Self::wait_forever) was called, otherwise no limit. With the default waits
    /// between them ten retries are used up after 51 to 102 s, with [`Backoff::Fixed`] after half a
    /// second to a second.
    ///
    /// Time in this process's queue, and attempts after a release in this process, do not count as retries.
    ///
    /// ```
    /// let options = syncguard::LockOptions::new().max_retries(3);
    /// ```
    pub fn max_retries(mut self, retries: u32) -> Self {
        self.max_retries = Some(retries);
        self
    }

    /// The wait before the first retry, and the base of [`Backoff`]. Default
    /// [`DEFAULT_RETRY_DELAY`]. A release in this process ends a wait early.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let options = syncguard::LockOptions::new().retry_delay(Duration::from_millis(20));
    /// ```
    pub fn retry_delay(mut self, delay: Duration) -> Self {
        self.retry_delay = Some(delay);
        self
    }

    /// Whether a waiter notices within milliseconds that another process released the key. Default true.
    ///
    /// The first waiter of a key in this process then looks at it between two attempts, with one
    /// plain read that locks and writes nothing: every 5 ms at first, later at intervals of a sixteenth of
    /// the time waited so far, and at least every 250 ms. Looks are not attempts. After 30 ms the
    /// backend is asked to report when the key is released, if it can
    /// ([`LockBackend::watch`](crate::LockBackend::watch)); while it can, looks are rarer. With
    /// `false` only the backoff and releases in this process end a wait.
    ///
    /// ```
    /// let options = syncguard::LockOptions::new().wake_ups(false);
    /// ```
    pub fn wake_ups(mut self, wake_ups: bool) -> Self {
        self.only_backoff = !wake_ups;
        self
    }

    /// How the wait grows. Default [`Backoff::Exponential`].
    ///
    /// ```
    /// use syncguard::{Backoff, LockOptions};
    ///
    /// let options = LockOptions::new().backoff(Backoff::Fixed);
    /// ```
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// How much of the wait is random. Default [`Jitter::Equal`].
    ///
    /// ```
    /// use syncguard::{Jitter, LockOptions};
    ///
    /// let options = LockOptions::new().jitter(Jitter::Full);
    /// ```
    pub fn jitter(mut self, jitter: Jitter) -> Self {
        self.jitter = jitter;
        self
    }

    /// How often the lease is renewed while the guard lives. Default [`Heartbeat::Auto`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// use syncguard::{Heartbeat, LockOptions};
    ///
    /// let options = LockOptions::new().heartbeat(Heartbeat::Every(Duration::from_secs(5)));
    /// ```
    pub fn heartbeat(mut self, heartbeat: Heartbeat) -> Self {
        self.heartbeat = heartbeat;
        self
    }

    /// The longest time that a guard holds its lock, from the grant: after it the lock counts as lost
    /// ([`LostReason::MaxHold`]) and is not renewed any more, so that a stuck holder cannot keep a
    /// key forever. The key is free when the guard is dropped, at the latest a ttl and a second
    /// later. Extending does not lengthen it. Default: no limit.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let options = syncguard::LockOptions::new().max_hold(Duration::from_secs(3600));
    /// ```
    pub fn max_hold(mut self, limit: Duration) -> Self {
        self.max_hold = Some(limit);
        self
    }

    /// The shortest time that the key stays taken, from the grant, even when the guard ends sooner: for
    /// scheduled jobs that must run once although the machines' clocks differ by seconds.
    ///
    /// The holder does not wait for it: releasing or dropping the guard returns as usual and leaves
    /// the rest to the client's worker, or to the lease's own end if the process ends first.
    /// Default zero; at most [`MAX_TTL`](crate::MAX_TTL).
    ///
    /// ```
    /// # use std::time::Duration;
    /// let options = syncguard::LockOptions::new().min_hold(Duration::from_secs(10));
    /// ```
    pub fn min_hold(mut self, limit: Duration) -> Self {
        self.min_hold = limit;
        self
    }

    /// Whether waiters with this option are served in the order in which they came, on all machines
    /// together. Default false: chance decides between processes.
    ///
    /// From its first refusal on a waiter has a *ticket*, a row in the table of members that it refreshes each second,
    /// and an attempt is granted only if no live ticket is ahead. A waiter that dies, is paused or cut off loses its turn
    /// after two seconds, and has its place again when it is back. A ticket delays only calls with this option: others
    /// take the key when it is free, as always. `try_lock_with` does not wait, and yields to waiters.
    ///
    /// For `lock_with`, `try_lock_with`, `with_lock` and `elect`. Readers, permits, several keys and `run_once` refuse it,
    /// and so does [`wake_ups(false)`](Self::wake_ups): the first waiter must notice that the key is free.
    /// On PostgreSQL it needs the table of members:
    /// [what it costs](https://docs.rs/crate/syncguard/latest/source/docs/fair-waiting.md).
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use syncguard::LockOptions;
    ///
    /// let in_order = LockOptions::new().fair(true);
    /// let guard = client.lock_with("till:3", &in_order)?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn fair(mut self, fair: bool) -> Self {
        self.fair = fair;
        self
    }

    /// The priority among waiters that are [served in order](Self::fair): greater numbers come first, and among equals
    /// the waiter that has waited longer. Default 0; `InvalidArgument` without `fair(true)`.
    ///
    /// Priorities do not grow with time: while greater numbers keep coming, a smaller one waits until its timeout.
    ///
    /// ```
    /// let urgent = syncguard::LockOptions::new().fair(true).priority(10);
    /// ```
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Ends the wait when the token fires, with [`Aborted`](crate::ErrorCode::Aborted). It is
    /// watched in addition to the client's own (`cancellable`), and not by the guard: a cancelled
    /// holder still releases.
    ///
    /// ```
    /// use syncguard::{CancelToken, LockOptions};
    ///
    /// let shutdown = CancelToken::new();
    /// let options = LockOptions::new().wait_forever().cancel(&shutdown);
    /// ```
    pub fn cancel(mut self, token: &CancelToken) -> Self {
        self.cancel = Some(token.clone());
        self
    }

    /// Called once if the lease is lost while the guard lives, on the client's worker thread: it
    /// must be short, or renewals wait for it. Panics are caught.
    ///
    /// ```
    /// let options = syncguard::LockOptions::new().on_lost(|reason| eprintln!("lost: {reason}"));
    /// ```
    pub fn on_lost(mut self, call: impl Fn(LostReason) + Send + Sync + 'static) -> Self {
        self.on_lost = Some(UserValue::new(Arc::new(call)));
        self
    }

    /// Called when an automatic release failed (the guard's `Drop`, the end of `with_lock`, the
    /// worker), instead of the client's own handler. Panics are caught.
    ///
    /// It runs on the thread that released, or on the client's worker.
    ///
    /// ```
    /// let options = syncguard::LockOptions::new().on_release_error(|error, context| {
    ///     eprintln!("{} could not be released: {}", context.source.as_str(), error.chain());
    /// });
    /// ```
    pub fn on_release_error(
        mut self,
        call: impl Fn(&LockError, &ReleaseErrorContext) + Send + Sync + 'static,
    ) -> Self {
        self.on_release_error = Some(UserValue::new(Arc::new(call)));
        self
    }

    /// What the lock is held for, in words for people, at most 1 KiB ([`MAX_NOTE_BYTES`](crate::backend::MAX_NOTE_BYTES)): shown to whoever asks who
    /// has the key, beside the client's [`owner`](crate::PgLockClientBuilder::owner), which need not be set for it.
    /// Default: none.
    ///
    /// It is written with the grant into the optional table of members, in the same message; the first lock with a note
    /// makes that table unless [`auto_create_tables(false)`](crate::PgLockClientBuilder::auto_create_tables)
    /// forbids it. Everybody who may read that table can read it: no secrets.
    ///
    /// ```
    /// use syncguard::{LockClient, LockOptions, MemoryBackend};
    ///
    /// let client = LockClient::new(MemoryBackend::new());
    /// let guard = client.lock_with("report", &LockOptions::new().note("invoices of November"))?;
    /// let held = client.get_by_key("report")?.expect("it is held");
    /// assert_eq!(held.note.as_deref(), Some("invoices of November"));
    /// # drop(guard);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into().into());
        self
    }

    /// The same for a wait that only a token, or the client's end, is to end.
    pub(super) fn without_limits(&self) -> Self {
        Self { timeout: Some(Timeout::Never), max_retries: None, ..self.clone() }
    }
}

impl fmt::Debug for LockOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let timeout = match self.timeout {
            None => Some(DEFAULT_TIMEOUT),
            Some(Timeout::After(timeout)) => Some(timeout),
            Some(Timeout::Never) => None,
        };
        f.debug_struct("LockOptions")
            .field("ttl", &self.ttl.unwrap_or(DEFAULT_TTL))
            .field("timeout", &timeout)
            .field("max_retries", &self.max_retries)
            .field("retry_delay", &self.retry_delay.unwrap_or(DEFAULT_RETRY_DELAY))
            .field("backoff", &self.backoff)
            .field("jitter", &self.jitter)
            .field("wake_ups", &!self.only_backoff)
            .field("fair", &self.fair)
            .field("priority", &self.priority)
            .field("heartbeat", &self.heartbeat)
            .field("max_hold", &self.max_hold)
            .field("min_hold", &self.min_hold)
            .finish_non_exhaustive()
    }
}

/// Options as numbers, as [`resolve`](LockOptions::resolve) has checked them.
#[derive(Clone)]
pub(super) struct ResolvedOptions {
    pub(super) ttl: Duration,
    /// `None`: forever.
    pub(super) timeout: Option<Duration>,
    pub(super) max_attempts: u64,
    pub(super) delays: Delays,
    /// Whether to look at the key between two attempts.
    pub(super) wake_ups: bool,
    /// The priority of whoever is to be served in order.
    pub(super) turn: Option<i32>,
    pub(super) heartbeat: Heartbeat,
    pub(super) max_hold: Option<Duration>,
    pub(super) min_hold: Duration,
    pub(super) cancel: CancelToken,
    pub(super) on_lost: Option<OnLost>,
    pub(super) on_release_error: Option<OnReleaseError>,
    pub(super) note: Option<Arc<str>>,
}
