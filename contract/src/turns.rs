//! Tickets: whoever asks for it is served in order. A backend without them says so in every call.

use std::time::Duration;

use syncguard::backend::{Acquired, Attempt, Grant, Intent, TurnAttempt};
use syncguard::{CancelToken, ErrorCode, Result};

use crate::bench::{Bench, TTL};

const LASTS: Duration = Duration::from_secs(4);

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn ask(
    bench: &Bench<'_>,
    (key, lock_id): (&str, &str),
    ticket: Intent<'_>,
    next: Option<Intent<'_>>,
) -> Result<Option<Grant>> {
    let attempt = Attempt::new(key, lock_id, TTL, bench.deadline());
    bench.backend.grant_in_turn(&TurnAttempt::new(attempt, ticket, next), &CancelToken::never())
}

fn ticket<'a>(key: &'a str, id: &'a str, waited: Duration, priority: i32) -> Intent<'a> {
    Intent::new(key, id, waited, LASTS).with_priority(priority, None)
}

fn is_granted(bench: &Bench<'_>, key: &str, ticket: Intent<'_>) -> bool {
    let granted: Option<Acquired> =
        ask(bench, (key, &Bench::id()), ticket, None).unwrap().map(|grant| grant.acquired);
    granted.is_some_and(|granted| bench.release(&granted.lock_id))
}

fn ahead(bench: &Bench<'_>, ticket: Intent<'_>) -> (bool, u64) {
    let turn = bench.backend.turn(&ticket, bench.deadline(), &CancelToken::never()).unwrap();
    (turn.holder.is_some(), turn.ahead)
}

/// A key that nobody has used; `None` from a backend without tickets.
fn key(bench: &Bench<'_>) -> Option<String> {
    let (key, id) = (Bench::key(), Bench::id());
    let answer = ask(bench, (&key, &id), ticket(&key, &id, secs(0), 0), None);
    match answer {
        Ok(granted) => {
            assert!(bench.release(&granted.expect("the key is free").acquired.lock_id));
            Some(key)
        }
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::InvalidArgument);
            None
        }
    }
}

pub(crate) fn a_live_ticket_that_is_ahead_is_yielded_to(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let (first, second) = (Bench::id(), Bench::id());
    let (older, newer) = (ticket(&key, &first, secs(9), 0), ticket(&key, &second, secs(5), 0));
    bench.backend.announce(&newer, bench.deadline()).unwrap();
    bench.backend.announce(&older, bench.deadline()).unwrap();
    let fresh = Bench::id();
    assert_eq!(ahead(bench, ticket(&key, &fresh, secs(0), 0)), (false, 2));
    assert!(!is_granted(bench, &key, ticket(&key, &fresh, secs(0), 0)), "the first attempt yields");
    assert!(is_granted(bench, &key, ticket(&key, &fresh, secs(0), 1)), "unless it has a greater priority");
    assert!(is_granted(bench, &key, ticket(&key, &fresh, secs(60), 0)), "or has come before");
    assert_eq!((ahead(bench, older).1, ahead(bench, newer).1), (0, 1));
    assert!(!is_granted(bench, &key, newer));
    // What is written counts, whatever is calculated now.
    assert!(!is_granted(bench, &key, ticket(&key, &second, secs(20), 0)));
    let plain = bench.acquire(&key);
    assert_eq!(ahead(bench, newer), (true, 1), "who does not ask waits for nobody");
    assert!(bench.release(&plain.lock_id));
    assert!(is_granted(bench, &key, older));
    assert!(is_granted(bench, &key, newer), "a grant ends its ticket");
    assert_eq!(ahead(bench, ticket(&key, &fresh, secs(0), 0)), (false, 0));
}

pub(crate) fn a_ticket_ends_by_itself_when_it_is_withdrawn_and_when_it_claims_too_much(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let (own, other) = (Bench::id(), Bench::id());
    let fresh = ticket(&key, &own, secs(0), 0);
    let old = ticket(&key, &other, secs(9), 0);
    for lasts in [Duration::ZERO, secs(3600)] {
        bench.backend.announce(&Intent::new(&key, &other, secs(9), lasts), bench.deadline()).unwrap();
        assert_eq!(ahead(bench, fresh), (false, 0), "{lasts:?}");
    }
    bench.backend.announce(&old, bench.deadline()).unwrap();
    assert_eq!(ahead(bench, fresh), (false, 1));
    bench.backend.withdraw(&other, bench.deadline()).unwrap();
    assert!(is_granted(bench, &key, fresh));
}

pub(crate) fn a_ticket_that_is_said_again_becomes_older_and_never_younger(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let (own, other) = (Bench::id(), Bench::id());
    let say = |id: &str, waited_ms| {
        let waited = Duration::from_millis(waited_ms);
        bench.backend.announce(&ticket(&key, id, waited, 0), bench.deadline()).unwrap();
    };
    let is_behind = || ahead(bench, ticket(&key, &own, secs(0), 0)).1 == 1;
    say(&own, 60_000);
    say(&other, 70_000);
    assert!(is_behind());
    // The first message was slow.
    say(&own, 80_000);
    assert!(!is_behind());
    say(&own, 1000);
    assert!(!is_behind());
}

pub(crate) fn nobody_is_behind_its_own_ticket(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let own = Bench::id();
    bench.backend.announce(&ticket(&key, &own, secs(9), 5), bench.deadline()).unwrap();
    let lower = ticket(&key, &own, secs(0), 0);
    assert_eq!(ahead(bench, lower), (false, 0));
    assert!(is_granted(bench, &key, lower));
}

pub(crate) fn a_grant_puts_the_next_one_in_line(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let (own, next, other) = (Bench::id(), Bench::id(), Bench::id());
    let (first, second) = (ticket(&key, &own, secs(9), 0), ticket(&key, &next, secs(5), 0));
    let lock_id = Bench::id();
    let granted = ask(bench, (&key, &lock_id), first, Some(second)).unwrap().expect("nobody is ahead");
    assert!(bench.release(&granted.acquired.lock_id));
    assert!(!is_granted(bench, &key, ticket(&key, &other, secs(3), 0)));
    assert!(is_granted(bench, &key, second));
    assert!(is_granted(bench, &key, ticket(&key, &other, secs(3), 0)));
}

pub(crate) fn the_same_attempt_in_turn_again_answers_with_its_first_grant(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let (own, other, lock_id) = (Bench::id(), Bench::id(), Bench::id());
    let fresh = ticket(&key, &own, secs(0), 0);
    let first = ask(bench, (&key, &lock_id), fresh, None).unwrap().expect("nobody is ahead");
    bench.backend.announce(&ticket(&key, &other, secs(9), 5), bench.deadline()).unwrap();
    let again = ask(bench, (&key, &lock_id), fresh, None).unwrap().expect("it has the key");
    assert_eq!(again.acquired, first.acquired);
    let token = CancelToken::new();
    let attempt = TurnAttempt::new(Attempt::new(&key, &lock_id, TTL, bench.deadline()), fresh, None);
    let again = bench.backend.grant_in_turn(&attempt, &token).unwrap().expect("it has the key");
    assert_eq!(again.acquired, first.acquired);
    assert!(bench.release(&lock_id));
    assert_eq!(bench.backend.grant_in_turn(&attempt, &token).unwrap(), None, "with a token it yields, too");
    token.cancel();
    let error = bench.backend.grant_in_turn(&attempt, &token).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Aborted);
}

pub(crate) fn bad_keys_and_ids_of_tickets_are_refused(bench: &Bench<'_>) {
    let Some(key) = key(bench) else { return };
    let id = Bench::id();
    let fresh = ticket(&key, &id, secs(0), 0);
    for (key, lock_id, ticket, next) in [
        ("", id.as_str(), fresh, None),
        (&key, "short", fresh, None),
        (&key, &id, ticket(&key, "short", secs(0), 0), None),
        (&key, &id, fresh, Some(ticket(&key, "short", secs(0), 0))),
    ] {
        let error = ask(bench, (key, lock_id), ticket, next).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
    }
    assert!(!bench.is_locked(&key));
}
