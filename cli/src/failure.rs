//! How a command ends: exit codes, and what standard error says.

use std::error::Error;
use std::io;

use syncguard::{ErrorCode, LockError};

/// Wrong usage, as in `sysexits.h`.
pub(crate) const USAGE: u8 = 64;
/// The server cannot be used.
pub(crate) const UNAVAILABLE: u8 = 69;
/// Something of the system: no process could be started, a stream could not be written.
pub(crate) const SYSTEM: u8 = 71;
/// Somebody else has the lock.
pub(crate) const BUSY: u8 = 75;
/// The lock was lost while the program ran.
pub(crate) const LOST: u8 = 76;

/// An exit code, or a failure that has one.
pub(crate) type Ended = Result<u8, Failure>;

#[derive(Debug)]
pub(crate) enum Failure {
    /// What was asked for cannot be meant; the text says what to write instead.
    Usage(String),
    Lock(LockError),
    /// The same with what it was about.
    At(String, LockError),
    Io(String, io::Error),
    /// The reader of our output has gone: nothing to say.
    NoReader,
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

impl Failure {
    /// Says it on standard error. The exit code.
    pub(crate) fn tell(&self) -> u8 {
        match self {
            Self::NoReader => 0,
            Self::Usage(text) => {
                say(text);
                USAGE
            }
            Self::Io(what, error) => {
                say(&format!("{what}: {error}"));
                SYSTEM
            }
            Self::Lock(error) => tell_lock_error("", error),
            Self::At(what, error) => tell_lock_error(&shortened(what), error),
        }
    }
}

fn tell_lock_error(what: &str, error: &LockError) -> u8 {
    let separator = if what.is_empty() { "" } else { ": " };
    say(&format!("{what}{separator}{error}"));
    tell_causes(error);
    if let Some(advice) = advice(error) {
        say_more(advice);
    }
    match error.code() {
        ErrorCode::InvalidArgument => USAGE,
        _ => UNAVAILABLE,
    }
}

/// A name as long as a line can bear it.
fn shortened(name: &str) -> String {
    const MOST: usize = 80;
    if name.chars().count() <= MOST {
        return name.to_owned();
    }
    name.chars().take(MOST).chain(['…']).collect()
}

/// The causes of an error, a line each.
pub(crate) fn tell_causes(error: &LockError) {
    let mut told = error.to_string();
    for cause in std::iter::successors(error.source(), |&cause| cause.source()) {
        let text = cause.to_string();
        if text != told {
            say_more(&format!("because: {text}"));
        }
        told = text;
    }
}

/// What to do in a shell, where the library's text is for programs.
fn advice(error: &LockError) -> Option<&'static str> {
    match (error.code(), error.sqlstate()) {
        // The library's words for programs: "call setup_schema()".
        (ErrorCode::InvalidArgument, _) if error.to_string().contains("setup_schema()") => Some(
            "run `syncguard setup` as a role that may create tables, or name them: --schema, --table, --fence-table",
        ),
        (ErrorCode::ServiceUnavailable | ErrorCode::NetworkTimeout, None) => {
            Some("does the server run, and is its address right? See --url in `syncguard --help`")
        }
        _ => None,
    }
}

/// A line on standard error. What cannot be written has nobody to read it.
pub(crate) fn say(text: &str) {
    use std::io::Write as _;
    let _ = writeln!(io::stderr(), "syncguard: {text}");
}

fn say_more(text: &str) {
    use std::io::Write as _;
    let _ = writeln!(io::stderr(), "  {text}");
}
