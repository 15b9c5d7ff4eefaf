//! Rows of others that differ in one thing: by what a reader joins, leaves and ends its group.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod joining;

use std::time::Duration;

use postgres::SimpleQueryMessage;
use syncguard::backend::{Attempt, Clock, Label, ReleaseOutcome, SharedAttempt, generate_shared_lock_id};
use syncguard::{Acquired, CancelToken, Heartbeat, LockBackend, LockOptions, PgLockClient, Result};

use crate::support::calls::{FORMS, ms, token};
use crate::support::{Action, Call, LIMIT, NOW, Place, Proxy, Scripted, TTL, id, place, unique};

/// A fence that no group here has.
const ANOTHER: &str = "000000000000099";

fn reader(client: &PgLockClient, key: &str, ttl: Duration) -> Acquired {
    client.read_lock_with(key, &LockOptions::new().ttl(ttl).heartbeat(Heartbeat::Off)).unwrap().leak()
}

/// A member, as somebody else may have written it.
fn write(place: &Place, (lock_id, key, role): (&str, &str, &str), ends_in_ms: i64, fence: &str) {
    let sql = format!(
        "INSERT INTO syncguard_members (lock_id, key, role, since_ms, expires_at_ms, fence) \
         VALUES ($1, $2, $3, {NOW} - 60000, {NOW} + $4, $5)"
    );
    place.stored.client().execute(&sql, &[&lock_id, &key, &role, &ends_in_ms, &fence]).unwrap();
}

fn is_there(place: &Place, lock_id: &str) -> bool {
    place
        .stored
        .one("SELECT count(*) FROM syncguard_members WHERE lock_id = $1", &[&lock_id])
        .get::<_, i64>(0)
        > 0
}

fn end(place: &Place, table: &str, lock_id: &str) -> i64 {
    let sql = format!("SELECT expires_at_ms FROM {table} WHERE lock_id = $1");
    place.stored.one(&sql, &[&lock_id]).get(0)
}

fn leave(place: &Place, key: &str, lock_id: &str) -> Result<ReleaseOutcome> {
    place.client.release_shared(key, lock_id, Clock::system().now().after(LIMIT))
}

fn clean(place: &Place) {
    place.stored.run("DELETE FROM syncguard_members; DELETE FROM syncguard_locks");
}

#[test]
fn a_group_ends_with_its_last_live_member_whatever_rows_are_beside_it() {
    let place = place();
    let key = place.key("prices");
    for two in FORMS {
        let lease = reader(&place.client, &key, TTL);
        let (fence, other) = (lease.fence.to_string(), place.key("other"));
        let rows: [(&str, &str, &str, i64, &str); 5] = [
            ("another-key", &other, "s", 60_000, &fence),
            ("note", &key, "n", 60_000, &fence),
            ("ticket", &key, "w", 60_000, &fence),
            ("another-group", &key, "s", 60_000, ANOTHER),
            ("over", &key, "s", -1_000, &fence),
        ];
        for (word, key, role, ends_in_ms, fence) in rows {
            write(&place, (&id(word), key, role), ends_in_ms, fence);
        }
        // Until the tolerance is over, too.
        place.wait_for(end(&place, "syncguard_members", &id("over")) + 1_000);
        let left = LockBackend::release(&place.client, &lease.lock_id, &token(two)).unwrap();
        assert_eq!(left, ReleaseOutcome::Released);
        assert!(place.stored.row(&key).is_none(), "nobody is left");
        for (word, ..) in rows.iter().take(4) {
            assert!(is_there(&place, &id(word)), "{word}");
        }
        clean(&place);
    }
}

#[test]
fn a_group_goes_on_until_its_last_member_ends_and_those_long_over_go() {
    let place = place();
    let key = place.key("prices");
    let lease = reader(&place.client, &key, Duration::from_secs(3_600));
    let (fence, other) = (lease.fence.to_string(), place.key("other"));
    let rows: [(&str, &str, &str, i64, bool); 6] = [
        ("next", &key, "s", 40_000, true),
        ("last", &key, "s", 60_000, true),
        ("dead", &key, "s", -60_000, false),
        ("dead-elsewhere", &other, "s", -60_000, true),
        ("dead-ticket", &key, "w", -60_000, true),
        ("dead-note", &key, "n", -60_000, true),
    ];
    for (word, key, role, ends_in_ms, _) in rows {
        write(&place, (&id(word), key, role), ends_in_ms, &fence);
    }
    assert_eq!(leave(&place, &key, &lease.lock_id).unwrap(), ReleaseOutcome::Released);
    assert!(!is_there(&place, &lease.lock_id));
    let group = place.stored.row(&key).unwrap();
    assert_eq!(group.expires_at_ms, end(&place, "syncguard_members", &id("last")));
    for (word, .., stays) in rows {
        assert_eq!(is_there(&place, &id(word)), stays, "{word}");
    }
    // It ends a little later than its last member, and is left alone.
    place.stored.run("UPDATE syncguard_locks SET expires_at_ms = expires_at_ms + 900");
    assert_eq!(leave(&place, &key, &id("next")).unwrap(), ReleaseOutcome::Released);
    assert_eq!(place.stored.row(&key).unwrap().expires_at_ms, group.expires_at_ms + 900);
}

#[test]
fn who_is_no_reader_of_the_key_leaves_nothing() {
    let place = place();
    let key = place.key("prices");
    for change in ["key = 'x'", "role = 'n'", "role = 'w'"] {
        let (lease, other) = (reader(&place.client, &key, TTL), reader(&place.client, &key, TTL));
        for alone in [false, true] {
            if alone {
                leave(&place, &key, &other.lock_id).unwrap();
            }
            place
                .stored
                .run(&format!("UPDATE syncguard_members SET {change} WHERE lock_id = '{}'", lease.lock_id));
            if alone && place.stored.row(&key).is_none() {
                continue;
            }
            let before = place.stored.row(&key);
            let answer = leave(&place, &key, &lease.lock_id).unwrap();
            assert!(matches!(answer, ReleaseOutcome::NotHeld(_)), "{change}: {answer:?}");
            assert!(is_there(&place, &lease.lock_id), "{change}");
            assert_eq!(place.stored.row(&key), before, "{change}");
        }
        clean(&place);
    }
}

/// A late copy of a join, or whatever else, makes the member another one while its leave waits for the row.
#[test]
fn a_leave_deletes_no_member_that_has_become_another_one() {
    let place = place();
    let key = place.key("prices");
    for change in ["fence = '000000000000099'", "key = 'x'", "role = 'n'"] {
        let lease = reader(&place.client, &key, TTL);
        place.stored.run("DELETE FROM syncguard_locks");
        let mut copy = place.schema.client();
        let mut copy = copy.transaction().unwrap();
        copy.batch_execute(&format!("UPDATE syncguard_members SET {change}")).unwrap();
        let application = unique();
        let call = {
            let (client, key, id) = (place.named(&application), key.clone(), lease.lock_id.clone());
            Call::start(&application, move || {
                client.release_shared(&key, &id, Clock::system().now().after(LIMIT))
            })
        };
        call.wait_until_blocked(&place.stored);
        copy.commit().unwrap();
        call.join().unwrap();
        assert!(is_there(&place, &lease.lock_id), "{change}");
        clean(&place);
    }
}

/// What was not there to be locked when the leave looked for it, and is there when it decides.
#[test]
fn a_leave_whose_group_comes_after_it_was_looked_for_decides_once_more() {
    let place = place();
    let key = place.key("prices");
    let proxy = Proxy::start(crate::support::server().port());
    let client = PgLockClient::builder().max_connections(1).connect(&proxy.url(&place.schema.url())).unwrap();
    let mine = reader(&client, &place.key("warm"), TTL);
    LockBackend::release(&client, &mine.lock_id, &token(true)).unwrap();
    for alone in [true, false] {
        let mine = reader(&client, &key, Duration::from_secs(3_600));
        let other = (!alone).then(|| reader(&place.client, &key, TTL));
        let mut sql = place.schema.client();
        let (from, to) = (key.clone(), place.key("away"));
        let mut seen = 0;
        proxy.on_query(move |said| {
            let mut rename = |from: &str, to: &str| {
                let rename = "UPDATE syncguard_locks SET key = $2 WHERE key = $1";
                assert_eq!(sql.execute(rename, &[&from, &to]).unwrap(), 1);
            };
            if seen == 0 && said.contains("sg_hold_group") {
                rename(&from, &to);
                seen = 1;
            } else if seen == 1 && said.contains("sg_leave") {
                rename(&to, &from);
                seen = 2;
            }
            Action::Pass
        });
        let left = LockBackend::release(&client, &mine.lock_id, &token(true)).unwrap();
        proxy.pass_all();
        assert_eq!(left, ReleaseOutcome::Released);
        let ends = other.map(|other| end(&place, "syncguard_members", &other.lock_id));
        assert_eq!(place.stored.row(&key).map(|row| row.expires_at_ms), ends);
    }
}

/// The statements themselves, in a transaction that has more rows locked than it should.
struct Alone {
    sql: Scripted,
    group: String,
    reader: Acquired,
}

impl Alone {
    fn new(place: &Place) -> Self {
        let mut group = String::new();
        let mut lease = None;
        let sql = Scripted::after(&place.schema, |client| {
            lease = Some(reader(client, "k", TTL));
            group = place.stored.row("k").unwrap().lock_id;
        });
        Self { sql, group, reader: lease.unwrap() }
    }

    /// Executes one of them after these others, and commits.
    fn run(&mut self, place: &Place, lock: bool, what: &str) -> Result<(), postgres::Error> {
        let lock = if lock { "SELECT FROM syncguard_locks FOR UPDATE;" } else { "" };
        let schema = place.schema.name();
        let all = if what == "leave" { format!(",'{}'", self.reader.lock_id) } else { String::new() };
        let call = format!(
            "BEGIN; SET LOCAL search_path TO {schema}; {lock} EXECUTE {}('k','{}'{all}); COMMIT",
            self.sql.name(what),
            self.group
        );
        let answer = self.sql.client().simple_query(&call);
        if answer.is_err() {
            self.sql.run("ROLLBACK");
        }
        answer.map(|messages: Vec<SimpleQueryMessage>| drop(messages))
    }
}

#[test]
fn a_leave_ends_only_the_group_of_its_key_though_others_are_locked() {
    for change in ["key = 'x'", "lock_id = 'BBBBBBBBBBBBBBBBBBBBBA'", "fence = '000000000000099'"] {
        let place = place();
        let mut alone = Alone::new(&place);
        place.stored.run(&format!("UPDATE syncguard_locks SET {change}"));
        alone.run(&place, true, "leave").unwrap();
        assert!(!is_there(&place, &alone.reader.lock_id), "{change}: the member goes");
        let left: i64 = place.stored.one("SELECT count(*) FROM syncguard_locks", &[]).get(0);
        assert_eq!(left, 1, "{change}");
    }
    // Its own is not ended either unless it is locked, as somebody may have joined it.
    let place = place();
    let mut alone = Alone::new(&place);
    assert!(alone.run(&place, false, "leave").is_err());
    assert!(is_there(&place, &alone.reader.lock_id) && place.stored.row("k").is_some());
}

#[test]
fn a_group_is_trimmed_to_its_last_member_and_no_other_row_is() {
    let place = place();
    let mut alone = Alone::new(&place);
    let (lock_id, fence) = (alone.reader.lock_id.clone(), alone.reader.fence.to_string());
    write(&place, (&id("another-key"), "x", "s"), 600_000, &fence);
    write(&place, (&id("note"), "k", "n"), 600_000, &fence);
    write(&place, (&id("ticket"), "k", "w"), 600_000, &fence);
    write(&place, (&id("another-group"), "k", "s"), 600_000, ANOTHER);
    let last = end(&place, "syncguard_members", &lock_id);
    let mut trim = |lock: bool, change: &str| {
        place.stored.run(&format!("UPDATE syncguard_locks SET {change}"));
        let ends = "SELECT expires_at_ms FROM syncguard_locks";
        let before: i64 = place.stored.one(ends, &[]).get(0);
        alone.run(&place, lock, "trim_group").unwrap();
        (before, place.stored.one(ends, &[]).get::<_, i64>(0))
    };
    let much_later = format!("expires_at_ms = {last} + 3600000");
    assert_eq!(trim(true, &much_later).1, last);
    for (what, lock, change) in [
        ("what is not locked", false, much_later.clone()),
        ("what ends a little later", true, format!("expires_at_ms = {last} + 900")),
        ("what ends earlier", true, format!("expires_at_ms = {last} - 5000")),
        ("another lease of the key", true, format!("lock_id = 'BBBBBBBBBBBBBBBBBBBBBA', {much_later}")),
        ("another key's", true, format!("key = 'x', {much_later}")),
    ] {
        let group = place.stored.row("k").unwrap().lock_id;
        let (before, after) = trim(lock, &change);
        assert_eq!(after, before, "{what}");
        place.stored.run(&format!("UPDATE syncguard_locks SET key = 'k', lock_id = '{group}'"));
    }
}
