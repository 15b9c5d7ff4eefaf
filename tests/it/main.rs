//! The library against a real PostgreSQL server.
//!
//! | file | what it shows |
//! | --- | --- |
//! | `advisory` | Session locks on a real server: who gets them, how they end, what they leave behind. |
//! | `advisory_limits` | Many session locks: thousands of keys and tries, a hundred and fifty guards, a lock table that is full, and |
//! | `advisory_poolers` | Session locks through a real pooler: refused where sessions are shared, taken where they are not. |
//! | `advisory_refusals` | Where session locks are refused, as they would exclude nobody; and what they do not need. |
//! | `advisory_sql` | The SQL helpers: they agree with the library, say what they do, and come and go without a trace. |
//! | `advisory_standby` | Session locks and a physical standby: refused there, gone with a failover, and told so. |
//! | `advisory_storm` | Session locks under everything at once: short deadlines, releases, drops of every kind, terminated |
//! | `advisory_waiting` | Session locks under contention: turns, waits and how they end, and what many of them leave behind. |
//! | `altered_tables` | Tables and databases that somebody has changed: each error names what is in the way, and what to do. |
//! | `c_interface` | The C interface as programs in C use it, with AddressSanitizer: locks, callbacks, forks, endings. |
//! | `busy_rows` | Rows that somebody else has locked: a batch of renewals passes over them. |
//! | `cancellation` | A token ends every wait and nothing else: not a commit that is under way, not a release. |
//! | `collations` | A collation that changes under the indexes: tables of ours do not depend on it, and others are |
//! | `compat_typescript` | Beside the TypeScript SyncGuard, which shares the tables: its rows are ours and ours are its, and |
//! | `concurrency` | One holder per key and ever greater fences, whoever comes from wherever at the same time. |
//! | `contract_postgres` | The contract of a backend, on PostgreSQL: the plain client, one with telemetry, one on a caller's |
//! | `edges` | The rule of liveness at its edge, to the millisecond, on PostgreSQL: with a server whose clock stands |
//! | `election` | Leader election on a real server: handovers, crashes, restarts, lost answers, fenced terms. |
//! | `environments` | Nothing that a session carries changes an answer: the contract, a renewal, a session lock, the |
//! | `examples` | The examples do what they say, on a real server and as real processes. |
//! | `fast_paths` | Statements that are called often, which the driver prepares itself: what is true of a call must be |
//! | `fences` | Fence counters: one per key, never lower, never beyond the limit, whatever fails. |
//! | `grants` | The rights of `docs/security.md`, as they stand there: each role can do its work with them, and |
//! | `guards` | What a guard does while it lives: it is renewed, it notices that its lease is lost, it lets go. |
//! | `holding` | How long a lock is held: heartbeats, min_hold, max_hold, leases without a guard. |
//! | `idle_connections` | Idle connections that lead nowhere, or to a standby; places of a caller's pool that come free without a word. |
//! | `limits` | The ends of every range: times, keys, counters, rows that nobody should have written. |
//! | `line_rows` | Rows of others that differ in one thing: by what a place in line is counted, and what a grant in turn does to tickets. |
//! | `locking` | Waiting for a lock, and how long it is held: the options, one by one and together. |
//! | `losses` | Leases that are lost, how their holders learn it, and troubles that lose none. |
//! | `member_rows` | Rows of others that differ in one thing: by what a reader joins, leaves and ends its group. |
//! | `members_table` | The optional table of members: made where it is asked for, named after the others, checked as they are. |
//! | `metrics` | The example that shows metrics: what it exports, what the dashboard asks for, and what the manual lists are the |
//! | `once` | Jobs that run once per slot, on a real server: who runs, what is marked, and what a crash, a lost lease |
//! | `operators` | What operators see, and the two ways to take rows away. |
//! | `owners` | Owners and notes on a real server: who has a key, in the holder's own words, and never in another's. |
//! | `permits` | Semaphores: at most so many holders at a time, whatever happens to them, and each of them with a |
//! | `pools` | Connections: our own pool, a caller's, and servers that refuse, restart or say nothing. |
//! | `protocol_races` | Races between two sessions, in every order that matters, with pauses that a test decides. |
//! | `python` | The binding for Python, with its own tests: signals at any moment, threads, forks, the end of a program. |
//! | `readers` | Readers under faults: without a right, killed, paused, cut off, with answers that are lost and changes that come in between. |
//! | `schema_setup` | How the two tables come to be: by the library, by a migration, by twenty processes at once. |
//! | `security` | Names, rows, paths and configuration that somebody chose who means no good: they are refused, or |
//! | `sequences` | Random histories of a few clients on a few keys, played on PostgreSQL and on the backend in memory, |
//! | `server_settings` | The library on servers, roles and pools that are set up in ways it did not choose. |
//! | `several` | Several keys at once on a real server: all or none in one message, ordinary rows, fenced together. |
//! | `several_hosts` | Lists of hosts: silent ones, sockets beside TCP, standbys, and names without a name server. |
//! | `shared` | Shared leases on a real server: many readers or one writer, whoever comes, dies, is broken or knows nothing of it. |
//! | `swallowed_changes` | Triggers that swallow a change: a row that was found and not changed is an error that says so, and |
//! | `turns` | Waiting in order on a real server: whoever asks for it is served first come, first served, whoever dies or gives up |

use syncguard_test_support as support;

mod advisory;
mod advisory_limits;
mod advisory_poolers;
mod advisory_refusals;
mod advisory_sql;
mod advisory_standby;
mod advisory_storm;
mod advisory_waiting;
mod altered_tables;
mod busy_rows;
mod c_interface;
mod cancellation;
mod changed_rows;
mod check;
mod collations;
mod compat_typescript;
mod concurrency;
mod contract_postgres;
mod edges;
mod election;
mod engines;
mod environments;
mod examples;
mod fast_paths;
mod fences;
mod grants;
mod guards;
mod holding;
mod idle_connections;
mod limits;
mod line_rows;
mod locking;
mod losses;
mod member_rows;
mod members_table;
mod metrics;
mod once;
mod operators;
mod owners;
mod permits;
mod pools;
mod protocol_races;
mod python;
mod readers;
mod schema_setup;
mod security;
mod sequences;
mod server_settings;
mod several;
mod several_hosts;
mod shared;
mod swallowed_changes;
mod turns;
