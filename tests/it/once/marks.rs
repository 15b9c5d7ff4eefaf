//! A mark goes with the end of its own lease, or neither is changed.

use super::*;
use crate::support::{LIMIT, TTL, id};
use syncguard::backend::{
    Attempt, BeginOutcome, BeginRun, Clock, MarkOutcome, MarkRun, MarkStep, generate_lock_id,
};
use syncguard::{Fence, LockBackend as _};

const STEPS: [MarkStep; 2] = [MarkStep::Claim, MarkStep::Finish];

/// Begins slot 5 of this job under this id.
fn begin(place: &Place, job: &str, mine: &str) -> Fence {
    let attempt = Attempt::new(job, mine, TTL, Clock::system().now().after(LIMIT));
    let begin = BeginRun::new(attempt, Slot::number(5));
    let begun = place.client.begin_run(&begin, &CancelToken::new()).unwrap();
    let BeginOutcome::Begun(begun) = begun else { panic!("the job is free") };
    begun.grant.acquired.fence
}

fn ended(place: &Place, job: &str, mine: &str, fence: Fence, step: MarkStep) -> Result<MarkOutcome> {
    let run = MarkRun::new(job, mine, fence, Slot::number(5), 5);
    place.client.mark_run(&run, step, Clock::system().now().after(LIMIT))
}

#[test]
fn neither_a_lease_that_is_over_nor_one_that_was_granted_again_marks_its_slot() {
    for step in STEPS {
        let place = place();
        let over = "expires_at_ms = acquired_at_ms - 5000";
        // A late copy of the begin, after everything was released.
        let again = "fence = '000000000000009'";
        // Another client's, which counts fences elsewhere.
        let other = "lock_id = 'BBBBBBBBBBBBBBBBBBBBBA'";
        for (n, change) in [over, again, other].into_iter().enumerate() {
            let (job, mine) = (place.key(&format!("job {n}")), id(&format!("mine-{n}")));
            let fence = begin(&place, &job, &mine);
            place.stored.run(&format!("UPDATE syncguard_locks SET {change} WHERE lock_id = '{mine}'"));
            let answer = ended(&place, &job, &mine, fence, step).unwrap();
            assert_eq!(answer, MarkOutcome::NotMarked, "{step:?}, {change}");
            assert_eq!(mark(&place, &job, "number"), None, "{step:?}, {change}");
            assert!(place.stored.row(&job).is_some(), "{step:?}, {change}");
        }
    }
}

/// After a late copy of the begin the row under this id is no longer this run's.
#[test]
fn a_verify_ends_no_lease_of_another_grant() {
    let place = place();
    for (change, ends) in [("fence = fence", true), ("fence = '000000000000009'", false)] {
        let (job, mine) = (place.key(&format!("job {ends}")), id(&format!("mine-{ends}")));
        let fence = begin(&place, &job, &mine);
        assert_eq!(ended(&place, &job, &mine, fence, MarkStep::Claim).unwrap(), MarkOutcome::Marked);
        place.stored.run(&format!("UPDATE syncguard_locks SET {change} WHERE lock_id = '{mine}'"));
        let answer = ended(&place, &job, &mine, fence, MarkStep::Verify).unwrap();
        assert_eq!(answer, if ends { MarkOutcome::Marked } else { MarkOutcome::NotMarked }, "{change}");
        assert_eq!(place.stored.row(&job).is_none(), ends, "{change}");
    }
}

#[test]
fn a_finish_of_which_a_trigger_swallows_a_part_changes_nothing() {
    let put_back = "NEW.fence := OLD.fence; RETURN NEW";
    for (table, event, body) in [
        ("syncguard_locks", "DELETE", "RETURN NULL"),
        ("syncguard_fence_counters", "INSERT OR UPDATE", "RETURN NULL"),
        ("syncguard_fence_counters", "UPDATE", put_back),
    ] {
        let place = place();
        let (job, mine) = (place.key("job"), generate_lock_id().unwrap());
        assert_eq!(run_job(&place.client, &job, Slot::number(1)).unwrap(), RunOnce::Done("made"));
        let fence = begin(&place, &job, &mine);
        place.stored.put_in_the_way(&format!("{event} ON {table}"), "", body);
        let error = ended(&place, &job, &mine, fence, MarkStep::Finish).unwrap_err();
        assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Internal, false), "{error:?}");
        assert_eq!(mark(&place, &job, "number"), Some(1), "{table}: {body}");
        assert_eq!(place.stored.row(&job).unwrap().lock_id, mine, "{table}: {body}");
    }
}
