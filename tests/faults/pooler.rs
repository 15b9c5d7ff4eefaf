//! Through PgBouncer in transaction mode: each transaction may run on another server connection.

use std::ops::ControlFlow::Break;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use syncguard::{
    ExtendResult, Heartbeat, LockBackend, LockOptions, PgLockClient, ReleaseResult, RunOnce, Slot,
};
use syncguard_contract::Harness;

use crate::support::bouncer::Bouncer;
use crate::support::{self, LIMIT, Proxy, TestSchema, together, wait_until};

fn client(bouncer: &Bouncer, schema: &TestSchema) -> PgLockClient {
    PgLockClient::builder().schema(schema.name()).connect(&bouncer.url()).unwrap()
}

/// The contract's way behind the client: straight to the server.
struct Through<'a> {
    client: PgLockClient,
    schema: &'a TestSchema,
}

impl Through<'_> {
    fn sql<T: postgres::types::FromSqlOwned>(
        &self,
        sql: &str,
        args: &[&(dyn postgres::types::ToSql + Sync)],
    ) -> Option<T> {
        self.schema.client().query_opt(sql, args).unwrap().map(|row| row.get(0))
    }
}

impl Harness for Through<'_> {
    fn backend(&self) -> Arc<dyn LockBackend> {
        Arc::new(self.client.clone())
    }

    fn now_ms(&self) -> i64 {
        self.sql("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::int8", &[]).unwrap()
    }

    fn age(&self, key: &str, past_expiry_ms: i64) {
        let to = self.now_ms() - past_expiry_ms;
        let sql = "UPDATE syncguard_locks SET expires_at_ms = $2 WHERE key = $1";
        assert_eq!(self.schema.client().execute(sql, &[&key, &to]).unwrap(), 1, "there is no row to age");
    }

    fn has_row(&self, key: &str) -> bool {
        self.sql::<i32>("SELECT 1 FROM syncguard_locks WHERE key = $1", &[&key]).is_some()
    }

    fn remove_row(&self, key: &str) {
        self.schema.client().execute("DELETE FROM syncguard_locks WHERE key = $1", &[&key]).unwrap();
    }

    fn counter(&self, key: &str) -> Option<u64> {
        let sql = "SELECT fence FROM syncguard_fence_counters WHERE fence_key = 'fence:' || $1";
        self.sql::<i64>(sql, &[&key]).map(i64::unsigned_abs)
    }

    fn set_counter(&self, key: &str, value: u64) {
        let sql = "INSERT INTO syncguard_fence_counters (fence_key, fence) VALUES ('fence:' || $1, $2) \
                   ON CONFLICT (fence_key) DO UPDATE SET fence = EXCLUDED.fence";
        self.schema.client().execute(sql, &[&key, &value.cast_signed()]).unwrap();
    }
}

#[test]
fn the_contract_holds_through_a_transaction_pooler() {
    let bouncer = Bouncer::start(&[("ignore_startup_parameters", "extra_float_digits,options")]);
    let schema = support::schema();
    syncguard_contract::run_all(&Through { client: client(&bouncer, &schema), schema: &schema });
}

#[test]
fn guards_exclude_each_other_and_are_renewed_through_a_transaction_pooler() {
    // It refuses the settings that our sessions would begin with: they are stated in each transaction.
    let bouncer = Bouncer::start(&[("ignore_startup_parameters", "extra_float_digits")]);
    let schema = support::schema();
    let clients: Vec<_> = (0..3).map(|_| client(&bouncer, &schema)).collect();
    let inside = AtomicU32::new(0);
    let often = Heartbeat::Every(Duration::from_millis(200));
    let options = LockOptions::new().ttl(Duration::from_secs(10)).heartbeat(often).timeout(LIMIT);
    together(6, |n| {
        for _ in 0..10 {
            let guard = clients[n % 3].lock_with("k", &options).unwrap();
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
            inside.fetch_sub(1, Ordering::SeqCst);
            guard.release().unwrap();
        }
    });
    let guard = clients[0].lock_with("renewed", &options).unwrap();
    let first = guard.expires_at_ms();
    wait_until(LIMIT, "it is renewed again and again", || guard.expires_at_ms() > first + 1000);
    assert!(guard.is_held());
}

/// A set, a semaphore of two, a leader and a job with an effect a slot, by six threads of three clients.
#[test]
fn sets_permits_leaders_and_runs_keep_their_promises_through_a_transaction_pooler() {
    const ROUNDS: u64 = 5;
    let bouncer = Bouncer::start(&[("ignore_startup_parameters", "extra_float_digits")]);
    let schema = support::schema();
    let clients: Vec<_> = (0..3).map(|_| client(&bouncer, &schema)).collect();
    let mut sql = schema.client();
    sql.batch_execute("CREATE TABLE effects (slot int8 NOT NULL)").unwrap();
    let table = format!("\"{}\".effects", schema.name());
    let options = LockOptions::new().ttl(Duration::from_secs(10)).timeout(LIMIT);
    let inside = [0, 1, 2].map(|_| AtomicU32::new(0));
    let within = |of: usize, most: u32| {
        assert!(inside[of].fetch_add(1, Ordering::SeqCst) < most, "{of}");
        std::thread::yield_now();
        inside[of].fetch_sub(1, Ordering::SeqCst);
    };
    together(6, |n| {
        let client = &clients[n % 3];
        let mut connection = postgres::Client::connect(&bouncer.url(), postgres::NoTls).unwrap();
        for round in 1..=ROUNDS {
            let keys = if n % 2 == 0 { ["a", "b", "c"] } else { ["c", "b", "d"] };
            let set = client.lock_all_with(&keys, &options).unwrap();
            within(0, 1);
            assert_eq!(set.release().unwrap(), ReleaseResult::Released);
            let permit = client.semaphore("a", 2).unwrap().acquire_with(&options).unwrap();
            within(1, 2);
            assert_eq!(permit.release().unwrap(), ReleaseResult::Released);
            let led = client.elect("leader", &options, |term| {
                within(2, 1);
                Break(term.is_held())
            });
            assert!(led.unwrap());
            let mut runs = || {
                client.run_once("job", Slot::number(round), &options, |run| {
                    // A statement by its name may meet another session: simple queries alone.
                    let mut transaction = connection.transaction().map_err(|_| "not begun")?;
                    run.complete_in(&mut transaction).map_err(|_| "refused")?;
                    let effect = format!("INSERT INTO {table} VALUES ({round})");
                    transaction.batch_execute(&effect).map_err(|_| "not written")?;
                    transaction.commit().map_err(|_| "unknown")
                })
            };
            wait_until(LIMIT, "the slot is done", || {
                matches!(runs().unwrap(), RunOnce::Done(()) | RunOnce::AlreadyDone)
            });
        }
    });
    let row = sql.query_one("SELECT count(*), count(DISTINCT slot) FROM effects", &[]).unwrap();
    assert_eq!([row.get::<_, i64>(0), row.get(1)], [ROUNDS.cast_signed(); 2], "one effect a slot");
    let left: i64 = sql.query_one("SELECT count(*) FROM syncguard_locks", &[]).unwrap().get(0);
    assert_eq!(left, 0, "everything was released");
}

/// Calls that are made so often that a session of our own would have the driver prepare them: here no
/// session is one of our own, and each transaction may meet another.
#[test]
fn what_is_called_often_is_not_prepared_by_the_driver_behind_a_transaction_pooler() {
    const TTL: Duration = Duration::from_secs(30);
    for ignored in ["extra_float_digits,options", "extra_float_digits"] {
        let bouncer = Bouncer::start(&[("ignore_startup_parameters", ignored), ("default_pool_size", "2")]);
        let schema = support::schema();
        let proxy = Proxy::start(bouncer.port());
        let url = format!("user=postgres dbname=postgres host=127.0.0.1 port={}", proxy.port());
        let clients: Vec<_> = (0..3)
            .map(|_| PgLockClient::builder().schema(schema.name()).max_connections(1).connect(&url).unwrap())
            .collect();
        // Three connections of three clients take turns on two sessions.
        together(3, |n| {
            let (client, key) = (&clients[n], format!("k{n}"));
            for round in 1..=40 {
                let grant = client.acquire(&key, TTL).unwrap().acquired().expect("the key is free");
                assert_eq!(grant.fence.get(), round);
                assert!(client.acquire(&key, TTL).unwrap().acquired().is_none());
                assert!(client.is_locked(&key).unwrap() && client.owns(&grant.lock_id).unwrap());
                assert!(matches!(client.extend(&grant.lock_id, TTL).unwrap(), ExtendResult::Extended { .. }));
                assert_eq!(client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
                assert!(!client.is_locked(&key).unwrap());
            }
        });
        assert_eq!(proxy.bound(), 0, "{ignored}");
        assert!(proxy.queries() > 3 * 40 * 7, "all of it went this way");
    }
}
