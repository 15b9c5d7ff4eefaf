//! What commands print: tables for people, JSON for programs.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::time::{Duration, SystemTime};

use serde_json::{Map, Value, json};
use syncguard::LockInfo;

use crate::choices::spoken;
use crate::failure::Failure;

/// A live lease, at a time of the server's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) key: String,
    pub(crate) lease: LockInfo,
    pub(crate) now_ms: i64,
}

impl Held {
    /// Its holder in a sentence, after "is held". Of several readers the last one speaks.
    pub(crate) fn by(&self) -> Option<String> {
        let who = self.lease.who()?;
        Some(if self.lease.shared { format!(", the last reader being {who},") } else { format!(" by {who}") })
    }

    /// How long it has been held.
    pub(crate) fn age(&self) -> Duration {
        ms(self.now_ms - self.lease.acquired_at_ms)
    }

    /// How long it lasts unless it is renewed.
    pub(crate) fn remaining(&self) -> Duration {
        ms(self.lease.expires_at_ms - self.now_ms)
    }

    /// The key as a line of a table has it.
    pub(crate) fn name(&self) -> String {
        let name = printable(&self.key);
        match (self.lease.permit, self.lease.shared, self.lease.readers) {
            (Some(permit), ..) => format!("{name} (permit {permit})"),
            (None, true, Some(1)) => format!("{name} (1 reader)"),
            (None, true, Some(readers)) => format!("{name} ({readers} readers)"),
            (None, true, None) => format!("{name} (readers)"),
            (None, false, _) => name,
        }
    }

    pub(crate) fn json(&self) -> Value {
        let (lease, mut fields) = (&self.lease, Map::new());
        fields.insert("key".to_owned(), json!(self.key));
        if let Some(permit) = lease.permit {
            fields.insert("permit".to_owned(), json!(permit));
        }
        if lease.shared {
            fields.insert("shared".to_owned(), json!(true));
            fields.insert("readers".to_owned(), json!(lease.readers));
        }
        fields.insert("held".to_owned(), json!(true));
        fields.insert("fence".to_owned(), json!(lease.fence.to_string()));
        fields.insert("acquired_at_ms".to_owned(), json!(lease.acquired_at_ms));
        fields.insert("expires_at_ms".to_owned(), json!(lease.expires_at_ms));
        fields.insert("now_ms".to_owned(), json!(self.now_ms));
        for (name, said) in [("owner", &lease.owner), ("note", &lease.note)] {
            if let Some(said) = said {
                fields.insert(name.to_owned(), json!(said));
            }
        }
        Value::Object(fields)
    }
}

fn ms(count: i64) -> Duration {
    Duration::from_millis(u64::try_from(count).unwrap_or(0))
}

/// Whole seconds, except where there are few.
pub(crate) fn age(duration: Duration) -> String {
    spoken(if duration < Duration::from_secs(1) { duration } else { Duration::from_secs(duration.as_secs()) })
}

/// A time of the server's clock.
pub(crate) fn clock(at_ms: i64) -> String {
    humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + ms(at_ms)).to_string()
}

/// Foreign text, without what moves a terminal's cursor or starts a new line.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control()
            || matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}' | '\u{e0000}'..='\u{e0fff}')
        {
            let _ = write!(shown, "{}", c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// A line on standard output.
pub(crate) fn print(line: &str) -> Result<(), Failure> {
    writeln!(io::stdout(), "{line}").map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::NoReader,
        _ => Failure::Io("standard output".to_owned(), error),
    })
}

pub(crate) fn print_json(value: &Value) -> Result<(), Failure> {
    print(&value.to_string())
}

/// Columns as wide as their widest cell; the last one as it is.
pub(crate) fn table(headings: &[&str], rows: &[Vec<String>]) -> Result<(), Failure> {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([headings.get(column).map_or(0, |heading| heading.len())]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> = cells.zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        padded.join("  ").trim_end().to_owned()
    };
    print(&line(&mut headings.iter().copied()))?;
    rows.iter().try_for_each(|row| print(&line(&mut row.iter().map(String::as_str))))
}

/// Warnings of the library, without keys, on standard error.
pub(crate) fn warnings_to_stderr() {
    struct ToStderr;
    impl log::Log for ToStderr {
        fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
            metadata.level() <= log::Level::Warn && metadata.target().starts_with("syncguard")
        }
        fn log(&self, record: &log::Record<'_>) {
            let text = record.args().to_string();
            // That a lease is lost is said by whoever runs a program under it, with the key's name.
            if self.enabled(record.metadata()) && !text.starts_with("the lease of key #") {
                crate::failure::say(&text);
            }
        }
        fn flush(&self) {}
    }
    if log::set_logger(&ToStderr).is_ok() {
        log::set_max_level(log::LevelFilter::Warn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_cannot_move_the_cursor_or_end_the_line() {
        assert_eq!(printable("app:k\u{e9}y"), "app:k\u{e9}y");
        let shown = printable("a\n\u{1b}[2J\u{9b}x\u{202e}y");
        assert!(!shown.chars().any(char::is_control) && !shown.contains('\u{202e}'), "{shown}");
    }

    #[test]
    fn an_age_has_no_more_digits_than_are_read() {
        assert_eq!(age(Duration::from_millis(350)), "350ms");
        assert_eq!(age(Duration::from_millis(4_350)), "4s");
        assert_eq!(age(Duration::from_secs(7_263)), "2h 1m 3s");
        assert_eq!(clock(1_000_000_000_000), "2001-09-09T01:46:40Z");
    }
}
