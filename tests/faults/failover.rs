//! A cluster of three under Patroni, under load, is failed over again and again: `scripts/ha`. The processes of the
//! load are the holders of the storm, and the same checker judges what they say.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use syncguard::{AdvisoryKey, ExtendResult, LockOptions, PgLockClient};

use crate::checker::{Allow, Violation, check, took};
use crate::history::{History, MS, Op, Outcome, What, now};
use crate::meter::{Gap, METER, Meter, Probe, gap, granted};
use crate::patroni::{
    AGENT, POSTGRES, Patroni, connect, etcd_leader, set_synchronous, switch_over, url,
    wait_for_other_primary, wait_until_whole,
};
use crate::storm::{Setup, TABLES, Workers, what_is_left};
use crate::support::wait::{poll, wait_until};

/// How long a single operation of the load may take.
const OPERATION: u64 = 3000;

/// Processes of the load, with three threads each.
const PROCESSES: usize = 2;

/// Within this a session lock of a primary that is none any more is lost: "within 10 s", and a second.
const SESSION_LOST: Duration = Duration::from_secs(11);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Switchover,
    KillPostgres,
    KillNode,
    StopNode,
    CutNode,
    KillEtcdLeader,
    CancelCommits,
}

/// In this order; the quick ones twice.
const KINDS: [Kind; 9] = [
    Kind::KillPostgres,
    Kind::StopNode,
    Kind::Switchover,
    Kind::CutNode,
    Kind::CancelCommits,
    Kind::KillEtcdLeader,
    Kind::KillNode,
    Kind::Switchover,
    Kind::KillPostgres,
];

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Switchover => "switchover",
            Self::KillPostgres => "SIGKILL of PostgreSQL alone",
            Self::KillNode => "SIGKILL of the primary and its agent",
            Self::StopNode => "SIGSTOP of both, resumed later",
            Self::CutNode => "network of the primary's node cut",
            Self::KillEtcdLeader => "etcd's leader killed",
            Self::CancelCommits => "COMMITs that wait for the standby cancelled, then SIGKILL of PostgreSQL",
        }
    }
}

/// One failover, by the clock that all processes share.
struct Round {
    kind: Kind,
    from: u64,
    to: u64,
}

fn seconds(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64()
}

struct Run<'a> {
    cluster: &'a mut Patroni,
    sessions: PgLockClient,
    rounds: Vec<Round>,
    /// What became of the session lock that was held on the primary: how long until it was lost.
    lost: Vec<(Kind, Option<Duration>)>,
    /// In how many rounds a guard with a long ttl kept its lease.
    kept: usize,
}

/// Two thirds of it are more than a failover takes.
const LONG: Duration = Duration::from_secs(60);

impl Run<'_> {
    fn round(&mut self, kind: Kind) {
        let old = wait_until_whole();
        let key = AdvisoryKey::from_text("session");
        let mut guard = None;
        wait_until(Duration::from_secs(60), "a session lock is granted by the primary", || {
            guard = self.sessions.try_advisory_lock(&key).ok().flatten();
            guard.is_some()
        });
        let guard = guard.expect("waited for");
        let options = LockOptions::new().ttl(LONG).timeout(Duration::from_secs(60));
        let long = self.sessions.lock_with("long", &options).expect("the primary grants a free key");
        let from = now();
        let start = Instant::now();
        println!("{:>7.1} s: {} at node {old}", seconds(from) % 100_000.0, kind.name());
        self.bring_about(kind, old);
        if kind != Kind::KillEtcdLeader {
            // The primary that it is on is none any more: nobody may believe in it for long.
            let left = SESSION_LOST.saturating_sub(start.elapsed());
            let is_lost = poll(left, || !guard.is_held());
            self.lost.push((kind, is_lost.then(|| start.elapsed())));
            let new = wait_for_other_primary(old);
            println!("          node {new} after {:.1} s", start.elapsed().as_secs_f64());
        }
        drop(guard);
        // What a resumed or rejoined node does falls into the round, too.
        thread::sleep(Duration::from_secs(2));
        self.undo(kind, old);
        wait_until_whole();
        let extended = long.is_held() && matches!(long.extend(LONG), Ok(ExtendResult::Extended { .. }));
        self.kept += usize::from(extended);
        self.rounds.push(Round { kind, from, to: now() });
    }

    fn bring_about(&mut self, kind: Kind, old: usize) {
        match kind {
            Kind::Switchover => switch_over(old),
            Kind::KillPostgres => self.cluster.signal(old, POSTGRES, Signal::KILL),
            Kind::KillNode => {
                self.cluster.signal(old, AGENT, Signal::KILL);
                self.cluster.signal(old, POSTGRES, Signal::KILL);
                self.cluster.reap_agent(old);
            }
            Kind::StopNode => {
                self.cluster.signal(old, AGENT, Signal::STOP);
                self.cluster.signal(old, POSTGRES, Signal::STOP);
            }
            Kind::CutNode => self.cluster.cable(old, false),
            Kind::KillEtcdLeader => {
                let leader = etcd_leader().expect("etcd has a leader");
                self.cluster.kill_etcd(leader);
                wait_until(Duration::from_secs(60), "etcd has another leader", || {
                    etcd_leader().is_some_and(|new| new != leader)
                });
                thread::sleep(Duration::from_secs(3));
                self.cluster.start_etcd(leader);
            }
            Kind::CancelCommits => {
                cancel_commits(self.cluster, old, Duration::from_secs(2));
                self.cluster.signal(old, POSTGRES, Signal::KILL);
            }
        }
    }

    fn undo(&mut self, kind: Kind, old: usize) {
        match kind {
            Kind::KillNode => self.cluster.start_agent(old),
            Kind::StopNode => {
                self.cluster.signal(old, POSTGRES, Signal::CONT);
                self.cluster.signal(old, AGENT, Signal::CONT);
            }
            Kind::CutNode => self.cluster.cable(old, true),
            _ => {}
        }
    }
}

/// The standbys get nothing more, and whoever waits for them is cancelled.
fn cancel_commits(cluster: &Patroni, primary: usize, time: Duration) {
    let mut sql = connect(primary).expect("the primary takes connections");
    cluster.stop_sending(primary);
    let end = Instant::now() + time;
    let cancel = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE application_name = 'syncguard' AND wait_event = 'SyncRep'";
    while Instant::now() < end {
        let _ = sql.query(cancel, &[]);
        thread::sleep(Duration::from_millis(100));
    }
}

struct Report {
    history: History,
    violations: Vec<Violation>,
    rounds: Vec<Round>,
    gaps: Vec<Gap>,
    lost: Vec<(Kind, Option<Duration>)>,
    kept: usize,
    leaks: Vec<String>,
}

/// Puts load on the cluster, has this done to it, and judges.
fn under(cluster: &mut Patroni, seed: u64, act: impl FnOnce(&mut Run<'_>)) -> Report {
    let primary = wait_until_whole();
    let mut sql = connect(primary).expect("the primary takes connections");
    sql.batch_execute(
        "DROP TABLE IF EXISTS register, effects, probe, syncguard_locks, syncguard_fence_counters, syncguard_members;
         CREATE TABLE probe (id int4 PRIMARY KEY, n int8 NOT NULL DEFAULT 0);
         INSERT INTO probe SELECT generate_series(0, 2)",
    )
    .and_then(|()| sql.batch_execute(TABLES))
    .expect("the primary makes tables");
    drop(sql);
    let url = url();
    let builder = PgLockClient::builder().create_members_table(true);
    let sessions = builder.connect(&url).expect("the cluster takes connections");
    let setup = Setup {
        seconds: 0,
        faults: &[],
        without: "",
        practice: false,
        kinds: true,
        fenced: true,
        seed,
        operation: OPERATION,
        pool: 3,
        // One role for all.
        pooled: true,
    };
    let direct = format!("{url}&connect_timeout=1&tcp_user_timeout=2");
    let sessions_url = url.clone();
    let mut workers = Workers::new(&setup, url, direct);
    (0..PROCESSES).for_each(|place| workers.start(place));
    let (probe, meter) = (Probe::start(), Meter::start(&sessions_url));
    let mut run = Run { cluster, sessions, rounds: Vec::new(), lost: Vec::new(), kept: 0 };
    act(&mut run);
    let Run { rounds, lost, kept, sessions, .. } = run;
    let (writes, metered) = (probe.end(), meter.end());
    let disturbed = rounds.iter().map(|round| (round.from, round.to)).collect();
    let (mut history, mut leaks) = (History { disturbed, ..History::default() }, Vec::new());
    history.ops.extend(metered);
    workers.end(&mut history, &mut leaks);
    drop(sessions);
    let primary = wait_until_whole();
    let mut sql = connect(primary).expect("the primary takes connections");
    what_is_left(&mut sql, &mut history);
    let mut grants: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for op in history.ops.iter().filter(|op| op.process == METER && granted(op)) {
        let thread = op.key.split('-').next().unwrap_or_default();
        grants.entry(thread.to_owned()).or_default().push(op.recv);
    }
    let gaps = rounds.iter().map(|round| gap(&writes, &grants, round.from, round.to)).collect();
    let violations = check(&history, Allow { recovery: 30_000 * MS });
    Report { history, violations, rounds, gaps, lost, kept, leaks }
}

#[derive(Default)]
struct Row {
    times: u64,
    own: Vec<u64>,
    beyond: Vec<u64>,
    calls: u64,
    grants: u64,
    unknown: [u64; 4],
    worst: Option<(i64, u64, u64)>,
    violations: u64,
}

impl Row {
    fn add(&mut self, history: &History, op: &Op) {
        self.calls += 1;
        self.grants += u64::from(granted(op));
        if let Outcome::Unknown(there) = op.outcome {
            let at = match (&op.what, there) {
                (What::Acquire, Some(true)) => 0,
                (What::Acquire, Some(false)) => 1,
                (What::Acquire, None) => 2,
                _ => 3,
            };
            self.unknown[at] += 1;
        }
        if let Some(took) = took(history, op).filter(|_| op.bound > 0) {
            let beyond = took.cast_signed() - op.bound.cast_signed();
            self.worst = self.worst.max(Some((beyond, took / MS, op.bound / MS)));
        }
    }

    fn line(&mut self, name: &str) -> String {
        let figures = |list: &mut Vec<u64>| {
            list.sort_unstable();
            match (list.get(list.len() / 2), list.last()) {
                (Some(median), Some(longest)) => {
                    format!("{:.2} / {:.2}", seconds(*median), seconds(*longest))
                }
                _ => String::new(),
            }
        };
        let (own, beyond) = (figures(&mut self.own), figures(&mut self.beyond));
        let [there, not, unasked, others] = self.unknown;
        let worst = self.worst.map_or_else(String::new, |(_, took, bound)| format!("{took} of {bound}"));
        let Self { times, calls, grants, violations, .. } = self;
        format!(
            "| {name} | {times} | {own} | {beyond} | {calls} | {grants} | {there} / {not} / {unasked} | {others} | {worst} | {violations} |"
        )
    }
}

fn table(report: &Report, seconds: u64, seed: u64) -> Vec<String> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let cores = thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let version = crate::support::binaries::binaries().version;
    let mut lines = vec![format!(
        "Commit {}, PostgreSQL {}.{}, {}, {}, {cores} cores, `scripts/ha {seconds}`, seed {seed}: {} calls of three processes with three threads each.",
        variable("SYNCGUARD_FAULT_COMMIT"),
        version.0,
        version.1,
        variable("SYNCGUARD_HA_PATRONI"),
        variable("SYNCGUARD_HA_ETCD"),
        report.history.ops.len()
    )];
    lines.push(String::new());
    lines.push("| what was done to the primary | times | nobody can write, s: median / longest | beyond it without a grant, s: median / longest | calls | grants | unknown acquires (in the table / not / nobody could look) | unknown others | longest call and its bound, ms | violations |".to_owned());
    lines.push("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |".to_owned());
    let mut rows: BTreeMap<Option<Kind>, Row> = BTreeMap::new();
    let at = |time: u64| {
        report.rounds.iter().find(|round| (round.from..=round.to).contains(&time)).map(|round| round.kind)
    };
    for op in report.history.ops.iter().filter(|op| op.set.is_none_or(|(_, place)| place == 0)) {
        rows.entry(at(op.send).or_else(|| at(op.recv))).or_default().add(&report.history, op);
    }
    for (round, gap) in report.rounds.iter().zip(&report.gaps) {
        let row = rows.entry(Some(round.kind)).or_default();
        row.times += 1;
        if round.kind != Kind::KillEtcdLeader {
            row.own.push(gap.own);
            row.beyond.push(gap.beyond);
        }
    }
    for violation in &report.violations {
        rows.entry(at(violation.at)).or_default().violations += 1;
    }
    let mut names = KINDS.to_vec();
    names.sort_unstable();
    names.dedup();
    for name in names.into_iter().map(Some).chain([None]) {
        let Some(row) = rows.get_mut(&name) else { continue };
        lines.push(row.line(name.map_or("(nothing)", Kind::name)));
    }
    lines.push(String::new());
    lines.push(sessions(&report.lost));
    lines.push(String::new());
    lines.push(format!(
        "A lease of {} s, renewed by its guard, that was held through each failover was kept in {} of {}.",
        LONG.as_secs(),
        report.kept,
        report.rounds.len()
    ));
    lines
}

/// What became of session locks, as a sentence.
fn sessions(lost: &[(Kind, Option<Duration>)]) -> String {
    let mut out = format!("Session locks that were held on the primary: {}, all lost", lost.len());
    let mut longest: BTreeMap<Kind, Duration> = BTreeMap::new();
    for (kind, after) in lost {
        let entry = longest.entry(*kind).or_default();
        *entry = (*entry).max(after.unwrap_or(Duration::MAX));
    }
    for (kind, after) in longest {
        let _ = write!(out, "; {}: after at most {:.1} s", kind.name(), after.as_secs_f64());
    }
    out + "."
}

/// Nothing but a run of `scripts/ha`, which brings what this needs, does anything here.
#[test]
fn under_load() {
    let Ok(time) = std::env::var("SYNCGUARD_HA_SECONDS") else { return };
    let time: u64 = time.parse().expect("seconds");
    let path = |name: &str| PathBuf::from(std::env::var(name).expect("scripts/ha says where"));
    let mut cluster = Patroni::start(&path("SYNCGUARD_HA_DIR"), &path("SYNCGUARD_HA_TOOLS"));
    let seed = crate::seed();

    let report = under(&mut cluster, seed, |run| {
        let end = Instant::now() + Duration::from_secs(time);
        for kind in KINDS.iter().cycle() {
            run.round(*kind);
            if Instant::now() >= end {
                break;
            }
        }
    });
    let lines = table(&report, time, seed);
    lines.iter().for_each(|line| println!("{line}"));
    let unknown = |op: &&Op| op.what == What::Acquire && matches!(op.outcome, Outcome::Unknown(_));
    let cancelled = |op: &&Op| {
        report
            .rounds
            .iter()
            .any(|round| round.kind == Kind::CancelCommits && (round.from..=round.to).contains(&op.recv))
    };
    assert!(report.violations.is_empty(), "{:#?}", &report.violations[..report.violations.len().min(20)]);
    assert!(report.leaks.is_empty(), "{:#?}", report.leaks);
    assert!(
        report.lost.iter().all(|(_, after)| after.is_some()),
        "a session lock is believed in: {:?}",
        report.lost
    );
    assert!(
        report.history.ops.iter().filter(unknown).any(|op| cancelled(&op)),
        "a cancelled COMMIT is unknown"
    );

    let control = control(&mut cluster, seed);
    println!("{control}");
    if let Ok(page) = std::env::var("SYNCGUARD_FAULT_PAGE") {
        crate::page::write(&page, "ha", &[&*lines, &[String::new(), control]].concat());
    }
}

/// The same load where the checker has to find something: no standby has what the primary acknowledged last.
fn control(cluster: &mut Patroni, seed: u64) -> String {
    set_synchronous(false);
    let report = under(cluster, seed, |run| {
        let old = wait_until_whole();
        thread::sleep(Duration::from_secs(3));
        run.cluster.stop_sending(old);
        thread::sleep(Duration::from_secs(2));
        run.cluster.signal(old, POSTGRES, Signal::KILL);
        wait_for_other_primary(old);
        thread::sleep(Duration::from_secs(5));
    });
    set_synchronous(true);
    let repeated = report.violations.iter().filter(|found| found.rule == "fence").count();
    let others = report.violations.len() - repeated;
    assert!(
        repeated > 0,
        "asynchronous replication loses grants, and nobody noticed: {:?}",
        report.violations
    );
    format!(
        "The negative control, asynchronous replication whose sender is stopped two seconds before the SIGKILL of PostgreSQL: {repeated} fences repeated or out of order, {others} other violations."
    )
}
