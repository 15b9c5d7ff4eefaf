//! Fenced transactions, played: what is decided here becomes a statement that succeeds or fails in a transaction of
//! the caller's, on any server.

use std::sync::atomic::Ordering;

use crate::backend::outside_the_database;
use crate::error::Result;
use crate::memory::MemoryBackend;
use crate::memory::store::StoredKey;
use crate::model::fence::Fence;
use crate::model::lock_id::LockId;

const CURRENT: &str = "SELECT '1'::pg_catalog.int4";
/// Fails as a stale fence does on PostgreSQL: with 22P02, so that the transaction cannot commit.
const STALE: &str = "SELECT 'memory: the lease is over or a newer holder exists; this transaction cannot commit'\
                     ::pg_catalog.int4";

/// Fenced transactions.
impl MemoryBackend {
    /// Plays [`fence_transaction`](crate::LockGuard::fence_transaction) and `fence_sql` of guards, sets and terms
    /// from now on, for all clones, where otherwise they are refused: for programs whose data is in a database while
    /// their locks are in this double.
    ///
    /// Whether the transaction can commit is decided by the leases here, when the call is made: it can while the
    /// guard's lease is live and its fence the newest, and after [`take_over`](Self::take_over),
    /// [`expire`](Self::expire) or [`remove`](Self::remove) it cannot, as on PostgreSQL. What a double cannot do: the
    /// transaction keeps nobody from a grant while it is open, and rights and READ ONLY are not looked at.
    /// [`Run::complete_in`](crate::Run::complete_in) stays refused.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// let guard = client.lock("account:7")?;
    /// assert!(guard.fence_sql().is_err()); // a double is in no database
    /// memory.play_fences();
    /// let passes = guard.fence_sql()?;
    /// memory.take_over("account:7")?;
    /// let fails = guard.fence_sql()?; // with SQLSTATE 22P02, wherever it runs
    /// assert_ne!(passes, fails);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn play_fences(&self) {
        self.shared.plays_fences.store(true, Ordering::SeqCst);
    }

    /// The statement for leases of these keys, with this fence and, where it is known, this lock id.
    pub(super) fn played<'a>(
        &self,
        leases: impl IntoIterator<Item = (&'a str, Fence, Option<&'a str>)>,
    ) -> Result<String> {
        if !self.shared.plays_fences.load(Ordering::SeqCst) {
            return Err(outside_the_database());
        }
        let mut all = true;
        for (key, fence, lock_id) in leases {
            let stored = self.stored_lease(key)?;
            let lock_id = lock_id.map(LockId::parse).transpose()?;
            all &= self.is_current(&stored, fence, lock_id.as_ref());
        }
        Ok(if all { CURRENT } else { STALE }.to_owned())
    }

    fn is_current(&self, key: &StoredKey, fence: Fence, lock_id: Option<&LockId>) -> bool {
        self.shared.decide(|store, now| {
            let live = match lock_id {
                Some(id) => store.live_by_id(id.as_str(), now),
                None => store.live_by_key(&key.base, now),
            };
            let newest = store.counter(&key.fence) == Some(fence.get());
            newest && live.is_some_and(|live| live.fence == fence && live.key == key.user.as_str())
        })
    }
}
