//! What the fuzz targets in `fuzz/` check, on random input: bytes of any kind, and pieces of what the
//! parsers look for. `scripts/fuzz` looks further, with an eye on what was reached.
//!
//! `SYNCGUARD_FUZZ_CASES` is how many inputs each target gets (default: 5,000).

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../fuzz/bodies.rs"]
#[allow(unreachable_pub)]
mod bodies;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// What means something to somebody: quotes, escapes, separators, parts of connection strings.
const WORDS: &[&str] = &[
    "\u{1}",
    "'",
    "\"",
    "\\",
    "$1",
    "$$",
    "--",
    "/*",
    ";",
    ":",
    "@",
    "/",
    "?",
    "&",
    "=",
    "%",
    "%00",
    "%4",
    "%zz",
    "[::1]",
    "[",
    ",",
    " ",
    "\t",
    "\n",
    "\0",
    "\u{7f}",
    "\u{85}",
    "\u{fc}",
    "e\u{301}",
    "\u{1f512}",
    "\u{202e}",
    "\u{10ffff}",
    "host",
    "port",
    "user",
    "dbname",
    "options",
    "sslmode",
    "require",
    "connect_timeout",
    "postgresql://",
    "postgres://",
    "host=h",
    "port=1",
    "99999999999",
    "-1",
    "0",
    "fence:",
    "syncguard_locks",
    "select",
    "000000000000001",
    "900000000000000",
    "9999999999999999",
    "AAAAAAAAAAAAAAAAAAAAAA",
    "_-",
    "a",
];

fn inputs() -> impl Strategy<Value = Vec<u8>> {
    let word = proptest::sample::select(WORDS).prop_map(|word| word.as_bytes().to_vec());
    let repeated = (word.clone(), 1..200_usize).prop_map(|(word, times)| word.repeat(times));
    let piece = prop_oneof![
        6 => word,
        2 => proptest::collection::vec(any::<u8>(), 0..20),
        1 => repeated,
        2 => "\\PC{0,12}".prop_map(String::into_bytes),
    ];
    (any::<[u8; 2]>(), proptest::collection::vec(piece, 0..12))
        .prop_map(|(head, pieces)| [&head[..], &pieces.concat()].concat())
}

fn run(body: fn(&[u8])) {
    let cases = std::env::var("SYNCGUARD_FUZZ_CASES").map_or(5_000, |cases| cases.parse().expect("a number"));
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    runner
        .run(&inputs(), |bytes| {
            body(&bytes);
            Ok(())
        })
        .unwrap();
}

#[test]
fn any_text_is_a_key_in_full_or_is_refused() {
    run(bodies::keys);
}

#[test]
fn any_text_is_a_plain_name_or_is_refused() {
    run(bodies::names);
}

#[test]
fn any_text_is_a_connection_string_or_is_refused_and_its_password_is_not_shown() {
    run(bodies::configuration);
}
