//! What a storm's holders write to: registers whose values tell whether a write was lost.

use std::thread;
use std::time::Duration;

use postgres::{Client, NoTls, Transaction};

/// A register that keeps the greatest fence it has met: also a read tells it.
pub fn write_kept(
    sql: &mut Client,
    key: &str,
    fence: u64,
    nap: Duration,
    fenced: bool,
) -> Result<Option<u64>, postgres::Error> {
    let fence = i64::try_from(fence).unwrap_or(i64::MAX);
    sql.execute("INSERT INTO register (key) VALUES ($1) ON CONFLICT DO NOTHING", &[&key])?;
    let (read, write) = if fenced {
        (
            "UPDATE register SET fence = $2 WHERE key = $1 AND fence <= $2 RETURNING n",
            "UPDATE register SET n = $3, fence = $2 WHERE key = $1 AND fence <= $2 RETURNING n",
        )
    } else {
        (
            "SELECT n FROM register WHERE key = $1 AND $2::int8 > 0",
            "UPDATE register SET n = $3, fence = $2 WHERE key = $1 RETURNING n",
        )
    };
    let Some(row) = sql.query_opt(read, &[&key, &fence])? else { return Ok(None) };
    thread::sleep(nap);
    let value = row.get::<_, i64>(0) + 1;
    let row = sql.query_opt(write, &[&key, &fence, &value])?;
    Ok(row.map(|row| row.get::<_, i64>(0).unsigned_abs()))
}

/// A register without fences of its own, written in fenced transactions.
pub fn write_fenced(
    sql: &mut Client,
    fence: impl FnOnce(&mut Transaction<'_>) -> syncguard::Result<()>,
    key: &str,
    nap: Duration,
) -> Result<Option<u64>, postgres::Error> {
    sql.execute("INSERT INTO register (key) VALUES ($1) ON CONFLICT DO NOTHING", &[&key])?;
    let mut transaction = sql.transaction()?;
    if fence(&mut transaction).is_err() {
        return Ok(None);
    }
    let value: i64 = transaction.query_one("SELECT n FROM register WHERE key = $1", &[&key])?.get(0);
    thread::sleep(nap);
    transaction.execute("UPDATE register SET n = $2 WHERE key = $1", &[&key, &(value + 1)])?;
    transaction.commit()?;
    Ok(Some((value + 1).unsigned_abs()))
}

/// What the register has in a reader's fenced transaction, at its begin and at its end.
pub fn read_fenced(
    sql: &mut Client,
    fence: impl FnOnce(&mut Transaction<'_>) -> syncguard::Result<()>,
    key: &str,
    nap: Duration,
) -> Result<Option<(u64, u64)>, postgres::Error> {
    let mut transaction = sql.transaction()?;
    if fence(&mut transaction).is_err() {
        return Ok(None);
    }
    let read = "SELECT COALESCE(max(n), 0) FROM register WHERE key = $1";
    let first: i64 = transaction.query_one(read, &[&key])?.get(0);
    thread::sleep(nap);
    let last: i64 = transaction.query_one(read, &[&key])?.get(0);
    transaction.commit()?;
    Ok(Some((first.unsigned_abs(), last.unsigned_abs())))
}

pub fn connect(url: &str) -> Option<Client> {
    let mut config: postgres::Config = url.parse().ok()?;
    config.connect_timeout(Duration::from_secs(1)).application_name("register");
    let mut client = config.connect(NoTls).ok()?;
    client.batch_execute("SET statement_timeout = '2s'").ok()?;
    Some(client)
}
