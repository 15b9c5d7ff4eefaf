//! The same lock one statement at a time, as other SyncGuard clients take it: eight round trips to
//! acquire and five to release. Prepared, through this driver, and without checks or retries, which
//! makes it the most that such a client can reach here.

use postgres::{Client, NoTls, Statement};

pub(crate) struct Stepwise {
    client: Client,
    queue: Statement,
    clock: Statement,
    row: Statement,
    counter: Statement,
    raise: Statement,
    upsert: Statement,
    by_id: Statement,
    delete: Statement,
}

impl Stepwise {
    /// On the tables that a client has made.
    pub(crate) fn new(url: &str) -> Self {
        let mut client = Client::connect(url, NoTls).unwrap();
        let mut prepare = |sql: &str| client.prepare(sql).unwrap();
        Self {
            queue: prepare("SELECT FROM pg_advisory_xact_lock(hashtext($1))"),
            clock: prepare("SELECT floor(EXTRACT(EPOCH FROM NOW()) * 1000)::int8"),
            row: prepare("SELECT expires_at_ms FROM syncguard_locks WHERE key = $1"),
            counter: prepare(
                "INSERT INTO syncguard_fence_counters (fence_key, fence, key_debug) VALUES ($1, 0, $2) \
                 ON CONFLICT (fence_key) DO NOTHING",
            ),
            raise: prepare(
                "UPDATE syncguard_fence_counters SET fence = fence + 1 WHERE fence_key = $1 RETURNING fence",
            ),
            upsert: prepare(
                "INSERT INTO syncguard_locks (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key) \
                 VALUES ($1, $2, $3, $4, $5, $1) ON CONFLICT (key) DO UPDATE SET lock_id = EXCLUDED.lock_id, \
                 expires_at_ms = EXCLUDED.expires_at_ms, acquired_at_ms = EXCLUDED.acquired_at_ms, \
                 fence = EXCLUDED.fence, user_key = EXCLUDED.user_key",
            ),
            by_id: prepare("SELECT key, expires_at_ms FROM syncguard_locks WHERE lock_id = $1 FOR UPDATE"),
            delete: prepare("DELETE FROM syncguard_locks WHERE lock_id = $1"),
            client,
        }
    }

    pub(crate) fn cycle(&mut self, key: &str) {
        let fence_key = format!("fence:{key}");
        self.client.batch_execute("BEGIN").unwrap();
        self.client.query(&self.queue, &[&key]).unwrap();
        let now: i64 = self.client.query_one(&self.clock, &[]).unwrap().get(0);
        assert!(self.client.query_opt(&self.row, &[&key]).unwrap().is_none());
        self.client.execute(&self.counter, &[&fence_key, &key]).unwrap();
        let fence: i64 = self.client.query_one(&self.raise, &[&fence_key]).unwrap().get(0);
        let (expiry, fence) = (now + 60_000, format!("{fence:015}"));
        self.client.execute(&self.upsert, &[&key, &key, &expiry, &now, &fence]).unwrap();
        self.client.batch_execute("COMMIT").unwrap();

        self.client.batch_execute("BEGIN").unwrap();
        let now: i64 = self.client.query_one(&self.clock, &[]).unwrap().get(0);
        let row = self.client.query_one(&self.by_id, &[&key]).unwrap();
        assert!(row.get::<_, i64>(1) > now);
        self.client.execute(&self.delete, &[&key]).unwrap();
        self.client.batch_execute("COMMIT").unwrap();
    }
}
