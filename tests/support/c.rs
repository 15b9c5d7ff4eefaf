//! Programs in C and C++ against the C interface, built as the test was. Needs `cc` and `c++`, which
//! `scripts/test` installs.

use std::env;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

fn top() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// The directory with the C library, which is built if it is missing or old.
pub fn library_dir() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let test = env::current_exe().expect("a program knows its file");
        let dir = test.parent().and_then(Path::parent).expect("tests are built into PROFILE/deps");
        let profile = match dir.file_name().and_then(|name| name.to_str()) {
            Some("debug") => "dev",
            other => other.expect("a profile has a name"),
        };
        let built = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["build", "--quiet", "-p", "syncguard-ffi", "--lib", "--profile", profile, "--target-dir"])
            .arg(dir.parent().expect("a profile is in a target directory"))
            .current_dir(top())
            .status();
        assert!(built.is_ok_and(|status| status.success()), "the C interface builds");
        // The name that the loader is asked for, as scripts/install-c installs it.
        match symlink("libsyncguard_ffi.so", dir.join("libsyncguard.so.0.1")) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => panic!("{error}"),
            _ => dir.to_owned(),
        }
    })
}

/// Compiles a file of `ffi/` into a directory, with warnings as errors.
///
/// # Panics
/// When it does not compile; with what the compiler says.
pub fn compile(compiler: &str, source: &str, dir: &Path, flags: &[&str]) -> PathBuf {
    let libraries = library_dir();
    let name = source.rsplit('/').next().unwrap_or(source);
    let program = dir.join(name.replace('.', "-"));
    let output = Command::new(compiler)
        .args(["-Wall", "-Wextra", "-Werror", "-pthread", "-g", "-I"])
        .arg(top().join("ffi/include"))
        .args(flags)
        .arg(top().join("ffi").join(source))
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(libraries)
        .arg(format!("-Wl,-rpath,{}", libraries.display()))
        .args(["-lsyncguard_ffi"])
        .args(flags.iter().filter(|flag| flag.starts_with("-l")))
        .output()
        .expect("a compiler for C and C++ is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}
