//! Whether the indexes on keys are still in the order that the server compares by.
//!
//! An index is a sorted list. If the collation that it was sorted by changes under it, as an upgrade
//! of the system's libraries does, a search goes astray: a key that is held is not found and granted
//! again, and a counter begins anew (<https://www.postgresql.org/docs/current/collation.html#COLLATION-MANAGING>).
//! `COLLATE "C"` compares bytes and never changes; our own tables have it. Tables of other clients and
//! of earlier versions may not: they are looked at by setup and before a client's first use.

use crate::error::{LockError, Result};
use crate::pg::Failure;
use crate::pg::answers::{Row, flag, int, malformed, required, text};
use crate::pg::names::EQ;
use crate::pg::session::Session;
use crate::pg::statement::{Message, push_quoted};

/// How many entries of an index are compared with their neighbours.
const SAMPLE: u32 = 10_000;

/// The first release that keeps a version of a database's own collation.
const DATABASE_VERSIONS: i64 = 150_000;

/// Whether an index of the tables with these oids is sorted by anything but bytes (0: not text, 950: "C",
/// 951: "POSIX"), as one more column of the survey.
pub(super) fn is_asked_for(tables: &[&str]) -> String {
    let of: Vec<String> = tables.iter().map(|oid| format!("i.indrelid {EQ} {oid}")).collect();
    format!(
        "EXISTS (SELECT 1 FROM pg_catalog.pg_index i WHERE ({}) \
         AND i.indcollation[0] OPERATOR(pg_catalog.<>) ALL ('{{0,950,951}}'::pg_catalog.oid[]))",
        of.join(" OR ")
    )
}

/// Refuses tables whose indexes on keys may be out of order.
pub(super) fn check(session: &mut Session<'_>, tables: &[&str]) -> Result<(), Failure> {
    let answers = session.ask(&Message::new().raw(session.limits_plain()).raw(indexes(tables)?))?;
    let indexes = answers.into_last_rows().iter().map(Index::read).collect::<Result<Vec<_>>>()?;
    if indexes.is_empty() {
        return Ok(());
    }
    let columns: Vec<_> = indexes.iter().map(|index| index.now(tables)).collect();
    let answers = session.ask(
        &Message::new()
            .raw(session.limits_plain())
            // Along the index, whatever that costs: its order is what is asked about.
            .raw("SET LOCAL enable_seqscan TO off; SET LOCAL enable_bitmapscan TO off; SET LOCAL enable_sort TO off")
            .raw(format!("SELECT {}", columns.join(", "))),
    )?;
    let row = required(answers.row(0)?)?;
    for (n, index) in indexes.iter().enumerate() {
        index.judge(text(row, 2 * n)?, required(flag(row, 2 * n + 1)?)?, tables)?;
    }
    Ok(())
}

/// The indexes on the columns that rows are found by which are sorted by a collation that can change.
fn indexes(tables: &[&str]) -> Result<String> {
    let mut oids = Vec::new();
    for table in tables {
        let mut name = String::new();
        push_quoted(table, &mut name)?;
        oids.push(format!("to_regclass({name})"));
    }
    let oids = oids.join(", ");
    Ok(format!(
        "SELECT array_position(ARRAY[{oids}]::oid[], i.indrelid)::int8, a.attname::text, c.oid::int8, format('%I.%I', n.nspname, c.collname), \
           CASE WHEN c.collprovider = 'd' THEN to_jsonb(d) ->> 'datcollversion' ELSE c.collversion END, \
           c.collisdeterministic, \
           has_column_privilege(i.indrelid, a.attname::text, 'SELECT'), current_setting('server_version_num')::int8, \
           i.indisunique AND i.indnatts = 1 \
         FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] \
           JOIN pg_collation AS c ON c.oid = i.indcollation[0] JOIN pg_namespace AS n ON n.oid = c.collnamespace \
           JOIN pg_database AS d ON d.datname = current_database() \
         WHERE i.indrelid IN ({oids}) AND i.indisvalid \
           AND a.attname IN ('key', 'lock_id', 'fence_key') \
           AND NOT (c.collprovider = 'c' AND c.collcollate IN ('C', 'POSIX')) \
           AND NOT (c.collprovider = 'd' AND coalesce(to_jsonb(d) ->> 'datlocprovider', 'c') = 'c' AND d.datcollate IN ('C', 'POSIX'))"
    ))
}

/// An index, and the collation that it is sorted by.
struct Index {
    /// The place of its table among those that were asked about.
    table: usize,
    column: String,
    collation: i64,
    collation_name: String,
    /// The version that the server noted for the collation when the database was made, or refreshed.
    recorded: Option<String>,
    deterministic: bool,
    readable: bool,
    server: i64,
    /// Whether no entry may be there twice.
    unique: bool,
}

impl Index {
    fn read(row: &Row) -> Result<Self> {
        let owned = |column| -> Result<Option<String>> { Ok(text(row, column)?.map(str::to_owned)) };
        Ok(Self {
            table: usize::try_from(required(int(row, 0)?)? - 1).map_err(|_| malformed())?,
            column: required(owned(1)?)?,
            collation: required(int(row, 2)?)?,
            collation_name: required(owned(3)?)?,
            recorded: owned(4)?,
            deterministic: required(flag(row, 5)?)?,
            readable: required(flag(row, 6)?)?,
            server: required(int(row, 7)?)?,
            unique: required(flag(row, 8)?)?,
        })
    }

    /// Whether the collation is the database's own.
    fn of_database(&self) -> bool {
        self.collation == 100
    }

    /// What the server says now, as two columns: the collation's version, and whether two neighbours in
    /// the index are not in order, or equal.
    fn now(&self, tables: &[&str]) -> String {
        let version = if !self.of_database() {
            format!("pg_collation_actual_version({})", self.collation)
        } else if self.server >= DATABASE_VERSIONS {
            "(SELECT pg_database_collation_actual_version(d.oid) FROM pg_database AS d WHERE d.datname = current_database())"
                .to_owned()
        } else {
            // Nobody noted it. Only the order itself can tell.
            "NULL".to_owned()
        };
        if !self.readable {
            return format!("{version}, false");
        }
        let table = tables.get(self.table).copied().unwrap_or_default();
        let wrong = if self.unique { "<=" } else { "<" };
        let order = format!("\"{}\" COLLATE {}", self.column, self.collation_name);
        format!(
            "{version}, EXISTS (SELECT 1 FROM (\
               SELECT s.k, lag(s.k) OVER (ORDER BY s.k) AS before FROM (\
                 SELECT {order} AS k FROM {table} ORDER BY {order} LIMIT {SAMPLE}) AS s) AS n WHERE n.k {wrong} n.before)"
        )
    }

    fn judge(&self, actual: Option<&str>, disordered: bool, tables: &[&str]) -> Result<()> {
        let remedy = || {
            let refresh = if self.of_database() {
                "ALTER DATABASE … REFRESH COLLATION VERSION".to_owned()
            } else {
                format!("ALTER COLLATION {} REFRESH VERSION", self.collation_name)
            };
            let reindex: Vec<String> = tables.iter().map(|table| format!("REINDEX TABLE {table}")).collect();
            let reindex = reindex.join(", ");
            format!(
                "stop every client, run {reindex}, then {refresh}: see \"The database's collation\" in docs/operations.md"
            )
        };
        if !self.deterministic {
            return Err(LockError::invalid(format!(
                "the lock tables' column {} has a nondeterministic collation, to which different keys are one: give it COLLATE \"C\"",
                self.column
            )));
        }
        if let (Some(recorded), Some(actual)) = (self.recorded.as_deref(), actual)
            && recorded != actual
        {
            return Err(LockError::invalid(format!(
                "the collation that the lock tables' indexes are sorted by was of version {recorded} and is now of {actual}: keys that are held may not be found; {}",
                remedy()
            )));
        }
        if disordered {
            return Err(LockError::invalid(format!(
                "an index of the lock tables is not in the order of its collation, or holds a key twice: keys that are held may not be found; {}",
                remedy()
            )));
        }
        Ok(())
    }
}
