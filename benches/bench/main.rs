//! Figures, measured: each beside its floor, interleaved in one process tree, as medians of blocks.
//!
//! `scripts/bench` runs it. Nothing here passes or fails by time; a goal that is missed is printed as
//! missed. The server is a throwaway one with fsync on.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::print_stdout, clippy::print_stderr)]
#![allow(clippy::cast_precision_loss, clippy::cast_sign_loss, clippy::cast_possible_truncation)]

use syncguard_test_support as support;

mod cpu;
mod cycles;
mod election;
mod fair;
mod floor;
mod growth;
mod hot;
mod line;
mod many;
mod owners;
mod pairs;
mod permits;
mod report;
mod several;
mod shared;
mod single;
mod stepwise;

use std::time::{Duration, Instant};

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static GLOBAL: &StatsAlloc<std::alloc::System> = ALLOCATOR;
const ALLOCATOR: &StatsAlloc<std::alloc::System> = &INSTRUMENTED_SYSTEM;

const TTL: Duration = Duration::from_secs(60);

/// What every section measures on.
struct Stage {
    server: support::Server,
    schema: support::TestSchema,
    report: report::Report,
    /// How many blocks make a median.
    blocks: usize,
    quick: bool,
}

/// A name to ask for, and what it measures.
type Section = (&'static str, fn(&Stage));

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let Some(at) = args.iter().position(|arg| arg == "--child") {
        return hot::child(&args[at + 1]);
    }
    if let Some(at) = args.iter().position(|arg| arg == "--readers") {
        return shared::child(&args[at + 1..]);
    }
    let quick = args.iter().any(|arg| arg == "--quick");
    let only = args.iter().position(|arg| arg == "--only").map(|at| args[at + 1].as_str());
    let server = support::Server::start(
        &support::Config::new().fsync(true).set("shared_buffers", "128MB").set("max_wal_size", "1GB"),
    );
    let schema = server.schema();
    schema.client().batch_execute(floor::TABLE).unwrap();
    let blocks = if quick { 7 } else { 31 };
    let stage = Stage { server, schema, report: report::Report::default(), blocks, quick };
    report::Report::head();
    let sections: [Section; 11] = [
        ("cycles", cycles::run),
        ("single", single::run),
        ("hot", hot::run),
        ("several", several::run),
        ("permits", permits::run),
        ("shared", shared::run),
        ("election", election::run),
        ("owners", owners::run),
        ("fair", fair::run),
        ("many", many::run),
        ("growth", growth::run),
    ];
    for (name, run) in sections {
        if only.is_none_or(|only| only == name) {
            let start = Instant::now();
            eprintln!("bench: {name} …");
            run(&stage);
            eprintln!("bench: {name} took {:.0} s", start.elapsed().as_secs_f64());
        }
    }
    stage.report.foot();
}
