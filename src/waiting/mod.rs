//! Waiting inside one process: whose turn it is, how a waiter sleeps, and how delays grow.

mod backoff;
mod queue;
mod signal;

pub use backoff::{Backoff, Jitter};

pub(crate) use backoff::Delays;
pub(crate) use queue::{QueuePlace, Ticket, WaiterQueue};
pub(crate) use signal::{FREED, LISTENING, LOOK, Signal};
