//! The optional table of members: found, made and checked when something first needs it.

use std::time::Instant;

use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::backend::PostgresBackend;
use crate::leases::collation;
use crate::leases::engine;
use crate::leases::schema::TableNames;
use crate::leases::setup::{ResolvedTables, setup_error};
use crate::pg::answers::{required, text};
use crate::pg::{Failure, Message, Session};

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
    engine::check_keepers(row, 4..6)?;
    let flag = |column| -> Result<bool> { Ok(text(row, column)? == Some("t")) };
    let survey = Survey { there: flag(0)?, unlogged: text(row, 1)? == Some("u"), has_indexes: flag(2)? };
    if flag(3)? {
        collation::check(session, &[&at.tables.members])?;
    }
    Ok(survey)
}

impl PostgresBackend {
    /// Creates what is missing of the table of members and its indexes, beside the tables `at`.
    pub(super) fn set_up_members(&self, at: &ResolvedTables, end: Instant) -> Result<()> {
        let never = CancelToken::never();
        let found = self.database.run(end, &never, |session| survey(session, &self.names, at))?;
        if found.unlogged {
            log::warn!("the table of members is UNLOGGED: a crash empties it; ALTER TABLE … SET LOGGED");
        }
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
