//! Statements of the library where they travel: which one is it, and where does it begin and end.

use std::ops::Range;

/// A statement within a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said<'a> {
    /// What it is called where it is prepared, without the digest of its text; `fence_transaction` and `complete_in` in
    /// a caller's transaction; nothing for all others.
    pub name: &'a str,
    /// Without the `PREPARE` before it.
    pub text: &'a str,
}

/// What only these statements of a caller's transaction say.
const OF_CALLERS: [(&str, &str); 2] = [
    (
        "fence_transaction",
        "syncguard: the lease is over or a newer holder exists; this transaction cannot commit",
    ),
    ("complete_in", "syncguard: this slot is done already; this transaction cannot commit"),
];

impl<'a> Said<'a> {
    /// A statement as it was sent.
    pub fn read(statement: &'a str) -> Self {
        let prepared =
            statement.trim_start().strip_prefix("PREPARE sg_").and_then(|rest| rest.split_once(" AS "));
        if let Some((head, text)) = prepared {
            let name = head.split('(').next().unwrap_or(head);
            return Self { name: name.rsplit_once('_').map_or(name, |(name, _digest)| name), text };
        }
        let of_a_caller = OF_CALLERS.iter().find(|(_, says)| statement.contains(says));
        Self { name: of_a_caller.map_or("", |(name, _)| name), text: statement }
    }
}

/// Where the statements of a message are: between semicolons that are in no literal and no quoted name.
pub fn statements(message: &str) -> Vec<Range<usize>> {
    let (mut found, mut start, mut inside) = (Vec::new(), 0, None);
    for (at, c) in message.char_indices() {
        match (inside, c) {
            (None, '\'' | '"') => inside = Some(c),
            (Some(quote), c) if c == quote => inside = None,
            (None, ';') => {
                found.push(start..at);
                start = at + 1;
            }
            _ => {}
        }
    }
    found.push(start..message.len());
    found
}

/// The message with other texts in the place of its statements'.
pub fn rewritten(message: &str, rewrite: &dyn Fn(Said<'_>) -> String) -> String {
    let mut out = String::with_capacity(message.len());
    for (n, range) in statements(message).into_iter().enumerate() {
        if n > 0 {
            out.push(';');
        }
        let statement = &message[range];
        let said = Said::read(statement);
        out.push_str(&statement[..statement.len() - said.text.len()]);
        out.push_str(&rewrite(said));
    }
    out
}
