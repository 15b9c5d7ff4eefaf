//! PgBouncer before a server. Debian's package has version 1.18, which knows nothing of
//! prepared statements in transaction mode.
//!
//! Needs `pgbouncer`, which `scripts/test` installs.

#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::account::Account;
use super::wait::{LIMIT, wait_until};

pub struct Bouncer {
    process: Child,
    dir: PathBuf,
    port: u16,
}

impl Bouncer {
    /// Before the shared server, in transaction mode with four server connections, unless these settings
    /// say otherwise. It refuses startup parameters other than those that `ignore_startup_parameters` names.
    pub fn start(settings: &[(&str, &str)]) -> Self {
        Self::before(super::server().port(), settings)
    }

    /// The same before the server on this local port.
    pub fn before(server: u16, settings: &[(&str, &str)]) -> Self {
        let program = [
            "/usr/sbin/pgbouncer",
            "/usr/bin/pgbouncer",
            "/usr/local/bin/pgbouncer",
            "/opt/homebrew/bin/pgbouncer",
        ];
        let program = program.iter().find(|path| Path::new(path).is_file());
        let program =
            program.expect("pgbouncer is not installed: apt-get install pgbouncer, or run scripts/test");
        let account = Account::find().unwrap();
        let dir = account.temp_dir().unwrap().join(format!("syncguard-bouncer-{}", super::unique()));
        let made = account.command("mkdir").arg(&dir).status().unwrap();
        assert!(made.success());
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut text = format!(
            "[databases]\n* = host=127.0.0.1 port={server} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = any\nmax_client_conn = 200\nlogfile = {}\n",
            dir.join("log").display()
        );
        let defaults = [("pool_mode", "transaction"), ("default_pool_size", "4")];
        let unset = defaults.iter().filter(|(name, _)| !settings.iter().any(|(other, _)| other == name));
        for (name, value) in unset.chain(settings) {
            let _ = writeln!(text, "{name} = {value}");
        }
        let ini = dir.join("ini");
        fs::write(&ini, text).unwrap();
        let mut command = account.command(program);
        command.arg(&ini).current_dir("/").stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().unwrap();
        wait_until(LIMIT, "pgbouncer takes connections", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        Self { process, dir, port }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The search path cannot be chosen through a pooler: the builder's `schema` is.
    pub fn url(&self) -> String {
        format!("user=postgres dbname=postgres host=127.0.0.1 port={}", self.port)
    }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = Command::new("rm").arg("-rf").arg(&self.dir).status();
    }
}
