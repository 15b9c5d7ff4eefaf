//! Readers and writers of shared keys, in a storm. Readers call the key `key~`, for the checker.

use std::thread;
use std::time::Duration;

use syncguard::{LockGuard, LockOptions};

use crate::holder::Holder;
use crate::registers::read_fenced;
use crate::told::{extended, granted, released};

impl Holder<'_> {
    /// One key in two, for a reader or, one time in four, for a writer.
    pub fn share(&mut self) {
        let (key, ttl, wait) = (format!("read{}", self.random.below(2)), self.ttl(), self.wait());
        if self.random.below(4) == 0 {
            self.guarded(&key, ttl);
            return;
        }
        let options = LockOptions::new().ttl(ttl).timeout(wait).heartbeat(self.heartbeat());
        let once = self.random.below(4) == 0;
        let bound = if once { self.operation } else { wait };
        let options = self.noted(options, 4);
        let Some(guard) = self.read_lock(&key, (ttl, bound), &options, once) else { return };
        self.reads(&guard, ttl);
        match self.random.below(12) {
            0 => drop(guard.leak()),
            1 => drop(guard),
            _ => drop(self.leave(guard, ttl)),
        }
    }

    pub fn read_lock(
        &self,
        key: &str,
        (ttl, bound): (Duration, Duration),
        options: &LockOptions,
        once: bool,
    ) -> Option<LockGuard> {
        let call = || {
            if once {
                self.client.try_read_lock_with(key, options)
            } else {
                self.client.read_lock_with(key, options).map(Some)
            }
        };
        let result = self.op(("acquire", &format!("{key}~"), 0, ttl), bound, call, |guard| match guard {
            Ok(Some(guard)) => granted(guard.fence().get(), guard.expires_at_ms(), ttl),
            Ok(None) => "refused".to_owned(),
            Err(error) => self.unknown(error),
        });
        result.ok().flatten()
    }

    /// Whether the call has not failed.
    pub fn leave(&self, guard: LockGuard, ttl: Duration) -> bool {
        let (name, fence) = (format!("{}~", guard.key()), guard.fence().get());
        let asks = ("release", name.as_str(), fence, ttl);
        self.op(asks, self.operation, || guard.release(), released).is_ok()
    }

    fn reads(&mut self, guard: &LockGuard, ttl: Duration) {
        let (name, fence) = (format!("{}~", guard.key()), guard.fence().get());
        let mut longest = ttl;
        for _ in 0..self.rounds() {
            if !self.believe(&name, fence, ttl, || guard.is_held()) {
                // Late work, as of a holder that does not look.
                self.read(guard, ttl);
                return;
            }
            match self.random.below(30) {
                0..6 => self.read(guard, ttl),
                6..8 => {
                    let asked = self.asked(ttl);
                    longest = longest.max(asked);
                    let asks = ("extend", name.as_str(), fence, asked);
                    let call = || guard.extend(asked);
                    let _ = self.op(asks, self.operation, call, |result| extended(result, asked, longest));
                }
                _ => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Of what writers of the key write in their fenced transactions.
    fn read(&mut self, guard: &LockGuard, ttl: Duration) {
        let register = format!("T:{}", guard.key());
        let nap = Duration::from_millis(self.random.below(25));
        let mut sql = self.connection();
        let call = || {
            let fence = |transaction: &mut postgres::Transaction<'_>| guard.fence_transaction(transaction);
            sql.as_mut().map(|sql| read_fenced(sql, fence, &register, nap))
        };
        let asks = ("read", register.as_str(), guard.fence().get(), ttl);
        let read = self.op(asks, Duration::ZERO, call, |read| match read {
            Some(Ok(Some((first, last)))) if first == last => format!("ok {first}"),
            Some(Ok(Some(_))) => "torn".to_owned(),
            Some(Ok(None)) => "refused".to_owned(),
            Some(Err(_)) => "unknown -".to_owned(),
            None => "Unconnected".to_owned(),
        });
        self.sql = sql.filter(|_| matches!(read, Some(Ok(_))));
    }
}
