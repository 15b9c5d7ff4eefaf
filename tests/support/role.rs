//! A login role with settings of its own.

use postgres::{Config, NoTls};
use syncguard::{PgLockClient, PgLockClientBuilder, Result};

use super::schema::TestSchema;

/// Exists as long as this value; declare it after the schema it works in.
pub struct Role {
    name: String,
    config: Config,
}

impl Role {
    /// May do everything in this schema, and nothing elsewhere.
    pub fn new(schema: &TestSchema) -> Self {
        let role = Self::without_rights(schema);
        admin(schema, &format!("GRANT USAGE, CREATE ON SCHEMA {} TO {}", schema.name(), role.name));
        role
    }

    /// The same, with all rights on the tables that are there.
    pub fn with_tables(schema: &TestSchema) -> Self {
        let role = Self::new(schema);
        admin(schema, &format!("GRANT ALL ON ALL TABLES IN SCHEMA {} TO {}", schema.name(), role.name));
        role
    }

    pub fn without_rights(schema: &TestSchema) -> Self {
        let mut config = schema.config();
        let name = format!("role_{}", super::unique());
        config.user(&name);
        let role = Self { name, config };
        admin(schema, &format!("CREATE ROLE {} LOGIN", role.name));
        role
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// A default for the sessions that begin from now on.
    pub fn set(&self, schema: &TestSchema, setting: &str, value: &str) {
        admin(schema, &format!("ALTER ROLE {} SET {setting} TO {value}", self.name));
    }

    /// Connects as this role, with the schema as its search path.
    pub fn config(&self) -> Config {
        self.config.clone()
    }

    /// Connects as this role, with the search path that the role has.
    pub fn config_with_own_path(&self) -> Config {
        let mut config = self.config.clone();
        config.options("");
        config
    }

    pub fn connect(&self, builder: PgLockClientBuilder) -> Result<PgLockClient> {
        builder.connect_with(self.config(), NoTls)
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let mut config = self.config.clone();
        config.user("postgres").connect_timeout(std::time::Duration::from_secs(2));
        if let Ok(mut client) = config.connect(NoTls) {
            let name = &self.name;
            let _ = client
                .batch_execute(&format!("SET lock_timeout = '2s'; DROP OWNED BY {name}; DROP ROLE {name}"));
        }
    }
}

fn admin(schema: &TestSchema, sql: &str) {
    schema.client().batch_execute(sql).unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}
