//! Several processes lock against a real server while faults happen, and a checker reads what they
//! say about it.

use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::checker::{Allow, Violation, check};
use crate::history::{History, MS, Reader, now};
use crate::holder::Random;
use crate::support::{Config, Proxy, Server, Worker, wait::poll};
use crate::table::table;
use crate::weather::{ALL, Fault, Weather};

/// What a storm is made of.
pub struct Setup<'a> {
    pub seconds: u64,
    pub faults: &'a [Fault],
    /// The switches of each worker process; as many workers as there are.
    pub sabotage: &'a [&'a str],
    /// Whether the register checks fences.
    pub fenced: bool,
    pub seed: u64,
    /// The holders' operation timeout, in milliseconds.
    pub operation: u64,
}

pub struct Report {
    pub history: History,
    pub violations: Vec<Violation>,
    pub table: String,
    pub leaks: Vec<String>,
}

/// A worker and the thread that reads it.
pub struct Member {
    pub process: u32,
    pub worker: Arc<Mutex<Worker>>,
    reader: Option<thread::JoinHandle<Vec<String>>>,
}

/// The worker processes, some of them gone.
pub struct Crew<'a> {
    setup: &'a Setup<'a>,
    url: String,
    direct: String,
    next: u32,
    pub members: Vec<Member>,
    over: Vec<Member>,
}

impl<'a> Crew<'a> {
    fn new(setup: &'a Setup<'a>, url: String, direct: String) -> Self {
        Self { setup, url, direct, next: 0, members: Vec::new(), over: Vec::new() }
    }

    /// One more worker, with the switches of the place that it fills.
    pub fn start(&mut self, place: usize) {
        self.next += 1;
        let seed = (self.setup.seed * 1000 + u64::from(self.next)).to_string();
        let operation = self.setup.operation.to_string();
        let args = [
            ("operation", operation.as_str()),
            ("url", &self.url),
            ("direct", &self.direct),
            ("seed", &seed),
            ("threads", "3"),
            ("fenced", if self.setup.fenced { "1" } else { "0" }),
        ];
        let switches = [("SYNCGUARD_SABOTAGE", self.setup.sabotage[place])];
        let test = "holder::a_holder_outside_of_a_storm_does_nothing";
        let mut worker = Worker::start_alone_with(test, "holder", &args, &switches);
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
    fn end(self, history: &mut History, leaks: &mut Vec<String>) {
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
        .set("wal_writer_delay", "10s")
        .set("max_connections", "60")
        .set("log_min_messages", "fatal");
    let server = Server::start(&config);
    let register = "CREATE TABLE register (key text PRIMARY KEY, fence int8 NOT NULL DEFAULT 0, n int8 NOT NULL DEFAULT 0)";
    server.client().batch_execute(register).expect("the server takes a table");
    let client = syncguard::PgLockClient::connect(server.url()).expect("the server takes connections");
    drop(client);
    let proxy = Proxy::start(server.port());
    let mut crew = Crew::new(setup, proxy.url(server.url()), server.url().to_owned());
    (0..setup.sabotage.len()).for_each(|place| crew.start(place));
    let mut weather =
        Weather::new(&server, &proxy, Random(setup.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1));
    let end = Instant::now() + Duration::from_secs(setup.seconds);
    let mut turn = 0;
    while Instant::now() < end {
        match setup.faults {
            [] => thread::sleep(Duration::from_millis(100)),
            faults => weather.inject(faults[turn % faults.len()], &mut crew),
        }
        turn += 1;
    }
    let Weather { windows, pauses, blocked, .. } = weather;
    let disturbed = windows.iter().map(|(_, from, to)| (*from, *to)).collect();
    let mut history = History { pauses, blocked, disturbed, ..History::default() };
    let mut leaks = Vec::new();
    crew.end(&mut history, &mut leaks);
    ends_clean(&server, &mut history, &mut leaks);
    let violations = check(&history, Allow { recovery: 8000 * MS });
    let table = table(&history, &windows, &violations, (&proxy.counts(), proxy.bound()));
    Report { history, violations, table, leaks }
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
    for row in sql.query("SELECT key, n FROM register", &[]).expect("the server answers") {
        history.registers.insert(row.get(0), row.get::<_, i64>(1).unsigned_abs());
    }
}

/// Now, for windows.
pub fn window(fault: Fault, from: u64) -> (Fault, u64, u64) {
    (fault, from, now())
}

#[test]
fn no_wrong_answer_under_random_faults() {
    let setup = Setup {
        seconds: crate::seconds(),
        faults: &ALL,
        // Connections die young here, before a statement on them is called often.
        sabotage: &["", "patience", "patience"],
        fenced: true,
        seed: crate::seed(),
        operation: 700,
    };
    let report = run(&setup);
    crate::table::publish(&setup, &report);
    assert!(report.violations.is_empty(), "{:#?}", &report.violations[..report.violations.len().min(20)]);
    assert!(report.leaks.is_empty(), "{:#?}", report.leaks);
    assert!(report.history.ops.len() > 100, "something happened");
}
