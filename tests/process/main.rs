//! What has to be seen of a whole process: its threads, its log, its panics, its end. In a binary of
//! their own, so that no other test's clients are seen with it.
//!
//! | file | what it shows |
//! | --- | --- |
//! | `advisory_faults` | Session locks when processes, servers and lines between them fail. |
//! | `closing` | The end of a client: everybody is told, everything is let go, nothing is left running. |
//! | `harness` | The test harness itself: a server out of nothing, and nothing left of it afterwards. |
//! | `metrics` | What recorder and subscriber are told: of each lock, in numbers that add up, and never its key. |
//! | `no_descriptors` | A process that has no file descriptor left, or no thread: errors name the limit, nothing panics, leases are let go later. |
//! | `open_transactions` | A connection of a caller's pool may come with a transaction that other code has left open. What is |
//! | `runtime` | Inside an async runtime: blocking calls are refused in words, and what is dropped there is let go. |
//! | `secrets` | Keys, lock ids and passwords stay out of log lines, texts of errors, and `Debug`, whatever happens. |
//! | `secrets_types` | Every public type, printed while it holds secrets. A type that is new to the crate fails this test |
//! | `security_server` | A server that answers whatever it likes, in messages that are well formed: wrong types, NULL, numbers |
//! | `session_limits` | What a session is left with when a call's time is over, refused or cancelled: limits in the server |
//! | `thread_locals` | What is kept in a thread-local is let go at the thread's end, and what the destructors of a process let go. |
//! | `wake_ups` | A release calls those who wait for the key in other processes, if there are any. |
//! | `wake_ups_faults` | Whoever is not called looks, and gets the lock all the same: behind poolers, with a listener that |

use syncguard_test_support as support;

mod advisory_faults;
mod closing;
mod harness;
#[cfg(all(feature = "metrics", feature = "tracing"))]
mod metrics;
mod no_descriptors;
mod open_transactions;
mod runtime;
mod secrets;
mod secrets_types;
mod security_server;
mod session_limits;
mod thread_locals;
mod wake_ups;
mod wake_ups_faults;
