//! Semaphores on PostgreSQL.

use crate::client::PgLockClient;
use crate::error::Result;
use crate::lock::Semaphore;

impl PgLockClient {
    /// A counting semaphore with this name, of which at most `limit` (1 to 1024) permits are held at a time,
    /// on all machines together. No I/O: only held permits are stored. See [`Semaphore`].
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// let reports = client.semaphore("reports", 3)?;
    /// let permit = reports.acquire()?;
    /// println!("{} of {} reports are being made", reports.in_use()?, reports.limit());
    /// permit.release()?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::ErrorCode::InvalidArgument) for another limit, and for a name that is not a valid key.
    pub fn semaphore(&self, name: &str, limit: u32) -> Result<Semaphore> {
        self.locks.semaphore(name, limit)
    }
}
