//! Extending a guard's leases at its holder's wish.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{ExtendResult, LockBackend, RenewOutcome, Renewal, Version};
use crate::error::{ErrorCode, LockError, Result};
use crate::lock::backend_call::change;
use crate::lock::engine::Engine;
use crate::lock::lease::Outcome;
use crate::lock::registry::GuardState;
use crate::model::time::Moment;

/// A lease, the number of its operation and the version that this replaces.
type Flight<'a> = (&'a Arc<GuardState>, u32, Option<Version>);

/// Sets the end of all these leases of one guard to now plus `ttl`: `Extended` with the earliest end if
/// each was, `NotHeld` if one is lost.
pub(super) fn extend(engine: &Engine, states: &[&Arc<GuardState>], ttl: Duration) -> Result<ExtendResult> {
    let sent = engine.clock.now();
    let mut flights: Vec<Flight<'_>> = Vec::with_capacity(states.len());
    for state in states {
        engine.registry.tick(state, sent);
        let mut lease = state.lease.lock();
        let Some(id) = lease.begin_extend(sent, ttl) else { break };
        // A shorter ttl may be in force from now on.
        engine.registry.schedule(state, &lease);
        flights.push((state, id, lease.version()));
    }
    if flights.len() < states.len() {
        // One is lost: nothing is sent for the others.
        for (state, id, _) in flights {
            engine.registry.finish(state, id, engine.clock.now(), Outcome::Refused);
        }
        return Ok(ExtendResult::NotHeld);
    }
    let answers = ask(engine, &flights, ttl);
    let now = engine.clock.now();
    for ((state, id, _), answer) in flights.iter().zip(&answers) {
        engine.registry.finish(state, *id, now, outcome(answer));
    }
    let mut end = i64::MAX;
    let mut lost = false;
    for ((state, ..), answer) in flights.iter().zip(answers) {
        let in_context = |error: LockError| error.with_key(&*state.key).with_lock_id(&*state.lock_id);
        match answer {
            // An answer that came after the deadline came too late: the lease is lost.
            Ok(RenewOutcome::Renewed { expires_at_ms, .. }) => {
                end = end.min(expires_at_ms);
                engine.registry.tick(state, now);
                lost |= !state.lease.lock().is_held(engine.clock.now());
            }
            Ok(RenewOutcome::Lost(_)) => lost = true,
            Ok(RenewOutcome::Busy) => {
                return Err(in_context(
                    LockError::new(ErrorCode::ServiceUnavailable)
                        .with_message("the lease's row was busy and nothing was changed: try again"),
                ));
            }
            Err(error) => return Err(in_context(error)),
        }
    }
    Ok(if lost { ExtendResult::NotHeld } else { ExtendResult::Extended { expires_at_ms: end } })
}

fn outcome(answer: &Result<RenewOutcome>) -> Outcome {
    match answer {
        Ok(RenewOutcome::Renewed { expires_at_ms, version }) => {
            Outcome::Confirmed { expires_at_ms: *expires_at_ms, version: *version }
        }
        Ok(RenewOutcome::Lost(reason)) => Outcome::Gone(*reason),
        Ok(RenewOutcome::Busy) => Outcome::Busy,
        Err(error) if error.is_outcome_unknown() => Outcome::Unknown,
        Err(_) => Outcome::Refused,
    }
}

/// One answer per lease. Several are renewed in one batch; a row that was busy then is waited for.
fn ask(engine: &Engine, flights: &[Flight<'_>], ttl: Duration) -> Vec<Result<RenewOutcome>> {
    let deadline = engine.call_deadline(Moment::NEVER);
    let renewals: Vec<Renewal<'_>> =
        flights.iter().map(|(state, _, version)| state.renewal(*version, ttl)).collect();
    let alone = |renewal: &Renewal<'_>| change(ttl, || engine.backend.prolong(renewal, deadline));
    if let [renewal] = renewals.as_slice() {
        return vec![alone(renewal)];
    }
    let batch = change(ttl, || Ok(engine.backend.renew(&renewals, deadline)));
    let mut answers = match batch {
        Ok(answers) => answers.into_iter(),
        Err(error) => vec![Err(error)].into_iter(),
    };
    renewals
        .iter()
        .map(|renewal| match answers.next() {
            Some(Ok(RenewOutcome::Busy)) => alone(renewal),
            Some(answer) => answer,
            // A missing answer says as little as an error does.
            None => Err(LockError::new(ErrorCode::Internal)
                .with_message("the backend gave no answer for this lease")
                .with_unknown_outcome(ttl)),
        })
        .collect()
}
