//! What failed last on a thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use syncguard::{ErrorCode, LockError};

use crate::advice::in_c;
use crate::answers::{SYNCGUARD_FOREVER, SYNCGUARD_PANIC, number_of};

#[derive(Default)]
struct Failure {
    text: CString,
    sqlstate: CString,
    may_be_held_ms: u64,
}

thread_local! {
    static LAST: RefCell<Failure> = RefCell::default();
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn syncguard_last_error() -> *const c_char {
    // While the thread ends there is no text any more.
    LAST.try_with(|last| last.borrow().text.as_ptr()).unwrap_or(c"".as_ptr())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn syncguard_last_error_sqlstate() -> *const c_char {
    LAST.try_with(|last| last.borrow().sqlstate.as_ptr()).unwrap_or(c"".as_ptr())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn syncguard_last_error_may_be_held_ms() -> u64 {
    LAST.try_with(|last| last.borrow().may_be_held_ms).unwrap_or(0)
}

fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

pub(crate) fn remember(message: &str) {
    keep(Failure { text: c_string(message), ..Failure::default() });
}

fn keep(failure: Failure) {
    let _ = LAST.try_with(|last| last.replace(failure));
}

fn remember_error(error: &LockError) {
    let mut message = error.to_string();
    let mut sqlstate = error.sqlstate();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        message = format!("{message}: {next}");
        sqlstate = sqlstate.or_else(|| next.downcast_ref::<LockError>()?.sqlstate());
        cause = next.source();
    }
    // At least 1 where the outcome is unknown, so that 0 always says that nothing was changed.
    let ms = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(SYNCGUARD_FOREVER).max(1);
    keep(Failure {
        text: c_string(&in_c(&message)),
        sqlstate: c_string(sqlstate.unwrap_or_default()),
        may_be_held_ms: error.may_be_held_for().map_or(0, ms),
    });
}

/// Runs a call from C: failures and panics become numbers, and their text is kept for this thread.
pub(crate) fn shielded(call: impl FnOnce() -> Result<i32, LockError>) -> i32 {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => {
            remember_error(&error);
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

/// The same for a call that cannot fail.
pub(crate) fn quiet<T>(otherwise: T, call: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        std::mem::forget(panic);
        otherwise
    })
}

pub(crate) fn invalid(message: impl Into<String>) -> LockError {
    LockError::new(ErrorCode::InvalidArgument).with_message(message.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn last() -> String {
        // SAFETY: the function's own promise.
        unsafe { CStr::from_ptr(syncguard_last_error()) }.to_string_lossy().into_owned()
    }

    #[test]
    fn a_panic_becomes_a_number_and_a_text() {
        let quiet = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let code = shielded(|| std::panic::panic_any(7));
        std::panic::set_hook(quiet);
        assert_eq!(code, SYNCGUARD_PANIC);
        assert!(last().contains("panicked"));
    }

    #[test]
    fn an_unknown_outcome_is_told_with_the_time_that_the_key_may_stay_held() {
        let fail = |error: LockError| {
            shielded(|| Err(error));
            syncguard_last_error_may_be_held_ms()
        };
        let error = || LockError::new(ErrorCode::NetworkTimeout);
        assert_eq!(fail(error().with_unknown_outcome(Duration::from_secs(31))), 31_000);
        assert_eq!(fail(error().with_unknown_outcome(Duration::ZERO)), 1);
        assert_eq!(fail(error().with_unknown_outcome(Duration::MAX)), SYNCGUARD_FOREVER);
        assert_eq!(fail(error()), 0, "the next failure says its own");
        assert_eq!(last(), "NetworkTimeout");
    }
}
