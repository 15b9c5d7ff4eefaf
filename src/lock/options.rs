//! What a caller may choose for one lock, and what it means in numbers.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::LostReason;
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::lock::report::{OnReleaseError, ReleaseErrorContext};
use crate::model::time::Ttl;
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

/// The longest wait that doubling makes: the tenth retry of the default is just below it. A longer
/// [`LockOptions::retry_delay`] stays as it is.
const LONGEST_DELAY: Duration = Duration::from_secs(60);

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
    ttl: Option<Duration>,
    timeout: Option<Timeout>,
    max_retries: Option<u32>,
    retry_delay: Option<Duration>,
    backoff: Backoff,
    jitter: Jitter,
    heartbeat: Heartbeat,
    max_hold: Option<Duration>,
    min_hold: Duration,
    only_backoff: bool,
    cancel: Option<CancelToken>,
    on_lost: Option<OnLost>,
    on_release_error: Option<OnReleaseError>,
}

#[derive(Clone, Copy)]
enum Timeout {
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
    /// retries. A limit that was set with [`max_retries`](Self::max_retries) still ends the wait, in
    /// whatever order the two are set. No other option lengthens it. `try_lock` does not wait and
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
    /// retries; a limit that was set with [`LockOptions::max_retries`] stays, in whatever order.
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
    /// Time in this process's queue and attempts that a release in this process called for are free.
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
    /// plain read that locks and writes nothing: every 5 ms at first, later at every sixteenth of
    /// the time waited so far, and at least every 250 ms. Looks are not attempts. After 30 ms the
    /// backend is asked to tell when the key is released, if it can
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

    /// The longest time a guard holds its lock, from the grant: then it counts as lost
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

    /// The shortest time the key stays taken, from the grant, even when the guard ends sooner: for
    /// scheduled jobs that must run once although the machines' clocks differ by seconds.
    ///
    /// The holder does not wait for it: releasing or dropping the guard returns as usual and leaves
    /// the rest to the client's worker, and to the lease's own end should the process end first.
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

    /// The same for a wait that only a token, or the client's end, is to end.
    pub(super) fn without_limits(&self) -> Self {
        Self { timeout: Some(Timeout::Never), max_retries: None, ..self.clone() }
    }

    /// The options as numbers, or what is wrong with them.
    pub(super) fn resolve(&self) -> Result<ResolvedOptions> {
        let ttl = Ttl::new(self.ttl.unwrap_or(DEFAULT_TTL))?.get();
        if let Heartbeat::Every(interval) = self.heartbeat
            && (interval.is_zero() || interval >= ttl)
        {
            return Err(LockError::invalid(
                "the heartbeat interval must be above zero and below the ttl: a third of the ttl is usual",
            ));
        }
        if !self.min_hold.is_zero() {
            Ttl::new(self.min_hold.max(Duration::from_millis(1)))
                .map_err(|_| LockError::invalid("min_hold is above 366 days"))?;
        }
        if self.max_hold.is_some_and(|max| max < self.min_hold) {
            return Err(LockError::invalid("max_hold is below min_hold"));
        }
        let timeout = match self.timeout {
            None => Some(DEFAULT_TIMEOUT),
            Some(Timeout::After(timeout)) => Some(timeout),
            Some(Timeout::Never) => None,
        };
        // Whoever says how long to wait, or forever, has not asked for a number of tries.
        let default_retries =
            if self.timeout.is_none() { u64::from(DEFAULT_MAX_RETRIES) } else { u64::MAX - 1 };
        let retry_delay = self.retry_delay.unwrap_or(DEFAULT_RETRY_DELAY);
        Ok(ResolvedOptions {
            ttl,
            timeout,
            max_attempts: self.max_retries.map_or(default_retries, u64::from) + 1,
            delays: Delays {
                first: retry_delay,
                longest: LONGEST_DELAY.max(retry_delay),
                backoff: self.backoff,
                jitter: self.jitter,
            },
            wake_ups: !self.only_backoff,
            heartbeat: self.heartbeat,
            max_hold: self.max_hold,
            min_hold: self.min_hold,
            cancel: self.cancel.clone().unwrap_or(CancelToken::never()),
            on_lost: self.on_lost.clone(),
            on_release_error: self.on_release_error.clone(),
        })
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
            .field("heartbeat", &self.heartbeat)
            .field("max_hold", &self.max_hold)
            .field("min_hold", &self.min_hold)
            .finish_non_exhaustive()
    }
}

/// Validated options.
#[derive(Clone)]
pub(super) struct ResolvedOptions {
    pub(super) ttl: Duration,
    /// `None`: forever.
    pub(super) timeout: Option<Duration>,
    pub(super) max_attempts: u64,
    pub(super) delays: Delays,
    /// Whether to look at the key between two attempts.
    pub(super) wake_ups: bool,
    pub(super) heartbeat: Heartbeat,
    pub(super) max_hold: Option<Duration>,
    pub(super) min_hold: Duration,
    pub(super) cancel: CancelToken,
    pub(super) on_lost: Option<OnLost>,
    pub(super) on_release_error: Option<OnReleaseError>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;

    fn delays(options: &LockOptions) -> Delays {
        options.resolve().unwrap().delays
    }

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn the_defaults_are_those_of_every_client() {
        let options = LockOptions::new().resolve().unwrap();
        assert_eq!((options.ttl, options.timeout), (Duration::from_secs(30), Some(Duration::from_secs(5))));
        assert_eq!(options.max_attempts, 11);
        assert_eq!(
            (options.delays.first, options.delays.backoff, options.delays.jitter),
            (ms(100), Backoff::Exponential, Jitter::Equal)
        );
        assert_eq!(options.heartbeat, Heartbeat::Auto);
    }

    #[test]
    fn exponential_waits_double_and_fixed_ones_stay() {
        let exponential = delays(&LockOptions::new().jitter(Jitter::None));
        let seen: Vec<_> = (1..=11).map(|n| exponential.before(n).as_millis()).collect();
        assert_eq!(seen, [100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 51200, 60000]);
        let fixed = delays(&LockOptions::new().jitter(Jitter::None).backoff(Backoff::Fixed));
        assert_eq!([fixed.before(1), fixed.before(100)], [ms(100), ms(100)]);
        let long = delays(&LockOptions::new().jitter(Jitter::None).retry_delay(Duration::MAX));
        assert_eq!([long.before(1), long.before(2)], [Duration::MAX; 2]);
    }

    #[test]
    fn no_number_of_retries_overflows() {
        assert_eq!(LockOptions::new().max_retries(u32::MAX).resolve().unwrap().max_attempts, 1 << 32);
    }

    #[test]
    fn impossible_values_are_refused_where_they_are_used() {
        for bad in [
            LockOptions::new().ttl(Duration::ZERO),
            LockOptions::new().ttl(Duration::MAX),
            LockOptions::new().heartbeat(Heartbeat::Every(Duration::ZERO)),
            LockOptions::new().heartbeat(Heartbeat::Every(DEFAULT_TTL)),
            LockOptions::new().min_hold(Duration::MAX),
            LockOptions::new().min_hold(ms(2)).max_hold(ms(1)),
        ] {
            assert_eq!(bad.resolve().err().unwrap().code(), ErrorCode::InvalidArgument, "{bad:?}");
        }
    }

    #[test]
    fn a_stated_wait_lifts_only_the_default_limit_of_retries() {
        for options in [LockOptions::new().wait_forever(), LockOptions::new().timeout(DEFAULT_TIMEOUT)] {
            assert_eq!(options.resolve().unwrap().max_attempts, u64::MAX);
        }
        for options in [
            LockOptions::new().wait_forever().max_retries(3),
            LockOptions::new().max_retries(3).wait_forever(),
            LockOptions::new().timeout(DEFAULT_TIMEOUT).max_retries(3),
            LockOptions::new().max_retries(3).timeout(DEFAULT_TIMEOUT),
        ] {
            assert_eq!(options.resolve().unwrap().max_attempts, 4);
        }
    }
}
