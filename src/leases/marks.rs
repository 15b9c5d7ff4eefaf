//! The marks of jobs that run once per slot, for operators: which there are, and setting one back.

use std::fmt;

use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::fragments::{CLOCK, DURABLE, live};
use crate::leases::operator::Operator;
use crate::leases::refusals::swallowed;
use crate::leases::setup::ResolvedTables;
use crate::model::hash::hash_key;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES, mark_of};
use crate::pg::answers::{int, malformed, required, text};
use crate::pg::names::PLAIN_NAMES;
use crate::pg::statement::{Arg, Message, Statement};

/// The two kinds of slots, each with a mark of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum SlotKind {
    /// Those of [`Slot::every`](crate::Slot::every).
    Every,
    /// Those of [`Slot::number`](crate::Slot::number).
    Number,
}

impl SlotKind {
    /// `every` or `number`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Every => "every",
            Self::Number => "number",
        }
    }

    /// What the stored key of a mark ends with.
    const fn suffix(self) -> &'static str {
        match self {
            Self::Every => "done",
            Self::Number => "number",
        }
    }
}

/// The mark of a job's last slot that is done. From [`Operator::marks`]. **Sensitive**: it has the job's name.
/// `Debug` hides that.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobMark {
    /// The job's name, in NFC.
    pub name: String,
    /// The kind of its slots.
    pub kind: SlotKind,
    /// The start of the period in Unix milliseconds of the server's clock, or the caller's number.
    pub mark: u64,
    /// How far a period's start lies in the future, in milliseconds by the server's clock: the job does not run
    /// until then. `None` for one that does not, and for a number of the caller's.
    pub ahead_ms: Option<u64>,
}

/// What [`Operator::reset_mark`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
#[must_use = "it may have done nothing"]
pub enum MarkReset {
    /// The mark was removed, as if the job had never run; this is its value.
    Reset(u64),
    /// There was none.
    NotMarked,
    /// Nothing was changed: a holder has the lease of the job's name, or the slot is being marked.
    Running,
}

impl fmt::Debug for JobMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobMark")
            .field("name_hash", &hash_key(&self.name))
            .field("kind", &self.kind)
            .field("mark", &self.mark)
            .field("ahead_ms", &self.ahead_ms)
            .finish()
    }
}

impl Operator {
    /// The marks of jobs that run [once per slot](crate::PgLockClient::run_once), the greatest first, at most
    /// `limit` of them. **Sensitive**: with the names of the jobs.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// for job in operator.marks(100)?.iter().filter(|job| job.ahead_ms.is_some()) {
    ///     println!("{} does not run: its mark lies in the future", job.name);
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    pub fn marks(&self, limit: u32) -> Result<Vec<JobMark>> {
        let rows = self.ask(|at| {
            let fences = &at.tables.fences;
            let marks = at.marks();
            format!(
                "SELECT c.fence_key, c.fence, {CLOCK} FROM {fences} AS c WHERE c.fence >= 0 AND {marks} \
                 ORDER BY c.fence DESC, c.fence_key LIMIT {limit}"
            )
        })?;
        rows.iter()
            .map(|row| {
                let (name, suffix) = mark_of(required(text(row, 0)?)?).ok_or_else(malformed)?;
                let kind =
                    if suffix == SlotKind::Every.suffix() { SlotKind::Every } else { SlotKind::Number };
                let mark = required(int(row, 1)?)?;
                let ahead = mark.saturating_sub(required(int(row, 2)?)?);
                Ok(JobMark {
                    name: name.to_owned(),
                    kind,
                    mark: u64::try_from(mark).map_err(|_| malformed())?,
                    ahead_ms: u64::try_from(ahead).ok().filter(|ahead| kind == SlotKind::Every && *ahead > 0),
                })
            })
            .collect()
    }

    /// Removes the mark of a job, as if it had never run: its current slot runs at the next call, **even if it
    /// is done**. For a mark that lies in the future, because a clock was ahead or a number was wrong.
    ///
    /// `who` is logged as a warning beside the hash of the job's name, even if the answer was lost: say who
    /// asked, and why.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// use syncguard::{MarkReset, SlotKind};
    ///
    /// match operator.reset_mark("report", SlotKind::Every, "on call: the clock was a day ahead")? {
    ///     MarkReset::Reset(mark) => println!("it was {mark}"),
    ///     other => println!("{other:?}"),
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `NetworkTimeout` if the mark stays locked by a transaction. After any error except one whose outcome is
    /// unknown, nothing was changed.
    pub fn reset_mark(&self, name: &str, kind: SlotKind, who: &str) -> Result<MarkReset> {
        let key = Key::new(name)?;
        let (storage_key, _) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
        let mark = key.mark(kind.suffix(), BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
        let end = self.backend.database.end();
        let reset = self.backend.run(end, &CancelToken::never(), |session, at| {
            let message = Message::new()
                .raw(session.prelude())
                .raw(PLAIN_NAMES)
                .call(&at.statements.queue, &[Arg::Text(&storage_key)])
                .plain(&statement(at), &[Arg::Text(&storage_key), Arg::Text(&mark)])?
                .plain(&look(at), &[Arg::Text(&mark)])?;
            let answers = session.commit(&message)?;
            let row = required(answers.row(1)?)?;
            let (held, was, done) = (required(int(row, 0)?)?, int(row, 1)?, required(int(row, 2)?)?);
            let is = answers.row(0)?.map(|row| int(row, 0)).transpose()?.flatten();
            match (held, was, done) {
                (0, Some(was), 1..) => Ok(MarkReset::Reset(u64::try_from(was).map_err(|_| malformed())?)),
                (0, None, _) => Ok(MarkReset::NotMarked),
                // Nobody has written it meanwhile.
                (0, ..) if is == was => Err(swallowed().into()),
                _ => Ok(MarkReset::Running),
            }
        });
        let hash = hash_key(key.as_str());
        let reset = reset.map_err(|failure| {
            if failure.is_in_doubt() {
                log::warn!("the mark of the job #{hash} was perhaps reset by {who:?}: the answer was lost");
            }
            LockError::from(failure).with_key(key.as_str())
        })?;
        if let MarkReset::Reset(mark) = reset {
            log::warn!("the mark of the job #{hash} was reset by {who:?}, it was {mark}");
        }
        Ok(reset)
    }
}

/// `(storage key, mark's key)`: where no lease of the key is live, makes the mark -1, which is none. Answers (live
/// leases, the mark as it was, marks reset). One that was written meanwhile stays: its run is not over.
fn statement(at: &ResolvedTables) -> Statement {
    let (locks, fences) = (&at.tables.locks, &at.tables.fences);
    let alive = live("l.expires_at_ms", CLOCK);
    Statement::new(
        "reset_mark",
        &["text", "text"],
        format!(
            "WITH held AS MATERIALIZED (SELECT 1 FROM {locks} AS l WHERE l.key = $1 AND {alive}), \
             old AS MATERIALIZED (SELECT c.fence FROM {fences} AS c WHERE c.fence_key = $2 AND c.fence >= 0), \
             reset AS (\
               UPDATE {fences} AS c SET fence = -1 FROM old \
               WHERE c.fence_key = $2 AND c.fence = old.fence AND NOT EXISTS (SELECT 1 FROM held) RETURNING c.fence) \
             SELECT (SELECT count(*) FROM held), (SELECT old.fence FROM old), \
               (SELECT count(*) FROM reset AS r WHERE r.fence = -1), {DURABLE}"
        ),
    )
}

/// `(mark's key)`: the mark, in a snapshot of its own.
fn look(at: &ResolvedTables) -> Statement {
    let fences = &at.tables.fences;
    Statement::new(
        "look_at_mark",
        &["text"],
        format!("SELECT c.fence FROM {fences} AS c WHERE c.fence_key = $1"),
    )
}
