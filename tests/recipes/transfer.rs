//! Two accounts at once.

// recipe: Two accounts at once
use std::error::Error;
use syncguard::PgLockClient;
use syncguard::postgres::Client;

/// Both accounts or neither, in any order: no two transfers can deadlock.
fn transfer(
    locks: &PgLockClient,
    database: &mut Client,
    from: i64,
    to: i64,
    amount: i64,
) -> Result<(), Box<dyn Error>> {
    let guard = locks.lock_all(&[format!("app:prod:account:{from}"), format!("app:prod:account:{to}")])?;
    let mut transaction = database.transaction()?;
    guard.fence_transaction(&mut transaction)?; // first of all: one statement for both
    let sql = "UPDATE accounts SET balance = balance + $2 WHERE id = $1 AND balance + $2 >= 0";
    for (account, change) in [(from, -amount), (to, amount)] {
        if transaction.execute(sql, &[&account, &change])? != 1 {
            return Err("not enough money, or no such account".into()); // rolled back
        }
    }
    transaction.commit()?;
    Ok(())
}
// end

use crate::support::together;

#[test]
fn transfers_there_and_back_lose_nothing_and_do_not_wait_for_each_other_forever() {
    let schema = crate::bank();
    let locks = PgLockClient::connect(&schema.url()).unwrap();
    together(4, |n| {
        let mut database = schema.client();
        for _ in 0..5 {
            let (from, to) = if n % 2 == 0 { (7, 9) } else { (9, 7) };
            transfer(&locks, &mut database, from, to, 3).unwrap();
        }
    });
    assert_eq!((crate::balance(&schema, 7), crate::balance(&schema, 9)), (100, 100));
    assert!(transfer(&locks, &mut schema.client(), 7, 9, 101).is_err());
    assert_eq!((crate::balance(&schema, 7), crate::balance(&schema, 9)), (100, 100));
}
