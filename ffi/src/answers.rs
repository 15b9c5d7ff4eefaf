//! The numbers that functions answer with, and the other numbers of the header.

use std::ffi::c_char;

use syncguard::ErrorCode;

/// It worked.
pub const SYNCGUARD_OK: i32 = 0;
/// Another holder has the key.
pub const SYNCGUARD_LOCKED: i32 = 1;
/// The lease is over, or was released.
pub const SYNCGUARD_NOT_HELD: i32 = 2;
/// The slot of the job, or a later one, is done.
pub const SYNCGUARD_ALREADY_DONE: i32 = 3;
/// Another holder has the lease of the job.
pub const SYNCGUARD_RUNNING: i32 = 4;
/// The job ran and said that it failed.
pub const SYNCGUARD_FAILED: i32 = 5;
/// [`ErrorCode::ServiceUnavailable`]
pub const SYNCGUARD_SERVICE_UNAVAILABLE: i32 = -1;
/// [`ErrorCode::AuthFailed`]
pub const SYNCGUARD_AUTH_FAILED: i32 = -2;
/// [`ErrorCode::InvalidArgument`]
pub const SYNCGUARD_INVALID_ARGUMENT: i32 = -3;
/// [`ErrorCode::RateLimited`]
pub const SYNCGUARD_RATE_LIMITED: i32 = -4;
/// [`ErrorCode::NetworkTimeout`]
pub const SYNCGUARD_NETWORK_TIMEOUT: i32 = -5;
/// [`ErrorCode::AcquisitionTimeout`]
pub const SYNCGUARD_ACQUISITION_TIMEOUT: i32 = -6;
/// [`ErrorCode::Aborted`]
pub const SYNCGUARD_ABORTED: i32 = -7;
/// [`ErrorCode::Internal`]
pub const SYNCGUARD_INTERNAL: i32 = -8;
/// A panic was caught: a bug.
pub const SYNCGUARD_PANIC: i32 = -100;
/// A timeout that never ends.
pub const SYNCGUARD_FOREVER: u64 = u64::MAX;
/// For `syncguard_run_once`: the value is a period in milliseconds.
pub const SYNCGUARD_EVERY: i32 = 1;
/// For `syncguard_run_once`: the value is a number of the caller's.
pub const SYNCGUARD_NUMBER: i32 = 2;
/// For `syncguard_run_once`, added to one of the two: the slot is marked before the job runs.
pub const SYNCGUARD_CLAIM_AT_START: i32 = 16;

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn syncguard_code_name(code: i32) -> *const c_char {
    let name = match code {
        SYNCGUARD_OK => c"Ok",
        SYNCGUARD_LOCKED => c"Locked",
        SYNCGUARD_NOT_HELD => c"NotHeld",
        SYNCGUARD_ALREADY_DONE => c"AlreadyDone",
        SYNCGUARD_RUNNING => c"Running",
        SYNCGUARD_FAILED => c"Failed",
        SYNCGUARD_SERVICE_UNAVAILABLE => c"ServiceUnavailable",
        SYNCGUARD_AUTH_FAILED => c"AuthFailed",
        SYNCGUARD_INVALID_ARGUMENT => c"InvalidArgument",
        SYNCGUARD_RATE_LIMITED => c"RateLimited",
        SYNCGUARD_NETWORK_TIMEOUT => c"NetworkTimeout",
        SYNCGUARD_ACQUISITION_TIMEOUT => c"AcquisitionTimeout",
        SYNCGUARD_ABORTED => c"Aborted",
        SYNCGUARD_INTERNAL => c"Internal",
        SYNCGUARD_PANIC => c"Panic",
        _ => c"unknown",
    };
    name.as_ptr()
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn syncguard_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The number of a code.
#[must_use]
pub fn number_of(code: ErrorCode) -> i32 {
    match code {
        ErrorCode::ServiceUnavailable => SYNCGUARD_SERVICE_UNAVAILABLE,
        ErrorCode::AuthFailed => SYNCGUARD_AUTH_FAILED,
        ErrorCode::InvalidArgument => SYNCGUARD_INVALID_ARGUMENT,
        ErrorCode::RateLimited => SYNCGUARD_RATE_LIMITED,
        ErrorCode::NetworkTimeout => SYNCGUARD_NETWORK_TIMEOUT,
        ErrorCode::AcquisitionTimeout => SYNCGUARD_ACQUISITION_TIMEOUT,
        ErrorCode::Aborted => SYNCGUARD_ABORTED,
        // The enum may grow.
        _ => SYNCGUARD_INTERNAL,
    }
}
