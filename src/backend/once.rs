//! Jobs that run once per slot: slots, and the requests and answers of a backend.

use std::fmt;
use std::time::Duration;

use crate::backend::outcome::{Attempt, Grant};
use crate::error::{LockError, Result};
use crate::model::fence::{FENCE_MAX, Fence};
use crate::model::hash::hash_key;

/// The slot that a job is to run for: the current period by the server's clock, or a number of the caller's.
///
/// Each of the two kinds has a mark of its own, so a job that changes from one to the other begins anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a slot does nothing until it is passed to run_once"]
pub struct Slot {
    kind: Kind,
    claims: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Every(Duration),
    Number(u64),
}

impl Slot {
    /// The current period, by the server's clock: 1 ms or longer, in whole milliseconds, a fraction cut off.
    ///
    /// Its number is the clock divided by the period, rounded down: periods are counted from
    /// 1970-01-01T00:00:00Z, so periods of a day begin at midnight UTC. The mark of a done slot is the *start* of the
    /// period in Unix milliseconds, which grows even if the length of the period is changed.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use syncguard::Slot;
    ///
    /// let every_hour = Slot::every(Duration::from_secs(3600));
    /// ```
    pub const fn every(period: Duration) -> Self {
        Self { kind: Kind::Every(period), claims: false }
    }

    /// A number from the caller's own calendar, such as 20261128 for a day: at most
    /// [`FENCE_MAX`](crate::FENCE_MAX), and growing. One that is not above the last finished one is done
    /// already.
    ///
    /// ```
    /// use syncguard::Slot;
    ///
    /// let today = Slot::number(2026_11_28);
    /// ```
    pub const fn number(number: u64) -> Self {
        Self { kind: Kind::Number(number), claims: false }
    }

    /// Marks the slot before the job runs instead of after it: it runs at most once, and not again after a
    /// crash or a failure. Costs one more round trip.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use syncguard::Slot;
    ///
    /// let at_most_once = Slot::every(Duration::from_secs(3600)).claim_at_start();
    /// ```
    pub const fn claim_at_start(mut self) -> Self {
        self.claims = true;
        self
    }

    /// Whether the slot is marked before the job runs.
    ///
    /// ```
    /// use syncguard::Slot;
    ///
    /// assert!(Slot::number(7).claim_at_start().is_claimed_at_start());
    /// ```
    #[must_use]
    pub const fn is_claimed_at_start(&self) -> bool {
        self.claims
    }

    /// The period in milliseconds; `None` for a number of the caller's.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use syncguard::Slot;
    ///
    /// assert_eq!(Slot::every(Duration::from_secs(60)).period_ms(), Some(60_000));
    /// assert_eq!(Slot::number(7).period_ms(), None);
    /// ```
    #[must_use]
    pub fn period_ms(&self) -> Option<u64> {
        match self.kind {
            Kind::Every(period) => Some(u64::try_from(period.as_millis()).unwrap_or(u64::MAX)),
            Kind::Number(_) => None,
        }
    }

    /// The mark of the slot at this time of the server's clock: the start of its period, both in Unix
    /// milliseconds, or the caller's number. For backends, after [`check`](Self::check).
    ///
    /// ```
    /// # use std::time::Duration;
    /// use syncguard::Slot;
    ///
    /// assert_eq!(Slot::every(Duration::from_millis(100)).at(1234), 1200);
    /// assert_eq!(Slot::number(7).at(1234), 7);
    /// ```
    #[must_use]
    pub fn at(&self, now_ms: i64) -> u64 {
        match self.kind {
            Kind::Number(number) => number,
            Kind::Every(_) => {
                let now = u64::try_from(now_ms).unwrap_or(0);
                now - now.checked_rem(self.period_ms().unwrap_or(0)).unwrap_or(0)
            }
        }
    }

    /// `InvalidArgument` for a period below 1 ms, and for a number or a period (in milliseconds) above
    /// [`FENCE_MAX`](crate::FENCE_MAX).
    ///
    /// ```
    /// use syncguard::{FENCE_MAX, Slot};
    ///
    /// assert!(Slot::number(FENCE_MAX).check().is_ok());
    /// assert!(Slot::number(FENCE_MAX + 1).check().is_err());
    /// ```
    pub fn check(&self) -> Result<()> {
        match (self.kind, self.period_ms()) {
            (_, Some(0)) => Err(LockError::invalid("the period of a slot is below 1 ms: make it longer")),
            (_, Some(period)) if period > FENCE_MAX => Err(LockError::invalid(format!(
                "the period of a slot is above {FENCE_MAX} ms: make it shorter"
            ))),
            (Kind::Number(number), _) if number > FENCE_MAX => Err(LockError::invalid(format!(
                "the number of a slot is above {FENCE_MAX}: choose numbers that grow more slowly"
            ))),
            _ => Ok(()),
        }
    }

    /// The number of the slot with this mark: the periods since 1970, or the caller's number.
    pub(crate) fn number_of(&self, mark: u64) -> u64 {
        mark / self.period_ms().unwrap_or(1).max(1)
    }

    /// How many slots lie between the one that was marked last and this one.
    pub(crate) fn between(&self, last: u64, slot: u64) -> u64 {
        self.number_of(slot).saturating_sub(self.number_of(last)).saturating_sub(1)
    }

    /// Says in the log that nothing runs until the clock has come to a mark that lies beyond it.
    pub(crate) fn warn_of_the_future(&self, name: &str, last: Option<u64>, now_ms: i64) {
        let now = u64::try_from(now_ms).unwrap_or(0);
        if let (Some(_), Some(last)) = (self.period_ms(), last.filter(|last| *last > now)) {
            log::warn!(
                "the mark of the job #{} lies {} ms in the future, and the job does not run until then: the server's clock was ahead once, or the mark was set by hand",
                hash_key(name),
                last - now
            );
        }
    }

    /// What the stored key of a mark ends with.
    pub(crate) fn mark_suffix(&self) -> &'static str {
        match self.kind {
            Kind::Every(_) => "done",
            Kind::Number(_) => "number",
        }
    }
}

/// The begin of a run.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct BeginRun<'a> {
    /// The lease that it needs: of the job's name.
    pub attempt: Attempt<'a>,
    /// The slot that it is for.
    pub slot: Slot,
}

impl<'a> BeginRun<'a> {
    /// A run that takes the lease by this attempt.
    #[must_use]
    pub const fn new(attempt: Attempt<'a>, slot: Slot) -> Self {
        Self { attempt, slot }
    }
}

/// The answer of a backend to the begin of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BeginOutcome {
    /// The lease is granted, and the slot is not done.
    Begun(BegunRun),
    /// The slot, or a later one, is done.
    AlreadyDone,
    /// Another holder has the lease.
    Running,
}

/// A run that has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BegunRun {
    /// Its lease.
    pub grant: Grant,
    /// What will mark its slot as done, by the clock of the grant: see [`Slot::at`].
    pub slot: u64,
    /// The mark of the last slot that is done.
    pub last: Option<u64>,
}

impl BegunRun {
    /// A run of this slot, after the `last` one.
    #[must_use]
    pub const fn new(grant: Grant, slot: u64, last: Option<u64>) -> Self {
        Self { grant, slot, last }
    }
}

/// A run whose slot is to be marked as done.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct MarkRun<'a> {
    /// The job's name.
    pub key: &'a str,
    /// The lease of the run.
    pub lock_id: &'a str,
    /// The fence of its grant: under another one it is not this run's any more.
    pub fence: Fence,
    /// The kind of its slot.
    pub slot: Slot,
    /// What marks its slot: see [`Slot::at`].
    pub number: u64,
}

impl<'a> MarkRun<'a> {
    /// The slot with this mark, run under this lease.
    #[must_use]
    pub const fn new(key: &'a str, lock_id: &'a str, fence: Fence, slot: Slot, number: u64) -> Self {
        Self { key, lock_id, fence, slot, number }
    }
}

impl fmt::Debug for MarkRun<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MarkRun")
            .field("key_hash", &hash_key(self.key))
            .field("fence", &self.fence)
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

/// How a slot is marked as done. Each is one transaction, and may be asked for again after a lost answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MarkStep {
    /// Before the job runs. Durable, while the lease is the run's and lives; the lease stays.
    Claim,
    /// After the job. Durable, while the lease is the run's and lives; ends the lease. All or nothing.
    Finish,
    /// After a job that marked its slot in a transaction of its own: ends the lease if the mark is there. Never
    /// writes the mark. If the mark is not there, the lease stays: if the call ended it and were repeated after a lost
    /// answer, another run's mark could be taken for its own.
    Verify,
}

/// The state of the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MarkOutcome {
    /// It is there, and this run's; the lease has ended, unless this was a claim.
    Marked,
    /// It is there and the lease is gone, after an answer to this very call was lost. It is this run's if
    /// nobody else can have had the lease yet.
    Found,
    /// It is not there, or another run's.
    NotMarked,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;

    fn every(ms: u64) -> Slot {
        Slot::every(Duration::from_millis(ms))
    }

    #[test]
    fn a_slot_is_the_start_of_its_period() {
        for (period, now, slot) in [(1, 17, 17), (10, 19, 10), (10, 20, 20), (1_000, 999, 0), (10, -5, 0)] {
            assert_eq!(every(period).at(now), slot, "{now} in periods of {period}");
        }
        assert_eq!(Slot::every(Duration::from_micros(1_999)).at(17), 17, "a fraction is cut off");
    }

    #[test]
    fn a_slots_number_is_the_clock_divided_by_its_period() {
        for (period, now) in [(1, 17), (10, 19), (10, 20), (1_000, 999), (86_400_000, 1_795_824_000_123)] {
            let slot = every(period);
            assert_eq!(
                slot.number_of(slot.at(now)),
                u64::try_from(now).unwrap() / period,
                "{now} by {period}"
            );
        }
        assert_eq!(Slot::number(20_261_128).number_of(20_261_128), 20_261_128);
    }

    #[test]
    fn slots_between_two_runs_are_counted_by_their_starts() {
        assert_eq!([every(10).between(10, 20), every(10).between(10, 50)], [0, 3]);
        // The last one was of a longer or a shorter period.
        assert_eq!(
            [every(10).between(17, 20), every(10).between(17, 30), every(100).between(150, 200)],
            [0, 1, 0]
        );
        assert_eq!([Slot::number(0).between(3, 4), Slot::number(0).between(3, 9)], [0, 5]);
    }

    #[test]
    fn what_cannot_be_a_slot_is_refused() {
        let too_long = Duration::from_millis(FENCE_MAX + 1);
        let bad = [
            Slot::every(Duration::ZERO),
            Slot::every(Duration::from_micros(999)),
            Slot::every(too_long),
            Slot::every(Duration::MAX),
            Slot::number(FENCE_MAX + 1),
            Slot::number(u64::MAX).claim_at_start(),
        ];
        for slot in bad {
            assert_eq!(slot.check().unwrap_err().code(), ErrorCode::InvalidArgument, "{slot:?}");
        }
        for slot in [every(1), every(FENCE_MAX), Slot::number(0), Slot::number(FENCE_MAX)] {
            slot.check().unwrap();
        }
    }
}
