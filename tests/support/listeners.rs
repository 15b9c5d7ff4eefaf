//! Waiters in other processes and those who call them: what their tests have in common. Two clients
//! are two processes as far as the server can tell.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use postgres::Client;
use syncguard::backend::{Attempt, ExtendOutcome, Heard, Holder, Moment, OnHeard, ReleaseOutcome, Watch};
use syncguard::{
    AcquireResult, Backoff, CancelToken, Capabilities, LockBackend, LockClient, LockGuard, LockInfo,
    LockInfoRaw, LockOptions, Lookup, PgLockClient, Result,
};

use super::wait::{LIMIT, wait_until};

const TTL: Duration = Duration::from_secs(300);
const HOUR: Duration = Duration::from_secs(3600);

/// What a session holds while it listens for a key: a shared lock in this class.
pub const LISTENERS: &str = "FROM pg_locks AS l WHERE l.locktype = 'advisory' AND l.classid = 1936160619 AND l.objsubid = 2 \
     AND l.mode = 'ShareLock' AND l.granted \
     AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())";

/// The sessions that listen for this key.
pub fn listeners(observer: &mut Client, key: &str) -> Vec<i32> {
    let sql = format!("SELECT l.pid {LISTENERS} AND l.objid::int8 = (hashtext($1)::int8 & 4294967295)");
    observer.query(&sql, &[&key]).unwrap().iter().map(|row| row.get(0)).collect()
}

#[track_caller]
pub fn wait_for_listener(observer: &mut Client, key: &str) -> i32 {
    let mut found = Vec::new();
    wait_until(LIMIT, "a session listens for the key", || {
        found = listeners(observer, key);
        !found.is_empty()
    });
    assert_eq!(found.len(), 1);
    found[0]
}

/// Waits that last, and end by a call or by a look but never by the next attempt.
pub fn patient() -> LockOptions {
    LockOptions::new().timeout(LIMIT).backoff(Backoff::Fixed).retry_delay(HOUR).ttl(TTL)
}

/// A backend whose looks always find the key taken: only a call can end a wait.
pub struct Blind(PgLockClient);

impl LockBackend for Blind {
    fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult> {
        LockBackend::acquire(&self.0, key, ttl, cancel)
    }
    fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome> {
        LockBackend::release(&self.0, lock_id, cancel)
    }
    fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome> {
        LockBackend::extend(&self.0, lock_id, ttl, cancel)
    }
    fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool> {
        LockBackend::is_locked(&self.0, key, cancel)
    }
    fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>> {
        LockBackend::lookup(&self.0, what, cancel)
    }
    fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoRaw>> {
        LockBackend::lookup_raw(&self.0, what, cancel)
    }
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
    fn attempt(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<AcquireResult> {
        self.0.attempt(attempt, cancel)
    }
    fn holder(&self, _: &str, _: Moment, _: &CancelToken) -> Result<Option<Holder>> {
        Ok(Some(Holder::default()))
    }
    fn watch(&self, key: &str, heard: OnHeard) -> Option<Box<dyn Watch>> {
        self.0.watch(key, heard)
    }
}

/// A waiter in another process, on a thread of its own.
pub fn wait_blindly(client: &PgLockClient, key: &str) -> thread::JoinHandle<Result<LockGuard>> {
    let (blind, key) = (LockClient::new(Blind(client.clone())), key.to_owned());
    thread::spawn(move || blind.lock_with(&key, &patient()))
}

pub fn wait_seeing(client: &PgLockClient, key: &str) -> thread::JoinHandle<Result<LockGuard>> {
    let (client, key) = (client.clone(), key.to_owned());
    thread::spawn(move || client.lock_with(&key, &patient()))
}

/// A watch without a waiter, and what it hears.
pub fn watched(client: &PgLockClient, key: &str) -> (Box<dyn Watch>, Receiver<Heard>) {
    let (tell, heard) = channel();
    let tell = std::sync::Mutex::new(tell);
    let watch = client.watch(key, Arc::new(move |what| tell.lock().unwrap().send(what).unwrap_or_default()));
    (watch.expect("it can be watched"), heard)
}

/// Somebody waits for the key in another process, and looks in vain: letting go must end the wait.
#[track_caller]
pub fn assert_called(
    observer: &mut Client,
    (holder, waiter): (&PgLockClient, &PgLockClient),
    key: &str,
    let_go: impl FnOnce(LockGuard),
) {
    let guard = holder.lock(key).unwrap();
    let waiting = wait_blindly(waiter, key);
    wait_for_listener(observer, key);
    let_go(guard);
    assert!(waiting.join().unwrap().unwrap().is_held(), "{key}");
}
