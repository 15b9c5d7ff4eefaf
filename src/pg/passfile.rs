//! The passfile, `.pgpass`, by libpq's rules (<https://www.postgresql.org/docs/current/libpq-pgpass.html>).
//!
//! It is read for each connection that has no other password, so that a new password needs no new client.

use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use postgres::Config;

/// Where the passwords of one user for one database may be.
#[derive(Clone)]
pub(crate) struct Passfile(Arc<Inner>);

struct Inner {
    path: PathBuf,
    user: Option<String>,
    database: Option<String>,
    warned: AtomicBool,
}

impl Passfile {
    pub(crate) fn new(path: PathBuf, config: &Config) -> Self {
        let user = config.get_user().map(str::to_owned);
        let database = config.get_dbname().map(str::to_owned);
        Self(Arc::new(Inner { path, user, database, warned: AtomicBool::new(false) }))
    }

    /// The password for a server, which may have several names.
    pub(crate) fn password(&self, hosts: &[String], port: u16) -> Option<String> {
        let inner = &*self.0;
        let file = fs::metadata(&inner.path).ok()?;
        if let Some(why) = unfit(&file) {
            if !inner.warned.swap(true, Ordering::Relaxed) {
                log::warn!("the passfile is ignored: {why}");
            }
            return None;
        }
        let text = read(&inner.path)?;
        // As the driver finds it.
        let user = inner.user.clone().or_else(|| whoami::username().ok())?;
        let database = inner.database.as_ref().unwrap_or(&user);
        text.lines().find_map(|line| password_in(line, hosts, port, database, &user))
    }
}

/// Lines of other encodings do not matter as long as ours is not among them.
fn read(path: &Path) -> Option<String> {
    Some(String::from_utf8_lossy(&fs::read(path).ok()?).into_owned())
}

fn unfit(file: &Metadata) -> Option<&'static str> {
    if !file.is_file() {
        return Some("it is no ordinary file");
    }
    #[cfg(unix)]
    if std::os::unix::fs::MetadataExt::mode(file) & 0o077 != 0 {
        return Some("others than its owner may read it (chmod 600 it)");
    }
    None
}

/// The password of a line, if it is that of the server, the database and the user.
fn password_in(line: &str, hosts: &[String], port: u16, database: &str, user: &str) -> Option<String> {
    if line.starts_with('#') {
        return None;
    }
    let mut fields = Fields(line);
    let fits = |field: &Field<'_>, value: &str| field.raw == "*" || field.text == value;
    let host = fields.next()?;
    let fits_host = hosts.iter().any(|name| fits(&host, name));
    let fits_port = fits(&fields.next()?, &port.to_string());
    let fits_database = fits(&fields.next()?, database);
    let fits_user = fits(&fields.next()?, user);
    let password = fields.next()?.text;
    (fits_host && fits_port && fits_database && fits_user && !password.is_empty()).then_some(password)
}

/// A field: as it stands there, and without its backslashes.
struct Field<'a> {
    raw: &'a str,
    text: String,
}

/// Fields end at a colon that has no backslash before it.
struct Fields<'a>(&'a str);

impl<'a> Fields<'a> {
    fn next(&mut self) -> Option<Field<'a>> {
        if self.0.is_empty() {
            return None;
        }
        let (mut text, mut escaped, mut end) = (String::new(), false, self.0.len());
        for (at, c) in self.0.char_indices() {
            match c {
                '\\' if !escaped => escaped = true,
                ':' if !escaped => {
                    end = at;
                    break;
                }
                _ => {
                    text.push(c);
                    escaped = false;
                }
            }
        }
        let raw = self.0.get(..end)?;
        self.0 = self.0.get(end + 1..).unwrap_or_default();
        Some(Field { raw, text })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(text: &str, host: &str, port: u16, database: &str, user: &str) -> Option<String> {
        text.lines().find_map(|line| password_in(line, &[host.to_owned()], port, database, user))
    }

    #[test]
    fn the_first_line_that_fits_counts() {
        let text = "# h:5432:d:u:comment\n\nh:5432:d:other:a\nh:5432:d:u:b\n*:*:*:u:c\n";
        assert_eq!(find(text, "h", 5432, "d", "u").as_deref(), Some("b"));
        assert_eq!(find(text, "g", 1, "x", "u").as_deref(), Some("c"));
        assert_eq!(find(text, "h", 5432, "d", "nobody"), None);
    }

    #[test]
    fn colons_and_backslashes_are_escaped() {
        let text = r"::1:5432:d:u:wrong
\:\:1:5432:d:u:p\:q\\r
h:5432:d:\*:star";
        assert_eq!(find(text, "::1", 5432, "d", "u").as_deref(), Some(r"p:q\r"));
        assert_eq!(find(text, "h", 5432, "d", "u"), None, "an escaped star stands for itself");
        assert_eq!(find(text, "h", 5432, "d", "*").as_deref(), Some("star"));
    }

    #[test]
    fn a_password_ends_at_a_colon_and_a_line_without_one_is_none() {
        assert_eq!(find("h:1:d:u:p:rest", "h", 1, "d", "u").as_deref(), Some("p"));
        for line in ["h:1:d:u", "h:1:d:u:", "", "h"] {
            assert_eq!(find(line, "h", 1, "d", "u"), None, "{line}");
        }
    }
}
