//! The binding for Python, with its own tests: signals at any moment, threads, forks, the end of a program.

use std::path::Path;
use std::process::Command;

use crate::support::c::library_dir;

#[test]
fn the_binding_for_python_passes_its_own_tests() {
    let schema = crate::support::schema();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("ffi/python");
    let output = Command::new("python3")
        .args(["-X", "dev", "-B", "-m", "unittest", "-v", "test_syncguard"])
        .current_dir(&folder)
        .env("PYTHONPATH", &folder)
        .env("SYNCGUARD_LIBRARY", library_dir().join("libsyncguard_ffi.so"))
        .env("SYNCGUARD_TEST_URL", schema.url())
        .env("SYNCGUARD_TEST_SCHEMA", schema.name())
        .output()
        .expect("python3 is installed: scripts/test installs it");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("Ran 3") && !said.contains("skipped"), "{said}");
}
