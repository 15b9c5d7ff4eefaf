//! Requests that take turns, and the status of those that cannot.

// recipe: HTTP service
use std::error::Error;
use std::time::Duration;
use syncguard::postgres::Client;
use syncguard::{ErrorCode, LockError, LockOptions, PgLockClient};

type AnyError = Box<dyn Error + Send + Sync>;

/// One request per account at a time, over any number of servers. Answers the new balance.
fn deposit(locks: &PgLockClient, database: &mut Client, account: i64, amount: i64) -> Result<i64, AnyError> {
    let options = LockOptions::new().ttl(Duration::from_secs(10)).timeout(Duration::from_secs(2));
    let guard = locks.lock_with(&format!("app:prod:account:{account}"), &options)?;
    let mut transaction = database.transaction()?;
    guard.fence_transaction(&mut transaction)?; // first of all
    let row = transaction.query_one("SELECT balance FROM accounts WHERE id = $1", &[&account])?;
    let balance = row.get::<_, i64>(0).checked_add(amount).ok_or("too much money")?;
    transaction.execute("UPDATE accounts SET balance = $2 WHERE id = $1", &[&account, &balance])?;
    transaction.commit()?;
    Ok(balance) // the guard is dropped, and the lock free
}

/// The status of a failure, and after how many seconds to come back.
fn status(error: &AnyError) -> (u16, Option<u32>) {
    match error.downcast_ref::<LockError>().map(LockError::code) {
        // Somebody else works on the account, the pool is empty, or this server is going away.
        Some(ErrorCode::AcquisitionTimeout | ErrorCode::RateLimited | ErrorCode::Aborted) => (503, Some(1)),
        // The database is away, or slow.
        Some(ErrorCode::ServiceUnavailable | ErrorCode::NetworkTimeout) => (503, Some(5)),
        // The account makes no key.
        Some(ErrorCode::InvalidArgument) => (400, None),
        _ => (500, None),
    }
}
// end

use crate::support::together;

#[test]
fn requests_of_two_servers_take_turns_and_busy_ones_are_told_to_come_back() {
    let schema = crate::bank();
    let servers = [(); 2].map(|()| PgLockClient::connect(&schema.url()).unwrap());
    together(4, |n| {
        let mut database = schema.client();
        for _ in 0..5 {
            // A slow machine may be busy for two seconds: then nothing was written.
            while let Err(error) = deposit(&servers[n % 2], &mut database, 7, 2) {
                assert_eq!(status(&error), (503, Some(1)), "{error}");
            }
        }
    });
    assert_eq!(crate::balance(&schema, 7), 140);

    let _held = servers[0].lock("app:prod:account:9").unwrap();
    let busy = deposit(&servers[1], &mut schema.client(), 9, 1).unwrap_err();
    assert_eq!(status(&busy), (503, Some(1)), "{busy}");
    assert_eq!(status(&deposit(&servers[0], &mut schema.client(), 8, 1).unwrap_err()), (500, None));
    assert_eq!(crate::balance(&schema, 9), 100);
}
