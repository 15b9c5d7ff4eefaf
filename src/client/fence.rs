//! Fenced transactions: where a guard meets a caller's transaction.

use crate::backend::LockBackend;
use crate::error::Result;
use crate::leases::fence_error;
use crate::lock::{LockGuard, MultiGuard, Term};
use crate::model::fence::Fence;
use crate::pg::guard_runtime;

impl LockGuard {
    /// Makes the caller's transaction impossible to commit unless this guard's lease is live and its
    /// fence the key's newest: the complete answer to a holder that was paused and wakes up late.
    ///
    /// Call it **first** in the outermost transaction that writes the protected data. As long as
    /// that transaction is open, no newer holder is granted; if the lease is already over, the
    /// statement fails in the server, so that the transaction cannot be committed even if this error
    /// is ignored. (Do not ignore it: the driver's `commit()` then rolls back and returns `Ok`.) It locks the key's counter row (`FOR SHARE`,
    /// <https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS>): keep the
    /// transaction short, because the next holder waits for it. Inside a savepoint the protection ends with a
    /// rollback to that savepoint.
    ///
    /// The transaction's connection must reach the database that the lock tables are in, and its
    /// role needs `SELECT` on both and `UPDATE (key_debug)` on the counters. In any other database the
    /// check fails, even if the same key has the same fence there: the lease's row must carry this
    /// guard's lock id.
    ///
    /// For a reader it guarantees that no writer has had the key since its grant, and none gets it before the
    /// transaction ends. It needs `SELECT` on the table of members, too.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use syncguard::postgres::{Client, NoTls};
    /// # let mut connection = Client::connect("postgresql://app@db.example/app", NoTls).unwrap();
    /// let guard = client.lock("account:7")?;
    /// let mut transaction = connection.transaction().unwrap();
    /// guard.fence_transaction(&mut transaction)?; // first of all
    /// transaction.execute("UPDATE account SET balance = balance - 5 WHERE id = 7", &[]).unwrap();
    /// transaction.commit().unwrap();
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `Aborted` when the lease is over; `InvalidArgument` in a READ ONLY transaction, or in a child
    /// that was forked after the grant;
    /// `ServiceUnavailable` (40001) where a REPEATABLE READ or SERIALIZABLE transaction began before
    /// the newest grant. After any of them the transaction can only be rolled back.
    ///
    /// # Blocking
    ///
    /// As long as the transaction's own statements may, by its `lock_timeout` and `statement_timeout`:
    /// its connection is the caller's. The wait for the counter row is as short as another's acquire.
    pub fn fence_transaction(&self, transaction: &mut postgres::Transaction<'_>) -> Result<()> {
        run_check(transaction, &self.fence_sql()?).map_err(|error| error.with_key(self.key()))
    }

    /// The statement that [`fence_transaction`](Self::fence_transaction) runs, as text, for a transaction of
    /// another driver: run it **first** in the outermost transaction that writes the protected data. If it
    /// fails, roll back; if you ignore the failure, the server turns the `COMMIT` into a rollback.
    ///
    /// The text is complete and has no parameters. **Sensitive**: it contains the key and the lock id.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use syncguard::postgres::{Client, NoTls};
    /// # let mut connection = Client::connect("postgresql://app@db.example/app", NoTls).unwrap();
    /// let guard = client.lock("account:7")?;
    /// connection.batch_execute("BEGIN").unwrap();
    /// connection.batch_execute(&guard.fence_sql()?).unwrap(); // 22P02: the lease is over, roll back
    /// connection.batch_execute("UPDATE account SET balance = balance - 5 WHERE id = 7; COMMIT").unwrap();
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` in a child that was forked after the grant, and on a backend outside PostgreSQL.
    /// Whether the lease is live is checked where the text runs, not here.
    pub fn fence_sql(&self) -> Result<String> {
        self.check_process()?;
        if self.is_shared() {
            return self.backend().fence_statement_shared(self.key(), self.fence(), self.lock_id());
        }
        self.backend().fence_statement(self.key(), self.fence(), Some(self.lock_id()))
    }
}

impl Term {
    /// Makes the caller's transaction impossible to commit unless this term is the newest of its key and its
    /// lease is live: writes of a leader that was paused and wakes up late are refused. See
    /// [`LockGuard::fence_transaction`], also for errors.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use syncguard::postgres::{Client, NoTls};
    /// # let mut connection = Client::connect("postgresql://app@db.example/app", NoTls).unwrap();
    /// use std::ops::ControlFlow::{Break, Continue};
    /// use syncguard::LockOptions;
    ///
    /// client.elect("scheduler", &LockOptions::new(), |term| {
    ///     let mut transaction = connection.transaction().unwrap();
    ///     if term.fence_transaction(&mut transaction).is_err() {
    ///         return Continue(()); // the transaction is rolled back; another process leads
    ///     }
    ///     transaction.execute("UPDATE job SET state = 'started' WHERE id = 7", &[]).unwrap();
    ///     transaction.commit().unwrap();
    ///     Break(())
    /// })?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Blocking
    ///
    /// As long as the transaction's own statements may, by its `lock_timeout` and `statement_timeout`.
    ///
    /// # Cancellation
    ///
    /// No token ends it.
    pub fn fence_transaction(&self, transaction: &mut postgres::Transaction<'_>) -> Result<()> {
        self.guard().fence_transaction(transaction)
    }

    /// The statement that [`fence_transaction`](Self::fence_transaction) runs, as text, for a transaction of
    /// another driver: see [`LockGuard::fence_sql`]. **Sensitive**: it contains the key and the lock id.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # fn in_a_transaction(check: &str) {}
    /// use std::ops::ControlFlow::Break;
    /// use syncguard::LockOptions;
    ///
    /// client.elect("scheduler", &LockOptions::new(), |term| Break(term.fence_sql().map(|sql| in_a_transaction(&sql))))??;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn fence_sql(&self) -> Result<String> {
        self.guard().fence_sql()
    }
}

impl MultiGuard {
    /// Makes the caller's transaction impossible to commit unless all of these leases are live and their fences
    /// the newest, in one statement. See [`LockGuard::fence_transaction`], which this is for several keys.
    ///
    /// It locks the counters in the order of the keys. If you fence several guards one by one in a
    /// transaction, do so in the order of their keys, too, or two transactions may deadlock (40P01).
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use syncguard::postgres::{Client, NoTls};
    /// # let mut connection = Client::connect("postgresql://app@db.example/app", NoTls).unwrap();
    /// let guard = client.lock_all(&["account:7", "account:9"])?;
    /// let mut transaction = connection.transaction().unwrap();
    /// guard.fence_transaction(&mut transaction)?; // first of all
    /// transaction.execute("UPDATE account SET balance = balance - 5 WHERE id = 7", &[]).unwrap();
    /// transaction.execute("UPDATE account SET balance = balance + 5 WHERE id = 9", &[]).unwrap();
    /// transaction.commit().unwrap();
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `Aborted` when one of the leases is over; the others as there. After any of them the transaction can
    /// only be rolled back.
    ///
    /// # Blocking
    ///
    /// As long as the transaction's own statements may, by its `lock_timeout` and `statement_timeout`.
    ///
    /// # Cancellation
    ///
    /// No token ends it.
    pub fn fence_transaction(&self, transaction: &mut postgres::Transaction<'_>) -> Result<()> {
        run_check(transaction, &self.fence_sql()?)
    }

    /// The statement that [`fence_transaction`](Self::fence_transaction) runs, as text, for a transaction of
    /// another driver: see [`LockGuard::fence_sql`]. **Sensitive**: it contains the keys and the lock ids.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # fn in_a_transaction(check: &str) {}
    /// let guard = client.lock_all(&["account:7", "account:9"])?;
    /// in_a_transaction(&guard.fence_sql()?);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`LockGuard::fence_sql`].
    pub fn fence_sql(&self) -> Result<String> {
        self.check_process()?;
        self.backend().fence_statement_all(&self.grants())
    }
}

pub(super) fn assert_fence(
    backend: &dyn LockBackend,
    transaction: &mut postgres::Transaction<'_>,
    key: &str,
    fence: Fence,
    lock_id: Option<&str>,
) -> Result<()> {
    let statement = backend.fence_statement(key, fence, lock_id)?;
    run_check(transaction, &statement).map_err(|error| error.with_key(key))
}

fn run_check(transaction: &mut postgres::Transaction<'_>, statement: &str) -> Result<()> {
    guard_runtime(|| transaction.simple_query(statement))?.map(drop).map_err(fence_error)
}
