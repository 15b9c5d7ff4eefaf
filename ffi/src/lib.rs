//! The C interface of syncguard. The contract is in `include/syncguard.h`; this is its other side.
//!
//! Invariants:
//! 1. No panic leaves a function: `shielded` catches it and answers [`SYNCGUARD_PANIC`].
//! 2. A handle is a `Box` that was turned into a pointer by `give` and is turned back exactly once,
//!    by the `_free` function of its type. All others only borrow it. Terms and runs are never given:
//!    a callback borrows them for the time of its call.
//! 3. All handle types are `Sync`, so C may use one from several threads.
//! 4. No mutex is held while a call waits for the network or runs a callback: see `syncguard_guard::with` and
//!    `Watch`.
//! 5. Callbacks are `C-unwind`: an exception that leaves one ends the process, instead of being undefined.

// A panic in library code is a bug.
#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::dbg_macro,
    clippy::print_stdout,
    clippy::print_stderr
)]
#![allow(non_camel_case_types, reason = "C sees these names")]
#![allow(clippy::missing_safety_doc, reason = "the header says it, once for all functions")]

mod advice;
mod answers;
mod client;
mod election;
mod errors;
mod guard;
mod locks;
mod once;
mod options;
mod pointers;
mod token;
mod watch;

pub use answers::*;
pub use client::*;
pub use election::*;
pub use errors::{syncguard_last_error, syncguard_last_error_may_be_held_ms, syncguard_last_error_sqlstate};
pub use guard::*;
pub use locks::*;
pub use once::*;
pub use options::*;
pub use pointers::syncguard_text_free;
pub use token::*;
pub use watch::syncguard_on_lost;

pub use advice::in_c;
