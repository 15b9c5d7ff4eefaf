//! Waiters in order, of several processes, in a storm.

use std::time::Duration;

use syncguard::{LockGuard, LockOptions};

use crate::holder::Holder;
use crate::tickets::KEYS;
use crate::told::{granted, released};

impl Holder<'_> {
    /// One key in two, the first of them more often. One caller in five asks for no order, and one in four has a token,
    /// and so takes two messages.
    pub fn wait_in_order(&mut self) {
        let (key, ttl) = (KEYS[usize::from(self.random.below(8) == 0)], self.ttl());
        if self.random.below(5) == 0 {
            self.guarded(key, ttl);
            return;
        }
        let priority = if self.random.below(4) == 0 { 5 } else { 0 };
        let wait = Duration::from_millis(2000 + self.random.below(6000));
        let mut options = LockOptions::new().ttl(ttl).timeout(wait).heartbeat(self.heartbeat());
        options = options.fair(true).priority(priority);
        if self.random.below(4) == 0 {
            options = options.cancel(self.over);
        }
        let once = self.random.below(6) == 0;
        let bound = if once { self.operation } else { wait };
        // By it the table tells whose a ticket is.
        let options = self.noted(options, 9);
        if let Some(guard) = self.lock_in_order((key, priority), (ttl, bound), &options, once) {
            self.keep(guard, ttl);
        }
    }

    fn lock_in_order(
        &self,
        (key, priority): (&str, i32),
        (ttl, bound): (Duration, Duration),
        options: &LockOptions,
        once: bool,
    ) -> Option<LockGuard> {
        let n = self.begin_in_order(("acquire", key, 0, ttl), bound, priority);
        let result = if once {
            self.client.try_lock_with(key, options)
        } else {
            self.client.lock_with(key, options).map(Some)
        };
        self.end(n, || match &result {
            Ok(Some(guard)) => granted(guard.fence().get(), guard.expires_at_ms(), ttl),
            Ok(None) => "refused".to_owned(),
            Err(error) => self.unknown(error),
        });
        result.ok().flatten()
    }

    /// Whether no call has failed.
    pub fn practised_in_order(&mut self, key: &str, ttl: Duration) -> bool {
        let options = LockOptions::new().ttl(ttl).fair(true);
        let options = self.noted(options, 6);
        let name = format!("turn{key}");
        let Some(guard) = self.lock_in_order((&name, 0), (ttl, self.operation), &options, true) else {
            return false;
        };
        let fence = guard.fence().get();
        let asks = ("release", name.as_str(), fence, ttl);
        self.op(asks, self.operation, || guard.release(), released).is_ok()
    }
}
