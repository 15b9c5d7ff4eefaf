//! What the fuzz targets check. `tests/pure/security_fuzz.rs` runs the same on random input.
//!
//! Each takes any bytes, and panics if the library does something that it must not do. Nothing here
//! talks to a server.

use std::error::Error;
use std::fmt::Write as _;
use std::time::Duration;

use syncguard::{
    AcquireResult, AdvisoryKey, BACKEND_LIMIT_POSTGRES, CancelToken, ErrorCode, Fence, LockBackend,
    LockError, Lookup, MAX_KEY_LENGTH_BYTES, MemoryBackend, PgLockClient, hash_key, make_fence_key,
    make_storage_key, normalize_and_validate_key, validate_lock_id,
};

const PASSWORD: &str = "PASSWORDpassword";

/// Three texts and a number, of any bytes.
fn parts(data: &[u8]) -> (String, String, String, usize) {
    let (number, rest) = data.split_at(data.len().min(2));
    let number = number.iter().fold(0, |sum, byte| sum * 256 + usize::from(*byte));
    let text = String::from_utf8_lossy(rest);
    let mut pieces = text.splitn(3, '\u{1}').map(str::to_owned);
    let mut next = || pieces.next().unwrap_or_default();
    (next(), next(), next(), number)
}

/// An error as people print it: itself and its causes.
fn shown(error: &LockError) -> String {
    let mut text = String::new();
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(cause) = next {
        let _ = write!(text, "{cause} {cause:?} {cause:#?} ");
        next = cause.source();
    }
    text
}

/// A refusal says what is wrong without saying what it was.
#[track_caller]
fn refused(error: &LockError, secret: &str) {
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{}", shown(error));
    // Plain text may be a piece of the message: a fuzzer learns it.
    assert!(
        secret.is_ascii() || secret.len() < 24 || !shown(error).contains(secret),
        "the text is in its own refusal"
    );
}

/// Keys, lock ids and fences: every text is taken in full, or refused.
pub fn keys(data: &[u8]) {
    let (key, prefix, text, number) = parts(data);
    match normalize_and_validate_key(&key) {
        Ok(normal) => {
            assert!(!normal.is_empty() && normal.len() <= MAX_KEY_LENGTH_BYTES && !normal.contains('\0'));
            assert_eq!(normalize_and_validate_key(&normal).unwrap(), normal, "normal is normal");
            whole_life(&key, &normal);
        }
        Err(error) => refused(&error, &key),
    }
    // Of any size, limits and reserves too.
    for (limit, reserve) in
        [(BACKEND_LIMIT_POSTGRES, 0), (number, number / 3), (number, usize::MAX), (usize::MAX, number)]
    {
        if let Ok(stored) = make_storage_key(&prefix, &key, limit, reserve) {
            assert!(
                stored.len() <= limit.saturating_sub(reserve),
                "{} bytes of {limit} - {reserve}",
                stored.len()
            );
            assert_eq!(make_storage_key(&prefix, &key, limit, reserve).unwrap(), stored, "always the same");
            if let Ok(fence_key) = make_fence_key(&prefix, &stored, limit, reserve) {
                assert!(fence_key.len() <= limit.saturating_sub(reserve));
                assert_ne!(fence_key, stored);
            }
        }
    }
    let label = hash_key(&key);
    assert!(label.is_ascii() && label.len() == 24 && label == hash_key(&key));
    let one = AdvisoryKey::from_text(&key);
    assert_eq!(AdvisoryKey::from_i64(one.as_i64().unwrap()), one);
    match AdvisoryKey::namespaced(&prefix, &key) {
        Ok(spaced) => assert!(spaced.as_i64().is_some() && !prefix.contains(':')),
        Err(error) => refused(&error, &prefix),
    }
    match validate_lock_id(&text) {
        Ok(()) => assert!(
            text.len() == 22 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        ),
        Err(error) => refused(&error, &text),
    }
    match text.parse::<Fence>() {
        Ok(fence) => assert!(fence.to_string() == text && Fence::new(fence.get()) == Some(fence)),
        Err(error) => assert!(text.is_ascii() || text.len() < 24 || !error.to_string().contains(&text)),
    }
}

/// A valid key through all operations of the contract in memory.
fn whole_life(key: &str, normal: &str) {
    let (memory, token, ttl) = (MemoryBackend::manual(), CancelToken::never(), Duration::from_secs(1));
    let AcquireResult::Acquired(grant) = memory.acquire(key, ttl, &token).unwrap() else {
        panic!("it is free")
    };
    assert!(
        matches!(memory.acquire(normal, ttl, &token).unwrap(), AcquireResult::Locked),
        "one key, however it is written"
    );
    let found = memory.lookup_raw(Lookup::Key(key), &token).unwrap().unwrap();
    assert_eq!((found.key.as_str(), found.fence), (normal, grant.fence));
    let label = memory.lookup(Lookup::LockId(&grant.lock_id), &token).unwrap().unwrap();
    assert_eq!(label.key_hash, hash_key(normal));
    let debug = format!("{grant:?} {label:?} {found:?}");
    assert!(!debug.contains(&grant.lock_id) && (normal.len() < 24 || !debug.contains(normal)));
    memory.release(&grant.lock_id, &token).unwrap();
    assert!(!memory.is_locked(key, &token).unwrap());
}

/// Names of tables and schemas: plain, or refused, before anything is sent.
pub fn names(data: &[u8]) {
    let (table, fences, schema, chosen) = parts(data);
    let mut builder = PgLockClient::builder().auto_create_tables(false);
    if chosen & 1 == 0 {
        builder = builder.table_name(&table);
    }
    if chosen & 2 == 0 {
        builder = builder.fence_table_name(&fences);
    }
    if chosen & 4 == 0 {
        builder = builder.schema(&schema);
    }
    let table = if chosen & 1 == 0 { table.as_str() } else { "syncguard_locks" };
    let fences = if chosen & 2 == 0 { fences.as_str() } else { "syncguard_fence_counters" };
    let schema = if chosen & 4 == 0 { schema.as_str() } else { "plain" };
    let plain = |name: &str| {
        (1..=63).contains(&name.len())
            && !name.as_bytes().first().is_some_and(u8::is_ascii_digit)
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    };
    match builder.connect("host=127.0.0.1 port=1 user=nobody") {
        Ok(client) => {
            assert!(plain(table) && plain(fences) && plain(schema) && table != fences);
            assert!(!format!("{client:?}").contains("nobody"));
        }
        Err(error) => {
            assert!(!(plain(table) && plain(fences) && plain(schema)) || table == fences);
            [table, fences, schema].iter().for_each(|name| refused(&error, name));
        }
    }
}

/// Connection strings with a password somewhere: read, or refused, and never shown.
pub fn configuration(data: &[u8]) {
    let (before, after, middle, form) = parts(data);
    let text = match form % 6 {
        0 => before,
        1 => format!("{before}{PASSWORD}{after}"),
        2 => format!("postgresql://{before}:{PASSWORD}@{after}/{middle}"),
        3 => format!("postgresql://u:{before}{PASSWORD}{after}@h/d?{middle}"),
        4 => format!("host=h password={before}{PASSWORD}{after} {middle}"),
        _ => format!("{before}='{PASSWORD}{after}' host={middle}"),
    };
    match PgLockClient::builder().auto_create_tables(false).connect(&text) {
        Ok(client) => assert!(!format!("{client:?}").contains(PASSWORD)),
        Err(error) => {
            refused(&error, &text);
            assert!(!shown(&error).contains(PASSWORD), "{}", shown(&error));
        }
    }
}
