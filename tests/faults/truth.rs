//! The connection dies at any byte of acquire, extend or release: the answer is right, or says that
//! it is unknown; and nothing stays behind that nobody knows of.

use std::time::Duration;

use postgres::Client;
use syncguard::{AcquireResult, CancelToken, ExtendResult, PgLockClient, ReleaseResult};

use crate::support::proxy::BOUND;
use crate::support::{self, Action, LIMIT, Proxy, TestSchema, wait_for, wait_until};

const TTL: Duration = Duration::from_secs(30);

/// A client behind a proxy, and a connection that tells the truth.
pub struct Bench {
    pub schema: TestSchema,
    pub proxy: Proxy,
    pub client: PgLockClient,
    pub sql: Client,
}

impl Bench {
    pub fn new(operation_timeout: Duration) -> Self {
        let schema = support::schema();
        let proxy = Proxy::start(support::server().port());
        // Its tables need more time than a test may give to a call.
        let client = wait_for(LIMIT, "the tables are there", || {
            let builder = PgLockClient::builder().operation_timeout(operation_timeout);
            builder.connect(&proxy.url(&schema.url())).ok()
        });
        let sql = schema.client();
        Self { schema, proxy, client, sql }
    }

    /// What the key's row says: lock id, expiry, fence.
    pub fn row(&mut self, key: &str) -> Option<(String, i64, String)> {
        let sql = "SELECT lock_id, expires_at_ms, fence FROM syncguard_locks WHERE key = $1";
        let row = self.sql.query_opt(sql, &[&key]).expect("the server answers");
        row.map(|row| (row.get(0), row.get(1), row.get(2)))
    }

    /// The key's counter: as many grants were committed.
    pub fn counter(&mut self, key: &str) -> i64 {
        let sql = "SELECT fence FROM syncguard_fence_counters WHERE fence_key = 'fence:' || $1";
        self.sql.query_opt(sql, &[&key]).expect("the server answers").map_or(0, |row| row.get(0))
    }

    /// The client as it is, or one with a token, which takes two messages.
    fn form(&self, token: Option<&CancelToken>) -> PgLockClient {
        token.map_or_else(|| self.client.clone(), |token| self.client.cancellable(token))
    }

    /// Sees to a connection on which every statement has been called often.
    pub fn settle(&self) {
        self.proxy.pass_all();
        let held = self.client.acquire("settled", TTL * 100).expect("the server answers").acquired();
        for _ in 0..20 {
            let _ = self.client.acquire("settled", TTL).expect("the server answers");
            if let Some(held) = &held {
                let _ = self.client.extend(&held.lock_id, TTL * 100).expect("the server answers");
            }
            self.client.release("AAAAAAAAAAAAAAAAAAAAAA").expect("the server answers");
        }
        if let Some(held) = held {
            self.client.release(&held.lock_id).expect("the server answers");
        }
    }

    /// Applies the action to the next call of this name by the extended protocol, once.
    pub fn once_bound(&self, name: &'static str, action: Action) {
        let mut left = true;
        self.proxy.on_query(move |sql| {
            if left && sql.starts_with(name) && sql.ends_with(BOUND) {
                left = false;
                return action;
            }
            Action::Pass
        });
    }

    /// Sees to a connection that is open and has everything prepared.
    fn warm(&self) {
        self.proxy.pass_all();
        wait_until(LIMIT, "the server answers", || self.client.is_locked("warm").is_ok());
    }
}

/// Every place where a message can be cut: before it, at bytes of it, behind it, and at bytes of its
/// answer, whose size shows itself on the way.
fn sweep(bench: &mut Bench, mut shot: impl FnMut(&mut Bench, Action)) -> u64 {
    let before = bench.proxy.count();
    for action in
        [Action::CutQueryAt(0), Action::CutQueryAt(1), Action::CutQueryAt(5), Action::CutQueryAt(100)]
    {
        shot(bench, action);
    }
    shot(bench, Action::CutQueryAt(usize::MAX));
    shot(bench, Action::CutNow);
    let step = if crate::long() { 1 } else { 7 };
    shot(bench, Action::CutAnswerAt(0));
    let size = bench.proxy.last_answer();
    assert!(size > 20, "an answer has a size");
    for n in (1..size).step_by(step).chain(size - 8..size) {
        shot(bench, Action::CutAnswerAt(n));
    }
    // All of it arrives, and the connection is dead afterwards.
    shot(bench, Action::CutAnswerAt(usize::MAX));
    bench.proxy.count() - before
}

/// The messages of each operation, by a word in them, in the form without and with a token.
fn forms(one: &'static str, two: [&'static str; 2]) -> [(Option<CancelToken>, &'static str); 3] {
    [(None, one), (Some(CancelToken::new()), two[0]), (Some(CancelToken::new()), two[1])]
}

#[test]
fn an_acquire_that_is_cut_anywhere_answers_with_the_truth() {
    let mut bench = Bench::new(Duration::from_secs(5));
    let mut n = 0;
    for (token, message) in forms("EXECUTE sg_acquire", ["EXECUTE sg_hold", "EXECUTE sg_grant"]) {
        let cut = sweep(&mut bench, |bench, action| {
            n += 1;
            let key = format!("acquire:{n}");
            bench.warm();
            bench.proxy.once(message, action);
            let granted =
                bench.form(token.as_ref()).acquire(&key, TTL).expect("the network was only cut once");
            let AcquireResult::Acquired(granted) = granted else {
                panic!("{message} {action:?}: nobody else is there")
            };
            let row = bench.row(&key);
            let expected = (granted.lock_id.clone(), granted.expires_at_ms, granted.fence.to_string());
            assert_eq!(row, Some(expected), "{message} {action:?}");
            assert_eq!(bench.counter(&key), 1, "{message} {action:?}: a fence was burnt");
        });
        println!("acquire, {message}: cut at {cut} places");
    }
}

#[test]
fn an_extend_that_is_cut_anywhere_answers_with_the_truth() {
    let mut bench = Bench::new(Duration::from_secs(5));
    let mut n = 0;
    for (token, message) in forms("EXECUTE sg_extend", ["EXECUTE sg_find", "EXECUTE sg_update"]) {
        let cut = sweep(&mut bench, |bench, action| {
            n += 1;
            let key = format!("extend:{n}");
            bench.warm();
            let granted =
                bench.client.acquire(&key, TTL).expect("all is well").acquired().expect("it is free");
            bench.proxy.once(message, action);
            let extended =
                bench.form(token.as_ref()).extend(&granted.lock_id, TTL * 2).expect("only cut once");
            let ExtendResult::Extended { expires_at_ms } = extended else {
                panic!("{message} {action:?}: it is held")
            };
            let row = bench.row(&key);
            assert_eq!(
                row,
                Some((granted.lock_id, expires_at_ms, granted.fence.to_string())),
                "{message} {action:?}"
            );
        });
        println!("extend, {message}: cut at {cut} places");
    }
}

#[test]
fn a_release_that_is_cut_anywhere_answers_with_the_truth() {
    let mut bench = Bench::new(Duration::from_secs(5));
    let (mut n, mut unknown) = (0, 0);
    for (token, message) in forms("EXECUTE sg_release", ["EXECUTE sg_find", "EXECUTE sg_delete"]) {
        let cut = sweep(&mut bench, |bench, action| {
            n += 1;
            let key = format!("release:{n}");
            bench.warm();
            let granted =
                bench.client.acquire(&key, TTL).expect("all is well").acquired().expect("it is free");
            bench.proxy.once(message, action);
            match bench.form(token.as_ref()).release(&granted.lock_id) {
                Ok(ReleaseResult::Released) => {}
                // It was committed, the answer was lost, and the second try finds nothing.
                Err(error) if error.is_outcome_unknown() => {
                    unknown += 1;
                    assert!(
                        matches!(action, Action::CutNow | Action::CutAnswerAt(_)),
                        "{message} {action:?}: {error}"
                    );
                }
                other => panic!("{message} {action:?}: {other:?}"),
            }
            assert_eq!(bench.row(&key), None, "{message} {action:?}");
        });
        println!("release, {message}: cut at {cut} places");
    }
    assert!(unknown > 0, "an answer to a commit was lost");
}

/// Statements that are called often are called by the driver's own protocol: other messages, which
/// are cut at other places.
#[test]
fn a_statement_that_is_called_often_answers_with_the_truth_wherever_it_is_cut() {
    let mut bench = Bench::new(Duration::from_secs(5));
    let mut unknown = 0;
    for message in ["EXECUTE sg_acquire", "EXECUTE sg_extend", "EXECUTE sg_release"] {
        let mut n = 0;
        let cut = sweep(&mut bench, |bench, action| {
            n += 1;
            bench.settle();
            let key = format!("{message}:{n}");
            let granted = if message == "EXECUTE sg_acquire" {
                bench.once_bound(message, action);
                bench.client.acquire(&key, TTL).expect("the network was only cut once")
            } else {
                bench.client.acquire(&key, TTL).expect("all is well")
            };
            let granted = granted.acquired().expect("nobody else is there");
            let mut row = Some((granted.lock_id.clone(), granted.expires_at_ms, granted.fence.to_string()));
            if message == "EXECUTE sg_extend" {
                bench.once_bound(message, action);
                let extended = bench.client.extend(&granted.lock_id, TTL * 2).expect("only cut once");
                let ExtendResult::Extended { expires_at_ms } = extended else {
                    panic!("{action:?}: it is held")
                };
                row = row.map(|(id, _, fence)| (id, expires_at_ms, fence));
            }
            if message == "EXECUTE sg_release" {
                bench.once_bound(message, action);
                match bench.client.release(&granted.lock_id) {
                    Ok(ReleaseResult::Released) => {}
                    Err(error) if error.is_outcome_unknown() => unknown += 1,
                    other => panic!("{message} {action:?}: {other:?}"),
                }
                row = None;
            }
            assert_eq!(bench.row(&key), row, "{message} {action:?}");
            assert_eq!(bench.counter(&key), 1, "{message} {action:?}: a fence was burnt");
        });
        println!("{message}, by Bind: cut at {cut} places");
        assert!(cut > 10, "{message}: {cut}");
    }
    assert!(unknown > 0, "an answer to a commit was lost");
}

#[test]
fn an_acquire_whose_network_stays_away_is_unknown_unless_it_certainly_changed_nothing() {
    let mut bench = Bench::new(Duration::from_millis(400));
    let mut n = 0;
    let cuts = [
        Action::CutQueryAt(0),
        Action::CutQueryAt(60),
        Action::CutNow,
        Action::CutAnswerAt(0),
        Action::CutAnswerAt(40),
    ];
    for (token, message) in forms("EXECUTE sg_acquire", ["EXECUTE sg_hold", "EXECUTE sg_grant"]) {
        for action in cuts {
            n += 1;
            let key = format!("away:{n}");
            bench.warm();
            let mut down = false;
            bench.proxy.on_query(move |sql| {
                if !down && sql.contains(message) {
                    down = true;
                    return action;
                }
                if down { Action::CutQueryAt(0) } else { Action::Pass }
            });
            let result = bench.form(token.as_ref()).acquire(&key, TTL);
            let error = result.expect_err("no answer can have come");
            if message == "EXECUTE sg_hold" {
                assert!(
                    !error.is_outcome_unknown(),
                    "{message} {action:?}: the first of two messages commits nothing"
                );
                assert_eq!(bench.row(&key), None, "{message} {action:?}");
            } else {
                assert!(error.is_outcome_unknown(), "{message} {action:?}: {error}");
                assert!(error.to_string().contains("unknown"), "{error}");
            }
            bench.proxy.pass_all();
            // Long before its ttl is over: the client goes on releasing it.
            wait_until(LIMIT / 3, "the unknown lease is released", || bench.row(&key).is_none());
        }
    }
}

#[test]
fn an_answer_that_never_comes_is_unknown_and_is_cleaned_up() {
    let mut bench = Bench::new(Duration::from_millis(400));
    for (n, message) in ["EXECUTE sg_acquire", "EXECUTE sg_grant"].into_iter().enumerate() {
        let key = format!("swallowed:{n}");
        bench.warm();
        bench
            .proxy
            .on_query(move |sql| if sql.contains(message) { Action::SwallowAnswer } else { Action::Pass });
        let client =
            if n == 0 { bench.client.clone() } else { bench.client.cancellable(&CancelToken::new()) };
        let error = client.acquire(&key, TTL).expect_err("the answer never arrives");
        assert!(error.is_outcome_unknown(), "{error}");
        assert!(error.may_be_held_for().is_some_and(|rest| rest >= TTL));
        bench.proxy.pass_all();
        wait_until(LIMIT / 3, "the unknown lease is released", || bench.row(&key).is_none());
    }
}

#[test]
fn an_unknown_release_says_so_and_is_harmless_to_repeat() {
    let mut bench = Bench::new(Duration::from_secs(2));
    bench.warm();
    let granted = bench.client.acquire("k", TTL).unwrap().acquired().unwrap();
    bench.proxy.on_query(|sql| {
        if sql.contains("EXECUTE sg_release") { Action::CutAnswerAt(0) } else { Action::Pass }
    });
    let error = bench.client.release(&granted.lock_id).expect_err("no answer arrives");
    assert!(error.is_outcome_unknown(), "{error}");
    bench.proxy.pass_all();
    assert!(matches!(bench.client.release(&granted.lock_id), Ok(ReleaseResult::NotHeld)));
    assert_eq!(bench.row("k"), None);
}

#[test]
fn an_unknown_extend_keeps_the_old_deadline() {
    let bench = Bench::new(Duration::from_secs(2));
    let options =
        syncguard::LockOptions::new().ttl(Duration::from_secs(20)).heartbeat(syncguard::Heartbeat::Off);
    let guard = bench.client.lock_with("k", &options).unwrap();
    bench
        .proxy
        .on_query(|sql| if sql.contains("EXECUTE sg_extend") { Action::SwallowAnswer } else { Action::Pass });
    let before = guard.remaining();
    let error = guard.extend(Duration::from_secs(600)).expect_err("no answer arrives");
    assert!(error.is_outcome_unknown(), "{error}");
    assert!(guard.is_held() && guard.remaining() < before);
    bench.proxy.pass_all();
    assert!(matches!(guard.release(), Ok(ReleaseResult::Released)));
}

#[test]
fn a_guard_whose_release_is_lost_leaves_no_row_behind() {
    let mut bench = Bench::new(Duration::from_secs(2));
    let guard = bench.client.lock("k").unwrap();
    // None of its messages reaches the server until the guard has given up.
    bench.proxy.on_query(|sql| {
        if sql.contains("EXECUTE sg_release") { Action::CutQueryAt(0) } else { Action::Pass }
    });
    assert!(guard.release().is_err());
    assert!(bench.row("k").is_some());
    bench.proxy.pass_all();
    wait_until(LIMIT / 3, "the worker has released it", || bench.row("k").is_none());
}
