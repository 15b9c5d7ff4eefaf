//! Owners and notes: what a holder says of itself, for people (`docs/adr/0047`).
//!
//! 1. A note is written by the statement that grants, under the lease's own id and with its fence, and is shown only
//!    beside a lease that has both: never for another holder, whoever released or took over meanwhile.
//! 2. Releases of a client that has written notes delete them in their own statement. Where the server refuses that
//!    (the table or a right is gone, a trigger fails) the lease is released without: a note alone is nobody's.
//! 3. What other clients leave is deleted by the next holder who says something, and by cleanup.

use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::backend::{Label, LockInfoRaw};
use crate::cancel::CancelToken;
use crate::error::{LockError, Result};
use crate::leases::backend::PostgresBackend;
use crate::leases::members::is_group;
use crate::leases::note_sql::NoteStatements;
use crate::leases::setup::ResolvedTables;
use crate::model::key::{BACKEND_LIMIT_POSTGRES, Key, RESERVE_BYTES_POSTGRES};
use crate::pg::Failure;
use crate::pg::answers::{Row, malformed, text};
use crate::pg::session::Session;
use crate::pg::statement::{Arg, Statement};

impl PostgresBackend {
    /// Checks what a holder says of itself, and that there is a place for it.
    pub(super) fn need_notes(&self, label: Label<'_>, end: Instant, cancel: &CancelToken) -> Result<()> {
        label.check()?;
        if label.is_none() { Ok(()) } else { self.need_members(end, cancel) }
    }

    /// Whether lookups show owners: those of clients that write them do.
    pub(super) fn shows_owners(&self, at: &ResolvedTables) -> bool {
        self.settings.owner || self.settings.members_table || at.noted.load(Ordering::Relaxed)
    }

    /// The same lease, with what its holder says of itself. What fails leaves that out.
    pub(super) fn labelled(&self, info: LockInfoRaw, (end, cancel): (Instant, &CancelToken)) -> LockInfoRaw {
        let fence = info.fence.to_string();
        let look = || -> Result<_> {
            if !self.has_members(end, cancel)? {
                return Ok(None);
            }
            let (stored, _) =
                Key::of_lease(&info.key)?.stored(BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES)?;
            let of_readers = info.shared || is_group(&info.lock_id);
            let found = self.run(end, cancel, |session, at| {
                let notes = at.notes.get().ok_or_else(malformed)?;
                session.prepare(&notes.reads())?;
                let (statement, whose) =
                    if of_readers { (&notes.of_readers, &stored) } else { (&notes.of, &info.lock_id) };
                let answers = session.ask_one(statement, &[Arg::Text(whose), Arg::Text(&fence)])?;
                Ok(answers.row(0)?.map(|row| label_in(row, 0)).transpose()?)
            });
            found.map_err(LockError::from)
        };
        match look() {
            Ok(Some((owner, note))) => info.labelled(owner, note),
            Ok(None) => info,
            Err(error) => {
                log::debug!("the owner of a lease could not be read: {}", error.chain());
                info
            }
        }
    }
}

/// The owner and the note in two columns.
pub(super) fn label_in(row: &Row, first: usize) -> Result<(Option<String>, Option<String>)> {
    let said = |column| -> Result<Option<String>> { Ok(text(row, column)?.map(str::to_owned)) };
    Ok((said(first)?, said(first + 1)?))
}

/// The statements that grant with a note, prepared; `None` for a holder that says nothing.
pub(super) fn granting<'a, const N: usize>(
    session: &mut Session<'_>,
    at: &'a ResolvedTables,
    label: Label<'_>,
    all: fn(&NoteStatements) -> [&Statement; N],
) -> Result<Option<&'a NoteStatements>, Failure> {
    if label.is_none() {
        return Ok(None);
    }
    let notes = at.notes.get().ok_or_else(malformed)?;
    session.prepare(&all(notes))?;
    at.noted.store(true, Ordering::Relaxed);
    Ok(Some(notes))
}

/// These arguments of a grant, and the label's where there is one.
pub(super) fn with_label<'a>(args: &[Arg<'a>], label: Label<'a>) -> Vec<Arg<'a>> {
    let mut all = args.to_vec();
    if !label.is_none() {
        all.extend([label.owner, label.note].map(|said| Arg::Text(said.unwrap_or_default())));
    }
    all
}

/// Ends leases with their notes, where this client has written any; without, where the server refuses that.
pub(super) fn ending<'a, R, const N: usize>(
    session: &mut Session<'_>,
    at: &'a ResolvedTables,
    all: fn(&NoteStatements) -> [&Statement; N],
    mut attempt: impl FnMut(&mut Session<'_>, Option<&'a NoteStatements>) -> Result<R, Failure>,
) -> Result<R, Failure> {
    if let Some(notes) = at.notes.get().filter(|_| at.noted.load(Ordering::Relaxed)) {
        let ended = session.prepare(&all(notes)).and_then(|()| attempt(session, Some(notes)));
        match ended {
            Err(failure) if failure.refused_with().is_some_and(|state| !is_the_leases_own(state)) => {
                session.rollback();
            }
            ended => return ended,
        }
    }
    attempt(session, None)
}

/// Whether a refusal says something of the lease, or of the time, and not of its note: 22012 is the statement's own.
fn is_the_leases_own(state: &str) -> bool {
    matches!(state, "22012" | "55P03" | "57014" | "25P04")
}
