//! What a look finds of the optional table of members, for a client that needs it.

use crate::error::Result;
use crate::leases::check_server::rows;
use crate::leases::finding::{Finding, Severity};
use crate::leases::schema::Tables;
use crate::pg::answers::{flag, required, text};
use crate::pg::statement::push_quoted;
use crate::pg::{Failure, Session};

/// Whether the table is there, and the role may do with it what owners, notes and readers need.
pub(super) fn look(session: &mut Session<'_>, tables: &Tables) -> Result<Vec<Finding>, Failure> {
    let (table, mut name) = (&tables.members, String::new());
    push_quoted(table, &mut name)?;
    let answer = rows(
        session,
        format!(
            "SELECT t.oid IS NOT NULL, string_agg(w.may, ', ') FILTER (WHERE NOT has_table_privilege(t.oid, w.may)), \
               quote_ident(current_user), c.relpersistence = 'u' \
             FROM (SELECT to_regclass({name})::oid AS oid) AS t LEFT JOIN pg_class AS c ON c.oid = t.oid, \
               (VALUES ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE')) AS w (may) GROUP BY t.oid, c.relpersistence"
        ),
    )?;
    let row = required(answer.first())?;
    if !required(flag(row, 0)?)? {
        return Ok(vec![Finding::new(
            Severity::Note,
            "tables-missing",
            "the table of members was not found, and this client is built to use it",
            "locks with an owner or a note, and shared leases, are refused before it is made",
            "in a shell: psql -f schema.sql, or setup_schema() of this client",
        )]);
    }
    let mut found = Vec::new();
    if let Some(missing) = text(row, 1)? {
        let role = required(text(row, 2)?)?;
        found.push(Finding::new(
            Severity::Note,
            "rights-missing",
            format!("the role {role} lacks {missing} on {table}, and this client is built to use it"),
            "locks with an owner or a note, and shared leases, fail with AuthFailed",
            format!("GRANT {missing} ON {table} TO {role};"),
        ));
    }
    if flag(row, 3)? == Some(true) {
        found.push(Finding::new(
            Severity::Slow,
            "members-unlogged",
            format!("{table} is unlogged"),
            "a crash empties it: readers lose their leases, and nobody is told who has a key",
            format!("ALTER TABLE {table} SET LOGGED;"),
        ));
    }
    Ok(found)
}
