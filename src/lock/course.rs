//! What is told of a call as a whole: when it begins, what it gets, and how that ends.
//!
//! 1. Each call that begins ends once, whatever becomes of its guard: the first who ends it tells.
//! 2. Nothing is told in a forked child, where the backend may not be touched.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::backend::{Label, LockBackend, LockCourse, LockEnding, LockKind, LockStage};
use crate::error::LockError;
use crate::model::time::Moment;
use crate::threads::ignore_panic;

/// Whom it is told, and when it is.
pub(super) type Told<'a> = (&'a dyn LockBackend, Moment);

/// One call, from its beginning to the end of what it got.
pub(super) struct Course {
    kind: LockKind,
    key: Arc<str>,
    keys: usize,
    /// What who asks says of itself.
    owner: Option<Arc<str>>,
    note: Option<Arc<str>>,
    begun: Moment,
    ended: AtomicBool,
}

/// What a call got.
pub(super) struct Holding {
    course: Arc<Course>,
    waited: Duration,
    attempts: u64,
    since: Moment,
}

impl Course {
    /// A call begins.
    pub(super) fn begin(
        told: Told<'_>,
        kind: LockKind,
        (key, keys): (&Arc<str>, usize),
        (owner, note): (Option<Arc<str>>, Option<Arc<str>>),
    ) -> Arc<Self> {
        let (key, begun) = (Arc::clone(key), told.1);
        let course = Self { kind, key, keys, owner, note, begun, ended: AtomicBool::new(false) };
        course.tell(told, (Duration::ZERO, 0), LockStage::Begun);
        Arc::new(course)
    }

    /// It got what it asked for.
    pub(super) fn granted(self: &Arc<Self>, told: Told<'_>, attempts: u64) -> Arc<Holding> {
        let since = told.1;
        let waited = since.since(self.begun);
        self.tell(told, (waited, attempts), LockStage::Granted);
        Arc::new(Holding { course: Arc::clone(self), waited, attempts, since })
    }

    /// It got nothing.
    pub(super) fn not_granted(&self, told: Told<'_>, attempts: u64, ending: LockEnding) {
        if self.ended.swap(true, Ordering::Relaxed) {
            return;
        }
        let waited = told.1.since(self.begun);
        self.tell(told, (waited, attempts), LockStage::Ended { held: None, ending });
    }

    fn tell(&self, told: Told<'_>, (waited, attempts): (Duration, u64), stage: LockStage) {
        let mut course = LockCourse::new(self.kind, &self.key, self.keys, stage);
        (course.waited, course.attempts) = (waited, attempts);
        course.label = Label::new(self.owner.as_deref(), self.note.as_deref());
        ignore_panic(|| told.0.follow(&course));
    }
}

impl Holding {
    /// A renewal was confirmed, so long after the last request that was.
    pub(super) fn renewed(&self, told: Told<'_>, gap: Duration) {
        self.course.tell(told, (self.waited, self.attempts), LockStage::Renewed { gap });
    }

    /// It is over.
    pub(super) fn end(&self, told: Told<'_>, ending: LockEnding) {
        if self.course.ended.swap(true, Ordering::Relaxed) {
            return;
        }
        let held = Some(told.1.since(self.since));
        self.course.tell(told, (self.waited, self.attempts), LockStage::Ended { held, ending });
    }
}

/// How a call ended that failed.
pub(super) fn failed(error: &LockError) -> LockEnding {
    LockEnding::Failed(error.code())
}
