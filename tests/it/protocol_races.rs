//! Races between two sessions, in every order that matters, with pauses that a test decides.
//!
//! One side is a client. The other is the library's own protocol, executed statement by statement, or
//! a session that holds a lock at the place where it hurts.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod absent;
mod fenced;
mod forms;

use std::time::{Duration, Instant};

use crate::support::calls::{FORMS, token, told_in_time};
use crate::support::script::{Kind, Script};
use crate::support::{Call, LIMIT, Place, Scripted, Stored, TTL, id, place, unique};
use postgres::Client;
use syncguard::backend::{Attempt, Clock, ExtendOutcome, ReleaseOutcome};
use syncguard::{
    AcquireResult, CancelToken, ErrorCode, ExtendResult, LockBackend, LockError, LockOptions, PgLockClient,
    Reason, ReleaseResult, Result,
};

/// How a key's row is at the start of a race.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Absent,
    Live,
    /// Live at the first statement, dead when the client's call begins.
    Edge,
    Dead,
}

/// A client that makes one kind of call, and the hands that perform the script.
struct Ring {
    place: Place,
    client: PgLockClient,
    name: String,
    ours: (Kind, bool),
    hands: Scripted,
}

impl Ring {
    fn new(ours: (Kind, bool)) -> Self {
        let (place, name) = (place(), unique());
        let hands = Scripted::new(&place.schema);
        let client = place.build(&name, PgLockClient::builder().operation_timeout(LIMIT));
        Self { place, client, name, ours, hands }
    }

    /// The script up to step `gap`, the client's call, the rest of the script.
    fn race(&mut self, mut script: Script, start: Start, gap: usize, key: &str) {
        let (place, ours, hands) = (&self.place, self.ours, &mut self.hands);
        let what = format!("{ours:?} in step {gap} of {:?}, {start:?}", script.kind);
        let (holder, fence) = (id("holder"), 7);
        // The holder's id must be free: rows of earlier races are gone.
        place.stored.run("DELETE FROM syncguard_locks");
        match start {
            Start::Absent => {}
            Start::Live => place.stored.write(key, &holder, 30_000, fence),
            Start::Edge => place.stored.write(key, &holder, -920, fence),
            Start::Dead => place.stored.write(key, &holder, -1_500, fence),
        }
        let before = place.stored.counter(key).unwrap_or(0);
        (0..gap).for_each(|n| script.step(n, hands));
        if start == Start::Edge {
            place.wait_for(place.stored.row(key).map_or(0, |row| row.acquired_at_ms) + 90);
        }
        let call = {
            let (client, key) = (self.client.clone(), key.to_owned());
            Call::start(&self.name, move || perform(&client, ours, &key, &holder))
        };
        call.settle(&place.stored);
        (gap..script.steps()).for_each(|n| script.step(n, hands));
        let won = call.join().unwrap_or_else(|error| panic!("{what}: {error:?}"));
        check(place, (ours.0, won), &script, start, before, key, &what);
    }
}

/// The client's part. Whether it succeeded.
fn perform(
    client: &PgLockClient,
    (kind, two_messages): (Kind, bool),
    key: &str,
    holder: &str,
) -> Result<bool> {
    let token = token(two_messages);
    Ok(match kind {
        Kind::Acquire => {
            let ours = id("ours");
            let deadline = Clock::system().now().after(LIMIT);
            let attempt = Attempt::new(key, &ours, TTL, deadline);
            client.attempt(&attempt, &token)?.acquired().is_some()
        }
        Kind::Extend => {
            matches!(LockBackend::extend(client, holder, TTL, &token)?, ExtendOutcome::Extended { .. })
        }
        Kind::Release => LockBackend::release(client, holder, &token)? == ReleaseOutcome::Released,
    })
}

fn check(
    place: &Place,
    ours: (Kind, bool),
    script: &Script,
    start: Start,
    before: i64,
    key: &str,
    what: &str,
) {
    let sides = [(ours.0, ours.1, id("ours")), (script.kind, script.won, id("theirs"))];
    let won = |kind| sides.iter().filter(|(k, won, _)| *k == kind && *won).count();
    let (acquired, extended, released) = (won(Kind::Acquire), won(Kind::Extend), won(Kind::Release));
    assert!(acquired <= 1, "{what}: two holders");
    assert!(acquired == 0 || extended == 0, "{what}: extended and taken over");
    let counter = place.stored.counter(key).unwrap_or(0);
    assert_eq!(counter, before + i64::try_from(acquired).unwrap(), "{what}: one fence per grant");
    let row = place.stored.row(key);
    if acquired == 1 {
        let winner = &sides.iter().find(|(kind, won, _)| *kind == Kind::Acquire && *won).unwrap().2;
        let row = row.expect("the winner has a row");
        assert_eq!((&row.lock_id, row.fence), (winner, format!("{counter:015}")), "{what}");
        assert!(row.expires_at_ms - row.acquired_at_ms == 30_000, "{what}");
    } else if released > 0 {
        assert_eq!((released, row), (1, None), "{what}: a released row is gone");
    } else if extended > 0 {
        let row = row.expect("what was extended is there");
        assert!(row.lock_id == id("holder") && row.expires_at_ms > row.acquired_at_ms + 20_000, "{what}");
    }
    // Somebody always gets on.
    let both = |kind| ours.0 == kind && script.kind == kind;
    match start {
        Start::Absent | Start::Dead if won(Kind::Acquire) == 0 => {
            assert!(ours.0 != Kind::Acquire && script.kind != Kind::Acquire, "{what}: nobody got a free key");
        }
        Start::Live if both(Kind::Extend) => assert_eq!(extended, 2, "{what}"),
        Start::Live if both(Kind::Acquire) => assert_eq!(acquired, 0, "{what}: the holder is live"),
        _ => {}
    }
}

fn all_orders(ours: Kind, theirs: Kind, dodges: bool, starts: &[Start]) {
    crate::support::together(FORMS.len(), |n| {
        let mut ring = Ring::new((ours, FORMS[n]));
        for start in starts {
            let their_id = if theirs == Kind::Acquire { id("theirs") } else { id("holder") };
            for gap in 0..=theirs.steps() {
                let key = ring.place.key(&format!("{start:?}-{gap}"));
                let script = Script::new(theirs, &key, &their_id, dodges);
                ring.race(script, *start, gap, &key);
            }
        }
    });
}

#[test]
fn an_extend_and_a_take_over_never_both_succeed_whatever_their_order() {
    crate::support::together(2, |n| match n {
        0 => all_orders(Kind::Acquire, Kind::Extend, false, &[Start::Live, Start::Edge, Start::Dead]),
        _ => all_orders(Kind::Extend, Kind::Acquire, false, &[Start::Live, Start::Edge, Start::Dead]),
    });
}

#[test]
fn a_late_release_never_deletes_a_take_over_whatever_their_order() {
    crate::support::together(2, |n| match n {
        0 => all_orders(Kind::Acquire, Kind::Release, false, &[Start::Live, Start::Edge, Start::Dead]),
        _ => all_orders(Kind::Release, Kind::Acquire, false, &[Start::Live, Start::Edge, Start::Dead]),
    });
}

#[test]
fn an_extend_never_revives_a_released_lease_whatever_their_order() {
    crate::support::together(2, |n| match n {
        0 => all_orders(Kind::Extend, Kind::Release, false, &[Start::Live, Start::Edge]),
        _ => all_orders(Kind::Release, Kind::Extend, false, &[Start::Live, Start::Edge]),
    });
}

#[test]
fn of_two_acquires_one_gets_the_key_whatever_their_order() {
    all_orders(Kind::Acquire, Kind::Acquire, false, &[Start::Absent, Start::Live, Start::Edge, Start::Dead]);
}

#[test]
fn of_two_acquires_one_gets_the_key_even_if_one_dodges_the_queue() {
    all_orders(Kind::Acquire, Kind::Acquire, true, &[Start::Absent, Start::Live, Start::Edge, Start::Dead]);
}

/// A transaction of another session.
fn transaction(place: &Place, sql: &str) -> Client {
    let mut client = place.schema.client();
    client.batch_execute(&format!("BEGIN; {sql}")).unwrap();
    client
}

#[test]
fn the_ttl_counts_from_the_end_of_the_wait() {
    let place = place();
    let a = place.key("a");
    let b = place.key("b");
    let mut stalled = transaction(
        &place,
        &format!("SELECT pg_advisory_xact_lock(hashtext('{a}')), pg_advisory_xact_lock(hashtext('{b}'))"),
    );
    let calls: Vec<_> = FORMS
        .into_iter()
        .zip([a.clone(), b.clone()])
        .map(|(two_messages, key)| {
            let name = unique();
            let client = place.named(&name);
            Call::start(&name, move || {
                LockBackend::acquire(&client, &key, Duration::from_secs(2), &token(two_messages))
            })
        })
        .collect();
    for call in &calls {
        call.wait_until_blocked(&place.stored);
    }
    // Longer than the ttl: a lease counted from before the wait would be over.
    place.wait_for(place.stored.now_ms() + 3_000);
    let freed_at = place.stored.now_ms();
    stalled.batch_execute("COMMIT").unwrap();
    for (call, key) in calls.into_iter().zip([a.clone(), b.clone()]) {
        let granted = call.join().unwrap().acquired().unwrap();
        let row = place.stored.row(&key).unwrap();
        assert!(row.acquired_at_ms >= freed_at && granted.expires_at_ms >= freed_at + 2_000, "{row:?}");
        assert_eq!(row.expires_at_ms, granted.expires_at_ms);
    }
}

#[test]
fn the_ttl_counts_from_the_end_of_the_wait_for_a_row_too() {
    let place = place();
    let keys = [place.key("a"), place.key("b")];
    for (key, word) in keys.iter().zip(["one", "two"]) {
        place.stored.write(key, &id(word), -5_000, 1);
    }
    let mut busy = transaction(&place, "SELECT FROM syncguard_locks FOR UPDATE");
    let calls: Vec<_> = FORMS
        .into_iter()
        .zip(&keys)
        .map(|(two_messages, key)| {
            let (name, key) = (unique(), key.clone());
            let client = place.named(&name);
            Call::start(&name, move || LockBackend::acquire(&client, &key, TTL, &token(two_messages)))
        })
        .collect();
    for call in &calls {
        call.wait_until_blocked(&place.stored);
    }
    place.wait_for(place.stored.now_ms() + 100);
    let freed_at = place.stored.now_ms();
    busy.batch_execute("ROLLBACK").unwrap();
    for (call, key) in calls.into_iter().zip(&keys) {
        let granted = call.join().unwrap().acquired().unwrap();
        assert!(place.stored.row(key).unwrap().acquired_at_ms >= freed_at);
        assert!(granted.expires_at_ms >= freed_at + 30_000);
    }
}

#[test]
fn a_guard_that_was_granted_after_a_long_wait_is_held_with_half_of_its_time_left() {
    let place = place();
    let a = place.key("a");
    let mut stalled = transaction(&place, &format!("SELECT pg_advisory_xact_lock(hashtext('{a}'))"));
    let name = unique();
    let client = place.named(&name);
    let call = Call::start(&name, move || {
        let options = LockOptions::new().ttl(Duration::from_secs(2)).timeout(LIMIT);
        let guard = client.lock_with(&a, &options).unwrap();
        (guard.is_held(), guard.remaining(), guard.expires_at_ms(), guard)
    });
    call.wait_until_blocked(&place.stored);
    place.wait_for(place.stored.now_ms() + 3_000);
    let freed_at = place.stored.now_ms();
    stalled.batch_execute("COMMIT").unwrap();
    let (held, left, expires_at_ms, guard) = call.join();
    assert!(held && left >= Duration::from_secs(1), "{left:?}");
    assert!(expires_at_ms >= freed_at + 2_000);
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
}

#[test]
fn an_extend_that_waited_past_the_end_of_its_lease_does_not_revive_it() {
    let place = place();
    let a = place.key("a");
    let b = place.key("b");
    let ids = [id("one-message"), id("two-messages")];
    for (key, id) in [&a, &b].iter().zip(&ids) {
        place.stored.write(key, id, 0, 1);
    }
    let before = [place.stored.row(&a).unwrap(), place.stored.row(&b).unwrap()];
    let mut holder = transaction(&place, "SELECT FROM syncguard_locks FOR UPDATE");
    let calls: Vec<_> = FORMS
        .into_iter()
        .zip(ids)
        .map(|(two_messages, id)| {
            let name = unique();
            let client = place.named(&name);
            Call::start(&name, move || LockBackend::extend(&client, &id, TTL, &token(two_messages)))
        })
        .collect();
    for call in &calls {
        call.wait_until_blocked(&place.stored);
    }
    let expires = before.iter().map(|row| row.expires_at_ms).max().unwrap();
    place.wait_for(expires + 1_500);
    holder.batch_execute("ROLLBACK").unwrap();
    for call in calls {
        assert_eq!(call.join().unwrap(), ExtendOutcome::NotHeld(Some(Reason::Expired)));
    }
    assert_eq!([place.stored.row(&a).unwrap(), place.stored.row(&b).unwrap()], before);
}

#[test]
fn a_release_that_waited_past_the_end_of_its_lease_spares_the_row() {
    let place = place();
    let a = place.key("a");
    place.stored.write(&a, &id("mine"), 0, 1);
    let mut holder = transaction(&place, "SELECT FROM syncguard_locks FOR UPDATE");
    let name = unique();
    let client = place.named(&name);
    let call = Call::start(&name, move || client.release(&id("mine")));
    call.wait_until_blocked(&place.stored);
    place.wait_for(place.stored.row(&a).unwrap().expires_at_ms + 1_500);
    holder.batch_execute("ROLLBACK").unwrap();
    assert_eq!(call.join().unwrap(), ReleaseResult::NotHeld);
    assert!(place.stored.row(&a).is_some());
}

#[test]
fn a_contender_looks_at_a_live_row_without_touching_the_holders_lock() {
    let place = place();
    let a = place.key("a");
    let held = place.hold(&a);
    // The holder's extend has the row and pauses.
    let mut holder = transaction(&place, "SELECT FROM syncguard_locks FOR UPDATE");
    for two_messages in FORMS {
        let answer = LockBackend::acquire(&place.client, &a, TTL, &token(two_messages)).unwrap();
        assert_eq!(answer, AcquireResult::Locked);
    }
    holder.batch_execute("ROLLBACK").unwrap();
    // A contender pauses after its look.
    let mut contender = Scripted::new(&place.schema);
    contender.begin();
    let key = format!("'{a}'");
    contender.execute("queue", &[&key]);
    contender.execute("hold", &[&key, &format!("'fence:{a}'"), "'nobody'"]);
    let patient = place.build(&unique(), PgLockClient::builder().operation_timeout(LIMIT));
    assert!(matches!(patient.extend(&held.lock_id, TTL).unwrap(), ExtendResult::Extended { .. }));
    contender.run("ROLLBACK");
}

#[test]
fn a_fence_that_would_be_burnt_is_never_committed() {
    let place = place();
    let a = place.key("a");
    let b = place.key("b");
    for (two_messages, key) in FORMS.into_iter().zip([a.clone(), b.clone()]) {
        let counted = key.clone();
        // Somebody who does not queue has written a row and not committed it.
        let insert = format!(
            "INSERT INTO syncguard_locks VALUES ('{key}', '{}', {now} + 30000, {now}, '000000000000009', '{key}')",
            id(if two_messages { "other-2" } else { "other-1" }),
            now = crate::support::NOW
        );
        let mut other = transaction(&place, &insert);
        let name = unique();
        let client = place.named(&name);
        let call = Call::start(&name, move || LockBackend::acquire(&client, &key, TTL, &token(two_messages)));
        call.wait_until_blocked(&place.stored);
        other.batch_execute("COMMIT").unwrap();
        assert_eq!(call.join().unwrap(), AcquireResult::Locked);
        assert_eq!(place.stored.counter(&counted), None);
    }
}

#[test]
fn keys_whose_queue_numbers_collide_can_both_be_held() {
    let place = place();
    let keys = ["key:51221", "key:119643"];
    let row = place.stored.one("SELECT hashtext($1) = hashtext($2)", &[&keys[0], &keys[1]]);
    assert!(row.get::<_, bool>(0), "the two no longer collide: find another pair");
    for two_messages in FORMS {
        let held = keys.map(|key| {
            LockBackend::acquire(&place.client, key, TTL, &token(two_messages)).unwrap().acquired().unwrap()
        });
        for grant in held {
            assert_eq!(place.client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
        }
    }
}

#[test]
fn a_strangers_session_lock_on_the_keys_number_costs_no_more_than_the_calls_own_time() {
    let place = place();
    let a = place.key("a");
    let mut stranger = place.schema.client();
    stranger.batch_execute(&format!("SELECT pg_advisory_lock(hashtext('{a}'))")).unwrap();
    let hasty = place.build(&unique(), PgLockClient::builder().operation_timeout(Duration::from_millis(200)));
    let start = Instant::now();
    let named = |error: &LockError| error.to_string().contains("session locks must not use the numbers");
    for two_messages in FORMS {
        let acquire = || LockBackend::acquire(&hasty, &a, TTL, &token(two_messages));
        let error = told_in_time(&hasty, named, acquire);
        assert_eq!(error.code(), ErrorCode::NetworkTimeout);
        assert!(error.is_contention() && !error.is_outcome_unknown(), "{error:?}");
    }
    assert!(start.elapsed() < LIMIT / 2);
    assert_eq!(place.stored.counter(&a), None);
    stranger.batch_execute(&format!("SELECT pg_advisory_unlock(hashtext('{a}'))")).unwrap();
    assert!(place.client.acquire(&a, TTL).unwrap().acquired().is_some());
}

#[test]
fn a_peer_that_stands_still_inside_its_acquire_is_named_and_not_taken_for_a_session_lock() {
    let place = place();
    let a = place.key("a");
    let mut peer = transaction(&place, &format!("SELECT pg_advisory_xact_lock(hashtext('{a}'))"));
    let pid: i32 = peer.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0);
    let hasty = place.build(&unique(), PgLockClient::builder().operation_timeout(Duration::from_millis(200)));
    let named = format!("server process {pid} holds this key's advisory lock in an open transaction");
    for two_messages in FORMS {
        let acquire = || LockBackend::acquire(&hasty, &a, TTL, &token(two_messages));
        let error = told_in_time(&hasty, |error| error.to_string().contains(&named), acquire);
        assert_eq!(error.code(), ErrorCode::NetworkTimeout);
        assert!(error.is_contention() && !error.is_outcome_unknown(), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("another acquire"), "{text}");
        assert!(!text.contains("session lock"), "{text}");
    }
    peer.batch_execute("ROLLBACK").unwrap();
    assert!(place.client.acquire(&a, TTL).unwrap().acquired().is_some());
}

#[test]
fn a_row_that_somebody_keeps_locked_is_contention_when_the_time_is_over() {
    let place = place();
    let key = place.key("a");
    place.stored.write(&key, &id("dead"), -5_000, 1);
    let hasty = place.build(&unique(), PgLockClient::builder().operation_timeout(Duration::from_millis(400)));
    let mut busy = transaction(&place, "SELECT FROM syncguard_locks FOR UPDATE");
    for two_messages in FORMS {
        let acquire = || LockBackend::acquire(&hasty, &key, TTL, &token(two_messages));
        let error = told_in_time(&hasty, |error| error.sqlstate().is_some(), acquire);
        assert_eq!(error.code(), ErrorCode::NetworkTimeout);
        assert!(error.is_contention() && !error.is_outcome_unknown(), "{error:?}");
    }
    // So a waiter goes on waiting, and says in the end that it was the lock it waited for.
    let options = LockOptions::new().timeout(Duration::from_millis(700));
    let waited = |error: &LockError| error.code() == ErrorCode::AcquisitionTimeout;
    told_in_time(&hasty, waited, || hasty.lock_with(&key, &options));
    busy.batch_execute("ROLLBACK").unwrap();
    assert_eq!(place.stored.counter(&key), Some(1));
}

#[test]
fn one_of_sixteen_releases_of_one_id_succeeds() {
    let place = place();
    let a = place.key("a");
    for round in 0..5 {
        let grant = place.hold(&a);
        let answers = crate::support::together(16, |n| {
            LockBackend::release(&place.client, &grant.lock_id, &token(n % 2 == 0)).unwrap()
        });
        let released = answers.iter().filter(|answer| **answer == ReleaseOutcome::Released).count();
        assert_eq!(released, 1, "round {round}");
    }
}
