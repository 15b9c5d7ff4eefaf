//! Delays before retries: how they grow, and how much of them is left to chance.

use std::time::Duration;

/// How the wait before a retry grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Backoff {
    /// Doubles with every retry, up to a minute.
    #[default]
    Exponential,
    /// Always the same.
    Fixed,
}

/// How much of the wait before a retry is left to chance, so that clients do not march in step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Jitter {
    /// Half of the wait is fixed, half is random.
    #[default]
    Equal,
    /// All of it is random.
    Full,
    /// None of it is random.
    None,
}

/// The delays before the retries of one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Delays {
    /// The delay before the first retry.
    pub(crate) first: Duration,
    /// Where doubling ends.
    pub(crate) longest: Duration,
    pub(crate) backoff: Backoff,
    pub(crate) jitter: Jitter,
}

impl Delays {
    /// Doubled with every retry up to the longest, none of it random.
    pub(crate) const fn doubling(first: Duration, longest: Duration) -> Self {
        Self { first, longest, backoff: Backoff::Exponential, jitter: Jitter::None }
    }

    /// The delay before retry number `retry` (1 is the first), with chance from the operating system. Without
    /// random numbers it is the whole delay: a delay needs no secrecy.
    pub(crate) fn before(&self, retry: u64) -> Duration {
        let mut bytes = [0_u8; 4];
        let chance = match self.jitter {
            Jitter::None => u32::MAX,
            _ => getrandom::fill(&mut bytes).map_or(u32::MAX, |()| u32::from_ne_bytes(bytes)),
        };
        self.before_by(retry, chance)
    }

    /// The same with this as the random part.
    fn before_by(&self, retry: u64, chance: u32) -> Duration {
        let whole = match self.backoff {
            Backoff::Fixed => self.first,
            Backoff::Exponential => {
                let doublings = u32::try_from(retry.saturating_sub(1)).unwrap_or(u32::MAX).min(31);
                self.first.checked_mul(1_u32 << doublings).unwrap_or(self.longest).min(self.longest)
            }
        };
        let random = |all: Duration| {
            // 128 bits of nanoseconds times 32 bits of chance cannot overflow: a Duration has 94.
            let nanos = all.as_nanos() * u128::from(chance) / u128::from(u32::MAX);
            let secs = u64::try_from(nanos / 1_000_000_000).unwrap_or(u64::MAX);
            let rest = u32::try_from(nanos % 1_000_000_000).unwrap_or_default();
            Duration::new(secs, rest)
        };
        match self.jitter {
            Jitter::None => whole,
            Jitter::Full => random(whole),
            Jitter::Equal => {
                let fixed = whole / 2;
                fixed.saturating_add(random(whole.saturating_sub(fixed)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn delays_double_up_to_the_longest_or_stay() {
        let doubling = Delays::doubling(ms(100), ms(60_000));
        let seen: Vec<_> = (1..=11).map(|retry| doubling.before(retry).as_millis()).collect();
        assert_eq!(seen, [100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 51200, 60000]);
        let fixed = Delays { backoff: Backoff::Fixed, ..doubling };
        assert_eq!([fixed.before(1), fixed.before(100)], [ms(100), ms(100)]);
    }

    #[test]
    fn no_value_overflows() {
        for jitter in [Jitter::None, Jitter::Equal, Jitter::Full] {
            for first in [Duration::ZERO, ms(1), Duration::MAX] {
                for backoff in [Backoff::Exponential, Backoff::Fixed] {
                    let longest = first.max(ms(60_000));
                    let delays = Delays { first, longest, backoff, jitter };
                    for retry in [0, 1, 2, 100, u64::MAX] {
                        for chance in [0, 1, u32::MAX] {
                            assert!(delays.before_by(retry, chance) <= longest);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn jitter_takes_half_all_or_nothing() {
        let equal = Delays { jitter: Jitter::Equal, ..Delays::doubling(ms(100), ms(100)) };
        assert_eq!([equal.before_by(1, 0), equal.before_by(1, u32::MAX)], [ms(50), ms(100)]);
        let full = Delays { jitter: Jitter::Full, ..equal };
        assert_eq!([full.before_by(1, 0), full.before_by(1, u32::MAX)], [ms(0), ms(100)]);
        let drawn: std::collections::HashSet<_> = (0..100).map(|_| equal.before(1)).collect();
        assert!(drawn.len() > 50 && drawn.iter().all(|delay| (ms(50)..=ms(100)).contains(delay)));
    }
}
