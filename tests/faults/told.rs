//! How a holder prints what it was told.

use std::sync::atomic::Ordering;
use std::time::Duration;

use postgres::Client;
use syncguard::{ExtendResult, LockError, LockOptions, ReleaseResult};

use crate::history::{MS, now};
use crate::holder::Holder;
use crate::registers::connect;

impl Holder<'_> {
    /// Says that a call begins; the answer says how it ended.
    pub fn op<R>(
        &self,
        what: (&str, &str, u64, Duration),
        bound: Duration,
        call: impl FnOnce() -> R,
        outcome: impl FnOnce(&R) -> String,
    ) -> R {
        let n = self.begin(what, bound, 0);
        let result = call();
        self.end(n, || outcome(&result));
        result
    }

    /// Says that a call begins, whose end is said later. Of a semaphore with so many permits.
    pub fn begin(
        &self,
        (what, key, fence, ttl): (&str, &str, u64, Duration),
        bound: Duration,
        limit: u32,
    ) -> u64 {
        self.begin_with((what, key, fence, ttl), bound, &limit.to_string())
    }

    /// The same of whoever asks for an order.
    pub fn begin_in_order(&self, asks: (&str, &str, u64, Duration), bound: Duration, priority: i32) -> u64 {
        self.begin_with(asks, bound, &format!("0 {priority}"))
    }

    fn begin_with(
        &self,
        (what, key, fence, ttl): (&str, &str, u64, Duration),
        bound: Duration,
        more: &str,
    ) -> u64 {
        let n = self.noted.take().unwrap_or_else(|| self.number());
        let (ttl, bound) = (ttl.as_nanos(), bound.as_nanos());
        self.stalled.set(stalled());
        self.say(&format!("S {n} {what} {key} {fence} {ttl} {bound} {} {more}", now()));
        n
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// With a note that has the number of the call that comes next, so many times in twelve.
    pub fn noted(&mut self, options: LockOptions, times: u64) -> LockOptions {
        if !self.kinds || self.random.below(12) >= times {
            return options;
        }
        let n = self.number();
        self.noted.set(Some(n));
        options.note(format!("{}.{n}", self.process))
    }

    /// Somebody is said to have this key, under this fence.
    pub fn names(&self, key: &str, fence: u64, owner: Option<&str>, note: Option<&str>) {
        if owner.or(note).is_some() {
            let (owner, note) = (owner.unwrap_or("-"), note.unwrap_or("-"));
            self.named.borrow_mut().push(format!("{} {fence} {owner} {note}", shown(key)));
        }
    }

    /// Says how it ended. The time is taken before anybody looks what became of it.
    pub fn end(&self, n: u64, outcome: impl FnOnce() -> String) {
        let at = now();
        let stalled = stalled().saturating_sub(self.stalled.get());
        if stalled > MS {
            self.say(&format!("D {n} {stalled}"));
        }
        let outcome = outcome();
        for named in self.named.take() {
            self.say(&format!("W {n} {named}"));
        }
        self.say(&format!("E {n} {at} {outcome}"));
    }

    pub fn say(&self, line: &str) {
        self.parent.say(line);
    }

    /// A failure, with whom it names, and for an unknown outcome what is in the table.
    pub fn unknown(&self, error: &LockError) -> String {
        if let (Some(key), Some((fence, owner, note))) = (error.key(), who_holds(&error.to_string())) {
            self.names(key, fence, owner, note);
        }
        if error.is_outcome_unknown() {
            return format!("unknown {}", self.is_there(error.lock_id().unwrap_or_default()));
        }
        failed(error)
    }

    /// Whether a lease of an unknown outcome is in the table.
    fn is_there(&self, lock_id: &str) -> String {
        let query = "SELECT FROM syncguard_locks WHERE lock_id = $1 UNION ALL SELECT FROM syncguard_members WHERE lock_id = $1";
        let look = |sql: &mut Client| sql.query(query, &[&lock_id]).ok();
        let rows = connect(self.direct).as_mut().and_then(look);
        rows.map_or_else(|| "-".to_owned(), |rows| (!rows.is_empty()).to_string())
    }
}

/// How long this thread has waited for a processor, where the system tells.
fn stalled() -> u64 {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    told.split(' ').nth(1).and_then(|delay| delay.parse().ok()).unwrap_or(0)
}

pub fn failed(error: &LockError) -> String {
    if error.is_outcome_unknown() { "unknown -".to_owned() } else { error.code().to_string() }
}

pub fn as_ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The server's clock at the decision is what is left of the expiry without the ttl.
pub fn decided(expires_at_ms: i64, ttl: Duration) -> i64 {
    expires_at_ms - i64::try_from(ttl.as_millis()).unwrap_or(0)
}

/// A key as it is printed: that of a permit is `name#number`.
pub fn shown(key: &str) -> String {
    key.replace('\u{2126}', "#")
}

pub fn granted(fence: u64, expires_at_ms: i64, ttl: Duration) -> String {
    format!("ok {fence} {}", decided(expires_at_ms, ttl))
}

/// Where a longer one was asked for before, the end may be that one's, and tells no time.
pub fn extended(result: &Result<ExtendResult, LockError>, ttl: Duration, longest: Duration) -> String {
    match result {
        Ok(ExtendResult::Extended { .. }) if ttl < longest => "ok 0 0".to_owned(),
        Ok(ExtendResult::Extended { expires_at_ms }) => format!("ok 0 {}", decided(*expires_at_ms, ttl)),
        Ok(ExtendResult::NotHeld) => "refused".to_owned(),
        Err(error) => failed(error),
    }
}

pub fn released(result: &Result<ReleaseResult, LockError>) -> String {
    match result {
        Ok(ReleaseResult::Released) => "ok 0".to_owned(),
        Ok(ReleaseResult::NotHeld) => "refused".to_owned(),
        Err(error) => failed(error),
    }
}

/// Whom the text of a timeout names, and under which fence: its owner and its note.
pub fn who_holds(text: &str) -> Option<(u64, Option<&str>, Option<&str>)> {
    let (before, fence) = text.split_once(" under fence ")?;
    let digits = fence.find(|c: char| !c.is_ascii_digit()).unwrap_or(fence.len());
    let (_, words) =
        before.rsplit_once("; it is held by ").or_else(|| before.rsplit_once(" the last of them "))?;
    let words = words.trim_end_matches(',');
    let (owner, note) =
        words.split_once(" (").map_or((words, None), |(owner, note)| (owner, note.strip_suffix(')')));
    Some((fence[..digits].parse().ok()?, Some(owner).filter(|owner| *owner != "somebody"), note))
}

#[test]
fn the_text_of_a_timeout_names_its_holder() {
    let who = |text| who_holds(text);
    let text = "could not be taken; it is held by 3 (3.17) under fence 5; its lease ends in 2 s";
    assert_eq!(who(text), Some((5, Some("3"), Some("3.17"))));
    assert_eq!(who("; it is held by somebody (3.17) under fence 5"), Some((5, None, Some("3.17"))));
    let text = "; it is shared by readers, the last of them 3, under fence 25; its lease ends in 2 s";
    assert_eq!(who(text), Some((25, Some("3"), None)));
    assert_eq!(who("; it is held under fence 5"), None);
    assert_eq!(who("; another thread of this client took it under fencing token 5"), None);
}
