//! Rows of others that differ in one thing, and what is not said: whoever asks is shown neither.

use super::*;

/// A fence that no group here has.
const ANOTHER: &str = "000000000000099";

/// A member with an owner, or without one, that ends then.
fn write(
    place: &Place,
    (word, key, role): (&str, &str, &str),
    fence: &str,
    ends_in_ms: i64,
    owner: Option<&str>,
) {
    let sql = format!(
        "INSERT INTO syncguard_members (lock_id, key, role, since_ms, expires_at_ms, fence, owner) \
         VALUES ($1, $2, $3, {NOW} - 60000, {NOW} + $4, $5, $6)"
    );
    let row: [&(dyn postgres::types::ToSql + Sync); 6] =
        [&id(word), &key, &role, &ends_in_ms, &fence, &owner];
    place.stored.client().execute(&sql, &row).unwrap();
}

#[test]
fn readers_are_counted_and_named_by_the_live_members_of_their_group_alone() {
    let place = place();
    let key = place.key("prices");
    let quiet = LockOptions::new().heartbeat(Heartbeat::Off).ttl(ms(20_000));
    let seen = place.client.read_lock_with(&key, &quiet).unwrap();
    let fence = seen.fence().to_string();
    let other = place.key("other");
    let all: [(&str, &str, &str, &str, i64); 5] = [
        ("another-key", &other, "s", &fence, 60_000),
        ("note", &key, "n", &fence, 60_000),
        ("ticket", &key, "w", &fence, 60_000),
        ("another-group", &key, "s", ANOTHER, 60_000),
        ("over", &key, "s", &fence, -5_000),
    ];
    for (word, key, role, fence, ends) in all {
        write(&place, (word, key, role), fence, ends, Some("a stranger"));
    }
    let named = |whom: &str| {
        let text = timed_out(&place.named("writer"), &key).to_string();
        assert!(text.contains(&format!("it is shared by readers{whom} under fencing token")), "{text}");
    };
    let by_key = || place.client.get_by_key(&key).unwrap().unwrap();
    assert_eq!((by_key().readers, said(&by_key())), (Some(1), (None, None)));
    named("");
    // One that says something, then one that ends later, then one that ends later and says nothing.
    write(&place, ("first", &key, "s"), &fence, 30_000, Some("the first"));
    named(", the last of them the first,");
    write(&place, ("second", &key, "s"), &fence, 40_000, Some("the second"));
    write(&place, ("third", &key, "s"), &fence, 50_000, None);
    named(", the last of them the second,");
    assert_eq!(by_key().readers, Some(4));
    // A note without an owner is as good.
    let noted = format!(
        "UPDATE syncguard_members SET note = 'invoices', expires_at_ms = expires_at_ms + 9000 WHERE lock_id = '{}'",
        id("third")
    );
    place.stored.run(&noted);
    named(", the last of them somebody (invoices),");
}

#[test]
fn an_id_is_a_readers_only_as_a_member_of_the_group_that_stands() {
    let place = place();
    let key = place.key("prices");
    let quiet = LockOptions::new().heartbeat(Heartbeat::Off).ttl(ms(20_000));
    for (change, found) in [
        ("UPDATE syncguard_members SET role = role", true),
        ("UPDATE syncguard_members SET role = 'n'", false),
        (&format!("UPDATE syncguard_members SET fence = '{ANOTHER}'"), false),
        ("UPDATE syncguard_members SET key = 'other'", false),
        ("UPDATE syncguard_locks SET lock_id = 'BBBBBBBBBBBBBBBBBBBBBA'", false),
    ] {
        place.stored.run("DELETE FROM syncguard_locks");
        if place.stored.one("SELECT to_regclass('syncguard_members') IS NOT NULL", &[]).get(0) {
            place.stored.run("DELETE FROM syncguard_members");
        }
        let reader = place.client.read_lock_with(&key, &quiet).unwrap().leak();
        place.stored.run(change);
        let shown = place.client.get_by_id(&reader.lock_id).unwrap();
        assert_eq!(shown.is_some(), found, "{change}");
        assert!(place.client.is_locked(&key).unwrap(), "{change}");
    }
}

#[test]
fn what_is_not_said_is_shown_of_no_kind_of_lease() {
    let place = place();
    let quiet = LockOptions::new().heartbeat(Heartbeat::Off);
    let clients = [(owned(&place), quiet.clone(), (Some(OWNER), None))];
    let silent = (place.client.clone(), quiet.note("invoices"), (None, Some("invoices")));
    for (n, (client, options, expected)) in clients.into_iter().chain([silent]).enumerate() {
        let shown = |what: &str| {
            for one in place.client.operator().holders(10).unwrap() {
                assert_eq!(said(&one), expected, "{what}");
            }
        };
        for over in [false, true] {
            let name = |word: &str| {
                let key = place.key(&format!("{word} {n} {over}"));
                if over && word != "readers" {
                    place.stored.write(&key, &id(&format!("{word}{n}")), -5_000, 3);
                }
                key
            };
            let guard = client.lock_with(&name("lock"), &options).unwrap();
            shown("a lock");
            drop(guard);
            let set = client.lock_all_with(&[&name("a"), &name("b")], &options).unwrap();
            shown("a set");
            drop(set);
            let permit = client.semaphore(&name("permits"), 2).unwrap().acquire_with(&options).unwrap();
            shown("a permit");
            drop(permit);
            let reader = client.read_lock_with(&name("readers"), &options).unwrap();
            shown("a reader");
            drop(reader);
            let ran = client.run_once(&name("run"), Slot::number(1), &options, |_run| {
                shown("a run");
                Ok::<_, String>(())
            });
            assert_eq!(ran.unwrap(), RunOnce::Done(()));
        }
    }
}
