//! Session locks: PostgreSQL's advisory locks that live as long as a connection.
//!
//! No table, no ttl, no fencing token, no lock id: a separate kind of lock, outside the backend port.
//! The lock is gone when it is unlocked or when its session ends, and only then.
//!
//! A file uses only those above it in this table.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `key`, `options` | what a lock is on; what a caller may choose |
//! | `sql` | the statements |
//! | `observe` | holders, waiters, ending a session |
//! | `self_test` | the self-test at a client's first lock |
//! | `held_lock` | one lock from its grant to its end: where its connection is |
//! | `registry` | all locks of a client: what guards and threads share |
//! | `unlock` | the unlock on the session that holds the lock |
//! | `monitor`, `session_thread` | the two threads |
//! | `guard` | what the holder has |
//! | `acquire` | one try, and the loop that waits |
//!
//! # Invariants
//!
//! *One connection, one lock.*
//!
//! 1. A guard owns its connection from the grant to its end. A session's re-entrancy, by which the
//!    same session may take a lock twice, can therefore not let two holders of this process in. A
//!    connection of a caller's pool may come with locks that other code took on it: it is looked at
//!    first, and a key that is on it counts as held.
//! 2. A connection goes back to its pool only after an unlock that answered `true`, in the server
//!    process that granted the lock; or after a try that answered
//!    `false`; or, after a try that failed, when `pg_locks` shows that this session did not get the
//!    lock after all. In any other case it is closed, and the server ends the lock with the session.
//! 3. No transaction is open between two messages, and no statement waits for a lock in the server.
//!
//! *One end.*
//!
//! 4. A lock ends exactly once: released, or lost for one reason. Whoever changes its state first
//!    (holder, monitor, session thread, close) does what follows; the others do nothing.
//! 5. The connection is in one place: in the held lock, borrowed by the session thread, or gone.
//!    Whoever ends the lock takes it; if it is borrowed, they wait for it within their own time, and
//!    whoever gives up waiting leaves it to the session thread.
//! 6. No mutex is held while the server is asked, a connection is closed or a token fired.
//!
//! *The deadline, on both sides.*
//!
//! 7. The local deadline is counted from before the request that took the lock, on the clock that
//!    runs on through a suspend. `is_held` compares the clock itself; nothing can delay it. A grant
//!    whose answer comes when its time is over makes no guard.
//! 8. The statement that takes the lock also sets the session's `idle_session_timeout` to what is
//!    left and one second. The session is idle from then on, so the server counts the same time.
//!    A caller's connection gets its own setting back with the unlock. A connection of ours keeps the
//!    timer for its next lock, and the pool knows: it does not lend what the server is about to end,
//!    and when no lock has come for a second, the session thread stops the timers that still run.
//! 9. A message on an idle session starts its timer anew. So the message that asks a holder's session
//!    whether it is there *sets the timer to what is left by then*: asking never prolongs anything. A
//!    live holder keeps its lock until its deadline however often it is asked, because the timer never
//!    ends before that; a stopped process asks nothing and loses the lock a second after the deadline,
//!    whenever it was stopped. When it wakes, its clock says that it holds nothing (7).
//! 10. By 7 and 8 the holder stops trusting the lock before the server can grant it to another session.
//! 11. A lock that is kept past its deadline has no timer at all (`0`): whoever prefers exclusion needs
//!     it most for a stopped process, which may wake and go on. Only the end of its connection ends it.
//! 12. Before version 14 there is no such timer. There 7 holds, and 8 to 10 do not: a stopped process
//!     keeps its lock, although it will not trust it when it wakes. (`idle_in_transaction_session_timeout`
//!     would need an open transaction, which holds back vacuum in the whole database.)
//!
//! *Loss is noticed.*
//!
//! 13. Every half second the session thread reads what has come in on each connection, without
//!     sending anything: a terminated backend, a restart, a reset connection are noticed within a second.
//! 14. A session whose last answer is three seconds old is asked; no answer within five is a loss. A
//!     session that has been silent for ten counts as lost whatever the session thread is doing
//!     (longer only if a whole round of questions takes more than three seconds, so that a slow network
//!     with many locks is not mistaken for a dead one). Silence counts only while this process listens:
//!     after it was stopped, or the host suspended, it starts anew, so that a holder that slept for ten
//!     seconds does not take itself for one whose server is gone.
//! 15. The monitor thread keeps the time and does no I/O, so that a network that hangs cannot keep it
//!     from firing a token. That is why there are two threads; they start with the first guard and
//!     end a second after the last, or with the client.
//! 16. A lost session is closed and never replaced: another session would have another lock.
//! 17. The answer's server process must be the one that granted the lock: behind a pooler that was
//!     not there at the self-test, the lock counts as lost.

mod acquire;
mod guard;
mod held_lock;
mod key;
mod monitor;
mod observe;
mod options;
mod registry;
mod self_test;
mod session_thread;
mod sql;
mod unlock;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cancel::CancelToken;
use crate::error::Result;
use crate::pg::Database;
use crate::pg::same_session::SessionLocksHere;

pub use guard::AdvisoryGuard;
pub use held_lock::AdvisoryLost;
pub use key::AdvisoryKey;
pub use observe::AdvisorySession;
pub use options::{AdvisoryOptions, DEFAULT_MAX_HOLD};

use acquire::Acquirer;
use registry::{Registry, ThreadBodies};

/// The session locks of one client.
#[derive(Clone)]
pub(crate) struct SessionLocks(Arc<Acquirer>);

impl SessionLocks {
    pub(crate) fn new(
        database: Arc<Database>,
        operation_timeout: Duration,
        dispose_timeout: Duration,
    ) -> Self {
        let threads = ThreadBodies { monitor: monitor::run, session: session_thread::run };
        let registry = Registry::new(operation_timeout, Arc::downgrade(&database), threads);
        Self(Arc::new(Acquirer::new(database, registry, dispose_timeout)))
    }

    pub(crate) fn try_lock(
        &self,
        key: AdvisoryKey,
        options: &AdvisoryOptions,
        cancel: &CancelToken,
    ) -> Result<Option<AdvisoryGuard>> {
        self.0.try_lock(key, options.checked()?, cancel)
    }

    pub(crate) fn lock(
        &self,
        key: AdvisoryKey,
        options: &AdvisoryOptions,
        cancel: &CancelToken,
    ) -> Result<AdvisoryGuard> {
        self.0.lock(key, options.checked()?, cancel)
    }

    pub(crate) fn sessions(&self, granted: bool, cancel: &CancelToken) -> Result<Vec<AdvisorySession>> {
        observe::sessions(&self.0.database, granted, cancel)
    }

    pub(crate) fn terminate(&self, pid: i32, cancel: &CancelToken) -> Result<bool> {
        observe::terminate(&self.0.database, pid, cancel)
    }

    /// What finds out whether session locks exclude here, and keeps none of them alive.
    pub(crate) fn self_test(&self) -> impl Fn(Instant) -> SessionLocksHere + Send + Sync + 'static {
        let database = Arc::clone(&self.0.database);
        move |end| self_test::look(&database, &sql::Statements::new(), end)
    }

    /// Ends every session lock of this client. Whether nothing of them was left in time.
    pub(crate) fn close(&self, limit: Duration) -> bool {
        self.0.registry.close(limit)
    }
}
