//! Runs, once per slot: begin, and the ways to mark a slot as done.
//!
//! 1. A begin is an acquire that looks at the mark: before the grant in its own statement, and after it in
//!    one more of the same message, with a newer snapshot. If the mark has come meanwhile, the message fails
//!    as a whole, and the next look sees it.
//! 2. After a lost answer it is asked for again under the same id. A row of ours is confirmed, by a
//!    statement that writes, with the slot of its grant.
//! 3. The slot is that of the clock that the grant was made by, which its row keeps as `acquired_at_ms`.
//! 4. Finish and claim name lease and fence, and are durable; asked again they find what they have done.

use std::time::{Duration, Instant};

use crate::backend::{BeginOutcome, BeginRun, BegunRun, MarkOutcome, MarkRun, MarkStep};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::acquire::{Acquire, explain_unraised_counter};
use crate::leases::backend::PostgresBackend;
use crate::leases::note_sql::NoteStatements;
use crate::leases::notes;
use crate::leases::once_sql::{self, RunStatements};
use crate::leases::refusals::{cannot_notify, is_all_or_nothing, swallowed};
use crate::leases::setup::ResolvedTables;
use crate::leases::sql;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::model::lock_id::LockId;
use crate::model::time::Ttl;
use crate::pg::Failure;
use crate::pg::answers::{Answers, int, malformed, required};
use crate::pg::session::Session;
use crate::pg::statement::{Arg, Message, Statement};

/// How often a begin looks anew because something was written between its look and its grant.
const LOOKS: u32 = 3;

pub(crate) fn begin(
    backend: &PostgresBackend,
    begin: &BeginRun<'_>,
    end: Instant,
    cancel: &CancelToken,
) -> Result<BeginOutcome> {
    begin.slot.check()?;
    let (key, ttl) = (Key::new(begin.attempt.key)?, Ttl::new(begin.attempt.ttl)?);
    let lock_id = LockId::parse(begin.attempt.lock_id)?;
    let call = BeginCall {
        acquire: Acquire::new(&key, &lock_id, ttl)?.labelled(begin.attempt.label),
        mark: key.mark(begin.slot.mark_suffix(), BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?,
        run: begin,
        two_messages: !cancel.is_never(),
    };
    let label = begin.attempt.label;
    backend.need_notes(label, end, cancel).map_err(|error| call.acquire.in_context(error))?;
    let outcome = backend.run_until_known(end, cancel, |session, at| {
        session.prepare(&at.runs().all())?;
        call.ask(session, at)
    });
    match outcome {
        Ok((outcome, _)) => Ok(outcome),
        Err(failure) => Err(call.acquire.failed(backend, failure, cancel)),
    }
}

struct BeginCall<'a> {
    acquire: Acquire<'a>,
    /// The mark's stored key.
    mark: String,
    run: &'a BeginRun<'a>,
    /// With a token the queue is waited for in a message that it can end.
    two_messages: bool,
}

impl BeginCall<'_> {
    fn ask(&self, session: &mut Session<'_>, at: &ResolvedTables) -> Result<BeginOutcome, Failure> {
        for _ in 0..LOOKS {
            match self.look_and_grant(session, at) {
                // The slot is done by now, or another has written the row without the queue.
                Err(failure) if is_all_or_nothing(&failure) => session.rollback(),
                outcome => return outcome,
            }
        }
        if self.own_slot_is_done(session, at)? {
            return Ok(BeginOutcome::AlreadyDone);
        }
        Err(swallowed().into())
    }

    /// Whether an earlier copy of this begin was granted, and its slot has been marked since: under a row of
    /// ours the second look at the mark fails each time.
    fn own_slot_is_done(&self, session: &mut Session<'_>, at: &ResolvedTables) -> Result<bool, Failure> {
        let [key, _, _, lock_id, _] = self.acquire.grant_args();
        let answers = session.ask_one(&at.statements.by_id, &[lock_id])?;
        let Some(row) = answers.row(0)? else { return Ok(false) };
        let granted_at = required(int(row, 3)?)?;
        let answers = session.ask_one(&at.statements.view, &[key, Arg::Text(&self.mark)])?;
        let mark = int(required(answers.row(0)?)?, 2)?.and_then(|mark| u64::try_from(mark).ok());
        Ok(mark.is_some_and(|mark| mark >= self.run.slot.at(granted_at)))
    }

    fn look_and_grant(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
    ) -> Result<BeginOutcome, Failure> {
        let [key, fence_key, user_key, lock_id, ttl] = self.acquire.grant_args();
        let (mark, [period, number]) = (Arg::Text(&self.mark), self.slot_args()?);
        let args = [key, fence_key, user_key, lock_id, ttl, mark, period, number];
        let label = self.run.attempt.label;
        let noted = notes::granting(session, at, label, NoteStatements::runs)?;
        let begin = noted.map_or(&at.runs().begin, |noted| &noted.begin_run);
        let answers = self.behind_the_queue(session, at, begin, &notes::with_label(&args, label))?;
        let row = required(answers.row(1)?)?;
        let last = int(row, 7)?.and_then(|mark| u64::try_from(mark).ok());
        if let Some(grant) = self.acquire.grant_in(row)? {
            let slot = self.run.slot.at(required(int(row, 6)?)?);
            return Ok(BeginOutcome::Begun(BegunRun { grant, slot, last }));
        }
        let now = required(int(row, 8)?)?;
        if last.is_some_and(|last| last >= self.run.slot.at(now)) {
            self.run.slot.warn_of_the_future(self.run.attempt.key, last, now);
            return Ok(BeginOutcome::AlreadyDone);
        }
        match (required(int(row, 4)?)?, required(int(row, 5)?)?) {
            (_, 1..) => self.confirm(session, at, last),
            // All was well but the counter.
            (1.., _) => Err(explain_unraised_counter(session, at, self.acquire.fence_key())),
            _ => Ok(BeginOutcome::Running),
        }
    }

    /// The grant of an earlier copy of this begin.
    fn confirm(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        last: Option<u64>,
    ) -> Result<BeginOutcome, Failure> {
        let [key, _, _, lock_id, _] = self.acquire.grant_args();
        let answers = self.behind_the_queue(session, at, &at.runs().confirm, &[key, lock_id])?;
        let Some(row) = answers.row(1)? else {
            // Its time is over before anybody was told of it.
            return Ok(BeginOutcome::Running);
        };
        let grant = required(self.acquire.grant_in(row)?)?;
        let slot = self.run.slot.at(required(int(row, 3)?)?);
        Ok(BeginOutcome::Begun(BegunRun { grant, slot, last }))
    }

    /// One transaction: the queue, the statement, and another look at the mark. The statement's answer is the
    /// last but one.
    fn behind_the_queue(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        statement: &Statement,
        args: &[Arg<'_>],
    ) -> Result<Answers, Failure> {
        let [key, _, _, lock_id, _] = self.acquire.grant_args();
        let [period, number] = self.slot_args()?;
        let look = [lock_id, Arg::Text(&self.mark), period, number];
        if self.two_messages {
            session
                .begin(&Message::new().raw(session.prelude_between()).call(&at.statements.queue, &[key]))?;
            session.check_cancel()?;
            let write = Message::new().call(statement, args).call(&at.runs().again, &look).raw("COMMIT");
            return Ok(session.commit(&write)?.without_last());
        }
        let message = Message::new()
            .raw(session.prelude())
            .call(&at.statements.queue, &[key])
            .call(statement, args)
            .call(&at.runs().again, &look);
        session.commit(&message)
    }

    fn slot_args(&self) -> Result<[Arg<'static>; 2]> {
        let number = |number: u64| i64::try_from(number).map(Arg::Int).map_err(|_| malformed());
        Ok(match self.run.slot.period_ms() {
            Some(period) => [number(period)?, Arg::Int(0)],
            None => [Arg::Int(0), number(self.run.slot.at(0))?],
        })
    }
}

/// What one call found and did.
struct Marked {
    written: bool,
    /// The row of the lease, under the run's fence.
    has_row: bool,
    is_done: bool,
}

pub(crate) fn mark(
    backend: &PostgresBackend,
    run: &MarkRun<'_>,
    step: MarkStep,
    end: Instant,
) -> Result<MarkOutcome> {
    let call = MarkCall::new(run)?;
    let never = CancelToken::never();
    let outcome = backend.run_until_known(end, &never, |session, at| {
        session.prepare(&at.runs().all())?;
        match step {
            MarkStep::Claim => call.claim(session, at),
            MarkStep::Finish => call.finish(session, at),
            MarkStep::Verify => call.verify(session, at),
        }
    });
    match outcome {
        Ok((Marked { written: true, .. }, _)) => Ok(MarkOutcome::Marked),
        Ok((Marked { has_row: false, is_done: true, .. }, Some(_first))) if step != MarkStep::Claim => {
            Ok(MarkOutcome::Found)
        }
        Ok(_) => Ok(MarkOutcome::NotMarked),
        Err(failure) if failure.is_in_doubt() => {
            Err(failure.into_error().with_unknown_outcome(Duration::MAX))
        }
        Err(failure) => Err(failure.into_error()),
    }
    .map_err(|error| error.with_key(run.key).with_lock_id(run.lock_id))
}

/// The statements that mark the slot in a caller's transaction.
pub(crate) fn completion(backend: &PostgresBackend, run: &MarkRun<'_>) -> Result<String> {
    let call = MarkCall::new(run)?;
    let (storage_key, fence_key) = call.key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
    let at = backend.find_tables(backend.database.end(), &CancelToken::never())?;
    let fenced = sql::fenced(&at.tables, &storage_key, &fence_key, run.fence, Some(&call.lock_id))?;
    let complete = once_sql::complete(&at.tables, (&call.mark, call.key.as_str()), run.number)?;
    Ok(format!("{fenced};{complete}"))
}

struct MarkCall {
    key: Key,
    lock_id: LockId,
    fence: String,
    mark: String,
    slot: i64,
}

impl MarkCall {
    fn new(run: &MarkRun<'_>) -> Result<Self> {
        run.slot.check()?;
        let key = Key::new(run.key)?;
        let mark = key.mark(run.slot.mark_suffix(), BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
        let slot =
            i64::try_from(run.number).map_err(|_| LockError::invalid("the number of a slot is too large"))?;
        Ok(Self { key, lock_id: LockId::parse(run.lock_id)?, fence: run.fence.to_string(), mark, slot })
    }

    fn args(&self) -> [Arg<'_>; 5] {
        [
            Arg::Text(self.lock_id.as_str()),
            Arg::Text(&self.fence),
            Arg::Text(&self.mark),
            Arg::Int(self.slot),
            Arg::Text(self.key.as_str()),
        ]
    }

    fn claim(&self, session: &mut Session<'_>, at: &ResolvedTables) -> Result<Marked, Failure> {
        let answers = session.commit_one(&at.runs().claim, &self.args())?;
        self.written(&answers, |mark| mark <= self.slot)
    }

    fn finish(&self, session: &mut Session<'_>, at: &ResolvedTables) -> Result<Marked, Failure> {
        let answers = notes::ending(session, at, NoteStatements::runs, |session, noted| {
            let finish = noted.map_or(&at.runs().finish, |noted| &noted.finish);
            ended(session, at, finish, || once_sql::finish(&at.tables, false, ""), &self.args())
        });
        match answers {
            Err(failure) if is_all_or_nothing(&failure) => Err(swallowed().into()),
            answers => self.written(&answers?, |mark| mark < self.slot),
        }
    }

    fn verify(&self, session: &mut Session<'_>, at: &ResolvedTables) -> Result<Marked, Failure> {
        let [lock_id, fence, mark, slot, _] = self.args();
        let args = [lock_id, fence, mark, slot];
        let answers = notes::ending(session, at, NoteStatements::runs, |session, noted| {
            let verify = noted.map_or(&at.runs().verify, |noted| &noted.verify);
            ended(session, at, verify, || once_sql::verify(&at.tables, false, ""), &args)
        })?;
        let row = required(answers.row(0)?)?;
        Ok(Marked {
            has_row: required(int(row, 0)?)? > 0,
            written: required(int(row, 1)?)? > 0,
            is_done: required(int(row, 2)?)? > 0,
        })
    }

    /// The answer to claim and finish. A mark that was there to be written, and was not, was swallowed.
    fn written(&self, answers: &Answers, may_be_written: impl Fn(i64) -> bool) -> Result<Marked, Failure> {
        let row = required(answers.row(0)?)?;
        let mark = int(row, 3)?;
        let (written, lives) = (required(int(row, 1)?)? > 0, required(int(row, 2)?)? > 0);
        if lives && !written && mark.is_none_or(may_be_written) {
            return Err(swallowed().into());
        }
        let has_row = required(int(row, 0)?)? > 0;
        Ok(Marked { written, has_row, is_done: mark.is_some_and(|mark| mark >= self.slot) })
    }
}

/// Carries out what ends a lease, without calling its waiters where that fails.
fn ended(
    session: &mut Session<'_>,
    at: &ResolvedTables,
    statement: &Statement,
    quiet: impl Fn() -> Statement,
    args: &[Arg<'_>],
) -> Result<Answers, Failure> {
    match session.commit_one(statement, args) {
        Err(failure) if at.notifies && cannot_notify(&failure) => {
            session.commit(&Message::new().raw(session.prelude()).plain(&quiet(), args)?)
        }
        answers => answers,
    }
}

impl ResolvedTables {
    fn runs(&self) -> &RunStatements {
        self.runs.get_or_init(|| RunStatements::new(&self.tables, self.notifies))
    }
}
