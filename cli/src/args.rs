//! What can be said on the command line.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use syncguard::{Fence, LockOptions};

use crate::choices::{self, OnLost, Period, Wait};

const EXAMPLES: &str = "\
EXAMPLES
    syncguard run --key deploy --wait 5m -- ./deploy.sh     one at a time, on all machines
    syncguard run --key nightly --once daily -- ./invoices  once a day, on one of them
    syncguard status deploy                                 is it held, since when, how long yet
    syncguard list                                          everything that is held
    syncguard watch                                         the same, live

CONNECTION
    --url, or $SYNCGUARD_URL, or $DATABASE_URL, or libpq's variables ($PGHOST, $PGUSER and so on).
    Passwords may come from $PGPASSWORD or ~/.pgpass: one in --url can be read by others on this
    machine. TLS as in libpq: sslmode=verify-full&sslrootcert=FILE, or $PGSSLMODE and so on.
    All programs that share locks must use the same tables: name their schema with --schema if
    they connect as different roles.

EXIT CODES
    0   done                      64  wrong usage
    1   status: the key is free   69  the server cannot be used
        check: something is unsafe
    71  the system refused something, such as a process
    `run` and `elect` pass on the program's own code and add some: see `syncguard run --help`.";

const RUN_HELP: &str = "\
THE PROGRAM
    is executed directly, without a shell, in a process group of its own, and without the terminal
    as its input. In its environment are SYNCGUARD_KEY; SYNCGUARD_FENCE, 15 digits that grow with
    every grant of the key, for whatever it writes to; SYNCGUARD_LOCK_ID, which is a secret
    (not with --once); SYNCGUARD_PERMIT with --permits, and SYNCGUARD_SLOT with --once.
    SIGTERM, SIGINT, SIGHUP and SIGQUIT end the wait, and are passed on to the whole group.
    If syncguard itself is killed, the group is killed.

EXIT CODES
    The program's own, and 128 + N if signal N ended it. In addition:
    75   somebody else has the lock, and --wait is over (other code: --busy-code)
    76   the lock was lost, and the program was stopped (other code: --lost-code)
    64   wrong usage                 69   the server cannot be used
    71   the system refused something, such as a process
    126  the program cannot be run   127  it was not found
    With --once: 0 without starting the program if the slot is already done.";

const ELECT_HELP: &str = "\
THE PROGRAM
    runs while this process leads. When leadership is lost, it is stopped before another can lead,
    and the campaign begins again; when it ends by itself, so does `elect`, with its exit code.
    In its environment are SYNCGUARD_KEY and SYNCGUARD_FENCE, the number of the term. See
    `syncguard run --help` for everything else about programs, and for exit codes.";

// The headings of options. Those without one say what is locked, and for how long.
const PERIOD: &str = "Once per period";
const LOST: &str = "When the lock is lost, or somebody else has it";
const WHO: &str = "For people who ask who has it";
const SERVER: &str = "Server and output";

/// Locks on PostgreSQL that hold across threads, processes and machines.
#[derive(Debug, Parser)]
#[command(name = "syncguard", version, after_help = EXAMPLES, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) at: At,
    #[command(subcommand)]
    pub(crate) action: Action,
}

/// Which server, which tables, and how to answer. Before or after the subcommand.
#[derive(Args, Debug)]
pub(crate) struct At {
    /// The PostgreSQL server: postgresql://user@host/database
    #[arg(long, global = true, value_name = "URL", help_heading = SERVER)]
    pub(crate) url: Option<String>,
    /// The schema of the lock tables; without it the role's search_path decides
    #[arg(long, global = true, value_name = "NAME", env = "SYNCGUARD_SCHEMA", help_heading = SERVER)]
    pub(crate) schema: Option<String>,
    /// The lock table, if it is not syncguard_locks
    #[arg(long, global = true, value_name = "NAME", env = "SYNCGUARD_TABLE", hide_short_help = true, help_heading = SERVER)]
    pub(crate) table: Option<String>,
    /// The table of fence counters, if it is not syncguard_fence_counters
    #[arg(long, global = true, value_name = "NAME", env = "SYNCGUARD_FENCE_TABLE", hide_short_help = true, help_heading = SERVER)]
    pub(crate) fence_table: Option<String>,
    /// The table of readers, if it is not syncguard_members, or the lock table's name and _members
    #[arg(long, global = true, value_name = "NAME", env = "SYNCGUARD_MEMBERS_TABLE", hide_short_help = true, help_heading = SERVER)]
    pub(crate) members_table: Option<String>,
    /// Print JSON instead of tables
    #[arg(long, global = true, help_heading = SERVER)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Action {
    /// Run a program under a lock
    #[command(after_help = RUN_HELP)]
    Run(Run),
    /// Run a program while leading
    #[command(after_help = ELECT_HELP)]
    Elect(Elect),
    /// Whether a key is held: exit code 0 if it is, 1 if it is free
    Status(Status),
    /// What is held
    List(List),
    /// Who waits: how many clients for each key, or which sessions are stuck on one
    Waiters(Waiters),
    /// What is held, as a live table
    Watch(Watch),
    /// Take a key away from its holder, and raise its fencing token
    Break(Break),
    /// Delete rows of leases that expired long ago
    Cleanup(Cleanup),
    /// Create the tables, or say what is wrong with them
    Setup,
    /// Look for what makes locks unsafe or slow here: exit code 0 unless something is unsafe, then 1
    Check,
    /// Measure how long locks take on this server
    Bench(Bench),
    /// Print completions for a shell
    Completions(Completions),
    /// Print the manual page, or write all of them
    Man(Man),
}

#[derive(Args, Debug)]
pub(crate) struct Program {
    /// Time between the request to stop and SIGKILL when the lock is lost [default: a fifth of the ttl]
    #[arg(long, value_name = "DURATION", value_parser = choices::duration, help_heading = LOST)]
    pub(crate) grace: Option<Duration>,
    /// How long the lock outlives a crash of this machine; renewed while the program runs
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = choices::duration)]
    pub(crate) ttl: Duration,
    /// The exit code when the lock was lost
    #[arg(long, value_name = "N", default_value_t = crate::failure::LOST, help_heading = LOST)]
    pub(crate) lost_code: u8,
    /// Who runs it, in words: shown by `syncguard list` and others to everybody who asks who has the lock
    #[arg(long, value_name = "TEXT", env = "SYNCGUARD_OWNER", help_heading = WHO)]
    pub(crate) owner: Option<String>,
    /// What the lock is for, shown beside the owner
    #[arg(long, value_name = "TEXT", help_heading = WHO)]
    pub(crate) note: Option<String>,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub(crate) words: Vec<OsString>,
}

#[derive(Args, Debug)]
pub(crate) struct Run {
    /// What to lock: any text, 1 to 512 bytes
    #[arg(long, short)]
    pub(crate) key: String,
    /// How long to wait for it: 5m, `forever`, or 0 for one attempt
    #[arg(long, value_name = "DURATION", default_value = "forever", value_parser = choices::wait)]
    pub(crate) wait: Wait,
    /// Keep the key at least this long, even if the program ends sooner
    #[arg(long, value_name = "DURATION", value_parser = choices::duration, conflicts_with = "once")]
    pub(crate) min_hold: Option<Duration>,
    /// Let up to N run at a time: a permit of the semaphore KEY
    #[arg(long, value_name = "N", conflicts_with_all = ["once", "fair"])]
    pub(crate) permits: Option<u32>,
    /// Share KEY with others that use --shared, and with nobody else: many readers, or one writer
    #[arg(long, conflicts_with_all = ["once", "permits", "fair"])]
    pub(crate) shared: bool,
    #[command(flatten)]
    pub(crate) order: Order,
    /// Run once per period on all machines together: hourly, daily (from midnight UTC), weekly, 15m,
    /// or slot:NUMBER from your own calendar. It counts as run when it ended with exit code 0
    #[arg(long, value_name = "PERIOD", value_parser = choices::period, conflicts_with = "fair", help_heading = PERIOD)]
    pub(crate) once: Option<Period>,
    /// With --once: never start the program twice in a period, even if it fails or its machine dies
    #[arg(long, requires = "once", help_heading = PERIOD)]
    pub(crate) at_most_once: bool,
    /// What to do with the program when the lock is lost: `term` (SIGKILL after --grace), `kill`,
    /// `ignore`, or a command that asks it to stop, with its process group in SYNCGUARD_GROUP
    #[arg(long, value_name = "WHAT", default_value = "term", value_parser = choices::on_lost, help_heading = LOST)]
    pub(crate) on_lost: OnLost,
    /// The exit code when somebody else has the lock
    #[arg(long, value_name = "N", default_value_t = crate::failure::BUSY, help_heading = LOST)]
    pub(crate) busy_code: u8,
    #[command(flatten)]
    pub(crate) program: Program,
}

/// Whose turn it is.
#[derive(Args, Debug)]
pub(crate) struct Order {
    /// Be served in order among those with --fair: first come, first served, on all machines
    #[arg(long)]
    pub(crate) fair: bool,
    /// With --fair: greater numbers come first, and among equals the longest wait
    #[arg(long, value_name = "N", requires = "fair", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) priority: i32,
}

impl Order {
    pub(crate) fn of(&self, options: LockOptions) -> LockOptions {
        options.fair(self.fair).priority(self.priority)
    }
}

#[derive(Args, Debug)]
pub(crate) struct Elect {
    /// What to lead: all candidates name the same key
    #[arg(long, short)]
    pub(crate) key: String,
    /// As for `run`: `term`, `kill`, or a command
    #[arg(long, value_name = "WHAT", default_value = "term", value_parser = choices::on_lost, help_heading = LOST)]
    pub(crate) on_lost: OnLost,
    #[command(flatten)]
    pub(crate) order: Order,
    #[command(flatten)]
    pub(crate) program: Program,
}

#[derive(Args, Debug)]
pub(crate) struct Status {
    pub(crate) key: String,
}

#[derive(Args, Debug)]
pub(crate) struct List {
    /// Show at most this many
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub(crate) limit: u32,
}

#[derive(Args, Debug)]
pub(crate) struct Waiters {
    /// Show which sessions wait for this key inside the server, and what blocks them
    pub(crate) key: Option<String>,
    /// Show waiters with --fair, in the order in which they are served: the first of each process
    #[arg(long, conflicts_with = "key")]
    pub(crate) fair: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Watch {
    /// How often the server is asked
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = choices::duration)]
    pub(crate) every: Duration,
}

#[derive(Args, Debug)]
pub(crate) struct Bench {
    /// How long each of the four measurements lasts
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = choices::duration)]
    pub(crate) time: Duration,
}

#[derive(Args, Debug)]
pub(crate) struct Completions {
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Args, Debug)]
pub(crate) struct Man {
    /// Write the pages of syncguard and of each subcommand into this directory
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<std::path::PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct Break {
    pub(crate) key: String,
    /// The fencing token of the lease to take away, as `status` shows it: a newer holder is not affected
    #[arg(long, value_name = "N", value_parser = choices::fence)]
    pub(crate) fence: Fence,
    /// KEY is a semaphore, and this is the number of the permit
    #[arg(long, value_name = "N")]
    pub(crate) permit: Option<u32>,
}

#[derive(Args, Debug)]
pub(crate) struct Cleanup {
    /// How many rows are deleted in one transaction
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) batch: u32,
}
