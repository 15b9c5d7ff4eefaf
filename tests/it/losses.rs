//! Leases that are lost, how their holders learn it, and troubles that lose none.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::support::calls::{MARGIN, Recorder, ms, on_release_error, renewing_often};
use crate::support::leases::{
    self, Events, client, delete_row, expiry, forge, forged_id, row, wait_until_released, wait_until_renewed,
};
use crate::support::{Config, LIMIT, Server, Stop, TTL, logs, wait_until};
use postgres::Client;
use syncguard::{
    ErrorCode, ExtendResult, Heartbeat, LockGuard, LockOptions, LostReason, Operation, PgLockClient,
    ReleaseResult,
};

/// A guard whose `on_lost` is noted, and what it was told.
fn watched(client: &PgLockClient, key: &str, options: LockOptions) -> (LockGuard, Recorder<LostReason>) {
    let told = Recorder::default();
    let guard = client.lock_with(key, &options.on_lost(told.callback())).unwrap();
    assert!(guard.is_held() && guard.lost_reason().is_none() && told.list().is_empty());
    (guard, told)
}

/// Until the guard knows that it is lost, for this reason, told once.
#[track_caller]
fn assert_lost(guard: &LockGuard, told: &Recorder<LostReason>, reason: LostReason) {
    assert!(guard.lost().wait_timeout(LIMIT), "the guard notices");
    assert_eq!(guard.lost_reason(), Some(reason));
    assert!(!guard.is_held() && guard.remaining().is_zero());
    assert_eq!(guard.extend(TTL).unwrap(), ExtendResult::NotHeld);
    wait_until(LIMIT, "on_lost is called", || !told.list().is_empty());
    assert_eq!(told.list(), [reason]);
}

#[test]
fn a_row_that_is_gone_is_a_lost_lease() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let (guard, told) = watched(&client, "k", renewing_often());
    assert_eq!(delete_row(&mut schema.client(), "k"), 1);
    assert_lost(&guard, &told, LostReason::RowMissing);
    assert_eq!(guard.release().unwrap(), ReleaseResult::NotHeld);
    assert_eq!(told.list().len(), 1, "once");
}

#[test]
fn a_lease_that_somebody_took_over_is_lost_with_the_newer_fence() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let (guard, told) = watched(&client, "k", renewing_often());
    let old = guard.fence();
    forge(&mut observer, "k", &forged_id(7), 60_000);
    let theirs = row(&mut observer, "k");
    assert!(guard.lost().wait_timeout(LIMIT));
    let Some(LostReason::TakenOver { fence }) = guard.lost_reason() else {
        panic!("{:?}", guard.lost_reason())
    };
    assert_eq!(fence.get(), old.get() + 1);
    assert_lost(&guard, &told, LostReason::TakenOver { fence });
    drop(guard);
    assert_eq!(row(&mut observer, "k"), theirs, "the newer holder's row stays");
}

#[test]
fn a_lease_that_the_server_holds_for_expired_is_lost() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let (guard, told) = watched(&client, "k", renewing_often());
    observer.execute("UPDATE syncguard_locks SET expires_at_ms = expires_at_ms - 60000", &[]).unwrap();
    assert_lost(&guard, &told, LostReason::Expired);
    let dead = expiry(&mut observer, "k");
    assert_eq!(guard.release().unwrap(), ReleaseResult::NotHeld);
    assert_eq!(expiry(&mut observer, "k"), dead, "a dead lease is never revived");
}

#[test]
fn a_lost_lease_leaves_a_warning_with_the_reason_and_the_key_s_hash_but_no_key() {
    let schema = crate::support::schema();
    let (client, log) = (client(&schema), logs::capture());
    let key = format!("a key that is lost {}", crate::support::unique());
    let guard = client.lock_with(&key, &renewing_often()).unwrap();
    delete_row(&mut schema.client(), &key);
    let hash = syncguard::hash_key(&key);
    let lines = || log.at_least(log::Level::Warn).into_iter().filter(|line| line.text.contains(&hash));
    wait_until(LIMIT, "the log hears of it", || lines().next().is_some());
    assert!(guard.lost().is_cancelled());
    let line = lines().next().unwrap();
    assert!(line.text.contains("lost") && line.text.contains("the lease's row is gone"), "{}", line.text);
    assert!(line.target.starts_with("syncguard") && !line.text.contains(&key));
    assert_eq!(lines().count(), 1);
}

#[test]
fn renewals_that_the_server_refuses_end_as_refused_and_the_log_says_once_why() {
    let schema = crate::support::schema();
    let (client, log) = (client(&schema), logs::capture());
    let options = LockOptions::new().ttl(ms(1500)).heartbeat(Heartbeat::Every(ms(100)));
    let (guard, told) = watched(&client, "k", options);
    let (column, table) = ("acquired_at_ms", "syncguard_locks");
    // The name tells this test's lines from others'.
    let new_name = format!("renamed_{}", crate::support::unique());
    for old in ["expires_at_ms", column] {
        let sql = format!("ALTER TABLE {table} RENAME COLUMN {old} TO {new_name}_{old}");
        schema.client().batch_execute(&sql).unwrap();
    }
    assert_lost(&guard, &told, LostReason::RenewalRefused);
    let failures =
        |line: &logs::Line| line.text.contains("could not be renewed") && line.text.contains("column");
    assert_eq!(log.at_least(log::Level::Warn).iter().filter(|line| failures(line)).count(), 1);
}

#[test]
fn a_lease_is_lost_by_its_own_deadline_when_the_server_is_away() {
    let server = Server::start(&Config::new());
    let schema = server.schema();
    let client = leases::connect(PgLockClient::builder().dispose_timeout(ms(200)), &schema.url());
    let options = || LockOptions::new().ttl(ms(1200)).heartbeat(Heartbeat::Every(ms(300)));
    let (guard, told) = watched(&client, "k", options());
    let (quiet, _) = watched(&client, "quiet", LockOptions::new().ttl(ms(900)).heartbeat(Heartbeat::Off));
    server.stop(Stop::Fast);
    assert_lost(&guard, &told, LostReason::Unreachable);
    assert!(quiet.lost().wait_timeout(LIMIT));
    assert_eq!(quiet.lost_reason(), Some(LostReason::Expired), "nobody asked the server for this one");
    server.start_again();
    assert!(!guard.is_held(), "lost is final");
    drop(guard);
    assert_eq!(told.list().len(), 1);
}

#[test]
fn a_lease_is_lost_by_its_own_deadline_when_the_server_is_frozen() {
    let server = Server::start(&Config::new());
    let schema = server.schema();
    let failures = Recorder::default();
    let builder =
        PgLockClient::builder().dispose_timeout(ms(300)).on_release_error(on_release_error(&failures));
    let client = leases::connect(builder, &schema.url());
    let (guard, told) = watched(&client, "k", LockOptions::new().ttl(ms(1200)));
    let second = client.lock("second").unwrap();
    server.freeze();
    assert_lost(&guard, &told, LostReason::Unreachable);
    assert!(second.is_held());
    let start = Instant::now();
    drop(second);
    assert!(start.elapsed() < ms(300) + MARGIN, "Drop took {:?}", start.elapsed());
    assert_eq!(failures.list().first().map(|told| told.0), Some(ErrorCode::NetworkTimeout));
    server.thaw();
    // What could not be released is released once the server answers.
    wait_until_released(&mut schema.client(), "second");
}

#[test]
fn a_holder_learns_of_its_loss_in_time_although_a_callback_blocks_the_worker() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let (inside, gate) = (Recorder::default(), Arc::new(Mutex::new(())));
    let closed = gate.lock().unwrap();
    let options = renewing_often().on_lost({
        let (tell, gate) = (inside.callback(), Arc::clone(&gate));
        move |reason| {
            tell(reason);
            drop(gate.lock());
        }
    });
    let first = client.lock_with("first", &options).unwrap();
    delete_row(&mut schema.client(), "first");
    wait_until(LIMIT, "the callback blocks the worker", || !inside.list().is_empty());
    // Nobody renews this one now; that its time is over needs neither the worker nor the server.
    let second = client.lock_with("second", &LockOptions::new().ttl(ms(400))).unwrap();
    assert!(second.lost().wait_timeout(LIMIT));
    assert!(!second.is_held() && second.lost_reason() == Some(LostReason::Expired));
    drop(closed);
    drop((first, second));
}

/// Has the next `times` updates of the lock table fail.
fn fail_updates(observer: &mut Client, times: usize) {
    observer
        .batch_execute(&format!(
            "CREATE SEQUENCE updates; \
             CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               IF nextval(format('%I.updates', TG_TABLE_SCHEMA)) <= {times} THEN RAISE 'made to fail'; END IF; \
               RETURN NEW; END $$; \
             CREATE TRIGGER fail BEFORE UPDATE ON syncguard_locks FOR EACH ROW EXECUTE FUNCTION fail()"
        ))
        .unwrap();
}

#[test]
fn renewals_that_fail_now_and_then_do_not_lose_the_lease() {
    let schema = crate::support::schema();
    let app = format!("failing-{}", schema.name());
    let events = Events::default();
    let builder = PgLockClient::builder().telemetry(events.options());
    let client = leases::connect(builder, &leases::named(&schema.url(), &app));
    let mut observer = schema.client();
    let (guard, told) = watched(&client, "k", renewing_often());
    fail_updates(&mut observer, 2);
    wait_until(LIMIT, "two renewals have failed", || {
        events.failed(Operation::Extend, ErrorCode::Internal) == 2
    });
    wait_until_renewed(&mut observer, &guard);
    // And a connection that dies is replaced.
    for _ in 0..3 {
        let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1";
        assert!(observer.query_one(sql, &[&app]).unwrap().get::<_, i64>(0) > 0);
        wait_until_renewed(&mut observer, &guard);
    }
    assert!(guard.is_held() && told.list().is_empty());
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
}

#[test]
fn a_row_that_somebody_locks_stays_held_and_holds_no_other_up() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let (mut observer, mut other) = (schema.client(), schema.client());
    let (guard, told) = watched(&client, "busy", renewing_often());
    let neighbour = client.lock_with("neighbour", &renewing_often()).unwrap();
    other.batch_execute("BEGIN; SELECT 1 FROM syncguard_locks WHERE key = 'busy' FOR UPDATE").unwrap();
    let before = expiry(&mut observer, "busy");
    for _ in 0..5 {
        wait_until_renewed(&mut observer, &neighbour);
    }
    assert_eq!(expiry(&mut observer, "busy"), before);
    assert!(guard.is_held());
    other.batch_execute("ROLLBACK").unwrap();
    wait_until_renewed(&mut observer, &guard);
    assert!(told.list().is_empty());
}

#[test]
fn guards_survive_a_restart_of_the_server_within_their_ttl() {
    let server = Server::start(&Config::new());
    let schema = server.schema();
    let client = client(&schema);
    let options = || LockOptions::new().heartbeat(Heartbeat::Every(ms(200)));
    let guards: Vec<_> = (0..5).map(|n| watched(&client, &format!("k{n}"), options())).collect();
    for how in [Stop::Fast, Stop::Immediate] {
        server.restart(how);
        let mut observer = schema.client();
        for (guard, _) in &guards {
            wait_until_renewed(&mut observer, guard);
        }
    }
    for (guard, told) in guards {
        assert!(guard.is_held() && told.list().is_empty());
        assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    }
}
