//! Renewals of readers' leases: many at once, or one.

use std::time::Instant;

use crate::backend::{LostReason, RenewOutcome, Renewal, Version};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::backend::PostgresBackend;
use crate::leases::members::prepared;
use crate::leases::refusals::{is_all_or_nothing, swallowed};
use crate::leases::setup::ResolvedTables;
use crate::leases::shared_sql::group_id;
use crate::model::fence::Fence;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::model::lock_id::{LockId, validate_lock_id};
use crate::model::time::Ttl;
use crate::pg::Failure;
use crate::pg::answers::{Answers, Row, flag, int, malformed, required, text, version};
use crate::pg::session::Session;
use crate::pg::statement::{Arg, Message};

/// How often a shortening that was outvoted is asked for again.
const SHORTENINGS: u32 = 2;

/// The members of a batch, by column, in the order of their keys.
#[derive(Default)]
struct Batch {
    /// Which of the caller's leases each is.
    places: Vec<usize>,
    keys: Vec<String>,
    ids: Vec<String>,
    ttls: Vec<i64>,
    fences: Vec<String>,
    versions: Vec<String>,
}

fn texts(column: &[String]) -> Vec<&str> {
    column.iter().map(String::as_str).collect()
}

fn number(version: Option<Version>) -> String {
    version.map_or_else(String::new, |version| version.get().to_string())
}

/// Renews readers, on the connection that is kept for it. One that goes alone waits for its rows.
pub(super) fn renew(
    backend: &PostgresBackend,
    leases: &[&Renewal<'_>],
    end: Instant,
) -> Vec<Result<RenewOutcome>> {
    let mut outcomes: Vec<Option<Result<RenewOutcome>>> = leases.iter().map(|_| None).collect();
    let mut sorted: Vec<(String, usize)> = Vec::with_capacity(leases.len());
    for (place, lease) in leases.iter().enumerate() {
        let stored =
            Key::new(lease.key).and_then(|key| key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES));
        match stored
            .and_then(|(key, _)| validate_lock_id(lease.lock_id).and(Ttl::new(lease.ttl)).map(|_| key))
        {
            Ok(key) => sorted.push((key, place)),
            Err(error) => {
                if let Some(outcome) = outcomes.get_mut(place) {
                    *outcome = Some(Err(error));
                }
            }
        }
    }
    sorted.sort_unstable();
    let mut batch = Batch::default();
    for (key, place) in sorted {
        let Some(lease) = leases.get(place) else { continue };
        batch.places.push(place);
        batch.keys.push(key);
        batch.ids.push(lease.lock_id.to_owned());
        batch.ttls.push(Ttl::new(lease.ttl).map_or(0, Ttl::millis));
        batch.fences.push(lease.fence.to_string());
        batch.versions.push(number(lease.version));
    }
    let renewed = batch.renew(backend, end);
    for (at, place) in batch.places.iter().enumerate() {
        let answer = match &renewed {
            Ok(answers) => answers.get(at).copied().flatten().ok_or_else(swallowed),
            Err(failure) => Err(again(failure, leases.get(*place).map(|lease| lease.ttl))),
        };
        if let Some(outcome) = outcomes.get_mut(*place) {
            *outcome = Some(answer);
        }
    }
    outcomes.into_iter().map(|outcome| outcome.unwrap_or(Ok(RenewOutcome::Busy))).collect()
}

/// One error of a batch, for each of its leases.
fn again(failure: &BatchFailure, ttl: Option<std::time::Duration>) -> LockError {
    let error = LockError::new(failure.error.code())
        .with_message(format!("the renewal of the whole batch failed: {}", failure.error));
    match ttl {
        Some(ttl) if failure.unknown => error.with_unknown_outcome(ttl),
        _ => error,
    }
}

struct BatchFailure {
    error: LockError,
    unknown: bool,
}

impl Batch {
    fn renew(
        &self,
        backend: &PostgresBackend,
        end: Instant,
    ) -> Result<Vec<Option<RenewOutcome>>, BatchFailure> {
        if self.ids.is_empty() {
            return Ok(Vec::new());
        }
        let known = |error| BatchFailure { error, unknown: false };
        backend.need_members(end, &CancelToken::never()).map_err(known)?;
        let renewed = backend.run_renewal(end, |session, tables| {
            let answers = self.send(session, tables, false, &CancelToken::never())?;
            let mut outcomes: Vec<Option<RenewOutcome>> = self.ids.iter().map(|_| None).collect();
            let mut shorter = Vec::new();
            for row in answers.rows(0)? {
                let place = usize::try_from(required(int(row, 0)?)?).map_err(|_| malformed())?;
                let at = place.checked_sub(1).ok_or_else(malformed)?;
                let mine = self.fences.get(at).ok_or_else(malformed)?;
                let slot = outcomes.get_mut(at).ok_or_else(malformed)?;
                *slot = Some(outcome(row, mine)?);
                if is_shorter(row)? {
                    shorter.extend(self.keys.get(at));
                }
            }
            for key in shorter {
                trim(session, tables, key);
            }
            Ok(outcomes)
        });
        renewed
            .map_err(|failure| BatchFailure { unknown: failure.is_in_doubt(), error: failure.into_error() })
    }

    fn send(
        &self,
        session: &mut Session<'_>,
        at: &ResolvedTables,
        queued: bool,
        cancel: &CancelToken,
    ) -> Result<Answers, Failure> {
        let statements = prepared(session, at)?;
        let groups: Vec<String> = self.keys.iter().map(|key| group_id(&at.tables, key)).collect();
        let (keys, groups, ids) = (texts(&self.keys), texts(&groups), texts(&self.ids));
        let (fences, versions) = (texts(&self.fences), texts(&self.versions));
        let args = [
            Arg::Texts(&keys),
            Arg::Texts(&groups),
            Arg::Texts(&ids),
            Arg::Ints(&self.ttls),
            Arg::Texts(&fences),
            Arg::Texts(&versions),
        ];
        let renew = if self.ids.len() == 1 { &statements.renew_alone } else { &statements.renew };
        let queue: Vec<Arg<'_>> = keys.first().map(|key| Arg::Text(key)).into_iter().collect();
        let answers = if cancel.is_never() {
            let message = Message::new().raw(session.prelude()).call(&at.statements.durable, &[]);
            let message = if queued { message.call(&at.statements.queue, &queue) } else { message };
            session.commit(&message.call(renew, &args))
        } else {
            let message = Message::new().raw(session.prelude_between()).call(&at.statements.durable, &[]);
            let message = if queued { message.call(&at.statements.queue, &queue) } else { message };
            session.begin(&message)?;
            session.check_cancel()?;
            session.commit(&Message::new().call(renew, &args).raw("COMMIT")).map(Answers::without_last)
        };
        match answers {
            Err(failure) if is_all_or_nothing(&failure) => Err(swallowed().into()),
            answers => answers,
        }
    }
}

/// Moves the end of one member's lease, and asks again where a shortening was outvoted.
pub(super) fn move_end(
    backend: &PostgresBackend,
    (key, fence, lock_id): (&str, Fence, &LockId),
    replaced: Option<Version>,
    ttl: Ttl,
    (end, cancel, queued): (Instant, &CancelToken, bool),
) -> Result<RenewOutcome> {
    let mut batch = Batch {
        places: vec![0],
        keys: vec![key.to_owned()],
        ids: vec![lock_id.as_str().to_owned()],
        ttls: vec![ttl.millis()],
        fences: vec![fence.to_string()],
        versions: vec![number(replaced)],
    };
    let in_context = |error: LockError| error.with_lock_id(lock_id.as_str());
    let mut shortenings = 0;
    loop {
        let answer = backend.run_until_known(end, cancel, |session, at| {
            let answers = batch.send(session, at, queued, cancel)?;
            let row = answers.row(0)?.ok_or_else(swallowed)?;
            let mine = batch.fences.first().ok_or_else(malformed)?;
            let answer = (outcome(row, mine)?, int(row, 3)?);
            if is_shorter(row)? {
                trim(session, at, key);
            }
            Ok(answer)
        });
        let (outcome, asked) = match answer {
            Ok((answer, _)) => answer,
            Err(failure) if failure.is_in_doubt() => {
                return Err(in_context(failure.into_error().with_unknown_outcome(ttl.get())));
            }
            Err(failure) => return Err(in_context(failure.into_error())),
        };
        match outcome {
            RenewOutcome::Renewed { expires_at_ms, version }
                if asked.is_some_and(|asked| expires_at_ms > asked) && shortenings < SHORTENINGS =>
            {
                batch.versions = vec![number(version)];
                shortenings += 1;
            }
            outcome => return Ok(outcome),
        }
    }
}

/// Whether the member was renewed, and was to last much longer before.
fn is_shorter(row: &Row) -> Result<bool> {
    Ok(int(row, 1)?.is_some() && required(flag(row, 8)?)?)
}

/// Lets the group end with its last member. What fails lets it stand for the rest of the time that it had: the lease
/// itself is changed already.
fn trim(session: &mut Session<'_>, at: &ResolvedTables, key: &str) {
    let group = group_id(&at.tables, key);
    let args = [Arg::Text(key), Arg::Text(&group)];
    let trimmed = prepared(session, at).and_then(|statements| {
        let message = Message::new().raw(session.prelude());
        session.commit(&message.call(&statements.hold, &args).call(&statements.trim, &args))
    });
    if let Err(failure) = trimmed {
        log::debug!("the readers' row may last as long as before: {}", failure.into_error().chain());
        session.rollback();
    }
}

/// What became of one member: see [`renew`](crate::leases::shared_sql).
fn outcome(row: &Row, mine: &str) -> Result<RenewOutcome> {
    if let Some(expires_at_ms) = int(row, 1)? {
        return Ok(RenewOutcome::Renewed { expires_at_ms, version: Some(version(row, 2)?) });
    }
    let taken = |fence: &str| -> Result<RenewOutcome> {
        let fence = fence.parse().map_err(|error| malformed().with_source(error))?;
        Ok(RenewOutcome::Lost(LostReason::TakenOver { fence }))
    };
    let (group_locked, member_locked) = (required(flag(row, 4)?)?, required(flag(row, 6)?)?);
    if !group_locked {
        return match (text(row, 9)?, text(row, 10)?) {
            (Some(_), Some(fence)) if fence == mine => Ok(RenewOutcome::Busy),
            (Some(_), Some(fence)) => taken(fence),
            _ => Ok(RenewOutcome::Lost(LostReason::RowMissing)),
        };
    }
    match (text(row, 5)?, text(row, 7)?) {
        (Some(fence), _) | (_, Some(fence)) if fence != mine => taken(fence),
        (_, Some(_)) => Ok(RenewOutcome::Lost(LostReason::Expired)),
        _ if !member_locked && required(flag(row, 11)?)? => Ok(RenewOutcome::Busy),
        _ => Ok(RenewOutcome::Lost(LostReason::RowMissing)),
    }
}
