//! Calls by the driver's own statements are transactions of one statement, which says for itself how
//! durable it is to be.

use super::*;
use crate::support::cluster::signal;
use crate::support::standby::signal_waits_for_a_standby;
use crate::support::{Config, Server, Stop};

/// A server on which nothing but a commit that waits for it writes the log: the processes that would do so
/// in the background stand still. Ending it at once loses whatever was not flushed.
struct Still<'a> {
    server: &'a Server,
    writers: Vec<u32>,
}

impl<'a> Still<'a> {
    fn new(server: &'a Server) -> Self {
        let sql = "SELECT pid FROM pg_stat_activity WHERE backend_type IN ('walwriter', 'background writer', 'checkpointer')";
        let rows = server.client().query(sql, &[]).unwrap();
        let pid = |row: &postgres::Row| u32::try_from(row.get::<_, i32>(0)).unwrap();
        let writers: Vec<u32> = rows.iter().map(pid).collect();
        assert_eq!(writers.len(), 3);
        writers.iter().for_each(|pid| signal(*pid, "STOP"));
        Self { server, writers }
    }

    /// Has the server crash, and starts it again.
    fn crash(self) {
        let server = self.server;
        // Who stands still does not die of the server's own signal.
        self.writers.iter().for_each(|pid| signal(*pid, "KILL"));
        server.stop(Stop::Immediate);
        server.start_again();
    }
}

impl Drop for Still<'_> {
    fn drop(&mut self) {
        self.writers.iter().for_each(|pid| signal(*pid, "KILL"));
    }
}

/// What is done last before a release and the crash.
#[derive(Clone, Copy, Debug)]
enum Last {
    Acquire,
    Extend,
}

#[test]
fn what_the_driver_calls_is_as_durable_as_anything_else_a_grant_survives_a_crash_and_a_release_need_not() {
    // Less than any acquire may have.
    let server = Server::start(&Config::new().set("synchronous_commit", "off").set("autovacuum", "off"));
    for (round, last) in [Last::Acquire, Last::Extend].into_iter().enumerate() {
        let place = Place::new(server.schema());
        let proxy = Proxy::start(server.port());
        let client = through(&place, &proxy, &unique());
        let [spare, granted, freed] = ["spare", "granted", "freed"].map(|word| place.key(word));
        let take = |key: &str| client.acquire(key, TTL).unwrap().acquired().expect("the key is free");
        settle(&client, &spare);
        let to_free = take(&freed);
        let mut grant = None;
        if matches!(last, Last::Extend) {
            grant = Some(take(&granted));
        }
        let before = (place.stored.counter(&spare), place.stored.row(&freed));

        let still = Still::new(&server);
        let bound = proxy.bound();
        let expires_at_ms = if let Some(grant) = &grant {
            match client.extend(&grant.lock_id, TTL * 100).unwrap() {
                ExtendResult::Extended { expires_at_ms } => expires_at_ms,
                ExtendResult::NotHeld => panic!("it is held"),
            }
        } else {
            grant.insert(take(&granted)).expires_at_ms
        };
        assert_eq!(client.release(&to_free.lock_id).unwrap(), ReleaseResult::Released);
        assert_eq!(proxy.bound() - bound, 2, "both were called by the driver's own statements");
        still.crash();

        let (grant, stored) = (grant.unwrap(), crate::support::Stored::new(&place.schema));
        let row =
            stored.row(&granted).unwrap_or_else(|| panic!("round {round}, {last:?}: the grant is lost"));
        assert_eq!((&row.lock_id, row.fence), (&grant.lock_id, grant.fence.to_string()), "{last:?}");
        assert_eq!(row.expires_at_ms, expires_at_ms, "{last:?} was answered and is lost");
        assert_eq!(stored.counter(&granted), Some(1), "{last:?}");
        // Nothing was written since, and what was flushed was flushed by the call itself.
        assert_eq!(
            (stored.counter(&spare), stored.row(&freed)),
            before,
            "{last:?}: a release waited for the disk"
        );
    }
}

/// So often that the driver has prepared what is acquired, extended and released with.
fn settle(client: &PgLockClient, spare: &str) {
    for _ in 0..OFTEN {
        let grant = client.acquire(spare, TTL).unwrap().acquired().expect("the key is free");
        assert!(matches!(client.extend(&grant.lock_id, TTL).unwrap(), ExtendResult::Extended { .. }));
        assert_eq!(client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
    }
}

/// The rows of an answer come before its transaction is committed, and that may fail.
#[test]
fn what_fails_at_its_commit_has_changed_nothing_although_its_rows_were_sent() {
    let place = place();
    let proxy = Proxy::start(crate::support::server().port());
    let client = through(&place, &proxy, &unique());
    let [spare, a] = ["spare", "a"].map(|word| place.key(word));
    settle(&client, &spare);
    let held = client.acquire(&spare, TTL).unwrap().acquired().expect("the key is free");
    let before = place.stored.row(&spare);
    place.stored.run(
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'at the very end'; END $$; \
         CREATE CONSTRAINT TRIGGER fail AFTER INSERT OR UPDATE OR DELETE ON syncguard_locks \
           DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail()",
    );
    let bound = proxy.bound();
    let errors = [
        client.acquire(&a, TTL).expect_err("its commit fails"),
        client.extend(&held.lock_id, TTL * 2).expect_err("its commit fails"),
        client.release(&held.lock_id).expect_err("its commit fails"),
    ];
    assert_eq!(proxy.bound() - bound, 3, "all were called by the driver's own statements");
    for error in errors {
        assert_eq!(error.sqlstate(), Some("P0001"), "{error:?}");
        assert!(!error.is_outcome_unknown(), "{error:?}");
    }
    assert_eq!((place.stored.row(&a), place.stored.counter(&a)), (None, None));
    assert_eq!(place.stored.row(&spare), before);
    place.stored.run("DROP TRIGGER fail ON syncguard_locks");
    assert_eq!(client.acquire(&a, TTL).unwrap().acquired().expect("the key is free").fence.get(), 1);
    assert_eq!(client.release(&held.lock_id).unwrap(), ReleaseResult::Released);
}

/// The server answers success, with a warning, if somebody cancels its wait for a standby.
#[test]
fn a_cancelled_wait_for_a_standby_is_no_confirmation_of_what_the_driver_calls() {
    let server = Server::start(&Config::new());
    let place = Place::new(server.schema());
    let proxy = Proxy::start(server.port());
    let config: postgres::Config = proxy.url(&place.schema.url()).parse().unwrap();
    let builder = PgLockClient::builder().auto_create_tables(false).operation_timeout(Duration::from_secs(3));
    let client = builder.connect_with(config, NoTls).unwrap();
    settle(&client, &place.key("spare"));
    server.configure("synchronous_standby_names", "nobody");
    let (bound, mut sql) = (proxy.bound(), server.client());
    let result =
        signal_waits_for_a_standby(&mut sql, "pg_cancel_backend", || client.acquire(&place.key("a"), TTL));
    // Before anything can fail: the schema is dropped then, and that would wait as well.
    server.configure("synchronous_standby_names", "");
    // The worker may be letting go of it already.
    assert!(proxy.bound() > bound, "it was called by the driver's own statement");
    let error = result.expect_err("no standby has it");
    assert!(error.is_outcome_unknown(), "{error:?}");
}
