//! Leases seen from the side: the rows in the tables, forged rows, and witnesses that believe nobody.

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, Scope, ScopedJoinHandle};

use postgres::{Client, NoTls};
use syncguard::{
    ErrorCode, LockEvent, LockGuard, Operation, PgLockClient, PgLockClientBuilder, TelemetryOptions,
};

use super::schema::TestSchema;
use super::wait::{LIMIT, wait_until};

/// A row of the lock table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub lock_id: String,
    pub expires_at_ms: i64,
    pub acquired_at_ms: i64,
    pub fence: String,
    pub user_key: String,
}

/// A client on a schema of its own, over TCP, with the defaults.
pub fn client(schema: &TestSchema) -> PgLockClient {
    connect(PgLockClient::builder(), &schema.url())
}

/// A client with other settings.
#[track_caller]
pub fn connect(builder: PgLockClientBuilder, url: &str) -> PgLockClient {
    builder.connect(url).unwrap_or_else(|error| panic!("the client cannot be built: {error:?}"))
}

/// A lock id of the right form that nobody has been given.
pub fn forged_id(n: usize) -> String {
    format!("forged{n:016}")
}

pub fn row(observer: &mut Client, key: &str) -> Option<Row> {
    let sql =
        "SELECT lock_id, expires_at_ms, acquired_at_ms, fence, user_key FROM syncguard_locks WHERE key = $1";
    observer.query_opt(sql, &[&key]).expect("the lock table can be read").map(|row| Row {
        lock_id: row.get(0),
        expires_at_ms: row.get(1),
        acquired_at_ms: row.get(2),
        fence: row.get(3),
        user_key: row.get(4),
    })
}

/// When the key's lease ends, by the server's clock.
pub fn expiry(observer: &mut Client, key: &str) -> i64 {
    row(observer, key).expect("the key has a row").expires_at_ms
}

/// The value of a key's fence counter.
pub fn counter(observer: &mut Client, key: &str) -> Option<i64> {
    let sql = "SELECT fence FROM syncguard_fence_counters WHERE fence_key = 'fence:' || $1";
    observer.query_opt(sql, &[&key]).expect("the counters can be read").map(|row| row.get(0))
}

pub fn set_counter(observer: &mut Client, key: &str, fence: i64) {
    let sql = "INSERT INTO syncguard_fence_counters (fence_key, fence) VALUES ('fence:' || $1, $2) \
               ON CONFLICT (fence_key) DO UPDATE SET fence = EXCLUDED.fence";
    observer.execute(sql, &[&key, &fence]).expect("the counters can be written");
}

/// Writes a row that ends `ends_in_ms` from now by the server's clock, with the key's next fence.
pub fn forge(observer: &mut Client, key: &str, lock_id: &str, ends_in_ms: i64) {
    let sql = "WITH c AS (INSERT INTO syncguard_fence_counters AS c (fence_key, fence) VALUES ('fence:' || $1, 1) \
                 ON CONFLICT (fence_key) DO UPDATE SET fence = c.fence + 1 RETURNING fence), \
               t AS (SELECT floor(EXTRACT(EPOCH FROM clock_timestamp()) * 1000)::int8 AS now) \
               INSERT INTO syncguard_locks (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key) \
               SELECT $1, $2, t.now + $3, t.now, lpad(c.fence::text, 15, '0'), $1 FROM c, t \
               ON CONFLICT (key) DO UPDATE SET lock_id = EXCLUDED.lock_id, expires_at_ms = EXCLUDED.expires_at_ms, \
                 acquired_at_ms = EXCLUDED.acquired_at_ms, fence = EXCLUDED.fence";
    observer.execute(sql, &[&key, &lock_id, &ends_in_ms]).expect("the lock table can be written");
}

/// Deletes a key's row behind its holder's back.
pub fn delete_row(observer: &mut Client, key: &str) -> u64 {
    observer.execute("DELETE FROM syncguard_locks WHERE key = $1", &[&key]).expect("it can be written")
}

/// The server's clock in Unix milliseconds.
pub fn server_now_ms(observer: &mut Client) -> i64 {
    let sql = "SELECT floor(EXTRACT(EPOCH FROM clock_timestamp()) * 1000)::int8";
    observer.query_one(sql, &[]).expect("the server answers").get(0)
}

/// Until the key's row is gone.
#[track_caller]
pub fn wait_until_released(observer: &mut Client, key: &str) {
    wait_until(LIMIT, "the key's row is gone", || row(observer, key).is_none());
}

/// Until the server's row of this guard was renewed.
#[track_caller]
pub fn wait_until_renewed(observer: &mut Client, guard: &LockGuard) {
    let before = expiry(observer, guard.key());
    wait_until(LIMIT, "the guard is renewed", || expiry(observer, guard.key()) > before);
}

/// The URL with an application name, by which its sessions are found in `pg_stat_activity`.
pub fn named(url: &str, application_name: &str) -> String {
    format!("{url}&application_name={application_name}")
}

/// How many sessions have this application name.
pub fn sessions(observer: &mut Client, application_name: &str) -> i64 {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1";
    observer.query_one(sql, &[&application_name]).expect("the server answers").get(0)
}

/// The table that this backend waits for; for a test that must know where it stopped a call.
pub fn waits_for_table(observer: &mut Client, pid: i32) -> Option<String> {
    let sql = "SELECT c.relname::text FROM pg_locks l JOIN pg_class c ON c.oid = l.relation \
               WHERE l.pid = $1 AND NOT l.granted";
    observer.query_opt(sql, &[&pid]).expect("the server answers").map(|row| row.get(0))
}

/// The threads of this process whose names begin so (Linux keeps 15 characters of them).
pub fn threads_named(prefix: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux lists a process's threads");
    let name =
        |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    tasks.flatten().map(name).filter(|name| name.starts_with(prefix)).count()
}

/// Every operation that a client reported.
#[derive(Clone, Debug, Default)]
pub struct Events(Arc<Mutex<Vec<LockEvent>>>);

impl Events {
    /// What to give to the builder, so that they arrive here.
    pub fn options(&self) -> TelemetryOptions {
        let sink = self.clone();
        TelemetryOptions::new(move |event| sink.list().push(event.clone()))
    }

    /// How many operations of this kind there were.
    pub fn count(&self, operation: Operation) -> usize {
        self.list().iter().filter(|event| event.operation == operation).count()
    }

    /// How many of them ended with this error.
    pub fn failed(&self, operation: Operation, code: ErrorCode) -> usize {
        let of = |event: &&LockEvent| event.operation == operation && event.error == Some(code);
        self.list().iter().filter(of).count()
    }

    fn list(&self) -> std::sync::MutexGuard<'_, Vec<LockEvent>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Until the thread with this directory of `/proc` waits to be called by another thread, and goes on
/// waiting. One that waits for an answer of the server sleeps elsewhere in the kernel.
#[track_caller]
fn wait_until_asleep(thread: &std::path::Path) {
    let read = |file| std::fs::read_to_string(thread.join(file)).unwrap_or_default();
    let mut looks = 0;
    wait_until(LIMIT, "the thread waits to be called", || {
        let place = read("wchan");
        // Where the kernel does not say the place, that it sleeps has to do.
        let called = place.contains("futex") || matches!(place.trim(), "" | "0");
        looks = if called && read("stat").contains(") S ") { looks + 1 } else { 0 };
        looks >= 5
    });
}

/// Starts `work` on a thread, and returns as soon as that thread sleeps.
#[track_caller]
pub fn spawn_until_asleep<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> ScopedJoinHandle<'scope, T> {
    let (tell, place) = mpsc::channel();
    let thread = scope.spawn(move || {
        tell.send(this_thread()).expect("the test waits for it");
        work()
    });
    wait_until_asleep(&place.recv().expect("the thread runs"));
    thread
}

/// Runs `work` on a thread, and `meanwhile` as soon as that thread sleeps.
///
/// # Panics
/// When the thread does not end soon after.
#[track_caller]
pub fn while_asleep<T: Send>(work: impl FnOnce() -> T + Send, meanwhile: impl FnOnce()) -> T {
    thread::scope(|scope| {
        let thread = spawn_until_asleep(scope, work);
        assert!(!thread.is_finished());
        meanwhile();
        wait_until(LIMIT, "the waiter returns", || thread.is_finished());
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Has every insert of a lock wait, from now until the end of this connection's transaction.
pub fn hold_inserts(gate: &mut Client) {
    let definitions = "CREATE TABLE gate (); \
         CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           EXECUTE format('LOCK TABLE %I.gate IN ACCESS SHARE MODE', TG_TABLE_SCHEMA); RETURN NEW; END $$; \
         CREATE TRIGGER wait BEFORE INSERT ON syncguard_locks FOR EACH ROW EXECUTE FUNCTION wait()";
    // Apart: in one message the BEGIN would take the definitions into its transaction.
    for sql in [definitions, "BEGIN; LOCK TABLE gate"] {
        gate.batch_execute(sql).expect("a new schema takes a trigger");
    }
}

/// This thread's directory, for [`wait_until_asleep`].
fn this_thread() -> std::path::PathBuf {
    std::path::Path::new("/proc")
        .join(std::fs::read_link("/proc/thread-self").expect("Linux shows its threads"))
}

/// Whoever is inside of a critical section says so here. It shares nothing with the locks: a table of
/// its own, one row per key, on a connection of its own.
pub struct Witness(Mutex<Client>);

impl Witness {
    /// Creates the tables; once per schema.
    pub fn create(schema: &TestSchema) {
        let sql = "CREATE TABLE witness (key text PRIMARY KEY, holder text, entered bigint NOT NULL DEFAULT 0);\
                   CREATE TABLE entries (seq bigserial PRIMARY KEY, key text NOT NULL, fence text NOT NULL)";
        schema.client().batch_execute(sql).expect("a new schema takes tables");
    }

    pub fn connect(url: &str) -> Self {
        Self(Mutex::new(Client::connect(url, NoTls).expect("the test server takes connections")))
    }

    /// Enters, counts without any atomicity of the database's, and leaves.
    ///
    /// # Panics
    /// When somebody else is inside.
    #[track_caller]
    pub fn enter(&self, key: &str, who: &str, fence: &str) {
        let inside = self.run(
            "INSERT INTO witness AS w (key, holder) VALUES ($1, $2) \
             ON CONFLICT (key) DO UPDATE SET holder = EXCLUDED.holder WHERE w.holder IS NULL",
            &[&key, &who],
        );
        assert_eq!(inside, 1, "two holders of {key} at once: {who} met another one inside");
        let seen: i64 = {
            let mut client = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let row = client.query_one("SELECT entered FROM witness WHERE key = $1", &[&key]);
            row.expect("the witness answers").get(0)
        };
        self.run("INSERT INTO entries (key, fence) VALUES ($1, $2)", &[&key, &fence]);
        thread::yield_now();
        self.run("UPDATE witness SET entered = $2 WHERE key = $1", &[&key, &(seen + 1)]);
        let left = self.run("UPDATE witness SET holder = NULL WHERE key = $1 AND holder = $2", &[&key, &who]);
        assert_eq!(left, 1, "{who} was pushed out of {key}");
    }

    /// How often somebody was inside, by the counter that only exclusion keeps right.
    pub fn entered(&self, key: &str) -> i64 {
        let mut client = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let row = client.query_opt("SELECT entered FROM witness WHERE key = $1", &[&key]);
        row.expect("the witness answers").map_or(0, |row| row.get(0))
    }

    /// The fences in the order in which their holders were inside.
    pub fn fences(&self, key: &str) -> Vec<String> {
        let mut client = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let rows = client.query("SELECT fence FROM entries WHERE key = $1 ORDER BY seq", &[&key]);
        rows.expect("the witness answers").iter().map(|row| row.get(0)).collect()
    }

    fn run(&self, sql: &str, args: &[&(dyn postgres::types::ToSql + Sync)]) -> u64 {
        let mut client = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        client.execute(sql, args).expect("the witness answers")
    }
}
