//! Leader election: campaigns, and who leads.

use std::ops::ControlFlow;

use crate::client::PgLockClient;
use crate::error::Result;
use crate::lock::{Leader, LockOptions, Term};

impl PgLockClient {
    /// Campaigns for the leadership of `key`, runs `lead` for each term that this client wins, and campaigns
    /// again, until `lead` returns `Break`: its value is the answer. `Continue` steps down first.
    ///
    /// The term is the plain lease of the key: renewed while `lead` runs, released when it returns. After a leader
    /// that steps down, another candidate leads as soon as it hears of the release; after one whose process dies, a
    /// second after the ttl. See [`LockClient::elect`](crate::LockClient::elect) for everything else, also for errors.
    ///
    /// ```no_run
    /// # fn next_job() {}
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// use std::ops::ControlFlow::{Break, Continue};
    /// use syncguard::{CancelToken, LockOptions};
    ///
    /// let shutdown = CancelToken::new();
    /// client.elect("scheduler", &LockOptions::new().cancel(&shutdown), |term| {
    ///     while term.is_held() {
    ///         if shutdown.is_cancelled() {
    ///             return Break(()); // steps down: another process leads at once
    ///         }
    ///         next_job();
    ///     }
    ///     Continue(()) // lost: campaign again
    /// })?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Blocking
    ///
    /// Without a limit: neither `timeout` nor `max_retries` of the options ends a campaign.
    ///
    /// # Cancellation
    ///
    /// A token ends a campaign, not a term: `lead` must check it.
    pub fn elect<T>(
        &self,
        key: &str,
        options: &LockOptions,
        lead: impl FnMut(&Term) -> ControlFlow<T>,
    ) -> Result<T> {
        self.locks.elect(key, options, lead)
    }

    /// Who leads, by the server's clock alone: the term of the holder of the key, or `None`. Plain reads: one
    /// for the term, two for its owner; see [`LockClient::leader`](crate::LockClient::leader).
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// match client.leader("scheduler")? {
    ///     Some(leader) => println!("term {} since {} ms", leader.term, leader.since_ms),
    ///     None => println!("nobody leads"),
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn leader(&self, key: &str) -> Result<Option<Leader>> {
        self.locks.leader(key)
    }
}
