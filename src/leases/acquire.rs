//! Acquire: look, lock what seems free, read the clock, decide, write.
//!
//! Two forms of one decision. With a token the transaction takes two messages, so that the token
//! can be checked between the read and the write, and [`decide`] decides. Without one, the same
//! transaction travels as one message, an implicit block that commits at its end and rolls back by
//! itself on an error (<https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-MULTI-STATEMENT>),
//! and the statement decides by the same rule.
//!
//! # When the answer to a commit is lost
//!
//! 1. The lock id was chosen before the first byte was sent, and acquire is idempotent by it: a live
//!    row that carries the id answers with its stored fence and expiry.
//! 2. So a lost answer is asked for again by the same acquire, on another connection, under the same
//!    locks, in a transaction that writes: a reader would not wait for the standby.
//! 3. The first message may still arrive, whenever it likes. A live row that carries the id is left as
//!    it is. Where the lock was broken meanwhile it is granted anew, with a newer fence, by which its
//!    old guard finds that it is lost. Where the lock was released, it leaves a lease that nobody trusts,
//!    for its ttl (`docs/adr/0032`).
//! 4. If time runs out, the error says that the outcome is unknown, and for how long.

use std::time::{Duration, Instant};

use crate::backend::{Acquired, Grant, Label, Version};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::leases::backend::PostgresBackend;
use crate::leases::note_sql::NoteStatements;
use crate::leases::notes;
use crate::leases::refusals::{is_all_or_nothing, swallowed};
use crate::leases::setup::ResolvedTables;
use crate::leases::ticket::{self, InTurn};
use crate::model::fence::{FENCE_MAX, Fence};
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::model::lock_id::LockId;
use crate::model::time::{TIME_TOLERANCE_MS, TOLERANCE, Ttl, deadline_after, is_live};
use crate::pg::Failure;
use crate::pg::answers::{Answers, Row, int, malformed, required, text, version};
use crate::pg::names::EQ;
use crate::pg::session::{GRACE, Session};
use crate::pg::statement::{Arg, Message, Statement, push_quoted};

/// One acquire, with everything chosen.
pub(crate) struct Acquire<'a> {
    key: &'a Key,
    storage_key: String,
    fence_key: String,
    lock_id: &'a LockId,
    ttl: Ttl,
    label: Label<'a>,
    /// If it is granted only in turn.
    turn: Option<&'a InTurn<'a>>,
}

/// The statements of a grant: see [`Statements`](crate::leases::sql::Statements).
struct Grants<'a> {
    absent: &'a Statement,
    acquire: &'a Statement,
    grant: &'a Statement,
}

/// The last column of `acquire_absent` is this in a grant; for a row that exists it is the server's clock.
pub(super) const GRANTED: i64 = 1;

/// What one round of the protocol found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Round {
    Granted {
        expires_at_ms: i64,
        fence: Fence,
        version: Version,
    },
    Locked,
    /// The row is live and carries our id already; only two messages can confirm it.
    AlreadyOurs,
}

impl<'a> Acquire<'a> {
    pub(crate) fn new(key: &'a Key, lock_id: &'a LockId, ttl: Ttl) -> Result<Self> {
        let (storage_key, fence_key) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
        Ok(Self { key, storage_key, fence_key, lock_id, ttl, label: Label::default(), turn: None })
    }

    /// The same, by a holder that says this of itself.
    pub(super) fn labelled(mut self, label: Label<'a>) -> Self {
        self.label = label;
        self
    }

    /// The same, granted only while nobody is ahead. The table of members must have been found.
    pub(super) fn in_turn(self, turn: &'a InTurn<'a>) -> Self {
        Self { turn: Some(turn), ..self }
    }

    pub(crate) fn run(
        &self,
        backend: &PostgresBackend,
        end: Instant,
        cancel: &CancelToken,
    ) -> Result<Option<Grant>> {
        backend.need_notes(self.label, end, cancel).map_err(|error| self.in_context(error))?;
        let mut in_two = !cancel.is_never();
        let round = backend.run_until_known(end, cancel, |session, at| {
            if self.turn.is_some() {
                ticket::prepare(session, at)?;
            }
            let round = if in_two { self.two_messages(session, at) } else { self.one_message(session, at) };
            in_two |= round.as_ref().is_err_and(Failure::is_in_doubt);
            match round {
                Ok(Round::AlreadyOurs) => self.two_messages(session, at),
                other => other,
            }
        });
        match round {
            Ok((round, _)) => self.answer(&round),
            Err(failure) => Err(self.failed(backend, failure, cancel)),
        }
    }

    /// What is said of an acquire that failed.
    pub(super) fn failed(
        &self,
        backend: &PostgresBackend,
        failure: Failure,
        cancel: &CancelToken,
    ) -> LockError {
        self.in_context(if failure.is_in_doubt() {
            outcome_unknown(failure, cancel, backend.database.operation_timeout(), self.ttl)
        } else {
            self.name_blocking_session(backend, failure.into_error(), cancel)
        })
    }

    pub(super) fn fence_key(&self) -> &str {
        &self.fence_key
    }

    /// The grant in a statement's answer `(expiry, fence, version, …)`.
    pub(super) fn grant_in(&self, row: &Row) -> Result<Option<Grant>> {
        granted(row)?.map_or(Ok(None), |round| self.answer(&round))
    }

    /// The acquire of a key that was chosen since it seemed free, and that the first statement has not granted.
    pub(super) fn round(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        in_two: bool,
    ) -> Result<Round, Failure> {
        if !in_two {
            match self.careful_message(session, at)? {
                Round::AlreadyOurs => {}
                round => return Ok(round),
            }
        }
        self.two_messages(session, at)
    }

    pub(super) fn answer(&self, round: &Round) -> Result<Option<Grant>> {
        match *round {
            Round::Granted { expires_at_ms, fence, version } => {
                fence.warn_near_limit(self.key.as_str());
                let acquired = Acquired { lock_id: self.lock_id.as_str().to_owned(), fence, expires_at_ms };
                Ok(Some(Grant { acquired, version: Some(version) }))
            }
            Round::Locked => Ok(None),
            Round::AlreadyOurs => Err(malformed()),
        }
    }

    /// Names the session that blocked the queue, if that is why the time ran out. Outside of a transaction
    /// only a session lock can block it. Best effort, within [`GRACE`].
    fn name_blocking_session(
        &self,
        backend: &PostgresBackend,
        error: LockError,
        cancel: &CancelToken,
    ) -> LockError {
        if error.code() != ErrorCode::NetworkTimeout || cancel.is_cancelled() {
            return error;
        }
        let mut key = String::new();
        if push_quoted(&self.storage_key, &mut key).is_err() {
            return error;
        }
        let query = format!(
            "SELECT l.pid, (SELECT pg_catalog.count(*) FROM pg_catalog.pg_locks AS v \
                WHERE v.locktype = 'virtualxid' AND v.pid = l.pid) FROM pg_catalog.pg_locks AS l, (SELECT pg_catalog.hashtext({key})::int8 AS number) AS k \
             WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 \
             AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database()) \
             AND ((l.classid::int8 << 32) | l.objid::int8) = k.number AND l.pid <> pg_catalog.pg_backend_pid() LIMIT 1"
        );
        let found = backend.database.run(deadline_after(GRACE), cancel, |session| {
            let message = Message::new().raw(session.limits_plain()).raw(&query);
            let answers = session.ask(&message)?;
            Ok(answers.row(0)?.map(|row| Ok::<_, LockError>((int(row, 0)?, int(row, 1)?))).transpose()?)
        });
        match found {
            Ok(Some((Some(pid), Some(1..)))) => error.with_message(format!(
                "the server process {pid} holds this key's advisory lock in an open transaction and makes no progress: most likely another acquire whose process is paused or cut off; the server ends it at its own limits"
            )).with_contention(),
            Ok(Some((Some(pid), _))) => error.with_message(format!(
                "the server process {pid} holds an advisory lock on the number that this key queues on: session locks must not use the numbers from -2^31 to 2^31-1, which leases use; see advisory_holders()"
            )).with_contention(),
            _ => error,
        }
    }

    pub(super) fn in_context(&self, error: LockError) -> LockError {
        error.with_key(self.key.as_str()).with_lock_id(self.lock_id.as_str())
    }

    /// `(storage key, fence key, user key, lock id, ttl ms)`
    pub(super) fn grant_args(&self) -> [Arg<'_>; 5] {
        [
            Arg::Text(&self.storage_key),
            Arg::Text(&self.fence_key),
            Arg::Text(self.key.as_str()),
            Arg::Text(self.lock_id.as_str()),
            Arg::Int(self.ttl.millis()),
        ]
    }

    /// The statements, and the arguments of the first two.
    fn grants<'s>(
        &self,
        session: &mut Session<'_>,
        at: &'s ResolvedTables,
    ) -> Result<(Grants<'s>, Vec<Arg<'_>>), Failure> {
        let plain = &at.statements;
        let noted = notes::granting(session, at, self.label, NoteStatements::locks)?;
        let (absent, acquire) = match (self.turn, noted) {
            (Some(_), noted) => ticket::statements(at)?.grants(noted.is_some()),
            (None, None) => (&plain.acquire_absent, &plain.acquire),
            (None, Some(noted)) => (&noted.acquire_absent, &noted.acquire),
        };
        let grant = noted.map_or(&plain.grant, |noted| &noted.grant);
        let args = self.grant_args();
        let args = self.turn.map_or_else(|| args.to_vec(), |turn| turn.args(args));
        Ok((Grants { absent, acquire, grant }, notes::with_label(&args, self.label)))
    }

    /// One message, one round trip, unless the key is neither plainly free nor plainly held.
    fn one_message(&self, session: &mut Session<'_>, at: &ResolvedTables) -> Result<Round, Failure> {
        let (grants, args) = self.grants(session, at)?;
        let answers = match session.commit_one(grants.absent, &args) {
            // A row was written since the look, perhaps by an earlier copy of this very attempt.
            Err(failure) if is_all_or_nothing(&failure) => return self.careful_message(session, at),
            other => other?,
        };
        if let Some(row) = answers.row(0)? {
            let (expires_at_ms, now_ms) = (required(int(row, 0)?)?, required(int(row, 3)?)?);
            if now_ms == GRANTED {
                return Ok(required(granted(row)?)?);
            }
            let mine = text(row, 1)? == Some(self.lock_id.as_str());
            if !mine && is_live(expires_at_ms, now_ms, TIME_TOLERANCE_MS) {
                return Ok(Round::Locked);
            }
        }
        self.careful_message(session, at)
    }

    /// The whole decision in one message.
    fn careful_message(&self, session: &mut Session<'_>, at: &ResolvedTables) -> Result<Round, Failure> {
        let (grants, args) = self.grants(session, at)?;
        let message = Message::new()
            .raw(session.prelude())
            .call(&at.statements.queue, &[Arg::Text(&self.storage_key)])
            .call(grants.acquire, &args);
        let answers = match session.commit(&message) {
            Err(failure) if is_all_or_nothing(&failure) => {
                return explain_unwritten_row(session, at, &self.storage_key);
            }
            other => other?,
        };
        let row = required(answers.row(0)?)?;
        if let Some(granted) = granted(row)? {
            return Ok(granted);
        }
        match (required(int(row, 4)?)?, required(int(row, 5)?)?) {
            (_, mine) if mine > 0 => Ok(Round::AlreadyOurs),
            // The key was free; only the counter was not raised.
            (ok, _) if ok > 0 => Err(explain_unraised_counter(session, at, &self.fence_key)),
            _ => Ok(Round::Locked),
        }
    }

    /// Two messages: read, check the token, write.
    fn two_messages(&self, session: &mut Session<'_>, at: &ResolvedTables) -> Result<Round, Failure> {
        let (statements, (grants, _)) = (&at.statements, self.grants(session, at)?);
        let (key, fence_key, lock_id) =
            (Arg::Text(&self.storage_key), Arg::Text(&self.fence_key), Arg::Text(self.lock_id.as_str()));
        let mut read = Message::new().raw(session.prelude_between()).call(&statements.queue, &[key]);
        if let Some(turn) = self.turn {
            let args = turn.ahead_args(&self.storage_key, self.lock_id.as_str());
            read = read.call(&ticket::statements(at)?.ahead, &args);
        }
        let read =
            read.call(&statements.hold, &[key, fence_key, lock_id]).call(&statements.view, &[key, fence_key]);
        let answers = session.begin(&read)?;
        let state = KeyState::read(&answers)?;
        let ahead = match self.turn {
            Some(_) => required(int(required(answers.row(2)?)?, 0)?)?,
            None => 0,
        };
        session.check_cancel()?;
        let mut write = Message::new();
        if let Some(turn) = self.turn {
            write = write.call(&ticket::statements(at)?.hand_over, &turn.over_args(&self.storage_key));
        }
        let write = match decide(&state, self.lock_id.as_str()) {
            Step::Grant if ahead > 0 => return Ok(Round::Locked),
            Step::Locked => return Ok(Round::Locked),
            Step::Exhausted => return Err(fence_exhausted().into()),
            Step::Confirm => write.call(&statements.confirm, &[key, lock_id]),
            Step::Grant => write.call(grants.grant, &notes::with_label(&self.grant_args(), self.label)),
        };
        match session.commit(&write.raw("COMMIT")) {
            Ok(answers) => {
                let granted = answers.row(1)?.map(granted).transpose()?.flatten();
                Ok(granted.ok_or_else(swallowed)?)
            }
            Err(failure) if is_all_or_nothing(&failure) => {
                session.rollback();
                explain_unwritten_row(session, at, &self.storage_key)
            }
            Err(failure) => Err(failure),
        }
    }
}

/// The counter could be raised and the row not be written. That is contention if another session has
/// written the row since the look, without the queue; else something swallows the write.
pub(super) fn explain_unwritten_row(
    session: &mut Session<'_>,
    at: &ResolvedTables,
    storage_key: &str,
) -> Result<Round, Failure> {
    let answers = session.ask_one(&at.statements.look, &[Arg::Text(storage_key)])?;
    if let Some(row) = answers.row(0)? {
        let (expires_at_ms, now_ms) = (required(int(row, 0)?)?, required(int(row, 1)?)?);
        if is_live(expires_at_ms, now_ms, TIME_TOLERANCE_MS) {
            return Ok(Round::Locked);
        }
    }
    Err(swallowed().into())
}

/// What the read of an acquire found, all locks held.
#[derive(Clone, Debug)]
struct KeyState {
    row: Option<StoredRow>,
    row_locked: bool,
    counter: Option<i64>,
    counter_locked: bool,
    now_ms: i64,
}

#[derive(Clone, Debug)]
struct StoredRow {
    lock_id: String,
    expires_at_ms: i64,
}

impl KeyState {
    fn read(answers: &Answers) -> Result<Self> {
        let (held, view) = (required(answers.row(1)?)?, required(answers.row(0)?)?);
        let row = match (text(view, 0)?, int(view, 1)?) {
            (Some(lock_id), Some(expires_at_ms)) => {
                Some(StoredRow { lock_id: lock_id.to_owned(), expires_at_ms })
            }
            _ => None,
        };
        Ok(Self {
            row,
            row_locked: required(int(held, 0)?)? > 0,
            counter: int(view, 2)?,
            counter_locked: required(int(held, 1)?)? > 0,
            now_ms: required(int(view, 3)?)?,
        })
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Step {
    Locked,
    Grant,
    Confirm,
    Exhausted,
}

/// The decision. A row or a counter that is there but not locked by us belongs to a session that is
/// just working on it: contention, whatever it says.
fn decide(state: &KeyState, lock_id: &str) -> Step {
    if let Some(row) = &state.row {
        if !state.row_locked {
            return Step::Locked;
        }
        // A dead row is a free key even if it carries our id: its grant is over.
        if is_live(row.expires_at_ms, state.now_ms, TIME_TOLERANCE_MS) {
            return if row.lock_id == lock_id { Step::Confirm } else { Step::Locked };
        }
    }
    match state.counter {
        Some(_) if !state.counter_locked => Step::Locked,
        Some(counter) if !may_be_raised(counter) => Step::Exhausted,
        _ => Step::Grant,
    }
}

/// The error after a lost answer. A message that has reached the server may wait there for as long as its
/// limits allow: `grace`.
pub(super) fn outcome_unknown(
    failure: Failure,
    cancel: &CancelToken,
    grace: Duration,
    ttl: Ttl,
) -> LockError {
    let error = if cancel.is_cancelled() { LockError::aborted() } else { failure.into_error() };
    error.with_unknown_outcome(grace + ttl.get() + TOLERANCE)
}

/// The grant in a statement's answer `(expiry, fence, version, …)`.
pub(super) fn granted(row: &Row) -> Result<Option<Round>> {
    let (Some(expires_at_ms), Some(fence)) = (int(row, 0)?, text(row, 1)?) else { return Ok(None) };
    Ok(Some(Round::Granted { expires_at_ms, fence: fence_of(fence)?, version: version(row, 2)? }))
}

/// The fence of a grant, as its row has it.
pub(super) fn fence_of(text: &str) -> Result<Fence> {
    let fence: Fence = text.parse().map_err(|error| malformed().with_source(error))?;
    if fence.get() > FENCE_MAX { Err(fence_exhausted()) } else { Ok(fence) }
}

/// Why a counter was not raised: it is at its limit, or something swallows the change.
pub(crate) fn explain_unraised_counter(
    session: &mut Session<'_>,
    at: &ResolvedTables,
    fence_key: &str,
) -> Failure {
    match counter_is_exhausted(session, at, fence_key) {
        Ok(true) => fence_exhausted().into(),
        Ok(false) => swallowed().into(),
        Err(failure) => failure,
    }
}

/// Whether the counter is there and may not be raised. One that was set to NULL by hand is.
pub(super) fn counter_is_exhausted(
    session: &mut Session<'_>,
    at: &ResolvedTables,
    fence_key: &str,
) -> Result<bool, Failure> {
    let mut key = String::new();
    push_quoted(fence_key, &mut key)?;
    let fences = &at.tables.fences;
    let query = format!("SELECT c.fence FROM {fences} AS c WHERE c.fence_key {EQ} {key}");
    let answers = session.ask(&Message::new().raw(session.limits()).raw(query))?;
    Ok(match answers.row(0)? {
        None => false,
        Some(row) => !int(row, 0)?.is_some_and(may_be_raised),
    })
}

/// As numbers: a sixteenth digit would sort wrongly as text.
fn may_be_raised(counter: i64) -> bool {
    u64::try_from(counter).is_ok_and(|counter| counter < FENCE_MAX)
}

/// The refusal of a counter that may not be raised any more.
pub(super) fn fence_exhausted() -> LockError {
    Fence::following(FENCE_MAX).err().unwrap_or_else(malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> KeyState {
        KeyState { row: None, row_locked: false, counter: None, counter_locked: false, now_ms: 1_000_000 }
    }

    fn row(lock_id: &str, expires_at_ms: i64) -> StoredRow {
        StoredRow { lock_id: lock_id.into(), expires_at_ms }
    }

    #[test]
    fn a_free_key_is_granted() {
        assert_eq!(decide(&state(), "me"), Step::Grant);
        let counted = KeyState { counter: Some(7), counter_locked: true, ..state() };
        assert_eq!(decide(&counted, "me"), Step::Grant);
    }

    #[test]
    fn a_row_is_judged_with_the_tolerance_and_only_when_locked() {
        for (expires, locked, step) in [
            (1_000_000 - TIME_TOLERANCE_MS + 1, true, Step::Locked),
            (1_000_000 - TIME_TOLERANCE_MS, true, Step::Grant),
            (1_000_000 - TIME_TOLERANCE_MS, false, Step::Locked),
            (2_000_000, true, Step::Locked),
        ] {
            let state = KeyState { row: Some(row("other", expires)), row_locked: locked, ..state() };
            assert_eq!(decide(&state, "me"), step, "{expires} {locked}");
        }
    }

    #[test]
    fn our_own_row_is_confirmed_while_it_lives() {
        for (expires, step) in [(2_000_000, Step::Confirm), (0, Step::Grant)] {
            let state = KeyState { row: Some(row("me", expires)), row_locked: true, ..state() };
            assert_eq!(decide(&state, "me"), step);
        }
    }

    #[test]
    fn a_busy_counter_is_contention_and_a_full_one_is_the_end() {
        let busy = KeyState { counter: Some(7), counter_locked: false, ..state() };
        assert_eq!(decide(&busy, "me"), Step::Locked);
        let limit = i64::try_from(FENCE_MAX).unwrap();
        for (counter, step) in [
            (0, Step::Grant),
            (limit - 1, Step::Grant),
            (limit, Step::Exhausted),
            (i64::MAX, Step::Exhausted),
            (-1, Step::Exhausted),
        ] {
            let full = KeyState { counter: Some(counter), counter_locked: true, ..state() };
            assert_eq!(decide(&full, "me"), step);
        }
    }
}
