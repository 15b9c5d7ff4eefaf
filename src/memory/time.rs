//! The server's clock: one that a test moves, or the system's plus what a test has added.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::model::time::Clock;

/// Where a moved server clock starts: in November 2023, so that times have 13 digits as real ones.
const START_MS: i128 = 1_700_000_000_000;

const NANOS_PER_MS: i128 = 1_000_000;

/// In nanoseconds, so that many small advances add up.
pub(super) struct ServerTime {
    manual: bool,
    offset_ns: i128,
}

impl ServerTime {
    pub(super) fn of(clock: &Clock) -> Self {
        let manual = clock.is_manual();
        Self { manual, offset_ns: if manual { START_MS * NANOS_PER_MS } else { 0 } }
    }

    pub(super) fn now_ms(&self) -> i64 {
        let ms = (self.base_ns() + self.offset_ns).div_euclid(NANOS_PER_MS);
        i64::try_from(ms).unwrap_or(if ms < 0 { i64::MIN } else { i64::MAX })
    }

    pub(super) fn advance(&mut self, by: Duration) {
        self.offset_ns = self.offset_ns.saturating_add(nanos(by));
    }

    pub(super) fn shift_ms(&mut self, by_ms: i64) {
        self.offset_ns = self.offset_ns.saturating_add(i128::from(by_ms) * NANOS_PER_MS);
    }

    pub(super) fn set_ms(&mut self, now_ms: i64) {
        self.offset_ns = i128::from(now_ms) * NANOS_PER_MS - self.base_ns();
    }

    fn base_ns(&self) -> i128 {
        if self.manual {
            return 0;
        }
        match SystemTime::now().duration_since(UNIX_EPOCH) {
            Ok(since) => nanos(since),
            Err(before) => -nanos(before.duration()),
        }
    }
}

fn nanos(duration: Duration) -> i128 {
    i128::try_from(duration.as_nanos()).unwrap_or(i128::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moved_clock_rounds_down_and_loses_nothing() {
        let mut time = ServerTime::of(&Clock::manual());
        time.set_ms(1_000_000);
        time.advance(Duration::from_micros(999));
        assert_eq!(time.now_ms(), 1_000_000);
        time.advance(Duration::from_micros(1));
        assert_eq!(time.now_ms(), 1_000_001);
        time.shift_ms(-2);
        assert_eq!(time.now_ms(), 999_999);
    }

    #[test]
    fn even_absurd_times_do_not_overflow() {
        let mut time = ServerTime::of(&Clock::manual());
        time.set_ms(i64::MAX);
        time.advance(Duration::MAX);
        assert_eq!(time.now_ms(), i64::MAX);
        time.set_ms(i64::MIN);
        time.shift_ms(i64::MIN);
        assert_eq!(time.now_ms(), i64::MIN);
    }
}
