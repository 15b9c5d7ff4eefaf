//! From SQLSTATE to [`ErrorCode`]: one table, by code, never by the text of a message.
//!
//! | SQLSTATE | code |
//! | --- | --- |
//! | class 08, 25006, 25P03, class 53 but 53300, class 57 but 57014, class 58, class 40 | `ServiceUnavailable` |
//! | 53300 | `RateLimited` |
//! | class 28, 42501 | `AuthFailed` |
//! | class 22, class 23, 3D000, 3F000, 42P01, 42P10, 42703, 42883, 55000, class 54 | `InvalidArgument` |
//! | 55000 while connecting: the database takes no connections | `ServiceUnavailable` |
//! | 25P04, 55P03, 57014, and our own deadlines | `NetworkTimeout` |
//! | anything else, and 23505 on a lock id | `Internal` |
//!
//! The codes are those of <https://www.postgresql.org/docs/current/errcodes-appendix.html>.

use std::borrow::Cow;
use std::error::Error;
use std::io;

use postgres::error::{DbError, Severity};

use crate::error::{ErrorCode, LockError};
use crate::pg::failure::Failure;

/// The code for a SQLSTATE.
pub(crate) fn code_for(sqlstate: &str) -> ErrorCode {
    match sqlstate {
        "25006" | "25P03" => ErrorCode::ServiceUnavailable,
        "53300" => ErrorCode::RateLimited,
        "42501" => ErrorCode::AuthFailed,
        "3D000" | "3F000" | "42P01" | "42P10" | "42703" | "42883" | "55000" => ErrorCode::InvalidArgument,
        "25P04" | "55P03" | "57014" => ErrorCode::NetworkTimeout,
        _ => match sqlstate.get(..2).unwrap_or_default() {
            "08" | "40" | "53" | "57" | "58" => ErrorCode::ServiceUnavailable,
            "28" => ErrorCode::AuthFailed,
            "22" | "23" | "54" => ErrorCode::InvalidArgument,
            _ => ErrorCode::Internal,
        },
    }
}

/// An error that the driver returned for a message to an open connection.
pub(crate) fn call_error(error: postgres::Error, commits: bool) -> Failure {
    let Some(db) = error.as_db_error() else {
        let (code, message) = transport(&error);
        let stale = code != ErrorCode::NetworkTimeout;
        return Failure::broken(
            LockError::new(code).with_message(message).with_source(error),
            commits,
            stale,
        );
    };
    // A session that ends says so with FATAL; whether a commit came first is not known.
    let ended = matches!(db.parsed_severity(), Some(Severity::Fatal | Severity::Panic));
    let sqlstate = sqlstate_of(db);
    let unsure = ended || sqlstate == "40003";
    // 25P03 ends a session whose transaction lay idle: the message that meets it was not carried out.
    let in_doubt = commits && sqlstate != "25P03";
    let unprepared = is_unprepared(&error);
    let error = server_error(&sqlstate, error);
    match (unsure, unprepared) {
        (true, _) => Failure::broken(error, in_doubt, ended),
        (false, true) => Failure::unprepared(error),
        (false, false) => error.into(),
    }
}

/// The SQLSTATE, with one correction: a standby refuses `READ WRITE` as "feature not supported".
fn sqlstate_of(db: &DbError) -> String {
    let by = db.routine().unwrap_or_default().to_ascii_lowercase();
    match db.code().code() {
        // `SET TRANSACTION` is refused by the setting's check, `BEGIN` by the server's own function.
        "0A000" if ["readonly", "read_only", "check_hook"].iter().any(|part| by.contains(part)) => {
            "25006".to_owned()
        }
        state => state.to_owned(),
    }
}

/// Says what to do where this call needs a right of its own, and not those of a holder.
pub(crate) fn without_right(error: LockError, message: &'static str) -> LockError {
    if error.sqlstate() == Some("42501") { error.with_message(message) } else { error }
}

/// Whether the server no longer has a statement that was prepared, or has it for a table that has
/// changed since.
fn is_unprepared(error: &postgres::Error) -> bool {
    error.as_db_error().is_some_and(|db| match db.code().code() {
        "26000" => true,
        "0A000" => db.routine() == Some("RevalidateCachedQuery"),
        _ => false,
    })
}

/// An error that the driver returned for an attempt to connect.
pub(crate) fn connect_error(error: postgres::Error) -> LockError {
    if let Some(db) = error.as_db_error() {
        let sqlstate = sqlstate_of(db);
        if sqlstate == "55000" {
            let closed = LockError::new(ErrorCode::ServiceUnavailable)
                .with_message("the database takes no connections now: an operator has set ALLOW_CONNECTIONS false on it; try again later, or ALTER DATABASE … ALLOW_CONNECTIONS true (SQLSTATE 55000)")
                .with_sqlstate("55000");
            return with_cause(closed, &sqlstate, error);
        }
        return server_error(&sqlstate, error);
    }
    let (code, message) = transport(&error);
    LockError::new(code).with_message(message).with_source(error)
}

/// Our own time is over before anything was sent.
pub(crate) fn out_of_time() -> LockError {
    LockError::new(ErrorCode::NetworkTimeout)
        .with_message("the time for this operation was over before it could be sent: raise operation_timeout or the wait's own timeout")
}

/// Why none of several candidates could be connected to.
#[derive(Default)]
pub(crate) struct NoCandidate(Option<LockError>);

impl NoCandidate {
    /// One more that failed.
    pub(crate) fn add(&mut self, error: LockError) {
        log::debug!("a host cannot be connected to: {}", error.chain());
        if self.0.as_ref().is_none_or(|other| telling(&error) >= telling(other)) {
            self.0 = Some(error);
        }
    }

    /// The most telling of their errors, the last of equal ones.
    pub(crate) fn into_error(self) -> LockError {
        self.0.unwrap_or_else(|| {
            LockError::new(ErrorCode::ServiceUnavailable)
                .with_message("no host has an address: check the connection settings")
        })
    }
}

/// Whether a server said this, and not the network or nobody.
pub(crate) fn is_answer(error: &LockError) -> bool {
    telling(error) >= 2
}

/// Whether whoever said this may be the primary soon: it is a standby, or starts, or is not there yet. Not
/// where asking again may count as something else, such as another wrong password.
pub(crate) fn may_become_primary(error: &LockError) -> bool {
    match telling(error) {
        3 => true,
        1 => error.code() == ErrorCode::ServiceUnavailable,
        2 => error.sqlstate().is_some_and(|state| state.starts_with("57")),
        _ => false,
    }
}

/// A server that is not the primary says more than one that refuses, that one more than silence.
fn telling(error: &LockError) -> u8 {
    let mut cause = error.source();
    while let Some(inner) = cause {
        if inner.downcast_ref().is_some_and(has_other_attributes) {
            return 3;
        }
        cause = inner.source();
    }
    match (error.sqlstate(), error.code()) {
        (Some(_), _) => 2,
        (None, ErrorCode::NetworkTimeout) => 0,
        (None, _) => 1,
    }
}

/// Whether this is the driver's own word for a server that `target_session_attrs` does not ask for.
/// (A socket that may not be opened is of the same kind, but with the system's number.)
fn has_other_attributes(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied && error.raw_os_error().is_none()
}

/// An error that the server sent, with its code and what to do.
fn server_error(sqlstate: &str, error: postgres::Error) -> LockError {
    let on_lock_id = sqlstate == "23505"
        && error.as_db_error().and_then(|db| db.constraint()).is_some_and(|name| name.contains("lock_id"));
    let code = if on_lock_id { ErrorCode::Internal } else { code_for(sqlstate) };
    let hint = if on_lock_id {
        "a fresh lock id already exists: the random source is broken"
    } else {
        hint(sqlstate, code)
    };
    let named = error.as_db_error().and_then(added_by_others).unwrap_or_default();
    let mut mapped = LockError::new(code)
        .with_message(format!("{hint}{named} (SQLSTATE {sqlstate})"))
        .with_sqlstate(sqlstate);
    if matches!(sqlstate, "40001" | "40P01" | "55P03") {
        mapped = mapped.with_contention();
    }
    with_cause(mapped, sqlstate, error)
}

/// Keeps the driver's error as the cause, or what stands in for it.
pub(crate) fn with_cause(mapped: LockError, sqlstate: &str, error: postgres::Error) -> LockError {
    match error.as_db_error() {
        Some(db) => mapped.with_source(ServerError::new(db, sqlstate)),
        None => mapped.with_source(error),
    }
}

/// Whether a user-defined function said it (a trigger on the tables, for example), with a text and a
/// SQLSTATE of its choice.
fn was_raised(db: &DbError) -> bool {
    db.routine() == Some("exec_stmt_raise")
}

/// Whether the server's text for this error may repeat a key or a lock id.
fn quotes_values(sqlstate: &str) -> bool {
    match sqlstate.get(..2).unwrap_or_default() {
        "08" | "25" | "28" | "3D" | "3F" | "40" | "53" | "55" | "57" | "58" => false,
        _ => !matches!(sqlstate, "42501" | "42P01" | "42703" | "42883"),
    }
}

/// The constraint or the column that refused a row, by its name: a name is no value.
fn added_by_others(db: &DbError) -> Option<String> {
    if !db.code().code().starts_with("23") {
        return None;
    }
    let named = |what, name: Option<&str>| name.map(|name| format!(": the {what} {name:?}"));
    named("constraint", db.constraint()).or_else(|| named("column", db.column()))
}

/// What failed and what to do, by SQLSTATE.
fn hint(sqlstate: &str, code: ErrorCode) -> &'static str {
    match sqlstate {
        "42P01" | "42703" => {
            "the lock tables are missing or have unexpected columns: call setup_schema() or run schema.sql, and check schema, table_name and fence_table_name"
        }
        "3F000" => "the schema does not exist: create it, or name another with the builder's schema()",
        "3D000" => "the database does not exist: check the connection string",
        "42501" => {
            "the role lacks a right that this call needs, or row-level security is on for a lock table: see the grants in docs/security.md, and ALTER TABLE … DISABLE ROW LEVEL SECURITY"
        }
        "42P10" => {
            "a lock table has no primary key or unique index on its key column: add the primary keys of schema.sql"
        }
        "55000" => {
            "a lock table is in a state that refuses this change: its primary key must not be DEFERRABLE, and if the table is published it needs a replica identity (its primary key, or ALTER TABLE … REPLICA IDENTITY FULL)"
        }
        "54000" => {
            "the server reached a limit of its own: if it refuses writes to avoid a wraparound of transaction ids, end old prepared transactions (pg_prepared_xacts) and replication slots, then VACUUM the database (https://www.postgresql.org/docs/current/routine-vacuuming.html#VACUUM-FOR-WRAPAROUND)"
        }
        "22001" => {
            "a column of the lock tables is too short for what it must hold: make every text column TEXT, as schema.sql does"
        }
        "23502" | "23503" | "23505" | "23514" | "23P01" => {
            "something that was added to the lock tables refuses the row: drop it from them"
        }
        "P0001" => {
            "a user-defined trigger or function on the lock tables rejected this: see the server's log for its text"
        }
        "25006" => "the server is read-only, a standby perhaps: connect to the primary",
        "40001" | "40P01" => "the transaction lost against another and was rolled back: try again",
        "55P03" => {
            "another session holds a lock on the row, the table or the key's number, longer than this call may wait, or a prepared transaction does: see Operator::waiters() and pg_prepared_xacts, then try again"
        }
        "57014" => {
            "the server cancelled the statement, because its time was over or an operator ended it: see Operator::waiters() and pg_prepared_xacts for what it may have waited for, then try again"
        }
        "53100" => "the server's disk is full: make room on it",
        "53300" => "the server has no connection left: raise max_connections, or open fewer",
        "25P03" | "25P04" | "57P05" => {
            "the server's own time limit ended the session: raise it, or try again"
        }
        "57P01" | "57P02" | "57P03" | "57P04" => {
            "the server is shutting down, starting up, or ended this session: try again later"
        }
        _ => match code {
            ErrorCode::ServiceUnavailable => "the server cannot serve this now: try again later",
            ErrorCode::AuthFailed => {
                "the server refused the credentials: check user, password and pg_hba.conf"
            }
            ErrorCode::InvalidArgument => {
                "the server refused a value or a name: check table names, key and database encoding"
            }
            _ => {
                "the server answered with an unexpected error: look up the SQLSTATE, and in the server's log"
            }
        },
    }
}

/// What a failure without an answer from the server is: by the kind of its cause.
fn transport(error: &postgres::Error) -> (ErrorCode, Cow<'static, str>) {
    // The driver does not tell its own kinds apart but by fixed, untranslated texts.
    let text = error.to_string();
    let why = error.source().map(ToString::to_string).unwrap_or_default();
    let (code, message) = match io_cause(error) {
        Some(io) if io.kind() == io::ErrorKind::TimedOut => (
            ErrorCode::NetworkTimeout,
            "no answer came from the server in time: check the network, or raise operation_timeout or the wait's own timeout",
        ),
        Some(io) if has_other_attributes(io) => (ErrorCode::ServiceUnavailable, other_attributes(io)),
        Some(io) if text.starts_with("error communicating") && io.kind() == io::ErrorKind::NotFound => (
            ErrorCode::InvalidArgument,
            "the account that runs this program has no name, and the connection settings name no user: add user=…",
        ),
        // A TLS library may say why in an error of input and output.
        Some(io) if text.starts_with("error performing TLS") && io.get_ref().is_some() => {
            return (ErrorCode::ServiceUnavailable, tls_failed(&why));
        }
        // With TLS 1.3 a server says only afterwards that it does not take the client's certificate.
        Some(io) if why.contains("alert") && io.get_ref().is_some() => {
            return (ErrorCode::AuthFailed, refused_certificate(&why));
        }
        Some(_) => (
            ErrorCode::ServiceUnavailable,
            "the server cannot be reached, or closed the connection: check that it runs and its address, or try again later",
        ),
        None => return without_io(&text, &why),
    };
    (code, message.into())
}

/// The error of input and output below, if there is one.
fn io_cause(error: &postgres::Error) -> Option<&io::Error> {
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(io) = inner.downcast_ref() {
            return Some(io);
        }
        cause = inner.source();
    }
    None
}

fn other_attributes(error: &io::Error) -> &'static str {
    if error.to_string().contains("not read only") {
        "none of these hosts is read-only, as target_session_attrs=read-only asks: leave that out, since only a primary can lock"
    } else {
        "none of these hosts is a primary now, a failover may be under way: try again, and check that the list names every host that may become the primary"
    }
}

fn tls_failed(why: &str) -> Cow<'static, str> {
    format!("the TLS handshake failed ({why}): check sslmode, the server's certificate and the connector's trust and host name").into()
}

fn refused_certificate(why: &str) -> Cow<'static, str> {
    format!("the server ended TLS ({why}): check the client's certificate, sslcert and sslkey, and the server's ssl_ca_file").into()
}

/// A failure without an error of input and output below.
fn without_io(text: &str, why: &str) -> (ErrorCode, Cow<'static, str>) {
    let (code, message) = if text.starts_with("authentication error") && why.contains("channel binding") {
        (
            ErrorCode::AuthFailed,
            "channel_binding=require asks for TLS and scram-sha-256, and the server does not offer both: check sslmode, the connector and pg_hba.conf",
        )
    } else if text.starts_with("authentication error") {
        (ErrorCode::AuthFailed, "authentication failed: check user and password")
    } else if why == "password missing" {
        (
            ErrorCode::AuthFailed,
            "the server asks for a password and the connection settings have none: add password=… (for a connection string also PGPASSWORD, or a line of the passfile ~/.pgpass)",
        )
    } else if text.starts_with("invalid conf") || text.starts_with("invalid connection") {
        (ErrorCode::InvalidArgument, "the connection settings are not valid: the cause says which")
    } else if text.starts_with("error performing TLS") {
        return (ErrorCode::ServiceUnavailable, tls_failed(why));
    } else if text.starts_with("unexpected message") || text.starts_with("error parsing") {
        (ErrorCode::Internal, "the server sent something that PostgreSQL would not send: check the address")
    } else {
        (ErrorCode::ServiceUnavailable, "the connection to the server is closed: try again")
    };
    (code, message.into())
}

/// Stands in for the driver's error of what a server answered. That one has a detail, which repeats the
/// values of a row, keys among them, a context, which repeats statements, and names of roles, which are
/// part of a connection string.
#[derive(Debug, thiserror::Error)]
enum ServerError {
    #[error("{0}")]
    Told(String),
    #[error("the server answered SQLSTATE {0} (its text may contain keys and is withheld)")]
    Withheld(String),
}

impl ServerError {
    fn new(db: &DbError, sqlstate: &str) -> Self {
        if quotes_values(sqlstate) || was_raised(db) {
            return Self::Withheld(sqlstate.to_owned());
        }
        // With a context it may be that of a user-defined function.
        let hint = db.hint().filter(|_| db.where_().is_none());
        let hint = hint.map(|hint| format!(" (hint: {hint})")).unwrap_or_default();
        Self::Told(without_names(&format!("{}: {}{hint}", db.severity(), db.message())))
    }
}

/// What the caller's pool says that it could not open, which quotes the server.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct PoolError(String);

impl PoolError {
    pub(crate) fn new(text: &str) -> Self {
        Self(without_names(text.split("\nDETAIL: ").next().unwrap_or_default()))
    }
}

/// A text without the names of roles in it.
fn without_names(text: &str) -> String {
    let mut text = text.to_owned();
    for before in ["user \"", "role \""] {
        if let Some((start, rest)) = text.split_once(before)
            && let Some((_, end)) = rest.split_once('"')
        {
            text = format!("{start}{before}…\"{end}");
        }
    }
    text
}

#[cfg(test)]
mod tests;
