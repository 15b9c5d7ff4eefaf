//! Session locks under contention: turns, waits and how they end, and what many of them leave behind.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::leases::spawn_until_asleep;
use crate::support::session_locks::{client, connections, holders, key, named, taken};
use crate::support::{LIMIT, server, together, unique, wait_until};
use syncguard::{AdvisoryKey, AdvisoryOptions, CancelToken, ErrorCode, PgLockClient, ReleaseResult};

#[test]
fn of_simultaneous_tries_one_succeeds() {
    const THREADS: usize = 16;
    let name = unique();
    let client = named(&name, 16);
    for _ in 0..200 {
        let key = key();
        let guards = together(THREADS, |_| client.try_advisory_lock(&key).unwrap());
        assert_eq!(guards.iter().filter(|guard| guard.is_some()).count(), 1);
    }
}

#[test]
fn a_wait_ends_with_its_timeout_and_keeps_nothing() {
    let (a, b, mut observer, key) = (client(), client(), server().client(), key());
    let guard = taken(&a, key);
    let start = Instant::now();
    let options = AdvisoryOptions::new().timeout(Duration::from_millis(200));
    let error = b.advisory_lock_with(&key, &options).unwrap_err();
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert!(start.elapsed() >= Duration::from_millis(200));
    drop(guard);
    assert_eq!(holders(&mut observer, key), 0);
    let error = b.advisory_lock_with(&key, &AdvisoryOptions::new().timeout(Duration::ZERO)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout, "not even a free key in no time");
}

#[test]
fn a_waiter_gets_the_lock_that_another_client_releases() {
    let (a, b, key) = (client(), client(), key());
    let guard = taken(&a, key);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| b.advisory_lock_with(&key, &AdvisoryOptions::new().wait_forever()));
        drop(guard);
        assert!(waiter.join().unwrap().unwrap().is_held());
    });
}

#[test]
fn waiting_threads_of_one_client_never_hold_together_and_all_get_their_turn() {
    let (client, key) = (named(&unique(), 3), key());
    let inside = AtomicUsize::new(0);
    let turns: usize = together(8, |_| {
        for _ in 0..25 {
            let guard = client.advisory_lock_with(&key, &AdvisoryOptions::new().timeout(LIMIT)).unwrap();
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
            inside.fetch_sub(1, Ordering::SeqCst);
            drop(guard);
        }
        25
    })
    .into_iter()
    .sum();
    assert_eq!(turns, 200);
}

#[test]
fn workers_with_one_key_each_cannot_deadlock() {
    // As many connections as threads: what they wait for is each other.
    let client = named(&unique(), 32);
    let keys: Vec<_> = (0..8).map(|_| key()).collect();
    together(32, |i| {
        // More than 10,000 in all.
        for round in 0..313 {
            let options = AdvisoryOptions::new().timeout(LIMIT);
            drop(client.advisory_lock_with(&keys[(i + round) % keys.len()], &options).unwrap());
        }
    });
}

#[test]
fn a_token_ends_a_wait() {
    let (client, key) = (client(), key());
    let guard = taken(&client, key);
    let (of_options, of_client) = (CancelToken::new(), CancelToken::new());
    let waits = |client: &PgLockClient, options: &AdvisoryOptions, token: &CancelToken| {
        thread::scope(|scope| {
            let waiter = scope.spawn(|| client.advisory_lock_with(&key, options));
            token.cancel();
            waiter.join().unwrap().unwrap_err().code()
        })
    };
    let forever = AdvisoryOptions::new().wait_forever();
    let cancellable = client.cancellable(&of_client);
    assert_eq!(waits(&client, &forever.clone().cancel(&of_options), &of_options), ErrorCode::Aborted);
    assert_eq!(waits(&cancellable, &forever, &of_client), ErrorCode::Aborted);
    assert_eq!(cancellable.try_advisory_lock(&key).unwrap_err().code(), ErrorCode::Aborted);
    assert!(guard.is_held(), "a token ends waits, not holds");
}

#[test]
fn a_waiter_behind_another_one_is_woken_by_its_token_and_by_close() {
    let (name, key) = (unique(), key());
    let (client, mut observer) = (named(&name, 5), server().client());
    let long = AdvisoryOptions::new().max_hold(LIMIT * 3);
    let guard = client.advisory_lock_with(&key, &long).unwrap();
    // Only a test that fails waits so long.
    let options = AdvisoryOptions::new().timeout(LIMIT * 2);
    let token = CancelToken::new();
    let start: String = observer.query_one("SELECT clock_timestamp()::text", &[]).unwrap().get(0);
    thread::scope(|scope| {
        let first = scope.spawn(|| client.advisory_lock_with(&key, &options).map(drop));
        wait_until(LIMIT, "the first in the queue has tried", || {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND pid <> $2 \
                       AND state_change > $3::text::timestamptz";
            observer.query_one(sql, &[&name, &guard.pid(), &start]).unwrap().get::<_, i64>(0) > 0
        });
        let cancelled = spawn_until_asleep(scope, || {
            client.advisory_lock_with(&key, &options.clone().cancel(&token)).map(drop)
        });
        token.cancel();
        wait_until(LIMIT, "it ends", || cancelled.is_finished());
        assert_eq!(cancelled.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
        assert!(!first.is_finished(), "it waits on");
        let closed = spawn_until_asleep(scope, || client.advisory_lock_with(&key, &options).map(drop));
        assert!(client.close(LIMIT).unwrap().is_clean());
        for waiter in [first, closed] {
            assert_eq!(waiter.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
        }
    });
}

#[test]
fn ten_thousand_timed_out_attempts_leave_no_lock() {
    const THREADS: usize = 4;
    let (name, key) = (unique(), key());
    let (holder, waiters) = (client(), named(&name, 4));
    let got = AtomicUsize::new(0);
    let done = CancelToken::new();
    thread::scope(|scope| {
        // Comes and goes, so that some attempts are granted in their last moment.
        let changing = scope.spawn(|| {
            while !done.is_cancelled() {
                if let Some(guard) = holder.try_advisory_lock(&key).unwrap() {
                    let _ = done.wait_timeout(Duration::from_millis(20));
                    drop(guard);
                }
            }
        });
        together(THREADS, |thread| {
            for i in 0..10_000 / THREADS {
                let micros = u64::try_from((i * 7 + thread * 13) % 900).unwrap();
                let options = AdvisoryOptions::new().timeout(Duration::from_micros(micros));
                match waiters.advisory_lock_with(&key, &options) {
                    Ok(guard) => {
                        got.fetch_add(1, Ordering::SeqCst);
                        drop(guard);
                    }
                    Err(error) => assert!(
                        matches!(error.code(), ErrorCode::AcquisitionTimeout | ErrorCode::RateLimited),
                        "{error:?}"
                    ),
                }
            }
        });
        done.cancel();
        changing.join().unwrap();
    });
    let mut observer = server().client();
    wait_until(LIMIT, "no lock is left", || holders(&mut observer, key) == 0);
    wait_until(LIMIT, "no connection too many is left", || connections(&mut observer, &name) <= 4);
    assert!(got.load(Ordering::SeqCst) < 10_000);
}

#[test]
fn a_thousand_failures_of_each_kind_cost_no_connection() {
    let (name, key, mut observer) = (unique(), key(), server().client());
    let client = named(&name, 2);
    let long = AdvisoryOptions::new().max_hold(LIMIT * 10);
    let guard = client.try_advisory_lock_with(&key, &long).unwrap().unwrap();
    // The second connection exists.
    drop(taken(&client, AdvisoryKey::from_text(&unique())));
    let start = connections(&mut observer, &name);
    let fired = CancelToken::new();
    fired.cancel();
    let short = AdvisoryOptions::new().timeout(Duration::from_micros(300));
    let rounds = 1000;
    for _ in 0..rounds {
        assert!(client.try_advisory_lock(&key).unwrap().is_none());
    }
    for _ in 0..rounds {
        let _ = client.advisory_lock_with(&key, &short).unwrap_err();
    }
    for _ in 0..rounds {
        let token = CancelToken::new();
        let options = AdvisoryOptions::new().wait_forever().cancel(&token);
        thread::scope(|scope| {
            scope.spawn(|| token.cancel());
            let start = Instant::now();
            let error = client.advisory_lock_with(&key, &options).unwrap_err();
            assert_eq!(error.code(), ErrorCode::Aborted, "{error:?} after {:?}", start.elapsed());
        });
    }
    let free = AdvisoryKey::from_text(&unique());
    let other = client.try_advisory_lock_with(&free, &long).unwrap().unwrap();
    let impatient = AdvisoryOptions::new().timeout(Duration::from_micros(100));
    for _ in 0..rounds {
        // All connections are in use.
        let code = client.advisory_lock_with(&AdvisoryKey::from_i64(1 << 50), &impatient).unwrap_err().code();
        assert!(matches!(code, ErrorCode::RateLimited | ErrorCode::AcquisitionTimeout), "{code}");
    }
    drop(other);
    let at_start = || connections(&mut observer, &name) <= start;
    wait_until(LIMIT, "as many connections as at the start", at_start);
    assert!(guard.is_held());
    drop(guard);
    drop(taken(&client, key));
}

#[test]
fn an_index_is_built_concurrently_beside_five_waiters() {
    let (schema, key) = (crate::support::schema(), key());
    let holder = client();
    let long = AdvisoryOptions::new().max_hold(LIMIT * 10);
    let guard = holder.try_advisory_lock_with(&key, &long).unwrap().unwrap();
    let waiting: Vec<_> = (0..5).map(|_| client()).collect();
    let enough = CancelToken::new();
    thread::scope(|scope| {
        let waiters: Vec<_> = waiting
            .iter()
            .map(|client| {
                let options = AdvisoryOptions::new().wait_forever().cancel(&enough);
                scope.spawn(move || client.advisory_lock_with(&key, &options))
            })
            .collect();
        let mut work = schema.client();
        work.batch_execute("SET statement_timeout = '60s'").unwrap();
        work.batch_execute("CREATE TABLE t AS SELECT n FROM generate_series(1, 10000) AS n").unwrap();
        for i in 0..3 {
            work.batch_execute(&format!("CREATE INDEX CONCURRENTLY i{i} ON t (n)")).unwrap();
        }
        assert!(waiters.iter().all(|waiter| !waiter.is_finished()), "all five waited meanwhile");
        enough.cancel();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
        }
    });
    assert!(guard.is_held());
}

#[test]
fn a_pool_without_a_free_connection_says_so_and_the_lock_stays() {
    let client = named(&unique(), 1);
    let guard = taken(&client, key());
    let options = AdvisoryOptions::new().timeout(Duration::from_millis(50));
    let error = client.advisory_lock_with(&key(), &options).unwrap_err();
    assert_eq!(error.code(), ErrorCode::RateLimited);
    assert!(guard.is_held());
    drop(guard);
    drop(taken(&client, key()));
}

#[test]
fn release_drop_deadline_and_monitor_may_meet() {
    let (client, key, mut observer) = (named(&unique(), 4), key(), server().client());
    let released = together(4, |thread| {
        let mut released = 0;
        for i in 0..100 {
            let hold = Duration::from_micros(u64::try_from(500 + (i * 37 + thread * 11) % 3000).unwrap());
            let options = AdvisoryOptions::new().timeout(LIMIT);
            let options = options.max_hold(hold.max(Duration::from_millis(1)));
            let guard = match client.advisory_lock_with(&key, &options) {
                Ok(guard) => guard,
                // Its time was over before the answer came.
                Err(error) if error.code() == ErrorCode::NetworkTimeout => continue,
                Err(error) => panic!("{error:?}"),
            };
            while guard.is_held() && i % 3 == 0 {
                thread::yield_now();
            }
            released += i32::from(guard.release().unwrap() == ReleaseResult::Released);
        }
        released
    });
    assert!(released.iter().sum::<i32>() > 0);
    wait_until(LIMIT, "no lock is left", || holders(&mut observer, key) == 0);
}
