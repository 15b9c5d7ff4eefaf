//! Readers under faults: without a right, killed, paused, cut off, with answers that are lost and changes that come in between.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::time::Duration;

use crate::support::calls::ms;
use crate::support::proxy::Network;
use crate::support::{Action, LIMIT, Place, Proxy, Role, TTL, Worker, place, wait_until, worker};
use syncguard::backend::{Clock, Intent};
use syncguard::{
    ErrorCode, ExtendResult, Heartbeat, LockBackend, LockOptions, Operator, PgLockClient, ReleaseResult,
};

/// How long a writer can bar readers by an announcement.
const LONGEST: Duration = Duration::from_secs(5);

fn count(place: &Place, what: &str) -> i64 {
    place.stored.one(&format!("SELECT count(*) FROM syncguard_members WHERE {what}"), &[]).get(0)
}

fn through(proxy: &Proxy, place: &Place) -> PgLockClient {
    PgLockClient::builder().max_connections(1).connect(&proxy.url(&place.schema.url())).unwrap()
}

/// What each call may answer without a right: what is true, or an error that says what to do.
#[test]
fn each_right_to_the_members_that_is_missing_is_an_error_and_never_a_wrong_answer() {
    for right in ["SELECT", "INSERT", "UPDATE", "DELETE"] {
        let place = place();
        let key = place.key("prices");
        let other = place.client.read_lock(&key).unwrap();
        let role = Role::with_tables(&place.schema);
        let client = role.connect(PgLockClient::builder()).unwrap();
        let often = LockOptions::new().ttl(LIMIT).heartbeat(Heartbeat::Every(ms(50)));
        let (kept, leaves) = (client.read_lock_with(&key, &often).unwrap(), client.read_lock(&key).unwrap());
        place.stored.run(&format!("REVOKE {right} ON syncguard_members FROM {}", role.name()));
        let mut refused = Vec::new();
        let mut tells = |call: &str, code: ErrorCode, text: String| {
            assert_eq!(code, ErrorCode::AuthFailed, "{right}, {call}: {text}");
            assert!(text.contains("docs/security.md"), "{call}: {text}");
            refused.push(call.to_owned());
        };
        match client.try_read_lock(&key) {
            Ok(reader) => assert_eq!(reader.expect("readers have the key").fence(), other.fence()),
            Err(error) => tells("join", error.code(), error.to_string()),
        }
        match kept.extend(LIMIT * 2) {
            Ok(answer) => assert!(matches!(answer, ExtendResult::Extended { .. }), "{right}: {answer:?}"),
            Err(error) => tells("extend", error.code(), error.to_string()),
        }
        match leaves.release() {
            Ok(answer) => assert_eq!(answer, ReleaseResult::Released, "{right}"),
            Err(error) => tells("leave", error.code(), error.to_string()),
        }
        let mut connection = role.config().connect(postgres::NoTls).unwrap();
        let mut transaction = connection.transaction().unwrap();
        match kept.fence_transaction(&mut transaction) {
            Ok(()) => transaction.commit().unwrap(),
            Err(error) => tells("fence", error.code(), error.to_string()),
        }
        assert!(kept.is_held(), "{right}: nothing was lost, its ttl goes on");
        assert!(client.try_lock(&key).unwrap().is_none(), "{right}: a writer beside readers");
        let waits = LockOptions::new().max_retries(2).retry_delay(ms(50));
        let error = client.lock_with(&key, &waits).unwrap_err();
        assert_eq!(error.code(), ErrorCode::AcquisitionTimeout, "{right}: {error:?}");
        assert!(client.is_locked(&key).unwrap() && client.get_by_key(&key).unwrap().unwrap().shared);
        assert_eq!(client.operator().cleanup_expired(10).unwrap(), 0);
        assert!(!refused.is_empty(), "{right} is needed for something");
        // With its rights back all goes on.
        place.stored.run(&format!("GRANT {right} ON syncguard_members TO {}", role.name()));
        assert!(matches!(kept.extend(LIMIT).unwrap(), ExtendResult::Extended { .. }));
        assert_eq!(kept.release().unwrap(), ReleaseResult::Released);
    }
}

#[test]
fn a_reader_whose_answer_was_lost_is_found_again_whoever_waits_by_then() {
    let place = place();
    let key = place.key("prices");
    let other = place.client.read_lock(&key).unwrap();
    let proxy = Proxy::start(crate::support::server().port());
    let client = through(&proxy, &place);
    client.read_lock(&place.key("warm")).unwrap().release().unwrap();
    let (backend, named, mut asked) = (place.client.clone(), key.clone(), 0);
    proxy.on_query(move |sql| {
        if sql.contains("sg_join") && asked == 0 {
            asked = 1;
            return Action::CutAnswerAt(0);
        }
        if asked == 1 && sql.contains("sg_found") {
            asked = 2;
            let intent = Intent::new(&named, "AAAAAAAAAAAAAAAAAAAAAA", LIMIT, LONGEST);
            backend.announce(&intent, Clock::system().now().after(LIMIT)).unwrap();
        }
        Action::Pass
    });
    let guard = client.try_read_lock(&key).unwrap().expect("it has been a reader since the first message");
    assert_eq!((guard.fence(), count(&place, "role = 's'")), (other.fence(), 2));
    assert_eq!(count(&place, "role = 'w'"), 1, "and a writer waited when it asked again");
    assert!(place.client.try_read_lock(&key).unwrap().is_none(), "others yield to it");
}

#[test]
fn a_reader_that_asks_again_and_is_none_yet_yields_to_a_writer_that_waits() {
    let place = place();
    let key = place.key("prices");
    let _other = place.client.read_lock(&key).unwrap();
    let proxy = Proxy::start(crate::support::server().port());
    let client = through(&proxy, &place);
    client.read_lock(&place.key("warm")).unwrap().release().unwrap();
    let intent = Intent::new(&key, "AAAAAAAAAAAAAAAAAAAAAA", LIMIT, LONGEST);
    place.client.announce(&intent, Clock::system().now().after(LIMIT)).unwrap();
    proxy.once("sg_join", Action::CutQueryAt(9));
    assert!(client.try_read_lock(&key).unwrap().is_none());
    assert_eq!(count(&place, "role = 's'"), 1);
}

#[test]
fn a_missing_table_of_members_is_looked_for_once_and_not_each_time() {
    type Call = (&'static str, fn(&Operator), u64);
    let calls: [Call; 4] = [
        ("cleanup", |operator| assert_eq!(operator.cleanup_expired(10).unwrap(), 0), 1),
        ("holders", |operator| assert!(operator.holders(10).unwrap().is_empty()), 1),
        ("waiters", |operator| assert!(operator.waiters(10).unwrap().is_empty()), 0),
        ("break_lock", |operator| drop(operator.break_lock("k", "a test").unwrap()), 1),
    ];
    for (what, call, queries) in calls {
        let place = place();
        let proxy = Proxy::start(crate::support::server().port());
        let operator = through(&proxy, &place).operator();
        let sent = || {
            let before = proxy.queries();
            call(&operator);
            proxy.queries() - before
        };
        let (first, second) = (sent(), sent());
        assert!(second == queries && first > second, "{what}: {first}, then {second}");
    }
}

#[test]
fn a_table_of_members_that_a_client_has_made_itself_is_seen_at_once() {
    let place = place();
    let operator = place.client.operator();
    assert!(operator.holders(10).unwrap().is_empty());
    let key = place.key("prices");
    let _guard = place.client.lock_with(&key, &LockOptions::new().note("x")).unwrap();
    assert_eq!(operator.holders(10).unwrap()[0].note.as_deref(), Some("x"));
}

#[test]
fn a_group_whose_members_are_gone_when_it_is_trimmed_is_over() {
    let place = place();
    let key = place.key("prices");
    let options = LockOptions::new().ttl(Duration::from_secs(3600)).heartbeat(Heartbeat::Off);
    let guard = place.client.read_lock_with(&key, &options).unwrap();
    place.stored.run(
        "CREATE FUNCTION goes() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           DELETE FROM syncguard_members WHERE lock_id = NEW.lock_id; RETURN NULL; END $$; \
         CREATE TRIGGER goes AFTER UPDATE ON syncguard_members FOR EACH ROW EXECUTE FUNCTION goes()",
    );
    let _ = guard.extend(ms(2000)).unwrap();
    assert_eq!(count(&place, "true"), 0);
    place.client.lock(&key).unwrap().release().unwrap();
    drop(guard);
}

/// A busy machine may be late for several renewals.
fn short() -> LockOptions {
    LockOptions::new().ttl(Duration::from_secs(4)).heartbeat(Heartbeat::Every(ms(200)))
}

/// A reader in another process, which says what has become of its lease when it is asked.
fn reader(parent: &worker::Parent) {
    let client = PgLockClient::connect(&parent.arg("url")).unwrap();
    let key = parent.arg("key");
    let guard = client.read_lock_with(&key, &short()).unwrap();
    parent.say(&format!("holds {}", guard.fence().get()));
    parent.hear();
    let mut sql = postgres::Client::connect(&parent.arg("url"), postgres::NoTls).unwrap();
    let mut transaction = sql.transaction().unwrap();
    let fenced = guard.fence_transaction(&mut transaction).is_ok();
    let held = guard.is_held();
    let released = guard.release().is_ok_and(|answer| answer == ReleaseResult::Released);
    parent.say(&format!("held {held} fenced {fenced} released {released}"));
}

#[test]
fn readers_that_are_killed_or_paused_leave_the_key_to_a_writer_and_do_it_no_harm() {
    worker::part("reader", reader);
    let place = place();
    let test = "readers::readers_that_are_killed_or_paused_leave_the_key_to_a_writer_and_do_it_no_harm";
    place.client.read_lock(&place.key("warm")).unwrap().release().unwrap();
    let url = place.schema.url();
    let patient = LockOptions::new().timeout(LIMIT);
    for ends in ["KILL", "STOP"] {
        let key = place.key(ends);
        let start = || Worker::start(test, "reader", &[("url", &url), ("key", &key)]);
        let mut readers = [start(), start()];
        let fences = readers.each_mut().map(|reader| reader.hear());
        assert_eq!(fences[0], fences[1], "one group");
        // It is renewed while both live.
        let first = place.stored.row(&key).unwrap().expires_at_ms;
        wait_until(LIMIT, "the group is renewed", || {
            place.stored.row(&key).unwrap().expires_at_ms > first + 1000
        });
        readers.iter().for_each(|reader| reader.signal(ends));
        let writer = place.client.lock_with(&key, &patient).unwrap();
        let over = place.stored.row(&key).unwrap();
        assert!(
            format!("holds {}", writer.fence().get()) > fences[0],
            "{} after {}",
            writer.fence(),
            fences[0]
        );
        if ends == "STOP" {
            for reader in &mut readers {
                reader.signal("CONT");
                reader.tell("look");
                assert_eq!(reader.hear(), "held false fenced false released false");
            }
        }
        assert_eq!(place.stored.row(&key).unwrap().lock_id, over.lock_id, "the writer's row is as it was");
        assert!(matches!(writer.extend(TTL).unwrap(), ExtendResult::Extended { .. }));
        writer.release().unwrap();
        wait_until(LIMIT, "the dead are gone with those who come by", || {
            place.client.read_lock(&key).unwrap().release().unwrap();
            place
                .stored
                .one("SELECT count(*) FROM syncguard_members WHERE key = $1", &[&key])
                .get::<_, i64>(0)
                == 0
        });
    }
}

#[test]
fn a_reader_that_is_cut_off_has_lost_its_lease_before_a_writer_gets_the_key() {
    let place = place();
    let key = place.key("prices");
    let proxy = Proxy::start(crate::support::server().port());
    let client = through(&proxy, &place);
    let guard = client.read_lock_with(&key, &short()).unwrap();
    let first = place.stored.row(&key).unwrap().expires_at_ms;
    wait_until(LIMIT, "it is renewed", || place.stored.row(&key).unwrap().expires_at_ms > first + 500);
    proxy.network(Network::Mute);
    let mut writer = None;
    wait_until(LIMIT, "a writer gets the key", || {
        let held = guard.is_held();
        writer = place.client.try_lock(&key).unwrap();
        assert!(
            writer.is_none() || !guard.is_held(),
            "a reader trusts its lease beside a writer, held {held}"
        );
        writer.is_some()
    });
    let before = guard.fence();
    proxy.network(Network::Open);
    drop(guard);
    let writer = writer.unwrap();
    assert!(writer.fence() > before && writer.is_held());
    assert!(matches!(writer.extend(TTL).unwrap(), ExtendResult::Extended { .. }));
}
