//! What the linker has to know of the shared library.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return;
    }
    let part = |name: &str| env::var(format!("CARGO_PKG_VERSION_{name}")).expect("cargo says the version");
    // Before 1.0 a new minor version may change the interface.
    let interface = match part("MAJOR").as_str() {
        "0" => format!("0.{}", part("MINOR")),
        major => major.to_owned(),
    };
    // The name that programs ask the loader for; scripts/install-c installs the library under it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libsyncguard.so.{interface}");
    // A client's threads end a little after its last handle, and may be in the library when a program
    // unloads it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
