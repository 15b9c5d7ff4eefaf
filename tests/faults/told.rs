//! How a holder prints what it was told.

use std::time::Duration;

use syncguard::{ExtendResult, LockError, ReleaseResult};

pub fn failed(error: &LockError) -> String {
    if error.is_outcome_unknown() { "unknown -".to_owned() } else { error.code().to_string() }
}

pub fn as_ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The server's clock at the decision is what is left of the expiry without the ttl.
pub fn decided(expires_at_ms: i64, ttl: Duration) -> i64 {
    expires_at_ms - i64::try_from(ttl.as_millis()).unwrap_or(0)
}

/// A key as it is printed: that of a permit is `name#number`.
pub fn shown(key: &str) -> String {
    key.replace('\u{2126}', "#")
}

pub fn granted(fence: u64, expires_at_ms: i64, ttl: Duration) -> String {
    format!("ok {fence} {}", decided(expires_at_ms, ttl))
}

/// Where a longer one was asked for before, the end may be that one's, and tells no time.
pub fn extended(result: &Result<ExtendResult, LockError>, ttl: Duration, longest: Duration) -> String {
    match result {
        Ok(ExtendResult::Extended { .. }) if ttl < longest => "ok 0 0".to_owned(),
        Ok(ExtendResult::Extended { expires_at_ms }) => format!("ok 0 {}", decided(*expires_at_ms, ttl)),
        Ok(ExtendResult::NotHeld) => "refused".to_owned(),
        Err(error) => failed(error),
    }
}

pub fn released(result: &Result<ReleaseResult, LockError>) -> String {
    match result {
        Ok(ReleaseResult::Released) => "ok 0".to_owned(),
        Ok(ReleaseResult::NotHeld) => "refused".to_owned(),
        Err(error) => failed(error),
    }
}
