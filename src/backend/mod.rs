//! The port: what a backend must do, and the contract that it must fulfil.
//!
//! Everything above this module (waiting, guards, renewal, telemetry, diagnostics) knows backends
//! only through [`LockBackend`]; everything below it implements it.
//!
//! # The contract
//!
//! 1. **One holder.** Of all acquires of one key, at most one is granted while its lease is live by
//!    [`is_live`](crate::is_live) on the backend's one clock.
//! 2. **Fences grow.** Each grant of a key carries a fence greater than every earlier one of that
//!    key, through restarts, releases and cleanup, forever.
//! 3. **Decisions are atomic.** Resolving the id, judging liveness and changing the lease are one
//!    indivisible step, and the clock is read once, after all waits.
//! 4. **One attempt.** No operation retries contention or waits for a key to become free.
//! 5. **No guess.** An error either means that nothing was changed, or says that the outcome is
//!    unknown ([`LockError::with_unknown_outcome`](crate::LockError::with_unknown_outcome)).
//! 6. **Bounded.** Every call returns by its deadline, whatever the network does.
//! 7. **Validate first.** Bad keys, ids and ttls are `InvalidArgument` before any I/O.
//! 8. **Late copies are harmless.** A call that has failed may still be carried out later, and twice, where
//!    messages can be late. Then an extend or a renewal must not shorten what was confirmed meanwhile:
//!    [`grant`](LockBackend::grant), [`prolong`](LockBackend::prolong) and [`renew`](LockBackend::renew)
//!    answer a [`Version`], and only a change that names the newest one may shorten a lease. A backend whose
//!    calls are carried out before they return, or never, needs no versions.
//! 9. **Cancellation.** A fired token ends a call with `Aborted`, before anything is written or not at all.
//! 10. **All or none.** Of several keys in one request, all are granted or none, and the
//!     leases are granted at the same moment. A backend may refuse to take several at all.
//! 11. **Labels are the grant's.** An owner and a note are written with the grant, in the same step, and shown for
//!     that grant alone: never for another holder. Nothing is decided by them, and a backend may leave them out.
//!
//! # Writing a backend
//!
//! `examples/own_backend.rs` in the repository is a complete one, in memory and with the reasons beside the
//! code; it passes the suite below. What to write:
//!
//! 1. The five operations and [`capabilities`](LockBackend::capabilities); also
//!    [`lookup_raw`](LockBackend::lookup_raw) if raw keys may be shown for debugging: `lookup` is then
//!    its answer after [`LockInfoRaw::sanitized`].
//! 2. [`attempt`](LockBackend::attempt): guards use it, and its default is not idempotent. `acquire` is then
//!    an attempt with an id from [`generate_lock_id`]. Where messages can be late,
//!    [`grant`](LockBackend::grant) and [`prolong`](LockBackend::prolong) as well: see 8.
//! 3. [`operation_timeout`](LockBackend::operation_timeout), and
//!    [`clock`](LockBackend::clock) if tests are to move the time. The other methods have defaults that
//!    fulfil the contract; override `prolong`, `release_by` and `holder` if a call may take long, because
//!    the defaults check the deadline only once, and `renew` if many leases can be renewed at once.
//!
//! Use [`normalize_and_validate_key`](crate::normalize_and_validate_key) and
//! [`make_storage_key`](crate::make_storage_key) for keys, [`validate_lock_id`](crate::validate_lock_id) for
//! ids, [`validate_ttl`] for ttls, [`is_live`](crate::is_live) with
//! [`TIME_TOLERANCE_MS`](crate::TIME_TOLERANCE_MS) for every judgement, [`Fence::following`] before the
//! counter is written, and [`Fence::warn_near_limit`] after a grant.
//!
//! Then put it through the contract suite: the package `syncguard-contract` has every case as a test, and
//! shows how to run them.

mod course;
mod forward;
mod info;
mod label;
mod once;
mod outcome;
mod permits;
mod several;
mod shared;
mod turns;
mod watch;

use std::time::Duration;

use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::model::fence::Fence;
use crate::model::lock_id::LockId;
use crate::model::time::Ttl;

pub use crate::model::time::{Clock, Moment};
pub use course::{Connections, LockCourse, LockEnding, LockKind, LockStage};
pub use info::{Capabilities, Holder, LockInfo, LockInfoRaw, Lookup, TimeAuthority};
pub use label::{HeldBy, Label, MAX_NOTE_BYTES};
pub use once::{BeginOutcome, BeginRun, BegunRun, MarkOutcome, MarkRun, MarkStep, Slot};
pub use outcome::{
    AcquireResult, Acquired, Attempt, ExtendOutcome, ExtendResult, Grant, LostReason, Reason, ReleaseOutcome,
    ReleaseResult, RenewOutcome, Renewal, Version,
};
pub use permits::{PermitAttempt, PermitGrant};
pub use several::{AttemptAll, GrantAll, MAX_KEYS};
pub use shared::{Intent, SharedAttempt};
pub use turns::{Turn, TurnAttempt};
pub use watch::{Heard, OnHeard, Watch};

pub(crate) use label::{Words, check_text};
pub(crate) use several::{check_count, check_set, no_keys};
pub(crate) use turns::LONGEST_TICKET_MS;

/// A fresh lock id, for a backend's own [`acquire`](LockBackend::acquire): 128 bits from the operating
/// system, 22 characters. Without random numbers it is an error (`Internal`), because anybody who guesses an id
/// can release the lock.
///
/// ```
/// let id = syncguard::backend::generate_lock_id()?;
/// assert!(syncguard::validate_lock_id(&id).is_ok());
/// # Ok::<(), syncguard::LockError>(())
/// ```
pub fn generate_lock_id() -> Result<String> {
    Ok(LockId::generate()?.as_str().to_owned())
}

/// A fresh lock id for a reader, for [`LockBackend::grant_shared`]: as random as any other, and of a form that other
/// ids never have, so that the id alone says where to look for it.
///
/// ```
/// let id = syncguard::backend::generate_shared_lock_id()?;
/// assert!(syncguard::validate_lock_id(&id).is_ok());
/// # Ok::<(), syncguard::LockError>(())
/// ```
pub fn generate_shared_lock_id() -> Result<String> {
    Ok(LockId::generate_shared()?.as_str().to_owned())
}

/// The ttl in whole milliseconds, a fraction cut off; `InvalidArgument` below 1 ms and above
/// [`MAX_TTL`](crate::MAX_TTL).
pub fn validate_ttl(ttl: Duration) -> Result<Duration> {
    Ok(Ttl::new(ttl)?.get())
}

/// For the defaults: whether there is time left to begin.
fn in_time<B: LockBackend + ?Sized>(backend: &B, deadline: Moment) -> Result<()> {
    if backend.clock().now() < deadline {
        return Ok(());
    }
    Err(LockError::new(ErrorCode::NetworkTimeout)
        .with_message("the time for this operation was over before it began"))
}

/// For the defaults: why no fence can be checked in a transaction.
pub(crate) fn outside_the_database() -> LockError {
    LockError::invalid(
        "this backend keeps its leases outside the database of the transaction: store the fence beside the data instead",
    )
}

/// What a backend says that keeps no marks.
fn no_runs() -> LockError {
    LockError::invalid("this backend keeps no marks of finished slots: run_once needs one that does")
}

/// A place where leases are kept. See the [contract](self).
///
/// The five operations are those of every SyncGuard client. The provided methods are what guards
/// need beyond them; a backend that can do better than the default should. Operations that come later are
/// provided methods, too: a default fulfils the contract, or refuses with `InvalidArgument`.
///
/// # Blocking
///
/// Each call at most until its `deadline`; one without a deadline at most
/// [`operation_timeout`](LockBackend::operation_timeout).
///
/// # Cancellation
///
/// A call with a token ends when the token fires, before anything is written or not at all. Calls without one
/// end or renew guards, and nothing cancels them.
pub trait LockBackend: Send + Sync {
    /// Tries once to take the key for `ttl`.
    fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult>;

    /// Releases the lease with this id. Harmless if it is not held.
    fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome>;

    /// Sets the expiry of the lease with this id to now plus `ttl`. Never revives a dead lease.
    fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome>;

    /// Whether the key has a live lease. Reads only.
    fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool>;

    /// The live lease of a key or with an id. Reads only; for diagnosis, never as a guard.
    fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>>;

    /// What this backend is and can do.
    fn capabilities(&self) -> Capabilities;

    /// [`acquire`](LockBackend::acquire) with an id that the caller chose and a deadline of its own.
    ///
    /// Idempotent by lock id: the same attempt again, after an unknown outcome, answers with the
    /// grant that the first one made. **The default is not**: it ignores the id. Override it.
    fn attempt(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<AcquireResult> {
        in_time(self, attempt.deadline)?;
        self.acquire(attempt.key, attempt.ttl, cancel)
    }

    /// [`attempt`](LockBackend::attempt) for a guard: with the version of what was granted; `None` if
    /// another holder has the key. The default knows no versions.
    fn grant(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        let acquired = self.attempt(attempt, cancel)?.acquired();
        Ok(acquired.map(|acquired| Grant { acquired, version: None }))
    }

    /// Several keys at once, all or none: nothing is held when it returns without all of them. Each key's
    /// lease is an ordinary one, with an id and a fence of its own. Idempotent by the lock ids, as
    /// [`attempt`](LockBackend::attempt); of an attempt that finds only a part of its leases (the others
    /// were lost after a first answer that never came) that part is released. The default refuses:
    /// one key after the other could not be taken without holding some of them meanwhile.
    fn grant_all(&self, attempt: &AttemptAll<'_>, cancel: &CancelToken) -> Result<GrantAll> {
        let _ = (attempt, cancel);
        Err(LockError::invalid("this backend cannot take several keys at once: lock them one by one"))
    }

    /// Who holds a key, for a waiter that looks before it tries again and names the holder when its
    /// time is over; `None` if nobody does. The default knows only what is known from [`is_locked`](LockBackend::is_locked).
    fn holder(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<Option<Holder>> {
        in_time(self, deadline)?;
        Ok(self.is_locked(key, cancel)?.then(Holder::default))
    }

    /// Who holds a key, with owner and note if the holder gave them: for people, when a wait is over or a
    /// leader is asked for. `None` if nobody does. For a key that readers share they are those of the reader whose
    /// lease ends last. If owners cannot be read, the answer is without them, and not an error. The default is
    /// [`lookup`](LockBackend::lookup).
    fn who_holds(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<Option<HeldBy>> {
        in_time(self, deadline)?;
        Ok(self.lookup(Lookup::Key(key), cancel)?.map(|lease| HeldBy::new(lease, None)))
    }

    /// Watches a key for a waiter that has waited for a while and may wait longer: `heard` is called
    /// when the key is released, in this process or another. The default watches nothing.
    ///
    /// It affects latency, never correctness: a waiter goes on looking, only more rarely while
    /// [`is_listening`](Watch::is_listening). A superfluous call costs one request; a missing one
    /// costs time. Returns at once: anything that takes time is done on a thread of the backend, and failures
    /// are retried there. `None` if no watch is available now; the waiter may ask again.
    fn watch(&self, key: &str, heard: OnHeard) -> Option<Box<dyn Watch>> {
        let _ = (key, heard);
        None
    }

    /// [`release`](LockBackend::release) that no token ends: for guards that end.
    fn release_by(&self, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        in_time(self, deadline)?;
        self.release(lock_id, &CancelToken::never())
    }

    /// [`release_by`](LockBackend::release_by) of several leases, whose ids are in the order of their
    /// keys. One outcome per lease, in that order; after an error each of them may be released or not.
    /// The default releases them one by one.
    fn release_all(&self, lock_ids: &[&str], deadline: Moment) -> Result<Vec<ReleaseOutcome>> {
        lock_ids.iter().map(|lock_id| self.release_by(lock_id, deadline)).collect()
    }

    /// Extends one lease of a guard, at its holder's request. Waits for its row, and so never answers
    /// [`Busy`](RenewOutcome::Busy). The new expiry is now plus the ttl. If the lease has a fence other than this
    /// one, it is lost.
    ///
    /// A message that does not name the lease's newest version must not shorten it, for it may be a late
    /// copy; a call whose shortening had no effect because of that asks again, with the version from the
    /// answer. The default extends by the id, whatever the version, and checks afterwards whose lease it
    /// was: it is for backends without late messages.
    fn prolong(&self, lease: &Renewal<'_>, deadline: Moment) -> Result<RenewOutcome> {
        let never = CancelToken::never();
        in_time(self, deadline)?;
        let outcome = self.extend(lease.lock_id, lease.ttl, &never)?;
        let found = match outcome {
            ExtendOutcome::NotHeld(Some(Reason::Expired)) => {
                return Ok(RenewOutcome::Lost(LostReason::Expired));
            }
            ExtendOutcome::NotHeld(_) => self.lookup(Lookup::Key(lease.key), &never)?,
            ExtendOutcome::Extended { expires_at_ms } => {
                match self.lookup(Lookup::LockId(lease.lock_id), &never)? {
                    Some(found) if found.fence != lease.fence => Some(found),
                    _ => return Ok(RenewOutcome::Renewed { expires_at_ms, version: None }),
                }
            }
        };
        Ok(RenewOutcome::Lost(
            found.map_or(LostReason::RowMissing, |newer| LostReason::TakenOver { fence: newer.fence }),
        ))
    }

    /// Extends many leases of guards, in as few round trips as possible, on resources that a busy client
    /// cannot exhaust. One outcome per lease, in order; an `Err` says nothing about the lease. A renewal that does
    /// not name the newest version only lengthens, and is not repeated: the next renewal takes care of it.
    /// The default [prolongs](LockBackend::prolong) them one by one.
    fn renew(&self, leases: &[Renewal<'_>], deadline: Moment) -> Vec<Result<RenewOutcome>> {
        leases.iter().map(|lease| self.prolong(lease, deadline)).collect()
    }

    /// Prepares for guards that are renewed; called before the first of them, and again for the next
    /// one after [`unreserve_renewals`](Self::unreserve_renewals). A backend that
    /// cannot keep a resource free for renewals refuses here. Deadline and token are those of the caller
    /// who happens to be the first.
    fn reserve_renewals(&self, deadline: Moment, cancel: &CancelToken) -> Result<()> {
        cancel.check()?;
        in_time(self, deadline)
    }

    /// No guard is renewed any more: resources kept by [`reserve_renewals`](Self::reserve_renewals) may be used for
    /// something else. Returns whether anything is kept at all; a backend that says no is not asked again.
    fn unreserve_renewals(&self) -> bool {
        false
    }

    /// Tries once to take any permit of a semaphore: a lease on the key that is the name, U+2126 and a number
    /// from 1 to the limit, with a fence and a counter of its own. Every operation on a lease by its id
    /// works on a permit's, too, and guards name its key to [`prolong`](Self::prolong) and [`renew`](Self::renew).
    ///
    /// Idempotent by lock id, as [`attempt`](Self::attempt). `None` means that each permit was held, or being
    /// taken by another, at some moment of the call. A limit of 0 or above
    /// [`MAX_PERMITS`](crate::MAX_PERMITS) is `InvalidArgument`; so is every call of the default, for a
    /// backend without permits.
    fn grant_permit(&self, attempt: &PermitAttempt<'_>, cancel: &CancelToken) -> Result<Option<PermitGrant>> {
        let _ = (attempt, cancel);
        Err(permits::no_permits())
    }

    /// How many of the permits with the numbers 1 to `among` have a live lease. Reads only.
    fn permits_in_use(
        &self,
        semaphore: &str,
        among: u32,
        deadline: Moment,
        cancel: &CancelToken,
    ) -> Result<u32> {
        let _ = (semaphore, among, deadline, cancel);
        Err(permits::no_permits())
    }

    /// [`release_by`](Self::release_by) for a permit of this semaphore: [watchers](Self::watch) of a key
    /// that is the semaphore's name are notified, because any of its permits will do. The default notifies nobody.
    fn release_permit(&self, semaphore: &str, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        let _ = semaphore;
        self.release_by(lock_id, deadline)
    }

    /// [`lookup`](LockBackend::lookup) with the raw key and id, for the `*_raw` helpers alone.
    /// **Sensitive**: for debugging by hand only.
    /// The default refuses it.
    fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoRaw>> {
        let _ = (what, cancel);
        Err(LockError::invalid(
            "this backend shows neither raw keys nor lock ids: use lookup, which has their hashes",
        ))
    }

    /// The SQL statement that fails, inside a caller's transaction, unless `fence` is this key's
    /// newest and its lease is live, and carries this lock id where one is given. Only for a backend
    /// whose leases live in the caller's database.
    #[doc(hidden)]
    fn fence_statement(&self, key: &str, fence: Fence, lock_id: Option<&str>) -> Result<String> {
        let _ = (key, fence, lock_id);
        Err(outside_the_database())
    }

    /// [`fence_statement`](LockBackend::fence_statement) for several `(key, fence, lock id)` at once, in the
    /// order of their keys.
    #[doc(hidden)]
    fn fence_statement_all(&self, leases: &[(&str, Fence, &str)]) -> Result<String> {
        let _ = leases;
        Err(outside_the_database())
    }

    /// Tries once to share a key with its other readers. While a reader has the key no other kind of lease of the key
    /// is granted, and while another lease has it no reader is granted.
    ///
    /// All readers that have a key at the same time have one fence, above those of all earlier grants: "no writer
    /// since". Every operation on a lease by its id works on a reader's, too; guards say in [`Renewal::shared`] that
    /// it is one. Releasing the last of them frees the key. A reader is refused while a writer that has
    /// [announced](Self::announce) itself waits and has waited longer; an announcement that claims to last for more than
    /// five seconds does not count.
    ///
    /// Idempotent by lock id, as [`attempt`](Self::attempt). An id that is not one of
    /// [`generate_shared_lock_id`] is `InvalidArgument`; so is every call of the default, for a backend without shared
    /// leases.
    fn grant_shared(&self, attempt: &SharedAttempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        let _ = (attempt, cancel);
        Err(shared::no_readers())
    }

    /// [`release_by`](Self::release_by) of a reader of this key. The default releases by the id.
    fn release_shared(&self, key: &str, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        let _ = key;
        self.release_by(lock_id, deadline)
    }

    /// [`grant`](LockBackend::grant) for a caller that asks to be served in order: also refused while a live ticket is
    /// ahead.
    ///
    /// [`announce`](LockBackend::announce) writes tickets. A ticket is live until it ends, but one that claims to
    /// last for more than five seconds is not. Tickets with a greater priority are ahead; of the same priority, those
    /// that have waited longer by what was written for them, this one included; of the same wait, those with the smaller
    /// id. A caller without a ticket counts from the time that it states. A ticket delays only callers that ask for
    /// their turn.
    ///
    /// A grant ends the ticket, and writes that of [`next`](TurnAttempt::next) in the same step. Idempotent by lock id,
    /// as [`attempt`](Self::attempt), whatever tickets are ahead by then. The default refuses.
    fn grant_in_turn(&self, attempt: &TurnAttempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        let _ = (attempt, cancel);
        Err(turns::no_turns())
    }

    /// Who has the key, and how many live tickets are ahead of this one, which may not be there yet. Reads only.
    fn turn(&self, ticket: &Intent<'_>, deadline: Moment, cancel: &CancelToken) -> Result<Turn> {
        let _ = (ticket, deadline, cancel);
        Err(turns::no_turns())
    }

    /// Announces that somebody waits for a key: a writer that finds it shared, or whoever wants to be served in order. It
    /// is a help, never a promise: who yields waits no longer than it lasts. Said again, it lasts longer, and may become
    /// older but never younger: the first message may have been slow, and the clock may have been set back. The default
    /// announces nothing.
    fn announce(&self, intent: &Intent<'_>, deadline: Moment) -> Result<()> {
        let _ = (intent, deadline);
        Ok(())
    }

    /// Withdraws an announcement: whoever made it no longer waits. The default does nothing.
    fn withdraw(&self, id: &str, deadline: Moment) -> Result<()> {
        let _ = (id, deadline);
        Ok(())
    }

    /// [`fence_statement`](LockBackend::fence_statement) for a reader.
    #[doc(hidden)]
    fn fence_statement_shared(&self, key: &str, fence: Fence, lock_id: &str) -> Result<String> {
        let _ = (key, fence, lock_id);
        Err(outside_the_database())
    }

    /// Begins a run of a job: takes the lease of its name, unless its slot is done.
    ///
    /// One step, by one clock that is read after all waits, decides on the current slot, its mark and the lease.
    /// A slot that is marked meanwhile is done. Idempotent by lock id, as
    /// [`attempt`](LockBackend::attempt): repeating the same begin answers with the slot of the first grant. The
    /// mark only grows, in a counter of its own for each kind of slot, and lasts as long as counters do.
    ///
    /// The default is `InvalidArgument`, as that of [`mark_run`](LockBackend::mark_run): a backend has both or
    /// neither.
    fn begin_run(&self, begin: &BeginRun<'_>, cancel: &CancelToken) -> Result<BeginOutcome> {
        let _ = (begin, cancel);
        Err(no_runs())
    }

    /// Marks the slot of a run as done, or sees whether it is: see [`MarkStep`].
    fn mark_run(&self, run: &MarkRun<'_>, step: MarkStep, deadline: Moment) -> Result<MarkOutcome> {
        let _ = (run, step, deadline);
        Err(no_runs())
    }

    /// The SQL statements that mark a run's slot inside a caller's transaction, and fail unless its lease is live
    /// and its fence the newest. Only for a backend whose leases live in the caller's database.
    #[doc(hidden)]
    fn completion_statement(&self, run: &MarkRun<'_>) -> Result<String> {
        let _ = run;
        Err(LockError::invalid(
            "this backend keeps its marks outside the database of the transaction: let run_once mark the slot",
        ))
    }

    /// Hears how far a call of a client has come, from its beginning to the end of what it got: for telemetry.
    /// Called on callers' threads and on the client's, so it must not block. The default does nothing.
    fn follow(&self, course: &LockCourse<'_>) {
        let _ = course;
    }

    /// The connections that it has, for telemetry. The default has none.
    fn connections(&self) -> Option<Connections> {
        None
    }

    /// The clock that local deadlines are counted on.
    fn clock(&self) -> Clock {
        Clock::system()
    }

    /// How long a single operation may take: guards use it for calls that have no deadline of
    /// their own.
    fn operation_timeout(&self) -> Duration {
        Duration::from_secs(5)
    }

    /// Frees idle resources. Operations may fail afterwards.
    fn close(&self) {}
}
