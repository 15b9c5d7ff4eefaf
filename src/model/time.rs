//! Time: the one liveness rule, ttls, and the clock that deadlines are counted on.
//!
//! Two clocks never mix. **Server time** (`i64` Unix milliseconds) decides who may take a key; it
//! only ever comes out of the database. **Local time** ([`Moment`]) decides how long a holder may
//! trust its own lease and how long a call may take; it never leaves this process.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{LockError, Result};
use crate::sync::Mutex;

/// How long after its expiry a lease still counts as live, for everyone, in milliseconds.
///
/// Not configurable: clients that disagreed about it would let two holders in.
pub const TIME_TOLERANCE_MS: i64 = 1000;

/// The same as a duration.
pub(crate) const TOLERANCE: Duration = Duration::from_millis(TIME_TOLERANCE_MS.unsigned_abs());

/// The longest ttl that is accepted: 366 days. A lease that outlives its holder by more than that
/// is a mistake, and the expiry stays far inside what PostgreSQL's timestamps can show.
pub const MAX_TTL: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// The one liveness rule: a lease is live while its expiry is greater than now minus the tolerance.
///
/// ```
/// use syncguard::{TIME_TOLERANCE_MS, is_live};
/// assert!(is_live(1000, 1999, TIME_TOLERANCE_MS));
/// assert!(!is_live(1000, 2000, TIME_TOLERANCE_MS));
/// ```
#[must_use]
pub fn is_live(expires_at_ms: i64, now_ms: i64, tolerance_ms: i64) -> bool {
    expires_at_ms > now_ms.saturating_sub(tolerance_ms)
}

/// The [`Instant`] that lies so far ahead, for any duration that a caller may give: at most a century,
/// beyond which an `Instant` may overflow on some system, and which is no limit that anybody would live
/// to see.
pub(crate) fn deadline_after(limit: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    Instant::now() + limit.min(CENTURY)
}

/// A ttl in whole milliseconds, 1 ms to [`MAX_TTL`]. A fraction of a millisecond is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ttl(Duration);

impl Ttl {
    pub(crate) fn new(ttl: Duration) -> Result<Self> {
        if ttl < Duration::from_millis(1) {
            return Err(LockError::invalid("the ttl is below 1 ms: use seconds, 10 to 60 are usual"));
        }
        if ttl > MAX_TTL {
            return Err(LockError::invalid(
                "the ttl is above 366 days: use a short ttl and let the guard renew it",
            ));
        }
        let millis = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        Ok(Self(Duration::from_millis(millis)))
    }

    pub(crate) fn get(self) -> Duration {
        self.0
    }

    pub(crate) fn millis(self) -> i64 {
        i64::try_from(self.0.as_millis()).unwrap_or(i64::MAX)
    }
}

/// A point in local time: time since an arbitrary start. It never goes back, and on Linux it runs
/// on while the host is suspended (`CLOCK_BOOTTIME`).
///
/// On other systems it is [`std::time::Instant`], which may stand still during a suspend: there a
/// suspend is a pause like any other, and only a fenced transaction protects against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(Duration);

impl Moment {
    /// A moment so far away that it never comes.
    pub const NEVER: Self = Self(Duration::MAX);

    /// This moment plus a duration; [`Moment::NEVER`] instead of an overflow.
    #[must_use]
    pub fn after(self, wait: Duration) -> Self {
        self.0.checked_add(wait).map_or(Self::NEVER, Self)
    }

    /// Time from `earlier` to this moment, zero if it lies before it.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// So long before `end`, or before it by such a part of the time from here, whichever is less.
    pub(crate) fn shortly_before(self, end: Self, most: Duration, part: u32) -> Self {
        let whole = end.since(self);
        if end.is_never() { end } else { self.after(whole.saturating_sub(most.min(whole / part))) }
    }

    /// Whether this is [`Moment::NEVER`].
    #[must_use]
    pub fn is_never(self) -> bool {
        self == Self::NEVER
    }
}

/// The clock that guards and waits are timed by: the system's, or one that a test moves.
///
/// A [`LockBackend`](crate::LockBackend) hands it out, so that a guard over a
/// [`MemoryBackend`](crate::MemoryBackend) loses its lease when the *test* says that time has passed.
#[derive(Clone, Default)]
pub struct Clock(Option<Arc<Manual>>);

type Waker = Arc<dyn Fn() + Send + Sync>;

struct Manual {
    now: Mutex<Duration>,
    wakers: Mutex<Vec<Waker>>,
}

impl Clock {
    /// The system's clock.
    #[must_use]
    pub fn system() -> Self {
        Self(None)
    }

    /// A clock that stands still until [`Clock::advance`] moves it.
    #[must_use]
    pub fn manual() -> Self {
        Self(Some(Arc::new(Manual {
            // Not zero, so that a test can also look back.
            now: Mutex::new(Duration::from_secs(1_000_000)),
            wakers: Mutex::default(),
        })))
    }

    /// Now.
    #[must_use]
    pub fn now(&self) -> Moment {
        match &self.0 {
            None => system_now(),
            Some(manual) => Moment(*manual.now.lock()),
        }
    }

    /// Moves a manual clock forward and wakes whoever waits on it; does nothing to the system's.
    pub fn advance(&self, by: Duration) {
        if let Some(manual) = &self.0 {
            {
                let mut now = manual.now.lock();
                *now = now.saturating_add(by);
            }
            // Copied out: no lock is held while user code runs.
            let wakers = manual.wakers.lock().clone();
            for waker in wakers {
                waker();
            }
        }
    }

    /// Whether a test moves this clock: then a wait must not be timed by the system's.
    #[must_use]
    pub fn is_manual(&self) -> bool {
        self.0.is_some()
    }

    /// Has `wake` called after each [`Clock::advance`]. The system's clock never calls it.
    pub fn on_advance(&self, wake: impl Fn() + Send + Sync + 'static) {
        if let Some(manual) = &self.0 {
            manual.wakers.lock().push(Arc::new(wake));
        }
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_manual() { "Clock(manual)" } else { "Clock(system)" })
    }
}

#[cfg(target_os = "linux")]
fn system_now() -> Moment {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Moment(Duration::new(
        u64::try_from(now.tv_sec).unwrap_or_default(),
        u32::try_from(now.tv_nsec).unwrap_or_default(),
    ))
}

#[cfg(not(target_os = "linux"))]
fn system_now() -> Moment {
    use std::sync::LazyLock;
    // A day in the past, so that moments before the first call can be told apart.
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    Moment(Duration::from_secs(86_400) + START.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn liveness_at_its_edges() {
        for (expires, now, live) in [
            (1000, 1999, true),
            (1000, 2000, false),
            (1000, 999, true),
            (i64::MAX, i64::MAX, true),
            (i64::MIN, i64::MIN, false),
            (i64::MIN, i64::MAX, false),
            (i64::MAX, i64::MIN, true),
        ] {
            assert_eq!(is_live(expires, now, TIME_TOLERANCE_MS), live, "{expires} at {now}");
        }
    }

    #[test]
    fn ttl_is_whole_milliseconds_within_its_limits() {
        assert!(Ttl::new(Duration::ZERO).is_err());
        assert!(Ttl::new(Duration::from_micros(999)).is_err());
        assert!(Ttl::new(Duration::MAX).is_err());
        assert!(Ttl::new(MAX_TTL + Duration::from_nanos(1)).is_err());
        assert_eq!(Ttl::new(Duration::from_micros(1999)).unwrap().millis(), 1);
        assert_eq!(Ttl::new(MAX_TTL).unwrap().get(), MAX_TTL);
    }

    #[test]
    fn a_deadline_exists_for_every_duration() {
        let soon = deadline_after(Duration::from_secs(60)).saturating_duration_since(Instant::now());
        assert!(soon <= Duration::from_secs(60) && !soon.is_zero());
        let far = deadline_after(Duration::MAX);
        assert!(far > deadline_after(99 * MAX_TTL));
        assert!(far.checked_add(MAX_TTL).is_some(), "others may add to it");
    }

    #[test]
    fn moments_saturate() {
        let now = Clock::system().now();
        assert!(now.after(Duration::MAX).is_never());
        assert_eq!(now.since(now.after(Duration::from_secs(1))), Duration::ZERO);
    }

    #[test]
    fn a_manual_clock_moves_only_by_hand_and_wakes_its_waiters() {
        let clock = Clock::manual();
        let woken = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let counter = Arc::clone(&woken);
        clock.on_advance(move || {
            counter.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        });
        let start = clock.now();
        clock.advance(Duration::from_secs(5));
        assert_eq!(clock.now().since(start), Duration::from_secs(5));
        assert_eq!(woken.load(std::sync::atomic::Ordering::SeqCst), 1);
    }

    #[test]
    fn the_shortest_ttl_is_a_millisecond() {
        assert_eq!(Ttl::new(Duration::from_millis(1)).unwrap().get(), Duration::from_millis(1));
    }

    #[test]
    fn shortly_before_an_end_is_a_part_of_the_way_or_the_most() {
        let now = Clock::manual().now();
        let ms = Duration::from_millis;
        for (rest, before) in [(8000, 500), (2000, 500), (1000, 250), (4, 1), (0, 0)] {
            let end = now.after(ms(rest));
            assert_eq!(end.since(now.shortly_before(end, ms(500), 4)), ms(before), "{rest}");
        }
        assert!(now.shortly_before(Moment::NEVER, ms(500), 4).is_never() && !now.is_never());
        let past = now.after(ms(1));
        assert_eq!(past.shortly_before(now, ms(500), 4), past, "nothing is left");
    }

    #[test]
    fn a_clock_says_which_one_it_is_and_the_systems_is_not_moved() {
        let texts =
            [Clock::system(), Clock::manual()].map(|clock| format!("{clock:?} {}", clock.is_manual()));
        assert_eq!(texts, ["Clock(system) false", "Clock(manual) true"]);
        let clock = Clock::system();
        clock.on_advance(|| panic!("the system's clock calls nobody"));
        clock.advance(Duration::from_secs(1));
    }
}
