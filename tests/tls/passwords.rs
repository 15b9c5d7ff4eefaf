//! Passwords from the passfile and the environment, and clients that the environment describes.

use std::fs;
use std::process::Command;

use syncguard::{ErrorCode, PgLockClient};

use crate::support::tls::write_private;
use crate::support::{Config, Server, Worker, logs, worker};

const PASSWORD: &str = "MARKER:it's";

/// A server that wants a password of everybody but its superuser.
fn server() -> Server {
    let server = Server::start(&Config::new().set("password_encryption", "scram-sha-256"));
    // As in `World::with`, nothing is logged of it.
    PgLockClient::connect(&format!("{}?sslmode=disable", server.url())).unwrap();
    let quoted = PASSWORD.replace('\'', "''");
    let sql =
        format!("CREATE ROLE app LOGIN PASSWORD '{quoted}'; GRANT ALL ON ALL TABLES IN SCHEMA public TO app");
    server.client().batch_execute(&sql).unwrap();
    let hba = "local all postgres trust\nlocal all all scram-sha-256\nhost all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n";
    fs::write(server.data_dir().join("pg_hba.conf"), hba).unwrap();
    server.configure("log_connections", "on");
    server
}

fn connect(url: &str) -> Result<(), ErrorCode> {
    let client = PgLockClient::builder().auto_create_tables(false).connect(url);
    client.and_then(|client| client.is_locked("k")).map(|_| ()).map_err(|error| error.code())
}

#[test]
fn a_password_comes_from_the_line_of_the_passfile_for_this_server() {
    let server = server();
    let port = server.port();
    let escaped = PASSWORD.replace(':', r"\:");
    let file = server.dir().join("passfile");
    let named = file.display().to_string();
    let tcp = format!("host=127.0.0.1 port={port} dbname=postgres user=app sslmode=disable passfile={named}");
    let socket =
        format!("host={} port={port} dbname=postgres user=app passfile={named}", server.dir().display());
    write_private(&file, format!("other:*:*:*:wrong\n127.0.0.1:{port}:postgres:app:{escaped}\n").as_bytes());
    assert_eq!(connect(&tcp), Ok(()));
    assert_eq!(connect(&socket), Err(ErrorCode::AuthFailed), "the line is for the address");
    let both = tcp.replace("host=127.0.0.1", "host=127.0.0.2,127.0.0.1");
    assert_eq!(connect(&both), Ok(()), "each host has its own line");
    write_private(&file, format!("{}:{port}:*:app:{escaped}\n", server.dir().display()).as_bytes());
    assert_eq!(connect(&socket), Ok(()));
    assert_eq!(connect(&tcp), Err(ErrorCode::AuthFailed));
    write_private(&file, format!("*:*:*:*:wrong\n*:*:*:app:{escaped}\n").as_bytes());
    assert_eq!(connect(&tcp), Err(ErrorCode::AuthFailed), "the first line that fits counts");
    assert_eq!(connect(&format!("{tcp} password='{}'", PASSWORD.replace('\'', r"\'"))), Ok(()));
}

#[test]
fn a_passfile_that_others_can_read_is_ignored_and_that_is_said_once() {
    let server = server();
    let file = server.dir().join("passfile");
    write_private(&file, format!("*:*:*:app:{}\n", PASSWORD.replace(':', r"\:")).as_bytes());
    let url = format!(
        "host=127.0.0.1 port={} dbname=postgres user=app sslmode=disable passfile={}",
        server.port(),
        file.display()
    );
    assert!(Command::new("chmod").arg("640").arg(&file).status().unwrap().success());
    let mark = logs::exclusive();
    let client = PgLockClient::builder().auto_create_tables(false).connect(&url).unwrap();
    for _ in 0..2 {
        assert_eq!(client.is_locked("k").unwrap_err().code(), ErrorCode::AuthFailed);
    }
    let warned =
        mark.lines().into_iter().filter(|line| line.text.contains("the passfile is ignored")).count();
    assert_eq!(warned, 1, "{:#?}", mark.lines());
    mark.assert_without(&["MARKER", "passfile=", "app"]);
    assert!(Command::new("chmod").arg("600").arg(&file).status().unwrap().success());
    client.is_locked("k").expect("it is read anew for each connection");
}

#[test]
fn the_environment_has_a_password_and_where_it_is_alone_everything_else() {
    worker::part("client", |parent| {
        let url = parent.arg("url");
        let builder = PgLockClient::builder().auto_create_tables(false);
        let client = if url.is_empty() { builder.connect_env() } else { builder.connect(&url) };
        let answer = client.and_then(|client| client.is_locked("k"));
        parent.say(&answer.map_or_else(|error| format!("{:?}", error.code()), |_| "connected".into()));
    });
    let server = server();
    let (port, dir) = (server.port().to_string(), server.dir().display().to_string());
    let start = |url: &str, variables: &[(&str, &str)]| {
        let name = "the_environment_has_a_password_and_where_it_is_alone_everything_else";
        Worker::start_alone_with(name, "client", &[("url", url)], variables).hear()
    };
    let url = format!("postgresql://app@127.0.0.1:{port}/postgres");
    assert_eq!(start(&url, &[("PGPASSWORD", PASSWORD)]), "connected");
    assert_eq!(start(&url, &[("PGPASSWORD", "wrong")]), "AuthFailed");
    // Where to connect to is said by whoever gives a string.
    let elsewhere =
        [("PGPASSWORD", PASSWORD), ("PGHOST", "192.0.2.1"), ("PGPORT", "1"), ("PGUSER", "nobody")];
    assert_eq!(start(&url, &elsewhere), "connected");
    let home = server.dir().join("home");
    fs::create_dir(&home).unwrap();
    write_private(
        &home.join(".pgpass"),
        format!("127.0.0.1:*:*:app:{}", PASSWORD.replace(':', r"\:")).as_bytes(),
    );
    let home = home.display().to_string();
    assert_eq!(start(&url, &[("HOME", &home)]), "connected");
    let named = format!("{home}/.pgpass");
    assert_eq!(start(&url, &[("PGPASSFILE", &named)]), "connected");
    assert_eq!(start(&url, &[("HOME", &home), ("PGPASSFILE", "/nowhere")]), "AuthFailed");

    let all = |host| {
        [
            ("PGHOST", host),
            ("PGPORT", &*port),
            ("PGUSER", "app"),
            ("PGDATABASE", "postgres"),
            ("PGPASSWORD", PASSWORD),
        ]
    };
    assert_eq!(start("", &all("127.0.0.1")), "connected");
    assert_eq!(start("", &all(&dir)), "connected");
    let with_service = [&all(&dir)[..], &[("PGSERVICE", "s")]].concat();
    assert_eq!(start("", &with_service), "InvalidArgument");
    let with_demand = [&all(&dir)[..], &[("PGREQUIREAUTH", "scram-sha-256")]].concat();
    assert_eq!(start("", &with_demand), "InvalidArgument");
}
