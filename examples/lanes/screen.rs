//! Where a demonstration speaks: how wide it is, and whether it has colours.

use std::env;
use std::io::{self, IsTerminal as _};

/// Where nobody says how wide it is.
const COLUMNS: usize = 80;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Dim,
    Green,
    Red,
    Good,
    Bad,
}

pub(crate) struct Screen {
    colours: bool,
    columns: usize,
}

impl Screen {
    /// Colours only on a terminal (or with `CLICOLOR_FORCE`), and never with `NO_COLOR`. The width is the
    /// terminal's, else that of `COLUMNS`.
    pub(crate) fn new() -> Self {
        let set = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let (terminal, out) = (io::stdout().is_terminal(), io::stdout());
        let own = rustix::termios::tcgetwinsize(&out).ok().map(|size| usize::from(size.ws_col));
        let told = set("COLUMNS").and_then(|columns| columns.parse().ok());
        let columns = own.filter(|_| terminal).or(told).filter(|columns| *columns > 0).unwrap_or(COLUMNS);
        let colours = (terminal || set("CLICOLOR_FORCE").is_some()) && set("NO_COLOR").is_none();
        Self { colours, columns: columns.max(30) }
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// A paragraph, which wraps between words.
    pub(crate) fn say(&self, tone: Tone, text: &str) {
        for line in wrap(text.split(' '), " ", self.columns) {
            println!("{}", self.paint(tone, &line));
        }
    }

    /// Entries of a list in one line, which wraps between them.
    pub(crate) fn entries(&self, tone: Tone, entries: &[&str]) {
        for line in wrap(entries.iter().copied(), "   ", self.columns) {
            println!("{}", self.paint(tone, &line));
        }
    }

    /// A text beside what stands in these first columns; its further lines stand below it.
    pub(crate) fn beside(&self, head: &str, columns: usize, tone: Tone, text: &str) {
        let lines = wrap(text.split(' '), " ", self.columns.saturating_sub(columns).max(12));
        for (n, line) in lines.iter().enumerate() {
            let left = if n == 0 { head.to_owned() } else { " ".repeat(columns) };
            println!("{left}{}", self.paint(tone, line));
        }
    }

    pub(crate) fn paint(&self, tone: Tone, text: &str) -> String {
        let colour = match tone {
            Tone::Plain => return text.into(),
            Tone::Dim => "2",
            Tone::Green => "32",
            Tone::Red => "31",
            Tone::Good => "1;32",
            Tone::Bad => "1;31",
        };
        if self.colours { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.into() }
    }
}

fn wrap<'a>(words: impl Iterator<Item = &'a str>, between: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in words {
        match lines.last_mut() {
            Some(line) if line.chars().count() + between.len() + word.chars().count() <= columns => {
                line.push_str(between);
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}
