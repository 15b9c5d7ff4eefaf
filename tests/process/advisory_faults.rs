//! Session locks when processes, servers and lines between them fail.

use std::thread;
use std::time::{Duration, Instant};

use crate::support::leases::threads_named;
use crate::support::proxy::{Action, Proxy};
use crate::support::session_locks::{has_session_timer, server_port};
use crate::support::wire::Wire;
use crate::support::{Config, LIMIT, Server, Stop, Worker, logs, server, unique, wait_until, worker};
use postgres::{Client, NoTls};
use r2d2_postgres::PostgresConnectionManager;
use syncguard::{
    AdvisoryGuard, AdvisoryKey, AdvisoryLost, AdvisoryOptions, ErrorCode, PgLockClient, PgLockClientBuilder,
    ReleaseResult,
};

fn builder() -> PgLockClientBuilder {
    PgLockClient::builder().auto_create_tables(false)
}

fn client(url: &str) -> PgLockClient {
    builder().connect(url).unwrap()
}

fn key() -> AdvisoryKey {
    AdvisoryKey::from_text(&unique())
}

fn taken(client: &PgLockClient, key: AdvisoryKey) -> AdvisoryGuard {
    client.try_advisory_lock(&key).unwrap().expect("the key is free")
}

fn holding(hold: Duration) -> AdvisoryOptions {
    AdvisoryOptions::new().max_hold(hold)
}

/// A worker's part: takes the key for so many milliseconds, says so, and reports when it is told to.
fn holder(parent: &worker::Parent) -> ! {
    let client = client(server().url());
    let millis = parent.arg("hold").parse().unwrap();
    let mut options = holding(Duration::from_millis(millis));
    if parent.arg("keep") == "yes" {
        options = options.keep_past_deadline();
    }
    let guard = client
        .try_advisory_lock_with(&AdvisoryKey::from_text(&parent.arg("key")), &options)
        .unwrap()
        .unwrap();
    parent.say(&guard.pid().to_string());
    parent.hear();
    parent.say(if guard.is_held() { "held" } else { "lost" });
    parent.wait_forever()
}

fn start_holder(test: &str, key: &str, hold: u64, keep: bool) -> (Worker, i32) {
    let args = [("key", key), ("hold", &hold.to_string()), ("keep", if keep { "yes" } else { "no" })];
    // So that the worker finds the server of this process.
    let _ = server();
    let mut worker = Worker::start(test, "holder", &args);
    let pid = worker.hear().parse().unwrap();
    (worker, pid)
}

#[test]
fn a_killed_holder_frees_its_key() {
    let _alone = crate::support::alone();
    worker::part("holder", |parent| holder(parent));
    let name = unique();
    let key = AdvisoryKey::from_text(&name);
    let (mut worker, _) = start_holder("a_killed_holder_frees_its_key", &name, 60_000, false);
    let client = client(server().url());
    assert!(client.try_advisory_lock(&key).unwrap().is_none());
    worker.kill();
    drop(client.advisory_lock_with(&key, &AdvisoryOptions::new().timeout(LIMIT)).unwrap());
}

#[test]
fn a_stopped_holder_loses_its_lock_at_its_deadline_although_it_was_asked_meanwhile() {
    let _alone = crate::support::alone();
    worker::part("holder", |parent| holder(parent));
    let (name, test) =
        (unique(), "a_stopped_holder_loses_its_lock_at_its_deadline_although_it_was_asked_meanwhile");
    let key = AdvisoryKey::from_text(&name);
    let (mut worker, pid) = start_holder(test, &name, 6_000, false);
    let client = client(server().url());
    // Ends after the worker's deadline and the server's second, and before the worker's timer would
    // end if the question after 3 s had started it anew in full.
    let measure =
        client.try_advisory_lock_with(&self::key(), &holding(Duration::from_millis(9200))).unwrap().unwrap();
    let mut observer = server().client();
    let mut changed = || -> (std::time::SystemTime, bool) {
        let sql = "SELECT state_change, state = 'idle' FROM pg_stat_activity WHERE pid = $1";
        let row = observer.query_one(sql, &[&pid]).unwrap();
        (row.get(0), row.get(1))
    };
    let first = changed().0;
    wait_until(LIMIT, "the holder's session was asked", || changed().0 != first && changed().1);
    worker.signal("STOP");
    assert!(client.try_advisory_lock(&key).unwrap().is_none());
    let options = AdvisoryOptions::new().timeout(LIMIT);
    let next = if has_session_timer(&mut observer) {
        let next = client.advisory_lock_with(&key, &options).unwrap();
        assert!(measure.is_held(), "the server's timer ran from the last question in full");
        worker.signal("CONT");
        next
    } else {
        wait_until(LIMIT, "the deadline and more is over", || !measure.is_held());
        assert!(client.try_advisory_lock(&key).unwrap().is_none(), "without a timer it stays held");
        worker.signal("CONT");
        client.advisory_lock_with(&key, &options).unwrap()
    };
    worker.tell("and now?");
    worker.expect("lost");
    assert!(next.is_held());
}

#[test]
fn a_stopped_holder_that_was_never_asked_loses_its_lock_too() {
    let _alone = crate::support::alone();
    worker::part("holder", |parent| holder(parent));
    let name = unique();
    let test = "a_stopped_holder_that_was_never_asked_loses_its_lock_too";
    let (mut worker, _) = start_holder(test, &name, 500, false);
    worker.signal("STOP");
    let client = client(server().url());
    let (key, options) = (AdvisoryKey::from_text(&name), AdvisoryOptions::new().timeout(LIMIT));
    if has_session_timer(&mut server().client()) {
        drop(client.advisory_lock_with(&key, &options).unwrap());
        worker.signal("CONT");
    } else {
        let hold = Duration::from_secs(3);
        let measure = client.try_advisory_lock_with(&self::key(), &holding(hold)).unwrap().unwrap();
        wait_until(LIMIT, "the deadline and more is over", || !measure.is_held());
        assert!(client.try_advisory_lock(&key).unwrap().is_none(), "without a timer it stays held");
        worker.signal("CONT");
        drop(client.advisory_lock_with(&key, &options).unwrap());
    }
    worker.tell("and now?");
    worker.expect("lost");
}

#[test]
fn a_stopped_holder_that_prefers_exclusion_keeps_its_lock() {
    let _alone = crate::support::alone();
    worker::part("holder", |parent| holder(parent));
    let name = unique();
    let key = AdvisoryKey::from_text(&name);
    let (mut worker, pid) =
        start_holder("a_stopped_holder_that_prefers_exclusion_keeps_its_lock", &name, 100, true);
    worker.signal("STOP");
    let client = client(server().url());
    // Longer than a server may be silent: here it was the holder who did not listen.
    let options = AdvisoryOptions::new().timeout(Duration::from_secs(13));
    let error = client.advisory_lock_with(&key, &options).unwrap_err();
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    worker.signal("CONT");
    let mut observer = server().client();
    let sql = "SELECT now() - state_change < interval '3 s' AND state = 'idle' FROM pg_stat_activity WHERE pid = $1";
    wait_until(LIMIT, "its session is asked again", || {
        observer.query_one(sql, &[&pid]).unwrap().get::<_, bool>(0)
    });
    worker.tell("and now?");
    worker.expect("held");
    worker.kill();
    drop(client.advisory_lock_with(&key, &AdvisoryOptions::new().timeout(LIMIT)).unwrap());
}

#[test]
fn threads_come_with_the_first_lock_and_go_with_the_last() {
    let _alone = crate::support::alone();
    worker::part("counter", |parent| {
        let all = || threads_named("syncguard");
        let threads = || all().saturating_sub(threads_named("syncguard-pool"));
        let client = client(server().url());
        assert!(client.advisory_holders().is_ok());
        assert_eq!(threads(), 0);
        wait_until(LIMIT, "the pool's runs", || all() == 1);
        let guards: Vec<_> = (0..8).map(|_| taken(&client, key())).collect();
        // A thread takes its name only when it runs.
        wait_until(LIMIT, "two threads run", || threads() == 2);
        drop(guards);
        wait_until(LIMIT, "they end while the client lives", || threads() == 0);
        let guard = taken(&client, key());
        wait_until(LIMIT, "two threads run again", || threads() == 2);
        drop(client);
        assert!(guard.is_held() && threads() == 2, "a guard is looked after without its client");
        drop(guard);
        wait_until(LIMIT, "they end, and the pool's with them", || all() == 0);
        parent.say("done");
    });
    let _ = server();
    let mut worker = Worker::start("threads_come_with_the_first_lock_and_go_with_the_last", "counter", &[]);
    worker.expect("done");
}

#[test]
fn a_restart_of_the_server_is_noticed_on_every_kind_of_connection() {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new());
    let config: postgres::Config = server.url().parse().unwrap();
    let pool =
        r2d2::Pool::builder().max_size(2).build(PostgresConnectionManager::new(config, NoTls)).unwrap();
    let clients = [client(server.url()), client(server.socket_url()), builder().build(pool).unwrap()];
    for how in [Stop::Fast, Stop::Immediate] {
        let keys = [key(), key(), key()];
        let guards: Vec<_> = clients
            .iter()
            .zip(keys)
            .map(|(client, key)| {
                client.advisory_lock_with(&key, &AdvisoryOptions::new().timeout(LIMIT)).unwrap()
            })
            .collect();
        server.restart(how);
        for guard in guards {
            assert!(guard.lost().wait_timeout(LIMIT), "{how:?}");
            assert_eq!(guard.lost_reason(), Some(AdvisoryLost::Connection));
            assert_eq!(guard.release().unwrap(), ReleaseResult::NotHeld);
        }
        for (client, key) in clients.iter().zip(keys) {
            let mut next = None;
            wait_until(LIMIT, "the client works again", || {
                next = client.try_advisory_lock(&key).ok().flatten();
                next.is_some()
            });
        }
    }
}

#[test]
fn releasing_a_lock_whose_session_has_just_ended_says_that_it_was_lost() {
    let _alone = crate::support::alone();
    let mut observer = server().client();
    for client in [client(server().url()), client(server().socket_url())] {
        let guard = taken(&client, key());
        observer.execute("SELECT pg_terminate_backend($1)", &[&guard.pid()]).unwrap();
        crate::support::wait_until_backend_gone(&mut observer, guard.pid());
        assert_eq!(guard.release().unwrap(), ReleaseResult::NotHeld);
    }
}

#[test]
fn a_server_that_has_stopped_keeps_no_deadline_from_firing() {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new());
    for url in [server.url(), server.socket_url()] {
        let client = client(url);
        let (short, long) = (
            client.try_advisory_lock_with(&key(), &holding(Duration::from_millis(4500))).unwrap().unwrap(),
            taken(&client, key()),
        );
        let measure = Instant::now();
        server.freeze();
        assert!(short.lost().wait_timeout(LIMIT));
        assert!(long.lost().wait_timeout(LIMIT), "silence is a loss");
        assert_eq!(long.lost_reason(), Some(AdvisoryLost::Connection));
        assert!(measure.elapsed() < LIMIT);
        let (tell, told) = std::sync::mpsc::channel();
        thread::spawn(move || {
            drop((short, long));
            let _ = tell.send(());
        });
        told.recv_timeout(LIMIT).expect("guards are dropped while the server stands still");
        server.thaw();
    }
}

#[test]
fn an_idle_session_that_stands_still_does_not_stop_the_thread_that_looks_after_all() {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new());
    let mut observer = server.client();
    if !has_session_timer(&mut observer) {
        return;
    }
    // On this socket nothing of ours ends a wait for the server.
    let client = client(server.socket_url());
    let (first, second) = (taken(&client, key()), taken(&client, key()));
    let (silent, other) = (first.pid().unsigned_abs(), second.pid());
    assert_eq!(first.release().unwrap(), ReleaseResult::Released);
    crate::support::cluster::signal(silent, "STOP");
    assert_eq!(second.release().unwrap(), ReleaseResult::Released);
    let sql = "SELECT query LIKE '%set_config(''idle_session_timeout''%' AND state = 'idle' FROM pg_stat_activity WHERE pid = $1";
    wait_until(LIMIT, "the other session gets its own timer back", || {
        observer.query_one(sql, &[&other]).unwrap().get(0)
    });
    crate::support::cluster::signal(silent, "CONT");
}

#[test]
fn a_network_that_goes_silent_is_a_loss() {
    let _alone = crate::support::alone();
    let wire = Wire::to(server_port());
    let client = client(&wire.url());
    let guard = taken(&client, key());
    wire.go_silent();
    assert!(guard.lost().wait_timeout(LIMIT));
    assert_eq!(guard.lost_reason(), Some(AdvisoryLost::Connection));
}

#[test]
fn a_failover_that_the_client_does_not_hear_of_is_a_loss() {
    let _alone = crate::support::alone();
    let wire = Wire::to(server_port());
    let behind = client(&wire.url());
    let key = key();
    let guard = behind.try_advisory_lock_with(&key, &holding(LIMIT * 2)).unwrap().unwrap();
    wire.end_sessions_silently();
    // The server's side is free at once; the holder cannot know that yet.
    let other = client(server().url());
    let next = other.advisory_lock_with(&key, &holding(LIMIT * 2).timeout(LIMIT)).unwrap();
    assert!(guard.lost().wait_timeout(LIMIT));
    assert_eq!(guard.lost_reason(), Some(AdvisoryLost::Connection));
    drop(guard);
    assert!(next.is_held(), "the old holder's end does not touch the new one");
}

#[test]
fn an_unlock_that_answers_false_closes_the_connection() {
    let _alone = crate::support::alone();
    let logs = logs::capture();
    let wire = Wire::to(server_port());
    let client = client(&wire.url());
    // The self-test of the first lock has a connection of its own, which is gone afterwards.
    let key = key();
    let guard = taken(&client, key);
    let (pid, mut observer) = (guard.pid(), server().client());
    wire.speak("SELECT pg_advisory_unlock_all()");
    wait_until(LIMIT, "somebody has unlocked", || {
        let sql = "SELECT count(*) FROM pg_locks WHERE pid = $1 AND locktype = 'advisory'";
        observer.query_one(sql, &[&pid]).unwrap().get::<_, i64>(0) == 0
    });
    assert_eq!(guard.release().unwrap(), ReleaseResult::NotHeld);
    crate::support::wait_until_backend_gone(&mut observer, pid);
    let number = key.to_string();
    assert!(logs.lines().iter().any(|line| line.level == log::Level::Warn && line.text.contains(&number)));
}

#[test]
fn a_try_that_fails_after_its_grant_leaves_no_lock() {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new());
    let client = client(server.url());
    // The self-test passes; then the statement fails right after the lock was granted.
    drop(taken(&client, key()));
    let mut admin = server.client();
    let fails = has_session_timer(&mut admin);
    admin
        .batch_execute(
            "ALTER FUNCTION pg_catalog.set_config(text, text, boolean) RENAME TO real_set_config; \
             CREATE FUNCTION pg_catalog.set_config(text, text, boolean) RETURNS text VOLATILE LANGUAGE plpgsql \
             AS $$ BEGIN RAISE EXCEPTION 'on purpose' USING ERRCODE = '57014'; END $$; \
             SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()",
        )
        .unwrap();
    let key = key();
    for _ in 0..20 {
        match client.try_advisory_lock(&key) {
            Err(error) if fails => assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}"),
            // Without a timer to set, nothing comes after the grant that could fail.
            answer => assert!(answer.unwrap().is_some() && !fails),
        }
        let held = |admin: &mut Client| -> i64 {
            admin.query_one("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'", &[]).unwrap().get(0)
        };
        wait_until(LIMIT, "the lock is gone with its session", || held(&mut admin) == 0);
    }
}

#[test]
fn a_token_ends_the_wait_for_a_server_that_does_not_answer() {
    let _alone = crate::support::alone();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let limit = LIMIT * 2;
    let client = builder()
        .operation_timeout(limit)
        .connection_timeout(limit)
        .connect(&format!("postgresql://postgres@127.0.0.1:{port}/postgres"))
        .unwrap();
    let token = syncguard::CancelToken::new();
    let start = Instant::now();
    thread::scope(|scope| {
        let call = scope.spawn(|| client.cancellable(&token).try_advisory_lock(&key()));
        let _silent = listener.accept().unwrap();
        token.cancel();
        assert_eq!(call.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
    });
    assert!(start.elapsed() < limit, "the token, not the timeout");
}

#[test]
fn a_grant_whose_answer_comes_when_its_time_is_over_makes_no_guard() {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new());
    let (client, clock) = (
        builder().max_connections(1).operation_timeout(LIMIT).connect(server.url()).unwrap(),
        client(server.url()),
    );
    let key = key();
    let mut late = None;
    wait_until(LIMIT, "an answer comes too late", || {
        let pid = taken(&client, key).pid().unsigned_abs();
        let limit = clock
            .try_advisory_lock_with(&self::key(), &holding(Duration::from_millis(300)))
            .unwrap()
            .unwrap();
        crate::support::cluster::signal(pid, "STOP");
        thread::scope(|scope| {
            let attempt =
                scope.spawn(|| client.try_advisory_lock_with(&key, &holding(Duration::from_millis(40))));
            assert!(limit.lost().wait_timeout(LIMIT));
            crate::support::cluster::signal(pid, "CONT");
            match attempt.join().unwrap() {
                // The thread came late itself.
                Ok(guard) => drop(guard.expect("nobody else wants it")),
                Err(error) => late = Some(error),
            }
        });
        late.is_some()
    });
    let error = late.unwrap();
    assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
    assert!(error.to_string().contains("max_hold"), "{error}");
    let mut observer = server.client();
    let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
    wait_until(LIMIT, "it is released", || observer.query_one(sql, &[]).unwrap().get::<_, i64>(0) == 0);
    drop(taken(&client, key));
}

#[test]
fn a_session_whose_settings_or_statements_were_discarded_has_its_timer_and_gets_its_own_back() {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new());
    let mut observer = server.client();
    if !has_session_timer(&mut observer) {
        return;
    }
    observer
        .batch_execute("ALTER ROLE postgres SET idle_session_timeout = '77s'; CREATE TABLE seen (timer text)")
        .unwrap();
    let proxy = Proxy::start(server.port());
    for discard in ["DISCARD ALL", "RESET ALL", "DEALLOCATE ALL", "RESET idle_session_timeout"] {
        proxy.pass_all();
        let url = proxy.url(server.url());
        let client = builder().max_connections(1).operation_timeout(LIMIT).connect(&url).unwrap();
        let first = taken(&client, key());
        let pid = first.pid();
        assert_eq!(first.release().unwrap(), ReleaseResult::Released);
        let ((tell, stopped), mut said) = (std::sync::mpsc::channel(), false);
        proxy.on_query(move |sql| {
            if sql.contains("EXECUTE sg_timed_try_") && !std::mem::replace(&mut said, true) {
                Action::SayFirst(discard)
            } else if sql.contains("EXECUTE sg_timed_unlock_") {
                Action::SayFirst("INSERT INTO seen SELECT current_setting('idle_session_timeout')")
            } else {
                if sql.contains("set_config('idle_session_timeout', E'") {
                    let _ = tell.send(sql.to_owned());
                }
                Action::Pass
            }
        });
        let second = taken(&client, key());
        assert_eq!(second.pid(), pid, "the one connection");
        assert_eq!(second.release().unwrap(), ReleaseResult::Released);
        let seen: Vec<String> = observer
            .query("DELETE FROM seen RETURNING timer", &[])
            .unwrap()
            .iter()
            .map(|row| row.get(0))
            .collect();
        assert_eq!(seen, ["31s"], "while it was held, after {discard}");
        let stop =
            stopped.recv_timeout(LIMIT).expect("the timer is stopped when no lock has come for a while");
        assert!(stop.contains("E'77s'") || stop.contains("E'77000ms'"), "after {discard}: {stop}");
    }
}
