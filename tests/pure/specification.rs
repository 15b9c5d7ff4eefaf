//! What all SyncGuard clients have in common and no other test says: constants, names, what is not
//! there, and that one contract is run on every backend.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says by a panic what it did not expect")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use syncguard::backend::TimeAuthority;
use syncguard::{
    BACKEND_LIMIT_POSTGRES, ErrorCode, FENCE_MAX, FENCE_WARN, Fence, LockBackend, MAX_KEY_LENGTH_BYTES,
    PgLockClient, RESERVE_BYTES_POSTGRES, TIME_TOLERANCE_MS,
};

fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn the_postgres_client_says_what_it_is() {
    // Nothing listens on the port and nothing needs to: such a client is built without I/O.
    let client = PgLockClient::builder()
        .auto_create_tables(false)
        .connect("host=127.0.0.1 port=1 user=nobody dbname=nothing")
        .unwrap();
    let capabilities = LockBackend::capabilities(&client);
    assert_eq!(capabilities.backend, "postgres");
    assert!(capabilities.supports_fencing);
    assert_eq!(capabilities.time_authority, TimeAuthority::Server);
    // That this compiles is the proof: a grant has a fence and not perhaps one.
    let _: fn(&syncguard::Acquired) -> &Fence = |lease| &lease.fence;
}

#[test]
fn the_constants_are_those_of_every_client() {
    assert_eq!(TIME_TOLERANCE_MS, 1000);
    assert_eq!((MAX_KEY_LENGTH_BYTES, BACKEND_LIMIT_POSTGRES, RESERVE_BYTES_POSTGRES), (512, 1700, 0));
    assert_eq!(FENCE_MAX.to_string().len(), 15);
    const { assert!(FENCE_WARN < FENCE_MAX) };
}

#[test]
fn there_are_eight_error_codes() {
    use ErrorCode::{
        Aborted, AcquisitionTimeout, AuthFailed, Internal, InvalidArgument, NetworkTimeout, RateLimited,
        ServiceUnavailable,
    };
    let names = [
        (ServiceUnavailable, "ServiceUnavailable"),
        (AuthFailed, "AuthFailed"),
        (InvalidArgument, "InvalidArgument"),
        (RateLimited, "RateLimited"),
        (NetworkTimeout, "NetworkTimeout"),
        (AcquisitionTimeout, "AcquisitionTimeout"),
        (Aborted, "Aborted"),
        (Internal, "Internal"),
    ];
    for (code, name) in names {
        assert_eq!(code.as_str(), name);
    }
    let text = fs::read_to_string(top().join("src/error.rs")).unwrap();
    let body = text.split("pub enum ErrorCode {").nth(1).and_then(|rest| rest.split('}').next()).unwrap();
    let listed: BTreeSet<&str> = body.lines().filter_map(|line| line.trim().strip_suffix(',')).collect();
    assert_eq!(listed, names.iter().map(|(_, name)| *name).collect());
}

#[test]
fn nothing_that_was_withdrawn_is_public() {
    const WITHDRAWN: [&str; 10] = [
        "compare_fence",
        "compare_fences",
        "is_newer_fence",
        "expect_fence",
        "has_fence_support",
        "FenceOverflow",
        "retry_after",
        "retry_after_ms",
        "time_mode",
        "TimeMode",
    ];
    let mut seen = 0;
    for source in crate::source::read_all(top(), "src") {
        seen += 1;
        // The predicate of liveness is handed the tolerance; no option may set it, and none of a lock
        // takes a callback for events: that is the decorator's.
        let has_options = source.file.starts_with("src/client/") || source.file == "src/lock/options.rs";
        let functions = source.functions();
        // A capability is a field, for the type of a grant says the rest.
        assert!(functions.iter().all(|(name, _)| *name != "supports_fencing"), "{}", source.file);
        for (name, _) in functions.into_iter().filter(|_| has_options) {
            assert!(!name.contains("tolerance") && name != "on_event", "{}: `{name}`", source.file);
        }
        for token in source.words() {
            assert!(
                !WITHDRAWN.contains(&token.text.as_str()),
                "{}:{}: `{}` was withdrawn",
                source.file,
                token.line,
                token.text
            );
        }
    }
    assert!(seen > 10, "src/ was not found");
}

#[test]
fn one_contract_is_run_on_every_backend() {
    for (file, needed) in [
        ("tests/it/contract_postgres.rs", ["contract_tests!", "telemetry"]),
        ("tests/pure/memory_contract.rs", ["contract_tests!", "with_telemetry"]),
    ] {
        let text = fs::read_to_string(top().join(file)).unwrap();
        let code: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        for word in needed {
            assert!(code.iter().any(|line| line.contains(word)), "{file} lacks {word}");
        }
    }
}

/// The rules below read the sources. Each is a function from a source to the places that break it, so
/// that it can be tried on one that does.
#[track_caller]
fn check(rule: impl Fn(&crate::source::Source) -> Vec<String>) {
    let sources = crate::source::read_all(top(), "src");
    assert!(sources.len() > 10, "src/ was not found");
    // Some tests have files of their own.
    let tests = ["src/lock/tests/", "src/lock/fake.rs", "src/lock/lease_tests.rs"];
    let sources = sources.iter().filter(|source| !tests.iter().any(|test| source.file.starts_with(test)));
    let broken: Vec<String> = sources.flat_map(rule).collect();
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
}

fn count(rule: impl Fn(&crate::source::Source) -> Vec<String>, file: &str, text: &str) -> usize {
    rule(&crate::source::Source::parse(file, text).unwrap()).len()
}

/// Functions that contain this word and are not among those that may.
fn elsewhere(source: &crate::source::Source, word: &str, allowed: &[&str]) -> Vec<String> {
    let functions = source.functions().into_iter();
    functions
        .filter(|(name, _)| !allowed.contains(name))
        .filter_map(|(name, body)| Some((name, body.iter().find(|token| token.text == word)?)))
        .map(|(name, token)| format!("{}:{}: `{word}` in `{name}`", source.file, token.line))
        .collect()
}

/// Who computes labels: what prints, what looks up, what reports. No operation does.
fn labels(source: &crate::source::Source) -> Vec<String> {
    const MAY: [&str; 13] = [
        "hash_key",
        "fmt",
        "sanitized",
        "warn_near_limit",
        "warn_of_the_future",
        "described",
        "reset_mark",
        "idle_counters",
        "waiting",
        "waiters",
        "kept",
        "deliver",
        // Whole locks, on the telemetry thread.
        "summary",
    ];
    let mut broken = elsewhere(source, "hash_key", &MAY);
    if !["telemetry", "client", ""].contains(&source.top()) {
        let events = source.words().filter(|word| ["LockEvent", "TelemetryOptions"].contains(&&*word.text));
        broken.extend(events.map(|word| format!("{}:{}: `{}`", source.file, word.line, word.text)));
    }
    broken
}

#[test]
fn no_operation_computes_a_label_or_builds_an_event() {
    check(labels);
    let acquire = "use hash::hash_key; fn acquire(k: &str) { let label = hash_key(k); }";
    assert_eq!(count(labels, "src/leases/acquire.rs", acquire), 1);
    assert_eq!(count(labels, "src/leases/acquire.rs", "fn fmt() { hash_key(k) }"), 0);
    assert_eq!(count(labels, "src/memory/mod.rs", "fn f() { LockEvent { } }"), 1);
}

/// `AcquisitionTimeout` is what waiting ends with, `Aborted` what a token, a closed client, a stale
/// fence or a run without its lease does; no operation says the first, and nothing else the second.
fn codes(source: &crate::source::Source) -> Vec<String> {
    const WAITS: [&str; 2] = ["timed_out", "as_str"];
    const ENDS: [&str; 6] = ["aborted", "as_str", "closed", "fence_error", "completion_error", "lease_lost"];
    let mut broken = elsewhere(source, "AcquisitionTimeout", &WAITS);
    if !["lock", "advisory", "error"].contains(&source.top()) {
        broken.extend(elsewhere(source, "AcquisitionTimeout", &[]));
    }
    broken.extend(elsewhere(source, "Aborted", &ENDS));
    broken
}

#[test]
fn each_code_comes_from_where_it_belongs() {
    check(codes);
    assert_eq!(count(codes, "src/lock/waiter.rs", "fn timed_out() { E::AcquisitionTimeout }"), 0);
    assert_eq!(count(codes, "src/lock/guard.rs", "fn extend() { E::AcquisitionTimeout }"), 1);
    assert_eq!(count(codes, "src/pg/pool.rs", "fn timed_out() { E::AcquisitionTimeout }"), 1);
    assert_eq!(count(codes, "src/pg/pool.rs", "fn acquire() { E::Aborted }"), 1);
}

/// A mutation that is sent in two messages looks at its token between them, and a read looks at it
/// when the answer is there. (The moment in between is too short for a test to hit.)
fn tokens(source: &crate::source::Source) -> Vec<String> {
    if source.top() != "leases" {
        return Vec::new();
    }
    let reads = source.file.ends_with("/read.rs");
    let mut broken = Vec::new();
    for (name, body) in source.functions() {
        let calls: Vec<&crate::source::Token> = body
            .windows(3)
            .filter(|window| window[0].text == "." && window[2].text == "(")
            .map(|window| &window[1])
            .filter(|call| ["begin", "ask_one", "commit", "check_cancel"].contains(&&*call.text))
            .collect();
        for (n, call) in calls.iter().enumerate() {
            let next = calls.get(n + 1).map(|call| call.text.as_str());
            if (call.text == "begin" || (call.text == "ask_one" && reads)) && next != Some("check_cancel") {
                broken.push(format!("{}:{}: no look at the token in `{name}`", source.file, call.line));
            }
        }
    }
    broken
}

#[test]
fn a_token_is_looked_at_after_each_read_and_before_each_write() {
    check(tokens);
    let blind = "fn two(s: S) { s.begin(&m)?; s.commit(&w)?; }";
    assert_eq!(count(tokens, "src/leases/extend.rs", blind), 1);
    let late = "fn two(s: S) { s.begin(&m)?; s.commit(&w)?; s.check_cancel()?; }";
    assert_eq!(count(tokens, "src/leases/extend.rs", late), 1);
    assert_eq!(count(tokens, "src/leases/read.rs", "fn look(s: S) { s.ask_one(&m)?; Ok(1) }"), 1);
    let good = "fn two(s: S) { s.begin(&m)?; s.check_cancel()?; s.commit(&w)?; }";
    assert_eq!(count(tokens, "src/leases/extend.rs", good), 0);
    let seen = crate::source::read_all(top(), "src/leases");
    let begins = |source: &crate::source::Source| source.followed_by("begin", "(").count();
    assert!(seen.iter().map(begins).sum::<usize>() >= 3, "acquire, extend and release are found");
}

/// A lock id is what the operating system's generator gave, or an error.
fn randomness(source: &crate::source::Source) -> Vec<String> {
    const WEAK: [&str; 10] = [
        "unwrap_or",
        "unwrap_or_default",
        "unwrap_or_else",
        "map_or",
        "is_ok",
        "SystemTime",
        "Instant",
        "AtomicU64",
        "process",
        "thread",
    ];
    let functions = source.functions().into_iter().filter(|(name, _)| *name == "generate");
    let words = functions.flat_map(|(_, body)| body).filter(|token| WEAK.contains(&token.text.as_str()));
    words.map(|token| format!("{}:{}: `{}`", source.file, token.line, token.text)).collect()
}

#[test]
fn a_lock_id_has_no_source_but_the_operating_systems() {
    check(randomness);
    let text = fs::read_to_string(top().join("src/model/lock_id.rs")).unwrap();
    let id = crate::source::Source::parse("src/model/lock_id.rs", &text).unwrap();
    let functions = id.functions();
    let (_, body) = functions.iter().find(|(name, _)| *name == "generate").unwrap();
    let words: Vec<&str> = body.iter().map(|token| token.text.as_str()).collect();
    assert!(words.contains(&"getrandom") && words.contains(&"?"), "what fails there is an error");
    let weak = "fn generate() { getrandom::fill(&mut b).unwrap_or_else(|_| b = time()); }";
    assert_eq!(count(randomness, "src/model/lock_id.rs", weak), 1);
}

/// Only one function makes stored keys.
fn stored_keys(source: &crate::source::Source) -> Vec<String> {
    let mut broken = elsewhere(
        source,
        "Sha256",
        // Stored keys; names of indexes and of prepared statements; numbers of session locks; a server's certificate.
        &["make_storage_key", "index_name", "new", "digest", "end_point"],
    );
    if source.file != "src/model/key.rs" {
        let named = source.literals().filter(|literal| literal.text.starts_with("\"fence:"));
        broken.extend(named.map(|literal| format!("{}:{}: {}", source.file, literal.line, literal.text)));
    }
    broken
}

#[test]
fn stored_keys_come_from_one_function() {
    check(stored_keys);
    assert_eq!(count(stored_keys, "src/memory/mod.rs", "fn stored() { Sha256::digest(k) }"), 1);
    assert_eq!(count(stored_keys, "src/memory/mod.rs", "fn f() { format!(\"fence:{key}\") }"), 1);
}

/// Numbers that every client must agree on are written once.
fn numbers(source: &crate::source::Source) -> Vec<String> {
    let digits = |literal: &&crate::source::Token| {
        let text = literal.text.replace('_', "");
        ["900000000000000", "90000000000000"].contains(&text.as_str())
    };
    let found = source.literals().filter(digits).filter(|_| source.file != "src/model/fence.rs");
    found.map(|literal| format!("{}:{}: {}", source.file, literal.line, literal.text)).collect()
}

#[test]
fn the_limits_of_fences_are_written_in_one_place() {
    check(numbers);
    assert_eq!(count(numbers, "src/leases/sql.rs", "const X: u64 = 900_000_000_000_000;"), 1);
}

/// What is asked for display decides nothing, and asking moves nothing.
fn diagnosis(source: &crate::source::Source) -> Vec<String> {
    let acting = ["acquire.rs", "release.rs", "extend.rs", "guard.rs", "worker.rs", "lease.rs"];
    let word = |words: &'static [&'static str]| {
        source.words().filter(move |word| words.contains(&word.text.as_str()))
    };
    let broken = if source.top() == "diagnostics" {
        word(&["extend", "extend_by", "release", "release_by", "renew"]).collect::<Vec<_>>()
    } else if acting.iter().any(|file| source.file.ends_with(file)) {
        word(&["lookup", "lookup_raw", "owns", "get_by_key", "get_by_id"]).collect()
    } else {
        Vec::new()
    };
    broken.into_iter().map(|word| format!("{}:{}: `{}`", source.file, word.line, word.text)).collect()
}

#[test]
fn diagnosis_gates_nothing_and_moves_nothing() {
    check(diagnosis);
    assert_eq!(count(diagnosis, "src/lock/guard.rs", "fn release() { if b.owns(id) { } }"), 1);
    assert_eq!(count(diagnosis, "src/diagnostics.rs", "fn owns() { b.extend(id, ttl, c) }"), 1);
}
