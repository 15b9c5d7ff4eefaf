//! What a test does to a [`MemoryBackend`], and what it sees in it.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{AcquireResult, Acquired};
use crate::error::Result;
use crate::memory::MemoryBackend;
use crate::memory::fault::{Call, Fault, Gate, Kind, Loss};
use crate::memory::shared::Counts;
use crate::memory::store::OrderedLoss;
use crate::model::lock_id::LockId;
use crate::model::time::{MAX_TTL, TIME_TOLERANCE_MS, Ttl, deadline_after};

/// Time.
impl MemoryBackend {
    /// Lets time pass: the server's and, on a [manual](MemoryBackend::manual) clock, the local
    /// one, together. Wakes guards and calls that wait for it. On the system's time only the
    /// server's clock can be moved.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// # use std::time::Duration;
    /// let guard = client.lock("report")?;
    /// memory.advance(Duration::from_secs(31));
    /// assert!(!guard.is_held());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn advance(&self, by: Duration) {
        self.shared.state.lock().time.advance(by);
        self.shared.clock.advance(by);
    }

    /// Moves only the server's clock, forward or back: as if it was set, or a standby with another
    /// time took over. The holders' own view of their leases does not change.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// let guard = client.lock("report")?;
    /// memory.shift_server_clock(3_600_000); // an hour ahead: for the server the lease is over
    /// assert_eq!(memory.live_leases(), 0);
    /// assert!(guard.is_held()); // until it hears of that
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn shift_server_clock(&self, by_ms: i64) {
        self.shared.state.lock().time.shift_ms(by_ms);
    }

    /// Sets only the server's clock, in Unix milliseconds.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// memory.set_server_time(1_700_000_000_000);
    /// assert_eq!(memory.server_time(), 1_700_000_000_000);
    /// ```
    pub fn set_server_time(&self, now_ms: i64) {
        self.shared.state.lock().time.set_ms(now_ms);
    }

    /// The server's time, in Unix milliseconds.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// let guard = client.lock("report")?;
    /// assert_eq!(guard.expires_at_ms(), memory.server_time() + 30_000);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn server_time(&self) -> i64 {
        self.shared.state.lock().time.now_ms()
    }
}

/// What happens to leases behind their holder's back.
impl MemoryBackend {
    /// Another holder takes the key, if it is free, and keeps it for a year.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// memory.contend("report")?;
    /// assert!(client.try_lock("report")?.is_none());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn contend(&self, key: &str) -> Result<AcquireResult> {
        let (stored, id, ttl) = (self.stored_lease(key)?, LockId::generate()?, Ttl::new(MAX_TTL)?);
        self.shared
            .decide(|store, now| store.acquire(&stored, id.as_str(), ttl, now))
            .map(AcquireResult::from)
    }

    /// Another holder has the key from now on, for five minutes and with a newer fence, whoever
    /// held it: as a holder finds it that was paused for too long.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// let guard = client.lock("report")?;
    /// let newer = memory.take_over("report")?;
    /// assert!(newer.fence > guard.fence());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn take_over(&self, key: &str) -> Result<Acquired> {
        let (stored, id) = (self.stored_lease(key)?, LockId::generate()?);
        let ttl = Ttl::new(TAKER_TTL)?;
        self.shared
            .decide(|store, now| store.grant(&stored, id.as_str(), ttl, now))
            .map(|grant| grant.acquired)
    }

    /// Makes the key's lease expire, tolerance included. Returns whether there was a row.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// memory.contend("report")?;
    /// assert!(memory.expire("report")?);
    /// assert!(client.try_lock("report")?.is_some());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn expire(&self, key: &str) -> Result<bool> {
        self.age(key, TIME_TOLERANCE_MS)
    }

    /// Makes the key's lease end this many milliseconds ago; a negative number leaves it that long to live.
    /// Returns whether there was a row.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// memory.contend("report")?;
    /// memory.age("report", -1)?; // a millisecond is left
    /// assert!(client.try_lock("report")?.is_none());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn age(&self, key: &str, past_expiry_ms: i64) -> Result<bool> {
        let stored = self.stored_lease(key)?;
        Ok(self.shared.decide(|store, now| store.age(&stored.base, past_expiry_ms, now)))
    }

    /// Deletes the key's row, as an operator would. Returns whether there was one.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// let guard = client.lock("report")?;
    /// assert!(memory.remove("report")?);
    /// assert_eq!(guard.release()?, syncguard::ReleaseResult::NotHeld);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn remove(&self, key: &str) -> Result<bool> {
        let stored = self.stored_lease(key)?;
        Ok(self.shared.decide(|store, _| store.remove(&stored.base)))
    }

    /// Sets what the next renewal or extend of the key's lease finds. A later call replaces an earlier one.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// # use std::time::Duration;
    /// use syncguard::memory::Loss;
    ///
    /// let guard = client.lock("report")?;
    /// memory.lose_on_next_renewal("report", Loss::TakenOver)?;
    /// memory.advance(Duration::from_secs(10)); // a renewal is due
    /// assert!(guard.lost().wait_timeout(Duration::from_secs(5)));
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn lose_on_next_renewal(&self, key: &str, loss: Loss) -> Result<()> {
        let (key, taker) = (self.stored_lease(key)?, LockId::generate()?);
        let ordered = OrderedLoss { loss, key, taker, ttl: Ttl::new(TAKER_TTL)? };
        self.shared.decide(|store, _| store.order_loss(ordered));
        Ok(())
    }

    /// Sets the key's fence counter, for example near [`FENCE_MAX`](crate::FENCE_MAX).
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// memory.set_counter("report", 41)?;
    /// assert_eq!(client.lock("report")?.fence().get(), 42);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn set_counter(&self, key: &str, value: u64) -> Result<()> {
        let stored = self.stored_lease(key)?;
        self.shared.decide(|store, _| store.set_counter(&stored.fence, value));
        Ok(())
    }
}

/// What happens to calls.
impl MemoryBackend {
    /// Makes the next call of this kind fail; repeated, the calls after it.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// use syncguard::{ErrorCode, memory::Call};
    ///
    /// memory.fail_next(Call::Acquire, ErrorCode::ServiceUnavailable);
    /// assert!(client.try_lock("report").is_err());
    /// assert!(client.try_lock("report")?.is_some());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn fail_next(&self, call: Call, fault: impl Into<Fault>) {
        self.shared.orders.lock().push_next(call, fault.into());
    }

    /// Makes every call of this kind fail, until [`heal`](MemoryBackend::heal).
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// use syncguard::{ErrorCode, memory::Call};
    ///
    /// memory.fail_every(Call::Acquire, ErrorCode::RateLimited);
    /// assert!(client.try_lock("report").is_err() && client.try_lock("report").is_err());
    /// ```
    pub fn fail_every(&self, call: Call, fault: impl Into<Fault>) {
        self.shared.orders.lock().set_every(call, fault.into());
    }

    /// Makes every call of every kind fail: the server is away.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// memory.fail_all(syncguard::ErrorCode::ServiceUnavailable);
    /// assert!(client.try_lock("report").is_err() && client.is_locked("report").is_err());
    /// ```
    pub fn fail_all(&self, fault: impl Into<Fault>) {
        let fault = fault.into();
        for call in Call::ALL {
            self.fail_every(call, fault.clone());
        }
    }

    /// The next call of this kind hangs before it does anything, until the gate is opened or its
    /// cancel token fires (`Aborted`) or its deadline comes (`NetworkTimeout`); then it has
    /// changed nothing.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// # use std::time::Duration;
    /// use syncguard::memory::Call;
    ///
    /// let gate = memory.hang_next(Call::Acquire);
    /// std::thread::scope(|scope| {
    ///     let call = scope.spawn(|| client.try_lock("report"));
    ///     assert!(gate.wait_for_calls(1, Duration::from_secs(5)));
    ///     gate.open();
    ///     assert!(call.join().unwrap().unwrap().is_some());
    /// });
    /// ```
    pub fn hang_next(&self, call: Call) -> Gate {
        let gate = self.shared.gate();
        self.fail_next(call, Fault(Kind::Hang(Arc::clone(&gate.0))));
        gate
    }

    /// Every call of this kind hangs like that, until the gate is opened.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// # use std::time::Duration;
    /// use syncguard::memory::Call;
    ///
    /// let gate = memory.hang_every(Call::IsLocked);
    /// std::thread::scope(|scope| {
    ///     let calls = [(); 2].map(|()| scope.spawn(|| client.is_locked("report")));
    ///     assert!(gate.wait_for_calls(2, Duration::from_secs(5)));
    ///     gate.open();
    ///     assert!(calls.into_iter().all(|call| !call.join().unwrap().unwrap()));
    /// });
    /// ```
    pub fn hang_every(&self, call: Call) -> Gate {
        let gate = self.shared.gate();
        self.fail_every(call, Fault(Kind::Hang(Arc::clone(&gate.0))));
        gate
    }

    /// The next call of this kind does its work, and its answer hangs. A deadline that comes
    /// meanwhile leaves the outcome unknown, and a change that may be made is not cancelled.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// # use std::time::Duration;
    /// use syncguard::memory::Call;
    ///
    /// let gate = memory.hang_answer_of_next(Call::Acquire);
    /// std::thread::scope(|scope| {
    ///     let call = scope.spawn(|| client.try_lock("report"));
    ///     assert!(gate.wait_for_calls(1, Duration::from_secs(5)));
    ///     memory.advance(Duration::from_secs(6)); // granted, and its time is over
    ///     assert!(call.join().unwrap().unwrap_err().is_outcome_unknown());
    /// });
    /// ```
    pub fn hang_answer_of_next(&self, call: Call) -> Gate {
        let gate = self.shared.gate();
        self.fail_next(call, Fault(Kind::HangAnswer(Arc::clone(&gate.0))));
        gate
    }

    /// Removes all faults that are still waiting. Gates stay as they are.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// memory.fail_all(syncguard::ErrorCode::ServiceUnavailable);
    /// memory.heal();
    /// assert!(client.try_lock("report")?.is_some());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn heal(&self) {
        self.shared.orders.lock().clear();
        self.shared.decide(|store, _| store.clear_losses());
    }
}

/// What a test sees.
impl MemoryBackend {
    /// How many leases are live.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// let guard = client.lock("report")?;
    /// assert_eq!(memory.live_leases(), 1);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn live_leases(&self) -> usize {
        self.shared.decide(|store, now| store.live_count(now))
    }

    /// How many rows there are, expired ones included: nothing removes a row at its expiry.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// memory.contend("report")?;
    /// memory.expire("report")?;
    /// assert_eq!((memory.live_leases(), memory.rows()), (0, 1));
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shared.decide(|store, _| store.row_count())
    }

    /// Whether the key has a row, live or expired.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// let guard = client.lock("report")?;
    /// assert!(memory.has_row("report"));
    /// guard.release()?;
    /// assert!(!memory.has_row("report"));
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn has_row(&self, key: &str) -> bool {
        self.stored_lease(key).is_ok_and(|stored| self.shared.decide(|store, _| store.has_row(&stored.base)))
    }

    /// The key's fence counter; `None` if it was never granted, or is not a key.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// assert_eq!(memory.counter("report"), None);
    /// client.lock("report")?;
    /// assert_eq!(memory.counter("report"), Some(1));
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn counter(&self, key: &str) -> Option<u64> {
        let stored = self.stored_lease(key).ok()?;
        self.shared.decide(|store, _| store.counter(&stored.fence))
    }

    /// How many calls of this kind have arrived, without those refused for their arguments.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// use syncguard::memory::Call;
    ///
    /// client.is_locked("report")?;
    /// assert_eq!(memory.calls(Call::IsLocked), 1);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.shared.counts.lock().arrived.get(&call).copied().unwrap_or(0)
    }

    /// Waits until this many calls of this kind have been answered, for at most `limit` of real time.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// # use std::time::Duration;
    /// use syncguard::memory::Call;
    ///
    /// let guard = client.lock("report")?;
    /// memory.advance(Duration::from_secs(10)); // a renewal is due
    /// assert!(memory.wait_for_answers(Call::Renew, 1, Duration::from_secs(5)));
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use = "false means that the calls did not come"]
    pub fn wait_for_answers(&self, call: Call, calls: u64, limit: Duration) -> bool {
        let end = deadline_after(limit);
        let missing = |counts: &mut Counts| counts.answered.get(&call).copied().unwrap_or(0) < calls;
        self.shared.answered.wait_while(self.shared.counts.lock(), end, missing).1
    }

    /// How often [`close`](crate::LockBackend::close) was called. The leases of a closed backend
    /// stay, and so do its clones: it stands for the server as well as for its clients.
    ///
    /// ```
    /// # let memory = syncguard::MemoryBackend::manual();
    /// # let client = syncguard::LockClient::new(memory.clone());
    /// # use std::time::Duration;
    /// client.close(Duration::from_secs(5))?;
    /// assert_eq!(memory.closes(), 1);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn closes(&self) -> u64 {
        self.shared.counts.lock().closes
    }
}

/// How long a holder that a test has invented keeps a key it took over.
const TAKER_TTL: Duration = Duration::from_secs(300);
