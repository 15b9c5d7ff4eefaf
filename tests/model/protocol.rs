//! What the crate does: nothing may be wrong.

use crate::config::{Config, Mutation};
use crate::{extra_depth, holds};

/// One form, and no timeouts of waits: what is left of the behaviour is explored in full, and the
/// other tests have the rest.
const fn narrow(clients: usize, acquires: u8) -> Config {
    Config { two_messages: false, timeouts: false, ..Config::new(clients, acquires) }
}

#[test]
fn two_clients_in_both_forms() {
    holds("two clients, both forms", &Config::new(2, 1));
}

#[test]
fn every_part_of_a_statement_as_a_step_of_its_own() {
    holds("two clients, both forms, finest steps", &Config { fine: true, ..Config::new(2, 1) });
}

#[test]
fn three_clients() {
    holds("three clients", &narrow(3, 1));
}

#[test]
fn renewals_and_extends() {
    holds("extends, one message", &Config { extends: 1, timeouts: true, ..narrow(2, 1) });
}

#[test]
fn extends_in_two_messages() {
    holds(
        "extends, two messages",
        &Config { extends: 1, one_message: false, two_messages: true, ..narrow(2, 1) },
    );
}

#[test]
fn lost_answers_leave_at_worst_the_lease_of_a_late_message() {
    let report = holds("a lost answer, both forms", &Config { losses: 1, ..Config::new(2, 1) });
    assert!(report.orphaned > 0, "no late message was explored");
}

#[test]
fn fenced_work_in_both_forms() {
    holds("fenced work, both forms", &Config { writes: 1, ..Config::new(2, 1) });
}

#[test]
fn fenced_work_under_a_clock_jump() {
    holds("fenced work, a clock jump", &Config { writes: 1, jumps: 1, ..narrow(2, 1) });
}

#[test]
fn fenced_work_with_a_lost_answer() {
    holds("fenced work, a lost answer", &Config { writes: 1, losses: 1, ..narrow(2, 1) });
}

#[test]
fn clock_jumps_forth_and_back() {
    holds("two clock jumps", &Config { jumps: 2, ..narrow(2, 1) });
}

#[test]
fn a_client_that_crashes() {
    holds("a client crashes", &Config { client_crashes: 1, writes: 1, ..Config::new(2, 1) });
}

#[test]
fn a_server_that_crashes() {
    holds("the server crashes", &Config { server_crashes: 1, losses: 1, ..narrow(2, 1) });
}

/// Exclusion and fences do not rest on the advisory lock.
#[test]
fn without_the_advisory_lock() {
    let mutation = Mutation { no_advisory_lock: true, ..Mutation::default() };
    holds("without the advisory lock, both forms", &Config { mutation, ..Config::new(2, 1) });
    holds(
        "without the advisory lock, fenced work",
        &Config { mutation, writes: 1, jumps: 1, ..narrow(2, 1) },
    );
}

/// More of everything; see the module's docs.
#[test]
fn larger_runs() {
    let depth = extra_depth();
    let mutation = Mutation { no_advisory_lock: true, ..Mutation::default() };
    if depth >= 1 {
        holds("deep: two leases each", &narrow(2, 2));
        holds("deep: two leases each, both forms", &Config { timeouts: false, ..Config::new(2, 2) });
        holds("deep: extends, both forms", &Config { extends: 1, ..Config::new(2, 1) });
        holds("deep: two lost answers", &Config { losses: 2, ..narrow(2, 1) });
        holds("deep: extends and a lost answer", &Config { extends: 1, losses: 1, ..narrow(2, 1) });
        holds("deep: without the advisory lock, two leases each", &Config { mutation, ..narrow(2, 2) });
    }
    if depth >= 2 {
        holds("deep: three clients, fenced work", &Config { writes: 1, ..narrow(3, 1) });
        holds("deep: three clients without the advisory lock", &Config { mutation, ..narrow(3, 1) });
        holds("deep: fenced work, two leases each", &Config { writes: 1, ..narrow(2, 2) });
    }
    if depth >= 3 {
        holds("deep: three clients, a lost answer", &Config { losses: 1, ..narrow(3, 1) });
        holds("deep: three clients, both forms", &Config { timeouts: false, ..Config::new(3, 1) });
    }
}
