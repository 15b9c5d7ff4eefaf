//! How a call failed, and what that says of the connection and of the change.

use crate::error::{ErrorCode, LockError};

/// The SQLSTATE with which a standby refuses a change.
pub(crate) const READ_ONLY: &str = "25006";

/// The one failure type inside: an error for the caller, and what it means for whoever might try again.
#[derive(Debug)]
pub(crate) struct Failure {
    error: LockError,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Certainly nothing was changed, and the connection is in order.
    Refused,
    /// The server no longer knows what this connection had prepared; nothing was changed.
    Unprepared,
    /// The connection is gone or must not be used again.
    Broken {
        /// The lost answer was that of a message that commits.
        in_doubt: bool,
        /// The failure says nothing about the server: an old connection may simply be stale.
        stale: bool,
    },
}

impl Failure {
    /// The server has forgotten a prepared statement.
    pub(crate) fn unprepared(error: LockError) -> Self {
        Self { error, kind: Kind::Unprepared }
    }

    /// The connection must not be used again.
    pub(crate) fn broken(error: LockError, in_doubt: bool, stale: bool) -> Self {
        Self { error, kind: Kind::Broken { in_doubt, stale } }
    }

    /// The same, in doubt where something before it is.
    pub(crate) fn or_in_doubt(self, in_doubt: bool) -> Self {
        if !in_doubt {
            return self;
        }
        let stale = self.is_stale();
        Self::broken(self.error, true, stale)
    }

    /// An answer all the same, and the last one: no other connection will do better.
    pub(crate) fn refused(self) -> Self {
        Self { kind: Kind::Refused, ..self }
    }

    pub(crate) fn is_refused(&self) -> bool {
        matches!(self.kind, Kind::Refused)
    }

    /// The SQLSTATE with which the server refused.
    pub(crate) fn refused_with(&self) -> Option<&str> {
        if self.is_refused() { self.error.sqlstate() } else { None }
    }

    pub(crate) fn is_unprepared(&self) -> bool {
        matches!(self.kind, Kind::Unprepared)
    }

    /// Whether the change may have been made all the same.
    pub(crate) fn is_in_doubt(&self) -> bool {
        matches!(self.kind, Kind::Broken { in_doubt: true, .. })
    }

    /// Whether another connection may do better.
    pub(crate) fn is_stale(&self) -> bool {
        matches!(self.kind, Kind::Broken { stale: true, .. })
    }

    /// Whether no other idle connection can be trusted either, if this happened on one that was opened
    /// for the call (`fresh`) or not: the server was restarted, a firewall forgot them, or they lead to
    /// a standby.
    pub(crate) fn condemns_idle_connections(&self, fresh: bool) -> bool {
        let Kind::Broken { stale, .. } = self.kind else { return false };
        self.error.sqlstate() == Some(READ_ONLY)
            || (!fresh && (stale || self.error.code() == ErrorCode::NetworkTimeout))
    }

    /// The error, where nothing more can be done about it and the outcome is known.
    pub(crate) fn into_error(self) -> LockError {
        match self.kind {
            Kind::Unprepared => self.error.with_message("the server keeps forgetting prepared statements: a pooler or DISCARD ALL removes them, connect directly"),
            Kind::Refused | Kind::Broken { .. } => self.error,
        }
    }
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Self {
        Self { error, kind: Kind::Refused }
    }
}

/// For callers who know of no key that could be held: an unknown outcome is said, without a time.
impl From<Failure> for LockError {
    fn from(failure: Failure) -> Self {
        let in_doubt = failure.is_in_doubt();
        let error = failure.into_error();
        if in_doubt { error.with_unknown_outcome(std::time::Duration::ZERO) } else { error }
    }
}
