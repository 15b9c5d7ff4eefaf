//! How a backend tells a waiter that a key may be free.

use std::sync::Arc;

/// What a backend says about a key that is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Heard {
    /// From now on releases of the key are heard. One may have come just before: look once.
    Listening,
    /// The key was released, most likely: try at once.
    Freed,
}

/// Is called with what is heard, from a thread of the backend's: it must be short and may not wait.
pub type OnHeard = Arc<dyn Fn(Heard) + Send + Sync>;

/// A watch over one key, from [`LockBackend::watch`](crate::LockBackend::watch); it ends when it is dropped.
pub trait Watch: Send + Sync {
    /// Whether releases of the key are heard as far as is known, so that looking at it is worth less.
    fn is_listening(&self) -> bool;
}
