//! Several keys at once: all or nothing, and nobody waits for somebody who waits for him.

use crate::holders::{Config, DEADLOCK, ORPHAN, TOO_LONG, UNKNOWN};
use crate::statements::{BURNT, PARTIAL, TAKEOVER};
use crate::tables::{Cut, Rules};
use crate::{holds, is_caught};

const A: u8 = 0b001;
const B: u8 = 0b010;
const AB: u8 = 0b011;
const BC: u8 = 0b110;
const ABC: u8 = 0b111;

const KEEP: Cut = Config::new([0; 3]).rules.cut;

/// Two clients that take the same two keys.
const TWO: Config = Config::new([AB, AB, 0]);
/// One that takes two keys, and one that takes one of them,
const SINGLE: Config = Config::new([AB, B, 0]);
/// statement by statement, reading without a row lock.
const FOREIGN: Config = Config { foreign: [false, true, false], ..SINGLE };
/// Three keys, all with a dead row, of which two share the number of their advisory lock.
const SHARED: Config =
    Config { rules: Rules { numbers: [1, 0, 1], ..TWO.rules }, dead: ABC, ..Config::new([AB, BC, 0]) };

#[test]
fn two_sets_and_a_single_key() {
    holds("several keys: two sets and a single key", &Config::new([AB, AB, B]));
}

#[test]
fn a_set_and_single_keys_of_ours_and_of_another_kind() {
    holds(
        "several keys: beside another kind of client",
        &Config { foreign: [false, false, true], ..Config::new([AB, A, B]) },
    );
    holds("several keys: another kind of client, twice", &Config { acquires: 2, dead: B, ..FOREIGN });
}

#[test]
fn dead_rows_and_shared_numbers() {
    holds("several keys: dead rows, shared numbers", &SHARED);
    holds("several keys: a key without a row beside a dead one", &Config { dead: A, ..TWO });
}

#[test]
fn fenced_work() {
    holds("several keys: fenced work", &TWO.at_work());
}

#[test]
fn a_lease_is_broken_and_the_others_are_let_go() {
    holds("several keys: renewals, a broken lease", &Config { renewals: 1, breaks: 1, ..SINGLE });
}

#[test]
fn lost_answers() {
    holds("several keys: a lost answer", &Config { losses: 1, ..SINGLE });
}

#[test]
fn crashes_and_time_outs() {
    holds("several keys: a crash, timeouts", &Config { crashes: 1, timeouts: true, ..TWO });
}

#[test]
fn advisory_locks_in_the_order_of_keys_wait_in_a_circle() {
    is_caught(
        "several keys: queues in the order of keys",
        &SHARED.cut(Cut { queue_by_key: true, ..KEEP }),
        DEADLOCK,
    );
}

#[test]
fn without_its_advisory_locks_the_fast_statement_is_overwritten_by_who_reads_without_a_lock() {
    let cut = Cut { fast_unqueued: true, ..KEEP };
    is_caught("several keys: fast, unqueued, another kind of client", &FOREIGN.cut(cut), TAKEOVER);
}

/// Among our own clients the index and all or nothing decide.
#[test]
fn without_its_advisory_locks_the_fast_statement_is_still_right_among_ours() {
    holds("several keys: fast, unqueued", &SINGLE.cut(Cut { fast_unqueued: true, ..KEEP }));
}

#[test]
fn what_goes_on_without_a_key_is_not_all_or_nothing() {
    is_caught("several keys: not all or nothing", &TWO.cut(Cut { partial: true, ..KEEP }), PARTIAL);
}

#[test]
fn what_overwrites_a_row_takes_a_live_lease_over() {
    is_caught(
        "several keys: no DO NOTHING, no condition",
        &TWO.cut(Cut { overwrites: true, ..KEEP }),
        TAKEOVER,
    );
}

#[test]
fn each_key_has_a_counter_that_is_raised() {
    is_caught("several keys: one counter for all", &TWO.cut(Cut { raises_one: true, ..KEEP }), BURNT);
}

#[test]
fn rows_in_another_order_wait_in_a_circle() {
    let backwards = [
        ("release", Cut { release_backwards: true, ..KEEP }),
        ("careful statement", Cut { careful_backwards: true, ..KEEP }),
        ("renewal that waits", Cut { renewal_waits_backwards: true, ..KEEP }),
    ];
    for (what, cut) in backwards {
        let name = format!("several keys: {what} in another order");
        is_caught(&name, &Config { renewals: 1, ..TWO }.cut(cut), DEADLOCK);
    }
}

#[test]
fn counters_in_another_order_wait_in_a_circle_with_fenced_work() {
    let backwards = [
        ("counters raised", Cut { raise_backwards: true, ..KEEP }),
        ("fence check", Cut { fenced_backwards: true, ..KEEP }),
    ];
    for (what, cut) in backwards {
        let name = format!("several keys: {what} in another order");
        is_caught(&name, &TWO.at_work().cut(cut), DEADLOCK);
    }
}

/// Whose caller releases before it commits.
#[test]
fn counters_that_are_waited_for_wait_in_a_circle_with_fenced_work() {
    let cut = Cut { counters_waited_for: true, ..KEEP };
    is_caught("several keys: busy counters waited for", &TWO.at_work().cut(cut), DEADLOCK);
}

#[test]
fn a_deadline_from_the_reply_is_too_late() {
    is_caught(
        "several keys: deadline from the reply",
        &Config { deadline_from_reply: true, ..TWO },
        TOO_LONG,
    );
}

const BROKEN: Config = Config { renewals: 1, breaks: 1, ..SINGLE };

#[test]
fn a_guard_is_lost_as_soon_as_one_of_its_keys_is() {
    is_caught("several keys: lost when all are", &Config { lost_by_all: true, ..BROKEN }, UNKNOWN);
}

#[test]
fn what_is_left_of_a_lost_guard_is_released() {
    is_caught("several keys: the others kept", &Config { others_kept: true, ..BROKEN }, ORPHAN);
}

#[test]
fn another_id_after_a_lost_answer_leaves_an_orphan() {
    let config = Config { fresh_id: true, losses: 1, acquires: 2, ..SINGLE };
    is_caught("several keys: another id after a lost answer", &config, ORPHAN);
}

/// One of the leases was broken before the answer to the second question.
#[test]
fn who_finds_a_part_under_its_own_id_releases_it() {
    let config = Config { part_forgotten: true, losses: 1, breaks: 1, ..SINGLE };
    is_caught("several keys: a part forgotten", &config, ORPHAN);
}
