//! The faults that a test can inject.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::cancel::CancelToken;
use crate::error::ErrorCode;
use crate::model::time::{Clock, Moment, deadline_after};
use crate::sync::{Condvar, Mutex};

/// The calls that a [`MemoryBackend`](crate::MemoryBackend) counts, and for which faults can be injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Call {
    /// `acquire`, `attempt`, `grant` and `begin_run`.
    Acquire,
    /// `release` and `release_by`.
    Release,
    /// `extend` and `prolong`.
    Extend,
    /// `renew`: one call, however many leases it has.
    Renew,
    /// `is_locked`.
    IsLocked,
    /// `holder`: what a waiter asks before it tries again.
    Holder,
    /// `lookup` and `lookup_raw`.
    Lookup,
    /// `mark_run`.
    Mark,
}

impl Call {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Acquire,
        Self::Release,
        Self::Extend,
        Self::Renew,
        Self::IsLocked,
        Self::Holder,
        Self::Lookup,
        Self::Mark,
    ];
}

/// How one call fails. An [`ErrorCode`] alone stands for [`Fault::error`].
#[derive(Clone)]
pub struct Fault(pub(super) Kind);

#[derive(Clone)]
pub(super) enum Kind {
    Error(ErrorCode),
    LostRequest(ErrorCode),
    LostAnswer(ErrorCode),
    Hang(Arc<GateInner>),
    HangAnswer(Arc<GateInner>),
}

impl Fault {
    /// The call fails with this code, and certainly changes nothing.
    #[must_use]
    pub fn error(code: ErrorCode) -> Self {
        Self(Kind::Error(code))
    }

    /// The call fails with an unknown outcome, and has changed nothing.
    #[must_use]
    pub fn lost_request(code: ErrorCode) -> Self {
        Self(Kind::LostRequest(code))
    }

    /// The call does its work, and fails with an unknown outcome: its answer was lost.
    #[must_use]
    pub fn lost_answer(code: ErrorCode) -> Self {
        Self(Kind::LostAnswer(code))
    }
}

impl From<ErrorCode> for Fault {
    fn from(code: ErrorCode) -> Self {
        Self::error(code)
    }
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Error(code) => write!(f, "Fault::error({code})"),
            Kind::LostRequest(code) => write!(f, "Fault::lost_request({code})"),
            Kind::LostAnswer(code) => write!(f, "Fault::lost_answer({code})"),
            Kind::Hang(_) => f.write_str("Fault::hang"),
            Kind::HangAnswer(_) => f.write_str("Fault::hang_answer"),
        }
    }
}

/// How a lease is found when it is next renewed or extended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// It expired before.
    Expired,
    /// Another holder has the key, with a newer fence.
    TakenOver,
    /// Its row is gone.
    RowMissing,
    /// Not lost: the renewal answers `Busy` and leaves the lease alone; an extend is not touched.
    Busy,
}

/// The faults that are waiting for their call.
#[derive(Default)]
pub(super) struct Orders {
    next: BTreeMap<Call, VecDeque<Fault>>,
    every: BTreeMap<Call, Fault>,
}

impl Orders {
    pub(super) fn push_next(&mut self, call: Call, fault: Fault) {
        self.next.entry(call).or_default().push_back(fault);
    }

    pub(super) fn set_every(&mut self, call: Call, fault: Fault) {
        self.every.insert(call, fault);
    }

    pub(super) fn clear(&mut self) {
        self.next.clear();
        self.every.clear();
    }

    pub(super) fn take(&mut self, call: Call) -> Option<Fault> {
        self.next.get_mut(&call).and_then(VecDeque::pop_front).or_else(|| self.every.get(&call).cloned())
    }
}

/// Holds calls until it is opened; dropping it opens it, so that a test that fails does not hang.
///
/// A call that hangs in it still ends with its cancel token or its deadline.
///
/// # Blocking
///
/// [`wait_for_calls`](Self::wait_for_calls) at most its `limit`, and no longer than a day.
///
/// # Cancellation
///
/// No token ends that wait.
#[must_use = "dropping the gate opens it"]
pub struct Gate(pub(super) Arc<GateInner>);

#[derive(Default)]
pub(super) struct GateInner {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    open: bool,
    arrived: usize,
    inside: usize,
}

/// How a stay in a gate ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stay {
    Opened,
    Cancelled,
    TimedOut,
}

impl Gate {
    /// Lets the calls go on, those inside and all that come later.
    pub fn open(&self) {
        self.0.state.lock().open = true;
        self.0.changed.notify_all();
    }

    /// Waits until this many calls have arrived in total, for at most `limit` of real time.
    #[must_use = "false means that the calls did not come"]
    pub fn wait_for_calls(&self, calls: usize, limit: Duration) -> bool {
        let end = deadline_after(limit);
        self.0.changed.wait_while(self.0.state.lock(), end, |state| state.arrived < calls).1
    }

    /// How many calls hang in it now.
    #[must_use]
    pub fn inside(&self) -> usize {
        self.0.state.lock().inside
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("inside", &self.inside()).finish_non_exhaustive()
    }
}

impl GateInner {
    /// Wakes whoever waits, to look at the clock and the token again.
    pub(super) fn nudge(&self) {
        // Taking the lock orders this after the look that precedes a wait.
        drop(self.state.lock());
        self.changed.notify_all();
    }

    pub(super) fn hold(self: &Arc<Self>, clock: &Clock, deadline: Moment, cancel: &CancelToken) -> Stay {
        let gate = Arc::clone(self);
        let subscription = cancel.subscribe(move || gate.nudge());
        let mut state = self.state.lock();
        state.arrived += 1;
        state.inside += 1;
        self.changed.notify_all();
        let stay = loop {
            if cancel.is_cancelled() {
                break Stay::Cancelled;
            }
            if state.open {
                break Stay::Opened;
            }
            let now = clock.now();
            if now >= deadline {
                break Stay::TimedOut;
            }
            // A manual clock nudges when it is moved; real time says nothing about it.
            let rest = if clock.is_manual() { Duration::from_secs(3600) } else { deadline.since(now) };
            let rest = rest.min(Duration::from_secs(3600));
            state = self.changed.wait_for(state, rest);
        };
        state.inside -= 1;
        drop(state);
        drop(subscription);
        stay
    }
}
