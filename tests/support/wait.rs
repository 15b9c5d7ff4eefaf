//! Waiting for something to be true, instead of sleeping and hoping.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use postgres::Client;

/// The usual limit: far beyond what a loaded machine needs, since only a failing test waits so long.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Looks again and again until the condition holds.
///
/// # Panics
/// After the limit, with `what` was waited for.
#[track_caller]
pub fn wait_until(limit: Duration, what: &str, condition: impl FnMut() -> bool) {
    assert!(poll(limit, condition), "waited {limit:?} in vain until {what}");
}

/// Looks again and again until there is one.
///
/// # Panics
/// After the limit, with `what` was waited for.
#[track_caller]
pub fn wait_for<T>(limit: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let mut found = None;
    wait_until(limit, what, || {
        found = look();
        found.is_some()
    });
    found.expect("it was found")
}

/// Whether the condition became true within the limit.
pub fn poll(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        if condition() {
            return true;
        }
        if start.elapsed() >= limit {
            return false;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Runs `n` threads that begin at the same moment, and returns what they returned, in order.
pub fn together<T: Send>(n: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let start = Barrier::new(n);
    let run = |i| {
        start.wait();
        work(i)
    };
    let run = &run;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..n).map(|i| scope.spawn(move || run(i))).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, T>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    })
}

/// Until the backend with this process id waits for a lock of any kind.
#[track_caller]
pub fn wait_until_backend_waits(observer: &mut Client, pid: i32) {
    let sql = "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted)";
    wait_until(LIMIT, "the backend waits for a lock", || {
        observer.query_one(sql, &[&pid]).expect("the server answers").get(0)
    });
}

/// Until a session of this application name waits for a lock; its process id.
#[track_caller]
pub fn wait_until_app_waits(observer: &mut Client, application_name: &str) -> i32 {
    let sql = "SELECT a.pid FROM pg_stat_activity a JOIN pg_locks l ON l.pid = a.pid AND NOT l.granted \
               WHERE a.application_name = $1 LIMIT 1";
    wait_for(LIMIT, &format!("a session named {application_name} waits for a lock"), || {
        let row = observer.query_opt(sql, &[&application_name]).expect("the server answers");
        row.map(|row| row.get(0))
    })
}

/// Until no backend has this process id any more.
#[track_caller]
pub fn wait_until_backend_gone(observer: &mut Client, pid: i32) {
    let sql = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)";
    wait_until(LIMIT, "the backend has ended", || {
        !observer.query_one(sql, &[&pid]).expect("the server answers").get::<_, bool>(0)
    });
}

/// Ends the test program where a test is not over after five times [`LIMIT`]: for calls that have no limit of their
/// own, such as campaigns, which would hang it.
pub struct Bounded(std::sync::mpsc::Sender<()>);

impl Bounded {
    /// Until it is dropped.
    pub fn start() -> Self {
        let (over, ended) = std::sync::mpsc::channel();
        let name = std::thread::current().name().unwrap_or("a test").to_owned();
        std::thread::spawn(move || {
            if ended.recv_timeout(LIMIT * 5) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                eprintln!("{name} hangs");
                std::process::exit(101);
            }
        });
        Self(over)
    }
}

impl Drop for Bounded {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}
