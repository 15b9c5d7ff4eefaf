//! A server's clock that a test can set. Needs `cc`, which `scripts/test` installs; Linux only.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = include_str!("clock.c");

/// A library to preload and the file that it reads, both in a cluster's directory.
#[derive(Debug)]
pub struct Clock {
    library: PathBuf,
    file: PathBuf,
}

impl Clock {
    pub fn new(dir: &Path) -> Result<Self, String> {
        let (source, library, file) = (dir.join("clock.c"), dir.join("clock.so"), dir.join("clock"));
        fs::write(&source, SOURCE).map_err(|error| error.to_string())?;
        let mut command = Command::new("cc");
        command.args(["-shared", "-fPIC", "-O1", "-o"]).args([&library, &source]);
        let output = command.output().map_err(|error| format!("cc does not start: {error}"))?;
        if !output.status.success() {
            return Err(format!("clock.c: {}", String::from_utf8_lossy(&output.stderr)));
        }
        let clock = Self { library, file };
        clock.set(0);
        Ok(clock)
    }

    /// From now on the server's time of day is this many milliseconds ahead of ours.
    pub fn set(&self, ahead_ms: i64) {
        // Written over, not made anew: the server's processes have it mapped.
        let mut file = OpenOptions::new().create(true).truncate(false).write(true).open(&self.file);
        let bytes = (ahead_ms * 1_000_000).to_ne_bytes();
        let written = file.as_mut().map(|file| file.write_all(&bytes));
        assert!(matches!(written, Ok(Ok(()))), "the clock cannot be set: {written:?}");
    }

    pub fn preload(&self, command: &mut Command) {
        command.env("LD_PRELOAD", &self.library).env("SYNCGUARD_TEST_CLOCK", &self.file);
    }
}
