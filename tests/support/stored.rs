//! The stored rows, read and changed by SQL behind the library's back.

use std::sync::{Mutex, MutexGuard, PoisonError};

use postgres::types::ToSql;
use postgres::{Client, Row};

use super::schema::TestSchema;

/// The server's clock as the library reads it.
pub const NOW: &str = "floor(extract(epoch from clock_timestamp()) * 1000)::int8";

/// The two tables with their default names, on a connection of its own.
pub struct Stored {
    client: Mutex<Client>,
}

/// A row of the lock table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRow {
    pub key: String,
    pub lock_id: String,
    pub expires_at_ms: i64,
    pub acquired_at_ms: i64,
    pub fence: String,
    pub user_key: String,
}

impl Stored {
    pub fn new(schema: &TestSchema) -> Self {
        Self { client: Mutex::new(schema.client()) }
    }

    pub fn client(&self) -> MutexGuard<'_, Client> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs statements without parameters.
    ///
    /// # Panics
    /// When one of them fails.
    #[track_caller]
    pub fn run(&self, sql: &str) {
        self.client().batch_execute(sql).unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }

    /// A trigger of somebody's own before these changes (`DELETE ON syncguard_locks`), under this condition (`WHEN (…)`) or
    /// none: what it does with each row.
    #[track_caller]
    pub fn put_in_the_way(&self, changes: &str, condition: &str, body: &str) {
        self.run(&format!(
            "CREATE OR REPLACE FUNCTION in_the_way() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body}; END $$; \
             CREATE TRIGGER in_the_way BEFORE {changes} FOR EACH ROW {condition} EXECUTE FUNCTION in_the_way()"
        ));
    }

    /// The one row that this query answers.
    #[track_caller]
    pub fn one(&self, sql: &str, parameters: &[&(dyn ToSql + Sync)]) -> Row {
        self.client().query_one(sql, parameters).unwrap_or_else(|error| panic!("{sql}: {error:?}"))
    }

    pub fn now_ms(&self) -> i64 {
        self.one(&format!("SELECT {NOW}"), &[]).get(0)
    }

    pub fn row(&self, key: &str) -> Option<StoredRow> {
        let sql = "SELECT key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key FROM syncguard_locks WHERE key = $1";
        let row = self.client().query_opt(sql, &[&key]).expect("the lock table is there");
        row.map(|row| StoredRow {
            key: row.get(0),
            lock_id: row.get(1),
            expires_at_ms: row.get(2),
            acquired_at_ms: row.get(3),
            fence: row.get(4),
            user_key: row.get(5),
        })
    }

    /// Writes a row as another SyncGuard client would, live for `ttl_ms` from now (or dead, if negative).
    pub fn write(&self, key: &str, lock_id: &str, ttl_ms: i64, fence: i64) {
        let sql = format!(
            "INSERT INTO syncguard_locks VALUES ($1, $2, {NOW} + $3, {NOW}, lpad($4::text, 15, '0'), $1) \
             ON CONFLICT (key) DO UPDATE SET lock_id = EXCLUDED.lock_id, expires_at_ms = EXCLUDED.expires_at_ms, \
             acquired_at_ms = EXCLUDED.acquired_at_ms, fence = EXCLUDED.fence"
        );
        self.client()
            .execute(&sql, &[&key, &lock_id, &ttl_ms, &fence.to_string()])
            .expect("a row can be written");
        self.set_counter(key, fence);
    }

    /// Lets the row's lease end so many milliseconds ago.
    #[track_caller]
    pub fn age(&self, key: &str, past_expiry_ms: i64) {
        let sql = format!("UPDATE syncguard_locks SET expires_at_ms = {NOW} - $2 WHERE key = $1");
        assert_eq!(self.client().execute(&sql, &[&key, &past_expiry_ms]).expect("the row can be changed"), 1);
    }

    pub fn remove(&self, key: &str) {
        self.client()
            .execute("DELETE FROM syncguard_locks WHERE key = $1", &[&key])
            .expect("rows can be deleted");
    }

    pub fn counter(&self, key: &str) -> Option<i64> {
        let sql = "SELECT fence FROM syncguard_fence_counters WHERE fence_key = 'fence:' || $1";
        self.client().query_opt(sql, &[&key]).expect("the counters are there").map(|row| row.get(0))
    }

    pub fn set_counter(&self, key: &str, fence: i64) {
        let sql = "INSERT INTO syncguard_fence_counters (fence_key, fence, key_debug) VALUES ('fence:' || $1, $2, $1) \
                   ON CONFLICT (fence_key) DO UPDATE SET fence = EXCLUDED.fence";
        self.client().execute(sql, &[&key, &fence]).expect("a counter can be written");
    }
}

/// A lock id of the right form that is the same for the same word.
pub fn id(word: &str) -> String {
    format!("{word:A<22}")
}
