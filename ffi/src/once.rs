//! Jobs that run once per slot.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::time::Duration;

use syncguard::{LockError, Run, RunOnce, Slot};

use crate::answers::{
    SYNCGUARD_ALREADY_DONE, SYNCGUARD_CLAIM_AT_START, SYNCGUARD_EVERY, SYNCGUARD_FAILED, SYNCGUARD_NUMBER,
    SYNCGUARD_OK, SYNCGUARD_RUNNING,
};
use crate::client::syncguard_client;
use crate::errors::{invalid, quiet, shielded};
use crate::guard::milliseconds;
use crate::options::{chosen, syncguard_options};
use crate::pointers::{borrow, clear, give_text, text};
use crate::token::wait_lost;

/// A run, opaque to C, which only borrows it.
#[repr(transparent)]
pub struct syncguard_run(Run);

/// See the header.
pub type syncguard_job =
    Option<unsafe extern "C-unwind" fn(run: *const syncguard_run, user: *mut c_void) -> i32>;

fn slot(kind: i32, value: u64) -> Result<Slot, LockError> {
    let slot = match kind & !SYNCGUARD_CLAIM_AT_START {
        SYNCGUARD_EVERY => Slot::every(Duration::from_millis(value)),
        SYNCGUARD_NUMBER => Slot::number(value),
        _ => {
            return Err(invalid(
                "slot is neither SYNCGUARD_EVERY nor SYNCGUARD_NUMBER, with or without SYNCGUARD_CLAIM_AT_START",
            ));
        }
    };
    Ok(if kind & SYNCGUARD_CLAIM_AT_START == 0 { slot } else { slot.claim_at_start() })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_run_once(
    client: *const syncguard_client,
    name: *const c_char,
    slot: i32,
    value: u64,
    options: *const syncguard_options,
    job: syncguard_job,
    user: *mut c_void,
) -> i32 {
    shielded(|| {
        // SAFETY: handles that have not been freed and a text, or NULL, by the header's rules.
        let (client, name, options) =
            unsafe { (borrow(client, "client")?, text(name, "name")?, chosen(options)?) };
        let job = job.ok_or_else(|| invalid("job is NULL"))?;
        let ran = client.0.run_once(name, self::slot(slot, value)?, &options, |run| {
            // A run behind the same address: the struct is transparent.
            let run = ptr::from_ref(run).cast::<syncguard_run>();
            // SAFETY: what C promises of its function and its pointer; the run lives until the call ends.
            if unsafe { job(run, user) } == 0 { Ok(()) } else { Err(()) }
        })?;
        Ok(match ran {
            RunOnce::Done(()) => SYNCGUARD_OK,
            RunOnce::Failed(()) => SYNCGUARD_FAILED,
            RunOnce::AlreadyDone => SYNCGUARD_ALREADY_DONE,
            RunOnce::Running => SYNCGUARD_RUNNING,
        })
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_run_slot(run: *const syncguard_run) -> u64 {
    // SAFETY: NULL or the run of a callback that has not returned, by the header's rules; so are all below.
    unsafe { run.as_ref() }.map_or(0, |run| run.0.slot())
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_run_period_start_ms(run: *const syncguard_run) -> u64 {
    // SAFETY: as above.
    unsafe { run.as_ref() }.and_then(|run| run.0.period_start_ms()).unwrap_or(0)
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_run_skipped(run: *const syncguard_run) -> u64 {
    // SAFETY: as above.
    unsafe { run.as_ref() }.map_or(0, |run| run.0.skipped())
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_run_fence(run: *const syncguard_run) -> u64 {
    // SAFETY: as above.
    unsafe { run.as_ref() }.map_or(0, |run| run.0.fence().get())
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_run_is_held(run: *const syncguard_run) -> i32 {
    // SAFETY: as above.
    let run = unsafe { run.as_ref() };
    quiet(0, || i32::from(run.is_some_and(|run| run.0.is_held())))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_run_remaining_ms(run: *const syncguard_run) -> u64 {
    // SAFETY: as above.
    let run = unsafe { run.as_ref() };
    quiet(0, || run.map_or(0, |run| milliseconds(run.0.remaining())))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_run_wait_lost(run: *const syncguard_run, timeout_ms: u64) -> i32 {
    shielded(|| {
        // SAFETY: as above.
        let run = &unsafe { borrow(run, "run") }?.0;
        Ok(wait_lost(|| run.is_held(), run.lost(), timeout_ms))
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_run_completion_sql(
    run: *const syncguard_run,
    out: *mut *mut c_char,
) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: as above, and `clear` found `out` not NULL.
        unsafe { give_text(out, borrow(run, "run")?.0.completion_sql()?) }?;
        Ok(SYNCGUARD_OK)
    })
}
