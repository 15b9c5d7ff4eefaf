//! The memory backend with a record of what it was asked. It also answers in ways that no order to the
//! memory backend brings about: late, as contention, or with a panic.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::backend::{
    AcquireResult, Attempt, Capabilities, ExtendOutcome, Grant, Holder, LockBackend, LockInfo, LockInfoRaw,
    Lookup, OnHeard, ReleaseOutcome, RenewOutcome, Renewal, Watch,
};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::memory::{Call, Fault, MemoryBackend};
use crate::model::lock_id::LockId;
use crate::model::time::{Clock, Moment};
use crate::sync::{Condvar, Mutex};

/// The longest a test waits for anything.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// A scripted answer, in place of the real one.
#[derive(Clone, Copy, Debug)]
pub(super) enum Script {
    /// An error that changed nothing.
    Fail(ErrorCode),
    /// The server's refusal, which changed nothing.
    Denied,
    /// An error that changed nothing and is contention.
    Conflict,
    /// An error after which nobody knows; nothing was done.
    Unknown,
    /// The same, and it was done.
    UnknownDone,
    /// The answer takes that long on the backend's manual clock; it is done at its beginning.
    Slow(Duration),
    /// The clock runs to the call's deadline, and the call fails with it; nothing was done.
    Late,
    /// Locked, busy, or not held.
    No,
    Panic,
}

/// Where calls of a kind stop until they are let through. Unlike a gate of the memory backend it holds them
/// beyond their deadline: they come late then, and are done all the same.
#[derive(Default)]
pub(super) struct Gate {
    state: Mutex<(bool, usize)>,
    change: Condvar,
}

impl Gate {
    pub(super) fn shut(&self) {
        self.state.lock().0 = true;
    }

    pub(super) fn open(&self) {
        self.state.lock().0 = false;
        self.change.notify_all();
    }

    fn pass(&self) {
        let mut state = self.state.lock();
        state.1 += 1;
        self.change.notify_all();
        while state.0 {
            state = self.change.wait(state);
        }
        state.1 -= 1;
    }

    /// Waits until somebody stands at the gate.
    pub(super) fn wait_for_arrival(&self) {
        let end = Instant::now() + LIMIT;
        let arrived = self.change.wait_while(self.state.lock(), end, |state| state.1 == 0).1;
        assert!(arrived, "nobody came to the gate");
    }
}

#[derive(Default)]
pub(super) struct State {
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

pub(super) struct Recorder {
    memory: MemoryBackend,
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

/// What a test does and sees.
impl Recorder {
    /// On the system's time.
    pub(super) fn system() -> Arc<Self> {
        Self::over(MemoryBackend::new())
    }

    /// On a clock that [`advance`](Self::advance) moves.
    pub(super) fn manual() -> Arc<Self> {
        Self::over(MemoryBackend::manual())
    }

    fn over(memory: MemoryBackend) -> Arc<Self> {
        Arc::new(Self {
            memory,
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

    pub(super) fn script(&self, what: &'static str, scripts: impl IntoIterator<Item = Script>) {
        self.state.lock().scripts.entry(what).or_default().extend(scripts);
    }

    pub(super) fn advance(&self, by: Duration) {
        self.memory.advance(by);
    }

    pub(super) fn now(&self) -> Moment {
        self.clock().now()
    }

    /// Somebody else takes the key, for longer than any test.
    pub(super) fn occupy(&self, key: &str) {
        assert!(self.memory.contend(key).unwrap().acquired().is_some(), "the key is free");
    }

    pub(super) fn remove(&self, key: &str) {
        self.memory.remove(key).unwrap();
    }

    /// The key's live lease.
    pub(super) fn row(&self, key: &str) -> Option<LockInfoRaw> {
        self.memory.lookup_raw(Lookup::Key(key), &CancelToken::never()).unwrap()
    }

    pub(super) fn is_free(&self, key: &str) -> bool {
        self.row(key).is_none()
    }

    /// When the key's lease ends.
    pub(super) fn expiry(&self, key: &str) -> i64 {
        self.row(key).expect("the key is held").expires_at_ms
    }

    /// How long the key's lease lasts from now on, the tolerance left out.
    pub(super) fn rest(&self, key: &str) -> Option<Duration> {
        let rest = self.row(key)?.expires_at_ms - self.memory.server_time();
        Some(Duration::from_millis(u64::try_from(rest).unwrap_or(0)))
    }

    pub(super) fn count(&self, what: &str) -> usize {
        self.state.lock().log.iter().filter(|entry| **entry == what).count()
    }
}

/// How a call is played.
impl Recorder {
    /// For calls that take no other script.
    fn may_panic(&self, what: &'static str) {
        let script = self.state.lock().scripts.get_mut(what).and_then(VecDeque::pop_front);
        assert!(script.is_none(), "scripted");
    }

    fn note(&self, what: &'static str, deadline: Moment) -> Option<Script> {
        let mut state = self.state.lock();
        state.log.push(what);
        state.deadlines.push((what, deadline));
        state.scripts.get_mut(what).and_then(VecDeque::pop_front)
    }

    /// Has the memory backend `act`, or not, as the script says.
    fn play<T>(
        &self,
        call: Call,
        script: Option<Script>,
        no: T,
        act: impl FnOnce(&MemoryBackend) -> Result<T>,
    ) -> Result<T> {
        let memory = &self.memory;
        let fault = match script {
            None => return act(memory),
            Some(Script::Fail(code)) => Fault::error(code),
            Some(Script::Unknown) => Fault::lost_request(ErrorCode::NetworkTimeout),
            Some(Script::UnknownDone) => Fault::lost_answer(ErrorCode::NetworkTimeout),
            Some(Script::Denied) => {
                return Err(LockError::new(ErrorCode::AuthFailed).with_sqlstate("42501"));
            }
            Some(Script::Conflict) => {
                return Err(LockError::new(ErrorCode::ServiceUnavailable).with_contention());
            }
            Some(Script::Slow(time)) => {
                let answer = act(memory);
                memory.advance(time);
                return answer;
            }
            Some(Script::Late) => {
                memory.advance(Duration::from_secs(5));
                return Err(LockError::new(ErrorCode::NetworkTimeout));
            }
            Some(Script::No) => return Ok(no),
            Some(Script::Panic) => panic!("scripted"),
        };
        memory.fail_next(call, fault);
        act(memory)
    }
}

struct RecordedWatch(Arc<AtomicU64>);

impl Watch for RecordedWatch {
    fn is_listening(&self) -> bool {
        true
    }
}

impl Drop for RecordedWatch {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Deadlines are recorded, and what comes late is done.
impl LockBackend for Recorder {
    fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult> {
        let lock_id = LockId::generate()?;
        self.attempt(&Attempt::new(key, lock_id.as_str(), ttl, Moment::NEVER), cancel)
    }

    fn attempt(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<AcquireResult> {
        self.grant(attempt, cancel).map(AcquireResult::from)
    }

    fn grant(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        cancel.check()?;
        let script = self.note("attempt", attempt.deadline);
        self.attempt_gate.pass();
        let attempt = Attempt { deadline: Moment::NEVER, ..*attempt };
        self.play(Call::Acquire, script, None, |memory| memory.grant(&attempt, &CancelToken::never()))
    }

    fn holder(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<Option<Holder>> {
        cancel.check()?;
        let script = self.note("holder", deadline);
        self.play(Call::Holder, script, Some(Holder::default()), |memory| {
            memory.holder(key, Moment::NEVER, &CancelToken::never())
        })
    }

    fn watch(&self, key: &str, heard: OnHeard) -> Option<Box<dyn Watch>> {
        let mut state = self.state.lock();
        state.log.push("watch");
        if state.scripts.get_mut("watch").and_then(VecDeque::pop_front).is_some() {
            return None;
        }
        state.watching.push((key.to_owned(), heard));
        Some(Box::new(RecordedWatch(Arc::clone(&self.watches_over))))
    }

    fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool> {
        self.may_panic("read");
        self.memory.is_locked(key, cancel)
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
        let answer = self.play(Call::Release, script, ReleaseOutcome::NotHeld(None), |memory| {
            memory.release_by(lock_id, Moment::NEVER)
        });
        if answer.is_ok() {
            let mut state = self.state.lock();
            state.released.push(lock_id.to_owned());
            state.released_on.push(std::thread::current().id());
        }
        answer
    }

    fn extend(&self, id: &str, ttl: Duration, _: &CancelToken) -> Result<ExtendOutcome> {
        let script = self.note("extend", Moment::NEVER);
        self.play(Call::Extend, script, ExtendOutcome::NotHeld(None), |memory| {
            memory.extend(id, ttl, &CancelToken::never())
        })
    }

    fn prolong(&self, lease: &Renewal<'_>, deadline: Moment) -> Result<RenewOutcome> {
        let script = self.note("extend", deadline);
        self.play(Call::Extend, script, RenewOutcome::Busy, |memory| memory.prolong(lease, Moment::NEVER))
    }

    fn renew(&self, leases: &[Renewal<'_>], deadline: Moment) -> Vec<Result<RenewOutcome>> {
        let script = self.note("renew", deadline);
        self.state.lock().batches.push(leases.len());
        self.renew_gate.pass();
        let busy = leases.iter().map(|_| Ok(RenewOutcome::Busy)).collect();
        let answer = self.play(Call::Renew, script, busy, |memory| Ok(memory.renew(leases, Moment::NEVER)));
        answer.unwrap_or_else(|error| {
            let same = || LockError::new(error.code());
            let copy = || error.sqlstate().map_or_else(same, |state| same().with_sqlstate(state));
            leases.iter().map(|_| Err(copy())).collect()
        })
    }

    fn reserve_renewals(&self, _: Moment, _: &CancelToken) -> Result<()> {
        if *self.refuse_reserve.lock() {
            return Err(LockError::new(ErrorCode::InvalidArgument).with_message("no"));
        }
        self.reserved.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>> {
        self.may_panic("read");
        self.memory.lookup(what, cancel)
    }

    fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoRaw>> {
        self.may_panic("read");
        self.memory.lookup_raw(what, cancel)
    }

    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }

    fn clock(&self) -> Clock {
        self.memory.clock()
    }

    fn close(&self) {
        self.state.lock().log.push("close");
        self.memory.close();
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        assert!(tokio::runtime::Handle::try_current().is_err(), "dropped inside an async runtime");
        if let Some(slot) = self.dropped.lock().take() {
            *slot.lock() = Some(std::thread::current().name().unwrap_or("unnamed").to_owned());
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
