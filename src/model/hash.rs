//! The display hash: a label for keys and lock ids in logs, events and screens.

use unicode_normalization::UnicodeNormalization;

/// The 24 hexadecimal digits under which a key or a lock id appears in logs, events and
/// [`LockInfo`](crate::LockInfo).
///
/// All SyncGuard clients compute the same digits, so a hash in one program's log can be searched
/// in another's. It is **not cryptographic**: three linear 32-bit hashes, easy to invert for short
/// inputs. It is a label, never a secret and never a lock's identity.
///
/// ```
/// assert_eq!(syncguard::hash_key("resource:123"), "e90a28c676a29a3291e2874a");
/// ```
#[must_use]
pub fn hash_key(value: &str) -> String {
    let (mut a, mut b, mut c) = (0_u32, 0_u32, 0_u32);
    let mut units = [0; 2];
    for ch in value.nfc() {
        for unit in ch.encode_utf16(&mut units) {
            let unit = u32::from(*unit);
            a = a.wrapping_mul(31).wrapping_add(unit);
            b = b.wrapping_mul(127).wrapping_add(unit.wrapping_mul(3));
            c = c.wrapping_mul(2047).wrapping_add(unit.wrapping_mul(7));
        }
    }
    format!("{a:08x}{b:08x}{c:08x}")
}

#[cfg(test)]
mod tests {
    use super::hash_key;

    #[test]
    fn known_values_of_other_clients() {
        assert_eq!(hash_key("a"), "0000006100000123000002a7");
        assert_eq!(hash_key("\u{e9}"), "000000e9000002bb0000065f");
        assert_eq!(hash_key("e\u{301}"), hash_key("\u{e9}"));
        assert_eq!(hash_key("\u{1F512}"), "001b0c75014469ff2f4d79d3");
    }
}
