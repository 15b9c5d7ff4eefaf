//! What a session lock is on: a number, or a pair of them.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::error::{LockError, Result};

/// The key of a session lock: a 64-bit number, usually made of text, or a pair of 32-bit numbers.
///
/// The two forms never meet: PostgreSQL keeps them in separate spaces
/// (<https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS>).
///
/// It shows as its number, which is what the server's `pg_locks` shows; the text is not kept.
///
/// ```
/// use syncguard::AdvisoryKey;
///
/// let key = AdvisoryKey::from_text(" User@Example.com");
/// assert_eq!(key, AdvisoryKey::from_text("user@example.com"));
/// assert_eq!(key.as_i64(), Some(-5419621966426725984));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct AdvisoryKey(Form);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(untagged))]
enum Form {
    One(i64),
    Two(i32, i32),
}

impl AdvisoryKey {
    /// The number of a text: the text in lower case, without the spaces (U+0020) at both ends, as UTF-8; of its
    /// SHA-256 the first 8 bytes, big-endian. The SQL function `email_to_lock_id` computes the same.
    ///
    /// Texts that differ only in case or outer spaces are one key. Two different texts collide with a
    /// probability of 2⁻⁶⁴. Lower case is Unicode's, for every letter; where a database's locale
    /// folds fewer letters, the SQL function differs for those: see [`docs/advisory-locks.md`](https://docs.rs/crate/syncguard/latest/source/docs/advisory-locks.md).
    ///
    /// ```
    /// use syncguard::AdvisoryKey;
    ///
    /// assert_eq!(AdvisoryKey::from_text(" Migrate"), AdvisoryKey::from_text("migrate"));
    /// ```
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        Self(Form::One(digest(&folded(text))))
    }

    /// The number of a text among those of a namespace: of namespace, colon and the text as in
    /// [`from_text`](Self::from_text). The namespace is taken as it is. The SQL function
    /// `generate_lock_id` gives the same.
    ///
    /// ```
    /// use syncguard::AdvisoryKey;
    ///
    /// let cleanup = AdvisoryKey::namespaced("cleanup", "user@example.com")?;
    /// assert_ne!(cleanup, AdvisoryKey::from_text("user@example.com"));
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a colon in the namespace: `("a", "b:c")` and `("a:b", "c")` would be
    /// one key.
    pub fn namespaced(namespace: &str, text: &str) -> Result<Self> {
        if namespace.contains(':') {
            return Err(LockError::invalid(
                "the namespace of a session lock contains a colon: use a dot or a dash instead",
            ));
        }
        Ok(Self(Form::One(digest(&format!("{namespace}:{}", folded(text))))))
    }

    /// This number itself.
    ///
    /// Numbers from -2³¹ to 2³¹ - 1 are also what acquires of leases queue on, for as long as one
    /// statement takes (`hashtext` of the lease's key). A session lock on such a number, held while
    /// another client acquires the lease that has it, makes that acquire wait, and fail at the end of
    /// its time with an error that names this session. Stay outside of that range if you choose the number.
    ///
    /// ```
    /// let key = syncguard::AdvisoryKey::from_i64(5_000_000_000);
    /// assert_eq!(key.as_i64(), Some(5_000_000_000));
    /// ```
    #[must_use]
    pub const fn from_i64(number: i64) -> Self {
        Self(Form::One(number))
    }

    /// A pair of numbers: a key of its own, whatever number the two would make together.
    ///
    /// Choose the first number freely, except for two that this library uses itself: 1936160619, under which
    /// clients that wait for a lease note that they listen, and 1398363715, under which tables are created.
    /// A lock of yours there excludes none of your leases, but you may find the pair taken; a listener may
    /// not be notified, so that it waits a little longer, or be notified needlessly; and no tables can be created
    /// while you hold the pair for that.
    ///
    /// ```
    /// let key = syncguard::AdvisoryKey::from_pair(7, 42);
    /// assert_eq!(key.as_pair(), Some((7, 42)));
    /// ```
    #[must_use]
    pub const fn from_pair(first: i32, second: i32) -> Self {
        Self(Form::Two(first, second))
    }

    /// The number; `None` for a pair.
    ///
    /// ```
    /// use syncguard::AdvisoryKey;
    ///
    /// assert_eq!(AdvisoryKey::from_text("user@example.com").as_i64(), Some(-5419621966426725984));
    /// assert_eq!(AdvisoryKey::from_pair(7, 42).as_i64(), None);
    /// ```
    #[must_use]
    pub const fn as_i64(&self) -> Option<i64> {
        match self.0 {
            Form::One(number) => Some(number),
            Form::Two(..) => None,
        }
    }

    /// The two numbers; `None` for a single one.
    ///
    /// ```
    /// assert_eq!(syncguard::AdvisoryKey::from_i64(42).as_pair(), None);
    /// ```
    #[must_use]
    pub const fn as_pair(&self) -> Option<(i32, i32)> {
        match self.0 {
            Form::One(_) => None,
            Form::Two(first, second) => Some((first, second)),
        }
    }

    pub(super) fn is_pair(&self) -> bool {
        matches!(self.0, Form::Two(..))
    }

    /// The arguments of an advisory lock function.
    pub(super) fn numbers(&self) -> (i64, Option<i64>) {
        match self.0 {
            Form::One(number) => (number, None),
            Form::Two(first, second) => (first.into(), Some(second.into())),
        }
    }

    /// `(classid, objid, objsubid)` of this key in `pg_locks`.
    pub(super) fn address(&self) -> (u32, u32, u32) {
        match self.0 {
            Form::One(number) => {
                let bits = number.cast_unsigned();
                let half = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).unwrap_or_default();
                (half(bits >> 32), half(bits), 1)
            }
            Form::Two(first, second) => (first.cast_unsigned(), second.cast_unsigned(), 2),
        }
    }

    /// The key with this address in `pg_locks`.
    pub(super) fn at(class: u32, object: u32, sub: u32) -> Self {
        if sub == 2 {
            return Self(Form::Two(class.cast_signed(), object.cast_signed()));
        }
        Self(Form::One(((u64::from(class) << 32) | u64::from(object)).cast_signed()))
    }
}

impl fmt::Display for AdvisoryKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Form::One(number) => write!(f, "{number}"),
            Form::Two(first, second) => write!(f, "({first}, {second})"),
        }
    }
}

/// As PostgreSQL's `lower(btrim(text, ' '))`: `TRIM` takes away U+0020 alone, no other white space.
fn folded(text: &str) -> String {
    text.trim_matches(' ').to_lowercase()
}

fn digest(text: &str) -> i64 {
    let mut first = [0_u8; 8];
    first.iter_mut().zip(Sha256::digest(text.as_bytes())).for_each(|(to, from)| *to = from);
    i64::from_be_bytes(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn known_texts_have_their_numbers() {
        for (text, number) in [
            ("user@example.com", -5_419_621_966_426_725_984),
            ("u1", -4_935_378_884_118_197_574),
            ("u2", 7_827_822_162_727_968_255),
        ] {
            assert_eq!(AdvisoryKey::from_text(text).as_i64(), Some(number));
        }
        for (namespace, number) in
            [("cleanup", -5_856_563_423_239_081_834), ("registration", 8_062_536_846_379_771_938)]
        {
            let key = AdvisoryKey::namespaced(namespace, "user@example.com").unwrap();
            assert_eq!(key.as_i64(), Some(number));
        }
    }

    #[test]
    fn case_and_outer_spaces_do_not_matter_other_white_space_does() {
        let key = AdvisoryKey::from_text("user@example.com");
        assert_eq!(AdvisoryKey::from_text("  USER@Example.com "), key);
        for other in
            ["\tuser@example.com", "user@example.com\n", "\u{a0}user@example.com", "user @example.com"]
        {
            assert_ne!(AdvisoryKey::from_text(other), key, "{other:?}");
        }
        assert_eq!(AdvisoryKey::from_text("\u{c9}"), AdvisoryKey::from_text("\u{e9}"));
    }

    #[test]
    fn a_namespace_must_not_hold_a_colon() {
        assert!(AdvisoryKey::namespaced("a:b", "c").is_err());
        assert!(AdvisoryKey::namespaced("a", "b:c").is_ok());
    }

    #[test]
    fn a_key_and_its_address_in_pg_locks_are_one() {
        let numbers = [0, 1, -1, 42, i64::MIN, i64::MAX, -5_419_621_966_426_725_984, 1 << 32, -(1 << 31)];
        let pairs = [(0, 0), (1, -1), (i32::MIN, i32::MAX)];
        let keys = numbers.map(AdvisoryKey::from_i64).into_iter();
        for key in keys.chain(pairs.map(|(a, b)| AdvisoryKey::from_pair(a, b))) {
            let (class, object, sub) = key.address();
            assert_eq!(AdvisoryKey::at(class, object, sub), key);
        }
        assert_eq!(AdvisoryKey::from_i64(-1).address(), (u32::MAX, u32::MAX, 1));
        assert_ne!(AdvisoryKey::from_pair(0, 1), AdvisoryKey::from_i64(1));
    }

    #[test]
    fn numbers_are_spread_over_the_whole_range() {
        let mut seen = HashSet::new();
        let mut top = [0_u32; 256];
        for i in 0..100_000 {
            let number = AdvisoryKey::from_text(&format!("user{i}@example.com")).as_i64().unwrap();
            assert!(seen.insert(number));
            top[usize::from(number.to_be_bytes()[0])] += 1;
        }
        let expected = 100_000.0 / 256.0;
        let chi: f64 = top.iter().map(|n| (f64::from(*n) - expected).powi(2) / expected).sum();
        assert!(chi < 380.0, "{chi} with 255 degrees of freedom");
    }
}
