//! One holder per key and ever greater fences, whoever comes from wherever at the same time.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use crate::support::calls::{acquire, asking_often, either_form, granted};
use crate::support::leases::{self, Witness, client, counter, forge, forged_id, row, set_counter};
use crate::support::{Config, LIMIT, Server, Stop, TTL, Worker, together, wait_until_app_waits, worker};
use syncguard::{
    AcquireResult, Acquired, CancelToken, ErrorCode, ExtendResult, LockBackend, Lookup, PgLockClient,
    ReleaseResult,
};

fn fence(n: u64) -> String {
    format!("{n:015}")
}

#[test]
fn sixty_four_threads_in_four_processes_never_meet_and_their_fences_rise() {
    const PROCESSES: usize = 4;
    const THREADS: usize = 16;
    const ROUNDS: usize = 3;
    worker::part("contender", |parent| {
        let url = parent.arg("url");
        let client = PgLockClient::connect(&url).unwrap();
        let witness = Witness::connect(&url);
        parent.say("ready");
        parent.hear();
        together(THREADS, |i| {
            let (client, who) = (either_form(&client, i), format!("{}-{i}", std::process::id()));
            for _ in 0..ROUNDS {
                let guard = client.lock_with("hot", &asking_often()).unwrap();
                witness.enter("hot", &who, &guard.fence().to_string());
                assert!(guard.is_held());
                assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
            }
        });
        parent.say("done");
    });
    let schema = crate::support::schema();
    client(&schema);
    Witness::create(&schema);
    let url = schema.url();
    let test = "sixty_four_threads_in_four_processes_never_meet_and_their_fences_rise";
    let mut workers: Vec<_> =
        (0..PROCESSES).map(|_| Worker::start(test, "contender", &[("url", &url)])).collect();
    for worker in &mut workers {
        worker.expect("ready");
    }
    for worker in &mut workers {
        worker.tell("go");
    }
    for worker in &mut workers {
        worker.expect("done");
    }

    let witness = Witness::connect(&url);
    let fences = witness.fences("hot");
    assert_eq!(fences.len(), PROCESSES * THREADS * ROUNDS);
    assert_eq!(witness.entered("hot"), i64::try_from(fences.len()).unwrap());
    assert_eq!(fences.first().map(String::as_str), Some("000000000000001"));
    assert!(fences.is_sorted_by(|a, b| a < b), "in the order of their holders: {fences:?}");
}

#[test]
fn of_thirty_two_connections_on_a_new_key_one_wins_and_has_fence_one() {
    let schema = crate::support::schema();
    let client = leases::connect(PgLockClient::builder().max_connections(32), &schema.url());
    let mut observer = schema.client();
    for round in 0..25 {
        let key = format!("new:{round}");
        let won: Vec<_> =
            together(32, |i| acquire(&either_form(&client, i), &key)).into_iter().flatten().collect();
        assert_eq!(won.len(), 1, "{key}: {won:?}");
        assert_eq!(won[0].fence.to_string(), "000000000000001");
        assert_eq!(row(&mut observer, &key).unwrap().lock_id, won[0].lock_id);
        assert_eq!(counter(&mut observer, &key), Some(1), "{key}: a loser raised the counter");
    }
}

#[test]
fn of_thirty_two_connections_on_an_expired_key_one_wins_and_has_the_next_fence() {
    let schema = crate::support::schema();
    let client = leases::connect(PgLockClient::builder().max_connections(32), &schema.url());
    let mut observer = schema.client();
    for round in 0..25 {
        let key = format!("expired:{round}");
        set_counter(&mut observer, &key, 6);
        forge(&mut observer, &key, &forged_id(round), -5000);
        let won: Vec<_> =
            together(32, |i| acquire(&either_form(&client, i), &key)).into_iter().flatten().collect();
        assert_eq!(won.len(), 1, "{key}: {won:?}");
        assert_eq!(won[0].fence.to_string(), fence(8));
        assert_eq!(row(&mut observer, &key).unwrap().lock_id, won[0].lock_id);
        assert_eq!(counter(&mut observer, &key), Some(8));
    }
}

#[test]
fn thirty_two_waiters_get_the_key_once_each_with_fences_one_to_thirty_two() {
    let schema = crate::support::schema();
    let clients = [(); 4].map(|()| client(&schema));
    let mut fences = together(32, |i| {
        let guard = either_form(&clients[i % 4], i / 4).lock_with("turns", &asking_often()).unwrap();
        let fence = guard.fence().get();
        assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
        fence
    });
    fences.sort_unstable();
    assert_eq!(fences, (1..=32).collect::<Vec<u64>>());
}

#[test]
fn keys_do_not_stand_in_each_others_way() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let grants: Vec<Vec<Acquired>> =
        together(16, |i| (0..16).map(|n| granted(&client, &format!("key:{i}:{n}"))).collect());
    let ids: HashSet<_> = grants.iter().flatten().map(|grant| grant.lock_id.clone()).collect();
    assert_eq!(ids.len(), 256);
    assert!(grants.iter().flatten().all(|grant| grant.fence.get() == 1));
    let held = schema.client().query_one("SELECT count(*) FROM syncguard_locks", &[]).unwrap();
    assert_eq!(held.get::<_, i64>(0), 256, "all are held at the same time");
}

#[test]
fn jobs_that_thirty_two_workers_check_and_mark_are_done_once_each() {
    const JOBS: usize = 100;
    worker::part("worker", |parent| {
        let url = parent.arg("url");
        let client = PgLockClient::connect(&url).unwrap();
        let witness = Witness::connect(&url);
        let config: postgres::Config = url.parse().unwrap();
        parent.say("ready");
        parent.hear();
        let done = AtomicUsize::new(0);
        together(8, |i| {
            let mut database = config.connect(postgres::NoTls).unwrap();
            // Two threads of every process come for each job.
            for job in (0..JOBS).filter(|job| job % 4 == i % 4) {
                let key = format!("job:{job}");
                let who = format!("{}-{i}", std::process::id());
                let work = |guard: &syncguard::LockGuard| {
                    let id = i64::try_from(job).unwrap();
                    let open = database.query_opt("SELECT 1 FROM jobs WHERE id = $1 AND NOT done", &[&id]);
                    if open.unwrap().is_some() {
                        witness.enter(&key, &who, &guard.fence().to_string());
                        database.execute("UPDATE jobs SET done = true WHERE id = $1", &[&id]).unwrap();
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                };
                client.with_lock(&key, &asking_often(), work).unwrap();
            }
        });
        parent.say(&done.into_inner().to_string());
    });
    let schema = crate::support::schema();
    client(&schema);
    Witness::create(&schema);
    let mut database = schema.client();
    database
        .batch_execute("CREATE TABLE jobs (id bigint PRIMARY KEY, done bool NOT NULL DEFAULT false)")
        .unwrap();
    database.execute("INSERT INTO jobs SELECT generate_series(0, $1::bigint - 1)", &[&100_i64]).unwrap();
    let url = schema.url();
    let test = "jobs_that_thirty_two_workers_check_and_mark_are_done_once_each";
    let mut workers: Vec<_> = (0..4).map(|_| Worker::start(test, "worker", &[("url", &url)])).collect();
    for worker in &mut workers {
        worker.expect("ready");
    }
    for worker in &mut workers {
        worker.tell("go");
    }
    let done: usize = workers.iter_mut().map(|worker| worker.hear().parse::<usize>().unwrap()).sum();
    assert_eq!(done, JOBS);
    let witness = Witness::connect(&url);
    for job in 0..JOBS {
        assert_eq!(witness.entered(&format!("job:{job}")), 1, "job {job}");
    }
}

#[test]
fn acquires_of_one_key_queue_in_the_server_and_those_of_another_pass() {
    let schema = crate::support::schema();
    let app = format!("queue-{}", schema.name());
    let client = leases::connect(PgLockClient::builder(), &leases::named(&schema.url(), &app));
    let (mut observer, mut first) = (schema.client(), schema.client());
    // What an acquire holds until its end, taken by hand.
    first.batch_execute("BEGIN; SELECT pg_advisory_xact_lock(hashtext('same'))").unwrap();
    thread::scope(|scope| {
        let second = scope.spawn(|| client.acquire("same", TTL));
        let pid = wait_until_app_waits(&mut observer, &app);
        let sql = "SELECT locktype, objsubid FROM pg_locks WHERE pid = $1 AND NOT granted";
        let waiting = observer.query_one(sql, &[&pid]).unwrap();
        assert_eq!((waiting.get::<_, &str>(0), waiting.get::<_, i16>(1)), ("advisory", 1));
        assert!(acquire(&client, "another").is_some(), "another key does not wait");
        first.batch_execute("ROLLBACK").unwrap();
        assert!(second.join().unwrap().unwrap().acquired().is_some());
    });
    let left = observer
        .query_one(
            "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) \
             WHERE l.locktype = 'advisory' AND a.application_name = $1",
            &[&app],
        )
        .unwrap();
    assert_eq!(left.get::<_, i64>(0), 0, "a transaction's end lets go of its queue");
}

#[test]
fn no_moment_shows_half_a_grant() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let stop = CancelToken::new();
    thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut seen = HashSet::new();
            while !stop.is_cancelled() {
                let now = leases::server_now_ms(&mut observer);
                let counter = counter(&mut observer, "k");
                let Some(row) = row(&mut observer, "k") else { continue };
                // Read in this order, the clock and the counter are older than the row.
                assert!(row.acquired_at_ms <= row.expires_at_ms - 30_000, "{row:?}");
                assert!(row.expires_at_ms > now, "{row:?} at {now}");
                assert_eq!((row.lock_id.len(), row.fence.len()), (22, 15));
                assert!(row.fence.parse::<i64>().unwrap() >= counter.unwrap_or(0), "{row:?}");
                seen.insert(row.lock_id);
            }
            seen
        });
        let mut granted_ids = HashSet::new();
        for i in 0..400 {
            let client = either_form(&client, i);
            let grant = granted(&client, "k");
            client.release(&grant.lock_id).unwrap();
            granted_ids.insert(grant.lock_id);
        }
        stop.cancel();
        let seen = watching.join().unwrap();
        assert_eq!(granted_ids.len(), 400, "no lock id is used twice");
        assert!(!seen.is_empty() && seen.is_subset(&granted_ids));
    });
}

#[test]
fn a_grant_says_what_the_row_says() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    for i in 0..40 {
        let key = format!("gr\u{e9}at:{i}");
        let before = leases::server_now_ms(&mut observer);
        let grant = granted(&either_form(&client, i), &key);
        let after = leases::server_now_ms(&mut observer);
        let row = row(&mut observer, &key).unwrap();
        assert_eq!((row.lock_id, row.fence), (grant.lock_id, grant.fence.to_string()));
        assert_eq!((row.expires_at_ms, row.user_key), (grant.expires_at_ms, key));
        assert_eq!(row.expires_at_ms - row.acquired_at_ms, 30_000);
        assert!((before..=after).contains(&row.acquired_at_ms), "by the server's clock, at the grant");
    }
}

#[test]
fn an_expired_row_is_overwritten_and_its_old_id_is_unknown() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    for form in 0..2 {
        let (key, old) = (format!("k{form}"), forged_id(form));
        forge(&mut observer, &key, &old, -5000);
        let before = row(&mut observer, &key).unwrap();
        let grant = granted(&either_form(&client, form), &key);
        let after = row(&mut observer, &key).unwrap();
        assert_eq!(after.lock_id, grant.lock_id);
        // The grant may fall into the millisecond of the forgery, so only their distance tells them apart.
        assert!(after.acquired_at_ms >= before.acquired_at_ms);
        assert_eq!(after.expires_at_ms - after.acquired_at_ms, 30_000);
        assert!(after.fence > before.fence);
        assert_eq!(client.release(&old).unwrap(), ReleaseResult::NotHeld);
        assert_eq!(client.extend(&old, TTL).unwrap(), ExtendResult::NotHeld);
        assert_eq!(row(&mut observer, &key).unwrap(), after);
    }
}

#[test]
fn a_row_within_the_tolerance_is_held_and_one_beyond_it_is_free() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    // Far enough from the edge that no slow machine crosses it: the edge itself is a unit test's.
    forge(&mut observer, "free", &forged_id(0), -1001);
    assert!(!client.is_locked("free").unwrap());
    assert!(acquire(&client, "free").is_some());
    forge(&mut observer, "held", &forged_id(1), 60_000);
    assert_eq!(client.acquire("held", TTL).unwrap(), AcquireResult::Locked);
    // On the edge time decides: whoever asks until it is granted is granted after the tolerance.
    forge(&mut observer, "edge", &forged_id(2), -1);
    let expired = row(&mut observer, "edge").unwrap().expires_at_ms;
    crate::support::wait_until(LIMIT, "the tolerance is over", || acquire(&client, "edge").is_some());
    let acquired = row(&mut observer, "edge").unwrap().acquired_at_ms;
    assert!(acquired >= expired + 1000, "granted {} ms after its expiry", acquired - expired);
}

#[test]
fn failures_of_the_system_are_errors_and_never_locked() {
    let server = Server::start(&Config::new());
    let schema = server.schema();
    let client =
        leases::connect(PgLockClient::builder().operation_timeout(Duration::from_secs(1)), &schema.url());
    let held = granted(&client, "k");
    schema.client().batch_execute("ALTER TABLE syncguard_locks RENAME TO elsewhere").unwrap();
    for form in 0..2 {
        let error = either_form(&client, form).acquire("k", TTL).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
        assert!(error.to_string().contains("setup_schema"), "{error}");
    }
    schema.client().batch_execute("ALTER TABLE elsewhere RENAME TO syncguard_locks").unwrap();
    assert_eq!(client.acquire("k", TTL).unwrap(), AcquireResult::Locked);
    server.stop(Stop::Fast);
    for form in 0..2 {
        let error = either_form(&client, form).acquire("k", TTL).unwrap_err();
        assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
        // One message, which commits, on a connection that may have lived: that is not known.
        assert_eq!(error.is_outcome_unknown(), form == 0, "{error:?}");
        assert!(error.key() == Some("k") && error.lock_id() != Some(&held.lock_id), "{error:?}");
    }
    // The backend's own errors say what they are about, too, and keep the driver's as their cause.
    let (id, never) = (held.lock_id.as_str(), CancelToken::never());
    for (error, about) in [
        (LockBackend::acquire(&client, "k", TTL, &never).unwrap_err(), (Some("k"), None)),
        (LockBackend::is_locked(&client, "k", &never).unwrap_err(), (Some("k"), None)),
        (LockBackend::release(&client, id, &never).unwrap_err(), (None, Some(id))),
        (LockBackend::extend(&client, id, TTL, &never).unwrap_err(), (None, Some(id))),
        (LockBackend::lookup(&client, Lookup::LockId(id), &never).unwrap_err(), (None, Some(id))),
    ] {
        assert_eq!(error.key(), about.0, "{error:?}");
        assert!(about.1.is_none_or(|id| error.lock_id() == Some(id)), "{error:?}");
        let causes = std::iter::successors(std::error::Error::source(&error), |cause| cause.source());
        assert!(causes.into_iter().any(<dyn std::error::Error>::is::<postgres::Error>), "{error:?}");
    }
}

#[test]
fn bad_keys_ttls_and_lock_ids_are_refused_before_anything_is_sent() {
    // Nobody listens on port 1: whatever is sent fails with another code.
    let url = "postgresql://postgres@127.0.0.1:1/postgres";
    let client = leases::connect(PgLockClient::builder().auto_create_tables(false), url);
    let invalid = |error: syncguard::LockError| {
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    };
    let (id, never) = (forged_id(0), CancelToken::never());
    for ttl in [Duration::ZERO, Duration::from_micros(500), Duration::from_millis(u64::MAX)] {
        invalid(client.acquire("k", ttl).unwrap_err());
        invalid(client.extend(&id, ttl).unwrap_err());
    }
    assert_eq!(
        client.acquire("k", Duration::from_millis(1)).unwrap_err().code(),
        ErrorCode::ServiceUnavailable,
        "a good ttl is sent"
    );
    for key in ["", "a\0b", &"k".repeat(513), &"e\u{301}".repeat(257)] {
        invalid(client.acquire(key, TTL).unwrap_err());
        invalid(client.is_locked(key).unwrap_err());
        invalid(client.lookup(Lookup::Key(key)).unwrap_err());
        invalid(client.get_by_key_raw(key).unwrap_err());
        invalid(LockBackend::acquire(&client, key, TTL, &never).unwrap_err());
        invalid(LockBackend::is_locked(&client, key, &never).unwrap_err());
        invalid(LockBackend::lookup(&client, Lookup::Key(key), &never).unwrap_err());
    }
    for id in [
        "",
        &"a".repeat(21),
        &"a".repeat(23),
        "aaaaaaaaaaaaaaaaaaaaa+",
        "aaaaaaaaaaaaaaaaaaaaa/",
        "aaaaaaaaaaaaaaaaaaaaa=",
        "aaaaaaaaaaaaaaaaaaaaa ",
        "aaaaaaaaaaaaaaaaaaaaa\n",
        "aaaaaaaaaaaaaaaaaaaaa\u{e9}",
        "aaaaaaaaaaaaaaaaaaaa\u{e9}",
    ] {
        invalid(client.release(id).unwrap_err());
        invalid(client.extend(id, TTL).unwrap_err());
        invalid(client.get_by_id(id).unwrap_err());
        invalid(LockBackend::release(&client, id, &never).unwrap_err());
        invalid(LockBackend::extend(&client, id, TTL, &never).unwrap_err());
        invalid(LockBackend::lookup(&client, Lookup::LockId(id), &never).unwrap_err());
        invalid(syncguard::validate_lock_id(id).unwrap_err());
    }
}

#[test]
fn a_single_acquire_is_one_attempt_in_one_message() {
    let server = Server::start(&Config::new());
    let schema = server.schema();
    let app = "one-attempt";
    let client = leases::connect(PgLockClient::builder(), &leases::named(&schema.url(), app));
    let held = granted(&client, "k");
    server.configure("log_statement", "all");
    let before = server.log().len();
    // In the log a statement that was sent in one message with others appears with all of them.
    let sent = |key: &str, at: usize| {
        let log = server.log();
        let line = |line: &&str| line.contains(app) && line.contains("statement: ") && line.contains(key);
        log.get(at..).unwrap().lines().filter(line).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(client.acquire("k", TTL).unwrap(), AcquireResult::Locked);
    crate::support::wait_until(LIMIT, "the attempt is logged", || !sent("'k'", before).is_empty());
    assert_eq!(sent("'k'", before).len(), 1, "{:#?}", sent("'k'", before));
    client.release(&held.lock_id).unwrap();
    assert!(acquire(&client, "other").is_some());
    assert_eq!(sent("'other'", before).len(), 1, "a grant takes one message as well");
}

#[test]
fn what_is_refused_sends_the_same_statements_with_telemetry_and_without() {
    let server = Server::start(&Config::new());
    let schema = server.schema();
    let refused = |client: &PgLockClient| {
        let unknown = forged_id(9);
        assert_eq!(client.acquire("held", TTL).unwrap(), AcquireResult::Locked);
        for id in [&unknown, &forged_id(2)] {
            assert_eq!(client.release(id).unwrap(), ReleaseResult::NotHeld);
            assert_eq!(client.extend(id, TTL).unwrap(), ExtendResult::NotHeld);
            assert!(client.get_by_id(id).unwrap().is_none());
        }
        assert!(!client.is_locked("dead").unwrap());
    };
    let clients = ["plain", "watched"].map(|app| {
        let builder = PgLockClient::builder().max_connections(1);
        let builder = match app {
            "watched" => builder.telemetry(syncguard::TelemetryOptions::new(|_| ())),
            _ => builder,
        };
        (app, leases::connect(builder, &leases::named(&schema.url(), app)))
    });
    let mut observer = schema.client();
    forge(&mut observer, "held", &forged_id(1), 3_600_000);
    forge(&mut observer, "dead", &forged_id(2), -5000);
    // The first time everything is prepared.
    clients.iter().for_each(|(_, client)| refused(client));
    server.configure("log_statement", "all");
    let [plain, watched] = clients.map(|(app, client)| {
        // Its session has read the setting once it logs.
        let logs = format!(" {app} LOG:  ");
        crate::support::wait_until(LIMIT, "the session logs its statements", || {
            client.is_locked("so that there is a statement").unwrap();
            server.log().contains(&logs)
        });
        let before = server.log().len();
        refused(&client);
        let end = format!("end-{app}");
        assert!(acquire(&client, &end).is_some());
        let sent = || {
            let log = server.log();
            let of_app = |line: &str| {
                line.split_once(&format!(" {app} LOG:  "))?.1.split_once(": ").map(|line| line.1.to_owned())
            };
            log.get(before..).unwrap().lines().filter_map(of_app).collect::<Vec<_>>()
        };
        crate::support::wait_until(LIMIT, "everything is logged", || {
            server.log().get(before..).unwrap().contains(&end)
        });
        let mut sent = sent();
        sent.retain(|line| !line.contains(&end));
        // Each acquire chooses a lock id of its own.
        sent.iter().map(|line| line.split("E'held',E'").next().unwrap().to_owned()).collect::<Vec<_>>()
    });
    // A release that sees no live lease asks once more, on the locked row.
    assert_eq!(plain.len(), 10, "{plain:#?}");
    assert_eq!(plain, watched);
}
