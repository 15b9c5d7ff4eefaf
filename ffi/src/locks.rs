//! Taking one key, as a writer or as a reader, several, or a permit.

use std::ffi::c_char;
use std::sync::Arc;

use syncguard::{LockError, LockGuard, LockOptions, MultiGuard, PgLockClient};

use crate::answers::{SYNCGUARD_LOCKED, SYNCGUARD_OK};
use crate::client::syncguard_client;
use crate::errors::{invalid, shielded};
use crate::guard::{Held, syncguard_guard};
use crate::options::{basic, chosen, syncguard_options};
use crate::pointers::{borrow, clear, give, text, texts};
use crate::watch::Watch;

/// Takes a lock with these options and gives its guard.
///
/// # Safety
/// A variable that may be written, and not NULL.
unsafe fn taken(
    out: *mut *mut syncguard_guard,
    options: LockOptions,
    take: impl FnOnce(&LockOptions) -> Result<Option<Held>, LockError>,
) -> Result<i32, LockError> {
    let watch = Arc::new(Watch::new());
    let there = Arc::clone(&watch);
    let options = options.on_lost(move |reason| there.fire(reason));
    let Some(held) = take(&options)? else { return Ok(SYNCGUARD_LOCKED) };
    // SAFETY: what the caller promises.
    unsafe { give(out, syncguard_guard::new(held, watch)) };
    Ok(SYNCGUARD_OK)
}

/// Takes one key with options, or tries to.
///
/// # Safety
/// NULL, or handles that have not been freed, a text and C's variable.
unsafe fn one(
    client: *const syncguard_client,
    key: *const c_char,
    options: *const syncguard_options,
    out: *mut *mut syncguard_guard,
    take: fn(&PgLockClient, &str, &LockOptions) -> Result<Option<LockGuard>, LockError>,
) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: what the caller promises.
        let (client, key, options) =
            unsafe { (borrow(client, "client")?, text(key, "key")?, chosen(options)?) };
        let lock = |options: &LockOptions| Ok(take(&client.0, key, options)?.map(Held::One));
        // SAFETY: `clear` found it not NULL.
        unsafe { taken(out, options, lock) }
    })
}

type TakesSeveral = fn(&PgLockClient, &[&str], &LockOptions) -> Result<Option<MultiGuard>, LockError>;

/// The same for several.
///
/// # Safety
/// NULL, or handles that have not been freed, `count` texts and C's variable.
unsafe fn several(
    client: *const syncguard_client,
    (keys, count): (*const *const c_char, usize),
    options: *const syncguard_options,
    out: *mut *mut syncguard_guard,
    take: TakesSeveral,
) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: what the caller promises.
        let (client, keys, options) =
            unsafe { (borrow(client, "client")?, texts(keys, count, "keys")?, chosen(options)?) };
        let lock = |options: &LockOptions| Ok(take(&client.0, &keys, options)?.map(Held::Several));
        // SAFETY: `clear` found it not NULL.
        unsafe { taken(out, options, lock) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_lock(
    client: *const syncguard_client,
    key: *const c_char,
    ttl_ms: u64,
    timeout_ms: u64,
    out: *mut *mut syncguard_guard,
) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: a handle that has not been freed and a text, or NULL, by the header's rules.
        let (client, key) = unsafe { (borrow(client, "client")?, text(key, "key")?) };
        let lock = |options: &LockOptions| client.0.lock_with(key, options).map(Held::One).map(Some);
        // SAFETY: `clear` found it not NULL.
        unsafe { taken(out, basic(ttl_ms, timeout_ms), lock) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_lock_with(
    client: *const syncguard_client,
    key: *const c_char,
    options: *const syncguard_options,
    out: *mut *mut syncguard_guard,
) -> i32 {
    // SAFETY: by the header's rules.
    unsafe { one(client, key, options, out, |client, key, options| client.lock_with(key, options).map(Some)) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_try_lock(
    client: *const syncguard_client,
    key: *const c_char,
    ttl_ms: u64,
    out: *mut *mut syncguard_guard,
) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: a handle that has not been freed and a text, or NULL, by the header's rules.
        let (client, key) = unsafe { (borrow(client, "client")?, text(key, "key")?) };
        let lock = |options: &LockOptions| Ok(client.0.try_lock_with(key, options)?.map(Held::One));
        // SAFETY: `clear` found it not NULL.
        unsafe { taken(out, basic(ttl_ms, 0), lock) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_try_lock_with(
    client: *const syncguard_client,
    key: *const c_char,
    options: *const syncguard_options,
    out: *mut *mut syncguard_guard,
) -> i32 {
    // SAFETY: by the header's rules.
    unsafe { one(client, key, options, out, PgLockClient::try_lock_with) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_read_lock(
    client: *const syncguard_client,
    key: *const c_char,
    options: *const syncguard_options,
    out: *mut *mut syncguard_guard,
) -> i32 {
    // SAFETY: by the header's rules.
    unsafe {
        one(client, key, options, out, |client, key, options| client.read_lock_with(key, options).map(Some))
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_try_read_lock(
    client: *const syncguard_client,
    key: *const c_char,
    options: *const syncguard_options,
    out: *mut *mut syncguard_guard,
) -> i32 {
    // SAFETY: by the header's rules.
    unsafe { one(client, key, options, out, PgLockClient::try_read_lock_with) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_lock_all(
    client: *const syncguard_client,
    keys: *const *const c_char,
    count: usize,
    options: *const syncguard_options,
    out: *mut *mut syncguard_guard,
) -> i32 {
    let take = |client: &PgLockClient, keys: &[&str], options: &LockOptions| {
        client.lock_all_with(keys, options).map(Some)
    };
    // SAFETY: by the header's rules.
    unsafe { several(client, (keys, count), options, out, take) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_try_lock_all(
    client: *const syncguard_client,
    keys: *const *const c_char,
    count: usize,
    options: *const syncguard_options,
    out: *mut *mut syncguard_guard,
) -> i32 {
    let take =
        |client: &PgLockClient, keys: &[&str], options: &LockOptions| client.try_lock_all_with(keys, options);
    // SAFETY: by the header's rules.
    unsafe { several(client, (keys, count), options, out, take) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_acquire_permit(
    client: *const syncguard_client,
    name: *const c_char,
    limit: u32,
    options: *const syncguard_options,
    out: *mut *mut syncguard_guard,
) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: handles that have not been freed and a text, or NULL, by the header's rules.
        let (client, name, options) =
            unsafe { (borrow(client, "client")?, text(name, "name")?, chosen(options)?) };
        let semaphore = client.0.semaphore(name, limit)?;
        let acquire = |options: &LockOptions| semaphore.acquire_with(options).map(Held::One).map(Some);
        // SAFETY: `clear` found it not NULL.
        unsafe { taken(out, options, acquire) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_try_acquire_permit(
    client: *const syncguard_client,
    name: *const c_char,
    limit: u32,
    options: *const syncguard_options,
    out: *mut *mut syncguard_guard,
) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: handles that have not been freed and a text, or NULL, by the header's rules.
        let (client, name, options) =
            unsafe { (borrow(client, "client")?, text(name, "name")?, chosen(options)?) };
        let semaphore = client.0.semaphore(name, limit)?;
        let acquire = |options: &LockOptions| Ok(semaphore.try_acquire_with(options)?.map(Held::One));
        // SAFETY: `clear` found it not NULL.
        unsafe { taken(out, options, acquire) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_permits_in_use(
    client: *const syncguard_client,
    name: *const c_char,
    out: *mut u32,
) -> i32 {
    shielded(|| {
        // SAFETY: NULL or C's variable.
        let Some(out) = (unsafe { out.as_mut() }) else { return Err(invalid("out is NULL")) };
        *out = 0;
        // SAFETY: a handle that has not been freed and a text, or NULL, by the header's rules.
        let (client, name) = unsafe { (borrow(client, "client")?, text(name, "name")?) };
        // Any limit: all permits of the name are counted.
        *out = client.0.semaphore(name, 1)?.in_use()?;
        Ok(SYNCGUARD_OK)
    })
}
