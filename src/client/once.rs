//! Jobs that run once per slot, and where a run meets a caller's transaction.

use crate::backend::Slot;
use crate::client::PgLockClient;
use crate::error::Result;
use crate::leases::completion_error;
use crate::lock::{LockOptions, Run, RunOnce};
use crate::pg::guard_runtime;

impl PgLockClient {
    /// Runs a job once per slot, however many processes ask at the same time. See
    /// [`LockClient::run_once`](crate::LockClient::run_once), also for errors and what may remain held.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use std::time::Duration;
    /// use syncguard::{LockOptions, RunOnce, Slot};
    ///
    /// let daily = Slot::every(Duration::from_secs(86_400));
    /// let report = client.run_once("report", daily, &LockOptions::new(), |run| {
    ///     if run.is_held() { Ok(4711) } else { Err("stopped") }
    /// })?;
    /// if let RunOnce::Done(rows) = report {
    ///     println!("made, with {rows} rows");
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn run_once<T, E>(
        &self,
        name: &str,
        slot: Slot,
        options: &LockOptions,
        job: impl FnOnce(&Run) -> Result<T, E>,
    ) -> Result<RunOnce<T, E>> {
        self.locks.run_once(name, slot, options, job)
    }
}

impl Run {
    /// Marks this run's slot as done in the caller's transaction, which can only be committed while the run's lease
    /// is live and its fence the newest: effects that are written in the same transaction happen **exactly once**
    /// for a slot, whatever crashes.
    ///
    /// Call it **first** in the outermost transaction, and commit that before the closure returns: the end of the
    /// run then only checks whether the mark is there, and never writes it. One transaction per run; a second one
    /// fails. As long as it is open, no other run of the job begins; its commit is made durable
    /// (`synchronous_commit`).
    ///
    /// The transaction's connection must reach the database that the lock tables are in, and its role needs
    /// `SELECT` on both, and `INSERT` and `UPDATE` on the counters.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use syncguard::postgres::{Client, NoTls};
    /// # let mut connection = Client::connect("postgresql://app@db.example/app", NoTls).unwrap();
    /// # use std::time::Duration;
    /// use syncguard::{LockOptions, Slot};
    ///
    /// let daily = Slot::every(Duration::from_secs(86_400));
    /// let _ = client.run_once("interest", daily, &LockOptions::new(), |run| {
    ///     let mut transaction = connection.transaction()?;
    ///     run.complete_in(&mut transaction)?; // first of all
    ///     transaction.execute("UPDATE account SET balance = balance * 1.0001", &[])?;
    ///     transaction.commit()?;
    ///     Ok::<_, Box<dyn std::error::Error>>(())
    /// })?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`LockGuard::fence_transaction`](crate::LockGuard::fence_transaction); `Aborted` also where an earlier transaction has completed this
    /// run; `InvalidArgument` where the slot was claimed at the start, or the leases are not in a database. After
    /// any of them except `InvalidArgument` the transaction can only be rolled back.
    ///
    /// # Blocking
    ///
    /// As long as the transaction's own statements may, by its `lock_timeout` and `statement_timeout`.
    ///
    /// # Cancellation
    ///
    /// No token ends it.
    pub fn complete_in(&self, transaction: &mut postgres::Transaction<'_>) -> Result<()> {
        let statements = self.begin_completion()?;
        match guard_runtime(|| transaction.simple_query(&statements))? {
            Ok(_) => Ok(()),
            Err(error) => Err(completion_error(error).with_key(self.key())),
        }
    }

    /// The statements that [`complete_in`](Self::complete_in) runs, as text, for a transaction of another driver:
    /// run them **first** in the outermost transaction, and commit that before the closure returns. If they fail,
    /// roll back.
    ///
    /// From this call on, the end of the run only checks whether the mark is there, as with `complete_in`. The text
    /// is complete and has no parameters. **Sensitive**: it contains the name of the job and the lock id.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// # use syncguard::postgres::{Client, NoTls};
    /// # let mut connection = Client::connect("postgresql://app@db.example/app", NoTls).unwrap();
    /// # use std::time::Duration;
    /// use syncguard::{LockOptions, Slot};
    ///
    /// let daily = Slot::every(Duration::from_secs(86_400));
    /// let _ = client.run_once("interest", daily, &LockOptions::new(), |run| {
    ///     connection.batch_execute("BEGIN")?;
    ///     connection.batch_execute(&run.completion_sql()?)?;
    ///     connection.batch_execute("UPDATE account SET balance = balance * 1.0001; COMMIT")?;
    ///     Ok::<_, Box<dyn std::error::Error>>(())
    /// })?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where the slot was claimed at the start, in a forked child, or where the leases are not in
    /// a database. Whether the run may be completed is checked where the text runs, not here.
    pub fn completion_sql(&self) -> Result<String> {
        self.begin_completion()
    }
}
