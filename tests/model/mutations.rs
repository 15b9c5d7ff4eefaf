//! Parts of the protocol, taken out: the model must notice, or the part is not needed for what the
//! model checks, and a test says so.

use crate::config::{Config, Mutation};
use crate::{holds, is_caught};

const NONE: Mutation = Config::new(1, 1).mutation;

fn two(mutation: Mutation) -> Config {
    Config { mutation, ..Config::new(2, 1) }
}

#[test]
fn without_row_lock_and_upsert_condition_a_live_lease_is_taken_over() {
    let mutation = Mutation { no_row_lock: true, no_upsert_condition: true, ..NONE };
    is_caught("no row lock, no condition", &Config { extends: 1, ..two(mutation) }, "3:");
}

/// The condition and the failing message catch what the missing lock lets through.
#[test]
fn without_the_row_lock_alone_the_upsert_still_decides() {
    let mutation = Mutation { no_row_lock: true, ..NONE };
    let config = Config { extends: 1, two_messages: false, timeouts: false, ..two(mutation) };
    holds("no row lock", &config);
}

#[test]
fn without_row_lock_and_all_or_nothing_a_fence_is_burnt() {
    let mutation = Mutation { no_row_lock: true, no_all_or_nothing: true, ..NONE };
    is_caught(
        "no row lock, not all or nothing",
        &Config { extends: 1, ..two(mutation) },
        "2: a fence is burnt",
    );
}

#[test]
fn without_the_upsert_condition_the_first_grant_of_a_key_is_overwritten() {
    let mutation = Mutation { no_upsert_condition: true, no_advisory_lock: true, ..NONE };
    is_caught("no condition, a client that does not queue", &two(mutation), "3:");
}

#[test]
fn without_all_or_nothing_a_fence_is_burnt() {
    let mutation = Mutation { no_all_or_nothing: true, no_advisory_lock: true, ..NONE };
    is_caught("not all or nothing, a client that does not queue", &two(mutation), "2: a fence is burnt");
}

#[test]
fn a_clock_from_before_the_wait_revives_a_dead_lease() {
    let mutation = Mutation { clock_at_begin: true, ..NONE };
    is_caught(
        "clock at BEGIN",
        &Config { extends: 1, ..two(mutation) },
        "5: an operation on a lease that is over",
    );
}

#[test]
fn a_deadline_from_the_reply_is_too_late() {
    let mutation = Mutation { deadline_from_reply: true, ..NONE };
    is_caught("deadline from the reply", &two(mutation), "1:");
}

#[test]
fn another_id_after_a_lost_answer_leaves_an_orphan() {
    let mutation = Mutation { fresh_id: true, ..NONE };
    is_caught("another id after a lost answer", &Config { acquires: 2, losses: 1, ..two(mutation) }, "6:");
}

#[test]
fn an_unknown_outcome_that_nobody_follows_up_leaves_an_orphan() {
    let mutation = Mutation { no_deferred_release: true, ..NONE };
    is_caught("no deferred release", &Config { losses: 1, ..two(mutation) }, "6:");
}

#[test]
fn a_reader_believes_what_a_crash_takes_back() {
    let mutation = Mutation { resolve_by_reading: true, ..NONE };
    is_caught("resolved by reading", &Config { losses: 1, server_crashes: 1, ..two(mutation) }, "1:");
}

#[test]
fn a_grant_that_does_not_wait_for_the_disk_is_lost_in_a_crash() {
    let mutation = Mutation { async_grant: true, ..NONE };
    is_caught("grants not durable", &Config { server_crashes: 1, ..two(mutation) }, "1:");
}

#[test]
fn unfenced_work_of_a_paused_holder_comes_too_late() {
    let mutation = Mutation { unfenced: true, ..NONE };
    is_caught("unfenced work", &Config { writes: 1, ..two(mutation) }, "4:");
}

#[test]
fn a_key_share_lock_does_not_keep_the_next_holder_out() {
    let mutation = Mutation { key_share: true, ..NONE };
    is_caught("FOR KEY SHARE", &Config { writes: 1, ..two(mutation) }, "4:");
}

/// The acquire's first message is late, its second is granted and answered late, somebody else has
/// the key in between, and then the first message is granted: same id, newer fence.
#[test]
fn a_late_first_message_gives_the_extend_before_the_hand_out_another_lease() {
    let mutation = Mutation { no_fence: true, ..NONE };
    let config = Config { losses: 1, two_messages: false, ..two(mutation) };
    is_caught("extended whatever its fence", &config, "1: a client holds a lease");
}

#[test]
fn a_grant_for_a_key_without_a_row_that_overwrites_takes_a_live_lease_over() {
    let mutation = Mutation { absent_overwrites: true, no_advisory_lock: true, ..NONE };
    is_caught("no DO NOTHING, a client that does not queue", &two(mutation), "3:");
}

/// The look may be older than the advisory lock: the queue alone does not keep the row absent.
#[test]
fn the_queue_does_not_stand_in_for_do_nothing() {
    is_caught("no DO NOTHING", &two(Mutation { absent_overwrites: true, ..NONE }), "3:");
}

#[test]
fn a_grant_for_a_key_without_a_row_that_fails_by_halves_burns_a_fence() {
    let mutation = Mutation { absent_burns: true, ..NONE };
    is_caught("absent: not all or nothing", &two(mutation), "2: a fence is burnt");
}

/// Its place in the queue is fairness and fewer failed messages, not exclusion.
#[test]
fn a_grant_for_a_key_without_a_row_need_not_queue_for_exclusion() {
    holds("absent: unqueued", &two(Mutation { absent_unqueued: true, ..NONE }));
}

#[test]
fn a_release_that_is_judged_before_its_wait_alone_succeeds_on_a_lease_that_is_over() {
    let mutation = Mutation { judged_once: true, ..NONE };
    is_caught(
        "live release: judged once",
        &Config { extends: 1, ..two(mutation) },
        "5: an operation on a lease that is over",
    );
}

#[test]
fn a_release_that_changed_nothing_is_no_release() {
    let mutation = Mutation { released_blindly: true, ..NONE };
    is_caught("live release: told blindly", &two(mutation), "5: Released, and nothing");
}

/// Not a mutation but a limit: what a message leaves that arrives after everybody stopped waiting.
#[test]
fn a_message_that_is_late_enough_leaves_a_lease_until_its_ttl_is_over() {
    let config = Config { losses: 1, no_orphans: true, ..two(NONE) };
    is_caught("a late message, not excused", &config, "6:");
}
