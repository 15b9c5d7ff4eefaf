//! The SQL helpers: they agree with the library, say what they do, and come and go without a trace.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::support::{TestSchema, server, unique};
use postgres::{Client, NoTls};
use proptest::prelude::*;
use proptest::test_runner::{Config as Cases, TestRunner};
use syncguard::AdvisoryKey;

const UP: &str = include_str!("../../migrations/advisory/up.sql");
const DOWN: &str = include_str!("../../migrations/advisory/down.sql");

/// A schema with the helpers in it.
fn installed() -> (TestSchema, Client) {
    let schema = crate::support::schema();
    let mut client = schema.client();
    client.batch_execute(UP).unwrap();
    (schema, client)
}

fn sql_id(client: &mut Client, text: &str) -> i64 {
    client.query_one("SELECT email_to_lock_id($1)", &[&text]).unwrap().get(0)
}

/// A database with another locale than the cluster's, and the helpers in it; dropped at the end.
struct Database(String);

impl Database {
    fn create(locale: &str) -> (Self, Client) {
        let name = format!("d{}", unique());
        let sql = format!("CREATE DATABASE {name} TEMPLATE template0 LOCALE '{locale}'");
        server().client().batch_execute(&sql).unwrap();
        let mut config: postgres::Config = server().url().parse().unwrap();
        let mut client = config.dbname(&name).connect(NoTls).unwrap();
        client.batch_execute(UP).unwrap();
        (Self(name), client)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let dropped = server().client().batch_execute(&format!("DROP DATABASE {} WITH (FORCE)", self.0));
        assert!(dropped.is_ok() || std::thread::panicking());
    }
}

#[test]
fn known_texts_have_their_numbers() {
    let (_schema, mut client) = installed();
    for (text, number) in [
        ("user@example.com", -5_419_621_966_426_725_984),
        ("  USER@Example.com ", -5_419_621_966_426_725_984),
        ("u1", -4_935_378_884_118_197_574),
        ("u2", 7_827_822_162_727_968_255),
    ] {
        assert_eq!(sql_id(&mut client, text), number);
    }
    let mut spaced = |namespace: &str| -> i64 {
        let sql = "SELECT generate_lock_id($1, 'user@example.com')";
        client.query_one(sql, &[&namespace]).unwrap().get(0)
    };
    assert_eq!(spaced("cleanup"), -5_856_563_423_239_081_834);
    assert_eq!(spaced("registration"), 8_062_536_846_379_771_938);
}

/// Compares library and server over random texts that both fold alike; how many those were.
fn compare(client: &mut Client) -> u32 {
    let texts = prop_oneof![
        3 => "[ -~]{0,40}",
        2 => " {0,3}[A-Za-z0-9._%+-]{1,20}@[A-Za-z0-9.-]{1,20} {0,3}",
        3 => "[^\0]{0,30}",
        2 => "[\\t\\n\\r \u{a0}\u{2003}\u{c9}\u{e9}\u{130}\u{131}\u{3a3}\u{3c2}\u{1e9e}\u{df}A-Za-z]{0,20}",
    ];
    let alike = AtomicU32::new(0);
    let client = Mutex::new(client);
    let mut runner = TestRunner::new(Cases { cases: 1500, failure_persistence: None, ..Cases::default() });
    let result = runner.run(&(texts, "[^\0:]{0,10}"), |(text, namespace)| {
        let mut client = client.lock().unwrap();
        let row = client
            .query_one(
                "SELECT lower($1), email_to_lock_id($1), generate_lock_id($2, $1)",
                &[&text, &namespace],
            )
            .unwrap();
        if row.get::<_, &str>(0) == text.to_lowercase() {
            alike.fetch_add(1, Ordering::SeqCst);
            let (one, two) =
                (AdvisoryKey::from_text(&text), AdvisoryKey::namespaced(&namespace, &text).unwrap());
            prop_assert_eq!(one.as_i64(), Some(row.get(1)));
            prop_assert_eq!(two.as_i64(), Some(row.get(2)));
        }
        Ok(())
    });
    result.unwrap();
    alike.into_inner()
}

#[test]
fn library_and_server_agree_on_every_text_that_both_fold_alike() {
    let (_schema, mut client) = installed();
    assert!(compare(&mut client) > 700, "too few texts were compared");
}

/// One of a million different texts, in various dress.
fn text(n: usize) -> String {
    match n % 4 {
        0 => format!("user{n}@example.com"),
        1 => format!("  User.{n}@Example.COM "),
        2 => n.to_string(),
        _ => format!("Cleanup of account {n}"),
    }
}

#[test]
fn a_million_texts_have_a_million_numbers_here_and_in_the_server_spread_over_the_whole_range() {
    const TEXTS: usize = 1_000_000;
    const BATCH: usize = 20_000;
    let (_schema, mut client) = installed();
    let ask = client
        .prepare(
            "SELECT array_agg(email_to_lock_id(t.text) ORDER BY t.place) \
             FROM unnest($1::text[]) WITH ORDINALITY AS t (text, place)",
        )
        .unwrap();
    let mut numbers = Vec::with_capacity(TEXTS);
    for first in (0..TEXTS).step_by(BATCH) {
        let texts: Vec<_> = (first..first + BATCH).map(text).collect();
        let theirs: Vec<i64> = client.query_one(&ask, &[&texts]).unwrap().get(0);
        assert_eq!(theirs.len(), BATCH);
        for (text, theirs) in texts.iter().zip(theirs) {
            assert_eq!(AdvisoryKey::from_text(text).as_i64(), Some(theirs), "{text:?}");
            numbers.push(theirs);
        }
    }
    let mut top = [0_u32; 256];
    for number in &numbers {
        top[usize::from(number.to_be_bytes()[0])] += 1;
    }
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), TEXTS, "no number twice");
    let expected = 1_000_000.0 / 256.0;
    let chi: f64 = top.iter().map(|n| (f64::from(*n) - expected).powi(2) / expected).sum();
    // By chance one in a million sets of texts would be beyond.
    assert!(chi < 377.0, "{chi} with 255 degrees of freedom");
}

#[test]
fn they_agree_in_a_locale_that_folds_more_letters() {
    let (_database, mut client) = Database::create("C.UTF-8");
    assert!(compare(&mut client) > 900, "too few texts were compared");
    assert_eq!(AdvisoryKey::from_text("\u{c9}").as_i64(), Some(sql_id(&mut client, "\u{c9}")));
}

#[test]
fn the_documented_differences_are_those_that_there_are() {
    let (_schema, mut c_locale) = installed();
    let (_database, mut utf8) = Database::create("C.UTF-8");
    let differs =
        |client: &mut Client, text: &str| AdvisoryKey::from_text(text).as_i64() != Some(sql_id(client, text));
    // In the C locale: every capital letter beyond ASCII.
    for text in ["\u{c9}", "\u{416}", "\u{3a9}"] {
        assert!(differs(&mut c_locale, text) && !differs(&mut utf8, text), "{text}");
    }
    // In others: the capital sigma at the end of a word, and the dotted capital I.
    assert!(differs(&mut utf8, "\u{39f}\u{3a3}"));
    assert!(differs(&mut utf8, "\u{130}"));
    // What is lower case already is the same everywhere: the way out.
    for text in ["\u{e9}\u{436}\u{3c9}", "\u{3bf}\u{3c2}", "i\u{307}"] {
        assert!(!differs(&mut c_locale, text) && !differs(&mut utf8, text), "{text}");
    }
}

#[test]
fn a_colon_in_a_namespace_is_refused_as_in_the_library() {
    let (_schema, mut client) = installed();
    let error = client.query_one("SELECT generate_lock_id('a:b', 'c')", &[]).unwrap_err();
    assert_eq!(error.code().unwrap().code(), "22023");
    assert!(AdvisoryKey::namespaced("a:b", "c").is_err());
}

#[test]
fn the_helpers_lock_and_say_so_with_the_number_alone() {
    let (schema, _installer) = installed();
    let notices: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
    let heard = Arc::clone(&notices);
    let mut config = schema.config();
    config.notice_callback(move |notice| {
        heard.lock().unwrap().push((notice.severity().to_owned(), notice.message().to_owned()));
    });
    let mut holder = config.connect(NoTls).unwrap();
    let mut other = schema.client();
    let email = format!("Some.Body{}@example.com", unique());
    let call = |client: &mut Client, function: &str| -> Option<bool> {
        client.query_one(&format!("SELECT {function}($1)"), &[&email]).unwrap().get(0)
    };
    assert_eq!(call(&mut holder, "acquire_cleanup_lock"), Some(true));
    assert_eq!(call(&mut other, "acquire_cleanup_lock"), Some(false));
    assert_eq!(call(&mut holder, "release_cleanup_lock"), Some(true));
    assert_eq!(call(&mut holder, "release_cleanup_lock"), Some(false));
    assert_eq!(call(&mut other, "acquire_cleanup_lock"), Some(true));
    assert_eq!(call(&mut holder, "acquire_cleanup_lock"), Some(false));

    let number = AdvisoryKey::from_text(&email);
    let ours: Vec<_> =
        notices.lock().unwrap().iter().filter(|(_, text)| text.contains("lock")).cloned().collect();
    let expected = [
        ("NOTICE", format!("Acquired cleanup lock for email hash: {number}")),
        ("NOTICE", format!("Released cleanup lock for email hash: {number}")),
        ("WARNING", format!("Failed to release cleanup lock (not held by this session): {number}")),
        ("NOTICE", format!("Failed to acquire cleanup lock (already held): {number}")),
    ];
    for (severity, text) in &expected {
        assert!(ours.iter().any(|(found, said)| found == severity && said == text), "{text} in {ours:#?}");
    }
    let all = format!("{:?}", notices.lock().unwrap()).to_lowercase();
    assert!(!all.contains(&email.to_lowercase()));
}

#[test]
fn nothing_is_locked_for_null() {
    let (_schema, mut client) = installed();
    for call in [
        "email_to_lock_id(NULL)",
        "generate_lock_id(NULL, 'a')",
        "generate_lock_id('a', NULL)",
        "acquire_cleanup_lock(NULL)::int::int8",
        "release_cleanup_lock(NULL)::int::int8",
    ] {
        let row = client.query_one(&format!("SELECT {call}"), &[]).unwrap();
        assert_eq!(row.get::<_, Option<i64>>(0), None, "{call}");
    }
    let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()";
    assert_eq!(client.query_one(sql, &[]).unwrap().get::<_, i64>(0), 0);
}

#[test]
fn the_migration_needs_no_extension_and_goes_as_it_came() {
    let (schema, mut client) = installed();
    client.batch_execute("CREATE TABLE bystander AS SELECT 1 AS n").unwrap();
    client.batch_execute(UP).unwrap();
    // Called by name from elsewhere, under whatever search path.
    let qualified =
        format!("SET search_path TO pg_catalog; SELECT {}.acquire_cleanup_lock('u1')", schema.name());
    client.batch_execute(&qualified).unwrap();
    client.batch_execute(&format!("SET search_path TO {}", schema.name())).unwrap();
    client.batch_execute(DOWN).unwrap();
    client.batch_execute(DOWN).unwrap();
    let mut count = |sql: &str| -> i64 { client.query_one(sql, &[]).unwrap().get(0) };
    assert_eq!(count("SELECT count(*) FROM pg_proc WHERE pronamespace = current_schema()::regnamespace"), 0);
    assert_eq!(count("SELECT count(*) FROM bystander"), 1);
    assert_eq!(count("SELECT count(*) FROM pg_extension WHERE extname = 'pgcrypto'"), 0);
    let held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()";
    assert_eq!(count(held), 1, "what is held stays held");
}

#[test]
fn a_session_lock_lasts_through_transactions_and_the_other_kind_does_not() {
    // What the documentation says of PostgreSQL itself.
    let (mut a, mut b) = (server().client(), server().client());
    let key = AdvisoryKey::from_text(&unique()).as_i64().unwrap();
    let free = |b: &mut Client| -> bool {
        let free = b.query_one("SELECT pg_try_advisory_lock($1)", &[&key]).unwrap().get(0);
        if free {
            b.execute("SELECT pg_advisory_unlock($1)", &[&key]).unwrap();
        }
        free
    };
    a.execute("SELECT pg_try_advisory_lock($1)", &[&key]).unwrap();
    assert!(a.batch_execute("BEGIN; SELECT 1/0").is_err());
    let unlock = a.execute("SELECT pg_advisory_unlock($1)", &[&key]);
    assert!(unlock.is_err(), "not even the unlock works in a failed transaction");
    a.batch_execute("ROLLBACK").unwrap();
    assert!(!free(&mut b));
    a.execute("SELECT pg_advisory_unlock($1)", &[&key]).unwrap();
    assert!(free(&mut b));
    for end in ["COMMIT", "ROLLBACK"] {
        a.batch_execute("BEGIN").unwrap();
        a.execute("SELECT pg_try_advisory_xact_lock($1)", &[&key]).unwrap();
        assert!(!free(&mut b));
        a.batch_execute(end).unwrap();
        assert!(free(&mut b));
    }
}

#[test]
fn a_pair_of_texts_with_one_hashtext_has_two_numbers() {
    let [a, b] = ["key:51221", "key:119643"];
    let mut client = server().client();
    let same: bool = client.query_one("SELECT hashtext($1) = hashtext($2)", &[&a, &b]).unwrap().get(0);
    assert!(same, "the server's hashtext has changed; find another pair");
    assert_ne!(AdvisoryKey::from_text(a), AdvisoryKey::from_text(b));
}
