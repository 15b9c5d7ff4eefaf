//! A program without a name server and without a list of users. Needs `cc`, as [`clock`](super::clock).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = include_str!("names.c");

/// A library to preload; its directory goes with it.
#[derive(Debug)]
pub struct Names {
    dir: PathBuf,
    library: PathBuf,
}

/// Builds the library.
pub fn silent() -> Names {
    let dir = std::env::temp_dir().join(format!("syncguard_names_{}", super::unique()));
    fs::create_dir(&dir).expect("a directory can be made");
    let (source, library) = (dir.join("names.c"), dir.join("names.so"));
    fs::write(&source, SOURCE).expect("a file can be written");
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-O1", "-o"]).args([&library, &source]).arg("-ldl");
    let output = command.output().expect("cc starts");
    assert!(output.status.success(), "names.c: {}", String::from_utf8_lossy(&output.stderr));
    Names { dir, library }
}

impl Names {
    pub fn path(&self) -> &Path {
        &self.library
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}
