//! Migrations by whoever starts first.

// recipe: Migrations at startup
use std::error::Error;
use std::time::Duration;
use syncguard::postgres::Client;
use syncguard::{LockOptions, PgLockClient};

/// Brings the database up to date. Whoever starts first does it, the others wait for it.
fn migrate(locks: &PgLockClient, database: &mut Client, steps: &[&str]) -> Result<(), Box<dyn Error>> {
    let options = LockOptions::new().timeout(Duration::from_secs(300));
    let guard = locks.lock_with("app:prod:migrations", &options)?;
    database.batch_execute("CREATE TABLE IF NOT EXISTS app_steps (step INT PRIMARY KEY)")?;
    let done: i64 = database.query_one("SELECT count(*) FROM app_steps", &[])?.get(0);
    for (n, step) in steps.iter().enumerate().skip(usize::try_from(done)?) {
        let mut transaction = database.transaction()?; // a step whole, or not at all
        guard.fence_transaction(&mut transaction)?; // and by nobody who was paused for too long
        transaction.batch_execute(step)?;
        transaction.execute("INSERT INTO app_steps VALUES ($1)", &[&i32::try_from(n)?])?;
        transaction.commit()?;
    }
    guard.release()?;
    Ok(())
}
// end

use crate::support::together;

#[test]
fn four_programs_that_start_together_take_each_step_once() {
    let schema = crate::support::schema();
    let steps = ["CREATE TABLE things (id INT)", "ALTER TABLE things ADD COLUMN name TEXT"];
    together(4, |_| {
        let locks = PgLockClient::connect(&schema.url()).unwrap();
        migrate(&locks, &mut schema.client(), &steps).unwrap();
    });
    let locks = PgLockClient::connect(&schema.url()).unwrap();
    let broken = ["", "", "CREATE TABLE more (id INT)", "no SQL"];
    assert!(migrate(&locks, &mut schema.client(), &broken).is_err());
    assert_eq!(crate::number(&schema, "SELECT count(*) FROM app_steps"), 3, "the last step was not taken");
}
