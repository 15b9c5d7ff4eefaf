//! The optional table of members: found, made and checked when something first needs it.

use std::time::{Duration, Instant};

use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::backend::PostgresBackend;
use crate::leases::collation;
use crate::leases::engine;
use crate::leases::note_sql::NoteStatements;
use crate::leases::schema::TableNames;
use crate::leases::setup::{ResolvedTables, setup_error};
use crate::leases::shared_sql::{GROUP, SharedStatements};
use crate::leases::turn_sql::TurnStatements;
use crate::pg::answers::{malformed, required, text};
use crate::pg::{Failure, Message, Session};

/// How long a table of members that was missing is taken to be missing: most databases never have one.
const MISSING: Duration = Duration::from_secs(60);

/// What the database said about the table.
struct Survey {
    there: bool,
    unlogged: bool,
    has_indexes: bool,
}

/// Asks for the table, and refuses one whose indexes may be out of order.
fn survey(session: &mut Session<'_>, names: &TableNames, at: &ResolvedTables) -> Result<Survey, Failure> {
    let query = names.survey_members(&at.tables.schema)?;
    let answers = session.ask(&Message::new().raw(session.limits_plain()).raw(query))?;
    let row = required(answers.row(0)?)?;
    engine::check_keeper(engine::keeper(row, 4..6)?.as_deref())?;
    let flag = |column| -> Result<bool> { Ok(text(row, column)? == Some("t")) };
    let survey = Survey { there: flag(0)?, unlogged: text(row, 1)? == Some("u"), has_indexes: flag(2)? };
    if flag(3)? {
        collation::check(session, &[&at.tables.members])?;
    }
    Ok(survey)
}

impl PostgresBackend {
    /// The table of members is there, or made now.
    pub(super) fn need_members(&self, end: Instant, cancel: &CancelToken) -> Result<()> {
        if self.has_members(end, cancel)? {
            return Ok(());
        }
        if !self.settings.auto_create {
            return Err(LockError::invalid(
                "shared leases, fair waiting, owners and notes need the table of members, which is not there: run the optional part of schema.sql, or call setup_schema() of a client that was built with create_members_table(true), and check members_table_name",
            ));
        }
        let at = self.find_tables(end, cancel)?;
        self.set_up_members(&at, end)?;
        if self.has_members(end, cancel)? { Ok(()) } else { Err(malformed()) }
    }

    /// Whether the table of members is there. What is not there is looked for again the next time.
    pub(super) fn has_members(&self, end: Instant, cancel: &CancelToken) -> Result<bool> {
        let at = self.find_tables(end, cancel)?;
        if at.shared.get().is_some() {
            return Ok(true);
        }
        let found = self.database.run(end, cancel, |session| survey(session, &self.names, &at))?;
        if found.there {
            let _ = at.notes.set(NoteStatements::new(&at.tables, at.notifies));
            let _ = at.turns.set(TurnStatements::new(&at.tables));
            let _ = at.shared.set(SharedStatements::new(&at.tables, at.notifies));
            if found.unlogged {
                log::warn!("the table of members is UNLOGGED: a crash empties it; ALTER TABLE … SET LOGGED");
            }
        }
        Ok(found.there)
    }

    /// The same for cleanups and operators, as far as was seen within [`MISSING`].
    pub(super) fn has_members_by_now(&self, end: Instant) -> Result<bool> {
        let is_known = self.find_tables(end, &CancelToken::never())?.shared.get().is_some();
        if !is_known && self.next_members.lock().is_some_and(|next| Instant::now() < next) {
            return Ok(false);
        }
        let found = self.has_members(end, &CancelToken::never())?;
        if !found {
            *self.next_members.lock() = Some(Instant::now() + MISSING);
        }
        Ok(found)
    }

    /// Creates what is missing of the table of members and its indexes, beside the tables `at`.
    pub(super) fn set_up_members(&self, at: &ResolvedTables, end: Instant) -> Result<()> {
        let never = CancelToken::never();
        let found = self.database.run(end, &never, |session| survey(session, &self.names, at))?;
        if found.there && found.has_indexes {
            return Ok(());
        }
        let ddl = self.names.members_ddl(&at.tables.schema);
        let created = self.database.run(end, &never, |session| session.transaction(&ddl).map(drop));
        created.map_err(LockError::from).map_err(setup_error)?;
        log::info!("the table of members was made, or completed, in the schema {:?}", at.tables.schema);
        Ok(())
    }
}

/// Whether a row's lock id is that of a group.
pub(super) fn is_group(lock_id: &str) -> bool {
    lock_id.starts_with(GROUP)
}

/// The statements, prepared on this connection. Only after the table was found.
pub(super) fn prepared<'a>(
    session: &mut Session<'_>,
    at: &'a ResolvedTables,
) -> Result<&'a SharedStatements, Failure> {
    let statements = at.shared.get().ok_or_else(malformed)?;
    session.prepare(&statements.all())?;
    Ok(statements)
}
