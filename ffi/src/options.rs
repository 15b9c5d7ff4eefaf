//! What C may choose for a lock.

use std::ffi::c_char;
use std::time::Duration;

use syncguard::{LockError, LockOptions};

use crate::answers::SYNCGUARD_FOREVER;
use crate::errors::invalid;
use crate::pointers::optional_text;
use crate::token::syncguard_token;

/// See the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct syncguard_options {
    /// See the header.
    pub ttl_ms: u64,
    /// See the header.
    pub timeout_ms: u64,
    /// See the header.
    pub min_hold_ms: u64,
    /// See the header.
    pub max_hold_ms: u64,
    /// See the header.
    pub token: *const syncguard_token,
    /// See the header.
    pub note: *const c_char,
    /// See the header.
    pub fair: u32,
    /// See the header.
    pub priority: i32,
    /// Zero: for what may be chosen later.
    pub reserved: [u64; 1],
}

/// The options of the functions that take two numbers.
pub(crate) fn basic(ttl_ms: u64, timeout_ms: u64) -> LockOptions {
    let options = LockOptions::new();
    let options = if ttl_ms == 0 { options } else { options.ttl(Duration::from_millis(ttl_ms)) };
    match timeout_ms {
        0 => options,
        SYNCGUARD_FOREVER => options.wait_forever(),
        // The time alone decides, not the number of retries.
        _ => options.timeout(Duration::from_millis(timeout_ms)),
    }
}

/// # Safety
/// NULL or options whose token is NULL or a handle that nobody frees during the call, and whose note is NULL or ends
/// with a zero byte and stays as it is meanwhile.
pub(crate) unsafe fn chosen(options: *const syncguard_options) -> Result<LockOptions, LockError> {
    // SAFETY: what the caller promises.
    let Some(options) = (unsafe { options.as_ref() }) else { return Ok(LockOptions::new()) };
    check_reserved(&options.reserved, "syncguard_options")?;
    let mut chosen =
        basic(options.ttl_ms, options.timeout_ms).min_hold(Duration::from_millis(options.min_hold_ms));
    if options.fair > 1 {
        return Err(invalid("fair is neither 0 nor 1".to_owned()));
    }
    chosen = chosen.fair(options.fair == 1).priority(options.priority);
    if options.max_hold_ms > 0 {
        chosen = chosen.max_hold(Duration::from_millis(options.max_hold_ms));
    }
    // SAFETY: what the caller promises.
    if let Some(token) = unsafe { options.token.as_ref() } {
        chosen = chosen.cancel(&token.0);
    }
    // SAFETY: what the caller promises.
    if let Some(note) = unsafe { optional_text(options.note, "note") }? {
        chosen = chosen.note(note);
    }
    Ok(chosen)
}

pub(crate) fn check_reserved(reserved: &[u64], what: &str) -> Result<(), LockError> {
    if reserved.iter().any(|field| *field != 0) {
        return Err(invalid(format!(
            "a reserved field of {what} is not zero: initialise all of it (= {{0}}), and compile with the header of this library"
        )));
    }
    Ok(())
}
