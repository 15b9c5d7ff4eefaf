//! What is allocated and not given back, to the byte: clients that come and go, and sessions that are ended, leave nothing.

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::alloc::System;
use std::time::Duration;

use syncguard::PgLockClient;

use crate::load::builder;
use crate::support::leases::threads_named;
use crate::support::worker::{self, Parent, Worker};
use crate::support::{LIMIT, wait_until};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Of this process.
pub fn allocated() -> i64 {
    let stats = ALLOCATOR.stats();
    i64::try_from(stats.bytes_allocated).unwrap_or(0) - i64::try_from(stats.bytes_deallocated).unwrap_or(0)
}

/// What is repeated.
type Round = fn(&PgLockClient, &str);

const ROUNDS: [(&str, Round); 4] = [
    ("a client that is closed", |_, url| {
        let client = builder().connect(url).unwrap();
        let guard = client.lock("k").unwrap();
        let report = client.close(Duration::from_secs(10)).unwrap();
        assert!(report.threads_ended);
        drop(guard);
    }),
    ("a client that is dropped", |_, url| {
        let client = builder().connect(url).unwrap();
        drop(client.lock("k").unwrap());
    }),
    ("a session that is ended", |client, url| {
        drop(client.lock("k").unwrap());
        let mut sql = postgres::Client::connect(url, postgres::NoTls).unwrap();
        let all = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'syncguard'";
        sql.execute(all, &[]).unwrap();
        drop(client.lock("k").unwrap());
    }),
    ("a connection of the driver alone", |_, url| {
        let mut sql = postgres::Client::connect(url, postgres::NoTls).unwrap();
        sql.batch_execute("SELECT 1").unwrap();
    }),
];

fn run(parent: &Parent) {
    let url = parent.arg("url");
    let client = PgLockClient::connect(&url).unwrap();
    drop(client.lock("k").unwrap());
    let settled = || {
        // The pool's, the timer and the worker. A client that was dropped is freed by its own, in their time.
        wait_until(LIMIT, "only the threads of this client are there", || threads_named("syncguard") == 3);
        allocated()
    };
    for (name, round) in ROUNDS {
        (0..20).for_each(|_| round(&client, &url));
        let before = settled();
        (0..100).for_each(|_| round(&client, &url));
        parent.say(&format!("{name}: {}", (settled() - before) / 100));
    }
}

#[test]
fn what_comes_and_goes_leaves_no_memory() {
    worker::part("memory", run);
    let schema = crate::support::schema();
    let mut worker =
        Worker::start("what_comes_and_goes_leaves_no_memory", "memory", &[("url", &schema.url())]);
    let (report, status) = worker.report(Duration::from_secs(120));
    assert!(status.success() && report.len() == ROUNDS.len(), "{report:?}");
    for line in report {
        let bytes: i64 = line.rsplit_once(' ').unwrap().1.parse().unwrap();
        // A list of the client that stays may have grown.
        assert!(bytes < 64, "bytes that each leaves behind: {line}");
    }
}
