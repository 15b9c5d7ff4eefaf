//! Every public type, printed while it holds secrets. A type that is new to the crate fails this test
//! until somebody has thought about it.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fmt::{Debug, Display};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{LIMIT, TTL, logs, wait_until};
use syncguard::backend::{Attempt, Clock, Renewal};
use syncguard::{
    AdvisoryKey, AdvisoryOptions, CancelToken, ClientSettings, ErrorCode, Fence, LockBackend, LockClient,
    LockError, LockOptions, Lookup, MemoryBackend, PgLockClient, Slot, TelemetryOptions, with_telemetry,
};

const KEY: &str = "MARKER-key@example.com";

/// Types that hold neither a key, nor a lock id, nor a connection: numbers, and words of ours.
const HARMLESS: &[&str] = &[
    "AdvisoryLost",
    "Backoff",
    "CLEANUP_GUARD_MS",
    "Clock",
    "ErrorCode",
    "EventResult",
    "Heard",
    "Heartbeat",
    "Jitter",
    "LockEnding",
    "LockKind",
    "LostReason",
    "MarkReset",
    "Moment",
    "OnHeard",
    "Operation",
    "Reason",
    "ReleaseSource",
    "Result",
    "Severity",
    "SlotKind",
    "TimeAuthority",
    "LockBackend",
    "CancelToken",
    "Capabilities",
    "Counts",
    "Operator",
    "Watch",
];

#[derive(Default)]
struct Shown(BTreeMap<&'static str, Vec<String>>);

impl Shown {
    fn debug(&mut self, name: &'static str, value: &dyn Debug) {
        self.0.entry(name).or_default().extend([format!("{value:?}"), format!("{value:#?}")]);
    }

    fn display(&mut self, name: &'static str, value: &dyn Display) {
        self.0.entry(name).or_default().extend([format!("{value}"), format!("{value:#}")]);
    }
}

/// The types that `lib.rs` exports.
fn public_types() -> Vec<String> {
    let source = include_str!("../../src/lib.rs");
    let uses = source.split("pub use ").skip(1).filter_map(|rest| rest.split(';').next());
    let names =
        uses.flat_map(|list| list.split(|c: char| !c.is_alphanumeric() && c != '_').map(str::to_owned));
    let is_type = |name: &String| {
        name.chars().next().is_some_and(char::is_uppercase) && name.chars().any(char::is_lowercase)
    };
    names.filter(is_type).collect()
}

/// Several keys, permits, terms and runs, on keys of their own.
fn other_capabilities(client: &PgLockClient, shown: &mut Shown) {
    let (set, term) = (format!("{KEY} set"), format!("{KEY} term"));
    let options = LockOptions::new();
    shown.debug("MultiGuard", &client.lock_all(&[&set]).unwrap());
    shown.debug("Semaphore", &client.semaphore(KEY, 2).unwrap());
    let led = client.elect(&term, &options, |led| {
        shown.debug("Term", led);
        shown.debug("Leader", &client.leader(&term).unwrap());
        ControlFlow::Break(())
    });
    led.unwrap();
    let slot = Slot::number(1);
    shown.debug("Slot", &slot);
    let ran = client.run_once(&format!("{KEY} run"), slot, &options, |run| {
        shown.debug("Run", run);
        Ok::<_, ()>(())
    });
    shown.debug("RunOnce", &ran.unwrap());
    shown.debug("JobMark", &client.operator().marks(10).unwrap());
}

#[test]
#[expect(clippy::too_many_lines, reason = "one run through every type there is")]
fn no_public_type_shows_a_key_a_lock_id_or_a_password() {
    let _alone = crate::support::alone();
    let mark = logs::exclusive();
    let mut shown = Shown::default();
    let schema = crate::support::schema();
    let url = schema.url().replace("postgres@", "postgres:MARKERpassword@");
    let events = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&events);
    let locks = Arc::new(Mutex::new(Vec::new()));
    let heard_locks = Arc::clone(&locks);
    let raw = TelemetryOptions::new(move |event| heard.lock().unwrap().push(event.clone()))
        .include_raw(true)
        .on_lock(move |lock| heard_locks.lock().unwrap().push(lock.clone()));
    shown.debug("TelemetryOptions", &raw);
    let failures = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&failures);
    let builder = PgLockClient::builder()
        .telemetry(raw.clone())
        .dispose_timeout(Duration::from_millis(100))
        .operation_timeout(Duration::from_secs(2))
        .on_release_error(move |_, context| told.lock().unwrap().push(context.clone()));
    shown.debug("PgLockClientBuilder", &builder);
    let client = builder.connect(&url).unwrap();
    shown.debug("PgLockClient", &client);
    shown.debug("LockClient", client.locks());
    shown.debug("TelemetryHandle", &client.telemetry());

    // Leases, with everything that speaks of them.
    let mut ids = Vec::new();
    let answer = client.acquire(KEY, TTL).unwrap();
    shown.debug("AcquireResult", &answer);
    let grant = answer.acquired().unwrap();
    ids.push(grant.lock_id.clone());
    shown.debug("Acquired", &grant);
    shown.debug("Fence", &grant.fence);
    shown.display("Fence", &grant.fence);
    for lookup in [Lookup::Key(KEY), Lookup::LockId(&grant.lock_id)] {
        shown.debug("Lookup", &lookup);
        shown.debug("LockInfo", &client.lookup(lookup).unwrap());
        shown.debug("LockInfoRaw", &client.lookup_raw(lookup, &CancelToken::never()).unwrap());
    }
    let deadline = Clock::system().now().after(LIMIT);
    shown.debug("Attempt", &Attempt::new(KEY, &grant.lock_id, TTL, deadline));
    let renewal = Renewal::new(KEY, &grant.lock_id, syncguard::Fence::new(1).unwrap(), TTL);
    shown.debug("Renewal", &renewal);
    shown.debug("RenewOutcome", &client.renew(&[renewal], deadline));
    shown.debug("ExtendResult", &client.extend(&grant.lock_id, TTL).unwrap());
    shown.debug(
        "ExtendOutcome",
        &LockBackend::extend(&client, &grant.lock_id, TTL, &CancelToken::never()).unwrap(),
    );
    shown.debug("BlockedSession", &client.operator().blocked(KEY).unwrap());
    shown.debug("Waiter", &client.operator().waiters(10).unwrap());
    let findings = client.operator().check().unwrap();
    assert!(!findings.is_empty());
    shown.debug("Finding", &findings);
    findings.iter().for_each(|finding| shown.display("Finding", finding));
    shown.debug("IdleCounter", &client.operator().idle_counters(TTL, 10).map_err(|error| error.to_string()));
    shown.debug("BrokenLock", &client.operator().break_lock(KEY, "a test").unwrap());
    shown.debug(
        "ReleaseOutcome",
        &LockBackend::release(&client, &grant.lock_id, &CancelToken::never()).unwrap(),
    );
    shown.debug("ReleaseResult", &client.release(&grant.lock_id).unwrap());
    let options = LockOptions::new().on_lost(|_| ()).on_release_error(|_, _| ()).cancel(&CancelToken::new());
    shown.debug("LockOptions", &options);
    let guard = client.lock(KEY).unwrap();
    ids.push(guard.lock_id().to_owned());
    shown.debug("LockGuard", &guard);
    other_capabilities(&client, &mut shown);

    // A release that fails.
    let mut stranger = schema.client();
    stranger.batch_execute("BEGIN; LOCK TABLE syncguard_locks").unwrap();
    drop(guard);
    stranger.batch_execute("ROLLBACK").unwrap();
    wait_until(LIMIT, "it is released all the same", || !client.is_locked(KEY).unwrap_or(true));
    let error = LockError::new(ErrorCode::Internal).with_key(KEY).with_lock_id(grant.lock_id.clone());
    let error = error.with_source(LockError::new(ErrorCode::Internal).with_key(KEY).with_message("m"));
    shown.debug("LockError", &error);
    shown.display("LockError", &error);

    // Session locks: the number is shown, as the server's own views show it, and not what it was made of.
    let key = AdvisoryKey::namespaced("MARKERspace", KEY).unwrap();
    shown.debug("AdvisoryKey", &key);
    shown.display("AdvisoryKey", &key);
    shown.debug("AdvisoryOptions", &AdvisoryOptions::new().cancel(&CancelToken::new()));
    let session = client.advisory_lock(&key).unwrap();
    shown.debug("AdvisoryGuard", &session);
    shown.debug("AdvisorySession", &client.advisory_holders().unwrap());
    drop(session);

    // In memory.
    let memory = MemoryBackend::new();
    let held = memory.acquire(KEY, TTL, &CancelToken::never()).unwrap().acquired().unwrap();
    ids.push(held.lock_id.clone());
    shown.debug("MemoryBackend", &memory);
    let observed = with_telemetry(memory, raw);
    shown.debug("Telemetry", &observed);
    let settings = ClientSettings::default();
    shown.debug("ClientSettings", &settings);
    shown.debug("LockClient", &LockClient::with_settings(Arc::new(observed), settings));

    shown.debug("CloseReport", &client.close(LIMIT).unwrap());
    let events = events.lock().unwrap();
    assert!(
        events.iter().any(|event| event.key.as_deref() == Some(KEY)),
        "the markers were there to be shown"
    );
    shown.debug("LockEvent", &*events);
    let locks = locks.lock().unwrap();
    assert!(!locks.is_empty(), "whole locks were told");
    shown.debug("LockSummary", &*locks);
    wait_until(LIMIT, "the failed release was told", || !failures.lock().unwrap().is_empty());
    shown.debug("ReleaseErrorContext", &*failures.lock().unwrap());

    for name in public_types() {
        let known = shown.0.contains_key(name.as_str()) || HARMLESS.contains(&name.as_str());
        assert!(known, "{name} is public, and nobody has looked whether it shows a secret");
    }
    let secrets: Vec<&str> = ids.iter().map(String::as_str).chain(["MARKER"]).collect();
    for (name, texts) in &shown.0 {
        for text in texts {
            for secret in &secrets {
                assert!(!text.contains(secret), "{name} shows {secret}: {text}");
            }
        }
    }
    mark.assert_without(&secrets);
    assert_eq!(Fence::new(7).unwrap().to_string().len(), 15);
}
