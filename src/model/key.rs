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

/// A caller's key after validation: NFC, 1 to 512 bytes, no U+0000.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key(String);

impl Key {
    pub(crate) fn new(key: &str) -> Result<Self> {
        normalize_and_validate_key(key).map(Self)
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The stored key and the fence key of this key, for a backend with this limit.
    pub(crate) fn stored(&self, limit: usize, reserve: usize) -> Result<(String, String)> {
        let base = make_storage_key("", &self.0, limit, reserve)?;
        let fence = make_fence_key("", &base, limit, reserve)?;
        Ok((base, fence))
    }
}

/// A key may be a customer's name: print its label only.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key(#{})", hash_key(&self.0))
    }
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
}
