//! The SQL of owners and notes: the statements of grants and releases, each with one part more.
//!
//! A note is a row of the table of members under the lock id of its lease, and has the fence of it. It is written in
//! the statement that grants, from the row that this writes, so that there is none without the other; it is shown only
//! beside a row with its id and its fence. Prepared on a connection with its first labelled grant: who says
//! nothing pays nothing.
//!
//! Whoever deletes a note has the lease's row first, or passes over notes that are locked: nobody waits in a circle.

use crate::leases::fragments::{CLOCK, live};
use crate::leases::held::{notification, release, release_live};
use crate::leases::once_sql::{self, RUN};
use crate::leases::permit_sql::{self, PERMIT};
use crate::leases::schema::Tables;
use crate::leases::several_sql::{self, SET};
use crate::leases::sql::{Where, acquire, acquire_absent, grant};
use crate::pg::names::{EQ, INT, MINUS, NE, TEXT, TEXTS};
use crate::pg::statement::Statement;

/// How many characters of an owner, or a note, are shown: clients write no more, but anybody may write the table.
pub(super) const SHOWN: usize = crate::backend::MAX_NOTE_BYTES;

/// How many members of earlier holders a grant deletes.
const MOST_OLD: u32 = 100;

/// The statements with notes, made when the table of members is found. Those that grant have two arguments more: the
/// owner and the note, empty where there is none.
pub(crate) struct NoteStatements {
    pub(super) grant: Statement,
    pub(super) acquire: Statement,
    pub(super) acquire_absent: Statement,
    pub(super) release: Statement,
    pub(super) release_live: Statement,
    pub(super) delete: Statement,
    pub(super) permit_grant: Statement,
    pub(super) permit_release_live: Statement,
    pub(super) set_absent: Statement,
    pub(super) set_grant: Statement,
    pub(super) set_release: Statement,
    pub(super) set_release_quietly: Statement,
    pub(super) begin_run: Statement,
    pub(super) finish: Statement,
    pub(super) verify: Statement,
    /// `(lock id, fence)`: answers (owner, note) of the lease.
    pub(super) of: Statement,
    /// `(storage key, fence)`: the same of the group's reader whose lease ends last.
    pub(super) of_readers: Statement,
}

impl NoteStatements {
    pub(super) fn new(tables: &Tables, notifies: bool) -> Self {
        const GRANT: &[&str] = &[TEXT, TEXT, TEXT, TEXT, INT, TEXT, TEXT];
        let written = written(tables, ("u", "$1"), &format!("{NE} $4"), ("$6", "$7"));
        let ended = ended(tables, "r");
        let of_set = format!("{NE} ALL ($4)");
        let set = self::written(tables, ("u", "u.key"), &of_set, ("$6", "$7"));
        let permit =
            self::written(tables, ("u CROSS JOIN slot", "slot.key"), &format!("{NE} $4"), ("$8", "$9"));
        let run = self::written(tables, ("u", "$1"), &format!("{NE} $4"), ("$9", "$10"));
        let locks = &tables.locks;
        let notified = notification(notifies);
        Self {
            grant: Statement::new("note_grant", GRANT, grant(tables, &written)),
            acquire: Statement::new("note_acquire", GRANT, acquire(tables, Where::then(&written))),
            acquire_absent: Statement::new(
                "note_absent",
                GRANT,
                acquire_absent(tables, Where::then(&written)),
            ),
            release: Statement::new("note_release", &[TEXT], release(tables, &self::ended(tables, "t"))),
            release_live: Statement::new(
                "note_release_live",
                &[TEXT],
                with_note(&release_live(tables, &notified), &ended),
            ),
            delete: Statement::new(
                "note_delete",
                &[TEXT, TEXT],
                format!(
                    "WITH r AS (DELETE FROM {locks} AS l WHERE l.key {EQ} $1 AND l.lock_id {EQ} $2 RETURNING l.lock_id{notified})\
                     {} SELECT r.lock_id FROM r",
                    ended_as(tables, "r", &format!("{EQ} $2"))
                ),
            ),
            permit_grant: Statement::new("note_permit", &PERMIT, permit_sql::grant(tables, &permit)),
            permit_release_live: Statement::new(
                "note_permit_release",
                &[TEXT, TEXT],
                with_note(&permit_sql::release(tables), &ended),
            ),
            set_absent: Statement::new("note_set_absent", SET, several_sql::absent(tables, &set)),
            set_grant: Statement::new("note_set_grant", SET, several_sql::grant(tables, &set)),
            set_release: Statement::new("note_set_release", &[TEXTS], set_release(tables, notifies)),
            set_release_quietly: Statement::new("note_set_quietly", &[TEXTS], set_release(tables, false)),
            begin_run: Statement::new("note_run", &RUN, once_sql::begin(tables, &run)),
            finish: once_sql::finish(tables, notifies, &ended),
            verify: once_sql::verify(tables, notifies, &ended),
            of: Statement::new("note_of", &[TEXT, TEXT], of(tables)),
            of_readers: Statement::new("note_of_readers", &[TEXT, TEXT], of_readers(tables)),
        }
    }

    pub(super) fn locks(&self) -> [&Statement; 6] {
        [&self.grant, &self.acquire, &self.acquire_absent, &self.release, &self.release_live, &self.delete]
    }

    pub(super) fn reads(&self) -> [&Statement; 2] {
        [&self.of, &self.of_readers]
    }

    pub(super) fn permits(&self) -> [&Statement; 2] {
        [&self.permit_grant, &self.permit_release_live]
    }

    pub(super) fn sets(&self) -> [&Statement; 4] {
        [&self.set_absent, &self.set_grant, &self.set_release, &self.set_release_quietly]
    }

    pub(super) fn runs(&self) -> [&Statement; 3] {
        [&self.begin_run, &self.finish, &self.verify]
    }
}

/// A text that may be none, from an argument that is empty then.
pub(super) fn optional(argument: &str) -> String {
    format!("CASE WHEN {argument} {NE} '' THEN {argument} END")
}

/// The parts that write the note of each row of `u`, which stands in `from`, and delete what earlier holders of its
/// key have left: where somebody is granted a key, no earlier note of it is anybody's, and no reader shares it.
pub(super) fn written(
    tables: &Tables,
    (from, key): (&str, &str),
    others: &str,
    (owner, note): (&str, &str),
) -> String {
    let members = &tables.members;
    let (owner, note) = (optional(owner), optional(note));
    format!(
        ", noted AS (\
           INSERT INTO {members} AS m (lock_id, key, role, since_ms, expires_at_ms, fence, owner, note) \
           SELECT u.lock_id, {key}, 'n', u.expires_at_ms {MINUS} $5, u.expires_at_ms, u.fence, {owner}, {note} FROM {from} \
           ON CONFLICT (lock_id) DO UPDATE SET key = EXCLUDED.key, since_ms = EXCLUDED.since_ms, \
             expires_at_ms = EXCLUDED.expires_at_ms, fence = EXCLUDED.fence, owner = EXCLUDED.owner, note = EXCLUDED.note \
           WHERE m.role {EQ} 'n'), \
         earlier AS MATERIALIZED (\
           SELECT o.lock_id FROM {from} CROSS JOIN LATERAL (\
             SELECT o.lock_id FROM {members} AS o WHERE o.key {EQ} {key} AND o.role {NE} 'w' AND o.lock_id {others} \
             ORDER BY o.since_ms LIMIT {MOST_OLD} FOR UPDATE OF o SKIP LOCKED) AS o), \
         forgotten AS (DELETE FROM {members} AS m USING earlier WHERE m.lock_id {EQ} earlier.lock_id)"
    )
}

/// The part that deletes the note of the lease `$1`, after what `from` has done.
fn ended(tables: &Tables, from: &str) -> String {
    ended_as(tables, from, &format!("{EQ} $1"))
}

fn ended_as(tables: &Tables, from: &str, id: &str) -> String {
    let members = &tables.members;
    format!(", gone AS (DELETE FROM {members} AS m USING {from} WHERE m.lock_id {id} AND m.role {EQ} 'n')")
}

/// A [`release_live`] with the part that deletes its note.
fn with_note(release_live: &str, ended: &str) -> String {
    format!("WITH r AS ({release_live}){ended} SELECT r.judged, r.relaxed, r.key FROM r")
}

fn set_release(tables: &Tables, notifies: bool) -> String {
    several_sql::release(tables, notifies, &ended_as(tables, "t", &format!("{EQ} ANY ($1)")))
}

fn shown(column: &str) -> String {
    format!("pg_catalog.\"left\"(m.{column}, {SHOWN})")
}

fn of(tables: &Tables) -> String {
    let (members, owner, note) = (&tables.members, shown("owner"), shown("note"));
    format!(
        "SELECT {owner}, {note} FROM {members} AS m \
         WHERE m.lock_id {EQ} $1 AND m.role {EQ} 'n' AND m.fence {EQ} $2"
    )
}

fn of_readers(tables: &Tables) -> String {
    let (members, owner, note) = (&tables.members, shown("owner"), shown("note"));
    let alive = live("m.expires_at_ms", CLOCK);
    format!(
        "SELECT {owner}, {note} FROM {members} AS m \
         WHERE m.key {EQ} $1 AND m.role {EQ} 's' AND m.fence {EQ} $2 AND {alive} \
           AND (m.owner IS NOT NULL OR m.note IS NOT NULL) ORDER BY m.expires_at_ms DESC LIMIT 1"
    )
}
