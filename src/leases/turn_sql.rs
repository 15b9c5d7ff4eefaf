//! The SQL of those who wait for their turn. Why the lease's part of it is as it is: see [`sql`](crate::leases::sql).
//!
//! A *ticket* is a member with role w. An acquire in turn is the plain one with one condition more: no live ticket is
//! ahead. Its own row, which a first answer that was lost may have left, makes that condition void.

use crate::leases::fragments::CLOCK;
use crate::leases::note_sql::{optional, written};
use crate::leases::schema::Tables;
use crate::leases::shared_sql::{in_line, wait_row};
use crate::leases::sql::{Where, acquire, acquire_absent};
use crate::pg::names::{COUNT, EQ, GT, INT, LT, MINUS, NE, PLUS, TEXT};
use crate::pg::statement::Statement;

/// The statements, made when the table of members is found, and prepared on a connection with its first use.
pub(crate) struct TurnStatements {
    /// The arguments of `acquire_absent`, and `(ticket, waited ms, priority)`, and of whoever is next in this process
    /// `(ticket or '', waited ms, priority, lasts ms, note or '')`. Answers as `acquire_absent`.
    absent: Statement,
    /// The same arguments. Answers as `acquire`.
    acquire: Statement,
    /// The same two for a holder that says something of itself: its owner and note, empty where there is none.
    noted_absent: Statement,
    noted_acquire: Statement,
    /// `(storage key, lock id, ticket, waited ms, priority)`: how many are ahead.
    pub(super) ahead: Statement,
    /// `(storage key, ticket)`, and of whoever is next the same five: in the transaction of a grant.
    pub(super) hand_over: Statement,
    /// `(storage key, ticket, waited ms, priority)`: answers (expiry, clock, fence, lock id, how many are ahead).
    pub(super) look: Statement,
}

impl TurnStatements {
    pub(super) fn new(tables: &Tables) -> Self {
        let locks = &tables.locks;
        let unless_ours =
            format!(" AND NOT EXISTS (SELECT 1 FROM {locks} AS o WHERE o.key {EQ} $1 AND o.lock_id {EQ} $4)");
        let before = format!("{}, ", ahead(tables, ("$6", "$7", "$8"), &format!("{unless_ours} LIMIT 1")));
        let after =
            hand_over(tables, "$6", ["$9", "$10", "$11", "$12", "$13"], " AND EXISTS (SELECT 1 FROM u)");
        let after = format!(", {after}");
        let only =
            Where { before: &before, condition: " AND NOT EXISTS (SELECT 1 FROM ahead)", after: &after };
        let unless_ours = unless_ours.replace("$4", "$2");
        let noted = format!("{after}{}", written(tables, ("u", "$1"), &format!("{NE} $4"), ("$14", "$15")));
        let only_noted = Where { after: &noted, ..only };
        Self {
            noted_absent: Statement::new("turn_note_absent", NOTED, acquire_absent(tables, only_noted)),
            noted_acquire: Statement::new("turn_note_acquire", NOTED, acquire(tables, only_noted)),
            absent: Statement::new("turn_absent", ASKED, acquire_absent(tables, only)),
            acquire: Statement::new("turn_acquire", ASKED, acquire(tables, only)),
            ahead: Statement::new(
                "turn_ahead",
                &[TEXT, TEXT, TEXT, INT, INT],
                format!("WITH {} SELECT {COUNT} FROM ahead", ahead(tables, ("$3", "$4", "$5"), &unless_ours)),
            ),
            hand_over: Statement::new(
                "turn_over",
                &[TEXT, TEXT, TEXT, INT, INT, INT, TEXT],
                format!("WITH {} SELECT 1", hand_over(tables, "$2", ["$3", "$4", "$5", "$6", "$7"], "")),
            ),
            look: Statement::new(
                "turn_look",
                &[TEXT, TEXT, INT, INT],
                format!(
                    "WITH {} SELECT l.expires_at_ms, own.now, l.fence, l.lock_id, (SELECT {COUNT} FROM ahead) \
                     FROM own LEFT JOIN {locks} AS l ON l.key {EQ} $1",
                    ahead(tables, ("$2", "$3", "$4"), "")
                ),
            ),
        }
    }

    pub(super) fn all(&self) -> [&Statement; 7] {
        [
            &self.absent,
            &self.acquire,
            &self.noted_absent,
            &self.noted_acquire,
            &self.ahead,
            &self.hand_over,
            &self.look,
        ]
    }

    /// The grants, with or without a note.
    pub(super) fn grants(&self, noted: bool) -> (&Statement, &Statement) {
        if noted { (&self.noted_absent, &self.noted_acquire) } else { (&self.absent, &self.acquire) }
    }
}

const NOTED: &[&str] = &[TEXT, TEXT, TEXT, TEXT, INT, TEXT, INT, INT, TEXT, INT, INT, INT, TEXT, TEXT, TEXT];
const ASKED: &[&str] = NOTED.split_at(13).0;

/// `ahead`: the live tickets that come before that of `(id, waited ms, priority)`, whose age is what was written for it:
/// calculated anew it would be another each time, and two could yield to each other.
fn ahead(tables: &Tables, (id, waited, priority): (&str, &str, &str), more: &str) -> String {
    let (members, in_line) = (&tables.members, in_line("own.now"));
    format!(
        "own AS MATERIALIZED (\
           SELECT t.now, COALESCE((\
             SELECT m.since_ms FROM {members} AS m WHERE m.lock_id {EQ} {id} AND m.key {EQ} $1 AND m.role {EQ} 'w'), \
             t.now {MINUS} {waited}) AS since FROM (SELECT {CLOCK} AS now OFFSET 0) AS t), \
         ahead AS MATERIALIZED (\
           SELECT 1 FROM {members} AS w, own WHERE w.key {EQ} $1 AND w.role {EQ} 'w' AND w.lock_id {NE} {id} \
             AND {in_line} AND (w.priority {GT} {priority} OR w.priority {EQ} {priority} AND (w.since_ms {LT} own.since \
               OR w.since_ms {EQ} own.since AND w.lock_id {LT} {id})){more})"
    )
}

/// What a grant does with tickets: its own ends, and that of whoever is next in the same process begins.
fn hand_over(
    tables: &Tables,
    id: &str,
    [next, waited, priority, lasts, note]: [&str; 5],
    condition: &str,
) -> String {
    let members = &tables.members;
    let values = format!(
        "SELECT {next}, $1, 'w', n.now {MINUS} {waited}, n.now {PLUS} {lasts}, {priority}::pg_catalog.int4, \
           {} FROM (SELECT {CLOCK} AS now OFFSET 0) AS n \
         WHERE {next} {NE} ''{condition}",
        optional(note)
    );
    format!(
        "ended AS (DELETE FROM {members} AS m WHERE m.lock_id {EQ} {id} AND m.role {EQ} 'w'{condition}), \
         begun AS ({})",
        wait_row(tables, &values)
    )
}
