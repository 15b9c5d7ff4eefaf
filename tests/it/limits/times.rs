//! The longest time that a caller can name, as every limit that there is.

use std::panic;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use crate::support::{LIMIT, id, place, unique, wait_until};
use syncguard::{
    AdvisoryKey, AdvisoryOptions, Backoff, CancelToken, LockOptions, MAX_TTL, PgLockClient,
    PgLockClientBuilder, ReleaseResult, TelemetryOptions,
};

/// What overflows in a thread of the library, which nobody would hear of otherwise.
fn overflows() -> Receiver<String> {
    let (tell, overflows) = channel();
    let next = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let text = info.to_string();
        if text.contains("overflow") {
            let _ = tell.send(text);
        }
        next(info);
    }));
    overflows
}

fn endless() -> PgLockClientBuilder {
    PgLockClient::builder()
        .operation_timeout(Duration::MAX)
        .connection_timeout(Duration::MAX)
        .dispose_timeout(Duration::MAX)
        .telemetry(TelemetryOptions::new(|_| ()).flush_timeout(Duration::MAX))
}

fn patient() -> LockOptions {
    LockOptions::new()
        .ttl(MAX_TTL)
        .timeout(Duration::MAX)
        .retry_delay(Duration::MAX)
        .backoff(Backoff::Exponential)
        .max_hold(Duration::MAX)
}

/// What a thread answers, unless it takes longer than a test can wait.
fn answer<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, answer) = channel();
    thread::spawn(move || done.send(call()));
    answer.recv_timeout(LIMIT).unwrap()
}

#[test]
fn the_longest_times_overflow_on_no_thread() {
    let overflows = overflows();
    let place = place();
    let client = place.build(&unique(), endless());
    client.setup_schema().unwrap();
    let (holder, key) = (place.build(&unique(), endless()), place.key("a"));
    let held = holder.lock_with(&key, &patient()).unwrap();
    assert!(client.try_lock_with(&key, &patient()).unwrap().is_none());
    // Only a call from the other client's release ends this wait: its own next look is too far away.
    let name = unique();
    let waiter = place.build(&name, endless());
    let call = {
        let (waiter, key) = (waiter.clone(), key.clone());
        thread::spawn(move || waiter.lock_with(&key, &patient()).map(drop))
    };
    // A session that wants to be called holds a shared lock on the key's number.
    let waits = "SELECT EXISTS (SELECT FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid \
                 WHERE l.locktype = 'advisory' AND l.mode = 'ShareLock' AND a.application_name = $1)";
    wait_until(LIMIT, "the waiter is called", || place.stored.one(waits, &[&name]).get(0));
    assert_eq!(held.release().unwrap(), ReleaseResult::Released);
    answer(move || call.join()).unwrap().unwrap();
    assert_eq!(client.release(&id("nobody")).unwrap(), ReleaseResult::NotHeld);

    let advisory = AdvisoryKey::from_text(&place.key("b"));
    let options = AdvisoryOptions::new().timeout(Duration::MAX).max_hold(Duration::MAX);
    let guard = client.advisory_lock_with(&advisory, &options).unwrap();
    assert!(holder.try_advisory_lock_with(&advisory, &options).unwrap().is_none());
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);

    let token = CancelToken::new();
    let other = token.clone();
    let wait = thread::spawn(move || other.wait_timeout(Duration::MAX));
    token.cancel();
    assert!(wait.join().unwrap());
    for client in [client, holder, waiter] {
        assert!(answer(move || client.close(Duration::MAX)).unwrap().is_clean());
    }
    assert_eq!(overflows.try_iter().collect::<Vec<_>>(), Vec::<String>::new());
}
