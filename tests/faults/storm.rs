//! Several processes lock against a real server while faults happen, and a checker reads what they
//! say about it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::checker::{Allow, Violation, check, took};
use crate::environments::{self, Drawn};
use crate::history::{History, MS, Op, Outcome, Reader, What, is_reader, now};
use crate::holder::Random;
use crate::order_rules;
use crate::safeguards::without;
use crate::support::bouncer::Bouncer;
use crate::support::room::Room;
use crate::support::{Action, Config, Proxy, Server, Worker, wait::poll, worker};
use crate::tickets::Watch;
use crate::told::shown;
use crate::weather::{ALL, Fault, POOLED, Weather};

/// Worker processes of a storm.
const WORKERS: usize = 3;

/// Storms at most until everything happened.
const STORMS: u64 = 5;

/// What the holders protect.
pub const TABLES: &str = "CREATE TABLE register (key text PRIMARY KEY, fence int8 NOT NULL DEFAULT 0, n int8 NOT NULL DEFAULT 0); \
    CREATE TABLE effects (job text NOT NULL, slot int8 NOT NULL)";

/// Settings of PgBouncer: nobody waits for a connection of its, and it connects again at once.
const POOLER: [(&str, &str); 3] = [
    ("ignore_startup_parameters", "extra_float_digits,options"),
    ("default_pool_size", "20"),
    ("server_login_retry", "0.2"),
];

/// What a storm is made of.
#[allow(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct Setup<'a> {
    pub seconds: u64,
    pub faults: &'a [Fault],
    /// The safeguards that are taken out, see [`safeguards`](crate::safeguards).
    pub without: &'static str,
    /// Whether all workers but the first practise. Connections die young here, before a statement on them
    /// is called so often that the driver prepares it; so they call all that they need often, now and then.
    pub practice: bool,
    /// Whether sets, permits, leaders, runs and readers are there, too.
    pub kinds: bool,
    /// Whether the register checks fences.
    pub fenced: bool,
    pub seed: u64,
    /// The holders' operation timeout, in milliseconds.
    pub operation: u64,
    /// The connections of each holder's pool; it has three threads.
    pub pool: u32,
    /// Whether PgBouncer in transaction mode is before the server.
    pub pooled: bool,
}

pub struct Report {
    pub history: History,
    pub violations: Vec<Violation>,
    pub table: String,
    pub leaks: Vec<String>,
    /// Calls by the driver's own prepared statements.
    pub bound: u64,
    /// Messages in which safeguards were taken out.
    pub rewritten: u64,
}

/// A worker and the thread that reads it.
pub struct Member {
    pub process: u32,
    pub worker: Arc<Mutex<Worker>>,
    reader: Option<thread::JoinHandle<Vec<String>>>,
}

/// The worker processes, some of them gone.
pub struct Workers<'a> {
    setup: &'a Setup<'a>,
    url: String,
    direct: String,
    next: u32,
    pub members: Vec<Member>,
    over: Vec<Member>,
    drawn: Drawn,
}

impl<'a> Workers<'a> {
    pub fn new(setup: &'a Setup<'a>, url: String, direct: String) -> Self {
        Self { setup, url, direct, next: 0, members: Vec::new(), over: Vec::new(), drawn: Drawn::default() }
    }

    /// One more worker, in this place.
    pub fn start(&mut self, place: usize) {
        self.next += 1;
        let seed = self.setup.seed * 1000 + u64::from(self.next);
        // A pooler's sessions are all of one role.
        let url = if self.setup.pooled { self.url.clone() } else { self.drawn.url(&self.url, seed) };
        let (seed, process) = (seed.to_string(), self.next.to_string());
        let operation = self.setup.operation.to_string();
        let pool = self.setup.pool.to_string();
        let args = [
            ("pool", pool.as_str()),
            ("operation", &operation),
            ("url", &url),
            ("direct", &self.direct),
            ("seed", &seed),
            ("process", &process),
            ("threads", "3"),
            ("fenced", if self.setup.fenced { "1" } else { "0" }),
            ("kinds", if self.setup.kinds { "1" } else { "0" }),
            ("practice", if self.setup.practice && place > 0 { "1" } else { "0" }),
        ];
        let test = "holder::a_holder_outside_of_a_storm_does_nothing";
        let mut worker = Worker::start_alone(test, "holder", &args);
        worker.expect("ready");
        let worker = Arc::new(Mutex::new(worker));
        let there = Arc::clone(&worker);
        let reader = thread::spawn(move || {
            let mut lines = Vec::new();
            loop {
                let heard = lock(&there).try_hear(Duration::from_millis(1));
                match heard {
                    Ok(line) => lines.push(line),
                    Err(RecvTimeoutError::Timeout) => thread::sleep(Duration::from_millis(3)),
                    Err(RecvTimeoutError::Disconnected) => return lines,
                }
            }
        });
        self.members.insert(place, Member { process: self.next, worker, reader: Some(reader) });
    }

    /// `kill -9`, and another one in its place.
    pub fn kill(&mut self, place: usize) {
        let member = self.members.remove(place);
        lock(&member.worker).kill();
        self.over.push(member);
        self.start(place);
    }

    /// Ends all of them and collects what they said.
    pub fn end(self, history: &mut History, leaks: &mut Vec<String>) {
        for member in &self.members {
            lock(&member.worker).tell("stop");
        }
        let killed: Vec<u32> = self.over.iter().map(|member| member.process).collect();
        for mut member in self.over.into_iter().chain(self.members) {
            let lines = member.reader.take().expect("taken once").join().expect("a reader does not fail");
            let mut reader = Reader::new(member.process);
            for line in &lines {
                reader.line(line, history);
            }
            reader.end(history);
            if killed.contains(&member.process) {
                continue;
            }
            match lines.last().and_then(|line| line.strip_prefix("closed ")) {
                Some(rest) if rest.starts_with("true") && rest.ends_with('3') => {}
                last => leaks.push(format!("process {} did not end cleanly: {last:?}", member.process)),
            }
        }
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a storm and has it checked.
pub fn run(setup: &Setup<'_>) -> Report {
    // One at a time: they share two cores and a clock.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = lock(&ALONE);
    let config = Config::new()
        .clock()
        .set("max_wal_size", "64MB")
        .set("wal_writer_delay", "10s")
        .set("max_connections", "60")
        .set("log_min_messages", "fatal");
    let server = Server::start(&config);
    server.client().batch_execute(TABLES).expect("the server takes tables");
    let builder = syncguard::PgLockClient::builder().create_members_table(true);
    drop(builder.connect(server.url()).expect("the server takes connections"));
    environments::create(&mut server.client());
    let bouncer = setup.pooled.then(|| Bouncer::before(server.port(), &POOLER));
    let port = bouncer.as_ref().map_or(server.port(), Bouncer::port);
    let proxy = Proxy::start(port);
    let missing = setup.without;
    if !missing.is_empty() {
        proxy.rewrite(move |said| without(missing, said));
    }
    let front = server.url().replace(&format!(":{}", server.port()), &format!(":{port}"));
    let mut workers = Workers::new(setup, proxy.url(&front), server.url().to_owned());
    (0..WORKERS).for_each(|place| workers.start(place));
    let watch = Watch::start(server.url());
    let mut weather =
        Weather::new(&server, &proxy, Random(setup.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1));
    let end = Instant::now() + Duration::from_secs(setup.seconds);
    let mut turn = 0;
    while Instant::now() < end {
        match setup.faults {
            [] => thread::sleep(Duration::from_millis(100)),
            faults => weather.inject(faults[turn % faults.len()], &mut workers),
        }
        turn += 1;
    }
    let Weather { windows, pauses, blocked, .. } = weather;
    let times = |which: fn(Fault) -> bool| {
        windows.iter().filter(|(fault, ..)| which(*fault)).map(|(_, from, to)| (*from, *to)).collect()
    };
    let (disturbed, unsettled, away) = (times(|_| true), times(Fault::unsettles), times(Fault::keeps_away));
    let mut history = History { pauses, blocked, disturbed, unsettled, away, ..History::default() };
    let mut leaks = Vec::new();
    let environments = workers.drawn.sentence();
    workers.end(&mut history, &mut leaks);
    history.tickets = watch.end();
    // It keeps its connections.
    drop(bouncer);
    ends_clean(&server, &mut history, &mut leaks);
    let violations = check(&history, Allow { recovery: 8000 * MS });
    let version = server.client().query_one("SELECT 'PostgreSQL ' || current_setting('server_version')", &[]);
    let version: String = version.expect("the server answers").get(0);
    let mut table = table((setup, &version), &history, &windows, &violations, &proxy);
    if !environments.is_empty() {
        let _ = writeln!(table, "\n{environments}");
    }
    Report { history, violations, table, leaks, bound: proxy.bound(), rewritten: proxy.rewritten() }
}

/// Nothing is left but rows that are over.
fn ends_clean(server: &Server, history: &mut History, leaks: &mut Vec<String>) {
    let mut sql = server.client();
    let mut count = |what: &str, query: &str| {
        let mut found = 0;
        let gone = poll(Duration::from_secs(10), || {
            found = sql.query_one(query, &[]).expect("the server answers").get::<_, i64>(0);
            found == 0
        });
        if !gone {
            leaks.push(format!("{found} {what}"));
        }
    };
    count(
        "connections",
        "SELECT count(*) FROM pg_stat_activity WHERE application_name IN ('syncguard', 'register')",
    );
    count("advisory locks", "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'");
    count(
        "live rows",
        "SELECT count(*) FROM syncguard_locks WHERE expires_at_ms > extract(epoch FROM clock_timestamp()) * 1000 - 1000",
    );
    count(
        "live readers and announcements",
        "SELECT count(*) FROM syncguard_members WHERE expires_at_ms > extract(epoch FROM clock_timestamp()) * 1000 - 1000",
    );
    what_is_left(&mut sql, history);
}

/// The registers, the effects of jobs and the counters at the end.
pub fn what_is_left(sql: &mut postgres::Client, history: &mut History) {
    for row in sql.query("SELECT key, n FROM register", &[]).expect("the server answers") {
        history.registers.insert(row.get(0), row.get::<_, i64>(1).unsigned_abs());
    }
    for row in sql.query("SELECT job, slot FROM effects", &[]).expect("the server answers") {
        history.effects.push((row.get(0), row.get::<_, i64>(1).unsigned_abs()));
    }
    let counters = "SELECT substr(fence_key, 7), fence FROM syncguard_fence_counters";
    for row in sql.query(counters, &[]).expect("the server answers") {
        history.counters.insert(shown(row.get(0)), row.get::<_, i64>(1).unsigned_abs());
    }
}

/// One line per fault: the operations that were under way while it was there.
fn table(
    (setup, version): (&Setup<'_>, &str),
    history: &History,
    windows: &[(Fault, u64, u64)],
    violations: &[Violation],
    proxy: &Proxy,
) -> String {
    let cores = thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let commit = std::env::var("SYNCGUARD_FAULT_COMMIT").map(|commit| format!("commit {commit}, "));
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{}{}{}, {cores} cores, `SYNCGUARD_FAULT_SECONDS={}`, seed {}: {} operations of three processes with three threads each.\n",
        commit.unwrap_or_default(),
        version,
        if setup.pooled { " behind PgBouncer in transaction mode" } else { "" },
        setup.seconds,
        setup.seed,
        history.ops.len()
    );
    let _ = writeln!(
        out,
        "| fault | injected | operations | refused | failed | unknown acquires (in the table / not / nobody could look) | unknown extends / releases / writes / ends of runs | longest call and its bound, ms | violations |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    );
    let mut names: Vec<&str> = ALL.iter().map(|fault| fault.name()).collect();
    names.push("(none)");
    let at = |time: u64| {
        let end = windows.partition_point(|(_, from, _)| *from <= time);
        end.checked_sub(1).map(|at| &windows[at]).filter(|(_, _, to)| time <= *to)
    };
    let mut rows: BTreeMap<&str, [u64; 11]> = BTreeMap::new();
    let mut worst: BTreeMap<&str, (i64, u64, u64)> = BTreeMap::new();
    for op in history.ops.iter().filter(|op| op.set.is_none_or(|(_, place)| place == 0)) {
        let window = at(op.send).or_else(|| at(op.recv));
        let name = window.map_or("(none)", |(fault, ..)| fault.name());
        let row = rows.entry(name).or_default();
        row[0] += 1;
        match (&op.outcome, &op.what) {
            (Outcome::Refused, _) => row[1] += 1,
            (Outcome::Failed(code), _) if code == "AlreadyDone" => row[1] += 1,
            (Outcome::Failed(_), _) => row[2] += 1,
            (Outcome::Unknown(Some(true)), What::Acquire) => row[3] += 1,
            (Outcome::Unknown(Some(false)), What::Acquire) => row[4] += 1,
            (Outcome::Unknown(None), What::Acquire) => row[5] += 1,
            (Outcome::Unknown(_), What::Extend) => row[6] += 1,
            (Outcome::Unknown(_), What::Release) => row[7] += 1,
            (Outcome::Unknown(_), What::Write) => row[8] += 1,
            (Outcome::Unknown(_), What::Finish) => row[10] += 1,
            (Outcome::Ok { .. } | Outcome::Pending, _) | (_, What::Observe | What::Read) => {}
        }
        if let Some(took) = took(history, op).filter(|_| op.bound > 0) {
            let beyond = (took.cast_signed() - op.bound.cast_signed()) / MS.cast_signed();
            let worst = worst.entry(name).or_insert((i64::MIN, 0, 0));
            *worst = (*worst).max((beyond, took / MS, op.bound / MS));
        }
    }
    for violation in violations {
        rows.entry(at(violation.at).map_or("(none)", |(fault, ..)| fault.name())).or_default()[9] += 1;
    }
    for name in names {
        let Some(row) = rows.get(name) else { continue };
        let injected = windows.iter().filter(|(fault, ..)| fault.name() == name).count();
        let [all, refused, failed, there, not, unasked, extends, releases, writes, violations, runs] = row;
        let worst = worst.get(name).map_or_else(String::new, |(_, took, bound)| format!("{took} of {bound}"));
        let _ = writeln!(
            out,
            "| {name} | {injected} | {all} | {refused} | {failed} | {there} / {not} / {unasked} | {extends} / {releases} / {writes} / {runs} | {worst} | {violations} |"
        );
    }
    let _ = writeln!(
        out,
        "\nOn single connections: {}. Calls by the driver's own prepared statements: {}.",
        counted(&proxy.counts()),
        proxy.bound()
    );
    let kinds: Vec<_> = kinds(history).iter().map(|(what, times)| format!("{what}: {times}")).collect();
    let _ = writeln!(out, "\nBeside plain locks: {}.", kinds.join(", "));
    let judged = order_rules::check(history, &mut Vec::new());
    let _ = writeln!(
        out,
        "\nPairs of a grant in order and a ticket seen ahead of it before its call began: {}. The longest time that a free key \
         was waited for by whoever was first, outside of faults that keep clients away: {} ms, of {}. Looks at the tickets: {}.",
        judged.pairs,
        judged.longest / MS,
        order_rules::STANDSTILL / MS,
        history.tickets.len()
    );
    let late =
        history.ops.iter().filter(|op| op.what == What::Write && op.outcome == Outcome::Refused).count();
    let _ = writeln!(
        out,
        "\nWrites of holders that came too late, refused by their fence: {late}. Pauses: {}. At the end: no connection, \
         advisory lock or live row was left, so every acquire of an unknown outcome that was in the table was let go.",
        history.pauses.len()
    );
    out
}

/// How often each kind of lease was granted, and what the runs came to.
pub fn kinds(history: &History) -> [(&'static str, usize); 12] {
    let granted = |of: &dyn Fn(&Op) -> bool| {
        let is_ok = |op: &&Op| op.what == What::Acquire && matches!(op.outcome, Outcome::Ok { .. });
        history.ops.iter().filter(is_ok).filter(|op| of(op)).count()
    };
    let done =
        history.ops.iter().filter(|op| op.what == What::Finish && matches!(op.outcome, Outcome::Ok { .. }));
    [
        ("sets", granted(&|op| op.set.is_some_and(|(_, place)| place == 0))),
        ("permits", granted(&|op| op.limit > 0)),
        ("terms and locks of leaders' keys", granted(&|op| op.key.starts_with("lead"))),
        (
            "looks at leaders",
            history.ops.iter().filter(|op| op.what == What::Observe && op.key != "*").count(),
        ),
        ("readers", granted(&|op| is_reader(&op.key))),
        (
            "their fenced transactions",
            history
                .ops
                .iter()
                .filter(|op| op.what == What::Read && matches!(op.outcome, Outcome::Ok { .. }))
                .count(),
        ),
        ("granted in order", granted(&|op| op.order == Some(0))),
        ("with a priority", granted(&|op| op.order.is_some_and(|priority| priority > 0))),
        ("owners and notes shown", history.named.len()),
        ("runs begun", history.runs.len()),
        ("slots done", done.count()),
        ("effects", history.effects.len()),
    ]
}

fn counted(counts: &BTreeMap<&'static str, u64>) -> String {
    counts.iter().map(|(what, times)| format!("{what}: {times}")).collect::<Vec<_>>().join(", ")
}

/// Now, for windows.
pub fn window(fault: Fault, from: u64) -> (Fault, u64, u64) {
    (fault, from, now())
}

#[test]
fn no_wrong_answer_under_random_faults() {
    worker::part("storm", |parent| {
        let setup = Setup {
            seconds: crate::seconds(),
            faults: &ALL,
            without: "",
            practice: true,
            kinds: true,
            fenced: true,
            seed: crate::seed(),
            operation: 700,
            pool: 2,
            pooled: false,
        };
        let report = storms(setup, &|line| parent.say(line));
        assert!(report.bound > 100, "statements that the driver has prepared were met, too");
    });
    // Its server has a small disk, which can be filled.
    let room = Room::create();
    let mut storm = Worker::start_in(&room, 400, "storm::no_wrong_answer_under_random_faults", "storm");
    let (lines, status) = storm.report(Duration::from_secs((crate::seconds() + 120) * STORMS));
    assert!(status.success(), "the storm has found something: {status}");
    if let Ok(page) = std::env::var("SYNCGUARD_FAULT_PAGE") {
        crate::page::write(&page, "storm", &lines);
    }
}

/// How many of each rule, and some of them.
fn summary(violations: &[Violation]) -> String {
    let mut rules: BTreeMap<&str, Vec<&Violation>> = BTreeMap::new();
    violations.iter().for_each(|found| rules.entry(found.rule).or_default().push(found));
    let some = |(rule, found): (&&str, &Vec<&Violation>)| {
        format!("{} × {rule}: {:#?}", found.len(), &found[..found.len().min(5)])
    };
    rules.iter().map(some).collect::<Vec<_>>().join("\n")
}

/// Storms, one seed after the other, until everything happened at least once: the rarest is missing from
/// one short storm in twenty. None of them may find anything. What the last one says.
fn storms(mut setup: Setup<'_>, say: &dyn Fn(&str)) -> Report {
    let mut missing = None;
    for _ in 0..STORMS {
        let report = run(&setup);
        report.table.lines().for_each(say);
        assert!(report.violations.is_empty(), "{}", summary(&report.violations));
        assert!(report.leaks.is_empty(), "{:#?}", report.leaks);
        let absent = absent(&report, setup.pooled);
        missing.get_or_insert_with(|| absent.clone()).retain(|what| absent.contains(what));
        if missing.as_ref().is_some_and(Vec::is_empty) {
            return report;
        }
        setup.seed += 1;
    }
    panic!("this did not happen in {STORMS} storms: {missing:?}");
}

/// What did not happen in a storm and has to happen in one. Behind a pooler there are so few operations that none may
/// be granted after another one that was seen ahead of it.
fn absent(report: &Report, pooled: bool) -> Vec<&'static str> {
    let copies = [Action::Zombie(None), Action::Twice(Duration::ZERO)];
    let pairs = order_rules::check(&report.history, &mut Vec::new()).pairs;
    let others = [
        ("extends or renewals that come late", report.table.contains(copies[0].name())),
        ("extends or renewals that come twice", report.table.contains(copies[1].name())),
        ("grants of the key after whoever was ahead", pooled || pairs > 0),
        ("a hundred operations", report.history.ops.len() > 100),
    ];
    let kinds = kinds(&report.history).into_iter().map(|(what, times)| (what, times > 0));
    kinds.chain(others).filter(|(_, happened)| !happened).map(|(what, _)| what).collect()
}

/// A third of the time: the copies that come late are what is different here.
#[test]
fn no_wrong_answer_under_random_faults_behind_a_transaction_pooler() {
    let setup = Setup {
        seconds: crate::seconds() / 3,
        faults: &POOLED,
        without: "",
        practice: false,
        kinds: true,
        fenced: true,
        seed: crate::seed(),
        operation: 700,
        pool: 2,
        pooled: true,
    };
    let report = storms(setup, &|line| println!("{line}"));
    assert_eq!(report.bound, 0, "nothing is prepared by the driver behind a pooler");
    if let Ok(page) = std::env::var("SYNCGUARD_FAULT_PAGE") {
        let lines: Vec<String> = report.table.lines().map(str::to_owned).collect();
        crate::page::write(&page, "pooled storm", &lines);
    }
}
