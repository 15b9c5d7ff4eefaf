//! One call of a memory backend: the faults that wait for it, and what is said of it when it fails.

use std::time::Duration;

use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError};
use crate::memory::MemoryBackend;
use crate::memory::fault::{Call, Kind, Stay};
use crate::memory::store::Store;
use crate::model::time::{Moment, TOLERANCE, Ttl};

impl MemoryBackend {
    /// One call from its arrival to its answer, with the faults that wait for it.
    pub(super) fn call<T>(
        &self,
        call: Call,
        effect: Effect<'_>,
        (deadline, cancel): (Moment, &CancelToken),
        work: impl FnOnce(&mut Store, i64) -> T,
    ) -> Result<T, Failure> {
        let _answered = self.shared.arrive(call);
        let clock = &self.shared.clock;
        if cancel.is_cancelled() {
            return Err(Failure::ABORTED);
        }
        if clock.now() >= deadline {
            return Err(Failure::TIMED_OUT);
        }
        let Some(fault) = self.shared.take_fault(call) else { return Ok(self.shared.decide(work)) };
        let unknown =
            |failure: Failure| failure.unknown(self.shared.decide(|store, now| effect.span(store, now)));
        match fault.0 {
            Kind::Error(code) => Err(Failure::ordered(code)),
            Kind::LostRequest(code) => Err(unknown(Failure::ordered(code))),
            Kind::LostAnswer(code) => {
                let failure = unknown(Failure::ordered(code));
                drop(self.shared.decide(work));
                Err(failure)
            }
            Kind::Hang(gate) => match gate.hold(clock, deadline, cancel) {
                Stay::Opened => Ok(self.shared.decide(work)),
                Stay::Cancelled => Err(Failure::ABORTED),
                Stay::TimedOut => Err(Failure::TIMED_OUT),
            },
            Kind::HangAnswer(gate) => {
                let timed_out = unknown(Failure::TIMED_OUT);
                let answer = self.shared.decide(work);
                // What may be committed is no longer cancelled: only a read may still be given up.
                let never = CancelToken::never();
                let token = if matches!(effect, Effect::Read) { cancel } else { &never };
                match gate.hold(clock, deadline, token) {
                    Stay::Opened => Ok(answer),
                    Stay::Cancelled => Err(Failure::ABORTED),
                    Stay::TimedOut => Err(timed_out),
                }
            }
        }
    }
}

/// What a call whose outcome is unknown may have left behind.
#[derive(Clone, Copy)]
pub(super) enum Effect<'a> {
    Read,
    Grant(Ttl),
    Release(&'a str),
}

impl Effect<'_> {
    /// How long it may last; nothing for a read.
    fn span(self, store: &Store, now: i64) -> Option<Duration> {
        match self {
            Self::Read => None,
            Self::Grant(ttl) => Some(ttl.get() + TOLERANCE),
            Self::Release(id) => {
                Some(Duration::from_millis(u64::try_from(store.rest_ms(id, now)).unwrap_or(0)))
            }
        }
    }
}

/// An error before it knows its key and id; one failure may concern many leases.
#[derive(Clone, Copy)]
pub(super) struct Failure {
    code: ErrorCode,
    message: &'static str,
    may_be_held_for: Option<Duration>,
}

impl Failure {
    const ABORTED: Self =
        Self { code: ErrorCode::Aborted, message: "Operation aborted by signal", may_be_held_for: None };

    const TIMED_OUT: Self = Self {
        code: ErrorCode::NetworkTimeout,
        message: "the operation did not end before its deadline: allow it more time, or see what hangs",
        may_be_held_for: None,
    };

    fn ordered(code: ErrorCode) -> Self {
        Self { code, message: "the memory backend was told to fail", may_be_held_for: None }
    }

    fn unknown(mut self, span: Option<Duration>) -> Self {
        self.may_be_held_for = span;
        self
    }

    pub(super) fn error(self) -> LockError {
        let error = LockError::new(self.code).with_message(self.message);
        match self.may_be_held_for {
            Some(span) => error.with_unknown_outcome(span),
            None => error,
        }
    }
}
