//! What all SyncGuard clients have in common and no other test says: constants, names, what is not
//! there, and that one contract is run on every backend.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says by a panic what it did not expect")]

// Of the shared module this needs one file only.
#[allow(dead_code, unreachable_pub, reason = "shared by test binaries")]
#[path = "support/source.rs"]
mod source;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use syncguard::{
    BACKEND_LIMIT_POSTGRES, ErrorCode, FENCE_MAX, FENCE_WARN, Fence, LockBackend, MAX_KEY_LENGTH_BYTES,
    PgLockClient, RESERVE_BYTES_POSTGRES, TIME_TOLERANCE_MS, TimeAuthority,
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
    const WITHDRAWN: [&str; 9] = [
        "compare_fence",
        "compare_fences",
        "expect_fence",
        "has_fence_support",
        "FenceOverflow",
        "retry_after",
        "retry_after_ms",
        "time_mode",
        "TimeMode",
    ];
    let mut seen = 0;
    for source in source::read_all(top(), "src") {
        seen += 1;
        // The predicate of liveness is handed the tolerance; no option may set it, and none of a lock
        // takes a callback for events: that is the decorator's.
        let has_options = source.file.starts_with("src/client/") || source.file == "src/lock/options.rs";
        for (name, _) in source.functions().into_iter().filter(|_| has_options) {
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
        ("tests/contract_postgres.rs", ["contract_tests!", "telemetry"]),
        ("tests/memory_contract.rs", ["contract_tests!", "with_telemetry"]),
    ] {
        let text = fs::read_to_string(top().join(file)).unwrap();
        let code: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        for word in needed {
            assert!(code.iter().any(|line| line.contains(word)), "{file} lacks {word}");
        }
    }
}
