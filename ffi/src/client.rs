//! Clients.

use std::ffi::c_char;
use std::ptr;
use std::time::Duration;

use syncguard::{LockError, PgLockClient, PgLockClientBuilder};

use crate::answers::{SYNCGUARD_NETWORK_TIMEOUT, SYNCGUARD_OK};
use crate::errors::{remember, shielded};
use crate::options::check_reserved;
use crate::pointers::{borrow, clear, free, give, optional_text, text};

/// A client, opaque to C.
pub struct syncguard_client(pub(crate) PgLockClient);

/// See the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct syncguard_client_options {
    /// See the header.
    pub schema: *const c_char,
    /// See the header.
    pub table_name: *const c_char,
    /// See the header.
    pub fence_table_name: *const c_char,
    /// See the header.
    pub connection_timeout_ms: u64,
    /// See the header.
    pub operation_timeout_ms: u64,
    /// See the header.
    pub max_connections: u32,
    /// See the header.
    pub existing_tables_only: u32,
    /// See the header.
    pub members_table_name: *const c_char,
    /// See the header.
    pub owner: *const c_char,
    /// Zero: for what may be chosen later.
    pub reserved: [u64; 2],
}

impl syncguard_client_options {
    const DEFAULT: Self = Self {
        schema: ptr::null(),
        table_name: ptr::null(),
        fence_table_name: ptr::null(),
        connection_timeout_ms: 0,
        operation_timeout_ms: 0,
        max_connections: 0,
        existing_tables_only: 0,
        members_table_name: ptr::null(),
        owner: ptr::null(),
        reserved: [0; 2],
    };

    /// # Safety
    /// Its texts are NULL, or end with a zero byte and stay as they are during the call.
    unsafe fn builder(&self) -> Result<PgLockClientBuilder, LockError> {
        check_reserved(&self.reserved, "syncguard_client_options")?;
        let mut builder = PgLockClient::builder().auto_create_tables(self.existing_tables_only == 0);
        // SAFETY: what the caller promises; so are the others.
        if let Some(schema) = unsafe { optional_text(self.schema, "schema") }? {
            builder = builder.schema(schema);
        }
        // SAFETY: as above.
        if let Some(name) = unsafe { optional_text(self.table_name, "table_name") }? {
            builder = builder.table_name(name);
        }
        // SAFETY: as above.
        if let Some(name) = unsafe { optional_text(self.fence_table_name, "fence_table_name") }? {
            builder = builder.fence_table_name(name);
        }
        // SAFETY: as above.
        if let Some(name) = unsafe { optional_text(self.members_table_name, "members_table_name") }? {
            builder = builder.members_table_name(name);
        }
        // SAFETY: as above.
        if let Some(owner) = unsafe { optional_text(self.owner, "owner") }? {
            builder = builder.owner(owner);
        }
        if self.connection_timeout_ms > 0 {
            builder = builder.connection_timeout(Duration::from_millis(self.connection_timeout_ms));
        }
        if self.operation_timeout_ms > 0 {
            builder = builder.operation_timeout(Duration::from_millis(self.operation_timeout_ms));
        }
        if self.max_connections > 0 {
            builder = builder.max_connections(self.max_connections);
        }
        Ok(builder)
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_client_connect(
    url: *const c_char,
    schema: *const c_char,
    out: *mut *mut syncguard_client,
) -> i32 {
    let options = syncguard_client_options { schema, ..syncguard_client_options::DEFAULT };
    // SAFETY: options of ours, and C's pointers.
    unsafe { syncguard_client_connect_with(url, &raw const options, out) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_client_connect_with(
    url: *const c_char,
    options: *const syncguard_client_options,
    out: *mut *mut syncguard_client,
) -> i32 {
    shielded(|| {
        // SAFETY: `out` is NULL or C's variable.
        unsafe { clear(out) }?;
        // SAFETY: NULL or text that ends with a zero byte, by the header's rules; so are all below.
        let url = unsafe { text(url, "url") }?;
        // SAFETY: NULL or C's struct.
        let options = unsafe { options.as_ref() }.unwrap_or(&syncguard_client_options::DEFAULT);
        // SAFETY: as above.
        let client = unsafe { options.builder() }?.connect(url)?;
        // SAFETY: `clear` found it not NULL.
        unsafe { give(out, syncguard_client(client)) };
        Ok(SYNCGUARD_OK)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_client_close(client: *const syncguard_client, deadline_ms: u64) -> i32 {
    shielded(|| {
        // SAFETY: NULL or a handle that has not been freed, by the header's rules.
        let client = unsafe { borrow(client, "client") }?;
        let report = client.0.close(Duration::from_millis(deadline_ms))?;
        if report.is_clean() {
            return Ok(SYNCGUARD_OK);
        }
        let leases = report.failed + report.pending + report.calls;
        remember(if leases > 0 {
            "something was left when the time was over: it stays held until its ttl is over"
        } else {
            "all locks are released, and the client's threads have not ended yet: raise deadline_ms, or close outside of a callback"
        });
        Ok(SYNCGUARD_NETWORK_TIMEOUT)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_client_free(client: *mut syncguard_client) {
    // SAFETY: NULL, or a handle of `give` that is freed once, by the header's rules.
    unsafe { free(client) };
}
