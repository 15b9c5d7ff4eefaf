//! A program's own tests, fenced writes included.

// recipe: Your own tests
use std::error::Error;
use syncguard::postgres::Client;
use syncguard::{LockClient, MemoryBackend};

/// The code under test: takes a `LockClient`, which is `client.locks()` in production.
fn withdraw(locks: &LockClient, database: &mut Client, amount: i64) -> Result<bool, Box<dyn Error>> {
    let Some(guard) = locks.try_lock("app:prod:account:7")? else { return Ok(false) };
    let sql = "SELECT balance FROM accounts WHERE id = 7";
    let balance: i64 = database.query_one(sql, &[])?.get(0); // the time between this and the write may be long
    let mut transaction = database.transaction()?;
    guard.fence_transaction(&mut transaction)?;
    transaction.execute("UPDATE accounts SET balance = $1 WHERE id = 7", &[&(balance - amount)])?;
    transaction.commit()?;
    Ok(true)
}

/// Its tests: the locks are in memory, and do what the test says. The data is in a database of yours.
fn test_withdraw(database: &mut Client) -> Result<(), Box<dyn Error>> {
    let memory = MemoryBackend::manual(); // time passes by `memory.advance`
    memory.play_fences();
    let locks = LockClient::new(memory.clone());

    assert!(withdraw(&locks, database, 10)?);

    let _theirs = memory.contend("app:prod:account:7")?; // another process has it
    assert!(!withdraw(&locks, database, 10)?);
    memory.remove("app:prod:account:7")?;

    // It is paused with the lock in its hands, and another process takes over: the write is refused.
    let guard = locks.lock("app:prod:account:7")?;
    memory.take_over("app:prod:account:7")?;
    let mut transaction = database.transaction()?;
    let refused = guard.fence_transaction(&mut transaction);
    assert_eq!(refused.unwrap_err().code(), syncguard::ErrorCode::Aborted);
    assert!(transaction.execute("UPDATE accounts SET balance = 0", &[]).is_err()); // as on PostgreSQL
    Ok(())
}
// end

use std::time::Duration;
use syncguard::backend::LockBackend as _;
use syncguard::{ErrorCode, LockOptions};

#[test]
fn a_program_is_tested_with_locks_in_memory_and_its_data_in_a_database() {
    let schema = crate::bank();
    test_withdraw(&mut schema.client()).unwrap();
    assert_eq!(crate::balance(&schema, 7), 90);
}

/// Whether a transaction that begins with this statement can be committed.
fn commits(database: &mut Client, check: &str) -> bool {
    let text = format!("BEGIN; {check}; CREATE TABLE played (); COMMIT");
    let made = database.batch_execute(&text).map_err(|error| error.code().map(|code| code.code().to_owned()));
    match made {
        Ok(()) => {
            database.batch_execute("DROP TABLE played").unwrap();
            true
        }
        Err(code) => {
            assert_eq!(code.as_deref(), Some("22P02"), "as a stale fence on PostgreSQL");
            database.batch_execute("ROLLBACK").unwrap();
            false
        }
    }
}

#[test]
fn fences_are_refused_until_they_are_played_and_then_decided_by_the_leases_in_memory() {
    let schema = crate::support::schema();
    let mut database = schema.client();
    let memory = MemoryBackend::manual();
    let locks = LockClient::new(memory.clone());
    let refused = locks.lock("k").unwrap().fence_sql().unwrap_err();
    assert_eq!(refused.code(), ErrorCode::InvalidArgument);
    memory.play_fences();

    let guard = locks.lock("k").unwrap();
    assert!(commits(&mut database, &guard.fence_sql().unwrap()));
    // A lease counts until its end and a second, and then no more.
    memory.advance(Duration::from_millis(30_999));
    assert!(commits(&mut database, &guard.fence_sql().unwrap()));
    memory.advance(Duration::from_millis(1));
    assert!(!commits(&mut database, &guard.fence_sql().unwrap()));

    for undone in [MemoryBackend::remove, MemoryBackend::expire, |memory: &MemoryBackend, key: &str| {
        memory.take_over(key).map(|_| true)
    }] {
        let _ = memory.remove("k");
        let guard = locks.lock("k").unwrap();
        assert!(commits(&mut database, &guard.fence_sql().unwrap()));
        undone(&memory, "k").unwrap();
        assert!(!commits(&mut database, &guard.fence_sql().unwrap()));
    }

    // Somebody else's lock of the key, and a fence that is not the newest.
    memory.remove("k").unwrap();
    let guard = locks.lock("k").unwrap();
    let (fence, other) = (guard.fence(), locks.lock("other").unwrap());
    assert!(!commits(&mut database, &memory.fence_statement("k", fence, Some(other.lock_id())).unwrap()));
    assert!(commits(&mut database, &memory.fence_statement("k", fence, None).unwrap()));
    memory.set_counter("k", fence.get() + 1).unwrap();
    assert!(!commits(&mut database, &memory.fence_statement("k", fence, None).unwrap()));
}

#[test]
fn fences_of_sets_permits_readers_and_terms_are_played_too() {
    let schema = crate::support::schema();
    let mut database = schema.client();
    let memory = MemoryBackend::manual();
    memory.play_fences();
    let locks = LockClient::new(memory.clone());

    let set = locks.lock_all(&["a", "b"]).unwrap();
    assert!(commits(&mut database, &set.fence_sql().unwrap()));
    memory.take_over("b").unwrap();
    assert!(!commits(&mut database, &set.fence_sql().unwrap()), "one of the set is over");

    let permit = locks.semaphore("s", 2).unwrap().acquire().unwrap();
    assert!(commits(&mut database, &permit.fence_sql().unwrap()));
    memory.expire(permit.key()).unwrap();
    assert!(!commits(&mut database, &permit.fence_sql().unwrap()));

    let (one, two) = (locks.read_lock("r").unwrap(), locks.read_lock("r").unwrap());
    for reader in [&one, &two] {
        let mut transaction = database.transaction().unwrap();
        reader.fence_transaction(&mut transaction).unwrap();
    }
    memory.advance(Duration::from_secs(40));
    let mut transaction = database.transaction().unwrap();
    assert_eq!(one.fence_transaction(&mut transaction).unwrap_err().code(), ErrorCode::Aborted);
    drop(transaction);

    let options = LockOptions::new();
    locks
        .elect("leader", &options, |term| {
            assert!(commits(&mut database, &term.fence_sql().unwrap()));
            memory.take_over("leader").unwrap();
            assert!(!commits(&mut database, &term.fence_sql().unwrap()));
            std::ops::ControlFlow::Break(())
        })
        .unwrap();
}
