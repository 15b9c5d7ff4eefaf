//! Lock ids: what a holder shows to extend or release.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::error::{ErrorCode, LockError, Result};

/// Characters of a lock id.
const LENGTH: usize = 22;

/// Checks the form of a lock id: exactly 22 characters of `A-Z a-z 0-9 _ -`.
///
/// Every operation that takes a lock id does this first, before any I/O; anything else is
/// [`InvalidArgument`](crate::ErrorCode::InvalidArgument).
///
/// ```
/// assert!(syncguard::validate_lock_id("AAAAAAAAAAAAAAAAAAAAAA").is_ok());
/// assert!(syncguard::validate_lock_id("too short").is_err());
/// ```
pub fn validate_lock_id(lock_id: &str) -> Result<()> {
    let base64url = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
    if lock_id.len() == LENGTH && lock_id.bytes().all(base64url) {
        Ok(())
    } else {
        Err(LockError::invalid(
            "a lock id is exactly 22 characters of A-Z, a-z, 0-9, '_' and '-': pass the one that acquire returned",
        ))
    }
}

/// A lock id of the right form. 128 bits from the operating system, as base64url.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct LockId(String);

impl LockId {
    /// A fresh id. An operating system without random numbers is an error: there is no fallback,
    /// because whoever guesses a lock id can release the lock.
    pub(crate) fn generate() -> Result<Self> {
        let mut bytes = [0_u8; 16];
        getrandom::fill(&mut bytes).map_err(|cause| {
            LockError::new(ErrorCode::Internal)
                .with_message("the operating system gave no random numbers for a lock id")
                .with_source(cause)
        })?;
        Ok(Self(URL_SAFE_NO_PAD.encode(bytes)))
    }

    /// A fresh id of a reader: the same with a last character that 128 bits never end in.
    pub(crate) fn generate_shared() -> Result<Self> {
        let Self(mut id) = Self::generate()?;
        let last = match id.pop() {
            Some('A') => 'B',
            Some('Q') => 'R',
            Some('g') => 'h',
            _ => 'x',
        };
        id.push(last);
        Ok(Self(id))
    }

    /// Whether an id may be a reader's.
    pub(crate) fn may_be_shared(lock_id: &str) -> bool {
        lock_id.ends_with(['B', 'R', 'h', 'x'])
    }

    /// The id of a reader.
    pub(crate) fn parse_shared(lock_id: &str) -> Result<Self> {
        let id = Self::parse(lock_id)?;
        if Self::may_be_shared(lock_id) {
            return Ok(id);
        }
        Err(LockError::invalid("this is not the lock id of a reader: take one of generate_shared_lock_id"))
    }

    pub(crate) fn parse(lock_id: &str) -> Result<Self> {
        validate_lock_id(lock_id).map(|()| Self(lock_id.to_owned()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whoever knows a lock id can release the lock: never print it.
impl fmt::Debug for LockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LockId(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn generated_ids_are_distinct_well_formed_and_sixteen_bytes() {
        let ids: HashSet<String> =
            (0..10_000).map(|_| LockId::generate().unwrap().as_str().to_owned()).collect();
        assert_eq!(ids.len(), 10_000);
        for id in &ids {
            validate_lock_id(id).unwrap();
            assert_eq!(URL_SAFE_NO_PAD.decode(id).unwrap().len(), 16);
        }
        let mut last = HashSet::new();
        for _ in 0..1000 {
            assert!(!LockId::may_be_shared(LockId::generate().unwrap().as_str()));
            let id = LockId::generate_shared().unwrap();
            validate_lock_id(id.as_str()).unwrap();
            assert!(LockId::parse_shared(id.as_str()).is_ok());
            last.extend(id.as_str().chars().next_back());
        }
        assert_eq!(last.len(), 4, "a reader's has all bits, too");
        assert!(LockId::parse_shared(&"A".repeat(22)).is_err());
        // Each of the 128 bits is set about half the time.
        let mut ones = [0_u32; 128];
        for id in &ids {
            for (i, byte) in URL_SAFE_NO_PAD.decode(id).unwrap().iter().enumerate() {
                for bit in 0..8 {
                    ones[i * 8 + bit] += u32::from(byte >> bit & 1);
                }
            }
        }
        assert!(ones.iter().all(|n| (4_500..5_500).contains(n)), "{ones:?}");
    }

    #[test]
    fn any_other_form_is_refused() {
        for bad in [
            "",
            "AAAAAAAAAAAAAAAAAAAAA",
            "AAAAAAAAAAAAAAAAAAAAAAA",
            "AAAAAAAAAAAAAAAAAAAAA+",
            "AAAAAAAAAAAAAAAAAAAAA/",
            "AAAAAAAAAAAAAAAAAAAAA=",
            "AAAAAAAAAAAAAAAAAAAAA ",
            "AAAAAAAAAAAAAAAAAAAAA\n",
            "AAAAAAAAAAAAAAAAAAAA\u{e9}",
        ] {
            assert_eq!(LockId::parse(bad).unwrap_err().code(), ErrorCode::InvalidArgument, "{bad:?}");
        }
    }

    #[test]
    fn an_id_is_never_printed() {
        assert_eq!(format!("{:?}", LockId::generate().unwrap()), "LockId(..)");
    }
}
