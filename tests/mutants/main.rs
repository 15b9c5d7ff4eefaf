//! Which parts of the library's SQL a test would miss. Each conjunct and alternative of a condition, each row lock, `SKIP
//! LOCKED`, `ORDER BY`, `LIMIT` and `OFFSET` of each statement is taken out in turn, by a proxy between the tests and
//! their server, and the tests that send this statement are run until one fails. `scripts/mutants sql` runs all of them;
//! without it one statement's show that this works.
//!
//! | file | what it shows |
//! | --- | --- |
//! | `grammar` | the parts of a statement |
//! | `mutant` | a statement without one of them, and how it is put in the place of the whole one |
//! | `tests` | the tests that kill, which statements each of them sends, and how long it takes |
//! | `run` | one mutant after the other |
//! | `survivors` | those that no test kills, with the reason |
//!
//! `one_build.py` is for the Rust code: `scripts/mutants code` runs it.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test says by a panic what it did not expect"
)]
#![allow(unreachable_pub, clippy::print_stdout, reason = "one program of several modules")]

use syncguard_test_support as support;

mod grammar;
mod mutant;
mod run;
mod survivors;
mod tests;
