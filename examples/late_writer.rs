//! A holder that sleeps through the end of its lock, wakes up, and writes: what becomes of that
//! write, three times.
//!
//! ```text
//! scripts/demo late_writer        # starts a throwaway server and runs this
//! ```
//!
//! Two clients stand for two processes. The first takes the lock of a bank account, reads the
//! balance, and sleeps, as a process does that is swapped out, stopped in a debugger, or on a laptop
//! that was closed. The lock ends, the second takes it and pays 10 in. Then the first one wakes up and
//! pays 1 in. What to copy: [`in_a_fenced_transaction`] and [`with_the_fence_beside_the_data`].

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example talks")]

mod lanes;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use postgres::{Client, NoTls};
use syncguard::{Heartbeat, LockGuard, LockOptions, PgLockClient};

use lanes::{Demo, Ending, Screen, Tone};

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

const HELP: &str = "\
late_writer: a holder sleeps through the end of its lock, wakes up and writes, three times

    scripts/demo late_writer              starts a throwaway server and runs this program on it
    SYNCGUARD_URL=postgresql://… cargo run --example late_writer
                                          uses a server that you have

It creates a table `accounts` and the lock tables on the search path, and drops the former.";

/// Pays in, and says whether it did. In its middle it calls `sleep`.
type Pay = fn(&mut Client, &LockGuard, i64, &mut dyn FnMut() -> Result<()>) -> Result<bool>;

/// Wrong: the time between the look and the write may be long.
fn without_a_fence(
    sql: &mut Client,
    guard: &LockGuard,
    amount: i64,
    sleep: &mut dyn FnMut() -> Result<()>,
) -> Result<bool> {
    if !guard.is_held() {
        return Ok(false);
    }
    let balance: i64 = sql.query_one("SELECT balance FROM accounts", &[])?.get(0);
    sleep()?;
    sql.execute("UPDATE accounts SET balance = $1", &[&(balance + amount)])?;
    Ok(true)
}

/// Right, where the data is in the database of the locks.
fn in_a_fenced_transaction(
    sql: &mut Client,
    guard: &LockGuard,
    amount: i64,
    sleep: &mut dyn FnMut() -> Result<()>,
) -> Result<bool> {
    sleep()?;
    let mut transaction = sql.transaction()?;
    // First. From here to the end of the transaction nobody else is granted the lock; and if the lock
    // is over, this transaction cannot be committed.
    if guard.fence_transaction(&mut transaction).is_err() {
        return Ok(false);
    }
    let balance: i64 = transaction.query_one("SELECT balance FROM accounts", &[])?.get(0);
    transaction.execute("UPDATE accounts SET balance = $1", &[&(balance + amount)])?;
    transaction.commit()?;
    Ok(true)
}

/// Right, where the data is elsewhere: it keeps the greatest fence that it has met.
fn with_the_fence_beside_the_data(
    sql: &mut Client,
    guard: &LockGuard,
    amount: i64,
    sleep: &mut dyn FnMut() -> Result<()>,
) -> Result<bool> {
    let fence = i64::try_from(guard.fence().get())?;
    // The read leaves the fence, too: what is read here, no older holder changes afterwards.
    let read = "UPDATE accounts SET fence = $1 WHERE fence <= $1 RETURNING balance";
    let Some(row) = sql.query_opt(read, &[&fence])? else { return Ok(false) };
    sleep()?;
    let write = "UPDATE accounts SET balance = $1, fence = $2 WHERE fence <= $2";
    Ok(sql.execute(write, &[&(row.get::<_, i64>(0) + amount), &fence])? == 1)
}

/// The first holder sleeps until the second has paid 10 in; then it goes on. The balance at the end.
fn play(url: &str, key: &str, pay: Pay) -> Result<i64> {
    let (first, second) = (PgLockClient::connect(url)?, PgLockClient::connect(url)?);
    let (mut sql, mut other) = (Client::connect(url, NoTls)?, Client::connect(url, NoTls)?);
    sql.batch_execute(
        "DROP TABLE IF EXISTS accounts; \
         CREATE TABLE accounts (balance int8 NOT NULL, fence int8 NOT NULL DEFAULT 0); \
         INSERT INTO accounts VALUES (100)",
    )?;
    // Who sleeps renews nothing.
    let options = LockOptions::new().ttl(Duration::from_secs(1)).heartbeat(Heartbeat::Off);
    let guard = first.lock_with(key, &options)?;
    let mut sleep = || {
        println!("  the first holder (fence {}) sleeps", guard.fence().get());
        let newer = second.lock_with(key, &LockOptions::new().wait_forever())?;
        let paid = pay(&mut other, &newer, 10, &mut || Ok(()))?;
        println!("  the second holder (fence {}) pays 10 in: {}", newer.fence().get(), done(paid));
        newer.release()?;
        Ok(())
    };
    let paid = pay(&mut sql, &guard, 1, &mut sleep)?;
    println!("  the first holder wakes up and pays 1 in: {}", done(paid));
    let balance = sql.query_one("SELECT balance FROM accounts", &[])?.get(0);
    sql.batch_execute("DROP TABLE accounts")?;
    Ok(balance)
}

fn done(paid: bool) -> &'static str {
    if paid { "done" } else { "refused" }
}

/// Whether it ended as it should: the first write is lost work, the others are refused.
fn run(url: &str) -> Result<bool> {
    let screen = Screen::new();
    let acts: [(&str, Pay); 3] = [
        ("without a fence", without_a_fence),
        ("in a fenced transaction", in_a_fenced_transaction),
        ("with the fence beside the data", with_the_fence_beside_the_data),
    ];
    let mut lost = Vec::new();
    for (name, pay) in acts {
        println!("{name}: the balance is 100");
        let balance = play(url, &format!("example:late:{name}"), pay)?;
        let (tone, verdict) = match balance {
            110.. => (Tone::Good, "nothing is lost"),
            _ => (Tone::Bad, "the second holder's 10 are LOST"),
        };
        screen.beside("  ", 2, tone, &format!("the balance is {balance}: {verdict}"));
        println!();
        lost.push(balance < 110);
    }
    Ok(lost == [true, false, false])
}

fn main() -> ExitCode {
    let demo = Demo { example: "late_writer", script: "scripts/demo late_writer", help: HELP };
    demo.main(|args, url| match args {
        [] => run(url).map(Ending::Shown),
        _ => Ok(Ending::Usage("it takes no options".into())),
    })
}
