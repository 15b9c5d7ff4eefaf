//! The database, and the tables once it is known where they are.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::engine;
use crate::leases::schema::{Survey, TableNames};
use crate::leases::setup::{self, ResolvedTables};
use crate::leases::wake_ups::WakeUps;
use crate::model::time::deadline_after;
use crate::pg::{Database, Failure, Lane, Session, until_known};
use crate::sync::Mutex;

/// How many operation timeouts setting up the schema may take: others may be doing it.
const SETUP_TIMES: u32 = 6;

/// Leases in two tables of a PostgreSQL database.
pub(crate) struct PostgresBackend {
    pub(super) database: Arc<Database>,
    pub(super) names: TableNames,
    pub(super) settings: Settings,
    pub(super) wake_ups: Option<WakeUps>,
    /// Handed to the thread of a cleanup.
    pub(super) this: Weak<Self>,
    pub(super) next_cleanup: Mutex<Option<Instant>>,
    /// When cleanups and operators look for the table of members again, which was missing.
    pub(super) next_members: Mutex<Option<Instant>>,
    tables: OnceLock<Arc<ResolvedTables>>,
}

/// What a caller may choose about the tables and the time.
#[derive(Clone, Copy)]
#[allow(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub(crate) struct Settings {
    pub(crate) store_key_debug: bool,
    pub(crate) cleanup_in_is_locked: bool,
    /// Whether releases notify waiters in other processes, and waiters listen for them.
    pub(crate) wake_ups: bool,
    /// Whether what is missing is made.
    pub(crate) auto_create: bool,
    /// Whether setup makes the table of members, too.
    pub(crate) members_table: bool,
    /// Whether the client says who it is with each grant.
    pub(crate) owner: bool,
}

impl PostgresBackend {
    /// A backend that has not talked to the server yet.
    pub(crate) fn new(database: Arc<Database>, names: TableNames, settings: Settings) -> Arc<Self> {
        let connector = database.source().own_connector().filter(|_| settings.wake_ups);
        let wake_ups =
            connector.map(|connector| WakeUps::new(connector.clone(), database.operation_timeout()));
        Arc::new_cyclic(|this| Self {
            database,
            names,
            settings,
            wake_ups,
            tables: OnceLock::new(),
            this: this.clone(),
            next_cleanup: Mutex::new(None),
            next_members: Mutex::new(None),
        })
    }

    /// Creates what is missing of the two tables and their indexes, and of the third if the settings ask for
    /// it. Idempotent, safe at the same time from many processes, and a no-op for a role without the right
    /// to create if all is there.
    pub(crate) fn set_up(&self) -> Result<()> {
        let limit = self.database.operation_timeout().saturating_mul(SETUP_TIMES);
        let end = deadline_after(limit.min(Duration::from_secs(3600)));
        let never = CancelToken::never();
        let mut survey = setup::survey(&self.database, &self.names, end, &never)?;
        if !survey.is_complete() {
            // Once in a database's life, so it may cost a second connection.
            engine::check_two_sessions(&self.database, end)?;
            setup::create(&self.database, &self.names, &survey, end)?;
            survey = setup::survey(&self.database, &self.names, end, &never)?;
        }
        let at = self.resolve(&survey)?;
        if self.settings.members_table || self.settings.owner || at.shared.get().is_some() {
            self.set_up_members(&at, end)
        } else {
            Ok(())
        }
    }

    /// The tables, wherever they are.
    pub(super) fn find_tables(&self, end: Instant, cancel: &CancelToken) -> Result<Arc<ResolvedTables>> {
        match self.tables.get() {
            Some(tables) => Ok(Arc::clone(tables)),
            None => self.resolve(&setup::survey(&self.database, &self.names, end, cancel)?),
        }
    }

    /// Runs an operation on a connection of the pool that has everything prepared.
    ///
    /// An error of the operation is passed on; a connection that turns out to be stale is replaced
    /// as long as nothing can have been committed.
    pub(super) fn run<R>(
        &self,
        end: Instant,
        cancel: &CancelToken,
        operation: impl FnMut(&mut Session<'_>, &ResolvedTables) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        self.run_on(Lane::Operations, end, cancel, operation)
    }

    /// Runs it again after a lost answer, see [`until_known`].
    pub(super) fn run_until_known<R>(
        &self,
        end: Instant,
        cancel: &CancelToken,
        mut operation: impl FnMut(&mut Session<'_>, &ResolvedTables) -> Result<R, Failure>,
    ) -> Result<(R, Option<LockError>), Failure> {
        until_known(end, cancel, || self.run(end, cancel, &mut operation))
    }

    /// Runs a renewal, on the connection that is kept for it.
    pub(super) fn run_renewal<R>(
        &self,
        end: Instant,
        operation: impl FnMut(&mut Session<'_>, &ResolvedTables) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        self.run_on(Lane::Renewals, end, &CancelToken::never(), operation)
    }

    fn run_on<R>(
        &self,
        lane: Lane,
        end: Instant,
        cancel: &CancelToken,
        mut operation: impl FnMut(&mut Session<'_>, &ResolvedTables) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        self.database.with_connection(lane, end, cancel, |session| {
            let at = match self.tables.get() {
                Some(tables) => Arc::clone(tables),
                None => self.resolve(&setup::survey_on(session, &self.names)?)?,
            };
            session.prepare(&at.statements.all())?;
            operation(session, &at)
        })
    }

    fn resolve(&self, survey: &Survey) -> Result<Arc<ResolvedTables>> {
        let Settings { store_key_debug, wake_ups, .. } = self.settings;
        let tables = Arc::new(setup::resolve(survey, &self.names, store_key_debug, wake_ups)?);
        match self.tables.set(Arc::clone(&tables)) {
            Ok(()) => {
                setup::log_survey(survey, &self.names);
                Ok(tables)
            }
            // Another thread was first: the same tables, and they have been spoken of.
            Err(_) => Ok(self.tables.get().cloned().unwrap_or(tables)),
        }
    }
}
