//! One schema per test, so that tests share a server and nothing else.

use postgres::{Client, Config, NoTls};

/// A schema that exists as long as this value.
#[derive(Debug)]
pub struct TestSchema {
    name: String,
    server_url: String,
    server_socket_url: String,
}

impl TestSchema {
    pub(super) fn create(server_url: &str, server_socket_url: &str) -> Self {
        let name = format!("sg_{}", super::unique());
        let schema =
            Self { name, server_url: server_url.to_owned(), server_socket_url: server_socket_url.to_owned() };
        let created = connect(server_url).batch_execute(&format!("CREATE SCHEMA {}", schema.name));
        created.unwrap_or_else(|error| panic!("the test server takes no new schema: {error:?}"));
        schema
    }

    /// A lower-case word that needs no quotes.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Over TCP; every session that uses it has this schema as its search path.
    pub fn url(&self) -> String {
        with_search_path(&self.server_url, &self.name)
    }

    /// The same over the Unix socket.
    pub fn socket_url(&self) -> String {
        with_search_path(&self.server_socket_url, &self.name)
    }

    pub fn config(&self) -> Config {
        self.url().parse().unwrap_or_else(|error| panic!("SYNCGUARD_TEST_URL cannot be read: {error:?}"))
    }

    pub fn client(&self) -> Client {
        connect(&self.url())
    }

    /// A connection that other sessions find in `pg_stat_activity` under this name.
    pub fn client_named(&self, application_name: &str) -> Client {
        let connected = self.config().application_name(application_name).connect(NoTls);
        connected.unwrap_or_else(|error| panic!("cannot connect to the test server: {error:?}"))
    }
}

impl Drop for TestSchema {
    fn drop(&mut self) {
        // Never panics, and never waits long: a test that failed may have left a lock behind, or the name of
        // a standby that is not there, and a private server may be down. A throwaway server takes what is
        // left with it.
        let Ok(mut config) = self.server_url.parse::<Config>() else { return };
        config.connect_timeout(std::time::Duration::from_secs(2));
        if let Ok(mut client) = config.connect(NoTls) {
            let sql = format!(
                "SET lock_timeout = '2s'; SET synchronous_commit TO local; DROP SCHEMA {} CASCADE",
                self.name
            );
            if let Err(error) = client.batch_execute(&sql) {
                eprintln!("the schema {} stays behind: {error:?}", self.name);
            }
        }
    }
}

fn connect(url: &str) -> Client {
    Client::connect(url, NoTls).unwrap_or_else(|error| panic!("cannot connect to the test server: {error:?}"))
}

/// Both forms of a connection string; one that has `options` already is not supported.
fn with_search_path(url: &str, schema: &str) -> String {
    if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
        return format!("{url} options='-c search_path={schema}'");
    }
    let separator = if url.contains('?') { '&' } else { '?' };
    format!("{url}{separator}options=-c%20search_path%3D{schema}")
}
