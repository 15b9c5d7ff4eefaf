//! What a look finds in the server: settings, standbys, sessions, connections.

use crate::error::Result;
use crate::leases::finding::{Finding, Severity};
use crate::leases::fragments::CLOCK;
use crate::pg::answers::{Row, flag, int, required, text};
use crate::pg::statement::Message;
use crate::pg::{Failure, Session};

/// For how long a transaction may be open before it is said, in milliseconds.
const OLD_MS: i64 = 60_000;

/// The same in transactions, where the time is not shown.
const OLD_XIDS: i64 = 10_000;

/// The first version that is tested.
const OLDEST_VERSION: i64 = 130_000;

/// The rows that one query answers, in a transaction that cannot write.
pub(super) fn rows(session: &mut Session<'_>, sql: impl Into<String>) -> Result<Vec<Row>, Failure> {
    let message = Message::new().raw("SET TRANSACTION READ ONLY").raw(session.limits_plain()).raw(sql.into());
    Ok(session.ask(&message)?.into_last_rows())
}

pub(super) fn clock_ms(session: &mut Session<'_>) -> Result<i64, Failure> {
    let rows = rows(session, format!("SELECT {CLOCK}"))?;
    Ok(required(int(required(rows.first())?, 0)?)?)
}

/// What the server says of itself.
pub(super) struct Here {
    is_standby: bool,
    fsync: String,
    full_page_writes: String,
    synchronous_commit: String,
    commit_timestamps: String,
    standby_names: String,
    autovacuum: String,
    encoding: String,
    version: i64,
    version_name: String,
    /// Whether the role sees what other roles do.
    sees_all: bool,
    role: String,
}

impl Here {
    pub(super) fn read(session: &mut Session<'_>) -> Result<Self, Failure> {
        let rows = rows(
            session,
            "SELECT pg_is_in_recovery(), current_setting('fsync'), current_setting('full_page_writes'), \
               current_setting('synchronous_commit'), current_setting('synchronous_standby_names'), \
               current_setting('autovacuum'), current_setting('server_encoding'), \
               current_setting('server_version_num')::int8, current_setting('server_version'), \
               pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'), quote_ident(current_user), \
               current_setting('track_commit_timestamp')",
        )?;
        let row = required(rows.first())?;
        let owned = |column| -> Result<String> { Ok(required(text(row, column)?)?.to_owned()) };
        Ok(Self {
            is_standby: required(flag(row, 0)?)?,
            fsync: owned(1)?,
            full_page_writes: owned(2)?,
            synchronous_commit: owned(3)?,
            standby_names: owned(4)?,
            autovacuum: owned(5)?,
            encoding: owned(6)?,
            version: required(int(row, 7)?)?,
            version_name: owned(8)?,
            sees_all: required(flag(row, 9)?)?,
            role: owned(10)?,
            commit_timestamps: owned(11)?,
        })
    }

    pub(super) fn findings(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        let mut is_off = |severity, code, setting: &str, value: &str, meaning| {
            if value == "off" {
                let mend = format!("ALTER SYSTEM SET {setting} = on; SELECT pg_reload_conf();");
                found.push(Finding::new(severity, code, format!("{setting} = off"), meaning, mend));
            }
        };
        is_off(
            Severity::Unsafe,
            "fsync",
            "fsync",
            &self.fsync,
            "a crash can lose grants and hand out a fence twice",
        );
        let torn = "a crash can leave torn pages, and with them lose grants or counters";
        is_off(Severity::Unsafe, "full-page-writes", "full_page_writes", &self.full_page_writes, torn);
        let bloat = "dead versions of rows are not removed: each look at a busy key becomes slower";
        is_off(Severity::Slow, "autovacuum", "autovacuum", &self.autovacuum, bloat);
        if self.is_standby {
            found.push(Finding::new(
                Severity::Unsafe,
                "standby",
                "the server is a standby",
                "nothing can be locked here, and what is seen may be old",
                "in the connection string: target_session_attrs=read-write",
            ));
        }
        if ["off", "local"].contains(&&*self.synchronous_commit) {
            found.push(Finding::new(
                Severity::Note,
                "synchronous-commit",
                format!("synchronous_commit = {}", self.synchronous_commit),
                "grants raise it for themselves, but a crash can lose what your own transactions wrote under a lock",
                format!("ALTER ROLE {} SET synchronous_commit = on;", self.role),
            ));
        } else if self.synchronous_commit == "remote_write" && !self.standby_names.is_empty() {
            found.push(Finding::new(
                Severity::Note,
                "synchronous-commit",
                "synchronous_commit = remote_write",
                "a crash of the primary and of the standby's host at once can lose grants",
                format!("ALTER ROLE {} SET synchronous_commit = on;", self.role),
            ));
        }
        if self.commit_timestamps == "off" {
            found.push(Finding::new(
                Severity::Note,
                "commit-timestamps",
                "track_commit_timestamp = off",
                "Operator::idle_counters cannot tell which counters are idle, now and for the time before it is on",
                "ALTER SYSTEM SET track_commit_timestamp = on; -- and restart the server",
            ));
        }
        if self.encoding != "UTF8" {
            found.push(Finding::new(
                Severity::Slow,
                "encoding",
                format!("server_encoding = {}", self.encoding),
                "not every key can be stored, and no permit or mark: calls fail with them",
                "CREATE DATABASE locks TEMPLATE template0 ENCODING 'UTF8';",
            ));
        }
        if self.version < OLDEST_VERSION {
            found.push(Finding::new(
                Severity::Note,
                "server-version",
                format!("PostgreSQL {}", self.version_name),
                "versions before 13 are not tested",
                "in a shell: pg_upgrade, to a version that is supported",
            ));
        }
        found
    }

    /// The role, quoted.
    pub(super) fn role(&self) -> &str {
        &self.role
    }

    /// What other roles do is not shown to this one.
    fn hides(&self, what: &str) -> Option<Finding> {
        (!self.sees_all).then(|| {
            Finding::new(
                Severity::Note,
                "not-looked-at",
                format!("{what} could not be looked at (the role does not see those of other roles)"),
                "what is there is not known",
                format!("GRANT pg_read_all_stats TO {};", self.role),
            )
        })
    }
}

/// Standbys that may be promoted: no subscribers, no backups, and nothing that keeps the log and replays none of it.
pub(super) fn standbys(session: &mut Session<'_>, here: &Here) -> Result<Vec<Finding>, Failure> {
    let rows = rows(
        session,
        "SELECT r.sync_state, coalesce(string_agg(quote_ident(r.application_name), ', ' ORDER BY r.application_name), ''), \
           count(*) FROM pg_stat_replication AS r WHERE r.state IS DISTINCT FROM 'backup' \
           AND NOT (r.state IS NOT DISTINCT FROM 'streaming' AND r.sync_state = 'async' AND r.replay_lsn IS NULL) \
           AND NOT EXISTS (SELECT 1 FROM pg_replication_slots AS s WHERE s.active_pid = r.pid AND s.slot_type = 'logical') \
         GROUP BY r.sync_state",
    )?;
    let mut of = Vec::new();
    for row in &rows {
        let names = required(text(row, 1)?)?.to_owned();
        of.push((text(row, 0)?.map(str::to_owned), names, required(int(row, 2)?)?));
    }
    let is = |states: [&str; 2]| {
        of.iter().find(|(state, ..)| state.as_deref().is_some_and(|state| states.contains(&state)))
    };
    let synchronous = is(["sync", "quorum"]);
    let mut found = Vec::new();
    if of.iter().any(|(state, ..)| state.is_none()) {
        found.extend(here.hides("standbys"));
    } else if !here.standby_names.is_empty() && synchronous.is_none() {
        found.push(Finding::new(
            Severity::Slow,
            "standby-missing",
            format!(
                "synchronous_standby_names = {}, and no synchronous standby is connected",
                here.standby_names
            ),
            "every grant waits for a standby that is not there, until its call's time is over",
            "ALTER SYSTEM RESET synchronous_standby_names; SELECT pg_reload_conf();",
        ));
    }
    if let Some((_, names, count)) = is(["async", "async"]) {
        let (severity, meaning) = match synchronous {
            None => (
                Severity::Unsafe,
                "a failover loses the last grants and fences: two holders, and a fence that is handed out twice",
            ),
            Some(_) => (
                Severity::Note,
                "never fail over to one of those: it may have lost the last grants and fences",
            ),
        };
        let seen = format!("{count} asynchronous: {names}");
        let list = format!("ANY 1 ({names})").replace('\'', "''");
        let mend = format!("ALTER SYSTEM SET synchronous_standby_names = '{list}'; SELECT pg_reload_conf();");
        found.push(Finding::new(severity, "asynchronous-standby", seen, meaning, mend));
    }
    Ok(found)
}

/// Transactions that keep dead versions of rows from being removed.
pub(super) fn sessions(session: &mut Session<'_>, here: &Here) -> Result<Vec<Finding>, Failure> {
    let rows = rows(
        session,
        format!(
            "SELECT a.pid::int8, (EXTRACT(EPOCH FROM clock_timestamp() - a.xact_start) * 1000)::int8, \
               age(a.backend_xmin)::int8, count(*) OVER () FROM pg_stat_activity AS a \
             WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() \
               AND a.backend_type IS DISTINCT FROM 'autovacuum worker' \
               AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL) \
               AND (a.xact_start < clock_timestamp() - {OLD_MS} * interval '1 ms' \
                 OR a.xact_start IS NULL AND age(a.backend_xmin) > {OLD_XIDS}) \
             ORDER BY a.xact_start NULLS LAST, age(a.backend_xmin) DESC LIMIT 1"
        ),
    )?;
    let mut found: Vec<Finding> = here.hides("open transactions").into_iter().collect();
    if let Some(row) = rows.first() {
        let (pid, count) = (required(int(row, 0)?)?, required(int(row, 3)?)?);
        let since = match (int(row, 1)?, int(row, 2)?) {
            (Some(ms), _) => format!("{} s", ms / 1000),
            (None, xids) => format!("{} transactions", xids.unwrap_or_default()),
        };
        found.push(Finding::new(
            Severity::Slow,
            "old-snapshot",
            format!("{count} open, the oldest for {since}, in process {pid}"),
            "while it is open dead versions of rows stay, and each look at a busy key becomes slower; a fenced one keeps its key from being granted",
            format!("SELECT pg_terminate_backend({pid});"),
        ));
    }
    Ok(found)
}

pub(super) fn prepared(session: &mut Session<'_>) -> Result<Vec<Finding>, Failure> {
    let rows = rows(
        session,
        "SELECT quote_literal(p.gid), (EXTRACT(EPOCH FROM clock_timestamp() - p.prepared))::int8, count(*) OVER () \
         FROM pg_prepared_xacts AS p WHERE p.database = current_database() ORDER BY p.prepared LIMIT 1",
    )?;
    let Some(row) = rows.first() else { return Ok(Vec::new()) };
    let (gid, age, count) = (required(text(row, 0)?)?, required(int(row, 1)?)?, required(int(row, 2)?)?);
    Ok(vec![Finding::new(
        Severity::Slow,
        "prepared-transaction",
        format!("{count} prepared, the oldest for {age} s"),
        "it keeps its locks and its snapshot, also over a restart: a fenced one keeps its key from being granted; whoever prepared it decides which of COMMIT and ROLLBACK",
        format!("ROLLBACK PREPARED {gid};"),
    )])
}

/// Defaults that surprise, the values that do not, and what the others mean.
const DEFAULTS: [(&str, &[&str], &str); 14] = [
    ("default_transaction_read_only", &["off"], "grants are made all the same, and fenced transactions fail"),
    (
        "default_transaction_isolation",
        &["read committed"],
        "fenced transactions may be rolled back (40001) that wait for each other",
    ),
    ("default_transaction_deferrable", &["off"], "read-only transactions of yours may wait"),
    (
        "statement_timeout",
        &["0"],
        "it ends statements of your fenced transactions; calls of the library state their own",
    ),
    (
        "lock_timeout",
        &["0"],
        "it ends waits of your fenced transactions; calls of the library state their own",
    ),
    ("transaction_timeout", &["0"], "it ends your fenced transactions, and calls that wait for longer"),
    ("idle_in_transaction_session_timeout", &["0"], "it ends fenced transactions that pause"),
    (
        "idle_session_timeout",
        &["0"],
        "it closes idle connections of pools: calls open new ones, and are slower for it",
    ),
    ("session_replication_role", &["origin"], "triggers and foreign keys of your own tables do not fire"),
    ("row_security", &["on"], "calls of the library state their own"),
    ("enable_indexscan", &["on"], "each call may read the whole table"),
    ("enable_indexonlyscan", &["on"], "counts and looks may read more"),
    (
        "client_encoding",
        &["UTF8", "utf8"],
        "calls of the library state their own; your own texts are converted",
    ),
    (
        "search_path",
        &[],
        "it decides which lock tables a client without schema finds: name the schema in the builder",
    ),
];

/// What is set for the role or the database, and not where one looks for it.
pub(super) fn session_defaults(session: &mut Session<'_>) -> Result<Vec<Finding>, Failure> {
    let rows = rows(
        session,
        "SELECT split_part(s.setting, '=', 1), substr(s.setting, strpos(s.setting, '=') + 1), \
           CASE WHEN d.setrole = 0 AND d.setdatabase = 0 THEN 'ROLE ALL' \
             WHEN d.setrole = 0 THEN format('DATABASE %I', current_database()) \
             WHEN d.setdatabase = 0 THEN format('ROLE %I', session_user) \
             ELSE format('ROLE %I IN DATABASE %I', session_user, current_database()) END \
         FROM pg_db_role_setting AS d CROSS JOIN LATERAL unnest(d.setconfig) AS s (setting) \
         WHERE d.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database())) \
           AND d.setrole IN (0, (SELECT oid FROM pg_roles WHERE rolname = session_user)) ORDER BY 1, 3",
    )?;
    let mut found = Vec::new();
    for row in &rows {
        let [name, value, of] = [0, 1, 2].map(|column| text(row, column).and_then(required));
        let (name, value, of) = (name?, value?, of?);
        let known = DEFAULTS.iter().find(|(setting, ..)| setting.eq_ignore_ascii_case(name));
        let Some((setting, harmless, meaning)) = known else { continue };
        if harmless.contains(&value) {
            continue;
        }
        let seen = format!("{setting} = {value}, by ALTER {of}");
        let severity = if setting.starts_with("enable_") || *setting == "idle_session_timeout" {
            Severity::Slow
        } else {
            Severity::Note
        };
        found.push(Finding::new(
            severity,
            "session-default",
            seen,
            *meaning,
            format!("ALTER {of} RESET {setting};"),
        ));
    }
    Ok(found)
}

/// `wanted`: the most connections that this client may have.
pub(super) fn connections(session: &mut Session<'_>, wanted: u32) -> Result<Vec<Finding>, Failure> {
    let rows = rows(
        session,
        "SELECT current_setting('max_connections')::int8 - current_setting('superuser_reserved_connections')::int8 \
             - coalesce(current_setting('reserved_connections', true), '0')::int8, \
           (SELECT count(*) FROM pg_stat_activity WHERE datid IS NOT NULL AND pid <> pg_backend_pid()), \
           (SELECT r.rolconnlimit::int8 FROM pg_roles AS r WHERE r.rolname = session_user), \
           (SELECT d.datconnlimit::int8 FROM pg_database AS d WHERE d.datname = current_database()), \
           current_setting('max_connections')::int8, quote_ident(session_user), quote_ident(current_database())",
    )?;
    let row = required(rows.first())?;
    let number = |column| -> Result<i64> { required(int(row, column)?) };
    let name = |column| -> Result<&str> { required(text(row, column)?) };
    let (server, used, wanted) = (number(0)?, number(1)?, i64::from(wanted));
    let of_role = format!("ALTER ROLE {} CONNECTION LIMIT -1;", name(5)?);
    let of_database = format!("ALTER DATABASE {} CONNECTION LIMIT -1;", name(6)?);
    let raised = number(4)?.saturating_mul(2).max(wanted.saturating_mul(2));
    let of_server = format!("ALTER SYSTEM SET max_connections = {raised}; -- and restart the server");
    let limits = [
        ("the server lets", server, of_server.clone()),
        ("the role may have", number(2)?, of_role),
        ("the database lets", number(3)?, of_database),
    ];
    let mut found = Vec::new();
    for (who, limit, mend) in limits {
        // Below zero there is none.
        if (0..wanted).contains(&limit) {
            let seen = format!("this client may open {wanted} connections, {who} {limit}");
            let meaning = "calls fail with RateLimited when all are in use; a smaller max_connections of the builder will do as well";
            found.push(Finding::new(Severity::Slow, "connections", seen, meaning, mend));
        }
    }
    if found.is_empty() && used.saturating_mul(10) >= server.saturating_mul(9) {
        found.push(Finding::new(
            Severity::Slow,
            "connections",
            format!("{used} of {server} connections are in use"),
            "when all are, calls fail with RateLimited, renewals with them",
            of_server,
        ));
    }
    Ok(found)
}
