//! What was logged through the `log` facade, for tests that say what must not be in it.
//!
//! The logger belongs to the process and tests run at the same time, so a test either looks for text
//! that only it can have caused, or holds [`exclusive`] together with the other tests that count lines.

use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread::{self, ThreadId};

use log::{Level, LevelFilter, Log, Metadata};

/// One log line.
#[derive(Clone, Debug)]
pub struct Line {
    pub level: Level,
    pub target: String,
    pub text: String,
    pub thread: ThreadId,
}

static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());
static ALONE: Mutex<()> = Mutex::new(());

/// A place in the log; everything after it can be asked for.
#[derive(Debug)]
pub struct Mark {
    at: usize,
    _alone: Option<MutexGuard<'static, ()>>,
}

/// Starts to capture, and remembers where. Lines of other tests that run now are seen too.
pub fn capture() -> Mark {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        log::set_logger(&Capture).expect("no other logger in a test binary");
        log::set_max_level(LevelFilter::Trace);
    });
    Mark { at: lines().len(), _alone: None }
}

/// The same, while no other test of this binary holds one of these.
pub fn exclusive() -> Mark {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Mark { _alone: Some(alone), ..capture() }
}

impl Mark {
    /// Every line since the mark, of other crates too.
    pub fn all(&self) -> Vec<Line> {
        lines().iter().skip(self.at).cloned().collect()
    }

    /// The library's own lines since the mark.
    pub fn lines(&self) -> Vec<Line> {
        self.all().into_iter().filter(|line| line.target.starts_with("syncguard")).collect()
    }

    /// Those of the library's own lines that this thread wrote.
    pub fn of_this_thread(&self) -> Vec<Line> {
        self.lines().into_iter().filter(|line| line.thread == thread::current().id()).collect()
    }

    /// Those of the library's own lines that are at least this serious.
    pub fn at_least(&self, level: Level) -> Vec<Line> {
        self.lines().into_iter().filter(|line| line.level <= level).collect()
    }

    /// # Panics
    /// When the library logged a warning or an error.
    #[track_caller]
    pub fn assert_quiet(&self) {
        let found = self.at_least(Level::Warn);
        assert!(found.is_empty(), "no warnings expected, found {found:#?}");
    }

    /// # Panics
    /// When one of these words is in a line of the library.
    #[track_caller]
    pub fn assert_without(&self, secrets: &[&str]) {
        let tells = |line: &Line| secrets.iter().any(|secret| line.text.contains(secret));
        let found: Vec<_> = self.lines().into_iter().filter(tells).collect();
        assert!(found.is_empty(), "{secrets:?} must not be logged, found {found:#?}");
    }
}

struct Capture;

impl Log for Capture {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = Line {
            level: record.level(),
            target: record.target().to_owned(),
            // Before the lock is taken: what is printed may log.
            text: record.args().to_string(),
            thread: thread::current().id(),
        };
        lines().push(line);
    }

    fn flush(&self) {}
}

fn lines() -> MutexGuard<'static, Vec<Line>> {
    LINES.lock().unwrap_or_else(PoisonError::into_inner)
}
