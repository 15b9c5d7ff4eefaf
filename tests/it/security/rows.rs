//! Rows that no client of this library writes: somebody else does, or a table was made by hand.

use super::*;
use crate::support::id;

#[test]
fn rows_with_impossible_values_are_answers_or_errors_and_never_a_grant_that_is_not_one() {
    let place = place();
    // By hand, without the checks of ours.
    place.stored.run(
        "ALTER TABLE syncguard_locks ALTER lock_id DROP NOT NULL, ALTER expires_at_ms DROP NOT NULL, \
         ALTER acquired_at_ms DROP NOT NULL, ALTER fence DROP NOT NULL, ALTER user_key DROP NOT NULL; \
         ALTER TABLE syncguard_fence_counters ALTER fence DROP NOT NULL",
    );
    let numbers = ["NULL", "0", "-1", "9223372036854775807", "-9223372036854775808", "999999999999999"];
    let fences = [
        "NULL",
        "''",
        "'-00000000000001'",
        "'999999999999999'",
        "'9999999999999999'",
        "'x'",
        "'000000000000000'",
        "'00000000000001'",
    ];
    let mut n = 0;
    for (i, expiry) in numbers.iter().enumerate() {
        for fence in fences {
            let acquired = numbers[(i + n) % numbers.len()];
            let key = place.key(&format!("row {n}"));
            let lock_id = id(&format!("row{n}"));
            n += 1;
            place.stored.run(&format!(
                "INSERT INTO syncguard_locks VALUES ('{key}', '{lock_id}', {expiry}, {acquired}, {fence}, NULL)"
            ));
            let token = token(n % 2 == 0);
            let what = format!("expiry {expiry}, acquired {acquired}, fence {fence}");
            let sane = |code: ErrorCode| {
                assert!(matches!(code, ErrorCode::Internal | ErrorCode::InvalidArgument), "{what}: {code}");
            };
            for lookup in [Lookup::Key(&key), Lookup::LockId(&lock_id)] {
                if let Err(error) = LockBackend::lookup(&place.client, lookup, &token) {
                    sane(error.code());
                }
            }
            if let Err(error) = LockBackend::is_locked(&place.client, &key, &token) {
                sane(error.code());
            }
            if let Err(error) = LockBackend::extend(&place.client, &lock_id, TTL, &token) {
                sane(error.code());
            }
            match LockBackend::acquire(&place.client, &key, TTL, &token) {
                // A lock that is over for everybody is free; what was written is in order.
                Ok(answer) => {
                    if let Some(grant) = answer.acquired() {
                        assert_eq!(place.stored.row(&key).unwrap().lock_id, grant.lock_id, "{what}");
                        assert!(
                            !matches!(*expiry, "9223372036854775807" | "999999999999999"),
                            "{what}: it was live"
                        );
                    }
                }
                Err(error) => sane(error.code()),
            }
            if let Err(error) = LockBackend::release(&place.client, &lock_id, &token) {
                sane(error.code());
            }
            if let Err(error) = place.client.operator().break_lock(&key, "a test") {
                sane(error.code());
            }
        }
    }
    let _ = place.client.operator().holders(1000);
    let _ = place.client.operator().counts();
    place.client.operator().cleanup_expired(1000).unwrap();
}

#[test]
fn a_counter_that_was_tampered_with_grants_nothing_and_leaves_no_row() {
    let place = place();
    place.stored.run("ALTER TABLE syncguard_fence_counters ALTER fence DROP NOT NULL");
    for (n, fence) in [
        "-5",
        "-1",
        "NULL",
        "999999999999999",
        "1000000000000000",
        "9223372036854775807",
        "-9223372036854775808",
    ]
    .into_iter()
    .enumerate()
    {
        for two in FORMS {
            let key = place.key(&format!("{n} {two}"));
            place
                .stored
                .run(&format!("INSERT INTO syncguard_fence_counters VALUES ('fence:{key}', {fence})"));
            let answer = LockBackend::acquire(&place.client, &key, TTL, &token(two));
            let row = place.stored.one("SELECT count(*) FROM syncguard_locks WHERE key = $1", &[&key]);
            match answer {
                Ok(answer) => panic!("{fence}, two messages: {two}: {answer:?}"),
                Err(error) => assert_eq!(error.code(), ErrorCode::Internal, "{fence}, {two}: {error:?}"),
            }
            assert_eq!(row.get::<_, i64>(0), 0, "{fence}, two messages: {two}: a row without an owner");
        }
    }
}

#[test]
fn tables_of_other_types_are_an_error_that_says_so() {
    let server = Server::start(&crate::support::Config::new());
    let schema: TestSchema = server.schema();
    let mut admin = schema.client();
    for columns in [
        "key text PRIMARY KEY, lock_id text UNIQUE, expires_at_ms text, acquired_at_ms text, fence text, user_key text",
        "key bytea PRIMARY KEY, lock_id text UNIQUE, expires_at_ms int8, acquired_at_ms int8, fence text, user_key text",
        "key text PRIMARY KEY, lock_id text UNIQUE, expires_at_ms int4, acquired_at_ms int4, fence text, user_key text",
        "key text PRIMARY KEY, lock_id text UNIQUE, expires_at_ms timestamptz, acquired_at_ms timestamptz, fence text, user_key text",
        "key text PRIMARY KEY, lock_id uuid UNIQUE, expires_at_ms int8, acquired_at_ms int8, fence int8, user_key text",
        "key text PRIMARY KEY, lock_id text UNIQUE, expires_at_ms float8, acquired_at_ms float8, fence text, user_key varchar(3)",
        "key text PRIMARY KEY",
    ] {
        admin
            .batch_execute(&format!(
                "DROP TABLE IF EXISTS syncguard_locks, syncguard_fence_counters; CREATE TABLE syncguard_locks ({columns}); \
                 CREATE TABLE syncguard_fence_counters (fence_key text PRIMARY KEY, fence int8, key_debug text)"
            ))
            .unwrap();
        let client = connect(PgLockClient::builder().auto_create_tables(false), schema.config()).unwrap();
        for two in FORMS {
            let answer = LockBackend::acquire(&client, "a key", TTL, &token(two));
            if let Err(error) = &answer {
                assert!(
                    matches!(
                        error.code(),
                        ErrorCode::InvalidArgument | ErrorCode::Internal | ErrorCode::ServiceUnavailable
                    ),
                    "{columns}: {error:?}"
                );
                assert!(!error.to_string().contains("a key"), "{error}");
            }
            // A grant that is one, or nothing.
            let rows: i64 = admin.query_one("SELECT count(*) FROM syncguard_locks", &[]).unwrap().get(0);
            let granted = answer.is_ok_and(|answer| answer.acquired().is_some());
            assert!(rows <= 1 && (granted || rows == 0), "{columns}, two messages: {two}: {rows} rows");
            admin.batch_execute("DELETE FROM syncguard_locks").unwrap();
        }
    }
}
