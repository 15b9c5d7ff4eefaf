//! Keys: what a caller names, and the text under which it is stored.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};
use unicode_normalization::{UnicodeNormalization, is_nfc};

use crate::error::{LockError, Result};
use crate::model::hash::hash_key;

/// The longest key a caller may use: bytes of UTF-8, counted after NFC normalisation.
pub const MAX_KEY_LENGTH_BYTES: usize = 512;

/// The longest stored key on PostgreSQL, in bytes. The wall is the B-tree's entry size (about
/// 2700 bytes for an 8 KB page), see
/// <https://www.postgresql.org/docs/current/btree.html>; this stays well below it.
pub const BACKEND_LIMIT_POSTGRES: usize = 1700;

/// Bytes that PostgreSQL's stored keys keep free for derived names: none, the tables are separate.
pub const RESERVE_BYTES_POSTGRES: usize = 0;

/// The most permits that a semaphore may have.
pub const MAX_PERMITS: u32 = 1024;

/// What stands between a name and the rest of a key that the library derives from it. It is U+2126, which
/// NFC replaces by U+03A9, so no caller's key contains it and none can name a derived key.
const DERIVED: char = '\u{2126}';

/// The bytes that the stored form of a name leaves free for the longest of its derived keys, `fence:` included.
const DERIVED_RESERVE: usize = "fence:".len() + DERIVED.len_utf8() + "1024".len();

/// The NFC form of a key, or why it cannot be one.
///
/// Keys that are canonically equal name the same lock. Refused as
/// [`InvalidArgument`](crate::ErrorCode::InvalidArgument): the empty key, more than
/// [`MAX_KEY_LENGTH_BYTES`] bytes after normalisation, and U+0000, which PostgreSQL text cannot
/// hold (<https://www.postgresql.org/docs/current/datatype-character.html>).
///
/// ```
/// let composed = syncguard::normalize_and_validate_key("cafe\u{301}")?;
/// assert_eq!(composed, "caf\u{e9}");
/// # Ok::<(), syncguard::LockError>(())
/// ```
pub fn normalize_and_validate_key(key: &str) -> Result<String> {
    if key.is_empty() {
        return Err(empty());
    }
    // Normalising makes a text at most a third as long, so a huge one is refused unread.
    if key.len() > MAX_KEY_LENGTH_BYTES * 8 {
        return Err(too_long(key.len()));
    }
    if key.contains('\0') {
        return Err(LockError::invalid(
            "the key contains U+0000, which PostgreSQL text cannot hold: leave it out",
        ));
    }
    let normal = nfc(key);
    if normal.len() > MAX_KEY_LENGTH_BYTES {
        return Err(too_long(normal.len()));
    }
    Ok(normal)
}

/// The text under which a key is stored: `prefix:key`, or `key` where the prefix is empty; where
/// that and `reserve` bytes exceed `limit` bytes, the first 16 bytes of its SHA-256 in base64url
/// (22 characters) take the key's place. Colons at the end of the prefix do not count: `p`, `p:` and
/// `p::` are one prefix, and `:` is none.
///
/// # Errors
///
/// [`InvalidArgument`](crate::ErrorCode::InvalidArgument) when the key is empty, when even the hashed
/// form does not fit, or when prefix and reserve alone leave no room.
///
/// ```
/// use syncguard::make_storage_key;
/// assert_eq!(make_storage_key("p", "k", 40, 0)?, "p:k");
/// assert_eq!(make_storage_key("p", &"x".repeat(100), 40, 0)?, "p:kTaPH5LIeRIiQnYhiyNFDA");
/// # Ok::<(), syncguard::LockError>(())
/// ```
pub fn make_storage_key(prefix: &str, key: &str, limit: usize, reserve: usize) -> Result<String> {
    if key.is_empty() {
        return Err(empty());
    }
    let head = match prefix.trim_end_matches(':') {
        "" => String::new(),
        prefix => format!("{prefix}:"),
    };
    if head.len().saturating_add(reserve) >= limit {
        return Err(LockError::invalid(
            "prefix and reserve leave no room for a key within the storage limit",
        ));
    }
    let whole = format!("{head}{}", nfc(key));
    if whole.len().saturating_add(reserve) <= limit {
        return Ok(whole);
    }
    let digest = Sha256::digest(whole.as_bytes());
    let hashed = format!("{head}{}", URL_SAFE_NO_PAD.encode(digest.get(..16).unwrap_or_default()));
    if hashed.len().saturating_add(reserve) > limit {
        return Err(LockError::invalid("even the hashed key exceeds the storage limit: shorten the prefix"));
    }
    Ok(hashed)
}

/// The name of a key's fence counter, derived from its **stored** key, never from the caller's, so
/// that each stored key has exactly one counter.
///
/// # Errors
///
/// Those of [`make_storage_key`], with the stored key in the place of the key.
///
/// ```
/// use syncguard::{BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES, make_fence_key};
/// let fence_key = make_fence_key("", "resource:123", BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
/// assert_eq!(fence_key, "fence:resource:123");
/// # Ok::<(), syncguard::LockError>(())
/// ```
pub fn make_fence_key(prefix: &str, base_storage_key: &str, limit: usize, reserve: usize) -> Result<String> {
    if base_storage_key.is_empty() {
        return Err(empty());
    }
    make_storage_key(prefix, &format!("fence:{base_storage_key}"), limit, reserve)
}

/// A caller's key after validation (NFC, 1 to 512 bytes, no U+0000), or one that was derived from such a
/// key: a semaphore's name and U+2126, for a permit followed by its number.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key(String);

impl Key {
    pub(crate) fn new(key: &str) -> Result<Self> {
        normalize_and_validate_key(key).map(Self)
    }

    /// The key of a lease as its guard has it: a permit's stays as it is, everything else is a caller's key.
    pub(crate) fn of_lease(key: &str) -> Result<Self> {
        match permit_of(key) {
            Some((name, _)) => {
                let permit = Self(key.to_owned());
                if Self::new(name)?.0 == name { Ok(permit) } else { Self::new(key) }
            }
            None => Self::new(key),
        }
    }

    /// The key that is common to all permits of the semaphore with this name.
    pub(crate) fn semaphore(&self) -> Self {
        Self(format!("{}{DERIVED}", self.0))
    }

    /// The key of one permit of the semaphore with this name.
    pub(crate) fn permit(&self, number: u32) -> Self {
        Self(format!("{}{DERIVED}{number}", self.0))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The stored key and the fence key of this key, for a backend with this limit. The names of a
    /// semaphore's permits begin with its own.
    pub(crate) fn stored(&self, limit: usize, reserve: usize) -> Result<(String, String)> {
        if let Some((name, rest)) = self.0.split_once(DERIVED) {
            let name = make_storage_key("", name, limit, reserve.saturating_add(DERIVED_RESERVE))?;
            let base = format!("{name}{DERIVED}{rest}");
            let fence = fence_key_of(&base, limit, reserve)?;
            return Ok((base, fence));
        }
        let base = make_storage_key("", &self.0, limit, reserve)?;
        let fence = fence_key_of(&base, limit, reserve)?;
        Ok((base, fence))
    }

    /// The stored key of a mark of this key, a counter beside its own.
    pub(crate) fn mark(&self, suffix: &str, limit: usize, reserve: usize) -> Result<String> {
        let suffix = format!("{DERIVED}{suffix}");
        let (base, _) = self.stored(limit, reserve)?;
        Ok(make_fence_key("", &base, limit, reserve.saturating_add(suffix.len()))? + &suffix)
    }
}

/// A key may be a customer's name: print its label only.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key(#{})", hash_key(&self.0))
    }
}

/// The fence key of a stored key, be it that of a permit: a derived key must not be normalised, or it would be
/// another one.
pub(crate) fn fence_key_of(stored: &str, limit: usize, reserve: usize) -> Result<String> {
    if stored.contains(DERIVED) {
        return Ok(format!("fence:{stored}"));
    }
    make_fence_key("", stored, limit, reserve)
}

/// The semaphore's name and the number, if this is the key of a permit.
pub(crate) fn permit_of(key: &str) -> Option<(&str, u32)> {
    let (name, digits) = key.split_once(DERIVED)?;
    let number = digits.parse().ok().filter(|number| (1..=MAX_PERMITS).contains(number))?;
    (number.to_string() == digits).then_some((name, number))
}

/// The job's name and the suffix, if this is the stored key of a mark.
pub(crate) fn mark_of(fence_key: &str) -> Option<(&str, &str)> {
    fence_key.strip_prefix("fence:")?.split_once(DERIVED)
}

/// The semaphore's name, if this is the key of one or of a permit.
pub(crate) fn semaphore_of(key: &str) -> Option<&str> {
    key.split_once(DERIVED).map(|(name, _)| name)
}

/// What the waiters for this key wait for: the key itself, or what is common to all permits of a semaphore.
pub(crate) fn waited_for(key: &str) -> &str {
    let end = key.find(DERIVED).map(|at| at + DERIVED.len_utf8());
    end.and_then(|end| key.get(..end)).unwrap_or(key)
}

/// Refuses a limit that no semaphore can have.
pub(crate) fn validate_limit(limit: u32) -> Result<()> {
    if (1..=MAX_PERMITS).contains(&limit) {
        return Ok(());
    }
    Err(LockError::invalid(format!("the limit is {limit}: a semaphore has 1 to {MAX_PERMITS} permits")))
}

fn nfc(text: &str) -> String {
    if is_nfc(text) { text.to_owned() } else { text.nfc().collect() }
}

fn empty() -> LockError {
    LockError::invalid("the key is empty: name what is to be locked")
}

fn too_long(len: usize) -> LockError {
    LockError::invalid(format!(
        "the key has {len} bytes, the most is {MAX_KEY_LENGTH_BYTES}: use a shorter name or a digest of it"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_named_after_the_stored_key_and_not_after_the_callers() {
        let key = Key::new(&"x".repeat(100)).unwrap();
        let (base, fence) = key.stored(40, 0).unwrap();
        assert_eq!(
            (base.as_str(), fence.as_str()),
            ("Cey268i878cz9vLsRPeRqw", "fence:Cey268i878cz9vLsRPeRqw")
        );
        let (base, fence) = Key::new("resource:123").unwrap().stored(40, 0).unwrap();
        assert_eq!((base.as_str(), fence.as_str()), ("resource:123", "fence:resource:123"));
    }

    #[test]
    fn the_key_of_a_permit_is_one_that_no_caller_can_name() {
        let name = Key::new("report").unwrap();
        let permit = name.permit(3);
        assert_eq!(permit.as_str(), "report\u{2126}3");
        assert_eq!(Key::of_lease(permit.as_str()).unwrap(), permit);
        assert_eq!(Key::new(permit.as_str()).unwrap().as_str(), "report\u{3a9}3");
        assert_eq!(permit_of(permit.as_str()), Some(("report", 3)));
        assert_eq!(semaphore_of(name.semaphore().as_str()), Some("report"));
        assert_eq!(semaphore_of("report"), None);
        assert_eq!(waited_for(permit.as_str()), name.semaphore().as_str());
        assert_eq!(waited_for("report"), "report");
    }

    #[test]
    fn what_only_resembles_the_key_of_a_permit_is_a_callers_key() {
        for key in
            ["a\u{2126}", "a\u{2126}0", "a\u{2126}01", "a\u{2126}+1", "a\u{2126}1025", "e\u{301}\u{2126}1"]
        {
            assert_eq!(permit_of(key).is_some(), key.ends_with("\u{301}\u{2126}1"), "{key:?}");
            assert_eq!(Key::of_lease(key).unwrap(), Key::new(key).unwrap(), "{key:?}");
        }
        assert!(Key::of_lease("\u{2126}1").is_err(), "a semaphore without a name");
    }

    #[test]
    fn the_longest_name_of_a_permit_fits_where_its_name_was_hashed() {
        let name = Key::new(&"x".repeat(100)).unwrap();
        let (prefix, counters) = name.semaphore().stored(40, 0).unwrap();
        let (base, fence) = name.permit(MAX_PERMITS).stored(40, 0).unwrap();
        assert_eq!((base, fence.as_str()), (format!("{prefix}1024"), format!("{counters}1024").as_str()));
        assert!(fence.len() <= 40, "{}", fence.len());
    }

    #[test]
    fn a_limit_is_from_1_to_1024() {
        for (limit, ok) in [(0, false), (1, true), (1024, true), (1025, false), (u32::MAX, false)] {
            assert_eq!(validate_limit(limit).is_ok(), ok, "{limit}");
        }
    }

    #[test]
    fn no_key_leads_to_the_mark_of_another() {
        let mark = Key::new("job").unwrap().mark("done", 1700, 0).unwrap();
        assert_eq!(mark, "fence:job\u{2126}done");
        assert_eq!(mark_of(&mark), Some(("job", "done")));
        let named_alike = Key::new("job\u{2126}done").unwrap().stored(1700, 0).unwrap().1;
        assert_eq!(named_alike, "fence:job\u{3a9}done");
        let long = Key::new(&"x".repeat(100)).unwrap();
        let mark = long.mark("number", 40, 0).unwrap();
        assert!(mark.len() <= 40 && mark.ends_with("\u{2126}number"), "{mark}");
        assert!(long.mark("number", 30, 0).is_err());
    }

    #[test]
    fn a_key_has_1_to_512_bytes_after_normalisation_and_no_zero() {
        let refused = |key: &str| normalize_and_validate_key(key).unwrap_err().to_string();
        assert_eq!(normalize_and_validate_key(&"x".repeat(512)).unwrap(), "x".repeat(512));
        assert_eq!(normalize_and_validate_key(&"e\u{301}".repeat(256)).unwrap(), "\u{e9}".repeat(256));
        assert!(refused("").contains("empty"));
        assert!(refused("a\0").contains("U+0000"));
        assert!(refused(&"x".repeat(513)).contains("513 bytes"));
        assert!(refused(&"e\u{301}".repeat(257)).contains("514 bytes"));
        assert!(refused(&"e\u{301}".repeat(1365)).contains("2730 bytes"), "4095 are read");
        assert!(refused(&"\0".repeat(4096)).contains("U+0000"), "and the 4096th");
        assert!(refused(&"\0".repeat(4097)).contains("4097 bytes"), "more are not");
    }

    #[test]
    fn a_key_is_stored_whole_where_it_fits_then_hashed_and_then_refused() {
        let long = "x".repeat(100);
        for reserve in [0, 3] {
            let stored = |key: &str, limit: usize| make_storage_key("p", key, limit + reserve, reserve);
            let refused = |limit| stored(&long, limit).unwrap_err().to_string();
            assert_eq!(stored(&"x".repeat(28), 30).unwrap(), format!("p:{}", "x".repeat(28)));
            assert_eq!(stored(&"x".repeat(29), 30).unwrap().len(), 24);
            assert_eq!(stored(&long, 24).unwrap().len(), 24);
            assert!(refused(23).contains("even the hashed key"));
            assert!(refused(3).contains("even the hashed key"));
            assert_eq!(stored("k", 3).unwrap(), "p:k");
            assert!(refused(2).contains("leave no room"));
        }
    }

    #[test]
    fn a_key_is_printed_as_its_label() {
        let text = format!("{:?}", Key::new("MARKER").unwrap());
        assert_eq!(text, format!("Key(#{})", hash_key("MARKER")));
    }
}
