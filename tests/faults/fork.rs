//! A real fork, in a C program: Rust has no safe one.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support;

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}: {}{}", text(&output.stdout), text(&output.stderr));
    output
}

/// The C interface as this test was built; its directory.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a program knows its file");
    let dir = test.parent().and_then(Path::parent).expect("tests are built into PROFILE/deps");
    let profile = match dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") => "dev",
        other => other.expect("a profile has a name"),
    };
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "-p", "syncguard-ffi", "--lib", "--profile", profile, "--target-dir"]);
    run(cargo
        .arg(dir.parent().expect("a profile is in a target directory"))
        .current_dir(env!("CARGO_MANIFEST_DIR")));
    dir.to_owned()
}

#[test]
fn a_forked_child_is_refused_and_its_parent_does_not_notice() {
    let (top, library, schema) = (Path::new(env!("CARGO_MANIFEST_DIR")), library(), support::schema());
    let program = library.join(format!("fork-{}", std::process::id()));
    let mut rpath = std::ffi::OsString::from("-Wl,-rpath,");
    rpath.push(&library);
    let mut cc = Command::new("cc");
    cc.args(["-std=c99", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(top.join("ffi/include"));
    cc.arg(top.join("tests/faults/fork.c")).arg("-o").arg(&program).arg("-L").arg(&library);
    run(cc.args(["-lsyncguard_ffi".as_ref(), rpath.as_os_str()]));
    let output = Command::new(&program).args([&schema.url(), schema.name()]).output();
    let _ = std::fs::remove_file(&program);
    let output = output.expect("the program starts");
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said, "ok\n", "{:?} {}", output.status, String::from_utf8_lossy(&output.stderr));
    let left: i64 = schema.client().query_one("SELECT count(*) FROM syncguard_locks", &[]).unwrap().get(0);
    assert_eq!(left, 0, "no lease is left");
}
