//! The environment: which of libpq's variables count, and when
//! (<https://www.postgresql.org/docs/current/libpq-envars.html>).
//!
//! Whoever gives a connection string says where to connect to, and as whom; the environment never changes
//! that. It may say what strings leave out: a password, and how to encrypt.

use std::path::{Path, PathBuf};

use crate::error::{LockError, Result};
use crate::pg::split::quoted;

/// The value of a variable.
pub(crate) type Variable = Box<dyn Fn(&str) -> Option<String>>;

/// Variables, and where home is.
pub(crate) struct Environment {
    pub(crate) variable: Variable,
    pub(crate) home: Option<PathBuf>,
}

impl Environment {
    /// The process's own. A variable that is empty counts as none.
    pub(crate) fn of_process() -> Self {
        let variable = |name: &str| {
            let value = std::env::var_os(name)?.to_string_lossy().into_owned();
            (!value.is_empty()).then_some(value)
        };
        Self { variable: Box::new(variable), home: std::env::home_dir() }
    }

    /// What a connection string leaves out, for an option of it.
    pub(crate) fn option(&self, name: &str) -> Option<String> {
        let (_, variable) = WITH_A_STRING.iter().find(|(option, _)| *option == name)?;
        let value = (self.variable)(variable);
        let required = || (self.variable)("PGREQUIRESSL").filter(|value| value.starts_with('1'));
        if name == "sslmode" { value.or_else(|| required().map(|_| "require".to_owned())) } else { value }
    }

    /// Where the passfile is, unless something else is said.
    pub(crate) fn passfile(&self) -> Option<PathBuf> {
        if cfg!(windows) {
            return (self.variable)("APPDATA")
                .map(|data| Path::new(&data).join("postgresql").join("pgpass.conf"));
        }
        self.home.as_ref().map(|home| home.join(".pgpass"))
    }

    /// What nobody here can do, and what would be weaker without.
    pub(crate) fn check(&self) -> Result<()> {
        let set = |name: &&str| (self.variable)(name).is_some();
        if let Some(name) = CANNOT.iter().copied().find(|name| set(name)) {
            return Err(LockError::invalid(format!(
                "the environment has {name}, which this library does not support: unset it, or check in another way"
            )));
        }
        if (self.variable)("PGGSSENCMODE").as_deref() == Some("require") {
            return Err(LockError::invalid(
                "the environment has PGGSSENCMODE=require, and GSSAPI is not spoken here: use TLS",
            ));
        }
        Ok(())
    }

    /// A connection string of what the environment says, and of libpq's defaults.
    pub(crate) fn connection_string(&self) -> Result<String> {
        if (self.variable)("PGSERVICE").is_some() {
            return Err(LockError::invalid(
                "the environment has PGSERVICE, and service files are not read here: give the service's settings themselves",
            ));
        }
        let mut text = String::new();
        for (option, variable) in WITHOUT_A_STRING {
            if let Some(value) = (self.variable)(variable) {
                text.extend([option, "=", &quoted(&value), " "]);
            }
        }
        let named = ["PGHOST", "PGHOSTADDR"].iter().any(|name| (self.variable)(name).is_some());
        if !named {
            let port = (self.variable)("PGPORT").unwrap_or_else(|| "5432".to_owned());
            text.extend(["host=", &quoted(default_host(&port))]);
        }
        Ok(text)
    }
}

/// Where libpq looks for a server's socket, as the distributions build it.
pub(crate) const SOCKET_FOLDERS: [&str; 2] = ["/var/run/postgresql", "/tmp"];

fn default_host(port: &str) -> &'static str {
    let there = |folder: &&str| Path::new(folder).join(format!(".s.PGSQL.{port}")).exists();
    SOCKET_FOLDERS.into_iter().find(there).unwrap_or("localhost")
}

/// Options, and the variables that stand in for them wherever a connection string leaves them out.
const WITH_A_STRING: [(&str, &str); 12] = [
    ("password", "PGPASSWORD"),
    ("passfile", "PGPASSFILE"),
    ("channel_binding", "PGCHANNELBINDING"),
    ("sslmode", "PGSSLMODE"),
    ("sslnegotiation", "PGSSLNEGOTIATION"),
    ("sslrootcert", "PGSSLROOTCERT"),
    ("sslcert", "PGSSLCERT"),
    ("sslkey", "PGSSLKEY"),
    ("sslcertmode", "PGSSLCERTMODE"),
    ("sslsni", "PGSSLSNI"),
    ("ssl_min_protocol_version", "PGSSLMINPROTOCOLVERSION"),
    ("ssl_max_protocol_version", "PGSSLMAXPROTOCOLVERSION"),
];

/// Those that count only where there is no connection string at all.
const WITHOUT_A_STRING: [(&str, &str); 10] = [
    ("host", "PGHOST"),
    ("hostaddr", "PGHOSTADDR"),
    ("port", "PGPORT"),
    ("dbname", "PGDATABASE"),
    ("user", "PGUSER"),
    ("options", "PGOPTIONS"),
    ("application_name", "PGAPPNAME"),
    ("connect_timeout", "PGCONNECT_TIMEOUT"),
    ("target_session_attrs", "PGTARGETSESSIONATTRS"),
    ("load_balance_hosts", "PGLOADBALANCEHOSTS"),
];

/// Demands that are not met here.
const CANNOT: [&str; 4] = ["PGREQUIREAUTH", "PGREQUIREPEER", "PGSSLCRL", "PGSSLCRLDIR"];
