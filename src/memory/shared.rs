//! What the clones of a memory backend have in common: the server that they are clients of.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use crate::memory::fault::{Call, Fault, Gate, GateInner, Orders};
use crate::memory::store::Store;
use crate::memory::time::ServerTime;
use crate::model::time::Clock;
use crate::sync::{Condvar, Mutex};

/// What the clones of a backend have in common. Its mutexes are never held together.
pub(super) struct Shared {
    pub(super) clock: Clock,
    pub(super) state: Mutex<State>,
    pub(super) orders: Mutex<Orders>,
    pub(super) counts: Mutex<Counts>,
    pub(super) answered: Condvar,
    pub(super) plays_fences: AtomicBool,
    gates: Mutex<Vec<Weak<GateInner>>>,
}

pub(super) struct State {
    store: Store,
    pub(super) time: ServerTime,
}

#[derive(Default)]
pub(super) struct Counts {
    pub(super) arrived: BTreeMap<Call, u64>,
    pub(super) answered: BTreeMap<Call, u64>,
    pub(super) closes: u64,
}

impl Shared {
    pub(super) fn new(clock: Clock) -> Arc<Self> {
        let shared = Arc::new(Self {
            state: Mutex::new(State { store: Store::default(), time: ServerTime::of(&clock) }),
            clock,
            orders: Mutex::default(),
            counts: Mutex::default(),
            answered: Condvar::new(),
            plays_fences: AtomicBool::new(false),
            gates: Mutex::default(),
        });
        // Weak: the clock belongs to what it wakes.
        let weak = Arc::downgrade(&shared);
        shared.clock.on_advance(move || {
            if let Some(shared) = weak.upgrade() {
                shared.nudge_gates();
            }
        });
        shared
    }

    /// One indivisible step at one server time.
    pub(super) fn decide<T>(&self, work: impl FnOnce(&mut Store, i64) -> T) -> T {
        let mut state = self.state.lock();
        let now = state.time.now_ms();
        work(&mut state.store, now)
    }

    pub(super) fn take_fault(&self, call: Call) -> Option<Fault> {
        self.orders.lock().take(call)
    }

    /// Counts a call now, and its answer when the result is dropped.
    pub(super) fn arrive(&self, call: Call) -> Answer<'_> {
        *self.counts.lock().arrived.entry(call).or_default() += 1;
        Answer { shared: self, call }
    }

    pub(super) fn count_close(&self) {
        self.counts.lock().closes += 1;
    }

    pub(super) fn gate(&self) -> Gate {
        let gate = Arc::<GateInner>::default();
        let mut gates = self.gates.lock();
        gates.retain(|gate| gate.strong_count() > 0);
        gates.push(Arc::downgrade(&gate));
        Gate(gate)
    }

    fn nudge_gates(&self) {
        let gates = self.gates.lock().clone();
        for gate in gates.iter().filter_map(Weak::upgrade) {
            gate.nudge();
        }
    }
}

/// A call on its way.
pub(super) struct Answer<'a> {
    shared: &'a Shared,
    call: Call,
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        *self.shared.counts.lock().answered.entry(self.call).or_default() += 1;
        self.shared.answered.notify_all();
    }
}
