//! As much of SQL's grammar as is needed to find conditions, row locks, orders and limits in the library's own texts.

use std::ops::Range;

/// A word, a literal, a quoted name, an `OPERATOR(…)`, or a single character.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token<'a> {
    pub text: &'a str,
    pub at: usize,
}

impl Token<'_> {
    pub fn end(&self) -> usize {
        self.at + self.text.len()
    }
}

pub fn tokens(sql: &str) -> Vec<Token<'_>> {
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(c) = sql[at..].chars().next() {
        let rest = &sql[at..];
        let length = match c {
            _ if c.is_whitespace() => {
                at += c.len_utf8();
                continue;
            }
            '\'' | '"' => quoted(rest, c),
            'E' if rest.starts_with("E'") => 1 + quoted(&rest[1..], '\''),
            'O' if rest.starts_with("OPERATOR(") => rest.find(')').map_or(rest.len(), |end| end + 1),
            '$' => 1 + word(&rest[1..]),
            _ if c.is_alphanumeric() || c == '_' => word(rest),
            _ => c.len_utf8(),
        };
        found.push(Token { text: &rest[..length], at });
        at += length;
    }
    found
}

/// Up to the quote that is not doubled.
fn quoted(text: &str, quote: char) -> usize {
    let mut end = 1;
    loop {
        match text[end..].find(quote) {
            None => return text.len(),
            Some(at) if text[end + at + 1..].starts_with(quote) => end += at + 2,
            Some(at) => return end + at + 1,
        }
    }
}

fn word(text: &str) -> usize {
    text.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == '.')).unwrap_or(text.len())
}

/// A condition: the word before it, and its tokens.
pub struct Condition {
    pub after: &'static str,
    pub tokens: Range<usize>,
}

/// What ends a condition after `WHERE`, or after the `ON` of a join.
const ENDS: [&str; 14] = [
    "RETURNING",
    "FOR",
    "ORDER",
    "GROUP",
    "LIMIT",
    "OFFSET",
    "UNION",
    "WHERE",
    "LEFT",
    "CROSS",
    "JOIN",
    "THEN",
    "ON",
    ",",
];

/// All conditions of a text, inner ones, too.
pub fn conditions(tokens: &[Token<'_>]) -> Vec<Condition> {
    let mut found = Vec::new();
    for (n, token) in tokens.iter().enumerate() {
        let start = n + 1;
        let condition = match token.text {
            "WHERE" => Some(("WHERE", until(tokens, start, &ENDS))),
            "ON" if !next_is(tokens, start, &["CONFLICT"]) => Some(("ON", until(tokens, start, &ENDS))),
            "WHEN" => Some(("WHEN", until(tokens, start, &["THEN"]))),
            "(" if !next_is(tokens, start, &["SELECT", "WITH", "VALUES", "INSERT", "UPDATE", "DELETE"]) => {
                let end = until(tokens, start, &[]);
                let is_condition = split(tokens, start..end, &["AND", "OR"]).len() > 1;
                is_condition.then_some(("(", end))
            }
            _ => None,
        };
        found.extend(condition.map(|(after, end)| Condition { after, tokens: start..end }));
    }
    found
}

pub fn next_is(tokens: &[Token<'_>], at: usize, words: &[&str]) -> bool {
    tokens.get(at).is_some_and(|token| words.contains(&token.text))
}

/// The first of these words that is in no brackets and in no `CASE` within, or the bracket that closes.
pub fn until(tokens: &[Token<'_>], start: usize, words: &[&str]) -> usize {
    let mut depth = 0;
    for (n, token) in tokens.iter().enumerate().skip(start) {
        match token.text {
            ")" | "END" if depth == 0 => return n,
            text if depth == 0 && words.contains(&text) => return n,
            "(" | "CASE" => depth += 1,
            ")" | "END" => depth -= 1,
            _ => {}
        }
    }
    tokens.len()
}

/// The parts between these words.
pub fn split(tokens: &[Token<'_>], range: Range<usize>, words: &[&str]) -> Vec<Range<usize>> {
    let (mut parts, mut start) = (Vec::new(), range.start);
    loop {
        let end = until(tokens, start, words).min(range.end);
        parts.push(start..end);
        if end >= range.end {
            return parts;
        }
        start = end + 1;
    }
}

#[cfg(test)]
mod checks {
    use super::*;

    #[test]
    fn conditions_end_where_they_end() {
        let sql = "SELECT a FROM \"s; AND\".t AS l WHERE l.k OPERATOR(pg_catalog.=) $1 AND (x OR NOT (SELECT 1 WHERE y)) \
                   FOR UPDATE OF l SKIP LOCKED";
        let tokens = tokens(sql);
        let texts =
            |range: &Range<usize>| sql[tokens[range.start].at..tokens[range.end - 1].end()].to_owned();
        let found: Vec<_> =
            conditions(&tokens).iter().map(|it| format!("{} {}", it.after, texts(&it.tokens))).collect();
        assert_eq!(
            found,
            [
                "WHERE l.k OPERATOR(pg_catalog.=) $1 AND (x OR NOT (SELECT 1 WHERE y))",
                "( x OR NOT (SELECT 1 WHERE y)",
                "WHERE y",
            ]
        );
        let tokens = super::tokens("CASE WHEN a THEN 'it''s' WHEN CASE WHEN b THEN c END AND d THEN e END");
        let found: Vec<_> = conditions(&tokens).iter().map(|it| it.tokens.len()).collect();
        assert_eq!(found, [1, 8, 1]);
    }
}
