//! What the sessions of a storm's holders bring along: each process is of a login role with defaults of
//! its own, drawn by the seed.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use postgres::Client;

use crate::holder::Random;

/// A name, and the defaults of a role.
type Environment = (&'static str, &'static [(&'static str, &'static str)]);

const ENVIRONMENTS: [Environment; 10] = [
    ("nothing", &[]),
    ("another current role", &[("role", "other")]),
    ("client_min_messages error", &[("client_min_messages", "error")]),
    ("track_activities off", &[("track_activities", "off")]),
    ("time zone, DateStyle", &[("timezone", "'<odd>-13:17'"), ("datestyle", "'SQL, DMY'")]),
    ("row_security off", &[("row_security", "off")]),
    (
        "standard_conforming_strings off",
        &[("standard_conforming_strings", "off"), ("backslash_quote", "off")],
    ),
    ("search_path empty", &[("search_path", "''")]),
    (
        "serializable, synchronous_commit off",
        &[("default_transaction_isolation", "serializable"), ("synchronous_commit", "off")],
    ),
    ("limits of its own", &[("lock_timeout", "1"), ("statement_timeout", "200")]),
];

/// Makes the roles. They may do everything with the tables that are there, and with those that a fault
/// makes anew.
pub fn create(sql: &mut Client) {
    let mut statements = "CREATE ROLE other; GRANT ALL ON ALL TABLES IN SCHEMA public TO PUBLIC; \
                          ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO PUBLIC;"
        .to_owned();
    for (n, (_, settings)) in ENVIRONMENTS.iter().enumerate() {
        let _ = write!(statements, "CREATE ROLE environment{n} LOGIN IN ROLE other;");
        for (name, value) in *settings {
            let _ = write!(statements, "ALTER ROLE environment{n} SET {name} TO {value};");
        }
    }
    sql.batch_execute(&statements).expect("the server takes roles");
}

/// How many processes had which.
#[derive(Default)]
pub struct Drawn(BTreeMap<&'static str, u64>);

impl Drawn {
    /// The URL for the next process.
    pub fn url(&mut self, url: &str, seed: u64) -> String {
        let n = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1).below(ENVIRONMENTS.len() as u64);
        let (name, _) = ENVIRONMENTS[usize::try_from(n).unwrap_or(0)];
        *self.0.entry(name).or_default() += 1;
        url.replace("//postgres@", &format!("//environment{n}@"))
    }

    /// As a sentence, or nothing.
    pub fn sentence(&self) -> String {
        let all: Vec<_> = self.0.iter().map(|(name, times)| format!("{name}: {times}")).collect();
        if all.is_empty() {
            String::new()
        } else {
            format!("Environments of the processes: {}.", all.join(", "))
        }
    }
}
