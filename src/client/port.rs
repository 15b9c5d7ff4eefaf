//! The client as a backend, for code that is generic over backends.

use std::time::Duration;

use crate::backend::{
    AcquireResult, Attempt, AttemptAll, BeginOutcome, BeginRun, Capabilities, Connections, ExtendOutcome,
    Grant, GrantAll, HeldBy, Holder, Intent, LockBackend, LockCourse, LockInfo, LockInfoRaw, Lookup,
    MarkOutcome, MarkRun, MarkStep, OnHeard, PermitAttempt, PermitGrant, ReleaseOutcome, RenewOutcome,
    Renewal, SharedAttempt, Turn, TurnAttempt, Watch,
};
use crate::cancel::CancelToken;
use crate::client::PgLockClient;
use crate::error::Result;
use crate::model::fence::Fence;
use crate::model::time::{Clock, Moment};

/// A client is a backend, too: for code that is generic over backends. Operations observe the token
/// that is passed in, not the client's own.
impl LockBackend for PgLockClient {
    fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult> {
        self.locks.backend().acquire(key, ttl, cancel)
    }
    fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome> {
        self.locks.backend().release(lock_id, cancel)
    }
    fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome> {
        self.locks.backend().extend(lock_id, ttl, cancel)
    }
    fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool> {
        self.locks.backend().is_locked(key, cancel)
    }
    fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>> {
        self.locks.backend().lookup(what, cancel)
    }
    fn capabilities(&self) -> Capabilities {
        self.locks.capabilities()
    }
    fn attempt(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<AcquireResult> {
        self.locks.backend().attempt(attempt, cancel)
    }
    fn grant(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        self.locks.backend().grant(attempt, cancel)
    }
    fn grant_all(&self, attempt: &AttemptAll<'_>, cancel: &CancelToken) -> Result<GrantAll> {
        self.locks.backend().grant_all(attempt, cancel)
    }
    fn holder(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<Option<Holder>> {
        self.locks.backend().holder(key, deadline, cancel)
    }
    fn who_holds(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<Option<HeldBy>> {
        self.locks.backend().who_holds(key, deadline, cancel)
    }
    fn watch(&self, key: &str, heard: OnHeard) -> Option<Box<dyn Watch>> {
        self.locks.backend().watch(key, heard)
    }
    fn release_by(&self, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        self.locks.backend().release_by(lock_id, deadline)
    }
    fn release_all(&self, lock_ids: &[&str], deadline: Moment) -> Result<Vec<ReleaseOutcome>> {
        self.locks.backend().release_all(lock_ids, deadline)
    }
    fn prolong(&self, lease: &Renewal<'_>, deadline: Moment) -> Result<RenewOutcome> {
        self.locks.backend().prolong(lease, deadline)
    }
    fn renew(&self, leases: &[Renewal<'_>], deadline: Moment) -> Vec<Result<RenewOutcome>> {
        self.locks.backend().renew(leases, deadline)
    }
    fn reserve_renewals(&self, deadline: Moment, cancel: &CancelToken) -> Result<()> {
        self.locks.backend().reserve_renewals(deadline, cancel)
    }
    fn unreserve_renewals(&self) -> bool {
        self.locks.backend().unreserve_renewals()
    }
    fn grant_permit(&self, attempt: &PermitAttempt<'_>, cancel: &CancelToken) -> Result<Option<PermitGrant>> {
        self.locks.backend().grant_permit(attempt, cancel)
    }
    fn permits_in_use(
        &self,
        semaphore: &str,
        among: u32,
        deadline: Moment,
        cancel: &CancelToken,
    ) -> Result<u32> {
        self.locks.backend().permits_in_use(semaphore, among, deadline, cancel)
    }
    fn release_permit(&self, semaphore: &str, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        self.locks.backend().release_permit(semaphore, lock_id, deadline)
    }
    fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoRaw>> {
        self.locks.backend().lookup_raw(what, cancel)
    }
    fn fence_statement(&self, key: &str, fence: Fence, lock_id: Option<&str>) -> Result<String> {
        self.locks.backend().fence_statement(key, fence, lock_id)
    }
    fn fence_statement_all(&self, leases: &[(&str, Fence, &str)]) -> Result<String> {
        self.locks.backend().fence_statement_all(leases)
    }
    fn grant_shared(&self, attempt: &SharedAttempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        self.locks.backend().grant_shared(attempt, cancel)
    }
    fn release_shared(&self, key: &str, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        self.locks.backend().release_shared(key, lock_id, deadline)
    }
    fn grant_in_turn(&self, attempt: &TurnAttempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        self.locks.backend().grant_in_turn(attempt, cancel)
    }
    fn turn(&self, ticket: &Intent<'_>, deadline: Moment, cancel: &CancelToken) -> Result<Turn> {
        self.locks.backend().turn(ticket, deadline, cancel)
    }
    fn announce(&self, intent: &Intent<'_>, deadline: Moment) -> Result<()> {
        self.locks.backend().announce(intent, deadline)
    }
    fn withdraw(&self, id: &str, deadline: Moment) -> Result<()> {
        self.locks.backend().withdraw(id, deadline)
    }
    fn fence_statement_shared(&self, key: &str, fence: Fence, lock_id: &str) -> Result<String> {
        self.locks.backend().fence_statement_shared(key, fence, lock_id)
    }
    fn begin_run(&self, begin: &BeginRun<'_>, cancel: &CancelToken) -> Result<BeginOutcome> {
        self.locks.backend().begin_run(begin, cancel)
    }
    fn mark_run(&self, run: &MarkRun<'_>, step: MarkStep, deadline: Moment) -> Result<MarkOutcome> {
        self.locks.backend().mark_run(run, step, deadline)
    }
    fn completion_statement(&self, run: &MarkRun<'_>) -> Result<String> {
        self.locks.backend().completion_statement(run)
    }
    fn follow(&self, course: &LockCourse<'_>) {
        self.locks.backend().follow(course);
    }
    fn connections(&self) -> Option<Connections> {
        self.locks.backend().connections()
    }
    fn clock(&self) -> Clock {
        self.locks.backend().clock()
    }
    fn operation_timeout(&self) -> Duration {
        self.locks.backend().operation_timeout()
    }
}
