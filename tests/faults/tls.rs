//! The same truths and bounds over an encrypted connection, where nobody in between sees messages:
//! it is cut after any number of bytes, in either direction.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use openssl::asn1::Asn1Time;
use openssl::hash::MessageDigest;
use openssl::pkey::PKey;
use openssl::rsa::Rsa;
use openssl::ssl::{SslConnector, SslMethod, SslVerifyMode};
use openssl::x509::{X509, X509NameBuilder};
use postgres::config::SslMode;
use postgres_openssl::MakeTlsConnector;
use syncguard::{ExtendResult, PgLockClient, ReleaseResult};

use crate::bounds::{all_in_time, builder, ends_in_time};
use crate::support::account::Account;
use crate::support::{Config, Server};

const TTL: Duration = Duration::from_secs(30);

/// A server that speaks TLS.
fn server() -> Server {
    let server = Server::start(&Config::new());
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
    certificate.sign(&key, MessageDigest::sha256()).unwrap();
    let files = [
        ("server.crt", certificate.build().to_pem().unwrap()),
        ("server.key", key.private_key_to_pem_pkcs8().unwrap()),
    ];
    for (name, pem) in files {
        let path = server.data_dir().join(name);
        std::fs::write(&path, pem).unwrap();
        assert!(Command::new("chmod").arg("600").arg(&path).status().unwrap().success());
        if let Some(owner) = Account::find().unwrap().owner() {
            assert!(Command::new("chown").arg(owner).arg(&path).status().unwrap().success());
        }
    }
    server.configure("ssl", "on");
    server
}

/// Whom it talks to is not what is tried here.
fn tls() -> MakeTlsConnector {
    let mut connector = SslConnector::builder(SslMethod::tls()).unwrap();
    connector.set_verify(SslVerifyMode::NONE);
    let mut connector = MakeTlsConnector::new(connector.build());
    connector.set_callback(|configuration, _| {
        configuration.set_verify_hostname(false);
        Ok(())
    });
    connector
}

fn config(url: &str) -> postgres::Config {
    let mut config: postgres::Config = url.parse().unwrap();
    config.ssl_mode(SslMode::Require);
    config
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ToServer,
    ToClient,
}

/// Passes bytes on, until it is told after how many to cut.
struct Tap {
    port: u16,
    rule: Arc<Mutex<Option<(Way, usize)>>>,
}

impl Tap {
    fn start(server: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let rule = Arc::new(Mutex::new(None));
        let there = Arc::clone(&rule);
        thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(("127.0.0.1", server))) else {
                    return;
                };
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                for (way, from, to) in [(Way::ToServer, &client, &server), (Way::ToClient, &server, &client)]
                {
                    let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { return };
                    let rule = Arc::clone(&there);
                    thread::spawn(move || {
                        let _ = pump(way, &from, &to, &rule);
                        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                    });
                }
            }
        });
        Self { port, rule }
    }

    /// Once: this many more bytes pass, then both sides are cut.
    fn cut_after(&self, way: Way, bytes: usize) {
        *self.rule.lock().unwrap_or_else(PoisonError::into_inner) = Some((way, bytes));
    }

    /// Whether fewer bytes have passed than that.
    fn take_rule(&self) -> bool {
        self.rule.lock().unwrap_or_else(PoisonError::into_inner).take().is_some()
    }
}

fn pump(
    way: Way,
    mut from: &TcpStream,
    mut to: &TcpStream,
    rule: &Mutex<Option<(Way, usize)>>,
) -> io::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        let size = from.read(&mut buffer)?;
        if size == 0 {
            return Ok(());
        }
        let mut pass = size;
        let mut cut = false;
        {
            let mut rule = rule.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((_, left)) = rule.as_mut().filter(|(which, _)| *which == way) {
                cut = *left < size;
                pass = size.min(*left);
                *left -= pass;
            }
            if cut {
                *rule = None;
            }
        }
        to.write_all(&buffer[..pass])?;
        if cut {
            return Ok(());
        }
    }
}

#[test]
fn calls_over_tls_that_are_cut_anywhere_answer_with_the_truth() {
    let server = server();
    let tap = Tap::start(server.port());
    let url = server.url().replace(&format!(":{}/", server.port()), &format!(":{}/", tap.port));
    let client = PgLockClient::builder().connect_with(config(&url), tls()).unwrap();
    let mut sql = server.client();
    let step = if crate::long() { 7 } else { 61 };
    let (mut cuts, mut unknown) = (0, 0);
    for call in ["acquire", "extend", "release"] {
        for way in [Way::ToServer, Way::ToClient] {
            for bytes in (0..).step_by(step) {
                let key = format!("{call}:{way:?}:{bytes}");
                client.is_locked("warm").unwrap();
                let cut = || tap.cut_after(way, bytes);
                if call == "acquire" {
                    cut();
                }
                let granted =
                    client.acquire(&key, TTL).expect("only cut once").acquired().expect("it is free");
                let mut row = Some((granted.lock_id.clone(), granted.expires_at_ms));
                if call == "extend" {
                    cut();
                    let Ok(ExtendResult::Extended { expires_at_ms }) =
                        client.extend(&granted.lock_id, 2 * TTL)
                    else {
                        panic!("{key}: it is held")
                    };
                    row = Some((granted.lock_id.clone(), expires_at_ms));
                }
                if call == "release" {
                    cut();
                    match client.release(&granted.lock_id) {
                        Ok(ReleaseResult::Released) => {}
                        Err(error) if error.is_outcome_unknown() => unknown += 1,
                        other => panic!("{key}: {other:?}"),
                    }
                    row = None;
                }
                let over = tap.take_rule();
                let found = sql
                    .query_opt("SELECT lock_id, expires_at_ms FROM syncguard_locks WHERE key = $1", &[&key])
                    .unwrap()
                    .map(|row| (row.get(0), row.get(1)));
                assert_eq!(found, row, "{key}");
                if over {
                    break;
                }
                cuts += 1;
            }
        }
    }
    println!("over TLS: cut at {cuts} places, {unknown} releases unknown");
    assert!(cuts > 6 && unknown > 0);
}

#[test]
fn a_silent_server_over_tls() {
    let server = server();
    let warm = builder().connect_with(config(server.url()), tls()).unwrap();
    warm.is_locked("k").unwrap();
    let cold = builder().auto_create_tables(false).connect_with(config(server.url()), tls()).unwrap();
    let mut sql = server.client();
    let encrypted = "SELECT count(*) FROM pg_stat_ssl WHERE ssl";
    assert!(sql.query_one(encrypted, &[]).unwrap().get::<_, i64>(0) > 0, "nothing is encrypted");
    server.freeze();
    let words = ["NetworkTimeout", "did not answer", "time for this", "ServiceUnavailable"];
    all_in_time("a silent server behind open TLS connections", &warm, &words, false);
    all_in_time("a silent server behind new TLS connections", &cold, &words, false);
    ends_in_time("a silent server over TLS", warm);
    ends_in_time("a silent server over TLS", cold);
    server.thaw();
}
