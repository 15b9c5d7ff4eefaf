//! Taking a session lock: one try, and the one loop that waits.
//!
//! A waiter sleeps here, in this process, and tries again: it holds no connection while it sleeps,
//! and no statement waits in the server. A waiting statement would keep its snapshot, and `CREATE
//! INDEX CONCURRENTLY` waits for every older snapshot: a holder that builds an index would wait for
//! its own waiters. Nor does a try leave an error in the server's log, as an ended wait would.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::advisory::crew::{Held, SERVER_GRACE};
use crate::advisory::guard::AdvisoryGuard;
use crate::advisory::hold::{Hold, Taken};
use crate::advisory::key::AdvisoryKey;
use crate::advisory::options::Terms;
use crate::advisory::session::let_go;
use crate::advisory::{Inner, probe, sql};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::model::time::deadline_after;
use crate::postgres::{MAX_REPLACEMENTS, Session, Trouble};

/// The pause before the second try, and the longest one: a lock that is let go by another process is
/// taken within that time.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// How long the check after a failed try may take, before the connection is closed instead.
const CHECK_LIMIT: Duration = Duration::from_millis(100);

/// The longest sleep of a waiter that is not the first; it is called when it becomes that.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// One try. It does not queue behind this process's waiters.
pub(super) fn try_lock(
    inner: &Inner,
    key: AdvisoryKey,
    terms: Terms,
    cancel: &CancelToken,
) -> Result<Option<AdvisoryGuard>> {
    cancel.check()?;
    let _visit = inner.crew.enter()?;
    attempt(inner, key, terms, inner.postgres.end(), cancel)
}

/// Tries until the lock is granted or the time is over.
pub(super) fn lock(
    inner: &Inner,
    key: AdvisoryKey,
    terms: Terms,
    cancel: &CancelToken,
) -> Result<AdvisoryGuard> {
    let start = Instant::now();
    let end = terms.timeout.map(deadline_after);
    let is_over = || end.is_some_and(|end| Instant::now() >= end);
    cancel.check()?;
    let _visit = inner.crew.enter()?;
    let ticket = inner.crew.queue.join(key);
    let bell = Arc::clone(&ticket.bell);
    let _call = cancel.subscribe(move || bell.ring());
    let mut pause = FIRST_PAUSE;
    let mut refused = false;
    loop {
        cancel.check()?;
        inner.crew.check_open()?;
        let first = ticket.is_first();
        if first {
            let limit = end.map_or(inner.postgres.end(), |end| end.min(inner.postgres.end()));
            match attempt(inner, key, terms, limit, cancel) {
                Ok(Some(guard)) => return Ok(guard),
                Ok(None) => refused = true,
                Err(error) if error.code() == ErrorCode::NetworkTimeout && is_over() => {
                    return Err(timed_out(start, refused).with_source(error));
                }
                Err(_) if cancel.is_cancelled() => return Err(LockError::aborted()),
                Err(error) => return Err(error),
            }
        }
        let left = end.map_or(LONGEST_SLEEP, |end| end.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            return Err(timed_out(start, refused));
        }
        ticket.bell.sleep(left.min(if first { jittered(pause) } else { LONGEST_SLEEP }));
        if first {
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

/// `refused`: whether the server said that somebody has the lock, which nobody else can say.
fn timed_out(start: Instant, refused: bool) -> LockError {
    let waited = start.elapsed().as_secs_f64();
    LockError::new(ErrorCode::AcquisitionTimeout).with_message(if refused {
        format!(
            "the session lock was held by somebody else for {waited:.1} s: raise timeout, or see advisory_holders()"
        )
    } else {
        format!(
            "the session lock was not granted within {waited:.1} s: raise timeout; threads of this client that want it were before us, or the cause says what did not answer"
        )
    })
}

/// Half of the pause, and a random part of the other half, so that processes do not march in step.
fn jittered(pause: Duration) -> Duration {
    let half = pause / 2;
    let mut random = [0_u8];
    // Without a random source they march in step.
    let _ = getrandom::fill(&mut random);
    half + half * u32::from(random[0]) / 255
}

fn attempt(
    inner: &Inner,
    key: AdvisoryKey,
    terms: Terms,
    end: Instant,
    cancel: &CancelToken,
) -> Result<Option<AdvisoryGuard>> {
    let mut replaced = 0;
    let hold = loop {
        cancel.check()?;
        let connection = inner.postgres.source().get(end, cancel)?;
        let fresh = connection.is_fresh();
        let session = Session::new(connection, end, cancel);
        replaced += 1;
        let tried = try_on(inner, session, key, terms, end);
        inner.postgres.purge_after(&tried, fresh);
        match tried {
            Ok(None) => return Ok(None),
            Ok(Some(hold)) => break Arc::new(hold),
            // Its session has ended, and a lock that it may have got has ended with it.
            Err(Trouble::Broken { stale: true, .. })
                if !fresh && replaced < MAX_REPLACEMENTS && Instant::now() < end => {}
            Err(trouble) => return Err(trouble.into_error()),
        }
    };
    let released_within = inner.postgres.end().saturating_duration_since(Instant::now());
    if let Err(error) = inner.crew.enlist(&hold) {
        hold.release();
        if let Taken::Connection(connection) = hold.take(Duration::ZERO) {
            // Granted, and nobody to look after it. Closed if that fails, so it is gone either way.
            let _ = let_go(&inner.crew, &hold, connection, released_within);
        }
        return Err(error);
    }
    let guard = AdvisoryGuard::new(hold, Arc::clone(&inner.crew), inner.crew.limit, inner.dispose_timeout);
    if !guard.is_held() {
        // The answer was under way for as long as the lock may be held, or this process did not run.
        return Err(LockError::new(ErrorCode::NetworkTimeout).with_message(
            "the lock was granted, but its max_hold was over before the answer came; it is let go: raise max_hold",
        ));
    }
    Ok(Some(guard))
}

/// One try on one connection, which goes back, or into the hold, or is closed.
fn try_on(
    inner: &Inner,
    mut session: Session<'_>,
    key: AdvisoryKey,
    terms: Terms,
    end: Instant,
) -> Result<Option<Held>, Trouble> {
    if !inner.proven.load(Ordering::Acquire) {
        probe::prove(&inner.postgres, &inner.crew.statements, &mut session, end)?;
        inner.proven.store(true, Ordering::Release);
    }
    if !session.is_own() && sql::is_held_here(&mut session, &key)? {
        // Somebody else has used this session, and a session takes a lock that it has once more.
        log::warn!(
            "a connection of the caller's pool came with the session lock {key} on it: unlock before you give it back"
        );
        session.finish();
        return Ok(None);
    }
    if Instant::now() >= end {
        // Nothing was sent, so nothing needs to be checked.
        session.finish();
        return Err(out_of_time().into());
    }
    // Counted from before the request, so that our deadline comes before the server's.
    let sent = inner.crew.clock.now();
    let timer = (!terms.keep).then(|| terms.max_hold.saturating_add(SERVER_GRACE));
    let grant = match sql::try_lock(&mut session, &inner.crew.statements, &key, terms.shared, timer) {
        Ok(grant) => grant,
        Err(Trouble::Refused(error)) => {
            finish_checked(session, &key);
            return Err(Trouble::Refused(error));
        }
        Err(trouble) => return Err(trouble),
    };
    match grant.granted {
        None => Err(session.read_only(probe::standby())),
        Some(false) => {
            session.finish();
            Ok(None)
        }
        Some(true) => {
            let Some(connection) = session.into_connection() else {
                return Err(out_of_time().into());
            };
            let deadline = (sent.after(terms.max_hold), terms.keep);
            let id = inner.crew.next_id();
            Ok(Some(Hold::new(id, key, terms.shared, grant.pid, deadline, connection, sent)))
        }
    }
}

/// After an error: gives the connection back only if it did not get the lock after all. A statement
/// that the server cancels may have been granted the lock a moment before.
fn finish_checked(session: Session<'_>, key: &AdvisoryKey) {
    let Some(connection) = session.into_connection() else { return };
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
