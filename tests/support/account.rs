//! The account that runs the server: PostgreSQL refuses to run as root.

use std::env;
use std::ffi::OsStr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Who runs the server's programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Account {
    /// We are an ordinary user, so it is us.
    Caller,
    /// We are root: this account.
    Other { name: String, uid: u32, gid: u32 },
}

impl Account {
    /// The account for this process.
    pub fn find() -> Result<Self, String> {
        if id("-u", None) != Some(0) {
            return Ok(Self::Caller);
        }
        let wanted = env::var("SYNCGUARD_TEST_PG_USER").ok();
        let names = wanted.map_or_else(|| vec!["postgres".into(), "nobody".into()], |name| vec![name]);
        Self::first_ordinary(&names)
    }

    /// The first of these accounts that exists and is not root.
    pub fn first_ordinary(names: &[String]) -> Result<Self, String> {
        for name in names {
            if let (Some(uid @ 1..), Some(gid)) = (id("-u", Some(name)), id("-g", Some(name))) {
                return Ok(Self::Other { name: name.clone(), uid, gid });
            }
        }
        Err(format!(
            "PostgreSQL refuses to run as root, and none of the accounts {names:?} is an ordinary one: create one \
             (useradd --system postgres) or name one in SYNCGUARD_TEST_PG_USER"
        ))
    }

    /// A command that runs as this account, without root's supplementary groups.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        if let Self::Other { uid, gid, .. } = self {
            // As root, `uid` also empties the list of supplementary groups.
            command.uid(*uid).gid(*gid);
        }
        command.stdin(Stdio::null());
        command
    }

    /// `uid:gid` for chown, if the owner has to change at all.
    pub fn owner(&self) -> Option<String> {
        match self {
            Self::Caller => None,
            Self::Other { uid, gid, .. } => Some(format!("{uid}:{gid}")),
        }
    }

    /// A directory for temporary files that this account can reach and write to, with a path that
    /// leaves room for the name of a socket (107 bytes on Linux, 103 on macOS).
    pub fn temp_dir(&self) -> Result<PathBuf, String> {
        let candidates = [env::temp_dir(), "/tmp".into(), "/var/tmp".into()];
        let fits = |dir: &&PathBuf| dir.is_absolute() && dir.as_os_str().len() < 60;
        let found = candidates.iter().filter(fits).find(|dir| self.test("-w", dir) && self.test("-x", dir));
        found.cloned().ok_or_else(|| format!("{self:?} can write to none of {candidates:?}"))
    }

    /// What `test FLAG PATH` says to this account.
    pub fn test(&self, flag: &str, path: &Path) -> bool {
        let mut command = self.command("/bin/sh");
        command.args(["-c", "test \"$0\" \"$1\"", flag]).arg(path).current_dir("/");
        command.status().is_ok_and(|status| status.success())
    }
}

fn id(flag: &str, name: Option<&str>) -> Option<u32> {
    let output = Command::new("id").arg(flag).args(name).stderr(Stdio::null()).output().ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}
