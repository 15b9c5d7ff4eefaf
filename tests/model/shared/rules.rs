//! The rules hold, and each of them is caught when it is taken out.

use super::{Config, Cut, DEAD, FENCES, INTENT, PASSED, STANDING, STARVED, TOO_LONG, TTL};
use crate::{holds, is_caught};

const TWO: Config = Config {
    cut: Cut {
        group_raises_none: false,
        join_raises_none: false,
        join_unlocked: false,
        leave_in_one: false,
        leave_unlocked: false,
        counts_every_fence: false,
        counts_dead: false,
        leaves_end: false,
        keeps_dead: false,
        ends_unheld: false,
        deletes_any_fence: false,
        trims_none: false,
        trims_in_one: false,
        no_yield: false,
        yields_to_newer: false,
        keeps_intent: false,
        raises_by_last: false,
        renews_any_fence: false,
        from_reply: false,
    },
    until: 3,
    joins: 1,
    acquires: 1,
    asks: 0,
    ttls: [TTL, TTL],
    renewals: 0,
    shortenings: 0,
    deaths: 0,
    breaks: 0,
    copies: 0,
};
const KEEP: Cut = TWO.cut;
/// One who stays for long, and one who does not.
const LONG: Config = Config { ttls: [3, 1], until: 4, ..TWO };

const SHORTENED: Config = Config { shortenings: 1, acquires: 0, until: 2, ..LONG };
/// A reader leaves, and the copy of its join comes when the group is gone.
const LATE: Config = Config { breaks: 1, copies: 1, acquires: 0, until: 1, ..TWO };

impl Config {
    fn cut(self, cut: Cut) -> Self {
        Self { cut, ..self }
    }
}

#[test]
fn two_readers_and_a_writer() {
    holds("shared: two readers and a writer", &TWO);
    holds("shared: a writer that asks again", &Config { asks: 1, until: 2, ..TWO });
    holds("shared: ttls that differ", &Config { until: 3, ..LONG });
}

#[test]
fn who_dies_leaves_nothing_for_long() {
    holds("shared: a client dies", &Config { deaths: 1, ..TWO });
    holds("shared: a client with another ttl dies", &Config { deaths: 1, acquires: 0, ..LONG });
}

#[test]
fn renewals_in_a_batch() {
    holds("shared: renewals", &Config { renewals: 1, until: 2, ..LONG });
}

#[test]
fn a_broken_lock_and_copies_that_come_late() {
    holds("shared: a broken lock", &Config { breaks: 1, renewals: 1, acquires: 0, until: 2, ..TWO });
    holds("shared: copies of joins", &Config { copies: 1, until: 2, ..TWO });
}

#[test]
fn a_lease_that_is_shortened() {
    holds("shared: a shortened lease", &Config { shortenings: 1, acquires: 0, ..LONG });
    holds("shared: a shortened lease, its reader dies", &Config { deaths: 1, ..SHORTENED });
}

#[test]
fn rule_1_a_group_raises_the_counter() {
    let config = TWO.cut(Cut { group_raises_none: true, ..KEEP });
    is_caught("shared: a group raises nothing", &config, FENCES);
}

#[test]
fn rule_2_a_join_lengthens_the_group_whose_row_it_has() {
    is_caught("shared: a join lengthens nothing", &TWO.cut(Cut { join_raises_none: true, ..KEEP }), TOO_LONG);
    is_caught("shared: a join without the row", &TWO.cut(Cut { join_unlocked: true, ..KEEP }), TOO_LONG);
}

#[test]
fn rule_3_a_leave_has_the_row_before_it_looks() {
    is_caught("shared: a leave in one statement", &TWO.cut(Cut { leave_in_one: true, ..KEEP }), TOO_LONG);
    is_caught("shared: a leave without the row", &TWO.cut(Cut { leave_unlocked: true, ..KEEP }), TOO_LONG);
}

#[test]
fn rule_3_a_leave_ends_only_a_group_that_it_has_locked() {
    holds("shared: a group that comes between the two of a leave", &LATE);
    let config = LATE.cut(Cut { ends_unheld: true, ..KEEP });
    is_caught("shared: a leave ends what it has not locked", &config, TOO_LONG);
    let config = LATE.cut(Cut { deletes_any_fence: true, ..KEEP });
    is_caught("shared: a leave deletes another group's member", &config, STANDING);
}

#[test]
fn rule_3_a_lease_that_is_shortened_trims_its_group() {
    is_caught(
        "shared: a shortened lease trims nothing",
        &SHORTENED.cut(Cut { trims_none: true, ..KEEP }),
        STANDING,
    );
    let in_one = SHORTENED.cut(Cut { trims_in_one: true, ..KEEP });
    is_caught("shared: a shortened lease trims in one statement", &in_one, TOO_LONG);
}

#[test]
fn rule_4_readers_yield_to_older_intents_and_to_no_others() {
    is_caught(
        "shared: readers pass intents",
        &Config { joins: 2, ..TWO }.cut(Cut { no_yield: true, ..KEEP }),
        PASSED,
    );
    let newer = Cut { yields_to_newer: true, ..KEEP };
    is_caught("shared: readers yield to every intent", &Config { joins: 2, ..TWO }.cut(newer), STARVED);
    is_caught(
        "shared: a grant keeps its intent",
        &Config { asks: 1, ..TWO }.cut(Cut { keeps_intent: true, ..KEEP }),
        INTENT,
    );
}

#[test]
fn rule_5_a_batch_raises_a_group_by_its_greatest_ttl_and_compares_fences() {
    let config = Config { renewals: 1, ..LONG };
    is_caught("shared: a batch raises by one", &config.cut(Cut { raises_by_last: true, ..KEEP }), TOO_LONG);
    let broken = Config { breaks: 1, renewals: 1, copies: 1, acquires: 0, until: 2, ..TWO };
    is_caught(
        "shared: a batch renews any fence",
        &broken.cut(Cut { renews_any_fence: true, ..KEEP }),
        STANDING,
    );
    let dead = Config { deaths: 1, breaks: 1, until: 4, ..TWO };
    is_caught(
        "shared: a leave counts every fence",
        &dead.cut(Cut { counts_every_fence: true, ..KEEP }),
        STANDING,
    );
}

#[test]
fn rule_6_neither_groups_nor_dead_members_are_left() {
    is_caught(
        "shared: a leave counts the dead",
        &Config { deaths: 1, ..LONG }.cut(Cut { counts_dead: true, ..KEEP }),
        STANDING,
    );
    is_caught("shared: a leave leaves the end", &LONG.cut(Cut { leaves_end: true, ..KEEP }), STANDING);
    let config = Config { deaths: 1, ..LONG };
    is_caught("shared: a leave keeps the dead", &config.cut(Cut { keeps_dead: true, ..KEEP }), DEAD);
}

#[test]
fn a_deadline_from_the_reply_is_too_late() {
    is_caught("shared: deadline from the reply", &TWO.cut(Cut { from_reply: true, ..KEEP }), TOO_LONG);
}
