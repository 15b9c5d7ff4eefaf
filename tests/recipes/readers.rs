//! Readers beside a writer.

// recipe: Readers and a writer
use std::error::Error;
use syncguard::PgLockClient;
use syncguard::postgres::Client;

/// Any number at the same time, and none while prices change.
fn total(locks: &PgLockClient, database: &mut Client) -> Result<i64, Box<dyn Error>> {
    let _reader = locks.read_lock("app:prod:prices")?;
    let items: i64 = database.query_one("SELECT sum(price)::bigint FROM prices", &[])?.get(0);
    let shipping: i64 = database.query_one("SELECT max(price) FROM prices", &[])?.get(0);
    Ok(items + shipping) // both of the same prices, though they are two queries
}

/// Alone: waits for the readers that are there, and those that come later wait for it.
fn set_prices(locks: &PgLockClient, database: &mut Client, price: i64) -> Result<(), Box<dyn Error>> {
    let writer = locks.lock("app:prod:prices")?;
    let mut transaction = database.transaction()?;
    writer.fence_transaction(&mut transaction)?; // first of all
    transaction.execute("UPDATE prices SET price = $1", &[&price])?;
    transaction.commit()?;
    Ok(())
}
// end

use crate::support::{TestSchema, together};
use syncguard::{ErrorCode, LockError};

fn priced() -> TestSchema {
    let schema = crate::support::schema();
    let sql = "CREATE TABLE prices (price BIGINT NOT NULL); INSERT INTO prices VALUES (1), (1)";
    schema.client().batch_execute(sql).unwrap();
    schema
}

#[test]
fn readers_share_the_prices_and_a_writer_is_alone() {
    // Both at the same time: each of them waits for as long as a lock may take.
    let refused = together(2, |n| {
        let schema = priced();
        let locks = PgLockClient::connect(&schema.url()).unwrap();
        let error = if n == 0 {
            let _other = locks.read_lock("app:prod:prices").unwrap();
            assert_eq!(total(&locks, &mut schema.client()).unwrap(), 3, "beside another reader");
            set_prices(&locks, &mut schema.client(), 5).unwrap_err()
        } else {
            let _writer = locks.lock("app:prod:prices").unwrap();
            total(&locks, &mut schema.client()).unwrap_err()
        };
        error.downcast_ref::<LockError>().map(LockError::code)
    });
    assert_eq!(refused, [Some(ErrorCode::AcquisitionTimeout); 2]);
}

#[test]
fn no_reader_sees_half_of_a_change() {
    let schema = priced();
    let locks = PgLockClient::connect(&schema.url()).unwrap();
    together(4, |n| {
        let mut database = schema.client();
        for round in 0..5 {
            if n == 0 {
                set_prices(&locks, &mut database, 10 + round).unwrap();
            } else {
                let total = total(&locks, &mut database).unwrap();
                assert_eq!(total % 3, 0, "three times one price");
            }
        }
    });
    assert_eq!(total(&locks, &mut schema.client()).unwrap(), 42);
}
