//! Rows that somebody else has locked: a batch of renewals passes over them, and a release waits for what becomes of them.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use postgres::Client;
use syncguard::backend::{Clock, RenewOutcome, Renewal};
use syncguard::{Acquired, Heartbeat, LockBackend, LockOptions, ReleaseResult};

use crate::support::{Call, LIMIT, Place, TTL, id, place, unique};

/// A transaction that stays open.
fn holding(place: &Place, sql: &str, key: &str) -> Client {
    let mut client = place.schema.client();
    client.batch_execute("BEGIN").unwrap();
    assert_eq!(client.query(sql, &[&key]).unwrap().len(), 1);
    client
}

fn renew(place: &Place, leases: &[Renewal<'_>]) -> Vec<RenewOutcome> {
    let answers = place.client.renew(leases, Clock::system().now().after(LIMIT));
    answers.into_iter().map(Result::unwrap).collect()
}

fn reader(place: &Place, key: &str) -> Acquired {
    let options = LockOptions::new().ttl(TTL).heartbeat(Heartbeat::Off);
    place.client.read_lock_with(key, &options).unwrap().leak()
}

#[test]
fn a_batch_of_renewals_passes_over_a_lease_whose_row_is_busy() {
    let place = place();
    let (busy, free) = (place.key("busy"), place.key("free"));
    let (one, two) = (place.hold(&busy), place.hold(&free));
    let leases = [
        Renewal::new(&busy, &one.lock_id, one.fence, TTL * 2),
        Renewal::new(&free, &two.lock_id, two.fence, TTL * 2),
    ];
    let mut other = holding(&place, "SELECT 1 FROM syncguard_locks WHERE key = $1 FOR UPDATE", &busy);
    let answers = renew(&place, &leases);
    assert_eq!(answers[0], RenewOutcome::Busy);
    assert!(matches!(answers[1], RenewOutcome::Renewed { .. }), "{answers:?}");
    assert_eq!(place.stored.row(&busy).unwrap().expires_at_ms, one.expires_at_ms);
    other.batch_execute("ROLLBACK").unwrap();
    assert!(renew(&place, &leases).iter().all(|answer| matches!(answer, RenewOutcome::Renewed { .. })));
}

#[test]
fn a_batch_of_renewals_passes_over_readers_whose_group_or_member_is_busy() {
    let place = place();
    let (busy, free) = (place.key("busy"), place.key("free"));
    let (one, two) = (reader(&place, &busy), reader(&place, &free));
    let leases = [
        Renewal::new(&busy, &one.lock_id, one.fence, TTL * 2).of_reader(),
        Renewal::new(&free, &two.lock_id, two.fence, TTL * 2).of_reader(),
    ];
    for table in ["syncguard_locks", "syncguard_members"] {
        let sql = format!("SELECT 1 FROM {table} WHERE key = $1 FOR UPDATE");
        let mut other = holding(&place, &sql, &busy);
        let answers = renew(&place, &leases);
        assert_eq!(answers[0], RenewOutcome::Busy, "{table}");
        assert!(matches!(answers[1], RenewOutcome::Renewed { .. }), "{table}: {answers:?}");
        other.batch_execute("ROLLBACK").unwrap();
    }
    let answers = renew(&place, &leases);
    assert!(answers.iter().all(|answer| matches!(answer, RenewOutcome::Renewed { .. })), "{answers:?}");
}

/// What seems over may be in the hands of an extend that found it live and has not committed.
#[test]
fn a_release_waits_for_an_extend_that_is_under_way_on_a_row_that_seems_over() {
    let place = place();
    let key = place.key("late");
    place.stored.write(&key, &id("mine"), -5_000, 1);
    let sql = "UPDATE syncguard_locks SET expires_at_ms = expires_at_ms + 60000 WHERE key = $1 RETURNING 1";
    let mut extend = holding(&place, sql, &key);
    let name = unique();
    let client = place.named(&name);
    let call = Call::start(&name, move || client.release(&id("mine")));
    call.wait_until_blocked(&place.stored);
    extend.batch_execute("COMMIT").unwrap();
    assert_eq!(call.join().unwrap(), ReleaseResult::Released);
    assert!(place.stored.row(&key).is_none());
}
