//! Faults: connections that die at any byte, servers that crash, clocks, pauses, and what the
//! library says about it. See `docs/reliability.md`.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test says by a panic what it did not expect"
)]
#![allow(unreachable_pub, clippy::print_stdout, reason = "one program of several modules")]

use syncguard_test_support as support;

mod bounds;
mod checker;
mod clock;
mod controls;
mod disk;
mod ends;
mod environments;
mod failover;
mod fork;
mod headings;
mod history;
mod holder;
mod kills;
mod kind_controls;
mod kind_rules;
mod kinds;
mod late;
mod meter;
mod name_rules;
mod observers;
mod order_rules;
mod page;
mod patroni;
mod pooler;
mod registers;
mod renewal;
mod safeguards;
mod sessions;
mod sharers;
mod starvation;
mod storm;
mod tickets;
mod tls;
mod told;
mod truth;
mod waiters;
mod waits;
mod weather;
mod zombies;

/// How long the random part runs.
fn seconds() -> u64 {
    std::env::var("SYNCGUARD_FAULT_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(45)
}

/// Whether there is time to try every byte.
fn long() -> bool {
    seconds() >= 600
}

/// Another storm for every run, unless it is to be the same again.
fn seed() -> u64 {
    let random = || u64::from(std::process::id()) ^ (history::now() >> 20) & 0xFFFF;
    std::env::var("SYNCGUARD_FAULT_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(random)
}
