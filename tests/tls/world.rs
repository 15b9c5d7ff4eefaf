//! A server with certificates, and what a client needs to know of it.

use std::fs;
use std::path::PathBuf;

use postgres::NoTls;
use syncguard::{LockError, PgLockClient};

use crate::support::tls::{Request, Signed, give, use_certificate, write_private};
use crate::support::{Config, LIMIT, Server, wait_until};

const HBA: &str = "\
local all all trust
host all postgres 127.0.0.1/32 trust
hostssl all by_certificate 127.0.0.1/32 cert
hostssl all by_password 127.0.0.1/32 scram-sha-256
";

pub(crate) const PASSWORD: &str = "correct";

pub(crate) struct World {
    pub(crate) server: Server,
    pub(crate) root: Signed,
    dir: PathBuf,
}

impl World {
    /// A server at `db.example`, with a certificate of an authority that its clients know.
    pub(crate) fn new() -> Self {
        let world = Self::with(Config::new());
        let served = Request::new("db.example").name("db.example").sign_by(&world.root);
        world.serve(&served.pem(), &served.key_pem());
        world
    }

    fn with(config: Config) -> Self {
        let server = Server::start(&config.set("password_encryption", "scram-sha-256"));
        // Not by `prefer`, which would log that it is not encrypted beside a test that reads the log.
        let url = format!("{}?sslmode=disable", server.url());
        PgLockClient::connect(&url).expect("the tables are made before anything is encrypted");
        let mut admin = server.client();
        for role in ["by_certificate", "by_password"] {
            let sql = format!(
                "CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}'; GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}"
            );
            admin.batch_execute(&sql).unwrap();
        }
        fs::write(server.data_dir().join("pg_hba.conf"), HBA).unwrap();
        let root = Request::new("the root").authority().sign_itself();
        let dir = server.dir().join("client");
        fs::create_dir(&dir).unwrap();
        give(&server, "clients.crt", &root.pem());
        let world = Self { server, root, dir };
        wait_until(LIMIT, "the session that made the tables has ended", || world.sessions() == (0, 0));
        world.file("root.pem", &world.root.pem());
        world
    }

    /// Has the server use this certificate from now on.
    pub(crate) fn serve(&self, certificates: &[u8], key: &[u8]) {
        use_certificate(&self.server, certificates, key);
        self.server.configure("ssl_ca_file", "clients.crt");
        self.server.configure("ssl", "on");
    }

    /// A file of the client's.
    pub(crate) fn file(&self, name: &str, text: &[u8]) -> String {
        let path = write_private(&self.dir.join(name), text);
        path.to_str().unwrap().to_owned()
    }

    /// A connection string for the server at `db.example`, with more options.
    pub(crate) fn url(&self, user: &str, more: &str) -> String {
        let port = self.server.port();
        format!("host=db.example hostaddr=127.0.0.1 port={port} dbname=postgres user={user} {more}")
    }

    /// The same, for whoever trusts the root.
    pub(crate) fn trusting(&self, mode: &str) -> String {
        let root = self.dir.join("root.pem");
        self.url("postgres", &format!("sslmode={mode} sslrootcert={}", root.display()))
    }

    /// How many sessions of clients there are that are encrypted, and how many that are not.
    pub(crate) fn sessions(&self) -> (i64, i64) {
        let mut sql = postgres::Client::connect(self.server.socket_url(), NoTls).unwrap();
        let text = "SELECT count(*) FILTER (WHERE s.ssl), count(*) FILTER (WHERE NOT s.ssl) FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) WHERE a.application_name = 'syncguard'";
        let row = sql.query_one(text, &[]).unwrap();
        (row.get(0), row.get(1))
    }
}

pub(crate) fn connect(url: &str) -> Result<PgLockClient, LockError> {
    PgLockClient::builder().auto_create_tables(false).connect(url).and_then(|client| {
        client.is_locked("is anybody there?")?;
        Ok(client)
    })
}

/// Why it failed, with all its causes.
#[track_caller]
pub(crate) fn refused(url: &str) -> String {
    match connect(url) {
        Ok(_) => panic!("this must not be connected to"),
        Err(error) => format!("{:?}: {}", error.code(), error.chain()),
    }
}
