//! Permits for three.

// recipe: At most three of a kind
use std::time::Duration;
use syncguard::{LockOptions, PgLockClient, Result};

/// Makes a report, beside at most two others on all machines together. `None`: none came free in a minute.
fn report<T>(locks: &PgLockClient, make: impl FnOnce() -> T) -> Result<Option<T>> {
    let reports = locks.semaphore("app:prod:reports", 3)?;
    let options = LockOptions::new().timeout(Duration::from_secs(60));
    match reports.acquire_with(&options) {
        Ok(_permit) => Ok(Some(make())), // let go at the end of the arm
        Err(error) if error.code() == syncguard::ErrorCode::AcquisitionTimeout => Ok(None),
        Err(error) => Err(error),
    }
}
// end

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::support::{LIMIT, together, wait_until};

#[test]
fn eight_threads_make_their_reports_three_at_a_time() {
    let schema = crate::support::schema();
    let clients = [(); 2].map(|()| PgLockClient::connect(&schema.url()).unwrap());
    let (now, most, done) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    together(8, |n| {
        let made = report(&clients[n % 2], || {
            let others = now.fetch_add(1, Ordering::SeqCst);
            most.fetch_max(others + 1, Ordering::SeqCst);
            // The first three wait for each other: so many there may be.
            if done.load(Ordering::SeqCst) == 0 {
                wait_until(LIMIT, "three at a time", || most.load(Ordering::SeqCst) >= 3);
            }
            thread::yield_now();
            now.fetch_sub(1, Ordering::SeqCst);
            done.fetch_add(1, Ordering::SeqCst);
        });
        assert_eq!(made.unwrap(), Some(()));
    });
    assert_eq!((most.into_inner(), done.into_inner()), (3, 8));
}
