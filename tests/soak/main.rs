//! An hour of everything at a modest rate, and whether anything grows meanwhile: memory, threads, descriptors, sessions,
//! prepared statements, locks of the server, rows and tables. `scripts/soak` runs it for as long as it is told and draws
//! `docs/soak.svg`; without it a few seconds show that load, samples and judgement work.
//!
//! | file | what it shows |
//! | --- | --- |
//! | `load` | the process that is watched: threads that do everything the library can |
//! | `activities` | what they do |
//! | `samples` | what is read of that process and of its server |
//! | `memory` | what comes and goes leaves no memory, to the byte |
//! | `judge` | when something counts as growing |
//! | `picture` | the samples over time, as SVG |

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test says by a panic what it did not expect"
)]
#![allow(unreachable_pub, clippy::print_stdout, reason = "one program of several modules")]

use std::fmt::Write as _;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use syncguard_test_support as support;

use crate::judge::Verdict;
use crate::samples::{Sampler, Samples};
use crate::support::{Config, Server, Stop, Worker};

mod activities;
mod judge;
mod load;
mod memory;
mod picture;
mod samples;

/// How many samples a run has.
const SAMPLES: u32 = 360;
/// Between two sessions that are ended by force.
const KILL_EVERY: Duration = Duration::from_secs(3);

/// How long it lasts.
fn seconds() -> u32 {
    env::var("SYNCGUARD_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(8)
}

#[test]
fn nothing_grows_under_mixed_load() {
    let length = Duration::from_secs(u64::from(seconds()));
    let server = Server::start(&Config::new().fsync(true).set("max_connections", "200"));
    let test = "load::a_load_outside_of_a_soak_does_nothing";
    let mut worker =
        Worker::start_alone(test, "load", &[("url", server.url()), ("socket_url", server.socket_url())]);
    worker.expect("ready");
    let samples = watch(&server, &mut worker, length);
    worker.tell("stop");
    // How often each activity was carried out and what it answered, and what the end has left.
    let (report, status) = worker.report(Duration::from_secs(120));
    assert!(status.success(), "{report:?}");
    let verdicts = judge::all(&samples);
    write_files(&server, &samples, &verdicts, &report);
    let ended = report.iter().any(|line| line == "ended threads=0 descriptors=0 rows=0");
    assert!(ended, "clients that are closed leave something behind: {report:?}");
    let unused: Vec<_> = report.iter().filter(|line| line.contains(" ok=0")).collect();
    // One that is rare may meet the restart and nothing else, in a few seconds.
    assert!(unused.is_empty() || length < Duration::from_secs(60), "never succeeded: {unused:?}");
    let growing: Vec<_> = verdicts.iter().filter(|verdict| verdict.grows).collect();
    // A few seconds are too short to tell a beginning from a growth.
    assert!(growing.is_empty() || length < Duration::from_secs(600), "{growing:#?}");
}

/// Samples it for so long, ends sessions by force meanwhile, and restarts the server once, early.
fn watch(server: &Server, worker: &mut Worker, length: Duration) -> Samples {
    let (start, step) = (Instant::now(), length / SAMPLES);
    let mut sampler = Sampler::new(worker.id());
    let (mut samples, mut next_kill, mut restarted) = (Samples::default(), KILL_EVERY, false);
    while start.elapsed() < length {
        let at = start.elapsed();
        if !restarted && at > length / 10 {
            server.restart(Stop::Fast);
            restarted = true;
        }
        if at >= next_kill {
            next_kill = at + KILL_EVERY;
            let one = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                       WHERE application_name LIKE 'soak%' ORDER BY random() LIMIT 1";
            let _ = server.client().batch_execute(one);
        }
        sampler.take(server, worker, at, &mut samples);
        thread::sleep((step * u32::try_from(samples.len()).unwrap_or(1)).saturating_sub(start.elapsed()));
    }
    samples
}

/// The picture and the table, where `scripts/soak` wants them.
fn write_files(server: &Server, samples: &Samples, verdicts: &[Verdict], report: &[String]) {
    for verdict in verdicts {
        println!("{verdict}");
    }
    let Ok(directory) = env::var("SYNCGUARD_SOAK_DIR") else { return };
    let version: String = server.client().query_one("SHOW server_version", &[]).unwrap().get(0);
    let commit = env::var("SYNCGUARD_SOAK_COMMIT").unwrap_or_default();
    let heading = format!("{} s, commit {commit}, PostgreSQL {version}", seconds());
    let write = |name: &str, text: String| fs::write(format!("{directory}/{name}"), text).unwrap();
    write("soak.svg", picture::draw(samples, &heading));
    write("soak.csv", samples.csv());
    write("soak.md", table(&heading, verdicts, report));
}

fn table(heading: &str, verdicts: &[Verdict], report: &[String]) -> String {
    let mut out =
        format!("{heading}.\n\n| series | second quarter | last quarter | |\n| --- | ---: | ---: | --- |\n");
    verdicts.iter().for_each(|verdict| out.push_str(&verdict.row()));
    out.push_str("\n| activity | carried out | answers other than success |\n| --- | ---: | --- |\n");
    for line in report.iter().filter_map(|line| line.strip_prefix("did ")) {
        let (name, rest) = line.split_once(" ok=").unwrap_or((line, ""));
        let (done, others) = rest.split_once(' ').unwrap_or((rest, ""));
        let _ = writeln!(out, "| {name} | {done} | {others} |");
    }
    out
}
