//! What a wait says in a terminal: who has the lock, since when, and how long it will be waited for. Nothing
//! where standard error is no terminal.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use syncguard::PgLockClient;

use crate::choices::Wait;
use crate::output::{age, clock, printable};
use crate::show::find;

/// How often the line is made anew.
const EVERY: Duration = Duration::from_secs(1);
/// A wait that is shorter than this says nothing.
const FIRST: Duration = Duration::from_millis(300);

/// A line that is there until the value is dropped.
pub(crate) struct Progress {
    /// Dropped first: it ends the thread's pause.
    _end: Sender<()>,
    /// Whether the line may still be written.
    open: Arc<Mutex<bool>>,
}

/// What is waited for.
pub(crate) struct Subject {
    pub(crate) key: String,
    pub(crate) permits: Option<u32>,
    pub(crate) wait: Wait,
    /// `waiting`, or what else it is.
    pub(crate) doing: &'static str,
}

impl Progress {
    pub(crate) fn start(client: &PgLockClient, subject: Subject) -> Option<Self> {
        if subject.wait == Wait::Once || !io::stderr().is_terminal() {
            return None;
        }
        let (end, ended) = mpsc::channel::<()>();
        let open = Arc::new(Mutex::new(true));
        let (client, writable) = (client.clone(), Arc::clone(&open));
        let begin = Instant::now();
        let show = move || {
            let mut pause = FIRST;
            while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                pause = EVERY;
                let line = describe(&client, &subject, begin.elapsed());
                if !write_line(&writable, &line) {
                    return;
                }
            }
        };
        // Not waited for at the end: it may be asking a server that does not answer.
        thread::Builder::new().name("syncguard-progress".to_owned()).spawn(show).ok()?;
        Some(Self { _end: end, open })
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        *self.open.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = false;
        let _ = write!(io::stderr(), "\r\x1b[K");
    }
}

fn write_line(writable: &Mutex<bool>, line: &str) -> bool {
    let open = writable.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if *open {
        let width = rustix::termios::tcgetwinsize(io::stderr()).map_or(80, |size| usize::from(size.ws_col));
        let shown: String = line.chars().take(width.saturating_sub(1)).collect();
        let _ = write!(io::stderr(), "\r{shown}\x1b[K");
    }
    *open
}

fn describe(client: &PgLockClient, subject: &Subject, waited: Duration) -> String {
    let (key, doing) = (printable(&subject.key), subject.doing);
    let rest = match subject.wait {
        Wait::UpTo(limit) => format!("gives up in {}", age(limit.saturating_sub(waited))),
        Wait::Once | Wait::Forever => "Ctrl-C gives up".to_owned(),
    };
    let holder = match subject.permits {
        Some(limit) => {
            client.semaphore(&subject.key, limit).and_then(|permits| permits.in_use()).map_or_else(
                |_| "the server does not answer".to_owned(),
                |used| format!("{used} of {limit} permits are held"),
            )
        }
        None => match find(client, &subject.key) {
            Ok(Some(held)) => {
                format!(
                    "held{} for {}, since {}, fencing token {}",
                    held.by().unwrap_or_default(),
                    age(held.age()),
                    clock(held.lease.acquired_at_ms),
                    held.lease.fence.get()
                )
            }
            Ok(None) => "free, trying".to_owned(),
            Err(_) => "the server does not answer".to_owned(),
        },
    };
    format!("{doing} {key}: {holder}; {} so far, {rest}", age(waited))
}
