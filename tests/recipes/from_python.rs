//! A program in Python: `from_python.py`, beside this file.

use std::path::Path;
use std::process::Command;

use crate::support::c::library_dir;
use syncguard::PgLockClient;

#[test]
fn a_program_in_python_holds_a_lock_and_says_when_another_has_it() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let schema = crate::support::schema();
    let run = || {
        Command::new("python3")
            .arg("-B")
            .arg(top.join("tests/recipes/from_python.py"))
            .arg(schema.url())
            .env("PYTHONPATH", top.join("ffi/python"))
            .env("SYNCGUARD_LIBRARY", library_dir().join("libsyncguard_ffi.so"))
            .output()
            .expect("python3 is installed: scripts/test installs it")
    };
    let output = run();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.starts_with("step 0 under fence 1\n") && said.lines().count() == 3, "{said}");

    let locks = PgLockClient::connect(&schema.url()).unwrap();
    let _held = locks.lock("app:prod:import").unwrap();
    let output = run();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "somebody else imports\n");
}
