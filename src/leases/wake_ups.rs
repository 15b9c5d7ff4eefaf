//! Wake-ups between processes: a release notifies those who wait for the key elsewhere, if there are any.
//!
//! A client with a waiter that has waited for a while *listens*: on one connection of its own it does
//! `LISTEN` once, and holds a **shared** advisory lock on the key's number, in a class of its own,
//! which says no more than "a waiter listens for this key". A release tries the same lock
//! **exclusively**, in the statement that deletes the row: if it gets it, no one listens and nothing
//! is sent (a notification has all such commits of the server wait in line, so it has its price); if not, it notifies
//! (<https://www.postgresql.org/docs/current/sql-notify.html>).
//!
//! 1. Latency, never correctness: with the listener dead, mute or never opened, everything works as
//!    without it, by looking.
//! 2. Neither side waits for the other: both *try*. A listener that is refused has met a release under
//!    way, and tries again.
//! 3. No release falls between: a release whose try came before the registration keeps its lock
//!    until its transaction has ended, so a look after the registration sees the key free; one whose
//!    try comes after it notifies. Therefore a watcher is told [`Heard::Listening`] when its key is
//!    registered, and looks.
//! 4. A notification carries a number, never a key. Two keys with one number, and a process that is
//!    gone or stopped and is still registered, cost needless wake-ups.
//! 5. Before anything is taken or listened for, two sessions must have shown that they keep to their
//!    server processes: behind a pooler that shares sessions, both would stay on a server process that is not theirs. Then
//!    the one must hear the other's notification. Where that fails, waiters only poll.
//! 6. The thread opens, registers and listens; it alone uses the connection. It ends when there was no
//!    watcher for [`IDLE`], or with the client: the token that says so cuts the connection, whatever
//!    the server does. (A Unix socket cannot be cut: there it looks after each [`SLICE`].)
//! 7. No mutex is held while the server is asked or a watcher is called.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::{Heard, OnHeard, Watch};
use crate::cancel::CancelToken;
use crate::error::Result;
use crate::leases::listener::{ListenTarget, Listener, cannot_work_here};
use crate::model::time::deadline_after;
use crate::pg::connect::Connector;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::threads::spawn;
use crate::waiting::Delays;

/// The most keys that one client listens for: each takes an entry in the server's table of locks.
const MAX_KEYS: usize = 256;

/// How long a key stays registered after its last watcher has gone: the next is often there already.
const LINGER: Duration = Duration::from_millis(250);

/// How long the connection is kept while nobody watches anything.
const IDLE: Duration = Duration::from_secs(5);

/// How long the thread listens before it looks what else there is to do.
const SLICE: Duration = Duration::from_millis(50);

/// The same after a key was refused: a release that is under way is over soon. Doubled each time, for it
/// may be another program's lock, which stays.
const AFTER_REFUSAL: Delays = Delays::doubling(Duration::from_millis(2), SLICE);

/// How long a failure keeps the thread from the next attempt.
const RETRY: Delays = Delays::doubling(Duration::from_secs(1), Duration::from_secs(60));

/// The same where notifications cannot work: a pooler, a standby, a server without them.
const RETRY_ELSEWHERE: Duration = Duration::from_secs(600);

/// How long closing waits for the thread, which has little to wait for then: a slice and the end of its session.
const CLOSING: Duration = Duration::from_secs(1);

/// The watches of one client. Dropping it ends them.
pub(crate) struct WakeUps(Arc<Shared>);

struct Shared {
    target: ListenTarget,
    process: u32,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    keys: HashMap<Arc<str>, Entry>,
    next: u64,
    watchers: usize,
    /// Since when there is no watcher.
    idle_since: Option<Instant>,
    running: bool,
    retry_at: Option<Instant>,
}

#[derive(Default)]
struct Entry {
    watchers: Vec<(u64, OnHeard)>,
    /// The key's number, once it is registered.
    number: Option<i32>,
    idle_since: Option<Instant>,
}

/// A watcher's interest in one key. Dropping it ends that.
struct Interest {
    shared: Arc<Shared>,
    key: Arc<str>,
    id: u64,
}

/// What the thread is to do next.
struct Work {
    register: Vec<Arc<str>>,
    unregister: Vec<i32>,
}

impl WakeUps {
    pub(crate) fn new(connector: Connector, operation_timeout: Duration) -> Self {
        Self(Arc::new(Shared {
            target: ListenTarget { connector, limit: operation_timeout, over: CancelToken::new() },
            process: std::process::id(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// Watches the key that is stored under this name. See [`LockBackend::watch`](crate::LockBackend::watch).
    pub(crate) fn watch(&self, storage_key: &str, heard: &OnHeard) -> Option<Box<dyn Watch>> {
        let shared = &self.0;
        // After a fork the thread is the parent's.
        if shared.process != std::process::id() || shared.target.over.is_cancelled() {
            return None;
        }
        let key: Arc<str> = storage_key.into();
        let mut state = shared.state();
        let resting = state.retry_at.is_some_and(|at| Instant::now() < at);
        let full = state.keys.len() >= MAX_KEYS && !state.keys.contains_key(&key);
        if full || (resting && !state.running) {
            return None;
        }
        let id = state.next;
        state.next += 1;
        state.watchers += 1;
        state.idle_since = None;
        let entry = state.keys.entry(Arc::clone(&key)).or_default();
        entry.watchers.push((id, Arc::clone(heard)));
        entry.idle_since = None;
        let listening = entry.number.is_some();
        let start = !std::mem::replace(&mut state.running, true);
        drop(state);
        let interest = Interest { shared: Arc::clone(shared), key, id };
        if start {
            let there = Arc::clone(shared);
            if spawn("syncguard-wake", move || run(&there)).is_err() {
                shared.state().running = false;
                return None;
            }
        }
        if listening {
            heard(Heard::Listening);
        }
        Some(Box::new(interest))
    }

    /// Ends the thread and its connection, and waits until that is done, but not for long.
    pub(crate) fn close(&self) {
        self.end();
        let end = deadline_after(CLOSING);
        let mut state = self.0.state();
        while state.running {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                log::debug!("the thread that listens for releases is still busy");
                return;
            }
            state = self.0.changed.wait_for(state, left);
        }
    }

    fn end(&self) {
        if self.0.process == std::process::id() {
            self.0.target.over.cancel();
            // Locked and unlocked: the thread is either before its check or in its wait.
            drop(self.0.state());
            self.0.changed.notify_all();
        }
    }
}

impl Drop for WakeUps {
    fn drop(&mut self) {
        self.end();
    }
}

impl Watch for Interest {
    fn is_listening(&self) -> bool {
        self.shared.state().keys.get(&self.key).is_some_and(|entry| entry.number.is_some())
    }
}

impl Drop for Interest {
    /// Only the thread unregisters, a moment later.
    fn drop(&mut self) {
        let mut state = self.shared.state();
        let now = Instant::now();
        if let Some(entry) = state.keys.get_mut(&self.key) {
            entry.watchers.retain(|(id, _)| *id != self.id);
            if entry.watchers.is_empty() {
                entry.idle_since = Some(now);
            }
        }
        state.watchers -= 1;
        if state.watchers > 0 {
            return;
        }
        state.idle_since = Some(now);
        if !state.running {
            state.keys.clear();
        }
        drop(state);
        // A thread that waits for the next attempt has nothing to wait for.
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Waits until there is a reason to connect. False if the thread is not needed any more.
    fn wait_until_wanted(&self) -> bool {
        let mut state = self.state();
        loop {
            state.keys.retain(|_, entry| !entry.watchers.is_empty());
            if state.watchers == 0 || self.target.over.is_cancelled() {
                state.running = false;
                drop(state);
                self.changed.notify_all();
                return false;
            }
            let rest =
                state.retry_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()));
            if rest.is_zero() {
                return true;
            }
            state = self.changed.wait_for(state, rest.min(IDLE));
        }
    }

    /// Notes that nothing is registered any more, and when the next attempt may be made.
    fn rest(&self, wait: Option<Duration>) {
        let mut state = self.state();
        state.retry_at = wait.map(deadline_after);
        for entry in state.keys.values_mut() {
            entry.number = None;
        }
    }

    /// What is to be registered, and what no longer; `None` when the connection is not needed any more.
    fn work(&self) -> Option<Work> {
        let mut state = self.state();
        let now = Instant::now();
        let idle = state.idle_since.is_some_and(|since| now.saturating_duration_since(since) >= IDLE);
        if idle || self.target.over.is_cancelled() {
            return None;
        }
        let mut unregister = Vec::new();
        state.keys.retain(|_, entry| {
            let gone = entry.idle_since.is_some_and(|since| now.saturating_duration_since(since) >= LINGER);
            if gone {
                unregister.extend(entry.number);
            }
            !gone
        });
        let unregistered = state.keys.iter().filter(|(_, entry)| entry.number.is_none());
        Some(Work { register: unregistered.map(|(key, _)| Arc::clone(key)).collect(), unregister })
    }

    /// Wakes the watchers of what was registered. Whether all of it was.
    fn registered(&self, keys: &[Arc<str>], numbers: &[Option<i32>]) -> bool {
        let mut watchers = Vec::new();
        {
            let mut state = self.state();
            for (key, number) in keys.iter().zip(numbers) {
                // Only the thread takes entries out: what was granted is still in it.
                if let (Some(entry), Some(_)) = (state.keys.get_mut(key), number) {
                    entry.number = *number;
                    watchers.extend(entry.watchers.iter().map(|(_, heard)| Arc::clone(heard)));
                }
            }
        }
        watchers.iter().for_each(|heard| heard(Heard::Listening));
        numbers.iter().all(Option::is_some)
    }

    /// Wakes the watchers of every key with one of these numbers.
    fn freed(&self, numbers: &HashSet<i32>) {
        let watchers: Vec<OnHeard> = {
            let state = self.state();
            let heard = |entry: &&Entry| entry.number.is_some_and(|number| numbers.contains(&number));
            let all = state.keys.values().filter(heard).flat_map(|entry| &entry.watchers);
            all.map(|(_, heard)| Arc::clone(heard)).collect()
        };
        watchers.iter().for_each(|heard| heard(Heard::Freed));
    }
}

/// Should a watcher panic, the next one starts a new thread.
struct Ended<'a>(&'a Shared);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.rest(Some(RETRY.longest));
            self.0.state().running = false;
            self.0.changed.notify_all();
        }
    }
}

fn run(shared: &Shared) {
    let _ended = Ended(shared);
    let mut failures = 0;
    while shared.wait_until_wanted() {
        let outcome = Listener::open(&shared.target).and_then(|listener| {
            failures = 0;
            serve(shared, listener)
        });
        let rest = match outcome {
            Ok(()) => None,
            Err(error) if cannot_work_here(&error) => {
                log::debug!("releases in other processes are not heard here: {}", error.chain());
                Some(RETRY_ELSEWHERE)
            }
            Err(error) => {
                log::debug!("releases in other processes are not heard for now: {}", error.chain());
                failures += 1;
                Some(RETRY.before(failures))
            }
        };
        shared.rest(rest);
    }
}

/// Registers, listens and wakes watchers, until no one needs it any more.
fn serve(shared: &Shared, mut listener: Listener<'_>) -> Result<()> {
    let mut refusals = 0;
    while let Some(work) = shared.work() {
        let mut slice = SLICE;
        if !work.unregister.is_empty() {
            listener.unregister(&work.unregister)?;
        }
        if !work.register.is_empty() {
            let numbers = listener.register(&work.register)?;
            if shared.registered(&work.register, &numbers) {
                refusals = 0;
            } else {
                refusals += 1;
                slice = AFTER_REFUSAL.before(refusals);
            }
        }
        let numbers = listener.listen(slice)?;
        shared.freed(&numbers);
    }
    // The session ends with the connection, and what was registered ends with the session.
    listener.leave();
    Ok(())
}
