//! Names, rows, paths and configuration that somebody chose who means no good: they are refused, or
//! they are data. They are never a part of a statement, and never a panic.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod names;
mod path;
mod rows;
mod supply;

use crate::support::calls::{FORMS, token};
use crate::support::{LIMIT, Server, TTL, TestSchema, place, server, unique};
use postgres::{Config, NoTls};
use syncguard::{ErrorCode, LockBackend, Lookup, PgLockClient, PgLockClientBuilder, Result};

fn connect(builder: PgLockClientBuilder, config: Config) -> Result<PgLockClient> {
    builder.connect_with(config, NoTls)
}

/// Every operation on the key, in both forms; the answers must be those of a lock that works.
#[track_caller]
fn works(client: &PgLockClient, key: &str, what: &str) {
    for two in FORMS {
        let token = token(two);
        let grant = LockBackend::acquire(client, key, TTL, &token)
            .unwrap_or_else(|error| panic!("{what}: {error:?}"))
            .acquired()
            .unwrap_or_else(|| panic!("{what}: a free key was refused"));
        assert!(LockBackend::acquire(client, key, TTL, &token).unwrap().acquired().is_none(), "{what}");
        assert!(LockBackend::is_locked(client, key, &token).unwrap(), "{what}");
        let found = client.lookup_raw(Lookup::LockId(&grant.lock_id), &token).unwrap().unwrap();
        assert_eq!(found.fence, grant.fence, "{what}");
        LockBackend::extend(client, &grant.lock_id, TTL, &token).unwrap();
        LockBackend::release(client, &grant.lock_id, &token).unwrap();
    }
    let guard = client.lock(key).unwrap_or_else(|error| panic!("{what}: {error:?}"));
    assert!(guard.is_held(), "{what}");
    assert_eq!(client.operator().holders(10).unwrap().len(), 1, "{what}");
    drop(guard);
    assert_eq!(client.operator().counts().unwrap().live, 0, "{what}");
    client.operator().break_lock(key, "a test").unwrap();
    client.operator().cleanup_expired(10).unwrap();
}
