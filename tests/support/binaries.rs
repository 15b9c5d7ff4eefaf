//! Where the programs of a PostgreSQL server are on this machine.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// One installation of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binaries {
    pub dir: PathBuf,
    /// Major and minor version, `(15, 18)`.
    pub version: (u32, u32),
}

/// Where to look; [`Search::from_env`] is what the tests use.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// The one directory to use, whatever else there is.
    pub chosen: Option<PathBuf>,
    /// A list of directories, as in `PATH`.
    pub path: Option<OsString>,
    /// Directories with at most one `*` in them.
    pub patterns: Vec<String>,
}

/// Where packages put a server that is not on `PATH`.
const PATTERNS: [&str; 10] = [
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/usr/libexec/postgresql*",
    "/usr/lib/postgresql*/bin",
    "/usr/local/pgsql/bin",
    "/usr/local/lib/postgresql/*/bin",
    "/opt/homebrew/opt/postgresql*/bin",
    "/usr/local/opt/postgresql*/bin",
    "/home/linuxbrew/.linuxbrew/opt/postgresql*/bin",
    "/Applications/Postgres.app/Contents/Versions/*/bin",
];

const ADVICE: &str = "\
These tests start a PostgreSQL server of their own and need its programs `postgres` and `initdb`
(version 13 or newer; the client alone is not enough). Install them:
    Debian, Ubuntu    apt-get install postgresql
    Fedora, RHEL      dnf install postgresql-server
    Alpine            apk add postgresql
    macOS             brew install postgresql
    any Linux         scripts/fetch-postgres 17   (prints the directory to use, needs npm)
or set SYNCGUARD_TEST_PG_BINDIR to the directory that holds them,
or set SYNCGUARD_TEST_URL to a server that these tests may create schemas on.";

/// The installation that this run uses.
///
/// # Panics
/// When there is none, with what to install.
pub fn binaries() -> &'static Binaries {
    static FOUND: OnceLock<Result<Binaries, String>> = OnceLock::new();
    match FOUND.get_or_init(|| Search::from_env().newest()) {
        Ok(found) => found,
        Err(message) => panic!("{message}"),
    }
}

impl Search {
    pub fn from_env() -> Self {
        let mut patterns: Vec<_> = PATTERNS.iter().map(ToString::to_string).collect();
        if let Ok(output) = Command::new("pg_config").arg("--bindir").output() {
            patterns.push(String::from_utf8_lossy(&output.stdout).trim().to_owned());
        }
        Self {
            chosen: env::var_os("SYNCGUARD_TEST_PG_BINDIR").filter(|dir| !dir.is_empty()).map(PathBuf::from),
            path: env::var_os("PATH"),
            patterns,
        }
    }

    /// The chosen installation, else the newest.
    pub fn newest(&self) -> Result<Binaries, String> {
        if let Some(dir) = &self.chosen {
            let dir = fs::canonicalize(dir).unwrap_or_else(|_| dir.clone());
            return inspect(&dir).ok_or_else(|| {
                format!("SYNCGUARD_TEST_PG_BINDIR: no PostgreSQL server in {}\n{ADVICE}", dir.display())
            });
        }
        let on_path = self.path.iter().flat_map(env::split_paths);
        let installed = self.patterns.iter().flat_map(|pattern| expand(pattern));
        on_path
            .chain(installed)
            .filter_map(|dir| inspect(&dir))
            .max_by_key(|found| found.version)
            .ok_or_else(|| format!("no PostgreSQL server found on this machine\n{ADVICE}"))
    }
}

fn inspect(dir: &Path) -> Option<Binaries> {
    if !dir.join("initdb").is_file() {
        return None;
    }
    let output = Command::new(dir.join("postgres")).arg("--version").output().ok()?;
    let version = parse_version(&String::from_utf8_lossy(&output.stdout))?;
    Some(Binaries { dir: dir.to_owned(), version })
}

/// `postgres (PostgreSQL) 15.18 (Debian …)`, `postgres (PostgreSQL) 19beta1`.
pub fn parse_version(text: &str) -> Option<(u32, u32)> {
    let word = text.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()))?;
    let mut numbers = word.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next().and_then(Result::ok).unwrap_or(0)))
}

/// The directories that a pattern with at most one `*` names.
fn expand(pattern: &str) -> Vec<PathBuf> {
    let Some((before, after)) = pattern.split_once('*') else {
        return vec![PathBuf::from(pattern)];
    };
    let (parent, prefix) = before.rsplit_once('/').unwrap_or((".", before));
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| {
            let mut dir = entry.path().into_os_string();
            dir.push(after);
            PathBuf::from(dir)
        })
        .collect()
}
