//! Statements: prepared once per connection by name, called by text, several in one message.
//!
//! The driver sends several statements in one round trip only as text (the simple protocol), so a
//! statement is prepared with SQL's own `PREPARE` and called with `EXECUTE`
//! (<https://www.postgresql.org/docs/current/sql-prepare.html>). Its name carries a digest of its
//! text, so clients with other tables, or other versions of this library, can share a connection.
//!
//! Values become text in one place, [`Arg`]: digits, or a quoted literal.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use postgres::types::{ToSql, Type};
use sha2::{Digest, Sha256};

use crate::error::{LockError, Result};

/// A statement with `$1`-style parameters.
pub(crate) struct Statement {
    name: String,
    text: String,
    types: &'static [&'static str],
    /// The digest that the name carries.
    digest: u64,
}

impl Statement {
    pub(crate) fn new(what: &str, types: &'static [&'static str], text: String) -> Self {
        let digest = Sha256::digest(text.as_bytes());
        let mut name = format!("sg_{what}_");
        for byte in digest.iter().take(8) {
            let _ = write!(name, "{byte:02x}");
        }
        let digest = digest.iter().take(8).fold(0, |all, byte| (all << 8) | u64::from(*byte));
        Self { name, text, types, digest }
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// The types of its parameters, as the driver knows them.
    pub(crate) fn sql_types(&self) -> Vec<Type> {
        let known = |name: &&str| match *name {
            "pg_catalog.int8" => Type::INT8,
            "pg_catalog.text[]" => Type::TEXT_ARRAY,
            "pg_catalog.int8[]" => Type::INT8_ARRAY,
            _ => Type::TEXT,
        };
        self.types.iter().map(known).collect()
    }

    /// The `PREPARE` for it.
    fn prepare(&self) -> String {
        match self.types {
            [] => format!("PREPARE {} AS {}", self.name, self.text),
            types => format!("PREPARE {}({}) AS {}", self.name, types.join(","), self.text),
        }
    }

    /// The call of it, by name or written out.
    fn call(&self, plain: bool, args: &[Arg<'_>], out: &mut String) -> Result<()> {
        debug_assert_eq!(args.len(), self.types.len(), "{}", self.name);
        if plain {
            return self.write_out(args, out);
        }
        let _ = write!(out, "EXECUTE {}", self.name);
        for (i, arg) in args.iter().enumerate() {
            out.push(if i == 0 { '(' } else { ',' });
            arg.push(out)?;
        }
        if !args.is_empty() {
            out.push(')');
        }
        Ok(())
    }

    /// The text with the arguments in the place of `$n`.
    fn write_out(&self, args: &[Arg<'_>], out: &mut String) -> Result<()> {
        // Every second piece is the inside of a quoted name, where `$1` is a part of the name.
        for (i, outside) in self.text.split('"').enumerate() {
            if i > 0 {
                out.push('"');
            }
            if i % 2 == 1 {
                out.push_str(outside);
            } else {
                self.write_out_unquoted(outside, args, out)?;
            }
        }
        Ok(())
    }

    fn write_out_unquoted(&self, text: &str, args: &[Arg<'_>], out: &mut String) -> Result<()> {
        let mut pieces = text.split('$');
        out.push_str(pieces.next().unwrap_or_default());
        for piece in pieces {
            let end = piece.find(|c: char| !c.is_ascii_digit()).unwrap_or(piece.len());
            let (number, after) = piece.split_at(end);
            let place = number.parse().unwrap_or(0_usize).wrapping_sub(1);
            let (Some(arg), Some(of)) = (args.get(place), self.types.get(place)) else {
                return Err(LockError::invalid("a statement has fewer arguments than it needs"));
            };
            out.push('(');
            arg.push(out)?;
            let _ = write!(out, ")::{of}{after}");
        }
        Ok(())
    }
}

/// A value on its way into SQL text.
#[derive(Clone, Copy)]
pub(crate) enum Arg<'a> {
    Text(&'a str),
    Int(i64),
    Texts(&'a [&'a str]),
    Ints(&'a [i64]),
}

impl<'a> Arg<'a> {
    /// Values as the driver sends them beside a statement.
    pub(crate) fn parameters<'s>(args: &'s [Arg<'a>]) -> Vec<&'s (dyn ToSql + Sync)> {
        let parameter = |arg: &'s Arg<'a>| -> &'s (dyn ToSql + Sync) {
            match arg {
                Self::Text(text) => text,
                Self::Int(number) => number,
                Self::Texts(texts) => texts,
                Self::Ints(numbers) => numbers,
            }
        };
        args.iter().map(parameter).collect()
    }

    fn push(&self, out: &mut String) -> Result<()> {
        match self {
            Self::Text(text) => push_quoted(text, out),
            Self::Int(n) => {
                let _ = write!(out, "{n}");
                Ok(())
            }
            Self::Texts(texts) => push_list(texts, "text", out, |text, out| push_quoted(text, out)),
            Self::Ints(numbers) => push_list(numbers, "int8", out, |n, out| {
                let _ = write!(out, "{n}");
                Ok(())
            }),
        }
    }
}

fn push_list<T>(
    items: &[T],
    of: &str,
    out: &mut String,
    push: impl Fn(&T, &mut String) -> Result<()>,
) -> Result<()> {
    out.push_str("ARRAY[");
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        push(item, out)?;
    }
    let _ = write!(out, "]::pg_catalog.{of}[]");
    Ok(())
}

/// The one place where foreign text becomes part of SQL text: an escape string, whose meaning does
/// not depend on `standard_conforming_strings`
/// (<https://www.postgresql.org/docs/current/sql-syntax-lexical.html#SQL-SYNTAX-STRINGS-ESCAPE>).
/// What is not ASCII travels as an escape: the server decodes a whole message by the session's
/// `client_encoding` before anything in it can be set, and every such encoding reads ASCII alike.
pub(crate) fn push_quoted(text: &str, out: &mut String) -> Result<()> {
    out.push_str("E'");
    for c in text.chars() {
        match c {
            '\0' => return Err(LockError::invalid("PostgreSQL text cannot hold U+0000")),
            '\'' => out.push_str("''"),
            '\\' => out.push_str("\\\\"),
            c if c.is_ascii() => out.push(c),
            c if c <= '\u{ffff}' => {
                let _ = write!(out, "\\u{:04X}", u32::from(c));
            }
            c => {
                let _ = write!(out, "\\U{:08X}", u32::from(c));
            }
        }
    }
    out.push('\'');
    Ok(())
}

/// A name as an identifier, with escapes for what is not ASCII, as in [`push_quoted`]
/// (<https://www.postgresql.org/docs/current/sql-syntax-lexical.html#SQL-SYNTAX-IDENTIFIERS>).
pub(crate) fn quoted_name(name: &str) -> String {
    if name.is_ascii() {
        return format!("\"{}\"", name.replace('"', "\"\""));
    }
    let mut out = "U&\"".to_owned();
    for c in name.chars() {
        match c {
            '"' => out.push_str("\"\""),
            '\\' => out.push_str("\\\\"),
            c if c.is_ascii() => out.push(c),
            c => {
                let _ = write!(out, "\\+{:06X}", u32::from(c));
            }
        }
    }
    out.push('"');
    out
}

/// One message to the server: statements that travel, and are answered, together.
pub(crate) struct Message<'a> {
    parts: Vec<Part<'a>>,
}

enum Part<'a> {
    Raw(String),
    Call(&'a Statement, Vec<Arg<'a>>),
}

impl<'a> Message<'a> {
    pub(crate) fn new() -> Self {
        Self { parts: Vec::with_capacity(6) }
    }

    /// Adds SQL text as it is.
    pub(crate) fn raw(mut self, sql: impl Into<String>) -> Self {
        let sql = sql.into();
        if !sql.is_empty() {
            self.parts.push(Part::Raw(sql));
        }
        self
    }

    pub(crate) fn call(mut self, statement: &'a Statement, args: &[Arg<'a>]) -> Self {
        self.parts.push(Part::Call(statement, args.to_vec()));
        self
    }

    /// Adds a call that is written out: for statements too rare to be prepared.
    pub(crate) fn plain(self, statement: &Statement, args: &[Arg<'_>]) -> Result<Self> {
        let mut sql = String::new();
        statement.write_out(args, &mut sql)?;
        Ok(self.raw(sql))
    }

    pub(crate) fn text(&self, plain: bool) -> Result<String> {
        let mut out = String::with_capacity(256);
        for part in &self.parts {
            if !out.is_empty() {
                out.push(';');
            }
            match part {
                Part::Raw(sql) => out.push_str(sql),
                Part::Call(statement, args) => statement.call(plain, args, &mut out)?,
            }
        }
        Ok(out)
    }
}

/// What is known of a connection: which statements it has prepared, and how its session began.
#[derive(Default)]
pub(crate) struct SessionState {
    prepared: HashSet<String>,
    /// The sets of statements of which it has all, see [`set_of`].
    sets: HashSet<u64>,
    /// What is called often, by the name of the statement.
    handles: HashMap<String, Handle>,
    /// Prepared statements do not stay on this connection: write everything out.
    pub(crate) plain: bool,
    /// How often in a row a prepared statement was gone.
    pub(crate) vanished: u8,
    /// The session began with the settings that transactions need, and this limit in milliseconds
    /// for its waits and statements: nothing has to be set that is already so.
    pub(crate) preset_limit_ms: Option<u64>,
    /// A timer that a session lock has set for the session, and that still runs.
    pub(crate) timer: Option<SessionTimer>,
}

/// How one statement is called on one connection.
pub(crate) enum Handle {
    /// By its name, so many times by now.
    Called(u32),
    /// By the driver's own kind of prepared statement.
    Ready(postgres::Statement),
}

/// An `idle_session_timeout` of ours, and the setting as it was before.
#[derive(Clone)]
pub(crate) struct SessionTimer {
    /// In milliseconds; 0 is no limit.
    pub(crate) limit_ms: u64,
    /// The same as the server shows it.
    pub(crate) shown: String,
    pub(crate) before: String,
}

/// How much later than the limit for locks the one for statements ends. Both count from the same
/// moment, and of the two errors only the one about locks says that waiting for it was contention.
pub(crate) const LOCKS_FIRST: u64 = 50;

/// How much longer than its call a transaction may lie idle between two messages. That limit is for a
/// client that is gone: one that is there rolls back by itself when its time is over.
pub(crate) const IDLE_MS: u64 = 1_000;

/// What a session could carry that would change an answer, and what is stated instead:
///
/// - `enable_seqscan`: a plan made while the table was tiny would keep the scan when it has grown.
/// - `row_security`: with it, a policy hides rows, and a key that is held looks free. Without it the
///   server refuses such a statement
///   (<https://www.postgresql.org/docs/current/runtime-config-client.html#GUC-ROW-SECURITY>).
/// - `client_encoding`: what the answers are in; the driver reads UTF-8.
/// - `client_min_messages`: that a commit may not have reached its standby is only a warning.
///
/// And one that changes no answer: `plan_cache_mode`. Left to itself the server plans a statement with a list or
/// a limit among its arguments anew with each call, which takes it longer than to carry it out.
const STATED: [(&str, &str); 5] = [
    ("enable_seqscan", "off"),
    ("row_security", "off"),
    ("client_encoding", "UTF8"),
    ("client_min_messages", "warning"),
    ("plan_cache_mode", "force_generic_plan"),
];

/// Fails, with an error that hardly anything else has, unless the transaction began with this message.
pub(crate) const ALONE: &str = "SELECT LIMIT CASE WHEN pg_catalog.transaction_timestamp() \
    OPERATOR(pg_catalog.=) pg_catalog.statement_timestamp() THEN 1 ELSE -1 END";

/// The same for one transaction, with the limits of its waits and statements.
pub(crate) fn stated(limit_ms: u64) -> String {
    let stated =
        STATED.iter().fold(String::new(), |all, (name, value)| format!("{all}SET LOCAL {name} TO {value};"));
    let statement_ms = limit_ms + LOCKS_FIRST;
    format!("{stated}SET LOCAL lock_timeout TO {limit_ms};SET LOCAL statement_timeout TO {statement_ms}")
}

/// The settings that a session of ours begins with, as the `options` of its startup message. They
/// are the session's defaults: nothing that runs in it, and no `DISCARD ALL`, takes them away.
pub(crate) fn startup_options(limit_ms: u64) -> String {
    let (statement_ms, idle_ms) = (limit_ms + LOCKS_FIRST, limit_ms + IDLE_MS);
    let stated = STATED.iter().fold(String::new(), |all, (name, value)| format!("{all}-c {name}={value} "));
    format!(
        "{stated}-c lock_timeout={limit_ms} -c statement_timeout={statement_ms} \
         -c idle_in_transaction_session_timeout={idle_ms} \
         -c default_transaction_isolation=read\\ committed -c default_transaction_read_only=off \
         -c syncguard.settled_ms={limit_ms}"
    )
}

/// A number for these statements together: two sets may share some of them, as clients with different
/// tables do on a caller's connection.
fn set_of(statements: &[&Statement]) -> u64 {
    statements.iter().fold(0, |all, statement| all.rotate_left(7) ^ statement.digest)
}

impl SessionState {
    /// The statements that this connection has yet to prepare.
    pub(crate) fn missing<'s>(&self, statements: &[&'s Statement]) -> Vec<&'s Statement> {
        if self.plain || self.sets.contains(&set_of(statements)) {
            return Vec::new();
        }
        statements.iter().copied().filter(|s| !self.prepared.contains(&s.name)).collect()
    }

    /// The message that prepares them, and asks how the session began. It needs the limits of
    /// any other transaction: to prepare a statement takes a lock on its tables.
    pub(crate) fn preparation(limits: String, missing: &[&Statement]) -> Message<'static> {
        let mut message = Message::new().raw(limits);
        for statement in missing {
            message = message.raw(statement.prepare());
        }
        message.raw("SELECT pg_catalog.current_setting('syncguard.settled_ms', true)")
    }

    /// Notes that this connection has all of these statements.
    pub(crate) fn remember(&mut self, statements: &[&Statement]) {
        self.prepared.extend(statements.iter().map(|s| s.name.clone()));
        self.sets.insert(set_of(statements));
    }

    /// The driver's own prepared statement for this one, or how it is to be called for now.
    pub(crate) fn handle(&mut self, statement: &Statement) -> Handle {
        match self.handles.get_mut(&statement.name) {
            Some(Handle::Ready(handle)) => Handle::Ready(handle.clone()),
            Some(Handle::Called(times)) => {
                *times += 1;
                Handle::Called(*times)
            }
            None => {
                self.handles.insert(statement.name.clone(), Handle::Called(1));
                Handle::Called(1)
            }
        }
    }

    pub(crate) fn keep_handle(&mut self, statement: &Statement, handle: postgres::Statement) {
        self.handles.insert(statement.name.clone(), Handle::Ready(handle));
    }

    /// Prepared statements are gone (`DISCARD ALL`, a pooler): prepare again, or give up on it.
    pub(crate) fn forget(&mut self) {
        self.prepared.clear();
        self.sets.clear();
        self.handles.clear();
        self.vanished = self.vanished.saturating_add(1);
        self.plain |= self.vanished >= 2;
        if self.plain {
            // This is not one session, or not one that stays as it was: nothing is known of its settings.
            self.preset_limit_ms = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_quoted_and_nul_is_refused() {
        let mut out = String::new();
        push_quoted("it's a \\ \n \u{fc}\u{1F512}", &mut out).unwrap();
        assert_eq!(out, "E'it''s a \\\\ \n \\u00FC\\U0001F512'");
        assert!(push_quoted("a\0b", &mut String::new()).is_err());
    }

    #[test]
    fn a_call_is_by_name_or_written_out() {
        let statement = Statement::new("x", &["text", "int8"], "SELECT $2, $1, $2".into());
        let args = [Arg::Text("$1'"), Arg::Int(-7)];
        let message = Message::new().raw("BEGIN").call(&statement, &args);
        let by_name = message.text(false).unwrap();
        assert_eq!(by_name, format!("BEGIN;EXECUTE {}(E'$1''',-7)", statement.name));
        assert_eq!(message.text(true).unwrap(), "BEGIN;SELECT (-7)::int8, (E'$1''')::text, (-7)::int8");
    }

    #[test]
    fn a_statement_name_tells_texts_apart_and_fits_an_identifier() {
        let (a, b) =
            (Statement::new("x", &[], "SELECT 1".into()), Statement::new("x", &[], "SELECT 2".into()));
        assert_ne!(a.name, b.name);
        assert!(a.name.len() < 63);
    }

    #[test]
    fn a_set_that_shares_a_statement_with_another_is_not_complete_with_that() {
        let statement = |text: &str| Statement::new("x", &[], text.into());
        let (a, b, both) = (statement("SELECT 1"), statement("SELECT 2"), statement("SELECT 3"));
        let mut state = SessionState::default();
        state.remember(&[&a, &both]);
        let missing: Vec<_> = state.missing(&[&b, &both]).iter().map(|s| s.text().to_owned()).collect();
        assert_eq!(missing, ["SELECT 2"]);
        state.remember(&[&b, &both]);
        assert!(state.missing(&[&a, &both]).is_empty() && state.missing(&[&b, &both]).is_empty());
    }

    #[test]
    fn vanished_statements_are_prepared_once_more_and_then_written_out() {
        let statement = Statement::new("x", &[], "SELECT 1".into());
        let mut state = SessionState::default();
        state.remember(&[&statement]);
        assert!(state.missing(&[&statement]).is_empty());
        state.preset_limit_ms = Some(5_000);
        state.forget();
        assert_eq!(state.missing(&[&statement]).len(), 1);
        assert!(!state.plain && state.preset_limit_ms.is_some());
        state.forget();
        assert!(state.plain && state.preset_limit_ms.is_none());
    }
}
