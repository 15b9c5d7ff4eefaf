//! The tables of a server, moved by SQL: time passes for them without anybody waiting.
//!
//! The clock of the model stands still between two pauses; the server's runs. `offset_ms` is what the
//! server's clock showed when the two were last set by each other, less what the model's showed. A
//! pause of five seconds moves all times in the rows back by five seconds, less what has gone by
//! already: so the clocks agree again after every pause, and how far they have drifted apart in
//! between is known.

use postgres::{Client, Statement};

use crate::support::{NOW, TestSchema};

/// So far the clocks may drift apart before a history says nothing: nothing is decided within half
/// a second of a lease's edge, so there is a tenth of one to spare.
pub(crate) const MAX_DRIFT_MS: i64 = 400;

/// The history was played so slowly that its decisions prove nothing.
#[derive(Debug)]
pub(crate) struct TooSlow;

pub(crate) struct Tables {
    client: Client,
    now: Statement,
    pass: Statement,
    age: Statement,
    write: Statement,
    remove: Statement,
    count: Statement,
    dump: Statement,
    keys: Vec<String>,
    offset_ms: i64,
}

/// What is stored for one key, in the model's time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) counter: Option<i64>,
    pub(crate) row: Option<StoredRow>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredRow {
    pub(crate) lock_id: String,
    pub(crate) expires_at_ms: i64,
    pub(crate) acquired_at_ms: i64,
    pub(crate) fence: String,
    pub(crate) user_key: String,
}

impl Tables {
    pub(crate) fn new(schema: &TestSchema) -> Self {
        let mut client = schema.client();
        let mut prepare = |sql: &str| client.prepare(sql).unwrap_or_else(|error| panic!("{sql}: {error:?}"));
        let pass = format!(
            "WITH clock AS MATERIALIZED (SELECT {NOW} AS now), moved AS ( \
               UPDATE syncguard_locks AS l SET expires_at_ms = l.expires_at_ms + clock.now - $2, \
                 acquired_at_ms = l.acquired_at_ms + clock.now - $2 FROM clock WHERE l.key = ANY ($1)) \
             SELECT now FROM clock"
        );
        let dump = format!(
            "SELECT c.fence, l.lock_id, l.expires_at_ms, l.acquired_at_ms, l.fence, l.user_key, {NOW} \
             FROM unnest($1::text[]) WITH ORDINALITY AS k (key, place) \
             LEFT JOIN syncguard_locks AS l ON l.key = k.key \
             LEFT JOIN syncguard_fence_counters AS c ON c.fence_key = 'fence:' || k.key ORDER BY k.place"
        );
        Self {
            now: prepare(&format!("SELECT {NOW}")),
            pass: prepare(&pass),
            age: prepare(
                "UPDATE syncguard_locks SET expires_at_ms = $2, \
                 acquired_at_ms = $2 - (expires_at_ms - acquired_at_ms) WHERE key = $1",
            ),
            write: prepare(
                "INSERT INTO syncguard_locks AS l VALUES ($1, $2, $3, $4, lpad($5::int8::text, 15, '0'), $1) \
                 ON CONFLICT (key) DO UPDATE SET lock_id = EXCLUDED.lock_id, fence = EXCLUDED.fence, \
                 expires_at_ms = EXCLUDED.expires_at_ms, acquired_at_ms = EXCLUDED.acquired_at_ms",
            ),
            remove: prepare("DELETE FROM syncguard_locks WHERE key = $1"),
            count: prepare(
                "INSERT INTO syncguard_fence_counters (fence_key, fence) VALUES ('fence:' || $1::text, $2) \
                 ON CONFLICT (fence_key) DO UPDATE SET fence = EXCLUDED.fence",
            ),
            dump: prepare(&dump),
            client,
            keys: Vec::new(),
            offset_ms: 0,
        }
    }

    /// Begins a history on keys of its own, at this time of the model.
    pub(crate) fn begin(&mut self, keys: &[String], model_ms: i64) {
        keys.clone_into(&mut self.keys);
        let now: i64 = self.client.query_one(&self.now, &[]).unwrap().get(0);
        self.offset_ms = now - model_ms;
    }

    /// A time of the server as one of the model.
    pub(crate) fn in_model(&self, server_ms: i64) -> i64 {
        server_ms - self.offset_ms
    }

    /// The model's clock went from one time to another, and so does what the rows see of time.
    pub(crate) fn pass(&mut self, from_ms: i64, to_ms: i64) -> Result<(), TooSlow> {
        let shown_at_end = self.offset_ms + to_ms;
        let now: i64 = self.client.query_one(&self.pass, &[&self.keys, &shown_at_end]).unwrap().get(0);
        self.check(now, from_ms)?;
        self.offset_ms = now - to_ms;
        Ok(())
    }

    pub(crate) fn age(&mut self, key: &str, expires_at_ms: i64) -> bool {
        self.client.execute(&self.age, &[&key, &(expires_at_ms + self.offset_ms)]).unwrap() == 1
    }

    /// A row and a counter as another client leaves them.
    pub(crate) fn write(
        &mut self,
        key: &str,
        lock_id: &str,
        (expires_at_ms, acquired_at_ms): (i64, i64),
        fence: u64,
    ) {
        let fence = i64::try_from(fence).unwrap();
        let times = (expires_at_ms + self.offset_ms, acquired_at_ms + self.offset_ms);
        self.client.execute(&self.write, &[&key, &lock_id, &times.0, &times.1, &fence]).unwrap();
        self.client.execute(&self.count, &[&key, &fence]).unwrap();
    }

    pub(crate) fn remove(&mut self, key: &str) -> bool {
        self.client.execute(&self.remove, &[&key]).unwrap() == 1
    }

    /// Carries out these statements in a transaction. Whether it was committed.
    pub(crate) fn commits(&mut self, statements: &str) -> bool {
        let mut transaction = self.client.transaction().unwrap();
        transaction.batch_execute(statements).is_ok() && transaction.commit().is_ok()
    }

    pub(crate) fn set_counter(&mut self, key: &str, value: u64) {
        self.client.execute(&self.count, &[&key, &i64::try_from(value).unwrap()]).unwrap();
    }

    /// Everything that is stored for the keys of this history, at this time of the model.
    pub(crate) fn dump(&mut self, model_ms: i64) -> Result<Vec<Stored>, TooSlow> {
        let rows = self.client.query(&self.dump, &[&self.keys]).unwrap();
        self.check(rows[0].get(6), model_ms)?;
        let stored = |row: postgres::Row| Stored {
            counter: row.get(0),
            row: row.get::<_, Option<String>>(1).map(|lock_id| StoredRow {
                lock_id,
                expires_at_ms: self.in_model(row.get(2)),
                acquired_at_ms: self.in_model(row.get(3)),
                fence: row.get(4),
                user_key: row.get(5),
            }),
        };
        Ok(rows.into_iter().map(stored).collect())
    }

    /// Forgets all histories, so that the tables stay as small as they are in real life.
    pub(crate) fn clear(&mut self) {
        self.client.batch_execute("TRUNCATE syncguard_locks, syncguard_fence_counters").unwrap();
    }

    fn check(&self, server_ms: i64, model_ms: i64) -> Result<(), TooSlow> {
        let drift = server_ms - (model_ms + self.offset_ms);
        if (0..=MAX_DRIFT_MS).contains(&drift) { Ok(()) } else { Err(TooSlow) }
    }
}
