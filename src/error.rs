//! The one error type, and its eight codes.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::time::Duration;

/// `Result` with [`LockError`].
pub type Result<T, E = LockError> = std::result::Result<T, E>;

/// What kind of failure a [`LockError`] is. The names are those of every SyncGuard client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum ErrorCode {
    /// The server is away, refused the connection, went down, or rolled back because of a conflict.
    ServiceUnavailable,
    /// Wrong credentials, or a right that the role does not have.
    AuthFailed,
    /// Something the caller passed or configured is wrong; the same call will fail again.
    InvalidArgument,
    /// No connection was free: the pool is exhausted, or the server's `max_connections` is reached.
    RateLimited,
    /// An operation's own time ran out.
    NetworkTimeout,
    /// Waiting for the key took longer than the timeout, or used up the retries. Only from calls that wait, such as `lock`.
    AcquisitionTimeout,
    /// The caller's [`CancelToken`](crate::CancelToken) fired, or the client was closed.
    Aborted,
    /// Anything else: invalid data from the server, a limit that must not be passed.
    Internal,
}

impl ErrorCode {
    /// The code's name, exactly as in every SyncGuard client.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ServiceUnavailable => "ServiceUnavailable",
            Self::AuthFailed => "AuthFailed",
            Self::InvalidArgument => "InvalidArgument",
            Self::RateLimited => "RateLimited",
            Self::NetworkTimeout => "NetworkTimeout",
            Self::AcquisitionTimeout => "AcquisitionTimeout",
            Self::Aborted => "Aborted",
            Self::Internal => "Internal",
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failure: what kind, what failed and what to do, and what may remain held.
///
/// Contention is not an error for the single operations; they answer `Locked` or `NotHeld`.
///
/// `Display` and `Debug` never show a key, a lock id or a connection string;
/// [`key`](LockError::key) and [`lock_id`](LockError::lock_id) return them.
/// [`source`](Error::source) keeps the cause; `Debug`, which is what `fn main() -> Result<()>` prints,
/// and [`chain`](LockError::chain) show all causes.
#[derive(thiserror::Error)]
#[error(transparent)]
pub struct LockError(Box<Inner>);

#[derive(thiserror::Error)]
#[error("{text}{outcome}", text = self.text(), outcome = self.outcome())]
struct Inner {
    code: ErrorCode,
    message: Option<Cow<'static, str>>,
    key: Option<String>,
    lock_id: Option<String>,
    may_be_held_for: Option<Duration>,
    contention: bool,
    sqlstate: Option<String>,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl LockError {
    /// An error whose text is its code's name. For people who write a backend.
    ///
    /// ```
    /// use syncguard::{ErrorCode, LockError};
    ///
    /// assert_eq!(LockError::new(ErrorCode::Internal).to_string(), "Internal");
    /// ```
    #[must_use]
    pub fn new(code: ErrorCode) -> Self {
        Self(Box::new(Inner {
            code,
            message: None,
            key: None,
            lock_id: None,
            may_be_held_for: None,
            contention: false,
            sqlstate: None,
            source: None,
        }))
    }

    /// Says what failed and what to do. Must not contain a key, a lock id or a connection string.
    ///
    /// ```
    /// use syncguard::{ErrorCode, LockError};
    ///
    /// let error = LockError::new(ErrorCode::RateLimited).with_message("no connection is free: try again");
    /// assert_eq!(error.to_string(), "no connection is free: try again");
    /// ```
    #[must_use]
    pub fn with_message(mut self, message: impl Into<Cow<'static, str>>) -> Self {
        self.0.message = Some(message.into());
        self
    }

    /// Remembers the key for [`LockError::key`]; it is not printed.
    ///
    /// ```
    /// use syncguard::{ErrorCode, LockError};
    ///
    /// let error = LockError::new(ErrorCode::Internal).with_key("customer:7");
    /// assert!(!format!("{error:?}").contains("customer"));
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn with_key(mut self, key: impl Into<String>) -> Self {
        self.0.key = Some(key.into());
        self
    }

    /// Remembers the lock id for [`LockError::lock_id`]; it is not printed.
    ///
    /// ```
    /// use syncguard::{ErrorCode, LockError};
    ///
    /// let error = LockError::new(ErrorCode::Internal).with_lock_id("AAAAAAAAAAAAAAAAAAAAAA");
    /// assert!(!format!("{error:?}").contains("AAAA"));
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn with_lock_id(mut self, lock_id: impl Into<String>) -> Self {
        self.0.lock_id = Some(lock_id.into());
        self
    }

    /// Keeps the cause.
    ///
    /// ```
    /// use std::error::Error;
    /// use syncguard::{ErrorCode, LockError};
    ///
    /// let error = LockError::new(ErrorCode::ServiceUnavailable).with_source("connection reset");
    /// assert_eq!(error.source().map(ToString::to_string).as_deref(), Some("connection reset"));
    /// ```
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Marks the outcome as unknown: the change may or may not have been committed, and whatever it
    /// was may stay in force for at most this long, counted from now.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use syncguard::{ErrorCode, LockError};
    ///
    /// let error = LockError::new(ErrorCode::NetworkTimeout).with_unknown_outcome(Duration::from_secs(31));
    /// assert!(error.is_outcome_unknown());
    /// ```
    #[must_use]
    pub fn with_unknown_outcome(mut self, may_be_held_for: Duration) -> Self {
        self.0.may_be_held_for = Some(may_be_held_for);
        self
    }

    /// Marks an error that certainly changed nothing and comes from other sessions' locks, so that
    /// a waiting `lock` may try again (40001, 40P01, 55P03).
    ///
    /// ```
    /// use syncguard::{ErrorCode, LockError};
    ///
    /// let error = LockError::new(ErrorCode::ServiceUnavailable).with_contention();
    /// assert!(error.is_contention());
    /// ```
    #[must_use]
    pub fn with_contention(mut self) -> Self {
        self.0.contention = true;
        self
    }

    /// What kind of failure this is.
    ///
    /// ```
    /// use syncguard::{ErrorCode, LockClient, LockOptions, MemoryBackend};
    ///
    /// let client = LockClient::new(MemoryBackend::new());
    /// let error = client.lock("").unwrap_err(); // a key has at least one byte
    /// assert_eq!(error.code(), ErrorCode::InvalidArgument);
    /// ```
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        self.0.code
    }

    /// The key of the failed call, where it had one.
    ///
    /// ```
    /// use syncguard::{ErrorCode, LockError};
    ///
    /// let error = LockError::new(ErrorCode::Internal).with_key("report");
    /// assert_eq!(error.key(), Some("report"));
    /// ```
    #[must_use]
    pub fn key(&self) -> Option<&str> {
        self.0.key.as_deref()
    }

    /// The lock id of the failed call: the one passed in, or the one an acquire had chosen.
    ///
    /// ```
    /// use syncguard::{ErrorCode, LockError};
    ///
    /// assert_eq!(LockError::new(ErrorCode::Internal).lock_id(), None);
    /// ```
    #[must_use]
    pub fn lock_id(&self) -> Option<&str> {
        self.0.lock_id.as_deref()
    }

    /// Whether the outcome is unknown: the server may have carried the change out although no
    /// answer came. `false` means that certainly nothing was changed.
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// if let Err(error) = client.lock("report") {
    ///     if error.is_outcome_unknown() {
    ///         eprintln!("another try may have to wait: {}", error.chain());
    ///     }
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn is_outcome_unknown(&self) -> bool {
        self.0.may_be_held_for.is_some()
    }

    /// For an unknown outcome: how long, from the moment of the error, the key may stay held by
    /// this attempt if nobody releases it. [`Duration::MAX`] where that is up to the lease's own
    /// end, which a release by lock id does not know.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use syncguard::{ErrorCode, LockError};
    ///
    /// let error = LockError::new(ErrorCode::NetworkTimeout).with_unknown_outcome(Duration::from_secs(31));
    /// assert_eq!(error.may_be_held_for(), Some(Duration::from_secs(31)));
    /// ```
    #[must_use]
    pub fn may_be_held_for(&self) -> Option<Duration> {
        self.0.may_be_held_for
    }

    /// Whether this error is contention, which a waiting `lock` tries again after; see [`LockError::with_contention`].
    ///
    /// ```
    /// use syncguard::{ErrorCode, LockError};
    ///
    /// assert!(!LockError::new(ErrorCode::Internal).is_contention());
    /// ```
    #[must_use]
    pub fn is_contention(&self) -> bool {
        self.0.contention
    }

    /// Remembers the SQLSTATE that the server answered with.
    pub(crate) fn with_sqlstate(mut self, sqlstate: &str) -> Self {
        self.0.sqlstate = Some(sqlstate.to_owned());
        self
    }

    /// The SQLSTATE that the server answered with, where it answered
    /// (<https://www.postgresql.org/docs/current/errcodes-appendix.html>).
    ///
    /// ```no_run
    /// # let client = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?;
    /// if let Err(error) = client.lock("report") {
    ///     eprintln!("{:?}", error.sqlstate()); // Some("42501"), for example: a right is missing
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    #[must_use]
    pub fn sqlstate(&self) -> Option<&str> {
        self.0.sqlstate.as_deref()
    }

    /// A wrong argument. The message says which and what to pass instead.
    pub(crate) fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorCode::InvalidArgument).with_message(message)
    }

    /// The caller's token fired.
    pub(crate) fn aborted() -> Self {
        Self::new(ErrorCode::Aborted).with_message("Operation aborted by signal")
    }

    /// The client is closed.
    pub(crate) fn closed() -> Self {
        Self::new(ErrorCode::Aborted).with_message("the client is closed: make a new one to lock again")
    }

    /// Refuses what another process made: this one is its fork.
    pub(crate) fn check_process(made_in: u32) -> Result<()> {
        if made_in == std::process::id() {
            return Ok(());
        }
        Err(Self::invalid(
            "this client was made before a fork: its locks and connections belong to the parent, make a new one in the child",
        ))
    }

    /// The error's code, its text and those of its causes in one line, for a log: without keys, lock
    /// ids and connection strings, like [`Display`](fmt::Display).
    ///
    /// ```
    /// use syncguard::{ErrorCode, LockError};
    ///
    /// let error = LockError::new(ErrorCode::NetworkTimeout).with_source("connection reset");
    /// assert_eq!(error.chain().to_string(), "NetworkTimeout: NetworkTimeout: connection reset");
    /// ```
    #[must_use]
    pub fn chain(&self) -> impl fmt::Display + '_ {
        Chain(self)
    }
}

impl Inner {
    fn text(&self) -> &str {
        self.message.as_deref().unwrap_or(self.code.as_str())
    }

    /// What may remain held, where the outcome is unknown.
    fn outcome(&self) -> Cow<'static, str> {
        match self.may_be_held_for {
            None => Cow::Borrowed(""),
            Some(Duration::ZERO) => Cow::Borrowed(" (what became of this call is not known)"),
            Some(Duration::MAX) => Cow::Borrowed(
                " (the outcome is unknown: the lease may last until its own end unless it is released again)",
            ),
            Some(rest) => Cow::Owned(format!(
                " (the outcome is unknown: the key may be held for up to {:.1} s from now unless it is released by its lock id)",
                rest.as_secs_f64()
            )),
        }
    }
}

impl fmt::Debug for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("LockError");
        out.field("code", &self.code).field("message", &self.to_string());
        if let Some(sqlstate) = &self.sqlstate {
            out.field("sqlstate", sqlstate);
        }
        let causes: Vec<String> = Causes(self.source()).map(ToString::to_string).collect();
        if !causes.is_empty() {
            out.field("causes", &causes);
        }
        out.finish_non_exhaustive()
    }
}

struct Chain<'a>(&'a LockError);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.code(), self.0)?;
        Causes(Error::source(self.0)).try_for_each(|cause| write!(f, ": {cause}"))
    }
}

/// A cause, its cause, and so on.
struct Causes<'a>(Option<&'a (dyn Error + 'static)>);

impl<'a> Iterator for Causes<'a> {
    type Item = &'a (dyn Error + 'static);

    fn next(&mut self) -> Option<Self::Item> {
        let cause = self.0?;
        self.0 = cause.source();
        Some(cause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_message_the_text_is_the_code() {
        let codes = [
            ErrorCode::ServiceUnavailable,
            ErrorCode::AuthFailed,
            ErrorCode::InvalidArgument,
            ErrorCode::RateLimited,
            ErrorCode::NetworkTimeout,
            ErrorCode::AcquisitionTimeout,
            ErrorCode::Aborted,
            ErrorCode::Internal,
        ];
        for code in codes {
            assert_eq!(LockError::new(code).to_string(), code.as_str());
        }
    }

    #[test]
    fn neither_display_nor_debug_shows_the_key_or_the_lock_id() {
        let error = LockError::new(ErrorCode::Internal)
            .with_key("MARKER-key")
            .with_lock_id("MARKER-id")
            .with_unknown_outcome(Duration::from_secs(31));
        for text in [format!("{error}"), format!("{error:?}"), format!("{}", error.chain())] {
            assert!(!text.contains("MARKER"), "{text}");
        }
        assert!(error.to_string().contains("31.0 s"));
        assert_eq!((error.key(), error.lock_id()), (Some("MARKER-key"), Some("MARKER-id")));
    }

    #[test]
    fn debug_shows_every_cause() {
        let deep = LockError::new(ErrorCode::AuthFailed).with_sqlstate("28P01").with_source("wrong password");
        let error = LockError::new(ErrorCode::AcquisitionTimeout).with_message("too late").with_source(deep);
        let text = format!("{error:?}");
        for part in ["AcquisitionTimeout", "too late", "AuthFailed", "wrong password"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn it_is_an_ordinary_error() {
        fn check<T: Error + Send + Sync + 'static>() {}
        check::<LockError>();
        let error = LockError::new(ErrorCode::Internal).with_source("cause");
        assert_eq!(error.source().unwrap().to_string(), "cause");
        assert_eq!(format!("{}", error.chain()), "Internal: Internal: cause");
    }
}
