//! Cancellation: one flag that many threads may watch, wait for, or hang a wake-up on.
//!
//! Invariants:
//! 1. A token fires once and stays fired; its children fire with it, it never fires with them.
//! 2. A hook runs at most once, on the thread that fires the token, with no mutex held, and after every
//!    descendant has fired; a hook that is added to a fired token runs at once, on the adding thread.
//! 3. A dropped [`Subscription`] never runs afterwards, unless the token had fired by then: hooks run one
//!    after the other, and it may yet have its turn. [`Subscription::remove`] tells.
//! 4. Which token is whose child is known to their [`Graph`], and to nothing else: it has only tokens that
//!    somebody holds and that have not fired. When the last handle of a token goes, its children become
//!    its parents' children, so that no ancestor is kept for them; when a token fires, it and its
//!    descendants leave. Parents are always older than their children, so there is no cycle.
//! 5. Order of the mutexes: a graph's (of two, the one with the lower address first), a token's `graph`, its
//!    `hooks`. `graph` changes only under the mutex of the graph that is left. None is held while hooks run or
//!    are dropped: a handle, not the graph, is the last to let a node go.
//! 6. Nothing here calls itself, so the stack does not grow with the depth of a graph.

mod graph;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{LockError, Result};
use crate::model::time::deadline_after;
use graph::Node;

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
///
/// # Blocking
///
/// [`wait_timeout`](Self::wait_timeout) at most its `timeout`.
///
/// # Cancellation
///
/// Firing the token ends that wait.
#[derive(Clone, Default)]
pub struct CancelToken(Option<Arc<Handle>>);

/// What the clones of a token share: it goes with the last of them.
#[derive(Default)]
struct Handle(Arc<Node>);

impl CancelToken {
    /// A token that has not fired.
    ///
    /// ```
    /// let token = syncguard::CancelToken::new();
    /// assert!(!token.is_cancelled());
    /// ```
    #[must_use]
    pub fn new() -> Self {
        Self(Some(Arc::default()))
    }

    /// A token that nobody can fire: "no cancellation". It costs nothing.
    ///
    /// ```
    /// let token = syncguard::CancelToken::never();
    /// token.cancel();
    /// assert!(!token.is_cancelled());
    /// ```
    #[must_use]
    pub const fn never() -> Self {
        Self(None)
    }

    /// Fires the token. Idempotent.
    ///
    /// ```
    /// let token = syncguard::CancelToken::new();
    /// token.clone().cancel();
    /// assert!(token.is_cancelled());
    /// ```
    pub fn cancel(&self) {
        let Some(handle) = &self.0 else { return };
        if self.is_cancelled() {
            return;
        }
        let hooks = graph::fire(&handle.0);
        for hook in hooks {
            hook();
        }
    }

    /// Whether the token has fired.
    ///
    /// ```
    /// let shutdown = syncguard::CancelToken::new();
    /// while !shutdown.is_cancelled() {
    ///     shutdown.cancel(); // a signal handler would, on another thread
    /// }
    /// ```
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|handle| handle.0.has_fired())
    }

    /// Waits until the token fires, at most this long. Returns whether it has fired.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let token = syncguard::CancelToken::new();
    /// assert!(!token.wait_timeout(Duration::from_millis(1)));
    /// token.cancel();
    /// assert!(token.wait_timeout(Duration::from_secs(60)));
    /// ```
    #[must_use = "false means that the time is over and the token has not fired"]
    pub fn wait_timeout(&self, timeout: Duration) -> bool {
        let Some(handle) = &self.0 else {
            std::thread::sleep(timeout);
            return false;
        };
        let node = &handle.0;
        let end = deadline_after(timeout);
        node.changed.wait_while(node.hooks.lock(), end, |_| !node.has_fired()).1
    }

    /// A token that fires with this one, and can also be fired alone. It does not keep this one in memory: a
    /// chain of children takes only the memory of those that are still held.
    ///
    /// ```
    /// let shutdown = syncguard::CancelToken::new();
    /// let request = shutdown.child();
    /// shutdown.cancel();
    /// assert!(request.is_cancelled());
    /// ```
    #[must_use]
    pub fn child(&self) -> Self {
        Self::of(&[self])
    }

    /// A token that fires with this one and with the other; [`CancelToken::never`] if both are, so
    /// that the backend may take its faster way.
    pub(crate) fn and(&self, other: &Self) -> Self {
        match (&self.0, &other.0) {
            (_, None) => self.clone(),
            (None, _) => other.clone(),
            (Some(one), Some(two)) if Arc::ptr_eq(one, two) => self.clone(),
            _ => Self::of(&[self, other]),
        }
    }

    fn of(parents: &[&Self]) -> Self {
        let child = Arc::new(Node::default());
        let parents: Vec<_> =
            parents.iter().filter_map(|parent| parent.0.as_ref()).map(|handle| &handle.0).collect();
        graph::add(&child, &parents);
        Self(Some(Arc::new(Handle(child))))
    }

    /// Whether this is [`CancelToken::never`]: nothing needs to be watched.
    ///
    /// ```
    /// assert!(syncguard::CancelToken::never().is_never());
    /// ```
    #[must_use]
    pub fn is_never(&self) -> bool {
        self.0.is_none()
    }

    /// [`Aborted`](crate::ErrorCode::Aborted) if the token has fired.
    ///
    /// ```
    /// let token = syncguard::CancelToken::new();
    /// token.check()?;
    /// token.cancel();
    /// assert_eq!(token.check().unwrap_err().code(), syncguard::ErrorCode::Aborted);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(LockError::aborted()) } else { Ok(()) }
    }

    /// Has `hook` run when the token fires, on the firing thread: it must be short and must not
    /// block. `None` for a token that never fires.
    pub(crate) fn subscribe(&self, hook: impl FnOnce() + Send + 'static) -> Option<Subscription> {
        let node = &self.0.as_ref()?.0;
        {
            let mut hooks = node.hooks.lock();
            if !node.has_fired() {
                hooks.next += 1;
                let id = hooks.next;
                hooks.list.insert(id, Box::new(hook));
                return Some(Subscription { node: Arc::clone(node), id });
            }
        }
        hook();
        None
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Nobody has a handle any more to give it a first relative meanwhile.
        let related = self.0.graph.lock().is_some();
        if related {
            graph::remove(&self.0);
        }
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
    node: Arc<Node>,
    id: u64,
}

impl Subscription {
    /// Takes the hook away. Whether that was in time: false if it has run or will run.
    pub(crate) fn remove(self) -> bool {
        self.take()
    }

    fn take(&self) -> bool {
        // The hook is dropped after the mutex is free: its captures are user code.
        let hook = self.node.hooks.lock().list.remove(&self.id);
        hook.is_some()
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.take();
    }
}

#[cfg(test)]
mod tests;
