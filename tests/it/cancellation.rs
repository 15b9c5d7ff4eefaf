//! A token ends every wait and nothing else: not a commit that is under way, not a release.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::calls::{MARGIN, asking_hourly};
use crate::support::leases::{self, client, counter, forge, forged_id, named, row};
use crate::support::{LIMIT, TTL, TestSchema, wait_until, wait_until_app_waits, wait_until_backend_gone};
use postgres::Client;
use syncguard::{
    CancelToken, ErrorCode, ExtendResult, Heartbeat, LockOptions, Lookup, PgLockClient, ReleaseResult, Result,
};

const LONG: Duration = Duration::from_secs(300);

/// What no other test takes: the queue of a key is that of the whole database, and is blocked here.
const KEY: &str = "cancelled";

type Call = fn(&PgLockClient, &CancelToken) -> Result<()>;

/// Everything that takes a token; the lease on "held" has the id `forged_id(1)`.
const CALLS: [(&str, Call); 10] = [
    ("acquire", |client, token| client.cancellable(token).acquire(KEY, TTL).map(drop)),
    ("release", |client, token| client.cancellable(token).release(&forged_id(1)).map(drop)),
    ("extend", |client, token| client.cancellable(token).extend(&forged_id(1), TTL).map(drop)),
    ("is_locked", |client, token| client.cancellable(token).is_locked("held").map(drop)),
    ("lookup by key", |client, token| client.cancellable(token).lookup(Lookup::Key("held")).map(drop)),
    ("lookup by id", |client, token| client.cancellable(token).get_by_id_raw(&forged_id(1)).map(drop)),
    ("lock", |client, token| client.cancellable(token).lock_with(KEY, &asking_hourly()).map(drop)),
    ("try_lock", |client, token| client.cancellable(token).try_lock(KEY).map(drop)),
    ("lock, by its options", |client, token| client.lock_with(KEY, &asking_hourly().cancel(token)).map(drop)),
    ("with_lock", |client, token| client.with_lock(KEY, &asking_hourly().cancel(token), |_| ())),
];

#[track_caller]
fn assert_aborted(what: &str, result: Result<()>) {
    let error = result.expect_err(what);
    assert_eq!(error.code(), ErrorCode::Aborted, "{what}: {error:?}");
    assert!(!error.is_outcome_unknown(), "{what}: {error:?}");
}

#[test]
fn a_token_that_has_fired_before_ends_every_call_before_anything_is_sent() {
    // Nobody listens there: whatever is sent fails in another way.
    let url = "postgresql://postgres@127.0.0.1:1/postgres";
    let client = leases::connect(PgLockClient::builder().auto_create_tables(false), url);
    let fired = CancelToken::new();
    fired.cancel();
    for (what, call) in CALLS {
        assert_aborted(what, call(&client, &fired));
        let other = call(&client, &CancelToken::new()).expect_err(what);
        assert_eq!(other.code(), ErrorCode::ServiceUnavailable, "{what}: {other:?}");
    }
}

/// Starts the call, waits until the server blocks it, fires the token, and sees everything end.
fn cancel_while_blocked(schema: &TestSchema, url: &str, what: &str, call: Call, block: &str) {
    let app = format!("c-{}", crate::support::unique());
    let builder = PgLockClient::builder().operation_timeout(LONG).connection_timeout(LONG);
    let client = leases::connect(builder, &named(url, &app));
    let (mut observer, mut other) = (schema.client(), schema.client());
    // So that the call meets a connection on which everything is prepared.
    assert!(client.is_locked("held").unwrap());
    let before = (row(&mut observer, "held"), row(&mut observer, KEY), counter(&mut observer, KEY));
    other.batch_execute(&format!("BEGIN; {block}")).unwrap();
    let token = CancelToken::new();
    thread::scope(|scope| {
        let blocked = scope.spawn(|| call(&client, &token));
        let pid = wait_until_app_waits(&mut observer, &app);
        let start = Instant::now();
        token.cancel();
        let result = blocked.join().unwrap();
        assert!(start.elapsed() < MARGIN, "{what} took {:?} to end", start.elapsed());
        assert_aborted(what, result);
        // The server was asked to stop, and the connection is in doubt: it is closed, not pooled.
        wait_until_backend_gone(&mut observer, pid);
    });
    other.batch_execute("ROLLBACK").unwrap();
    let after = (row(&mut observer, "held"), row(&mut observer, KEY), counter(&mut observer, KEY));
    assert_eq!(before, after, "{what} changed something");
    assert!(client.is_locked("held").unwrap(), "the client goes on with another connection");
}

fn blocked_schema() -> TestSchema {
    let schema = crate::support::schema();
    client(&schema);
    let mut observer = schema.client();
    forge(&mut observer, "held", &forged_id(1), 3_600_000);
    schema
}

#[test]
fn every_call_that_a_table_lock_blocks_ends_over_tcp() {
    let schema = blocked_schema();
    for (what, call) in CALLS {
        cancel_while_blocked(&schema, &schema.url(), what, call, "LOCK TABLE syncguard_locks");
    }
}

#[test]
fn every_call_that_a_table_lock_blocks_ends_over_a_unix_socket() {
    let schema = blocked_schema();
    for (what, call) in CALLS {
        cancel_while_blocked(&schema, &schema.socket_url(), what, call, "LOCK TABLE syncguard_locks");
    }
}

#[test]
fn calls_that_a_row_or_a_queue_blocks_end() {
    let schema = blocked_schema();
    forge(&mut schema.client(), KEY, &forged_id(2), -60_000);
    let rows = "SELECT 1 FROM syncguard_locks FOR UPDATE";
    let queue = "SELECT pg_advisory_xact_lock(hashtext('cancelled'))";
    for url in [schema.url(), schema.socket_url()] {
        for (what, call) in CALLS {
            if matches!(what, "acquire" | "release" | "extend" | "lock" | "try_lock") {
                cancel_while_blocked(&schema, &url, what, call, rows);
            }
            if matches!(what, "acquire" | "lock" | "try_lock" | "with_lock") {
                cancel_while_blocked(&schema, &url, what, call, queue);
            }
        }
    }
}

#[test]
fn a_commit_that_is_under_way_is_never_cancelled() {
    let schema = crate::support::schema();
    let app = format!("commit-{}", schema.name());
    let client =
        leases::connect(PgLockClient::builder().operation_timeout(LONG), &named(&schema.url(), &app));
    let (mut observer, mut gate) = (schema.client(), schema.client());
    leases::hold_inserts(&mut gate);
    let token = CancelToken::new();
    thread::scope(|scope| {
        let acquiring = scope.spawn(|| client.cancellable(&token).acquire("k", TTL));
        // The write and its COMMIT are one message, and it waits in the write.
        let pid = wait_until_app_waits(&mut observer, &app);
        token.cancel();
        for _ in 0..20 {
            crate::support::wait_until_backend_waits(&mut observer, pid);
            assert!(!acquiring.is_finished(), "a guess instead of an answer");
        }
        gate.batch_execute("ROLLBACK").unwrap();
        let grant = acquiring.join().unwrap().unwrap().acquired().expect("the server said so");
        assert_eq!(row(&mut observer, "k").unwrap().lock_id, grant.lock_id);
    });
}

/// Runs `work` on a thread, fires the token when that thread sleeps, and returns its result.
fn cancel_while_asleep(token: &CancelToken, work: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    let mut cancelled = None;
    let result = leases::while_asleep(work, || {
        cancelled = Some(Instant::now());
        token.cancel();
    });
    let took = cancelled.unwrap().elapsed();
    assert!(took < MARGIN, "took {took:?} to wake");
    result
}

#[test]
fn a_waiter_that_sleeps_between_two_attempts_wakes() {
    let schema = crate::support::schema();
    let client = client(&schema);
    forge(&mut schema.client(), "k", &forged_id(1), 3_600_000);
    let token = CancelToken::new();
    assert_aborted(
        "by its options",
        cancel_while_asleep(&token, || client.lock_with("k", &asking_hourly().cancel(&token)).map(drop)),
    );
    let token = CancelToken::new();
    assert_aborted(
        "by the client",
        cancel_while_asleep(&token, || client.cancellable(&token).lock_with("k", &asking_hourly()).map(drop)),
    );
    let (first, second) = (CancelToken::new(), CancelToken::new());
    assert_aborted(
        "by either",
        cancel_while_asleep(&first, || {
            client.cancellable(&second).lock_with("k", &asking_hourly().cancel(&first)).map(drop)
        }),
    );
    assert!(!second.is_cancelled());
}

#[test]
fn a_waiter_in_the_queue_wakes_and_those_behind_it_move_up() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let guard = client.lock("k").unwrap();
    let (front, middle) = (CancelToken::new(), CancelToken::new());
    thread::scope(|scope| {
        let wait = |options: LockOptions| {
            let client = &client;
            leases::spawn_until_asleep(scope, move || {
                client.lock_with("k", &options).map(|guard| guard.fence().get())
            })
        };
        let first = wait(asking_hourly().cancel(&front));
        let second = wait(asking_hourly().cancel(&middle));
        let third = wait(asking_hourly());
        middle.cancel();
        assert_aborted("in the middle", second.join().unwrap().map(drop));
        front.cancel();
        assert_aborted("at the front", first.join().unwrap().map(drop));
        assert!(!third.is_finished());
        drop(guard);
        wait_until(LIMIT, "the last one has its turn", || third.is_finished());
        assert_eq!(third.join().unwrap().unwrap(), 2);
    });
}

#[test]
fn waiting_for_a_connection_ends() {
    let schema = crate::support::schema();
    let app = format!("pool-{}", schema.name());
    let builder = PgLockClient::builder().max_connections(1).operation_timeout(LONG).connection_timeout(LONG);
    let client = leases::connect(builder, &named(&schema.url(), &app));
    let (mut observer, mut other) = (schema.client(), schema.client());
    other.batch_execute("BEGIN; SELECT pg_advisory_xact_lock(hashtext('taken'))").unwrap();
    thread::scope(|scope| {
        let taken = scope.spawn(|| client.acquire("taken", TTL));
        wait_until_app_waits(&mut observer, &app);
        for (what, call) in CALLS {
            let token = CancelToken::new();
            assert_aborted(what, cancel_while_asleep(&token, || call(&client, &token)));
        }
        other.batch_execute("ROLLBACK").unwrap();
        assert!(taken.join().unwrap().unwrap().acquired().is_some());
    });
}

#[test]
fn a_cancelled_holder_still_lets_go() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let token = CancelToken::new();
    let cancellable = client.cancellable(&token);
    let options = LockOptions::new().cancel(&token);
    let released = cancellable.lock_with("released", &options).unwrap();
    let dropped = cancellable.lock_with("dropped", &options).unwrap();
    let manual = cancellable.acquire("manual", TTL).unwrap().acquired().unwrap();
    let value = cancellable.with_lock("helped", &options, |guard| {
        token.cancel();
        assert!(guard.is_held() && !guard.lost().is_cancelled(), "it is the wait's token");
        assert!(matches!(guard.extend(TTL).unwrap(), ExtendResult::Extended { .. }));
        7
    });
    assert_eq!(value.unwrap(), 7);
    assert_eq!(row(&mut observer, "helped"), None);
    assert_eq!(released.release().unwrap(), ReleaseResult::Released);
    drop(dropped);
    assert_eq!((row(&mut observer, "released"), row(&mut observer, "dropped")), (None, None));
    // A release by hand is an operation like the others.
    assert_aborted("release", cancellable.release(&manual.lock_id).map(drop));
    assert!(row(&mut observer, "manual").is_some());
    assert_eq!(client.release(&manual.lock_id).unwrap(), ReleaseResult::Released);
}

#[test]
fn a_parent_ends_the_waits_of_its_children_and_a_child_only_its_own() {
    let schema = crate::support::schema();
    let client = client(&schema);
    forge(&mut schema.client(), "k", &forged_id(1), 3_600_000);
    let shutdown = CancelToken::new();
    let (request, other) = (shutdown.child(), shutdown.child().child());
    assert_aborted(
        "the child's",
        cancel_while_asleep(&request, || client.lock_with("k", &asking_hourly().cancel(&request)).map(drop)),
    );
    assert!(!shutdown.is_cancelled() && !other.is_cancelled());
    assert!(client.cancellable(&other).is_locked("k").unwrap(), "the others go on");
    assert_aborted(
        "by its grandparent",
        cancel_while_asleep(&shutdown, || client.lock_with("k", &asking_hourly().cancel(&other)).map(drop)),
    );
    assert!(client.is_locked("k").unwrap());
}

#[test]
fn cancelling_a_guards_lost_token_only_wakes_those_who_wait_for_it() {
    fn expiry(observer: &mut Client) -> i64 {
        row(observer, "k").unwrap().expires_at_ms
    }
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let options = LockOptions::new().heartbeat(Heartbeat::Every(Duration::from_millis(40)));
    let guard = client.lock_with("k", &options).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| guard.lost().wait_timeout(LIMIT));
        guard.lost().cancel();
        assert!(waiting.join().unwrap());
    });
    assert!(guard.is_held() && guard.lost_reason().is_none());
    let before = expiry(&mut observer);
    wait_until(LIMIT, "it is still renewed", || expiry(&mut observer) > before);
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
}

#[test]
fn the_tokens_of_two_calls_on_one_lease_have_nothing_to_do_with_each_other() {
    let schema = blocked_schema();
    let app = format!("apart-{}", schema.name());
    let builder = PgLockClient::builder().operation_timeout(LONG);
    let client = leases::connect(builder, &named(&schema.url(), &app));
    assert!(client.is_locked("held").unwrap());
    let (mut observer, mut other) = (schema.client(), schema.client());
    let before = row(&mut observer, "held");
    other.batch_execute("BEGIN; SELECT 1 FROM syncguard_locks FOR UPDATE").unwrap();
    let (first, second) = (CancelToken::new(), CancelToken::new());
    thread::scope(|scope| {
        let extending = scope.spawn(|| client.cancellable(&first).extend(&forged_id(1), TTL).map(drop));
        wait_until_app_waits(&mut observer, &app);
        second.cancel();
        let aborted = client.cancellable(&second).release(&forged_id(1)).map(drop);
        assert_aborted("the release with the fired token", aborted);
        assert!(!extending.is_finished() && !first.is_cancelled(), "the other call goes on");
        first.cancel();
        assert_aborted("the extend", extending.join().unwrap());
    });
    other.batch_execute("ROLLBACK").unwrap();
    assert_eq!(row(&mut observer, "held"), before);
    assert_eq!(client.release(&forged_id(1)).unwrap(), ReleaseResult::Released, "and one without a token");
}

#[test]
fn a_token_that_fires_when_the_answer_is_there_ends_no_other_call() {
    let schema = crate::support::schema();
    for url in [schema.url(), schema.socket_url()] {
        let client = leases::connect(PgLockClient::builder().max_connections(1), &url);
        assert!(!client.is_locked("k").unwrap());
        for _ in 0..40 {
            let token = CancelToken::new();
            // Many are told, one after the other, and the call somewhere among them.
            let _others: Vec<_> = (0..10_000).map(|_| token.child()).collect();
            let watching = client.cancellable(&token);
            let (tell, running) = mpsc::channel();
            thread::scope(|scope| {
                scope.spawn(|| {
                    let error = loop {
                        let answer = watching.is_locked("k");
                        let _ = tell.send(());
                        match answer {
                            Ok(locked) => assert!(!locked),
                            Err(error) => break error,
                        }
                    };
                    assert_eq!(error.code(), ErrorCode::Aborted, "{error:?}");
                    // The same connection, unless it was closed, and nobody has cancelled this.
                    for _ in 0..100 {
                        client.is_locked("k").expect("no token was given");
                    }
                });
                running.recv().unwrap();
                token.cancel();
            });
        }
    }
}
