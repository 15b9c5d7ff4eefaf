//! What operators see, and the two ways to take rows away.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod breaking;
mod marks;
mod permits;

use std::time::Duration;

use crate::support::{
    Call, Config, LIMIT, Place, Role, Server, TTL, id, logs, place, unique, wait_until, wait_until_app_waits,
};
use syncguard::backend::ReleaseOutcome;
use syncguard::{
    CLEANUP_GUARD_MS, CancelToken, ErrorCode, ExtendResult, LockBackend, Lookup, PgLockClient, Reason,
    hash_key,
};

#[test]
fn holders_are_the_live_leases_those_that_end_last_first() {
    let place = place();
    let operator = place.client.operator();
    assert_eq!(operator.holders(10).unwrap(), []);
    for (key, ttl_ms) in [("short", 10_000), ("long", 60_000), ("over", -1_500), ("nearly over", -1)] {
        place.stored.write(key, &id(&key.replace(' ', "-")), ttl_ms, 7);
    }
    let raw = operator.holders_raw(10).unwrap();
    let keys: Vec<_> = raw.iter().map(|info| info.key.as_str()).collect();
    assert!(keys == ["long", "short", "nearly over"] || keys == ["long", "short"], "{keys:?}");
    let holders = operator.holders(2).unwrap();
    assert_eq!(holders, raw.iter().take(2).map(syncguard::LockInfoRaw::sanitized).collect::<Vec<_>>());
    let shown = format!("{holders:?} {raw:?}");
    assert!(!shown.contains("short") && !shown.contains(&id("short")), "{shown}");
    assert_eq!(holders[0].key_hash, hash_key("long"));
    assert_eq!(operator.holders(0).unwrap(), []);
}

#[test]
fn counts_tell_live_expired_and_counters_apart() {
    let place = place();
    for n in 0..3 {
        place.stored.write(&format!("live {n}"), &id(&format!("live{n}")), 30_000, 7);
    }
    for n in 0..2 {
        place.stored.write(&format!("dead {n}"), &id(&format!("dead{n}")), -1_500, 7);
    }
    place.stored.set_counter("never held now", 5);
    let counts = place.client.operator().counts().unwrap();
    assert_eq!((counts.live, counts.expired, counts.counters), (3, 2, 6));
}

#[test]
fn waiters_are_the_sessions_that_are_stuck_over_a_key_and_whom_they_wait_for() {
    let place = place();
    let (key, other) = (place.key("a"), place.key("b"));
    let mut holder = place.schema.client();
    let pid: i32 = holder.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0);
    holder
        .batch_execute(&format!(
            "BEGIN; SELECT pg_advisory_xact_lock(hashtext('{key}')), pg_advisory_xact_lock(hashtext('{other}'))"
        ))
        .unwrap();
    let names = [unique(), unique()];
    let calls: Vec<_> = names
        .iter()
        .zip([&key, &other])
        .map(|(name, key)| {
            let (client, key) = (place.named(name), key.clone());
            Call::start(name, move || client.acquire(&key, TTL))
        })
        .collect();
    for call in &calls {
        call.wait_until_blocked(&place.stored);
    }
    let operator = place.client.operator();
    for (key, name) in [&key, &other].into_iter().zip(&names) {
        let waiters = operator.blocked(key).unwrap();
        assert_eq!(waiters.len(), 1, "{waiters:?}");
        assert_eq!(
            (&waiters[0].application_name, waiters[0].blocked_by.as_slice()),
            (name, [pid].as_slice())
        );
        assert!(waiters[0].waiting_ms >= 0 && waiters[0].pid != pid);
    }
    assert_eq!(operator.blocked(&place.key("c")).unwrap(), []);
    // A lock of two integers that looks alike is another lock.
    holder.batch_execute("COMMIT").unwrap();
    for call in calls {
        assert!(call.join().unwrap().acquired().is_some());
    }
    assert_eq!(operator.blocked(&key).unwrap(), []);

    // One that is through the queue and waits for the row of a lease that is over.
    let row = place.key("row");
    place.stored.write(&row, &id("over"), -5_000, 7);
    holder
        .batch_execute(&format!("BEGIN; SELECT FROM syncguard_locks WHERE key = '{row}' FOR UPDATE"))
        .unwrap();
    let name = unique();
    let call = {
        let (client, key) = (place.named(&name), row.clone());
        Call::start(&name, move || client.acquire(&key, TTL))
    };
    call.wait_until_blocked(&place.stored);
    let waiters = operator.blocked(&row).unwrap();
    assert_eq!(waiters.len(), 1, "{waiters:?}");
    assert_eq!((&waiters[0].application_name, waiters[0].blocked_by.as_slice()), (&name, [pid].as_slice()));
    holder.batch_execute("COMMIT").unwrap();
    assert!(call.join().unwrap().acquired().is_some());
    assert_eq!(operator.blocked(&row).unwrap(), []);
}

#[test]
fn clean_up_deletes_what_is_over_for_two_seconds_and_nothing_else() {
    let place = place();
    for (key, ttl_ms) in [
        ("live", 30_000),
        ("edge", -1),
        ("1500", -1_500),
        ("1700", -1_700),
        ("2500", -2_500),
        ("old", -3_600_000),
    ] {
        place.stored.write(key, &id(key), ttl_ms, 7);
    }
    assert_eq!(CLEANUP_GUARD_MS, 2_000);
    let operator = place.client.operator();
    assert_eq!(operator.cleanup_expired(1).unwrap(), 1);
    assert!(place.stored.row("old").is_none() && place.stored.row("2500").is_some(), "the oldest first");
    let deleted = operator.cleanup_expired(100).unwrap();
    let began = place.stored.row("live").unwrap().acquired_at_ms;
    if place.stored.now_ms() - began < 250 {
        assert_eq!(deleted, 1);
        assert!(["live", "edge", "1500", "1700"].iter().all(|key| place.stored.row(key).is_some()));
    }
    assert!(place.stored.row("2500").is_none() && place.stored.row("live").is_some());
    for key in ["live", "edge", "1500", "1700", "2500", "old"] {
        assert_eq!(place.stored.counter(key), Some(7), "counters stay");
    }
    // The row that went in the middle of its guard stays until it is old enough, to the millisecond.
    let row = place.stored.row("live").unwrap();
    place.stored.write("exact", &id("exact"), -1_800, 7);
    let expires = place.stored.row("exact").unwrap().expires_at_ms;
    wait_until(LIMIT, "the row is old enough", || {
        operator.cleanup_expired(100).unwrap() > 0 && place.stored.row("exact").is_none()
    });
    assert!(place.stored.now_ms() > expires + 2_000);
    assert_eq!(place.stored.row("live").unwrap(), row);
}

#[test]
fn clean_up_needs_no_right_to_delete_counters() {
    let place = place();
    let role = Role::without_rights(&place.schema);
    place.stored.run(&format!(
        "GRANT USAGE ON SCHEMA {} TO {name}; GRANT SELECT, INSERT, UPDATE, DELETE ON syncguard_locks TO {name}; \
         GRANT SELECT, INSERT, UPDATE ON syncguard_fence_counters TO {name}",
        place.schema.name(),
        name = role.name()
    ));
    let client = role.connect(PgLockClient::builder().cleanup_in_is_locked(true)).unwrap();
    place.stored.write("old", &id("old"), -5_000, 7);
    assert_eq!(client.operator().cleanup_expired(10).unwrap(), 1);
    assert_eq!(client.operator().break_lock("old", "a test").unwrap().fence.get(), 8);
}

#[test]
fn clean_up_skips_a_row_that_somebody_is_working_on() {
    let place = place();
    for key in ["busy", "idle"] {
        place.stored.write(key, &id(key), -5_000, 7);
    }
    let mut busy = place.schema.client();
    busy.batch_execute("BEGIN; SELECT FROM syncguard_locks WHERE key = 'busy' FOR UPDATE").unwrap();
    assert_eq!(place.client.operator().cleanup_expired(10).unwrap(), 1);
    assert!(place.stored.row("busy").is_some() && place.stored.row("idle").is_none());
    busy.batch_execute("ROLLBACK").unwrap();
    assert_eq!(place.client.operator().cleanup_expired(10).unwrap(), 1);
}

#[test]
fn a_lease_that_was_extended_in_the_meantime_survives_clean_up() {
    let place = place();
    let name = unique();
    let client = place.named(&name);
    let renewed = |key: &str| {
        format!(
            "UPDATE syncguard_locks SET expires_at_ms = {} + 30000 WHERE key = '{key}'",
            crate::support::NOW
        )
    };

    // The row is renewed and its transaction still open: what cleanup sees is the old version, long
    // over. It must not delete by that, neither at once nor when the renewal commits.
    let key = place.key("a");
    place.stored.write(&key, &id("a"), -5_000, 7);
    let mut extend = place.schema.client();
    extend.batch_execute(&format!("BEGIN; {}", renewed(&key))).unwrap();
    let call = {
        let client = client.clone();
        Call::start(&name, move || client.operator().cleanup_expired(10))
    };
    let waits = call.settle(&place.stored);
    extend.batch_execute("COMMIT").unwrap();
    assert_eq!((waits, call.join().unwrap()), (false, 0), "it neither waits for the row nor deletes it");
    assert!(client.is_locked(&key).unwrap());

    // The same when the renewal comes before cleanup has looked.
    let key = place.key("b");
    place.stored.write(&key, &id("b"), -5_000, 7);
    let mut first = place.schema.client();
    first.batch_execute("BEGIN; LOCK TABLE syncguard_locks IN EXCLUSIVE MODE").unwrap();
    let call = {
        let client = client.clone();
        Call::start(&name, move || client.operator().cleanup_expired(10))
    };
    call.wait_until_blocked(&place.stored);
    first.batch_execute(&format!("{}; COMMIT", renewed(&key))).unwrap();
    assert_eq!(call.join().unwrap(), 0);
    assert!(client.is_locked(&key).unwrap());
}

#[test]
fn extends_and_clean_ups_at_once_never_lose_a_live_lease() {
    let place = place();
    let key = place.key("a");
    let grant = place.hold(&key);
    let stop = CancelToken::new();
    std::thread::scope(|scope| {
        for n in 0..2 {
            let (place, stop) = (&place, &stop);
            scope.spawn(move || {
                while !stop.is_cancelled() {
                    let name = format!("old {n}");
                    place.stored.write(&name, &id(&name.replace(' ', "-")), -5_000, 7);
                    place.client.operator().cleanup_expired(10).unwrap();
                }
            });
        }
        for _ in 0..100 {
            let extended = place.client.extend(&grant.lock_id, TTL).unwrap();
            assert!(matches!(extended, ExtendResult::Extended { .. }));
        }
        stop.cancel();
    });
    assert_eq!(place.stored.row(&key).unwrap().lock_id, grant.lock_id);
}

/// Rows that are over for an hour, one after another; how many of them a look deletes.
fn cleaning(place: &Place) -> PgLockClient {
    place.build(&unique(), PgLockClient::builder().cleanup_in_is_locked(true))
}

/// Notes who deletes lock rows, and when.
fn note_deletions(place: &Place) {
    place.stored.run(
        "CREATE TABLE passes (at timestamptz, who text); \
         CREATE FUNCTION count_pass() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           EXECUTE format('INSERT INTO %I.passes VALUES (clock_timestamp(), current_setting(''application_name''))', \
             TG_TABLE_SCHEMA); RETURN NULL; END $$; \
         CREATE TRIGGER counted AFTER DELETE ON syncguard_locks FOR EACH STATEMENT EXECUTE FUNCTION count_pass()",
    );
}

#[test]
fn looking_deletes_nothing_unless_it_is_asked_to() {
    let place = place();
    note_deletions(&place);
    let key = place.key("a");
    place.stored.write(&key, &id("a"), -3_600_000, 7);
    for _ in 0..20 {
        assert!(!place.client.is_locked(&key).unwrap());
    }
    // A client that does clean comes later; whoever deletes the row is the only one that tried.
    let name = unique();
    let client = place.build(&name, PgLockClient::builder().cleanup_in_is_locked(true));
    wait_until(LIMIT, "the row is gone", || {
        assert!(!client.is_locked(&key).unwrap());
        place.stored.row(&key).is_none()
    });
    let sql = "SELECT array_agg(DISTINCT who) FROM passes";
    assert_eq!(place.stored.one(sql, &[]).get::<_, Vec<String>>(0), [name]);
    assert_eq!(place.stored.counter(&key), Some(7));
    // Then nothing is left that would tell an expired lease from an unknown one.
    let never = CancelToken::never();
    let answer = LockBackend::release(&client, &id("a"), &never).unwrap();
    assert_eq!(answer, ReleaseOutcome::NotHeld(Some(Reason::NotFound)));
}

#[test]
fn looking_cleans_up_at_most_once_a_second() {
    let place = place();
    note_deletions(&place);
    let client = cleaning(&place);
    let key = place.key("a");
    let passes = || place.stored.one("SELECT count(*) FROM passes", &[]).get::<_, i64>(0);
    let start = std::time::Instant::now();
    while passes() < 2 {
        place.stored.write(&key, &id("a"), -3_600_000, 7);
        assert!(!client.is_locked(&key).unwrap());
        assert!(start.elapsed() < LIMIT);
    }
    let sql = "SELECT extract(epoch FROM max(at) - min(at))::float8 FROM passes";
    let apart: f64 = place.stored.one(sql, &[]).get(0);
    assert!(apart > 0.5, "passes {apart} s apart");
}

#[test]
fn looking_answers_although_its_clean_up_cannot_be_done() {
    let place = place();
    let key = place.key("a");
    place.stored.write(&key, &id("a"), -3_600_000, 7);
    let role = Role::without_rights(&place.schema);
    place.stored.run(&format!(
        "GRANT USAGE ON SCHEMA {} TO {name}; GRANT SELECT ON syncguard_locks, syncguard_fence_counters TO {name}",
        place.schema.name(),
        name = role.name()
    ));
    let client = role.connect(PgLockClient::builder().cleanup_in_is_locked(true)).unwrap();
    let log = logs::capture();
    assert!(!client.is_locked(&key).unwrap());
    wait_until(LIMIT, "the cleanup has failed, quietly", || {
        log.lines().iter().any(|line| {
            line.level == log::Level::Debug && line.text.contains("cleanup") && line.text.contains("42501")
        })
    });
    assert!(!client.is_locked(&key).unwrap());
    // Nor does a cleanup that is held up hold up the answer: it goes on waiting when the answer is there.
    let name = unique();
    let builder = PgLockClient::builder().cleanup_in_is_locked(true).operation_timeout(LIMIT * 2);
    let client = place.build(&name, builder);
    // On two connections everything is prepared: one is for the cleanup, and preparing asks for locks
    // that looking does not need.
    let (mut busy, warm) = (place.schema.client(), place.key("warm"));
    busy.batch_execute(&format!("BEGIN; SELECT pg_advisory_xact_lock(hashtext('{warm}'))")).unwrap();
    let acquire = {
        let (client, warm) = (client.clone(), warm.clone());
        Call::start(&name, move || client.acquire(&warm, TTL))
    };
    acquire.wait_until_blocked(&place.stored);
    client.is_locked(&warm).unwrap();
    busy.batch_execute("ROLLBACK").unwrap();
    assert!(acquire.join().unwrap().acquired().is_some());

    busy.batch_execute("BEGIN; LOCK TABLE syncguard_locks IN SHARE ROW EXCLUSIVE MODE").unwrap();
    for _ in 0..3 {
        assert!(!client.is_locked(&key).unwrap());
    }
    let mut observer = place.schema.client();
    let pid = wait_until_app_waits(&mut observer, &name);
    assert!(place.stored.row(&key).is_some() && !client.is_locked(&key).unwrap());
    crate::support::wait_until_backend_waits(&mut observer, pid);
    busy.batch_execute("ROLLBACK").unwrap();
    wait_until(LIMIT, "the cleanup goes on", || place.stored.row(&key).is_none());
}

#[test]
fn looking_leaves_no_trace_in_any_row() {
    // Versions of all rows: an update makes another one, and a row lock is noted in the old one.
    let versions = |place: &Place| -> Vec<String> {
        ["syncguard_locks", "syncguard_fence_counters"]
            .map(|table| {
                let sql = format!(
                    "SELECT coalesce(string_agg(concat_ws(' ', ctid, xmin, xmax, t.*), E'\\n' ORDER BY ctid), '') FROM {table} AS t"
                );
                place.stored.one(&sql, &[]).get(0)
            })
            .to_vec()
    };
    for cleaning in [false, true] {
        let place = place();
        let builder = PgLockClient::builder().cleanup_in_is_locked(cleaning);
        let client = place.build(&unique(), builder);
        for (key, ttl_ms) in [("live", 60_000), ("edge", -1), ("dead", -1_500)] {
            place.stored.write(key, &id(key), ttl_ms, 7);
        }
        let before = versions(&place);
        assert!(before.iter().all(|rows| rows.lines().count() == 3), "{before:?}");
        for two in [false, true] {
            let token = if two { CancelToken::new() } else { CancelToken::never() };
            for _ in 0..10 {
                for key in ["live", "edge", "dead", "free"] {
                    LockBackend::is_locked(&client, key, &token).unwrap();
                    for lookup in [Lookup::Key(key), Lookup::LockId(&id(key))] {
                        LockBackend::lookup(&client, lookup, &token).unwrap();
                    }
                    client.owns(&id(key)).unwrap();
                }
                client.operator().holders(10).unwrap();
                client.operator().counts().unwrap();
            }
        }
        assert_eq!(versions(&place)[1], before[1], "counters, cleaning: {cleaning}");
        let (after, live) = (versions(&place), before[0].lines().next().unwrap());
        assert!(after[0].lines().any(|row| row == live), "the live row, cleaning: {cleaning}");
        if !cleaning {
            assert_eq!(after, before);
        }
    }
}

#[test]
fn idle_counters_need_a_server_that_remembers_times() {
    let place = place();
    let error = place.client.operator().idle_counters(Duration::ZERO, 10).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    assert!(error.to_string().contains("track_commit_timestamp"), "{error}");

    let server = Server::start(&Config::new().set("track_commit_timestamp", "on"));
    let place = Place::new(server.schema());
    let before = place.stored.now_ms();
    for (key, fence) in [("a", 1), ("b", 20)] {
        place.stored.set_counter(key, fence);
    }
    let after = place.stored.now_ms() + 1;
    // The marks of finished slots are no counters of a key.
    for mark in ["a\u{2126}done", "a\u{2126}number"] {
        place.stored.set_counter(mark, 7);
    }
    let operator = place.client.operator();
    let idle = operator.idle_counters(Duration::ZERO, 10).unwrap();
    assert_eq!(
        idle.iter().map(|counter| counter.fence.get()).collect::<Vec<_>>(),
        [1, 20],
        "the longest idle first"
    );
    assert_eq!(idle[0].key_hash, hash_key("a"));
    assert!((before..=after).contains(&idle[0].raised_at_ms.unwrap()), "{idle:?}");
    assert_eq!(operator.idle_counters(Duration::from_secs(3600), 10).unwrap(), []);
    assert_eq!(operator.idle_counters(Duration::MAX, 10).unwrap(), []);
    assert_eq!(operator.idle_counters(Duration::ZERO, 1).unwrap().len(), 1);
    // It is a report.
    let counts = operator.counts().unwrap();
    assert_eq!((counts.counters, counts.marks), (2, Some(2)));
}
