//! Where session locks are refused, as they would exclude nobody; and what they do not need.

use std::fs;

use crate::support::session_locks::{builder, callers_pool, key, server_port, taken};
use crate::support::wire::transaction_pooler;
use crate::support::{Config, Server, Stop, server, unique};
use postgres::NoTls;
use syncguard::{ErrorCode, LockError, PgLockClient};

fn client(url: &str) -> PgLockClient {
    builder().connect(url).unwrap()
}

#[test]
fn a_standby_refuses() {
    let server = Server::start(&Config::new());
    server.stop(Stop::Fast);
    fs::write(server.data_dir().join("standby.signal"), "").unwrap();
    server.start_again();
    let client = client(server.url());
    for _ in 0..2 {
        let error = client.try_advisory_lock(&key()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::ServiceUnavailable);
        assert!(error.to_string().contains("standby"), "{error}");
    }
    let error = client.advisory_lock(&key()).unwrap_err();
    assert!(error.to_string().contains("standby"), "a wait ends at once: {error}");
    let mut observer = server.client();
    let left: i64 =
        observer.query_one("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'", &[]).unwrap().get(0);
    assert_eq!(left, 0);
}

#[test]
fn a_server_that_became_a_standby_refuses_too() {
    let server = Server::start(&Config::new());
    let client = client(server.url());
    drop(taken(&client, key()));
    server.stop(Stop::Fast);
    fs::write(server.data_dir().join("standby.signal"), "").unwrap();
    server.start_again();
    let error = client.try_advisory_lock(&key()).unwrap_err();
    assert!(error.to_string().contains("standby"), "not only at the first lock: {error}");
}

#[test]
fn a_transaction_pooler_is_refused() {
    let client = client(&transaction_pooler(server_port()));
    let refused = |error: LockError| {
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
        assert!(error.to_string().contains("pooler"), "{error}");
    };
    let key = key();
    refused(client.try_advisory_lock(&key).unwrap_err());
    refused(client.advisory_lock(&key).unwrap_err());
    let direct = self::client(server().url());
    drop(taken(&direct, key));
}

#[test]
fn stub_functions_are_refused() {
    let server = Server::start(&Config::new());
    let mut admin = server.client();
    for (name, answer) in [("pg_try_advisory_lock", "true"), ("pg_advisory_unlock", "true")] {
        admin
            .batch_execute(&format!(
                "ALTER FUNCTION pg_catalog.{name}(bigint) RENAME TO real_{name}; \
                 CREATE FUNCTION pg_catalog.{name}(bigint) RETURNS boolean LANGUAGE sql VOLATILE AS 'SELECT {answer}'"
            ))
            .unwrap();
    }
    // With a second session to compare, and without.
    let one = builder().build(callers_pool(server.url(), 1)).unwrap();
    for client in [client(server.url()), one] {
        let error = client.try_advisory_lock(&key()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
        assert!(error.to_string().contains("stubs"), "{error}");
    }
    admin.batch_execute("DROP FUNCTION pg_catalog.pg_try_advisory_lock(bigint)").unwrap();
    let error = client(server.url()).try_advisory_lock(&key()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    assert!(error.to_string().contains("no session locks"), "{error}");
}

#[test]
fn the_tables_of_the_server_are_not_needed() {
    // An empty database, nothing of ours in it.
    let name = format!("d{}", unique());
    let mut admin = server().client();
    admin.batch_execute(&format!("CREATE DATABASE {name}")).unwrap();
    let mut config: postgres::Config = server().url().parse().unwrap();
    config.dbname(&name);
    let client = builder().connect_with(config, NoTls).unwrap();
    let (here, there) = (key(), self::client(server().url()));
    let guard = taken(&client, here);
    // A key belongs to its database.
    drop(taken(&there, here));
    drop((guard, client));
    admin.batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).unwrap();
}
