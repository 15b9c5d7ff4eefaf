//! Encryption for a server that a test has started.

#![allow(clippy::unwrap_used)]

use std::process::Command;

use openssl::asn1::Asn1Time;
use openssl::hash::MessageDigest;
use openssl::pkey::{PKey, Private};
use openssl::rsa::Rsa;
use openssl::x509::extension::{BasicConstraints, SubjectAlternativeName};
use openssl::x509::{X509, X509NameBuilder};

use super::account::Account;
use super::server::Server;

/// Gives the server a certificate, which it uses from `server.configure("ssl", "on")` on.
pub fn install(server: &Server) -> X509 {
    let (certificate, key) = certificate();
    let data = server.data_dir();
    let files = [
        ("server.crt", certificate.to_pem().unwrap()),
        ("server.key", key.private_key_to_pem_pkcs8().unwrap()),
    ];
    for (name, pem) in files {
        let path = data.join(name);
        std::fs::write(&path, pem).unwrap();
        assert!(Command::new("chmod").arg("600").arg(&path).status().unwrap().success());
        if let Some(owner) = Account::find().unwrap().owner() {
            assert!(Command::new("chown").arg(owner).arg(&path).status().unwrap().success());
        }
    }
    certificate
}

/// A certificate for 127.0.0.1 that signs itself.
fn certificate() -> (X509, PKey<Private>) {
    let key = PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap();
    let mut name = X509NameBuilder::new().unwrap();
    name.append_entry_by_text("CN", "syncguard test").unwrap();
    let name = name.build();
    let mut certificate = X509::builder().unwrap();
    certificate.set_version(2).unwrap();
    certificate.set_subject_name(&name).unwrap();
    certificate.set_issuer_name(&name).unwrap();
    certificate.set_pubkey(&key).unwrap();
    certificate.set_not_before(&Asn1Time::days_from_now(0).unwrap()).unwrap();
    certificate.set_not_after(&Asn1Time::days_from_now(2).unwrap()).unwrap();
    certificate.append_extension(BasicConstraints::new().ca().build().unwrap()).unwrap();
    let names =
        SubjectAlternativeName::new().ip("127.0.0.1").build(&certificate.x509v3_context(None, None)).unwrap();
    certificate.append_extension(names).unwrap();
    certificate.sign(&key, MessageDigest::sha256()).unwrap();
    (certificate.build(), key)
}
