//! The contract of a backend, on PostgreSQL: the plain client, one with telemetry, one on a caller's
//! pool, and one over the Unix socket.

// A test that fails panics.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::support::{Stored, TestSchema};
use r2d2_postgres::PostgresConnectionManager;
use syncguard::{LockBackend, PgLockClient, TelemetryOptions};
use syncguard_contract::Harness;

/// A schema and the tables in it, shared by the tests that run now; every client is a new one.
struct Postgres {
    store: Arc<Store>,
    client: fn(&TestSchema) -> PgLockClient,
}

struct Store {
    stored: Stored,
    schema: TestSchema,
}

impl Postgres {
    fn new(client: fn(&TestSchema) -> PgLockClient) -> Self {
        static STORE: Mutex<Weak<Store>> = Mutex::new(Weak::new());
        let mut shared = STORE.lock().unwrap_or_else(PoisonError::into_inner);
        let store = shared.upgrade().unwrap_or_else(|| {
            let schema = crate::support::schema();
            client(&schema).setup_schema().unwrap();
            Arc::new(Store { stored: Stored::new(&schema), schema })
        });
        *shared = Arc::downgrade(&store);
        Self { store, client }
    }
}

impl Harness for Postgres {
    fn backend(&self) -> Arc<dyn LockBackend> {
        Arc::new((self.client)(&self.store.schema))
    }

    fn now_ms(&self) -> i64 {
        self.store.stored.now_ms()
    }

    fn age(&self, key: &str, past_expiry_ms: i64) {
        self.store.stored.age(key, past_expiry_ms);
    }

    fn has_row(&self, key: &str) -> bool {
        self.store.stored.row(key).is_some()
    }

    fn remove_row(&self, key: &str) {
        self.store.stored.remove(key);
    }

    fn counter(&self, key: &str) -> Option<u64> {
        self.store.stored.counter(key).map(|counter| u64::try_from(counter).unwrap())
    }

    fn set_counter(&self, key: &str, value: u64) {
        self.store.stored.set_counter(key, i64::try_from(value).unwrap());
    }
}

fn plain(schema: &TestSchema) -> PgLockClient {
    PgLockClient::connect(&schema.url()).unwrap()
}

fn observed(schema: &TestSchema) -> PgLockClient {
    PgLockClient::builder().telemetry(TelemetryOptions::new(|_| {})).connect(&schema.url()).unwrap()
}

fn on_a_callers_pool(schema: &TestSchema) -> PgLockClient {
    let manager = PostgresConnectionManager::new(schema.config(), postgres::NoTls);
    let pool = r2d2::Pool::builder().max_size(20).min_idle(Some(0)).test_on_check_out(false).build(manager);
    PgLockClient::builder().build(pool.unwrap()).unwrap()
}

fn over_the_socket(schema: &TestSchema) -> PgLockClient {
    PgLockClient::connect(&schema.socket_url()).unwrap()
}

mod client {
    syncguard_contract::contract_tests!(super::Postgres::new(super::plain));
}

mod client_with_telemetry {
    syncguard_contract::contract_tests!(super::Postgres::new(super::observed));
}

mod client_on_a_callers_pool {
    syncguard_contract::contract_tests!(super::Postgres::new(super::on_a_callers_pool));
}

mod client_over_the_socket {
    syncguard_contract::contract_tests!(super::Postgres::new(super::over_the_socket));
}
