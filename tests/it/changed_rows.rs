//! Rows and counters that are not as they were left: each of them alone fails a fenced transaction, none is counted on from,
//! and none is lengthened.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};

use postgres::{Client, Transaction};
use syncguard::backend::{Clock, RenewOutcome, Renewal};
use syncguard::{
    CancelToken, FENCE_MAX, Fence, Heartbeat, LockBackend, LockOptions, LostReason, PgLockClient, Result,
    RunOnce, Slot,
};

use crate::support::leases::connect;
use crate::support::script::Scripted;
use crate::support::{LIMIT, TestSchema};

/// A check of a caller's transaction, as long as what it checks is held.
type Check = Box<dyn Fn(&mut Transaction<'_>) -> Result<()>>;

fn options() -> LockOptions {
    LockOptions::new().ttl(LIMIT).heartbeat(Heartbeat::Off)
}

fn client(schema: &TestSchema) -> PgLockClient {
    connect(PgLockClient::builder().create_members_table(true), &schema.url())
}

/// As if nobody had ever held anything.
const NOTHING: &str = "TRUNCATE syncguard_locks, syncguard_fence_counters, syncguard_members";

/// What changes the lease of `k` itself, in words and in SQL; its fence is 1.
const OF_A_ROW: [(&str, &str); 7] = [
    ("the row is gone", "DELETE FROM syncguard_locks WHERE key = 'k'"),
    ("the lease is over", "UPDATE syncguard_locks SET expires_at_ms = 0 WHERE key = 'k'"),
    ("another id", "UPDATE syncguard_locks SET lock_id = 'BBBBBBBBBBBBBBBBBBBBBA' WHERE key = 'k'"),
    ("another fence", "UPDATE syncguard_locks SET fence = '000000000000009' WHERE key = 'k'"),
    ("another key", "UPDATE syncguard_locks SET key = 'x' WHERE key = 'k'"),
    ("a newer fence", "UPDATE syncguard_fence_counters SET fence = 2 WHERE fence_key = 'fence:k'"),
    ("no counter", "DELETE FROM syncguard_fence_counters WHERE fence_key = 'fence:k'"),
];

/// What changes the member of a reader, whose group stays as it is.
const OF_A_MEMBER: [(&str, &str); 6] = [
    ("the member is gone", "DELETE FROM syncguard_members"),
    (
        "the member is another",
        "UPDATE syncguard_members SET lock_id = 'BBBBBBBBBBBBBBBBBBBBBA' WHERE key = 'k'",
    ),
    ("the member's time is over", "UPDATE syncguard_members SET expires_at_ms = 0"),
    ("the member's fence is another", "UPDATE syncguard_members SET fence = '000000000000009'"),
    ("the member's key is another", "UPDATE syncguard_members SET key = 'x'"),
    ("the member is none", "UPDATE syncguard_members SET role = 'n'"),
];

/// What holds `k`, and checks that it does: by the fence alone, a guard, a set, a reader.
fn checks(client: &PgLockClient, which: usize) -> Check {
    match which {
        0 => {
            let fence: Fence = client.lock_with("k", &options()).unwrap().leak().fence;
            let client = client.clone();
            Box::new(move |transaction| client.assert_fence(transaction, "k", fence))
        }
        1 => {
            let guard = client.lock_with("k", &options()).unwrap();
            Box::new(move |transaction| guard.fence_transaction(transaction))
        }
        2 => {
            let guard = client.lock_all_with(&["a", "k", "z"], &options()).unwrap();
            Box::new(move |transaction| guard.fence_transaction(transaction))
        }
        _ => {
            let guard = client.read_lock_with("k", &options()).unwrap();
            Box::new(move |transaction| guard.fence_transaction(transaction))
        }
    }
}

fn passes(sql: &mut Client, check: &Check) -> bool {
    let mut transaction = sql.transaction().unwrap();
    let passes = check(&mut transaction).is_ok();
    transaction.rollback().unwrap();
    passes
}

#[test]
fn a_fenced_transaction_fails_by_any_part_that_differs() {
    for (which, who) in ["a fence", "a guard", "a set", "a reader"].iter().enumerate() {
        let schema = crate::support::schema();
        let (client, mut sql) = (client(&schema), schema.client());
        let of_a_member = if which == 3 { &OF_A_MEMBER[..] } else { &[] };
        for (what, change) in OF_A_ROW.iter().chain(of_a_member) {
            // By the fence alone nothing is said of the id.
            if which == 0 && *what == "another id" {
                continue;
            }
            sql.batch_execute(NOTHING).unwrap();
            // Live leases of other keys with the same fence, as nearly every key has them.
            let _others = client.lock_all_with(&["other", "another"], &options()).unwrap();
            let _reads = client.read_lock_with("read", &options()).unwrap();
            let check = checks(&client, which);
            assert!(passes(&mut sql, &check), "{who}, before");
            let changed = sql.execute(*change, &[]).unwrap();
            assert!(changed > 0, "{who}: {what}");
            assert!(!passes(&mut sql, &check), "{who}: {what}");
        }
    }
}

/// One attempt of each kind of grant. Whether it was granted.
type Taken = fn(&PgLockClient) -> Result<bool>;

const GRANTS: [(&str, Taken); 5] = [
    ("a lock", |client| Ok(client.try_lock_with("k", &options())?.is_some())),
    ("a set", |client| Ok(client.try_lock_all_with(&["a", "k", "z"], &options())?.is_some())),
    ("a permit", |client| Ok(client.semaphore("k", 1)?.try_acquire_with(&options())?.is_some())),
    ("a reader", |client| Ok(client.try_read_lock_with("k", &options())?.is_some())),
    ("a run", |client| {
        // Another one each time, which a clock might not be.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let slot = Slot::number(NEXT.fetch_add(1, Ordering::Relaxed));
        let ran = client.run_once("k", slot, &options(), |_run| Ok::<_, Infallible>(()))?;
        Ok(ran == RunOnce::Done(()))
    }),
];

#[test]
fn no_kind_of_grant_counts_on_from_a_counter_that_nobody_can_have_counted_to() {
    let max = i64::try_from(FENCE_MAX).unwrap();
    for (who, grant) in GRANTS {
        let schema = crate::support::schema();
        let (client, mut sql) = (client(&schema), schema.client());
        // With a token in two messages.
        let both = [client.clone(), client.cancellable(&CancelToken::new())];
        for (expired, client) in [(false, &both[0]), (true, &both[0]), (false, &both[1]), (true, &both[1])] {
            for fence in [-5, max, i64::MAX] {
                sql.batch_execute(NOTHING).unwrap();
                assert!(grant(client).unwrap(), "{who}");
                let counters =
                    "UPDATE syncguard_fence_counters SET fence = $1 WHERE fence_key !~ '(done|number)$'";
                assert!(sql.execute(counters, &[&fence]).unwrap() > 0);
                if expired {
                    let row = "INSERT INTO syncguard_locks (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key) \
                               SELECT substr(fence_key, 7), 'forged' || lpad(row_number() OVER ()::text, 16, '0'), 0, 0, \
                                 '000000000000001', substr(fence_key, 7) \
                               FROM syncguard_fence_counters WHERE fence_key !~ '(done|number)$'";
                    sql.execute(row, &[]).unwrap();
                }
                let answer = grant(client);
                assert!(answer.is_err(), "{who}, over a dead row: {expired}, from {fence}: {answer:?}");
                let moved = "SELECT count(*) FROM syncguard_fence_counters WHERE fence_key !~ '(done|number)$' AND fence <> $1";
                let moved: i64 = sql.query_one(moved, &[&fence]).unwrap().get(0);
                assert_eq!(moved, 0, "{who}, over a dead row: {expired}, from {fence}");
            }
        }
    }
}

/// The statement itself, as it may come late: the client would ask again.
#[test]
fn an_extend_changes_nothing_for_another_fence_and_shortens_only_the_version_that_it_names() {
    let schema = crate::support::schema();
    let (client, mut sql) = (client(&schema), schema.client());
    let lease = client.lock_with("k", &options()).unwrap().leak();
    let mut late = Scripted::new(&schema);
    let mut row = || {
        let row = sql.query_one("SELECT expires_at_ms, xmin::text FROM syncguard_locks", &[]).unwrap();
        (row.get::<_, i64>(0), row.get::<_, String>(1))
    };
    let (end, version) = row();
    let mut extend = |ttl_ms: i64, fence: &str, version: &str| {
        let literal = |text: &str| format!("'{text}'");
        let arguments = [literal(&lease.lock_id), ttl_ms.to_string(), literal(fence), literal(version)];
        late.execute("extend", &arguments.each_ref().map(String::as_str));
    };
    let fence = lease.fence.to_string();
    extend(3_600_000, "000000000000009", &version);
    assert_eq!(row(), (end, version.clone()), "another holder's");
    extend(1_000, &fence, "1");
    let (kept, newer) = row();
    assert_eq!(kept, end, "a late one");
    extend(1_000, &fence, &version);
    assert_eq!(row().0, end, "one that names what was replaced since");
    let newest = row().1;
    assert_ne!(newer, newest);
    extend(1_000, &fence, &newest);
    assert!(row().0 < end, "the one that names what it replaces");

    // In two messages: the first has found the row and locked it.
    let (end, newest) = row();
    let mut update = |version: &str| {
        let literal = |text: &str| format!("'{text}'");
        late.execute("update", &[&literal("k"), &literal(&lease.lock_id), "500", &literal(version)]);
    };
    update(&version);
    let (kept, newer) = row();
    assert_eq!(kept, end, "one that names what was replaced since");
    assert_ne!(newest, newer);
    update(&newer);
    assert!(row().0 < end, "the one that names what it replaces");
}

#[test]
fn a_reader_whose_member_or_group_is_over_is_lost_and_its_renewal_moves_neither() {
    for table in ["syncguard_members", "syncguard_locks"] {
        let schema = crate::support::schema();
        let (client, mut sql) = (client(&schema), schema.client());
        let lease = client.read_lock_with("k", &options()).unwrap().leak();
        sql.execute(&format!("UPDATE {table} SET expires_at_ms = 0"), &[]).unwrap();
        let mut ends = || -> (i64, i64) {
            let ends = "SELECT m.expires_at_ms, l.expires_at_ms FROM syncguard_members AS m CROSS JOIN syncguard_locks AS l";
            let row = sql.query_one(ends, &[]).unwrap();
            (row.get(0), row.get(1))
        };
        let before = ends();
        let renewal = Renewal::new("k", &lease.lock_id, lease.fence, LIMIT * 2).of_reader();
        let answer = client.renew(&[renewal], Clock::system().now().after(LIMIT)).remove(0).unwrap();
        assert_eq!(answer, RenewOutcome::Lost(LostReason::Expired), "{table}");
        assert_eq!(ends(), before, "{table}");
    }
}

#[test]
fn a_renewal_of_a_reader_shortens_only_the_version_that_it_names() {
    let schema = crate::support::schema();
    let client = client(&schema);
    let lease = client.read_lock_with("k", &options()).unwrap().leak();
    let renew = |ttl, version| {
        let renewal = Renewal::new("k", &lease.lock_id, lease.fence, ttl).of_reader().with_version(version);
        match client.renew(&[renewal], Clock::system().now().after(LIMIT)).remove(0).unwrap() {
            RenewOutcome::Renewed { expires_at_ms, version } => (expires_at_ms, version),
            other => panic!("{other:?}"),
        }
    };
    let (long, first) = renew(LIMIT * 2, None);
    let (kept, second) = renew(LIMIT / 2, None);
    let (still, third) = renew(LIMIT / 2, first);
    assert_eq!((kept, still), (long, long), "a late copy knows no version, or an older one");
    assert!(first != second && second != third);
    assert!(renew(LIMIT / 2, third).0 < long);
}
