//! What docs/api-guidelines.md says of the public items, where a compiler or a look at the sources can
//! tell: auto traits, conversions, what may grow, and what the root of the crate shows.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::path::Path;

use syncguard::{
    AcquireResult, Acquired, AdvisoryGuard, AdvisoryKey, AdvisoryOptions, CancelToken, ErrorCode, Fence,
    LockClient, LockError, LockEvent, LockGuard, LockInfo, LockOptions, MemoryBackend, MultiGuard, Operator,
    PgLockClient, PgLockClientBuilder, Semaphore, TelemetryHandle, TelemetryOptions, Term,
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
    anywhere::<MultiGuard>();
    anywhere::<Term>();
    anywhere::<LockOptions>();
    anywhere::<AdvisoryGuard>();
    anywhere::<AdvisoryKey>();
    anywhere::<AdvisoryOptions>();
    anywhere::<CancelToken>();
    anywhere::<Operator>();
    anywhere::<MemoryBackend>();
    anywhere::<Semaphore>();
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
const CLOSED: [&str; 5] = ["AcquireResult", "ReleaseResult", "ExtendResult", "RunOnce", "Lookup"];

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

/// The public structs of a text that another crate may build field by field, so that none can be added.
fn with_open_fields(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (n, line) in lines.iter().enumerate() {
        let Some(rest) = line.strip_prefix("pub struct ").filter(|rest| rest.ends_with('{')) else {
            continue;
        };
        let may_grow = lines[..n].iter().rev().take_while(|line| line.starts_with("#["));
        let may_grow = may_grow.copied().any(|line| line == "#[non_exhaustive]");
        let fields = lines[n + 1..].iter().take_while(|line| **line != "}").map(|line| line.trim_start());
        let mut fields = fields.filter(|line| !line.starts_with("//") && !line.starts_with("#["));
        if !may_grow && fields.all(|field| field.starts_with("pub ")) {
            found.push(rest.split([' ', '<']).next().unwrap_or_default().to_owned());
        }
    }
    found
}

#[test]
fn public_fields_are_those_of_answers_that_may_grow() {
    let sources = read_all(top(), "src").into_iter();
    let text = |source: Source| fs::read_to_string(top().join(source.file)).expect("it was just read");
    let open: Vec<String> = sources.flat_map(|source| with_open_fields(&text(source))).collect();
    // Their fields are fixed: programs take them apart.
    assert_eq!(open, ["Acquired", "Leader"]);
    assert_eq!(with_open_fields("pub struct A {\n    /// One.\n    pub b: u8,\n}\n"), ["A"]);
    assert!(with_open_fields("#[non_exhaustive]\npub struct A {\n    pub b: u8,\n}\n").is_empty());
    assert!(with_open_fields("pub struct A {\n    pub b: u8,\n    c: u8,\n}\n").is_empty());
}

/// What only authors of a backend need: in `syncguard::backend`, and nowhere else.
const FOR_BACKENDS: [&str; 19] = [
    "Attempt",
    "AttemptAll",
    "Clock",
    "ExtendOutcome",
    "Grant",
    "GrantAll",
    "Heard",
    "HeldBy",
    "Holder",
    "Label",
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

/// The types whose methods people type.
const TYPED: [&str; 15] = [
    "AdvisoryGuard",
    "AdvisoryKey",
    "AdvisoryOptions",
    "CancelToken",
    "Fence",
    "LockClient",
    "LockError",
    "LockGuard",
    "LockOptions",
    "MemoryBackend",
    "MultiGuard",
    "Operator",
    "PgLockClient",
    "PgLockClientBuilder",
    "Term",
];

/// The public methods of those types without an example, and how many methods there are.
fn without_example(text: &str) -> (Vec<String>, usize) {
    let lines: Vec<&str> = text.split("\n#[cfg(test)]\n").next().unwrap_or_default().lines().collect();
    let (mut missing, mut all, mut of) = (Vec::new(), 0, None);
    for (n, line) in lines.iter().enumerate() {
        if let Some(rest) = line.strip_prefix("impl") {
            of = TYPED.into_iter().find(|name| rest.trim_end_matches(" {") == format!(" {name}"));
        }
        let rest = ["    pub fn ", "    pub const fn "].iter().find_map(|start| line.strip_prefix(start));
        let (Some(rest), Some(of)) = (rest, of) else { continue };
        all += 1;
        let docs = lines[..n].iter().rev().map(|line| line.trim_start());
        let mut docs = docs.take_while(|line| line.starts_with("///") || line.starts_with("#["));
        if !docs.any(|line| line.starts_with("/// ```")) {
            missing.push(format!("{of}::{}", rest.split(['(', '<']).next().unwrap_or_default()));
        }
    }
    (missing, all)
}

#[test]
fn every_method_that_people_type_has_an_example() {
    let (mut missing, mut all) = (Vec::new(), 0);
    for source in read_all(top(), "src") {
        let text = fs::read_to_string(top().join(&source.file)).expect("it was just read");
        let (without, count) = without_example(&text);
        missing.extend(without);
        all += count;
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(all > TYPED.len() * 10, "only {all} methods were found");
    let sample =
        "impl Fence {\n    /// A number.\n    #[must_use]\n    pub const fn get(self) -> u64 {\n    }\n}\n";
    assert_eq!(without_example(sample), (vec!["Fence::get".to_owned()], 1));
    let shown = sample.replace("A number.", "A number.\n    ///\n    /// ```\n    /// get();\n    /// ```");
    assert_eq!(without_example(&shown), (vec![], 1));
    assert_eq!(without_example(&sample.replace("Fence", "fmt::Debug for Fence")), (vec![], 0));
}

/// The feature `serde`.
#[cfg(feature = "serde")]
mod values_as_text {
    use std::fmt::Debug;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use serde_json::{Value, json};
    use syncguard::{
        AdvisoryKey, AdvisoryLost, Backoff, CancelToken, CloseReport, Counts, ErrorCode, ExtendResult, Fence,
        Finding, Heartbeat, Jitter, LockBackend, LockEvent, Lookup, LostReason, MarkReset, MemoryBackend,
        Operation, Reason, ReleaseResult, ReleaseSource, Severity, SlotKind, TelemetryOptions,
        with_telemetry,
    };

    /// One value, there and back again.
    #[track_caller]
    fn is<T>(value: &T, text: Value)
    where
        T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + Debug,
    {
        assert_eq!(serde_json::to_value(value).unwrap(), text);
        assert_eq!(serde_json::from_value::<T>(text).unwrap(), *value);
    }

    #[test]
    fn values_have_the_names_of_every_syncguard_client() {
        let fence = Fence::new(42).unwrap();
        is(&fence, json!("000000000000042"));
        is(&ErrorCode::AcquisitionTimeout, json!("AcquisitionTimeout"));
        is(&Operation::IsLocked, json!("isLocked"));
        is(&Reason::NotFound, json!("not-found"));
        is(&LostReason::TakenOver { fence }, json!({"taken_over": {"fence": "000000000000042"}}));
        is(&AdvisoryLost::Connection, json!("connection"));
        is(&ReleaseSource::Helper, json!("helper"));
        is(&ReleaseResult::NotHeld, json!("not_held"));
        is(&ExtendResult::Extended { expires_at_ms: 7 }, json!({"extended": {"expires_at_ms": 7}}));
        is(&AdvisoryKey::from_i64(-7), json!(-7));
        is(&AdvisoryKey::from_pair(1, -2), json!([1, -2]));
        is(&(Backoff::Fixed, Jitter::Full, Heartbeat::Off), json!(["fixed", "full", "off"]));
        is(&Heartbeat::Every(Duration::from_secs(3)), json!({"every": {"secs": 3, "nanos": 0}}));
        let report = serde_json::to_value(CloseReport::default()).unwrap();
        assert_eq!(report["pending"], json!(0));
        is(
            &(SlotKind::Every, MarkReset::Reset(7), Severity::Unsafe),
            json!(["every", {"reset": 7}, "unsafe"]),
        );
        let finding = json!({"severity": "slow", "code": "pooler", "seen": "s", "meaning": "m", "mend": "c"});
        let line = serde_json::from_value::<Finding>(finding.clone()).unwrap();
        assert_eq!(
            (line.to_string().as_str(), line.code.as_ref()),
            ("slow pooler: s; m; mend with: c", "pooler")
        );
        assert_eq!(serde_json::to_value(line).unwrap(), finding);
        let counts = json!({"live": 1, "expired": 2, "counters": 3});
        assert_eq!(serde_json::from_value::<Counts>(counts).unwrap().expired, 2);
    }

    #[test]
    fn what_no_client_wrote_is_refused() {
        for text in ["\"42\"", "42", "\"00000000000004x\""] {
            assert!(serde_json::from_str::<Fence>(text).is_err(), "{text}");
        }
        assert!(serde_json::from_str::<ErrorCode>("\"acquisition_timeout\"").is_err());
    }

    #[test]
    fn neither_events_nor_look_ups_hold_a_raw_key_or_id() {
        let events: Arc<Mutex<Vec<LockEvent>>> = Arc::default();
        let sink = Arc::clone(&events);
        let options = TelemetryOptions::new(move |event| sink.lock().unwrap().push(event.clone()));
        let backend = with_telemetry(MemoryBackend::manual(), options.include_raw(true));
        let never = CancelToken::never();
        let lease = backend.acquire("MARKER", Duration::from_secs(30), &never).unwrap().acquired().unwrap();
        let found = backend.lookup(Lookup::Key("MARKER"), &never).unwrap().unwrap();
        assert!(backend.handle().flush(Duration::from_secs(30)));

        let events = events.lock().unwrap().clone();
        assert!(events.iter().any(|event| event.key.as_deref() == Some("MARKER")), "{events:?}");
        let text = serde_json::to_string(&(&events, &found)).unwrap();
        assert!(text.contains(&syncguard::hash_key("MARKER")), "{text}");
        for secret in ["MARKER", lease.lock_id.as_str()] {
            assert!(!text.contains(secret), "{text}");
        }
        is(&found, serde_json::to_value(&found).unwrap());
        let back: LockEvent = serde_json::from_value(serde_json::to_value(&events[0]).unwrap()).unwrap();
        assert_eq!(
            (back.operation, back.key_hash, back.key),
            (Operation::Acquire, events[0].key_hash.clone(), None)
        );
    }
}
