//! What docs/api-guidelines.md says of the public items, where a compiler or a look at the sources can
//! tell: auto traits, conversions, what may grow, and what the root of the crate shows.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::path::Path;

use syncguard::{
    AcquireResult, Acquired, AdvisoryGuard, AdvisoryKey, AdvisoryOptions, CancelToken, ErrorCode, Fence,
    LockClient, LockError, LockEvent, LockGuard, LockInfo, LockOptions, MemoryBackend, Operator,
    PgLockClient, PgLockClientBuilder, TelemetryHandle, TelemetryOptions,
};

use crate::source::{Source, read_all};

fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Only its compilation says something.
#[test]
fn what_programs_hold_may_go_to_other_threads_and_through_a_caught_panic() {
    fn anywhere<T: Send + Sync + UnwindSafe + RefUnwindSafe + 'static>() {}
    anywhere::<PgLockClient>();
    anywhere::<PgLockClientBuilder>();
    anywhere::<LockClient>();
    anywhere::<LockGuard>();
    anywhere::<LockOptions>();
    anywhere::<AdvisoryGuard>();
    anywhere::<AdvisoryKey>();
    anywhere::<AdvisoryOptions>();
    anywhere::<CancelToken>();
    anywhere::<Operator>();
    anywhere::<MemoryBackend>();
    anywhere::<TelemetryHandle>();
    anywhere::<TelemetryOptions>();
    anywhere::<LockEvent>();
    anywhere::<Acquired>();
    anywhere::<AcquireResult>();
    anywhere::<LockInfo>();
    anywhere::<Fence>();
    anywhere::<LockError>();
    anywhere::<ErrorCode>();
}

#[test]
fn a_panic_that_passes_a_guard_leaves_the_client_of_use() {
    let client = LockClient::new(MemoryBackend::manual());
    let panic = std::panic::catch_unwind(|| {
        let _guard = client.lock("report").unwrap();
        panic!("the work failed");
    });
    assert!(panic.is_err());
    client.lock("report").unwrap().release().unwrap();
}

#[test]
fn a_fence_becomes_a_number_and_a_number_of_fifteen_digits_a_fence() {
    let fence = Fence::try_from(42).unwrap();
    assert_eq!((u64::from(fence), fence.to_string().as_str()), (42, "000000000000042"));
    assert_eq!(Fence::try_from(1_000_000_000_000_000).unwrap_err().code(), ErrorCode::InvalidArgument);
}

/// Answers that are complete: a program that leaves a case out shall not compile. And what a backend is
/// asked for: a lease has a key and an id, and one that leaves either out shall not compile.
const CLOSED: [&str; 4] = ["AcquireResult", "ReleaseResult", "ExtendResult", "Lookup"];

/// The public enums of a source that may not grow, though they are not among those that are complete.
fn cannot_grow(source: &Source, text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (n, line) in lines.iter().enumerate() {
        let Some(rest) = line.strip_prefix("pub enum ") else { continue };
        let name = rest.split([' ', '<']).next().unwrap_or_default();
        let mut above = lines[..n].iter().rev().take_while(|line| line.starts_with("#["));
        if above.any(|line| *line == "#[non_exhaustive]") == CLOSED.contains(&name) {
            found.push(format!("{}:{}: {name}", source.file, n + 1));
        }
    }
    found
}

#[test]
fn every_public_enum_may_grow_but_for_complete_answers() {
    let mut wrong = Vec::new();
    for source in read_all(top(), "src") {
        let text = fs::read_to_string(top().join(&source.file)).expect("it was just read");
        wrong.extend(cannot_grow(&source, &text));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let sample = |text: &str| cannot_grow(&Source::parse("src/x.rs", text).unwrap(), text).len();
    assert_eq!(sample("#[derive(Debug)]\npub enum Kind {\n}\n"), 1);
    assert_eq!(sample("#[non_exhaustive]\npub enum Kind {\n}\n"), 0);
    assert_eq!(sample("pub enum ExtendResult {\n}\n"), 0);
    assert_eq!(sample("#[non_exhaustive]\npub enum ExtendResult {\n}\n"), 1);
}

/// What only authors of a backend need: in `syncguard::backend`, and nowhere else.
const FOR_BACKENDS: [&str; 15] = [
    "Attempt",
    "Clock",
    "ExtendOutcome",
    "Grant",
    "Heard",
    "Holder",
    "Moment",
    "OnHeard",
    "ReleaseOutcome",
    "RenewOutcome",
    "Renewal",
    "TimeAuthority",
    "Version",
    "Watch",
    "generate_lock_id",
];

/// The names that a file re-exports.
fn exported(text: &str) -> Vec<String> {
    let uses = text.split("pub use ").skip(1).filter_map(|rest| rest.split(';').next());
    let words = uses.flat_map(|list| list.split(|c: char| !(c.is_alphanumeric() || c == '_')));
    words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

#[test]
fn what_only_a_backend_needs_is_not_at_the_root() {
    let read = |file: &str| fs::read_to_string(top().join(file)).expect("it is there");
    let (root, backend) = (exported(&read("src/lib.rs")), read("src/backend/mod.rs"));
    assert!(root.len() > 60 && root.contains(&"PgLockClient".to_owned()), "{root:?}");
    let inside = exported(&backend);
    for name in FOR_BACKENDS {
        assert!(!root.contains(&name.to_owned()), "{name} is at the root");
        let there = inside.contains(&name.to_owned()) || backend.contains(&format!("pub fn {name}("));
        assert!(there, "{name} is not in `backend`");
    }
}
