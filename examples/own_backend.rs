//! A lock backend of one's own, and the contract suite that it has to pass.
//!
//! Run it with `cargo run --example own_backend`: it puts the backend through every case of the
//! contract. Needs the package `syncguard-contract` under `[dev-dependencies]`.
//!
//! The store is a table in memory behind one mutex: whatever yours is, it needs the same three things.
//! A step that is indivisible, a clock that all clients share, and counters that are never lost. The
//! numbers in the comments are those of the contract in the documentation of `syncguard::backend`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use syncguard::backend::{Attempt, ExtendOutcome, ReleaseOutcome, TimeAuthority};
use syncguard::backend::{generate_lock_id, validate_ttl};
use syncguard::{
    AcquireResult, Acquired, CancelToken, Capabilities, ErrorCode, Fence, LockBackend, LockError, LockInfo,
    LockInfoRaw, Lookup, Reason, Result, TIME_TOLERANCE_MS, is_live, make_fence_key, make_storage_key,
    normalize_and_validate_key, validate_lock_id,
};
use syncguard_contract::Harness;

/// The longest key that this store can hold, in bytes. Longer ones are stored under a digest.
const LIMIT: usize = 256;

/// What a client has of the store. A real one would hold a connection, or a pool of them.
#[derive(Clone, Default)]
struct TableBackend {
    table: Arc<Mutex<Table>>,
}

/// What the store holds.
#[derive(Default)]
struct Table {
    /// By stored key.
    leases: HashMap<String, LockInfoRaw>,
    /// By fence key. Nothing ever removes one or lowers it (2).
    counters: HashMap<String, u64>,
}

/// The store's clock. All clients must read the same one: here they are in one process.
fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// The one rule of liveness: nowhere else is a time compared with a time.
fn lives(lease: &LockInfoRaw, now_ms: i64) -> bool {
    is_live(lease.expires_at_ms, now_ms, TIME_TOLERANCE_MS)
}

fn millis(ttl: Duration) -> i64 {
    i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX)
}

impl TableBackend {
    /// The indivisible step (3). What is decided in it is decided on the newest state, by a clock that
    /// is read after the wait for it.
    fn step(&self) -> (MutexGuard<'_, Table>, i64) {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let now = now_ms();
        (table, now)
    }

    /// Under what a key and its counter are stored. Refuses what cannot be a key, before anything is
    /// touched (7).
    fn stored(key: &str) -> Result<(String, String, String)> {
        let key = normalize_and_validate_key(key)?;
        let base = make_storage_key("", &key, LIMIT, 0)?;
        let fence = make_fence_key("", &base, LIMIT, 0)?;
        Ok((key, base, fence))
    }
}

impl Table {
    /// The stored key of a lease, by its id alone. A real store has an index for it.
    fn key_of(&self, lock_id: &str) -> Option<String> {
        self.leases.iter().find(|(_, lease)| lease.lock_id == lock_id).map(|(key, _)| key.clone())
    }
}

impl LockBackend for TableBackend {
    fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult> {
        let lock_id = generate_lock_id()?;
        let deadline = self.clock().now().after(self.operation_timeout());
        self.attempt(&Attempt::new(key, &lock_id, ttl, deadline), cancel)
    }

    // Not the default: that would ignore the id, and an attempt must be idempotent by it (5).
    fn attempt(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<AcquireResult> {
        let (key, base, fence_key) = Self::stored(attempt.key)?;
        validate_lock_id(attempt.lock_id)?;
        let ttl = validate_ttl(attempt.ttl)?;
        // Bounded (6): a store that has to be asked over a network would look again at every wait.
        if self.clock().now() >= attempt.deadline {
            return Err(LockError::new(ErrorCode::NetworkTimeout).with_key(key));
        }
        let (mut table, now) = self.step();
        // Before anything is written, or not at all (8).
        cancel.check()?;
        if let Some(lease) = table.leases.get(&base).filter(|lease| lives(lease, now)) {
            if lease.lock_id != attempt.lock_id {
                return Ok(AcquireResult::Locked); // an answer, and the only attempt (1, 4)
            }
            // The same attempt again: the answer that got lost, and no second fence.
            return Ok(AcquireResult::Acquired(grant(lease)));
        }
        if table.key_of(attempt.lock_id).is_some_and(|other| other != base) {
            return Err(LockError::new(ErrorCode::Internal).with_message("this lock id is in use"));
        }
        // Compared as numbers, refused at the limit, and only then written (2).
        let fence = Fence::following(table.counters.get(&fence_key).copied().unwrap_or(0))?;
        table.counters.insert(fence_key, fence.get());
        let lease = LockInfoRaw::new(key, attempt.lock_id.to_owned(), now + millis(ttl), now, fence);
        let granted = grant(&lease);
        // A row that is over is overwritten; its id is forgotten with it.
        table.leases.insert(base, lease);
        drop(table);
        fence.warn_near_limit(attempt.key); // a log line: foreign code, so after the step
        Ok(AcquireResult::Acquired(granted))
    }

    fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome> {
        validate_lock_id(lock_id)?;
        let (mut table, now) = self.step();
        cancel.check()?;
        let Some(key) = table.key_of(lock_id) else {
            return Ok(ReleaseOutcome::NotHeld(Some(Reason::NotFound)));
        };
        if !table.leases.get(&key).is_some_and(|lease| lives(lease, now)) {
            return Ok(ReleaseOutcome::NotHeld(Some(Reason::Expired))); // the row stays
        }
        table.leases.remove(&key); // the counter stays, forever
        Ok(ReleaseOutcome::Released)
    }

    fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome> {
        validate_lock_id(lock_id)?;
        let ttl = validate_ttl(ttl)?;
        let (mut table, now) = self.step();
        cancel.check()?;
        let key = table.key_of(lock_id);
        let Some(lease) = key.and_then(|key| table.leases.get_mut(&key)) else {
            return Ok(ExtendOutcome::NotHeld(Some(Reason::NotFound)));
        };
        if !lives(lease, now) {
            return Ok(ExtendOutcome::NotHeld(Some(Reason::Expired))); // nothing is revived
        }
        lease.expires_at_ms = now + millis(ttl); // from now, not from the old end
        Ok(ExtendOutcome::Extended { expires_at_ms: lease.expires_at_ms })
    }

    fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool> {
        let (_, base, _) = Self::stored(key)?;
        cancel.check()?;
        let (table, now) = self.step();
        Ok(table.leases.get(&base).is_some_and(|lease| lives(lease, now)))
    }

    fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>> {
        Ok(self.lookup_raw(what, cancel)?.map(|lease| lease.sanitized()))
    }

    fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoRaw>> {
        let key = match what {
            Lookup::Key(key) => Some(Self::stored(key)?.1),
            Lookup::LockId(lock_id) => {
                validate_lock_id(lock_id)?;
                None
            }
        };
        cancel.check()?;
        let (table, now) = self.step();
        let key = match what {
            Lookup::Key(_) => key,
            Lookup::LockId(lock_id) => table.key_of(lock_id),
        };
        let lease = key.and_then(|key| table.leases.get(&key));
        Ok(lease.filter(|lease| lives(lease, now)).cloned())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::fencing("table", TimeAuthority::Client)
    }
}

fn grant(lease: &LockInfoRaw) -> Acquired {
    Acquired { lock_id: lease.lock_id.clone(), fence: lease.fence, expires_at_ms: lease.expires_at_ms }
}

/// What the suite does to the store behind the backend's back.
#[derive(Default)]
struct Bench(TableBackend);

impl Bench {
    fn with<T>(&self, key: &str, act: impl FnOnce(&mut Table, &str, &str) -> T) -> T {
        let (mut table, _) = self.0.step();
        act(&mut table, key, &format!("fence:{key}")) // the suite's keys are short and plain
    }
}

impl Harness for Bench {
    fn backend(&self) -> Arc<dyn LockBackend> {
        Arc::new(self.0.clone())
    }

    fn now_ms(&self) -> i64 {
        now_ms()
    }

    fn age(&self, key: &str, past_expiry_ms: i64) {
        self.with(key, |table, key, _| {
            if let Some(lease) = table.leases.get_mut(key) {
                lease.expires_at_ms = now_ms() - past_expiry_ms;
            }
        });
    }

    fn has_row(&self, key: &str) -> bool {
        self.with(key, |table, key, _| table.leases.contains_key(key))
    }

    fn remove_row(&self, key: &str) {
        self.with(key, |table, key, _| table.leases.remove(key));
    }

    fn counter(&self, key: &str) -> Option<u64> {
        self.with(key, |table, _, fence_key| table.counters.get(fence_key).copied())
    }

    fn set_counter(&self, key: &str, value: u64) {
        self.with(key, |table, _, fence_key| table.counters.insert(fence_key.to_owned(), value));
    }
}

#[allow(clippy::print_stdout)]
fn main() {
    syncguard_contract::run_all(&Bench::default());
    println!("the backend fulfils all {} cases of the contract", syncguard_contract::CASES.len());
}

// In a crate of your own, one test per case:
//
//     #[cfg(test)]
//     mod contract {
//         syncguard_contract::contract_tests!(super::Bench::default());
//     }
