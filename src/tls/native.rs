//! The feature `native-tls`: the library of the system.

use native_tls::{Certificate, Identity, Protocol};
use tokio_native_tls::{TlsConnector, TlsStream};
use tokio_postgres::Socket;

use crate::error::{LockError, Result};
use crate::tls::connector::{BoxError, Established, PROTOCOL, TlsLibrary};
use crate::tls::files::Files;
use crate::tls::options::{Check, TlsOptions, Version};

/// TLS by OpenSSL, SChannel or Secure Transport.
pub(crate) struct Native;

impl TlsLibrary for Native {
    type Stream = TlsStream<Socket>;
    type Ready = native_tls::TlsConnector;

    fn prepare(options: &TlsOptions, files: &Files) -> Result<native_tls::TlsConnector> {
        let mut builder = native_tls::TlsConnector::builder();
        builder
            .min_protocol_version(Some(protocol(options.min)))
            .max_protocol_version((options.max == Version::Tls12).then_some(Protocol::Tlsv12))
            .request_alpns(&[PROTOCOL])
            .use_sni(options.server_name)
            .danger_accept_invalid_certs(options.check() == Check::Nothing)
            .danger_accept_invalid_hostnames(options.check() != Check::ChainAndName);
        if let Some(pem) = &files.roots {
            builder.disable_built_in_roots(true);
            let none = |_| LockError::invalid("the file of sslrootcert holds no certificate in PEM");
            let roots = Certificate::stack_from_pem(pem).map_err(none)?;
            if roots.is_empty() {
                return Err(LockError::invalid("the file of sslrootcert holds no certificate in PEM"));
            }
            for root in roots {
                builder.add_root_certificate(root);
            }
        }
        if let Some((certificates, key)) = &files.identity {
            builder.identity(Identity::from_pkcs8(certificates, key).map_err(|cause| {
                LockError::invalid("sslcert and sslkey cannot be used: they are a certificate and its key in PEM, the key as PKCS #8 without a passphrase (openssl pkey makes one of it)")
                    .with_source(cause)
            })?);
        }
        builder.build().map_err(|cause| {
            LockError::invalid("the TLS library does not take these settings: check that the key of sslkey is that of the certificate of sslcert")
                .with_source(cause)
        })
    }

    async fn handshake(
        ready: native_tls::TlsConnector,
        server: String,
        socket: Socket,
    ) -> Result<Established<TlsStream<Socket>>, BoxError> {
        let stream = TlsConnector::from(ready).connect(&server, socket).await?;
        let end_point = stream.get_ref().tls_server_end_point().ok().flatten();
        let confirmed =
            stream.get_ref().negotiated_alpn()?.is_some_and(|chosen| chosen == PROTOCOL.as_bytes());
        Ok(Established { stream, end_point, confirmed })
    }
}

fn protocol(version: Version) -> Protocol {
    match version {
        Version::Tls12 => Protocol::Tlsv12,
        Version::Tls13 => Protocol::Tlsv13,
    }
}
