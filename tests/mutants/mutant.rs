//! A statement without one of its parts.

use std::fmt;
use std::ops::Range;

use crate::grammar::{Token, conditions, next_is, split, tokens, until};
use crate::support::sql::Said;

/// What is taken out of which statement. The text is that of the part, without the names of schemas, and with arguments
/// that are written out left out: it is the same in every test.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mutant {
    /// As it is prepared, or how its text begins.
    pub statement: String,
    /// What stands there instead of what, and which of several such parts it is.
    pub part: String,
    pub nth: usize,
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\t{}\t{}", self.statement, self.part, self.nth)
    }
}

/// Statements that are made from the texts of others: what both have is one text of the library.
const MADE_FROM: [(&str, &[&str]); 23] = [
    ("turn_absent", &["acquire_absent"]),
    ("turn_acquire", &["acquire", "turn_absent"]),
    ("turn_note_absent", &["turn_absent", "note_absent"]),
    ("turn_note_acquire", &["turn_acquire", "turn_absent", "turn_note_absent", "note_absent"]),
    ("note_absent", &["acquire_absent"]),
    ("note_grant", &["grant", "note_absent"]),
    ("note_acquire", &["acquire", "note_absent"]),
    ("note_release", &["release"]),
    ("note_release_live", &["release_live", "note_release"]),
    ("note_delete", &["delete"]),
    ("note_permit", &["permit_grant", "note_absent"]),
    ("note_permit_release", &["permit_release", "note_release"]),
    ("note_set_absent", &["set_absent", "note_absent"]),
    ("note_set_grant", &["set_grant", "note_absent", "note_set_absent"]),
    ("note_set_release", &["set_release", "note_release"]),
    ("note_set_quietly", &["set_release", "note_set_release", "note_release"]),
    ("note_run", &["begin_run", "note_absent"]),
    ("permit_release", &["release_live"]),
    ("begin_run", &["acquire"]),
    ("set_grant", &["set_absent"]),
    ("set_release_quietly", &["set_release"]),
    ("leave_quietly", &["leave"]),
    ("renew_shared_alone", &["renew_shared"]),
];

fn made_from(statement: &str) -> &'static [&'static str] {
    MADE_FROM.iter().find(|(made, _)| *made == statement).map_or(&[], |(_, from)| from)
}

impl Mutant {
    /// The same part of the statements that this one is made from: it is taken out of all of them together.
    pub fn elsewhere(&self) -> impl Iterator<Item = Self> {
        made_from(&self.statement)
            .iter()
            .map(|statement| Self { statement: (*statement).to_owned(), ..self.clone() })
    }

    /// Whether the part is one of this statement, too.
    pub fn is_in(&self, statement: &str) -> bool {
        statement == self.statement || made_from(statement).iter().any(|from| self.is_in(from))
    }

    /// The statement as it is with this mutant in force.
    pub fn text(&self, said: Said<'_>) -> String {
        if !self.is_in(&statement(said)) {
            return said.text.to_owned();
        }
        let found = parts(said.text)
            .into_iter()
            .find(|(mutant, _)| (&mutant.part, mutant.nth) == (&self.part, self.nth));
        found.map_or_else(|| said.text.to_owned(), |(_, text)| text)
    }
}

/// All of a statement's, none if it is not the library's.
pub fn mutants(said: Said<'_>) -> Vec<Mutant> {
    // A written-out copy of a prepared statement casts each argument: it stands for itself already.
    let is_copy = said.name.is_empty() && said.text.contains(")::pg_catalog.");
    let is_ours = !said.name.is_empty() || said.text.contains("OPERATOR(pg_catalog.");
    if is_copy || !is_ours || !has_usual_names(said.text) {
        return Vec::new();
    }
    let statement = statement(said);
    let all = parts(said.text).into_iter();
    all.map(|(mutant, _)| Mutant { statement: statement.clone(), ..mutant }).collect()
}

/// Whether its tables are those of a client that names none: the same statement for other ones is no other statement.
fn has_usual_names(sql: &str) -> bool {
    let tokens = tokens(sql);
    let behind_dot =
        (2..tokens.len()).filter(|n| tokens[n - 1].text == "." && tokens[n - 2].text.starts_with('"'));
    let escaped = sql.contains("U&\"");
    // A client that has them the other way round is refused, but it asks.
    let swapped = ["\"syncguard_fence_counters\" AS l ", "\"syncguard_locks\" AS c "];
    behind_dot.map(|n| tokens[n].text).all(|name| name.starts_with("\"syncguard_"))
        && !escaped
        && !swapped.iter().any(|table| sql.contains(table))
}

/// How a statement is called here.
pub fn statement(said: Said<'_>) -> String {
    if !said.name.is_empty() {
        return said.name.to_owned();
    }
    let tokens = tokens(said.text);
    let text = plain(said.text, &tokens, true);
    format!("'{}'", text.chars().take(70).collect::<String>())
}

/// Each part with what the text is without it.
fn parts(sql: &str) -> Vec<(Mutant, String)> {
    let tokens = tokens(sql);
    // Without parameters numbers are arguments.
    let is_written_out = !tokens.iter().any(|token| token.text.starts_with('$'));
    let mut found: Vec<(Mutant, String)> = Vec::new();
    let mut add = |range: Range<usize>, instead: &str| {
        let Some((first, last)) =
            tokens.get(range.clone()).and_then(|part| Some((part.first()?, part.last()?)))
        else {
            return;
        };
        let without = plain(&sql[first.at..last.end()], &tokens[range], is_written_out);
        if without == instead {
            return;
        }
        let part = if instead.is_empty() { without } else { format!("{instead} for {without}") };
        let nth = found.iter().filter(|(mutant, _)| mutant.part == part).count();
        let text = format!("{} {instead} {}", &sql[..first.at], &sql[last.end()..]);
        found.push((Mutant { statement: String::new(), part, nth }, text));
    };
    for condition in conditions(&tokens) {
        let alternatives = split(&tokens, condition.tokens.clone(), &["OR"]);
        for alternative in &alternatives {
            let conjuncts = split(&tokens, alternative.clone(), &["AND"]);
            if conjuncts.len() > 1 {
                conjuncts.into_iter().for_each(|conjunct| add(conjunct, "true"));
            }
            if alternatives.len() > 1 {
                add(alternative.clone(), "false");
            }
        }
        match condition.after {
            "WHEN" => ["true", "false"].iter().for_each(|instead| add(condition.tokens.clone(), instead)),
            "WHERE" | "ON"
                if alternatives.len() == 1
                    && split(&tokens, alternatives[0].clone(), &["AND"]).len() == 1 =>
            {
                add(condition.tokens.clone(), "true");
            }
            _ => {}
        }
    }
    for (n, token) in tokens.iter().enumerate() {
        match token.text {
            "FOR" if next_is(&tokens, n + 1, &["UPDATE", "SHARE", "NO", "KEY"]) => {
                let end = until(&tokens, n + 1, &["UNION", "LIMIT"]);
                let skips = (n..end).find(|at| next_is(&tokens, *at, &["SKIP"]));
                add(n..end, "");
                skips.into_iter().for_each(|at| add(at..at + 2, ""));
            }
            "ORDER" => {
                add(n..until(&tokens, n + 1, &["ON", "LIMIT", "OFFSET", "FOR", "RETURNING", "UNION"]), "");
            }
            "LIMIT" | "OFFSET" if !next_is(&tokens, n + 1, &["CASE"]) => add(n..n + 2, ""),
            _ => {}
        }
    }
    found
}

/// The text without schemas, and with `…` in the place of arguments that are written out.
fn plain(sql: &str, tokens: &[Token<'_>], is_written_out: bool) -> String {
    let (mut out, mut end) = (String::with_capacity(sql.len()), tokens.first().map_or(0, |token| token.at));
    for (n, token) in tokens.iter().enumerate() {
        if token.at > end {
            out.push(' ');
        }
        end = token.end();
        let digits = token.text.trim_matches('\'');
        let is_number = digits.chars().all(|c| c.is_ascii_digit());
        let is_argument = token.text.starts_with("E'")
            || (token.text.starts_with('\'') && digits.len() > 14 && !digits.contains([' ', '%']))
            || (is_number && (digits.len() > 3 || is_written_out));
        let is_schema = token.text.starts_with('"') && next_is(tokens, n + 1, &["."]);
        let is_dot = token.text == "." && n > 0 && tokens[n - 1].text.starts_with('"');
        match token.text {
            _ if is_argument => out.push('…'),
            _ if is_schema || is_dot => {}
            text => out.push_str(&text.replace("pg_catalog.", "").replace("OPERATOR", "").replace('"', "")),
        }
    }
    out.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn every_part_is_taken_out_and_nothing_else() {
    let text = "WITH t AS (SELECT 1 FROM \"s\".\"syncguard_t\" AS l WHERE l.k OPERATOR(pg_catalog.=) $1 AND NOT (l.a OR l.b) ORDER BY 1 \
                FOR UPDATE OF l SKIP LOCKED) SELECT CASE WHEN x THEN 1 END FROM t LEFT JOIN u ON true LIMIT 1";
    let found: Vec<_> = parts(text).into_iter().map(|(mutant, _)| mutant.part).collect();
    assert_eq!(
        found,
        [
            "true for l.k (=) $1",
            "true for NOT (l.a OR l.b)",
            "false for l.a",
            "false for l.b",
            "true for x",
            "false for x",
            "ORDER BY 1",
            "FOR UPDATE OF l SKIP LOCKED",
            "SKIP LOCKED",
            "LIMIT 1"
        ]
    );
    let mutant = mutants(Said { name: "x", text })[0].clone();
    let other = text.replace("\"s\"", "\"another\"");
    assert!(
        mutant
            .text(Said { name: "x", text: &other })
            .contains("\"another\".\"syncguard_t\" AS l WHERE  true  AND NOT")
    );
    assert_eq!(mutant.text(Said { name: "y", text }), text);
}
