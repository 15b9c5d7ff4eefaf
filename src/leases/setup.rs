//! Finding the tables, and making what is missing of them.

use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::collation;
use crate::leases::engine::{self, Probe};
use crate::leases::fragments::MARKS;
use crate::leases::note_sql::NoteStatements;
use crate::leases::once_sql::RunStatements;
use crate::leases::permit_sql::PermitStatements;
use crate::leases::schema::{Survey, TableNames, Tables};
use crate::leases::several_sql::SetStatements;
use crate::leases::shared_sql::SharedStatements;
use crate::leases::sql::Statements;
use crate::leases::turn_sql::TurnStatements;
use crate::pg::answers::{required, text};
use crate::pg::{Database, Failure, Message, Session};

/// The tables and their statements, once it is known where the tables are.
pub(super) struct ResolvedTables {
    pub(super) tables: Tables,
    pub(super) statements: Statements,
    pub(super) permits: PermitStatements,
    pub(super) set_statements: SetStatements,
    /// Whether releases notify waiters.
    pub(super) notifies: bool,
    /// Whether the database can store U+2126, and so permits and marks.
    is_utf8: bool,
    /// Those of runs, made with the first run.
    pub(super) runs: OnceLock<RunStatements>,
    /// Those of shared leases, made when the table of members is found.
    pub(super) shared: OnceLock<SharedStatements>,
    /// Those that write notes, made then, too.
    pub(super) notes: OnceLock<NoteStatements>,
    /// Whether this client has written any.
    pub(super) noted: AtomicBool,
    /// Those of turns, made then, too.
    pub(super) turns: OnceLock<TurnStatements>,
}

impl ResolvedTables {
    /// Which rows of the counters, as `c`, are marks, as an expression.
    pub(super) fn marks(&self) -> &'static str {
        if self.is_utf8 { MARKS } else { "false" }
    }
}

/// Asks the database for the tables.
pub(super) fn survey(
    database: &Database,
    names: &TableNames,
    end: Instant,
    cancel: &CancelToken,
) -> Result<Survey> {
    Ok(database.run(end, cancel, |session| survey_on(session, names))?)
}

/// The same on this connection.
pub(super) fn survey_on(session: &mut Session<'_>, names: &TableNames) -> Result<Survey, Failure> {
    let survey = look_on(session, names)?;
    engine::check_keeper(survey.keeper.as_deref())?;
    if let (true, Some(tables)) = (survey.sorted_by_collation, names.resolved(&survey, false)) {
        collation::check(session, &[&tables.locks, &tables.fences])?;
    }
    Ok(survey)
}

/// The same without a judgement of the tables.
pub(super) fn look_on(session: &mut Session<'_>, names: &TableNames) -> Result<Survey, Failure> {
    // Under the caller's search_path: it decides where unqualified tables are.
    let message = Message::new()
        .raw(session.limits_read_committed())
        .raw(Probe::new()?.question())
        .raw(names.survey()?);
    let answers = session.ask(&message).map_err(|failure| engine::explain(session, failure))?;
    let has_citus = engine::judge(required(answers.row(1)?)?)?;
    let row = required(answers.row(0)?)?;
    let owned = |column| -> Result<Option<String>> { Ok(text(row, column)?.map(str::to_owned)) };
    let flag = |column| -> Result<bool> { Ok(text(row, column)? == Some("t")) };
    let survey = Survey {
        locks_in: owned(0)?,
        unlogged: text(row, 1)? == Some("u") || text(row, 3)? == Some("u"),
        temporary: text(row, 1)? == Some("t") || text(row, 3)? == Some("t"),
        fences_in: owned(2)?,
        has_key_debug: flag(4)?,
        has_indexes: flag(5)?,
        creation_schema: owned(6)?,
        encoding: owned(7)?.unwrap_or_default(),
        may_notify: flag(8)?,
        sorted_by_collation: flag(9)?,
        own_path: flag(10)?,
        keeper: engine::keeper(row, 11..15)?,
    };
    if let (true, Some(tables)) = (has_citus, names.resolved(&survey, false)) {
        engine::check_citus(session, &[&tables.locks, &tables.fences, &tables.members])?;
    }
    Ok(survey)
}

/// Creates what is missing of the tables and their indexes, as the survey has it.
pub(super) fn create(database: &Database, names: &TableNames, survey: &Survey, end: Instant) -> Result<()> {
    if survey.encoding != "UTF8" {
        return Err(LockError::invalid(
            "the database's encoding is not UTF8 and cannot hold every key: use a UTF8 database",
        ));
    }
    let found =
        survey.locks_in.as_deref().or(survey.fences_in.as_deref()).or(survey.creation_schema.as_deref());
    let schema = names.schema_or(found).ok_or_else(|| {
        LockError::invalid("no schema of the search_path exists: name one with the builder's schema()")
    })?;
    if survey.temporary || schema.starts_with("pg_temp") {
        return Err(temporary_tables());
    }
    let ddl = names.ddl(schema);
    let never = CancelToken::never();
    let created = database.run(end, &never, |session| session.transaction(&ddl).map(drop));
    created.map_err(LockError::from).map_err(setup_error)?;
    log::info!("the lock tables were made, or completed, in the schema {schema:?}");
    Ok(())
}

/// The tables that the survey found.
pub(super) fn resolve(
    survey: &Survey,
    names: &TableNames,
    store_key_debug: bool,
    wake_ups: bool,
) -> Result<ResolvedTables> {
    if survey.temporary {
        return Err(temporary_tables());
    }
    let tables = names.resolved(survey, store_key_debug).ok_or_else(missing_tables)?;
    let notifies = wake_ups && survey.may_notify;
    let statements = Statements::new(&tables, notifies);
    let permits = PermitStatements::new(&tables);
    let set_statements = SetStatements::new(&tables, notifies);
    let is_utf8 = survey.encoding == "UTF8";
    Ok(ResolvedTables {
        tables,
        statements,
        permits,
        set_statements,
        notifies,
        is_utf8,
        runs: OnceLock::new(),
        shared: OnceLock::new(),
        notes: OnceLock::new(),
        noted: AtomicBool::new(false),
        turns: OnceLock::new(),
    })
}

/// Says in the log what a person should know about the tables.
pub(super) fn log_survey(survey: &Survey, names: &TableNames) {
    let found = [&survey.locks_in, &survey.fences_in].map(|schema| schema.as_deref().unwrap_or_default());
    log::info!("the lock table is in the schema {:?}, the fence counters in {:?}", found[0], found[1]);
    if survey.unlogged {
        log::warn!(
            "a lock table is UNLOGGED: a crash empties it and fences would repeat; ALTER TABLE … SET LOGGED"
        );
    }
    if survey.own_path && names.follow_the_path() {
        log::warn!(
            "the search_path begins with \"$user\" and that schema exists, so another role finds other lock tables, and both would hold the same key: name one schema for all with the builder's schema()"
        );
    }
}

/// Why setup failed, where that is another matter than in a call on the tables.
pub(super) fn setup_error(error: LockError) -> LockError {
    let message = match error.sqlstate() {
        // Its grants are not those of a holder.
        Some("42501") => {
            "something of the lock tables is missing and the role may not create it: run schema.sql as a role that may, then build the client with auto_create_tables(false) (SQLSTATE 42501)"
        }
        Some("0A000") => {
            "a lock table is partitioned, or something else that cannot have the indexes of schema.sql: make it a plain table (SQLSTATE 0A000)"
        }
        Some("P0001") => {
            "an event trigger refused to create the lock tables (see pg_event_trigger and the server's log): run schema.sql as a role that it lets through, then build the client with auto_create_tables(false) (SQLSTATE P0001)"
        }
        _ => return error,
    };
    error.with_message(message)
}

/// Temporary tables come before all others on the search path, and each session has its own.
fn temporary_tables() -> LockError {
    LockError::invalid(
        "the lock tables that the search_path finds are temporary, which no other session sees: name a schema with the builder's schema()",
    )
}

fn missing_tables() -> LockError {
    LockError::invalid(
        "the lock tables do not exist here: call setup_schema() or run schema.sql, and check schema, table_name and fence_table_name",
    )
}
