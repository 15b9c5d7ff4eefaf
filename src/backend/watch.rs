//! How a backend tells a waiter that a key may be free.

use std::sync::Arc;

/// What a backend says about a key that is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Heard {
    /// From now on releases of the key are noticed. One may have come just before: look once.
    Listening,
    /// The key was released, most likely: try at once.
    Freed,
}

/// Called with what is heard, on a thread of the backend: it must be short and must not wait.
pub type OnHeard = Arc<dyn Fn(Heard) + Send + Sync>;

/// A watch over one key, from [`LockBackend::watch`](crate::LockBackend::watch); it ends when it is dropped.
pub trait Watch: Send + Sync {
    /// Whether releases of the key are noticed, as far as is known, so that looking at it is worth less.
    fn is_listening(&self) -> bool;
}
