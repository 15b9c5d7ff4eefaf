//! Shared leases on a real server: many readers or one writer, whoever comes, dies, is broken or knows nothing of it.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Call, LIMIT, Place, Role, TTL, place, unique, wait_until};
use syncguard::backend::{Clock, Renewal};
use syncguard::{
    CancelToken, ErrorCode, ExtendResult, Heartbeat, LockBackend, LockOptions, LostReason, PgLockClient,
    ReleaseResult,
};

/// How many rows the table of members has.
fn members(place: &Place) -> i64 {
    place.stored.one("SELECT count(*) FROM syncguard_members", &[]).get(0)
}

fn other(place: &Place) -> PgLockClient {
    PgLockClient::connect(&place.schema.url()).unwrap()
}

#[test]
fn readers_are_members_of_one_row_and_the_last_of_them_takes_it_away() {
    let place = place();
    let key = place.key("prices");
    let one = place.client.read_lock(&key).unwrap();
    let two = other(&place).read_lock(&key).unwrap();
    assert!(one.is_shared() && two.is_shared() && one.fence() == two.fence());
    let row = place.stored.row(&key).unwrap();
    assert!(row.lock_id.starts_with("~shared~") && row.lock_id.len() == 22, "the readers' own row");
    assert_eq!((row.fence, members(&place)), (one.fence().to_string(), 2));
    assert!(place.client.try_lock(&key).unwrap().is_none());
    let shown = place.client.get_by_key(&key).unwrap().unwrap();
    assert_eq!((shown.shared, shown.readers), (true, Some(2)));
    let holders = place.client.operator().holders(10).unwrap();
    assert_eq!((holders[0].shared, holders[0].readers), (true, Some(2)));
    assert_eq!(one.release().unwrap(), ReleaseResult::Released);
    assert!(place.stored.row(&key).is_some());
    assert_eq!(two.release().unwrap(), ReleaseResult::Released);
    assert_eq!((place.stored.row(&key), members(&place)), (None, 0));
    let writer = place.client.lock(&key).unwrap();
    assert!(!writer.is_shared() && writer.fence().get() == 2);
    assert!(place.client.try_read_lock(&key).unwrap().is_none());
}

#[test]
fn the_first_call_makes_the_table_unless_nothing_is_to_be_made() {
    let place = place();
    let key = place.key("prices");
    let careful = place.build("careful", PgLockClient::builder());
    let error = careful.read_lock(&key).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    for word in ["schema.sql", "create_members_table", "members_table_name"] {
        assert!(error.to_string().contains(word), "{error}");
    }
    careful.lock(&key).unwrap().release().unwrap();
    place.client.read_lock(&key).unwrap().release().unwrap();
    // Now it is there, for everybody.
    careful.read_lock(&key).unwrap().release().unwrap();
    // And nobody needs a right to it who does not share anything.
    let role = Role::new(&place.schema);
    let sql = format!(
        "GRANT ALL ON syncguard_locks, syncguard_fence_counters TO {0}; REVOKE ALL ON syncguard_members FROM {0}",
        role.name()
    );
    place.stored.run(&sql);
    let client = role.connect(PgLockClient::builder()).unwrap();
    client.lock(&key).unwrap().release().unwrap();
    assert_eq!(client.operator().cleanup_expired(10).unwrap(), 0);
    let error = client.read_lock(&key).unwrap_err();
    assert_eq!(error.code(), ErrorCode::AuthFailed, "{error:?}");
    let _reader = place.client.read_lock(&key).unwrap();
    let shown = client.get_by_key(&key).unwrap().unwrap();
    assert_eq!((shown.shared, shown.readers), (true, None), "how many is not known");
}

#[test]
fn readers_are_renewed_together_and_told_when_the_lock_is_broken() {
    let place = place();
    let key = place.key("prices");
    let options = LockOptions::new().ttl(TTL).heartbeat(Heartbeat::Every(ms(50)));
    let guards: Vec<_> = (0..5).map(|_| place.client.read_lock_with(&key, &options).unwrap()).collect();
    let before = place.stored.row(&key).unwrap().expires_at_ms;
    wait_until(LIMIT, "the group is renewed", || {
        place.stored.row(&key).unwrap().expires_at_ms > before + 1000
    });
    assert!(guards.iter().all(syncguard::LockGuard::is_held));
    assert!(matches!(guards[0].extend(TTL).unwrap(), ExtendResult::Extended { .. }));
    let broken = place.client.operator().break_lock(&key, "a test").unwrap();
    assert!(broken.was.unwrap().shared && broken.fence > guards[0].fence());
    let newer = other(&place).read_lock(&key).unwrap();
    for guard in &guards[1..] {
        assert!(guard.lost().wait_timeout(LIMIT));
        let reason = guard.lost_reason().unwrap();
        let fair = matches!(reason, LostReason::RowMissing | LostReason::TakenOver { .. });
        assert!(fair, "{reason:?}");
    }
    drop(guards);
    assert!(newer.is_held() && place.stored.row(&key).is_some(), "who is lost ends nobody's group");
    newer.release().unwrap();
    assert_eq!(place.stored.row(&key), None);
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Readers and writers of several clients, some of whom die; nobody is there beside a writer who trusts its lease.
#[test]
fn many_readers_or_one_writer_whoever_dies() {
    let place = place();
    let key = place.key("prices");
    place.client.read_lock(&key).unwrap().release().unwrap();
    let clients: Vec<PgLockClient> = (0..3).map(|_| other(&place)).collect();
    // How many readers work now, or -1 for a writer; and the greatest fence of any writer.
    let (working, newest) = (AtomicI64::new(0), AtomicU64::new(0));
    let (stop, reads, writes) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    // Each of the dead bars writers for more than a second.
    let limit = LIMIT * 5;
    let short = LockOptions::new().ttl(ms(30)).heartbeat(Heartbeat::Off).timeout(limit);
    let long = LockOptions::new().timeout(limit);
    std::thread::scope(|scope| {
        for at in 0..9_usize {
            let (client, key, short, long) = (&clients[at % 3], &key, &short, &long);
            let (working, newest, stop, reads, writes) = (&working, &newest, &stop, &reads, &writes);
            scope.spawn(move || {
                let mut round = at;
                while !stop.load(Ordering::Relaxed) {
                    round += 7;
                    if round % 5 == 0 {
                        // Dies: its lease runs out.
                        let guard = client.read_lock_with(key, short).unwrap();
                        let _ = guard.leak();
                        continue;
                    }
                    if at % 3 == 0 {
                        let guard = client.lock_with(key, long).unwrap();
                        let before = working.swap(-1, Ordering::SeqCst);
                        assert_eq!(before, 0, "somebody works beside a writer");
                        assert!(newest.swap(guard.fence().get(), Ordering::SeqCst) < guard.fence().get());
                        std::thread::yield_now();
                        assert!(guard.is_held());
                        working.store(0, Ordering::SeqCst);
                        writes.fetch_add(1, Ordering::Relaxed);
                        guard.release().unwrap();
                    } else {
                        let guard = client.read_lock_with(key, long).unwrap();
                        assert!(working.fetch_add(1, Ordering::SeqCst) >= 0, "a writer works beside readers");
                        assert!(newest.load(Ordering::SeqCst) < guard.fence().get());
                        std::thread::yield_now();
                        assert!(guard.is_held());
                        working.fetch_sub(1, Ordering::SeqCst);
                        reads.fetch_add(1, Ordering::Relaxed);
                        guard.release().unwrap();
                    }
                }
            });
        }
        wait_until(limit, "both have had many turns", || {
            reads.load(Ordering::Relaxed) > 100 && writes.load(Ordering::Relaxed) > 20
        });
        stop.store(true, Ordering::Relaxed);
    });
    wait_until(LIMIT, "the last of the dead is over", || !place.client.is_locked(&key).unwrap());
    let counter = place.stored.counter(&key).unwrap();
    assert!(newest.load(Ordering::SeqCst) <= u64::try_from(counter).unwrap());
}

#[test]
fn a_writer_gets_its_turn_beside_readers_that_overlap() {
    let place = place();
    let key = place.key("prices");
    place.client.read_lock(&key).unwrap().release().unwrap();
    let (stop, writer) = (AtomicBool::new(false), other(&place));
    let waited = std::thread::scope(|scope| {
        for _ in 0..6 {
            let client = other(&place);
            let (key, stop) = (&key, &stop);
            scope.spawn(move || {
                let patient = LockOptions::new().timeout(LIMIT);
                while !stop.load(Ordering::Relaxed) {
                    let guard = client.read_lock_with(key, &patient).unwrap();
                    // Overlaps with the others for certain: it goes when another one is there, or a writer waits.
                    let start = Instant::now();
                    while start.elapsed() < ms(30) {
                        std::thread::yield_now();
                    }
                    guard.release().unwrap();
                }
            });
        }
        let mut waited = Vec::new();
        for _ in 0..5 {
            let start = Instant::now();
            let guard = writer.lock_with(&key, &LockOptions::new().timeout(LIMIT)).unwrap();
            waited.push(start.elapsed());
            guard.release().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        waited
    });
    assert_eq!(waited.len(), 5, "{waited:?}");
    // Its client takes them back a little later.
    let intents = "SELECT count(*) FROM syncguard_members WHERE role = 'w'";
    wait_until(LIMIT, "no intent is left", || place.stored.one(intents, &[]).get::<_, i64>(0) == 0);
}

#[test]
fn a_fenced_transaction_of_a_reader_says_that_no_writer_was_there() {
    let place = place();
    let key = place.key("prices");
    let (one, two) = (place.client.read_lock(&key).unwrap(), place.client.read_lock(&key).unwrap());
    let mut connection = place.schema.client();
    let mut transaction = connection.transaction().unwrap();
    one.fence_transaction(&mut transaction).unwrap();
    // As text, too.
    let text = two.fence_sql().unwrap();
    place.schema.client().batch_execute(&format!("BEGIN; {text}; COMMIT")).unwrap();
    // Another reader comes and goes meanwhile.
    other(&place).read_lock(&key).unwrap().release().unwrap();
    transaction.commit().unwrap();
    // A member of no group, though its key is shared again.
    place.stored.run("DELETE FROM syncguard_locks");
    let error = place.schema.client().batch_execute(&text).unwrap_err();
    assert_eq!(error.code().map(postgres::error::SqlState::code), Some("22P02"));
    let newer = other(&place).read_lock(&key).unwrap();
    for guard in [&one, &two] {
        let mut transaction = connection.transaction().unwrap();
        let error = guard.fence_transaction(&mut transaction).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Aborted, "{error:?}");
    }
    let mut transaction = connection.transaction().unwrap();
    newer.fence_transaction(&mut transaction).unwrap();
    transaction.commit().unwrap();
    // Whose member is gone, is none.
    place.stored.run("DELETE FROM syncguard_members");
    let mut transaction = connection.transaction().unwrap();
    assert!(newer.fence_transaction(&mut transaction).is_err());
}

/// What a client of another kind does, statement by statement: it knows of keys alone.
#[test]
fn clients_that_know_nothing_of_it_take_the_plain_key_exclusively() {
    let place = place();
    let key = place.key("prices");
    let reader = place.client.read_lock(&key).unwrap();
    let mut their = place.schema.client();
    let mut acquire = |id: &str| -> bool {
        let mut transaction = their.transaction().unwrap();
        transaction.execute("SELECT pg_advisory_xact_lock(hashtext($1))", &[&key]).unwrap();
        let now = "floor(extract(epoch from now()) * 1000)::int8";
        let sql = format!("SELECT expires_at_ms > {now} - 1000 FROM syncguard_locks WHERE key = $1");
        let held = transaction.query_opt(&sql, &[&key]).unwrap().is_some_and(|row| row.get(0));
        if held {
            return false;
        }
        let fence = "fence:".to_owned() + &key;
        let sql = "INSERT INTO syncguard_fence_counters AS c (fence_key, fence) VALUES ($1, 1) \
                   ON CONFLICT (fence_key) DO UPDATE SET fence = c.fence + 1 RETURNING fence";
        let fence: i64 = transaction.query_one(sql, &[&fence]).unwrap().get(0);
        let sql = format!(
            "INSERT INTO syncguard_locks (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key) \
             VALUES ($1, $2, {now} + 30000, {now}, lpad($3::text, 15, '0'), $1) \
             ON CONFLICT (key) DO UPDATE SET lock_id = EXCLUDED.lock_id, expires_at_ms = EXCLUDED.expires_at_ms, \
               acquired_at_ms = EXCLUDED.acquired_at_ms, fence = EXCLUDED.fence"
        );
        transaction.execute(&sql, &[&key, &id, &fence.to_string()]).unwrap();
        transaction.commit().unwrap();
        true
    };
    assert!(!acquire("AAAAAAAAAAAAAAAAAAAAAA"), "a shared key is held");
    reader.release().unwrap();
    assert!(acquire("AAAAAAAAAAAAAAAAAAAAAA"));
    assert!(place.client.try_read_lock(&key).unwrap().is_none());
    assert_eq!(place.client.release("AAAAAAAAAAAAAAAAAAAAAA").unwrap(), ReleaseResult::Released);
    // One whose readers are over is taken over, and they are lost.
    let short = LockOptions::new().ttl(ms(500)).heartbeat(Heartbeat::Off);
    let dead = place.client.read_lock_with(&key, &short).unwrap().leak();
    wait_until(LIMIT, "the group is over", || !place.client.is_locked(&key).unwrap());
    assert!(acquire("BBBBBBBBBBBBBBBBBBBBBA"));
    let lease = Renewal::new(&key, &dead.lock_id, dead.fence, TTL).of_reader();
    let deadline = Clock::system().now().after(TTL);
    let answer = place.client.renew(&[lease], deadline).remove(0).unwrap();
    assert!(
        matches!(answer, syncguard::backend::RenewOutcome::Lost(LostReason::TakenOver { .. })),
        "{answer:?}"
    );
    assert!(place.client.is_locked(&key).unwrap());
}

#[test]
fn a_group_ends_with_the_last_of_its_members_and_not_with_the_longest() {
    let place = place();
    let key = place.key("prices");
    let long = LockOptions::new().ttl(Duration::from_secs(3600));
    let short = LockOptions::new().ttl(ms(50)).heartbeat(Heartbeat::Off);
    let patient = place.client.read_lock_with(&key, &long).unwrap();
    let _ = place.client.read_lock_with(&key, &short).unwrap().leak();
    patient.release().unwrap();
    // The other one has died: the key is free when its lease is over.
    wait_until(LIMIT, "the group is over", || !place.client.is_locked(&key).unwrap());
    let newer = place.client.read_lock(&key).unwrap();
    assert_eq!(members(&place), 1, "who makes a group over one that is over deletes its members");
    newer.release().unwrap();
    place.client.lock(&key).unwrap().release().unwrap();
}

#[test]
fn a_hundred_thousand_abandoned_members_go_when_they_are_met_or_cleaned_up() {
    let place = place();
    let key = place.key("prices");
    place.client.read_lock(&key).unwrap().release().unwrap();
    let abandon = |key: &str, many: u32| {
        place.stored.run(&format!(
            "INSERT INTO syncguard_members (lock_id, key, role, since_ms, expires_at_ms, fence) \
             SELECT substr(md5('{key}' || n), 1, 22), '{key}', 's', n, n, '000000000000001' FROM generate_series(1, {many}) AS n"
        ));
    };
    abandon(&key, 50_000);
    abandon(&place.key("nobody comes by here"), 50_000);
    // Whoever comes by takes a thousand with it, and is not kept waiting by the rest.
    let mut rounds = 0;
    let of_key = || -> i64 {
        place.stored.one("SELECT count(*) FROM syncguard_members WHERE key = $1", &[&key]).get(0)
    };
    while of_key() > 0 {
        place.client.read_lock(&key).unwrap().release().unwrap();
        rounds += 1;
        assert!(rounds <= 50, "a leave takes 1000 with it");
    }
    let operator = place.client.operator();
    let mut deleted = 0;
    loop {
        let now = operator.cleanup_expired(10_000).unwrap();
        deleted += now;
        if now < 10_000 {
            break;
        }
    }
    assert_eq!((deleted, members(&place)), (50_000, 0));
}

#[test]
fn a_token_ends_a_call_before_anything_is_written() {
    let place = place();
    let key = place.key("prices");
    let token = CancelToken::new();
    let client = place.client.cancellable(&token);
    let guard = client.read_lock(&key).unwrap();
    let another = client.read_lock(&key).unwrap();
    assert_eq!(guard.fence(), another.fence());
    let lease = another.leak();
    assert!(matches!(client.extend(&lease.lock_id, TTL).unwrap(), ExtendResult::Extended { .. }));
    assert_eq!(client.release(&lease.lock_id).unwrap(), ReleaseResult::Released);
    let writer = place.key("held");
    let _writer = place.client.lock(&writer).unwrap();
    std::thread::scope(|scope| {
        let call = scope.spawn(|| client.read_lock_with(&writer, &LockOptions::new().wait_forever()));
        token.cancel();
        assert_eq!(call.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
    });
    assert_eq!(client.read_lock(&key).unwrap_err().code(), ErrorCode::Aborted);
    guard.release().unwrap();
    assert_eq!((place.stored.row(&key), members(&place)), (None, 0));
}

#[test]
fn a_client_with_another_table_of_members_takes_the_readers_for_a_holder() {
    let place = place();
    let key = place.key("prices");
    let guard = place.client.read_lock(&key).unwrap();
    let elsewhere = PgLockClient::builder().members_table_name(format!("readers_{}", unique()));
    let other = elsewhere.connect(&place.schema.url()).unwrap();
    assert!(other.try_read_lock(&key).unwrap().is_none());
    guard.release().unwrap();
    other.read_lock(&key).unwrap().release().unwrap();
}

#[test]
fn a_lease_that_is_shortened_keeps_no_group_standing() {
    let place = place();
    let options = LockOptions::new().ttl(Duration::from_secs(3600)).heartbeat(Heartbeat::Off);
    let (of_guard, by_id, closed) = (place.key("guard"), place.key("id"), place.key("closed"));
    let guard = place.client.read_lock_with(&of_guard, &options).unwrap();
    assert!(matches!(guard.extend(ms(2000)).unwrap(), ExtendResult::Extended { .. }));
    let lease = place.client.read_lock_with(&by_id, &options).unwrap().leak();
    assert!(matches!(place.client.extend(&lease.lock_id, ms(10)).unwrap(), ExtendResult::Extended { .. }));
    // A client that is closed within the least time of a hold leaves the rest of that time as the lease.
    let client = other(&place);
    drop(client.read_lock_with(&closed, &options.clone().min_hold(ms(1200))).unwrap());
    let _ = client.close(LIMIT).unwrap();
    for key in [&of_guard, &by_id, &closed] {
        wait_until(LIMIT, "the group is over", || !place.client.is_locked(key).unwrap());
        place.client.lock(key).unwrap().release().unwrap();
    }
    let _ = guard.leak();
}

/// A release of what an attempt of unknown outcome may have taken, when that comes true between its two statements.
#[test]
fn a_leave_ends_no_group_that_it_has_not_locked() {
    let place = place();
    let key = place.key("prices");
    let gone =
        place.client.read_lock_with(&key, &LockOptions::new().heartbeat(Heartbeat::Off)).unwrap().leak();
    place.stored.run(
        "CREATE TABLE group_saved AS SELECT * FROM syncguard_locks; \
         CREATE TABLE member_saved AS SELECT * FROM syncguard_members; \
         DELETE FROM syncguard_locks; DELETE FROM syncguard_members",
    );
    place.stored.run(
        "CREATE FUNCTION stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           PERFORM pg_advisory_xact_lock(hashtext(current_schema())); RETURN OLD; END $$; \
         CREATE TRIGGER stay BEFORE DELETE ON syncguard_members FOR EACH ROW EXECUTE FUNCTION stay()",
    );
    let application = unique();
    let client = place.named(&application);
    assert!(client.try_read_lock(&place.key("warm")).unwrap().map(syncguard::LockGuard::leak).is_some());
    let (mut gate, mut arrives) = (place.schema.client(), place.schema.client());
    let mut gate = gate.transaction().unwrap();
    gate.execute("SELECT pg_advisory_xact_lock(hashtext(current_schema()))", &[]).unwrap();
    let mut arrives = arrives.transaction().unwrap();
    arrives.batch_execute("LOCK TABLE syncguard_locks").unwrap();
    let call = {
        let (key, id) = (key.clone(), gone.lock_id.clone());
        Call::start(&application, move || {
            client.release_shared(&key, &id, Clock::system().now().after(LIMIT))
        })
    };
    call.wait_until_blocked(&place.stored);
    arrives
        .batch_execute(
            "INSERT INTO syncguard_locks SELECT * FROM group_saved; \
             INSERT INTO syncguard_members SELECT * FROM member_saved",
        )
        .unwrap();
    arrives.commit().unwrap();
    call.wait_until_blocked(&place.stored);
    let application = unique();
    let reader = {
        let (client, key) = (place.named(&application), key.clone());
        Call::start(&application, move || client.read_lock(&key).unwrap())
    };
    // It has joined, or waits for the leave.
    let _ = reader.settle(&place.stored);
    gate.commit().unwrap();
    call.join().unwrap();
    let reader = reader.join();
    assert!(place.client.try_lock(&key).unwrap().is_none(), "a writer beside a reader that trusts its lease");
    assert!(matches!(reader.extend(TTL).unwrap(), ExtendResult::Extended { .. }));
    reader.release().unwrap();
    assert_eq!(place.stored.row(&key), None);
}

#[test]
fn a_role_without_a_right_to_the_members_sees_all_else() {
    let place = place();
    let key = place.key("prices");
    let _reader = place.client.read_lock(&key).unwrap();
    let role = Role::new(&place.schema);
    place.stored.run(&format!(
        "GRANT ALL ON syncguard_locks, syncguard_fence_counters TO {0}; REVOKE ALL ON syncguard_members FROM {0}",
        role.name()
    ));
    let client = role.connect(PgLockClient::builder()).unwrap();
    let holders = client.operator().holders(10).unwrap();
    assert_eq!((holders[0].shared, holders[0].readers), (true, None));
    let waits = LockOptions::new().max_retries(2).retry_delay(ms(50));
    assert_eq!(client.lock_with(&key, &waits).unwrap_err().code(), ErrorCode::AcquisitionTimeout);
}

#[test]
fn a_renewal_wants_group_and_member_of_its_own_fence() {
    let place = place();
    let key = place.key("prices");
    let lease =
        place.client.read_lock_with(&key, &LockOptions::new().heartbeat(Heartbeat::Off)).unwrap().leak();
    let ends = "SELECT l.expires_at_ms + m.expires_at_ms FROM syncguard_locks l, syncguard_members m";
    let before: i64 = place.stored.one(ends, &[]).get(0);
    for table in ["syncguard_members", "syncguard_locks"] {
        place.stored.run(&format!("UPDATE {table} SET fence = '000000000000009'"));
        let renewal = Renewal::new(&key, &lease.lock_id, lease.fence, TTL * 2).of_reader();
        let answer = place.client.renew(&[renewal], Clock::system().now().after(LIMIT)).remove(0).unwrap();
        let taken = matches!(answer, syncguard::backend::RenewOutcome::Lost(LostReason::TakenOver { .. }));
        assert!(taken, "{table}: {answer:?}");
        assert_eq!(place.stored.one(ends, &[]).get::<_, i64>(0), before, "nothing is moved");
        place.stored.run(&format!("UPDATE {table} SET fence = '{}'", lease.fence));
    }
    assert_eq!(place.client.release(&lease.lock_id).unwrap(), ReleaseResult::Released);
}
