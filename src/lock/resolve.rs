//! The options of a lock as numbers, or what is wrong with them.

use std::time::Duration;

use crate::backend::check_text;
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::lock::options::{
    DEFAULT_MAX_RETRIES, DEFAULT_RETRY_DELAY, DEFAULT_TIMEOUT, DEFAULT_TTL, Heartbeat, LockOptions,
    ResolvedOptions, Timeout,
};
use crate::model::time::Ttl;
use crate::waiting::Delays;

/// The longest wait that doubling makes: the tenth retry of the default is just below it. A longer
/// [`LockOptions::retry_delay`] stays as it is.
const LONGEST_DELAY: Duration = Duration::from_secs(60);

impl LockOptions {
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
        check_text("the note", self.note.as_deref())?;
        if self.priority != 0 && !self.fair {
            return Err(LockError::invalid(
                "priority orders only those who are served in order: set fair, too",
            ));
        }
        if self.fair && self.only_backoff {
            return Err(LockError::invalid("fair waiters must see when the key is free: leave wake_ups on"));
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
            turn: self.fair.then_some(self.priority),
            heartbeat: self.heartbeat,
            max_hold: self.max_hold,
            min_hold: self.min_hold,
            cancel: self.cancel.clone().unwrap_or(CancelToken::never()),
            on_lost: self.on_lost.clone(),
            on_release_error: self.on_release_error.clone(),
            note: self.note.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MAX_NOTE_BYTES;
    use crate::error::ErrorCode;
    use crate::waiting::{Backoff, Jitter};

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
            LockOptions::new().note("x".repeat(MAX_NOTE_BYTES + 1)),
            LockOptions::new().note("a\0b"),
            LockOptions::new().priority(1),
            LockOptions::new().fair(true).wake_ups(false),
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
