//! The adapter: [`LockBackend`] on two tables of a PostgreSQL database.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `link`, `connect` | sockets with a deadline, TLS, cancel requests |
//! | `connection_string`, `addresses`, `resolve` | what a connection string says; lists of hosts; names to addresses |
//! | `pool`, `slots`, `callers`, `source` | pools and the wait for them, our own, a caller's, the connection kept for renewals |
//! | `statement`, `session`, `row` | prepared statements, messages, one operation on one connection, its answers |
//! | `run` | the loops around every operation |
//! | `sql`, `held`, `schema`, `collation` | every SQL text, those on a lease that stands apart; the tables, how they come to be, whether their indexes are in order |
//! | `acquire`, `release`, `extend`, `read` | the operations |
//! | `operator` | what operators see and may do |
//! | `wake`, `listen`, `processes` | calls between processes; whether sessions keep to theirs |
//! | `error` | SQLSTATE to error code |
//!
//! The one loop around all of them is [`PostgresBackend::run`]: it replaces stale connections as
//! long as nothing can have been committed, and says so when that is no longer certain.

mod acquire;
mod addresses;
mod callers;
mod collation;
mod connect;
mod connection_string;
pub(crate) mod error;
mod extend;
mod held;
mod link;
mod listen;
mod operator;
mod pool;
mod processes;
mod read;
mod release;
mod resolve;
mod resources;
mod row;
mod run;
mod schema;
mod session;
mod slots;
mod source;
mod sql;
mod statement;
mod wake;

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

pub(crate) use connect::{Connector, guard_runtime};
pub(crate) use connection_string::parse_url;
pub use operator::{BrokenLock, CLEANUP_GUARD_MS, Counts, IdleCounter, Operator, Waiter};
pub(crate) use processes::{Asked, ROUNDS};
pub(crate) use row::{Answers, Row, flag, int, malformed, required, text};
pub(crate) use schema::Names;
pub(crate) use session::Session;
pub(crate) use source::{Connection, Source};
pub(crate) use statement::{Arg, Message, SessionTimer, Statement, push_quoted};

use crate::backend::{
    AcquireResult, Attempt, Capabilities, ExtendOutcome, Grant, Holder, LockBackend, LockInfo, LockInfoRaw,
    Lookup, OnHeard, ReleaseOutcome, RenewOutcome, Renewal, TimeAuthority, Watch,
};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::model::fence::Fence;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::model::lock_id::LockId;
use crate::model::time::{Clock, Moment, Ttl, deadline_after};
use crate::threads::spawn;
pub(crate) use error::{Trouble, without_right};
use schema::{Survey, Tables};
use sql::Statements;
use wake::Wakes;

/// How often an operation starts anew because its connection turned out to be stale. After a
/// restart of the server every idle connection is.
pub(crate) const MAX_REPLACEMENTS: u32 = 64;

/// How many operation timeouts setting up the schema may take: others may be doing it.
const SET_UP_TIMES: u32 = 6;

/// The least time between two clean-ups that reads cause.
const CLEANUP_PAUSE: Duration = Duration::from_secs(1);

/// The most rows that such a clean-up deletes.
const CLEANUP_ROWS: u32 = 100;

/// Leases in two tables of a PostgreSQL database.
pub(crate) struct PostgresBackend {
    source: Source,
    names: Names,
    settings: Settings,
    located: OnceLock<Arc<Located>>,
    /// Handed to the thread of a clean-up.
    this: Weak<PostgresBackend>,
    next_cleanup: Mutex<Option<Instant>>,
    wakes: Option<Wakes>,
}

/// What a caller may choose about the tables and the time.
#[derive(Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) store_key_debug: bool,
    pub(crate) cleanup_in_is_locked: bool,
    pub(crate) operation_timeout: Duration,
    /// Whether releases call waiters in other processes, and waiters listen for such calls.
    pub(crate) wake_ups: bool,
}

/// The tables and their statements, once it is known where the tables are.
pub(crate) struct Located {
    tables: Tables,
    statements: Statements,
    /// Whether releases call waiters.
    calls: bool,
}

/// How an operation failed.
pub(crate) enum Fault {
    /// Certainly nothing was changed.
    Error(LockError),
    /// The answer to a commit was lost.
    Doubt(LockError),
}

impl Fault {
    /// The error, which says if the outcome is unknown. Whoever knows for how long a key may be held
    /// says that, too.
    pub(crate) fn into_error(self) -> LockError {
        match self {
            Self::Error(error) => error,
            Self::Doubt(error) => error.with_unknown_outcome(Duration::ZERO),
        }
    }
}

impl From<LockError> for Fault {
    fn from(error: LockError) -> Self {
        Self::Error(error)
    }
}

impl PostgresBackend {
    /// A backend that has not talked to the server yet.
    pub(crate) fn new(source: Source, names: Names, settings: Settings) -> Arc<Self> {
        let listens = source.own_connector().filter(|_| settings.wake_ups);
        let wakes = listens.map(|connector| Wakes::new(connector.clone(), settings.operation_timeout));
        Arc::new_cyclic(|this| Self {
            source,
            wakes,
            names,
            settings,
            located: OnceLock::new(),
            this: this.clone(),
            next_cleanup: Mutex::new(None),
        })
    }

    /// Creates what is missing of the two tables and their indexes. Idempotent, safe at the same
    /// time from many processes, and a no-op for a role without the right to create if all is there.
    pub(crate) fn set_up(&self) -> Result<()> {
        let limit =
            self.settings.operation_timeout.saturating_mul(SET_UP_TIMES).min(Duration::from_secs(3600));
        let end = deadline_after(limit);
        let never = CancelToken::never();
        let survey = self.survey(end, &never)?;
        if survey.is_complete() {
            return self.remember(&survey);
        }
        if survey.encoding != "UTF8" {
            return Err(LockError::invalid(
                "the database's encoding is not UTF8 and cannot hold every key: use a UTF8 database",
            ));
        }
        let found =
            survey.locks_in.as_deref().or(survey.fences_in.as_deref()).or(survey.creation_schema.as_deref());
        let schema = self.names.schema_or(found).ok_or_else(|| {
            LockError::invalid("no schema of the search_path exists: name one with the builder's schema()")
        })?;
        if survey.temporary || schema.starts_with("pg_temp") {
            return Err(temporary_tables());
        }
        let ddl = self.names.ddl(schema);
        self.run_bare(end, &never, |session| session.transaction(&ddl).map(drop))
            .map_err(Fault::into_error)
            .map_err(set_up_error)?;
        let survey = self.survey(end, &never)?;
        log::info!("the lock tables were made, or completed, in the schema {schema:?}");
        self.remember(&survey)
    }

    /// Cleans up after a read that met a row long over: later, on a thread of its own, at most once
    /// per [`CLEANUP_PAUSE`]. Failures only reach the debug log.
    pub(crate) fn cleanup_soon(&self) {
        if !self.settings.cleanup_in_is_locked {
            return;
        }
        let now = Instant::now();
        {
            let mut next = self.next_cleanup.lock().unwrap_or_else(PoisonError::into_inner);
            if next.is_some_and(|next| now < next) {
                return;
            }
            *next = Some(now + CLEANUP_PAUSE);
        }
        let this = self.this.clone();
        let cleanup = move || {
            let Some(backend) = this.upgrade() else { return };
            if let Err(error) = backend.cleanup_expired(CLEANUP_ROWS, backend.end()) {
                log::debug!("clean-up of expired leases failed: {}", error.chain());
            }
        };
        if spawn("syncguard-cleanup", cleanup).is_err() {
            log::debug!("no thread for the clean-up of expired leases");
        }
    }

    fn locate(&self, end: Instant, cancel: &CancelToken) -> Result<Arc<Located>> {
        if let Some(located) = self.located.get() {
            return Ok(Arc::clone(located));
        }
        let survey = self.survey(end, cancel)?;
        self.remember(&survey)?;
        self.located.get().cloned().ok_or_else(missing_tables)
    }

    fn locate_on(&self, session: &mut Session<'_>) -> Result<Arc<Located>, Trouble> {
        if let Some(located) = self.located.get() {
            return Ok(Arc::clone(located));
        }
        let survey = read_survey(session, &self.names)?;
        self.remember(&survey)?;
        Ok(self.located.get().cloned().ok_or_else(missing_tables)?)
    }

    fn survey(&self, end: Instant, cancel: &CancelToken) -> Result<Survey> {
        self.run_bare(end, cancel, |session| read_survey(session, &self.names)).map_err(Fault::into_error)
    }

    fn remember(&self, survey: &Survey) -> Result<()> {
        if survey.temporary {
            return Err(temporary_tables());
        }
        let tables = self.names.located(survey, self.settings.store_key_debug).ok_or_else(missing_tables)?;
        let calls = self.settings.wake_ups && survey.may_call;
        let statements = Statements::new(&tables, calls);
        if self.located.set(Arc::new(Located { tables, statements, calls })).is_err() {
            return Ok(());
        }
        let found = [&survey.locks_in, &survey.fences_in].map(|schema| schema.as_deref().unwrap_or_default());
        log::info!("the lock table is in the schema {:?}, the fence counters in {:?}", found[0], found[1]);
        if survey.unlogged {
            log::warn!(
                "a lock table is UNLOGGED: a crash empties it and fences would repeat; ALTER TABLE … SET LOGGED"
            );
        }
        if survey.own_path && self.names.follow_the_path() {
            log::warn!(
                "the search_path begins with \"$user\" and that schema exists, so another role finds other lock tables, and both would hold the same key: name one schema for all with the builder's schema()"
            );
        }
        Ok(())
    }

    /// Where session locks get the connections that they keep.
    pub(crate) fn source(&self) -> &Source {
        &self.source
    }

    /// When an operation that starts now must be over.
    pub(crate) fn end(&self) -> Instant {
        deadline_after(self.settings.operation_timeout)
    }

    /// The same for one with a deadline of its own.
    fn end_by(&self, deadline: Moment) -> Instant {
        let left = deadline.since(Clock::system().now());
        deadline_after(left).min(self.end())
    }
}

fn read_survey(session: &mut Session<'_>, names: &Names) -> Result<Survey, Trouble> {
    // Under the caller's search_path: it decides where unqualified tables are.
    let answers = session.ask(&Message::new().raw(session.limits()).raw(names.survey()?))?;
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
        may_call: flag(8)?,
        sorted_by_collation: flag(9)?,
        own_path: flag(10)?,
    };
    if let (true, Some(tables)) = (survey.sorted_by_collation, names.located(&survey, false)) {
        collation::check(session, &tables.locks, &tables.fences)?;
    }
    Ok(survey)
}

/// Why set-up failed, where that is another matter than in a call on the tables.
fn set_up_error(error: LockError) -> LockError {
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

impl LockBackend for PostgresBackend {
    fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult> {
        let (key, ttl) = (Key::new(key)?, Ttl::new(ttl)?);
        cancel.check()?;
        let lock_id = LockId::generate()?;
        acquire::Acquire::new(&key, &lock_id, ttl)?.run(self, self.end(), cancel).map(AcquireResult::from)
    }

    fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome> {
        release::release(self, &LockId::parse(lock_id)?, self.end(), cancel)
    }

    fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome> {
        extend::extend(self, &LockId::parse(lock_id)?, Ttl::new(ttl)?, self.end(), cancel)
    }

    fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool> {
        read::is_locked(self, &Key::new(key)?, self.end(), cancel)
    }

    fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>> {
        Ok(self.lookup_raw(what, cancel)?.map(|found| found.sanitized()))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::fencing("postgres", TimeAuthority::Server)
    }

    fn attempt(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<AcquireResult> {
        self.grant(attempt, cancel).map(AcquireResult::from)
    }

    fn grant(&self, attempt: &Attempt<'_>, cancel: &CancelToken) -> Result<Option<Grant>> {
        let (key, ttl) = (Key::new(attempt.key)?, Ttl::new(attempt.ttl)?);
        let lock_id = LockId::parse(attempt.lock_id)?;
        acquire::Acquire::new(&key, &lock_id, ttl)?.run(self, self.end_by(attempt.deadline), cancel)
    }

    fn peek(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<bool> {
        read::is_locked(self, &Key::new(key)?, self.end_by(deadline), cancel)
    }

    fn holder(&self, key: &str, deadline: Moment, cancel: &CancelToken) -> Result<Option<Holder>> {
        read::holder(self, &Key::new(key)?, self.end_by(deadline), cancel)
    }

    fn watch(&self, key: &str, heard: OnHeard) -> Option<Box<dyn Watch>> {
        let wakes = self.wakes.as_ref()?;
        let (storage_key, _) =
            Key::new(key).ok()?.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES).ok()?;
        wakes.watch(&storage_key, &heard)
    }

    fn extend_by(
        &self,
        lock_id: &str,
        ttl: Duration,
        deadline: Moment,
        cancel: &CancelToken,
    ) -> Result<ExtendOutcome> {
        extend::extend(self, &LockId::parse(lock_id)?, Ttl::new(ttl)?, self.end_by(deadline), cancel)
    }

    fn release_by(&self, lock_id: &str, deadline: Moment) -> Result<ReleaseOutcome> {
        release::release(self, &LockId::parse(lock_id)?, self.end_by(deadline), &CancelToken::never())
    }

    fn prolong(&self, lease: &Renewal<'_>, deadline: Moment) -> Result<RenewOutcome> {
        extend::prolong(self, lease, self.end_by(deadline))
    }

    fn renew(&self, leases: &[Renewal<'_>], deadline: Moment) -> Vec<Result<RenewOutcome>> {
        extend::renew(self, leases, self.end_by(deadline))
    }

    fn reserve_renewals(&self, deadline: Moment, cancel: &CancelToken) -> Result<()> {
        if self.source.can_reserve()? {
            self.source.keep(self.source.get(self.end_by(deadline), cancel)?);
        }
        Ok(())
    }

    fn unreserve_renewals(&self) -> bool {
        self.source.unreserve()
    }

    fn lookup_raw(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfoRaw>> {
        read::lookup(self, what, self.end(), cancel)
    }

    fn fence_statement(&self, key: &str, fence: Fence, lock_id: Option<&str>) -> Result<String> {
        let key = Key::new(key)?;
        let (storage_key, fence_key) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
        let at = self.locate(self.end(), &CancelToken::never())?;
        let lock_id = lock_id.map(LockId::parse).transpose()?;
        sql::fenced(&at.tables, &storage_key, &fence_key, fence, lock_id.as_ref())
    }

    fn operation_timeout(&self) -> Duration {
        self.settings.operation_timeout
    }

    fn close(&self) {
        if let Some(wakes) = &self.wakes {
            wakes.close();
        }
        self.source.close();
    }
}

/// A caller's transaction in which a fence turned out to be stale, or which cannot be checked.
pub(crate) fn fence_error(error: postgres::Error) -> LockError {
    match error.code().map(|state| state.code().to_owned()).as_deref() {
        Some("22P02") => LockError::new(ErrorCode::Aborted).with_message(
            "the lease is over or a newer holder exists: this transaction cannot commit, roll it back and stop working",
        ),
        Some("25006") => LockError::invalid(
            "a fenced transaction must be READ WRITE: it locks the key's counter until it ends",
        )
        .with_source(error),
        _ => error::call_error(error, false).into_error(),
    }
}
