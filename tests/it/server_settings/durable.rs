//! What a commit promises, seen by a trigger that runs at its very end.

use super::*;

/// Notes, at the commit of every change to the tables, under what settings it is made.
fn probe(place: &Place) {
    let schema = place.schema.name();
    place.stored.run(&format!(
        "CREATE TABLE probe (what text, durable text, isolation text, read_only text, waits bool, pauses bool); \
         GRANT INSERT ON probe TO PUBLIC; \
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           INSERT INTO {schema}.probe VALUES (TG_TABLE_NAME || ' ' || TG_OP, current_setting('synchronous_commit'), \
             current_setting('transaction_isolation'), current_setting('transaction_read_only'), \
             current_setting('lock_timeout') <> '0' AND current_setting('statement_timeout') <> '0', \
             current_setting('idle_in_transaction_session_timeout') <> '0'); \
           RETURN NULL; END $$; \
         CREATE CONSTRAINT TRIGGER noted AFTER INSERT OR UPDATE OR DELETE ON syncguard_locks \
           DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note(); \
         CREATE CONSTRAINT TRIGGER noted AFTER INSERT OR UPDATE OR DELETE ON syncguard_fence_counters \
           DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note()"
    ));
}

/// The commits since the last call, as `what durable`.
fn commits(place: &Place) -> Vec<String> {
    let rows =
        place.stored.client().query("DELETE FROM probe RETURNING what, durable, isolation, read_only", &[]);
    rows.unwrap()
        .iter()
        .map(|row| {
            let column = |n: usize| row.get::<_, String>(n);
            assert_eq!((column(2).as_str(), column(3).as_str()), ("read committed", "off"));
            format!("{} {}", column(0), column(1))
        })
        .collect()
}

#[test]
fn a_grant_and_an_extension_are_durable_and_a_release_need_not_be() {
    let place = place();
    probe(&place);
    let role = Role::with_tables(&place.schema);
    role.set(&place.schema, "default_transaction_isolation", "serializable");
    role.set(&place.schema, "default_transaction_read_only", "on");
    // What the role has, and what a grant must have: never less than a flush here.
    let levels = [
        ("off", "on"),
        ("local", "on"),
        ("on", "on"),
        ("remote_write", "remote_write"),
        ("remote_apply", "remote_apply"),
    ];
    for (level, durable) in levels {
        role.set(&place.schema, "synchronous_commit", level);
        for (pool, two) in [(false, false), (false, true), (true, false), (true, true)] {
            let client = client(PgLockClient::builder(), role.config(), pool).unwrap();
            let key = place.key(&format!("{level} {two} {pool}"));
            let grant = LockBackend::acquire(&client, &key, TTL, &token(two)).unwrap().acquired().unwrap();
            let seen = commits(&place);
            assert_eq!(
                seen,
                [
                    format!("syncguard_fence_counters INSERT {durable}"),
                    format!("syncguard_locks INSERT {durable}")
                ],
                "acquire, {level}, {two}"
            );
            let extended = LockBackend::extend(&client, &grant.lock_id, TTL, &token(two)).unwrap();
            assert!(matches!(extended, ExtendOutcome::Extended { .. }));
            assert_eq!(
                commits(&place),
                [format!("syncguard_locks UPDATE {durable}")],
                "extend, {level}, {two}"
            );
            let deadline = syncguard::backend::Clock::system().now().after(LIMIT);
            let renewal = syncguard::backend::Renewal::new(
                &key,
                &grant.lock_id,
                syncguard::Fence::new(1).unwrap(),
                TTL,
            );
            client.renew(&[renewal], deadline).remove(0).unwrap();
            assert_eq!(
                commits(&place),
                [format!("syncguard_locks UPDATE {durable}")],
                "renew, {level}, {two}"
            );
            LockBackend::release(&client, &grant.lock_id, &token(two)).unwrap();
            assert_eq!(commits(&place), ["syncguard_locks DELETE off"], "release, {level}, {two}");
        }
    }
}

/// Of each kind and in each form: whatever somebody is told that it has.
#[test]
fn every_kind_of_grant_is_durable() {
    let place = place();
    probe(&place);
    let role = Role::with_tables(&place.schema);
    let owner = PgLockClient::builder().create_members_table(true).connect(&place.schema.url()).unwrap();
    owner.read_lock("makes the table").unwrap().release().unwrap();
    place
        .stored
        .run(&format!("GRANT SELECT, INSERT, UPDATE, DELETE ON syncguard_members TO {}", role.name()));
    for (level, durable) in [("off", "on"), ("remote_write", "remote_write")] {
        role.set(&place.schema, "synchronous_commit", level);
        let client = role.connect(PgLockClient::builder()).unwrap();
        grants(&place, &client, durable);
    }
}

fn grants(place: &Place, client: &PgLockClient, level: &str) {
    let token = CancelToken::new();
    let long = LockOptions::new().ttl(LIMIT).heartbeat(syncguard::Heartbeat::Off);
    let forms = [long.clone(), long.clone().cancel(&token), long.clone().note("x")];
    let forms = forms.iter().chain([&long]).enumerate();
    let durable = |what: &str| {
        let mut seen = commits(place);
        seen.retain(|commit| !commit.contains("DELETE"));
        assert!(
            !seen.is_empty() && seen.iter().all(|commit| commit.ends_with(&format!(" {level}"))),
            "{what}: {seen:?}"
        );
    };
    commits(place);
    place.stored.run("DELETE FROM syncguard_locks");
    for (form, options) in forms {
        let name = |word: &str| place.key(&format!("{word} {level} {form}"));
        // In the last form over rows that are over.
        let over = |key: &str| {
            if form == 3 {
                place.stored.write(key, &crate::support::id(&key[..10]), -5_000, 3);
                commits(place);
            }
        };
        let keys = ["single-one", "in-turn--one", "readers--one", "several--a", "several--b"].map(name);
        keys.iter().for_each(|key| over(key));
        let _ = client.lock_with(&keys[0], options).unwrap().leak();
        durable("a lock");
        let _ = client.lock_with(&keys[1], &options.clone().fair(true)).unwrap().leak();
        durable("in turn");
        for what in ["the first reader", "the second reader"] {
            let _ = client.read_lock_with(&keys[2], options).unwrap().leak();
            durable(what);
        }
        let _set = client.lock_all_with(&[&keys[3], &keys[4]], options).unwrap();
        durable("a set");
        let semaphore = client.semaphore(&name("permits"), 2).unwrap();
        let _ = semaphore.acquire_with(options).unwrap().leak();
        durable("a permit");
        let ran = client.run_once(&name("run"), syncguard::Slot::number(1), options, |_run| {
            durable("a run's beginning");
            Ok::<_, std::convert::Infallible>(())
        });
        assert_eq!(ran.unwrap(), syncguard::RunOnce::Done(()));
        durable("a run's end");
        let slot = syncguard::Slot::number(2).claim_at_start();
        let ran = client.run_once(&name("run"), slot, options, |_run| {
            durable("a claim");
            Ok::<_, std::convert::Infallible>(())
        });
        assert_eq!(ran.unwrap(), syncguard::RunOnce::Done(()));
    }
}

#[test]
fn an_attempt_that_is_asked_for_again_commits_as_durably() {
    let place = place();
    probe(&place);
    let role = Role::with_tables(&place.schema);
    for (level, durable) in [("off", "on"), ("remote_apply", "remote_apply")] {
        role.set(&place.schema, "synchronous_commit", level);
        asked_again(&place, &role.connect(PgLockClient::builder()).unwrap(), level, durable);
    }
}

fn asked_again(place: &Place, client: &PgLockClient, level: &str, durable: &str) {
    let name = |word: &str| format!("{word} {level}");
    let id = |word: &str| crate::support::id(&format!("{word}{}", level.replace('_', "-")));
    // It writes: a transaction that only reads would not wait for a standby.
    let again = [format!("syncguard_locks UPDATE {durable}")];
    let (key, mine) = (place.key(&name("a")), id("a"));
    let deadline = syncguard::backend::Clock::system().now().after(LIMIT);
    let attempt = syncguard::backend::Attempt::new(&key, &mine, TTL, deadline);
    let first = client.attempt(&attempt, &token(false)).unwrap();
    commits(place);
    for two in FORMS {
        assert_eq!(client.attempt(&attempt, &token(two)).unwrap(), first);
        assert_eq!(commits(place), again);
    }
    let (key, mine) = (place.key(&name("b")), id("b"));
    let attempt = syncguard::backend::Attempt::new(&key, &mine, TTL, deadline);
    let begin = syncguard::backend::BeginRun::new(attempt, syncguard::Slot::number(1));
    client.begin_run(&begin, &token(false)).unwrap();
    commits(place);
    for two in FORMS {
        client.begin_run(&begin, &token(two)).unwrap();
        assert_eq!(commits(place), again);
    }
}

#[test]
fn every_wait_in_the_server_is_bounded_there_and_a_pause_between_two_messages_too() {
    let place = place();
    probe(&place);
    for (pool, two) in [(false, false), (false, true), (true, false), (true, true)] {
        let client = client(PgLockClient::builder(), place.schema.config(), pool).unwrap();
        let key = place.key(&format!("{two} {pool}"));
        let grant = LockBackend::acquire(&client, &key, TTL, &token(two)).unwrap().acquired().unwrap();
        LockBackend::extend(&client, &grant.lock_id, TTL, &token(two)).unwrap();
        LockBackend::release(&client, &grant.lock_id, &token(two)).unwrap();
        let row = place.stored.one("SELECT count(*), bool_and(waits), bool_and(pauses) FROM probe", &[]);
        assert_eq!((row.get::<_, i64>(0), row.get::<_, bool>(1)), (4, true));
        assert!(!two || row.get::<_, bool>(2), "a caller's pool: {pool}");
        place.stored.run("DELETE FROM probe");
    }
}
