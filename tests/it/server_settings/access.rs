//! Passwords and encryption, on a server that insists on them.

use super::*;
use crate::support::{Config, Server, TestSchema};
use openssl::ssl::{SslConnector, SslMethod};
use openssl::x509::X509;
use postgres::config::SslMode;
use postgres_openssl::MakeTlsConnector;
use syncguard::{ErrorCode, ReleaseResult};

const HBA: &str = "\
local all all trust
host all postgres 127.0.0.1/32 trust
host all password_only 127.0.0.1/32 scram-sha-256
hostssl all encrypted_only 127.0.0.1/32 scram-sha-256
";

/// A server with a password for each role, and encryption.
struct Guarded {
    schema: TestSchema,
    server: Server,
    certificate: X509,
}

impl Guarded {
    fn start() -> Self {
        let server = Server::start(&Config::new().set("password_encryption", "scram-sha-256"));
        let certificate = crate::support::tls::install(&server);
        let data = server.data_dir();
        let schema = server.schema();
        let mut admin = schema.client();
        for role in ["password_only", "encrypted_only"] {
            admin
                .batch_execute(&format!(
                    "CREATE ROLE {role} LOGIN PASSWORD 'correct'; GRANT USAGE, CREATE ON SCHEMA {} TO {role}",
                    schema.name()
                ))
                .unwrap();
        }
        PgLockClient::connect(&schema.url()).unwrap();
        for role in ["password_only", "encrypted_only"] {
            admin
                .batch_execute(&format!("GRANT ALL ON ALL TABLES IN SCHEMA {} TO {role}", schema.name()))
                .unwrap();
        }
        std::fs::write(data.join("pg_hba.conf"), HBA).unwrap();
        server.configure("ssl", "on");
        Self { schema, server, certificate }
    }

    fn config(&self, user: &str, password: &str, mode: SslMode) -> postgres::Config {
        let mut config = self.schema.config();
        config.user(user).password(password).ssl_mode(mode);
        config
    }

    /// A connector that trusts this server, or nobody.
    fn tls(&self, trusts: bool) -> MakeTlsConnector {
        let mut connector = SslConnector::builder(SslMethod::tls()).unwrap();
        if trusts {
            connector.cert_store_mut().add_cert(self.certificate.clone()).unwrap();
        }
        MakeTlsConnector::new(connector.build())
    }
}

#[test]
fn passwords_and_encryption_work_and_what_is_wrong_is_said() {
    let guarded = Guarded::start();
    let connect = |user, password, mode| {
        PgLockClient::builder().connect_with(guarded.config(user, password, mode), NoTls)
    };
    let client = connect("password_only", "correct", SslMode::Disable).unwrap();
    assert!(client.acquire("by password", TTL).unwrap().acquired().is_some());
    for password in ["wrong", ""] {
        let error = connect("password_only", password, SslMode::Disable).unwrap_err();
        assert_eq!(error.code(), ErrorCode::AuthFailed, "{error:?}");
        assert!(!format!("{error:?}").contains("password_only"));
    }
    // The server takes this role only with encryption.
    for mode in [SslMode::Disable, SslMode::Prefer] {
        let error = connect("encrypted_only", "correct", mode).unwrap_err();
        assert_eq!(error.code(), ErrorCode::AuthFailed, "{error:?}");
        assert!(error.to_string().contains("pg_hba.conf"), "{error}");
    }
    let error = connect("encrypted_only", "correct", SslMode::Require).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    assert!(error.to_string().contains("connect_with"), "{error}");

    for mode in [SslMode::Require, SslMode::Prefer] {
        let config = guarded.config("encrypted_only", "correct", mode);
        let client = PgLockClient::builder().connect_with(config, guarded.tls(true)).unwrap();
        let guard = client.lock("encrypted").unwrap();
        assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    }
    let mut observer = guarded.server.client();
    let sql = "SELECT count(*) FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) WHERE a.usename = 'encrypted_only' AND NOT s.ssl";
    assert_eq!(observer.query_one(sql, &[]).unwrap().get::<_, i64>(0), 0);
    let config = guarded.config("encrypted_only", "correct", SslMode::Require);
    let error = PgLockClient::builder().connect_with(config, guarded.tls(false)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    assert!(error.to_string().contains("the TLS handshake failed ("), "{error}");
    assert!(error.to_string().contains("certificate verify failed"), "{error}");
    let mut config = guarded.schema.config();
    config.user("password_only").ssl_mode(SslMode::Disable);
    let error = PgLockClient::builder().connect_with(config, NoTls).unwrap_err();
    assert_eq!(error.code(), ErrorCode::AuthFailed, "{error:?}");
    assert!(error.to_string().contains("add password="), "{error}");
    cancelling_works_through_encryption(&guarded);
}

fn cancelling_works_through_encryption(guarded: &Guarded) {
    let name = unique();
    let mut config = guarded.config("encrypted_only", "correct", SslMode::Require);
    config.application_name(&name);
    let client =
        PgLockClient::builder().operation_timeout(LIMIT).connect_with(config, guarded.tls(true)).unwrap();
    let mut stalled = guarded.schema.client();
    stalled.batch_execute("BEGIN; SELECT pg_advisory_xact_lock(hashtext('stalled'))").unwrap();
    let token = CancelToken::new();
    let call = {
        let client = client.cancellable(&token);
        Call::start(&name, move || client.acquire("stalled", TTL))
    };
    let stored = crate::support::Stored::new(&guarded.schema);
    call.wait_until_blocked(&stored);
    token.cancel();
    assert_eq!(call.join().unwrap_err().code(), ErrorCode::Aborted);
    // The server has stopped waiting although the other transaction goes on.
    wait_until(LIMIT, "the server process has given up", || {
        let sql = "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE NOT l.granted AND a.application_name = $1";
        stored.one(sql, &[&name]).get::<_, i64>(0) == 0
    });
    stalled.batch_execute("COMMIT").unwrap();
}
