//! Who joins, and past whom.

use super::*;

/// One attempt to read, of somebody who has waited for five seconds.
fn join(place: &Place, key: &str, lock_id: &str, two: bool) -> Result<Option<Acquired>> {
    let attempt = Attempt::new(key, lock_id, TTL, Clock::system().now().after(LIMIT));
    let token = if two { CancelToken::new() } else { CancelToken::never() };
    let attempt = SharedAttempt::new(attempt, ms(5_000));
    Ok(place.client.grant_shared(&attempt, &token)?.map(|grant| grant.acquired))
}

fn reader_id() -> String {
    generate_shared_lock_id().unwrap()
}

/// A row of whoever waits; the call, again until it was made while that is live.
fn beside<T>(place: &Place, row: (&str, &str, i64, i64), mut call: impl FnMut() -> T) -> T {
    let (key, role, age_ms, lasts_ms) = row;
    loop {
        let sql = format!(
            "INSERT INTO syncguard_members (lock_id, key, role, since_ms, expires_at_ms) \
             VALUES ('waits', $1, $2, {NOW} - $3, {NOW} + $4) RETURNING expires_at_ms"
        );
        let ends: i64 = place.stored.one(&sql, &[&key, &role, &age_ms, &lasts_ms]).get(0);
        let answer = call();
        let now = place.stored.now_ms();
        place.stored.run("DELETE FROM syncguard_members WHERE lock_id = 'waits'");
        if lasts_ms <= 0 || now < ends {
            return answer;
        }
    }
}

#[test]
fn a_reader_yields_to_a_writer_that_has_waited_longer_for_this_key() {
    let place = place();
    let (key, other) = (place.key("prices"), place.key("other"));
    reader(&place.client, &other, TTL);
    for (what, key_of_row, role, age_ms, lasts_ms, yields) in [
        ("an older writer", &key, "w", 3_600_000, 4_500, true),
        ("one that came later", &key, "w", 0, 4_500, false),
        ("one that waits for another key", &other, "w", 3_600_000, 4_500, false),
        ("a reader", &key, "s", 3_600_000, 4_500, false),
        ("a note", &key, "n", 3_600_000, 4_500, false),
        ("one that is over", &key, "w", 3_600_000, 0, false),
        ("one that lasts for too long", &key, "w", 3_600_000, 3_600_000, false),
    ] {
        for two in FORMS {
            for stands in ["nothing", "a group", "a dead row"] {
                place.stored.run(&format!(
                    "DELETE FROM syncguard_locks WHERE key = '{key}'; DELETE FROM syncguard_members WHERE key = '{key}'"
                ));
                match stands {
                    "a group" => drop(reader(&place.client, &key, TTL)),
                    "a dead row" => place.stored.write(&key, &id("over"), -5_000, 3),
                    _ => place.stored.run("DELETE FROM syncguard_fence_counters"),
                }
                let row = (key_of_row.as_str(), role, age_ms, lasts_ms);
                let joined = beside(&place, row, || join(&place, &key, &reader_id(), two).unwrap());
                assert_eq!(joined.is_none(), yields, "{what}, {stands}, {two}");
            }
        }
    }
}

/// Who asks again, when a writer waits: only a reader that is there already does not yield.
#[test]
fn only_who_is_a_member_of_the_group_that_stands_joins_past_a_writer_that_waits() {
    let place = place();
    let (key, other) = (place.key("prices"), place.key("other"));
    let waits = (key.as_str(), "w", 3_600_000, 4_500);
    reader(&place.client, &other, TTL);
    for (what, change, joins) in [
        ("itself", String::new(), true),
        ("another id", "UPDATE syncguard_members SET lock_id = 'another'".to_owned(), false),
        ("another key", format!("UPDATE syncguard_members SET key = '{other}'"), false),
        ("a note", "UPDATE syncguard_members SET role = 'n'".to_owned(), false),
        ("another group", format!("UPDATE syncguard_members SET fence = '{ANOTHER}'"), false),
        ("a group of another key", format!("UPDATE syncguard_locks SET key = '{other}'"), false),
        (
            "another lease",
            "UPDATE syncguard_locks SET lock_id = 'BBBBBBBBBBBBBBBBBBBBBA', expires_at_ms = 0".to_owned(),
            false,
        ),
    ] {
        clean(&place);
        let lease = reader(&place.client, &key, TTL);
        if !change.is_empty() {
            place.stored.run(&change);
        }
        let joined = beside(&place, waits, || join(&place, &key, &lease.lock_id, true).unwrap());
        assert_eq!(joined.map(|joined| joined.fence), joins.then_some(lease.fence), "{what}");
    }
}

#[test]
fn who_joins_again_keeps_its_lease_as_it_was_unless_it_is_over_or_another_groups() {
    let place = place();
    let key = place.key("prices");
    let times = |lock_id: &str| {
        let sql = "SELECT since_ms, expires_at_ms, fence FROM syncguard_members WHERE lock_id = $1";
        let row = place.stored.one(sql, &[&lock_id]);
        (row.get::<_, i64>(0), row.get::<_, i64>(1), row.get::<_, String>(2))
    };
    let other = reader(&place.client, &key, Duration::from_secs(3_600));
    for two in FORMS {
        for (what, fence, ends_in_ms, stays) in [
            ("its own", other.fence.to_string(), 20_000, true),
            ("one that is over", other.fence.to_string(), -5_000, false),
            ("one of another group", ANOTHER.to_owned(), 20_000, false),
        ] {
            let lock_id = reader_id();
            write(&place, (&lock_id, &key, "s"), ends_in_ms, &fence);
            let (before, counter) = (times(&lock_id), place.stored.counter(&key));
            let joined = join(&place, &key, &lock_id, two).unwrap().expect("readers have the key");
            let after = times(&lock_id);
            assert_eq!(place.stored.counter(&key), counter, "the fence of the group is the newest");
            assert_eq!(after == before, stays, "{what}, {two}: {after:?}");
            assert_eq!((joined.fence, joined.expires_at_ms), (other.fence, after.1), "{what}, {two}");
            assert!(stays || after.0 > before.0 && after.1 > before.1, "{what}, {two}: {after:?}");
        }
    }
}

#[test]
fn an_id_that_is_another_members_joins_nothing() {
    let place = place();
    let (key, other) = (place.key("prices"), place.key("other"));
    reader(&place.client, &other, TTL);
    for two in FORMS {
        for stands in [false, true] {
            for (key_of_row, role) in [(&other, "s"), (&key, "w"), (&key, "n")] {
                clean(&place);
                if stands {
                    reader(&place.client, &key, TTL);
                } else {
                    reader(&place.client, &other, TTL);
                }
                let lock_id = reader_id();
                write(&place, (&lock_id, key_of_row, role), 0, ANOTHER);
                let before = end(&place, "syncguard_members", &lock_id);
                let counter = place.stored.counter(&key);
                let joined = join(&place, &key, &lock_id, two);
                assert!(!matches!(joined, Ok(Some(_))), "{key_of_row}, {role}: {joined:?}");
                assert_eq!(end(&place, "syncguard_members", &lock_id), before);
                assert_eq!(place.stored.counter(&key), counter, "no fence is burnt");
                assert_eq!(place.stored.row(&key).is_some(), stands);
            }
        }
    }
}

#[test]
fn a_group_over_a_dead_row_ends_the_members_of_earlier_groups_and_nobody_elses() {
    let place = place();
    let (key, other) = (place.key("prices"), place.key("other"));
    reader(&place.client, &key, TTL);
    let group = place.stored.row(&key).unwrap().lock_id;
    for two in FORMS {
        for dead in [&id("over"), &group] {
            place.stored.run("DELETE FROM syncguard_members");
            place.stored.write(&key, dead, -5_000, 7);
            let mine = reader_id();
            for (word, key, role) in [
                (&*mine, &key, "s"),
                ("earlier", &key, "s"),
                ("elsewhere", &other, "s"),
                ("note", &key, "n"),
                ("ticket", &key, "w"),
            ] {
                write(&place, (word, key, role), -5_000, "000000000000007");
            }
            let joined = join(&place, &key, &mine, two).unwrap().expect("a dead lease keeps nobody out");
            assert_eq!(joined.fence.get(), 8);
            let left = [&*mine, "earlier", "elsewhere", "note", "ticket"].map(|word| is_there(&place, word));
            assert_eq!(left, [true, false, true, true, true], "{two}");
            // Who joins it ends nobody.
            write(&place, ("earlier", &key, "s"), -5_000, "000000000000007");
            join(&place, &key, &reader_id(), two).unwrap().expect("readers have the key");
            assert!(is_there(&place, "earlier"), "{two}");
        }
    }
}

#[test]
fn a_reader_is_told_of_in_its_own_words() {
    let place = place();
    let key = place.key("prices");
    for two in FORMS {
        for (owner, note) in [(Some("me"), None), (None, Some("why")), (None, None)] {
            let lock_id = reader_id();
            let attempt = Attempt::new(&key, &lock_id, TTL, Clock::system().now().after(LIMIT));
            let attempt = SharedAttempt::new(attempt.with_label(Label::new(owner, note)), ms(0));
            place.client.grant_shared(&attempt, &token(two)).unwrap().expect("readers share it");
            let said = "SELECT owner, note FROM syncguard_members WHERE lock_id = $1";
            let said = place.stored.one(said, &[&lock_id]);
            let said: (Option<String>, Option<String>) = (said.get(0), said.get(1));
            assert_eq!(said, (owner.map(str::to_owned), note.map(str::to_owned)), "{two}");
        }
    }
}

/// A fenced transaction has the counter for as long as it likes.
#[test]
fn a_reader_that_would_be_the_first_does_not_wait_for_the_counter() {
    let place = place();
    let key = place.key("prices");
    reader(&place.client, &place.key("warm"), TTL);
    let mut busy = place.schema.client();
    for dead in [false, true] {
        place.stored.set_counter(&key, 3);
        if dead {
            place.stored.write(&key, &id("over"), -5_000, 3);
        }
        busy.batch_execute("BEGIN; SELECT FROM syncguard_fence_counters FOR SHARE").unwrap();
        for two in FORMS {
            let name = unique();
            let (client, key) = (place.named(&name), key.clone());
            let call = Call::start(&name, move || {
                let lock_id = reader_id();
                let attempt = Attempt::new(&key, &lock_id, TTL, Clock::system().now().after(LIMIT));
                client.grant_shared(&SharedAttempt::new(attempt, ms(0)), &token(two)).unwrap().is_some()
            });
            assert!(!call.settle(&place.stored), "it waits: {dead}, {two}");
            assert!(!call.join(), "{dead}, {two}");
        }
        busy.batch_execute("ROLLBACK").unwrap();
    }
}

/// The last reader leaves while the next one comes.
#[test]
fn a_reader_that_waited_for_a_group_that_ended_makes_the_next_one() {
    let place = place();
    let key = place.key("prices");
    let first = reader(&place.client, &key, TTL);
    let mut leaves = place.schema.client();
    leaves.batch_execute("BEGIN; DELETE FROM syncguard_locks").unwrap();
    let name = unique();
    let (client, named) = (place.named(&name), key.clone());
    let call = Call::start(&name, move || {
        let lock_id = reader_id();
        let attempt = Attempt::new(&named, &lock_id, TTL, Clock::system().now().after(LIMIT));
        client.grant_shared(&SharedAttempt::new(attempt, ms(0)), &CancelToken::never()).unwrap()
    });
    call.wait_until_blocked(&place.stored);
    leaves.batch_execute("COMMIT").unwrap();
    assert!(call.join().expect("nobody has the key").acquired.fence > first.fence);
}
