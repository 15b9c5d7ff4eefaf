//! The queue of this process's threads that wait for one key.
//!
//! 1. First come, first served: only the first of a key's waiters asks the server, so that many waiters
//!    cost no more than one, and nobody starves within a process.
//! 2. A waiter that leaves, for whatever reason, signals the next one: nobody waits for a thread that is
//!    gone.
//! 3. Holders are not in it. A lease that runs out in its holder's hands blocks nobody here.
//! 4. A release in this process signals the first waiter of its key; a signal is never lost.
//! 5. Those who ask to be served in order have a queue of their own, by priority, then by age.

use std::borrow::Borrow;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::Arc;

use crate::model::lock_id::LockId;
use crate::model::time::Moment;
use crate::sync::Mutex;
use crate::waiting::signal::{FREED, LOOK, Signal};

pub(crate) struct WaiterQueue<K>(Mutex<HashMap<K, Waiters>>);

/// Those who wait for one key. Who asks to be served in order has a queue beside that of the others: neither stands in
/// the other's way.
#[derive(Default)]
struct Waiters {
    any: VecDeque<Arc<Signal>>,
    in_order: VecDeque<InOrder>,
}

/// What a place in line is made of.
#[derive(Clone)]
pub(crate) struct Ticket {
    pub(crate) id: LockId,
    pub(crate) priority: i32,
    /// Since when its owner waits.
    pub(crate) since: Moment,
    pub(crate) note: Option<Arc<str>>,
}

struct InOrder {
    ticket: Ticket,
    signal: Arc<Signal>,
    /// Until when whoever was before it has put it in line.
    in_line_until: Option<Moment>,
    /// Tickets of those before it who have left, to be withdrawn once it is in line itself.
    left: Vec<LockId>,
    /// It has taken those for the last time.
    is_leaving: bool,
}

impl Waiters {
    fn is_empty(&self) -> bool {
        self.any.is_empty() && self.in_order.is_empty()
    }

    fn firsts(&self) -> impl Iterator<Item = &Arc<Signal>> {
        self.any.front().into_iter().chain(self.in_order.front().map(|first| &first.signal))
    }

    fn place(&self, signal: &Arc<Signal>) -> Option<usize> {
        self.in_order.iter().position(|other| Arc::ptr_eq(&other.signal, signal))
    }
}

impl<K> Default for WaiterQueue<K> {
    fn default() -> Self {
        Self(Mutex::new(HashMap::new()))
    }
}

impl<K: Eq + Hash + Clone> WaiterQueue<K> {
    /// Takes the last place of the key's queue.
    pub(crate) fn join(self: &Arc<Self>, key: &K) -> QueuePlace<K> {
        let signal = Arc::new(Signal::default());
        self.0.lock().entry(key.clone()).or_default().any.push_back(Arc::clone(&signal));
        QueuePlace { queue: Arc::clone(self), key: key.clone(), signal }
    }

    /// Takes the place among those who are served in order: by priority, then by age.
    pub(crate) fn join_in_order(self: &Arc<Self>, key: &K, ticket: Ticket) -> QueuePlace<K> {
        let signal = Arc::new(Signal::default());
        let rank = |ticket: &Ticket| (-i64::from(ticket.priority), ticket.since);
        let first = {
            let mut keys = self.0.lock();
            let in_order = &mut keys.entry(key.clone()).or_default().in_order;
            let place = in_order.partition_point(|other| rank(&other.ticket) <= rank(&ticket));
            let first = in_order.front().filter(|_| place == 0).map(|first| Arc::clone(&first.signal));
            let new = InOrder {
                ticket,
                signal: Arc::clone(&signal),
                in_line_until: None,
                left: Vec::new(),
                is_leaving: false,
            };
            in_order.insert(place, new);
            first
        };
        if let Some(first) = first {
            // It is the first no more.
            first.notify(LOOK);
        }
        QueuePlace { queue: Arc::clone(self), key: key.clone(), signal }
    }

    /// Tells the first waiters of a key that it was released.
    pub(crate) fn freed<Q>(&self, key: &Q)
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let firsts: [Option<Arc<Signal>>; 2] = match self.0.lock().get(key) {
            None => return,
            Some(waiters) => {
                let mut firsts = waiters.firsts().cloned();
                [firsts.next(), firsts.next()]
            }
        };
        for first in firsts.into_iter().flatten() {
            first.notify(FREED);
        }
    }

    /// Has every waiter look again: the client was closed, or a manual clock was moved.
    pub(crate) fn notify_all(&self) {
        let all: Vec<_> = {
            let keys = self.0.lock();
            let in_order = keys.values().flat_map(|waiters| &waiters.in_order).map(|other| &other.signal);
            keys.values().flat_map(|waiters| &waiters.any).chain(in_order).cloned().collect()
        };
        for signal in all {
            signal.notify(LOOK);
        }
    }

    #[cfg(test)]
    pub(crate) fn waiting<Q>(&self, key: &Q) -> usize
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        self.0.lock().get(key).map_or(0, |waiters| waiters.any.len() + waiters.in_order.len())
    }
}

/// A place in a key's queue, given up when it is dropped.
pub(crate) struct QueuePlace<K: Eq + Hash + Clone> {
    queue: Arc<WaiterQueue<K>>,
    key: K,
    signal: Arc<Signal>,
}

impl<K: Eq + Hash + Clone> QueuePlace<K> {
    /// Whether nobody of this process is before us.
    pub(crate) fn is_first(&self) -> bool {
        let keys = self.queue.0.lock();
        let waiters = keys.get(&self.key);
        waiters.is_some_and(|waiters| waiters.firsts().any(|first| Arc::ptr_eq(first, &self.signal)))
    }

    /// What this waiter sleeps on.
    pub(crate) fn signal(&self) -> &Arc<Signal> {
        &self.signal
    }

    /// Whoever is served after this one.
    pub(crate) fn next(&self) -> Option<Ticket> {
        self.with(|waiters, place| waiters.in_order.get(place + 1).map(|next| next.ticket.clone())).flatten()
    }

    /// Notes that whoever has this ticket was put in line. Whether it still waits.
    pub(crate) fn is_in_line(&self, id: &LockId, until: Option<Moment>) -> bool {
        self.with(|waiters, _| {
            let found = waiters.in_order.iter_mut().find(|other| other.ticket.id == *id);
            found.map(|other| other.in_line_until = other.in_line_until.max(until)).is_some()
        })
        .unwrap_or(false)
    }

    /// Until when this one was put in line, and the tickets that it is to withdraw.
    pub(crate) fn take_in_line(&self) -> (Option<Moment>, Vec<LockId>) {
        let taken = self.with(|waiters, place| {
            let own = waiters.in_order.get_mut(place)?;
            Some((own.in_line_until.take(), std::mem::take(&mut own.left)))
        });
        taken.flatten().unwrap_or_default()
    }

    /// The same for the last time: nobody leaves it more.
    pub(crate) fn leave(&self) -> (Option<Moment>, Vec<LockId>) {
        self.with(|waiters, place| {
            if let Some(own) = waiters.in_order.get_mut(place) {
                own.is_leaving = true;
            }
        });
        self.take_in_line()
    }

    /// Leaves tickets to the first of the others that stays, or gives them back.
    pub(crate) fn leave_tickets(&self, ids: Vec<LockId>) -> Vec<LockId> {
        let mut keys = self.queue.0.lock();
        let heir = keys.get_mut(&self.key).and_then(|waiters| {
            let is_other =
                |other: &&mut InOrder| !other.is_leaving && !Arc::ptr_eq(&other.signal, &self.signal);
            waiters.in_order.iter_mut().find(is_other)
        });
        match heir {
            Some(heir) => {
                heir.left.extend(ids);
                Vec::new()
            }
            None => ids,
        }
    }

    fn with<R>(&self, use_place: impl FnOnce(&mut Waiters, usize) -> R) -> Option<R> {
        let mut keys = self.queue.0.lock();
        let waiters = keys.get_mut(&self.key)?;
        let place = waiters.place(&self.signal)?;
        Some(use_place(waiters, place))
    }
}

impl<K: Eq + Hash + Clone> Drop for QueuePlace<K> {
    fn drop(&mut self) {
        let next = {
            let mut keys = self.queue.0.lock();
            let Some(waiters) = keys.get_mut(&self.key) else { return };
            let next = if let Some(place) = waiters.place(&self.signal) {
                waiters.in_order.remove(place);
                waiters.in_order.front().map(|first| Arc::clone(&first.signal))
            } else {
                if waiters.any.front().is_some_and(|first| Arc::ptr_eq(first, &self.signal)) {
                    waiters.any.pop_front();
                } else {
                    waiters.any.retain(|other| !Arc::ptr_eq(other, &self.signal));
                }
                waiters.any.front().cloned()
            };
            if waiters.is_empty() {
                keys.remove(&self.key);
            }
            next
        };
        if let Some(next) = next {
            next.notify(LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::time::Clock;

    #[test]
    fn places_are_in_order_and_given_up_by_whoever_leaves() {
        let queue = Arc::new(WaiterQueue::default());
        let (first, second, third) = (queue.join(&"k"), queue.join(&"k"), queue.join(&"k"));
        let other = queue.join(&"other");
        assert!(first.is_first() && !second.is_first() && !third.is_first() && other.is_first());
        drop(second);
        assert!(!third.is_first());
        drop(first);
        assert!(third.is_first());
        let clock = Clock::system();
        assert_eq!(third.signal().sleep_until(&clock, clock.now()) & LOOK, LOOK);
        drop((third, other));
        assert!(queue.0.lock().is_empty(), "an empty queue leaves nothing behind");
    }

    #[test]
    fn those_in_order_stand_by_priority_and_age_beside_the_others() {
        let queue = Arc::new(WaiterQueue::default());
        let clock = Clock::system();
        let ticket =
            |priority, since| Ticket { id: LockId::generate().unwrap(), priority, since, note: None };
        let now = clock.now();
        let later = now.after(std::time::Duration::from_secs(1));
        let any = queue.join(&"k");
        let second = queue.join_in_order(&"k", ticket(0, later));
        let first = queue.join_in_order(&"k", ticket(0, now));
        assert_eq!(second.signal().sleep_until(&clock, clock.now()), LOOK, "it is the first no more");
        let urgent = queue.join_in_order(&"k", ticket(1, later));
        assert!(any.is_first() && urgent.is_first() && !first.is_first() && !second.is_first());
        queue.freed(&"k");
        for place in [&any, &urgent] {
            assert_eq!(place.signal().sleep_until(&clock, clock.now()), FREED);
        }
        let next = urgent.next().unwrap();
        assert!(urgent.is_in_line(&next.id, Some(later)) && next.since == now);
        assert_eq!(first.take_in_line().0, Some(later));
        assert!(urgent.leave_tickets(vec![next.id.clone()]).is_empty());
        assert!(first.take_in_line().1.contains(&next.id), "the first of the others has it");
        drop((urgent, first));
        assert!(second.is_first() && second.next().is_none() && !second.is_in_line(&next.id, Some(later)));
        assert_eq!(second.leave_tickets(vec![next.id]).len(), 1, "nobody is left");
        drop((second, any));
        assert!(queue.0.lock().is_empty());
    }

    #[test]
    fn a_release_signals_the_first_waiter_only() {
        let queue = Arc::new(WaiterQueue::default());
        let (first, second) = (queue.join(&"k"), queue.join(&"k"));
        queue.freed(&"k");
        queue.freed(&"other");
        let clock = Clock::system();
        assert_eq!(first.signal().sleep_until(&clock, clock.now()), FREED);
        assert_eq!(second.signal().sleep_until(&clock, clock.now()), 0);
        queue.notify_all();
        for place in [first, second] {
            assert_eq!(place.signal().sleep_until(&clock, clock.now()), LOOK);
        }
    }
}
