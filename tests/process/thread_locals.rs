//! What is kept in a thread-local is let go at the thread's end, where thread-locals are gone and the
//! driver must not be used; and what the destructors of a process that ends let go.

use std::cell::RefCell;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::{env, fs};

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

/// Compiles a program of `ffi/tests` against the C interface as this test was built.
fn compile(compiler: &str, source: &str, dir: &Path) -> std::path::PathBuf {
    let test = env::current_exe().unwrap();
    let libraries = test.parent().and_then(Path::parent).unwrap();
    let profile = if libraries.ends_with("debug") { "dev" } else { "release" };
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--quiet", "-p", "syncguard-ffi", "--lib", "--profile", profile, "--target-dir"])
        .arg(libraries.parent().unwrap())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status();
    assert!(built.is_ok_and(|status| status.success()), "the C interface builds");
    let program = dir.join(source.replace('.', "-"));
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(compiler)
        .args(["-Wall", "-Wextra", "-Werror", "-pthread", "-I"])
        .arg(top.join("ffi/include"))
        .arg(top.join("ffi/tests").join(source))
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(libraries)
        .arg(format!("-Wl,-rpath,{}", libraries.display()))
        .arg("-lsyncguard_ffi")
        .output()
        .expect("a compiler for C and C++ is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

#[test]
fn c_handles_that_destructors_free_release_their_locks() {
    let _alone = crate::support::alone();
    let dir = env::temp_dir().join(format!("syncguard-endings-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let schema = crate::support::schema();
    drop(client(&schema));
    let (c, cpp) = (compile("cc", "endings.c", &dir), compile("c++", "statics.cpp", &dir));
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
