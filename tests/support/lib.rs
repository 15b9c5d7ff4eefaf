//! What the tests with a server and the benchmarks share, built once for all of them: a PostgreSQL server of their own, a schema per test, ways to
//! wait for a condition, captured log lines, and worker processes.
//!
//! ```ignore
//! use syncguard_test_support as support;
//!
//! #[test]
//! fn a_key_that_is_held_is_refused() {
//!     let schema = support::schema();
//!     let client = syncguard::PgLockClient::connect(&schema.url())?;
//! }
//! ```
//!
//! No test skips itself: without server programs the first use of [`server()`] fails and says what
//! to install. The environment may say otherwise which server it is:
//!
//! | variable | meaning |
//! | --- | --- |
//! | `SYNCGUARD_TEST_PG_BINDIR` | the directory of the server programs to use |
//! | `SYNCGUARD_TEST_PG_USER` | the account that runs the server when the caller is root |
//! | `SYNCGUARD_TEST_URL` | an existing server for [`server()`] and [`schema()`]; nothing is started |

pub mod account;
mod alone;
pub mod binaries;
pub mod bouncer;
pub mod c;
pub mod calls;
pub mod clock;
pub mod cluster;
pub mod forward;
mod frames;
mod keeper;
pub mod leases;
pub mod listeners;
pub mod logs;
pub mod names;
pub mod place;
pub mod proxy;
pub mod role;
pub mod room;
pub mod schema;
pub mod script;
pub mod server;
pub mod session_locks;
pub mod sql;
pub mod standby;
mod stored;
pub mod tls;
pub mod wait;
pub mod wire;
pub mod worker;

pub use alone::alone;
pub use cluster::{Config, Stop};
pub use place::{Call, Place, TTL, place};
pub use proxy::{Action, Network, Proxy};
pub use role::Role;
pub use schema::TestSchema;
pub use script::Scripted;
pub use server::Server;
pub use stored::{NOW, Stored, StoredRow, id};
pub use wait::{
    LIMIT, together, wait_for, wait_until, wait_until_app_waits, wait_until_backend_gone,
    wait_until_backend_waits,
};
pub use worker::Worker;

/// The server of this test binary, started by the first call.
pub fn server() -> &'static Server {
    server::shared()
}

/// A fresh schema on [`server()`], dropped with the value.
pub fn schema() -> TestSchema {
    server().schema()
}

/// A number that no other test process has at the same time.
pub fn unique() -> String {
    use std::hash::{BuildHasher, RandomState};
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{}_{n}_{:08x}", std::process::id(), RandomState::new().hash_one(n) >> 32)
}
