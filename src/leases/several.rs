//! Several keys at once: all or none, and nothing is held while another is waited for (`docs/adr/0037`).
//!
//! The fast statement grants where no row stands for any key and nobody queues, in one round trip.
//! Otherwise the careful message queues for all keys, locks the rows that are over, and decides. What
//! a single acquire does after a lost answer is done here for all keys: they are asked for again
//! under the same ids, with the careful message. All of them: confirmed. A part: the others were lost
//! meanwhile, so the rest is released, and the set is not ours.

use std::time::{Duration, Instant};

use crate::backend::{
    Acquired, AttemptAll, Grant, GrantAll, Holder, Label, Reason, ReleaseOutcome, Version, check_set,
};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::leases::acquire::{GRANTED, counter_is_exhausted, fence_exhausted, fence_of};
use crate::leases::backend::PostgresBackend;
use crate::leases::note_sql::NoteStatements;
use crate::leases::notes;
use crate::leases::refusals::{cannot_notify, is_all_or_nothing, swallowed};
use crate::leases::setup::ResolvedTables;
use crate::leases::several_sql::{Fenced, fenced};
use crate::model::fence::Fence;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::model::lock_id::{LockId, validate_lock_id};
use crate::model::time::{TIME_TOLERANCE_MS, TOLERANCE, Ttl, is_live};
use crate::pg::Failure;
use crate::pg::answers::{Answers, Row, flag, int, malformed, required, text, version};
use crate::pg::session::Session;
use crate::pg::statement::{Arg, Message};

/// One key of a set.
struct Wanted<'a> {
    key: Key,
    storage_key: String,
    fence_key: String,
    lock_id: &'a str,
    /// Its place in the attempt.
    index: usize,
}

/// One acquire of several keys, with everything chosen.
pub(crate) struct AcquireAll<'a> {
    /// Sorted by the bytes of the storage key: the order of every statement.
    wanted: Vec<Wanted<'a>>,
    ttl: Ttl,
    label: Label<'a>,
}

/// The arguments of the statements, by column.
struct Columns<'a> {
    keys: Vec<&'a str>,
    fence_keys: Vec<&'a str>,
    user_keys: Vec<&'a str>,
    lock_ids: Vec<&'a str>,
    ttl: i64,
    label: Label<'a>,
}

impl Columns<'_> {
    fn grant(&self) -> Vec<Arg<'_>> {
        let plain = [
            Arg::Texts(&self.keys),
            Arg::Texts(&self.fence_keys),
            Arg::Texts(&self.user_keys),
            Arg::Texts(&self.lock_ids),
            Arg::Int(self.ttl),
        ];
        notes::with_label(&plain, self.label)
    }

    fn ids(&self) -> [Arg<'_>; 2] {
        [Arg::Texts(&self.keys), Arg::Texts(&self.lock_ids)]
    }
}

type Granted = (i64, Fence, Version);

/// What one round of the protocol found. Places count from 0, in the order of the statements.
enum Round {
    /// One per place.
    Granted(Vec<Granted>),
    Held(usize, Holder),
    /// Rows carry our ids already: an earlier copy of this attempt was granted.
    Mine,
}

impl<'a> AcquireAll<'a> {
    pub(crate) fn new(attempt: &AttemptAll<'a>) -> Result<Self> {
        check_set(attempt.leases)?;
        let ttl = Ttl::new(attempt.ttl)?;
        let mut wanted = Vec::with_capacity(attempt.leases.len());
        for (index, (key, lock_id)) in attempt.leases.iter().enumerate() {
            let key = Key::new(key)?;
            validate_lock_id(lock_id)?;
            let (storage_key, fence_key) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
            wanted.push(Wanted { key, storage_key, fence_key, lock_id, index });
        }
        wanted.sort_by(|a, b| a.storage_key.cmp(&b.storage_key));
        if wanted.windows(2).any(|pair| matches!(pair, [a, b] if a.storage_key == b.storage_key)) {
            return Err(LockError::invalid(
                "two of the keys are the same in Unicode's normal form: name it once",
            ));
        }
        Ok(Self { wanted, ttl, label: attempt.label })
    }

    pub(crate) fn run(
        &self,
        backend: &PostgresBackend,
        end: Instant,
        cancel: &CancelToken,
    ) -> Result<GrantAll> {
        backend.need_notes(self.label, end, cancel)?;
        let columns = self.columns();
        let mut lost = false;
        let round = backend.run_until_known(end, cancel, |session, at| {
            session.prepare(&at.set_statements.all())?;
            let round = if cancel.is_never() && !lost {
                self.fast(session, at, &columns)
            } else {
                self.careful(session, at, &columns, cancel)
            };
            lost |= round.as_ref().is_err_and(Failure::is_in_doubt);
            match round? {
                Round::Mine => self.confirm(session, at, &columns).inspect_err(|_| lost = true),
                round => Ok(round),
            }
        });
        match round {
            Ok((round, _)) => self.answer(round),
            Err(failure) if failure.is_in_doubt() => {
                let error = if cancel.is_cancelled() { LockError::aborted() } else { failure.into_error() };
                // A message that has reached the server may wait there for as long as its limits allow.
                let grace = backend.database.operation_timeout();
                Err(error.with_unknown_outcome(grace + self.ttl.get() + TOLERANCE))
            }
            Err(failure) => Err(failure.into_error()),
        }
    }

    fn columns(&self) -> Columns<'_> {
        Columns {
            keys: self.wanted.iter().map(|want| want.storage_key.as_str()).collect(),
            fence_keys: self.wanted.iter().map(|want| want.fence_key.as_str()).collect(),
            user_keys: self.wanted.iter().map(|want| want.key.as_str()).collect(),
            lock_ids: self.wanted.iter().map(|want| want.lock_id).collect(),
            ttl: self.ttl.millis(),
            label: self.label,
        }
    }

    /// The answer in the order of the attempt.
    fn answer(&self, round: Round) -> Result<GrantAll> {
        match round {
            Round::Granted(granted) => {
                let mut grants: Vec<_> = self.wanted.iter().zip(granted).collect();
                grants.sort_by_key(|(want, _)| want.index);
                let grant = |(want, (expires_at_ms, fence, version)): (&Wanted<'_>, Granted)| {
                    fence.warn_near_limit(want.key.as_str());
                    let acquired = Acquired { lock_id: want.lock_id.to_owned(), fence, expires_at_ms };
                    Grant { acquired, version: Some(version) }
                };
                Ok(GrantAll::Granted(grants.into_iter().map(grant).collect()))
            }
            Round::Held(place, holder) => {
                let index = self.wanted.get(place).ok_or_else(malformed)?.index;
                Ok(GrantAll::Held { index, holder })
            }
            Round::Mine => Err(malformed()),
        }
    }

    /// One message, one round trip, unless a key is neither plainly free nor plainly held.
    fn fast(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        columns: &Columns<'_>,
    ) -> Result<Round, Failure> {
        let careful = |session: &mut Session<'_>| self.careful(session, at, columns, &CancelToken::never());
        let noted = notes::granting(session, at, self.label, NoteStatements::sets)?;
        let absent = noted.map_or(&at.set_statements.absent, |noted| &noted.set_absent);
        let answers = match session.commit_one(absent, &columns.grant()) {
            // A row was written since the look, perhaps by an earlier copy of this very attempt.
            Err(failure) if is_all_or_nothing(&failure) => return careful(session),
            other => other?,
        };
        let rows = answers.rows(0)?;
        let mut held = None;
        for row in rows {
            let now_ms = required(int(row, 4)?)?;
            if now_ms == GRANTED {
                return Ok(Round::Granted(required(self.granted(rows)?)?));
            }
            let (place, expires_at_ms) = (self.place(row)?, required(int(row, 1)?)?);
            if self.wanted.get(place).map(|want| want.lock_id) == text(row, 3)? {
                // A part of an earlier copy, which must not stay.
                return careful(session);
            }
            if held.is_none() && is_live(expires_at_ms, now_ms, TIME_TOLERANCE_MS) {
                let fence = text(row, 2)?.and_then(|fence| fence.parse().ok());
                held = Some(Round::Held(place, Holder::until(fence, expires_at_ms, now_ms)));
            }
        }
        held.map_or_else(|| careful(session), Ok)
    }

    /// The whole decision behind the queue: one message, or two with the token checked in between,
    /// where every wait for another session lies in the first.
    fn careful(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        columns: &Columns<'_>,
        cancel: &CancelToken,
    ) -> Result<Round, Failure> {
        let (statements, keys) = (&at.set_statements, [Arg::Texts(&columns.keys)]);
        let noted = notes::granting(session, at, self.label, NoteStatements::sets)?;
        let (grant, args) = (noted.map_or(&statements.grant, |noted| &noted.set_grant), columns.grant());
        let answers = if cancel.is_never() {
            let message = Message::new().raw(session.prelude()).call(&statements.queue, &keys);
            session.commit(&message.call(grant, &args))
        } else {
            let message = Message::new().raw(session.prelude_between()).call(&statements.queue, &keys);
            session.begin(&message.call(&statements.hold, &columns.ids()))?;
            session.check_cancel()?;
            session.commit(&Message::new().call(grant, &args).raw("COMMIT"))
        };
        let answers = match answers {
            Err(failure) if is_all_or_nothing(&failure) => {
                session.rollback();
                return self.unwritten(session, at, columns);
            }
            other => other?,
        };
        let rows = answers.rows(usize::from(!cancel.is_never()))?;
        match self.granted(rows)? {
            Some(granted) => Ok(Round::Granted(granted)),
            None => self.refused(session, at, rows),
        }
    }

    /// What the careful statement says of keys that it did not grant.
    fn refused(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        rows: &[Row],
    ) -> Result<Round, Failure> {
        let (mut mine, mut all_free, mut held, mut busy) = (false, false, None, None);
        for row in rows {
            let place = self.place(row)?;
            // Where another has one of the keys, ours were looked at and not locked.
            mine |= required(int(row, 9)?)? > 0 || flag(row, 8)? == Some(true);
            all_free |= required(int(row, 10)?)? > 0;
            if let (Some(rest_ms), Some(true), Some(false), None) =
                (int(row, 5)?, flag(row, 7)?, flag(row, 8)?, &held)
            {
                let fence = text(row, 6)?.and_then(|fence| fence.parse().ok());
                held = Some(Round::Held(place, Holder::until(fence, rest_ms, 0)));
            }
            if busy.is_none() && !required(flag(row, 11)?)? {
                busy = Some(place);
            }
        }
        match (mine, held, all_free) {
            (true, ..) => Ok(Round::Mine),
            (_, Some(held), _) => Ok(held),
            // All was well but the counters.
            (.., true) => Err(self.unraised(session, at)),
            _ => Ok(Round::Held(busy.unwrap_or(0), Holder::default())),
        }
    }

    /// Counters could be raised and not every row be written. That is contention if somebody has
    /// written one since the look, without the queue; else a counter is at its limit, or something
    /// swallows the write.
    fn unwritten(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        columns: &Columns<'_>,
    ) -> Result<Round, Failure> {
        for (place, key) in columns.keys.iter().enumerate() {
            let answers = session.ask_one(&at.statements.look, &[Arg::Text(key)])?;
            if let Some(row) = answers.row(0)? {
                let (expires_at_ms, now_ms) = (required(int(row, 0)?)?, required(int(row, 1)?)?);
                if is_live(expires_at_ms, now_ms, TIME_TOLERANCE_MS) {
                    return Ok(Round::Held(place, Holder::until(None, expires_at_ms, now_ms)));
                }
            }
        }
        Err(self.unraised(session, at))
    }

    /// Which counter was not raised, and why.
    fn unraised(&self, session: &mut Session<'_>, at: &ResolvedTables) -> Failure {
        for want in &self.wanted {
            match counter_is_exhausted(session, at, &want.fence_key) {
                Ok(true) => return fence_exhausted().into(),
                Ok(false) => {}
                Err(failure) => return failure,
            }
        }
        swallowed().into()
    }

    /// What an earlier copy of this attempt was granted.
    fn confirm(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        columns: &Columns<'_>,
    ) -> Result<Round, Failure> {
        let statements = &at.set_statements;
        let message = Message::new()
            .raw(session.prelude())
            .call(&statements.queue, &[Arg::Texts(&columns.keys)])
            .call(&statements.confirm, &columns.ids());
        let answers = session.commit(&message)?;
        let rows = answers.rows(0)?;
        if let Some(granted) = self.granted(rows)? {
            return Ok(Round::Granted(granted));
        }
        let places = rows.iter().map(|row| self.place(row)).collect::<Result<Vec<_>>>()?;
        let gone = (0..self.wanted.len()).find(|place| !places.contains(place)).unwrap_or(0);
        session.commit_one(&statements.release_quietly, &[Arg::Texts(&columns.lock_ids)])?;
        Ok(Round::Held(gone, Holder::default()))
    }

    fn place(&self, row: &Row) -> Result<usize> {
        let place = usize::try_from(required(int(row, 0)?)?).ok().and_then(|place| place.checked_sub(1));
        place.filter(|place| *place < self.wanted.len()).ok_or_else(malformed)
    }

    /// The grants in `(place, expiry, fence, version, …)`, if there is one for each key.
    fn granted(&self, rows: &[Row]) -> Result<Option<Vec<Granted>>> {
        let mut granted: Vec<Option<Granted>> = self.wanted.iter().map(|_| None).collect();
        for row in rows {
            let (Some(expires_at_ms), Some(fence)) = (int(row, 1)?, text(row, 2)?) else { return Ok(None) };
            if let Some(slot) = granted.get_mut(self.place(row)?) {
                *slot = Some((expires_at_ms, fence_of(fence)?, version(row, 3)?));
            }
        }
        Ok(granted.into_iter().collect())
    }
}

/// Releases several leases, whose ids stand in the order of their keys, in one message.
pub(crate) fn release_all(
    backend: &PostgresBackend,
    lock_ids: &[&str],
    end: Instant,
) -> Result<Vec<ReleaseOutcome>> {
    for lock_id in lock_ids {
        validate_lock_id(lock_id)?;
    }
    if lock_ids.is_empty() {
        return Ok(Vec::new());
    }
    let never = CancelToken::never();
    let outcome = backend.run_until_known(end, &never, |session, at| {
        let plain = &at.set_statements;
        session.prepare(&plain.all())?;
        let ids = [Arg::Texts(lock_ids)];
        let answers = notes::ending(session, at, NoteStatements::sets, |session, noted| {
            let (release, quietly) = match noted {
                None => (&plain.release, &plain.release_quietly),
                Some(noted) => (&noted.set_release, &noted.set_release_quietly),
            };
            match session.commit_one(release, &ids) {
                Err(failure) if at.notifies && cannot_notify(&failure) => session.commit_one(quietly, &ids),
                answers => answers,
            }
        })?;
        Ok(released(&answers, lock_ids.len())?)
    });
    match outcome {
        Ok((outcomes, Some(_first))) if outcomes.iter().any(|one| *one != ReleaseOutcome::Released) => {
            Err(LockError::new(ErrorCode::ServiceUnavailable)
                .with_message("the connection was lost during the release; the leases are over, but whether this release ended them is not known")
                .with_unknown_outcome(Duration::ZERO))
        }
        Ok((outcomes, _)) => Ok(outcomes),
        Err(failure) if failure.is_in_doubt() => Err(failure.into_error().with_unknown_outcome(Duration::MAX)),
        Err(failure) => Err(failure.into_error()),
    }
}

/// The outcome of each lease, from `(place, live, deleted)` of those that were found.
fn released(answers: &Answers, all: usize) -> Result<Vec<ReleaseOutcome>> {
    let mut outcomes = vec![ReleaseOutcome::NotHeld(Some(Reason::NotFound)); all];
    for row in answers.rows(0)? {
        let place = usize::try_from(required(int(row, 0)?)?).map_err(|_| malformed())?;
        let outcome = place.checked_sub(1).and_then(|place| outcomes.get_mut(place)).ok_or_else(malformed)?;
        *outcome = match (required(flag(row, 1)?)?, required(flag(row, 2)?)?) {
            (_, true) => ReleaseOutcome::Released,
            (true, false) => return Err(swallowed()),
            (false, false) => ReleaseOutcome::NotHeld(Some(Reason::Expired)),
        };
    }
    Ok(outcomes)
}

/// The statement that checks several fences in a caller's transaction, in the order of their keys.
pub(crate) fn fence_statement(
    backend: &PostgresBackend,
    leases: &[(&str, Fence, &str)],
    end: Instant,
) -> Result<String> {
    let mut checked = Vec::with_capacity(leases.len());
    for &(key, fence, lock_id) in leases {
        LockId::parse(lock_id)?;
        let (key, fence_key) = Key::new(key)?.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
        checked.push(Fenced { key, fence_key, fence, lock_id });
    }
    checked.sort_by(|a, b| a.key.cmp(&b.key));
    let at = backend.find_tables(end, &CancelToken::never())?;
    fenced(&at.tables, &checked)
}
