//! A job that runs once a day, with what it writes.

// recipe: Nightly job, once
use std::error::Error;
use std::time::Duration;
use syncguard::postgres::Client;
use syncguard::{LockOptions, PgLockClient, RunOnce, Slot};

/// Stands in every machine's crontab. It runs on one, once a day, and what it writes is written once.
fn pay_interest(locks: &PgLockClient, database: &mut Client) -> Result<(), Box<dyn Error>> {
    let day = Slot::every(Duration::from_secs(86_400)); // from midnight UTC, by the server's clock
    let run = locks.run_once("app:prod:interest", day, &LockOptions::new(), |run| {
        let mut transaction = database.transaction()?;
        run.complete_in(&mut transaction)?; // first of all: the day is marked with the effect, or not at all
        transaction.execute("UPDATE accounts SET balance = balance + balance / 100", &[])?;
        transaction.commit()?;
        Ok::<_, Box<dyn Error>>(())
    })?;
    match run {
        RunOnce::Done(()) | RunOnce::AlreadyDone | RunOnce::Running => Ok(()), // here, earlier, elsewhere
        RunOnce::Failed(error) => Err(error), // nothing is marked: the next call of the day tries again
    }
}
// end

use crate::support::together;

#[test]
fn interest_is_paid_once_a_day_though_every_machine_calls_and_one_fails() {
    let schema = crate::bank();
    let today = || crate::number(&schema, "SELECT (extract(epoch FROM now())::bigint / 86400)");
    let locks = PgLockClient::connect(&schema.url()).unwrap();
    let begun = today();
    // The database of one machine has no such table.
    let mut without = schema.client();
    without.batch_execute("SET search_path TO pg_temp").unwrap();
    assert!(pay_interest(&locks, &mut without).is_err());
    together(3, |_| pay_interest(&locks, &mut schema.client()).unwrap());
    let paid = crate::balance(&schema, 7);
    // At midnight it is due again.
    assert!(paid == 101 || (today() != begun && paid == 102), "{paid}");
}
