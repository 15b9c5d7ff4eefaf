//! A pooler in transaction mode.

// recipe: Behind PgBouncer
use syncguard::{PgLockClient, Result};

/// Leases work in session and transaction mode, fenced transactions included.
fn connect(url: &str, schema: &str) -> Result<PgLockClient> {
    PgLockClient::builder()
        .schema(schema) // a pooler hands no search path on
        .max_connections(4) // of the pooler's; one more for renewals
        .connect(url)
}
// end

use crate::support::bouncer::Bouncer;
use syncguard::postgres::{Client, NoTls};
use syncguard::{AdvisoryKey, ErrorCode};

#[test]
fn leases_and_fenced_writes_go_through_a_pooler_in_transaction_mode_and_session_locks_do_not() {
    let schema = crate::bank();
    let bouncer = Bouncer::start(&[]);
    let locks = connect(&bouncer.url(), schema.name()).unwrap();
    let guard = locks.lock("app:prod:account:7").unwrap();
    let mut database = Client::connect(&bouncer.url(), NoTls).unwrap();
    let mut transaction = database.transaction().unwrap();
    guard.fence_transaction(&mut transaction).unwrap();
    let sql = format!("UPDATE {}.accounts SET balance = 1 WHERE id = 7", schema.name());
    transaction.batch_execute(&sql).unwrap();
    transaction.commit().unwrap();
    guard.release().unwrap();
    assert_eq!(crate::balance(&schema, 7), 1);

    let key = AdvisoryKey::namespaced("app", schema.name()).unwrap();
    assert_eq!(locks.try_advisory_lock(&key).unwrap_err().code(), ErrorCode::InvalidArgument);
}
