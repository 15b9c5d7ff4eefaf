//! Taking a lock away by hand.

use std::time::Duration;

use crate::support::calls::told_in_time;
use crate::support::{Action, LIMIT, Proxy, TTL, id, logs, place, server, unique};
use syncguard::{
    ErrorCode, FENCE_MAX, Heartbeat, LockError, LockOptions, LostReason, PgLockClient, hash_key,
};

#[test]
fn breaking_a_lock_frees_the_key_raises_its_fence_and_the_holder_is_told() {
    let place = place();
    let key = place.key("a");
    place.stored.run("CREATE TABLE work (what text)");
    let (tell, told) = std::sync::mpsc::channel();
    let options = LockOptions::new()
        .ttl(TTL)
        .heartbeat(Heartbeat::Every(Duration::from_millis(100)))
        .on_lost(move |reason| tell.send(reason).unwrap());
    let guard = place.client.lock_with(&key, &options).unwrap();
    let log = logs::capture();
    let broken = place.client.operator().break_lock(&key, "an operator").unwrap();
    assert_eq!(broken.was.unwrap().fence, guard.fence());
    assert!(broken.fence > guard.fence());
    assert_eq!(place.stored.counter(&key), Some(2));
    let lines = log.of_this_thread();
    let line = lines.iter().find(|line| line.text.contains("an operator")).unwrap();
    assert!(
        line.level == log::Level::Warn && line.text.contains(&hash_key(&key)) && !line.text.contains(&key)
    );

    // What the old holder still does under its fence is refused, also before it knows.
    let mut client = place.schema.client();
    let mut tx = client.transaction().unwrap();
    assert_eq!(guard.fence_transaction(&mut tx).unwrap_err().code(), ErrorCode::Aborted);
    assert!(tx.execute("INSERT INTO work VALUES ('stale')", &[]).is_err());
    drop(tx);
    assert!(guard.lost().wait_timeout(LIMIT));
    assert_eq!(guard.lost_reason(), Some(LostReason::RowMissing));
    assert_eq!(told.recv_timeout(LIMIT).unwrap(), LostReason::RowMissing);
    assert!(!guard.is_held());
    let next = place.client.acquire(&key, TTL).unwrap().acquired().unwrap();
    assert!(next.fence > broken.fence);
}

#[test]
fn breaking_a_free_an_expired_or_an_unknown_key_raises_its_fence_too() {
    let place = place();
    let operator = place.client.operator();
    let (unknown, expired) = (place.key("unknown"), place.key("expired"));
    let broken = operator.break_lock(&unknown, "a test").unwrap();
    assert_eq!((broken.was, broken.fence.get()), (None, 1));
    place.stored.write(&expired, &id("expired"), -5_000, 41);
    let broken = operator.break_lock(&expired, "a test").unwrap();
    assert_eq!((broken.was.unwrap().fence.get(), broken.fence.get()), (41, 42));
    assert!(place.stored.row(&expired).is_none());
}

#[test]
fn a_lock_whose_counter_is_in_a_fenced_transaction_is_broken_when_that_has_ended_or_not_at_all() {
    let place = place();
    let key = place.key("a");
    let grant = place.hold(&key);
    let hasty = place.build(&unique(), PgLockClient::builder().operation_timeout(Duration::from_millis(300)));
    let mut client = place.schema.client();
    let mut tx = client.transaction().unwrap();
    place.client.assert_fence(&mut tx, &key, grant.fence).unwrap();
    let told = |error: &LockError| error.sqlstate().is_some();
    let error = told_in_time(&hasty, told, || hasty.operator().break_lock(&key, "a test"));
    assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::NetworkTimeout, false), "{error:?}");
    assert!(place.stored.row(&key).is_some() && place.stored.counter(&key) == Some(1));
    tx.commit().unwrap();
    assert_eq!(place.client.operator().break_lock(&key, "a test").unwrap().fence.get(), 2);
}

#[test]
fn a_lock_whose_fence_cannot_be_raised_is_not_broken_either() {
    let place = place();
    place.stored.run("ALTER TABLE syncguard_fence_counters ALTER fence DROP NOT NULL");
    let last = i64::try_from(FENCE_MAX).unwrap();
    for (n, counter) in [Some(last), Some(last + 1), Some(i64::MAX), Some(-1), None].into_iter().enumerate() {
        let key = place.key(&format!("held {n}"));
        place.stored.write(&key, &id(&format!("held{n}")), 30_000, 7);
        let sql = "UPDATE syncguard_fence_counters SET fence = $2 WHERE fence_key = 'fence:' || $1";
        assert_eq!(place.stored.client().execute(sql, &[&key, &counter]).unwrap(), 1);
        let before = place.stored.row(&key);
        let log = logs::capture();
        let error = place.client.operator().break_lock(&key, "a test").unwrap_err();
        assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Internal, false), "{error:?}");
        assert!(error.to_string().contains("counter"), "{error}");
        assert!(before.is_some() && place.stored.row(&key) == before, "{counter:?}: nothing was changed");
        assert!(log.of_this_thread().iter().all(|line| !line.text.contains("broken")));
    }
    // The last fence that there is is given to nobody, but it ends a lock.
    let key = place.key("last but one");
    place.stored.write(&key, &id("last"), 30_000, last - 1);
    let broken = place.client.operator().break_lock(&key, "a test").unwrap();
    assert_eq!((broken.fence.get(), place.stored.row(&key)), (FENCE_MAX, None));
}

#[test]
fn a_row_that_cannot_be_read_is_broken_all_the_same() {
    let place = place();
    let key = place.key("a");
    place.stored.write(&key, &id("a"), 30_000, 7);
    place.stored.run("UPDATE syncguard_locks SET fence = 'seven'");
    let broken = place.client.operator().break_lock(&key, "a test").unwrap();
    assert_eq!((broken.was, broken.fence.get()), (None, 8));
    assert!(place.stored.row(&key).is_none());
}

#[test]
fn who_asked_is_one_line_of_the_log_whatever_it_says() {
    let place = place();
    let log = logs::capture();
    place.client.operator().break_lock(&place.key("a"), "me\nERROR all is lost").unwrap();
    let lines = log.of_this_thread();
    let line = lines.iter().find(|line| line.text.contains("all is lost")).unwrap();
    assert!(!line.text.contains('\n'), "{}", line.text);
}

#[test]
fn who_asked_is_logged_also_when_the_answer_is_lost() {
    let place = place();
    let proxy = Proxy::start(server().port());
    let client =
        PgLockClient::builder().auto_create_tables(false).connect(&proxy.url(&place.schema.url())).unwrap();
    let key = place.key("a");
    place.hold(&key);
    assert!(client.is_locked(&key).unwrap());
    proxy.once("DELETE FROM", Action::CutAnswerAt(0));
    let log = logs::capture();
    let error = client.operator().break_lock(&key, "somebody unlucky").unwrap_err();
    assert!(error.is_outcome_unknown(), "{error:?}");
    let lines = log.of_this_thread();
    let line = lines.iter().find(|line| line.text.contains("somebody unlucky")).expect("a trace of it");
    assert!(line.level == log::Level::Warn && line.text.contains("perhaps") && !line.text.contains(&key));
    assert!(place.stored.row(&key).is_none(), "and so it was");
}
