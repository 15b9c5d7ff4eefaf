//! Whether the server is PostgreSQL in what leases stand on.
//!
//! Others speak the protocol, and some answer a lock function with `true` and lock nothing. So a client asks
//! before anything else, in the message that finds the tables: who the server is, and whether the parts behave as
//! they do in PostgreSQL. One that fails is refused by name, and there is no switch to trust it all the same. Before
//! tables are made, a second session is asked, too, whether it is refused a lock that the first one has.
//! See `docs/other-engines.md`.

use std::time::{Duration, Instant};

use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::model::time::deadline_after;
use crate::pg::answers::{Row, flag, int, required, text};
use crate::pg::names::{CAT, COUNT, EQ, NE};
use crate::pg::{Answers, Database, Failure, Lane, Message, Session, push_quoted};

/// How long the second session may take to be there. It is not worth more: without it the first one's answers decide.
const SECOND: Duration = Duration::from_secs(2);

/// What the texts of look-alikes contain that begin as PostgreSQL's own does, and whose they are.
const LOOK_ALIKES: [(&str, &str); 7] = [
    ("-YB-", "YugabyteDB"),
    ("Greenplum", "Greenplum"),
    ("Cloudberry", "Cloudberry"),
    ("Redshift", "Redshift"),
    ("Materialize", "Materialize"),
    ("RisingWave", "RisingWave"),
    ("openGauss", "openGauss"),
];

/// The parts, as an error names them, and how to find out whether a server refuses one.
const PARTS: [(&str, &str); 5] = [
    (ADVISORY, "SELECT pg_catalog.pg_try_advisory_xact_lock(9223372036854775807)"),
    (SYSTEM_COLUMNS, "SELECT c.xmin, c.xmax FROM pg_catalog.pg_class c LIMIT 1"),
    (READ_COMMITTED, "BEGIN ISOLATION LEVEL READ COMMITTED; ROLLBACK"),
    (SYNCHRONOUS_COMMIT, "SELECT pg_catalog.set_config('synchronous_commit', 'on', true)"),
    ("NOTIFY", "SELECT 'pg_catalog.pg_notify(text,text)'::pg_catalog.regprocedure"),
];

const ADVISORY: &str = "advisory locks";
const SYSTEM_COLUMNS: &str = "the system columns xmin and xmax";
const READ_COMMITTED: &str = "READ COMMITTED";
const SYNCHRONOUS_COMMIT: &str = "synchronous_commit";

/// A number beyond those of keys, so that nobody waits for this lock. No other session has it at the same time.
pub(super) struct Probe(i64);

impl Probe {
    pub(super) fn new() -> Result<Self> {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).map_err(|error| {
            LockError::new(ErrorCode::Internal).with_message("no random numbers").with_source(error)
        })?;
        Ok(Self(i64::from_ne_bytes(bytes) | 1 << 40))
    }

    /// Takes an advisory lock for the transaction, and asks what the server makes of it, and of the other parts.
    pub(super) fn question(&self) -> String {
        let number = self.0;
        format!(
            "WITH taken AS MATERIALIZED (SELECT pg_catalog.pg_try_advisory_xact_lock({number}) AS granted) \
             SELECT pg_catalog.version(), pg_catalog.current_setting('transaction_isolation'), \
             pg_catalog.set_config('synchronous_commit', 'on', true), \
             (SELECT c.xmin::pg_catalog.text {CAT} ' ' {CAT} c.xmax::pg_catalog.text FROM pg_catalog.pg_class c \
              WHERE c.oid {EQ} 'pg_catalog.pg_class'::pg_catalog.regclass::pg_catalog.oid), taken.granted, \
             (SELECT {COUNT} FROM pg_catalog.pg_locks k WHERE taken.granted AND k.granted \
              AND k.locktype {EQ} 'advisory' AND k.pid {EQ} pg_catalog.pg_backend_pid() AND k.objsubid {EQ} 1 \
              AND k.classid {EQ} {high}::pg_catalog.oid AND k.objid {EQ} {low}::pg_catalog.oid), \
             EXISTS (SELECT 1 FROM pg_catalog.pg_extension e WHERE e.extname {EQ} 'citus') FROM taken",
            high = (number >> 32) & 0xFFFF_FFFF,
            low = number & 0xFFFF_FFFF,
        )
    }

    fn taking(&self) -> String {
        format!("SELECT pg_catalog.pg_try_advisory_xact_lock({})", self.0)
    }
}

/// Further columns of a survey, two for each of these tables: the access method that keeps
/// their rows, and their kind, where that is another one than a plain table's.
pub(super) fn keepers(tables: &[&str]) -> String {
    let columns = tables.iter().map(|table| {
        format!(
            "(SELECT a.amname FROM pg_catalog.pg_am a WHERE a.oid {EQ} {table}.relam AND a.amname {NE} 'heap'), \
             CASE WHEN {table}.relkind {NE} ALL (ARRAY['r', 'p']::pg_catalog.\"char\"[]) THEN {table}.relkind END"
        )
    });
    columns.collect::<Vec<_>>().join(", ")
}

/// What keeps a table's rows, where that is not PostgreSQL's own storage: a foreign table, a view, columns.
pub(super) fn keeper(row: &Row, mut columns: std::ops::Range<usize>) -> Result<Option<String>> {
    columns.find_map(|column| text(row, column).transpose()).map(|found| found.map(str::to_owned)).transpose()
}

/// Refuses a table with such a keeper.
pub(super) fn check_keeper(keeper: Option<&str>) -> Result<()> {
    let Some(keeper) = keeper else { return Ok(()) };
    Err(LockError::invalid(format!(
        "a lock table is not a plain table in PostgreSQL's own storage ({keeper:?}): row locks and row versions work differently there, make it a plain table (USING heap)"
    )))
}

/// What the server said of itself.
#[derive(Debug)]
struct Facts {
    version: String,
    isolation: Option<String>,
    synchronous_commit: Option<String>,
    /// `xmin` and `xmax` of a row.
    versions: Option<String>,
    /// Whether the lock was granted, and how often `pg_locks` shows it.
    granted: Option<bool>,
    shown: Option<i64>,
}

/// Refuses a server that is not PostgreSQL in one of the parts. Whether Citus is there, which may keep the tables elsewhere.
pub(super) fn judge(row: &Row) -> Result<bool> {
    let owned = |column| -> Result<Option<String>> { Ok(text(row, column)?.map(str::to_owned)) };
    let facts = Facts {
        version: required(owned(0)?)?,
        isolation: owned(1)?,
        synchronous_commit: owned(2)?,
        versions: owned(3)?,
        granted: flag(row, 4)?,
        shown: int(row, 5)?,
    };
    let missing = facts.missing();
    if missing.is_empty() && name_of(&facts.version).is_none() {
        return Ok(flag(row, 6)? == Some(true));
    }
    Err(refused(&facts.version, &missing))
}

impl Facts {
    fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        // Not granted: another session has that very number, which only a real lock can be.
        if self.granted.is_none() || self.granted == Some(true) && self.shown != Some(1) {
            missing.push(format!("{ADVISORY} (one was granted, and pg_locks does not show it)"));
        }
        if self.isolation.as_deref() != Some("read committed") {
            let instead = self.isolation.as_deref().unwrap_or("nothing");
            missing.push(format!("{READ_COMMITTED} (it was asked for, and the answer is {instead:?})"));
        }
        if self.synchronous_commit.as_deref() != Some("on") {
            missing.push(format!("{SYNCHRONOUS_COMMIT} (it was set, and stays as it was)"));
        }
        let xmin = self.versions.as_deref().and_then(|both| both.split_once(' ')).map(|(xmin, _)| xmin);
        if xmin.and_then(|xmin| xmin.parse::<u32>().ok()).is_none_or(|xmin| xmin == 0) {
            missing.push(format!("{SYSTEM_COLUMNS} (a row does not say which transaction wrote it)"));
        }
        missing
    }
}

/// Whose version this is, unless it is PostgreSQL's.
fn name_of(version: &str) -> Option<String> {
    if let Some((_, name)) = LOOK_ALIKES.iter().find(|(mark, _)| version.contains(mark)) {
        return Some((*name).to_owned());
    }
    if version.starts_with("PostgreSQL ") {
        return None;
    }
    let plain = |c: &char| c.is_ascii_alphanumeric() || " .-_".contains(*c);
    Some(version.chars().take_while(plain).take(40).collect::<String>().trim().to_owned())
}

fn refused(version: &str, missing: &[String]) -> LockError {
    let who = match name_of(version) {
        Some(name) => format!("this server is {name}, not PostgreSQL"),
        None => {
            "this server calls itself PostgreSQL, but differs from it in what leases depend on".to_owned()
        }
    };
    let what = if missing.is_empty() { String::new() } else { format!("; missing: {}", missing.join(", ")) };
    LockError::invalid(format!(
        "{who}{what}: two could hold one key here, connect to a PostgreSQL server (see docs/other-engines.md)"
    ))
}

/// Why the first message to this server failed, if it is not PostgreSQL: asks for one part after the other.
pub(super) fn explain(session: &mut Session<'_>, failure: Failure) -> Failure {
    let state = failure.refused_with().unwrap_or_default();
    // A syntax, a name, a feature, a value that it does not know, or an error of its own.
    if !["42", "0A", "22", "XX"].iter().any(|class| state.starts_with(class)) || state == "42501" {
        return failure;
    }
    let Some(version) = first_text(session.ask(&Message::new().raw("SELECT version()"))) else {
        return failure;
    };
    let mut missing = Vec::new();
    for (part, question) in PARTS {
        match session.ask(&Message::new().raw(question)) {
            Ok(_) => {}
            Err(other) if other.is_refused() => missing.push(part.to_owned()),
            Err(_) => return failure,
        }
    }
    if missing.is_empty() && name_of(&version).is_none() {
        return failure;
    }
    refused(&version, &missing).with_source(failure.into_error()).into()
}

fn first_text(answers: Result<Answers, Failure>) -> Option<String> {
    text(answers.ok()?.row(0).ok()??, 0).ok()?.map(str::to_owned)
}

/// Refuses tables that Citus keeps on other nodes, or lets be used from other nodes: each has advisory locks of its own.
pub(super) fn check_citus(session: &mut Session<'_>, tables: &[&str]) -> Result<(), Failure> {
    let mut names = String::new();
    for table in tables {
        names.push_str(if names.is_empty() {
            "pg_catalog.to_regclass("
        } else {
            ", pg_catalog.to_regclass("
        });
        push_quoted(table, &mut names)?;
        names.push(')');
    }
    let question =
        format!("SELECT {COUNT} FROM pg_catalog.pg_dist_partition p WHERE p.logicalrelid IN ({names})");
    let answers = session.ask(&Message::new().raw(session.limits_plain()).raw(question))?;
    if int(required(answers.row(0)?)?, 0)? == Some(0) {
        return Ok(());
    }
    Err(LockError::invalid(
        "Citus distributes a lock table: row locks and advisory locks of one node are not those of another; undistribute_table() it, and have all clients connect to that node",
    )
    .into())
}

/// Whether a second session is refused an advisory lock that a first one has, which is the one proof that they exclude.
/// Where a second one is not to be had, what the first was told has to do.
pub(super) fn check_two_sessions(database: &Database, end: Instant) -> Result<()> {
    let (never, probe) = (CancelToken::never(), Probe::new()?);
    Ok(database.with_connection(Lane::Operations, end, &never, |first| {
        let taken = first.begin(&Message::new().raw(first.prelude_between()).raw(probe.taking()))?;
        let taken = flag(required(taken.row(0)?)?, 0)? == Some(true);
        first.check_cancel()?;
        let until = end.min(deadline_after(SECOND));
        let refused = match database.source().second(until) {
            Ok(Some(connection)) => {
                let mut second = Session::new(connection, until, &never);
                let question = Message::new().raw(second.limits()).raw(probe.taking());
                let answer = second.ask(&question).map(|answers| flag(required(answers.row(0)?)?, 0));
                // It may be of a caller's pool.
                second.finish();
                answer.ok().transpose()?.flatten().map(|granted| !granted)
            }
            Ok(None) | Err(_) => None,
        };
        first.rollback();
        match refused {
            Some(false) if taken => Err(refused_second().into()),
            None => {
                log::debug!("no second session could be asked whether advisory locks exclude it");
                Ok(())
            }
            Some(_) => Ok(()),
        }
    })?)
}

fn refused_second() -> LockError {
    LockError::invalid(
        "this server grants one advisory lock to two sessions at once: its lock functions are stubs, or the connection string reaches different servers; two could hold one key here, connect to a PostgreSQL server (see docs/other-engines.md)",
    )
}
