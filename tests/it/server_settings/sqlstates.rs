//! What the server refuses, really raised by it, and what becomes of it.

use super::*;
use crate::support::{Config, Server, Stop};
use std::error::Error as _;
use syncguard::ErrorCode::{
    self, AuthFailed, Internal, InvalidArgument, NetworkTimeout, RateLimited, ServiceUnavailable,
};

#[test]
fn an_error_of_any_class_has_its_code_changes_nothing_and_leaves_the_connection_usable() {
    let place = place();
    place.stored.run(
        "CREATE TABLE raise (state text); INSERT INTO raise VALUES (''); \
         CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE s text; BEGIN \
           EXECUTE format('SELECT state FROM %I.raise', TG_TABLE_SCHEMA) INTO s; \
           IF s <> '' THEN RAISE EXCEPTION 'the key is %', NEW.key USING ERRCODE = s; END IF; RETURN NEW; END $$; \
         CREATE TRIGGER fail BEFORE INSERT OR UPDATE ON syncguard_locks FOR EACH ROW EXECUTE FUNCTION fail()",
    );
    let name = unique();
    let client = place.build(&name, PgLockClient::builder().max_connections(1));
    let (held_key, key) = (place.key("held"), place.key("secret"));
    let held = client.acquire(&held_key, TTL).unwrap().acquired().unwrap();
    let backends = "SELECT string_agg(pid::text, ',') FROM pg_stat_activity WHERE application_name = $1";
    let mut before: String = place.stored.one(backends, &[&name]).get(0);
    let table: &[(&[&str], ErrorCode)] = &[
        (
            &["08006", "25006", "25P03", "53000", "53100", "53200", "57P01", "57P03", "58030"],
            ServiceUnavailable,
        ),
        (&["40001", "40P01"], ServiceUnavailable),
        (&["53300"], RateLimited),
        (&["28000", "42501"], AuthFailed),
        (
            &[
                "22001", "22003", "22008", "22021", "22P05", "23502", "23505", "23514", "42703", "42883",
                "54000",
            ],
            InvalidArgument,
        ),
        (&["3D000", "3F000", "42P01"], InvalidArgument),
        (&["55P03", "57014"], NetworkTimeout),
        (&["XX000", "XX001", "42601", "P0001", "0A000"], Internal),
    ];
    for (states, code) in table {
        for state in *states {
            place.stored.client().execute("UPDATE raise SET state = $1", &[state]).unwrap();
            for two in FORMS {
                let errors = [
                    LockBackend::acquire(&client, &key, TTL, &token(two)).unwrap_err(),
                    LockBackend::extend(&client, &held.lock_id, TTL * 2, &token(two)).unwrap_err(),
                ];
                for error in errors {
                    assert_eq!(
                        (error.code(), error.is_outcome_unknown()),
                        (*code, false),
                        "{state}: {error:?}"
                    );
                    assert_eq!(
                        error.is_contention(),
                        matches!(*state, "40001" | "40P01" | "55P03"),
                        "{state}"
                    );
                    let mut shown = format!("{error} {error:?}");
                    let mut cause = error.source();
                    while let Some(inner) = cause {
                        shown += &inner.to_string();
                        cause = inner.source();
                    }
                    assert!(shown.contains(state), "{shown}");
                    // The texts of these never quote a value, unless a trigger makes them.
                    let classes = ["08", "25", "28", "3D", "3F", "40", "53", "55", "57", "58"];
                    let harmless = classes.contains(&&state[..2])
                        || ["42501", "42P01", "42703", "42883"].contains(state);
                    assert!(harmless || !shown.contains("secret"), "{shown}");
                }
            }
            if *state == "25006" {
                // It says that the connection leads to a standby: another may lead to the primary.
                assert!(!client.is_locked(&key).unwrap());
                wait_until(LIMIT, "those that led there are closed", || {
                    before = place.stored.one(backends, &[&name]).get(0);
                    !before.contains(',')
                });
            }
        }
    }
    place.stored.run("UPDATE raise SET state = ''");
    assert_eq!(place.stored.counter(&key), None, "a fence was burnt");
    assert_eq!(place.stored.row(&held_key).unwrap().expires_at_ms, held.expires_at_ms);
    works_alone(&client, &place, &key, "afterwards");
    let after: String = place.stored.one(backends, &[&name]).get(0);
    assert_eq!(after, before, "any other answered error costs no connection");
}

#[test]
fn a_right_that_is_missing_is_named_and_the_least_rights_are_enough() {
    let place = place();
    let role = Role::without_rights(&place.schema);
    let (schema, name, key) = (place.schema.name(), role.name().to_owned(), place.key("a"));
    let client = role.connect(PgLockClient::builder().auto_create_tables(false).schema(schema)).unwrap();
    // to_regclass does not look into a schema that the role may not use.
    let error = client.acquire(&key, TTL).unwrap_err();
    assert!(matches!(error.code(), AuthFailed | InvalidArgument), "{error:?}");
    place.stored.run(&format!("GRANT USAGE ON SCHEMA {schema} TO {name}"));
    for grant in [
        "SELECT, INSERT, UPDATE ON syncguard_locks",
        "SELECT, INSERT, UPDATE ON syncguard_fence_counters",
        "DELETE ON syncguard_locks",
    ] {
        let error = client
            .acquire(&key, TTL)
            .and_then(|answer| client.release(&answer.acquired().unwrap().lock_id))
            .unwrap_err();
        assert_eq!(error.code(), AuthFailed, "without {grant}: {error:?}");
        assert!(error.to_string().contains("42501"), "{error}");
        place.stored.run(&format!("GRANT {grant} TO {name}; DELETE FROM syncguard_locks"));
    }
    let client = role.connect(PgLockClient::builder()).unwrap();
    works_alone(&client, &place, &key, "with the least rights");
}

#[test]
fn a_place_that_does_not_exist_is_a_wrong_argument() {
    let place = place();
    let mut config = place.schema.config();
    config.dbname("no_such_database");
    let error = PgLockClient::builder().connect_with(config, NoTls).unwrap_err();
    assert_eq!(error.code(), InvalidArgument, "{error:?}");
    assert!(error.to_string().contains("3D000"), "{error}");
    let error = PgLockClient::builder().schema("no_such_schema").connect(&place.schema.url()).unwrap_err();
    assert_eq!(error.code(), InvalidArgument, "{error:?}");
    assert!(error.to_string().contains("3F000"), "{error}");
    let builder = PgLockClient::builder().auto_create_tables(false).table_name("no_such_table");
    let client = builder.connect(&place.schema.url()).unwrap();
    let error = client.acquire("a", TTL).unwrap_err();
    assert_eq!(error.code(), InvalidArgument, "{error:?}");
    assert!(error.to_string().contains("setup_schema"), "{error}");
}

#[test]
fn an_undefined_role_is_refused_and_nothing_listening_is_an_unavailable_service() {
    let place = place();
    let mut config = place.schema.config();
    config.user("no_such_role");
    let error = PgLockClient::builder().connect_with(config, NoTls).unwrap_err();
    assert_eq!(error.code(), AuthFailed, "{error:?}");
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error =
        PgLockClient::connect(&format!("postgresql://secret:hidden@127.0.0.1:{free}/postgres")).unwrap_err();
    assert_eq!(error.code(), ServiceUnavailable, "{error:?}");
    assert!(!format!("{error} {error:?}").contains("hidden"));
}

#[test]
fn a_server_without_free_connections_is_a_limited_rate_and_one_that_ends_is_unavailable() {
    let server = Server::start(&Config::new().set("max_connections", "8"));
    let schema = server.schema();
    let ordinary = Role::new(&schema);
    let client = ordinary.connect(PgLockClient::builder().max_connections(1)).unwrap();
    let mut all = Vec::new();
    let refused = loop {
        match ordinary.config().connect(NoTls) {
            Ok(connection) => all.push(connection),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.code().map(postgres::error::SqlState::code), Some("53300"));
    let late = ordinary.connect(PgLockClient::builder()).unwrap_err();
    assert_eq!(late.code(), RateLimited, "{late:?}");
    assert!(client.acquire("a", TTL).unwrap().acquired().is_some(), "who has a connection keeps it");
    drop(all);

    server.stop(Stop::Fast);
    let error = client.is_locked("a").unwrap_err();
    assert_eq!((error.code(), error.is_outcome_unknown()), (ServiceUnavailable, false), "{error:?}");
    let error = client.acquire("b", TTL).unwrap_err();
    assert_eq!((error.code(), error.is_outcome_unknown()), (ServiceUnavailable, false), "{error:?}");
    server.start_again();
    assert!(client.acquire("b", TTL).unwrap().acquired().is_some());
}
