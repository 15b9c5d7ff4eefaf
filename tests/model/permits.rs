//! Permits: each an ordinary lease on a slot of its own.

use crate::holders::{Config, NONE, ORPHAN, TOO_LONG, TOO_MANY, TWO_PERMITS};
use crate::statements::{BURNT, PARTIAL, TAKEOVER};
use crate::tables::{Cut, Rules};
use crate::{extra_depth, holds, is_caught};

const A: u8 = 0b001;
const B: u8 = 0b010;
const AB: u8 = 0b011;
const ABC: u8 = 0b111;

const KEEP: Cut = Config::new([0; 3]).rules.cut;

const fn permits(sets: [u8; 3]) -> Config {
    let config = Config::new(sets);
    Config { rules: Rules { slots: true, ..config.rules }, limit: 2, ..config }
}

/// Two clients with a limit of two,
const TWO: Config = permits([AB, AB, 0]);
/// and three, of which two know a limit of one. (Which slot that is matters to nobody.)
const THREE: Config = permits([AB, A, B]);

#[test]
fn three_clients_on_two_slots() {
    holds("permits: three clients, two slots", &THREE);
    if extra_depth() > 0 {
        holds("permits: three clients, two slots each", &permits([AB, AB, AB]));
    }
}

#[test]
fn limits_that_differ() {
    holds("permits: limits of 3 and 2", &Config { limit: 3, dead: A, ..permits([ABC, AB, 0]) });
}

#[test]
fn after_a_transaction_that_was_rolled_back() {
    holds("permits: marked counters", &Config { touched: AB, ..TWO });
}

#[test]
fn beside_fenced_work() {
    holds("permits: fenced work", &TWO.at_work());
}

#[test]
fn renewals_and_crashes() {
    holds("permits: renewals", &Config { renewals: 1, ..TWO });
    holds("permits: a crash, timeouts", &Config { crashes: 1, timeouts: true, ..TWO });
}

#[test]
fn lost_answers() {
    holds("permits: a lost answer", &Config { losses: 1, ..permits([AB, A, 0]) });
}

#[test]
fn without_the_careful_statement_a_marked_counter_is_never_used_again() {
    let config = Config { no_careful: true, touched: A, ..permits([A, 0, 0]) };
    is_caught("permits: without the careful statement", &config, NONE);
}

#[test]
fn a_slot_whose_counter_is_busy_is_no_reason_to_answer_none() {
    is_caught("permits: no next slot", &Config { no_next: true, ..TWO.at_work() }, NONE);
}

#[test]
fn who_queues_for_all_slots_keeps_others_from_free_ones() {
    is_caught("permits: queues for all slots", &TWO.cut(Cut { queues_for_all: true, ..KEEP }), NONE);
}

#[test]
fn without_the_condition_a_live_permit_is_taken_over() {
    is_caught("permits: no condition", &TWO.cut(Cut { overwrites: true, ..KEEP }), TAKEOVER);
}

#[test]
fn a_permit_raises_its_slots_counter() {
    is_caught("permits: no raise of the counter", &TWO.cut(Cut { raises_none: true, ..KEEP }), BURNT);
}

#[test]
fn without_all_or_nothing_a_fence_is_burnt() {
    is_caught("permits: not all or nothing", &TWO.cut(Cut { partial: true, ..KEEP }), PARTIAL);
}

/// Its place in the queue is fairness and fewer failed messages, not exclusion: nobody else knows of slots.
#[test]
fn a_slot_need_not_be_queued_for_for_exclusion() {
    holds("permits: unqueued", &TWO.cut(Cut { slot_unqueued: true, ..KEEP }));
}

#[test]
fn one_slot_more_than_the_limit_is_one_holder_too_many() {
    let config = Config { limit: 1, ..TWO };
    is_caught("permits: slots from 0 to the limit", &config, TOO_MANY);
}

#[test]
fn another_id_after_a_lost_answer_leaves_an_orphan() {
    let config = Config { fresh_id: true, losses: 1, acquires: 2, ..TWO };
    is_caught("permits: another id after a lost answer", &config, ORPHAN);
}

/// The late copy and the second question are on different slots at the same time.
#[test]
fn lock_ids_that_are_not_unique_give_one_call_two_permits() {
    let config = Config { losses: 1, ..TWO }.cut(Cut { ids_not_unique: true, ..KEEP });
    is_caught("permits: lock ids not unique", &config, TWO_PERMITS);
}

#[test]
fn a_deadline_from_the_reply_is_too_late() {
    is_caught("permits: deadline from the reply", &Config { deadline_from_reply: true, ..TWO }, TOO_LONG);
}
