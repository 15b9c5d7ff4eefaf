//! `sslmode` and what belongs to it, against certificates good and bad.

use openssl::hash::MessageDigest;
use syncguard::ErrorCode;

use crate::support::tls::{Request, give};
use crate::support::{LIMIT, binaries};
use crate::support::{Worker, logs, wait_until, worker};
use crate::world::{PASSWORD, World, connect, refused};

const MODES: [&str; 4] = ["prefer", "require", "verify-ca", "verify-full"];

#[test]
fn a_chain_to_a_trusted_authority_is_taken_and_the_connection_is_encrypted() {
    let world = World::new();
    let between = Request::new("between").authority().sign_by(&world.root);
    let served = Request::new("db.example").name("db.example").sign_by(&between);
    world.serve(&[served.pem(), between.pem()].concat(), &served.key_pem());
    for mode in MODES {
        let client = connect(&world.trusting(mode)).unwrap();
        assert!(client.try_lock("k").unwrap().is_some(), "{mode}");
        assert!(world.sessions().0 > 0 && world.sessions().1 == 0, "{mode}: {:?}", world.sessions());
        client.close(LIMIT).unwrap();
        wait_until(LIMIT, "the sessions have ended", || world.sessions() == (0, 0));
    }
    let plain = connect(&world.url("postgres", "sslmode=disable")).unwrap();
    assert_eq!(world.sessions().0, 0);
    drop(plain);
    // Without the one between it is a chain to nowhere.
    world.serve(&served.pem(), &served.key_pem());
    refused(&world.trusting("verify-full"));
}

#[test]
fn a_certificate_for_another_name_is_refused_by_verify_full_alone() {
    let world = World::new();
    let served = Request::new("db.example").name("other.example").name("10.0.0.1").sign_by(&world.root);
    world.serve(&served.pem(), &served.key_pem());
    let text = refused(&world.trusting("verify-full"));
    assert!(text.starts_with("ServiceUnavailable") && text.contains("TLS"), "{text}");
    connect(&world.trusting("verify-ca")).unwrap();
    let by_address = Request::new("any").name("127.0.0.1").sign_by(&world.root);
    world.serve(&by_address.pem(), &by_address.key_pem());
    refused(&world.trusting("verify-full"));
    let url = world.trusting("verify-full").replace("host=db.example ", "");
    connect(&url).expect("an address is a name, too");
}

#[test]
fn an_authority_that_nobody_knows_is_refused_wherever_one_is_named() {
    let world = World::new();
    let stranger = Request::new("the root").authority().sign_itself();
    let served = Request::new("db.example").name("db.example").sign_by(&stranger);
    world.serve(&[served.pem(), stranger.pem()].concat(), &served.key_pem());
    for mode in MODES {
        let text = refused(&world.trusting(mode));
        assert!(text.contains("certificate"), "{mode}: {text}");
    }
    connect(&world.url("postgres", "sslmode=require")).expect("nobody has asked who it is");
    let text = refused(&world.url("postgres", "sslmode=verify-full"));
    assert!(text.contains("sslrootcert=system"), "{text}");
    let text = refused(&world.url("postgres", "sslrootcert=system"));
    assert!(text.contains("certificate"), "{text}");
}

#[test]
fn an_expired_certificate_is_refused() {
    let world = World::new();
    let served = Request::new("db.example").name("db.example").expired().sign_by(&world.root);
    world.serve(&served.pem(), &served.key_pem());
    for mode in MODES {
        let text = refused(&world.trusting(mode)).to_lowercase();
        assert!(text.contains("expired"), "{mode}: {text}");
    }
    connect(&world.url("postgres", "sslmode=require")).unwrap();
}

#[test]
fn a_servers_own_certificate_may_be_what_is_trusted() {
    let world = World::new();
    let request = Request::new("db.example").name("db.example");
    for request in [request.clone(), request.clone().authority()] {
        let own = request.sign_itself();
        world.serve(&own.pem(), &own.key_pem());
        let file = world.file("own.pem", &own.pem());
        let trusting = |mode: &str| world.url("postgres", &format!("sslmode={mode} sslrootcert={file}"));
        for mode in MODES {
            connect(&trusting(mode)).unwrap();
        }
        refused(&trusting("verify-full").replace("db.example", "other.example"));
        // Somebody else's of the same name is not it.
        let other = request.sign_itself();
        world.serve(&other.pem(), &other.key_pem());
        refused(&trusting("verify-ca"));
        let over = request.clone().expired().sign_itself();
        world.serve(&over.pem(), &over.key_pem());
        world.file("own.pem", &over.pem());
        let text = refused(&trusting("verify-full")).to_lowercase();
        assert!(text.contains("expired"), "{text}");
    }
    // As PostgreSQL's manual makes one: without the names that it is for.
    let old = Request::new("db.example").authority().sign_itself();
    world.serve(&old.pem(), &old.key_pem());
    let file = world.file("own.pem", &old.pem());
    let url = world.url("postgres", &format!("sslmode=verify-full sslrootcert={file}"));
    connect(&url).unwrap();
    refused(&url.replace("db.example", "other.example"));
}

#[test]
fn a_certificate_that_is_trusted_and_no_authority_signs_nobody() {
    let world = World::new();
    let trusted = Request::new("web.example").name("web.example").sign_by(&world.root);
    let served = Request::new("db.example").name("db.example").sign_by(&trusted);
    world.serve(&[served.pem(), trusted.pem()].concat(), &served.key_pem());
    for (name, pem) in [("leaf.pem", trusted.pem()), ("both.pem", [trusted.pem(), world.root.pem()].concat())]
    {
        let file = world.file(name, &pem);
        refused(&world.url("postgres", &format!("sslmode=verify-full sslrootcert={file}")));
    }
}

#[test]
fn a_client_shows_its_certificate() {
    let world = World::new();
    let of = |request: Request| request.sign_by(&world.root);
    let own = of(Request::new("by_certificate"));
    let (certificate, key) = (world.file("own.crt", &own.pem()), world.file("own.key", &own.key_pem()));
    let with = |certificate: &str, key: &str| {
        world.trusting("verify-full").replace("user=postgres", "user=by_certificate")
            + &format!(" sslcert={certificate} sslkey={key}")
    };
    connect(&with(&certificate, &key)).unwrap();
    let text = refused(&world.trusting("verify-full").replace("user=postgres", "user=by_certificate"));
    assert!(text.starts_with("AuthFailed"), "{text}");
    let text = refused(&(with(&certificate, &key) + " sslcertmode=disable"));
    assert!(text.starts_with("AuthFailed"), "{text}");
    let other = of(Request::new("somebody_else"));
    let (other, other_key) =
        (world.file("other.crt", &other.pem()), world.file("other.key", &other.key_pem()));
    let text = refused(&with(&other, &other_key));
    assert!(text.starts_with("AuthFailed"), "{text}");
    let text = refused(&with(&certificate, &other_key));
    assert!(text.starts_with("InvalidArgument") && text.contains("sslkey"), "{text}");
    let stranger = Request::new("stranger").authority().sign_itself();
    let forged = Request::new("by_certificate").sign_by(&stranger);
    let (forged, forged_key) = (world.file("f.crt", &forged.pem()), world.file("f.key", &forged.key_pem()));
    let text = refused(&with(&forged, &forged_key));
    assert!(!text.starts_with("InvalidArgument"), "{text}");
    std::process::Command::new("chmod").args(["644", &key]).status().unwrap();
    let text = refused(&with(&certificate, &key));
    assert!(text.contains("chmod 600"), "{text}");
    let text = refused(&with("/nowhere.crt", &other_key));
    assert!(text.contains("the file of sslcert") && !text.contains("/nowhere"), "{text}");
}

#[test]
fn a_login_is_bound_to_the_servers_certificate() {
    let world = World::new();
    for digest in [MessageDigest::sha256(), MessageDigest::sha384(), MessageDigest::sha512()] {
        let served = Request::new("db.example").name("db.example").digest(digest).sign_by(&world.root);
        world.serve(&served.pem(), &served.key_pem());
        for binding in ["require", "prefer", "disable"] {
            // Not every library can check a signature over SHA-512 with such a key, so who signed is not asked.
            let more = format!("sslmode=require password={PASSWORD} channel_binding={binding}");
            connect(&world.url("by_password", &more)).unwrap();
        }
    }
    let more = format!(" password={PASSWORD} channel_binding=require");
    let served = Request::new("db.example").name("db.example").sign_by(&world.root);
    world.serve(&served.pem(), &served.key_pem());
    connect(&(world.trusting("verify-full").replace("user=postgres", "user=by_password") + &more)).unwrap();
    // Whom the server trusts without a password has bound nothing.
    let text = refused(&(world.trusting("verify-full") + " channel_binding=require"));
    assert!(text.contains("channel_binding"), "{text}");
}

#[test]
fn tls_from_the_first_byte_works_where_the_server_has_it() {
    let world = World::new();
    let url = world.trusting("verify-full") + " sslnegotiation=direct";
    if binaries::binaries().version.0 >= 17 {
        let client = connect(&url).unwrap();
        assert!(world.sessions().0 > 0);
        drop(client);
    } else {
        let text = refused(&url);
        assert!(text.starts_with("ServiceUnavailable"), "{text}");
    }
    let text = refused(&world.url("postgres", "sslmode=prefer sslnegotiation=direct"));
    assert!(text.starts_with("InvalidArgument"), "{text}");
}

#[test]
fn prefer_says_what_it_has_become_and_require_never_becomes_plain_text() {
    let world = World::new();
    let mark = logs::exclusive();
    let told = |text: &str| {
        let lines = mark.of_this_thread().into_iter().chain(mark.lines());
        lines.filter(|line| line.level == log::Level::Info && line.text.contains(text)).count() > 0
    };
    let client = connect(&world.url("postgres", "sslmode=prefer")).unwrap();
    assert!(told("connections are encrypted"), "{:#?}", mark.lines());
    assert!(!told("not encrypted"));
    drop(client);
    world.server.configure("ssl", "off");
    connect(&world.url("postgres", "")).unwrap();
    assert!(told("connections are not encrypted"));
    for mode in ["require", "verify-ca", "verify-full"] {
        let text = refused(&world.trusting(mode));
        assert!(
            text.starts_with("ServiceUnavailable") && text.contains("does not offer TLS"),
            "{mode}: {text}"
        );
    }
}

#[test]
fn the_versions_of_tls_are_those_that_were_asked_for() {
    let world = World::new();
    world.server.configure("ssl_max_protocol_version", "TLSv1.2");
    connect(&world.trusting("verify-full")).unwrap();
    refused(&(world.trusting("verify-full") + " ssl_min_protocol_version=TLSv1.3"));
    world.server.configure("ssl_max_protocol_version", "");
    world.server.configure("ssl_min_protocol_version", "TLSv1.3");
    connect(&(world.trusting("verify-full") + " ssl_min_protocol_version=TLSv1.3")).unwrap();
    refused(&(world.trusting("verify-full") + " ssl_max_protocol_version=TLSv1.2"));
}

#[test]
fn certificates_that_are_replaced_while_a_client_lives_are_noticed() {
    let world = World::new();
    let url = world.trusting("verify-full");
    let client = connect(&url).unwrap();
    let new = Request::new("the new root").authority().sign_itself();
    let served = Request::new("db.example").name("db.example").sign_by(&new);
    let end_sessions = || {
        let sql =
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'syncguard'";
        world.server.client().execute(sql, &[]).unwrap();
        wait_until(LIMIT, "the sessions have ended", || world.sessions() == (0, 0));
    };
    world.file("root.pem", b"half of a file");
    end_sessions();
    client.is_locked("k").expect("what was read before is used until the new one is whole");
    world.serve(&served.pem(), &served.key_pem());
    end_sessions();
    assert_eq!(client.is_locked("k").unwrap_err().code(), ErrorCode::ServiceUnavailable);
    world.file("root.pem", &new.pem());
    client.is_locked("k").expect("the new authority is known");
}

#[test]
fn the_environment_says_how_to_encrypt() {
    worker::part("client", |parent| {
        let answer = connect(&parent.arg("url"))
            .map_or_else(|error| format!("{:?}", error.code()), |_| "connected".into());
        parent.say(&answer);
    });
    let world = World::new();
    let name = "the_environment_says_how_to_encrypt";
    let root = world.file("root.pem", &world.root.pem());
    let plain = world.url("postgres", "");
    let start = |url: &str, variables: &[(&str, &str)]| {
        Worker::start_alone_with(name, "client", &[("url", url)], variables).hear()
    };
    assert_eq!(start(&plain, &[("PGSSLMODE", "verify-full"), ("PGSSLROOTCERT", &root)]), "connected");
    let other = plain.replace("db.example", "other.example");
    assert_eq!(
        start(&other, &[("PGSSLMODE", "verify-full"), ("PGSSLROOTCERT", &root)]),
        "ServiceUnavailable"
    );
    assert_eq!(start(&plain, &[("PGSSLMODE", "verify-full")]), "InvalidArgument");
    let by_system = plain.clone() + "sslrootcert=system";
    assert_eq!(start(&by_system, &[("SSL_CERT_FILE", &root)]), "connected");
    world.server.configure("ssl", "off");
    assert_eq!(start(&plain, &[("PGSSLMODE", "require")]), "ServiceUnavailable");
    assert_eq!(start(&(plain + "sslmode=disable"), &[("PGSSLMODE", "require")]), "connected");
}

#[test]
fn a_cancel_request_is_encrypted_as_well() {
    let world = World::new();
    // Whoever comes without TLS is turned away, cancel requests included.
    let hba = "local all all trust\nhostssl all all 127.0.0.1/32 trust\n";
    give(&world.server, "pg_hba.conf", hba.as_bytes());
    world.server.configure("ssl", "on");
    let client = connect(&world.trusting("verify-full")).unwrap();
    let mut holder = postgres::Client::connect(world.server.socket_url(), postgres::NoTls).unwrap();
    holder.batch_execute("BEGIN; LOCK TABLE syncguard_locks").unwrap();
    let token = syncguard::CancelToken::new();
    let waiting = {
        let client = client.cancellable(&token);
        std::thread::spawn(move || client.acquire("k", LIMIT))
    };
    let mut sql = postgres::Client::connect(world.server.socket_url(), postgres::NoTls).unwrap();
    let text = "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE NOT l.granted AND a.application_name = 'syncguard'";
    let mut blocked = || sql.query_one(text, &[]).unwrap().get::<_, i64>(0);
    wait_until(LIMIT, "the call waits for the table", || blocked() > 0);
    token.cancel();
    assert_eq!(waiting.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
    wait_until(LIMIT, "the server has given up, too", || blocked() == 0);
    holder.batch_execute("COMMIT").unwrap();
}
