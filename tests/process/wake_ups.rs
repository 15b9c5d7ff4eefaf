//! A release calls those who wait for the key in other processes, if there are any.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::support::leases::threads_named;
use crate::support::listeners::{assert_called, listeners, wait_for_listener, wait_seeing, watched};
use crate::support::{LIMIT, Place, Worker, place, wait_until, worker};
use postgres::Client;
use postgres::fallible_iterator::FallibleIterator as _;
use syncguard::backend::Heard;
use syncguard::{CancelToken, LockBackend as _, LockGuard, PgLockClient, ReleaseResult, TelemetryOptions};

/// Somebody who hears every call in the database.
struct Spy {
    ear: Client,
    mouth: Client,
}

impl Spy {
    fn new(place: &Place) -> Self {
        let mut ear = place.schema.client();
        ear.batch_execute("LISTEN syncguard_wake").unwrap();
        Self { ear, mouth: place.schema.client() }
    }

    /// How often this key was called until now, since the last time.
    fn calls(&mut self, key: &str) -> usize {
        let number: i32 = self.mouth.query_one("SELECT hashtext($1)", &[&key]).unwrap().get(0);
        let end = format!("end {}", crate::support::unique());
        // Calls arrive in the order of their commits: what came before this one is there.
        self.mouth.query("SELECT pg_notify('syncguard_wake', $1)", &[&end]).unwrap();
        let mut calls = 0;
        loop {
            let mut heard = self.ear.notifications();
            let call = heard.timeout_iter(LIMIT).next().unwrap().expect("the last call arrives");
            if call.payload() == end {
                return calls;
            }
            calls += usize::from(call.payload() == format!("{number:x}"));
        }
    }
}

#[track_caller]
fn released(client: &PgLockClient, guard: LockGuard) {
    assert_eq!(client.release(&guard.leak().lock_id).unwrap(), ReleaseResult::Released);
}

type LetGo<'a> = (&'a str, Box<dyn Fn(LockGuard) + 'a>);

#[test]
fn every_way_to_let_go_ends_a_long_wait_in_another_process() {
    let _alone = crate::support::alone();
    let place = place();
    let mut observer = place.schema.client();
    let token = CancelToken::new();
    let ways: [LetGo<'_>; 5] = [
        ("released", Box::new(|guard| assert_eq!(guard.release().unwrap(), ReleaseResult::Released))),
        ("dropped", Box::new(drop)),
        ("by-id", Box::new(|guard| released(&place.client, guard))),
        ("in-two-messages", {
            let client = place.client.cancellable(&token);
            Box::new(move |guard| released(&client, guard))
        }),
        ("broken", {
            let operator = place.client.operator();
            Box::new(move |guard| {
                let key = guard.key().to_owned();
                drop(guard.leak());
                assert!(operator.break_lock(&key, "a test").unwrap().was.is_some());
            })
        }),
    ];
    let other = place.named("waiter");
    // By name at first, by the driver's own prepared statements later on.
    for round in 0..2 {
        for (way, let_go) in &ways {
            let key = place.key(&format!("{way}-{round}"));
            assert_called(&mut observer, (&place.client, &other), &key, let_go);
        }
        for n in 0..20 {
            drop(place.client.lock(&place.key(&n.to_string())).unwrap());
        }
    }
}

#[test]
fn a_client_with_telemetry_is_called_too() {
    let _alone = crate::support::alone();
    let place = place();
    let builder = || PgLockClient::builder().telemetry(TelemetryOptions::new(|_| {}));
    let (holder, other) = (place.build("holder", builder()), place.build("waiter", builder()));
    assert_called(&mut place.schema.client(), (&holder, &other), &place.key("k"), drop);
}

#[test]
fn nobody_is_called_where_nobody_waits_and_each_release_calls_once_where_somebody_does() {
    let _alone = crate::support::alone();
    let place = place();
    let mut observer = place.schema.client();
    let mut spy = Spy::new(&place);
    let key = place.key("k");
    for _ in 0..40 {
        drop(place.client.lock(&key).unwrap());
    }
    assert_eq!(spy.calls(&key), 0, "nobody waits");
    let other = place.named("waiter");
    let (watch, heard) = watched(&other, &key);
    assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Listening));
    assert!(watch.is_listening());
    for n in 1..=20 {
        drop(place.client.lock(&key).unwrap());
        assert_eq!(spy.calls(&key), 1, "round {n}");
        assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Freed), "round {n}");
    }
    let unwatched = place.key("unwatched");
    drop(place.client.lock(&unwatched).unwrap());
    assert_eq!(spy.calls(&unwatched), 0, "nobody waits for that one");
    // While another key is listened for, the session stays: what is not listened for must be let go.
    let kept = place.key("kept");
    let (_kept, heard) = watched(&other, &kept);
    assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Listening));
    let session = wait_for_listener(&mut observer, &kept);
    drop(watch);
    wait_until(LIMIT, "the key is not listened for any more", || listeners(&mut observer, &key).is_empty());
    assert_eq!(listeners(&mut observer, &kept), [session]);
    drop(place.client.lock(&key).unwrap());
    assert_eq!(spy.calls(&key), 0, "nobody waits any more");
}

#[test]
fn every_watcher_of_a_process_is_called_over_one_connection() {
    let _alone = crate::support::alone();
    let place = place();
    let mut observer = place.schema.client();
    let other = place.named(&place.key("waiter"));
    let keys: Vec<_> = (0..30).map(|n| place.key(&n.to_string())).collect();
    let watches: Vec<_> = keys.iter().chain(&keys).map(|key| watched(&other, key)).collect();
    for (watch, heard) in &watches {
        assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Listening));
        assert!(watch.is_listening());
    }
    let sessions: std::collections::HashSet<_> =
        keys.iter().map(|key| wait_for_listener(&mut observer, key)).collect();
    assert_eq!(sessions.len(), 1);
    for key in &keys {
        drop(place.client.lock(key).unwrap());
    }
    for (_, heard) in &watches {
        assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Freed));
    }
    // Beyond a limit there is only looking: each takes a place in the server's table of locks.
    let more: Vec<_> =
        (0..400).map(|n| other.watch(&place.key(&format!("m{n}")), Arc::new(|_| {}))).collect();
    let count = more.iter().flatten().count();
    assert!((1..=256 - keys.len()).contains(&count), "{count}");
}

#[test]
fn no_release_falls_between_the_registration_and_the_look() {
    let _alone = crate::support::alone();
    let place = place();
    let other = place.named("waiter");
    crate::support::together(4, |thread| {
        for round in 0..25_usize {
            let key = place.key(&format!("{thread}-{round}"));
            let guard = place.client.lock(&key).unwrap();
            let (watch, heard) = watched(&other, &key);
            thread::scope(|scope| {
                // At any moment of the registration, which takes at most one of the thread's rounds.
                let pause = Duration::from_micros((thread + 4 * round) as u64 * 600);
                scope.spawn(move || {
                    thread::sleep(pause);
                    drop(guard);
                });
                assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Listening));
                if other.is_locked(&key).unwrap() {
                    assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Freed), "pause {pause:?}");
                }
            });
            drop(watch);
        }
    });
}

#[test]
fn a_watch_that_comes_when_the_key_is_registered_already_looks_once() {
    let _alone = crate::support::alone();
    let place = place();
    let other = place.named("waiter");
    let key = place.key("k");
    let (_first, heard) = watched(&other, &key);
    assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Listening));
    let (_second, heard) = watched(&other, &key);
    assert_eq!(heard.try_recv(), Ok(Heard::Listening));
}

#[test]
fn a_client_without_wake_ups_neither_calls_nor_listens() {
    let _alone = crate::support::alone();
    let place = place();
    let quiet = place.build("quiet", PgLockClient::builder().wake_ups(false));
    let key = place.key("k");
    assert!(quiet.watch(&key, Arc::new(|_| {})).is_none());
    let mut spy = Spy::new(&place);
    let waiter = place.named("waiter");
    let (_watch, heard) = watched(&waiter, &key);
    assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Listening));
    for _ in 0..20 {
        drop(quiet.lock(&key).unwrap());
    }
    let token = CancelToken::new();
    let held = quiet.lock(&key).unwrap().leak();
    quiet.cancellable(&token).release(&held.lock_id).unwrap();
    assert_eq!(spy.calls(&key), 0);
    // Who waits there looks.
    let guard = place.client.lock(&key).unwrap();
    let waiter = wait_seeing(&quiet, &key);
    drop(guard);
    assert!(waiter.join().unwrap().unwrap().is_held());
}

#[test]
fn a_callers_pool_is_not_listened_on() {
    let _alone = crate::support::alone();
    let place = place();
    let manager = r2d2_postgres::PostgresConnectionManager::new(place.schema.config(), postgres::NoTls);
    let pool = r2d2::Pool::builder().max_size(3).build(manager).unwrap();
    let client = PgLockClient::builder().build(pool).unwrap();
    let key = place.key("k");
    assert!(client.watch(&key, Arc::new(|_| {})).is_none());
    // But it calls.
    assert_called(&mut place.schema.client(), (&client, &place.named("waiter")), &key, drop);
}

#[test]
fn nobody_listens_where_nobody_waits() {
    let _alone = crate::support::alone();
    // In a process of its own: the other tests of this one listen.
    worker::part("holder", |parent| {
        let client = PgLockClient::connect(&parent.arg("url")).unwrap();
        for n in 0..40 {
            let guard = client.lock(&format!("{}-{n}", parent.arg("key"))).unwrap();
            assert!(client.try_lock(guard.key()).unwrap().is_none());
            drop(guard);
        }
        assert_eq!(threads_named("syncguard-wake"), 0);
        let (_watch, heard) = watched(&client, &parent.arg("key"));
        assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Listening));
        assert_eq!(threads_named("syncguard-wake"), 1);
        parent.say("done");
    });
    let place = place();
    let args = [("url", &*place.schema.url()), ("key", &place.key("k"))];
    Worker::start("nobody_listens_where_nobody_waits", "holder", &args).expect("done");
}
