//! Clocks of another process that a test can set: a server's time of day, a holder's time since the start
//! of the machine. Needs `cc`, which `scripts/test` installs; Linux only.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = include_str!("clock.c");

/// A library to preload and the file that it reads, both in a directory of the test's.
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
        clock.set_since_boot(0);
        Ok(clock)
    }

    /// From now on the process's time of day is this many milliseconds ahead of ours.
    pub fn set(&self, ahead_ms: i64) {
        self.write(0, ahead_ms);
    }

    /// From now on the process's `CLOCK_BOOTTIME`, by which holders judge their leases, is this many
    /// milliseconds ahead of ours.
    pub fn set_since_boot(&self, ahead_ms: i64) {
        self.write(8, ahead_ms);
    }

    fn write(&self, place: u64, ahead_ms: i64) {
        // Written over, not made anew: the processes have it mapped.
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&self.file);
        let bytes = (ahead_ms * 1_000_000).to_ne_bytes();
        let written = file.as_ref().map(|file| file.write_all_at(&bytes, place));
        assert!(matches!(written, Ok(Ok(()))), "the clock cannot be set: {written:?}");
    }

    pub fn preload(&self, command: &mut Command) {
        command.envs(self.envs());
    }

    /// The variables of a process that has these clocks.
    pub fn envs(&self) -> [(&'static str, &Path); 2] {
        [("LD_PRELOAD", &self.library), ("SYNCGUARD_TEST_CLOCK", &self.file)]
    }
}
