//! How to speak to a PostgreSQL server, whatever is said: nothing here knows of leases.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `split`, `environment`, `passfile`, `connection_string` | what a connection string, the environment and a passfile say |
//! | `addresses`, `resolve` | lists of hosts; names to addresses |
//! | `resources`, `stream`, `connect` | what the driver needs of the system; sockets with a deadline; TLS, cancel requests |
//! | `pool`, `slots`, `callers`, `source` | pools and the wait for them, our own, a caller's, the connection kept for renewals |
//! | `names`, `statement`, `session`, `answers` | names that nobody can shadow; prepared statements; one operation on one connection; what comes back |
//! | `run` | [`Database`]: the one loop around every operation |
//! | `same_session` | whether two sessions keep to their server processes |
//! | `failure`, `error` | the one failure type inside, and what it says of connection and change; SQLSTATE to error code |

mod addresses;
pub(crate) mod answers;
mod callers;
pub(crate) mod connect;
mod connection_string;
mod endpoint;
mod environment;
pub(crate) mod error;
mod failure;
pub(crate) mod names;
mod passfile;
mod pool;
mod resolve;
mod resources;
mod run;
pub(crate) mod same_session;
pub(crate) mod session;
mod slots;
mod source;
mod split;
pub(crate) mod statement;
mod stream;

pub(crate) use answers::{Answers, Row};
pub(crate) use connect::{Connector, guard_runtime};
pub(crate) use connection_string::Settings as ConnectionSettings;
pub(crate) use environment::Environment;
pub(crate) use failure::Failure;
pub(crate) use run::{Database, Lane, until_known};
pub(crate) use session::Session;
pub(crate) use source::{Connection, Source};
pub(crate) use statement::{Arg, Message, SessionTimer, Statement, push_quoted};
