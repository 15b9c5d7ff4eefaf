//! Taking a lease away by hand.
//!
//! A broken lease's fence is raised with it, in one transaction: whatever the old holder still writes under
//! its fence is refused. Where it cannot be raised, the lease is not broken either.

use crate::backend::{LockInfo, LockInfoRaw};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::acquire::explain_unraised_counter;
use crate::leases::members::is_group;
use crate::leases::note_sql::SHOWN;
use crate::leases::notes::label_in;
use crate::leases::notify::notify_waiters;
use crate::leases::operator::{Operator, lease};
use crate::leases::refusals::{cannot_notify, is_all_or_nothing, is_swallowed, swallowed};
use crate::leases::setup::ResolvedTables;
use crate::model::fence::{FENCE_MAX, Fence};
use crate::model::hash::hash_key;
use crate::model::key::{
    BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES, fence_key_of, permit_of, semaphore_of,
    validate_limit,
};
use crate::model::lock_id::LockId;
use crate::pg::Failure;
use crate::pg::answers::{int, required, text};
use crate::pg::names::PLAIN_NAMES;
use crate::pg::session::Session;
use crate::pg::statement::{Arg, Message, Statement};

/// The result of [`Operator::break_lock`] and its variants.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct BrokenLock {
    /// The lease that was taken away, live or not; `None` if the key was free, or if its row was not
    /// one that a SyncGuard client writes.
    pub was: Option<LockInfo>,
    /// The key's counter now: greater than every fence that was ever granted.
    pub fence: Fence,
}

/// Which lease is to be broken.
#[derive(Clone, Copy)]
enum Only<'a> {
    /// Whichever the key has. Its fence is raised also where there is none.
    Any,
    /// The one with this id.
    Id(&'a str),
    /// The one under this fence.
    Fence(Fence),
}

/// Where a lease is stored, and what its holder calls it.
struct Place {
    stored: String,
    fence_key: String,
    key: String,
}

impl Place {
    fn of(key: &Key) -> Result<Self> {
        let (stored, fence_key) = key.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
        Ok(Self { stored, fence_key, key: key.as_str().to_owned() })
    }

    /// For the log: what it is, without its name.
    fn described(&self) -> String {
        match permit_of(&self.key) {
            Some((name, number)) => format!("permit {number} of the semaphore #{}", hash_key(name)),
            None => format!("the lock of key #{}", hash_key(&self.key)),
        }
    }
}

impl Operator {
    /// Takes a key away from its holder, and raises its fence, so that fenced writes of the old holder
    /// are refused. The holder notices at its next renewal.
    ///
    /// `who` is logged as a warning beside the key's hash, even if the answer was lost and the lock is
    /// perhaps broken: say who asked, and why.
    ///
    /// Without fenced writes the old holder goes on working until it notices: make sure that it has
    /// stopped first.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// let broken = operator.break_lock("report", "on call: its host is gone")?;
    /// println!("the fencing token is {} now", broken.fence);
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `NetworkTimeout` if the holder's row or counter stays locked by a transaction, `Internal` if the
    /// counter cannot be raised because it is at its limit or was changed by hand. Then, as after every
    /// error but an unknown outcome, nothing was changed.
    pub fn break_lock(&self, key: &str, who: &str) -> Result<BrokenLock> {
        self.break_any(&Key::new(key)?, who)
    }

    /// The same, but only if the key is held under this fence: a holder that got the key since you looked keeps
    /// it. Otherwise the answer is `None`, and nothing is changed.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// # let seen = syncguard::Fence::new(42).unwrap();
    /// if operator.break_lock_under("report", seen, "on call: its host is gone")?.is_none() {
    ///     println!("another holder has it by now, or nobody");
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`break_lock`](Self::break_lock).
    pub fn break_lock_under(&self, key: &str, fence: Fence, who: &str) -> Result<Option<BrokenLock>> {
        let key = Key::new(key)?;
        self.break_place(&Place::of(&key)?, Only::Fence(fence), who)
            .map_err(|error| error.with_key(key.as_str()))
    }

    /// As [`break_lock`](Self::break_lock), for permit `number` (from 1) of the semaphore with this name; its
    /// waiters are notified.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// operator.break_permit("reports", 2, "on call: its host is gone")?;
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`break_lock`](Self::break_lock); `InvalidArgument` for a number that no permit can have.
    pub fn break_permit(&self, semaphore: &str, number: u32, who: &str) -> Result<BrokenLock> {
        let name = Key::new(semaphore)?;
        validate_limit(number).map_err(|_| {
            LockError::invalid("no semaphore has a permit with this number: they are numbered from 1 to 1024")
        })?;
        self.break_any(&name.permit(number), who)
    }

    /// As [`break_lock`](Self::break_lock), but only for the lease with this id, of a lock or a permit. `None` if
    /// there is none; then nothing is changed.
    ///
    /// ```no_run
    /// # let operator = syncguard::PgLockClient::connect("postgresql://app@db.example/app")?.operator();
    /// for lease in operator.holders_raw(100)? {
    ///     if lease.key == "reports" && lease.permit == Some(2) {
    ///         operator.break_lease(&lease.lock_id, "on call: its host is gone")?;
    ///     }
    /// }
    /// # Ok::<(), syncguard::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`break_lock`](Self::break_lock).
    pub fn break_lease(&self, lock_id: &str, who: &str) -> Result<Option<BrokenLock>> {
        let lock_id = LockId::parse(lock_id)?;
        let broken = match self.place_of(&lock_id) {
            Ok(Some(place)) => self.break_place(&place, Only::Id(lock_id.as_str()), who),
            Ok(None) => return Ok(None),
            Err(error) => Err(error),
        };
        broken.map_err(|error| error.with_lock_id(lock_id.as_str()))
    }

    fn break_any(&self, key: &Key, who: &str) -> Result<BrokenLock> {
        let broken = self.break_place(&Place::of(key)?, Only::Any, who);
        let broken = broken.and_then(required);
        broken.map_err(|error| error.with_key(semaphore_of(key.as_str()).unwrap_or(key.as_str())))
    }

    /// Where the lease with this id is stored, be it by another client, which may have hashed its key.
    fn place_of(&self, lock_id: &LockId) -> Result<Option<Place>> {
        let end = self.backend.database.end();
        self.run_by(end, |session, at| {
            let locks = &at.tables.locks;
            let text_of = format!("SELECT l.key, l.user_key FROM {locks} AS l WHERE l.lock_id = $1");
            let find = Statement::new("find_place", &["text"], text_of);
            let message =
                Message::new().raw(session.limits_plain()).plain(&find, &[Arg::Text(lock_id.as_str())])?;
            let rows = session.ask(&message)?.into_last_rows();
            let Some(row) = rows.first() else { return Ok(None) };
            let stored = required(text(row, 0)?)?.to_owned();
            let fence_key = fence_key_of(&stored, BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
            Ok(Some(Place { stored, fence_key, key: required(text(row, 1)?)?.to_owned() }))
        })
    }

    fn break_place(&self, place: &Place, only: Only<'_>, who: &str) -> Result<Option<BrokenLock>> {
        let end = self.backend.database.end();
        // For the note. What keeps the catalogs from being read keeps the lock from being broken.
        self.backend.has_members_by_now(end)?;
        let broken = self.backend.run(end, &CancelToken::never(), |session, at| {
            let answer = match take_away(session, at, place, only, at.notifies) {
                Err(failure) if at.notifies && cannot_notify(&failure) => {
                    take_away(session, at, place, only, false)
                }
                answer => answer,
            };
            match answer {
                Err(failure) if is_swallowed(&failure) => Err(swallowed().into()),
                Err(failure) if is_all_or_nothing(&failure) => {
                    Err(explain_unraised_counter(session, at, &place.fence_key))
                }
                answer => answer,
            }
        });
        let what = place.described();
        let broken = broken.map_err(|failure| {
            if failure.is_in_doubt() {
                log::warn!("{what} was perhaps broken by {who:?}: the answer was lost");
            }
            LockError::from(failure)
        })?;
        if let Some(BrokenLock { fence, .. }) = &broken {
            log::warn!("{what} was broken by {who:?}, its fencing token is now {fence}");
        }
        Ok(broken)
    }
}

/// One message: the queue, and the end of the lease. Nothing where it is not the one that was meant.
fn take_away(
    session: &mut Session<'_>,
    at: &ResolvedTables,
    place: &Place,
    only: Only<'_>,
    notifies: bool,
) -> Result<Option<BrokenLock>, Failure> {
    let fence = match only {
        Only::Fence(fence) => fence.to_string(),
        Only::Any | Only::Id(_) => String::new(),
    };
    let id = match only {
        Only::Id(id) => id,
        Only::Any | Only::Fence(_) => "",
    };
    let waited_for = semaphore_of(&place.stored).unwrap_or(&place.stored);
    let [stored, fence_key, key, id, fence, waited_for] =
        [&place.stored, &place.fence_key, &place.key, id, &fence, waited_for].map(Arg::Text);
    let message = Message::new()
        .raw(session.prelude())
        .raw(PLAIN_NAMES)
        .call(&at.statements.queue, &[stored])
        .plain(&statement(at, notifies), &[stored, fence_key, key, id, fence, waited_for])?;
    let answers = session.commit(&message)?;
    let row = required(answers.row(0)?)?;
    let Some(fence) = int(row, 6)? else { return Ok(None) };
    // It is gone for good: a row that cannot be read is no error any more.
    let was = lease(row).ok().map(|lease| note_of(session, at, lease).sanitized());
    let fence = u64::try_from(fence).ok().and_then(Fence::new);
    Ok(Some(BrokenLock { was, fence: required(fence)? }))
}

/// The broken lease with what its holder said of itself, which is deleted. What fails leaves it to cleanup: it is
/// shown for nobody any more.
fn note_of(session: &mut Session<'_>, at: &ResolvedTables, lease: LockInfoRaw) -> LockInfoRaw {
    if at.shared.get().is_none() || is_group(&lease.lock_id) {
        return lease;
    }
    let members = &at.tables.members;
    let forget = Statement::new(
        "forget",
        &["text"],
        format!(
            "DELETE FROM {members} AS m WHERE m.lock_id = $1 AND m.role = 'n' \
             RETURNING pg_catalog.left(m.owner, {SHOWN}), pg_catalog.left(m.note, {SHOWN}), m.fence"
        ),
    );
    let mut look = || -> Result<_, Failure> {
        let message = Message::new().raw(session.prelude()).raw(PLAIN_NAMES);
        let answers = session.commit(&message.plain(&forget, &[Arg::Text(&lease.lock_id)])?)?;
        let Some(row) = answers.row(0)? else { return Ok(None) };
        let same = text(row, 2)? == Some(&*lease.fence.to_string());
        Ok(Some(label_in(row, 0)?).filter(|_| same))
    };
    match look() {
        Ok(Some((owner, note))) => lease.labelled(owner, note),
        Ok(None) => lease,
        Err(failure) => {
            log::debug!("the note of a broken lease was not deleted: {}", LockError::from(failure).chain());
            lease
        }
    }
}

/// `(storage key, fence key, user key, lock id or '', fence or '', what its waiters wait for)`: deletes the row if
/// it is the one that was meant, notifies its waiters, and raises the counter, or fails as a whole: if that is not
/// raised (22012, division by zero), or if a row that stands is not deleted (22P02). Without an id and a fence
/// any row is meant, and none.
fn statement(at: &ResolvedTables, notifies: bool) -> Statement {
    let notification = if notifies { notify_waiters("$6") } else { "NULLIF($6, $6)".to_owned() };
    let (locks, fences) = (&at.tables.locks, &at.tables.fences);
    let (column, value) = at.tables.key_debug("$3");
    Statement::new(
        "break",
        &["text", "text", "text", "text", "text", "text"],
        format!(
            "WITH stood AS MATERIALIZED (\
               SELECT l.key FROM {locks} AS l WHERE l.key = $1 AND $4 IN ('', l.lock_id) AND $5 IN ('', l.fence) \
               FOR UPDATE), \
             meant AS MATERIALIZED (SELECT 1 WHERE $4 = '' AND $5 = '' OR EXISTS (SELECT 1 FROM stood)), \
             gone AS (\
               DELETE FROM {locks} AS l USING stood WHERE l.key = stood.key \
               RETURNING l.user_key, l.lock_id, l.expires_at_ms, l.acquired_at_ms, l.fence, {notification}), \
             raised AS (\
               INSERT INTO {fences} AS c (fence_key, fence{column}) SELECT $2, 1{value} FROM meant \
               ON CONFLICT (fence_key) DO UPDATE SET fence = c.fence + 1 \
                 WHERE c.fence >= 0 AND c.fence < {FENCE_MAX} RETURNING c.fence) \
             SELECT gone.*, raised.fence, \
               1 / (SELECT count(*) + (1 - (SELECT count(*) FROM meant)) FROM raised AS r WHERE NOT EXISTS (\
                 SELECT 1 FROM {fences} AS c WHERE c.fence_key = $2 AND c.fence >= r.fence)), \
               (CASE WHEN (SELECT count(*) FROM stood) = (SELECT count(*) FROM gone) THEN '1' ELSE 'stands' END)::int4 \
             FROM (SELECT 1) AS one LEFT JOIN gone ON true LEFT JOIN raised ON true"
        ),
    )
}
