//! Leases in two tables of a PostgreSQL database.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `backend` | [`PostgresBackend`]: the database, and the tables once it is known where they are |
//! | `port` | the same as a [`LockBackend`](crate::LockBackend) |
//! | `schema`, `setup`, `collation` | the tables' names; how they are found and made; whether their indexes are in order |
//! | `fragments`, `sql`, `held` | what statements are made of; every SQL text of the protocol; those on a lease that stands |
//! | `acquire`, `release`, `extend`, `read` | one file per operation |
//! | `permits`, `permit_sql` | any of a semaphore's leases, and the SQL for it |
//! | `several`, `several_sql` | several keys at once, and their statements |
//! | `notes`, `note_sql` | owners and notes, written with grants |
//! | `once`, `once_sql` | runs, once per slot, and their statements |
//! | `turns`, `ticket`, `turn_sql` | those who are served in order, and their statements |
//! | `refusals` | what a statement says by failing |
//! | `operator`, `cleanup` | what operators see; deleting rows that are long over |
//! | `check`, `check_server`, `check_tables`, `check_members`, `finding` | a look at what makes locks unsafe or slow here |
//! | `waiting` | who waits for which key |
//! | `breaking`, `marks` | taking a lease away by hand; the marks of jobs |
//! | `notify`, `listener`, `wake_ups` | how a release reaches waiters in other processes |

mod acquire;
mod backend;
mod breaking;
mod check;
mod check_members;
mod check_server;
mod check_tables;
mod cleanup;
mod collation;
mod engine;
mod extend;
mod finding;
mod fragments;
mod held;
mod listener;
mod marks;
mod members;
mod note_sql;
mod notes;
mod notify;
mod once;
mod once_sql;
mod operator;
mod permit_sql;
mod permits;
mod port;
mod read;
mod refusals;
mod release;
mod schema;
mod setup;
mod several;
mod several_sql;
mod shared;
mod shared_read;
mod shared_renew;
mod shared_sql;
mod sql;
mod ticket;
mod turn_sql;
mod turns;
mod waiting;
mod wake_ups;

pub(crate) use backend::{PostgresBackend, Settings};
pub use breaking::BrokenLock;
pub use cleanup::CLEANUP_GUARD_MS;
pub use finding::{Finding, Severity};
pub use marks::{JobMark, MarkReset, SlotKind};
pub use operator::{Counts, IdleCounter, Operator};
pub(crate) use port::{completion_error, fence_error};
pub(crate) use schema::TableNames;
pub use waiting::{BlockedSession, Waiter};
