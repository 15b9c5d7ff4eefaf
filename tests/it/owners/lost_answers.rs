//! Labelled grants and releases whose messages or answers are lost on the way, or come late.

use super::*;
use crate::support::{Action, Proxy, server, unique};
use postgres::NoTls;

/// A client with an owner through a proxy, with its statements prepared.
fn through(place: &Place) -> (PgLockClient, Proxy) {
    let _ = owned(place);
    let proxy = Proxy::start(server().port());
    let mut config: postgres::Config = proxy.url(&place.schema.url()).parse().unwrap();
    config.application_name(&unique());
    let client = builder().auto_create_tables(false).operation_timeout(Duration::from_secs(3));
    let client = client.connect_with(config, NoTls).unwrap();
    for client in [client.clone(), client.cancellable(&token(true))] {
        client.lock(&place.key("first")).unwrap().release().unwrap();
        client.lock_all(&[place.key("first")]).unwrap().release().unwrap();
        drop(client.semaphore(&place.key("first"), 1).unwrap().acquire().unwrap());
    }
    (client, proxy)
}

/// What is stored after a grant: one row, and one note with its id and fence.
fn assert_one_note(place: &Place, what: &str) {
    let sql = "SELECT (SELECT count(*) FROM syncguard_locks), (SELECT count(*) FROM syncguard_members), \
               (SELECT count(*) FROM syncguard_locks AS l JOIN syncguard_members AS m ON m.lock_id = l.lock_id \
                AND m.fence = l.fence AND m.role = 'n' AND m.owner IS NOT NULL)";
    let row = place.stored.one(sql, &[]);
    let counts: [i64; 3] = [row.get(0), row.get(1), row.get(2)];
    assert_eq!(counts, [1, 1, 1], "{what}");
}

#[test]
fn a_lost_answer_leaves_one_lease_with_one_note() {
    let place = place();
    let (client, proxy) = through(&place);
    let in_two = client.cancellable(&token(true));
    for action in [Action::CutAnswerAt(0), Action::CutNow, Action::CutQueryAt(0)] {
        for (statement, of) in [("note_absent", &client), ("note_grant", &in_two)] {
            let what = format!("{statement}, {action:?}");
            proxy.once(&format!("EXECUTE sg_{statement}_"), action);
            let before = proxy.count();
            let guard = of.lock_with(&place.key("lock"), &noted()).unwrap();
            assert!(proxy.count() > before, "{what} has happened");
            assert_one_note(&place, &what);
            assert_eq!(said(&holder(&place.client)), (Some(OWNER), Some("invoices")), "{what}");
            guard.release().unwrap();
            assert_eq!(members(&place), 0, "{what}");
        }
        proxy.once("EXECUTE sg_note_set_absent_", action);
        let set = client.lock_all_with(&[place.key("set")], &noted()).unwrap();
        assert_one_note(&place, "a set");
        set.release().unwrap();
        proxy.once("EXECUTE sg_note_permit_", action);
        let permit = client.semaphore(&place.key("permits"), 3).unwrap().acquire_with(&noted()).unwrap();
        assert_one_note(&place, "a permit");
        permit.release().unwrap();
        assert_eq!(members(&place), 0);
    }
}

#[test]
fn a_release_whose_answer_is_lost_has_taken_its_note_along() {
    let place = place();
    let (client, proxy) = through(&place);
    for action in [Action::CutAnswerAt(0), Action::CutQueryAt(0)] {
        let guard = client.lock_with(&place.key("lock"), &noted()).unwrap();
        proxy.once("EXECUTE sg_note_release_live_", action);
        // Where the answer was lost it is not known whether this release ended it.
        let _ = guard.release();
        wait_until(LIMIT, "both are gone", || {
            place.stored.row(&place.key("lock")).is_none() && members(&place) == 0
        });
    }
}

#[test]
fn a_grant_that_comes_late_is_noted_as_its_own_and_as_nobody_elses() {
    let place = place();
    let (client, proxy) = through(&place);
    let key = place.key("lock");
    proxy.once("EXECUTE sg_note_absent_", Action::Zombie(None));
    let guard = client.lock_with(&key, &noted()).unwrap();
    guard.release().unwrap();
    let other = place.client.lock(&key).unwrap();
    proxy.open_gate();
    wait_until(LIMIT, "the copy has come", || proxy.zombies_over() == 1);
    assert_eq!(
        (said(&holder(&place.client)), members(&place)),
        ((None, None), 0),
        "it was refused as a whole"
    );
    other.release().unwrap();
}
