//! One leader, and its end.

// recipe: Leader
use std::ops::ControlFlow::Continue;
use std::time::Duration;
use syncguard::{CancelToken, ErrorCode, LockOptions, PgLockClient, Result, Term};

/// One process of all that call this leads; the others wait to take over. Ends when `shutdown` fires.
fn lead(locks: &PgLockClient, shutdown: &CancelToken, mut step: impl FnMut(&Term)) -> Result<()> {
    let options = LockOptions::new().ttl(Duration::from_secs(10)).cancel(shutdown);
    let ended = locks.elect::<()>("app:prod:scheduler", &options, |term| {
        while term.is_held() && !shutdown.is_cancelled() {
            step(term); // a second or so of work; what it writes begins with term.fence_transaction
        }
        Continue(()) // steps down and campaigns again, unless the token has fired
    });
    match ended {
        Err(error) if error.code() == ErrorCode::Aborted && shutdown.is_cancelled() => Ok(()),
        other => other,
    }
}
// end

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::support::{LIMIT, wait_until};

/// Ends both, also where the test fails: no leader goes on then.
struct Ends([CancelToken; 2]);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.iter().for_each(CancelToken::cancel);
    }
}

#[test]
fn one_of_two_processes_leads_and_the_other_takes_over() {
    let schema = crate::support::schema();
    let tokens = [CancelToken::new(), CancelToken::new()];
    let terms = [AtomicU64::new(0), AtomicU64::new(0)];
    thread::scope(|scope| {
        let ends = Ends(tokens.clone());
        let leaders: Vec<_> = tokens
            .iter()
            .zip(&terms)
            .map(|(end, led)| {
                let locks = PgLockClient::connect(&schema.url()).unwrap();
                scope.spawn(move || {
                    lead(&locks, end, |term| {
                        led.store(term.number().get(), Ordering::SeqCst);
                        thread::yield_now();
                    })
                })
            })
            .collect();
        let led = |n: usize| terms[n].load(Ordering::SeqCst);
        wait_until(LIMIT, "one leads", || led(0) + led(1) > 0);
        let first = usize::from(led(0) == 0);
        assert_eq!(led(1 - first), 0, "two lead");
        ends.0[first].cancel();
        wait_until(LIMIT, "the other leads", || led(1 - first) > led(first));
        ends.0[1 - first].cancel();
        for leader in leaders {
            leader.join().unwrap().unwrap();
        }
    });
}
