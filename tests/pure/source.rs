//! Reads Rust sources as tokens, so that a rule about code never trips over a comment or a string.

use std::fs;
use std::path::Path;
use std::str::FromStr as _;

use proc_macro2::{Delimiter, LexError, Spacing, TokenStream, TokenTree};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Word,
    Literal,
    /// One character, or `::`, or `'` of a lifetime.
    Sign,
}

#[derive(Clone, Debug)]
pub(crate) struct Token {
    pub(crate) kind: Kind,
    pub(crate) text: String,
    pub(crate) line: usize,
}

/// `a::b::c`, with what stood in braces after `::` taken apart.
#[derive(Clone, Debug)]
pub(crate) struct NamePath {
    pub(crate) names: Vec<String>,
    pub(crate) line: usize,
}

/// One file, without comments, documentation and whatever is `#[cfg(test)]`.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// Path from the top of the repository, with `/`.
    pub(crate) file: String,
    /// `["postgres", "sql"]`; empty for lib.rs.
    pub(crate) module: Vec<String>,
    pub(crate) tokens: Vec<Token>,
    /// Lines that are more than a comment.
    pub(crate) lines: usize,
}

/// Words that may stand before `::name`.
const KEYWORDS: [&str; 14] =
    ["as", "dyn", "else", "for", "if", "impl", "in", "match", "move", "mut", "pub", "return", "use", "where"];

/// Every Rust file under a directory of the repository.
pub(crate) fn read_all(top: &Path, dir: &str) -> Vec<Source> {
    let mut files = Vec::new();
    walk(&top.join(dir), &mut |path| files.push(path.to_owned()));
    files.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    files.sort();
    let read = |path: &std::path::PathBuf| {
        let name = path.strip_prefix(top).unwrap_or(path).to_string_lossy().replace('\\', "/");
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{name}: {error}"));
        Source::parse(&name, &text).unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    files.iter().map(read).collect()
}

/// Visits all files below a directory, hidden directories and build output left out. In a worktree, `.git` is
/// a file.
pub(crate) fn walk(dir: &Path, visit: &mut impl FnMut(&Path)) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if !path.is_dir() {
            if name != ".git" {
                visit(&path);
            }
        } else if name == ".ci" || name == ".github" || !(name.starts_with('.') || name.starts_with("target"))
        {
            walk(&path, visit);
        }
    }
}

impl Source {
    pub(crate) fn parse(file: &str, text: &str) -> Result<Self, LexError> {
        let mut tokens = Vec::new();
        flatten(TokenStream::from_str(text)?, &mut tokens);
        let path = file.strip_prefix("src/").unwrap_or(file).trim_end_matches(".rs");
        let module =
            path.split('/').filter(|name| !["lib", "mod"].contains(name)).map(str::to_owned).collect();
        let lines = text.lines().filter(|line| !line.trim_start().starts_with("//")).count();
        Ok(Self { file: file.to_owned(), module, tokens, lines })
    }

    /// The name of the file's top module; empty for lib.rs.
    pub(crate) fn top(&self) -> &str {
        self.module.first().map_or("", String::as_str)
    }

    pub(crate) fn words(&self) -> impl Iterator<Item = &Token> {
        self.tokens.iter().filter(|token| token.kind == Kind::Word)
    }

    pub(crate) fn literals(&self) -> impl Iterator<Item = &Token> {
        self.tokens.iter().filter(|token| token.kind == Kind::Literal)
    }

    fn text(&self, at: usize) -> &str {
        self.tokens.get(at).map_or("", |token| token.text.as_str())
    }

    fn is_word(&self, at: usize) -> bool {
        self.tokens.get(at).is_some_and(|token| token.kind == Kind::Word)
    }

    /// Places of a word that is followed by this sign.
    pub(crate) fn followed_by<'a>(&'a self, word: &'a str, sign: &'a str) -> impl Iterator<Item = &'a Token> {
        let here = move |(at, token): &(usize, &Token)| token.text == word && self.text(at + 1) == sign;
        self.tokens.iter().enumerate().filter(here).map(|(_, token)| token)
    }

    /// The names of `static` items; a `'static` lifetime is none.
    pub(crate) fn statics(&self) -> impl Iterator<Item = &Token> {
        let item = |at: &usize| {
            self.text(*at) == "static" && at.checked_sub(1).is_none_or(|before| self.text(before) != "'")
        };
        let name = |at: usize| self.tokens.get(if self.text(at + 1) == "mut" { at + 2 } else { at + 1 });
        (0..self.tokens.len()).filter(item).filter_map(name)
    }

    /// All names that the code uses, from their first part on.
    pub(crate) fn paths(&self) -> Vec<NamePath> {
        let mut found = Vec::new();
        let mut at = 0;
        while at < self.tokens.len() {
            // `use ::a`, `dyn ::a`: the keyword is no part of the path.
            let begins = self.is_word(at) && !KEYWORDS.contains(&self.text(at));
            at = if begins { self.path(at, &[], &mut found) } else { at + 1 };
        }
        found
    }

    /// Reads one path that begins with the word at `at`; the place after it.
    fn path(&self, mut at: usize, prefix: &[String], found: &mut Vec<NamePath>) -> usize {
        let line = self.tokens.get(at).map_or(0, |token| token.line);
        let mut names = prefix.to_vec();
        names.push(self.text(at).to_owned());
        while self.text(at + 1) == "::" {
            match self.text(at + 2) {
                "{" => return self.group(at + 3, &names, found),
                next if next == "*" || self.is_word(at + 2) => names.push(next.to_owned()),
                _ => break,
            }
            at += 2;
        }
        found.push(NamePath { names, line });
        at + 1
    }

    fn group(&self, mut at: usize, prefix: &[String], found: &mut Vec<NamePath>) -> usize {
        while at < self.tokens.len() && self.text(at) != "}" {
            at = match self.text(at) {
                "," => at + 1,
                // `a::{b as c}`: the new name is no path.
                "as" => at + 2,
                _ => self.path(at, prefix, found),
            };
        }
        at + 1
    }

    /// The functions of the file: name, and the tokens from the name to the end of the body.
    pub(crate) fn functions(&self) -> Vec<(&str, &[Token])> {
        let mut found = Vec::new();
        for at in 0..self.tokens.len() {
            if self.text(at) != "fn" || !self.is_word(at + 1) {
                continue;
            }
            let mut depth = 0;
            let mut opened = false;
            let ends = |token: &Token| {
                match token.text.as_str() {
                    "{" | "(" | "[" => depth += 1,
                    "}" | ")" | "]" => depth -= 1,
                    _ => {}
                }
                opened |= token.text == "{" && depth == 1;
                depth == 0 && (token.text == ";" || (opened && token.text == "}"))
            };
            let rest = self.tokens.get(at + 1..).unwrap_or_default();
            let length = rest.iter().position(ends).map_or(rest.len(), |last| last + 1);
            found.push((self.text(at + 1), rest.get(..length).unwrap_or_default()));
        }
        found
    }
}

fn flatten(stream: TokenStream, out: &mut Vec<Token>) {
    let trees: Vec<TokenTree> = stream.into_iter().collect();
    let mut at = 0;
    while let Some(tree) = trees.get(at) {
        at += 1;
        let line = tree.span().start().line;
        let mut push = |kind, text: String| out.push(Token { kind, text, line });
        match tree {
            TokenTree::Punct(sign) if sign.as_char() == '#' => {
                // Outer and inner attributes; `#` elsewhere (in a macro) has no brackets after it.
                let inner = matches!(trees.get(at), Some(TokenTree::Punct(mark)) if mark.as_char() == '!');
                let Some(TokenTree::Group(group)) = trees.get(at + usize::from(inner)) else { continue };
                at += usize::from(inner) + 1;
                let text = group.stream().to_string();
                if text.replace(' ', "") == "cfg(test)" {
                    at = after_item(&trees, at);
                } else if !text.starts_with("doc ") {
                    flatten(group.stream(), out);
                }
            }
            TokenTree::Punct(sign) if sign.as_char() == ':' && sign.spacing() == Spacing::Joint => {
                at += 1;
                push(Kind::Sign, "::".into());
            }
            TokenTree::Punct(sign) => push(Kind::Sign, sign.to_string()),
            TokenTree::Ident(word) => push(Kind::Word, word.to_string()),
            TokenTree::Literal(literal) => push(Kind::Literal, literal.to_string()),
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::None => ("", ""),
                };
                push(Kind::Sign, open.into());
                flatten(group.stream(), out);
                let line = group.span_close().end().line;
                out.push(Token { kind: Kind::Sign, text: close.into(), line });
            }
        }
    }
}

/// The place behind the item that begins here: behind its braces or its semicolon.
fn after_item(trees: &[TokenTree], from: usize) -> usize {
    let ends = |tree: &TokenTree| match tree {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(sign) => sign.as_char() == ';',
        _ => false,
    };
    let rest = trees.get(from..).unwrap_or_default();
    from + rest.iter().position(ends).map_or(rest.len(), |last| last + 1)
}
