//! One operation's use of one connection: prepare, send, read the answers, put it back or close it.
//!
//! 1. A connection goes back to its pool only when every message was answered and no transaction is
//!    open; in any doubt it is closed ([`Session`] closes it when dropped, unless it was taken out).
//! 2. Every wait is bounded twice: by the server's own limits, set in each transaction, and by the
//!    control's deadline a little later, so that the server's better error comes first where it comes.
//!    One of a caller's may come with a transaction that other code left open, where what we do could
//!    be rolled back later and what we see be old. Every message to it says that it must be a
//!    transaction of its own; where it is not, the connection is closed and replaced.
//! 3. While a message that does not commit is under way, the caller's token cuts the connection and
//!    has the server cancel; once a message that commits is sent, nobody cancels it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::cancel::{CancelToken, Subscription};
use crate::error::{ErrorCode, LockError, Result};
use crate::model::time::deadline_after;
use crate::pg::answers::{Answers, int};
use crate::pg::connect::{guard_runtime, rest};
use crate::pg::error::{call_error, out_of_time};
use crate::pg::failure::{Failure, READ_ONLY};
use crate::pg::names::PLAIN_NAMES;
use crate::pg::source::Connection;
use crate::pg::statement::{
    ALONE, Arg, Handle, IDLE_MS, Message, SessionState, SessionTimer, Statement, stated,
};
use crate::pg::stream::StreamControl;
use crate::threads::spawn;

/// How much later than the server's limits the client gives up.
pub(crate) const GRACE: Duration = Duration::from_millis(100);

/// By how much the limits that a session began with may be later than the call's deadline.
const LATE_MS: u64 = 300;

/// How often a statement is called on one connection before the driver prepares it.
const OFTEN: u32 = 16;

/// How long a ROLLBACK may take before the connection is closed instead.
const ROLLBACK_LIMIT: Duration = Duration::from_secs(1);

/// A connection in the hands of one operation.
pub(crate) struct Session<'a> {
    connection: Option<Connection>,
    end: Instant,
    cancel: &'a CancelToken,
    in_transaction: bool,
    /// See [`SessionState::preset_limit_ms`].
    preset_limit_ms: Option<u64>,
}

impl<'a> Session<'a> {
    pub(crate) fn new(connection: Connection, end: Instant, cancel: &'a CancelToken) -> Self {
        Self { connection: Some(connection), end, cancel, in_transaction: false, preset_limit_ms: None }
    }

    /// Prepares these statements if this connection has not yet.
    pub(crate) fn prepare(&mut self, statements: &[&Statement]) -> Result<(), Failure> {
        let state = self.connection()?.state();
        let missing = state.missing(statements);
        if missing.is_empty() {
            self.preset_limit_ms = state.preset_limit_ms;
            return Ok(());
        }
        let message = SessionState::preparation(self.limits(), &missing);
        let answers = match self.simple(&message, false) {
            Ok(answers) => answers,
            // 42P05: another client prepared them on the server connection behind a pooler. 25001 or
            // 0A000: a server that cannot prepare. Written-out statements work everywhere.
            Err(failure) if matches!(failure.refused_with(), Some("42P05" | "25001" | "0A000")) => {
                self.connection()?.state().plain = true;
                return Ok(());
            }
            Err(failure) => return Err(failure),
        };
        let preset_limit_ms = answers.row(0)?.map(|row| int(row, 0)).transpose()?.flatten();
        let preset_limit_ms = preset_limit_ms.and_then(|ms| u64::try_from(ms).ok());
        self.preset_limit_ms = preset_limit_ms;
        let state = self.connection()?.state();
        state.preset_limit_ms = preset_limit_ms;
        state.remember(statements);
        Ok(())
    }

    /// Sends a message that only reads: its loss loses nothing.
    pub(crate) fn ask(&mut self, message: &Message<'_>) -> Result<Answers, Failure> {
        self.send(message, false)
    }

    /// Carries out one statement that only reads.
    pub(crate) fn ask_one(&mut self, statement: &Statement, args: &[Arg<'_>]) -> Result<Answers, Failure> {
        if self.is_preconfigured() {
            return self.call(statement, args, false);
        }
        self.ask(&Message::new().raw(self.limits()).call(statement, args))
    }

    /// The same, prepared with all of its kind first. If they were discarded: once more, and after
    /// that it is written out.
    pub(crate) fn ask_prepared(
        &mut self,
        all: &[&Statement],
        statement: &Statement,
        args: &[Arg<'_>],
    ) -> Result<Answers, Failure> {
        loop {
            self.prepare(all)?;
            match self.ask_one(statement, args) {
                // Nothing was done, and the second time in a row the session gives up on preparing.
                Err(failure) if failure.is_unprepared() => {}
                answers => return answers,
            }
        }
    }

    /// Carries out one statement that is a transaction of its own.
    pub(crate) fn commit_one(&mut self, statement: &Statement, args: &[Arg<'_>]) -> Result<Answers, Failure> {
        if self.is_preconfigured() {
            let answers = self.call(statement, args, true)?;
            return self.committed(answers);
        }
        self.commit(&Message::new().raw(self.prelude()).call(statement, args))
    }

    /// Sends a message that begins a transaction and leaves it open.
    pub(crate) fn begin(&mut self, message: &Message<'_>) -> Result<Answers, Failure> {
        self.in_transaction = true;
        self.send(message, false)
    }

    /// Sends a message that commits.
    pub(crate) fn commit(&mut self, message: &Message<'_>) -> Result<Answers, Failure> {
        let answers = self.send(message, true)?;
        self.in_transaction = false;
        self.committed(answers)
    }

    /// The answers to a commit, unless the server warned that its standby may not have it.
    fn committed(&mut self, answers: Answers) -> Result<Answers, Failure> {
        if self.connection()?.control().is_some_and(StreamControl::take_unreplicated) {
            let error = LockError::new(ErrorCode::ServiceUnavailable)
                .with_message("the change is durable on this server, but its synchronous standby may not have it: check replication");
            return Err(Failure::broken(error, true, false));
        }
        Ok(answers)
    }

    /// Sends these statements as a whole transaction of its own, `BEGIN` to `COMMIT`, in one message.
    pub(crate) fn transaction(&mut self, statements: &str) -> Result<Answers, Failure> {
        if !self.is_own() {
            self.ask(&Message::new().raw(ALONE))?;
        }
        self.in_transaction = true;
        let message = Message::new()
            .raw("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")
            .raw(stated(self.millis_left()));
        self.commit(&message.raw(statements).raw("COMMIT"))
    }

    /// Ends an open transaction without a change; on any trouble the connection is closed instead.
    pub(crate) fn rollback(&mut self) {
        if !std::mem::take(&mut self.in_transaction) || self.connection.is_none() {
            return;
        }
        let end = std::mem::replace(&mut self.end, deadline_after(ROLLBACK_LIMIT));
        let done = self.simple(&Message::new().raw("ROLLBACK"), true);
        self.end = end;
        if done.is_err() {
            self.close();
        }
    }

    /// Puts the connection back, after a rollback where a transaction is open.
    pub(crate) fn finish(mut self) {
        if let Some(connection) = self.take_connection() {
            connection.give_back();
        }
    }

    /// The connection, in order; `None` if it is gone.
    pub(crate) fn take_connection(&mut self) -> Option<Connection> {
        self.rollback();
        self.connection.take()
    }

    /// What a transaction states before anything else: isolation and access mode, and bounds for its
    /// waits and statements (never 0, which would mean none). Nothing is stated that is so already:
    /// a session of ours began with all of it, see
    /// [`startup_options`](crate::pg::statement::startup_options).
    pub(crate) fn prelude(&self) -> String {
        self.states("SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;")
    }

    /// The same for a transaction that only reads.
    pub(crate) fn limits(&self) -> String {
        self.states("")
    }

    /// The same in an isolation level that is stated, for a transaction that asks which one it has.
    pub(crate) fn limits_read_committed(&self) -> String {
        self.states("SET TRANSACTION ISOLATION LEVEL READ COMMITTED;")
    }

    /// The same with [`PLAIN_NAMES`].
    pub(crate) fn limits_plain(&self) -> String {
        let limits = self.states("");
        let separator = if limits.is_empty() { "" } else { ";" };
        format!("{PLAIN_NAMES}{separator}{limits}")
    }

    /// The same for a transaction that stays open between two messages, with its `BEGIN`.
    pub(crate) fn prelude_between(&self) -> String {
        let mut prelude = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE".to_owned();
        let limits = self.states("");
        if !limits.is_empty() {
            let idle = self.millis_left() + IDLE_MS;
            prelude = format!("{prelude};{limits};SET LOCAL idle_in_transaction_session_timeout TO {idle}");
        }
        prelude
    }

    /// Whether the session began with all that a transaction needs, and with limits that fit this
    /// one. A limit that is a little late does no harm: where it can be, the client's own is exact.
    fn is_preconfigured(&self) -> bool {
        let left = self.millis_left();
        self.is_own() && self.preset_limit_ms.is_some_and(|limit| left >= limit - (limit / 10).min(LATE_MS))
    }

    fn states(&self, transaction: &str) -> String {
        if self.is_preconfigured() {
            return String::new();
        }
        let alone = if self.is_own() { String::new() } else { format!(";{ALONE}") };
        format!("{transaction}{}{alone}", stated(self.millis_left()))
    }

    fn millis_left(&self) -> u64 {
        u64::try_from(rest(self.end).as_millis()).unwrap_or(u64::MAX).clamp(1, 2_000_000_000)
    }

    /// The timer of a session lock that runs on this session.
    pub(crate) fn timer(&mut self) -> Option<SessionTimer> {
        self.connection().ok()?.state().timer.clone()
    }

    pub(crate) fn set_timer(&mut self, timer: Option<SessionTimer>) {
        if let Ok(connection) = self.connection() {
            connection.state().timer = timer;
        }
    }

    /// Whether the connection is of a pool of ours.
    pub(crate) fn is_own(&self) -> bool {
        self.connection.as_ref().is_some_and(Connection::is_own)
    }

    pub(crate) fn check_cancel(&self) -> Result<()> {
        self.cancel.check()
    }

    /// Closes the connection.
    fn close(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.discard();
        }
    }

    fn connection(&mut self) -> Result<&mut Connection> {
        self.connection.as_mut().ok_or_else(|| {
            LockError::new(ErrorCode::ServiceUnavailable)
                .with_message("the connection to the server is closed: try again")
        })
    }

    /// Sends, and notices where prepared statements are gone.
    fn send(&mut self, message: &Message<'_>, commits: bool) -> Result<Answers, Failure> {
        let outcome = self.simple(message, commits);
        // It is too late for an isolation level.
        let late = |failure: &Failure| failure.refused_with() == Some("25001");
        if outcome.as_ref().is_err_and(late) && !self.is_own() {
            return Err(self.left_open());
        }
        self.track_prepared(outcome)
    }

    /// Calls one statement, by the driver's own kind of prepared statement once it is called often:
    /// nothing is parsed then, neither there nor here, but to prepare it is a round trip. Only for a
    /// preconfigured session, where nothing has to be stated beside it.
    fn call(&mut self, statement: &Statement, args: &[Arg<'_>], commits: bool) -> Result<Answers, Failure> {
        let state = self.connection()?.state();
        if state.plain {
            return self.send(&Message::new().call(statement, args), commits);
        }
        let handle = match state.handle(statement) {
            Handle::Ready(handle) => handle,
            Handle::Called(times) if times < OFTEN => {
                return self.send(&Message::new().call(statement, args), commits);
            }
            Handle::Called(_) => {
                let types = statement.sql_types();
                let prepared =
                    self.round_trip(false, |client| client.prepare_typed(statement.text(), &types));
                let handle = self.track_prepared(prepared)?;
                self.connection()?.state().keep_handle(statement, handle.clone());
                handle
            }
        };
        let rows = self.round_trip(commits, |client| client.query(&handle, &Arg::parameters(args)));
        let rows = self.track_prepared(rows)?;
        Ok(Answers::of_query(rows))
    }

    /// Notes whether the server still has our prepared statements.
    fn track_prepared<R>(&mut self, outcome: Result<R, Failure>) -> Result<R, Failure> {
        match outcome {
            Ok(answer) => {
                self.connection()?.state().vanished = 0;
                Ok(answer)
            }
            Err(failure) if failure.is_unprepared() => {
                let state = self.connection()?.state();
                if state.plain {
                    return Err(failure.refused());
                }
                state.forget();
                Err(failure)
            }
            Err(failure) => Err(failure),
        }
    }

    /// One message of text.
    fn simple(&mut self, message: &Message<'_>, commits: bool) -> Result<Answers, Failure> {
        let connection = self.connection()?;
        let text = message.text(connection.state().plain)?;
        self.round_trip(commits, |client| client.simple_query(&text)).map(Answers::of_message)
    }

    /// One round trip.
    fn round_trip<R>(
        &mut self,
        commits: bool,
        send: impl FnOnce(&mut postgres::Client) -> Result<R, postgres::Error>,
    ) -> Result<R, Failure> {
        let left = rest(self.end);
        if left.is_zero() {
            return Err(out_of_time().into());
        }
        let watch = if commits { None } else { self.watch() };
        let connection = self.connection()?;
        if let Some(control) = connection.control() {
            control.limit(left + GRACE);
        }
        let client = connection.client()?;
        let outcome = match guard_runtime(|| send(client)) {
            Ok(outcome) => outcome,
            // It panicked in the middle of something: its state is unknown.
            Err(error) if error.code() == ErrorCode::Internal => {
                self.close();
                return Err(Failure::broken(error, commits, false));
            }
            // Nothing was sent.
            Err(error) => {
                self.close();
                return Err(error.into());
            }
        };
        if watch.is_some_and(Watch::fires) {
            self.close();
            return Err(LockError::aborted().into());
        }
        outcome.map_err(|error| self.failed(error, commits))
    }

    fn failed(&mut self, error: postgres::Error, commits: bool) -> Failure {
        let state = error.code().map(postgres::error::SqlState::code);
        // 2201W is that of `ALONE`; 25P02: the transaction that was left open has failed already.
        if matches!(state, Some("2201W" | "25P02")) && !self.is_own() {
            return self.left_open();
        }
        let failure = call_error(error, commits);
        if failure.refused_with() == Some(READ_ONLY) {
            return self.read_only(failure.into_error());
        }
        if !failure.is_refused() && !failure.is_unprepared() {
            self.close();
        }
        failure
    }

    /// The connection leads to a standby, where nothing can be changed. Another may lead to the primary:
    /// if this one was used before, that is not known yet.
    pub(crate) fn read_only(&mut self, error: LockError) -> Failure {
        let stale = self.connection.as_ref().is_some_and(Connection::was_used);
        self.close();
        Failure::broken(error, false, stale)
    }

    /// A caller's connection came with a transaction of other code's, in which nothing of ours was done.
    fn left_open(&mut self) -> Failure {
        self.close();
        let what = "a connection of the caller's pool came with an open transaction, which is rolled back: \
            commit or roll back before returning it to the pool";
        log::warn!("{what}");
        let error = LockError::new(ErrorCode::ServiceUnavailable).with_message(what);
        Failure::broken(error, false, true)
    }

    /// Has the caller's token end the message that is about to be sent.
    fn watch(&mut self) -> Option<Watch> {
        if self.cancel.is_never() {
            return None;
        }
        let connection = self.connection.as_mut()?;
        let (token, canceller, control) =
            (connection.cancel_token()?, connection.canceller(), connection.control().cloned());
        let fired = Arc::new(AtomicBool::new(false));
        let hook = {
            let fired = Arc::clone(&fired);
            move || {
                fired.store(true, Ordering::SeqCst);
                if let Some(control) = control {
                    control.kill();
                }
                // The hook runs on whatever thread cancels, which must not do I/O.
                let ask = move || canceller.cancel(&token);
                if spawn("syncguard-cancel", ask).is_err() {
                    log::debug!("no thread for a cancel request; the server's own limit ends the statement");
                }
            }
        };
        Some(Watch { subscription: self.cancel.subscribe(hook), fired })
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.close();
    }
}

struct Watch {
    subscription: Option<Subscription>,
    fired: Arc<AtomicBool>,
}

impl Watch {
    /// Whether it has close the connection or is about to: then the connection must not be used again.
    fn fires(self) -> bool {
        let removed = self.subscription.is_none_or(Subscription::remove);
        !removed || self.fired.load(Ordering::SeqCst)
    }
}
