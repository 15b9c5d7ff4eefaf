//! TLS and passwords by connection string, on servers that insist on them. A program of its own, for it is
//! run once for each TLS library, and once without: `cargo test --features native-tls --test tls`.
//!
//! | file | what it shows |
//! | --- | --- |
//! | `by_url` | `sslmode` and what belongs to it, against certificates good and bad. |
//! | `impostor` | Somebody between client and server, who has a certificate. |
//! | `options` | Every option of libpq, as the page of the manual has it. |
//! | `passwords` | Passwords from the passfile and the environment, and clients that the environment describes. |
//! | `without` | This crate without a TLS library: what asks for TLS is refused. |

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test that fails panics")]

use syncguard_test_support as support;

#[cfg(any(feature = "rustls", feature = "native-tls"))]
mod by_url;
#[cfg(any(feature = "rustls", feature = "native-tls"))]
mod impostor;
mod options;
mod passwords;
#[cfg(not(any(feature = "rustls", feature = "native-tls")))]
mod without;
#[cfg(any(feature = "rustls", feature = "native-tls"))]
mod world;
