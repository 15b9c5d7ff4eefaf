//! A threaded HTTP server whose requests for one account take turns, however many servers run.
//!
//! ```text
//! SYNCGUARD_URL=postgresql://… cargo run --example threaded_server -- --port 8080
//! curl -X POST -d 5 localhost:8080/accounts/alice/deposits     # the new balance
//! curl localhost:8080/accounts/alice                           # the balance
//! ```
//!
//! Start it twice with two ports, and no deposit is lost. What to copy:
//! * [`App::deposit`]: lock, then work in a transaction that begins with `fence_transaction`;
//! * [`App::refuse`]: which error becomes which status;
//! * [`serve`]: shutting down, so that no lease is left behind.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example talks")]

use std::env;
use std::error::Error;
use std::io::{Read as _, Write as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use postgres::{Config, NoTls};
use r2d2_postgres::PostgresConnectionManager;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use syncguard::{CancelToken, ErrorCode, LockError, LockOptions, PgLockClient};
use tiny_http::{Header, Method, Request, Response, Server};

type AnyError = Box<dyn Error + Send + Sync>;
type Pool = r2d2::Pool<PostgresConnectionManager<NoTls>>;

const HELP: &str = "\
threaded_server: deposits to accounts, one at a time per account, over any number of servers

    SYNCGUARD_URL=postgresql://… threaded_server [--port N] [--threads N]

    --port N      port on 127.0.0.1; 0 takes a free one (default 0; the address is printed)
    --threads N   requests at the same time (default 8)

    GET  /accounts/NAME            the balance
    POST /accounts/NAME/deposits   adds the number in the body, returns the new balance

SIGTERM or Ctrl-C ends it: running requests are finished, locks are released.";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("threaded_server: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), AnyError> {
    let (mut port, mut threads) = (0_u16, 8_u32);
    let mut args = env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--port" => port = value()?.parse()?,
            "--threads" => threads = value()?.parse()?,
            "--help" => {
                println!("{HELP}");
                return Ok(());
            }
            _ => return Err(format!("unknown option {arg}; see --help").into()),
        }
    }
    let url = env::var("SYNCGUARD_URL").map_err(|_| "set SYNCGUARD_URL to a PostgreSQL; see --help")?;
    let server = Arc::new(Server::http(("127.0.0.1", port))?);
    let app = Arc::new(App::new(&url, threads)?);
    println!("listening on http://{}", server.server_addr());
    std::io::stdout().flush()?;
    serve(&server, &app, threads)
}

/// Serves until a signal, then ends in this order: no new requests, no new waits for locks, the
/// requests that run are finished, the lock client is closed.
fn serve(server: &Arc<Server>, app: &Arc<App>, threads: u32) -> Result<(), AnyError> {
    let workers: Vec<_> = (0..threads)
        .map(|_| {
            let (server, app) = (Arc::clone(server), Arc::clone(app));
            // `recv` fails once it is unblocked.
            thread::spawn(move || {
                while let Ok(request) = server.recv() {
                    app.answer(request);
                    if app.shutdown.is_cancelled() {
                        break;
                    }
                }
            })
        })
        .collect();

    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let _ = signals.forever().next();
    app.shutdown.cancel();
    for _ in &workers {
        server.unblock();
    }
    for worker in workers {
        worker.join().map_err(|_| "a request panicked")?;
    }
    let report = app.locks.close(Duration::from_secs(5))?;
    println!("closed, nothing left behind: {}", report.is_clean());
    Ok(())
}

struct App {
    locks: PgLockClient,
    database: Pool,
    options: LockOptions,
    shutdown: CancelToken,
}

/// Why a request was not served.
enum Refusal {
    Lock(LockError),
    Database(AnyError),
    Request(&'static str),
}

impl<E: Into<AnyError>> From<E> for Refusal {
    fn from(error: E) -> Self {
        // Lock errors are told apart by their code, all others are the database's.
        match error.into().downcast::<LockError>() {
            Ok(error) => Self::Lock(*error),
            Err(error) => Self::Database(error),
        }
    }
}

impl App {
    fn new(url: &str, threads: u32) -> Result<Self, AnyError> {
        let locks = PgLockClient::connect(url)?;
        let manager = PostgresConnectionManager::new(url.parse::<Config>()?, NoTls);
        let database = r2d2::Pool::builder().max_size(threads.max(1)).build(manager)?;
        // Two servers that start at once would both create the table; a lock is at hand.
        locks.with_lock("example:server:setup", &LockOptions::new(), |_| -> Result<(), AnyError> {
            database.get()?.batch_execute(
                "CREATE TABLE IF NOT EXISTS example_accounts (name TEXT PRIMARY KEY, balance BIGINT NOT NULL)",
            )?;
            Ok(())
        })??;
        let shutdown = CancelToken::new();
        let options = LockOptions::new()
            // How long other servers wait if this one is killed in the middle of a request.
            .ttl(Duration::from_secs(10))
            // How long a client waits for its turn before it gets a 503.
            .timeout(Duration::from_secs(2))
            .retry_delay(Duration::from_millis(10))
            .cancel(&shutdown);
        Ok(Self { locks, database, options, shutdown })
    }

    /// Read, compute, write: safe because requests for one account take turns.
    fn deposit(&self, account: &str, amount: i64) -> Result<i64, Refusal> {
        let guard = self.locks.lock_with(&format!("example:account:{account}"), &self.options)?;

        let mut database = self.database.get()?;
        let mut transaction = database.transaction()?;
        // First: if this process was paused and its lease is over, nothing below can commit.
        guard.fence_transaction(&mut transaction)?;
        let row =
            transaction.query_opt("SELECT balance FROM example_accounts WHERE name = $1", &[&account])?;
        let balance = row.map_or(0, |row| row.get::<_, i64>(0));
        let balance = balance.checked_add(amount).ok_or(Refusal::Request("too much money"))?;
        transaction.execute(
            "INSERT INTO example_accounts VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET balance = $2",
            &[&account, &balance],
        )?;
        transaction.commit()?;

        // Dropping the guard would do; this also says so if the release fails.
        if let Err(error) = guard.release() {
            eprintln!("a lock stays until its ttl is over: {error}");
        }
        Ok(balance)
    }

    fn balance(&self, account: &str) -> Result<i64, Refusal> {
        let row = self
            .database
            .get()?
            .query_opt("SELECT balance FROM example_accounts WHERE name = $1", &[&account])?;
        Ok(row.map_or(0, |row| row.get(0)))
    }

    fn answer(&self, mut request: Request) {
        let result = self.route(&mut request);
        let response = match result {
            Ok(balance) => Response::from_string(format!("{balance}\n")),
            Err(refusal) => Self::refuse(&refusal),
        };
        if let Err(error) = request.respond(response) {
            eprintln!("the client went away: {error}");
        }
    }

    fn route(&self, request: &mut Request) -> Result<i64, Refusal> {
        let path = request.url().trim_matches('/').to_owned();
        let parts: Vec<_> = path.split('/').collect();
        match (request.method(), parts.as_slice()) {
            (Method::Get, ["accounts", name]) => self.balance(name),
            (Method::Post, ["accounts", name, "deposits"]) => {
                let mut body = String::new();
                let mut limited = request.as_reader().take(100);
                limited.read_to_string(&mut body).map_err(|_| Refusal::Request("the body is no text"))?;
                let amount = body.trim().parse().map_err(|_| Refusal::Request("the body is no number"))?;
                self.deposit(name, amount)
            }
            _ => Err(Refusal::Request("no such address")),
        }
    }

    /// The status for a failure, and whether it is worth trying again.
    fn refuse(refusal: &Refusal) -> Response<std::io::Cursor<Vec<u8>>> {
        let (status, retry_after) = match refusal {
            Refusal::Request("no such address") => (404, None),
            Refusal::Request(_) => (400, None),
            Refusal::Database(_) => (500, None),
            Refusal::Lock(error) => match error.code() {
                // Somebody else works on the account, or this server is going away: come back.
                ErrorCode::AcquisitionTimeout | ErrorCode::Aborted | ErrorCode::RateLimited => {
                    (503, Some("1"))
                }
                // The database is away, or slow.
                ErrorCode::ServiceUnavailable | ErrorCode::NetworkTimeout => (503, Some("5")),
                // The name in the address makes no key.
                ErrorCode::InvalidArgument => (400, None),
                _ => (500, None),
            },
        };
        let text = match refusal {
            Refusal::Request(text) => (*text).to_owned(),
            Refusal::Lock(error) => error.to_string(),
            Refusal::Database(error) => {
                eprintln!("database: {error}");
                "the database refused".to_owned()
            }
        };
        let response = Response::from_string(format!("{text}\n")).with_status_code(status);
        match retry_after.and_then(|seconds| Header::from_bytes("Retry-After", seconds).ok()) {
            Some(header) => response.with_header(header),
            None => response,
        }
    }
}
