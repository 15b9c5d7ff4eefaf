//! The feature `rustls`.

use std::io;
use std::sync::Arc;

use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, SupportedProtocolVersion};
use tokio_postgres::Socket;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::error::{LockError, Result};
use crate::tls::certificate::end_point;
use crate::tls::connector::{BoxError, Established, PROTOCOL, TlsLibrary};
use crate::tls::files::Files;
use crate::tls::options::{Roots, TlsOptions, Version};
use crate::tls::verify::Verifier;

/// TLS by rustls, with ring's cryptography.
pub(crate) struct Rustls;

impl TlsLibrary for Rustls {
    type Stream = TlsStream<Socket>;
    type Ready = Arc<ClientConfig>;

    fn prepare(options: &TlsOptions, files: &Files) -> Result<Arc<ClientConfig>> {
        let provider = Arc::new(default_provider());
        let trusted = trusted(options, files)?;
        let verifier: Arc<dyn ServerCertVerifier> =
            Arc::new(Verifier::new(options.check(), trusted, provider.signature_verification_algorithms)?);
        let versions: Vec<&SupportedProtocolVersion> = [(Version::Tls12, &TLS12), (Version::Tls13, &TLS13)]
            .into_iter()
            .filter(|(version, _)| (options.min..=options.max).contains(version))
            .map(|(_, version)| version)
            .collect();
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&versions)
            .map_err(|cause| {
                LockError::invalid("these versions of TLS do not go together").with_source(cause)
            })?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let mut config = match &files.identity {
            None => builder.with_no_client_auth(),
            Some((certificates, key)) => {
                let certificates = certificates_in("sslcert", certificates)?;
                let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| {
                    LockError::invalid(
                        "the file of sslkey holds no private key in PEM without a passphrase: openssl pkey makes one of it",
                    )
                })?;
                builder.with_client_auth_cert(certificates, key).map_err(|cause| {
                    LockError::invalid("sslcert and sslkey cannot be used together: check that the key is that of the certificate")
                        .with_source(cause)
                })?
            }
        };
        config.alpn_protocols = vec![PROTOCOL.into()];
        config.enable_sni = options.server_name;
        Ok(Arc::new(config))
    }

    async fn handshake(
        ready: Arc<ClientConfig>,
        server: String,
        socket: Socket,
    ) -> Result<Established<TlsStream<Socket>>, BoxError> {
        let server = ServerName::try_from(server)
            .map_err(|_| io::Error::other("the host is no name that a certificate can have"))?;
        let stream = TlsConnector::from(ready).connect(server, socket).await?;
        let connection = stream.get_ref().1;
        let certificate = connection.peer_certificates().and_then(|chain| chain.first());
        let end_point = certificate.and_then(|certificate| end_point(certificate));
        let confirmed = connection.alpn_protocol() == Some(PROTOCOL.as_bytes());
        Ok(Established { stream, end_point, confirmed })
    }
}

fn trusted(options: &TlsOptions, files: &Files) -> Result<Vec<CertificateDer<'static>>> {
    if options.roots == Roots::System {
        let found = rustls_native_certs::load_native_certs();
        if found.certs.is_empty() {
            return Err(LockError::invalid(
                "sslrootcert=system: this system has no certificates of authorities (Debian: apt-get install ca-certificates), or SSL_CERT_FILE leads nowhere",
            ));
        }
        return Ok(found.certs);
    }
    files.roots.as_ref().map_or(Ok(Vec::new()), |pem| certificates_in("sslrootcert", pem))
}

fn certificates_in(option: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>> {
    let none = || LockError::invalid(format!("the file of {option} holds no certificate in PEM"));
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().map_err(|_| none())?;
    if found.is_empty() { Err(none()) } else { Ok(found) }
}
