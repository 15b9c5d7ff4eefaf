//! Triggers that swallow a change: a row that was found and not changed is an error that says so, and
//! never an answer, whatever the operation and its form.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::fmt::Debug;
use std::time::Duration;

use crate::support::calls::{FORMS, token};
use crate::support::{Place, TTL, id, place};
use syncguard::backend::{
    Attempt, Clock, Reason, ReleaseOutcome, Renewal, SharedAttempt, generate_shared_lock_id,
};
use syncguard::{ErrorCode, Heartbeat, LockBackend, LockError, LockOptions};

const LOCKS: &str = "syncguard_locks";
const MEMBERS: &str = "syncguard_members";
const COUNTERS: &str = "syncguard_fence_counters";

impl Trigger<'_> {
    /// A function of somebody's own, called for each row before it is changed.
    fn new<'a>(place: &'a Place, table: &'static str, event: &str, body: &str) -> Trigger<'a> {
        place.stored.put_in_the_way(&format!("{event} ON {table}"), "", body);
        Trigger { place, table }
    }
}

/// A trigger, dropped with the value.
struct Trigger<'a> {
    place: &'a Place,
    table: &'static str,
}

impl Drop for Trigger<'_> {
    fn drop(&mut self) {
        self.place.stored.run(&format!("DROP TRIGGER in_the_way ON {}", self.table));
    }
}

#[track_caller]
fn says_what_is_in_the_way<T: Debug>(answer: Result<T, LockError>) {
    let error = answer.expect_err("a swallowed change is no answer");
    assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Internal, false), "{error:?}");
    assert!(error.to_string().contains("trigger"), "{error}");
}

#[test]
fn a_release_whose_delete_is_swallowed_is_an_error_and_the_lease_lives_on() {
    let place = place();
    let soft = "UPDATE syncguard_locks SET user_key = 'gone' WHERE key = OLD.key; RETURN NULL";
    for body in ["RETURN NULL", soft] {
        for two_messages in FORMS {
            let grant = place.hold("k");
            let trigger = Trigger::new(&place, LOCKS, "DELETE", body);
            says_what_is_in_the_way(LockBackend::release(
                &place.client,
                &grant.lock_id,
                &token(two_messages),
            ));
            assert_eq!(place.stored.row("k").unwrap().lock_id, grant.lock_id);
            drop(trigger);
            let released = LockBackend::release(&place.client, &grant.lock_id, &token(two_messages)).unwrap();
            assert_eq!(released, ReleaseOutcome::Released);
        }
    }
}

#[test]
fn an_acquire_whose_row_is_swallowed_is_an_error_and_not_contention() {
    let place = place();
    for two_messages in FORMS {
        let acquire = |key: &str| LockBackend::acquire(&place.client, key, TTL, &token(two_messages));
        let trigger = Trigger::new(&place, LOCKS, "INSERT", "RETURN NULL");
        says_what_is_in_the_way(acquire("new"));
        let options = LockOptions::new().timeout(Duration::from_secs(60));
        says_what_is_in_the_way(place.client.lock_with("new", &options));
        drop(trigger);
        assert_eq!(place.stored.counter("new"), None, "no fence is burnt");

        place.stored.write("over", &id("old"), -5_000, 3);
        for body in ["RETURN NULL", "RETURN OLD"] {
            let trigger = Trigger::new(&place, LOCKS, "UPDATE", body);
            says_what_is_in_the_way(acquire("over"));
            drop(trigger);
        }
        assert_eq!(place.stored.counter("over"), Some(3), "no fence is burnt");
    }
}

/// A row under another id is nobody's, for no guard could renew or release it; one under another key excludes nobody.
#[test]
fn a_grant_that_is_written_otherwise_is_an_error_and_leaves_nothing() {
    let place = place();
    let options = LockOptions::new().ttl(TTL).heartbeat(Heartbeat::Off);
    let other_id = "NEW.lock_id := 'other' || substr(NEW.lock_id, 6); RETURN NEW";
    let other_key = "NEW.key := 'other ' || NEW.key; RETURN NEW";
    place.client.read_lock_with("makes the table", &options).unwrap().release().unwrap();
    for (changed, over) in [(other_id, false), (other_key, false), (other_id, true), (other_key, true)] {
        let tag = format!("{} {over}", &changed[4..8]);
        let keys = ["plain", "one", "two", "shared"].map(|word| format!("{word} {tag}"));
        let [plain, one, two, shared] = &keys;
        let semaphore = place.client.semaphore(&format!("name {tag}"), 1).unwrap();
        for (n, key) in keys.iter().enumerate().filter(|_| over) {
            place.stored.write(key, &id(&format!("{n}-{}", &changed[4..7])), -5_000, 3);
        }
        let trigger = Trigger::new(&place, LOCKS, "INSERT OR UPDATE", changed);
        for two_messages in FORMS {
            let token = token(two_messages);
            says_what_is_in_the_way(LockBackend::acquire(&place.client, plain, TTL, &token));
        }
        says_what_is_in_the_way(place.client.try_lock_all_with(&[one, two], &options));
        says_what_is_in_the_way(semaphore.try_acquire_with(&options));
        says_what_is_in_the_way(place.client.try_read_lock_with(shared, &options));
        drop(trigger);
        let trigger = Trigger::new(&place, MEMBERS, "INSERT OR UPDATE", changed);
        says_what_is_in_the_way(place.client.try_read_lock_with(shared, &options));
        drop(trigger);
        for key in &keys {
            assert_eq!(place.stored.row(key).is_some(), over, "{key}");
        }
        let others = place.stored.one("SELECT count(*) FROM syncguard_locks WHERE key LIKE 'other %'", &[]);
        assert_eq!((others.get::<_, i64>(0), semaphore.in_use().unwrap()), (0, 0), "{tag}");
    }
}

#[test]
fn an_acquire_whose_counter_is_swallowed_is_an_error_that_does_not_call_it_exhausted() {
    let place = place();
    for two_messages in FORMS {
        let acquire = |key: &str| LockBackend::acquire(&place.client, key, TTL, &token(two_messages));
        let trigger = Trigger::new(&place, COUNTERS, "INSERT OR UPDATE", "RETURN NULL");
        says_what_is_in_the_way(acquire("new"));
        place.stored.write("over", &id("old"), -5_000, 3);
        says_what_is_in_the_way(acquire("over"));
        says_what_is_in_the_way(place.client.operator().break_lock("over", "a test"));
        drop(trigger);
        assert_eq!(place.stored.row("new"), None);
        assert_eq!(place.stored.row("over").unwrap().lock_id, id("old"));
    }
}

#[test]
fn a_counter_that_is_put_back_grants_no_fence_a_second_time() {
    let place = place();
    let (acquire, lock) = (
        |key: &str, form| LockBackend::acquire(&place.client, key, TTL, &token(form)),
        LockOptions::new().timeout(Duration::from_secs(60)),
    );
    for two_messages in FORMS {
        let first = place.hold("free");
        place.client.release(&first.lock_id).unwrap();
        place.stored.write("over", &id("old"), -5_000, 3);
        let held = place.hold("held");
        let trigger = Trigger::new(&place, COUNTERS, "UPDATE", "RETURN OLD");
        // No row, a row that is over, and one that an operator takes away.
        says_what_is_in_the_way(acquire("free", two_messages));
        says_what_is_in_the_way(place.client.lock_with("free", &lock));
        says_what_is_in_the_way(acquire("over", two_messages));
        says_what_is_in_the_way(place.client.operator().break_lock("held", "a test"));
        drop(trigger);
        assert_eq!(place.stored.row("free"), None);
        assert_eq!(place.stored.row("over").unwrap().lock_id, id("old"));
        assert_eq!(place.stored.row("held").unwrap().lock_id, held.lock_id);
        let next = acquire("free", two_messages).unwrap().acquired().expect("it is free");
        assert_eq!(next.fence.get(), first.fence.get() + 1);
        place.client.release(&next.lock_id).unwrap();
        place.client.release(&held.lock_id).unwrap();
    }
}

#[test]
fn an_attempt_that_cannot_confirm_its_own_row_is_an_error() {
    let place = place();
    place.stored.run(
        "CREATE TRIGGER redundant BEFORE UPDATE ON syncguard_locks \
         FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    );
    for two_messages in FORMS {
        let (key, lock_id) = (place.key(if two_messages { "two" } else { "one" }), id("mine"));
        let deadline = Clock::system().now().after(TTL);
        let attempt = || {
            let attempt = Attempt::new(&key, &lock_id, TTL, deadline);
            LockBackend::attempt(&place.client, &attempt, &token(two_messages))
        };
        assert!(attempt().unwrap().acquired().is_some());
        says_what_is_in_the_way(attempt());
        place.stored.remove(&key);
    }
}

#[test]
fn operators_are_told_what_was_not_taken_away() {
    let place = place();
    let grant = place.hold("k");
    place.stored.write("over", &id("old"), -60_000, 1);
    let trigger = Trigger::new(&place, LOCKS, "DELETE", "RETURN NULL");
    says_what_is_in_the_way(place.client.operator().break_lock("k", "a test"));
    assert_eq!(place.stored.counter("k"), Some(1), "a lock that was not broken keeps its fence");
    says_what_is_in_the_way(place.client.operator().cleanup_expired(10));
    drop(trigger);
    assert_eq!(place.client.operator().cleanup_expired(10).unwrap(), 1);
    assert_eq!(place.client.operator().break_lock("k", "a test").unwrap().fence.get(), grant.fence.get() + 1);
}

#[test]
fn an_extend_or_renewal_that_is_swallowed_is_an_error_and_the_lease_keeps_its_end() {
    let place = place();
    for body in ["RETURN NULL", "RETURN OLD"] {
        for two_messages in FORMS {
            let grant = place.hold("k");
            let before = place.stored.row("k");
            let trigger = Trigger::new(&place, LOCKS, "UPDATE", body);
            let longer = TTL * 2;
            says_what_is_in_the_way(LockBackend::extend(
                &place.client,
                &grant.lock_id,
                longer,
                &token(two_messages),
            ));
            let renewal = Renewal::new("k", &grant.lock_id, grant.fence, longer);
            let deadline = Clock::system().now().after(crate::support::LIMIT);
            let answer = LockBackend::renew(&place.client, &[renewal], deadline).remove(0);
            says_what_is_in_the_way(answer);
            drop(trigger);
            assert_eq!(place.stored.row("k"), before);
            place.client.release(&grant.lock_id).unwrap();
        }
    }
}

/// Where the group keeps its end and the member does not, a reader would trust a lease that a writer takes over.
#[test]
fn a_renewal_of_a_reader_that_is_swallowed_is_an_error_and_the_member_keeps_its_end() {
    let place = place();
    let options = LockOptions::new().ttl(TTL).heartbeat(Heartbeat::Off);
    let lease = place.client.read_lock_with("k", &options).unwrap().leak();
    let ends =
        "SELECT m.expires_at_ms, l.expires_at_ms FROM syncguard_members AS m CROSS JOIN syncguard_locks AS l";
    let ends = || {
        let row = place.stored.one(ends, &[]);
        (row.get::<_, i64>(0), row.get::<_, i64>(1))
    };
    let before = ends();
    for (table, body) in
        [(LOCKS, "RETURN NULL"), (LOCKS, "RETURN OLD"), (MEMBERS, "RETURN NULL"), (MEMBERS, "RETURN OLD")]
    {
        let trigger = Trigger::new(&place, table, "UPDATE", body);
        let renewal = Renewal::new("k", &lease.lock_id, lease.fence, TTL * 2).of_reader();
        let deadline = Clock::system().now().after(crate::support::LIMIT);
        let answer = LockBackend::renew(&place.client, &[renewal], deadline).remove(0);
        says_what_is_in_the_way(answer);
        drop(trigger);
        let (member, group) = ends();
        assert_eq!(member, before.0, "{table}, {body}");
        assert!(group == before.1 || table == MEMBERS, "{table}, {body}");
    }
}

/// Whoever was told of a grant has all of it, and whoever was not has burnt no fence.
#[test]
fn a_reader_of_whom_something_is_swallowed_is_an_error_and_leaves_nothing() {
    let place = place();
    place.client.read_lock("warm").unwrap().release().unwrap();
    let deadline = Clock::system().now().after(crate::support::LIMIT);
    for two_messages in FORMS {
        for (table, event, body, stands) in [
            (LOCKS, "INSERT", "RETURN NULL", "nothing"),
            (COUNTERS, "INSERT OR UPDATE", "RETURN NULL", "nothing"),
            (COUNTERS, "UPDATE", "RETURN OLD", "nothing"),
            (MEMBERS, "INSERT", "RETURN NULL", "nothing"),
            (LOCKS, "UPDATE", "RETURN OLD", "a group"),
            (MEMBERS, "INSERT", "RETURN NULL", "a group"),
            (MEMBERS, "UPDATE", "RETURN NULL", "a group"),
            (MEMBERS, "UPDATE", "RETURN OLD", "a group"),
            (LOCKS, "UPDATE", "RETURN NULL", "a dead lease"),
            (LOCKS, "UPDATE", "RETURN OLD", "a dead lease"),
            (COUNTERS, "UPDATE", "RETURN OLD", "a dead lease"),
        ] {
            place.stored.run("DELETE FROM syncguard_members; DELETE FROM syncguard_locks");
            place.client.read_lock("k").unwrap().release().unwrap();
            let lock_id = generate_shared_lock_id().unwrap();
            if stands == "a dead lease" {
                place.stored.write("k", &id("dead"), -5_000, 3);
            }
            if stands == "a group" {
                let options = LockOptions::new().ttl(TTL).heartbeat(Heartbeat::Off);
                let _ = place.client.read_lock_with("k", &options).unwrap().leak();
            }
            if event == "UPDATE" && table == MEMBERS {
                // Of an earlier group, as a late copy finds it.
                place.stored.run(&format!(
                    "INSERT INTO syncguard_members (lock_id, key, role, since_ms, expires_at_ms, fence) \
                     VALUES ('{lock_id}', 'k', 's', 0, 0, '000000000000000')"
                ));
            }
            let (row, counter) = (place.stored.row("k"), place.stored.counter("k"));
            let trigger = Trigger::new(&place, table, event, body);
            let attempt =
                SharedAttempt::new(Attempt::new("k", &lock_id, TTL * 100, deadline), Duration::ZERO);
            says_what_is_in_the_way(place.client.grant_shared(&attempt, &token(two_messages)));
            drop(trigger);
            assert_eq!(place.stored.row("k"), row, "{table}, {event}, {body}");
            assert_eq!(place.stored.counter("k"), counter, "{table}, {event}, {body}");
        }
    }
}

#[test]
fn the_release_of_a_reader_that_stays_is_an_error_unless_it_was_over() {
    let place = place();
    let options = LockOptions::new().ttl(TTL).heartbeat(Heartbeat::Off);
    let _other = place.client.read_lock_with("k", &options).unwrap();
    let lease = place.client.read_lock_with("k", &options).unwrap().leak();
    let trigger = Trigger::new(&place, MEMBERS, "DELETE", "RETURN NULL");
    for two_messages in FORMS {
        let release = || LockBackend::release(&place.client, &lease.lock_id, &token(two_messages));
        place.stored.run("UPDATE syncguard_members SET expires_at_ms = expires_at_ms + 1");
        says_what_is_in_the_way(release());
        let over =
            format!("UPDATE syncguard_members SET expires_at_ms = 0 WHERE lock_id = '{}'", lease.lock_id);
        place.stored.run(&over);
        assert_eq!(release().unwrap(), ReleaseOutcome::NotHeld(Some(Reason::Expired)));
        place.stored.run(&over.replace("= 0", "= 9000000000000"));
    }
    drop(trigger);
}

#[test]
fn the_release_of_the_last_reader_is_an_error_where_the_group_stays() {
    let place = place();
    let options = LockOptions::new().ttl(TTL).heartbeat(Heartbeat::Off);
    let lease = place.client.read_lock_with("k", &options).unwrap().leak();
    let trigger = Trigger::new(&place, LOCKS, "DELETE", "RETURN NULL");
    for two_messages in FORMS {
        let answer = LockBackend::release(&place.client, &lease.lock_id, &token(two_messages));
        says_what_is_in_the_way(answer);
    }
    drop(trigger);
    let answer = LockBackend::release(&place.client, &lease.lock_id, &token(false)).unwrap();
    assert_eq!(answer, ReleaseOutcome::Released);
    assert!(place.stored.row("k").is_none());
}
