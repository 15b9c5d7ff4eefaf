//! The rights of `docs/security.md`, as they stand there: each role can do its work with them, and
//! without any single one of them something fails with the documented error.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod runs;

use std::time::Duration;

use crate::support::{Config, LIMIT, Place, Role, Server, TTL, id, place, server};
use postgres::NoTls;

use syncguard::backend::{Attempt, Clock, Renewal};
use syncguard::{
    CancelToken, ErrorCode, Fence, Heartbeat, LockBackend, LockError, LockOptions, Lookup, PgLockClient,
    SlotKind,
};

const PAGE: &str = include_str!("../../docs/security.md");

/// One right: `GRANT what ON object`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Right {
    what: String,
    object: String,
}

/// What the page grants to a role, taken apart into single rights, in this schema.
fn rights(role: &str, schema: &str) -> Vec<Right> {
    let (_, block) = PAGE.split_once("```sql\nCREATE SCHEMA locks;").expect("the page has its statements");
    let (block, _) = block.split_once("```").unwrap();
    let code: String = block.lines().filter_map(|line| line.split("--").next()).collect::<Vec<_>>().join(" ");
    let mut found = Vec::new();
    for statement in code.split(';') {
        let words = statement.split_whitespace().collect::<Vec<_>>().join(" ");
        let Some(grant) = words.strip_prefix("GRANT ") else { continue };
        let (what, rest) = grant.split_once(" ON ").unwrap();
        let (object, to) = rest.split_once(" TO ").unwrap();
        if to != format!("lock_{role}") {
            continue;
        }
        let object = object
            .replace("SCHEMA locks", &format!("SCHEMA {schema}"))
            .replace("locks.", &format!("{schema}."));
        // `SELECT (a, b), DELETE`: a comma in parentheses parts columns, one outside parts rights.
        let mut columns_of: Option<String> = None;
        for piece in what.split(',') {
            let mut piece = piece.trim().to_owned();
            if let Some((right, first)) = piece.clone().split_once(" (") {
                columns_of = Some(right.to_owned());
                first.clone_into(&mut piece);
            }
            let ends = piece.ends_with(')');
            let name = piece.trim_end_matches(')');
            let what =
                columns_of.as_ref().map_or_else(|| name.to_owned(), |right| format!("{right} ({name})"));
            found.push(Right { what, object: object.clone() });
            if ends {
                columns_of = None;
            }
        }
    }
    assert!(!found.is_empty(), "the page grants nothing to {role}");
    found
}

type Outcome = Result<(), LockError>;
/// A part of a role's work: its name, and what it does, beginning with empty tables.
type Part<'a> = (&'static str, Box<dyn Fn(&PgLockClient) -> Outcome + 'a>);

struct Stage {
    role: Role,
    rights: Vec<Right>,
    place: Place,
}

impl Stage {
    fn new(name: &str) -> Self {
        Self::at(name, place())
    }

    fn at(name: &str, place: Place) -> Self {
        let role = Role::without_rights(&place.schema);
        let rights = rights(name, place.schema.name());
        let stage = Self { role, rights, place };
        for right in &stage.rights {
            stage.grant(right);
        }
        stage
    }

    fn grant(&self, right: &Right) {
        self.place.stored.run(&format!("GRANT {} ON {} TO {}", right.what, right.object, self.role.name()));
    }

    fn revoke(&self, right: &Right) {
        self.place.stored.run(&format!(
            "REVOKE {} ON {} FROM {}",
            right.what,
            right.object,
            self.role.name()
        ));
    }

    fn client(&self) -> PgLockClient {
        let builder = PgLockClient::builder().auto_create_tables(false).schema(self.place.schema.name());
        self.role.connect(builder).unwrap()
    }

    fn empty(&self) {
        self.place.stored.run("DELETE FROM syncguard_locks; DELETE FROM syncguard_fence_counters");
    }

    /// The whole work succeeds with all rights; without any one of them some of it fails, with
    /// `AuthFailed` and no other code, and nothing else is harmed.
    fn check(&self, parts: &[Part<'_>]) {
        for (name, part) in parts {
            self.empty();
            part(&self.client()).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        }
        for right in &self.rights {
            self.revoke(right);
            let client = self.client();
            let mut failed = Vec::new();
            for (name, part) in parts {
                self.empty();
                if let Err(error) = part(&client) {
                    assert_eq!(error.code(), ErrorCode::AuthFailed, "{name} without {right:?}: {error:?}");
                    assert_eq!(error.sqlstate(), Some("42501"), "{name} without {right:?}: {error:?}");
                    failed.push(*name);
                }
            }
            assert!(!failed.is_empty(), "nobody needs {right:?}");
            self.grant(right);
        }
    }

    /// What the role may not do, in SQL of its own.
    fn refused(&self, statements: &[&str]) {
        self.empty();
        self.place.stored.write("a", &id("a"), 30_000, 7);
        let mut client = self.role.config().connect(NoTls).unwrap();
        for sql in statements {
            let error = client.batch_execute(sql).expect_err(sql);
            assert_eq!(error.code().map(postgres::error::SqlState::code), Some("42501"), "{sql}: {error:?}");
        }
    }
}

/// Nobody but the tables' owner may take counters away, or change them otherwise than by one.
const NEVER: [&str; 3] = [
    "DELETE FROM syncguard_fence_counters",
    "TRUNCATE syncguard_fence_counters",
    "DROP TABLE syncguard_fence_counters",
];

fn tokens() -> [CancelToken; 2] {
    [CancelToken::never(), CancelToken::new()]
}

/// Each operation, in both forms, and each way an acquire can go.
#[expect(clippy::too_many_lines, reason = "a list")]
fn holders_parts(stage: &Stage) -> Vec<Part<'_>> {
    let stored = &stage.place.stored;
    let mut parts: Vec<Part<'_>> = Vec::new();
    for (n, token) in tokens().into_iter().enumerate() {
        let pick = move |names: [&'static str; 2]| names[n];
        let one = token.clone();
        parts.push((
            pick(["acquire", "acquire in two messages"]),
            Box::new(move |client| {
                LockBackend::acquire(client, "k", TTL, &one)
                    .map(|answer| assert!(answer.acquired().is_some()))
            }),
        ));
        let one = token.clone();
        parts.push((
            pick(["take over", "take over in two messages"]),
            Box::new(move |client| {
                stored.write("k", &id("old"), -5_000, 7);
                LockBackend::acquire(client, "k", TTL, &one)
                    .map(|answer| assert!(answer.acquired().unwrap().fence.get() > 7))
            }),
        ));
        let one = token.clone();
        parts.push((
            pick(["be refused", "be refused in two messages"]),
            Box::new(move |client| {
                stored.write("k", &id("other"), 30_000, 7);
                LockBackend::acquire(client, "k", TTL, &one)
                    .map(|answer| assert!(answer.acquired().is_none()))
            }),
        ));
        let one = token.clone();
        parts.push((
            pick(["ask again", "ask again in two messages"]),
            Box::new(move |client| {
                stored.write("k", &id("mine"), 30_000, 7);
                let deadline = Clock::system().now().after(LIMIT);
                let mine = id("mine");
                let attempt = Attempt::new("k", &mine, TTL, deadline);
                client.attempt(&attempt, &one).map(|answer| assert!(answer.acquired().is_some()))
            }),
        ));
        let one = token.clone();
        parts.push((
            pick(["extend", "extend in two messages"]),
            Box::new(move |client| {
                stored.write("k", &id("mine"), 30_000, 7);
                LockBackend::extend(client, &id("mine"), TTL, &one).map(drop)
            }),
        ));
        parts.push((
            pick(["release", "release in two messages"]),
            Box::new(move |client| {
                stored.write("k", &id("mine"), 30_000, 7);
                LockBackend::release(client, &id("mine"), &token).map(drop)
            }),
        ));
    }
    parts.push(("is_locked", Box::new(|client| client.is_locked("k").map(drop))));
    for what in ["lookup by key", "lookup by lock id"] {
        parts.push((
            what,
            Box::new(move |client| {
                stored.write("k", &id("mine"), 30_000, 7);
                let lock_id = id("mine");
                let lookup = if what.ends_with("key") { Lookup::Key("k") } else { Lookup::LockId(&lock_id) };
                client.lookup(lookup).map(|found| assert!(found.is_some()))
            }),
        ));
    }
    parts.push((
        "renew",
        Box::new(move |client| {
            stored.write("k", &id("mine"), 30_000, 7);
            let mine = id("mine");
            let renewal = Renewal::new("k", &mine, syncguard::Fence::new(1).unwrap(), TTL);
            client.renew(&[renewal], Clock::system().now().after(LIMIT)).remove(0).map(drop)
        }),
    ));
    parts.push((
        "hold",
        Box::new(|client| {
            let options = LockOptions::new().heartbeat(Heartbeat::Every(Duration::from_millis(20)));
            let guard = client.lock_with("k", &options)?;
            let first = guard.expires_at_ms();
            crate::support::wait_until(LIMIT, "it is renewed", || guard.expires_at_ms() > first);
            guard.release().map(drop)
        }),
    ));
    parts.push(("holders", Box::new(|client| client.operator().holders(10).map(drop))));
    parts.push(("counts", Box::new(|client| client.operator().counts().map(drop))));
    parts.push(("waiters", Box::new(|client| client.operator().blocked("k").map(drop))));
    parts.push((
        "break",
        Box::new(move |client| {
            stored.write("k", &id("mine"), 30_000, 7);
            client.operator().break_lock("k", "a test")?;
            stored.write("k", &id("mine"), 30_000, 7);
            client.operator().break_lease(&id("mine"), "a test").map(drop)
        }),
    ));
    parts.push((
        "marks",
        Box::new(|client| {
            client.operator().marks(10)?;
            client.operator().reset_mark("k", SlotKind::Number, "a test").map(drop)
        }),
    ));
    parts.push((
        "clean up",
        Box::new(move |client| {
            stored.write("k", &id("old"), -60_000, 7);
            client.operator().cleanup_expired(10).map(|deleted| assert_eq!(deleted, 1))
        }),
    ));
    parts.extend(runs::parts(stage));
    parts
}

#[test]
fn a_holder_needs_exactly_its_rights() {
    let stage = Stage::new("holder");
    // Renewals of a guard that may not renew fail later, elsewhere: only with all rights.
    let parts = holders_parts(&stage);
    let (hold, single): (Vec<_>, Vec<_>) = parts.into_iter().partition(|(name, _)| *name == "hold");
    for (name, part) in &hold {
        part(&stage.client()).unwrap_or_else(|error| panic!("{name}: {error:?}"));
    }
    stage.check(&single);
    stage.refused(&NEVER);
    stage.refused(&[
        "CREATE TABLE more ()",
        "ALTER TABLE syncguard_locks ADD more int",
        "UPDATE syncguard_locks SET key = 'b'",
    ]);
    stage.refused(&[
        "UPDATE syncguard_fence_counters SET key_debug = 'x'",
        "SELECT key_debug FROM syncguard_fence_counters",
    ]);
}

#[test]
fn a_holder_that_notes_no_keys_needs_one_right_less() {
    let stage = Stage::new("holder");
    let without = stage.rights.iter().find(|right| right.what == "INSERT (key_debug)").unwrap();
    stage.revoke(without);
    let builder = PgLockClient::builder().auto_create_tables(false).schema(stage.place.schema.name());
    let client = stage.role.connect(builder.store_key_debug(false)).unwrap();
    for (name, part) in holders_parts(&stage) {
        stage.empty();
        part(&client).unwrap_or_else(|error| panic!("{name}: {error:?}"));
    }
}

#[test]
fn a_fenced_writer_needs_exactly_its_rights_and_cannot_raise_a_fence() {
    let stage = Stage::new("fenced");
    let stored = &stage.place.stored;
    let parts: Vec<Part<'_>> = vec![
        (
            "assert_fence",
            Box::new(|client| {
                stored.write("k", &id("holder"), 30_000, 7);
                let mut writer = stage.role.config().connect(NoTls).unwrap();
                let mut tx = writer.transaction().unwrap();
                client.assert_fence(&mut tx, "k", Fence::new(7).unwrap())
            }),
        ),
        (
            "fence_transaction",
            Box::new(|_client| {
                let guard = stage.place.client.lock("guarded").unwrap();
                let mut writer = stage.role.config().connect(NoTls).unwrap();
                let mut tx = writer.transaction().unwrap();
                guard.fence_transaction(&mut tx)
            }),
        ),
    ];
    stage.check(&parts);
    stage.refused(&NEVER);
    stage.refused(&[
        "UPDATE syncguard_fence_counters SET fence = fence + 1",
        "INSERT INTO syncguard_fence_counters (fence_key, fence) VALUES ('fence:x', 1)",
        "DELETE FROM syncguard_locks",
    ]);
}

/// The ways in which SQL shows a column that it was not asked for by name.
const LOCK_IDS: [&str; 8] = [
    "SELECT lock_id FROM syncguard_locks",
    "SELECT * FROM syncguard_locks",
    "SELECT l FROM syncguard_locks l",
    "SELECT to_jsonb(l) FROM syncguard_locks l",
    "SELECT count(*) FROM syncguard_locks WHERE lock_id > 'a'",
    "SELECT key FROM syncguard_locks ORDER BY lock_id",
    "COPY syncguard_locks TO STDOUT",
    "SELECT key FROM syncguard_locks FOR UPDATE",
];

#[test]
fn a_monitor_needs_exactly_its_rights_and_sees_no_lock_id() {
    let stage = Stage::new("monitor");
    let mut parts: Vec<Part<'_>> = vec![
        ("is_locked", Box::new(|client| client.is_locked("k").map(drop))),
        ("counts", Box::new(|client| client.operator().counts().map(drop))),
        ("waiters", Box::new(|client| client.operator().blocked("k").map(drop))),
    ];
    // SQL for graphs.
    parts.push((
        "SQL",
        Box::new(|_| {
            let sql = "SELECT key, expires_at_ms - acquired_at_ms, fence FROM syncguard_locks";
            let denied = stage.role.config().connect(NoTls).unwrap().query(sql, &[]).err();
            denied.map_or(Ok(()), |_| Err(permission_denied(&stage)))
        }),
    ));
    stage.check(&parts);
    stage.refused(&NEVER);
    stage.refused(&LOCK_IDS);
    for lookup in [Lookup::Key("a"), Lookup::LockId(&id("a"))] {
        assert_eq!(stage.client().lookup(lookup).unwrap_err().code(), ErrorCode::AuthFailed);
    }
    assert_eq!(stage.client().operator().holders(1).unwrap_err().code(), ErrorCode::AuthFailed);
    assert_eq!(stage.client().acquire("a", TTL).unwrap_err().code(), ErrorCode::AuthFailed);
    assert_eq!(stage.client().release(&id("a")).unwrap_err().code(), ErrorCode::AuthFailed);
}

/// An error of this library that means the same as what plain SQL was answered.
fn permission_denied(stage: &Stage) -> LockError {
    stage.client().lookup(Lookup::Key("k")).unwrap_err()
}

#[test]
fn a_graph_needs_exactly_its_rights_and_sees_neither_keys_nor_lock_ids() {
    let stage = Stage::new("graph");
    stage.check(&[("counts", Box::new(|client| client.operator().counts().map(drop)))]);
    stage.refused(&NEVER);
    stage.refused(&LOCK_IDS);
    stage.refused(&[
        "SELECT key FROM syncguard_locks",
        "SELECT user_key FROM syncguard_locks",
        "SELECT fence_key FROM syncguard_fence_counters",
    ]);
}

#[test]
fn a_cleaner_needs_exactly_its_rights_and_takes_no_counter_away() {
    let stage = Stage::new("cleaner");
    let stored = &stage.place.stored;
    stage.check(&[(
        "cleanup_expired",
        Box::new(|client| {
            stored.write("old", &id("old"), -60_000, 7);
            stored.write("live", &id("live"), 60_000, 7);
            client.operator().cleanup_expired(10).map(|deleted| assert_eq!(deleted, 1))
        }),
    )]);
    stage.refused(&NEVER);
    stage.refused(&[
        "SELECT fence FROM syncguard_fence_counters",
        "UPDATE syncguard_locks SET lock_id = 'x'",
        "SELECT user_key FROM syncguard_locks",
    ]);
}

#[test]
fn an_auditor_needs_exactly_its_rights_and_takes_no_counter_away() {
    let server = Server::start(&Config::new().set("track_commit_timestamp", "on"));
    let stage = Stage::at("auditor", Place::new(server.schema()));
    let stored = &stage.place.stored;
    stage.check(&[(
        "idle_counters",
        Box::new(|client| {
            stored.set_counter("k", 7);
            client.operator().idle_counters(Duration::ZERO, 10).map(|idle| assert_eq!(idle.len(), 1))
        }),
    )]);
    stage.refused(&NEVER);
    stage.refused(&LOCK_IDS);
}

#[test]
fn a_migrator_needs_exactly_its_rights_and_set_up_on_complete_tables_needs_no_more_than_a_look() {
    let schema = crate::support::schema();
    let role = Role::without_rights(&schema);
    let connect =
        || role.connect(PgLockClient::builder().auto_create_tables(false).schema(schema.name())).unwrap();
    let mut admin = schema.client();
    let rights = rights("migrator", schema.name());
    let mut run = |verb: &str, right: &Right, to: &str| {
        admin
            .batch_execute(&format!("{verb} {} ON {} {to} {}", right.what, right.object, role.name()))
            .unwrap();
    };
    rights.iter().for_each(|right| run("GRANT", right, "TO"));
    for right in &rights {
        run("REVOKE", right, "FROM");
        let error = connect().setup_schema().unwrap_err();
        assert_eq!(error.code(), ErrorCode::AuthFailed, "without {right:?}: {error:?}");
        run("GRANT", right, "TO");
    }
    connect().setup_schema().unwrap();
    let other = Role::without_rights(&schema);
    run(
        "GRANT",
        &Right { what: "USAGE".into(), object: format!("SCHEMA {}", schema.name()) },
        &format!("TO {},", other.name()),
    );
    let client = other.connect(PgLockClient::builder().schema(schema.name())).unwrap();
    client.setup_schema().unwrap();
    assert_eq!(client.acquire("k", TTL).unwrap_err().code(), ErrorCode::AuthFailed);
}

#[test]
fn session_locks_need_no_right_but_to_connect_and_ending_others_needs_one() {
    let place = place();
    let role = Role::without_rights(&place.schema);
    let client = role.connect(PgLockClient::builder().auto_create_tables(false)).unwrap();
    let key = crate::support::session_locks::key();
    let guard = client.advisory_lock(&key).unwrap();
    assert!(client.try_advisory_lock(&key).unwrap().is_none());
    assert!(client.advisory_holders().unwrap().iter().any(|holder| holder.pid == guard.pid()));
    drop(guard);
    // Its own sessions anybody may end; those of another role only with the right to.
    let guard = client.advisory_lock(&key).unwrap();
    assert!(client.terminate_advisory_session(guard.pid()).unwrap());
    assert!(guard.lost().wait_timeout(LIMIT));
    let other = Role::without_rights(&place.schema);
    let others = other.connect(PgLockClient::builder().auto_create_tables(false)).unwrap();
    let guard = others.advisory_lock(&key).unwrap();
    let error = client.terminate_advisory_session(guard.pid()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::AuthFailed);
    let shown =
        client.advisory_holders().unwrap().into_iter().find(|holder| holder.pid == guard.pid()).unwrap();
    assert_eq!((shown.key, shown.state), (key, None), "that it holds the key, but not what it does");
    server().client().batch_execute(&format!("GRANT pg_signal_backend TO {}", role.name())).unwrap();
    assert!(client.terminate_advisory_session(guard.pid()).unwrap());
    assert!(guard.lost().wait_timeout(LIMIT));
}
