//! Which server, and which tables.

use std::env;

use syncguard::{PgLockClient, PgLockClientBuilder};

use crate::args::At;
use crate::failure::Failure;

/// The variables of libpq that say where to connect: without one of them, nothing is connected to by accident.
const WHERE_TO: [&str; 6] = ["PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE"];

/// A client for what changes something: makes the tables if they are not there.
pub(crate) fn connect(at: &At) -> Result<PgLockClient, Failure> {
    open(at, builder(at))
}

/// The same, which says who it is with each lock.
pub(crate) fn connect_as(at: &At, owner: Option<&str>) -> Result<PgLockClient, Failure> {
    let builder = builder(at);
    open(
        at,
        match owner {
            Some(owner) => builder.owner(owner),
            None => builder,
        },
    )
}

/// A client for what only looks: makes no tables.
pub(crate) fn look(at: &At) -> Result<PgLockClient, Failure> {
    open(at, builder(at).auto_create_tables(false))
}

fn builder(at: &At) -> PgLockClientBuilder {
    let mut builder = PgLockClient::builder();
    if let Some(name) = &at.schema {
        builder = builder.schema(name);
    }
    if let Some(name) = &at.table {
        builder = builder.table_name(name);
    }
    if let Some(name) = &at.fence_table {
        builder = builder.fence_table_name(name);
    }
    if let Some(name) = &at.members_table {
        builder = builder.members_table_name(name);
    }
    builder
}

fn open(at: &At, builder: PgLockClientBuilder) -> Result<PgLockClient, Failure> {
    let set = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
    let named = at.url.clone().or_else(|| set("SYNCGUARD_URL")).or_else(|| set("DATABASE_URL"));
    match named {
        Some(url) => Ok(builder.connect(&url)?),
        None if WHERE_TO.iter().any(|name| set(name).is_some()) => Ok(builder.connect_env()?),
        None => Err(Failure::Usage(
            "which PostgreSQL? Pass --url postgresql://user@host/database, or set SYNCGUARD_URL, DATABASE_URL or PGHOST"
                .to_owned(),
        )),
    }
}
