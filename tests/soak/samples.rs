//! What is read of the process under load and of its server.

use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use postgres::{Client, NoTls};

use crate::support::{Server, Worker};

/// One thing that is watched: its name, its unit, and by how much it may differ between two quarters of a run, as a part
/// and in its unit.
#[derive(Debug)]
pub struct Series {
    pub name: &'static str,
    pub unit: &'static str,
    pub part: f64,
    pub more: f64,
}

const fn series(name: &'static str, unit: &'static str, part: f64, more: f64) -> Series {
    Series { name, unit, part, more }
}

/// In the order of a sample's values.
pub const SERIES: [Series; 15] = [
    series("process: resident memory", "MiB", 0.03, 1.0),
    series("process: memory that is allocated", "KiB", 0.03, 48.0),
    series("process: threads", "", 0.0, 2.0),
    // Four per session, and sessions may be three more.
    series("process: descriptors", "", 0.0, 12.0),
    series("process: activities per second", "", f64::MAX, 0.0),
    series("server: sessions", "", 0.0, 3.0),
    series("server: own memory of all sessions", "MiB", 0.1, 4.0),
    series("server: own memory of the largest session", "MiB", 0.1, 1.0),
    series("server: prepared statements of a session", "", 0.0, 4.0),
    series("server: entries in pg_locks", "", 0.2, 15.0),
    series("rows: leases", "", 0.05, 10.0),
    series("rows: counters", "", 0.02, 5.0),
    series("rows: members", "", 0.05, 10.0),
    series("size: table of leases and its indexes", "KiB", 0.15, 128.0),
    series("size: tables of counters and members", "KiB", 0.15, 128.0),
];

/// One row per sample: when, and a value per series; none where the server did not answer.
#[derive(Debug, Default)]
pub struct Samples(Vec<(Duration, [Option<f64>; SERIES.len()])>);

impl Samples {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn push(&mut self, at: Duration, values: [Option<f64>; SERIES.len()]) {
        self.0.push((at, values));
    }

    /// The series of this number: seconds and values.
    pub fn of(&self, n: usize) -> Vec<(f64, f64)> {
        self.0.iter().filter_map(|(at, values)| Some((at.as_secs_f64(), values[n]?))).collect()
    }

    pub fn seconds(&self) -> f64 {
        self.0.last().map_or(0.0, |(at, _)| at.as_secs_f64())
    }

    pub fn csv(&self) -> String {
        let mut out = String::from("seconds");
        SERIES.iter().for_each(|series| {
            let _ = write!(out, ",{} {}", series.name, series.unit);
        });
        for (at, values) in &self.0 {
            let _ = write!(out, "\n{:.1}", at.as_secs_f64());
            for value in values {
                out.push(',');
                let _ = value.map_or(Ok(()), |value| write!(out, "{value:.2}"));
            }
        }
        out + "\n"
    }
}

/// Looks at one process and its server.
pub struct Sampler {
    pid: u32,
    sql: Option<Client>,
    /// When the last sample was taken, and how many activities had been carried out by then.
    before: (Duration, f64),
}

impl Sampler {
    pub fn new(pid: u32) -> Self {
        Self { pid, sql: None, before: (Duration::ZERO, 0.0) }
    }

    pub fn take(&mut self, server: &Server, worker: &mut Worker, at: Duration, samples: &mut Samples) {
        // The process tells what only it can see: how much it has done, the statements of its own sessions.
        worker.tell("sample");
        let said = worker.hear();
        let mut told = said.split(' ').map(|number| number.parse::<f64>().ok());
        let (done, prepared) = (told.next().flatten().unwrap_or(0.0), told.next().flatten());
        let allocated = told.next().flatten();
        let rate = (done - self.before.1) / at.saturating_sub(self.before.0).as_secs_f64().max(0.001);
        self.before = (at, done);
        let process = format!("/proc/{}", self.pid);
        let seen = self.look(server);
        let seen = |n: usize| seen.as_ref().map(|seen| seen[n]);
        samples.push(
            at,
            [
                kib(&process, "VmRSS").map(|kib| kib / 1024.0),
                allocated.map(|bytes| bytes / 1024.0),
                entries(&format!("{process}/task")),
                entries(&format!("{process}/fd")),
                Some(rate),
                seen(0),
                seen(1),
                seen(2),
                prepared,
                seen(3),
                seen(4),
                seen(5),
                seen(6),
                seen(7),
                seen(8),
            ],
        );
    }

    /// What the server shows.
    fn look(&mut self, server: &Server) -> Option<[f64; 9]> {
        let mut sql = self.sql.take().or_else(|| Client::connect(server.url(), NoTls).ok())?;
        let sessions = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'soak%'";
        let pids: Vec<i32> = sql.query(sessions, &[]).ok()?.iter().map(|row| row.get(0)).collect();
        let own: Vec<f64> = pids
            .iter()
            .filter_map(|pid| kib(&format!("/proc/{pid}"), "RssAnon"))
            .map(|kib| kib / 1024.0)
            .collect();
        let counts = "SELECT ARRAY[(SELECT count(*) FROM pg_locks WHERE pid <> pg_backend_pid()), \
            (SELECT count(*) FROM syncguard_locks), (SELECT count(*) FROM syncguard_fence_counters), \
            (SELECT count(*) FROM syncguard_members), pg_total_relation_size('syncguard_locks') / 1024, \
            (pg_total_relation_size('syncguard_fence_counters') + pg_total_relation_size('syncguard_members')) / 1024]\
            ::float8[]";
        let counts: Vec<f64> = sql.query_one(counts, &[]).ok()?.get(0);
        self.sql = Some(sql);
        #[allow(clippy::cast_precision_loss, reason = "a few sessions")]
        let mut seen = vec![pids.len() as f64, own.iter().sum(), own.iter().copied().fold(0.0, f64::max)];
        seen.extend(counts);
        seen.try_into().ok()
    }
}

/// A line of a process's status, in KiB.
fn kib(process: &str, name: &str) -> Option<f64> {
    let status = fs::read_to_string(format!("{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

#[allow(clippy::cast_precision_loss, reason = "a few hundred")]
pub fn entries(directory: &str) -> Option<f64> {
    Some(fs::read_dir(directory).ok()?.count() as f64)
}
