//! The lease protocol as a model, explored completely: every order of every step of the clients,
//! of PostgreSQL and of the network, with pauses, crashes, lost answers, late messages and clock
//! jumps. What is modelled, what is not, and the invariants by number: `docs/model.md`.
//!
//! `protocol` explores what the crate does and must find nothing. `mutations` takes parts of it
//! out and must find what each part is for. `late` has copies of messages that come late; `several`,
//! `permits`, `elect` and `run_once` have what is built on the lease. `SYNCGUARD_MODEL_DEPTH=1` (to 3)
//! adds larger runs; use them with `--release`.

// A test: a model that is wrong must stop at once.
#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod callers;
mod client;
mod config;
mod elect;
mod election;
mod explore;
mod fast;
mod holders;
mod late;
mod mutations;
mod once;
mod permits;
mod protocol;
mod run_once;
mod runners;
mod server;
mod several;
mod shared;
mod source;
mod state;
mod statements;
mod tables;
mod tickets;

use std::io::Write as _;

use explore::{Model, Report, explore};

/// Explores, and says how much there was, past the test harness's capture.
fn run(name: &str, model: &impl Model) -> Report {
    let report = explore(model);
    let verdict = report.violation.as_ref().map_or("holds", |violation| violation.what);
    let line = format!(
        "model: {name}: {} states, {} transitions, depth {}, {} states with a late message's lease: {verdict}\n",
        report.states, report.transitions, report.depth, report.orphaned
    );
    let _ = std::io::stdout().write_all(line.as_bytes());
    report
}

/// Nothing is wrong in any state that can be reached.
fn holds(name: &str, model: &impl Model) -> Report {
    let report = run(name, model);
    if let Some(violation) = &report.violation {
        panic!("{name}: {}\n{}", violation.what, violation.trace);
    }
    report
}

/// The invariant with this number, or of this wording, is violated; the trace tells how.
fn is_caught(name: &str, model: &impl Model, invariant: &str) -> String {
    let report = run(name, &model.named());
    let violation =
        report.violation.unwrap_or_else(|| panic!("{name}: nothing is wrong, {invariant:?} was expected"));
    assert!(violation.what.starts_with(invariant), "{name}: {}\n{}", violation.what, violation.trace);
    if std::env::var_os("SYNCGUARD_MODEL_TRACES").is_some() {
        let _ = std::io::stdout().write_all(format!("{name}:\n{}\n", violation.trace).as_bytes());
    }
    violation.trace
}

/// How much larger the larger runs are; 0: none.
fn extra_depth() -> u8 {
    std::env::var("SYNCGUARD_MODEL_DEPTH").ok().and_then(|depth| depth.parse().ok()).unwrap_or(0)
}
