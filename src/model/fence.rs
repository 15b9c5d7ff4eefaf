//! Fences: a number per key that only ever grows.

use std::fmt;
use std::str::FromStr;

use crate::error::{ErrorCode, LockError};
use crate::model::hash::hash_key;

/// The last fence that is ever handed out. A counter that has reached it grants nothing more.
pub const FENCE_MAX: u64 = 900_000_000_000_000;

/// Above this fence every grant is logged as a warning: the key's counter is near its end.
pub const FENCE_WARN: u64 = 90_000_000_000_000;

/// Number of digits of a fence's text form.
const DIGITS: usize = 15;

/// The largest number that the text form can hold.
const LARGEST: u64 = 999_999_999_999_999;

/// A fencing token, *fence* for short: of two grants of one key, the later has the greater fence, forever.
///
/// Hand it to the resource that the lock protects and let that resource refuse a smaller one;
/// inside PostgreSQL, [`LockGuard::fence_transaction`](crate::LockGuard::fence_transaction) does so.
///
/// [`Display`](fmt::Display) and [`FromStr`] are the 15 digits that every SyncGuard client uses, so
/// that fences compare as text just as they compare as numbers.
///
/// ```
/// use syncguard::Fence;
/// let fence: Fence = "000000000000042".parse()?;
/// assert_eq!(fence.get(), 42);
/// assert_eq!(fence.to_string(), "000000000000042");
/// # Ok::<(), syncguard::LockError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(u64);

impl Fence {
    /// The fence as a number.
    ///
    /// ```
    /// let fence = syncguard::Fence::new(42).expect("15 digits at most");
    /// assert_eq!(fence.get(), 42);
    /// ```
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// A fence from a number that a counter holds; `None` if it has more than 15 digits.
    ///
    /// ```
    /// use syncguard::Fence;
    ///
    /// assert!(Fence::new(42) < Fence::new(43));
    /// assert!(Fence::new(1_000_000_000_000_000).is_none());
    /// ```
    #[must_use]
    pub const fn new(value: u64) -> Option<Self> {
        if value <= LARGEST { Some(Self(value)) } else { None }
    }

    /// The fence that follows a counter's value, or the refusal of a counter that has reached
    /// [`FENCE_MAX`]. Compared as numbers, and to be asked before anything is written.
    ///
    /// For people who write a backend.
    ///
    /// ```
    /// use syncguard::{FENCE_MAX, Fence};
    ///
    /// assert_eq!(Fence::following(41)?.get(), 42);
    /// assert!(Fence::following(FENCE_MAX).is_err());
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn following(counter: u64) -> Result<Self, LockError> {
        match counter.checked_add(1) {
            Some(next) if next <= FENCE_MAX => Ok(Self(next)),
            _ => Err(LockError::new(ErrorCode::Internal).with_message(format!(
                "the key's fence counter has reached its limit of {FENCE_MAX}, or was changed by hand, and grants nothing more: use a new key, and never lower the counter"
            ))),
        }
    }

    /// Logs a warning if this grant brings its key's counter near the limit. The one place that
    /// does, for every backend; `key` is printed as its label.
    ///
    /// For people who write a backend.
    ///
    /// ```
    /// use syncguard::{FENCE_WARN, Fence};
    ///
    /// let fence = Fence::following(FENCE_WARN)?;
    /// fence.warn_near_limit("report"); // one log line, with the key's hash
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn warn_near_limit(self, key: &str) {
        if self.0 > FENCE_WARN {
            log::warn!(
                "fencing token {self} of key #{} is above {FENCE_WARN}: its counter grants nothing beyond {FENCE_MAX}, plan a new key",
                hash_key(key)
            );
        }
    }
}

impl From<Fence> for u64 {
    fn from(fence: Fence) -> Self {
        fence.0
    }
}

impl TryFrom<u64> for Fence {
    type Error = LockError;

    /// As [`Fence::new`]; `InvalidArgument` for more than 15 digits.
    fn try_from(value: u64) -> Result<Self, LockError> {
        Self::new(value).ok_or_else(|| LockError::invalid("a fence has at most 15 decimal digits"))
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:015}", self.0)
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fence({self})")
    }
}

impl FromStr for Fence {
    type Err = LockError;

    fn from_str(text: &str) -> Result<Self, LockError> {
        let digits = text.len() == DIGITS && text.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| text.parse().ok().and_then(Self::new)).flatten().ok_or_else(|| {
            LockError::new(ErrorCode::InvalidArgument)
                .with_message("a fence is exactly 15 decimal digits, for example 000000000000042")
        })
    }
}

/// As the 15 digits, which other SyncGuard clients read, too.
#[cfg(feature = "serde")]
impl serde::Serialize for Fence {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Fence {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = <String as serde::Deserialize>::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_is_fifteen_digits_and_round_trips() {
        for n in [0, 1, 42, FENCE_WARN, FENCE_MAX, LARGEST] {
            let fence = Fence::new(n).unwrap();
            assert_eq!(fence.to_string().len(), DIGITS);
            assert_eq!(fence.to_string().parse::<Fence>().unwrap(), fence);
        }
        assert_eq!(Fence::new(1).unwrap().to_string(), "000000000000001");
    }

    #[test]
    fn any_other_shape_is_refused() {
        for text in ["", "1", "0000000000000001", "00000000000000a", "+00000000000001", "-00000000000001"] {
            assert!(text.parse::<Fence>().is_err(), "{text:?}");
        }
        assert!(Fence::new(LARGEST + 1).is_none());
    }

    #[test]
    fn the_last_fence_is_the_limit_itself() {
        assert_eq!(Fence::following(0).unwrap().get(), 1);
        assert_eq!(Fence::following(FENCE_MAX - 1).unwrap().get(), FENCE_MAX);
        for counter in [FENCE_MAX, FENCE_MAX + 1, LARGEST, LARGEST + 1, u64::MAX] {
            assert_eq!(Fence::following(counter).unwrap_err().code(), ErrorCode::Internal, "{counter}");
        }
    }

    #[test]
    fn text_order_is_number_order() {
        let numbers = [0, 1, 9, 10, 99, 12345, FENCE_WARN, FENCE_MAX];
        for a in numbers {
            for b in numbers {
                let (x, y) = (Fence(a), Fence(b));
                assert_eq!(x.cmp(&y), a.cmp(&b));
                assert_eq!(x.to_string().cmp(&y.to_string()), a.cmp(&b));
            }
        }
    }

    #[test]
    fn a_number_of_fifteen_digits_becomes_a_fence_and_a_fence_its_number() {
        for number in [0, 42, LARGEST] {
            let fence = Fence::try_from(number).unwrap();
            assert_eq!((fence.get(), u64::from(fence)), (number, number));
        }
        assert_eq!(Fence::try_from(LARGEST + 1).unwrap_err().code(), ErrorCode::InvalidArgument);
        assert_eq!(format!("{:?}", Fence(42)), "Fence(000000000000042)");
    }

    #[cfg(feature = "serde")]
    #[test]
    fn others_read_and_write_the_fifteen_digits() {
        let text = serde_json::to_string(&Fence(42)).unwrap();
        assert_eq!(text, "\"000000000000042\"");
        assert_eq!(serde_json::from_str::<Fence>(&text).unwrap(), Fence(42));
        assert!(serde_json::from_str::<Fence>("\"42\"").is_err());
    }
}
