//! TLS and passwords, by URL and by libpq's variables.

use crate::Done;
use crate::program::{Dir, bare, told};
use crate::support::tls::{Request, use_certificate, write_private};
use crate::support::{Config, Server};

#[test]
fn a_server_is_reached_encrypted_by_url_and_by_variables() -> Done {
    let (server, dir) = (Server::start(&Config::new()), Dir::new());
    let own = Request::new("db.example").name("db.example").sign_itself();
    use_certificate(&server, &own.pem(), &own.key_pem());
    server.configure("ssl", "on");
    let trusted = write_private(&dir.path("trusted.pem"), &own.pem());
    let other = write_private(&dir.path("other.pem"), &Request::new("other").authority().sign_itself().pem());
    let mut admin = server.client();
    admin.batch_execute("CREATE ROLE app LOGIN PASSWORD 'MARKER-pass'; GRANT ALL ON SCHEMA public TO app")?;
    let hba = "local all all trust\nhost all postgres 127.0.0.1/32 trust\nhostssl all app 127.0.0.1/32 scram-sha-256\n";
    std::fs::write(server.data_dir().join("pg_hba.conf"), hba)?;
    admin.batch_execute("SELECT pg_reload_conf()")?;
    let passfile = write_private(&dir.path("pass"), b"*:*:*:app:MARKER-pass\n");

    let port = server.port();
    let url = |root: &std::path::Path| {
        let root = root.display();
        format!(
            "postgresql://app@db.example:{port}/postgres?hostaddr=127.0.0.1&sslmode=verify-full&sslrootcert={root}"
        )
    };
    let set_up = |url: &str| {
        told(&bare().args(["setup", "--url", url]).env("PGPASSFILE", &passfile).output().unwrap())
    };
    let (code, out, err) = set_up(&url(&trusted));
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    let (code, out, err) = set_up(&url(&other));
    assert!(code == 69 && out.is_empty() && !err.contains("MARKER"), "{code} {out} {err}");

    let mut command = bare();
    let variables = [
        ("PGHOST", "db.example".to_owned()),
        ("PGHOSTADDR", "127.0.0.1".to_owned()),
        ("PGPORT", port.to_string()),
        ("PGDATABASE", "postgres".to_owned()),
        ("PGUSER", "app".to_owned()),
        ("PGPASSFILE", passfile.display().to_string()),
        ("PGSSLMODE", "verify-full".to_owned()),
        ("PGSSLROOTCERT", trusted.display().to_string()),
    ];
    let (code, out, err) = told(&command.args(["status", "k"]).envs(variables).output()?);
    assert_eq!((code, out.as_str(), err.as_str()), (1, "k is free\n", ""));
    Ok(())
}
