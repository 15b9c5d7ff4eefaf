//! What the tests of session locks have in common.

#![allow(clippy::unwrap_used)]

use postgres::{Client, NoTls};
use r2d2_postgres::PostgresConnectionManager;
use syncguard::{AdvisoryGuard, AdvisoryKey, PgLockClient, PgLockClientBuilder};

use super::{LIMIT, server, unique};

pub fn builder() -> PgLockClientBuilder {
    // A loaded machine may need long; only a failing test waits so long.
    PgLockClient::builder().auto_create_tables(false).operation_timeout(LIMIT).connection_timeout(LIMIT)
}

pub fn client() -> PgLockClient {
    builder().connect(server().url()).unwrap()
}

/// A client whose connections can be told from others'.
pub fn named(name: &str, max: u32) -> PgLockClient {
    let mut config: postgres::Config = server().url().parse().unwrap();
    config.application_name(name);
    builder().max_connections(max).connect_with(config, NoTls).unwrap()
}

/// A caller's pool of this many connections, which are not tested when they are lent.
pub fn callers_pool(url: &str, max: u32) -> r2d2::Pool<PostgresConnectionManager<NoTls>> {
    let manager = PostgresConnectionManager::new(url.parse().unwrap(), NoTls);
    r2d2::Pool::builder().max_size(max).test_on_check_out(false).build(manager).unwrap()
}

/// Where the shared server listens.
pub fn server_port() -> u16 {
    let config: postgres::Config = server().url().parse().unwrap();
    config.get_ports()[0]
}

pub fn key() -> AdvisoryKey {
    AdvisoryKey::from_text(&unique())
}

pub fn taken(client: &PgLockClient, key: AdvisoryKey) -> AdvisoryGuard {
    client.try_advisory_lock(&key).unwrap().expect("the key is free")
}

/// How many sessions have the key, by the server's own book.
pub fn holders(observer: &mut Client, key: AdvisoryKey) -> i64 {
    let number = key.as_i64().unwrap();
    let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 \
               AND ((classid::int8 << 32) | objid::int8) = $1";
    observer.query_one(sql, &[&number]).unwrap().get(0)
}

/// Whether the server ends idle sessions by itself, which 13 does not: there the timer that frees a
/// stopped process' lock does not exist.
pub fn has_session_timer(observer: &mut Client) -> bool {
    let sql = "SELECT current_setting('idle_session_timeout', true) IS NOT NULL";
    observer.query_one(sql, &[]).unwrap().get(0)
}

pub fn connections(observer: &mut Client, name: &str) -> i64 {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1";
    observer.query_one(sql, &[&name]).unwrap().get(0)
}
