//! Guards of one key or of several.

use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use syncguard::{
    CancelToken, ExtendResult, LockError, LockGuard, MultiGuard, ReleaseResult, normalize_and_validate_key,
};

use crate::answers::{SYNCGUARD_NOT_HELD, SYNCGUARD_OK};
use crate::errors::{invalid, quiet, shielded};
use crate::pointers::{borrow, clear, free, give_text, text};
use crate::token::wait_lost;
use crate::watch::{Call, Set, Watch, syncguard_on_lost};

/// What a guard holds.
pub(crate) enum Held {
    One(LockGuard),
    Several(MultiGuard),
}

impl Held {
    fn is_held(&self) -> bool {
        match self {
            Self::One(guard) => guard.is_held(),
            Self::Several(guard) => guard.is_held(),
        }
    }

    fn remaining(&self) -> Duration {
        match self {
            Self::One(guard) => guard.remaining(),
            Self::Several(guard) => guard.remaining(),
        }
    }

    fn lost(&self) -> &CancelToken {
        match self {
            Self::One(guard) => guard.lost(),
            Self::Several(guard) => guard.lost(),
        }
    }

    fn fences(&self) -> Vec<(String, u64)> {
        let of = |guard: &MultiGuard, key: &str| guard.fence(key).map_or(0, syncguard::Fence::get);
        match self {
            Self::One(guard) => vec![(guard.key().to_owned(), guard.fence().get())],
            Self::Several(guard) => {
                guard.keys().into_iter().map(|key| (key.to_owned(), of(guard, key))).collect()
            }
        }
    }

    fn extend(&self, ttl: Duration) -> Result<ExtendResult, LockError> {
        match self {
            Self::One(guard) => guard.extend(ttl),
            Self::Several(guard) => guard.extend(ttl),
        }
    }

    fn fence_sql(&self) -> Result<String, LockError> {
        match self {
            Self::One(guard) => guard.fence_sql(),
            Self::Several(guard) => guard.fence_sql(),
        }
    }

    fn release(self) -> Result<ReleaseResult, LockError> {
        match self {
            Self::One(guard) => guard.release(),
            Self::Several(guard) => guard.release(),
        }
    }

    fn release_now(self) -> Result<ReleaseResult, LockError> {
        match self {
            Self::One(guard) => guard.release_now(),
            Self::Several(guard) => guard.release_now(),
        }
    }
}

/// A guard, opaque to C. It outlives the release of its locks: then the slot is empty.
pub struct syncguard_guard {
    slot: Mutex<Option<Arc<Held>>>,
    fences: Vec<(String, u64)>,
    permit: u32,
    shared: bool,
    /// Fires when the lease is lost, and when it is released.
    over: CancelToken,
    watch: Arc<Watch>,
}

impl syncguard_guard {
    pub(crate) fn new(held: Held, watch: Arc<Watch>) -> Self {
        let (permit, shared) = match &held {
            Held::One(guard) => (guard.permit().unwrap_or(0), guard.is_shared()),
            Held::Several(_) => (0, false),
        };
        let (fences, over) = (held.fences(), held.lost().child());
        Self { slot: Mutex::new(Some(Arc::new(held))), fences, permit, shared, over, watch }
    }

    /// Calls with what is held, if it has not been released; the mutex is released before the call. A
    /// release meanwhile leaves the last reference to this call, whose end lets it go.
    fn with<T>(&self, call: impl FnOnce(&Held) -> T) -> Option<T> {
        let held = self.slot.lock().unwrap_or_else(PoisonError::into_inner).clone();
        held.map(|held| call(&held))
    }

    /// What is held, which ends waits and callbacks.
    fn take(&self) -> Option<Arc<Held>> {
        let held = self.slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        if !self.watch.is_forked() {
            self.over.cancel();
            self.watch.stop();
        }
        held
    }

    fn is_held(&self) -> bool {
        self.with(Held::is_held).unwrap_or(false)
    }

    fn fence_of(&self, key: &str) -> Result<u64, LockError> {
        let key = normalize_and_validate_key(key)?;
        Ok(self.fences.iter().find(|(own, _)| *own == *key).map_or(0, |(_, fence)| *fence))
    }

    fn end(&self, release: impl FnOnce(Held) -> Result<ReleaseResult, LockError>) -> Result<i32, LockError> {
        let Some(held) = self.take() else { return Ok(SYNCGUARD_NOT_HELD) };
        // In use by another thread: whoever drops it last lets the lock go.
        let Some(held) = Arc::into_inner(held) else { return Ok(SYNCGUARD_OK) };
        match release(held)? {
            ReleaseResult::Released => Ok(SYNCGUARD_OK),
            ReleaseResult::NotHeld => Ok(SYNCGUARD_NOT_HELD),
        }
    }
}

impl Drop for syncguard_guard {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_fence(guard: *const syncguard_guard) -> u64 {
    // SAFETY: NULL or a handle that has not been freed, by the header's rules.
    match unsafe { guard.as_ref() }.map(|guard| guard.fences.as_slice()) {
        Some([(_, fence)]) => *fence,
        _ => 0,
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_fence_of(guard: *const syncguard_guard, key: *const c_char) -> u64 {
    quiet(0, || {
        // SAFETY: NULL, or a handle that has not been freed and a text, by the header's rules.
        match unsafe { (guard.as_ref(), text(key, "key")) } {
            (Some(guard), Ok(key)) => guard.fence_of(key).unwrap_or(0),
            _ => 0,
        }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_permit(guard: *const syncguard_guard) -> u32 {
    // SAFETY: NULL or a handle that has not been freed, by the header's rules.
    unsafe { guard.as_ref() }.map_or(0, |guard| guard.permit)
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_is_shared(guard: *const syncguard_guard) -> i32 {
    // SAFETY: NULL or a handle that has not been freed, by the header's rules.
    unsafe { guard.as_ref() }.map_or(0, |guard| i32::from(guard.shared))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_is_held(guard: *const syncguard_guard) -> i32 {
    // SAFETY: NULL or a handle that has not been freed, by the header's rules.
    let guard = unsafe { guard.as_ref() };
    quiet(0, || i32::from(guard.is_some_and(syncguard_guard::is_held)))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_remaining_ms(guard: *const syncguard_guard) -> u64 {
    // SAFETY: NULL or a handle that has not been freed, by the header's rules.
    let guard = unsafe { guard.as_ref() };
    quiet(0, || milliseconds(guard.and_then(|guard| guard.with(Held::remaining)).unwrap_or_default()))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_wait_lost(guard: *const syncguard_guard, timeout_ms: u64) -> i32 {
    shielded(|| {
        // SAFETY: NULL or a handle that has not been freed, by the header's rules.
        let guard = unsafe { borrow(guard, "guard") }?;
        Ok(wait_lost(|| guard.is_held(), &guard.over, timeout_ms))
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_on_lost(
    guard: *const syncguard_guard,
    callback: syncguard_on_lost,
    user: *mut c_void,
) -> i32 {
    shielded(|| {
        // SAFETY: NULL or a handle that has not been freed, by the header's rules.
        let guard = unsafe { borrow(guard, "guard") }?;
        if guard.watch.is_forked() {
            return Err(invalid("this lock was taken before a fork: it belongs to the parent process"));
        }
        Ok(match guard.watch.set(Call::new(callback, user)) {
            Set::Kept => SYNCGUARD_OK,
            Set::CalledNow | Set::Over => SYNCGUARD_NOT_HELD,
        })
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_extend(guard: *const syncguard_guard, ttl_ms: u64) -> i32 {
    shielded(|| {
        // SAFETY: NULL or a handle that has not been freed, by the header's rules.
        let guard = unsafe { borrow(guard, "guard") }?;
        match guard.with(|held| held.extend(Duration::from_millis(ttl_ms))).transpose()? {
            Some(ExtendResult::Extended { .. }) => Ok(SYNCGUARD_OK),
            _ => Ok(SYNCGUARD_NOT_HELD),
        }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_fence_sql(
    guard: *const syncguard_guard,
    out: *mut *mut c_char,
) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: NULL or a handle that has not been freed, by the header's rules.
        let guard = unsafe { borrow(guard, "guard") }?;
        let Some(sql) = guard.with(Held::fence_sql).transpose()? else { return Ok(SYNCGUARD_NOT_HELD) };
        // SAFETY: `clear` found it not NULL.
        unsafe { give_text(out, sql) }?;
        Ok(SYNCGUARD_OK)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_release(guard: *const syncguard_guard) -> i32 {
    shielded(|| {
        // SAFETY: NULL or a handle that has not been freed, by the header's rules.
        unsafe { borrow(guard, "guard") }?.end(Held::release)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_release_now(guard: *const syncguard_guard) -> i32 {
    shielded(|| {
        // SAFETY: NULL or a handle that has not been freed, by the header's rules.
        unsafe { borrow(guard, "guard") }?.end(Held::release_now)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_guard_free(guard: *mut syncguard_guard) {
    // SAFETY: NULL, or a handle of `give` that is freed once, by the header's rules.
    unsafe { free(guard) };
}

pub(crate) fn milliseconds(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_may_be_shared_between_threads() {
        fn check<T: Send + Sync>() {}
        check::<crate::syncguard_client>();
        check::<syncguard_guard>();
        check::<crate::syncguard_token>();
        check::<crate::syncguard_term>();
        check::<crate::syncguard_run>();
    }
}
