//! The library's own statements, one at a time, on a connection that a test holds in its hands.
//!
//! A client on a caller's pool leaves its prepared statements on the connection. The test takes that
//! connection out of the pool and executes them by name, with a pause wherever it likes.

use std::collections::HashMap;

use postgres::{NoTls, SimpleQueryMessage, SimpleQueryRow};
use r2d2_postgres::PostgresConnectionManager;
use syncguard::{PgLockClient, TIME_TOLERANCE_MS, is_live};

use super::schema::TestSchema;

type Connection = r2d2::PooledConnection<PostgresConnectionManager<NoTls>>;

pub struct Scripted {
    connection: Connection,
    /// From `acquire` to `sg_acquire_0123…` and its text.
    statements: HashMap<String, (String, String)>,
}

impl Scripted {
    pub fn new(schema: &TestSchema) -> Self {
        Self::after(schema, |client| {
            client.is_locked("so that everything is prepared").expect("the server answers");
        })
    }

    /// With what this use of a client prepares.
    pub fn after(schema: &TestSchema, used: impl FnOnce(&PgLockClient)) -> Self {
        let manager = PostgresConnectionManager::new(schema.config(), NoTls);
        let pool = r2d2::Pool::builder().max_size(1).build(manager).expect("the server takes connections");
        let client = PgLockClient::builder().build(pool.clone()).expect("the tables can be created");
        used(&client);
        drop(client);
        let mut connection = pool.get().expect("the connection came back");
        let rows = connection
            .query("SELECT name, statement FROM pg_prepared_statements WHERE name LIKE 'sg\\_%'", &[]);
        let rows = rows.expect("the server answers");
        let statements = rows.iter().map(|row| {
            let name: String = row.get(0);
            let what = name.trim_start_matches("sg_").rsplit_once('_').expect("name and digest").0.to_owned();
            (what, (name, row.get(1)))
        });
        let statements = statements.collect();
        Self { connection, statements }
    }

    /// What is prepared, as name and text.
    pub fn prepared(&self) -> impl Iterator<Item = &(String, String)> {
        self.statements.values()
    }

    pub fn name(&self, what: &str) -> &str {
        &self.statements.get(what).unwrap_or_else(|| panic!("no statement {what}")).0
    }

    pub fn client(&mut self) -> &mut postgres::Client {
        &mut self.connection
    }

    pub fn begin(&mut self) {
        self.run("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL search_path TO pg_catalog; SET LOCAL lock_timeout TO '30s'");
    }

    #[track_caller]
    pub fn run(&mut self, sql: &str) {
        self.connection.batch_execute(sql).unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }

    /// Executes one statement; arguments as SQL literals. The rows of its answer.
    #[track_caller]
    pub fn execute(&mut self, what: &str, arguments: &[&str]) -> Vec<SimpleQueryRow> {
        self.try_execute(what, arguments).unwrap_or_else(|error| panic!("{what}: {error:?}"))
    }

    pub fn try_execute(
        &mut self,
        what: &str,
        arguments: &[&str],
    ) -> Result<Vec<SimpleQueryRow>, postgres::Error> {
        let list = if arguments.is_empty() { String::new() } else { format!("({})", arguments.join(",")) };
        let sql = format!("EXECUTE {}{list}", self.name(what));
        let messages = self.connection.simple_query(&sql)?;
        Ok(messages
            .into_iter()
            .filter_map(|message| match message {
                SimpleQueryMessage::Row(row) => Some(row),
                _ => None,
            })
            .collect())
    }
}

/// A column as a number.
pub fn number(row: &SimpleQueryRow, column: usize) -> Option<i64> {
    row.get(column).map(|text| text.parse().expect("a number"))
}

/// One of the three changes, statement by statement, decided as the library decides.
#[allow(clippy::struct_excessive_bools, reason = "each is one step's memory")]
pub struct Script {
    pub kind: Kind,
    key: String,
    lock_id: String,
    /// An acquire that does not take its place in the queue.
    dodges: bool,
    go: bool,
    pub won: bool,
    over: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Acquire,
    Extend,
    Release,
}

impl Kind {
    pub fn steps(self) -> usize {
        if self == Self::Acquire { 6 } else { 4 }
    }
}

impl Script {
    pub fn new(kind: Kind, key: &str, lock_id: &str, dodges: bool) -> Self {
        let (key, lock_id) = (key.to_owned(), lock_id.to_owned());
        Self { kind, key, lock_id, dodges, go: false, won: false, over: false }
    }

    pub fn steps(&self) -> usize {
        self.kind.steps()
    }

    /// Performs step `n`. The last one commits or rolls back.
    pub fn step(&mut self, n: usize, on: &mut Scripted) {
        if self.over {
            return;
        }
        match (self.kind, n) {
            (_, 0) => on.begin(),
            (Kind::Acquire, _) => self.acquire(n, on),
            (_, 1) => self.find(on),
            (_, 2) => {
                if self.go {
                    let (key, id) = (format!("'{}'", self.key), format!("'{}'", self.lock_id));
                    let rows = match self.kind {
                        Kind::Extend => on.execute("update", &[&key, &id, "30000", "''"]),
                        _ => on.execute("delete", &[&key, &id]),
                    };
                    self.won = rows.len() == 1;
                }
            }
            _ => on.run(if self.won { "COMMIT" } else { "ROLLBACK" }),
        }
    }

    fn find(&mut self, on: &mut Scripted) {
        let found = on.execute("find", &[&format!("'{}'", self.lock_id)]);
        let now = number(&on.execute("clock", &[])[0], 0).expect("a time");
        self.go = found
            .first()
            .is_some_and(|row| is_live(number(row, 2).expect("an expiry"), now, TIME_TOLERANCE_MS));
    }

    fn acquire(&mut self, n: usize, on: &mut Scripted) {
        let (key, id) = (format!("'{}'", self.key), format!("'{}'", self.lock_id));
        let fence_key = format!("'fence:{}'", self.key);
        match n {
            1 if self.dodges => {}
            1 => drop(on.execute("queue", &[&key])),
            2 => {
                let held = on.execute("hold", &[&key, &fence_key, &id]);
                self.go = number(&held[0], 0) == Some(1);
            }
            3 => {
                let locked = self.go;
                let view = on.execute("view", &[&key, &fence_key]);
                let now = number(&view[0], 3).expect("a time");
                self.go = match number(&view[0], 1) {
                    None => true,
                    Some(expires) => locked && !is_live(expires, now, TIME_TOLERANCE_MS),
                };
            }
            4 if self.go => match on.try_execute("grant", &[&key, &fence_key, &key, &id, "30000"]) {
                Ok(rows) => self.won = rows.first().is_some_and(|row| row.get(0).is_some()),
                Err(error) => {
                    assert_eq!(error.code().map(postgres::error::SqlState::code), Some("22012"), "{error:?}");
                    on.run("ROLLBACK");
                    self.over = true;
                }
            },
            4 => {}
            _ => on.run(if self.won { "COMMIT" } else { "ROLLBACK" }),
        }
    }
}
