//! How values of the command line are read.

use std::time::Duration;

use syncguard::{FENCE_MAX, Fence, Slot};

/// How long to wait for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// One attempt.
    Once,
    UpTo(Duration),
    Forever,
}

/// What happens to the program when its lock is lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OnLost {
    Term,
    Kill,
    Ignore,
    /// Run by `sh -c`, beside the program.
    Command(String),
}

/// What a program is to run once in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Period {
    Every(Duration),
    Number(u64),
}

impl Period {
    pub(crate) fn slot(self) -> Slot {
        match self {
            Self::Every(period) => Slot::every(period),
            Self::Number(number) => Slot::number(number),
        }
    }
}

/// `30s`, `5m`, `1h30m`, `250ms`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    if text.parse::<f64>().is_ok_and(|number| number != 0.0) {
        return Err(format!("which unit? Write {text}s, {text}m or {text}h"));
    }
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    humantime::parse_duration(text).map_err(|_| "write a duration as 30s, 5m, 1h30m or 250ms".to_owned())
}

pub(crate) fn wait(text: &str) -> Result<Wait, String> {
    if text == "forever" {
        return Ok(Wait::Forever);
    }
    let wait = duration(text).map_err(|error| format!("{error}; or `forever`, or 0 for one attempt"))?;
    Ok(if wait.is_zero() { Wait::Once } else { Wait::UpTo(wait) })
}

pub(crate) fn on_lost(text: &str) -> Result<OnLost, String> {
    match text {
        "term" => Ok(OnLost::Term),
        "kill" => Ok(OnLost::Kill),
        "ignore" => Ok(OnLost::Ignore),
        // A word alone may be one of the three with a slip in it.
        command if command.contains([' ', '/']) => Ok(OnLost::Command(command.to_owned())),
        _ => Err(
            "write term, kill, ignore, or a command for the shell: a command of a single word needs its path"
                .to_owned(),
        ),
    }
}

pub(crate) fn period(text: &str) -> Result<Period, String> {
    const HELP: &str =
        "write hourly, daily, weekly, a period such as 15m, or slot:NUMBER, such as slot:20261128";
    let hours = |hours: u64| Ok(Period::Every(Duration::from_secs(hours * 3600)));
    match text {
        "hourly" => return hours(1),
        "daily" => return hours(24),
        "weekly" => return hours(7 * 24),
        _ => {}
    }
    if let Some(number) = text.strip_prefix("slot:") {
        let number = number.parse().ok().filter(|number| *number <= FENCE_MAX);
        return number.map(Period::Number).ok_or_else(|| HELP.to_owned());
    }
    match duration(text) {
        Ok(period) if period >= Duration::from_millis(1) => Ok(Period::Every(period)),
        _ => Err(HELP.to_owned()),
    }
}

/// With or without the zeros before it.
pub(crate) fn fence(text: &str) -> Result<Fence, String> {
    let number = text.parse().ok().and_then(Fence::new);
    number.ok_or_else(|| "a fencing token is a number, as `syncguard status KEY` shows it".to_owned())
}

/// As people write it: `1h 30m`, `250ms`. Above a minute in whole seconds.
pub(crate) fn spoken(duration: Duration) -> String {
    let rounded = match duration {
        long if long >= Duration::from_secs(10) => Duration::from_secs(long.as_secs()),
        short => Duration::from_millis(u64::try_from(short.as_millis()).unwrap_or(u64::MAX)),
    };
    humantime::format_duration(rounded).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_people_write_them() {
        for (text, ms) in [
            ("30s", 30_000),
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("1h 30m", 5_400_000),
            ("250ms", 250),
            ("0", 0),
            ("0s", 0),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["30", "1.5", "s", "-1s", "soon", ""] {
            assert!(duration(text).is_err(), "{text}");
        }
        assert!(duration("30").is_err_and(|error| error.contains("30s")), "it says what to write");
    }

    #[test]
    fn waits_end_at_once_some_time_or_never() {
        assert_eq!(wait("0"), Ok(Wait::Once));
        assert_eq!(wait("0s"), Ok(Wait::Once));
        assert_eq!(wait("5m"), Ok(Wait::UpTo(Duration::from_secs(300))));
        assert_eq!(wait("forever"), Ok(Wait::Forever));
        assert!(wait("never").is_err());
    }

    #[test]
    fn a_slip_in_on_lost_is_no_command() {
        assert_eq!(on_lost("term"), Ok(OnLost::Term));
        assert_eq!(on_lost("./drain"), Ok(OnLost::Command("./drain".to_owned())));
        assert_eq!(on_lost("kill -9 1"), Ok(OnLost::Command("kill -9 1".to_owned())));
        assert!(on_lost("trem").is_err());
    }

    #[test]
    fn periods_have_names_and_lengths_and_callers_their_own_numbers() {
        assert_eq!(period("daily"), Ok(Period::Every(Duration::from_secs(86_400))));
        assert_eq!(period("15m"), Ok(Period::Every(Duration::from_secs(900))));
        assert_eq!(period("slot:20261128"), Ok(Period::Number(20_261_128)));
        for text in ["nightly", "0s", "100us", "slot:x", "slot:1000000000000000"] {
            assert!(period(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_fence_is_read_with_and_without_zeros() {
        assert_eq!(fence("17"), fence("000000000000017"));
        assert!(fence("x").is_err());
    }

    #[test]
    fn what_is_long_is_spoken_in_seconds() {
        assert_eq!(spoken(Duration::from_millis(92_345)), "1m 32s");
        assert_eq!(spoken(Duration::from_millis(250)), "250ms");
        assert_eq!(spoken(Duration::ZERO), "0s");
    }
}
