//! Taking a session lock: one try, and the one loop that waits.
//!
//! A waiter sleeps here, in this process, and tries again: it holds no connection while it sleeps,
//! and no statement waits in the server. A waiting statement would keep its snapshot, and `CREATE
//! INDEX CONCURRENTLY` waits for every older snapshot: a holder that builds an index would wait for
//! its own waiters. Nor does a try leave an error in the server's log, as an ended wait would.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::advisory::guard::AdvisoryGuard;
use crate::advisory::held_lock::{HeldLock, Taken};
use crate::advisory::key::AdvisoryKey;
use crate::advisory::options::CheckedOptions;
use crate::advisory::registry::{ClientLock, Registry, SERVER_GRACE};
use crate::advisory::unlock::unlock;
use crate::advisory::{self_test, sql};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::model::time::{Moment, deadline_after};
use crate::pg::{Database, Failure, Lane, Session};
use crate::waiting::{Delays, Jitter, LOOK};

/// The delays between tries: a lock that another process releases is taken within the longest of them.
const DELAYS: Delays =
    Delays { jitter: Jitter::Equal, ..Delays::doubling(Duration::from_millis(5), Duration::from_millis(50)) };

/// How long the check after a failed try may take, before the connection is closed instead.
const CHECK_LIMIT: Duration = Duration::from_millis(100);

/// What takes the session locks of one client.
pub(super) struct Acquirer {
    pub(super) database: Arc<Database>,
    pub(super) registry: Arc<Registry>,
    self_test_passed: AtomicBool,
    dispose_timeout: Duration,
}

impl Acquirer {
    pub(super) fn new(database: Arc<Database>, registry: Arc<Registry>, dispose_timeout: Duration) -> Self {
        Self { database, registry, self_test_passed: AtomicBool::new(false), dispose_timeout }
    }

    /// One try. It does not queue behind this process's waiters.
    pub(super) fn try_lock(
        &self,
        key: AdvisoryKey,
        options: CheckedOptions,
        cancel: &CancelToken,
    ) -> Result<Option<AdvisoryGuard>> {
        cancel.check()?;
        let _call = self.registry.begin_call()?;
        self.attempt(key, options, self.database.end(), cancel)
    }

    /// Tries until the lock is granted or the time is over.
    pub(super) fn lock(
        &self,
        key: AdvisoryKey,
        options: CheckedOptions,
        cancel: &CancelToken,
    ) -> Result<AdvisoryGuard> {
        let clock = &self.registry.clock;
        let start = clock.now();
        let end = options.timeout.map_or(Moment::NEVER, |timeout| start.after(timeout));
        cancel.check()?;
        let _call = self.registry.begin_call()?;
        let place = self.registry.queue.join(&key);
        let signal = Arc::clone(place.signal());
        let _subscription = cancel.subscribe(move || signal.notify(LOOK));
        let mut tries = 0;
        let mut refused = false;
        loop {
            cancel.check()?;
            self.registry.check_open()?;
            // A waiter that is not the first sleeps until it is signalled to have become that.
            let mut next_try = Moment::NEVER;
            if place.is_first() {
                match self.attempt(key, options, self.database.end_by(end), cancel) {
                    Ok(Some(guard)) => return Ok(guard),
                    Ok(None) => refused = true,
                    Err(error) if error.code() == ErrorCode::NetworkTimeout && clock.now() >= end => {
                        return Err(timed_out(clock.now().since(start), refused).with_source(error));
                    }
                    Err(_) if cancel.is_cancelled() => return Err(LockError::aborted()),
                    Err(error) => return Err(error),
                }
                tries += 1;
                next_try = clock.now().after(DELAYS.before(tries));
            }
            if clock.now() >= end {
                return Err(timed_out(clock.now().since(start), refused));
            }
            place.signal().sleep_until(clock, next_try.min(end));
        }
    }

    fn attempt(
        &self,
        key: AdvisoryKey,
        options: CheckedOptions,
        end: Instant,
        cancel: &CancelToken,
    ) -> Result<Option<AdvisoryGuard>> {
        // Where a session has ended, a lock that it may have got has ended with it.
        let lock = self.database.with_connection(Lane::Operations, end, cancel, |session| {
            self.try_on(session, key, options, end)
        })?;
        let Some(lock) = lock.map(Arc::new) else { return Ok(None) };
        let unlock_limit = self.database.end().saturating_duration_since(Instant::now());
        if let Err(error) = self.registry.add(&lock) {
            lock.release();
            if let Taken::Connection(connection) = lock.take(Duration::ZERO) {
                // Granted, and nobody to look after it. Closed if that fails, so it is gone either way.
                let _ = unlock(&self.registry, &lock, connection, unlock_limit);
            }
            return Err(error);
        }
        let guard =
            AdvisoryGuard::new(lock, Arc::clone(&self.registry), self.registry.limit, self.dispose_timeout);
        if !guard.is_held() {
            // The answer was under way for as long as the lock may be held, or this process did not run.
            return Err(LockError::new(ErrorCode::NetworkTimeout).with_message(
                "the lock was granted, but its max_hold was over before the answer came, so it was released: raise max_hold",
            ));
        }
        Ok(Some(guard))
    }

    /// One try on one connection, which goes back to the pool, or to the held lock, or is closed.
    fn try_on(
        &self,
        session: &mut Session<'_>,
        key: AdvisoryKey,
        options: CheckedOptions,
        end: Instant,
    ) -> Result<Option<ClientLock>, Failure> {
        if !self.self_test_passed.load(Ordering::Acquire) {
            self_test::run(&self.database, &self.registry.statements, session, end)?;
            self.self_test_passed.store(true, Ordering::Release);
        }
        if !session.is_own() && sql::is_held_here(session, &key)? {
            // Another part of the program has used this session, and a session may take its own lock twice.
            log::warn!(
                "a connection of the caller's pool came with the session lock {key} on it: unlock before you give it back"
            );
            return Ok(None);
        }
        if Instant::now() >= end {
            // Nothing was sent, so nothing needs to be checked.
            return Err(out_of_time().into());
        }
        // Counted from before the request, so that our deadline comes before the server's.
        let sent = self.registry.clock.now();
        let timer = (!options.keep_past_deadline).then(|| options.max_hold.saturating_add(SERVER_GRACE));
        let answer = match sql::try_lock(session, &self.registry.statements, &key, options.shared, timer) {
            Ok(answer) => answer,
            Err(failure) => {
                if failure.is_refused() {
                    check_unlocked(session, &key);
                }
                return Err(failure);
            }
        };
        match answer.granted {
            None => Err(session.read_only(self_test::standby())),
            Some(false) => Ok(None),
            Some(true) => {
                let Some(connection) = session.take_connection() else {
                    return Err(out_of_time().into());
                };
                let deadline = (sent.after(options.max_hold), options.keep_past_deadline);
                let id = self.registry.next_id();
                Ok(Some(HeldLock::new(id, key, options.shared, answer.pid, deadline, connection, sent)))
            }
        }
    }
}

impl Drop for Acquirer {
    fn drop(&mut self) {
        self.registry.client_dropped();
    }
}

/// `refused`: whether the server said that another session has the key; only the server can.
fn timed_out(waited: Duration, refused: bool) -> LockError {
    let waited = waited.as_secs_f64();
    LockError::new(ErrorCode::AcquisitionTimeout).with_message(if refused {
        format!(
            "the session lock's key was held by another session for {waited:.1} s: raise timeout, or see advisory_holders()"
        )
    } else {
        format!(
            "the session lock was not granted within {waited:.1} s: raise timeout; other threads of this client were before it in the queue, or the cause says what did not answer"
        )
    })
}

/// After an error: closes the connection unless it certainly did not get the lock after all. A statement
/// that the server cancels may have been granted the lock a moment before.
fn check_unlocked(session: &mut Session<'_>, key: &AdvisoryKey) {
    let Some(connection) = session.take_connection() else { return };
    let never = CancelToken::never();
    let mut check = Session::new(connection, deadline_after(CHECK_LIMIT), &never);
    if matches!(sql::is_held_here(&mut check, key), Ok(false)) {
        check.finish();
    }
}

fn out_of_time() -> LockError {
    LockError::new(ErrorCode::NetworkTimeout)
        .with_message("the time for this try was over before it could be sent: raise operation_timeout")
}
