//! An orderly end at SIGTERM.

// recipe: Shutdown on SIGTERM
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::error::Error;
use std::time::Duration;
use syncguard::{CancelToken, ErrorCode, LockOptions, PgLockClient};

/// Works until SIGTERM or Ctrl-C, and leaves no lock behind. Before any thread of yours, in `main`.
fn serve(locks: &PgLockClient, mut step: impl FnMut()) -> Result<(), Box<dyn Error>> {
    let shutdown = CancelToken::new();
    let fired = shutdown.clone();
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    std::thread::spawn(move || signals.forever().for_each(|_| fired.cancel()));

    let options = LockOptions::new().wait_forever().cancel(&shutdown); // a signal ends the wait
    while !shutdown.is_cancelled() {
        match locks.lock_with("app:prod:queue", &options) {
            Ok(_guard) => step(), // is finished; a long one looks at the token itself
            Err(error) if error.code() == ErrorCode::Aborted => break,
            Err(error) => return Err(error.into()),
        }
    }
    // Releases what is still held, and says what is not: it ends with its ttl.
    let report = locks.close(Duration::from_secs(5))?;
    if report.is_clean() { Ok(()) } else { Err(format!("locks are left behind: {report:?}").into()) }
}
// end

use crate::support::{Worker, worker};

const TEST: &str = "shutdown::a_signal_ends_a_program_that_works_and_one_that_waits_and_no_lease_is_left";

#[test]
fn a_signal_ends_a_program_that_works_and_one_that_waits_and_no_lease_is_left() {
    worker::part("service", |parent| {
        let locks = PgLockClient::connect(&parent.arg("url")).unwrap();
        parent.say("started");
        let mut steps = 0;
        serve(&locks, || {
            steps += 1;
            if steps == 1 {
                parent.say("works");
            }
        })
        .unwrap();
        parent.say("ended");
    });
    let schema = crate::support::schema();
    PgLockClient::connect(&schema.url()).unwrap();
    for signal in ["TERM", "INT"] {
        let mut service = Worker::start(TEST, "service", &[("url", &schema.url())]);
        service.expect("started");
        service.expect("works");
        service.signal(signal);
        service.expect("ended");
        assert!(service.join().success());
        assert_eq!(crate::number(&schema, "SELECT count(*) FROM syncguard_locks"), 0, "no lease is left");
    }

    let ours = PgLockClient::connect(&schema.url()).unwrap();
    let held = ours.lock("app:prod:queue").unwrap();
    let mut waiting = Worker::start(TEST, "service", &[("url", &schema.url())]);
    waiting.expect("started");
    crate::support::wait_until(crate::support::LIMIT, "it waits", || {
        ours.operator().waiting().unwrap().values().any(|clients| *clients > 0)
    });
    waiting.signal("TERM");
    waiting.expect("ended");
    assert!(waiting.join().success() && held.is_held());
}
