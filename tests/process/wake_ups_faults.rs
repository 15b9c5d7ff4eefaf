//! Whoever is not called looks, and gets the lock all the same: behind poolers, with a listener that
//! is ended or stands still, without the right to call. And listening leaves nothing behind.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::support::bouncer::Bouncer;
use crate::support::cluster::signal;
use crate::support::listeners::{
    LISTENERS, assert_called, listeners, wait_for_listener, wait_seeing, watched,
};
use crate::support::proxy::{Action, Proxy};
use crate::support::wire::Wire;
use crate::support::{Config, LIMIT, Place, Role, Server, logs, place, wait_until};
use postgres::Client;
use syncguard::backend::{Heard, Watch};
use syncguard::{CancelToken, LockBackend as _, PgLockClient, PgLockClientBuilder, ReleaseResult};

#[test]
fn behind_a_pooler_nothing_is_left_in_its_sessions_and_waiters_look() {
    let _alone = crate::support::alone();
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
    let _alone = crate::support::alone();
    let place = place();
    let bouncer = Bouncer::start(&[("pool_mode", "session")]);
    let through = PgLockClient::builder()
        .schema(place.schema.name())
        .auto_create_tables(false)
        .connect(&bouncer.url())
        .unwrap();
    assert_called(&mut place.schema.client(), (&place.client, &through), &place.key("k"), drop);
}

#[test]
fn a_listener_that_is_ended_is_opened_again_and_meanwhile_waiters_look() {
    let _alone = crate::support::alone();
    let place = place();
    let mut observer = place.schema.client();
    let other = place.named("waiter");
    let key = place.key("k");
    let mut admin = place.schema.client();
    for _ in 0..2 {
        assert_called(&mut observer, (&place.client, &other), &key, |guard| {
            let pid = wait_for_listener(&mut admin, &key);
            admin.query("SELECT pg_terminate_backend($1)", &[&pid]).unwrap();
            crate::support::wait_until_backend_gone(&mut admin, pid);
            assert_ne!(wait_for_listener(&mut admin, &key), pid);
            drop(guard);
        });
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
    let _alone = crate::support::alone();
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
    crate::support::wait_until_backend_gone(&mut observer, i32::try_from(pid).unwrap());
}

#[test]
fn a_closed_client_leaves_neither_connection_nor_registration() {
    let _alone = crate::support::alone();
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
        crate::support::wait_until_backend_gone(&mut observer, pid);
        assert!(listeners(&mut observer, &key).is_empty());
        assert!(other.watch(&key, Arc::new(|_| {})).is_none());
        drop(guard);
    }
}

/// A client that listens for a key through this line, its watch, and its server process.
fn listening(place: &Place, wire: &Wire, key: &str) -> (PgLockClient, Box<dyn Watch>, i32) {
    // Nothing but the close ends an exchange that takes so long.
    let client = PgLockClient::builder()
        .schema(place.schema.name())
        .auto_create_tables(false)
        .operation_timeout(LIMIT * 5)
        .connect(&wire.url())
        .unwrap();
    let (watch, heard) = watched(&client, key);
    assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Listening));
    let pid = wait_for_listener(&mut place.schema.client(), key);
    (client, watch, pid)
}

#[test]
fn closing_cuts_a_listener_whose_server_owes_it_an_answer() {
    let _alone = crate::support::alone();
    let place = place();
    let wire = Wire::to(place.schema.config().get_ports()[0]);
    let (client, _watch, pid) = listening(&place, &wire, &place.key("k"));
    wire.go_silent();
    let _more = watched(&client, &place.key("more"));
    wait_until(LIMIT, "it is to be registered, too", || wire.lost() > 0);
    client.close(LIMIT).unwrap();
    crate::support::wait_until_backend_gone(&mut place.schema.client(), pid);
}

#[test]
fn closing_cuts_a_listener_that_sleeps() {
    let _alone = crate::support::alone();
    let place = place();
    let cut = || {
        let wire = Wire::to(place.schema.config().get_ports()[0]);
        let (client, _watch, pid) = listening(&place, &wire, &place.key("k"));
        wire.go_silent();
        client.close(LIMIT).unwrap();
        crate::support::wait_until_backend_gone(&mut place.schema.client(), pid);
        // One that wakes up by itself says goodbye.
        wire.lost() == 0
    };
    // It may wake up just then, but not each time.
    assert!((0..10).any(|_| cut()));
}

#[test]
fn a_key_that_somebody_else_has_locked_is_asked_for_more_and_more_rarely() {
    let _alone = crate::support::alone();
    // Nobody else calls there, which would end a pause.
    let server = Server::start(&Config::new());
    let place = Place::new(server.schema());
    let proxy = Proxy::start(server.port());
    let key = place.key("k");
    let mut stranger = place.schema.client();
    stranger.execute("SELECT pg_advisory_lock(1936160619, hashtext($1))", &[&key]).unwrap();
    let (tell, asked) = channel();
    let mark = format!("'{key}'");
    proxy.on_query(move |sql| {
        if sql.contains("pg_try_advisory_lock_shared") && sql.contains(&mark) {
            let _ = tell.send(Instant::now());
        }
        Action::Pass
    });
    let other = PgLockClient::connect(&proxy.url(&place.schema.url())).unwrap();
    let (watch, heard) = watched(&other, &key);
    let asked: Vec<_> = (0..12).map(|_| asked.recv_timeout(LIMIT).unwrap()).collect();
    // 2, 4, 8, 16 and 32 ms, and then 50 each; only a loaded machine needs longer.
    assert!(asked[11] - asked[0] >= Duration::from_millis(62 + 6 * 50), "{asked:?}");
    assert!(!watch.is_listening());
    // It keeps nobody from the lease, neither who lets go nor who waits.
    let guard = place.client.lock(&key).unwrap();
    let waiter = wait_seeing(&place.named("waiter"), &key);
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    drop(waiter.join().unwrap().unwrap());
    stranger.execute("SELECT pg_advisory_unlock_all()", &[]).unwrap();
    assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Listening));
}

#[test]
fn a_dropped_client_and_an_idle_one_stop_listening() {
    let _alone = crate::support::alone();
    let place = place();
    let mut observer = place.schema.client();
    let key = place.key("k");
    let other = place.named("waiter");
    let (watch, heard) = watched(&other, &key);
    assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Listening));
    let pid = wait_for_listener(&mut observer, &key);
    drop(watch);
    crate::support::wait_until_backend_gone(&mut observer, pid);
    // And it can begin anew.
    let (_watch, heard) = watched(&other, &key);
    assert_eq!(heard.recv_timeout(LIMIT), Ok(Heard::Listening));
    let pid = wait_for_listener(&mut observer, &key);
    drop(other);
    crate::support::wait_until_backend_gone(&mut observer, pid);
}

#[test]
fn a_role_that_may_call_nobody_releases_all_the_same() {
    let _alone = crate::support::alone();
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
