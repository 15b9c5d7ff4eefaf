//! Leader election.

use std::ffi::{c_char, c_void};
use std::ops::ControlFlow::{Break, Continue};
use std::ptr;

use syncguard::backend::{HeldBy, LockBackend as _, Moment};
use syncguard::{CancelToken, Term};

use crate::answers::{SYNCGUARD_NOT_HELD, SYNCGUARD_OK};
use crate::client::syncguard_client;
use crate::errors::{invalid, quiet, shielded};
use crate::guard::milliseconds;
use crate::options::{chosen, syncguard_options};
use crate::pointers::{borrow, clear, give_text, tell, text};
use crate::token::wait_lost;

/// A term, opaque to C, which only borrows it.
#[repr(transparent)]
pub struct syncguard_term(Term);

/// See the header.
pub type syncguard_lead =
    Option<unsafe extern "C-unwind" fn(term: *const syncguard_term, user: *mut c_void) -> i32>;

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_elect(
    client: *const syncguard_client,
    key: *const c_char,
    options: *const syncguard_options,
    lead: syncguard_lead,
    user: *mut c_void,
) -> i32 {
    shielded(|| {
        // SAFETY: handles that have not been freed and a text, or NULL, by the header's rules.
        let (client, key, options) =
            unsafe { (borrow(client, "client")?, text(key, "key")?, chosen(options)?) };
        let lead = lead.ok_or_else(|| invalid("lead is NULL"))?;
        client.0.elect(key, &options, |term| {
            // A term behind the same address: the struct is transparent.
            let term = ptr::from_ref(term).cast::<syncguard_term>();
            // SAFETY: what C promises of its function and its pointer; the term lives until the call ends.
            if unsafe { lead(term, user) } == 0 { Continue(()) } else { Break(()) }
        })?;
        Ok(SYNCGUARD_OK)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_leader(
    client: *const syncguard_client,
    key: *const c_char,
    term: *mut u64,
    since_ms: *mut i64,
    expires_at_ms: *mut i64,
) -> i32 {
    shielded(|| {
        let told = |of: (u64, i64, i64)| {
            // SAFETY: NULL or C's variables.
            unsafe {
                tell(term, of.0);
                tell(since_ms, of.1);
                tell(expires_at_ms, of.2);
            }
        };
        told((0, 0, 0));
        // SAFETY: a handle that has not been freed and a text, or NULL, by the header's rules.
        let (client, key) = unsafe { (borrow(client, "client")?, text(key, "key")?) };
        let Some(leader) = client.0.leader(key)? else { return Ok(SYNCGUARD_NOT_HELD) };
        told((leader.term.get(), leader.since_ms, leader.expires_at_ms));
        Ok(SYNCGUARD_OK)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_holder(
    client: *const syncguard_client,
    key: *const c_char,
    fence: *mut u64,
    expires_at_ms: *mut i64,
    owner: *mut *mut c_char,
    note: *mut *mut c_char,
) -> i32 {
    shielded(|| {
        // SAFETY: NULL or C's variables; so are all below.
        unsafe {
            tell(fence, 0);
            tell(expires_at_ms, 0);
            tell(owner, ptr::null_mut());
            tell(note, ptr::null_mut());
        }
        // SAFETY: a handle that has not been freed and a text, or NULL, by the header's rules.
        let (client, key) = unsafe { (borrow(client, "client")?, text(key, "key")?) };
        let held = client.0.who_holds(key, Moment::NEVER, &CancelToken::never())?;
        let Some(HeldBy { lease, .. }) = held else { return Ok(SYNCGUARD_NOT_HELD) };
        // SAFETY: as above.
        unsafe {
            tell(fence, lease.fence.get());
            tell(expires_at_ms, lease.expires_at_ms);
            for (out, said) in [(owner, lease.owner), (note, lease.note)] {
                if let (false, Some(said)) = (out.is_null(), said) {
                    give_text(out, said)?;
                }
            }
        }
        Ok(SYNCGUARD_OK)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_term_number(term: *const syncguard_term) -> u64 {
    // SAFETY: NULL or the term of a callback that has not returned, by the header's rules; so are all below.
    unsafe { term.as_ref() }.map_or(0, |term| term.0.number().get())
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_term_is_held(term: *const syncguard_term) -> i32 {
    // SAFETY: as above.
    let term = unsafe { term.as_ref() };
    quiet(0, || i32::from(term.is_some_and(|term| term.0.is_held())))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_term_remaining_ms(term: *const syncguard_term) -> u64 {
    // SAFETY: as above.
    let term = unsafe { term.as_ref() };
    quiet(0, || term.map_or(0, |term| milliseconds(term.0.remaining())))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_term_wait_lost(term: *const syncguard_term, timeout_ms: u64) -> i32 {
    shielded(|| {
        // SAFETY: as above.
        let term = &unsafe { borrow(term, "term") }?.0;
        Ok(wait_lost(|| term.is_held(), term.lost(), timeout_ms))
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_term_fence_sql(term: *const syncguard_term, out: *mut *mut c_char) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: as above, and `clear` found `out` not NULL.
        unsafe { give_text(out, borrow(term, "term")?.0.fence_sql()?) }?;
        Ok(SYNCGUARD_OK)
    })
}
