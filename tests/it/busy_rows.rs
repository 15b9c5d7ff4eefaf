//! Rows that somebody else has locked: a batch of renewals passes over them, and a release waits for what becomes of them.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use postgres::Client;
use syncguard::backend::{
    Attempt, BeginOutcome, BeginRun, Clock, MarkOutcome, MarkRun, MarkStep, Reason, ReleaseOutcome,
    RenewOutcome, Renewal,
};
use syncguard::{Acquired, CancelToken, Heartbeat, LockBackend, LockOptions, ReleaseResult, Slot};

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

/// It goes by the rows as they are when it has them, not as they were when it began to wait for them.
#[test]
fn the_renewal_of_one_reader_shortens_nothing_that_was_lengthened_while_it_waited() {
    for table in ["syncguard_locks", "syncguard_members"] {
        let place = place();
        let key = place.key("alone");
        let read = reader(&place, &key);
        let lengthen = format!(
            "UPDATE {table} SET expires_at_ms = expires_at_ms + 3600000 WHERE key = $1 RETURNING expires_at_ms"
        );
        let mut other = holding(&place, &lengthen, &key);
        let (name, there) = (unique(), key.clone());
        let client = place.named(&name);
        let call = Call::start(&name, move || {
            let renewal = Renewal::new(&there, &read.lock_id, read.fence, TTL * 2).of_reader();
            client.renew(&[renewal], Clock::system().now().after(LIMIT)).remove(0)
        });
        call.wait_until_blocked(&place.stored);
        other.batch_execute("COMMIT").unwrap();
        assert!(matches!(call.join().unwrap(), RenewOutcome::Renewed { .. }), "{table}");
        let end = format!("SELECT expires_at_ms FROM {table} WHERE key = $1");
        let end: i64 = place.stored.one(&end, &[&key]).get(0);
        assert!(end >= read.expires_at_ms + 3_600_000, "{table}: {end}");
    }
}

#[test]
fn whoever_joins_a_group_shortens_nothing_that_was_lengthened_while_it_waited() {
    let place = place();
    let key = place.key("group");
    let read = reader(&place, &key);
    let sql = "UPDATE syncguard_locks SET expires_at_ms = expires_at_ms + 3600000 WHERE key = $1 RETURNING 1";
    let mut other = holding(&place, sql, &key);
    let (name, there) = (unique(), key.clone());
    let client = place.named(&name);
    let call = Call::start(&name, move || {
        let options = LockOptions::new().ttl(TTL * 2).heartbeat(Heartbeat::Off);
        client.read_lock_with(&there, &options).unwrap().leak()
    });
    call.wait_until_blocked(&place.stored);
    other.batch_execute("COMMIT").unwrap();
    assert_eq!(call.join().fence, read.fence);
    assert!(place.stored.row(&key).unwrap().expires_at_ms >= read.expires_at_ms + 3_600_000);
}

/// Otherwise the slot is marked, though whoever breaks the lease may let another run begin.
#[test]
fn a_mark_waits_for_what_becomes_of_its_lease() {
    for step in [MarkStep::Claim, MarkStep::Finish] {
        let place = place();
        let (job, mine) = (place.key("job"), id("mine"));
        let deadline = Clock::system().now().after(LIMIT);
        let begin = BeginRun::new(Attempt::new(&job, &mine, TTL, deadline), Slot::number(1));
        let begun = place.client.begin_run(&begin, &CancelToken::new()).unwrap();
        let BeginOutcome::Begun(begun) = begun else { panic!("the key is free") };
        let sql = "DELETE FROM syncguard_locks WHERE key = $1 RETURNING 1";
        let mut breaker = holding(&place, sql, &job);
        let name = unique();
        let client = place.named(&name);
        let call = Call::start(&name, move || {
            let run = MarkRun::new(&job, &mine, begun.grant.acquired.fence, Slot::number(1), 1);
            client.mark_run(&run, step, deadline)
        });
        call.wait_until_blocked(&place.stored);
        breaker.batch_execute("COMMIT").unwrap();
        assert_eq!(call.join().unwrap(), MarkOutcome::NotMarked, "{step:?}");
    }
}

/// What seems over may be in the hands of an extend that found it live and has not committed.
#[test]
fn a_release_waits_for_an_extend_that_is_under_way_on_a_row_that_seems_over() {
    for several in [false, true] {
        let place = place();
        let key = place.key("late");
        place.stored.write(&key, &id("mine"), -5_000, 1);
        let sql =
            "UPDATE syncguard_locks SET expires_at_ms = expires_at_ms + 60000 WHERE key = $1 RETURNING 1";
        let mut extend = holding(&place, sql, &key);
        let name = unique();
        let client = place.named(&name);
        let call = Call::start(&name, move || {
            if !several {
                return client.release(&id("mine")).map(|answer| answer == ReleaseResult::Released);
            }
            let answers = client.release_all(&[&id("mine"), &id("none")], Clock::system().now().after(LIMIT));
            let gone = ReleaseOutcome::NotHeld(Some(Reason::NotFound));
            answers.map(|answers| answers == [ReleaseOutcome::Released, gone])
        });
        call.wait_until_blocked(&place.stored);
        extend.batch_execute("COMMIT").unwrap();
        assert!(call.join().unwrap(), "several: {several}");
        assert!(place.stored.row(&key).is_none());
    }
}
