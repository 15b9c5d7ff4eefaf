//! The callback of a guard that is called when its lease is lost.
//!
//! Invariants:
//! 1. It is called at most once, with no mutex held.
//! 2. After `stop` it does not run and is never called again, unless `stop` was called by the callback itself: then
//!    it is the last thing that runs. So C may free what the callback uses after the guard's release.
//! 3. In a fork nothing is waited for: the thread that would end the wait is the parent's.

use std::ffi::{CString, c_char, c_void};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use syncguard::LostReason;

use crate::advice::in_c;

/// See the header.
pub type syncguard_on_lost = Option<unsafe extern "C-unwind" fn(reason: *const c_char, user: *mut c_void)>;

/// A callback with its user data.
pub(crate) struct Call {
    function: unsafe extern "C-unwind" fn(*const c_char, *mut c_void),
    user: *mut c_void,
}

// SAFETY: the header says that the callback runs on another thread, with this pointer.
unsafe impl Send for Call {}

impl Call {
    pub(crate) fn new(function: syncguard_on_lost, user: *mut c_void) -> Option<Self> {
        function.map(|function| Self { function, user })
    }

    fn run(&self, reason: LostReason) {
        let reason = CString::new(in_c(&reason.to_string())).unwrap_or_default();
        // SAFETY: what C promises of its function and its pointer; the text lives until the call ends.
        unsafe { (self.function)(reason.as_ptr(), self.user) };
    }
}

/// What was asked for becomes of it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Set {
    Kept,
    /// The lease was lost before; the callback has been called.
    CalledNow,
    /// The guard was released before.
    Over,
}

#[derive(Default)]
struct State {
    call: Option<Call>,
    lost: Option<LostReason>,
    over: bool,
    running: Option<ThreadId>,
}

pub(crate) struct Watch {
    state: Mutex<State>,
    quiet: Condvar,
    made_in: u32,
}

impl Watch {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::default(), quiet: Condvar::new(), made_in: std::process::id() }
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.made_in != std::process::id()
    }

    /// The lease is lost.
    pub(crate) fn fire(&self, reason: LostReason) {
        let mut state = self.lock();
        state.lost = Some(reason);
        let call = state.call.take();
        if let (Some(call), false) = (call, state.over) {
            drop(self.run(state, &call, reason));
        }
    }

    /// Takes this callback instead of the one before.
    pub(crate) fn set(&self, call: Option<Call>) -> Set {
        let mut state = self.wait_for_others(self.lock());
        if state.over {
            return Set::Over;
        }
        match (state.lost, call) {
            (None, call) => {
                state.call = call;
                Set::Kept
            }
            (Some(reason), Some(call)) => {
                drop(self.run(state, &call, reason));
                Set::CalledNow
            }
            (Some(_), None) => Set::CalledNow,
        }
    }

    /// Nothing is called any more, and nothing runs.
    pub(crate) fn stop(&self) {
        if self.is_forked() {
            return;
        }
        let mut state = self.lock();
        state.over = true;
        state.call = None;
        drop(self.wait_for_others(state));
    }

    fn run<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        call: &Call,
        reason: LostReason,
    ) -> MutexGuard<'a, State> {
        let before = state.running.replace(thread::current().id());
        drop(state);
        call.run(reason);
        let mut state = self.lock();
        state.running = before;
        self.quiet.notify_all();
        state
    }

    /// Waits until no other thread is in the callback.
    fn wait_for_others<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        while state.running.is_some_and(|thread| thread != thread::current().id()) {
            state = self.quiet.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
