//! Leader election: who holds the lease of the key leads, and its fence is the term.
//!
//! 1. A campaign is the wait for a plain lock, without a timeout and without a limit of attempts. Each has a
//!    lock id of its own: neither a host nor a process is an identity.
//! 2. A term is trusted as its guard is, until ttl after the *sending* of what was confirmed last. Lost is
//!    final: a term never comes back.
//! 3. Whoever leaves the closure, by a panic too, trusts the term no longer before its lease is released. A
//!    release that fails is the worker's, as for every guard.
//! 4. What the server cannot do now is waited out; what the program has to mend is returned.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{LockBackend, LockInfo, LostReason};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::lock::attempt::LockCall;
use crate::lock::engine::Engine;
use crate::lock::guard::{LockGuard, run_holding};
use crate::lock::waiter;
use crate::model::fence::Fence;
use crate::model::hash::hash_key;
use crate::threads::ignore_panic;
use crate::waiting::{Delays, LOOK};

/// A term of a leader, for the closure of [`elect`](crate::PgLockClient::elect).
///
/// It is trusted by this process's clock, until one ttl after the last confirmed request was
/// *sent*: a renewal that fails, hangs or is not answered prolongs nothing. Once it is lost it stays lost.
///
/// # Blocking
///
/// [`fence_transaction`](Self::fence_transaction) waits as its transaction may,
/// [`fence_sql`](Self::fence_sql) at most `operation_timeout`. Nothing else does I/O.
///
/// # Cancellation
///
/// No token ends them.
pub struct Term {
    guard: LockGuard,
}

impl Term {
    /// The number of the term, which is the fencing token of its lease: greater than that of every earlier
    /// term of this key.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use std::ops::ControlFlow::Break;
    /// use syncguard::LockOptions;
    ///
    /// let first = client.elect("scheduler", &LockOptions::new(), |term| Break(term.number()))?;
    /// let second = client.elect("scheduler", &LockOptions::new(), |term| Break(term.number()))?;
    /// assert!(second > first);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn number(&self) -> Fence {
        self.guard.fence()
    }

    /// The key, in NFC.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use std::ops::ControlFlow::Break;
    /// use syncguard::LockOptions;
    ///
    /// let key = client.elect("scheduler", &LockOptions::new(), |term| Break(term.key().to_owned()))?;
    /// assert_eq!(key, "scheduler");
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn key(&self) -> &str {
        self.guard.key()
    }

    /// Whether this process still leads, by its own clock and without any I/O. Once `false` it stays `false`.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use std::ops::ControlFlow::{Break, Continue};
    /// use syncguard::LockOptions;
    ///
    /// let done = client.elect("scheduler", &LockOptions::new(), |term| {
    ///     for job in 0..3 {
    ///         if !term.is_held() {
    ///             return Continue(()); // another process may lead now: campaign again
    ///         }
    ///         println!("job {job}");
    ///     }
    ///     Break(3)
    /// })?;
    /// assert_eq!(done, 3);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.guard.is_held()
    }

    /// How long the term can be trusted without a further renewal; zero once it is lost.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// # use std::time::Duration;
    /// use std::ops::ControlFlow::Break;
    /// use syncguard::LockOptions;
    ///
    /// let rest = client.elect("scheduler", &LockOptions::new(), |term| Break(term.remaining()))?;
    /// assert!(rest > Duration::ZERO);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.guard.remaining()
    }

    /// Fires when the term can no longer be trusted: when its lease is lost, at the latest when its time is
    /// over by this process's clock, and when the closure returns. Give a clone to every thread that works
    /// for the leader.
    ///
    /// Cancelling it yourself only wakes threads that wait for it: the term stays held.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use std::ops::ControlFlow::Break;
    /// use syncguard::LockOptions;
    ///
    /// let worker = client.elect("scheduler", &LockOptions::new(), |term| {
    ///     let over = term.lost().clone();
    ///     Break(std::thread::spawn(move || over.wait_timeout(std::time::Duration::from_secs(60))))
    /// })?;
    /// assert!(worker.join().unwrap(), "it is told that the term is over");
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn lost(&self) -> &CancelToken {
        self.guard.lost()
    }

    /// Why the term was lost; `None` while it is not.
    ///
    /// ```
    /// # let client = syncguard::LockClient::new(syncguard::MemoryBackend::new());
    /// use std::ops::ControlFlow::Break;
    /// use syncguard::LockOptions;
    ///
    /// let reason = client.elect("scheduler", &LockOptions::new(), |term| Break(term.lost_reason()))?;
    /// assert_eq!(reason, None);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn lost_reason(&self) -> Option<LostReason> {
        self.guard.lost_reason()
    }

    /// The lease, for what is done in the caller's own transaction.
    pub(crate) fn guard(&self) -> &LockGuard {
        &self.guard
    }
}

impl Drop for Term {
    /// Before the guard releases the lease, whoever works for the leader is told.
    fn drop(&mut self) {
        if self.guard.check_process().is_ok() {
            self.guard.lost().cancel();
        }
    }
}

impl fmt::Debug for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Term")
            .field("number", &self.number())
            .field("key_hash", &hash_key(self.key()))
            .field("held", &self.is_held())
            .finish_non_exhaustive()
    }
}

/// Who leads, by the server's clock: the answer of [`leader`](crate::PgLockClient::leader).
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Leader {
    /// The number of the term: the fencing token of the leader's lease.
    pub term: Fence,
    /// When the term began, in Unix milliseconds of the server's clock.
    pub since_ms: i64,
    /// When its lease ends unless it is renewed, in Unix milliseconds of the server's clock.
    pub expires_at_ms: i64,
    /// Who leads, where the leader's client says so:
    /// [`PgLockClientBuilder::owner`](crate::PgLockClientBuilder::owner). Text of somebody else's.
    pub owner: Option<String>,
}

impl Leader {
    pub(super) fn of(lease: &LockInfo) -> Self {
        Self {
            term: lease.fence,
            since_ms: lease.acquired_at_ms,
            expires_at_ms: lease.expires_at_ms,
            owner: lease.owner.clone(),
        }
    }
}

/// Campaigns, leads, and campaigns again, until `lead` breaks.
pub(super) fn elect<T>(call: LockCall, mut lead: impl FnMut(&Term) -> ControlFlow<T>) -> Result<T> {
    let mut candidate = Candidate { delays: pauses(call.options.delays), call, failures: 0 };
    loop {
        let term = candidate.campaign()?;
        if let ControlFlow::Break(value) = run_holding(term, &mut lead) {
            return Ok(value);
        }
        // Who steps down lets the others have the key first.
        candidate.pause(1)?;
    }
}

/// The shortest pause before a campaign is repeated: without one a server that is away would be asked without
/// end.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
/// The longest, unless `retry_delay` is longer: an outage is over for a candidate soon after it is for the
/// server.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The key under which candidates sleep: no caller's, for U+2126 never occurs in NFC.
const PAUSING: &str = "\u{2126}";

/// The pauses between campaigns, by the delays of the options.
fn pauses(delays: Delays) -> Delays {
    let first = delays.first.max(SHORTEST_PAUSE);
    Delays { first, longest: LONGEST_PAUSE.max(first), ..delays }
}

struct Candidate {
    call: LockCall,
    delays: Delays,
    /// How many campaigns have failed in a row.
    failures: u64,
}

impl Candidate {
    fn engine(&self) -> &Arc<Engine> {
        self.call.engine()
    }

    /// Waits until this candidate leads, whatever the server can do meanwhile.
    fn campaign(&mut self) -> Result<Term> {
        loop {
            let begin = self.engine().clock.now();
            let error = match waiter::lock(self.call.clone()) {
                Ok(leases) => {
                    self.failures = 0;
                    let guard = LockGuard::new(Arc::clone(&self.call.handle), leases);
                    return Ok(Term { guard: guard.for_helper() });
                }
                Err(error) if can_be_waited_out(&error) => error,
                Err(error) => return Err(error),
            };
            // A campaign that took longer than its first requests may was answered, and has waited since.
            let unanswered = self.engine().backend.operation_timeout().saturating_mul(3);
            if self.engine().clock.now().since(begin) > unanswered {
                self.failures = 0;
            }
            if self.failures == 0 {
                ignore_panic(|| log::warn!("{}", Delayed(&self.call.key, &error)));
            }
            self.failures += 1;
            self.pause(self.failures)?;
        }
    }

    /// The pause before this retry. The token and the client's end end it.
    fn pause(&self, retry: u64) -> Result<()> {
        let (engine, token) = (self.engine(), &self.call.token);
        engine.check_process()?;
        let end = engine.clock.now().after(self.delays.before(retry));
        // A place in the queue, because a close and a manual clock signal those.
        let place = engine.queue.join(&Arc::from(PAUSING));
        let signal = Arc::clone(place.signal());
        let _registration = token.subscribe(move || signal.notify(LOOK));
        loop {
            token.check()?;
            engine.check_open()?;
            if engine.clock.now() >= end {
                return Ok(());
            }
            place.signal().sleep_until(&engine.clock, end);
        }
    }
}

/// A campaign that waits for the server, for the log.
struct Delayed<'a>(&'a str, &'a LockError);

impl fmt::Display for Delayed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(key, error) = self;
        let (hash, cause) = (hash_key(key), error.chain());
        write!(f, "the election of key #{hash} waits for the server and goes on by itself: {cause}")
    }
}

/// Whether the server may do later what it could not do now. A lost answer is one of these: what it may have
/// granted is the worker's to release.
fn can_be_waited_out(error: &LockError) -> bool {
    matches!(error.code(), ErrorCode::ServiceUnavailable | ErrorCode::NetworkTimeout | ErrorCode::RateLimited)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_from_the_retry_delay_to_five_seconds_and_there_is_always_one() {
        let of = |first| pauses(Delays::doubling(Duration::from_millis(first), Duration::from_secs(60)));
        let list: Vec<_> = (1..=8).map(|retry| of(100).before(retry).as_millis()).collect();
        assert_eq!(list, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(of(0).before(1), Duration::from_millis(10));
        assert_eq!([of(20_000).before(1), of(20_000).before(9)], [Duration::from_secs(20); 2]);
    }

    #[test]
    fn what_the_program_has_to_mend_is_not_waited_out() {
        for (code, waited_out) in [
            (ErrorCode::ServiceUnavailable, true),
            (ErrorCode::NetworkTimeout, true),
            (ErrorCode::RateLimited, true),
            (ErrorCode::AuthFailed, false),
            (ErrorCode::InvalidArgument, false),
            (ErrorCode::Internal, false),
            (ErrorCode::Aborted, false),
        ] {
            let error = LockError::new(code).with_unknown_outcome(Duration::from_secs(1));
            assert_eq!(can_be_waited_out(&error), waited_out, "{code}");
        }
    }
}
