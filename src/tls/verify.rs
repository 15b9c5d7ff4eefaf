//! What is checked of a server: its chain, its name, or neither, as libpq does.
//!
//! 1. Whatever is checked, the server must have the key of the certificate that it shows.
//! 2. A certificate that `sslrootcert` holds itself is trusted as it is, within its dates: a server's own,
//!    self-signed one is an authority at the same time, which webpki refuses at the end of a chain.
//! 3. Only an authority's certificate may sign others.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::error::{LockError, Result};
use crate::tls::certificate::Fields;
use crate::tls::options::Check;

#[derive(Debug)]
pub(crate) struct Verifier {
    check: Check,
    trusted: Vec<CertificateDer<'static>>,
    authorities: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Verifier {
    pub(crate) fn new(
        check: Check,
        trusted: Vec<CertificateDer<'static>>,
        algorithms: WebPkiSupportedAlgorithms,
    ) -> Result<Self> {
        let mut authorities = RootCertStore::empty();
        let may_sign = |der: &&CertificateDer<'_>| Fields::read(der).is_some_and(|fields| fields.authority);
        authorities.add_parsable_certificates(trusted.iter().filter(may_sign).cloned());
        if check != Check::Nothing && trusted.is_empty() {
            return Err(LockError::invalid("sslrootcert holds no certificate"));
        }
        Ok(Self { check, trusted, authorities: Arc::new(authorities), algorithms })
    }

    fn check_trusted(
        &self,
        server: &CertificateDer<'_>,
        name: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<(), Error> {
        let fields = Fields::read(server).ok_or(CertificateError::BadEncoding)?;
        let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        if now < fields.not_before {
            return Err(CertificateError::NotValidYet.into());
        }
        if now > fields.not_after {
            return Err(CertificateError::Expired.into());
        }
        match (self.check, name, fields.common_name) {
            (Check::ChainAndName, ServerName::DnsName(name), Some(common)) if !fields.names => {
                let fits = covers(common, name.as_ref());
                if fits { Ok(()) } else { Err(CertificateError::NotValidForName.into()) }
            }
            (Check::ChainAndName, ..) => verify_server_name(&ParsedCertificate::try_from(server)?, name),
            _ => Ok(()),
        }
    }
}

/// Whether a certificate's common name stands for a host, by libpq's rule: letter for letter, or `*.` for
/// one label.
fn covers(common: &str, host: &str) -> bool {
    let same = |common: &str, host: &str| common.eq_ignore_ascii_case(host);
    match (common.strip_prefix("*."), host.split_once('.')) {
        (Some(common), Some((label, host))) => !label.is_empty() && same(common, host),
        _ => same(common, host),
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        server: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.check == Check::Nothing {
            return Ok(ServerCertVerified::assertion());
        }
        if self.trusted.iter().any(|trusted| trusted.as_ref() == server.as_ref()) {
            self.check_trusted(server, name, now)?;
            return Ok(ServerCertVerified::assertion());
        }
        let parsed = ParsedCertificate::try_from(server)?;
        verify_server_cert_signed_by_trust_anchor(
            &parsed,
            &self.authorities,
            others,
            now,
            self.algorithms.all,
        )?;
        if self.check == Check::ChainAndName {
            verify_server_name(&parsed, name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        server: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, server, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        server: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, server, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_common_name_stands_for_its_host_and_no_other() {
        assert!(covers("db.example", "DB.example"));
        assert!(covers("*.example", "db.example"));
        for (common, host) in [
            ("db.example", "db2.example"),
            ("*.example", "a.db.example"),
            ("*.example", ".example"),
            ("*", "db"),
        ] {
            assert!(!covers(common, host), "{common} {host}");
        }
    }
}
