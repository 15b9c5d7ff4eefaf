//! Events that are delivered more than once.

// recipe: Webhook, deduplicated
use std::error::Error;
use syncguard::PgLockClient;
use syncguard::postgres::Client;

/// Credits a payment once, however often its event is delivered. Whether it was this time.
fn payment_received(
    locks: &PgLockClient,
    database: &mut Client,
    event: &str,
    account: i64,
    amount: i64,
) -> Result<bool, Box<dyn Error>> {
    // By account, not by event: keys that are used once leave a row each, forever.
    let guard = locks.lock(&format!("app:prod:account:{account}"))?;
    let mut transaction = database.transaction()?;
    guard.fence_transaction(&mut transaction)?; // first of all
    // The unique event says whether it was there before; the lock keeps out all other work on the account.
    let new = transaction.execute("INSERT INTO events VALUES ($1) ON CONFLICT DO NOTHING", &[&event])? == 1;
    if new {
        let sql = "UPDATE accounts SET balance = balance + $2 WHERE id = $1";
        transaction.execute(sql, &[&account, &amount])?;
    }
    transaction.commit()?;
    Ok(new)
}
// end

use crate::support::together;

#[test]
fn an_event_that_is_delivered_by_four_threads_is_credited_once() {
    let schema = crate::bank();
    schema.client().batch_execute("CREATE TABLE events (id TEXT PRIMARY KEY)").unwrap();
    let locks = PgLockClient::connect(&schema.url()).unwrap();
    let credited = together(4, |_| {
        let mut database = schema.client();
        let mut deliver = |event: &str| payment_received(&locks, &mut database, event, 7, 5).unwrap();
        usize::from(deliver("evt_1")) + usize::from(deliver("evt_2")) + usize::from(deliver("evt_1"))
    });
    assert_eq!(credited.iter().sum::<usize>(), 2);
    assert_eq!(crate::balance(&schema, 7), 110);
}
