//! Transactions of a holder that commit only as long as it is the holder.

use super::*;

fn protected(place: &Place) -> Client {
    let mut client = place.schema.client();
    client.batch_execute("CREATE TABLE IF NOT EXISTS work (what text)").unwrap();
    client
}

fn work_done(place: &Place) -> i64 {
    place.stored.one("SELECT count(*) FROM work", &[]).get(0)
}

#[test]
fn a_current_fence_commits_and_a_stale_one_cannot_even_if_the_error_is_ignored() {
    let place = place();
    let a = place.key("a");
    let mut client = protected(&place);
    let guard = place.client.lock(&a).unwrap();
    let mut tx = client.transaction().unwrap();
    guard.fence_transaction(&mut tx).unwrap();
    tx.execute("INSERT INTO work VALUES ('current')", &[]).unwrap();
    tx.commit().unwrap();
    assert_eq!(work_done(&place), 1);

    place.stored.age(&a, 1_500);
    place.stored.write(&a, &id("newer"), 30_000, 2);
    let mut tx = client.transaction().unwrap();
    let error = guard.fence_transaction(&mut tx).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Aborted);
    assert!(tx.execute("INSERT INTO work VALUES ('stale')", &[]).is_err());
    // The documents warn of it: the server rolls back, and the driver calls that a success.
    tx.commit().unwrap();
    assert_eq!(work_done(&place), 1);
    drop(guard);
}

#[test]
fn every_kind_of_stale_lease_is_refused() {
    let place = place();
    let mut client = protected(&place);
    let refused = |client: &mut Client, key: &str, fence| {
        let mut tx = client.transaction().unwrap();
        let error = place.client.assert_fence(&mut tx, key, fence).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Aborted, "{error:?}");
    };
    let expired = place.hold("expired");
    place.stored.age("expired", 1_500);
    refused(&mut client, "expired", expired.fence);
    let released = place.hold("released");
    assert_eq!(place.client.release(&released.lock_id).unwrap(), ReleaseResult::Released);
    refused(&mut client, "released", released.fence);
    let raised = place.hold("raised");
    place.stored.set_counter("raised", 2);
    refused(&mut client, "raised", raised.fence);
    refused(&mut client, "never locked", raised.fence);
    let current = place.hold("current");
    let mut tx = client.transaction().unwrap();
    place.client.assert_fence(&mut tx, "current", current.fence).unwrap();
}

#[test]
fn a_fenced_transaction_keeps_the_next_holder_out_until_it_ends() {
    let place = place();
    let a = place.key("a");
    let mut client = protected(&place);
    let name = unique();
    let other = place.named(&name);
    for two_messages in FORMS {
        let guard = place.client.lock(&a).unwrap();
        let mut tx = client.transaction().unwrap();
        guard.fence_transaction(&mut tx).unwrap();
        place.stored.age(&a, 1_500);
        // Contention, at once, and nothing that the server would log.
        let answer = LockBackend::acquire(&other, &a, TTL, &token(two_messages)).unwrap();
        assert_eq!(answer, AcquireResult::Locked);
        tx.execute("INSERT INTO work VALUES ('in time')", &[]).unwrap();
        tx.commit().unwrap();
        let next = LockBackend::acquire(&other, &a, TTL, &token(two_messages)).unwrap().acquired().unwrap();
        assert!(next.fence > guard.fence());
        assert_eq!(other.release(&next.lock_id).unwrap(), ReleaseResult::Released);
        drop(guard);
    }
    assert_eq!(work_done(&place), 2);
    if crate::support::server().is_ours() {
        let errors: Vec<_> = crate::support::server()
            .log()
            .lines()
            .filter(|line| line.contains(&name) && line.contains("ERROR"))
            .map(str::to_owned)
            .collect();
        assert!(errors.is_empty(), "{errors:?}");
    }
}

#[test]
fn an_expired_holder_gets_no_new_fenced_transaction_so_that_the_next_one_gets_on() {
    let place = place();
    let a = place.key("a");
    let mut clients = [protected(&place), protected(&place)];
    let grant = place.hold(&a);
    let [first, second] = &mut clients;
    let mut tx = first.transaction().unwrap();
    place.client.assert_fence(&mut tx, &a, grant.fence).unwrap();
    place.stored.age(&a, 1_500);
    let mut overlapping = second.transaction().unwrap();
    let error = place.client.assert_fence(&mut overlapping, &a, grant.fence).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Aborted);
    overlapping.rollback().unwrap();
    tx.rollback().unwrap();
    assert!(place.client.acquire(&a, TTL).unwrap().acquired().is_some());
}

#[test]
fn a_repeatable_read_transaction_from_before_the_newest_grant_fails_closed() {
    let place = place();
    let mut client = protected(&place);
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let key = place.key(level);
        let old = place.hold(&key);
        let mut tx = client.transaction().unwrap();
        tx.batch_execute(&format!("SET TRANSACTION ISOLATION LEVEL {level}; SELECT count(*) FROM work"))
            .unwrap();
        place.stored.age(&key, 1_500);
        let _newer = place.hold(&key);
        let error = place.client.assert_fence(&mut tx, &key, old.fence).unwrap_err();
        assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
        assert!(tx.execute("INSERT INTO work VALUES ('stale')", &[]).is_err());
    }
    assert_eq!(work_done(&place), 0);
}

#[test]
fn a_read_only_transaction_is_refused_with_the_reason() {
    let place = place();
    let a = place.key("a");
    let mut client = protected(&place);
    let guard = place.client.lock(&a).unwrap();
    let mut tx = client.build_transaction().read_only(true).start().unwrap();
    let error = guard.fence_transaction(&mut tx).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    assert!(error.to_string().contains("READ WRITE"), "{error}");
}

#[test]
fn a_guards_fence_does_not_pass_in_another_database_that_counted_to_the_same_number() {
    let place = place();
    let a = place.key("a");
    // The same names, the same key, the same number: only the lock id tells the two apart.
    let database = format!("copy_{}", unique());
    place.stored.run(&format!("CREATE DATABASE {database}"));
    let url = place.schema.url().replacen("/postgres?", &format!("/{database}?"), 1);
    let mut client = Client::connect(&url, postgres::NoTls).unwrap();
    client.batch_execute(&format!("CREATE SCHEMA {}", place.schema.name())).unwrap();
    let copy = PgLockClient::connect(&url).unwrap();
    let guard = place.client.lock(&a).unwrap();
    let there = copy.acquire(&a, TTL).unwrap().acquired().unwrap();
    assert_eq!(there.fence, guard.fence());

    let mut tx = client.transaction().unwrap();
    let error = guard.fence_transaction(&mut tx).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Aborted, "{error:?}");
    assert!(tx.execute("SELECT 1", &[]).is_err(), "it cannot commit");
    tx.rollback().unwrap();
    // What `assert_fence` cannot know, as its documentation says.
    let mut tx = client.transaction().unwrap();
    place.client.assert_fence(&mut tx, &a, guard.fence()).unwrap();
    drop(tx);

    let mut client = place.schema.client();
    let mut tx = client.transaction().unwrap();
    guard.fence_transaction(&mut tx).unwrap();
    tx.commit().unwrap();
}
