//! Calls by the driver's own statements are transactions of one statement, which says for itself how
//! durable it is to be.

use super::*;
use crate::support::cluster::signal;
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
        for _ in 0..OFTEN {
            let grant = take(&spare);
            assert!(matches!(client.extend(&grant.lock_id, TTL).unwrap(), ExtendResult::Extended { .. }));
            assert_eq!(client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
        }
        let to_free = take(&freed);
        let mut grant = None;
        if matches!(last, Last::Extend) {
            grant = Some(take(&granted));
        }
        let before = (place.stored.counter(&spare), place.stored.row(&freed));

        let still = Still::new(&server);
        let bound = proxy.bound();
        let expires_at_ms = match &grant {
            Some(grant) => match client.extend(&grant.lock_id, TTL * 100).unwrap() {
                ExtendResult::Extended { expires_at_ms } => expires_at_ms,
                ExtendResult::NotHeld => panic!("it is held"),
            },
            None => {
                let new = take(&granted);
                let expires_at_ms = new.expires_at_ms;
                grant = Some(new);
                expires_at_ms
            }
        };
        assert_eq!(client.release(&to_free.lock_id).unwrap(), ReleaseResult::Released);
        assert_eq!(proxy.bound() - bound, 2, "both were called by the driver's own statements");
        still.crash();

        let (grant, stored) = (grant.unwrap(), support::Stored::new(&place.schema));
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
