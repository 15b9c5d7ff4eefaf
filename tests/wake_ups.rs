//! A release calls those who wait for the key in other processes, if there are any; whoever is not
//! called looks, and gets the lock all the same. Two clients are two processes as far as the server
//! can tell.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use postgres::Client;
use postgres::fallible_iterator::FallibleIterator as _;
use support::bouncer::Bouncer;
use support::cluster::signal;
use support::leases::threads_named;
use support::{Config, LIMIT, Place, Role, Server, logs, place, wait_until};
use syncguard::{
    AcquireResult, Attempt, Backoff, CancelToken, Capabilities, ExtendOutcome, Heard, LockBackend,
    LockClient, LockGuard, LockInfo, LockInfoDebug, LockOptions, Lookup, Moment, OnHeard, PgLockClient,
    PgLockClientBuilder, ReleaseOutcome, ReleaseResult, Result, TelemetryOptions, Watch,
};

const TTL: Duration = Duration::from_secs(300);
const HOUR: Duration = Duration::from_secs(3600);

/// What a session holds while it listens for a key: a shared lock in this class.
const LISTENERS: &str = "FROM pg_locks AS l WHERE l.locktype = 'advisory' AND l.classid = 1936160619 AND l.objsubid = 2 \
     AND l.mode = 'ShareLock' AND l.granted \
     AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())";

/// The sessions that listen for this key.
fn listeners(observer: &mut Client, key: &str) -> Vec<i32> {
    let sql = format!("SELECT l.pid {LISTENERS} AND l.objid::int8 = (hashtext($1)::int8 & 4294967295)");
    observer.query(&sql, &[&key]).unwrap().iter().map(|row| row.get(0)).collect()
}

#[track_caller]
fn wait_for_listener(observer: &mut Client, key: &str) -> i32 {
    let mut found = Vec::new();
    wait_until(LIMIT, "a session listens for the key", || {
        found = listeners(observer, key);
        !found.is_empty()
    });
    assert_eq!(found.len(), 1);
    found[0]
}

/// Waits that last, and end by a call or by a look but never by the next attempt.
fn patient() -> LockOptions {
    LockOptions::new().timeout(LIMIT).backoff(Backoff::Fixed).retry_delay(HOUR).ttl(TTL)
}

/// A backend whose looks always find the key taken: only a call can end a wait.
struct Blind(PgLockClient);

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
    fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoDebug>> {
        LockBackend::lookup_raw(&self.0, what, cancel)
    }
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
    fn attempt(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<AcquireResult> {
        self.0.attempt(attempt, cancel)
    }
    fn peek(&self, _: &str, _: Moment, _: &CancelToken) -> Result<bool> {
        Ok(true)
    }
    fn watch(&self, key: &str, heard: OnHeard) -> Option<Box<dyn Watch>> {
        self.0.watch(key, heard)
    }
}

/// A waiter in another process, on a thread of its own.
fn wait_blindly(client: &PgLockClient, key: &str) -> thread::JoinHandle<Result<LockGuard>> {
    let (blind, key) = (LockClient::new(Blind(client.clone())), key.to_owned());
    thread::spawn(move || blind.lock_with(&key, &patient()))
}

fn wait_seeing(client: &PgLockClient, key: &str) -> thread::JoinHandle<Result<LockGuard>> {
    let (client, key) = (client.clone(), key.to_owned());
    thread::spawn(move || client.lock_with(&key, &patient()))
}

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
        let end = format!("end {}", support::unique());
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

/// A watch without a waiter, and what it hears.
fn watched(client: &PgLockClient, key: &str) -> (Box<dyn Watch>, Receiver<Heard>) {
    let (tell, heard) = channel();
    let tell = std::sync::Mutex::new(tell);
    let watch = client.watch(key, Arc::new(move |what| tell.lock().unwrap().send(what).unwrap_or_default()));
    (watch.expect("it can be watched"), heard)
}

type LetGo<'a> = (&'a str, Box<dyn Fn(LockGuard) + 'a>);

#[test]
fn every_way_to_let_go_ends_a_long_wait_in_another_process() {
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
            let guard = place.client.lock(&key).unwrap();
            let waiter = wait_blindly(&other, &key);
            wait_for_listener(&mut observer, &key);
            let_go(guard);
            assert!(waiter.join().unwrap().unwrap().is_held(), "{way}");
        }
        for n in 0..20 {
            drop(place.client.lock(&place.key(&n.to_string())).unwrap());
        }
    }
}

#[test]
fn a_client_with_telemetry_is_called_too() {
    let place = place();
    let builder = || PgLockClient::builder().telemetry(TelemetryOptions::new(|_| {}));
    let (holder, other) = (place.build("holder", builder()), place.build("waiter", builder()));
    let key = place.key("k");
    let guard = holder.lock(&key).unwrap();
    let waiter = wait_blindly(&other, &key);
    wait_for_listener(&mut place.schema.client(), &key);
    drop(guard);
    assert!(waiter.join().unwrap().unwrap().is_held());
}

#[test]
fn nobody_is_called_where_nobody_waits_and_each_release_calls_once_where_somebody_does() {
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
    let other = place.key("other");
    drop(place.client.lock(&other).unwrap());
    assert_eq!(spy.calls(&other), 0, "nobody waits for that one");
    drop(watch);
    wait_until(LIMIT, "the key is not listened for any more", || listeners(&mut observer, &key).is_empty());
    drop(place.client.lock(&key).unwrap());
    assert_eq!(spy.calls(&key), 0, "nobody waits any more");
}

#[test]
fn every_watcher_of_a_process_is_called_over_one_connection() {
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
    let place = place();
    let other = place.named("waiter");
    support::together(4, |thread| {
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
    let place = place();
    let manager = r2d2_postgres::PostgresConnectionManager::new(place.schema.config(), postgres::NoTls);
    let pool = r2d2::Pool::builder().max_size(3).build(manager).unwrap();
    let client = PgLockClient::builder().build(pool).unwrap();
    let key = place.key("k");
    assert!(client.watch(&key, Arc::new(|_| {})).is_none());
    // But it calls.
    let guard = client.lock(&key).unwrap();
    let waiter = wait_blindly(&place.named("waiter"), &key);
    wait_for_listener(&mut place.schema.client(), &key);
    drop(guard);
    assert!(waiter.join().unwrap().unwrap().is_held());
}

#[test]
fn behind_a_pooler_nothing_is_left_in_its_sessions_and_waiters_look() {
    let place = place();
    let mut observer = place.schema.client();
    let mark = logs::exclusive();
    for settings in [&[("default_pool_size", "1")][..], &[], &[("server_round_robin", "1")]] {
        let bouncer = Bouncer::start(settings);
        let through = PgLockClient::builder()
            .schema(place.schema.name())
            .auto_create_tables(false)
            .connect(&bouncer.url())
            .unwrap();
        let key = place.key("k");
        let guard = place.client.lock(&key).unwrap();
        let before = refusals(&mark);
        let waiter = wait_seeing(&through, &key);
        wait_until(LIMIT, "listening is refused", || refusals(&mark) > before);
        assert!(listeners(&mut observer, &key).is_empty());
        drop(guard);
        assert!(waiter.join().unwrap().unwrap().is_held());
        wait_until(LIMIT, "the thread has ended", || through.watch(&key, Arc::new(|_| {})).is_none());
        assert_eq!(refusals(&mark), before + 1, "not tried again so soon");
        // What the pooler's sessions hold, and listen to, from within.
        let mut inside = Client::connect(&bouncer.url(), postgres::NoTls).unwrap();
        for _ in 0..8 {
            let listening = inside.simple_query("SELECT pg_listening_channels()").unwrap();
            let rows = listening.iter().filter(|m| matches!(m, postgres::SimpleQueryMessage::Row(_)));
            assert_eq!(rows.count(), 0);
        }
        let sql = format!(
            "SELECT count(*) {LISTENERS} AND l.pid IN (SELECT pid FROM pg_stat_activity WHERE application_name = 'syncguard')"
        );
        assert_eq!(observer.query_one(&sql, &[]).unwrap().get::<_, i64>(0), 0);
    }
}

fn refusals(mark: &logs::Mark) -> usize {
    mark.lines().iter().filter(|line| line.text.contains("not heard here")).count()
}

#[test]
fn a_pooler_that_keeps_sessions_apart_is_listened_through() {
    let place = place();
    let bouncer = Bouncer::start(&[("pool_mode", "session")]);
    let through = PgLockClient::builder()
        .schema(place.schema.name())
        .auto_create_tables(false)
        .connect(&bouncer.url())
        .unwrap();
    let key = place.key("k");
    let guard = place.client.lock(&key).unwrap();
    let waiter = wait_blindly(&through, &key);
    wait_for_listener(&mut place.schema.client(), &key);
    drop(guard);
    assert!(waiter.join().unwrap().unwrap().is_held());
}

#[test]
fn a_listener_that_is_ended_is_opened_again_and_meanwhile_waiters_look() {
    let place = place();
    let mut observer = place.schema.client();
    let other = place.named("waiter");
    let key = place.key("k");
    for _ in 0..2 {
        let guard = place.client.lock(&key).unwrap();
        let waiter = wait_blindly(&other, &key);
        let pid = wait_for_listener(&mut observer, &key);
        observer.query("SELECT pg_terminate_backend($1)", &[&pid]).unwrap();
        support::wait_until_backend_gone(&mut observer, pid);
        assert_ne!(wait_for_listener(&mut observer, &key), pid);
        drop(guard);
        drop(waiter.join().unwrap().unwrap());
    }
    let guard = place.client.lock(&key).unwrap();
    let waiter = wait_seeing(&other, &key);
    let pid = wait_for_listener(&mut observer, &key);
    observer.query("SELECT pg_terminate_backend($1)", &[&pid]).unwrap();
    drop(guard);
    assert!(waiter.join().unwrap().unwrap().is_held());
}

#[test]
fn a_listener_whose_server_process_has_stopped_hears_nothing_and_holds_up_nobody() {
    let server = Server::start(&Config::new());
    let place = Place::new(server.schema());
    let mut observer = place.schema.client();
    let other = place.named("waiter");
    let key = place.key("k");
    let guard = place.client.lock(&key).unwrap();
    let waiter = wait_seeing(&other, &key);
    let pid = u32::try_from(wait_for_listener(&mut observer, &key)).unwrap();
    signal(pid, "STOP");
    drop(guard);
    assert!(waiter.join().unwrap().unwrap().is_held(), "it looked");
    // Its watch is over, and the thread waits for the answer to its unlock, which never comes.
    let report = other.close(LIMIT).unwrap();
    assert!(report.is_clean(), "{report:?}");
    signal(pid, "CONT");
    support::wait_until_backend_gone(&mut observer, i32::try_from(pid).unwrap());
}

#[test]
fn a_closed_client_leaves_neither_connection_nor_registration() {
    for socket in [false, true] {
        let server = Server::start(&Config::new());
        let place = Place::new(server.schema());
        let mut observer = place.schema.client();
        let name = place.key("waiter");
        let mut config: postgres::Config =
            if socket { place.schema.socket_url() } else { place.schema.url() }.parse().unwrap();
        config.application_name(&name);
        let other = PgLockClient::builder().connect_with(config, postgres::NoTls).unwrap();
        let key = place.key("k");
        let guard = place.client.lock(&key).unwrap();
        let waiter = wait_seeing(&other, &key);
        let pid = wait_for_listener(&mut observer, &key);
        let report = other.close(LIMIT).unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert!(waiter.join().unwrap().is_err());
        support::wait_until_backend_gone(&mut observer, pid);
        assert!(listeners(&mut observer, &key).is_empty());
        assert!(other.watch(&key, Arc::new(|_| {})).is_none());
        drop(guard);
    }
}

#[test]
fn a_dropped_client_and_an_idle_one_stop_listening() {
    let place = place();
    let mut observer = place.schema.client();
    let key = place.key("k");
    let other = place.named("waiter");
    let (watch, heard) = watched(&other, &key);
    assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Listening));
    let pid = wait_for_listener(&mut observer, &key);
    drop(watch);
    support::wait_until_backend_gone(&mut observer, pid);
    // And it can begin anew.
    let (_watch, heard) = watched(&other, &key);
    assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Listening));
    let pid = wait_for_listener(&mut observer, &key);
    drop(other);
    support::wait_until_backend_gone(&mut observer, pid);
}

#[test]
fn a_role_that_may_call_nobody_releases_all_the_same() {
    let server = Server::start(&Config::new());
    let schema = server.schema();
    let role = Role::new(&schema);
    let place = Place::new(schema);
    let mut observer = place.schema.client();
    observer
        .batch_execute(&format!(
            "GRANT ALL ON ALL TABLES IN SCHEMA {} TO {}",
            place.schema.name(),
            role.name()
        ))
        .unwrap();
    let connect = |builder: PgLockClientBuilder| {
        builder.auto_create_tables(false).connect_with(role.config(), postgres::NoTls).unwrap()
    };
    // One finds it out when it looks for the tables, the other one later.
    let knew = connect(PgLockClient::builder());
    let early = place.key("early");
    drop(knew.lock(&early).unwrap());
    observer.batch_execute("REVOKE EXECUTE ON FUNCTION pg_notify(text, text) FROM PUBLIC").unwrap();
    let told = connect(PgLockClient::builder());
    for (n, client) in [knew, told].iter().enumerate() {
        for round in 0..20 {
            let key = place.key(&format!("k-{n}-{round}"));
            let guard = client.lock(&key).unwrap();
            let other = wait_seeing(&place.client, &key);
            if round == 0 {
                wait_for_listener(&mut observer, &key);
            }
            if round % 2 == 0 {
                assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
            } else {
                let token = CancelToken::new();
                let id = guard.leak().lock_id;
                assert_eq!(client.cancellable(&token).release(&id).unwrap(), ReleaseResult::Released);
            }
            drop(other.join().unwrap().unwrap());
        }
        let key = place.key("broken");
        drop(client.lock(&key).unwrap().leak());
        assert!(client.operator().break_lock(&key, "a test").unwrap().was.is_some());
    }
}

#[test]
fn the_wait_is_counted_by_no_thread_that_stays() {
    let place = place();
    let before = threads_named("syncguard-wake");
    drop(place.client.lock(&place.key("k")).unwrap());
    assert!(threads_named("syncguard-wake") <= before, "nobody waited");
}
