//! The end of a lock in the server: one unlock on the session that holds it.

use std::time::Duration;

use crate::advisory::registry::{ClientLock, Registry};
use crate::advisory::sql;
use crate::backend::ReleaseResult;
use crate::cancel::CancelToken;
use crate::error::Result;
use crate::model::time::deadline_after;
use crate::pg::{Connection, Session};

/// Unlocks: the connection goes back only after an unlock that answered "true" on the very session
/// that holds the lock; otherwise it is closed, which ends the lock as well.
pub(super) fn unlock(
    registry: &Registry,
    lock: &ClientLock,
    connection: Connection,
    limit: Duration,
) -> Result<ReleaseResult> {
    let never = CancelToken::never();
    let mut session = Session::new(connection, deadline_after(limit), &never);
    let answer = sql::unlock(&mut session, &registry.statements, &lock.key, lock.shared);
    let result = match answer {
        Ok((pid, true)) if pid == lock.pid => {
            session.finish();
            Ok(ReleaseResult::Released)
        }
        Ok(_) => {
            log::warn!(
                "the session lock {} was not held any more when it was released; its connection is closed",
                lock.key
            );
            drop(session);
            Ok(ReleaseResult::NotHeld)
        }
        // The session has ended, and the lock with it.
        Err(failure) if failure.is_stale() => {
            let error = failure.into_error();
            log::warn!("the session lock {} was lost with its session: {}", lock.key, error.chain());
            drop(session);
            Ok(ReleaseResult::NotHeld)
        }
        Err(failure) => {
            drop(session);
            Err(failure.into_error())
        }
    };
    registry.queue.freed(&lock.key);
    result
}
