//! What a holder says of itself, for people who ask who has a key.

use std::fmt;
use std::time::Duration;

use crate::backend::info::LockInfo;
use crate::error::{LockError, Result};

/// The most bytes that an owner, or a note, may have.
pub const MAX_NOTE_BYTES: usize = 1024;

/// Who holds a lease, and what for, in the holder's own words. Written with the grant, shown to whoever asks who
/// has the key, and gone with the lease. Nothing is decided by it.
///
/// ```
/// use syncguard::backend::Label;
///
/// let label = Label::new(Some("web-3:4711"), Some("nightly invoices"));
/// assert_eq!(label.owner, Some("web-3:4711"));
/// assert!(Label::default().is_none());
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Label<'a> {
    /// Who it is.
    pub owner: Option<&'a str>,
    /// What for.
    pub note: Option<&'a str>,
}

impl<'a> Label<'a> {
    /// An owner and a note. One that is empty says nothing, and counts as none.
    #[must_use]
    pub fn new(owner: Option<&'a str>, note: Option<&'a str>) -> Self {
        let said = |text: &&str| !text.is_empty();
        Self { owner: owner.filter(said), note: note.filter(said) }
    }

    /// Whether it says nothing at all.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.owner.is_none() && self.note.is_none()
    }

    /// `InvalidArgument` for one that is too long or cannot be stored.
    pub(crate) fn check(&self) -> Result<()> {
        check_text("the owner", self.owner)?;
        check_text("the note", self.note)
    }
}

/// It may be anybody's name: left out.
impl fmt::Debug for Label<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Label")
            .field("owner", &self.owner.is_some())
            .field("note", &self.note.is_some())
            .finish()
    }
}

/// Refuses an owner or a note that is too long or cannot be stored.
pub(crate) fn check_text(what: &str, text: Option<&str>) -> Result<()> {
    match text {
        Some(text) if text.len() > MAX_NOTE_BYTES => Err(LockError::invalid(format!(
            "{what} has more than {MAX_NOTE_BYTES} bytes: say it in fewer words"
        ))),
        Some(text) if text.contains('\0') => {
            Err(LockError::invalid(format!("{what} has the character U+0000, which PostgreSQL cannot store")))
        }
        _ => Ok(()),
    }
}

/// Who holds a key. From [`LockBackend::who_holds`](crate::backend::LockBackend::who_holds).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldBy {
    /// The lease, with its owner and note where they are known.
    pub lease: LockInfo,
    /// How long the lease lasts from now, by the server's clock, unless it is renewed; `None` from a backend that
    /// does not say.
    pub remaining: Option<Duration>,
}

impl HeldBy {
    /// The holder of this lease.
    #[must_use]
    pub const fn new(lease: LockInfo, remaining: Option<Duration>) -> Self {
        Self { lease, remaining }
    }
}

impl LockInfo {
    /// Who holds it and what for as the words of a sentence, `OWNER (NOTE)` or what there is of it, for a line of a log
    /// or a terminal: control characters, and those that turn what stands around them, are written out. `None` where
    /// nothing is known.
    ///
    /// ```
    /// use syncguard::{Fence, LockInfoRaw};
    ///
    /// let lease = LockInfoRaw::new("report".into(), "AAAAAAAAAAAAAAAAAAAAAA".into(), 30_000, 0, Fence::new(1).unwrap());
    /// assert_eq!(lease.sanitized().who(), None);
    /// let lease = lease.labelled(Some("web-3".into()), Some("invoices\n".into()));
    /// assert_eq!(lease.sanitized().who().unwrap(), "web-3 (invoices\\u{a})");
    /// ```
    #[must_use]
    pub fn who(&self) -> Option<String> {
        let label = Label::new(self.owner.as_deref(), self.note.as_deref());
        (!label.is_none()).then(|| Words(label).to_string())
    }
}

/// An owner and a note as the words of a sentence: `OWNER (NOTE)`, or what there is of it. What a terminal or a log
/// would take for more than a character of a line is written out.
pub(crate) struct Words<'a>(pub(crate) Label<'a>);

impl fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.owner, self.0.note) {
            (Some(owner), Some(note)) => write!(f, "{} ({})", Plain(owner), Plain(note)),
            (Some(owner), None) => write!(f, "{}", Plain(owner)),
            (None, Some(note)) => write!(f, "somebody ({})", Plain(note)),
            (None, None) => Ok(()),
        }
    }
}

/// A text of somebody else's as a part of one line.
struct Plain<'a>(&'a str);

impl fmt::Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write as _;

        for c in self.0.chars() {
            if is_plain(c) { f.write_char(c)? } else { write!(f, "{}", c.escape_unicode())? }
        }
        Ok(())
    }
}

/// Neither a control character nor one that changes the direction, or the lines, of what stands around it.
fn is_plain(c: char) -> bool {
    !c.is_control()
        && !matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;

    #[test]
    fn a_label_has_at_most_a_kibibyte_each_and_no_zero() {
        let (fits, long) = ("x".repeat(1024), "x".repeat(1025));
        let wide = "\u{e9}".repeat(512);
        for text in [fits.as_str(), wide.as_str(), "\n\u{1b}[31m"] {
            Label::new(Some(text), Some(text)).check().unwrap();
        }
        for text in [long.as_str(), &format!("{wide}x"), "a\0b"] {
            for label in [Label::new(Some(text), None), Label::new(None, Some(text))] {
                assert_eq!(label.check().unwrap_err().code(), ErrorCode::InvalidArgument);
            }
        }
        assert!(Label::new(Some(""), Some("")).is_none());
    }

    #[test]
    fn what_it_says_stays_on_its_line() {
        let words = |owner, note| Words(Label::new(owner, note)).to_string();
        assert_eq!(words(Some("web-3"), Some("caf\u{e9}")), "web-3 (caf\u{e9})");
        assert_eq!(
            (words(Some("a"), None), words(None, Some("b"))),
            ("a".to_owned(), "somebody (b)".to_owned())
        );
        assert_eq!(words(Some("a\n\u{1b}[31m"), None), "a\\u{a}\\u{1b}[31m");
        assert_eq!(words(Some("\u{202e}evil\u{85}\u{2028}"), None), "\\u{202e}evil\\u{85}\\u{2028}");
    }
}
