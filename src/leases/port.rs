//! The leases as a [`LockBackend`], and what a failed fence check says.

use std::time::Duration;

use crate::backend::{
    AcquireResult, Attempt, AttemptAll, BeginOutcome, BeginRun, Capabilities, Connections, ExtendOutcome,
    Grant, GrantAll, HeldBy, Holder, Intent, LockBackend, LockInfo, LockInfoRaw, Lookup, MarkOutcome,
    MarkRun, MarkStep, OnHeard, PermitAttempt, PermitGrant, ReleaseOutcome, RenewOutcome, Renewal,
    SharedAttempt, TimeAuthority, Turn, TurnAttempt, Watch,
};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::leases::acquire::Acquire;
use crate::leases::backend::PostgresBackend;
use crate::leases::permits::{self, AcquirePermit};
use crate::leases::several::AcquireAll;
use crate::leases::{extend, once, once_sql, read, release, several, shared, sql, turns};
use crate::model::fence::Fence;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES, validate_limit};
use crate::model::lock_id::LockId;
use crate::model::time::{Moment, Ttl};
use crate::pg::error::{call_error, with_cause};

impl LockBackend for PostgresBackend {
    fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult> {
        let (key, ttl) = (Key::new(key)?, Ttl::new(ttl)?);
        cancel.check()?;
        let lock_id = LockId::generate()?;
        Acquire::new(&key, &lock_id, ttl)?.run(self, self.database.end(), cancel).map(AcquireResult::from)
    }

    fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome> {
        release::release(self, &LockId::parse(lock_id)?, self.database.end(), cancel)
    }

    fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome> {
        extend::extend(self, &LockId::parse(lock_id)?, Ttl::new(ttl)?, self.database.end(), cancel)
    }

    fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool> {
        read::is_locked(self, &Key::new(key)?, self.database.end(), cancel)
    }

    fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>> {
        Ok(self.lookup_raw(what, cancel)?.map(|found| found.sanitized()))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::fencing("postgres", TimeAuthority::Server)
    }

    fn attempt(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<AcquireResult> {
        self.grant(attempt, cancel).map(AcquireResult::from)
    }

    fn grant(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        let (key, ttl) = (Key::new(attempt.key)?, Ttl::new(attempt.ttl)?);
        let lock_id = LockId::parse(attempt.lock_id)?;
        let acquire = Acquire::new(&key, &lock_id, ttl)?.labelled(attempt.label);
        acquire.run(self, self.database.end_by(attempt.deadline), cancel)
    }

    fn grant_all(&self, attempt: &AttemptAll<'_>, cancel: &CancelToken) -> Result<GrantAll> {
        AcquireAll::new(attempt)?.run(self, self.database.end_by(attempt.deadline), cancel)
    }

    fn holder(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<Option<Holder>> {
        read::holder(self, &Key::new(key)?, self.database.end_by(deadline), cancel)
    }

    fn who_holds(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<Option<HeldBy>> {
        read::who_holds(self, &Key::new(key)?, self.database.end_by(deadline), cancel)
    }

    fn watch(&self, key: &str, heard: OnHeard) -> Option<Box<dyn Watch>> {
        let wake_ups = self.wake_ups.as_ref()?;
        let (storage_key, _) =
            Key::new(key).ok()?.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES).ok()?;
        wake_ups.watch(&storage_key, &heard)
    }

    fn release_by(&self, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        release::release(
            self,
            &LockId::parse(lock_id)?,
            self.database.end_by(deadline),
            &CancelToken::never(),
        )
    }

    fn release_all(&self, lock_ids: &[&str], deadline: Moment) -> Result<Vec<ReleaseOutcome>> {
        several::release_all(self, lock_ids, self.database.end_by(deadline))
    }

    fn prolong(&self, lease: &Renewal<'_>, deadline: Moment) -> Result<RenewOutcome> {
        let end = self.database.end_by(deadline);
        if lease.shared { shared::prolong(self, lease, end) } else { extend::prolong(self, lease, end) }
    }

    fn renew(&self, leases: &[Renewal<'_>], deadline: Moment) -> Vec<Result<RenewOutcome>> {
        extend::renew(self, leases, self.database.end_by(deadline))
    }

    fn reserve_renewals(&self, deadline: Moment, cancel: &CancelToken) -> Result<()> {
        let source = self.database.source();
        if source.can_reserve()? {
            source.keep(source.get(self.database.end_by(deadline), cancel)?);
        }
        Ok(())
    }

    fn unreserve_renewals(&self) -> bool {
        self.database.source().unreserve()
    }

    fn grant_permit(&self, attempt: &PermitAttempt<'_>, cancel: &CancelToken) -> Result<Option<PermitGrant>> {
        validate_limit(attempt.limit)?;
        let (semaphore, ttl) = (Key::new(attempt.semaphore)?, Ttl::new(attempt.ttl)?);
        let lock_id = LockId::parse(attempt.lock_id)?;
        let acquire = AcquirePermit::new(&semaphore, attempt.limit, &lock_id, ttl, attempt.label)?;
        acquire.run(self, self.database.end_by(attempt.deadline), cancel)
    }

    fn permits_in_use(
        &self,
        semaphore: &str,
        among: u32,
        deadline: Moment,
        cancel: &CancelToken,
    ) -> Result<u32> {
        validate_limit(among)?;
        permits::count(self, &Key::new(semaphore)?, among, self.database.end_by(deadline), cancel)
    }

    fn release_permit(&self, semaphore: &str, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        release::release_permit(
            self,
            &Key::new(semaphore)?,
            &LockId::parse(lock_id)?,
            self.database.end_by(deadline),
        )
    }

    fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoRaw>> {
        read::lookup(self, what, self.database.end(), cancel)
    }

    fn fence_statement(&self, key: &str, fence: Fence, lock_id: Option<&str>) -> Result<String> {
        let key = Key::of_lease(key)?;
        let (storage_key, fence_key) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
        let at = self.find_tables(self.database.end(), &CancelToken::never())?;
        let lock_id = lock_id.map(LockId::parse).transpose()?;
        sql::fenced(&at.tables, &storage_key, &fence_key, fence, lock_id.as_ref())
    }

    fn fence_statement_all(&self, leases: &[(&str, Fence, &str)]) -> Result<String> {
        several::fence_statement(self, leases, self.database.end())
    }

    fn grant_shared(&self, attempt: &SharedAttempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        shared::join(self, attempt, cancel)
    }

    fn release_shared(&self, key: &str, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        release::release_shared(
            self,
            &Key::new(key)?,
            &LockId::parse(lock_id)?,
            self.database.end_by(deadline),
        )
    }

    fn grant_in_turn(&self, attempt: &TurnAttempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        turns::acquire(self, attempt, cancel)
    }

    fn turn(&self, ticket: &Intent<'_>, deadline: Moment, cancel: &CancelToken) -> Result<Turn> {
        turns::look(self, ticket, self.database.end_by(deadline), cancel)
    }

    fn announce(&self, intent: &Intent<'_>, deadline: Moment) -> Result<()> {
        shared::announce(self, intent, self.database.end_by(deadline))
    }

    fn withdraw(&self, id: &str, deadline: Moment) -> Result<()> {
        shared::withdraw(self, id, self.database.end_by(deadline))
    }

    fn fence_statement_shared(&self, key: &str, fence: Fence, lock_id: &str) -> Result<String> {
        shared::fence_statement(self, key, fence, lock_id)
    }

    fn begin_run(&self, begin: &BeginRun<'_>, cancel: &CancelToken) -> Result<BeginOutcome> {
        once::begin(self, begin, self.database.end_by(begin.attempt.deadline), cancel)
    }

    fn mark_run(&self, run: &MarkRun<'_>, step: MarkStep, deadline: Moment) -> Result<MarkOutcome> {
        once::mark(self, run, step, self.database.end_by(deadline))
    }

    fn completion_statement(&self, run: &MarkRun<'_>) -> Result<String> {
        once::completion(self, run)
    }

    fn connections(&self) -> Option<Connections> {
        self.database.connections()
    }

    fn operation_timeout(&self) -> Duration {
        self.database.operation_timeout()
    }

    fn close(&self) {
        if let Some(wake_ups) = &self.wake_ups {
            wake_ups.close();
        }
        self.database.source().close();
    }
}

/// A caller's transaction in which a fence turned out to be stale, or which cannot be checked.
pub(crate) fn fence_error(error: postgres::Error) -> LockError {
    match error.code().map(|state| state.code().to_owned()).as_deref() {
        Some("22P02") => LockError::new(ErrorCode::Aborted).with_message(
            "the lease is over or a newer holder exists: this transaction cannot commit, roll it back and stop working",
        ),
        Some(state @ "25006") => with_cause(
            LockError::invalid(
                "a fenced transaction must be READ WRITE: it locks the key's counter until it ends",
            ),
            state,
            error,
        ),
        _ => call_error(error, false).into_error(),
    }
}

/// Why a caller's transaction could not complete its run.
pub(crate) fn completion_error(error: postgres::Error) -> LockError {
    if error.as_db_error().is_some_and(|error| error.message().contains(once_sql::DONE)) {
        return LockError::new(ErrorCode::Aborted).with_message(
            "the slot of this run is done already: this transaction cannot commit, roll it back, and complete a run in one transaction only",
        );
    }
    fence_error(error)
}
