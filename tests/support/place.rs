//! What most tests start with: a schema with the tables in it, a client, and a look at the rows.

use std::thread::JoinHandle;
use std::time::Duration;

use postgres::NoTls;
use syncguard::{Acquired, PgLockClient, PgLockClientBuilder};

use super::schema::TestSchema;
use super::stored::Stored;
use super::wait::{LIMIT, wait_until};

/// Long enough that no test reaches its end.
pub const TTL: Duration = Duration::from_secs(30);

pub struct Place {
    pub client: PgLockClient,
    pub stored: Stored,
    pub schema: TestSchema,
}

pub fn place() -> Place {
    Place::new(super::schema())
}

impl Place {
    pub fn new(schema: TestSchema) -> Self {
        let client = PgLockClient::connect(&schema.url()).expect("the tables can be created");
        Self { client, stored: Stored::new(&schema), schema }
    }

    /// A client that other sessions know by this name.
    pub fn named(&self, application_name: &str) -> PgLockClient {
        self.build(application_name, PgLockClient::builder())
    }

    pub fn build(&self, application_name: &str, builder: PgLockClientBuilder) -> PgLockClient {
        let mut config = self.schema.config();
        config.application_name(application_name);
        builder.auto_create_tables(false).connect_with(config, NoTls).expect("the settings are valid")
    }

    /// A key that no other test uses: advisory locks are shared by the schemas of a database.
    pub fn key(&self, word: &str) -> String {
        format!("{word}-{}", self.schema.name())
    }

    /// # Panics
    /// When the key is held.
    #[track_caller]
    pub fn hold(&self, key: &str) -> Acquired {
        let answer = self.client.acquire(key, TTL).expect("the server answers");
        answer.acquired().expect("the key is free")
    }

    /// Until the server's clock shows this time.
    pub fn wait_for(&self, server_ms: i64) {
        wait_until(LIMIT, "the server's clock gets there", || self.stored.now_ms() >= server_ms);
    }
}

/// A call on a thread of its own, made under an application name that nothing else has.
pub struct Call<T> {
    thread: JoinHandle<T>,
    name: String,
}

impl<T: Send + 'static> Call<T> {
    pub fn start(application_name: &str, call: impl FnOnce() -> T + Send + 'static) -> Self {
        Self { thread: std::thread::spawn(call), name: application_name.to_owned() }
    }

    /// Until the call has returned or its session waits for a lock. Whether it waits.
    #[track_caller]
    pub fn settle(&self, stored: &Stored) -> bool {
        let sql = "SELECT EXISTS (SELECT FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid \
                   WHERE NOT l.granted AND a.application_name = $1)";
        let mut waits = false;
        wait_until(LIMIT, "the call returns or waits for a lock", || {
            waits = stored.one(sql, &[&self.name]).get(0);
            waits || self.thread.is_finished()
        });
        waits
    }

    #[track_caller]
    pub fn wait_until_blocked(&self, stored: &Stored) {
        assert!(self.settle(stored), "the call returned although it should wait");
    }

    #[track_caller]
    pub fn join(self) -> T {
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}
