//! The same mutex and condition variable for the crate's own tests, where a test may order its threads' turns.
//!
//! A thread that [`play`] has started, and every thread that it starts, runs only when it is its turn; all others stand
//! still. Turns change where a mutex is taken or left, where somebody waits, and where somebody notifies. Which thread is
//! next is drawn from a seed, so that a schedule that fails can be played again.
//!
//! Time stands still, too: no wait ends by its limit. A run in which every thread waits has failed, since whoever should
//! have notified has not. What is to happen as time passes is a thread's that moves the clock of the backend in memory.
//!
//! Elsewhere all of this is the system's own.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::{self, Arc, PoisonError};
use std::thread::{self, Builder, Thread};
use std::time::{Duration, Instant};

use super::system;

thread_local! {
    /// The schedule of this thread, and its number in it.
    static PLACE: RefCell<Option<(Arc<Schedule>, usize)>> = const { RefCell::new(None) };
}

/// A run takes no more turns than this.
const MOST_TURNS: u64 = 200_000;

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(system::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(system::Mutex::new(value))
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        let Some((schedule, me)) = place() else {
            return MutexGuard { guard: Some(self.0.lock()), of: self };
        };
        loop {
            schedule.turn(me, Status::Ready);
            if let Some(guard) = self.0.try_lock() {
                return MutexGuard { guard: Some(guard), of: self };
            }
        }
    }
}

pub(crate) struct MutexGuard<'a, T> {
    guard: Option<system::MutexGuard<'a, T>>,
    of: &'a Mutex<T>,
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.guard.as_ref().expect("it is there until the drop")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("it is there until the drop")
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        let held = self.guard.take().is_some();
        if let Some((schedule, me)) = place().filter(|_| held) {
            schedule.turn(me, Status::Ready);
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Condvar {
    system: system::Condvar,
    /// An address of its own.
    _place: u8,
}

impl Condvar {
    pub(crate) const fn new() -> Self {
        Self { system: system::Condvar::new(), _place: 0 }
    }

    #[track_caller]
    pub(crate) fn notify_all(&self) {
        self.system.notify_all();
        if let Some((schedule, me)) = place() {
            schedule.notify(self.address(), Location::caller());
            schedule.turn(me, Status::Ready);
        }
    }

    #[track_caller]
    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.wait_here(guard, None)
    }

    #[track_caller]
    pub(crate) fn wait_for<'a, T>(&self, guard: MutexGuard<'a, T>, limit: Duration) -> MutexGuard<'a, T> {
        self.wait_here(guard, Some(limit))
    }

    #[track_caller]
    pub(crate) fn wait_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        end: Instant,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> (MutexGuard<'a, T>, bool) {
        if place().is_none() {
            let of = guard.of;
            let inner = guard.guard.take().expect("it is there until the drop");
            let (inner, ceased) = self.system.wait_while(inner, end, condition);
            return (MutexGuard { guard: Some(inner), of }, ceased);
        }
        loop {
            if !condition(&mut guard) {
                return (guard, true);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return (guard, false);
            }
            guard = self.wait_here(guard, Some(left));
        }
    }

    #[track_caller]
    fn wait_here<'a, T>(&self, mut guard: MutexGuard<'a, T>, limit: Option<Duration>) -> MutexGuard<'a, T> {
        let of = guard.of;
        let inner = guard.guard.take().expect("it is there until the drop");
        let Some((schedule, me)) = place() else {
            let inner = match limit {
                None => self.system.wait(inner),
                Some(limit) => self.system.wait_for(inner, limit),
            };
            return MutexGuard { guard: Some(inner), of };
        };
        drop(inner);
        schedule.turn(me, Status::Waiting { on: self.address(), at: Location::caller() });
        of.lock()
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

/// A thread that can be waited for: one of a schedule only in its turn.
pub(crate) struct JoinHandle<T> {
    thread: thread::JoinHandle<T>,
    place: Option<(Arc<Schedule>, usize)>,
}

impl<T> JoinHandle<T> {
    pub(crate) fn thread(&self) -> &Thread {
        self.thread.thread()
    }

    pub(crate) fn join(self) -> thread::Result<T> {
        if let (Some((schedule, me)), Some((_, number))) = (place(), &self.place) {
            schedule.turn(me, Status::Joining(*number));
        }
        self.thread.join()
    }
}

/// As the builder does; in a schedule, where this thread is in one.
pub(crate) fn spawn<T: Send + 'static>(
    builder: Builder,
    call: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let Some((schedule, me)) = place() else {
        return Ok(JoinHandle { thread: builder.spawn(call)?, place: None });
    };
    let number = schedule.add();
    let there = Arc::clone(&schedule);
    let thread = builder.spawn(move || there.run(number, call))?;
    schedule.turn(me, Status::Ready);
    Ok(JoinHandle { thread, place: Some((schedule, number)) })
}

/// A thread of a scenario.
pub(crate) fn go<T: Send + 'static>(name: &str, call: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    spawn(Builder::new().name(name.to_owned()), call).expect("the system has threads")
}

/// Stands still until all others wait.
pub(crate) fn until_all_wait() {
    let (schedule, me) = place().expect("only within a scenario");
    schedule.turn(me, Status::Last);
}

/// Plays the scenario in so many schedules, each with another seed, up to the first that fails: where a thread panics, or
/// all wait in vain. The notifications from one place may be left out; `places` are those that there are.
pub(crate) fn play(
    seeds: Range<u64>,
    scenario: fn(),
    left_out: Option<&str>,
    places: &mut BTreeSet<String>,
) -> Result<(), String> {
    for seed in seeds {
        let schedule = Arc::new(Schedule::new(seed, left_out));
        let number = schedule.add();
        let there = Arc::clone(&schedule);
        thread::spawn(move || there.run(number, scenario));
        let mut state = schedule.state();
        while state.ended.is_none() {
            state = schedule.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        places.extend(std::mem::take(&mut state.notified));
        if let Some(Err(why)) = &state.ended {
            return Err(format!("seed {seed}: {why}"));
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug)]
enum Status {
    Ready,
    /// Ready as soon as nobody else is.
    Last,
    Waiting {
        on: usize,
        at: &'static Location<'static>,
    },
    Joining(usize),
    Ended,
}

struct Schedule {
    state: sync::Mutex<State>,
    changed: sync::Condvar,
}

struct State {
    threads: Vec<Status>,
    /// Whose turn it is.
    current: usize,
    random: u64,
    /// Who goes on as long as it can, and is overtaken now and then: schedules of few changes. Empty: any thread at
    /// each turn.
    order: Vec<u64>,
    turns: u64,
    /// Where somebody has notified, and where that does not count.
    notified: BTreeSet<String>,
    left_out: Option<String>,
    ended: Option<Result<(), String>>,
}

impl Schedule {
    fn new(seed: u64, left_out: Option<&str>) -> Self {
        let random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let state = State {
            threads: Vec::new(),
            current: 0,
            random,
            order: Vec::new(),
            turns: 0,
            notified: BTreeSet::new(),
            left_out: left_out.map(str::to_owned),
            ended: None,
        };
        Self { state: sync::Mutex::new(state), changed: sync::Condvar::new() }
    }

    fn state(&self) -> sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self) -> usize {
        let mut state = self.state();
        let rank = state.draw();
        state.threads.push(Status::Ready);
        if state.random.is_multiple_of(2) || !state.order.is_empty() {
            let all = state.threads.len();
            state.order.resize(all, rank);
        }
        state.threads.len() - 1
    }

    /// A whole thread.
    fn run<T>(self: &Arc<Self>, me: usize, call: impl FnOnce() -> T) -> T {
        PLACE.with(|place| *place.borrow_mut() = Some((Arc::clone(self), me)));
        self.wait_for_turn(me);
        let result = catch_unwind(AssertUnwindSafe(call));
        PLACE.with(|place| place.borrow_mut().take());
        match result {
            Ok(value) => {
                self.leave(me);
                value
            }
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                self.state().ended = Some(Err(format!("a thread panicked: {}", text.unwrap_or_default())));
                self.changed.notify_all();
                std::panic::resume_unwind(panic)
            }
        }
    }

    /// Gives the turn to somebody, and waits for the next one.
    fn turn(&self, me: usize, status: Status) {
        {
            let mut state = self.state();
            state.threads[me] = status;
            state.choose();
        }
        self.changed.notify_all();
        self.wait_for_turn(me);
    }

    fn leave(&self, me: usize) {
        let mut state = self.state();
        state.threads[me] = Status::Ended;
        state.choose();
        drop(state);
        self.changed.notify_all();
    }

    /// In a run that has failed nobody has a turn any more: its threads stay where they are.
    fn wait_for_turn(&self, me: usize) {
        let mut state = self.state();
        while state.current != me || state.ended.is_some() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn notify(&self, address: usize, at: &Location<'_>) {
        let mut state = self.state();
        let place = format!("{}:{}", at.file(), at.line());
        let counts = state.left_out.as_ref() != Some(&place);
        state.notified.insert(place);
        for status in state.threads.iter_mut().filter(|_| counts) {
            if matches!(status, Status::Waiting { on, .. } if *on == address) {
                *status = Status::Ready;
            }
        }
    }
}

impl State {
    fn draw(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 11
    }

    fn choose(&mut self) {
        self.turns += 1;
        for n in 0..self.threads.len() {
            if matches!(self.threads[n], Status::Joining(other) if matches!(self.threads[other], Status::Ended))
            {
                self.threads[n] = Status::Ready;
            }
        }
        let mut ready = self.numbers(|status| matches!(status, Status::Ready));
        if ready.is_empty() {
            ready = self.numbers(|status| matches!(status, Status::Last));
        }
        if self.turns > MOST_TURNS {
            self.ended = Some(Err(format!("no end after {MOST_TURNS} turns:{}", self.shown())));
        } else if !ready.is_empty() {
            self.current = self.pick(&ready);
            self.threads[self.current] = Status::Ready;
        } else if self.numbers(|status| !matches!(status, Status::Ended)).is_empty() {
            self.ended = Some(Ok(()));
        } else {
            self.ended = Some(Err(format!("all threads wait, and nobody notifies:{}", self.shown())));
        }
    }

    fn pick(&mut self, ready: &[usize]) -> usize {
        let drawn = self.draw();
        if self.order.len() < self.threads.len() {
            return ready[usize::try_from(drawn).unwrap_or(0) % ready.len()];
        }
        let first = ready.iter().copied().max_by_key(|n| self.order[*n]).unwrap_or(0);
        // A change of the order, every thirty turns or so.
        if drawn.is_multiple_of(32) {
            self.order[first] = self.draw();
        }
        first
    }

    /// What each thread does, and where.
    fn shown(&self) -> String {
        let show = |(n, status): (usize, &Status)| match status {
            Status::Waiting { at, .. } => format!("\n  thread {n} waits at {at}"),
            status => format!("\n  thread {n}: {status:?}"),
        };
        self.threads.iter().enumerate().map(show).collect()
    }

    fn numbers(&self, which: impl Fn(&Status) -> bool) -> Vec<usize> {
        (0..self.threads.len()).filter(|n| which(&self.threads[*n])).collect()
    }
}

/// Of this thread; none outside of a schedule, and in its last moments.
fn place() -> Option<(Arc<Schedule>, usize)> {
    PLACE.try_with(|place| place.borrow().clone()).ok().flatten()
}
