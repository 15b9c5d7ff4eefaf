//! The C interface of syncguard. The contract is in `include/syncguard.h`; this is its other side.
//!
//! Invariants:
//! 1. No panic leaves a function: `shielded` catches it and answers [`SYNCGUARD_PANIC`].
//! 2. A handle is a `Box` that was turned into a pointer by `give` and is turned back exactly once,
//!    by the `_free` function of its type. All others only borrow it.
//! 3. Both handle types are `Sync`, so C may use one from several threads.
//! 4. No mutex is held while a call waits for the network: see `syncguard_guard::with`.

// A panic in library code is a bug.
#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::dbg_macro,
    clippy::print_stdout,
    clippy::print_stderr
)]
#![allow(non_camel_case_types, reason = "C sees these names")]
#![allow(clippy::missing_safety_doc, reason = "the header says it, once for all functions")]

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use syncguard::{
    CancelToken, ErrorCode, ExtendResult, LockError, LockGuard, LockOptions, PgLockClient, ReleaseResult,
};

/// It worked.
pub const SYNCGUARD_OK: i32 = 0;
/// Another holder has the key.
pub const SYNCGUARD_LOCKED: i32 = 1;
/// The lease is over, or was released.
pub const SYNCGUARD_NOT_HELD: i32 = 2;
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

/// A client, opaque to C.
pub struct syncguard_client(PgLockClient);

/// A guard, opaque to C. It outlives the release of its lock: then the slot is empty.
pub struct syncguard_guard {
    slot: Mutex<Option<Arc<LockGuard>>>,
    fence: u64,
    lost: CancelToken,
}

impl syncguard_guard {
    fn new(guard: LockGuard) -> Self {
        let (fence, lost) = (guard.fence().get(), guard.lost().clone());
        Self { slot: Mutex::new(Some(Arc::new(guard))), fence, lost }
    }

    /// Calls with the guard, if it has not been released; the mutex is released before the call. A
    /// release meanwhile leaves the last reference to this call, whose end drops the guard.
    fn with<T>(&self, call: impl FnOnce(&LockGuard) -> T) -> Option<T> {
        let guard = self.slot.lock().unwrap_or_else(PoisonError::into_inner).clone();
        guard.map(|guard| call(&guard))
    }

    fn take(&self) -> Option<Arc<LockGuard>> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn is_held(&self) -> bool {
        self.with(LockGuard::is_held).unwrap_or(false)
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_client_connect(
    url: *const c_char,
    schema: *const c_char,
    out: *mut *mut syncguard_client,
) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: NULL or text that ends with a zero byte, by the header's rules; so are all below.
        let (url, schema) = unsafe { (text(url, "url")?, optional_text(schema, "schema")?) };
        let mut builder = PgLockClient::builder();
        if let Some(schema) = schema {
            builder = builder.schema(schema);
        }
        let client = builder.connect(url)?;
        // SAFETY: `clear` found it not NULL.
        unsafe { give(out, syncguard_client(client)) };
        Ok(SYNCGUARD_OK)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_client_close(client: *const syncguard_client, deadline_ms: u64) -> i32 {
    shielded(|| {
        // SAFETY: NULL or a handle that has not been freed, by the header's rules.
        let client = unsafe { borrow(client, "client") }?;
        if client.0.close(Duration::from_millis(deadline_ms))?.is_clean() {
            return Ok(SYNCGUARD_OK);
        }
        remember("something was left when the time was over: it stays held until its ttl is over");
        Ok(SYNCGUARD_NETWORK_TIMEOUT)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_client_free(client: *mut syncguard_client) {
    // SAFETY: NULL, or a handle of `give` that is freed once, by the header's rules.
    unsafe { free(client) };
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_lock(
    client: *const syncguard_client,
    key: *const c_char,
    ttl_ms: u64,
    timeout_ms: u64,
    out: *mut *mut syncguard_guard,
) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: a handle that has not been freed and a text, or NULL, by the header's rules.
        let (client, key) = unsafe { (borrow(client, "client")?, text(key, "key")?) };
        let options = match timeout_ms {
            0 => options(ttl_ms),
            SYNCGUARD_FOREVER => options(ttl_ms).wait_forever(),
            // The time alone decides, not the number of retries.
            _ => options(ttl_ms).timeout(Duration::from_millis(timeout_ms)),
        };
        let guard = client.0.lock_with(key, &options)?;
        // SAFETY: `clear` found it not NULL.
        unsafe { give(out, syncguard_guard::new(guard)) };
        Ok(SYNCGUARD_OK)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_try_lock(
    client: *const syncguard_client,
    key: *const c_char,
    ttl_ms: u64,
    out: *mut *mut syncguard_guard,
) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: a handle that has not been freed and a text, or NULL, by the header's rules.
        let (client, key) = unsafe { (borrow(client, "client")?, text(key, "key")?) };
        let Some(guard) = client.0.try_lock_with(key, &options(ttl_ms))? else {
            return Ok(SYNCGUARD_LOCKED);
        };
        // SAFETY: `clear` found it not NULL.
        unsafe { give(out, syncguard_guard::new(guard)) };
        Ok(SYNCGUARD_OK)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_fence(guard: *const syncguard_guard) -> u64 {
    // SAFETY: NULL or a handle that has not been freed, by the header's rules.
    unsafe { guard.as_ref() }.map_or(0, |guard| guard.fence)
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_is_held(guard: *const syncguard_guard) -> i32 {
    // SAFETY: NULL or a handle that has not been freed, by the header's rules.
    let guard = unsafe { guard.as_ref() };
    catch_unwind(AssertUnwindSafe(|| i32::from(guard.is_some_and(syncguard_guard::is_held)))).unwrap_or(0)
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_remaining_ms(guard: *const syncguard_guard) -> u64 {
    // SAFETY: NULL or a handle that has not been freed, by the header's rules.
    let guard = unsafe { guard.as_ref() };
    let ask = || guard.and_then(|guard| guard.with(LockGuard::remaining)).unwrap_or_default().as_millis();
    catch_unwind(AssertUnwindSafe(ask)).map_or(0, |ms| u64::try_from(ms).unwrap_or(u64::MAX))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_wait_lost(guard: *const syncguard_guard, timeout_ms: u64) -> i32 {
    shielded(|| {
        // SAFETY: NULL or a handle that has not been freed, by the header's rules.
        let guard = unsafe { borrow(guard, "guard") }?;
        if !guard.is_held() || guard.lost.wait_timeout(Duration::from_millis(timeout_ms)) {
            return Ok(SYNCGUARD_NOT_HELD);
        }
        Ok(if guard.is_held() { SYNCGUARD_OK } else { SYNCGUARD_NOT_HELD })
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_extend(guard: *const syncguard_guard, ttl_ms: u64) -> i32 {
    shielded(|| {
        // SAFETY: NULL or a handle that has not been freed, by the header's rules.
        let guard = unsafe { borrow(guard, "guard") }?;
        match guard.with(|guard| guard.extend(Duration::from_millis(ttl_ms))).transpose()? {
            Some(ExtendResult::Extended { .. }) => Ok(SYNCGUARD_OK),
            _ => Ok(SYNCGUARD_NOT_HELD),
        }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_release(guard: *const syncguard_guard) -> i32 {
    shielded(|| {
        // SAFETY: NULL or a handle that has not been freed, by the header's rules.
        let guard = unsafe { borrow(guard, "guard") }?;
        let Some(guard) = guard.take() else { return Ok(SYNCGUARD_NOT_HELD) };
        // In use by another thread: whoever drops it last lets the lock go.
        let Some(guard) = Arc::into_inner(guard) else { return Ok(SYNCGUARD_OK) };
        match guard.release()? {
            ReleaseResult::Released => Ok(SYNCGUARD_OK),
            ReleaseResult::NotHeld => Ok(SYNCGUARD_NOT_HELD),
        }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_free(guard: *mut syncguard_guard) {
    // SAFETY: NULL, or a handle of `give` that is freed once, by the header's rules.
    unsafe { free(guard) };
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn syncguard_last_error() -> *const c_char {
    // While the thread ends there is no text any more.
    LAST_ERROR.try_with(|text| text.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn syncguard_code_name(code: i32) -> *const c_char {
    let name = match code {
        SYNCGUARD_OK => c"Ok",
        SYNCGUARD_LOCKED => c"Locked",
        SYNCGUARD_NOT_HELD => c"NotHeld",
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

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

fn remember(message: &str) {
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    let _ = LAST_ERROR.try_with(|text| *text.borrow_mut() = message);
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

/// Runs a call from C: failures and panics become numbers, and their text is kept for this thread.
fn shielded(call: impl FnOnce() -> Result<i32, LockError>) -> i32 {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => {
            let mut message = error.to_string();
            let mut cause = std::error::Error::source(&error);
            while let Some(next) = cause {
                message = format!("{message}: {next}");
                cause = next.source();
            }
            remember(&message);
            number_of(error.code())
        }
        Err(panic) => {
            // A panic's payload may panic when it is dropped.
            std::mem::forget(panic);
            remember("the library panicked: this is a bug, please report it");
            SYNCGUARD_PANIC
        }
    }
}

fn options(ttl_ms: u64) -> LockOptions {
    match ttl_ms {
        0 => LockOptions::new(),
        _ => LockOptions::new().ttl(Duration::from_millis(ttl_ms)),
    }
}

fn invalid(message: String) -> LockError {
    LockError::new(ErrorCode::InvalidArgument).with_message(message)
}

/// # Safety
/// NULL or text that ends with a zero byte and stays as it is during the call.
unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str, LockError> {
    // SAFETY: what the caller promises.
    unsafe { optional_text(pointer, name) }?.ok_or_else(|| invalid(format!("{name} is NULL")))
}

/// # Safety
/// As [`text`].
unsafe fn optional_text<'a>(pointer: *const c_char, name: &str) -> Result<Option<&'a str>, LockError> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, and what the caller promises.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map(Some).map_err(|_| invalid(format!("{name} is not UTF-8")))
}

/// # Safety
/// NULL or a handle that nobody frees during the call.
unsafe fn borrow<'a, T>(handle: *const T, name: &str) -> Result<&'a T, LockError> {
    // SAFETY: what the caller promises; handles are only borrowed shared.
    unsafe { handle.as_ref() }.ok_or_else(|| invalid(format!("{name} is NULL")))
}

/// # Safety
/// NULL or a variable that may be written.
unsafe fn clear<T>(out: *mut *mut T) -> Result<(), LockError> {
    if out.is_null() {
        return Err(invalid("out is NULL".into()));
    }
    // SAFETY: not NULL, and what the caller promises.
    unsafe { out.write(ptr::null_mut()) };
    Ok(())
}

/// # Safety
/// A variable that may be written.
unsafe fn give<T>(out: *mut *mut T, value: T) {
    // SAFETY: what the caller promises.
    unsafe { out.write(Box::into_raw(Box::new(value))) };
}

/// # Safety
/// NULL, or a handle of `give` that nobody uses any more.
unsafe fn free<T>(handle: *mut T) {
    if handle.is_null() {
        return;
    }
    // SAFETY: it came from `Box::into_raw`, and is freed once, as the caller promises.
    let value = unsafe { Box::from_raw(handle) };
    let _ = catch_unwind(AssertUnwindSafe(|| drop(value))).map_err(std::mem::forget);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_number_and_a_text() {
        let quiet = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let code = shielded(|| std::panic::panic_any(7));
        std::panic::set_hook(quiet);
        assert_eq!(code, SYNCGUARD_PANIC);
        // SAFETY: the function's own promise.
        let text = unsafe { CStr::from_ptr(syncguard_last_error()) };
        assert!(text.to_string_lossy().contains("panicked"));
    }

    #[test]
    fn handles_may_be_shared_between_threads() {
        fn check<T: Send + Sync>() {}
        check::<syncguard_client>();
        check::<syncguard_guard>();
    }
}
