//! The least that a lock can cost with this driver: one durable prepared upsert, and one prepared
//! delete whose commit does not wait for the disk. A connection for each: neither sets anything.

use postgres::{Client, NoTls, Statement};

pub(crate) const TABLE: &str = "CREATE TABLE IF NOT EXISTS floor (key TEXT PRIMARY KEY, lock_id TEXT NOT NULL, \
     expires_at_ms BIGINT NOT NULL, acquired_at_ms BIGINT NOT NULL, fence TEXT NOT NULL, user_key TEXT NOT NULL); \
     CREATE UNIQUE INDEX IF NOT EXISTS floor_id ON floor (lock_id); \
     CREATE INDEX IF NOT EXISTS floor_expires ON floor (expires_at_ms)";

pub(crate) struct Floor {
    durable: Client,
    relaxed: Client,
    upsert: Statement,
    update: Statement,
    select: Statement,
    durable_delete: Statement,
    delete: Statement,
}

impl Floor {
    pub(crate) fn new(url: &str) -> Self {
        let mut durable = Client::connect(url, NoTls).unwrap();
        let mut relaxed = Client::connect(url, NoTls).unwrap();
        relaxed.batch_execute("SET synchronous_commit TO off").unwrap();
        for client in [&mut durable, &mut relaxed] {
            client.batch_execute("SET enable_seqscan TO off").unwrap();
        }
        let delete = "DELETE FROM floor WHERE lock_id = $1 RETURNING key";
        Self {
            upsert: durable
                .prepare(
                    "INSERT INTO floor AS l VALUES ($1, $2, $3, 1, '000000000000001', $1) ON CONFLICT (key) DO UPDATE \
                     SET lock_id = EXCLUDED.lock_id, expires_at_ms = EXCLUDED.expires_at_ms WHERE l.expires_at_ms < 0 \
                     RETURNING expires_at_ms",
                )
                .unwrap(),
            update: durable
                .prepare("UPDATE floor SET expires_at_ms = $2 WHERE lock_id = $1 RETURNING expires_at_ms")
                .unwrap(),
            select: durable.prepare("SELECT * FROM floor WHERE key = $1").unwrap(),
            durable_delete: durable.prepare(delete).unwrap(),
            delete: relaxed.prepare(delete).unwrap(),
            durable,
            relaxed,
        }
    }

    pub(crate) fn cycle(&mut self, key: &str) {
        self.upsert(key);
        self.relaxed_delete(key);
    }

    pub(crate) fn durable_cycle(&mut self, key: &str) {
        self.upsert(key);
        self.durable.query(&self.durable_delete, &[&key]).unwrap();
    }

    pub(crate) fn relaxed_delete(&mut self, key: &str) {
        self.relaxed.query(&self.delete, &[&key]).unwrap();
    }

    pub(crate) fn upsert(&mut self, key: &str) {
        self.durable.query(&self.upsert, &[&key, &key, &now_ms()]).unwrap();
    }

    pub(crate) fn update(&mut self, key: &str) {
        self.durable.query(&self.update, &[&key, &now_ms()]).unwrap();
    }

    pub(crate) fn select(&mut self, key: &str) {
        self.durable.query(&self.select, &[&key]).unwrap();
    }
}

/// An expiry as it would be: the index on it grows at one end.
fn now_ms() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    i64::try_from(now.as_millis()).unwrap()
}
