//! The lease protocol as a model that is explored completely. See `docs/model.md`.
mod client;
mod config;
mod explore;
mod server;
mod state;

use config::Config;

#[test]
fn try_it() {
    let config = Config { losses: 0, ..Config::new(2, 1) };
    let r = explore::explore(&config);
    println!("{} {} {} {}", r.states, r.transitions, r.depth, r.orphaned);
    if let Some(v) = r.violation { println!("{}", v.trace); panic!("{}", v.what) }
}
