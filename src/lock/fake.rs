//! A backend for tests: leases in memory on a clock that may be manual, with scripted answers,
//! hangs, and a record of what was asked.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::backend::{
    AcquireResult, Acquired, Attempt, Capabilities, ExtendOutcome, LockBackend, LockInfo, LockInfoDebug,
    Lookup, LostReason, OnHeard, ReleaseOutcome, RenewOutcome, Renewal, TimeAuthority, Watch,
};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::lock::wake::guard;
use crate::model::fence::Fence;
use crate::model::time::{Clock, Moment};

/// The longest a test waits for anything.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// A scripted answer, in place of the real one.
#[derive(Clone, Copy, Debug)]
pub(super) enum Script {
    /// An error that changed nothing.
    Fail(ErrorCode),
    /// An error that changed nothing and is contention.
    Conflict,
    /// An error after which nobody knows; nothing was done.
    Unknown,
    /// The same, and it was done.
    UnknownDone,
    /// The answer takes that long on the backend's manual clock; it is done at its end.
    Slow(Duration),
    /// The clock runs to the call's deadline, and the call fails with it; nothing was done.
    Late,
    /// Locked, busy, or not held.
    No,
    Panic,
}

/// Where calls of a kind stop until they are let through.
#[derive(Default)]
pub(super) struct Gate {
    state: Mutex<(bool, usize)>,
    change: Condvar,
}

impl Gate {
    pub(super) fn shut(&self) {
        guard(&self.state).0 = true;
    }

    pub(super) fn open(&self) {
        guard(&self.state).0 = false;
        self.change.notify_all();
    }

    fn pass(&self) {
        let mut state = guard(&self.state);
        state.1 += 1;
        self.change.notify_all();
        while state.0 {
            state = self.change.wait(state).unwrap();
        }
        state.1 -= 1;
    }

    /// Waits until somebody stands at the gate.
    pub(super) fn wait_for_arrival(&self) {
        let state = guard(&self.state);
        let (state, over) = self.change.wait_timeout_while(state, LIMIT, |state| state.1 == 0).unwrap();
        drop(state);
        assert!(!over.timed_out(), "nobody came to the gate");
    }
}

#[derive(Default)]
pub(super) struct State {
    rows: HashMap<String, (String, Moment)>,
    fence: u64,
    scripts: HashMap<&'static str, VecDeque<Script>>,
    pub(super) log: Vec<&'static str>,
    pub(super) deadlines: Vec<(&'static str, Moment)>,
    pub(super) batches: Vec<usize>,
    pub(super) released: Vec<String>,
    /// The threads that did so.
    pub(super) released_on: Vec<std::thread::ThreadId>,
    /// Those who watch, and what they are told with.
    pub(super) watching: Vec<(String, OnHeard)>,
}

pub(super) struct Fake {
    clock: Clock,
    pub(super) state: Mutex<State>,
    pub(super) renew_gate: Gate,
    pub(super) release_gate: Gate,
    pub(super) attempt_gate: Gate,
    pub(super) reserved: AtomicU64,
    /// How many watches have ended.
    pub(super) watches_over: Arc<AtomicU64>,
    pub(super) refuse_reserve: Mutex<bool>,
    /// The thread on which the backend was dropped.
    pub(super) dropped: Mutex<Option<Arc<Mutex<Option<String>>>>>,
}

impl Fake {
    pub(super) fn on(clock: Clock) -> Arc<Self> {
        Arc::new(Self {
            clock,
            state: Mutex::default(),
            renew_gate: Gate::default(),
            release_gate: Gate::default(),
            attempt_gate: Gate::default(),
            reserved: AtomicU64::new(0),
            watches_over: Arc::default(),
            refuse_reserve: Mutex::new(false),
            dropped: Mutex::default(),
        })
    }

    pub(super) fn manual() -> (Arc<Self>, Clock) {
        let clock = Clock::manual();
        (Self::on(clock.clone()), clock)
    }

    pub(super) fn script(&self, what: &'static str, scripts: impl IntoIterator<Item = Script>) {
        guard(&self.state).scripts.entry(what).or_default().extend(scripts);
    }

    /// Somebody else takes the key.
    pub(super) fn occupy(&self, key: &str, ttl: Duration) {
        let end = self.clock.now().after(ttl);
        guard(&self.state).rows.insert(key.to_owned(), ("another".to_owned(), end));
    }

    pub(super) fn remove(&self, key: &str) {
        guard(&self.state).rows.remove(key);
    }

    pub(super) fn row(&self, key: &str) -> Option<(String, Moment)> {
        let now = self.clock.now();
        guard(&self.state).rows.get(key).filter(|row| row.1.after(super::lease::TOLERANCE) > now).cloned()
    }

    pub(super) fn count(&self, what: &str) -> usize {
        guard(&self.state).log.iter().filter(|entry| **entry == what).count()
    }

    fn note(&self, what: &'static str, deadline: Moment) -> Option<Script> {
        let mut state = guard(&self.state);
        state.log.push(what);
        state.deadlines.push((what, deadline));
        state.scripts.get_mut(what).and_then(VecDeque::pop_front)
    }

    /// Runs `act` as the script says.
    fn play<T>(&self, script: Option<Script>, no: T, act: impl FnOnce() -> T) -> Result<T> {
        let unknown =
            || LockError::new(ErrorCode::NetworkTimeout).with_unknown_outcome(Duration::from_secs(30));
        match script {
            None => Ok(act()),
            Some(Script::Fail(code)) => Err(LockError::new(code)),
            Some(Script::Conflict) => Err(LockError::new(ErrorCode::ServiceUnavailable).with_contention()),
            Some(Script::Unknown) => Err(unknown()),
            Some(Script::UnknownDone) => {
                act();
                Err(unknown())
            }
            Some(Script::Slow(time)) => {
                let answer = act();
                self.clock.advance(time);
                Ok(answer)
            }
            Some(Script::Late) => {
                self.clock.advance(Duration::from_secs(5));
                Err(LockError::new(ErrorCode::NetworkTimeout))
            }
            Some(Script::No) => Ok(no),
            Some(Script::Panic) => panic!("scripted"),
        }
    }

    fn find(state: &mut State, id: &str, now: Moment) -> Option<String> {
        let live = |row: &(String, Moment)| row.0 == id && row.1.after(super::lease::TOLERANCE) > now;
        state.rows.iter().find(|(_, row)| live(row)).map(|(key, _)| key.clone())
    }
}

struct FakeWatch(Arc<AtomicU64>);

impl Watch for FakeWatch {
    fn is_listening(&self) -> bool {
        true
    }
}

impl Drop for FakeWatch {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl LockBackend for Fake {
    fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult> {
        self.attempt(
            &Attempt { key, lock_id: "AAAAAAAAAAAAAAAAAAAAAA", ttl, deadline: Moment::NEVER },
            cancel,
        )
    }

    fn attempt(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<AcquireResult> {
        cancel.check()?;
        let script = self.note("attempt", attempt.deadline);
        self.attempt_gate.pass();
        self.play(script, AcquireResult::Locked, || {
            let now = self.clock.now();
            if self.row(attempt.key).is_some_and(|row| row.0 != attempt.lock_id) {
                return AcquireResult::Locked;
            }
            let mut state = guard(&self.state);
            state.fence += 1;
            state.rows.insert(attempt.key.to_owned(), (attempt.lock_id.to_owned(), now.after(attempt.ttl)));
            AcquireResult::Acquired(Acquired {
                lock_id: attempt.lock_id.to_owned(),
                fence: Fence::new(state.fence).unwrap(),
                expires_at_ms: 1,
            })
        })
    }

    fn peek(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<bool> {
        cancel.check()?;
        let script = self.note("peek", deadline);
        self.play(script, true, || self.row(key).is_some())
    }

    fn watch(&self, key: &str, heard: OnHeard) -> Option<Box<dyn Watch>> {
        let mut state = guard(&self.state);
        state.log.push("watch");
        if state.scripts.get_mut("watch").and_then(VecDeque::pop_front).is_some() {
            return None;
        }
        state.watching.push((key.to_owned(), heard));
        Some(Box::new(FakeWatch(Arc::clone(&self.watches_over))))
    }

    fn is_locked(&self, key: &str, _: &CancelToken) -> Result<bool> {
        Ok(self.row(key).is_some())
    }

    fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome> {
        cancel.check()?;
        self.release_by(lock_id, Moment::NEVER)
    }

    fn release_by(&self, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        assert!(
            tokio::runtime::Handle::try_current().is_err(),
            "the driver must not be used inside an async runtime"
        );
        let script = self.note("release", deadline);
        self.release_gate.pass();
        self.play(script, ReleaseOutcome::NotHeld(None), || {
            let now = self.clock.now();
            let mut state = guard(&self.state);
            state.released.push(lock_id.to_owned());
            state.released_on.push(std::thread::current().id());
            match Self::find(&mut state, lock_id, now) {
                Some(key) => {
                    state.rows.remove(&key);
                    ReleaseOutcome::Released
                }
                None => ReleaseOutcome::NotHeld(None),
            }
        })
    }

    fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome> {
        self.extend_by(lock_id, ttl, Moment::NEVER, cancel)
    }

    fn extend_by(&self, id: &str, ttl: Duration, deadline: Moment, _: &CancelToken) -> Result<ExtendOutcome> {
        let script = self.note("extend", deadline);
        self.play(script, ExtendOutcome::NotHeld(None), || {
            let now = self.clock.now();
            let mut state = guard(&self.state);
            match Self::find(&mut state, id, now) {
                Some(key) => {
                    state.rows.get_mut(&key).unwrap().1 = now.after(ttl);
                    ExtendOutcome::Extended { expires_at_ms: 2 }
                }
                None => ExtendOutcome::NotHeld(None),
            }
        })
    }

    fn renew(&self, leases: &[Renewal<'_>], deadline: Moment) -> Vec<Result<RenewOutcome>> {
        let script = self.note("renew", deadline);
        guard(&self.state).batches.push(leases.len());
        self.renew_gate.pass();
        let now = self.clock.now();
        let mut answers = Vec::new();
        for lease in leases {
            answers.push(self.play(script, RenewOutcome::Busy, || {
                let mut state = guard(&self.state);
                match state.rows.get_mut(lease.key) {
                    Some(row) if row.0 == lease.lock_id && row.1.after(super::lease::TOLERANCE) > now => {
                        row.1 = now.after(lease.ttl);
                        RenewOutcome::Renewed { expires_at_ms: 3 }
                    }
                    _ => RenewOutcome::Lost(LostReason::RowMissing),
                }
            }));
        }
        answers
    }

    fn reserve_renewals(&self, _: Moment, _: &CancelToken) -> Result<()> {
        if *guard(&self.refuse_reserve) {
            return Err(LockError::new(ErrorCode::InvalidArgument).with_message("no"));
        }
        self.reserved.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>> {
        self.lookup_raw(what, cancel).map(|found| found.map(|found| found.sanitized()))
    }

    fn lookup_raw(&self, what: Lookup<'_>, _: &CancelToken) -> Result<Option<LockInfoDebug>> {
        let now = self.clock.now();
        let key = match what {
            Lookup::Key(key) => Some(key.to_owned()),
            Lookup::LockId(id) => Self::find(&mut guard(&self.state), id, now),
        };
        Ok(key.and_then(|key| {
            let row = self.row(&key)?;
            Some(LockInfoDebug::new(key, row.0, 0, 0, Fence::new(1).unwrap()))
        }))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::fencing("fake", TimeAuthority::Client)
    }

    fn clock(&self) -> Clock {
        self.clock.clone()
    }

    fn close(&self) {
        guard(&self.state).log.push("close");
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        assert!(tokio::runtime::Handle::try_current().is_err(), "dropped inside an async runtime");
        if let Some(slot) = guard(&self.dropped).take() {
            *guard(&slot) = Some(std::thread::current().name().unwrap_or("unnamed").to_owned());
        }
    }
}

/// Waits for a condition that other threads bring about.
pub(super) fn eventually(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < end, "never happened: {what}");
        std::thread::yield_now();
        std::thread::park_timeout(Duration::from_millis(1));
    }
}
