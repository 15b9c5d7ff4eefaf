//! A program in C: `from_c.c`, beside this file.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::c::compile;
use syncguard::PgLockClient;

#[test]
fn a_program_in_c_holds_a_lock_and_says_what_is_wrong() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("recipes");
    fs::create_dir_all(&dir).unwrap();
    let program = compile("cc", "../tests/recipes/from_c.c", &dir, &["-std=c99", "-pedantic"]);
    let schema = crate::support::schema();
    let run = || Command::new(&program).args([&schema.url(), schema.name()]).output().unwrap();
    let output = run();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "under fence 1\n");

    let locks = PgLockClient::connect(&schema.url()).unwrap();
    let _held = locks.lock("app:prod:payment:42").unwrap();
    let output = run();
    assert_eq!(output.status.code(), Some(1));
    assert!(!output.stderr.is_empty());
}
