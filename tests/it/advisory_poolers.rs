//! Session locks through a real pooler: refused where sessions are shared, taken where they are not.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use crate::support::bouncer::Bouncer;
use crate::support::session_locks::{builder, client, holders, key, taken};
use crate::support::{LIMIT, server, together, wait_until};
use postgres::{Client, NoTls};
use syncguard::{AdvisoryOptions, CancelToken, ErrorCode, LockError, PgLockClient, ReleaseResult};

fn through(bouncer: &Bouncer) -> PgLockClient {
    builder().connect(&bouncer.url()).unwrap()
}

#[track_caller]
fn refused<T: std::fmt::Debug>(answer: Result<T, LockError>) {
    let error = answer.expect_err("a session lock through a pooler that shares sessions");
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    assert!(error.to_string().contains("pooler"), "{error}");
}

/// Has the pooler open so many server connections, and gives all of them back.
fn warm(bouncer: &Bouncer, connections: usize) {
    let mut sessions: Vec<_> =
        (0..connections).map(|_| Client::connect(&bouncer.url(), NoTls).unwrap()).collect();
    let mut open: Vec<_> = sessions.iter_mut().map(|session| session.transaction().unwrap()).collect();
    open.iter_mut().for_each(|transaction| transaction.batch_execute("SELECT 1").unwrap());
    open.into_iter().for_each(|transaction| transaction.rollback().unwrap());
}

#[test]
fn a_pooler_in_transaction_or_statement_mode_is_refused() {
    for mode in ["transaction", "statement"] {
        let bouncer = Bouncer::start(&[("pool_mode", mode)]);
        let client = through(&bouncer);
        let key = key();
        for _ in 0..3 {
            refused(client.try_advisory_lock(&key));
            refused(client.advisory_lock(&key));
        }
        drop(taken(&self::client(), key));
    }
}

#[test]
fn a_pooler_that_takes_turns_among_its_connections_is_refused() {
    // One after the other: with two of them a session's every second statement meets the same one.
    for connections in [2, 3, 4] {
        for _ in 0..4 {
            let bouncer = Bouncer::start(&[("server_round_robin", "1")]);
            warm(&bouncer, connections);
            refused(through(&bouncer).try_advisory_lock(&key()));
        }
    }
}

#[test]
fn a_pooler_under_load_is_refused() {
    // Others come in between, so that a session may meet one server process twice by chance.
    let bouncer = Bouncer::start(&[("default_pool_size", "3")]);
    let (enough, others) = (CancelToken::new(), AtomicU32::new(0));
    let key = key();
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut busy = Client::connect(&bouncer.url(), NoTls).unwrap();
                while !enough.is_cancelled() {
                    busy.batch_execute("SELECT 1").unwrap();
                    others.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let mut wrong = 0;
        for _ in 0..40 {
            let client = through(&bouncer);
            let before = others.load(Ordering::SeqCst);
            match client.try_advisory_lock(&key) {
                Err(error) => refused::<()>(Err(error)),
                // Without load it has met one process all along.
                Ok(_) => wrong += u32::from(others.load(Ordering::SeqCst) > before + 15),
            }
        }
        enough.cancel();
        // Chance is left out only if a session meets the same process fifteen times among three.
        assert!(wrong <= 1, "{wrong} of 40 passed the self-test");
    });
}

#[test]
fn a_pooler_in_session_mode_is_as_good_as_none() {
    let bouncer = Bouncer::start(&[("pool_mode", "session"), ("default_pool_size", "20")]);
    let (a, b, key, mut observer) = (through(&bouncer), through(&bouncer), key(), server().client());
    let guard = a.advisory_lock(&key).unwrap();
    assert!(b.try_advisory_lock(&key).unwrap().is_none() && guard.is_held());
    assert_eq!(holders(&mut observer, key), 1);
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    let inside = AtomicU32::new(0);
    together(4, |n| {
        let client = if n % 2 == 0 { &a } else { &b };
        for _ in 0..20 {
            let guard = client.advisory_lock_with(&key, &AdvisoryOptions::new().timeout(LIMIT)).unwrap();
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
            inside.fetch_sub(1, Ordering::SeqCst);
            drop(guard);
        }
    });
    drop((a, b));
    wait_until(LIMIT, "no lock is left", || holders(&mut observer, key) == 0);
}

#[test]
fn a_pooler_that_has_no_second_connection_for_the_self_test_is_refused_too() {
    let bouncer = Bouncer::start(&[("max_client_conn", "1"), ("default_pool_size", "1")]);
    let client = builder().max_connections(1).connect(&bouncer.url()).unwrap();
    let key = key();
    for _ in 0..3 {
        let answer = client.try_advisory_lock(&key);
        assert!(answer.is_err(), "granted through a pooler that shares sessions: {answer:?}");
    }
    let mut observer = server().client();
    wait_until(LIMIT, "no lock is left", || holders(&mut observer, key) == 0);
}
