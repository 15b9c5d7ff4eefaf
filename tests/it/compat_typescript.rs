//! Beside the TypeScript SyncGuard, which shares the tables: its rows are ours and ours are its, and
//! its statements may run between ours in any order.
//!
//! # What the other client's way of writing can do
//!
//! Its acquire takes the key's advisory lock, reads the row without a row lock, judges it by the
//! clock of its `BEGIN`, raises the counter, and writes the row with an upsert that does not ask
//! again. So what it writes is as old as its read:
//!
//! 1. Two acquires, whoever makes them, stand in one queue: the second reads after the first has
//!    committed. Ours never dodges that queue.
//! 2. An extend or a release of ours may commit between its read and its upsert. If it read a live
//!    row it has given up. If it read a dead one, the row was dead by a clock that ours is later
//!    than, so ours refuses: nothing revives a dead row. But it may have read the old row *before* an extend
//!    of ours was committed, and find it dead by then: so an extend by the lock id alone whose answer came
//!    later than that asks again behind the same queue, and hears `NotHeld`. A guard's answer comes too late.
//! 3. A row that is written by hand, without the queue, it does overwrite. The holder of that row
//!    hears `NotHeld` from then on.
//!
//! Its clock stands still during its waits, so what it grants may be over sooner than it thinks; that
//! is its own holder's loss. The tests walk through all of this.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod kinds;
mod other_client;

use std::collections::BTreeSet;
use std::time::Duration;

use crate::support::calls::{FORMS, token};
use crate::support::{Call, Config, LIMIT, Place, Server, TTL, id, place, unique, wait_until};
use other_client::{STEPS, TheirAcquire};
use postgres::Client;
use syncguard::backend::{ExtendOutcome, ReleaseOutcome};
use syncguard::{
    AcquireResult, ErrorCode, ExtendResult, LockBackend, Lookup, PgLockClient, ReleaseResult, hash_key,
    make_storage_key, normalize_and_validate_key,
};

#[test]
fn a_lease_of_the_other_client_is_seen_contended_extended_and_released() {
    let place = place();
    for (n, two) in FORMS.into_iter().enumerate() {
        let (key, theirs) = (place.key("a"), id(&format!("theirs{n}")));
        let fence = i64::try_from(n).unwrap() + 1;
        let mut other = TheirAcquire::new(&place, &key, &theirs);
        assert!(other.acquire() && other.fence == fence);
        assert_eq!(
            LockBackend::acquire(&place.client, &key, TTL, &token(two)).unwrap(),
            AcquireResult::Locked
        );
        assert!(LockBackend::is_locked(&place.client, &key, &token(two)).unwrap());
        let found =
            LockBackend::lookup(&place.client, Lookup::LockId(&theirs), &token(two)).unwrap().unwrap();
        let row = place.stored.row(&key).unwrap();
        assert_eq!((found.expires_at_ms, found.acquired_at_ms), (row.expires_at_ms, row.acquired_at_ms));
        assert_eq!((found.fence.to_string(), found.key_hash), (row.fence, hash_key(&key)));
        let extended = LockBackend::extend(&place.client, &theirs, TTL * 2, &token(two)).unwrap();
        assert!(matches!(extended, ExtendOutcome::Extended { .. }));
        let mut tx_client = place.schema.client();
        let mut tx = tx_client.transaction().unwrap();
        place.client.assert_fence(&mut tx, &key, found.fence).unwrap();
        tx.rollback().unwrap();
        let released = LockBackend::release(&place.client, &theirs, &token(two)).unwrap();
        assert_eq!(released, ReleaseOutcome::Released);
    }
}

#[test]
fn our_leases_are_what_the_other_client_expects_to_find() {
    let place = place();
    let raw = place.key("cafe\u{301}");
    let normal = normalize_and_validate_key(&raw).unwrap();
    let before = place.stored.now_ms();
    for two in FORMS {
        let grant = LockBackend::acquire(&place.client, &raw, TTL, &token(two)).unwrap().acquired().unwrap();
        let row = place.stored.row(&normal).expect("stored under the normal form");
        assert_eq!((&row.user_key, &row.lock_id), (&normal, &grant.lock_id));
        assert!(
            row.lock_id.len() == 22
                && row.lock_id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
        );
        assert!(row.fence.len() == 15 && row.fence.bytes().all(|b| b.is_ascii_digit()));
        assert_eq!(row.fence, grant.fence.to_string());
        assert!(row.acquired_at_ms >= before && row.expires_at_ms == row.acquired_at_ms + 30_000);
        assert_eq!(place.stored.counter(&normal), Some(i64::try_from(grant.fence.get()).unwrap()));
        let sql = "SELECT key_debug FROM syncguard_fence_counters WHERE fence_key = 'fence:' || $1";
        assert_eq!(place.stored.one(sql, &[&normal]).get::<_, String>(0), normal);

        let mut other = place.schema.client();
        assert!(!TheirAcquire::new(&place, &normal, &id("theirs")).acquire(), "contended");
        assert!(other_client::extend(&mut other, &grant.lock_id, 60_000));
        assert_eq!(place.stored.row(&normal).unwrap().lock_id, grant.lock_id);
        assert!(other_client::release(&mut other, &grant.lock_id));
        assert_eq!(place.client.release(&grant.lock_id).unwrap(), ReleaseResult::NotHeld);
    }
}

#[test]
fn fences_go_on_from_client_to_client() {
    let place = place();
    let key = place.key("a");
    for n in 0..3 {
        let mut other = TheirAcquire::new(&place, &key, &id("theirs"));
        assert!(other.acquire());
        assert_eq!(other.fence, 2 * n + 1);
        place.stored.age(&key, 1_500);
        let grant = place.hold(&key);
        assert_eq!(i64::try_from(grant.fence.get()).unwrap(), 2 * n + 2);
        place.stored.age(&key, 1_500);
    }
    // A counter that it has made and not raised yet.
    let key = place.key("b");
    place.stored.set_counter(&key, 0);
    assert_eq!(place.hold(&key).fence.get(), 1);
}

#[test]
fn a_row_that_is_stored_under_a_hash_is_found_by_its_id_and_shown_with_its_key() {
    let place = place();
    let long = "tenant/".repeat(60);
    let stored = make_storage_key("", &long, 40, 0).unwrap();
    assert_eq!(stored.len(), 22, "what a client with a smaller limit would store");
    let theirs = id("theirs");
    place.stored.write(&stored, &theirs, 30_000, 7);
    place
        .stored
        .client()
        .execute("UPDATE syncguard_locks SET user_key = $2 WHERE key = $1", &[&stored, &long])
        .unwrap();
    let found = place.client.get_by_id_raw(&theirs).unwrap().unwrap();
    assert_eq!((found.key.as_str(), found.fence.get()), (long.as_str(), 7));
    assert_eq!(place.client.get_by_id(&theirs).unwrap().unwrap().key_hash, hash_key(&long));
    assert_eq!(place.client.operator().holders_raw(10).unwrap()[0].key, long);
    // The row is changed where it is stored, not where its key would lead.
    for two in FORMS {
        let extended = LockBackend::extend(&place.client, &theirs, TTL, &token(two)).unwrap();
        assert!(matches!(extended, ExtendOutcome::Extended { .. }));
    }
    assert_eq!(place.client.release(&theirs).unwrap(), ReleaseResult::Released);
    assert!(place.stored.row(&stored).is_none());
}

/// What happens between two statements of the other client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ours {
    Acquire,
    Extend,
    Release,
}

/// The state of the key when the other client begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Absent,
    Live,
    /// Live when the other client begins, dead by every clock when ours does.
    Edge,
    Dead,
}

#[test]
fn between_any_two_of_its_statements_ours_never_does_wrong() {
    let starts = [Start::Absent, Start::Live, Start::Edge, Start::Dead];
    crate::support::together(starts.len(), |n| {
        let place = place();
        let name = unique();
        let client = place.build(&name, PgLockClient::builder().operation_timeout(LIMIT));
        for ours in [Ours::Acquire, Ours::Extend, Ours::Release] {
            for two in FORMS {
                for gap in 0..=STEPS {
                    if !(starts[n] == Start::Absent && ours != Ours::Acquire) {
                        interleave(&place, (&client, &name), (ours, two), starts[n], gap);
                    }
                }
            }
        }
    });
}

fn interleave(
    place: &Place,
    (client, name): (&PgLockClient, &str),
    (ours, two): (Ours, bool),
    start: Start,
    gap: usize,
) {
    let what = format!("{ours:?} (token: {two}) before their statement {gap}, {start:?}");
    place.stored.run("DELETE FROM syncguard_locks");
    let key = place.key(&format!("{ours:?}{two}{gap}"));
    let holder = id("holder");
    match start {
        Start::Absent => {}
        Start::Live => place.stored.write(&key, &holder, 30_000, 7),
        Start::Edge => place.stored.write(&key, &holder, -960, 7),
        Start::Dead => place.stored.write(&key, &holder, -1_500, 7),
    }
    let before = place.stored.counter(&key).unwrap_or(0);
    let mut theirs = TheirAcquire::new(place, &key, &id("theirs"));
    (0..gap).for_each(|n| theirs.step(n));
    if start == Start::Edge {
        place.wait_for(place.stored.row(&key).map_or(0, |row| row.acquired_at_ms) + 50);
    }
    let call = {
        let (client, key, holder) = (client.clone(), key.clone(), holder.clone());
        Call::start(name, move || -> syncguard::Result<(bool, Option<i64>)> {
            let token = token(two);
            Ok(match ours {
                Ours::Acquire => {
                    let grant = LockBackend::acquire(&client, &key, TTL, &token)?.acquired();
                    (grant.is_some(), grant.map(|grant| i64::try_from(grant.fence.get()).unwrap()))
                }
                Ours::Extend => {
                    let outcome = LockBackend::extend(&client, &holder, TTL, &token)?;
                    (matches!(outcome, ExtendOutcome::Extended { .. }), None)
                }
                Ours::Release => {
                    (LockBackend::release(&client, &holder, &token)? == ReleaseOutcome::Released, None)
                }
            })
        })
    };
    call.settle(&place.stored);
    (gap..STEPS).for_each(|n| theirs.step(n));
    let (won, fence) = call.join().unwrap_or_else(|error| panic!("{what}: {error:?}"));
    let row = place.stored.row(&key);
    let counter = place.stored.counter(&key).unwrap_or(0);
    let grants = i64::from(ours == Ours::Acquire && won) + i64::from(theirs.won);
    assert_eq!(counter, before + grants, "{what}: one fence per grant");
    match ours {
        Ours::Acquire => {
            assert!(!(won && theirs.won), "{what}: two holders");
            if start != Start::Live {
                assert!(won || theirs.won || start == Start::Edge, "{what}: nobody got a free key");
            }
            if won {
                assert_eq!(row.unwrap().fence, format!("{:015}", fence.unwrap()), "{what}");
            }
        }
        // Our extend decides on the newest row, so it succeeds only for a lease that is live, and
        // then the other client has seen it live or not looked yet.
        Ours::Extend => {
            assert!(!(won && theirs.won), "{what}: extended and taken over");
            assert!(start != Start::Live || won, "{what}");
            if won {
                assert_eq!(row.unwrap().lock_id, holder, "{what}");
            }
        }
        Ours::Release => {
            assert!(start != Start::Live || won, "{what}");
            if theirs.won {
                assert_eq!(row.unwrap().lock_id, id("theirs"), "{what}: their lease was deleted");
            }
        }
    }
}

/// With a slow commit between their read and ours: two holders, if ours were taken at its word.
#[test]
fn an_extend_whose_commit_was_slow_and_a_take_over_never_both_succeed() {
    let server = Server::start(&Config::new());
    let place = Place::new(server.schema());
    let name = unique();
    let client = place.build(&name, PgLockClient::builder().operation_timeout(LIMIT));
    for two in FORMS {
        let (key, holder) = (place.key(&format!("slow{two}")), id(&format!("holder{two}")));
        client.is_locked(&key).unwrap();
        // Not even past its end yet when the server waits for nobody.
        place.stored.write(&key, &holder, 4_000, 7);
        let ends = place.stored.row(&key).unwrap().expires_at_ms;
        server.configure("synchronous_standby_names", "nobody");
        let call = {
            let (client, holder) = (client.clone(), holder.clone());
            Call::start(&name, move || LockBackend::extend(&client, &holder, TTL, &token(two)))
        };
        let mut observer = server.client();
        wait_until(LIMIT, "the extend's commit waits", || {
            let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
            observer.query_one(waits, &[]).unwrap().get::<_, i64>(0) == 1
        });
        place.wait_for(ends + 1_001);
        let mut theirs = TheirAcquire::new(&place, &key, &id(&format!("theirs{two}")));
        (0..4).for_each(|n| theirs.step(n));
        assert!(theirs.go, "they read the old row, and it is dead");
        server.configure("synchronous_standby_names", "");
        call.wait_until_blocked(&place.stored);
        (4..STEPS).for_each(|n| theirs.step(n));
        assert!(theirs.won);
        let extended = call.join().unwrap();
        assert!(matches!(extended, ExtendOutcome::NotHeld(_)), "two holders: {extended:?}");
        assert_eq!(place.stored.row(&key).unwrap().lock_id, id(&format!("theirs{two}")));
    }
}

#[test]
fn its_unconditional_upsert_overwrites_only_what_was_written_without_the_queue() {
    let place = place();
    let key = place.key("a");
    // The other client has read an absent row and pauses with the queue in its hands.
    let mut theirs = TheirAcquire::new(&place, &key, &id("theirs"));
    (0..4).for_each(|n| theirs.step(n));
    // Our acquire stands in the same queue and cannot be overwritten by what was read before.
    let name = unique();
    let client = place.named(&name);
    let call = {
        let key = key.clone();
        Call::start(&name, move || client.acquire(&key, TTL))
    };
    call.wait_until_blocked(&place.stored);
    (4..STEPS).for_each(|n| theirs.step(n));
    assert!(theirs.won);
    assert_eq!(call.join().unwrap(), AcquireResult::Locked);

    // A row that is written without the queue, as by hand, is overwritten without a look. Its holder
    // finds out at once: extend, release and a fenced transaction all refuse.
    let key = place.key("b");
    let mut theirs = TheirAcquire::new(&place, &key, &id("theirs-b"));
    (0..6).for_each(|n| theirs.step(n));
    let by_hand = id("by-hand");
    let insert = format!(
        "INSERT INTO syncguard_locks VALUES ('{key}', '{by_hand}', {now} + 30000, {now}, '000000000000001', '{key}')",
        now = crate::support::NOW
    );
    place.stored.run(&insert);
    (6..STEPS).for_each(|n| theirs.step(n));
    assert!(theirs.won);
    assert_eq!(place.client.extend(&by_hand, TTL).unwrap(), ExtendResult::NotHeld);
    assert_eq!(place.client.release(&by_hand).unwrap(), ReleaseResult::NotHeld);
    assert_eq!(place.stored.row(&key).unwrap().lock_id, id("theirs-b"));
    assert_eq!(place.client.acquire(&key, TTL).unwrap(), AcquireResult::Locked);
}

#[test]
fn the_other_client_waits_for_a_fenced_transaction_of_ours() {
    let place = place();
    let key = place.key("a");
    let grant = place.hold(&key);
    let mut client = place.schema.client();
    client.batch_execute("CREATE TABLE work (what text)").unwrap();
    let mut tx = client.transaction().unwrap();
    place.client.assert_fence(&mut tx, &key, grant.fence).unwrap();
    place.stored.age(&key, 1_500);
    let mut theirs = TheirAcquire::new(&place, &key, &id("theirs"));
    let name = unique();
    theirs.client.batch_execute(&format!("SET application_name = '{name}'")).unwrap();
    let call = Call::start(&name, move || {
        let won = theirs.acquire();
        (won, theirs.fence)
    });
    call.wait_until_blocked(&place.stored);
    tx.execute("INSERT INTO work VALUES ('in time')", &[]).unwrap();
    tx.commit().unwrap();
    assert_eq!(call.join(), (true, 2));
    let mut tx = client.transaction().unwrap();
    let error = place.client.assert_fence(&mut tx, &key, grant.fence).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Aborted);
}

#[test]
fn both_kinds_of_clients_at_once_never_share_a_key_and_never_a_fence() {
    let place = place();
    let key = place.key("a");
    place.stored.run("CREATE TABLE inside (n int NOT NULL); INSERT INTO inside VALUES (0)");
    // Whoever has the key notes it; two at once would be seen.
    let enter = |client: &mut Client| {
        let n: i32 = client.query_one("UPDATE inside SET n = n + 1 RETURNING n", &[]).unwrap().get(0);
        assert_eq!(n, 1, "two holders at once");
    };
    let leave = |client: &mut Client| {
        client.execute("UPDATE inside SET n = n - 1", &[]).unwrap();
    };
    let fences = crate::support::together(6, |n| {
        let mut mine = place.schema.client();
        let client = place.named(&unique());
        let mut fences = Vec::new();
        let start = std::time::Instant::now();
        for round in 0.. {
            if fences.len() >= 8 || start.elapsed() > Duration::from_secs(20) {
                break;
            }
            if n % 2 == 0 {
                let Some(grant) =
                    LockBackend::acquire(&client, &key, TTL, &token(round % 2 == 0)).unwrap().acquired()
                else {
                    continue;
                };
                enter(&mut mine);
                let extended = client.extend(&grant.lock_id, TTL).unwrap();
                assert!(matches!(extended, ExtendResult::Extended { .. }));
                leave(&mut mine);
                assert_eq!(client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
                fences.push(i64::try_from(grant.fence.get()).unwrap());
            } else {
                let lock_id = id(&format!("t{n}r{round}"));
                let mut theirs = TheirAcquire::new(&place, &key, &lock_id);
                if !theirs.acquire() {
                    continue;
                }
                enter(&mut mine);
                assert!(other_client::extend(&mut mine, &lock_id, 30_000));
                leave(&mut mine);
                assert!(other_client::release(&mut mine, &lock_id));
                fences.push(theirs.fence);
            }
        }
        fences
    });
    let all: Vec<i64> = fences.into_iter().flatten().collect();
    assert!(!all.is_empty());
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "a fence was handed out twice");
    assert_eq!(place.stored.counter(&key), Some(i64::try_from(all.len()).unwrap()));
}
