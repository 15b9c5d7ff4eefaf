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

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: ErrorCode) -> LockError {
        LockError::new(code)
    }

    fn broken(in_doubt: bool, stale: bool) -> Failure {
        Failure::broken(error(ErrorCode::ServiceUnavailable), in_doubt, stale)
    }

    #[test]
    fn a_refusal_leaves_the_connection_and_the_outcome_certain() {
        let refused = || Failure::from(error(ErrorCode::ServiceUnavailable).with_sqlstate("40001"));
        assert_eq!(refused().refused_with(), Some("40001"));
        assert!(!refused().is_in_doubt() && !refused().is_stale() && !refused().is_unprepared());
        assert!(!refused().condemns_idle_connections(false) && !refused().condemns_idle_connections(true));
        assert!(!LockError::from(refused()).is_outcome_unknown());
        let ended = Failure::broken(error(ErrorCode::ServiceUnavailable).with_sqlstate("57P01"), true, true);
        assert_eq!(ended.refused_with(), None, "a session that ended has refused nothing");
        assert_eq!(ended.refused().refused_with(), Some("57P01"));
    }

    #[test]
    fn what_is_in_doubt_stays_so_and_is_told() {
        for stale in [false, true] {
            assert!(!broken(false, stale).or_in_doubt(false).is_in_doubt());
            for failure in [broken(true, stale).or_in_doubt(false), broken(false, stale).or_in_doubt(true)] {
                assert!(failure.is_in_doubt() && !failure.is_refused());
                assert_eq!(failure.is_stale(), stale);
                assert_eq!(LockError::from(failure).may_be_held_for(), Some(std::time::Duration::ZERO));
            }
            assert!(!LockError::from(broken(false, stale)).is_outcome_unknown());
        }
        let refused = Failure::from(error(ErrorCode::Internal));
        assert!(refused.or_in_doubt(true).is_in_doubt(), "of a message before it");
    }

    #[test]
    fn a_statement_that_is_always_forgotten_is_no_riddle() {
        let failure = Failure::unprepared(error(ErrorCode::Internal));
        assert!(failure.is_unprepared() && !failure.is_refused() && !failure.is_stale());
        assert!(failure.into_error().to_string().contains("connect directly"));
        assert!(!broken(true, true).is_unprepared());
    }

    #[test]
    fn idle_connections_go_with_an_old_one_that_failed_and_with_a_standbys() {
        let of = |error, stale| Failure::broken(error, false, stale);
        let ended = || error(ErrorCode::ServiceUnavailable);
        for (failure, old, fresh) in [
            (of(ended(), true), true, false),
            (of(ended(), false), false, false),
            (of(error(ErrorCode::NetworkTimeout), false), true, false),
            (of(ended().with_sqlstate(READ_ONLY), false), true, true),
        ] {
            let condemns = [false, true].map(|fresh| failure.condemns_idle_connections(fresh));
            assert_eq!(condemns, [old, fresh], "{failure:?}");
        }
    }
}
