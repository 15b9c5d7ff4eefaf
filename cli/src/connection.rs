//! Which server, and which tables.

use std::env;

use syncguard::{PgLockClient, PgLockClientBuilder};

use crate::args::At;
use crate::failure::Failure;

/// libpq's variables, and the driver's name for each.
const VARIABLES: [(&str, &str); 10] = [
    ("PGHOST", "host"),
    ("PGHOSTADDR", "hostaddr"),
    ("PGPORT", "port"),
    ("PGUSER", "user"),
    ("PGPASSWORD", "password"),
    ("PGDATABASE", "dbname"),
    ("PGAPPNAME", "application_name"),
    ("PGOPTIONS", "options"),
    ("PGCONNECT_TIMEOUT", "connect_timeout"),
    ("PGSSLMODE", "sslmode"),
];

/// Where a server listens on this machine if nothing says so.
const SOCKETS: [&str; 2] = ["/var/run/postgresql", "/tmp"];

/// A client for what changes something: makes the tables if they are not there.
pub(crate) fn connect(at: &At) -> Result<PgLockClient, Failure> {
    Ok(builder(at).connect(&address(at)?)?)
}

/// A client for what only looks: makes no tables.
pub(crate) fn look(at: &At) -> Result<PgLockClient, Failure> {
    Ok(builder(at).auto_create_tables(false).connect(&address(at)?)?)
}

fn builder(at: &At) -> PgLockClientBuilder {
    let mut builder = PgLockClient::builder();
    if let Some(name) = &at.schema {
        builder = builder.schema(name);
    }
    if let Some(name) = &at.table {
        builder = builder.table_name(name);
    }
    if let Some(name) = &at.fence_table {
        builder = builder.fence_table_name(name);
    }
    builder
}

/// The connection string: never printed.
fn address(at: &At) -> Result<String, Failure> {
    let set = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
    let named = at.url.clone().or_else(|| set("SYNCGUARD_URL")).or_else(|| set("DATABASE_URL"));
    named.or_else(|| from_variables(set)).ok_or_else(|| {
        Failure::Usage(
            "which PostgreSQL? Pass --url postgresql://user@host/database, or set SYNCGUARD_URL, DATABASE_URL or PGHOST"
                .to_owned(),
        )
    })
}

/// libpq's variables as a connection string, if one of them says where to connect.
fn from_variables(set: impl Fn(&str) -> Option<String>) -> Option<String> {
    let where_to = ["PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER"];
    if !where_to.iter().any(|name| set(name).is_some()) {
        return None;
    }
    let mut parts: Vec<String> = VARIABLES
        .iter()
        .filter_map(|(variable, name)| set(variable).map(|value| format!("{name}={}", quoted(&value))))
        .collect();
    if set("PGHOST").is_none() && set("PGHOSTADDR").is_none() {
        let port = set("PGPORT").unwrap_or_else(|| "5432".to_owned());
        let socket = |dir: &&&str| std::path::Path::new(dir).join(format!(".s.PGSQL.{port}")).exists();
        parts.push(format!("host={}", SOCKETS.iter().find(socket).unwrap_or(&"localhost")));
    }
    if set("PGUSER").is_none() {
        // As libpq: the name of the account.
        let account = set("USER").or_else(|| set("LOGNAME"))?;
        parts.push(format!("user={}", quoted(&account)));
    }
    Some(parts.join(" "))
}

/// A value for a string of `name=value` pairs.
fn quoted(value: &str) -> String {
    format!("'{}'", value.replace('\\', "\\\\").replace('\'', "\\'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made_of(variables: &[(&str, &str)]) -> Option<String> {
        from_variables(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_variables_of_libpq_make_a_connection_string() {
        let all = made_of(&[("PGHOST", "db.example"), ("PGUSER", "app"), ("PGPASSWORD", "it's \\ one")]);
        assert_eq!(all.as_deref(), Some("host='db.example' user='app' password='it\\'s \\\\ one'"));
        let config: syncguard::postgres::Config = all.expect("it is there").parse().expect("it is read");
        assert_eq!(config.get_password(), Some(b"it's \\ one".as_slice()));
        let local = made_of(&[("PGDATABASE", "app"), ("PGPORT", "1"), ("USER", "me")]);
        assert_eq!(local.as_deref(), Some("port='1' dbname='app' host=localhost user='me'"));
        assert_eq!(made_of(&[("USER", "me"), ("PGPASSWORD", "secret")]), None, "nothing says where");
    }
}
