//! At most one leader who trusts its term, and terms that only grow.

use crate::election::{Config, OBSERVED, ORPHAN, RULE, TERM_TWICE, TOO_LONG, UNKNOWN};
use crate::{holds, is_caught};

#[test]
fn terms_and_hand_overs() {
    holds("election: twice each", &RULE);
}

#[test]
fn lost_answers_and_late_copies() {
    holds("election: a lost answer", &Config { losses: 1, ..RULE });
    holds("election: two lost answers", &Config { losses: 2, campaigns: 1, ..RULE });
}

#[test]
fn crashes() {
    holds("election: twice each, a crash", &Config { crashes: 1, ..RULE });
    holds(
        "election: once each, a crash, a lost answer",
        &Config { crashes: 1, losses: 1, campaigns: 1, ..RULE },
    );
}

#[track_caller]
fn caught(name: &str, config: Config, expected: &str) {
    is_caught(&format!("election: {name}"), &config, expected);
}

const LOST: Config = Config { losses: 1, ..RULE };

#[test]
fn a_name_that_two_processes_share_makes_two_leaders() {
    caught("a shared name for an id", Config { shared_name: true, ..RULE }, TERM_TWICE);
}

#[test]
fn trust_that_is_counted_from_the_answer_is_too_long() {
    caught("trust from the answer", Config { deadline_from_answer: true, ..RULE }, TOO_LONG);
}

#[test]
fn a_renewal_that_failed_or_hangs_prolongs_nothing() {
    caught("still leader after a failed check", Config { failed_check_trusted: true, ..LOST }, TOO_LONG);
    caught("trusted while a renewal is under way", Config { trusted_while_renewing: true, ..RULE }, TOO_LONG);
}

#[test]
fn who_resigns_trusts_nothing_any_more() {
    caught(
        "trusted until the resignation is answered",
        Config { trusted_while_resigning: true, ..RULE },
        UNKNOWN,
    );
    caught("leads on after a resignation that failed", Config { leads_on: true, ..LOST }, UNKNOWN);
}

#[test]
fn a_resignation_that_failed_is_repeated() {
    caught("a resignation that failed is forgotten", Config { resign_forgotten: true, ..LOST }, ORPHAN);
}

#[test]
fn continue_steps_down() {
    caught("Continue keeps the term", Config { continue_keeps: true, ..RULE }, TERM_TWICE);
}

#[test]
fn an_observer_goes_by_the_servers_clock() {
    caught("leader() by the observer's clock", Config { observers_clock: true, ..RULE }, OBSERVED);
}
