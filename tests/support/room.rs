//! A small file system, for a worker process of its own: a `tmpfs` in a mount namespace that nobody
//! else sees, so that it goes away with the worker's last process, however that ends.
//!
//! Needs `unshare` of util-linux, and root or user namespaces; Linux only.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::account::Account;

/// An empty directory, as everybody else sees it.
#[derive(Debug)]
pub struct Room {
    dir: PathBuf,
}

impl Room {
    pub fn create() -> Self {
        let account = Account::find().unwrap_or_else(|message| panic!("{message}"));
        let parent = account.temp_dir().unwrap_or_else(|message| panic!("{message}"));
        let dir = parent.join(format!("syncguard-room-{}", super::unique()));
        std::fs::create_dir(&dir).expect("a directory can be made");
        Self { dir }
    }

    /// The same command, in a room of this many megabytes, which is its directory for temporary files.
    pub fn command(&self, megabytes: u32, command: &Command) -> Command {
        let mut inside = Command::new("unshare");
        if matches!(Account::find(), Ok(Account::Caller)) {
            inside.args(["--user", "--map-current-user", "--keep-caps"]);
        }
        inside.args(["--mount", "--propagation", "private", "/bin/sh", "-c"]);
        inside.arg("mount -t tmpfs -o \"size=$0m,mode=1777\" tmpfs \"$TMPDIR\" && exec \"$@\"");
        inside.arg(megabytes.to_string()).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside.env("TMPDIR", &self.dir);
        inside
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.dir);
    }
}

/// Inside: takes all that is left of the room, until the value is dropped.
#[derive(Debug)]
pub struct Full {
    ballast: PathBuf,
}

impl Full {
    pub fn fill() -> Self {
        use std::io::Write as _;
        let ballast = env::temp_dir().join(format!("ballast-{}", super::unique()));
        let mut file = std::fs::File::create(&ballast).expect("a file can be made");
        for size in [1 << 20, 4096, 1] {
            let block = vec![0; size];
            while file.write_all(&block).is_ok() {}
        }
        Self { ballast }
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.ballast);
    }
}

/// Whether this process is in a room.
pub fn inside() -> bool {
    env::temp_dir()
        .file_name()
        .is_some_and(|name| Path::new(name).to_string_lossy().contains("syncguard-room-"))
}
