//! A temporary directory that goes away with this process, however it ends.
//!
//! Statics are not dropped and a killed process runs nothing, so the cleaning is done by a child:
//! a small shell script that holds the read end of a pipe. The kernel closes our end when we die.
//! The standard library opens pipes close-on-exec, so no other child of ours keeps it open; and the
//! script has a process group of its own, so that Ctrl-C reaches us and not it.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::account::Account;

const SCRIPT: &str = include_str!("keeper.sh");

/// The directory; dropping it waits until it is gone.
#[derive(Debug)]
pub struct Keeper {
    dir: PathBuf,
    script: Child,
}

impl Keeper {
    /// A new directory, owned by this account.
    pub fn new(account: &Account) -> Result<Self, String> {
        let mut script = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "keeper"])
            .arg(account.temp_dir()?)
            .args(account.owner())
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| format!("/bin/sh does not start: {error}"))?;
        let mut line = String::new();
        let mut stdout = BufReader::new(script.stdout.take().expect("stdout is piped"));
        match stdout.read_line(&mut line) {
            Ok(1..) => Ok(Self { dir: PathBuf::from(line.trim_end()), script }),
            _ => Err(format!("no temporary directory in {:?}", account.temp_dir())),
        }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.script.stdin.take());
        let _ = self.script.wait();
    }
}
