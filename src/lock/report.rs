//! Failures that have no caller: automatic releases report them to a handler.

use std::fmt;
use std::sync::Arc;

use crate::error::LockError;
use crate::model::hash::hash_key;
use crate::threads::{UserValue, ignore_panic};

/// A handler for failed automatic releases.
pub(crate) type OnReleaseError = UserValue<Arc<dyn Fn(&LockError, &ReleaseErrorContext) + Send + Sync>>;

/// Which kind of cleanup failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum ReleaseSource {
    /// A guard's `Drop`.
    Drop,
    /// The end of the closure of `with_lock`, or of a term of `elect`.
    Helper,
    /// The client's worker gave up on a lease whose release, or whose acquire, had failed before:
    /// that failure was returned to its caller.
    Worker,
}

impl ReleaseSource {
    /// `drop`, `helper` or `worker`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Drop => "drop",
            Self::Helper => "helper",
            Self::Worker => "worker",
        }
    }
}

/// What could not be released. `Debug` shows the key and the lock id as labels only.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReleaseErrorContext {
    /// The key. It may be a customer's name: think before you log it. For a permit it is its
    /// [guard's](crate::LockGuard::key); where no answer said which permit was granted, it ends with U+2126.
    pub key: String,
    /// The lock id. Whoever knows it can release the lock.
    pub lock_id: String,
    /// Which kind of cleanup failed.
    pub source: ReleaseSource,
}

impl fmt::Debug for ReleaseErrorContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReleaseErrorContext")
            .field("key_hash", &hash_key(&self.key))
            .field("lock_id_hash", &hash_key(&self.lock_id))
            .field("source", &self.source)
            .finish()
    }
}

/// Hands a failed release to its handler, or to the default one. Never panics.
pub(super) fn report(handler: Option<&OnReleaseError>, error: &LockError, context: &ReleaseErrorContext) {
    match handler.and_then(UserValue::get) {
        Some(handler) => ignore_panic(|| handler(error, context)),
        None if warns(cfg!(debug_assertions), std::env::var("SYNCGUARD_DEBUG").ok().as_deref()) => {
            ignore_panic(|| log::warn!(target: "syncguard", "{}", default_line(error, context.source)));
        }
        None => {}
    }
}

/// Whether the default handler says anything: in debug builds, and where the environment asks for it.
fn warns(debug_build: bool, asked: Option<&str>) -> bool {
    debug_build || asked == Some("true")
}

/// The default handler's line: no key, no lock id, no label of either.
fn default_line(error: &LockError, source: ReleaseSource) -> String {
    format!(
        "a lock could not be released ({}): {}; it stays held until it is released in the background or its ttl is over. Set on_release_error to handle this",
        source.as_str(),
        error.chain()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;

    fn context() -> ReleaseErrorContext {
        ReleaseErrorContext {
            key: "MARKER-key".to_owned(),
            lock_id: "MARKER-id".to_owned(),
            source: ReleaseSource::Drop,
        }
    }

    #[test]
    fn neither_debug_nor_the_default_line_shows_key_or_id() {
        let error =
            LockError::new(ErrorCode::NetworkTimeout).with_key("MARKER-key").with_lock_id("MARKER-id");
        for text in [format!("{:?}", context()), default_line(&error, ReleaseSource::Helper)] {
            assert!(!text.contains("MARKER"), "{text}");
        }
        let line = default_line(&error, ReleaseSource::Helper);
        assert!(line.contains("helper") && line.contains("NetworkTimeout"));
        assert!(!line.contains(&hash_key("MARKER-key")));
    }

    #[test]
    fn a_release_build_is_silent_unless_the_environment_asks() {
        assert!(warns(true, None) && warns(false, Some("true")));
        for asked in [None, Some(""), Some("false"), Some("1"), Some("TRUE")] {
            assert!(!warns(false, asked), "{asked:?}");
        }
    }

    #[test]
    fn a_handler_that_panics_is_contained() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("in the payload's drop");
            }
        }
        let handler = OnReleaseError::new(Arc::new(|_, _| std::panic::panic_any(Bomb)));
        report(Some(&handler), &LockError::new(ErrorCode::Internal), &context());
    }
}
