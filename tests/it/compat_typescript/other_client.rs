//! What the TypeScript client sends, statement by statement.

use postgres::{Client, Transaction};
use syncguard::is_live;

use crate::support::Place;

/// The other client's acquire, statement by statement.
pub(super) struct TheirAcquire {
    pub(super) client: Client,
    key: String,
    lock_id: String,
    ttl_ms: i64,
    now: i64,
    pub(super) fence: i64,
    pub(super) go: bool,
    over: bool,
    pub(super) won: bool,
}

/// How many statements its acquire has.
pub(super) const STEPS: usize = 8;

impl TheirAcquire {
    pub(super) fn new(place: &Place, key: &str, lock_id: &str) -> Self {
        let (key, lock_id) = (key.to_owned(), lock_id.to_owned());
        Self {
            client: place.schema.client(),
            key,
            lock_id,
            ttl_ms: 30_000,
            now: 0,
            fence: 0,
            go: false,
            over: false,
            won: false,
        }
    }

    pub(super) fn step(&mut self, n: usize) {
        if self.over {
            return;
        }
        let fence_key = format!("fence:{}", self.key);
        match n {
            0 => self.client.batch_execute("BEGIN").unwrap(),
            1 => drop(self.client.query("SELECT pg_advisory_xact_lock(hashtext($1))", &[&self.key]).unwrap()),
            2 => {
                let sql = "SELECT floor(EXTRACT(EPOCH FROM NOW()) * 1000)::int8";
                self.now = self.client.query_one(sql, &[]).unwrap().get(0);
            }
            3 => {
                let sql = "SELECT expires_at_ms FROM syncguard_locks WHERE key = $1";
                let row = self.client.query_opt(sql, &[&self.key]).unwrap();
                self.go = row.is_none_or(|row| !is_live(row.get(0), self.now, 1000));
                if !self.go {
                    self.client.batch_execute("COMMIT").unwrap();
                    self.over = true;
                }
            }
            4 => {
                let sql = "INSERT INTO syncguard_fence_counters (fence_key, fence, key_debug) VALUES ($1, 0, $2) \
                           ON CONFLICT (fence_key) DO NOTHING";
                self.client.execute(sql, &[&fence_key, &self.key]).unwrap();
            }
            5 => {
                let sql = "UPDATE syncguard_fence_counters SET fence = fence + 1 WHERE fence_key = $1 RETURNING fence";
                self.fence = self.client.query_one(sql, &[&fence_key]).unwrap().get(0);
            }
            6 => {
                let sql = "INSERT INTO syncguard_locks (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key) \
                           VALUES ($1, $2, $3, $4, $5, $1) ON CONFLICT (key) DO UPDATE SET lock_id = EXCLUDED.lock_id, \
                           expires_at_ms = EXCLUDED.expires_at_ms, acquired_at_ms = EXCLUDED.acquired_at_ms, \
                           fence = EXCLUDED.fence, user_key = EXCLUDED.user_key";
                let (expires, fence) = (self.now + self.ttl_ms, format!("{:015}", self.fence));
                self.client.execute(sql, &[&self.key, &self.lock_id, &expires, &self.now, &fence]).unwrap();
            }
            _ => {
                self.client.batch_execute("COMMIT").unwrap();
                self.over = true;
                self.won = true;
            }
        }
    }

    pub(super) fn acquire(&mut self) -> bool {
        (0..STEPS).for_each(|n| self.step(n));
        self.won
    }
}

/// Its extend and its release: the row is read by its id, judged by the clock of BEGIN, and written
/// under a row lock. `write` gets the clock.
fn change(client: &mut Client, lock_id: &str, write: impl FnOnce(&mut Transaction<'_>, i64)) -> bool {
    let mut tx = client.transaction().unwrap();
    let now: i64 = tx.query_one("SELECT floor(EXTRACT(EPOCH FROM NOW()) * 1000)::int8", &[]).unwrap().get(0);
    let sql = "SELECT key, expires_at_ms, lock_id FROM syncguard_locks WHERE lock_id = $1 FOR UPDATE";
    let row = tx.query_opt(sql, &[&lock_id]).unwrap();
    let live = row.is_some_and(|row| row.get::<_, String>(2) == lock_id && is_live(row.get(1), now, 1000));
    if live {
        write(&mut tx, now);
    }
    tx.commit().unwrap();
    live
}

pub(super) fn extend(client: &mut Client, lock_id: &str, ttl_ms: i64) -> bool {
    change(client, lock_id, |tx, now| {
        let sql = "UPDATE syncguard_locks SET expires_at_ms = $2 WHERE lock_id = $1";
        tx.execute(sql, &[&lock_id, &(now + ttl_ms)]).unwrap();
    })
}

pub(super) fn release(client: &mut Client, lock_id: &str) -> bool {
    change(client, lock_id, |tx, _| {
        tx.execute("DELETE FROM syncguard_locks WHERE lock_id = $1", &[&lock_id]).unwrap();
    })
}
