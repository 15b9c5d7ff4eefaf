//! The command `syncguard`, as real processes on a real server.
//!
//! | file | what it shows |
//! | --- | --- |
//! | `endings` | statuses, signals, and what is left when something is killed |
//! | `losses` | programs end before their lease does |
//! | `waits` | busy keys, waits and their interruption, permits, `--min-hold` |
//! | `periods` | `--once` |
//! | `leaders` | `elect` |
//! | `encrypted` | TLS and passwords, by URL and by libpq's variables |
//! | `page` | docs/command.md shows what is printed |
//! | `answers` | what the other commands print, and their exit codes |
//! | `terminal` | what is seen in a terminal: progress, `watch` |

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test says by a panic what it did not expect")]

mod answers;
mod encrypted;
mod endings;
mod leaders;
mod losses;
mod page;
mod periods;
mod program;
mod terminal;
mod waits;

use syncguard_test_support as support;

type Done = Result<(), Box<dyn std::error::Error>>;
