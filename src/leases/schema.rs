//! The two tables, and the optional third: their names, where they are, and how they come to be.
//!
//! `schema.sql` is the only DDL. [`ddl`](TableNames::ddl) runs it for the configured names, in one
//! transaction under an advisory lock of two integers, because `CREATE TABLE IF NOT EXISTS` alone
//! fails when two sessions run it at once. It looks first and does nothing where nothing is missing,
//! so a role without the right to create may call it.

use sha2::{Digest, Sha256};

use crate::error::{LockError, Result};
use crate::leases::collation;
use crate::leases::engine;
use crate::leases::notify::MAY_NOTIFY;
use crate::pg::names::{EQ, PLAIN_NAMES};
use crate::pg::statement::{push_quoted, quoted_name};

/// The DDL, for the default names.
const SCHEMA_SQL: &str = include_str!("../../schema.sql");

const DEFAULT_LOCKS: &str = "syncguard_locks";
const DEFAULT_FENCES: &str = "syncguard_fence_counters";
const DEFAULT_MEMBERS: &str = "syncguard_members";

/// Where the optional part of the DDL begins.
const OPTIONAL: &str = "-- Optional:";

/// The longest identifier (<https://www.postgresql.org/docs/current/limits.html>).
const MAX_IDENTIFIER: usize = 63;

/// The advisory lock that setup runs under: two integers, "SYNC" and "DDL\0", a space of its own
/// that no lease and no session lock of a single number can touch.
const SETUP_LOCK: &str = "pg_catalog.pg_advisory_xact_lock(1398363715, 1145326592)";

/// Whether `"$user"` comes first on the search path and is a schema: the next role has another.
const OWN_PATH: &str = "pg_catalog.starts_with(pg_catalog.ltrim(pg_catalog.current_setting('search_path')), '\"$user\"') \
    AND pg_catalog.current_schema() OPERATOR(pg_catalog.=) CURRENT_USER";

/// The configured names, checked, before anything is known about the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TableNames {
    schema: Option<String>,
    locks: String,
    fences: String,
    members: String,
}

impl TableNames {
    pub(crate) fn new(
        schema: Option<&str>,
        locks: Option<&str>,
        fences: Option<&str>,
        members: Option<&str>,
    ) -> Result<Self> {
        let (locks, fences) = (locks.unwrap_or(DEFAULT_LOCKS), fences.unwrap_or(DEFAULT_FENCES));
        check("table_name", locks)?;
        check("fence_table_name", fences)?;
        let members = members.map_or_else(|| members_of(locks), str::to_owned);
        check("members_table_name", &members)?;
        if let Some(schema) = schema {
            check("schema", schema)?;
        }
        if locks == fences {
            return Err(LockError::invalid(
                "table_name and fence_table_name are the same: fence counters must be kept apart, or cleaning up leases would delete them",
            ));
        }
        if members == locks || members == fences {
            return Err(LockError::invalid(
                "members_table_name is that of another table: the members of shared leases have a table of their own",
            ));
        }
        let schema = schema.map(str::to_owned);
        Ok(Self { schema, locks: locks.to_owned(), fences: fences.to_owned(), members })
    }

    /// The query that finds out where the tables are. Answers, per table: its schema, whether it is
    /// unlogged; whether the counters have `key_debug`; which of the two indexes exist; the schema
    /// that new tables would go to; the database's encoding; whether the role may call waiters; whether
    /// an index is sorted by a collation that can change; whether the search path leads each role to a
    /// schema of its own.
    pub(crate) fn survey(&self) -> Result<String> {
        let (locks, fences) = (self.literal(&self.locks)?, self.literal(&self.fences)?);
        Ok(format!(
            "SELECT ln.nspname, l.relpersistence, fn.nspname, f.relpersistence, \
             EXISTS (SELECT 1 FROM pg_catalog.pg_attribute a WHERE a.attrelid {EQ} f.oid AND a.attname {EQ} 'key_debug' AND NOT a.attisdropped), \
             {} AND {}, pg_catalog.current_schema(), pg_catalog.current_setting('server_encoding'), {MAY_NOTIFY}, {}, {OWN_PATH}, {} \
             FROM (SELECT pg_catalog.to_regclass({locks}) AS l, pg_catalog.to_regclass({fences}) AS f) AS r \
             LEFT JOIN pg_catalog.pg_class l ON l.oid {EQ} r.l LEFT JOIN pg_catalog.pg_namespace ln ON ln.oid {EQ} l.relnamespace \
             LEFT JOIN pg_catalog.pg_class f ON f.oid {EQ} r.f LEFT JOIN pg_catalog.pg_namespace fn ON fn.oid {EQ} f.relnamespace",
            index("l", 1, " AND i.indisunique AND i.indpred IS NULL", "lock_id"),
            index("l", 1, " AND i.indpred IS NULL", "expires_at_ms"),
            collation::is_asked_for(&["l.oid", "f.oid"]),
            engine::keepers(&["l", "f"]),
        ))
    }

    /// The query about the table of members, which is beside that of the leases. Answers: whether it is
    /// there, whether it is unlogged, whether its three indexes exist, whether one is sorted by a collation
    /// that can change.
    pub(crate) fn survey_members(&self, schema: &str) -> Result<String> {
        let mut name = String::new();
        push_quoted(&qualified(schema, &self.members), &mut name)?;
        Ok(format!(
            "SELECT m.oid IS NOT NULL, m.relpersistence, {} AND {} AND {}, {}, {} \
             FROM (SELECT pg_catalog.to_regclass({name}) AS m) AS r LEFT JOIN pg_catalog.pg_class m ON m.oid {EQ} r.m",
            index("m", 1, " AND i.indisunique AND i.indpred IS NULL", "lock_id"),
            index("m", 2, " AND i.indpred IS NULL", "key"),
            index("m", 2, " AND i.indpred IS NOT NULL", "key"),
            collation::is_asked_for(&["m.oid"]),
            engine::keepers(&["m"]),
        ))
    }

    /// What creates what is missing, in this schema: the inside of a transaction.
    pub(crate) fn ddl(&self, schema: &str) -> String {
        self.in_setup(schema, SCHEMA_SQL.split(OPTIONAL).next().unwrap_or_default())
    }

    /// The same for the table of members.
    pub(crate) fn members_ddl(&self, schema: &str) -> String {
        self.in_setup(schema, SCHEMA_SQL.split(OPTIONAL).nth(1).unwrap_or_default())
    }

    fn in_setup(&self, schema: &str, sql: &str) -> String {
        let mut ddl = format!("SET LOCAL synchronous_commit TO on; {PLAIN_NAMES}; SELECT ");
        ddl.push_str(SETUP_LOCK);
        ddl.push(';');
        ddl.push_str(&self.rename(schema, sql));
        ddl
    }

    /// A part of `schema.sql` with the configured names in the place of the default ones.
    fn rename(&self, schema: &str, sql: &str) -> String {
        // What is before the first line break is the rest of a comment.
        let sql: String =
            sql.lines().skip(1).filter_map(|line| line.split("--").next()).collect::<Vec<_>>().join("\n");
        // Every second piece is a name. One pass: a configured name may be another's default.
        let pieces =
            sql.trim_end().trim_end_matches(';').split('"').enumerate().map(|(i, piece)| match piece {
                text if i % 2 == 0 => text.to_owned(),
                DEFAULT_LOCKS => qualified(schema, &self.locks),
                DEFAULT_FENCES => qualified(schema, &self.fences),
                DEFAULT_MEMBERS => qualified(schema, &self.members),
                "idx_syncguard_locks_lock_id" => quoted_name(&index_name(&self.locks, "lock_id")),
                "idx_syncguard_locks_expires" => quoted_name(&index_name(&self.locks, "expires")),
                "idx_syncguard_members_key" => quoted_name(&index_name(&self.members, "key")),
                "idx_syncguard_members_waiting" => quoted_name(&index_name(&self.members, "waiting")),
                column => quoted_name(column),
            });
        pieces.collect()
    }

    /// A table's name as a literal for `to_regclass`, in the configured schema or along the search path.
    fn literal(&self, table: &str) -> Result<String> {
        let name = match &self.schema {
            Some(schema) => qualified(schema, table),
            None => quoted_name(table),
        };
        let mut literal = String::new();
        push_quoted(&name, &mut literal)?;
        Ok(literal)
    }

    /// The configured schema, else the one that was found.
    pub(crate) fn schema_or<'a>(&'a self, found: Option<&'a str>) -> Option<&'a str> {
        self.schema.as_deref().or(found)
    }

    /// Whether the search path decides where the tables are.
    pub(crate) fn follow_the_path(&self) -> bool {
        self.schema.is_none()
    }

    /// The tables, now that their schemas are known.
    pub(crate) fn resolved(&self, survey: &Survey, store_key_debug: bool) -> Option<Tables> {
        let (locks, fences) = (survey.locks_in.as_ref()?, survey.fences_in.as_ref()?);
        let key_debug = match (survey.has_key_debug, store_key_debug) {
            (true, true) => KeyDebug::Stored,
            _ => KeyDebug::Left,
        };
        Some(Tables {
            members: qualified(locks, &self.members),
            schema: locks.clone(),
            locks: qualified(locks, &self.locks),
            fences: qualified(fences, &self.fences),
            key_debug,
        })
    }
}

/// What the database said about the tables.
#[derive(Clone, Debug, Default)]
#[allow(clippy::struct_excessive_bools, reason = "each is one answer of one query")]
pub(crate) struct Survey {
    pub(crate) locks_in: Option<String>,
    pub(crate) fences_in: Option<String>,
    pub(crate) unlogged: bool,
    /// A table of this very session, which nobody else can see.
    pub(crate) temporary: bool,
    pub(crate) has_key_debug: bool,
    pub(crate) has_indexes: bool,
    pub(crate) creation_schema: Option<String>,
    pub(crate) encoding: String,
    pub(crate) may_notify: bool,
    /// See [`collation`].
    pub(crate) sorted_by_collation: bool,
    pub(crate) own_path: bool,
    /// What keeps the rows of a table that is no plain one.
    pub(crate) keeper: Option<String>,
}

impl Survey {
    /// Whether setup would find nothing to do.
    pub(crate) fn is_complete(&self) -> bool {
        self.locks_in.is_some() && self.fences_in.is_some() && self.has_indexes
    }
}

/// The tables, quoted and qualified.
pub(crate) struct Tables {
    /// The schema of the leases, unquoted.
    pub(crate) schema: String,
    /// The optional table, which may not be there.
    pub(crate) members: String,
    pub(crate) locks: String,
    pub(crate) fences: String,
    key_debug: KeyDebug,
}

/// Whether a new counter notes the caller's key for people.
#[derive(Clone, Copy)]
enum KeyDebug {
    Stored,
    /// The table was made by hand without the column, or the caller wants no keys in it.
    Left,
}

impl Tables {
    /// Whether counters note the caller's key.
    pub(crate) fn notes_keys(&self) -> bool {
        matches!(self.key_debug, KeyDebug::Stored)
    }

    /// What the counter's `INSERT` says about `key_debug`: `(column, value)`.
    pub(crate) fn key_debug(&self, user_key: &str) -> (&'static str, String) {
        match self.key_debug {
            KeyDebug::Stored => (", key_debug", format!(", {user_key}")),
            KeyDebug::Left => ("", String::new()),
        }
    }
}

/// Whether the table has a valid index of so many columns that begins with this one.
fn index(table: &str, columns: u32, which: &str, column: &str) -> String {
    format!(
        "EXISTS (SELECT 1 FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute a \
         ON a.attrelid {EQ} i.indrelid AND a.attnum {EQ} i.indkey[0] \
         WHERE i.indrelid {EQ} {table}.oid AND i.indnatts {EQ} {columns} AND i.indisvalid{which} \
         AND a.attname {EQ} '{column}')"
    )
}

fn qualified(schema: &str, name: &str) -> String {
    format!("{}.{}", quoted_name(schema), quoted_name(name))
}

/// An index name that fits: cut, with a digest of the table's name, where the plain one is too long.
/// PostgreSQL would cut it silently, and two long names would become one.
fn index_name(table: &str, suffix: &str) -> String {
    fitting("idx_", table, suffix)
}

/// The name of the table of members beside a table of leases.
fn members_of(locks: &str) -> String {
    match fitting("", locks, "members") {
        _ if locks == DEFAULT_LOCKS => DEFAULT_MEMBERS.to_owned(),
        // That of the default lock table, whose readers a grant here would delete.
        taken if taken == DEFAULT_MEMBERS => format!("{locks}_lock_members"),
        members => members,
    }
}

fn fitting(prefix: &str, table: &str, suffix: &str) -> String {
    let plain = format!("{prefix}{table}_{suffix}");
    if plain.len() <= MAX_IDENTIFIER {
        return plain;
    }
    let hex = digest(table, 4);
    let keep = MAX_IDENTIFIER - prefix.len() - "__".len() - hex.len() - suffix.len();
    format!("{prefix}{}_{hex}_{suffix}", table.get(..keep).unwrap_or(table))
}

/// So many bytes of a digest, as hex digits.
pub(super) fn digest(text: &str, bytes: usize) -> String {
    Sha256::digest(text.as_bytes())
        .iter()
        .take(bytes)
        .fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"))
}

fn check(option: &str, name: &str) -> Result<()> {
    let mut bytes = name.bytes();
    let starts = bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    if starts && name.len() <= MAX_IDENTIFIER && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_') {
        return Ok(());
    }
    Err(LockError::invalid(format!(
        "{option} is not a plain identifier: use 1 to {MAX_IDENTIFIER} letters, digits and underscores, not starting with a digit"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_before_anything_else() {
        for bad in ["", "1abc", "a-b", "a b", "a\"b", "a;b", "a.b", "\u{e9}", &"x".repeat(64)] {
            for place in 0..4 {
                let name = |at| (place == at).then_some(bad);
                let error = TableNames::new(name(0), name(1), name(2), name(3)).unwrap_err();
                assert_eq!(error.code(), crate::ErrorCode::InvalidArgument, "{bad:?}");
            }
        }
        for good in ["app_locks", "_x9", "Locks", "select", &"x".repeat(63)] {
            TableNames::new(Some(good), Some(good), None, None).unwrap();
        }
        assert!(TableNames::new(None, Some("same"), Some("same"), None).is_err());
        assert!(TableNames::new(None, Some(DEFAULT_FENCES), None, None).is_err());
        assert!(TableNames::new(None, None, None, Some(DEFAULT_LOCKS)).is_err());
        assert!(TableNames::new(None, None, Some("same"), Some("same")).is_err());
        TableNames::new(None, Some("Same"), Some("same"), Some("SAME")).unwrap();
    }

    #[test]
    fn index_names_of_long_table_names_stay_apart() {
        let (a, b) = (format!("{}a", "x".repeat(62)), format!("{}b", "x".repeat(62)));
        for suffix in ["lock_id", "expires"] {
            assert!(index_name(&a, suffix).len() <= MAX_IDENTIFIER);
            assert_ne!(index_name(&a, suffix), index_name(&b, suffix));
        }
        assert_eq!(index_name("locks", "lock_id"), "idx_locks_lock_id");
    }

    #[test]
    fn the_ddl_carries_the_configured_names_only() {
        let names = TableNames::new(None, Some("My_Locks"), Some("my_fences"), None).unwrap();
        let ddl = names.ddl("app");
        assert!(!ddl.contains("syncguard"), "{ddl}");
        assert!(ddl.contains("\"app\".\"My_Locks\"") && ddl.contains("\"app\".\"my_fences\""));
        assert!(ddl.contains("\"idx_My_Locks_lock_id\"") && !ddl.contains("members"));
        let ddl = names.members_ddl("app");
        assert!(!ddl.contains("syncguard") && ddl.contains("\"app\".\"My_Locks_members\""), "{ddl}");
        assert!(ddl.contains("\"idx_My_Locks_members_key\"") && !ddl.contains("my_fences"), "{ddl}");
    }

    #[test]
    fn the_table_of_members_is_named_after_that_of_the_leases() {
        let members = |locks, members| TableNames::new(None, locks, None, members).unwrap().members;
        assert_eq!(members(None, None), "syncguard_members");
        assert_eq!(members(Some("billing"), None), "billing_members");
        assert_eq!(members(Some("billing"), Some("readers")), "readers");
        let (a, b) = (format!("{}a", "x".repeat(62)), format!("{}b", "x".repeat(62)));
        assert!(
            members(Some(&a), None).len() == MAX_IDENTIFIER && members(Some(&a), None).ends_with("_members")
        );
        assert_ne!(members(Some(&a), None), members(Some(&b), None));
    }

    #[test]
    fn the_ddl_keeps_names_apart_that_are_each_others_defaults() {
        let names = TableNames::new(None, Some(DEFAULT_FENCES), Some(DEFAULT_LOCKS), None).unwrap();
        let ddl = names.ddl(DEFAULT_FENCES);
        let schema = quoted_name(DEFAULT_FENCES);
        assert!(ddl.contains(&format!("EXISTS {schema}.\"{DEFAULT_FENCES}\" (\n    \"key\" TEXT")), "{ddl}");
        assert!(
            ddl.contains(&format!("EXISTS {schema}.\"{DEFAULT_LOCKS}\" (\n    \"fence_key\" TEXT")),
            "{ddl}"
        );
        assert!(ddl.contains("\"idx_syncguard_fence_counters_lock_id\" ON"), "{ddl}");
    }

    #[test]
    fn a_name_that_somebody_else_chose_stays_one_identifier() {
        assert_eq!(qualified("a\"; DROP TABLE b; --", "t"), "\"a\"\"; DROP TABLE b; --\".\"t\"");
    }
}
