//! What a look finds in the two tables: whether they are as they should be, and who may do what to them.

use std::fmt::Write as _;

use crate::error::{ErrorCode, Result};
use crate::leases::check_server::rows;
use crate::leases::collation;
use crate::leases::finding::{Finding, Severity};
use crate::leases::schema::{self, Survey};
use crate::pg::answers::{Row, flag, required, text};
use crate::pg::statement::{push_quoted, quoted_name};
use crate::pg::{Failure, Session};

/// The tables by their names, as SQL and as literals.
pub(super) struct Tables {
    locks: String,
    fences: String,
    /// `(which, oid)`, as the rows of a table `t`.
    both: String,
}

impl Tables {
    pub(super) fn new(tables: &schema::Tables) -> Result<Self> {
        let mut both = "(VALUES ('l', to_regclass(".to_owned();
        push_quoted(&tables.locks, &mut both)?;
        both.push_str(")::oid), ('f', to_regclass(");
        push_quoted(&tables.fences, &mut both)?;
        both.push_str(")::oid)) AS t (which, oid)");
        Ok(Self { locks: tables.locks.clone(), fences: tables.fences.clone(), both })
    }

    fn name(&self, which: &str) -> &str {
        if which == "l" { &self.locks } else { &self.fences }
    }

    /// The table that a row is about: its first column.
    fn of(&self, row: &Row) -> Result<&str> {
        Ok(self.name(required(text(row, 0)?)?))
    }
}

type Look = fn(&mut Session<'_>, &Tables) -> Result<Vec<Finding>, Failure>;

/// What is looked at in the tables, one after the other.
pub(super) const LOOKS: [(&str, Look); 8] = [
    ("the tables' kinds", kinds),
    ("the tables' columns", columns),
    ("the tables' indexes", indexes),
    ("the tables' collations", collations),
    ("triggers", triggers),
    ("rules", rules),
    ("constraints", constraints),
    ("rights", rights),
];

/// The role may not see the schema that the tables are to be in.
pub(super) fn schema_unseen(schema: Option<&str>, role: &str) -> Finding {
    let schema = schema.map_or_else(|| "…".to_owned(), quoted_name);
    Finding::new(
        Severity::Note,
        "rights-missing",
        format!("the role {role} lacks USAGE on the schema {schema}"),
        "it sees no table there: calls fail with AuthFailed",
        format!("GRANT USAGE ON SCHEMA {schema} TO {role};"),
    )
}

/// What the search for the tables says.
pub(super) fn survey(survey: &Survey, follow_the_path: bool, role: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    if !survey.may_notify {
        found.push(Finding::new(
            Severity::Slow,
            "rights-missing",
            format!("the role {role} may not execute pg_notify or pg_try_advisory_xact_lock"),
            "releases call nobody: waiters in other processes find a free key by looking",
            format!("GRANT EXECUTE ON FUNCTION pg_catalog.pg_notify(text, text), pg_catalog.pg_try_advisory_xact_lock(int, int) TO {role};"),
        ));
    }
    if survey.locks_in.is_none() || survey.fences_in.is_none() {
        found.push(Finding::new(
            Severity::Note,
            "tables-missing",
            "the lock tables were not found, or the role may not see their schema",
            "nothing can be locked here before they are made",
            "in a shell: psql -f schema.sql, or setup_schema() of a client",
        ));
    }
    if survey.own_path && follow_the_path {
        found.push(Finding::new(
            Severity::Unsafe,
            "search-path",
            "the search_path begins with \"$user\", and a schema has the role's name",
            "another role finds other lock tables, and both hold the same key",
            "in the program: .schema(\"…\") of the builder, the same for all",
        ));
    }
    found
}

fn kinds(session: &mut Session<'_>, tables: &Tables) -> Result<Vec<Finding>, Failure> {
    let both = &tables.both;
    let rows = rows(
        session,
        format!(
            "SELECT t.which, c.relkind::text, c.relpersistence::text, c.relrowsecurity, \
               EXISTS (SELECT 1 FROM pg_inherits AS i WHERE i.inhparent = c.oid OR i.inhrelid = c.oid), \
               coalesce(c.reloptions::text, '') ILIKE '%autovacuum_enabled=false%' \
                 OR coalesce(c.reloptions::text, '') ILIKE '%autovacuum_enabled=off%', \
               (SELECT a.amname::text FROM pg_am AS a WHERE a.oid = c.relam AND a.amname <> 'heap') \
             FROM {both} JOIN pg_class AS c ON c.oid = t.oid"
        ),
    )?;
    let mut found = Vec::new();
    for row in &rows {
        let table = tables.of(row)?;
        let (kind, persistence) = (required(text(row, 1)?)?, required(text(row, 2)?)?);
        let is = |column| -> Result<bool> { required(flag(row, column)?) };
        let elsewhere = text(row, 6)?.is_some();
        if kind != "r" || persistence == "t" || elsewhere || is(4)? {
            let what = match (kind, persistence) {
                ("r", _) if elsewhere => "is not in PostgreSQL's own storage",
                ("p", _) => "is partitioned",
                ("r", "t") => "is temporary",
                ("r", _) => "has parents or children by inheritance",
                _ => "is a view, or a table elsewhere",
            };
            found.push(Finding::new(
                Severity::Unsafe,
                "not-a-plain-table",
                format!("{table} {what}"),
                "no index makes keys and lock ids unique in all of it: two holders are possible",
                "make plain tables of schema.sql in a schema of their own, in a shell: psql -f schema.sql",
            ));
        } else if persistence == "u" {
            found.push(Finding::new(
                Severity::Unsafe,
                "not-a-plain-table",
                format!("{table} is unlogged"),
                "a crash empties it: two holders, and fences that are handed out twice",
                format!("ALTER TABLE {table} SET LOGGED;"),
            ));
        }
        if is(3)? {
            found.push(Finding::new(
                Severity::Unsafe,
                "row-security",
                format!("{table} has row security"),
                "this library is refused (42501) where a policy would hide rows, and other clients take a held key for free",
                format!("ALTER TABLE {table} DISABLE ROW LEVEL SECURITY;"),
            ));
        }
        if is(5)? {
            found.push(Finding::new(
                Severity::Slow,
                "autovacuum",
                format!("autovacuum is off for {table}"),
                "dead versions of rows are not removed: each look at a busy key becomes slower",
                format!("ALTER TABLE {table} RESET (autovacuum_enabled);"),
            ));
        }
    }
    Ok(found)
}

/// `(table, column, type)` of what every client expects.
const COLUMNS: &str = "(VALUES ('l', 'key', 'text'), ('l', 'lock_id', 'text'), ('l', 'expires_at_ms', 'bigint'), \
    ('l', 'acquired_at_ms', 'bigint'), ('l', 'fence', 'text'), ('l', 'user_key', 'text'), \
    ('f', 'fence_key', 'text'), ('f', 'fence', 'bigint')) AS w (which, name, type)";

fn columns(session: &mut Session<'_>, tables: &Tables) -> Result<Vec<Finding>, Failure> {
    let both = &tables.both;
    let rows = rows(
        session,
        format!(
            "SELECT t.which, w.name, w.type, format_type(a.atttypid, a.atttypmod), false \
             FROM {both} JOIN {COLUMNS} ON w.which = t.which \
               LEFT JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attname = w.name AND NOT a.attisdropped \
             WHERE a.attnum IS NULL OR format_type(a.atttypid, a.atttypmod) <> w.type \
             UNION ALL SELECT t.which, quote_ident(a.attname), '', format_type(a.atttypid, a.atttypmod), true \
             FROM {both} JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped \
             WHERE a.attnotnull AND NOT a.atthasdef AND a.attidentity = '' \
               AND NOT EXISTS (SELECT 1 FROM {COLUMNS} WHERE w.which = t.which AND w.name = a.attname) ORDER BY 1, 2"
        ),
    )?;
    let mut found = Vec::new();
    for row in &rows {
        let table = tables.of(row)?;
        let (name, wanted) = (required(text(row, 1)?)?, required(text(row, 2)?)?);
        // One that is as wide as need be will do.
        let bounded = text(row, 3)?.is_some_and(|is| is.starts_with("character varying"));
        let (seen, mend) = match (text(row, 3)?, required(flag(row, 4)?)?) {
            (_, true) => (
                format!("{table} has a column {name} that must be given"),
                format!("ALTER TABLE {table} ALTER {name} DROP NOT NULL;"),
            ),
            (None, _) => (
                format!("{table} has no column {name}"),
                "in a shell, with a schema of its own: psql -f schema.sql".to_owned(),
            ),
            (Some(is), _) => (
                format!("{name} of {table} is {is}, and not {wanted}"),
                format!("ALTER TABLE {table} ALTER {name} TYPE {wanted};"),
            ),
        };
        found.push(Finding::new(
            if bounded { Severity::Slow } else { Severity::Unsafe },
            "column",
            seen,
            "it is not the table that every client expects: calls fail, or keep something else than was meant",
            mend,
        ));
    }
    Ok(found)
}

fn indexes(session: &mut Session<'_>, tables: &Tables) -> Result<Vec<Finding>, Failure> {
    let both = &tables.both;
    // A deferrable constraint keeps ON CONFLICT from working, also beside another index.
    let rows = rows(
        session,
        format!(
            "SELECT t.which, w.name, w.is_unique, d.name FROM {both} \
             JOIN (VALUES ('l', 'key', true), ('l', 'lock_id', true), ('f', 'fence_key', true), \
               ('l', 'expires_at_ms', false)) AS w (which, name, is_unique) ON w.which = t.which \
             LEFT JOIN LATERAL (SELECT quote_ident(c.conname) AS name FROM pg_constraint AS c \
               JOIN pg_attribute AS a ON a.attrelid = c.conrelid AND a.attnum = c.conkey[1] AND a.attname = w.name \
               WHERE c.conrelid = t.oid AND c.contype IN ('p', 'u') AND c.condeferrable AND cardinality(c.conkey) = 1 \
               LIMIT 1) AS d ON w.is_unique \
             WHERE d.name IS NOT NULL OR NOT EXISTS (SELECT 1 FROM pg_index AS i \
               JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] \
               WHERE i.indrelid = t.oid AND i.indnkeyatts = 1 AND a.attname = w.name AND i.indisvalid AND i.indisready \
                 AND i.indpred IS NULL AND (NOT w.is_unique OR i.indisunique AND i.indimmediate))"
        ),
    )?;
    let mut found = Vec::new();
    for row in &rows {
        let (table, name) = (tables.of(row)?, required(text(row, 1)?)?);
        let protects = "it is what keeps a key from being granted twice; calls may fail without it, too";
        found.push(match (required(flag(row, 2)?)?, text(row, 3)?) {
            (true, None) => Finding::new(
                Severity::Unsafe,
                "unique-index",
                format!("no valid unique index on {name} of {table}"),
                protects,
                format!("CREATE UNIQUE INDEX CONCURRENTLY ON {table} ({name});"),
            ),
            (true, Some(constraint)) => Finding::new(
                Severity::Unsafe,
                "unique-index",
                format!("the unique constraint {constraint} on {name} of {table} is deferrable"),
                protects,
                format!("ALTER TABLE {table} DROP CONSTRAINT {constraint}, ADD UNIQUE ({name});"),
            ),
            (false, _) => Finding::new(
                Severity::Slow,
                "expiry-index",
                format!("no valid index on {name} of {table}"),
                "cleaning up reads the whole table",
                format!("CREATE INDEX CONCURRENTLY ON {table} ({name});"),
            ),
        });
    }
    Ok(found)
}

fn collations(session: &mut Session<'_>, tables: &Tables) -> Result<Vec<Finding>, Failure> {
    let Tables { locks, fences, both } = tables;
    let rows = rows(
        session,
        format!(
            "SELECT t.which, a.attname::text, format('%I.%I', n.nspname, c.collname) \
             FROM {both} JOIN pg_index AS i ON i.indrelid = t.oid AND i.indisunique \
               JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] \
               JOIN pg_collation AS c ON c.oid = i.indcollation[0] JOIN pg_namespace AS n ON n.oid = c.collnamespace \
               JOIN pg_database AS d ON d.datname = current_database() \
             WHERE i.indcollation[0] NOT IN (0, 950, 951) AND NOT (c.collprovider = 'c' AND c.collcollate IN ('C', 'POSIX')) \
               AND NOT (c.collprovider = 'd' AND coalesce(to_jsonb(d) ->> 'datlocprovider', 'c') = 'c' AND d.datcollate IN ('C', 'POSIX')) \
             ORDER BY 1, 2"
        ),
    )?;
    let mut found = Vec::new();
    let Some(first) = rows.first() else { return Ok(found) };
    match collation::check(session, &[locks, fences]) {
        // That is what it says where they are out of order; else it could not look.
        Err(failure) if !failure.is_refused() => return Err(failure),
        Err(failure) => {
            let error = failure.into_error();
            if error.code() != ErrorCode::InvalidArgument {
                return Err(error.into());
            }
            found.push(Finding::new(
                Severity::Unsafe,
                "collation",
                error.to_string(),
                "rows that are there are not found: keys are granted twice, and counters begin anew",
                format!("REINDEX TABLE {locks}; REINDEX TABLE {fences}; -- with every client stopped"),
            ));
        }
        Ok(()) => {}
    }
    let (table, name) = (tables.of(first)?, required(text(first, 1)?)?);
    found.push(Finding::new(
        Severity::Note,
        "collation-not-bytes",
        format!("{} index(es) on keys are sorted by a collation, such as {}", rows.len(), required(text(first, 2)?)?),
        "an upgrade of the system under the database can put them out of order; programs that are running then do not notice",
        format!("ALTER TABLE {table} ALTER {name} TYPE text COLLATE \"C\"; -- and the other text columns of both tables"),
    ));
    Ok(found)
}

fn triggers(session: &mut Session<'_>, tables: &Tables) -> Result<Vec<Finding>, Failure> {
    let both = &tables.both;
    let rows = rows(
        session,
        format!(
            "SELECT t.which, quote_ident(g.tgname), (g.tgtype::int4 & 1) <> 0 AND (g.tgtype::int4 & 66) <> 0 \
             FROM {both} JOIN pg_trigger AS g ON g.tgrelid = t.oid AND NOT g.tgisinternal AND g.tgenabled <> 'D' \
             ORDER BY 1, 2"
        ),
    )?;
    let mut found = Vec::new();
    for row in &rows {
        let (table, name) = (tables.of(row)?, required(text(row, 1)?)?);
        let (severity, meaning) = if required(flag(row, 2)?)? {
            (
                Severity::Unsafe,
                "it can swallow or undo changes: calls that meet that fail with Internal, and other clients are told what is not so",
            )
        } else {
            (Severity::Slow, "every change pays for it, and one that fails has the call fail")
        };
        found.push(Finding::new(
            severity,
            "trigger",
            format!("a trigger {name} on {table}"),
            meaning,
            format!("ALTER TABLE {table} DISABLE TRIGGER {name};"),
        ));
    }
    Ok(found)
}

fn rules(session: &mut Session<'_>, tables: &Tables) -> Result<Vec<Finding>, Failure> {
    let both = &tables.both;
    let rows = rows(
        session,
        format!(
            "SELECT t.which, quote_ident(r.rulename) FROM {both} JOIN pg_rewrite AS r ON r.ev_class = t.oid \
             WHERE r.rulename <> '_RETURN' AND r.ev_enabled <> 'D' ORDER BY 1, 2"
        ),
    )?;
    let mut found = Vec::new();
    for row in &rows {
        let (table, name) = (tables.of(row)?, required(text(row, 1)?)?);
        found.push(Finding::new(
            Severity::Unsafe,
            "rule",
            format!("a rule {name} on {table}"),
            "it can swallow or replace changes",
            format!("DROP RULE {name} ON {table};"),
        ));
    }
    Ok(found)
}

/// Constraints beyond those of `schema.sql`: foreign keys in either direction, checks, exclusions.
fn constraints(session: &mut Session<'_>, tables: &Tables) -> Result<Vec<Finding>, Failure> {
    let both = &tables.both;
    let rows = rows(
        session,
        format!(
            "SELECT t.which, quote_ident(c.conname), c.conrelid::regclass::text \
             FROM {both} JOIN pg_constraint AS c ON t.oid IN (c.conrelid, c.confrelid) \
             WHERE c.contype IN ('c', 'f', 'x') ORDER BY 1, 2"
        ),
    )?;
    let mut found = Vec::new();
    for row in &rows {
        let (table, name, of) = (tables.of(row)?, required(text(row, 1)?)?, required(text(row, 2)?)?);
        found.push(Finding::new(
            Severity::Slow,
            "constraint",
            format!("a constraint {name} of {of} on {table}"),
            "a grant or a release that it refuses fails",
            format!("ALTER TABLE {of} DROP CONSTRAINT {name};"),
        ));
    }
    Ok(found)
}

/// `(table, right, column)` of a holder: docs/security.md. DELETE is of the whole table.
const HOLDERS: &str = "(VALUES ('l', 'SELECT', 'key'), ('l', 'SELECT', 'lock_id'), ('l', 'SELECT', 'expires_at_ms'), \
    ('l', 'SELECT', 'acquired_at_ms'), ('l', 'SELECT', 'fence'), ('l', 'SELECT', 'user_key'), ('l', 'SELECT', 'xmin'), \
    ('l', 'INSERT', 'key'), ('l', 'INSERT', 'lock_id'), ('l', 'INSERT', 'expires_at_ms'), \
    ('l', 'INSERT', 'acquired_at_ms'), ('l', 'INSERT', 'fence'), ('l', 'INSERT', 'user_key'), \
    ('l', 'UPDATE', 'lock_id'), ('l', 'UPDATE', 'expires_at_ms'), ('l', 'UPDATE', 'acquired_at_ms'), \
    ('l', 'UPDATE', 'fence'), ('l', 'UPDATE', 'user_key'), \
    ('f', 'SELECT', 'fence_key'), ('f', 'SELECT', 'fence'), ('f', 'SELECT', 'xmin'), ('f', 'SELECT', 'xmax'), \
    ('f', 'INSERT', 'fence_key'), ('f', 'INSERT', 'fence'), ('f', 'INSERT', 'key_debug'), ('f', 'UPDATE', 'fence')) \
    AS w (which, may, name)";

fn rights(session: &mut Session<'_>, tables: &Tables) -> Result<Vec<Finding>, Failure> {
    let both = &tables.both;
    let missing = rows(
        session,
        format!(
            "SELECT t.which, format('%s (%s)', w.may, string_agg(quote_ident(w.name), ', ' ORDER BY w.name)), quote_ident(current_user) \
             FROM {both} JOIN {HOLDERS} ON w.which = t.which JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attname = w.name \
             WHERE NOT has_column_privilege(t.oid, a.attnum, w.may) GROUP BY 1, w.may \
             UNION ALL SELECT t.which, 'DELETE', quote_ident(current_user) FROM {both} \
             WHERE t.which = 'l' AND NOT has_table_privilege(t.oid, 'DELETE') ORDER BY 1, 2"
        ),
    )?;
    let mut found = Vec::new();
    if let Some(first) = missing.first() {
        let role = required(text(first, 2)?)?;
        let mut mend = String::new();
        let mut seen = Vec::new();
        for which in ["l", "f"] {
            let of = |row: &&Row| text(row, 0).is_ok_and(|of| of == Some(which));
            let list: Result<Vec<&str>> =
                missing.iter().filter(of).map(|row| required(text(row, 1)?)).collect();
            let (list, table) = (list?.join(", "), tables.name(which));
            if !list.is_empty() {
                seen.push(format!("{list} on {table}"));
                let _ = write!(mend, "GRANT {list} ON {table} TO {role}; ");
            }
        }
        found.push(Finding::new(
            Severity::Note,
            "rights-missing",
            format!("the role {role} lacks {}", seen.join(" and ")),
            "it cannot do all that a holder does: calls fail with AuthFailed",
            mend.trim_end(),
        ));
    }
    let spare = rows(
        session,
        format!(
            "SELECT t.which, quote_ident(current_user), (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = current_user), \
               EXISTS (SELECT 1 FROM aclexplode(c.relacl) AS x WHERE x.grantee = 0 \
                 AND x.privilege_type IN ('INSERT', 'UPDATE', 'DELETE', 'TRUNCATE')) \
             FROM {both} JOIN pg_class AS c ON c.oid = t.oid WHERE t.which = 'f' \
               AND (has_table_privilege(t.oid, 'DELETE') OR has_table_privilege(t.oid, 'TRUNCATE'))"
        ),
    )?;
    if let Some(row) = spare.first() {
        let (table, role) = (tables.of(row)?, required(text(row, 1)?)?);
        let superuser = required(flag(row, 2)?)?;
        let from = if required(flag(row, 3)?)? { "PUBLIC" } else { role };
        let (who, mend) = if superuser {
            (
                format!("the role {role} is a superuser"),
                "CREATE ROLE lock_holder LOGIN; -- with the grants of docs/security.md".to_owned(),
            )
        } else {
            (
                format!("the role {role} may delete from {table}"),
                format!("REVOKE DELETE, TRUNCATE ON {table} FROM {from}; -- or have another role own it"),
            )
        };
        found.push(Finding::new(
            Severity::Note,
            "rights-to-spare",
            who,
            "a counter that is deleted hands out its fences again: no program that takes locks needs that right",
            mend,
        ));
    }
    Ok(found)
}
