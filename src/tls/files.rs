//! The files that TLS options name, and whether they have changed: certificates are renewed while
//! programs run.

use std::fs::{self, Metadata};
use std::path::Path;
use std::time::SystemTime;

use crate::error::{LockError, Result};
use crate::tls::options::{Roots, TlsOptions};

/// What the files hold, in PEM.
pub(crate) struct Files {
    pub(crate) roots: Option<Vec<u8>>,
    /// The client's certificate and its key.
    pub(crate) identity: Option<(Vec<u8>, Vec<u8>)>,
}

/// What tells one state of the files from another.
#[derive(PartialEq, Eq)]
pub(crate) struct Stamp(Vec<Option<(SystemTime, u64)>>);

impl Stamp {
    pub(crate) fn of(options: &TlsOptions) -> Self {
        let roots = match &options.roots {
            Roots::File(path) => Some(path),
            _ => None,
        };
        let identity = options.identity.iter().flat_map(|(certificate, key)| [certificate, key]);
        let stamp = |path| {
            fs::metadata(path).ok().and_then(|file: Metadata| Some((file.modified().ok()?, file.len())))
        };
        Self(roots.into_iter().chain(identity).map(stamp).collect())
    }
}

impl Files {
    pub(crate) fn read(options: &TlsOptions) -> Result<Self> {
        let roots = match &options.roots {
            Roots::File(path) => Some(read("sslrootcert", path)?),
            _ => None,
        };
        let identity = match &options.identity {
            Some((certificate, key)) => {
                let certificate = read("sslcert", certificate)?;
                check_private(key)?;
                Some((certificate, read("sslkey", key)?))
            }
            None => None,
        };
        Ok(Self { roots, identity })
    }
}

fn read(option: &str, path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|cause| {
        LockError::invalid(format!("the file of {option} cannot be read: check its path and its permissions"))
            .with_source(cause)
    })
}

/// As libpq: a key that others can read is not used. One of root's may be readable to its group.
#[cfg(unix)]
fn check_private(key: &Path) -> Result<()> {
    use std::os::unix::fs::MetadataExt as _;
    let Ok(file) = fs::metadata(key) else { return Ok(()) };
    let allowed = if file.uid() == 0 { 0o740 } else { 0o700 };
    if file.mode() & 0o777 & !allowed == 0 {
        return Ok(());
    }
    Err(LockError::invalid(
        "the file of sslkey can be read by others: chmod 600 it (640 if root owns it), as libpq wants it",
    ))
}

#[cfg(not(unix))]
fn check_private(_: &Path) -> Result<()> {
    Ok(())
}
