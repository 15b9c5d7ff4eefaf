//! The findings of a check.

use std::borrow::Cow;
use std::fmt;

/// How much a [`Finding`] matters. They are ordered: `Note` is the least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Severity {
    /// Good to know. Nothing is at risk.
    Note,
    /// Locks are correct, but slow, or calls may fail.
    Slow,
    /// Two holders, a fence that is handed out twice, or a change that is lost, are possible.
    Unsafe,
}

impl Severity {
    /// `note`, `slow` or `unsafe`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Slow => "slow",
            Self::Unsafe => "unsafe",
        }
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// One thing that [`Operator::check`](crate::Operator::check) found. `Display` is one line with all of it.
///
/// It names settings, tables, roles and processes; no key, no lock id and no password.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Finding {
    /// How much it matters.
    pub severity: Severity,
    /// A stable code for what was found, one of those in the table of [`docs/operations.md`](https://docs.rs/crate/syncguard/latest/source/docs/operations.md).
    pub code: Cow<'static, str>,
    /// The value that was seen, such as `fsync = off`.
    pub seen: String,
    /// What that means for locks.
    pub meaning: Cow<'static, str>,
    /// One command that fixes it: SQL, unless it says otherwise.
    pub mend: String,
}

impl Finding {
    pub(super) fn new(
        severity: Severity,
        code: &'static str,
        seen: impl Into<String>,
        meaning: impl Into<Cow<'static, str>>,
        mend: impl Into<String>,
    ) -> Self {
        debug_assert!(CODES.contains(&code), "{code} is not in the list");
        Self { severity, code: code.into(), seen: seen.into(), meaning: meaning.into(), mend: mend.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { severity, code, seen, meaning, mend } = self;
        let line = format!("{severity} {code}: {seen}; {meaning}; mend with: {mend}");
        // Names in a database may hold anything.
        f.write_str(&line.replace(char::is_control, " "))
    }
}

/// Every code there is.
pub(super) const CODES: [&str; 33] = [
    "asynchronous-standby",
    "autovacuum",
    "clock",
    "collation",
    "collation-not-bytes",
    "column",
    "commit-timestamps",
    "connections",
    "constraint",
    "encoding",
    "expiry-index",
    "fsync",
    "full-page-writes",
    "members-unlogged",
    "not-a-plain-table",
    "not-looked-at",
    "old-snapshot",
    "pooler",
    "prepared-transaction",
    "rights-missing",
    "rights-to-spare",
    "row-security",
    "rule",
    "search-path",
    "server-version",
    "session-default",
    "session-locks",
    "standby",
    "standby-missing",
    "synchronous-commit",
    "tables-missing",
    "trigger",
    "unique-index",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_in_the_table_of_the_documents_and_no_other() {
        let page = include_str!("../../docs/operations.md");
        let section = page.split("## Check").nth(1).unwrap().split("\n## ").next().unwrap();
        let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        let mut listed: Vec<_> = rows.collect();
        listed.sort_unstable();
        assert_eq!(listed, CODES);
    }

    #[test]
    fn a_finding_is_one_line_whatever_is_in_it() {
        let finding = Finding::new(Severity::Unsafe, "rule", "a\nb", "it swallows", "DROP RULE \"a\nb\"");
        assert_eq!(finding.to_string(), "unsafe rule: a b; it swallows; mend with: DROP RULE \"a b\"");
        assert!(Severity::Unsafe > Severity::Slow && Severity::Slow > Severity::Note);
        assert_eq!(format!("[{:>6}]", Severity::Slow), "[  slow]");
    }
}
