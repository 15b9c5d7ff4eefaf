//! Encryption for a server that a test has started: authorities, and what they sign.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use openssl::asn1::Asn1Time;
use openssl::bn::BigNum;
use openssl::ec::{EcGroup, EcKey};
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::{PKey, Private};
use openssl::x509::extension::{BasicConstraints, SubjectAlternativeName};
use openssl::x509::{X509, X509Name, X509NameBuilder};

use super::account::Account;
use super::server::Server;

const DAY: i64 = 24 * 60 * 60;

/// Gives the server a certificate for 127.0.0.1 that signs itself, which it uses from
/// `server.configure("ssl", "on")` on.
pub fn install(server: &Server) -> X509 {
    let own = Request::new("syncguard test").name("127.0.0.1").authority().sign_itself();
    use_certificate(server, &own.pem(), &own.key_pem());
    own.certificate
}

/// Gives the server a certificate, those that belong to it, and its key.
pub fn use_certificate(server: &Server, certificates: &[u8], key: &[u8]) {
    give(server, "server.crt", certificates);
    give(server, "server.key", key);
}

/// A file in the server's data directory.
pub fn give(server: &Server, name: &str, text: &[u8]) -> PathBuf {
    let path = server.data_dir().join(name);
    std::fs::write(&path, text).unwrap();
    assert!(Command::new("chmod").arg("600").arg(&path).status().unwrap().success());
    if let Some(owner) = Account::find().unwrap().owner() {
        assert!(Command::new("chown").arg(owner).arg(&path).status().unwrap().success());
    }
    path
}

/// A file of the client's, that only its owner reads.
pub fn write_private(path: &Path, text: &[u8]) -> PathBuf {
    std::fs::write(path, text).unwrap();
    assert!(Command::new("chmod").arg("600").arg(path).status().unwrap().success());
    path.to_owned()
}

/// A certificate and its key.
#[derive(Clone, Debug)]
pub struct Signed {
    pub certificate: X509,
    pub key: PKey<Private>,
}

impl Signed {
    pub fn pem(&self) -> Vec<u8> {
        self.certificate.to_pem().unwrap()
    }

    pub fn key_pem(&self) -> Vec<u8> {
        self.key.private_key_to_pem_pkcs8().unwrap()
    }
}

/// What somebody asks an authority to sign.
#[allow(missing_debug_implementations, reason = "a digest has none")]
#[derive(Clone)]
pub struct Request {
    common: String,
    names: Vec<String>,
    authority: bool,
    /// Unix seconds.
    from: i64,
    until: i64,
    digest: MessageDigest,
}

impl Request {
    pub fn new(common: &str) -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let now = i64::try_from(now.as_secs()).unwrap();
        Self {
            common: common.to_owned(),
            names: Vec::new(),
            authority: false,
            from: now - DAY,
            until: now + DAY,
            digest: MessageDigest::sha256(),
        }
    }

    /// One more host or address that the certificate is for.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        self.names.push(name.to_owned());
        self
    }

    /// It may sign others.
    #[must_use]
    pub fn authority(mut self) -> Self {
        self.authority = true;
        self
    }

    /// Its time was over yesterday.
    #[must_use]
    pub fn expired(mut self) -> Self {
        (self.from, self.until) = (self.from - 2 * DAY, self.from);
        self
    }

    #[must_use]
    pub fn digest(mut self, digest: MessageDigest) -> Self {
        self.digest = digest;
        self
    }

    pub fn sign_itself(&self) -> Signed {
        let key = new_key();
        let certificate = self.sign(&key, &name(&self.common), &key);
        Signed { certificate, key }
    }

    pub fn sign_by(&self, authority: &Signed) -> Signed {
        let key = new_key();
        let certificate = self.sign(&key, authority.certificate.subject_name(), &authority.key);
        Signed { certificate, key }
    }

    fn sign(&self, key: &PKey<Private>, issuer: &openssl::x509::X509NameRef, by: &PKey<Private>) -> X509 {
        let mut certificate = X509::builder().unwrap();
        let mut serial = BigNum::new().unwrap();
        serial.rand(64, openssl::bn::MsbOption::MAYBE_ZERO, false).unwrap();
        certificate.set_serial_number(&serial.to_asn1_integer().unwrap()).unwrap();
        certificate.set_version(2).unwrap();
        certificate.set_subject_name(&name(&self.common)).unwrap();
        certificate.set_issuer_name(issuer).unwrap();
        certificate.set_pubkey(key).unwrap();
        certificate.set_not_before(&Asn1Time::from_unix(self.from).unwrap()).unwrap();
        certificate.set_not_after(&Asn1Time::from_unix(self.until).unwrap()).unwrap();
        if self.authority {
            certificate.append_extension(BasicConstraints::new().critical().ca().build().unwrap()).unwrap();
        }
        if !self.names.is_empty() {
            let mut names = SubjectAlternativeName::new();
            for name in &self.names {
                let is_address = name.parse::<std::net::IpAddr>().is_ok();
                if is_address {
                    names.ip(name)
                } else {
                    names.dns(name)
                };
            }
            let names = names.build(&certificate.x509v3_context(None, None)).unwrap();
            certificate.append_extension(names).unwrap();
        }
        certificate.sign(by, self.digest).unwrap();
        certificate.build()
    }
}

fn new_key() -> PKey<Private> {
    let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
    PKey::from_ec_key(EcKey::generate(&group).unwrap()).unwrap()
}

fn name(common: &str) -> X509Name {
    let mut name = X509NameBuilder::new().unwrap();
    name.append_entry_by_text("CN", common).unwrap();
    name.build()
}
