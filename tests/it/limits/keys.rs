//! Keys of every kind, through every operation and both ways of sending a statement.

use super::*;
use crate::support::Place;
use postgres::{Client, NoTls};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use r2d2_postgres::PostgresConnectionManager;
use syncguard::backend::RenewOutcome;
use syncguard::normalize_and_validate_key;

/// Occupies a name on every connection, so that the client cannot prepare and writes everything out,
/// as it does behind a pooler.
#[derive(Debug)]
struct Occupied(String);

impl r2d2::CustomizeConnection<Client, postgres::Error> for Occupied {
    fn on_acquire(&self, connection: &mut Client) -> Result<(), postgres::Error> {
        connection.batch_execute(&format!("PREPARE {}(text) AS SELECT 1", self.0))
    }
}

/// A client that sends prepared statements, and one that cannot.
fn clients(place: &Place) -> [PgLockClient; 2] {
    let occupied = Occupied(Scripted::new(&place.schema).name("queue").to_owned());
    let manager = PostgresConnectionManager::new(place.schema.config(), NoTls);
    let pool = r2d2::Pool::builder()
        .max_size(2)
        .min_idle(Some(0))
        .connection_customizer(Box::new(occupied))
        .build(manager);
    let pool = pool.unwrap();
    let plain = PgLockClient::builder().build(pool.clone()).unwrap();
    plain.is_locked("so that it finds out").unwrap();
    let prepared = pool
        .get()
        .unwrap()
        .query_one("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'sg\\_%'", &[])
        .unwrap();
    assert_eq!(prepared.get::<_, i64>(0), 1, "the other client has prepared nothing");
    [place.client.clone(), plain]
}

/// The key goes in and comes out as it is, everywhere.
fn round_trip(place: &Place, client: &PgLockClient, key: &str) {
    let normal = normalize_and_validate_key(key).unwrap();
    for two in FORMS {
        let token = token(two);
        let grant = LockBackend::acquire(client, key, TTL, &token).unwrap().acquired().expect("free");
        let row = place.stored.row(&normal).expect("stored verbatim");
        assert_eq!((&row.user_key, &row.lock_id), (&normal, &grant.lock_id));
        assert_eq!(place.stored.counter(&normal), Some(i64::try_from(grant.fence.get()).unwrap()));
        assert_eq!(LockBackend::acquire(client, key, TTL, &token).unwrap(), AcquireResult::Locked);
        assert!(LockBackend::is_locked(client, key, &token).unwrap());
        let found = client.lookup_raw(Lookup::Key(key), &token).unwrap().unwrap();
        assert_eq!((&found.key, found.fence), (&normal, grant.fence));
        assert_eq!(client.lookup_raw(Lookup::LockId(&grant.lock_id), &token).unwrap(), Some(found));
        let renewal = Renewal::new(key, &grant.lock_id, grant.fence, TTL);
        let renewed = client.renew(&[renewal], Clock::system().now().after(LIMIT)).remove(0).unwrap();
        assert!(matches!(renewed, RenewOutcome::Renewed { .. }));
        let mut caller = place.stored.client();
        let mut tx = caller.transaction().unwrap();
        client.assert_fence(&mut tx, key, grant.fence).unwrap();
        drop(tx);
        drop(caller);
        assert_eq!(client.operator().blocked(key).unwrap(), []);
        LockBackend::release(client, &grant.lock_id, &token).unwrap();
        assert!(place.stored.row(&normal).is_none());
    }
    assert_eq!(client.operator().break_lock(key, "a test").unwrap().was, None);
}

#[test]
fn hostile_keys_are_ordinary_keys() {
    let place = place();
    place.stored.run("CREATE TABLE canary (alive bool)");
    let clients = clients(&place);
    let mark = place.schema.name();
    let longest = "k".repeat(512);
    let keys = [
        "'",
        "''",
        "\\",
        "\\'",
        "'\\",
        "\\\\'",
        "\"",
        "$1",
        "$$",
        "$1$2",
        "%s",
        "{}",
        ";",
        "--",
        "/*",
        "*/",
        "E'",
        "'; DROP TABLE canary; --",
        "\\'; DROP TABLE canary; --",
        "$body$; DROP TABLE canary; $body$",
        "U&'\\0041'",
        "\u{1F512}\u{1F468}\u{200D}\u{1F469}",
        "cafe\u{301}",
        "\u{212B}",
        "\u{1E9B}\u{323}",
        "\n",
        "\t\r\n",
        "\u{1}",
        "\u{7f}",
        "\u{85}\u{2028}\u{feff}",
        " ",
        " a",
        "a ",
        "NULL",
        "null",
        "\u{10ffff}",
        "\u{e000}",
        "\u{202e}abc",
    ];
    for client in &clients {
        for key in keys {
            round_trip(&place, client, &format!("{key}{mark}"));
        }
        round_trip(&place, client, &longest);
    }
    place.stored.run("SELECT alive FROM canary");
}

#[test]
fn what_is_too_long_or_cannot_be_stored_is_refused_before_anything_is_sent() {
    let place = place();
    let closed =
        PgLockClient::builder().auto_create_tables(false).connect("postgresql://x@127.0.0.1:1/x").unwrap();
    for key in ["", "a\0b", "\0", &"k".repeat(513), &"\u{e9}".repeat(257)] {
        for client in [&place.client, &closed] {
            let codes = [
                client.acquire(key, TTL).unwrap_err().code(),
                client.is_locked(key).unwrap_err().code(),
                client.get_by_key(key).unwrap_err().code(),
                client.get_by_key_raw(key).unwrap_err().code(),
                client.lock(key).unwrap_err().code(),
                client.try_lock(key).unwrap_err().code(),
                client.operator().blocked(key).unwrap_err().code(),
                client.operator().break_lock(key, "a test").unwrap_err().code(),
            ];
            assert_eq!(codes, [ErrorCode::InvalidArgument; 8], "{key:?}");
        }
    }
    // Measured in bytes of the normal form: 256 of these are 768 bytes before and 512 after.
    round_trip(&place, &place.client, &"e\u{301}".repeat(256));
    assert_eq!(closed.is_locked("fine").unwrap_err().code(), ErrorCode::ServiceUnavailable);
}

#[test]
fn any_key_that_is_accepted_comes_back_as_it_is() {
    let place = place();
    let clients = clients(&place);
    let mut runner = TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
    let wild = proptest::collection::vec(
        prop_oneof![
            any::<char>(),
            prop::sample::select(vec!['\'', '\\', '$', '1', '"', ';', 'E', '\u{301}', '\n'])
        ],
        1..40,
    );
    let run = runner.run(&wild, |chars| {
        let key: String = chars.into_iter().filter(|c| *c != '\0').collect();
        prop_assume!(normalize_and_validate_key(&key).is_ok());
        for client in &clients {
            round_trip(&place, client, &key);
        }
        Ok(())
    });
    run.unwrap();
}
