//! Tokens that end waits.

use std::time::Duration;

use syncguard::CancelToken;

use crate::answers::{SYNCGUARD_NOT_HELD, SYNCGUARD_OK};
use crate::errors::{quiet, shielded};
use crate::pointers::{borrow, clear, free, give};

/// A token, opaque to C.
pub struct syncguard_token(pub(crate) CancelToken);

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_token_new(out: *mut *mut syncguard_token) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: `clear` found it not NULL.
        unsafe { give(out, syncguard_token(CancelToken::new())) };
        Ok(SYNCGUARD_OK)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_token_child(
    token: *const syncguard_token,
    out: *mut *mut syncguard_token,
) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: NULL or a handle that has not been freed, by the header's rules.
        let child = unsafe { borrow(token, "token") }?.0.child();
        // SAFETY: `clear` found it not NULL.
        unsafe { give(out, syncguard_token(child)) };
        Ok(SYNCGUARD_OK)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_token_cancel(token: *const syncguard_token) -> i32 {
    shielded(|| {
        // SAFETY: NULL or a handle that has not been freed, by the header's rules.
        unsafe { borrow(token, "token") }?.0.cancel();
        Ok(SYNCGUARD_OK)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_token_is_cancelled(token: *const syncguard_token) -> i32 {
    // SAFETY: NULL or a handle that has not been freed, by the header's rules.
    let token = unsafe { token.as_ref() };
    quiet(0, || i32::from(token.is_some_and(|token| token.0.is_cancelled())))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_token_free(token: *mut syncguard_token) {
    // SAFETY: NULL, or a handle of `give` that is freed once, by the header's rules.
    unsafe { free(token) };
}

/// Waits until a lease is lost: the answers of the `_wait_lost` functions.
pub(crate) fn wait_lost(is_held: impl Fn() -> bool, over: &CancelToken, timeout_ms: u64) -> i32 {
    if !is_held() || over.wait_timeout(Duration::from_millis(timeout_ms)) || !is_held() {
        return SYNCGUARD_NOT_HELD;
    }
    SYNCGUARD_OK
}
