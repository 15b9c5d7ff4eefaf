//! TLS by connection string: `sslmode` and what belongs to it, below the driver and above the socket.
//!
//! | file | what it does |
//! | --- | --- |
//! | `options` | what the options say |
//! | `files` | the files that they name |
//! | `connector` | the driver's TLS connector, over either library |
//! | `rustls`, `verify` | the feature `rustls`; what is checked of a server |
//! | `native` | the feature `native-tls` |
//! | `certificate` | what neither library tells of a certificate |
//!
//! 1. A check that was asked for is made or the connection fails; nothing falls back to less.
//! 2. Files are read again when they have changed; while the new ones cannot be used the old ones are.
//! 3. With both features it is rustls.

#![cfg_attr(
    not(any(feature = "native-tls", feature = "rustls")),
    allow(dead_code, reason = "what is asked for is read, and refused")
)]

#[cfg(feature = "rustls")]
mod certificate;
mod connector;
mod files;
#[cfg(all(feature = "native-tls", not(feature = "rustls")))]
mod native;
pub(crate) mod options;
#[cfg(feature = "rustls")]
mod rustls;
#[cfg(feature = "rustls")]
mod verify;

use crate::error::{LockError, Result};

pub(crate) use connector::UrlTls;
pub(crate) use options::{Mode, TlsOptions};

#[cfg(feature = "rustls")]
pub(crate) type Library = rustls::Rustls;
#[cfg(all(feature = "native-tls", not(feature = "rustls")))]
pub(crate) type Library = native::Native;
#[cfg(not(any(feature = "native-tls", feature = "rustls")))]
pub(crate) type Library = connector::Missing;

/// Whether there is a library.
pub(crate) const COMPILED: bool = cfg!(any(feature = "native-tls", feature = "rustls"));

/// Refuses what asks for TLS where there is no library, and says which feature to switch on.
pub(crate) fn check_compiled(options: &TlsOptions) -> Result<()> {
    match options.demands() {
        Some(asked) if !COMPILED => Err(LockError::invalid(format!(
            "{asked} asks for TLS, and this program was built without: switch on the feature `rustls` (or `native-tls`) of syncguard, or hand a TLS connector to the builder's connect_with"
        ))),
        _ => Ok(()),
    }
}
