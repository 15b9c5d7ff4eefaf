//! The command `syncguard`: runs programs under locks on PostgreSQL, and shows who holds what.
//!
//! | module | what it does |
//! | --- | --- |
//! | `args`, `choices` | what can be said on the command line, and how its values are read |
//! | `connection` | which server, which tables |
//! | `failure` | how a command ends: exit codes, what standard error says |
//! | `run`, `once`, `elect` | a program under a lock, once per slot, while leading |
//! | `supervise` | a program from its start to its end, or the lock's |
//! | `child` | the processes of a program: its own group, and who ends it when this one is killed |
//! | `signals` | signals, as events |
//! | `progress` | what a wait says in a terminal |
//! | `show`, `watch` | status, list, waiters; a live table |
//! | `operate`, `check`, `bench` | break, cleanup, setup; what is unsafe here; how long locks take |
//! | `pages` | completions and manual pages |
//! | `output` | tables, JSON, ages |

mod args;
mod bench;
mod check;
mod child;
mod choices;
mod connection;
mod elect;
mod failure;
mod once;
mod operate;
mod output;
mod pages;
mod progress;
mod run;
mod show;
mod signals;
mod supervise;
mod watch;

use std::env;
use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Action, Cli};
use crate::failure::{Ended, USAGE};

fn main() -> ExitCode {
    // The two processes that `run` starts beside itself: neither reads options nor connects.
    if let Some(code) = child::run_as_helper(env::args_os().skip(1)) {
        return code;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(told) => {
            let code = if told.use_stderr() { USAGE } else { 0 };
            // A reader that has gone, as in `syncguard --help | head`, is no failure.
            let _ = told.print();
            return ExitCode::from(code);
        }
    };
    output::warnings_to_stderr();
    match dispatch(&cli) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => ExitCode::from(failure.tell()),
    }
}

fn dispatch(cli: &Cli) -> Ended {
    let at = &cli.at;
    match &cli.action {
        Action::Run(run) => run::run(at, run),
        Action::Elect(elect) => elect::elect(at, elect),
        Action::Status(status) => show::status(at, status),
        Action::List(list) => show::list(at, list),
        Action::Waiters(waiters) => show::waiters(at, waiters),
        Action::Watch(watch) => watch::watch(at, watch),
        Action::Break(request) => operate::break_lock(at, request),
        Action::Cleanup(cleanup) => operate::cleanup(at, cleanup),
        Action::Setup => operate::set_up(at),
        Action::Check => check::check(at),
        Action::Bench(bench) => bench::bench(at, bench),
        Action::Completions(shell) => pages::completions(shell),
        Action::Man(man) => pages::man(man),
    }
}
