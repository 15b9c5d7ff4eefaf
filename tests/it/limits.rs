//! The ends of every range: times, keys, counters, rows that nobody should have written.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod keys;
mod times;

use std::time::Duration;

use crate::support::calls::{FORMS, token};
use crate::support::{Call, LIMIT, Scripted, TTL, id, logs, place, unique};
use log::Level;
use syncguard::backend::{Attempt, Clock, RenewOutcome, Renewal};
use syncguard::{
    AcquireResult, Backoff, CancelToken, ErrorCode, ExtendResult, FENCE_MAX, FENCE_WARN, Heartbeat,
    LockBackend, LockOptions, Lookup, MAX_TTL, PgLockClient, ReleaseResult, hash_key,
};

#[test]
fn a_ttl_that_is_too_short_or_too_long_is_refused_by_every_call() {
    let place = place();
    let (held_key, key) = (place.key("held"), place.key("a"));
    let guard = place.client.lock(&held_key).unwrap();
    let before = place.stored.row(&held_key);
    for ttl in [
        Duration::ZERO,
        Duration::from_nanos(1),
        Duration::from_micros(999),
        MAX_TTL + Duration::from_millis(1),
        Duration::MAX,
    ] {
        let options = LockOptions::new().ttl(ttl);
        let codes = [
            place.client.acquire(&key, ttl).unwrap_err().code(),
            place.client.extend(guard.lock_id(), ttl).unwrap_err().code(),
            place.client.lock_with(&key, &options).unwrap_err().code(),
            place.client.try_lock_with(&key, &options).unwrap_err().code(),
            place.client.with_lock(&key, &options, |_| ()).unwrap_err().code(),
            guard.extend(ttl).unwrap_err().code(),
        ];
        assert_eq!(codes, [ErrorCode::InvalidArgument; 6], "{ttl:?}");
    }
    assert_eq!(place.stored.row(&held_key), before);
    assert!(place.stored.row(&key).is_none() && place.stored.counter(&key).is_none());
    assert!(guard.is_held());
}

#[test]
fn the_longest_times_overflow_nothing() {
    let place = place();
    let builder = PgLockClient::builder()
        .operation_timeout(Duration::MAX)
        .connection_timeout(Duration::MAX)
        .dispose_timeout(Duration::MAX);
    let client = place.build(&unique(), builder);
    let key = place.key("a");
    let endless = |token: &CancelToken| {
        LockOptions::new()
            .ttl(MAX_TTL)
            .timeout(Duration::MAX)
            .max_retries(u32::MAX)
            .retry_delay(Duration::MAX)
            .backoff(Backoff::Exponential)
            .max_hold(Duration::MAX)
            .min_hold(Duration::ZERO)
            .cancel(token)
    };
    let never = CancelToken::new();
    let guard = client.lock_with(&key, &endless(&never)).unwrap();
    assert!(matches!(guard.extend(MAX_TTL).unwrap(), ExtendResult::Extended { .. }));
    assert!(guard.remaining() > MAX_TTL / 2);

    let token = CancelToken::new();
    let call = {
        let (client, key, options) = (client.clone(), key.clone(), endless(&token));
        Call::start(&unique(), move || client.lock_with(&key, &options).map(drop))
    };
    token.cancel();
    assert_eq!(call.join().unwrap_err().code(), ErrorCode::Aborted);
    let spaced = LockOptions::new().heartbeat(Heartbeat::Every(Duration::MAX));
    // Refused or accepted, but never a panic: it may be longer than the lease.
    let _ = client.try_lock_with(&place.key("b"), &spaced);
    assert_eq!(client.operator().cleanup_expired(u32::MAX).unwrap(), 0);
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
}

#[test]
fn the_shortest_ttl_ends_in_a_held_guard_or_in_a_timeout() {
    let place = place();
    let options = LockOptions::new().ttl(Duration::from_millis(1)).timeout(Duration::from_millis(500));
    match place.client.lock_with(&place.key("a"), &options) {
        Ok(guard) => drop(guard),
        Err(error) => assert_eq!(error.code(), ErrorCode::AcquisitionTimeout, "{error:?}"),
    }
    let grant =
        place.client.acquire(&place.key("b"), Duration::from_micros(1999)).unwrap().acquired().unwrap();
    let row = place.stored.row(&place.key("b")).unwrap();
    assert_eq!(grant.expires_at_ms - row.acquired_at_ms, 1, "a fraction is cut off");
}

#[test]
fn a_counter_near_its_limit_warns_and_at_its_limit_grants_nothing() {
    let place = place();
    let (warn, max) = (i64::try_from(FENCE_WARN).unwrap(), i64::try_from(FENCE_MAX).unwrap());
    for two in FORMS {
        let key = place.key(&format!("near {two}"));
        for (counter, warnings) in [(warn - 1, 0), (warn, 1), (max - 1, 1)] {
            place.stored.set_counter(&key, counter);
            let log = logs::capture();
            let grant =
                LockBackend::acquire(&place.client, &key, TTL, &token(two)).unwrap().acquired().unwrap();
            let lines: Vec<_> =
                log.of_this_thread().into_iter().filter(|line| line.level <= Level::Warn).collect();
            assert_eq!(lines.len(), warnings, "{counter}: {lines:#?}");
            assert!(
                lines.iter().all(|line| line.text.contains(&hash_key(&key)) && !line.text.contains(&key))
            );
            assert_eq!(grant.fence.get(), u64::try_from(counter + 1).unwrap());
            assert_eq!(place.stored.row(&key).unwrap().fence, format!("{:015}", counter + 1));
            place.client.release(&grant.lock_id).unwrap();
        }
        // With a row that is over, and without any.
        for dead in [true, false] {
            for counter in [max, max + 1, 999_999_999_999_999, 1_000_000_000_000_000, i64::MAX] {
                let key = place.key(&format!("over {two} {dead} {counter}"));
                if dead {
                    place.stored.write(&key, &id(&format!("{two}{dead}{counter}")[..20]), -5_000, 7);
                }
                place.stored.set_counter(&key, counter);
                let before = place.stored.row(&key);
                let error = LockBackend::acquire(&place.client, &key, TTL, &token(two)).unwrap_err();
                assert_eq!(
                    (error.code(), error.is_outcome_unknown()),
                    (ErrorCode::Internal, false),
                    "{error:?}"
                );
                assert!(!error.to_string().contains(&key));
                assert_eq!((place.stored.counter(&key), place.stored.row(&key)), (Some(counter), before));
                place.stored.remove(&key);
            }
        }
    }
}

#[test]
fn rows_that_nobody_should_have_written_are_an_error_and_never_a_panic() {
    let place = place();
    let client = &place.client;
    let (healthy, healthy_id) = (place.key("healthy"), id("healthy"));
    place.stored.write(&healthy, &healthy_id, 30_000, 7);
    for (n, fence) in
        ["abc", "", "-1", "1", "0000000000000000000007", "99999999999999999", "00000000000000\u{663}"]
            .iter()
            .enumerate()
    {
        let (key, mine) = (place.key(&format!("fence {n}")), id(&format!("mine{n}")));
        place.stored.write(&key, &mine, 30_000, 7);
        place
            .stored
            .client()
            .execute("UPDATE syncguard_locks SET fence = $2 WHERE key = $1", &[&key, fence])
            .unwrap();
        let deadline = Clock::system().now().after(LIMIT);
        let attempt = Attempt::new(&key, &mine, TTL, deadline);
        let other = id("nobody");
        let renewal = Renewal::new(&key, &other, syncguard::Fence::new(1).unwrap(), TTL);
        for two in FORMS {
            let codes = [
                LockBackend::lookup(client, Lookup::Key(&key), &token(two)).unwrap_err().code(),
                LockBackend::lookup(client, Lookup::LockId(&mine), &token(two)).unwrap_err().code(),
                client.attempt(&attempt, &token(two)).unwrap_err().code(),
                client.renew(&[renewal], deadline).remove(0).unwrap_err().code(),
                client.operator().holders(10).unwrap_err().code(),
            ];
            assert_eq!(codes, [ErrorCode::Internal; 5], "{fence:?}");
            let healthy = Renewal::new(&healthy, &healthy_id, syncguard::Fence::new(7).unwrap(), TTL);
            for batch in [[healthy, renewal], [renewal, healthy]] {
                let outcomes = client.renew(&batch, deadline);
                let renewed = outcomes.iter().filter(|o| matches!(o, Ok(RenewOutcome::Renewed { .. })));
                assert_eq!(renewed.count(), 1, "{fence:?} is one lease's trouble: {outcomes:?}");
            }
            assert_eq!(LockBackend::acquire(client, &key, TTL, &token(two)).unwrap(), AcquireResult::Locked);
            assert!(matches!(client.extend(&mine, TTL).unwrap(), ExtendResult::Extended { .. }));
        }
        assert_eq!(client.release(&mine).unwrap(), ReleaseResult::Released, "what needs no fence works");
    }
    for (n, expires) in [i64::MAX, i64::MIN, 0, -1].into_iter().enumerate() {
        let (key, mine) = (place.key(&format!("time {n}")), id(&format!("time{n}")));
        place.stored.write(&key, &mine, 0, 7);
        place
            .stored
            .client()
            .execute("UPDATE syncguard_locks SET expires_at_ms = $2 WHERE key = $1", &[&key, &expires])
            .unwrap();
        let live = expires > 0;
        assert_eq!(client.is_locked(&key).unwrap(), live);
        assert_eq!(client.get_by_key(&key).unwrap().is_some(), live);
        assert_eq!(client.acquire(&key, TTL).unwrap().acquired().is_none(), live);
        assert_eq!(client.owns(&mine).unwrap(), live);
    }
    let key = place.key("counter");
    place.stored.set_counter(&key, -5);
    assert_eq!(client.acquire(&key, TTL).unwrap_err().code(), ErrorCode::Internal);
}

#[test]
fn a_hundred_thousand_locks_need_less_than_a_kilobyte_each_and_every_statement_uses_an_index() {
    let place = place();
    place.stored.run(
        "INSERT INTO syncguard_locks SELECT 'app:prod:payment:' || n, lpad(n::text, 22, 'x'), 1800000000000 + n, 1700000000000, \
           '000000000000001', 'app:prod:payment:' || n FROM generate_series(1, 100000) n; \
         INSERT INTO syncguard_fence_counters SELECT 'fence:app:prod:payment:' || n, 1, 'app:prod:payment:' || n FROM generate_series(1, 100000) n; \
         ANALYZE syncguard_locks, syncguard_fence_counters",
    );
    let sql = "SELECT (pg_total_relation_size('syncguard_locks') + pg_total_relation_size('syncguard_fence_counters')) / 100000";
    let each: i64 = place.stored.one(sql, &[]).get(0);
    assert!(each < 1024, "{each} bytes per lock");

    // Without what the library switches off: the indexes are simply the better way.
    let mut scripted = Scripted::new(&place.schema);
    let plans = "SELECT name, parameter_types::text[] FROM pg_prepared_statements WHERE name LIKE 'sg\\_%'";
    let statements = scripted.client().query(plans, &[]).unwrap();
    assert!(statements.len() >= 17, "all of them are prepared at once");
    for row in statements {
        let (name, types): (String, Vec<String>) = (row.get(0), row.get(1));
        let arguments: Vec<_> = types
            .iter()
            .map(|of| match of.as_str() {
                "text" => "'app:prod:payment:7'",
                "bigint" => "30000",
                "text[]" => "ARRAY['a', 'b']",
                "bigint[]" => "ARRAY[1, 2]::int8[]",
                other => panic!("{name}: {other}"),
            })
            .collect();
        let list = if arguments.is_empty() { String::new() } else { format!("({})", arguments.join(", ")) };
        let rows = scripted.client().query(&format!("EXPLAIN EXECUTE {name}{list}"), &[]).unwrap();
        let plan: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        let reads = |line: &String| line.contains("Seq Scan on syncguard");
        assert!(!plan.iter().any(reads), "{name}: {plan:#?}");
    }
    let sql = "EXPLAIN SELECT key FROM syncguard_locks WHERE expires_at_ms < 1800000000100 ORDER BY expires_at_ms LIMIT 100";
    let rows = scripted.client().query(sql, &[]).unwrap();
    let plan: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert!(plan.iter().any(|line| line.contains("idx_syncguard_locks_expires")), "{plan:#?}");
}
