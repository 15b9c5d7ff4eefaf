//! `pg_cancel_backend` and `pg_terminate_backend` at each place where an operation can wait: what the
//! caller hears is true, and the connection serves the next call.

use std::time::{Duration, Instant};

use postgres::Client;
use syncguard::{Acquired, ErrorCode, LockError, LockOptions, PgLockClient};

use crate::support::standby::signal_waits_for_a_standby;
use crate::support::{Config, LIMIT, Server, wait_until, wait_until_app_waits};

const TTL: Duration = Duration::from_secs(30);
const BOUND: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    Acquire,
    TwoMessages,
    Lock,
    Extend,
    Release,
}

/// What a stranger does so that somebody waits, in a transaction that stays open; `$` is the key.
const WAITS: [(&str, &str, &[Call]); 4] = [
    (
        "the advisory lock",
        "SELECT pg_advisory_xact_lock(hashtext('$'))",
        &[Call::Acquire, Call::TwoMessages, Call::Lock],
    ),
    (
        "the row",
        "SELECT FROM syncguard_locks WHERE key = '$' FOR UPDATE",
        &[Call::Acquire, Call::TwoMessages, Call::Extend, Call::Release],
    ),
    (
        "a row that is being written",
        "INSERT INTO syncguard_locks VALUES ('$', repeat('B', 22), 0, 0, '000000000000001', '$')",
        &[Call::Acquire, Call::TwoMessages],
    ),
    (
        "the table",
        "LOCK TABLE syncguard_locks IN ACCESS EXCLUSIVE MODE",
        &[Call::Acquire, Call::TwoMessages, Call::Lock, Call::Extend, Call::Release],
    ),
];

struct Bench {
    server: Server,
    client: PgLockClient,
    sql: Client,
}

impl Bench {
    fn new() -> Self {
        let server = Server::start(&Config::new());
        let client = PgLockClient::builder().operation_timeout(BOUND).connect(server.url()).unwrap();
        let sql = server.client();
        Self { server, client, sql }
    }

    /// Prepares the key for a call, and lets a stranger stand in its way.
    fn block(&mut self, wait: &str, sql: &str, call: Call, key: &str) -> (Client, Option<Acquired>) {
        let held = if matches!(call, Call::Extend | Call::Release) {
            Some(self.client.acquire(key, TTL).unwrap().acquired().unwrap())
        } else {
            if wait == "the row" {
                // An expired one: a live one is not waited for.
                let row =
                    "INSERT INTO syncguard_locks VALUES ($1, repeat('A', 22), 0, 0, '000000000000001', $1)";
                self.sql.execute(row, &[&key]).unwrap();
            }
            self.client.is_locked("warm").unwrap();
            None
        };
        let mut stranger = self.server.client();
        stranger.batch_execute(&format!("BEGIN; {}", sql.replace('$', key))).unwrap();
        (stranger, held)
    }

    /// Calls, does that to the session once it waits, and lets the stranger go once it waits again.
    fn disturbed(
        &mut self,
        function: &str,
        call: Call,
        (key, held): (&str, Option<&Acquired>),
        stranger: Client,
    ) -> Result<(), LockError> {
        let (client, sql) = (self.client.clone(), &mut self.sql);
        std::thread::scope(|scope| {
            let start = Instant::now();
            let caller = scope.spawn(move || {
                let id = held.map_or("", |held| &held.lock_id);
                match call {
                    Call::Acquire => client.acquire(key, TTL).map(drop),
                    Call::TwoMessages => {
                        client.cancellable(&syncguard::CancelToken::new()).acquire(key, TTL).map(drop)
                    }
                    Call::Lock => client.lock_with(key, &LockOptions::new().timeout(BOUND)).map(drop),
                    Call::Extend => client.extend(id, TTL).map(drop),
                    Call::Release => client.release(id).map(drop),
                }
            });
            let pid = wait_until_app_waits(sql, "syncguard");
            let began = "SELECT query_start::text FROM pg_stat_activity WHERE pid = $1";
            let began: String = sql.query_one(began, &[&pid]).unwrap().get(0);
            sql.execute(&format!("SELECT {function}($1)"), &[&pid]).unwrap();
            let asked_again = "SELECT EXISTS (SELECT FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE NOT granted \
                               AND application_name = 'syncguard' AND (pid, query_start::text) <> ($1, $2))";
            wait_until(LIMIT, "the call is over, or waits again", || {
                caller.is_finished() || sql.query_one(asked_again, &[&pid, &began]).unwrap().get(0)
            });
            drop(stranger);
            let result = caller.join().expect("no panic");
            assert!(start.elapsed() < BOUND + Duration::from_secs(1), "{call:?} took {:?}", start.elapsed());
            result
        })
    }

    /// Nobody is in the way any more: the call works on whatever connection there is.
    fn works(&mut self, call: Call, key: &str, held: Option<&Acquired>) {
        match held {
            Some(held) if call == Call::Extend => {
                let _ = self.client.extend(&held.lock_id, TTL).expect("nobody is in the way");
                self.client.release(&held.lock_id).expect("nobody is in the way");
            }
            Some(held) => drop(self.client.release(&held.lock_id).expect("nobody is in the way")),
            None => {}
        }
        let free = || matches!(self.client.acquire(key, TTL), Ok(syncguard::AcquireResult::Acquired(_)));
        wait_until(LIMIT / 3, "the key is free, long before its ttl", free);
    }
}

/// Tries all of it.
fn at_each_wait(function: &str, mut hears: impl FnMut(&str, Call, Result<(), LockError>)) {
    let mut bench = Bench::new();
    for (wait, sql, calls) in WAITS {
        for call in calls {
            let key = format!("{wait}:{call:?}");
            let (stranger, held) = bench.block(wait, sql, *call, &key);
            let result = bench.disturbed(function, *call, (&key, held.as_ref()), stranger);
            // What a call has taken is not looked for below.
            if result.is_ok() && held.is_none() {
                bench.sql.execute("DELETE FROM syncguard_locks WHERE key = $1", &[&key]).unwrap();
            }
            hears(wait, *call, result);
            bench.works(*call, &key, held.as_ref());
        }
    }
}

#[test]
fn a_cancelled_wait_is_an_error_that_changed_nothing() {
    at_each_wait("pg_cancel_backend", |wait, call, result| {
        // `lock` goes on to wait, as it was asked to.
        let Err(error) = result else {
            return assert_eq!(call, Call::Lock, "{call:?} at {wait}");
        };
        assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{call:?} at {wait}: {error}");
        assert_eq!(error.sqlstate(), Some("57014"), "{call:?} at {wait}: {error}");
        assert!(!error.is_outcome_unknown(), "{call:?} at {wait}: {error}");
    });
}

#[test]
fn a_session_that_is_ended_while_it_waits_is_replaced_or_nothing_was_changed() {
    at_each_wait("pg_terminate_backend", |wait, call, result| match result {
        Ok(()) => {}
        // The first of two messages, which is not asked again.
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{call:?} at {wait}: {error}");
            assert_eq!(error.sqlstate(), Some("57P01"), "{call:?} at {wait}: {error}");
            let told = call == Call::TwoMessages || call == Call::Lock || error.is_outcome_unknown();
            assert!(told, "{call:?} at {wait}: {error}");
        }
    });
}

#[test]
fn a_session_that_is_ended_while_its_commit_waits_for_a_standby_leaves_the_outcome_unknown() {
    let bench = Bench::new();
    let client = PgLockClient::builder()
        .operation_timeout(Duration::from_secs(1))
        .connect(bench.server.url())
        .unwrap();
    client.is_locked("warm").unwrap();
    bench.server.configure("synchronous_standby_names", "nobody");
    let mut sql = bench.server.client();
    let result = signal_waits_for_a_standby(&mut sql, "pg_terminate_backend", || client.acquire("k", TTL));
    let error = result.expect_err("no standby has it");
    assert!(error.is_outcome_unknown(), "{error}");
    bench.server.configure("synchronous_standby_names", "");
    wait_until(LIMIT / 3, "it is let go, long before its ttl", || !client.is_locked("k").unwrap());
}
