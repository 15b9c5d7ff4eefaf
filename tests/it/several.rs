//! Several keys at once on a real server: all or none in one message, ordinary rows, fenced together.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::support::calls::{FORMS, asking_often, renewing_often, token};
use crate::support::leases::{self, named};
use crate::support::listeners::patient;
use crate::support::{Action, Call, LIMIT, Place, Proxy, TTL, id, place, together, wait_until};
use postgres::NoTls;
use r2d2_postgres::PostgresConnectionManager;
use syncguard::backend::{AttemptAll, Clock, Grant, GrantAll, LockBackend, Reason, ReleaseOutcome};
use syncguard::{
    ErrorCode, ExtendResult, Fence, LockOptions, LostReason, MultiGuard, PgLockClient, ReleaseResult,
};

/// Keys that no other test uses.
fn keys(place: &Place, n: usize) -> Vec<String> {
    (0..n).map(|i| place.key(&format!("k{i:02}"))).collect()
}

/// Keys and ids, as an attempt has them.
fn pairs<'a>(keys: &'a [String], ids: &'a [String]) -> Vec<(&'a str, &'a str)> {
    keys.iter().zip(ids).map(|(key, id)| (key.as_str(), id.as_str())).collect()
}

fn held(place: &Place, keys: &[String]) -> usize {
    keys.iter().filter(|key| place.stored.row(key).is_some()).count()
}

#[test]
fn a_set_is_taken_in_one_message_and_each_key_is_an_ordinary_row() {
    let place = place();
    let (client, keys) = (place.named("one-message"), keys(&place, 8));
    let names = client.lock_all(&keys).unwrap().keys().len(); // with everything prepared
    assert_eq!(names, 8);
    place.stored.run(
        "UPDATE syncguard_fence_counters AS c SET fence = other.n FROM \
         (SELECT fence_key, row_number() OVER () + 20 AS n FROM syncguard_fence_counters) AS other \
         WHERE other.fence_key = c.fence_key",
    );
    let before: Vec<_> = keys.iter().map(|key| place.stored.counter(key).unwrap()).collect();
    let guard = client.lock_all(&keys).unwrap();
    let rows: Vec<_> = keys.iter().map(|key| place.stored.row(key).unwrap()).collect();
    for ((key, row), before) in keys.iter().zip(&rows).zip(&before) {
        assert_eq!(Some(&row.fence), guard.fence(key).map(|fence| fence.to_string()).as_ref());
        assert_eq!(place.stored.counter(key), Some(before + 1), "each from its own");
        assert_eq!(row.expires_at_ms, rows[0].expires_at_ms, "one moment");
        assert_eq!(row.user_key, *key);
        assert!(place.client.try_lock(key).unwrap().is_none(), "held for everybody");
    }
    let sql = "SELECT count(DISTINCT xmin::text), count(DISTINCT lock_id) FROM syncguard_locks";
    let row = place.stored.one(sql, &[]);
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (1, 8), "one transaction, an id each");
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    assert_eq!(held(&place, &keys), 0);
}

#[test]
fn what_is_no_set_is_refused_before_any_io() {
    // Nobody listens there.
    let builder = PgLockClient::builder().auto_create_tables(false);
    let client = builder.connect("postgresql://nobody@127.0.0.1:1/nothing").unwrap();
    let many: Vec<String> = (0..65).map(|n| format!("k{n}")).collect();
    let sets: [&[&str]; 3] = [&[], &["a", ""], &many.iter().map(String::as_str).collect::<Vec<_>>()];
    for set in sets {
        assert_eq!(client.lock_all(set).unwrap_err().code(), ErrorCode::InvalidArgument);
        assert_eq!(client.try_lock_all(set).unwrap_err().code(), ErrorCode::InvalidArgument);
    }
    let error = client.try_lock_all(&["a", "b"]).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "so much for the others: {error}");
}

#[test]
fn one_held_key_refuses_the_set_and_burns_no_fence_in_either_form() {
    let place = place();
    let keys = keys(&place, 3);
    place.hold(&keys[1]);
    place.stored.write(&keys[2], &id("over"), -5_000, 7);
    let ids = ["part-a", "part-b", "part-c"].map(id);
    let leases = pairs(&keys, &ids);
    for two_messages in FORMS {
        let attempt = AttemptAll::new(&leases, TTL, place.client.clock().now().after(LIMIT));
        let answer = place.client.grant_all(&attempt, &token(two_messages)).unwrap();
        let GrantAll::Held { index: 1, holder } = answer else { panic!("{answer:?}") };
        assert_eq!(holder.fence.map(Fence::get), Some(1), "who has the key in the way");
        assert!(place.client.cancellable(&token(two_messages)).try_lock_all(&keys).unwrap().is_none());
        assert_eq!((place.stored.row(&keys[0]), place.stored.counter(&keys[0])), (None, None));
        assert_eq!(place.stored.row(&keys[2]).unwrap().lock_id, id("over"));
    }
}

/// The counter of a key that a fenced transaction holds is contention, not something to wait for.
#[test]
fn a_fenced_transaction_on_one_key_keeps_the_set_without_a_wait() {
    let place = place();
    let keys = keys(&place, 2);
    let guard = place.client.lock(&keys[1]).unwrap();
    let mut connection = place.schema.client();
    let mut transaction = connection.transaction().unwrap();
    guard.fence_transaction(&mut transaction).unwrap();
    guard.release().unwrap();
    let ids = ["part-a", "part-b"].map(id);
    let leases = pairs(&keys, &ids);
    for counted in [false, true] {
        // The other key's counter is free, or not there yet.
        if counted {
            drop(place.client.lock(&keys[0]).unwrap());
        }
        for two_messages in FORMS {
            let attempt = AttemptAll::new(&leases, TTL, place.client.clock().now().after(LIMIT));
            let answer = place.client.grant_all(&attempt, &token(two_messages)).unwrap();
            assert!(matches!(answer, GrantAll::Held { index: 1, .. }), "the key in the way: {answer:?}");
        }
    }
    assert_eq!(held(&place, &keys), 0);
    transaction.commit().unwrap();
    assert!(place.client.try_lock_all(&keys).unwrap().is_some());
}

#[test]
fn a_waiter_in_another_process_is_called_for_the_key_in_its_way() {
    let place = place();
    let (other, keys) = (place.named("another-process"), keys(&place, 3));
    let guard = place.client.lock_all(&keys[1..]).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| other.lock_all_with(&keys, &patient()).unwrap());
        crate::support::listeners::wait_for_listener(&mut place.stored.client(), &keys[1]);
        assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
        assert!(waiting.join().unwrap().is_held());
    });
}

/// Sets in every order, among single keys: nobody waits in a circle, and no key has two holders.
#[test]
fn sets_that_overlap_in_any_order_never_wait_in_a_circle() {
    let place = place();
    let keys = keys(&place, 4);
    let inside: Vec<AtomicU64> = keys.iter().map(|_| AtomicU64::new(0)).collect();
    let clients = [place.named("sets-1"), place.named("sets-2")];
    let granted = together(8, |n| {
        let client = &clients[n % 2];
        let mut granted = [0_i64; 4];
        for round in 0..12 {
            let mut mine: Vec<usize> = (0..=(n + round) % 3).map(|i| (n * 3 + round + i) % 4).collect();
            if n % 2 == 1 {
                mine.reverse();
            }
            let names: Vec<&String> = mine.iter().map(|i| &keys[*i]).collect();
            let names: Vec<&str> = names.into_iter().map(String::as_str).collect();
            let guard = client.lock_all_with(&names, &asking_often().timeout(LIMIT)).unwrap();
            for i in &mine {
                assert_eq!(inside[*i].fetch_add(1, Ordering::SeqCst), 0, "another holder is inside");
                granted[*i] += 1;
            }
            for i in &mine {
                inside[*i].fetch_sub(1, Ordering::SeqCst);
            }
            assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
        }
        granted
    });
    for (i, key) in keys.iter().enumerate() {
        let grants: i64 = granted.iter().map(|granted| granted[i]).sum();
        assert_eq!(place.stored.counter(key), Some(grants), "one fence for one grant");
    }
}

fn lose(place: &Place, guard: &MultiGuard, keys: &[String], expected: LostReason) {
    assert!(guard.lost().wait_timeout(LIMIT));
    assert_eq!((guard.is_held(), guard.lost_reason()), (false, Some(expected)));
    wait_until(LIMIT, "the other keys are let go", || held(place, keys) == 0);
}

#[test]
fn a_set_is_lost_with_its_first_key_and_the_others_are_let_go() {
    let place = place();
    let keys = keys(&place, 3);
    let guard = place.client.lock_all_with(&keys, &renewing_often()).unwrap();
    place.stored.remove(&keys[1]);
    lose(&place, &guard, &keys, LostReason::RowMissing);
    let again = place.client.lock_all(&keys).unwrap();
    assert_eq!(guard.release().unwrap(), ReleaseResult::NotHeld);
    assert!(again.is_held() && held(&place, &keys) == 3, "the late release spares the next holder");
}

#[test]
fn sixty_four_keys_are_renewed_in_one_transaction_and_extended_in_one() {
    let place = place();
    let keys = keys(&place, 64);
    let guard = place.client.lock_all_with(&keys, &renewing_often()).unwrap();
    let before = place.stored.row(&keys[0]).unwrap().expires_at_ms;
    let sql = "SELECT count(DISTINCT xmin::text), min(expires_at_ms) FROM syncguard_locks";
    wait_until(LIMIT, "all are renewed", || {
        let row = place.stored.one(sql, &[]);
        row.get::<_, i64>(0) == 1 && row.get::<_, i64>(1) > before
    });
    drop(guard);
    // With no renewal under way, whose ttl would count as well.
    let guard = place.client.lock_all(&keys).unwrap();
    let ExtendResult::Extended { expires_at_ms } = guard.extend(TTL * 10).unwrap() else {
        panic!("it is held");
    };
    assert!(guard.remaining() > TTL * 9);
    let row = place.stored.one(sql, &[]);
    assert!(row.get::<_, i64>(1) >= expires_at_ms, "each of them");
}

#[test]
fn a_fenced_transaction_checks_all_keys_in_one_statement() {
    let place = place();
    let keys = keys(&place, 3);
    let mut connection = place.schema.client();
    connection.batch_execute("CREATE TABLE effect (n int)").unwrap();
    let guard = place.client.lock_all(&keys).unwrap();
    let mut transaction = connection.transaction().unwrap();
    guard.fence_transaction(&mut transaction).unwrap();
    transaction.execute("INSERT INTO effect VALUES (1)", &[]).unwrap();
    // As long as it is open, nobody newer is granted one of the keys.
    place.stored.remove(&keys[2]);
    assert!(place.client.try_lock(&keys[2]).unwrap().is_none());
    transaction.commit().unwrap();

    // A key that is gone, one that has a newer holder, and one that is over.
    for (n, key) in keys.iter().enumerate() {
        let guard = place.client.lock_all_with(&keys, &LockOptions::new().timeout(LIMIT)).unwrap();
        match n {
            0 => place.stored.remove(key),
            1 => drop(place.client.operator().break_lock(key, "a test").unwrap()),
            _ => place.stored.age(key, 5_000),
        }
        let mut transaction = connection.transaction().unwrap();
        let error = guard.fence_transaction(&mut transaction).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Aborted, "{error}");
        assert!(transaction.execute("INSERT INTO effect VALUES (2)", &[]).is_err(), "it cannot go on");
        drop(transaction);
        drop(guard);
    }
    assert_eq!(connection.query_one("SELECT count(*) FROM effect", &[]).unwrap().get::<_, i64>(0), 1);
    // A set of one key, and one whose keys are foreign to the database.
    let alone = place.client.lock_all(&keys[..1]).unwrap();
    let mut transaction = connection.transaction().unwrap();
    alone.fence_transaction(&mut transaction).unwrap();
    transaction.commit().unwrap();
}

#[test]
fn a_token_ends_the_wait_in_a_key_s_queue() {
    let place = place();
    let keys = keys(&place, 3);
    let name = format!("queued-{}", place.schema.name());
    let (client, stop) = (place.named(&name), token(true));
    let mut blocker = place.schema.client();
    let number = format!("SELECT pg_advisory_lock(hashtext('{}'))", keys[1]);
    blocker.batch_execute(&number).unwrap();
    let (waiting, asked) = (client.cancellable(&stop), keys.clone());
    let call = Call::start(&name, move || waiting.try_lock_all(&asked).map(|guard| guard.is_some()));
    call.wait_until_blocked(&place.stored);
    stop.cancel();
    let error = call.join().unwrap_err();
    assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Aborted, false), "{error}");
    assert_eq!(held(&place, &keys), 0);
    blocker.batch_execute("SELECT pg_advisory_unlock_all()").unwrap();
    assert!(client.try_lock_all(&keys).unwrap().is_some());
}

#[test]
fn a_lost_answer_is_asked_for_again_under_the_same_ids() {
    let place = place();
    let proxy = Proxy::start(crate::support::server().port());
    let builder = PgLockClient::builder().auto_create_tables(false);
    let client = leases::connect(builder, &named(&proxy.url(&place.schema.url()), "lost-answers"));
    for form in FORMS {
        let keys: Vec<String> = (0..3).map(|n| place.key(&format!("lost-{form}-{n}"))).collect();
        let client = client.cancellable(&token(form));
        proxy.once(
            if form { "EXECUTE sg_set_grant" } else { "EXECUTE sg_set_absent" },
            Action::CutAnswerAt(0),
        );
        let guard = client.lock_all(&keys).unwrap();
        for key in &keys {
            let row = place.stored.row(key).unwrap();
            assert_eq!(Some(row.fence), guard.fence(key).map(|fence| fence.to_string()));
            assert_eq!(place.stored.counter(key), Some(1), "one fence for one grant");
        }
        let mut connection = place.schema.client();
        let mut transaction = connection.transaction().unwrap();
        guard.fence_transaction(&mut transaction).unwrap();
        transaction.commit().unwrap();
        proxy.once("EXECUTE sg_set_release", Action::CutAnswerAt(0));
        match guard.release() {
            Ok(answer) => assert_eq!(answer, ReleaseResult::Released),
            Err(error) => assert!(error.is_outcome_unknown(), "{error}"),
        }
        wait_until(LIMIT, "all are let go", || held(&place, &keys) == 0);
    }
}

/// Of what a first answer granted one lease was broken before it was asked for again.
#[test]
fn a_part_under_the_same_ids_is_released_and_the_set_is_refused() {
    let place = place();
    let keys = keys(&place, 3);
    let ids = ["part-a", "part-b", "part-c"].map(id);
    let leases = pairs(&keys, &ids);
    for two_messages in FORMS {
        place.stored.write(&keys[0], &ids[0], 30_000, 1);
        place.stored.write(&keys[2], &ids[2], 30_000, 1);
        let deadline = place.client.clock().now().after(Duration::from_secs(5));
        let attempt = AttemptAll::new(&leases, TTL, deadline);
        let answer = place.client.grant_all(&attempt, &token(two_messages)).unwrap();
        assert!(matches!(answer, GrantAll::Held { index: 1, .. }), "{answer:?}");
        assert_eq!(held(&place, &keys), 0);
    }
}

#[test]
fn sets_work_on_a_callers_pool() {
    let place = place();
    let keys = keys(&place, 5);
    let manager = PostgresConnectionManager::new(place.schema.config(), NoTls);
    let pool = r2d2::Pool::builder().max_size(3).min_idle(Some(0)).test_on_check_out(false).build(manager);
    let client = PgLockClient::builder().build(pool.unwrap()).unwrap();
    for _ in 0..20 {
        let guard = client.lock_all_with(&keys, &renewing_often()).unwrap();
        assert!(client.try_lock_all(&keys[3..]).unwrap().is_none());
        assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    }
    assert_eq!(place.stored.counter(&keys[0]), Some(20));
}

/// Between the look that finds all of its rows and their confirmation somebody else may come.
#[test]
fn a_set_that_is_asked_for_again_is_granted_only_while_all_its_rows_live() {
    let place = place();
    let keys = keys(&place, 3);
    let proxy = Proxy::start(crate::support::server().port());
    let builder = PgLockClient::builder().auto_create_tables(false);
    let client = leases::connect(builder, &named(&proxy.url(&place.schema.url()), "asks-again"));
    drop(client.lock_all(&keys).unwrap());
    let ids = ["part-a", "part-b", "part-c"].map(id);
    let leases = pairs(&keys, &ids);
    for (change, granted) in [
        ("user_key = user_key", true),
        ("expires_at_ms = 0", false),
        ("lock_id = 'BBBBBBBBBBBBBBBBBBBBBA'", false),
        ("key = key || '-other'", false),
    ] {
        place.stored.run("DELETE FROM syncguard_locks");
        let deadline = place.client.clock().now().after(LIMIT);
        let attempt = AttemptAll::new(&leases, TTL, deadline);
        let ask = || client.grant_all(&attempt, &token(false)).unwrap();
        let GrantAll::Granted(first) = ask() else { panic!("all are free") };
        let sql = format!("UPDATE syncguard_locks SET {change} WHERE key = '{}'", keys[1]);
        let mut other = place.schema.client();
        proxy.on_query(move |said| {
            if said.contains("EXECUTE sg_set_confirm") {
                other.batch_execute(&sql).unwrap();
            }
            Action::Pass
        });
        match ask() {
            GrantAll::Granted(again) => {
                assert!(granted, "{change}");
                let leases = |all: &[Grant]| all.iter().map(|one| one.acquired.clone()).collect::<Vec<_>>();
                assert_eq!(leases(&again), leases(&first), "{change}");
            }
            GrantAll::Held { index, .. } => assert_eq!((granted, index), (false, 1), "{change}"),
            other => panic!("{change}: {other:?}"),
        }
        proxy.pass_all();
    }
}

#[test]
fn a_trigger_that_swallows_one_row_is_an_error_for_the_whole_set() {
    let place = place();
    let keys = keys(&place, 3);
    drop(place.client.lock_all(&keys).unwrap());
    for (event, body) in [("INSERT", "RETURN NULL"), ("UPDATE", "RETURN NULL"), ("UPDATE", "RETURN OLD")] {
        if event == "UPDATE" {
            place.stored.write(&keys[1], &id("dead"), -5_000, 1);
        }
        let only = format!("WHEN (NEW.key = '{}')", keys[1]);
        place.stored.put_in_the_way(&format!("{event} ON syncguard_locks"), &only, body);
        let counters = || keys.iter().map(|key| place.stored.counter(key)).collect::<Vec<_>>();
        let before = counters();
        for two in FORMS {
            let error = place.client.cancellable(&token(two)).try_lock_all(&keys).unwrap_err();
            assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Internal, false), "{error:?}");
            assert_eq!(counters(), before, "no fence is burnt");
            assert!(place.stored.row(&keys[0]).is_none() && place.stored.row(&keys[2]).is_none());
        }
        place.stored.run("DROP TRIGGER in_the_way ON syncguard_locks");
    }
}

/// Its fences would be granted a second time.
#[test]
fn a_trigger_that_puts_a_counter_back_is_an_error_for_the_whole_set() {
    let place = place();
    let keys = keys(&place, 2);
    drop(place.client.lock_all(&keys).unwrap());
    place.stored.run(&format!(
        "CREATE FUNCTION put_back() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           IF NEW.fence_key = 'fence:{}' THEN RETURN OLD; END IF; RETURN NEW; END $$; \
         CREATE TRIGGER put_back BEFORE UPDATE ON syncguard_fence_counters FOR EACH ROW EXECUTE FUNCTION put_back()",
        keys[1]
    ));
    // No row, and one that is over.
    for dead in [false, true] {
        if dead {
            place.stored.write(&keys[0], &id("dead"), -5_000, 1);
        }
        for two in FORMS {
            let error = place.client.cancellable(&token(two)).try_lock_all(&keys).unwrap_err();
            assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Internal, false), "{error:?}");
            assert!(error.to_string().contains("trigger"), "{error}");
            assert!(keys.iter().all(|key| place.stored.counter(key) == Some(1)), "no fence is burnt");
            assert!(place.stored.row(&keys[1]).is_none());
        }
    }
}

#[test]
fn a_release_of_several_judges_each_by_its_own_row() {
    let place = place();
    let [live, over, kept] = ["live", "over", "kept"].map(|word| (place.key(word), id(word)));
    for labelled in [false, true] {
        let client = if labelled {
            PgLockClient::builder().owner("batch").connect(&place.schema.url()).unwrap()
        } else {
            place.client.clone()
        };
        place.stored.write(&live.0, &live.1, 60_000, 1);
        place.stored.write(&over.0, &over.1, -5_000, 1);
        let deadline = Clock::system().now().after(LIMIT);
        let answers = client.release_all(&[&live.1, &over.1, &id("none")], deadline).unwrap();
        let [expired, none] =
            [Reason::Expired, Reason::NotFound].map(|why| ReleaseOutcome::NotHeld(Some(why)));
        assert_eq!(answers, [ReleaseOutcome::Released, expired, none]);
        assert_eq!(place.stored.row(&live.0), None);
        assert_eq!(place.stored.row(&over.0).unwrap().lock_id, over.1, "left to whoever takes it over");

        // What is kept is not called released because another is.
        place.stored.write(&live.0, &live.1, 60_000, 1);
        place.stored.write(&kept.0, &kept.1, 60_000, 1);
        let only = format!("WHEN (OLD.lock_id = '{}')", kept.1);
        place.stored.put_in_the_way("DELETE ON syncguard_locks", &only, "RETURN NULL");
        let error = client.release_all(&[&live.1, &kept.1], deadline).unwrap_err();
        assert!(error.code() == ErrorCode::Internal && error.to_string().contains("trigger"), "{error:?}");
        assert_eq!(place.stored.row(&kept.0).unwrap().lock_id, kept.1);
        place.stored.run("DROP TRIGGER in_the_way ON syncguard_locks; DELETE FROM syncguard_locks");
    }
}
