//! Notes that mean no good, and a table of members that is taken away while it is used.

use super::*;
use crate::support::together;
use syncguard::CancelToken;
use syncguard::LockBackend;
use syncguard::backend::{Attempt, AttemptAll, GrantAll, Label, generate_lock_id};

#[test]
fn an_owner_or_a_note_that_cannot_be_kept_is_refused_at_the_door() {
    // Nobody listens there.
    let url = "postgresql://nobody@127.0.0.1:1/nothing";
    let client = PgLockClient::builder().auto_create_tables(false).connect(url).unwrap();
    for bad in ["x".repeat(1025), "\u{e9}".repeat(513), "a\0b".to_owned()] {
        let error =
            PgLockClient::builder().owner(bad.as_str()).auto_create_tables(false).connect(url).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
        let options = LockOptions::new().note(bad.as_str());
        for error in [
            client.lock_with("k", &options).unwrap_err(),
            client.try_lock_all_with(&["k"], &options).unwrap_err(),
            client.read_lock_with("k", &options).unwrap_err(),
            client.semaphore("k", 1).unwrap().try_acquire_with(&options).unwrap_err(),
            client.run_once("k", Slot::number(1), &options, |_| Ok::<_, String>(())).unwrap_err(),
        ] {
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
            assert!(error.to_string().contains("the note"), "{error}");
        }
    }
}

#[test]
fn notes_of_any_characters_come_back_as_they_were_and_stay_on_their_line() {
    let place = place();
    let key = place.key("report");
    let wide = "\u{1f512}".repeat(256);
    for note in [
        "x".repeat(1024).as_str(),
        wide.as_str(),
        "one\ntwo\r\n\tthree",
        "\u{1b}]0;title\u{7}\u{1b}[31mred\u{1b}[0m",
        "'; DROP TABLE syncguard_locks; --",
        "\\' \\\\ $1 $$ %s {} \"",
        "\u{202e}txet\u{202c} \u{85} \u{2028}",
        "e\u{301}", // no normal form
    ] {
        let client = PgLockClient::builder().owner(note).connect(&place.schema.url()).unwrap();
        let options = LockOptions::new().note(note);
        // The second time by the driver's own statements, which are called often.
        for round in 0..20 {
            let guard = client.lock_with(&key, &options).unwrap();
            if round % 19 == 0 {
                assert_eq!(said(&holder(&place.client)), (Some(note), Some(note)));
            }
            guard.release().unwrap();
        }
        let guard = client.lock_with(&key, &options).unwrap();
        let text = timed_out(&place.client, &key).to_string();
        assert!(!text.chars().any(char::is_control) && !text.contains('\u{202e}'), "{text:?}");
        assert!(text.contains("held by "), "{text}");
        guard.release().unwrap();
    }
    assert_eq!(members(&place), 0);
}

#[test]
fn what_somebody_else_wrote_into_the_table_is_cut() {
    let place = place();
    let (client, key) = (owned(&place), place.key("report"));
    let _guard = client.lock(&key).unwrap();
    place
        .stored
        .run("UPDATE syncguard_members SET owner = repeat('x', 1000000), note = repeat('y', 1000000)");
    let shown = holder(&place.client);
    assert_eq!(said(&shown), (Some(&*"x".repeat(1024)), Some(&*"y".repeat(1024))));
    assert!(timed_out(&place.client, &key).to_string().len() < 3000);
}

#[test]
fn a_right_or_the_table_that_is_taken_away_ends_grants_and_no_release() {
    let place = place();
    let key = place.key("report");
    let _ = owned(&place);
    let role = Role::with_tables(&place.schema);
    let client = role.connect(builder()).unwrap();
    let in_two = client.cancellable(&token(true));
    let forms = [&client, &in_two];
    let grants = |right: &str| {
        let name = role.name();
        format!("GRANT {right} ON syncguard_members TO {name}")
    };
    for right in ["SELECT", "INSERT", "UPDATE", "DELETE", "SELECT, INSERT, UPDATE, DELETE"] {
        for form in forms {
            let guard = form.lock_with(&key, &noted()).unwrap();
            let set = form.lock_all_with(&[place.key("a"), place.key("b")], &noted()).unwrap();
            let permit = form.semaphore(&key, 1).unwrap().acquire_with(&noted()).unwrap();
            let ran = form.run_once(&place.key("run"), Slot::every(ms(1)), &noted(), |run| {
                place.stored.run(&format!("REVOKE {right} ON syncguard_members FROM {}", role.name()));
                assert!(run.is_held());
                Ok::<_, String>(())
            });
            assert_eq!(ran.unwrap(), RunOnce::Done(()), "{right}");
            assert_eq!(guard.release().unwrap(), ReleaseResult::Released, "{right}");
            assert_eq!(set.release().unwrap(), ReleaseResult::Released, "{right}");
            assert_eq!(permit.release().unwrap(), ReleaseResult::Released, "{right}");
            let error = form.lock_with(&key, &noted()).unwrap_err();
            assert_eq!(error.code(), ErrorCode::AuthFailed, "{right}: {error:?}");
            assert_eq!(place.stored.row(&key), None, "{right}: nothing was granted without its note");
            assert_eq!(
                place
                    .client
                    .try_lock(&key)
                    .unwrap()
                    .map(|guard| guard.fence() > syncguard::Fence::new(1).unwrap()),
                Some(true)
            );
            assert!(client.operator().cleanup_expired(10).is_ok(), "{right}");
            place.stored.run(&grants(right));
            place.stored.run("DELETE FROM syncguard_members");
        }
    }
    for form in forms {
        let guard = form.lock_with(&key, &noted()).unwrap();
        place.stored.run("ALTER TABLE syncguard_members RENAME TO hidden");
        assert!(timed_out(&place.client, &key).to_string().contains("held under fencing token"));
        assert_eq!(said(&client.get_by_key(&key).unwrap().unwrap()), (None, None));
        assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
        let error = form.lock_with(&key, &noted()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
        assert_eq!(place.stored.row(&key), None);
        assert!(place.client.operator().break_lock(&key, "a test").is_ok());
        place.stored.run("ALTER TABLE hidden RENAME TO syncguard_members");
        form.lock_with(&key, &noted()).unwrap().release().unwrap();
    }
}

#[test]
fn a_set_that_takes_over_ids_of_its_own_has_the_notes_of_its_new_keys() {
    let place = place();
    let client = owned(&place);
    let (a, b) = (place.key("a"), place.key("b"));
    let (one, two) = (generate_lock_id().unwrap(), generate_lock_id().unwrap());
    let label = Label::new(Some("me"), Some("a set"));
    let ask = |leases: &[(&str, &str)], ttl| {
        let attempt = AttemptAll::new(leases, ttl, client.clock().now().after(LIMIT)).with_label(label);
        client.grant_all(&attempt, &CancelToken::never()).unwrap()
    };
    let GrantAll::Granted(_) = ask(&[(&a, &one), (&b, &two)], ms(1)) else { panic!() };
    place.stored.run("UPDATE syncguard_locks SET expires_at_ms = expires_at_ms - 100000");
    // The second id moves to the first key, whose row is replaced before the id is written anew.
    place.stored.run(&format!("DELETE FROM syncguard_locks WHERE key = '{b}'"));
    let GrantAll::Granted(grants) = ask(&[(&a, &two), (&b, &one)], LIMIT) else { panic!() };
    let holders = place.client.operator().holders_raw(10).unwrap();
    assert_eq!((holders.len(), members(&place)), (2, 2));
    for holder in holders {
        assert_eq!((holder.owner.as_deref(), holder.note.as_deref()), (Some("me"), Some("a set")));
        let sql = "SELECT key, fence FROM syncguard_members WHERE lock_id = $1";
        let row = place.stored.one(sql, &[&holder.lock_id]);
        assert_eq!(
            (row.get::<_, String>(0), row.get::<_, String>(1)),
            (holder.key, holder.fence.to_string())
        );
    }
    for grant in grants {
        client.release(&grant.acquired.lock_id).unwrap();
    }
    assert_eq!(members(&place), 0);
}

#[test]
fn releases_breaks_take_overs_and_cleanups_that_race_leave_no_note_behind() {
    let place = place();
    let (client, other) = (owned(&place), owned(&place));
    let operator = place.client.operator();
    let key = place.key("report");
    for round in 0..60 {
        let ttl = if round % 2 == 0 { ms(1) } else { LIMIT };
        let lease = {
            let (key, label) = (key.as_str(), Label::new(Some("me"), None));
            let (lock_id, deadline) = (generate_lock_id().unwrap(), client.clock().now().after(LIMIT));
            let attempt = Attempt::new(key, &lock_id, ttl, deadline).with_label(label);
            client.grant(&attempt, &CancelToken::never()).unwrap().unwrap().acquired
        };
        if round % 2 == 0 {
            place.stored.run("UPDATE syncguard_locks SET expires_at_ms = expires_at_ms - 5000");
        }
        let next = std::sync::Mutex::new(None);
        together(4, |n| match n {
            0 => drop(client.release(&lease.lock_id).unwrap()),
            1 => *next.lock().unwrap() = other.try_lock_with(&key, &noted()).unwrap(),
            2 if round % 3 == 0 => drop(operator.break_lease(&lease.lock_id, "a test").unwrap()),
            _ => drop(operator.cleanup_expired(10).unwrap()),
        });
        let next = next.into_inner().unwrap();
        if let Some(next) = next.filter(syncguard::LockGuard::is_held) {
            assert_eq!(said(&holder(&place.client)), (Some(OWNER), Some("invoices")), "round {round}");
            next.release().unwrap();
        }
        assert_eq!(place.stored.row(&key), None, "round {round}");
        // A note may outlive a lease that was over when it was released; the next holder deletes it.
        client.lock(&key).unwrap().release().unwrap();
        assert_eq!(members(&place), 0, "round {round}");
    }
}

#[test]
fn a_hundred_thousand_abandoned_notes_and_readers_of_a_key_do_not_slow_a_grant_down() {
    let place = place();
    let (client, key) = (owned(&place), place.key("report"));
    let sql = format!(
        "INSERT INTO syncguard_members (lock_id, key, role, since_ms, expires_at_ms, fence, owner) \
         SELECT 'old' || n, '{key}', CASE WHEN n % 2 = 0 THEN 'n' ELSE 's' END, n, n, '000000000000001', 'gone' \
         FROM generate_series(1, 100000) AS n; ANALYZE syncguard_members"
    );
    place.stored.run(&sql);
    let guard = client.lock_with(&key, &noted()).unwrap();
    assert_eq!(said(&holder(&place.client)), (Some(OWNER), Some("invoices")));
    assert_eq!(members(&place), 100_000 - 100 + 1, "a hundred at a time, and no more is looked at");
    guard.release().unwrap();
    let mut left = 0;
    while place.client.operator().cleanup_expired(20_000).unwrap() > 0 {
        left += 1;
    }
    assert_eq!((members(&place), left), (0, 5));
}

#[test]
fn triggers_on_the_table_of_members_keep_no_lock() {
    let place = place();
    let (client, key) = (owned(&place), place.key("report"));
    let forms = [client.clone(), client.cancellable(&token(true))];
    place.stored.run(
        "CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$; \
         CREATE FUNCTION swallows() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
    );
    for form in &forms {
        let guard = form.lock_with(&key, &noted()).unwrap();
        let set = form.lock_all_with(&[place.key("a")], &noted()).unwrap();
        place
            .stored
            .run("CREATE TRIGGER t BEFORE DELETE ON syncguard_members FOR EACH ROW EXECUTE FUNCTION fails()");
        assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
        assert_eq!(set.release().unwrap(), ReleaseResult::Released);
        place.stored.run(
            "DROP TRIGGER t ON syncguard_members; DELETE FROM syncguard_members; \
             CREATE TRIGGER t BEFORE INSERT ON syncguard_members FOR EACH ROW EXECUTE FUNCTION fails()",
        );
        assert!(form.lock_with(&key, &noted()).is_err());
        assert_eq!(place.stored.row(&key), None, "nothing was granted without its note");
        place.stored.run(
            "DROP TRIGGER t ON syncguard_members; \
             CREATE TRIGGER t BEFORE INSERT OR DELETE ON syncguard_members FOR EACH ROW EXECUTE FUNCTION swallows()",
        );
        let guard = form.lock_with(&key, &noted()).unwrap();
        assert_eq!(said(&holder(&place.client)), (None, None), "a note that was swallowed is none");
        assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
        place.stored.run("DROP TRIGGER t ON syncguard_members");
    }
    assert_eq!(place.stored.row(&key), None);
}
