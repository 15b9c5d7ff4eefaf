//! Statements that are called often, which the driver prepares itself: what is true of a call must be
//! true of the hundredth.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod durable;
mod shared;

use std::time::{Duration, Instant};

use crate::support::proxy::BOUND;
use crate::support::{Action, Call, LIMIT, Network, Place, Proxy, TTL, id, place, unique, wait_until};
use postgres::{Client, NoTls};
use syncguard::backend::{Clock, Renewal};
use syncguard::{ErrorCode, ExtendResult, LockBackend, Lookup, PgLockClient, ReleaseResult};

/// More than enough calls for the driver to prepare the statement.
const OFTEN: usize = 20;

/// How long a call may take.
const CALL: Duration = Duration::from_secs(10);

/// A client whose one connection runs through a proxy.
fn through(place: &Place, proxy: &Proxy, name: &str) -> PgLockClient {
    let mut config: postgres::Config = proxy.url(&place.schema.url()).parse().unwrap();
    config.application_name(name);
    PgLockClient::builder()
        .auto_create_tables(false)
        .operation_timeout(CALL)
        .connect_with(config, NoTls)
        .unwrap()
}

fn transaction(place: &Place, sql: &str) -> Client {
    let mut client = place.schema.client();
    client.batch_execute(&format!("BEGIN; {sql}")).unwrap();
    client
}

fn waiting(place: &Place, name: &str) -> Vec<i32> {
    let sql = "SELECT coalesce(array_agg(DISTINCT a.pid), '{}') FROM pg_stat_activity AS a JOIN pg_locks AS l USING (pid) \
               WHERE a.application_name = $1 AND NOT l.granted";
    place.stored.one(sql, &[&name]).get(0)
}

/// The calls that a preconfigured session makes in one statement, by how the statement begins.
#[derive(Clone, Copy, Debug)]
enum Op {
    Acquire,
    Release,
    Extend,
    IsLocked,
    Lookup,
}

impl Op {
    fn begins(self) -> &'static str {
        match self {
            Self::Acquire => "EXECUTE sg_acquire_absent_",
            Self::Release => "EXECUTE sg_release_live_",
            Self::Extend => "EXECUTE sg_extend_",
            Self::IsLocked => "EXECUTE sg_look_",
            Self::Lookup => "EXECUTE sg_by_id_",
        }
    }

    /// So often that the driver prepares the statement.
    fn warm(self, place: &Place, client: &PgLockClient, key: &str) {
        // The connection may have ended after its last answer, which only its next use shows.
        let _ = client.release(&id("nobody"));
        for _ in 0..OFTEN {
            match self {
                Self::Acquire => {
                    let grant = client.acquire(&place.key("spare"), TTL).unwrap().acquired().unwrap();
                    assert_eq!(client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
                }
                Self::Release => {
                    assert_eq!(client.release(&id("nobody")).unwrap(), ReleaseResult::NotHeld);
                }
                _ => self.check(place, client, key),
            }
        }
    }

    /// The one right answer, whatever happened on the way.
    fn check(self, place: &Place, client: &PgLockClient, key: &str) {
        match self {
            Self::Acquire => {
                let before = place.stored.counter(key);
                let grant = client.acquire(key, TTL).unwrap().acquired().unwrap();
                let row = place.stored.row(key).unwrap();
                assert_eq!((row.lock_id, row.fence), (grant.lock_id, grant.fence.to_string()));
                let counter = place.stored.counter(key);
                assert_eq!(counter, before.map(|before| before + 1), "one fence for one grant");
                assert_eq!(counter, i64::try_from(grant.fence.get()).ok());
            }
            Self::Release => match client.release(&id("mine")) {
                Ok(answer) => assert_eq!(answer, ReleaseResult::Released),
                Err(error) => assert!(error.is_outcome_unknown(), "{error:?}"),
            },
            Self::Extend => {
                assert!(matches!(client.extend(&id("mine"), TTL).unwrap(), ExtendResult::Extended { .. }));
            }
            Self::IsLocked => assert!(client.is_locked(key).unwrap()),
            Self::Lookup => assert!(client.lookup(Lookup::LockId(&id("mine"))).unwrap().is_some()),
        }
    }
}

const OPS: [Op; 5] = [Op::Acquire, Op::Release, Op::Extend, Op::IsLocked, Op::Lookup];

/// Whether this is a call of the operation's statement by the driver's own means.
fn is_bound(sql: &str, op: Op) -> bool {
    sql.starts_with(op.begins()) && sql.ends_with(BOUND)
}

/// Applies the action to the next such call.
fn once(proxy: &Proxy, op: Op, action: Action) {
    let mut left = true;
    proxy.on_query(move |sql| {
        if left && is_bound(sql, op) {
            left = false;
            action
        } else {
            Action::Pass
        }
    });
}

/// Does something to one call that the driver prepared, and checks the answer and the row.
fn disturb(place: &Place, proxy: &Proxy, client: &PgLockClient, op: Op, action: Action) {
    let key = place.key("a");
    place.stored.run("DELETE FROM syncguard_locks");
    place.stored.write(&key, &id("mine"), 30_000, 1);
    if matches!(op, Op::Acquire) {
        place.stored.remove(&key);
    }
    proxy.pass_all();
    op.warm(place, client, &key);
    let before = proxy.count();
    once(proxy, op, action);
    op.check(place, client, &key);
    assert_eq!(proxy.count(), before + 1, "{op:?}: the driver's statement was not called");
    assert_eq!(place.stored.row(&key).is_none(), matches!(op, Op::Release), "{op:?} {action:?}");
}

#[test]
fn a_call_that_is_cut_at_any_byte_is_answered_rightly() {
    crate::support::together(OPS.len(), |n| {
        let (place, op) = (place(), OPS[n]);
        let proxy = Proxy::start(crate::support::server().port());
        let client = through(&place, &proxy, &unique());
        disturb(&place, &proxy, &client, op, Action::CutAnswerAt(usize::MAX));
        // Bind, Execute and Sync have less than this; a cut behind the end is one before the last byte.
        let (to, step) = if matches!(op, Op::Acquire) { (350, 7) } else { (130, 1) };
        for at in (0..to).step_by(step) {
            disturb(&place, &proxy, &client, op, Action::CutQueryAt(at));
        }
        for at in 0..=proxy.last_answer() {
            disturb(&place, &proxy, &client, op, Action::CutAnswerAt(at));
        }
        disturb(&place, &proxy, &client, op, Action::CutNow);
    });
}

#[test]
fn a_session_that_forgets_everything_prepares_again() {
    let place = place();
    let proxy = Proxy::start(crate::support::server().port());
    let client = through(&place, &proxy, &unique());
    for _ in 0..3 {
        for op in OPS {
            disturb(&place, &proxy, &client, op, Action::DiscardAll);
        }
    }
}

#[test]
fn a_server_that_does_not_answer_costs_no_more_than_the_calls_own_time() {
    let place = place();
    let proxy = Proxy::start(crate::support::server().port());
    let client = through(&place, &proxy, &unique());
    let key = place.key("a");
    place.stored.write(&key, &id("mine"), 30_000, 1);
    Op::Extend.warm(&place, &client, &key);
    once(&proxy, Op::Extend, Action::SwallowAnswer);
    let start = Instant::now();
    // Its own limit is that of the session, so nothing is stated with it.
    let error = client.extend(&id("mine"), TTL).unwrap_err();
    assert_eq!(error.code(), ErrorCode::NetworkTimeout);
    assert!(error.is_outcome_unknown(), "{error:?}");
    assert!(start.elapsed() < CALL * 3);
    Op::Extend.check(&place, &client, &key);
}

/// New tables of the same names, and a column more: the driver's statements go on with them.
#[test]
fn tables_that_are_made_anew_are_found_by_statements_that_the_driver_prepared() {
    let place = place();
    let key = place.key("a");
    for change in 0..2 {
        for _ in 0..OFTEN {
            let grant = place.hold(&key);
            assert!(matches!(
                place.client.extend(&grant.lock_id, TTL).unwrap(),
                ExtendResult::Extended { .. }
            ));
            assert!(place.client.is_locked(&key).unwrap());
            assert!(place.client.lookup(Lookup::LockId(&grant.lock_id)).unwrap().is_some());
            assert_eq!(place.client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
        }
        let column = "ALTER TABLE syncguard_locks ADD COLUMN note text; \
                      ALTER TABLE syncguard_locks ALTER COLUMN fence TYPE varchar(15)";
        place.stored.run(if change == 0 {
            column
        } else {
            "DROP TABLE syncguard_locks, syncguard_fence_counters"
        });
    }
    assert_eq!(place.client.is_locked(&key).unwrap_err().sqlstate(), Some("42P01"));
    PgLockClient::connect(&place.schema.url()).unwrap();
    let grant = place.hold(&key);
    assert_eq!(grant.fence.get(), 1);
    assert_eq!(place.client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
}

/// The message may have been carried out at the first try, whatever the last one says.
#[test]
fn a_change_whose_answer_is_lost_is_an_unknown_outcome_everywhere() {
    let place = place();
    let proxy = Proxy::start(crate::support::server().port());
    let client = through(&place, &proxy, &unique());
    let (a, b) = (place.key("a"), place.key("b"));
    for (key, lock_id) in [(&a, "a"), (&b, "b")] {
        place.stored.write(key, &id(lock_id), 30_000, 1);
    }
    place.stored.write("old", &id("old"), -5_000, 1);
    let before = [place.stored.row(&a).unwrap(), place.stored.row(&b).unwrap()];
    let (lease_a, lease_b) = (id("a"), id("b"));
    let leases = [
        Renewal::new(&a, &lease_a, syncguard::Fence::new(1).unwrap(), TTL * 2),
        Renewal::new(&b, &lease_b, syncguard::Fence::new(1).unwrap(), TTL * 3),
    ];
    let deadline = Clock::system().now().after(LIMIT);
    assert!(client.renew(&leases, deadline).iter().all(Result::is_ok));

    let cut = |what: &'static str| {
        proxy.on_query(move |sql| if sql.contains(what) { Action::CutAnswerAt(0) } else { Action::Pass });
    };
    cut("sg_renew_");
    let outcomes = client.renew(&leases, deadline);
    for (outcome, ttl) in outcomes.iter().zip([TTL * 2, TTL * 3]) {
        let error = outcome.as_ref().unwrap_err();
        assert_eq!(error.may_be_held_for(), Some(ttl), "{error:?}");
    }
    for (key, before) in [&a, &b].into_iter().zip(before) {
        assert!(place.stored.row(key).unwrap().expires_at_ms > before.expires_at_ms, "carried out");
    }
    cut("WITH old AS");
    let error = client.operator().cleanup_expired(10).unwrap_err();
    assert!(error.is_outcome_unknown() && place.stored.row("old").is_none(), "{error:?}");
    place.stored.run("DROP TABLE syncguard_locks");
    cut("CREATE TABLE");
    assert!(client.setup_schema().unwrap_err().is_outcome_unknown());
    assert_eq!(place.stored.one("SELECT count(*) FROM syncguard_locks", &[]).get::<_, i64>(0), 0);

    // What could not even be sent has certainly changed nothing.
    proxy.network(Network::Refusing);
    let client = through(&place, &proxy, &unique());
    assert!(!client.operator().cleanup_expired(10).unwrap_err().is_outcome_unknown());
    for outcome in client.renew(&leases, deadline) {
        assert!(!outcome.unwrap_err().is_outcome_unknown());
    }
    assert!(!client.setup_schema().unwrap_err().is_outcome_unknown());
}
