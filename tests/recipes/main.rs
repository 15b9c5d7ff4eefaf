//! The recipes of `docs/recipes.md`, run. Each file has the code of one, between two comments, as it stands on the page
//! (`tests/pure/recipes.rs` compares them), and below it the test that runs it.
//!
//! | file | what it shows |
//! | --- | --- |
//! | `batch_job` | A batch that one process works through, in fenced steps. |
//! | `from_async` | Locks in an async runtime, without a blocked executor. |
//! | `from_c` | A program in C. |
//! | `from_python` | A program in Python. |
//! | `http_service` | Requests that take turns, and the status of those that cannot. |
//! | `leader` | One leader, and its end. |
//! | `migrations` | Migrations by whoever starts first. |
//! | `nightly_job` | A job that runs once a day, with what it writes. |
//! | `own_tests` | A program's own tests, fenced writes included. |
//! | `patroni` | A cluster that fails over. |
//! | `pgbouncer` | A pooler in transaction mode. |
//! | `readers` | Readers beside a writer. |
//! | `shutdown` | An orderly end at SIGTERM. |
//! | `three_at_most` | Permits for three. |
//! | `transfer` | Two accounts at once. |
//! | `webhook` | Events that are delivered more than once. |

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test says by a panic what it did not expect"
)]

use syncguard_test_support as support;

mod batch_job;
mod from_async;
mod from_c;
mod from_python;
mod http_service;
mod leader;
mod migrations;
mod nightly_job;
mod own_tests;
mod patroni;
mod pgbouncer;
mod readers;
mod shutdown;
mod three_at_most;
mod transfer;
mod webhook;

/// A schema with accounts 7 and 9, each with 100.
fn bank() -> support::TestSchema {
    let schema = support::schema();
    let sql = "CREATE TABLE accounts (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL);
               INSERT INTO accounts VALUES (7, 100), (9, 100)";
    schema.client().batch_execute(sql).unwrap();
    schema
}

/// What a query answers with one number.
fn number(schema: &support::TestSchema, sql: &str) -> i64 {
    schema.client().query_one(sql, &[]).unwrap().get(0)
}

fn balance(schema: &support::TestSchema, account: i64) -> i64 {
    number(schema, &format!("SELECT balance FROM accounts WHERE id = {account}"))
}
