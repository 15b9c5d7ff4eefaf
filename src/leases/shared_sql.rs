//! The SQL of shared leases. Why the lease's part of it is as it is: see [`sql`](crate::leases::sql).
//!
//! All readers of a key are one row among the leases, the *group*, and each of them is a *member*, a row of the
//! table of members. Whoever changes a member has the group's row first, so that what is counted under it is all
//! there is. Prepared on a connection with its first shared lease: who takes none pays for none.

use crate::backend::LONGEST_TICKET_MS;
use crate::error::Result;
use crate::leases::fragments::{CLEANUP_GUARD_MS, CLOCK, DURABLE, RELAXED, busy, live};
use crate::leases::held::{new_end, notification};
use crate::leases::note_sql::{SHOWN, optional};
use crate::leases::notify::notify_waiters;
use crate::leases::schema::{Tables, digest};
use crate::leases::sql::{all_or_nothing, insert, raise, upsert};
use crate::model::fence::Fence;
use crate::model::lock_id::LockId;
use crate::model::time::TIME_TOLERANCE_MS;
use crate::pg::names::{COUNT, EQ, GE, GT, INT, INTS, LE, LT, MINUS, NE, PLUS, TEXT, TEXTS};
use crate::pg::statement::{Statement, push_quoted};

/// What a group's lock id begins with: no lock id has this character.
pub(super) const GROUP: &str = "~shared~";

/// How many dead members whoever meets them deletes at once.
const MOST_DEAD: u32 = 1000;

/// The lock id of a key's group. The table of members is part of it: to a client with another table the group
/// is somebody's lease.
pub(super) fn group_id(tables: &Tables, storage_key: &str) -> String {
    format!("{GROUP}{}", digest(&format!("{}\0{storage_key}", tables.members), 7))
}

/// The statements, made when the table of members is found.
pub(crate) struct SharedStatements {
    /// `(storage key, fence key, user key, group's id, ttl ms, lock id, waited ms, owner or '', note or '')`: becomes a member of a live
    /// group, or makes one where no row stands. Answers (expiry, fence, version, 1, intents to yield to, whether a
    /// lease of another kind stands, for how long the group lived without the change), the first three NULL if it did
    /// neither, the last if it made one.
    pub(super) join: Statement,
    /// `(storage key, group's id)`: locks the group's row.
    pub(super) hold: Statement,
    /// The arguments of `join`: decides with the group's row locked, in a snapshot of its own. Answers (expiry,
    /// fence, version, 1, whether all but the counter was well).
    pub(super) found: Statement,
    /// `(storage key, group's id, lock id)`: after `hold`. Answers whether a live member was found (NULL if none), whether
    /// its group was, and whether any member.
    pub(super) leave: Statement,
    /// The same without a notification.
    pub(super) leave_quietly: Statement,
    /// `(storage key, group's id)`: after `hold`. Lets a group end with its last member, where it ends much later.
    pub(super) trim: Statement,
    /// `(storage keys, groups' ids, lock ids, ttls, fences, versions)`: see [`renew`].
    pub(super) renew: Statement,
    /// The same, and waits for rows that are busy.
    pub(super) renew_alone: Statement,
    /// `(storage key, fence)`: how many live members a group has.
    pub(super) count: Statement,
    /// `(lock id)`: answers (user key, lock id, expiry, since, fence, clock, storage key, owner, note) of a member of a group
    /// that stands.
    pub(super) by_id: Statement,
    /// `(storage key, id, waited ms, lasts ms, priority, note or '')`
    pub(super) announce: Statement,
    /// `(id)`: calls waiters where the key is free.
    pub(super) withdraw: Statement,
}

impl SharedStatements {
    pub(super) fn new(tables: &Tables, notifies: bool) -> Self {
        let (locks, members) = (&tables.locks, &tables.members);
        let alive = live("m.expires_at_ms", CLOCK);
        Self {
            join: Statement::new("join", &JOIN, join(tables)),
            hold: Statement::new(
                "hold_group",
                &[TEXT, TEXT],
                format!(
                    "SELECT 1::pg_catalog.int8 FROM {locks} AS l WHERE l.key {EQ} $1 AND l.lock_id {EQ} $2 FOR UPDATE"
                ),
            ),
            found: Statement::new("found", &JOIN, found(tables)),
            leave: Statement::new("leave", &[TEXT, TEXT, TEXT], leave(tables, &notification(notifies))),
            leave_quietly: Statement::new("leave_quietly", &[TEXT, TEXT, TEXT], leave(tables, "")),
            trim: Statement::new("trim_group", &[TEXT, TEXT], trim(tables)),
            renew: Statement::new("renew_shared", RENEWED, renew(tables, " SKIP LOCKED")),
            renew_alone: Statement::new("renew_shared_alone", RENEWED, renew(tables, "")),
            count: Statement::new(
                "readers",
                &[TEXT, TEXT],
                format!(
                    "SELECT {COUNT} FROM {members} AS m WHERE m.key {EQ} $1 AND m.role {EQ} 's' AND m.fence {EQ} $2 AND {alive}"
                ),
            ),
            by_id: Statement::new(
                "reader",
                &[TEXT],
                format!(
                    "SELECT l.user_key, m.lock_id, m.expires_at_ms, m.since_ms, m.fence, {CLOCK}, m.key, \
                       pg_catalog.\"left\"(m.owner, {SHOWN}), pg_catalog.\"left\"(m.note, {SHOWN}) \
                     FROM {members} AS m JOIN {locks} AS l ON l.key {EQ} m.key AND l.fence {EQ} m.fence \
                     WHERE m.lock_id {EQ} $1 AND m.role {EQ} 's' AND pg_catalog.starts_with(l.lock_id, '{GROUP}')"
                ),
            ),
            announce: Statement::new("announce", &[TEXT, TEXT, INT, INT, INT, TEXT], announce(tables)),
            withdraw: Statement::new("withdraw", &[TEXT], withdraw(tables, notifies)),
        }
    }

    pub(super) fn all(&self) -> [&Statement; 12] {
        [
            &self.join,
            &self.hold,
            &self.found,
            &self.leave,
            &self.leave_quietly,
            &self.trim,
            &self.renew,
            &self.renew_alone,
            &self.count,
            &self.by_id,
            &self.announce,
            &self.withdraw,
        ]
    }
}

const JOIN: [&str; 9] = [TEXT, TEXT, TEXT, TEXT, INT, TEXT, INT, TEXT, TEXT];
const RENEWED: &[&str] = &[TEXTS, TEXTS, TEXTS, INTS, TEXTS, TEXTS];

/// `($2, …)`: a row of whoever waits, in `values`. Said again it may become older, and never younger: the first message may have
/// been slow, and the clock may have been set back.
pub(super) fn wait_row(tables: &Tables, values: &str) -> String {
    let members = &tables.members;
    format!(
        "INSERT INTO {members} AS m (lock_id, key, role, since_ms, expires_at_ms, priority, note) {values} \
         ON CONFLICT (lock_id) DO UPDATE SET expires_at_ms = EXCLUDED.expires_at_ms, \
           priority = EXCLUDED.priority, note = EXCLUDED.note, \
           since_ms = LEAST(m.since_ms, EXCLUDED.since_ms) \
         WHERE m.role {EQ} 'w' AND m.key {EQ} EXCLUDED.key"
    )
}

/// Waits for the key, by an intent or a ticket, and deletes those of the key that are long over.
fn announce(tables: &Tables) -> String {
    let members = &tables.members;
    let values = "SELECT $2, $1, 'w', t.now OPERATOR(pg_catalog.-) $3, t.now OPERATOR(pg_catalog.+) $4, $5::pg_catalog.int4, \
         CASE WHEN $6 OPERATOR(pg_catalog.<>) '' THEN $6 END FROM t";
    format!(
        "WITH t AS MATERIALIZED (SELECT {CLOCK} AS now), \
         old AS MATERIALIZED (\
           SELECT d.lock_id FROM {members} AS d, t WHERE d.key {EQ} $1 AND d.role {EQ} 'w' AND d.lock_id {NE} $2 \
             AND d.expires_at_ms {LT} (t.now {MINUS} {CLEANUP_GUARD_MS}::pg_catalog.int8) \
           LIMIT {MOST_DEAD} FOR UPDATE OF d SKIP LOCKED), \
         gone AS (DELETE FROM {members} AS d USING old WHERE d.lock_id {EQ} old.lock_id) \
         {} RETURNING {RELAXED}",
        wait_row(tables, values)
    )
}

/// Whoever comes next may be next now: a key that is free has no release to call it.
fn withdraw(tables: &Tables, notifies: bool) -> String {
    let (locks, members) = (&tables.locks, &tables.members);
    let call = if notifies {
        format!(
            ", CASE WHEN NOT EXISTS (SELECT 1 FROM {locks} AS l WHERE l.key {EQ} m.key AND {}) THEN {} END",
            live("l.expires_at_ms", CLOCK),
            notify_waiters("m.key")
        )
    } else {
        String::new()
    };
    format!(
        "DELETE FROM {members} AS m WHERE m.lock_id {EQ} $1 AND m.role {EQ} 'w' RETURNING {RELAXED}{call}"
    )
}

/// Whether `w` still waits. What says that it lasts for too long is nobody's.
pub(super) fn in_line(now: &str) -> String {
    format!(
        "w.expires_at_ms {GT} {now} AND w.expires_at_ms {LE} ({now} {PLUS} {LONGEST_TICKET_MS}::pg_catalog.int8)"
    )
}

/// `older`: a writer that has waited longer than this reader, if there is one, where one more `condition` is fulfilled.
fn older(tables: &Tables, condition: &str) -> String {
    let (members, in_line) = (&tables.members, in_line(CLOCK));
    format!(
        "older AS MATERIALIZED (\
           SELECT 1 FROM {members} AS w WHERE w.key {EQ} $1 AND w.role {EQ} 'w' AND {in_line} \
             AND w.since_ms {LT} ({CLOCK} {MINUS} $7){condition} LIMIT 1)"
    )
}

/// A reader that asks again and is there already yields to nobody.
fn unless_joined(tables: &Tables) -> String {
    let (locks, members) = (&tables.locks, &tables.members);
    format!(
        " AND NOT EXISTS (\
           SELECT 1 FROM {members} AS m, {locks} AS l WHERE m.lock_id {EQ} $6 AND m.key {EQ} $1 AND m.role {EQ} 's' \
             AND l.key {EQ} $1 AND l.lock_id {EQ} $4 AND l.fence {EQ} m.fence)"
    )
}

/// `cur`: the key's row by this `condition`, locked, and the clock after that: what is read beside a row lock is read when
/// the row is had.
fn locked(tables: &Tables, condition: &str) -> String {
    let locks = &tables.locks;
    format!(
        "cur AS MATERIALIZED (\
           SELECT l.lock_id, l.expires_at_ms, {CLOCK} AS now FROM (\
             SELECT l.lock_id, l.expires_at_ms FROM {locks} AS l \
             WHERE l.key {EQ} $1 AND {condition} AND NOT EXISTS (SELECT 1 FROM older) FOR UPDATE OF l) AS l)"
    )
}

/// `g`: the group of `cur`, lengthened to the new member's end if it lives.
fn lengthen(tables: &Tables) -> String {
    let (locks, alive) = (&tables.locks, live("cur.expires_at_ms", "cur.now"));
    format!(
        "g AS (\
           UPDATE {locks} AS l SET expires_at_ms = GREATEST(cur.expires_at_ms, cur.now {PLUS} $5) FROM cur \
           WHERE l.key {EQ} $1 AND l.lock_id {EQ} $4 AND cur.lock_id {EQ} $4 AND {alive} \
           RETURNING l.fence, cur.now, l.expires_at_ms {GE} (cur.now {PLUS} $5) AS lasts, cur.expires_at_ms {MINUS} cur.now AS rest)"
    )
}

/// `m`: the member of the group in `g`, which stood, or in `u`, which is new. The same attempt again finds its member, and
/// leaves it as it is. One of an earlier group, which a late copy finds, is over, and becomes one of this group: its
/// guard sees the other fence.
fn member(tables: &Tables) -> String {
    let (members, owner, note) = (&tables.members, optional("$8"), optional("$9"));
    let same = format!("m.fence {EQ} EXCLUDED.fence AND {}", live("m.expires_at_ms", "EXCLUDED.since_ms"));
    format!(
        "joined AS (\
           SELECT g.fence, g.now, g.lasts, g.rest FROM g \
           UNION ALL SELECT u.fence, u.expires_at_ms {MINUS} $5, true, NULL::pg_catalog.int8 FROM u WHERE u.ours), \
         m AS (\
           INSERT INTO {members} AS m (lock_id, key, role, since_ms, expires_at_ms, fence, owner, note) \
           SELECT $6, $1, 's', j.now, j.now {PLUS} $5, j.fence, {owner}, {note} FROM joined AS j \
           ON CONFLICT (lock_id) DO UPDATE SET fence = EXCLUDED.fence, owner = EXCLUDED.owner, note = EXCLUDED.note, \
             since_ms = CASE WHEN {same} THEN m.since_ms ELSE EXCLUDED.since_ms END, \
             expires_at_ms = CASE WHEN {same} THEN m.expires_at_ms ELSE EXCLUDED.expires_at_ms END \
           WHERE m.key {EQ} EXCLUDED.key AND m.role {EQ} 's' \
           RETURNING m.expires_at_ms, CASE WHEN m.lock_id {EQ} $6 AND m.key {EQ} $1 THEN m.fence END AS fence, \
             m.xmin::pg_catalog.text AS version)"
    )
}

/// What `member` answers, from [`JOINED`], and fails the message (22012) where the group was changed and the member is not
/// its, or where something is `amiss` besides.
fn joined(amiss: &str) -> String {
    format!(
        "m.expires_at_ms, m.fence, m.version, \
         (1 OPERATOR(pg_catalog./) (CASE WHEN j.fence IS NOT NULL AND (NOT j.lasts OR m.fence IS NULL OR m.fence {NE} j.fence) \
           {amiss} THEN 0 ELSE 1 END))::pg_catalog.int8"
    )
}

/// One row, with what was joined and the member, if there are any.
const JOINED: &str = "FROM (SELECT 1) AS one LEFT JOIN joined AS j ON true LEFT JOIN m ON true";

/// What nearly always happens: a live group, or no row at all, which is made one as `acquire_absent` makes a
/// lease.
fn join(tables: &Tables) -> String {
    let (locks, fences, busy) = (&tables.locks, &tables.fences, busy());
    let free = "WHERE NOT EXISTS (SELECT 1 FROM look) AND NOT EXISTS (SELECT 1 FROM older) \
         AND NOT EXISTS (SELECT 1 FROM counter WHERE counter.busy) \
         AND pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext($1)::pg_catalog.int8)";
    let amiss = format!(
        "OR f.fence IS NOT NULL AND (j.fence IS NULL OR (SELECT counter.fence FROM counter) {GE} f.fence)"
    );
    format!(
        "WITH {}, \
         look AS MATERIALIZED (SELECT l.lock_id, l.expires_at_ms FROM {locks} AS l WHERE l.key {EQ} $1), \
         {}, {}, \
         counter AS MATERIALIZED (SELECT x.fence, {busy} FROM {fences} AS x WHERE x.fence_key {EQ} $2), \
         {}, {}, {} \
         SELECT {}, (SELECT {COUNT} FROM older), (SELECT {COUNT} FROM look WHERE look.lock_id {NE} $4 AND {}), \
           j.rest, {DURABLE} {JOINED} LEFT JOIN f ON true",
        older(tables, ""),
        locked(tables, &format!("l.lock_id {EQ} $4")),
        lengthen(tables),
        raise(tables, free, &format!(", {CLOCK} AS now")),
        insert(tables, ("f.fence", "f.now"), "f", "NOTHING"),
        member(tables),
        joined(&amiss),
        live("look.expires_at_ms", CLOCK),
    )
}

/// The whole decision, after the queue and the group's row: join a live group, or make one over a row that is
/// over. The members of the groups before it are dead then, and deleted.
fn found(tables: &Tables) -> String {
    let (locks, fences, members) = (&tables.locks, &tables.fences, &tables.members);
    let free = format!(
        "(SELECT {COUNT} FROM {locks} AS l WHERE l.key {EQ} $1) {EQ} (SELECT {COUNT} FROM cur) \
         AND NOT EXISTS (SELECT 1 FROM older) AND NOT EXISTS (SELECT 1 FROM cur WHERE {})",
        live("cur.expires_at_ms", "cur.now")
    );
    format!(
        "WITH {}, \
         {}, {}, \
         ok AS MATERIALIZED (\
           SELECT {CLOCK} AS now FROM (SELECT {COUNT} AS n FROM (\
             SELECT 1 FROM {fences} AS c WHERE c.fence_key {EQ} $2 AND {free} \
             FOR NO KEY UPDATE OF c SKIP LOCKED) AS counter) AS held \
           WHERE held.n {EQ} (SELECT {COUNT} FROM {fences} AS c WHERE c.fence_key {EQ} $2) AND {free}), \
         {}, {}, {}, \
         old AS MATERIALIZED (\
           SELECT d.lock_id FROM {members} AS d WHERE d.key {EQ} $1 AND d.role {EQ} 's' AND d.lock_id {NE} $6 \
             AND EXISTS (SELECT 1 FROM u) LIMIT {MOST_DEAD} FOR UPDATE OF d SKIP LOCKED), \
         gone AS (DELETE FROM {members} AS d USING old WHERE d.lock_id {EQ} old.lock_id) \
         SELECT {}, (SELECT {COUNT} FROM ok), {} {JOINED}",
        older(tables, &unless_joined(tables)),
        locked(tables, &format!("(l.lock_id {EQ} $4 OR NOT {})", live("l.expires_at_ms", CLOCK))),
        lengthen(tables),
        raise(tables, "FROM ok", ""),
        insert(tables, ("f.fence", "ok.now"), "f, ok", &upsert()),
        member(tables),
        joined(""),
        all_or_nothing(tables),
    )
}

/// Whether this transaction has the row of a group locked. One that came after `hold` had looked is not: who joins it
/// now is not seen.
const HELD: &str = "l.xmax OPERATOR(pg_catalog.=) (pg_catalog.pg_current_xact_id()::pg_catalog.xid)";

/// Deletes a member, and its group if no live member of it is left; else sees that the group ends with the last
/// of them, and not much later. A late join may make it one of another group meanwhile: then it stays, as that group does. Members that are long over go with it. Fails the message (22012) where the group is
/// there and not held: again, then.
fn leave(tables: &Tables, notification: &str) -> String {
    let (locks, members) = (&tables.locks, &tables.members);
    let group = format!("l.key {EQ} $1 AND l.lock_id {EQ} $2 AND l.fence {EQ}");
    format!(
        "WITH seen AS MATERIALIZED (\
           SELECT m.fence, t.now, {} AS lives FROM {members} AS m, (SELECT {CLOCK} AS now OFFSET 0) AS t \
           WHERE m.lock_id {EQ} $3 AND m.key {EQ} $1 AND m.role {EQ} 's'), \
         own AS MATERIALIZED (SELECT l.fence, {HELD} AS held FROM {locks} AS l, seen WHERE {group} seen.fence), \
         d AS (\
           DELETE FROM {members} AS m USING seen \
           WHERE m.lock_id {EQ} $3 AND m.key {EQ} $1 AND m.role {EQ} 's' AND m.fence {EQ} seen.fence \
           RETURNING m.fence), \
         others AS MATERIALIZED (\
           SELECT pg_catalog.max(m.expires_at_ms) AS last FROM {members} AS m, seen, own \
           WHERE m.key {EQ} $1 AND m.role {EQ} 's' AND m.lock_id {NE} $3 AND m.fence {EQ} own.fence AND {}), \
         x AS (\
           DELETE FROM {locks} AS l USING d, others WHERE {group} d.fence AND {HELD} AND others.last IS NULL \
           RETURNING 1 AS ended{notification}), \
         s AS (\
           UPDATE {locks} AS l SET expires_at_ms = others.last FROM d, others \
           WHERE {group} d.fence AND {HELD} AND l.expires_at_ms {GT} (others.last {PLUS} {TIME_TOLERANCE_MS}::pg_catalog.int8)), \
         old AS MATERIALIZED (\
           SELECT m.lock_id FROM {members} AS m, seen WHERE m.key {EQ} $1 AND m.role {EQ} 's' AND m.lock_id {NE} $3 \
             AND m.expires_at_ms {LT} (seen.now {MINUS} {CLEANUP_GUARD_MS}::pg_catalog.int8) \
           LIMIT {MOST_DEAD} FOR UPDATE OF m SKIP LOCKED), \
         gone AS (DELETE FROM {members} AS m USING old WHERE m.lock_id {EQ} old.lock_id) \
         SELECT seen.lives, own.fence IS NOT NULL, seen.fence IS NOT NULL, (1 OPERATOR(pg_catalog./) (CASE WHEN \
             seen.lives AND own.fence IS NOT NULL AND (d.fence IS NULL OR others.last IS NULL AND x.ended IS NULL) \
             OR NOT own.held THEN 0 ELSE 1 END)), {RELAXED} \
         FROM others LEFT JOIN seen ON true LEFT JOIN own ON true LEFT JOIN d ON true LEFT JOIN x ON true",
        live("m.expires_at_ms", "t.now"),
        live("m.expires_at_ms", "seen.now"),
    )
}

/// After a lease that was shortened. In a statement of its own, as a leave: a renewal may have waited for the row, and
/// does not see who joined meanwhile. A group whose members were all deleted as dead by then is over.
fn trim(tables: &Tables) -> String {
    let (locks, members) = (&tables.locks, &tables.members);
    let group = format!("l.key {EQ} $1 AND l.lock_id {EQ} $2 AND {HELD}");
    format!(
        "WITH ends AS MATERIALIZED (\
           SELECT COALESCE(pg_catalog.max(m.expires_at_ms), 0::pg_catalog.int8) AS last FROM {members} AS m, {locks} AS l \
           WHERE {group} AND m.key {EQ} $1 AND m.role {EQ} 's' AND m.fence {EQ} l.fence) \
         UPDATE {locks} AS l SET expires_at_ms = ends.last FROM ends \
         WHERE {group} AND l.expires_at_ms {GT} (ends.last {PLUS} {TIME_TOLERANCE_MS}::pg_catalog.int8) RETURNING {RELAXED}"
    )
}

/// Members of any groups. Each group is locked first, in the order of the keys that they come in, and lengthened once, to
/// the greatest end of its members that are renewed; a row that is busy is skipped, or waited for. Answers per
/// member: (place, new end, version, asked end, group locked, its fence, member locked, its fence, lives, the
/// lock id and the fence of the row that stands for the key, whether the member is seen). Of a member that was renewed the
/// ninth is whether it was shortened so much that its group is to be [trimmed](trim).
///
/// What is looked up is looked up by an index, place by place: see [`held::renew`](crate::leases::held).
fn renew(tables: &Tables, busy: &str) -> String {
    let (locks, members) = (&tables.locks, &tables.members);
    let end = new_end(("c.version", "c.replaced"), "c.expires_at_ms", &format!("t.now {PLUS} c.ttl"));
    let ok = format!(
        "c.group_fence {EQ} c.wanted AND c.fence {EQ} c.wanted AND {} AND {}",
        live("c.expires_at_ms", "t.now"),
        live("c.group_end", "t.now")
    );
    format!(
        "WITH c AS MATERIALIZED (\
           SELECT want.place, want.key, want.grp, want.lock_id, want.ttl, want.fence AS wanted, want.replaced, \
             g.fence AS group_fence, g.expires_at_ms AS group_end, m.fence, m.expires_at_ms, m.version \
           FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3), pg_catalog.unnest($4), \
             pg_catalog.unnest($5), pg_catalog.unnest($6)) \
             WITH ORDINALITY AS want (key, grp, lock_id, ttl, fence, replaced, place) \
           LEFT JOIN LATERAL (\
             SELECT l.fence, l.expires_at_ms FROM {locks} AS l \
             WHERE l.key {EQ} want.key AND l.lock_id {EQ} want.grp FOR UPDATE OF l{busy}) AS g ON true \
           LEFT JOIN LATERAL (\
             SELECT m.fence, m.expires_at_ms, m.xmin::pg_catalog.text AS version FROM {members} AS m \
             WHERE m.lock_id {EQ} want.lock_id AND m.key {EQ} want.key AND m.role {EQ} 's' AND g.fence IS NOT NULL \
             FOR UPDATE OF m{busy}) AS m ON true), \
         t AS MATERIALIZED (\
           SELECT {CLOCK} AS now FROM (SELECT {COUNT} AS n FROM c) AS a WHERE a.n {GE} 0::pg_catalog.int8), \
         ends AS MATERIALIZED (\
           SELECT c.key, c.grp, pg_catalog.max(t.now {PLUS} c.ttl) AS last, pg_catalog.max(c.group_end) AS before \
           FROM c, t WHERE {ok} GROUP BY c.key, c.grp), \
         longer AS (\
           UPDATE {locks} AS l SET expires_at_ms = ends.last FROM ends \
           WHERE l.key {EQ} ends.key AND l.lock_id {EQ} ends.grp AND ends.last {GT} ends.before \
           RETURNING l.expires_at_ms {GE} ends.last AS lasts), \
         u AS (\
           UPDATE {members} AS m SET expires_at_ms = {end} FROM c, t WHERE m.lock_id {EQ} c.lock_id AND {ok} \
           RETURNING c.place, m.expires_at_ms, m.xmin::pg_catalog.text AS version, t.now {PLUS} c.ttl AS asked, \
             c.expires_at_ms {GT} (m.expires_at_ms {PLUS} {TIME_TOLERANCE_MS}::pg_catalog.int8) AS shorter) \
         SELECT u.place, u.expires_at_ms, u.version, u.asked, true, NULL::pg_catalog.text, true, NULL::pg_catalog.text, \
           u.shorter, NULL::pg_catalog.text, NULL::pg_catalog.text, true, (1 OPERATOR(pg_catalog./) (CASE WHEN \
             (SELECT {COUNT} FROM longer WHERE longer.lasts) {EQ} (SELECT {COUNT} FROM ends WHERE ends.last {GT} ends.before) \
             THEN 1 ELSE 0 END)) FROM u WHERE u.expires_at_ms {GE} u.asked \
         UNION ALL \
         SELECT c.place, NULL, NULL, NULL, c.group_fence IS NOT NULL, c.group_fence, c.fence IS NOT NULL, c.fence, \
           {}, l.lock_id, l.fence, EXISTS (SELECT 1 FROM {members} AS m WHERE m.lock_id {EQ} c.lock_id), NULL \
         FROM c CROSS JOIN t LEFT JOIN {locks} AS l ON l.key {EQ} c.key WHERE ({ok}) IS NOT TRUE",
        live("c.expires_at_ms", "t.now")
    )
}

/// The statement that fails in the server unless `fence` is the key's newest, and this reader a live member of
/// the group that has it. See [`fenced`](crate::leases::sql::fenced).
pub(super) fn fenced(
    tables: &Tables,
    (key, fence_key): (&str, &str),
    fence: Fence,
    lock_id: &LockId,
) -> Result<String> {
    let (mut k, mut f) = (String::new(), String::new());
    push_quoted(key, &mut k)?;
    push_quoted(fence_key, &mut f)?;
    let (locks, fences, members) = (&tables.locks, &tables.fences, &tables.members);
    let (id, group, number) = (lock_id.as_str(), group_id(tables, key), fence.get());
    let (row, member) = (live("l.expires_at_ms", "t.now"), live("m.expires_at_ms", "t.now"));
    let stale = crate::leases::sql::STALE;
    Ok(format!(
        "WITH counter AS MATERIALIZED (\
           SELECT c.fence FROM {fences} AS c WHERE c.fence_key {EQ} {f} FOR SHARE OF c), \
         t AS MATERIALIZED (\
           SELECT {CLOCK} AS now FROM (SELECT {COUNT} AS n FROM counter) AS x WHERE x.n {EQ} 1) \
         SELECT (CASE WHEN EXISTS (SELECT 1 FROM counter WHERE fence {EQ} {number}) AND EXISTS (\
           SELECT 1 FROM {locks} AS l, t WHERE l.key {EQ} {k} AND l.lock_id {EQ} '{group}' AND l.fence {EQ} '{fence}' AND {row}) \
           AND EXISTS (\
           SELECT 1 FROM {members} AS m, t WHERE m.lock_id {EQ} '{id}' AND m.key {EQ} {k} AND m.role {EQ} 's' \
             AND m.fence {EQ} '{fence}' AND {member}) \
         THEN '1' ELSE '{stale}' END)::pg_catalog.int4"
    ))
}
