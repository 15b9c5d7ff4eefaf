//! Cancellation: one flag that many threads may watch, wait for, or hang a wake-up on.
//!
//! Invariants:
//! 1. A token fires once and stays fired; its children fire with it, it never fires with them.
//! 2. A hook runs at most once, on the thread that fires the token, with no lock held; a hook that
//!    is added to a fired token runs at once, on the adding thread.
//! 3. A dropped [`Subscription`] never runs afterwards, unless the token had fired by then: hooks run one
//!    after the other, and it may yet have its turn. [`Subscription::remove`] tells.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::error::{LockError, Result};

/// A flag that ends waits: clone it, share it between threads, fire it once.
///
/// Firing wakes a thread that sleeps between two attempts within milliseconds, and one that is
/// blocked in the server well within half a second; the call then fails with
/// [`Aborted`](crate::ErrorCode::Aborted).
///
/// ```
/// use std::time::Duration;
/// use syncguard::CancelToken;
///
/// let shutdown = CancelToken::new();
/// let request = shutdown.child();
/// request.cancel();
/// assert!(request.is_cancelled() && !shutdown.is_cancelled());
/// assert!(request.wait_timeout(Duration::from_secs(5)));
/// ```
#[derive(Clone, Default)]
pub struct CancelToken(Option<Arc<Inner>>);

#[derive(Default)]
struct Inner {
    fired: AtomicBool,
    hooks: Mutex<Hooks>,
    wake: Condvar,
    /// Keeps the hook at the parent alive as long as the child, and the parent itself: it may be a
    /// child that nobody else holds any more, and must still hand its own parent's signal on.
    parent: Mutex<Option<(Subscription, CancelToken)>>,
}

#[derive(Default)]
struct Hooks {
    next: u64,
    list: HashMap<u64, Box<dyn FnOnce() + Send>>,
}

impl CancelToken {
    /// A token that has not fired.
    #[must_use]
    pub fn new() -> Self {
        Self(Some(Arc::default()))
    }

    /// A token that nobody can fire: "no cancellation". It costs nothing.
    #[must_use]
    pub const fn never() -> Self {
        Self(None)
    }

    /// Fires the token. Idempotent.
    pub fn cancel(&self) {
        let Some(inner) = &self.0 else { return };
        let hooks = {
            let mut hooks = inner.hooks();
            if inner.fired.swap(true, Ordering::SeqCst) {
                return;
            }
            inner.wake.notify_all();
            std::mem::take(&mut hooks.list)
        };
        for hook in hooks.into_values() {
            hook();
        }
    }

    /// Whether the token has fired.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|inner| inner.fired.load(Ordering::SeqCst))
    }

    /// Waits until the token fires, at most this long. Returns whether it has fired.
    ///
    /// # Blocking
    ///
    /// At most `timeout`.
    ///
    /// # Cancellation
    ///
    /// By firing this token.
    #[must_use = "false means that the time is over and the token has not fired"]
    pub fn wait_timeout(&self, timeout: Duration) -> bool {
        let Some(inner) = &self.0 else {
            std::thread::sleep(timeout);
            return false;
        };
        let end = Instant::now().checked_add(timeout);
        let mut hooks = inner.hooks();
        while !inner.fired.load(Ordering::SeqCst) {
            let rest = match end {
                Some(end) => end.saturating_duration_since(Instant::now()),
                None => Duration::from_secs(3600),
            };
            if rest.is_zero() {
                return false;
            }
            hooks = inner.wake.wait_timeout(hooks, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// A token that fires with this one, and can also be fired alone.
    #[must_use]
    pub fn child(&self) -> Self {
        let child = Self::new();
        if let Some(inner) = &child.0 {
            let weak = Arc::downgrade(inner);
            let subscription = self.subscribe(move || {
                if let Some(inner) = weak.upgrade() {
                    Self(Some(inner)).cancel();
                }
            });
            *inner.parent.lock().unwrap_or_else(PoisonError::into_inner) =
                subscription.map(|subscription| (subscription, self.clone()));
        }
        child
    }

    /// Whether this is [`CancelToken::never`]: nothing needs to be watched.
    #[must_use]
    pub fn is_never(&self) -> bool {
        self.0.is_none()
    }

    /// [`Aborted`](crate::ErrorCode::Aborted) if the token has fired.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(LockError::aborted()) } else { Ok(()) }
    }

    /// Has `hook` run when the token fires, on the firing thread: it must be short and must not
    /// block. `None` for a token that never fires.
    pub(crate) fn subscribe(&self, hook: impl FnOnce() + Send + 'static) -> Option<Subscription> {
        let inner = self.0.as_ref()?;
        let id = {
            let mut hooks = inner.hooks();
            if inner.fired.load(Ordering::SeqCst) {
                None
            } else {
                hooks.next += 1;
                let id = hooks.next;
                hooks.list.insert(id, Box::new(hook));
                return Some(Subscription { token: Arc::downgrade(inner), id });
            }
        };
        hook();
        id
    }
}

impl Inner {
    fn hooks(&self) -> MutexGuard<'_, Hooks> {
        self.hooks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelToken").field("cancelled", &self.is_cancelled()).finish()
    }
}

/// A hook at a token; dropping it takes the hook away.
#[must_use = "the hook is removed when this is dropped"]
pub(crate) struct Subscription {
    token: Weak<Inner>,
    id: u64,
}

impl Subscription {
    /// Takes the hook away. Whether that was in time: false if it has run or will run.
    pub(crate) fn remove(self) -> bool {
        // Without a token nobody can have fired it.
        self.token.upgrade().is_none_or(|inner| self.take_from(&inner))
    }

    fn take_from(&self, inner: &Inner) -> bool {
        // The hook is dropped after the lock: its captures are foreign code.
        let hook = inner.hooks().list.remove(&self.id);
        hook.is_some()
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(inner) = self.token.upgrade() {
            self.take_from(&inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::thread;

    #[test]
    fn a_waiter_is_woken_by_cancel() {
        let token = CancelToken::new();
        let waiter = token.clone();
        let thread = thread::spawn(move || waiter.wait_timeout(Duration::from_secs(60)));
        token.cancel();
        assert!(thread.join().unwrap());
    }

    #[test]
    fn a_wait_without_cancel_ends_with_false() {
        assert!(!CancelToken::new().wait_timeout(Duration::from_millis(1)));
        assert!(!CancelToken::never().wait_timeout(Duration::from_millis(1)));
    }

    #[test]
    fn children_fire_with_theirparent_and_not_the_other_way_round() {
        let parent = CancelToken::new();
        let (first, second) = (parent.child(), parent.child());
        let grandchild = first.child();
        first.cancel();
        assert!(grandchild.is_cancelled() && !second.is_cancelled() && !parent.is_cancelled());
        parent.cancel();
        assert!(second.is_cancelled());
        assert!(parent.child().is_cancelled(), "a child of a fired token is born fired");
    }

    #[test]
    fn a_grandchild_outlives_the_child_between() {
        let root = CancelToken::new();
        let grandchild = root.child().child();
        root.cancel();
        assert!(grandchild.is_cancelled());
    }

    #[test]
    fn a_dropped_child_leaves_nothing_at_itsparent() {
        let parent = CancelToken::new();
        for _ in 0..100 {
            drop(parent.child());
        }
        assert!(parent.0.as_ref().unwrap().hooks().list.is_empty());
    }

    #[test]
    fn a_hook_runs_once_and_not_after_its_subscription_is_dropped() {
        let count = Arc::new(AtomicU32::new(0));
        let token = CancelToken::new();
        let hook = |count: &Arc<AtomicU32>| {
            let count = Arc::clone(count);
            move || {
                count.fetch_add(1, Ordering::SeqCst);
            }
        };
        let kept = token.subscribe(hook(&count));
        drop(token.subscribe(hook(&count)));
        token.cancel();
        token.cancel();
        assert_eq!(count.load(Ordering::SeqCst), 1);
        let late = token.subscribe(hook(&count));
        assert_eq!(count.load(Ordering::SeqCst), 2, "a late hook runs at once");
        drop((kept, late));
    }

    #[test]
    fn a_hook_that_will_have_its_turn_cannot_be_taken_away() {
        use std::sync::mpsc::channel;
        let token = CancelToken::new();
        let ((tell, running), (open, gate)) = (channel(), channel());
        let gate = Arc::new(Mutex::new(gate));
        let hook = || {
            let (tell, gate) = (tell.clone(), Arc::clone(&gate));
            move || {
                tell.send(()).unwrap();
                gate.lock().unwrap().recv().unwrap();
            }
        };
        let early = token.subscribe(hook()).unwrap();
        let both = [token.subscribe(hook()).unwrap(), token.subscribe(hook()).unwrap()];
        assert!(early.remove(), "nobody has fired");
        thread::scope(|scope| {
            scope.spawn(|| token.cancel());
            running.recv().unwrap();
            // One runs, the other waits for it.
            assert!(!both.map(Subscription::remove).contains(&true));
            open.send(()).unwrap();
            open.send(()).unwrap();
            running.recv().unwrap();
        });
        let gone = CancelToken::new();
        let left = gone.subscribe(hook()).unwrap();
        drop(gone);
        assert!(left.remove(), "nobody can fire");
    }

    #[test]
    fn a_hook_may_use_its_own_token() {
        let token = CancelToken::new();
        let inside = token.clone();
        let seen = Arc::new(AtomicBool::new(false));
        let result = Arc::clone(&seen);
        let kept = token.subscribe(move || result.store(inside.is_cancelled(), Ordering::SeqCst));
        token.cancel();
        assert!(seen.load(Ordering::SeqCst));
        drop(kept);
    }
}
