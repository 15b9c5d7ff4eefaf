//! The end of a client: everybody is told, everything is let go, nothing is left running.

use std::thread;
use std::time::Duration;

use crate::support::calls::asking_hourly;
use crate::support::leases::{self, client, row, threads_named};
use crate::support::{LIMIT, TTL, Worker, wait_until, worker};
use syncguard::{ErrorCode, LockOptions, LostReason, PgLockClient, ReleaseResult};

#[test]
fn closing_tells_holders_and_waiters_and_lets_everything_go() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let guards: Vec<_> = (0..20).map(|n| client.lock(&format!("k{n}")).unwrap()).collect();
    leases::delete_row(&mut observer, "k7");
    let (report, waited) = thread::scope(|scope| {
        let waiters: Vec<_> = (0..3)
            .map(|_| leases::spawn_until_asleep(scope, || client.lock_with("k0", &asking_hourly()).map(drop)))
            .collect();
        let report = client.clone().close(LIMIT).unwrap();
        (report, waiters.into_iter().map(|waiter| waiter.join().unwrap()).collect::<Vec<_>>())
    });
    for result in waited {
        let error = result.unwrap_err();
        assert_eq!((error.code(), error.key()), (ErrorCode::Aborted, Some("k0")), "{error:?}");
    }
    assert_eq!((report.released, report.not_held, report.failed, report.pending), (19, 1, 0, 0));
    assert!(report.is_clean(), "{report:?}");
    let held = observer.query_one("SELECT count(*) FROM syncguard_locks", &[]).unwrap();
    assert_eq!(held.get::<_, i64>(0), 0);
    for guard in guards {
        assert!(guard.lost().is_cancelled() && !guard.is_held());
        assert_eq!(guard.lost_reason(), Some(LostReason::Closed));
        assert_eq!(guard.release().unwrap(), ReleaseResult::NotHeld);
    }
}

#[test]
fn a_closed_client_grants_nothing_and_closing_again_does_nothing() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let client = client(&schema);
    let clone = client.clone();
    let guard = client.lock("k").unwrap();
    assert_eq!(client.close(LIMIT).unwrap().released, 1);
    for _ in 0..2 {
        let again = clone.close(LIMIT).unwrap();
        assert_eq!((again.released, again.not_held, again.is_clean()), (0, 0, true), "{again:?}");
    }
    for error in [
        clone.lock("k").unwrap_err(),
        clone.try_lock("k").unwrap_err(),
        clone.acquire("k", TTL).unwrap_err(),
        clone.with_lock("k", &LockOptions::new(), |_| ()).unwrap_err(),
    ] {
        assert_eq!(error.code(), ErrorCode::Aborted, "{error:?}");
    }
    drop(guard);
    assert!(leases::client(&schema).try_lock("k").unwrap().is_some(), "and the key is free");
}

#[test]
fn what_a_close_has_no_time_for_is_pending_and_says_so() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut other = schema.client();
    let guard = client.lock("k").unwrap();
    other.batch_execute("BEGIN; SELECT 1 FROM syncguard_locks FOR UPDATE").unwrap();
    let report = client.close(Duration::from_millis(200)).unwrap();
    assert_eq!((report.released, report.pending, report.is_clean()), (0, 1, false), "{report:?}");
    other.batch_execute("ROLLBACK").unwrap();
    drop(guard);
}

fn running() -> (usize, usize) {
    // Linux keeps 15 characters of a thread's name.
    (threads_named("syncguard-timer"), threads_named("syncguard-worke"))
}

#[test]
fn threads_start_with_the_first_guard_and_end_with_close_or_the_last_clone() {
    let _alone = crate::support::alone();
    // In a process of its own: the other tests have such threads, too.
    worker::part("alone", |parent| {
        let url = parent.arg("url");
        let app = "thread-count";
        let url = leases::named(&url, app);
        let mut observer = postgres::Client::connect(&parent.arg("url"), postgres::NoTls).unwrap();

        let client = PgLockClient::connect(&url).unwrap();
        assert!(!client.is_locked("k").unwrap());
        let grant = client.acquire("by hand", TTL).unwrap().acquired().unwrap();
        client.release(&grant.lock_id).unwrap();
        // The one of the pool of connections, which makes room in it.
        wait_until(LIMIT, "one, for the pool", || threads_named("syncguard") == 1);
        assert_eq!(running(), (0, 0), "single operations need none of the other two");
        let guards: Vec<_> = (0..10).map(|n| client.lock(&format!("k{n}")).unwrap()).collect();
        // A thread gives itself its name, and the system forgets it a moment after it has ended.
        wait_until(LIMIT, "two more, however many guards", || {
            (running(), threads_named("syncguard")) == ((1, 1), 3)
        });
        let report = client.close(LIMIT).unwrap();
        assert!(report.threads_ended);
        wait_until(LIMIT, "the threads are forgotten", || threads_named("syncguard") == 0);
        assert_eq!(row(&mut observer, "k0"), None);
        drop((guards, client));
        wait_until(LIMIT, "its connections are closed", || leases::sessions(&mut observer, app) == 0);

        let client = PgLockClient::connect(&url).unwrap();
        let clone = client.clone();
        let guard = client.lock("k").unwrap();
        drop(client);
        drop(clone);
        wait_until(LIMIT, "a guard keeps its client", || running() == (1, 1));
        assert!(guard.is_held());
        drop(guard);
        wait_until(LIMIT, "the threads have ended", || threads_named("syncguard") == 0);
        assert_eq!(row(&mut observer, "k"), None);
        wait_until(LIMIT, "its connections are closed", || leases::sessions(&mut observer, app) == 0);
        parent.say("done");
    });
    let schema = crate::support::schema();
    client(&schema);
    let url = schema.url();
    let test = "threads_start_with_the_first_guard_and_end_with_close_or_the_last_clone";
    let mut worker = Worker::start(test, "alone", &[("url", &url)]);
    worker.expect("done");
}
