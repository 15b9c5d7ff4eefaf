//! What is kept in a thread-local is let go at the thread's end, where thread-locals are gone and the
//! driver must not be used; and what the destructors of a process that ends let go.

use std::cell::RefCell;
use std::process::Command;
use std::thread;
use std::{env, fs};

use crate::support::c::compile;
use crate::support::leases::{client, row, sessions, wait_until_released};
use crate::support::session_locks::{holders, key};
use crate::support::{LIMIT, wait_until};
use syncguard::{AdvisoryGuard, LockGuard, PgLockClient};

thread_local! {
    static GUARD: RefCell<Option<LockGuard>> = const { RefCell::new(None) };
    static SESSION_LOCK: RefCell<Option<AdvisoryGuard>> = const { RefCell::new(None) };
    static CLIENT: RefCell<Option<PgLockClient>> = const { RefCell::new(None) };
}

#[test]
fn a_guard_in_a_thread_local_is_released_by_the_end_of_its_thread() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let client = client(&schema);
    for slot_first in [true, false] {
        thread::scope(|scope| {
            scope.spawn(|| {
                if slot_first {
                    // Destroyed in the reverse order: the driver's thread-locals are gone by then.
                    GUARD.with(|slot| *slot.borrow_mut() = None);
                }
                let guard = client.lock("k").unwrap();
                GUARD.with(|slot| *slot.borrow_mut() = Some(guard));
            });
        });
        wait_until_released(&mut schema.client(), "k");
    }
    assert!(client.close(LIMIT).unwrap().is_clean());
}

#[test]
fn a_session_lock_in_a_thread_local_is_let_go_at_the_end_of_its_thread() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let (client, key) = (client(&schema), key());
    let there = client.clone();
    thread::spawn(move || {
        SESSION_LOCK.with(|slot| *slot.borrow_mut() = None);
        let guard = there.advisory_lock(&key).unwrap();
        SESSION_LOCK.with(|slot| *slot.borrow_mut() = Some(guard));
    })
    .join()
    .unwrap();
    let mut observer = schema.client();
    wait_until(LIMIT, "the session lock is let go", || holders(&mut observer, key) == 0);
}

#[test]
fn a_client_in_a_thread_local_closes_its_connections_at_the_end_of_its_thread() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let url = crate::support::leases::named(&schema.url(), "in-a-thread-local");
    for locks in [true, false] {
        let url = url.clone();
        thread::spawn(move || {
            CLIENT.with(|slot| *slot.borrow_mut() = None);
            let client = PgLockClient::connect(&url).unwrap();
            if locks {
                drop(client.lock("k").unwrap());
            } else {
                client.is_locked("k").unwrap();
            }
            CLIENT.with(|slot| *slot.borrow_mut() = Some(client));
        })
        .join()
        .unwrap();
        let mut observer = schema.client();
        wait_until(LIMIT, "its sessions have ended", || sessions(&mut observer, "in-a-thread-local") == 0);
    }
}

#[test]
fn c_handles_that_destructors_free_release_their_locks() {
    let _alone = crate::support::alone();
    let dir = env::temp_dir().join(format!("syncguard-endings-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let schema = crate::support::schema();
    drop(client(&schema));
    let (c, cpp) =
        (compile("cc", "tests/endings.c", &dir, &[]), compile("c++", "tests/statics.cpp", &dir, &[]));
    for (program, how) in
        [(&c, "atexit"), (&c, "atexit-release"), (&c, "key"), (&cpp, "static"), (&c, "never")]
    {
        let output = Command::new(program).args([&schema.url(), schema.name(), how]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{how}: {:?} {said}", output.status);
        if how == "never" {
            assert!(row(&mut schema.client(), "k").is_some(), "the others did not pass for another reason");
        } else {
            assert_eq!(row(&mut schema.client(), "k"), None, "{how}: {said}");
        }
    }
    fs::remove_dir_all(&dir).unwrap();
}
