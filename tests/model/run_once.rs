//! Run once per period: no slot twice, whatever crashes or comes late.

use crate::once::{
    BEGUN_AGAIN, Config, Cut, DONE_TWICE, EFFECTS, IN_ITS_TIME, NOT_ITS_OWN, NOT_MARKED, OLD_SLOT, SHRINKS,
    Style, TWO_RUNS, USED_UP,
};
use crate::{extra_depth, holds, is_caught};

const KEEP: Cut = Cut {
    one_look: false,
    exact: false,
    slot_before_queue: false,
    begin_claims: false,
    runs_unclaimed: false,
    without_lease: false,
    any_fence: false,
    mark_shrinks: false,
    not_durable: false,
    deletes_first: false,
    ok_is_done: false,
    mark_is_ours: false,
    unfenced: false,
    key_share: false,
    marks_again: false,
    end_writes: false,
    verify_releases: false,
};

const FINISH: Config = Config {
    style: Style::Finish,
    numbers: [0; 2],
    runs: 1,
    renewals: 0,
    losses: 0,
    crashes: 0,
    server_crashes: 0,
    symmetry: true,
    cut: KEEP,
};
const COMPLETE: Config = Config { style: Style::CompleteIn, ..FINISH };
const CLAIM: Config = Config { style: Style::ClaimAtStart, ..FINISH };

#[test]
fn runs_that_are_marked_at_their_end() {
    holds("run once: twice each, a crash", &Config { runs: 2, crashes: 1, ..FINISH });
    holds("run once: renewals, a lost answer", &Config { renewals: 1, losses: 1, ..FINISH });
    holds(
        "run once: two lost answers, the server crashes",
        &Config { losses: 2, server_crashes: 1, ..FINISH },
    );
}

#[test]
fn numbers_of_the_callers() {
    holds("run once: an older number, a crash", &Config { numbers: [2, 1], runs: 2, crashes: 1, ..FINISH });
}

#[test]
fn effects_and_mark_in_one_transaction() {
    holds("run once: complete_in, twice each, a crash", &Config { runs: 2, crashes: 1, ..COMPLETE });
    if extra_depth() > 0 {
        holds("run once: complete_in, two lost answers", &Config { losses: 2, ..COMPLETE });
    }
    holds(
        "run once: complete_in, a lost answer, the server crashes",
        &Config { losses: 1, server_crashes: 1, ..COMPLETE },
    );
}

#[test]
fn slots_that_are_claimed_at_their_start() {
    holds("run once: claim_at_start, twice each, a crash", &Config { runs: 2, crashes: 1, ..CLAIM });
    holds(
        "run once: claim_at_start, two lost answers, the server crashes",
        &Config { losses: 2, server_crashes: 1, ..CLAIM },
    );
}

#[track_caller]
fn caught(name: &str, config: Config, cut: Cut, expected: &str) {
    is_caught(&format!("run once: {name}"), &Config { cut, ..config }, expected);
}

#[test]
fn begin() {
    caught("complete_in, no second look at the mark", COMPLETE, Cut { one_look: true, ..KEEP }, BEGUN_AGAIN);
    let numbers = Config { numbers: [2, 1], ..FINISH };
    caught("only the very slot's mark counts", numbers, Cut { exact: true, ..KEEP }, BEGUN_AGAIN);
    caught("the slot from before the queue", FINISH, Cut { slot_before_queue: true, ..KEEP }, OLD_SLOT);
}

#[test]
fn finish() {
    caught("finish without the lease", FINISH, Cut { without_lease: true, ..KEEP }, NOT_ITS_OWN);
    let cut = Cut { without_lease: true, mark_shrinks: true, ..KEEP };
    let slow = Config { runs: 2, ..FINISH };
    caught("finish without the lease, and the mark may shrink", slow, cut, NOT_ITS_OWN);
    caught(
        "finish not durable",
        Config { server_crashes: 1, ..FINISH },
        Cut { not_durable: true, ..KEEP },
        NOT_MARKED,
    );
    let late = Config { losses: 1, ..FINISH };
    caught("finish whatever its fence", late, Cut { any_fence: true, ..KEEP }, NOT_ITS_OWN);
    let cut = Cut { deletes_first: true, without_lease: true, ..KEEP };
    caught("the lease deleted first, then the mark", FINISH, cut, DONE_TWICE);
    let cut = Cut { deletes_first: true, without_lease: true, mark_shrinks: true, ..KEEP };
    caught("the same, and the mark may shrink", FINISH, cut, SHRINKS);
    caught("Ok is done", FINISH, Cut { ok_is_done: true, ..KEEP }, NOT_MARKED);
    let cut = Cut { mark_is_ours: true, ..KEEP };
    caught("whoever's mark after a lost answer", Config { losses: 1, ..FINISH }, cut, DONE_TWICE);
}

/// The lease decides; the mark that only grows is a second net.
#[test]
fn a_mark_that_may_shrink_does_not_while_the_lease_decides() {
    let cut = Cut { mark_shrinks: true, ..KEEP };
    holds("run once: the mark may shrink", &Config { cut, losses: 1, ..FINISH });
}

#[test]
fn complete_in() {
    caught("complete_in, unfenced", COMPLETE, Cut { unfenced: true, ..KEEP }, IN_ITS_TIME);
    caught("complete_in, FOR KEY SHARE", COMPLETE, Cut { key_share: true, ..KEEP }, IN_ITS_TIME);
    let cut = Cut { unfenced: true, marks_again: true, ..KEEP };
    caught("complete_in, unfenced, marks again", COMPLETE, cut, EFFECTS);
    caught("complete_in, the end writes the mark", COMPLETE, Cut { end_writes: true, ..KEEP }, EFFECTS);
    let late = Config { losses: 2, ..COMPLETE };
    caught("complete_in, released without a mark", late, Cut { verify_releases: true, ..KEEP }, EFFECTS);
    let cut = Cut { mark_is_ours: true, ..KEEP };
    caught("complete_in, whoever's mark", COMPLETE, cut, DONE_TWICE);
}

#[test]
fn claim_at_start() {
    let cut = Cut { begin_claims: true, ..KEEP };
    caught("begin claims by itself", Config { losses: 1, runs: 2, ..CLAIM }, cut, USED_UP);
    caught("runs before its claim is answered", CLAIM, Cut { runs_unclaimed: true, ..KEEP }, TWO_RUNS);
    caught(
        "claim not durable",
        Config { server_crashes: 1, ..CLAIM },
        Cut { not_durable: true, ..KEEP },
        TWO_RUNS,
    );
}
