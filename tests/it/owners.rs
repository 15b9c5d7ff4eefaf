//! Owners and notes on a real server: who has a key, in the holder's own words, and never in another's.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::ops::ControlFlow::Break;
use std::time::Duration;

use crate::support::calls::token;
use crate::support::leases::forged_id;
use crate::support::wait::poll;
use crate::support::{LIMIT, NOW, Place, Role, id, place, wait_until};
use syncguard::{
    ErrorCode, Heartbeat, LockError, LockInfo, LockOptions, Lookup, PgLockClient, PgLockClientBuilder,
    ReleaseResult, RunOnce, Slot,
};

#[path = "owners/attacks.rs"]
mod attacks;
#[path = "owners/lost_answers.rs"]
mod lost_answers;
#[path = "owners/strangers.rs"]
mod strangers;

const OWNER: &str = "web-3:4711";

fn builder() -> PgLockClientBuilder {
    PgLockClient::builder().owner(OWNER)
}

/// A client with an owner.
fn owned(place: &Place) -> PgLockClient {
    builder().connect(&place.schema.url()).unwrap()
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn noted() -> LockOptions {
    LockOptions::new().note("invoices")
}

/// How many rows the table of members has.
fn members(place: &Place) -> i64 {
    place.stored.one("SELECT count(*) FROM syncguard_members WHERE role <> 'w'", &[]).get(0)
}

/// Owner and note of what is shown.
fn said(info: &LockInfo) -> (Option<&str>, Option<&str>) {
    (info.owner.as_deref(), info.note.as_deref())
}

fn holder(client: &PgLockClient) -> LockInfo {
    client.operator().holders(10).unwrap().remove(0)
}

/// Why this client does not get the key.
fn timed_out(client: &PgLockClient, key: &str) -> LockError {
    let options = LockOptions::new().wait_forever().max_retries(1).retry_delay(ms(10));
    let error = client.lock_with(key, &options).unwrap_err();
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout, "{error:?}");
    error
}

#[test]
fn whoever_asks_who_has_a_key_is_told_its_owner_and_note() {
    let place = place();
    let (client, key) = (owned(&place), place.key("report"));
    let guard = client.lock_with(&key, &noted()).unwrap();
    let fence = guard.fence().get();
    let text = timed_out(&place.client, &key).to_string();
    assert!(
        text.contains(&format!("held by {OWNER} (invoices) under fencing token {fence}; its lease ends in ")),
        "{text}"
    );
    assert!(text.contains(" s unless it is renewed") && !text.contains(&key), "{text}");
    // A wait asks once shortly before its end; what it cannot learn in half of that time it leaves out.
    let words = format!("held by {OWNER} (invoices) under fencing token {fence}");
    let mut in_time = String::new();
    let told = poll(LIMIT, || {
        let brief = LockOptions::new().timeout(ms(2000));
        in_time = place.client.lock_with(&key, &brief).unwrap_err().to_string();
        in_time.contains(&words)
    });
    assert!(told, "{in_time}");
    assert_eq!(said(&holder(&place.client)), (Some(OWNER), Some("invoices")));
    let leader = place.client.leader(&key).unwrap().unwrap();
    assert_eq!((leader.owner.as_deref(), leader.term), (Some(OWNER), guard.fence()));
    for what in [Lookup::Key(&key), Lookup::LockId(guard.lock_id())] {
        assert_eq!(said(&client.lookup(what).unwrap().unwrap()), (Some(OWNER), Some("invoices")));
        assert_eq!(
            said(&place.client.lookup(what).unwrap().unwrap()),
            (None, None),
            "a client without owners"
        );
    }
    let raw = client.get_by_key_raw(&key).unwrap().unwrap();
    assert_eq!((raw.owner.as_deref(), raw.note.as_deref()), (Some(OWNER), Some("invoices")));
    guard.release().unwrap();
    assert_eq!(members(&place), 0);
    // Nobody has said anything of this one: the fence and the end alone.
    let plain = place.client.lock(&key).unwrap();
    let text = timed_out(&client, &key).to_string();
    let fence = plain.fence().get();
    assert!(text.contains(&format!("it is held under fencing token {fence}; its lease ends in ")), "{text}");
    assert_eq!(place.client.leader(&key).unwrap().unwrap().owner, None);
}

#[test]
fn every_kind_of_lease_has_its_note_and_takes_it_along_and_no_other() {
    let place = place();
    let client = owned(&place);
    let bystander = client.lock_with(&place.key("bystander"), &noted()).unwrap();
    for (form, client) in [client.clone(), client.cancellable(&token(true))].into_iter().enumerate() {
        let shown = |what: &str, count: usize| {
            let holders = place.client.operator().holders(10).unwrap();
            assert_eq!(holders.len(), count + 1, "{what}");
            for one in &holders {
                assert_eq!(said(one), (Some(OWNER), Some("invoices")), "{what}");
            }
        };
        let guard = client.lock_with(&place.key("lock"), &noted()).unwrap();
        shown("a lock", 1);
        guard.release().unwrap();
        let keys = ["a", "b", "c"].map(|word| place.key(word));
        let set = client.lock_all_with(&keys, &noted()).unwrap();
        shown("a set", 3);
        set.release().unwrap();
        let permits = client.semaphore(&place.key("permits"), 2).unwrap();
        let both = [permits.acquire_with(&noted()).unwrap(), permits.acquire_with(&noted()).unwrap()];
        shown("permits", 2);
        drop(both);
        client
            .elect(&place.key("term"), &noted(), |_| {
                shown("a term", 1);
                Break(())
            })
            .unwrap();
        for slot in [Slot::number(1), Slot::number(2).claim_at_start()] {
            let name = place.key(&format!("run {form}"));
            let ran = client.run_once(&name, slot, &noted(), |_| {
                shown("a run", 1);
                Ok::<_, String>(())
            });
            assert_eq!(ran.unwrap(), RunOnce::Done(()));
        }
        let job = place.key(&format!("completed {form}"));
        let ran = client.run_once(&job, Slot::number(1), &noted(), |run| {
            let mut connection = place.schema.client();
            let mut transaction = connection.transaction().unwrap();
            run.complete_in(&mut transaction).unwrap();
            transaction.commit().unwrap();
            Ok::<_, String>(())
        });
        assert_eq!(ran.unwrap(), RunOnce::Done(()));
        let reader = client.read_lock_with(&place.key("readers"), &noted()).unwrap();
        shown("readers", 1);
        assert_eq!(
            said(&client.get_by_id(reader.lock_id()).unwrap().unwrap()),
            (Some(OWNER), Some("invoices"))
        );
        reader.release().unwrap();
        let lease = client.acquire(&place.key("raw"), LIMIT).unwrap().acquired().unwrap();
        let raw = client.get_by_id(&lease.lock_id).unwrap().unwrap();
        assert_eq!(said(&raw), (Some(OWNER), None), "a raw lease");
        client.release(&lease.lock_id).unwrap();
        shown("nothing besides", 0);
        assert_eq!(members(&place), 1, "nothing is left of any of them");
    }
    bystander.release().unwrap();
    assert_eq!(members(&place), 0);
}

#[test]
fn a_writer_that_readers_keep_out_is_told_the_last_of_them() {
    let place = place();
    let (client, key) = (owned(&place), place.key("prices"));
    let silent = place.client.read_lock(&key).unwrap();
    let loud = client.read_lock_with(&key, &noted()).unwrap();
    let text = timed_out(&place.named("writer"), &key).to_string();
    let expected = format!(
        "it is shared by readers, the last of them {OWNER} (invoices), under fencing token {}",
        loud.fence().get()
    );
    assert!(text.contains(&expected), "{text}");
    let shown = holder(&place.client);
    assert_eq!((said(&shown), shown.readers), ((Some(OWNER), Some("invoices")), Some(2)));
    loud.release().unwrap();
    assert_eq!(said(&holder(&place.client)), (None, None));
    silent.release().unwrap();
    assert_eq!(members(&place), 0);
}

#[test]
fn a_client_that_says_nothing_never_touches_the_table() {
    let place = place();
    let key = place.key("report");
    let held = place.client.lock(&key).unwrap();
    let other = place.named("other");
    let text = timed_out(&other, &key).to_string();
    assert!(text.contains("held under fencing token 1; "), "without the table: {text}");
    held.release().unwrap();
    // The table is there, and this role may do nothing with it.
    let client = owned(&place);
    let role = Role::new(&place.schema);
    let sql = format!(
        "GRANT ALL ON syncguard_locks, syncguard_fence_counters TO {0}; REVOKE ALL ON syncguard_members FROM {0}",
        role.name()
    );
    place.stored.run(&sql);
    let stranger = role.connect(PgLockClient::builder()).unwrap();
    stranger.lock(&key).unwrap().release().unwrap();
    let held = client.lock_with(&key, &noted()).unwrap();
    let text = timed_out(&stranger, &key).to_string();
    assert!(text.contains("held under fencing token 3; "), "without a right: {text}");
    assert_eq!(stranger.leader(&key).unwrap().unwrap().owner, None);
    assert_eq!(said(&holder(&stranger)), (None, None));
    assert_eq!(stranger.operator().break_lock(&key, "a test").unwrap().was.unwrap().fence, held.fence());
}

#[test]
fn the_table_is_made_for_who_says_something_unless_nothing_is_to_be_made() {
    let place = place();
    let key = place.key("report");
    let careful = place.build("careful", builder());
    for result in [
        careful.lock(&key).map(drop),
        careful.lock_all(&[&key]).map(drop),
        careful.semaphore(&key, 1).unwrap().acquire().map(drop),
        careful.run_once(&key, Slot::number(1), &LockOptions::new(), |_| Ok::<_, String>(())).map(drop),
        careful.acquire(&key, LIMIT).map(drop),
        place.build("noted", PgLockClient::builder()).lock_with(&key, &noted()).map(drop),
    ] {
        let error = result.unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
        for word in ["schema.sql", "create_members_table", "owners and notes"] {
            assert!(error.to_string().contains(word), "{error}");
        }
    }
    assert_eq!(place.stored.row(&key), None, "nothing was granted");
    // A note alone makes it with the first lock.
    let guard = place.client.lock_with(&key, &noted()).unwrap();
    assert_eq!(said(&holder(&place.client)), (None, Some("invoices")));
    assert!(
        timed_out(&careful, &key).to_string().contains("held by somebody (invoices) under fencing token"),
        "no owner"
    );
    guard.release().unwrap();
    careful.lock(&key).unwrap().release().unwrap();
    assert_eq!(members(&place), 0);
}

#[test]
fn building_a_client_with_an_owner_makes_the_table() {
    let schema = crate::support::schema();
    let client = builder().connect(&schema.url()).unwrap();
    let sql = "SELECT count(*) FROM pg_tables WHERE schemaname = $1 AND tablename = 'syncguard_members'";
    let count: i64 = schema.client().query_one(sql, &[&schema.name()]).unwrap().get(0);
    assert_eq!(count, 1);
    client.lock("a").unwrap().release().unwrap();
}

#[test]
fn a_note_lasts_as_long_as_its_lease_is_renewed() {
    let place = place();
    let (client, key) = (owned(&place), place.key("report"));
    let options = noted().ttl(ms(5000)).heartbeat(Heartbeat::Every(ms(100)));
    let guard = client.lock_with(&key, &options).unwrap();
    let end: i64 = place.stored.one("SELECT expires_at_ms FROM syncguard_members", &[]).get(0);
    wait_until(LIMIT, "its first end is long over", || place.stored.now_ms() > end + 2100);
    assert_eq!(place.client.operator().cleanup_expired(10).unwrap(), 0);
    assert!(guard.is_held());
    assert_eq!(said(&holder(&place.client)), (Some(OWNER), Some("invoices")));
}

#[test]
fn what_other_clients_leave_is_shown_for_nobody_and_goes_with_the_next_holder() {
    let place = place();
    let (client, key) = (owned(&place), place.key("report"));
    let leave = |sql: &str| {
        let guard = client.lock_with(&key, &noted()).unwrap();
        place.stored.run(sql);
        let _ = guard.leak();
        assert_eq!(members(&place), 1);
    };
    // Another client, or an older version, releases it; somebody who says nothing has the key then.
    leave("DELETE FROM syncguard_locks");
    let plain = place.client.lock(&key).unwrap();
    assert_eq!(said(&holder(&place.client)), (None, None));
    assert!(timed_out(&client, &key).to_string().contains("held under fencing token"));
    assert_eq!(place.client.leader(&key).unwrap().unwrap().owner, None);
    plain.release().unwrap();
    client.lock(&key).unwrap().release().unwrap();
    assert_eq!(members(&place), 0, "whoever says something next deletes it");
    // Another client takes it over.
    leave("UPDATE syncguard_locks SET expires_at_ms = expires_at_ms - 100000");
    place.stored.write(&key, &forged_id(1), 30_000, 100);
    assert_eq!(said(&holder(&place.client)), (None, None));
    place.stored.run("UPDATE syncguard_locks SET expires_at_ms = expires_at_ms - 100000");
    let guard = client.lock(&key).unwrap();
    assert_eq!((said(&holder(&place.client)), members(&place)), ((Some(OWNER), None), 1));
    guard.release().unwrap();
    // One that took it over under the very same id, with a fence of its own.
    let guard = client.lock_with(&key, &noted()).unwrap();
    place.stored.write(&key, guard.lock_id(), 30_000, 200);
    assert_eq!(said(&holder(&place.client)), (None, None));
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released, "by its id");
    // And cleanup deletes what nobody meets.
    leave("DELETE FROM syncguard_locks");
    wait_until(LIMIT, "the note of nobody is cleaned up", || {
        place.client.operator().cleanup_expired(10).unwrap() == 1
    });
    assert_eq!(members(&place), 0);
}

#[test]
fn a_broken_lock_is_reported_with_its_owner_and_its_note_is_gone() {
    let place = place();
    let (client, key) = (owned(&place), place.key("report"));
    let guard = client.lock_with(&key, &noted()).unwrap();
    let was = place.client.operator().break_lock(&key, "a test").unwrap().was.unwrap();
    assert_eq!((said(&was), members(&place)), ((Some(OWNER), Some("invoices")), 0));
    assert_eq!(guard.release().unwrap(), ReleaseResult::NotHeld);
    // A takeover after a crash deletes it as well.
    let dead = client.lock_with(&key, &noted().heartbeat(Heartbeat::Off)).unwrap();
    let _ = dead.leak();
    place.stored.run("UPDATE syncguard_locks SET expires_at_ms = expires_at_ms - 100000");
    let other = builder().owner("web-4").connect(&place.schema.url()).unwrap();
    let next = other.lock(&key).unwrap();
    assert_eq!((said(&holder(&client)), members(&place)), ((Some("web-4"), None), 1));
    next.release().unwrap();
}
