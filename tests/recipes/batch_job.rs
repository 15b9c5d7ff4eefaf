//! A batch that one process works through, in fenced steps.

// recipe: Batch job
use std::error::Error;
use std::time::Duration;
use syncguard::postgres::Client;
use syncguard::{LockOptions, PgLockClient};

/// Sends what is open, unless another process is at it: then `None`. How many were sent.
fn send_invoices(locks: &PgLockClient, database: &mut Client) -> Result<Option<u64>, Box<dyn Error>> {
    let options = LockOptions::new().ttl(Duration::from_secs(30));
    let Some(guard) = locks.try_lock_with("app:prod:invoices", &options)? else { return Ok(None) };
    let mut sent = 0;
    loop {
        // A hundred at a time: while a fenced transaction is open, nobody else can be granted the lock.
        let mut transaction = database.transaction()?;
        guard.fence_transaction(&mut transaction)?; // fails where the lock is lost: the rest is another's
        let step = transaction.execute(
            "UPDATE invoices SET sent = true
              WHERE id IN (SELECT id FROM invoices WHERE NOT sent ORDER BY id LIMIT 100)",
            &[],
        )?;
        transaction.commit()?;
        if step == 0 {
            guard.release()?;
            return Ok(Some(sent));
        }
        sent += step;
    }
}
// end

use syncguard::{ErrorCode, LockError};

#[test]
fn one_process_sends_every_invoice_and_others_leave_it_to_it() {
    let schema = crate::support::schema();
    let sql = "CREATE TABLE invoices (id BIGINT PRIMARY KEY, sent BOOL NOT NULL DEFAULT false);
               INSERT INTO invoices SELECT generate_series(1, 250)";
    schema.client().batch_execute(sql).unwrap();
    let locks = PgLockClient::connect(&schema.url()).unwrap();

    let other = locks.lock("app:prod:invoices").unwrap();
    assert_eq!(send_invoices(&locks, &mut schema.client()).unwrap(), None);
    other.release().unwrap();

    assert_eq!(send_invoices(&locks, &mut schema.client()).unwrap(), Some(250));
    assert_eq!(send_invoices(&locks, &mut schema.client()).unwrap(), Some(0));

    // Its lock is broken after the first step: the second is refused, and nothing of it stays.
    let broken = "UPDATE invoices SET sent = false;
                  CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS
                    'BEGIN DELETE FROM syncguard_locks; RETURN NULL; END';
                  CREATE TRIGGER broken AFTER UPDATE ON invoices EXECUTE FUNCTION broken()";
    schema.client().batch_execute(broken).unwrap();
    let error = send_invoices(&locks, &mut schema.client()).unwrap_err();
    assert_eq!(error.downcast_ref::<LockError>().map(LockError::code), Some(ErrorCode::Aborted), "{error}");
    assert_eq!(crate::number(&schema, "SELECT count(*) FROM invoices WHERE sent"), 100);
}
